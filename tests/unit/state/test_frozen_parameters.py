"""`TrainableOnly`: a module whose frozen parameters are neither stored nor loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ConfigError, StateMismatch


def adapted(fill: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(fill)
    for param in model[0].parameters():
        param.requires_grad_(requires_grad=False)
    return model


def test_frozen_parameters_are_left_out_and_buffers_are_not(tmp_path: Path) -> None:
    model = adapted(1.0)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": holdfast.TrainableOnly(model), "optimizer": optimizer}
    checkpoint = holdfast.save(state, tmp_path / "a")
    names = {name for name in checkpoint.tensors if name.startswith("model.")}
    assert names == {f"model.{name}" for name in model.state_dict() if not name.startswith("0.")}
    fresh = adapted(2.0)
    other = torch.optim.AdamW([param for param in fresh.parameters() if param.requires_grad])
    holdfast.load({"model": holdfast.TrainableOnly(fresh), "optimizer": other}, tmp_path / "a")
    assert torch.equal(fresh[2].weight, model[2].weight)
    assert torch.equal(fresh[1].running_mean, model[1].running_mean)
    assert (fresh[0].weight == 2.0).all()
    assert len(other.state) == len(optimizer.state)
    with pytest.raises(StateMismatch, match=r"model\.0\.weight"):
        holdfast.load({"model": fresh, "optimizer": other}, tmp_path / "a")
    holdfast.save({"model": model}, tmp_path / "whole")
    holdfast.load({"model": holdfast.TrainableOnly(fresh)}, tmp_path / "whole")
    assert (fresh[0].weight == 2.0).all()


def test_what_is_frozen_is_looked_at_with_each_save(tmp_path: Path) -> None:
    model = adapted(1.0)
    with holdfast.CheckpointManager(tmp_path, {"model": holdfast.TrainableOnly(model)}) as manager:
        first = manager.save(1).result(60)
        model[0].weight.requires_grad_(requires_grad=True)
        second = manager.save(2).result(60)
        model[0].weight.requires_grad_(requires_grad=False)
        third = manager.save(3).result(60)
        assert set(second.tensors) - set(first.tensors) == {"model.0.weight"}
        assert set(third.tensors) == set(first.tensors)
        assert manager.restore() == 3


def test_modules_with_hooks_and_wrong_values(tmp_path: Path) -> None:
    model = adapted(1.0)

    def rename(module: nn.Module, destination: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        destination[f"{prefix}out"] = destination.pop(f"{prefix}2.weight")

    model.register_state_dict_post_hook(rename)
    checkpoint = holdfast.save({"model": holdfast.TrainableOnly(model)}, tmp_path / "a")
    assert "model.out" in checkpoint.tensors
    assert "model.0.weight" not in checkpoint.tensors
    with pytest.raises(ConfigError, match="TrainableOnly takes a module"):
        holdfast.save({"model": holdfast.TrainableOnly(3)}, tmp_path / "b")
