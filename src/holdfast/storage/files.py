"""Local files and directories: calls whose errors say what to do, and what stays open while it is read. Torch-free.

    open_plain, create_root, sync_path    open, make and sync by path, or below an open directory
    Descriptors                           opens each file of a checkpoint once
    PageCache                             tells which bytes are in memory without reading them
    OpenedDirectory                       reads one generation of a directory, whatever its path names by now

An `OpenedDirectory` can be used as its path, and `open_plain` opens files below its descriptor. It holds a shared
`flock` of the directory, which keeps a writer that replaced it from removing it (`storage.leases.to_be_deleted`);
retention, which locks the manifest, is not delayed.

Guarantees: a failed call raises `StorageError` with path, errno and advice, except `open_plain` and `read_at`, which
raise `OSError`. `open_plain` follows no link below the directory, in no component of a name, unless the caller asks
for it; it never blocks (opening a named pipe would); the descriptor returned is that of a plain file.
An opened directory was at its path when its lock was taken. Its descriptor is closed with the last reference; the lock
is released then, or when the same thread is about to overwrite the path (`let_go`). A committed file is opened only as
a plain file of its committed size; any other raises `CheckpointCorrupt`. Thread-safe.
Assumes: names were checked to be relative and without ``..`` (``format.sealed``, ``format.dcp_metadata``). On file
systems without locks, reading goes on without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import threading
import time
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointReplaced, ConfigError, StorageError
from holdfast.storage.entries import parse_hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.format.manifest import SparseSums

# A link in the place of a directory is ENOTDIR on Linux, in the place of a file ELOOP; a socket is ENXIO.
_NOT_PLAIN: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.EISDIR})
PLAIN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
OPEN_FILES_MAX: Final = 128
"""Processes are often limited to 1,024 open files; a checkpoint of many ranks has more."""


def open_plain(directory: str | OpenedDirectory, name: str, flags: int = 0, *, links: bool = False) -> int:
    """Open the plain file ``name`` below ``directory``; the caller closes the descriptor. ``flags``: more open flags.

    With an `OpenedDirectory` the file is opened below its descriptor, whatever its path names by now.

    links: follow links, as in a directory built of links on purpose (the cache of ``huggingface_hub``).
    Raises `CheckpointCorrupt` where something else is there, `OSError` (`FileNotFoundError` too) as the system says.
    """
    path = os.path.join(directory, name)
    *parents, last = (name,) if links else name.split("/")
    top: int = getattr(directory, "fd", -1)
    held = -1
    try:
        for parent in parents:
            at = held if held >= 0 else top
            before, held = held, _enter(parent if at >= 0 else os.path.join(directory, parent), at)
            if before >= 0:
                os.close(before)
        flags |= PLAIN_FLAGS & ~os.O_NOFOLLOW if links else PLAIN_FLAGS
        at = held if held >= 0 else top
        fd = os.open(last, flags, dir_fd=at) if at >= 0 else os.open(path, flags)
    except ValueError as error:  # a NUL in the middle
        raise CheckpointCorrupt(f"{path!r} can't be the name of a file", path=path) from error
    except OSError as error:
        if error.errno in _NOT_PLAIN:
            raise _not_plain(path) from error
        raise
    finally:
        if held >= 0:
            os.close(held)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise _not_plain(path)


def read_at(fd: int, offset: int, nbytes: int) -> bytes:
    """Read ``nbytes`` from ``offset``, fewer only at the end of the file. Raises `OSError`."""
    pieces: list[bytes] = []
    while nbytes > 0 and (piece := os.pread(fd, nbytes, offset)):
        pieces.append(piece)
        offset += len(piece)
        nbytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _enter(name: str, dir_fd: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=dir_fd) if dir_fd >= 0 else os.open(name, flags)


def _not_plain(path: str) -> CheckpointCorrupt:
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        mode = 0
    what = (
        "a symbolic link"
        if stat.S_ISLNK(mode)
        else "a directory"
        if stat.S_ISDIR(mode)
        else "no plain file, or lies behind a link"
    )
    return CheckpointCorrupt(f"{path} is {what}; checkpoints hold plain files", path=path)


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
DIR_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def refuse(error: OSError, doing: str, path: str) -> NoReturn:
    """Raise ``error``, met while ``doing`` something to ``path``, as `StorageError`."""
    code = error.errno
    name = errno.errorcode.get(code, str(code)) if code is not None else type(error).__name__
    advice = _ADVICE.get(code, "") if code is not None else ""
    message = f"can't {doing} {path}: {error.strerror or error} ({name})"
    raise StorageError(f"{message}; {advice}" if advice else message, path=path, errno=code) from error


def create_root(path: str | os.PathLike[str]) -> str:
    """Make the directory ``path`` and its missing ancestors durably; return its absolute path.

    The lowest existing ancestor is made durable too: its creator may have died before syncing it.

    Raises `ConfigError` if ``path`` or an ancestor is something else than a directory, `StorageError` for what the
    system refuses. Several ranks or processes may call it at once.
    """
    root = os.path.abspath(os.fspath(path))
    missing: list[str] = []
    current = root
    while not _is_dir(current):
        missing.append(current)
        current = os.path.dirname(current)
    # Each is durable before the next is made, so only the lowest one made by another process may not be.
    _sync_found(os.path.dirname(current))
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not _is_dir(directory):
                raise _not_a_directory(directory) from None
        except OSError as error:
            refuse(error, "make directory", directory)
        # A directory another rank has just made needs its entry durable for us as well.
        sync_path(os.path.dirname(directory))
    return root


def _sync_found(path: str) -> None:
    try:
        sync_path(path)
    except StorageError as error:
        if error.errno not in {errno.EACCES, errno.EPERM}:  # a directory that we can't open was not made by us
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
        refuse(error, "look at", path)
    if not stat.S_ISDIR(mode):
        raise _not_a_directory(path)
    return True


def _not_a_directory(path: str) -> ConfigError:
    return ConfigError(f"{path} is not a directory, or lies below a file; choose another path", field="path")


def sync_path(path: str) -> None:
    """Make the entries of the directory ``path`` durable."""
    try:
        fd = os.open(path, DIR_FLAGS)
    except OSError as error:
        refuse(error, "open directory", path)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for directories: entries are durable when made.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            refuse(error, "fsync directory", path)
    finally:
        os.close(fd)


def make_dir_at(path: str) -> None:
    """Create one directory, whose parent must exist, and make its entry durable."""
    try:
        os.mkdir(path)
    except OSError as error:
        refuse(error, "make directory", path)
    sync_path(os.path.dirname(path))


def open_dir_at(path: str, *, links: bool) -> int:
    """Open the directory ``path``, close-on-exec; the caller closes it. ``links``: ``path`` may be a link."""
    try:
        return os.open(path, DIR_FLAGS | (0 if links else os.O_NOFOLLOW))
    except OSError as error:
        refuse(error, "open directory", path)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A committed file: ``size`` in bytes; ``extents`` as in `ReportFile`, or None where they are unknown.

    ``gaps``: byte ranges (of whole extents, or up to the end) whose report is unreadable: they have no checksum and
    must not be read.
    """

    name: str
    size: int
    extents: bytes | SparseSums | None
    gaps: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Open:
    fd: int
    users: int = 0


class Descriptors:
    """Descriptors of files in ``directory``, open until `close` or until evicted by others.

    ``links``: as in `open_plain`.
    """

    def __init__(self, directory: str | OpenedDirectory, *, links: bool = False) -> None:
        self._directory = directory
        self._links = links
        self._open_files: dict[tuple[str, int], _Open] = {}
        """By name and flags, the least recently used first."""
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            opened, self._open_files = self._open_files, {}
        for entry in opened.values():
            os.close(entry.fd)

    @contextlib.contextmanager
    def opened(self, file: StoredFile, flags: int = 0) -> Iterator[int]:
        """Yield a descriptor of ``file``; it stays open while in use, and longer unless too many are open."""
        key = file.name, flags
        with self._lock:
            entry = self._open_files.pop(key, None) or _Open(self._open(file, flags))
            self._open_files[key] = entry
            entry.users += 1
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                if len(self._open_files) > OPEN_FILES_MAX:
                    idle = [known for known, of_known in self._open_files.items() if not of_known.users]
                    for known in idle[: len(self._open_files) - OPEN_FILES_MAX]:
                        os.close(self._open_files.pop(known).fd)

    def _open(self, file: StoredFile, flags: int) -> int:
        path = os.path.join(self._directory, file.name)
        try:
            fd = open_plain(self._directory, file.name, flags, links=self._links)
        except FileNotFoundError as error:
            raise CheckpointCorrupt(f"{path} is missing; it was committed with {file.size} bytes", path=path) from error
        except OSError as error:
            raise refused(path, error) from error
        status = os.fstat(fd)
        if status.st_size == file.size:
            return fd
        os.close(fd)
        raise CheckpointCorrupt(
            f"{path} has {status.st_size} bytes; it was committed as a file of {file.size}",
            path=path,
            byte_range=(min(status.st_size, file.size), max(status.st_size, file.size)),
        )


