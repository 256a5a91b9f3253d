"""Reading ranges of stored files into memory, and proving them right on the way. Torch-free.

A `Piece` says which bytes of a file go to which memory. Pieces of a file are gathered into jobs of whole 1 MiB
extents; one `preadv` brings a job straight to its destinations, with the bytes between them going to a scratch
buffer, because an extent's checksum covers those too. Hashing follows at once, in parts of at most 256 KiB, while
the bytes are in the cache. Jobs run on a few threads; reading and hashing release the GIL.

Guarantees: with checksums, no byte reaches the caller unverified without an error being raised; a file that is
missing, shorter or longer than committed is `CheckpointCorrupt`; memory beside the destinations is bounded by one
scratch buffer a thread.
Does not: know tensors. The caller says what a range holds when it is found corrupt.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

from holdfast.errors import CheckpointCorrupt, StorageError
from holdfast.format.manifest import EXTENT_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

JOB_EXTENTS: Final = 4
HASH_PIECE_BYTES: Final = 256 << 10
PARTS_MAX: Final = 256
"""More destinations than this in one job are filled from scratch: the system takes 1,024 a call, Python fewer."""
SMALL_PART_BYTES: Final = 16 << 10
OPEN_FILES_MAX: Final = 128
"""A process may often have 1,024, and a checkpoint of a large world has more files."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A committed file: ``size`` in bytes; ``extents`` as in `ReportFile`, or None where nothing is known of it."""

    name: str
    size: int
    extents: bytes | None


