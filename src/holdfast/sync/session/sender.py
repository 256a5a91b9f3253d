"""Run one session on one publisher rank: send the table, receive wants, send buckets until every member has taken them.

    Table -> Wants of every member -> Plan -> (pack, start, Bucket ... Taken) a bucket -> every bucket taken

Guarantees: a slot is packed again only when its bucket was sent and taken by all of its lane. Nothing is planned twice
for the same table and wants. `Sender.send` ends when the session does: with all buckets taken, or with `Broken`.
Assumes: one session at a time, on the server's thread, which processes members' messages meanwhile (`SessionLoop`).
Does not: decide who is a member or what a loss means (``session.coordinator``).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import xxhash

from holdfast import events
from holdfast.errors import DeadlineExceeded, HoldfastError, PeerLost
from holdfast.sync.session import messages
from holdfast.sync.session.channel import SLOTS, bucket_memory
from holdfast.sync.weights.buckets import itemsize_of, plan_buckets
from holdfast.sync.weights.copy import BucketCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from holdfast.coordination.deadline import Deadline
    from holdfast.coordination.failure import RankFailure
    from holdfast.engine.messages import EngineMessage
    from holdfast.sync.protocol import PublisherOptions
    from holdfast.sync.session.channel import Channels, SendChannel
    from holdfast.sync.session.links import Link
    from holdfast.sync.weights.buckets import Piece, PieceBox
    from holdfast.sync.weights.pieces import Local

SLOT_BUCKET_BYTES: Final = 8 << 20
"""Bucket size for slots: two slots stay in a processor's outer cache between packing and unpacking. Larger buckets
would pass through memory twice, and the receiver would begin later."""
_PLANS_KEPT: Final = 4
"""Plans kept for sets of members that alternate, such as a fleet and a late joiner."""


class Broken(Exception):
    """The session can't continue; its members' states, or `SendSession.over`, say why."""


class ChannelBroken(HoldfastError):
    """Buckets can't be sent over the current channel; a new one may work."""


@dataclass(frozen=True, slots=True)
class VersionSource:
    """One version on one publisher rank.

    lease: context that provides the memory of each piece.
    """

    version: int
    table: tuple[Piece, ...]
    digest: str
    lease: Callable[[], AbstractContextManager[Sequence[Local]]]


@dataclass(slots=True, eq=False)
class ConnectedReceiver:
    """A connected receiver. ``settled``: the latest version that it has, or won't get, from this publisher."""

    name: str
    link: Link
    address: bytes
    ask: messages.Ask | None = None
    asked_at: float = 0.0
    settled: int | None = None
    table: str = ""
    """Digest of the table that it was sent last; ``plan`` likewise."""
    plan: str = ""
    wants: tuple[str, tuple[PieceBox, ...]] = ("", ())
    """The wants that it sent last, with their digest."""

    def learn(self, message: EngineMessage) -> None:
        """Keep what later messages name by its digest alone, also in a session that has ended."""
        if isinstance(message, messages.Wants) and message.parts is not None:
            self.wants = message.digest, message.parts


@dataclass(slots=True, eq=False)
class SessionMember:
    """A receiver in a session. ``state``: going, committed, aborted, failed or lost."""

    guest: ConnectedReceiver
    number: int
    wants: messages.Wants | None = None
    state: str = "going"
    reason: RankFailure | None = None

    @property
    def name(self) -> str:
        return self.guest.name

    @property
    def is_over(self) -> bool:
        return self.state in ("committed", "aborted", "failed", "lost")


