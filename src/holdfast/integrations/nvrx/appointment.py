"""At which call all ranks finalize a request: an appointment, made in the background.

Finalize functions may use collectives of the group that training uses, so all ranks must run them at the same point of
the program: in the same call of `AsyncCallsQueue.maybe_finalize_async_calls`. Ranks make that call in step, but not at
the same time: when one learns that all have ended, another may be calls ahead. So they agree on a call that nobody has
made yet, in rounds over the group's Store, on a background thread of each rank:

    word       every rank   whether its function has ended, and how; the number of its newest call; the call that it
                            has noted. As long as the function is at work, such a word is said every few seconds
    answer     rank 0       once all functions have ended: propose call K, later than all; or, once every rank has
                            noted K before making it: go

A rank that learns of K too late doesn't note it; the next proposal is further ahead. The training thread looks at one
integer a call. In call K it waits for the answer, which has usually arrived. A call that blocks counts up to K.

Guarantees: all ranks finalize a request in the same call, or raise the same error, a grace after a function had to end,
or ``patience_s`` after a rank fell silent: it died, or has not made the calls that others have. A function's failure is
every rank's. No collective is used.
Assumes: all ranks make the same calls with a request pending.
Does not: notice a rank that falls silent after all have noted the call. Then finalize functions meet their own
deadlines, such as that of the process group.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.coordination.failure import RankFailure
from holdfast.coordination.group import open_group
from holdfast.coordination.round import ANSWER_GRACE_S, Rounds
from holdfast.coordination.store import BoardLost
from holdfast.coordination.votes import Votes
from holdfast.engine.at_exit import end_at_exit
from holdfast.errors import DeadlineExceeded, HoldfastError, SaveFailed

if TYPE_CHECKING:
    from holdfast.integrations.nvrx.worker import Running

_log = logging.getLogger("holdfast.nvrx")
_LEARN_S: Final = 5.0
"""How long rank 0, whose process may host the Store, stays until the others have read the last answer."""
_STOP_S: Final = 5.0
_LOOK_S: Final = 0.5
_AT_WORK_S: Final = 5.0
"""How often a rank says that its function is at work."""
_NONE: Final = -1


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """A rank's word. calls: its newest call; noted: the call that it has an appointment for."""

    request: int
    calls: int
    noted: int
    is_at_work: bool
    failure: RankFailure | None = None


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    call: int
    goes: bool
    failure: RankFailure | None = None


_WORD: Final = msgspec.msgpack.Decoder(_Word)
_ANSWER: Final = msgspec.msgpack.Decoder(_Answer)


