"""Rounds of publisher ranks, one before each version: each says one thing, and hears what all say. Torch-free.

    say -> hear_all        or    fail: the others hear why        or    too late: whoever can't wait longer gives it up

Guarantees: all ranks are in the same rounds, whatever went wrong on one of them before: who comes to a round that was
given up goes on to the next. Nothing of earlier rounds is left on the board once all have spoken in a later one.
Assumes: one thread a rank; every rank calls the same, but for a rank that fails.
Does not: know what is said.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.outcome import AbortReason

if TYPE_CHECKING:
    from holdfast.coordination import Board
    from holdfast.sync.deadline import Deadline


class Rounds:
    """See the module; of one rank."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._number = 0
        self._swept = 0
        """Of those that are on the board, the first; rank 0's count."""

    def hear_all(self, word: bytes, deadline: Deadline) -> list[bytes]:
        """Say ``word``, and return what all ranks say, in any order.

        Raises `DeadlineExceeded` naming who is missing, or what another rank gave the round up for.
        """
        self._skip_given_up()
        number = self._number
        self._number += 1
        board = self._board
        try:
            board.append(_key(number), _said(board.rank, word))
            said = board.wait_entries(
                _key(number),
                board.world,
                timeout_s=deadline.left_s(),
                waiting_for="all publisher ranks to publish",
                unless=_end(number),
            )
        except DeadlineExceeded as late:
            error = self._late(number, deadline)
            self._give_up(number, error)
            raise error from late
        except BaseException as error:
            self._give_up(number, error)
            raise
        if said is None:
            raise self._given_up(number)
        if not board.rank:
            self._sweep(number)
        return [msgspec.msgpack.decode(entry, type=tuple[int, bytes])[1] for entry in said]

    def fail(self, word: bytes) -> None:
        """Say ``word``, which is why this rank can't take part, and don't wait. Where all know already, say nothing."""
        number = self._number
        self._skip_given_up()
        if number == self._number:
            self._number += 1
            self._board.append(_key(number), _said(self._board.rank, word))

    def _skip_given_up(self) -> None:
        while self._board.try_get(_end(self._number)) is not None:
            self._number += 1

    def _late(self, number: int, deadline: Deadline) -> DeadlineExceeded:
        entries = self._board.try_entries(_key(number))
        spoke = {msgspec.msgpack.decode(entry, type=tuple[int, bytes])[0] for entry in entries}
        missing = [rank for rank in range(self._board.world) if rank not in spoke]
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return deadline.exceeded(
            f"publisher rank(s) {shown} of {self._board.world} to publish this version too",
            "every rank must call publish, with the same version; look at their logs, or raise the timeout",
        )

    def _give_up(self, number: int, error: BaseException) -> None:
        with contextlib.suppress(HoldfastError):
            self._board.set(_end(number), msgspec.msgpack.encode(AbortReason.of(error, rank=self._board.rank)))

    def _given_up(self, number: int) -> HoldfastError:
        found = self._board.try_get(_end(number))
        if found is None:  # all have spoken in a later one meanwhile
            return HoldfastError("this publish was given up by another publisher rank; publish again on all ranks")
        return msgspec.msgpack.decode(found, type=AbortReason).cause()

    def _sweep(self, number: int) -> None:
        for left in range(self._swept, number):
            self._board.delete_list(_key(left))
            self._board.delete(_end(left))
        self._swept = number


def _key(number: int) -> str:
    return f"looks/{number}"


def _end(number: int) -> str:
    """Where it says why the round was given up, if it was."""
    return f"looks-end/{number}"


def _said(rank: int, word: bytes) -> bytes:
    return msgspec.msgpack.encode((rank, word))
