"""Look at the files of an export that is to be verified: of a directory, or of a prefix of an object store. Torch-free.

Guarantees: bytes may be hostile: no link is followed, nothing outside is opened, opening never waits. What no export
holds is told, not read. Objects of attempts that were never published, or were replaced, are left out, and so is what
is hidden.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from holdfast.errors import HoldfastError
from holdfast.format.manifest import MANIFEST_HEAD_BYTES, MANIFEST_NAME, attempt_in
from holdfast.storage.entries import attempt_of
from holdfast.storage.files import open_plain, read_at, refused
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.validation import is_store

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRIES_MAX: Final = 65_536
DEPTH_MAX: Final = 8
REQUESTS_AT_A_TIME: Final = 16

_TOO_MANY: Final = f"more than {ENTRIES_MAX:,} entries: this is no export; not all were looked at"
_TOO_DEEP: Final = f"directories in directories, {DEPTH_MAX} deep: not looked into"


class FoundEntries(NamedTuple):
    """What is below an export's directory."""

    names: list[str]
    """Plain files, with slashes, sorted."""
    odd: list[str]
    """What no export holds."""
    told: list[tuple[str, str]]
    """What is wrong with some entry: its name, and a message."""
    refused: list[HoldfastError]


class ExportFiles(Protocol):
    """The files of one export. Thread-safe."""

    @property
    def reads_at_a_time(self) -> int:
        """How many small reads at a time are faster than one after the other."""
        ...

    @property
    def directory(self) -> str:
        """Its path or URL."""
        ...

    def entries(self) -> FoundEntries:
        """List them; raises nothing."""
        ...

    def read(self, name: str, nbytes: int, start: int = 0) -> tuple[bytes, int]:
        """Read up to ``nbytes`` of a file, and its size. Raises `CheckpointCorrupt`, `StorageError`."""
        ...


def files_at(place: str) -> ExportFiles:
    """Return the files at ``place``, the path of a directory or the URL of a prefix."""
    storage = open_storage(place) if is_store(place) else None
    return ExportPrefix(storage) if isinstance(storage, ObjectStorage) else ExportDirectory(place)


class ExportDirectory:
    """`ExportFiles` of a directory."""

    reads_at_a_time: Final[int] = 1

    def __init__(self, directory: str) -> None:
        self.directory: Final = directory

    def entries(self) -> FoundEntries:
        found = FoundEntries([], [], [], [])
        seen = 0
        below = [""]
        while below:
            place = below.pop()
            path = os.path.join(self.directory, place) if place else self.directory
            try:
                with os.scandir(path) as entries:
                    here = list(islice(entries, ENTRIES_MAX + 1 - seen))
            except OSError as error:
                found.refused.append(refused(path, error))
                continue
            seen += len(here)
            if seen > ENTRIES_MAX:
                found.told.append((place, _TOO_MANY))
                break
            for entry in here:
                name = f"{place}/{entry.name}" if place else entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if name.count("/") + 1 < DEPTH_MAX:
                        below.append(name)
                    else:
                        found.told.append((name, _TOO_DEEP))
                elif entry.is_file(follow_symlinks=False):
                    found.names.append(name)
                else:
                    what = "a link" if entry.is_symlink() else "no plain file"
                    found.told.append((name, f"this is {what}; an export holds plain files"))
                    found.odd.append(name)
        found.names.sort()
        return found

    def read(self, name: str, nbytes: int, start: int = 0) -> tuple[bytes, int]:
        path = os.path.join(self.directory, name)
        try:
            fd = open_plain(self.directory, name)
            try:
                size = os.fstat(fd).st_size
                return read_at(fd, start, min(nbytes, size - start)), size
            finally:
                os.close(fd)
        except OSError as error:
            raise refused(path, error) from error


class ExportPrefix:
    """`ExportFiles` of an object store: those of the published attempt, and those that have plain names."""

    reads_at_a_time: Final[int] = REQUESTS_AT_A_TIME

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self._sizes: dict[str, int] = {}

    @property
    def directory(self) -> str:
        return self._storage.root

    def entries(self) -> FoundEntries:
        found = FoundEntries([], [], [], [])
        try:
            head = b""
            if self._storage.size(MANIFEST_NAME) is not None:
                head = self._storage.read_range(MANIFEST_NAME, 0, MANIFEST_HEAD_BYTES)
            rows = self._storage.list_tree("")
        except HoldfastError as error:
            found.refused.append(error)
            return found
        if len(rows) > ENTRIES_MAX:
            found.told.append(("", _TOO_MANY))
            del rows[ENTRIES_MAX:]
        for row in rows:
            others = attempt_of(row.name) not in (None, attempt_in(head))
            if others or any(part.startswith(".") for part in row.name.split("/")):
                continue
            self._sizes[row.name] = row.size
            found.names.append(row.name)
        found.names.sort()
        return found

    def read(self, name: str, nbytes: int, start: int = 0) -> tuple[bytes, int]:
        size = self._sizes.get(name)
        if size is None:
            size = self._storage.size(name) or 0
        return self._storage.read_range(name, start, max(0, min(nbytes, size - start))), size


def has_entry(place: str, wanted: Callable[[str], bool]) -> bool:
    """Return True if there is a file directly in ``place`` whose name is ``wanted``.

    False for a directory that can't be listed; raises `StorageError` for what a store refuses.
    """
    if is_store(place):
        return any(map(wanted, open_storage(place).list_dir("")))
    try:
        with os.scandir(place) as entries:
            return any(wanted(entry.name) for entry in islice(entries, ENTRIES_MAX))
    except OSError:
        return False
