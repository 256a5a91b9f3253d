"""Publisher rank 0: decides which version goes to whom and when, in sessions, and the outcome of each `publish`.

    asks and offers -> due -> lead: Begin -> send -> Committed -> over
                                 \\-> a member is lost or fails: Abort, learn who has the version, begin again

A version can be sent when every publisher rank has offered it. Kept versions are sent on request, at once. A version
that is sent directly waits for the receivers that have joined: a connected receiver
that doesn't ask is waited for as long as a peer may be silent, and at most half of the time of `publish`; then it is
left out.

Guarantees: one session at a time. A new one begins only when each member of the last has reported whether it has the
version, or was given up. An Ask is answered with a session, or refused, or waits for a version that may still come.
Does not: send bytes (``session.sender``), read links or wait by itself (``session.server``).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from holdfast.coordination.failure import RankFailure
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HoldfastError, PeerLost, StateMismatch
from holdfast.sync.session import messages
from holdfast.sync.session.futures import Outcome
from holdfast.sync.session.sender import Broken, ChannelBroken, ConnectedReceiver, SendSession, SessionLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.engine.messages import EngineMessage
    from holdfast.sync.protocol import PublisherOptions
    from holdfast.sync.session.futures import Offered
    from holdfast.sync.session.links import Link
    from holdfast.sync.session.rendezvous import Rendezvous
    from holdfast.sync.session.sender import Sender


# Versions that all ranks can send, and results of direct publishes. A version is available only while every rank has
# it; a direct publish that is late ends on all ranks with the same error.


@dataclass(slots=True)
class _Rank:
    """Another publisher rank, as rank 0 knows it."""

    link: Link
    versions: set[int] = field(default_factory=set)
    newest: int = -1


@dataclass(slots=True)
class PublishResult:
    """Result so far of a version that is published directly."""

    committed: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    mistakes: dict[str, HoldfastError] = field(default_factory=dict)
    """Errors of receivers that `publish` raises too, by receiver."""
    sessions: int = 0
    again_until: float = 0.0
    """Until then a receiver that got a wrong checksum may ask again."""

    @property
    def mistake(self) -> HoldfastError | None:
        """The first of these errors."""
        return next(iter(self.mistakes.values()), None)

    def got(self, name: str) -> None:
        """Record that a receiver has committed the version, perhaps not at the first try."""
        self.committed.add(name)
        self.lost.pop(name, None)
        self.mistakes.pop(name, None)


class AvailableVersions:
    """See the module. ``sources``: versions of this rank. ``finish``: reports to this rank's `publish`."""

    def __init__(self, sources: Mapping[int, Offered], finish: Callable[[int, Outcome], None], *, world: int) -> None:
        self._sources = sources
        self._finish_here = finish
        self._world = world
        self._ranks: dict[int, _Rank] = {}
        self._newest = -1
        self.tally = PublishResult()

    def rank_joined(self, rank: int, link: Link) -> None:
        self._ranks[rank] = _Rank(link)

    def offered(self, offered: Offered) -> None:
        """Record that this rank has a version to send."""
        self._newest = max(self._newest, offered.version)
        if offered.direct:
            self.tally = PublishResult()

    def withdrawn(self, version: int, reason: RankFailure | None) -> None:
        """Record that this rank no longer has ``version``; with a reason, the `publish` of all ranks fails."""
        if reason is not None:
            self.tell(messages.Finished(version, 0, 0, reason))

    def heard(self, rank: int, message: EngineMessage) -> None:
        told = self._ranks[rank]
        if isinstance(message, messages.Offer):
            told.versions.add(message.version)
            told.newest = max(told.newest, message.version)
        elif isinstance(message, messages.Withdraw):
            told.versions.discard(message.version)
            if message.reason is not None and message.version in self._sources:
                self.finish(message.version, message.reason.cause())

    def tell(self, message: EngineMessage) -> None:
        """Send a message to all other ranks."""
        for rank in self._ranks.values():
            rank.link.send(message)

    def begin(self, message: messages.Begin) -> None:
        """Tell all other ranks of a session; from now on their silence counts."""
        for rank in self._ranks.values():
            rank.link.expect()
        self.tell(message)

    def silent(self, seconds: float) -> list[int]:
        """Return the ranks that have been silent for this long."""
        return [rank for rank, told in self._ranks.items() if told.link.silent_s > seconds]

    def available(self) -> set[int]:
        """Return the versions that every rank has."""
        if len(self._ranks) < self._world - 1:
            return set()
        return set(self._sources).intersection(*(rank.versions for rank in self._ranks.values()))

    def is_gone(self, version: int) -> bool:
        """Return True if a rank had the version, or a newer one, and no longer keeps it."""
        if version <= self._newest and version not in self._sources:
            return True
        return any(version <= rank.newest and version not in rank.versions for rank in self._ranks.values())

    def direct(self) -> Offered | None:
        """Return the version that is published directly now."""
        return next((offered for offered in self._sources.values() if offered.direct), None)

    def finish(self, version: int, error: HoldfastError | None) -> None:
        """End the direct publish of ``version`` on all ranks."""
        committed, lost = len(self.tally.committed), len(self.tally.lost)
        reason = None if error is None else RankFailure.of(error, rank=0)
        self.tell(messages.Finished(version, committed, lost, reason))
        for rank in self._ranks.values():
            rank.versions.discard(version)
        self._finish_here(version, Outcome(committed, lost, reason))

    def end_late(self, waited_for: str) -> None:
        """End a direct publish whose deadline has passed."""
        direct = self.direct()
        if direct is not None and direct.deadline.passed():
            self.finish(direct.version, self.late(direct, waited_for))

    def late(self, direct: Offered, waited_for: str) -> HoldfastError:
        """Return the error of a direct publish whose deadline has passed."""
        if direct.unfit is not None:
            return direct.unfit
        absent = [rank for rank in range(1, self._world) if rank not in self._ranks]
        absent += [rank for rank, told in self._ranks.items() if direct.version not in told.versions]
        if absent:
            waited_for = f"publisher rank {absent[0]} to publish version {direct.version} too"
        return direct.deadline.exceeded(waited_for, "look at its log, or raise the timeout of publish")


