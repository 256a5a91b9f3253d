"""Case (k): a checkpoint beside an export at nice 19 on busy cores, where both share an engine and where they don't."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.protocol import Broken, WorkerFailed

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

ENGINES = {"holdfast-one-engine": "one", "holdfast-two-engines": "two", "holdfast-no-export": "none"}
KINDS = ("small", "large")


@dataclass(frozen=True, slots=True)
class Turns:
    """A way of sharing, in the worker of all."""

    name: str
    worker: Worker

    def measure(self) -> dict[str, float]:
        return self.worker.measure("beside", engines=ENGINES[self.name])


def run(bench: Bench) -> None:
    size = bench.size
    for kind in KINDS:
        case = f"beside-{kind}"
        for worker in bench.kept_workers(case, bench.peers(lambda peer: peer.name == "holdfast")):
            try:
                facts = worker.call(
                    "prepare_beside", kind=kind, count=size.beside_tensors, nbytes=size.beside_mib << 20
                )
            except (Broken, WorkerFailed) as error:
                bench.problem(case, worker.name, str(error))
                continue
            bench.results.cases[case] = {"world": 1, **facts[0]}
            everyone: list[Any] = [Turns(name, worker) for name in ENGINES]
            bench.rounds(case, everyone, lambda one: one.measure(), counted=size.beside_rounds)
            bench.attempt(case, worker, "close")
