"""Case (c): very many tiny tensors. The first save has to plan them all; later ones must not look at them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.cases.save import save_turn

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.protocol import Worker

EACH_BYTES = 256
LEFT_OUT = {"dcp-save": "over a minute each; its time grows with the count, as in the case of many small tensors"}
STEADY_SAVES = 3


def run(bench: Bench) -> None:
    state = bench.state(kind="flat", count=bench.size.many_tensors, each=EACH_BYTES)
    peers = bench.peers(lambda peer: peer.name == "holdfast" or (not bench.size.thorough and peer.name in LEFT_OUT))
    if bench.size.thorough:
        bench.leave_out("many", LEFT_OUT)

    def turn(worker: Worker) -> dict[str, Any]:
        # A fresh manager, so that the first save is one.
        start = worker.measure("adopt", state=state, timeout_s=120.0)["start_s"] if worker.name == "holdfast" else 0.0
        first = save_turn(bench, "many", worker, "idle")
        figures = {f"first_{name}": value for name, value in first.items()} | {"start_s": start}
        if worker.name != "holdfast":  # nothing is kept from one to the next
            return figures | first
        later = [save_turn(bench, "many", worker, "idle") for _ in range(STEADY_SAVES)]
        middle = {
            name: sorted(save[name] for save in later)[STEADY_SAVES // 2]
            for name in ("held_s", "call_s", "update_wait_s", "durable_s", "cpu_s", "staging_s")
        }
        return figures | middle

    with bench.workers("many", peers, state) as workers:
        bench.rounds("many", workers, turn, counted=bench.size.rounds, first=1)
