"""A rank that dies or hangs while ranks exchange the bytes of an export: the others say which, soon, and live on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from exchange_job import DEADLINE_S, GRACE_S

JOB = Path(__file__).with_name("exchange_job.py")
SOURCE = Path(__file__).parents[2] / "src"
START_S = 60.0
SLACK_S = 3.0
"""A slow machine's; nothing waits so long."""


@contextmanager
def ranks(world: int, *, lost: int, at: int, act: str) -> Iterator[list[subprocess.Popen[str]]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(JOB),
                str(rank),
                str(world),
                str(store.port),
                str(at),
                act if rank == lost else "goes on",
            ],
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


def said(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=START_S + DEADLINE_S)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_when_nothing_happens_everything_arrives() -> None:
    with ranks(3, lost=0, at=5, act="goes on") as processes:
        assert [said(process)[0] for process in processes] == [None] * 3


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_dies_is_named_at_once(lost: int) -> None:
    with ranks(3, lost=lost, at=20, act="dies") as processes:
        ends = [said(process) for rank, process in enumerate(processes) if rank != lost]
        assert processes[lost].wait(START_S) == -signal.SIGKILL
    for kind, rank, _, took_s, message in ends:
        assert (kind, rank) == ("SaveFailed", lost), ends
        assert f"rank {lost} ended" in message
        assert took_s < 2 * GRACE_S + SLACK_S
    assert ends[0][4] == ends[1][4]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_hangs_is_named_at_the_deadline(lost: int) -> None:
    with ranks(3, lost=lost, at=20, act="stops") as processes:
        ends = [said(process) for rank, process in enumerate(processes) if rank != lost]
        assert processes[lost].poll() is None  # it still hangs
    for kind, _, waited_for, took_s, _ in ends:
        assert (kind, waited_for) == ("DeadlineExceeded", f"rank {lost}"), ends
        assert took_s < DEADLINE_S + 2 * GRACE_S + SLACK_S
    assert ends[0][4] == ends[1][4]
