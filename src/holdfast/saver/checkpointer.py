"""Checkpoints: publish a whole capture as a directory that a run can resume from.

    `Saver.checkpoint` -> `CheckpointDelivery` -> staged -> `Checkpointer.deliver`, in the background -> `Checkpoint`

Guarantees: every rank gets the same outcome; checkpoints are published in the order in which captures were staged. A
plan is sent to the engine once, until the structure changes.
Runs one attempt after the other on one thread per session, with its own board client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast import events
from holdfast.catalog.root import refuse_occupied
from holdfast.coordination.failure import RankFailure
from holdfast.engine.messages import FileRow
from holdfast.engine.ring import pieces_of
from holdfast.errors import ConfigError, HoldfastError, OutcomeUnknown, SaveFailed
from holdfast.format.manifest import METADATA_NAME, encode_index, may_hold_data
from holdfast.loader.checkpoint import Checkpoint
from holdfast.loader.sources.holdfast import open_published
from holdfast.loader.sources.object_store import open_object
from holdfast.plan.write import index_of
from holdfast.saver.agreement import Whole
from holdfast.saver.deliverer import Deliverer, DeliveryJob
from holdfast.saver.delivery import REMOVAL_GRACE_S, AttemptRunner, deadlines_of, note_of, plan_attempt, verify_staging
from holdfast.saver.process_session import process_session
from holdfast.saver.suspicion import suspicions
from holdfast.staging.stream import SLOT_BYTES
from holdfast.storage.leases import LEASE_PREFIX
from holdfast.storage.object_storage import ObjectStorage, refuse_replacing
from holdfast.validation import checked_metrics, name_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.commit.attempt import Attempt
    from holdfast.commit.messages import RankNote
    from holdfast.config import CheckpointConfig
    from holdfast.coordination.group import Group
    from holdfast.engine.client import EngineClient
    from holdfast.format.manifest import ChainMember, ManifestReport
    from holdfast.plan.write import RankPlan
    from holdfast.saver.capture import Capture, DeliveryPlan, WorkingLease
    from holdfast.saver.delivery import Planned
    from holdfast.saver.handle import SaveHandle, Stage
    from holdfast.staging.buffer import CaptureBuffer
    from holdfast.staging.stream import StreamedStaging
    from holdfast.storage.protocol import Storage


_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Arguments of one save. ``name`` is the directory that it will be published as."""

    step: int | None
    name: str
    metrics: Mapping[str, float]
    """Metrics as passed by the user; rank 0's are stored."""
    resumable: bool
    overwrite: bool
    extra: dict[str, Any] = field(default_factory=dict)
    """Further members of the manifest."""
    files: Mapping[str, Any] | None = None
    """Contents, or paths, of extra files by name, as they were given; rank 0's count."""
    late_extra: Callable[[], Mapping[str, Any]] = dict
    """Returns more members, once the saves before have ended."""
    chain: tuple[ChainMember, ...] = ()
    """What it is a delta to; see `Manifest.chain`."""
    kind_of: Literal["checkpoint", "version"] = "checkpoint"
    """What events call it; a version of weights is one that a `Publisher` saves."""


