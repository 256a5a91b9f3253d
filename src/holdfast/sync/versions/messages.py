"""Messages between a receiver and the ranks of a publisher, and the record that makes a version exist. Torch-free.

    receiver -> rank          Introduce, then AskNews (rank 0), TakeLease, GiveBack, in any order
    rank -> receiver          News (to who watches), and to each Lease: Granted, with a `BlockFile` before it if the
                              receiver hasn't got that block's memory yet, or LeaseRefused

Nothing is sent for the bytes of a version: the receiver reads the block.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.coordination.failure import RankFailure  # noqa: TC001 - msgspec reads the annotations
from holdfast.engine.messages import EngineMessage
from holdfast.format.decoding import prepare_decoding


class VersionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A version that all ranks have. digests: of each rank's layout and checksums; meta: the user's, encoded."""

    version: int
    digests: tuple[bytes, ...]
    meta: bytes = b""


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one publisher rank listens: the path of a socket, on one host (its boot id)."""

    path: str
    boot: str


class PublisherPlaces(msgspec.Struct, frozen=True, array_like=True, tag="blocks"):
    """All ranks of a publisher, until it ends or restarts. ``token``: what receivers must send."""

    incarnation: str
    token: str
    ranks: tuple[RankPlace, ...]


# receiver -> rank ------------------------------------------------------------------------------------------------


class Introduce(EngineMessage, frozen=True):
    """First message of a receiver."""

    receiver: str
    token: str


class AskNews(EngineMessage, frozen=True):
    """Ask for `News` now, and unless ``once``, whenever they change."""

    once: bool = False


class TakeLease(EngineMessage, frozen=True):
    """Ask for a lease on ``version``. digest: what its record says of this rank."""

    number: int
    version: int
    digest: bytes


class GiveBack(EngineMessage, frozen=True):
    """Give a lease back."""

    block: int
    epoch: int


# rank -> receiver ------------------------------------------------------------------------------------------------


class News(EngineMessage, frozen=True):
    """The versions that can be fetched, ascending; the last one is the newest."""

    records: tuple[VersionRecord, ...]


class BlockFile(EngineMessage, frozen=True):
    """Comes with one descriptor: the memory of a block, read-only. alive: numbers of the blocks that there are."""

    descriptors: ClassVar[int] = 1

    block: int
    nbytes: int
    alive: tuple[int, ...]


class Granted(EngineMessage, frozen=True):
    """The lease that was asked for. The block has the version while the number at its start is ``epoch``.

    data_bytes: bytes of the pieces. layout_bytes, sums: what follows them: the encoded layout, and how many checksums.
    """

    number: int
    block: int
    epoch: int
    data_bytes: int
    layout_bytes: int
    sums: int


class LeaseRefused(EngineMessage, frozen=True):
    number: int
    reason: RankFailure


ToRank = Introduce | AskNews | TakeLease | GiveBack
FromRank = News | BlockFile | Granted | LeaseRefused

prepare_decoding(PublisherPlaces, VersionRecord, ToRank, FromRank)
