"""A model of sparse deltas: chains of an anchor and deltas in a store, folds for who is behind, rollbacks to pins.

Manifests make versions visible and name the members of their chain by attempt; a delta names its base by incarnation,
version and digest. A receiver leases a chain, reads its members, applies them aside to what it has, if that is a base
of the chain, verifies the result, and writes what has changed into its live tensors. Encoding, applying and folding
are Holdfast's own (``format.sparse``); publishing, retention and receiving are modelled, with one function a decision.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from simulator.scheduler import Current, Hang, Sim

from holdfast.errors import CheckpointCorrupt
from holdfast.format import sparse
from weight_sync.fabric import step
from weight_sync.invariants import InvariantBroken

UNITS = 40
LIMIT_S, LIMIT_EVENTS = 200.0, 60_000
HERE = sys.modules[__name__]


class Identity(NamedTuple):
    incarnation: int
    version: int
    digest: int


class Manifest(NamedTuple):
    """A version that exists. chain: attempts of its members, the anchor first; bases: what each makes of it."""

    attempt: int
    identity: Identity
    chain: tuple[int, ...]
    results: tuple[Identity, ...]


@dataclass
class Store:
    members: dict = field(default_factory=dict)
    """By attempt: an anchor's bytes, or (base, record)."""
    manifests: dict = field(default_factory=dict)
    voids: set = field(default_factory=set)
    leases: dict = field(default_factory=dict)
    """By receiver: the attempts that it reads."""
    pins: set = field(default_factory=set)


@dataclass
class Result:
    seed: int
    breach: InvariantBroken | None
    committed: int
    lines: list[str] | None = None


def digest_of(values):
    return xxhash.xxh3_64_intdigest(values.tobytes())


# decisions, one a function -----------------------------------------------------------------------------------------


def is_base(mine, base):
    """A delta goes onto exactly the version that it was made from."""
    return mine == base


def counts(store, manifest):
    """A manifest that comes after its attempt was given up, and voided, is none."""
    return manifest.attempt not in store.voids


def to_fold(records):
    return records


def applied(values, record):
    """Apply aside; the result is verified."""
    found = values.copy()
    sparse.apply(record, found)
    return found


def is_result(values, identity):
    return digest_of(values) == identity.digest


def needed(store, kept):
    """Members that are needed by versions that are kept, and by who reads now."""
    chains = {attempt for manifest in kept for attempt in manifest.chain}
    return chains.union(*store.leases.values()) if store.leases else chains


def lies_as_committed(receiver):
    """Only what has changed may be written, if nobody else has written to the live tensors."""
    return not receiver.touched


def place(receiver, store, chain):
    store.leases[receiver.name] = set(chain)


# publishing --------------------------------------------------------------------------------------------------------


