"""A Store client with a deadline on every call, which reconnects when a connection is lost. Torch-free.

Calls on a Store, including the first connection, run on a daemon thread, which the caller abandons when a call doesn't
return. A lost connection (networks drop idle ones, some silently) is reconnected, and requests that are safe to repeat
are repeated. If that fails, the Store counts as lost, at once, until the next try after a pause.

Assumes the given Store has no other user, unless it can't be cloned.
Does not: know keys or ranks; ``coordination.board`` does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import DeadlineExceeded, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("holdfast")
CONNECT_S_MIN: Final = 12.0
"""Minimum timeout of the first connection: its host resolves our name, which takes 5 or 10 s with slow DNS."""
RECONNECT_S: Final = 6.0
"""Timeout of a new connection."""
RECONNECT_PAUSE_S: Final = 30.0
"""Pause before the next try to reach a lost Store, so that calls don't wait for a dead host each time."""


class BoardLost(HoldfastError, ConnectionError):
    """The board can't be reached any more. Becomes the cause of a public error."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


@contextlib.contextmanager
def board_lost_told(what: str, timeout_s: float) -> Iterator[None]:
    """Raise `DeadlineExceeded`, a public error, for a `BoardLost` in ``what``."""
    try:
        yield
    except BoardLost as lost:
        raise DeadlineExceeded(
            f"{what} can't continue: {lost}. Check that the process that hosts the Store is "
            "running and reachable; if it isn't, restart the job",
            waited_for=f"the Store, for {what}",
            timeout_s=timeout_s,
        ) from lost


class _StoreCall:
    """A call queued in a `StoreClient`."""

    __slots__ = ("done", "error", "function", "result")

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


@dataclass(slots=True)
class _Link:
    """The ``given`` Store and, once made, our ``own`` connection."""

    given: Any
    own: Any | None = None

    @property
    def is_pending(self) -> bool:
        return self.own is None and hasattr(self.given, "clone")


def _serve(link: _Link, calls: queue.SimpleQueue[_StoreCall | None]) -> None:
    # On this thread, which the caller can abandon: torch waits forever if the host accepts but doesn't answer.
    if link.own is None:
        link.own = clone_store(link.given)
    store = link.own
    while (call := calls.get()) is not None:
        try:
            call.result = call.function(store)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            call.error = error
        call.done.set()
        del call


def _start_serving(link: _Link, calls: queue.SimpleQueue[_StoreCall | None]) -> None:
    threading.Thread(target=_serve, args=(link, calls), name="holdfast-board", daemon=True).start()


@dataclass(slots=True)
class Outage:
    """Shared by the clones of a board: the time of the next try to reach the Store."""

    over_at: float = 0.0


class StoreClient:
    """Calls a Store on a daemon thread, so that a caller can abandon a call that doesn't return."""

    def __init__(self, store: Any, call_timeout_s: float, outage: Outage) -> None:
        self.call_timeout_s = call_timeout_s
        self.closed = threading.Event()
        self.outage = outage
        self._link = _Link(store)
        self._lost = ""
        self._unreached = False
        """True until it was reached for the first time."""
        self._calls: queue.SimpleQueue[_StoreCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._users = 0
        # The thread must not refer to this object: it ends when the last board is gone.
        self._end = weakref.finalize(self, self._calls.put, None)
        if self._link.is_pending:
            with contextlib.suppress(BoardLost):  # the deadlines of calls start after this
                self._call(lambda _: None, max(call_timeout_s, CONNECT_S_MIN))

    def call(self, function: Callable[[Any], Any], *, again: bool = True) -> Any:
        """Call ``function`` with the Store and return its result; ``again``: may be repeated if a connection ends.

        Raises `BoardLost`. The next call then reconnects, if possible.
        """
        try:
            return self._call(function, self.call_timeout_s)
        except BoardLost:
            if not again:
                raise
        return self._call(function, self.call_timeout_s)

    def _call(self, function: Callable[[Any], Any], limit_s: float) -> Any:
        calls, call = self._connection(), _StoreCall(function)
        calls.put(call)
        if not call.done.wait(limit_s):
            message = (
                f"the Store of the process group has not answered for {limit_s:g} s; "
                "its host (usually that of rank 0) is down or cut off"
            )
            self._lose(calls, message)
            raise BoardLost(message)
        if call.error is None:
            return call.result
        # torch's DistStoreError and DistNetworkError are RuntimeErrors; sockets give OSError.
        if isinstance(call.error, (RuntimeError, OSError)):
            message = f"the Store of the process group failed: {call.error}"
            self._lose(calls, message)
            raise BoardLost(message) from call.error
        raise call.error

    def _lose(self, calls: queue.SimpleQueue[_StoreCall | None], why: str) -> None:
        with self._lock:
            if calls is self._calls:  # otherwise another thread has reconnected meanwhile
                self._lost = why
                self._unreached = self._link.is_pending
                if self._unreached:  # it can't be reached again either
                    self.outage.over_at = time.monotonic() + RECONNECT_PAUSE_S

    def _connection(self) -> queue.SimpleQueue[_StoreCall | None]:
        """Return the queue of calls; reconnects if the connection was lost."""
        with self._lock:
            if self.closed.is_set():
                raise BoardLost("this board was closed")
            if self._lost and self._unreached and not self._link.is_pending:
                self._lost = ""  # it was only late
            if self._lost:
                self._reconnect()
            if not self._started:
                _start_serving(self._link, self._calls)
                self._started = True
            return self._calls

    def _reconnect(self) -> None:
        known = self._link.given if self._link.own is None else self._link.own
        if not hasattr(known, "clone") or time.monotonic() < self.outage.over_at:
            raise BoardLost(self._lost)
        calls: queue.SimpleQueue[_StoreCall | None] = queue.SimpleQueue()
        self._end()  # its thread may be stuck in a call, and ends after that
        self._end = weakref.finalize(self, calls.put, None)
        _start_serving(_Link(known, known), calls)
        connect = _StoreCall(functools.partial(_connect_anew, is_ours=known is not self._link.given))
        calls.put(connect)
        if not connect.done.wait(2 * RECONNECT_S) or connect.error is not None:
            self._end()
            self.outage.over_at = time.monotonic() + RECONNECT_PAUSE_S
            raise BoardLost(f"{self._lost}; reconnecting failed") from connect.error
        _log.warning("%s; connected to it anew", self._lost)
        self._end()
        self._link = _Link(self._link.given, connect.result)
        self._calls, self._lost, self._started, self._unreached = queue.SimpleQueue(), "", False, False
        self._end = weakref.finalize(self, self._calls.put, None)

    def enter(self) -> None:
        """Add a board that uses this client."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Remove a board; close the client with the last one."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self.closed.set()
        self._end()


def clone_store(store: Any) -> Any:
    """Return our own connection if torch can make one (2.8 and later), else ``store``."""
    if not hasattr(store, "clone"):
        return store
    try:
        _knock(store)
        return store.clone()
    except (OSError, RuntimeError, NotImplementedError):
        return store


def _knock(store: Any) -> bool:
    """Raise at once if the host of ``store`` refuses connections (torch would retry); return False without a host."""
    plain = store
    while hasattr(plain, "underlying_store"):
        plain = plain.underlying_store
    if not hasattr(plain, "host"):
        return False
    socket.create_connection((plain.host, plain.port), RECONNECT_S).close()
    return True


def _connect_anew(store: Any, *, is_ours: bool) -> Any:
    """Return a new connection to the host of ``store``, whose connection was lost."""
    if not _knock(store) or not is_ours:
        return store.clone()
    timeout = store.timeout
    store.set_timeout(timedelta(seconds=RECONNECT_S))
    fresh = store.clone()
    fresh.set_timeout(timeout)
    return fresh
