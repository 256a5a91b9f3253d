"""Executes a write plan: an image becomes durable files, with a checksum of every extent and tensor. Torch-free.

Writers (threads in `pwrite`) and hashers (threads in xxhash) go over the image at the same time; the image must not
change meanwhile. It runs in the engine process, and as well in any other: systems without memfd have no engine.

Guarantees:
- files are created, never opened: what exists is an error, and a link is not followed; but those that other engines
  write parts of at the same time: of these nothing but the own parts changes, and they get their size at once, so that
  no write makes them longer and nothing ever makes them shorter;
- a full disk shows before the first byte where the file system can preallocate;
- `write_files` returns when every file and the directory are fsynced; a failed fsync is final, never repeated, since
  the kernel forgets a failed page;
- O_DIRECT where it works, but for the last bytes of a file of odd size; otherwise buffered, with write-back started
  chunk by chunk and the page cache dropped;
- a report exists whole and durable under its name, or it does not exist under it.

On failure files stay as they are: they lie in an attempt directory, which is removed as a whole.
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

from holdfast.engine.calls import O_DIRECT, SYSTEM, Calls, check_name, where
from holdfast.engine.checksums import PIECE_BYTES, Sums, Unit, WritePlan, hash_unit
from holdfast.engine.ranges import ALIGN_BYTES, Range, WrittenFile, files_of
from holdfast.errors import StorageError
from holdfast.format.manifest import ReportFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How hard to work. Defaults are for an engine; they bound what it takes from training."""

    writers: int = 2
    """Threads that write; up to as many hash. 1 to 16."""
    io_limit_bytes_per_s: int | None = None
    direct: bool = True
    """Use O_DIRECT where the file system allows it."""
    piece_bytes: int = PIECE_BYTES
    """Hashed at a time; a power of two from 4,096 to an extent. Larger ones take the GIL less often."""


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_files` made durable."""

    files: tuple[ReportFile, ...]
    tensor_sums: bytes
    nbytes: int
    seconds: float
    direct: bool


class Stopped(Exception):
    """The work was stopped by `Progress.stop`; nothing was promised."""


class Progress:
    """Watches and stops one execution, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written = 0
        self.waiting = ""
        """What writing waits for before it begins."""
        self.stopped = False
        self.halt = threading.Event()
        """Set when there is no point in going on: stopped, or failed."""

    @property
    def written(self) -> int:
        """Bytes that the system has taken so far."""
        return self._written

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._written += nbytes

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
        """The largest chunk that keeps writing smooth: a sixteenth of a second's budget, at most `CHUNK_BYTES`."""
        if self._bytes_per_s is None:
            return CHUNK_BYTES
        return max(min(self._bytes_per_s // 16, CHUNK_BYTES) // ALIGN_BYTES, 1) * ALIGN_BYTES

    def reserve(self, nbytes: int) -> float:
        """Book ``nbytes``; returns the seconds to wait before writing them."""
        if self._bytes_per_s is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._bytes_per_s
            return start - now


class _Execution:
    """The state that the threads of one `write_files` share."""

    def __init__(
        self,
        dir_fd: int,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        *,
        progress: Progress,
        calls: Calls,
    ) -> None:
        self.dir_fd, self.image, self.plan, self.options = dir_fd, image, plan, options
        self.progress, self.calls = progress, calls
        self.files = files_of(plan.files)
        self.sums = Sums(plan)
        self.throttle = Throttle(options.io_limit_bytes_per_s)
        self.direct = options.direct and O_DIRECT != 0
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._chunks = self._all_chunks()
        self._units = iter(plan.units)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = error
        self.progress.halt.set()

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
        """A writer thread: takes chunks until there are none."""
        while not self.progress.halt.is_set():
            with self._lock:
                job = next(self._chunks, None)
            if job is None:
                return
            file, chunk = job
            delay = self.throttle.reserve(chunk.nbytes)
            if delay > 0 and self.progress.halt.wait(delay):
                return
            try:
                self._write_chunk(file, chunk)
                with self._lock:
                    file.left -= chunk.nbytes
                    last = file.left == 0
                if last:
                    self._finish(file)
            except OSError as error:
                self.fail(self._storage_error(f"can't write {file.what}", file.name, error))

    def hash(self) -> None:
        """A hasher thread: takes units until there are none."""
        while not self.progress.halt.is_set():
            with self._lock:
                unit: Unit | None = next(self._units, None)
            if unit is None:
                return
            hash_unit(self.image, self.plan, unit, self.sums, self.options.piece_bytes)

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
                    # What fsync has confirmed stands; a file that failed before has its error already.
                    if file.left:
                        self.fail(self._storage_error("can't close", file.name, error))

    def _create(self, name: str) -> int:
        try:
            return self.calls.create(self.dir_fd, name, direct=self.direct)
        except OSError as error:
            if not (self.direct and error.errno == errno.EINVAL):
                raise
        # This file system has no O_DIRECT. Some make the file before they refuse it.
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
            # As in `_create`, but the file stays: somebody else may write to it already.
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
                # Opened with O_DIRECT but not written: the alignment is not enough here, or it was only accepted.
                self._make_buffered()
                continue
            if count <= 0:
                raise OSError(errno.EIO, f"the system wrote {count} bytes and named no error")
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
                yield file, Range(0, 0, 0)  # nothing but a tail: so that somebody finishes it
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
    calls: Calls = SYSTEM,
) -> Written:
    """Write the files of ``plan`` from ``image`` into the directory ``dir_fd``, and hash them.

    Returns when all files and the directory are durable. ``image`` is bytes, best on a page boundary (else O_DIRECT is
    given up), and must hold still. Raises `StorageError` naming the file, `Stopped` after ``progress.stop()``; either
    way no thread of it is left. Blocks: for threads that may.
    """
    started = time.monotonic()
    progress = progress or Progress()
    rows_end = max((row.image_offset + row.size for row in plan.files), default=0)
    if rows_end > len(image):
        raise StorageError(
            f"the plan reads {rows_end} bytes of an image of {len(image)}", path=where(dir_fd), errno=errno.EINVAL
        )
    run = _Execution(dir_fd, image, plan, options, progress=progress, calls=calls)
    try:
        run.create_all()
        _run_threads(run)
        if run.failure is None and not progress.stopped:
            run.sync_dir()
    finally:
        run.close_all()
    if progress.stopped:
        raise Stopped
    if run.failure is not None:
        failure, run.failure = run.failure, None
        try:
            raise failure
        finally:
            del failure  # or its traceback would keep itself, and the image, alive
    return Written(
        files=tuple(
            ReportFile(row.name, row.size, bytes(sums), row.offset, row.total)
            for row, sums in zip(plan.files, run.sums.extents, strict=True)
        ),
        tensor_sums=bytes(run.sums.tensors),
        nbytes=sum(row.size for row in plan.files),
        seconds=time.monotonic() - started,
        direct=run.direct,
    )


def write_report(
    dir_fd: int,
    name: str,
    parts: Sequence[bytes],
    *,
    may_publish: Callable[[], bool] = lambda: True,
    calls: Calls = SYSTEM,
) -> tuple[int, str]:
    """Make ``parts``, joined, durable as the report ``name`` in the directory ``dir_fd``.

    Returns its size in bytes and its xxh3_128 digest, hexadecimal. ``may_publish`` is asked once, when all that is left
    is to give the file its name; False raises `Stopped` and leaves no report. Raises `StorageError`: then there may be
    a report only if giving the name was what failed to become durable.
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
                        raise OSError(errno.EIO, f"the system wrote {count} bytes and named no error")
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


def _run_threads(run: _Execution) -> None:
    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            run.fail(error)

    writers = max(1, min(run.options.writers, 16))
    hashers = max(1, min(writers, (os.cpu_count() or 1) // 2, len(run.plan.units)))
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
        run.fail(StorageError(f"can't start a writer thread: {error}", path=where(run.dir_fd), errno=errno.EAGAIN))
    finally:
        for thread in started:
            thread.join()
