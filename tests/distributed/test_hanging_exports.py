"""An export whose root hangs in its report holds up no checkpoint, whichever of both is written first."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch import nn

import holdfast
from holdfast.engine import supervisor
from holdfast.engine.client import EngineClient

MB = 1 << 20
WAIT_S = 60.0
PERSIST_S = 5.0
SLOW = MB
"""Bytes per second: either takes about a second and a half then."""
START = "from holdfast.engine.process import main\n"
HANGING = """
import os, time
from holdfast.engine import syscalls
def hanging(name, call):
    def wait_and_call(self, fd, *rest):
        place = os.path.realpath(f"/proc/self/fd/{fd}")
        if ".report.new" in place + str(rest):
            root = place[: place.index("/hf/") + 3] if "/hf/" in place else place
            while os.path.exists(f"{root}/hang-{name}"):
                time.sleep(0.01)
        return call(self, fd, *rest)
    return wait_and_call
for name in ("fsync", "rename"):
    setattr(syscalls.SystemCalls, name, hanging(name, getattr(syscalls.SystemCalls, name)))
"""
"""Has an engine hang at a call for a report below ``hf`` for as long as there is a file ``hang-CALL`` in there."""


def hanging_reports(root: Path) -> list[Path]:
    """Reports of attempts below ``root`` that have their bytes, and not their name."""
    return list(root.glob(".*.incomplete/.*.report.new"))


def wait_for_reports(root: Path, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(hanging_reports(root)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def publish_beside(place: Path, call: str, first: str) -> None:
    """The export of step 1 hangs at ``call``; ``first`` is at full speed, the other one's bytes are limited."""
    rank, world, root = dist.get_rank(), dist.get_world_size(), place / "hf"
    limit = {"io_limit_bytes_per_s": SLOW}
    config = holdfast.CheckpointConfig(
        every=1, keep=None, on_error="warn", persist_timeout=PERSIST_S, **(limit if first == "export" else {})
    )
    export = holdfast.HFExport(root, every=1, latest_link=False, **(limit if first == "checkpoint" else {}))
    torch.manual_seed(rank)
    own = holdfast.PerRank(torch.randn(60 << 10))  # a checkpoint has parts of every rank
    torch.manual_seed(0)
    state = {"model": nn.Linear(1024, 280 * world), "own": own}
    with holdfast.CheckpointManager(place / "run", state, config=config, exports=[export]) as manager:
        hang = root / f"hang-{call}"
        hang.touch()
        dist.barrier()
        saved, exported = manager.step(1)
        if first == "export":
            wait_for_reports(root, world)
            assert not saved.done()
        saved.result(WAIT_S)
        wait_for_reports(root, world)
        assert not exported.done()
        during = first == "checkpoint"
        if during:  # and one that begins while the export hangs
            manager.save(2).result(WAIT_S)
            assert not exported.done()
        error = exported.exception(WAIT_S)
        assert isinstance(error, (holdfast.SaveFailed, holdfast.OutcomeUnknown)), error
        dist.barrier()
        hang.unlink(missing_ok=True)
        with pytest.warns(UserWarning, match="export"):
            manager.save(3).result(WAIT_S)
        for handle in manager.step(4):
            handle.result(WAIT_S)
        assert manager.steps() == ([1, 2, 3, 4] if during else [1, 3, 4])
    told: list[str | None] = [None] * world
    dist.all_gather_object(told, f"{type(error).__name__}: {error.__cause__}")
    assert len(set(told)) == 1, told


def an_export_root_hangs(place: str) -> None:
    holdfast.release()  # so that engines are started anew
    assert START in supervisor._BOOT
    cancel = EngineClient.cancel

    def soon(client: EngineClient, attempt: str, timeout_s: float) -> bool:
        return cancel(client, attempt, timeout_s=min(timeout_s, 0.5))

    with ExitStack() as patches:
        boot = supervisor._BOOT.replace(START, HANGING + START)
        patches.enter_context(mock.patch.object(supervisor, "_BOOT", boot))
        patches.enter_context(mock.patch.object(EngineClient, "cancel", soon))
        for call, first in (("fsync", "checkpoint"), ("rename", "export")):
            publish_beside(Path(place) / f"{call}-{first}", call, first)


def test_a_checkpoint_is_published_beside_an_export_whose_root_hangs(tmp_path: Path) -> None:
    run_job(an_export_root_hangs, nproc=2, args=[tmp_path])
