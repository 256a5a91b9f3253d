"""The runner's end of a worker: start its ranks, tell them what to do, and don't wait for ever. Torch-free.

Guarantees: every call has a deadline; a worker that doesn't answer in time, or dies, is killed with all it has started
and is `Broken` from then on; what it printed is in its log, and the end of that in the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cpu import tree_of

if TYPE_CHECKING:
    from typing_extensions import Self

START_DEADLINE_S = 90.0
HOME = Path(__file__).resolve().parents[1]


class WorkerFailed(Exception):
    """An operation raised in the worker; it lives on."""


class Broken(Exception):
    """The worker is gone."""


class Rank:
    """One process, with a pipe each way."""

    def __init__(self, python: str, spec: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        their_read, self._write = os.pipe()
        self._read, their_write = os.pipe()
        self.log = log
        spec = spec | {"read_fd": their_read, "write_fd": their_write}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [python, "-m", "benchmarks.worker", json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(their_read, their_write),
                env=environment,
                cwd=str(log.parent),
                start_new_session=True,
            )
        os.close(their_read)
        os.close(their_write)
        self._buffer = b""

    def send(self, op: str, args: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is seen when the answer is read
            os.write(self._write, json.dumps({"op": op, "args": args}).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._read], [], [], left_s)[0]:
                raise Broken("did not answer in time")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise Broken(f"ended, exit status {self.process.poll()}: {self.last_words()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return lines[-1][:500] if lines else ""
        return ""

    def kill(self) -> None:
        """With all it has started; returns when it is gone."""
        for pid in reversed(tree_of(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        for descriptor in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Worker:
    """All ranks of one contender, started when this is made. A context manager."""

    def __init__(
        self, name: str, python: str, *, where: str, group: bool, world: int, folder: Path, logs: Path, source: str
    ) -> None:
        self.name, self.world = name, world
        self.alive = True
        logs.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self._ranks = []
        for rank in range(world):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                # Nothing else: a path of the runner's would come before what a peer's own environment has.
                "PYTHONPATH": os.pathsep.join(filter(None, [str(HOME), source])),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            spec = {"where": where, "group": group, "folder": str(folder)}
            self._ranks.append(Rank(python, spec, environment, logs / f"{name}-{world}-{rank}.log"))
        self.facts: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Returns when all ranks are up. Raises `WorkerFailed`, `Broken`."""
        self.facts = self._collect(time.monotonic() + START_DEADLINE_S)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def call(self, op: str, *, timeout_s: float = 120.0, **args: Any) -> list[dict[str, Any]]:
        """Have every rank do it, at once; their answers. Raises `WorkerFailed`, `Broken`."""
        if not self.alive:
            raise Broken("was killed before")
        for rank in self._ranks:
            rank.send(op, args)
        return self._collect(time.monotonic() + timeout_s)

    def measure(self, op: str, *, timeout_s: float = 180.0, **args: Any) -> dict[str, float]:
        """`call`, as one: the slowest rank's times, CPU added up."""
        answers = self.call(op, timeout_s=timeout_s, **args)
        return merged(answers)

    def stop(self) -> None:
        """Let it end, then make sure; never raises."""
        if self.alive:
            with contextlib.suppress(Broken, WorkerFailed):
                self.call("close", timeout_s=30.0)
                self.call("stop", timeout_s=10.0)  # it just ends
        self.kill()

    def _collect(self, deadline: float) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        failure: str | None = None
        try:
            for rank in self._ranks:
                answer = rank.receive(deadline)
                if "error" in answer:
                    failure = failure or answer["error"]
                    # Its peers may be waiting for it in a collective.
                    deadline = min(deadline, time.monotonic() + 20.0)
                answers.append(answer.get("result", {}))
        except Broken as error:
            self.kill()
            raise Broken(failure or str(error)) from error
        if failure is not None:
            raise WorkerFailed(failure)
        return answers

    def kill(self) -> None:
        """End it now, with all it has started."""
        if self.alive:
            self.alive = False
            for rank in self._ranks:
                rank.kill()


def merged(answers: list[dict[str, Any]]) -> dict[str, float]:
    """One sample from all ranks': the slowest time, the lowest pace, the sum of CPU seconds."""
    found: dict[str, float] = {}
    for name in answers[0]:
        values = [answer[name] for answer in answers if name in answer]
        if name == "cpu_s":
            found[name] = sum(values)
        elif name == "pace":
            found[name] = min(values)
        elif len(values) == 1 or not isinstance(values[0], (int, float)):
            found[name] = values[0]
        else:
            found[name] = max(values)
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
