"""Collective decisions: all ranks succeed or raise the same error; rank 0's choice; blame. Torch-free.

    Votes      raise the same error on every rank if any has one; return rank 0's decision on every rank
    meet       wait until every rank has arrived
    RollCall   find the rank to blame for a failed exchange of bytes

A rank that waits for another can't tell whether that one died or waits for a third. So a rank that fails in an exchange
tells the others, and all that can do so answer within a grace. A rank that doesn't answer is to blame; if all answer,
it is the rank whose own work failed, or the one that another waited for first.

Guarantees: each of these raises the same on every rank that takes part, within its timeout and a grace; a missing rank
is named.
Assumes: every rank makes the same calls in the same order. The key of a `RollCall` belongs to one exchange and is never
reused; `RollCall.forget` is called when no rank will ask any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.coordination.failure import RankFailure
from holdfast.coordination.round import Round, Rounds, listed
from holdfast.coordination.store import board_lost_told
from holdfast.errors import DeadlineExceeded, HoldfastError, SaveFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from holdfast.coordination.board import Board

GRACE_S: Final = 3.0
_NAMED_MAX: Final = 8


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    """One rank's vote, or the result of all votes."""

    reason: RankFailure | None = None
    unexpected: tuple[str, ...] = ()
    target: str = ""


_VOTE: Final = msgspec.msgpack.Decoder(_Vote)


class Votes:
    """Votes on the training thread: all ranks succeed, or all raise the first rank's error.

    Every rank calls the same methods in the same order, and then `leave`. Votes of another ``topic`` are counted
    separately.
    """

    def __init__(self, board: Board, topic: str = "vote") -> None:
        self._board = board
        self._rounds = Rounds(board, topic)

    def decide(self, decide: Callable[[], bytes], *, timeout_s: float) -> bytes:
        """Call ``decide`` on rank 0 and return its result, or raise its error, on every rank."""
        round_, error = self._rounds.next(), None
        answer: bytes | RankFailure | None = None
        if self._board.rank == 0:
            try:
                answer = decide()
            except Exception as failed:  # noqa: BLE001 - raised below, once the other ranks know
                answer, error = RankFailure.of(failed, rank=0), failed
        try:
            with board_lost_told("sharing rank 0's choice", timeout_s):
                found = round_.share(answer, timeout_s=timeout_s)
        except HoldfastError as silence:
            if error is not None:
                raise error from silence
            raise
        if error is not None:
            raise error
        if isinstance(found, RankFailure):
            raise found.cause()
        return found

    def raise_together(
        self,
        error: BaseException | None = None,
        *,
        unexpected: Collection[str] = (),
        target: str = "",
        timeout_s: float,
    ) -> tuple[str, ...]:
        """Return if no rank has an error; otherwise raise the first rank's error on every rank.

        ``target``: a path that must be equal on every rank; `ConfigError` otherwise. Returns the names that are in
        ``unexpected`` on every rank: with pipeline stages, a name unknown to one rank belongs to another. If a rank
        doesn't vote in time, all raise the error of one that has, if any, else `DeadlineExceeded`, which names it.
        """
        board, round_ = self._board, self._rounds.next()
        mine = _Vote(None if error is None else RankFailure.of(error, rank=board.rank), tuple(unexpected), target)

        def silent(words: dict[int, bytes], waited_s: float) -> RankFailure:
            return _first_reason(list(map(_VOTE.decode, words.values()))) or round_.silence(words, waited_s)

        try:
            with board_lost_told("the vote of all ranks", timeout_s):
                round_.say(msgspec.msgpack.encode(mine))
                found = round_.wait(_counted, timeout_s=timeout_s, silent=silent)
        except HoldfastError as silence:
            if error is not None:
                raise error from silence
            raise
        verdict = _Vote(found) if isinstance(found, RankFailure) else _VOTE.decode(found)
        if (reason := verdict.reason) is None:
            return verdict.unexpected
        if error is not None and reason.rank == board.rank:
            raise error
        raise reason.cause() from error

    def leave(self) -> None:
        """End voting; the last rank to leave deletes the remaining votes. Doesn't wait and never raises."""
        self._rounds.leave()


def _counted(words: list[bytes]) -> bytes:
    """Count the votes of all ranks, in rank order."""
    votes = list(map(_VOTE.decode, words))
    common = set(votes[0].unexpected).intersection(*(vote.unexpected for vote in votes[1:]))
    return msgspec.msgpack.encode(_Vote(_first_reason(votes) or _first_astray(votes), tuple(sorted(common))))


def _first_reason(votes: Sequence[_Vote]) -> RankFailure | None:
    """Return the error of the first rank that has one, as the other ranks raise it."""
    reason = next((vote.reason for vote in sorted(votes, key=_rank_of) if vote.reason is not None), None)
    if reason is None:
        return None
    return msgspec.structs.replace(reason, message=f"on rank {reason.rank}: {reason.message}")


def _rank_of(vote: _Vote) -> int:
    return -1 if vote.reason is None else vote.reason.rank


