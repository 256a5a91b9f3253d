"""Publisher rank 0: which version goes to whom and when, in sessions; and what becomes of each `publish`.

    asks and offers -> due -> lead: Begin -> send -> (Ready -> decision -> Commit ->) Committed -> over
                                 \\-> a member is lost or fails: Abort, hear of each who has the version, begin again

A version can be sent when every publisher rank has offered it. What is kept is sent to whoever asks, at once. What is
sent directly, and what a fleet takes together, waits for those that have joined: a receiver that is there and doesn't
ask is waited for as long as a peer may be silent, and for no more than half of the time that `publish` has; then it is
left out.

Guarantees: one session at a time. A new one begins only when each member of the last has said whether it has the
version, or was given up. With ``atomic_fleet`` the decision is in the rendezvous before any member is told of it. An
Ask is answered with a session, or refused, or waits for a version that may still come.
Does not: send bytes (``sync.sending``), hear links or wait by itself (``sync.serving``).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HoldfastError, PeerLost, StateMismatch
from holdfast.outcome import AbortReason
from holdfast.sync import messages
from holdfast.sync.offering import Offers, Tally
from holdfast.sync.rendezvous import COMMIT, decision_key
from holdfast.sync.sending import Broken, ChannelBroken, Guest, Pump, Session

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.engine.messages import Message
    from holdfast.sync.links import Link
    from holdfast.sync.rendezvous import Rendezvous
    from holdfast.sync.seam import PublisherOptions
    from holdfast.sync.sending import Sender
    from holdfast.sync.waiting import Offered, Outcome

_log = logging.getLogger("holdfast")

SETTLE_S: Final = 0.25
"""Receivers that start together shall be in the first session together."""
RETRIES: Final = 3
"""So often a session is begun again for a channel that broke, one after the other."""
_MISTAKES: Final = (StateMismatch, ConfigError, CheckpointCorrupt)
"""What a member may say that `publish` raises too: both sides have something to put right."""
AGAIN_S: Final = 0.5
"""A receiver that got a wrong byte, and asks again within this, gets the version from the same `publish`."""
ANSWER_S: Final = 2.0
"""Who is silent for longer may well be gone: it speaks every second. A publish that is late waits no longer for it."""
NEWS_S: Final = 0.25
"""That a publisher rank has ended is heard about as soon on every link, but a member's word for it may come first."""


class Job(NamedTuple):
    version: int
    guests: list[Guest]


