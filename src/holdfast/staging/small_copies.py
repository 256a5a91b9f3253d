"""Copies very many small tensors into a file image by their addresses: hundreds in one system call.

An image is a file as well as memory, so one ``pwritev`` copies the payloads of hundreds of records from anywhere in
memory. Between two payloads are bytes that never change, the trailer of one record and the header of the next: those
are taken from the image itself, so that one call covers a whole run of records. A copy by torch takes a microsecond per
tensor and accesses each tensor object; this takes a third of that and accesses none. Above `SCATTER_BYTES_MAX`, the
copying itself dominates.

Guarantees: no byte is written but the payloads named and, with their own value, bytes that are final. The interpreter's
lock is not held. Memory that is gone by then is no crash: the kernel refuses the address, and the copy is made, or
refused with a cause, by torch.
Assumes: sources are contiguous host memory of their targets' length (``state.entries`` checks it when addresses
are recorded), and the caller checks afterwards that the addresses are unchanged (``staging.change_detection``).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from holdfast import _torch_compat as compat
from holdfast.errors import StateMismatch
from holdfast.format.manifest import PAGE_BYTES
from holdfast.staging.image import Image
from holdfast.state.entries import TensorAddresses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from holdfast.state.entries import Addresses

    Otherwise = Callable[[Sequence[int]], None]

SCATTER_BYTES_MAX: Final = 8 << 10
"""Larger payloads are copied as fast by torch."""
_ROWS_MAX: Final = 1024
"""Maximum number of memory ranges in one call (IOV_MAX)."""
_PIECES_MAX: Final = _ROWS_MAX // 2
"""Maximum number of pieces in one call: each may be preceded by final bytes."""
_BATCH_CALLS: Final = 2
_RUN_MIN: Final = 3


class PayloadCopy(NamedTuple):
    """One payload. source: index of its address. place: number of its record.

    Consecutive numbers mean neighbouring records of one file, with only final bytes between their payloads.
    """

    source: int
    offset: int
    nbytes: int
    place: int


Pieces = np.ndarray[Any, np.dtype[np.int64]]
"""A table with one such row per piece."""


class _Call(NamedTuple):
    first_row: int
    rows: int
    offset: int
    nbytes: int


def _pwritev() -> Any:
    # Called with raw addresses, which `os.pwritev` does not accept; 64-bit pointers imply 64-bit offsets.
    function: Any = getattr(ctypes.CDLL(None), "pwritev", None)
    if function is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t
    return function


_write_vector: Final[Any] = _pwritev()
CAN_SCATTER: Final = _write_vector is not None


class _Rows:
    """The sources of all bytes, and the file that they go to."""

    __slots__ = ("__weakref__", "_fd", "_memory", "table")

    def __init__(self, image: Image, table: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        # A duplicate: another thread may still copy into the buffer when its image is closed.
        self._fd = os.dup(image.fd)
        weakref.finalize(self, os.close, self._fd).atexit = False  # other threads may still copy then
        self._memory = image.bytes_view
        self.table = table

    def write(self, call: _Call) -> bool:
        start = self.table.ctypes.data + self.table.strides[0] * call.first_row
        written: int = _write_vector(self._fd, start, call.rows, call.offset)
        return written == call.nbytes


class ScatterBatch:
    """Pieces copied together; ``otherwise(sources)`` copies them if an address can't be read."""

    __slots__ = ("_otherwise", "_rows", "calls", "sources")

    def __init__(self, rows: _Rows, calls: Sequence[_Call], sources: Sequence[int], otherwise: Otherwise) -> None:
        self._rows = rows  # not the `Scatter`: a cycle would keep the memory until it is collected
        self._otherwise = otherwise
        self.calls = calls
        self.sources = sources

    def copy(self, *, non_blocking: bool = False) -> None:  # noqa: ARG002 - as every batch has it
        """Make the copies. Raises `StateMismatch` if a source is gone."""
        if not self.write():
            self._otherwise(self.sources)

    def strictly(self) -> ScatterBatch:
        """Return a batch that raises if an address can't be read, for sources without a substitute."""
        return ScatterBatch(self._rows, self.calls, self.sources, refuse_own)

    def write(self) -> bool:
        """Make the copies; return False if some bytes could not be read."""
        return all(map(self._rows.write, self.calls))


def refuse_own(_: Sequence[int]) -> None:
    """Raise instead of copying one by one: the values are in the capture's own memory."""
    raise AssertionError("values that were gathered for a capture can't be read")


