"""A drop-in DCP storage writer that publishes Holdfast checkpoints.

    prepare_local_plan     each rank      refuse what can't be stored; the coordinator refuses an occupied path
    prepare_global_plan    coordinator    begin an attempt, and hand it to the ranks with their plans
    write_data             each rank      write its share into the attempt directory; durable report
    finish                 coordinator    manifest, ``.metadata``, one rename

How the attempt reaches a rank: with its plan, as DCP scatters it. But a planner that caches plans
(``enable_plan_caching``) replaces what was scattered by the plan of the save before. So what is handed out is noted on
the thread that receives it, when it is unpickled, and taken from there by the `Writer.write_data` that follows on the
same thread.

Guarantees: those of a save of Holdfast's own: all or nothing, durable when DCP's save returns, verified on load, read
by stock ``dcp.load``. If any rank fails, DCP raises on all and nothing is visible.
Does not: bound DCP's collectives (their process group's timeout does), or work without them
(``use_collectives=False``).
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Any, Final

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast import _torch_compat as compat
from holdfast.arguments import checked_metrics, checked_path, checked_step, is_path
from holdfast.dcp.attempt import DcpAttempt, refuse_occupied
from holdfast.dcp.share import Assignment, check_items, open_directory, write_share
from holdfast.engine.executor import WriteOptions
from holdfast.errors import ConfigError, StateMismatch, StorageError
from holdfast.format.dcp import STOCK_VERSION
from holdfast.format.manifest import ManifestReport
from holdfast.outcome import AbortReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

LEASE_TIMEOUT_S: Final = 600.0
"""How long to wait for a process that still works on an earlier attempt at the same path."""

_received = threading.local()


class Handout(msgspec.Struct, frozen=True):
    """What the coordinator hands one rank: the attempt, the name of its directory, and the rank's place in it."""

    attempt: str
    directory: str
    step: int | None
    rank: int
    world: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, msgspec.structs.astuple(self)


def _receive(*fields: Any) -> Handout:
    """Unpickle a handout, and note that this thread has received it."""
    _received.handout = Handout(*fields)
    handout: Handout = _received.handout
    return handout


