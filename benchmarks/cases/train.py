"""Case (d): a real training loop with saves, against one that never saved.

The reference is a process of its own that never saves; it trains a block right before every block that has saves in it,
so that what the machine does meanwhile is in both. A contender's own blocks from before its first save would be the
obvious reference, but lie minutes away; later ones without saves are none: who computes on threads of the training
process has slowed it down for good, as OpenMP's threads stop waiting for work once there are more of them than cores.
That two processes of the same loop differ (by where their memory lies) is taken out by blocks before the first save.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.peers import PEERS
from benchmarks.protocol import Broken, WorkerFailed

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

CONTENDERS = ("holdfast", "dcp-thread", "torch-checkpointing", "nvrx")
LEFT_OUT = {"dcp-process": "slows the loop down as dcp-thread does, and half a minute longer"}
QUICK = ("holdfast", "torch-checkpointing")
ALONE = "torch-save"
"""Whose worker trains alone: it starts nothing before its first save, and never gets there."""
BLOCKS_BEFORE = 2
BATCH, LENGTH = 2, 65


def run(bench: Bench) -> None:
    size = bench.size
    shape = {"layers": size.train_layers, "hidden": size.train_hidden, "batch": BATCH, "length": LENGTH}
    wanted = CONTENDERS if size.thorough else QUICK
    peers = bench.peers(lambda peer: peer.name in wanted)
    if size.thorough:
        bench.leave_out("train", LEFT_OUT)
    with bench.fresh_workers("train", [PEERS[ALONE], *peers]) as workers:
        ready = []
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
        if not ready or ready[0].name != ALONE:
            return  # nothing to compare with; why is in the report
        alone, contenders = ready[0], ready[1:]
        before = _before(bench, alone, contenders)

        def turn(worker: Worker) -> dict[str, Any]:
            reference = _block(bench, alone, 0)
            with_saves = _block(bench, worker, size.train_every)
            return compared(before[worker.name], reference, with_saves, _block(bench, worker, 0))

        bench.rounds(
            "train", [worker for worker in contenders if worker.name in before], turn, counted=size.train_rounds
        )


def _before(bench: Bench, alone: Worker, contenders: list[Worker]) -> dict[str, dict[str, float]]:
    """For each, its block before it ever saved, and how long that is in terms of the reference's."""
    blocks: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in contenders}
    references = []
    for _ in range(BLOCKS_BEFORE):
        references.append(_block(bench, alone, 0)["block_s"])
        for worker in contenders:
            try:
                blocks[worker.name].append(_block(bench, worker, 0))
            except (Broken, WorkerFailed) as error:
                bench.problem("train", worker.name, str(error))
                blocks.pop(worker.name)
        contenders = [worker for worker in contenders if worker.name in blocks]
    return {
        name: {
            "block_s": median(block["block_s"] for block in own),
            "cpu_s": median(block["cpu_s"] for block in own),
            "over_reference": median(block["block_s"] for block in own) / median(references),
        }
        for name, own in blocks.items()
    }


def _block(bench: Bench, worker: Worker, every: int) -> dict[str, Any]:
    path = bench.target(worker)
    return worker.measure("train", iterations=bench.size.train_iterations, every=every, path=str(path))


def compared(
    before: dict[str, float], reference: dict[str, Any], with_saves: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """What a block with saves lost against the ``reference`` next to it in time.

    before: as `_before` has it. after: a block without saves of the same process, which has saved by then.
    """
    saves, iterations = with_saves["saves"], len(with_saves["iterations_s"])
    expected_s = reference["block_s"] * before["over_reference"]
    return {
        "slowdown": with_saves["block_s"] / expected_s - 1.0,
        "lost_s": (with_saves["block_s"] - expected_s) / saves,
        "held_s": with_saves["held_s"],
        "cpu_s": (with_saves["cpu_s"] - before["cpu_s"]) / saves,
        "drain_s": with_saves["drain_s"],
        "iteration_s": expected_s / iterations,
        "iteration_with_saves_s": with_saves["block_s"] / iterations,
        "iteration_after_s": after["block_s"] / len(after["iterations_s"]),
        "iterations_s": with_saves["iterations_s"],
        "iterations_after_s": after["iterations_s"],
    }
