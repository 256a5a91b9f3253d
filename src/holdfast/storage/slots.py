"""Turns to write: a host's few slots, of which an engine holds one while it writes an attempt. Torch-free; any thread.

    slots_directory()             one for all jobs of a user on a host
    HostSlots(directory, 2)       in an engine: `acquire` waits for one of two

A slot is a lock file, and `flock` says who has it: the kernel takes it from a process that ends, however it ends, and
wakes who waits for it. Nobody looks again and again: for each slot one thread of the process sleeps in the kernel.

Guarantees: no two live holders of a slot; a slot is free as soon as its holder has let go or has ended; a wait ends
when it is stopped. A thread that nobody waits for any more gives back what it gets, at once.
Assumes: who is to share slots names as many; one who names fewer waits for the first ones.
Does not: bound the wait, which is for who stops it (an engine's trainer has `persist_timeout`, an orphan its grace); or
give turns by order of arrival.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from typing import TYPE_CHECKING, Final

from holdfast.errors import StorageError
from holdfast.storage.lock import read_record, write_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

DIRECTORY_VARIABLE: Final = "HOLDFAST_RUNTIME_DIR"
TELL_S: Final = 1.0
"""How often a wait says anew who holds the slots; what ends it wakes it at once."""
_REPLACED_TRIES: Final = 16
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def slots_directory() -> str:
    """Where this user's slots on this host are, made if it isn't there: ``$HOLDFAST_RUNTIME_DIR`` or below ``/tmp``.

    Raises `StorageError` where it can't be made, or is somebody else's.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    # Not by TMPDIR or XDG_RUNTIME_DIR: schedulers give every job another, and jobs are what is to share.
    path = os.path.abspath(given) if given else f"/tmp/holdfast-{os.geteuid()}"  # noqa: S108 - owner checked below
    what = f"can't use {path} for the turns of `host_writers`"
    advice = f"name a directory of your own by {DIRECTORY_VARIABLE}, the same for all jobs of this host"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path) if not given else os.stat(path)
    except OSError as error:
        message = f"{what}: {error.strerror}; {advice}"
        raise StorageError(message, path=path, errno=error.errno) from error
    if not given and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid()):
        message = f"{what}: it is no directory of user {os.geteuid()}, but of user {found.st_uid}; {advice}"
        raise StorageError(message, path=path, errno=errno.EPERM)
    return path


class Slot:
    """One that this process holds. A context manager."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Idempotent, never raises."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.ftruncate(fd, 0)  # says nothing of who had it
        except OSError:
            pass
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Taker:
    """One wait, and what came of it."""

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
        """Guards what follows."""
        self._takers: list[_Taker] = []
        self._sleeping: set[int] = set()
        """Slots for which a thread sleeps."""

    def acquire(self, *, stopped: Callable[[], bool], tell: Callable[[str], None] = lambda _: None) -> Slot | None:
        """Hold one; returns when it is held, or None when ``stopped`` says so (see `wake`).

        tell: called with what is waited for and who holds it, now and then, and with "" at the end. Raises
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
            message = f"can't take one of the {self._count} turns to write of this host in {path}: {error.strerror}"
            raise StorageError(message, path=path, errno=error.errno) from error

    def wake(self) -> None:
        """Have all who wait look whether they are stopped. Never blocks for long."""
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
            if taker.slot is not None:  # came too late
                taker.slot.release()
            tell("")

    def _send_sleepers(self) -> None:
        """Have a thread sleep for each slot."""
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
        """Wait in the kernel for a slot, however long it takes, and give it to who waits."""
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
        """The descriptor of a slot that is ours now; None where it is somebody's, and we don't wait."""
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
                continue  # somebody tidies up: the one that is made next counts
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from error
            finally:
                if fd >= 0:
                    os.close(fd)
        raise OSError(errno.EBUSY, "the file is taken away again and again", path)

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
            f"one of the {self._count} turns to write that `host_writers` allows on this host ({self._directory}), "
            f"held by {held or 'processes that have not said who they are'}"
        )

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"writer-{number}")
