"""Train with accelerate, fail in the middle, and resume from what Holdfast saved while training went on.

python examples/accelerate_loop.py --out out/accelerate
torchrun --nproc-per-node 2 examples/accelerate_loop.py --out out/accelerate
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.accelerate import async_save_state, load_state

STEPS = 24


class Progress:
    """How far training is; saved because it is registered."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(out: Path, fail_at: int, *, resume: bool) -> None:
    accelerator = Accelerator(
        cpu=True,
        # A shuffle that depends on the epoch alone: else nobody can go on in the middle of one.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5),
        project_config=ProjectConfiguration(project_dir=str(out), automatic_checkpoint_naming=True, total_limit=2),
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if resume:
        load_state(accelerator)
        accelerator.print("resumed at step", progress.step)
    while progress.step < STEPS:
        epoch, skipped = divmod(progress.step, len(loader))
        loader.set_epoch(epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, skipped):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % 6 == 0:
                handle = async_save_state(accelerator)
            if progress.step == fail_at:
                raise RuntimeError(f"lost at step {fail_at}")
            if progress.step == STEPS:
                break
    accelerator.print("step", progress.step, "loss", round(loss.item(), 4), "saved", handle.result().path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/accelerate"))
    out = parser.parse_args().out
    try:
        train(out, fail_at=15, resume=False)
    except RuntimeError as error:
        print("training failed:", error)
    train(out, fail_at=0, resume=True)


if __name__ == "__main__":
    main()
