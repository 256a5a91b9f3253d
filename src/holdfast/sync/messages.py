"""The words between publisher ranks and receivers: tagged msgpack structs, framed by ``engine.wire``. Torch-free.

    receiver -> every publisher rank   Hello; in a session Wants, Taken*, Beat, Committed; Leave
    receiver -> rank 0                 Ask; in a session also Ready, Aborted; Broke; Failed when it can't go on
    publisher rank -> receiver         in a session Table, Plan, Bucket*, Beat; Leave
    rank 0 -> receiver                 Begin, Commit, Abort; Refused when an Ask can't be met
    rank 0 -> publisher rank           Begin, Abort, Finished
    publisher rank -> rank 0           Peer, Offer, Withdraw, Lost

A session brings one version to some members. Rank 0 numbers sessions from 1 and has one at a time; what is said of one
that is over is ignored. Every member of a session that is aborted says exactly one of Committed, Aborted and Failed,
or its link ends: so rank 0 knows who has the version before it begins another session.

What can be long and was said before is said by its digest alone: tables, wants and plans stay the same from version to
version.
"""

from __future__ import annotations

import msgspec

from holdfast.engine.messages import Message
from holdfast.outcome import AbortReason  # noqa: TC001 - msgspec reads the annotations
from holdfast.sync.layout import BucketPlan, Part, Piece  # noqa: TC001

# receiver -> publisher rank ------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first word on a link from a receiver. ``address``: what its transport needs to hand something over to it."""

    receiver: str
    token: str
    address: bytes


class Ask(Message, frozen=True):
    """``version``, or if that is None the newest that is newer than ``newer_than``. Asks of a link are numbered.

    ``own_of``: the incarnation of the publisher that the receiver has its version of.
    """

    number: int
    version: int | None
    newer_than: int | None
    own_of: str


class Wants(Message, frozen=True):
    """The parts of this rank's table that the receiver takes; None: those of ``digest``, which it said last.

    ``base_version``: what it has in place already, of this publisher; only what differs from it need come.
    """

    session: int
    digest: str
    parts: tuple[Part, ...] | None
    base_version: int | None = None


class Taken(Message, frozen=True):
    """Bucket ``seq`` of the rank told is right, and its slot is free as far as this member goes."""

    session: int
    seq: int


class Ready(Message, frozen=True):
    """All buckets of all ranks are there and right; the member waits for `Commit`."""

    session: int


class Committed(Message, frozen=True):
    session: int


class Aborted(Message, frozen=True):
    """The member has given the session up, and not committed."""

    session: int


class Broke(Message, frozen=True):
    """The channel of a rank broke under the member; another session, with new channels, may go better."""

    session: int
    reason: AbortReason


class Failed(Message, frozen=True):
    """The receiver has given up what it asked for with Ask ``ask``, and any session that answers it."""

    ask: int
    reason: AbortReason


# publisher rank -> receiver ------------------------------------------------------------------------------------


class Table(Message, frozen=True):
    """What this rank sends, and how; ``pieces`` None: those of ``digest``, which it said last.

    ``first``: the number, within the epoch, of the session's first bucket. ``channel`` is for the transport.
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


class Plan(Message, frozen=True):
    """This rank's buckets in whose lane the member is; None: those of ``digest``, which it said last.

    ``base_version``: they hold what differs from it; None: all that is wanted.
    """

    session: int
    digest: str
    buckets: tuple[PlannedBucket, ...] | None
    base_version: int | None


class Bucket(Message, frozen=True):
    """Bucket ``seq`` is on its way. ``checksum`` as ``sync.checksums`` makes it."""

    session: int
    seq: int
    nbytes: int
    checksum: int
    kind: str


class Beat(Message, frozen=True):
    """Still here; both ways, while a session or a receive goes on."""


class Leave(Message, frozen=True):
    """The end of this link is meant."""


# rank 0 -> receivers and ranks ---------------------------------------------------------------------------------


class Begin(Message, frozen=True):
    """``ask``: the number of the Ask that this answers; 0 for a publisher rank."""

    session: int
    version: int
    members: tuple[str, ...]
    ask: int
    atomic: bool


class Commit(Message, frozen=True):
    session: int


class Abort(Message, frozen=True):
    """``again``: the Ask stands, and another session will follow; else the receive fails for ``reason``."""

    session: int
    reason: AbortReason
    again: bool


class Refused(Message, frozen=True):
    """Ask ``number`` can't be met."""

    number: int
    reason: AbortReason


class Finished(Message, frozen=True):
    """To publisher ranks: what `publish` of ``version`` returns, or raises where there is a ``reason``."""

    version: int
    receivers: int
    lost: int
    reason: AbortReason | None


# publisher rank -> rank 0 --------------------------------------------------------------------------------------


class Peer(Message, frozen=True):
    """The first word on a link from another publisher rank."""

    rank: int
    token: str


class Offer(Message, frozen=True):
    """This rank has ``version`` to send."""

    version: int


class Withdraw(Message, frozen=True):
    """This rank doesn't have ``version`` any more; ``reason``: why its `publish` of it failed, if it did."""

    version: int
    reason: AbortReason | None = None


class Lost(Message, frozen=True):
    """This rank lost a member of the session; or, with no ``receiver``, can't send the session's version itself.

    ``again``: its channel broke, and another session may go better.
    """

    session: int
    receiver: str
    reason: AbortReason
    again: bool = False


ToPublisher = (
    Hello
    | Ask
    | Wants
    | Taken
    | Ready
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
ToReceiver = Table | Plan | Bucket | Beat | Leave | Begin | Commit | Abort | Refused
