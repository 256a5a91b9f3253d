"""Leases: of engines on their attempts (files locked and rewritten), of readers on checkpoints. Torch-free.

While an engine works on an attempt it holds ``lease-00007`` there, so that a manager that finds the attempt after a
crash can tell whether its engine is still finishing it:

    same host      `flock` answers at once, and the kernel drops the lock with the process, however it died
    another host   the record's counter (or the file's mtime) keeps changing while the holder lives

A reader takes a shared `flock` of the manifest (`being_read`); deleting takes an exclusive one (`to_be_deleted`).

Guarantees: under its final name a lease is always whole and locked (it is made under another name, locked, then
renamed); the record keeps its size, so a rewrite never truncates; observing never blocks the holder for long. A
reader's lease writes nothing, so reading needs no write permission; the kernel drops it with its process. Readers and
deleters never wait for each other.
Assumes: `flock` reaches other hosts only where the file system carries it (NFSv4, Lustre with ``-o flock``); without
locks, reading and deleting go on. Clocks of different hosts are not compared.
Does not: decide how long a lease must be unchanged (``commit.recovery`` does), or stop deleters that take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import CheckpointNotFound, CheckpointReplaced, StorageError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.storage.files import try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.storage.files import OpenedDirectory


LEASE_PREFIX: Final = "lease-"
COORDINATOR_LEASE: Final = f"{LEASE_PREFIX}coordinator"
"""Held from the beginning of an attempt until it is settled, where no lock keeps other starts away."""
LEASE_WAIT_S: Final = 2.0
"""How long the end of an attempt waits until that lease is removed."""
RECORD_BYTES: Final = 512
"""Every record is padded with blanks to this size: one sector, so readers see an old or a new one."""
BEAT_S: Final = 0.25
SYNC_EVERY: Final = 8
"""Beats between two fsyncs: other hosts of a network file system see only what was flushed."""
NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Errnos of file systems without locks."""
_LOCK_TRIES: Final = 50
_LOCK_PAUSE_S: Final = 0.02


class LeaseRecord(msgspec.Struct, frozen=True):
    """The holder of a lease. ``counter`` goes up by one with every beat."""

    pid: int
    host: str
    boot_id: str
    """Changes when the host restarts, and is shared by its containers; empty where the system has none."""
    rank: int
    counter: int


class LeaseState(msgspec.Struct, frozen=True):
    """A lease as observed once. Two equal observations mean that there was no beat in between."""

    record: LeaseRecord | None
    """None if the content can't be read as a record."""
    mtime_ns: int
    flock_free: bool | None
    """False: a live process holds it. True: no process does. None: unknown from this host, watch the record."""


def lease_name(rank: int) -> str:
    """The file name of ``rank``'s lease: ``lease-00007``."""
    return f"{LEASE_PREFIX}{rank:05d}"


def boot_id() -> str:
    """Return the id of this boot of the host; empty where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def new_record(rank: int) -> LeaseRecord:
    """A record for this process, counter 0."""
    return LeaseRecord(pid=os.getpid(), host=os.uname().nodename[:255], boot_id=boot_id(), rank=rank, counter=0)


def encode_record(record: LeaseRecord) -> bytes:
    """`RECORD_BYTES` of JSON, padded with blanks."""
    data = msgspec.json.encode(record)
    assert len(data) <= RECORD_BYTES
    return data.ljust(RECORD_BYTES)


def decode_record(data: bytes) -> LeaseRecord | None:
    """The record in ``data``, or None where there is none."""
    try:
        return msgspec.json.decode(data, type=LeaseRecord)
    except (msgspec.MsgspecError, RecursionError):
        return None


class Lease:
    """A lease that this process holds, with a descriptor of its directory. For one thread at a time; made by `hold`."""

    def __init__(self, dir_fd: int, name: str, fd: int, record: LeaseRecord) -> None:
        self._dir_fd = dir_fd
        self._name = name
        self._fd = fd
        self.record = record

    def beat(self) -> None:
        """Rewrite the record with the next counter. Raises `OSError`; the lock is held all the same."""
        counter = self.record.counter + 1
        self.record = msgspec.structs.replace(self.record, counter=counter)
        os.pwrite(self._fd, encode_record(self.record), 0)
        if counter % SYNC_EVERY == 0:
            os.fsync(self._fd)

    def release(self) -> None:
        """Remove the file and drop the lock; idempotent. Never raises: a lease left behind is found unlocked."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.unlink(self._name, dir_fd=self._dir_fd)
        except OSError:
            pass
        finally:
            os.close(fd)
            os.close(self._dir_fd)


