"""Show what Holdfast is for: kill a training job in the middle of a save, twice, and lose nothing; use what it exports.

    make demo            or            python examples/demo.py --out out/demo

1. `train_lm.py` runs undisturbed on two ranks: curve A. Every few steps it saves a checkpoint and exports the weights
   for Hugging Face, both in the background, from one copy of the state.
2. It runs again, and every process of the job gets SIGKILL while a save is being written. Holdfast's engines live: they
   finish what was already captured, and leave.
3. It is restarted and killed in a save once more, engines included, as when a node loses power.
4. It is restarted and runs to the end: curve B, in three pieces.
5. B's newest export is loaded by `generate.py`, which knows `transformers` only, and writes text.

Every loss of B, those of repeated steps too, must equal A's to the last bit, and so must the final model and optimizer,
read here with nothing but stock `torch.distributed.checkpoint`. So must the logits of what `from_pretrained` has loaded
those of the model that was trained. Otherwise this exits with status 1.
Writes the logs, losses.png, the checkpoints and exports of both runs, and report.html, the page of run B, under OUT.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
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
from demo_jobs import (
    EVERY,
    RUN_TIMEOUT_S,
    STEPS,
    DemoError,
    Job,
    Kill,
    attempts,
    events,
    losses,
    step_of,
)

HERE = Path(__file__).resolve().parent
# A save of this small model takes a fraction of a second: too short to aim at. In the runs that are to be killed each
# engine may write this much a second, so a save takes seconds and the kill falls well inside it.
SLOW_BYTES_PER_S = 5_000_000


@dataclass(frozen=True, slots=True)
class Written:
    """What became of an export in a process of its own that has `transformers` only."""

    directory: Path
    text: str
    logits: torch.Tensor
    """For the prompt; the same, bit for bit, as those of the model that was trained."""


def begin_empty(run: Path) -> None:
    try:
        if run.exists():
            shutil.rmtree(run)
        run.mkdir(parents=True)
    except OSError as error:
        raise DemoError(
            f"{error.filename}: {error.strerror}; choose another directory: python examples/demo.py --out DIRECTORY"
        ) from None


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


def write_from_export(run: Path) -> Written:
    """Load the newest export of ``run`` in another process and let it write; its logits must be the trained model's."""
    trained = torch.load(run / "logits.pt", weights_only=True)
    directory = (run / "hf" / "hf-latest").resolve()
    if directory.name != f"hf-{trained['step']}":
        raise DemoError(
            f"{run}: the newest export is {directory.name}, of a run that ended with step {trained['step']}"
        )
    kept = run / "logits-of-export.pt"
    command = [sys.executable, str(HERE / "generate.py"), str(directory), "--prompt", trained["prompt"]]
    ended = subprocess.run(
        [*command, "--logits", str(kept)],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if ended.returncode:
        raise DemoError(f"{directory}: exit status {ended.returncode} of generate.py\n{ended.stderr[-3000:]}")
    loaded = torch.load(kept, weights_only=True)
    if not torch.equal(loaded["tokens"], trained["tokens"]):
        raise DemoError(f"{directory}: its tokenizer reads the prompt as {loaded['tokens'].tolist()}")
    logits, expected = loaded["logits"], trained["logits"]
    if logits.dtype != expected.dtype or not same_bits({"logits": logits}, {"logits": expected}):
        difference = (logits - expected).abs().max().item()
        raise DemoError(
            f"{directory}: logits of {logits.dtype} {tuple(logits.shape)} differ from those of the trained model, "
            f"{expected.dtype} {tuple(expected.shape)}, by up to {difference:g}"
        )
    return Written(directory, ended.stdout.rstrip("\n"), logits)


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
    starts = [event["first"] for event in of_kind(run, "start")]
    if len(starts) != 3:
        raise DemoError(f"{run}: expected 3 starts in the log, found {len(starts)}")
    return [settle(kill, run, first - 1) for kill, first in zip(kills, starts[1:], strict=True)]


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["event"] == kind]


def table(a: Path, b: Path, kills: list[Kill]) -> None:
    saves, exports, steps = (of_kind(a, kind) for kind in ("saved", "exported", "step"))

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
        ("an export, from the same copy, in", median_ms(exports, "persist_s"), "ms   beside training"),
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


