"""Read ranges of stored files into memory and verify their checksums. Torch-free.

A `RangedRead` says which bytes of a file go to which memory. Reads of one file are gathered into jobs of a few whole
1 MiB extents; an extent is never divided between two jobs. One `preadv` reads an extent straight into its
destinations, and the bytes between them, which its checksum covers too, into a scratch buffer. Hashing follows at once,
while the bytes are in the cache. Jobs run on a few threads; reading and hashing release the GIL.

Guarantees: with checksums, no byte reaches the caller unverified without an error being raised; a file that is
missing, shorter or longer than committed is `CheckpointCorrupt`; memory beside the destinations is bounded by one
scratch buffer per thread. All jobs that were started have ended when a call returns or raises, also after an
interrupt; the first error is raised, and no job is started after it.
Assumes: the pieces of a file are sorted by start and don't overlap.
Does not: know tensors. The caller names the contents of a range that is corrupt.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, StorageError
from holdfast.format.manifest import EXTENT_BYTES, PAGE_BYTES
from holdfast.storage.files import Descriptors, PageCache, StoredFile, refused

if TYPE_CHECKING:
    from typing_extensions import Self

    from holdfast.storage.files import OpenedDirectory


JOB_BYTES: Final = 8 * EXTENT_BYTES
"""Bytes of one read that bypasses the page cache: disks need many requests at a time, or large ones."""


class RangedRead(NamedTuple):
    """Bytes ``start`` up to ``start + len(memory)`` of a file go to ``memory`` (writable, contiguous, bytes)."""

    start: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.start + len(self.memory)


def cut_for_jobs(pieces: Iterable[RangedRead], *, hashed: bool, gap_bytes_max: int) -> Iterator[list[RangedRead]]:
    """Group pieces into jobs: those that are close to each other within one range of `JOB_BYTES`.

    hashed: whole extents are read, and pieces with an unwanted extent between them are not close; otherwise those
    with a gap of more than ``gap_bytes_max``, or an extent, are not. One thread cuts all pieces before the first byte
    is read, so this does as little as possible and leaves the rest to the jobs.
    """
    group: list[RangedRead] = []
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
            group.append(RangedRead(start, memory[:take]))
            start, memory = start + take, memory[take:]
    if group:
        yield group


def cut_at_steps(pieces: Iterable[RangedRead], step: int, size: int) -> Iterator[RangedRead]:
    """Cut pieces so that each lies within one range of ``step`` bytes or is several whole ranges of a job."""
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
            yield RangedRead(start, memory[:take])
            start, memory = start + take, memory[take:]


PARTS_MAX: Final = 256
"""Calls with more destinations are copied from scratch: `preadv` takes 1,024 buffers, gaps included."""
SMALL_PART_BYTES: Final = 16 << 10
GAP_BYTES_MAX: Final = 2 * EXTENT_BYTES
"""Gaps of up to this many bytes are read along, which is cheaper than another call."""


class _Run(NamedTuple):
    """Pieces of a file that one call reads, with all bytes from ``base`` to ``stop``; one extent where hashed."""

    base: int
    stop: int
    pieces: list[RangedRead]


Blame = Callable[[str, int, int], "str | None"]
"""Returns the name of the tensor or object in a byte range of a file, for messages."""


class FileSet:
    """The committed files of one directory, open for reading; a context manager.

    ``blame`` names the tensor in a corrupt range. ``verify`` False skips checksums.
    ``direct``: read uncached bytes with O_DIRECT where the file system supports it: a fraction of the CPU time, and
    nothing is evicted from the page cache, but the next reader of the same bytes reads them from the disk again.
    ``gap_bytes_max``: largest gap of unwanted bytes that is read along in unhashed files; 0 for none.
    ``links``: as in `open_plain`.
    Thread-safe.
    """

    spans_at_a_time = 1
    """How many spans of many are read at a time: more hide the time that each request takes."""

    def __init__(
        self,
        directory: str | OpenedDirectory,
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
        """Files that can't be read with O_DIRECT."""
        self._caches: dict[str, PageCache] = {}
        self._descriptors = Descriptors(directory, links=links)
        self._scratch = threading.local()
        self.threads = threads
        self._waits = False
        """True once a read waits for a disk: only then are more threads than cores faster."""
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
        """Return True if reads of this file are verified, and so always whole extents."""
        return self._verify and self._file(name).extents is not None

    def require(self, name: str) -> None:
        """Open a file; raise unless it exists with its committed size."""
        with self._descriptors.opened(self._file(name)):
            pass

    def expect(self, name: str, nbytes: int) -> None:
        """Raise unless the file is as committed, before ``nbytes`` of memory are taken for what it should hold."""
        del nbytes
        self.require(name)

    def read(self, work: Iterable[Callable[[], None]]) -> None:
        """Run jobs (of `jobs_for`, or others that use `read_span`) on the caller's thread and others.

        Returns when all have ended; the first error is raised, and no job is started after it.
        """
        jobs = list(work)  # the first job may find out whether reads wait for a disk
        take_turns(jobs, self.threads if self._waits else min(self.threads, len(os.sched_getaffinity(0))))

    def jobs_for(
        self, name: str, pieces: Sequence[RangedRead], others: Sequence[tuple[int, Callable[[], None]]] = ()
    ) -> list[Callable[[], None]]:
        """Return jobs that fill ``pieces`` of file ``name``; the pieces are sorted by start and don't overlap.

        others: jobs that read the same file by themselves, each with the byte it starts at; they are returned as well.
        """
        file = self._file(name)
        groups = cut_for_jobs(pieces, hashed=self.is_hashed(name), gap_bytes_max=self.gap_bytes_max)
        jobs = [self._job(file, group) for group in groups]
        if pieces and not self._waits:
            self._waits = not all(self._is_cached(file, pieces[at].start) for at in (0, len(pieces) // 2, -1))
        return [*jobs, *(job for _, job in others)]

    def _runs(self, file: StoredFile, pieces: Iterable[RangedRead]) -> Iterator[_Run]:
        """Group pieces into runs: one extent that several pieces share, or whole extents of one piece.

        Without hashing extents don't matter, and a run is what lies in the range of one job.
        """
        hashed = self.is_hashed(file.name)
        step = EXTENT_BYTES if hashed else JOB_BYTES
        gap_max = GAP_BYTES_MAX if hashed else self.gap_bytes_max
        group: list[RangedRead] = []
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
        """Read and verify bytes ``start`` to ``end`` of a file into the calling thread's scratch buffer.

        Valid until the thread's next call. Keep the span small: the buffer is as large as the extents it touches.
        Bytes that the last call read are not read again.
        """
        file = self._file(name)
        self._check_range(file, start, end)
        base, stop = self._bounds(file, start, end)
        self.expect(name, stop - base)
        held: tuple[str, int, int] = getattr(self._scratch, "held", ("", 0, 0))
        if not (held[0] == name and held[1] <= base and stop <= held[2]):
            buffer = self._scratch_of(stop - base)
            self._fill_checked(file, base, buffer)
            held = self._scratch.held = (name, base, stop)
        return memoryview(self._scratch.buffer)[start - held[1] : end - held[1]]

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]]) -> memoryview:
        """Read the ranges (start, end) of an unhashed file, end to end, into the calling thread's scratch buffer.

        Nothing between them is read. As with `read_span`, valid until the thread's next call; keep them small.
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
        """Fill ``memory`` with the bytes of a file from ``start`` on, unverified."""
        file = self._file(name)
        self._check_range(file, start, start + len(memory))
        self._fill(file, start, [memory])

    def check(self, name: str, start: int, memory: memoryview) -> None:
        """Compare ``memory``, whole extents of a file from ``start`` on, with their checksums, where it has any."""
        self._check(self._file(name), start, start + len(memory), [memory])

    def map(self, name: str) -> mmap.mmap:
        """Map a file privately into memory; its pages are read when touched, unverified, and writes stay private."""
        file = self._file(name)
        with self._descriptors.opened(file) as fd:
            return mmap.mmap(fd, file.size, access=mmap.ACCESS_COPY)

    def _check_range(self, file: StoredFile, start: int, end: int) -> None:
        path = self.path_of(file.name)
        if file.size < 0:
            raise CheckpointCorrupt(f"{path} is missing; the checkpoint refers to it", path=path)
        if not 0 <= start <= end <= file.size:
            raise CheckpointCorrupt(
                f"{path}: bytes {start} to {end} are needed, but the file has {file.size}",
                path=path,
                byte_range=(start, end),
            )

    def _bounds(self, file: StoredFile, start: int, end: int) -> tuple[int, int]:
        """Return the range to read for bytes ``start`` to ``end``: whole extents where they are hashed."""
        if not self._verify or file.extents is None:
            return start, end
        last = max(start, end - 1) // EXTENT_BYTES
        return start // EXTENT_BYTES * EXTENT_BYTES, min(file.size, (last + 1) * EXTENT_BYTES)

    def _job(self, file: StoredFile, pieces: Sequence[RangedRead]) -> Callable[[], None]:
        def job() -> None:
            base, stop = self._bounds(file, pieces[0].start, pieces[-1].end)
            around = self._read_around_cache(file, base, stop) if self._is_cold(file, (base + stop) // 2) else None
            if around is not None:
                self._check(file, base, stop, [around])
                for start, memory in pieces:
                    copy_bytes(memory, around[start - base : start - base + len(memory)])
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
        """Fill one destination, extent by extent where hashed, so that each is hashed while in the core's cache."""
        sums = file.extents if self._verify else None
        if sums is None:
            for at in range(0, len(memory), JOB_BYTES):
                self._fill_from(fd, file, base + at, [memory[at : at + JOB_BYTES]])
            return
        digest, preadv = xxhash.xxh3_64_intdigest, os.preadv
        extent = base // EXTENT_BYTES
        for at in range(0, len(memory), EXTENT_BYTES):
            part = memory[at : at + EXTENT_BYTES]
            # The GIL is held between these two, and other threads wait for it: do nothing else here.
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
        """Return True if the bytes around ``offset`` aren't in the page cache, so that O_DIRECT pays."""
        return self._direct and file.name not in self._buffered and not self._is_cached(file, offset)

    def _is_cached(self, file: StoredFile, offset: int) -> bool:
        cache = self._caches.get(file.name)
        if cache is None:
            with self._descriptors.opened(file) as fd:
                cache = self._caches.setdefault(file.name, PageCache(fd, file.size))
        return cache.has(offset)

    def _read_around_cache(self, file: StoredFile, base: int, stop: int) -> memoryview | None:
        """Read these bytes with O_DIRECT into the thread's buffer; None where the file system refuses."""
        begin = base // PAGE_BYTES * PAGE_BYTES
        buffer = self._scratch_of(-(-(stop - begin) // PAGE_BYTES) * PAGE_BYTES)
        at = begin
        try:
            with self._descriptors.opened(file, os.O_DIRECT) as fd:
                while at < stop and (count := os.preadv(fd, [buffer[at - begin :]], at)):
                    at += count
        except (OSError, StorageError, CheckpointCorrupt):
            pass  # the buffered read raises if it fails too
        if at < stop:
            self._buffered.add(file.name)
            return None
        self.bytes_read += stop - base
        return buffer[base - begin : stop - begin]

    def _scratch_of(self, nbytes: int) -> memoryview:
        """Return this thread's page-aligned scratch memory of at least ``nbytes``; its old contents are lost.

        Python's own buffers start 16 or 32 bytes behind a page boundary: on some processors the kernel copies from
        the page cache to such addresses at a quarter of the speed.
        """
        buffer: mmap.mmap | None = getattr(self._scratch, "buffer", None)
        self._scratch.held = ("", 0, 0)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.buffer = mmap.mmap(-1, max(1, -(-nbytes // EXTENT_BYTES)) * EXTENT_BYTES)
        return memoryview(buffer)[:nbytes]

    def _fill_checked(self, file: StoredFile, base: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``base`` of a file, whole extents where they are hashed, and verify them."""
        self._fill(file, base, [buffer])
        self._check(file, base, base + len(buffer), [buffer])

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
            raise CheckpointCorrupt(
                f"{path} is referred to by the checkpoint, but no report covers it", path=path
            ) from None


def copy_bytes(memory: memoryview, value: memoryview) -> None:
    """Copy without the GIL, if large enough: other threads have reads to start."""
    if len(memory) < SMALL_PART_BYTES:
        memory[:] = value
        return
    target = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if not value.readonly:
        ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(value)), len(value))
        return
    held = _Buffer()  # ctypes itself takes no address of memory that may only be read
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(value), ctypes.byref(held), 0)
    try:
        ctypes.memmove(target, held.buf, len(value))
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(held))


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
