"""Copies strided boxes between memories; used by staging, exports and weight versions.

    copies = CopyList()
    copies.add(target, source)                            # two views of equal shape, of any tensors
    for target, source in views_of(index, memory, into):  # or a `StridedIndex` over two plain memories
        copies.push(target, source)
    copies.make()                                         # all of them in one call of torch

Guarantees: equal dtypes are copied bit for bit, including conjugate and negated views; others are converted as by
``Tensor.to``. `CopyList.make` releases the GIL once, however many copies it has: a trainer that computes in Python
takes up to 5 ms to give it back. `serial_chunks` and `views_of` cut copies into pieces that torch copies on the calling
thread: a second team of threads beside the training's would make both wait at each other's barriers. Allocates only
views, except for a source with negative steps and for conjugate or negated views of a dtype without a copy kernel
(complex32).
Does not: decide what is copied, when, or on which stream; check that a source is still as planned.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.boxes import StridedIndex

SERIAL_ELEMENTS: Final = (32 << 10) - 64
"""Limit below which torch copies on the calling thread: from 32,768 elements on it uses a team of threads."""
BATCH_BYTES: Final = 32 << 20
BATCH_COPIES: Final = 1024
"""A list of this many copies or bytes is made before it grows: in between, work can end and threads take turns."""
_SMALL_BYTES: Final = 32 << 10
"""A block of fewer bytes has fewer elements than `SERIAL_ELEMENTS`, whatever its dtype."""


class CopyList:
    """Copies to be made in one call, in any order; emptied by `make`."""

    __slots__ = ("_alone", "nbytes", "sources", "targets")

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self.nbytes = 0
        """Bytes of the copies that were pushed."""
        self._alone: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def is_full(self) -> bool:
        return self.nbytes >= BATCH_BYTES or len(self.targets) >= BATCH_COPIES

    def push(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy between views for which torch has a kernel."""
        self.targets.append(target)
        self.sources.append(source)
        self.nbytes += target.nbytes

    def append(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy of any view into plain memory."""
        if source.dtype == target.dtype:
            # Some dtypes have no copy kernel on some devices and versions: copy their bits.
            source, target = compat.bits(source), compat.bits(target)
        self.targets.append(target)
        self.sources.append(source)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy of any view into any other."""
        odd = target.is_conj() or target.is_neg() or source.is_conj() or source.is_neg()
        if odd or target.is_inference():
            self._alone.append((target, source))
        else:
            self.append(target, source)

    def make(self, *, non_blocking: bool = False) -> None:
        """Make the copies, or enqueue them on the current stream."""
        with torch.no_grad():
            if self.targets:
                compat.foreach_copy_(self.targets, self.sources, non_blocking=non_blocking)
        for target, source in self._alone:
            # Tensors made in inference mode can't be written to outside of it.
            with torch.inference_mode() if target.is_inference() else torch.no_grad():
                compat.copy_(target, source, non_blocking=non_blocking)
        self.targets, self.sources, self.nbytes, self._alone = [], [], 0, []


# Views of tensors ----------------------------------------------------------------------------------------------


def lies_as_it_is(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's bytes, in row-major order, are contiguous in host memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def word_bytes(target: torch.Tensor, source: torch.Tensor) -> int:
    """Return the word width for copying a large contiguous block of host memory; 0 for any other copy."""
    nbytes = target.nbytes
    if nbytes < _SMALL_BYTES or source.dtype != target.dtype:
        return 0
    if not (lies_as_it_is(source) and target.is_contiguous()):
        return 0
    itemsize = source.element_size()
    return gcd(8, nbytes, source.storage_offset() * itemsize, target.storage_offset() * itemsize)


def words_of(block: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
    """Return a contiguous block as `serial_chunks` of integers of ``width`` bytes."""
    return serial_chunks(block.view(-1).view(compat.SAME_SIZE_INT[width]))


def serial_chunks(run: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a one-dimensional tensor into pieces that torch copies on the calling thread; they keep its alignment."""
    return run.unsafe_split(SERIAL_ELEMENTS)  # faster than `split`: autograd doesn't track the views


def row_ranges(tensor: torch.Tensor, max_bytes: int) -> Sequence[tuple[int, int]]:
    """Return (start, count) of row ranges that cut a tensor; empty if it has at most ``max_bytes``, or no rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if tensor.nbytes <= max_bytes or rows < 2:
        return ()
    step = max(1, rows * max_bytes // tensor.nbytes)
    return [(start, min(step, rows - start)) for start in range(0, rows, step)]


# Plain memories ------------------------------------------------------------------------------------------------


def elements_of(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View one-dimensional bytes as elements of ``dtype``, without an incomplete last one."""
    if dtype == torch.uint8:
        return memory
    itemsize = dtype.itemsize
    return memory[: memory.numel() // itemsize * itemsize].view(dtype)


class ByteMemory:
    """One-dimensional contiguous bytes, viewed as elements of any dtype."""

    __slots__ = ("_bytes", "_typed")

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = memory
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all whole elements of ``dtype``."""
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = elements_of(self._bytes, dtype)
        return found

    def block(self, at: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the row-major block of ``sizes`` that starts at byte ``at``."""
        elements = self.elements(dtype)
        return elements.as_strided(sizes, strides(sizes), elements.storage_offset() + at // dtype.itemsize)


def strided(source: torch.Tensor, counts: tuple[int, ...], steps: tuple[int, ...], at: int) -> torch.Tensor:
    """Return elements of a one-dimensional tensor from number ``at`` on: a view, or a copy if a step is negative."""
    if any(step < 0 for step in steps):  # not supported by torch
        at += sum((count - 1) * step for count, step in zip(counts, steps, strict=True) if step < 0)
        forward = source.as_strided(counts, tuple(map(abs, steps)), source.storage_offset() + at)
        return forward.flip([dim for dim, step in enumerate(steps) if step < 0])
    return source.as_strided(counts, steps, source.storage_offset() + at)


def views_of(
    index: StridedIndex, source: torch.Tensor, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (target, source) views for ``index`` over two one-dimensional tensors, small enough for serial copies."""
    if index.source_steps == index.target_steps == (1,) and index.counts[0] > SERIAL_ELEMENTS:
        (count,) = index.counts
        into, out_of = target.narrow(0, index.target_at, count), source.narrow(0, index.source_at, count)
        yield from zip(serial_chunks(into), serial_chunks(out_of), strict=True)
        return
    for counts, source_at, source_steps, target_at, target_steps in index.parts(SERIAL_ELEMENTS):
        place = target.as_strided(counts, target_steps, target.storage_offset() + target_at)
        yield place, strided(source, counts, source_steps, source_at)
