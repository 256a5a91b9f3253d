"""Who holds what: from the structures of all ranks to the replica group of every box.

A *replica group* is the ranks that hold the same box of the same tensor, ascending. Within one `World` equal groups are
one and the same tuple object.

Guarantees: pure; names that ranks disagree on are refused as soon as a `World` is made; the boxes that `World.held_by`
gives out over all ranks tile each tensor exactly, or it raises. What a rank asks costs what that rank holds: a tensor
whose ranks all describe it alike (every SPMD job) is settled by the arithmetic of its mesh.
Assumes: digests name structures that are equal exactly when the digests are.
Does not: decide who writes (``plan.write`` does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from holdfast.boxes import Box, first_defect, whole
from holdfast.errors import ConfigError, StateMismatch
from holdfast.plan.placement import Mesh
from holdfast.plan.structure import PER_RANK, MeshLayout, ObjectSpec, Structure, TensorSpec, is_per_rank, name_on_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Carriers = tuple[tuple[int, int | None], ...]
"""(structure number, index of the layout there) for each structure that has a tensor."""
_RANK_STEM = PER_RANK.rstrip("*")


class Held(NamedTuple):
    """A box that a rank holds: where it lies in the whole and in the local tensor, and who else holds it."""

    box: Box
    local_offsets: tuple[int, ...]
    group: tuple[int, ...]


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
                        f"rank {rank} announced structure {digest}, which nobody has given", field="digests"
                    )
                self._structures.append(structures[digest])
                self._members.append([])
            self._members[number].append(rank)
            self._number.append(number)
        meshes: dict[MeshLayout, Mesh] = {}  # equal layouts are one mesh: told apart by identity from here on
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
                            f"{item.name!r} is each rank's own, but what rank {rank} would store it as, "
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
            "value: make them agree, or wrap a value that is each rank's own in holdfast.PerRank",
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
        numbers: dict[Mesh | None, list[int]] = {}
        for number, index in carriers:
            numbers.setdefault(self._mesh_of(number, index), []).append(number)
        if None in numbers:
            return _Same(Held(everything, everything.offsets, self._group(present)), frozenset(present))
        meshes = [
            (mesh, frozenset(self._ranks_with(tuple(having)))) for mesh, having in numbers.items() if mesh is not None
        ]
        for mesh, _ in meshes:
            if not all(0 <= dim < len(spec.shape) for dim in mesh.sharded_dims):
                raise ConfigError(
                    f"tensor {spec.name!r} of shape {list(spec.shape)} can't be sharded on dimensions "
                    f"{sorted(mesh.sharded_dims)}",
                    field=spec.name,
                )
        if len(meshes) == 1:
            return _Meshed(spec, *meshes[0], self._group)
        return _Pieced(spec, meshes, self._group)

    def _mesh(self, layout: MeshLayout, known: dict[MeshLayout, Mesh]) -> Mesh:
        mesh = known.get(layout)
        if mesh is None:
            mesh = known[layout] = Mesh(layout, world=len(self._number))
        return mesh

    def _mesh_of(self, number: int, index: int | None) -> Mesh | None:
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
    """A tensor that ranks describe by different meshes: every box of every mesh is looked at."""

    def __init__(
        self,
        spec: TensorSpec,
        meshes: Sequence[tuple[Mesh, frozenset[int]]],
        group: Callable[[Sequence[int]], tuple[int, ...]],
    ) -> None:
        holders: dict[Box, set[int]] = {}
        local: dict[int, list[tuple[Box, tuple[int, ...]]]] = {}
        for mesh, present in meshes:
            for point in mesh.shard_points():
                ranks = present.intersection(mesh.replicas(point))
                boxes = mesh.boxes_at(spec.shape, point)
                for rank in ranks:
                    local[rank] = boxes
                for box, _ in boxes:
                    if ranks:
                        holders.setdefault(box, set()).update(ranks)
        defect = first_defect(whole(spec.shape), list(holders))
        if defect is not None and defect[0] == "gap":
            raise _unheld(spec, defect[1])
        if defect is not None:
            owners = [f"{_spell(sorted(ranks))} {box}" for box, ranks in holders.items() if _meet(box, defect[1])]
            raise StateMismatch(
                f"tensor {spec.name!r} {list(spec.shape)} is cut differently by different ranks: of {defect[1]}, "
                f"{'; '.join(owners[:4])}. Shard it alike on all meshes",
                mismatched=(spec.name,),
            )
        self._held = {
            rank: [Held(box, at, group(sorted(holders[box]))) for box, at in boxes] for rank, boxes in local.items()
        }

    def __call__(self, rank: int) -> list[Held]:
        return self._held.get(rank, [])


_Share = _Same | _Meshed | _Pieced


def _meet(a: Box, b: Box) -> bool:
    return not any(x + m <= y or y + n <= x for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))


def _unheld(spec: TensorSpec, box: Box) -> ConfigError:
    return ConfigError(
        f"tensor {spec.name!r} {list(spec.shape)}: no rank of the group holds its part {box}. "
        "Pass a process_group that has every rank of the tensor's mesh",
        field="process_group",
    )


def _describe(spec: TensorSpec, mesh: Mesh | None) -> str:
    text = f"{spec.dtype} {list(spec.shape)}"
    if mesh is None:
        return f"{text} (a plain tensor at {list(spec.path)})"
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
