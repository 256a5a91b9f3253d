"""Where elements go when state becomes an export: loop nests from source tensors to target tensors, and their algebra.

A `Move` says in one line what a Python loop would: so many rows of so many elements, from here with these strides to
there with those. Every rename, split, fusion, transpose and reshape is a few of them. What planning asks of them (which
part is in this box, in that range, where in a buffer) is one question about nests: `holdfast.export.nests` answers it.

Guarantees: pure; exact for any nest; what can stay one move stays one (contiguous rows to contiguous rows are cut into
one nest); cost grows with the number of parts and loops, never with the number of elements.
Assumes: indices are row-major element indices in whole, unsharded tensors, within their tensors.
Does not: know dtypes or bytes, hold any data, name anything but sources. Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.boxes import strides
from holdfast.export.nests import Walk, cut_range, look_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.boxes import Box
    from holdfast.export.nests import Level

_Loop = tuple[int, int, int]
"""How often, the target's step, the source's step."""


@dataclass(frozen=True, slots=True)
class Move:
    """Elements of one source tensor that become elements of one target tensor: a loop nest.

    For every index tuple ``i`` with ``0 <= i[k] < counts[k]``::

        target.flat[target_offset + sum(i * target_strides)] = source.flat[source_offset + sum(i * source_strides)]
    """

    source: str
    counts: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    """Positive and strictly decreasing, each more than all loops within it span: walked in target order."""
    source_offset: int
    source_strides: tuple[int, ...]
    """Any integers: 0 where one element becomes many, negative where an order turns around."""

    @property
    def volume(self) -> int:
        """How many elements of the target it fills."""
        return prod(self.counts)

    @property
    def target_stop(self) -> int:
        """One past the last element of the target it fills."""
        return self.target_offset + 1 + sum((n - 1) * t for n, t in zip(self.counts, self.target_strides, strict=True))

    @property
    def loops(self) -> list[tuple[int, int, int]]:
        """Count, target stride and source stride of each loop, outermost first."""
        return list(zip(self.counts, self.target_strides, self.source_strides, strict=True))


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor of the export, and where its elements come from."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without ``torch.``, as the file has it: ``"bfloat16"``."""
    moves: tuple[Move, ...]
    """Together every element exactly once, sorted by target offset."""
    scale_of: str | None = None
    """fp8: this tensor holds the block scales of that target, and its moves are those of that target."""
    block: tuple[int, int] | None = None
    """Of a tensor of scales: rows and columns of the weight that share one scale."""
    storage: str | None = None
    """Tensors of one storage, such as the experts that are views of one parameter, go to one file."""


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """A compiled key map: every tensor of an export, in the order ``save_pretrained`` would have them."""

    tensors: tuple[MappedTensor, ...]
    aliases: Mapping[str, str]
    """Names of the state that were dropped as tied -> the name of the state that stands for them."""


class Defect(NamedTuple):
    """What is wrong with the moves into a tensor, and the elements [start, stop) within which it is."""

    kind: Literal["gap", "overlap", "outside"]
    start: int
    stop: int


# moves through nests -------------------------------------------------------------------------------------------


def restrict_target(move: Move, start: int, stop: int) -> list[Move]:
    """The parts of ``move`` that fill elements [start, stop) of the target, in target order."""
    if start <= move.target_offset and move.target_stop <= stop:
        return [move]
    inside: list[Walk] = []
    cut_range(_by_target(move), start, stop, inside, [])
    return sorted((_at_target(move.source, walk) for walk in inside), key=_target_offset)


def restrict_source(move: Move, shape: Sequence[int], box: Box) -> list[Move]:
    """The parts of ``move`` that take elements of ``box`` of the source, which has ``shape``; in target order."""
    levels = _levels_of(shape, box)
    if levels is None:
        return [move]
    offset, loops = levels
    # Sent to where they are: only cut.
    parts = _sent(move, move.source, offset, [(count, step, step) for count, step, _ in loops], offset)
    return sorted(parts, key=_target_offset)


def relocated(move: Move, shape: Sequence[int], box: Box) -> Move:
    """``move`` with the source's elements counted in a row-major buffer that holds ``box`` of it and nothing else.

    ``move`` must take elements of ``box`` only and be such as `restrict_source` gives for it, or a part of that.
    """
    levels = _levels_of(shape, box)
    if levels is None:
        return move
    parts = _sent(move, move.source, *levels, 0)
    if len(parts) != 1 or parts[0].volume != move.volume:
        raise ValueError(f"{move} takes elements outside {box} of {tuple(shape)}, or was not cut for it")
    return parts[0]


