"""Optimizer by wrapper by module hook: save, load, and training goes on bit for bit, or a named error; nothing else.

A row is added by an entry in one of the tables. A hook changes what a module's `state_dict` gives, and undoes that in
front of its `load_state_dict`, as torchtitan's models do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import in_world, run_job
from optimizer_kinds import KINDS, Make, adamw, momentum
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

WIDTH = 8


class Layer(nn.Module):
    """Two weights to join, one to split, a table that follows from the code; all parameters are matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.w1 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wqkv(x + self.table).chunk(3, dim=-1)
        return x + self.w1(q * k).tanh() + self.w3(v)


def split(module: Layer) -> None:
    def after(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        fused = state.pop(f"{prefix}wqkv.weight")
        for index, name in enumerate("qkv"):
            state[f"{prefix}w{name}.weight"] = fused[index * WIDTH : (index + 1) * WIDTH]

    def before(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if f"{prefix}wq.weight" in state:
            parts = [state.pop(f"{prefix}w{name}.weight") for name in "qkv"]
            state[f"{prefix}wqkv.weight"] = torch.cat(parts)

    module.register_state_dict_post_hook(after)
    module.register_load_state_dict_pre_hook(before)


def join(module: Layer) -> None:
    def after(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}w13"] = torch.cat([state.pop(f"{prefix}w1.weight"), state.pop(f"{prefix}w3.weight")])

    def before(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if f"{prefix}w13" in state:
            joined = state.pop(f"{prefix}w13")
            state[f"{prefix}w1.weight"], state[f"{prefix}w3.weight"] = joined[:WIDTH], joined[WIDTH:]

    module.register_state_dict_post_hook(after)
    module.register_load_state_dict_pre_hook(before)


def rename(module: Layer) -> None:
    def after(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}first"] = state.pop(f"{prefix}w1.weight")

    def before(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if f"{prefix}first" in state:
            state[f"{prefix}w1.weight"] = state.pop(f"{prefix}first")

    module.register_state_dict_post_hook(after)
    module.register_load_state_dict_pre_hook(before)


def drop(module: Layer) -> None:
    def after(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        del state[f"{prefix}table"]

    def before(module: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state.setdefault(f"{prefix}table", module.table)

    module.register_state_dict_post_hook(after)
    module.register_load_state_dict_pre_hook(before)


def zero(params: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.05)


HOOKS: dict[str, Callable[[Layer], None]] = {
    "none": lambda _: None,
    "split": split,
    "join": join,
    "rename": rename,
    "drop": drop,
}
OPTIMIZERS: dict[str, Make] = {
    "adamw": adamw,
    "momentum": momentum,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "zero": zero,
    **{kind: KINDS[kind] for kind in ("forwarding", "silent", "own-groups", "lookahead", "adds-keys", "hooked")},
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda params: torch.optim.Muon(params, lr=0.05)


NOT_TRAINED = {("zero", "none"), ("zero", "fsdp"), ("adafactor", "fsdp")}
"""Pairs that torch itself has no step for: no group, or operations that DTensors lack."""


def plain(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"none": plain, "ddp": ddp, "fsdp": fsdp}


def make(optimizer: str, wrapper: str, hook: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        HOOKS[hook](layer)
    model = WRAPPERS[wrapper](model)
    return {"model": model, "optimizer": OPTIMIZERS[optimizer](model.parameters())}


def train(state: dict[str, Any], steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        state["model"](torch.randn(2, WIDTH)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def weights(state: dict[str, Any]) -> list[torch.Tensor]:
    params = [param.detach() for param in state["model"].parameters()]
    return [(param.to_local() if isinstance(param, DTensor) else param).clone() for param in params]


def rows(root: Path, optimizer: str, wrapper: str, hooks: list[str]) -> dict[str, str]:
    """What became of each hook's row: "resumed", or the name of the error. One save for all, unless that fails."""
    states = {hook: make(optimizer, wrapper, hook, 0) for hook in hooks}
    fresh = {hook: make(optimizer, wrapper, hook, 1) for hook in hooks}
    for state in states.values():
        train(state, range(2))
    try:
        handle = holdfast.async_save(states, root / "-".join(hooks))
        for state in states.values():
            train(state, range(2, 4))
        handle.result()
        holdfast.load(fresh, root / "-".join(hooks))
    except holdfast.HoldfastError as error:
        if len(hooks) == 1:
            return {hooks[0]: type(error).__name__}
        return {hook: how for each in hooks for hook, how in rows(root, optimizer, wrapper, [each]).items()}
    for hook in hooks:
        train(fresh[hook], range(2, 4))
        for one, other in zip(weights(states[hook]), weights(fresh[hook]), strict=True):
            assert torch.equal(one, other), f"{optimizer} x {wrapper} x {hook} went on otherwise"
    return dict.fromkeys(hooks, "resumed")


def whole_table(root: str, wrapper: str) -> None:
    ended = {
        optimizer: rows(Path(root) / optimizer, optimizer, wrapper, list(HOOKS))
        for optimizer in OPTIMIZERS
        if (optimizer, wrapper) not in NOT_TRAINED
    }
    assert {row["none"] for row in ended.values()} == {"resumed"}, ended
    if dist.is_initialized():
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, ended)
        assert all(each == ended for each in told), told


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_without_a_wrapper(tmp_path: Path) -> None:
    whole_table(str(tmp_path), "none")


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrapped(wrapper: str, tmp_path: Path) -> None:
    run_job(whole_table, nproc=2, args=[tmp_path, wrapper])


RESHARDED = ("forwarding", "silent", "own-groups", "lookahead", "adds-keys", "hooked")


def save_resharded(root: Path, wrapper: str) -> None:
    states = {kind: make(kind, wrapper, "none", 0) for kind in RESHARDED}
    for state in states.values():
        train(state, range(3))
    holdfast.save(states, root)


def load_resharded(stored: Path, root: Path, wrapper: str) -> None:
    """What is saved again is what was loaded, on any number of ranks; and it can be trained."""
    states = {kind: make(kind, wrapper, "none", 1) for kind in RESHARDED}
    holdfast.load(states, stored)
    holdfast.save(states, root)
    before, now = holdfast.open(stored), holdfast.open(root)
    assert before.tensors.keys() == now.tensors.keys()
    assert before.objects.keys() == now.objects.keys()
    for name in before.tensors:
        assert torch.equal(before.read(name), now.read(name)), name
    for name, value in before.objects.items():
        assert now.objects[name] == value, name
    for state in states.values():
        train(state, range(3, 4))


def other_worlds(tmp_path: str) -> None:
    root = Path(tmp_path)
    in_world(2, save_resharded, root / "two", "fsdp")
    in_world(3, load_resharded, root / "two", root / "two-three", "fsdp")
    in_world(1, load_resharded, root / "two", root / "two-one", "none")
    in_world(2, load_resharded, root / "two-one", root / "one-two", "fsdp")


def test_on_other_worlds(tmp_path: Path) -> None:
    run_job(other_worlds, nproc=3, args=[tmp_path])
