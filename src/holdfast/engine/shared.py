"""The engine process that the sessions of one trainer share. Torch-free; runs in the trainer.

    none -> current -> retired -> gone          after a retirement, a new current engine is started

Each session is an `EngineClient` with its own limits, attempts and removals. `process_engine` is the host of this
process; a client can also make a host for itself alone.

Guarantees:
- the engine is started by the first session that needs it, and told to leave when the last one is closed (a process
  that makes one-call saves has one more session, until `holdfast.release`);
- a session gives up only its own attempts and never ends an engine that works for another: an engine with a worker that
  doesn't answer is retired. It gets no new attempts, finishes those of other sessions, and is killed when none is left;
- an engine that has died, or whose control thread is silent, fails the attempts of all its sessions (`EngineDied`);
- a forked child forgets its parent's hosts: it takes no lock, and closes its copies of their descriptors.

A retired engine ends in bounded time: each of its attempts ends by its session's deadlines.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from holdfast.engine import messages
from holdfast.engine.supervisor import LINGER_S, REAP_S, EngineConnection, launch
from holdfast.errors import DeadlineExceeded, EngineDied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.engine.client import EngineClient
    from holdfast.engine.wire import ToTrainer

_log = logging.getLogger("holdfast.engine")
SILENCE_S: Final = 10.0
"""An engine with an attempt in progress that is silent for this long is killed."""
_BEATS_MISSED: Final = 4
"""Number of missed beats up to which a control thread may just be late."""


class EngineHost:
    """The engine that serves a set of sessions. Thread-safe."""

    def __init__(self, *, silence_s_max: float = SILENCE_S) -> None:
        """Does not start the engine."""
        self._silence_s_max = silence_s_max
        self.owner = os.getpid()
        self.changed = threading.Condition()
        """Guards what link threads change, and is notified of each change."""
        self.sending = threading.RLock()
        """Held while a message is sent and while an engine is started or retired: keeps messages in order."""
        self.current: EngineConnection | None = None
        """Engine for new attempts; it may have died since."""
        self.retired: list[EngineConnection] = []
        self._sessions: dict[int, EngineClient] = {}
        self._open: set[int] = set()
        self._numbers = itertools.count(1)
        _hosts.add(self)

    def new_number(self) -> int:
        """Return a number for a session, an image or a plan; never reused."""
        return next(self._numbers)

    # -- sessions -----------------------------------------------------------------------------------------------

    def join(self, session: EngineClient) -> None:
        """Keep the engine for ``session``; idempotent. `sending` is held."""
        self._sessions[session.number] = session
        self._open.add(session.number)

    def leave(self, session: EngineClient) -> list[EngineConnection] | None:
        """Stop keeping the engine for ``session``; its messages still reach it until `forget`.

        Returns None if others remain; otherwise the engines, which the caller has to end.
        """
        self._open.discard(session.number)
        if self._open:
            return None
        links = [*self.retired] if self.current is None else [self.current, *self.retired]
        self.current, self.retired = None, []
        return links

    def forget(self, session: EngineClient) -> None:
        self._sessions.pop(session.number, None)

    # -- engines ------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Process id of the engine for new attempts; None if there is none."""
        link = self.current
        return link.pid if link is not None and link.death is None else None

    def living_link(self, rank: int) -> EngineConnection:
        """Return the engine, started if there is none. Raises `EngineDied`. `sending` is held."""
        link = self.current
        if link is not None and link.usable:
            return link
        if link is not None:
            self._set_aside(link)
        link = EngineConnection(launch(rank), self, silence_s_max=self._silence_s_max)
        self.current = link
        try:
            link.listen()
        except RuntimeError as error:
            self.current = None
            raise EngineDied(f"rank {rank} can't start its engine: {error}", rank=rank) from error
        except BaseException:
            link.end("was interrupted as it started")  # it knows nothing of what is standing
            raise
        for session in list(self._sessions.values()):
            for message, fds in session.standing():
                self.send(link, message, fds)
        return link

    def restart(self, rank: int) -> None:
        """Kill the current engine, if one runs, and start a new one. `sending` is held."""
        if (link := self.current) is not None and link.death is None:
            link.end("was restarted")
            self.wait_gone(link)
        self.living_link(rank)

    def tell(self, message: messages.EngineMessage, fds: Sequence[int] = ()) -> None:
        """Send a message that a new engine gets at its start. `sending` is held."""
        if self.current is not None and self.current.death is None:
            self.current.send(message, fds)

    def tell_all(self, message: messages.EngineMessage) -> None:
        """Send to retired engines as well. `sending` is held."""
        for link in (*self.retired, self.current):
            if link is not None and link.usable:
                link.send(message)

    def send(self, link: EngineConnection, message: messages.EngineMessage, fds: Sequence[int] = ()) -> None:
        """Send, or raise why the engine has ended. `sending` is held."""
        if not link.send(message, fds):
            self.wait_gone(link)
            assert link.death is not None
            raise link.death

    def give_up_on(self, link: EngineConnection, reason: str, *, unanswered_s: float) -> bool:
        """Give up ``link`` for a session whose attempt was unanswered for ``unanswered_s`` seconds.

        True: the engine is being killed, as it has no other work or its control thread is silent too. False: it was
        retired, as it works for others.
        """
        with self.sending, self.changed:
            silent = link.silent_s >= max(unanswered_s, _BEATS_MISSED * messages.BEAT_S)
            if self._in_work(link) and not silent:
                if link is self.current:
                    self.current = None
                    self._set_aside(link)
                    _log.warning("the engine (pid %d) %s: it is replaced when others have finished", link.pid, reason)
                return False
        link.end(reason)
        return True

    def wait_gone(self, link: EngineConnection) -> None:
        """Wait until a link that is being ended has ended. Raises `DeadlineExceeded`."""
        limit_s = LINGER_S + REAP_S + 1.0
        with self.changed:
            if not self.changed.wait_for(lambda: link.death is not None, limit_s):
                what = "a killed engine to end"
                message = f"waited {limit_s:g} s for {what} (pid {link.pid})"
                raise DeadlineExceeded(message, waited_for=what, timeout_s=limit_s)

    def _set_aside(self, link: EngineConnection) -> None:
        if link.death is None and link not in self.retired:
            self.retired.append(link)

    def _in_work(self, link: EngineConnection) -> bool:
        return any(session.works_in(link) for session in list(self._sessions.values()))

    # -- called by links ----------------------------------------------------------------------------------------

    def heard(self, link: EngineConnection, message: ToTrainer) -> None:
        with self.changed:
            if isinstance(message, messages.EngineBeat):
                for beat in message.attempts:
                    self._pass_on(link, beat)
            elif isinstance(message, messages.Notice):
                _log.warning("the engine (pid %d): %s", link.pid, message.text)
            elif not isinstance(message, messages.EngineReady):
                self._pass_on(link, message)
            self.changed.notify_all()
            self.end_retired()

    def _pass_on(self, link: EngineConnection, message: messages.OfSession) -> None:
        session = self._sessions.get(message.session)
        if session is not None:
            session.note(link, message)

    def end_retired(self) -> None:
        """Kill retired engines whose only work was given up."""
        with self.changed:
            for link in list(self.retired):
                if link.usable and not self._in_work(link):
                    link.end("was retired with a worker that hangs")

    def expects_beats(self, link: EngineConnection) -> bool:
        with self.changed:
            return self._in_work(link)

    def died(self, link: EngineConnection) -> None:
        with self.changed:
            if link in self.retired:
                self.retired.remove(link)
            for session in list(self._sessions.values()):
                session.lost(link)
            self.changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: drop what was inherited, without locking: the lock's holder may not exist here."""
        for link in (self.current, *self.retired):
            if link is not None:
                link.abandon()
        for session in list(self._sessions.values()):
            session.abandon()


_hosts: weakref.WeakSet[EngineHost] = weakref.WeakSet()
_of_process: dict[int, EngineHost] = {}
"""The host of this process, by its pid."""


def process_engine() -> EngineHost:
    """Return the host of this process: all sessions on it share one engine."""
    return _of_process.get(os.getpid()) or _of_process.setdefault(os.getpid(), EngineHost())


def _after_fork_in_child() -> None:
    for host in list(_hosts):
        if host.owner != os.getpid():
            host.abandon()
    _of_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
