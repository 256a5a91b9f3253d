"""Stock PyTorch distributed checkpoints: blocking, with a background thread, with a background process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.contender import Contender, Pending

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import BenchState


class Sync(Contender):
    """`dcp.save`: returns when durable."""

    def save(self, path: Path) -> Pending:
        dcp.save(self.held_state.flat, checkpoint_id=str(path))
        return Pending()

    def load(self, state: BenchState, path: Path) -> None:
        dcp.load(state.flat, checkpoint_id=str(path))

    def read_part(self, name: str, rows: tuple[int, int], path: Path) -> Any:
        # There is no part of a tensor to ask for: all of it is read.
        import torch

        shape = next(entry.shape for entry in self.held_state.entries if entry.name == name)
        whole = torch.empty(shape)
        dcp.load({name: whole}, checkpoint_id=str(path))
        return whole[rows[0] : rows[0] + rows[1]]


class InFlight(Pending):
    def __init__(self, response: Any) -> None:
        super().__init__()
        self._future = getattr(response, "upload_completion", response)

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True


class Thread(Contender):
    """`dcp.async_save` with a thread. Staging is waited for before the update, as its users must."""

    kind = AsyncCheckpointerType.THREAD
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
    )

    def start(self) -> None:
        self._stager = DefaultStager(self.options)
        self._staged: Any = None

    def save(self, path: Path) -> Pending:
        response = dcp.async_save(
            self.held_state.flat,
            checkpoint_id=str(path),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        self._staged = getattr(response, "staging_completion", None)
        return InFlight(response)

    def before_update(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.result()

    def close(self) -> None:
        self._stager.close()


class Process(Thread):
    """`dcp.async_save` with a process, which reads the staged copy from shared memory."""

    kind = AsyncCheckpointerType.PROCESS
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )
