"""Agree on one step at which all ranks save when a signal announces the end of this machine. Torch-free.

Signals arrive at different moments, or on one rank only, and ranks may be a step apart. So:

    announce   a rank that gets a signal writes it to one key of the board. The others poll that key in the background:
               training itself asks no other rank
    bid        a rank that knows posts how often its training has called `CheckpointManager.step`. Its next call doesn't
               return until the target is known: at most about a second, once
    target     the call after the highest bid: no rank has made it yet, and no rank can pass it without knowing
    save       at that call every rank saves the same step and waits until it is published
    leave      then the signal takes its previous effect: the handler installed before is called, and training continues
               if it returns or if the signal was ignored; else `SystemExit(128 + signal)`

A second signal meanwhile changes nothing. A third one, or the deadline, ends the process at once, as the signal does by
default. The engine still finishes what is staged and verified by then.

Guarantees: without a signal, a call of `step` costs a counter and an uncontended lock; no rank saves for a signal at a
step that another rank doesn't save; a rank that has closed its manager is not waited for.
Assumes: every rank calls `step` alike, and configures the same signals.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from holdfast import events
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.round import Rounds
from holdfast.errors import HoldfastError
from holdfast.saver.signals import SignalCatcher, end_process, require_main_thread
from holdfast.validation import checked_signals, name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordination.board import Board
    from holdfast.saver.handle import SaveHandle, SaveStats

_log = logging.getLogger("holdfast")
LOOK_S: Final = 1.0
LOOKS_PER_S: Final = 2_000
"""Upper limit on polls per second by all ranks together while there is no signal."""
SIGNALS_MAX: Final = 3
"""This many signals end the process at once."""
TORCHELASTIC_GRACE_S: Final = 30.0
"""How long torchrun waits between the signal that it passes on to its workers and SIGKILL."""
_RETRY_S: Final = 1.0
_JOIN_S: Final = 5.0
_NEVER: Final = 0
"""The target if a rank makes no further call."""


class Preemption:
    """One session's agreement on when to save for a signal. Make, start and close it on the main thread.

    timeout_s: from the signal until the process is ended, whatever it is doing.
    """

    def __init__(self, board: Board, signals: object, timeout_s: float) -> None:
        require_main_thread()
        self._board = board.clone()
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        self._catcher = SignalCatcher(checked_signals(signals), self._arrived)
        self._changed = threading.Condition()
        """Guards all attributes below; never taken by a signal handler."""
        self._calls = 0
        self._rounds = Rounds(self._board, "preempt", had_not="said how many steps it has made")
        self._round = self._rounds.next()
        self._received: int | None = None
        """The signal that this rank itself received in this round."""
        self._signum: int | None = None
        """The signal of this round, once known."""
        self._bid: int | None = None
        self._target: int | None = None
        self._deadline = 0.0
        self._is_warned = False
        self._leaving = False
        """The program is exiting because of a signal."""
        self._closed = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-preemption", daemon=True)

    def note_saved(self, stats: SaveStats) -> None:
        """Warn, once, if a save that takes as long as this one did would not end before the process is killed."""
        took_s = stats.staging_s + stats.persist_s + stats.commit_s
        limit_s, whose = self._timeout_s, "signal_timeout"
        if "TORCHELASTIC_RUN_ID" in os.environ and limit_s > TORCHELASTIC_GRACE_S:
            limit_s, whose = TORCHELASTIC_GRACE_S, "torchrun's time between SIGTERM and SIGKILL"
        if took_s <= limit_s or self._is_warned:
            return
        self._is_warned = True
        _log.warning(
            "a save took %.3g s (%d bytes a rank), and %s is %g s: a save for a signal would be lost. Have the "
            "scheduler signal earlier than that (such as Slurm's --signal=USR1@%d), with SIGUSR1 in save_on_signal",
            *(took_s, stats.bytes, whose, limit_s, int(took_s * 2) + 1),
        )

    def start(self) -> None:
        """Take over the signals until `close`."""
        self._catcher.install()
        self._thread.start()

    # Training thread. --------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return True if this call of `step` is the one to save at. Called once in each call."""
        with self._changed:
            self._calls += 1
            if self._bid is None:
                return False
            while self._target is None and not self._closed.is_set():
                self._changed.wait(1.0)  # bounded: the process has a deadline by now
            return self._target == self._calls

    def save(self, step: int, start: Callable[[], SaveHandle]) -> SaveHandle:
        """Save ``step`` by calling ``start``, wait until it is published, then do what the signal asks: see the module.

        Returns the handle if training continues. A failed save is logged and has no other effect.
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
        """Prepare for the next signal: training continues."""
        with self._changed:
            self._round = self._rounds.next()
            self._received = self._signum = self._bid = self._target = None
            self._catcher.reset()
            self._changed.notify_all()

    def retire(self) -> None:
        """Announce that this rank makes no further call of `step`. Doesn't wait; never raises."""
        board = self._board
        with self._changed:
            bid, self._bid = self._bid, -1
            self._target = self._target or _NEVER
            self._changed.notify_all()
        try:
            if board.rank == 0:
                self._round.announce(b"%d" % _NEVER)  # no other rank would
            elif bid is None:
                self._round.say(b"-1")
            if board.world > 1 and self._rounds.leave():
                for number in range(self._rounds.number):
                    board.delete(_wanted(number))
        except HoldfastError as error:
            _log.debug("rank %d could not announce that it saves for no further signal: %s", board.rank, error)

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
        """After `close`: apply a signal that this rank received but didn't handle."""
        signum, self._received = self._received, None
        if signum is None or self._leaving or os.getpid() != self._owner:
            return
        error = sys.exc_info()[1]
        if error is not None:  # an exit would lose it
            _log.error("%s: while closing: %s", name_of(signum), error, exc_info=error)
        if self._catcher.is_default(signum):
            raise SystemExit(128 + signum)
        self._catcher.chain(signum)

    # Background. -------------------------------------------------------------------------------------------------

    def _arrived(self, signum: int, count: int) -> None:
        """Handle a signal, on the catcher's thread."""
        name = name_of(signum)
        if count >= SIGNALS_MAX:
            end_process(signum, f"{count} signals arrived")
        if count > 1:
            _log.warning("%s again; the save for the first continues, another signal ends this process at once", name)
            return
        _log.warning("%s: saving the current step before this process ends, if there is time", name)
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
                    _log.error("agreeing on a step to save for a signal failed, trying again: %s", error)
                self._closed.wait(_RETRY_S)
                self._news.set()

    def _look(self) -> None:
        """Learn of a signal from this rank or another, then agree on the call to save at."""
        board = self._board
        with self._changed:
            round_, wanted, received = self._round, _wanted(self._rounds.number - 1), self._received
            if self._target is not None or self._closed.is_set():
                return
        if received is not None:
            signum = int(board.compare_set(wanted, b"%d" % received))
        else:
            found = board.try_get(wanted)
            if found is None:
                return
            signum = int(found)
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            if self._round is not round_ or self._bid == -1:
                return
            if self._signum is None:
                self._signum, self._deadline = signum, deadline
                self._bid = self._calls
            bid = self._calls if self._bid is None else self._bid
            left_s = max(1.0, self._deadline - time.monotonic())
        self._catcher.end_at(deadline, signum)
        round_.say(b"%d" % bid)
        told = round_.wait(_target, timeout_s=left_s, grace_s=0.0)
        if isinstance(told, RankFailure):
            raise told.cause()
        with self._changed:
            if self._round is round_ and self._target is None:
                self._target = int(told)
                self._changed.notify_all()


def _wanted(number: int) -> str:
    """Return the key for the signal of round ``number``."""
    return f"preempt/{number}/wanted"


def _target(words: list[bytes]) -> bytes:
    """Return the call to save at, from each rank's number of calls so far; -1 stands for a rank that makes no more."""
    bids = list(map(int, words))
    return b"%d" % (_NEVER if min(bids) < 0 else max(bids) + 1)
