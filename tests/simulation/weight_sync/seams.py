"""Where the simulated system is put in place of the real one: names of modules that the code looks up when it runs.

What decides stays Holdfast's own: the books, how ranks agree, stage and tell, what a server answers, how a receiver
watches, leases, reads, verifies and copies, deltas, and who brings what from whom. Replaced are clocks, threads,
sockets, memory and files of it, and the sizes of extents.

Names of the system are replaced in all modules of ``sync.versions`` that have them, so what moves there is simulated,
too. A name that is replaced in one place, and is gone, fails with its name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import pkgutil

from greenlet import getcurrent
from simulator import scheduler
from simulator.scheduler import Current

from holdfast import cores
from holdfast.coordination import board, deadline
from holdfast.coordination import round as rounds
from holdfast.coordination.group import Group
from holdfast.engine import wire
from holdfast.format import sparse
from holdfast.sync import receiver, versions
from holdfast.sync.session import futures, links, rendezvous
from holdfast.sync.versions import (
    block,
    deltas,
    fanout,
    filling,
    messages,
    peers,
    publishing,
    receiving,
    serving,
    watch,
)
from holdfast.sync.versions.books import Books
from holdfast.sync.versions.deltas import BlockDeltas
from holdfast.sync.versions.peers import HeldMirrors
from holdfast.sync.weights import pieces, scatter
from weight_sync import fabric, memory, network


class Secrets:
    @staticmethod
    def token_hex(nbytes):
        return f"{Current.sim.rng.getrandbits(8 * nbytes):0{2 * nbytes}x}"


class CheckedBooks(Books):
    """The books as they are; the checker learns what they decide."""

    def begin(self, version, nbytes):
        filling = super().begin(version, nbytes)
        getcurrent().process.filling = filling
        return filling

    def staged(self, version, digest):
        super().staged(version, digest)
        Current.sim.checker.staged(getcurrent().process, version, digest)


class CheckedDeltas(BlockDeltas):
    """Deltas as they are; the checker learns which receivers may bring from one another."""

    def offer(self, base, wanted, data_bytes, stopping):
        found = super().offer(base, wanted, data_bytes, stopping)
        if found is not None:
            Current.sim.checker.offered(found[0].digest, self.find(base, wanted, data_bytes, stopping))
        return found


class CheckedMirrors(HeldMirrors):
    """Mirrors as they are; the checker learns what is offered."""

    def offer(self, digest, image, **kwargs):
        made = super().offer(digest, image, **kwargs)
        image.offers[digest] = made
        return made

    def withdraw(self, image):
        super().withdraw(image)
        image.offers.clear()


def served(books):
    return serving.Served(books, lock=fabric.Lock())


def open_group(process_group, *, purpose):
    del process_group, purpose
    process = getcurrent().process
    job, rank = process.job, process.rank
    return Group(rank, job.world, tuple(range(job.world)), fabric.Board(rank, job.world, job.board))


def cannot_answer(_server, _who, error):
    """Nothing that is simulated keeps a publisher from answering: it ends, and that is found."""
    raise error


def receiver_name():
    return f"{getcurrent().process.name}:{next(Current.sim.numbers)}"


def decode_places(found, shown):
    """Find the ranks, as `watch.decode_places`; a receiver on their host finds them by a path, others by a port."""
    places = REAL_DECODE_PLACES(found, shown)
    if getcurrent().process.receiver.over_network:
        return places
    ranks = tuple(
        place if place.path else messages.RankPlace(network.path_of(place.port), place.boot) for place in places.ranks
    )
    return messages.PublisherPlaces(places.incarnation, places.token, ranks)


REAL_DECODE_PLACES = watch.decode_places

SYSTEM = {
    "time": scheduler.time,
    "threading": fabric.threading,
    "socket": network.socket,
    "select": network.select,
    "os": network.os,
    "secrets": Secrets,
    "ctypes": memory.ctypes,
    "xxhash": memory.xxhash,
    "Image": memory.Image,
    "EventLoop": fabric.EventLoop,
    "Link": network.Link,
    "listener": network.listener,
    "connect_to": network.connect_to,
    "open_rendezvous": fabric.open_rendezvous,
    "boot_id": lambda: "host",
    "this_machine": lambda: "host",
    "hosts_here": lambda _host: (),
    "receiver_name": receiver_name,
    "copy_threads": lambda: 2,
    "take_turns": memory.take_turns,
    "EXTENT_BYTES": memory.EXTENT_BYTES,
    "HEADER_BYTES": memory.HEADER_BYTES,
    "PAGE_BYTES": memory.HEADER_BYTES,
    "BUCKET_ALIGN_BYTES": memory.ALIGN_BYTES,
}
"""What is replaced in each module of ``sync.versions`` that has such a name."""
KEPT = {(peers, "take_turns")}
"""But not these: they run on the simulation's threads."""


