"""Collected entries → the `Structure` that planning works on.

Guarantees: ranks that run the same program get equal structures, whatever their slice of a tensor. Layouts are
interned, so a model of thousands of DTensors on one mesh carries its mesh once per set of placements.
"""

from __future__ import annotations

from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, whole
from holdfast.errors import ConfigError, StateMismatch
from holdfast.plan.placement import Mesh
from holdfast.plan.structure import MeshLayout, ObjectSpec, Placement, Structure, TensorSpec
from holdfast.state.entries import Collected, known_dtype, local_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

_REPLICATE = Placement("replicate")
_name = attrgetter("name")


def structure_of(collected: Collected, capacities: Mapping[str, int]) -> Structure:
    """The structure of ``collected``; ``capacities`` gives the record bytes of each object by name.

    Raises `ConfigError` naming the tensor for a placement that can't be stored, `StateMismatch` for a DTensor that
    doesn't hold what its placement says, `KeyError` for an object that has no capacity.
    """
    layouts = LayoutTable(collected.group_ranks)
    tensors = []
    for entry in sorted(collected.tensors, key=_name):
        name, tensor, layout = entry.name, entry.tensor, None
        if compat.is_dtensor(tensor):
            layouts.check_local(tensor, name, collected.rank)
            layout = layouts.index_of(tensor, name)
        tensors.append(TensorSpec(name, entry.path, tuple(tensor.shape), known_dtype(tensor, name), layout))
    objects = [
        ObjectSpec(entry.name, entry.path, capacities[entry.name]) for entry in sorted(collected.objects, key=_name)
    ]
    return Structure(tuple(layouts.layouts), tuple(tensors), tuple(objects))


class LayoutTable:
    """Layouts by number, each once; for many tensors of few layouts."""

    def __init__(self, group_ranks: Sequence[int] | None = None) -> None:
        self.layouts: list[MeshLayout] = []
        self._place = None if group_ranks is None else {rank: place for place, rank in enumerate(group_ranks)}
        self._by_layout: dict[MeshLayout, int] = {}
        self._by_spec: dict[tuple[Any, Any, int], int] = {}
        self._meshes: dict[int, Mesh] = {}
        self._local_shapes: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def index_of(self, tensor: torch.Tensor, name: str) -> int | None:
        """The number of ``tensor``'s layout in `layouts`; None for a plain tensor."""
        if not compat.is_dtensor(tensor):
            return None
        mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        spec = (mesh, placements, tensor.ndim)
        if spec not in self._by_spec:
            layout = self._layout(mesh, placements, tensor.ndim, name)
            index = self._by_layout.setdefault(layout, len(self.layouts))
            if index == len(self.layouts):
                self.layouts.append(layout)
            self._by_spec[spec] = index
        return self._by_spec[spec]

    def boxes_of(self, tensor: torch.Tensor, name: str, rank: int) -> list[tuple[Box, tuple[int, ...]]]:
        """What ``rank`` holds of ``tensor``: boxes, and where they lie in its local tensor."""
        shape = tuple(tensor.shape)
        index = self.index_of(tensor, name)
        if index is None:
            return [(whole(shape), (0,) * len(shape))]
        mesh = self._mesh(index)
        return mesh.boxes_at(shape, mesh.coordinates(rank)) if rank in mesh else []

    def views_of(self, tensor: torch.Tensor, name: str, rank: int) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of ``tensor`` that ``rank`` holds elements of, each with the part of its memory that has them.

        Raises as `check_local`.
        """
        if not compat.is_dtensor(tensor):  # in as few steps as can be: a load asks for every tensor it fills
            box = whole(tensor.shape)
            if 0 not in box.sizes:
                yield box, local_tensor(tensor)
            return
        local = local_tensor(tensor)
        self.check_local(tensor, name, rank)
        for box, offsets in self.boxes_of(tensor, name, rank):
            if box.volume:
                yield box, part_of(local, Box(offsets, box.sizes))

    def check_local(self, tensor: torch.Tensor, name: str, rank: int) -> None:
        """Raise `StateMismatch` unless a DTensor's local part has the shape that ``rank``'s placement says."""
        index = self.index_of(tensor, name)
        if index is None:
            return
        key = index, tuple(tensor.shape)
        if key not in self._local_shapes:
            mesh = self._mesh(index)
            self._local_shapes[key] = mesh.local_shape(key[1], rank) if rank in mesh else (0,)
        expected, held = self._local_shapes[key], compat.dtensor_local(tensor)
        # Where it has no elements it may have other sizes: FSDP2 makes such.
        if tuple(held.shape) != expected and (held.numel() or prod(expected)):
            raise StateMismatch(
                f"{name}: this rank holds {list(held.shape)} of {list(tensor.shape)} where its placement says "
                f"{list(expected)}; its DTensor contradicts itself: make it by distribute_tensor, or give from_local "
                "the right shape",
                mismatched=(name,),
            )

    def _mesh(self, index: int) -> Mesh:
        if index not in self._meshes:
            layout = self.layouts[index]
            self._meshes[index] = Mesh(layout, world=max(layout.ranks, default=-1) + 1)
        return self._meshes[index]

    def _layout(self, mesh: Any, placements: Sequence[Any], ndim: int, name: str) -> MeshLayout:
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        if self._place is not None:
            ranks = [self._place.get(rank, -1) for rank in ranks]
        return MeshLayout(
            shape=tuple(int(size) for size in mesh.mesh.shape),
            ranks=tuple(ranks),
            placements=tuple(_placement(placement, ndim, name) for placement in placements),
        )


def part_of(tensor: torch.Tensor, part: Box, box: Box | None = None) -> torch.Tensor:
    """``part`` of a tensor that holds ``box``, by default the whole of its own: a view."""
    bases = (0,) * tensor.dim() if box is None else box.offsets
    for dim, (offset, base, size) in enumerate(zip(part.offsets, bases, part.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset - base, size)
    return tensor


def _placement(placement: Any, ndim: int, name: str) -> Placement:
    split = compat.strided_shard_split(placement)
    if split is not None:
        return Placement("strided", int(placement.dim) % ndim, split)
    if placement.is_shard():
        return Placement("shard", int(placement.dim) % ndim)
    if placement.is_replicate():
        return _REPLICATE
    raise ConfigError(f"{name}: DTensor placement {placement} can't be stored; redistribute it first", field=name)
