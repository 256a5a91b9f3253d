"""Publisher ranks, receivers, and who starts publishers again."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from greenlet import getcurrent
from simulator.scheduler import Current

from holdfast.coordination.deadline import Deadline
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    FetchCancelled,
    HoldfastError,
)
from holdfast.sync.protocol import PublisherOptions
from holdfast.sync.receiver import Receiver
from holdfast.sync.versions.publishing import BlockPublishing
from holdfast.sync.versions.receiving import BlockReceiving
from weight_sync import fabric
from weight_sync.fabric import step
from weight_sync.invariants import SHAPES

PUBLISH_S = 2.0
JOB_S = 90.0
CATCH_UP_S = 25.0
ATTEMPTS_MAX = 12
HASTE_S = 0.5
"""How long a publish may take when nothing is wrong with any publisher."""
PEER_TIMEOUT_S = 1.0
DELTA_BYTES = 1000
_LATE_S = 1.5
_LATE_NETWORK_S = 10.0
"""The same for a receiver that brings bytes: as long as they come, it goes on, and asks one after the other."""
_OTHERS_S = 15.0
"""How much longer than its timeout a publish may take to learn that others have failed."""


class WeightsGone(Exception):
    """What the user's function of weights raises."""


def start(sim, name):
    """Return a new process, with what the simulation keeps of it."""
    process = sim.process(name, "host")
    process.turns, process.ends, process.images = {}, [], []
    process.receiver = process.job = None
    process.mirrors = {}
    process.stopped_s, process.faults_of_stage = 0.0, None
    process.on_death.append(lambda ended: [end.close() for end in ended.ends])
    return process


def strike(turns, process):
    """Kill or stop a process at some of its turns."""

    def happens(seconds):
        def act(struck):
            sim = Current.sim
            sim.log("killed" if seconds is None else "stopped", f"{struck.name} {seconds or ''}")
            if seconds is None:
                sim.kill(struck)
            else:
                struck.paused_until = max(struck.paused_until, sim.now + seconds)
                struck.stopped_s += seconds

        return act

    process.turns = {turn: happens(seconds) for turn, seconds in turns.items()}


# publishers ----------------------------------------------------------------------------------------------------------


