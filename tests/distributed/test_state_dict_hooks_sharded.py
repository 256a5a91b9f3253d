"""Sharded models whose state-dict hooks split fused weights: saved, resharded, resumed, exported.

The hooks work as those of torchtitan's models do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import in_world, run_job
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import holdfast
from holdfast.errors import ConfigError

DIM, HEADS, KV, HEAD = 12, 6, 3, 4


class FusedQKV(nn.Module):
    """One matrix, ordered by groups of heads; saved as three, for which the hook gathers it."""

    def __init__(self) -> None:
        super().__init__()
        self.per_group = HEADS // KV
        self.wqkv = nn.Linear(DIM, (HEADS + 2 * KV) * HEAD, bias=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        whole = state.pop(prefix + "wqkv.weight")
        if isinstance(whole, DTensor):
            whole = whole.redistribute(placements=[Replicate()] * whole.device_mesh.ndim)
        groups = whole.reshape(KV, module.per_group + 2, HEAD, DIM)
        state[prefix + "wq.weight"] = groups[:, : module.per_group].reshape(-1, DIM).contiguous()
        state[prefix + "wk.weight"] = groups[:, module.per_group].reshape(-1, DIM).contiguous()
        state[prefix + "wv.weight"] = groups[:, module.per_group + 1].reshape(-1, DIM).contiguous()

    @staticmethod
    def _join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        parts = [state.pop(f"{prefix}{name}.weight") for name in ("wq", "wk", "wv")]
        if isinstance(parts[0], DTensor):
            mesh = parts[0].device_mesh
            parts = [part.redistribute(placements=[Replicate()] * mesh.ndim) for part in parts]
        q, k, v = (part.reshape(KV, -1, HEAD, DIM) for part in parts)
        state[prefix + "wqkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wqkv(x)


class FusedUp(nn.Module):
    """Gate and up side by side in a dimension that nothing is sharded in: split without talking to anyone."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(10, 2, (HEADS + 2 * KV) * HEAD) / 8)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        whole = state.pop(prefix + "w13")
        state[prefix + "w1.weight"], state[prefix + "w3.weight"] = whole[:, 0].contiguous(), whole[:, 1].contiguous()

    @staticmethod
    def _join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "w13"] = torch.stack([state.pop(f"{prefix}{name}.weight") for name in ("w1", "w3")], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("...d,hgd->...hg", x, self.w13).unbind(-1)
        return gate.sigmoid() * up


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, DIM)
        self.layers = nn.ModuleList(nn.ModuleDict({"a": FusedQKV(), "f": FusedUp()}) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(10, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer, down in zip(self.layers, self.down, strict=True):
            x = x + down(layer["f"](layer["a"](x)))
        return x


NAMES = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in ("a.wq", "a.wk", "a.wv", "f.w1", "f.w3")}


def made(seed: int, how: str) -> Net:
    torch.manual_seed(seed)
    model = Net()
    world = dist.get_world_size()
    if how == "tp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        for layer in model.layers:
            parallelize_module(layer["a"], mesh, {"wqkv": ColwiseParallel(output_layouts=Replicate())})
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer["f"], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(100 + step)
    optimizer.zero_grad()
    model(torch.randn(3, 5)).square().mean().backward()
    optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for (name, one), (_, other) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(whole(one), whole(other)), name


def saved(path: str, how: str, staging: str) -> None:
    """Lazily saved while training goes on, on two ranks."""
    model = made(1, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer}
    config = holdfast.CheckpointConfig(every=1, staging=staging)  # type: ignore[arg-type]
    exports = [holdfast.HFExport(f"{path}/hf", every=2)]
    with holdfast.CheckpointManager(f"{path}/run", state, config=config, exports=exports) as manager:
        for step in range(1, 4):
            train(model, optimizer, step)
            if step == 2:
                expected = {name: whole(value).clone() for name, value in model.state_dict().items()}
            manager.step(step)
        train(model, optimizer, 4)
    checkpoint = holdfast.open(f"{path}/run/step-2")
    stored = {name.removeprefix("model.") for name in checkpoint.tensors if name.startswith("model.")}
    assert stored == expected.keys() >= NAMES
    for name, value in expected.items():
        assert torch.equal(checkpoint.read(f"model.{name}"), value), name
    exported = load_file(f"{path}/hf/hf-2/model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())

    resumed = made(2, how)
    others = torch.optim.AdamW(resumed.parameters(), lr=0.05)
    with holdfast.CheckpointManager(f"{path}/run", {"model": resumed, "optimizer": others}, config=config) as manager:
        assert manager.restore(2) == 2
    train(resumed, others, 3)
    train(resumed, others, 4)
    assert_same(model, resumed)

    from_export = made(3, how)
    holdfast.load({"model": from_export}, f"{path}/hf/hf-2")
    for name, value in from_export.state_dict().items():
        assert torch.equal(whole(value), expected[name]), name


def stock_both_ways(path: str) -> None:
    """Directories as torchtitan writes them: the model without a key, sharded by its ranks."""
    model, other, third = (made(seed, "fsdp") for seed in (1, 2, 3))
    dcp.save(dict(model.state_dict()), checkpoint_id=f"{path}/stock")
    holdfast.load({"model": other}, f"{path}/stock")
    assert_same(model, other)
    holdfast.save({"model": model}, f"{path}/ours")
    state = {"model": third.state_dict()}
    dcp.load(state, checkpoint_id=f"{path}/ours")
    third.load_state_dict(state["model"])
    assert_same(model, third)


def a_sum_that_is_not_taken_is_named(path: str) -> None:
    model = made(1, "fsdp")

    def odd(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        mesh = next(value for value in state.values() if isinstance(value, DTensor)).device_mesh
        state[prefix + "odd"] = DTensor.from_local(torch.ones(2), mesh, [Partial()])

    model.register_state_dict_post_hook(odd)
    with pytest.raises(ConfigError, match=r"model\.odd: .* sum"):
        holdfast.save({"model": model}, f"{path}/odd")


def a_hook_that_raises_on_one_rank_fails_all(path: str) -> None:
    model = made(1, "none")

    def breaks(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise KeyError("only here")

    model.register_state_dict_post_hook(breaks)
    with pytest.raises(holdfast.HoldfastError, match="only here"):
        holdfast.save({"model": model}, f"{path}/raises", timeout=30)
    assert not Path(f"{path}/raises").exists()


def two(path: str) -> None:
    for how, staging in (("fsdp", "lazy"), ("tp", "eager")):
        saved(f"{path}/{how}", how, staging)
    stock_both_ways(path)
    a_sum_that_is_not_taken_is_named(path)
    a_hook_that_raises_on_one_rank_fails_all(path)


def resharded(path: str) -> None:
    """What two ranks saved, on four, and on tensor-parallel ones what FSDP2 saved."""
    expected = holdfast.open(f"{path}/fsdp/run/step-2")
    for how in ("fsdp", "tp", "none"):
        model = made(4, how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        holdfast.load({"model": model, "optimizer": optimizer}, f"{path}/fsdp/run/step-2")
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), expected.read(f"model.{name}")), name
        moment = optimizer.state[model.layers[0]["a"].wqkv.weight]["exp_avg"]
        assert torch.equal(whole(moment), expected.read("optimizer.state.layers.0.a.wqkv.weight.exp_avg"))


def job(path: str) -> None:
    in_world(2, two, path)
    in_world(4, resharded, path)


def test_fused_weights_that_are_sharded(tmp_path: Path) -> None:
    run_job(job, nproc=4, args=[tmp_path])
