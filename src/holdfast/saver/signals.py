"""Signals to save on: noticed at once, whatever the training thread is doing, and given back later. Torch-free.

Python runs a handler only when the main thread is back in the interpreter, which a collective or a kernel may delay for
long. So the interpreter's wake-up descriptor also tells a thread of ours as soon as the system delivers a signal: that
thread can announce it, or end the process, while the main thread is still stuck.

Guarantees: handlers only count, so they may interrupt anything. `restore` reinstalls previous handlers and the previous
wake-up descriptor, which is fed meanwhile. A forked child restores at once, and never takes its parent's signals for
its own. Signals within `BURST_S` of one another count as one: launchers and schedulers often send one twice.
Assumes: installed on the main thread, as Python requires. A handler installed later that calls ours after `restore`
gets the previous handler's effect, not a save.
Does not: decide what follows a signal; ``saver.preemption`` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError
from holdfast.validation import FIELD, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

_log = logging.getLogger("holdfast")
BURST_S: Final = 0.1
_JOIN_S: Final = 5.0
_LAST_WORDS_S: Final = 2.0


def end_process(signum: int, why: str) -> None:
    """End this process as an unhandled ``signum`` does. Any thread; doesn't return."""
    _log.error("%s: %s, this process ends now", name_of(signum), why)
    # Not `signal.signal`: it needs the main thread, which may be stuck here.
    with contextlib.suppress(OSError, AttributeError):
        to_default = ctypes.CDLL(None).signal
        to_default.argtypes, to_default.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        to_default(signum, None)
        os.kill(os.getpid(), signum)
        time.sleep(_LAST_WORDS_S)
    os._exit(128 + signum)


