"""A capture becomes a published checkpoint: the finalizer thread's half of a save.

    begin -> engine persists -> staging verified -> report -> settle -> `Checkpoint`

What other deliveries have in common with it is in `Carrier`: they have plans and images of their own.

Guarantees: a rank that fails anywhere votes to abort with its cause, once its engine can no longer report; every
rank ends with the same outcome. An engine that died or fell silent is replaced, so that the next save finds one.
Runs on one thread per session, attempts one after the other, with a board client of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

from holdfast import events
from holdfast._version import __version__
from holdfast.checkpoint import Checkpoint
from holdfast.commit import Attempt, Deadlines
from holdfast.engine.messages import FileRow
from holdfast.errors import DeadlineExceeded, HoldfastError, OutcomeUnknown
from holdfast.format.manifest import (
    METADATA_NAME,
    AttemptPlan,
    Manifest,
    ManifestFile,
    ManifestReport,
    encode_index,
    format_of,
    report_name,
)
from holdfast.format.sealed import xxh3_128
from holdfast.outcome import Aborted, AbortReason, Outcome
from holdfast.plan.index import index_of
from holdfast.root import attempt_id, refuse_occupied
from holdfast.source import open_published
from holdfast.staging.stager import VERIFY_GRACE_S
from holdfast.storage.lease import lease_name
from holdfast.trash import Trash
from holdfast.world_plan import Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.capture import Capture, DeliveryPlan, SaveRequest
    from holdfast.config import CheckpointConfig
    from holdfast.coordination import Board
    from holdfast.engine.client import EngineClient
    from holdfast.format.manifest import Kind
    from holdfast.group import Group
    from holdfast.outcome import Deed
    from holdfast.staging.layout import CaptureBuffer
    from holdfast.storage.local import LocalStorage

_log = logging.getLogger("holdfast")

Planned: TypeAlias = "tuple[AttemptPlan, dict[str, bytes]] | AbortReason"
"""What is to be attempted, with the files known beforehand; or why nothing is."""
ABORT_LOOK_S: Final = 1.0
"""How often a rank that waits for its engine looks whether another rank has given up."""


class Carrier:
    """One rank's way through the attempts of a session, whatever they deliver: one after the other, on one thread.

    What all deliveries have in common: to begin, to have the engine persist a plan from an image, to report, to settle.
    """

    def __init__(
        self,
        storage: LocalStorage,
        group: Group,
        engine: EngineClient,
        deadlines: Deadlines,
        *,
        what: Deed = "save",
    ) -> None:
        self._what = what
        self._storage = storage
        self._group = group
        self._board = group.board.clone()
        self._engine = engine
        self._trash = Trash(storage, engine)
        self._deadlines = deadlines

    @property
    def board(self) -> Board:
        """This thread's own."""
        return self._board

    def close(self, timeout_s: float) -> None:
        """Wait, at most ``timeout_s``, for removals under way, and let go of the board."""
        self._trash.remove_again()
        with contextlib.suppress(HoldfastError):  # what stays is trash, and swept by the next start
            self._engine.wait_removals(timeout_s)
        self._board.close()

    def begin(self, key: str, plan: Callable[[float], Planned], *, step: int | None) -> Attempt:
        """Begin the attempt ``key``, which every rank calls; see `Attempt.begin`, and for what it raises.

        plan: called on rank 0 for what is to be attempted, with the seconds that it may wait for others; what it raises
        is the reason for which no rank begins.
        """
        self._trash.remove_again()
        found, prewritten, refusal = None, None, None
        if self._group.rank == 0:
            try:
                # Less than the others wait for this rank to begin: they are to hear its reason.
                answer = plan(0.8 * self._deadlines.begin_s)
                if isinstance(answer, AbortReason):
                    refusal = answer
                else:
                    found, prewritten = answer
            except Exception as error:  # noqa: BLE001 - told to the other ranks, who wait for this one
                refusal = AbortReason.of(error, rank=0, unreported=True)
        return Attempt.begin(
            storage=self._storage,
            board=self._board,
            clock=time.monotonic,
            key=key,
            deadlines=self._deadlines,
            plan=found,
            prewritten=prewritten,
            refusal=refusal,
            step=step,
            what=self._what,
            host=socket.gethostname(),
            remove=self.remove,
        )

    def persist(self, attempt: Attempt, *, plan: int, image: int) -> None:
        """Have the engine write ``plan`` from ``image`` (numbers it gave) into the attempt; doesn't wait.

        No report is written before `EngineClient.staging_verified`.
        """
        fd = self._storage.open_dir(attempt.directory)
        try:
            self._engine.persist(
                fd,
                attempt=attempt.id,
                plan=plan,
                image=image,
                step=attempt.step,
                world=self._group.world,
                report_name=report_name(self._group.rank),
                lease_name=lease_name(self._group.rank),
            )
        finally:
            os.close(fd)

    def wait_reported(self, attempt: Attempt) -> ManifestReport:
        """This rank's line of the manifest, its report being durable; ends early where a rank has given up."""
        deadline = time.monotonic() + self._deadlines.persist_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                found = self._engine.wait_reported(attempt.id, timeout_s=min(ABORT_LOOK_S, max(0.001, left_s)))
            except DeadlineExceeded as late:
                if (reason := attempt.aborted()) is not None:
                    raise reason.cause() from late
                if left_s <= ABORT_LOOK_S:
                    limit_s = self._deadlines.persist_s
                    if waiting := self._engine.waiting_for(attempt.id):
                        raise DeadlineExceeded(
                            f"rank {self._group.rank}: nothing was written within {limit_s:g} s, the "
                            f"`persist_timeout`: it waited for {waiting}; end those, or raise `host_writers`",
                            waited_for=waiting,
                            timeout_s=limit_s,
                        ) from late
                    raise DeadlineExceeded(
                        f"rank {self._group.rank}: its bytes were not durable after {limit_s:g} s; storage is slower "
                        "than `persist_timeout` allows, or hangs",
                        waited_for="the engine's report",
                        timeout_s=limit_s,
                    ) from late
            else:
                rank = self._group.rank
                return ManifestReport(rank, report_name(rank), found.size, found.digest, found.nbytes, found.parts)

    def carry(
        self,
        attempt: Attempt,
        persist: Callable[[], ManifestReport],
        *,
        before_publish: Callable[[], None] | None = None,
    ) -> tuple[Outcome, float]:
        """From begun to its end: what became of the attempt, and the seconds since this rank had ``persist`` behind it.

        ``persist`` returns once the rank's report is durable; what it raises is a vote to give the attempt up, which is
        cast once the engine can't report any more. ``before_publish``: see `Attempt.settle`. Raises `OutcomeUnknown`.
        """
        unreported: AbortReason | None = None
        may_be_left = True
        try:
            report = persist()
        except BaseException as error:  # noqa: BLE001 - becomes this rank's vote, and is raised by settle's outcome
            stopped, may_be_left = self._stop_engine_work(attempt)
            unreported = AbortReason.of(error, rank=self._group.rank, unreported=stopped)
        else:
            attempt.report(report)
        reported = time.perf_counter()
        try:
            outcome = attempt.settle(unreported=unreported, may_be_left=may_be_left, before_publish=before_publish)
        finally:  # whatever became of it: what is in the trash is durably out of sight
            for name in attempt.trash:
                self.remove(name)
        commit_s = time.perf_counter() - reported
        if isinstance(outcome, Aborted):
            self._stop_engine_work(attempt)
        return outcome, commit_s

    def remove(self, name: str) -> None:
        """Have the engine remove a trashed directory of the root; doesn't wait. What can't be is for the next start."""
        self._trash.remove(name)

    def _stop_engine_work(self, attempt: Attempt) -> tuple[bool, bool]:
        """Have the engine write no report for this attempt any more; it confirms, or is killed, and starts anew later.

        Whether that is confirmed (else it may hang in the system, and write one yet), and whether it may have left one.
        """
        try:
            return True, self._engine.cancel(attempt.id, timeout_s=10.0)
        except HoldfastError as error:
            _log.warning("attempt %s: %s", attempt.id, error)
            return False, True


