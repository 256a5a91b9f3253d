"""`SaveHandle`: one save, from the first copy to the published checkpoint.

Guarantees: a handle always ends, in `Checkpoint` or in a named error, within the deadlines of its configuration; the
error is the same root cause on every rank; everything before "published" is invisible to readers.
Future-shaped: `result`, `exception`, `done`, `add_done_callback`, and ``await``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import CallbackFailed, DeadlineExceeded, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from holdfast.checkpoint import Checkpoint

Stage = Literal["staging", "staged", "persisting", "published", "failed", "skipped"]

_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class SaveStats:
    """What one save cost this rank; zero until known.

    bytes: payload and headers this rank wrote. stall_s: time the training thread was held, the pre-step wait
    included. staging_s: time spent copying, on whatever thread. persist_s: until this rank's bytes were durable.
    commit_s: from this rank's report to publication.
    """

    bytes: int = 0
    stall_s: float = 0.0
    staging_s: float = 0.0
    persist_s: float = 0.0
    commit_s: float = 0.0


class SaveHandle:
    """One save in flight. Made by `save` and `async_save`; safe to use from any thread."""

    def __init__(
        self,
        *,
        step: int | None,
        path: str,
        default_timeout_s: float,
        wait_staged: Callable[[SaveHandle, float | None], None],
    ) -> None:
        self.step = step
        self.path = path
        self.attempt: str | None = None
        self._default_timeout_s = default_timeout_s
        self._wait_staged = wait_staged
        self._stage: Stage = "staging"
        self._stats = SaveStats()
        self._future: concurrent.futures.Future[Checkpoint] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[SaveHandle], Any]] = []
        self.callback_error: CallbackFailed | None = None

    def __repr__(self) -> str:
        return f"<SaveHandle step={self.step} stage={self._stage} path={self.path!r} attempt={self.attempt}>"

    @property
    def stage(self) -> Stage:
        """Where the save is: staging, staged, persisting, then published, failed or skipped."""
        return self._stage

    @property
    def stats(self) -> SaveStats:
        """A snapshot of what the save has cost this rank so far."""
        return self._stats

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the captured state may be changed; the copies are then complete and all ranks agree on the plan.

        Call it on the thread that changes the state: it also checks there that nothing was changed meanwhile.
        timeout: seconds; None for the configured `stage_timeout`. Raises `DeadlineExceeded`; a save that has failed
        doesn't raise here, but in `result`.
        """
        self._wait_staged(self, timeout)

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Return the published `Checkpoint`.

        Returns once it is visible to readers and durable. timeout: seconds; None for the sum of the configured
        deadlines. Raises `SaveFailed`, `OutcomeUnknown`, or `DeadlineExceeded` (the save itself goes on).
        """
        self._settle(timeout)
        return self._future.result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error the save ended in, or None if it was published; waits like `result`."""
        self._settle(timeout)
        return self._future.exception(0)

    def done(self) -> bool:
        """Whether the save has ended, published or not; doesn't wait."""
        return self._future.done()

    def add_done_callback(self, fn: Callable[[SaveHandle], Any]) -> None:
        """Call ``fn(handle)`` once the save has ended; at once if it has.

        Runs on a background thread. If it raises, the checkpoint stands, and `CallbackFailed` is raised at the
        manager's next call (or logged, where there is no manager).
        """
        with self._lock:
            if not self._future.done():
                self._callbacks.append(fn)
                return
        self._call(fn)

    def __await__(self) -> Generator[Any, None, Checkpoint]:
        return asyncio.wrap_future(self._future).__await__()

    def _settle(self, timeout: float | None) -> None:
        limit_s = self._default_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + limit_s
        if not self._future.done():
            self._wait_staged(self, min(limit_s, max(0.0, deadline - time.monotonic())))
        try:
            self._future.exception(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            raise DeadlineExceeded(
                f"save of step {self.step} to {self.path} has not ended after {limit_s:g} s (it is {self._stage}); "
                "it goes on in the background: wait longer, or look at the storage",
                waited_for=f"save of step {self.step}",
                timeout_s=limit_s,
            ) from None

    # What the saver reports. -------------------------------------------------------------------------------------

    def advance(self, stage: Stage) -> None:
        """Move on to a stage that doesn't end the save."""
        self._stage = stage

    def add_stats(self, **amounts: float) -> None:
        """Add to figures of `stats`."""
        with self._lock:
            added: dict[str, Any] = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
            self._stats = replace(self._stats, **added)

    def finish(self, outcome: Checkpoint | BaseException, *, stage: Stage) -> None:
        """End the save, then run the callbacks; the first call wins."""
        with self._lock:
            if self._future.done():
                return
            self._stage = stage
            if isinstance(outcome, BaseException):
                self._future.set_exception(outcome)
            else:
                self._future.set_result(outcome)
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn: Callable[[SaveHandle], Any]) -> None:
        try:
            fn(self)
        except Exception as error:
            failed = CallbackFailed(
                f"callback {fn!r} of the save of step {self.step} raised {error!r}; the checkpoint at {self.path} "
                f"{'stands' if self._stage == 'published' else 'was not published for another reason'}",
                checkpoint=self.path,
            )
            failed.__cause__ = error
            self.callback_error = failed
            _log.warning("%s", failed, exc_info=error)


def is_expected(error: BaseException) -> bool:
    """Whether an error is one of ours, already told in full."""
    return isinstance(error, HoldfastError)
