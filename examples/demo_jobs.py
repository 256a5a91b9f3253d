"""Training jobs of the demo: started, watched, and killed in the middle of a save; and what they have left on disk.

Guarantees: a job that does not get where it is expected to is killed at its deadline, and said with the end of its
output. Assumes: Linux, whose /proc says which processes hang on a launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS, EVERY = 40, 8
RUN_TIMEOUT_S = 180.0


class DemoError(Exception):
    """Something did not go as the demo claims it does."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What a kill hit, and what the next start made of it."""

    engines_too: bool
    processes: int
    at_step: int
    saving_step: int
    bytes_on_disk: int
    outcome: str = "?"
    resumed_from: int = 0


class Job:
    """One `torchrun` of train_lm.py on two ranks; its output goes to a file."""

    def __init__(self, run: Path, name: str, *, io_limit_bytes_per_s: int | None = None) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.run, self.output = run, run / f"{name}.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(HERE / "train_lm.py"), "--out", str(run), "--steps", str(STEPS), "--every", str(EVERY)]
        if io_limit_bytes_per_s:
            command += ["--io-limit-bytes-per-s", str(io_limit_bytes_per_s)]
        with self.output.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.deadline = time.monotonic() + RUN_TIMEOUT_S

    def check_deadline(self) -> None:
        if time.monotonic() > self.deadline:
            self.kill(engines_too=True)
            raise DemoError(f"{self.output}: not done after {RUN_TIMEOUT_S:.0f} s\n{self.tail()}")

    def tail(self) -> str:
        """The end of what the ranks said, without what the launcher says of their end."""
        lines = self.output.read_text(errors="replace").splitlines()
        ended = (n for n, line in enumerate(lines) if re.match(r"E\d{4} .*torch/distributed/elastic/", line))
        return "\n".join(lines[: next(ended, None)][-30:])

    def finish(self) -> None:
        while self.process.poll() is None:
            self.check_deadline()
            time.sleep(0.05)
        if self.process.returncode:
            raise DemoError(f"{self.output}: exit status {self.process.returncode}\n{self.tail()}")

    def processes(self) -> list[tuple[int, bool]]:
        """Every process below the launcher, itself first: (pid, whether it is a Holdfast engine)."""
        found, unseen = [], [self.process.pid]
        while unseen:
            pid = unseen.pop(0)
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
            except OSError:
                continue  # it has just ended
            found.append((pid, b"holdfast.engine" in command))
            unseen += [int(child) for task in children for child in task]
        return found

    def kill(self, *, engines_too: bool) -> int:
        """SIGKILL the launcher, the ranks and all that hangs on them; return how many processes that were."""
        victims = [pid for pid, is_engine in self.processes() if engines_too or not is_engine]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        return len(victims)

    def kill_in_a_save(self, *, not_before: int, engines_too: bool) -> Kill:
        """Kill while a save of step ``not_before`` or later is being written, two steps of training into it."""
        while True:
            self.check_deadline()
            if self.process.poll() is not None:
                raise DemoError(f"{self.output}: ended before a save could be hit\n{self.tail()}")
            for attempt in attempts(self.run):
                step, nbytes = step_of(attempt), bytes_below(attempt)
                at_step = max(losses(self.run), default=0)
                if step >= not_before and nbytes > 0 and at_step >= step + 2:
                    return Kill(engines_too, self.kill(engines_too=engines_too), at_step, step, nbytes)
            time.sleep(0.002)


def attempts(run: Path) -> list[Path]:
    """The hidden directories of saves that are not published."""
    return sorted((run / "checkpoints").glob(".step-*.incomplete"))


def step_of(directory: Path) -> int:
    return int(directory.name.lstrip(".").removeprefix("step-").split(".")[0])


def bytes_below(directory: Path) -> int:
    """Bytes of data files that have been written; room is reserved ahead, so their sizes would not tell."""
    total = 0
    for file in directory.glob("*.distcp"):
        with contextlib.suppress(OSError), file.open("rb") as stream:  # files come and go while this looks
            end = 0
            with contextlib.suppress(OSError):  # there is no more data
                while True:
                    begin = os.lseek(stream.fileno(), end, os.SEEK_DATA)
                    end = os.lseek(stream.fileno(), begin, os.SEEK_HOLE)
                    total += end - begin
    return total


def events(run: Path) -> list[dict[str, Any]]:
    """The log of a run; the last line of a killed one may be cut short."""
    found = []
    log = run / "log.jsonl"
    for line in log.read_text().splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def losses(run: Path) -> dict[int, list[str]]:
    """Step → the loss each time the step was made, as hexadecimal floats."""
    found: dict[int, list[str]] = {}
    for event in events(run):
        if event["event"] == "step":
            found.setdefault(event["step"], []).append(event["loss"])
    return found
