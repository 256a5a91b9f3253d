"""Show what Holdfast is for: kill a training job in the middle of a save, twice, and lose nothing.

    make demo            or            python examples/demo.py --out out/demo

1. `train_lm.py` runs undisturbed on two ranks: curve A.
2. It runs again, and every process of the job gets SIGKILL while a save is being written. Holdfast's engines live: they
   finish what was already captured, and leave.
3. It is restarted and killed in a save once more, engines included, as when a node loses power.
4. It is restarted and runs to the end: curve B, in three pieces.

Every loss of B, those of repeated steps too, must equal A's to the last bit, and so must the final model and optimizer,
read here with nothing but stock `torch.distributed.checkpoint`. Otherwise this exits with status 1.
Writes the logs, losses.png and the checkpoints of both runs under OUT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import holdfast

HERE = Path(__file__).resolve().parent
STEPS, EVERY = 40, 8
RUN_TIMEOUT_S = 180.0
# A save of this small model takes a fraction of a second: too short to aim at. In the runs that are to be killed each
# engine may write this much a second, so a save takes seconds and the kill falls well inside it.
SLOW_BYTES_PER_S = 5_000_000


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
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-30:])

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


def settle(kill: Kill, run: Path, resumed_from: int) -> Kill:
    """Say what the start after a kill did with the save it had hit."""
    left = [path.name for path in attempts(run) if step_of(path) == kill.saving_step]
    if resumed_from == kill.saving_step:
        outcome = "rolled forward"
    elif left:
        outcome = "LEFT BEHIND"
    else:
        outcome = "removed"
    return Kill(
        kill.engines_too, kill.processes, kill.at_step, kill.saving_step, kill.bytes_on_disk, outcome, resumed_from
    )


def stock_load(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by stock PyTorch alone."""
    metadata = dcp.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # said in spite of no_dist
        dcp.load(state, checkpoint_id=str(directory), no_dist=True)
    return state


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return one.keys() == other.keys() and all(torch.equal(raw(one[name]), raw(other[name])) for name in one)


