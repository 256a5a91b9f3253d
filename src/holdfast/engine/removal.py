"""Removes a directory with everything below it, without leaving it through a link. Torch-free.

Guarantees: works on descriptors, so a directory replaced by a link meanwhile is not followed; a missing entry is fine;
continues after an error and raises the first one. It removes trash: what is left is found and removed later.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Final

from holdfast.engine.syscalls import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_DEPTH: Final = 64


def remove_tree_at(dir_fd: int, name: str, *, stopped: Callable[[], bool] = lambda: False) -> None:
    """Remove the entry ``name`` of the directory ``dir_fd``, whatever it is.

    Returns when it is gone or ``stopped`` returns True. Raises `OSError`: the first that kept an entry from being
    removed.
    """
    check_name(name)
    errors: list[OSError] = []
    _remove(dir_fd, name, stopped, errors, 0)
    if errors:
        raise errors[0]


def remove_quickly(dir_fd: int, names: Sequence[str], *, timeout_s: float) -> None:
    """Remove as many of these entries as possible in ``timeout_s`` seconds; never raises."""
    deadline = time.monotonic() + timeout_s
    for name in names:
        with contextlib.suppress(OSError):
            remove_tree_at(dir_fd, name, stopped=lambda: time.monotonic() > deadline)


def _remove(dir_fd: int, name: str, stopped: Callable[[], bool], errors: list[OSError], depth: int) -> None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except OSError:  # a file, a link, or an unreadable directory: unlink settles the first two
        _try(lambda: os.unlink(name, dir_fd=dir_fd), errors)
        return
    try:
        with os.scandir(fd) as entries:
            names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_dir in names:
            if stopped():
                return
            if is_dir and depth < MAX_DEPTH:
                _remove(fd, child, stopped, errors, depth + 1)
            else:
                _try(lambda child=child: os.unlink(child, dir_fd=fd), errors)  # type: ignore[misc]
    except OSError as error:
        errors.append(error)
    finally:
        os.close(fd)
    _try(lambda: os.rmdir(name, dir_fd=dir_fd), errors)


def _try(act: Callable[[], None], errors: list[OSError]) -> None:
    try:
        act()
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)
