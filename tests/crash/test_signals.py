"""Jobs that are signalled, as schedulers and launchers do: the step they are at is saved, on all ranks, and they end.

What the next start restores is, by a digest of everything that training depends on, what that step was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nursery import Child, Nursery, environment
from processes import Log, engines_of, free_port, is_gone
from torch import nn

import holdfast

SOON_S = 30.0
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("signalled") as found:
        yield found


class Job:
    """A function of signalled.py on one rank or more, its events, and its root."""

    def __init__(self, nursery: Nursery, home: Path, name: str = "train", *, world: int = 1, **arguments: Any) -> None:
        self.home, self.world, self.nursery = home, world, nursery
        self.root = home / "root"
        self.logs = [Log(home / "events", rank) for rank in range(world)]
        self.run = 0
        self.ranks = self.start(name, **arguments)

    def start(self, name: str = "train", **arguments: Any) -> list[Child]:
        self.run += 1
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.world)}
        arguments = {"root": str(self.root), "log": str(self.home / "events"), **arguments}
        return [
            self.nursery.start(
                "signalled",
                name,
                arguments,
                log=self.home / f"run-{self.run}-rank-{rank}",
                env={**place, "RANK": str(rank)} if self.world > 1 else {},
            )
            for rank in range(self.world)
        ]

    def wait_event(self, kind: str, rank: int = 0, count: int = 1) -> dict[str, Any]:
        deadline = time.monotonic() + SOON_S
        while len(found := self.logs[rank].events(kind)) < count:
            assert time.monotonic() < deadline, self.ranks[rank].stderr()
            assert self.ranks[rank].returncode is None, self.ranks[rank].stderr()
            time.sleep(0.005)
        return found[count - 1]

    def check_ended(self, status: int) -> int:
        """All ranks have ended so, soon, with the last step that any of them trained published; returns it."""
        for rank in self.ranks:
            assert rank.wait(SOON_S) == status, rank.stderr()
        steps = [log.events("step")[-1]["step"] for log in self.logs]
        assert steps == [steps[0]] * self.world
        checkpoint = holdfast.open(self.root)
        assert checkpoint.step == steps[0]
        assert checkpoint.verify().ok
        return steps[0]

    def check_resumes(self) -> None:
        """Check that a new start has the same state, bit for bit, on every rank; it is ended by a signal again."""
        was = [log.events("step")[-1] for log in self.logs]
        self.ranks = self.start()
        for rank, log in enumerate(self.logs):
            restored = self.wait_event("restored", rank, count=self.run)
            assert (restored["step"], restored["digest"]) == (was[rank]["step"], was[rank]["digest"])
            assert len(log.events("restored")) == self.run
        self.wait_event("step", count=len(self.logs[0].events("step")) + 3)
        for rank in self.ranks:
            rank.signal(signal.SIGTERM)
        assert self.check_ended(143) > was[0]["step"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_step_being_trained_is_saved_and_resumed(number: signal.Signals, nursery: Nursery, tmp_path: Path) -> None:
    job = Job(nursery, tmp_path)
    job.wait_event("step", count=5)
    engines = engines_of(job.ranks[0].pid)
    job.ranks[0].signal(number)
    assert job.check_ended(128 + number) >= 5
    assert f"{number.name}: saving the current step" in job.ranks[0].stderr()
    deadline = time.monotonic() + SOON_S
    while not all(map(is_gone, engines)):
        assert time.monotonic() < deadline, "an engine has outlived its trainer"
        time.sleep(0.01)
    job.check_resumes()


def test_a_signal_before_the_first_step(nursery: Nursery, tmp_path: Path) -> None:
    job = Job(nursery, tmp_path, mode="before the first step")
    job.wait_event("restored")
    job.ranks[0].signal(signal.SIGTERM)
    assert job.check_ended(143) == 1


def test_a_signal_during_close(nursery: Nursery, tmp_path: Path) -> None:
    job = Job(nursery, tmp_path, "close_slowly")
    job.wait_event("closing")
    for _ in range(2):
        job.ranks[0].signal(signal.SIGTERM)
        time.sleep(0.2)
    assert job.ranks[0].wait(SOON_S) == 143
    assert holdfast.open(job.root).step == 1
    assert job.logs[0].events("closed") == []


def test_a_handler_of_its_own_is_called_and_given_back(nursery: Nursery, tmp_path: Path) -> None:
    job = Job(nursery, tmp_path, mode="own handler", steps=60)
    job.wait_event("step", count=5)
    job.ranks[0].signal(signal.SIGTERM)
    job.wait_event("handler")
    assert job.ranks[0].wait(SOON_S) == 0, job.ranks[0].stderr()
    (closed,) = job.logs[0].events("closed")
    assert closed["given_back"]
    (saved,) = job.logs[0].events("saved")
    assert 5 <= saved["step"] < 60
    assert holdfast.open(job.root).step == saved["step"]


def test_signals_while_the_save_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    """A second signal changes nothing; a third one ends the process, and the engine finishes what was staged."""
    for third in (False, True):
        job = Job(nursery, tmp_path / str(third), "save_slowly")
        job.wait_event("step", count=3)
        job.ranks[0].signal(signal.SIGTERM)
        deadline = time.monotonic() + SOON_S
        while not list(job.root.glob(".*.incomplete/*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)
        job.ranks[0].signal(signal.SIGTERM)
        if not third:
            job.check_ended(143)
            continue
        time.sleep(0.3)
        sent_at = time.monotonic()
        job.ranks[0].signal(signal.SIGTERM)
        assert job.ranks[0].wait(SOON_S) == -signal.SIGTERM
        assert time.monotonic() - sent_at < 1.0
        check_rolled_forward(job)


def test_the_early_signal_of_a_scheduler_is_followed_by_its_last_one(nursery: Nursery, tmp_path: Path) -> None:
    """Slurm's --signal=USR1@60, and then SIGTERM while the save goes on."""
    job = Job(nursery, tmp_path, "save_slowly")
    job.wait_event("step", count=3)
    job.ranks[0].signal(signal.SIGUSR1)
    deadline = time.monotonic() + SOON_S
    while not list(job.root.glob(".*.incomplete/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.ranks[0].signal(signal.SIGTERM)
    job.check_ended(128 + signal.SIGUSR1)


def check_rolled_forward(job: Job) -> None:
    """Check that, after a process was ended when all was staged, the next start publishes what its engine finished."""
    step = job.logs[0].events("step")[-1]["step"]
    assert not list(job.root.glob("step-*"))
    state = {"model": nn.Linear(1024, 768, bias=False)}
    with holdfast.CheckpointManager(job.root, state, config=holdfast.CheckpointConfig()) as manager:
        assert manager.steps() == [step]
        assert manager.restore() == step


def test_the_deadline_ends_the_process(nursery: Nursery, tmp_path: Path) -> None:
    """If the save takes longer than `signal_timeout`, and if training never calls `step`."""
    slow = Job(nursery, tmp_path / "slow", "save_slowly", signal_timeout=0.8)
    stuck = Job(nursery, tmp_path / "stuck", mode="stuck", options={"signal_timeout": 0.8})
    impatient = Job(nursery, tmp_path / "impatient", mode="stuck")
    slow.wait_event("step", count=3)
    stuck.wait_event("stuck")
    impatient.wait_event("stuck")
    for job in (slow, stuck):
        job.ranks[0].signal(signal.SIGTERM)
    for _ in range(3):
        assert impatient.ranks[0].returncode is None
        impatient.ranks[0].signal(signal.SIGTERM)
        time.sleep(0.3)
    for job in (slow, stuck, impatient):
        assert job.ranks[0].wait(10) == -signal.SIGTERM, job.ranks[0].stderr()
    assert "its time is over" in slow.ranks[0].stderr()
    assert "its time is over" in stuck.ranks[0].stderr()
    check_rolled_forward(slow)


def test_child_processes_are_ended_by_their_signals(nursery: Nursery, tmp_path: Path) -> None:
    job = Job(nursery, tmp_path, "end_a_child")
    assert job.ranks[0].wait(SOON_S) == 0, job.ranks[0].stderr()
    assert job.logs[0].events("child")[0]["status"] == -signal.SIGTERM
    assert not list(job.root.glob("step-*"))


@pytest.mark.parametrize("who", [pytest.param((0,), marks=pytest.mark.slow), (1,), (0, 1)])
def test_two_ranks_save_one_step(who: tuple[int, ...], nursery: Nursery, tmp_path: Path) -> None:
    """Whichever of them is signalled, at whatever moment: here while one computes and the other waits for it."""
    job = Job(nursery, tmp_path, world=2, mode="one is late")
    job.wait_event("late", 1)
    for rank in who:
        job.ranks[rank].signal(signal.SIGTERM)
        time.sleep(0.3)
    job.check_ended(143)
    job.check_resumes()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("whom", ["the launcher", pytest.param("one rank", marks=pytest.mark.slow)])
def test_under_torchrun(whom: str, tmp_path: Path) -> None:
    """`torchrun` hands a signal of its own to the process group of each rank, and kills what is left after 30 s."""
    root, events = tmp_path / "root", tmp_path / "events"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--log-dir", str(tmp_path / "logs"), "--redirects", "3"),
        *(str(HERE / "signalled.py"), str(root), str(events)),
    ]
    logs = [Log(events, rank) for rank in range(2)]
    with (tmp_path / "launcher.log").open("w") as log:
        launcher = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not all(len(log.events("step")) > 5 for log in logs):
            assert time.monotonic() < deadline
            assert launcher.poll() is None, (tmp_path / "launcher.log").read_text()
            time.sleep(0.05)
        pids = [log.events("step")[0]["pid"] for log in logs]
        sent_at = time.monotonic()
        os.kill(launcher.pid if whom == "the launcher" else pids[1], signal.SIGTERM)
        status = launcher.wait(60)
        print(f"{whom} signalled: all ended after {time.monotonic() - sent_at:.1f} s, torchrun with status {status}")
        assert status != 0
        assert all(map(is_gone, pids))
    finally:
        launcher.kill()
        launcher.wait()
    steps = [log.events("step")[-1]["step"] for log in logs]
    assert steps[0] == steps[1]
    checkpoint = holdfast.open(root)
    assert checkpoint.step == steps[0]
    assert checkpoint.verify().ok
    said = "".join(path.read_text() for path in (tmp_path / "logs").glob("**/stderr.log"))
    assert said.count(f"SIGTERM: step {steps[0]} was saved") == 2
