"""Bringing versions over a network broken on purpose: reads, deltas, and receivers that serve one another."""

from __future__ import annotations

import msgspec
from simulator.scheduler import Current

from holdfast.sync.versions import fanout
from holdfast.sync.versions.block import HeldExtents, RankVersion
from holdfast.sync.versions.books import VersionKey
from holdfast.sync.versions.deltas import BlockDeltas
from holdfast.sync.versions.fanout import FanOut, RunOutcome
from holdfast.sync.versions.messages import HeldRun
from holdfast.sync.versions.mirror import MirrorBlock, RankReader
from holdfast.sync.versions.peers import SharedFetch
from holdfast.sync.versions.reads import ReadConnections, send_sized
from holdfast.sync.versions.serving import BlockServer
from weight_sync.fabric import alive
from weight_sync.faults import Faults
from weight_sync.memory import Image
from weight_sync.network import os
from weight_sync.seams import CheckedMirrors

# bias ------------------------------------------------------------------------------------------------------------


def far(faults, rng, receivers=3):
    """Receivers that bring all over a network from one rank, and stop for moments."""
    vars(faults).update(vars(Faults(rng)))
    faults.receivers, faults.network = receivers, tuple(range(receivers))
    faults.worlds, faults.keep, faults.pace_s, faults.publishes = [1], 1, 0.02, [8]
    for number in range(receivers):
        faults.receiver_turns[number] = dict.fromkeys(rng.sample(range(20, 200), 8), 0.3)


def far_and_stopped(faults, rng):
    """Receivers that stop for so long that who waits for them is late."""
    far(faults, rng)
    faults.publishes, faults.pace_s = [25], 0.1
    for number in faults.receiver_turns:
        faults.receiver_turns[number] = dict.fromkeys(rng.sample(range(20, 200), 20), 0.9)


def cancelled(faults, rng):
    """Receivers that cancel fetches, with a publisher that stops while it answers."""
    far(faults, rng)
    faults.receiver_hands, faults.pace_s, faults.spikes = faults.network, 0.3, 0.05
    faults.publisher_turns = {(0, 0): dict.fromkeys(rng.sample(range(50, 400), 6), 1.5)}


def layouts(faults, rng):
    """A publisher of ever other layouts."""
    far(faults, rng)
    faults.publishes, faults.pace_s, faults.ties, faults.again, faults.receiver_turns = [12], 0.15, 0.5, 1.0, {}


def in_steps(faults, rng):
    """Receivers that have the time to bring each version by a delta, or almost."""
    far(faults, rng, receivers=2)
    faults.delta, faults.pace_s, faults.ties, faults.receiver_turns = "values", 0.3, 0.0, {}


def in_steps_and_rewound(faults, rng):
    in_steps(faults, rng)
    faults.jobs, faults.worlds, faults.publishes, faults.starts = 2, [1, 1], [3, 4], ["on", "rewound"]
    faults.last_start = "rewound"


def in_broken_steps(faults, rng):
    in_steps(faults, rng)
    faults.breaks, faults.pace_s = 0.03, 0.6


def shared(faults, rng):
    """Receivers that have the time to serve one another."""
    far(faults, rng, receivers=4)
    faults.fan_out, faults.pace_s, faults.publishes = faults.network, 0.3, [5]


def shared_and_kept(faults, rng):
    """The same, where older versions are kept, and brought."""
    shared(faults, rng)
    faults.keep, faults.publishes, faults.receiver_turns = 4, [7], {}


def shared_with_liars(faults, rng):
    shared(faults, rng)
    faults.lies = 1.0


# what is broken --------------------------------------------------------------------------------------------------

REAL_READ, REAL_CHECKS, REAL_TAKE = RankReader.read, RankVersion.checks, RankReader.take
REAL_INIT, REAL_FIND, REAL_BROUGHT = RankReader.__init__, BlockDeltas.find, FanOut.brought
REAL_FORWARD, REAL_LET_GO, REAL_BRING = MirrorBlock.bring_forward, MirrorBlock.let_go, SharedFetch._bring
REAL_DROP, REAL_SEND_RANGES = ReadConnections._drop, BlockServer._send_ranges


def read_whatever(self, asked, into, check, version, arrived=None):
    REAL_READ(self, asked, into, check, version, arrived)
    return True


def is_taken_for_right(_self, _extent):
    return True


def checks_of_what_is_brought(self, extents):
    """What a mirror has is taken for what it should be."""
    return REAL_CHECKS(self, [extent for extent in extents if not self.block.has(extent)])


def note_at_once(self, layout, key, extents, *, notes):
    REAL_FORWARD(self, layout, key, extents, notes=notes)
    self.noted = HeldExtents(key, layout.digest, frozenset(extents))


