"""Case (d): a real training loop. Blocks with and without saves by turns, so that each block has its own reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

CONTENDERS = ("holdfast", "dcp-thread", "dcp-process", "torch-checkpointing", "nvrx")
QUICK = ("holdfast", "dcp-thread", "torch-checkpointing")
BATCH, LENGTH = 2, 65


def run(bench: Bench) -> None:
    size = bench.size
    shape = {"layers": size.train_layers, "hidden": size.train_hidden, "batch": BATCH, "length": LENGTH}
    wanted = CONTENDERS if size.thorough else QUICK
    workers = bench.kept_workers("train", bench.peers(lambda peer: peer.name in wanted))
    ready = []
    try:
        for worker in workers:
            facts = bench.attempt("train", worker, "prepare_training", shape=shape)
            if facts is not None:
                ready.append(worker)
                bench.results.cases.setdefault("train", {}).update(
                    nbytes=facts["state_nbytes"],
                    parameters=facts["parameters"],
                    iterations=size.train_iterations,
                    every=size.train_every,
                    world=1,
                )
        turns: dict[str, int] = {}

        def turn(worker: Worker) -> dict[str, Any]:
            number = turns[worker.name] = turns.get(worker.name, -1) + 1
            # The order changes, so that neither half has the other's aftermath each time.
            order = (0, size.train_every) if number % 2 else (size.train_every, 0)
            figures = {every: _block(bench, worker, every) for every in order}
            return compared(figures[0], figures[size.train_every])

        bench.rounds("train", ready, turn, counted=size.train_rounds)
    finally:
        for worker in workers:
            if worker.alive:
                bench.attempt("train", worker, "close")


def _block(bench: Bench, worker: Worker, every: int) -> dict[str, Any]:
    path = bench.target(worker)
    return worker.measure("train", iterations=bench.size.train_iterations, every=every, path=str(path))


def compared(without: dict[str, Any], with_saves: dict[str, Any]) -> dict[str, Any]:
    """What a block with saves lost against the one without, next to it in time."""
    saves = with_saves["saves"]
    return {
        "slowdown": with_saves["block_s"] / without["block_s"] - 1.0,
        "lost_s": (with_saves["block_s"] - without["block_s"]) / saves,
        "held_s": with_saves["held_s"],
        "cpu_s": (with_saves["cpu_s"] - without["cpu_s"]) / saves,
        "drain_s": with_saves["drain_s"],
        "iteration_s": without["block_s"] / len(without["iterations_s"]),
        "iteration_with_saves_s": with_saves["block_s"] / len(with_saves["iterations_s"]),
        "iterations_s": with_saves["iterations_s"],
        "iterations_without_s": without["iterations_s"],
    }
