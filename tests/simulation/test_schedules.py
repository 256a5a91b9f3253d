"""Whatever goes wrong, and in whatever order: schedules drawn from seeds, and a crash at every call of small ones.

HOLDFAST_SCHEDULES says how many (200), HOLDFAST_FIRST_SEED where they begin; they are shared out over the processors.
``PYTHONPATH=tests/simulation python -m simulator --seed N`` replays one, with a trace.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter

import pytest
from simulations import command, in_parts, side_by_side, told_by

SCHEDULES = int(os.environ.get("HOLDFAST_SCHEDULES", "200"))
FIRST = int(os.environ.get("HOLDFAST_FIRST_SEED", "0"))
EVERY_CALL_FROM = 5_000
TIME_S = 800 + SCHEDULES // 5


@pytest.mark.timeout(TIME_S + 20)
def test_every_invariant_holds_in_every_schedule(tried):
    parts = os.cpu_count() or 1
    firsts = [FIRST + SCHEDULES * part // parts for part in range(parts + 1)]
    shares = itertools.pairwise(firsts)
    runs = [["--from", str(first), "--count", str(last - first)] for first, last in shares]
    told = told_by(runs, timeout_s=TIME_S)
    count = sum(facts.get("schedules", 0) for facts in told)
    broken = [facts["broken"] for facts in told if "broken" in facts]
    assert count == SCHEDULES
    assert not broken, "\n".join(broken)
    tried["schedules simulated"] += count


@pytest.mark.timeout(3600)
def test_a_crash_at_every_call(tried):
    stride = 11 if SCHEDULES < EVERY_CALL_FROM else 1
    told = told_by(in_parts("--crash-points", str(stride)), timeout_s=3500.0)
    points = Counter()
    for facts in told:
        if "how" in facts:
            points[facts["how"]] += facts["points"]
    broken = [facts["broken"] for facts in told if "broken" in facts]
    assert set(points) == {"power cut", "job killed", "one killed"}
    assert min(points.values()) > 40
    assert not broken, "\n".join(broken)
    tried["crash points simulated"] += sum(points.values())


@pytest.fixture(scope="module")
def alone():
    """What came of: no faults; one seed; the same seed, with others before it and with another order of sets."""
    one = command("--seed", "25"), command("--seed", "25", "--after", "5", hash_seed="1")
    return side_by_side([command("--no-faults"), *one], timeout_s=800.0)


def test_without_faults_everything_is_published(alone):
    status, out, errors = alone[0]
    assert status == 0, errors
    assert json.loads(out)["statuses"] == ["published"]


def test_a_seed_replays_exactly(alone):
    """Neither what ran before, nor the order of sets and dicts, is of influence."""
    (first_status, first, first_errors), (status, second, errors) = alone[1:]
    assert (first_status, status) == (0, 0), first_errors + errors
    assert len(first.splitlines()) > 100
    assert first.splitlines() == second.splitlines()
