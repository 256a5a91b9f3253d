"""Messages between the ranks of one attempt, and the board's keys that carry them. Torch-free.

    begin            by rank 0: where to write, or why it could not begin
    reports          the list of lines of the manifest, each by its rank, with what it tells beside (`RankNote`)
    outcome          COMMIT or ABORT(reason): the first vote counts
    end              by rank 0: Published, Aborted or InDoubt, when that is durable
    left             how many ranks have read the end; the last one clears the board

Guarantees: a rank waits for or deletes one key or one list, however many ranks there are; nothing of an attempt stays
on the board once all its ranks have left. Thread-safe.
Does not: decide (``commit.attempt`` does). Messages are lost with the board; the durable state is in the storage.
"""

from __future__ import annotations

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.coordination.failure import AttemptAborted, AttemptInDoubt, AttemptPublished, RankFailure
from holdfast.format.manifest import ManifestReport  # noqa: TC001 - msgspec reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.coordination.board import Board


class CommitVote(msgspec.Struct, frozen=True, tag="commit"):
    """The value of the outcome key when the coordinator was first: COMMIT."""


class RankNote(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the coordinator beside its report, by the same message; None where it doesn't know.

    began_s: when the save was called, in seconds since the epoch. nbytes, stall_s, staging_s, persist_s: as in
    `SaveStats`, when the rank reported.
    """

    rank: int
    began_s: float | None = None
    stall_s: float | None = None
    staging_s: float | None = None
    persist_s: float | None = None
    nbytes: int | None = None
    look: bytes = b""
    """What was seen of the state, see ``saver.suspicion``; opaque here."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    report: ManifestReport
    note: RankNote | None


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The coordinator's announcement of the attempt and its directory."""

    attempt: str
    name: str
    step: int | None
    directory: str
    nonce: str
    """Digest of the start of the plan file, which every rank reads back."""
    seen_at: str
    """The coordinator's host and root, for messages."""


End = AttemptPublished | AttemptAborted | AttemptInDoubt

_BEGIN: Final = msgspec.msgpack.Decoder(Begun | RankFailure)
_VOTE: Final = msgspec.msgpack.Decoder(CommitVote | RankFailure)
_END: Final = msgspec.msgpack.Decoder(AttemptPublished | AttemptAborted | AttemptInDoubt)
_REPORT: Final = msgspec.msgpack.Decoder(_Told)
_encode: Final = msgspec.msgpack.encode


def reports_in(entries: Iterable[bytes]) -> list[ManifestReport]:
    """Return the reports in ``entries`` of the board's list, in rank order."""
    return sorted((_REPORT.decode(data).report for data in entries), key=attrgetter("rank"))


def _notes_in(entries: Iterable[bytes]) -> tuple[RankNote, ...]:
    notes = (_REPORT.decode(data).note for data in entries)
    return tuple(sorted((note for note in notes if note is not None), key=attrgetter("rank")))


class AttemptChannel:
    """The keys of ``board`` under ``key`` that one attempt uses; raises the board's errors."""

    def __init__(self, board: Board, key: str) -> None:
        self._board = board
        self._key = key
        self._reports = f"{key}/reports"
        self.rank = board.rank
        self.world = board.world
        self.notes: tuple[RankNote, ...] = ()
        """What the ranks told beside their reports, in rank order; on rank 0, once it has waited for those."""

    def tell_begin(self, note: Begun | RankFailure) -> None:
        self._board.set(f"{self._key}/begin", _encode(note))

    def wait_begin(self, timeout_s: float) -> Begun | RankFailure:
        data = self._board.get(f"{self._key}/begin", timeout_s=timeout_s, waiting_for="rank 0 to begin the attempt")
        note: Begun | RankFailure = _BEGIN.decode(data)
        return note

    def tell_report(self, report: ManifestReport, note: RankNote | None = None) -> None:
        self._board.append(self._reports, _encode(_Told(report, note)))

    def wait_reports(self, timeout_s: float, count: int) -> list[ManifestReport] | RankFailure:
        """Wait for ``count`` reports, in rank order, or for the reason of a rank that has aborted.

        Raises `DeadlineExceeded` otherwise.
        """
        found = self._board.wait_entries(
            self._reports,
            count,
            timeout_s=timeout_s,
            waiting_for="the reports of all ranks",
            unless=f"{self._key}/outcome",
        )
        if found is None:
            reason = self.reason()
            assert reason is not None, "nobody but the coordinator, who asks, votes to commit"
            return reason
        self.notes = _notes_in(found)
        return reports_in(found)

    def look_for_notes(self) -> None:
        """Set `notes` to those of the ranks that have reported so far, for an attempt that is given up."""
        with contextlib.suppress(Exception):  # for those who look at saves: no save depends on it
            self.notes = _notes_in(self._board.try_entries(self._reports))

    def missing_reports(self, count: int) -> list[int]:
        """List the ranks whose report is missing now, of ``count``."""
        there = {report.rank for report in reports_in(self._board.try_entries(self._reports))}
        return [rank for rank in range(count) if rank not in there]

    def vote(self, vote: CommitVote | RankFailure) -> RankFailure | None:
        """Set the outcome if it is open; return the one that counts: a reason, or None for COMMIT."""
        standing = _VOTE.decode(self._board.compare_set(f"{self._key}/outcome", _encode(vote)))
        return standing if isinstance(standing, RankFailure) else None

    def reason(self) -> RankFailure | None:
        """Return the root cause if the outcome is ABORT."""
        data = self._board.try_get(f"{self._key}/outcome")
        vote = None if data is None else _VOTE.decode(data)
        return vote if isinstance(vote, RankFailure) else None

    def tell_end(self, note: End) -> None:
        self._board.set(f"{self._key}/end", _encode(note))

    def wait_end(self, timeout_s: float) -> End:
        data = self._board.get(f"{self._key}/end", timeout_s=timeout_s, waiting_for="rank 0 to announce the outcome")
        note: End = _END.decode(data)
        return note

    def leave(self) -> None:
        """Count this rank as finished; the last one clears the board, unless it is lost."""
        board, key = self._board, self._key
        try:
            if board.add(f"{key}/left") < self.world:
                return
            board.delete_list(self._reports)
            for name in ("begin", "outcome", "end", "left"):
                board.delete(f"{key}/{name}")
        except Exception:  # noqa: BLE001 - keys left on the board do no harm, and the outcome is settled
            return
