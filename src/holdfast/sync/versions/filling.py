"""Copy a version's pieces into a block, from memory of any kind, and hash what lies there while it is in the cache.

    pieces -> jobs, each some ranges of the block -> threads copy -> an extent that no job writes to any more is hashed

What lies in host memory as it is sent is copied byte by byte. Tiles of one matrix (``weights.tiles``) are filled
together, some rows at a time: the matrix is read once, in its order, and converted once, before it is cut. Everything
else is for torch.

Guarantees: as in ``staging.copier``, whatever is large is copied by the calling threads only, unless it has a layout
that only torch knows (transposed, conjugate).
Assumes: the pieces don't change meanwhile; `data` begins on a multiple of 256 bytes.
Does not: know what the block is for.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import xxhash

from holdfast import _torch_compat as compat
from holdfast.cores import take_turns
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.staging.copier import SERIAL_ELEMENTS, ByteMemory, CopyList, lies_as_it_is
from holdfast.state.entries import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.sync.versions.block import BlockLayout, Sums
    from holdfast.sync.weights.pieces import Local

JOB_BYTES: Final = 4 << 20
"""Bytes of a block that a thread fills at a time, and for each tile of several an extent."""
_STEP_BYTES: Final = 1 << 20
"""Rows of so many bytes are converted, and cut into tiles, before the next."""


_WORD_BYTES_MAX: Final = 8


class _Target:
    """A piece's place in the block, and its memory."""

    __slots__ = ("end", "local", "start", "tensor")

    def __init__(self, start: int, tensor: torch.Tensor, local: Local) -> None:
        self.start = start
        self.end = start + tensor.nbytes
        self.tensor = tensor
        self.local = local


