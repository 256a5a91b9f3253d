"""Connect to all ranks of a publisher, receive their messages, and detect lost ranks.

    Connection     links to all ranks, for the thread that fetches
    NewestOnLinks  a link to rank 0, for the thread that looks for new versions

Guarantees: no wait is longer than its deadline, and in a session none longer than a peer may be silent. A session that
has begun in time goes on past its deadline while something comes at least every `STALL_S`: else a receiver that polls
with a short timeout would never get anything, and make all others of its sessions begin again. A rank whose link ends,
or that is silent when a message is due, is a `PeerLost` that names it.
Assumes: one thread each.
Does not: know the content of a session (``session.fetcher``).
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.store import BoardLost
from holdfast.errors import DeadlineExceeded, HoldfastError, PeerLost
from holdfast.sync.session import messages
from holdfast.sync.session.futures import BlockingCall, CloseSignal, beat_interval_s
from holdfast.sync.session.links import Ended, EventLoop, Link, connect
from holdfast.sync.session.rendezvous import (
    PLACES,
    ListenAddress,
    Places,
    RendezvousClient,
    Unanswered,
    open_rendezvous,
    this_machine,
)
from holdfast.sync.watcher import Sighting

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.coordination.failure import RankFailure
    from holdfast.engine.messages import EngineMessage
    from holdfast.sync.session.channel import Channels

_CONNECT_S: Final = 5.0
_GET_S_MIN: Final = 0.2
"""How far one query of the rendezvous may exceed a deadline: else a caller out of time never finds anything."""
_LOOK_S_MIN: Final = 0.01
_LOOK_S_MAX: Final = 0.05
"""Poll interval: waiting receivers should find a publisher at almost the same time (`coordinator.SETTLE_S`)."""
STALL_S: Final = 2.0
"""How long nothing may come, once the deadline of a session has passed."""
_WATCH_S: Final = 1.0
"""How long a look waits for news."""
_WATCH_PAUSE_S: Final = (0.02, 0.25)
"""Shortest and longest pause between two looks for a publisher."""
_numbers = itertools.count(1)
_M = TypeVar("_M")


class SessionAborted(Exception):
    """Rank 0 has aborted the session. ``again``: another one will follow."""

    def __init__(self, reason: RankFailure, *, again: bool) -> None:
        super().__init__(reason.message)
        self.reason = reason
        self.again = again


class Told(NamedTuple):
    """A table or plan that a rank sent last, and its digest."""

    digest: str
    items: tuple[Any, ...]


class Connection:
    """Links to every rank of one publisher, until it ends or restarts."""

    def __init__(
        self, places: Places, channels: Channels, deadline: Deadline, leaving: CloseSignal, *, peer_timeout_s: float
    ) -> None:
        """Connect to all ranks and identify this receiver. Raises `OSError`."""
        self.incarnation = places.incarnation
        self.name = f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}"
        self.hub = EventLoop()
        self.links: list[Link] = []
        self.session = 0
        self.phase = "idle"
        self.version: int | None = None
        self._leaving = leaving
        self._peer_timeout_s = peer_timeout_s
        self._beat_s = beat_interval_s(peer_timeout_s)
        self._beat_at = 0.0
        self._moved_at = 0.0
        """When the last message about the session, other than a beat, arrived."""
        self.tables = [Told("", ())] * len(places.ranks)
        self.plans = [Told("", ())] * len(places.ranks)
        self._aborted: dict[int, SessionAborted] = {}
        self._ended: dict[int, str] = {}
        self._heard: list[deque[EngineMessage]] = []
        self._by_link: dict[Link, int] = {}
        try:
            for rank, place in enumerate(places.ranks):
                sock = connect(_hosts(place, rank, near_only=bool(channels.host)), place.port, deadline)
                link = Link(sock, f"publisher rank {rank}", messages.ToReceiver)
                self.hub.add(link)
                self._by_link[link] = rank
                self.links.append(link)
                self._heard.append(deque())
                link.send(messages.Hello(self.name, places.token, channels.address()))
        except BaseException:
            self.close()
            raise

    @property
    def stands(self) -> bool:
        """Return True if no link is known to have ended; doesn't wait."""
        try:
            while self._hear(0.0):  # the end of a link comes after all its messages
                pass
        except SessionAborted:
            return False
        return not self._ended

    def close(self) -> None:
        for link in self.links:
            link.send(messages.Leave())
        self.hub.close()

    # messages -------------------------------------------------------------------------------------------------------

    def begin(self, session: int, version: int) -> None:
        """Start a session: only its messages are received from now on, and silence counts. Raises `SessionAborted`."""
        self.session, self.version, self.phase = session, version, "begin"
        self._moved_at = time.monotonic()
        for link in self.links:
            link.expect()
        aborted = self._aborted.get(session)
        self._aborted.clear()
        if aborted is not None:
            raise aborted

    def end(self) -> None:
        """End the session."""
        self.session, self.version, self.phase = 0, None, "idle"

    def send(self, rank: int, message: EngineMessage) -> None:
        self.links[rank].send(message)

    def send_all(self, message: EngineMessage) -> None:
        for link in self.links:
            link.send(message)

    def next(
        self,
        rank: int,
        kind: type[_M] | tuple[type[_M], ...],
        deadline: Deadline,
        *,
        what: str,
    ) -> _M:
        """Return the next message of ``kind`` from ``rank``, of the current session; drop messages of others.

        what: what is waited for, for messages.

        Raises `SessionAborted`, `PeerLost` and `DeadlineExceeded`.
        """
        while True:
            found = self._pick(rank, kind)
            if found is not None:
                return found
            try:
                self.wait(deadline, rank, what)
            except (PeerLost, DeadlineExceeded):
                # Messages that arrived before the loss still count.
                found = self._pick(rank, kind)
                if found is None:
                    raise
                return found

    def _pick(self, rank: int, kind: type[_M] | tuple[type[_M], ...]) -> _M | None:
        heard = self._heard[rank]
        while heard:
            message = heard.popleft()
            if isinstance(message, kind) and (not self.session or _session_of(message) == self.session):
                return message
        return None

    def heard(self, rank: int, kind: type[_M]) -> list[_M]:
        """Return received messages of ``kind`` from ``rank`` in this session that `next` has not returned."""
        self._hear(0.0)
        return [said for said in self._heard[rank] if isinstance(said, kind) and _session_of(said) == self.session]

    def check(self, rank: int) -> None:
        """Raise as `next` does if the session was aborted, or ``rank`` is lost, according to messages so far."""
        self._hear(0.0)
        if rank in self._ended:
            raise self._gone(rank, self._ended[rank])

    def aside(self, rank: int, function: Callable[[], Any], deadline: Deadline, *, what: str) -> Any:
        """Run a blocking ``function`` on another thread and return its result; it is abandoned if waiting for it
        raises.
        """
        call = BlockingCall(function, self.hub.wake)
        while not call.done:
            self.wait(deadline, rank, what)
        return call.result()

    def wait(self, deadline: Deadline, rank: int, what: str) -> None:
        """Process the next messages, if only for a moment. Raises as `next` does."""
        link = self.links[rank]
        self._leaving.check()
        self.beat()
        if not self._ended:
            self._hear(min(self._left_s(deadline), self._beat_s))
        for other, why in self._ended.items():
            raise self._gone(other, why)
        if self._left_s(deadline) <= 0.0:
            raise deadline.exceeded(
                f"{what} of publisher rank {rank} (phase: {self.phase})",
                "look at the publisher's log, or raise the timeout of receive",
            )
        if self.session and link.silent_s > self._peer_timeout_s:
            raise self._gone(rank, f"it was silent for {link.silent_s:.1f} s")

    def _left_s(self, deadline: Deadline) -> float:
        going_s = self._moved_at + STALL_S - time.monotonic() if self.session else 0.0
        return max(deadline.left_s(), going_s)

    def at_least(self, deadline: Deadline) -> Deadline:
        """Return ``deadline``, or one that leaves a session in progress the time for its next step."""
        return deadline if deadline.left_s() > STALL_S else Deadline(deadline.timeout_s, time.monotonic() + STALL_S)

    def beat(self) -> None:
        """Send heartbeats to all ranks; called regularly in a session."""
        now = time.monotonic()
        if self.session and now >= self._beat_at:
            self._beat_at = now + self._beat_s
            self.send_all(messages.Beat())

    def _hear(self, timeout_s: float) -> bool:
        """Process incoming messages; return False if none came within the timeout."""
        was_any = False
        for heard in self.hub.hear(timeout_s):
            was_any = True
            assert isinstance(heard, tuple)
            link, said = heard
            rank = self._by_link[link]
            if isinstance(said, (Ended, messages.Leave)):
                self._ended.setdefault(rank, said.why if isinstance(said, Ended) else "it was closed")
                self.hub.drop(link)
            elif isinstance(said, messages.Abort):
                self._aborted[said.session] = SessionAborted(said.reason, again=said.again)
            elif not isinstance(said, messages.Beat):
                self._learn(rank, said)
                self._heard[rank].append(said)
                self._moved_at = time.monotonic()
        if self.session in self._aborted:
            raise self._aborted.pop(self.session)
        return was_any

    def _learn(self, rank: int, said: EngineMessage) -> None:
        """Keep what later messages name by its digest alone, also in a session that has ended."""
        if isinstance(said, messages.Table) and said.pieces is not None:
            self.tables[rank] = Told(said.digest, said.pieces)
        elif isinstance(said, messages.Plan) and said.buckets is not None:
            self.plans[rank] = Told(said.digest, said.buckets)

    def _gone(self, rank: int, why: str) -> PeerLost:
        of = "" if self.version is None else f" while it sent version {self.version}"
        return PeerLost(
            f"publisher rank {rank} was lost{of} (phase: {self.phase}): {why}. Nothing was committed; receive again "
            "when it is back",
            peer=f"publisher rank {rank}",
            phase=self.phase,
            version=self.version,
        )


