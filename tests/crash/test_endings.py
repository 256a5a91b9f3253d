"""However a script ends, it ends soon and as it should, leaves no engine, and what it leaves is settled by the next.

With a save in flight: an end that runs exit handlers publishes it; one that doesn't leaves it to the engine, which
finishes it if the trainer had said that it is right. Nothing is ever left half visible.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from endings import build
from nursery import Child, Nursery
from processes import Log, engines_of, free_port, is_gone

import holdfast

SOON_S = 20.0
ORPHAN_S = 10.0
WORLD = 2
# What no ending may leave on standard error, whatever else it says there.
UGLY = re.compile(r"Exception in thread|Exception ignored|leaked|Fatal Python error|Segmentation|terminate called")


@dataclass(frozen=True)
class Ending:
    """A function of endings.py, and the expected end of the process and of the save of step 1 in flight."""

    name: str
    status: int = 0
    published: bool | None = True
    """Visible when the process has ended. None: visible or not, but settled by the next start."""
    rolled_forward: bool | None = None
    """By the next start. None: not asked."""
    says: str = r"\A\Z"
    """What standard error looks like."""
    signal: signal.Signals | None = None
    """Sent at "ending"."""
    steps: tuple[int, ...] = (1,)
    """What the next start finds, if ``published``."""


INTERRUPTED = r"(?s)\ATraceback .*\n  File .*KeyboardInterrupt\n\Z"
RAISED = r"(?s)\ATraceback .*\n  File .*ValueError: the loss is not a number\n\Z"

ALONE = [
    Ending("just_end"),
    Ending("end_without_a_save", steps=()),
    Ending("close"),
    Ending("close_at_last", steps=(1, 2)),
    Ending("sys_exit", status=3),
    Ending("raise_an_exception", status=1, says=RAISED),
    Ending("raise_an_exception_in_a_with", status=1, says=RAISED),
    Ending("os_exit", status=5, published=None),
    Ending("be_signalled", status=-signal.SIGINT, signal=signal.SIGINT, says=INTERRUPTED),
    Ending("be_signalled_in_a_with", status=-signal.SIGINT, signal=signal.SIGINT, says=INTERRUPTED),
    Ending("be_signalled", status=-signal.SIGTERM, signal=signal.SIGTERM, published=None),
    Ending("be_signalled_while_closing", status=-signal.SIGINT, says=INTERRUPTED, published=None),
    Ending("be_killed_when_staging_is_verified", status=-signal.SIGKILL, published=False, rolled_forward=True),
    Ending("be_killed_before_staging_is_verified", status=-signal.SIGKILL, published=False, rolled_forward=False),
    Ending("end_with_workers_alive"),
    Ending("be_killed_with_workers_alive", status=-signal.SIGKILL, published=None),
    Ending("fork_a_child_that_exits"),
    Ending("fork_a_child_that_closes"),
    Ending("end_after_async_save"),
]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("endings") as found:
        yield found


def start(nursery: Nursery, name: str, tmp_path: Path, *, world: int = 1) -> list[Child]:
    arguments = {"root": str(tmp_path / "root"), "log": str(tmp_path / "events")}
    if world == 1:
        return [nursery.start("endings", name, arguments, log=tmp_path / "rank-0")]
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        nursery.start("endings", name, arguments, log=tmp_path / f"rank-{rank}", env={**place, "RANK": str(rank)})
        for rank in range(world)
    ]


def wait_event(child: Child, log: Log, kind: str) -> float:
    """Wait for an event and return its time on this machine's monotonic clock."""
    deadline = time.monotonic() + 60
    while not (found := log.events(kind)):
        assert time.monotonic() < deadline, child.stderr()
        assert child.returncode is None or log.events(kind), child.stderr()
        time.sleep(0.005)
    return float(found[0]["at_s"])


def wait_gone(engines: list[int], since_s: float) -> None:
    while not all(map(is_gone, engines)):
        assert time.monotonic() - since_s < ORPHAN_S, "an engine has outlived its trainer"
        time.sleep(0.01)


