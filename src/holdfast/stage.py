"""The stager thread's work: agree with the other ranks, plan anew if they don't, copy.

In the steady state `Stager.stage` casts a ballot, copies by the plan in use while the ballots travel, and reads that
nothing has changed. Otherwise every rank plans from the same structures, makes a buffer for the new plan and copies
again: rare, slow, exact, for the state may not change before staging has ended.

Guarantees: a rank casts a ballot for every save and reads its verdict, whatever fails, so that ranks never drift apart
by a save; a plan that could not be carried out is asked for again by the next ballot.
One thread; what the training thread may touch meanwhile is in the capture.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import events
from holdfast.agreement import Agreement, Ballot
from holdfast.capture import Capture, CapturePool, DeliveryPlan, SaveRequest
from holdfast.errors import EngineDied, SaveFailed
from holdfast.format.objects import render_object
from holdfast.outcome import AbortReason
from holdfast.plan.write import RankPlan, plan_rank
from holdfast.staging.layout import CaptureBuffer
from holdfast.world_plan import WorldPlan, tell_planned

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from holdfast.agreement import Verdict
    from holdfast.capture import Taker
    from holdfast.delivery import Delivery
    from holdfast.group import Group
    from holdfast.handle import SaveHandle, Stage
    from holdfast.snapshot import Snapshot
    from holdfast.staging.stager import Staging

_log = logging.getLogger("holdfast")

IDLE_GRACE_S: Final = 60.0
"""How long the memory of a capture that was given up waits for copies that were under way."""
DEVICE_GRACE_S: Final = 10.0
"""How long a buffer that isn't wanted any more waits for copies off a device that were enqueued."""


