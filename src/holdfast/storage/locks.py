"""Advisory locks that the kernel drops with their process: one writer per root, a host's writer slots. Torch-free.

    RootLock.acquire(root)          a manager's root: ``.holdfast/lock`` in it, which stays there
    lock.renew()                    before each save there: is this root still the one that is locked?
    RootLock.acquire_beside(path)   a save to one path: ``.{name}.lock`` beside it, gone on release
    sweep_left(root)                at a start: the files of saves that were killed
    refuse_managed(path)            before replacing ``path``: refuses a manager's root with all its checkpoints
    slots_directory()               one for all jobs of a user on a host
    HostSlots(directory, 2)         in an engine: `acquire` waits for one of two slots before it writes

Guarantees: at most one live holder per root on a host, and between hosts where the file system carries `flock`
(NFSv4, Lustre, ext4, XFS). A file left by a crash is no obstacle: the lock, not the file, shows a live holder. A
forked child never keeps the lock alive: it closes its copy of the descriptor. No slot has two live holders; it is free
as soon as its holder releases it or ends; a wait for a slot ends when it is stopped, and a slot acquired too late is
released at once.
Assumes: on a file system without locks writing goes on unlocked, and a warning is logged. Processes that share slots
use the same count; one with a lower count waits for the first slots only.
Does not: stop writers that take no lock; bound the wait for a slot (``stopped`` does: `persist_timeout` for an
engine's trainer, the grace for an orphan); serve waits in order of arrival. Thread-safe; a lock belongs to its process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
import weakref
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigError, RootLocked, StorageError
from holdfast.storage.files import make_dir_at, open_dir_at
from holdfast.storage.leases import NO_LOCKS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self


_log = logging.getLogger("holdfast.storage")
DIRECTORY: Final = ".holdfast"
_PAUSE_S: Final = 0.05
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHANGING_HANDS_S: Final = 1.0
"""How much longer to try when the file is unlinked between open and lock: its last holder is releasing it."""
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

    def __init__(self, path: str, fd: int, *, unlink: bool, made_at: str = "") -> None:
        self.path = path
        self._fd = fd
        self._unlink = unlink
        self._made_at = made_at
        _held.add(self)

    @classmethod
    def acquire(cls, root: str, *, timeout_s: float = 0.0, made_at: str = "") -> RootLock:
        """Lock ``root`` (an existing directory); returns when locked, waiting at most ``timeout_s`` seconds.

        made_at: the user's source line that the lock was made for, named to others in this process that want it.
        Raises `RootLocked` naming the holder, `StorageError` where the file can't be made.
        """
        root = os.path.abspath(root)
        directory = os.path.join(root, DIRECTORY)
        if not os.path.lexists(directory):
            try:
                make_dir_at(directory)
            except StorageError as error:
                if error.errno != errno.EEXIST:
                    raise
        os.close(open_dir_at(directory, links=False))  # raises for a link put there by another user
        return cls._acquire(os.path.join(directory, "lock"), root, timeout_s, unlink=False, made_at=made_at)

    @classmethod
    def acquire_beside(cls, path: str, *, timeout_s: float = 0.0) -> RootLock:
        """Lock the one path ``path`` (its parent must exist); as `acquire` otherwise."""
        parent, name = os.path.split(os.path.abspath(path))
        return cls._acquire(os.path.join(parent, f".{name}.lock"), path, timeout_s, unlink=True)

    @classmethod
    def _acquire(cls, path: str, guarded: str, timeout_s: float, *, unlink: bool, made_at: str = "") -> RootLock:
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
                    lock = cls(path, fd, unlink=unlink, made_at=made_at)
                    fd = -1
                    return lock
                by = "a process whose lock file is removed repeatedly" if locked else _holder(fd)
                advice = "stop it first" if locked else _advice(fd)
                looked_at = not locked and _is_only_looked_at(fd)
            finally:
                if fd >= 0:
                    os.close(fd)
            if time.monotonic() >= deadline + (_CHANGING_HANDS_S if locked or looked_at else 0.0):
                message = (
                    f"{guarded} is locked by another writer: {by}; {advice}, or save somewhere else "
                    "(reading needs no lock)"
                )
                raise RootLocked(message, path=guarded, by=by)
            time.sleep(0.001 if locked or looked_at else _PAUSE_S)

    def renew(self) -> None:
        """Lock the root again if it was removed or replaced meanwhile, and its lock file with it.

        Returns at once otherwise. Raises `RootLocked` if another process holds the new one, `StorageError`.
        """
        try:
            if self._fd < 0 or _still_there(self._fd, self.path):
                return
        except NotADirectoryError:
            pass  # `acquire` raises for it
        except OSError as error:
            _log.debug("looking at %s: %s", self.path, error)
            return  # proves nothing; a save meets it again
        new = RootLock.acquire(os.path.dirname(os.path.dirname(self.path)), made_at=self._made_at)
        _log.warning("%s was replaced by another directory since it was locked; the new one is locked now", self.path)
        self._close()
        self._fd, new._fd = new._fd, -1  # noqa: SLF001 - same class
        _held.discard(new)

    def release(self) -> None:
        """Give the lock up; idempotent, never raises."""
        if self._fd < 0:
            return
        try:
            if self._unlink:
                os.unlink(self.path)  # while still locked: no other process can hold this inode
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
    """Refuse a link to another file, which another user may have put into a directory that they can write to."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise StorageError(
            f"{path} is not a plain file with a single link ({found.st_nlink} links): another "
            "program has put it there; remove it, and save to a directory that others can't write "
            "to",
            path=path,
            errno=errno.EPERM,
        )


