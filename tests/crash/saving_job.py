"""A training job that saves all the time and writes down what it does: what the crash tests start, kill and restart.

Every random number, sample and parameter depends on all steps before, on every rank, so one digest a step says whether
a rank is where an uninterrupted job would be. Each rank appends its events to a file, one line of JSON each, before it
goes on. Run as a script, it is what `torchrun` starts.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer step would import it, in every process anew
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

WIDTH = 112
EXPORT_EVERY = 4
_events = Path(os.devnull)


class Samples:
    """Samples for this rank, drawn from the global generators; it knows how many it has given."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.drawn = 0

    def draw(self) -> torch.Tensor:
        self.drawn += 1
        shift = random.random() + float(np.random.random()) + self.rank
        return torch.randn(4, WIDTH) + shift

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank, self.drawn = state["rank"], state["drawn"]


class Training:
    """A small FSDP2 model with AdamW. ``state`` is all that the next step depends on, but for the generators."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
        if world > 1:
            fully_shard(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.samples = Samples(rank)
        self.progress = {"samples": 0}
        for number, seed in enumerate((random.seed, np.random.seed, torch.manual_seed)):
            seed(100 * rank + number)
        self.state = {
            "model": model,
            "optimizer": self.optimizer,
            "samples": holdfast.PerRank(self.samples),
            "progress": self.progress,
        }

    def step(self) -> None:
        loss = self.model(self.samples.draw()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["samples"] += 4

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's share of what an export holds now: all ranks have as many rows of each tensor."""
        held = self.model.state_dict()
        return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in held.items()}

    def digest(self) -> str:
        """Return a digest of every byte that this rank trains on."""
        hasher = xxhash.xxh3_128()
        parameters = list(self.model.parameters())
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
        moments = [value for state in states for _, value in sorted(state.items())]
        for tensor in [*parameters, *moments, torch.get_rng_state()]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            hasher.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        generators = (random.getstate(), np.random.get_state()[1].tolist())
        hasher.update(repr((generators, self.samples.state_dict(), self.progress)).encode())
        return hasher.hexdigest()


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the tensors' names and bytes."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hasher.update(name.encode())
        hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def start(log: str) -> tuple[int, int]:
    """Join the job, if there is one; returns rank and world. Events go to ``log``-RANK.jsonl."""
    global _events
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    _events = Path(f"{log}-{rank}.jsonl")
    return rank, world


def note(event: str, **fields: Any) -> None:
    """Append an event, in one write: whoever reads it finds whole lines, but for the last of a killed process."""
    line = json.dumps({"event": event, "pid": os.getpid(), "at_s": time.monotonic(), **fields}) + "\n"
    fd = os.open(_events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def note_end(handle: holdfast.SaveHandle, event: str = "told") -> None:
    """Log the outcome of a save as this rank got it; ``exported``: of an export."""
    error = handle.exception()
    kind = None if error is None else type(error).__name__
    note(event, step=handle.step, attempt=handle.attempt, error=kind, message=str(error or ""))


def exports_of(root: str | os.PathLike[str]) -> Path:
    """Return where a job that saves to ``root`` exports to."""
    return Path(f"{os.fspath(root)}-hf")


def hidden_entries(root: str) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith(".") and name != ".holdfast")


def config(**fields: Any) -> holdfast.CheckpointConfig:
    """Return deadlines that a test can wait for, and a busy machine can meet."""
    deadlines = {"stage_timeout": 30.0, "persist_timeout": 30.0, "commit_timeout": 20.0}
    return holdfast.CheckpointConfig(**{**deadlines, "keep": holdfast.Keep(last=3), **fields})


def reference(log: str, steps: int) -> None:
    """Return the states of an uninterrupted job, which never saves, after every step."""
    rank, world = start(log)
    training = Training(rank, world)
    for step in range(1, steps + 1):
        training.step()
        weights = digest_of(training.weights()) if step % EXPORT_EVERY == 0 else None
        note("step", step=step, digest=training.digest(), weights=weights)
    if world > 1:
        dist.destroy_process_group()


def main(root: str, log: str, steps: int, io_limit_bytes_per_s: int | None = None) -> None:
    """Resume, then train until step ``steps``, saving every second step and exporting every fourth."""
    rank, world = start(log)
    training = Training(rank, world)
    settings = config(every=2, on_error="warn", io_limit_bytes_per_s=io_limit_bytes_per_s)
    export = holdfast.HFExport(
        exports_of(root), every=EXPORT_EVERY, keep=holdfast.Keep(last=2), io_limit_bytes_per_s=io_limit_bytes_per_s
    )
    with holdfast.CheckpointManager(root, training.state, config=settings, exports=[export]) as manager:
        report = manager.recovered
        note(
            "ready",
            hidden=hidden_entries(root) + hidden_entries(os.fspath(exports_of(root))),
            rolled_forward=list(report.rolled_forward) if report else [],
            removed=list(report.removed) if report else [],
        )
        first = manager.restore()
        note("restored", step=first, digest=training.digest())
        for step in range((first or 0) + 1, steps + 1):
            training.step()
            note("step", step=step, digest=training.digest())
            for event, handle in zip(("told", "exported"), manager.step(step), strict=False):
                if event == "told":
                    note("saving", step=step)
                handle.add_done_callback(lambda ended, event=event: note_end(ended, event))
    note("closed")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
