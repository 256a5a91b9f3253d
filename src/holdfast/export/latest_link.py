"""``hf-latest``: a symbolic link beside exports, which names the newest of them. Torch-free.

    LatestLink(storage, keeper)
        settle       at a start, and after a failure: whoever was to see to the link may have died
        move_from    before an export is replaced
        point_to     after one was published

Guarantees: the link is replaced by one rename, durably, and names what is there: it points away from an export while
that one is replaced, if there is another. What is no link is never touched.
Assumes: one process at a time, which holds the root's lock.
Does not: know which export is the newest (``keeping`` does), or fail an export: what goes wrong here is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Final

from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from holdfast.keeping import Keeper
    from holdfast.storage.local import LocalStorage

LATEST_LINK: Final = "hf-latest"
_FRESH: Final = f".{LATEST_LINK}.new"

_log = logging.getLogger("holdfast")


class LatestLink:
    """The link in the root of ``storage``, whose exports ``keeper`` knows."""

    def __init__(self, storage: LocalStorage, keeper: Keeper) -> None:
        self._storage = storage
        self._keeper = keeper
        self._path = storage.path(LATEST_LINK)
        self._fresh = os.path.join(storage.root, _FRESH)

    def point_to(self, name: str) -> None:
        """Name the export ``name`` from now on; durable on return. Raises `ConfigError`, `StorageError`, `OSError`."""
        if os.path.lexists(self._path) and not os.path.islink(self._path):
            raise ConfigError(
                f"{self._path} is no link: move it away, or export with latest_link=False", field="latest_link"
            )
        self._clean()
        os.symlink(name, self._fresh)
        os.replace(self._fresh, self._path)
        self._storage.sync_dir("")

    def settle(self) -> None:
        """Name the newest export there is, and leave nothing else; raises nothing."""
        try:
            self._clean()
            newest = self._keeper.newest_name()
            if newest is not None and newest != self._target():
                self.point_to(newest)
        except (HoldfastError, OSError) as error:
            _log.warning("%s does not name the newest export: %s", self._path, error)

    def move_from(self, name: str) -> None:
        """Name another export than ``name``, which is about to be replaced, if there is another; raises nothing."""
        try:
            other = self._keeper.newest_name(besides=name) if self._target() == name else None
            if other is not None:
                self.point_to(other)
        except (HoldfastError, OSError) as error:
            _log.warning("%s names %s while that is replaced: %s", self._path, name, error)

    def _target(self) -> str | None:
        try:
            return os.readlink(self._path)
        except OSError:  # there is none, or it is none
            return None

    def _clean(self) -> None:
        """Remove what a process that died has left of a new link."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._fresh)
