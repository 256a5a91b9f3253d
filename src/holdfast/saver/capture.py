"""A capture: the state of one step on one rank, copied into file images for one or more deliveries.

A `Capture` is a snapshot, its plan and buffer, and its progress. A `Delivery` turns it into one product: a checkpoint,
an export, a weight version, or something of the user's. Deliveries use the same images at the same time, each by a
lease. `CapturePool` limits the number of captures and owns their buffers: they are made for the current plan, reused,
and replaced when the plan changes.

    `WorkingLease`   uses the capture: it occupies one of ``in_flight`` until the last working lease is released
    `KeepingLease`   uses the buffer alone: may outlive the capture, and no save waits for it

Guarantees: a capture's slot is given back exactly once, when its last working lease is released; its buffer is reused
when the last lease of either kind is released. Buffers of an old plan are freed at that point.
Does not copy (``staging``), talk to other ranks (``agreement``) or persist (``engine``).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from holdfast.errors import DeadlineExceeded, SaveFailed, StateChangedWhileStaging
from holdfast.plan.write import plan_save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from typing_extensions import Self

    from holdfast.format.structure import Structure
    from holdfast.plan.write import PlacedTensor, RankPlan
    from holdfast.saver.agreement import WorldPlan
    from holdfast.saver.snapshot import Snapshot
    from holdfast.saver.suspicion import Look
    from holdfast.staging.buffer import CaptureBuffer
    from holdfast.staging.copy_job import Staging
    from holdfast.staging.stream import StreamedStaging

_log = logging.getLogger("holdfast")

Needs: TypeAlias = "Callable[[str], bool] | None"
"""Returns whether the tensor of that name is needed; None if the whole state is."""


@dataclass(frozen=True, slots=True)
class DeliveryPlan:
    """A save plan of one rank: made once, used until the structure changes.

    digest: of this rank's structure. world: what the coordinator knows about all ranks' plans; None on other ranks.
    structures, digests: each distinct structure by its digest, and each rank's digest.
    """

    digest: str
    rank_plan: RankPlan
    world: WorldPlan | None
    structures: Mapping[str, Structure] = field(default_factory=dict)
    digests: Sequence[str] = ()

    def ranks(self) -> Sequence[RankPlan]:
        """Plans of all ranks; computed at each access, which is slow for many ranks and tensors."""
        return plan_save(self.structures, self.digests).ranks


class Delivery(Protocol):
    """Makes one product of one capture. Derive from it and pass it to `Saver.start`, alike on every rank.

    Exactly one of `offer` and `refuse` is called, once, on the session's stager thread. Every save needs that thread:
    no method may block.
    """

    target: str = ""
    """Identifies the product when ranks are compared: if ranks start different deliveries, all are refused."""

    def needs(self) -> Needs:
        """Return which tensors are needed, by name; None for the whole state including objects.

        The capture copies the union of what its deliveries need.
        """
        return None

    def begin(self) -> None:
        """Record, on the training thread, what belongs to this moment but isn't in the state.

        An exception is raised by `Saver.start` and refuses the capture on every rank.
        """
        return

    def prepare(self) -> None:
        """Check, on the stager thread before the ranks agree, that the delivery can be made.

        An exception refuses the capture for all its deliveries on every rank.
        """
        return

    def stalled(self, seconds: float) -> None:
        """Note that the capture held up the training thread; called on that thread or on one that waited for it."""
        del seconds

    def offer(self, lease: WorkingLease) -> None:
        """Take the staged capture; ``lease.capture.error`` is set if it failed on this rank, perhaps only here.

        Release the lease as soon as the images aren't needed: a save may be waiting for the slot.
        """
        raise NotImplementedError

    def refuse(self, error: BaseException, *, skipped: bool) -> None:
        """End without a capture, with the same ``error`` on every rank. skipped: a rank was busy and skips."""
        raise NotImplementedError


class RefusedDelivery(Delivery):
    """Stands for a delivery that failed to begin on this rank; refuses the capture on every rank."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def needs(self) -> Needs:
        return lambda _name: False

    def begin(self) -> None:
        raise self._error

    def offer(self, lease: WorkingLease) -> None:
        lease.release()

    def refuse(self, error: BaseException, *, skipped: bool) -> None:
        """Do nothing: nobody waits for it."""


def needed_by(deliveries: Iterable[Delivery]) -> Needs:
    """Return the union of what ``deliveries`` need."""
    found = []
    for delivery in deliveries:
        needs = delivery.needs()
        if needs is None:
            return None
        found.append(needs)
    return lambda name: any(needs(name) for needs in found)


@dataclass(slots=True, eq=False)
class Capture:
    """One moment of the state on one rank, from its snapshot until its last working lease is released.

    Once staged, its images and plan don't change.
    """

    step: int | None
    rank: int
    snapshot: Snapshot
    staging: Staging
    deliveries: tuple[Delivery, ...]
    needs: Needs
    """Which tensors are copied; small values are copied in any case."""
    eager: bool
    on_end: Callable[[Capture], None]
    """Called once, when the last working lease is released."""
    take_back: Callable[[CaptureBuffer], None]
    """Called with the buffer when its last keeping lease is released, if that comes later."""
    answered: threading.Event
    """Set once every delivery has been offered the capture or refused."""
    stream: StreamedStaging | None = None
    """Its `staging`, if it is streamed: it has no images and is copied piece by piece while it is written."""
    number: int | None = None
    """Number of the save in the agreement protocol; None until its proposal is cast."""
    plan: DeliveryPlan | None = None
    look: Look | None = None
    """What was seen of the state when it was captured, if it is watched."""
    buffer: CaptureBuffer | None = None
    """``plan`` and ``buffer`` are None until the ranks have a plan that fits."""
    agreed: threading.Event = field(default_factory=threading.Event)
    """Set once the ranks agree on the plan that the copies are made for, or the capture is given up."""
    staged: threading.Event = field(default_factory=threading.Event)
    """Set once the plan is agreed on and copies are complete, or the capture is given up: the state may change."""
    error: BaseException | None = None
    """Why the capture failed."""
    skipped: bool = False
    confirmed: threading.Event = field(default_factory=threading.Event)
    """Set once the state was confirmed unchanged during staging, or that no longer matters."""
    rescued: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Eager values saved from a buffer that had to be replaced."""
    left_to_keepers: bool = False
    """The capture has ended, and keeping leases still hold its buffer."""
    _working: int = 0
    _keeping: int = 0
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    @property
    def target(self) -> str:
        """Targets of its deliveries, as ranks compare them."""
        return target_of(self.deliveries)

    def stalled(self, seconds: float) -> None:
        """Report to its deliveries that the training thread was held up."""
        for delivery in self.deliveries:
            delivery.stalled(seconds)

    def bytes_of(self, placed: PlacedTensor) -> torch.Tensor:
        """Return the bytes of a tensor of the plan in the image: read-only, one dimension of uint8."""
        assert self.buffer is not None
        start = self.buffer.file_offsets[placed.file] + placed.payload_offset
        return self.buffer.image.bytes_view[start : start + placed.nbytes]

    def give_up(self, error: BaseException | None) -> None:
        """Fail the capture with ``error`` (None: skipped) and release its waiters. Only the first call counts."""
        with self._deciding:
            if error is None:
                self.skipped = self.error is None
            elif self.error is None and not self.skipped:
                # If a copy failed because its source was changed, report that as the cause.
                lost = self.staging.lost()
                self.error = error if lost is None else self._changed(lost)
            self.confirmed.set()
        self.staging.abandon()
        self.agreed.set()
        self.staged.set()

    def offer(self) -> None:
        """Give each delivery a lease, then release the waiters. The capture ends with its last lease."""
        with self.lease():  # keeps it from ending before all have theirs
            for delivery in self.deliveries:
                lease = self.lease()
                try:
                    delivery.offer(lease)
                except BaseException as error:  # noqa: BLE001 - the thread serves every save
                    _log.exception("a delivery of step %s could not take its capture", self.step)
                    lease.release()
                    refuse_all([delivery], error, skipped=False)
            if self.stream is None:
                self.staged.set()
            self.answered.set()

    def refuse(self) -> None:
        """End the capture, then refuse its deliveries."""
        self.on_end(self)
        error = self.error or skipped_step(self.step)
        refuse_all(self.deliveries, error, skipped=self.skipped)
        self.answered.set()

    def lease(self) -> WorkingLease:
        """Return one more lease of its images; allowed only before the capture has ended."""
        with self._deciding:
            self._working += 1
        return WorkingLease(self)

    def keep(self) -> KeepingLease:
        """Return a lease of its buffer alone, which may outlive the capture; allowed only under a working lease."""
        with self._deciding:
            if self.buffer is None or not self._working:
                raise AssertionError("a capture that has ended has nothing to keep")
            self._keeping += 1
            return KeepingLease(self, self.buffer)

    def end_working(self) -> None:
        """Release one working lease; called by `WorkingLease`."""
        with self._deciding:
            self._working -= 1
            has_ended = self._working == 0
            self.left_to_keepers = has_ended and self._keeping > 0
        if has_ended:
            self.on_end(self)

    def end_keeping(self, buffer: CaptureBuffer) -> None:
        """Release one keeping lease; called by `KeepingLease`."""
        with self._deciding:
            self._keeping -= 1
            is_free = self.left_to_keepers and self._keeping == 0
        if is_free:
            self.take_back(buffer)

    def verify(self) -> None:
        """Check that the state did not change between capture and copy; set `error` to what changed.

        Runs on the training thread when it is about to change the state, or elsewhere after the grace of
        ``staging.copy_job``. Copies from host memory must be complete.
        """
        with self._deciding:
            if not self.confirmed.is_set():
                changed = self.staging.changed()
                self.error = None if changed is None else self._changed(changed)
            self.confirmed.set()

    def _changed(self, tensor: str) -> StateChangedWhileStaging:
        step = self.step
        instead = (
            "call manager.before_update() (or handle.wait_staged()) before changing captured state outside an "
            "optimizer step, or save with staging='eager'"
        )
        if self.stream is not None:
            instead = "let no other thread write to the state while it is being saved"
        return StateChangedWhileStaging(
            f"step {step}, rank {self.rank}: {tensor} was changed before its copy was complete; {instead}. Nothing was "
            "published",
            tensor=tensor,
            step=step,
        )


def target_of(deliveries: Iterable[Delivery]) -> str:
    """Return what ranks compare about deliveries that they start together."""
    return ", ".join(delivery.target for delivery in deliveries if delivery.target)


def refuse_all(deliveries: Iterable[Delivery], error: BaseException, *, skipped: bool) -> None:
    """Tell ``deliveries`` that there is no capture; if one raises, the others are still told."""
    for delivery in deliveries:
        try:
            delivery.refuse(error, skipped=skipped)
        except BaseException:  # noqa: BLE001 - the thread serves every save
            _log.exception("a delivery could not be told that it has no capture")


def skipped_step(step: int | None) -> SaveFailed:
    """Return the error of a skipped capture."""
    return SaveFailed(
        f"step {step} was skipped: all captures of some rank were in use and its configuration says "
        "when_busy='skip'; save less often, or set when_busy='wait'",
        step=step,
        rank=None,
    )


class WorkingLease:
    """A delivery's right to use the images of a capture, until `release`; a context manager.

    The capture occupies one of ``in_flight`` while any working lease is held.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture: Capture | None = capture
        self._lock = threading.Lock()

    @property
    def capture(self) -> Capture:
        """The capture; valid until `release`."""
        if self._capture is None:
            raise AssertionError("this lease of a capture was released")
        return self._capture

    def keep(self) -> KeepingLease:
        """Return a lease of the buffer alone; it is released separately, before or after this one."""
        return self.capture.keep()

    def release(self) -> None:
        """Give up the images; idempotent, any thread."""
        with self._lock:
            capture, self._capture = self._capture, None
        if capture is not None:
            capture.end_working()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class KeepingLease:
    """The right to a capture's buffer beyond the capture's end, until `release`. No save waits for it."""

    def __init__(self, capture: Capture, buffer: CaptureBuffer) -> None:
        self._held: tuple[Capture, CaptureBuffer] | None = capture, buffer
        self._lock = threading.Lock()

    def release(self) -> None:
        """Give the buffer back to the session; idempotent, any thread."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            capture, buffer = held
            capture.end_keeping(buffer)


class AwaitedDelivery(Delivery):
    """A delivery whose owner waits for the capture, on a thread of its own or on the training thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._dropped = False
        self._lease: WorkingLease | None = None
        self.error: BaseException | None = None
        """Why it was refused, equal on every rank."""

    def offer(self, lease: WorkingLease) -> None:
        with self._lock:
            is_late = self._dropped
            if not is_late:
                self._lease = lease
        self._answered.set()
        if is_late:
            lease.release()

    def refuse(self, error: BaseException, *, skipped: bool) -> None:
        del skipped
        self.error = error
        self._answered.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until a capture was offered or refused; return False on timeout."""
        return self._answered.wait(timeout_s)

    @property
    def lease(self) -> WorkingLease | None:
        """Lease of the capture that was offered, until `release`."""
        return self._lease

    @property
    def capture(self) -> Capture:
        """The capture that was offered; raises the refusal, which is equal on all ranks."""
        if self._lease is None:
            raise self.error or AssertionError("this delivery has no capture, or none any more")
        return self._lease.capture

    def release(self) -> None:
        """Give up the capture, also one that is yet to be offered; idempotent, any thread."""
        with self._lock:
            self._dropped = True
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class CapturePool:
    """Holds at most ``in_flight`` captures, and a buffer for each. Thread-safe.

    ``retire`` is called with every buffer that is no longer useful, after its last capture.
    """

    def __init__(self, in_flight: int, *, retire: Callable[[CaptureBuffer], None]) -> None:
        self._in_flight = in_flight
        self._retire = retire
        self._condition = threading.Condition()
        self._used = 0
        self._plan: RankPlan | None = None
        self._idle: list[CaptureBuffer] = []

    def take_slot(self, *, wait: bool, timeout_s: float) -> bool:
        """Claim a slot for one more capture; return False if none is free and ``wait`` is False."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._used >= self._in_flight:
                left = deadline - time.monotonic()
                if not wait:
                    return False
                if left <= 0:
                    raise DeadlineExceeded(
                        f"all {self._in_flight} captures stayed in use for {timeout_s:g} s: storage is too "
                        "slow for the save interval; save less often, raise the timeouts, or set "
                        "when_busy='skip'",
                        waited_for="a free capture",
                        timeout_s=timeout_s,
                    )
                self._condition.wait(left)
            self._used += 1
            return True

    def give_slot_back(self, buffer: CaptureBuffer | None) -> None:
        """End a capture: free its slot and, if it had one, its buffer."""
        with self._condition:
            self._used -= 1
            keep = buffer is not None and buffer.plan is self._plan
            if keep and buffer is not None:
                self._idle.append(buffer)
            self._condition.notify_all()
        if buffer is not None and not keep:
            self._retire(buffer)

    def take_buffer(self) -> CaptureBuffer | None:
        """Return an idle buffer of the current plan, or None."""
        with self._condition:
            return self._idle.pop() if self._idle else None

    def add_idle(self, buffer: CaptureBuffer) -> None:
        """Add a buffer that was made ahead of its use."""
        with self._condition:
            if buffer.plan is self._plan:
                self._idle.append(buffer)
                return
        self._retire(buffer)

    def take_back(self, buffer: CaptureBuffer) -> None:
        """Take back a buffer that outlived its capture; retire it if there are enough idle ones."""
        with self._condition:
            if buffer.plan is self._plan and len(self._idle) < self._in_flight:
                self._idle.append(buffer)
                return
        self._retire(buffer)

    def use_plan(self, plan: RankPlan | None) -> None:
        """Keep buffers of ``plan`` from now on, and retire idle buffers of any other."""
        with self._condition:
            if plan is self._plan:
                return
            old, self._idle, self._plan = self._idle, [], plan
        for buffer in old:
            self._retire(buffer)

    @property
    def idle_buffers(self) -> int:
        with self._condition:
            return len(self._idle)


