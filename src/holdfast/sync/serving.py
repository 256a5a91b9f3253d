"""A publisher rank's server: one thread that accepts links, hears what is said on them, and runs sessions.

    Server (every rank)     links, guests, silence, calls from other threads
      rank 0: Coordinator   decides on sessions (``sync.coordinating``)
      others: Follower      takes part in those that rank 0 begins
      both:   Sender        sends this rank's part (``sync.sending``)

Guarantees: the thread never blocks for long on any one peer: what blocks runs aside. In a session who is silent for
longer than a peer may be is given up. Whatever goes wrong on the thread itself ends all links, and every `publish` that
waits, with that cause.
Assumes: `Server.call` and what it is given are for other threads; all else runs on the server's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError, PeerLost
from holdfast.outcome import AbortReason
from holdfast.sync import messages
from holdfast.sync.coordinating import Coordinator
from holdfast.sync.deadline import Deadline
from holdfast.sync.following import Follower
from holdfast.sync.links import Ended, Hub, Link, connect
from holdfast.sync.sending import Guest, Sender
from holdfast.sync.waiting import Aside, Awaited, Offered, Outcome, beat_interval_s

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from holdfast.sync.rendezvous import Places, Rendezvous
    from holdfast.sync.seam import PublisherOptions
    from holdfast.sync.transports.base import Channels

_log = logging.getLogger("holdfast")
_INTRODUCTION_S: Final = 10.0
"""Who connects has to say who it is within this."""
_LOOK_S: Final = 0.05
"""How often a coordinator that waits for more receivers looks at the time."""


class _Stopped(Exception):
    """The server is being closed."""


class Server:
    """See the module. ``places``: of all ranks of this publisher; the socket listens at those of ``rank``."""

    def __init__(
        self,
        rank: int,
        places: Places,
        sock: socket.socket,
        channels: Channels,
        options: PublisherOptions,
        rendezvous: Rendezvous | None,
        *,
        peer_timeout_s: float,
    ) -> None:
        self.rank = rank
        self._places = places
        self._sock = sock
        self._channels = channels
        self._peer_timeout_s = peer_timeout_s
        self._beat_s = beat_interval_s(peer_timeout_s)
        self._beat_at = 0.0
        self._hub = Hub()
        self._hub.listen(sock)
        self._calls: deque[Callable[[], None]] = deque()
        self._strangers: dict[Link, float] = {}
        self._guests: dict[Link, Guest] = {}
        self._ranks: dict[Link, int] = {}
        self.sources: dict[int, Offered] = {}
        self._awaited: dict[int, Awaited] = {}
        self._sender = Sender(channels, options, self)
        self._role: Coordinator | Follower
        if rendezvous is not None:
            self._role = Coordinator(
                self,
                self._sender,
                rendezvous,
                places.incarnation,
                options,
                world=len(places.ranks),
                peer_timeout_s=peer_timeout_s,
            )
        else:
            self._role = Follower(rank, self, self._sender)
        self._stopping = self._has_ended = False
        self.fatal: HoldfastError | None = None
        self._lost_rank: HoldfastError | None = None
        self._thread = threading.Thread(target=self._live, name=f"holdfast-sync-{rank}", daemon=True)

    # from other threads --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def bytes_sent(self) -> int:
        return self._sender.bytes_sent

    def offer(self, offered: Offered) -> Awaited:
        """Have a version sent: directly until the outcome is known, or to whoever asks until `withdraw`."""
        awaited = Awaited()
        self.call(lambda: self._offer(offered, awaited))
        return awaited

    def withdraw(self, version: int, reason: AbortReason | None = None) -> None:
        """This rank doesn't have ``version`` any more, or (with a reason) couldn't publish it."""
        self.call(lambda: self._withdraw(version, reason))

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the server's thread, soon; here, where that has ended."""
        self._calls.append(function)
        self._hub.ring()
        if self._has_ended:
            self._run_calls()

    def close(self, timeout_s: float) -> None:
        """End all links; idempotent. A session under way is cut off."""
        self._stopping = True
        self._hub.ring()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # for the role --------------------------------------------------------------------------------------------------

    @property
    def guests(self) -> Iterable[Guest]:
        return list(self._guests.values())

    def guest(self, name: str) -> Guest | None:
        return next((guest for guest in self._guests.values() if guest.name == name), None)

    def patience(self) -> Deadline:
        return Deadline.after(self._peer_timeout_s)

    def pump(self, until: Callable[[], bool]) -> None:
        while not until():
            self._hear(self._wait_s())

    def aside(self, function: Callable[[], Any], check: Callable[[], None]) -> Any:
        call = Aside(function, self._hub.ring)

        def is_done() -> bool:
            check()
            return call.done

        self.pump(is_done)
        return call.result()

    def finish(self, version: int, outcome: Outcome) -> None:
        """What this rank's `publish` of ``version`` returns or raises; it isn't sent any more."""
        self.sources.pop(version, None)
        awaited = self._awaited.pop(version, None)
        if awaited is not None:
            awaited.settle(outcome)

    def give_up(self, guest: Guest, why: str) -> None:
        session = self._role.session
        phase = session.phase if session is not None and session.member(guest) is not None else "idle"
        self._hub.drop(guest.link)
        self._guests.pop(guest.link, None)
        error = PeerLost(
            f"receiver {guest.name} was lost to publisher rank {self.rank} (phase: {phase}): {why}",
            peer=guest.name,
            phase=phase,
            version=None if session is None else session.version,
        )
        if phase != "idle":
            _log.warning("%s", error)
        self._role.lost(guest, AbortReason.of(error, rank=self.rank))

    # the thread ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            if isinstance(self._role, Follower):
                self._role.zero = self._connect_to_zero()
            while True:
                self._role.work()
                if self._lost_rank is not None:
                    raise self._lost_rank  # noqa: TRY301 - the session has ended for it, and no other can follow
        except _Stopped:
            pass
        except HoldfastError as error:
            self.fatal = error
        except BaseException as error:  # noqa: BLE001 - whatever it is, nobody may be left waiting
            _log.exception("the server of publisher rank %d ended", self.rank)
            self.fatal = HoldfastError(
                f"the server of publisher rank {self.rank} ended: {type(error).__name__}: {error}"
            )
        self._end()

    def _end(self) -> None:
        self._sender.drop_channel()
        for guest in self._guests.values():
            guest.link.send(messages.Leave())
        self._hub.close()
        self._sock.close()
        cause = self.fatal or HoldfastError(f"publisher rank {self.rank} was closed")
        self._has_ended = True  # what is called from now on is run by its caller, if not here
        self._run_calls()
        for version in list(self._awaited):
            self.finish(version, Outcome(0, 0, AbortReason.of(cause, rank=self.rank)))
        self.sources.clear()

    def _run_calls(self) -> None:
        while (function := self._next_call()) is not None:
            function()

    def _next_call(self) -> Callable[[], None] | None:
        try:
            return self._calls.popleft()
        except IndexError:  # when the server has ended two threads may be at it
            return None

    def _connect_to_zero(self) -> Link:
        place, deadline = self._places.ranks[0], self.patience()
        hosts = ("127.0.0.1", *place.hosts) if place.machine == self._places.ranks[self.rank].machine else place.hosts
        try:
            sock = connect(hosts, place.port, deadline)
        except OSError as error:
            raise PeerLost(
                f"publisher rank {self.rank} can't reach rank 0 at {', '.join(hosts)} port {place.port}: {error}",
                peer="publisher rank 0",
                phase="start",
            ) from error
        link = Link(sock, "publisher rank 0", messages.ToPublisher)
        link.send(messages.Peer(self.rank, self._places.token))
        self._hub.add(link)
        self._ranks[link] = 0
        return link

    def _wait_s(self) -> float:
        now = time.monotonic()
        wait_s = self._beat_at - now if self._role.session is not None else self._beat_s
        return max(0.0, min(wait_s, _LOOK_S if self._role.is_waiting else wait_s))

    def _hear(self, timeout_s: float) -> None:
        """Let everything happen that happens within ``timeout_s``, or what is next if that is sooner."""
        if not self._calls:
            for heard in self._hub.hear(timeout_s):
                if isinstance(heard, tuple):
                    self._take(*heard)
                else:
                    self._welcome(heard)
        self._run_calls()
        if self._stopping:
            raise _Stopped
        self._look_around()

    def _welcome(self, sock: socket.socket) -> None:
        link = Link(sock, "who has not said who it is", messages.ToPublisher)
        self._hub.add(link)
        self._strangers[link] = time.monotonic() + _INTRODUCTION_S

    def _take(self, link: Link, said: Any) -> None:
        if link in self._strangers:
            del self._strangers[link]
            self._introduce(link, said)
        elif link in self._guests:
            guest = self._guests[link]
            if isinstance(said, (Ended, messages.Leave)):
                self.give_up(guest, said.why if isinstance(said, Ended) else "it left")
            elif not isinstance(said, messages.Beat):
                guest.learn(said)
                self._role.heard(guest, said)
        elif link in self._ranks:
            rank = self._ranks[link]
            if isinstance(said, (Ended, messages.Leave)):
                why = said.why if isinstance(said, Ended) else "it was closed"
                self._lost_rank = PeerLost(
                    f"publisher rank {rank} was lost to rank {self.rank}: {why}; restart the publisher on all ranks",
                    peer=f"publisher rank {rank}",
                    phase="idle" if self._role.session is None else self._role.session.phase,
                )
                raise self._lost_rank
            if not isinstance(said, messages.Beat):
                self._role.heard_rank(rank, said)
            elif self.rank and self._role.session is None:
                link.send(messages.Beat())  # rank 0 is at a session that this rank has done its part of

    def _introduce(self, link: Link, said: Any) -> None:
        if isinstance(said, messages.Hello) and said.token == self._places.token:
            link.peer = f"receiver {said.receiver}"
            self._guests[link] = Guest(said.receiver, link, said.address)
            self._role.joined()
        elif isinstance(said, messages.Peer) and said.token == self._places.token and self.rank == 0:
            link.peer = f"publisher rank {said.rank}"
            self._ranks[link] = said.rank
            self._role.rank_joined(said.rank, link)
        else:
            self._hub.drop(link)

    def _look_around(self) -> None:
        """Beat, and give up who is silent. Outside sessions nobody has to speak."""
        now = time.monotonic()
        for link in [link for link, until in self._strangers.items() if now > until]:
            del self._strangers[link]
            self._hub.drop(link)
        session = self._role.session
        if session is None:
            return
        self._role.check()
        if now < self._beat_at:
            return
        self._beat_at = now + self._beat_s
        for member in session.members:
            link = member.guest.link
            if member.state in ("lost", "committed"):
                continue
            link.send(messages.Beat())
            if not member.is_over and link.silent_s > self._peer_timeout_s:
                self.give_up(member.guest, f"it was silent for {link.silent_s:.1f} s")
        for link, rank in self._ranks.items():
            link.send(messages.Beat())
            if link.silent_s > self._peer_timeout_s and session.over is None:
                error = PeerLost(
                    f"publisher rank {rank} was silent for {link.silent_s:.1f} s (phase: {session.phase})",
                    peer=f"publisher rank {rank}",
                    phase=session.phase,
                    version=session.version,
                )
                session.over = AbortReason.of(error, rank=self.rank)

    # calls ---------------------------------------------------------------------------------------------------------

    def _offer(self, offered: Offered, awaited: Awaited) -> None:
        if self.fatal is not None or self._stopping:
            cause = self.fatal or HoldfastError(f"publisher rank {self.rank} was closed")
            awaited.settle(Outcome(0, 0, AbortReason.of(cause, rank=self.rank)))
            return
        self.sources[offered.version] = offered
        if offered.direct:
            self._awaited[offered.version] = awaited
        self._role.offered(offered)

    def _withdraw(self, version: int, reason: AbortReason | None) -> None:
        if self.fatal is None and not self._stopping:
            self.sources.pop(version, None)
            self._awaited.pop(version, None)
            self._role.withdrawn(version, reason)
