"""One round among all ranks: each posts a message, rank 0 decides from all of them, all get the answer. Torch-free.

    say         every rank   post its message to a list, which rank 0 reads and deletes as a whole; doesn't wait
    gather      rank 0       wait for the messages of all ranks, in rank order
    announce    rank 0       post the answer for all ranks, or the failure
    wait        every rank   on rank 0: gather, decide and announce; on the others: read the answer

A round ends with an answer (`bytes`) or a `RankFailure`, usually because a rank was silent. Any rank whose deadline
passes ends it; the others wait longer than rank 0, which names the silent ranks.

Guarantees: a round ends once, by `compare_set`: every rank that learns its end learns the same. Ranks that have posted
nothing by the deadline are named; no rank that has posted is called silent. A series (`Rounds`) leaves only its latest
round on the board, once all ranks have posted in it, and nothing once all ranks have left.
Assumes: the key of a round is never used again; all ranks go through a series alike, one thread each.
Does not: interpret messages. The outcome of an attempt is decided in ``commit.attempt`` instead: any rank may end it
before all have reported, and it depends on durable reports.
"""

from __future__ import annotations

import contextlib
import functools
import time
import zlib
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from holdfast.coordination.failure import RankFailure
from holdfast.coordination.store import BoardLost
from holdfast.errors import DeadlineExceeded, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.coordination.board import Board

ANSWER_GRACE_S: Final = 5.0
"""How much longer than rank 0 the others wait: rank 0 waits for the slowest rank until its deadline, then names it."""
PACK_FROM_BYTES: Final = 256
"""Minimum size of values to compress: names and rank numbers shrink to a fifth, and one Store serves all ranks."""
_ADVICE: Final = "look at the logs of these ranks, or raise the deadline"
_NAMED_MAX: Final = 16
_SLICE_S: Final = 1.0
"""Interval in seconds between two calls of ``given_up`` during a wait."""
_FAILED: Final = b"!"
_WORD: Final = msgspec.msgpack.Decoder(tuple[int, bytes])
_FAILURE: Final = msgspec.msgpack.Decoder(RankFailure)
_T = TypeVar("_T")


def pack(data: bytes) -> bytes:
    """Encode ``data``, compressed if it is long; the first byte says which."""
    return b"z" + zlib.compress(data, 1) if len(data) >= PACK_FROM_BYTES else b"=" + data


def unpack(data: bytes) -> bytes:
    return zlib.decompress(data[1:]) if data[:1] == b"z" else data[1:]


def listed(ranks: Sequence[int], most: int = _NAMED_MAX) -> str:
    """Return the first ``most`` of ``ranks`` as text."""
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")


def silent_ranks(ranks: Sequence[int], world: int, timeout_s: float, *, had_not: str, advice: str) -> DeadlineExceeded:
    """Return the error that names ``ranks``, which did not do their part within ``timeout_s``."""
    shown = listed(ranks)
    message = f"rank(s) {shown} of {world} had not {had_not} within {timeout_s:.3g} s; {advice}"
    return DeadlineExceeded(message, waited_for=f"rank(s) {shown}", timeout_s=timeout_s)


