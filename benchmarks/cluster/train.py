"""Train a recipe's model with saves every few steps, and measure what they cost. Run again, it goes on where it stood.

    torchrun --nproc-per-node=8 -m benchmarks.cluster.train --recipe llama-8b --out /shared/run --which reference

Each period of ``--every`` steps begins with a lazy save. The first half of its steps is timed as the block *with* a
save, the second half as the block *without*, if the save has ended by then on every rank (blocks where it has not are
counted and left out). Between periods, off the clock, the state is fingerprinted and the raw disk measured, so that
all of them meet the same moods of the machine. Nothing waits for the device or another rank within a block.

``--crash-at STEP`` kills every rank by SIGKILL after that step. Fingerprints and losses, in OUT/WHICH/log.jsonl and in
the part for the report, are what tells whether a run that was killed and resumed is the run that was not.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.cluster.job import Job, loss_of, options, start
from benchmarks.cluster.limits import RawWriter
from benchmarks.cluster.parallel import Layout
from benchmarks.cluster.shards import fingerprints, local_of, tensors_in

import holdfast

if TYPE_CHECKING:
    import argparse


class Log:
    """Lines of JSON that outlive a kill; rank 0 writes them."""

    def __init__(self, job: Job, run: str) -> None:
        self.path = job.out / run / "log.jsonl"
        self._rank = job.rank
        if self._rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **fields: Any) -> None:
        if self._rank == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class Trainer:
    """The loop, and its clock."""

    def __init__(self, job: Job, args: argparse.Namespace, state: dict[str, Any], log: Log) -> None:
        self.job, self.args, self.state, self.log = job, args, state, log
        self.batch = args.batch or job.recipe.batch
        self.length = args.length or job.recipe.length
        self.losses: dict[int, torch.Tensor] = {}
        self.handles: list[holdfast.SaveHandle] = []
        self.periods: list[dict[str, Any]] = []
        nbytes = sum(local_of(tensor).nbytes for tensor in state["model"].state_dict().values())
        raw = job.out / args.which / f"raw-{job.rank}"
        self.raw = RawWriter(raw, min(3 * nbytes, int(args.raw_mib * (1 << 20))))

    def step(self, step: int) -> None:
        state, tokens = self.state, self.job.tokens(step, self.batch, self.length)
        loss = loss_of(state["model"], tokens)
        loss.backward()
        state["optimizer"].step()  # a hook in here waits until the last save has its copy of what this changes
        state["optimizer"].zero_grad()
        state["lr_scheduler"].step()
        state["train"]["step"] = step
        state["train"]["tokens"] += tokens.numel() * self.job.world
        self.losses[step] = loss.detach().float()

    def report_losses(self) -> None:
        """Note their means over ranks; also the moment when all ranks have done all they were told to."""
        if not self.losses:
            return
        for step, value in zip(self.losses, self.job.means(torch.stack(list(self.losses.values()))), strict=True):
            self.log.write(event="step", step=step, loss=value.hex())
        self.losses.clear()

    def block(self, steps: range, manager: holdfast.CheckpointManager) -> float:
        """Train ``steps``; the seconds each took."""
        begin = time.perf_counter()
        for step in steps:
            self.step(step)
            if step % self.args.every:  # else the save begins the next period, on its clock
                manager.step(step)
            if step == self.args.crash_at:
                self.crash(step)
        self.report_losses()
        self.job.clock_stops()
        return (time.perf_counter() - begin) / max(1, len(steps))

    def crash(self, step: int) -> None:
        self.report_losses()
        self.job.write_part("crash", step=step)
        self.job.clock_stops()
        os.kill(os.getpid(), signal.SIGKILL)

    def period(self, first: int, manager: holdfast.CheckpointManager) -> None:
        """From the save of step ``first`` to the step before the next; then what is off the clock."""
        half = self.args.every // 2
        middle, end = first + half, first + self.args.every
        self.job.clock_stops()
        begin = time.perf_counter()
        handles = manager.step(first)
        called_s = time.perf_counter() - begin
        saving_s = self.block(range(first + 1, middle + 1), manager) + called_s / half
        clean = all(handle.done() for handle in handles)
        quiet_s = self.block(range(middle + 1, end + 1), manager)
        self.handles += handles
        manager.wait()
        self.job.clock_stops()
        figures = {"step": first, "saving_s": saving_s, "quiet_s": quiet_s, "clean": clean}
        self.periods.append({**figures, "raw_s": self.raw.seconds(), "raw_bytes": self.raw.nbytes})
        self.job.clock_stops()

    def fingerprint(self, step: int) -> None:
        """Note what the state is now, which is what was or will be saved of this step."""
        found = fingerprints(tensors_in(self.state["model"], self.state["optimizer"]), self.job.device)
        objects = {"train": dict(self.state["train"]), "lr_scheduler": self.state["lr_scheduler"].state_dict()}
        self.log.write(event="state", step=step, tensors=found, objects=objects)

    def run(self, manager: holdfast.CheckpointManager, resumed: int) -> None:
        steps, every = self.args.steps, self.args.every
        if resumed:
            self.fingerprint(resumed)
        self.block(range(resumed + 1, min(steps, (resumed // every + 1) * every) + 1), manager)
        for first in range((resumed // every + 1) * every, steps + 1, every):
            self.fingerprint(first)
            if first < steps:
                self.period(first, manager)
            else:
                self.handles += manager.step(first)
        manager.wait()


def figures_of(trainer: Trainer) -> dict[str, Any]:
    """Of all ranks: for each save and period the slowest, and all bytes together."""
    job = trainer.job
    saves = []
    for index, handle in enumerate(trainer.handles):
        stats = handle.stats
        mine = {key: getattr(stats, key) for key in ("bytes", "stall_s", "staging_s", "persist_s", "commit_s")}
        ranks = job.from_all(mine)
        slowest = {key: max(row[key] for row in ranks) for key in mine if key != "bytes"}
        total, largest = sum(row["bytes"] for row in ranks), max(row["bytes"] for row in ranks)
        saves.append({"step": trainer.handles[index].step, "bytes": total, "bytes_largest": largest, **slowest})
    periods = []
    for mine in trainer.periods:
        ranks = job.from_all(mine)
        slowest = {key: max(row[key] for row in ranks) for key in ("saving_s", "quiet_s", "raw_s", "raw_bytes")}
        periods.append({"step": mine["step"], "clean": all(row["clean"] for row in ranks), **slowest})
    memory = job.from_all(job.memory())
    peak = {key: max(row[key] for row in memory) for key in memory[0]}
    return {"saves": saves, "periods": periods, "memory": peak, "raw_direct": trainer.raw.direct}


def train(job: Job, args: argparse.Namespace) -> None:
    layout = Layout(job.world, args.replicas, args.experts)
    state = job.training_state(layout, seed=args.seed, lr=args.lr)
    log = Log(job, args.which)
    trainer = Trainer(job, args, state, log)
    config = holdfast.CheckpointConfig(every=args.every, keep=holdfast.Keep(last=1), in_flight=args.in_flight)
    with holdfast.CheckpointManager(job.out / args.which / "checkpoints", state, config=config) as manager:
        job.clock_stops()
        begin = time.perf_counter()
        resumed = manager.restore() or 0
        job.clock_stops()
        load_s = time.perf_counter() - begin
        log.write(event="start", first=resumed + 1, resumed=resumed, world=job.world)
        trainer.run(manager, resumed)
    figures = figures_of(trainer)
    with torch.no_grad():
        probe = float(loss_of(state["model"].eval(), job.probe()))
    shared = {"steps": args.steps, "every": args.every, "batch": trainer.batch, "length": trainer.length}
    laid_out = {"replicas": layout.replicas, "shards": layout.shards, "experts": layout.experts}
    parameters = sum(param.numel() for param in state["model"].parameters())
    if job.rank == 0:
        told = {"events": log.events(), "resumed": resumed, "load_s": load_s, "probe_loss": probe}
        job.write_part(args.which, **shared, layout=laid_out, parameter_count=parameters, **figures, **told)


def main() -> None:
    parser = options("Train a recipe's model with saves every few steps, and measure what they cost.")
    parser.add_argument("--which", choices=("reference", "interrupted"), required=True)
    parser.add_argument("--every", type=int, default=20, help="save every so many steps; even")
    parser.add_argument("--steps", type=int, default=160, help="train until this step; a multiple of --every")
    parser.add_argument("--crash-at", type=int, default=None, help="SIGKILL every rank after this step")
    parser.add_argument("--batch", type=int, default=None, help="sequences a rank takes each step")
    parser.add_argument("--length", type=int, default=None, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--in-flight", type=int, default=1, help="captures a rank has host memory for")
    parser.add_argument("--raw-mib", type=float, default=1024.0, help="at most so much is written to measure the disk")
    args = parser.parse_args()
    if args.every < 2 or args.every % 2 or args.steps % args.every:
        parser.error("--every must be even, and --steps a multiple of it")
    job = start(args)
    train(job, args)
    job.end()


if __name__ == "__main__":
    main()
