"""Case (j): weights from a trainer to a rollout worker, a version at a time, beside the raw limit of each way.

One worker of two ranks has all contenders: rank 0 publishes, rank 1, which plays a job of its own, receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.peers import DELTA_SHARES, PEERS
from benchmarks.protocol import Broken, WorkerFailed

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

HOST = "raw"
"""Whose worker it is: it keeps nothing for itself."""
TABLES = ("sync-gloo", "sync-memory")
DELTA = "sync-delta"
LAYERS = 12
"""Of a full run: most of its time is for the first touch of memory, of which each contender has as much again."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Turns:
    """A contender in its worker, as far as taking turns goes. ``name``: its row in the table; ``of``: the contender.

    share: of the bytes, changed ahead of each turn.
    """

    name: str
    of: str
    worker: Worker
    share: float = 0.0


def run(bench: Bench) -> None:
    peers = bench.peers(lambda peer: bool(peer.syncs))
    if not peers:
        return
    bench.make_room()
    state = bench.language_model(layers=LAYERS if bench.size.thorough else None) | {"kind": "weights"}
    with bench.workers("sync", [PEERS[HOST]], state, world=2) as workers:
        facts = bench.results.cases.pop("sync", {})
        for worker in workers:
            for table in (*TABLES, DELTA):
                rows = [
                    row
                    for peer in peers
                    if peer.syncs == table and _is_prepared(bench, table, worker, peer.name)
                    for row in _rows(peer.name, worker, delta=peer.where.endswith("Delta"))
                ]
                if rows:
                    bench.results.cases[table] = {name: facts[name] for name in ("nbytes", "tensors")} | {"pair": 1}
                    _rounds(bench, table, rows)
                for name in dict.fromkeys(row.of for row in rows):
                    bench.attempt(table, worker, "drop", name=name)


def _rows(name: str, worker: Worker, *, delta: bool) -> list[Turns]:
    if not delta:
        return [Turns(name, name, worker)]
    return [Turns(f"{name}-{called}", name, worker, share) for called, share in DELTA_SHARES.items()]


def _is_prepared(bench: Bench, table: str, worker: Worker, name: str) -> bool:
    """Have it made, and one version brought: what both sides take for that beside the weights, at most, is a sample."""
    try:
        answers = worker.call("prepare_sync", name=name, where=PEERS[name].where, timeout_s=TIMEOUT_S)
    except (Broken, WorkerFailed) as error:
        bench.problem(table, name, f"prepare_sync: {error}")
        return False
    sides = zip(("publisher_peak_bytes", "receiver_peak_bytes"), answers, strict=True)
    peaks = {side: answer["peak_bytes"] for side, answer in sides if "peak_bytes" in answer}
    if peaks and name.startswith("holdfast"):
        bench.record(table, name, 0, peaks, counted=True)
    bench.say(f"{table}: {name} is ready")
    return True


def _rounds(bench: Bench, table: str, rows: list[Any]) -> None:
    nbytes = bench.results.cases[table]["nbytes"]

    def turn(row: Any) -> dict[str, Any]:
        args = {"name": row.of, "share": row.share, "check": row.name not in seen}
        seen.add(row.name)
        figures = row.worker.measure("sync", timeout_s=TIMEOUT_S, **args)
        return {**figures, "bytes_per_s": nbytes / figures["sync_s"]}

    seen: set[str] = set()
    bench.rounds(table, rows, turn, counted=bench.size.rounds, first=1)  # each has had a turn when it was prepared