def _session_of(said: object) -> int:
    number: int = getattr(said, "session", 0)
    return number


def _hosts(place: ListenAddress, rank: int, *, near_only: bool) -> tuple[str, ...]:
    if place.machine == this_machine():
        return ("127.0.0.1", *place.hosts)
    if near_only:
        raise OSError(f"publisher rank {rank} is on another host, or in another container")
    return place.hosts


def meet(
    rendezvous: RendezvousClient,
    channels: Channels,
    deadline: Deadline,
    leaving: CloseSignal,
    *,
    peer_timeout_s: float,
    once: bool = False,
) -> Connection | None:
    """Return a connection to the publisher found at ``rendezvous``; waits for one unless ``once``, then None.

    Raises `DeadlineExceeded`, with the last obstacle; `ConfigError` if the receiver is closed.
    """
    pause_s, why, was_told = _LOOK_S_MIN, "no publisher has been there", False
    while True:
        try:
            found = rendezvous.get(PLACES, max(deadline.left_s(), _GET_S_MIN))
            if found:
                places = msgspec.msgpack.decode(found, type=Places)
                limit = Deadline.after(min(_CONNECT_S, max(deadline.left_s(), 0.1)))
                return Connection(places, channels, limit, leaving, peer_timeout_s=peer_timeout_s)
        except Unanswered as error:
            why = why if was_told else str(error)
        except (OSError, HoldfastError, msgspec.MsgspecError) as error:
            why, was_told = str(error), True
        if once:
            return None
        if deadline.passed():
            raise deadline.exceeded(
                f"a publisher to be found at {rendezvous.shown} ({why})",
                "start it, give both sides the same rendezvous, or raise the timeout of receive",
            )
        leaving.sleep(min(pause_s, deadline.left_s()))
        pause_s = min(pause_s * 1.5, _LOOK_S_MAX)


