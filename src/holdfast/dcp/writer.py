"""A drop-in DCP storage writer that publishes Holdfast checkpoints.

    prepare_local_plan     each rank      refuse what can't be stored; the coordinator refuses an occupied path
    prepare_global_plan    coordinator    begin an attempt, and send it to the ranks with their plans
    write_data             each rank      write its share into the attempt directory; durable report
    finish                 coordinator    manifest, ``.metadata``, one rename

The attempt reaches a rank with its plan, as DCP scatters it. But a planner that caches plans (``enable_plan_caching``)
replaces the scattered plan by that of the previous save, perhaps of another writer, and keeps ours for the next one. So
the handout is recorded when it is unpickled, on the thread that receives it, and used by the next `Writer.write_data`
on that thread. In the plan it becomes what stock's writer puts there.

Guarantees: those of a Holdfast save: all or nothing, durable when DCP's save returns, verified on load, readable by
stock ``dcp.load``. If any rank fails, DCP raises on all and nothing is visible.
Does not: bound DCP's collectives (their process group's timeout does), or work without them
(``use_collectives=False``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import threading
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast import _torch_compat as compat
from holdfast.catalog.root import checked_target
from holdfast.coordination.failure import RankFailure
from holdfast.dcp.attempt import DcpAttempt, refuse_occupied
from holdfast.dcp.planners import EXTRAS_NAME, SAVE_ID, merged_paths, render_extras
from holdfast.dcp.share import Assignment, check_items, open_directory, write_share
from holdfast.errors import ConfigError, DeadlineExceeded, EngineDied, SaveFailed, StateMismatch, StorageError
from holdfast.format.dcp_metadata import STOCK_VERSION
from holdfast.format.manifest import METADATA_NAME, ManifestReport
from holdfast.saver.process_session import process_session
from holdfast.state.gc_pause import gc_paused_on_main_thread
from holdfast.storage.files import let_go
from holdfast.storage.local import open_storage
from holdfast.storage.protocol import DirectoryTarget
from holdfast.validation import checked_metrics, checked_step, is_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

_log = logging.getLogger("holdfast.dcp")
LEASE_TIMEOUT_S: Final = 600.0
"""How long to wait for a process that still works on an earlier attempt at the same path."""

_received = threading.local()


class Handout(msgspec.Struct, frozen=True):
    """The coordinator's message to one rank: the attempt, the name of its directory, and the rank's place in it."""

    attempt: str
    directory: str
    step: int | None
    rank: int
    world: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, msgspec.structs.astuple(self)


def _receive(*fields: Any) -> Any:
    """Unpickle a handout: record that this thread received it, and return what stock's writer has in its place."""
    handout = _received.handout = Handout(*fields)
    return compat.storage_prefix(handout.rank)


