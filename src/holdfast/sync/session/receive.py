"""Implement receiving for transports over links: ask for a version, take part in sessions, have it or not.

    meet -> Ask -> (Begin -> take -> Committed) | Abort, and again | an error

Guarantees: a version is fetched only if every byte of it was verified, in a session that rank 0 has not aborted as far
as is known here; from then on no publisher is needed to commit it.
Does not: move bytes (``session.fetcher``), or touch the user's tensors (``weights.apply``).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.failure import RankFailure
from holdfast.errors import HoldfastError
from holdfast.sync.session import messages
from holdfast.sync.session.connection import Connection, NewestOnLinks, SessionAborted, meet
from holdfast.sync.session.fetcher import VersionFetcher
from holdfast.sync.session.futures import CloseSignal
from holdfast.sync.session.rendezvous import Rendezvous, RendezvousClient, open_rendezvous
from holdfast.sync.watcher import Watcher
from holdfast.sync.weights.apply import FetchedMemory

if TYPE_CHECKING:
    from holdfast.sync.protocol import Destination, FetchedVersion
    from holdfast.sync.session.channel import Channels

_log = logging.getLogger("holdfast")
_FIRST_LOOK_S: Final = 2.0
"""How long a new receiver looks for a publisher that may not exist yet."""


class LinkedReceiving:
    """See the module; implements `Receiving`."""

    def __init__(self, channels: Channels, *, rendezvous: Any, peer_timeout_s: float) -> None:
        self._channels = channels
        self._peer_timeout_s = peer_timeout_s
        self._rendezvous: Rendezvous = open_rendezvous(rendezvous, hosting=False)
        self._asks = 0
        self._own_of = ""
        """Incarnation of the publisher from which the last version was fetched."""
        self._leaving = CloseSignal()
        near_only = bool(channels.host)
        self._watcher = Watcher(lambda: NewestOnLinks(rendezvous, near_only=near_only), every_s=0.0)
        self._asking = RendezvousClient(self._rendezvous, self._leaving)
        self._taker: VersionFetcher | None = None
        # Connect early: a publisher waits for receivers that are connected when it is about to send.
        self._connection = meet(
            self._asking,
            channels,
            Deadline.after(_FIRST_LOOK_S),
            self._leaving,
            peer_timeout_s=peer_timeout_s,
            once=True,
        )

    def newest(self, newer_than: int | None) -> int | None:
        found = self._watcher.newest()
        if found is None:
            return None
        is_news = newer_than is None or found.version > newer_than or found.origin != self._own_of
        return found.version if is_news else None

    def await_version(self, version: int | None, newer_than: int | None, deadline: Deadline) -> None:
        """Return at once: `fetch` waits."""

    def fetch(
        self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline
    ) -> FetchedVersion:
        began = time.monotonic()
        self._leaving.check()
        connection = self._connected(deadline)
        if self._taker is None or self._taker.connection is not connection:
            self._drop_taker()
            self._taker = VersionFetcher(connection, self._channels)
        self._asks += 1
        ask = messages.Ask(self._asks, version, newer_than, self._own_of)
        connection.send(0, ask)
        try:
            begin, begun = self._fetch(connection, self._taker, destination, ask, deadline)
        except BaseException as error:
            if connection.session:  # nothing was sent here before it began
                self._taker.drop_channels()
            connection.end()
            if connection.links[0].ended is None:
                connection.send(0, messages.Failed(ask.number, _reason(error, connection.name)))
            destination.abandon()
            raise
        connection.end()
        self._own_of = connection.incarnation
        seconds = {"wait": begun - began, "transfer": time.monotonic() - begun}
        meta = msgspec.msgpack.decode(begin.meta) if begin.meta else {}
        return FetchedMemory(destination, begin.version, meta, seconds)

    def cancel(self) -> None:
        self._leaving.cancel()
        self._wake()

    def leave(self) -> None:
        self._leaving.say()
        self._wake()

    def _wake(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.hub.wake()

    def close(self) -> None:
        self._watcher.close()
        self._drop_taker()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._channels.close()
        self._rendezvous.close()

    def _connected(self, deadline: Deadline) -> Connection:
        connection = self._connection
        if connection is not None and connection.stands:
            return connection
        if connection is not None:
            connection.close()
            self._connection = None
        connection = meet(self._asking, self._channels, deadline, self._leaving, peer_timeout_s=self._peer_timeout_s)
        assert connection is not None
        self._connection = connection
        return connection

    def _drop_taker(self) -> None:
        taker, self._taker = self._taker, None
        if taker is not None:
            taker.drop_channels()

    def _fetch(
        self,
        connection: Connection,
        taker: VersionFetcher,
        destination: Destination,
        ask: messages.Ask,
        deadline: Deadline,
    ) -> tuple[messages.Begin, float]:
        """Return the session in which all of the version came, and when it began."""
        while True:
            begin = self._begun(connection, ask, deadline)
            begun = time.monotonic()
            try:
                connection.begin(begin.session, begin.version)
                taker.take(begin, destination, deadline, own=self._own_of == connection.incarnation)
            except SessionAborted as aborted:
                taker.drop_channels()
                connection.end()
                if not aborted.again:
                    raise aborted.reason.cause() from None
                connection.send(0, messages.Aborted(begin.session))
                _log.info("version %d is begun again: %s", begin.version, aborted.reason.message)
                continue
            connection.send_all(messages.Committed(begin.session))
            return begin, begun

    def _begun(self, connection: Connection, ask: messages.Ask, deadline: Deadline) -> messages.Begin:
        """Return the session that answers ``ask``. Raises the reason of a refusal."""
        asked = "a version" if ask.version is None else f"version {ask.version}"
        what = f"{asked}{'' if ask.newer_than is None or ask.version is not None else f' newer than {ask.newer_than}'}"
        while True:
            said = connection.next(0, (messages.Begin, messages.Refused), deadline, what=what)
            if isinstance(said, messages.Refused):
                if said.number == ask.number:
                    raise said.reason.cause()
            elif isinstance(said, messages.Begin) and said.ask == ask.number:
                return said


def _reason(error: BaseException, receiver: str) -> RankFailure:
    """Return the failure to report to publisher and fleet; an error of the user's function names no location."""
    if not isinstance(error, HoldfastError):
        error = HoldfastError(f"receiver {receiver} failed: {type(error).__name__}: {error}")
    return RankFailure.of(error, rank=0)
