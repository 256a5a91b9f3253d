"""Whatever goes wrong, and in whatever order: schedules drawn from seeds, and a crash at every call of small ones.

HOLDFAST_SCHEDULES says how many (400), HOLDFAST_FIRST_SEED where they begin; many are shared out over the processors.
``PYTHONPATH=tests/simulation python -m simulator --seed N`` replays one, with a trace.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.faults import Faults
from simulator.schedule import run_many, run_schedule
from simulator.seams import simulated_system

SCHEDULES = int(os.environ.get("HOLDFAST_SCHEDULES", "400"))
FIRST = int(os.environ.get("HOLDFAST_FIRST_SEED", "0"))
SHARED_FROM = 5_000
HERE = Path(__file__).resolve().parent
SRC = HERE.parents[1] / "src"


def command(*args, hash_seed="0"):
    paths = os.pathsep.join([str(HERE), str(SRC)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed}
    return {"args": [sys.executable, "-m", "simulator", *args], "env": environment}


@pytest.mark.timeout(300 + SCHEDULES // 5)
def test_every_invariant_holds_in_every_schedule(capsys):
    workers = (os.cpu_count() or 1) if SCHEDULES >= SHARED_FROM else 0
    if workers:
        share = -(-SCHEDULES // workers)
        runs = [
            subprocess.Popen(
                **command(
                    "--from", str(FIRST + share * number), "--count", str(min(share, SCHEDULES - share * number))
                ),
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(workers)
        ]
        told = [run.communicate()[0] for run in runs]
        broken = [line for text in told for line in text.splitlines() if line.startswith("seed ")]
        assert all(run.returncode == 0 for run in runs) or broken, told
        count = sum(int(found) for text in told for found in re.findall(r"^(\d+) schedules in", text, re.MULTILINE))
    else:
        with simulated_system():
            results = list(run_many(range(FIRST, FIRST + SCHEDULES)))
        broken = [f"seed {result.seed}: {result.breach}" for result in results if result.breach is not None]
        count = len(results)
    with capsys.disabled():
        print(f"\nschedules simulated: {count}, broken: {len(broken)}")
    assert count == SCHEDULES
    assert not broken, "\n".join(broken)


@functools.cache
def small_world(ranks, *, overwrite):
    """Nothing goes wrong but what the test does: two saves, the second in place of the first or after it."""

    def draw(rng):
        faults = Faults(rng)
        faults.worlds, faults.saves = [ranks], [2]
        faults.keep_last = 1
        faults.overwrites = 1.0 if overwrite else 0.0
        faults.launcher_waits_s = 0.0
        return faults

    return draw


class Strike:
    """Does ``how`` at the ``number``-th call, before it or after."""

    def __init__(self, how, number, *, after):
        self.how, self.number, self.after, self.count = how, number, after, 0

    def __call__(self, sim, job, process, _name, _path, after):
        if after == self.after and sim.faults.active:
            self.count += 1
            if self.count == self.number:
                self.how(sim, job, process)


def crash_points(draw, seed, stride, how):
    """A schedule for each call at which ``how`` is done, before it and after; the results."""
    for number in itertools.count(1 + seed % stride, stride):
        for after in (False, True):
            strike = Strike(how, number, after=after)
            result = run_schedule(seed, faults=draw, on_call=strike)
            if strike.count < number:
                return
            yield result


def cut_power(_sim, job, _process):
    job.power_cut()


def kill_trainers(sim, job, _process):
    for process in job.trainers:
        sim.kill(process)


def kill_one(sim, _job, process):
    sim.kill(process)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [cut_power, kill_trainers, kill_one], ids=["power cut", "job killed", "one killed"])
def test_a_crash_at_every_call(how, capsys):
    stride = 11 if SCHEDULES < SHARED_FROM else 1
    points, broken = 0, []
    with simulated_system():
        for ranks, overwrite in ((1, False), (1, True), (2, False), (3, True)):
            draw = small_world(ranks, overwrite=overwrite)
            for result in crash_points(draw, 7 * ranks + overwrite, stride * ranks, how):
                points += 1
                if result.breach is not None:
                    broken.append(f"{ranks} ranks, overwrite {overwrite}, point {points}: {result.breach}")
    with capsys.disabled():
        print(f"\ncrash points simulated: {points}, broken: {len(broken)}")
    assert points > 40
    assert not broken, "\n".join(broken)


def test_without_faults_everything_is_published():
    with simulated_system():
        for seed, ranks in enumerate((1, 2, 3, 4, 5)):
            result = run_schedule(seed, faults=small_world(ranks, overwrite=False))
            assert result.breach is None
            assert set(result.statuses) == {"published"}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_seed_replays_exactly():
    seed = 25
    with simulated_system():
        list(run_many(range(5)))  # what ran before is of no influence
        here = "\n".join(run_schedule(seed, trace=True).lines)
    there = subprocess.run(**command("--seed", str(seed), hash_seed="1"), capture_output=True, text=True, check=False)
    assert there.returncode == 0, there.stderr
    assert digest(there.stdout[: len(here)]) == digest(here)
