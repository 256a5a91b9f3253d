"""Work of the stager thread: agree with the other ranks, replan if they differ, copy.

In the steady state `Stager.stage` casts a proposal, copies by the current plan while the proposals travel, and learns
that nothing has changed. Otherwise every rank plans from the same structures, makes a buffer for the new plan and
copies again: rare and slow, but exact, as the state may not change before staging has ended.

Guarantees: a rank casts a proposal for every save and reads the decision, whatever fails, so that ranks stay on the
same save; if a plan failed, the next proposal asks for a new one.
Runs on one thread; what the training thread may touch meanwhile is in the capture.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import events
from holdfast.coordination.failure import RankFailure
from holdfast.errors import EngineDied
from holdfast.format.objects import render_object
from holdfast.format.structure import digest_of
from holdfast.plan.write import RankPlan, plan_rank
from holdfast.saver.agreement import Agreement, PlanProposal, WorldPlan, tell_planned
from holdfast.saver.capture import Capture, CapturePool, DeliveryPlan, refuse_all, skipped_step, target_of
from holdfast.staging.buffer import CaptureBuffer
from holdfast.staging.image import unmap_unused

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from holdfast.coordination.group import Group
    from holdfast.saver.agreement import PlanDecision
    from holdfast.saver.capture import Delivery
    from holdfast.saver.process_session import SharedPlans
    from holdfast.saver.snapshot import Snapshot
    from holdfast.staging.copy_job import Staging

_log = logging.getLogger("holdfast")

IDLE_GRACE_S: Final = 60.0
"""How long the memory of a failed capture is kept for copies in progress."""
DEVICE_GRACE_S: Final = 10.0
"""How long an unused buffer is kept for enqueued copies from a device."""


@dataclass(slots=True)
class MissedSave:
    """A save for which this rank has no capture: busy, or refused. Its proposal tells the other ranks."""

    step: int | None
    deliveries: tuple[Delivery, ...]
    refusal: RankFailure | None
    answered: threading.Event
    """See `Capture.answered`."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A request to plan and make a buffer ahead of the first save; without a snapshot, says why this rank has none."""

    snapshot: Snapshot | None
    refusal: RankFailure | None = None


