"""Publishing versions as directories: one saver for all of them, retention after each, pins that outlive the process.

    all ranks   agree that this version may be -> save it as an ordinary checkpoint -> agree on what became of it
    rank 0      holds the root's lock as long as the publisher lives; deletes what ``keep_versions`` no longer keeps

Guarantees: a version is visible when it is whole, on every rank the same outcome; what was published is never changed.
Retention leaves alone the newest, what is pinned, and what somebody is receiving. Plan, engine and warm file images
are kept from one version to the next.
Assumes: the weights are not changed while `publish` runs, which returns only when all is durable.
Does not: wait for receivers, or know of any. Kept in memory are the file images of one version, and references to the
tensors of the last one, until the next or `close`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast import events
from holdfast.agreement import Votes
from holdfast.capture import SaveRequest
from holdfast.config import CheckpointConfig
from holdfast.coordination import BoardLost
from holdfast.errors import CheckpointNotFound, ConfigError, DeadlineExceeded, HoldfastError
from holdfast.group import open_group
from holdfast.keeping import Keeper
from holdfast.retention import Keep
from holdfast.root import is_occupied, published
from holdfast.saver import Saver
from holdfast.starting import settle_root
from holdfast.state.entries import Collected, TensorEntry, check_tensor, joined, same_objects
from holdfast.storage.local import LocalStorage, create_root
from holdfast.storage.lock import RootLock
from holdfast.sync.deadline import Deadline
from holdfast.sync.seam import Published

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from holdfast.group import Group
    from holdfast.sync.seam import PublisherOptions

_log = logging.getLogger("holdfast")

START_S: Final = 300.0
"""How long a publisher waits, when it is made, for its other ranks and for what an earlier one has left at work."""
VERDICT_GRACE_S: Final = 10.0
"""How much longer than its deadline a publish waits for the other ranks to say what became of it."""


class _Weights:
    """The weights as a save collects them: by reference, since nobody changes them before it has ended."""

    def __init__(self, prefix: str | None, group: Group) -> None:
        self._above = () if prefix is None else (prefix,)
        self._group = group
        self._keys: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._collected = self._of((), number=0)

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """These are the weights now. Raises `ConfigError` for what can't be stored."""
        keys, tensors = list(weights), list(weights.values())
        if keys == self._keys and same_objects(tensors, self._tensors):
            return
        entries = []
        for key, tensor in weights.items():
            path = (*self._above, key)
            name = joined(path)
            check_tensor(name, tensor)
            entries.append(TensorEntry(name, path, tensor, lazy=True))
        self._collected = self._of(tuple(entries), number=self._collected.fingerprint + 1)
        self._keys, self._tensors = keys, tensors

    def _of(self, entries: tuple[TensorEntry, ...], *, number: int) -> Collected:
        return Collected(
            entries,
            objects=(),
            unchanged=False,
            fingerprint=number,
            group_ranks=self._group.ranks,
            rank=self._group.rank,
        )

    def collect(self, *, look_closer: bool = True) -> Collected:
        del look_closer  # whoever takes snapshots does, where nothing else has changed
        return self._collected

    def module_tensors(self) -> frozenset[str]:
        return frozenset()

    def update_targets(self, collected: Collected) -> frozenset[int]:
        return frozenset(id(entry.tensor) for entry in collected.tensors)


@dataclass(slots=True)
class _Session:
    """What saves of one agreement among the ranks run on; made anew after a failure."""

    group: Group
    votes: Votes
    saver: Saver
    weights: _Weights

    def close(self, timeout_s: float | None) -> None:
        try:
            self.saver.close(timeout_s)
        finally:
            self.votes.leave()
            self.group.board.close()


