"""torchsnapshot: the predecessor of `torch.distributed.checkpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torchsnapshot

from benchmarks.contender import Contender, Pending, Waiting

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import BenchState


class Snapshots(Contender):
    def save(self, path: Path) -> Pending:
        pending = torchsnapshot.Snapshot.async_take(str(path), {"state": self._stateful(self.held_state)})
        return Waiting(pending.wait, then_sync=path if self.rank == 0 else None)

    @staticmethod
    def _stateful(state: BenchState) -> Any:
        return torchsnapshot.StateDict(**state.local)

    def load(self, state: BenchState, path: Path) -> None:
        torchsnapshot.Snapshot(str(path)).restore({"state": self._stateful(state)})
