"""Signals that a run is to save on: noticed at once, wherever the training thread is, and given back. Torch-free.

A Python handler runs when the main thread is back in the interpreter, which a collective or a kernel may keep it from
for long. So the interpreter's wake-up descriptor tells a thread of ours too, the moment the system delivers a signal:
it can announce it, and end the process when it was asked for that, while the main thread is still stuck.

Guarantees: handlers only count, so they may interrupt anything. What was installed before (handlers and a wake-up
descriptor, which goes on being fed) is put back by `restore`, and at once in a forked child, which never takes its
parent's signals for its own. Signals that come within `BURST_S` of one another count as one: launchers and schedulers
often send the same one twice.
Assumes: installed on the main thread, as Python demands. Nobody who installs a handler later calls ours after `restore`
expecting a save: it then does what the one before ours would have done.
Does not: decide what follows a signal; ``preemption`` does.
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
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_log = logging.getLogger("holdfast")
FIELD: Final = "save_on_signal"
BURST_S: Final = 0.1
_JOIN_S: Final = 5.0
_LAST_WORDS_S: Final = 2.0
_REFUSED: Final = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "can't be caught"),
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"), "tells of a broken process"),
    **dict.fromkeys(("SIGTRAP", "SIGSYS"), "tells of a broken process"),
    **dict.fromkeys(("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH"), "ends no process"),
    **dict.fromkeys(("SIGTSTP", "SIGTTIN", "SIGTTOU"), "stops a process, it doesn't end it"),
    "SIGPIPE": "tells of a closed pipe",
}


def checked_signals(value: object) -> tuple[int, ...]:
    """The signals ``value`` names (one, or several: numbers, `signal.Signals` or names); `ConfigError` otherwise."""
    items = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    return tuple(dict.fromkeys(map(_checked_signal, items)))


def _checked_signal(value: object) -> int:
    found = value
    if isinstance(value, str):
        found = getattr(signal, value if value.startswith("SIG") else f"SIG{value}", None)
    if isinstance(found, bool) or not isinstance(found, int) or found not in signal.valid_signals():
        raise ConfigError(
            f"CheckpointConfig.{FIELD}: expected signals, as numbers, signal.Signals or names, found {value!r}",
            field=FIELD,
        )
    name = name_of(found)
    if name in _REFUSED:
        raise ConfigError(
            f"CheckpointConfig.{FIELD}: expected signals that ask a process to end, such as SIGTERM, SIGUSR1 or "
            f"SIGINT, found {name}, which {_REFUSED[name]}",
            field=FIELD,
        )
    return found if isinstance(found, signal.Signals) else _known(found)


def _known(number: int) -> int:
    try:
        return signal.Signals(number)
    except ValueError:
        return number  # a real-time signal, which has no name


def name_of(signum: int) -> str:
    known = _known(signum)
    return known.name if isinstance(known, signal.Signals) else f"signal {signum}"


def end_process(signum: int, why: str) -> None:
    """End this process as ``signum`` does where nobody handles it. Any thread; doesn't return."""
    _log.error("%s: %s, this process ends now", name_of(signum), why)
    # `signal.signal` is for the main thread, which may be stuck: that's why this is called.
    with contextlib.suppress(OSError, AttributeError):
        to_default = ctypes.CDLL(None).signal
        to_default.argtypes, to_default.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        to_default(signum, None)
        os.kill(os.getpid(), signum)
        time.sleep(_LAST_WORDS_S)
    os._exit(128 + signum)


