"""Reading ranges of stored files into memory, and proving them right on the way. Torch-free.

A `Piece` says which bytes of a file go to which memory. Pieces of a file are gathered into jobs of a few whole 1 MiB
extents. One `preadv` brings an extent straight to its destinations, with the bytes between them going to a scratch
buffer, because its checksum covers those too. Hashing follows at once, while the bytes are in the cache. Jobs run on a
few threads; reading and hashing release the GIL.

Guarantees: with checksums, no byte reaches the caller unverified without an error being raised; a file that is
missing, shorter or longer than committed is `CheckpointCorrupt`; memory beside the destinations is bounded by one
scratch buffer a thread.
Does not: know tensors. The caller says what a range holds when it is found corrupt.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from holdfast.errors import CheckpointCorrupt, StorageError
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.storage.cutting import JOB_BYTES, Piece, cut_at_steps, cut_for_jobs
from holdfast.storage.descriptors import Descriptors, StoredFile, refused
from holdfast.storage.page_cache import PageCache
from holdfast.storage.turns import take_turns

if TYPE_CHECKING:
    from typing_extensions import Self

PARTS_MAX: Final = 256
"""More destinations than this in one call are filled from scratch: with the gaps between, the system takes 1,024."""
SMALL_PART_BYTES: Final = 16 << 10
GAP_BYTES_MAX: Final = 2 * EXTENT_BYTES
"""Bytes that nobody wants are read along with their neighbours, rather than with another call behind them."""
PAGE_BYTES: Final = 4096
"""What O_DIRECT wants offsets, lengths and memory to be multiples of; some file systems are content with less."""


class _Run(NamedTuple):
    """Pieces of a file that one call reads, with all between ``base`` and ``stop``; one extent where it is hashed."""

    base: int
    stop: int
    pieces: list[Piece]


Blame = Callable[[str, int, int], "str | None"]
"""Names the tensor or object that lies in a byte range of a file, for messages."""


class FileSet:
    """The committed files of one directory, open for reading; a context manager.

    ``blame`` is asked for the tensor in a range that is found corrupt. ``verify`` False skips checksums.
    ``direct``: read what isn't in the page cache around it (O_DIRECT), where the file system can: a fraction of the
    processor's time, and nothing is pushed out of memory; but the next reader of the same bytes finds them on the disk.
    ``gap_bytes_max``: of what isn't hashed, no more bytes than these are read between two that are wanted; with 0
    nothing but what is wanted. ``links``: as in `open_plain`.
    Thread-safe.
    """

    def __init__(
        self,
        directory: str,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        threads: int,
        blame: Blame,
        direct: bool = False,
        gap_bytes_max: int = GAP_BYTES_MAX,
        links: bool = False,
    ) -> None:
        self.gap_bytes_max = gap_bytes_max
        self._directory = directory
        self._files = files
        self._verify = verify
        self._blame = blame
        self._direct = direct and hasattr(os, "O_DIRECT")
        self._buffered: set[str] = set()
        """Files that can't be read around the page cache."""
        self._caches: dict[str, PageCache] = {}
        self._descriptors = Descriptors(directory, links=links)
        self._scratch = threading.local()
        self._threads = threads
        self._waits = False
        """A disk will be waited for: then more threads than cores are of use, and else they are in each other's way."""
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._descriptors.close()

    def path_of(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def is_hashed(self, name: str) -> bool:
        """Whether what is read of a file is matched with checksums, and so always whole extents of it."""
        return self._verify and self._file(name).extents is not None

    def require(self, name: str) -> None:
        """Open a file; raises unless it is there with the size it was committed with."""
        with self._descriptors.opened(self._file(name)):
            pass

    def read(self, work: Iterable[Callable[[], None]]) -> None:
        """Run jobs (of `jobs_for`, or others that use `read_span`), the caller's thread and others taking turns.

        Returns when all have ended; of errors the first is raised, and no job is begun after it.
        """
        jobs = list(work)  # which may be what finds out whether a disk will be waited for
        take_turns(jobs, self._threads if self._waits else min(self._threads, len(os.sched_getaffinity(0))))

    def jobs_for(self, name: str, pieces: Sequence[Piece]) -> list[Callable[[], None]]:
        """Jobs that fill ``pieces`` of file ``name``; the pieces are sorted by start and don't overlap."""
        file = self._file(name)
        groups = cut_for_jobs(pieces, hashed=self.is_hashed(name), gap_bytes_max=self.gap_bytes_max)
        jobs = [self._job(file, group) for group in groups]
        if pieces and not self._waits:
            self._waits = not all(self._is_cached(file, pieces[at].start) for at in (0, len(pieces) // 2, -1))
        return jobs

    def _runs(self, file: StoredFile, pieces: Iterable[Piece]) -> Iterator[_Run]:
        """The pieces by the extents they lie in: one extent that several share, or any number that one has whole.

        Where nothing is hashed there are no extents to respect, and a run is whatever lies in a stretch of a job.
        """
        hashed = self.is_hashed(file.name)
        step = EXTENT_BYTES if hashed else JOB_BYTES
        gap_max = GAP_BYTES_MAX if hashed else self.gap_bytes_max
        group: list[Piece] = []
        extent = 0
        for piece in cut_at_steps(pieces, step, file.size):
            begin, last = piece.start // EXTENT_BYTES, (piece.end - 1) // EXTENT_BYTES
            if group and (
                piece.start // step != group[0].start // step
                or begin > extent + 1
                or piece.start - group[-1].end > gap_max
            ):
                yield _Run(*self._bounds(file, group[0].start, group[-1].end), group)
                group = []
            group.append(piece)
            extent = last
        if group:
            yield _Run(*self._bounds(file, group[0].start, group[-1].end), group)

    def read_span(self, name: str, start: int, end: int) -> memoryview:
        """Bytes ``start`` to ``end`` of a file, verified, in the calling thread's scratch buffer.

        Valid until the thread's next call. The span should be bounded: the buffer is as large as the extents it
        touches. What the last call brought in is not read again.
        """
        file = self._file(name)
        self._check_range(file, start, end)
        self.require(name)  # before memory is taken for what the file is said to hold
        base, stop = self._bounds(file, start, end)
        held: tuple[str, int, int] = getattr(self._scratch, "held", ("", 0, 0))
        if not (held[0] == name and held[1] <= base and stop <= held[2]):
            buffer = self._scratch_of(stop - base)
            self._fill(file, base, [buffer])
            self._check(file, base, stop, [buffer])
            held = self._scratch.held = (name, base, stop)
        return memoryview(self._scratch.buffer)[start - held[1] : end - held[1]]

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]]) -> memoryview:
        """The ranges (start, end) of a file that isn't hashed, end to end, in the calling thread's scratch buffer.

        Nothing between them is read. As with `read_span`, valid until the thread's next call, and to be bounded.
        """
        file = self._file(name)
        for start, end in runs:
            self._check_range(file, start, end)
        self.require(name)
        buffer = self._scratch_of(sum(end - start for start, end in runs))
        at = 0
        with self._descriptors.opened(file) as fd:
            for start, end in runs:
                self._fill_from(fd, file, start, [buffer[at : at + end - start]])
                at += end - start
        return buffer

    def read_unverified(self, name: str, start: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a file from ``start`` on, as they are."""
        file = self._file(name)
        self._check_range(file, start, start + len(memory))
        self._fill(file, start, [memory])

    def map(self, name: str) -> mmap.mmap:
        """A file in memory, its pages read as they are touched and verified by nobody; what is written stays here."""
        file = self._file(name)
        with self._descriptors.opened(file) as fd:
            return mmap.mmap(fd, file.size, access=mmap.ACCESS_COPY)

    def _check_range(self, file: StoredFile, start: int, end: int) -> None:
        path = self.path_of(file.name)
        if file.size < 0:
            raise CheckpointCorrupt(f"{path} is missing; the checkpoint refers to it", path=path)
        if not 0 <= start <= end <= file.size:
            raise CheckpointCorrupt(
                f"{path}: bytes {start} to {end} were to be read, but it has {file.size}",
                path=path,
                byte_range=(start, end),
            )

    def _bounds(self, file: StoredFile, start: int, end: int) -> tuple[int, int]:
        """What to read for bytes ``start`` to ``end``: whole extents where they have to be hashed."""
        if not self._verify or file.extents is None:
            return start, end
        last = max(start, end - 1) // EXTENT_BYTES
        return start // EXTENT_BYTES * EXTENT_BYTES, min(file.size, (last + 1) * EXTENT_BYTES)

    def _job(self, file: StoredFile, pieces: Sequence[Piece]) -> Callable[[], None]:
        def job() -> None:
            base, stop = self._bounds(file, pieces[0].start, pieces[-1].end)
            around = self._read_around_cache(file, base, stop) if self._is_cold(file, (base + stop) // 2) else None
            if around is not None:
                self._check(file, base, stop, [around])
                for start, memory in pieces:
                    _copy(memory, around[start - base : start - base + len(memory)])
                return
            with self._descriptors.opened(file) as fd:
                for run in self._runs(file, pieces):
                    self._read_run(fd, file, run)

        return job

    def _read_run(self, fd: int, file: StoredFile, run: _Run) -> None:
        base, stop, pieces = run
        memory = pieces[0].memory
        if len(memory) == stop - base:
            self._read_whole(fd, file, base, memory)
            return
        if len(pieces) > PARTS_MAX or (stop - base) // len(pieces) < SMALL_PART_BYTES:
            scratch = self._scratch_of(stop - base)
            self._fill_from(fd, file, base, [scratch])
            self._check(file, base, stop, [scratch])
            for start, memory in pieces:
                memory[:] = scratch[start - base : start - base + len(memory)]
            return
        between: memoryview | None = None
        parts = []
        at = base
        for start, memory in pieces:
            if start > at:
                between = between or self._scratch_of(stop - base)
                parts.append(between[at - base : start - base])
            parts.append(memory)
            at = start + len(memory)
        if at < stop:
            between = between or self._scratch_of(stop - base)
            parts.append(between[at - base : stop - base])
        self._fill_from(fd, file, base, parts)
        self._check(file, base, stop, parts)

    def _read_whole(self, fd: int, file: StoredFile, base: int, memory: memoryview) -> None:
        """Fill one destination: an extent at a time where they are hashed, while each is in the core's cache."""
        sums = file.extents if self._verify else None
        if sums is None:
            for at in range(0, len(memory), JOB_BYTES):
                self._fill_from(fd, file, base + at, [memory[at : at + JOB_BYTES]])
            return
        digest, preadv = xxhash.xxh3_64_intdigest, os.preadv
        extent = base // EXTENT_BYTES
        for at in range(0, len(memory), EXTENT_BYTES):
            part = memory[at : at + EXTENT_BYTES]
            # The interpreter's lock is held between these two, and the other threads want it: no word too many.
            try:
                count = preadv(fd, (part,), base + at)
            except OSError as error:
                raise refused(self.path_of(file.name), error) from error
            if count == len(part):
                self.bytes_read += count
            else:
                self._fill_from(fd, file, base + at, [part])
            found = digest(part)
            if found.to_bytes(8, "little") != sums[extent * 8 : extent * 8 + 8]:
                self._compare(file, extent, found)
            extent += 1

    def _is_cold(self, file: StoredFile, offset: int) -> bool:
        """Whether what lies around ``offset`` is to be read around the page cache: it isn't there."""
        return self._direct and file.name not in self._buffered and not self._is_cached(file, offset)

    def _is_cached(self, file: StoredFile, offset: int) -> bool:
        cache = self._caches.get(file.name)
        if cache is None:
            with self._descriptors.opened(file) as fd:
                cache = self._caches.setdefault(file.name, PageCache(fd, file.size))
        return cache.has(offset)

    def _read_around_cache(self, file: StoredFile, base: int, stop: int) -> memoryview | None:
        """These bytes in the thread's buffer; None where the file system refuses, for whatever reason."""
        begin = base // PAGE_BYTES * PAGE_BYTES
        buffer = self._scratch_of(-(-(stop - begin) // PAGE_BYTES) * PAGE_BYTES)
        at = begin
        try:
            with self._descriptors.opened(file, os.O_DIRECT) as fd:
                while at < stop and (count := os.preadv(fd, [buffer[at - begin :]], at)):
                    at += count
        except (OSError, StorageError, CheckpointCorrupt):
            pass  # reading as usual says what is wrong, if that is wrong as well
        if at < stop:
            self._buffered.add(file.name)
            return None
        self.bytes_read += stop - base
        return buffer[base - begin : stop - begin]

    def _scratch_of(self, nbytes: int) -> memoryview:
        """At least ``nbytes`` of memory on a page of its own, this thread's; whatever was in it is gone.

        A buffer of Python's starts 16 or 32 bytes behind a page: the kernel copies from the page cache to there at a
        quarter of the speed, on processors whose string move stumbles over such a distance.
        """
        buffer: mmap.mmap | None = getattr(self._scratch, "buffer", None)
        self._scratch.held = ("", 0, 0)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.buffer = mmap.mmap(-1, max(1, -(-nbytes // EXTENT_BYTES)) * EXTENT_BYTES)
        return memoryview(buffer)[:nbytes]

    def _fill(self, file: StoredFile, offset: int, parts: Sequence[memoryview]) -> None:
        with self._descriptors.opened(file) as fd:
            self._fill_from(fd, file, offset, parts)

    def _fill_from(self, fd: int, file: StoredFile, offset: int, parts: Sequence[memoryview]) -> None:
        left = [part for part in parts if part]
        wanted = sum(map(len, left))
        while left:
            try:
                count = os.preadv(fd, left, offset)
            except OSError as error:
                raise refused(self.path_of(file.name), error) from error
            if count == 0:
                raise CheckpointCorrupt(
                    f"{self.path_of(file.name)} ended at byte {offset} while it was read; it was committed with "
                    f"{file.size}: another process truncated it",
                    path=self.path_of(file.name),
                    byte_range=(offset, file.size),
                )
            offset += count
            self.bytes_read += count
            if count == wanted:
                return
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
            wanted = sum(map(len, left))

    def _check(self, file: StoredFile, base: int, stop: int, parts: Sequence[memoryview]) -> None:
        """Hash the extents that ``parts`` hold, end to end, from ``base`` to ``stop``, and compare."""
        if not self._verify or file.extents is None or base == stop:
            return
        if len(parts) == 1:
            whole = parts[0]
            for at in range(base, stop, EXTENT_BYTES):
                part = whole[at - base : at - base + EXTENT_BYTES]
                self._compare(file, at // EXTENT_BYTES, xxhash.xxh3_64_intdigest(part))
            return
        assert base // EXTENT_BYTES == (stop - 1) // EXTENT_BYTES, "several parts make one extent"
        digest = xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        self._compare(file, base // EXTENT_BYTES, digest.intdigest())

    def _compare(self, file: StoredFile, extent: int, found: int) -> None:
        assert file.extents is not None
        expected = int.from_bytes(file.extents[extent * 8 : extent * 8 + 8], "little")
        if found != expected:
            self._raise_corrupt(file, extent, expected, found)

    def _raise_corrupt(self, file: StoredFile, extent: int, expected: int, found: int) -> None:
        start, end = extent * EXTENT_BYTES, min(file.size, (extent + 1) * EXTENT_BYTES)
        tensor = self._blame(file.name, start, end)
        path = self.path_of(file.name)
        raise CheckpointCorrupt(
            f"{path}: bytes {start} to {end}{f' ({tensor})' if tensor else ''} don't match their checksum "
            f"(committed {expected:016x}, read {found:016x}); load another step, and check the disk",
            path=path,
            tensor=tensor,
            byte_range=(start, end),
        )

    def _file(self, name: str) -> StoredFile:
        try:
            return self._files[name]
        except KeyError:
            path = self.path_of(name)
            raise CheckpointCorrupt(f"{path} is referred to, but no report covers it", path=path) from None


def _copy(memory: memoryview, value: memoryview) -> None:
    """Copy without the interpreter's lock, if that is worth it: others have reads to begin."""
    if len(memory) < SMALL_PART_BYTES:
        memory[:] = value
    else:
        ctypes.memmove(_address_of(memory), _address_of(value), len(value))


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
