"""A job for the page to show: run as a process, it saves a step whenever a line comes on its stdin.

    python tests/view/job.py ROOT

A small model on one rank. Its manager keeps the journal; steps, and failures that never were, are added to it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import holdfast


class Job:
    """Trains a model of a few layers and saves."""

    def __init__(self, root: Path, *, keep: holdfast.Keep | None = None) -> None:
        torch.manual_seed(0)
        self.root = root
        block = torch.nn.ModuleDict({"attn": torch.nn.Linear(32, 32), "mlp": torch.nn.Linear(32, 64)})
        frozen = torch.nn.Linear(16, 16)
        frozen.requires_grad_(requires_grad=False)
        self.model = torch.nn.ModuleDict(
            {"layers": torch.nn.ModuleList([block, torch.nn.ModuleDict(block)]), "frozen": frozen}
        )
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        config = holdfast.CheckpointConfig(keep=keep)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.manager = holdfast.CheckpointManager(root, state, config=config)
        self.run = self.manager._journal.run

    def note(self, kind: str, **fields: Any) -> None:
        line = {"v": 1, "t": time.time(), "run": self.run, "kind": kind, **fields}
        with (self.root / ".holdfast" / "journal.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def step(self, step: int) -> None:
        """Change the weights and save them."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.note("step", step=step)
        self.manager.save(step, metrics={"loss": 10 / step, "accuracy": step / 1000}).result()

    def fail(self, step: int, error: str, message: str) -> None:
        """Note a save that failed on rank 0."""
        began = time.time()
        self.note("save.failed", step=step, name=f"step-{step}", began=began, error=error, message=message, rank=0)

    def close(self) -> None:
        self.manager.close()


if __name__ == "__main__":
    job = Job(Path(sys.argv[1]))
    for number, _ in enumerate(sys.stdin, 1):
        job.step(10 * number)
        print(number, flush=True)
    job.close()
