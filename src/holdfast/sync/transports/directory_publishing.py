"""Publishing versions as directories: one saver for all of them, retention after each, pins that outlive the process.

    all ranks   agree that this version may be -> save it as an ordinary checkpoint -> agree on what became of it
    rank 0      holds the root's lock as long as the publisher lives; deletes what ``keep_versions`` no longer keeps

Guarantees: a version is visible when it is whole, on every rank the same outcome; what was published is never changed.
Retention leaves alone the newest, what is pinned, and what somebody is receiving. Plan, engine and warm file images
are kept from one version to the next.
Assumes: the weights are not changed while `publish` runs, which returns only when all is durable.
Does not: wait for receivers, or know of any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.capture import SaveRequest
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.keeping import Keeper
from holdfast.retention import Keep
from holdfast.root import is_occupied, published
from holdfast.starting import settle_root
from holdfast.storage.local import LocalStorage, create_root
from holdfast.storage.lock import RootLock
from holdfast.sync.deadline import Deadline
from holdfast.sync.transports.version_publishing import START_S, Session, VersionPublishing, at_least

if TYPE_CHECKING:
    from holdfast.sync.seam import PublisherOptions


class DirectoryPublishing(VersionPublishing):
    """One publisher rank of a directory of versions; see `Publishing`.

    On construction rank 0 locks ``root`` and settles what a crash has left; all ranks wait for that, at most
    ``START_S``. Raises, on every rank, `ConfigError`, `RootLocked` where another publisher or manager writes there,
    `StorageError`, `DeadlineExceeded`.
    """

    def __init__(
        self, root: str, name_template: str, prefix: str | None, process_group: Any | None, options: PublisherOptions
    ) -> None:
        self._storage = LocalStorage(root)
        keeper = Keeper(self._storage, name_template, Keep(last=options.keep_versions))
        super().__init__(self._storage, keeper, name_template, prefix, process_group)
        self._lock: RootLock | None = None
        self._begin(Deadline.after(START_S))

    @property
    def versions(self) -> tuple[int, ...]:
        """Those published below the root, ascending, as this rank's file system shows them."""
        return tuple(step for step, _ in published(self._storage, self._template))

    def _take_hold(self, deadline: Deadline) -> list[str]:
        if self._lock is not None:
            return []
        create_root(self._storage.root)
        self._lock = RootLock.acquire(self._storage.root)
        return settle_root(self._storage, timeout_s=at_least(deadline.left_s()))[1]

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _check_free(self, version: int, name: str, deadline: Deadline) -> None:
        del deadline  # what a file system takes to answer isn't bounded here
        self._refuse_old(version, self.versions)
        if is_occupied(self._storage, name):
            raise ConfigError(
                f"{self._storage.path(name)} is in the way of version {version}: it is no version; move it away",
                field="version",
            )

    def _save(self, session: Session, version: int, name: str, deadline: Deadline) -> int:
        """Save it and wait; the bytes that this rank wrote."""
        # Not resumable: these are weights, no run goes on from them.
        request = SaveRequest(version, name, {}, resumable=False, overwrite=False, eager=False)
        handle = session.saver.start(session.weights, request)
        try:
            handle.result(at_least(deadline.left_s()))
        except DeadlineExceeded:
            raise deadline.exceeded(
                f"publishing version {version} at {handle.path}",
                f"it was {handle.stage} and is given up: look at the storage and the other ranks, or allow more time",
            ) from None
        return handle.stats.bytes

    def _after(self, request: SaveRequest) -> None:
        """On the saver's thread, before the publish returns: nobody finds a version that is about to go."""
        session = self._session
        if session is not None and session.group.rank == 0:
            self._keeper.apply_retention(request.step, session.saver.remove)
