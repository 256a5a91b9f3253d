"""Rectangles of a tensor: where a shard lies in the whole, and where its elements lie in memory.

Everything here is arithmetic on index tuples, in elements, row-major. A `Box` of a 0-dim tensor has empty tuples and
volume 1; a box with a zero size has volume 0 and meets nothing.

Guarantees: pure; results depend on arguments only; cost grows with the number of boxes and dimensions, never with
the number of elements (`runs` alone yields one item per contiguous run, lazily).
Assumes: boxes compared with one another have equal rank (number of dimensions) and non-negative numbers.
Does not: know dtypes, placements, files. Imports the standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Box(NamedTuple):
    """``sizes[d]`` indices from ``offsets[d]`` on in every dimension ``d``; orders and hashes as the pair of tuples."""

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

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offsets, self.stops, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements that both boxes have, or None where there are none."""
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
    """Whether ``inner`` lies within ``outer``, bounds included; an empty box lies where its bounds lie."""
    return len(outer.offsets) == len(inner.offsets) and all(
        o_start <= i_start and i_start + i_size <= o_start + o_size
        for o_start, o_size, i_start, i_size in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that together are ``a`` without ``b``: at most two a dimension."""
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
    """Elements from one index to the next in each dimension of a row-major buffer of ``sizes``."""
    steps = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * sizes[dim + 1]
    return tuple(steps)


def element_offset(box: Box, outer: Box) -> int:
    """Where the first element of ``box`` lies in a row-major buffer that holds ``outer``."""
    offset = 0
    for start, o_start, o_size in zip(box.offsets, outer.offsets, outer.sizes, strict=True):
        offset = offset * o_size + (start - o_start)
    return offset


def element_span(box: Box, outer: Box) -> tuple[int, int]:
    """First element of ``box`` and one past its last, in a row-major buffer of ``outer``; (0, 0) for an empty box."""
    if not box.volume:
        return 0, 0
    first = element_offset(box, outer)
    last = 0
    for size, o_size in zip(box.sizes, outer.sizes, strict=True):
        last = last * o_size + size - 1
    return first, first + last + 1


def run_length(box: Box, outer: Box) -> int:
    """Elements in each of the equal, contiguous runs that ``box`` is made of in a row-major buffer of ``outer``."""
    length = 1
    for size, o_size in zip(reversed(box.sizes), reversed(outer.sizes), strict=True):
        length *= size
        if size != o_size:
            break
    return length


def is_contiguous_in(box: Box, outer: Box) -> bool:
    """Whether ``box`` is one run of a row-major buffer of ``outer``; empty boxes are."""
    return run_length(box, outer) == box.volume or not box.volume


def runs(box: Box, outer: Box) -> Iterator[tuple[int, int]]:
    """The (start, length) of each contiguous run of ``box`` in a row-major buffer of ``outer``, in rising order.

    Neighbouring runs are maximal for the dimensions they span; an empty box has none.
    """
    if not box.volume:
        return
    length = run_length(box, outer)
    inner = 1
    split = len(box.sizes)
    while split and inner < length:
        split -= 1
        inner *= box.sizes[split]
    steps = strides(outer.sizes)
    first = element_offset(box, outer)
    for index in product(*(range(size) for size in box.sizes[:split])):
        yield first + sum(i * step for i, step in zip(index, steps, strict=False)), length


# Coverage ------------------------------------------------------------------------------------------------------

Defect = tuple[Literal["gap", "overlap", "outside"], Box]


def first_defect(outer: Box, boxes: Sequence[Box]) -> Defect | None:
    """None if ``boxes`` tile ``outer`` exactly, else what is wrong and a box where it is.

    A box that sticks out is ``outside``; elements in no box are a ``gap``, in two an ``overlap``. Empty boxes count for
    nothing. Grids cost O(n log n); the worst tilings O(n**2).
    """
    solid = [box for box in boxes if box.volume]
    for box in solid:
        if not contains(outer, box):
            return "outside", box
    if not outer.volume:
        return None
    return _sweep(outer, solid, 0)


def _sweep(outer: Box, boxes: Sequence[Box], dim: int) -> Defect | None:
    """Cut ``outer`` along ``dim`` wherever a box begins or ends; each slab must be tiled in the dimensions behind."""
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