class Writer(StorageWriter):
    """Writes a checkpoint to the directory ``path`` for ``dcp.save`` and ``dcp.async_save`` (thread or process).

    path: must not exist, or be an empty directory, unless ``overwrite``: then what is there is replaced as a whole,
    when everything new is durable. A ``checkpoint_id`` given to ``dcp.save`` takes its place. step, metrics: stored
    with the checkpoint at ``path``. writers: threads that write and hash, 1 to 16.

    One save at a time; reusable. May be pickled between saves. What a save raises comes wrapped in DCP's
    ``CheckpointException``, the same on every rank: `ConfigError` for what can't be stored (plain values are limited
    to `ALLOWED_OBJECTS`), `CheckpointExists`, `RootLocked`, `SaveFailed`, `StorageError`, `OutcomeUnknown`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        writers: int = 2,
    ) -> None:
        super().__init__()
        if step is not None:
            checked_step(step)
        if isinstance(writers, bool) or not 1 <= writers <= 16:
            raise ConfigError(f"writers must be an integer from 1 to 16, not {writers!r}", field="writers")
        self._path = checked_path(path, field="path")
        self._step = step
        self._metrics = checked_metrics(metrics)
        self._overwrite = overwrite
        self._options = WriteOptions(writers=writers)
        self._save_id = str(uuid.uuid4())
        self._is_coordinator = False
        self._attempt: DcpAttempt | None = None
        self._withdraw: weakref.finalize[..., Writer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """An attempt stays with the process that has begun it."""
        return {**self.__dict__, "_attempt": None, "_withdraw": None}

    @property
    def checkpoint_id(self) -> str:
        """The directory the next save writes."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether ``checkpoint_id`` can be a directory."""
        return is_path(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to ``checkpoint_id`` from now on, where one is given; ``step`` and ``metrics`` were the old path's."""
        self._give_up("its Writer was reset")
        self._save_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            path = checked_path(checkpoint_id, field="checkpoint_id")
            if path != self._path:
                self._path, self._step, self._metrics = path, None, {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - DCP's signature
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False can't be saved through holdfast.dcp.Writer: without them no rank knows when all "
                "have written, so nothing could be published whole. Leave it at True",
                field="use_collectives",
            )
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what can't be stored, before anything is written."""
        self._give_up("its Writer has begun another save")
        _received.handout = None
        check_items(plan)
        if self._is_coordinator and not self._overwrite:
            refuse_occupied(self._path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt, and give each rank its part in it."""
        _check_agreement(plans)
        attempt = self._attempt = DcpAttempt.begin(
            self._path,
            world=len(plans),
            step=self._step,
            metrics=self._metrics,
            overwrite=self._overwrite,
            timeout_s=LEASE_TIMEOUT_S,
        )
        self._withdraw = weakref.finalize(self, attempt.give_up, "its Writer was freed before it finished")
        handouts = [Handout(attempt.id, attempt.directory, self._step, rank, len(plans)) for rank in range(len(plans))]
        _received.handout = handouts[0]  # one rank alone gets its plan without pickling
        return [dataclasses.replace(plan, storage_data=handout) for plan, handout in zip(plans, handouts, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; it is durable, and reported, when this returns."""
        handout: Handout | None = getattr(_received, "handout", None)
        _received.handout = None
        if handout is None:
            raise ConfigError(
                "write_data was called on a thread that has received no plan: holdfast.dcp.Writer is driven by "
                "dcp.save or dcp.async_save, which plan and write on one thread",
            )
        assignment = Assignment(handout.attempt, handout.step, handout.rank, handout.world)
        try:
            dir_fd = open_directory(os.path.join(os.path.dirname(self._path), handout.directory))
            try:
                results = write_share(dir_fd, plan, planner, assignment, self._options)
            finally:
                os.close(dir_fd)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            if isinstance(error, (StorageError, OSError)):
                raise AbortReason.of(error, rank=handout.rank).error(step=handout.step) from error
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish: every rank has reported."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            raise ConfigError("finish was called without a save: holdfast.dcp.Writer is driven by dcp.save")
        if self._withdraw is not None:
            self._withdraw.detach()
        try:
            reports, places = _sort(results)
            metadata.version = STOCK_VERSION
            metadata.storage_data = places
            metadata.storage_meta = self.storage_meta()
            attempt.publish(reports, pickle.dumps(metadata))
        except (StorageError, OSError) as error:
            raise AbortReason.of(error, rank=0).error(step=self._step) from error
        finally:
            attempt.give_up("it could not be finished")

    def _give_up(self, why: str) -> None:
        attempt, self._attempt = self._attempt, None
        if self._withdraw is not None:
            self._withdraw.detach()
            self._withdraw = None
        if attempt is not None:
            attempt.give_up(why)


def _check_agreement(plans: Sequence[SavePlan]) -> None:
    """Raise `StateMismatch` if ranks mean different things by one name: the checkpoint could not be read."""
    kinds: dict[str, tuple[str, tuple[int, ...]] | None] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            kind = None if data is None else (compat.dtype_name(data.properties.dtype), tuple(data.size))
            if kinds.setdefault(name, kind) != kind:
                raise StateMismatch(
                    f"{name!r} is {_spell(kinds[name])} on one rank and {_spell(kind)} on rank {rank}: equal names "
                    "mean pieces or replicas of one value",
                    mismatched=(name,),
                )


def _spell(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "a plain value" if kind is None else f"a {kind[0]} tensor of {list(kind[1])}"


def _sort(results: list[list[WriteResult]]) -> tuple[list[ManifestReport], dict[MetadataIndex, Any]]:
    """The ranks' lines of the manifest, and where each item is.

    A shard without elements may be listed at the offset of one that has some: the longer record is meant.
    """
    reports: list[ManifestReport] = []
    places: dict[MetadataIndex, Any] = {}
    for result in (result for of_rank in results for result in of_rank):
        place = result.storage_data
        if isinstance(place, ManifestReport):
            reports.append(place)
        elif (known := places.get(result.index)) is None or known.length < place.length:
            places[result.index] = place
    return reports, places
