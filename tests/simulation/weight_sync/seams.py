"""Where the simulated system is put in place of the real one: names of modules that the code looks up when it runs.

What decides stays Holdfast's own: the books, how ranks agree, stage and tell, what a server answers, how a receiver
watches, leases, verifies and copies. Replaced are clocks, threads, sockets, mapped memory, and the sizes of extents.
"""

from __future__ import annotations

import contextlib
import gc
import logging

from greenlet import getcurrent
from simulator import scheduler
from simulator.scheduler import Current

from holdfast.coordination import board, deadline
from holdfast.coordination import round as rounds
from holdfast.coordination.group import Group
from holdfast.sync import receiver
from holdfast.sync.session import futures, rendezvous
from holdfast.sync.versions import block, filling, publishing, receiving, serving, watch
from holdfast.sync.versions.books import Books
from holdfast.sync.weights import pieces
from weight_sync import fabric, memory


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
        Current.sim.checker.staged(getcurrent().process, version)


def served(books):
    return serving.Served(books, lock=fabric.Lock())


def open_group(process_group, *, purpose):
    del process_group, purpose
    process = getcurrent().process
    job, rank = process.job, process.rank
    return Group(rank, job.world, tuple(range(job.world)), fabric.Board(rank, job.world, job.board))


def _seams():
    for module in (deadline, board, rounds, publishing, receiving, serving, receiver):
        yield module, "time", scheduler.time
    for module in (publishing, serving, receiving, watch, receiver, futures, rendezvous):
        yield module, "threading", fabric.threading
    yield receiver, "end_at_exit", lambda _receiver, _close: lambda: None
    yield receiver, "close_later", lambda _what, _close: None
    for module in (serving, receiving, watch):
        yield module, "socket", fabric.socket
        yield module, "EventLoop", fabric.EventLoop
        yield module, "Link", fabric.Link
    for module in (publishing, receiving):
        yield module, "open_rendezvous", fabric.open_rendezvous
        yield module, "copy_threads", lambda: 1
    for module in (publishing, receiving, watch):
        yield module, "connect_to", fabric.connect_to
    yield publishing, "open_group", open_group
    yield publishing, "listen_at", fabric.listen_at
    yield publishing, "boot_id", lambda: "host"
    yield publishing, "unlink_quietly", lambda path: Current.sim.listeners.pop(path, None)
    yield publishing, "secrets", Secrets
    yield publishing, "Served", served
    yield publishing, "Books", CheckedBooks
    yield serving, "_is_same_user", lambda _sock: True
    yield receiving, "receiver_name", lambda: getcurrent().process.name
    yield watch, "receiver_name", lambda: getcurrent().process.name
    yield receiving, "_LOOK_S", 0.05
    yield watch, "_LOOK_S", 0.05
    yield receiving.MappedBlock, "__init__", memory.map_block
    yield receiving.MappedBlock, "epoch", property(memory.epoch_of)
    yield block.BlockMemory, "begin", memory.begin
    yield block.BlockMemory, "read_only_fd", property(memory.read_only_fd)
    yield block, "Image", memory.Image
    yield block, "ctypes", memory.ctypes
    yield block, "xxhash", memory.xxhash
    yield filling, "ctypes", memory.ctypes
    yield filling, "xxhash", memory.xxhash
    yield block, "usable_cores", lambda _: 1
    yield block, "EXTENT_BYTES", memory.EXTENT_BYTES
    yield filling, "EXTENT_BYTES", memory.EXTENT_BYTES
    yield filling, "JOB_BYTES", memory.EXTENT_BYTES
    yield block, "HEADER_BYTES", memory.HEADER_BYTES
    yield block, "PAGE_BYTES", memory.HEADER_BYTES
    yield block, "BUCKET_ALIGN_BYTES", memory.ALIGN_BYTES
    yield block, "_JOB_EXTENTS", 1
    for module in (filling, receiving, pieces):
        yield module, "take_turns", memory.take_turns
    yield pieces, "_JOB_BYTES", 32


@contextlib.contextmanager
def simulated_system():
    """Inside, Holdfast runs on what the current simulation gives it. For one thread; not to be nested."""
    seams = list(_seams())
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