class Round:
    """One rank's part in the round under ``key`` of ``board``.

    had_not, advice: for the error: what a silent rank had not done, and what the user can do about it.
    all_spoke: called in `wait` once all ranks have posted, on rank 0 before it announces the answer.
    """

    def __init__(
        self,
        board: Board,
        key: str,
        *,
        had_not: str = "answered",
        advice: str = _ADVICE,
        all_spoke: Callable[[], None] = lambda: None,
    ) -> None:
        self._board = board
        self._key = key
        self._answer = f"{key}/answer"
        self._had_not = had_not
        self._advice = advice
        self._all_spoke = all_spoke

    def say(self, word: bytes = b"") -> None:
        """Post this rank's message; if it posts twice, either may count."""
        self._board.append(self._key, msgspec.msgpack.encode((self._board.rank, word)))

    def words(self) -> dict[int, bytes]:
        """Return the messages posted so far, by rank; doesn't wait."""
        return dict(map(_WORD.decode, self._board.try_entries(self._key)))

    def gather(self, *, timeout_s: float) -> list[bytes] | RankFailure:
        """Wait for all messages, in rank order; otherwise return the failure that names the silent ranks."""
        words = self._gather(timeout_s)
        if isinstance(words, RankFailure) or len(words) < self._board.world:
            return words if isinstance(words, RankFailure) else self.silence(words, timeout_s)
        return [words[rank] for rank in range(self._board.world)]

    def silence(self, words: Mapping[int, bytes], timeout_s: float) -> RankFailure:
        """Return the failure of a round in which only the ranks of ``words`` have posted within ``timeout_s``.

        If all have, rank 0 is silent: it has not announced the answer.
        """
        world = self._board.world
        missing = [rank for rank in range(world) if rank not in words]
        had_not = self._had_not if missing else "answered"
        error = silent_ranks(missing or [0], world, timeout_s, had_not=had_not, advice=self._advice)
        return RankFailure.of(error, rank=self._board.rank)

    def announce(self, answer: bytes | RankFailure) -> bytes | RankFailure:
        """End the round unless it has ended; return its end."""
        value = _FAILED + msgspec.msgpack.encode(answer) if isinstance(answer, RankFailure) else pack(answer)
        return _decoded(self._board.compare_set(self._answer, value))

    def ended(self) -> bytes | RankFailure | None:
        """Return the end of the round, None if it is open; doesn't wait."""
        value = self._board.try_get(self._answer)
        return None if value is None else _decoded(value)

    def wait(
        self,
        decide: Callable[[list[bytes]], bytes | RankFailure],
        *,
        timeout_s: float,
        grace_s: float = ANSWER_GRACE_S,
        silent: Callable[[dict[int, bytes], float], RankFailure] | None = None,
        given_up: Callable[[], RankFailure | None] | None = None,
        watch: bool = False,
    ) -> bytes | RankFailure:
        """Wait for the end of the round: what rank 0 decides from all messages, or the failure.

        timeout_s: how long rank 0 waits for the messages, and the others, ``grace_s`` longer, for rank 0. silent: makes
        the failure from the messages posted and the time waited; None for `silence`. given_up: called regularly;
        returns a reason to stop waiting. watch: rank 0 also checks whether another rank has ended the round. If a rank
        breaks off (``decide`` raises, or an interrupt), that is the failure on the other ranks.
        """
        try:
            if self._board.rank == 0:
                return self._lead(decide, timeout_s, silent or self.silence, given_up, watch=watch)
            return self._follow(timeout_s + grace_s, silent or self.silence, given_up)
        except BoardLost:
            raise  # so it can't tell the other ranks
        except BaseException as error:
            with contextlib.suppress(HoldfastError):
                self.announce(RankFailure.of(error, rank=self._board.rank))
            raise

    def _lead(
        self,
        decide: Callable[[list[bytes]], bytes | RankFailure],
        timeout_s: float,
        silent: Callable[[dict[int, bytes], float], RankFailure],
        given_up: Callable[[], RankFailure | None] | None,
        *,
        watch: bool,
    ) -> bytes | RankFailure:
        words = self._gather(timeout_s, given_up, watch=watch)
        if isinstance(words, RankFailure):
            return words
        if len(words) < self._board.world:
            return self.announce(silent(words, timeout_s))
        self._all_spoke()
        return self.announce(decide([words[rank] for rank in range(self._board.world)]))

    def _follow(
        self,
        timeout_s: float,
        silent: Callable[[dict[int, bytes], float], RankFailure],
        given_up: Callable[[], RankFailure | None] | None,
    ) -> bytes | RankFailure:
        found = self._hear(timeout_s, given_up)
        if found is None:
            found = self.announce(silent(self.words(), timeout_s))
        if not isinstance(found, RankFailure):
            self._all_spoke()
        return found

    def share(self, answer: bytes | RankFailure | None, *, timeout_s: float) -> bytes | RankFailure:
        """Return rank 0's ``answer`` on every rank; the others pass None and post no messages."""
        if answer is not None:
            return self.announce(answer)
        found = self._hear(timeout_s, None)
        if found is None:
            others = dict.fromkeys(range(1, self._board.world), b"")
            return self.announce(self.silence(others, timeout_s))
        return found

    def forget(self) -> None:
        """Delete its keys from the board, once no rank reads them any more."""
        self._board.delete_list(self._key)
        self._board.delete(self._answer)

    def _gather(
        self, timeout_s: float, given_up: Callable[[], RankFailure | None] | None = None, *, watch: bool = False
    ) -> dict[int, bytes] | RankFailure:
        """Return the messages when all ranks have posted or time is up; or the reason to stop waiting, if first."""
        board = self._board
        count = board.world
        deadline = time.monotonic() + timeout_s

        def look(wait_s: float) -> list[bytes] | None:
            return board.wait_entries(
                self._key,
                count,
                timeout_s=wait_s,
                waiting_for="the words of all ranks",
                unless=self._answer if watch else None,
            )

        while True:
            try:
                entries = _wait(look, deadline, given_up)
            except DeadlineExceeded:
                return self.words()  # some may just have arrived
            if isinstance(entries, RankFailure):
                return entries
            if entries is None:
                ended = self.ended()
                assert isinstance(ended, RankFailure), "only rank 0 ends a round in an answer"
                return ended
            words = dict(map(_WORD.decode, entries))
            if len(words) == board.world:
                return words
            count = len(entries) + board.world - len(words)  # a rank has posted twice

    def _hear(self, timeout_s: float, given_up: Callable[[], RankFailure | None] | None) -> bytes | RankFailure | None:
        """Wait for the end of the round; None if it doesn't end in time."""

        def look(wait_s: float) -> bytes:
            return self._board.get(self._answer, timeout_s=wait_s, waiting_for="the answer of rank 0")

        try:
            found = _wait(look, time.monotonic() + timeout_s, given_up)
        except DeadlineExceeded:
            return None
        return found if isinstance(found, RankFailure) else _decoded(found)