class SendSession:
    """State of a session: its version, its members, and their progress."""

    def __init__(self, number: int, version: int, guests: Sequence[ConnectedReceiver]) -> None:
        self.number = number
        self.version = version
        self.members: list[SessionMember] = []
        self.phase = "begin"
        self.over: RankFailure | None = None
        self.again = False
        """After the end: the same members may get another session."""
        self.awaited: dict[int, set[int]] = {}
        """For each bucket in flight: numbers of the members that have not taken it."""
        for guest in guests:
            self.add(guest)

    def add(self, guest: ConnectedReceiver) -> None:
        """Add a member."""
        self.members.append(SessionMember(guest, len(self.members)))

    def member(self, guest: ConnectedReceiver) -> SessionMember | None:
        return next((member for member in self.members if member.guest is guest), None)

    def check(self) -> None:
        """Raise `Broken` if the session can't go on."""
        if self.over is not None:
            raise Broken
        if any(member.state in ("failed", "lost") for member in self.members):
            raise Broken

    def heard(self, member: SessionMember, message: EngineMessage) -> bool:
        """Handle a member's message about buckets; return False for other or invalid messages."""
        if isinstance(message, messages.Taken):
            self.awaited.get(message.seq, set()).discard(member.number)
            return True
        if isinstance(message, messages.Wants):
            if message.digest != member.guest.wants[0]:
                return False
            member.wants = message
            return True
        return False


class SessionLoop(Protocol):
    """Interface to wait in a session while messages are processed."""

    def run_until(self, until: Callable[[], bool]) -> None:
        """Process messages until ``until()`` returns True; it may raise."""
        ...

    def aside(self, function: Callable[[], Any], check: Callable[[], None]) -> Any:
        """Run a blocking ``function`` on another thread and return its result; abandon it if ``check()`` raises."""
        ...

    def patience(self) -> Deadline:
        """Return a deadline for a silent peer, counted from now."""
        ...


