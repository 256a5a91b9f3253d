"""Define the messages between publisher ranks and receivers: tagged msgpack structs, framed by ``engine.wire``.
Torch-free.

    receiver -> every publisher rank   Hello; in a session Wants, Taken*, Beat, Committed; Leave
    receiver -> rank 0                 Ask; in a session also Aborted; Broke; Failed when it can't go on
    publisher rank -> receiver         in a session Table, Plan, Bucket*, Beat; Leave
    rank 0 -> receiver                 Begin, Abort; Refused when an Ask can't be met
    rank 0 -> publisher rank           Begin, Abort, Finished
    publisher rank -> rank 0           Peer, Offer, Withdraw, Lost
    watcher -> rank 0                  Watch; rank 0 answers Newest, and again whenever that changes

A session brings one version to some members. Rank 0 numbers sessions from 1 and runs one at a time; messages of ended
sessions are ignored. Every member of an aborted session sends exactly one of Committed, Aborted and Failed, or its link
ends: so rank 0 knows who has the version before it begins another session.

Long contents that were sent before are named by their digest alone: tables, wants and plans stay the same from version
to version.
"""

from __future__ import annotations

import msgspec

from holdfast.coordination.failure import RankFailure  # noqa: TC001 - msgspec reads the annotations
from holdfast.engine.messages import EngineMessage
from holdfast.format.decoding import prepare_decoding
from holdfast.sync.weights.buckets import BucketPlan, Piece, PieceBox  # noqa: TC001

# receiver -> publisher rank ------------------------------------------------------------------------------------


class Hello(EngineMessage, frozen=True):
    """First message on a link from a receiver. ``address``: what its transport needs to send to it."""

    receiver: str
    token: str
    address: bytes


class Watch(EngineMessage, frozen=True):
    """First message on a link that only learns of new versions."""

    token: str


class Ask(EngineMessage, frozen=True):
    """Request ``version``, or if None the newest that is newer than ``newer_than``. Asks of a link are numbered.

    own_of: the incarnation of the publisher from which the receiver has its version.
    """

    number: int
    version: int | None
    newer_than: int | None
    own_of: str


class Wants(EngineMessage, frozen=True):
    """The parts of this rank's table that the receiver takes; None: those of ``digest``, which it sent last."""

    session: int
    digest: str
    parts: tuple[PieceBox, ...] | None


class Taken(EngineMessage, frozen=True):
    """Bucket ``seq`` of the rank is verified, and its slot is free as far as this member is concerned."""

    session: int
    seq: int


class Committed(EngineMessage, frozen=True):
    """The member has all of the version, verified, and will commit it whenever it likes."""

    session: int


class Aborted(EngineMessage, frozen=True):
    """The member has left the session without committing."""

    session: int


class Broke(EngineMessage, frozen=True):
    """The member's channel from a rank broke; another session, with new channels, may succeed."""

    session: int
    reason: RankFailure


class Failed(EngineMessage, frozen=True):
    """The receiver has given up its Ask ``ask``, and any session that answers it."""

    ask: int
    reason: RankFailure


# publisher rank -> receiver ------------------------------------------------------------------------------------


class Table(EngineMessage, frozen=True):
    """The pieces that this rank sends, and how; with ``pieces`` None, those of ``digest``, which it sent last.

    first: the number, within the epoch, of the session's first bucket. channel: data for the transport.
    """

    session: int
    digest: str
    pieces: tuple[Piece, ...] | None
    bucket_bytes: int
    epoch: int
    first: int
    channel: bytes


class PlannedBucket(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    plan: BucketPlan


class Plan(EngineMessage, frozen=True):
    """Buckets of this rank whose lane includes the member; None: those of ``digest``, which it sent last."""

    session: int
    digest: str
    buckets: tuple[PlannedBucket, ...] | None


class Bucket(EngineMessage, frozen=True):
    """Bucket ``seq`` is being sent. ``checksum``: as by ``weights.checksums``."""

    session: int
    seq: int
    nbytes: int
    checksum: int
    kind: str


class Beat(EngineMessage, frozen=True):
    """Heartbeat; in both directions, during a session or a receive."""


class Leave(EngineMessage, frozen=True):
    """This link is closed on purpose."""


# rank 0 -> receivers and ranks ---------------------------------------------------------------------------------


class Begin(EngineMessage, frozen=True):
    """Start a session. ``ask``: the number of the Ask that it answers; 0 for a publisher rank. ``meta``: msgpack."""

    session: int
    version: int
    members: tuple[str, ...]
    ask: int
    meta: bytes = b""


class Abort(EngineMessage, frozen=True):
    """Abort the session. ``again``: another one will follow for the same Ask; else the receive fails for ``reason``."""

    session: int
    reason: RankFailure
    again: bool


class Refused(EngineMessage, frozen=True):
    """Ask ``number`` can't be met."""

    number: int
    reason: RankFailure


class Newest(EngineMessage, frozen=True):
    """The newest version that receivers can ask for now; None if there is none."""

    version: int | None


class Finished(EngineMessage, frozen=True):
    """Tell publisher ranks the result of `publish` of ``version``, or its error if there is a ``reason``."""

    version: int
    receivers: int
    lost: int
    reason: RankFailure | None


# publisher rank -> rank 0 --------------------------------------------------------------------------------------


class Peer(EngineMessage, frozen=True):
    """First message on a link from another publisher rank."""

    rank: int
    token: str


class Offer(EngineMessage, frozen=True):
    """Announce that this rank has ``version`` to send."""

    version: int


class Withdraw(EngineMessage, frozen=True):
    """Announce that this rank no longer has ``version``; ``reason``: why its `publish` failed, if it did."""

    version: int
    reason: RankFailure | None = None


class Lost(EngineMessage, frozen=True):
    """Report that this rank lost a member, or, with no ``receiver``, can't send the session's version itself."""

    session: int
    receiver: str
    reason: RankFailure
    again: bool = False


ToPublisher = (
    Hello
    | Watch
    | Ask
    | Wants
    | Taken
    | Committed
    | Aborted
    | Failed
    | Broke
    | Beat
    | Leave
    | Peer
    | Offer
    | Withdraw
    | Lost
    | Begin
    | Abort
    | Finished
)
ToReceiver = Table | Plan | Bucket | Beat | Leave | Begin | Abort | Refused | Newest


prepare_decoding(ToPublisher, ToReceiver)
