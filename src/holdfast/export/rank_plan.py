"""What one rank does for an export: the parts that it writes, and the copies and messages that fill them. Torch-free.

`RankPlan` is data: ``export.plan`` decides what is in it, ``export.fill`` and ``export.exchange`` carry it out.

Guarantees: a message is the same for both of its ends: who sends it packs elements in the order in which who receives
it takes them out. Every offset is a multiple of the size of the elements there.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.boxes import Box, strides
from holdfast.dtypes import ITEMSIZE
from holdfast.export.grids import GROUP_CELLS, Cells, Grid, Scaled, ScaleRange, around, cells_of
from holdfast.export.rounds import ALIGN_BYTES, Leg, Pair, PieceOfLeg, Stream
from holdfast.export.sources import Memory, Source, in_memory
from holdfast.plan.write import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.export.moves import MappedTensor, Move

BUCKET: Final = -1
"""As the number of a memory: the bucket of the round."""
BUCKETS: Final = 2
"""While one round is on its way, the next is filled."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that one rank writes: whole blocks of 1 MiB, the file's last one as short as it is.

    ``image_offset``, a multiple of 4,096, is where they lie in the rank's export image.
    """

    file: str
    offset: int
    size: int
    total: int
    image_offset: int


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A loop nest of elements from one memory into another; ``at`` in bytes, strides in elements.

    ``source`` is a number of `RankPlan.memories`, or `BUCKET`; the target is the image, or a bucket to be sent.
    """

    counts: tuple[int, ...]
    source: int
    source_dtype: str
    source_at: int
    source_strides: tuple[int, ...]
    target_dtype: str
    target_at: int
    target_strides: tuple[int, ...]
    scaled: Scaled | None = None


class Message(msgspec.Struct, frozen=True, gc=False):
    """What goes to or comes from ``peer`` in a round: bytes ``at`` to ``at + nbytes`` of the bucket.

    ``copies`` fill them before they are sent, or take them to the image once they are there.
    """

    peer: int
    at: int
    nbytes: int
    copies: tuple[Copy, ...]


class Round(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of a round of transfers."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """All that one rank does for an export."""

    rank: int
    world: int
    parts: tuple[Part, ...]
    image_bytes: int
    """Of the export image, a multiple of 4,096."""
    constants: tuple[tuple[int, bytes], ...]
    """Bytes that are known, by where they go in the image: of headers."""
    memories: tuple[Memory, ...]
    """What the rank copies from."""
    local: tuple[Copy, ...]
    """From there to the image."""
    rounds: tuple[Round, ...]
    """Equally many on every rank; one that has nothing to send or receive in a round takes no part in it."""
    bucket_bytes: int
    """What a round takes at most."""
    grids: tuple[Grid, ...]
    """Of what is quantized: the same on every rank."""
    cells: Mapping[int, Cells]
    """The scales that the rank needs, by grid."""
    scales: tuple[ScaleRange, ...]
    """The scales that it writes."""

    @property
    def scale_bytes(self) -> int:
        """What finding and keeping scales takes: those of a group twice, while they are on their way."""
        group = max(GROUP_CELLS, max((grid.cells for grid in self.grids), default=0)) if self.grids else 0
        return 4 * (2 * group + sum(cells.number for cells in self.cells.values()))

    @property
    def memory_bytes(self) -> int:
        """All memory that carrying out the plan takes."""
        return self.image_bytes + BUCKETS * self.bucket_bytes + self.scale_bytes

    def quantized(self) -> Iterator[Copy]:
        """The copies that the rank quantizes: of all elements that come from it."""
        sent = (copy for turn in self.rounds for message in turn.sends for copy in message.copies)
        return (copy for copies in (self.local, sent) for copy in copies if copy.scaled is not None)


@dataclass(frozen=True, slots=True)
class RankWork:
    """What is decided of one rank's part."""

    rank: int
    world: int
    rounds: int
    parts: tuple[Part, ...]
    headers: Mapping[str, bytes]
    """By file."""
    tensors: Sequence[MappedTensor]
    sources: Mapping[str, Source]
    local: Sequence[Leg]
    streams: Mapping[Pair, Stream]
    """Of all ranks."""
    grids: tuple[Grid, ...]
    scale_places: Mapping[str, Sequence[tuple[int, int, int]]]
    """By file: first and last byte of each tensor of scales, and its grid, in order."""


def plan_rank(work: RankWork, memories: Mapping[tuple[str, Box], Memory]) -> RankPlan:
    """Spell it out. ``memories``: where the rank has its boxes; those not there are each in a buffer of its own."""
    own = _Memories(work, memories)
    local = [
        own.copy(leg, move, target_at=leg.base + move.target_offset * leg.itemsize, target_strides=move.target_strides)
        for leg in work.local
        for move in own.find(leg)
    ]
    rounds, bucket_bytes = _rounds(work, own)
    constants = []
    for part in work.parts:
        header = work.headers[part.file][part.offset : part.offset + part.size]
        if header:
            constants.append((part.image_offset, header))
    last = work.parts[-1] if work.parts else None
    return RankPlan(
        rank=work.rank,
        world=work.world,
        parts=work.parts,
        image_bytes=0 if last is None else round_up(last.image_offset + last.size, 4096),
        constants=tuple(constants),
        memories=tuple(own.used),
        local=tuple(local),
        rounds=tuple(rounds),
        bucket_bytes=bucket_bytes,
        grids=work.grids,
        cells=_cells(work.grids, local, rounds),
        scales=tuple(_scale_ranges(work)),
    )


def _cells(grids: Sequence[Grid], local: Iterable[Copy], rounds: Iterable[Round]) -> dict[int, Cells]:
    found: dict[int, Cells] = {}
    for copies in (local, *(message.copies for turn in rounds for message in turn.sends)):
        for copy in copies:
            if copy.scaled is not None:
                number = copy.scaled.grid
                found[number] = around(found.get(number), cells_of(grids[number], copy.counts, copy.scaled))
    return found


def _scale_ranges(work: RankWork) -> Iterator[ScaleRange]:
    for part in work.parts:
        places = work.scale_places.get(part.file, ())
        end = part.offset + part.size
        for start, stop, number in places[bisect_right(places, part.offset, key=lambda place: place[1]) :]:
            if start >= end:
                break
            dtype = work.tensors[work.grids[number].scales].dtype
            first = (max(start, part.offset) - start) // ITEMSIZE[dtype]
            last = (min(stop, end) - start) // ITEMSIZE[dtype]
            at = part.image_offset + start - part.offset + first * ITEMSIZE[dtype]
            if first < last:
                yield ScaleRange(number, first, last - first, at, dtype)


class _Memories:
    """The memories that a rank copies from, numbered as they are first used."""

    def __init__(self, work: RankWork, known: Mapping[tuple[str, Box], Memory]) -> None:
        self._tensors = work.tensors
        self._sources = work.sources
        self._known = known
        self._grids = {grid.target: number for number, grid in enumerate(work.grids)}
        self._numbers: dict[tuple[str, Box], int] = {}
        self.used: list[Memory] = []

    def find(self, leg: Leg) -> list[Move]:
        """The leg's move with source elements counted in the memory that has them."""
        return in_memory(leg.move, self._sources[leg.move.source].shape, self.used[self._number(leg)])

    def in_order(self, leg: Leg) -> list[Move]:
        """The same, as moves each of which fills what lies behind what the one before has filled."""
        found = self.find(leg)
        for one, other in pairwise(found):
            if other.target_offset < one.target_stop:
                raise AssertionError(f"{leg.move} lies in {leg.box} of its source in another order")
        return found

    def copy(self, leg: Leg, found: Move, *, target_at: int, target_strides: tuple[int, ...]) -> Copy:
        """Of what was found to where it is wanted, cast to what the export has."""
        dtype = self._sources[found.source].dtype
        grid = self._grids.get(leg.target)
        return Copy(
            found.counts,
            self._number(leg),
            dtype,
            found.source_offset * ITEMSIZE[dtype],
            found.source_strides,
            self._tensors[leg.target].dtype,
            target_at,
            target_strides,
            None if grid is None else Scaled(grid, found.target_offset, found.target_strides),
        )

    def _number(self, leg: Leg) -> int:
        key = (leg.move.source, leg.box)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.used)
            whole = Memory(*key, (0,) * len(leg.box.sizes), leg.box.sizes)
            self.used.append(self._known.get(key, whole))
        return number


