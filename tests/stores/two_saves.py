"""Two saves of one path at a time, of which one wins."""

from __future__ import annotations

import threading

import torch

import holdfast
from holdfast.errors import CheckpointExists


def one_of_two_saves_wins(where: str, *, timeout_s: float) -> None:
    """Save two states to ``where`` on two threads: one is there, whole; the other is told that something is."""
    outcomes: dict[int, str] = {}
    barrier = threading.Barrier(2)

    def write(writer: int) -> None:
        state = {"w": torch.full((1000,), float(writer))}
        barrier.wait(30)
        try:
            holdfast.save(state, where, timeout=timeout_s)
            outcomes[writer] = "saved"
        except CheckpointExists:
            outcomes[writer] = "exists"
        except BaseException as error:
            outcomes[writer] = repr(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s)
    assert sorted(outcomes.values()) == ["exists", "saved"], outcomes
    winner = next(writer for writer, outcome in outcomes.items() if outcome == "saved")
    found = {"w": torch.zeros(1000)}
    holdfast.load(found, where, timeout=timeout_s)
    assert torch.equal(found["w"], torch.full((1000,), float(winner)))
    assert holdfast.open(where).verify().ok