def visible(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def start_again(root: Path, **options: object) -> tuple[holdfast.CheckpointManager, dict[str, object], int | None]:
    """A manager of this process on what a script left; the state it restored, and its step."""
    state = build()
    with torch.no_grad():
        state["model"].weight.zero_()
    state["progress"]["step"] = 0
    manager = holdfast.CheckpointManager(root, state)
    return manager, state, manager.restore()


def check_next_start(root: Path) -> tuple[list[int], list[str]]:
    """Start in this process on what a script left; returns what is published then, and what was rolled forward."""
    manager, state, step = start_again(root)
    with manager:
        assert step == manager.latest()
        if step is not None:
            assert bool((state["model"].weight == 1.0).all())
            assert state["progress"] == {"step": 1}
        steps, rolled_forward = manager.steps(), list(manager.recovered.rolled_forward)
        for published in steps:
            report = holdfast.open(root / f"step-{published}").verify()
            assert report.ok, report
    leftovers = sorted(set(os.listdir(root)) - {".holdfast", "one", *(f"step-{published}" for published in steps)})
    assert leftovers == []
    return steps, rolled_forward


@pytest.mark.parametrize("ending", ALONE, ids=lambda ending: f"{ending.name}-{-ending.status}")
def test_a_script_ends(ending: Ending, nursery: Nursery, tmp_path: Path) -> None:
    root, log = tmp_path / "root", Log(tmp_path / "events", 0)
    child = start(nursery, ending.name, tmp_path)[0]
    ending_at = wait_event(child, log, "ending")
    engines = engines_of(child.pid)
    if ending.signal is not None:
        child.signal(ending.signal)
    status = child.wait(SOON_S)
    ended_at = time.monotonic()
    assert ended_at - ending_at < SOON_S
    assert status == ending.status, child.stderr()
    assert re.search(ending.says, child.stderr()), child.stderr()
    assert not UGLY.search(child.stderr()), child.stderr()
    assert child.stdout() == ""
    seen = visible(root)
    if ending.published is not None:
        assert seen == (list(ending.steps) if ending.published else [])
    steps, rolled_forward = check_next_start(root)
    wait_gone(engines, ended_at)
    assert set(steps) == {*seen, *(int(name.removeprefix("step-")) for name in rolled_forward)}
    if ending.rolled_forward is not None:
        assert rolled_forward == (["step-1"] if ending.rolled_forward else [])


TOGETHER = [
    Ending("close"),
    Ending("just_end"),
    Ending("open_and_close_often", steps=(4, 5, 6)),
    Ending("leave_the_group_before_closing"),
    Ending("leave_the_group_and_end"),
    Ending("raise_an_exception_in_a_with", status=1, says=RAISED),
    Ending("fail_on_one_rank", status=1),
    Ending("fail_on_one_rank_without_with", status=1),
]


@pytest.mark.parametrize("ending", TOGETHER, ids=lambda ending: ending.name)
def test_a_job_ends(ending: Ending, nursery: Nursery, tmp_path: Path) -> None:
    root = tmp_path / "root"
    ranks = start(nursery, ending.name, tmp_path, world=WORLD)
    logs = [Log(tmp_path / "events", rank) for rank in range(WORLD)]
    ending_at = max(wait_event(child, log, "ending") for child, log in zip(ranks, logs, strict=True))
    engines = [engine for child in ranks for engine in engines_of(child.pid)]
    for child in ranks:
        status = child.wait(SOON_S)
        assert status == ending.status, child.stderr()
        assert not UGLY.search(child.stderr()), child.stderr()
    ended_at = time.monotonic()
    assert ended_at - ending_at < SOON_S
    seen = visible(root)
    assert seen == list(ending.steps)
    steps, rolled_forward = check_next_start(root)
    wait_gone(engines, ended_at)
    assert (steps, rolled_forward) == (seen, [])


def test_opening_and_closing_leaves_nothing(tmp_path: Path) -> None:
    def open_and_close(step: int) -> None:
        with holdfast.CheckpointManager(tmp_path, state) as manager:
            manager.restore()
            manager.save(step)

    def held() -> tuple[int, int, list[str]]:
        gc.collect()
        threads = sorted(thread.name for thread in threading.enumerate())
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threads

    state = {"w": torch.ones(1000)}
    open_and_close(1)
    before = held()
    for step in range(2, 22):
        open_and_close(step)
    assert held() == before
    assert engines_of(os.getpid()) == []


def test_nothing_touches_the_root_after_close_returns(tmp_path: Path) -> None:
    """The lock is free then: the old session must not touch the root any more."""
    config = holdfast.CheckpointConfig(io_limit_bytes_per_s=1 << 20)
    manager = holdfast.CheckpointManager(tmp_path, {"w": torch.ones(5 << 20)}, config=config)
    handle = manager.save(1)
    deadline = time.monotonic() + SOON_S
    while handle.stage != "persisting":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(holdfast.DeadlineExceeded):
        manager.close(0.1)
    assert handle.done()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".trash")] == [".holdfast"]
    assert isinstance(handle.exception(), holdfast.SaveFailed)
    assert check_next_start(tmp_path) == ([], [])


def interrupt(*_args: object, **_options: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_start_leaves_the_root_unlocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(10)}
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.saver.startup.recover", interrupt)
        patch.setattr("holdfast.saver.startup.recover_one", interrupt)
        with pytest.raises(KeyboardInterrupt):
            holdfast.CheckpointManager(tmp_path / "root", state)
        with pytest.raises(KeyboardInterrupt):
            holdfast.save(state, tmp_path / "one")
    holdfast.save(state, tmp_path / "one")
    with holdfast.CheckpointManager(tmp_path / "root", state) as manager:
        manager.save(1).result(SOON_S)


@pytest.mark.parametrize(
    "at",
    ["holdfast.saver.saver.SnapshotTaker.take", "holdfast.saver.saver.Staging", "holdfast.saver.saver.Saver._capture"],
)
def test_an_interrupted_save_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    state = {"w": torch.ones(10)}
    manager = holdfast.CheckpointManager(tmp_path, state, config=holdfast.CheckpointConfig(in_flight=1))
    with monkeypatch.context() as patch:
        patch.setattr(at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.save(1)
    manager.wait(SOON_S)
    manager.save(2).result(SOON_S)
    manager.close(SOON_S)
    assert visible(tmp_path) == [2]
