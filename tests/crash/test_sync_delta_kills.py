"""A publisher of deltas is killed again and again: what is there is whole, bit by bit, and the next one goes on."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from block_job import TENSORS, wrong
from nursery import Child, Nursery

import holdfast

KILLS = 4
ERRORS = {"CheckpointNotFound", "DeadlineExceeded"}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("block_job") as found:
        yield found


def told(child: Child) -> list[dict[str, Any]]:
    lines = child.stdout().splitlines(keepends=True) if child.out.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_all(root: Path) -> set[int]:
    """Check every version that is published; return the lengths of their chains."""
    lengths = set()
    for path in root.glob("version-*"):
        found = holdfast.open(path)
        assert found.verify().ok, found.verify().problems
        assert found.manifest is not None
        assert found.step is not None
        into = {f"w{index}": found.read(f"w{index}") for index in range(TENSORS)}
        assert not wrong("deltas", into, found.step)
        lengths.add(len(found.manifest.chain))
    return lengths


@pytest.mark.timeout(180)
def test_kills_leave_whole_versions(nursery: Nursery, tmp_path: Path) -> None:
    choose = random.Random(5)
    root = tmp_path / "versions"
    base = {"place": str(root), "kind": "deltas"}
    receivers = [
        nursery.start(
            "block_job", "receive", base | {"seed": number, "hold": True}, log=tmp_path / f"receiver-{number}"
        )
        for number in range(2)
    ]
    lengths: set[int] = set()
    for number in range(KILLS):
        publisher = nursery.start(
            "block_job", "publish", base | {"seconds": 60.0}, log=tmp_path / f"publisher-{number}"
        )
        until = time.monotonic() + 30.0
        while not told(publisher) and time.monotonic() < until:
            time.sleep(0.01)
        assert told(publisher), publisher.stderr()
        time.sleep(0.3 + choose.random())
        publisher.signal(signal.SIGKILL)
        publisher.wait(10.0)
        lengths |= check_all(root)
    assert len(lengths) > 1, "no delta was published"
    for child in receivers:
        child.signal(signal.SIGKILL)
        rows = told(child)
        assert any("received" in row for row in rows), child.stderr()
        for row in rows:
            assert not row.get("wrong"), row
            assert row.get("error") in (None, *ERRORS), row
