"""A forked child uses nothing of its parent's, and holds nothing up that ends; nor does a publisher that is stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.sync import DirectoryTransport, ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
KINDS = pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessGroupTransport, DirectoryTransport])
TRANSPORTS: dict[str, Any] = {kind.__name__: kind for kind in (SharedMemoryTransport, ProcessGroupTransport)}
BLOCKS = pytest.mark.parametrize("kind", list(TRANSPORTS))
TIMEOUT_S = 20.0
OF_PARENT = "belongs to the parent of this forked process; make a new one here"


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(version))}


def in_child(calls: list[Callable[[], Any]]) -> list[str]:
    """What each of ``calls`` returns or raises in a forked child, which then ends as usual."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def run() -> None:
        for call in calls:
            try:
                answers.put(repr(call()))
            except Exception as error:
                answers.put(f"{type(error).__name__}: {error}")

    child = context.Process(target=run)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    return [answers.get() for _ in calls]


@KINDS
def test_a_forked_child_is_told_to_make_its_own_and_the_parent_goes_on(tmp_path: Path, kind: Any) -> None:
    into, late = weights(0), weights(0)
    with Publisher(kind(tmp_path)) as publisher, Receiver(kind(tmp_path), into) as receiver:
        publisher.publish(weights(1), 1)
        publisher.pin(1)
        assert receiver.receive(timeout=TIMEOUT_S) == 1
        assert receiver.fetch(1, timeout=TIMEOUT_S) == 1
        publishing = [lambda: publisher.publish(weights(2), 2, timeout=5), lambda: publisher.unpin(1)]
        receiving = [lambda: receiver.receive(version=1, timeout=5), receiver.commit, lambda: receiver.fetch(1)]
        refused = in_child([*publishing, *receiving])
        for said, whose in zip(refused, ["publisher"] * 2 + ["receiver"] * 3, strict=True):
            assert said == f"ConfigError: this {whose} {OF_PARENT}"
        assert in_child([receiver.cancel, publisher.close, receiver.close, publisher.close]) == ["None"] * 4
        assert in_child([lambda: publisher.versions, lambda: receiver.version, lambda: receiver.fetched]) == [
            "(1,)",
            "1",
            "1",
        ]

        assert receiver.commit() == 1
        publisher.publish(weights(3), 3)
        assert receiver.receive(timeout=TIMEOUT_S) == 3
        assert torch.equal(into["weight"], weights(3)["weight"])
        with Receiver(kind(tmp_path), late) as another:
            assert another.receive(timeout=TIMEOUT_S) == 3


@KINDS
def test_a_forked_child_receives_with_a_receiver_of_its_own(tmp_path: Path, kind: Any) -> None:
    with Publisher(kind(tmp_path)) as publisher, Receiver(kind(tmp_path), weights(0)) as receiver:
        publisher.publish(weights(1), 1)
        receiver.receive(timeout=TIMEOUT_S)

        def receive() -> tuple[int, bool]:
            into = weights(0)
            with Receiver(kind(tmp_path), into) as own:
                return own.receive(timeout=TIMEOUT_S), torch.equal(into["weight"], weights(1)["weight"])

        assert in_child([receive]) == ["(1, True)"]
        publisher.publish(weights(2), 2)
        assert receiver.receive(timeout=TIMEOUT_S) == 2


PUBLISHER = """
import os, sys, time, torch
import holdfast
from holdfast.sync import ProcessGroupTransport, Publisher, SharedMemoryTransport

publisher = Publisher(globals()[sys.argv[1]](sys.argv[2]))
version = int(sys.argv[3])
publisher.publish({"weight": torch.full((1000,), float(version))}, version)
print("published", flush=True)
sys.stdin.readline()
child = os.fork()
if not child:
    os.closerange(0, 3)
    time.sleep(120)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
"""


def start(kind: str, place: Path, version: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", PUBLISHER, kind, str(place), str(version)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "published\n"
    return process


@BLOCKS
@pytest.mark.parametrize("polls", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_publisher_at_the_place_of_a_stopped_one_is_found(tmp_path: Path, kind: str, polls: bool) -> None:
    into = weights(0)
    publishers = [start(kind, tmp_path, 1)]
    try:
        with Receiver(TRANSPORTS[kind](tmp_path), into) as receiver:
            assert receiver.receive(timeout=TIMEOUT_S) == 1
            publishers[0].send_signal(signal.SIGSTOP)
            publishers.append(start(kind, tmp_path, 2))
            ends = time.monotonic() + TIMEOUT_S
            while polls and receiver.poll() != 2:
                assert time.monotonic() < ends
                time.sleep(0.05)
            assert receiver.receive(timeout=TIMEOUT_S) == 2
            assert torch.equal(into["weight"], weights(2)["weight"])
    finally:
        for process in publishers:
            process.kill()
            process.communicate(timeout=20)


@BLOCKS
def test_a_killed_publisher_is_followed_by_another_though_its_child_lives(tmp_path: Path, kind: str) -> None:
    into = weights(0)
    first, second = start(kind, tmp_path, 1), None
    with Receiver(TRANSPORTS[kind](tmp_path), into) as receiver:
        assert receiver.receive(timeout=TIMEOUT_S) == 1
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        child = int(first.stdout.readline())
        try:
            os.kill(first.pid, signal.SIGKILL)
            first.communicate(timeout=20)
            second = start(kind, tmp_path, 2)
            assert receiver.receive(timeout=TIMEOUT_S) == 2
            assert torch.equal(into["weight"], weights(2)["weight"])
        finally:
            os.kill(child, signal.SIGKILL)
            if second is not None:
                second.kill()
                second.communicate(timeout=20)