class Sender:
    """Sends this rank's part of sessions; holds the channel to the current members and their plans."""

    def __init__(self, channels: Channels, options: PublisherOptions, pump: SessionLoop) -> None:
        self._channels = channels
        self._bucket_bytes = options.bucket_bytes
        self._loop = pump
        self._channel: SendChannel | None = None
        self._guests: list[ConnectedReceiver] = []
        self._offers: list[bytes] = []
        self._epoch = 0
        self._next_seq = 0
        self._is_open = False
        self._plans: OrderedDict[str, list[BucketCopy]] = OrderedDict()
        self.bytes_sent = 0

    def send(self, session: SendSession, source: VersionSource) -> None:
        """Send ``source`` to the members; returns when they have taken all of it.

        Raises `Broken`, after closing the channel; `ConfigError` if the version can't be sent in these buckets.
        """
        try:
            with source.lease() as pieces:
                self._send(session, source, pieces)
        except BaseException:
            self.drop_channel()
            raise

    def drop_channel(self) -> None:
        """Drop the channel; the next session makes a new one. Idempotent."""
        channel, self._channel = self._channel, None
        self._guests = []
        if channel is not None:
            channel.close()

    def _send(self, session: SendSession, source: VersionSource, pieces: Sequence[Local]) -> None:
        session.phase = "tables"
        channel = self._channel_to(session)
        for member in session.members:
            guest = member.guest
            guest.link.send(
                messages.Table(
                    session.number,
                    source.digest,
                    None if source.digest == guest.table else source.table,
                    self._bucket_bytes,
                    self._epoch,
                    self._next_seq,
                    self._offers[member.number],
                )
            )
            guest.table = source.digest
        self._loop.run_until(lambda: self._all_want(session))
        if not self._is_open:
            session.phase = "channels"
            self._blocking(channel, lambda: channel.open(self._loop.patience()), session)
            self._is_open = True
        session.phase = "plan"
        walks, called = self._plan(session, source)
        self._tell_plan(session, walks, called)
        first = self._next_seq
        self._next_seq += len(walks)
        for index, walk in enumerate(walks):
            if index >= SLOTS:
                self._wait_free(session, channel, first, index - SLOTS, walks)
            self._send_bucket(session, pieces, channel, first, index, walk)
        for index in range(max(0, len(walks) - SLOTS), len(walks)):
            self._wait_free(session, channel, first, index, walks)

    def _channel_to(self, session: SendSession) -> SendChannel:
        guests = [member.guest for member in session.members]
        if self._channel is None or guests != self._guests:
            self.drop_channel()
            addresses = [guest.address for guest in guests]
            with bucket_memory(self._bucket_bytes):
                self._channel = self._channels.send_channel(addresses, self._bucket_bytes)
            self._guests, self._epoch, self._next_seq = guests, self._epoch + 1, 0
            self._offers = [self._channel.offer(number) for number in range(len(guests))]
            self._is_open = False
        return self._channel

    def _all_want(self, session: SendSession) -> bool:
        session.check()
        return all(member.wants is not None for member in session.members)

    def _plan(self, session: SendSession, source: VersionSource) -> tuple[list[BucketCopy], str]:
        """Return the buckets, and their name."""
        wants = [member.wants for member in session.members if member.wants is not None]
        parts = [member.guest.wants[1] for member in session.members]
        key = "/".join([source.digest, *(want.digest for want in wants)])
        if key not in self._plans:
            self._plans[key] = self._walks(source, parts)
            while len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key], key

    def _walks(self, source: VersionSource, parts: Sequence[Sequence[PieceBox]]) -> list[BucketCopy]:
        return [BucketCopy(plan) for plan in plan_buckets(source.table, parts, self._worthwhile_bytes(source.table))]

    def _worthwhile_bytes(self, table: Sequence[Piece]) -> int:
        """Return the useful bucket size: at most the user's limit, and at least a row."""
        channel = self._channel
        assert channel is not None
        if channel.slot(0).device.type != "cpu":
            return self._bucket_bytes
        rows = [piece.sizes[-1] * itemsize_of(piece) for piece in table if len(piece.sizes) > 1]
        return min(self._bucket_bytes, max(SLOT_BUCKET_BYTES, *rows, 0))

    def _tell_plan(self, session: SendSession, walks: list[BucketCopy], called: str) -> None:
        for member in session.members:
            digest = xxhash.xxh3_128_hexdigest(f"{member.number}/{called}".encode())
            buckets = None
            if digest != member.guest.plan:
                buckets = tuple(
                    messages.PlannedBucket(index, walk.plan)
                    for index, walk in enumerate(walks)
                    if member.number in walk.plan.lane
                )
                member.guest.plan = digest
            member.guest.link.send(messages.Plan(session.number, digest, buckets))

    def _send_bucket(
        self,
        session: SendSession,
        pieces: Sequence[Local],
        channel: SendChannel,
        first: int,
        index: int,
        walk: BucketCopy,
    ) -> None:
        plan = walk.plan
        session.phase = f"bucket {index}"
        kind, total = "", 0
        if plan.nbytes:
            kind, total = self._give(pieces, channel, first + index, walk)
            self.bytes_sent += plan.nbytes
            events.count("sync_bytes_sent", plan.nbytes)
        session.awaited[index] = set(plan.lane)
        said = messages.Bucket(session.number, index, plan.nbytes, total, kind)
        for number in plan.lane:
            session.members[number].guest.link.send(said)

    def _give(self, pieces: Sequence[Local], channel: SendChannel, seq: int, walk: BucketCopy) -> tuple[str, int]:
        """Begin to send a bucket; return kind and value of its checksum."""
        plan = walk.plan
        slot = channel.slot(seq % SLOTS)[: plan.nbytes]
        try:
            said = walk.give(pieces, slot)
            channel.start(seq, plan.nbytes, plan.lane)
        except PeerLost as error:
            raise ChannelBroken(str(error)) from error
        return said

    def _wait_free(
        self, session: SendSession, channel: SendChannel, first: int, index: int, walks: Sequence[BucketCopy]
    ) -> None:
        """Wait until the slot of bucket ``index`` may be filled again."""
        self._loop.run_until(lambda: self._is_taken(session, index))
        if walks[index].plan.nbytes:
            self._blocking(channel, lambda: channel.wait_sent(first + index, self._loop.patience()), session)

    def _is_taken(self, session: SendSession, index: int) -> bool:
        session.check()
        if session.awaited[index]:
            return False
        del session.awaited[index]
        return True

    def _blocking(self, channel: SendChannel, function: Callable[[], None], session: SendSession) -> None:
        try:
            if channel.blocks:
                self._loop.aside(function, session.check)
            else:
                function()
        except (PeerLost, DeadlineExceeded) as error:
            session.check()
            raise ChannelBroken(str(error)) from error
