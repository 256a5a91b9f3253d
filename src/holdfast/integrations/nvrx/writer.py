"""Distributed checkpoints beside training: `FileSystemWriterAsync`, and planning and finalizing around it.

    save_state_dict_async_plan        all ranks, collectives    plan; begin an attempt; copy this rank's share
    the writer's save function        each rank, beside         the engine writes the share; durable report
    save_state_dict_async_finalize    all ranks, collectives    gather the reports; manifest, ``.metadata``, one rename

Guarantees: those of `holdfast.dcp.Writer`: nothing is visible until the finalization has returned on all ranks; a
failure on any rank is DCP's ``CheckpointException`` on all; what was there before stays until it is replaced whole. The
state is copied when `save_state_dict_async_plan` returns. A plan is reused only where every rank's is the same as
before: a key that came later is saved.
Does not: use the worker process (nothing runs there that the engine does not do better), keep file names or sizes of
stock's writer, or write what Holdfast can't verify (``msc://`` paths, stream extensions): `ConfigError`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from holdfast.cores import usable_cores
from holdfast.dcp.reader import Reader
from holdfast.dcp.share import StagedShare
from holdfast.dcp.writer import Writer
from holdfast.errors import ConfigError, HoldfastError, SaveFailed
from holdfast.integrations.nvrx.calls import shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from holdfast.coordination.failure import RankFailure
    from holdfast.cores import Cores
    from holdfast.dcp.writer import Handout

_log = logging.getLogger("holdfast.nvrx")
_WRITERS_MAX: Final = 16
_STOCK_OPTIONS: Final = frozenset({"per_thread_copy_ahead", "cache_staged_state_dict", "sync_files", "open_file"})


class FileSystemWriterAsync(Writer):
    """Writes one checkpoint at a time to the directory ``path``, beside training; read by stock's ``dcp.load``.

    thread_count: threads of the engine that write and hash, at most 16. overwrite: as stock's writer, True: what DCP or
    Holdfast wrote there is replaced as a whole, the rest is kept. step: stored with it. cores: that the engine runs on,
    as in `CheckpointConfig`. is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors and stock's
    ``sync_files``, ``per_thread_copy_ahead``: no effect: another process writes in any case, from shared memory, and
    what it has written is durable.

    Raises `ConfigError` for what it can't do: ``single_file_per_rank=False``, ``separation_hint``, ``use_msc``,
    ``open_file``, stream extensions, and URLs of object stores.
    """

    _takes_stores = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,  # noqa: FBT001, FBT002 - stock's
        sync_files: bool = True,  # noqa: ARG002, FBT001, FBT002 - stock's
        thread_count: int = 1,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,  # noqa: ARG002 - NVRx's
        use_cached_data_structure: bool = False,  # noqa: ARG002 - NVRx's
        use_cpu_shm_for_gpu_tensors: bool = False,  # noqa: ARG002 - NVRx's
        overwrite: bool = True,
        step: int | None = None,
        cores: Cores = "auto",
        **kwargs: Any,
    ) -> None:
        refused = {
            "single_file_per_rank": not single_file_per_rank,
            "separation_hint": separation_hint is not None,
            "use_msc": use_msc,
            "open_file": kwargs.get("open_file", open) is not open,
        }
        refused |= {name: kwargs[name] is not None for name in kwargs.keys() - _STOCK_OPTIONS}
        for name, is_refused in refused.items():
            if is_refused:
                raise ConfigError(
                    f"{name} is given, which Holdfast's FileSystemWriterAsync can't do: leave it out, or write with "
                    "NVRx's own",
                    field=name,
                )
        # Stock's order: per_thread_copy_ahead, cache_staged_state_dict, overwrite.
        overwrite = args[2] if len(args) > 2 else overwrite
        writers = max(1, min(int(thread_count), _WRITERS_MAX))
        super().__init__(path, step=step, overwrite=overwrite, writers=writers)
        usable_cores(cores)
        self.cores = cores
        self.checkpoint_dir = path
        self.thread_count = thread_count
        self.can_run_decentralized_global_plan = True
        self.has_data_to_write = False
        self._staged: StagedShare | None = None
        self._handout: Handout | None = None
        self._outcome: list[WriteResult] | BaseException | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy what ``plan`` assigns to this rank; called by `save_state_dict_async_plan` on the same thread."""
        self._handout = self._take_handout()
        self._outcome = None
        try:
            self._staged = StagedShare(plan, planner, self._handout.rank, image_of=shares.take)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        self.has_data_to_write = len(plan.items) > 0

    def get_save_function_and_args(self) -> tuple[Callable[..., Any], None, list[Any]]:
        """Return the function that writes what was copied, None for preloading, and no arguments.

        It is for `AsyncCallsQueue`, as it is, or to be called: then it returns when this rank's share is durable.
        """
        return _Save(self), None, []

    def retrieve_write_results(self) -> Any:
        """Return what this rank has written, or the error, wrapped as DCP does; the function must have ended."""
        outcome = self._outcome
        if outcome is None:
            outcome = SaveFailed(
                f"the save to {self._path} was not written: schedule or call what get_save_function_and_args returned",
                step=self._step,
                rank=None,
                path=self._path,
            )
        return _wrap_exception(outcome) if isinstance(outcome, BaseException) else outcome

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return ``local_plan``: the place in the attempt comes with the handout."""
        return local_plan

    def persist(self) -> None:
        """Write what was copied; `retrieve_write_results` tells how it ended. May run on any thread."""
        staged, self._staged = self._staged, None
        if staged is None or self._handout is None:
            return  # `retrieve_write_results` says so
        try:
            self._outcome = self._write_into(
                self._handout,
                lambda assignment: staged.write(assignment, writers=self._writers, cores=self.cores),
            )
        except Exception as error:  # noqa: BLE001 - raised on all ranks when it is finalized
            self._outcome = error
            staged.image.close()  # an engine may still read it: not for another save
            return
        for dropped in shares.give_back(staged.image):
            dropped.close()


class _Save:
    """The save function of a writer: begins its work in this process, where the engine is told what to write."""

    def __init__(self, writer: FileSystemWriterAsync) -> None:
        self.writer = writer

    def __call__(self, *_: Any) -> None:
        self.writer.persist()

    def starts_itself(self) -> _Writing:
        return _Writing(self.writer)

    def __reduce__(self) -> NoReturn:
        raise TypeError("the writer's save function isn't for a worker process: schedule it as it was returned")


class _Writing:
    """A thread that waits for the engine."""

    failure: RankFailure | None = None
    """None: a failed write is raised by `save_state_dict_async_finalize`, on all ranks."""

    def __init__(self, writer: FileSystemWriterAsync) -> None:
        self._writer = writer
        self._thread = threading.Thread(target=writer.persist, name="holdfast-nvrx-write", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.has_ended

    def cancel(self) -> None:
        with contextlib.suppress(HoldfastError):
            self._writer._give_up("its request was given up")


class CachedMetadataFileSystemReader(Reader):
    """Reads as `holdfast.dcp.Reader` does, verified: what Holdfast wrote, or stock DCP, NVRx and Megatron-LM.

    cache_metadata: no effect: what was replaced meanwhile is read anew.
    """

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 - NVRx's
        super().__init__(path)

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is none."""


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Return None: what an engine has written comes over its socket."""


class CheckpointMetadataCache:
    """What ranks have planned last, to be used again where nothing has changed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all: the next save plans anew."""
        self._token = ""
        self._local: SavePlan | None = None
        self._central: SavePlan | None = None
        self._all_local: list[SavePlan] = []
        self._all_central: list[SavePlan] = []
        self._metadata: Metadata | None = None
        self._is_reused = False

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        """Accept metadata that was loaded; it isn't needed."""

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """Return whether the newest save has used the plan of the one before, and False."""
        return self._is_reused, False