class Rounds:
    """One rank's part in the rounds of ``topic``, one after the other."""

    def __init__(self, board: Board, topic: str, *, had_not: str = "answered", advice: str = _ADVICE) -> None:
        self._board = board
        self._topic = topic
        self._had_not = had_not
        self._advice = advice
        self._first = 0
        """Number of the first round that may still be on the board."""
        self.number = 0
        """Number of the next round."""

    def next(self) -> Round:
        """Return the next round; every rank takes part in all of them, even if one fails."""
        self.number += 1
        return self._round(self.number - 1)

    def skip_failed(self) -> int:
        """Skip rounds that failed before this rank reached them; return their number."""
        first = self.number
        while isinstance(self._round(self.number).ended(), RankFailure):
            self.number += 1
        return self.number - first

    def leave(self) -> bool:
        """Take part in no further round; the last rank to leave deletes the remaining keys, and gets True.

        Doesn't wait and never raises: a lost board needs no cleaning.
        """
        board, count = self._board, f"{self._topic}/left"
        try:
            if board.add(count) < board.world:
                return False
            for number in range(self._first, self.number):
                self._round(number).forget()
            board.delete(count)
        except HoldfastError:
            return False
        return True

    def _round(self, number: int) -> Round:
        return Round(
            self._board,
            f"{self._topic}/{number}",
            had_not=self._had_not,
            advice=self._advice,
            all_spoke=functools.partial(self._sweep, number),
        )

    def _sweep(self, number: int) -> None:
        """Delete rounds before ``number`` on rank 0: all ranks have posted in it, so none reads earlier ones."""
        for left in range(self._first, number) if self._board.rank == 0 else ():
            self._round(left).forget()
        self._first = number


def _wait(
    look: Callable[[float], _T], deadline: float, given_up: Callable[[], RankFailure | None] | None
) -> _T | RankFailure:
    """Call ``look`` in short slices until it returns a value, and ``given_up`` between them."""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        if given_up is None:
            return look(left_s)
        try:
            return look(min(_SLICE_S, left_s))
        except DeadlineExceeded:
            reason = given_up()
            if reason is not None:
                return reason
            if left_s <= _SLICE_S:
                raise


def _decoded(value: bytes) -> bytes | RankFailure:
    return _FAILURE.decode(value[1:]) if value[:1] == _FAILED else unpack(value)