class Job:
    """All ranks of one publisher, until it ends."""

    def __init__(self, sim, number, world, versions, *, start="on"):
        """start: see `Faults.starts`."""
        self.sim, self.number, self.world = sim, number, world
        self.is_below, self.rewinds = start == "refused", start == "rewound"
        self.board = fabric.Board.shared()
        checker = sim.checker
        self.published = [checker.new(self, version) for version in versions]
        for number, one in enumerate(self.published):
            one.tied = sim.random() < sim.faults.ties
            if sim.faults.delta is not None and one.serial > 1 and (number or sim.random() < 0.5):
                one.base = checker.find(one.serial - 1)
        self.plan = [self._planned(sim) for _ in versions]
        self.ranks = []
        self.ended = 0
        self.closes = False

    def _planned(self, sim):
        """What follows a publish, alike on all ranks: how long they train, and what is pinned."""
        rng, faults = sim.rng, sim.faults
        pin = rng.random() < faults.pins
        return rng.random() * faults.pace_s, pin, not pin and rng.random() < faults.pins

    def start(self):
        for rank in range(self.world):
            process = start(self.sim, f"publisher-{self.number}-{rank}")
            process.job, process.rank = self, rank
            process.published, process.pins, process.images_by_block = [], set(), {}
            process.faults_of_stage = process.filling = process.publishing = None
            if self.sim.faults.active:
                strike(self.sim.faults.publisher_turns.get((self.number, rank), {}), process)
            self.ranks.append(process)
            process.spawn(self.run, rank, name="main")

    def run(self, rank):
        process = getcurrent().process
        faults = self.sim.faults
        options = PublisherOptions(
            keep_versions=faults.keep, rewind=self.rewinds, delta=faults.delta, delta_bytes=DELTA_BYTES
        )
        try:
            half = BlockPublishing(
                options,
                rendezvous="run",
                process_group=None,
                peer_timeout_s=PEER_TIMEOUT_S if faults.network else 30.0,
                directory="/run",
                network=bool(faults.network),
            )
        except HoldfastError as error:
            self.sim.log("no publisher", f"{type(error).__name__}: {error}")
            self.ended += 1
            return
        for number, (mine, (pause_s, pin, unpin)) in enumerate(zip(self.published, self.plan, strict=True)):
            self._publish(half, process, mine, number)
            if pin and mine.version in process.published:
                process.pins.add(mine.version)
                try:
                    half.pin(mine.version)
                except CheckpointNotFound:
                    self.sim.checker.broken("kept", f"{process.name} has published {mine.version}, and can't pin it")
            elif unpin and process.pins:
                version = min(process.pins)
                process.pins.discard(version)
                half.unpin(version)
            step()
            self.sim.sleep(pause_s)
        if self.closes:
            half.close()
        self.ended += 1
        process.half = half

    def _publish(self, half, process, mine, number):
        sim, rank = self.sim, process.rank
        process.publishing = mine
        failing, how = sim.faults.stage.get((self.number, number), (None, None)) if sim.faults.active else (None, None)
        process.faults_of_stage = how if failing == rank else None
        earlier = self._earlier(process)
        began, stopped = sim.now, process.stopped_s

        def weights():
            step()
            if process.faults_of_stage == "weights":
                raise WeightsGone("no weights")
            return {name: torch.from_numpy(values) for name, values in mine.values().items()}

        meta = {"serial": mine.serial, "step": mine.version}
        try:
            half.publish(weights, mine.version, Deadline.after(PUBLISH_S), meta)
        except (HoldfastError, WeightsGone) as error:
            mine.failed.add(rank)
            sim.log("not published", f"{mine.version}: {type(error).__name__}: {error}")
            if sim.faults.calm and not (isinstance(error, ConfigError) and self.is_below):
                sim.checker.broken("free", f"{process.name} can't publish, and nothing is wrong with it: {error}")
        else:
            process.published.append(mine.version)
            sim.log("published", f"{mine.version} (serial {mine.serial})")
            if len(mine.staged) < self.world:
                sim.checker.broken("whole", f"{process.name} published {mine.version}, staged by {mine.staged}")
            if earlier is not None and earlier >= mine.version:
                sim.checker.broken("rewind", f"{process.name} published {mine.version} after {earlier}, unasked")
        took = sim.now - began - (process.stopped_s - stopped)
        if sim.faults.calm and took > HASTE_S and self.world == len(self.ranks):
            sim.checker.broken("free", f"{process.name} took {took:.2f} s to publish {mine.version}")
        if took > PUBLISH_S + _OTHERS_S + sum(one.stopped_s for one in self.ranks):
            sim.checker.broken("bounded", f"{process.name} took {took:.2f} s to publish {mine.version}")
        process.faults_of_stage = None

    def _earlier(self, process):
        """Return the newest version of an earlier publisher, if this one has published none."""
        found = self.sim.values.get("newest")
        if found is None or process.rank or process.published or self.rewinds:
            return None
        incarnation, version = msgspec.msgpack.decode(found)
        places = msgspec.msgpack.decode(self.sim.values["publishers"])
        return version if incarnation != places[1] else None

    def kept(self):
        """Return the versions that all ranks keep, also if a publish that hasn't returned has published already."""
        found = []
        for process in self.ranks:
            published = [*process.published, *(() if process.publishing is None else (process.publishing.version,))]
            newest = list(dict.fromkeys(published))[-self.sim.faults.keep :]
            found.append({*newest, *process.pins} & set(process.published))
        return set.intersection(*found) if found and not any(one.dead for one in self.ranks) else set()

    def end(self):
        for process in self.ranks:
            self.sim.end(process, -9)


class Launcher:
    """Starts publishers, one after the other, ends those that lost a rank; the last one is left in peace."""

    def __init__(self, sim):
        self.sim = sim
        self.job = None
        self.last = 0
        """The highest number that was published, or tried."""
        self.final = None

    def run(self):
        sim, faults = self.sim, self.sim.faults
        for number in range(faults.jobs):
            first = self.last + 1
            if faults.starts[number] != "on":
                first = max(1, self.last - sim.rng.randint(0, 3))
            versions = self._numbers(first, faults.publishes[number])
            self._run(Job(sim, number, faults.worlds[number], versions, start=faults.starts[number]))
        faults.active = False
        sim.sleep(4.0)  # what was late has come
        first = self.last + 1 if faults.last_start == "on" else 1
        job = Job(sim, faults.jobs, sim.rng.choice((1, 2)), self._numbers(first, 2), start=faults.last_start)
        self.final = job
        self._run(job, ends=False)

    def _numbers(self, first, count):
        found = []
        for _ in range(count):
            found.append(first)
            first += self.sim.rng.choice((1, 1, 1, 3))
        self.last = max(self.last, found[-1])
        return found

    def _run(self, job, *, ends=True):
        sim = self.sim
        self.job = job
        job.closes = ends and sim.random() < sim.faults.closes
        job.start()
        until = sim.now + JOB_S
        while job.ended < job.world and sim.now < until:
            sim.sleep(0.05)
            if any(process.dead for process in job.ranks):
                sim.sleep(sim.random() * 2.0)
                break
        if ends:
            sim.sleep(sim.random() * 0.5)
            job.end()
        elif job.ended < job.world:
            sim.checker.broken("bounded", "the last publisher does not come to its end")


