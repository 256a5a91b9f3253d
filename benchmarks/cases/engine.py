"""Case (h): how soon Holdfast's engine process is ready, and how large it is before it has anything to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.bench import Bench


def run(bench: Bench) -> None:
    peers = bench.peers(lambda peer: peer.name == "holdfast")
    workers = bench.kept_workers("engine", peers)
    bench.results.cases["engine"] = {"world": 1, "nbytes": 0, "tensors": 0}
    bench.rounds("engine", workers, lambda worker: worker.measure("engine"), counted=bench.size.engine_starts)