class CheckpointDelivery(DeliveryJob):
    """One requested checkpoint: made of a whole capture by the session's `Checkpointer`."""

    what = "save"

    def __init__(
        self,
        checkpointer: Checkpointer,
        request: SaveRequest,
        handle: SaveHandle,
        *,
        complete: Callable[[SaveRequest], SaveRequest] | None = None,
        published: Callable[[SaveRequest], None] | None = None,
    ) -> None:
        """complete: called on rank 0's stager thread to fill in what only that thread knows; an exception refuses the
        save on every rank. published: called in the background, before the handle ends.
        """
        super().__init__(handle, target=handle.path)
        self.request = request
        self._checkpointer = checkpointer
        self._complete = complete
        self.published = published
        events.emit("save.started", step=request.step, rank=checkpointer.rank, path=handle.path)

    def begin(self) -> None:
        if self._checkpointer.rank == 0:
            metrics, files = checked_metrics(self.request.metrics), read_extra_files(self.request.files)
            self.request = replace(self.request, metrics=metrics, files=files)
        else:
            self.request = replace(self.request, metrics={}, files=None)

    def prepare(self) -> None:
        if self._complete is not None and self._checkpointer.rank == 0:
            self.request = self._complete(self.request)
        self._checkpointer.check_target(self.request)

    def stalled(self, seconds: float) -> None:
        self.handle.add_stats(stall_s=seconds)

    def offer(self, lease: WorkingLease) -> None:
        capture = lease.capture
        if capture.error is None and capture.stream is None:
            self.tell_staged(capture)
        super().offer(lease)
        self._checkpointer.queue(self)

    def tell_staged(self, capture: Capture) -> None:
        """Mark the save as staged: all of the state is copied and may change."""
        events.emit("save.staged", step=self.step, rank=self._checkpointer.rank, path=self.handle.path)
        self.handle.add_stats(staging_s=capture.staging.copy_s)
        self.handle.advance("staged")

    def refuse(self, error: BaseException, *, skipped: bool) -> None:
        self.finish(error, stage="skipped" if skipped else "failed")

    def finish(self, outcome: Any, *, stage: Stage) -> None:
        handle, rank = self.handle, self._checkpointer.rank
        more = {**handle.figures(outcome), "metrics": self.request.metrics, "kind_of": self.request.kind_of}
        events.emit(f"save.{stage}", step=self.step, rank=rank, attempt=handle.attempt, path=handle.path, **more)
        super().finish(outcome, stage=stage)