def write_report(run: Path, page: Path) -> None:
    """Write the page of a run: its saves on each rank, what the kills cost, its steps and their tensors."""
    command = [sys.executable, "-m", "holdfast", "report", str(run / "checkpoints"), "-o", str(page), "--stats"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if ended.returncode:
        raise DemoError(f"holdfast report: exit status {ended.returncode}\n{ended.stderr[-3000:]}")


def check_directories(a: Path, b: Path) -> tuple[list[Path], list[Path]]:
    """Checkpoints and exports that both runs have kept; each must be whole, and nothing else may be there."""
    checkpoints = [path for run in (a, b) for path in sorted((run / "checkpoints").glob("step-*"), key=step_of)]
    exports = [path for run in (a, b) for path in sorted((run / "hf").glob("hf-[0-9]*"))]
    damaged = [str(path) for path in checkpoints + exports if not holdfast.open(path).verify().ok]
    if damaged:
        raise DemoError(f"do not verify: {damaged}")
    hidden = [path for run in (a, b) for path in [*run.glob("checkpoints/.step-*"), *run.glob("hf/.hf-*")]]
    if hidden:
        raise DemoError(f"left behind: {hidden}")
    return checkpoints, exports


def check_same(a: Path, b: Path) -> tuple[int, int]:
    """Losses, model and optimizer of both runs must be the same; how many losses and tensors these are."""
    expected, made = losses(a), losses(b)
    differ = [step for step in made if any(loss != expected[step][0] for loss in made[step])]
    if differ or set(made) != set(expected):
        raise DemoError(f"the curves differ at steps {differ or sorted(set(expected) - set(made))}")
    last = f"checkpoints/step-{STEPS}"
    stock_a, stock_b = stock_load(a / last), stock_load(b / last)
    if not same_bits(stock_a, stock_b):
        raise DemoError(f"the checkpoints of step {STEPS} differ")
    captures, saved, exported = of_kind(a, "end")[-1]["captures"], of_kind(a, "saved"), of_kind(a, "exported")
    if not captures == len(saved) == len(exported):
        raise DemoError(f"{captures} copies of the state for {len(saved)} checkpoints and {len(exported)} exports")
    return sum(len(times) for times in made.values()), len(stock_a)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill a training job in the middle of a save, twice, and lose nothing; use what it exports."
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    out = parser.parse_args().out
    a, b = out / "a-uninterrupted", out / "b-killed"
    for run in (a, b):
        begin_empty(run)
    begin = time.monotonic()

    print(f"1. Run A trains on 2 ranks, {STEPS} steps, a checkpoint and an export every {EVERY}: what B has to equal")
    Job(a, "start-1").finish()
    print(
        "2. Run B is the same, killed in the middle of a save, twice: what was captured is published whole, or removed"
    )
    kills = interrupted_run(b)
    print("3. B's newest export writes, loaded by transformers alone in a process of its own: anybody can use it")
    written = write_from_export(b)
    print("\n".join(f"   | {line}" for line in written.text.splitlines()))

    table(a, b, kills)
    plot(out / "losses.png", losses(a), pieces_of(b), kills)
    write_report(b, out / "report.html")
    compared, tensors = check_same(a, b)
    checkpoints, exports = check_directories(a, b)
    (_, positions, words), dtype = written.logits.shape, str(written.logits.dtype).removeprefix("torch.")
    print(f"""
   losses equal bit for bit: {compared} of {compared}, repeated steps included
   final model and optimizer equal bit for bit: {tensors} tensors, read by stock dcp.load
   logits equal bit for bit: {positions} x {words} {dtype}, of the trained model and of what from_pretrained has loaded
   one copy of the state served the checkpoint and the export of each step
   every byte of the {len(checkpoints)} checkpoints and {len(exports)} exports that were kept matches its checksum
   curve: {out / "losses.png"}   export: {written.directory}   {time.monotonic() - begin:.0f} s in all

   look at run B in a browser: {(out / "report.html").resolve().as_uri()}
   or here: {shlex.join([str(Path(sys.executable).with_name("holdfast")), "ls", str(b / "checkpoints")])}""")


if __name__ == "__main__":
    try:
        main()
    except DemoError as error:
        sys.exit(f"demo failed: {error}")
