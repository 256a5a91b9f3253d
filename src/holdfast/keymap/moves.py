"""Map elements of state tensors to elements of exported tensors, and back: strided copies and their algebra.

A `Move` describes what a Python loop nest would copy: rows of elements, read with one set of strides and written with
another. Every rename, split, fusion, transpose and reshape is a few of them. Planning asks which elements of a move lie
in a given box, byte range or buffer; all these are answered here.

A load of an export asks for the way back (`reversed_moves`, `rebuilt`): which bytes of which exported tensors make a
tensor of the state. Most of what maps do (rename, split, stack, concatenate, fuse) cuts a tensor of the state into
boxes, each of them a run of some exported tensor's bytes. That is what a checkpoint looks like, too, so such a tensor
becomes a `StoredTensor` and is read as one. What is left (transposed, permuted, interleaved) becomes a `MovedTensor`:
loop nests.

Guarantees: pure and torch-free; exact for any strides; a move is split only if needed (copies between contiguous rows
stay one move); cost grows with the number of parts and loops, never with the number of elements. What is read back is
what the moves say, element by element.
Assumes: indices are row-major element indices in whole, unsharded tensors, within their tensors. Moves that are read
back fill no element twice (`reversed_moves` makes such), from tensors that are there; elements that they leave out are
left alone.
Does not: hold any data, name anything but sources, undo a quantization.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast.boxes import Box, merged, strides
from holdfast.plan.read import StoredShard, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.boxes import Loop


# Intersect two loop nests: boxes of tensors, views of buffers and targets of moves. The outer nest is processed from
# its outermost loop inwards: clip values to the loop's range, split loops that step over a multiple of its stride,
# subtract the multiples, continue with the remainders. Assumes that each stride is larger than the span of the loops
# within.

Level = tuple[int, int, int]
"""A loop of the nest that values are looked up in: how many turns, their stride, the stride of where they are sent."""


class StridedWalk(NamedTuple):
    """A nest under examination: each loop steps through values, which are looked up, and carries another index along.

    A loop is (count, carried step, value step, step it is sent to); the last is None as long as that is open.
    """

    carried: int
    base: int
    """What was taken off the values so far."""
    value: int
    sent: int
    loops: tuple[tuple[int, int, int, int | None], ...]

    def only(self, loop: int, start: int, stop: int) -> StridedWalk:
        """Restrict ``loop`` to the range from ``start`` to ``stop``."""
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


def cut_range(walk: StridedWalk, start: int, stop: int, inside: list[StridedWalk], outside: list[StridedWalk]) -> None:
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

    def parts(a: int, b: int) -> StridedWalk:
        return walk.only(loop, a, b) if step > 0 else walk.only(loop, count - b, count - a)

    if begin > 0:
        outside.append(parts(0, begin))
    for turn in (*range(begin, full), *range(ebb, end)):
        cut_range(parts(turn, turn + 1), start, stop, inside, outside)
    if ebb > full:
        inside.append(parts(full, ebb))
    if end < count:
        outside.append(parts(end, count))


def _cut_periods(walk: StridedWalk, modulus: int, done: list[StridedWalk]) -> None:
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


def look_up(
    walk: StridedWalk, offset: int, levels: Sequence[Level], sent: int
) -> tuple[list[StridedWalk], list[StridedWalk]]:
    """The parts of ``walk`` whose values lie in the nest of ``levels`` from ``offset`` on, and the parts outside it.

    Values inside have all been taken off; what lies at ``offset`` is sent to ``sent``.
    """
    walks = [walk._replace(sent=sent)]
    outside: list[StridedWalk] = []
    spans = _spans(levels)
    for (count, stride, to), inner in zip(levels, spans, strict=True):
        # Periods are counted from where values are 0, as rows of a tensor are, unless a turn of the nest would then lie
        # in two of them. So what walks along the same rows is not cut in the middle of them.
        first, rest = divmod(offset, stride)
        if rest + inner >= stride:
            walks = [one._replace(base=one.base + rest, value=one.value - rest) for one in walks]
            rest = 0
        offset = rest
        within: list[StridedWalk] = []
        for one in walks:
            cut_range(one, first * stride, (first + count) * stride, within, outside)
        cut: list[StridedWalk] = []
        for one in within:
            _cut_periods(one, stride, cut)
        walks = [_taken_off(one, stride, to, first) for one in cut]
    inside: list[StridedWalk] = []
    for one in walks:
        cut_range(one, offset, offset + 1, inside, outside)
    return inside, outside


def _spans(levels: Sequence[Level]) -> list[int]:
    """Return the distance from the first to the last value of one turn of each level."""
    spans = [0] * len(levels)
    for number in range(len(levels) - 1, 0, -1):
        count, stride, _ = levels[number]
        spans[number - 1] = spans[number] + (count - 1) * stride
    return spans


def _taken_off(walk: StridedWalk, stride: int, to: int, first: int) -> StridedWalk:
    low, _ = walk.span(modulus=stride)
    steps = (walk.value + low) // stride
    return walk._replace(
        base=walk.base + steps * stride,
        value=walk.value - steps * stride,
        sent=walk.sent + (steps - first) * to,
        loops=tuple(
            (count, carried, step, step // stride * to if sent is None and step % stride == 0 else sent)
            for count, carried, step, sent in walk.loops
        ),
    )


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
        """Number of elements of the target that it fills."""
        return prod(self.counts)

    @property
    def target_stop(self) -> int:
        """One past the last element of the target it fills."""
        return self.target_offset + 1 + sum((n - 1) * t for n, t in zip(self.counts, self.target_strides, strict=True))

    @property
    def source_span(self) -> tuple[int, int]:
        """The least element of the source that it takes, and one past the greatest."""
        low = high = self.source_offset
        for count, step in zip(self.counts, self.source_strides, strict=True):
            if step < 0:
                low += (count - 1) * step
            else:
                high += (count - 1) * step
        return low, high + 1

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
    """Error in the moves into a tensor, and the range [start, stop) of elements that it affects."""

    kind: Literal["gap", "overlap", "outside"]
    start: int
    stop: int


# moves through nests -------------------------------------------------------------------------------------------


def restrict_target(move: Move, start: int, stop: int) -> list[Move]:
    """The parts of ``move`` that fill elements [start, stop) of the target, in target order."""
    if start <= move.target_offset and move.target_stop <= stop:
        return [move]
    inside: list[StridedWalk] = []
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


def _by_target(move: Move) -> StridedWalk:
    loops = tuple((count, source, target, None) for count, target, source in move.loops)
    return StridedWalk(move.source_offset, 0, move.target_offset, 0, loops)


def _at_target(source: str, walk: StridedWalk) -> Move:
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
    inside, _ = look_up(StridedWalk(move.target_offset, 0, move.source_offset, 0, loops), offset, levels, sent)
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
    loops = merged(move.loops)
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


def _move(source: str, target_offset: int, source_offset: int, loops: Sequence[Loop]) -> Move:
    return Move(
        source,
        tuple(loop[0] for loop in loops),
        target_offset,
        tuple(loop[1] for loop in loops),
        source_offset,
        tuple(loop[2] for loop in loops),
    )


def _is_nested(loops: Sequence[Loop]) -> bool:
    """Return True if each loop's target step is positive and larger than the span of the loops within it."""
    span = 0
    for count, step, _ in reversed(loops):
        if step <= span:
            return False
        span += (count - 1) * step
    return True


