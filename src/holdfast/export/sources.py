"""Which ranks hold which boxes of the tensors that an export is made from, and where in their memory. Torch-free.

A `Piece` is a box of a source tensor with the ranks that hold it; the pieces of a tensor tile it. What a move takes of
each piece is found by `Holdings.shares`, and where that lies in a rank's memory by `in_memory`.

Guarantees: pure. The shares of a move are disjoint and together all of its elements, as pieces tile their tensor
(`check_source` refuses others). Cost grows with the number of pieces that a move meets where pieces are contiguous in
their tensor, else with the number of all pieces; never with the number of elements.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.boxes import Box, element_offset, element_span, first_defect, is_contiguous_in, strides, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.export.moves import Move, restrict_source, through
from holdfast.plan.structure import is_per_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from holdfast.plan.shares import World


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a source tensor, and the ranks (ascending) that hold it."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that an export is made from: the whole of it, and who holds what."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


class Memory(NamedTuple):
    """Where a rank has a box of a source: at ``offsets`` in a row-major buffer of ``sizes``."""

    source: str
    box: Box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Share(msgspec.Struct, frozen=True, gc=False):
    """What a move takes of one piece of its source."""

    piece: Piece
    move: Move


def check_source(source: Source, world: int) -> None:
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


def sources_of(world: World, ranks: int) -> dict[str, Source]:
    """Every tensor that the ranks of ``world`` hold in common (none that is each rank's own). Raises as `held_by`."""
    found: dict[str, tuple[tuple[int, ...], str, dict[Box, Piece]]] = {}
    for rank in range(ranks):
        held_by_rank = world.held_by(rank)
        for spec in world.structure_of(rank).tensors:
            if is_per_rank(spec.path):
                continue
            known = found.get(spec.name)
            if known is None:
                known = found[spec.name] = (spec.shape, spec.dtype, {})
            for held in held_by_rank(spec):
                if held.box not in known[2]:
                    known[2][held.box] = Piece(held.box, held.group)
    return {name: Source(name, shape, dtype, tuple(pieces.values())) for name, (shape, dtype, pieces) in found.items()}


def memories_of(world: World, rank: int) -> dict[tuple[str, Box], Memory]:
    """Where ``rank`` has its boxes, its memory being that of its local tensors, each contiguous and row-major."""
    found: dict[tuple[str, Box], Memory] = {}
    held_by_rank = world.held_by(rank)
    for spec in world.structure_of(rank).tensors:
        if is_per_rank(spec.path):
            continue
        held = held_by_rank(spec)
        ends = [[at + size for at, size in zip(item.local_offsets, item.box.sizes, strict=True)] for item in held]
        sizes = tuple(map(max, zip(*ends, strict=True)))
        for item in held:
            found[spec.name, item.box] = Memory(spec.name, item.box, item.local_offsets, sizes)
    return found


# What a move takes of each piece -------------------------------------------------------------------------------


class _Located(NamedTuple):
    piece: Piece
    start: int
    stop: int
    """Of its elements in the whole tensor."""
    solid: bool
    """They are one run of it."""


class Holdings:
    """The pieces of one source, found by the elements that they hold."""

    def __init__(self, source: Source) -> None:
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
        """What ``move`` takes of each piece, as moves that take elements of one piece only."""
        if len(self._located) == 1:
            yield Share(self._located[0].piece, move)
            return
        low, high = source_span(move)
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


def source_span(move: Move) -> tuple[int, int]:
    """The least source element that ``move`` takes, and one past the greatest."""
    low = high = move.source_offset
    for count, step in zip(move.counts, move.source_strides, strict=True):
        if step < 0:
            low += (count - 1) * step
        else:
            high += (count - 1) * step
    return low, high + 1


# Where that lies -----------------------------------------------------------------------------------------------


def in_memory(move: Move, shape: Sequence[int], memory: Memory) -> list[Move]:
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


def _view(memory: Memory, shape: Sequence[int]) -> Move:
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
