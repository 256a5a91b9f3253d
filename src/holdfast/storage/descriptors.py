"""Descriptors of the files of a published checkpoint: each opened once, and never too many at a time. Torch-free.

Guarantees: a file is opened only as a plain file of the size it was committed with; any other is `CheckpointCorrupt`.
A descriptor stays open while somebody uses it. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.errors import CheckpointCorrupt, StorageError
from holdfast.storage.plain import open_plain

if TYPE_CHECKING:
    from holdfast.format.parts import SparseSums

OPEN_FILES_MAX: Final = 128
"""A process may often have 1,024, and a checkpoint of a large world has more files."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A committed file: ``size`` in bytes; ``extents`` as in `ReportFile`, or None where nothing is known of it.

    ``gaps``: byte ranges, of whole extents or up to the end, of which nothing is known, the report that is about them
    being unreadable: they are in no checksum, and not to be read.
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
    """Descriptors of files in ``directory``, open until `close` or until others need their place.

    ``links``: as in `open_plain`.
    """

    def __init__(self, directory: str, *, links: bool = False) -> None:
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
        """A descriptor of ``file``, which stays open while it is in use, and beyond unless too many are."""
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


def refused(path: str, error: OSError) -> StorageError:
    """What the operating system refused, as ours."""
    return StorageError(
        f"{path} could not be read: {error.strerror}; check the path and its permissions", path=path, errno=error.errno
    )