def plot(path: Path, a: dict[int, list[str]], pieces: list[dict[int, str]], kills: list[Kill]) -> None:
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    steps = sorted(a)
    axes.plot(
        steps, [float.fromhex(a[step][0]) for step in steps], color="0.85", linewidth=11, label="A: never interrupted"
    )
    # Later pieces are drawn thinner, so that steps made twice show both.
    looks = zip(pieces, ("tab:blue", "tab:orange", "tab:green"), (5.0, 3.0, 1.2), strict=True)
    for number, (piece, color, width) in enumerate(looks, 1):
        made = sorted(piece)
        values = [float.fromhex(piece[step]) for step in made]
        axes.plot(made, values, color=color, linewidth=width, label=f"B, start {number}")
    low, high = axes.get_ylim()
    for kill in kills:
        what = "job and engines" if kill.engines_too else "job"
        lines = [f"SIGKILL: {what}", f"in the save of step {kill.saving_step}", f"resumed from {kill.resumed_from}"]
        axes.axvline(kill.at_step, color="crimson", linestyle="--", linewidth=1)
        axes.annotate(
            "\n".join(f" {line}" for line in lines),
            (kill.at_step, low + 0.97 * (high - low)),
            verticalalignment="top",
            fontsize=8,
            color="crimson",
        )
    axes.set(xlabel="step", ylabel="loss", title="Killed in the middle of a save, twice: the same curve, bit for bit")
    axes.legend(loc="center", bbox_to_anchor=(0.56, 0.6), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def pieces_of(run: Path) -> list[dict[int, str]]:
    """The losses of a run, one mapping for each time it was started."""
    pieces: list[dict[int, str]] = []
    for event in events(run):
        if event["event"] == "start":
            pieces.append({})
        elif event["event"] == "step":
            pieces[-1][event["step"]] = event["loss"]
    return pieces


def interrupted_run(run: Path) -> list[Kill]:
    kills = []
    for number, (not_before, engines_too) in enumerate(((2 * EVERY, False), (4 * EVERY, True)), 1):
        job = Job(run, f"start-{number}", io_limit_bytes_per_s=SLOW_BYTES_PER_S)
        kill = job.kill_in_a_save(not_before=not_before, engines_too=engines_too)
        kills.append(kill)
        what = "the job and its engines" if engines_too else "the job"
        print(
            f"   killed {what} ({kill.processes} processes) after step {kill.at_step}, "
            f"{kill.bytes_on_disk / 1e6:.1f} MB into the save of step {kill.saving_step}"
        )
    Job(run, "start-3").finish()
    starts = [event["first"] for event in events(run) if event["event"] == "start"]
    if len(starts) != 3:
        raise DemoError(f"{run}: expected 3 starts in the log, found {len(starts)}")
    return [settle(kill, run, first - 1) for kill, first in zip(kills, starts[1:], strict=True)]


def table(a: Path, b: Path, kills: list[Kill]) -> None:
    saves = [event for event in events(a) if event["event"] == "saved"]
    steps = [event for event in events(a) if event["event"] == "step"]

    def median_ms(rows: list[dict[str, Any]], key: str) -> float:
        return statistics.median(row[key] for row in rows) * 1e3

    newest = max((a / "checkpoints").glob("step-*"), key=step_of)
    files = list(newest.iterdir())
    on_disk = sum(file.stat().st_size for file in files)
    rows = [
        ("a training step", median_ms(steps, "seconds"), "ms"),
        (
            "training held by a save, all in all",
            median_ms(saves, "stall_s"),
            "ms   (manager.step and the optimizer hook)",
        ),
        ("captured after", median_ms(saves, "staging_s"), "ms"),
        ("persisted by the engine in", median_ms(saves, "persist_s"), "ms"),
        ("agreed and published in", median_ms(saves, "commit_s"), "ms"),
        ("a checkpoint", on_disk / 1e6, f"MB   in {len(files)} files"),
    ]
    print(f"\n   run A, medians over {len(saves)} saves of rank 0 and {len(steps)} steps")
    for what, value, unit in rows:
        print(f"     {what:<38} {value:8.1f} {unit}")

    print("\n   run B      SIGKILL for       in save of   on disk    recovery         resumed from   steps made again")
    made = losses(b)
    for number, kill in enumerate(kills, 1):
        again = sum(1 for step in made if kill.resumed_from < step <= kill.at_step)
        what = "job and engines" if kill.engines_too else "job"
        print(
            f"     kill {number}   {what:<16}  step {kill.saving_step:<4}    {kill.bytes_on_disk / 1e6:5.1f} MB   "
            f"{kill.outcome:<15}  step {kill.resumed_from:<4}      {again:2d}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill a training job in the middle of a save, twice, and lose nothing."
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    out = parser.parse_args().out
    a, b = out / "a-uninterrupted", out / "b-killed"
    for run in (a, b):
        shutil.rmtree(run, ignore_errors=True)
    begin = time.monotonic()

    print(f"1. Training on 2 ranks for {STEPS} steps, a save every {EVERY}: run A")
    Job(a, "start-1").finish()
    print("2. The same again, killed in the middle of a save, twice: run B")
    kills = interrupted_run(b)

    table(a, b, kills)
    expected, made = losses(a), losses(b)
    differ = [step for step in made if any(loss != expected[step][0] for loss in made[step])]
    last = f"checkpoints/step-{STEPS}"
    stock_a, stock_b = stock_load(a / last), stock_load(b / last)
    plot(out / "losses.png", expected, pieces_of(b), kills)

    if differ or set(made) != set(expected):
        raise DemoError(f"the curves differ at steps {differ or sorted(set(expected) - set(made))}")
    if not same_bits(stock_a, stock_b):
        raise DemoError(f"the checkpoints of step {STEPS} differ")
    kept = [path for run in (a, b) for path in sorted((run / "checkpoints").glob("step-*"), key=step_of)]
    damaged = [str(path) for path in kept if not holdfast.open(path).verify().ok]
    if damaged:
        raise DemoError(f"do not verify: {damaged}")
    leftovers = [path for run in (a, b) for path in (run / "checkpoints").glob(".step-*")]
    if leftovers:
        raise DemoError(f"left behind: {leftovers}")
    compared = sum(len(times) for times in made.values())
    print(f"""
   losses equal bit for bit: {compared} of {compared}, repeated steps included
   final model and optimizer equal bit for bit: {len(stock_a)} tensors, read by stock dcp.load
   every byte of the {len(kept)} checkpoints that were kept matches its checksum
   curve: {out / "losses.png"}          {time.monotonic() - begin:.0f} s in all""")


if __name__ == "__main__":
    try:
        main()
    except DemoError as error:
        sys.exit(f"demo failed: {error}")