class Writer(StorageWriter):
    """Writes a checkpoint to the directory or URL ``path`` for ``dcp.save`` and ``dcp.async_save`` (thread or process).

    To a directory each rank streams through a few buffers. To an object store (``s3://``, ``gs://``, ``az://``), which
    takes whole objects only, it copies its part of the state to host memory once more, until that is uploaded.

    path: must not exist, or be an empty directory, unless ``overwrite``: then what DCP or Holdfast wrote there is
    replaced as a whole once the new checkpoint is durable, and the rest is kept. A ``checkpoint_id`` given to
    ``dcp.save`` replaces it. step, metrics: stored with the checkpoint at ``path``. writers: threads that write and
    hash, 1 to 16.

    One save at a time; reusable. May be pickled between saves. A save raises DCP's ``CheckpointException``, the same on
    every rank; it contains `ConfigError` for what can't be stored (plain values are limited to `ALLOWED_OBJECTS`),
    `CheckpointExists`, `RootLocked`, `SaveFailed`, `StorageError` or `OutcomeUnknown`.
    """

    _takes_stores = True

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
        self._path = self._checked(path, field="path")
        self._step = step
        self._metrics = checked_metrics(metrics)
        self._overwrite = overwrite
        self._writers = writers
        self._save_id = str(uuid.uuid4())
        self._paths: Mapping[str, Any] | None = None
        self._is_coordinator = False
        self._attempt: DcpAttempt | None = None
        self._withdraw: weakref.finalize[..., Writer] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the attempt out of the pickle: it stays with the process that began it."""
        return {**self.__dict__, "_attempt": None, "_withdraw": None, "_paths": None}

    @property
    def checkpoint_id(self) -> str:
        """The directory or URL that the next save writes."""
        return self._path

    @property
    def path(self) -> Path | str:
        """The same as a `Path`, as in stock's writer; the URL of an object store as it is."""
        return self._path if is_store(self._path) else Path(self._path)

    @property
    def save_id(self) -> str:
        """The id in the metadata of the next save; a new one after `reset`."""
        return self._save_id

    @property
    def overwrite(self) -> bool:
        """True if a checkpoint at `path` is replaced."""
        return self._overwrite

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if ``checkpoint_id`` can be a directory, or is the URL of one."""
        try:
            cls._checked(checkpoint_id, field="checkpoint_id")
        except ConfigError:
            return False
        return True

    @classmethod
    def _checked(cls, path: object, *, field: str) -> str:
        """Return `checked_target`; `ConfigError` for object stores where this doesn't write to them."""
        target = checked_target(path, field=field)
        if is_store(target) and not cls._takes_stores:
            message = f"{field}: {target} is on an object store, which {cls.__name__} can't write to; use holdfast.save"
            raise ConfigError(message, field=field)
        return target

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to ``checkpoint_id`` from now on, if given; ``step`` and ``metrics`` applied to the old path only."""
        self._give_up("its Writer was reset")
        self._save_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            path = self._checked(checkpoint_id, field="checkpoint_id")
            if path != self._path:
                self._path, self._step, self._metrics = path, None, {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - DCP's signature
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False can't be saved through holdfast.dcp.Writer: without them no "
                "rank knows when all ranks have written. Use the default True",
                field="use_collectives",
            )
        self._is_coordinator = is_coordinator
        process_session().keep_engine(kwargs.get("rank") or 0)  # it starts while the ranks plan

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what can't be stored, before anything is written."""
        self._give_up("its Writer has begun another save")
        _received.handout = None
        check_items(plan)
        if self._overwrite:
            let_go(self._path)
        elif self._is_coordinator:
            refuse_occupied(self._path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt, and give each rank its part in it."""
        _check_agreement(plans)
        self._paths = merged_paths(plans)
        attempt = self._attempt = DcpAttempt.begin(
            self._path,
            world=len(plans),
            step=self._step,
            metrics=self._metrics,
            extra={SAVE_ID: self._save_id},
            overwrite=self._overwrite,
            timeout_s=LEASE_TIMEOUT_S,
        )
        self._withdraw = weakref.finalize(self, attempt.give_up, "its Writer was freed before it finished")
        handouts = [Handout(attempt.id, attempt.directory, self._step, rank, len(plans)) for rank in range(len(plans))]
        if len(plans) == 1:  # a single rank gets its plan without pickling
            _received.handout = handouts[0]
            return [dataclasses.replace(plans[0], storage_data=compat.storage_prefix(0))]
        return [dataclasses.replace(plan, storage_data=handout) for plan, handout in zip(plans, handouts, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; durable and reported on return."""
        handout = self._take_handout()

        def write(assignment: Assignment) -> list[WriteResult]:
            return write_share(plan, planner, assignment, writers=self._writers)

        results = self._write_into(handout, write)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _take_handout(self) -> Handout:
        """Return the handout that this thread has received with its plan."""
        handout: Handout | None = getattr(_received, "handout", None)
        _received.handout = None
        if handout is None:
            raise ConfigError(
                "write_data was called on a thread that has received no plan: holdfast.dcp.Writer is driven by "
                "dcp.save or dcp.async_save, which plan and write on one thread",
            )
        return handout

    def _write_into(self, handout: Handout, write: Callable[[Assignment], list[WriteResult]]) -> list[WriteResult]:
        """Call ``write`` with the assignment of ``handout``; any thread may. A failure gives the attempt up."""
        try:
            with self._assigned(handout) as assignment:
                return write(assignment)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            # The future of an asynchronous save may never be asked for its result.
            _log.warning("rank %d could not write its share of %s: %s", handout.rank, self._path, error)
            if isinstance(error, (StorageError, OSError, EngineDied, DeadlineExceeded)):
                raise RankFailure.of(error, rank=handout.rank).error(step=handout.step) from error
            raise

    @contextlib.contextmanager
    def _assigned(self, handout: Handout) -> Iterator[Assignment]:
        """Yield the assignment of ``handout``, whose directory, if it is one, is open."""
        storage = open_storage(os.path.dirname(self._path))
        place = os.path.join(os.path.dirname(self._path), handout.directory)
        target = storage.target(handout.directory) if is_store(self._path) else open_directory(place)
        assert not isinstance(target, DirectoryTarget)

        def stored_as(file: str) -> str:
            return storage.stored_as(file, handout.attempt)

        try:
            yield Assignment(handout.attempt, handout.step, handout.rank, handout.world, target, stored_as)
        except (StorageError, OSError) as error:
            if not isinstance(target, int) or os.path.isdir(place):
                raise
            raise SaveFailed(
                f"the save to {self._path} ended on rank {handout.rank} because the coordinator has "
                "aborted it; the coordinator's own failure, listed next to this one, is the cause. "
                "Nothing was published",
                step=handout.step,
                rank=handout.rank,
                path=self._path,
            ) from error
        finally:
            if isinstance(target, int):
                os.close(target)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish: every rank has reported."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            raise ConfigError("finish was called without a save: holdfast.dcp.Writer is driven by dcp.save")
        if self._withdraw is not None:
            self._withdraw.detach()
        try:
            with gc_paused_on_main_thread():
                reports, metadata.storage_data = _sort(results)
                metadata.version = STOCK_VERSION
                metadata.storage_meta = self.storage_meta()
                files = self._files(metadata)
            attempt.publish(reports, files)
        except (StorageError, OSError) as error:
            raise RankFailure.of(error, rank=0).error(step=self._step) from error
        finally:
            attempt.give_up("it could not be finished")

    def _files(self, metadata: Metadata) -> dict[str, bytes]:
        """Return the files committed beside the reports, by name."""
        paths, self._paths = self._paths, None
        extras = render_extras(metadata, paths)
        _intern_sizes(metadata)
        files = {METADATA_NAME: pickle.dumps(metadata)}
        return files if extras is None else {**files, EXTRAS_NAME: extras}

    def _give_up(self, why: str) -> None:
        attempt, self._attempt = self._attempt, None
        if self._withdraw is not None:
            self._withdraw.detach()
            self._withdraw = None
        if attempt is not None:
            attempt.give_up(why)


def _check_agreement(plans: Sequence[SavePlan]) -> None:
    """Raise `StateMismatch` if ranks use one name for different things: the checkpoint could not be read."""
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


def _intern_sizes(metadata: Metadata) -> None:
    """Make equal sizes one object: pickle then stores them once, which halves its time."""
    known: dict[torch.Size, torch.Size] = {}
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.size = known.setdefault(entry.size, entry.size)
            for chunk in entry.chunks:
                chunk.offsets = known.setdefault(chunk.offsets, chunk.offsets)
                chunk.sizes = known.setdefault(chunk.sizes, chunk.sizes)


def _sort(results: list[list[WriteResult]]) -> tuple[list[ManifestReport], dict[MetadataIndex, Any]]:
    """Return the ranks' lines of the manifest, and the location of each item.

    A shard without elements may be listed at the offset of one that has some: the longer record is used. Of a plain
    value that several ranks have, the last one's is used, as by every reader.
    """
    reports: list[ManifestReport] = []
    places: dict[MetadataIndex, Any] = {}
    for result in (result for of_rank in results for result in of_rank):
        place = result.storage_data
        if isinstance(place, ManifestReport):
            reports.append(place)
        elif result.index.offset is None or (known := places.get(result.index)) is None or known.length < place.length:
            places[result.index] = place
    return reports, places
