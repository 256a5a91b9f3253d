"""`ZeroRedundancyOptimizer`: each rank has the state of some parameters, stored by name, for any other world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import in_world, run_job
from optimizer_kinds import AddsKeys, Forwarding, Silent, adamw
from torch import nn

import holdfast

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer_class": torch.optim.AdamW, "lr": 0.05},
    "momentum": {"optimizer_class": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
    "buckets": {"optimizer_class": torch.optim.AdamW, "lr": 0.05, "parameters_as_bucket_view": True},
}


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 2, bias=False))


def make_state(kind: str, seed: int, *, zero: bool = True) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(seed)
    params = list(model.parameters())
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.02}]
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(groups, **OPTIONS[kind])
    else:
        options = {key: value for key, value in OPTIONS[kind].items() if key != "parameters_as_bucket_view"}
        optimizer = options.pop("optimizer_class")(groups, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    ddp = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() and dist.get_world_size() > 1 else model
    return {"model": ddp, "optimizer": optimizer, "scheduler": scheduler}


def train(state: dict[str, Any], steps: range) -> None:
    """On the same tokens on every rank, so that all worlds do the same."""
    for step in steps:
        torch.manual_seed(step)
        state["model"](torch.randn(3, 4)).square().sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["optimizer"].zero_grad()


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    for one, other in zip(left["model"].parameters(), right["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def save_and_resume(root: Path, kind: str, steps: int) -> None:
    """Goes on as before on the same world: save in the loop, next steps at once, load into fresh and used ones."""
    state = make_state(kind, 0)
    train(state, range(steps))
    with holdfast.CheckpointManager(root, state) as manager:
        handle = manager.save(max(steps, 1))
        train(state, range(steps, steps + 3))
        handle.result()
    fresh = make_state(kind, 1)
    train(fresh, range(1))
    if steps:
        holdfast.load(fresh, root)
    else:
        fresh = make_state(kind, 1)
        holdfast.load(fresh, root)
    train(fresh, range(steps, steps + 3))
    assert_same(state, fresh)


def resume_here(root: Path, kind: str, steps: int, *, zero: bool) -> None:
    """What another world has saved, against the same training here without a stop."""
    state = make_state(kind, 1, zero=zero)
    holdfast.load(state, root)
    expected = make_state(kind, 0, zero=zero)
    train(expected, range(steps))
    train(expected, range(steps, steps + 3))
    train(state, range(steps, steps + 3))
    for one, other in zip(state["model"].parameters(), expected["model"].parameters(), strict=True):
        # DDP divides the sum of equal gradients by the number of ranks: exact for two, not for three.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for group, other in zip(state["optimizer"].param_groups, expected["optimizer"].param_groups, strict=True):
        assert group["lr"] == other["lr"]


def every_world(tmp_path: str) -> None:
    root = Path(tmp_path)
    for kind in OPTIONS:
        for world in (2, 3):
            for steps in (0, 3):
                in_world(world, save_and_resume, root / f"{kind}-{world}-{steps}", kind, steps)
        for stored, here in ((2, 3), (3, 2), (2, 1), (3, 1)):
            in_world(here, resume_zero if here > 1 else resume_plain, root / f"{kind}-{stored}-3", kind)
    in_world(1, save_plain, root / "plain", "adamw")
    in_world(2, resume_zero, root / "plain", "adamw")
    in_world(2, refused, root)


def resume_zero(root: Path, kind: str) -> None:
    resume_here(root, kind, 3, zero=True)


def resume_plain(root: Path, kind: str) -> None:
    resume_here(root, kind, 3, zero=False)


def save_plain(root: Path, kind: str) -> None:
    state = make_state(kind, 0, zero=False)
    train(state, range(3))
    holdfast.save(state, root)


def refused(root: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Subclass(ZeroRedundancyOptimizer):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "more": 1}

    model = make_model()
    params = list(model.parameters())
    zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1)
    hooked = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1)
    hooked.register_state_dict_post_hook(lambda *_: None)
    overlapping = ZeroRedundancyOptimizer(params, torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    for optimizer in (
        overlapping,
        hooked,
        Subclass(params, torch.optim.AdamW, lr=0.1),
        ZeroRedundancyOptimizer(params, AddsKeys),
        Forwarding(zero),
    ):
        with pytest.raises(holdfast.ConfigError, match=r"optimizer: .*can't be saved or loaded"):
            holdfast.save({"model": model, "optimizer": optimizer}, root / "refused")
        assert not (root / "refused").exists()
    # Names of the whole state, each written by the rank that has it.
    state = {"model": model, "optimizer": Silent(zero)}
    checkpoint = holdfast.save(state, root / "inside")
    assert "optimizer.param_groups.0.lr" in checkpoint.objects
    model(torch.ones(1, 4)).sum().backward()
    zero.step()
    found = set(holdfast.save(state, root / "inside", overwrite=True).tensors)
    names = {name for name, _ in model.named_parameters()}
    assert {f"optimizer.state.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")} <= found
    plain = {"model": model, "optimizer": adamw(params)}
    holdfast.load(plain, root / "inside")


def test_zero(tmp_path: Path) -> None:
    run_job(every_world, nproc=3, args=[tmp_path])
