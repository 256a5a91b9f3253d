"""Fetch versions from a publisher's blocks, and commit them: one receiver's half.

    watch (a thread) -> News -> fetch: a lease of every rank -> map -> verify where it lies -> commit: copy, once
                                            over a network  -> bring to a mirror, verify there -> commit

Guarantees: nothing of the destination is written before the version is complete on all ranks and every extent of it
that is wanted was verified, where it lies or in the mirror, from the publisher's record on. What was written from a
mapped block is of that version if the epochs are as before after the last byte; otherwise `VersionRevoked`, and the
destination stays dirty. A receiver that stops, or never comes back, costs the publisher at most one block. What was
fetched stays readable when the publisher dies; what is in a mirror can't be revoked. An exception that lands anywhere
while connections are used, such as Ctrl-C, costs these: they are made anew, within the deadline of the call.
Assumes: for blocks that are mapped, that the publisher and this process share a host and a user.
Does not: copy what is mapped, transfer bytes (``mirror``, ``peers``), or decide when to commit.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.boxes import intersect
from holdfast.coordination.deadline import Deadline
from holdfast.cores import take_turns
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    FetchCancelled,
    HoldfastError,
    PeerLost,
    StateMismatch,
    VersionRevoked,
)
from holdfast.format.manifest import EXTENT_BYTES
from holdfast.state.entries import torch_dtype
from holdfast.state.structure import part_of
from holdfast.sync.lineage import receiver_name
from holdfast.sync.session.fetcher import infos_of, parts_of
from holdfast.sync.session.links import Ended, EventLoop, Link
from holdfast.sync.session.rendezvous import open_rendezvous
from holdfast.sync.versions import messages
from holdfast.sync.versions.block import BlockLayout, HeldExtents, MappedBlock, RankVersion, ReadableBlock
from holdfast.sync.versions.books import VersionKey
from holdfast.sync.versions.mirror import MirrorBlock, RankReader
from holdfast.sync.versions.peers import HeldMirrors, SharedFetch, bring_shared
from holdfast.sync.versions.serving import connect_to, is_gone
from holdfast.sync.versions.watch import Known, PublisherWatch
from holdfast.sync.weights.apply import twins_differ
from holdfast.sync.weights.pieces import Local, copy_all, copy_threads, global_rank, places_of
from holdfast.sync.weights.scatter import LiveWrite, write_live

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from holdfast.sync.protocol import Destination
    from holdfast.sync.versions.reads import MemoryReads
    from holdfast.sync.weights.buckets import PieceBox, Wanted
    from holdfast.sync.weights.scatter import Changes

_LOOK_S: Final = 0.01
_CONNECT_S: Final = 5.0
_SLICE_S: Final = 0.5
_ASK_S: Final = 0.1
"""How often calls that find nothing ask the publisher, which tells all news by itself."""
_NEWS_S: Final = 0.005
"""A call that has less time than this always asks: it can't wait for news that are on their way."""
_TAKE_S: Final = 1.0
"""Others only send, which takes a moment: who has connections for longer was cut off, by Ctrl-C for example."""
_RECORDS_MAX_LAYOUTS: Final = 8


class _SelectedParts(NamedTuple):
    """What a destination takes: its boxes, and for each rank the parts of the pieces in its block."""

    names: tuple[str, ...]
    wanted: list[Wanted]
    parts: list[list[PieceBox]]
    extents: list[list[int]]
    nbytes: int


_Content = tuple[str, tuple[VersionKey, ...]]
"""What a version is known by: its publisher's incarnation, and the part of each rank."""