class World:
    """What runs in one schedule."""

    def __init__(self, sim, rng):
        self.sim, self.rng = sim, rng
        self.store = Store()
        self.attempts = 0
        self.truth = {}
        """By attempt: what was published."""
        self.breach = self.values = None
        self.last = 0
        self.stopped = False
        self.receivers = []
        self.keep = rng.choice((1, 2, 3))
        self.anchor_every = rng.choice((2, 3, 5))
        self.late = rng.choice((0.0, 0.3))
        self.kind = rng.choice(sparse.KINDS)

    def broken(self, invariant, what):
        if self.breach is None:
            self.breach = InvariantBroken(invariant, what)
            self.sim.stop = True

    def look(self, process):
        receiver = process.receiver
        if receiver is None or receiver.dirty or receiver.attempt is None or receiver.touched:
            return
        if receiver.live.tobytes() != self.truth[receiver.attempt][1].tobytes():
            self.broken("true", f"{receiver.name} says {receiver.identity}; its tensors have something else")

    def newest(self):
        found = [one for one in self.store.manifests.values() if counts(self.store, one)]
        return max(found, key=lambda one: (one.identity.incarnation, one.identity.version), default=None)

    def publish_all(self):
        for incarnation in range(self.rng.choice((1, 2, 3))):
            if incarnation and self.rng.random() < 0.5:
                self.last = max(0, self.last - self.rng.randint(1, 4))  # it goes back
            self._publish_some(incarnation)
        self.stopped = True

    def _publish_some(self, incarnation):
        rng = self.rng
        values = np.array([rng.randrange(1 << 16) for _ in range(UNITS)], np.uint16)
        if self.values is not None and rng.random() < 0.5:
            values = self.values.copy()  # it goes on from a checkpoint
        before, chain, results, encoded = None, (), (), None
        for number in range(rng.randint(2, 7)):
            self.last += 1
            for _ in range(rng.randint(1, 4)):
                values[rng.randrange(UNITS)] = rng.randrange(1 << 16)
            identity = Identity(incarnation, self.last, digest_of(values))
            self.attempts += 1
            attempt = self.attempts
            self.truth[attempt] = identity, values.copy()
            if before is None or len(chain) > self.anchor_every:
                member, chain, results = values.copy(), (attempt,), (identity,)
            else:
                encoded = sparse.encode(before, values, "bfloat16", kind=self.kind)
                member, chain, results = (results[-1], encoded.record), (*chain, attempt), (*results, identity)
            step()
            self.store.members[attempt] = member
            step()
            if not self._put(Manifest(attempt, identity, chain, results)):
                self.last -= 1
                before, chain = None, ()  # the next one is an anchor, under the same number
                continue
            before, self.values = values.copy(), values.copy()
            if rng.random() < 0.2:
                self.store.pins.add(attempt)
            self._retain()
            self.sim.sleep(rng.random() * 0.01)
            if number and rng.random() < 0.1:
                return  # killed

    def _put(self, manifest):
        """Put a manifest; what isn't answered is voided, and may come later all the same."""
        store = self.store
        if self.rng.random() >= self.late:
            store.manifests[manifest.attempt] = manifest
            step()
            return True
        self.sim.later(self.rng.random() * 0.02, lambda: self._comes(manifest))
        step()
        if manifest.attempt in store.manifests:
            return True
        store.voids.add(manifest.attempt)
        step()
        return False

    def _comes(self, manifest):
        self.store.manifests[manifest.attempt] = manifest

    def _retain(self):
        store = self.store
        there = sorted((one for one in store.manifests.values() if counts(store, one)), key=lambda one: one.attempt)
        kept = [one for one in there if one in there[-self.keep :] or one.attempt in store.pins]
        for manifest in there:
            if manifest not in kept:
                store.manifests.pop(manifest.attempt)
                step()
        kept = [one for one in store.manifests.values() if counts(store, one)]
        stays = HERE.needed(store, kept)
        for attempt in sorted(store.members, reverse=True):  # dependents first
            if attempt not in stays and attempt != self.attempts and not self._is_leased(attempt):
                store.members.pop(attempt, None)
                step()
                stays = HERE.needed(store, [one for one in store.manifests.values() if counts(store, one)])

    def _is_leased(self, attempt):
        return attempt in HERE.needed(self.store, ())


class DeltaReceiver:
    def __init__(self, world, process, number):
        self.world, self.process, self.name = world, process, f"receiver-{number}"
        self.live = np.zeros(UNITS, np.uint16)
        self.shadow = self.identity = self.attempt = None
        self.dirty = self.touched = False
        self.committed = 0
        process.receiver = self

    def run(self):
        world, rng = self.world, self.world.rng
        tries = 0
        while tries < 40 and (not world.stopped or tries < 3):
            tries += 1
            self.receive(world.newest() if rng.random() < 0.8 else self._older())
            if rng.random() < 0.1:
                self.touched = True
                self.live[rng.randrange(UNITS)] ^= 1  # the user writes to the weights
            world.sim.sleep(rng.random() * 0.01)
        newest = world.newest()
        self.receive(newest)
        if newest is not None and (self.dirty or self.attempt != newest.attempt):
            world.broken("bounded", f"{self.name} can't get {newest.identity}, and nothing is wrong")

    def _older(self):
        """A rollback, to a pin for example."""
        there = [one for one in self.world.store.manifests.values() if HERE.counts(self.world.store, one)]
        return self.world.rng.choice(there) if there else None

    def receive(self, manifest):
        world, store = self.world, self.world.store
        if manifest is None or manifest.attempt == self.attempt:
            return
        HERE.place(self, store, manifest.chain)
        step()
        if manifest.attempt not in store.manifests or not HERE.counts(store, manifest):
            store.leases.pop(self.name, None)
            return  # evicted before the lease was seen
        try:
            found = self._aside(manifest)
        except CheckpointCorrupt as error:
            world.broken("bounded", f"{self.name}: {error}")
            return
        finally:
            store.leases.pop(self.name, None)
        if manifest.attempt in store.voids:
            world.broken("whole", f"{self.name} takes an attempt that was voided")
        self._commit(manifest, found)

    def _aside(self, manifest):
        """Return the values of a version, made of what is here and its chain."""
        start = next(
            (place for place in reversed(range(len(manifest.chain))) if self._has(manifest.results[place])), None
        )
        if start is None:
            values, start = self._member(manifest.chain[0]), 0
            if not isinstance(values, np.ndarray):
                raise CheckpointCorrupt("a chain begins with no anchor", path="chain")
            values = values.copy()
        else:
            values = self.shadow
        records = []
        for attempt in manifest.chain[start + 1 :]:
            records.append(self._member(attempt)[1])
            step()
        records = HERE.to_fold(records)
        if records:
            record = sparse.fold(records) if len(records) > 1 else records[0]
            values = HERE.applied(values, record)
        step()
        if not HERE.is_result(values, manifest.identity):
            raise CheckpointCorrupt("the result has another digest than its manifest says", path="chain")
        return values

    def _has(self, identity):
        return self.shadow is not None and HERE.is_base(self.identity, identity)

    def _member(self, attempt):
        step()
        found = self.world.store.members.get(attempt)
        if found is None:
            raise CheckpointCorrupt(f"member {attempt} of a chain is missing", path=f"member-{attempt}")
        return found

    def _commit(self, manifest, values):
        """Write what differs from what is live; all of it if that may be something else than the shadow."""
        whole = self.shadow is None or self.dirty or not HERE.lies_as_committed(self)
        places = range(UNITS) if whole else np.flatnonzero(self.shadow != values)
        self.dirty = True
        for place_ in places:
            step()
            self.live[place_] = values[place_]
        self.shadow, self.identity, self.attempt = values, manifest.identity, manifest.attempt
        self.touched = self.dirty = False
        self.committed += 1
        step()


