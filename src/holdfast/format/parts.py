"""Parts of files that several ranks write together, and whether they make up whole files. Torch-free, pure.

A checkpoint's data file belongs to one rank. A file of an export is cut at multiples of 1 MiB, and each rank writes the
parts that it owns. A part starts at such a multiple, and ends at one or at the end of the file: so it is whole extents,
its checksums are those of the file, and no page of the file is written by two ranks.

Guarantees: `tiling_fault` and `join` find every byte that is in no part or in two, and parts that disagree about a
file's size. Does not: look at files.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.format.sealed import xxh3_128

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.format.manifest import ReportFile

BLOCK_BYTES: Final = 1 << 20
"""Parts start, and but for the last of a file end, on a multiple of this; an extent, too."""
_SUM_BYTES: Final = 8


class FilePart(msgspec.Struct, frozen=True, array_like=True, order=True):
    """``size`` bytes from ``offset`` of the data file ``name``, which has ``total`` bytes in all."""

    name: str
    offset: int
    size: int
    total: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def is_whole(self) -> bool:
        return self.offset == 0 and self.size == self.total


@dataclass(frozen=True, slots=True)
class SparseSums:
    """Checksums of some of a file's extents, to be asked for like the bytes of all of them; of the others, none.

    What a report says of a file's size may be anything: no memory is taken by it.
    """

    starts: tuple[int, ...]
    """Where the sums of each part would begin among those of the whole file, ascending."""
    sums: tuple[bytes, ...]

    def __getitem__(self, wanted: slice) -> bytes:
        at = bisect_right(self.starts, wanted.start) - 1
        return self.sums[at][wanted.start - self.starts[at] : wanted.stop - self.starts[at]] if at >= 0 else b""


@dataclass(frozen=True, slots=True)
class JoinedFile:
    """A data file as its reports tell it together. ``gaps``: byte ranges that no report covers."""

    name: str
    size: int
    extents: bytes | SparseSums
    gaps: tuple[tuple[int, int], ...] = ()


def part_fault(part: FilePart) -> str | None:
    """Why there can be no such part, in words; None if there can."""
    if min(part.offset, part.size, part.total) < 0 or part.end > part.total:
        return f"bytes {part.offset} to {part.end} of {part.name} don't lie in a file of {part.total}"
    if part.size == 0 and part.total > 0:
        return f"the part at byte {part.offset} of {part.name} is empty"
    if part.offset % BLOCK_BYTES or (part.end % BLOCK_BYTES and part.end != part.total):
        return (
            f"bytes {part.offset} to {part.end} of {part.name} ({part.total} bytes) are no part: one starts and ends "
            f"on a multiple of {BLOCK_BYTES}, or ends with the file"
        )
    return None


def tiling_fault(parts: Iterable[FilePart]) -> str | None:
    """Which bytes of which file are in none of ``parts`` or in two of them, in words; None if each is in one."""
    end, last = 0, None
    for part in sorted(parts):
        if last is None or part.name != last.name:
            if last is not None and end != last.total:
                return _missing(last.name, end, last.total)
            end = 0
        elif part.total != last.total:
            return f"{part.name} is said to have {last.total} bytes, and to have {part.total}"
        elif part.total == 0:
            return f"{part.name} is empty, and there twice"
        fault = part_fault(part) or _misplaced(part, end)
        if fault is not None:
            return fault
        end, last = part.end, part
    return _missing(last.name, end, last.total) if last is not None and end != last.total else None


def parts_digest(parts: Iterable[FilePart]) -> str:
    """32 hexadecimal digits that stand for these parts, in whatever order; empty where there are none."""
    ordered = sorted(parts)
    return xxh3_128(msgspec.msgpack.encode(ordered)) if ordered else ""


def parts_in(files: Iterable[ReportFile]) -> tuple[FilePart, ...]:
    """Those of a report's files that are parts of files, in its order."""
    return tuple(FilePart(file.name, file.offset, file.size, file.total) for file in files if file.total is not None)


def join(files: Iterable[ReportFile]) -> list[JoinedFile]:
    """What reports say of their ``files``, parts of one put together, in the order in which files come up first.

    Raises `ValueError` saying which file where two cover the same bytes, or disagree about its size.
    """
    found: dict[str, list[ReportFile]] = {}
    for file in files:
        found.setdefault(file.name, []).append(file)
    return [_joined(name, rows) for name, rows in found.items()]


def _joined(name: str, rows: list[ReportFile]) -> JoinedFile:
    if rows[0].total is None:
        if len(rows) > 1:
            raise ValueError(f"{name} is covered twice, as a whole file")
        return JoinedFile(name, rows[0].size, rows[0].extents)
    total = rows[0].total
    gaps: list[tuple[int, int]] = []
    end = 0
    rows = sorted(rows, key=attrgetter("offset", "size"))
    for row in rows:
        if row.total != total:
            raise ValueError(f"{name} is said to have {total} bytes, and to have {row.total}")
        if row.offset < end:
            raise ValueError(f"bytes {row.offset} to {end} of {name} are covered twice")
        if row.offset > end:
            gaps.append((end, row.offset))
        end = row.offset + row.size
    if end < total:
        gaps.append((end, total))
    sums = tuple(row.extents for row in rows)
    if not gaps:
        return JoinedFile(name, total, b"".join(sums))
    starts = tuple(row.offset // BLOCK_BYTES * _SUM_BYTES for row in rows)
    return JoinedFile(name, total, SparseSums(starts, sums), tuple(gaps))


def gap_in(files: Iterable[JoinedFile]) -> str | None:
    """Which bytes of which file no report covers, in words; None where there are none."""
    for file in files:
        for start, end in file.gaps:
            return _missing(file.name, start, end)
    return None


def _misplaced(part: FilePart, end: int) -> str | None:
    if part.offset > end:
        return _missing(part.name, end, part.offset)
    if part.offset < end:
        return f"bytes {part.offset} to {min(end, part.end)} of {part.name} are in two parts"
    return None


def _missing(name: str, start: int, end: int) -> str:
    return f"bytes {start} to {end} of {name} are in no part"