def _seams():
    for found in pkgutil.iter_modules(versions.__path__, versions.__name__ + "."):
        module = importlib.import_module(found.name)
        for name, value in SYSTEM.items():
            if name in module.__dict__ and (module, name) not in KEPT:
                yield module, name, value
    for module in (deadline, board, rounds, receiver, links):
        yield module, "time", scheduler.time
    for module in (receiver, futures, rendezvous, cores):
        yield module, "threading", fabric.threading
    yield receiver, "end_at_exit", lambda _receiver, _close: lambda: None
    yield receiver, "close_later", lambda _what, _close: None
    yield wire, "_READ_BYTES", 4096
    for module in (pieces, scatter):
        yield module, "take_turns", memory.take_turns
    yield pieces, "_JOB_BYTES", 32
    yield publishing, "open_group", open_group
    yield publishing, "listen_at", fabric.listen_at
    yield publishing, "unlink_quietly", lambda path: Current.sim.listeners.pop(path, None)
    yield publishing, "Served", served
    yield publishing, "Books", CheckedBooks
    yield publishing, "BlockDeltas", CheckedDeltas
    yield publishing.BlockPublishing, "_let_in", lambda _half: None
    yield serving, "_is_same_user", lambda _sock: True
    yield serving.BlockServer, "_give_up", cannot_answer
    yield receiving, "HeldMirrors", CheckedMirrors
    yield peers, "Image", memory.DeltaImage
    yield receiving, "_LOOK_S", 0.05
    yield watch, "_LOOK_S", 0.05
    yield watch, "decode_places", decode_places
    yield block.MappedBlock, "__init__", memory.map_block
    yield block.MappedBlock, "epoch", property(memory.epoch_of)
    yield block.BlockMemory, "begin", memory.begin
    yield block, "_read_only", lambda _fd: None
    yield block.BlockMemory, "read_only_fd", property(memory.read_only_fd)
    yield block, "usable_cores", lambda _: 1
    yield block, "_JOB_EXTENTS", 1
    yield filling, "JOB_BYTES", memory.EXTENT_BYTES
    yield deltas, "sparse", memory.sparse
    yield sparse, "BLOCK_UNITS", 36
    yield fanout, "PUBLISHER_READS", 2
    yield fanout, "HOLDER_READS", 2
    yield fanout, "_RUN_MIN", 1


@contextlib.contextmanager
def simulated_system():
    """Inside, Holdfast runs on what the current simulation gives it. For one thread; not to be nested."""
    seams = list(_seams())
    for module, name, _ in seams:
        assert name in module.__dict__, f"{module.__name__} has no {name} any more; see {__name__}"
    before = [(module, name, module.__dict__[name]) for module, name, _ in seams]
    collects = gc.isenabled()
    logging.disable(logging.CRITICAL)
    try:
        for module, name, value in seams:
            setattr(module, name, value)
        gc.disable()  # finalizers run when the last reference goes, and at no other moment
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        logging.disable(logging.NOTSET)
        if collects:
            gc.enable()
