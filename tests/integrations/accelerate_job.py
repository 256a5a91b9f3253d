"""Train a small model with accelerate, saving by Holdfast, accelerate itself, or both; kill it on request.

accelerate_job.py OUT STEPS [--plan ddp|fsdp2] [--save holdfast|async|stock] [--every N] [--kill N] [--resume X]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from jobs import leave, note_loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.accelerate import async_save_state, load_state, save_state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))


class Progress:
    def __init__(self) -> None:
        self.step = self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def fsdp2_on_cpu() -> None:
    """Accelerate takes FSDP on the CPU for plain DDP: its state is told otherwise."""
    init = AcceleratorState.__init__

    def patched(self: AcceleratorState, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        self.distributed_type = DistributedType.FSDP
        if kwargs.get("fsdp_plugin") is not None:
            self.fsdp_plugin = kwargs["fsdp_plugin"]

    AcceleratorState.__init__ = patched


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--plan", default="ddp")
    parser.add_argument("--save", default="holdfast")
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--resume")
    args = parser.parse_args()
    plugin = None
    if args.plan == "fsdp2":
        fsdp2_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
        )
    accelerator = Accelerator(
        cpu=True,
        # A shuffle that depends on the epoch, not on what was drawn before: else no middle of an epoch can be resumed.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5),
        fsdp_plugin=plugin,
        project_config=ProjectConfiguration(project_dir=str(args.out), automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(3, device_specific=True)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True, generator=torch.Generator()
    )
    torch.manual_seed(2 + accelerator.process_index)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        load_state(accelerator, None if args.resume == "auto" else args.resume)
    handle = None
    while progress.step < args.steps:
        loader.set_epoch(progress.epoch)
        batches = accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.batch += 1
            mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
            if accelerator.is_main_process:
                note_loss(args.out / "losses.jsonl", progress.step, mean)
            if args.kill == progress.step:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress.step % args.every == 0:
                if args.save == "stock":
                    accelerator.save_state()
                elif args.save == "async":
                    handle = async_save_state(accelerator)
                else:
                    save_state(accelerator)
            if progress.step >= args.steps:
                break
        else:
            progress.epoch, progress.batch = progress.epoch + 1, 0
    if handle is not None:
        handle.result(60)
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main()
