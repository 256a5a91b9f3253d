"""Which indices of one loop nest lie in another nest, and where that one sends them.

A box of a tensor, a view of a buffer and the targets of a move are all nests. The question is answered level by level,
from the outermost loop of the other nest inwards: cut the values to the range of this loop, cut loops that step over a
multiple of its stride, take the multiples off, go on with the remainders.

Guarantees: pure; exact for any nest; a nest that can stay one is not cut; cost grows with the number of parts and
loops, never with the number of elements.
Assumes: the nest looked up in is nested (each stride more than all that the loops within it span).
Imports the standard library only.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Level = tuple[int, int, int]
"""A loop of the nest that values are looked up in: how many turns, their stride, the stride of where they are sent."""


class Walk(NamedTuple):
    """A nest under examination: each loop steps through values, which are looked up, and carries another index along.

    A loop is (count, carried step, value step, step it is sent to); the last is None as long as that is open.
    """

    carried: int
    base: int
    """What was taken off the values so far."""
    value: int
    sent: int
    loops: tuple[tuple[int, int, int, int | None], ...]

    def only(self, loop: int, start: int, stop: int) -> Walk:
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


def cut_range(walk: Walk, start: int, stop: int, inside: list[Walk], outside: list[Walk]) -> None:
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

    def parts(a: int, b: int) -> Walk:
        return walk.only(loop, a, b) if step > 0 else walk.only(loop, count - b, count - a)

    if begin > 0:
        outside.append(parts(0, begin))
    for turn in (*range(begin, full), *range(ebb, end)):
        cut_range(parts(turn, turn + 1), start, stop, inside, outside)
    if ebb > full:
        inside.append(parts(full, ebb))
    if end < count:
        outside.append(parts(end, count))


def _cut_periods(walk: Walk, modulus: int, done: list[Walk]) -> None:
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


def look_up(walk: Walk, offset: int, levels: Sequence[Level], sent: int) -> tuple[list[Walk], list[Walk]]:
    """The parts of ``walk`` whose values lie in the nest of ``levels`` from ``offset`` on, and the parts outside it.

    Values inside have all been taken off; what lies at ``offset`` is sent to ``sent``.
    """
    walks = [walk._replace(sent=sent)]
    outside: list[Walk] = []
    spans = _spans(levels)
    for (count, stride, to), inner in zip(levels, spans, strict=True):
        # Periods are counted from where values are 0, as rows of a tensor are, unless a turn of the nest would then lie
        # in two of them. So what walks along the same rows is not cut in the middle of them.
        first, rest = divmod(offset, stride)
        if rest + inner >= stride:
            walks = [one._replace(base=one.base + rest, value=one.value - rest) for one in walks]
            rest = 0
        offset = rest
        within: list[Walk] = []
        for one in walks:
            cut_range(one, first * stride, (first + count) * stride, within, outside)
        cut: list[Walk] = []
        for one in within:
            _cut_periods(one, stride, cut)
        walks = [_taken_off(one, stride, to, first) for one in cut]
    inside: list[Walk] = []
    for one in walks:
        cut_range(one, offset, offset + 1, inside, outside)
    return inside, outside


def _spans(levels: Sequence[Level]) -> list[int]:
    """How far from the first to the last value of one turn of each level."""
    spans = [0] * len(levels)
    for number in range(len(levels) - 1, 0, -1):
        count, stride, _ = levels[number]
        spans[number - 1] = spans[number] + (count - 1) * stride
    return spans


def _taken_off(walk: Walk, stride: int, to: int, first: int) -> Walk:
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
