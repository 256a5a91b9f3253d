"""Blocking saves of several ranks stream: same files as with images, and a change on one rank is the error of all."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import mesh_of

import holdfast
from holdfast.engine.client import EngineClient
from holdfast.errors import StateChangedWhileStaging

MB = 1 << 20


def state_of(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = torch.randn(6000, 1501)
    return {
        "sharded": distribute_tensor(whole, mesh_of(2), [Shard(0)]),
        "by_columns": distribute_tensor(whole, mesh_of(2), [Shard(1)]),
        "replicated": torch.randn(5 * MB),
        "own": holdfast.PerRank(torch.full((9 * MB // 4,), float(rank))),
        "step": 3,
    }


def check_ranks_stream(root: str) -> None:
    rank = dist.get_rank()
    state, path = state_of(rank), Path(root)
    holdfast.save(state, path / "streamed")
    holdfast.async_save(state, path / "staged", staging="eager").result(60)
    names = [name for name in os.listdir(path / "staged") if name.endswith((".distcp", ".metadata"))]
    assert len(names) >= 3
    for name in names:
        assert (path / "streamed" / name).read_bytes() == (path / "staged" / name).read_bytes(), name

    slot_filled = EngineClient.slot_filled

    def meddle(client: EngineClient, attempt: str, pieces: int) -> None:
        slot_filled(client, attempt, pieces)
        if pieces == 2 and rank == 1:
            thread = threading.Thread(target=lambda: state["own"].value.add_(1))
            thread.start()
            thread.join()

    EngineClient.slot_filled = meddle  # type: ignore[method-assign]
    try:
        with pytest.raises(StateChangedWhileStaging, match="rank 1: own"):
            holdfast.save(state, path / "changed")
    finally:
        EngineClient.slot_filled = slot_filled  # type: ignore[method-assign]
    dist.barrier()
    assert not (path / "changed").exists()
    holdfast.save(state, path / "changed")
    restored = state_of(rank)
    holdfast.load(restored, path / "changed")
    assert torch.equal(restored["own"].value, state["own"].value)


def test_ranks_stream_together_and_fail_together(tmp_path: Path) -> None:
    run_job(check_ranks_stream, nproc=2, args=[tmp_path])
