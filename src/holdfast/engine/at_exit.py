"""Clean-up at interpreter exit of sessions that nobody has closed: finish saves in flight, then end all our threads.

    finish   while threads can still be started, before the user's threads are joined: saves in flight end
    close    after the `atexit` callbacks registered later than this module: sessions are closed, newest first, then
             daemon threads are joined

A daemon thread that returns to a finalizing interpreter is ended there by unwinding its stack. In torch's C++ code (a
copy, a Store, a tensor being freed) that aborts the process, so no such thread may be left. One that doesn't end is in
a call that doesn't return (a Store whose host is gone, a user's callback), and is harmless while it stays there.

Guarantees: keeps nothing alive; waits at most `EXIT_GRACE_S` for all sessions together, plus a few seconds for each
session that is then given up. An interrupt ends the waiting. In a forked child nothing of the parent's is touched.
Torch-free.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("holdfast")

EXIT_GRACE_S: Final = 60.0
"""How long an exiting interpreter waits for saves in flight."""
THREAD_PREFIX: Final = "holdfast-"
"""Prefix of the names of all threads that Holdfast starts."""
_CLOSER: Final = f"{THREAD_PREFIX}closer"
_JOIN_S: Final = 3.0
"""How long to wait for threads that have been told to end."""


@dataclass(slots=True)
class _Session:
    owner: weakref.ref[Any]
    finish: Callable[[Any, float], object] | None
    close: Callable[[Any, float], object]


_sessions: dict[int, _Session] = {}
"""By number, in order of creation. Changed by single operations only, which interrupts can't split."""
_numbers = iter(range(1 << 62))
_left_s = EXIT_GRACE_S
_to_start: list[str] = []
"""Names of objects whose closing thread has not started yet."""
_unclosed: list[tuple[str, Callable[[], object]]] = []
"""Objects for which no closing thread could be started: closed at exit."""


def end_at_exit(
    owner: Any, close: Callable[[Any, float], object], finish: Callable[[Any, float], object] | None = None
) -> Callable[[], None]:
    """Call ``finish(owner, timeout_s)``, then ``close(owner, timeout_s)``, when the interpreter exits.

    Skipped if ``owner`` is gone by then: neither function may refer to it. ``finish`` only waits for what is in flight.
    Returns a function that cancels this.
    """
    number = next(_numbers)
    _sessions[number] = _Session(weakref.ref(owner, lambda _: _sessions.pop(number, None)), finish, close)

    def call_off() -> None:
        _sessions.pop(number, None)

    return call_off


def _call(end: Callable[[Any, float], object], owner: Any) -> None:
    global _left_s  # noqa: PLW0603 - all sessions share it
    began = time.monotonic()
    try:
        end(owner, _left_s)
    except HoldfastError as error:
        _log.warning("at interpreter exit: %s", error)
    except KeyboardInterrupt:
        _left_s = 0.0
        _log.warning("interrupted at interpreter exit: what is in flight is left to the engines")
    except Exception:  # noqa: BLE001 - the others must be ended too
        _log.exception("at interpreter exit")
    _left_s = max(0.0, _left_s - (time.monotonic() - began))


def close_later(what: str, close: Callable[[], object]) -> None:
    """Call ``close`` on a new thread for the forgotten ``what``; may be called by a destructor, on any thread."""
    if sys.is_finalizing():
        return  # at exit, everything is closed anyway
    _to_start.append(what)
    try:
        _thread.start_new_thread(_start_closer, (what, close))  # not `threading`: its locks may be held here
    except RuntimeError:
        _to_start.remove(what)
        _unclosed.append((what, close))


def _start_closer(what: str, close: Callable[[], object]) -> None:
    try:
        threading.Thread(target=_close_forgotten, args=(what, close), name=_CLOSER, daemon=True).start()
    except RuntimeError:
        _unclosed.append((what, close))
    finally:
        _to_start.remove(what)


def _close_forgotten(what: str, close: Callable[[], object]) -> None:
    try:
        close()
    except HoldfastError as error:
        _log.warning("while closing %s, which was forgotten: %s", what, error)
    except Exception:  # noqa: BLE001 - there is no caller to raise it to
        _log.exception("while closing %s, which was forgotten", what)


def finish_all() -> None:
    """Finish everything in flight; whoever makes sessions calls this in time."""
    for session in list(_sessions.values()):
        owner = session.owner()
        if owner is not None and session.finish is not None:
            _call(session.finish, owner)
    _call(_join, _CLOSER)


def _close_all() -> None:
    _call(_join, _CLOSER)
    while (number := max(_sessions, default=None)) is not None:
        session = _sessions.pop(number, None)
        owner = None if session is None else session.owner()
        if session is not None and owner is not None:
            _call(session.close, owner)
        del owner
    while _unclosed:
        _call(lambda forgotten, _: _close_forgotten(*forgotten), _unclosed.pop())
    try:
        _join(THREAD_PREFIX, _JOIN_S)
    except KeyboardInterrupt:
        _log.warning("interrupted at interpreter exit, with threads still at work")


def _join(prefix: str, timeout_s: float) -> None:
    """Wait until no thread with that name prefix is left or about to be started by `close_later`."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
        ours = [thread for thread in ours if thread is not threading.current_thread()]
        if not ours and not _to_start:
            return
        if ours and ours[0].ident is not None:  # otherwise it is being started
            ours[0].join(left_s)
        else:
            time.sleep(0.001)


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_sessions.clear)
    os.register_at_fork(after_in_child=_to_start.clear)
    os.register_at_fork(after_in_child=_unclosed.clear)
