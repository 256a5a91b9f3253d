"""States and arguments that are nested too deep, too large to be written out, or in a home directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast
from holdfast.errors import ConfigError, StateMismatch
from holdfast.sync import DirectoryTransport

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def nested(kind: type, depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = {"a": leaf} if kind is dict else kind([leaf])
    return leaf


class Stateful:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"a": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["a"]


class WithExtra(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def in_state(place: str, value: Any) -> dict[str, Any]:
    if place == "stateful":
        return {"x": Stateful(value)}
    if place == "per rank":
        return {"x": holdfast.PerRank(value)}
    if place == "extra state":
        module = WithExtra(1, 1)
        module.extra = value
        return {"x": module}
    if place == "optimizer":
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.state[parameter] = {"q": value}
        return {"x": optimizer}
    return {"x": value}


@pytest.mark.parametrize("place", ["plain", "stateful", "per rank", "extra state", "optimizer"])
@pytest.mark.parametrize("depth", [400, 5000])
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_deep_values_are_kept_or_named(tmp_path: Path, kind: type, depth: int, place: str) -> None:
    for number, leaf in enumerate((1, torch.ones(1))):
        state = in_state(place, nested(kind, depth, leaf))
        try:
            holdfast.save(state, tmp_path / str(number))
            holdfast.load(state, tmp_path / str(number))
        except ConfigError as error:
            assert "x" in str(error)  # noqa: PT017 - either will do
            assert len(str(error)) < 2000  # noqa: PT017
            assert not (tmp_path / str(number)).exists()


def test_values_that_hold_themselves(tmp_path: Path) -> None:
    plain: list[Any] = [1]
    plain.append(plain)
    mapping: dict[str, Any] = {}
    mapping["self"] = mapping
    tensors: list[Any] = [torch.ones(1)]
    tensors.append(tensors)
    for number, value in enumerate((plain, mapping, tensors)):
        try:
            holdfast.save({"x": value}, tmp_path / str(number))
        except ConfigError as error:
            assert "x" in str(error)  # noqa: PT017


def test_integers_that_python_does_not_write_out(tmp_path: Path) -> None:
    huge = 10**10_000
    state = {"n": huge, "t": (1, huge)}
    try:
        holdfast.save(state, tmp_path / "c")
    except ConfigError as error:
        assert "n" in str(error)  # noqa: PT017
    else:
        into = {"n": 0, "t": ()}
        holdfast.load(into, tmp_path / "c")
        assert into == state
    with pytest.raises(ConfigError, match="x"):
        holdfast.save({"x": {huge: torch.ones(1)}}, tmp_path / "d")
    with pytest.raises(ConfigError, match="metric 'a' must be a number"):
        holdfast.save({"x": 1}, tmp_path / "e", metrics={"a": nested(list, 5000, 1)})


@pytest.mark.parametrize("names", [["optimiser"], ["model", "optimiser"], ["model.weight"]])
def test_names_to_exclude_are_those_of_the_state(tmp_path: Path, names: list[str]) -> None:
    config = holdfast.CheckpointConfig(exclude_from_loading=tuple(names))
    with pytest.raises(ConfigError) as caught:
        holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(1, 1), "optimizer": {}}, config=config)
    assert caught.value.field == "exclude_from_loading"
    assert repr(names[-1]) in str(caught.value)
    assert "'optimizer'" in str(caught.value)
    for known in ("optimizer", "rng"):
        config = holdfast.CheckpointConfig(exclude_from_loading=(known,))
        holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(1, 1), "optimizer": {}}, config=config).close()


@pytest.mark.parametrize("state", ["fresh", "stepped"])
def test_an_optimizer_without_its_module_says_why_it_does_not_fit(tmp_path: Path, state: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return model, optimizer

    model, optimizer = made()
    optimizer.step()
    holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    other, alone = made()
    if state == "stepped":
        alone.step()
    with pytest.raises(StateMismatch, match=r"put the module .* into the state") as caught:
        holdfast.load({"optimizer": alone}, tmp_path / "c")
    assert "0.weight" in str(caught.value)
    holdfast.load({"model": other, "optimizer": alone}, tmp_path / "c")
    holdfast.save({"optimizer": optimizer}, tmp_path / "d")  # the other way round: saved by number
    holdfast.load({"optimizer": alone}, tmp_path / "d")


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    model = nn.Linear(2, 2)
    holdfast.save({"model": model}, "~/one")
    assert (home / "one" / "holdfast.json").exists()
    holdfast.load({"model": model}, Path("~/one"))
    assert holdfast.open("~/one").path == str(home / "one")
    config = holdfast.CheckpointConfig(every=1, initial_load_path="~/one")
    exports = [holdfast.HFExport("~/hf", every=1)]
    with holdfast.CheckpointManager("~/run", {"model": model}, config=config, exports=exports) as manager:
        assert manager.restore() is None
        manager.step(1)
    assert (home / "run" / "step-1").is_dir()
    assert (home / "hf" / "hf-1").is_dir()
    assets = home / "assets"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    assert holdfast.export_hf(model, "~/out", assets="~/assets") == home / "out"
    with holdfast.sync.Publisher(DirectoryTransport("~/versions")) as publisher:
        publisher.publish(model.state_dict(), 1)
    assert (home / "versions" / "version-1").is_dir()
    dcp.load({"model": model.state_dict()}, storage_reader=holdfast.dcp.Reader("~/one"), no_dist=True)
    assert not (tmp_path / "~").exists()


def test_a_tilde_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from holdfast.cli.app import app

    monkeypatch.setenv("HOME", str(tmp_path))
    holdfast.save({"x": 1}, tmp_path / "one")
    for command in (["show", "~/one"], ["verify", "~/one"], ["ls", "~"], ["recover", "~/one"]):
        result = typer_testing.CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output)