def _rounds(work: RankWork, own: _Memories) -> tuple[list[Round], int]:
    """The messages of every round, and the most that one round takes."""
    mine: list[tuple[int, bool, Stream, list[list[PieceOfLeg]]]] = []
    for peer in range(work.world):
        for pair in ((work.rank, peer), (peer, work.rank)):
            stream = work.streams.get(pair)
            if stream is not None:
                by_round: list[list[PieceOfLeg]] = [[] for _ in range(work.rounds)]
                is_sent = pair[0] == work.rank
                for piece in stream.pieces(work.rounds, own.in_order if is_sent else _as_it_is):
                    by_round[piece.round].append(piece)
                mine.append((peer, is_sent, stream, by_round))
    rounds = []
    most = 0
    for number in range(work.rounds):
        end = 0
        sends: list[Message] = []
        receives: list[Message] = []
        for peer, is_sent, stream, by_round in mine:
            pieces = by_round[number]
            if not pieces:
                continue
            step = stream.step(work.rounds)
            nbytes = min(step, stream.nbytes - number * step)
            if is_sent:
                sends.append(Message(peer, end, nbytes, tuple(_pack(own, piece, end) for piece in pieces)))
            else:
                receives.append(Message(peer, end, nbytes, tuple(_take_out(work, piece, end) for piece in pieces)))
            end = round_up(end + nbytes, ALIGN_BYTES)
        most = max(most, end)
        rounds.append(Round(tuple(sends), tuple(receives)))
    return rounds, most


def _as_it_is(leg: Leg) -> tuple[Move, ...]:
    return (leg.move,)


def _pack(own: _Memories, piece: PieceOfLeg, message_at: int) -> Copy:
    """The elements of ``piece`` one behind the other, in target order: what `_take_out` relies on."""
    return own.copy(piece.leg, piece.move, target_at=message_at + piece.at, target_strides=strides(piece.move.counts))


def _take_out(work: RankWork, piece: PieceOfLeg, message_at: int) -> Copy:
    move, leg = piece.move, piece.leg
    dtype = work.tensors[leg.target].dtype
    return Copy(
        move.counts,
        BUCKET,
        dtype,
        message_at + piece.at,
        strides(move.counts),
        dtype,
        leg.base + move.target_offset * leg.itemsize,
        move.target_strides,
    )
