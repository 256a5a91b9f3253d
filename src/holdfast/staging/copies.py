"""The copies that fill an image: which box of which live tensor goes where, cut into batches once.

Guarantees: what arrives is bit for bit what the source holds (or converted, where the plan asks for another dtype),
for every dtype, conjugate and negated views included. A batch gives the GIL up once, however many tensors it has: to
get it back from a trainer that computes in Python takes up to 5 ms each time. It takes no team of threads: one beside
the team that training computes with makes both wait at each other's barriers, so large blocks go in pieces that torch
leaves to the calling thread. Sources are looked up at copy time, since their storage may move between saves, and their
memory is held while it is read.
Does not: decide when to copy, or on which stream (``staging.stager``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import StateMismatch
from holdfast.staging.scatter import refuse_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from holdfast.staging.scatter import Scatter, ScatterBatch

BATCH_BYTES: Final = 32 << 20
BATCH_TENSORS: Final = 1024
SERIAL_ELEMENTS: Final = (32 << 10) - 64
"""As many as torch copies without a team of threads, which it would call for 32,768."""
SMALL_BYTES: Final = 32 << 10
"""A block of fewer bytes has fewer elements than that, whatever its dtype."""
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


@dataclass(slots=True)
class CopyItem:
    """One box of one tensor: ``target`` is its payload view in the image.

    ``box`` is (local offsets, sizes) where the box is not the whole local tensor, else None; ``rows`` is the (start,
    count) of a part of it.
    """

    name: str
    tensor: torch.Tensor
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    target: torch.Tensor
    rows: tuple[int, int] | None = None
    cut: tuple[int, Sequence[torch.Tensor]] = field(default=(0, ()), repr=False)
    """`target` as integers of some width, in pieces; made when first needed."""

    def source(self) -> torch.Tensor:
        """The live source as a plain tensor of ``target``'s shape."""
        local = compat.local_tensor(self.tensor)
        if self.box is not None:
            for dim, (offset, size) in enumerate(zip(*self.box, strict=True)):
                if size != local.shape[dim]:
                    local = local.narrow(dim, offset, size)
        if self.rows is not None:
            local = local.narrow(0, self.rows[0], self.rows[1])
        return local


class CopyBatch:
    """Items that are copied in one go.

    Whole tensors that are small enough for torch to copy without a team of threads are kept apart, ready for one
    foreach call: with a hundred thousand of them, looking at each anew would take longer than copying.
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

        Raises `StateMismatch` where a source isn't as planned.
        """
        with torch.no_grad():
            targets, sources = self._pairs()
            if targets:
                compat.foreach_copy_(targets, sources, non_blocking=non_blocking)

    def _pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets, sources = list(self._small_targets), list(self._small_sources)
        if not all(map(_address, sources)):
            for name, tensor in zip(self._small, sources, strict=True):
                refuse_gone(name, tensor)
        for item in self._items:
            source, target = item.source(), item.target
            if target.numel() == 0:
                continue
            if source.shape != target.shape:
                # A swapped `.data` or a hand-made DTensor: what is held isn't what was planned.
                raise StateMismatch(
                    f"{item.name}: this rank holds {tuple(source.shape)} of it where its placement says "
                    f"{tuple(target.shape)}; it was changed while it was saved, or its DTensor contradicts itself",
                    mismatched=(item.name,),
                )
            if (width := _word_bytes(target, source)) > 0:
                refuse_gone(item.name, source)
                if item.cut[0] != width:
                    item.cut = (width, _pieces(target, width))
                targets += item.cut[1]
                sources += _pieces(source, width)
                continue
            if source.dtype == target.dtype:
                # Some dtypes have no copy kernel on some devices and versions; their bits are all that matters.
                source, target = compat.bits(source), compat.bits(target)
            targets.append(target)
            sources.append(source)
        return targets, sources


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies of one structure into one buffer: from host memory in batches, from each CUDA device in one."""

    from_host: tuple[CopyBatch | ScatterBatch, ...]
    from_device: Mapping[torch.device, CopyBatch]
    whole: Mapping[str, int]
    """Where in memory the copies of whole tensors are that are taken as they are, by name."""
    scatter: Scatter | None = None
    """The copies that are made by address: to be located before use."""

    @classmethod
    def of(
        cls, items: Sequence[CopyItem], scatter: Scatter | None = None, scattered: Mapping[str, int] | None = None
    ) -> Copies:
        """scatter, scattered: what is copied by address instead, and where in memory that goes, by name."""
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
        """Say where the memory of all tensors is now: those copied by address are found by it."""
        if self.scatter is not None:
            self.scatter.locate(addresses)


def _cut(items: Sequence[CopyItem]) -> Iterable[list[CopyItem]]:
    batch: list[CopyItem] = []
    size = 0
    for whole in items:
        for item in split_rows(whole, BATCH_BYTES):
            batch.append(item)
            size += item.target.nbytes
            if size >= BATCH_BYTES or len(batch) >= BATCH_TENSORS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def split_rows(item: CopyItem, max_bytes: int) -> list[CopyItem]:
    """Cut a large item along its first dimension, so that two threads can share it."""
    nbytes = item.target.nbytes
    if nbytes <= max_bytes or item.target.dim() == 0 or item.target.shape[0] < 2:
        return [item]
    count = item.target.shape[0]
    step = max(1, count * max_bytes // nbytes)
    return [
        CopyItem(
            item.name,
            item.tensor,
            item.box,
            item.target.narrow(0, start, min(step, count - start)),
            (start, min(step, count - start)),
        )
        for start in range(0, count, step)
    ]


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


def _word_bytes(target: torch.Tensor, source: torch.Tensor) -> int:
    """The width of the integers that a large plain block of host memory is copied as; 0 if this isn't one."""
    nbytes = target.nbytes
    if nbytes < SMALL_BYTES or source.dtype != target.dtype or source.device.type != "cpu":
        return 0
    if not (source.is_contiguous() and target.is_contiguous()) or source.is_conj() or source.is_neg():
        return 0
    itemsize = source.element_size()
    return gcd(8, nbytes, source.storage_offset() * itemsize, target.storage_offset() * itemsize)


def _pieces(block: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
    """A contiguous block as one-dimensional integers of ``width`` bytes, in pieces that torch copies serially."""
    flat = block.view(-1).view(compat.SAME_SIZE_INT[width])
    return flat.chunk(-(-flat.numel() // SERIAL_ELEMENTS))
