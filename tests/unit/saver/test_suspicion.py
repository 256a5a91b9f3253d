"""Saves that can't be what training is at are told of, and real set-ups that look alike are not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import holdfast
from holdfast import events
from holdfast.catalog.journal import read_journal
from holdfast.cli.show import show
from holdfast.saver import suspicion
from holdfast.storage.local import open_storage


@pytest.fixture
def told() -> Any:
    found: list[events.Event] = []
    remove = events.add_hook(lambda event: found.append(event) if event.kind == "save.suspicious" else None)
    yield found
    remove()


def config(**fields: Any) -> holdfast.CheckpointConfig:
    return holdfast.CheckpointConfig(keep=None, every=1, **fields)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()


def saves(root: Path, state: dict[str, Any], step: Callable[[int], None], *, steps: int = 3, **fields: Any) -> None:
    with holdfast.CheckpointManager(root, state, config=config(**fields)) as manager:
        for number in range(1, steps + 1):
            step(number)
            manager.save(number).result()


def whats(told: list[events.Event]) -> list[tuple[int | None, str]]:
    return [(event.step, event.fields["what"]) for event in told]


# Stale. --------------------------------------------------------------------------------------------------------------


def stale_states() -> dict[str, Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]]:
    return {
        "an old module": lambda model, optimizer: {"model": copy.deepcopy(model), "optimizer": optimizer},
        "a copied dict": lambda model, optimizer: {
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "optimizer": optimizer,
        },
    }


@pytest.mark.parametrize("how", stale_states())
def test_a_stale_handle_is_told_of_at_the_second_save(
    tmp_path: Path, told: list[events.Event], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)  # with state to save
    saves(tmp_path, stale_states()[how](model, optimizer), lambda _: train(model, optimizer))
    assert whats(told) == [(2, "stale"), (3, "stale")]
    assert "model.0.weight" in told[0].fields["tensors"]
    assert [(row["step"], row["what"]) for row in read_journal(open_storage(tmp_path)) if row["kind"] == "warning"] == [
        (2, "stale"),
        (3, "stale"),
    ]
    assert "suspicious" not in holdfast.open(tmp_path / "step-1").manifest.extra
    assert holdfast.open(tmp_path / "step-2").manifest.extra["suspicious"][0]["what"] == "stale"
    show(str(tmp_path / "step-2"))
    assert "suspicious  stale: the optimizer has stepped" in capsys.readouterr().out
    show(str(tmp_path / "step-2"), as_json=True)
    assert json.loads(capsys.readouterr().out)["suspicious"][0]["what"] == "stale"


def test_one_stale_module_of_two_is_named(tmp_path: Path, told: list[events.Event]) -> None:
    """A module of the state whose optimizer steps, but whose values are written back: as a swapped copy would be."""
    actor, critic = net(), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1), nn.Linear(1, 16))
    optimizers = [torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())]
    state = {"actor": actor, "critic": critic, "optimizer": optimizers[0], "optimizer2": optimizers[1]}

    def step(_number: int) -> None:
        before = copy.deepcopy(critic.state_dict())
        train(actor, optimizers[0])
        train(critic, optimizers[1])
        critic.load_state_dict(before)

    saves(tmp_path, state, step)
    assert whats(told) == [(2, "stale"), (3, "stale")]
    assert all(name.startswith("critic.") for name in told[0].fields["tensors"])


def test_raise_fails_the_save_before_it_is_published_each_time(tmp_path: Path, told: list[events.Event]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = {"model": copy.deepcopy(model), "optimizer": optimizer}
    with holdfast.CheckpointManager(tmp_path, state, config=config(on_suspicious="raise")) as manager:
        manager.save(1).result()
        for step in (2, 3):
            train(model, optimizer)
            with pytest.raises(holdfast.SaveFailed, match="no byte of the parameters has changed"):
                manager.save(step).result()
        assert manager.steps() == [1]


def test_ignore_looks_at_nothing(tmp_path: Path, told: list[events.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicion.StateWatch, "look", lambda *_: pytest.fail("looked"))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    saves(tmp_path, {"model": model, "optimizer": optimizer}, lambda _: train(model, optimizer), on_suspicious="ignore")
    assert told == []
    with pytest.raises(holdfast.ConfigError, match="on_suspicious"):
        config(on_suspicious="perhaps")


class Experts(nn.Module):
    """Only the first expert gets tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x)


