"""One attempt in work in the engine: lease, files, the wait for the trainer's word, report. Torch-free.

    WRITING -> PERSISTED -> REPORTING -> ENDED          a worker thread goes this way, and answers on it
       └───────────┴── cancel() ──> ENDED               at once, from the control thread
                            REPORTING: cancel() waits for the worker to settle it

The race that shaped this: a cancel may come while the report is being put in place. After `Cancelled` is answered no
report may appear, and the control thread must not wait for a file system. So the one who changes `_phase` to REPORTING
under the lock has won: an earlier cancel stops the worker, a later one is answered by the worker, after it has taken
the report away again or has said that it is durable.

Guarantees: exactly one of `Reported`, `Failed`, `Cancelled` ends an attempt (a cancel of an ended one is answered again
by the control thread). Every exception of the worker becomes `Failed`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from holdfast.engine import messages
from holdfast.engine.calls import SYSTEM, Calls, where
from holdfast.engine.executor import Progress, Stopped, WriteOptions, Written, write_files, write_report
from holdfast.errors import StorageError
from holdfast.format import manifest
from holdfast.format.parts import parts_digest, parts_in
from holdfast.storage.lease import Heartbeat, hold, new_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from holdfast.engine.checksums import WritePlan
    from holdfast.storage.slots import HostSlots

_RELEASE_WAIT_S: Final = 2.0


class Phase(Enum):
    WRITING = auto()
    PERSISTED = auto()
    REPORTING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Job:
    """What an attempt works with; all of it stays alive with it, whatever the trainer drops meanwhile."""

    persist: messages.Persist
    dir_fd: int
    """Owned by the attempt."""
    image: memoryview
    plan: Callable[[], WritePlan]
    """Compiles the plan on first use: on the worker, since 100,000 tensors take a while."""
    index: bytes
    options: WriteOptions
    slots: HostSlots | None = None
    """Of the host, one of which is to be held while writing."""


class Attempt:
    """An attempt in work. `start` starts it; the rest is called from the control thread and never blocks."""

    def __init__(self, job: Job, post: Callable[[messages.Message], None], calls: Calls = SYSTEM) -> None:
        self._job = job
        self._post = post
        self._calls = calls
        self._progress = Progress()
        self._lock = threading.Lock()
        self._phase = Phase.WRITING
        self._verified = threading.Event()
        """Set by the trainer's word, and by a cancel to end the wait for it."""
        self._cancelled = False
        self.report_left = False
        """See `messages.Failed`; True before the answer is posted."""
        self._heartbeat: Heartbeat | None = None
        self.name = job.persist.attempt

    @property
    def written(self) -> int:
        return self._progress.written

    @property
    def waiting(self) -> str:
        return self._progress.waiting

    @property
    def ended(self) -> bool:
        """Answered for good; its thread may still be leaving a system call."""
        return self._phase is Phase.ENDED

    @property
    def verified(self) -> bool:
        """The trainer has said that staging was verified: worth finishing without it."""
        return self._verified.is_set() and not self._cancelled

    def start(self) -> None:
        """Raises `RuntimeError` where the system has no thread left."""
        threading.Thread(target=self._run, name="holdfast-attempt", daemon=True).start()

    def verify(self) -> None:
        self._verified.set()

    def cancel(self) -> bool:
        """Stop. True: no report is written from here on. False: the worker settles it, and answers."""
        with self._lock:
            self._cancelled = True
            settled = self._phase is not Phase.REPORTING
            if settled:
                self._phase = Phase.ENDED
        self._progress.stop()
        self._verified.set()
        if self._job.slots is not None:
            self._job.slots.wake()
        if settled and self._heartbeat is not None:
            self._heartbeat.stop(wait_s=0)  # the worker may be in a system call for long; the lease need not be
        return settled

    def _run(self) -> None:
        try:
            self._answer(self._work())
        except Stopped:
            self._answer(messages.Cancelled(self.name))
        except StorageError as error:
            self._fail(error.errno, error.path, str(error))
        except OSError as error:
            self._fail(error.errno, where(self._job.dir_fd), str(error))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the trainer must hear of it
            self._fail(None, where(self._job.dir_fd), f"{type(error).__name__}: {error}")
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop(wait_s=_RELEASE_WAIT_S)
            os.close(self._job.dir_fd)

    def _fail(self, errno: int | None, path: str, detail: str) -> None:
        self._answer(messages.Failed(self.name, errno, path, detail, self.report_left))

    def _answer(self, message: messages.Message) -> None:
        """Post the one answer that ends the attempt, unless a cancel has ended it already."""
        with self._lock:
            if self._phase is Phase.ENDED:
                return
            if self._cancelled and not isinstance(message, messages.Reported):
                message = messages.Cancelled(self.name, self.report_left)
            self._phase = Phase.ENDED
        self._post(message)
        if self._cancelled and isinstance(message, messages.Reported):
            self._post(messages.Cancelled(self.name))

    def _work(self) -> messages.Message:
        job, persist = self._job, self._job.persist
        self._heartbeat = Heartbeat(hold(job.dir_fd, persist.lease_name, new_record(persist.rank)))
        with self._turn():
            written = write_files(
                job.dir_fd, job.image, job.plan(), job.options, progress=self._progress, calls=self._calls
            )
        with self._lock:
            if self._phase is Phase.ENDED:
                raise Stopped
            self._phase = Phase.PERSISTED
        self._post(messages.Persisted(self.name, written.nbytes, written.seconds, written.direct))
        self._verified.wait()
        parts = self._render(written)
        try:
            size, digest = write_report(
                job.dir_fd, persist.report_name, parts, may_publish=self._begin_report, calls=self._calls
            )
        except Stopped:
            raise
        except BaseException:
            # It may have its name and not be durable: a rank that says "failed" leaves no report behind.
            self.report_left = not self._take_back(persist.report_name)
            raise
        if self._cancelled and self._take_back(persist.report_name):
            raise Stopped
        # Gone before anyone may publish the directory: what is published holds no lease.
        self._heartbeat.stop(wait_s=_RELEASE_WAIT_S)
        covered = parts_digest(parts_in(written.files))
        return messages.Reported(self.name, size, digest, written.nbytes, covered)

    def _turn(self) -> AbstractContextManager[object]:
        """Held while writing. Waits for it no longer than the trainer does, which then cancels."""
        slots = self._job.slots
        if slots is None:
            return contextlib.nullcontext()

        def tell(what: str) -> None:
            self._progress.waiting = what

        slot = slots.acquire(stopped=lambda: self._progress.stopped, tell=tell)
        if slot is None:
            raise Stopped
        return slot

    def _begin_report(self) -> bool:
        with self._lock:
            if self._phase is Phase.ENDED:
                return False
            self._phase = Phase.REPORTING
            return True

    def _take_back(self, name: str) -> bool:
        """Remove a report that must not stand; False if that failed, so that it may."""
        try:
            self._calls.unlink(self._job.dir_fd, name)
            self._calls.fsync_dir(self._job.dir_fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _render(self, written: Written) -> tuple[bytes, bytes, bytes]:
        persist = self._job.persist
        return manifest.report_parts(
            manifest.Report(
                attempt=persist.attempt,
                step=persist.step,
                rank=persist.rank,
                world=persist.world,
                files=written.files,
                tensor_sums=written.tensor_sums,
                index=self._job.index,
            )
        )