class Checkpointer(Deliverer[CheckpointDelivery]):
    """Publishes captures of one session as checkpoints, one after the other, in the order they were staged."""

    def __init__(self, storage: Storage, group: Group, engine: EngineClient, config: CheckpointConfig) -> None:
        super().__init__("holdfast-finalizer")
        self._storage = storage
        self._group = group
        self._engine = engine
        self.runner = AttemptRunner(storage, group, engine, deadlines_of(config))
        self._on_suspicious = config.on_suspicious
        self._engine_plan: tuple[DeliveryPlan, int] | None = None
        """Of captures that are streamed, one after the other; used by the thread that delivers."""

    @property
    def rank(self) -> int:
        return self._group.rank

    def add(self, delivery: CheckpointDelivery) -> CheckpointDelivery:
        """Register ``delivery``, which will either reach `queue` when it is staged or end earlier."""
        self._pending = [handle for handle in self._pending if not handle.done()]
        self._pending.append(delivery.handle)
        return delivery

    def queue(self, delivery: CheckpointDelivery) -> None:
        """Publish ``delivery`` after those before it; called on the stager thread."""
        self._jobs.put(delivery)

    def end(self) -> None:
        """Accept no more deliveries; called on the stager thread at its end."""
        self._jobs.put(None)

    def release(self, *, late: bool) -> None:
        """Close the board, after waiting for running removals unless ``late``."""
        self.runner.close(0.0 if late else REMOVAL_GRACE_S)

    def deliver(self, job: CheckpointDelivery) -> Checkpoint:
        """Publish the capture offered to ``job`` and return the checkpoint; raises the same error on every rank."""
        step, capture = job.request.step, job.capture
        self._tell_engine(capture)
        attempt = self.runner.run(
            f"attempt/{capture.number}",
            partial(self._planned, job.request, capture.plan),
            partial(self._persist, capture, job),
            step=step,
            handle=job.handle,
            before_publish=partial(self._examine, job),
            note=partial(self._note, job, capture),
        )
        path = self._storage.path(attempt.name)
        try:
            if isinstance(self._storage, ObjectStorage):
                source = open_object(self._storage, attempt.name)
                source.check_attempt(attempt.id)
                return Checkpoint(source)
            return Checkpoint(open_published(path, attempt=attempt.id, step=step, world=self._group.world))
        except HoldfastError as error:
            raise OutcomeUnknown(
                f"attempt {attempt.id} was published, but rank {self._group.rank} can't open {path}: {error}",
                attempt=attempt.id,
                step=step,
            ) from error

    def _after(self, job: CheckpointDelivery, outcome: Any) -> None:
        if job.published is not None and not isinstance(outcome, BaseException):
            job.published(job.request)

    def remove(self, name: str) -> None:
        """Have the engine remove a trashed directory of the root; doesn't wait. The next start removes what remains."""
        self.runner.remove(name)

    def forget(self, buffer: CaptureBuffer) -> None:
        """The buffer is about to be freed: the engine must not keep its image."""
        if buffer.engine_image is not None:
            self._engine.drop_image(buffer.engine_image)
            buffer.engine_image = None

    def check_target(self, request: SaveRequest) -> None:
        """Raise `CheckpointExists` if the target of ``request`` exists, `StorageError` if it can't be replaced.

        Checked on rank 0 for all ranks.
        """
        if self._group.rank == 0 and request.overwrite:
            refuse_replacing(self._storage, request.name)
        elif self._group.rank == 0:
            refuse_occupied(self._storage, request.name, step=request.step)

    def _planned(self, request: SaveRequest, plan: DeliveryPlan | None, timeout_s: float) -> Planned:
        """Return all ranks' attempt plan, empty if there is none; at a plan's first save, waits for their rows."""
        whole: Whole | RankFailure = Whole(((),) * self._group.world, None)
        if plan is not None and plan.world is not None:
            whole = plan.world.complete(self.runner.board, timeout_s=timeout_s)
        if isinstance(whole, RankFailure):
            return whole
        prewritten = dict(request.files or {})
        if whole.metadata is not None and not request.chain:  # stock DCP would load records for the state
            prewritten[METADATA_NAME] = whole.metadata
        return plan_attempt(
            request.name,
            whole,
            prewritten,
            step=request.step,
            metrics=request.metrics,
            resumable=request.resumable,
            extra={**request.extra, **request.late_extra()},
            overwrite=request.overwrite,
            chain=request.chain,
        )

    def _note(self, job: CheckpointDelivery, capture: Capture, attempt: Attempt) -> RankNote:
        look = b""
        if capture.look is not None and capture.plan is not None:
            look = capture.look.told(capture.plan.rank_plan, attempt.same)
        return note_of(job.handle, self._group.rank, look)

    def _examine(self, job: CheckpointDelivery, attempt: Attempt) -> None:
        """Tell what is suspicious about the save, on rank 0; raises `SaveFailed` if that is to end it."""
        found = suspicions(attempt.notes)
        if not found:
            return
        step, path = job.step, job.handle.path
        for one in found:
            _log.warning("step %s (%s): %s", step, one.what, one.message)
            fields = {"what": one.what, "tensors": one.tensors, "message": one.message}
            events.emit("save.suspicious", step=step, rank=0, attempt=attempt.id, path=path, **fields)
        if self._on_suspicious == "raise":
            raise SaveFailed(f"on_suspicious='raise': {found[0].message}", step=step, rank=None)
        attempt.add_extra({"suspicious": [msgspec.structs.asdict(one) for one in found]})

    def _tell_engine(self, capture: Capture) -> None:
        """Send a new plan to the engine, which prepares while this rank begins the attempt."""
        if capture.error is None and capture.plan is not None:
            with contextlib.suppress(Exception):  # the error comes again when the other ranks can be told
                self._plan_in_engine(capture.plan)

    def _persist(self, capture: Capture, job: CheckpointDelivery, attempt: Attempt) -> ManifestReport:
        """From staged to reported: returns this rank's line of the manifest, its report being durable.

        Stages a streamed capture while it is written.
        """
        if capture.error is not None:
            raise capture.error
        if capture.plan is None:
            raise AssertionError("a capture without error has a plan")
        began, handle = time.perf_counter(), job.handle
        plan = self._plan_in_engine(capture.plan)
        if capture.stream is not None:
            line = self._stream(capture, capture.stream, attempt, plan, job)
        else:
            assert capture.buffer is not None
            handle.advance("persisting")
            image, memory = self._image_in_engine(capture.buffer), capture.buffer.image
            handle.add_stats(host_bytes=memory.nbytes)
            rank_plan = capture.plan.rank_plan

            def verify() -> None:
                verify_staging(capture)
                if capture.look is not None:
                    capture.look.scan(rank_plan, capture.bytes_of)

            line = self.runner.write(attempt, plan=plan, image=image, verify=verify)
        handle.add_stats(persist_s=time.perf_counter() - began, bytes=line.nbytes)
        events.count("bytes_persisted", line.nbytes)
        return line

    def _stream(
        self, capture: Capture, stream: StreamedStaging, attempt: Attempt, plan: int, job: CheckpointDelivery
    ) -> ManifestReport:
        """Stage the capture while the engine writes it."""
        assert capture.plan is not None
        tensors = {**capture.snapshot.lazy, **capture.snapshot.eager.held}
        stream.prepare(capture.plan.rank_plan, tensors, capture.snapshot.objects)
        pieces = pieces_of(rows_of(capture.plan.rank_plan), SLOT_BYTES)
        kept, is_written = process_session(), False
        ring = kept.take_ring(len(pieces))
        job.handle.add_stats(host_bytes=ring.image.nbytes)

        def staged() -> None:
            if capture.error is None:
                job.tell_staged(capture)
                job.handle.advance("persisting")
            capture.staged.set()

        try:
            image = self._engine.add_image(ring.image.fd, ring.image.nbytes)
            line = self.runner.write_streamed(
                attempt, capture, stream, pieces, ring, plan=plan, image=image, staged=staged
            )
            self._engine.drop_image(image)
            is_written = True
        finally:
            kept.give_ring_back(ring, reuse=is_written)
        return line

    def _image_in_engine(self, buffer: CaptureBuffer) -> int:
        if buffer.engine_image is None:
            buffer.engine_image = self._engine.add_image(buffer.image.fd, buffer.image.nbytes)
        return buffer.engine_image

    def _plan_in_engine(self, plan: DeliveryPlan) -> int:
        if self._engine_plan is not None:
            known, number = self._engine_plan
            if known is plan:
                return number
            self._engine_plan = None  # first: a dropped number must never be used again, whatever fails next
            self._engine.drop_plan(number)
        number = self._engine.add_plan(**write_plan(plan.rank_plan))
        self._engine_plan = (plan, number)
        return number


