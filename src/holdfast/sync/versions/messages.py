"""Messages between a receiver and the ranks of a publisher, and the record that makes a version exist. Torch-free.

    receiver -> rank          Introduce, then AskNews and HasCommitted (rank 0), TakeLease, GiveBack, in any order
    rank -> receiver          News (to who watches), and to each Lease: Granted, with a `BlockFile` before it if the
                              receiver hasn't got that block's memory yet, or LeaseRefused

Over a network a receiver hasn't got the memory: it reads what it wants of it with `ReadRanges`, on connections of their
own, or from another receiver, with `ReadHeld`. Deltas, too. Within a host nothing is sent for the bytes of a version.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.coordination.failure import RankFailure  # noqa: TC001 - msgspec reads the annotations
from holdfast.engine.messages import EngineMessage
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import EXTENT_BYTES


class VersionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A version that all ranks have. digests: of each rank's layout and checksums; meta: the user's, encoded."""

    version: int
    digests: tuple[bytes, ...]
    meta: bytes = b""


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one publisher rank listens, on one host (its boot id): the path of a socket, or a port of some addresses.

    machine: as by ``session.rendezvous.this_machine``.
    """

    path: str
    boot: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    machine: str = ""


class PublisherPlaces(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """All ranks of a publisher, until it ends or restarts. ``token``: what receivers must send."""

    incarnation: str
    token: str
    ranks: tuple[RankPlace, ...]


# receiver -> rank ------------------------------------------------------------------------------------------------


class Introduce(EngineMessage, frozen=True):
    """First message of a receiver. serves: where it serves other receivers, if it does."""

    receiver: str
    token: str
    serves: RankPlace | None = None


class AskNews(EngineMessage, frozen=True):
    """Ask for `News` now, and unless ``once``, whenever they change. number: that of the answer, if it is one."""

    once: bool = False
    number: int = 0


class TakeLease(EngineMessage, frozen=True):
    """Ask for a lease on ``version``. digest: what its record says of this rank."""

    number: int
    version: int
    digest: bytes


class GiveBack(EngineMessage, frozen=True):
    """Give a lease back."""

    block: int
    epoch: int


class HasCommitted(EngineMessage, frozen=True):
    """To rank 0: ``version`` is live in the receiver of this name, which keeps it over all connections.

    seconds: of bringing and committing it.
    """

    receiver: str
    version: int
    seconds: float


class ReadRanges(EngineMessage, frozen=True):
    """On a connection of its own: ask for bytes of a block, from and to, while it is of ``epoch``.

    Answered by the bytes of each range and a byte that says whether the block was of that epoch all the time.
    """

    block: int
    epoch: int
    ranges: tuple[tuple[int, int], ...]


class ReadDelta(EngineMessage, frozen=True):
    """On such a connection: ask for what leads from one version to another, each with its digest on this rank.

    Answered by 8 bytes, little-endian, that say how many follow: the records of each run, encoded; 0 if there are none.
    shares: the receiver serves others; it is sent a `DeltaOffer` instead, and brings the delta as it does a version.
    """

    base: int
    base_digest: bytes
    version: int
    digest: bytes
    shares: bool = False


class AskSource(EngineMessage, frozen=True):
    """On such a connection, of a receiver that serves others: ask from where to bring more (``versions.fanout``).

    digest: of the version, or of a delta to it (`delta_key`). lacking: extents, as bits. Answered by 8 bytes that say
    how many follow: a `HeldRun`, encoded; 0 for "not yet".
    """

    version: int
    digest: bytes
    lacking: bytes
    waited_s: float


class Brought(EngineMessage, frozen=True):
    """On such a connection: what came of run ``number``, and which extents are here now, as bits.

    Answered by a byte.
    """

    version: int
    digest: bytes
    number: int
    here: bytes
    outcome: int


# receiver -> receiver, and for deltas to a rank --------------------------------------------------------------------


class ReadHeld(EngineMessage, frozen=True):
    """Ask for bytes ``start`` to ``end`` of the block that has this digest; an offered delta lies as if in a block.

    Answered by a byte, 0 if it lacks some of that. After 1 the bytes follow. After 2, which may come if ``memory``:
    what is needed to read its block without it (`MemoryReads.offer`), as 8 bytes that say how many follow, and these.
    """

    token: str
    digest: bytes
    start: int
    end: int
    memory: bool = False


# rank -> receiver ------------------------------------------------------------------------------------------------


class News(EngineMessage, frozen=True):
    """The versions that can be fetched, ascending; the last one is the newest. number: of the `AskNews` it answers."""

    records: tuple[VersionRecord, ...]
    number: int = 0


class BlockFile(EngineMessage, frozen=True):
    """Comes with one descriptor: the memory of a block, read-only. alive: numbers of the blocks that there are."""

    descriptors: ClassVar[int] = 1

    block: int
    nbytes: int
    alive: tuple[int, ...]


class Granted(EngineMessage, frozen=True):
    """The lease that was asked for. The block has the version while the number at its start is ``epoch``.

    data_bytes: bytes of the pieces. layout_bytes, sums: what follows them: the encoded layout, and how many checksums.
    nbytes: of the block. deltas: the rank may be asked for a delta to it. memory: what is needed to read the block
    without the rank (`MemoryReads.offer`), if that can be.
    """

    number: int
    block: int
    epoch: int
    data_bytes: int
    layout_bytes: int
    sums: int
    nbytes: int
    deltas: bool = False
    memory: bytes = b""


class LeaseRefused(EngineMessage, frozen=True):
    number: int
    reason: RankFailure


class HeldRun(msgspec.Struct, frozen=True, array_like=True):
    """Extents to bring: from a receiver, or from the publisher rank if ``place`` is None."""

    number: int
    start: int
    end: int
    holder: str
    place: RankPlace | None


class DeltaOffer(msgspec.Struct, frozen=True, array_like=True):
    """A delta of so many bytes; ``sums``: a checksum of each extent, 8 bytes, little-endian."""

    nbytes: int
    sums: bytes

    @property
    def extents(self) -> int:
        return -(-self.nbytes // EXTENT_BYTES)


Read = ReadRanges | ReadDelta | AskSource | Brought | ReadHeld
ToRank = Introduce | AskNews | TakeLease | GiveBack | HasCommitted | Read
ToHolder = ReadHeld
FromRank = News | BlockFile | Granted | LeaseRefused

prepare_decoding(PublisherPlaces, VersionRecord, ToRank, FromRank, Read, ToHolder, HeldRun, DeltaOffer)
