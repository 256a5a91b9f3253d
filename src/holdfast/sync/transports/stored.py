"""Versions in a directory, published: one rank's half, and the parts shared with object stores.

    all ranks   agree that this version may be published -> save it, or what has changed -> agree on the outcome
    a subclass  knows the place: locks it, lists it, saves to it
    rank 0      for a directory: holds the root's lock, and deletes versions beyond ``keep_versions``

Guarantees: every rank gets the same outcome. Plan and warm file images are kept between versions; after a failure they
are dropped with the session, since ranks may be at different points of it. Published versions are never changed;
retention keeps the newest version, pinned ones, those being received, and what any of these is a delta to. `meta` is
in the manifest.
Assumes: the weights are not changed while `publish` runs.
Does not: wait for receivers, or know of any; convert dtypes; limit the time of file system calls. Keeps in memory the
file images of one version, and references to the tensors of the last one, until the next or `close`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.catalog.catalog import Catalog
from holdfast.catalog.retention import Keep
from holdfast.catalog.root import published
from holdfast.config import CheckpointConfig
from holdfast.coordination.board import BoardLost
from holdfast.coordination.deadline import Deadline
from holdfast.errors import (
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
)
from holdfast.loader.sources.holdfast import HoldfastSource, open_holdfast
from holdfast.saver.checkpointer import SaveRequest
from holdfast.saver.session import Session
from holdfast.saver.startup import settle_root
from holdfast.state.entries import Collected, check_tensor, joined, same_objects
from holdfast.storage.entries import is_occupied
from holdfast.storage.local import open_storage
from holdfast.sync.lineage import tell_published
from holdfast.sync.protocol import Published
from holdfast.sync.transports.deltas import DeltaSeries, delta_tensors
from holdfast.sync.transports.stored_receiving import encoded_meta
from holdfast.sync.weights.pieces import entries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from holdfast.coordination.group import Group
    from holdfast.format.manifest import ChainMember
    from holdfast.state.entries import TensorEntry
    from holdfast.storage.protocol import Storage, StorageLock
    from holdfast.sync.protocol import PublisherOptions
    from holdfast.sync.weights.pieces import Weights as PublishedWeights


_log = logging.getLogger("holdfast")

START_S: Final = 300.0
"""How long a new publisher waits for its other ranks and for work in progress of an earlier one."""
VERDICT_GRACE_S: Final = 10.0
"""How much longer than its deadline a publish waits for the other ranks to report the outcome."""


class Weights:
    """The weights as a save collects them: by reference, since nobody changes them before it has ended."""

    def __init__(self, prefix: str | None, group: Group) -> None:
        self._above = () if prefix is None else (prefix,)
        self._group = group
        self._looks: list[tuple[Any, ...]] = []
        self._tensors: list[torch.Tensor] = []
        self._collected = self._of((), number=0)

    def take(self, weights: PublishedWeights, above: tuple[str, ...] | None = None) -> None:
        """Set what is saved. above: the keys before its names, if not the prefix. Raises `ConfigError`."""
        entries = entries_of(weights, self._above if above is None else above, lazy=True)
        looks = [(entry.name, entry.place, entry.stored_as) for entry in entries]
        tensors = [entry.tensor for entry in entries]
        if looks == self._looks and same_objects(tensors, self._tensors):
            return
        for entry in entries:
            check_tensor(joined(entry.path), entry.tensor)
        self._collected = self._of(entries, number=self._collected.fingerprint + 1)
        self._looks, self._tensors = looks, tensors

    def _of(self, entries: tuple[TensorEntry, ...], *, number: int) -> Collected:
        return Collected(
            entries,
            objects=(),
            unchanged=False,
            fingerprint=number,
            group_ranks=self._group.ranks,
            rank=self._group.rank,
        )

    def collect(self, *, look_closer: bool = True, asked: Any = None) -> Collected:
        del look_closer, asked  # done by the snapshot taker if nothing else has changed
        return self._collected

    def module_tensors(self) -> frozenset[str]:
        return frozenset()

    def update_targets(self, collected: Collected) -> frozenset[int]:
        return frozenset(id(entry.tensor) for entry in collected.tensors)


class _Delta(NamedTuple):
    """This rank's part of a delta version, and the bytes of all ranks'."""

    own: bytes
    nbytes: int


class SavingSession(Session):
    """The session that saves run in; a new one is opened after a failure."""

    weights: Weights


class VersionPublishing:
    """One publisher rank; implementations of `Publishing` derive from it, and call `_begin` once they are set up.

    There all ranks wait for one another, at most ``START_S``.
    """

    def __init__(
        self,
        storage: Storage,
        keeper: Catalog,
        name_template: str,
        prefix: str | None,
        process_group: Any | None,
        options: PublisherOptions,
    ) -> None:
        self._saves_to = storage
        self._template = name_template
        self._prefix = prefix
        self._process_group = process_group
        self._options = options
        self._series: DeltaSeries | None = None
        """Of the session; None without deltas."""
        self._keeper = keeper
        self._session: SavingSession | None = None
        self._closed = False

    # Defined by subclasses. --------------------------------------------------------------------------------------

    @property
    def versions(self) -> tuple[int, ...]:
        """Published versions, ascending, as this rank sees them."""
        raise NotImplementedError

    def _take_hold(self, deadline: Deadline) -> list[str]:
        """On rank 0, before a session: prepare the place; return trash for the saver to remove."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Release the place: this rank publishes no more."""
        raise NotImplementedError

    def _check_free(self, version: int, name: str, deadline: Deadline) -> None:
        """On rank 0: `ConfigError` if ``version`` can't be published as ``name``."""
        raise NotImplementedError

    def _save(
        self,
        session: SavingSession,
        version: int,
        name: str,
        deadline: Deadline,
        extra: dict[str, Any],
        chain: tuple[ChainMember, ...],
    ) -> int:
        """Save ``session.weights``; return the bytes that this rank wrote. Any error fails the save on all ranks.

        extra, chain: of the manifest, on rank 0.
        """
        raise NotImplementedError

    def _open_own(self, name: str) -> HoldfastSource:
        """Open what was just published as ``name``."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """Prepare for reading the place outside `publish`."""

    def _conclude(self, session: SavingSession, error: BaseException | None, name: str, deadline: Deadline) -> None:
        """Return if all ranks have saved; else raise the same on every rank."""
        del name
        session.votes.raise_together(error, timeout_s=deadline.left_s() + VERDICT_GRACE_S)

    # Common. -----------------------------------------------------------------------------------------------------

    def publish(
        self,
        weights: Callable[[], PublishedWeights],
        version: int,
        deadline: Deadline,
        meta: Mapping[str, Any],
    ) -> Published:
        """Save ``weights`` as ``version``; returns when it is published and durable.

        Raises `ConfigError`, before anything is written, if an equal or newer version exists; `SaveFailed`,
        `StorageError`, `OutcomeUnknown`. After `DeadlineExceeded` the version is given up, but may just have been
        published: see `versions`.
        """
        began = time.monotonic()
        self._check_open()
        session = self._session or self._begin(deadline)
        name = self._template.format(step=version)
        error: BaseException | None = None
        tensors: PublishedWeights = {}
        try:
            tensors = weights()
            session.weights.take(tensors)
            if session.group.rank == 0:
                self._check_free(version, name, deadline)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, once the other ranks know
            error = failed
        self._settle(session, error, name, deadline, empty=not tensors)
        try:
            delta = self._delta_for(tensors, deadline)
        except BaseException:
            self._drop()
            raise
        nbytes = 0
        chain: tuple[ChainMember, ...] = ()
        try:
            if delta is not None and self._series is not None:
                chain = self._series.chain
                session.weights.take(delta_tensors(delta.own, session.group.rank), above=())
            nbytes = self._save(session, version, name, deadline, encoded_meta(meta), chain)
        except Exception as failed:  # noqa: BLE001 - raised by `_conclude`, once the other ranks know
            error = failed
        try:
            self._conclude(session, error, name, deadline)
        except BaseException:
            self._drop()
            raise
        self._note(name, tensors, delta)
        seconds = time.monotonic() - began
        path = self._saves_to.path(name)
        tell_published(version, meta, rank=session.group.rank, seconds=seconds, path=path)
        return Published(version, 0, 0, nbytes, seconds)

    def _delta_for(self, tensors: PublishedWeights, deadline: Deadline) -> _Delta | None:
        """Return this rank's part if all ranks publish a delta."""
        series = self._series
        if series is None:
            return None
        own: bytes | None = None
        try:
            own = series.encode(tensors)
        except (HoldfastError, MemoryError) as error:  # the other ranks wait for this one's share
            _log.warning("%s: this version will be whole: %s", self._saves_to.root, error)
        agreed = series.agree(own, timeout_s=at_least(deadline.left_s()))
        return _Delta(own, agreed.nbytes) if agreed.delta and own is not None else None

    def _note(self, name: str, tensors: PublishedWeights, delta: _Delta | None) -> None:
        """Remember what was published, for the next delta."""
        series = self._series
        if series is None:
            return
        try:
            source = self._open_own(name)
            if delta is None:
                series.begin(source, tensors)
            else:
                series.advance(source, tensors, delta.nbytes)
        except HoldfastError as error:
            _log.warning("%s: the next version will be whole: %s", self._saves_to.path(name), error)
            series.forget()

    def pin(self, version: int) -> None:
        """Keep ``version``, also for later publishers; durable when this returns on rank 0."""
        self._set_pin(version, pinned=True)

    def unpin(self, version: int) -> None:
        """Let retention delete ``version`` again, after the next publish."""
        self._set_pin(version, pinned=False)

    def _set_pin(self, version: int, *, pinned: bool) -> None:
        self._check_open()
        self._look_again()
        root = self._saves_to.root
        if self._session is None or self._session.group.rank == 0:
            self._keeper.set_pin(version, pinned=pinned)
        elif pinned and version not in self.versions:
            raise CheckpointNotFound(f"version {version} is not published under {root}", path=root, step=version)

    def close(self) -> None:
        """End the session and release the place; idempotent. Versions remain."""
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close(None)
        finally:
            self._release(session)

    def _begin(self, deadline: Deadline) -> SavingSession:
        """Open a session together with all ranks."""
        patience_s = at_least(deadline.left_s())
        session = SavingSession(self._process_group, purpose="sync", patience_s=patience_s)
        session.deadline, session.target = deadline, self._saves_to.path(self._template)
        try:
            with session.settling():
                trash = self._take_hold(deadline) if session.group.rank == 0 else []
                config = CheckpointConfig(keep=None, in_flight=1)
                saver = session.start_saver(self._saves_to, config, overlaps=False)
                for name in trash:
                    saver.remove(name)
        except BaseException:
            try:
                session.close(0.0)
            finally:
                self._release(session)
            raise
        session.weights = Weights(self._prefix, session.group)
        self._session = session
        if self._options.delta is not None:
            self._series = DeltaSeries(self._options, self._prefix, session.group)
            session.hold(self._series.leave)
        return session

    def _settle(
        self, session: SavingSession, error: BaseException | None, name: str, deadline: Deadline, *, empty: bool
    ) -> None:
        """Raise unless all ranks can publish, and the same version; after a refusal nothing has changed."""
        target, timeout_s = self._saves_to.path(name), at_least(deadline.left_s())
        try:
            # One rank may have none of the weights; detect here that all have none.
            nothing = session.votes.raise_together(
                error, unexpected=("weights",) if empty else (), target=target, timeout_s=timeout_s
            )
        except (DeadlineExceeded, BoardLost):
            self._drop()
            raise
        if nothing:
            raise ConfigError("weights is empty: there is nothing to publish", field="weights")

    def _refuse_old(self, version: int, versions: Sequence[int]) -> None:
        newest = max(versions, default=None)
        if newest is not None and version <= newest:
            raise ConfigError(
                f"version {version} is not newer than {newest}, which is published under {self._saves_to.root}: "
                f"go on from {newest + 1}, or publish to another directory",
                field="version",
            )

    def _drop(self) -> None:
        """Abandon the session: ranks may be at different points of it. The next publish opens another."""
        session, self._session = self._session, None
        if session is None:
            return
        with contextlib.suppress(HoldfastError):
            session.close(0.001)
        if not session.has_ended:
            _log.warning("a save under %s doesn't end; the next publish begins beside it", self._saves_to.root)

    def _release(self, session: SavingSession | None) -> None:
        if session is None or session.has_ended:  # otherwise a thread may still publish: nobody else may write here
            self._let_go()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Publisher is closed; make a new one")


