"""States of several ranks: real gloo groups, all checks of a world in one job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _stored import Stored

from holdfast.errors import ConfigError
from holdfast.format.structure import Placement, Structure, decode_structure, digest_of, encode_structure
from holdfast.plan.write import plan_save
from holdfast.state.entries import local_tensor
from holdfast.state.structure import structure_of
from holdfast.state.tree import StateTree


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def sharded(seed: int = 0, mesh: Any = None) -> Net:
    torch.manual_seed(seed)
    model = Net()
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tree_of(state: dict[str, Any]) -> StateTree:
    return StateTree(state, rank=dist.get_rank(), world=dist.get_world_size())


def structure(tree: StateTree) -> Structure:
    collected = tree.collect()
    return structure_of(collected, {entry.name: 512 for entry in collected.objects})


def assert_equal_on_all_ranks(found: Structure) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, encode_structure(found))
    assert len(set(everyone)) == 1


def placements_of(found: Structure, name: str) -> tuple[Placement, ...]:
    spec = next(spec for spec in found.tensors if spec.name == name)
    assert spec.layout is not None
    return found.layouts[spec.layout].placements


# checks for two ranks --------------------------------------------------------------------------------------------


def fsdp2_names_and_structure() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    tree = tree_of({"model": model, "optimizer": optimizer})
    found = structure(tree)
    names = {spec.name for spec in (*found.tensors, *found.objects)}
    stock = get_state_dict(model, optimizer)
    assert names == set(flatten_state_dict(dict(zip(("model", "optimizer"), stock, strict=True)))[0])
    assert_equal_on_all_ranks(found)
    assert len(found.layouts) == 1
    assert placements_of(found, "optimizer.state.head.weight.exp_avg") == (Placement("shard", 0),)
    assert next(spec for spec in found.tensors if spec.name == "model.head.weight").shape == (5, 6)
    assert tree.collect().unchanged


def fsdp2_left_gathered_is_sharded_again() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    tree = tree_of({"model": model, "optimizer": optimizer})
    before = tree.collect()
    with torch.no_grad():
        model(torch.randn(1, 6))
    assert not isinstance(model.head.weight, DTensor), "the root should be left gathered: this test has lost its point"
    after = tree.collect()
    assert after.unchanged
    assert all(isinstance(entry.tensor, DTensor) for entry in after.tensors if entry.name.startswith("model."))
    assert all(a.tensor is b.tensor for a, b in zip(after.tensors, before.tensors, strict=True))
    with torch.no_grad():
        model(torch.randn(1, 6))
    fresh = tree_of({"model": model, "optimizer": optimizer}).collect()
    assert all(isinstance(entry.tensor, DTensor) for entry in fresh.tensors if entry.name.startswith("model."))
    names = next(entry.value for entry in fresh.objects if entry.name.endswith(".params"))
    assert names[0] == "layers.0.up.weight"
    train(model, optimizer)


def collecting_between_forward_and_backward_changes_no_gradient() -> None:
    gradients = []
    for collect in (False, True):
        model = sharded()
        tree = tree_of({"model": model})
        tree.collect()
        torch.manual_seed(3)
        loss = model(torch.randn(3, 6)).square().sum()
        if collect:
            tree.collect()
        loss.backward()
        gradients.append([local_tensor(param.grad) for param in model.parameters() if param.grad is not None])
    assert len(gradients[0]) == 10
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def fsdp2_collecting_inside_a_forward_is_refused() -> None:
    model = sharded()
    tree = tree_of({"model": model})
    caught: list[BaseException] = []

    def collect(*_: Any) -> None:
        try:
            tree.collect()
        except ConfigError as error:
            caught.append(error)

    model.head.register_forward_hook(collect)
    model(torch.randn(1, 6))
    assert len(caught) == 1
    assert "inside a forward" in str(caught[0])


def optimizer_state_is_made_like_its_parameters() -> None:
    for make in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, momentum=0.9)):
        model = sharded()
        optimizer = make(model.parameters())
        train(model, optimizer)
        stored = Stored().save(tree_of({"model": model, "optimizer": optimizer}))
        # This rank's shards stand in for a file: the global shapes are those of the DTensors.
        for entry in tree_of({"model": model, "optimizer": optimizer}).collect().tensors:
            stored.tensors[entry.name] = entry.tensor.detach().clone()
        other = sharded(1)
        fresh = make(other.parameters())
        loading = stored.plan(tree_of({"model": other, "optimizer": fresh}))
        assert (loading.missing, loading.unexpected, loading.mismatched) == ((), (), ())
        assert not fresh.state
        with torch.no_grad():
            for destination in loading.tensors:
                destination.tensor.copy_(stored.tensors[destination.name])
        loading.finish({name: stored.objects[name] for name in loading.objects})
        for param, mine in zip(model.parameters(), other.parameters(), strict=True):
            for key, value in optimizer.state[param].items():
                assert type(fresh.state[mine][key]) is type(value), key
                if isinstance(value, DTensor) and value.shape == param.shape:
                    assert fresh.state[mine][key].placements == value.placements
        for each, its in ((model, optimizer), (other, fresh)):
            torch.manual_seed(5)
            train(each, its)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_tensor(a), local_tensor(b))


def optimizer_state_of_other_shapes_is_sharded_where_sizes_agree() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters())
    stored = Stored().save(tree_of({"model": model, "optimizer": optimizer}))
    for entry in tree_of({"model": model}).collect().tensors:
        stored.tensors[entry.name] = entry.tensor.detach()
    shapes = {"row": (5, 1), "column": (1, 6), "other": (3,), "step": ()}
    for key, shape in shapes.items():
        stored.tensors[f"optimizer.state.head.weight.{key}"] = torch.ones(shape)
    loading = stored.plan(tree_of({"model": model, "optimizer": optimizer}))
    assert (loading.missing, loading.unexpected, loading.mismatched) == ((), (), ())
    loading.finish({name: stored.objects[name] for name in loading.objects})
    state = optimizer.state[model.head.weight]
    assert state["row"].placements == (Shard(0),)
    assert state["column"].placements == (Replicate(),)
    assert state["other"].placements == (Replicate(),)
    assert not isinstance(state["step"], DTensor)
    assert {key: tuple(value.shape) for key, value in state.items()} == shapes


def placements_of_every_kind() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(20.0).reshape(4, 5)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(-1)]),
        "copies": distribute_tensor(whole, mesh, [Replicate()]),
    }
    found = structure(tree_of(state))
    assert placements_of(found, "rows") == (Placement("shard", 0),)
    assert placements_of(found, "columns") == (Placement("shard", 1),)
    assert placements_of(found, "copies") == (Placement("replicate"),)
    assert_equal_on_all_ranks(found)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    with pytest.raises(ConfigError, match=r"p: .*redistribute"):
        tree_of({"p": partial}).collect()


def two_pipeline_stages() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = Net()
    stage = nn.Module()
    stage.add_module("layers", nn.ModuleDict({str(rank): whole.layers[rank]}))
    optimizer = torch.optim.AdamW(stage.parameters())
    for param in stage.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = {"model": [stage], "optimizer": [optimizer]}
    stored = Stored().save(tree_of(state))
    assert f"optimizer.state.layers.{rank}.up.weight.exp_avg" in stored.names
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (stored.tensors, stored.objects, stored.paths))
    merged = Stored()
    for tensors, objects, paths in reversed(everyone):
        merged.tensors.update(tensors)
        merged.objects.update(objects)
        merged.paths.update(paths)
    optimizer.param_groups[0]["lr"] = 7.0
    loading = merged.load(tree_of(state))
    assert (loading.missing, loading.mismatched) == ((), ())
    assert loading.unexpected
    assert all(f".{1 - rank}." in name for name in loading.unexpected), "only the other stage's"
    assert optimizer.param_groups[0]["lr"] == 0.001
    whole_optimizer = torch.optim.AdamW(whole.layers.parameters())
    assert not merged.plan(
        tree_of({"model": nn.ModuleDict({"layers": whole.layers}), "optimizer": whole_optimizer})
    ).missing


def ranks_are_those_of_the_group() -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"x": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
    collected = StateTree(state, rank=0, world=2, group_ranks=[1, 7]).collect()
    assert structure_of(collected, {}).layouts[0].ranks == (-1, 0)


# checks for four ranks -------------------------------------------------------------------------------------------


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    found = structure(tree_of({"model": model, "optimizer": optimizer}))
    assert placements_of(found, "model.head.weight") == (Placement("replicate"), Placement("shard", 0))
    assert_equal_on_all_ranks(found)


def fsdp_with_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    for block in model.layers:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    tree = tree_of({"model": model, "optimizer": optimizer})
    found = structure(tree)
    assert placements_of(found, "model.layers.0.up.weight") == (Placement("strided", 0, 2), Placement("shard", 0))
    assert placements_of(found, "model.layers.0.down.weight") == (Placement("shard", 0), Placement("shard", 1))
    # The head knows only its own column of the mesh: two structures, one value.
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, encode_structure(found))
    by_digest = {digest_of(encoded): decode_structure(encoded) for encoded in everyone}
    assert len(by_digest) == 2
    plan = plan_save(by_digest, [digest_of(encoded) for encoded in everyone])
    planned = [tensor for rank in plan.ranks for tensor in rank.tensors if tensor.name == "model.head.weight"]
    assert sum(tensor.nbytes for tensor in planned) == 5 * 6 * 4
    with torch.no_grad():
        model(torch.randn(1, 6))
    assert tree.collect().unchanged


TWO: list[Callable[[], None]] = [
    fsdp2_names_and_structure,
    fsdp2_left_gathered_is_sharded_again,
    collecting_between_forward_and_backward_changes_no_gradient,
    fsdp2_collecting_inside_a_forward_is_refused,
    optimizer_state_is_made_like_its_parameters,
    optimizer_state_of_other_shapes_is_sharded_where_sizes_agree,
    placements_of_every_kind,
    two_pipeline_stages,
    ranks_are_those_of_the_group,
]
FOUR: list[Callable[[], None]] = [hsdp, fsdp_with_tensor_parallel]


def run(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        try:
            check()
        except BaseException as error:
            raise AssertionError(f"{check.__name__} failed on rank {dist.get_rank()}") from error
        dist.barrier()


def on_two() -> None:
    run(TWO)


def on_four() -> None:
    run(FOUR)


@pytest.mark.parametrize(("job", "nproc"), [(on_two, 2), (on_four, 4)])
def test_on_ranks(job: Callable[[], None], nproc: int) -> None:
    run_job(job, nproc=nproc)
