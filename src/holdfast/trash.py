"""What one session has its engine remove: asked for again where that has died over it. Torch-free.

Guarantees: never raises, never waits; what could not be removed, for another reason, is for the next start.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from holdfast.errors import DeadlineExceeded, EngineDied, HoldfastError

if TYPE_CHECKING:
    from holdfast.engine.client import EngineClient
    from holdfast.storage.local import LocalStorage

_log = logging.getLogger("holdfast")


class Trash:
    """Trashed directories of the root of ``storage``, on their way out. Any thread may call anything."""

    def __init__(self, storage: LocalStorage, engine: EngineClient) -> None:
        self._storage = storage
        self._engine = engine
        self._asked: list[str] = []
        self._unasked: list[str] = []
        """For which there was no engine."""

    def remove(self, name: str) -> None:
        """Have the engine remove ``name``, a directory of the root."""
        try:
            fd = self._storage.open_dir("")
            try:
                self._engine.remove(fd, name)
            finally:
                os.close(fd)
            self._asked.append(name)
        except EngineDied as error:
            _log.warning("%s stays until the next save: %s", self._storage.path(name), error)
            self._unasked.append(name)
        except HoldfastError as error:
            _log.warning("%s stays until the next start: %s", self._storage.path(name), error)

    def remove_again(self) -> None:
        """Have a new engine remove what the one before has died over: a full disk may be waiting for the space."""
        asked, self._asked = self._asked, []
        unasked, self._unasked = self._unasked, []
        for name in asked:
            try:
                self._engine.wait_removed(name, 0.0)
            except EngineDied:
                unasked.append(name)
            except DeadlineExceeded:
                self._asked.append(name)  # under way
            except (HoldfastError, KeyError):
                pass  # said when it happened; or ended so long ago that it was forgotten
        while unasked and not self._unasked:  # where no engine can be had, one try is enough
            self.remove(unasked.pop())
        self._unasked += unasked
