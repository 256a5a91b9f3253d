"""Train a small model with an optimizer of torchao's whose state is quantized; save by Holdfast; kill it on request.

torchao_job.py OUT STEPS --optimizer AdamW8bit [--kill N] [--resume]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling a step takes a minute here, and changes nothing of its state

import torch
from jobs import leave, note_loss
from torch import nn
from torchao import optim

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--optimizer", default="AdamW8bit")
    parser.add_argument("--kill", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 8))
    optimizer = getattr(optim, args.optimizer)(model.parameters(), lr=1e-2, block_size=128)
    progress: dict[str, int] = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.RNG(), "progress": progress}
    with holdfast.CheckpointManager(args.out / "run", state, config=holdfast.CheckpointConfig(every=3)) as manager:
        manager.restore()
        while progress["step"] < args.steps:
            x = torch.randn(16, 64)
            loss = (model(x) - x[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress["step"] += 1
            note_loss(args.out / "losses.jsonl", progress["step"], loss.item())
            manager.step(progress["step"])
            if args.kill == progress["step"]:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    leave()


if __name__ == "__main__":
    main()
