"""Read a publisher rank's block over a network: a receiver's own block, into which what it wants is brought.

    bring(from, to) -> a free connection -> ReadRanges -> bytes, and a byte: the block was of that epoch all the time

Guarantees: only what is asked for takes memory. Bytes of a block that was taken back while they were sent are told
apart (`VersionRevoked`), and nobody can take back what has arrived. Several threads may bring parts, each on a
connection of its own. A rank that sends nothing for `peer_timeout_s` is a `PeerLost`; a transfer in which bytes come
has no deadline.
Assumes: who asks verifies the bytes.
Does not: decide what to bring (``versions.receiving``).
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, ConfigError, PeerLost, VersionRevoked
from holdfast.format import sparse
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.staging.image import Image
from holdfast.sync.versions import messages
from holdfast.sync.versions.block import HEADER_BYTES, BlockStep
from holdfast.sync.versions.deltas import decode_records, runs_of
from holdfast.sync.versions.reads import MemoryReadFailed, ReadConnections
from holdfast.sync.versions.serving import connect_to
from holdfast.sync.weights.pieces import copy_threads
from holdfast.sync.weights.scatter import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from holdfast.sync.versions.block import BlockLayout, HeldExtents
    from holdfast.sync.versions.books import VersionKey
    from holdfast.sync.versions.deltas import BlockRun
    from holdfast.sync.versions.peers import HeldBytes, HeldMirrors
    from holdfast.sync.versions.reads import MemoryReads

_log = logging.getLogger("holdfast")

_CONNECT_S: Final = 5.0
_LOOK_S: Final = 1.0
_HELD_RUN_MAX: Final = 1 << 16
_KEPT: Final = 2
"""Mirrors of a rank that are kept warm: one with what was fetched, one for what is being fetched."""


class RankReader:
    """Reads of one publisher rank, and mirrors of its blocks that are kept warm; thread-safe.

    held: tells other receivers what is in the mirrors, if this one serves them.
    """

    def __init__(
        self,
        rank: int,
        place: messages.RankPlace,
        introduce: messages.Introduce,
        *,
        peer_timeout_s: float,
        held: HeldMirrors | None = None,
        memory_reads: MemoryReads | None = None,
    ) -> None:
        self.held = held
        self.memory_reads = memory_reads
        self._lock = threading.Lock()
        self._mirrors: list[tuple[Image, HeldExtents | None]] = []
        self._connections = ReadConnections(
            f"publisher rank {rank}",
            lambda: connect_to(place, _CONNECT_S),
            introduce,
            peer_timeout_s=peer_timeout_s,
        )

    def take(self, nbytes: int) -> tuple[Image, HeldExtents | None]:
        """Return memory for a mirror of so many bytes, and what it holds: the newest, if there is any."""
        with self._lock:
            fitting = [row for row in self._mirrors if row[0].nbytes == nbytes]
            found = max(fitting, key=lambda row: -1 if row[1] is None else row[1].key.version, default=None)
            if found is not None:
                self._mirrors.remove(found)
        if found is None:
            image = Image(nbytes)
            if self.memory_reads is not None:
                self.memory_reads.register(image.bytes_view)
            return image, None
        if self.held is not None:
            self.held.withdraw(found[0])
        return found

    def keep(self, image: Image, holds: HeldExtents | None) -> None:
        """Take back the memory of a mirror."""
        if self.memory_reads is not None and not self.memory_reads.is_quiet(image.bytes_view):
            self._let_go([(image, None)])  # a read that was cut off may write to it yet
            return
        with self._lock:
            self._mirrors.append((image, holds))
            gone = self._mirrors[:-_KEPT]
            del self._mirrors[:-_KEPT]
        self._let_go(gone)

    def read(
        self,
        asked: messages.ReadRanges,
        into: Sequence[memoryview],
        check: Callable[[], None],
        version: int,
        arrived: Callable[[int], None] | None = None,
    ) -> bool:
        """Read the ranges; return False if the block was not of that epoch. check: may raise, to end it.

        arrived: called for each part of ``into``, by its number, once it is full.
        """
        said = bytearray(1)
        with self._connections.asking(asked, version) as sock:
            for number, memory in enumerate(into):
                self._connections.receive(sock, memory, check, version)
                if arrived is not None:
                    arrived(number)
            self._connections.receive(sock, memoryview(said), check, version)
        events.count("sync_bytes_brought", sum(map(len, into)))
        return bool(said[0])

    def read_memory(
        self, offered: bytes, start: int, into: torch.Tensor, check: Callable[[], None], version: int
    ) -> None:
        """Read a block without its rank. check: as for `read`. Raises `PeerLost`."""
        assert self.memory_reads is not None
        try:
            self.memory_reads.read(offered, start, into, check)
        except MemoryReadFailed as error:
            raise self._connections.lost(str(error), version) from error
        events.count("sync_bytes_brought", into.numel())

    def bring_delta(self, base: VersionKey, key: VersionKey, most: int, check: Callable[[], None]) -> bytes:
        """Bring what leads from ``base`` to ``key``, from other receivers too if this one serves them; empty if none.

        most: bytes that it may have.
        """
        if self.held is not None:
            return self.held.bring_delta(self, base, key, most, check)
        return self.read_delta(messages.ReadDelta(*base, *key), most, check)

    def read_delta(self, asked: messages.ReadDelta, most: int, check: Callable[[], None]) -> bytes:
        """Read what leads from one version to another, or its offer; empty if the rank has none."""
        with self._connections.asking(asked, asked.version) as sock:
            found = self._connections.receive_sized(sock, most, check, asked.version)
        events.count("sync_bytes_brought", len(found))
        return found

    def read_held(self, asked: messages.ReadHeld, into: memoryview, check: Callable[[], None], version: int) -> bool:
        """Read bytes of a delta that was offered; return False if the rank hasn't got it any more."""
        has = bytearray(1)
        with self._connections.asking(asked, version) as sock:
            self._connections.receive(sock, memoryview(has), check, version)
            if has[0]:
                self._connections.receive(sock, into, check, version)
        events.count("sync_bytes_brought", len(into) if has[0] else 0)
        return bool(has[0])

    def ask_source(self, asked: messages.AskSource, check: Callable[[], None]) -> messages.HeldRun | None:
        """Return from where to bring more; None if there is nothing yet."""
        with self._connections.asking(asked, asked.version) as sock:
            found = self._connections.receive_sized(sock, _HELD_RUN_MAX, check, asked.version)
        return msgspec.msgpack.decode(found, type=messages.HeldRun) if found else None

    def tell(self, brought: messages.Brought, check: Callable[[], None]) -> None:
        """Tell the rank what came of a run."""
        with self._connections.asking(brought, brought.version) as sock:
            self._connections.receive(sock, memoryview(bytearray(1)), check, brought.version)

    def close(self) -> None:
        """End all connections, and all reads; idempotent."""
        self._connections.close()
        with self._lock:
            mirrors, self._mirrors = self._mirrors, []
        self._let_go(mirrors)

    def _let_go(self, mirrors: Sequence[tuple[Image, HeldExtents | None]]) -> None:
        for image, _ in mirrors:
            if self.held is not None:
                self.held.withdraw(image)
            if self.memory_reads is not None:
                self.memory_reads.deregister(image.bytes_view)
            image.close()


