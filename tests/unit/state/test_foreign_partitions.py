"""What DeepSpeed keeps in partitions is refused, by marks of its own: played here by a few attributes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.state.tree import StateTree


@pytest.fixture(autouse=True)
def deepspeed() -> Iterator[None]:
    assert "deepspeed" not in sys.modules
    sys.modules["deepspeed"] = ModuleType("deepspeed")
    yield
    del sys.modules["deepspeed"]


def collect(state: dict[str, Any]) -> Any:
    return StateTree(state, rank=0, world=1).collect()


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Adam:
    def __init__(self) -> None:
        self.param_groups: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Schedule:
    def state_dict(self) -> dict[str, Any]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def of_deepspeed(kind: type, name: str) -> type:
    return type(name, (kind,), {"__module__": "deepspeed.runtime.engine"})


def test_engines_and_their_optimizers_are_refused() -> None:
    for name, value in (
        ("engine", of_deepspeed(Wrapper, "DeepSpeedEngine")(nn.Linear(1, 1))),
        ("optimizer", of_deepspeed(Adam, "DeepSpeedZeroOptimizer")()),
    ):
        with pytest.raises(ConfigError, match=rf"nested\.{name}: .*put holdfast\.integrations\.deepspeed") as caught:
            collect({"nested": {name: value}})
        assert caught.value.field == f"nested.{name}"
    collect({"model": Wrapper(nn.Linear(1, 1)), "schedule": of_deepspeed(Schedule, "WarmupLR")()})


def test_an_optimizer_of_partitions_is_refused_beside_its_module() -> None:
    model = nn.Linear(2, 2)
    partition = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.AdamW([partition])
    collect({"model": model, "optimizer": inner})  # somebody's other parameter
    for param in model.parameters():
        param._hp_mapping = object()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="optimizer: its parameters are this rank's partitions"):
        collect({"model": model, "optimizer": inner})
    collect({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


def test_a_module_without_its_weights_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_tensor = torch.zeros(2)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="model: DeepSpeed ZeRO stage 3 has partitioned its weights"):
        collect({"model": model})
