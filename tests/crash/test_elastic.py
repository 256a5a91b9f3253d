"""A job under torchrun whose nodes are lost and come back: it goes on, each time, on as many ranks as there are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_job import made, step_of
from nursery import environment
from processes import children_of, free_port

import holdfast

JOB = Path(__file__).with_name("elastic_job.py")
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torch 2.13's agents wait in vain for each other once a node has come to a job: the address of the store is
told in the first rendezvous only."""
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8"


class Elastic:
    """Agents of torchrun, one a node of one rank each, and what their workers have noted."""

    def __init__(self, home: Path) -> None:
        self.root, self.home, self.agents = home / "root", home, []
        self.port = free_port()

    def start_node(self, *more: str) -> subprocess.Popen[bytes]:
        log = (self.home / f"agent-{len(self.agents)}.log").open("w")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=holdfast"),
            *(
                f"--rdzv-conf={QUICK}",
                "--monitor-interval=0.2",
                *more,
                str(JOB),
                str(self.root),
                str(self.home / "events"),
            ),
        ]
        with log:
            agent = subprocess.Popen(
                command, env=environment(**ENVIRONMENT), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.agents.append(agent)
        return agent

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = []
        for path in self.home.glob("events-*.jsonl"):
            # The last line may be one that is being written, or that a kill has cut off.
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n") and (event := json.loads(line))["event"] == kind:
                    found.append(event)
        return sorted(found, key=lambda event: event["at_s"])

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.said()}"
            time.sleep(0.05)

    def wait_steps(self, world: int, count: int, after: float) -> list[dict[str, Any]]:
        """Wait until ``count`` steps were trained by ``world`` ranks after a time; return them."""

        def those() -> list[dict[str, Any]]:
            return [event for event in self.events("step") if event["world"] == world and event["at_s"] > after]

        self.wait_until(lambda: len(those()) >= count, f"no {count} steps of {world} ranks")
        return those()

    def said(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.home.glob("agent-*.log")))

    def end(self) -> None:
        pids = {event["pid"] for event in self.events("restored")}
        for agent in self.agents:
            agent.kill()
            agent.wait(20)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Elastic]:
    job = Elastic(tmp_path)
    yield job
    job.end()


def losses_alone(steps: int) -> dict[int, str]:
    model, optimizer = made(1)
    torch.set_num_threads(1)
    return {step: step_of(model, optimizer, step).hex() for step in range(1, steps + 1)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_are_lost_and_come_back(elastic: Elastic) -> None:
    first = elastic.start_node()
    elastic.wait_until(lambda: bool(elastic.events("step")), "no step")
    second = elastic.start_node()
    both = elastic.wait_steps(2, 60, after=0.0)
    # The node that came had the other's worker ended by SIGTERM: it saved where it was.
    joined = [event for event in elastic.events("restored") if event["world"] == 2]
    alone = [event for event in elastic.events("step") if event["world"] == 1]
    assert {event["step"] for event in joined} == {alone[-1]["step"]}, elastic.said()

    # A node is lost: its agent and its worker, at once. The other goes on alone from the newest checkpoint.
    workers = {event["pid"] for event in both}
    mine = workers.intersection(children_of(second.pid))
    assert len(mine) == 1
    lost_at = time.monotonic()
    for pid in (second.pid, *mine):
        os.kill(pid, signal.SIGKILL)
    second.wait(20)
    elastic.wait_steps(1, 30, after=lost_at)
    (resumed,) = [event for event in elastic.events("restored") if event["at_s"] > lost_at]
    reached = max(event["step"] for event in elastic.events("step") if event["at_s"] <= resumed["at_s"])
    assert reached - 25 <= resumed["step"] <= reached

    came_at = time.monotonic()
    third = elastic.start_node()
    elastic.wait_steps(2, 30, after=came_at)
    (elastic.home / "events-stop").touch()
    assert first.wait(60) == 0, elastic.said()
    assert third.wait(60) == 0, elastic.said()
    noted: dict[int, set[str]] = {}
    for event in elastic.events("step"):
        noted.setdefault(event["step"], set()).add(event["loss"])
    assert {step: next(iter(values)) for step, values in noted.items()} == losses_alone(max(noted))
    assert all(len(values) == 1 for values in noted.values())  # also of those that were trained again
    newest = holdfast.open(elastic.root)
    assert newest.verify().ok


@pytest.mark.timeout(200)
def test_the_early_signal_of_a_scheduler_goes_through_torchrun(elastic: Elastic) -> None:
    """torchrun itself ends by a signal that it isn't told to pass on, and so does the job."""
    agent = elastic.start_node("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    elastic.wait_until(lambda: len(elastic.events("step")) > 5, "no step")
    agent.send_signal(signal.SIGUSR1)
    agent.wait(60)
    last = elastic.events("step")[-1]["step"]
    assert f"SIGUSR1: step {last} was saved" in elastic.said()
    newest = holdfast.open(elastic.root)
    assert newest.step == last
    assert newest.verify().ok
