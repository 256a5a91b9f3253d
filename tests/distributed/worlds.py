"""States for round trips: one small model under every kind of parallelism, with values that any rank can foretell.

Every value follows from its name and place in the *global* tensor, so a rank checks what it has loaded by building
what it should have, sharded by the same torch code, and comparing bits. Nothing is gathered, and nothing of
Holdfast's own arithmetic is asked what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from launch import at_world_end
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROWS = 7


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.up = nn.Linear(8, 16, dtype=dtype)
        self.down = nn.Linear(16, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x.to(self.norm.weight.dtype))).relu())


class Net(nn.Module):
    """Uneven rows (7), fewer elements than ranks (3, and one row), a bf16 block, buffers, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 8)
        self.blocks = nn.ModuleList([Block(torch.float32), Block(torch.bfloat16)])
        self.few = nn.Parameter(torch.zeros(3))
        self.row = nn.Parameter(torch.zeros(1, 8))
        self.head = nn.Linear(8, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.float() * self.row + self.few.sum())


def value_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole value of ``name``."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def fill(module: nn.Module, tag: str) -> None:
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            tensor.copy_(value_of(f"{tag}.{name}", tuple(tensor.shape), tensor.dtype))


# parallelism -----------------------------------------------------------------------------------------------------


def fsdp(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh if mesh is not None else mesh_of(dist.get_world_size())
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp(model, mesh_of(2, dist.get_world_size() // 2, names=("replicate", "shard")))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Rows of ``up`` and columns of ``down`` are divided: tensor parallel over dimension 0 and dimension 1."""
    mesh = mesh if mesh is not None else mesh_of(dist.get_world_size())
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fsdp_tp(model: nn.Module) -> nn.Module:
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"])


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def single(model: nn.Module) -> nn.Module:
    return model


Parallelize = Callable[[nn.Module], nn.Module]
_meshes: dict[Any, DeviceMesh] = {}
at_world_end.append(_meshes.clear)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Meshes make process groups: one of a kind is enough."""
    if (shape, names) not in _meshes:
        _meshes[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape, names]


# states ----------------------------------------------------------------------------------------------------------


def make_model(how: Parallelize, tag: str, build: Callable[[], nn.Module] = Net) -> nn.Module:
    model = build()
    fill(model, tag)
    return how(model)


def make_state(
    how: Parallelize, tag: str, *, fresh: bool = False, build: Callable[[], nn.Module] = Net
) -> dict[str, Any]:
    """A whole state whose values all follow from ``tag``; with ``fresh`` the optimizer has no state yet."""
    model = make_model(how, tag, build)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    lr = number_of(tag, "lr")
    groups = [{"params": decayed, "weight_decay": number_of(tag, "decay")}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    scheduler.last_epoch = int(number_of(tag, "epoch") * 100)
    if not fresh:
        for name, param in model.named_parameters():
            optimizer.state[param] = {
                "step": torch.tensor(float(crc32(f"{tag}.{name.removeprefix('module.')}".encode()) % 1000)),
                # Element by element, so that every layout of the parameter gives the same moments.
                "exp_avg": param.detach() * -0.75,
                "exp_avg_sq": param.detach() * param.detach(),
            }
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "train": {"step": crc32(tag.encode()) % 1000, "name": tag, "seen": (1, 2.5, None, tag.encode())},
        "extra": loose_tensors(tag),
    }


def scribble(state: dict[str, Any]) -> None:
    """Overwrite everything in ``state`` that loading should bring back."""
    for name, value in inside(state).items():
        if isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            local.detach().fill_(77)
        else:
            assert name
    for group in state["optimizer"].param_groups:
        group.update(lr=7.0, initial_lr=7.0, weight_decay=7.0)
    if "lr_scheduler" in state:
        state["lr_scheduler"].last_epoch = 77
    state["train"].update(step=-1, name="scribbled", seen=None)


def number_of(tag: str, name: str) -> float:
    return (crc32(f"{tag}.{name}".encode()) % 97 + 1) / 100


def loose_tensors(tag: str) -> dict[str, torch.Tensor]:
    """DTensors of uneven and odd placements over all ranks, outside any module, and plain tensors."""
    shapes = {"rows": (7, 5), "columns": (5, 7), "copies": (3,), "few": (2, 9), "none": (0, 4), "scalar": ()}
    whole = {name: value_of(f"{tag}.{name}", shape, torch.float32) for name, shape in shapes.items()}
    plain = {"plain": value_of(f"{tag}.plain", (6,), torch.int32), "zero": whole["scalar"]}
    if not dist.is_initialized():
        return {**whole, **plain}
    mesh = mesh_of(dist.get_world_size())
    placements = {name: Shard(1) if name == "columns" else Shard(0) for name in ("rows", "columns", "few", "none")}
    placed = {
        name: distribute_tensor(value, mesh, [placements.get(name, Replicate())], src_data_rank=None)
        for name, value in whole.items()
    }
    return {**placed, **plain}


def stock_form(state: dict[str, Any]) -> dict[str, Any]:
    """The nested dictionary that a user of stock DCP would save or load this state as."""
    model, optimizer = state["model"], state["optimizer"]
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "train": dict(state["train"]),
        "extra": state["extra"],
    }


# comparing -------------------------------------------------------------------------------------------------------


def local_bits(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8) if local.numel() else torch.empty(0)


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, (dict, torch.Tensor)) for item in value):
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{path}.{index}")
    else:
        yield path, value


def inside(state: dict[str, Any]) -> dict[str, Any]:
    """All that a state holds, by names of its own that don't depend on how it is wrapped."""
    found: dict[str, Any] = {}
    model, optimizer = state["model"], state["optimizer"]
    names = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        name = name.removeprefix("module.")
        found[f"parameter {name}"] = tensor
        names.setdefault(id(tensor), name)
    found.update((f"buffer {name}", tensor) for name, tensor in model.named_buffers() if "scratch" not in name)
    for param, values in optimizer.state.items():
        found.update((f"state {names[id(param)]} {key}", value) for key, value in values.items())
    for index, group in enumerate(optimizer.param_groups):
        found.update((f"group {index} {key}", value) for key, value in group.items() if key != "params")
    found.update(leaves_of({key: state[key] for key in state if key in ("train", "extra")}))
    if "lr_scheduler" in state:
        found.update(leaves_of(state["lr_scheduler"].state_dict(), "lr_scheduler"))
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert list(found) == list(expected) or set(found) == set(expected), (
        f"{what}: {sorted(set(found) ^ set(expected))[:8]} on one side only"
    )
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, f"{what}: {name} has dtype {found[name].dtype}, not {value.dtype}"
            same = torch.equal(local_bits(found[name]), local_bits(value))
            assert same, f"{what}: {name} has {found[name]}, expected {value}"
        else:
            assert found[name] == value, f"{what}: {name} is {found[name]!r}, expected {value!r}"
