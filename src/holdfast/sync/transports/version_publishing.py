"""Publishing versions that are kept somewhere: what a directory and an object store have in common. One rank's half.

    all ranks   agree that this version may be -> save it -> agree on what became of it
    a subclass  knows where: takes hold of the place, looks what is there, saves

Guarantees: on every rank the same outcome; plan and warm file images are kept from one version to the next, and given
up with the session after a failure, since ranks may be at different points of it.
Assumes: the weights are not changed while `publish` runs.
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
from holdfast.config import CheckpointConfig
from holdfast.coordination import BoardLost
from holdfast.errors import CheckpointNotFound, ConfigError, DeadlineExceeded, HoldfastError
from holdfast.group import open_group
from holdfast.saver import Saver
from holdfast.state.entries import Collected, TensorEntry, check_tensor, joined, same_objects
from holdfast.sync.seam import Published

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from holdfast.capture import SaveRequest
    from holdfast.group import Group
    from holdfast.keeping import Keeper
    from holdfast.storage.local import LocalStorage
    from holdfast.sync.deadline import Deadline

_log = logging.getLogger("holdfast")

START_S: Final = 300.0
"""How long a publisher waits, when it is made, for its other ranks and for what an earlier one has left at work."""
VERDICT_GRACE_S: Final = 10.0
"""How much longer than its deadline a publish waits for the other ranks to say what became of it."""


class Weights:
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
class Session:
    """What saves of one agreement among the ranks run on; made anew after a failure."""

    group: Group
    votes: Votes
    saver: Saver
    weights: Weights

    def close(self, timeout_s: float | None) -> None:
        try:
            self.saver.close(timeout_s)
        finally:
            self.votes.leave()
            self.group.board.close()


class VersionPublishing:
    """One publisher rank; what implements `Publishing` derives from it, and calls `_begin` once it is set up.

    All ranks wait for one another there, at most ``START_S``.
    """

    def __init__(
        self, storage: LocalStorage, keeper: Keeper, name_template: str, prefix: str | None, process_group: Any | None
    ) -> None:
        self._saves_to = storage
        self._template = name_template
        self._prefix = prefix
        self._process_group = process_group
        self._keeper = keeper
        self._session: Session | None = None
        self._closed = False

    # What a subclass knows. --------------------------------------------------------------------------------------

    @property
    def versions(self) -> tuple[int, ...]:
        """Those published, ascending, as this rank sees them."""
        raise NotImplementedError

    def _take_hold(self, deadline: Deadline) -> list[str]:
        """On rank 0, before a session: make the place ready; returns trash for the saver to remove."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Nobody publishes there any more on behalf of this rank."""
        raise NotImplementedError

    def _check_free(self, version: int, name: str, deadline: Deadline) -> None:
        """On rank 0: `ConfigError` if ``version`` can't be published as ``name``."""
        raise NotImplementedError

    def _save(self, session: Session, version: int, name: str, deadline: Deadline) -> int:
        """Save what ``session.weights`` has; the bytes that this rank wrote. Whatever it raises, all ranks fail."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """The place is about to be looked at, outside `publish`."""

    def _after(self, request: SaveRequest) -> None:
        """What the saver has published, on its thread."""

    def _conclude(self, session: Session, error: BaseException | None, name: str, deadline: Deadline) -> None:
        """Return if all ranks have saved; else raise the same on every rank."""
        del name
        session.votes.settle(error, timeout_s=deadline.left_s() + VERDICT_GRACE_S)

    # What all have. ----------------------------------------------------------------------------------------------

    def publish(self, weights: Callable[[], Mapping[str, torch.Tensor]], version: int, deadline: Deadline) -> Published:
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
        tensors: Mapping[str, torch.Tensor] = {}
        try:
            tensors = weights()
            session.weights.take(tensors)
            if session.group.rank == 0:
                self._check_free(version, name, deadline)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        self._settle(session, error, name, deadline, empty=not tensors)
        nbytes = 0
        try:
            nbytes = self._save(session, version, name, deadline)
        except Exception as failed:  # noqa: BLE001 - raised by `_conclude`, after the other ranks have been told
            error = failed
        try:
            self._conclude(session, error, name, deadline)
        except BaseException:
            self._drop()
            raise
        seconds = time.monotonic() - began
        events.emit("version.published", step=version, rank=session.group.rank, path=self._saves_to.path(name))
        return Published(version, 0, 0, nbytes, seconds)

    def pin(self, version: int) -> None:
        """Keep ``version``; durable when this returns on rank 0, also for publishers to come."""
        self._set_pin(version, pinned=True)

    def unpin(self, version: int) -> None:
        """Leave ``version`` to retention again, after the next publish."""
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
        """End the session and let go of the place; idempotent. Versions stay."""
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close(None)
        finally:
            self._release(session)

    def _begin(self, deadline: Deadline) -> Session:
        """Open a session together with all ranks."""
        group = open_group(self._process_group, purpose="sync")
        votes = Votes(group.board)
        saver: Saver | None = None
        error: BaseException | None = None
        try:
            trash = self._take_hold(deadline) if group.rank == 0 else []
            saver = Saver(self._saves_to, group, CheckpointConfig(keep=None, in_flight=1), on_published=self._after)
            for name in trash:
                saver.remove(name)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        try:
            votes.settle(error, target=self._saves_to.path(self._template), timeout_s=at_least(deadline.left_s()))
        except BaseException:
            if saver is not None:
                saver.close(0.0)
            votes.leave()
            group.board.close()
            self._release(None)
            raise
        if saver is None:
            raise AssertionError("settled without an error and without a saver")
        self._session = Session(group, votes, saver, Weights(self._prefix, group))
        return self._session

    def _settle(
        self, session: Session, error: BaseException | None, name: str, deadline: Deadline, *, empty: bool
    ) -> None:
        """Raise unless all ranks would publish, and the same; after a refusal all is as it was."""
        target, timeout_s = self._saves_to.path(name), at_least(deadline.left_s())
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

    def _refuse_old(self, version: int, versions: Sequence[int]) -> None:
        newest = max(versions, default=None)
        if newest is not None and version <= newest:
            raise ConfigError(
                f"version {version} is not newer than {newest}, which is published under {self._saves_to.root}: "
                f"go on from {newest + 1}, or publish to another directory",
                field="version",
            )

    def _drop(self) -> None:
        """Give the session up: ranks may be at different points of it. The next publish opens another."""
        session, self._session = self._session, None
        if session is None:
            return
        with contextlib.suppress(HoldfastError):
            session.close(0.001)
        if not session.saver.has_ended:
            _log.warning("a save under %s doesn't end; the next publish begins beside it", self._saves_to.root)

    def _release(self, session: Session | None) -> None:
        if session is None or session.saver.has_ended:  # else some thread may still publish: nobody else may write here
            self._let_go()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Publisher is closed; make a new one")


def at_least(seconds: float) -> float:
    """Never quite zero: a wait of 0 s would not even look."""
    return max(0.001, seconds)
