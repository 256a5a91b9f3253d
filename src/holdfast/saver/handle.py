"""`SaveHandle`: one save, from the first copy to the published checkpoint.

Guarantees: a handle always ends, in `Checkpoint` or in a named error, within the deadlines of its configuration; the
error is the same root cause on every rank; everything before "published" is invisible to readers.
Future-shaped: `result`, `exception`, `done`, `add_done_callback`, and ``await``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.catalog.listing import size_text
from holdfast.errors import CallbackFailed, ConfigError, DeadlineExceeded, SaveFailed
from holdfast.loader.notebook import facts_html
from holdfast.validation import checked_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from holdfast.commit.messages import RankNote
    from holdfast.loader.checkpoint import Checkpoint


# The done-callbacks of a session's saves, run on their own thread.
#
# Guarantees: callbacks run one at a time, in the order their saves ended. No save waits for them, even if one waits for
# another save or never returns. What a callback raises is kept until the session asks for it, and affects nothing else.
# The thread starts with the first callback and ends when none is left. Thread-safe.

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
        """Call ``end``, which wakes waiters of the save, then each ``fn(handle)`` in the background; doesn't wait.

        To a woken waiter that calls `wait_idle`, the callbacks already count as due.
        """
        with self._changed:
            end()
            self._waiting.extend((fn, handle) for fn in fns)
            if self._waiting and self._thread is None:
                thread = threading.Thread(target=self._run_all, name="holdfast-callbacks", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.warning(
                        "no thread can be started for callbacks, they run when somebody waits for them: %s", error
                    )
                    return
                self._thread = thread

    def run_now(self, fn: Callable[[SaveHandle], Any], handle: SaveHandle) -> None:
        """Call ``fn(handle)`` on this thread; keep what it raises, except `SystemExit` and the like."""
        try:
            fn(handle)
        except Exception as error:  # noqa: BLE001 - a callback may raise anything
            self._keep(fn, handle, error)

    def take_failures(self) -> list[CallbackFailed]:
        """Return what callbacks raised since the last call."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no callback is running or due; return False on timeout.

        Returns at once on the callback thread: a callback can't wait for itself. Callbacks for which no thread could be
        started run on this one.
        """
        with self._changed:
            if self._thread is threading.current_thread():
                return True
            unserved = self._thread is None and bool(self._waiting)
            if unserved:
                self._thread = threading.current_thread()
        if unserved:
            self._run_all()
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def is_this_thread(self) -> bool:
        """Return True if called by a callback that runs in the background."""
        return self._thread is threading.current_thread()

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
            except BaseException as error:  # noqa: BLE001 - a callback may raise anything, and must not end this thread
                self._keep(fn, handle, error)
            del fn, handle

    def _keep(self, fn: Callable[[SaveHandle], Any], handle: SaveHandle, error: BaseException) -> None:
        stands = "stands" if handle.stage == "published" else "had not been published, for another reason"
        text = f"callback {fn!r} of the save of step {handle.step} raised {error!r}"
        failed = CallbackFailed(
            f"{text}; the checkpoint at {handle.path} {stands}",
            checkpoint=handle.path,
        )
        failed.__cause__ = error
        _log.warning("%s", failed, exc_info=error)
        with self._changed:
            self._failures.append(failed)


Stage = Literal["staging", "staged", "persisting", "published", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class SaveStats:
    """Costs of one save on this rank; zero until known.

    bytes: payload and headers written by this rank. stall_s: time the training thread was held up, including the wait
    before an update. staging_s: copying time, on any thread. persist_s: until this rank's bytes were durable. commit_s:
    from this rank's report to publication. host_bytes: extra host memory used: the capture's file images, or the ring
    that it was streamed through.
    """

    bytes: int = 0
    stall_s: float = 0.0
    staging_s: float = 0.0
    persist_s: float = 0.0
    commit_s: float = 0.0
    host_bytes: int = 0


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
        self.began_s: float = time.time()
        """When the save was called, in seconds since the epoch."""
        self.ranks: tuple[RankNote, ...] = ()
        """What each rank told of its part, on rank 0 once that is known."""
        self._future: concurrent.futures.Future[Checkpoint] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()
        self._lock = threading.Lock()
        self._callbacks = callbacks
        self._to_call: list[Callable[[SaveHandle], Any]] = []
        self._thread_id = threading.get_ident()
        self._told = False
        self.mirrored: Callable[[str, float], None] | None = None
        """Waits until the copy of an attempt is published in the mirror; set by a manager that has one."""

    def __repr__(self) -> str:
        return f"<SaveHandle step={self.step} stage={self._stage} path={self.path!r} attempt={self.attempt}>"

    def _repr_html_(self) -> str:
        """Show it in a notebook: how far it is, and what it has cost."""
        stats, error = self._stats, self._future.exception(0) if self._future.done() else None
        seconds = {
            "stall": stats.stall_s,
            "staging": stats.staging_s,
            "persist": stats.persist_s,
            "commit": stats.commit_s,
        }
        facts = {
            "step": "" if self.step is None else str(self.step),
            "path": self.path,
            "stage": self._stage,
            "error": "" if error is None else f"{type(error).__name__}: {error}",
            "bytes of this rank": size_text(stats.bytes) if stats.bytes else "",
            "seconds": ", ".join(f"{name} {spent_s:.3g}" for name, spent_s in seconds.items() if spent_s),
        }
        return facts_html(self._what.capitalize(), facts)

    @property
    def stage(self) -> Stage:
        """Stage of the save: staging, staged, persisting, then published, failed or skipped."""
        return self._stage

    @property
    def stats(self) -> SaveStats:
        """Costs of the save on this rank so far."""
        return self._stats

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the captured state may change: copies are complete and all ranks agree on the plan.

        Call it on the thread that changes the state: it also checks there that nothing was changed meanwhile. timeout:
        seconds; None for the configured `stage_timeout`. Raises `DeadlineExceeded`; if the save has failed, `result`
        raises that, not this.
        """
        self._wait_staged(self, checked_wait(timeout))

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is durable and visible to readers; return it (an export: its directory).

        The `Checkpoint` also stands for a path where one is expected. timeout: seconds; None for the sum of the
        configured deadlines. Raises `SaveFailed`, `OutcomeUnknown`, or `DeadlineExceeded` (the save itself continues).
        A failure that was raised here or by awaiting the handle isn't raised by the manager again, unless only a
        background callback saw it.
        """
        self._settle(timeout)
        self._tell()
        return self._future.result(0)

    def wait_mirrored(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is published, and its copy is durable and visible in the mirror.

        timeout: seconds; None for the sum of the configured deadlines. Raises what `result` raises; `SaveFailed` with
        its cause if the last try to upload it failed (it is tried again, but for a damaged one) or if nothing is to be
        uploaded, as for a step that `mirror_keep` wouldn't keep; `ConfigError` without a mirror; `DeadlineExceeded`.
        """
        given_s = checked_wait(timeout)
        if self.mirrored is None:
            raise ConfigError("there is no mirror to wait for; give the CheckpointManager one", field="mirror")
        deadline = math.inf if given_s is None else time.monotonic() + given_s
        self.result(timeout)
        assert self.attempt is not None
        self.mirrored(self.attempt, deadline - time.monotonic())

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the save, or None if it was published; waits as `result` does, with its ``timeout``."""
        self._settle(timeout)
        return self._future.exception(0)

    @property
    def told(self) -> bool:
        """Return True if its failure was raised to the user."""
        return self._told

    def _tell(self) -> None:
        # A failure that only a callback has seen is still unknown to the training loop.
        self._told = self._told or not self._callbacks.is_this_thread()

    def done(self) -> bool:
        """Return whether the save has ended, published or not; doesn't wait."""
        return self._future.done()

    def add_done_callback(self, fn: Callable[[SaveHandle], Any]) -> None:
        """Call ``fn(handle)`` on a background thread once the save has ended; if it has, at once on this thread.

        It may wait for other saves. If it raises, the checkpoint stands, and the manager's next call raises
        `CallbackFailed` (without a manager it is logged).
        """
        with self._lock:
            if not self._future.done():
                self._to_call.append(fn)
                return
        self._callbacks.run_now(fn, self)

    def __await__(self) -> Generator[Any, None, Checkpoint]:
        try:
            checkpoint = yield from asyncio.wrap_future(self._future).__await__()
        finally:
            if self._future.done():
                self._tell()
        return checkpoint

    def _settle(self, timeout: float | None) -> None:
        given_s = checked_wait(timeout)
        limit_s = self._default_timeout_s if given_s is None else given_s
        deadline = time.monotonic() + limit_s
        # Only the training thread can confirm that the state is unchanged; if it waits here, it must do so first.
        if not self._future.done() and threading.get_ident() == self._thread_id:
            self._wait_staged(self, limit_s)
        try:
            self._future.exception(max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            which = self._what if self.step is None else f"{self._what} of step {self.step}"
            raise DeadlineExceeded(
                f"{which} to {self.path} has not ended after {limit_s:g} s (it is {self._stage}); "
                "it continues in the background: wait longer, or check the storage",
                waited_for=which,
                timeout_s=limit_s,
            ) from None

    # Called by the saver. ----------------------------------------------------------------------------------------

    def figures(self, outcome: object) -> dict[str, Any]:
        """Return the fields of the event that tells that the save ended with ``outcome``: `stats` and the cause.

        On rank 0 ``ranks``, too: for each rank that has told it (rank, began_s, stall_s, staging_s, persist_s, nbytes),
        None where it doesn't know.
        """
        stats = self._stats
        figures: dict[str, Any] = {
            "nbytes": stats.bytes,
            "stall_s": stats.stall_s,
            "staging_s": stats.staging_s,
            "persist_s": stats.persist_s,
            "commit_s": stats.commit_s,
            "began_s": self.began_s,
        }
        if self.ranks:
            figures["ranks"] = tuple(
                (note.rank, note.began_s, note.stall_s, note.staging_s, note.persist_s, note.nbytes)
                for note in self.ranks
            )
        if isinstance(outcome, BaseException):
            cause = outcome.__cause__ if isinstance(outcome, SaveFailed) and outcome.__cause__ else outcome
            figures["error"], figures["message"] = repr(outcome), str(outcome)
            figures["error_class"], figures["failed_rank"] = type(cause).__name__, getattr(outcome, "rank", None)
        return figures

    def advance(self, stage: Stage) -> None:
        """Enter a stage that doesn't end the save."""
        self._stage = stage

    def add_stats(self, **amounts: float) -> None:
        """Add to figures of `stats`."""
        with self._lock:
            added: dict[str, Any] = {name: getattr(self._stats, name) + amount for name, amount in amounts.items()}
            self._stats = replace(self._stats, **added)

    def finish(self, outcome: Checkpoint | BaseException, *, stage: Stage) -> None:
        """End the save, then run the callbacks; only the first call counts."""
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
