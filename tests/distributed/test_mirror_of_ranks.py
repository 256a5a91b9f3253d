"""A mirror of several ranks: each copies its part, and what one world saved another one uploads and goes on from."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import CheckpointConfig, CheckpointManager, Keep
from holdfast.errors import ConfigError, SaveFailed
from holdfast.saver import mirror as mirroring
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import LocalStorage

WIDTH = 96
WAIT_S = 60.0


def build(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    if dist.is_initialized():
        fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(4, WIDTH)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def values(state: dict[str, Any]) -> list[torch.Tensor]:
    found = state["model"].parameters()
    return [(row.full_tensor() if isinstance(row, DTensor) else row).detach().clone() for row in found]


def manager_of(state: dict[str, Any], at: str, *, mirrored: bool = True, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(**{"every": 1, "keep": None, **options})
    return CheckpointManager(f"{at}/root", state, config=config, mirror=f"{at}/mirror" if mirrored else None)


def lose(path: str) -> None:
    if not dist.is_initialized():
        shutil.rmtree(path)
        return
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def check_copies(at: str) -> None:
    state = build()
    with manager_of(state, at, keep=Keep(last=1), mirror_keep=Keep(last=2)) as manager:
        for step in (1, 2, 3):
            train(state)
            (handle,) = manager.step(step)
            handle.wait_mirrored(WAIT_S)
        expected = values(state)
    lose(f"{at}/root")
    other = build(9)
    with manager_of(other, at) as manager:
        assert manager.restore() == 3
    assert all(torch.equal(one, two) for one, two in zip(values(other), expected, strict=True))


def test_every_rank_copies_its_part_and_restores_from_the_mirror(tmp_path: Path) -> None:
    run_job(check_copies, nproc=2, args=[tmp_path])
    manifest = read_manifest(LocalStorage(tmp_path / "mirror"), "step-3")
    assert manifest is not None
    assert manifest.world == 2
    names = sorted(entry.name for entry in (tmp_path / "mirror").iterdir() if not entry.name.startswith("."))
    assert names == ["step-2", "step-3"]
    assert holdfast.open(tmp_path / "mirror/step-3").verify().ok


def save_only(at: str) -> None:
    state = build()
    with manager_of(state, at, mirrored=False) as manager:
        for step in (1, 2):
            train(state)
            manager.step(step)


def upload_and_lose(at: str) -> None:
    state = build(9)
    with manager_of(state, at) as manager:
        assert manager.restore() == 2
        expected = values(state)
    lose(f"{at}/root")
    other = build(8)
    with manager_of(other, at) as manager:
        assert manager.restore() == 2
    assert all(torch.equal(one, two) for one, two in zip(values(other), expected, strict=True))


@pytest.mark.parametrize(("saved", "uploaded"), [(2, 1), (1, 2), (3, 2)])
def test_a_world_of_another_size_uploads_what_is_missing(tmp_path: Path, saved: int, uploaded: int) -> None:
    run_job(save_only, nproc=saved, args=[tmp_path])
    run_job(upload_and_lose, nproc=uploaded, args=[tmp_path])
    manifest = read_manifest(LocalStorage(tmp_path / "mirror"), "step-2")
    assert manifest is not None
    assert manifest.world == saved


def check_failure(at: str) -> None:
    with mock.patch.object(mirroring, "FIRST_PAUSE_S", 1000.0):
        fail_once(at)
    assert (Path(at) / "mirror/step-1/holdfast.json").exists(), "tried again, at the latest when it is closed"


def fail_once(at: str) -> None:
    state = build()
    with manager_of(state, at) as manager:
        train(state)
        if dist.get_rank() == 1:
            runner = manager._mirror._runner
            real = runner.copy

            def fail(*args: Any, **options: Any) -> Any:
                runner.copy = real
                raise OSError(5, "this rank can't copy")

            runner.copy = fail
        (handle,) = manager.step(1)
        with pytest.raises(SaveFailed, match="this rank can't copy") as caught:
            handle.wait_mirrored(WAIT_S)
        assert caught.value.rank == 1


def test_what_fails_on_one_rank_fails_on_all_and_is_tried_again(tmp_path: Path) -> None:
    run_job(check_failure, nproc=2, args=[tmp_path])


def roots_of_their_own(at: str, which: str) -> None:
    """Each rank has a directory of its own, as on the disk of its node; by the same path or another."""
    own = Path(at) / f"node-{dist.get_rank()}"
    own.mkdir()
    os.chdir(own)
    root = "/proc/self/cwd/root" if which == "same" else str(own / "root")
    state = build()
    with pytest.raises(ConfigError, match="file system that" if which == "same" else "ranks disagree on the path"):
        CheckpointManager(root, state, config=CheckpointConfig(every=1), mirror=f"{at}/mirror")
    assert not (own / "root").is_dir() or os.listdir(own / "root/.holdfast") == ["lock"], "nothing is left there"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc makes one path mean several directories")
@pytest.mark.parametrize("path", ["same", "another"])
def test_a_root_that_not_every_rank_sees_is_refused_before_anything_is_saved(tmp_path: Path, path: str) -> None:
    run_job(roots_of_their_own, nproc=2, args=[tmp_path, path])