def root_held_by(root: str) -> str | None:
    """Describe the holder of the lock of ``root``; None if it is free or unknown. Changes nothing."""
    return _held_by(os.path.join(root, DIRECTORY, "lock"))


def path_held_by(path: str) -> str | None:
    """Describe the holder of the lock of the path ``path``; see `root_held_by`."""
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
    """Return True if only a short shared lock (`root_held_by`) blocks us, which is about to be released."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep_left(root: str) -> None:
    """Remove lock files in ``root`` whose holders were killed; those in use stay. Never raises."""
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
    """Raise if ``path`` is a manager's root: `RootLocked` while a manager holds it, else `ConfigError`."""
    if not os.path.isdir(os.path.join(path, DIRECTORY)):
        return
    RootLock.acquire(path).release()
    raise ConfigError(
        f"{path} is a manager's root, and overwriting it would delete every checkpoint in it; "
        "choose a directory below it, or remove it first",
        field="path",
    )


def _lock(fd: int, path: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            _log.warning("the file system of %s has no locks; a second writer would not be refused", path)
            return True
        raise StorageError(f"can't lock {path}: {error.strerror}", path=path, errno=error.errno) from error
    return True


def _still_there(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def write_record(fd: int, path: str) -> None:
    """Write the holder's record, for messages only: a full disk doesn't undo the lock."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "since": since})
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, record.encode(), 0)
    except OSError as error:
        _log.debug("writing %s: %s", path, error)


def _advice(fd: int) -> str:
    """Return advice about the holder of a lock."""
    wanted = os.fstat(fd)
    for lock in list(_held):
        held = lock._fd  # noqa: SLF001 - same module
        try:
            is_ours = held >= 0 and os.path.samestat(os.fstat(held), wanted)
        except OSError:  # another thread has just released it
            is_ours = False
        if is_ours:
            made = f", made at {lock._made_at}" if lock._made_at else ""  # noqa: SLF001
            return f"that is this process{made}, where it was not closed: call `close` there, or use a `with`"
    return "stop it first"


def _holder(fd: int) -> str:
    return read_record(fd) or "an unknown process (its record is missing)"


def read_record(fd: int) -> str | None:
    """Describe the process that wrote the record in a lock file; None without a valid record."""
    try:
        record = json.loads(os.pread(fd, _MAX_RECORD_BYTES, 0))
        return f"process {record['pid']} on host {record['host']} since {record['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


# Writer slots of a host. A slot is a locked file; for each slot one thread of the process sleeps in the kernel until
# it gets the lock, instead of polling.

DIRECTORY_VARIABLE: Final = "HOLDFAST_RUNTIME_DIR"
TELL_S: Final = 1.0
"""How often a wait reports the slots' holders again; a free slot ends it at once."""
_REPLACED_TRIES: Final = 16
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def slots_directory() -> str:
    """Return the directory of this user's slots on this host: ``$HOLDFAST_RUNTIME_DIR``, or one below ``/tmp``.

    It is made if missing. Raises `StorageError` where that fails, or another user owns it.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    # Not TMPDIR or XDG_RUNTIME_DIR: schedulers give each job its own, but jobs must share the slots.
    path = os.path.abspath(given) if given else f"/tmp/holdfast-{os.geteuid()}"  # noqa: S108 - owner checked below
    what = f"can't use {path} for the writer slots of `host_writers`"
    advice = f"set {DIRECTORY_VARIABLE} to a directory of your own, the same for all jobs of this host"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path) if not given else os.stat(path)
    except OSError as error:
        message = f"{what}: {error.strerror}; {advice}"
        raise StorageError(message, path=path, errno=error.errno) from error
    if not given and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid()):
        message = f"{what}: it is not a directory of user {os.geteuid()} (its owner is user {found.st_uid}); {advice}"
        raise StorageError(message, path=path, errno=errno.EPERM)
    return path


class Slot:
    """A slot that this process holds. A context manager."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Release the slot; idempotent, never raises."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.ftruncate(fd, 0)  # removes the record of its holder
        except OSError:
            pass
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Taker:
    """One wait for a slot, and its result."""

    def __init__(self) -> None:
        self.slot: Slot | None = None
        self.error: OSError | None = None

    def is_served(self) -> bool:
        return self.slot is not None or self.error is not None


class HostSlots:
    """The slots of this host, for one process."""

    def __init__(self, directory: str, count: int) -> None:
        """``directory`` exists; ``count`` is at least 1."""
        self._directory = directory
        self._count = count
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._takers: list[_Taker] = []
        self._sleeping: set[int] = set()
        """Numbers of the slots that a thread waits for."""

    def acquire(self, *, stopped: Callable[[], bool], tell: Callable[[str], None] = lambda _: None) -> Slot | None:
        """Acquire a slot; None once ``stopped`` returns True (see `wake`).

        tell: called now and then with a description of the slots and their holders, and with "" at the end. Raises
        `StorageError` where a slot can't be opened or locked.
        """
        try:
            for number in range(self._count):
                fd = self._locked(number, wait=False)
                if fd is not None:
                    return Slot(fd)
            return self._wait(stopped, tell)
        except OSError as error:
            path = self._directory if error.filename is None else str(error.filename)
            message = f"can't take one of the {self._count} writer slots of this host in {path}: {error.strerror}"
            raise StorageError(message, path=path, errno=error.errno) from error

    def wake(self) -> None:
        """Make all waits call their ``stopped`` now. Never blocks for long."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, stopped: Callable[[], bool], tell: Callable[[str], None]) -> Slot | None:
        taker = _Taker()
        with self._changed:
            self._takers.append(taker)
        try:
            while not taker.is_served() and not stopped():
                tell(self._described())
                with self._changed:
                    self._send_sleepers()
                    if not taker.is_served() and not stopped():
                        self._changed.wait(TELL_S)
            if taker.error is not None:
                raise taker.error
            if not stopped():
                slot, taker.slot = taker.slot, None
                return slot
            return None
        finally:
            with self._changed:
                self._takers.remove(taker)
            if taker.slot is not None:  # acquired too late
                taker.slot.release()
            tell("")

    def _send_sleepers(self) -> None:
        """Start a thread for each slot that none waits for."""
        for number in range(self._count):
            if number not in self._sleeping:
                try:
                    threading.Thread(
                        target=self._sleep, args=(number,), name=f"holdfast-slot-{number}", daemon=True
                    ).start()
                except RuntimeError as error:
                    raise OSError(errno.EAGAIN, f"no thread can be started: {error}") from error
                self._sleeping.add(number)

    def _sleep(self, number: int) -> None:
        """Wait in the kernel for a slot, however long it takes, and hand it to the first wait."""
        slot: Slot | None = None
        failure: OSError | None = None
        try:
            fd = self._locked(number, wait=True)
            slot = None if fd is None else Slot(fd)
        except OSError as error:
            failure = error
        with self._changed:
            self._sleeping.discard(number)
            taker = next((taker for taker in self._takers if not taker.is_served()), None)
            if taker is not None:
                taker.slot, taker.error = slot, failure
                slot = None
            self._changed.notify_all()
        if slot is not None:
            slot.release()

    def _locked(self, number: int, *, wait: bool) -> int | None:
        """Lock a slot and return its descriptor; None where it is held and ``wait`` is False."""
        path = self._path(number)
        for _ in range(_REPLACED_TRIES):
            fd = os.open(path, _FLAGS, mode=0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                here = os.fstat(fd)
                if os.path.samestat(here, os.stat(path, follow_symlinks=False)):
                    write_record(fd, path)
                    found, fd = fd, -1
                    return found
            except BlockingIOError:
                return None
            except FileNotFoundError:
                continue  # removed meanwhile: the file that is made next counts
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from error
            finally:
                if fd >= 0:
                    os.close(fd)
        raise OSError(errno.EBUSY, "the file is removed repeatedly", path)

    def _described(self) -> str:
        holders = []
        for number in range(self._count):
            try:
                fd = os.open(self._path(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                holders.append(read_record(fd))
            finally:
                os.close(fd)
        held = ", ".join(holder for holder in holders if holder is not None)
        return (
            f"one of the {self._count} writer slots that `host_writers` allows on this host ({self._directory}), "
            f"held by {held or 'unknown processes'}"
        )

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"writer-{number}")
