"""What goes wrong in one schedule: drawn once from the seed, before anything runs, but for odds that are asked for
again and again. ``calm`` is a schedule in which nothing does.
"""

from __future__ import annotations

import errno

from simulator.scheduler import Current

STORAGE_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ESTALE)
CHANGING = ("create", "pwrite", "fsync", "rename", "exchange", "link", "mkdir", "unlink", "rmdir")


class Faults:
    """Every attribute is what one schedule does; see `draw`."""

    def __init__(self, rng):
        self.rng = rng
        self.random = rng.random
        self.worlds = [1]
        self.saves = [2]
        self.objects = False
        self.pace = 0.0001
        self.hosts = 1
        self.locks_are_local = False
        self.extended_store = True
        self.keep_last = 2
        self.overwrites = 0.0
        self.exchanges = True
        self.foreign = False
        self.model_only = 0.0
        self.exports = 0.0
        self.slow = 0.0
        self.short_writes = 0.0
        self.repeated = 0.0
        self.delayed_puts = 0.0  # of manifests, seals and voids: given up, and served later
        self.outages = 0.0  # that follow a delayed put of these
        self.store_ahead_s = 0.0  # the store's clock
        self.clocks_ahead_s = {}  # by incarnation
        self.diverged = set()  # (incarnation, save): the last rank is a step ahead of the others
        self.hasty_starts = set()  # incarnations that wait for no lease: they take what is alive for dead
        self.errors = 0.0
        self.refuse_manifest = False
        self.engine_fsync = 0.0  # of its directory: a report may have its name, and be taken back
        self.drop = 0.0
        self.staging = set()
        self.trainer_kills = {}
        self.engine_kills = {}
        self.engine_hangs = {}
        self.pauses = []
        self.job_kills = {}
        self.power_cuts = {}
        self.stores_gone = {}
        self.cuts = []
        self.overlaps = {}
        self.launcher_waits_s = 1.0
        self.final_cut = False
        self.struck = False  # by what `crashes` does
        self.active = True
        self.started_engines = 0

    @property
    def disturbed(self):
        """Whether ranks may learn different things: a Store or a process that is not well."""
        return bool(
            self.drop
            or self.trainer_kills
            or self.pauses
            or self.job_kills
            or self.power_cuts
            or self.stores_gone
            or self.cuts
            or self.overlaps
            or self.engine_kills
            or self.engine_hangs
            or self.errors
            or self.delayed_puts
            or self.outages
            or self.diverged
            or self.hasty_starts
            or self.refuse_manifest
            or self.engine_fsync
            or self.slow
        )

    @property
    def harmless(self):
        """Whether all saves to a bucket must succeed: nothing but lost answers, and starts beside that save nothing."""
        saves_beside = any(self.saves[at + 1] for at in self.overlaps if at + 1 < len(self.saves))
        others = Faults(self.rng)
        vars(others).update(vars(self), overlaps={})
        calm = not (others.disturbed or saves_beside or self.staging or self.overwrites or self.model_only)
        return self.objects and calm

    @classmethod
    def draw(cls, rng):
        faults = cls(rng)
        chance = rng.random
        incarnations = rng.choice((1, 1, 1, 2, 2, 3))
        faults.worlds = [rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4, 5)) for _ in range(incarnations)]
        faults.saves = [rng.choice((1, 1, 1, 2, 2, 3)) for _ in range(incarnations)]
        faults.pace = rng.choice((0.00003, 0.00003, 0.0001, 0.0003))
        faults.hosts = rng.choice((1, 1, 2, 5))
        faults.locks_are_local = faults.hosts > 1 and chance() < 0.5
        faults.extended_store = chance() < 0.7
        faults.keep_last = rng.choice((1, 1, 2, 3))
        faults.overwrites = rng.choice((0, 0, 0.4))
        faults.model_only = rng.choice((0, 0, 0, 0.3))
        faults.launcher_waits_s = rng.choice((0.0, 0.2, 2.0, 60.0))
        faults.final_cut = chance() < 0.6
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
            faults._draw_one(rng.randrange(incarnations))
        if rng.random() < 1 / 3:
            faults._draw_store(len(faults.worlds))
        elif rng.random() < 1 / 4:
            faults.exports = 0.7
        faults.exchanges = rng.random() < 2 / 3
        faults.foreign = not faults.objects and rng.random() < 0.5
        return faults

    def _draw_store(self, incarnations):
        rng = self.rng
        self.objects = True
        if self.repeated or self.errors or rng.random() < 0.4:
            self.repeated = rng.choice((0.01, 0.1))
            self.delayed_puts = rng.choice((0.0, 0.0, 0.3))
            self.outages = rng.choice((0.0, 0.0, 0.5))
        self.store_ahead_s = rng.choice((0.0, -90_000.0, 90_000.0))
        if rng.random() < 0.1:
            self.diverged.add((0, 0))
        for incarnation in range(1, incarnations):
            if rng.random() < 0.3:
                self.clocks_ahead_s[incarnation] = 90_000.0
            if rng.random() < 0.3:
                self.hasty_starts.add(incarnation)

    def _draw_one(self, at):
        rng = self.rng
        world, saves = self.worlds[at], self.saves[at]
        rank = rng.randrange(world)
        call = rng.randrange(1, 40 + 60 * saves)
        soon = rng.random() * (0.02 + 150 * self.pace) * (1 + saves)
        kind = rng.randrange(15)
        if kind <= 1:
            self.trainer_kills[at, rng.choice((0, 0, rank))] = (call, rng.random() < 0.5)
        elif kind == 2:
            self.engine_kills[at, rank] = (rng.randrange(1, 30 * saves), rng.random() < 0.5)
        elif kind == 3:
            self.engine_hangs[at, rank] = (rng.randrange(1, 30 * saves), rng.choice((1.0, 5.0, 20.0)))
        elif kind == 4:
            self.pauses.append((at, rank, rng.random() < 0.5, soon, rng.choice((0.5, 3.0, 12.0))))
        elif kind == 5:
            self.job_kills[at] = soon
        elif kind in {6, 7}:
            self.power_cuts[at] = soon
        elif kind == 8:
            self.stores_gone[at] = (soon, rng.random() < 0.5)
        elif kind == 9:
            self.drop = rng.choice((0.002, 0.02))
        elif kind == 10:
            self.cuts.append((at, rank, soon, rng.choice((0.5, 4.0, 1e9))))
        elif kind == 11:
            self.errors = rng.choice((0.01, 0.05))
            self.repeated = rng.choice((0, 0.1))
            self.refuse_manifest = rng.random() < 0.3
            self.engine_fsync = rng.choice((0, 0, 0.2))
        elif kind == 13 and at + 1 < len(self.worlds):
            self.overlaps[at] = soon
        elif kind == 12:
            self.staging.add((at, rng.randrange(saves), rank))
        else:
            self.slow = rng.choice((0.01, 0.05))
            self.short_writes = 0.3

    # What the simulated system asks. -----------------------------------------------------------------------------

    def latency(self, process, name):
        delay = self.pace * (0.2 + self.random())
        if self.active:
            if self.slow and self.random() < self.slow:
                delay += 2.0 * self.random()
            if process.hang is not None and process.calls == process.hang[0]:
                delay += process.hang[1]
        return delay

    def error(self, process, name, path):
        if self.active and self.errors and name in CHANGING and self.random() < self.errors:
            return self.rng.choice(STORAGE_ERRORS)
        if self.active and self.engine_fsync and path[-1:] == "/" and process.name.startswith("engine"):
            if self.random() >= self.engine_fsync:
                return 0
            Current.sim.sleep(2.0 * self.random())  # a disk that fails has tried for long
            return errno.EIO
        if self.active and self.refuse_manifest and name == "create" and path.endswith("incomplete/holdfast.json"):
            return errno.ENOSPC if self.random() < 0.7 else 0
        return 0

    def short(self, nbytes):
        if self.active and self.short_writes and nbytes > 1 and self.random() < self.short_writes:
            return self.rng.randrange(1, nbytes)
        return nbytes

    def repeated_answer(self, _task):
        return self.active and self.repeated and self.random() < self.repeated

    def request_fate(self, process, what, name):
        """What becomes of a request that changes the bucket, or None; see `objects`."""
        if not self.active:
            return None
        if self.errors and self.random() < self.errors:
            return "busy" if self.random() < 0.7 else "denied"
        decides = what == "put" and name.rpartition("/")[2].startswith("holdfast.")
        if decides and self.refuse_manifest and process.name.startswith("rank") and self.random() < 0.7:
            return "denied"
        if what != "delete" and self.delayed_puts and self.random() < self.delayed_puts * (1.0 if decides else 0.1):
            if decides and self.random() < self.outages:
                process.out_until = Current.sim.now + self.rng.choice(
                    (0.5, 9.0, 20.0)
                )  # the second: right after it was given up
            return "late"
        if self.repeated and self.random() < self.repeated:
            return self.rng.choice(("answer lost", "twice"))
        return None

    def is_out(self, process):
        return self.active and Current.sim.now < process.out_until

    def put_delay(self):
        return self.rng.choice((60 * self.pace, 1.0, 20.0)) * self.random()

    def repeated_exchange(self, task):
        """A request was carried out twice, or carried out and never answered."""
        return self.repeated_answer(task) and self.rng.choice(("twice", "answer lost"))

    def travel(self):
        return self.pace * (0.1 + self.random())

    def verify_delay(self):
        return 60 * self.pace * self.random() if self.random() < 0.3 else 0.0

    def drops(self, _process):
        if self.active and self.drop and self.random() < self.drop:
            return "before" if self.random() < 0.5 else "after"
        return None

    def is_cut_off(self, process):
        return self.active and Current.sim.now < process.cut_until

    def doom_engine(self, process):
        """A fresh engine process: how it will end, if not by itself."""
        trainer = process.__dict__.get("trainer_key")
        if trainer is None or not self.active:
            return
        if trainer in self.engine_kills:
            process.kill_at, process.kill_after = self.engine_kills.pop(trainer)
        if trainer in self.engine_hangs:
            process.hang = self.engine_hangs.pop(trainer)

    def describe(self):
        shown = {
            key: value
            for key, value in vars(self).items()
            if key not in {"rng", "random", "active", "struck", "started_engines"}
            and value not in (0, 0.0, {}, [], set(), None)
        }
        return ", ".join(f"{key}={value}" for key, value in shown.items())
