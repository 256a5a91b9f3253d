"""A job with a journal, for the page to show: run as a process, it saves a step whenever a line comes on its stdin.

    python tests/view/job.py ROOT

A small model on one rank, and a journal of what it did, by the format that a root's coordinator writes.
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
    """Trains a model of a few layers, saves and writes lines of a journal."""

    def __init__(self, root: Path, *, keep: holdfast.Keep | None = None, run: str = "a" * 12) -> None:
        torch.manual_seed(0)
        self.root, self.run = root, run
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
        told = None if keep is None else {"last": keep.last, "every": keep.every, "minutes": None, "best": None}
        self.note("run.started", world=1, host="here", pid=1, resumed_from=None, config={"every": 10, "keep": told})

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
        began, name = time.time(), f"step-{step}"
        self.note("step", step=step)
        self.note("save.started", step=step, name=name)
        handle = self.manager.save(step, metrics={"loss": 10 / step, "accuracy": step / 1000})
        handle.result()
        stats = handle.stats
        self.note(
            "save.published", step=step, name=name, attempt=handle.attempt, nbytes=stats.bytes, stall_s=stats.stall_s,
            staging_s=stats.staging_s, persist_s=stats.persist_s, commit_s=stats.commit_s, began=began,
            ranks=[[0, began, stats.stall_s, stats.staging_s, stats.persist_s, stats.bytes]],
        )  # fmt: skip

    def fail(self, step: int, error: str, message: str) -> None:
        """Note a save that failed on rank 0."""
        began = time.time()
        self.note("save.failed", step=step, name=f"step-{step}", began=began, error=error, message=message, rank=0)

    def close(self) -> None:
        self.manager.close()
        self.note("run.ended", how="closed")


if __name__ == "__main__":
    job = Job(Path(sys.argv[1]))
    for number, _ in enumerate(sys.stdin, 1):
        job.step(10 * number)
        print(number, flush=True)
    job.close()
