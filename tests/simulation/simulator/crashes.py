"""Only one thing goes wrong: at a call of a small schedule, before it or after, power or a process is lost."""

from __future__ import annotations

import functools
import itertools

from simulator.faults import Faults
from simulator.schedule import run_schedule

WORLDS = (
    (1, "", "saves"),
    (1, "renames", "saves"),
    (1, "exchange", "saves"),
    (2, "", "saves"),
    (3, "exchange", "saves"),
    (2, "", "exports"),
    (1, "", "saves to a store"),
    (1, "replaces", "saves to a store"),
    (2, "", "saves to a store"),
)
"""Ranks; how the second save is put in place of the first, or ``""`` for after it; what they do."""


@functools.cache
def small_world(ranks, *, overwrite, does="saves"):
    """Two saves of ``ranks`` ranks, without faults; "exports": one, and an export."""
    exports, objects = does == "exports", does == "saves to a store"

    def draw(rng):
        faults = Faults(rng)
        faults.worlds, faults.saves = [ranks], [1 if exports else 2]
        faults.hosts = ranks if exports else 1
        faults.exports = 1.0 if exports else 0.0
        faults.keep_last = 1
        faults.overwrites = 1.0 if overwrite else 0.0
        faults.exchanges = overwrite == "exchange"
        faults.objects = objects
        faults.foreign = bool(overwrite) and not objects
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
                sim.faults.struck = True
                self.how(sim, job, process)


def cut_power(_sim, job, _process):
    job.power_cut()


def kill_trainers(sim, job, _process):
    for process in job.trainers:
        sim.kill(process)


def kill_one(sim, _job, process):
    sim.kill(process)


POINTS = {"power cut": cut_power, "job killed": kill_trainers, "one killed": kill_one}


def crash_points(how, stride, *, part=0, parts=1):
    """Where, and what came of it, for every ``stride``-th point of every small world; of these every ``parts``-th."""
    for ranks, overwrite, does in WORLDS:
        draw = small_world(ranks, overwrite=overwrite, does=does)
        seed, step = 7 * ranks + bool(overwrite), stride * ranks
        for number in itertools.count(1 + seed % step + part * step, parts * step):
            for after in (False, True):
                strike = Strike(POINTS[how], number, after=after)
                result = run_schedule(seed, faults=draw, on_call=strike)
                if strike.count < number:
                    break
                where = f"{'after' if after else 'before'} call {number}"
                yield f"{ranks} ranks, overwrite {overwrite!r}, {does}, {where}", result
            else:
                continue
            break