def _first_astray(votes: Sequence[_Vote]) -> RankFailure | None:
    """Return the first rank whose target isn't rank 0's."""
    for rank, vote in enumerate(votes):
        if vote.target != votes[0].target:
            message = (
                f"ranks disagree on the path: rank 0 was given {votes[0].target}, rank {rank} {vote.target}; "
                "a checkpoint has one path, on a file system that all ranks share"
            )
            return RankFailure(rank, "ConfigError", message, fields={"field": "path"})
    return None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer about a failed exchange. ``round``: the number of the round that it reached."""

    rank: int
    round: int
    own: RankFailure | None = None
    """The failure of its own work."""
    waited_for: int | None = None
    """The rank that did not answer this one, or closed its connection."""
    late_s: float | None = None
    """Seconds waited in vain; None if it learnt of the failure before its deadline."""
    detail: str = ""

    def reason(self) -> RankFailure:
        """Return the reason for the failure as this rank knows it."""
        if self.own is not None:
            return self.own
        peer = 0 if self.waited_for is None else self.waited_for
        detail = f"rank {self.rank} waited for it in round {self.round}: {self.detail}"
        return _reason(peer, f"rank {peer}", late_s=self.late_s, lost=self.late_s is None, detail=detail)


_ANSWER: Final = msgspec.msgpack.Decoder(Answer)


class RollCall:
    """The roll call of one exchange. Thread-safe."""

    def __init__(self, board: Board, key: str, *, grace_s: float = GRACE_S) -> None:
        self._board = board
        self._stop = f"{key}/stop"
        self._round = Round(board, f"{key}/roll")
        self._grace_s = grace_s

    def say_done(self) -> None:
        """Record that this rank has received and sent everything, so that it is not to blame."""
        self._round.say(msgspec.msgpack.encode(Answer(self._board.rank, 0)))

    def is_stopped(self) -> bool:
        """Return True if a rank has failed."""
        return self._board.try_get(self._stop) is not None

    def settle(self, answer: Answer) -> HoldfastError:
        """Return the error that all ranks raise. Call it once, when this rank has failed or learnt of a failure.

        If rank 0 doesn't answer, the first rank to call this decides.
        """
        self._board.set(self._stop, b"1")
        self._round.say(msgspec.msgpack.encode(answer))

        def silent(words: Mapping[int, bytes], _: float) -> RankFailure:
            return blame(list(map(_ANSWER.decode, words.values())), self._board.world)

        found = self._round.wait(
            lambda words: silent(dict(enumerate(words)), 0.0),
            timeout_s=self._grace_s,
            grace_s=self._grace_s,
            silent=silent,
        )
        assert isinstance(found, RankFailure)
        return found.cause()

    def forget(self) -> None:
        """Delete its keys from the board. Called by one rank, once all know the outcome of the attempt."""
        self._round.forget()
        self._board.delete(self._stop)


def blame(answers: Sequence[Answer], world: int) -> RankFailure:
    """Return the reason why an exchange failed, from the answers of the ranks."""
    for answer in sorted(answers, key=lambda answer: answer.rank):
        if answer.own is not None:
            return answer.own
    silent = sorted(set(range(world)) - {answer.rank for answer in answers})
    waiting = sorted(
        (answer for answer in answers if answer.waited_for is not None), key=lambda answer: (answer.round, answer.rank)
    )
    late_s = max((answer.late_s for answer in waiting if answer.late_s is not None), default=None)
    if silent:
        lost = any(answer.waited_for in silent and answer.late_s is None for answer in waiting)
        detail = next((answer.detail for answer in waiting if answer.waited_for in silent), "")
        return _reason(silent[0], _spelt(silent), late_s=None if lost else late_s, lost=lost, detail=detail)
    if waiting:
        return waiting[0].reason()
    raise AssertionError(f"nobody has failed: {answers}")


def _reason(rank: int, who: str, *, late_s: float | None, lost: bool, detail: str) -> RankFailure:
    if lost or late_s is None:
        what = f"{who} ended, or lost the connection, while ranks exchanged the bytes of an export"
        error: HoldfastError = SaveFailed(f"{what} ({detail}); look at its log", step=None, rank=rank)
    else:
        error = DeadlineExceeded(
            f"{who} did not answer for {late_s:.3g} s while ranks exchanged the bytes of an export: it hangs or is "
            "slow; look at its log, or raise the deadline",
            waited_for=who,
            timeout_s=late_s,
        )
    return RankFailure.of(error, rank=rank)


def _spelt(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _NAMED_MAX)}"


def meet(
    board: Board, name: str, *, timeout_s: float, given_up: Callable[[], RankFailure | None] = lambda: None
) -> None:
    """Wait until every rank has called this for ``name``; otherwise raise the same `DeadlineExceeded` on all.

    If ``given_up`` returns a cause, raises it at once.
    """

    def silent(words: Mapping[int, bytes], _: float) -> RankFailure:
        missing = [rank for rank in range(board.world) if rank not in words] or [0]
        return _reason(missing[0], _spelt(missing), late_s=timeout_s, lost=False, detail="")

    place = Round(board, name)
    place.say()
    found = place.wait(lambda _: b"", timeout_s=timeout_s, grace_s=GRACE_S, silent=silent, given_up=given_up)
    if isinstance(found, RankFailure):
        raise found.cause()
