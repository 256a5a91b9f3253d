"""Training runs small enough to be made again and again, for tests of the manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import CheckpointConfig, CheckpointManager


class Run:
    """A training run small enough to be made again and again."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)
        self.progress = {"tokens": 0}
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "train": self.progress,
        }

    def train(self) -> None:
        self.model(torch.randn(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.progress["tokens"] += 1

    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()

    def manager(self, root: Path, **options: Any) -> CheckpointManager:
        return CheckpointManager(root, self.state, config=CheckpointConfig(**{"every": 1, "keep": None, **options}))


def saved_run(root: Path, steps: int, **options: Any) -> dict[int, torch.Tensor]:
    """Train and save ``steps`` steps; returns the weights at each."""
    run, weights = Run(), {}
    with run.manager(root, **options) as manager:
        for step in range(1, steps + 1):
            run.train()
            weights[step] = run.weight()
            manager.step(step, metrics={"loss": float(step % 4)})
    return weights


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every entry with mode, size and time of change, the root itself included."""
    entries = [root, *sorted(root.rglob("*"))]
    stats = {str(entry.relative_to(root)): entry.lstat() for entry in entries}
    return {name: (stat.st_mode, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def visible(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
