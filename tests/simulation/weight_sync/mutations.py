"""Weight sync broken on purpose, one promise at a time: what the simulator is worth is what of this it finds.

A mutation names what it replaces, the invariants that may find it, and the faults under which to look (`bias`), under
which weight sync as it is must pass the same seeds.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from simulator.scheduler import Current

from holdfast.coordination.deadline import Deadline
from holdfast.sync.receiver import Receiver
from holdfast.sync.versions import block, publishing, receiving
from holdfast.sync.versions.block import BlockMemory, RankVersion
from holdfast.sync.versions.books import Books
from holdfast.sync.weights import scatter
from holdfast.sync.weights.apply import LiveTensors
from weight_sync import deltas, network_mutations
from weight_sync.fabric import alive, step
from weight_sync.faults import Faults
from weight_sync.schedule import run_many

SEEDS_MOST = 400
"""How many schedules a mutation may go unfound; those it is found in are a good deal fewer."""
_ABSENT = object()


@dataclass(frozen=True)
class Mutation:
    name: str
    finds: frozenset[str]
    patches: tuple[tuple[object, str, object], ...]
    bias: object = None
    run: object = run_many

    @contextlib.contextmanager
    def applied(self):
        before = [(target, name, target.__dict__.get(name, _ABSENT)) for target, name, _ in self.patches]
        try:
            for target, name, value in self.patches:
                setattr(target, name, value)
            yield
        finally:
            for target, name, value in before:
                if value is _ABSENT:
                    delattr(target, name)
                else:
                    setattr(target, name, value)

    def faults(self, rng):
        """Return a schedule's faults, as far as this mutation shows under them."""
        drawn = Faults.draw(rng)
        if self.bias is not None:
            self.bias(drawn, rng)
        return drawn


MUTATIONS: list[Mutation] = []


def mutation(name, finds, *patches, bias=None):
    MUTATIONS.append(Mutation(name, frozenset(finds.split(", ")), patches, bias))


def nothing(*_args, **_kwargs):
    return None


# bias ------------------------------------------------------------------------------------------------------------


def pressed(faults, rng):
    """A publisher that never pauses, with hardly any blocks, and receivers that stop at any of their turns."""
    calm = Faults(rng)
    vars(faults).update(vars(calm))
    faults.worlds = [rng.choice((1, 2))]
    faults.keep, faults.pace_s, faults.publishes = 1, 0.02, [8]
    faults.receivers = 4
    for number in range(4):
        faults.receiver_turns[number] = dict.fromkeys(rng.sample(range(20, 120), 8), 0.3)


def busy(faults, rng):
    """A publisher that does nothing but publish, in ever other layouts, and receivers that stop for moments."""
    pressed(faults, rng)
    faults.worlds, faults.publishes, faults.pace_s, faults.ties = [1], [40], 0.0, 0.5
    for turns in faults.receiver_turns.values():
        turns.update(dict.fromkeys(turns, 0.006))


def first_looks(faults, rng):
    """Receivers that stop while they see a layout for the first time."""
    busy(faults, rng)
    for number in faults.receiver_turns:
        faults.receiver_turns[number] = dict.fromkeys(rng.sample(range(5, 40), 5), 0.03)


def again(faults, rng):
    """Receivers that have the time to fetch a version twice."""
    pressed(faults, rng)
    faults.pace_s, faults.publishes, faults.again = 0.4, [5], 1.0


def streaming(faults, rng):
    pressed(faults, rng)
    faults.streams = 0.8


def pinned(faults, rng):
    pressed(faults, rng)
    faults.pins = 0.5


def two_ranks_fail(faults, rng):
    faults.worlds = [2] * faults.jobs
    faults.draw_publishers(rng)


def restarted(faults, rng):
    calm = Faults(rng)
    vars(faults).update(vars(calm))
    faults.jobs, faults.worlds, faults.publishes, faults.starts = 2, [1, 1], [2, 2], ["on", "refused"]
    faults.last_start = "rewound"
    faults.pace_s, faults.receivers = 0.3, 2


def damaged(faults, rng):
    pressed(faults, rng)
    faults.damage = 0.4


# blocks ----------------------------------------------------------------------------------------------------------

REAL_COPY_ALL, REAL_FILL, REAL_RELEASE = scatter.copy_all, BlockMemory.fill, Books.release
REAL_LIVE_FILL, REAL_STAGE, REAL_BEGIN = LiveTensors.fill, publishing.BlockPublishing._stage, Books.begin
REAL_VERIFY, REAL_PUBLISHING_BEGIN = receiving.FetchedBlocks._verify, publishing.BlockPublishing._begin


