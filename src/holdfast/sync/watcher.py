"""Watch for new versions on a thread of its own, so that `Receiver.poll` does no I/O.

    Watcher   the thread, and what it learnt last; a transport's half has one, and says how to look (`Lookout`)

Guarantees: `Watcher.newest` never waits. What a look raises is raised once by the next call, and not again while every
look raises the same. The thread starts with the first call, refers to no receiver, and ends with `Watcher.close`; at
interpreter exit it is ended with its receiver. In a forked child it is started again by the first call there.
Assumes: `Lookout.look` returns within about a second, or when `Lookout.wake` is called.
Does not: decide what is news to a receiver (the halves do); fetch anything. Torch-free.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from holdfast.engine.at_exit import THREAD_PREFIX
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("holdfast")
_JOIN_S: Final = 3.0
"""How long `Watcher.close` waits for a look in progress, which may hang in a file system or a Store."""
_PAUSE_S_MIN: Final = 0.5
"""Pause after a look that raised."""


class Sighting(NamedTuple):
    """The newest version that a look has found."""

    version: int
    origin: str
    """Whose it is: another publisher's, or another attempt's, of the same number is another version."""


class Lookout(Protocol):
    """How to look for the newest version; called by the watcher's thread alone, except `wake`."""

    def look(self) -> Sighting | None:
        """Return the newest version, None if there is none now. May wait for a change, about a second."""
        ...

    def wake(self) -> None:
        """End a look that waits, soon. Any thread."""
        ...

    def close(self) -> None:
        """Release everything; called when the thread ends."""
        ...


class Watcher:
    """See the module. ``lookout``: makes the way to look, on the thread; ``every_s``: pause between two looks."""

    def __init__(self, lookout: Callable[[], Lookout], *, every_s: float) -> None:
        self._make = lookout
        self._every_s = every_s
        self._lock = threading.Lock()
        self._watch: _WatchThread | None = None
        self._closed = False

    def newest(self) -> Sighting | None:
        """Return what was seen last; raises what a look has raised since the last call."""
        with self._lock:
            if self._watch is None or self._watch.owner != os.getpid():
                if self._closed:
                    return None
                self._watch = _WatchThread(self._make, self._every_s)
                self._watch.thread.start()
            return self._watch.newest()

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._lock:
            self._closed = True
            watch, self._watch = self._watch, None
        if watch is not None and watch.owner == os.getpid():
            watch.stop(_JOIN_S)


class _WatchThread:
    """One thread that looks."""

    def __init__(self, make: Callable[[], Lookout], every_s: float) -> None:
        self.owner = os.getpid()
        self.thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}sync-watch", daemon=True)
        self._make = make
        self._lookout: Lookout | None = None
        self._every_s = every_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._seen: Sighting | None = None
        self._error: HoldfastError | None = None
        self._told = ""
        """What was raised last, while it goes on."""

    def newest(self) -> Sighting | None:
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return self._seen

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        if self._lookout is not None:
            self._lookout.wake()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._look()
        finally:
            if self._lookout is not None:
                self._lookout.close()

    def _look(self) -> None:
        pause_s = self._every_s
        try:
            if self._lookout is None:
                self._lookout = self._make()  # may wait for a Store
            seen = None if self._stopping.is_set() else self._lookout.look()
        except Exception as error:  # noqa: BLE001 - raised where the receiver polls
            pause_s = max(pause_s, _PAUSE_S_MIN)
            self._has_met(error)
        else:
            with self._lock:
                self._seen, self._told = seen, ""
        if pause_s:
            self._stopping.wait(pause_s)

    def _has_met(self, error: Exception) -> None:
        if self._stopping.is_set():
            return
        if not isinstance(error, HoldfastError):
            _log.error("looking for new versions failed", exc_info=error)
            error = HoldfastError(f"looking for new versions failed: {type(error).__name__}: {error}")
        told = f"{type(error).__name__}: {error}"
        with self._lock:
            if told != self._told:
                self._error, self._told = error, told
