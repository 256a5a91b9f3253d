"""Holdfast itself: a manager kept for all saves, as in training."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import holdfast
from benchmarks.contender import Contender, Pending

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import BenchState


class Saving(Pending):
    """A save's handle."""

    def __init__(self, handle: holdfast.SaveHandle) -> None:
        super().__init__()
        self.handle = handle

    def done(self) -> bool:
        if not self.handle.done():
            return False
        if not self.stats:
            self.handle.result(0)  # raises if it has failed
            stats = self.handle.stats
            self.stats = {
                "stall_s": stats.stall_s,
                "staging_s": stats.staging_s,
                "persist_s": stats.persist_s,
                "commit_s": stats.commit_s,
            }
        return True


class Lazy(Contender):
    """The defaults."""

    staging: Literal["lazy", "eager"] = "lazy"
    verify = True
    managers = 0

    def start(self) -> None:
        self._step = 0
        self._manager: holdfast.CheckpointManager | None = None
        if self.state is not None:
            self.adopt(self.state.objects)

    def adopt(self, objects: dict[str, Any]) -> None:
        """Save these from now on, to a root of their own."""
        Lazy.managers += 1
        self.root = self.folder / f"managed-{Lazy.managers}"
        config = holdfast.CheckpointConfig(every=None, keep=None, staging=self.staging)
        self._manager = holdfast.CheckpointManager(self.root, objects, config=config)

    @property
    def manager(self) -> holdfast.CheckpointManager:
        assert self._manager is not None, "nothing to save"
        return self._manager

    def warm_up(self) -> None:
        self.manager.step(0)

    def save(self, path: Path) -> Pending:
        self._step += 1
        del path  # a manager names its own; see `hand_over`
        return Saving(self.manager.save(self._step))

    def hand_over(self, pending: Pending, path: Path) -> None:
        assert isinstance(pending, Saving), "it comes from `save`"
        if self.rank == 0:
            os.rename(pending.handle.result(0).path, path)

    def before_update(self) -> None:
        self.manager.before_update()

    def load(self, state: BenchState, path: Path) -> None:
        holdfast.load(state.objects, path, verify=self.verify)

    def read_part(self, name: str, rows: tuple[int, int], path: Path) -> Any:
        with_rows = (slice(rows[0], rows[0] + rows[1]),)
        return holdfast.open(path).read(name, with_rows)

    def facts(self) -> dict[str, Any]:
        return {"version": holdfast.__version__}

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close(60.0)


class Eager(Lazy):
    """Copies before `save` returns."""

    staging = "eager"


class Unverified(Lazy):
    """Loads without matching checksums; saves nothing."""

    verify = False

    def start(self) -> None:
        self._step, self._manager = 0, None