def at_least(seconds: float) -> float:
    """Return ``seconds``, but at least 1 ms: a wait of 0 s would not even check."""
    return max(0.001, seconds)


class DirectoryPublishing(VersionPublishing):
    """One publisher rank of a directory of versions; see `Publishing`.

    On construction rank 0 locks ``root`` and recovers what a crash left, while all ranks wait, at most ``START_S``.
    Raises, on every rank, `ConfigError`, `RootLocked` if another publisher or manager writes there, `StorageError`,
    `DeadlineExceeded`.
    """

    def __init__(
        self, root: str, name_template: str, prefix: str | None, process_group: Any | None, options: PublisherOptions
    ) -> None:
        self._storage = open_storage(root)
        keeper = Catalog(self._storage, name_template, Keep(last=options.keep_versions), alike=True)
        super().__init__(self._storage, keeper, name_template, prefix, process_group, options)
        self._lock: StorageLock | None = None
        self._begin(Deadline.after(START_S))

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions published below the root, ascending, as this rank's file system shows them."""
        return tuple(step for step, _ in published(self._storage, self._template))

    def _take_hold(self, deadline: Deadline) -> list[str]:
        if self._lock is not None:
            return []
        self._storage.make_root()
        self._lock = self._storage.lock()
        return settle_root(self._storage, timeout_s=at_least(deadline.left_s()))[1]

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _check_free(self, version: int, name: str, deadline: Deadline) -> None:
        del deadline  # file system calls have no time limit here
        self._refuse_old(version, self.versions)
        if is_occupied(self._storage, name):
            raise ConfigError(
                f"{self._storage.path(name)} blocks version {version}, but is not a version itself; move it away",
                field="version",
            )

    def _save(
        self,
        session: SavingSession,
        version: int,
        name: str,
        deadline: Deadline,
        extra: dict[str, Any],
        chain: tuple[ChainMember, ...],
    ) -> int:
        """Save and wait; return the bytes that this rank wrote."""
        # Not resumable: these are only weights.
        request = SaveRequest(
            version, name, {}, resumable=False, overwrite=False, extra=extra, chain=chain, kind_of="version"
        )
        checkpoint = session.saver.checkpoint(request, published=self._after)
        session.saver.start(session.weights, [checkpoint], step=version)
        handle = checkpoint.handle
        try:
            handle.result(at_least(deadline.left_s()))
        except DeadlineExceeded:
            raise deadline.exceeded(
                f"publishing version {version} at {handle.path}",
                f"it was {handle.stage} and is given up: look at the storage and the other ranks, or allow more time",
            ) from None
        return handle.stats.bytes

    def _open_own(self, name: str) -> HoldfastSource:
        return open_holdfast(self._storage.path(name))

    def _after(self, request: SaveRequest) -> None:
        """Apply retention before the publish returns: nobody then finds a version that is about to be deleted."""
        session = self._session
        if session is not None and session.group.rank == 0:
            self._keeper.apply_retention(request.step, session.saver.remove)
