"""Stop in the middle of an epoch, and go on with any number of ranks: each sample is trained on once.

torchrun --nproc-per-node=2 torchdata_position.py DIR --stop-after 6
torchrun --nproc-per-node=3 torchdata_position.py DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.integrations.torchdata import StatefulDataLoader, StatefulDistributedSampler

SAMPLES, BATCH = 96, 4


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    data = [(number, torch.randn(8)) for number in range(SAMPLES)]
    sampler = StatefulDistributedSampler(data, shuffle=True, seed=7)
    loader = StatefulDataLoader(data, BATCH, sampler=sampler, num_workers=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    counts = torch.zeros(SAMPLES)  # how often each sample was trained on, by any rank
    progress = {"epoch": 0}

    state = {"model": model, "optimizer": optimizer, "dataloader": loader, "counts": counts, "progress": progress}
    config = holdfast.CheckpointConfig(every=1)
    with holdfast.CheckpointManager(options.out / "checkpoints", state, config=config) as manager:
        step = manager.restore() or 0
        print(f"{dist.get_world_size()} ranks go on after step {step}, {int(counts.sum())} samples")
        sampler.set_epoch(progress["epoch"])
        for numbers, x in loader:
            step += 1
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts += count(numbers)
            manager.step(step)
            if step == options.stop_after:
                break
    if dist.get_rank() == 0 and step != options.stop_after:
        assert bool((counts == 1).all())
        print(f"the end of the epoch, after step {step}: every sample once")


def count(numbers: torch.Tensor) -> torch.Tensor:
    """What this step adds to the counts, on all ranks together."""
    found = torch.bincount(numbers, minlength=SAMPLES).float()
    dist.all_reduce(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--stop-after", type=int, help="training steps")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()  # after the model: DDP that outlives its group may wait for gloo forever (torch 2.13)


if __name__ == "__main__":
    main()
