"""What changed from one version in a block to the next, by element: encoded beside training, kept for receivers.

    published(v) -> a lease on v's block -> a thread encodes v-1 to v, run by run -> kept within ``delta_bytes``
    find(base, v) -> waits a moment for what is being encoded -> a record a run, folded if there are several steps
    offer(base, v) -> the same, with checksums of its extents: for receivers that bring it from one another

A *run* is a range of a block with pieces whose elements have one size; its bytes are one array (`format.sparse`).

Guarantees: nothing waits for this but who asks for a delta, and that is bounded. Leases keep the two blocks from being
overwritten while there are others; if one is, its delta is dropped. What is kept was made of the bytes that the
digests name.
Assumes: versions of other layouts have no delta. Receivers verify what they make of it.
Does not: know what of a version a receiver wants: a delta is of all that the rank has.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import xxhash

from holdfast import events
from holdfast.errors import HoldfastError
from holdfast.format import sparse
from holdfast.format.manifest import EXTENT_BYTES, SUM_BYTES
from holdfast.sync.versions import messages
from holdfast.sync.versions.block import HEADER_BYTES, BlockLayout, MappedBlock
from holdfast.sync.versions.books import VersionKey
from holdfast.sync.weights.pieces import copy_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.sync.versions.books import BlockLease
    from holdfast.sync.versions.serving import Served

_log = logging.getLogger("holdfast")
_SHARE: Final = 0.5
"""Of a version, that deltas may take together unless ``delta_bytes`` says how much."""
_PATIENCE_S: Final = 0.05
_PATIENCE_MAX_S: Final = 5.0
_PATIENCE_BYTES_PER_S: Final = 1 << 30
"""Who asks waits no longer than for so many bytes of the version a second."""
_SLICE_S: Final = 0.02
_FOLDED_MAX: Final = 4
_RECORDS: Final = msgspec.msgpack.Decoder(list[bytes])


class BlockRun(NamedTuple):
    """Bytes ``start`` to ``end`` of the pieces of a block, which hold elements like those of ``dtype``."""

    start: int
    end: int
    dtype: str


def runs_of(layout: BlockLayout) -> list[BlockRun]:
    """Return the runs of a layout, ascending; pieces without elements are in none."""
    found: list[BlockRun] = []
    unit: sparse.UnitKind | None = None
    for number, piece in enumerate(layout.table):
        nbytes = layout.nbytes(number)
        if not layout.own[number] or not nbytes:
            continue
        start, now = layout.starts[number], sparse.unit_of(piece.dtype)
        if found and unit is not None and (now.nbytes, now.ordered) == (unit.nbytes, unit.ordered):
            found[-1] = found[-1]._replace(end=start + nbytes)
        else:
            found.append(BlockRun(start, start + nbytes, piece.dtype))
        unit = now
    return found


def decode_records(encoded: bytes) -> list[bytes]:
    """Return the records of each run. Raises `msgspec.MsgspecError`."""
    return _RECORDS.decode(encoded)


def sum_of(encoded: memoryview, extent: int) -> bytes:
    """Return the checksum of one extent of an encoded delta, as in its offer."""
    part = encoded[extent * EXTENT_BYTES : (extent + 1) * EXTENT_BYTES]
    return xxhash.xxh3_64_intdigest(part).to_bytes(SUM_BYTES, "little")


def delta_key(base: VersionKey, wanted: VersionKey, offer: messages.DeltaOffer) -> VersionKey:
    """Return by what a delta is known that receivers bring from one another: it stands for all of its bytes."""
    size = offer.nbytes.to_bytes(8, "little")
    return VersionKey(wanted.version, xxhash.xxh3_128_digest(base.digest + wanted.digest + size + offer.sums))


class _StepDelta(NamedTuple):
    base: VersionKey
    encoded: bytes

    @property
    def nbytes(self) -> int:
        return len(self.encoded)


class _SharedDelta(NamedTuple):
    encoded: bytes
    key: VersionKey
    offer: messages.DeltaOffer


class BlockDeltas:
    """The deltas of one publisher rank."""

    def __init__(self, served: Served, *, kind: sparse.Kind, delta_bytes: int | None, rank: int) -> None:
        self._served = served
        self._kind = kind
        self._delta_bytes = delta_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._kept: dict[VersionKey, _StepDelta] = {}
        """By the version that it leads to, oldest first."""
        self._folding = threading.Lock()
        self._folded: dict[tuple[VersionKey, VersionKey], bytes] = {}
        self._sharing = threading.Lock()
        self._shared: dict[tuple[VersionKey, VersionKey], _SharedDelta] = {}
        """Those that receivers bring from one another, oldest first; none outlives the step that it ends with."""
        self._last: tuple[VersionKey, BlockLease, BlockLayout] | None = None
        self._next: tuple[VersionKey, BlockLease, BlockLayout] | None = None
        self._encoding: VersionKey | None = None
        self._runs: tuple[bytes, list[BlockRun]] = (b"", [])
        self._mapped: dict[int, MappedBlock] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._live, name=f"holdfast-versions-deltas-{rank}", daemon=True)
        self._thread.start()

    def published(self, version: int, digest: bytes, layout: BlockLayout) -> None:
        """Encode the delta to a version that was just published, soon; the caller holds the lock of what is served."""
        try:
            lease = self._served.books.lease(self, version, digest)
        except HoldfastError:  # pinned or not, it isn't here any more
            return
        with self._lock:  # unlike a Condition's, no interrupt leaves it locked
            before, self._next = self._next, (VersionKey(version, digest), lease, layout)
            self._changed.notify_all()
        if before is not None:  # it was overtaken: the next delta leads from the last one that was encoded
            self._served.books.release(self, before[1].block.number, before[1].epoch)

    def find(self, base: VersionKey, wanted: VersionKey, data_bytes: int, stopping: Callable[[], bool]) -> bytes:
        """Return the encoded records that lead from ``base`` to ``wanted``; empty if there are none."""
        patience_s = min(_PATIENCE_MAX_S, _PATIENCE_S + data_bytes / _PATIENCE_BYTES_PER_S)
        ends_s = time.monotonic() + patience_s
        with self._changed:
            while self._is_coming(wanted) and not stopping() and (left_s := ends_s - time.monotonic()) > 0:
                self._changed.wait(min(_SLICE_S, left_s))
            chain: list[_StepDelta] = []
            at = wanted
            while at != base and (kept := self._kept.get(at)) is not None:
                chain.insert(0, kept)
                at = kept.base
            if at != base or not chain:
                return b""
        encoded = chain[0].encoded if len(chain) == 1 else self._fold(base, wanted, chain)
        return encoded if len(encoded) < data_bytes else b""  # else the bytes themselves are less

    def offer(
        self, base: VersionKey, wanted: VersionKey, data_bytes: int, stopping: Callable[[], bool]
    ) -> tuple[VersionKey, messages.DeltaOffer] | None:
        """Return the key and the offer of the delta that leads from ``base`` to ``wanted``; None if there is none."""
        encoded = self.find(base, wanted, data_bytes, stopping)
        if not encoded:
            return None
        with self._sharing:  # once, for all who ask
            made = self._shared.get((base, wanted))
            if made is None or made.encoded is not encoded:
                memory = memoryview(encoded)
                sums = b"".join(sum_of(memory, extent) for extent in range(-(-len(encoded) // EXTENT_BYTES)))
                offer = messages.DeltaOffer(len(encoded), sums)
                made = _SharedDelta(encoded, delta_key(base, wanted, offer), offer)
                with self._changed:
                    if wanted in self._kept:
                        self._shared[base, wanted] = made
                    self._drop_oldest(self._shared, self._limit(data_bytes))
        return made.key, made.offer

    def read(self, digest: bytes, start: int, end: int) -> memoryview:
        """Return bytes of a delta that was offered; none if it isn't kept any more, or hasn't so many."""
        with self._changed:
            found = next((one.encoded for one in self._shared.values() if one.key.digest == digest), b"")
        return memoryview(found)[start:end] if 0 <= start < end <= len(found) else memoryview(b"")

    def close(self, timeout_s: float) -> None:
        """End the thread; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _is_coming(self, wanted: VersionKey) -> bool:
        if self._closed:
            return False
        return self._encoding == wanted or (self._next is not None and self._next[0] == wanted)

    def _fold(self, base: VersionKey, wanted: VersionKey, chain: Sequence[_StepDelta]) -> bytes:
        """Return one record a run for several steps; made once for all who ask."""
        with self._folding:
            with self._changed:
                known = self._folded.get((base, wanted))
            if known is None:
                steps = [decode_records(step.encoded) for step in chain]
                known = msgspec.msgpack.encode([sparse.fold(run, threads=1) for run in zip(*steps, strict=True)])
                with self._changed:
                    self._folded[base, wanted] = known
                    for key in list(self._folded)[:-_FOLDED_MAX]:
                        del self._folded[key]
            return known

    # the thread ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while True:
            with self._changed:
                while self._next is None and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                (now, self._next), before = (self._next, None), self._last
                assert now is not None
                self._encoding = now[0]
            kept = None
            try:
                if before is not None and before[2].digest == now[2].digest:
                    kept = self._encode(before, now)
            except Exception as error:  # noqa: BLE001 - nobody needs a delta, but who asks must not wait for a thread
                _log.warning("no delta leads to version %d: %r", now[0].version, error)
            self._keep(now[0], kept, now[2].data_bytes)
            self._last = now
            if before is not None:
                with self._served.lock:
                    self._served.books.release(self, before[1].block.number, before[1].epoch)

    def _encode(
        self, before: tuple[VersionKey, BlockLease, BlockLayout], now: tuple[VersionKey, BlockLease, BlockLayout]
    ) -> _StepDelta | None:
        """Return what leads from one version to the other; None if a block was overwritten meanwhile."""
        layout = now[2]
        if self._runs[0] != layout.digest:
            self._runs = layout.digest, runs_of(layout)
        blocks = [self._mapping(lease) for _, lease, _ in (before, now)]
        old, new = blocks
        if old is None or new is None:
            return None
        records: list[bytes] = []
        for run in self._runs[1]:
            start, end = HEADER_BYTES + run.start, HEADER_BYTES + run.end
            memory = old.bytes_between(start, end), new.bytes_between(start, end)
            threads = max(1, copy_threads() // 2)
            records.append(sparse.encode(*memory, run.dtype, kind=self._kind, threads=threads).record)
            if self._closed:
                return None
        if (old.epoch, new.epoch) != (before[1].epoch, now[1].epoch):
            return None
        events.count("sync_deltas_encoded")
        return _StepDelta(before[0], msgspec.msgpack.encode(records))

    def _mapping(self, lease: BlockLease) -> MappedBlock | None:
        """Map the block of a lease, of its own: the publisher may close its mapping at any moment."""
        number = lease.block.number
        if number not in self._mapped:
            fd = self._served.memory_of(number, lease.epoch)
            if fd is None:
                return None
            with self._served.lock:
                alive = set(self._served.memory)
            for gone in self._mapped.keys() - alive:
                del self._mapped[gone]
            self._mapped[number] = MappedBlock(fd, lease.block.nbytes)
        return self._mapped[number]

    def _keep(self, key: VersionKey, kept: _StepDelta | None, data_bytes: int) -> None:
        limit = self._limit(data_bytes)
        with self._changed:
            self._encoding = None
            if kept is not None and kept.nbytes <= limit:
                self._kept[key] = kept
                self._drop_oldest(self._kept, limit)
                self._folded.clear()
            else:
                self._kept.clear()  # nothing leads on from these
            self._shared = {pair: shared for pair, shared in self._shared.items() if pair[1] in self._kept}
            self._changed.notify_all()

    def _limit(self, data_bytes: int) -> int:
        return int(_SHARE * data_bytes) if self._delta_bytes is None else self._delta_bytes

    @staticmethod
    def _drop_oldest(deltas: dict[Any, _StepDelta] | dict[Any, _SharedDelta], limit: int) -> None:
        """Drop deltas, oldest first, until they have at most ``limit`` bytes, or one is left."""
        while len(deltas) > 1 and sum(len(one.encoded) for one in deltas.values()) > limit:
            del deltas[next(iter(deltas))]