class NewestOnLinks:
    """Learns of the newest version from rank 0 of the publisher at a rendezvous; implements `Lookout`."""

    def __init__(self, rendezvous: Any, *, near_only: bool) -> None:
        self._hub = EventLoop()
        self._near_only = near_only
        self._stopping = CloseSignal()
        self._rendezvous = open_rendezvous(rendezvous, hosting=False)
        self._asking = RendezvousClient(self._rendezvous, self._stopping)
        self._link: Link | None = None
        self._incarnation = ""
        self._newest: int | None = None
        self._pause_s = _WATCH_PAUSE_S[0]

    def look(self) -> Sighting | None:
        if self._link is None and not self._connect():
            self._stopping.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _WATCH_PAUSE_S[1])
            return None
        for heard in self._hub.hear(_WATCH_S):
            assert isinstance(heard, tuple)
            link, said = heard
            if isinstance(said, messages.Newest):
                self._newest = said.version
            elif isinstance(said, (Ended, messages.Leave)):
                self._hub.drop(link)
                self._link, self._newest = None, None
        return None if self._newest is None else Sighting(self._newest, self._incarnation)

    def _connect(self) -> bool:
        """Connect to rank 0 of the publisher that is there now; return False if there is none."""
        try:
            found = self._asking.get(PLACES, _CONNECT_S)
        except BoardLost:  # it may be that the publisher hosts it
            return False
        if not found:
            return False
        places = msgspec.msgpack.decode(found, type=Places)
        place = places.ranks[0]
        try:
            hosts = _hosts(place, 0, near_only=self._near_only)
            sock = connect(hosts, place.port, Deadline.after(_CONNECT_S))
        except OSError:  # it ended; the next one will put its own places there
            return False
        self._link = Link(sock, "publisher rank 0", messages.ToReceiver)
        self._link.send(messages.Watch(places.token))
        self._hub.add(self._link)
        self._incarnation, self._newest, self._pause_s = places.incarnation, None, _WATCH_PAUSE_S[0]
        return True

    def wake(self) -> None:
        self._stopping.say()
        self._hub.wake()

    def close(self) -> None:
        if self._link is not None:
            self._link.send(messages.Leave())
        self._hub.close()
        self._rendezvous.close()
