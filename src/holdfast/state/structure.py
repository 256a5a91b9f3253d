"""Collected entries → the `Structure` that planning works on.

Guarantees: ranks that run the same program get equal structures, whatever their slice of a tensor. Layouts are
interned, so a model of thousands of DTensors on one mesh carries its mesh once per set of placements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.plan.structure import MeshLayout, ObjectSpec, Placement, Structure, TensorSpec
from holdfast.state.entries import Collected, known_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

_REPLICATE = Placement("replicate")


def structure_of(collected: Collected, capacities: Mapping[str, int]) -> Structure:
    """The structure of ``collected``; ``capacities`` gives the record bytes of each object by name.

    Raises `ConfigError` naming the tensor for a placement that can't be stored, `KeyError` for an object that has no
    capacity.
    """
    layouts = LayoutTable(collected.group_ranks)
    tensors = [
        TensorSpec(
            entry.name,
            entry.path,
            tuple(entry.tensor.shape),
            known_dtype(entry.tensor, entry.name),
            layouts.index_of(entry.tensor, entry.name),
        )
        for entry in sorted(collected.tensors, key=lambda entry: entry.name)
    ]
    objects = [
        ObjectSpec(entry.name, entry.path, capacities[entry.name])
        for entry in sorted(collected.objects, key=lambda entry: entry.name)
    ]
    return Structure(tuple(layouts.layouts), tuple(tensors), tuple(objects))


def layout_of(tensor: torch.Tensor, name: str, *, group_ranks: Sequence[int] | None = None) -> MeshLayout | None:
    """How ``tensor`` lies over the ranks of the group; None for a plain tensor, which each rank holds whole."""
    table = LayoutTable(group_ranks)
    index = table.index_of(tensor, name)
    return None if index is None else table.layouts[index]


class LayoutTable:
    """Layouts by number, each once; for many tensors of few layouts."""

    def __init__(self, group_ranks: Sequence[int] | None = None) -> None:
        self.layouts: list[MeshLayout] = []
        self._place = None if group_ranks is None else {rank: place for place, rank in enumerate(group_ranks)}
        self._by_layout: dict[MeshLayout, int] = {}
        self._by_spec: dict[tuple[Any, Any, int], int] = {}

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

    def _layout(self, mesh: Any, placements: Sequence[Any], ndim: int, name: str) -> MeshLayout:
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        if self._place is not None:
            ranks = [self._place.get(rank, -1) for rank in ranks]
        return MeshLayout(
            shape=tuple(int(size) for size in mesh.mesh.shape),
            ranks=tuple(ranks),
            placements=tuple(_placement(placement, ndim, name) for placement in placements),
        )


def _placement(placement: Any, ndim: int, name: str) -> Placement:
    split = compat.strided_shard_split(placement)
    if split is not None:
        return Placement("strided", int(placement.dim) % ndim, split)
    if placement.is_shard():
        return Placement("shard", int(placement.dim) % ndim)
    if placement.is_replicate():
        return _REPLICATE
    raise ConfigError(f"{name}: DTensor placement {placement} can't be stored; redistribute it first", field=name)
