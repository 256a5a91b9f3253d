"""Serve receivers as one publisher rank: one thread accepts links, reads their messages, and runs sessions.

    Server (every rank)     links, guests, silence, calls from other threads
      rank 0: Coordinator   decides on sessions (``session.coordinator``)
      others: Follower      takes part in those that rank 0 begins
      both:   Sender        sends this rank's part (``session.sender``)

Guarantees: the thread never blocks for long on any one peer: blocking calls run on other threads. A peer that is silent
for too long in a session is given up. An error on the thread itself ends all links, and every waiting `publish`, with
that cause.
Assumes: `Server.call` and what it is given are for other threads; all else runs on the server's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.failure import RankFailure
from holdfast.errors import HoldfastError, PeerLost
from holdfast.sync.session import messages
from holdfast.sync.session.coordinator import Coordinator
from holdfast.sync.session.follower import Follower
from holdfast.sync.session.futures import BlockingCall, Offered, Outcome, PublishFuture, beat_interval_s
from holdfast.sync.session.links import Ended, EventLoop, Link, connect
from holdfast.sync.session.sender import ConnectedReceiver, Sender

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from holdfast.sync.protocol import PublisherOptions
    from holdfast.sync.session.channel import Channels
    from holdfast.sync.session.rendezvous import Places, Rendezvous

_log = logging.getLogger("holdfast")
_INTRODUCTION_S: Final = 10.0
"""Seconds within which a connecting peer must identify itself."""
_LOOK_S: Final = 0.05
"""Polling interval of a coordinator that waits for more receivers."""


class _Stopped(Exception):
    """The server is being closed."""


class Server:
    """See the module. ``places``: of all ranks of this publisher; the socket listens at that of ``rank``."""

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
        self._hub = EventLoop()
        self._hub.listen(sock)
        self._calls: deque[Callable[[], None]] = deque()
        self._strangers: dict[Link, float] = {}
        self._guests: dict[Link, ConnectedReceiver] = {}
        self._ranks: dict[Link, int] = {}
        self._watchers: dict[Link, int | None] = {}
        """What each watcher was told last; -1 before that."""
        self.sources: dict[int, Offered] = {}
        self._awaited: dict[int, PublishFuture] = {}
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

    def offer(self, offered: Offered) -> PublishFuture:
        """Offer a version: directly until the outcome is known, or to any receiver that asks until `withdraw`."""
        awaited = PublishFuture()
        self.call(lambda: self._offer(offered, awaited))
        return awaited

    def withdraw(self, version: int, reason: RankFailure | None = None) -> None:
        """Withdraw ``version``, which this rank no longer has or (with a reason) couldn't publish."""
        self.call(lambda: self._withdraw(version, reason))

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the server's thread, soon; on the calling thread if that has ended."""
        self._calls.append(function)
        self._hub.wake()
        if self._has_ended:
            self._run_calls()

    def close(self, timeout_s: float) -> None:
        """End all links; idempotent. A session in progress is cut off."""
        self._stopping = True
        self._hub.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # called by the role --------------------------------------------------------------------------------------------

    @property
    def guests(self) -> Iterable[ConnectedReceiver]:
        return list(self._guests.values())

    def guest(self, name: str) -> ConnectedReceiver | None:
        return next((guest for guest in self._guests.values() if guest.name == name), None)

    def patience(self) -> Deadline:
        return Deadline.after(self._peer_timeout_s)

    def run_until(self, until: Callable[[], bool]) -> None:
        while not until():
            self._hear(self._wait_s())

    def aside(self, function: Callable[[], Any], check: Callable[[], None]) -> Any:
        call = BlockingCall(function, self._hub.wake)

        def is_done() -> bool:
            check()
            return call.done

        self.run_until(is_done)
        return call.result()

    def finish(self, version: int, outcome: Outcome) -> None:
        """Set the result of this rank's `publish` of ``version``, which is no longer sent."""
        self.sources.pop(version, None)
        awaited = self._awaited.pop(version, None)
        if awaited is not None:
            awaited.settle(outcome)

    def give_up(self, guest: ConnectedReceiver, why: str) -> None:
        session = self._role.session
        member = None if session is None else session.member(guest)
        # A member that has committed may leave at any time, also while others are not done.
        phase = session.phase if session is not None and member is not None and not member.is_over else "idle"
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
        self._role.lost(guest, RankFailure.of(error, rank=self.rank))

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
        except BaseException as error:  # noqa: BLE001 - nobody may be left waiting, whatever the error
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
        self._has_ended = True  # later calls are run by their caller, if not here
        self._run_calls()
        for version in list(self._awaited):
            self.finish(version, Outcome(0, 0, RankFailure.of(cause, rank=self.rank)))
        self.sources.clear()

    def _run_calls(self) -> None:
        while (function := self._next_call()) is not None:
            function()

    def _next_call(self) -> Callable[[], None] | None:
        try:
            return self._calls.popleft()
        except IndexError:  # after the end, two threads may run this
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
        """Process events for ``timeout_s``, or until the next due action if that is sooner."""
        if not self._calls:
            for heard in self._hub.hear(timeout_s):
                if isinstance(heard, tuple):
                    self._take(*heard)
                else:
                    self._welcome(heard)
        self._run_calls()
        if self._stopping:
            raise _Stopped
        if self._watchers:
            self._tell_watchers()
        self._look_around()

    def _tell_watchers(self) -> None:
        newest = self._role.newest
        for link, told in self._watchers.items():
            if told != newest:
                self._watchers[link] = newest
                link.send(messages.Newest(newest))

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
        elif link in self._watchers:
            if isinstance(said, (Ended, messages.Leave)):
                del self._watchers[link]
                self._hub.drop(link)
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
                link.send(messages.Beat())  # rank 0 is in a session of which this rank has done its part

    def _introduce(self, link: Link, said: Any) -> None:
        if isinstance(said, messages.Hello) and said.token == self._places.token:
            link.peer = f"receiver {said.receiver}"
            self._guests[link] = ConnectedReceiver(said.receiver, link, said.address)
            self._role.joined()
        elif isinstance(said, messages.Peer) and said.token == self._places.token and self.rank == 0:
            link.peer = f"publisher rank {said.rank}"
            self._ranks[link] = said.rank
            self._role.rank_joined(said.rank, link)
        elif isinstance(said, messages.Watch) and said.token == self._places.token:
            link.peer = "a receiver that looks for versions"
            self._watchers[link] = -1
        else:
            self._hub.drop(link)

    def _look_around(self) -> None:
        """Send beats, and give up silent peers. Outside sessions silence is allowed."""
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
                session.over = RankFailure.of(error, rank=self.rank)

    # calls ---------------------------------------------------------------------------------------------------------

    def _offer(self, offered: Offered, awaited: PublishFuture) -> None:
        if self.fatal is not None or self._stopping:
            cause = self.fatal or HoldfastError(f"publisher rank {self.rank} was closed")
            awaited.settle(Outcome(0, 0, RankFailure.of(cause, rank=self.rank)))
            return
        self.sources[offered.version] = offered
        if offered.direct:
            self._awaited[offered.version] = awaited
        self._role.offered(offered)

    def _withdraw(self, version: int, reason: RankFailure | None) -> None:
        if self.fatal is None and not self._stopping:
            self.sources.pop(version, None)
            self._awaited.pop(version, None)
            self._role.withdrawn(version, reason)
