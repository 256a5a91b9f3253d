"""Pinned steps of a root: files ``.holdfast/pins/{step}``, durable, honoured by retention. Torch-free."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from holdfast.errors import StorageError
from holdfast.storage.lock import DIRECTORY

if TYPE_CHECKING:
    from holdfast.storage.protocol import Storage

_PINS: Final = f"{DIRECTORY}/pins"


class Pins:
    """The pins of one root; written by rank 0 of the manager that holds the root's lock."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def all(self) -> frozenset[int]:
        """The pinned steps. Raises `StorageError`."""
        return frozenset(int(name) for name in self._storage.list_dir(_PINS) if name.isdecimal())

    def set(self, step: int, *, pinned: bool) -> None:
        """Pin or unpin ``step``; durable when this returns, and fine if it was so before. Raises `StorageError`."""
        name = f"{_PINS}/{step}"
        if not pinned:
            self._storage.unlink(name)
        else:
            for directory in (DIRECTORY, _PINS):
                if not self._storage.exists(directory):
                    self._storage.make_dir(directory)
            try:
                self._storage.write_file(name, b"")
            except StorageError as error:
                if error.errno != errno.EEXIST:
                    raise
        if self._storage.exists(_PINS):
            self._storage.sync_dir(_PINS)
