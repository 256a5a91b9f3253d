"""Describe one rank's work for an export: what it holds, what it writes, the copies and messages that fill that.
Torch-free.

    Holdings          which ranks hold which boxes of the source tensors, and where in their memory
    Stream            all that one rank sends to another, cut into rounds
    RankExportPlan    is data: ``export.plan`` makes it, ``export.transfer`` executes it

A `SourceBox` is a box of a source tensor with the ranks that hold it; the boxes of a tensor tile it. `Holdings.shares`
finds the part of a move in each box, `in_memory` its location in a rank's memory.

Guarantees: pure. The shares of a move are disjoint and together all of its elements, as pieces tile their tensor
(`check_source` refuses others). Cost grows with the number of pieces that a move meets if pieces are contiguous in
their tensor, else with the number of all pieces; never with the number of elements. Both ends see the same message: the
sender packs elements in the order in which the receiver unpacks them. Every offset is a multiple of the size of the
elements there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.boxes import Box, element_offset, element_span, first_defect, is_contiguous_in, strides, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.export.fp8_grids import GROUP_CELLS, Cells, Grid, Scaled, ScaleRange, around, cells_of
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import PAGE_BYTES
from holdfast.format.structure import is_per_rank
from holdfast.keymap.moves import Move, restrict_source, restrict_target, through
from holdfast.plan.write import round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.keymap.moves import MappedTensor
    from holdfast.plan.placement import World

ELEMENT_ALIGN_BYTES: Final = 16
"""Bytes of the widest element. Pieces of streams start on a multiple of it in buckets: no element is cut in two."""

Pair = tuple[int, int]
"""Sending and receiving rank."""


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A box of a source tensor, and the ranks (ascending) that hold it."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor that an export is made from: the whole of it, and who holds what."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SourceBox, ...]


class BufferRegion(NamedTuple):
    """Location of a box of a source on a rank: at ``offsets`` in a row-major buffer of ``sizes``."""

    source: str
    box: Box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Share(msgspec.Struct, frozen=True, gc=False):
    """Part of a move that reads one piece of its source."""

    piece: SourceBox
    move: Move


def check_source(source: SourceTensor, world: int) -> None:
    """Raise `ConfigError` unless the pieces tile the tensor and are held by ranks of the world."""
    if source.dtype not in ITEMSIZE:
        raise ConfigError(
            f"tensor {source.name!r} has dtype {source.dtype}, which can't be exported", field=source.name
        )
    for piece in source.pieces:
        if not piece.ranks or piece.ranks[0] < 0 or piece.ranks[-1] >= world:
            raise ConfigError(
                f"tensor {source.name!r}: its part {piece.box} is held by ranks {list(piece.ranks)}; the export has "
                f"{world}",
                field=source.name,
            )
    defect = first_defect(whole(source.shape), [piece.box for piece in source.pieces])
    if defect is not None:
        what, box = defect
        said = {"gap": "no rank holds", "overlap": "two pieces hold", "outside": "beyond it lies"}[what]
        raise ConfigError(
            f"tensor {source.name!r} of shape {list(source.shape)}: {said} {box}. Export with a process_group that has "
            "every rank of the tensor's mesh",
            field=source.name,
        )


# From the structures of all ranks ------------------------------------------------------------------------------


def sources_of(world: World, ranks: int) -> dict[str, SourceTensor]:
    """Every tensor that the ranks of ``world`` hold in common (none that is each rank's own). Raises as `held_by`."""
    found: dict[str, tuple[tuple[int, ...], str, dict[Box, SourceBox]]] = {}
    for rank in range(ranks):
        held_by_rank = world.held_by(rank)
        for spec in world.structure_of(rank).tensors:
            if is_per_rank(spec.path):
                continue
            known = found.get(spec.name)
            if known is None:
                known = found[spec.name] = (spec.shape, spec.dtype, {})
            for held in held_by_rank(spec):
                if held.number:
                    raise ConfigError(
                        f"tensor {spec.name!r}: rank {rank} has it in several parts, which can't be exported; give it "
                        "one tensor",
                        field=spec.name,
                    )
                if held.box not in known[2]:
                    known[2][held.box] = SourceBox(held.box, held.group)
    return {
        name: SourceTensor(name, shape, dtype, tuple(pieces.values())) for name, (shape, dtype, pieces) in found.items()
    }


# What a move takes of each piece -------------------------------------------------------------------------------


class _Located(NamedTuple):
    piece: SourceBox
    start: int
    stop: int
    """Of its elements in the whole tensor."""
    solid: bool
    """They are one run of it."""


class Holdings:
    """The pieces of one source, found by the elements that they hold."""

    def __init__(self, source: SourceTensor) -> None:
        outer = whole(source.shape)
        self._shape = source.shape
        self._located = sorted(
            (
                _Located(piece, *element_span(piece.box, outer), is_contiguous_in(piece.box, outer))
                for piece in source.pieces
                if piece.box.volume
            ),
            key=lambda item: item[1:3],
        )
        self._starts = [item.start for item in self._located]
        self._solid = all(item.solid for item in self._located)

    def shares(self, move: Move) -> Iterator[Share]:
        """Split ``move`` into moves that each read one piece only."""
        if len(self._located) == 1:
            yield Share(self._located[0].piece, move)
            return
        low, high = move.source_span
        is_run = move.counts[-1:] == move.target_strides[-1:] == () or (
            len(move.counts) == 1 and move.source_strides[0] == move.target_strides[0] == 1
        )
        first = bisect_right(self._starts, low) - 1 if self._solid else 0
        for item in self._located[max(0, first) :]:
            if item.start >= high:
                return  # and so do all behind it
            if item.stop <= low:
                continue
            if item.solid and item.start <= low and high <= item.stop:
                yield Share(item.piece, move)
            elif item.solid and is_run:
                start, stop = max(low, item.start), min(high, item.stop)
                yield Share(
                    item.piece,
                    Move(move.source, (stop - start,), move.target_offset + start - low, (1,), start, (1,)),
                )
            else:
                for part in restrict_source(move, self._shape, item.piece.box):
                    yield Share(item.piece, part)


# Where that lies -----------------------------------------------------------------------------------------------


def in_memory(move: Move, shape: Sequence[int], memory: BufferRegion) -> list[Move]:
    """``move``, which takes elements of the memory's box only, with source elements counted in that memory."""
    box, sizes = memory.box, memory.sizes
    outer = whole(shape)
    held = whole(sizes)
    inner = Box(memory.offsets, box.sizes)
    if is_contiguous_in(box, outer) and is_contiguous_in(inner, held):
        shift = element_offset(inner, held) - element_offset(box, outer)
        return [
            move
            if not shift
            else Move(
                move.source,
                move.counts,
                move.target_offset,
                move.target_strides,
                move.source_offset + shift,
                move.source_strides,
            )
        ]
    parts = through(move, _view(memory, shape))
    if sum(part.volume for part in parts) != move.volume:
        raise AssertionError(f"{move} takes elements outside {box} of {tuple(shape)}")
    return parts


def _view(memory: BufferRegion, shape: Sequence[int]) -> Move:
    """The box as a move from its memory into the whole tensor.

    A dimension that is whole in both joins the one before, so that nothing is cut without need.
    """
    loops: list[tuple[int, int, int]] = []
    rows = zip(memory.box.sizes, shape, memory.sizes, strides(shape), strides(memory.sizes), strict=True)
    for size, full, local, step, local_step in rows:
        if loops and size == full == local:
            loops[-1] = (loops[-1][0] * size, step, local_step)
        else:
            loops.append((size, step, local_step))
    counts, steps, local_steps = zip(*loops, strict=True) if loops else ((), (), ())
    return Move(
        memory.source,
        counts,
        element_offset(memory.box, whole(shape)),
        steps,
        element_offset(Box(memory.offsets, memory.box.sizes), whole(memory.sizes)),
        local_steps,
    )


# Split the transfers between ranks into rounds of at most one bucket. All that one rank sends to another is a `Stream`:
# elements without padding, larger dtypes first, so that each is aligned. Every stream is cut into equally many pieces,
# one per round, so a busy rank is busy in every round and none waits for its turn.


class TransferItem(msgspec.Struct, frozen=True, gc=False):
    """Elements that one rank holds and one rank has in its export image; travels if these are two ranks."""

    target: int
    """Index among the export's tensors."""
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
    leg: TransferItem
    move: Move


class Stream:
    """All that one rank has for another."""

    def __init__(self) -> None:
        self.legs: list[TransferItem] = []
        self.nbytes = 0

    def add(self, leg: TransferItem) -> None:
        self.legs.append(leg)
        self.nbytes += leg.nbytes

    def step(self, rounds: int) -> int:
        """Bytes that travel in every round but the last ones."""
        return round_up(-(-self.nbytes // rounds), ELEMENT_ALIGN_BYTES)

    def pieces(self, rounds: int, moves_of: Callable[[TransferItem], Sequence[Move]]) -> Iterator[PieceOfLeg]:
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
        room = bucket_bytes - ELEMENT_ALIGN_BYTES * peers[rank]  # each stream's step is rounded up
        if room <= 0:
            raise ConfigError(
                f"buckets of {bucket_bytes} bytes are too small: rank {rank} has {peers[rank]} streams",
                field="bucket_bytes",
            )
        rounds = max(rounds, -(-total // room))
    return rounds


BUCKET: Final = -1
"""Memory number that stands for the bucket of the round."""
BUCKETS: Final = 2
"""Number of buckets: while one round is in transit, the next is filled."""


@dataclass(frozen=True, slots=True)
class OwnedRange:
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

    ``source`` is a number of `RankExportPlan.memories`, or `BUCKET`; the target is the image, or a bucket to be sent.
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


class PeerMessage(msgspec.Struct, frozen=True, gc=False):
    """Bytes ``at`` to ``at + nbytes`` of the bucket, sent to or received from ``peer`` in a round.

    ``copies`` fill them before they are sent, or copy them to the image once they have arrived.
    """

    peer: int
    at: int
    nbytes: int
    copies: tuple[Copy, ...]


class TransferRound(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of a round of transfers."""

    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]


@dataclass(frozen=True, slots=True)
class RankExportPlan:
    """All that one rank does for an export."""

    rank: int
    world: int
    parts: tuple[OwnedRange, ...]
    image_bytes: int
    """Of the export image, a multiple of 4,096."""
    constants: tuple[tuple[int, bytes], ...]
    """Bytes that are known, by where they go in the image: of headers."""
    memories: tuple[BufferRegion, ...]
    """Memories that the rank copies from."""
    local: tuple[Copy, ...]
    """Copies from these memories to the image."""
    rounds: tuple[TransferRound, ...]
    """Transfer rounds, the same number on every rank; a rank without messages in a round skips it."""
    bucket_bytes: int
    """Maximum bytes of a round."""
    grids: tuple[Grid, ...]
    """Grids of quantized tensors, the same on every rank."""
    cells: Mapping[int, Cells]
    """The scales that the rank needs, by grid."""
    scales: tuple[ScaleRange, ...]
    """The scales that it writes."""

    @property
    def scale_bytes(self) -> int:
        """Memory for computing and keeping scales: those of a group twice, while they are in transit."""
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
    """Decisions about one rank's part."""

    rank: int
    world: int
    rounds: int
    parts: tuple[OwnedRange, ...]
    headers: Mapping[str, bytes]
    """By file."""
    tensors: Sequence[MappedTensor]
    sources: Mapping[str, SourceTensor]
    local: Sequence[TransferItem]
    streams: Mapping[Pair, Stream]
    """Of all ranks."""
    grids: tuple[Grid, ...]
    scale_places: Mapping[str, Sequence[tuple[int, int, int]]]
    """By file: first and last byte of each tensor of scales, and its grid, in order."""


def plan_rank(work: RankWork, memories: Mapping[tuple[str, Box], BufferRegion]) -> RankExportPlan:
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
    return RankExportPlan(
        rank=work.rank,
        world=work.world,
        parts=work.parts,
        image_bytes=0 if last is None else round_up(last.image_offset + last.size, PAGE_BYTES),
        constants=tuple(constants),
        memories=tuple(own.used),
        local=tuple(local),
        rounds=tuple(rounds),
        bucket_bytes=bucket_bytes,
        grids=work.grids,
        cells=_cells(work.grids, local, rounds),
        scales=tuple(_scale_ranges(work)),
    )


def _cells(grids: Sequence[Grid], local: Iterable[Copy], rounds: Iterable[TransferRound]) -> dict[int, Cells]:
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

    def __init__(self, work: RankWork, known: Mapping[tuple[str, Box], BufferRegion]) -> None:
        self._tensors = work.tensors
        self._sources = work.sources
        self._known = known
        self._grids = {grid.target: number for number, grid in enumerate(work.grids)}
        self._numbers: dict[tuple[str, Box], int] = {}
        self.used: list[BufferRegion] = []

    def find(self, leg: TransferItem) -> list[Move]:
        """The leg's move with source elements counted in the memory that has them."""
        return in_memory(leg.move, self._sources[leg.move.source].shape, self.used[self._number(leg)])

    def in_order(self, leg: TransferItem) -> list[Move]:
        """The same, as moves each of which fills what lies behind what the one before has filled."""
        found = self.find(leg)
        for one, other in pairwise(found):
            if other.target_offset < one.target_stop:
                raise AssertionError(f"{leg.move} lies in {leg.box} of its source in another order")
        return found

    def copy(self, leg: TransferItem, found: Move, *, target_at: int, target_strides: tuple[int, ...]) -> Copy:
        """Return the copy of a found part to its target, cast to the export's dtype."""
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

    def _number(self, leg: TransferItem) -> int:
        key = (leg.move.source, leg.box)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.used)
            whole = BufferRegion(*key, (0,) * len(leg.box.sizes), leg.box.sizes)
            self.used.append(self._known.get(key, whole))
        return number


def _rounds(work: RankWork, own: _Memories) -> tuple[list[TransferRound], int]:
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
        sends: list[PeerMessage] = []
        receives: list[PeerMessage] = []
        for peer, is_sent, stream, by_round in mine:
            pieces = by_round[number]
            if not pieces:
                continue
            step = stream.step(work.rounds)
            nbytes = min(step, stream.nbytes - number * step)
            if is_sent:
                sends.append(PeerMessage(peer, end, nbytes, tuple(_pack(own, piece, end) for piece in pieces)))
            else:
                receives.append(PeerMessage(peer, end, nbytes, tuple(_take_out(work, piece, end) for piece in pieces)))
            end = round_up(end + nbytes, ELEMENT_ALIGN_BYTES)
        most = max(most, end)
        rounds.append(TransferRound(tuple(sends), tuple(receives)))
    return rounds, most


def _as_it_is(leg: TransferItem) -> tuple[Move, ...]:
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


prepare_decoding(Share, TransferItem, Copy, PeerMessage, TransferRound)
