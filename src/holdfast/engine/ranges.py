"""Which bytes of an image go where in which file, and which of them O_DIRECT can write. Torch-free, pure."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.engine.messages import FileRow

ALIGN_BYTES: Final = 4096
"""What O_DIRECT wants offsets, sizes and memory to be multiples of."""
TAIL_BYTES: Final = max(ALIGN_BYTES, mmap.PAGESIZE)
"""The tail of a file goes through the page cache: no page of it may be written around the cache as well."""


class Range(NamedTuple):
    """``nbytes`` of the image from ``start`` that go to a file from ``offset`` on."""

    offset: int
    start: int
    nbytes: int


class WrittenFile:
    """One file being written: all of it, or those parts of it that are this rank's.

    ``tail`` is what O_DIRECT can't write, the end of a file of odd size: a range of less than a page. Of the rest
    ``left`` bytes are not written yet; whoever writes the last of them finishes the file: tail, then fsync.
    """

    __slots__ = ("body", "fd", "left", "name", "shared", "size", "tail", "total")

    def __init__(self, rows: Sequence[FileRow]) -> None:
        self.name, self.total = rows[0].name, rows[0].total
        self.size = sum(row.size for row in rows)
        self.shared = self.total is not None and self.size < self.total
        self.body: list[Range] = []
        self.tail: Range | None = None
        for row in rows:
            odd = row.size % TAIL_BYTES if row.size % ALIGN_BYTES else 0
            whole = row.size - odd
            self.body.append(Range(row.offset, row.image_offset, whole))
            if odd:
                self.tail = Range(row.offset + whole, row.image_offset + whole, odd)
        self.left = sum(part.nbytes for part in self.body)
        self.fd = -1

    @property
    def what(self) -> str:
        """What is written of it, for messages."""
        return f"{self.size} bytes of a file of {self.total}" if self.shared else f"{self.size} bytes"


def files_of(rows: Sequence[FileRow]) -> list[WrittenFile]:
    """The files of a plan, those with several parts once."""
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