def require_main_thread() -> None:
    """Raise `ConfigError` where no handler can be installed."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"{FIELD} needs the main thread, which alone may install signal handlers; this is "
            f"{threading.current_thread().name!r}: make the CheckpointManager there, or leave {FIELD} empty",
            field=FIELD,
        )


class SignalCatcher:
    """Calls ``on_arrival(signum, count)`` for each of ``signals`` that arrives, on a thread of its own.

    ``count`` is that of arrivals since the start or the last `reset`. `install`, `restore` and `chain` are for the main
    thread, the rest for any.
    """

    def __init__(self, signals: Iterable[int], on_arrival: Callable[[int, int], None]) -> None:
        self._signals = frozenset(map(int, signals))
        self._on_arrival = on_arrival
        self.previous: dict[int, Any] = {}
        self._installed = self.closed = False
        self._wake_out = self.wake_fd = -1
        self.outer: SignalCatcher | int = -1
        """Who had the wake-up descriptor before: one of us, or somebody else's descriptor."""
        self._lock = threading.Lock()
        """Never taken by the handler."""
        self._handled: list[int] = []
        """Signals whose handler has run, for the case that somebody has taken the wake-up descriptor."""
        self._wired = self._taken = self._count = 0
        self._last_at = float("-inf")
        self._end: tuple[float, int] | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-signals", daemon=True)

    def install(self) -> None:
        """Take the signals over. Raises `ConfigError` on any thread but the main one."""
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

        Off the main thread our handlers stay, until it is called there, and do what those before them would.
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

        The first call counts.
        """
        with self._lock:
            self._end = self._end or (deadline, signum)
        self._wake()

    def reset(self) -> None:
        """Forget what has arrived so far, and the deadline."""
        with self._lock:
            self._read_wire()
            self._handled.clear()
            self._wired = self._taken = self._count = 0
            self._end = None

    def is_default(self, signum: int) -> bool:
        """Whether, but for us, the system would end the process by ``signum``."""
        previous = self._before(signum)
        return previous is not signal.SIG_IGN and not callable(previous)

    def chain(self, signum: int) -> None:
        """Call the handler that was there before ours, if there was one."""
        previous = self._before(signum)
        if callable(previous):
            previous(signum, inspect.currentframe())

    # Inside. -----------------------------------------------------------------------------------------------------

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        """On the main thread, between any two instructions of it: takes no lock and says nothing."""
        if not self.closed:
            self._handled.append(signum)
            self._wake()
        elif self.is_default(signum):
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        else:
            self.chain(signum)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes up anyway; closed: nobody is there to be woken
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
        """Count what has arrived; the signal and the count, if there is one more."""
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
        """Signals of ours on the wire; everything is passed on to whoever had the wire before."""
        data = b""
        with contextlib.suppress(OSError):
            while piece := os.read(self._wake_out, 4096):
                data += piece
        foreign = bytes(number for number in data if number)
        outer = self._outer_now()
        if foreign and isinstance(outer, int) and outer >= 0:  # one of us is told by our handler, when its turn comes
            with contextlib.suppress(OSError):
                os.write(outer, foreign)
        ours = [number for number in data if number in self._signals]
        self._wired += len(ours)
        return ours

    def _before(self, signum: int) -> Any:
        """The disposition before ours; those of ours that were given back meanwhile don't count."""
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
                # What was installed by other means than Python's can't be put back by Python.
                signal.signal(signum, signal.SIG_DFL if previous is None else previous)
        current = signal.set_wakeup_fd(-1)
        outer = self._outer_now()
        back = current if current != self.wake_fd else outer.wake_fd if isinstance(outer, SignalCatcher) else outer
        if back >= 0:
            with contextlib.suppress(ValueError, OSError):  # it was closed meanwhile
                signal.set_wakeup_fd(back, warn_on_full_buffer=False)

    def _close_pipe(self) -> None:
        fds, self._wake_out, self.wake_fd = (self._wake_out, self.wake_fd), -1, -1
        for fd in fds:
            os.close(fd)

    def let_go_in_child(self) -> None:
        """In a forked child, which is not whom these signals are for; the lock may be held by a thread that is gone."""
        self.closed = True
        self._give_back()
        self._close_pipe()


_catchers: list[SignalCatcher] = []
"""Those that hold handlers, the newest last."""


def _let_go_in_child() -> None:
    while _catchers:
        _catchers.pop().let_go_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
