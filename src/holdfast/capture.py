"""One capture: the state of one step on one rank, on its way into file images.

`Capture` is a snapshot with where it is going and how far it has come. One checkpoint may be made from it, and any
number of other deliveries (`Taker`), which use the same images at the same time. `CapturePool` bounds how many there
are and owns their buffers: made for the plan in use, reused for ever, replaced when the plan changes.

Guarantees: a capture's slot is given back exactly once, whatever happened to it; buffers of an old plan are freed as
soon as no capture uses them.
Does not copy (``staging``), talk to other ranks (``agreement``) or persist (``engine``).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import DeadlineExceeded, StateChangedWhileStaging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from holdfast.handle import SaveHandle
    from holdfast.plan.structure import Structure
    from holdfast.plan.write import RankPlan
    from holdfast.snapshot import Snapshot
    from holdfast.staging.layout import CaptureBuffer
    from holdfast.staging.stager import Staging
    from holdfast.world_plan import WorldPlan


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What one call of save asked for. ``name`` is the directory it will be published as."""

    step: int | None
    name: str
    metrics: Mapping[str, float]
    """As they were given; rank 0's count."""
    resumable: bool
    overwrite: bool
    eager: bool
    extra: dict[str, Any] = field(default_factory=dict)
    """Further members of the manifest."""
    checkpoint: bool = True
    """False: nothing is published as ``name``; the capture is made for its takers alone."""


@dataclass(frozen=True, slots=True)
class DeliveryPlan:
    """A save plan as one rank carries it out: made once, used until the structure changes.

    digest: of this rank's structure. world: what the coordinator knows of all ranks' plans; None elsewhere.
    structures, digests: each distinct structure by its digest, and the digest of each rank's.
    """

    digest: str
    rank_plan: RankPlan
    world: WorldPlan | None
    structures: Mapping[str, Structure] = field(default_factory=dict)
    digests: Sequence[str] = ()


class Taker(Protocol):
    """Another delivery from a capture. Exactly one of these is called, on a thread of the session; neither waits."""

    def offer(self, capture: Capture, let_go: Callable[[], None]) -> None:
        """The capture is staged, or ``capture.error`` says why it isn't; ``let_go`` is called when it isn't needed."""

    def refuse(self, error: BaseException) -> None:
        """There is no capture; the same on every rank."""


@dataclass(slots=True, eq=False)
class Capture:
    """One save of one rank between `save` and the end of its handle."""

    request: SaveRequest
    handle: SaveHandle
    rank: int
    snapshot: Snapshot
    staging: Staging
    number: int | None = None
    """Of the save, as the ranks agree on it; None until its ballot is cast."""
    plan: DeliveryPlan | None = None
    buffer: CaptureBuffer | None = None
    """Both None until the ranks have a plan that fits."""
    agreed: threading.Event = field(default_factory=threading.Event)
    """The ranks agree on the plan the copies are made for, or there will be none."""
    staged: threading.Event = field(default_factory=threading.Event)
    """Agreed, and copies complete, or there will be none: the state may be changed."""
    error: BaseException | None = None
    """Why there is no capture after all."""
    complete: Callable[[SaveRequest], SaveRequest] | None = None
    """On rank 0: fills in the request what storage has to be asked for."""
    skipped: bool = False
    passed: threading.Event = field(default_factory=threading.Event)
    """Nobody need be asked any more whether the state held still."""
    takers: tuple[Taker, ...] = ()
    only: Callable[[str], bool] | None = None
    """Which tensors are to be copied, by name; None for all. What is small is copied all the same."""
    rescued: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Eager values that were in a buffer which didn't do after all."""
    _users: int = 1
    _keepers: int = 0
    left_to_keepers: bool = False
    """Its end has come, and its buffer is still needed."""
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    def give_up(self, error: BaseException | None) -> None:
        """There is no capture, for ``error`` (None: skipped); whoever waits for it goes on. The first call counts."""
        with self._deciding:
            if error is None:
                self.skipped = self.error is None
            elif self.error is None and not self.skipped:
                # A copy that failed because its source was changed has that as its cause.
                lost = self.staging.lost()
                self.error = error if lost is None else self._changed(lost)
            self.passed.set()
        self.staging.abandon()
        self.agreed.set()
        self.staged.set()

    def offer(self, let_go: Callable[[], None]) -> None:
        """Hand it to its takers, each of which calls ``let_go`` once."""
        takers, self.takers = self.takers, ()
        with self._deciding:
            self._users += len(takers)
        for taker in takers:
            taker.offer(self, let_go)

    def refuse(self, error: BaseException) -> None:
        """Tell its takers that there is none."""
        takers, self.takers = self.takers, ()
        for taker in takers:
            taker.refuse(error)

    def leave(self) -> bool:
        """One of those who use its images has done so; True for the last."""
        with self._deciding:
            self._users -= 1
            self.left_to_keepers = self._users == 0 and self._keepers > 0
            return self._users == 0

    def keep(self) -> CaptureBuffer:
        """Have its buffer outlive it, for one more who calls `end_keeping` then; while somebody uses its images."""
        with self._deciding:
            if self.buffer is None or not self._users:
                raise AssertionError("a capture that has ended has nothing to keep")
            self._keepers += 1
            return self.buffer

    def end_keeping(self) -> bool:
        """One of those who keep its buffer needs it no more; True if nobody does, and it has ended."""
        with self._deciding:
            self._keepers -= 1
            return self.left_to_keepers and self._keepers == 0

    def verify(self) -> None:
        """Decide whether the state held still between capture and copy: `error` says what changed, if anything did.

        On the training thread when it is about to change the state, or elsewhere after the grace of
        ``staging.stager``. Copies from the host must be complete.
        """
        with self._deciding:
            if not self.passed.is_set():
                changed = self.staging.changed()
                self.error = None if changed is None else self._changed(changed)
            self.passed.set()

    def _changed(self, tensor: str) -> StateChangedWhileStaging:
        step = self.request.step
        return StateChangedWhileStaging(
            f"step {step}, rank {self.rank}: {tensor} was changed before its copy was complete; call "
            "manager.before_update() (or handle.wait_staged()) before changing captured state outside an optimizer "
            "step, or save with staging='eager'. Nothing was published",
            tensor=tensor,
            step=step,
        )