class MirrorBlock:
    """What a receiver has of a block on another host; implements `ReadableBlock`."""

    is_here = True

    def __init__(self, reader: RankReader, granted: messages.Granted, version: int, check: Callable[[], None]) -> None:
        self.nbytes = granted.nbytes
        self.epoch = granted.epoch
        self.reader = reader
        self._granted = granted
        self._version = version
        self._check = check
        image, self._holds = reader.take(granted.nbytes)
        self._image: Image | None = image
        self._here: set[int] = set()
        self.steps: tuple[BlockStep, ...] = ()
        self.view: torch.Tensor = image.bytes_view
        self._memory = compat.host_memory(self.view)
        self._asked_s = time.monotonic()

    def bytes_between(self, start: int, end: int) -> memoryview:
        return self._memory[start:end]

    def bring(self, start: int, end: int, arrived: Callable[[int], None] | None = None) -> None:
        """Read these bytes: by TCP, or without the rank, which is then asked now and then if the block is as it was."""
        self.room_for(start, end)
        steps = range(start, end, EXTENT_BYTES)
        if self._granted.memory and self.reader.memory_reads is not None:
            self._look()
            offered, whole = self._granted.memory, self.view[start:end]
            try:
                self.reader.read_memory(offered, start, whole, self._look, self._version)
            except PeerLost:
                self._refuse_if_gone()  # memory that was let go of can't be read
                raise
            for number in range(len(steps) if arrived is not None else 0):
                assert arrived is not None
                arrived(number)
            return
        asked = messages.ReadRanges(self._granted.block, self._granted.epoch, ((start, end),))
        into = [self._memory[at : min(at + EXTENT_BYTES, end)] for at in steps]
        if not self.reader.read(asked, into, self._check, self._version, arrived):
            raise self._gone()

    def room_for(self, start: int, end: int) -> memoryview:
        """Return memory to bring these bytes into: what is here then is no longer what a delta has made."""
        self._here.difference_update(
            range((start - HEADER_BYTES) // EXTENT_BYTES, (end - 1 - HEADER_BYTES) // EXTENT_BYTES + 1)
        )
        return self._memory[start:end]

    def refresh(self) -> None:
        """Ask the publisher if the block is as it was; set `epoch` to none of its epochs if not."""
        asked = messages.ReadRanges(self._granted.block, self._granted.epoch, ())
        if not self.reader.read(asked, [], self._check, self._version):
            self.epoch = -1

    def _look(self) -> None:
        """See, each second, if the rank still is there and has the version."""
        self._check()
        if time.monotonic() - self._asked_s > _LOOK_S:
            self._refuse_if_gone()

    def _refuse_if_gone(self) -> None:
        self.refresh()
        self._asked_s = time.monotonic()
        if self.epoch != self._granted.epoch:
            raise self._gone()

    def _gone(self) -> VersionRevoked:
        return VersionRevoked(
            f"version {self._version} is gone: the publisher needed its memory while it was read. Fetch a version "
            "again; raise keep_versions if that happens often",
            version=self._version,
        )

    def bring_forward(self, layout: BlockLayout, key: VersionKey, extents: Sequence[int], *, notes: bool) -> None:
        """Make what is here of an earlier version this one, by what changed; extents that this made wrong are brought.

        notes: keep what changed, for a commit. Nothing is certain before extents were compared with their checksums.
        """
        held, self._holds = self._holds, None
        if held is None or held.layout != layout.digest or not self._granted.deltas:
            return
        here = held.extents.intersection(extents)
        changes = Changes(layout.data_bytes if notes else 0)
        if held.key != key and here and not self._patch(layout, held.key, key, here, changes):
            return
        self._here = set(here)
        self.steps = (*held.steps, BlockStep(held.key, changes, self._here))
        while sum(step.changes.nbytes for step in self.steps) > changes.limit:
            self.steps = self.steps[1:]

    def _patch(
        self, layout: BlockLayout, base: VersionKey, key: VersionKey, here: frozenset[int], changes: Changes
    ) -> bool:
        """Apply the delta to the extents that are here, noting what it changes; return False if there is none."""
        encoded = self.reader.bring_delta(base, key, layout.data_bytes, self._check)
        if not encoded:
            return False
        events.count("sync_deltas_applied")
        try:
            runs = zip(runs_of(layout), decode_records(encoded), strict=True)
            jobs = [job for run, record in runs for job in self._changes(run, sparse.Record(record), here, changes)]
            take_turns(jobs, copy_threads())
        except (CheckpointCorrupt, ConfigError, ValueError, msgspec.MsgspecError) as error:
            _log.warning("a delta from version %d to %d is of no use: %s", base.version, key.version, error)
            return False
        return True

    def _changes(
        self, run: BlockRun, record: sparse.Record, here: frozenset[int], changes: Changes
    ) -> Iterator[Callable[[], None]]:
        head = record.head
        if head.units * head.unit_bytes != run.end - run.start:
            raise CheckpointCorrupt("it is of another layout", path=record.what)
        size = head.block_units * head.unit_bytes

        def change(number: int, start: int, end: int) -> None:
            found = record.change(number, self._memory[HEADER_BYTES + start : HEADER_BYTES + end])
            changes.note(start, end - start, *found)

        for number in range(head.blocks):
            start, end = run.start + number * size, min(run.end, run.start + (number + 1) * size)
            if here.intersection(range(start // EXTENT_BYTES, (end - 1) // EXTENT_BYTES + 1)):
                yield partial(change, number, start, end)

    def has(self, extent: int) -> bool:
        return extent in self._here

    @property
    def is_shared(self) -> bool:
        """Return True if this receiver serves others, and brings from them."""
        return self.reader.held is not None

    def offer(self, digest: bytes) -> HeldBytes | None:
        """Let other receivers read what is noted to be here, until the memory is used for something else."""
        held = self.reader.held
        return None if held is None or self._image is None else held.offer(digest, self._image)

    def let_go(self, holds: HeldExtents | None) -> None:
        image, self._image = self._image, None
        if image is not None:
            self.reader.keep(image, holds)
