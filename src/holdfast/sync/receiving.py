"""The receiving half of transports over links: asks, takes part in sessions, and commits, or not.

    meet -> Ask -> (Begin -> take -> (Ready -> Commit ->) commit -> Committed) | Abort, and again | an error

Guarantees: nothing is committed but a version of which every byte was verified, in a session that rank 0 had not given
up as far as was heard. Where a fleet commits together a receiver that can't learn of the decision looks into the
rendezvous, and has it decided there that nobody commits if nothing is.
Does not: move bytes (``sync.taking``), or touch the user's tensors (``sync.applying``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import DeadlineExceeded, HoldfastError, OutcomeUnknown, PeerLost
from holdfast.outcome import AbortReason
from holdfast.sync import messages
from holdfast.sync.connection import Aborted, Connection, meet
from holdfast.sync.deadline import Deadline
from holdfast.sync.rendezvous import ABORT, COMMIT, Asking, Rendezvous, decision_key, open_rendezvous
from holdfast.sync.taking import Taker
from holdfast.sync.waiting import Leaving

if TYPE_CHECKING:
    from holdfast.sync.seam import Destination
    from holdfast.sync.transports.base import Channels

_log = logging.getLogger("holdfast")
_FIRST_LOOK_S: Final = 2.0
"""How long a new receiver looks for a publisher that may not be there yet."""
_SETTLE_S_MIN: Final = 2.0
"""What is left to learn a decision when the time to receive in is over."""


class LinkedReceiving:
    """See the module; implements `Receiving`."""

    def __init__(self, channels: Channels, *, rendezvous: Any, peer_timeout_s: float) -> None:
        self._channels = channels
        self._peer_timeout_s = peer_timeout_s
        self._rendezvous: Rendezvous = open_rendezvous(rendezvous, hosting=False)
        self._asks = 0
        self._own_of = ""
        self._leaving = Leaving()
        self._asking = Asking(self._rendezvous, self._leaving)
        self._taker: Taker | None = None
        # Who is there when a version is about to be sent is waited for.
        self._connection = meet(
            self._asking,
            channels,
            Deadline.after(_FIRST_LOOK_S),
            self._leaving,
            peer_timeout_s=peer_timeout_s,
            once=True,
        )

    def receive(self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline) -> int:
        connection = self._connected(deadline)
        if self._taker is None or self._taker.connection is not connection:
            self._drop_taker()
            self._taker = Taker(connection, self._channels)
        self._asks += 1
        ask = messages.Ask(self._asks, version, newer_than, self._own_of)
        connection.send(0, ask)
        try:
            received = self._receive(connection, self._taker, destination, ask, deadline)
        except BaseException as error:
            self._taker.drop_channels()
            connection.end()
            if connection.links[0].ended is None:
                connection.send(0, messages.Failed(ask.number, _reason(error, connection.name)))
            destination.abandon()
            raise
        connection.end()
        self._own_of = connection.incarnation
        return received

    def leave(self) -> None:
        self._leaving.say()
        connection = self._connection
        if connection is not None:
            connection.hub.ring()

    def close(self) -> None:
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

    def _receive(
        self, connection: Connection, taker: Taker, destination: Destination, ask: messages.Ask, deadline: Deadline
    ) -> int:
        while True:
            begin = self._begun(connection, ask, deadline)
            try:
                connection.begin(begin.session, begin.version)
                taker.take(begin, destination, deadline, own=self._own_of == connection.incarnation)
                if begin.atomic:
                    self._wait_decision(connection, begin, deadline)
            except Aborted as aborted:
                taker.drop_channels()
                connection.end()
                if not aborted.again:
                    raise aborted.reason.cause() from None
                connection.send(0, messages.Aborted(begin.session))
                _log.info("version %d is begun again: %s", begin.version, aborted.reason.message)
                continue
            connection.phase = "commit"
            destination.commit(begin.version)
            connection.send_all(messages.Committed(begin.session))
            return begin.version

    def _begun(self, connection: Connection, ask: messages.Ask, deadline: Deadline) -> messages.Begin:
        """The session that answers ``ask``. Raises what it is refused for."""
        asked = "a version" if ask.version is None else f"version {ask.version}"
        what = f"{asked}{'' if ask.newer_than is None or ask.version is not None else f' newer than {ask.newer_than}'}"
        while True:
            said = connection.next(0, (messages.Begin, messages.Refused), deadline, what=what)
            if isinstance(said, messages.Refused):
                if said.number == ask.number:
                    raise said.reason.cause()
            elif isinstance(said, messages.Begin) and said.ask == ask.number:
                return said

    def _wait_decision(self, connection: Connection, begin: messages.Begin, deadline: Deadline) -> None:
        """Returns when it is decided that all commit; raises if not."""
        connection.phase = "ready"
        connection.send(0, messages.Ready(begin.session))
        try:
            connection.next(0, messages.Commit, deadline, what="the decision", only_rank=True)
            return
        except (PeerLost, DeadlineExceeded) as error:
            doubt = error
        key = decision_key(connection.incarnation, begin.session)
        try:
            found = self._asking.settle(key, ABORT, max(deadline.left_s(), _SETTLE_S_MIN))
        except HoldfastError as error:
            raise OutcomeUnknown(
                f"whether the fleet commits version {begin.version} can't be learnt: {doubt}; nor can the rendezvous "
                f"be asked ({error}). This receiver keeps what it has",
                attempt=key,
                step=begin.version,
            ) from doubt
        if found != COMMIT:
            raise doubt


def _reason(error: BaseException, receiver: str) -> AbortReason:
    """What the publisher, and a fleet, are told; what the user's function raised says nothing of where."""
    if not isinstance(error, HoldfastError):
        error = HoldfastError(f"receiver {receiver} failed: {type(error).__name__}: {error}")
    return AbortReason.of(error, rank=0)
