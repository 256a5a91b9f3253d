"""One schedule: from a seed to its verdict."""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import dataclass, field

from simulator.scheduler import Current, Hang, Sim

from weight_sync.faults import Faults
from weight_sync.invariants import Checker, InvariantBroken
from weight_sync.job import Launcher, SimReceiver, start

LIMIT_S = 600.0
LIMIT_EVENTS = 300_000
COLLECT_EVERY = 64


@dataclass
class Result:
    seed: int
    breach: InvariantBroken | None
    faults: str
    committed: int
    events: int
    now: float
    lines: list[str] | None = field(default=None, repr=False)


def run_schedule(seed, *, faults=None, trace=False):
    """Run one schedule; inside `seams.simulated_system`. faults: in place of those that the seed draws."""
    sim = Sim(seed, trace=trace)
    Current.sim = sim
    rng = random.Random(seed ^ 0x5EED)
    sim.faults = Faults.draw(rng) if faults is None else faults(rng)
    sim.faults.rng = sim.rng
    sim.checker = checker = Checker(sim)
    sim.listeners, sim.links, sim.values, sim.files = {}, [], {}, {}
    sim.numbers = itertools.count(1)
    described = str(vars(sim.faults)) if trace else ""
    launcher = Launcher(sim)
    start(sim, "launcher").spawn(launcher.run, name="main")
    for at in sim.faults.cuts:
        sim.later(at, _cut_one)
    checker.receivers = [SimReceiver(sim, launcher, number) for number in range(sim.faults.receivers)]
    start(sim, "end").spawn(_wait_end, sim, launcher, name="main")
    try:
        sim.run(limit_s=LIMIT_S, limit_events=LIMIT_EVENTS)
    except Hang as hang:
        checker.broken("bounded", str(hang))
    for name, task, error in sim.errors:
        checker.broken("bounded", f"{name}/{task} ended with {type(error).__name__}: {error}")
    committed = sum(receiver.version is not None for receiver in checker.receivers)
    errors = [error for _, _, error in sim.errors]
    sim.close()
    for receiver in checker.receivers:
        if receiver.real is not None:
            receiver.real._closed = True  # nobody has to close what its process took along
    result = Result(seed, checker.breach, described, committed, sim.seq, sim.now, sim.lines)
    if trace and errors:
        raise errors[0]
    Current.sim = None
    return result


def _wait_end(sim, launcher):
    """Stop when the last publisher has published, and all receivers that live have caught up."""
    while launcher.final is None or any(not (one.done or one.process.dead) for one in sim.checker.receivers):
        sim.sleep(0.25)
    sim.stop = True


def _cut_one():
    """Break a connection that stands."""
    sim = Current.sim
    open_ = [end for end in sim.links if not (end.closed or end.peer.closed)]
    if open_ and sim.faults.active:
        sim.rng.choice(open_).cut()


def run_many(seeds, **kwargs):
    """The results of many schedules, one after the other; inside `seams.simulated_system`."""
    for count, seed in enumerate(seeds):
        if count % COLLECT_EVERY == 0:
            gc.collect()
            gc.freeze()  # what is there now is the program, not looked at again
        yield run_schedule(seed, **kwargs)
