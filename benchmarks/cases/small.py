"""Case (b): many small tensors, where the work for each counts more than its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.cases.load import run_loads
from benchmarks.cases.save import save_turn
from benchmarks.files import remove
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench

QUICK = ("raw", "holdfast", "dcp-save")
LEFT_OUT = {
    "dcp-thread": "plans as slowly as dcp.save, and hinders a trainer meanwhile",
    "dcp-process": "plans as slowly as dcp.save",
    "torch-checkpointing": "takes a descriptor for every CPU tensor that it stages, and has no more",
    "nvrx": "takes a descriptor for every CPU tensor it hands to its worker",
}


def run(bench: Bench) -> None:
    size = bench.size
    bench.make_room()
    state = bench.state(kind="flat", count=size.small_tensors, each=size.small_bytes)
    peers = bench.peers(
        lambda peer: (
            peer.saves and not peer.apart and peer.name not in LEFT_OUT and (size.thorough or peer.name in QUICK)
        )
    )
    bench.leave_out("small", LEFT_OUT)
    rounds = size.rounds
    with bench.workers("small", peers, state) as workers:
        saved: dict[str, Path] = {}
        try:
            bench.rounds(
                "small", workers, lambda worker: save_turn(bench, "small", worker, "idle", saved), counted=rounds
            )
            loading = [worker for worker in workers if worker.alive and PEERS[worker.name].loads]
            run_loads(bench, "small", loading, saved, rounds, ("warm",))
        finally:
            for path in saved.values():
                remove(path)
