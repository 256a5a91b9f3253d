"""One writer per root: an advisory lock that the kernel drops with its process. Torch-free.

    RootLock.acquire(root)          a manager's root: ``.holdfast/lock`` in it, which stays there
    lock.renew()                    before each save there: is this root still the one that is locked?
    RootLock.acquire_beside(path)   a save to one path: ``.{name}.lock`` beside it, gone on release
    sweep_left(root)                at a start: the files of saves that were killed
    refuse_managed(path)            before one replaces what is at ``path``: not a whole root, with all its checkpoints

Guarantees: at most one live holder per root on a host, and between hosts where the file system carries `flock`
(NFSv4, Lustre, ext4, XFS). A file left by a crash is no obstacle: the lock, not the file, says that somebody lives. A
forked child never keeps the lock alive: it closes its copy of the descriptor.
Assumes: where the file system has no locks at all, there is none to be had: that is logged, and writing goes on.
Does not: guard against writers that don't ask for it. Any thread may call anything; a lock belongs to its process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import time
import weakref
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigError, RootLocked, StorageError
from holdfast.storage.lease import NO_LOCKS
from holdfast.storage.local import LocalStorage

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_log = logging.getLogger("holdfast.storage")
DIRECTORY: Final = ".holdfast"
_PAUSE_S: Final = 0.05
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHANGING_HANDS_S: Final = 1.0
"""How much longer to try where the file is unlinked under us: its last holder is letting go of it."""
_MAX_RECORD_BYTES: Final = 4096

_held: weakref.WeakSet[RootLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock._close()  # noqa: SLF001 - same module; without unlocking, which would unlock the parent
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)


class RootLock:
    """A lock that this process holds; made by `acquire` or `acquire_beside`, usable as a context manager."""

    def __init__(self, path: str, fd: int, *, unlink: bool) -> None:
        self.path = path
        self._fd = fd
        self._unlink = unlink
        _held.add(self)

    @classmethod
    def acquire(cls, root: str, *, timeout_s: float = 0.0) -> RootLock:
        """Lock ``root`` (an existing directory); returns when locked, waiting at most ``timeout_s`` seconds.

        Raises `RootLocked` saying by whom, `StorageError` where the file can't be made.
        """
        storage = LocalStorage(root)
        if not storage.exists(DIRECTORY):
            try:
                storage.make_dir(DIRECTORY)
            except StorageError as error:
                if error.errno != errno.EEXIST:
                    raise
        os.close(storage.open_dir(DIRECTORY))  # no link that somebody else has put there
        return cls._acquire(storage.path(f"{DIRECTORY}/lock"), storage.root, timeout_s, unlink=False)

    @classmethod
    def acquire_beside(cls, path: str, *, timeout_s: float = 0.0) -> RootLock:
        """Lock the one path ``path`` (its parent must exist); as `acquire` otherwise."""
        parent, name = os.path.split(os.path.abspath(path))
        return cls._acquire(os.path.join(parent, f".{name}.lock"), path, timeout_s, unlink=True)

    @classmethod
    def _acquire(cls, path: str, guarded: str, timeout_s: float, *, unlink: bool) -> RootLock:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fd = os.open(path, _LOCK_FLAGS, mode=0o666)
            except OSError as error:
                message = f"can't open the lock file {path}: {error.strerror}; writing here needs it"
                raise StorageError(message, path=path, errno=error.errno) from error
            try:
                _require_own(fd, path)
                locked = _lock(fd, path)
                # Between our open and our lock the last holder may have unlinked the file: lock the new one instead.
                if locked and _still_there(fd, path):
                    write_record(fd, path)
                    lock = cls(path, fd, unlink=unlink)
                    fd = -1
                    return lock
                by = "one whose lock file is taken away again and again" if locked else _holder(fd)
                looked_at = not locked and _is_only_looked_at(fd)
            finally:
                if fd >= 0:
                    os.close(fd)
            if time.monotonic() >= deadline + (_CHANGING_HANDS_S if locked or looked_at else 0.0):
                message = (
                    f"{guarded} is locked by another writer: {by}; stop it first, or save somewhere else "
                    "(reading needs no lock)"
                )
                raise RootLocked(message, path=guarded, by=by)
            time.sleep(0.001 if locked or looked_at else _PAUSE_S)

    def renew(self) -> None:
        """Lock the root of `acquire` anew where it was removed or replaced meanwhile, and its lock file with it.

        Returns at once otherwise. Raises `RootLocked` if what is there now is somebody else's, `StorageError`.
        """
        try:
            if self._fd < 0 or _still_there(self._fd, self.path):
                return
        except NotADirectoryError:
            pass  # said by `acquire`
        except OSError as error:
            _log.debug("looking at %s: %s", self.path, error)
            return  # it says nothing; a save meets it again
        new = RootLock.acquire(os.path.dirname(os.path.dirname(self.path)))
        _log.warning("%s is another directory than the one that was locked; it is locked now", self.path)
        self._close()
        self._fd, new._fd = new._fd, -1  # noqa: SLF001 - same class
        _held.discard(new)

    def release(self) -> None:
        """Give the lock up; idempotent, never raises."""
        if self._fd < 0:
            return
        try:
            if self._unlink:
                os.unlink(self.path)  # while still locked: nobody else can hold this inode as theirs
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            _log.debug("releasing %s: %s", self.path, error)
        self._close()
        _held.discard(self)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _require_own(fd: int, path: str) -> None:
    """In a directory that others may write to, somebody may have put a link to another file in its place."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise StorageError(
            f"{path} is no plain file of its own ({found.st_nlink} links): somebody has put it there; remove it, and "
            "save to a directory that others can't write to",
            path=path,
            errno=errno.EPERM,
        )


