"""The simulator finds each promise of the protocol that is broken on purpose; the protocol as it is passes the same."""

from __future__ import annotations

import pytest
from simulations import in_parts, told_by
from simulator.mutations import MUTATIONS


@pytest.fixture(scope="module")
def hunted():
    return {facts["mutation"]: facts for facts in told_by(in_parts("--mutations"), timeout_s=880.0)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_is_found(mutation, hunted, tried):
    facts = hunted[mutation.name]
    print(f"found at seed {facts['seed']}: {facts['breach']}")
    assert facts["seed"] is not None, "not found"
    assert facts["control"] is None, f"the protocol as it is: {facts['control']}"
    tried["ways to break the protocol found by the simulator"] += 1


def test_there_are_enough():
    assert len({mutation.name for mutation in MUTATIONS}) >= 10
