"""DTensors whose local parts are tensor subclasses: in modules, containers and optimizers, for any other sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import in_world, run_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

import holdfast

WHOLE = torch.arange(40, dtype=torch.float32).view(8, 5)


class Pair(torch.Tensor):
    """Two tensors of its own shape, of which the first is its value, and the shape as a part of its context."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], [self.first.shape, "context"]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Pair:
        assert context[0] == inner["first"].shape
        return cls(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.alias.default:
            return cls(args[0].first, args[0].second)
        if func is torch.ops.aten.view.default:
            second = args[0].second
            return cls(args[0].first.view(args[1]), second.view(args[1]) if second.dim() == 2 else second)
        plain = tree_map(lambda item: item.first if isinstance(item, Pair) else item, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Uneven(Pair):
    """Its second tensor is of another shape: nobody can tell how that is sharded."""


def pair(*, fill: bool, dim: int = 0, kind: type[Pair] = Pair) -> Any:
    """The whole, or this rank's part in a DTensor; ``first`` is the whole, ``second`` its double."""
    if not dist.is_initialized():
        return kind(*((WHOLE * n if fill else torch.zeros_like(WHOLE)) for n in (1, 2)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = WHOLE.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()
    first, second = (mine * n if fill else torch.zeros_like(mine) for n in (1, 2))
    local = kind(first, second if kind is Pair else torch.zeros(3))
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())


def state(*, fill: bool, dim: int = 0) -> dict[str, Any]:
    module = nn.Module()
    module.weight = nn.Parameter(pair(fill=fill, dim=dim), requires_grad=False)
    return {
        "model": module,
        "loose": {"value": pair(fill=fill, dim=dim)},
        "object": Remembers(pair(fill=fill, dim=dim)),
    }


class Remembers:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "list": [self.value]}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        assert given["list"][0] is self.value
        self.value = given["value"]


def assert_filled(value: Any, dim: int) -> None:
    expected = pair(fill=True, dim=dim)
    local, wanted = (one.to_local() if isinstance(one, DTensor) else one for one in (value, expected))
    assert isinstance(local, Pair)
    assert torch.equal(local.first, wanted.first)
    assert torch.equal(local.second, wanted.second)


def save(path: Path) -> None:
    checkpoint = holdfast.save(state(fill=True), path)
    assert list(checkpoint.tensors["model.weight.second"].shape) == [8, 5]
    assert {"model.weight.first", "loose.value.second", "object.list.0.first"} <= set(checkpoint.tensors)


def load(path: Path) -> None:
    for dim in (0, 1) if dist.is_initialized() and dist.get_world_size() == 2 else (0,):
        made = state(fill=False, dim=dim)
        holdfast.load(made, path)
        for value in (made["model"].weight, made["loose"]["value"], made["object"].value):
            assert_filled(value, dim)


def every_way(tmp_path: str) -> None:
    root = Path(tmp_path)
    in_world(2, save, root / "2")
    in_world(1, save, root / "1")
    for world in (1, 2, 4):
        in_world(world, load, root / "2")
        in_world(world, load, root / "1")
    in_world(2, refused, root / "uneven")


def refused(path: Path) -> None:
    with pytest.raises(holdfast.ConfigError, match=r"value\.second: an inner tensor of a sharded Uneven"):
        holdfast.save({"value": pair(fill=True, kind=Uneven)}, path)
    assert not path.exists()
    mesh = init_device_mesh("cpu", (2,))
    plain = DTensor.from_local(Pair(WHOLE, WHOLE * 2), mesh, [Replicate()], run_check=False)
    holdfast.save({"value": plain}, path)
    with pytest.raises(holdfast.StateMismatch, match="value"):
        holdfast.load({"value": torch.zeros(8, 5)}, path)


def test_inner_tensors_are_sharded_like_their_dtensor(tmp_path: Path) -> None:
    run_job(every_way, nproc=4, args=[tmp_path])
