"""Who holds what: the boxes of a rank by mesh and placements, and the replica group of every box.

    Mesh     which rectangles of a global tensor a rank's local tensor holds
    Boxes    the same for a rank that describes its own
    World    from the structures of all ranks to who holds which box

A *replica group* is the ranks that hold the same box of the same tensor, ascending. Within one `World` equal groups are
one and the same tuple object.

A strided placement is interpreted as its makers do. FSDP2 over tensor parallelism writes ``[strided(dim, split),
shard(dim)]`` for "first cut by the right one, then by the left one"; ``split`` is the number of pieces made by the
placements that cut first. If the numbers match (`_cutting_order`), cuts are applied in that order, which also holds for
sizes that don't divide evenly. A strided placement not explained by others to its right is applied as it stands: cut
into ``split`` pieces, each of them into ``mesh size`` pieces; coordinate ``i`` takes the ``i``-th of each. Both
interpretations agree if sizes divide evenly.

Guarantees: pure and torch-free. For one layout the boxes of all mesh coordinates that differ on a sharding mesh
dimension tile the tensor exactly, whatever its shape; cost grows with the number of boxes, never with their volume.
Names that ranks disagree on are refused as soon as a `World` is made; the boxes that `World.held_by` gives out over all
ranks tile each tensor exactly, or it raises. What a rank asks costs what that rank holds: a tensor whose ranks all
describe it alike (every SPMD job) is settled by the arithmetic of its mesh.
Assumes: `torch.chunk`'s rule for a shard (pieces of ``ceil(size / parts)``, the last ones shorter or empty). Digests
name structures that are equal exactly when the digests are.
Does not: check that a real local tensor has `local_shape` (``state.structure`` does); decide who writes
(``plan.write`` does).
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from holdfast.boxes import Box, contains, first_defect, strides, whole
from holdfast.errors import ConfigError, StateMismatch
from holdfast.format.structure import (
    PER_RANK,
    BoxLayout,
    MeshLayout,
    ObjectSpec,
    Structure,
    TensorSpec,
    is_per_rank,
    name_on_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from holdfast.format.structure import Layout, Placement

Run = tuple[int, int]
"""Start and stop of consecutive indices of one dimension."""
Carriers = tuple[tuple[int, int | None], ...]
"""(structure number, index of the layout there) for each structure that has a tensor."""
_RANK_STEM = PER_RANK.rstrip("*")


class Mesh:
    """A checked `MeshLayout`, indexed to tell who holds what. Make one per layout: it indexes every rank."""

    __slots__ = ("_at", "_cuts", "_shard_dims", "_steps", "layout")

    def __init__(self, layout: MeshLayout, *, world: int) -> None:
        """Raises `ConfigError` if the layout contradicts itself or names a rank outside 0..world-1."""
        if len(layout.ranks) != prod(layout.shape) or len(layout.placements) != len(layout.shape):
            raise ConfigError(
                f"mesh of shape {layout.shape} has {len(layout.ranks)} ranks and {len(layout.placements)} placements; "
                f"expected {prod(layout.shape)} and {len(layout.shape)}"
            )
        self.layout = layout
        self._at = {rank: flat for flat, rank in enumerate(layout.ranks) if rank >= 0}
        if len(self._at) != sum(rank >= 0 for rank in layout.ranks) or any(rank >= world for rank in self._at):
            raise ConfigError(
                f"mesh of shape {layout.shape} names a rank twice, or one outside the group of {world} ranks"
            )
        self._steps = strides(layout.shape)
        self._shard_dims = tuple(m for m, p in enumerate(layout.placements) if p.kind != "replicate")
        by_dim: dict[int, list[int]] = {}
        for mesh_dim in self._shard_dims:
            by_dim.setdefault(layout.placements[mesh_dim].dim, []).append(mesh_dim)
        self._cuts = {dim: _cutting_order(layout, mesh_dims) for dim, mesh_dims in by_dim.items()}

    def __contains__(self, rank: int) -> bool:
        return rank in self._at

    @property
    def ranks(self) -> AbstractSet[int]:
        """Ranks of the group on this mesh."""
        return self._at.keys()

    @property
    def sharded_dims(self) -> AbstractSet[int]:
        """The tensor dimensions that are cut."""
        return self._cuts.keys()

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return self._coordinates(self._at[rank])

    def _coordinates(self, flat: int) -> tuple[int, ...]:
        return tuple(flat // step % size for step, size in zip(self._steps, self.layout.shape, strict=True))

    def replicas(self, coordinates: Sequence[int]) -> list[int]:
        """Return the ranks whose coordinates equal ``coordinates`` on every sharding dimension, ascending; skips -1."""
        choices = [
            (coordinates[m],) if m in self._shard_dims else range(size) for m, size in enumerate(self.layout.shape)
        ]
        ranks = self.layout.ranks
        flats = (sum(c * step for c, step in zip(point, self._steps, strict=True)) for point in product(*choices))
        return sorted(rank for rank in (ranks[flat] for flat in flats) if rank >= 0)

    def shard_points(self) -> list[tuple[int, ...]]:
        """Return one coordinate for each combination on the sharding dimensions: all that hold different parts."""
        return list(
            product(*(range(size) if m in self._shard_dims else (0,) for m, size in enumerate(self.layout.shape)))
        )

    def boxes_at(self, shape: tuple[int, ...], coordinates: Sequence[int]) -> list[tuple[Box, tuple[int, ...]]]:
        """Return the boxes of a tensor of ``shape`` that the local tensor at ``coordinates`` holds: (global box, local
        offsets).

        In row-major order of the local tensor; none if it is empty. Raises `ConfigError` for a sharded dimension that
        ``shape`` has not.
        """
        if not self._cuts:
            box = whole(shape)
            return [(box, box.offsets)] if box.volume else []
        by_dim = self._runs(shape, coordinates)
        offsets: list[tuple[int, ...]] = []
        for dim_runs in by_dim:
            starts = [0]
            for start, stop in dim_runs:
                starts.append(starts[-1] + stop - start)
            offsets.append(tuple(starts[:-1]))
        return [
            (Box(tuple(start for start, _ in runs), tuple(stop - start for start, stop in runs)), local)
            for runs, local in zip(product(*by_dim), product(*offsets), strict=True)
        ]

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s local tensor, including empty dimensions. Raises as `boxes_at`."""
        by_dim = self._runs(shape, self.coordinates(rank))
        return tuple(sum(stop - start for start, stop in dim_runs) for dim_runs in by_dim)

    def _runs(self, shape: tuple[int, ...], coordinates: Sequence[int]) -> list[list[Run]]:
        by_dim: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
        for dim, (order, strided) in self._cuts.items():
            if not 0 <= dim < len(shape):
                raise ConfigError(f"placement shards dimension {dim} of a tensor of shape {shape}")
            taken = by_dim[dim]
            for mesh_dim in order:
                placement = self.layout.placements[mesh_dim]
                split = placement.split if strided and placement.kind == "strided" else 1
                taken = _cut(taken, split=split, parts=self.layout.shape[mesh_dim], index=coordinates[mesh_dim])
            by_dim[dim] = taken
        return by_dim


