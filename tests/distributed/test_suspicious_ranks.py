"""Suspicious saves of two ranks: a stale handle, a bit flipped in one replica, a number that is none, and no alarm."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()


def found_in(root: str, state: dict, step, *, steps: int = 4) -> list[list[str]]:
    """Save after each ``step``; return what each save's manifest says is suspicious."""
    config = holdfast.CheckpointConfig(keep=None, every=1)
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        for number in range(1, steps + 1):
            step(number)
            manager.save(number).result()
    dist.barrier()
    opened = [holdfast.open(Path(root) / f"step-{number}") for number in range(1, steps + 1)]
    return [[one["what"] for one in checkpoint.manifest.extra.get("suspicious", [])] for checkpoint in opened]


def wrapped(kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net())
    model = net()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if kind == "hsdp" else None
    return fully_shard(model, **({} if mesh is None else {"mesh": mesh}))


def check_no_alarm(root: str, kind: str) -> None:
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    found = found_in(root, {"model": model, "optimizer": optimizer}, lambda _: train(model, optimizer))
    assert found == [[], [], [], []]


def check_stale(root: str) -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = {"model": copy.deepcopy(model.module), "optimizer": optimizer}
    assert found_in(root, state, lambda _: train(model, optimizer)) == [[], ["stale"], ["stale"], ["stale"]]


def check_flipped(root: str, kind: str) -> None:
    """Every tensor here is a sample of every save: four of eight at each step; so the flip is seen soon."""
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        train(model, optimizer)
        if number == 2 and dist.get_rank() == 1:
            weight = next(model.parameters())
            local = weight.to_local() if kind == "hsdp" else weight
            local.detach().view(-1).view(torch.int32)[7] ^= 1

    found = found_in(root, {"model": model, "optimizer": optimizer}, step, steps=6)
    assert found[0] == []
    assert ["replicas"] in found
    assert all(one in ([], ["replicas"]) for one in found)


def check_nan(root: str) -> None:
    model = fully_shard(net())

    def step(number: int) -> None:
        if number == 3 and dist.get_rank() == 1:
            model[0].weight.to_local().detach()[0, 0] = float("nan")

    assert found_in(root, {"model": model}, step) == [[], [], ["nonfinite"], []]


@pytest.mark.parametrize("kind", ["ddp", "hsdp", "fsdp"])
def test_ranks_that_train_as_usual_are_no_alarm(tmp_path: Path, kind: str) -> None:
    run_job(check_no_alarm, nproc=2, args=[tmp_path, kind])


def test_a_stale_handle_on_every_rank_is_told_of(tmp_path: Path) -> None:
    run_job(check_stale, nproc=2, args=[tmp_path])


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_a_bit_flipped_in_one_replica_is_told_of(tmp_path: Path, kind: str) -> None:
    run_job(check_flipped, nproc=2, args=[tmp_path, kind])


def test_a_number_that_is_none_on_one_rank_is_told_of(tmp_path: Path) -> None:
    run_job(check_nan, nproc=2, args=[tmp_path])