def through(move: Move, other: Move) -> list[Move]:
    """``move`` out of a buffer that ``other`` has filled, straight from ``other``'s source; without what it has not."""
    return _sent(move, other.source, other.target_offset, other.loops, other.source_offset)


def retargeted(move: Move, view: Move) -> list[Move]:
    """``move`` with its targets sent on: from ``view``'s target index to ``view``'s source index."""
    inside, _ = look_up(_by_target(move), view.target_offset, view.loops, view.source_offset)
    parts: list[Move] = []
    for walk in inside:
        loops = [(count, 0 if sent is None else sent, carried) for count, carried, _, sent in walk.loops]
        parts += _nested(move.source, walk.sent, walk.carried, loops)
    return parts


def without(move: Move, hole: Move) -> list[Move]:
    """The parts of ``move`` that fill no element of the target that ``hole`` fills."""
    if hole.target_stop <= move.target_offset or move.target_stop <= hole.target_offset:
        return [move]
    _, outside = look_up(_by_target(move), hole.target_offset, hole.loops, 0)
    return [_at_target(move.source, walk) for walk in outside]


def inverted(move: Move, name: str) -> list[Move]:
    """The way back: from the target, called ``name``, to the source; of an element that became many, the first one."""
    loops = [(count, source, target) for count, target, source in move.loops if source]
    return _nested(name, move.source_offset, move.target_offset, loops)


def with_source(move: Move, source: str) -> Move:
    """The same from a source of another name."""
    return Move(source, move.counts, move.target_offset, move.target_strides, move.source_offset, move.source_strides)


def _by_target(move: Move) -> Walk:
    loops = tuple((count, source, target, None) for count, target, source in move.loops)
    return Walk(move.source_offset, 0, move.target_offset, 0, loops)


def _at_target(source: str, walk: Walk) -> Move:
    """The move of a walk over its targets, which are as they were."""
    return Move(
        source,
        tuple(loop[0] for loop in walk.loops),
        walk.base + walk.value,
        tuple(loop[2] for loop in walk.loops),
        walk.carried,
        tuple(loop[1] for loop in walk.loops),
    )


def _sent(move: Move, source: str, offset: int, levels: Sequence[Level], sent: int) -> list[Move]:
    """The parts of ``move`` whose source elements lie in the nest of ``levels``, taken from where that sends them."""
    loops = tuple((count, target, step, None) for count, target, step in move.loops)
    inside, _ = look_up(Walk(move.target_offset, 0, move.source_offset, 0, loops), offset, levels, sent)
    return [
        Move(
            source,
            tuple(loop[0] for loop in walk.loops),
            walk.carried,
            tuple(loop[1] for loop in walk.loops),
            walk.sent,
            tuple(loop[3] or 0 for loop in walk.loops),
        )
        for walk in inside
    ]


def _target_offset(move: Move) -> int:
    return move.target_offset


def _levels_of(shape: Sequence[int], box: Box) -> tuple[int, list[Level]] | None:
    """``box`` in a tensor of ``shape`` as a nest, sent to where a buffer of its own has it; None if it is the whole.

    A dimension that is whole goes with the one before it, so that nothing is cut without need.
    """
    if tuple(box.sizes) == tuple(shape):
        return None
    levels: list[Level] = []
    steps = strides(shape)
    for size, full, step, local in zip(box.sizes, shape, steps, strides(box.sizes), strict=True):
        if levels and size == full:
            levels[-1] = (levels[-1][0] * size, step, local)
        else:
            levels.append((size, step, local))
    return sum(start * step for start, step in zip(box.offsets, steps, strict=True)), levels


# shorter -------------------------------------------------------------------------------------------------------


