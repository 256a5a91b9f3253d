"""`holdfast.sync.handover` with DTensors: each rank's part goes to the same rank of another replica of the mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from launch import run_job
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import mesh_of

from holdfast.sync.handover import HandoverServer, fetch_state


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=mesh_of(2, names=("shard",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_sharded_state_is_handed_over() -> None:
    model, optimizer = trained(seed=1)
    other, other_optimizer = trained(seed=2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    server = HandoverServer()
    server.offer(1, state, timeout_s=60)
    found: dict[str, Any] = fetch_state(server.address, 1, timeout_s=60)
    for name, tensor in state["model"].items():
        given = found["model"][name]
        assert given._spec == tensor._spec
        assert torch.equal(given.to_local(), tensor.to_local())
        assert torch.equal(given.full_tensor(), tensor.full_tensor())  # over the groups of this process
    other.load_state_dict(found["model"])
    other_optimizer.load_state_dict(found["optimizer"])
    own = {"model": trained(seed=3)[0].state_dict()}
    placed = fetch_state(server.address, 1, timeout_s=60, own=own)
    for name, tensor in own["model"].items():
        assert placed["model"][name] is tensor
        assert torch.equal(tensor.to_local(), state["model"][name].to_local())
    for each, its in ((model, optimizer), (other, other_optimizer)):
        step(each, its)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
    for ours, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert torch.equal(ours["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor())
    server.close()


def check_placements() -> None:
    whole = torch.arange(40.0).reshape(5, 8)
    for mesh, placements in (
        (mesh_of(2), [Shard(1)]),
        (mesh_of(2), [Replicate()]),
        (mesh_of(1, 2), [Shard(0), Shard(0)]),
        (mesh_of(2, 1), [Replicate(), Shard(1)]),
    ):
        tensor = distribute_tensor(whole, mesh, placements)
        server = HandoverServer()
        server.offer(1, [tensor, nn.Parameter(tensor)], timeout_s=60)
        found, parameter = fetch_state(server.address, 1, timeout_s=60)
        assert found._spec == tensor._spec
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert torch.equal(found.full_tensor(), whole)
        elsewhere = distribute_tensor(torch.zeros(5, 8), mesh, [Replicate()] * mesh.ndim)
        (kept, _) = fetch_state(server.address, 1, timeout_s=60, own=[elsewhere, None])
        assert (kept is elsewhere) == (placements == [Replicate()])  # in place only if it is cut alike
        server.close()
    assert dist.get_world_size() == 2


def test_sharded_state_is_handed_over() -> None:
    run_job(check_sharded_state_is_handed_over, nproc=2)


def test_placements_come_back() -> None:
    run_job(check_placements, nproc=2)