def root_held_by(root: str) -> str | None:
    """Who holds the lock of ``root`` now, None if nobody does or it can't be told. Changes nothing."""
    return _held_by(os.path.join(root, DIRECTORY, "lock"))


def path_held_by(path: str) -> str | None:
    """Who holds the lock of the one path ``path`` now; as `root_held_by`."""
    parent, name = os.path.split(os.path.abspath(path))
    return _held_by(os.path.join(parent, f".{name}.lock"))


def _held_by(path: str) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def _is_only_looked_at(fd: int) -> bool:
    """Whether what keeps us from the lock is somebody who asks who holds it, and is about to let go."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep_left(root: str) -> None:
    """Remove the lock files beside paths below ``root`` whose holders were killed; those in use stay. Never raises."""
    try:
        entries = [entry for entry in os.listdir(root) if entry.startswith(".") and entry.endswith(".lock")]
    except OSError as error:
        _log.warning("can't look for locks left in %s: %s", root, error)
        return
    for entry in entries:
        path, name = os.path.join(root, entry), entry[1 : -len(".lock")]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                ours = stat.S_ISREG(os.fstat(fd).st_mode) and read_record(fd) is not None
            finally:
                os.close(fd)
            if name and ours:
                RootLock.acquire_beside(os.path.join(root, name)).release()
        except RootLocked:
            continue
        except (OSError, StorageError) as error:
            _log.warning("the lock file %s stays: %s", path, error)


def refuse_managed(path: str) -> None:
    """Raise if ``path`` is a manager's root: `RootLocked` by whom if one is at work there, else `ConfigError`."""
    if not os.path.isdir(os.path.join(path, DIRECTORY)):
        return
    RootLock.acquire(path).release()
    raise ConfigError(
        f"{path} is a manager's root, which overwriting would take away with every checkpoint in it; "
        f"name a directory below it, or remove it first",
        field="path",
    )


def _lock(fd: int, path: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            _log.warning("the file system of %s has no locks; nothing keeps a second writer away", path)
            return True
        raise StorageError(f"can't lock {path}: {error.strerror}", path=path, errno=error.errno) from error
    return True


def _still_there(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def write_record(fd: int, path: str) -> None:
    """Say who holds it. Only for messages: a full disk doesn't undo the lock."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "since": since})
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, record.encode(), 0)
    except OSError as error:
        _log.debug("writing %s: %s", path, error)


def _holder(fd: int) -> str:
    return read_record(fd) or "a process that has not said who it is"


def read_record(fd: int) -> str | None:
    """Who has written the record in a lock file; None if there is none of ours."""
    try:
        record = json.loads(os.pread(fd, _MAX_RECORD_BYTES, 0))
        return f"process {record['pid']} on host {record['host']} since {record['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