def _nested(source: str, target_offset: int, source_offset: int, loops: Sequence[Loop]) -> list[Move]:
    """Moves for loops in any order and of any target steps but 0; loops that don't nest are run one by one."""
    rising: list[Loop] = []
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


class MovedPart(NamedTuple):
    """Elements of a stored tensor, whose bytes begin at ``start`` of ``file``, that a tensor of the state has.

    ``move`` goes as the export went: its source is the state's tensor, its target the stored one.
    """

    move: Move
    file: str
    start: int
    dtype: str


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """A tensor of the state that is put together element by element."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[MovedPart, ...]

    @property
    def is_whole(self) -> bool:
        """Return True if all of its elements are stored; otherwise the others keep their values."""
        return sum(part.move.volume for part in self.parts) == prod(self.shape)

    def within(self, box: Box) -> list[MovedPart]:
        """Return the parts that fill ``box``; target indices count in a row-major buffer that holds only the box."""
        return [
            part._replace(move=relocated(move, self.shape, box))
            for part in self.parts
            for move in restrict_source(part.move, self.shape, box)
        ]


def rebuilt(
    name: str, shape: Sequence[int], moves: Iterable[Move], stored: Mapping[str, StoredTensor]
) -> StoredTensor | MovedTensor:
    """Tensor ``name`` of the state, made of ``stored`` ones by ``moves``, which fill no element twice.

    Each of ``stored`` that a move names is in one piece, and not empty.
    """
    moves = list(moves)
    shape = tuple(shape)
    dtypes = {stored[move.source].dtype for move in moves}
    boxes = [_box_of_run(move, shape) for move in moves]
    whole = sum(move.volume for move in moves) == prod(shape)
    if len(dtypes) == 1 and whole and None not in boxes:
        shards = []
        for move, box in zip(moves, boxes, strict=True):
            tensor = stored[move.source]
            assert box is not None
            _, file, start, _ = tensor.shards[0]
            at = start + move.source_offset * tensor.itemsize
            shards.append(StoredShard(box, file, at, box.volume * tensor.itemsize))
        return StoredTensor(name, dtypes.pop(), shape, tuple(shards))
    parts = []
    for move in moves:
        tensor = stored[move.source]
        _, file, start, _ = tensor.shards[0]
        parts += [MovedPart(back, file, start, tensor.dtype) for back in inverted(move, name)]
    return MovedTensor(name, shape, tuple(parts))


def _box_of_run(move: Move, shape: tuple[int, ...]) -> Box | None:
    """The box of a tensor of ``shape`` that ``move`` fills in row-major order from neighbours; None if it doesn't."""
    steps = strides(shape)
    offsets = []
    rest = move.target_offset
    for step in steps:
        offsets.append(rest // step if step else 0)
        rest -= offsets[-1] * step
    sizes = [1] * len(shape)
    dim = len(shape) - 1
    run = 1
    for count, target, source in reversed(move.loops):
        if count == 1:
            continue
        if source != run:
            return None
        run *= count
        left, step = count, target
        while left > 1:
            while dim >= 0 and (shape[dim] == 1 or steps[dim] < step):
                dim -= 1
            if dim < 0 or steps[dim] != step:
                return None
            room = shape[dim] - offsets[dim]
            if left > room and (offsets[dim] or left % shape[dim]):
                return None
            sizes[dim] = min(left, room)
            # A loop that is longer than a dimension goes on in the one before it, in steps of what is full by now.
            left, step, dim = left // room if left > room else 1, step * shape[dim], dim - 1
    box = Box(tuple(offsets), tuple(sizes))
    return box if prod(sizes) == move.volume else None


# Invert a compiled key map: find each element of the state in an export. If an export has an element several times, the
# first tensor serves. Elements of quantized tensors are returned before multiplication by their scale (`scales_of`).


class Reversed(NamedTuple):
    """Moves that fill the tensors of the state from an export."""

    moves: dict[str, tuple[Move, ...]]
    """By name of the state, in its order: moves whose sources are tensors of the export."""
    missing: dict[str, int]
    """How many elements of a tensor of the state no tensor of the export has."""


def reversed_moves(mapping: KeyMapping, shapes: Mapping[str, Sequence[int]]) -> Reversed:
    """Return for each tensor of the state, of these shapes, moves from the tensors of the export, each element once.

    A tensor that was dropped as tied is filled as the one that stands for it.
    """
    ways_back: dict[str, list[Move]] = defaultdict(list)
    for tensor in mapping.tensors:
        if tensor.scale_of is None:
            for move in tensor.moves:
                ways_back[move.source] += inverted(move, tensor.name)
    moves: dict[str, tuple[Move, ...]] = {}
    missing: dict[str, int] = {}
    for name, shape in shapes.items():
        standing = name if name in ways_back else mapping.aliases.get(name, name)
        moves[name] = once_each(ways_back.get(standing, ()))
        lacking = prod(shape) - sum(move.volume for move in moves[name])
        if lacking:
            missing[name] = lacking
    return Reversed(moves, missing)


def once_each(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The same without what an earlier one has filled already."""
    taken: list[Move] = []
    reached = 0
    for move in sorted(moves, key=lambda move: move.target_offset):
        parts = [move]
        if move.target_offset < reached:
            for other in taken:
                parts = [rest for part in parts for rest in without(part, other)]
        taken += parts
        reached = max(reached, move.target_stop)
    return coalesced(taken)


def uncovered(moves: Iterable[Move], numel: int) -> list[Move]:
    """The elements of a tensor that none of ``moves`` fills, as moves from nowhere."""
    ordered = sorted(moves, key=lambda move: move.target_offset)
    reached = 0
    for move in ordered:
        if move.target_offset > reached or move.target_stop - move.target_offset != move.volume:
            break
        reached = max(reached, move.target_stop)
    else:
        return [run("", numel - reached, reached)] if reached < numel else []
    rest = [run("", numel)] if numel else []
    for move in ordered:
        rest = [part for whole in rest for part in without(whole, move)]
    return rest


def scales_of(mapping: KeyMapping) -> dict[str, MappedTensor]:
    """Map the name of each quantized tensor of the export to the tensor with the scales of its blocks."""
    return {tensor.scale_of: tensor for tensor in mapping.tensors if tensor.scale_of is not None}