class CapturePool:
    """At most ``in_flight`` captures, and a buffer for each. Thread-safe.

    ``retire`` is called with every buffer that is no longer of use, after its last capture.
    """

    def __init__(self, in_flight: int, *, retire: Callable[[CaptureBuffer], None]) -> None:
        self._in_flight = in_flight
        self._retire = retire
        self._condition = threading.Condition()
        self._used = 0
        self._plan: RankPlan | None = None
        self._idle: list[CaptureBuffer] = []

    def take_slot(self, *, wait: bool, timeout_s: float) -> bool:
        """Claim the right to one more capture; False if there is none now and ``wait`` is False."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self._used >= self._in_flight:
                left = deadline - time.monotonic()
                if not wait:
                    return False
                if left <= 0:
                    raise DeadlineExceeded(
                        f"all {self._in_flight} captures stayed in use for {timeout_s:g} s: storage is slower than the "
                        "saving interval; save less often, raise the timeouts, or set when_busy='skip'",
                        waited_for="a free capture",
                        timeout_s=timeout_s,
                    )
                self._condition.wait(left)
            self._used += 1
            return True

    def give_slot_back(self, buffer: CaptureBuffer | None) -> None:
        """End a capture: its buffer, if it had one, is free for the next."""
        with self._condition:
            self._used -= 1
            keep = buffer is not None and buffer.plan is self._plan
            if keep and buffer is not None:
                self._idle.append(buffer)
            self._condition.notify_all()
        if buffer is not None and not keep:
            self._retire(buffer)

    def take_buffer(self) -> CaptureBuffer | None:
        """An idle buffer of the plan in use, or None."""
        with self._condition:
            return self._idle.pop() if self._idle else None

    def add_idle(self, buffer: CaptureBuffer) -> None:
        """Keep a buffer that was made ahead."""
        with self._condition:
            if buffer.plan is self._plan:
                self._idle.append(buffer)
                return
        self._retire(buffer)

    def take_back(self, buffer: CaptureBuffer) -> None:
        """A buffer that outlived its capture is free: one of as many as there may be captures, or not needed."""
        with self._condition:
            if buffer.plan is self._plan and len(self._idle) < self._in_flight:
                self._idle.append(buffer)
                return
        self._retire(buffer)

    def use_plan(self, plan: RankPlan | None) -> None:
        """Make buffers of ``plan`` the ones to keep, and retire the idle ones of any other."""
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
