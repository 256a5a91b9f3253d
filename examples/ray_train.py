"""Train on two workers of Ray Train; one is killed, and Ray starts them again from the newest checkpoint.

ray_train.py DIR
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import holdfast
from holdfast.integrations.ray import checkpoint_manager, report

STEPS, EVERY, KILL_AT = 9, 3, 8


def train() -> None:
    model = prepare_model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    began: dict[str, Any] = {"at": 0}
    state = {"model": model, "optimizer": optimizer, "began": began}
    with checkpoint_manager(state, config=holdfast.CheckpointConfig(every=EVERY)) as manager:
        began["at"] = step = manager.restore() or 0
        while step < STEPS:
            step += 1
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = manager.step(step)
            if saved:
                report({"loss": loss.item(), "step": step}, saved)
            if step == KILL_AT and not began["at"] and ray.train.get_context().get_world_rank() == 1:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)


def main(out: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(out),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    checkpoint = holdfast.open(result.checkpoint.path)
    print(f"step {checkpoint.step} in {checkpoint.path}; it went on after step {checkpoint.objects['began.at']}")
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
