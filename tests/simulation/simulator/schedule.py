"""One schedule: from a seed to its verdict."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field

from holdfast.storage import object_storage
from simulator.bucket_view import View
from simulator.engine import sim_close  # noqa: F401 - loads the engine's side
from simulator.faults import Faults
from simulator.filesystem import FileSystem
from simulator.invariants import Checker, InvariantBroken
from simulator.job import ROOT, Job
from simulator.objects import Bucket
from simulator.scheduler import Current, Hang, Sim
from simulator.system import System

LIMIT_S = 2_000.0
LIMIT_EVENTS = 400_000
COLLECT_EVERY = 64


@dataclass
class Result:
    seed: int
    breach: InvariantBroken | None
    faults: str
    calls: int
    events: int
    now: float
    lines: list[str] | None = field(default=None, repr=False)
    statuses: tuple[str, ...] = ()
    world: int = 1


def run_schedule(seed, *, faults=None, trace=False, on_call=None):
    """Run one schedule; inside `seams.simulated_system`. faults: in place of those that the seed draws."""
    sim = Sim(seed, trace=trace)
    Current.sim = sim
    sim.faults = faults(sim.rng) if faults is not None else Faults.draw(random.Random(seed ^ 0x5EED))
    sim.faults.rng, sim.faults.random = sim.rng, sim.rng.random
    sim.engines = []
    files = FileSystem()
    sim.system = System(sim, files, sim.faults)
    checker = Checker(sim, files, sim.faults)
    sim.bucket = None
    if sim.faults.objects:
        object_storage._PROVEN.clear()
        sim.bucket = Bucket(sim)
        checker.files = View(sim.bucket, ROOT)
        sim.bucket.watch = checker.put
        files.watch = None
    job = Job(sim, sim.faults, checker)
    launcher = sim.process("launcher", "launcher")
    launcher.spawn(job.launcher, name="main")
    described = sim.faults.describe() if trace else ""
    if on_call is not None:
        sim.on_call = lambda *args: on_call(sim, job, *args)
    try:
        sim.run(limit_s=LIMIT_S, limit_events=LIMIT_EVENTS)
        checker.look_for_defects()
        if checker.breach is None and not job.done:
            checker.broken("bounded", "everything waits, and nothing is left to happen")
    except Hang as hang:
        checker.look_for_defects()
        checker.broken("bounded", str(hang))
    if checker.breach is None:
        sim.stop = False
        try:  # engines that have something left to do
            sim.run(limit_s=sim.now + 400, limit_events=LIMIT_EVENTS)
        except Hang as hang:
            checker.broken("bounded", f"an engine does not end: {hang}")
        checker.finish()
    sim.close()
    statuses = tuple(kind for said in checker.told_by_save.values() for kind, _ in said.values())
    result = Result(
        seed, checker.breach, described, sim.calls, sim.seq, sim.now, sim.lines, statuses, max(job.worlds[:-1])
    )
    Current.sim = None
    return result


def run_many(seeds, **kwargs):
    """The results of many schedules, one after the other; inside `seams.simulated_system`."""
    for count, seed in enumerate(seeds):
        if count % COLLECT_EVERY == 0:
            gc.collect()
            gc.freeze()  # what is there now is the program, not looked at again
        yield run_schedule(seed, **kwargs)