def copy_unchecked(targets, sources, check=None):
    del check
    REAL_COPY_ALL(targets, sources)


def write_unchecked(self, lives, standing):
    self._write(lives, standing)


def look_no_more(self):
    """Epochs are looked at when bytes are verified, and not afterwards."""
    if not self._destination.dirty:
        REAL_LOOK(self)


REAL_LOOK = receiving.FetchedBlocks._check_epochs


def begin_later(self, epoch):
    step()
    Current.sim.checker.overwrites(alive(), self.image)
    self._later = epoch


def fill_first(self, layout, pieces, *, threads):
    digest = REAL_FILL(self, layout, pieces, threads=threads)
    self._words[0] = self._later
    return digest


def begin_alike(self, version, nbytes):
    filling = REAL_BEGIN(self, version, nbytes)
    filling.block.epoch = 1
    return filling


mutation(
    "the epoch is looked at only before the copy",
    "true",
    (scatter, "copy_all", copy_unchecked),
    (receiving.FetchedBlocks, "_write_checked", write_unchecked),
    bias=pressed,
)
mutation(
    "a stopped reader that streams does not look at the epoch again",
    "true",
    (receiving.FetchedBlocks, "_check_epochs", look_no_more),
    bias=streaming,
)
mutation(
    "the epoch goes up after the last byte",
    "true, bounded",
    (BlockMemory, "begin", begin_later),
    (BlockMemory, "fill", fill_first),
    bias=busy,
)
mutation("a block's epoch stays the same", "true, bounded", (Books, "begin", begin_alike), bias=pressed)
mutation("bytes are not verified where they lie", "true", (RankVersion, "check", nothing), bias=damaged)
mutation(
    "the layout is decoded from memory that may change",
    "true, bounded",
    (block, "bytes", lambda given: bytes(given) if isinstance(given, int) else given),
    bias=first_looks,
)
mutation(
    "what was taken back is told as damage",
    "bounded",
    (receiving.FetchedBlocks, "verify", REAL_VERIFY),
    bias=pressed,
)

# all ranks, or none ----------------------------------------------------------------------------------------------


def stage_and_tell(self, version, layout, cut):
    """Rank 0 tells of a version when it has its part."""
    digest = REAL_STAGE(self, version, layout, cut)
    if self._group.rank == 0:
        meta = publishing._encode(Current.sim.checker.now(version))
        with self._served.lock:
            self._records[version] = publishing.messages.VersionRecord(version, (digest,) * self._group.world, meta)
            self._renew_news()
    return digest


def lease_whatever(self, reader, version, digest):
    """Gives what it has, or had before."""
    found = self._held.get(version) or (self._held.get(self._newest) if version not in self._staged else None)
    if found is None:
        _, digest = self._staged.get(version, (None, digest))
        return REAL_BOOKS_LEASE(self, reader, version, digest)
    return REAL_BOOKS_LEASE(self, reader, found.version, digest)


def version_of_any(self, mapped, granted, digest, what):
    """Doesn't compare what lies there with the record."""
    del digest
    start = block.sums_at(granted.data_bytes, granted.layout_bytes)
    at = block.layout_at(granted.data_bytes)
    key = block.xxhash.xxh3_128_digest(mapped.bytes_between(at, at + granted.layout_bytes))
    sums = bytes(mapped.bytes_between(start, start + 8 * granted.sums))
    return REAL_VERSION_OF(self, mapped, granted, block.xxhash.xxh3_128_digest(key + sums), what)


def wait_for_some(self, round_, version, meta, deadline):
    """Does without the ranks that say nothing."""
    if self._rendezvous is None:
        return publishing.messages.VersionRecord(version, (), b"")
    words = {}
    until = Current.sim.now + 0.2
    while Current.sim.now < until and len(words) < self._group.world:
        words = round_.words()
        Current.sim.sleep(0.01)
    digests = tuple(
        publishing._DIGEST.decode(words[rank]) if rank in words else b"" for rank in range(self._group.world)
    )
    self._rendezvous.put("newest", publishing._encode((self._places.incarnation, version)))
    return publishing.messages.VersionRecord(version, digests, publishing._encode(dict(meta)))


REAL_VERSION_OF, REAL_BOOKS_LEASE = receiving.RankConnections.version_of, Books.lease

