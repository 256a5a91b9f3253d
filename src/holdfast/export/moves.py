"""Where elements go when state becomes an export: loop nests from source tensors to target tensors, and their algebra.

A `Move` says in one line what a Python loop would: so many rows of so many elements, from here with these strides to
there with those. Every rename, split, fusion, transpose and reshape is a few of them. One question answers the rest:
which elements of a nest lie in another nest, and where does that one send them? It is asked level by level, from the
outermost loop of the other nest inwards: cut the values to the range of this loop, cut loops that step over a
multiple of its stride, take the multiples off, go on with the remainders. A box of a tensor, a view of a buffer and a
move are all such nests.

Guarantees: pure; exact for any nest; what can stay one move stays one (contiguous rows to contiguous rows are cut into
one nest); cost grows with the number of parts and loops, never with the number of elements.
Assumes: indices are row-major element indices in whole, unsharded tensors, within their tensors.
Does not: know dtypes or bytes, hold any data, name anything but sources. Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.boxes import strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.boxes import Box

_Loop = tuple[int, int, int]
"""How often, the target's step, the source's step."""

_Level = tuple[int, int, int, int]
"""A loop of the nest that values are looked up in: its first turn, how many, their stride, the stride of where to."""


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


# the question --------------------------------------------------------------------------------------------------


class _Walk(NamedTuple):
    """A nest under examination: each loop steps through values, which are looked up, and carries another index along.

    A loop is (count, carried step, value step, step it is sent to); the last is None as long as that is open.
    """

    carried: int
    base: int
    """What was taken off the values so far."""
    value: int
    sent: int
    loops: tuple[tuple[int, int, int, int | None], ...]

    def only(self, loop: int, start: int, stop: int) -> _Walk:
        """This nest where ``loop`` runs from ``start`` to ``stop`` only."""
        _, carried, step, sent = self.loops[loop]
        one = ((stop - start, carried, step, sent),) if stop - start > 1 else ()
        return self._replace(
            carried=self.carried + start * carried,
            value=self.value + start * step,
            loops=(*self.loops[:loop], *one, *self.loops[loop + 1 :]),
        )

    def span(self, *, modulus: int = 0, without: int = -1) -> tuple[int, int]:
        """The least and greatest that open loops add to the value: those not multiples of ``modulus``."""
        low = high = 0
        for number, (count, _, step, sent) in enumerate(self.loops):
            if sent is None and number != without and step and (not modulus or step % modulus):
                if step < 0:
                    low += (count - 1) * step
                else:
                    high += (count - 1) * step
        return low, high

    def longest(self, *, modulus: int = 0) -> int:
        """The number of the open loop with the largest step that is not a multiple of ``modulus``."""
        return max(
            (n for n, (_, _, step, sent) in enumerate(self.loops) if sent is None and (not modulus or step % modulus)),
            key=lambda n: abs(self.loops[n][2]),
        )


def _cut_range(walk: _Walk, start: int, stop: int, inside: list[_Walk], outside: list[_Walk]) -> None:
    """Part ``walk`` into nests whose values all lie in [start, stop), and nests none of whose values do."""
    low, high = walk.span()
    if start <= walk.value + low and walk.value + high < stop:
        inside.append(walk)
        return
    if walk.value + high < start or walk.value + low >= stop:
        outside.append(walk)
        return
    loop = walk.longest()
    count, _, step, _ = walk.loops[loop]
    low, high = walk.span(without=loop)
    first = walk.value if step > 0 else walk.value + (count - 1) * step
    pace = abs(step)

    def times(gap: int) -> int:
        return min(max(-(-gap // pace), 0), count)

    # In rising order of values: none of [0, begin), some of [begin, full), all of [full, ebb), some of [ebb, end).
    begin = times(start - first - high)
    full = times(start - first - low)
    ebb = times(stop - first - high)
    end = times(stop - first - low)
    if full >= ebb:
        full = ebb = end

    def parts(a: int, b: int) -> _Walk:
        return walk.only(loop, a, b) if step > 0 else walk.only(loop, count - b, count - a)

    if begin > 0:
        outside.append(parts(0, begin))
    for turn in (*range(begin, full), *range(ebb, end)):
        _cut_range(parts(turn, turn + 1), start, stop, inside, outside)
    if ebb > full:
        inside.append(parts(full, ebb))
    if end < count:
        outside.append(parts(end, count))


def _cut_periods(walk: _Walk, modulus: int, done: list[_Walk]) -> None:
    """Part ``walk`` so that in each part the loops that step by no multiple of ``modulus`` don't cross one together."""
    low, high = walk.span(modulus=modulus)
    if (walk.value + low) // modulus == (walk.value + high) // modulus:
        done.append(walk)
        return
    loop = walk.longest(modulus=modulus)
    count, carried, step, sent = walk.loops[loop]
    period = modulus // gcd(modulus, step)
    if count > period:
        rest_low, rest_high = walk.span(modulus=modulus, without=loop)
        rest_low += walk.value
        rest_high += walk.value
        gap = -rest_low % modulus if step > 0 else (rest_high + 1) % modulus
        head = -(-gap // abs(step)) % period if modulus % step == 0 else 0
        turns = (count - head) // period
        if head:
            _cut_periods(walk.only(loop, 0, head), modulus, done)
        if turns:
            whole = walk.only(loop, head, head + turns * period)
            outer = ((turns, period * carried, period * step, sent),) if turns > 1 else ()
            inner = (period, carried, step, sent)
            loops = (*whole.loops[:loop], *outer, inner, *whole.loops[loop + 1 :])
            _cut_periods(whole._replace(loops=loops), modulus, done)
        if head + turns * period < count:
            _cut_periods(walk.only(loop, head + turns * period, count), modulus, done)
        return
    low, high = walk.span(modulus=modulus, without=loop)
    turn = 0
    while turn < count:
        value = walk.value + turn * step
        floor = (value + low) // modulus * modulus
        if value + high < floor + modulus:
            room = (floor + modulus - 1 - high - value) // step if step > 0 else (value + low - floor) // -step
            stop = min(turn + room + 1, count)
            done.append(walk.only(loop, turn, stop))
            turn = stop
        else:
            _cut_periods(walk.only(loop, turn, turn + 1), modulus, done)
            turn += 1


def _look_up(walk: _Walk, offset: int, levels: Sequence[_Level], sent: int) -> tuple[list[_Walk], list[_Walk]]:
    """The parts of ``walk`` whose values lie in the nest of ``levels`` from ``offset`` on, and the parts outside it.

    Values inside have all been taken off, and ``offset`` is sent to ``sent``.
    """
    walks = [walk._replace(base=walk.base + offset, value=walk.value - offset, sent=sent)]
    outside: list[_Walk] = []
    for first, count, stride, to in levels:
        within: list[_Walk] = []
        for one in walks:
            _cut_range(one, first * stride, (first + count) * stride, within, outside)
        cut: list[_Walk] = []
        for one in within:
            _cut_periods(one, stride, cut)
        walks = [_taken_off(one, stride, to) for one in cut]
    inside: list[_Walk] = []
    for one in walks:
        _cut_range(one, 0, 1, inside, outside)
    return inside, outside


def _taken_off(walk: _Walk, stride: int, to: int) -> _Walk:
    low, _ = walk.span(modulus=stride)
    steps = (walk.value + low) // stride
    return walk._replace(
        base=walk.base + steps * stride,
        value=walk.value - steps * stride,
        sent=walk.sent + steps * to,
        loops=tuple(
            (count, carried, step, step // stride * to if sent is None and step % stride == 0 else sent)
            for count, carried, step, sent in walk.loops
        ),
    )


# moves through nests -------------------------------------------------------------------------------------------


def restrict_target(move: Move, start: int, stop: int) -> list[Move]:
    """The parts of ``move`` that fill elements [start, stop) of the target, in target order."""
    if start <= move.target_offset and move.target_stop <= stop:
        return [move]
    inside: list[_Walk] = []
    _cut_range(_by_target(move), start, stop, inside, [])
    return sorted((_at_target(move.source, walk) for walk in inside), key=_target_offset)


def restrict_source(move: Move, shape: Sequence[int], box: Box) -> list[Move]:
    """The parts of ``move`` that take elements of ``box`` of the source, which has ``shape``; in target order."""
    levels = _levels_of(shape, box)
    if levels is None:
        return [move]
    # Sent to where they are: only cut.
    parts = _sent(move, move.source, 0, [(first, count, step, step) for first, count, step, _ in levels], 0)
    return sorted(parts, key=_target_offset)


def relocated(move: Move, shape: Sequence[int], box: Box) -> Move:
    """``move`` with the source's elements counted in a row-major buffer that holds ``box`` of it and nothing else.

    ``move`` must take elements of ``box`` only and be such as `restrict_source` gives for it, or a part of that.
    """
    levels = _levels_of(shape, box)
    if levels is None:
        return move
    parts = _sent(move, move.source, 0, levels, -sum(first * local for first, _, _, local in levels))
    if len(parts) != 1 or parts[0].volume != move.volume:
        raise ValueError(f"{move} takes elements outside {box} of {tuple(shape)}, or was not cut for it")
    return parts[0]


def through(move: Move, other: Move) -> list[Move]:
    """``move`` out of a buffer that ``other`` has filled: straight from ``other``'s source; what it has not, left out."""
    return _sent(move, other.source, other.target_offset, _levels(other), other.source_offset)


def retargeted(move: Move, view: Move) -> list[Move]:
    """``move`` with its targets sent on: from ``view``'s target index to ``view``'s source index."""
    inside, _ = _look_up(_by_target(move), view.target_offset, _levels(view), view.source_offset)
    parts: list[Move] = []
    for walk in inside:
        loops = [(count, 0 if sent is None else sent, carried) for count, carried, _, sent in walk.loops]
        parts += _nested(move.source, walk.sent, walk.carried, loops)
    return parts


def without(move: Move, hole: Move) -> list[Move]:
    """The parts of ``move`` that fill no element of the target that ``hole`` fills."""
    if hole.target_stop <= move.target_offset or move.target_stop <= hole.target_offset:
        return [move]
    _, outside = _look_up(_by_target(move), hole.target_offset, _levels(hole), 0)
    return [_at_target(move.source, walk) for walk in outside]


def inverted(move: Move, name: str) -> list[Move]:
    """The way back: from the target, called ``name``, to the source; of an element that became many, the first one."""
    loops = [(count, source, target) for count, target, source in move.loops if source]
    return _nested(name, move.source_offset, move.target_offset, loops)


def _by_target(move: Move) -> _Walk:
    loops = tuple((count, source, target, None) for count, target, source in move.loops)
    return _Walk(move.source_offset, 0, move.target_offset, 0, loops)


def _at_target(source: str, walk: _Walk) -> Move:
    """The move of a walk over its targets, which are as they were."""
    return Move(
        source,
        tuple(loop[0] for loop in walk.loops),
        walk.base + walk.value,
        tuple(loop[2] for loop in walk.loops),
        walk.carried,
        tuple(loop[1] for loop in walk.loops),
    )


def _sent(move: Move, source: str, offset: int, levels: Sequence[_Level], sent: int) -> list[Move]:
    """The parts of ``move`` whose source elements lie in the nest of ``levels``, taken from where that sends them."""
    loops = tuple((count, target, step, None) for count, target, step in move.loops)
    inside, _ = _look_up(_Walk(move.target_offset, 0, move.source_offset, 0, loops), offset, levels, sent)
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


def _levels(move: Move) -> list[_Level]:
    """The nest that ``move`` fills."""
    return [(0, count, target, source) for count, target, source in move.loops]


def _levels_of(shape: Sequence[int], box: Box) -> list[_Level] | None:
    """``box`` in a tensor of ``shape`` as a nest, sent to where a buffer of its own has it; None if it is the whole.

    A dimension that is whole goes with the one before it, so that nothing is cut without need.
    """
    if tuple(box.sizes) == tuple(shape):
        return None
    levels: list[_Level] = []
    for start, size, full, step, local in zip(*box, shape, strides(shape), strides(box.sizes), strict=True):
        if levels and size == full:
            first, count, *_ = levels[-1]
            levels[-1] = (first * size, count * size, step, local)
        else:
            levels.append((start, size, step, local))
    return levels


# shorter -------------------------------------------------------------------------------------------------------


def coalesced(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The same in target order and in as few moves and loops as neighbours and nested loops allow."""
    done: list[Move] = []
    for move in sorted(map(_without_needless_loops, moves), key=_target_offset):
        last = move
        while done and (joined := _joined(done[-1], last)) is not None:
            done.pop()
            last = joined
        done.append(last)
    return tuple(done)


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


def _joined(first: Move, second: Move) -> Move | None:
    """One move for two whose loops are equal but for how often one of them runs, where they follow one another."""
    if first.source != second.source or abs(len(first.counts) - len(second.counts)) > 1:
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
            inside, outside = _look_up(_by_target(part), move.target_offset, _levels(move), 0)
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