_NETWORK_SYSTEMS: Final = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs"),
    *("pvfs2", "smb3", "smbfs", "wekafs"),
}


def is_on_network(path: str) -> bool:
    """Return True if ``path`` is on a file system that is read over a network, as far as its type says."""
    found, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            real = os.path.realpath(path)
            for line in mounts:
                before, _, behind = line.partition(" - ")
                # Spaces and the like are octal escapes there.
                place = re.sub(r"\\(\d{3})", lambda escape: chr(int(escape[1], 8)), before.split(" ")[4])
                if len(place) >= len(found) and (real + "/").startswith(place.rstrip("/") + "/"):
                    found, kind = place, behind.split(" ")[0]
    except (OSError, ValueError, IndexError):
        return False
    return kind in _NETWORK_SYSTEMS or kind.startswith("fuse.")


def refused(path: str, error: OSError) -> StorageError:
    """Convert ``error`` of reading ``path`` to a `StorageError`."""
    return StorageError(
        f"{path} could not be read: {error.strerror}; check the path and its permissions", path=path, errno=error.errno
    )


# The page cache is queried by ``mincore``: a read with ``RWF_NOWAIT`` would start read-ahead, which on a fast disk
# changes the answer. The kernel answers only processes that own the file or may write it; for others all is cached.

_FAILED: Final = ctypes.c_void_p(-1).value
_ADDRESS = ctypes.c_void_p
_SIZE = ctypes.c_size_t


class PageCache:
    """The page cache of the file of descriptor ``fd`` with ``size`` bytes. Thread-safe; keeps no descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        self._address: int | None = None
        libc = _libc()
        if libc is None or size <= 0:
            return
        # Mapped for ``mincore`` only, never touched: no page is ever read.
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is not None and address != _FAILED:
            self._address = address
            weakref.finalize(self, libc.munmap, address, size).atexit = False

    def has(self, offset: int) -> bool:
        """Return True if the byte at ``offset`` is in memory, or if that is unknown."""
        if self._address is None:
            return True
        page = (ctypes.c_ubyte * 1)()
        at = offset // mmap.PAGESIZE * mmap.PAGESIZE
        failed = _libc().mincore(self._address + at, 1, page)
        return bool(failed) or bool(page[0] & 1)


@lru_cache(maxsize=1)
def _libc() -> Any:
    """Return the C library, or None if it lacks one of the three calls."""
    libc: Any = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("mmap", "munmap", "mincore")):
        return None
    # Declared because an address doesn't fit the C int that ctypes assumes.
    libc.mmap.argtypes = (_ADDRESS, _SIZE, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.restype = _ADDRESS
    libc.munmap.argtypes = (_ADDRESS, _SIZE)
    libc.mincore.argtypes = (_ADDRESS, _SIZE, ctypes.c_void_p)
    return libc


BETWEEN_RENAMES_S: Final = 1.0
"""How long a directory may be missing where the file system can't exchange two; what a crash left stays missing."""
TRIES: Final = 100
"""How often a directory may be replaced between being opened and being locked."""

_all: weakref.WeakSet[OpenedDirectory] = weakref.WeakSet()
_all_lock = threading.Lock()