_checkpoint_metadata_cache: CheckpointMetadataCache | None = None


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:  # noqa: ARG001 - NVRx's
    """Make the cache that `save_state_dict_async_plan` uses with ``enable_cache``, unless it is there."""
    global _checkpoint_metadata_cache  # noqa: PLW0603 - one a process, as in NVRx
    if _checkpoint_metadata_cache is None:
        _checkpoint_metadata_cache = CheckpointMetadataCache()


def get_metadata_caching_status() -> tuple[bool, bool] | None:
    """Return the status of that cache; None if there is none."""
    cache = _checkpoint_metadata_cache
    return None if cache is None else cache.get_metadata_caching_status()


@dataclasses.dataclass(frozen=True)
class _Unchanged:
    """Sent in place of a local plan: it is the one that was planned under ``token``."""

    token: str


@dataclasses.dataclass(frozen=True)
class _Reply:
    """The coordinator's answer to a rank. plan: without items if its plan is the one it has."""

    plan: SavePlan
    token: str
    is_reused: bool


class _StaleCache(HoldfastError):
    """A rank refers to plans that the coordinator doesn't have."""


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Any | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,  # noqa: FBT001, FBT002 - NVRx's
    metadata_cache: CheckpointMetadataCache | None = None,
) -> tuple[FileSystemWriterAsync, Metadata | None, _DistWrapper]:
    """Plan a save of ``state_dict`` and copy it; returns when everything of this rank is copied. All ranks call it.

    Uses collectives of ``process_group`` on the calling thread. enable_cache: ranks whose plan is that of the save
    before send that word instead; needs `init_checkpoint_metadata_cache`, or ``metadata_cache``.

    Returns what `save_state_dict_async_finalize` takes. Raises DCP's ``CheckpointException`` on all ranks; it contains
    `ConfigError` for what can't be stored, `RootLocked`, `StorageError`. Nothing is visible.
    """
    cache = (metadata_cache or _checkpoint_metadata_cache) if enable_cache else None
    together = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), coordinator_rank)
    planning = _Planning(state_dict, storage_writer, planner or DefaultSavePlanner(), together, cache)
    try:
        central = planning.run()
    except CheckpointException as failed:
        if cache is not None:
            cache.clear()
        if not any(isinstance(error, _StaleCache) for error, _ in failed.failures.values()):
            raise
        central = planning.run()
    planner = planning.planner

    def stage() -> None:
        storage_writer.prepare_write_data(planner.finish_plan(central), planner)

    try:
        together.all_reduce("stage", stage, lambda _: None)
    except CheckpointException:
        storage_writer._give_up("a rank could not copy its share")
        raise
    return storage_writer, planning.metadata, together


