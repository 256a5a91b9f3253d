"""A rank that dies or stops in the middle of a load that is read once: no hang, and what can be loaded is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from read_once_job import STALL_S, TIMEOUT_S, WEIGHTS, state_of

import holdfast

JOB = Path(__file__).with_name("read_once_job.py")
SOURCE = Path(__file__).parents[2] / "src"
START_S = 60.0
SLACK_S = 12.0
"""A slow machine's; nothing waits so long."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("once") / "saved"
    holdfast.save(state_of(1), path)
    return path


@contextmanager
def ranks(world: int, path: Path, *, lost: int, at: int, act: str) -> Iterator[list[subprocess.Popen[str]]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(JOB)]
    processes = [
        subprocess.Popen(
            [*command, *map(str, (rank, world, store.port, path, at)), act if rank == lost else "goes on"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        del store


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=START_S + TIMEOUT_S)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def wait_stopped(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_S
    while Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1][0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_when_nothing_happens_each_byte_is_read_once(checkpoint: Path) -> None:
    with ranks(3, checkpoint, lost=0, at=0, act="goes on") as processes:
        ends = [said(process) for process in processes]
    assert all(end["is_right"] and not end["read_alone"] and not end["counted"] for end in ends), ends
    assert sum(end["bytes_read"] for end in ends) == ends[0]["unique_bytes"] >= WEIGHTS << 22
    assert ends[0]["ranks_read_alone"] == 0


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_dies_is_named(checkpoint: Path, lost: int) -> None:
    with ranks(3, checkpoint, lost=lost, at=5, act="dies") as processes:
        ends = [said(process) for rank, process in enumerate(processes) if rank != lost]
        assert processes[lost].wait(START_S) == -signal.SIGKILL
    for end in ends:
        assert end["error"] == "DeadlineExceeded", ends
        assert f"rank(s) {lost} of 3" in end["message"]
        assert end["counted"] == 1
        assert end["took_s"] < TIMEOUT_S + SLACK_S


def test_what_a_stopped_rank_does_not_send_is_read_by_the_others(checkpoint: Path) -> None:
    with ranks(3, checkpoint, lost=1, at=5, act="stops") as processes:
        wait_stopped(processes[1])
        time.sleep(2 * STALL_S)
        os.kill(processes[1].pid, signal.SIGCONT)
        ends = [said(process) for process in processes]
    assert all(end["is_right"] and not end["error"] for end in ends), ends
    assert all(end["read_alone"] for end in (ends[0], ends[2])), ends
    assert sum(end["bytes_read"] for end in ends) > ends[0]["unique_bytes"]
    assert ends[0]["ranks_read_alone"] >= 2


@pytest.mark.slow
def test_a_rank_that_stays_stopped_is_named(checkpoint: Path) -> None:
    with ranks(3, checkpoint, lost=2, at=5, act="stops") as processes:
        ends = [said(process) for process in processes[:2]]
    for end in ends:
        assert end["error"] == "DeadlineExceeded", ends
        assert "rank(s) 2 of 3" in end["message"]
        assert end["took_s"] < 2 * TIMEOUT_S + SLACK_S
