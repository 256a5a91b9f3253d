"""Train a small model as XTuner's trainer does, saving by Holdfast's seam or by XTuner's own calls; kill it on request.

xtuner_job.py WORK_DIR STEPS [--save sync|async|stock|split] [--kill N] [--resume auto|PATH] [--load holdfast|stock] ...
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import leave, note_loss
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.integrations.xtuner import TrainEngine, TrainerCheckpoints, XTunerMeta


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 32), nn.Dropout(dropout), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))


class Loader:
    """Gives each rank its part of a shuffled epoch; its state is the same on all ranks, as XTuner's."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.epoch, self.at = rank, world, 0, 0
        self.data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))

    def next(self) -> torch.Tensor:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch))
        mine = order[self.at + self.rank * (8 // self.world) :][: 8 // self.world]
        self.at += 8
        if self.at == 32:
            self.epoch, self.at = self.epoch + 1, 0
        return self.data[mine]

    def get_state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Stock:
    """What XTuner's own engine and trainer do with `torch.distributed.checkpoint`."""

    def __init__(self, engine: TrainEngine) -> None:
        self.model, self.optimizer = engine.model, engine.optimizer

    def states(self) -> dict[str, object]:
        options = StateDictOptions(cpu_offload=True)
        model = get_model_state_dict(self.model, options=options)
        return {"model": model, "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options)}

    def save(self, run: TrainerCheckpoints, step: int, loader: Loader, scheduler: object, *, split: bool) -> None:
        path = run.checkpoint_dir / f"ckpt-step-{step}"
        states = self.states()
        if split:
            dcp.save(states["model"], checkpoint_id=path / "model")
            dcp.save(states["optimizer"], checkpoint_id=path / "optimizer")
        else:
            dcp.save(states, checkpoint_id=path / "weights")
        if dist.get_rank() == 0:
            torch.save(loader.get_state_dict(), path / "dataloader")
            torch.save(scheduler.state_dict(), path / "lr_scheduler")
            (path / "train_state.json").write_text(
                json.dumps({"cur_step": step, "cur_epoch": loader.epoch, "train_time_offset": 1.5})
            )
        exp = run.meta.latest_exp
        exp.checkpoint_list.append(str(path))
        exp.cur_step = exp.history[-1]["end"] = step
        if dist.get_rank() == 0:
            (run.work_dir / ".xtuner").write_bytes(run.meta.encode())
        dist.barrier()

    def load(self, path: Path, loader: Loader, scheduler: object) -> int:
        states = self.states()
        dcp.load(states, checkpoint_id=path / "weights")
        options = StateDictOptions(cpu_offload=True, strict=True)
        set_model_state_dict(self.model, states["model"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=states["optimizer"], options=options)
        loader.load_state_dict(torch.load(path / "dataloader"))
        scheduler.load_state_dict(torch.load(path / "lr_scheduler"))
        return int(json.loads((path / "train_state.json").read_text())["cur_step"])


def kill_at_record(step: int) -> None:
    write = XTunerMeta.write

    def die(meta: XTunerMeta, work_dir: str) -> None:
        if meta.latest_exp.cur_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        write(meta, work_dir)

    XTunerMeta.write = die


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--save", default="async")
    parser.add_argument("--load", default="holdfast")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--snapshots", type=int)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--kill-at-record", type=int, help="before the record names the checkpoint of this step")
    parser.add_argument("--dense", type=int, help="plain DDP weights of this many KiB in place of FSDP's")
    parser.add_argument("--raise", type=int, dest="raise_at")
    parser.add_argument("--resume")
    parser.add_argument("--dropout", type=float, default=0.3)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # XTuner always has a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net(args.dropout)
    if args.dense:
        model.more = nn.ParameterList(torch.ones(1024) for _ in range(args.dense))
    elif world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    torch.manual_seed(2 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    loader = Loader(rank, world)
    engine = TrainEngine(model, optimizer)
    if args.kill_at_record and rank == 0:
        kill_at_record(args.kill_at_record)
    held: list[float] = []
    with TrainerCheckpoints(
        args.work_dir,
        engine,
        total_step=args.steps,
        checkpoint_interval=args.every,
        checkpoint_maxkeep=2,
        snapshot_interval=args.snapshots,
        async_checkpoint=args.save == "async",
        auto_resume=args.resume == "auto",
    ) as run:
        step = 0
        if args.load == "stock":
            step = Stock(engine).load(Path(args.resume), loader, scheduler)
        elif args.resume:
            path = None if args.resume == "auto" else args.resume
            state = run.resume(path, dataloader=loader, lr_scheduler=scheduler)
            step = 0 if state is None else state["cur_step"]
        while step < args.steps:
            inputs = loader.next()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                note_loss(args.work_dir / "losses.jsonl", step, mean.item())
            began = time.perf_counter()
            if args.save in ("stock", "split"):
                if step % args.every == 0:
                    Stock(engine).save(run, step, loader, scheduler, split=args.save == "split")
            else:
                run.maybe_save(step, epoch=loader.epoch, dataloader=loader, lr_scheduler=scheduler)
            if step % args.every == 0:
                held.append(time.perf_counter() - began)
            if args.kill == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if args.raise_at == step:
                raise RuntimeError("training failed")
    if rank == 0:
        print("held", *(f"{seconds * 1000:.1f}" for seconds in held))
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