@dataclass(slots=True)
class Absence:
    """A save this rank was called for and has no capture for: busy, or refused. Its ballot says so to the others."""

    request: SaveRequest
    handle: SaveHandle
    refusal: AbortReason | None
    takers: tuple[Taker, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Plan and make a buffer before the first save needs them; without a snapshot, say why this rank has none."""

    snapshot: Snapshot | None
    refusal: AbortReason | None = None


class Claim:
    """Asks for a buffer for a snapshot, where one is free that is made for its structure; on the training thread.

    A context manager: where its block fails, the buffer is free again.
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
    """Agreement, plan and buffers of one session; ``plan`` is the one in use, None before there is one."""

    def __init__(self, group: Group, delivery: Delivery, *, in_flight: int, stage_timeout_s: float) -> None:
        self._group = group
        self._delivery = delivery
        self._stage_timeout_s = stage_timeout_s
        self._agreement = Agreement(group.board.clone())
        self.pool = CapturePool(in_flight, retire=self.retire)
        self.plan: DeliveryPlan | None = None
        self.stuck: list[CaptureBuffer] = []
        """Buffers that some thread or device may still write to: never used again, never freed."""

    def leave(self) -> None:
        """Tell the other ranks that no save follows; on the stager thread, as the last thing it does."""
        self._agreement.leave()

    def disown(self, capture: Capture | None) -> None:
        """The training thread was interrupted when it had the capture, or nearly: nobody else knows it."""
        if capture is not None and capture.buffer is not None:
            self.stuck.append(capture.buffer)  # a device may be writing to it
        self.pool.give_slot_back(None)

    def close(self) -> None:
        """Free the idle buffers and let go of the board; once no delivery is in work."""
        self.pool.use_plan(None)
        self._agreement.forget_plans()
        self._agreement.board.close()

    def claim_buffer(self, digest: str) -> CaptureBuffer | None:
        """A buffer of the plan in use, if that is of the structure ``digest`` and one is free; it is the caller's."""
        plan = self.plan
        buffer = None if plan is None or plan.digest != digest else self.pool.take_buffer()
        if buffer is not None and plan is not None and buffer.plan is not plan.rank_plan:
            self.pool.add_idle(buffer)  # the stager has just made a new one
            return None
        return buffer

    def begin_copies(self, capture: Capture) -> None:
        """Where the plan in use fits: device copies are enqueued in the order of the training stream, by its thread."""
        snapshot = capture.snapshot
        if not (snapshot.from_device or capture.request.eager):
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
        """Say what is to be copied into ``buffer``; copies from a device are enqueued, on the calling thread."""
        snapshot, eager = capture.snapshot, capture.snapshot.eager
        held = [buffer.copies_of({**eager.held, **capture.rescued})]
        if eager.gathered is not None:
            held.append(buffer.cached_copies_from(eager.gathered))
        if eager.standing is not None:
            standing = buffer.standing_copies(eager.plain)
            standing.locate(eager.standing)
            held.append(standing)
        elif eager.plain and buffer.is_used:
            buffer.prepare_eager(eager.plain)  # for the next save: this buffer seems to be used again and again
        if capture.only is None:
            lazy = buffer.cached_copies_of(snapshot.lazy, by_address=True)
        else:
            lazy = buffer.copies_of({name: tensor for name, tensor in snapshot.lazy.items() if capture.only(name)})
        capture.staging.load(lazy, *held)

    def prepare(self, warm_up: WarmUp) -> None:
        """A save's agreement and planning without a save; what goes wrong here is told by the first save."""
        deadline = time.monotonic() + self._stage_timeout_s
        snapshot = warm_up.snapshot
        digest, encoded = ("", b"") if snapshot is None else (snapshot.digest, snapshot.encoded)
        try:
            ballot = Ballot(None, "warm-up", digest, replan=True, refusal=warm_up.refusal)
            number = self._cast(ballot, encoded)
            verdict = self._agreement.wait_verdict(timeout_s=_left_s(deadline))
            if verdict.kind == "replan" and snapshot is not None:
                plan = self._replan(number, verdict, snapshot, _left_s(deadline))
                self.pool.use_plan(plan.rank_plan)
                buffer = self._make_buffer(plan.rank_plan, pin=snapshot.from_device)
                buffer.prepare_eager(snapshot.eager.plain)
                self.pool.add_idle(buffer)
                if plan.world is not None:
                    plan.world.complete(self._agreement.board, timeout_s=_left_s(deadline))
                self.plan = plan
        except Exception as error:  # noqa: BLE001 - the first save meets it again, and tells
            _log.warning("preparing the first save failed, it will be slower or fail too: %s", error)
        if snapshot is not None:
            snapshot.release()

    def vote_absent(self, absence: Absence) -> tuple[BaseException, Stage]:
        """Tell the other ranks that this one can't take part; returns how its handle ends."""
        request, handle = absence.request, absence.handle
        ballot = Ballot(request.step, handle.path, "", busy=absence.refusal is None, refusal=absence.refusal)
        stage: Stage = "failed"
        error: BaseException
        try:
            self._cast(ballot, b"")
            refusal = self._agreement.wait_verdict(timeout_s=self._stage_timeout_s).refusal
            if refusal is not None:
                error = refusal.error(step=request.step)
            else:
                error, stage = skipped(request), "skipped"
        except BaseException as failed:  # noqa: BLE001 - this thread must go on, and the handle must end
            error = failed
        return error, stage

    def stage(self, capture: Capture) -> bool:
        """Copies complete and agreement in; False where the ranks agreed not to go on."""
        request, snapshot = capture.request, capture.snapshot
        deadline = time.monotonic() + self._stage_timeout_s
        plan = self.plan
        refusal: AbortReason | None = None
        try:
            if capture.complete is not None:
                request = capture.request = capture.complete(request)
            if request.checkpoint:
                self._delivery.check_target(request)
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for this one's ballot, whatever it is
            refusal = AbortReason.of(error, rank=self._group.rank)
        ballot = Ballot(request.step, capture.handle.path, snapshot.digest, replan=plan is None, refusal=refusal)
        number = capture.number = self._cast(ballot, snapshot.encoded)
        failed: BaseException | None = None
        if plan is not None and plan.digest == snapshot.digest and refusal is None:
            try:
                # Optimistic: the plan in use is almost always the one the ranks will agree on.
                self._copy(capture, plan)
            except BaseException as error:  # noqa: BLE001 - raised below: no rank may leave a verdict unread
                failed = error
        verdict = self._agreement.wait_verdict(timeout_s=_left_s(deadline))
        if verdict.kind == "refused" and verdict.refusal is not None:
            capture.give_up(verdict.refusal.error(step=request.step))
            return False
        if verdict.kind == "skip":
            capture.give_up(None)
            return False
        if verdict.kind == "replan":
            self.plan = None  # until there is a new one: if planning fails, the next ballot asks for it again
            if failed is None:
                plan = self._replan(number, verdict, snapshot, _left_s(deadline))
                self._copy(capture, plan)
                self.plan = plan
            else:
                tell_planned(self._agreement.board, number, failed)
        if failed is not None:
            raise failed
        capture.agreed.set()
        capture.staging.run(timeout_s=_left_s(deadline))
        events.emit("save.staged", step=request.step, rank=self._group.rank, path=capture.handle.path)
        capture.handle.add_stats(staging_s=capture.staging.copy_s)
        capture.handle.advance("staged")
        capture.staged.set()
        return True

    def _cast(self, ballot: Ballot, encoded_structure: bytes) -> int:
        """`Agreement.cast`, but for what nobody foresaw: that becomes a refusal, which the other ranks hear of at once.

        Never raises: the verdict that must be read next tells what became of it.
        """
        agreement = self._agreement
        try:
            return agreement.cast(ballot, encoded_structure)
        except BaseException as error:  # noqa: BLE001 - a rank without a ballot would fall behind the others by a save
            _log.exception("rank %d could not cast its ballot for a save", self._group.rank)
            refusal = ballot.refusal or AbortReason.of(error, rank=self._group.rank)
        with contextlib.suppress(BaseException):  # then the others give up waiting for it
            agreement.cast(msgspec.structs.replace(ballot, digest="", refusal=refusal), b"")
        return agreement.number

    def _replan(self, number: int, verdict: Verdict, snapshot: Snapshot, timeout_s: float) -> DeliveryPlan:
        """A new plan; whatever comes of it, the coordinator is told: it waits for every rank."""
        board = self._agreement.board
        try:
            plan = self._new_plan(number, verdict, snapshot, timeout_s)
        except BaseException as error:
            tell_planned(board, number, error)
            raise
        tell_planned(board, number, plan.rank_plan)
        return plan

    def _new_plan(self, number: int, verdict: Verdict, snapshot: Snapshot, timeout_s: float) -> DeliveryPlan:
        """This rank's own part of the plan agreed with save ``number``."""
        known = {snapshot.digest: snapshot.structure}
        structures = self._agreement.wait_structures(verdict, known=known, timeout_s=timeout_s)
        rank, digests = self._group.rank, verdict.rank_digests()
        events.count("plans_made")
        own = plan_rank(structures, digests, rank)
        world = WorldPlan(number, structures, digests, {rank: own}) if rank == 0 else None
        return DeliveryPlan(digests[rank], own, world, structures, digests)

    def _copy(self, capture: Capture, plan: DeliveryPlan) -> None:
        """Fill a buffer of ``plan``; the capture's buffer of another plan, if it has one, is given up.

        Copies from the host are made when this returns, those from a device are under way.
        """
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
        for placed in buffer.plan.objects if capture.request.checkpoint else ():
            record = render_object(capture.snapshot.objects[placed.source], placed.capacity)
            buffer.put_object(placed, record)
        capture.staging.help_copy()

    def _make_buffer(self, plan: RankPlan, *, pin: bool) -> CaptureBuffer:
        buffer = CaptureBuffer(plan)
        buffer.build(pin=pin)
        return buffer

    def let_go(self, capture: Capture) -> None:
        """One of those who use the capture needs it no more; the last gives everything back."""
        if not capture.leave():
            return
        buffer, capture.buffer = capture.buffer, None
        if capture.left_to_keepers:  # it was staged, so nobody writes to it any more
            buffer = None
        try:
            # Nobody writes to the buffer any more, or nobody else ever gets it.
            if capture.staging.wait_idle(IDLE_GRACE_S):
                capture.snapshot.release()
            elif buffer is not None:
                _log.error("copies of step %s do not end; their memory is kept", capture.request.step)
                self.stuck.append(buffer)
                buffer = None
            capture.staging.release()
        finally:
            self.pool.give_slot_back(buffer)

    def keep(self, capture: Capture) -> Callable[[], None]:
        """Have the buffer of a staged capture outlive it, in nobody's place; returns what ends that."""
        buffer = capture.keep()

        def end() -> None:
            if capture.end_keeping():
                self.pool.take_back(buffer)

        return end

    def put_back(self, buffer: CaptureBuffer, staging: Staging) -> None:
        """Keep or free a buffer that isn't wanted after all, once no device writes to it any more."""
        if staging.wait_device_idle(DEVICE_GRACE_S):
            self.pool.add_idle(buffer)
        else:
            _log.error("copies off a device do not end; the memory they go to is kept")
            self.stuck.append(buffer)

    def retire(self, buffer: CaptureBuffer) -> None:
        """Free a buffer that no capture will use again."""
        with contextlib.suppress(EngineDied):  # it was closed, and holds no image any more
            self._delivery.forget(buffer)
        buffer.close()


def _left_s(deadline: float) -> float:
    """Seconds until ``deadline``, never quite zero: a wait of 0 s would not even look."""
    return max(0.001, deadline - time.monotonic())


def skipped(request: SaveRequest) -> SaveFailed:
    """What the handle of a skipped save ends in."""
    return SaveFailed(
        f"step {request.step} was skipped: all captures of some rank were in use and its configuration says "
        "when_busy='skip'; save less often, or set when_busy='wait'",
        step=request.step,
        rank=None,
    )
