"""A directory of a local or shared file system as the commit protocol's storage. Torch-free.

Guarantees: every method either did what it says or raised `StorageError` with path, errno and what to do; a file is
created, never replaced, and is whole and fsynced when `write_file` returns; links are never followed below the root.
Assumes: POSIX rename and fsync; on NFS a repeated answer may be an error for what has happened (``commit`` sorts that
out). Stateless but for the root's path: any thread may call anything.
Does not: retry, wait, or decide what belongs together.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast.errors import ConfigError, StorageError
from holdfast.storage.plain import PLAIN_FLAGS, read_at

if TYPE_CHECKING:
    from collections.abc import Generator

_ADVICE: Final = {
    errno.EACCES: "check the permissions of the directory for the user this job runs as",
    errno.EPERM: "check the permissions and attributes of the directory",
    errno.EROFS: "the file system is mounted read-only; choose another path or remount it",
    errno.ENOSPC: "the disk is full; free space or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up; free space or keep fewer checkpoints",
    errno.EIO: "the device or file server failed; check the system log",
    errno.ESTALE: "the file server lost this directory; check the mount",
    errno.ENAMETOOLONG: "choose a shorter name_template or path",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
}
_DIR_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def _refuse(error: OSError, doing: str, path: str) -> NoReturn:
    code = error.errno
    name = errno.errorcode.get(code, str(code)) if code is not None else type(error).__name__
    advice = _ADVICE.get(code, "") if code is not None else ""
    message = f"can't {doing} {path}: {error.strerror or error} ({name})"
    raise StorageError(f"{message}; {advice}" if advice else message, path=path, errno=code) from error


def create_root(path: str | os.PathLike[str]) -> str:
    """Make the directory ``path`` with its ancestors, each durable; returns its absolute path once it is there.

    Of those that are there already the lowest is made durable too: whoever made it may have died before it was.

    Raises `ConfigError` if ``path`` or an ancestor is something else than a directory, `StorageError` for what the
    system refuses. Several ranks or processes may call it at once.
    """
    root = os.path.abspath(os.fspath(path))
    missing: list[str] = []
    current = root
    while not _is_dir(current):
        missing.append(current)
        current = os.path.dirname(current)
    # Each is durable before the next is made, so of what somebody else has made only the lowest may not be.
    _sync_found(os.path.dirname(current))
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not _is_dir(directory):
                raise _not_a_directory(directory) from None
        except OSError as error:
            _refuse(error, "make directory", directory)
        # A directory another rank has just made needs its entry durable for us as well.
        _sync(os.path.dirname(directory))
    return root


def _sync_found(path: str) -> None:
    try:
        _sync(path)
    except StorageError as error:
        if error.errno not in {errno.EACCES, errno.EPERM}:  # where we may not look we have made nothing
            raise


def _is_dir(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            raise _not_a_directory(path) from None
        return False
    except NotADirectoryError:
        raise _not_a_directory(path) from None
    except OSError as error:
        _refuse(error, "look at", path)
    if not stat.S_ISDIR(mode):
        raise _not_a_directory(path)
    return True


def _not_a_directory(path: str) -> ConfigError:
    return ConfigError(f"{path} is not a directory, or lies below a file; choose another path", field="path")


def _sync(path: str) -> None:
    try:
        fd = os.open(path, _DIR_FLAGS)
    except OSError as error:
        _refuse(error, "open directory", path)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for directories: entries are durable when made.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            _refuse(error, "fsync directory", path)
    finally:
        os.close(fd)


class LocalStorage:
    """`holdfast.storage.protocol.Storage` below ``root``, which must exist when a method is called."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))

    @property
    def root(self) -> str:
        return self._root

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    def path(self, name: str) -> str:
        """The absolute path of ``name``."""
        if not name:
            return self._root
        parts = name.split("/")
        assert all(part not in {"", ".", ".."} for part in parts), f"not a name below the root: {name!r}"
        return os.path.join(self._root, *parts)

    def make_dir(self, name: str) -> None:
        path = self.path(name)
        try:
            os.mkdir(path)
        except OSError as error:
            _refuse(error, "make directory", path)
        _sync(os.path.dirname(path))

    def write_file(self, name: str, data: bytes) -> None:
        path = self.path(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o666)
        except OSError as error:
            _refuse(error, "create", path)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        except OSError as error:
            _refuse(error, "write", path)
        finally:
            os.close(fd)

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        path = self.path(name)
        try:
            fd = os.open(path, PLAIN_FLAGS)
            try:
                size = os.fstat(fd).st_size
                if size <= max_bytes:
                    return read_at(fd, 0, size)
            finally:
                os.close(fd)
        except OSError as error:
            _refuse(error, "read", path)
        message = f"can't read {path}: it has {size} bytes, expected at most {max_bytes}; this is not a file of ours"
        raise StorageError(message, path=path, errno=errno.EFBIG)

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        path = self.path(name)
        try:
            fd = os.open(path, PLAIN_FLAGS)
            try:
                return read_at(fd, offset, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            _refuse(error, "read", path)

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        path = self.path(name)
        try:
            fd = os.open(path, PLAIN_FLAGS)
        except OSError as error:
            _refuse(error, "read", path)
        try:
            offset = 0
            while piece := read_at(fd, offset, nbytes):
                yield piece
                offset += len(piece)
        except OSError as error:
            _refuse(error, "read", path)
        finally:
            os.close(fd)

    def size(self, name: str) -> int | None:
        found = self._lstat(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def exists(self, name: str) -> bool:
        return self._lstat(name) is not None

    def _lstat(self, name: str) -> os.stat_result | None:
        path = self.path(name)
        try:
            return os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link on the way leads nowhere, as a dangling one
                return None
            _refuse(error, "look at", path)

    def list_dir(self, name: str) -> list[str]:
        path = self.path(name)
        try:
            fd = os.open(path, _DIR_FLAGS | (os.O_NOFOLLOW if name else 0))
            try:
                return sorted(os.listdir(fd))
            finally:
                os.close(fd)
        except FileNotFoundError:
            return []
        except OSError as error:
            _refuse(error, "list", path)

    def rename(self, source: str, target: str) -> None:
        path = self.path(source)
        try:
            os.rename(path, self.path(target))
        except OSError as error:
            _refuse(error, f"rename to {target}", path)

    def sync_dir(self, name: str) -> None:
        _sync(self.path(name))

    def unlink(self, name: str) -> None:
        path = self.path(name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _refuse(error, "remove", path)

    def remove_tree(self, name: str) -> None:
        path = self.path(name)
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            # Gone, or going: somebody else removes the same tree. What is left is found on the next start.
            return
        except OSError as error:
            _refuse(error, "remove", path)

    def open_dir(self, name: str) -> int:
        """A descriptor of the directory ``name``, closed on exec; the caller closes it. The root may be a link."""
        path = self.path(name)
        try:
            return os.open(path, _DIR_FLAGS | (os.O_NOFOLLOW if name else 0))
        except OSError as error:
            _refuse(error, "open directory", path)