class _Steps(NamedTuple):
    """How a block was brought forward, and the extents of which that says all."""

    changes: tuple[Changes, ...]
    extents: frozenset[int]

    def others(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the extents of a range, of a block's pieces, of which that doesn't say all."""
        found = range(start // EXTENT_BYTES, -(-end // EXTENT_BYTES))
        return [(extent * EXTENT_BYTES, (extent + 1) * EXTENT_BYTES) for extent in found if extent not in self.extents]


class RankConnections:
    """This receiver's connections to all ranks of one publisher, and the blocks that it has mapped."""

    def __init__(
        self,
        places: messages.PublisherPlaces,
        deadline: Deadline,
        *,
        peer_timeout_s: float,
        serve: bool = False,
        host: str | None = None,
        memory_reads: Callable[[], MemoryReads] | None = None,
    ) -> None:
        """Connect. serve: to other receivers, at ``host``, what was fetched. Raises `PeerLost` if a rank is gone.

        memory_reads: makes what reads blocks without their ranks, where these allow it.
        """
        self.places = places
        self._memory_reads: MemoryReads | None = None
        self._readers: list[RankReader | None] = []
        self._loop = EventLoop()
        self._links: list[Link] = []
        self._blocks: list[dict[int, MappedBlock]] = [{} for _ in places.ranks]
        self._layouts: dict[bytes, BlockLayout] = {}
        self._asked = 0
        self._news = messages.News(())
        self._sending = threading.Lock()
        self._cut_off = False
        """Set while messages are sent and taken in: it stays set where an exception ends that, such as Ctrl-C."""
        self._to_say: deque[tuple[int, messages.GiveBack | messages.HasCommitted]] = deque()
        """By rank: sent by whoever may send next."""
        self.selections: dict[tuple[bytes, ...], _SelectedParts] = {}
        self._held: HeldMirrors | None = None
        name = receiver_name()
        try:
            self._memory_reads = None if memory_reads is None else memory_reads()
            if serve:
                self._held = HeldMirrors(
                    places.token, host, peer_timeout_s=peer_timeout_s, memory_reads=self._memory_reads
                )
            for rank, place in enumerate(places.ranks):
                try:
                    sock = connect_to(place, min(_CONNECT_S, deadline.left_s()))
                except OSError as error:
                    ended = "it has ended" if is_gone(error) else f"it can't be reached ({error.strerror or error})"
                    raise self._lost(rank, ended, None) from error
                link = Link(sock, f"publisher rank {rank}", messages.FromRank)
                self._loop.add(link)
                self._links.append(link)
                serves = None if self._held is None else self._held.place
                introduce = messages.Introduce(name, places.token, serves)
                link.send(introduce)
                reader = RankReader(
                    rank,
                    place,
                    introduce,
                    peer_timeout_s=peer_timeout_s,
                    held=self._held,
                    memory_reads=self._memory_reads,
                )
                self._readers.append(None if place.path else reader)
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        self._loop.wake()

    def close(self) -> None:
        self._loop.close()
        if self._held is not None:
            self._held.close()
        for reader in self._readers:
            if reader is not None:
                reader.close()
        if self._memory_reads is not None:
            self._memory_reads.close()

    def records(self, deadline: Deadline, check: Callable[[], None]) -> tuple[messages.VersionRecord, ...]:
        """Ask rank 0 for the versions that there are now. check: called while waiting; may raise."""
        self._asked += 1
        self._send(0, messages.AskNews(once=True, number=self._asked))
        while self._news.number != self._asked:  # one that was cut off is answered, too
            check()
            self._hear({}, None, deadline)
        return self._news.records

    def lease(
        self, record: messages.VersionRecord, deadline: Deadline, check: Callable[[], None]
    ) -> list[tuple[ReadableBlock, messages.Granted]]:
        """Take a lease on the version from every rank, or on none. check: called while waiting; may raise.

        Raises the reason of a rank that refuses, `PeerLost`, `DeadlineExceeded`.
        """
        self._asked += 1
        for rank, digest in zip(range(len(self._links)), record.digests, strict=True):
            self._send(rank, messages.TakeLease(self._asked, record.version, digest))
        granted: dict[int, messages.Granted] = {}
        try:
            while len(granted) < len(self._links):
                check()
                self._hear(granted, record.version, deadline)
        except BaseException:
            self._asked += 1  # what is granted from now on is given back
            self.give_back(granted)
            raise
        return [
            (self._blocks[rank][granted[rank].block], granted[rank])
            if reader is None
            else (MirrorBlock(reader, granted[rank], record.version, check), granted[rank])
            for rank, reader in enumerate(self._readers)
        ]

    def give_back(self, granted: Mapping[int, messages.Granted]) -> None:
        """End leases, by rank, soon. Any thread; doesn't wait."""
        self._say((rank, messages.GiveBack(said.block, said.epoch)) for rank, said in granted.items())

    def tell_committed(self, receiver: str, version: int, seconds: float) -> None:
        """Tell rank 0 that a version is live, soon. Any thread; doesn't wait."""
        self._say([(0, messages.HasCommitted(receiver, version, seconds))])

    def _say(self, some: Iterable[tuple[int, messages.GiveBack | messages.HasCommitted]]) -> None:
        self._to_say.extend(some)
        if self._sending.acquire(blocking=False):  # else who sends now does this afterwards
            self.let_go()

    def take(self, within_s: float) -> bool:
        """Become the one thread that uses the connections, until `let_go`; return False if they are of no use any more.

        That is so where an exception has cut off who used them: it may have sent half a message, or left them taken.
        """
        if not self._sending.acquire(timeout=within_s):
            return False
        if self._cut_off:
            self._sending.release()
            return False
        return True

    def let_go(self) -> None:
        """Send what is to be said, and let others send; the caller has taken the connections."""
        while True:
            try:
                while self._to_say and not self._cut_off:
                    self._cut_off = True
                    rank, message = self._to_say.popleft()
                    self._links[rank].send(message)
                    self._cut_off = False
            finally:
                self._sending.release()
            if self._cut_off or not self._to_say or not self._sending.acquire(blocking=False):
                return

    def _send(self, rank: int, message: messages.AskNews | messages.TakeLease) -> None:
        self._cut_off = True
        self._links[rank].send(message)
        self._cut_off = False

    def version_of(self, block: ReadableBlock, granted: messages.Granted, digest: bytes, what: str) -> RankVersion:
        """Return a rank's part of a version; see `RankVersion`."""
        if len(self._layouts) > _RECORDS_MAX_LAYOUTS * len(self._links):
            self._layouts.clear()
        sizes = granted.data_bytes, granted.layout_bytes, granted.sums
        return RankVersion(block, sizes, digest, self._layouts, what=what)

    def _hear(self, granted: dict[int, messages.Granted], version: int | None, deadline: Deadline) -> None:
        """Take in what ranks answer, for a moment."""
        if deadline.passed():
            raise self._silent(granted, version, deadline)
        self._cut_off, refused = True, None
        for found in self._loop.hear(min(_SLICE_S, deadline.left_s())):
            assert not isinstance(found, socket.socket)
            link, said = found
            rank = self._links.index(link)
            if isinstance(said, Ended):
                raise self._lost(rank, said.why, version)
            if isinstance(said, messages.BlockFile):
                blocks = self._blocks[rank]
                blocks[said.block] = MappedBlock(link.descriptors.popleft(), said.nbytes)
                for number in blocks.keys() - said.alive:
                    del blocks[number]
            elif isinstance(said, messages.News):
                self._news = said
            elif isinstance(said, messages.Granted):
                if said.number == self._asked:
                    granted[rank] = said
                else:
                    link.send(messages.GiveBack(said.block, said.epoch))
            elif isinstance(said, messages.LeaseRefused) and said.number == self._asked:
                refused = said.reason.cause()
        self._cut_off = False
        if refused is not None:
            raise refused

    def _silent(
        self, granted: Mapping[int, messages.Granted], version: int | None, deadline: Deadline
    ) -> HoldfastError:
        ranks = [0] if version is None else [rank for rank in range(len(self._links)) if rank not in granted]
        asked = "its versions" if version is None else f"version {version}"
        return deadline.exceeded(
            f"an answer of publisher rank(s) {', '.join(map(str, ranks))} to a request for {asked}",
            "is it stopped? Look at its log, or raise the timeout",
        )

    def _lost(self, rank: int, why: str, version: int | None) -> PeerLost:
        return PeerLost(
            f"publisher rank {rank} was lost: {why}. Receive again when a publisher is there",
            peer=f"publisher rank {rank}",
            phase="lease",
            version=version,
        )


class BlockReceiving:
    """See the module; implements `Receiving`."""

    def __init__(
        self,
        *,
        rendezvous: Any,
        peer_timeout_s: float,
        fan_out: bool = False,
        host: str | None = None,
        memory_reads: Callable[[], MemoryReads] | None = None,
    ) -> None:
        """fan_out: serve other receivers what was fetched, at ``host``, and bring from them what they have.

        memory_reads: makes what reads blocks without their ranks.
        """
        self._name = receiver_name()
        self._memory_reads = memory_reads
        self._fan_out = fan_out
        self._host = host
        self._rendezvous = open_rendezvous(rendezvous, hosting=False)
        self._peer_timeout_s = peer_timeout_s
        self._watch = PublisherWatch(self._rendezvous)
        self._ranks: RankConnections | None = None
        self._own_of = ""
        """The publisher of what was fetched last."""
        self._found: tuple[tuple[int | None, int | None], tuple[Known, messages.VersionRecord]] | None = None
        """By what was asked for: what `await_version` has found."""
        self._asked_s = -_ASK_S
        """When the publisher was asked last."""
        self._cancelled = False
        self._leaving = False

    def newest(self, newer_than: int | None) -> int | None:
        self._watch.start()
        known = self._watch.known
        record = None if known is None else self._newer(known, newer_than)
        return None if record is None else record.version

    def await_version(self, version: int | None, newer_than: int | None, deadline: Deadline) -> None:
        self._watch.start()
        self._found = (version, newer_than), self._wait_for(version, newer_than, deadline)

    def fetch(
        self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline
    ) -> FetchedBlocks:
        began = time.monotonic()
        self._watch.start()
        found, self._found = self._found, None
        while True:
            if found is None or found[0] != (version, newer_than):
                found = (version, newer_than), self._wait_for(version, newer_than, deadline)
            (known, record), found = found[1], None
            waited_s = time.monotonic() - began
            try:
                fetched = self._fetch(destination, known.places, record, deadline)
            except (CheckpointNotFound, VersionRevoked):
                destination.abandon()
                if version is not None or not self._is_superseded(record):
                    raise
                continue
            except BaseException:
                destination.abandon()
                raise
            self._own_of = known.places.incarnation
            fetched.seconds = {"wait": waited_s, "transfer": time.monotonic() - began - waited_s}
            return fetched

    def cancel(self) -> None:
        self._cancelled = True
        self._wake()

    def leave(self) -> None:
        self._leaving = True
        self._wake()

    def close(self) -> None:
        self._watch.close()
        self._disconnect()
        self._rendezvous.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._watch.wake()
        ranks = self._ranks
        if ranks is not None:
            ranks.wake()

    def _check(self) -> None:
        if self._leaving:
            raise ConfigError("this receiver was closed while it received; make a new one", field="receiver")
        if self._cancelled:
            self._cancelled = False
            raise FetchCancelled("the fetch was cancelled; nothing was committed")

    def _newer(self, known: Known, newer_than: int | None) -> messages.VersionRecord | None:
        """Return the newest record, if it is news: newer, or of another publisher."""
        if not known.records:
            return None
        newest = known.records[-1]
        is_news = newer_than is None or newest.version > newer_than
        return newest if is_news or self._own_of not in ("", known.places.incarnation) else None

    def _wait_for(
        self, version: int | None, newer_than: int | None, deadline: Deadline
    ) -> tuple[Known, messages.VersionRecord]:
        heard = known = self._watch.known
        # What was published before this call counts, even if its news are on their way. Calls that find nothing one
        # after the other wait for these: a question costs the publisher more than all else that they do.
        is_asked = self._must_ask(deadline)
        if is_asked and heard is not None:
            known = self._asked(heard.places, deadline)
        while True:
            self._check()
            record = None if known is None else self._wanted(known, version, newer_than)
            if known is not None and record is not None:
                if is_asked:
                    return known, record
                known, is_asked = self._asked(known.places, deadline), True
                continue
            if deadline.passed():
                raise self._nothing(version, newer_than, known, deadline)
            told = self._watch.wait(min(deadline.left_s(), _SLICE_S), heard)
            known, heard = (told, told) if told is not heard else (known, heard)

    def _must_ask(self, deadline: Deadline) -> bool:
        return time.monotonic() - self._asked_s > _ASK_S or deadline.left_s() < _NEWS_S

    def _wanted(self, known: Known, version: int | None, newer_than: int | None) -> messages.VersionRecord | None:
        """Return what is to be fetched, if it is there. Raises `CheckpointNotFound` if it won't be."""
        if version is None:
            return self._newer(known, newer_than)
        found = known.find(version)
        if found is None and known.records and known.records[-1].version > version:
            raise _not_kept(version, known)
        return found

    def _asked(self, places: messages.PublisherPlaces, deadline: Deadline) -> Known | None:
        """Ask the publisher what it has; None if it is gone."""
        self._asked_s = time.monotonic()
        try:
            with self._using(places, deadline) as ranks:
                return Known(places, ranks.records(self._patience(deadline), lambda: self._check_there(places)))
        except PeerLost:
            self._disconnect()
            return None

    def _check_there(self, places: messages.PublisherPlaces) -> None:
        self._check()
        if not self._watch.follows(places):
            why = "another one has taken its place, or it has ended"
            raise PeerLost(f"the publisher was lost: {why}", peer="the publisher", phase="lease", version=None)

    def _patience(self, deadline: Deadline) -> Deadline:
        return Deadline.after(min(self._peer_timeout_s, deadline.left_s()))

    def _disconnect(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _nothing(
        self, version: int | None, newer_than: int | None, known: Known | None, deadline: Deadline
    ) -> HoldfastError:
        which = "a version" if version is None else f"version {version}"
        newer = "" if version is not None or newer_than is None else f" newer than {newer_than}"
        where = self._rendezvous.shown
        if known is None:
            why = f" ({self._watch.trouble})" if self._watch.trouble else ""
            return deadline.exceeded(
                f"{which}{newer}",
                f"no publisher was found at {where}{why}. See whether it lives and uses the same rendezvous, or raise "
                "the timeout",
            )
        have = ", ".join(str(record.version) for record in known.records) or "none"
        return deadline.exceeded(f"{which}{newer}", f"the publisher at {where} has: {have}. Allow it more time")

    def _is_superseded(self, record: messages.VersionRecord) -> bool:
        """Return True if another version than this is the newest by now; waits a moment for the news."""
        until = Deadline.after(_SLICE_S)
        while not until.passed():
            known = self._watch.known
            if known is not None and known.records and known.records[-1] != record:
                return True
            self._watch.wait(_LOOK_S, known)
        return False

    def _fetch(
        self,
        destination: Destination,
        places: messages.PublisherPlaces,
        record: messages.VersionRecord,
        deadline: Deadline,
    ) -> FetchedBlocks:
        try:
            with self._using(places, deadline) as ranks:
                leased = ranks.lease(record, self._patience(deadline), self._check)
        except PeerLost:
            self._disconnect()
            raise
        fetched = FetchedBlocks(destination, record, ranks, leased, self._name)
        try:
            fetched.verify(self._check)
            fetched.end_leases()
        except BaseException:
            fetched.release()
            raise
        events.count("sync_bytes_received", fetched.nbytes)
        return fetched

    @contextlib.contextmanager
    def _using(self, places: messages.PublisherPlaces, deadline: Deadline) -> Iterator[RankConnections]:
        """Be the one thread that uses the connections to a publisher, made anew if an exception has cut one off."""
        ranks = self._connected(places, deadline)
        while not ranks.take(min(_TAKE_S, deadline.left_s() / 2)):
            self._disconnect()
            ranks = self._connected(places, deadline)
        try:
            yield ranks
        finally:
            ranks.let_go()

    def _connected(self, places: messages.PublisherPlaces, deadline: Deadline) -> RankConnections:
        if self._ranks is None or self._ranks.places != places:
            self._disconnect()
            self._ranks = RankConnections(
                places,
                deadline,
                peer_timeout_s=self._peer_timeout_s,
                serve=self._fan_out,
                host=self._host,
                memory_reads=self._memory_reads,
            )
        return self._ranks


def _not_kept(version: int, known: Known) -> CheckpointNotFound:
    have = ", ".join(str(record.version) for record in known.records)
    return CheckpointNotFound(
        f"version {version} is not kept: the publisher has {have}, and newer ones than that are published. Ask for one "
        "of these, or let the publisher pin versions that must stay, or raise keep_versions",
        path="the publisher's versions",
        step=version,
    )


class FetchedBlocks:
    """A version in a publisher's blocks, leased and verified; implements `FetchedVersion`."""

    def __init__(
        self,
        destination: Destination,
        record: messages.VersionRecord,
        ranks: RankConnections,
        leased: Sequence[tuple[ReadableBlock, messages.Granted]],
        receiver: str,
    ) -> None:
        """receiver: its name."""
        self._receiver = receiver
        self.version = record.version
        self.nbytes = 0
        self.seconds: Mapping[str, float] = {}
        self._meta = record.meta
        self._digests = record.digests
        self._keys = [VersionKey(record.version, digest) for digest in record.digests]
        self._holds: list[HeldExtents | None] = [None] * len(leased)
        self._destination = destination
        self._connections = ranks
        self._leased = list(leased)
        self._leases = {rank: granted for rank, (_, granted) in enumerate(leased)}
        self._parts: list[tuple[RankVersion, list[PieceBox]]] = []
        self._released = False

    @property
    def meta(self) -> Mapping[str, Any]:
        found: dict[str, Any] = msgspec.msgpack.decode(self._meta) if self._meta else {}
        return found

    def verify(self, check: Callable[[], None]) -> None:
        """Select what the destination takes, and verify it where it lies. check: may raise, to end it."""
        self._check_epochs()
        try:
            self._verify(check)
        except (CheckpointCorrupt, StateMismatch):
            for block, _ in self._leased:
                block.refresh()
            self._check_epochs()  # bytes of another version are no damage
            raise

    def _verify(self, check: Callable[[], None]) -> None:
        versions = [
            self._connections.version_of(block, granted, digest, f"version {self.version}, publisher rank {rank}")
            for rank, ((block, granted), digest) in enumerate(zip(self._leased, self._digests, strict=True))
        ]
        selection = self._select([version.layout for version in versions], versions)
        self._parts = list(zip(versions, selection.parts, strict=True))
        self.nbytes = selection.nbytes
        ranks = list(zip(versions, self._keys, selection.extents, strict=True))
        notes = self._destination.scatters
        take_turns(
            [partial(one.block.bring_forward, one.layout, key, some, notes=notes) for one, key, some in ranks],
            len(ranks),
        )
        shared = [
            SharedFetch(one, one.block, key, some)
            for one, key, some in ranks
            if isinstance(one.block, MirrorBlock) and one.block.is_shared
        ]
        if shared:
            bring_shared(shared, check, copy_threads())
        else:
            jobs = [job for version, _, some in ranks for job in version.checks(some)]
            take_turns([partial(_checked, job, check) for job in jobs], copy_threads())
        self._holds = [
            HeldExtents(key, one.layout.digest, frozenset(some), one.block.steps) for one, key, some in ranks
        ]
        self._check_epochs()
        self._check_twins(selection.wanted)
        self._check_epochs()
        if self._destination.streaming:
            lives = {name: self._destination.memory(name) for name in selection.names}
            self._write(lives, {})
            self._check_epochs()
            for name in selection.names:
                self._destination.complete(name)

    def end_leases(self) -> None:
        """Give back the leases on blocks that have been brought here."""
        here = {rank: granted for rank, granted in self._leases.items() if self._leased[rank][0].is_here}
        self._leases = {rank: granted for rank, granted in self._leases.items() if rank not in here}
        self._connections.give_back(here)

    def commit(self) -> None:
        if self._released:
            raise AssertionError("this version was released")
        if self._destination.streaming:
            self._destination.commit(self.version)
            return
        self._check_epochs()
        standing = self._destination.standing()
        self._destination.fill(self.version, partial(self._write_checked, standing=standing), self._content)
        self._holds = [None if held is None else held._replace(steps=()) for held in self._holds]

    def tell_committed(self, seconds: float) -> None:
        self._connections.tell_committed(self._receiver, self.version, seconds)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._connections.give_back(self._leases)
            for (block, _), holds in zip(self._leased, self._holds, strict=True):
                block.let_go(holds)
            self._leased, self._parts = [], []
            self._destination.abandon()

    # ------------------------------------------------------------------------------------------------------------------

    def _select(self, layouts: Sequence[BlockLayout], versions: Sequence[RankVersion]) -> _SelectedParts:
        destination = self._destination
        names = destination.select(infos_of(layout.table for layout in layouts))
        wanted = list(destination.wanted())
        key = self._digests_of(layouts)
        known = self._connections.selections.get(key)
        if known is not None and known.names == names and known.wanted == wanted:
            return known
        parts = parts_of([layout.table for layout in layouts], wanted, set(names))
        extents = [
            version.extents_of((part.piece, part.box) for part in some)
            for version, some in zip(versions, parts, strict=True)
        ]
        nbytes = sum(
            layout.nbytes(part.piece) * part.box.volume // max(1, layout.table[part.piece].box.volume)
            for layout, some in zip(layouts, parts, strict=True)
            for part in some
        )
        made = _SelectedParts(names, wanted, parts, extents, nbytes)
        self._connections.selections.clear()
        self._connections.selections[key] = made
        return made

    @staticmethod
    def _digests_of(layouts: Sequence[BlockLayout]) -> tuple[bytes, ...]:
        return tuple(layout.digest for layout in layouts)

    @property
    def _content(self) -> _Content:
        return self._connections.places.incarnation, tuple(self._keys)

    def _write_checked(self, lives: Mapping[str, torch.Tensor], standing: Mapping[str, Hashable]) -> None:
        self._write(lives, standing)
        self._check_epochs()

    def _write(self, lives: Mapping[str, torch.Tensor], standing: Mapping[str, Hashable]) -> None:
        """Bring what the tensors take of the blocks into them. standing: what they have, if that is known."""
        at = {name: self._destination.place(name) for name in lives}
        _, places = places_of(lives, at, rank=global_rank())
        write_live(list(self._writes(places, standing)), self._check_epochs)

    def _writes(self, places: Mapping[str, Sequence[Local]], standing: Mapping[str, Hashable]) -> Iterator[LiveWrite]:
        for rank, (version, parts) in enumerate(self._parts):
            known = {content: self._steps_from(content, rank) for content in set(standing.values())}
            for name, target, source in _copies(version, parts, places):
                steps = known.get(standing.get(name))
                if steps is None:
                    yield LiveWrite(target, source)
                    continue
                start = source.data_ptr() - version.data.data_ptr()
                others = steps.others(start, start + source.nbytes)
                yield LiveWrite(target, source, start, steps.changes, others)

    def _steps_from(self, content: Hashable, rank: int) -> _Steps | None:
        """Return how a rank's block was brought forward from what live tensors have; None if that isn't known."""
        incarnation, keys = cast("_Content", content)
        if content == self._content or incarnation != self._content[0]:
            return None  # the same version again is copied: someone may have reason to
        steps = self._leased[rank][0].steps
        first = max((at for at, step in enumerate(steps) if step.base == keys[rank]), default=None)
        if first is None:
            return None
        extents = frozenset.intersection(*(frozenset(step.extents) for step in steps[first:]))
        return _Steps(tuple(step.changes for step in steps[first:]), extents)

    def _check_twins(self, wanted: Sequence[Wanted]) -> None:
        """Raise `StateMismatch` if names of one live tensor have different values."""
        boxes: dict[str, list[Local]] = {}
        for name, other in self._destination.twins.items():
            for one in (name, other):
                boxes[one] = [
                    Local(want.box, torch.empty(want.box.sizes, dtype=torch_dtype(want.dtype)))
                    for want in wanted
                    if want.name == one
                ]
            both = {one: boxes[one] for one in (name, other)}
            copies = [copy for version, parts in self._parts for copy in _copies(version, parts, both)]
            copy_all([copy[1] for copy in copies], [copy[2] for copy in copies], self._check_epochs)
            for mine, theirs in zip(boxes[name], boxes[other], strict=True):
                if not torch.equal(compat.as_bytes(mine.tensor), compat.as_bytes(theirs.tensor)):
                    raise twins_differ(other, name)

    def _check_epochs(self) -> None:
        if self._released:
            raise AssertionError("this version was released while it was used")
        for block, granted in self._leased:
            if block.epoch != granted.epoch:
                raise VersionRevoked(
                    f"version {self.version} is gone: the publisher needed the memory that this receiver had fetched "
                    "it into view of, as it was held for long. Fetch a version again; commit sooner, or raise "
                    "keep_versions",
                    version=self.version,
                )


def _checked(job: Callable[[], None], check: Callable[[], None]) -> None:
    check()
    job()


def _copies(
    version: RankVersion, parts: Sequence[PieceBox], places: Mapping[str, Sequence[Local]]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name, target, source) for the parts of one rank's block that go to ``places``."""
    table = version.layout.table
    for part in parts:
        piece = table[part.piece]
        where = places.get(piece.name)
        if not where or not part.box.volume:
            continue
        source = version.piece(part.piece)
        for box, tensor in where:
            shared = intersect(box, part.box)
            if shared is not None and shared.volume:
                target = tensor if shared == box else part_of(tensor, shared, box)
                yield piece.name, target, source if shared == piece.box else part_of(source, shared, piece.box)
