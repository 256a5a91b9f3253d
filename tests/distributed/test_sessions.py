"""Ranks open sessions together, whatever each of them has opened before: alone, in other groups, in other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import run_job
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import ConfigError, DeadlineExceeded

TIMEOUT_S = 40.0
QUICK = holdfast.CheckpointConfig(stage_timeout=0.5, persist_timeout=0.5, commit_timeout=TIMEOUT_S, save_on_signal=())
HERE = holdfast.CheckpointConfig(stage_timeout=TIMEOUT_S, persist_timeout=TIMEOUT_S, commit_timeout=TIMEOUT_S)


def state_of(value: float) -> dict[str, object]:
    return {"w": torch.full((64,), value), "own": holdfast.PerRank({"rank": dist.get_rank()})}


def save_all_ways(root: Path, value: float, group: dist.ProcessGroup | None = None) -> None:
    """One of each kind of session; all of them have to be the same one on both ranks."""
    state = state_of(value)
    holdfast.save(state, root / "one", overwrite=True, process_group=group, timeout=TIMEOUT_S)
    holdfast.async_save(state, root / "two", overwrite=True, process_group=group, timeout=TIMEOUT_S).result()
    holdfast.load(state_of(0.0), root / "one", process_group=group, timeout=TIMEOUT_S)
    with holdfast.CheckpointManager(root / "run", state, config=HERE, process_group=group) as manager:
        step = (manager.latest() or 0) + 1
        manager.save(step).result()
    assert float(holdfast.open(root / "one").read("w")[0]) == value
    assert holdfast.open(root / "run" / f"step-{step}").verify().ok


def sessions_that_one_rank_opens_alone(root: Path) -> None:
    state = state_of(1.0)
    for alone in (0, 1):
        if dist.get_rank() == alone:
            with pytest.raises(DeadlineExceeded):
                holdfast.save(state, root / "alone", timeout=0.5)
            with pytest.raises(DeadlineExceeded):
                holdfast.load(state, root / "alone", timeout=0.5)
            with pytest.raises(DeadlineExceeded):
                holdfast.CheckpointManager(root / "lonely", state, config=QUICK)
        dist.barrier()
        save_all_ways(root, 2.0 + alone)
        dist.barrier()
    for timeout in ("soon", TIMEOUT_S if dist.get_rank() == 0 else -1.0):  # refused on all ranks, and on one
        with pytest.raises(ConfigError, match="timeout"):
            holdfast.save(state, root / "refused", timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config"):
        holdfast.CheckpointManager(root / "run", state, config=HERE if dist.get_rank() else {})  # type: ignore[arg-type]
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in (*groups, None):
        save_all_ways(root, 5.0, group)
    dist.destroy_process_group(groups[0])
    save_all_ways(root, 6.0, dist.new_group([0, 1]))
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    left = [key for key in store.list_keys() if "holdfast" in key] if hasattr(store, "list_keys") else []
    assert not [key for key in left if key.endswith(("session", "joined"))], left


def listening() -> set[str]:
    """The ports that this process and those it has started listen at."""
    inodes: set[str] = set()
    tasks = [path.read_text().split() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")]
    for pid in (str(os.getpid()), *itertools.chain(*tasks)):
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(f"/proc/{pid}/fd")
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].rpartition(":")[2] for row in rows if row[3] == "0A" and row[9] in inodes}


def no_port_is_listened_at(place: str) -> None:
    root = Path(place)
    before = listening()
    found: list[set[str]] = []
    state = {"w": torch.ones(64), "own": holdfast.PerRank(dist.get_rank())}
    for step in (1, 2):
        handle = holdfast.async_save(state, root / f"step-{step}", timeout=TIMEOUT_S)
        while not handle.done():
            found.append(listening())
            handle.wait_staged()
        handle.result()
    with holdfast.CheckpointManager(root / "run", state, config=HERE) as manager:
        manager.save(1).result()
        found.append(listening())
    assert all(ports <= before for ports in found), (before, found)
    assert found


def test_no_port_is_listened_at(tmp_path: Path) -> None:
    """torchtitan's asynchronous saves meet at MASTER_PORT + 2, which may be another job's."""
    run_job(no_port_is_listened_at, nproc=2, args=[tmp_path])


def a_save_outlasts_the_timeout_of_its_group(place: str) -> None:
    root = Path(place)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    state = {"model": torch.nn.Linear(512, 4096)}  # 8 MiB
    exports = [holdfast.HFExport(root / "hf", every=1, io_limit_bytes_per_s=1 << 20)]
    config = dataclasses.replace(HERE, every=1, io_limit_bytes_per_s=1 << 20)
    with holdfast.CheckpointManager(
        root / "run", state, config=config, exports=exports, process_group=group
    ) as manager:
        began = time.monotonic()
        for handle in manager.step(1):
            assert handle.result().verify().ok
        assert time.monotonic() - began > 2.0
    dist.barrier()


def test_a_save_outlasts_the_timeout_of_its_group(tmp_path: Path) -> None:
    """XTuner's exports fail at the 30 minutes of a group although two hours are waited for them."""
    run_job(a_save_outlasts_the_timeout_of_its_group, nproc=2, args=[tmp_path])


CELL = """
manager = holdfast.CheckpointManager(root, state, config=config)
found = manager.latest() or 0
manager.save(found + 1)
if rank == 1:
    1 / 0
"""


