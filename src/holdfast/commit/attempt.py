"""One attempt at publishing a checkpoint, as each rank sees it: begin, report, settle. Torch-free.

A rank votes yes by a durable report; the board only carries messages. The outcome is one key, set once by
`compare_set`: COMMIT by the coordinator (rank 0) when every report is in and covers the plan, ABORT with its root cause
by any rank. The table of states and transitions is below; the messages between ranks are in ``commit.messages``.

Guarantees: no rank reports failure while another reports success, or while the next start could still roll the
attempt forward. Failure is announced once the attempt is durably in the trash, or once it is certain that one rank's
report will never exist; success once the final name is durable. An outcome that can't be learnt within the deadlines
is `OutcomeUnknown`. Every rank gets the same root cause.
Assumes: the root's lock is held, so that no other process publishes there; storage calls return (a rank's caller
bounds them). One thread per attempt, but `aborted` may be called from any. Clock, storage and board are passed in:
nothing here makes system calls of its own.
Does not: write tensors (the engine does), remove trash (``Attempt.trash`` lists it), or finish what a crash left
(``commit.recovery`` does).
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import xxhash

from holdfast.commit.messages import AttemptChannel, Begun, CommitVote, End, RankNote
from holdfast.commit.publish import (
    Publication,
    find_gap,
    finish_manifest,
    make_attempt,
    note_overwritten,
    outcome_unknown,
)
from holdfast.coordination.board import BoardLost
from holdfast.coordination.failure import AttemptAborted, AttemptInDoubt, AttemptPublished, Outcome, RankFailure
from holdfast.coordination.round import silent_ranks
from holdfast.errors import (
    CheckpointExists,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    OutcomeUnknown,
    SaveFailed,
    StorageError,
)
from holdfast.format.manifest import (
    PLAN_NAME,
    AttemptPlan,
    ManifestReport,
    report_name,
)
from holdfast.storage.entries import attempt_at, is_occupied, read_start, refuse_no_directory
from holdfast.storage.leases import COORDINATOR_LEASE, LEASE_WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.coordination.board import Board
    from holdfast.coordination.failure import Deed
    from holdfast.storage.protocol import HeldLease, Storage


# The states of an attempt, and which rank may make each transition:
#
#     BEGIN --> PERSISTING --> REPORTED --> COMMIT --> PUBLISHED
#       |            |             |           |
#       +------------+-------------+-----------+--> ABORT --> REMOVED
#
# COMMIT becomes ABORT only if the storage refuses the final rename: no rank reports success before the coordinator has
# announced the end.


class State(enum.Enum):
    BEGIN = "begin"
    PERSISTING = "persisting"
    REPORTED = "reported"
    COMMIT = "commit"
    PUBLISHED = "published"
    ABORT = "abort"
    REMOVED = "removed"


class Actor(enum.Enum):
    """The rank that makes a transition. A follower that makes one of the coordinator's only learns of it."""

    COORDINATOR = "coordinator"
    FOLLOWER = "follower"
    RECOVERY = "recovery"


_RANKS = frozenset({Actor.COORDINATOR, Actor.FOLLOWER})
_EVERYONE = _RANKS | {Actor.RECOVERY}


@dataclass(frozen=True, slots=True)
class Edge:
    source: State
    target: State
    actors: frozenset[Actor]
    deadline: str
    """The field of `Deadlines` that limits it, counted from the end of the previous stage."""


TRANSITIONS: Final = (
    Edge(State.BEGIN, State.PERSISTING, _EVERYONE, "begin_s"),
    Edge(State.BEGIN, State.ABORT, _RANKS, "begin_s"),
    Edge(State.PERSISTING, State.REPORTED, _EVERYONE, "persist_s"),
    Edge(State.PERSISTING, State.ABORT, _EVERYONE, "persist_s"),
    Edge(State.REPORTED, State.COMMIT, _EVERYONE, "commit_s"),
    Edge(State.REPORTED, State.ABORT, _EVERYONE, "commit_s"),
    Edge(State.COMMIT, State.PUBLISHED, _EVERYONE, "commit_s"),
    Edge(State.COMMIT, State.ABORT, frozenset({Actor.COORDINATOR, Actor.RECOVERY}), "commit_s"),
    Edge(State.ABORT, State.REMOVED, _EVERYONE, "commit_s"),
)
_EDGES: Final = {(edge.source, edge.target): edge for edge in TRANSITIONS}


