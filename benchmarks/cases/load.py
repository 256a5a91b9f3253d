"""Case (f): loads with the files in the page cache and out of it, and 1 % of the largest tensor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.files import cached_fraction, evict, remove, warm
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

CACHES = ("warm", "cold")
QUICK = ("raw", "holdfast", "holdfast-unverified", "dcp-save", "safetensors")


def save_once(bench: Bench, case: str, workers: list[Worker], *, suffix: str = "") -> dict[str, Path]:
    """What each has saved, by name, to be loaded again and again."""
    saved = {}
    for worker in workers:
        path = bench.target(f"kept-{worker.name}-{worker.world}{suffix}")
        if bench.attempt(case, worker, "save", path=str(path), busy="idle", interval_s=0.0) is not None:
            saved[worker.name] = path
    return saved


def load_turn(worker: Worker, path: Path, cache: str, *, check: bool) -> dict[str, Any]:
    """One load with the page cache as asked for."""
    if cache == "warm":
        warm(path)
    else:
        evict(path)
    cached = cached_fraction(path)
    return worker.measure("load", path=str(path), check=check) | {"cached": cached}


def run_loads(
    bench: Bench,
    base: str,
    workers: list[Worker],
    saved: dict[str, Path],
    rounds: int,
    caches: tuple[str, ...] = CACHES,
) -> None:
    """Rounds of loads, warm, then cold; what was loaded is compared in the first and the last."""
    for cache in caches:
        case = f"{base}-{cache}"
        bench.results.cases[case] = dict(bench.results.cases[base]) | {"cache": cache}
        seen: dict[str, int] = {}

        def turn(worker: Worker, cache: str = cache, seen: dict[str, int] = seen) -> dict[str, Any]:
            number = seen[worker.name] = seen.get(worker.name, -1) + 1
            return load_turn(worker, saved[worker.name], cache, check=number in (0, rounds))

        # What verifying costs is seen where nothing else is waited for.
        taking_part = [
            worker
            for worker in workers
            if worker.name in saved and (worker.name != "holdfast-unverified" or cache == caches[0])
        ]
        # Whoever loads from a cold cache is warm itself from the rounds before.
        bench.rounds(case, taking_part, turn, counted=rounds, first=0 if cache == caches[0] else 1)


def run(bench: Bench) -> None:
    peers = bench.peers(lambda peer: peer.loads and (bench.size.thorough or peer.name in QUICK))
    rounds = bench.size.rounds
    bench.make_room()
    with bench.workers("load", peers, bench.language_model()) as workers:
        saved = save_once(bench, "load", [worker for worker in workers if PEERS[worker.name].saves])
        if "holdfast" in saved:
            saved["holdfast-unverified"] = saved["holdfast"]
        try:
            run_loads(bench, "load", workers, saved, rounds)
            if bench.size.thorough:
                _parts(
                    bench, [worker for worker in workers if PEERS[worker.name].parts and worker.name in saved], saved
                )
        finally:
            for path in saved.values():
                remove(path)


def _parts(bench: Bench, workers: list[Worker], saved: dict[str, Path]) -> None:
    """1 % of the rows of the embedding, from a place that moves on."""
    vocab = bench.size.vocab
    rows = max(1, vocab // 100)
    for cache in CACHES:
        case = f"part-{cache}"
        bench.results.cases[case] = {
            "cache": cache,
            "nbytes": 4 * rows * bench.size.hidden,
            "tensors": 1,
            "world": 1,
        }

        def turn(worker: Worker, cache: str = cache) -> dict[str, Any]:
            path = saved[worker.name]
            (warm if cache == "warm" else evict)(path)
            first = time.monotonic_ns() % (vocab - rows)
            return worker.measure(
                "read_part", path=str(path), tensor="model.embed.weight", rows=[first, rows], check=True
            )

        bench.rounds(case, workers, turn, counted=bench.size.rounds, first=0 if cache == CACHES[0] else 1)
