"""Receivers serve one another: what a receiver has verified of a version, others bring from it.

    ask the publisher rank from where (``versions.fanout``) -> bring a run -> verify it -> tell -> others bring it

A delta travels like a small version: the publisher rank offers it by its size and checksums, receivers bring it from
one another, and keep the newest few to serve them.

Guarantees: a run is verified by the publisher's checksums at each hop, and only then offered; it is read from the
receiver's mirror, never from live tensors, and no longer offered once the mirror is used for something else. A
receiver that is gone, silent, slow, or sends other bytes costs whoever asked it `_SILENT_S`, and is left out; the
publisher has everything. Serving ends with `HeldMirrors.close`. Deltas that are kept take at most half of a version.
Assumes: all receivers of a publisher trust one another with its weights: they share its token.
Does not: choose from whom to bring, or apply deltas (``versions.mirror``).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, PeerLost, StorageError, VersionRevoked
from holdfast.format.manifest import EXTENT_BYTES, PAGE_BYTES, SUM_BYTES
from holdfast.plan.write import round_up
from holdfast.staging.image import Image
from holdfast.sync.session.links import EventLoop, listener
from holdfast.sync.session.rendezvous import hosts_here, this_machine
from holdfast.sync.versions import messages
from holdfast.sync.versions.block import HEADER_BYTES
from holdfast.sync.versions.deltas import delta_key, sum_of
from holdfast.sync.versions.fanout import RunOutcome, bits_between, patience_s
from holdfast.sync.versions.reads import (
    MemoryReadFailed,
    ReadConnections,
    ReadThreads,
    send_all,
    send_range,
    sized,
)
from holdfast.sync.versions.serving import boot_id, connect_to
from holdfast.sync.weights.pieces import copy_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.sync.versions.block import RankVersion
    from holdfast.sync.versions.books import VersionKey
    from holdfast.sync.versions.mirror import MirrorBlock, RankReader
    from holdfast.sync.versions.reads import MemoryReads

_log = logging.getLogger("holdfast")
_SILENT_S: Final = 2.0
_LOOK_S: Final = 1.0
_CLOSE_S: Final = 5.0
_CONNECTIONS_MAX: Final = 256
"""Others that may be connected to this receiver; more are turned away, and bring from elsewhere."""
_OTHERS_KEPT: Final = 8
"""Others to which connections are kept."""
_DELTAS_KEPT: Final = 2
"""Of each publisher rank, for others."""
_DELTA_OFFER_MIN: Final = 1024
_BYTES: Final = 1
_OFFER: Final = 2
"""What follows the answer to `ReadHeld`."""
_OFFER_MAX: Final = 1 << 20
_BUFFER_BYTES: Final = 16 << 20
_SOON_S: Final = 0.002
_LATEST_S: Final = 0.16
"""Seconds until a receiver asks again: twice as long each time that there was nothing."""


@dataclass(slots=True, eq=False)
class HeldBytes:
    """A mirror of a block, or a delta, that others may read. ``here``: extents that were verified, as bits."""

    image: Image
    is_registered: bool
    """It may be read without this process, where that can be."""
    here: int = 0


class HeldMirrors:
    """Serves what this receiver's mirrors hold to others, and reads from theirs, until `close`; thread-safe."""

    def __init__(
        self, token: str, host: str | None, *, peer_timeout_s: float, memory_reads: MemoryReads | None = None
    ) -> None:
        """Listen. token: of the publisher. host: the address of this host, None: all that it seems to have."""
        self._memory_reads = memory_reads
        self._buffers: list[torch.Tensor] = []
        """Registered memory that is free. A read of another receiver may be cut off at any time, and go on writing:
        what it brings is copied from here."""
        self._token = token
        self._peer_timeout_s = peer_timeout_s
        self._lock = threading.Lock()
        self._held: dict[bytes, HeldBytes] = {}
        """By the digest of the block, or the delta."""
        self._deltas: dict[RankReader, list[Image]] = {}
        """Of each publisher rank those that are kept, oldest first."""
        self._others: OrderedDict[messages.RankPlace, ReadConnections] = OrderedDict()
        self._closing = False
        self._threads = ReadThreads(messages.ToHolder, self._answer, "this receiver")
        sock = listener("")
        self.place = messages.RankPlace("", boot_id(), hosts_here(host), sock.getsockname()[1], this_machine())
        self._loop = EventLoop()
        self._loop.listen(sock)
        self._sock = sock
        self._thread = threading.Thread(target=self._live, name="holdfast-versions-held", daemon=True)
        self._thread.start()

    def offer(self, digest: bytes, image: Image, *, is_registered: bool = True) -> HeldBytes:
        """Let others read what is noted in the result to be in ``image``, the block of this digest; see `withdraw`."""
        made = HeldBytes(image, is_registered)
        with self._lock:
            self._held[digest] = made
        return made

    def withdraw(self, image: Image) -> None:
        """Let nobody begin to read ``image``. Who does read it finds other bytes, by their checksums."""
        with self._lock:
            self._held = {digest: held for digest, held in self._held.items() if held.image is not image}

    def read(
        self, run: messages.HeldRun, key: VersionKey, start: int, memory: memoryview, check: Callable[[], None]
    ) -> bool:
        """Read bytes from ``start`` on from another receiver; return False if it hasn't got them. Raises `PeerLost`."""
        version = key.version
        assert run.place is not None
        connections = self._connections(run.holder, run.place)
        until_s = time.monotonic() + patience_s(run.end - run.start) + _SILENT_S

        def check_time() -> None:
            check()
            if time.monotonic() > until_s:
                raise connections.lost("it sent too slowly", version)

        has, offered = bytearray(1), b""
        asked = messages.ReadHeld(
            self._token, key.digest, start, start + len(memory), memory=self._memory_reads is not None
        )
        with connections.asking(asked, version) as sock:
            connections.receive(sock, memoryview(has), check_time, version)
            if has[0] == _BYTES:
                connections.receive(sock, memory, check_time, version)
            elif has[0] == _OFFER:
                offered = connections.receive_sized(sock, _OFFER_MAX, check_time, version)
        if offered:
            try:
                self._read_memory(offered, start, memory, check_time)
            except MemoryReadFailed as error:
                raise connections.lost(str(error), version) from error
        if has[0]:
            events.count("sync_bytes_from_receivers", len(memory))
        return bool(has[0])

    def bring_delta(
        self, reader: RankReader, base: VersionKey, wanted: VersionKey, most: int, check: Callable[[], None]
    ) -> bytes:
        """Return the encoded delta from ``base`` to ``wanted``, from whoever has it, and keep it to serve others.

        Empty if there is none of at most ``most`` bytes, or none any more. Raises `PeerLost` of the publisher rank.
        """
        asked = messages.ReadDelta(*base, *wanted, shares=True)
        told = reader.read_delta(asked, max(most, _DELTA_OFFER_MIN), check)
        if not told:
            return b""
        try:
            offer = msgspec.msgpack.decode(told, type=messages.DeltaOffer)
            delta = SharedDelta(self, reader, delta_key(base, wanted, offer), offer, most, check)
        except (msgspec.MsgspecError, CheckpointCorrupt, StorageError) as error:
            _log.warning("the delta from version %d to %d is of no use: %s", base.version, wanted.version, error)
            return b""
        gone = [delta.image]
        try:
            bring_shared([SharedFetch(delta, delta, delta.key, range(offer.extents))], check, copy_threads())
            gone = self._keep_delta(delta, most)
            return bytes(delta.encoded)
        except (VersionRevoked, CheckpointCorrupt) as error:
            _log.warning("%s; what changed is brought as it is", error)
            return b""
        finally:
            for image in gone:
                self.withdraw(image)
                image.close()

    def close(self) -> None:
        """End serving, and all reads; idempotent."""
        self._closing = True
        self._loop.wake()
        self._threads.close()
        with self._lock:
            self._held, others = {}, list(self._others.values())
            self._others.clear()
            deltas, self._deltas = self._deltas, {}
        for connections in others:
            connections.close()
        for image in chain.from_iterable(deltas.values()):
            image.close()
        self._thread.join(_CLOSE_S)

    # ------------------------------------------------------------------------------------------------------------------

    def _keep_delta(self, delta: SharedDelta, most: int) -> list[Image]:
        """Keep a delta; return those that aren't kept for it: of a rank few are, and of half a version at most."""
        with self._lock:
            if self._closing:
                return [delta.image]
            kept, gone = self._deltas.setdefault(delta.reader, []), []
            kept.append(delta.image)
            while len(kept) > _DELTAS_KEPT or sum(image.nbytes for image in kept) > most // 2:
                gone.append(kept.pop(0))
            return gone

    def _read_memory(self, offered: bytes, start: int, memory: memoryview, check: Callable[[], None]) -> None:
        reads = self._memory_reads
        assert reads is not None
        with self._lock:
            found = next((buffer for buffer in self._buffers if buffer.numel() >= len(memory)), None)
            if found is not None:
                self._buffers = [buffer for buffer in self._buffers if buffer is not found]
        if found is None:
            found = torch.empty(max(len(memory), _BUFFER_BYTES), dtype=torch.uint8)
            reads.register(found)
        try:
            into = found[: len(memory)]
            reads.read(offered, start, into, check)
            memory[:] = compat.host_memory(into)
        finally:
            if reads.is_quiet(found):
                with self._lock:
                    self._buffers.append(found)
            else:
                reads.deregister(found)

    def _live(self) -> None:
        try:
            while not self._closing:
                for sock in self._loop.hear(_LOOK_S):
                    assert isinstance(sock, socket.socket)
                    sock.settimeout(0.0)
                    if len(self._threads) < _CONNECTIONS_MAX:
                        self._threads.start(sock, "another receiver")
                    else:
                        sock.close()
        finally:
            self._loop.close()
            self._sock.close()

    def _answer(self, sock: socket.socket, _: str, asked: messages.ReadHeld) -> None:
        if asked.token != self._token:
            raise ConnectionError("it doesn't know this publisher's token")
        with self._lock:
            held = self._held.get(asked.digest)
            fd = None if held is None else _file_with(held, asked)
        if held is None or fd is None:
            send_all(sock, b"\x00", self._peer_timeout_s)
            return
        try:
            if asked.memory and self._memory_reads is not None and held.is_registered:
                offered = self._memory_reads.offer(held.image.bytes_view)
                told = bytes([_OFFER]) + sized(offered) if offered else bytes(1)
                send_all(sock, told, self._peer_timeout_s)  # at once: a second one would wait for an acknowledgement
            else:
                send_all(sock, bytes([_BYTES]), self._peer_timeout_s)
                send_range(sock, fd, asked.start, asked.end, self._peer_timeout_s)
        finally:
            os.close(fd)
        events.count("sync_bytes_served", asked.end - asked.start)

    def _connections(self, holder: str, place: messages.RankPlace) -> ReadConnections:
        with self._lock:
            found = self._others.pop(place, None)
            if found is None:
                found = ReadConnections(
                    f"receiver {holder}", lambda: connect_to(place, _SILENT_S), None, peer_timeout_s=_SILENT_S
                )
            self._others[place] = found
            idle = [other for other, one in self._others.items() if one.is_idle and other != place]
            gone = [self._others.pop(other) for other in idle[: max(0, len(self._others) - _OTHERS_KEPT)]]
        for connections in gone:
            connections.close()
        return found


