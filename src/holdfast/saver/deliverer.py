"""Deliverers: each makes deliveries of one kind, one after the other, in the background.

    `Deliverer`       makes deliveries of one kind on its own thread: derive from it for a new kind
    `RootDeliverer`   a deliverer that publishes below its own directory
    `DeliveryJob`     one delivery, from the request to the end of its handle
    `Deliverers`      all deliverers of a manager

    training thread   is_due, new_job -> `Saver.start`: the job is attached to a capture
    stager thread     the capture is staged and offered to the job
    its own thread    deliver -> the lease is released -> the handle ends

Guarantees: a failure ends in its own handle, and affects no other delivery of the same capture.
Assumes: every rank has the same deliverers in the same order, and all ranks agree on what is due.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.saver.capture import AwaitedDelivery, RefusedDelivery
from holdfast.saver.delivery import THREAD_GRACE_S, DeliveryRoot
from holdfast.saver.handle import SaveHandle
from holdfast.validation import located

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.config import CheckpointConfig
    from holdfast.coordination.group import Group
    from holdfast.saver.capture import Capture, Delivery
    from holdfast.saver.handle import Callbacks, Stage

_log = logging.getLogger("holdfast")


class DeliveryJob(AwaitedDelivery):
    """One delivery that is due, and its handle."""

    what = "delivery"
    key = ""
    """Name of its attempt, the same on every rank; set by `Deliverer.submit`."""

    def __init__(self, handle: SaveHandle, *, target: str = "") -> None:
        super().__init__()
        self.handle, self.target = handle, target

    @property
    def step(self) -> int | None:
        return self.handle.step

    def finish(self, outcome: Any, *, stage: Stage) -> None:
        """End its handle; called once, when the delivery has ended."""
        self.handle.finish(outcome, stage=stage)


Job = TypeVar("Job", bound=DeliveryJob)


@dataclass(frozen=True, slots=True)
class DeliverySession:
    """The session of a `Deliverer`: the ranks that deliver together, and what they share with their saver.

    wait_staged: called on the training thread when it waits for a handle. number: index of the deliverer in its
    session, the same on every rank.
    """

    group: Group
    config: CheckpointConfig
    callbacks: Callbacks
    wait_staged: Callable[[float | None], None]
    number: int = 0


class Deliverer(Generic[Job]):
    """Makes deliveries of one kind, one after the other, on a thread of its own. Derive from it for a new kind.

    On its training thread, alike on every rank, a manager calls `open`, `start` and `close` once, `is_due` at each
    step, and `new_job` when one is due. `deliver` runs on the deliverer's thread, where it may wait for other ranks.
    """

    session: DeliverySession

    def __init__(self, thread: str = "holdfast-delivery") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pending: list[SaveHandle] = []
        self._submitted = 0
        self._closed = False
        self.thread = threading.Thread(target=self.work_off, kwargs={"waits": True}, name=thread, daemon=True)

    # To be defined by each kind. ----------------------------------------------------------------------------------

    def open(self, session: DeliverySession) -> None:
        """Prepare, while the manager is constructed; an exception refuses the manager on every rank."""
        self.session = session

    def start(self) -> None:
        """Begin to work, once every rank is ready."""
        self.thread.start()

    def is_due(self, step: int) -> bool:
        """Return whether a delivery is due after training step ``step``; the same on every rank."""
        raise NotImplementedError

    def new_job(self, step: int) -> Job:
        """Return a job for ``step``; the caller attaches it to a capture."""
        raise NotImplementedError

    def deliver(self, job: Job) -> Any:
        """Deliver the capture returned by `wait_capture`; return the result of the handle, or raise why there is none.

        Call ``job.release()`` as soon as the images aren't needed: a save may be waiting for the slot.
        """
        raise NotImplementedError

    def resumed_from(self, step: int | None) -> None:
        """Note that the run continues from ``step``: later deliveries belong to the abandoned part of the run."""

    def release(self, *, late: bool) -> None:
        """Release everything, at the end or before `start`. late: give up deliveries in progress."""
        del late
        self.join()

    # Common to all kinds. ----------------------------------------------------------------------------------------

    def new_handle(self, step: int | None, path: str, *, what: str = "delivery") -> SaveHandle:
        """Return a handle for a delivery to ``path``."""
        self._pending = [handle for handle in self._pending if not handle.done()]
        session, config = self.session, self.session.config
        one_s = config.stage_timeout + config.persist_timeout + 2 * config.commit_timeout
        return SaveHandle(
            step=step,
            path=path,
            default_timeout_s=one_s * (2 + len(self._pending)) + 30.0,
            wait_staged=lambda _handle, timeout: session.wait_staged(timeout),
            callbacks=session.callbacks,
            what=what,
        )

    def submit(self, job: Job) -> Job:
        """Queue ``job`` and name its attempt."""
        self._submitted += 1
        job.key = f"{job.what}/{self.session.number}/{self._submitted}"
        self._pending.append(job.handle)
        self._jobs.put(job)
        return job

    def wait_capture(self, job: Job) -> Capture:
        """Return the capture of ``job``; raises the refusal, which is equal on every rank.

        ``capture.error`` is set if the capture failed on this rank; other ranks may not know yet.
        """
        config = self.session.config
        limit_s = 2 * config.stage_timeout + config.persist_timeout + config.commit_timeout
        if not job.wait(limit_s):
            raise DeadlineExceeded(
                f"the {job.what} of step {job.step} got no capture within {limit_s:g} s",
                waited_for="a capture",
                timeout_s=limit_s,
            )
        return job.capture

    def wait(self, deadline: float | None) -> None:
        """Wait until no delivery is in progress; outcomes are in the handles. Raises `DeadlineExceeded`."""
        for handle in self._pending:
            handle.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float | None) -> None:
        """Finish what is due, then release everything; idempotent. Raises `DeadlineExceeded` afterwards."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        late: DeadlineExceeded | None = None
        try:
            self.wait(deadline)
        except DeadlineExceeded as error:
            late = error
        self.release(late=late is not None)
        if late is not None:
            raise late

    def give_up_start(self) -> None:
        """Release everything because the session doesn't begin."""
        self._closed = True
        self._jobs.put(None)
        self.release(late=True)

    def join(self) -> bool:
        """Wait at most `THREAD_GRACE_S` for the thread, which should be done; return False if it still runs."""
        if self.thread.ident is not None:  # otherwise the ranks didn't agree to begin
            self.thread.join(THREAD_GRACE_S)
        return not self.thread.is_alive()

    def work_off(self, *, waits: bool = False) -> None:
        """Deliver what is queued, on the calling thread. waits: for what follows, until the end of the session."""
        while (waits or not self._jobs.empty()) and (job := self._jobs.get()) is not None:
            outcome: Any
            try:
                outcome = self.deliver(job)
            except BaseException as error:  # noqa: BLE001 - every failure ends in the handle
                outcome = error
            try:
                job.release()  # first: a caller woken by the handle may save at once
                self._after(job, outcome)
            except Exception:  # noqa: BLE001 - the outcome stands, even if cleaning up fails
                _log.exception("after the %s of step %s", job.what, job.step)
            job.finish(outcome, stage="failed" if isinstance(outcome, BaseException) else "published")
            del job, outcome  # hold no references while waiting for the next job

    def _after(self, job: Job, outcome: Any) -> None:
        """Do follow-up work before the handle ends."""


