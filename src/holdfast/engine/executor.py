"""Executes a write plan: an image becomes durable files, with a checksum of every extent and tensor. Torch-free.

Writer threads (`pwrite`) and hasher threads (xxhash) process the image at the same time; it must not change meanwhile.
Runs on threads of the engine process.

Guarantees:
- files are created, not opened: an existing file is an error, and links are not followed. The exception are files of
  which other engines write parts at the same time: only the own parts are changed, and the file gets its final size at
  once, so that no write extends it and nothing truncates it;
- a full disk is noticed before the first byte if the file system can preallocate;
- `write_files` returns when every file and the directory are fsynced; a failed fsync is final and never repeated, since
  the kernel forgets a failed page;
- O_DIRECT if it works, except for the last bytes of a file of odd size; otherwise buffered, with write-back started
  chunk by chunk and the page cache dropped;
- under its name, a report is either complete and durable, or absent.

On failure the files stay: they lie in an attempt directory, which is removed as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

from holdfast.engine.checksums import PIECE_BYTES, Sums, Unit, WritePlan, hash_unit
from holdfast.engine.ranges import Range, WrittenFile, files_of
from holdfast.engine.syscalls import O_DIRECT, SYSTEM, Calls, check_name, where
from holdfast.errors import StorageError
from holdfast.format.manifest import PAGE_BYTES, ReportFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.engine.ring import Ring

CHUNK_BYTES: Final = 8 << 20
PAUSE_S_MAX: Final = 20.0
"""How long, in total, a less urgent execution pauses for others; then it runs beside them, by its nice level."""
_PAUSE_LOOK_S: Final = 0.01
_STALLED_S: Final = 1.0
"""An execution that wrote nothing for this long is waiting for its storage: others don't pause for it."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Resources to use. Defaults are for an engine; they limit what it takes from training."""

    writers: int = 2
    """Number of writer threads, and the limit for hasher threads; 1 to 16."""
    io_limit_bytes_per_s: int | None = None
    direct: bool = True
    """Use O_DIRECT if the file system allows it."""
    piece_bytes: int = PIECE_BYTES
    """Bytes hashed at a time; a power of two from 4,096 to an extent. Larger pieces take the GIL less often."""
    nice: int = 0
    """Urgency relative to other executions of this process, see `Precedence`; does not set the threads' nice level."""


@dataclass(frozen=True, slots=True)
class Written:
    """Result of `write_files`, durable."""

    files: tuple[ReportFile, ...]
    tensor_sums: bytes
    nbytes: int
    seconds: float
    direct: bool
    index: bytes | None = None
    """The report's index, if it isn't that of the plan."""


class Stopped(Exception):
    """The work was stopped by `Progress.stop`; nothing is durable for certain."""


