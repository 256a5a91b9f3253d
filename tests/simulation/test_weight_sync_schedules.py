"""Weight sync in schedules drawn from seeds: kills, stops, lost answers, partial failures, restarts, folds, rollbacks.

HOLDFAST_SCHEDULES says how many: half as many as of checkpoints, 1,000 unless it is given; HOLDFAST_FIRST_SEED where
they begin; they are shared out over the processors. ``PYTHONPATH=tests/simulation python -m weight_sync --seed N``
replays one, with a trace.
"""

from __future__ import annotations

import itertools
import os

import pytest
from simulations import command, in_parts, side_by_side, told_by
from weight_sync.mutations import MUTATIONS

SCHEDULES = int(os.environ.get("HOLDFAST_SCHEDULES", "2000")) // 2
FIRST = int(os.environ.get("HOLDFAST_FIRST_SEED", "0"))
TIME_S = 300 + SCHEDULES // 10


@pytest.mark.timeout(TIME_S + 20)
def test_old_or_new_and_never_a_lie(tried):
    parts = os.cpu_count() or 1
    firsts = [FIRST + SCHEDULES * part // parts for part in range(parts + 1)]
    shares = itertools.pairwise(firsts)
    runs = [["--from", str(first), "--count", str(last - first)] for first, last in shares]
    told = told_by(runs, timeout_s=TIME_S, module="weight_sync")
    broken = [facts["broken"] for facts in told if "broken" in facts]
    assert not broken, "\n".join(broken)
    count = sum(facts["schedules"] for facts in told)
    assert count == SCHEDULES
    assert sum(facts["committed"] for facts in told) > SCHEDULES, "hardly anything was received"
    tried["schedules of weight sync simulated"] += count


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", ["14", "38"], ids=["mapped", "over a network, with deltas and fan-out"])
def test_a_schedule_replays_exactly(seed):
    """The order of sets and dicts is of no influence."""
    runs = [command("--seed", seed, hash_seed=hash_seed, module="weight_sync") for hash_seed in ("0", "1")]
    (status, first, errors), (other_status, second, _) = side_by_side(runs, timeout_s=100.0)
    assert (status, other_status) == (0, 0), errors
    assert len(first.splitlines()) > 30
    assert first == second


@pytest.fixture(scope="module")
def hunted():
    told = told_by(in_parts("--mutations"), timeout_s=500.0, module="weight_sync")
    return {facts["mutation"]: facts for facts in told}


@pytest.mark.timeout(520)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_weight_sync_broken_on_purpose_is_found(mutation, hunted, tried):
    facts = hunted[mutation.name]
    print(f"found at seed {facts['seed']}: {facts['breach']}")
    assert facts["seed"] is not None, "not found"
    assert facts["control"] is None, f"weight sync as it is: {facts['control']}"
    tried["ways to break weight sync found by the simulator"] += 1
