"""Opens a file of a checkpoint for reading, and nothing else that may lie under its name; reads it. Torch-free.

Guarantees: no link is followed below the directory, not in the middle of a name either, unless the caller asks for it;
opening never waits (a named pipe would, for a writer); what comes back is a plain file.
Assumes: names were checked to be relative and without ``..`` (``format.sealed``, ``format.dcp_reader``).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from holdfast.errors import CheckpointCorrupt

# A link in the place of a directory is ENOTDIR on Linux, in the place of a file ELOOP; a socket is ENXIO.
_NOT_PLAIN: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.EISDIR})
PLAIN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_plain(directory: str, name: str, flags: int = 0, *, links: bool = False) -> int:
    """A descriptor of the plain file ``name`` below ``directory``, which the caller closes; ``flags``: more of them.

    links: follow them, as in a directory that others made of links on purpose (the cache of ``huggingface_hub``).
    Raises `CheckpointCorrupt` where something else is there, `OSError` (`FileNotFoundError` too) as the system says.
    """
    path = os.path.join(directory, name)
    *parents, last = (path,) if links else name.split("/")
    held = -1
    try:
        for parent in parents:
            before, held = held, _enter(parent if held >= 0 else os.path.join(directory, parent), held)
            if before >= 0:
                os.close(before)
        flags |= PLAIN_FLAGS & ~os.O_NOFOLLOW if links else PLAIN_FLAGS
        fd = os.open(last, flags, dir_fd=held) if held >= 0 else os.open(path, flags)
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
    """``nbytes`` from ``offset``, fewer only at the end of the file. Raises `OSError`."""
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