# The capture of the last save, shared with others who need the same moment of the state, such as a weight version due
# with it.
#
#     save -> `SharedCaptures.take`: a `SharedCapture` takes the capture -> `wait`, `keep` -> the next update drops it
#
# Once somebody has called `join`, each capture is held until the state may change or the next save begins. Its buffer
# can be kept beyond that: the session makes another buffer for its next capture, and gets this one back later.
#
# Guarantees: `SharedCapture.wait_unchanged` returns what the watched tensors hold now, as far as changes are
# detectable; a held capture delays no save.
# Assumes: `wait_unchanged` and `keep` are called on the training thread, where updates are announced.
# Does not: copy, or know the purpose of a capture.


class SharedCapture(AwaitedDelivery):
    """The capture of the last save."""

    def needs(self) -> Needs:
        return lambda _name: False  # adds no tensors to those that others need

    def is_changed_by(self, parameters: Callable[[frozenset[int]], bool] | None) -> bool:
        """Return True if an update of ``parameters`` may change what was captured."""
        lease = self.lease
        return parameters is None or lease is None or parameters(lease.capture.snapshot.update_ids)

    def wait_unchanged(self, timeout_s: float) -> Capture | None:
        """Return the staged capture if the state still equals it; None otherwise or on timeout."""
        self.wait(timeout_s)
        capture = None if self.lease is None else self.lease.capture
        if capture is None or capture.error is not None or capture.plan is None or capture.number is None:
            return None
        return capture if capture.staging.outdated() is None else None

    def keep(self) -> KeepingLease:
        """Keep the buffer of the capture that `wait_unchanged` returned."""
        return self.capture.keep()


class SharedCaptures:
    """The captures of one session that others may use. ranks: the global ranks that save together, in order."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._users = 0
        self._held: SharedCapture | None = None

    def join(self) -> None:
        """Add a user: captures are held from now on."""
        self._users += 1

    def leave(self) -> None:
        """Remove a user."""
        self._users -= 1
        if not self._users:
            self.drop()

    @property
    def held(self) -> SharedCapture | None:
        """The last capture, if it is held."""
        return self._held

    def take(self) -> tuple[SharedCapture, ...]:
        """Return the `SharedCapture` that takes the next capture of the whole state, if there are users."""
        self._held = SharedCapture() if self._users else None
        return () if self._held is None else (self._held,)

    def drop(self) -> None:
        """Release the held capture: a new one may need its slot."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def before_update(self, parameters: Callable[[frozenset[int]], bool] | None) -> None:
        """Drop the held capture if the update may change it; parameters: as for `Saver.before_update`."""
        held = self._held
        if held is not None and held.is_changed_by(parameters):
            self.drop()
