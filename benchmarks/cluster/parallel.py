"""FSDP2, HSDP and expert parallelism for the recipes, and values for the shards; no rank ever holds the whole model.

The ranks are a grid (replicas, shards, experts). Dense parameters are divided by FSDP2 over shards × experts. Experts'
fused weights (``mlp.experts.gate_up_proj``: expert, row, column) are divided over the experts axis by expert, and by
FSDP2 over the shards axis by row: DTensors of two dimensions. Replicas (HSDP) hold the same.

Tokens find their experts by gathering the hidden states of an expert group and adding up what each rank's experts
make of them (all-gather, reduce-scatter). With 8 of 128 experts a token, over 8 ranks, a token goes to five of them on
average anyway; shapes are the same every step, and so is the order of sums. Every rank of a group has as many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.cluster.shards import fill
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

# torch 2.13 has renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks are used: ``replicas`` copies of the model, its experts divided among groups of ``experts`` ranks."""

    world: int
    replicas: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.replicas * self.experts):
            raise SystemExit(f"{self.world} ranks can't be {self.replicas} replicas of groups of {self.experts} ranks")

    @property
    def shards(self) -> int:
        return self.world // (self.replicas * self.experts)


def shard(model: nn.Module, layout: Layout, device: torch.device, compute: torch.dtype | None) -> None:
    """Divide a model on the meta device. ``compute``: what forward and backward use, if not the parameters' dtype."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    copies = layout.replicas > 1
    grid = init_device_mesh(
        device.type,
        (layout.replicas, layout.shards, layout.experts),
        mesh_dim_names=("replicas", "shards", "experts"),
    )
    dense = init_device_mesh(
        device.type,
        (layout.replicas, layout.world // layout.replicas) if copies else (layout.world,),
        mesh_dim_names=("replicas", "all") if copies else ("all",),
    )
    beside = grid["replicas", "shards"] if copies else grid["shards"]
    layers: nn.ModuleList = model.model.layers  # type: ignore[union-attr,assignment]
    for layer in layers:
        for experts in experts_in(layer):
            divide_experts(experts, grid["experts"])
            fully_shard(experts, mesh=beside, mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
        fully_shard(layer, mesh=dense, mp_policy=policy)
    fully_shard(model, mesh=dense, mp_policy=policy)


def experts_in(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if hasattr(module, "gate_up_proj")]


def is_expert(name: str) -> bool:
    """Whether a parameter of this name is divided by expert."""
    return ".mlp.experts." in name


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give this rank's shards memory, and what is no part of a state its values."""
    model.to_empty(device=device)
    # Frequencies are computed where a model is constructed: here, in memory.
    rotary: nn.Module = model.model.rotary_emb  # type: ignore[union-attr,assignment]
    for name, value in type(rotary)(model.config).named_buffers():
        rotary.get_buffer(name).copy_(value)


def initialise(model: nn.Module, seed: int) -> None:
    """Give every shard its values, which follow from the seed and each element's place in the whole."""
    std = model.config.initializer_range  # type: ignore[union-attr]
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                fill(param, name, seed, std)
            else:
                param.fill_(1.0 if name.endswith("norm.weight") else 0.0)


# experts ---------------------------------------------------------------------------------------------------------


def divide_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each weight by a DTensor of some of the experts, and the forward by one that sends tokens to them."""
    for name, param in list(experts.named_parameters(recurse=False)):
        if param.shape[0] % mesh.size():
            raise SystemExit(f"{param.shape[0]} experts can't be divided among {mesh.size()} ranks")
        divided = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(divided))
    experts.forward = partial(_forward, experts, mesh)  # type: ignore[method-assign]


def _forward(
    experts: Any, mesh: DeviceMesh, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    group = mesh.get_group()
    gate_up, down = experts.gate_up_proj.to_local(), experts.down_proj.to_local()
    if mesh.size() == 1:
        return _apply(experts.act_fn, gate_up, down, hidden, index, weights)
    # Their gradients are sums over the tokens of the whole group; FSDP2 averages over what it divides among, no more.
    gate_up, down = _Divided.apply(gate_up, mesh.size()), _Divided.apply(down, mesh.size())
    count = gate_up.shape[0]
    everywhere = _Gather.apply(hidden, group)
    all_weights = _Gather.apply(weights, group)
    mine = _gathered(index, group) - mesh.get_local_rank() * count
    return _AddUp.apply(_apply(experts.act_fn, gate_up, down, everywhere, mine, all_weights), group)  # type: ignore[no-any-return]


def _apply(
    act: Any,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """What these experts add to each token. ``index``: experts of each token, those outside ``range`` are elsewhere."""
    out = torch.zeros_like(hidden)
    for number in range(gate_up.shape[0]):
        # Every expert is used every step, if for no token at all: each rank must take part in the same gradients.
        tokens, choice = torch.where(index == number)
        gate, up = nn.functional.linear(hidden[tokens], gate_up[number]).chunk(2, dim=-1)
        made = nn.functional.linear(act(gate) * up, down[number]) * weights[tokens, choice, None]
        out = out.index_add(0, tokens, made.to(out.dtype))
    return out


def _gathered(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = local.new_empty(local.shape[0] * group.size(), *local.shape[1:])
    all_gather(out, local.contiguous(), group=group)
    return out


def _added_up(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    reduce_scatter(out, whole.contiguous(), group=group)
    return out


class _Divided(torch.autograd.Function):
    """The same value; its gradient divided by ``number``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] / ctx.number, None


class _Gather(torch.autograd.Function):
    """The rows of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(local, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _added_up(grads[0], ctx.group), None


class _AddUp(torch.autograd.Function):
    """This rank's rows of the sum over a group."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _added_up(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gathered(grads[0], ctx.group), None
