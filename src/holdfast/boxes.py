"""Compute with rectangles of tensors: where a shard is in the whole tensor, and where its elements are in memory.

Everything here is arithmetic on index tuples, in elements, row-major. A `Box` of a 0-dim tensor has empty tuples and
volume 1; a box with a zero size has volume 0 and meets nothing. A `StridedIndex` pairs the elements of two memories.

Guarantees: pure; results depend on arguments only; cost grows with the number of boxes and dimensions, never with
the number of elements (`runs`, `row_blocks` and `StridedIndex.parts` yield their items lazily).
Assumes: boxes compared with one another have equal rank (number of dimensions) and non-negative numbers.
Does not: know dtypes, placements, files. Imports the standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from math import gcd, prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Box(NamedTuple):
    """Indices ``offsets[d]`` to ``offsets[d] + sizes[d]`` in every dimension; orders and hashes as the two tuples."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-dim box."""
        return prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))

    def narrow(self, dim: int, start: int, size: int) -> Box:
        """Return the part with ``size`` indices in dimension ``dim``, from the box's own index ``start``."""
        return Box(
            (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :]),
            (*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.stops, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements that both boxes have, or None."""
    offsets = []
    sizes = []
    for a_start, a_size, b_start, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start = max(a_start, b_start)
        a_stop = a_start + a_size
        b_stop = b_start + b_size
        size = min(a_stop, b_stop) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def contains(outer: Box, inner: Box) -> bool:
    """Return True if ``inner`` lies within ``outer``, bounds included; an empty box lies where its bounds lie."""
    return len(outer.offsets) == len(inner.offsets) and all(
        o_start <= i_start and i_start + i_size <= o_start + o_size
        for o_start, o_size, i_start, i_size in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def subtract(a: Box, b: Box) -> list[Box]:
    """Return disjoint boxes that together are ``a`` without ``b``: at most two per dimension."""
    shared = intersect(a, b)
    if shared is None:
        return [a] if a.volume else []
    rest = []
    offsets = list(a.offsets)
    sizes = list(a.sizes)
    for dim in range(len(offsets)):
        before = shared.offsets[dim] - offsets[dim]
        after = offsets[dim] + sizes[dim] - (shared.offsets[dim] + shared.sizes[dim])
        if before:
            rest.append(Box(tuple(offsets), (*sizes[:dim], before, *sizes[dim + 1 :])))
        if after:
            start = shared.offsets[dim] + shared.sizes[dim]
            rest.append(Box((*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], after, *sizes[dim + 1 :])))
        offsets[dim] = shared.offsets[dim]
        sizes[dim] = shared.sizes[dim]
    return rest


# Row-major layout ----------------------------------------------------------------------------------------------


def strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the elements from one index to the next in each dimension of a row-major buffer of ``sizes``."""
    steps = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * sizes[dim + 1]
    return tuple(steps)


def element_offset(box: Box, outer: Box) -> int:
    """Return the index of the first element of ``box`` in a row-major buffer that holds ``outer``."""
    offset = 0
    for start, o_start, o_size in zip(box.offsets, outer.offsets, outer.sizes, strict=True):
        offset = offset * o_size + (start - o_start)
    return offset


def element_span(box: Box, outer: Box) -> tuple[int, int]:
    """Return the first element of ``box`` and one past its last, in a row-major buffer of ``outer``; (0, 0) if none."""
    if not box.volume:
        return 0, 0
    first = element_offset(box, outer)
    last = 0
    for size, o_size in zip(box.sizes, outer.sizes, strict=True):
        last = last * o_size + size - 1
    return first, first + last + 1


def run_length(box: Box, outer: Box) -> int:
    """Return the length of the equal, contiguous runs of ``box`` in a row-major buffer of ``outer``, in elements."""
    length = 1
    for size, o_size in zip(reversed(box.sizes), reversed(outer.sizes), strict=True):
        length *= size
        if size != o_size:
            break
    return length


def is_contiguous_in(box: Box, outer: Box) -> bool:
    """Return True if ``box`` is contiguous in a row-major buffer of ``outer``; empty boxes are."""
    return run_length(box, outer) == box.volume or not box.volume


def runs(box: Box, outer: Box, bridge: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each contiguous run of ``box`` in a row-major buffer of ``outer``, in ascending order.

    Neighbouring runs are maximal for the dimensions they span; an empty box has none. bridge: runs with so many
    elements in between, or fewer, are one.
    """
    if not box.volume:
        return
    length = pitch = 1
    split = len(box.sizes)
    while split and pitch - length <= bridge:
        split -= 1
        length += (box.sizes[split] - 1) * pitch
        pitch *= outer.sizes[split]
    steps = strides(outer.sizes)
    first = element_offset(box, outer)
    for index in product(*(range(size) for size in box.sizes[:split])):
        yield first + sum(i * step for i, step in zip(index, steps, strict=False)), length


def row_blocks(box: Box, most: int) -> Iterator[Box]:
    """Cut ``box``, in row-major order, into boxes of at most ``most`` elements (> 0).

    Each is one run of a row-major buffer that holds ``box``.
    """
    if box.volume <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    size = box.sizes[dim]
    rows = max(1, most * size // box.volume)
    for row in range(0, size, rows):
        yield from row_blocks(box.narrow(dim, row, min(rows, size - row)), most)


# Loop nests over two memories ----------------------------------------------------------------------------------

Loop = tuple[int, int, int]
"""A count, and the step of each iteration in either memory."""


def merged(loops: Iterable[Loop]) -> list[Loop]:
    """Return the same nest with as few loops as possible: none of one iteration, none that continues its outer loop."""
    found: list[Loop] = []
    for count, one, other in loops:
        if count == 1:
            continue
        if found and found[-1][1:] == (count * one, count * other):
            found[-1] = (found[-1][0] * count, one, other)
        else:
            found.append((count, one, other))
    return found


class StridedIndex(NamedTuple):
    """Pairs of source and target elements: one pair for each index into ``counts``, row-major.

    Offsets and steps are in elements of either memory. Steps may be negative; a source step of 0 repeats an element.
    """

    counts: tuple[int, ...]
    source_at: int
    source_steps: tuple[int, ...]
    target_at: int
    target_steps: tuple[int, ...]

    def merged(self) -> StridedIndex:
        """Return the same pairs in the same order, with as few loops as possible."""
        loops = merged(zip(self.counts, self.source_steps, self.target_steps, strict=True))
        if not loops:
            return StridedIndex((), self.source_at, (), self.target_at, ())
        counts, source_steps, target_steps = zip(*loops, strict=True)
        return StridedIndex(counts, self.source_at, source_steps, self.target_at, target_steps)

    def in_words(self, itemsize: int) -> tuple[int, StridedIndex]:
        """Return the same bytes as words, as wide as rows and offsets allow: their width, and the index in words.

        itemsize: bytes of an element, the same in both memories. Offsets are in bytes here, and need not be multiples.
        """
        source_at, target_at = self.source_at, self.target_at
        loops = merged(zip(self.counts, self.source_steps, self.target_steps, strict=True))
        row = itemsize
        if loops and loops[-1][1:] == (1, 1):
            row *= loops.pop()[0]
        counts = [count for count, _, _ in loops]
        source_bytes = [step * itemsize for _, step, _ in loops]
        target_bytes = [step * itemsize for _, _, step in loops]
        width = gcd(8, row, source_at, target_at, *source_bytes, *target_bytes)
        return width, StridedIndex(
            (*counts, row // width),
            source_at // width,
            (*[step // width for step in source_bytes], 1),
            target_at // width,
            (*[step // width for step in target_bytes], 1),
        )

    def parts(self, most: int) -> Iterator[StridedIndex]:
        """Cut the index into parts of at most ``most`` pairs, as large as that allows; in order."""
        counts, source_at, source_steps, target_at, target_steps = self
        inner = 1
        level = len(counts)
        while level and inner * counts[level - 1] <= most:
            level -= 1
            inner *= counts[level]
        if level == 0:
            if prod(counts):
                yield self
            return
        level -= 1  # the loop that is cut; outer loops are run one by one
        chunk = most // inner
        for turns in product(*map(range, counts[:level])):
            source = source_at + sum(a * b for a, b in zip(turns, source_steps[:level], strict=True))
            target = target_at + sum(a * b for a, b in zip(turns, target_steps[:level], strict=True))
            for start in range(0, counts[level], chunk):
                yield StridedIndex(
                    (min(chunk, counts[level] - start), *counts[level + 1 :]),
                    source + start * source_steps[level],
                    source_steps[level:],
                    target + start * target_steps[level],
                    target_steps[level:],
                )


# Coverage ------------------------------------------------------------------------------------------------------

Defect = tuple[Literal["gap", "overlap", "outside"], Box]


def first_defect(outer: Box, boxes: Sequence[Box]) -> Defect | None:
    """Return None if ``boxes`` tile ``outer`` exactly, else the kind of defect and a box where it is.

    A box that extends beyond is ``outside``; elements in no box are a ``gap``, in two an ``overlap``. Empty boxes are
    ignored. Grids cost O(n log n); the worst tilings O(n**2).
    """
    solid = [box for box in boxes if box.volume]
    for box in solid:
        if not contains(outer, box):
            return "outside", box
    if not outer.volume:
        return None
    return _sweep(outer, solid, 0)


def _sweep(outer: Box, boxes: Sequence[Box], dim: int) -> Defect | None:
    """Cut ``outer`` along ``dim`` wherever a box begins or ends; each slab must be tiled in the later dimensions."""
    if not boxes:
        return "gap", outer
    if len(boxes) == 1 and boxes[0].offsets[dim:] == outer.offsets[dim:] and boxes[0].sizes[dim:] == outer.sizes[dim:]:
        return None
    if dim == len(outer.sizes):
        return "overlap", outer
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for number, box in enumerate(boxes):
        begins[box.offsets[dim]].append(number)
        ends[box.offsets[dim] + box.sizes[dim]].append(number)
    outer_stop = outer.offsets[dim] + outer.sizes[dim]
    cuts = sorted({outer.offsets[dim], outer_stop, *begins, *ends})
    active: dict[int, Box] = {}
    for start, stop in pairwise(cuts):
        for number in ends.get(start, ()):
            del active[number]
        for number in begins.get(start, ()):
            active[number] = boxes[number]
        slab = Box(
            (*outer.offsets[:dim], start, *outer.offsets[dim + 1 :]),
            (*outer.sizes[:dim], stop - start, *outer.sizes[dim + 1 :]),
        )
        defect = _sweep(slab, list(active.values()), dim + 1)
        if defect is not None:
            return defect
    return None