class Boxes:
    """A checked `BoxLayout`: what one rank holds, box by box, each in memory of its own."""

    __slots__ = ("_boxes", "_rank", "layout")

    def __init__(self, layout: BoxLayout, *, world: int) -> None:
        """Raises `ConfigError` if the layout names a rank outside 0..world-1."""
        if not 0 <= layout.rank < world:
            raise ConfigError(f"boxes of rank {layout.rank}, which is outside the group of {world} ranks")
        self.layout = layout
        self._rank = layout.rank
        self._boxes = [Box(offsets, sizes) for offsets, sizes in layout.boxes]

    @property
    def ranks(self) -> AbstractSet[int]:
        """The rank that describes itself."""
        return {self._rank}

    def replicas(self, coordinates: Sequence[int]) -> list[int]:
        """Return the rank: who else holds the same, the others know."""
        del coordinates
        return [self._rank]

    def shard_points(self) -> list[tuple[int, ...]]:
        """Return the only place that there is."""
        return [()]

    def boxes_at(self, shape: tuple[int, ...], coordinates: Sequence[int]) -> list[tuple[Box, tuple[int, ...]]]:
        """Return the boxes that have elements, and where they begin in their own memory.

        Raises `ConfigError` for one that isn't within ``shape``.
        """
        del coordinates
        for box in self._boxes:
            if not contains(whole(shape), box):
                raise ConfigError(f"rank {self._rank} holds {box} of a tensor of shape {list(shape)}")
        return [(box, (0,) * len(shape)) for box in self._boxes if box.volume]

    def number_of(self, box: Box) -> int:
        """Return which of the rank's boxes it is."""
        return self._boxes.index(box)


