"""Blocks of memory that processes share, and work on them that others interrupt: by extents, or halves of a move."""

from __future__ import annotations

import ctypes as real_ctypes
import errno
from types import SimpleNamespace

import torch
import xxhash as real_xxhash
from greenlet import getcurrent
from simulator.scheduler import Current

from holdfast import _torch_compat as compat
from holdfast.errors import StorageError
from holdfast.format import sparse as real_sparse
from holdfast.sync.versions.block import BlockMemory
from weight_sync.fabric import alive, step
from weight_sync.network import take_file

EXTENT_BYTES = 64
HEADER_BYTES = 64
ALIGN_BYTES = 32
HALF = 0.3
"""How often a move is interrupted in its middle."""


class Image:
    """In place of a memfd."""

    pinned = False
    kind = "mirrors"

    def __init__(self, nbytes):
        process = alive()
        self.nbytes = nbytes
        self.bytes_view = torch.zeros(nbytes, dtype=torch.uint8)
        self.serial = None
        self.offers = {}
        """What other receivers may read of it, by digest, as far as it is theirs."""
        if process.receiver is not None:
            Current.sim.checker.count_mirrors(process, self, self.kind)
            return
        if process.faults_of_stage == "memory":
            raise StorageError("no memory for a block", path="memfd", errno=errno.ENOMEM)
        process.images.append(self)
        Current.sim.checker.count_blocks(process)

    @property
    def fd(self):
        return self  # not kept: it would never be freed

    def warm_up(self, cores):
        del cores
        step()

    def close(self):
        images = alive().images
        if self in images:
            images.remove(self)


class DeltaImage(Image):
    """What a receiver has a delta in, for others to read."""

    kind = "deltas"


def read_only_fd(memory):
    return memory.image


def begin(memory, epoch):
    """As `BlockMemory.begin`, with a turn for others before and after."""
    step()
    Current.sim.checker.overwrites(getcurrent().process, memory.image)
    REAL_BEGIN(memory, epoch)
    step()


REAL_BEGIN = BlockMemory.begin


def map_block(block, fd, nbytes):
    """In place of ``MappedBlock.__init__``."""
    step()
    block.nbytes = nbytes
    block.image = take_file(fd)
    block.view = block.image.bytes_view
    block._memory = compat.host_memory(block.view)
    block._words = block.view[:8].numpy().view("uint64")


def epoch_of(block):
    step()
    return int(block._words[0])


def take_turns(jobs, threads):
    """In place of threads: one job after the other, in any order."""
    del threads
    sim, process = Current.sim, getcurrent().process
    jobs = list(jobs)
    if len(jobs) > 1 and sim.random() < 0.5:
        sim.rng.shuffle(jobs)
    for number, job in enumerate(jobs):
        step()
        if process.faults_of_stage == "fill" and number == len(jobs) // 2:
            process.faults_of_stage = None
            raise StorageError("a copy failed", path="memory", errno=errno.EIO)
        job()
    step()


def encode_in_parts(before, after, dtype, **kwargs):
    """As `sparse.encode`, of memory that others may write to meanwhile."""
    parts = []
    for memory in (before, after):
        half = len(memory) // 2
        step()
        first = bytes(memory[:half])
        step()
        parts.append(first + bytes(memory[half:]))
    return real_sparse.encode(*parts, dtype, **kwargs)


sparse = SimpleNamespace(**{**vars(real_sparse), "encode": encode_in_parts})
"""In place of the module, for who encodes."""


class ctypes:
    """In place of the module, for what is done to shared memory."""

    c_void_p, c_size_t, c_int = real_ctypes.c_void_p, real_ctypes.c_size_t, real_ctypes.c_int

    @staticmethod
    def memmove(to, address, nbytes):
        alive()
        half = nbytes // 2 if Current.sim.random() < HALF else 0
        if half:
            real_ctypes.memmove(to, address, half)
            step()
        real_ctypes.memmove(to + half, address + half, nbytes - half)

    class CDLL:
        def __init__(self, *_args, **_kwargs):
            pass

        class madvise:
            def __new__(cls, address, nbytes, advice):
                del advice
                half = nbytes // 2
                for at, size in ((address, half), (address + half, nbytes - half)):
                    step()
                    alive()
                    real_ctypes.memset(at, 0, size)


class xxhash:
    """In place of the package: reading what is hashed takes a turn."""

    @staticmethod
    def xxh3_128_digest(data):
        step()
        return real_xxhash.xxh3_128_digest(data)

    @staticmethod
    def xxh3_64_intdigest(data):
        return real_xxhash.xxh3_64_intdigest(data)
