"""Which rectangles of a global tensor a rank's local tensor holds, by its mesh and placements.

Guarantees: pure and torch-free; for one layout the boxes of all mesh coordinates that differ on a sharding mesh
dimension tile the tensor exactly, whatever its shape. Cost grows with the number of boxes, never with their volume.
Assumes: `torch.chunk`'s rule for a shard (pieces of ``ceil(size / parts)``, the last ones shorter or empty).

A strided placement means what its makers mean. FSDP2 over tensor parallelism writes ``[strided(dim, split),
shard(dim)]`` for "first cut by the right one, then by the left one", ``split`` being the number of pieces that the
placements cut first make. Where the numbers say so (`_cutting_order`), cuts are applied in that order, which also holds
for sizes that don't divide evenly. A strided placement that nothing to its right explains is applied where it stands:
cut into ``split`` pieces, each of them into ``mesh size`` pieces, and coordinate ``i`` takes the ``i``-th of every one.
Both readings agree wherever sizes divide evenly.

Does not: check that a real local tensor has `local_shape`; ``state.structure`` does.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

from holdfast.boxes import Box, strides, whole
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from holdfast.plan.structure import MeshLayout, Placement

Run = tuple[int, int]
"""Start and stop of consecutive indices of one dimension."""


class Mesh:
    """A checked `MeshLayout`, ready to answer who holds what. Make it once a layout: it indexes every rank."""

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
        """The ranks of the group on this mesh."""
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
        """Ranks whose coordinates equal ``coordinates`` on every sharding dimension, ascending; -1 is left out."""
        choices = [
            (coordinates[m],) if m in self._shard_dims else range(size) for m, size in enumerate(self.layout.shape)
        ]
        ranks = self.layout.ranks
        flats = (sum(c * step for c, step in zip(point, self._steps, strict=True)) for point in product(*choices))
        return sorted(rank for rank in (ranks[flat] for flat in flats) if rank >= 0)

    def shard_points(self) -> list[tuple[int, ...]]:
        """One coordinate for each combination on the sharding dimensions: all that differ in what they hold."""
        return list(
            product(*(range(size) if m in self._shard_dims else (0,) for m, size in enumerate(self.layout.shape)))
        )

    def boxes_at(self, shape: tuple[int, ...], coordinates: Sequence[int]) -> list[tuple[Box, tuple[int, ...]]]:
        """What the local tensor at ``coordinates`` holds of a tensor of ``shape``: (global box, offsets in local).

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
        """The shape of ``rank``'s local tensor, empty dimensions included. Raises as `boxes_at`."""
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


def local_boxes(shape: tuple[int, ...], layout: MeshLayout, rank: int) -> list[tuple[Box, tuple[int, ...]]]:
    """The boxes of a tensor of ``shape`` that ``rank`` holds, each with its offsets in the rank's local tensor.

    Usually one; a strided placement may make several; none for an empty local tensor or a rank outside the mesh.
    For many tensors make one `Mesh` a layout and use its `boxes_at`.
    """
    mesh = Mesh(layout, world=max(layout.ranks, default=-1) + 1)
    return mesh.boxes_at(shape, mesh.coordinates(rank)) if rank in mesh else []


def local_shape(shape: tuple[int, ...], layout: MeshLayout, rank: int) -> tuple[int, ...]:
    """The shape that ``rank``'s local tensor must have for `local_boxes` to be right; ``(0,)`` outside the mesh.

    Where it has no elements, a real local tensor must have none either, but may have other sizes: FSDP2 makes such.
    """
    mesh = Mesh(layout, world=max(layout.ranks, default=-1) + 1)
    return mesh.local_shape(shape, rank) if rank in mesh else (0,)


def _cutting_order(layout: MeshLayout, mesh_dims: list[int]) -> tuple[list[int], bool]:
    """The order in which ``mesh_dims``, all sharding one tensor dimension, cut it; True if strided cuts remain.

    Read right to left, each placement goes behind as many of the cuts found so far as make ``split`` pieces: none for
    a plain shard. If some split fits nowhere the placements are applied as they stand.
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
