"""Ranks of one load open a path before and after it was overwritten: all load the new one, none is called unshared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job

import holdfast
from holdfast.errors import StorageError
from holdfast.loader import loader
from holdfast.storage import local

ROWS = 1_000


def save_two(root: Path) -> None:
    for step, name in ((1, "latest"), (2, "next")):
        holdfast.save({"w": torch.full((ROWS,), float(step))}, root / name, step=step)


def a_rank_opens_what_another_save_has_put_there(root: Path) -> None:
    """By an exchange between rank 0's look and rank 1's; then by one in the middle of reading, the old one gone."""
    exchange = local._renameat2()
    assert exchange is not None
    open_source, fill, exchanged = loader.open_source, loader._fill, []

    def exchange_once() -> None:
        if dist.get_rank() == 1 and not exchanged:
            exchanged.append(exchange(str(root / "latest"), str(root / "next")))

    def opened_late(path: str, **kept: Any) -> Any:
        exchange_once()
        return open_source(path, **kept)

    def filled_late(*args: Any) -> Any:
        exchange_once()
        if dist.get_rank() == 1 and exchanged == [0]:
            exchanged.append(0)
            for name in os.listdir(root / "next"):
                (root / "next" / name).unlink()
        return fill(*args)

    state = {"w": torch.zeros(ROWS)}
    loader.open_source = opened_late
    try:
        assert holdfast.load(state, root / "latest").step == 2
    finally:
        loader.open_source = open_source
    assert state["w"].unique().tolist() == [2.0]
    dist.barrier()

    exchanged.clear()
    loader._fill = filled_late
    try:
        assert holdfast.load(state, root / "latest").step == 1
    finally:
        loader._fill = fill
    assert state["w"].unique().tolist() == [1.0]


def ranks_that_see_different_directories_are_told(root: Path) -> None:
    open_source = loader.open_source
    if dist.get_rank() == 1:
        loader.open_source = lambda path, **kept: open_source(path.replace("latest", "next"), **kept)
    try:
        with pytest.raises(StorageError, match="a file system that all ranks share"):
            holdfast.load({"w": torch.zeros(ROWS)}, root / "latest")
    finally:
        loader.open_source = open_source


def loads(root: str) -> None:
    ranks_that_see_different_directories_are_told(Path(root))
    a_rank_opens_what_another_save_has_put_there(Path(root))


def test_all_ranks_load_one_generation(tmp_path: Path) -> None:
    save_two(tmp_path)
    run_job(loads, nproc=2, args=[tmp_path])
