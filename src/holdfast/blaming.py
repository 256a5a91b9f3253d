"""Whose bytes a damaged extent holds: found by what is known of each record in it. Torch-free.

An extent of 1 MiB may hold hundreds of small tensors, and its checksum says only that one of them is wrong. A report
has a checksum of each tensor's payload as well; what stands around a payload can be rendered anew; an object's record
has the CRCs of a zip archive.

Guarantees: a tensor is named only if bytes of its own are wrong, or if it is too large to be looked at for a name;
reads at most `LOOK_BYTES_MAX` for each record, once. Raises nothing: what can't be read names nobody.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from holdfast.errors import HoldfastError
from holdfast.format.manifest import SUM_BYTES, IndexObject, IndexTensor
from holdfast.format.torch_record import render
from holdfast.storage.plain import open_plain, read_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.format.manifest import RankIndex, Report

LOOK_BYTES_MAX: Final = 64 << 20
_PIECE_BYTES: Final = 256 << 10


class _Row(NamedTuple):
    """One record of a file, with the checksum of its payload where there is one."""

    begin: int
    stop: int
    record: IndexTensor | IndexObject
    payload_sum: bytes


class Blamer:
    """Names the tensor or object that is wrong in a byte range of a file. For any thread."""

    def __init__(self, directory: str, reports: Iterable[tuple[Report, RankIndex]]) -> None:
        self._directory = directory
        self._rows: dict[str, list[_Row]] = {}
        self._whole: dict[tuple[str, int], bool] = {}
        """By file and start of the record, as far as looked at."""
        for report, index in reports:
            names = [file.name for file in report.files]
            for number, tensor in enumerate(index.tensors):
                known = report.tensor_sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
                row = _Row(tensor.record_offset, tensor.record_end, tensor, known)
                self._rows.setdefault(names[tensor.file], []).append(row)
            for kept in index.objects:
                row = _Row(kept.offset, kept.offset + kept.capacity, kept, b"")
                self._rows.setdefault(names[kept.file], []).append(row)
        for rows in self._rows.values():
            rows.sort(key=lambda row: row.begin)

    def __call__(self, file: str, start: int, end: int) -> str | None:
        """The first tensor or object with bytes in the range that are wrong; None where none is, or none lies there."""
        rows = self._rows.get(file, [])
        at = max(0, bisect_right(rows, start, key=lambda row: row.begin) - 1)
        there = []
        for row in rows[at:]:
            if row.begin >= end:
                break
            if row.stop > start:
                there.append(row)
        try:
            large = [row for row in there if not self._is_known_whole(file, row)]
        except _Found as found:
            return str(found)
        return large[0].record.name if large else None

    def _is_known_whole(self, file: str, row: _Row) -> bool:
        """False where it is too large to be looked at. Raises `_Found` if it is wrong."""
        if row.stop - row.begin > LOOK_BYTES_MAX:
            return False
        whole = self._whole.get((file, row.begin))
        if whole is None:
            whole = self._whole[file, row.begin] = self._is_whole(file, row)
        if not whole:
            raise _Found(row.record.name)
        return True

    def _is_whole(self, file: str, row: _Row) -> bool:
        try:
            fd = open_plain(self._directory, file)
        except (HoldfastError, OSError):
            return True  # the file as a whole is wrong: nobody's bytes in particular
        try:
            data = read_at(fd, row.begin, row.stop - row.begin)
        except OSError:
            return False
        finally:
            os.close(fd)
        if len(data) != row.stop - row.begin:
            return False
        return (
            _is_tensor_whole(data, row.record, row.payload_sum)
            if isinstance(row.record, IndexTensor)
            else _is_object_whole(data)
        )


class _Found(Exception):
    """Says whose bytes are wrong."""


def _is_tensor_whole(data: bytes, tensor: IndexTensor, payload_sum: bytes) -> bool:
    at = tensor.payload_offset - tensor.record_offset
    header, trailer = render(tensor.dtype, tensor.sizes, record_offset=tensor.record_offset)
    if data[:at] != header or data[at + tensor.nbytes :] != trailer:
        return False
    digest = xxhash.xxh3_64()
    payload = memoryview(data)[at : at + tensor.nbytes]
    for start in range(0, len(payload), _PIECE_BYTES):
        digest.update(payload[start : start + _PIECE_BYTES])
    return digest.intdigest().to_bytes(SUM_BYTES, "little") == payload_sum


def _is_object_whole(data: bytes) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, RuntimeError, EOFError):
        return False