def run_schedule(seed, *, trace=False):
    """Run one schedule of the model."""
    sim = Sim(seed, trace=trace)
    Current.sim = sim
    rng = sim.rng
    sim.checker = world = World(sim, rng)

    def process(name, most):
        made = sim.process(name, "host")
        made.turns, made.receiver = {}, None
        for _ in range(rng.randint(0, 2)):
            made.turns[rng.randint(1, most)] = _stop if rng.random() < 0.7 or name == "publisher" else sim.kill
        return made

    publisher = process("publisher", 60)
    publisher.spawn(world.publish_all, name="main")
    for number in range(rng.choice((1, 2, 3))):
        made = process(f"receiver-{number}", 200)
        world.receivers.append(DeltaReceiver(world, made, number))
        made.on_death.append(lambda ended: world.store.leases.pop(ended.receiver.name, None))
        made.spawn(world.receivers[-1].run, name="main")
    try:
        sim.run(limit_s=LIMIT_S, limit_events=LIMIT_EVENTS)
    except Hang as hang:
        world.broken("bounded", str(hang))
    for name, task, error in sim.errors:
        world.broken("bounded", f"{name}/{task} ended with {type(error).__name__}: {error}")
        if trace:
            raise error
    sim.close()
    Current.sim = None
    return Result(seed, world.breach, sum(one.committed for one in world.receivers), sim.lines)


def _stop(process):
    process.paused_until = Current.sim.now + Current.sim.random() * 0.05


def run_many(seeds):
    for seed in seeds:
        yield run_schedule(seed)


# broken on purpose -------------------------------------------------------------------------------------------------


def apply_in_place(values, record):
    sparse.apply(record, values)
    return values


def apply_to_live(self, manifest, values):
    """Says first what it has, and is written to as it goes."""
    self.shadow, self.identity, self.attempt = values, manifest.identity, manifest.attempt
    for number in range(UNITS):
        step()
        self.live[number] = values[number]


def apply_unverified(values, record):
    found = values.copy()
    read = sparse.Record(record)
    for number in range(read.head.blocks):
        places, changes = read.block(number)
        sparse.put(found, places, changes, read.head)
    return found


def same_number(mine, base):
    return mine.version == base.version


def but_one(records):
    return records[:1] + records[2:]


MUTATIONS = [
    ("a delta is applied to another base of the same number", "bounded, true", (HERE, "is_base", same_number)),
    (
        "a delta is applied to another base, and its result is not verified",
        "true",
        (HERE, "is_base", same_number),
        (HERE, "applied", apply_unverified),
        (HERE, "is_result", lambda _values, _identity: True),
    ),
    ("a fold skips a delta", "bounded, true", (HERE, "to_fold", but_one)),
    ("a delta is applied to what is live", "true", (DeltaReceiver, "_commit", apply_to_live)),
    ("a manifest that comes after its void counts", "whole, bounded", (HERE, "counts", lambda _store, _manifest: True)),
    (
        "retention deletes an anchor that kept deltas need",
        "bounded",
        (HERE, "needed", lambda store, kept: {one.attempt for one in kept}.union(*store.leases.values())),
    ),
    ("readers lease nothing", "bounded", (HERE, "place", lambda _receiver, _store, _chain: None)),
    ("changes are written over what somebody else wrote", "true", (HERE, "lies_as_committed", lambda _receiver: True)),
]
