"""How an engine writes one attempt to a directory by its path: `holdfast.storage.protocol.AttemptWriter`. Torch-free.

For attempts whose bytes aren't in an image: copies from one directory to another, such as one of a network file system.

Guarantees: a file has its name only whole and durable. The directory is opened once, when the writer is made: one that
is renamed or removed meanwhile gets nothing more than what is removed with it.
Does not: publish, list, or make the directory.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Final

from holdfast.engine.removal import remove_tree_at
from holdfast.engine.syscalls import SYSTEM, check_name, where
from holdfast.errors import StorageError
from holdfast.storage.leases import Heartbeat, hold, new_record

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES: Final = 1 << 20
"""Written, and asked for, at a time: a limit of bytes per second is kept in steps of this."""


def open_writer(path: str) -> DirectoryWriter:
    """Return the writer of the existing directory ``path``. Raises `StorageError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"can't open {path}: {error.strerror}", path=path, errno=error.errno) from error
    return DirectoryWriter(fd)


class DirectoryWriter:
    """Writes into the directory of descriptor ``fd``, which it owns; see `AttemptWriter`. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    @property
    def path(self) -> str:
        return where(self._fd)

    def stored_as(self, file: str) -> str:
        return file

    def upload(self, file: str, data: memoryview, *, before_part: Callable[[int], None]) -> None:
        fresh = f".{file}.new"
        try:
            check_name(file)
            with contextlib.suppress(FileNotFoundError):
                SYSTEM.unlink(self._fd, fresh)
            fd = SYSTEM.create(self._fd, fresh, direct=False)
            try:
                SYSTEM.allocate(fd, len(data))
                for start in range(0, len(data), CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    before_part(len(chunk))
                    self._write(fd, chunk, start)
                SYSTEM.fsync(fd)
                SYSTEM.drop_cache(fd, 0, 0)
            finally:
                SYSTEM.close(fd)
            SYSTEM.rename(self._fd, fresh, file)
            SYSTEM.fsync_dir(self._fd)
        except StorageError:
            raise
        except OSError as error:
            path = where(self._fd, file)
            message = f"can't write {path}: {error.strerror or error}"
            raise StorageError(message, path=path, errno=error.errno) from error

    def _write(self, fd: int, chunk: memoryview, offset: int) -> None:
        start, nbytes = offset, len(chunk)
        while chunk:
            count = SYSTEM.pwrite(fd, chunk, offset)
            chunk, offset = chunk[count:], offset + count
        SYSTEM.drop_cache(fd, start, nbytes)

    def read_back(self, file: str, start: int, end: int) -> None:
        """Return None: a file system's own errors are enough."""

    def put(self, file: str, data: bytes) -> None:
        self.upload(file, memoryview(data), before_part=lambda _nbytes: None)

    def remove(self, file: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                SYSTEM.unlink(self._fd, file)
            SYSTEM.fsync_dir(self._fd)
        except OSError as error:
            path = where(self._fd, file)
            raise StorageError(f"can't remove {path}: {error.strerror}", path=path, errno=error.errno) from error

    def remove_tree(self, name: str) -> None:
        remove_tree_at(self._fd, name)

    def hold_lease(self, name: str, *, rank: int) -> Heartbeat:
        return Heartbeat(hold(self._fd, name, new_record(rank)))

    def end(self) -> None:
        """Do nothing: what was given up has gone with its directory."""
