"""The copies that fill an image: which box of which live tensor goes where, cut into batches once.

Guarantees: the image gets the source's values, converted if the plan asks for another dtype; copies are made as in
``staging.copier``, large contiguous blocks on the calling thread only. Sources are looked up at copy time, since their
storage may move between saves, and their memory is kept alive while it is read.
Does not: decide when to copy, or on which stream (``staging.copy_job``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import Box
from holdfast.errors import StateMismatch
from holdfast.staging.copier import (
    BATCH_BYTES,
    BATCH_COPIES,
    SERIAL_ELEMENTS,
    CopyList,
    row_ranges,
    word_bytes,
    words_of,
)
from holdfast.staging.small_copies import refuse_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from holdfast.plan.write import PlacedTensor
    from holdfast.staging.small_copies import Scatter, ScatterBatch

_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


@dataclass(slots=True)
class CopyItem:
    """A copy of one box of one tensor to ``target``, its payload view in the image.

    box: part of the local tensor; None for all of it. rows: (start, count) of rows of that.
    """

    name: str
    tensor: torch.Tensor
    box: Box | None
    target: torch.Tensor
    rows: tuple[int, int] | None = None
    cut: tuple[int, Sequence[torch.Tensor]] = field(default=(0, ()), repr=False)
    """`target` as integers of some width, in pieces; made on first use."""

    @classmethod
    def of(cls, placed: PlacedTensor, tensor: torch.Tensor, target: torch.Tensor) -> CopyItem:
        """Return the copy of what ``placed`` stores of ``tensor``."""
        whole = tuple(compat.local_tensor(tensor).shape) == placed.sizes
        return cls(placed.source, tensor, None if whole else Box(placed.local_offsets, placed.sizes), target)

    def source(self) -> torch.Tensor:
        """The live source as a plain tensor of ``target``'s shape."""
        local = compat.local_tensor(self.tensor)
        if self.box is not None:
            for dim, (offset, size) in enumerate(zip(*self.box, strict=True)):
                if size != local.shape[dim]:
                    local = local.narrow(dim, offset, size)
        if self.rows is not None:
            local = local.narrow(0, *self.rows)
        return local


class CopyBatch:
    """Items that are copied together.

    Small whole tensors, which torch copies on the calling thread, are kept separately for one foreach call: checking
    each of a hundred thousand of them again would take longer than copying.
    """

    __slots__ = ("_items", "_small", "_small_sources", "_small_targets")

    def __init__(self, items: Iterable[CopyItem]) -> None:
        self._items: list[CopyItem] = []
        self._small: list[str] = []
        self._small_sources: list[torch.Tensor] = []
        self._small_targets: list[torch.Tensor] = []
        for item in items:
            if _is_serial_and_plain(item):
                self._small.append(item.name)
                self._small_sources.append(item.tensor)
                self._small_targets.append(item.target)
            else:
                self._items.append(item)

    def copy(self, *, non_blocking: bool = False) -> None:
        """Make the copies, or enqueue them on the current stream.

        Raises `StateMismatch` if a source isn't as planned.
        """
        with torch.no_grad():
            self._list().make(non_blocking=non_blocking)

    def _list(self) -> CopyList:
        copies = CopyList()
        copies.targets, copies.sources = list(self._small_targets), list(self._small_sources)
        if not all(map(_address, copies.sources)):
            for name, tensor in zip(self._small, copies.sources, strict=True):
                refuse_gone(name, tensor)
        for item in self._items:
            target = item.target
            if target.numel() == 0:
                continue  # the held part may be empty in another way: of the sizes 0 and 4, a part has 0 and 1
            source = item.source()
            refuse_other_shape(item.name, source.shape, target.shape)
            if (width := word_bytes(target, source)) > 0:
                refuse_gone(item.name, source)
                if item.cut[0] != width:
                    item.cut = (width, words_of(target, width))
                copies.targets += item.cut[1]
                copies.sources += words_of(source, width)
            else:
                copies.append(target, source)
        return copies


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies of one structure into one buffer: batches from host memory, one batch from each CUDA device."""

    from_host: tuple[CopyBatch | ScatterBatch, ...]
    from_device: Mapping[torch.device, CopyBatch]
    whole: Mapping[str, int]
    """Addresses of the copies of whole tensors stored unchanged, by name."""
    scatter: Scatter | None = None
    """The copies made by address; call `locate` before use."""

    @classmethod
    def of(
        cls, items: Sequence[CopyItem], scatter: Scatter | None = None, scattered: Mapping[str, int] | None = None
    ) -> Copies:
        """scatter, scattered: the copies by address, and the addresses of their targets, by name."""
        host = [item for item in items if item.tensor.device.type != "cuda"]
        by_device: dict[torch.device, list[CopyItem]] = {}
        for item in items:
            if item.tensor.device.type == "cuda":
                by_device.setdefault(item.tensor.device, []).append(item)
        return cls(
            from_host=(*(() if scatter is None else scatter.batches), *map(CopyBatch, _cut(host))),
            from_device={device: CopyBatch(group) for device, group in by_device.items()},
            whole={
                item.name: item.target.data_ptr()
                for item in host
                if item.box is None and item.tensor.dtype == item.target.dtype
            }
            | dict(scattered or ()),
            scatter=scatter,
        )

    def locate(self, addresses: Sequence[int] | np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        """Set the current addresses of all tensors, for the copies by address."""
        if self.scatter is not None:
            self.scatter.locate(addresses)


def _cut(items: Sequence[CopyItem]) -> Iterable[list[CopyItem]]:
    batch: list[CopyItem] = []
    size = 0
    for whole in items:
        for item in split_rows(whole, BATCH_BYTES):
            batch.append(item)
            size += item.target.nbytes
            if size >= BATCH_BYTES or len(batch) >= BATCH_COPIES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def split_rows(item: CopyItem, max_bytes: int) -> list[CopyItem]:
    """Cut a large item along its first dimension, so that two threads can share it."""
    if item.target.nbytes <= max_bytes:
        return [item]
    return [
        CopyItem(item.name, item.tensor, item.box, item.target.narrow(0, *rows), rows)
        for rows in row_ranges(item.target, max_bytes)
    ] or [item]


def refuse_other_shape(name: str, held: tuple[int, ...], planned: tuple[int, ...]) -> None:
    """Raise `StateMismatch` if the held shape isn't the planned one: a swapped `.data`, a hand-made DTensor."""
    if held != planned:
        raise StateMismatch(
            f"{name}: this rank holds {tuple(held)} of it, its placement says {tuple(planned)}; it was changed "
            "during the save, or its DTensor is inconsistent",
            mismatched=(name,),
        )


def _is_serial_and_plain(item: CopyItem) -> bool:
    tensor, target = item.tensor, item.target
    return (
        item.box is None
        and item.rows is None
        and compat.is_plain(tensor)
        and 0 < target.numel() <= SERIAL_ELEMENTS
        and tensor.shape == target.shape
        and compat.has_copy_kernel(tensor.dtype)
        and compat.has_copy_kernel(target.dtype)
    )
