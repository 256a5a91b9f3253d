"""Case (e): the first save of a process, cold and after what each offers to warm up, against the later ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.cases.save import save_turn
from benchmarks.peers import PEERS
from benchmarks.protocol import Broken, WorkerFailed

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.peers import Peer

VARIANTS = (
    ("holdfast", False),
    ("holdfast", True),
    ("torch-checkpointing", True),
)
LATER_SAVES = 2
QUICK_ROUNDS = 2


def run(bench: Bench) -> None:
    """Every sample is a process of its own, so each save that is called first is one."""
    state = bench.language_model(layers=max(1, bench.size.layers // 2))
    variants = [
        (peer, warm)
        for name, warm in (VARIANTS if bench.size.thorough else VARIANTS[1:2])
        for peer in bench.peers(lambda p, n=name: p.name == n)
    ]
    if not variants:
        return
    # Whoever fills the state has no part in it.
    with bench.workers("first", [PEERS["raw"]], state):
        rounds = bench.size.rounds if bench.size.thorough else QUICK_ROUNDS
        for number in range(1, rounds + 1):
            for peer, warm in list(variants):
                if number > bench.size.rounds_least and not (warm and peer.name == "holdfast"):
                    continue  # the target is about that one against itself; a start and three saves take a while
                figures = _sample(bench, peer, state, warm=warm)
                if figures is None:
                    variants.remove((peer, warm))
                else:
                    name = f"{peer.name}-warmed" if warm else peer.name
                    bench.record("first", name, number, figures, counted=True)
            bench.say(f"first: round {number} of {rounds}")


def _sample(bench: Bench, peer: Peer, state: dict[str, Any], *, warm: bool) -> dict[str, Any] | None:
    worker = bench.worker("first", peer)
    if worker is None:
        return None
    try:
        worker.call("adopt", state=state)
        if warm:
            worker.call("warm_up")
            time.sleep(bench.size.warm_up_s)  # training goes on meanwhile, for minutes as a rule
        first = save_turn(bench, "first", worker, "idle")
        later = [save_turn(bench, "first", worker, "idle") for _ in range(LATER_SAVES)]
        steady = {name: min(save[name] for save in later) for name in ("held_s", "durable_s")}
        return {
            "held_s": first["held_s"],
            "durable_s": first["durable_s"],
            "steady_held_s": steady["held_s"],
            "steady_durable_s": steady["durable_s"],
            "ratio": first["durable_s"] / steady["durable_s"],
        }
    except (Broken, WorkerFailed) as error:
        bench.problem("first", peer.name, str(error))
        return None
    finally:
        worker.stop()