class Scatter:
    """All pieces of one structure in one image, sorted once. Used by one capture at a time."""

    def __init__(self, image: Image, pieces: Sequence[PayloadCopy] | Pieces, otherwise: Otherwise) -> None:
        columns = np.array(pieces, dtype=np.int64).reshape(-1, 4)
        source, offset, nbytes, place = columns[np.argsort(columns[:, 1], kind="stable")].T
        count, end = len(offset), offset + nbytes
        follows = np.zeros(count, dtype=bool)  # whether the previous piece is in the same call
        follows[1:] = place[1:] == place[:-1] + 1
        starts = np.flatnonzero(~follows)
        within = np.arange(count) - np.repeat(starts, np.diff(np.append(starts, count)))
        follows &= within % _PIECES_MAX != 0
        apart = follows.copy()
        apart[1:] &= offset[1:] > end[:-1]
        self._at = np.cumsum(apart + 1) - 1
        table = np.zeros((int(self._at[-1]) + 1 if count else 0, 2), dtype=np.uint64)
        table[self._at, 1] = nbytes
        between = np.flatnonzero(apart)
        table[self._at[between] - 1, 0] = image.bytes_view.data_ptr() + end[between - 1]
        table[self._at[between] - 1, 1] = offset[between] - end[between - 1]
        self._from = source
        self._rows = _Rows(image, table)
        cut: list[tuple[list[_Call], list[int]]] = [([], [])]
        firsts = np.flatnonzero(~follows).tolist()
        for first, stop in zip(firsts, [*firsts[1:], count], strict=True):
            if len(cut[-1][0]) >= _BATCH_CALLS and len(cut[-1][1]) >= _ROWS_MAX // 2:
                cut.append(([], []))
            row, start = int(self._at[first]), int(offset[first])
            rows = int(self._at[stop - 1]) + 1 - row
            cut[-1][0].append(_Call(row, rows, start, int(end[stop - 1]) - start))
            cut[-1][1].extend(source[first:stop].tolist())
        self.batches = [ScatterBatch(self._rows, calls, sources, otherwise) for calls, sources in cut if calls]

    def locate(self, addresses: Sequence[int] | np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        """Set the current addresses of the sources; call it before every use."""
        self._rows.table[self._at, 0] = np.asarray(addresses, dtype=np.uint64)[self._from]


def is_scattered_as_it_is(tensor: torch.Tensor) -> bool:
    """Return True if the memory of ``tensor`` is stored unchanged, byte for byte."""
    return (
        compat.is_plain(tensor)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_complex()  # may be a conjugate view, whose copy has other bits
        and not tensor.is_neg()
    )


def worth_scattering(pieces: Pieces) -> tuple[Pieces, Pieces]:
    """Split pieces into runs of neighbours and single ones, for which separate calls would be no gain."""
    ordered = pieces[np.argsort(pieces[:, 1], kind="stable")]
    follows = np.diff(ordered[:, 3]) == 1
    starts = np.flatnonzero(np.append(True, ~follows)) if len(ordered) else np.arange(0)
    lengths = np.diff(np.append(starts, len(ordered)))
    together = np.repeat(lengths >= _RUN_MIN, lengths)
    return ordered[together], ordered[~together]


def refuse_gone(name: str, tensor: torch.Tensor) -> None:
    """Raise `StateMismatch` if the tensor has released its memory, which torch would read nevertheless."""
    if tensor.numel() and compat.local_tensor(tensor).data_ptr() == 0:
        raise StateMismatch(f"{name}: its memory was freed while it was being saved", mismatched=(name,))


# Gathering: many small eager values are copied together into one block of memory per capture, reused from save to save:
# a quarter of a microsecond per tensor instead of ten. A block belongs to one capture until that returns it or is gone.
# Only plain, contiguous, small tensors in host memory are gathered; others are cloned (``saver.snapshot``).

KEPT_BYTES_MAX: Final = 64 << 20
GATHER_MIN: Final = 32
"""Fewer tensors are cloned just as fast."""


def can_gather(tensor: torch.Tensor) -> bool:
    """Return True if such a tensor is cheaper to copy together with others."""
    return CAN_SCATTER and 0 < tensor.nbytes <= SCATTER_BYTES_MAX and is_scattered_as_it_is(tensor)


class Gathered:
    """The values of one capture; ``addresses`` says where each of ``names`` lies, while this object lives."""

    def __init__(self, source: GatherList, block: _ValueBlock) -> None:
        self.tensors = source.tensors
        """The tensors whose values these are, in the same order."""
        self.names: Sequence[str] = source.names
        self.addresses = block.addresses
        self._source = source
        self._block: _ValueBlock | None = block

    def give_back(self) -> None:
        """Return the memory of these values for reuse; they must not be read any more."""
        block, self._block = self._block, None
        if block is not None:
            self._source.keep(block)


class GatherList:
    """Tensors that `can_gather`, by name; made once per structure. Except `keep`, for the training thread."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.names = tuple(tensors)
        self.places = TensorAddresses(list(tensors.values()))
        sizes = np.array([tensor.nbytes for tensor in tensors.values()], dtype=np.int64)
        offsets = np.cumsum(sizes) - sizes
        self._offsets: Addresses = offsets.astype(np.uint64)
        self._nbytes = -(-int(sizes.sum()) // PAGE_BYTES) * PAGE_BYTES
        numbers = np.arange(len(sizes))
        self._pieces: Pieces = np.stack([numbers, offsets, sizes, numbers], axis=1)
        self._kept: list[_ValueBlock] = []

    def gather(self) -> Gathered | None:
        """Copy the current values; None if a tensor's kind has changed or it can't be read."""
        addresses = self.places.addresses()
        if addresses is None:
            return None
        try:
            block = self._kept.pop()
        except IndexError:
            block = _ValueBlock(self._nbytes, self._offsets, self._pieces)
        return Gathered(self, block) if block.fill(addresses) else None

    def keep(self, block: _ValueBlock) -> None:
        """Keep a block for the next capture, or free it."""
        if (len(self._kept) + 1) * self._nbytes <= KEPT_BYTES_MAX:
            self._kept.append(block)


class _ValueBlock:
    """Memory for the values of one capture."""

    def __init__(self, nbytes: int, offsets: Addresses, pieces: Pieces) -> None:
        self._image = Image(nbytes)
        self.addresses: Addresses = offsets + np.uint64(self._image.bytes_view.data_ptr())
        self._scatter = Scatter(self._image, pieces, refuse_own)

    def fill(self, addresses: Addresses) -> bool:
        """Copy the bytes at these addresses; return False if some can't be read."""
        self._scatter.locate(addresses)
        return all(batch.write() for batch in self._scatter.batches)