def a_cell_that_all_ranks_run_again(root: Path) -> None:
    """With a save in flight, and what one of the ranks has raised."""
    names = {"holdfast": holdfast, "root": root, "state": state_of(1.0), "config": HERE, "rank": dist.get_rank()}
    raised: list[Exception] = []
    for number in range(3):
        try:
            exec(compile(CELL, "<cell>", "exec"), names)
        except ZeroDivisionError as error:
            raised.append(error)
        assert names["found"] == number
    del names["manager"]
    raised.clear()  # now nothing refers to the last one either
    with holdfast.CheckpointManager(root, state_of(1.0), config=HERE) as manager:
        assert manager.steps() == [1, 2, 3]


def plans_that_calls_share(root: Path) -> None:
    """Ranks go on with a plan of an earlier call only if all have the same; in a group made anew there is none."""

    def save(number: int, size: int, *, eager: bool) -> int:
        before = holdfast.statistics()["plans_made"]
        state = {"mine": holdfast.PerRank(torch.full((size,), float(number))), "both": torch.full((9,), float(number))}
        staging: Literal["lazy", "eager"] = "eager" if eager else "lazy"
        holdfast.async_save(state, root / str(number), staging=staging, timeout=TIMEOUT_S).result()
        mine, both = torch.zeros(size), torch.zeros(9)
        holdfast.load({"mine": holdfast.PerRank(mine), "both": both}, root / str(number), timeout=TIMEOUT_S)
        assert bool((mine == number).all())
        assert bool((both == number).all())
        return holdfast.statistics()["plans_made"] - before

    rank = dist.get_rank()
    made = [save(number, 1000, eager=number % 2 == 0) for number in range(4)]
    assert made == [1, 0, 0, 0], made
    alone = 2000 if rank == 1 else 1000
    assert save(4, alone, eager=True) == 1  # rank 0 has had this structure all along, and plans with the other
    assert save(5, alone, eager=False) == 0
    assert save(6, 1000, eager=True) == 1
    if rank == 0:
        holdfast.release()  # one rank has forgotten everything
    assert save(7, 1000, eager=False) == 1
    assert save(8, 1000, eager=True) == 0
    dist.barrier()


def exports_that_share_a_plan(root: Path) -> None:
    """Each rank goes on with the plan it has, or makes the same one anew: exports and drop-in saves."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    before = holdfast.statistics()["export_plans_made"]
    for number in range(5):
        if number == 3 and rank == 0:
            holdfast.release()  # one rank has forgotten everything
        torch.manual_seed(number)
        model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 301))
        whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fully_shard(model, mesh=mesh)
        holdfast.export_hf(model, root / f"hf{number}", timeout=TIMEOUT_S)
        dcp.save(get_model_state_dict(model), storage_writer=holdfast.dcp.Writer(root / f"dcp{number}"))
        for kind in ("hf", "dcp"):
            found = holdfast.open(root / f"{kind}{number}")
            assert found.verify().ok
            assert all(torch.equal(found.read(name), tensor) for name, tensor in whole.items())
    made = holdfast.statistics()["export_plans_made"] - before
    assert made == (2 if rank == 0 else 1), made
    dist.barrier()


def check_plans_in_a_new_group(root: str) -> None:
    rank = dist.get_rank()
    plans_that_calls_share(Path(root) / "first")
    exports_that_share_a_plan(Path(root) / "exports")
    dist.destroy_process_group()
    gc.collect()
    store = dist.FileStore(f"{root}/anew", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    del store
    plans_that_calls_share(Path(root) / "second")


def test_calls_share_a_plan_that_all_ranks_have(tmp_path: Path) -> None:
    run_job(check_plans_in_a_new_group, nproc=2, args=[tmp_path])


def check_sessions_that_one_rank_opens_alone(root: str) -> None:
    sessions_that_one_rank_opens_alone(Path(root))
    a_cell_that_all_ranks_run_again(Path(root) / "cells")


def test_sessions_that_one_rank_opens_alone(tmp_path: Path) -> None:
    run_job(check_sessions_that_one_rank_opens_alone, nproc=2, args=[tmp_path])


# A rank that is replaced by a new process, while the other one stays -----------------------------------------------


def join_attempt(rank: int, port: int, attempt: int, store: dist.Store | None = None) -> dist.Store:
    """As an elastic wrapper does: one Store for all attempts, with a prefix of its own for each."""
    store = store or dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt/{attempt}", store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return store


def rank_one(port: int, attempt: int, root: Path) -> None:
    join_attempt(1, port, attempt)
    save_all_ways(root, float(attempt))
    if attempt == 0:
        holdfast.save(state_of(0.0), root / "one", overwrite=True)
        os._exit(0)  # without leaving the group
    dist.barrier()
    dist.destroy_process_group()


def rank_zero(root: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        args = [sys.executable, __file__, str(store.port), str(attempt), str(root)]
        with subprocess.Popen(args) as other:
            join_attempt(0, store.port, attempt, store)
            save_all_ways(root, float(attempt))
            if attempt == 0:
                holdfast.save(state_of(0.0), root / "one", overwrite=True)
            else:
                dist.barrier()
            dist.destroy_process_group()
            assert other.wait(TIMEOUT_S) == 0


def test_a_rank_that_was_replaced(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)])
    found = subprocess.run(
        [sys.executable, __file__, "0", "0", str(tmp_path), "zero"],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        check=False,
    )
    assert found.returncode == 0, found.stderr


if __name__ == "__main__":
    if sys.argv[4:]:
        rank_zero(Path(sys.argv[3]))
    else:
        rank_one(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