def _file_with(held: HeldBytes, asked: messages.ReadHeld) -> int | None:
    """Return a descriptor of what has the bytes that are asked for, for the caller to close."""
    first, last = (asked.start - HEADER_BYTES) // EXTENT_BYTES, (asked.end - 1 - HEADER_BYTES) // EXTENT_BYTES
    if not HEADER_BYTES <= asked.start < asked.end <= held.image.nbytes:
        return None
    wanted = bits_between(first, last + 1)
    return os.dup(held.image.fd) if held.here & wanted == wanted else None


class SharedDelta:
    """A delta that was offered, in memory that others may read as they read a mirror; both ends of a `SharedFetch`."""

    def __init__(
        self,
        held: HeldMirrors,
        reader: RankReader,
        key: VersionKey,
        offer: messages.DeltaOffer,
        most: int,
        check: Callable[[], None],
    ) -> None:
        """Raises `CheckpointCorrupt` for an offer that can't be, `StorageError` if there isn't so much memory."""
        self.reader = reader
        self.key = key
        self.what = f"a delta to version {key.version}"
        self.data_bytes = offer.nbytes
        if not 0 < offer.nbytes <= most or len(offer.sums) != SUM_BYTES * offer.extents:
            raise self._corrupt(f"{len(offer.sums)} bytes of checksums were announced for {offer.nbytes} bytes", 0, 0)
        self._held = held
        self._sums = offer.sums
        self._check = check
        self.image = Image(round_up(HEADER_BYTES + offer.nbytes, PAGE_BYTES))
        self._memory = compat.host_memory(self.image.bytes_view)

    @property
    def encoded(self) -> memoryview:
        return self._memory[HEADER_BYTES : HEADER_BYTES + self.data_bytes]

    def room_for(self, start: int, end: int) -> memoryview:
        """Return memory to bring these bytes into."""
        return self._memory[start:end]

    def has(self, extent: int) -> bool:
        """Return False: nothing is here at first."""
        del extent
        return False

    def offer(self, digest: bytes) -> HeldBytes:
        """Let other receivers read what is noted to be here."""
        return self._held.offer(digest, self.image, is_registered=False)

    def bring(self, start: int, end: int) -> None:
        """Read these bytes from the publisher rank. Raises `VersionRevoked` if it hasn't got the delta any more."""
        asked = messages.ReadHeld("", self.key.digest, start, end)
        if not self.reader.read_held(asked, self._memory[start:end], self._check, self.key.version):
            raise VersionRevoked(
                f"{self.what} is gone: the publisher needed its memory. Raise delta_bytes if that happens often",
                version=self.key.version,
            )

    def bring_extents(self, first: int, last: int) -> None:
        """Bring these extents, and check them. Raises as `bring` and `check`."""
        self.bring(HEADER_BYTES + first * EXTENT_BYTES, HEADER_BYTES + min((last + 1) * EXTENT_BYTES, self.data_bytes))
        for extent in range(first, last + 1):
            self.check(extent)

    def is_right(self, extent: int) -> bool:
        """Return True if the bytes of an extent have their checksum."""
        return sum_of(self.encoded, extent) == self._sums[extent * SUM_BYTES : (extent + 1) * SUM_BYTES]

    def check(self, extent: int) -> None:
        """Raise `CheckpointCorrupt` unless they have."""
        if not self.is_right(extent):
            start = extent * EXTENT_BYTES
            end = min(start + EXTENT_BYTES, self.data_bytes)
            raise self._corrupt("bytes have another checksum than was announced", start, end)

    def _corrupt(self, why: str, start: int, end: int) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"{self.what}: {why} (bytes {start} to {end})", path=self.what, byte_range=(start, end)
        )