# receivers -----------------------------------------------------------------------------------------------------------


class Halves:
    """A transport that has nothing but its half of a receiver."""

    def __init__(self, *, fan_out):
        self.fan_out = fan_out

    def publishing(self, options):
        raise NotImplementedError

    def receiving(self):
        return BlockReceiving(rendezvous="run", peer_timeout_s=PEER_TIMEOUT_S, fan_out=self.fan_out)


class SimReceiver:
    """A process with a `Receiver`: what it does with it, and what is live there."""

    def __init__(self, sim, launcher, number):
        self.sim, self.launcher, self.name = sim, launcher, f"receiver-{number}"
        self.arrays = [np.zeros(shape, np.int32) for shape in SHAPES.values()]
        self.into = {name: torch.from_numpy(array) for name, array in zip(SHAPES, self.arrays, strict=True)}
        self.real = None
        self.was_dirty = False
        self.true_version, self.true_bytes = None, self.bytes_now()
        self.has_hand = False
        self.over_network = number in sim.faults.network
        self.halves = Halves(fan_out=number in sim.faults.fan_out)
        self.process = process = start(sim, self.name)
        process.receiver = self
        strike(sim.faults.receiver_turns.get(number, {}), process)
        self.done = False
        hands = number in sim.faults.receiver_hands
        process.spawn(self.run, hands, name="main")
        if hands:
            process.spawn(self.run_hand, name="hand")

    def bytes_now(self):
        return tuple(array.tobytes() for array in self.arrays)

    @property
    def version(self):
        return self.real.version if self.real is not None else None

    @property
    def meta(self):
        return self.real.meta

    @property
    def dirty(self):
        return self.was_dirty or (self.real is not None and self.real.dirty)

    def holds(self, rank, image, serial):
        """Return True if it has fetched what lies in this block, and its lease hasn't ended with its connection."""
        held = None if self.real is None or self.process.dead else self.real._waiting
        if held is None or held.fetched._released or rank >= len(held.fetched._leased):
            return False
        link = held.fetched._connections._links[rank]
        block, _ = held.fetched._leased[rank]
        if block.is_here:
            return False  # it has its own
        if held.fetched.meta["serial"] != serial:
            return False  # it was revoked before
        return block.image is image and not (link.sock.closed or link.sock.peer.closed or link.ended)

    # what a receiver does ----------------------------------------------------------------------------------------

    def fetch(self, version, timeout_s, *, streaming=False):
        """Fetch, and hold what was fetched; return the error if it failed."""
        sim, checker, real = self.sim, self.sim.checker, self.real
        began, stopped = sim.now, self.process.stopped_s
        job = self.launcher.job
        kept = job.kept() if job is not None else set()
        before, was_dirty = self.bytes_now(), self.dirty
        try:
            number = real.fetch(version, streaming=streaming, timeout=timeout_s)
        except HoldfastError as error:
            self._failed(error, version, job, kept)
            return error
        finally:
            took = sim.now - began - (self.process.stopped_s - stopped)
            if took > timeout_s + (_LATE_NETWORK_S if self.over_network else _LATE_S):
                checker.broken("bounded", f"{self.name} had {timeout_s:.2f} s for a fetch, which took {took:.2f} s")
            if not (streaming or self.has_hand or (self.bytes_now() == before and self.dirty == was_dirty)):
                checker.broken("true", f"{self.name} has fetched, and its tensors have changed, or are dirty")
        held = real._held
        if held is not None and held.fetched.version == number:
            checker.fetched(self, held.fetched, version)
        sim.log("fetched", f"{number}")
        return None

    def receive(self, timeout_s):
        """Fetch and commit in one call; return the error if it failed."""
        try:
            number = self.real.receive(timeout=timeout_s)
        except HoldfastError as error:
            self.sim.log("not received", f"{type(error).__name__}: {error}")
            return error
        self.was_dirty = False
        self.sim.log("received", f"{number} {dict(self.meta)}")
        return None

    def _failed(self, error, version, job, kept):
        sim, checker = self.sim, self.sim.checker
        sim.log("not fetched", f"{version}: {type(error).__name__}: {error}")
        if isinstance(error, CheckpointCorrupt) and not any(one.damaged for one in checker.published):
            checker.broken("bounded", f"{self.name} blames memory where nothing is wrong with it: {error}")
        is_kept = job is not None and job is self.launcher.job and version in kept & job.kept()
        if isinstance(error, CheckpointNotFound) and is_kept and sim.faults.calm and not job.number:
            checker.broken("kept", f"{self.name} can't fetch {version}, which is kept: {error}")

    def commit(self):
        """Commit what is held; return the error if it failed."""
        step()
        before = self.bytes_now()
        try:
            number = self.real.commit()
        except HoldfastError as error:
            self.sim.log("not committed", f"{type(error).__name__}: {error}")
            if not isinstance(error, ConfigError) and self.bytes_now() != before and not self.dirty:
                self.sim.checker.broken("true", f"{self.name} failed to commit, has changed, and isn't dirty")
            if isinstance(error, CheckpointCorrupt):
                self.sim.checker.broken("bounded", f"{self.name} blames memory where nothing is wrong with it: {error}")
            return error
        self.sim.log("committed", f"{number} {dict(self.meta)}")
        self.was_dirty = False
        if not self.has_hand and (self.version != number or self.dirty):
            self.sim.checker.broken("true", f"{self.name} committed {number}, and says {self.version}")
        return None

    def _anew(self):
        """Close, and begin with another `Receiver`; what is live stays as it is."""
        self.was_dirty = self.dirty
        self.real.close()
        self.was_dirty = True  # nobody says any more which version is live
        self.real = Receiver(self.halves, self.into)

    # its program -------------------------------------------------------------------------------------------------

    def run(self, hands):
        sim, rng = self.sim, self.sim.rng
        self.has_hand = hands
        self.real = Receiver(self.halves, self.into)
        for _ in range(rng.randint(3, 9)):
            if self.launcher.final is not None:
                break
            self._act(rng, hands)
            step()
        while self.launcher.final is None:
            sim.sleep(0.1)
        self._catch_up()
        self.done = True

    def _act(self, rng, hands):
        sim, what = self.sim, rng.random()
        timeout_s = rng.choice((0.05, 0.3, 1.0))
        if what < 0.45:
            self.fetch(None, timeout_s)
        elif what < 0.55:
            self.receive(timeout_s)
        elif what < 0.7 and sim.checker.published:
            self.fetch(rng.choice(sim.checker.published).version, timeout_s)
        elif what < 0.8:
            sim.sleep(rng.random())
            return
        elif what < 0.85 and not hands:
            self._anew()
        elif what < 0.85 + sim.faults.streams and not hands:
            self.fetch(None, timeout_s, streaming=True)
        if self.real.fetched is not None and rng.random() < sim.faults.again:
            self.fetch(self.real.fetched, timeout_s)
        if self.real.fetched is not None and rng.random() < 0.8:
            if rng.random() < 0.5:
                sim.sleep(rng.random() * 0.5)  # it generates
            self.commit()

    def run_hand(self):
        """On a second thread."""
        sim, rng = self.sim, self.sim.rng
        while self.launcher.final is None:
            sim.sleep(rng.random() * 0.3)
            what, real = rng.random(), self.real
            try:
                if real is None:
                    pass
                elif what < 0.5:
                    self.commit()
                elif what < 0.6:
                    real.cancel()
                else:
                    real.poll()
            except HoldfastError as error:
                sim.log("poll", f"{type(error).__name__}: {error}")

    def _catch_up(self):
        """When all is well again, the newest version can be had."""
        sim = self.sim
        until = sim.now + CATCH_UP_S
        mine = self.launcher.final.published[-1]
        tries = 0
        receives = sim.random() < 0.3
        if receives:
            self.fetch(None, 3.0)  # and what is held is not committed
        while self.version != mine.version or self.dirty or self.meta.get("serial") != mine.serial:
            if sim.now > until + self.process.stopped_s or tries > ATTEMPTS_MAX:
                sim.checker.broken("bounded", f"{self.name} can't get version {mine.version}, and nothing is wrong")
                return
            tries += 1
            if receives:
                error = self.receive(3.0)
            else:
                error = self.fetch(None, 3.0)
                if self.real.fetched is not None:
                    error = self.commit()
            if isinstance(error, FetchCancelled):
                tries -= 1
            sim.sleep(0.05)
