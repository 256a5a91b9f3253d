"""`Unprefixed`: a module whose names in a checkpoint don't begin with its key; and named parameters of stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.errors import ConfigError


def stages(fill: float) -> list[nn.Module]:
    model = nn.ModuleDict({"first": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4)})
    last = nn.ModuleDict({"last": nn.Linear(4, 1)})
    with torch.no_grad():
        for stage in (model, last):
            for param in stage.parameters():
                param.fill_(fill)
    return [model, last]


def named_adamw(parts: list[nn.Module]) -> torch.optim.AdamW:
    return torch.optim.AdamW([pair for part in parts for pair in part.named_parameters()], lr=0.1)


def stepped(parts: list[nn.Module]) -> torch.optim.AdamW:
    optimizer = named_adamw(parts)
    for part in parts:
        for param in part.parameters():
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_names_have_no_key_and_load_both_ways(tmp_path: Path) -> None:
    parts = stages(1.0)
    optimizer = stepped(parts)
    checkpoint = holdfast.save({"model": holdfast.Unprefixed(parts), "optimizer": optimizer}, tmp_path / "flat")
    names = {name for part in parts for name in part.state_dict()}
    assert {name for name in checkpoint.tensors if not name.startswith("optimizer.")} == names
    assert "optimizer.state.last.weight.exp_avg" in checkpoint.tensors
    holdfast.save({"model": parts, "optimizer": optimizer}, tmp_path / "keyed")
    for name in ("flat", "keyed"):
        for wrap in (holdfast.Unprefixed, list):
            fresh = stages(2.0)
            other = named_adamw(fresh)
            holdfast.load({"model": wrap(fresh), "optimizer": other}, tmp_path / name)
            for mine, theirs in zip(fresh, parts, strict=True):
                assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in mine.state_dict().items())
            assert torch.equal(other.state[fresh[1]["last"].weight]["exp_avg"], torch.full((1, 4), 0.1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_reads_it_as_a_flat_state_dict(tmp_path: Path) -> None:
    parts = stages(3.0)
    holdfast.save({"model": holdfast.Unprefixed(parts), "train": {"step": 4}}, tmp_path / "a")
    flat = {name: torch.zeros_like(value) for part in parts for name, value in part.state_dict().items()}
    dcp.load({**flat, "train": {"step": 0}}, checkpoint_id=tmp_path / "a")
    assert torch.equal(flat["last.weight"], parts[1]["last"].weight)


def test_a_manager_saves_the_model_alone_and_converts_it(tmp_path: Path) -> None:
    parts = stages(1.0)
    state = {"model": holdfast.Unprefixed(parts), "optimizer": stepped(parts)}
    config = holdfast.CheckpointConfig(last_model_only=True, last_dtype="bfloat16")
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        checkpoint = manager.save(2, final=True).result(60)
    kinds = {name: info.dtype for name, info in checkpoint.tensors.items()}
    assert kinds == {
        name: torch.bfloat16 if value.is_floating_point() else torch.int64
        for part in parts
        for name, value in part.state_dict().items()
    }


def test_it_is_for_modules_at_the_top(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.inner: Unprefixed"):
        holdfast.save({"model": {"inner": holdfast.Unprefixed(nn.Linear(2, 2))}}, tmp_path / "a")
    with pytest.raises(ConfigError, match="model: Unprefixed takes a module"):
        holdfast.save({"model": holdfast.Unprefixed({"weight": torch.ones(2)})}, tmp_path / "a")
    with pytest.raises(ConfigError, match="two values"):
        holdfast.save({"a": holdfast.Unprefixed(nn.Linear(2, 2)), "weight": torch.ones(2)}, tmp_path / "a")


def test_options_under_each_parameter_leave_out_the_names_of_all(tmp_path: Path) -> None:
    parts = stages(1.0)
    optimizer = stepped(parts)
    assert "param_names" in optimizer.param_groups[0]
    checkpoint = holdfast.save({"model": parts, "optimizer": optimizer}, tmp_path / "a")
    assert not [name for name in checkpoint.objects if name.endswith("param_names")]
    fresh = stages(2.0)
    other = named_adamw(fresh)
    other.param_groups[0]["lr"] = 0.5
    holdfast.load({"model": fresh, "optimizer": other}, tmp_path / "a")
    assert other.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]
