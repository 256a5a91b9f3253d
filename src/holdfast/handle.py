"""`SaveHandle`: one save, from the first copy to the published checkpoint.

Guarantees: a handle always ends, in `Checkpoint` or in a named error, within the deadlines of its configuration; the
error is the same root cause on every rank; everything before "published" is invisible to readers.
Future-shaped: `result`, `exception`, `done`, `add_done_callback`, and ``await``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.arguments import checked_wait
from holdfast.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from holdfast.callbacks import Callbacks
    from holdfast.checkpoint import Checkpoint

Stage = Literal["staging", "staged", "persisting", "published", "failed", "skipped"]


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
        callbacks: Callbacks,
        what: str = "save",
    ) -> None:
        self._what = what
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
        self._callbacks = callbacks
        self._to_call: list[Callable[[SaveHandle], Any]] = []
        self._thread_id = threading.get_ident()

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
        self._wait_staged(self, checked_wait(timeout))

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Return the published `Checkpoint`; of an export, the Hugging Face directory as one.

        Returns once it is visible to readers and durable. Where a path is taken, it is that of its directory.
        timeout: seconds; None for the sum of the configured deadlines. Raises `SaveFailed`, `OutcomeUnknown`, or
        `DeadlineExceeded` (the save itself goes on).
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
        """Call ``fn(handle)`` once the save has ended, on a background thread; at once, on this one, if it has.

        It may wait for other saves. If it raises, the checkpoint stands, and `CallbackFailed` is raised at the
        manager's next call (or logged, where there is no manager).
        """
        with self._lock:
            if not self._future.done():
                self._to_call.append(fn)
                return
        self._callbacks.run_now(fn, self)

    def __await__(self) -> Generator[Any, None, Checkpoint]:
        return asyncio.wrap_future(self._future).__await__()

    def _settle(self, timeout: float | None) -> None:
        given_s = checked_wait(timeout)
        limit_s = self._default_timeout_s if given_s is None else given_s
        deadline = time.monotonic() + limit_s
        # Only the thread that trains can say that the state held still, and only it would keep the save waiting.
        if not self._future.done() and threading.get_ident() == self._thread_id:
            self._wait_staged(self, limit_s)
        try:
            self._future.exception(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            which = self._what if self.step is None else f"{self._what} of step {self.step}"
            raise DeadlineExceeded(
                f"{which} to {self.path} has not ended after {limit_s:g} s (it is {self._stage}); "
                "it goes on in the background: wait longer, or look at the storage",
                waited_for=which,
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
        """End the save, then have the callbacks run; the first call wins."""
        with self._lock:
            if self._future.done():
                return
            self._stage = stage

            def end() -> None:
                if isinstance(outcome, BaseException):
                    self._future.set_exception(outcome)
                else:
                    self._future.set_result(outcome)

            to_call, self._to_call = self._to_call, []
            self._callbacks.run_after(end, to_call, self)
