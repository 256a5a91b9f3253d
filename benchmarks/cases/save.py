"""Case (a): saves of a language model with its AdamW state, beside trainers that do different things meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.files import remove
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

LEFT_OUT_ON_TWO = {
    "torch-checkpointing": "for the memory that each keeps for its copies; see the case of one rank",
    "dcp-process": "the slowest in the case of one rank",
}
KEPT_BESIDE_COMPUTING, KEPT_BESIDE_PYTHON, KEPT_ON_TWO = 2, 1, 1
"""The fastest peers: beside a busy trainer, a turn of the others takes a quarter of a minute."""


def save_turn(
    bench: Bench, case: str, worker: Worker, busy: str, kept: dict[str, Path] | None = None
) -> dict[str, Any]:
    """One save, removed again, unless it is to be ``kept`` there by its contender's name, until its next one."""
    path = bench.target(worker)
    interval_s = bench.interval_s(case) if PEERS[worker.name].asynchronous else 0.0
    try:
        figures = worker.measure("save", path=str(path), busy=busy, interval_s=interval_s)
        if kept is not None:
            kept[worker.name] = path
    finally:
        if kept is None or worker.name not in kept:
            remove(path)
    if worker.name == "raw":
        figures["memcpy_s"] = worker.measure("memcpy")["held_s"]
    return figures


def one_rank(bench: Bench) -> None:
    state = bench.language_model()
    _eager(bench, "eager", state, world=1)
    with bench.workers("save", bench.peers(lambda peer: peer.saves and not peer.apart), state) as workers:
        bench.rounds(
            "save", workers, lambda worker: save_turn(bench, "save", worker, "idle"), counted=bench.size.rounds
        )
        _busy(bench, "save", workers, "compute", _fastest(bench, "save", KEPT_BESIDE_COMPUTING))
        if bench.size.thorough:
            _busy(bench, "save", workers, "python", _fastest(bench, "save-compute", KEPT_BESIDE_PYTHON))


def two_ranks(bench: Bench) -> None:
    bench.make_room()
    state = bench.language_model()
    _eager(bench, "eager-2", state, world=2)
    peers = bench.peers(lambda peer: peer.saves and not peer.apart and peer.shards and peer.name not in LEFT_OUT_ON_TWO)
    bench.leave_out("save-2", LEFT_OUT_ON_TWO)
    with bench.workers("save-2", peers, state, world=2) as workers:
        bench.rounds(
            "save-2", workers, lambda worker: save_turn(bench, "save-2", worker, "idle"), counted=bench.size.rounds
        )
        _busy(bench, "save-2", workers, "compute", _fastest(bench, "save-2", KEPT_ON_TWO))


def _eager(bench: Bench, case: str, state: dict[str, Any], *, world: int) -> None:
    """Apart from the others, for the sake of memory: each that stays holds a copy of the state."""
    peers = bench.peers(lambda peer: peer.name in ("raw", "holdfast-eager"))
    with bench.workers(case, peers, state, world=world) as workers:
        bench.rounds(case, workers, lambda worker: save_turn(bench, case, worker, "idle"), counted=bench.size.rounds)


def _busy(bench: Bench, base: str, workers: list[Worker], kind: str, among: tuple[str, ...] | None = None) -> None:
    """Those who save in the background (of ``among``, if given), beside a trainer that works."""
    case = f"{base}-{kind}"
    bench.results.cases[case] = dict(bench.results.cases[base])
    taking_part = [
        worker
        for worker in workers
        if worker.alive and PEERS[worker.name].asynchronous and (among is None or worker.name in among)
    ]
    bench.rounds(
        case,
        taking_part,
        lambda worker: save_turn(bench, case, worker, kind),
        counted=bench.size.rounds,
        first=1,  # all are warm from the rounds before
    )


def _fastest(bench: Bench, case: str, count: int) -> tuple[str, ...]:
    """Holdfast, and the ``count`` peers whose saves were durable first in ``case``."""
    results = bench.results
    peers = [name for name in results.contenders(case) if name != "holdfast" and PEERS[name].asynchronous]
    peers.sort(key=lambda name: min(results.values(case, name, "durable_s")))
    return ("holdfast", *peers[:count])