class Host(Pump, Protocol):
    """What the server does for its coordinator."""

    @property
    def guests(self) -> Iterable[Guest]: ...
    def guest(self, name: str) -> Guest | None: ...
    def give_up(self, guest: Guest, why: str) -> None:
        """End its link; it is lost."""
        ...

    @property
    def sources(self) -> Mapping[int, Offered]: ...
    def finish(self, version: int, outcome: Outcome) -> None:
        """What this rank's `publish` of ``version`` returns or raises."""
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
        self._offers = Offers(host.sources, host.finish, world=world)
        self._peer_timeout_s = peer_timeout_s
        self._sessions = 0
        self._retries = 0
        self._joined = 0
        self._ready_since: tuple[int, float] | None = None
        self.session: Session | None = None

    # what is heard -------------------------------------------------------------------------------------------------

    def joined(self) -> None:
        self._joined += 1

    def rank_joined(self, rank: int, link: Link) -> None:
        self._offers.rank_joined(rank, link)

    def offered(self, offered: Offered) -> None:
        self._offers.offered(offered)

    def withdrawn(self, version: int, reason: AbortReason | None) -> None:
        self._offers.withdrawn(version, reason)

    def heard_rank(self, rank: int, message: Message) -> None:
        session = self.session
        if not isinstance(message, messages.Lost):
            self._offers.heard(rank, message)
        elif session is not None and session.number == message.session:
            if not message.receiver:
                session.over, session.again = session.over or message.reason, message.again
            for member in session.members:
                if member.name == message.receiver and not member.is_over:
                    member.state, member.reason = "lost", message.reason
                    # Without that rank it can be in no other session; where it lives it will come anew.
                    member.guest.ask, member.guest.settled = None, session.version

    def heard(self, guest: Guest, message: Message) -> None:
        """What a receiver says; what is said of a session that is over is ignored."""
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
        elif isinstance(message, messages.Ready):
            member.state = "ready"
        elif isinstance(message, messages.Broke):
            if session.over is None:
                session.over, session.again = message.reason, True
        else:
            session.heard(member, message)

    def lost(self, guest: Guest, reason: AbortReason) -> None:
        """Its link has ended."""
        member = self.session.member(guest) if self.session is not None else None
        if member is not None and not member.is_over:
            member.state, member.reason = "lost", reason

    # what to do next -----------------------------------------------------------------------------------------------

    def due(self) -> Job | None:
        """The session to lead now, if any. Refuses asks, and ends a direct publish with nothing left to do."""
        offers = self._offers
        offers.end_late(self._waited_for())
        available = offers.available()
        fits: dict[int, list[Guest]] = {}
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
        if (direct is not None or self._options.atomic_fleet) and not self._are_all_here(version):
            return None
        return Job(version, fits[version])

    def _judge(self, guest: Guest, available: set[int]) -> int | None:
        """The version that answers its Ask; None if there is no Ask, it has to wait, or was refused just now."""
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
                "publisher: a publisher that was restarted must go on above the versions that are out; or ask for "
                f"version {newest} by its number",
                field="version",
            )
            _log.error("%s", error)
            self._offers.tally.mistakes.setdefault(guest.name, error)
            self._refuse(guest, error)
            guest.settled = newest
        return None

    def _refuse(self, guest: Guest, error: HoldfastError) -> None:
        assert guest.ask is not None
        guest.link.send(messages.Refused(guest.ask.number, AbortReason.of(error, rank=0)))
        guest.ask = None

    def _not_kept(self, version: int, available: set[int]) -> CheckpointNotFound:
        kept = ", ".join(map(str, sorted(available))) or "none"
        return CheckpointNotFound(
            f"version {version} is not kept any more (kept: {kept}); ask for one of those, pin what is to stay, or "
            "raise keep_versions",
            path=self._rendezvous.shown,
            step=version,
        )

    def _are_all_here(self, version: int) -> bool:
        """Whether to begin; not while receivers that have joined may still ask."""
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
        """What a direct publish waits for now."""
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
        """Whether time alone may make a session due, or a `publish` late."""
        return self._ready_since is not None or self._offers.direct() is not None

    def work(self) -> None:
        """Wait for the next session that is due, and lead it."""
        jobs: list[Job] = []

        def find() -> bool:
            job = self.due()
            jobs.extend([job] if job is not None else [])
            return bool(jobs)

        self._host.pump(find)
        self.lead(jobs[0])

    # one session ---------------------------------------------------------------------------------------------------

    def lead(self, job: Job) -> None:
        """Bring a version to its guests; returns when the session is over, whatever became of it."""
        offered = self._host.sources[job.version]
        self._sessions += 1
        session = self.session = Session(self._sessions, job.version, job.guests, atomic=self._options.atomic_fleet)
        names = tuple(member.name for member in session.members)
        self._offers.begin(messages.Begin(session.number, session.version, names, 0, session.atomic))
        for member in session.members:
            ask = member.guest.ask.number if member.guest.ask is not None else 0
            member.guest.link.expect()
            member.guest.link.send(messages.Begin(session.number, session.version, names, ask, session.atomic))
        error: HoldfastError | None = None
        try:
            self._sender.send(session, offered.source)
            if session.atomic:
                self._decide(session, offered)
            session.phase = "commit"
            self._host.pump(lambda: self._all_over(session, offered))
            self._retries = 0
            self._forget_decision(session)
        except Broken:
            error = self._abort(session, None)
        except HoldfastError as failure:
            error = self._abort(session, failure)
        finally:
            self.session = None
        self._count(session, offered, error)

    def _all_over(self, session: Session, offered: Offered) -> bool:
        self._check(session, offered)
        return all(member.is_over for member in session.members)

    def _check(self, session: Session, offered: Offered) -> None:
        session.check()
        if offered.direct and offered.deadline.passed() and not session.decided:
            raise self._offers.late(offered, self._waited_for())

    def check(self) -> None:
        """Raise if the present session's `publish` is late; to be called whenever it waits."""
        if self.session is not None and self.session.over is None:
            offered = self._host.sources.get(self.session.version)
            if offered is not None and offered.direct and offered.deadline.passed() and not self.session.decided:
                self.session.over = AbortReason.of(self._offers.late(offered, self._waited_for()), rank=0)

    def _decide(self, session: Session, offered: Offered) -> None:
        """Have it decided that all commit; raises `Broken` if a member has decided otherwise."""
        session.phase = "ready"
        self._host.pump(lambda: self._all_ready(session, offered))
        key = decision_key(self._incarnation, session.number)
        found = self._host.aside(lambda: self._rendezvous.settle(key, COMMIT), lambda: None)
        if found != COMMIT:
            raise PeerLost(
                f"a receiver in doubt has given up session {session.number} of version {session.version}",
                peer="a receiver",
                phase=session.phase,
                version=session.version,
            )
        session.decided = True
        for member in session.members:
            member.guest.link.send(messages.Commit(session.number))

    def _forget_decision(self, session: Session) -> None:
        """Nobody will look for it any more, if everybody has committed."""
        if session.decided and all(member.state == "committed" for member in session.members):
            key = decision_key(self._incarnation, session.number)
            self._host.aside(lambda: self._rendezvous.delete(key), lambda: None)

    def _all_ready(self, session: Session, offered: Offered) -> bool:
        self._check(session, offered)
        return all(member.state == "ready" for member in session.members)

    def _abort(self, session: Session, failure: HoldfastError | None) -> HoldfastError | None:
        """End the session for those that are left, and hear from each whether it has the version.

        Returns what `publish` fails with; None if those that are left get another session.
        """
        broken = next((member for member in session.members if member.state in ("failed", "lost")), None)
        reason = None if failure is None else AbortReason.of(failure, rank=0)
        reason = reason or session.over or (None if broken is None else broken.reason)
        assert reason is not None
        again = isinstance(failure, ChannelBroken) or session.again
        self._retries = self._retries + 1 if again else 0
        ends = (
            session.atomic
            or self._retries > RETRIES
            or ((failure is not None or session.over is not None) and not again)
        )
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
        self._host.pump(lambda: self._have_answered(session))
        return reason.cause() if ends else None

    def _have_answered(self, session: Session) -> bool:
        left = [member for member in session.members if not member.is_over]
        offered = self._host.sources.get(session.version)
        if offered is not None and offered.direct and offered.deadline.passed():
            for member in left:
                if member.guest.link.silent_s > ANSWER_S:
                    self._host.give_up(member.guest, f"it was silent for {member.guest.link.silent_s:.1f} s")
        return all(member.is_over for member in left)

    def _count(self, session: Session, offered: Offered, error: HoldfastError | None) -> None:
        tally = self._offers.tally if offered.direct else Tally()
        tally.sessions += 1
        if any(member.state == "failed" and _is_of_a_rank(member.reason) for member in session.members):
            until = time.monotonic() + NEWS_S
            self._host.pump(lambda: time.monotonic() >= until)  # raises if that rank is gone
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


def _is_of_a_rank(reason: AbortReason | None) -> bool:
    """Whether a member has failed since it lost a publisher rank, which may be its link alone."""
    return reason is not None and isinstance(reason.cause(), PeerLost)