@dataclass(slots=True)
class _Open:
    fd: int
    users: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` up to ``start + len(memory)`` of a file go to ``memory`` (writable, contiguous, bytes)."""

    start: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.start + len(self.memory)


Blame = Callable[[str, int, int], "str | None"]
"""Names the tensor or object that lies in a byte range of a file, for messages."""


class FileSet:
    """The committed files of one directory, open for reading; a context manager.

    ``blame`` is asked for the tensor in a range that is found corrupt. ``verify`` False skips checksums.
    Thread-safe.
    """

    def __init__(
        self, directory: str, files: Mapping[str, StoredFile], *, verify: bool, threads: int, blame: Blame
    ) -> None:
        self._directory = directory
        self._files = files
        self._verify = verify
        self._blame = blame
        self._fds: dict[str, _Open] = {}
        """The least recently used first."""
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._threads = threads
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            opened, self._fds = self._fds, {}
        for entry in opened.values():
            os.close(entry.fd)

    def path_of(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def require(self, name: str) -> None:
        """Open a file; raises unless it is there with the size it was committed with."""
        with self._opened(self._file(name)):
            pass

    def read(self, work: Iterable[Callable[[], None]]) -> None:
        """Run jobs (of `jobs_for`, or others that use `read_span`) on the reader threads; the first error is raised."""
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="holdfast-read")
        try:
            futures: list[Future[None]] = [pool.submit(job) for job in work]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # an interrupt as well waits for the jobs that have begun, and for no other
            pool.shutdown(cancel_futures=True)
        for future in done:
            future.result()

    def jobs_for(self, name: str, pieces: Sequence[Piece]) -> list[Callable[[], None]]:
        """Jobs that fill ``pieces`` of file ``name``; the pieces are sorted by start and don't overlap."""
        file = self._file(name)
        jobs: list[Callable[[], None]] = []
        group: list[Piece] = []
        first = last = -1
        for piece in _cut_at_extents(pieces, JOB_EXTENTS * EXTENT_BYTES):
            begin, end = piece.start // EXTENT_BYTES, (piece.end - 1) // EXTENT_BYTES
            if group and (begin > last + 1 or begin // JOB_EXTENTS != first // JOB_EXTENTS):
                jobs.append(self._job(file, first, last, group))
                group = []
            if not group:
                first = begin
            group.append(piece)
            last = max(last, end) if len(group) > 1 else end
        if group:
            jobs.append(self._job(file, first, last, group))
        return jobs

    def read_span(self, name: str, start: int, end: int) -> memoryview:
        """Bytes ``start`` to ``end`` of a file, verified, in the calling thread's scratch buffer.

        Valid until the thread's next call. The span should be bounded: the buffer is as large as the extents it
        touches.
        """
        file = self._file(name)
        self._check_range(file, start, end)
        first, last = start // EXTENT_BYTES, max(start, end - 1) // EXTENT_BYTES
        base, stop = self._bounds(file, start, end)
        buffer = self._scratch_of(stop - base)
        self._fill(file, base, [buffer])
        self._check(file, first, last, [buffer])
        return buffer[start - base : end - base]

    def read_unverified(self, name: str, start: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a file from ``start`` on, as they are."""
        file = self._file(name)
        self._check_range(file, start, start + len(memory))
        self._fill(file, start, [memory])

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

    def _job(self, file: StoredFile, first: int, last: int, pieces: Sequence[Piece]) -> Callable[[], None]:
        return lambda: self._run_job(file, first, last, pieces)

    def _run_job(self, file: StoredFile, first: int, last: int, pieces: Sequence[Piece]) -> None:
        base, stop = self._bounds(file, pieces[0].start, pieces[-1].end)
        small = len(pieces) > PARTS_MAX or (stop - base) // len(pieces) < SMALL_PART_BYTES
        scratch = self._scratch_of(stop - base)
        if small:
            self._fill(file, base, [scratch])
            self._check(file, first, last, [scratch])
            for piece in pieces:
                piece.memory[:] = scratch[piece.start - base : piece.end - base]
            return
        parts: list[memoryview] = []
        at = base
        for piece in pieces:
            if piece.start > at:
                parts.append(scratch[at - base : piece.start - base])
            parts.append(piece.memory)
            at = piece.end
        if at < stop:
            parts.append(scratch[at - base : stop - base])
        self._fill(file, base, parts)
        self._check(file, first, last, parts)

    def _scratch_of(self, nbytes: int) -> memoryview:
        buffer: bytearray | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch.buffer = bytearray(max(nbytes, JOB_EXTENTS * EXTENT_BYTES))
        return memoryview(buffer)[:nbytes]

    def _fill(self, file: StoredFile, offset: int, parts: Sequence[memoryview]) -> None:
        with self._opened(file) as fd:
            self._fill_from(fd, file, offset, parts)

    def _fill_from(self, fd: int, file: StoredFile, offset: int, parts: Sequence[memoryview]) -> None:
        left = [part for part in parts if part]
        while left:
            try:
                count = os.preadv(fd, left, offset)
            except OSError as error:
                raise _refused(self.path_of(file.name), error) from error
            if count == 0:
                raise CheckpointCorrupt(
                    f"{self.path_of(file.name)} ended at byte {offset} while it was read; it was committed with "
                    f"{file.size}: another process truncated it",
                    path=self.path_of(file.name),
                    byte_range=(offset, file.size),
                )
            offset += count
            self.bytes_read += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _check(self, file: StoredFile, first: int, last: int, parts: Sequence[memoryview]) -> None:
        """Hash the extents that ``parts`` hold, end to end, and compare."""
        if not self._verify or file.extents is None:
            return
        source = iter(parts)
        part = memoryview(b"")
        for extent in range(first, last + 1):
            left = min(EXTENT_BYTES, file.size - extent * EXTENT_BYTES)
            digest = xxhash.xxh3_64()
            while left:
                if not part:
                    part = next(source)
                take = min(left, len(part), HASH_PIECE_BYTES)
                digest.update(part[:take])
                part = part[take:]
                left -= take
            expected = int.from_bytes(file.extents[extent * 8 : extent * 8 + 8], "little")
            if digest.intdigest() != expected:
                self._raise_corrupt(file, extent, expected, digest.intdigest())

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

    @contextlib.contextmanager
    def _opened(self, file: StoredFile) -> Iterator[int]:
        """A descriptor of ``file``, which stays open while it is in use, and beyond unless too many are."""
        with self._lock:
            entry = self._fds.pop(file.name, None) or _Open(self._open(file))
            self._fds[file.name] = entry
            entry.users += 1
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                idle = [name for name, known in self._fds.items() if not known.users]
                for name in idle[: max(0, len(self._fds) - OPEN_FILES_MAX)]:
                    os.close(self._fds.pop(name).fd)

    def _open(self, file: StoredFile) -> int:
        path = self.path_of(file.name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise CheckpointCorrupt(f"{path} is missing; it was committed with {file.size} bytes", path=path) from error
        except OSError as error:
            raise _refused(path, error) from error
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_size == file.size:
            return fd
        os.close(fd)
        raise CheckpointCorrupt(
            f"{path} has {status.st_size} bytes; it was committed as a file of {file.size}",
            path=path,
            byte_range=(min(status.st_size, file.size), max(status.st_size, file.size)),
        )


def _refused(path: str, error: OSError) -> StorageError:
    return StorageError(f"{path} could not be read: {error.strerror}", path=path, errno=error.errno)


def _cut_at_extents(pieces: Sequence[Piece], step: int) -> Iterable[Piece]:
    """The same pieces, none of them crossing a multiple of ``step``."""
    for piece in pieces:
        start, memory = piece.start, piece.memory
        while memory:
            take = min(len(memory), step - start % step)
            yield Piece(start, memory[:take])
            start, memory = start + take, memory[take:]


class Blamer:
    """Finds what lies in a byte range of a file: made from (start, end, name) rows per file."""

    def __init__(self, rows: Mapping[str, list[tuple[int, int, str]]]) -> None:
        self._rows = {name: sorted(of_file) for name, of_file in rows.items()}

    def __call__(self, file: str, start: int, end: int) -> str | None:
        """The first tensor or object that overlaps the range, or None."""
        rows = self._rows.get(file, [])
        at = max(0, bisect_right(rows, (start, 1 << 62, "")) - 1)
        for begin, stop, name in rows[at:]:
            if begin >= end:
                break
            if stop > start:
                return name
        return None