class Heartbeat:
    """Keeps a lease beating on a thread of its own: a file system that hangs must not hang the control thread."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-lease", daemon=True)
        self._thread.start()

    def stop(self, *, wait_s: float) -> None:
        """Remove the lease; waits at most ``wait_s`` for it."""
        self._stop.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the writers report a failing disk; the lock shows that we live
                self._lease.beat()
        self._lease.release()


def hold(dir_fd: int, name: str, record: LeaseRecord) -> Lease:
    """Create the lease ``name`` in the directory ``dir_fd``, locked. ``dir_fd`` stays the caller's, who may close it.

    Raises `StorageError` where the file can't be made. A file system without locks gives a lease that only beats.
    """
    fresh = f".{name}.new"
    fd = -1
    try:
        fd = os.open(
            fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o666, dir_fd=dir_fd
        )
        os.pwrite(fd, encode_record(record), 0)
        _lock(fd)
        own_dir_fd = os.dup(dir_fd)  # the caller may close and reuse its number before a late heartbeat
        try:
            os.rename(fresh, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError:
            os.close(own_dir_fd)
            raise
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        path = _path(dir_fd, name)
        raise StorageError(f"can't make the lease {path}: {error.strerror}", path=path, errno=error.errno) from error
    return Lease(own_dir_fd, name, fd, record)


def observe(directory: int | str, name: str) -> LeaseState | None:
    """Look at the lease ``name`` in ``directory`` (a descriptor or a path) now; None where there is none.

    Raises `StorageError` for anything else than absence that keeps it from being read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = (
            os.open(name, flags, dir_fd=directory)
            if isinstance(directory, int)
            else os.open(os.path.join(directory, name), flags)
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        path = _path(directory, name)
        raise StorageError(f"can't open the lease {path}: {error.strerror}", path=path, errno=error.errno) from error
    try:
        data = os.pread(fd, RECORD_BYTES, 0)
        mtime_ns = os.fstat(fd).st_mtime_ns
        record = decode_record(data)
        return LeaseState(record=record, mtime_ns=mtime_ns, flock_free=_flock_free(fd, record))
    except OSError as error:
        path = _path(directory, name)
        raise StorageError(f"can't read the lease {path}: {error.strerror}", path=path, errno=error.errno) from error
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Lock, waiting out an observer's short test of the lock; a file system without locks is fine."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            raise
        else:
            return
    raise OSError(errno.EWOULDBLOCK, "another process keeps it locked")


def _path(directory: int | str, name: str) -> str:
    """For messages."""
    if isinstance(directory, str):
        return os.path.join(directory, name)
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)
    except OSError:
        return name


def _flock_free(fd: int, record: LeaseRecord | None) -> bool | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    # Seen free from another host may only mean that this file system keeps locks to one host.
    here = boot_id()
    return True if here and record is not None and record.boot_id == here else None


# Readers' leases: a checkpoint that is being read is not deleted.

_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextlib.contextmanager
def being_read(directory: str | OpenedDirectory) -> Iterator[None]:
    """Keep the checkpoint in ``directory`` from being deleted by retention while the block runs.

    Raises `CheckpointNotFound` if that has happened just now, `CheckpointReplaced` if another was put in its place. A
    directory without a manifest, which retention never touches, needs no lease.
    """
    opened = None if isinstance(directory, str) else directory
    path = os.path.join(directory, MANIFEST_NAME)
    try:
        if opened is None:
            fd = os.open(path, os.O_RDONLY | _FLAGS)
        else:
            fd = os.open(MANIFEST_NAME, os.O_RDONLY | _FLAGS, dir_fd=opened.fd)
    except OSError:
        yield  # reading it reports the cause
        return
    try:
        locked = try_lock(fd, fcntl.LOCK_SH)
        # A deleter holds its lock until the directory has another name.
        if locked is False or not _is_at(fd, path):
            where = os.fspath(directory)
            if opened is not None and opened.is_replaced():
                raise CheckpointReplaced(f"{where} was replaced by another save: load it again", path=where)
            raise CheckpointNotFound(
                f"{where} is being deleted by its run's retention; load a newer step, or pin this one first", path=where
            )
        yield
    finally:
        _let_go(fd)


@contextlib.contextmanager
def to_be_deleted(directory: str, *, opened: bool = False) -> Iterator[bool]:
    """Yield True if no process reads ``directory``, and keep new readers out while the block removes or renames it.

    opened: also yield False while a process has it open (`OpenedDirectory`), reading or not.
    """
    held: list[int] = []
    # NFS locks exclusively only what could be written.
    ways = [(os.path.join(directory, MANIFEST_NAME), mode) for mode in (os.O_RDWR, os.O_RDONLY)]
    if opened:
        ways.append((directory, os.O_RDONLY | os.O_DIRECTORY))
    try:
        for path, mode in ways:
            if mode == os.O_RDONLY and held:
                continue  # already opened for writing
            with contextlib.suppress(OSError):
                held.append(os.open(path, mode | _FLAGS))
        yield all(try_lock(fd, fcntl.LOCK_EX) is not False for fd in held)
    finally:
        for fd in held:
            _let_go(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _let_go(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
    os.close(fd)


prepare_decoding(LeaseRecord)