def read_extra_files(files: object) -> dict[str, bytes]:
    """Return the content of each extra file by name, reading those that are given as paths.

    Raises `ConfigError` for names that a checkpoint can't have, for values that are neither, and for unreadable paths.
    """
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise ConfigError(f"files must be a mapping of names to bytes or paths, not {files!r:.200}", field="files")
    found: dict[str, bytes] = {}
    for name, content in files.items():
        fault = _extra_name_fault(name)
        if fault is not None:
            raise ConfigError(
                f"files: {name!r:.300} can't be the name of a file of a checkpoint: {fault}", field="files"
            )
        if isinstance(content, (bytes, bytearray, memoryview)):
            found[name] = bytes(content)
        elif isinstance(content, os.PathLike):
            try:
                found[name] = Path(content).read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"files: {name!r} can't be read from {os.fspath(content)!r}: {error}", field="files"
                ) from error
        else:
            raise ConfigError(
                f"files: {name!r} must be bytes, or a path such as pathlib.Path, not {content!r:.200}", field="files"
            )
    return found


def _extra_name_fault(name: object) -> str | None:
    if not isinstance(name, str):
        return "it is no text"
    if (fault := name_fault(name)) is not None:
        return fault
    if not may_hold_data(name) or name.endswith(".distcp") or name.startswith(LEASE_PREFIX):
        return "it is hidden, or the name of something of Holdfast's"
    return None


def write_plan(plan: RankPlan) -> dict[str, Any]:
    """The engine's `AddPlan` of a rank plan: files, payload ranges in image coordinates, and the rendered index."""
    bases = plan.file_offsets
    offsets = [bases[placed.file] + placed.payload_offset for placed in plan.tensors]
    sizes = [placed.nbytes for placed in plan.tensors]
    count = len(offsets)
    return {
        "files": rows_of(plan),
        "tensor_offsets": struct.pack(f"<{count}Q", *offsets),
        "tensor_sizes": struct.pack(f"<{count}Q", *sizes),
        "index": encode_index(index_of(plan)),
    }


def rows_of(plan: RankPlan) -> tuple[FileRow, ...]:
    """The files of ``plan`` in an image that holds all of them, one behind the other."""
    return tuple(FileRow(file.name, file.size, base) for file, base in zip(plan.files, plan.file_offsets, strict=True))