class RootDeliverer(Deliverer[Job]):
    """A deliverer that publishes below its own directory, ``root``, through a `DeliveryRoot`."""

    def __init__(self, root: str | os.PathLike[str], thread: str = "holdfast-delivery") -> None:
        super().__init__(thread)
        self._root = located(os.fspath(root))
        self._place: DeliveryRoot | None = None

    @property
    def place(self) -> DeliveryRoot:
        """The `DeliveryRoot` that it publishes to; available once open."""
        if self._place is None:
            raise AssertionError("this deliverer is not open")
        return self._place

    def open(self, session: DeliverySession, *, limits: Mapping[str, Any] | None = None, managed: bool = True) -> None:
        """Lock and recover the root; limits, managed: as for `DeliveryRoot`."""
        super().open(session)
        self._place = DeliveryRoot(self._root, session.group, session.config, limits=limits, managed=managed)

    def start(self) -> None:
        self.place.start()
        super().start()

    def release(self, *, late: bool) -> None:
        if self._place is not None:
            self._place.close(self.join, late=late)


class Deliverers:
    """All deliverers of one manager except its checkpointer."""

    def __init__(self) -> None:
        self.all: list[Deliverer[Any]] = []

    def add(self, opened: Sequence[Deliverer[Any]]) -> None:
        self.all += opened

    def open(self, deliverers: Any, session: Callable[[int], DeliverySession]) -> None:
        """Open the user's ``deliverers`` and add them. session: returns the session for a deliverer's number."""
        for deliverer in [deliverers] if isinstance(deliverers, Deliverer) else deliverers:
            if not isinstance(deliverer, Deliverer) or deliverer in self.all:
                raise ConfigError(
                    "deliveries: expected objects derived from holdfast.saver.deliverer.Deliverer, each once; found "
                    f"{deliverer!r:.200}",
                    field="deliveries",
                )
            self.all.append(deliverer)  # first, so that what it acquired before raising is released
            deliverer.open(session(len(self.all) - 1))

    def start(self) -> None:
        for deliverer in self.all:
            deliverer.start()

    def give_up_start(self) -> None:
        for deliverer in self.all:
            try:
                deliverer.give_up_start()
            except Exception:  # noqa: BLE001 - another error is being raised, and the others must be released too
                _log.exception("while a deliverer let go")

    def resumed_from(self, step: int | None) -> None:
        for deliverer in self.all:
            deliverer.resumed_from(step)

    def due(self, step: int) -> list[Deliverer[Any]]:
        return [deliverer for deliverer in self.all if deliverer.is_due(step)]

    def begin(self, due: Sequence[Deliverer[Any]], step: int) -> tuple[list[Delivery], list[SaveHandle]]:
        """Begin the deliveries of ``due``; return them, to be attached to a capture, and their handles."""
        found: list[Delivery] = []
        handles: list[SaveHandle] = []
        for deliverer in due:
            try:
                job = deliverer.submit(deliverer.new_job(step))
            except Exception as error:  # noqa: BLE001 - other ranks are about to wait for this rank's capture
                found.append(RefusedDelivery(error))
                continue
            found.append(job)
            handles.append(job.handle)
        return found, handles

    def wait(self, timeout_s: float | None) -> None:
        """Wait until no delivery is in progress; outcomes are in the handles. Raises `DeadlineExceeded`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for deliverer in self.all:
            deliverer.wait(deadline)

    def close(self, timeout_s: float | None) -> None:
        """Finish what is in progress, then release everything; idempotent. Raises `DeadlineExceeded` afterwards."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        first: Exception | None = None
        for deliverer in self.all:
            try:
                deliverer.close(deadline)
            except Exception as error:  # noqa: BLE001 - raised once all are released
                first = first or error
        if first is not None:
            raise first
