"""Train a small model by Ray Train on two workers, noting each loss; one of them is killed on request.

ray_job.py OUT STEPS [--kill STEP] [--every N] [--workers N] [--plainly] [--storage URL]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from jobs import note_loss
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.integrations.ray import checkpoint_manager, report


def make_state(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def one_step(state: dict[str, Any]) -> float:
    loss = state["model"](torch.randn(4, 8)).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    return float(loss)


def train(options: dict[str, Any]) -> None:
    out, rank = Path(options["out"]), ray.train.get_context().get_world_rank()
    state = make_state(rank)
    config = holdfast.CheckpointConfig(every=options["every"])
    with checkpoint_manager(state, config=config) as manager:
        step = manager.restore() or 0
        (out / f"resumed-{rank}-{step}").touch()
        while step < options["steps"]:
            step += 1
            loss = one_step(state)
            if rank == 0:
                note_loss(out / "losses.jsonl", step, loss)
            handles = manager.step(step, metrics={"loss": loss})
            if handles or step == 1:  # each report takes Ray about a second
                report({"loss": loss, "step": step}, handles)
            if step == options["kill"] and rank == 1 and not (out / "killed").exists():
                manager.wait()
                (out / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)


def train_plainly(out: Path, steps: int) -> None:
    """The same without Ray and without saves, under torchrun."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    state = make_state(rank)
    for step in range(1, steps + 1):
        loss = one_step(state)
        if rank == 0:
            note_loss(out / "losses.jsonl", step, loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", help="where the run's directory is; OUT by default")
    parser.add_argument("--plainly", action="store_true")
    options = parser.parse_args()
    if options.plainly:
        train_plainly(options.out, options.steps)
        return
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR")
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "out": str(options.out)},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name="run",
            storage_path=options.storage or str(options.out),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    kept = [(os.path.basename(found.path), metrics) for found, metrics in result.best_checkpoints]
    found = {"checkpoint": result.checkpoint.path, "metrics": result.metrics, "kept": kept}
    (options.out / "result.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