_log = logging.getLogger("holdfast")

SETTLE_S: Final = 0.25
"""Seconds to wait so that receivers that start together join the first session together."""
RETRIES: Final = 3
"""Number of consecutive restarts of a session after a broken channel."""
_MISTAKES: Final = (StateMismatch, ConfigError, CheckpointCorrupt)
"""Errors of members that `publish` raises too, since both sides have to fix something."""
AGAIN_S: Final = 0.5
"""A receiver that got a wrong byte, and asks again within this, gets the version from the same `publish`."""
ANSWER_S: Final = 2.0
"""Time after which a silent receiver is probably gone: it sends every second. A late publish waits no longer for it."""
NEWS_S: Final = 0.25
"""Wait for news of an ended publisher rank: a member's message about it may arrive first."""


class Job(NamedTuple):
    version: int
    guests: list[ConnectedReceiver]


class Host(SessionLoop, Protocol):
    """Interface of the server for its coordinator."""

    @property
    def guests(self) -> Iterable[ConnectedReceiver]: ...
    def guest(self, name: str) -> ConnectedReceiver | None: ...
    def give_up(self, guest: ConnectedReceiver, why: str) -> None:
        """End the receiver's link; it is lost."""
        ...

    @property
    def sources(self) -> Mapping[int, Offered]: ...
    def finish(self, version: int, outcome: Outcome) -> None:
        """Set the result of this rank's `publish` of ``version``."""
        ...


