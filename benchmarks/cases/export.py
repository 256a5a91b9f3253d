"""Case (i): Hugging Face weights in bfloat16 of a model that two ranks share, beside what others do for them.

One worker has all contenders, so that a run starts two processes rather than ten; they take turns all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.files import remove
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.peers import Peer
    from benchmarks.protocol import Worker

HOST = "raw"
"""Whose worker it is: it keeps nothing for itself."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A contender in its worker, as far as taking turns goes."""

    name: str
    peer: Peer
    worker: Worker

    def measure(self, op: str, **args: Any) -> dict[str, float]:
        return self.worker.measure(op, name=self.name, **args)


def run(bench: Bench) -> None:
    peers = bench.peers(lambda peer: peer.exports)
    if not peers:
        return
    bench.make_room()
    state = bench.language_model() | {"kind": "weights"}
    with bench.workers("export", [PEERS[HOST]], state, world=2) as workers:
        everyone: list[Any] = [Turns(peer.name, peer, worker) for worker in workers for peer in peers]
        # What they import is no part of a turn.
        contenders = [
            one for one in everyone if bench.attempt("export", one, "prepare_export", where=one.peer.where) is not None
        ]
        seen: set[str] = set()

        def turn(contender: Any) -> dict[str, Any]:
            first = contender.name not in seen
            seen.add(contender.name)
            return export_turn(bench, contender, check=first)

        bench.rounds("export", contenders, turn, counted=bench.size.rounds)


def export_turn(bench: Bench, contender: Turns, *, check: bool) -> dict[str, Any]:
    """One export, removed again."""
    path = bench.target(contender.name)
    try:
        return contender.measure(
            "export",
            path=str(path),
            interval_s=bench.interval_s("export") if contender.peer.asynchronous else 0.0,
            check=check and contender.peer.named,
            timeout_s=120.0,
        )
    finally:
        remove(path)
