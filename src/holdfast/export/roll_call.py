"""Finds out whose fault it is when ranks fail to exchange bytes, so that all of them name the same. Torch-free.

A rank that waits for another can't tell one that died from one that itself waits for a third. So whoever fails tells
the others over the board, and all who still can answer do so within a grace. Who doesn't is to blame; if all do, it is
the rank whose own work failed, or the one that somebody waited for first.

Guarantees: `settle` returns the same reason on every rank that calls it, within three times the grace.
Assumes: ``key`` is of one exchange and never used again; `forget` is called when nobody will ask any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from holdfast.errors import DeadlineExceeded, HoldfastError, SaveFailed
from holdfast.outcome import AbortReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.coordination import Board

GRACE_S: Final = 3.0
_SLICE_S: Final = 1.0
_NAMED_MAX: Final = 8
_T = TypeVar("_T")


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has to say about an exchange. ``round`` is as far as it came."""

    rank: int
    round: int
    own: AbortReason | None = None
    """What failed was its own work."""
    waited_for: int | None = None
    """The rank that did not answer it, or closed its connection."""
    late_s: float | None = None
    """It waited so long; None: it learnt of an end before that."""
    detail: str = ""

    def reason(self) -> AbortReason:
        """Why the exchange failed, as far as this rank can tell."""
        if self.own is not None:
            return self.own
        peer = 0 if self.waited_for is None else self.waited_for
        detail = f"rank {self.rank} waited for it in round {self.round}: {self.detail}"
        return _reason(peer, f"rank {peer}", late_s=self.late_s, lost=self.late_s is None, detail=detail)


class RollCall:
    """One exchange's. Any thread may call anything."""

    def __init__(self, board: Board, key: str, *, grace_s: float = GRACE_S) -> None:
        self._board = board
        self._key = key
        self._grace_s = grace_s

    def say_done(self) -> None:
        """This rank has all that it was to get, and everyone what it had to give: whoever is to blame, it isn't it."""
        self._board.append(f"{self._key}/roll", msgspec.msgpack.encode(Answer(self._board.rank, 0)))

    def is_stopped(self) -> bool:
        """Whether a rank has failed."""
        return self._board.try_get(f"{self._key}/stop") is not None

    def settle(self, answer: Answer) -> HoldfastError:
        """What all ranks raise. Call it once, when this rank has failed or learnt that another has."""
        board = self._board
        board.set(f"{self._key}/stop", b"1")
        board.append(f"{self._key}/roll", msgspec.msgpack.encode(answer))
        if board.rank == 0:
            found = self._answers()
        else:
            try:
                return _decode(board.get(f"{self._key}/cause", timeout_s=2 * self._grace_s, waiting_for="the cause"))
            except DeadlineExceeded:  # nothing from rank 0: then whoever comes first decides
                found = self._told()
        reason = blame(found, board.world)
        return _decode(board.compare_set(f"{self._key}/cause", msgspec.msgpack.encode(reason)))

    def forget(self) -> None:
        """Remove what was told. By one rank, once the outcome of the attempt is known to all."""
        self._board.delete_list(f"{self._key}/roll")
        for name in ("stop", "cause"):
            self._board.delete(f"{self._key}/{name}")

    def _answers(self) -> list[Answer]:
        try:
            found = self._board.wait_entries(
                f"{self._key}/roll", self._board.world, timeout_s=self._grace_s, waiting_for="all ranks to answer"
            )
        except DeadlineExceeded:
            return self._told()
        return [msgspec.msgpack.decode(entry, type=Answer) for entry in found or ()]

    def _told(self) -> list[Answer]:
        return [msgspec.msgpack.decode(entry, type=Answer) for entry in self._board.try_entries(f"{self._key}/roll")]


def blame(answers: Sequence[Answer], world: int) -> AbortReason:
    """Why an exchange failed, from what ranks had to say about it."""
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


def _reason(rank: int, who: str, *, late_s: float | None, lost: bool, detail: str) -> AbortReason:
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
    return AbortReason.of(error, rank=rank)


def _spelt(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED_MAX])) + (", ..." if len(ranks) > _NAMED_MAX else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def meet(
    board: Board, name: str, *, timeout_s: float, given_up: Callable[[], AbortReason | None] = lambda: None
) -> None:
    """Return when every rank has called this for ``name``. Raises the same `DeadlineExceeded` everywhere if one won't.

    Ends early with the cause that ``given_up`` gives.
    """
    deadline = time.monotonic() + timeout_s
    board.append(f"{name}/here", b"%d" % board.rank)
    if board.rank == 0:
        there = _sliced(
            lambda wait_s: board.wait_entries(
                f"{name}/here", board.world, timeout_s=wait_s, waiting_for="all ranks to exchange"
            ),
            deadline,
            given_up,
        )
        reason = b""
        if there is None:
            missing = sorted(set(range(board.world)) - set(map(int, board.try_entries(f"{name}/here"))))
            if missing:
                late = _reason(missing[0], _spelt(missing), late_s=timeout_s, lost=False, detail="")
                reason = msgspec.msgpack.encode(late)
        board.set(f"{name}/go", reason)
        answer: bytes | None = reason
    else:
        answer = _sliced(
            lambda wait_s: board.get(f"{name}/go", timeout_s=wait_s, waiting_for="rank 0"), deadline + GRACE_S, given_up
        )
    if answer is None:
        raise _reason(0, "rank 0", late_s=timeout_s, lost=False, detail="").cause()
    if answer:
        raise _decode(answer)


def _sliced(wait: Callable[[float], _T], deadline: float, given_up: Callable[[], AbortReason | None]) -> _T | None:
    """What ``wait`` brings, looking meanwhile whether there is still a reason to; None when the deadline passes."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            return wait(max(0.001, min(_SLICE_S, left_s)))
        except DeadlineExceeded as late:
            reason = given_up()
            if reason is not None:
                raise reason.cause() from late
            if left_s <= _SLICE_S:
                return None


def _decode(data: bytes) -> HoldfastError:
    return msgspec.msgpack.decode(data, type=AbortReason).cause()
