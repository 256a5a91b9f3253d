"""A job that torchrun may start anew on another number of ranks: what test_elastic.py starts, and takes nodes from.

elastic_job.py ROOT EVENTS: trains until EVENTS-stop is there. Every rank computes the whole batch of a step, so that
the loss is the same, bit by bit, on any number of ranks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from saving_job import config, note, start
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast

STEP_S = 0.02


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


def made(world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 3))
    if world > 1:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(batch_of(step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(root: str, events: str) -> None:
    # Each of a node's workers in turn has the same rank or another one: its process tells them apart.
    _, world = start(f"{events}-{os.getpid()}")
    model, optimizer = made(world)
    progress = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    settings = config(every=20, keep=holdfast.Keep(last=2), save_on_signal=("SIGTERM", "SIGUSR1"), signal_timeout=25.0)
    stop = Path(f"{events}-stop")
    with holdfast.CheckpointManager(root, state, config=settings) as manager:
        step = manager.restore() or 0
        assert progress["step"] == step
        note("restored", step=step, world=world)
        stops = torch.zeros(1)
        while not stops:
            step += 1
            loss = step_of(model, optimizer, step)
            progress["step"] = step
            note("step", step=step, loss=loss.hex(), world=world)
            manager.step(step)
            stops.fill_(stop.exists())
            if world > 1:
                dist.all_reduce(stops)
            time.sleep(STEP_S)
    note("closed", step=step)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    train(*sys.argv[1:])