def require_main_thread() -> None:
    """Raise `ConfigError` on a thread that can't install handlers."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"{FIELD} needs the main thread, which alone may install signal handlers; this is "
            f"{threading.current_thread().name!r}: make the CheckpointManager there, or leave {FIELD} empty",
            field=FIELD,
        )


class SignalCatcher:
    """Calls ``on_arrival(signum, count)`` on its own thread for each of ``signals`` that arrives.

    ``count``: arrivals since the start or the last `reset`. Call `install`, `restore` and `chain` on the main thread;
    the rest is thread-safe.
    """

    def __init__(self, signals: Iterable[int], on_arrival: Callable[[int, int], None]) -> None:
        self._signals = frozenset(map(int, signals))
        self._on_arrival = on_arrival
        self.previous: dict[int, Any] = {}
        self._installed = self.closed = False
        self._wake_out = self.wake_fd = -1
        self.outer: SignalCatcher | int = -1
        """Previous owner of the wake-up descriptor: another catcher, or the descriptor."""
        self._lock = threading.Lock()
        """Never taken by the handler."""
        self._handled: list[int] = []
        """Signals whose handler has run, in case other code replaced the wake-up descriptor."""
        self._wired = self._taken = self._count = 0
        self._last_at = float("-inf")
        self._end: tuple[float, int] | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-signals", daemon=True)

    def install(self) -> None:
        """Take over the signals. Raises `ConfigError` except on the main thread."""
        require_main_thread()
        self._wake_out, self.wake_fd = os.pipe()
        for fd in (self._wake_out, self.wake_fd):
            os.set_blocking(fd, False)
        try:
            self._thread.start()
        except BaseException:
            self._close_pipe()
            raise
        self._installed = True
        _catchers.append(self)
        outer_fd = signal.set_wakeup_fd(self.wake_fd, warn_on_full_buffer=False)
        self.outer = next((other for other in _catchers if other.wake_fd == outer_fd >= 0), outer_fd)
        for signum in self._signals:
            self.previous[signum] = signal.signal(signum, self._handle)

    def restore(self) -> None:
        """Give the signals back; idempotent.

        On another thread than the main one, our handlers stay until it is called there, and act like the previous
        handlers.
        """
        if not self._installed:
            return
        self.closed = True
        if self in _catchers and threading.current_thread() is threading.main_thread():
            self._give_back()
            _catchers.remove(self)
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        if self not in _catchers and not self._thread.is_alive() and self.wake_fd >= 0:
            self._close_pipe()

    def end_at(self, deadline: float, signum: int) -> None:
        """End the process by ``signum`` at ``deadline`` (monotonic) unless `reset` or `restore` comes first.

        Only the first call counts.
        """
        with self._lock:
            self._end = self._end or (deadline, signum)
        self._wake()

    def reset(self) -> None:
        """Forget past arrivals and the deadline."""
        with self._lock:
            self._read_wire()
            self._handled.clear()
            self._wired = self._taken = self._count = 0
            self._end = None

    def is_default(self, signum: int) -> bool:
        """Return True if ``signum`` would end the process without this handler."""
        previous = self._before(signum)
        return previous is not signal.SIG_IGN and not callable(previous)

    def chain(self, signum: int) -> None:
        """Call the handler that was installed before ours, if any."""
        previous = self._before(signum)
        if callable(previous):
            previous(signum, inspect.currentframe())

    # Internal. ---------------------------------------------------------------------------------------------------

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        """Count a signal on the main thread, between any two instructions; takes no lock and logs nothing."""
        if not self.closed:
            self._handled.append(signum)
            self._wake()
        elif self.is_default(signum):
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        else:
            self.chain(signum)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the reader wakes up anyway; closed: there is no reader
            os.write(self.wake_fd, b"\0")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        while not self.closed:
            end = self._end
            poll.poll(None if end is None else max(0.0, end[0] - time.monotonic()) * 1000 + 1)
            arrival = self._take()
            if arrival is not None and not self.closed:
                self._on_arrival(*arrival)
            end = self._end
            if end is not None and time.monotonic() >= end[0] and not self.closed:
                end_process(end[1], "its time is over")

    def _take(self) -> tuple[int, int] | None:
        """Count arrived signals; return the latest and the count, or None if there is no new one."""
        with self._lock:
            wired = self._read_wire()
            handled = list(self._handled)
            arrived = max(self._wired, len(handled))
            if arrived <= self._taken:
                return None
            self._taken = arrived
            now, before = time.monotonic(), self._last_at
            self._last_at = now
            if self._count and now - before < BURST_S:
                return None
            self._count += 1
            return (wired or handled[-1:])[0], self._count

    def _read_wire(self) -> list[int]:
        """Read our signals from the wake-up descriptor, and pass every byte on to its previous owner."""
        data = b""
        with contextlib.suppress(OSError):
            while piece := os.read(self._wake_out, 4096):
                data += piece
        foreign = bytes(number for number in data if number)
        outer = self._outer_now()
        if foreign and isinstance(outer, int) and outer >= 0:  # another catcher is told by our handler, when it runs
            with contextlib.suppress(OSError):
                os.write(outer, foreign)
        ours = [number for number in data if number in self._signals]
        self._wired += len(ours)
        return ours

    def _before(self, signum: int) -> Any:
        """Return the disposition before ours, skipping handlers of ours that were restored meanwhile."""
        previous = self.previous.get(signum)
        while isinstance(owner := getattr(previous, "__self__", None), SignalCatcher) and owner.closed:
            previous = owner.previous.get(signum)
        return previous

    def _outer_now(self) -> SignalCatcher | int:
        outer = self.outer
        while isinstance(outer, SignalCatcher) and outer.closed:
            outer = outer.outer
        return outer

    def _give_back(self) -> None:
        for signum in self.previous:
            if signal.getsignal(signum) == self._handle:
                previous = self._before(signum)
                # A handler that was not installed by Python can't be reinstalled by Python.
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        current = signal.set_wakeup_fd(-1)
        outer = self._outer_now()
        back = current if current != self.wake_fd else outer.wake_fd if isinstance(outer, SignalCatcher) else outer
        if back >= 0:
            with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                signal.set_wakeup_fd(back, warn_on_full_buffer=False)

    def _close_pipe(self) -> None:
        fds, self._wake_out, self.wake_fd = (self._wake_out, self.wake_fd), -1, -1
        for fd in fds:
            os.close(fd)

    def let_go_in_child(self) -> None:
        """Restore in a forked child, which isn't meant by the signals; doesn't lock: the holder may not exist here."""
        self.closed = True
        self._give_back()
        self._close_pipe()


_catchers: list[SignalCatcher] = []
"""Catchers that have handlers installed, newest last."""


def _let_go_in_child() -> None:
    while _catchers:
        _catchers.pop().let_go_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
