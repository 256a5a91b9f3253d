"""A Store as a board uses it: every call with a deadline, a lost connection made anew. Torch-free.

Calls on a Store run on a daemon thread of their own, the first connection to it among them, which the caller leaves
behind when one doesn't come back. A connection that was lost (what lies on the way drops idle ones, some without a
word) is made anew, and what may safely be asked twice is asked again. Where that fails the Store is lost, at once,
until it is tried again after a while.

Assumes the Store it is given is nobody else's, but where it can't be cloned.
Does not: know keys or ranks; ``coordination`` does.
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

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("holdfast")
CONNECT_S_MIN: Final = 12.0
"""What the first connection may always take: the Store's host looks up who connects, where names are slow for 5 s, or
twice that."""
RECONNECT_S: Final = 6.0
"""How long a new connection may take."""
RECONNECT_PAUSE_S: Final = 30.0
"""How long a Store is lost when it can't be reached: nobody waits for a dead host again and again."""


class BoardLost(HoldfastError, ConnectionError):
    """The board can't be reached any more, so nothing can be learnt from it. Ends up as the cause of a public error."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class _Call:
    """One call on its way through a `StoreClient`."""

    __slots__ = ("done", "error", "function", "result")

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


@dataclass(slots=True)
class _Link:
    """The Store that was ``given``, and the connection of our ``own`` to it, once that is made."""

    given: Any
    own: Any | None = None

    @property
    def is_pending(self) -> bool:
        return self.own is None and hasattr(self.given, "clone")


def _serve(link: _Link, calls: queue.SimpleQueue[_Call | None]) -> None:
    # Here, where a caller can walk away from it: torch waits for ever where who listens doesn't answer.
    if link.own is None:
        link.own = clone_store(link.given)
    store = link.own
    while (call := calls.get()) is not None:
        try:
            call.result = call.function(store)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, who raises it
            call.error = error
        call.done.set()
        del call


def _start_serving(link: _Link, calls: queue.SimpleQueue[_Call | None]) -> None:
    threading.Thread(target=_serve, args=(link, calls), name="holdfast-board", daemon=True).start()


@dataclass(slots=True)
class Outage:
    """What the clones of a board know together: when it is worth trying again to reach the Store."""

    over_at: float = 0.0


class StoreClient:
    """A Store, called on a daemon thread, so that its caller can walk away from a call that doesn't come back."""

    def __init__(self, store: Any, call_timeout_s: float, outage: Outage) -> None:
        self.call_timeout_s = call_timeout_s
        self.closed = threading.Event()
        self.outage = outage
        self._link = _Link(store)
        self._lost = ""
        self._unreached = False
        """It is lost for not having been reached at all, yet."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._users = 0
        # The thread holds the queue and the link, not this object: it ends when the last board on it is gone.
        self._end = weakref.finalize(self, self._calls.put, None)
        if self._link.is_pending:
            with contextlib.suppress(BoardLost):  # deadlines of calls begin after it
                self._call(lambda _: None, max(call_timeout_s, CONNECT_S_MIN))

    def call(self, function: Callable[[Any], Any], *, again: bool = True) -> Any:
        """What ``function`` returns for the Store; ``again``: it may be called a second time, should a connection end.

        Raises `BoardLost`. The next call then finds a new connection, if one can be had.
        """
        try:
            return self._call(function, self.call_timeout_s)
        except BoardLost:
            if not again:
                raise
        return self._call(function, self.call_timeout_s)

    def _call(self, function: Callable[[Any], Any], limit_s: float) -> Any:
        calls, call = self._connection(), _Call(function)
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

    def _lose(self, calls: queue.SimpleQueue[_Call | None], why: str) -> None:
        with self._lock:
            if calls is self._calls:  # else another thread has found out before, and all is well by now
                self._lost = why
                self._unreached = self._link.is_pending
                if self._unreached:  # nor can it be anew
                    self.outage.over_at = time.monotonic() + RECONNECT_PAUSE_S

    def _connection(self) -> queue.SimpleQueue[_Call | None]:
        """Where to put calls; makes the connection anew if it was lost."""
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
        calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._end()  # its thread may be stuck in a call for long, and ends then
        self._end = weakref.finalize(self, calls.put, None)
        _start_serving(_Link(known, known), calls)
        connect = _Call(functools.partial(_connect_anew, is_ours=known is not self._link.given))
        calls.put(connect)
        if not connect.done.wait(2 * RECONNECT_S) or connect.error is not None:
            self._end()
            self.outage.over_at = time.monotonic() + RECONNECT_PAUSE_S
            raise BoardLost(f"{self._lost}; nor can it be reached anew") from connect.error
        _log.warning("%s; connected to it anew", self._lost)
        self._end()
        self._link = _Link(self._link.given, connect.result)
        self._calls, self._lost, self._started, self._unreached = queue.SimpleQueue(), "", False, False
        self._end = weakref.finalize(self, self._calls.put, None)

    def enter(self) -> None:
        """One more board uses this."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One board less; with the last one it is closed."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self.closed.set()
        self._end()


def clone_store(store: Any) -> Any:
    """A connection of our own where this torch can make one (2.8 and later), else the one given."""
    if not hasattr(store, "clone"):
        return store
    try:
        _knock(store)
        return store.clone()
    except (OSError, RuntimeError, NotImplementedError):
        return store


def _knock(store: Any) -> bool:
    """Raise at once if the host of ``store`` refuses, which torch tries long and loudly to reach; False without one."""
    plain = store
    while hasattr(plain, "underlying_store"):
        plain = plain.underlying_store
    if not hasattr(plain, "host"):
        return False
    socket.create_connection((plain.host, plain.port), RECONNECT_S).close()
    return True


def _connect_anew(store: Any, *, is_ours: bool) -> Any:
    """A new connection to where ``store``, which was lost, was connected to."""
    if not _knock(store) or not is_ours:
        return store.clone()
    timeout = store.timeout
    store.set_timeout(timedelta(seconds=RECONNECT_S))
    fresh = store.clone()
    fresh.set_timeout(timeout)
    return fresh