class Coordinator:
    """See the module. Everything runs on the server's thread."""

    def __init__(
        self,
        host: Host,
        sender: Sender,
        rendezvous: Rendezvous,
        incarnation: str,
        options: PublisherOptions,
        *,
        world: int,
        peer_timeout_s: float,
    ) -> None:
        self._host = host
        self._sender = sender
        self._rendezvous = rendezvous
        self._incarnation = incarnation
        self._options = options
        self._offers = AvailableVersions(host.sources, host.finish, world=world)
        self._peer_timeout_s = peer_timeout_s
        self._sessions = 0
        self._retries = 0
        self._joined = 0
        self._ready_since: tuple[int, float] | None = None
        self.session: SendSession | None = None

    # messages ------------------------------------------------------------------------------------------------------

    def joined(self) -> None:
        self._joined += 1

    @property
    def newest(self) -> int | None:
        """The newest version that receivers can ask for now."""
        return max(self._offers.available(), default=None)

    def rank_joined(self, rank: int, link: Link) -> None:
        self._offers.rank_joined(rank, link)

    def offered(self, offered: Offered) -> None:
        self._offers.offered(offered)

    def withdrawn(self, version: int, reason: RankFailure | None) -> None:
        self._offers.withdrawn(version, reason)

    def heard_rank(self, rank: int, message: EngineMessage) -> None:
        session = self.session
        if not isinstance(message, messages.Lost):
            self._offers.heard(rank, message)
        elif session is not None and session.number == message.session:
            if not message.receiver:
                session.over, session.again = session.over or message.reason, message.again
            for member in session.members:
                if member.name == message.receiver and not member.is_over:
                    member.state, member.reason = "lost", message.reason
                    # Without that rank it can be in no other session; if it lives, it will connect again.
                    member.guest.ask, member.guest.settled = None, session.version

    def heard(self, guest: ConnectedReceiver, message: EngineMessage) -> None:
        """Handle a message of a receiver; messages about an ended session are ignored."""
        if isinstance(message, messages.Ask):
            guest.ask, guest.asked_at = message, time.monotonic()
            return
        session = self.session
        member = session.member(guest) if session is not None else None
        if isinstance(message, messages.Failed):
            if guest.ask is not None and guest.ask.number == message.ask:
                guest.ask = None
                if session is not None and member is not None and not member.is_over:
                    member.state, member.reason = "failed", message.reason
                    guest.settled = session.version
            return
        if session is None or member is None or getattr(message, "session", None) != session.number:
            return
        if isinstance(message, messages.Committed):
            member.state = "committed"
            guest.ask, guest.settled = None, session.version
        elif isinstance(message, messages.Aborted):
            member.state = "aborted"
        elif isinstance(message, messages.Broke):
            if session.over is None:
                session.over, session.again = message.reason, True
        else:
            session.heard(member, message)

    def lost(self, guest: ConnectedReceiver, reason: RankFailure) -> None:
        """Handle the end of a receiver's link."""
        member = self.session.member(guest) if self.session is not None else None
        if member is not None and not member.is_over:
            member.state, member.reason = "lost", reason

    # scheduling ----------------------------------------------------------------------------------------------------

    def due(self) -> Job | None:
        """The session to lead now, if any. Refuses asks, and ends a direct publish with nothing left to do."""
        offers = self._offers
        offers.end_late(self._waited_for())
        available = offers.available()
        fits: dict[int, list[ConnectedReceiver]] = {}
        for guest in self._host.guests:
            version = self._judge(guest, available)
            if version is not None:
                fits.setdefault(version, []).append(guest)
        direct, tally = offers.direct(), offers.tally
        was_sent = tally.sessions > 0 or tally.mistake is not None
        is_over = was_sent and time.monotonic() >= tally.again_until
        if direct is not None and direct.version in available and direct.version not in fits and is_over:
            offers.finish(direct.version, tally.mistake)
            direct = None
        if not fits:
            self._ready_since = None
            return None
        version = min(fits, key=lambda version: min(guest.asked_at for guest in fits[version]))
        if direct is not None and not self._are_all_here(version):
            return None
        return Job(version, fits[version])

    def _judge(self, guest: ConnectedReceiver, available: set[int]) -> int | None:
        """Return the version that answers the receiver's Ask; None if there is none to answer now."""
        ask = guest.ask
        if ask is None:
            return None
        if ask.version is not None:
            if ask.version in available:
                return ask.version
            if self._offers.is_gone(ask.version):
                self._refuse(guest, self._not_kept(ask.version, available))
            return None
        newest = max(available, default=None)
        if newest is None:
            return None
        if ask.newer_than is None or newest > ask.newer_than:
            return newest
        if ask.own_of != self._incarnation:
            error = ConfigError(
                f"version {newest} is published, but receiver {guest.name} has version {ask.newer_than} of an earlier "
                "publisher: a restarted publisher must continue with greater version numbers; or ask "
                f"for version {newest} by its number",
                field="version",
            )
            _log.error("%s", error)
            self._offers.tally.mistakes.setdefault(guest.name, error)
            self._refuse(guest, error)
            guest.settled = newest
        return None

    def _refuse(self, guest: ConnectedReceiver, error: HoldfastError) -> None:
        assert guest.ask is not None
        guest.link.send(messages.Refused(guest.ask.number, RankFailure.of(error, rank=0)))
        guest.ask = None

    def _not_kept(self, version: int, available: set[int]) -> CheckpointNotFound:
        kept = ", ".join(map(str, sorted(available))) or "none"
        return CheckpointNotFound(
            f"version {version} is not kept any more (kept: {kept}); ask for one of those, pin "
            "versions that must stay, or raise keep_versions",
            path=self._rendezvous.shown,
            step=version,
        )

    def _are_all_here(self, version: int) -> bool:
        """Return True if the session can begin; False while receivers that have joined may still ask."""
        now = time.monotonic()
        if self._ready_since is None or self._ready_since[0] != version:
            self._ready_since = version, now
        if self._joined < self._options.receivers:
            return False
        since_s = now - self._ready_since[1]
        if not self._sessions and since_s < SETTLE_S:
            return False
        idle = any(guest.ask is None and guest.settled != version for guest in self._host.guests)
        direct = self._offers.direct()
        is_pressing = direct is not None and direct.deadline.left_s() < direct.deadline.timeout_s / 2
        return not idle or is_pressing or since_s >= self._peer_timeout_s

    def _waited_for(self) -> str:
        """Describe what a direct publish waits for now."""
        session = self.session
        if session is None:
            count = len(list(self._host.guests))
            return f"a receiver to ask for the version ({count} are connected, {self._joined} ever were)"
        names = ", ".join(member.name for member in session.members if not member.is_over)
        silent = ", ".join(map(str, self._offers.silent(ANSWER_S)))
        of_ranks = f"; publisher rank(s) {silent} say nothing" if silent else ""
        return f"receivers {names} to take version {session.version} ({session.phase}{of_ranks})"

    @property
    def is_waiting(self) -> bool:
        """Return True if a timeout alone may start a session or end a `publish`."""
        return self._ready_since is not None or self._offers.direct() is not None

    def work(self) -> None:
        """Wait for the next session that is due, and lead it."""
        jobs: list[Job] = []

        def find() -> bool:
            job = self.due()
            jobs.extend([job] if job is not None else [])
            return bool(jobs)

        self._host.run_until(find)
        self.lead(jobs[0])

    # one session ---------------------------------------------------------------------------------------------------

    def lead(self, job: Job) -> None:
        """Bring a version to its receivers; returns when the session is over, successful or not."""
        offered = self._host.sources[job.version]
        self._sessions += 1
        session = self.session = SendSession(self._sessions, job.version, job.guests)
        names = tuple(member.name for member in session.members)
        self._offers.begin(messages.Begin(session.number, session.version, names, 0))
        for member in session.members:
            ask = member.guest.ask.number if member.guest.ask is not None else 0
            member.guest.link.expect()
            begin = messages.Begin(session.number, session.version, names, ask, offered.meta)
            member.guest.link.send(begin)
        error: HoldfastError | None = None
        try:
            self._sender.send(session, offered.source)
            session.phase = "commit"
            self._host.run_until(lambda: self._all_over(session, offered))
            self._retries = 0
        except Broken:
            error = self._abort(session, None)
        except HoldfastError as failure:
            error = self._abort(session, failure)
        finally:
            self.session = None
        self._count(session, offered, error)

    def _all_over(self, session: SendSession, offered: Offered) -> bool:
        self._check(session, offered)
        return all(member.is_over for member in session.members)

    def _check(self, session: SendSession, offered: Offered) -> None:
        session.check()
        if offered.direct and offered.deadline.passed():
            raise self._offers.late(offered, self._waited_for())

    def check(self) -> None:
        """Raise if the current session's `publish` is late; called whenever it waits."""
        if self.session is not None and self.session.over is None:
            offered = self._host.sources.get(self.session.version)
            if offered is not None and offered.direct and offered.deadline.passed():
                self.session.over = RankFailure.of(self._offers.late(offered, self._waited_for()), rank=0)

    def _abort(self, session: SendSession, failure: HoldfastError | None) -> HoldfastError | None:
        """End the session for the remaining members, and learn from each whether it has the version.

        Returns the error of `publish`; None if the remaining members get another session.
        """
        broken = next((member for member in session.members if member.state in ("failed", "lost")), None)
        reason = None if failure is None else RankFailure.of(failure, rank=0)
        reason = reason or session.over or (None if broken is None else broken.reason)
        assert reason is not None
        again = isinstance(failure, ChannelBroken) or session.again
        self._retries = self._retries + 1 if again else 0
        ends = self._retries > RETRIES or ((failure is not None or session.over is not None) and not again)
        _log.warning(
            "session %d of version %d is given up (%s): %s",
            session.number,
            session.version,
            session.phase,
            reason.message,
        )
        session.phase, session.over = "abort", reason
        said = messages.Abort(session.number, reason, again=not ends)
        self._offers.tell(said)
        for member in session.members:
            if not member.is_over:
                member.guest.link.expect()
                member.guest.link.send(said)
        self._host.run_until(lambda: self._have_answered(session))
        return reason.cause() if ends else None

    def _have_answered(self, session: SendSession) -> bool:
        left = [member for member in session.members if not member.is_over]
        offered = self._host.sources.get(session.version)
        if offered is not None and offered.direct and offered.deadline.passed():
            for member in left:
                if member.guest.link.silent_s > ANSWER_S:
                    self._host.give_up(member.guest, f"it was silent for {member.guest.link.silent_s:.1f} s")
        return all(member.is_over for member in left)

    def _count(self, session: SendSession, offered: Offered, error: HoldfastError | None) -> None:
        tally = self._offers.tally if offered.direct else PublishResult()
        tally.sessions += 1
        if any(member.state == "failed" and _is_of_a_rank(member.reason) for member in session.members):
            until = time.monotonic() + NEWS_S
            self._host.run_until(lambda: time.monotonic() >= until)  # raises if that rank is gone
        for member in session.members:
            if member.state == "committed":
                tally.got(member.name)
            elif member.state in ("failed", "lost") and member.reason is not None:
                tally.lost[member.name] = member.reason.message
                cause = member.reason.cause()
                _log.error("receiver %s did not get version %d: %s", member.name, session.version, cause)
                if isinstance(cause, _MISTAKES):
                    tally.mistakes[member.name] = cause
                if isinstance(cause, CheckpointCorrupt):
                    tally.again_until = time.monotonic() + AGAIN_S
        if offered.direct and error is not None:
            self._offers.finish(offered.version, error)


def _is_of_a_rank(reason: RankFailure | None) -> bool:
    """Return True if a member failed because it lost a publisher rank, which may concern only its own link."""
    return reason is not None and isinstance(reason.cause(), PeerLost)
