"""Copies published files to another place through a writer, checked against the checksums of their report. Torch-free.

Guarantees: what is reported as copied is what the report's checksums say, extent by extent, read right before it is
sent; a file that is damaged or missing ends the copy, and there is no report of it. Where a store isn't known to refuse
what was damaged on its way, all is read back and compared before the report. Files are sent from a mapping of
them, without a copy in memory; each range is read by a system call before it is touched there, so that a failing disk
is an error and not the end of the engine.
Assumes: published files don't change, and the descriptor is that of their directory.
Does not: decide what is copied, or where to.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from typing import TYPE_CHECKING, Final

import xxhash

from holdfast.engine.executor import Written, run_threads
from holdfast.engine.places import Uploads, WriterPlace
from holdfast.engine.syscalls import check_name, where
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.manifest import EXTENT_BYTES, SUM_BYTES, Report, ReportFile, decode_report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.engine.checksums import WritePlan
    from holdfast.engine.executor import Precedence, Progress, WriteOptions
    from holdfast.engine.messages import CopySource
    from holdfast.engine.ring import Ring
    from holdfast.storage.protocol import AttemptWriter

READ_BACK_BYTES: Final = 8 << 20
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CopyPlace(WriterPlace):
    """The place of a writer, for the files of the report ``source`` in the directory ``source_fd``, which it owns."""

    def __init__(
        self, source_fd: int, source: CopySource, module: str, args: Sequence[str], paths: Sequence[str]
    ) -> None:
        super().__init__(module, args, paths)
        self._source_fd, self._source = source_fd, source

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
        report = _read_report(self._source_fd, self._source)
        run = _Copies(self._source_fd, report, self._writer, image, plan, options, progress, precedence)
        with precedence.executing(progress, options):
            run_threads(run)
        run.raise_failure()
        files = tuple(ReportFile(self._writer.stored_as(row.name), row.size, row.extents) for row in report.files)
        nbytes = sum(row.size for row in report.files)
        return Written(files, report.tensor_sums, nbytes, time.monotonic() - started, False, report.index)  # noqa: FBT003

    def write_report(self, name: str, parts: Sequence[bytes], *, may_publish: Callable[[], bool]) -> tuple[int, str]:
        size, digest = super().write_report(name, parts, may_publish=may_publish)
        found = self._writer.read_back(name, 0, size)
        if found is not None and xxhash.xxh3_128_hexdigest(found) != digest:
            raise _damaged_on_its_way(f"{self.path}/{self._writer.stored_as(name)}", 0, size)
        return size, digest

    def close(self) -> None:
        os.close(self._source_fd)
        super().close()


def _read_report(dir_fd: int, source: CopySource) -> Report:
    """Read and check the report ``source``. Raises `StorageError`, with EBADMSG where it is damaged."""
    path = where(dir_fd, source.report)
    try:
        check_name(source.report)
        fd = os.open(source.report, _FLAGS, dir_fd=dir_fd)
        with open(fd, "rb") as file:
            data = file.read()
    except OSError as error:
        raise _error(f"can't read {path}: {error.strerror or error}", path, error.errno) from error
    try:
        if xxhash.xxh3_128_hexdigest(data) != source.digest:
            raise _error(f"{path} is not the report that its manifest names: it is damaged", path)
        report = decode_report(data, path=path)
    except HoldfastError as error:
        raise _error(str(error), path) from error
    if any(row.total is not None for row in report.files):
        raise _error(f"{path} is of parts of files, which are not copied", path, errno.EOPNOTSUPP)
    return report


class _Copies(Uploads):
    """Uploads the files of a report, several at a time."""

    def __init__(
        self,
        source_fd: int,
        report: Report,
        writer: AttemptWriter,
        image: memoryview,
        plan: WritePlan,
        options: WriteOptions,
        progress: Progress,
        precedence: Precedence,
    ) -> None:
        super().__init__(writer, image, plan, options, progress=progress, precedence=precedence)
        self._source_fd = source_fd
        self._rows = iter(report.files)

    def write(self) -> None:
        """Run a writer thread: copy files until none is left."""
        pause = self.precedence.pauser(self.progress, self.options)
        while not self.progress.halt.is_set():
            with self._lock:
                row = next(self._rows, None)
            if row is None:
                return
            self._copy(row, pause)

    def _copy(self, row: ReportFile, pause: Callable[[], None]) -> None:
        path = where(self._source_fd, row.name)
        fd = -1
        try:
            check_name(row.name)
            fd = os.open(row.name, _FLAGS, dir_fd=self._source_fd)
            size = os.fstat(fd).st_size
            if size != row.size:
                raise _error(f"{path} has {size} bytes, and its report says {row.size}: it is damaged", path)
            data = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
            checked = _Checked(fd, row, path, data)
            self.upload(row.name, data, pause, check=checked.advance)
            if not self.progress.halt.is_set():
                checked.advance(row.size)
                self._read_back(row, pause)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # training may need the memory
        except StorageError as error:
            self.fail(error)
        except OSError as error:
            self.fail(_error(f"can't read {path}: {error.strerror or error}", path, error.errno))
        finally:
            if fd >= 0:
                os.close(fd)

    def _read_back(self, row: ReportFile, pause: Callable[[], None]) -> None:
        """Compare what is stored with the report, where it may have been damaged on its way without a word."""
        for start in range(0, row.size, READ_BACK_BYTES):
            pause()
            end = min(start + READ_BACK_BYTES, row.size)
            found = None if self.progress.halt.is_set() else self._writer.read_back(row.name, start, end)
            if found is None:
                return
            for at in range(start, end, EXTENT_BYTES):
                extent = found[at - start : at - start + EXTENT_BYTES]
                if len(found) != end - start or _sum_of(extent) != _sum_in(row, at):
                    path = f"{self._writer.path}/{self._writer.stored_as(row.name)}"
                    raise _damaged_on_its_way(path, at, at + len(extent))

    def fail(self, error: BaseException) -> None:
        """Keep ``error``: EBADMSG is for what is damaged here, not for what a store says of data on their way."""
        if isinstance(error, StorageError) and error.errno == errno.EBADMSG and not isinstance(error, _DamagedHere):
            error = StorageError(str(error), path=error.path, errno=errno.EIO)
        super().fail(error)


class _DamagedHere(StorageError):
    """A file is not what its report says."""


class _Checked:
    """How much of a file was read and found to be what its report says."""

    def __init__(self, fd: int, row: ReportFile, path: str, data: memoryview) -> None:
        self._fd, self._row, self._path, self._data = fd, row, path, data
        self._wanted = self._done = 0

    def advance(self, nbytes: int) -> None:
        """Check the next ``nbytes``, to the end of the extent they end in. Raises `StorageError`."""
        self._wanted = min(self._wanted + nbytes, self._row.size)
        buffer = memoryview(bytearray(EXTENT_BYTES)) if self._done < self._wanted else memoryview(b"")
        while self._done < self._wanted:
            size = min(EXTENT_BYTES, self._row.size - self._done)
            self._check_extent(buffer[:size])
            self._done += size

    def _check_extent(self, buffer: memoryview) -> None:
        """Read an extent, which shows errors of the disk, then check the bytes that are sent: those of the mapping."""
        start, filled = self._done, 0
        while filled < len(buffer):
            count = os.preadv(self._fd, [buffer[filled:]], start + filled)
            if count == 0:
                raise _error(f"{self._path} ends at byte {start + filled}: it is damaged", self._path)
            filled += count
        if _sum_of(self._data[start : start + len(buffer)]) != _sum_in(self._row, start):
            message = f"{self._path} is damaged in bytes {start} to {start + len(buffer)}; nothing of it is copied"
            raise _error(message, self._path)


def _sum_of(extent: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(extent).to_bytes(SUM_BYTES, "little")


def _sum_in(row: ReportFile, start: int) -> bytes:
    """Return the checksum of the extent that begins at byte ``start``."""
    at = start // EXTENT_BYTES * SUM_BYTES
    return row.extents[at : at + SUM_BYTES]


def _damaged_on_its_way(path: str, start: int, end: int) -> StorageError:
    said = f"{path} is not what was sent, in bytes {start} to {end}: it was damaged on its way, and the store took it"
    return StorageError(f"{said}; it is sent again later", path=path, errno=errno.EIO)


def _error(message: str, path: str, number: int | None = errno.EBADMSG) -> StorageError:
    kind = _DamagedHere if number == errno.EBADMSG else StorageError
    return kind(message, path=path, errno=number)
