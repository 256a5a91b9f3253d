"""Save a DeepSpeed ZeRO-1 run by Holdfast, and go on from there: the second start begins where the first ended.

DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 deepspeed_zero.py DIR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.integrations.deepspeed import state_of

STEPS, EVERY = 6, 3


def main(out: Path) -> None:
    deepspeed.init_distributed("gloo")
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    state = {**state_of(engine), "progress": {"note": "of your own"}}
    config = holdfast.CheckpointConfig(every=EVERY)
    with holdfast.CheckpointManager(out / "checkpoints", state, config=config) as manager:
        begin = manager.restore() or 0
        if dist.get_rank() == 0:
            print(f"begins after step {begin}")
        for step in range(begin + 1, begin + STEPS + 1):
            loss = engine(torch.randn(4, 8).bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
            manager.step(step, metrics={"loss": loss.item()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
