"""One step for all ranks to save at when a signal says that this machine is about to be taken away. Torch-free.

Signals arrive at different moments, or at one rank only; ranks may be a step apart. So:

    announce   a rank that gets a signal writes it to one key of the board. The others look at that key now and then,
               in the background: training itself asks nobody anything
    bid        a rank that knows tells how often its training has called `CheckpointManager.step`, and lets it not
               return from its next call until the target is known: a second at most, once
    target     the call after the highest bid: nobody has made it yet, and nobody passes it unknowing
    save       at that call every rank saves the same step and waits until it is published
    leave      then what the signal would have done without us: the handler that was installed before is called, and
               training goes on if it returns (so it does if the signal was ignored); else `SystemExit(128 + signal)`

A further signal meanwhile changes nothing; a third one, or the deadline, ends the process at once as the signal does
by default, for whoever sent it wants it gone. What is staged and verified by then, the engine finishes.

Guarantees: without a signal a call of `step` costs a counter and a lock that nobody holds; nothing is saved at a step
that some rank doesn't save at; a rank that has closed its manager is not waited for.
Assumes: every rank calls `step` alike, and has the same signals configured.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import events
from holdfast.errors import HoldfastError
from holdfast.signals import SignalCatcher, checked_signals, end_process, name_of, require_main_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordination import Board
    from holdfast.handle import SaveHandle

_log = logging.getLogger("holdfast")
LOOK_S: Final = 1.0
LOOKS_PER_S: Final = 2_000
"""What all ranks together may ask of the Store for nothing."""
SIGNALS_MAX: Final = 3
"""So many signals end the process at once."""
_RETRY_S: Final = 1.0
_JOIN_S: Final = 5.0
_NEVER: Final = 0
"""The target where a rank makes no further call."""
_BID: Final = msgspec.msgpack.Decoder(tuple[int, int])


class Preemption:
    """The agreement of one session on when to save for a signal. Made, started and closed on the main thread.

    timeout_s: from the signal until the process ends, whatever it is doing.
    """

    def __init__(self, board: Board, signals: object, timeout_s: float) -> None:
        require_main_thread()
        self._board = board.clone()
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self._catcher = SignalCatcher(checked_signals(signals), self._arrived)
        self._changed = threading.Condition()
        """Guards all below; never taken by a signal handler."""
        self._calls = 0
        self._round = 0
        self._received: int | None = None
        """The signal that this rank got itself in this round."""
        self._signum: int | None = None
        """The signal of this round, once it is known."""
        self._bid: int | None = None
        self._target: int | None = None
        self._deadline = 0.0
        self._leaving = False
        """The program is on its way out, for a signal that was obeyed."""
        self._closed = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-preemption", daemon=True)

    def start(self) -> None:
        """Take the signals over, from now on until `close`."""
        self._catcher.install()
        self._thread.start()

    # Training thread. --------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether the call of `step` that this is part of is the one to save at. Once in each call."""
        with self._changed:
            self._calls += 1
            if self._bid is None:
                return False
            while self._target is None and not self._closed.is_set():
                self._changed.wait(1.0)  # not for ever: the process has a deadline by now
            return self._target == self._calls

    def save(self, step: int, start: Callable[[], SaveHandle]) -> SaveHandle:
        """Save ``step`` by ``start``, wait until it is published, then do as the signal says: see the module.

        Returns the handle where training is to go on. A save that fails is logged, and ends nothing but itself.
        """
        signum, deadline = self._signum, self._deadline
        if signum is None:
            raise AssertionError("no signal, and yet it was due")
        began = time.monotonic()
        error: BaseException | None
        try:
            handle = start()
            error = handle.exception(max(0.0, deadline - time.monotonic()))
        except HoldfastError as failed:
            handle, error = None, failed
        if error is not None and time.monotonic() >= deadline:
            end_process(signum, f"its time is over (step {step}: {error})")
        kind, name = ("saved" if error is None else "failed"), name_of(signum)
        if error is None:
            _log.warning("%s: step %d was saved in %.1f s", name, step, time.monotonic() - began)
        else:
            _log.error("%s: step %d could not be saved: %s", name, step, error, exc_info=error)
        events.emit(f"signal.{kind}", step=step, rank=self._board.rank, signal=name)
        if self._catcher.is_default(signum):
            self._leaving = True
            raise SystemExit(128 + signum) from error
        self._begin_round()
        self._catcher.chain(signum)
        if handle is None:
            raise error or AssertionError("neither saved nor failed")
        return handle

    def _begin_round(self) -> None:
        """Training goes on: the next signal is a new one."""
        with self._changed:
            self._round += 1
            self._received = self._signum = self._bid = self._target = None
            self._catcher.reset()
            self._changed.notify_all()

    def retire(self) -> None:
        """No call of `step` follows on this rank, so nobody waits for it. Doesn't wait for others; never raises."""
        board, key = self._board, self._key
        with self._changed:
            bid, self._bid = self._bid, -1
            self._target = self._target or _NEVER
            self._changed.notify_all()
        try:
            if board.rank == 0:
                board.compare_set(f"{key}/target", b"%d" % _NEVER)  # nobody else would set it
            elif bid is None:
                board.append(f"{key}/bids", msgspec.msgpack.encode((board.rank, -1)))
            if board.world > 1 and board.add("preempt/left") == board.world:
                for number in range(self._round + 1):
                    board.delete_list(f"preempt/{number}/bids")
                    for name in ("wanted", "target"):
                        board.delete(f"preempt/{number}/{name}")
                board.delete("preempt/left")
        except HoldfastError as error:
            _log.debug("rank %d could not say that it saves for no further signal: %s", board.rank, error)

    def close(self) -> None:
        """Give the signals back; idempotent."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._news.set()
        self._board.close()
        self._catcher.restore()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def leave(self) -> None:
        """After `close`: do what a signal that this rank got, and did nothing about, would have done."""
        signum, self._received = self._received, None
        if signum is None or self._leaving or os.getpid() != self._owner:
            return
        error = sys.exc_info()[1]
        if error is not None:  # would be lost to an exit
            _log.error("%s: while closing: %s", name_of(signum), error, exc_info=error)
        if self._catcher.is_default(signum):
            raise SystemExit(128 + signum)
        self._catcher.chain(signum)

    # Background. -------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> str:
        return f"preempt/{self._round}"

    def _arrived(self, signum: int, count: int) -> None:
        """On the catcher's thread."""
        name = name_of(signum)
        if count >= SIGNALS_MAX:
            end_process(signum, f"{count} signals have come")
        if count > 1:
            _log.warning("%s again; the save for the first goes on, one more ends this process at once", name)
            return
        _log.warning("%s: the step being trained is saved before this process ends, if it ends in time", name)
        with self._changed:
            self._received = signum
        self._news.set()
        self._catcher.end_at(time.monotonic() + self._timeout_s, signum)
        events.emit("signal.received", rank=self._board.rank, signal=name)

    def _run(self) -> None:
        world = self._board.world
        look_s = None if world == 1 else max(LOOK_S, world / LOOKS_PER_S)
        told = False
        while not self._closed.is_set():
            self._news.wait(look_s)
            self._news.clear()
            try:
                self._look()
                told = False
            except HoldfastError as error:
                if self._closed.is_set() or self._received is None:
                    continue
                if not told:
                    told = True
                    _log.error("agreeing on a step to save for a signal goes wrong, it is tried again: %s", error)
                self._closed.wait(_RETRY_S)
                self._news.set()

    def _look(self) -> None:
        """Learn of a signal, of this rank or another; then agree on the call to save at."""
        board = self._board
        with self._changed:
            key, received = self._key, self._received
            if self._target is not None or self._closed.is_set():
                return
        if received is not None:
            signum = int(board.compare_set(f"{key}/wanted", b"%d" % received))
        else:
            found = board.try_get(f"{key}/wanted")
            if found is None:
                return
            signum = int(found)
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            if self._key != key or self._bid == -1:
                return
            if self._signum is None:
                self._signum, self._deadline = signum, deadline
                self._bid = self._calls
            bid, left_s = self._bid, max(1.0, self._deadline - time.monotonic())
        self._catcher.end_at(deadline, signum)
        board.append(f"{key}/bids", msgspec.msgpack.encode((board.rank, bid)))
        if board.rank == 0:
            told = board.compare_set(f"{key}/target", b"%d" % self._count(key, left_s))
        else:
            waiting_for = "rank 0 to choose the step to save at"
            told = board.get(f"{key}/target", timeout_s=left_s, waiting_for=waiting_for)
        with self._changed:
            if self._key == key and self._target is None:
                self._target = int(told)
                self._changed.notify_all()

    def _count(self, key: str, timeout_s: float) -> int:
        world = self._board.world
        waiting_for = "every rank to say how far it is"
        data = self._board.wait_entries(f"{key}/bids", world, timeout_s=timeout_s, waiting_for=waiting_for)
        bids = [bid for _, bid in map(_BID.decode, data or ())]
        return _NEVER if min(bids) < 0 else max(bids) + 1