class BlockFilling:
    """Fills one block with one version."""

    def __init__(self, layout: BlockLayout, pieces: Sequence[Local], data: torch.Tensor) -> None:
        """data: the block's bytes for pieces."""
        self.sums: Sums = np.zeros(layout.extents, np.uint64)
        self._data = data
        self._view = compat.host_memory(data)
        self._end = layout.data_bytes
        self._left = [0] * layout.extents
        """How many jobs are yet to write to an extent."""
        self._lock = threading.Lock()
        self._jobs: list[Callable[[], None]] = []
        self._next: tuple[set[int], list[Callable[[], object]]] = set(), []
        """The extents and the copies of the job that is being made up."""
        self._next_bytes = 0
        into = ByteMemory(data)
        groups: dict[int, list[_Target]] = {}
        for number, (local, piece) in enumerate(zip(pieces, layout.table, strict=True)):
            if layout.own[number] and layout.nbytes(number):
                target = into.block(layout.starts[number], piece.sizes, torch_dtype(piece.dtype))
                one = _Target(layout.starts[number], target, local)
                groups.setdefault(id(local.columns_of or local), []).append(one)
        self._groups = list(groups.values())

    def copy_from_devices(self, *, non_blocking: bool) -> None:
        """Copy what isn't in host memory, and wait for it."""
        copies = CopyList()
        devices = set()
        for one in (one for group in self._groups for one in group):
            if not one.local.source.is_cpu:
                copies.add(one.tensor, one.local.source)
                devices.add(one.local.source.device)
        try:
            copies.make(non_blocking=non_blocking)
        finally:
            for device in devices:
                torch.accelerator.current_stream(device).synchronize()

    def run(self, threads: int) -> None:
        """Copy all else, and hash all of it; once: no reference to the block or the pieces is left then."""
        groups, self._groups = self._groups, []
        for group in groups:
            self._plan(group)
        self._end_job()
        jobs, self._jobs = self._jobs, []  # they refer to this one, which would wait for Python's cyclic collector
        take_turns(jobs, threads)

    def _plan(self, group: list[_Target]) -> None:
        source, dtype = group[0].local.source, group[0].local.dtype
        if not source.is_cpu:
            for one in group:
                self._add_bytes(one, None)
        elif len(group) == 1 and source.dtype == dtype and lies_as_it_is(source):
            self._add_bytes(group[0], source.data_ptr())
        elif (rows := _MatrixRows.of(group)) is not None:
            step = max(1, JOB_BYTES * len(group) // rows.row_bytes)
            for first in range(0, rows.count, step):
                last = min(first + step, rows.count)
                self._add(rows.ranges(first, last), partial(rows.copy, first, last))
        else:
            for one in group:
                self._add([(one.start, one.end)], partial(_copy, one.tensor, one.local.source))

    def _add_bytes(self, one: _Target, address: int | None) -> None:
        """Add the copy of contiguous bytes; address: None if they are there already."""
        base, start = self._data.data_ptr(), one.start
        while start < one.end:
            end = min(one.end, start // JOB_BYTES * JOB_BYTES + JOB_BYTES)
            at = 0 if address is None else address + start - one.start
            copy = _nothing if address is None else partial(ctypes.memmove, base + start, at, end - start)
            self._add([(start, end)], copy)
            start = end

    def _add(self, ranges: list[tuple[int, int]], copy: Callable[[], object]) -> None:
        """Add a copy that fills these ranges: a job has several small ones."""
        extents, copies = self._next
        copies.append(copy)
        for start, end in ranges:
            extents.update(range(start // EXTENT_BYTES, (end - 1) // EXTENT_BYTES + 1))
            self._next_bytes += end - start
        if self._next_bytes >= JOB_BYTES:
            self._end_job()

    def _end_job(self) -> None:
        extents, copies = self._next
        for extent in extents:
            self._left[extent] += 1
        self._jobs.append(partial(self._run, copies, extents))
        self._next, self._next_bytes = (set(), []), 0

    def _run(self, copies: list[Callable[[], object]], extents: set[int]) -> None:
        for copy in copies:
            copy()
        with self._lock:
            for extent in extents:
                self._left[extent] -= 1
            complete = [extent for extent in extents if not self._left[extent]]
        for extent in complete:
            start = extent * EXTENT_BYTES
            self.sums[extent] = xxhash.xxh3_64_intdigest(self._view[start : min(start + EXTENT_BYTES, self._end)])


def _nothing() -> None:
    """Copy nothing."""


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    copies = CopyList()
    copies.add(target, source)
    copies.make()


class _MatrixRows:
    """Rows of a matrix in host memory, of which each target takes some columns."""

    def __init__(self, source: torch.Tensor, targets: list[tuple[_Target, torch.Tensor, int]]) -> None:
        """targets: each with its rows as a matrix, and its first column of ``source``."""
        self.count = source.shape[0]
        dtype = targets[0][1].dtype
        self._is_cast = source.dtype != dtype
        self._columns = source.shape[1]
        self._dtype = dtype
        self._source = source
        self.row_bytes = sum(matrix.shape[1] for _, matrix, _ in targets) * dtype.itemsize
        self._targets = targets
        self._is_cut = len(targets) > 1
        lines = [source.stride(0) if not self._is_cast else self._columns, self._columns]
        lines += [number for _, matrix, column in targets for number in (matrix.shape[1], column)]
        at = 0 if self._is_cast else source.storage_offset()
        self._width = gcd(_WORD_BYTES_MAX, *(number * dtype.itemsize for number in (*lines, at)))
        self._words = [(self._in_words(matrix), self._word_of(column)) for _, matrix, column in targets]

    @classmethod
    def of(cls, group: list[_Target]) -> _MatrixRows | None:
        """Return the rows of some tiles, or of one piece; None if torch has to find out how they lie."""
        first = group[0].local
        matrix = (first.columns_of or first).source.detach() if len(group) > 1 else first.source.detach()
        if matrix.is_conj() or matrix.is_neg() or matrix.element_size() > _WORD_BYTES_MAX:
            return None
        if len(group) == 1 and matrix.is_contiguous():
            return cls(matrix.view(-1, 1), [(group[0], group[0].tensor.view(-1, 1), 0)])
        if matrix.dim() < 2 or matrix.stride(-1) != 1:
            return None
        begin = 0 if len(group) == 1 or first.columns_of is None else first.columns_of.box.offsets[-1]
        try:
            rows = matrix.view(-1, matrix.shape[-1])
        except RuntimeError:  # outer dimensions that no one step goes through
            return None
        columns = [0 if len(group) == 1 else one.local.box.offsets[-1] - begin for one in group]
        targets = [one.tensor.view(-1, one.tensor.shape[-1]) for one in group]
        return cls(rows, list(zip(group, targets, columns, strict=True)))

    def ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the bytes of the block that `copy` of these rows fills."""
        found = []
        for one, matrix, _ in self._targets:
            row = matrix.shape[1] * matrix.element_size()
            found.append((one.start + first * row, one.start + last * row))
        return found

    def copy(self, first: int, last: int) -> None:
        """Fill these rows of all targets."""
        step = last - first
        if self._is_cast and self._is_cut:
            step = min(step, max(1, _STEP_BYTES // self.row_bytes))
        converted = torch.empty(step if self._is_cast and self._is_cut else 0, self._columns, dtype=self._dtype)
        for row in range(first, last, step):
            end = min(row + step, last)
            source = self._source[row:end]
            copies = CopyList()
            if self._is_cast:
                target = converted[: end - row] if self._is_cut else self._targets[0][1][row:end]
                for into, out_of in _serially(target, source):
                    copies.append(into, out_of)
                copies.make()
                if not self._is_cut:
                    continue
                source = target
            words = self._in_words(source)
            for matrix, column in self._words:
                for pair in _serially(matrix[row:end], words[:, column : column + matrix.shape[1]]):
                    copies.push(*pair)
            copies.make()

    def _in_words(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.view(compat.SAME_SIZE_INT[self._width])

    def _word_of(self, column: int) -> int:
        return column * self._dtype.itemsize // self._width


def _serially(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a copy of rows into some that torch makes on the calling thread, unless a row is longer."""
    rows = max(1, SERIAL_ELEMENTS // target.shape[1])
    yield from zip(target.unsafe_split(rows), source.unsafe_split(rows), strict=True)
