"""Exports of a manager as training goes on: when they are published, and what one that fails does to the next."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.commit.attempt import Attempt
from holdfast.errors import HoldfastError, StorageError
from holdfast.export.exporter import ExportJob

WIDTH = 96
PUBLISHED_S = 60.0


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# when they are published -------------------------------------------------------------------------------------------


class Heard:
    """What hooks have told, between the steps at which exports were due."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []
        self._changed = threading.Condition()

    def __call__(self, event: Any) -> None:
        if event.kind.startswith("export."):
            self.add(event.kind, event.step)

    def add(self, kind: str, step: int) -> None:
        with self._changed:
            self.rows.append((kind, step))
            self._changed.notify_all()

    def wait(self, kind: str, step: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: (kind, step) in self.rows, PUBLISHED_S)


def exports_in_a_row(place: str) -> None:
    """The training thread calls nothing of Holdfast's from one due export to the next: it computes, and waits."""
    root = Path(place)
    model, optimizer = build()
    heard = Heard()
    stop = holdfast.add_hook(heard)
    export = holdfast.HFExport(root / "hf", every=1, dtype="bfloat16")
    config = holdfast.CheckpointConfig(every=3)
    state = {"model": model, "optimizer": optimizer}
    steps = range(1, 7)
    with holdfast.CheckpointManager(root / "checkpoints", state, config=config, exports=[export]) as manager:
        for step in steps:
            train(model, optimizer)
            heard.add("due", step)
            manager.step(step)
            model(torch.randn(4, WIDTH)).square().mean().backward()
            assert heard.wait("export.published", step), f"the export of step {step} waits for a call"
            assert (root / "hf" / f"hf-{step}" / "model.safetensors").is_file()
            optimizer.zero_grad()
    stop()
    assert heard.rows == [(kind, step) for step in steps for kind in ("due", "export.published")]
    if dist.get_rank() == 0:
        for step in steps:
            assert holdfast.open(root / "hf" / f"hf-{step}").verify().ok
    dist.barrier()


def test_an_export_is_published_before_the_next_is_due_without_any_call(tmp_path: Path) -> None:
    run_job(exports_in_a_row, nproc=2, args=[tmp_path])


# what fails --------------------------------------------------------------------------------------------------------


def outcomes(place: str, spoilt: Any, **deadlines: float) -> list[BaseException | None]:
    """How the exports of steps 1 to 3 ended on this rank; something spoils that of step 2 on rank 1."""
    root, rank = Path(place), dist.get_rank()
    model, optimizer = build()
    config = holdfast.CheckpointConfig(every=None, on_error="warn", **deadlines)
    export = holdfast.HFExport(root / "hf", every=1)
    state = {"model": model, "optimizer": optimizer}
    ends: list[BaseException | None] = []
    with holdfast.CheckpointManager(root / "checkpoints", state, config=config, exports=[export]) as manager:
        for step in (1, 2, 3):
            train(model, optimizer)
            if step == 2 and rank == 1:
                with spoilt():
                    ends.append(manager.step(step)[0].exception(60))
            else:
                ends.append(manager.step(step)[0].exception(60))
            dist.barrier()  # the ranks learn of a failure at different moments
    if rank == 0:
        assert sorted(os.listdir(root / "hf")) == [".holdfast", "hf-1", "hf-3", "hf-latest"]
        assert holdfast.open(root / "hf" / "hf-3").verify().ok
    dist.barrier()
    return ends


def one_rank_can_not_begin(place: str) -> None:
    def refuse(_attempt: Attempt, _note: object) -> None:
        raise StorageError("the directory can't be read", path="/shared", errno=5)

    first, second, third = outcomes(place, lambda: mock.patch.object(Attempt, "_check_shared", refuse))
    assert first is None
    assert isinstance(second, HoldfastError)
    assert "can't be read" in f"{second} {second.__cause__}"
    assert third is None, f"the export after the one that failed: {third!r}"


def test_the_export_after_one_that_a_rank_could_not_begin_is_published(tmp_path: Path) -> None:
    run_job(one_rank_can_not_begin, nproc=2, args=[tmp_path])


def one_rank_has_no_capture_in_time(place: str) -> None:
    wait = ExportJob.wait
    never = lambda ticket, timeout_s: False if ticket.step == 2 else wait(ticket, timeout_s)  # noqa: E731
    deadlines = {"persist_timeout": 3.0, "commit_timeout": 2.0}
    ends = outcomes(place, lambda: mock.patch.object(ExportJob, "wait", never), **deadlines)
    assert ends[0] is None
    assert isinstance(ends[1], HoldfastError)
    assert ends[2] is None, f"the export after the one that failed: {ends[2]!r}"


@pytest.mark.slow
def test_the_export_after_one_that_a_rank_took_no_part_in_is_published(tmp_path: Path) -> None:
    run_job(one_rank_has_no_capture_in_time, nproc=2, args=[tmp_path])
