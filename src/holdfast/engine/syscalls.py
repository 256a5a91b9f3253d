"""The system calls used for persisting, behind an interface through which tests inject failures. Torch-free.

`Calls` is the interface; `SYSTEM` makes the real calls. Every method raises `OSError` as the system does, and none
retries. Names are relative to a directory descriptor, so a directory renamed meanwhile is followed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP})
O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)


class Calls(Protocol):
    def create(self, dir_fd: int, name: str, *, direct: bool) -> int:
        """Create a file for writing; it must not exist, and a link in its place is not followed."""
        ...

    def open_shared(self, dir_fd: int, name: str, *, direct: bool) -> int:
        """Open a file that others also write to, creating it if missing; a link in its place is not followed."""
        ...

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give the file its size, and its blocks if the file system can: a full disk shows here."""
        ...

    def allocate_part(self, fd: int, offset: int, nbytes: int) -> None:
        """Allocate blocks for this range of a file if the file system can; leave the rest unchanged."""
        ...

    def extend(self, fd: int, nbytes: int) -> None:
        """Extend a file that others write to, to its final size; never shrinks it."""
        ...

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of ``data``; return how many bytes."""
        ...

    def make_buffered(self, fd: int) -> None:
        """Clear O_DIRECT on an open file."""
        ...

    def drop_cache(self, fd: int, offset: int, nbytes: int) -> None:
        """Start write-back of the range and drop its clean pages; 0 bytes: to the end. A hint: never fails."""
        ...

    def fsync(self, fd: int) -> None: ...

    def fsync_dir(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...

    def rename(self, dir_fd: int, source: str, target: str) -> None: ...

    def unlink(self, dir_fd: int, name: str) -> None: ...


class SystemCalls:
    """`Calls` made by the operating system."""

    def create(self, dir_fd: int, name: str, *, direct: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags | (O_DIRECT if direct else 0), mode=0o666, dir_fd=dir_fd)

    def open_shared(self, dir_fd: int, name: str, *, direct: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags | (O_DIRECT if direct else 0), mode=0o666, dir_fd=dir_fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        allocate = _fallocate()
        if allocate is None or not allocate(fd, 0, nbytes):
            # Set the size nevertheless: writers that don't extend a file don't wait for each other.
            os.ftruncate(fd, nbytes)

    def allocate_part(self, fd: int, offset: int, nbytes: int) -> None:
        allocate = _fallocate()
        if allocate is not None and nbytes:
            allocate(fd, offset, nbytes)

    def extend(self, fd: int, nbytes: int) -> None:
        size = os.fstat(fd).st_size
        if size > nbytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, expected {nbytes}")
        if size < nbytes:
            # Other engines may do the same concurrently: all of them set the same size.
            os.ftruncate(fd, nbytes)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def make_buffered(self, fd: int) -> None:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~O_DIRECT)

    def drop_cache(self, fd: int, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_dir(self, fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network and FUSE file systems have no fsync for directories: entries are durable when made.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, dir_fd: int, source: str, target: str) -> None:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, dir_fd: int, name: str) -> None:
        os.unlink(name, dir_fd=dir_fd)


SYSTEM: Final[Calls] = SystemCalls()


def where(dir_fd: int, name: str = "") -> str:
    """Return ``name`` in the directory ``dir_fd`` as a path for messages, with the directory's current name."""
    try:
        directory = os.readlink(f"/proc/self/fd/{dir_fd}")
    except OSError:
        return name
    return f"{directory}/{name}" if name else directory


def check_name(name: str) -> None:
    """Raise `OSError` (EINVAL) unless ``name`` is a plain entry name that can't leave its directory."""
    if not name or name in {".", ".."} or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise OSError(errno.EINVAL, f"{name!r} is no plain file name")


@functools.cache
def _fallocate() -> Callable[[int, int, int], bool] | None:
    """Return fallocate(2): if unsupported, `os.posix_fallocate` would write a byte into every block instead."""
    try:
        import ctypes

        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (ImportError, OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def allocate(fd: int, offset: int, nbytes: int) -> bool:
        while call(fd, 0, offset, nbytes) != 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number in _UNSUPPORTED:
                return False
            raise OSError(number, os.strerror(number))
        return True

    return allocate
