"""Where an engine writes an attempt: a directory, or a place that is written through an `AttemptWriter`. Torch-free.

    DirectoryPlace   by descriptor: files are written, fsynced and renamed (``executor``)
    WriterPlace      by an importable writer, as of an object store: files are uploaded from the image's memory

Guarantees of both: `write_files` returns when all files of the plan are durable, with the checksums of what was in the
image; `write_report` makes the report durable, under its name whole or not at all, and asks ``may_publish`` right
before it could come to exist; what was written stays where something fails. A `WriterPlace` copies nothing of the
image and makes no temporary file; it has several files in work at a time, as many as the attempt has writers, and the
writer several parts of each; hashing goes on beside that. A stop ends uploads at the next part; what came to be stored
all the same is removed.
Assumes: a writer calls ``before_part`` and ends where it raises, as `AttemptWriter` says.
Does not: retry (the writer does), or write parts of files that several ranks share to places without directories.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Final, Protocol

import xxhash

from holdfast.engine.executor import Execution, Stopped, run_threads, write_files, write_report
from holdfast.engine.ranges import files_of
from holdfast.engine.syscalls import check_name, where
from holdfast.errors import StorageError
from holdfast.storage.leases import Heartbeat, hold, new_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.engine.checksums import WritePlan
    from holdfast.engine.executor import Precedence, Progress, WriteOptions, Written
    from holdfast.engine.messages import FileRow
    from holdfast.engine.ranges import WrittenFile
    from holdfast.engine.ring import Ring
    from holdfast.engine.syscalls import Calls
    from holdfast.storage.protocol import AttemptWriter, HeldLease


class AttemptPlace(Protocol):
    """What a job does to the place of its attempt. For one thread, but for `path`."""

    @property
    def path(self) -> str:
        """Path or URL, for messages."""
        ...

    def hold_lease(self, name: str, rank: int) -> HeldLease:
        """Hold the lease ``name``, which shows that this engine works on the attempt."""
        ...

    def write_files(
        self,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        *,
        progress: Progress,
        precedence: Precedence,
        ring: Ring | None,
    ) -> Written:
        """See `executor.write_files`."""
        ...

    def write_report(self, name: str, parts: Sequence[bytes], *, may_publish: Callable[[], bool]) -> tuple[int, str]:
        """See `executor.write_report`."""
        ...

    def take_back(self, name: str) -> bool:
        """Remove an unwanted report; return False if that failed, so that it may exist or come to exist."""
        ...

    def close(self) -> None:
        """End the use of the place, when nothing more is written."""
        ...


class DirectoryPlace:
    """The directory of descriptor ``dir_fd``, which it owns."""

    def __init__(self, dir_fd: int, calls: Calls) -> None:
        self._dir_fd, self._calls = dir_fd, calls

    @property
    def path(self) -> str:
        return where(self._dir_fd)

    def hold_lease(self, name: str, rank: int) -> HeldLease:
        return Heartbeat(hold(self._dir_fd, name, new_record(rank)))

    def write_files(
        self,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        *,
        progress: Progress,
        precedence: Precedence,
        ring: Ring | None,
    ) -> Written:
        return write_files(
            *(self._dir_fd, image, plan, options),
            progress=progress,
            precedence=precedence,
            calls=self._calls,
            ring=ring,
        )

    def write_report(self, name: str, parts: Sequence[bytes], *, may_publish: Callable[[], bool]) -> tuple[int, str]:
        return write_report(self._dir_fd, name, parts, may_publish=may_publish, calls=self._calls)

    def take_back(self, name: str) -> bool:
        try:
            self._calls.unlink(self._dir_fd, name)
            self._calls.fsync_dir(self._dir_fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        os.close(self._dir_fd)


_OPEN: Final = "open_writer"


def opened_writer(module: str, args: Sequence[str], paths: Sequence[str]) -> AttemptWriter:
    """Import ``module`` and return what its ``open_writer(*args)`` returns. Raises `StorageError` with the cause."""
    for path in paths:
        if path not in sys.path:
            sys.path.insert(0, path)
    try:
        writer: AttemptWriter = getattr(importlib.import_module(module), _OPEN)(*args)
    except StorageError:
        raise
    except Exception as error:
        message = f"the engine can't open the writer of {module}: {type(error).__name__}: {error}"
        raise StorageError(message, path=module, errno=errno.EINVAL) from error
    return writer


class WriterPlace:
    """The place of the writer that ``module`` opens; opened when it is first needed, which may take its time."""

    def __init__(self, module: str, args: Sequence[str], paths: Sequence[str]) -> None:
        self._named = module, args, paths
        self._opened: AttemptWriter | None = None
        self._in_doubt = False
        """The report was sent, and not acknowledged: it may come to exist later than it is removed."""

    @property
    def path(self) -> str:
        return self._named[0] if self._opened is None else self._opened.path

    @property
    def _writer(self) -> AttemptWriter:
        if self._opened is None:
            self._opened = opened_writer(*self._named)
        return self._opened

    def hold_lease(self, name: str, rank: int) -> HeldLease:
        return self._writer.hold_lease(name, rank=rank)

    def write_files(
        self,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        *,
        progress: Progress,
        precedence: Precedence,
        ring: Ring | None,
    ) -> Written:
        assert ring is None, "a ring holds no whole files"
        started = time.monotonic()
        run = Uploads(self._writer, image, plan, options, progress=progress, precedence=precedence)
        run.check_image()
        with precedence.executing(progress, options):
            run_threads(run)
        run.raise_failure()
        return run.written(started, direct=False, stored_as=self._writer.stored_as)

    def write_report(self, name: str, parts: Sequence[bytes], *, may_publish: Callable[[], bool]) -> tuple[int, str]:
        data = b"".join(parts)
        if not may_publish():
            raise Stopped
        try:
            self._writer.put(self._writer.stored_as(name), data)
        except BaseException:
            self._in_doubt = True
            raise
        return len(data), xxhash.xxh3_128_hexdigest(data)

    def take_back(self, name: str) -> bool:
        try:
            self._writer.remove(self._writer.stored_as(name))
        except OSError:
            return False
        return not self._in_doubt

    def close(self) -> None:
        """Remove what came to be stored after the attempt was given up; what fails is left there."""
        if self._opened is not None:
            with contextlib.suppress(OSError):
                self._opened.end()


class Uploads(Execution):
    """Hands whole files of a plan to a writer, several at a time."""

    def __init__(
        self,
        writer: AttemptWriter,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        *,
        progress: Progress,
        precedence: Precedence,
    ) -> None:
        super().__init__(image, plan, options, progress=progress, precedence=precedence)
        self._writer = writer
        rows: dict[str, list[FileRow]] = {}
        for row in plan.files:
            rows.setdefault(row.name, []).append(row)
        self._files = iter([self._whole_file(file, rows[file.name]) for file in files_of(plan.files)])

    @property
    def path(self) -> str:
        return self._writer.path

    def _whole_file(self, file: WrittenFile, rows: list[FileRow]) -> tuple[str, memoryview]:
        """Return the name and the bytes of a file that this rank writes whole, from one place of the image."""
        try:
            check_name(file.name)
        except OSError as error:
            raise StorageError(f"can't write to {self.path}: {error}", path=self.path, errno=error.errno) from error
        start = rows[0].image_offset - rows[0].offset
        if file.shared or any(row.image_offset != start + row.offset for row in rows):
            message = (
                f"can't write {file.name} to {self.path}: this rank has {file.what}, in {len(rows)} part(s), and where "
                "there are no directories, each file is written whole, by one rank, from one place in memory"
            )
            raise StorageError(message, path=self.path, errno=errno.EOPNOTSUPP)
        return file.name, self.image[start : start + file.size]

    def write(self) -> None:
        """Run a writer thread: upload files until none is left."""
        pause = self.precedence.pauser(self.progress, self.options)

        while not self.progress.halt.is_set():
            with self._lock:
                file = next(self._files, None)
            if file is None:
                return
            self.upload(*file, pause)

    def upload(
        self,
        name: str,
        data: memoryview,
        pause: Callable[[], None],
        *,
        check: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        """Upload one file; what fails is kept. check: called with how many more bytes are about to be sent."""
        left = len(data)

        def before_part(nbytes: int) -> None:
            nonlocal left
            pause()
            delay = self.throttle.reserve(nbytes)
            if self.progress.halt.wait(delay) if delay > 0 else self.progress.halt.is_set():
                raise Stopped
            new = min(nbytes, left)  # an upload that is begun again sends what was counted before
            check(new)
            left -= new
            self.progress.add(new)

        try:
            self._writer.upload(name, data, before_part=before_part)
        except Stopped:
            return
        except StorageError as error:
            self.fail(error)
            return
        if self.progress.stopped:  # its last part was under way: whoever withdraws the attempt may have looked before
            with contextlib.suppress(OSError):
                self._writer.remove(self._writer.stored_as(name))
