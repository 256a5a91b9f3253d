"""Publishing as fast as it goes while receivers are killed, stopped and started at random: memory flat, bits equal.

``HOLDFAST_SYNC_SOAK_S``: seconds of it; 4 without.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from block_job import NBYTES
from nursery import Child, Nursery

SOAK_S = float(os.environ.get("HOLDFAST_SYNC_SOAK_S", "4"))
BLOCKS_MAX = 4
ERRORS = {"VersionRevoked", "CheckpointNotFound", "DeadlineExceeded", "PeerLost"}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("block_job") as found:
        yield found


def told(child: Child) -> list[dict[str, Any]]:
    lines = child.stdout().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.timeout(120 + 2 * SOAK_S)
@pytest.mark.parametrize("kind", ["shared memory", "network"])
def test_receivers_come_and_go_at_random(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    choose = random.Random(7)
    base = {"place": str(tmp_path / "place"), "kind": kind}
    publisher = nursery.start("block_job", "publish", base | {"seconds": SOAK_S}, log=tmp_path / "publisher")
    numbers = iter(range(1 << 30))

    def start() -> Child:
        number = next(numbers)
        arguments = base | {"seed": number, "hold": number % 2 == 0}
        return nursery.start("block_job", "receive", arguments, log=tmp_path / f"receiver-{number}")

    alive = [start() for _ in range(4)]
    all_of_them, stopped = list(alive), list[Child]()
    until = time.monotonic() + SOAK_S + 20.0
    while publisher.returncode is None and time.monotonic() < until:
        time.sleep(choose.random() * 0.2)
        child = choose.choice(alive)
        match choose.choice(["kill", "stop", "go on", "start"]):
            case "kill":
                child.signal(signal.SIGKILL)
                alive.remove(child)
                alive.append(start())
                all_of_them.append(alive[-1])
            case "stop" if len(stopped) < 3:
                child.signal(signal.SIGSTOP)
                stopped.append(child)
            case "go on" if stopped:
                stopped.pop(0).signal(signal.SIGCONT)
            case _:
                pass
    assert publisher.wait(30.0) == 0, publisher.stderr()
    for child in stopped:
        child.signal(signal.SIGCONT)
    time.sleep(0.5)
    for child in alive:
        child.signal(signal.SIGKILL)

    events = told(publisher)
    assert events[-1].get("done"), events[-1:]
    shared = [event["shared"] for event in events if "shared" in event]
    assert max(shared) <= BLOCKS_MAX * NBYTES * 1.05 + (8 << 20), shared
    received = 0
    for child in all_of_them:
        for event in told(child):
            assert not event.get("wrong"), event
            assert event.get("error") in {None, *ERRORS}, event
            received += "received" in event
    assert received >= len(all_of_them), (received, len(all_of_them), publisher.stderr())
