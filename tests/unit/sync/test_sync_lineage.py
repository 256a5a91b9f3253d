"""Which training step a version is of, and who has it: told to hooks, kept in the journal, shown by the page."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.catalog import journal
from holdfast.catalog.journal import read_journal, scan_journal
from holdfast.events import Event
from holdfast.storage.local import open_storage
from holdfast.sync import DirectoryTransport, ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.view.journal import events_of

TIMEOUT_S = 60.0
WORKER = """
import sys, torch
from holdfast.sync import *
transport, place = sys.argv[1:]
into = {"a": torch.zeros(3, 4)}
with Receiver(globals()[transport](place), into=into) as receiver:
    for line in sys.stdin:
        print(receiver.receive(version=int(line), timeout=60), flush=True)
"""
DIRECT = [SharedMemoryTransport, ProcessGroupTransport]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version))}


class Worker:
    """A receiver in a process of its own."""

    def __init__(self, transport: type, place: Path) -> None:
        command = [sys.executable, "-W", "ignore", "-c", WORKER, transport.__name__, str(place)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def receive(self, version: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        assert int(self.process.stdout.readline()) == version

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*args: Any) -> Worker:
        workers.append(Worker(*args))
        return workers[-1]

    yield start
    for one in workers:
        one.kill()


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    """What is told of versions and receivers, in the publisher's process."""
    found: list[Event] = []
    remove = holdfast.add_hook(
        lambda event: found.append(event) if event.kind[:8] in ("version.", "receiver") else None
    )
    yield found
    remove()


def wait_for(condition: Callable[[], object]) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < ends_s, "it did not come to that"
        time.sleep(0.01)


@pytest.mark.parametrize("kind", DIRECT)
def test_the_publisher_learns_who_has_which_version(
    kind: type, tmp_path: Path, worker: Callable[..., Worker], heard: list[Event]
) -> None:
    with Publisher(kind(tmp_path / "place"), bypass_cpu=False) as publisher:
        publisher.publish(weights(1), 1, meta={"step": 50, "loss": 0.5})
        publisher.publish(weights(2), 2, meta={"step": True, "global_steps": 51})
        one, other = worker(kind, tmp_path / "place"), worker(kind, tmp_path / "place")
        one.receive(1)
        one.receive(2)
        other.receive(1)
        wait_for(lambda: len(heard) == 5)
        one.kill()
        wait_for(lambda: len(heard) == 6)
        time.sleep(0.1)
    steps = [(event.kind, event.step, event.fields.get("train_step")) for event in heard]
    assert steps[:2] == [("version.published", 1, 50), ("version.published", 2, 51)]
    assert sorted(steps[2:5], key=str) == [
        ("version.received", 1, 50),
        ("version.received", 1, 50),
        ("version.received", 2, 51),
    ]
    assert steps[5:] == [("receiver.left", None, None)], "what ends with the publisher isn't told"
    names = {event.fields["receiver"] for event in heard[2:5]}
    assert len(names) == 2, "a receiver keeps its name"
    assert heard[5].fields["receiver"] == next(event.fields["receiver"] for event in heard[2:5] if event.step == 2)
    assert all(0 < event.fields["seconds"] < TIMEOUT_S for event in heard[:5])


def test_a_version_that_is_only_fetched_is_not_had(tmp_path: Path, heard: list[Event]) -> None:
    with Publisher(SharedMemoryTransport(tmp_path), bypass_cpu=False) as publisher:
        publisher.publish(weights(1), 1)
        into = {"a": torch.zeros(3, 4)}
        with Receiver(SharedMemoryTransport(tmp_path), into=into) as receiver:
            receiver.fetch(timeout=TIMEOUT_S)
            publisher.publish(weights(2), 2)
            receiver.fetch(timeout=TIMEOUT_S)
            receiver.commit()
            wait_for(lambda: len(heard) == 3)
    assert [(event.kind, event.step) for event in heard if event.kind == "version.received"] == [
        ("version.received", 2)
    ]


def test_a_directory_tells_the_receiver_s_process(tmp_path: Path, heard: list[Event]) -> None:
    into = {"a": torch.zeros(3, 4)}
    with Publisher(DirectoryTransport(tmp_path)) as publisher, Receiver(DirectoryTransport(tmp_path), into) as receiver:
        publisher.publish(weights(1), 1, meta={"step": 7})
        receiver.receive(timeout=TIMEOUT_S)
    assert [(event.kind, event.step, event.fields["train_step"]) for event in heard] == [
        ("version.published", 1, 7),
        ("version.received", 1, 7),
    ]
    assert heard[0].path == heard[1].path is not None


def test_the_journal_keeps_it_and_the_page_shows_it(
    tmp_path: Path, worker: Callable[..., Worker], heard: list[Event]
) -> None:
    root = tmp_path / "run"
    config = holdfast.CheckpointConfig(every=None)
    with (
        holdfast.CheckpointManager(root, {"model": torch.nn.Linear(3, 4)}, config=config),
        Publisher(SharedMemoryTransport(tmp_path / "place"), bypass_cpu=False) as publisher,
    ):
        publisher.publish(weights(1), 1, meta={"step": 50})
        one, other = (worker(SharedMemoryTransport, tmp_path / "place") for _ in range(2))
        one.receive(1)
        wait_for(lambda: [line for line in read_journal(open_storage(str(root))) if line["kind"] == "version.received"])
        other.receive(1)
        publisher.publish(weights(2), 2, meta={"step": 60})
        one.receive(2)
        other.kill()
        wait_for(lambda: heard[-1].kind == "receiver.left")
    lines = [line for line in read_journal(open_storage(str(root))) if line["kind"].startswith("version.")]
    assert [(line["kind"], line.get("version"), line.get("step")) for line in lines] == [
        ("version.published", 1, 50),
        ("version.received", None, None),
        ("version.published", 2, 60),
        ("version.received", None, None),
    ], "receivers are told together, and when the run ends"
    first, last = lines[1]["receivers"], lines[3]["receivers"]
    assert [row[1] for row in first] == [1]
    assert {row[0]: row[1] for row in last} == {first[0][0]: 2, next(row[0] for row in last if row[1] is None): None}
    shown = [
        event
        for event in events_of(scan_journal(open_storage(str(root))))
        if event["kind"][:8] in ("version.", "receiver")
    ]
    assert [(event["kind"], event.get("version")) for event in sorted(shown, key=lambda event: event["t"])][:3] == [
        ("version.published", 1),
        ("version.received", 1),
        ("version.published", 2),
    ]
    assert {(event["kind"], event.get("version")) for event in shown[3:]} == {
        ("version.received", 2),
        ("receiver.left", None),
    }


def test_very_many_receivers_do_not_use_up_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "RECEIVERS_AFTER_S", 0.05)
    root = tmp_path / "run"
    with holdfast.CheckpointManager(
        root, {"model": torch.nn.Linear(3, 4)}, config=holdfast.CheckpointConfig(every=None)
    ):
        for version in range(1, 4):
            for receiver in range(1100):
                holdfast.events.emit("version.received", step=version, receiver=f"host:{receiver}:1", seconds=0.1)
            time.sleep(0.3)
    rows = [line["receivers"] for line in read_journal(open_storage(str(root))) if line["kind"] == "version.received"]
    assert [len(some) for some in rows] == [512, 512, 76] * 2, "at once, and all of it again at the end"
    assert {row[1] for some in rows[:3] for row in some} == {1}
    assert {row[1] for some in rows[3:] for row in some} == {3}