def local_boxes(shape: tuple[int, ...], layout: MeshLayout, rank: int) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the boxes of a tensor of ``shape`` that ``rank`` holds, each with its offsets in the local tensor.

    Usually one; a strided placement may make several; none for an empty local tensor or a rank outside the mesh. For
    many tensors make one `Mesh` per layout and use its `boxes_at`.
    """
    mesh = Mesh(layout, world=max(layout.ranks, default=-1) + 1)
    return mesh.boxes_at(shape, mesh.coordinates(rank)) if rank in mesh else []


def local_shape(shape: tuple[int, ...], layout: MeshLayout, rank: int) -> tuple[int, ...]:
    """Return the shape that ``rank``'s local tensor must have for `local_boxes` to be right; ``(0,)`` outside the mesh.

    If it has no elements, a real local tensor must have none either, but may have other sizes, as FSDP2 makes them.
    """
    mesh = Mesh(layout, world=max(layout.ranks, default=-1) + 1)
    return mesh.local_shape(shape, rank) if rank in mesh else (0,)


def _cutting_order(layout: MeshLayout, mesh_dims: list[int]) -> tuple[list[int], bool]:
    """Return the order in which ``mesh_dims``, all sharding one tensor dimension, cut it; True if strided cuts remain.

    From right to left, each placement is put after as many of the cuts found so far as make ``split`` pieces: none for
    a plain shard. If some split fits nowhere, the placements are applied as they stand.
    """
    order: list[int] = []
    for mesh_dim in reversed(mesh_dims):
        placement: Placement = layout.placements[mesh_dim]
        wanted = placement.split if placement.kind == "strided" else 1
        pieces = 1
        position = 0
        while pieces < wanted and position < len(order):
            pieces *= layout.shape[order[position]]
            position += 1
        if pieces != wanted:
            return list(mesh_dims), True
        order.insert(position, mesh_dim)
    return order, False


def _cut(runs: list[Run], *, split: int, parts: int, index: int) -> list[Run]:
    """Cut the indices in ``runs`` into ``split`` chunks, each into ``parts``; take the ``index``-th of each chunk."""
    length = sum(stop - start for start, stop in runs)
    taken: list[Run] = []
    for piece_start, piece_stop in (_chunk(length, split, i) for i in range(split)):
        start, stop = _chunk(piece_stop - piece_start, parts, index)
        if start < stop:
            _take(runs, piece_start + start, piece_start + stop, taken)
    return taken


def _chunk(length: int, parts: int, index: int) -> Run:
    size = -(-length // parts)
    return min(size * index, length), min(size * (index + 1), length)


def _take(runs: list[Run], start: int, stop: int, taken: list[Run]) -> None:
    """Append to ``taken`` the ``start``-th to ``stop``-th of the indices in ``runs``, joining what touches."""
    passed = 0
    for run_start, run_stop in runs:
        first = max(start - passed, 0) + run_start
        last = min(stop - passed, run_stop - run_start) + run_start
        if first < last:
            if taken and taken[-1][1] == first:
                taken[-1] = (taken[-1][0], last)
            else:
                taken.append((first, last))
        passed += run_stop - run_start
        if passed >= stop:
            return


class Held(NamedTuple):
    """A box that a rank holds: where it lies in the whole and in the local tensor, and who else holds it."""

    box: Box
    local_offsets: tuple[int, ...]
    group: tuple[int, ...]
    number: int = 0
    """Which of the tensors that the rank keeps its boxes in."""


class World:
    """The structures of all ranks of a group, indexed by who holds what."""

    def __init__(self, structures: Mapping[str, Structure], digests: Sequence[str]) -> None:
        """Raises `StateMismatch` where ranks disagree on a name, `ConfigError` for a digest without a structure."""
        if not digests:
            raise ConfigError("a plan needs at least one rank", field="digests")
        self._members: list[list[int]] = []
        self._structures: list[Structure] = []
        self._number: list[int] = []
        numbers: dict[str, int] = {}
        for rank, digest in enumerate(digests):
            number = numbers.setdefault(digest, len(numbers))
            if number == len(self._structures):
                if digest not in structures:
                    raise ConfigError(
                        f"rank {rank} announced structure {digest}, which no rank has sent", field="digests"
                    )
                self._structures.append(structures[digest])
                self._members.append([])
            self._members[number].append(rank)
            self._number.append(number)
        meshes: dict[Layout, Mesh | Boxes] = {}  # equal layouts are one mesh: told apart by identity from here on
        self._meshes = [[self._mesh(layout, meshes) for layout in item.layouts] for item in self._structures]
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._present: dict[tuple[int, ...], list[int]] = {}
        self._shares: dict[tuple[Carriers, tuple[int, ...]], _Share] = {}
        self._carriers: dict[str, Carriers] = {}
        self._object_writers: dict[str, int] = {}
        if len(self._structures) > 1:
            self._compare()
        self._refuse_taken()

    def structure_of(self, rank: int) -> Structure:
        return self._structures[self._number[rank]]

    def is_first(self, rank: int) -> bool:
        """Return True if no lower rank has the same structure."""
        return self._members[self._number[rank]][0] == rank

    def object_writer(self, name: str) -> int:
        """The lowest rank that holds the object ``name`` (of a name that isn't per rank)."""
        return self._object_writers.get(name, 0)

    def held_by(self, rank: int) -> Callable[[TensorSpec], list[Held]]:
        """A function that gives the boxes of a tensor (one that isn't per rank) that ``rank`` holds.

        A tensor without elements is one box of its whole shape, held by the lowest rank that has it. The function
        raises `StateMismatch` or `ConfigError` where the shards of all ranks don't tile the tensor.
        """
        known: dict[tuple[Carriers | int | None, tuple[int, ...]], list[Held]] = {}

        def held(spec: TensorSpec) -> list[Held]:
            carriers = self._carriers.get(spec.name)
            key = (carriers or spec.layout, spec.shape)
            boxes = known.get(key)
            if boxes is None:
                carriers = carriers or ((0, spec.layout),)
                share = self._shares.get((carriers, spec.shape))
                if share is None:
                    share = self._shares[carriers, spec.shape] = self._share(spec, carriers)
                boxes = known[key] = share(rank)
            return boxes

        return held

    # What ranks must agree on ----------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Find for each name the structures that have it, and that they mean the same by it."""
        first: dict[str, tuple[int, TensorSpec]] = {}
        carriers: dict[str, list[tuple[int, int | None]]] = {}
        for number, structure in enumerate(self._structures):
            for spec in structure.tensors:
                known = first.setdefault(spec.name, (number, spec))
                if known[1] is not spec:
                    self._agree(*known, number, spec)
                carriers.setdefault(spec.name, []).append((number, spec.layout))
        shared: dict[Carriers, Carriers] = {}
        for name, entries in carriers.items():
            found = tuple(entries)
            self._carriers[name] = shared.setdefault(found, found)  # few distinct ones: hashed and compared cheaply
        for number, structure in enumerate(self._structures):
            for item in structure.objects:
                if item.name in first:
                    other = first[item.name][0]
                    raise StateMismatch(
                        f"{item.name!r} is an object on {self._ranks_of(number)} and a tensor on "
                        f"{self._ranks_of(other)}: give the two different names",
                        mismatched=(item.name,),
                    )
                self._object_writers.setdefault(item.name, self._members[number][0])

    def _refuse_taken(self) -> None:
        """A per-rank name that carries its rank must not be what another value is called already."""
        per_rank: list[tuple[int, TensorSpec | ObjectSpec]] = []
        names: set[str] = set()
        for number, structure in enumerate(self._structures):
            items: list[TensorSpec | ObjectSpec] = [*structure.tensors, *structure.objects]
            for item in items:
                if is_per_rank(item.path):
                    per_rank.append((number, item))
                elif _RANK_STEM in item.name:
                    names.add(item.name)
        if names:
            for number, item in per_rank:
                for rank in self._members[number]:
                    if name_on_rank(item.path, rank) in names:
                        raise StateMismatch(
                            f"{item.name!r} is a per-rank value, but the name under which rank {rank} would store it, "
                            f"{name_on_rank(item.path, rank)!r}, is also the name of another value: rename one",
                            mismatched=(item.name,),
                        )

    def _agree(self, number: int, spec: TensorSpec, other_number: int, other: TensorSpec) -> None:
        if is_per_rank(spec.path) and is_per_rank(other.path):
            return
        here = self._mesh_of(number, spec.layout)
        there = self._mesh_of(other_number, other.layout)
        if (spec.shape, spec.dtype, spec.path) == (other.shape, other.dtype, other.path) and (
            here is there or (here is not None and there is not None and here.ranks != there.ranks)
        ):
            return
        raise StateMismatch(
            f"tensor {spec.name!r} differs between ranks: it is {_describe(spec, here)} on {self._ranks_of(number)}, "
            f"{_describe(other, there)} on {self._ranks_of(other_number)}. Equal names mean pieces or replicas of one "
            "value: make them equal, or wrap per-rank values in holdfast.PerRank",
            mismatched=(spec.name,),
        )

    def _ranks_of(self, number: int) -> str:
        return _spell(self._members[number])

    # Replica groups --------------------------------------------------------------------------------------------

    def _share(self, spec: TensorSpec, carriers: Carriers) -> _Share:
        present = self._ranks_with(tuple(number for number, _ in carriers))
        everything = whole(spec.shape)
        if not everything.volume:
            return _Same(Held(everything, everything.offsets, self._group(present[:1])), frozenset(present[:1]))
        numbers: dict[Mesh | Boxes | None, list[int]] = {}
        for number, index in carriers:
            numbers.setdefault(self._mesh_of(number, index), []).append(number)
        if None in numbers:
            return _Same(Held(everything, everything.offsets, self._group(present)), frozenset(present))
        meshes = [
            (mesh, frozenset(self._ranks_with(tuple(having)))) for mesh, having in numbers.items() if mesh is not None
        ]
        for mesh, _ in meshes:
            if isinstance(mesh, Mesh) and not all(0 <= dim < len(spec.shape) for dim in mesh.sharded_dims):
                raise ConfigError(
                    f"tensor {spec.name!r} of shape {list(spec.shape)} can't be sharded on dimensions "
                    f"{sorted(mesh.sharded_dims)}",
                    field=spec.name,
                )
        only, present_on_it = meshes[0]
        if len(meshes) == 1 and isinstance(only, Mesh):
            return _Meshed(spec, only, present_on_it, self._group)
        return _Pieced(spec, meshes, self._group)

    def _mesh(self, layout: Layout, known: dict[Layout, Mesh | Boxes]) -> Mesh | Boxes:
        mesh = known.get(layout)
        if mesh is None:
            world = len(self._number)
            made = Mesh(layout, world=world) if isinstance(layout, MeshLayout) else Boxes(layout, world=world)
            mesh = known[layout] = made
        return mesh

    def _mesh_of(self, number: int, index: int | None) -> Mesh | Boxes | None:
        return None if index is None else self._meshes[number][index]

    def _ranks_with(self, numbers: tuple[int, ...]) -> list[int]:
        """Ranks that have one of the structures ``numbers``, ascending."""
        ranks = self._present.get(numbers)
        if ranks is None:
            ranks = self._present[numbers] = sorted(rank for number in numbers for rank in self._members[number])
        return ranks

    def _group(self, ranks: Sequence[int]) -> tuple[int, ...]:
        group = tuple(ranks)
        return self._groups.setdefault(group, group)


class _Same:
    """A value that some ranks have whole, or that has no elements."""

    def __init__(self, held: Held, ranks: frozenset[int]) -> None:
        self._held = [held]
        self._ranks = ranks

    def __call__(self, rank: int) -> list[Held]:
        return self._held if rank in self._ranks else []


class _Meshed:
    """A tensor that all its ranks describe by one mesh: whoever has equal sharding coordinates has equal boxes."""

    def __init__(
        self, spec: TensorSpec, mesh: Mesh, present: frozenset[int], group: Callable[[Sequence[int]], tuple[int, ...]]
    ) -> None:
        self._shape = spec.shape
        self._mesh = mesh
        self._present = present
        self._group = group
        if -1 in mesh.layout.ranks or not present.issuperset(mesh.layout.ranks):
            for point in mesh.shard_points():
                if present.isdisjoint(mesh.replicas(point)):
                    for box, _ in mesh.boxes_at(spec.shape, point):
                        raise _unheld(spec, box)

    def __call__(self, rank: int) -> list[Held]:
        if rank not in self._mesh or rank not in self._present:
            return []
        point = self._mesh.coordinates(rank)
        boxes = self._mesh.boxes_at(self._shape, point)
        if not boxes:
            return []
        group = self._group([other for other in self._mesh.replicas(point) if other in self._present])
        return [Held(box, local_offsets, group) for box, local_offsets in boxes]


class _Pieced:
    """A tensor that ranks describe differently, by meshes or boxes: every box of each is looked at."""

    def __init__(
        self,
        spec: TensorSpec,
        meshes: Sequence[tuple[Mesh | Boxes, frozenset[int]]],
        group: Callable[[Sequence[int]], tuple[int, ...]],
    ) -> None:
        holders: dict[Box, set[int]] = {}
        local: dict[int, list[tuple[Box, tuple[int, ...], int]]] = {}
        for mesh, present in meshes:
            for point in mesh.shard_points():
                ranks = present.intersection(mesh.replicas(point))
                boxes = mesh.boxes_at(spec.shape, point)
                numbered = [(box, at, mesh.number_of(box) if isinstance(mesh, Boxes) else 0) for box, at in boxes]
                for rank in ranks:
                    local[rank] = numbered
                for box, _ in boxes:
                    if ranks:
                        holders.setdefault(box, set()).update(ranks)
        defect = first_defect(whole(spec.shape), list(holders))
        if defect is not None and defect[0] == "gap":
            raise _unheld(spec, defect[1], by_boxes=any(isinstance(mesh, Boxes) for mesh, _ in meshes))
        if defect is not None:
            owners = [f"{_spell(sorted(ranks))} {box}" for box, ranks in holders.items() if _meet(box, defect[1])]
            raise StateMismatch(
                f"tensor {spec.name!r} {list(spec.shape)} is sharded differently on different ranks, or its parts "
                f"overlap: of {defect[1]}, {'; '.join(owners[:4])}. Use the same sharding on all meshes",
                mismatched=(spec.name,),
            )
        self._held = {
            rank: [Held(box, at, group(sorted(holders[box])), number) for box, at, number in boxes]
            for rank, boxes in local.items()
        }

    def __call__(self, rank: int) -> list[Held]:
        return self._held.get(rank, [])


_Share = _Same | _Meshed | _Pieced


def _meet(a: Box, b: Box) -> bool:
    return not any(x + m <= y or y + n <= x for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))


def _unheld(spec: TensorSpec, box: Box, *, by_boxes: bool = False) -> ConfigError:
    instead = (
        "Together, the parts that ranks hold have to be the whole tensor: look at their global shape and offsets"
        if by_boxes
        else "Pass a process_group that has every rank of the tensor's mesh"
    )
    return ConfigError(
        f"tensor {spec.name!r} {list(spec.shape)}: no rank of the group holds its part {box}. {instead}",
        field=spec.name if by_boxes else "process_group",
    )


def _describe(spec: TensorSpec, mesh: Mesh | Boxes | None) -> str:
    text = f"{spec.dtype} {list(spec.shape)}"
    if mesh is None:
        return f"{text} (a plain tensor at {list(spec.path)})"
    if isinstance(mesh, Boxes):
        return f"{text} (parts of it, at {list(spec.path)})"
    layout = mesh.layout
    how = ", ".join(
        "replicate" if p.kind == "replicate" else f"{p.kind} dim {p.dim}" + (f" by {p.split}" if p.split > 1 else "")
        for p in layout.placements
    )
    return f"{text} ({how} on a mesh of shape {list(layout.shape)} over {_spell(layout.ranks)}, at {list(spec.path)})"


def _spell(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
