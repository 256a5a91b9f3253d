"""Whatever goes wrong, and in whatever order: schedules drawn from seeds, and a crash at every call of small ones.

HOLDFAST_SCHEDULES says how many (200), HOLDFAST_FIRST_SEED where they begin; they are shared out over the processors.
``PYTHONPATH=tests/simulation python -m simulator --seed N`` replays one, with a trace.
"""

from __future__ import annotations

import itertools
import os
import subprocess

import pytest
from simulations import command, told_by

SCHEDULES = int(os.environ.get("HOLDFAST_SCHEDULES", "200"))
FIRST = int(os.environ.get("HOLDFAST_FIRST_SEED", "0"))
EVERY_CALL_FROM = 5_000
TIME_S = 300 + SCHEDULES // 5


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
    told = told_by([["--crash-points", str(stride)]], timeout_s=3500.0)
    points = {facts["how"]: facts["points"] for facts in told if "how" in facts}
    broken = [facts["broken"] for facts in told if "broken" in facts]
    assert set(points) == {"power cut", "job killed", "one killed"}
    assert min(points.values()) > 40
    assert not broken, "\n".join(broken)
    tried["crash points simulated"] += sum(points.values())


def test_without_faults_everything_is_published():
    (told,) = told_by([["--no-faults"]], timeout_s=100.0)
    assert told["statuses"] == ["published"]


def test_a_seed_replays_exactly():
    """Neither what ran before, nor the order of sets and dicts, is of influence."""
    traces = [
        subprocess.run(**command("--seed", "25", *more, hash_seed=seed), capture_output=True, text=True, check=False)
        for seed, more in (("0", ()), ("1", ("--after", "5")))
    ]
    assert [trace.returncode for trace in traces] == [0, 0], traces[0].stderr + traces[1].stderr
    first, second = (trace.stdout.splitlines() for trace in traces)
    assert len(first) > 100
    assert first == second