class Adapted(nn.Module):
    """LoRA by hand: a frozen base, B zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.zeros(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T + 1.0


def usual() -> dict[str, tuple[nn.Module, dict[str, Any], Callable[[nn.Module, Any, int], None]]]:
    """Set-ups in which parameters rightly stay the same: (module, options of AdamW, what a step is)."""

    def plain(model: nn.Module, optimizer: Any, _number: int) -> None:
        train(model, optimizer)

    def warming(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if number <= 2 else 1e-3
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 1e-3  # as a scheduler has it when the save comes

    def skipped(model: nn.Module, optimizer: Any, number: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 16)).square().sum() * (float("inf") if number > 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def no_grads(model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 1:
            train(model, optimizer)
        optimizer.zero_grad()
        optimizer.step()

    def not_at_all(model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 1:
            train(model, optimizer)

    def every_other(model: nn.Module, optimizer: Any, number: int) -> None:
        if number % 2:
            train(model, optimizer)

    frozen = net()
    frozen[0].requires_grad_(False)
    return {
        "plain": (net(), {}, plain),
        "lora": (Adapted(), {}, plain),
        "frozen embeddings": (frozen, {}, plain),
        "experts without tokens": (Experts(), {}, plain),
        "lr 0 in the first steps": (net(), {}, warming),
        "lr 0": (net(), {"lr": 0.0}, plain),
        "steps skipped by a scaler": (net(), {}, skipped),
        "steps skipped by a fused optimizer": (net(), {"fused": True}, skipped),
        "no gradients": (net(), {}, no_grads),
        "no steps": (net(), {}, not_at_all),
        "steps between some saves": (net(), {}, every_other),
        "bfloat16, tiny steps": (net().bfloat16(), {"lr": 1e-5}, lambda m, o, _: train_bf16(m, o)),
    }


def train_bf16(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 16).bfloat16()).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("how", usual())
def test_what_rightly_stays_the_same_is_no_alarm(tmp_path: Path, told: list[events.Event], how: str) -> None:
    model, options, step = usual()[how]
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **options)
    saves(tmp_path, {"model": model, "optimizer": optimizer}, lambda number: step(model, optimizer, number), steps=4)
    assert told == []


def test_a_group_without_learning_rate_is_no_alarm_and_the_rest_is_judged(
    tmp_path: Path, told: list[events.Event]
) -> None:
    tower, head = nn.Linear(16, 16), nn.Linear(16, 32)
    groups = [{"params": list(tower.parameters()), "lr": 0.0}, {"params": list(head.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    both = nn.Sequential(tower, head)
    saves(tmp_path, {"tower": tower, "head": head, "optimizer": optimizer}, lambda _: train(both, optimizer))
    assert told == []


def test_an_optimizer_without_state_is_judged_by_its_steps_if_it_is_of_other_parameters(
    tmp_path: Path, told: list[events.Event]
) -> None:
    saved, trained = net(), net()
    for number, model in enumerate((saved, trained)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(_number: int, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            train(model, optimizer)

        saves(tmp_path / str(number), {"model": saved, "optimizer": optimizer}, step)
    assert whats(told) == [(2, "stale"), (3, "stale")]


def test_plain_sgd_without_gradients_is_no_alarm(tmp_path: Path, told: list[events.Event]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    saves(tmp_path, {"model": model, "optimizer": optimizer}, lambda _: optimizer.step())
    assert told == []


# Replicas. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 12, 1000])
def test_every_replicated_tensor_has_its_turn_as_often_as_any_other(count: int) -> None:
    """Saves at steps of a thousand; ranks that hold a tenth less choose mostly alike."""
    names = [f"layers.{number}.weight" for number in range(count)]
    codes = sorted(xxhash.xxh3_64_intdigest(name.encode()) for name in names)
    fewer = [code for number, code in enumerate(codes) if number % 10]
    turns, alike, saves_each = dict.fromkeys(codes, 0), 0, 100
    seeds = [xxhash.xxh3_64_intdigest(b"%d" % (1000 * save)) for save in range(count * saves_each // suspicion.SAMPLES)]
    for seed in seeds:
        chosen = {codes[at] for at in suspicion._chosen(np.array(codes, np.uint64), seed)}
        others = {fewer[at] for at in suspicion._chosen(np.array(fewer, np.uint64), seed)}
        assert len(chosen) == suspicion.SAMPLES
        alike += len(chosen & others)
        for code in chosen:
            turns[code] += 1
    assert min(turns.values()) > saves_each * 0.5
    assert max(turns.values()) < saves_each * 1.6
    assert alike > 0.75 * sum(turns.values()) or count == 3


# Numbers that are none. ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_number_that_is_none_is_told_of_once(
    tmp_path: Path, told: list[events.Event], value: float, dtype: torch.dtype
) -> None:
    model = net().to(dtype)

    def step(number: int) -> None:
        with torch.no_grad():
            model[2].weight += 0.5
            if number == 2:
                model[2].weight[3, 5] = value

    saves(tmp_path, {"model": model}, step, steps=4)
    assert whats(told) == [(2, "nonfinite")]
    assert told[0].fields["tensors"] == ("model.2.weight",)


def test_infinities_that_were_there_and_masks_are_no_alarm(tmp_path: Path, told: list[events.Event]) -> None:
    model = net()
    model.register_buffer("mask", torch.full((8, 8), float("-inf")))
    with torch.no_grad():
        model[0].bias[:4] = float("-inf")
    saves(tmp_path, {"model": model}, lambda _: None)
    assert told == []


def test_a_large_state_is_looked_at_by_a_window_that_moves_on(
    tmp_path: Path, told: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspicion, "SCAN_BYTES_MIN", 1 << 20)
    model = nn.Linear(1024, 2048, bias=False)  # 8 MiB

    def step(number: int) -> None:
        if number == 2:
            with torch.no_grad():
                model.weight[-1, -1] = float("nan")

    saves(tmp_path, {"model": model}, step, steps=10)
    assert whats(told) == [(8, "nonfinite")]


def test_raise_tells_of_a_number_at_each_save(tmp_path: Path, told: list[events.Event]) -> None:
    model = net()
    with holdfast.CheckpointManager(tmp_path, {"model": model}, config=config(on_suspicious="raise")) as manager:
        manager.save(1).result()
        with torch.no_grad():
            model[0].bias[0] = float("nan")
        for step in (2, 3):
            with pytest.raises(holdfast.SaveFailed, match=r"NaN or Inf has appeared in model\.0\.bias"):
                manager.save(step).result()
