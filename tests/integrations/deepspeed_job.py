"""Train a small model by DeepSpeed on the CPU, noting each loss; kill it on request.

deepspeed_job.py OUT STEPS [--stage N] [--dtype float32|bfloat16|float16] [--kill STEP] [--seed N]
                      [--theirs STEP] [--refused]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from jobs import leave, note_loss
from torch import nn

import holdfast
from holdfast.errors import ConfigError
from holdfast.integrations.deepspeed import state_of

ACCUMULATED = 2


def make_engine(stage: int, dtype: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    for name, kind in (("bf16", "bfloat16"), ("fp16", "float16")):
        if dtype == kind:
            config[name] = {"enabled": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def one_step(engine: Any, dtype: str) -> float:
    for _ in range(ACCUMULATED):
        loss = engine(torch.randn(4, 8).to(getattr(torch, dtype))).square().mean()
        engine.backward(loss)
        engine.step()
    return float(loss)


def check_refused(engine: Any, out: Path) -> None:
    """What would be saved as if all ranks held the same, and what would be lost."""
    zero = engine.optimizer
    for state, message in (
        ({"model": engine}, "model: a DeepSpeedEngine"),
        ({"model": engine.module, "optimizer": zero}, "optimizer: a DeepSpeedZeroOptimizer"),
        ({"model": engine.module, "optimizer": zero.optimizer}, "optimizer: its parameters are this rank's partitions"),
    ):
        expect(message, lambda state=state: holdfast.save(state, out / "refused"))
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    expect("gradients of 1 of 2 micro-batches", lambda: holdfast.save(state_of(engine), out / "refused"))
    third = make_engine(3, "float32", 0)
    expect("ZeRO stage 3 partitions the weights", lambda: state_of(third))
    expect("model: DeepSpeed ZeRO stage 3", lambda: holdfast.save({"model": third.module}, out / "refused"))
    expect("optimizer is a FP16_UnfusedOptimizer", lambda: state_of(make_engine(0, "bfloat16", 0)))
    assert not (out / "refused").exists()


def expect(message: str, call: Any) -> None:
    said = ""
    try:
        call()
    except ConfigError as error:
        said = str(error)
    assert message in said, said or f"not refused: {message}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kill", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--theirs", type=int, default=0, help="save by DeepSpeed at this step, and end; -1: never")
    parser.add_argument("--refused", action="store_true")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        os.environ.update(alone)
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    engine = make_engine(options.stage, options.dtype, options.seed)
    if options.refused:
        check_refused(engine, options.out)
        leave()
    torch.manual_seed(100 + rank)
    config = holdfast.CheckpointConfig(every=3)
    theirs = options.out / "theirs"
    with holdfast.CheckpointManager(options.out / "checkpoints", state_of(engine), config=config) as manager:
        begin = manager.restore()
        if begin is None and theirs.exists():
            begin = engine.load_checkpoint(str(theirs))[1]["step"]
        for step in range((begin or 0) + 1, options.steps + 1):
            if options.theirs:  # DeepSpeed keeps no random states
                torch.manual_seed(1000 * step + rank)
            loss = one_step(engine, options.dtype)
            if rank == 0:
                note_loss(options.out / "losses.jsonl", step, loss)
            if options.theirs == step:
                engine.save_checkpoint(str(theirs), client_state={"step": step})
                break
            manager.step(step)
            if step == options.kill:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
