"""`load(include=, exclude=)` and `Checkpoint.state`."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ConfigError, StateMismatch


class Net(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(fill)


def state_of(fill: float) -> dict[str, Any]:
    model = Net(fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=fill)
    model.head(model.body(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "train": {"step": int(fill), "best": [fill, {"x": torch.ones(2) * fill}]},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save(state_of(1.0), tmp_path / "a")
    return tmp_path / "a"


def loaded(path: Path, **selection: Any) -> dict[str, bool]:
    """Which parts of a state of twos have the values of the checkpoint, of ones, after a load."""
    saved, state = state_of(1.0), state_of(2.0)
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    holdfast.load(state, path, **selection)
    found = {}
    for name, value in state["model"].state_dict().items():
        is_new = torch.equal(value, saved["model"].state_dict()[name])
        assert is_new or torch.equal(value, before[name])
        found[f"model.{name}"] = is_new
    found["optimizer"] = state["optimizer"].param_groups[0]["lr"] == 1.0
    found["train.step"] = state["train"]["step"] == 1
    found["train.best"] = state["train"]["best"][0] == 1.0
    assert found["train.best"] == (state["train"]["best"][1]["x"][0].item() == 1.0)
    return found


EVERYTHING = {
    *(f"model.body.{index}.{kind}" for index in (0, 1) for kind in ("weight", "bias")),
    *("model.head.weight", "model.head.bias", "optimizer", "train.step", "train.best"),
}


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        ({}, EVERYTHING),
        ({"exclude": ["optimizer", "train"]}, {name for name in EVERYTHING if name.startswith("model")}),
        ({"include": "model"}, {name for name in EVERYTHING if name.startswith("model")}),
        ({"include": ["model.body.1", "train.step"]}, {"model.body.1.weight", "model.body.1.bias", "train.step"}),
        ({"exclude": ("model.head",)}, {name for name in EVERYTHING if "head" not in name}),
        (
            {"include": ["model"], "exclude": ["model.body.0.bias", "optimizer"]},
            {name for name in EVERYTHING if name.startswith("model")} - {"model.body.0.bias"},
        ),
        ({"include": ["train.best"]}, {"train.best"}),
        ({"exclude": []}, EVERYTHING),
    ],
)
def test_what_is_selected_is_loaded_and_nothing_else(path: Path, selection: dict[str, Any], taken: set[str]) -> None:
    assert {name for name, is_new in loaded(path, **selection).items() if is_new} == taken


@pytest.mark.parametrize(
    "selection",
    [
        {"include": ["modle"]},
        {"exclude": ["model.tail"]},
        {"include": ["model", "model.bod"]},
        {"include": []},
        {"include": [3]},
        {"exclude": ["optimizer.state"]},
        {"include": ["model", "optimizer.param_groups"]},
        {"exclude": [""]},
    ],
)
def test_a_selection_that_means_nothing_is_refused_before_anything_is_touched(
    path: Path, selection: dict[str, Any]
) -> None:
    state = state_of(2.0)
    before = [value.clone() for value in state["model"].parameters()]
    with pytest.raises(ConfigError):
        holdfast.load(state, path, **selection)
    assert all(map(torch.equal, before, state["model"].parameters()))
    assert state["train"]["step"] == 2


def test_what_is_left_out_need_not_fit(tmp_path: Path, path: Path) -> None:
    """A head of another size, and a checkpoint that lacks what is excluded."""
    state = state_of(2.0)
    state["model"].head = nn.Linear(3, 7)
    del state["optimizer"]
    with pytest.raises(StateMismatch, match=r"head"):
        holdfast.load(state, path)
    holdfast.load(state, path, exclude=["model.head", "optimizer"])
    assert torch.equal(state["model"].body[0].weight, state_of(1.0)["model"].body[0].weight)
    holdfast.save({"model": Net(5.0).body}, tmp_path / "body")
    holdfast.load({"model": state["model"].body, "other": torch.ones(2)}, tmp_path / "body", exclude=["other"])


class Keyed:
    """An object whose state has keys that aren't strings."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_state_is_the_nested_dict_that_was_saved(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "w": torch.arange(6.0).reshape(2, 3),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "nested": {"list": [torch.ones(2), {"a": 1}, [torch.zeros(1)]], 7: "seven", "plain": [1, (2, 3)], "none": {}},
        "plainly": {0: {"x": torch.ones(1)}, 10: {"x": torch.zeros(1)}},
        "by_int": Keyed({0: {"x": torch.ones(1)}, 10: {"x": torch.zeros(1)}, 7: "seven", "none": {}}),
        "ordered": OrderedDict(a=1, b=torch.ones(1, dtype=torch.bfloat16)),
    }
    found = holdfast.save(given, tmp_path / "a").state()
    assert_same(found, {**given, "by_int": given["by_int"].state_dict()})


def assert_same(found: Any, given: Any) -> None:
    if isinstance(given, torch.Tensor):
        assert found.dtype == given.dtype
        assert torch.equal(found, given)
    elif isinstance(given, dict):
        assert set(found) == set(given)
        for key, value in given.items():
            assert_same(found[key], value)
    elif isinstance(given, list):
        assert isinstance(found, list)
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(given)
        assert found == given


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_state_of_modules_and_optimizers_is_that_of_stock_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state = state_of(1.0)
    found = holdfast.save({**state, "rng": holdfast.RNG()}, tmp_path / "a").state()
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    assert_same(found["model"], model)
    assert_same(found["optimizer"], optimizer)
    assert list(found["rng"]) == ["rank-00000"]
    stock = {"model": model, "n": {"epoch": 3, "t": torch.ones(2)}}
    dcp.save(  # type: ignore[attr-defined]
        stock,
        checkpoint_id=tmp_path / "stock",
        no_dist=True,
    )
    assert_same(holdfast.open(tmp_path / "stock").state(), stock)


class Loader:
    """A dataloader by its name, alike on every rank."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_replicated_takes_a_value_by_its_plain_name(tmp_path: Path) -> None:
    loader, plain = Loader(), holdfast.Replicated(4)
    loader.position = 5
    checkpoint = holdfast.save({"dataloader": holdfast.Replicated(loader), "n": {"plain": plain}}, tmp_path / "a")
    assert checkpoint.state() == {"dataloader": {"position": 5}, "n": {"plain": 4}}
    loader.position = plain.value = 0
    holdfast.load({"dataloader": holdfast.Replicated(loader), "n": {"plain": plain}}, tmp_path / "a")
    assert (loader.position, plain.value) == (5, 4)
    own = holdfast.save({"dataloader": loader}, tmp_path / "b")
    assert own.state() == {"dataloader": {"rank-00000": {"position": 5}}}
    for both in (holdfast.PerRank(holdfast.Replicated(1)), holdfast.Replicated(holdfast.PerRank(1))):
        with pytest.raises(ConfigError, match="only one"):
            holdfast.save({"x": both}, tmp_path / "c")
