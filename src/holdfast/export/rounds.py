"""How what travels between ranks is cut into rounds, so that nobody holds more of it at once than a bucket.

All that one rank has for another is a `Stream`: elements of the export's dtypes, one behind the other without padding,
those of large dtypes first, so that each starts on a multiple of its size. Every stream is cut into equally many
pieces, a round each. So whoever has much to send or receive is busy in every round, and nobody waits for a turn.

Guarantees: pure; the same on all ranks; what a rank sends and receives in one round takes at most a bucket. Cutting a
stream costs the number of its legs and rounds.
Does not: know files or memory (``export.plan``).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.errors import ConfigError
from holdfast.export.moves import Move, restrict_target
from holdfast.plan.write import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from holdfast.boxes import Box

ALIGN_BYTES: Final = 16
"""Pieces of streams start on it in buckets, and are as long but for the last: no element is cut in two."""

Pair = tuple[int, int]
"""Who sends, and who receives."""


class Leg(msgspec.Struct, frozen=True, gc=False):
    """Elements that one rank holds and one rank has in its export image; travels if these are two ranks."""

    target: int
    """Of the export's tensors."""
    itemsize: int
    """Bytes of an element in the export."""
    base: int
    """Where element 0 of the target lies (or would) in the owner's image, in bytes."""
    box: Box
    """Of the source, which the sender holds."""
    move: Move

    @property
    def nbytes(self) -> int:
        return self.move.volume * self.itemsize


class PieceOfLeg(NamedTuple):
    """Consecutive elements of a leg: they travel in ``round``, from byte ``at`` of that round's message on."""

    round: int
    at: int
    leg: Leg
    move: Move


class Stream:
    """All that one rank has for another."""

    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.nbytes = 0

    def add(self, leg: Leg) -> None:
        self.legs.append(leg)
        self.nbytes += leg.nbytes

    def step(self, rounds: int) -> int:
        """Bytes that travel in every round but the last ones."""
        return round_up(-(-self.nbytes // rounds), ALIGN_BYTES)

    def pieces(self, rounds: int, moves_of: Callable[[Leg], Sequence[Move]]) -> Iterator[PieceOfLeg]:
        """The legs, cut where rounds end.

        moves_of: a leg's move, or what it is made of in target order; wherever that takes elements from.
        """
        step = self.step(rounds)
        at = 0
        for leg in sorted(self.legs, key=lambda leg: -leg.itemsize):
            for move in moves_of(leg):
                start, end = at, at + move.volume * leg.itemsize
                while at < end:
                    turn = at // step
                    stop = min(end, (turn + 1) * step)
                    for part in packed_part(move, (at - start) // leg.itemsize, (stop - start) // leg.itemsize):
                        yield PieceOfLeg(turn, at - turn * step, leg, part)
                        at += part.volume * leg.itemsize


def packed_part(move: Move, start: int, stop: int) -> list[Move]:
    """The elements of ``move`` from the ``start``-th to before the ``stop``-th, in target order."""
    volume = move.volume
    if start == 0 and stop == volume:
        return [move]
    first = _target_of(move, start)
    end = _target_of(move, stop) if stop < volume else move.target_stop
    return target_part(move, first, end)


def target_part(move: Move, start: int, stop: int) -> list[Move]:
    """`restrict_target`, sooner for the commonest kind of move: a run."""
    if move.target_strides != (1,):
        return restrict_target(move, start, stop)
    first = max(0, start - move.target_offset)
    count = min(move.counts[0], stop - move.target_offset) - first
    if count <= 0:
        return []
    if count == move.counts[0]:
        return [move]
    step = move.source_strides[0]
    return [Move(move.source, (count,), move.target_offset + first, (1,), move.source_offset + first * step, (step,))]


def _target_of(move: Move, element: int) -> int:
    """The target index of the ``element``-th that ``move`` fills."""
    target = move.target_offset
    for count, step in zip(reversed(move.counts), reversed(move.target_strides), strict=True):
        element, index = divmod(element, count)
        target += index * step
    return target


def round_count(streams: Mapping[Pair, Stream], bucket_bytes: int) -> int:
    """The least number of rounds in which no rank sends and receives more than ``bucket_bytes``; 0 without streams."""
    nbytes: dict[int, int] = defaultdict(int)
    peers: dict[int, int] = defaultdict(int)
    for pair, stream in streams.items():
        for rank in pair:
            nbytes[rank] += stream.nbytes
            peers[rank] += 1
    rounds = 0
    for rank, total in nbytes.items():
        room = bucket_bytes - ALIGN_BYTES * peers[rank]  # each stream's step is rounded up
        if room <= 0:
            raise ConfigError(
                f"buckets of {bucket_bytes} bytes are too small: rank {rank} has {peers[rank]} streams",
                field="bucket_bytes",
            )
        rounds = max(rounds, -(-total // room))
    return rounds
