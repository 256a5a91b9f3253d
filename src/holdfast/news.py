"""What the ranks of one attempt tell each other, and under which keys of the board. Torch-free.

    begin            by rank 0: where to write, or why it could not begin
    reports          the list of lines of the manifest, each by its rank
    outcome          COMMIT or ABORT(reason): whoever is first
    end              by rank 0: Published, Aborted or InDoubt, when that is durable
    left             how many have read the end; the last one clears the board

Guarantees: whatever a rank waits for or deletes is one key or one list, however many ranks there are; nothing of an
attempt stays on the board once all its ranks have left. Any thread may call anything.
Does not: decide (``commit`` does). News is lost with the board; what counts is durable elsewhere.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.format.manifest import ManifestReport
from holdfast.outcome import Aborted, AbortReason, InDoubt, Published

if TYPE_CHECKING:
    from holdfast.coordination import Board


class CommitVote(msgspec.Struct, frozen=True, tag="commit"):
    """What the outcome key holds when the coordinator was first."""


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """Where the attempt is, from the coordinator."""

    attempt: str
    name: str
    step: int | None
    directory: str
    nonce: str
    """Digest of the start of the plan file, which every rank reads back."""
    seen_at: str
    """Host and root as the coordinator sees them, for messages."""


End = Published | Aborted | InDoubt

_BEGIN: Final = msgspec.msgpack.Decoder(Begun | AbortReason)
_VOTE: Final = msgspec.msgpack.Decoder(CommitVote | AbortReason)
_END: Final = msgspec.msgpack.Decoder(Published | Aborted | InDoubt)
_REPORT: Final = msgspec.msgpack.Decoder(ManifestReport)
_encode: Final = msgspec.msgpack.encode


class News:
    """The part of ``board`` under ``key`` that one attempt uses; raises what the board does."""

    def __init__(self, board: Board, key: str) -> None:
        self._board = board
        self._key = key
        self._reports = f"{key}/reports"
        self.rank = board.rank
        self.world = board.world

    def tell_begin(self, note: Begun | AbortReason) -> None:
        self._board.set(f"{self._key}/begin", _encode(note))

    def wait_begin(self, timeout_s: float) -> Begun | AbortReason:
        data = self._board.get(f"{self._key}/begin", timeout_s=timeout_s, waiting_for="rank 0 to begin the attempt")
        note: Begun | AbortReason = _BEGIN.decode(data)
        return note

    def tell_report(self, report: ManifestReport) -> None:
        self._board.append(self._reports, _encode(report))

    def wait_reports(self, timeout_s: float) -> list[ManifestReport] | AbortReason:
        """All reports in rank order, or the reason for which somebody has given up.

        Raises `DeadlineExceeded` if there is neither.
        """
        found = self._board.wait_entries(
            self._reports,
            self.world,
            timeout_s=timeout_s,
            waiting_for="the reports of all ranks",
            unless=f"{self._key}/outcome",
        )
        if found is None:
            reason = self.reason()
            assert reason is not None, "nobody but the coordinator, who asks, votes to commit"
            return reason
        return sorted(map(_REPORT.decode, found), key=attrgetter("rank"))

    def missing_ranks(self) -> list[int]:
        """Ranks whose report isn't there now."""
        there = {_REPORT.decode(data).rank for data in self._board.try_entries(self._reports)}
        return [rank for rank in range(self.world) if rank not in there]

    def vote(self, vote: CommitVote | AbortReason) -> AbortReason | None:
        """Set the outcome if it is open; the reason that stands then, None for COMMIT."""
        standing = _VOTE.decode(self._board.compare_set(f"{self._key}/outcome", _encode(vote)))
        return standing if isinstance(standing, AbortReason) else None

    def reason(self) -> AbortReason | None:
        """The root cause, if ABORT is the outcome by now."""
        data = self._board.try_get(f"{self._key}/outcome")
        vote = None if data is None else _VOTE.decode(data)
        return vote if isinstance(vote, AbortReason) else None

    def tell_end(self, note: End) -> None:
        self._board.set(f"{self._key}/end", _encode(note))

    def wait_end(self, timeout_s: float) -> End:
        data = self._board.get(f"{self._key}/end", timeout_s=timeout_s, waiting_for="rank 0 to announce the outcome")
        note: End = _END.decode(data)
        return note

    def leave(self) -> None:
        """Nothing more is read or told by this rank. A board that is lost needs no clearing."""
        board, key = self._board, self._key
        try:
            if board.add(f"{key}/left") < self.world:
                return
            board.delete_list(self._reports)
            for name in ("begin", "outcome", "end", "left"):
                board.delete(f"{key}/{name}")
        except Exception:  # noqa: BLE001 - keys that stay are in nobody's way, and the outcome is settled
            return