def deadlines_of(config: CheckpointConfig) -> Deadlines:
    """Those of an attempt, whatever it delivers."""
    return Deadlines(begin_s=config.commit_timeout, persist_s=config.persist_timeout, commit_s=config.commit_timeout)


class Delivery:
    """Delivers captures of one session as checkpoints, one after the other, on the finalizer thread."""

    def __init__(self, storage: LocalStorage, group: Group, engine: EngineClient, config: CheckpointConfig) -> None:
        self._storage = storage
        self._group = group
        self._engine = engine
        self._carrier = Carrier(storage, group, engine, deadlines_of(config))
        self._engine_plan: tuple[DeliveryPlan, int] | None = None

    def close(self, timeout_s: float) -> None:
        """Wait, at most ``timeout_s``, for removals under way, and let go of the board."""
        self._carrier.close(timeout_s)

    def deliver(self, capture: Capture) -> Checkpoint:
        """Publish ``capture`` and return the checkpoint; else raise what every rank raises."""
        step, handle = capture.request.step, capture.handle
        self._tell_engine(capture)
        attempt = self._carrier.begin(
            f"attempt/{capture.number}", lambda timeout_s: self._planned(capture, timeout_s), step=step
        )
        handle.attempt = attempt.id
        outcome, commit_s = self._carrier.carry(attempt, lambda: self._persist(capture, attempt))
        handle.add_stats(commit_s=commit_s)
        if isinstance(outcome, Aborted):
            raise outcome.reason.error(step=step)
        path = self._storage.path(attempt.name)
        try:
            return Checkpoint(open_published(path, attempt=attempt.id, step=step, world=self._group.world))
        except HoldfastError as error:
            raise OutcomeUnknown(
                f"attempt {attempt.id} was published, but rank {self._group.rank} can't open {path}: {error}",
                attempt=attempt.id,
                step=step,
            ) from error

    def remove(self, name: str) -> None:
        """Have the engine remove a trashed directory of the root; doesn't wait. What can't be is for the next start."""
        self._carrier.remove(name)

    def forget(self, buffer: CaptureBuffer) -> None:
        """The buffer is about to be freed: the engine must not keep its image."""
        if buffer.engine_image is not None:
            self._engine.drop_image(buffer.engine_image)
            buffer.engine_image = None

    def check_target(self, request: SaveRequest) -> None:
        """Raise `CheckpointExists` if something is where ``request`` is to be published; rank 0 looks for all."""
        if self._group.rank == 0 and not request.overwrite:
            refuse_occupied(self._storage, request.name, step=request.step)

    def _planned(self, capture: Capture, timeout_s: float) -> Planned:
        """What all ranks will write; of the first save of a plan all must have told. Empty where there is no plan."""
        delivery, request = capture.plan, capture.request
        whole: Whole | AbortReason = Whole(((),) * self._group.world, None)
        if delivery is not None and delivery.world is not None:
            whole = delivery.world.complete(self._carrier.board, timeout_s=timeout_s)
        if isinstance(whole, AbortReason):
            return whole
        prewritten = {} if whole.metadata is None else {METADATA_NAME: whole.metadata}
        return plan_attempt(
            request.name,
            whole,
            prewritten,
            step=request.step,
            metrics=request.metrics,
            resumable=request.resumable,
            extra=request.extra,
            overwrite=request.overwrite,
        )

    def _tell_engine(self, capture: Capture) -> None:
        """Hand a plan that is new to the engine, which gets ready while this rank begins."""
        if capture.error is None and capture.plan is not None and capture.buffer is not None:
            with contextlib.suppress(Exception):  # it is met again when the others can be told
                self._plan_in_engine(capture.plan, capture.buffer)

    def _persist(self, capture: Capture, attempt: Attempt) -> ManifestReport:
        """From staged to reported: returns this rank's line of the manifest, its report being durable."""
        if capture.error is not None:
            raise capture.error
        if capture.buffer is None or capture.plan is None:
            raise AssertionError("a capture without error has a plan")
        began = time.perf_counter()
        capture.handle.advance("persisting")
        self._carrier.persist(
            attempt,
            plan=self._plan_in_engine(capture.plan, capture.buffer),
            image=self._image_in_engine(capture.buffer),
        )
        verify_staging(capture)
        self._engine.staging_verified(attempt.id)
        line = self._carrier.wait_reported(attempt)
        capture.handle.add_stats(persist_s=time.perf_counter() - began, bytes=line.nbytes)
        events.count("bytes_persisted", line.nbytes)
        return line

    def _image_in_engine(self, buffer: CaptureBuffer) -> int:
        if buffer.engine_image is None:
            buffer.engine_image = self._engine.add_image(buffer.image.fd, buffer.image.nbytes)
        return buffer.engine_image

    def _plan_in_engine(self, plan: DeliveryPlan, buffer: CaptureBuffer) -> int:
        if self._engine_plan is not None:
            known, number = self._engine_plan
            if known is plan:
                return number
            self._engine_plan = None  # before anything can fail: a number that was dropped is never used again
            self._engine.drop_plan(number)
        number = self._engine.add_plan(**write_plan(plan, buffer))
        self._engine_plan = (plan, number)
        return number