class _Planning:
    """One plan, made by all ranks together."""

    def __init__(
        self,
        state_dict: dict[str, Any],
        writer: FileSystemWriterAsync,
        planner: SavePlanner,
        together: _DistWrapper,
        cache: CheckpointMetadataCache | None,
    ) -> None:
        self.planner = planner
        self.metadata: Metadata | None = None
        """The coordinator's."""
        self._state_dict = state_dict
        self._writer = writer
        self._together = together
        self._cache = cache
        self._local: SavePlan | None = None
        self._is_local = getattr(planner, "can_run_decentralized_global_plan", False)
        """True for a planner whose ranks need only their own plan (Megatron-LM's)."""

    def run(self) -> SavePlan:
        """Return this rank's part of the plan, and have the handout of its attempt noted on this thread."""
        reply: _Reply = self._together.reduce_scatter("plan", self._send, self._answer)
        cache, local = self._cache, self._local
        assert local is not None
        if reply.is_reused:
            assert cache is not None
            assert cache._central is not None
            central = cache._central
            cache._is_reused = True
        elif self._is_local:
            central = self.planner.create_decentralized_global_plan(local)  # type: ignore[attr-defined]
        else:
            central = reply.plan
        if cache is not None and not reply.is_reused:
            cache._token, cache._local, cache._central, cache._is_reused = reply.token, local, central, False
        return central

    def _send(self) -> SavePlan | _Unchanged:
        self.planner.set_up_planner(self._state_dict, is_coordinator=self._together.is_coordinator)
        self._writer.set_up_storage_writer(self._together.is_coordinator)
        self._local = self._writer.prepare_local_plan(self.planner.create_local_plan())
        if self._cache is not None and self._cache._local == self._local:
            return _Unchanged(self._cache._token)
        return self._local

    def _answer(self, sent: list[SavePlan | _Unchanged]) -> list[_Reply]:
        cache = self._cache
        is_reused = all(isinstance(plan, _Unchanged) for plan in sent)
        local: list[SavePlan] = []
        for rank, plan in enumerate(sent):
            if not isinstance(plan, _Unchanged):
                local.append(plan)
            elif cache is not None and plan.token == cache._token and len(cache._all_local) == len(sent):
                local.append(cache._all_local[rank])
            else:
                raise _StaleCache(f"rank {rank} refers to plans that the coordinator doesn't have")
        token = secrets.token_hex(8)
        if is_reused:
            assert cache is not None
            central, self.metadata, token = cache._all_central, cache._metadata, cache._token
        else:
            central, self.metadata = self.planner.create_global_plan(local)
            central = local if self._is_local else central
        if cache is not None and not is_reused:
            cache._all_local, cache._all_central, cache._metadata = local, central, self.metadata
        self.metadata = copy.copy(self.metadata)  # finishing a save writes into it
        plans = self._writer.prepare_global_plan(central)
        if is_reused or self._is_local:
            plans = [dataclasses.replace(plan, items=[], planner_data=None) for plan in plans]
        return [_Reply(plan, token, is_reused) for plan in plans]


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Metadata | None, dist_wrapper: _DistWrapper
) -> None:
    """Publish what all ranks have written; returns when it is visible and durable. All ranks call it.

    Its arguments are what `save_state_dict_async_plan` returned. Uses collectives of its group. Raises DCP's
    ``CheckpointException`` on all ranks, with each failed rank's error; then nothing is visible.
    """

    def results() -> list[WriteResult]:
        found = storage_writer.retrieve_write_results()
        if _is_wrapped_exception(found):
            raise found[0]
        return list(found)

    def publish(of_all: list[list[WriteResult]]) -> None:
        assert global_metadata is not None
        storage_writer.finish(global_metadata, of_all)

    try:
        dist_wrapper.all_reduce("write", results, publish)
    except CheckpointException:
        storage_writer._give_up("a rank could not write its share")
        raise
