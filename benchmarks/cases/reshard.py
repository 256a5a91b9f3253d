"""Case (f), the other half: what two ranks saved on one, and what one saved on two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.cases.load import CACHES, load_turn, save_once
from benchmarks.files import remove

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

WAYS = ((2, 1, CACHES), (1, 2, CACHES[:1]))
"""Ranks before and after, and whether the page cache is warm: cold, both ways wait for the same disk."""


def run(bench: Bench) -> None:
    peers = bench.peers(lambda peer: peer.reshards or peer.name == "raw")
    bench.make_room()
    state = bench.language_model(layers=max(1, bench.size.layers // 2))
    with (
        bench.workers("reshard", peers, state) as single,
        bench.workers("reshard", peers, dict(state), world=2) as double,
    ):
        saved = {
            1: save_once(bench, "reshard", single, suffix="-reshard"),
            2: save_once(bench, "reshard", double, suffix="-reshard"),
        }
        # The limit has no shards: whoever reads, it is the same bytes.
        if "raw" in saved[1]:
            remove(saved[2]["raw"])
            saved[2]["raw"] = saved[1]["raw"]
        try:
            for before, after, caches in WAYS:
                for cache in caches:
                    _one_way(bench, saved[before], single if after == 1 else double, cache, (before, after))
        finally:
            for path in {*saved[1].values(), *saved[2].values()}:
                remove(path)


def _one_way(bench: Bench, saved: dict[str, Path], workers: list[Worker], cache: str, way: tuple[int, int]) -> None:
    case = f"reshard-{way[0]}-{way[1]}-{cache}"
    bench.results.cases[case] = dict(bench.results.cases["reshard"]) | {"cache": cache, "world": way[1]}
    seen: dict[str, int] = {}

    def turn(worker: Worker) -> dict[str, Any]:
        number = seen[worker.name] = seen.get(worker.name, -1) + 1
        return load_turn(worker, saved[worker.name], cache, check=number == 0)

    taking_part = [worker for worker in workers if worker.alive and worker.name in saved]
    first = 0 if cache == CACHES[0] else 1
    bench.rounds(case, taking_part, turn, counted=bench.size.rounds, first=first)
