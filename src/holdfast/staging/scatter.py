"""Copies of very many small tensors into a file image by their addresses: hundreds in one system call.

An image is a file as well as memory, so one ``pwritev`` takes the payloads of hundreds of records from wherever they
lie. Between two payloads stand bytes that never change, the trailer of one record and the header of the next: those are
taken from the image itself, so that one call covers a whole stretch of records. A copy by torch costs a microsecond a
tensor and looks at each; this costs a third of it and looks at none. From `SCATTER_BYTES_MAX` on copying costs more
than looking.

Guarantees: no byte is written but the payloads named and, with their own value, bytes that are final. The interpreter's
lock is not held. Memory that is gone by then is no crash: the kernel refuses the address, and the copy is made, or
refused with a cause, by torch.
Assumes: sources are contiguous host memory as long as their targets (``tensor_kinds`` looks when addresses are noted),
and whoever noted the addresses looks afterwards whether they still held (``staging.tripwire``).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from holdfast import _torch_compat as compat
from holdfast.errors import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from holdfast.staging.image import Image

    Otherwise = Callable[[Sequence[int]], None]

SCATTER_BYTES_MAX: Final = 8 << 10
"""Payloads of more bytes are copied no faster than by torch."""
_ROWS_MAX: Final = 1024
"""As many stretches of memory as one call takes (IOV_MAX)."""
_PIECES_MAX: Final = _ROWS_MAX // 2
"""Of one call: each may have final bytes before it."""
_BATCH_CALLS: Final = 2
_RUN_MIN: Final = 3


class Piece(NamedTuple):
    """One payload: ``source`` says whose address it comes from, ``place`` counts the records of a file in order.

    Neighbouring numbers mean neighbouring records of one file, with nothing but final bytes between their payloads.
    """

    source: int
    offset: int
    nbytes: int
    place: int


Pieces = np.ndarray[Any, np.dtype[np.int64]]
"""A row of such numbers for each piece."""


class _Call(NamedTuple):
    first_row: int
    rows: int
    offset: int
    nbytes: int


def _pwritev() -> Any:
    # By numbers, which `os.pwritev` doesn't take; where a number is an address, an offset has 64 bits.
    function: Any = getattr(ctypes.CDLL(None), "pwritev", None)
    if function is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    function.restype = ctypes.c_ssize_t
    return function


_write_vector: Final[Any] = _pwritev()
CAN_SCATTER: Final = _write_vector is not None


class _Rows:
    """Where all bytes come from, and the file that they go to."""

    __slots__ = ("__weakref__", "_fd", "_memory", "table")

    def __init__(self, image: Image, table: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        # Its own: a buffer may be given up, and its image closed, while another thread still copies into it.
        self._fd = os.dup(image.fd)
        weakref.finalize(self, os.close, self._fd).atexit = False  # other threads may still copy then
        self._memory = image.bytes_view
        self.table = table

    def write(self, call: _Call) -> bool:
        start = self.table.ctypes.data + self.table.strides[0] * call.first_row
        written: int = _write_vector(self._fd, start, call.rows, call.offset)
        return written == call.nbytes


class ScatterBatch:
    """Some pieces, copied in one go; by ``otherwise``, given their sources, where an address can't be read."""

    __slots__ = ("_otherwise", "_rows", "calls", "sources")

    def __init__(self, rows: _Rows, calls: Sequence[_Call], sources: Sequence[int], otherwise: Otherwise) -> None:
        self._rows = rows  # not the `Scatter`, which has this: cycles keep memory until they are looked for
        self._otherwise = otherwise
        self.calls = calls
        self.sources = sources

    def copy(self, *, non_blocking: bool = False) -> None:  # noqa: ARG002 - as every batch has it
        """Make the copies. Raises `StateMismatch` where a source is gone."""
        if not self.write():
            self._otherwise(self.sources)

    def strictly(self) -> ScatterBatch:
        """The same, for sources that nothing else may stand in for."""
        return ScatterBatch(self._rows, self.calls, self.sources, refuse_own)

    def write(self) -> bool:
        """Make the copies; False if not all that was to be read could be."""
        return all(map(self._rows.write, self.calls))


def refuse_own(_: Sequence[int]) -> None:
    """Of memory that is the capture's own."""
    raise AssertionError("values that were gathered for a capture can't be read")


class Scatter:
    """All pieces of one structure in one image, once sorted, for ever. One capture at a time."""

    def __init__(self, image: Image, pieces: Sequence[Piece] | Pieces, otherwise: Otherwise) -> None:
        columns = np.array(pieces, dtype=np.int64).reshape(-1, 4)
        source, offset, nbytes, place = columns[np.argsort(columns[:, 1], kind="stable")].T
        count, end = len(offset), offset + nbytes
        follows = np.zeros(count, dtype=bool)  # the piece before, in the same call
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
        """Say where the sources are now; before every use."""
        self._rows.table[self._at, 0] = np.asarray(addresses, dtype=np.uint64)[self._from]


def is_scattered_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` is, byte for byte, what is to be stored of it."""
    return (
        compat.is_plain(tensor)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_complex()  # may be a conjugate view, whose copy has other bits
        and not tensor.is_neg()
    )


def worth_scattering(pieces: Pieces) -> tuple[Pieces, Pieces]:
    """Those that stand together, and those that stand alone: a call for each of these would be no gain."""
    ordered = pieces[np.argsort(pieces[:, 1], kind="stable")]
    follows = np.diff(ordered[:, 3]) == 1
    starts = np.flatnonzero(np.append(True, ~follows)) if len(ordered) else np.arange(0)
    lengths = np.diff(np.append(starts, len(ordered)))
    together = np.repeat(lengths >= _RUN_MIN, lengths)
    return ordered[together], ordered[~together]


def refuse_gone(name: str, tensor: torch.Tensor) -> None:
    """Raise `StateMismatch` if the tensor has given up its memory, which torch would read all the same."""
    if tensor.numel() and compat.local_tensor(tensor).data_ptr() == 0:
        raise StateMismatch(f"{name}: its memory was given up while it was being saved", mismatched=(name,))
