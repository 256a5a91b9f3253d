"""The done-callbacks of a session's saves, on a thread of their own.

Guarantees: callbacks run one at a time, in the order their saves ended, and nothing of the pipeline waits for them: one
that waits for another save, or never returns, holds up no save. What a callback raises is kept until the session asks
for it, and never reaches anything else. The thread starts with the first callback and ends when there is none left.
Threads: any may call anything.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from holdfast.errors import CallbackFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.handle import SaveHandle

_log = logging.getLogger("holdfast")


class Callbacks:
    """Runs callbacks of the handles of one session, and keeps what they raised."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[SaveHandle], Any], SaveHandle]] = deque()
        self._thread: threading.Thread | None = None
        self._failures: list[CallbackFailed] = []

    def run_after(
        self, end: Callable[[], None], fns: Sequence[Callable[[SaveHandle], Any]], handle: SaveHandle
    ) -> None:
        """Call ``end``, which wakes whoever waits for the save, then each ``fn(handle)`` in the background.

        Who was woken and asks `wait_idle` finds the callbacks due already. Doesn't wait for them.
        """
        with self._changed:
            end()
            self._waiting.extend((fn, handle) for fn in fns)
            if self._waiting and self._thread is None:
                thread = threading.Thread(target=self._run_all, name="holdfast-callbacks", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.error("callbacks of saves must wait for a thread, the system has none left: %s", error)
                    return
                self._thread = thread

    def run_now(self, fn: Callable[[SaveHandle], Any], handle: SaveHandle) -> None:
        """Call ``fn(handle)`` on this thread; what it raises is kept, but for what ends a program."""
        try:
            fn(handle)
        except Exception as error:  # noqa: BLE001 - a callback may raise anything
            self._keep(fn, handle, error)

    def take_failures(self) -> list[CallbackFailed]:
        """What callbacks have raised since the last call."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    def wait_idle(self, timeout_s: float) -> bool:
        """Return when no callback is running or due; False if ``timeout_s`` seconds weren't enough.

        At once on the thread of the callbacks: one of them can't wait for itself.
        """
        with self._changed:
            if self._thread is threading.current_thread():
                return True
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                fn, handle = self._waiting.popleft()
            try:
                fn(handle)
            except BaseException as error:  # noqa: BLE001 - a callback may raise anything; here it ends nothing
                self._keep(fn, handle, error)
            del fn, handle

    def _keep(self, fn: Callable[[SaveHandle], Any], handle: SaveHandle, error: BaseException) -> None:
        stands = "stands" if handle.stage == "published" else "had not been published, for a reason of its own"
        text = f"callback {fn!r} of the save of step {handle.step} raised {error!r}"
        failed = CallbackFailed(
            f"{text}; the checkpoint at {handle.path} {stands}",
            checkpoint=handle.path,
        )
        failed.__cause__ = error
        _log.warning("%s", failed, exc_info=error)
        with self._changed:
            self._failures.append(failed)