mutation(
    "news are told before all ranks have staged, and digests are not compared",
    "whole, true",
    (publishing.BlockPublishing, "_stage", stage_and_tell),
    (Books, "lease", lease_whatever),
    (receiving.RankConnections, "version_of", version_of_any),
    bias=two_ranks_fail,
)
mutation(
    "a version is published without the ranks that failed",
    "whole, true, bounded",
    (publishing.BlockPublishing, "_wait_all", wait_for_some),
    bias=two_ranks_fail,
)

# what receivers say ----------------------------------------------------------------------------------------------


def live_first(self, version, write, content=None):
    self._touch()
    self._is_live(version, content)
    REAL_LIVE_FILL(self, version, write, content)


def not_dirty(self):
    self._kept.live = None


def commit_while_fetching(self, check):
    REAL_VERIFY(self, check)
    if not self._destination.streaming:
        self._write({name: live.detach() for name, live in self._destination._wanted.items()}, {})


mutation("the version is set before the copy has ended", "true", (LiveTensors, "fill", live_first))
mutation("a copy does not make dirty", "true", (LiveTensors, "_touch", not_dirty))
mutation("a fetch writes into live tensors", "true", (receiving.FetchedBlocks, "_verify", commit_while_fetching))

# what is kept, and for whom --------------------------------------------------------------------------------------


def release_and_free(self, reader, number, epoch):
    REAL_RELEASE(self, reader, number, epoch)
    found = self._blocks.get(number)
    if found is not None and found.epoch == epoch and not found.leases:
        found.version = None


def release_all(self, reader, number, epoch):
    """As it was: a second fetch of a version, and the first one's end, leave no lease."""
    found = self._blocks.get(number)
    if found is not None and found.epoch == epoch:
        found.leases.pop(reader, None)


def evict_pins(self):
    for version in sorted(self._held)[: -self._keep]:
        self._held.pop(version).version = None


def wait_for_readers(self, version, layout):
    until = Current.sim.now + 1.5
    while Current.sim.now < until and any(one.leases for one in self._served.books._blocks.values()):
        Current.sim.sleep(0.05)
    return REAL_PUBLISHING_BEGIN(self, version, layout)


mutation("a block that nobody reads any more is free, kept or not", "kept", (Books, "release", release_and_free))
mutation("pins are forgotten when newer versions come", "kept", (Books, "_evict", evict_pins), bias=pinned)
mutation("all leases of a reader end with the first", "leased", (Books, "release", release_all), bias=again)
mutation("a block with leases is free", "leased", (Books, "_is_free", lambda _, one: one.version is None), bias=pressed)
mutation("blocks are made as long as readers hold others", "memory", (Books, "_counted", lambda _: 0), bias=pressed)
mutation(
    "a publisher waits until its readers are done",
    "free",
    (publishing.BlockPublishing, "_begin", wait_for_readers),
    bias=pressed,
)

# who publishes again -----------------------------------------------------------------------------------------------


def newer_by_number(self, known, newer_than):
    if not known.records:
        return None
    newest = known.records[-1]
    return newest if newer_than is None or newest.version > newer_than else None


mutation(
    "a version is news by its number alone",
    "bounded",
    (receiving.BlockReceiving, "_newer", newer_by_number),
    bias=restarted,
)


def receive_beyond(self, into=None, version=None, timeout=600.0, streaming=False):
    """As it was: what is held, and of a publisher that went back, is nothing new."""
    deadline = Deadline.after(timeout)
    self._fetch(version, self._version, into, streaming, deadline)
    return self._commit(deadline)


mutation(
    "receive waits for the number beyond, of a publisher that went back",
    "bounded",
    (Receiver, "receive", receive_beyond),
    bias=restarted,
)
mutation(
    "a number of an earlier publisher is used again, unasked",
    "rewind",
    (publishing.BlockPublishing, "_checked", lambda _self, weights, _version: weights()),
    bias=restarted,
)

for _name, _finds, _bias, *_patches in network_mutations.MUTATIONS:
    mutation(_name, _finds, *_patches, bias=_bias)
for _name, _finds, *_patches in deltas.MUTATIONS:
    MUTATIONS.append(Mutation(_name, frozenset(_finds.split(", ")), tuple(_patches), None, deltas.run_many))


def hunt(mutation):
    """Return the first schedule that finds ``mutation``, and one of those that fails without it, or None."""
    found = None
    given = {} if mutation.run is deltas.run_many else {"faults": mutation.faults}
    with mutation.applied():
        for result in mutation.run(range(SEEDS_MOST), **given):
            if result.breach is not None and result.breach.invariant in mutation.finds:
                found = result
                break
    last = SEEDS_MOST - 1 if found is None else found.seed
    for result in mutation.run(range(last + 1), **given):
        if result.breach is not None:
            return found, result
    return found, None