class Progress:
    """Progress of one execution, and the means to stop it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written = 0
        self._moved_at = time.monotonic()
        self.waiting = ""
        """What writing waits for before it begins."""
        self.stopped = False
        self.halt = threading.Event()
        """Set when there is no point in continuing: stopped, or failed."""

    @property
    def written(self) -> int:
        """Bytes accepted by the system so far."""
        return self._written

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes
            self._moved_at = time.monotonic()

    @property
    def stalled(self) -> bool:
        """True if nothing was written for a while."""
        return time.monotonic() - self._moved_at > _STALLED_S

    def stop(self) -> None:
        """Make the execution end with `Stopped`, as soon as its system calls return."""
        self.stopped = True
        self.halt.set()


class Throttle:
    """A byte budget shared by the writers: ``io_limit_bytes_per_s`` on average, one chunk at a time."""

    def __init__(self, bytes_per_s: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()

    @property
    def chunk_bytes(self) -> int:
        """Largest chunk that keeps writing smooth: a sixteenth of a second's budget, at most `CHUNK_BYTES`."""
        if self._bytes_per_s is None:
            return CHUNK_BYTES
        return max(min(self._bytes_per_s // 16, CHUNK_BYTES) // PAGE_BYTES, 1) * PAGE_BYTES

    def reserve(self, nbytes: int) -> float:
        """Reserve ``nbytes``; return the seconds to wait before writing them."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._bytes_per_s
            return start - now


class Precedence:
    """Has less urgent executions of one process stand still while more urgent ones write files or a report.

    Threads of all nice levels share one GIL. A level-19 thread that is preempted on a busy CPU while it holds the GIL
    blocks every other thread, whatever their levels: so it pauses at chunk borders, where it holds nothing. Nobody
    pauses for an execution that waits for its storage or a byte budget, nor longer than `PAUSE_S_MAX` in total.
    """

    def __init__(self) -> None:
        self._urgent: dict[Progress, int] = {}
        """Nice levels of executions at full speed. Changed by single operations only."""

    @contextlib.contextmanager
    def executing(self, progress: Progress, options: WriteOptions) -> Iterator[None]:
        """Inside, less urgent executions pause for this one, which is at work from now on."""
        progress.add(0)
        if options.io_limit_bytes_per_s is None:
            self._urgent[progress] = options.nice
        try:
            yield
        finally:
            self._urgent.pop(progress, None)

    def pauser(self, progress: Progress, options: WriteOptions) -> Callable[[], None]:
        """Return a function that an execution's threads call at each border; it waits until they may continue."""
        left_s = PAUSE_S_MAX

        def pause() -> None:
            nonlocal left_s
            while left_s > 0 and self._precedes(options.nice) and not progress.halt.wait(_PAUSE_LOOK_S):
                left_s -= _PAUSE_LOOK_S

        return pause

    def _precedes(self, nice: int) -> bool:
        return any(level < nice and not other.stalled for other, level in list(self._urgent.items()))


class Execution:
    """State shared by the threads that write and hash one plan, wherever to; `write` is the subclass's."""

    def __init__(
        self,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        *,
        progress: Progress,
        precedence: Precedence,
        ring: Ring | None = None,
    ) -> None:
        self.ring = ring
        self.precedence = precedence
        self.image, self.plan, self.options = image, plan, options
        self.progress = progress
        self.sums = Sums(plan)
        self.throttle = Throttle(options.io_limit_bytes_per_s)
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._units = iter(plan.units)

    @property
    def path(self) -> str:
        """Path or URL of the place, for messages."""
        raise NotImplementedError

    def write(self) -> None:
        """Run a writer thread: take work until none is left."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = error
        self.progress.halt.set()

    def hash(self) -> None:
        """Run a hasher thread: take units until none is left."""
        pause = self.precedence.pauser(self.progress, self.options)
        while not self.progress.halt.is_set():
            with self._lock:
                unit: Unit | None = next(self._units, None)
            if unit is None:
                break
            source = self.image if self.ring is None else self.ring
            hash_unit(source, self.plan, unit, self.sums, self.options.piece_bytes, pause=pause)
        if self.ring is not None and not self.progress.halt.is_set():
            self.ring.hashed_all()

    def check_image(self) -> None:
        """Raise `StorageError` unless the image has all bytes of the plan."""
        rows_end = max((row.image_offset + row.size for row in self.plan.files), default=0)
        if rows_end > len(self.image):
            message = f"the plan reads {rows_end} bytes of an image of {len(self.image)}"
            raise StorageError(message, path=self.path, errno=errno.EINVAL)

    def raise_failure(self) -> None:
        """Raise `Stopped`, or what failed, if either."""
        if self.progress.stopped:
            raise Stopped
        if self.failure is not None:
            failure, self.failure = self.failure, None
            try:
                raise failure
            finally:
                del failure  # else its traceback keeps itself and the image alive

    def written(self, started: float, *, direct: bool, stored_as: Callable[[str], str] = str) -> Written:
        """Return the result; ``stored_as`` gives the names of files in reports."""
        return Written(
            files=tuple(
                ReportFile(stored_as(row.name), row.size, bytes(sums), row.offset, row.total)
                for row, sums in zip(self.plan.files, self.sums.extents, strict=True)
            ),
            tensor_sums=bytes(self.sums.tensors),
            nbytes=sum(row.size for row in self.plan.files),
            seconds=time.monotonic() - started,
            direct=direct,
        )


class _DirectoryExecution(Execution):
    """Writes into the directory ``dir_fd``."""

    def __init__(
        self,
        dir_fd: int,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        *,
        progress: Progress,
        precedence: Precedence,
        calls: Calls,
        ring: Ring | None,
    ) -> None:
        super().__init__(image, plan, options, progress=progress, precedence=precedence, ring=ring)
        self.dir_fd, self.calls = dir_fd, calls
        self.files = files_of(plan.files)
        self.direct = options.direct and O_DIRECT != 0
        self._chunks = self._all_chunks()

    @property
    def path(self) -> str:
        return where(self.dir_fd)

    def create_all(self) -> None:
        for file in self.files:
            self._check_halt()
            try:
                check_name(file.name)
                if file.shared:
                    self._open_shared(file)
                else:
                    file.fd = self._create(file.name)
                    self.calls.allocate(file.fd, file.size)
                if file.size == 0:
                    self.calls.fsync(file.fd)
            except OSError as error:
                what = f"can't make room for {file.what}" if file.shared else f"can't create a file of {file.what}"
                raise self._storage_error(what, file.name, error) from error

    def write(self) -> None:
        """Run a writer thread: take chunks until none is left."""
        pause = self.precedence.pauser(self.progress, self.options)
        while not self.progress.halt.is_set():
            pause()
            job = self._next_chunk()
            if job is None:
                return
            piece, file, chunk = job
            delay = self.throttle.reserve(chunk.nbytes)
            if delay > 0 and self.progress.halt.wait(delay):
                return
            try:
                self._write_chunk(file, chunk)
                with self._lock:
                    file.left -= chunk.nbytes
                    last = file.left == 0
                if self.ring is not None:
                    self.ring.wrote(piece, chunk.nbytes)
                if last:
                    self._finish(file)
            except OSError as error:
                self.fail(self._storage_error(f"can't write {file.what}", file.name, error))

    def _next_chunk(self) -> tuple[int, WrittenFile, Range] | None:
        """Return the next range to write, with its file and its piece of the ring."""
        if self.ring is None:
            with self._lock:
                job = next(self._chunks, None)
            return None if job is None else (0, *job)
        of_ring = self.ring.next_chunk(self.throttle.chunk_bytes)
        return None if of_ring is None else (of_ring[0], self.files[of_ring[1]], of_ring[2])

    def sync_dir(self) -> None:
        try:
            self.calls.fsync_dir(self.dir_fd)
        except OSError as error:
            raise self._storage_error("can't fsync the directory", "", error) from error

    def close_all(self) -> None:
        for file in self.files:
            if file.fd >= 0:
                fd, file.fd = file.fd, -1
                try:
                    self.calls.close(fd)
                except OSError as error:
                    # Files confirmed by fsync stand; a file that failed before has its error already.
                    if file.left:
                        self.fail(self._storage_error("can't close", file.name, error))

    def _create(self, name: str) -> int:
        try:
            return self.calls.create(self.dir_fd, name, direct=self.direct)
        except OSError as error:
            if not (self.direct and error.errno == errno.EINVAL):
                raise
        # This file system has no O_DIRECT. Some create the file before they refuse it.
        self.direct = False
        with contextlib.suppress(FileNotFoundError):
            self.calls.unlink(self.dir_fd, name)
        return self.calls.create(self.dir_fd, name, direct=False)

    def _open_shared(self, file: WrittenFile) -> None:
        assert file.total is not None
        try:
            file.fd = self.calls.open_shared(self.dir_fd, file.name, direct=self.direct)
        except OSError as error:
            if not (self.direct and error.errno == errno.EINVAL):
                raise
            # As in `_create`, but the file stays: another engine may already write to it.
            self.direct = False
            file.fd = self.calls.open_shared(self.dir_fd, file.name, direct=False)
        for part in file.body:
            self.calls.allocate_part(file.fd, part.offset, part.nbytes)
        if file.tail is not None:
            self.calls.allocate_part(file.fd, file.tail.offset, file.tail.nbytes)
        self.calls.extend(file.fd, file.total)

    def _write_chunk(self, file: WrittenFile, chunk: Range) -> None:
        offset, image_start, nbytes = chunk
        done = 0
        while done < nbytes:
            if self.progress.halt.is_set():
                raise OSError(errno.ECANCELED, "stopped")
            start = image_start + done
            was_direct = self.direct
            try:
                count = self.calls.pwrite(file.fd, self.image[start : image_start + nbytes], offset + done)
            except OSError as error:
                if not (was_direct and error.errno == errno.EINVAL):
                    raise
                # Opened with O_DIRECT but not written: the alignment is not sufficient, or the flag was only accepted.
                self._make_buffered()
                continue
            if count <= 0:
                raise OSError(errno.EIO, f"the system wrote {count} bytes and reported no error")
            done += count
            self.progress.add(count)
        if not self.direct:
            self.calls.drop_cache(file.fd, offset, nbytes)

    def _make_buffered(self) -> None:
        with self._lock:
            if self.direct:
                for file in self.files:
                    if file.fd >= 0:
                        self.calls.make_buffered(file.fd)
                self.direct = False

    def _finish(self, file: WrittenFile) -> None:
        if file.tail is not None:
            if self.direct:
                self.calls.make_buffered(file.fd)
            self._write_chunk(file, file.tail)
        self.calls.fsync(file.fd)
        if not self.direct:
            self.calls.drop_cache(file.fd, 0, 0)

    def _all_chunks(self) -> Iterator[tuple[WrittenFile, Range]]:
        step = self.throttle.chunk_bytes
        for file in self.files:
            if file.tail is not None and not file.left:
                yield file, Range(0, 0, 0)  # only a tail: a writer must finish the file
            for offset, start, nbytes in file.body:
                for done in range(0, nbytes, step):
                    yield file, Range(offset + done, start + done, min(step, nbytes - done))

    def _check_halt(self) -> None:
        if self.progress.halt.is_set():
            raise Stopped

    def _storage_error(self, what: str, name: str, error: OSError) -> StorageError:
        path = where(self.dir_fd, name)
        return StorageError(
            f"{what}: {path}: {error.strerror or error} (errno {error.errno}); "
            f"{self.progress.written} bytes of this attempt were written before",
            path=path,
            errno=error.errno,
        )


def write_files(
    dir_fd: int,
    image: memoryview,
    plan: WritePlan,
    options: WriteOptions,
    *,
    progress: Progress | None = None,
    precedence: Precedence | None = None,
    calls: Calls = SYSTEM,
    ring: Ring | None = None,
) -> Written:
    """Write the files of ``plan`` from ``image`` into the directory ``dir_fd``, and hash them.

    ring: over ``image``, if that holds not all files at once but pieces of them as they come.

    Returns when all files and the directory are durable. ``image`` must not change meanwhile, and should be
    page-aligned (otherwise O_DIRECT isn't used). ``precedence`` is shared with concurrent executions. Raises
    `StorageError` naming the file, or `Stopped` after ``progress.stop()``; no thread is left in either case. Blocks.
    """
    started = time.monotonic()
    progress, precedence = progress or Progress(), precedence or Precedence()
    run = _DirectoryExecution(
        dir_fd, image, plan, options, progress=progress, precedence=precedence, calls=calls, ring=ring
    )
    if ring is not None:
        ring.begin(plan.files, progress.halt)
    else:
        run.check_image()
    with precedence.executing(progress, options):
        try:
            run.create_all()
            run_threads(run)
            if run.failure is None and not progress.stopped:
                run.sync_dir()
        finally:
            run.close_all()
    run.raise_failure()
    return run.written(started, direct=run.direct)


def write_report(
    dir_fd: int,
    name: str,
    parts: Sequence[bytes],
    *,
    may_publish: Callable[[], bool] = lambda: True,
    calls: Calls = SYSTEM,
) -> tuple[int, str]:
    """Join ``parts`` and make them durable as the report ``name`` in the directory ``dir_fd``.

    Returns its size in bytes and its hexadecimal xxh3_128 digest. ``may_publish`` is called once, just before the file
    gets its name; if it returns False, `Stopped` is raised and there is no report. Raises `StorageError`: then a report
    may exist only if the naming failed to become durable.
    """
    fresh = f".{name}.new"
    size, digest = 0, xxhash.xxh3_128()
    try:
        check_name(name)
        fd = calls.create(dir_fd, fresh, direct=False)
        try:
            for part in parts:
                digest.update(part)
                left = memoryview(part)
                while left:
                    count = calls.pwrite(fd, left, size)
                    if count <= 0:
                        raise OSError(errno.EIO, f"the system wrote {count} bytes and reported no error")
                    size += count
                    left = left[count:]
            calls.fsync(fd)
        finally:
            calls.close(fd)
        if not may_publish():
            calls.unlink(dir_fd, fresh)
            raise Stopped
        calls.rename(dir_fd, fresh, name)
        calls.fsync_dir(dir_fd)
    except OSError as error:
        path = where(dir_fd, name)
        raise StorageError(
            f"can't write the report {path}: {error.strerror or error} (errno {error.errno})",
            path=path,
            errno=error.errno,
        ) from error
    return size, digest.hexdigest()


def run_threads(run: Execution) -> None:
    """Run the writer and hasher threads of ``run``, and wait for them; failures are in ``run.failure``."""

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - passed to the waiting thread
            run.fail(error)

    writers = max(1, min(run.options.writers, 16))
    hashers = max(1, min(writers, (os.cpu_count() or 1) // 2, len(run.plan.units)))
    if run.ring is not None:
        hashers = 1  # one: pieces must be hashed in order
    threads = [
        threading.Thread(target=guarded, args=(run.write,), name=f"holdfast-write-{index}", daemon=True)
        for index in range(writers)
    ] + [
        threading.Thread(target=guarded, args=(run.hash,), name=f"holdfast-hash-{index}", daemon=True)
        for index in range(hashers)
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        run.fail(StorageError(f"can't start a writer thread: {error}", path=run.path, errno=errno.EAGAIN))
    finally:
        for thread in started:
            thread.join()