def let_go_as_noted(self, holds):
    REAL_LET_GO(self, holds or getattr(self, "noted", None))


def mirrors_of_whoever(self, rank, place, introduce, **kwargs):
    """Mirrors outlive their publisher."""
    REAL_INIT(self, rank, place, introduce, **kwargs)
    self._mirrors = vars(alive()).setdefault("outliving", {}).setdefault(rank, [])


def keep_them(self):
    self._connections.close()


def find_by_number(self, base, wanted, data_bytes, stopping):
    """Takes a version of the same number for the base."""
    same = [kept.base for kept in self._kept.values() if kept.base.version == base.version]
    return REAL_FIND(self, *same[:1] or [base], wanted, data_bytes, stopping)


def take_new(self, nbytes):
    del self
    return Image(nbytes), None


def keep_all(self, image, holds):
    with self._lock:
        self._mirrors.append((image, holds))


def offer_first(self, run, check):
    self._has(fanout.bits_between(run.start, run.end))
    return REAL_BRING(self, run, check)


def use_again(self, sock):
    """A read was cut off, and what was asked for is still to come."""
    if sock.closed or sock.is_shut or sock.ended is not None:
        REAL_DROP(self, sock)
        return
    with self._lock:
        self._free.append(sock)


def send_under_lock(self, sock, asked):
    served, self._served = self._served, _Unlocked(self._served)
    try:
        with served.lock:
            REAL_SEND_RANGES(self, sock, asked)
    finally:
        self._served = served


class _Unlocked:
    """What is served, to who has the lock."""

    def __init__(self, served):
        self._real = served

    def __getattr__(self, name):
        return getattr(self._real, name)

    def has(self, block, epoch):
        return self._real.books.epoch_of(block) == epoch

    def memory_of(self, block, epoch):
        return os.dup(self._real.memory[block].image) if self.has(block, epoch) else None


def nothing_yet(self, sock, receiver, asked):
    """As it was: what is no longer kept can't be had yet."""
    lacking = int.from_bytes(asked.lacking, "little")
    with self._served.lock:
        is_kept = asked.version in self._served.layouts
        fan_out = self._served.fan_out_of(VersionKey(asked.version, asked.digest)) if is_kept else None
        found = None if fan_out is None else fan_out.ask(receiver, lacking, asked.waited_s, Current.sim.now)
        place = None if found is None else self._served.places.get(found.holder)
    encoded = b"" if found is None else msgspec.msgpack.encode(HeldRun(*found, place))
    send_sized(sock, encoded, self._peer_timeout_s)


def forgive(self, asker, number, here, outcome):
    REAL_BROUGHT(self, asker, number, here, RunOutcome.HERE if outcome == RunOutcome.FAILED else outcome)


TRUSTING = (RankVersion, "checks", checks_of_what_is_brought)

MUTATIONS = [
    (
        "bytes of a block that was taken back while they were sent are taken, and not verified",
        "true",
        far,
        (RankReader, "read", read_whatever),
        (RankVersion, "is_right", is_taken_for_right),
    ),
    (
        "a connection on which a read was cut off is used again",
        "bounded, true",
        cancelled,
        (ReadConnections, "_drop", use_again),
    ),
    ("a publisher is held up while it sends", "free", far_and_stopped, (BlockServer, "_send_ranges", send_under_lock)),
    (
        "each version has a mirror of its own, and none is let go",
        "memory",
        layouts,
        (RankReader, "take", take_new),
        (RankReader, "keep", keep_all),
    ),
    (
        "a delta is applied to a mirror of another publisher with the same number, and not verified",
        "true",
        in_steps_and_rewound,
        (RankReader, "__init__", mirrors_of_whoever),
        (RankReader, "close", keep_them),
        (BlockDeltas, "find", find_by_number),
        TRUSTING,
    ),
    (
        "a mirror is noted as held before it is verified, and what is held is not looked at",
        "true",
        in_broken_steps,
        (MirrorBlock, "bring_forward", note_at_once),
        (MirrorBlock, "let_go", let_go_as_noted),
        TRUSTING,
    ),
    ("a run is offered before it is verified", "offered", shared, (SharedFetch, "_bring", offer_first)),
    (
        "what another receiver sends is not verified",
        "true, offered",
        shared_with_liars,
        (RankVersion, "is_right", is_taken_for_right),
    ),
    (
        "a mirror is used for something else while it is offered",
        "offered",
        shared_and_kept,
        (CheckedMirrors, "withdraw", lambda _self, _image: None),
    ),
    (
        "a receiver that sends other bytes is asked again, and again",
        "bounded",
        shared_with_liars,
        (FanOut, "brought", forgive),
    ),
    (
        "who brings a version that is no longer kept is told to wait",
        "bounded",
        shared,
        (BlockServer, "_send_source", nothing_yet),
    ),
]