def coalesced(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The same in target order and in as few moves and loops as neighbours and nested loops allow."""
    done: list[Move | None] = []
    # Where the moves of each source are; those of several may take turns.
    places: dict[str, list[int]] = {}
    for move in sorted(map(_without_needless_loops, moves), key=_target_offset):
        last, place = move, len(done)
        before = places.setdefault(move.source, [])
        done.append(None)
        while before and (joined := _joined(done[before[-1]], last)) is not None:
            done[place] = None
            last, place = joined, before.pop()
        done[place] = last
        before.append(place)
    return tuple(move for move in done if move is not None)


def _without_needless_loops(move: Move) -> Move:
    loops: list[_Loop] = []
    for count, target, source in move.loops:
        if count == 1:
            continue
        if loops and loops[-1][1:] == (count * target, count * source):
            loops[-1] = (loops[-1][0] * count, target, source)
        else:
            loops.append((count, target, source))
    return move if len(loops) == len(move.counts) else _move(move.source, move.target_offset, move.source_offset, loops)


def _joined(first: Move | None, second: Move) -> Move | None:
    """One move for two of a source whose loops are equal but for how often one runs, where they follow one another."""
    if first is None or abs(len(first.counts) - len(second.counts)) > 1:
        return None
    target = second.target_offset - first.target_offset
    source = second.source_offset - first.source_offset
    ours, theirs = first.loops, second.loops
    # Where the two part ways; a loop that one of them lacks runs once in it.
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if ours == theirs:
        place = sum(step > target for _, step, _ in ours)
        loops = [*ours[:place], (2, target, source), *ours[place:]]
    elif len(ours) == len(theirs):
        count, step, from_step = ours[place]
        if theirs[place][1:] != (step, from_step) or ours[place + 1 :] != theirs[place + 1 :]:
            return None
        if (target, source) != (count * step, count * from_step):
            return None
        loops = [*ours[:place], (count + theirs[place][0], step, from_step), *ours[place + 1 :]]
    else:
        longer, shorter = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
        count, step, from_step = longer[place]
        turns = count if longer is ours else 1
        if longer[place + 1 :] != shorter[place:] or (target, source) != (turns * step, turns * from_step):
            return None
        loops = [*longer[:place], (count + 1, step, from_step), *longer[place + 1 :]]
    if not _is_nested(loops):
        return None
    return _without_needless_loops(_move(first.source, first.target_offset, first.source_offset, loops))


def _move(source: str, target_offset: int, source_offset: int, loops: Sequence[_Loop]) -> Move:
    return Move(
        source,
        tuple(loop[0] for loop in loops),
        target_offset,
        tuple(loop[1] for loop in loops),
        source_offset,
        tuple(loop[2] for loop in loops),
    )


def _is_nested(loops: Sequence[_Loop]) -> bool:
    """Whether each loop's target step is positive and steps over all that the loops within it span."""
    span = 0
    for count, step, _ in reversed(loops):
        if step <= span:
            return False
        span += (count - 1) * step
    return True


def _nested(source: str, target_offset: int, source_offset: int, loops: Sequence[_Loop]) -> list[Move]:
    """Moves for loops in any order and of any target steps but 0; loops that don't nest are run one by one."""
    rising: list[_Loop] = []
    for count, target, step in loops:
        if count == 1:
            continue
        if target < 0:
            target_offset += (count - 1) * target
            source_offset += (count - 1) * step
            rising.append((count, -target, -step))
        else:
            rising.append((count, target, step))
    rising.sort(key=lambda loop: -loop[1])
    if _is_nested(rising):
        return [_move(source, target_offset, source_offset, rising)]
    (count, target, step), *rest = rising
    return [
        move
        for turn in range(count)
        for move in _nested(source, target_offset + turn * target, source_offset + turn * step, rest)
    ]


# coverage ------------------------------------------------------------------------------------------------------


def run(source: str, count: int, target_offset: int = 0, source_offset: int = 0) -> Move:
    """``count`` neighbours in the source that are neighbours in the target."""
    return Move(source, (count,), target_offset, (1,), source_offset, (1,))


def first_defect(moves: Iterable[Move], numel: int) -> Defect | None:
    """None if ``moves`` fill each of ``numel`` elements exactly once, else what is wrong and where.

    One pass over moves that follow one another; the worst interleaving costs the square of their number.
    """
    ordered = sorted((move for move in moves if move.volume), key=_target_offset)
    if _follow_one_another(ordered, numel):
        return None
    open_parts = [run("", numel)] if numel else []
    for move in ordered:
        if move.target_offset < 0 or move.target_stop > numel:
            return Defect("outside", move.target_offset, move.target_stop)
        found = 0
        rest: list[Move] = []
        for part in open_parts:
            if part.target_stop <= move.target_offset:
                return Defect("gap", part.target_offset, part.target_stop)
            if move.target_stop <= part.target_offset:
                rest.append(part)
                continue
            inside, outside = look_up(_by_target(part), move.target_offset, move.loops, 0)
            found += sum(prod(loop[0] for loop in walk.loops) for walk in inside)
            rest += (_at_target("", walk) for walk in outside)
        if found != move.volume:
            return Defect("overlap", move.target_offset, move.target_stop)
        open_parts = rest
    if open_parts:
        gap = min(open_parts, key=_target_offset)
        return Defect("gap", gap.target_offset, gap.target_stop)
    return None


def _follow_one_another(ordered: Sequence[Move], numel: int) -> bool:
    reached = 0
    for move in ordered:
        if move.target_offset != reached or move.target_stop - reached != move.volume:
            return False
        reached = move.target_stop
    return reached == numel