class DirectoryPublishing:
    """One publisher rank of a directory of versions; see `Publishing`.

    On construction rank 0 locks ``root`` and settles what a crash has left; all ranks wait for that, at most
    ``START_S``. Raises, on every rank, `ConfigError`, `RootLocked` where another publisher or manager writes there,
    `StorageError`, `DeadlineExceeded`.
    """

    def __init__(
        self, root: str, name_template: str, prefix: str | None, process_group: Any | None, options: PublisherOptions
    ) -> None:
        self._storage = LocalStorage(root)
        self._template = name_template
        self._keeper = Keeper(self._storage, name_template, Keep(last=options.keep_versions))
        self._prefix = prefix
        self._process_group = process_group
        self._lock: RootLock | None = None
        self._session: _Session | None = None
        self._closed = False
        self._begin(Deadline.after(START_S))

    def publish(self, weights: Mapping[str, torch.Tensor], version: int, deadline: Deadline) -> Published:
        """Save ``weights`` as ``version``; returns when it is published and durable.

        Raises `ConfigError` before anything is written if a version there is as new, or newer; `SaveFailed`,
        `StorageError`, `OutcomeUnknown`. After `DeadlineExceeded` it is given up, but may have been published just
        then: `versions` says.
        """
        began = time.monotonic()
        self._check_open()
        session = self._session or self._begin(deadline)
        name = self._template.format(step=version)
        error: BaseException | None = None
        try:
            session.weights.take(weights)
            if session.group.rank == 0:
                self._check_newest(version, name)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        self._settle(session, error, name, deadline, empty=not weights)
        nbytes = 0
        try:
            nbytes = self._save(session, version, name, deadline)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        try:
            session.votes.settle(error, timeout_s=deadline.left_s() + VERDICT_GRACE_S)
        except BaseException:
            self._drop()
            raise
        seconds = time.monotonic() - began
        events.emit("version.published", step=version, rank=session.group.rank, path=self._storage.path(name))
        return Published(version, 0, 0, nbytes, seconds)

    def pin(self, version: int) -> None:
        """Keep ``version``; durable when this returns on rank 0, also for publishers to come."""
        self._set_pin(version, pinned=True)

    def unpin(self, version: int) -> None:
        """Leave ``version`` to retention again, after the next publish."""
        self._set_pin(version, pinned=False)

    @property
    def versions(self) -> tuple[int, ...]:
        """Those published below the root, ascending, as this rank's file system shows them."""
        return tuple(step for step, _ in published(self._storage, self._template))

    def close(self) -> None:
        """Stop the engine and unlock the root; idempotent. Versions stay."""
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close(None)
        finally:
            self._release(session)

    # Inside. -----------------------------------------------------------------------------------------------------

    def _begin(self, deadline: Deadline) -> _Session:
        """Open a session together with all ranks."""
        group = open_group(self._process_group, purpose="sync")
        votes = Votes(group.board)
        saver: Saver | None = None
        error: BaseException | None = None
        try:
            if group.rank == 0 and self._lock is None:
                create_root(self._storage.root)
                self._lock = RootLock.acquire(self._storage.root)
                trash = settle_root(self._storage, timeout_s=_at_least(deadline.left_s()))[1]
            else:
                trash = []
            config = CheckpointConfig(keep=None, in_flight=1)
            saver = Saver(self._storage, group, config, on_published=self._retain)
            for name in trash:
                saver.remove(name)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        try:
            votes.settle(error, target=self._storage.path(self._template), timeout_s=_at_least(deadline.left_s()))
        except BaseException:
            if saver is not None:
                saver.close(0.0)
            votes.leave()
            group.board.close()
            self._release(None)
            raise
        if saver is None:
            raise AssertionError("settled without an error and without a saver")
        self._session = _Session(group, votes, saver, _Weights(self._prefix, group))
        return self._session

    def _settle(
        self, session: _Session, error: BaseException | None, name: str, deadline: Deadline, *, empty: bool
    ) -> None:
        """Raise unless all ranks would publish, and the same; after a refusal all is as it was."""
        target, timeout_s = self._storage.path(name), _at_least(deadline.left_s())
        try:
            # One rank may well have none of the weights; that all have none is what settling would tell.
            nothing = session.votes.settle(
                error, unexpected=("weights",) if empty else (), target=target, timeout_s=timeout_s
            )
        except (DeadlineExceeded, BoardLost):
            self._drop()
            raise
        if nothing:
            raise ConfigError("weights is empty: there is nothing to publish", field="weights")

    def _check_newest(self, version: int, name: str) -> None:
        newest = max(self.versions, default=None)
        if newest is not None and version <= newest:
            raise ConfigError(
                f"version {version} is not newer than {newest}, which is published under {self._storage.root}: "
                f"go on from {newest + 1}, or publish to another directory",
                field="version",
            )
        if is_occupied(self._storage, name):
            raise ConfigError(
                f"{self._storage.path(name)} is in the way of version {version}: it is no version; move it away",
                field="version",
            )

    def _save(self, session: _Session, version: int, name: str, deadline: Deadline) -> int:
        """Save it and wait; the bytes that this rank wrote."""
        # Not resumable: these are weights, no run goes on from them.
        request = SaveRequest(version, name, {}, resumable=False, overwrite=False, eager=False)
        handle = session.saver.start(session.weights, request)
        try:
            handle.result(_at_least(deadline.left_s()))
        except DeadlineExceeded:
            raise deadline.exceeded(
                f"publishing version {version} at {handle.path}",
                f"it was {handle.stage} and is given up: look at the storage and the other ranks, or allow more time",
            ) from None
        return handle.stats.bytes

    def _retain(self, request: SaveRequest) -> None:
        """On the saver's thread, before the publish returns: nobody finds a version that is about to go."""
        session = self._session
        if session is not None and session.group.rank == 0:
            self._keeper.apply_retention(request.step, session.saver.remove)

    def _set_pin(self, version: int, *, pinned: bool) -> None:
        self._check_open()
        if self._session is None or self._session.group.rank == 0:
            self._keeper.set_pin(version, pinned=pinned)
        elif pinned and version not in self.versions:
            raise CheckpointNotFound(
                f"version {version} is not published under {self._storage.root}", path=self._storage.root, step=version
            )

    def _drop(self) -> None:
        """Give the session up: ranks may be at different points of it. The next publish opens another."""
        session, self._session = self._session, None
        if session is None:
            return
        with contextlib.suppress(HoldfastError):
            session.close(0.001)
        if not session.saver.has_ended:
            _log.warning("a save under %s doesn't end; the next publish begins beside it", self._storage.root)

    def _release(self, session: _Session | None) -> None:
        if session is not None and not session.saver.has_ended:
            return  # some thread may still publish, so nobody else may write here
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Publisher is closed; make a new one")


def _at_least(seconds: float) -> float:
    """Never quite zero: a wait of 0 s would not even look."""
    return max(0.001, seconds)
