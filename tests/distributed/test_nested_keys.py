"""Keys that are no strings, as several ranks have them: alike, of one rank only, each its own, and resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import mesh_of

import holdfast


def check_keys_of_two_ranks(root: str) -> None:
    rank = dist.get_rank()
    mesh = mesh_of(2)
    state: dict[str, Any] = {
        "sharded": {0: distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), 1: {None: rank * 0 + 1}, 2: {}},
        "stages": {rank: {"w": torch.full((2,), float(rank))}},  # of a pipeline: each rank has some
        "own": holdfast.PerRank({rank: "mine", "shared": {rank + 10: torch.full((3,), float(rank))}}),
        "replicated": holdfast.Replicated({3: 4}),
        "mixed": {0: "a"} if rank == 0 else {"1": "b"},
    }
    holdfast.save(state, Path(root, "two"))
    into: dict[str, Any] = {
        "sharded": {0: distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), 1: {None: 0}},
        "own": holdfast.PerRank({}),
        "stages": {},
    }
    holdfast.load(into, Path(root, "two"))
    assert torch.equal(into["sharded"][0].full_tensor(), torch.arange(8.0))
    assert into["sharded"][1] == {None: 1}
    assert set(into["own"].value) == {rank, "shared"}
    assert list(into["own"].value["shared"]) == [rank + 10]
    assert sorted(into["stages"]) == [0, 1]


def test_keys_of_two_ranks(tmp_path: Path) -> None:
    run_job(check_keys_of_two_ranks, nproc=2, args=[tmp_path])
    state = holdfast.open(tmp_path / "two").state()
    assert torch.equal(state["sharded"].pop(0), torch.arange(8.0))
    assert state["sharded"] == {1: {None: 1}, 2: {}}
    assert {key: value["w"].tolist() for key, value in state["stages"].items()} == {0: [0.0, 0.0], 1: [1.0, 1.0]}
    for rank in range(2):
        own = state["own"][f"rank-{rank:05d}"]
        assert own[rank] == "mine"
        assert own["shared"][rank + 10].tolist() == [float(rank)] * 3
    assert state["replicated"] == {3: 4}
    assert state["mixed"] == {0: "a", "1": "b"}
    into: dict[str, Any] = {"sharded": {0: torch.zeros(8)}, "stages": {}}
    holdfast.load(into, tmp_path / "two", include=["sharded.0", "stages"])
    assert torch.equal(into["sharded"][0], torch.arange(8.0))
    assert sorted(into["stages"]) == [0, 1]
