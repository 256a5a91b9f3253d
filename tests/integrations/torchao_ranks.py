"""Quantized states and float8 weights under FSDP2, on several ranks; functions run by their names, one after the other.

torchao_ranks.py ROOT FUNCTION:KIND[:RANKS THAT SAVED]...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling a step takes a minute here, and changes nothing of its state

import pytest
import torch
import torch.distributed as dist
from jobs import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao import optim
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

import holdfast

WIDTH = 256


def make_state(kind: str, seed: int) -> dict[str, Any]:
    """kind: an optimizer of torchao's, or float8 for weights with float8 all-gather."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 7))
    if kind.startswith("float8"):
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(
            model,
            config=config,
            module_filter_fn=lambda module, _: isinstance(module, nn.Linear) and module.out_features > 7,
        )
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind.startswith("float8"):
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = getattr(optim, kind)(model.parameters(), lr=1e-3, block_size=128)
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any], kind: str, steps: range) -> list[float]:
    """On the same numbers on every rank, so that all worlds do the same."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randn(16, 64)
        loss = (state["model"](x) - x[:, :7]).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        if kind == "float8-precomputed":
            precompute_float8_dynamic_scale_for_fsdp(state["model"])
        losses.append(loss.item())
    return losses


def resume(root: Path, kind: str) -> None:
    """Resumed, fresh or used otherwise, a run goes on bit for bit."""
    state = make_state(kind, 0)
    train(state, kind, range(3))
    with holdfast.CheckpointManager(root / kind, state) as manager:
        handle = manager.save(3)
        losses = train(state, kind, range(3, 6))
        handle.result()
    for steps in (0, 2):
        other = make_state(kind, 1)
        train(other, kind, range(steps))
        holdfast.load(other, root / kind)
        assert train(other, kind, range(3, 6)) == losses, (kind, steps)
    checkpoint = holdfast.open(root / kind)
    assert checkpoint.verify().ok
    shapes = {name: list(info.shape) for name, info in checkpoint.tensors.items()}
    if kind.startswith("float8"):
        weight = state["model"][0].weight
        assert isinstance(weight, DTensor)
        assert "Float8" in type(weight.to_local()).__name__
        assert shapes["model.0.weight._tensor"] == [WIDTH, 64]
    else:
        assert shapes["optimizer.state.0.weight.exp_avg.scale"] == [WIDTH * 64 // 128]


def save(root: Path, kind: str) -> None:
    state = make_state(kind, 0)
    train(state, kind, range(3))
    holdfast.save(state, root / f"{kind}-{dist.get_world_size() if dist.is_initialized() else 1}")


def load(root: Path, kind: str, stored: str) -> None:
    """What another number of ranks has saved, into a fresh and a used state."""
    expected = make_state(kind, 0)
    train(expected, kind, range(3))
    losses = train(expected, kind, range(3, 6))
    for steps in (0, 2):
        state = make_state(kind, 1)
        train(state, kind, range(steps))
        holdfast.load(state, root / f"{kind}-{stored}")
        torch.testing.assert_close(train(state, kind, range(3, 6)), losses, rtol=1e-4, atol=1e-5)


def refuse(root: Path, kind: str) -> None:
    """Rows that ranks have different numbers of."""
    global WIDTH
    WIDTH = 257
    state = make_state(kind, 0)
    train(state, kind, range(1))
    with pytest.raises(holdfast.HoldfastError, match="can't be told"):
        holdfast.save(state, root / "uneven")
    assert not (root / "uneven").exists()


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    for job in sys.argv[2:]:
        name, *rest = job.split(":")
        globals()[name](Path(sys.argv[1]), *rest)
    if dist.is_initialized():
        dist.destroy_process_group()
    leave()
