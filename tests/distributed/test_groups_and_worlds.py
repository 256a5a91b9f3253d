"""Groups that save side by side, and what is each rank's own when the number of ranks changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import in_world, run_job
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import Net, assert_same, fill, mesh_of

import holdfast
from holdfast.errors import ConfigError, StateMismatch

TIMEOUT_S = 40.0
HERE = holdfast.CheckpointConfig(stage_timeout=TIMEOUT_S, persist_timeout=TIMEOUT_S, commit_timeout=TIMEOUT_S)


# two groups of two -----------------------------------------------------------------------------------------------


def two_groups_save_to_two_roots_at_once(root: Path) -> None:
    """Two experiments in one job: each group of ranks has a model, a root and a rhythm of its own."""
    mesh = mesh_of(2, 2, names=("run", "shard"))
    run, group = mesh["run"].get_local_rank(), mesh["shard"].get_group()
    place = root / f"run-{run}"
    model = sharded(mesh["shard"], f"run {run}")
    state = {"model": model, "own": holdfast.PerRank({"global": dist.get_rank()})}
    with holdfast.CheckpointManager(place, state, config=HERE, process_group=group) as manager:
        for step in range(1, 3 + run):
            manager.save(step)
        manager.wait()
        assert manager.steps() == list(range(1, 3 + run))
    checkpoint = holdfast.save(state, root / f"call-{run}", process_group=group, timeout=TIMEOUT_S)
    manifest = checkpoint.manifest
    assert manifest is not None
    assert manifest.world == 2
    assert sorted(checkpoint.objects) == ["own.rank-00000.global", "own.rank-00001.global"]
    expected = {name: param.full_tensor() for name, param in model.named_parameters()}
    assert_same({name: checkpoint.read(f"model.{name}") for name in expected}, expected, f"run {run}")
    other = {"model": sharded(mesh["shard"], "other"), "own": holdfast.PerRank({"global": -1})}
    with holdfast.CheckpointManager(place, other, config=HERE, process_group=group) as manager:
        assert manager.restore() == 2 + run
    assert_same(dict(other["model"].named_parameters()), dict(model.named_parameters()), f"run {run}, restored")
    assert other["own"].value == {"global": dist.get_rank()}


def sharded(mesh: Any, tag: str) -> torch.nn.Module:
    model = Net()
    fill(model, tag)
    return fully_shard(model, mesh=mesh)


def what_a_group_does_not_hold_is_refused(root: Path) -> None:
    mesh = mesh_of(2, 2, names=("run", "shard"))
    group = mesh["shard"].get_group()
    whole = distribute_tensor(torch.zeros(8), mesh_of(4), [Shard(0)], src_data_rank=None)
    with pytest.raises(holdfast.HoldfastError, match="process_group"):
        holdfast.save({"w": whole}, root / f"part-{mesh['run'].get_local_rank()}", process_group=group)
    foreign = dist.new_group([0, 1])
    if dist.get_rank() >= 2:
        with pytest.raises(ConfigError):
            holdfast.save({"w": torch.zeros(1)}, root / "foreign", process_group=foreign)
    dist.barrier()


# other worlds ----------------------------------------------------------------------------------------------------


class Loader:
    """A dataloader by its name. It can't be divided anew."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class ReshardingLoader(Loader):
    """This one can."""

    def reshard_state_dict(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        return {"position": sum(state["position"] for state in states) * 1000 + rank * 10 + world}


def own_state(value: int) -> dict[str, Any]:
    return {
        "w": distribute_tensor(torch.full((6, 2), float(value)), mesh_of(dist.get_world_size()), [Shard(0)]),
        "rng": holdfast.RNG(),
        "dataloader": Loader(value),
        "resharding_dataloader": ReshardingLoader(value),
        "own": holdfast.PerRank(value),
        "seeds": holdfast.PerRank({"tensor": torch.full((3,), value)}),
    }


def draw() -> list[Any]:
    return [random.random(), float(np.random.random()), torch.rand(2).tolist()]


def four_save_what_is_their_own(root: Path) -> None:
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    state = own_state(rank + 1)
    state["w"] = distribute_tensor(torch.full((6, 2), 5.0), mesh_of(4), [Shard(0)])
    holdfast.save(state, root / "own", timeout=TIMEOUT_S)
    drawn = draw()
    assert len({str(everyone) for everyone in gathered(drawn)}) == 4
    again = own_state(0)
    holdfast.load(again, root / "own", timeout=TIMEOUT_S)
    assert draw() == drawn, "the same world goes on where it was"
    assert again["dataloader"].position == rank + 1
    assert again["resharding_dataloader"].position == rank + 1
    assert again["own"].value == rank + 1
    assert again["seeds"].value["tensor"].tolist() == [rank + 1] * 3


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def others_load_what_was_each_ranks_own(root: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    state = own_state(0)
    before = draw()
    for key in ("dataloader", "own", "seeds"):
        one = {"w": state["w"], key: state[key]}
        with pytest.raises(StateMismatch, match=rf"{key}.*saved by 4 ranks.*run of {world}") as caught:
            holdfast.load(one, root / "own", timeout=TIMEOUT_S)
        assert caught.value.mismatched
        assert all(name.startswith(key) for name in caught.value.mismatched)
        assert not state["w"].to_local().any(), "nothing was touched"
    for key in ("dataloader", "own", "seeds"):
        del state[key]
    holdfast.load(state, root / "own", timeout=TIMEOUT_S)
    first = draw()
    assert bool((state["w"].to_local() == 5.0).all())
    assert state["resharding_dataloader"].position == (1 + 2 + 3 + 4) * 1000 + rank * 10 + world
    drawn = gathered(first)
    assert len({str(one) for one in drawn}) == world, "every rank goes on differently"
    assert first != before
    holdfast.load(state, root / "own", timeout=TIMEOUT_S)
    assert draw() == first, "and always the same way"


def a_manager_moves_to_another_world(root: Path) -> None:
    """What cannot be divided is excluded by configuration; the rest goes on."""
    state = own_state(0)
    options = {"stage_timeout": TIMEOUT_S, "exclude_from_loading": ("dataloader", "own", "seeds")}
    # The one-call checkpoint lies in the root under a name that the manager knows it by.
    config = holdfast.CheckpointConfig(name_template="own{step}", load_only=True, **options)
    with holdfast.CheckpointManager(root / "managed", state, config=config) as manager:
        assert manager.restore() == 7
    assert bool((state["w"].to_local() == 5.0).all())
    assert state["dataloader"].position == 0
    assert state["own"].value == 0


def four_ranks(root: Path) -> None:
    two_groups_save_to_two_roots_at_once(root)
    what_a_group_does_not_hold_is_refused(root)
    four_save_what_is_their_own(root)
    state = own_state(dist.get_rank())
    state["w"] = distribute_tensor(torch.full((6, 2), 5.0), mesh_of(4), [Shard(0)])
    holdfast.save(state, root / "managed" / "own7", step=7, timeout=TIMEOUT_S)


def two_ranks(root: Path) -> None:
    others_load_what_was_each_ranks_own(root)
    a_manager_moves_to_another_world(root)
    assert isinstance(own_state(0)["w"], DTensor)


def job(place: str) -> None:
    in_world(4, four_ranks, Path(place))
    in_world(2, two_ranks, Path(place))


def test_groups_and_worlds(tmp_path: Path) -> None:
    run_job(job, nproc=4, args=[tmp_path])