class OpenedDirectory:
    """The directory that is at ``path`` now. Raises `CheckpointNotFound`, `OSError`. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        for _ in range(TRIES):
            fd = _open(path)
            # A remover holds an exclusive lock, or has renamed the directory.
            if try_lock(fd, fcntl.LOCK_SH) is not False and _is_at(fd, path):
                break
            os.close(fd)
        else:
            raise CheckpointNotFound(
                f"{path} was replaced repeatedly while it was being opened; try again later", path=path
            )
        self.fd: Final = fd
        self._thread = threading.get_ident()
        with _all_lock:
            _all.add(self)
        weakref.finalize(self, _close, fd, os.getpid()).atexit = False

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"OpenedDirectory({self.path!r})"

    def let_go(self) -> None:
        """Release the lock: a writer that replaces the directory may then remove it while this is still open."""
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def belongs_to(self, path: str, thread: int) -> bool:
        """Return True if ``thread`` opened this at ``path``."""
        return self.path == path and self._thread == thread

    def is_replaced(self) -> bool:
        """Return True if another directory is at its path now; waits for one that is about to be renamed to it."""
        return wait_inode_between_renames(self.path) not in (None, _inode(os.fstat(self.fd)))

    def is_gone(self) -> bool:
        """Return True if nothing is at its path any more."""
        return not os.path.lexists(self.path)


def inode_of(path: str) -> tuple[int, int] | None:
    """Return the device and the inode of what is at ``path``; None if nothing is."""
    try:
        return _inode(os.stat(path))
    except (OSError, ValueError):
        return None


def wait_inode_between_renames(path: str) -> tuple[int, int] | None:
    """Return `inode_of` the directory ``path``; waits up to `BETWEEN_RENAMES_S` if it is being overwritten.

    Where the file system can't exchange two directories, the old one is renamed aside before the new one is renamed in
    (``storage.local``), and nothing is at ``path`` between the two.
    """
    parent, name = os.path.split(os.path.realpath(path))
    deadline = time.monotonic() + BETWEEN_RENAMES_S
    while (found := inode_of(path)) is None and time.monotonic() < deadline:
        if not _is_aside(parent, name):
            return inode_of(path)
        time.sleep(0.002)
    return found


def _is_aside(parent: str, name: str) -> bool:
    try:
        hidden = map(parse_hidden, os.listdir(parent))
    except OSError:
        return False
    return any(entry is not None and (entry.name, entry.kind) == (name, "replaced") for entry in hidden)


def let_go(path: str) -> None:
    """Release the locks of directories that this thread opened at ``path``, which it is about to overwrite."""
    me = threading.get_ident()
    with _all_lock:
        mine = [opened for opened in _all if opened.belongs_to(path, me)]
    for opened in mine:
        opened.let_go()


def what_became(opened: OpenedDirectory) -> CheckpointNotFound | None:
    """Return the error for an ``opened`` directory that was replaced or deleted; None if it is at its path."""
    if opened.is_replaced():
        return CheckpointReplaced(
            f"{opened.path} was replaced by another save while it was read: open or load it again", path=opened.path
        )
    if opened.is_gone():
        return CheckpointNotFound(
            f"{opened.path} was deleted while it was read (by its run's retention?); load a newer step, or pin this "
            "one first",
            path=opened.path,
        )
    return None


def told_apart(became: Callable[[], CheckpointNotFound | None], error: BaseException) -> BaseException:
    """Return ``error`` of reading a checkpoint, or the error that ``became`` returns: that it was taken away."""
    if not isinstance(error, (CheckpointCorrupt, StorageError)):
        return error
    told = became()
    if told is None:
        return error
    told.__cause__ = error
    return told


def try_lock(fd: int, kind: int) -> bool | None:
    """Return True if it is locked now, False if another holds it, None without lock support. Doesn't wait."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN) else None
    return True


def _open(path: str) -> int:
    flags = os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDONLY | flags)
    except PermissionError:  # files below may still be readable by name
        return os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | flags)


def _is_at(fd: int, path: str) -> bool:
    return os.path.samestat(os.stat(path), os.fstat(fd))


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _close(fd: int, pid: int) -> None:
    with contextlib.suppress(OSError):  # a finalizer can't report it
        try:
            if os.getpid() == pid:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also in a child that was forked meanwhile
        finally:
            os.close(fd)