class IllegalTransition(AssertionError):
    """A transition that the table doesn't allow: a bug in Holdfast or its caller."""


def advance(source: State, target: State, actor: Actor) -> State:
    """Return ``target`` if ``actor`` may make that transition; raise `IllegalTransition` otherwise."""
    edge = _EDGES.get((source, target))
    if edge is None or actor not in edge.actors:
        raise IllegalTransition(f"{actor.value} can't go from {source.name} to {target.name}")
    return target


__all__ = ["Attempt", "AttemptAborted", "AttemptInDoubt", "AttemptPublished", "Deadlines", "Outcome", "RankFailure"]

_log = logging.getLogger("holdfast.commit")
NONCE_BYTES: Final = 4096
"""Bytes of the plan file that every rank reads back: its start holds the attempt's id."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts of the stages of an attempt, in seconds and each more than 0.

    ``begin_s``: until the coordinator has begun. ``persist_s``: from there until every rank has reported.
    ``commit_s``: from there until the outcome is announced; a rank without an answer looks for as long again.
    """

    begin_s: float
    persist_s: float
    commit_s: float


class Attempt:
    """One rank's part in one attempt; made by `begin`, ended by `settle`.

    Attributes:
        id, name, step: of the attempt, its final name, the checkpoint.
        directory: the attempt directory, relative to the storage's root; the engine writes into it.
        persist_by: when every rank must have reported, on the attempt's clock; set by `begin`.
        state: this rank's state.
        same: `engine.messages.Reported.same` of this rank, once it has reported.
        trash: entries of the root that the coordinator's engine may remove once `settle` has returned.
    """

    def __init__(
        self, storage: Storage, board: Board, clock: Callable[[], float], key: str, deadlines: Deadlines, host: str
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._news = AttemptChannel(board, key)
        self._deadlines = deadlines
        self._seen_at = f"{host}:{storage.root}" if host else storage.root
        self._actor = Actor.COORDINATOR if board.rank == 0 else Actor.FOLLOWER
        self._plan: AttemptPlan | None = None
        self._publication: Publication | None = None
        """Set on the coordinator, once the plan is known."""
        self._lease: HeldLease | None = None
        self.persist_by = 0.0
        self.state = State.BEGIN
        self.id = ""
        self.name = ""
        self.step: int | None = None
        self.what: Deed = "save"
        self.directory = ""
        self.trash: tuple[str, ...] = ()
        self.same = b""

    @classmethod
    def begin(
        cls,
        *,
        storage: Storage,
        board: Board,
        clock: Callable[[], float],
        key: str,
        deadlines: Deadlines,
        plan: AttemptPlan | None = None,
        prewritten: Mapping[str, bytes] | None = None,
        refusal: RankFailure | None = None,
        step: int | None = None,
        what: Deed = "save",
        host: str = "",
        remove: Callable[[str], None] | None = None,
    ) -> Attempt:
        """Begin an attempt; every rank calls it with the same ``key``, new for each attempt on this board.

        Rank 0 passes ``plan`` and ``prewritten``, the files known beforehand (an export's may be one directory below),
        which are durable with the attempt directory when this returns there; or ``refusal``, the reason not to begin.
        Other ranks wait for that, at most ``deadlines.begin_s``, and verify that they see the same directory.
        ``clock`` is monotonic, in seconds; ``step``, ``what`` and ``host`` are for messages; ``remove`` is called with
        the trash of an attempt that could not begin.

        Raises what `RankFailure.error` gives, the same on every rank that could not begin: `CheckpointExists`,
        `ConfigError` (the root isn't shared), or `SaveFailed` with its cause.
        """
        attempt = cls(storage, board, clock, key, deadlines, host)
        attempt.step, attempt.what = step, what
        if attempt._actor is Actor.COORDINATOR:
            if refusal is not None:
                attempt._fail_begin(refusal)
            assert plan is not None
            try:
                attempt._begin(plan, prewritten or {})
            except BaseException:
                if remove is not None:
                    for name in attempt.trash:
                        remove(name)
                raise
        else:
            attempt._join()
        attempt.persist_by = clock() + deadlines.persist_s
        attempt._move(State.PERSISTING)
        return attempt

    def report(self, *reports: ManifestReport, note: RankNote | None = None) -> None:
        """Vote yes: ``reports`` are durable in the attempt directory; tell ``note`` with them. Doesn't wait.

        Usually one, this rank's own. Of a copy of what other ranks have saved, those that this rank has copied, which
        may be several or none. If the vote can't be posted it still counts; `settle` learns the outcome.
        """
        self._move(State.REPORTED)
        try:
            for report in reports:
                self._news.tell_report(report, note)
        except Exception as error:  # noqa: BLE001 - the report is durable: this rank can't take its vote back
            _log.warning("rank %d could not post its report: %s", self._news.rank, error)

    @property
    def notes(self) -> tuple[RankNote, ...]:
        """What the ranks told beside their reports, in rank order; on the coordinator, once they have."""
        return self._news.notes

    def add_extra(self, extra: Mapping[str, Any]) -> None:
        """Add members to ``extra`` of the manifest; on the coordinator, by ``before_publish``."""
        assert self._plan is not None
        manifest = self._plan.manifest
        manifest = msgspec.structs.replace(manifest, extra={**manifest.extra, **extra})
        self._plan = msgspec.structs.replace(self._plan, manifest=manifest)

    def aborted(self) -> RankFailure | None:
        """Return the root cause if the attempt has been given up, else None; any thread, doesn't wait."""
        try:
            return self._news.reason()
        except BoardLost:
            return None

    def settle(
        self,
        *,
        unreported: RankFailure | None = None,
        may_be_left: bool = True,
        before_publish: Callable[[], None] | None = None,
    ) -> Outcome:
        """Wait for the outcome and return it, the same on every rank; at most once per attempt.

        A rank that did not report passes its reason as ``unreported``, which is a vote to give the attempt up. The
        reason is marked ``unreported`` only if the engine has confirmed that it stopped, or is dead; if it may still
        have written a report (``may_be_left``), that is checked here. The coordinator decides and publishes here;
        ``before_publish`` is called when all reports are in, and an error it raises is a vote against. Returns within
        ``persist_s`` from `begin` and twice ``commit_s``, storage calls not counted.

        Raises `OutcomeUnknown` if the outcome can't be learnt; the next start settles it.
        """
        failure = self._checked(unreported) if unreported is not None and may_be_left else unreported
        if failure is not None:
            self._abort(failure)
        try:
            if self._actor is Actor.COORDINATOR:
                return self._decide(failure, before_publish)
            return self._follow(failure)
        except HoldfastError:
            raise
        except Exception as error:
            # Out of memory, or a bug: other ranks may still have learnt the outcome.
            raise self._unknown(f"rank {self._news.rank} broke off: {type(error).__name__}: {error}") from error
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._lease is not None:
            # Once published nobody asks for it, and publishing has removed it.
            self._lease.stop(wait_s=0.0 if self.state is State.PUBLISHED else LEASE_WAIT_S)
        self._news.leave()

    # the coordinator -------------------------------------------------------------------------------------------

    def _begin(self, plan: AttemptPlan, prewritten: Mapping[str, bytes]) -> None:
        storage = self._storage
        self.id, self.name, self.step = plan.attempt, plan.name, plan.step
        self._publication = Publication(storage, self.name, self.id, step=self.step)
        self.directory = self._publication.directory
        try:
            self._refuse_occupied(plan)
            self._plan = plan = note_overwritten(storage, plan)
            if not storage.has_locks:  # before anybody can find the attempt, and until it is settled
                self._lease = storage.hold_lease(self.directory, COORDINATOR_LEASE, rank=0)
            encoded = make_attempt(storage, plan, prewritten)
            note = Begun(self.id, self.name, self.step, self.directory, _nonce(encoded), self._seen_at)
            self._news.tell_begin(note)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one in any case
            self._fail_begin(RankFailure.of(error, rank=0, unreported=True))

    def _fail_begin(self, reason: RankFailure) -> NoReturn:
        """Abort an attempt to which no rank can have reported: its failure is certain even if trash remains."""
        self._move(State.ABORT)
        self._try_remove()
        try:
            self._news.tell_begin(reason)
        except Exception as error:  # noqa: BLE001 - the reason is what counts
            _log.warning("attempt %s: the other ranks could not be told that it did not begin: %s", self.id, error)
        self._move(State.REMOVED)
        self._leave()
        raise reason.error(step=self.step, what=self.what)

    def _refuse_occupied(self, plan: AttemptPlan) -> None:
        if plan.overwrite:
            refuse_no_directory(self._storage, plan.name)
        elif is_occupied(self._storage, plan.name):
            path = f"{self._storage.root}/{plan.name}"
            message = f"{path} exists already; choose another path or step, or pass overwrite=True to replace it"
            raise CheckpointExists(message, path=path)

    def _decide(self, failure: RankFailure | None, before_publish: Callable[[], None] | None) -> Outcome:
        reason = failure if failure is not None else self._wait_reports_and_commit(before_publish)
        if reason is None:
            self._move(State.COMMIT)
            try:
                reason = self._publish()
            except OutcomeUnknown as error:
                self._announce(AttemptInDoubt(str(error)))
                raise
        else:
            reason = self._abort(reason) or reason
            self._news.look_for_notes()
        if reason is None:
            self._move(State.PUBLISHED)
            outcome: Outcome = AttemptPublished(self.name, self.id)
            self._announce(outcome)
            return outcome
        self._move(State.ABORT)
        if not self._try_remove() and not reason.unreported:
            unknown = self._unknown(f"it was given up ({reason.message}) but could not be moved to the trash")
            self._announce(AttemptInDoubt(str(unknown)))
            raise unknown
        self._move(State.REMOVED)
        self._announce(AttemptAborted(reason))
        return AttemptAborted(reason)

    def _wait_reports_and_commit(self, before_publish: Callable[[], None] | None) -> RankFailure | None:
        """Wait and commit; None when COMMIT is the outcome, else the root cause of the abort to vote."""
        try:
            reports = self._wait_reports()
            if isinstance(reports, RankFailure):
                return reports
            if before_publish is not None:
                before_publish()
            self._prepare(reports)
            return self._news.vote(CommitVote())
        except Exception as error:  # noqa: BLE001 - a callback may raise anything, and any error is a vote against
            return RankFailure.of(error, rank=0)

    def _wait_reports(self) -> list[ManifestReport] | RankFailure:
        """Return all reports in rank order, or the reason of a rank that has given up."""
        assert self._plan is not None
        news, persist_s, count = self._news, self._deadlines.persist_s, self._plan.world
        left_s = max(0.0, self.persist_by - self._clock())
        try:
            return news.wait_reports(left_s, count)
        except DeadlineExceeded:
            missing = news.missing_reports(count)
            if not missing:
                return news.wait_reports(self._deadlines.commit_s, count)
            advice = "look for a slow disk or a hang there, or raise persist_timeout"
            error = silent_ranks(missing, news.world, persist_s, had_not="written their part", advice=advice)
            return RankFailure.of(error, rank=missing[0])

    def _prepare(self, reports: Sequence[ManifestReport]) -> None:
        """Give the attempt directory the contents that will be published."""
        plan, publication = self._plan, self._publication
        assert plan is not None
        assert publication is not None
        if self._storage.has_locks:  # else sealing looks
            self._refuse_occupied(plan)
        gap = find_gap(plan, reports)
        if gap:
            raise SaveFailed(gap, step=self.step, rank=None)
        publication.seal(finish_manifest(plan, reports), alone=not plan.overwrite)

    def _publish(self) -> RankFailure | None:
        """Publish; None on success, a reason when refused with nothing visible. Raises `OutcomeUnknown`."""
        assert self._plan is not None
        assert self._publication is not None
        error = self._publication.publish(overwrite=self._plan.overwrite)
        self.trash = self._publication.trash
        return None if error is None else RankFailure.of(error, rank=0)

    def _try_remove(self) -> bool:
        """Withdraw the attempt, if one was begun; return True if it certainly is never published."""
        if self._publication is None:
            return True
        certain = self._publication.withdraw()
        self.trash = self._publication.trash or self.trash
        return certain

    def _announce(self, note: End) -> None:
        try:
            self._news.tell_end(note)
        except Exception as error:  # noqa: BLE001 - the outcome stands, even if the others can't be told
            _log.warning("attempt %s: its end could not be announced: %s", self.id, error)

    # the other ranks -------------------------------------------------------------------------------------------

    def _join(self) -> None:
        try:
            note = self._news.wait_begin(self._deadlines.begin_s)
            if isinstance(note, Begun):
                self.id, self.name, self.step, self.directory = note.attempt, note.name, note.step, note.directory
                self._check_shared(note)
                return
            reason = note
            self._move(State.ABORT)
            self._move(State.REMOVED)
            self._leave()
        except Exception as error:  # noqa: BLE001 - told to the other ranks, who wait for this one
            # A rank that has not begun will never report, so its failure is certain. Its cause may be another rank:
            # an attempt that was given up at once is gone when this rank looks for it.
            self.persist_by = self._clock()
            failure = RankFailure.of(error, rank=self._news.rank, unreported=True)
            outcome = self.settle(unreported=failure, may_be_left=False)
            assert isinstance(outcome, AttemptAborted)
            reason = outcome.reason
        raise reason.error(step=self.step, what=self.what)

    def _check_shared(self, note: Begun) -> None:
        found = read_start(self._storage, f"{note.directory}/{PLAN_NAME}", NONCE_BYTES)
        if not found or _nonce(found) != note.nonce:
            message = (
                f"rank {self._news.rank} at {self._seen_at} doesn't see the directory {note.directory} that rank 0 "
                f"has just made at {note.seen_at}; checkpoints need a path on a file system that all ranks share"
            )
            raise ConfigError(message, field="path")

    def _follow(self, failure: RankFailure | None) -> Outcome:
        left_s = max(0.0, self.persist_by + self._deadlines.commit_s - self._clock())
        try:
            return self._learn(self._news.wait_end(left_s))
        except (DeadlineExceeded, BoardLost) as error:
            return self._resolve_doubt(error, failure)

    def _learn(self, note: End) -> Outcome:
        if isinstance(note, AttemptInDoubt):
            raise OutcomeUnknown(note.message, attempt=self.id, step=self.step)
        if isinstance(note, AttemptPublished):
            if self.state is State.PERSISTING:
                self._move(State.REPORTED)  # reported by an engine that died before it could answer
            self._move(State.COMMIT)
            self._move(State.PUBLISHED)
            return note
        if self.state is not State.ABORT:
            self._move(State.ABORT)
        self._move(State.REMOVED)
        return note

    def _resolve_doubt(self, silence: DeadlineExceeded | BoardLost, failure: RankFailure | None) -> Outcome:
        """Resolve the outcome without rank 0: keep it from committing, wait once more, then read the final name."""
        reason = failure or RankFailure.of(silence, rank=self._news.rank)
        try:
            standing = self._news.vote(reason)
            if standing is not None:
                reason = standing
            return self._learn(self._news.wait_end(self._deadlines.commit_s))
        except (DeadlineExceeded, BoardLost) as error:
            _log.warning("attempt %s: %s", self.id, error)
        if reason.unreported:
            return self._learn(AttemptAborted(reason))
        try:
            if self.name and attempt_at(self._storage, self.name) == self.id:
                self._storage.sync_dir("")
                return self._learn(AttemptPublished(self.name, self.id))
        except StorageError as error:
            _log.warning("attempt %s: the final name can't be read: %s", self.id, error)
        raise self._unknown(f"rank 0 is silent: {silence}") from silence

    # all ranks --------------------------------------------------------------------------------------------------

    def _move(self, target: State) -> None:
        self.state = advance(self.state, target, self._actor)

    def _abort(self, reason: RankFailure) -> RankFailure | None:
        """Vote to abort, which counts if it is first; return the outcome: a root cause, or None for COMMIT."""
        try:
            return self._news.vote(reason)
        except BoardLost:
            return reason

    def _checked(self, reason: RankFailure) -> RankFailure:
        """Return ``reason``, marked uncertain if a report exists after all: an engine may die after writing it.

        Also if a report may reappear: renamed to its name, made durable by another rank's fsync of the directory, then
        removed because this rank's own fsync failed. So its absence is made durable, too.
        """
        if not reason.unreported or not self.directory:
            return reason
        try:
            if not self._storage.exists(f"{self.directory}/{report_name(self._news.rank)}"):
                self._storage.sync_dir(self.directory)
                return reason
        except StorageError as error:
            _log.warning("attempt %s: can't be certain that there is no report: %s", self.id, error)
        return msgspec.structs.replace(reason, unreported=False)

    def _unknown(self, why: str) -> OutcomeUnknown:
        return outcome_unknown(self._storage, self.name, self.id, why, step=self.step)


def _nonce(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data[:NONCE_BYTES])