class Appointments:
    """The appointments of one queue on one rank. Opened by all ranks together.

    timeout_s: how long a function may take. patience_s: how long to wait for silent ranks, here and later.
    """

    def __init__(self, process_group: Any | None, *, timeout_s: float, patience_s: float) -> None:
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        group = open_group(process_group, purpose="nvrx", timeout=patience_s)
        self.rank, self.world = group.rank, group.world
        self._board = group.board
        self._rounds = Rounds(self._board, "appointments", had_not="called maybe_finalize_async_calls")
        try:
            votes = Votes(self._board)
            votes.raise_together(timeout_s=patience_s)
            votes.leave()
        except BaseException:
            self._board.close()
            raise
        self._changed = threading.Condition()
        self._calls = 0
        self._noted = _NONE
        self._answered: _Answer | None = None
        """How the appointment of the request in work ended."""
        self._request = _NONE
        self._thread: threading.Thread | None = None
        self._stopped = ""
        self._margin = 1
        self.is_over = False
        """True once ranks have failed to agree: all of them begin anew with other appointments."""
        self._to_learn = 0
        """How often the other ranks will have said that they have read an answer."""
        self._stay_at_exit = end_at_exit(self, lambda forgotten, _: forgotten.close("the interpreter exits"))

    def meet(self, request: int, running: Running, *, blocking: bool) -> tuple[bool, RankFailure | None]:
        """Make a call: return whether all ranks finalize ``request`` in it, and a rank's failure, if any.

        blocking: wait until they do. Raises `DeadlineExceeded` where other ranks are silent.
        """
        limit_s = self._timeout_s + self._patience_s + ANSWER_GRACE_S + _LEARN_S
        deadline = time.monotonic() + limit_s + _STOP_S
        with self._changed:
            if self._request != request:
                self._begin(request, running)
            self._calls += 1
            while self._answered is None and (blocking or self._noted == self._calls):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"ranks had not agreed to finalize request {request} within {limit_s:g} s: all ranks call "
                        "maybe_finalize_async_calls alike; look at the logs of the others",
                        waited_for="the other ranks",
                        timeout_s=limit_s,
                    )
                self._changed.wait(_LOOK_S)
            answer = self._answered
            if answer is None or (answer.call > self._calls and not blocking):
                return False, None
            self._calls = max(self._calls, answer.call)
            self.is_over = not answer.goes
            self._request, self._noted, self._answered = _NONE, _NONE, None
            return True, answer.failure

    def close(self, why: str) -> None:
        """Leave: other ranks that still wait for this one fail with ``why``. Idempotent."""
        self._stopped = self._stopped or why
        thread = self._thread
        if thread is not None:
            thread.join(_STOP_S + _LEARN_S)
        self._rounds.leave()
        self._board.close()
        self._stay_at_exit()

    # On the background thread. -----------------------------------------------------------------------------------

    def _begin(self, request: int, running: Running) -> None:
        earlier = self._thread
        self._request, self._noted, self._answered = request, _NONE, None
        self._thread = threading.Thread(
            target=self._agree, args=(request, running, earlier), name="holdfast-nvrx-ranks", daemon=True
        )
        self._thread.start()

    def _agree(self, request: int, running: Running, earlier: threading.Thread | None) -> None:
        if earlier is not None:
            earlier.join()
        try:
            answer = self._rounds_of(request, running)
        except HoldfastError as error:
            answer = _Answer(_NONE, goes=False, failure=RankFailure.of(error, rank=self.rank))
        with self._changed:
            self._answered = answer
            self._changed.notify_all()
        if answer.call != _NONE:
            self._stay_until_learnt()

    def _rounds_of(self, request: int, running: Running) -> _Answer:
        deadline = time.monotonic() + self._timeout_s
        while True:
            is_at_work = not self._wait_for(running, deadline)
            if self._stopped and is_at_work:
                self._rounds.next().announce(self._given_up())
                return _Answer(_NONE, goes=False, failure=self._given_up())
            failure = running.failure
            if is_at_work and time.monotonic() > deadline:
                is_at_work, failure = False, late(self.rank, request, self._timeout_s)
            round_ = self._rounds.next()
            with self._changed:
                word = _Word(request, self._calls, self._noted, is_at_work, failure)
            round_.say(msgspec.msgpack.encode(word))
            found = round_.wait(
                self._decide,
                timeout_s=self._patience_s,
                given_up=lambda: self._given_up() if self._stopped else None,
                watch=True,
            )
            if isinstance(found, RankFailure):
                round_.announce(found)
                return _Answer(_NONE, goes=False, failure=found)
            answer = _ANSWER.decode(found)
            if answer.goes:
                return answer
            if answer.call != _NONE:
                self._note(answer.call)

    def _wait_for(self, running: Running, deadline: float) -> bool:
        """Wait a few seconds for the end of a function, or until this rank leaves; return whether it has ended."""
        until = min(time.monotonic() + min(_AT_WORK_S, self._patience_s / 4), deadline)
        while not running.wait(_LOOK_S):
            if self._stopped or time.monotonic() > until:
                return False
        return True

    def _note(self, call: int) -> None:
        with self._changed:
            self._noted = call if self._calls < call else _NONE
            self._changed.notify_all()

    def _decide(self, said: list[bytes]) -> bytes | RankFailure:
        """Answer the words of all ranks, on rank 0."""
        words = [_WORD.decode(word) for word in said]
        mismatch = _mismatch(words)
        if mismatch is not None:
            return RankFailure.of(mismatch, rank=0)
        if any(word.is_at_work for word in words):
            return msgspec.msgpack.encode(_Answer(_NONE, goes=False))
        noted = {word.noted for word in words}
        failure = next((word.failure for word in words if word.failure is not None), None)
        if len(noted) == 1 and _NONE not in noted:
            self._margin = max(1, self._margin // 2)
            return msgspec.msgpack.encode(_Answer(noted.pop(), goes=True, failure=failure))
        if noted != {_NONE}:
            self._margin *= 2  # a rank was faster than the last proposal
        call = max(word.calls for word in words) + self._margin
        return msgspec.msgpack.encode(_Answer(call, goes=False))

    def _given_up(self) -> RankFailure:
        return RankFailure.of(
            SaveFailed(f"rank {self.rank} has given up the request: {self._stopped}", step=None, rank=self.rank),
            rank=self.rank,
        )

    def _stay_until_learnt(self) -> None:
        """Stay until all ranks have read the answer: the Store may go with rank 0's process."""
        with contextlib.suppress(BoardLost):
            if self.rank != 0:
                self._board.add("learnt")
                return
            deadline = time.monotonic() + _LEARN_S
            self._to_learn += self.world - 1
            while self._board.add("learnt", 0) < self._to_learn and time.monotonic() < deadline:
                time.sleep(0.005)


def _mismatch(words: list[_Word]) -> SaveFailed | None:
    """Return the error if ranks don't call alike."""
    for rank, word in enumerate(words):
        if word.request != words[0].request:
            return SaveFailed(
                f"unmatched async calls: rank 0 finalizes request {words[0].request}, rank {rank} request "
                f"{word.request}; all ranks schedule the same requests, and finalize them with no_dist=False",
                step=None,
                rank=rank,
            )
    return None


def late(rank: int, request: int, timeout_s: float) -> RankFailure:
    """Return the failure of a request whose function has not ended in time."""
    error = DeadlineExceeded(
        f"rank {rank}: the function of request {request} had not ended after {timeout_s:g} s: look at what it waits "
        "for, or allow more by AsyncCallsQueue(timeout=)",
        waited_for=f"the function of request {request}",
        timeout_s=timeout_s,
    )
    return RankFailure.of(error, rank=rank)
