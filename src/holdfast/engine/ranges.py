"""Map bytes of an image to ranges of files, and find those that O_DIRECT can write. Torch-free, pure."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.format.manifest import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.engine.messages import FileRow

TAIL_BYTES: Final = max(PAGE_BYTES, mmap.PAGESIZE)
"""The tail of a file is written through the page cache: no page of it may also be written around the cache."""


class Range(NamedTuple):
    """``nbytes`` of the image from ``start``, written to a file at ``offset``."""

    offset: int
    start: int
    nbytes: int


class WrittenFile:
    """One file being written: all of it, or this rank's parts of it.

    tail: what O_DIRECT can't write: the end of a file of odd size, less than a page. left: bytes of the rest not
    written yet; whoever writes the last of them finishes the file: tail, then fsync.
    """

    __slots__ = ("body", "fd", "left", "name", "shared", "size", "tail", "total")

    def __init__(self, rows: Sequence[FileRow]) -> None:
        self.name, self.total = rows[0].name, rows[0].total
        self.size = sum(row.size for row in rows)
        self.shared = self.total is not None and self.size < self.total
        self.body: list[Range] = []
        self.tail: Range | None = None
        for row in rows:
            odd = row.size % TAIL_BYTES if row.size % PAGE_BYTES else 0
            whole = row.size - odd
            self.body.append(Range(row.offset, row.image_offset, whole))
            if odd:
                self.tail = Range(row.offset + whole, row.image_offset + whole, odd)
        self.left = sum(part.nbytes for part in self.body)
        self.fd = -1

    @property
    def what(self) -> str:
        """Describe what is written of the file, for messages."""
        return f"{self.size} bytes of a file of {self.total}" if self.shared else f"{self.size} bytes"


def files_of(rows: Sequence[FileRow]) -> list[WrittenFile]:
    """Return the files of a plan; a file with several parts is listed once."""
    shared: dict[str, list[FileRow]] = {}
    found: list[list[FileRow]] = []
    for row in rows:
        if row.total is None:
            found.append([row])
        elif row.name in shared:
            shared[row.name].append(row)
        else:
            found.append(shared.setdefault(row.name, [row]))
    return [WrittenFile(of_file) for of_file in found]
