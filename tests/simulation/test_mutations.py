"""The simulator finds each promise of the protocol that is broken on purpose; the protocol as it is passes the same."""

from __future__ import annotations

import pytest
from simulator.mutations import MUTATIONS
from simulator.schedule import run_many
from simulator.seams import simulated_system

SEEDS = 150
"""How many schedules a mutation may go unfound; those it is found in are a good deal fewer."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_is_found(mutation, capsys):
    with simulated_system():
        found = None
        with mutation.applied():
            for result in run_many(range(SEEDS), faults=mutation.faults):
                if result.breach is not None and result.breach.invariant in mutation.finds:
                    found = result
                    break
        assert found is not None, f"not found in {SEEDS} schedules"
        for result in run_many(range(found.seed + 1), faults=mutation.faults):
            assert result.breach is None, f"the protocol as it is, seed {result.seed}: {result.breach}"
    with capsys.disabled():
        print(f"\nbroken on purpose: {mutation.name}: found at seed {found.seed}: {found.breach}"[:230])


def test_there_are_enough():
    assert len({mutation.name for mutation in MUTATIONS}) >= 10