def plan_attempt(
    name: str,
    whole: Whole,
    prewritten: Mapping[str, bytes],
    *,
    step: int | None,
    metrics: Mapping[str, float],
    resumable: bool,
    extra: Mapping[str, Any],
    overwrite: bool,
    kind: Kind = "checkpoint",
    versions: Mapping[str, str] | None = None,
) -> tuple[AttemptPlan, dict[str, bytes]]:
    """The plan of a new attempt at publishing ``name``, with what is to be prewritten: for the coordinator.

    whole: what each rank writes. prewritten: content of small files by name, all of them listed in the manifest; those
    of an export may lie one directory below. versions: of what else had a part in it.
    """
    attempt, world = attempt_id(), len(whole.planned)
    manifest = Manifest(
        format=format_of(kind),
        name=name,
        attempt=attempt,
        step=step,
        world=world,
        created=datetime.now(timezone.utc).isoformat(),
        metrics=dict(metrics),
        resumable=resumable,
        versions={
            "holdfast": __version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            **(versions or {}),
        },
        reports=(),
        files=tuple(ManifestFile(file, len(data), xxh3_128(data)) for file, data in prewritten.items()),
        extra=dict(extra),
        kind=kind,
    )
    plan = AttemptPlan(
        attempt=attempt,
        name=name,
        step=step,
        world=world,
        planned=whole.planned,
        manifest=manifest,
        overwrite=overwrite,
        parts=whole.parts,
    )
    return plan, dict(prewritten)


