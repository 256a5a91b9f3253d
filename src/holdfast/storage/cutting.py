"""Pieces of a file, cut into what one read takes. Torch-free, pure.

Guarantees: what comes out is what went in, in the same order; no extent that is hashed is divided between two jobs.
Assumes: pieces are sorted by start and don't overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.format.manifest import EXTENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

JOB_BYTES: Final = 8 * EXTENT_BYTES
"""One read around the page cache: disks want many requests at a time, or large ones."""


class Piece(NamedTuple):
    """Bytes ``start`` up to ``start + len(memory)`` of a file go to ``memory`` (writable, contiguous, bytes)."""

    start: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.start + len(self.memory)


def cut_for_jobs(pieces: Iterable[Piece], *, hashed: bool, gap_bytes_max: int) -> Iterator[list[Piece]]:
    """The pieces by the jobs that read them: those that lie in one stretch of `JOB_BYTES`, and close to each other.

    hashed: whole extents are read, and two that have others between them are not close; else it's more than
    ``gap_bytes_max``, or an extent, that makes them so. All pieces are cut here before the first byte of any is read,
    by one thread: in as few steps as can be, the rest being left to the jobs.
    """
    group: list[Piece] = []
    end = limit = 0
    for piece in pieces:
        start, memory = piece
        apart = start // EXTENT_BYTES > (end - 1) // EXTENT_BYTES + 1 or (start - end > gap_bytes_max and not hashed)
        end = start + len(memory)
        if group and not apart and end <= limit:
            group.append(piece)
            continue
        while memory:
            if group and (apart or start >= limit):
                yield group
                group = []
            if not group:
                limit = (start // JOB_BYTES + 1) * JOB_BYTES
            apart = False
            take = min(len(memory), limit - start)
            group.append(Piece(start, memory[:take]))
            start, memory = start + take, memory[take:]
    if group:
        yield group


def cut_at_steps(pieces: Iterable[Piece], step: int, size: int) -> Iterator[Piece]:
    """The same pieces, cut so that each lies within a stretch of ``step`` bytes or is some whole ones of a job's."""
    for piece in pieces:
        start, memory = piece
        if memory and start // step == (start + len(memory) - 1) // step:
            yield piece
            continue
        while memory:
            take = step - start % step
            if take == step:
                whole = len(memory) if start + len(memory) == size else len(memory) // step * step
                take = max(step, min(whole, JOB_BYTES - start % JOB_BYTES))
            take = min(take, len(memory))
            yield Piece(start, memory[:take])
            start, memory = start + take, memory[take:]
