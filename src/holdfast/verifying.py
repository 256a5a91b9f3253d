"""Whether every byte of a checkpoint is what was committed: all that is wrong, not just the first of it. Torch-free.

Guarantees: a damaged checkpoint is an answer, never an exception; one file that can't be read keeps no other from being
read. Never writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.errors import CheckpointCorrupt, HoldfastError, StorageError
from holdfast.format.manifest import EXTENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.source import Source
    from holdfast.storage.descriptors import StoredFile
    from holdfast.storage.reading import FileSet

SPAN_BYTES: Final = 8 << 20
"""Read and hashed at a time."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: ``path`` of the file, the tensor where known, the byte range where known."""

    path: str
    tensor: str | None
    byte_range: tuple[int, int] | None
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_source` found. ``checksummed`` is False for a foreign checkpoint, which has none."""

    ok: bool
    files: int
    nbytes: int
    checksummed: bool
    problems: tuple[Problem, ...]


def verify_source(source: Source, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
    """Read every byte of ``source`` and compare it with its checksum; returns what is wrong, and raises nothing for it.

    progress: called with (bytes done, bytes in all) now and then, on the calling thread.
    """
    problems = [problem_of(error) for error in source.check_listing()]
    known = source.readable_files
    total = sum(max(0, file.size) for file in known.values())
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    with source.open_files(verify=True) as files:
        for file in known.values():
            if file.size >= 0:  # one that is not there is in the listing
                problems.extend(map(problem_of, _check(files, file, advance)))
    return VerifyReport(not problems, len(known), total, source.checksummed, tuple(problems))


def problem_of(error: HoldfastError) -> Problem:
    """What an error says, as a finding."""
    return Problem(
        getattr(error, "path", ""), getattr(error, "tensor", None), getattr(error, "byte_range", None), str(error)
    )


def _check(files: FileSet, file: StoredFile, advance: Callable[[int], None]) -> Iterator[HoldfastError]:
    """Read a whole file: every extent of it that is wrong, or the one reason why it can't be read."""
    left = file.size
    try:
        files.require(file.name)
        for start, end in _spans(file):
            yield from _bad_extents(files, file.name, start, end)
            left -= end - start
            advance(end - start)
    except (CheckpointCorrupt, StorageError) as error:
        yield error
    advance(left)


def _spans(file: StoredFile) -> Iterator[tuple[int, int]]:
    """What is known of a file, in spans to be read at a time: all of it, but for what unreadable reports are about."""
    at = 0
    for gap, behind in (*file.gaps, (file.size, file.size)):
        for start in range(at, gap, SPAN_BYTES):
            yield start, min(gap, start + SPAN_BYTES)
        at = behind


def _bad_extents(files: FileSet, name: str, start: int, end: int) -> Iterator[CheckpointCorrupt]:
    """Every bad extent of a span, not just its first. Raises `StorageError`."""
    try:
        files.read_span(name, start, end)
        return
    except CheckpointCorrupt:
        pass
    for extent in range(start, end, EXTENT_BYTES):
        try:
            files.read_span(name, extent, min(end, extent + EXTENT_BYTES))
        except CheckpointCorrupt as error:
            yield error
