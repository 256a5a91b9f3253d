"""One attempt in the engine: lease, files, the wait for the trainer's verification, report. Torch-free.

    WRITING -> PERSISTED -> REPORTING -> ENDED          taken by a worker thread, which answers at the end
       └───────────┴── cancel() ──> ENDED               at once, from the control thread
                            REPORTING: cancel() leaves the answer to the worker

The race behind this: a cancel may come while the report is being put in place. After `Cancelled` is answered no report
may appear, and the control thread must not wait for a file system. So changing `_phase` to REPORTING under the lock
decides: an earlier cancel stops the worker; a later one is answered by the worker, after it has removed the report
again or reported that it is durable.

Guarantees: exactly one of `Reported`, `Failed`, `Cancelled` ends an attempt (the control thread answers the cancel of
an ended one again). Every exception of the worker becomes `Failed`.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from holdfast.engine import messages
from holdfast.engine.copies import CopyPlace
from holdfast.engine.executor import (
    Precedence,
    Progress,
    Stopped,
    WriteOptions,
    Written,
)
from holdfast.engine.places import AttemptPlace, DirectoryPlace, WriterPlace
from holdfast.engine.syscalls import SYSTEM, Calls
from holdfast.errors import StorageError
from holdfast.format import manifest
from holdfast.format.manifest import parts_digest, parts_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from holdfast.engine.checksums import WritePlan
    from holdfast.engine.ring import Ring
    from holdfast.storage.locks import HostSlots
    from holdfast.storage.protocol import HeldLease

_RELEASE_WAIT_S: Final = 2.0


class Phase(Enum):
    WRITING = auto()
    PERSISTED = auto()
    REPORTING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class WriteJobInputs:
    """Inputs of an attempt; they live as long as it, whatever the trainer drops meanwhile."""

    persist: messages.Persist
    dir_fd: int
    """Owned by the attempt; -1 if ``persist`` names a writer and no source."""
    image: memoryview
    plan: Callable[[], WritePlan]
    """Compiles the plan on first use: on the worker, since 100,000 tensors take a while."""
    index: bytes
    options: WriteOptions
    slots: HostSlots | None = None
    """Slots of the host, one of which is held while writing."""
    prepare: Callable[[], None] = lambda: None
    """Called first on the worker: sets the priorities that all threads of the attempt inherit."""
    precedence: Precedence = field(default_factory=Precedence)
    """Shared by the attempts of the engine."""
    ring: Ring | None = None
    """Over `image`, if that holds pieces of the files as they come."""
    compare: Callable[[bytes], bytes] = lambda _: b""
    """Returns what `messages.Reported.same` tells, given the checksums of the tensors."""


class WriteJob:
    """An attempt in progress. Except `start`, methods are called from the control thread and never block."""

    def __init__(
        self, job: WriteJobInputs, post: Callable[[messages.EngineMessage], None], calls: Calls = SYSTEM
    ) -> None:
        self._job = job
        self._post = post
        self._calls = calls
        self._progress = Progress()
        self._lock = threading.Lock()
        self._phase = Phase.WRITING
        self._verified = threading.Event()
        """Set by the trainer's verification, and by a cancel to end the wait for it."""
        self._cancelled = False
        self.report_left = False
        """See `messages.AttemptFailed`; set before the answer is posted."""
        self._heartbeat: HeldLease | None = None
        wanted = job.persist
        writer = wanted.module, wanted.args, wanted.paths
        self._place: AttemptPlace = (
            CopyPlace(job.dir_fd, wanted.source, *writer)
            if wanted.source is not None
            else WriterPlace(*writer)
            if wanted.module
            else DirectoryPlace(job.dir_fd, calls)
        )
        self.name = job.persist.attempt
        self.session = job.persist.session
        self.umask = job.persist.umask
        self.orphan_grace_s = job.persist.limits.orphan_grace_s

    @property
    def written(self) -> int:
        return self._progress.written

    @property
    def waiting(self) -> str:
        return self._progress.waiting

    @property
    def ended(self) -> bool:
        """True once the final answer is posted; its thread may still be leaving a system call."""
        return self._phase is Phase.ENDED

    @property
    def verified(self) -> bool:
        """True if the trainer has verified the staging: worth finishing even without the trainer."""
        return self._verified.is_set() and not self._cancelled

    def start(self) -> None:
        """Start the worker. Raises `RuntimeError` if no thread can be started."""
        threading.Thread(target=self._run, name="holdfast-attempt", daemon=True).start()

    def filled(self, pieces: int) -> None:
        if self._job.ring is not None:
            self._job.ring.filled(pieces)

    def verify(self) -> None:
        self._verified.set()

    def cancel(self) -> bool:
        """Stop the attempt. True: no report is written from now on. False: the worker settles it, and answers."""
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
            self._heartbeat.stop(wait_s=0)  # the worker may be in a long system call; end the lease now
        return settled

    def _run(self) -> None:
        try:
            self._job.prepare()
            self._answer(self._work())
        except Stopped:
            self._answer(messages.Cancelled(self.name, session=self.session))
        except StorageError as error:
            self._fail(error.errno, error.path, str(error))
        except OSError as error:
            self._fail(error.errno, self._place.path, str(error))
        except BaseException as error:  # noqa: BLE001 - the trainer must get an answer in any case
            self._fail(None, self._place.path, f"{type(error).__name__}: {error}")
        finally:
            if self._heartbeat is not None:
                self._heartbeat.stop(wait_s=_RELEASE_WAIT_S)
            self._place.close()

    def _fail(self, errno: int | None, path: str, detail: str) -> None:
        self._answer(messages.AttemptFailed(self.name, errno, path, detail, self.report_left, self.session))

    def _answer(self, message: messages.EngineMessage) -> None:
        """Post the one answer that ends the attempt, unless a cancel has already ended it."""
        with self._lock:
            if self._phase is Phase.ENDED:
                return
            if self._cancelled and not isinstance(message, messages.Reported):
                message = messages.Cancelled(self.name, self.report_left, self.session)
            self._phase = Phase.ENDED
        self._post(message)
        if self._cancelled and isinstance(message, messages.Reported):
            self._post(messages.Cancelled(self.name, session=self.session))

    def _work(self) -> messages.EngineMessage:
        job, persist = self._job, self._job.persist
        self._heartbeat = self._place.hold_lease(persist.lease_name, persist.rank)
        with self._turn():
            written = self._place.write_files(
                job.image,
                job.plan(),
                job.options,
                progress=self._progress,
                precedence=job.precedence,
                ring=job.ring,
            )
        with self._lock:
            if self._phase is Phase.ENDED:
                raise Stopped
            self._phase = Phase.PERSISTED
        self._post(messages.Persisted(self.name, written.nbytes, written.seconds, written.direct, self.session))
        self._verified.wait()
        if self.ended:
            raise Stopped  # cancelled: nothing more is written: the directory may be being removed
        try:
            with job.precedence.executing(self._progress, job.options):
                parts = self._render(written)
                size, digest = self._place.write_report(persist.report_name, parts, may_publish=self._begin_report)
        except Stopped:
            raise
        except BaseException:
            # The report may have its name without being durable: a rank that fails leaves no report behind.
            self.report_left = not self._place.take_back(persist.report_name)
            raise
        if self._cancelled and self._place.take_back(persist.report_name):
            raise Stopped
        # Release it before anyone can publish the directory: a published directory holds no lease. On a store whoever
        # publishes removes what is left, and a request here would delay the commit.
        self._heartbeat.stop(wait_s=0 if persist.module else _RELEASE_WAIT_S)
        covered = parts_digest(parts_in(written.files))
        same = job.compare(written.tensor_sums)
        return messages.Reported(self.name, size, digest, written.nbytes, covered, self.session, same)

    def _turn(self) -> AbstractContextManager[object]:
        """Return the slot to hold while writing. Waits for it no longer than the trainer, which then cancels."""
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
                index=self._job.index if written.index is None else written.index,
            )
        )
