"""A rank that saves, loads or manages alone: no group, no other rank, no collective. What ranks share is Replicated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import mesh_of

import holdfast
from holdfast.errors import ConfigError


class Loader:
    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def check_one_rank_saves_alone(root: str) -> None:
    rank = dist.get_rank()
    state: dict[str, Any] = {"w": torch.full((1000,), float(rank)), "dataloader": Loader(rank)}
    if rank == 1:  # the other one is busy with something else
        path = Path(root, "alone")
        holdfast.save(state, path, process_group="alone", files={"rank": b"1"})
        assert holdfast.open(path).read_file("rank") == b"1"
        holdfast.async_save(state, Path(root, "again"), process_group="alone").result(60)
        into: dict[str, Any] = {"w": torch.zeros(1000), "dataloader": Loader(9)}
        holdfast.load(into, path, process_group="alone")
        assert torch.equal(into["w"], state["w"])
        assert into["dataloader"].position == 1
    dist.barrier()
    with holdfast.CheckpointManager(Path(root, f"of-{rank}"), state, process_group="alone") as manager:
        for step in range(rank + 2):  # as many as it likes
            manager.save(step + 1)
        manager.wait()
        assert manager.steps()[-1] == rank + 2
    dist.barrier()
    sharded = {"x": distribute_tensor(torch.arange(8.0), mesh_of(2), [Shard(0)])}
    with pytest.raises(ConfigError, match="every rank of the tensor's mesh"):
        holdfast.save(sharded, Path(root, f"sharded-{rank}"), process_group="alone")
    with pytest.raises(ConfigError, match="'alone'"):
        holdfast.save(state, Path(root, "x"), process_group="me")


def check_what_is_replicated_loads_on_any_world(root: str) -> None:
    loader = Loader(7)
    holdfast.save(
        {"dataloader": holdfast.Replicated(loader)}, Path(root, "replicated"), files={"n": b"%d" % dist.get_rank()}
    )
    checkpoint = holdfast.open(Path(root, "replicated"))
    assert list(checkpoint.objects) == ["dataloader.position"]
    assert checkpoint.read_file("n") == b"0"  # rank 0's
    missing = None if dist.get_rank() else {"n": Path("/not/there")}
    with pytest.raises(ConfigError, match="/not/there"):
        holdfast.save({"x": 1}, Path(root, "refused"), files=missing)
    assert not os.path.exists(Path(root, "refused"))


def test_a_rank_saves_alone(tmp_path: Path) -> None:
    run_job(check_one_rank_saves_alone, nproc=2, args=[tmp_path])


def test_replicated_values_and_files_of_ranks(tmp_path: Path) -> None:
    run_job(check_what_is_replicated_loads_on_any_world, nproc=2, args=[tmp_path])
    loader = Loader(0)
    holdfast.load({"dataloader": holdfast.Replicated(loader)}, tmp_path / "replicated")
    assert loader.position == 7