def verify_staging(capture: Capture) -> None:
    """Let the training thread say that the state held still; after a grace, look here. See ``staging.stager``.

    Raises what keeps the capture from being one.
    """
    copied_at = capture.staging.copied_at
    grace_s = VERIFY_GRACE_S if copied_at is None else copied_at + VERIFY_GRACE_S - time.monotonic()
    if grace_s > 0:
        capture.passed.wait(grace_s)
    capture.verify()
    if capture.error is not None:
        raise capture.error


def write_plan(plan: DeliveryPlan, buffer: CaptureBuffer) -> dict[str, Any]:
    """The engine's `AddPlan` of a rank plan: files, payload ranges in image coordinates, and the rendered index."""
    rank_plan, bases = plan.rank_plan, buffer.file_offsets
    offsets = [bases[placed.file] + placed.payload_offset for placed in rank_plan.tensors]
    sizes = [placed.nbytes for placed in rank_plan.tensors]
    count = len(offsets)
    return {
        "files": tuple(FileRow(file.name, file.size, base) for file, base in zip(rank_plan.files, bases, strict=True)),
        "tensor_offsets": struct.pack(f"<{count}Q", *offsets),
        "tensor_sizes": struct.pack(f"<{count}Q", *sizes),
        "index": encode_index(index_of(rank_plan)),
    }
