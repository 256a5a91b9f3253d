"""One attempt at publishing a checkpoint, as each rank sees it: begin, report, settle. Torch-free.

The durable reports are the ranks' yes; the board only carries the news. The outcome is one key, set once by
`compare_set`: COMMIT by the coordinator (rank 0) when every report is in and covers the plan, ABORT with its root cause
by anyone. The states and who may take which edge are in ``transitions``, what the ranks tell each other in ``news``.

Guarantees: no rank is told of a failure while another is told of success, or while the next start could still roll
the attempt forward. Failure is announced once the attempt is in the trash, durably, or once it is certain that one
rank's report will never be there; success once the final name is durable. What can't be learnt within the deadlines
is `OutcomeUnknown`. Every rank gets the same root cause.
Assumes: the root's lock is held, so that nobody else publishes there; storage calls return (a rank's caller bounds
them). One thread an attempt, but `aborted` may be called from any. Time, storage and board are passed in:
nothing here asks the system for anything.
Does not: write tensors (the engine does), remove trash (``Attempt.trash`` says what may go), or finish what a crash
left (``recovery`` does).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec
import xxhash

from holdfast.coordination import BoardLost
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
    MANIFEST_NAME,
    PLAN_NAME,
    AttemptPlan,
    ManifestReport,
    encode_manifest,
    report_name,
)
from holdfast.news import Begun, CommitVote, End, News
from holdfast.outcome import Aborted, AbortReason, InDoubt, Outcome, Published
from holdfast.prewriting import make_attempt
from holdfast.publish import clear_scaffolding, find_gap, finish_manifest, note_overwritten, publish, withdraw
from holdfast.root import attempt_at, hidden_name, is_occupied
from holdfast.transitions import Actor, State, advance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.coordination import Board
    from holdfast.outcome import Deed
    from holdfast.storage.protocol import Storage

__all__ = ["AbortReason", "Aborted", "Attempt", "Deadlines", "InDoubt", "Outcome", "Published"]

_log = logging.getLogger("holdfast.commit")
NONCE_BYTES: Final = 4096
"""How much of the plan file every rank reads back: its start holds the attempt's id."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long, in seconds and each more than 0, the stages of an attempt may take.

    ``begin_s``: until the coordinator has begun. ``persist_s``: from there until every rank has reported.
    ``commit_s``: from there until the outcome is announced; a rank that hears nothing asks for as long again.
    """

    begin_s: float
    persist_s: float
    commit_s: float


class Attempt:
    """One rank's view of one attempt; made by `begin`, over after `settle`.

    Attributes:
        id, name, step: what is attempted.
        directory: the attempt directory, relative to the storage's root; the engine writes into it.
        state: where this rank stands.
        trash: entries of the root that may be removed by the coordinator's engine, once `settle` has returned.
    """

    def __init__(
        self, storage: Storage, board: Board, clock: Callable[[], float], key: str, deadlines: Deadlines, host: str
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._news = News(board, key)
        self._deadlines = deadlines
        self._seen_at = f"{host}:{storage.root}" if host else storage.root
        self._actor = Actor.COORDINATOR if board.rank == 0 else Actor.FOLLOWER
        self._plan: AttemptPlan | None = None
        self._persist_by = 0.0
        self.state = State.BEGIN
        self.id = ""
        self.name = ""
        self.step: int | None = None
        self.what: Deed = "save"
        self.directory = ""
        self.trash: tuple[str, ...] = ()

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
        refusal: AbortReason | None = None,
        step: int | None = None,
        what: Deed = "save",
        host: str = "",
        remove: Callable[[str], None] | None = None,
    ) -> Attempt:
        """Begin an attempt; every rank calls it with the same ``key``, new for each attempt on this board.

        Rank 0 passes ``plan`` and ``prewritten``, the files known beforehand (an export's may lie one directory below),
        which are durable with the attempt directory when this returns there; or ``refusal``, why there is none. Other
        ranks wait for that, at most ``deadlines.begin_s``, and make sure that they see the same directory. ``clock`` is
        monotonic, in seconds; ``step``, ``what`` and ``host`` are for messages; ``remove`` is handed what an attempt
        that could not begin has left in the trash.

        Raises what `AbortReason.error` gives, the same on every rank that could not begin: `CheckpointExists`,
        `ConfigError` (the root isn't shared), or `SaveFailed` with its cause.
        """
        attempt = cls(storage, board, clock, key, deadlines, host)
        attempt.step, attempt.what = step, what
        if attempt._actor is Actor.COORDINATOR:
            if refusal is not None:
                attempt._fail_begin(refusal)
            assert plan is not None
            assert plan.world == board.world
            try:
                attempt._begin(plan, prewritten or {})
            except BaseException:
                if remove is not None:
                    for name in attempt.trash:
                        remove(name)
                raise
        else:
            attempt._join()
        attempt._persist_by = clock() + deadlines.persist_s
        attempt._move(State.PERSISTING)
        return attempt

    def report(self, report: ManifestReport) -> None:
        """Post this rank's yes: ``report`` is durable in the attempt directory. Doesn't wait.

        If it can't be posted the yes stands all the same; `settle` finds out what came of it.
        """
        assert report.rank == self._news.rank
        self._move(State.REPORTED)
        try:
            self._news.tell_report(report)
        except Exception as error:  # noqa: BLE001 - it is durable: nothing this rank says can take it back
            _log.warning("rank %d could not post its report: %s", report.rank, error)

    def aborted(self) -> AbortReason | None:
        """The root cause if the attempt has been given up by now, else None; any thread, doesn't wait."""
        try:
            return self._news.reason()
        except BoardLost:
            return None

    def settle(
        self,
        *,
        unreported: AbortReason | None = None,
        may_be_left: bool = True,
        before_publish: Callable[[], None] | None = None,
    ) -> Outcome:
        """Wait for the outcome and return it, the same on every rank; at most once an attempt.

        A rank that did not report says why, in ``unreported``, which is a vote to give the attempt up. It is marked
        ``unreported`` only if the engine has confirmed that it stopped, or is dead; if a report ``may_be_left`` by it
        nevertheless, that is looked up here. The coordinator decides and publishes here; ``before_publish`` is called
        when all reports are in, and what it raises is a vote against. Returns within ``persist_s`` from `begin` and
        twice ``commit_s``, storage calls apart.

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
            # Memory, a defect: it says nothing about the attempt, of which others may have been told anything.
            raise self._unknown(f"rank {self._news.rank} broke off: {type(error).__name__}: {error}") from error
        finally:
            self._news.leave()

    # the coordinator -------------------------------------------------------------------------------------------

    def _begin(self, plan: AttemptPlan, prewritten: Mapping[str, bytes]) -> None:
        storage = self._storage
        self.id, self.name, self.step = plan.attempt, plan.name, plan.step
        self.directory = hidden_name(plan.name, plan.attempt, "incomplete")
        try:
            self._refuse_occupied(plan)
            self._plan = plan = note_overwritten(storage, plan)
            encoded = make_attempt(storage, self.directory, plan, prewritten)
            note = Begun(self.id, self.name, self.step, self.directory, _nonce(encoded), self._seen_at)
            self._news.tell_begin(note)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            self._fail_begin(AbortReason.of(error, rank=0, unreported=True))

    def _fail_begin(self, reason: AbortReason) -> NoReturn:
        """Nobody can have reported yet, so this failure is certain, whether or not the directory can be removed."""
        self._move(State.ABORT)
        if self.directory:
            self._try_remove()
        try:
            self._news.tell_begin(reason)
        except Exception as error:  # noqa: BLE001 - the reason is what counts
            _log.warning("attempt %s: the other ranks could not be told that it did not begin: %s", self.id, error)
        self._move(State.REMOVED)
        self._news.leave()
        raise reason.error(step=self.step, what=self.what)

    def _refuse_occupied(self, plan: AttemptPlan) -> None:
        if not plan.overwrite and is_occupied(self._storage, plan.name):
            path = f"{self._storage.root}/{plan.name}"
            message = f"{path} exists already; choose another path or step, or pass overwrite=True to replace it"
            raise CheckpointExists(message, path=path)

    def _decide(self, failure: AbortReason | None, before_publish: Callable[[], None] | None) -> Outcome:
        reason = failure if failure is not None else self._wait_reports_and_commit(before_publish)
        if reason is None:
            self._move(State.COMMIT)
            try:
                reason = self._publish()
            except OutcomeUnknown as error:
                self._announce(InDoubt(str(error)))
                raise
        else:
            reason = self._abort(reason) or reason
        if reason is None:
            self._move(State.PUBLISHED)
            outcome: Outcome = Published(self.name, self.id)
            self._announce(outcome)
            return outcome
        self._move(State.ABORT)
        if not self._try_remove() and not reason.unreported:
            unknown = self._unknown(f"it was given up ({reason.message}) but could not be moved to the trash")
            self._announce(InDoubt(str(unknown)))
            raise unknown
        self._move(State.REMOVED)
        self._announce(Aborted(reason))
        return Aborted(reason)

    def _wait_reports_and_commit(self, before_publish: Callable[[], None] | None) -> AbortReason | None:
        """None when COMMIT is the outcome; else the root cause of the abort that is, or has to be, voted."""
        try:
            reports = self._wait_reports()
            if isinstance(reports, AbortReason):
                return reports
            if before_publish is not None:
                before_publish()
            self._prepare(reports)
            return self._news.vote(CommitVote())
        except Exception as error:  # noqa: BLE001 - a callback may raise anything, and each is a vote against
            return AbortReason.of(error, rank=0)

    def _wait_reports(self) -> list[ManifestReport] | AbortReason:
        """All reports in rank order, or the reason for which somebody has given up."""
        news, persist_s = self._news, self._deadlines.persist_s
        left_s = max(0.0, self._persist_by - self._clock())
        try:
            return news.wait_reports(left_s)
        except DeadlineExceeded as late:
            missing = news.missing_ranks()
            if not missing:
                return news.wait_reports(self._deadlines.commit_s)
            shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
            message = (
                f"rank(s) {shown} of {news.world} had not written their part after {persist_s:g} s "
                "(persist_timeout); look for a slow disk or a hang there, or raise it"
            )
            error = DeadlineExceeded(message, waited_for=f"rank(s) {shown}", timeout_s=persist_s)
            error.__cause__ = late
            return AbortReason.of(error, rank=missing[0])

    def _prepare(self, reports: Sequence[ManifestReport]) -> None:
        """Make the attempt directory what will be published, but for its name."""
        plan = self._plan
        assert plan is not None
        self._refuse_occupied(plan)
        gap = find_gap(plan, reports)
        if gap:
            raise SaveFailed(gap, step=self.step, rank=None)
        manifest = encode_manifest(finish_manifest(plan, reports))
        self._storage.write_file(f"{self.directory}/{MANIFEST_NAME}", manifest)
        clear_scaffolding(self._storage, self.directory)

    def _publish(self) -> AbortReason | None:
        """None when published; a reason when it was refused and nothing is visible. Raises `OutcomeUnknown`."""
        assert self._plan is not None
        try:
            self.trash = publish(self._storage, self.directory, self.name, self.id, overwrite=self._plan.overwrite)
        except (StorageError, CheckpointExists) as error:
            return AbortReason.of(error, rank=0)
        except OutcomeUnknown:
            raise
        except Exception as error:
            raise self._unknown(f"publishing broke off: {type(error).__name__}: {error}") from error
        return None

    def _try_remove(self) -> bool:
        """Rename the attempt to trash, durably; True when that is so."""
        try:
            trash = withdraw(self._storage, self.directory, self.name, self.id)
        except Exception as error:  # noqa: BLE001 - as for what the storage refuses: it can't be called certain
            _log.warning("attempt %s could not be moved to the trash: %r", self.id, error)
            trash = None
        self.trash = trash or self.trash
        return trash is not None

    def _announce(self, note: End) -> None:
        try:
            self._news.tell_end(note)
        except Exception as error:  # noqa: BLE001 - it has happened, whether or not the others can be told
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
            self._news.leave()
        except Exception as error:  # noqa: BLE001 - told to the other ranks, who wait for this one
            # Without having begun this rank will never report, so its failure is certain. It may come of another's:
            # an attempt that was given up at once is gone when this rank looks for it.
            self._persist_by = self._clock()
            failure = AbortReason.of(error, rank=self._news.rank, unreported=True)
            outcome = self.settle(unreported=failure, may_be_left=False)
            assert isinstance(outcome, Aborted)
            reason = outcome.reason
        raise reason.error(step=self.step, what=self.what)

    def _check_shared(self, note: Begun) -> None:
        path = f"{note.directory}/{PLAN_NAME}"
        found = self._storage.size(path) is not None and self._storage.read_range(path, 0, NONCE_BYTES)
        if not found or _nonce(found) != note.nonce:
            message = (
                f"rank {self._news.rank} at {self._seen_at} doesn't see the directory {note.directory} that rank 0 "
                f"has just made at {note.seen_at}; checkpoints need a path on a file system that all ranks share"
            )
            raise ConfigError(message, field="path")

    def _follow(self, failure: AbortReason | None) -> Outcome:
        left_s = max(0.0, self._persist_by + self._deadlines.commit_s - self._clock())
        try:
            return self._learn(self._news.wait_end(left_s))
        except (DeadlineExceeded, BoardLost) as error:
            return self._resolve_doubt(error, failure)

    def _learn(self, note: End) -> Outcome:
        if isinstance(note, InDoubt):
            raise OutcomeUnknown(note.message, attempt=self.id, step=self.step)
        if isinstance(note, Published):
            if self.state is State.PERSISTING:
                self._move(State.REPORTED)  # by an engine that died before it could say so
            self._move(State.COMMIT)
            self._move(State.PUBLISHED)
            return note
        if self.state is not State.ABORT:
            self._move(State.ABORT)
        self._move(State.REMOVED)
        return note

    def _resolve_doubt(self, silence: DeadlineExceeded | BoardLost, failure: AbortReason | None) -> Outcome:
        """Rank 0 is silent. See that it can't commit any more, ask once more, then look at the final name."""
        reason = failure or AbortReason.of(silence, rank=self._news.rank)
        try:
            standing = self._news.vote(reason)
            if standing is not None:
                reason = standing
            return self._learn(self._news.wait_end(self._deadlines.commit_s))
        except (DeadlineExceeded, BoardLost) as error:
            _log.warning("attempt %s: %s", self.id, error)
        if reason.unreported:
            return self._learn(Aborted(reason))
        try:
            if self.name and attempt_at(self._storage, self.name) == self.id:
                self._storage.sync_dir("")
                return self._learn(Published(self.name, self.id))
        except StorageError as error:
            _log.warning("attempt %s: the final name can't be read: %s", self.id, error)
        raise self._unknown(f"rank 0 is silent: {silence}") from silence

    # everyone --------------------------------------------------------------------------------------------------

    def _move(self, target: State) -> None:
        self.state = advance(self.state, target, self._actor)

    def _abort(self, reason: AbortReason) -> AbortReason | None:
        """Vote to give it up, which counts if it is first. What stands now: a root cause, or None for COMMIT."""
        try:
            return self._news.vote(reason)
        except BoardLost:
            return reason

    def _checked(self, reason: AbortReason) -> AbortReason:
        """``reason``, but not certain if a report is there after all: engines die between writing and telling.

        Nor if one may come back: it was given its name, another rank's fsync of the directory made that durable, and
        it was taken away again because this rank's own fsync had failed. So its absence is made durable, too.
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
        message = (
            f"whether attempt {self.id} at {self._storage.root}/{self.name} was published is unknown: {why}; "
            "training may go on, and the next start of a writing manager settles it"
        )
        return OutcomeUnknown(message, attempt=self.id, step=self.step)


def _nonce(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data[:NONCE_BYTES])
