"""Tensor subclasses made of inner tensors: stored as these, loaded into these, told apart by their notes."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._pytree import tree_map

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Rounding(enum.Enum):
    NEAREST = "nearest"
    DOWN = "down"


class Options(NamedTuple):
    rounding: Rounding
    block: int


class Scaled(torch.Tensor):
    """``codes * scale``, computed when it is used; in-place copies write codes."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=scale.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: Any = None) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], context)

    def value(self) -> torch.Tensor:
        codes = self.codes.value() if isinstance(self.codes, Scaled) else self.codes.float()
        return codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].context)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Scaled):
            args[0].codes.copy_((args[1] / args[0].scale).round())
            return args[0]
        plain = tree_map(lambda item: item.value() if isinstance(item, Scaled) else item, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def scaled(seed: int, context: Any = None, *, nested: bool = False) -> Scaled:
    torch.manual_seed(seed)
    codes = torch.randint(-9, 9, (4, 3), dtype=torch.int8)
    inner = Scaled(codes, torch.rand(())) if nested else codes
    return Scaled(inner, torch.rand(()), context)


@pytest.fixture
def known() -> Iterator[None]:
    """As a library does for its classes."""
    with torch.serialization.safe_globals([Scaled]):
        yield


def net(seed: int, context: Any = None) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(scaled(seed, context), requires_grad=False)
    module.bias = nn.Parameter(torch.full((4,), float(seed)))
    return module


CONTEXT = [True, torch.bfloat16, Options(Rounding.NEAREST, 128), {"to": Rounding.DOWN}]


def test_a_module_is_filled_in_place(tmp_path: Path) -> None:
    saved, module = net(1, CONTEXT), net(2, CONTEXT)
    checkpoint = holdfast.save({"model": saved}, tmp_path / "a")
    assert set(checkpoint.tensors) == {"model.weight.codes", "model.weight.scale", "model.bias"}
    assert set(checkpoint.objects) == {"model.weight.__subclass__"}
    weight, codes = module.weight, module.weight.codes
    holdfast.load({"model": module}, tmp_path / "a")
    assert module.weight is weight
    assert weight.codes is codes
    assert torch.equal(codes, saved.weight.codes)
    assert torch.equal(weight.scale, saved.weight.scale)
    assert torch.equal(module.bias, saved.bias)
    assert holdfast.open(tmp_path / "a").verify().ok


def test_inner_tensors_are_stock_readable(tmp_path: Path) -> None:
    saved = net(1)
    holdfast.save({"model": saved}, tmp_path / "a")
    state = {"model": {"weight.codes": torch.zeros(4, 3, dtype=torch.int8)}}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(state["model"]["weight.codes"], saved.weight.codes)


@pytest.mark.parametrize(
    "other", [None, [False, *CONTEXT[1:]], [*CONTEXT[:2], Options(Rounding.DOWN, 128), CONTEXT[3]]]
)
def test_another_context_is_a_mismatch(tmp_path: Path, other: Any) -> None:
    holdfast.save({"model": net(1, CONTEXT)}, tmp_path / "a")
    with pytest.raises(holdfast.StateMismatch, match=r"model\.weight .*context") as raised:
        holdfast.load({"model": net(2, other)}, tmp_path / "a")
    assert raised.value.mismatched == ("model.weight",)


class Other(Scaled):
    pass


def test_another_class_is_a_mismatch(tmp_path: Path) -> None:
    holdfast.save({"model": net(1)}, tmp_path / "a")
    module = net(2)
    made = scaled(3)
    module.weight = nn.Parameter(Other(made.codes, made.scale), requires_grad=False)
    with pytest.raises(holdfast.StateMismatch, match="Scaled, the state has a Other"):
        holdfast.load({"model": module}, tmp_path / "a")


@pytest.mark.parametrize("stored_plain", [False, True])
def test_plain_and_subclass_do_not_mix(tmp_path: Path, stored_plain: bool) -> None:
    plain = net(1)
    plain.weight = nn.Parameter(torch.rand(4, 3))
    saved, module = (plain, net(2)) if stored_plain else (net(2), plain)
    holdfast.save({"model": saved}, tmp_path / "a")
    with pytest.raises(holdfast.StateMismatch, match=r"model\.weight"):
        holdfast.load({"model": module}, tmp_path / "a")


def test_in_containers_and_within_one_another(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        return {"one": scaled(seed, nested=True), "many": [scaled(seed + 1), torch.ones(2) * seed], "n": {"step": seed}}

    saved, loaded = state(1), state(5)
    checkpoint = holdfast.save(saved, tmp_path / "a")
    assert "one.codes.codes" in checkpoint.tensors
    assert "one.codes.__subclass__" in checkpoint.objects
    one = loaded["one"]
    holdfast.load(loaded, tmp_path / "a")
    assert loaded["one"] is one
    assert torch.equal(one.codes.codes, saved["one"].codes.codes)
    assert torch.equal(one.value(), saved["one"].value())
    assert torch.equal(loaded["many"][0].value(), saved["many"][0].value())
    assert torch.equal(loaded["many"][1], saved["many"][1])
    state_again = holdfast.open(tmp_path / "a").state()
    assert torch.equal(state_again["one"]["scale"], saved["one"].scale)


class Averaged:
    """A stateful object whose state holds a subclass."""

    def __init__(self, seed: int) -> None:
        self.value = scaled(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_in_the_state_of_an_object(tmp_path: Path) -> None:
    saved, loaded = Averaged(1), Averaged(2)
    holdfast.save({"ema": saved}, tmp_path / "a")
    holdfast.load({"ema": loaded}, tmp_path / "a")
    assert isinstance(loaded.value, Scaled)
    assert torch.equal(loaded.value.value(), saved.value.value())


class Quantizing(torch.optim.Optimizer):
    """Keeps a quantized sum of gradients; made at the first step, as usual."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["sum"] = Scaled(
                        torch.zeros(param.shape, dtype=torch.int8), torch.tensor(0.125), [True, torch.float32]
                    )
                state["step"] += 1
                state["sum"].copy_((state["sum"] + param.grad).clamp(-15, 15))
                param -= group["lr"] * state["sum"].value()


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, Quantizing]:
    torch.manual_seed(seed)
    module = nn.Linear(3, 4)
    optimizer = Quantizing(module.parameters())
    train(module, optimizer, steps)
    return module, optimizer


def train(module: nn.Module, optimizer: Quantizing, steps: int) -> None:
    for _ in range(steps):
        module(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 2])
def test_optimizer_state_comes_back_also_before_the_first_step(tmp_path: Path, known: None, steps: int) -> None:
    module, optimizer = trained(3)
    holdfast.save({"model": module, "optimizer": optimizer}, tmp_path / "a")
    other, again = trained(steps, seed=7)
    before = {param: row["sum"] for param, row in again.state.items()}
    holdfast.load({"model": other, "optimizer": again}, tmp_path / "a")
    for param, row in again.state.items():
        assert isinstance(row["sum"], Scaled)
        assert row["sum"].context == [True, torch.float32]
        assert param not in before or row["sum"] is before[param]
    train(module, optimizer, 3)
    train(other, again, 3)
    assert torch.equal(module.weight, other.weight)
    assert torch.equal(optimizer.state[module.weight]["sum"].codes, again.state[other.weight]["sum"].codes)


def test_a_class_that_nobody_vouched_for_is_not_made(tmp_path: Path) -> None:
    module, optimizer = trained(1)
    holdfast.save({"model": module, "optimizer": optimizer}, tmp_path / "a")
    other, again = trained(0)
    with pytest.raises(holdfast.ConfigError, match=r"Scaled.*add_safe_globals"):
        holdfast.load({"model": other, "optimizer": again}, tmp_path / "a")


def test_an_update_waits_until_inner_tensors_are_copied(tmp_path: Path, known: None) -> None:
    module, optimizer = trained(2)
    for step in range(4):
        expected = optimizer.state[module.weight]["sum"].codes.clone()
        weight = module.weight.detach().clone()
        handle = holdfast.async_save({"model": module, "optimizer": optimizer}, tmp_path / f"{step}")
        train(module, optimizer, 1)
        checkpoint = handle.result(60)
        assert torch.equal(checkpoint.read("optimizer.state.weight.sum.codes"), expected)
        assert torch.equal(checkpoint.read("model.weight"), weight)


def test_a_write_by_hand_is_noticed(tmp_path: Path) -> None:
    module = net(1)
    module.weight.codes = torch.zeros(4096, 4096, dtype=torch.int8)
    handle = holdfast.async_save({"model": module}, tmp_path / "a")
    module.weight.codes.fill_(1)
    with pytest.raises(holdfast.StateChangedWhileStaging, match=r"weight\.codes"):
        handle.result(60)


def test_replaced_inner_tensors_are_saved(tmp_path: Path) -> None:
    module = net(1)
    state = {"model": module}
    with holdfast.CheckpointManager(tmp_path / "run", state, config=holdfast.CheckpointConfig(every=1)) as manager:
        manager.step(1)
        manager.before_update()
        module.weight.scale = torch.tensor(42.0)
        manager.step(2)
    assert holdfast.open(tmp_path / "run" / "step-2").read("model.weight.scale").item() == 42.0


def test_trainable_subclasses_are_not_taken_for_frozen_ones(tmp_path: Path) -> None:
    module = net(1)
    checkpoint = holdfast.save({"model": holdfast.TrainableOnly(module)}, tmp_path / "frozen")
    assert set(checkpoint.tensors) == {"model.bias"}
    assert not checkpoint.objects
    holdfast.load({"model": holdfast.TrainableOnly(net(2))}, tmp_path / "frozen")
    module.weight.requires_grad_(True)
    checkpoint = holdfast.save({"model": holdfast.TrainableOnly(module)}, tmp_path / "trained")
    assert set(checkpoint.tensors) == {"model.bias", "model.weight.codes", "model.weight.scale"}


def test_what_cannot_be_noted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.ConfigError, match=r"model\.weight.*object"):
        holdfast.save({"model": net(1, object())}, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_it_is_not_exported_in_parts(tmp_path: Path) -> None:
    with pytest.raises(holdfast.ConfigError, match=r"model\.weight.*exported"):
        holdfast.export_hf({"model": net(1)}, tmp_path / "hf")
    checkpoint = holdfast.save({"model": net(1)}, tmp_path / "a")
    with pytest.raises(holdfast.ConfigError, match=r"model\.weight.*exported"):
        holdfast.export_hf(checkpoint, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_module_with_hooks_of_loading_only(tmp_path: Path) -> None:
    saved, module = net(1), net(2)
    seen: list[str] = []
    module.register_load_state_dict_pre_hook(lambda *_: seen.append("loaded"))
    holdfast.save({"model": saved}, tmp_path / "a")
    holdfast.load({"model": module}, tmp_path / "a")
    assert seen == ["loaded"]
    assert torch.equal(module.weight.codes, saved.weight.codes)


def test_a_module_with_hooks_of_saving_is_refused(tmp_path: Path) -> None:
    module = net(1)
    module.register_state_dict_post_hook(lambda *_: None)
    with pytest.raises(holdfast.ConfigError, match=r"model\.weight"):
        holdfast.save({"model": module}, tmp_path / "a")


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    saved, module = net(1), net(2, CONTEXT)
    codes = module.weight.codes.clone()
    holdfast.save({"model": saved}, tmp_path / "a")
    holdfast.load({"model": module}, tmp_path / "a", exclude=["model.weight"])
    assert torch.equal(module.weight.codes, codes)
    assert torch.equal(module.bias, saved.bias)
