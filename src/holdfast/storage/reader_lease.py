"""Readers' leases: what is being loaded is not deleted meanwhile. Torch-free.

    with being_read(directory) as lease:    a reader: a shared `flock` of the manifest, which is only opened for reading
    with to_be_deleted(directory) as free:  who deletes: an exclusive one; ``free`` is False while anybody reads

Guarantees: nothing is written, so a reader needs no right to; the kernel drops a lease with its process, however it
ends. Neither side waits for the other.
Assumes: `flock` reaches other hosts only where the file system carries it (NFSv4, Lustre with ``-o flock``). Where
there are no locks, reading and deleting go on without.
Does not: guard against anybody who deletes without asking.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

from holdfast.errors import CheckpointNotFound
from holdfast.format.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextlib.contextmanager
def being_read(directory: str) -> Iterator[None]:
    """Keep the checkpoint in ``directory`` from being deleted by retention while the block runs.

    Raises `CheckpointNotFound` if that has happened just now. A directory without a manifest, which retention never
    touches, needs no lease.
    """
    path = os.path.join(directory, MANIFEST_NAME)
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        yield  # what keeps it from being opened, reading it will tell
        return
    try:
        locked = _try_lock(fd, fcntl.LOCK_SH)
        # Who deletes holds its lock until the directory has another name.
        if locked is False or not _is_at(fd, path):
            raise CheckpointNotFound(
                f"{directory} is being deleted by its run's retention; load a newer step, or pin this one first",
                path=directory,
            )
        yield
    finally:
        _let_go(fd)


@contextlib.contextmanager
def to_be_deleted(directory: str) -> Iterator[bool]:
    """Whether nobody reads ``directory``; then nobody begins to while the block runs, in which it has to vanish."""
    fd = -1
    for mode in (os.O_RDWR, os.O_RDONLY):  # NFS locks exclusively only what could be written
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(directory, MANIFEST_NAME), mode | _FLAGS)
            break
    if fd < 0:
        yield True
        return
    try:
        yield _try_lock(fd, fcntl.LOCK_EX) is not False
    finally:
        _let_go(fd)


def _try_lock(fd: int, kind: int) -> bool | None:
    """Whether it is locked now; None where there are no locks to be had."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN) else None
    return True


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _let_go(fd: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile
    os.close(fd)
