"""Take part in sessions as a publisher rank other than 0, and report to rank 0.

Guarantees: rank 0 learns of every version that this rank offers or no longer has, and of each member that it loses.
Does not: send bytes (``session.sender``), receive on links or wait by itself (``session.server``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.coordination.failure import RankFailure
from holdfast.errors import HoldfastError, PeerLost
from holdfast.sync.session import messages
from holdfast.sync.session.futures import Outcome
from holdfast.sync.session.sender import Broken, ChannelBroken, SendSession

if TYPE_CHECKING:
    from holdfast.engine.messages import EngineMessage
    from holdfast.sync.session.coordinator import Host
    from holdfast.sync.session.futures import Offered
    from holdfast.sync.session.links import Link
    from holdfast.sync.session.sender import ConnectedReceiver, Sender


class Follower:
    """A rank other than 0: takes part in the sessions that rank 0 begins."""

    is_waiting = False
    newest: int | None = None
    """Watchers ask rank 0."""

    def __init__(self, rank: int, host: Host, sender: Sender) -> None:
        self._rank = rank
        self._host = host
        self._sender = sender
        self._begin: messages.Begin | None = None
        self.session: SendSession | None = None
        self.zero: Link

    def joined(self) -> None:
        pass

    def rank_joined(self, rank: int, link: Link) -> None:
        raise AssertionError(f"{link.peer} takes this for rank 0, not {self._rank}; it is {rank}")

    def check(self) -> None:
        pass

    def offered(self, offered: Offered) -> None:
        self.zero.send(messages.Offer(offered.version))

    def withdrawn(self, version: int, reason: RankFailure | None) -> None:
        self.zero.send(messages.Withdraw(version, reason))

    def heard_rank(self, rank: int, message: EngineMessage) -> None:
        assert rank == 0
        if isinstance(message, messages.Begin):
            self._begin = message
        elif isinstance(message, messages.Abort):
            if self._begin is not None and self._begin.session == message.session:
                self._begin = None
            if self.session is not None and self.session.number == message.session:
                self.session.over = message.reason
        elif isinstance(message, messages.Finished):
            self._host.finish(message.version, Outcome(message.receivers, message.lost, message.reason))

    def heard(self, guest: ConnectedReceiver, message: EngineMessage) -> None:
        member = self.session.member(guest) if self.session is not None else None
        if self.session is None or member is None or getattr(message, "session", None) != self.session.number:
            return
        if isinstance(message, messages.Committed):
            member.state = "committed"  # it sends no more, and needn't
        else:
            self.session.heard(member, message)

    def lost(self, guest: ConnectedReceiver, reason: RankFailure) -> None:
        member = self.session.member(guest) if self.session is not None else None
        if self.session is not None and member is not None and not member.is_over:
            member.state, member.reason = "lost", reason
            self.zero.send(messages.Lost(self.session.number, guest.name, reason))

    def work(self) -> None:
        """Take part in one session, whatever its outcome."""
        self._host.run_until(lambda: self._begin is not None)
        begin, self._begin = self._begin, None
        assert begin is not None
        self.zero.expect()
        session = SendSession(begin.session, begin.version, ())
        self.session = session
        try:
            self._take_part(session, begin)
        except Broken:
            pass
        except HoldfastError as error:
            reason, again = RankFailure.of(error, rank=self._rank), isinstance(error, ChannelBroken)
            self.zero.send(messages.Lost(begin.session, "", reason, again))
        finally:
            self.session = None

    def _take_part(self, session: SendSession, begin: messages.Begin) -> None:
        offered = self._host.sources.get(begin.version)
        if offered is None:
            raise HoldfastError(
                f"publisher rank {self._rank} does not keep version {begin.version} any more; ask again"
            )
        late = self._host.patience()

        def have_come() -> bool:
            session.check()
            missing = [name for name in begin.members if self._host.guest(name) is None]
            if missing and late.passed():
                raise PeerLost(
                    f"receiver {missing[0]} has no link to publisher rank {self._rank}",
                    peer=missing[0],
                    phase="begin",
                    version=begin.version,
                )
            return not missing

        self._host.run_until(have_come)
        for name in begin.members:
            guest = self._host.guest(name)
            if guest is None:
                raise Broken
            guest.link.expect()
            session.add(guest)
        self._sender.send(session, offered.source)
