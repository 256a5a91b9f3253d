"""A receiver's links to all ranks of a publisher: meeting them, hearing them, noticing that one is gone.

Guarantees: no wait is longer than its deadline, and in a session none longer than a peer may be silent. A rank whose
link ends, or that is silent when something is expected of it, is a `PeerLost` that names it.
Assumes: one thread, that of `Receiver.receive`.
Does not: know what a session is about (``sync.taking``).
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from holdfast.errors import DeadlineExceeded, HoldfastError, PeerLost
from holdfast.sync import messages
from holdfast.sync.deadline import Deadline
from holdfast.sync.links import Ended, Hub, Link, connect
from holdfast.sync.rendezvous import PLACES, Asking, Place, Places, Unanswered, this_machine
from holdfast.sync.waiting import Aside, Leaving, beat_interval_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.engine.messages import Message
    from holdfast.outcome import AbortReason
    from holdfast.sync.transports.base import Channels

_CONNECT_S: Final = 5.0
_GET_S_MIN: Final = 0.2
"""What one look at the rendezvous takes may lie behind a deadline: else who has none left would never find anything."""
_LOOK_S_MIN: Final = 0.01
_LOOK_S_MAX: Final = 0.05
"""Receivers that wait for a publisher shall find it within moments of one another (`coordinating.SETTLE_S`)."""
_numbers = itertools.count(1)
_M = TypeVar("_M")


class Aborted(Exception):
    """Rank 0 has given the session up. ``again``: another one will follow."""

    def __init__(self, reason: AbortReason, *, again: bool) -> None:
        super().__init__(reason.message)
        self.reason = reason
        self.again = again


class Told(NamedTuple):
    """A table or a plan that a rank told last, and its digest."""

    digest: str
    items: tuple[Any, ...]


class Connection:
    """Links to every rank of a publisher in one of its lives."""

    def __init__(
        self, places: Places, channels: Channels, deadline: Deadline, leaving: Leaving, *, peer_timeout_s: float
    ) -> None:
        """Connect to all ranks, and say who this is. Raises `OSError`."""
        self.incarnation = places.incarnation
        self.name = f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}"
        self.hub = Hub()
        self.links: list[Link] = []
        self.session = 0
        self.phase = "idle"
        self.version: int | None = None
        self._leaving = leaving
        self._peer_timeout_s = peer_timeout_s
        self._beat_s = beat_interval_s(peer_timeout_s)
        self._beat_at = 0.0
        self.tables = [Told("", ())] * len(places.ranks)
        self.plans = [Told("", ())] * len(places.ranks)
        self._aborted: dict[int, Aborted] = {}
        self._ended: dict[int, str] = {}
        self._heard: list[deque[Message]] = []
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
        """Whether no link has ended, as far as can be told without waiting."""
        try:
            while self._hear(0.0):  # that a link has ended comes behind all that was said on it
                pass
        except Aborted:
            return False
        return not self._ended

    def close(self) -> None:
        for link in self.links:
            link.send(messages.Leave())
        self.hub.close()

    # talking ------------------------------------------------------------------------------------------------------

    def begin(self, session: int, version: int) -> None:
        """From now on only what is said of this session is heard, and silence counts. Raises `Aborted`."""
        self.session, self.version, self.phase = session, version, "begin"
        for link in self.links:
            link.expect()
        aborted = self._aborted.get(session)
        self._aborted.clear()
        if aborted is not None:
            raise aborted

    def end(self) -> None:
        """The session is over."""
        self.session, self.version, self.phase = 0, None, "idle"

    def send(self, rank: int, message: Message) -> None:
        self.links[rank].send(message)

    def send_all(self, message: Message) -> None:
        for link in self.links:
            link.send(message)

    def next(
        self,
        rank: int,
        kind: type[_M] | tuple[type[_M], ...],
        deadline: Deadline,
        *,
        what: str,
        only_rank: bool = False,
    ) -> _M:
        """The next message of ``kind`` that ``rank`` says, in a session of that session; others are dropped.

        what: is waited for, for messages. only_rank: that another rank is gone doesn't matter.

        Raises `Aborted`, `PeerLost` and `DeadlineExceeded`.
        """
        while True:
            found = self._pick(rank, kind)
            if found is not None:
                return found
            try:
                self.wait(deadline, rank, what, only_rank=only_rank)
            except (PeerLost, DeadlineExceeded):
                # What it said before counts.
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
        """Messages of ``kind`` that ``rank`` has said in this session by now and `next` has yet to return."""
        self._hear(0.0)
        return [said for said in self._heard[rank] if isinstance(said, kind) and _session_of(said) == self.session]

    def check(self, rank: int) -> None:
        """Raise as `next` does if it was said by now that the session is given up, or ``rank`` is gone."""
        self._hear(0.0)
        if rank in self._ended:
            raise self._gone(rank, self._ended[rank])

    def aside(self, rank: int, function: Callable[[], Any], deadline: Deadline, *, what: str) -> Any:
        """What ``function``, which blocks, returns or raises; it is left behind when waiting for it raises."""
        call = Aside(function, self.hub.ring)
        while not call.done:
            self.wait(deadline, rank, what)
        return call.result()

    def wait(self, deadline: Deadline, rank: int, what: str, *, only_rank: bool = False) -> None:
        """Hear what is said next, if only for a moment. Raises as `next` does."""
        link = self.links[rank]
        self._leaving.check()
        self.beat()
        if not self._ended or (only_rank and rank not in self._ended):
            self._hear(min(deadline.left_s(), self._beat_s))
        for other, why in self._ended.items():
            if other == rank or not only_rank:
                raise self._gone(other, why)
        if deadline.passed():
            raise deadline.exceeded(
                f"{what} of publisher rank {rank} (phase: {self.phase})",
                "look at the publisher's log, or raise the timeout of receive",
            )
        if self.session and link.silent_s > self._peer_timeout_s:
            raise self._gone(rank, f"it was silent for {link.silent_s:.1f} s")

    def beat(self) -> None:
        """Tell all ranks that this receiver is still here; in a session, now and then."""
        now = time.monotonic()
        if self.session and now >= self._beat_at:
            self._beat_at = now + self._beat_s
            self.send_all(messages.Beat())

    def _hear(self, timeout_s: float) -> bool:
        """Take in what is said next; whether anything was, within the time."""
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
                self._aborted[said.session] = Aborted(said.reason, again=said.again)
            elif not isinstance(said, messages.Beat):
                self._learn(rank, said)
                self._heard[rank].append(said)
        if self.session in self._aborted:
            raise self._aborted.pop(self.session)
        return was_any

    def _learn(self, rank: int, said: Message) -> None:
        """Keep what will be told by its digest alone from now on, also in a session that is over by the time."""
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


def _hosts(place: Place, rank: int, *, near_only: bool) -> tuple[str, ...]:
    if place.machine == this_machine():
        return ("127.0.0.1", *place.hosts)
    if near_only:
        raise OSError(f"publisher rank {rank} is on another host, or in another container")
    return place.hosts


def meet(
    rendezvous: Asking,
    channels: Channels,
    deadline: Deadline,
    leaving: Leaving,
    *,
    peer_timeout_s: float,
    once: bool = False,
) -> Connection | None:
    """A connection to the publisher that is found at ``rendezvous``; waits for one unless ``once``, then None.

    Raises `DeadlineExceeded`, which says what was in the way at last; `ConfigError` if the receiver is closed.
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
