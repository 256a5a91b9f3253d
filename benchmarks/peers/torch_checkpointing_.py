"""meta-pytorch/torch_checkpointing: its manager, as its guide has it, set up for a machine without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch_checkpointing as tc
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.contender import Contender, Pending, Waiting

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import BenchState


class Managed(Contender):
    """Without its resharder on several ranks: saving with it asks for CUDA, whatever the device of the state."""

    def start(self) -> None:
        self._manager = self._make(resharding=self.world == 1)
        self._resharding: tc.CheckpointManager | None = None

    @staticmethod
    def _make(*, resharding: bool) -> tc.CheckpointManager:
        return tc.CheckpointManager.Config(
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            default=tc.ItemSpec(resharder=DefaultResharder()) if resharding else tc.ItemSpec(),
        ).build()

    def warm_up(self) -> None:
        self._manager.prewarm_staging({"state": self.held_state.flat})

    def save(self, path: Path) -> Pending:
        future = self._manager.save(str(path), {"state": self.held_state.flat})
        assert future is not None, "it was set up to save asynchronously"
        return Waiting(lambda: future.result(300), then_sync=path if self.rank == 0 else None)

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def load(self, state: BenchState, path: Path) -> None:
        manager = self._manager
        if self.world > 1 and not any(path.glob("*_1.pt")):  # one rank saved it
            if self._resharding is None:
                self._resharding = self._make(resharding=True)
            manager = self._resharding
        manager.load(str(path), into={"state": state.flat})

    def facts(self) -> dict[str, Any]:
        return {"version": str(tc.__version__)}

    def close(self) -> None:
        self._manager.close()
        if self._resharding is not None:
            self._resharding.close()
