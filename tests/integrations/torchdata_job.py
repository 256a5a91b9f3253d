"""Train a small model on a few ranks from torchdata's loader, noting each sample; kill it on request.

torchdata_job.py OUT [--workers N] [--batch N] [--turn N] [--kill STEP] [--stock]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import leave, note_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

SAMPLES, EPOCHS, EVERY = 96, 2, 2


class Numbered(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turn", type=int, default=0)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--stock", action="store_true")
    options = parser.parse_args()
    if options.stock:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
    else:
        from holdfast.integrations.torchdata import StatefulDataLoader, StatefulDistributedSampler
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = StatefulDistributedSampler(Numbered(), seed=5)
    loader = StatefulDataLoader(Numbered(), options.batch, sampler=sampler, num_workers=options.workers)
    progress = {"epoch": 0}
    state = {"model": model, "optimizer": optimizer, "loader": holdfast.PerRank(loader), "progress": progress}
    config = holdfast.CheckpointConfig(every=EVERY)
    torch.manual_seed(100 + rank)
    with holdfast.CheckpointManager(options.out / "checkpoints", state, config=config) as manager:
        step = manager.restore() or 0
        note(options.out, rank, {"turn": options.turn, "resumed": step})
        while progress["epoch"] < EPOCHS:
            sampler.set_epoch(progress["epoch"])
            for numbers, x in loader:
                step += 1
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                at = {"turn": options.turn, "step": step, "epoch": progress["epoch"]}
                note(options.out, rank, {**at, "seen": numbers.tolist()})
                if rank == 0:
                    note_loss(options.out / "losses.jsonl", step, loss.item())
                manager.step(step)
                if step == options.kill:
                    manager.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
            progress["epoch"] += 1
    leave()


def note(out: Path, rank: int, what: dict[str, object]) -> None:
    with open(out / f"seen-{rank}.jsonl", "a") as file:
        file.write(json.dumps(what) + "\n")


def seen(out: Path) -> dict[int, list[int]]:
    """The samples that were trained on in each epoch, without what was lost with a kill."""
    lines = [json.loads(line) for path in sorted(out.glob("seen-*.jsonl")) for line in path.read_text().splitlines()]
    resumed = {line["turn"]: line["resumed"] for line in lines if "resumed" in line}
    found: dict[int, list[int]] = {}
    for line in lines:
        if "seen" in line and line["step"] <= resumed.get(line["turn"] + 1, line["step"]):
            found.setdefault(line["epoch"], []).extend(line["seen"])
    return found


if __name__ == "__main__":
    main()