class SharedFetch:
    """Brings the wanted extents of one rank's version into its mirror, from whoever has them; thread-safe.

    A delta is both to it, the version and the mirror.
    """

    def __init__(
        self,
        version: RankVersion | SharedDelta,
        mirror: MirrorBlock | SharedDelta,
        key: VersionKey,
        wanted: Sequence[int],
    ) -> None:
        self._version = version
        self._mirror = mirror
        self._reader: RankReader = mirror.reader
        self._key = key
        self._wanted = wanted
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._lacking = sum(1 << extent for extent in set(wanted))
        self._doing = 0
        self._here = 0
        self._offered = mirror.offer(key.digest)
        self._brought_s = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Return True if nothing is left to bring, but for what is being brought."""
        with self._lock:
            return not self._lacking & ~self._doing

    def looks(self) -> list[Callable[[], None]]:
        """Return jobs that verify what is here of the wanted extents already."""

        def look(extents: Sequence[int]) -> None:
            found = [extent for extent in extents if self._version.is_right(extent)]
            self._has(sum(1 << extent for extent in found))

        here = [extent for extent in self._wanted if self._mirror.has(extent)]
        return [partial(look, here[at : at + _LOOKED_AT]) for at in range(0, len(here), _LOOKED_AT)]

    def tell(self, check: Callable[[], None]) -> None:
        """Tell the publisher rank what is here."""
        self._tell(0, RunOutcome.HERE, check)

    def bring_some(self, check: Callable[[], None]) -> bool:
        """Bring a run that is lacking; return False if there is nothing to bring yet. check: may raise, to end it."""
        run = self._next(check)
        if run is None:
            return False
        bits = bits_between(run.start, run.end)
        try:
            outcome = self._bring(run, check)
            if outcome == RunOutcome.HERE:
                self._brought_s = time.monotonic()
                self._has(bits)
        finally:
            with self._lock:
                self._doing &= ~bits
        self._tell(run.number, outcome, check)
        return True

    # ------------------------------------------------------------------------------------------------------------------

    def _next(self, check: Callable[[], None]) -> messages.HeldRun | None:
        with self._asking:
            with self._lock:
                lacking = self._lacking & ~self._doing
            if not lacking:
                return None
            waited_s = time.monotonic() - self._brought_s
            run = self._reader.ask_source(messages.AskSource(*self._key, _encode(lacking), waited_s), check)
            if run is None:
                return None
            bits = bits_between(run.start, max(run.start, run.end))
            if not bits or bits & lacking != bits:
                raise PeerLost(
                    f"{self._version.what}: it was told to bring extents {run.start} to {run.end}, which it doesn't "
                    "lack. Use the same version of Holdfast on both sides",
                    peer="the publisher",
                    phase="transfer",
                    version=self._key.version,
                )
            with self._lock:
                self._doing |= bits
            return run

    def _bring(self, run: messages.HeldRun, check: Callable[[], None]) -> RunOutcome:
        start = HEADER_BYTES + run.start * EXTENT_BYTES
        end = HEADER_BYTES + min(run.end * EXTENT_BYTES, self._version.data_bytes)
        held = self._reader.held
        if run.place is None or held is None:
            self._version.bring_extents(run.start, run.end - 1)
            return RunOutcome.HERE
        memory = self._mirror.room_for(start, end)
        try:
            if not held.read(run, self._key, start, memory, check):
                return RunOutcome.GONE
        except PeerLost as error:
            _log.warning("%s; it is brought from elsewhere", error)
            return RunOutcome.FAILED
        if all(self._version.is_right(extent) for extent in range(run.start, run.end)):
            return RunOutcome.HERE
        _log.warning("receiver %s sent other bytes of %s than it has; left out", run.holder, self._version.what)
        return RunOutcome.FAILED

    def _has(self, bits: int) -> None:
        with self._lock:
            self._lacking &= ~bits
            self._here |= bits
            if self._offered is not None:
                self._offered.here = self._here

    def _tell(self, number: int, outcome: RunOutcome, check: Callable[[], None]) -> None:
        with self._lock:
            here = _encode(self._here)
        self._reader.tell(messages.Brought(*self._key, number, here, int(outcome)), check)


_LOOKED_AT: Final = 4


def _encode(bits: int) -> bytes:
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def bring_shared(fetches: Sequence[SharedFetch], check: Callable[[], None], threads: int) -> None:
    """Bring what all of these lack, and verify it. check: called often; may raise, to end it.

    Raises `PeerLost` of a publisher rank, `VersionRevoked`, `CheckpointCorrupt`.
    """
    take_turns([job for fetch in fetches for job in fetch.looks()], threads)
    for fetch in fetches:
        fetch.tell(check)

    def bring(first: int) -> None:
        pause_s, left = _SOON_S, [*fetches[first:], *fetches[:first]]
        while left := [fetch for fetch in left if not fetch.is_done]:
            check()
            if any(fetch.bring_some(check) for fetch in left):
                pause_s = _SOON_S
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LATEST_S)

    take_turns([partial(bring, number % len(fetches)) for number in range(threads)], threads)