class BufferReservation:
    """Claims a free buffer made for a snapshot's structure, on the training thread.

    A context manager: if its block fails, the buffer is free again.
    """

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._digest: str | None = None
        self.buffer: CaptureBuffer | None = None

    def __call__(self, digest: str) -> CaptureBuffer | None:
        if digest != self._digest:
            self._give_back()
            self._digest, self.buffer = digest, self._stager.claim_buffer(digest)
        return self.buffer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self._give_back()

    def _give_back(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self._stager.pool.add_idle(buffer)


class Stager:
    """Agreement, plan and buffers of one session; ``plan`` is the current one, None until there is one."""

    def __init__(
        self,
        group: Group,
        forget: Callable[[CaptureBuffer], None],
        *,
        in_flight: int,
        stage_timeout_s: float,
        cores: Sequence[int] = (),
        shared: SharedPlans | None = None,
    ) -> None:
        """forget: called with each buffer that is about to be freed. cores: those that images are near.
        shared: plans and images of one-call saves are taken from it, and left to it after use.
        """
        self._group = group
        self._forget = forget
        self._stage_timeout_s = stage_timeout_s
        self._cores = cores
        self._agreement = Agreement(group.board.clone())
        self.pool = CapturePool(in_flight, retire=self.retire)
        self.plan: DeliveryPlan | None = None
        self._shared = shared
        self._adopted = ""
        """Name of the current plan if it came from an earlier session."""
        self._proven: DeliveryPlan | None = None
        """The plan whose buffers are left to later sessions: a save was published with it."""
        self.stuck: list[CaptureBuffer] = []
        """Buffers that a thread or device may still write to: never reused, never freed."""

    def leave(self) -> None:
        """Tell the other ranks that no save follows; called at the end of the stager thread."""
        self._agreement.leave()

    def disown(self, capture: Capture | None) -> None:
        """Drop a capture whose start was interrupted on the training thread: no other thread knows it."""
        if capture is not None and capture.buffer is not None:
            self.stuck.append(capture.buffer)  # a device may be writing to it
        self.pool.give_slot_back(None)

    def close(self) -> None:
        """Free the idle buffers and close the board, once no delivery is in progress."""
        self.pool.use_plan(None)
        unmap_unused()
        self._agreement.forget_plans()
        self._agreement.board.close()

    def leave_to_next(self) -> None:
        """Leave plan and buffers to later sessions, after a save was published; on the thread that published it."""
        if self._shared is not None and self.plan is not None:
            self._shared.note_published(self.plan.digest, self.plan)
            self._proven = self.plan
            self.pool.use_plan(None)

    def _adopt(self, digest: str) -> None:
        """Continue with the plan that an earlier session of this process left for the structure ``digest``."""
        found = None if self._shared is None or self.plan is not None else self._shared.take(digest)
        if found is not None:
            plan: DeliveryPlan = found[0]
            buffer: CaptureBuffer | None = found[1]
            # The same on all ranks that have made their plans together.
            self.plan, self._adopted = plan, digest_of("\n".join(plan.digests).encode())
            self.pool.use_plan(plan.rank_plan)
            if buffer is not None:
                self.pool.add_idle(buffer)

    def claim_buffer(self, digest: str) -> CaptureBuffer | None:
        """Return a free buffer of the current plan if that has the structure ``digest``; the caller then owns it."""
        self._adopt(digest)
        plan = self.plan
        buffer = None if plan is None or plan.digest != digest else self.pool.take_buffer()
        if buffer is not None and plan is not None and buffer.plan is not plan.rank_plan:
            self.pool.add_idle(buffer)  # the stager has just made a new plan
            return None
        return buffer

    def begin_copies(self, capture: Capture) -> None:
        """Enqueue device copies on the training thread, in the order of its stream, if the current plan fits."""
        snapshot = capture.snapshot
        if capture.stream is not None or not (snapshot.from_device or capture.eager):
            return
        if capture.buffer is None:
            capture.buffer = self.claim_buffer(snapshot.digest)
        if capture.buffer is not None:
            try:
                self.load_copies(capture, capture.buffer)
            except BaseException:
                self.put_back(capture.buffer, capture.staging)
                raise

    def load_copies(self, capture: Capture, buffer: CaptureBuffer) -> None:
        """Define what is copied into ``buffer``; enqueues copies from a device, on the calling thread."""
        snapshot, eager = capture.snapshot, capture.snapshot.eager
        if snapshot.from_device:
            buffer.image.pin()  # an earlier session may have used it for a state in host memory
        held = [buffer.copies_of({**eager.held, **capture.rescued})]
        if eager.gathered is not None:
            held.append(buffer.cached_copies_from(eager.gathered))
        if eager.standing is not None:
            standing = buffer.standing_copies(eager.plain)
            standing.locate(eager.standing)
            held.append(standing)
        elif eager.plain and buffer.is_used:
            buffer.prepare_eager(eager.plain)  # for the next save: this buffer is likely to be reused
        if capture.needs is None:
            lazy = buffer.cached_copies_of(snapshot.lazy, by_address=True)
        else:
            lazy = buffer.copies_of({name: tensor for name, tensor in snapshot.lazy.items() if capture.needs(name)})
        capture.staging.load(lazy, *held)

    def prepare(self, warm_up: WarmUp) -> None:
        """Agree and plan without a save; the first save reports what goes wrong here."""
        deadline = time.monotonic() + self._stage_timeout_s
        snapshot = warm_up.snapshot
        digest, encoded = ("", b"") if snapshot is None else (snapshot.digest, snapshot.encoded)
        try:
            proposal = PlanProposal(None, "warm-up", digest, replan=True, refusal=warm_up.refusal)
            number = self._cast(proposal, encoded)
            decision = self._agreement.wait_verdict(timeout_s=_left_s(deadline))
            if decision.kind == "replan" and snapshot is not None:
                plan = self._replan(number, decision, snapshot, _left_s(deadline))
                self.pool.use_plan(plan.rank_plan)
                buffer = self._make_buffer(plan.rank_plan, pin=snapshot.from_device)
                buffer.prepare_eager(snapshot.eager.plain)
                self.pool.add_idle(buffer)
                if plan.world is not None:
                    plan.world.complete(self._agreement.board, timeout_s=_left_s(deadline))
                self.plan = plan
        except Exception as error:  # noqa: BLE001 - the first save meets the error again, and reports it
            _log.warning("preparing the first save failed, it will be slower or fail too: %s", error)
        if snapshot is not None:
            snapshot.release()

    def miss(self, missed: MissedSave) -> None:
        """Tell the other ranks that this one can't take part; refuse its deliveries."""
        proposal = PlanProposal(
            missed.step, target_of(missed.deliveries), "", busy=missed.refusal is None, refusal=missed.refusal
        )
        error: BaseException
        skipped = False
        try:
            self._cast(proposal, b"")
            refusal = self._agreement.wait_verdict(timeout_s=self._stage_timeout_s).refusal
            skipped = refusal is None
            error = skipped_step(missed.step) if refusal is None else refusal.error(step=missed.step)
        except BaseException as failed:  # noqa: BLE001 - this thread must go on, and the handles must end
            error = failed
        refuse_all(missed.deliveries, error, skipped=skipped)
        missed.answered.set()

    def stage(self, capture: Capture) -> bool:
        """Agree with the other ranks and complete the copies; return False if the ranks agreed not to save."""
        snapshot = capture.snapshot
        deadline = time.monotonic() + self._stage_timeout_s
        self._adopt(snapshot.digest)
        plan = self.plan
        refusal: RankFailure | None = None
        try:
            for delivery in capture.deliveries:
                delivery.prepare()
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for this one's proposal in any case
            refusal = RankFailure.of(error, rank=self._group.rank)
        adopted = self._adopted if plan is not None and plan.digest == snapshot.digest else ""
        proposal = PlanProposal(
            capture.step, capture.target, snapshot.digest, replan=plan is None, refusal=refusal, plan=adopted
        )
        number = capture.number = self._cast(proposal, snapshot.encoded)
        failed: BaseException | None = None
        if plan is not None and plan.digest == snapshot.digest and refusal is None:
            try:
                # Optimistic: ranks almost always agree on the current plan.
                self._copy(capture, plan)
            except BaseException as error:  # noqa: BLE001 - raised below: no rank may leave a decision unread
                failed = error
        decision = self._agreement.wait_verdict(timeout_s=_left_s(deadline))
        if decision.kind == "refused" and decision.refusal is not None:
            capture.give_up(decision.refusal.error(step=capture.step))
            return False
        if decision.kind == "skip":
            capture.give_up(None)
            return False
        if decision.kind == "replan":
            self._adopted = ""
            self.plan = None  # if planning fails, the next proposal asks for a new plan
            if failed is None:
                plan = self._replan(number, decision, snapshot, _left_s(deadline))
                self._copy(capture, plan)
                self.plan = plan
            else:
                tell_planned(self._agreement.board, number, failed)
        if failed is not None:
            raise failed
        capture.agreed.set()
        capture.staging.run(timeout_s=_left_s(deadline))
        return True

    def _cast(self, proposal: PlanProposal, encoded_structure: bytes) -> int:
        """Call `Agreement.cast`; turn an unforeseen error into a refusal, which the other ranks get at once.

        Never raises: the decision, which must be read next, reports it.
        """
        agreement = self._agreement
        try:
            return agreement.cast(proposal, encoded_structure)
        except BaseException as error:  # noqa: BLE001 - a rank without a proposal would fall one save behind the others
            _log.exception("rank %d could not post its proposal for a save", self._group.rank)
            refusal = proposal.refusal or RankFailure.of(error, rank=self._group.rank)
        with contextlib.suppress(BaseException):  # then the others time out on it
            agreement.cast(msgspec.structs.replace(proposal, digest="", refusal=refusal), b"")
        return agreement.number

    def _replan(self, number: int, decision: PlanDecision, snapshot: Snapshot, timeout_s: float) -> DeliveryPlan:
        """Make a new plan; tell the coordinator, which waits for every rank, also if it fails."""
        board = self._agreement.board
        try:
            plan = self._new_plan(number, decision, snapshot, timeout_s)
        except BaseException as error:
            tell_planned(board, number, error)
            raise
        tell_planned(board, number, plan.rank_plan)
        return plan

    def _new_plan(self, number: int, decision: PlanDecision, snapshot: Snapshot, timeout_s: float) -> DeliveryPlan:
        """Plan this rank's part of save ``number``."""
        known = {snapshot.digest: snapshot.structure}
        structures = self._agreement.wait_structures(decision, known=known, timeout_s=timeout_s)
        rank, digests = self._group.rank, decision.rank_digests()
        events.count("plans_made")
        own = plan_rank(structures, digests, rank)
        world = WorldPlan(number, structures, digests, {rank: own}) if rank == 0 else None
        return DeliveryPlan(digests[rank], own, world, structures, digests)

    def _copy(self, capture: Capture, plan: DeliveryPlan) -> None:
        """Fill a buffer of ``plan``; replace the capture's buffer if it has one of another plan.

        On return, copies from host memory are complete, those from a device enqueued. A streamed capture is copied only
        once its attempt has begun.
        """
        if capture.stream is not None:
            capture.plan = plan
            return
        buffer = capture.buffer
        if buffer is None or buffer.plan is not plan.rank_plan:
            self.pool.use_plan(plan.rank_plan)
            buffer = self.pool.take_buffer() or self._make_buffer(plan.rank_plan, pin=capture.snapshot.from_device)
            if capture.buffer is not None:
                if capture.snapshot.eager.placed:
                    capture.rescued = capture.buffer.values_of(capture.snapshot.eager.plain)
                self.put_back(capture.buffer, capture.staging)
            capture.buffer = buffer
            self.load_copies(capture, buffer)
        elif not capture.staging.is_loaded:
            self.load_copies(capture, buffer)
        capture.plan = plan
        buffer.is_used = True
        for placed in buffer.plan.objects if capture.needs is None else ():
            record = render_object(capture.snapshot.objects[placed.source], placed.capacity)
            buffer.put_object(placed, record)
        capture.staging.help_copy()

    def _make_buffer(self, plan: RankPlan, *, pin: bool) -> CaptureBuffer:
        buffer = CaptureBuffer(plan)
        buffer.build(pin=pin, cores=self._cores)
        return buffer

    def end(self, capture: Capture) -> None:
        """End a capture that nobody uses: free its slot, and its buffer unless a keeping lease holds it."""
        buffer, capture.buffer = capture.buffer, None
        if capture.left_to_keepers:  # it was staged, so nobody writes to it any more
            buffer = None
        try:
            # Reuse the buffer only if nobody writes to it any more.
            if capture.staging.wait_idle(IDLE_GRACE_S):
                capture.snapshot.release()
            elif buffer is not None:
                _log.error("copies of step %s have not ended; their memory is kept", capture.step)
                self.stuck.append(buffer)
                buffer = None
            capture.staging.release()
        finally:
            self.pool.give_slot_back(buffer)

    def put_back(self, buffer: CaptureBuffer, staging: Staging) -> None:
        """Keep or free an unused buffer, once no device writes to it any more."""
        if staging.wait_device_idle(DEVICE_GRACE_S):
            self.pool.add_idle(buffer)
        else:
            _log.error("copies from a device have not ended; their memory is kept")
            self.stuck.append(buffer)

    def retire(self, buffer: CaptureBuffer) -> None:
        """Free a buffer that no capture will use again."""
        with contextlib.suppress(EngineDied):  # the engine is closed, and holds no image
            self._forget(buffer)
        proven, shared = self._proven, self._shared
        if shared is not None and proven is not None and buffer.plan is proven.rank_plan:
            buffer.forget_tensors()
            if shared.keep(proven.digest, proven, buffer):
                return
        buffer.close()


def _left_s(deadline: float) -> float:
    """Return the seconds until ``deadline``; at least 1 ms, as a wait of 0 s would not even check."""
    return max(0.001, deadline - time.monotonic())
