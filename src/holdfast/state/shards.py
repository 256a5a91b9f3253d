"""Recognize values that are parts of a larger tensor: where they lie in it, and this rank's memory for them.

    Shard                        says it itself: a tensor, the shape of the whole, and the offset in it
    torch's ``ShardedTensor``    any number of parts, as FSDP1 and TorchRec have them
    `LocalPart`                  one such part, by itself: an inner tensor of a DTensor's local part

All are one logical tensor in a checkpoint, like a DTensor: named once, with the shape of the whole, its boxes written
by the ranks that hold them; readable with stock DCP, and loadable into any other sharding.

Guarantees: nothing is communicated; parts are the very memory that is trained. Equal boxes on several ranks are
replicas, and written once; that all boxes are the whole is checked when a save is planned (``plan.placement``).
Does not: know DTensors (``structure`` does), nor how a framework names its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, contains, intersect, whole
from holdfast.errors import ConfigError
from holdfast.format.structure import source_name
from holdfast.state.entries import Path, TensorEntry, WholePlace, check_tensor


class Shard:
    """A value of the state that is this rank's part of a larger tensor: all ranks' are stored as one, by its name.

    For tensors that are sharded without DTensor, by one's own tensor parallelism, say. ``tensor`` is what is stored and
    on load filled in place; the parts of all ranks must tile the whole: a gap or an overlap is an error on every rank.
    Equal parts on several ranks are replicas, of which one is written. A checkpoint loads into other parts, into
    DTensors and into plain tensors, and those into parts.

    Each rank's parts are its own affair, so ranks exchange what they hold when a save is planned: for very large worlds
    DTensors, which all ranks describe alike, are cheaper there.
    """

    __slots__ = ("global_offset", "global_shape", "tensor")

    def __init__(self, tensor: torch.Tensor, global_shape: Sequence[int], global_offset: Sequence[int]) -> None:
        """global_shape: of the whole, with as many dimensions as ``tensor``. global_offset: of ``tensor``'s first
        element in it, in elements.

        Raises `ConfigError` if the tensor doesn't lie within the whole, or is no plain tensor.
        """
        shape, offset = tuple(map(int, global_shape)), tuple(map(int, global_offset))
        given: object = tensor
        if not isinstance(given, torch.Tensor) or compat.is_dtensor(tensor) or not compat.is_storable_type(tensor):
            raise ConfigError(f"Shard takes a plain tensor, not a {type(tensor).__name__}", field="tensor")
        box = Box(offset, tuple(tensor.shape))
        if len(shape) != len(offset) or len(shape) != tensor.dim() or not contains(whole(shape), box):
            raise ConfigError(
                f"Shard: a tensor of shape {list(tensor.shape)} at {list(offset)} doesn't lie within {list(shape)}",
                field="global_offset",
            )
        self.tensor: Any = tensor
        self.global_shape: tuple[int, ...] = shape
        self.global_offset: tuple[int, ...] = offset

    def __repr__(self) -> str:
        return f"Shard({list(self.tensor.shape)} at {list(self.global_offset)} of {list(self.global_shape)})"


class LocalPart(NamedTuple):
    """A plain tensor and its place in a larger one."""

    tensor: torch.Tensor
    place: WholePlace
    may_differ: bool = False
    """A load takes what a stored whole of another size has of this part, and leaves the rest."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole."""
        return self.place.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of both."""
        return self.tensor.dtype


_KINDS: Final = (Shard, LocalPart)


def is_sharded(value: object) -> bool:
    """Return True for a value that `parts_of` takes."""
    return isinstance(value, _KINDS) or compat.is_sharded_tensor(value)


def parts_of(value: Any, name: str) -> list[LocalPart]:
    """Return what this rank holds of the larger tensor, if anything.

    Raises `ConfigError`, naming it, for a part that can't be stored or isn't as it says.
    """
    if isinstance(value, LocalPart):
        return [value]
    if isinstance(value, Shard):
        box = Box(value.global_offset, tuple(value.tensor.shape))
        if not contains(whole(value.global_shape), box):
            raise ConfigError(f"{name}: {value} doesn't lie within the whole", field=name)
        return [LocalPart(value.tensor, WholePlace(value.global_shape, box))]
    shape, found = compat.sharded_shape(value), []
    for tensor, offsets, sizes in compat.shards_of(value):
        if tuple(tensor.shape) != sizes:
            raise ConfigError(
                f"{name}: a shard of its ShardedTensor is of shape {list(tensor.shape)}, and is said to be "
                f"{list(sizes)}",
                field=name,
            )
        found.append(LocalPart(tensor, WholePlace(shape, Box(offsets, sizes))))
    return found


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of the whole; of a tensor that isn't sharded its own."""
    if isinstance(value, Shard):
        return value.global_shape
    return compat.sharded_shape(value) if compat.is_sharded_tensor(value) else tuple(value.shape)


def clipped(part: LocalPart, shape: tuple[int, ...]) -> LocalPart | None:
    """Return what a whole of another ``shape`` has of ``part``; None if it can't be compared."""
    box = part.place.box
    if not part.may_differ or box is None or len(shape) != len(box.sizes):
        return None
    shared = intersect(box, whole(shape)) or Box((0,) * len(shape), (0,) * len(shape))
    tensor = part.tensor
    for dim, size in enumerate(shared.sizes):
        tensor = tensor.narrow(dim, shared.offsets[dim] - box.offsets[dim] if size else 0, size)
    return LocalPart(tensor, WholePlace(shape, shared))


def held_elsewhere(name: str, path: Path, value: LocalPart) -> TensorEntry:
    """Return the entry that says: there is such a tensor, and this rank writes nothing of it."""
    nothing = torch.empty(0, dtype=value.tensor.dtype)
    return TensorEntry(name, path, nothing, lazy=False, place=WholePlace(value.place.shape))


def entries_of(name: str, path: Path, value: Any, *, lazy: bool, first: int = 0) -> list[TensorEntry]:
    """Return an entry for each part of ``value``, numbered from ``first``. Raises as `parts_of`."""
    found = []
    for number, (tensor, place, _) in enumerate(parts_of(value, name), first):
        check_tensor(name, tensor)
        if compat.is_dtensor(tensor):
            raise ConfigError(f"{name}: a part that is a DTensor itself can't be stored", field=name)
        found.append(TensorEntry(source_name(name, number), path, tensor, lazy, place=place))
    return found
