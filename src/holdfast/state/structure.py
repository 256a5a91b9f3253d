"""Build the `Structure` that planning works on from collected entries.

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
from holdfast.format.structure import (
    SOURCE_MARK,
    BoxLayout,
    Layout,
    MeshLayout,
    ObjectSpec,
    Placement,
    Structure,
    TensorSpec,
)
from holdfast.plan.placement import Mesh
from holdfast.state.entries import Collected, TensorEntry, WholePlace, joined, known_dtype, local_tensor

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
    boxed: dict[str, list[TensorEntry]] = {}
    for entry in sorted(collected.tensors, key=_name):
        name, tensor, layout = entry.name, entry.tensor, None
        if entry.place is not None:
            name = name.partition(SOURCE_MARK)[0]
            if entry.place.mesh is None:
                boxed.setdefault(name, []).append(entry)
                continue
            layouts.check_part(tensor, entry.place, name, collected.rank)
            layout = layouts.index_of_place(entry.place, name)
            tensors.append(TensorSpec(name, entry.path, entry.place.shape, _dtype_of(entry), layout))
            continue
        if compat.is_dtensor(tensor):
            layouts.check_local(tensor, name, collected.rank)
            layout = layouts.index_of(tensor, name)
        tensors.append(TensorSpec(name, entry.path, tuple(tensor.shape), _dtype_of(entry), layout))
    if boxed:
        tensors += [_boxed_spec(name, parts, layouts, collected.rank) for name, parts in boxed.items()]
        tensors.sort(key=_name)
    objects = [
        ObjectSpec(entry.name, entry.path, capacities[entry.name]) for entry in sorted(collected.objects, key=_name)
    ]
    mappings = sorted(collected.mappings, key=lambda mapping: joined(mapping.path))
    return Structure(tuple(layouts.layouts), tuple(tensors), tuple(objects), tuple(mappings))


def _boxed_spec(name: str, parts: list[TensorEntry], layouts: LayoutTable, rank: int) -> TensorSpec:
    """One tensor of which this rank holds ``parts``, in the order of their numbers."""
    parts.sort(key=lambda entry: int(entry.name.partition(SOURCE_MARK)[2] or 0))
    first = parts[0]
    assert first.place is not None
    boxes = []
    for part in parts:
        place = part.place
        assert place is not None
        if (place.shape, _dtype_of(part)) != (first.place.shape, _dtype_of(first)) or (
            place.box is not None and place.box in boxes
        ):
            raise ConfigError(
                f"{name}: this rank has two parts of it that don't go together: {first.tensor.dtype} of "
                f"{list(first.place.shape)} and {part.tensor.dtype} {place.box} of {list(place.shape)}",
                field=name,
            )
        boxes.append(place.box or Box((0,) * len(place.shape), (0,) * len(place.shape)))
    layout = layouts.add(BoxLayout(rank, tuple((box.offsets, box.sizes) for box in boxes)))
    return TensorSpec(name, first.path, first.place.shape, _dtype_of(first), layout)


def _dtype_of(entry: TensorEntry) -> str:
    return entry.stored_as or known_dtype(entry.tensor, entry.name.partition(SOURCE_MARK)[0])


class LayoutTable:
    """Layouts by number, each once; for many tensors of few layouts."""

    def __init__(self, group_ranks: Sequence[int] | None = None) -> None:
        self.layouts: list[Layout] = []
        self._place = None if group_ranks is None else {rank: place for place, rank in enumerate(group_ranks)}
        self._by_layout: dict[Layout, int] = {}
        self._by_spec: dict[tuple[Any, Any, int], int] = {}
        self._meshes: dict[int, Mesh] = {}
        self._local_shapes: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def index_of(self, tensor: torch.Tensor, name: str) -> int | None:
        """The number of ``tensor``'s layout in `layouts`; None for a plain tensor."""
        if not compat.is_dtensor(tensor):
            return None
        return self._index(tensor.device_mesh, tensor.placements, tensor.ndim, name)  # type: ignore[attr-defined]

    def index_of_place(self, place: WholePlace, name: str) -> int:
        """Return the number of the layout of a part that is a mesh's local tensor."""
        return self._index(place.mesh, place.placements, len(place.shape), name)

    def add(self, layout: Layout) -> int:
        """Return the number of ``layout``."""
        index = self._by_layout.setdefault(layout, len(self.layouts))
        if index == len(self.layouts):
            self.layouts.append(layout)
        return index

    def _index(self, mesh: Any, placements: Sequence[Any], ndim: int, name: str) -> int:
        spec = (mesh, placements, ndim)
        if spec not in self._by_spec:
            self._by_spec[spec] = self.add(self._layout(mesh, placements, ndim, name))
        return self._by_spec[spec]

    def boxes_of(self, tensor: torch.Tensor, name: str, rank: int) -> list[tuple[Box, tuple[int, ...]]]:
        """Return the boxes of ``tensor`` that ``rank`` holds, and their offsets in its local tensor."""
        shape = tuple(tensor.shape)
        index = self.index_of(tensor, name)
        if index is None:
            return [(whole(shape), (0,) * len(shape))]
        mesh = self._mesh(index)
        return mesh.boxes_at(shape, mesh.coordinates(rank)) if rank in mesh else []

    def views_of(
        self, tensor: torch.Tensor, name: str, rank: int, place: WholePlace | None = None
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of ``tensor`` that ``rank`` holds elements of, each with the part of its memory that has them.

        place: ``tensor`` is a part, which lies there. Raises as `check_local`.
        """
        if place is not None:
            yield from self._views_of_part(tensor, place, name, rank)
            return
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

    def _views_of_part(
        self, tensor: torch.Tensor, place: WholePlace, name: str, rank: int
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        local = local_tensor(tensor)
        if place.box is not None:
            if place.box.volume:
                yield place.box, local
            return
        self.check_part(tensor, place, name, rank)
        mesh = self._mesh(self.index_of_place(place, name))
        for box, offsets in mesh.boxes_at(place.shape, mesh.coordinates(rank)) if rank in mesh else ():
            if box.volume:
                yield box, part_of(local, Box(offsets, box.sizes))

    def check_part(self, tensor: torch.Tensor, place: WholePlace, name: str, rank: int) -> None:
        """`check_local` for a part that is a mesh's local tensor."""
        self._check_held(tensor, place.shape, self.index_of_place(place, name), name, rank)

    def check_local(self, tensor: torch.Tensor, name: str, rank: int) -> None:
        """Raise `StateMismatch` unless a DTensor's local part has the shape that ``rank``'s placement says."""
        index = self.index_of(tensor, name)
        if index is None:
            return
        self._check_held(compat.dtensor_local(tensor), tuple(tensor.shape), index, name, rank)

    def _check_held(self, held: torch.Tensor, shape: tuple[int, ...], index: int, name: str, rank: int) -> None:
        key = index, shape
        if key not in self._local_shapes:
            mesh = self._mesh(index)
            self._local_shapes[key] = mesh.local_shape(key[1], rank) if rank in mesh else (0,)
        expected = self._local_shapes[key]
        # Where it has no elements it may have other sizes: FSDP2 makes such.
        if tuple(held.shape) != expected and (held.numel() or prod(expected)):
            raise StateMismatch(
                f"{name}: this rank holds {list(held.shape)} of {list(shape)} where its "
                f"placement says {list(expected)}; its DTensor is inconsistent: create it with "
                "distribute_tensor, or pass the right shape to from_local",
                mismatched=(name,),
            )

    def _mesh(self, index: int) -> Mesh:
        if index not in self._meshes:
            layout = self.layouts[index]
            assert isinstance(layout, MeshLayout)
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
