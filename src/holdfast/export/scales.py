"""Scales of quantized matrices: found from what ranks hold, applied as elements are copied. See ``export.grids``.

A scale is the largest absolute value of its block / the largest number of the 8-bit type, in float32 (1 where that is
0); an element becomes its float32 value / the scale, in the 8-bit type. What isn't finite spoils its block, as it would
if the whole matrix were quantized in one place: the result doesn't depend on who holds what.

Guarantees: elements are read where they lie, some 30,000 at a time, on the calling thread alone. Of the scales a rank
keeps those that its elements need, and at most `GROUP_CELLS` at a time are on their way.
Does not: talk to other ranks: whoever calls `find_scales` brings the means (``export.exchange``).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from holdfast import _torch_compat as compat
from holdfast.export.grids import GROUP_CELLS, row_loops
from holdfast.export.nest import SERIAL_ELEMENTS, cut, strided, typed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from holdfast.export.grids import Cells, Grid
    from holdfast.export.rank_plan import Copy, RankPlan


class Scales:
    """The scales that a rank's elements need, by grid."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        self._grids = grids
        self._kept: dict[int, tuple[Cells, torch.Tensor]] = {}

    def keep(self, number: int, cells: Cells, scales: torch.Tensor) -> None:
        part = scales[cells.top : cells.bottom, cells.left : cells.right]
        self._kept[number] = (cells, part.clone())

    def quantize(self, copy: Copy, memory: torch.Tensor, target: torch.Tensor) -> None:
        """Make a copy of elements that are scaled."""
        if copy.scaled is None:
            raise AssertionError(f"{copy} is not scaled")
        grid = self._grids[copy.scaled.grid]
        cells, scales = self._kept[copy.scaled.grid]
        dtype = getattr(torch, copy.target_dtype)
        most = torch.finfo(dtype).max
        into = typed(target, dtype)
        at = copy.target_at // dtype.itemsize
        for part in _parts(copy, memory, grid, at):
            blocks = scales[part.rows.sub_(cells.top)[:, None], part.columns.sub_(cells.left)[None, :]]
            values = part.values.div_(blocks).clamp_(-most, most).to(dtype)
            place = into.as_strided(part.counts, part.target_steps, into.storage_offset() + part.target_at)
            place.view(torch.uint8).copy_(values.view(torch.uint8).view(part.counts))


def find_scales(
    plan: RankPlan,
    memories: Sequence[torch.Tensor],
    image: torch.Tensor,
    *,
    largest_of_all: Callable[[torch.Tensor], None] = lambda _: None,
    between: Callable[[], None] = lambda: None,
) -> Scales:
    """Find the scales of all matrices, and write to ``image`` those that this rank writes.

    largest_of_all: takes numbers of this rank, and puts into their places the largest that any rank has there; every
        rank calls it equally often, for equally many. between: called now and then; what it raises ends the work.
    """
    scales = Scales(plan.grids)
    copies: dict[int, list[Copy]] = defaultdict(list)
    for copy in plan.quantized():
        if copy.scaled is not None:
            copies[copy.scaled.grid].append(copy)
    for start, stop in pairwise(_groups(plan.grids)):
        found = torch.zeros(sum(grid.cells for grid in plan.grids[start:stop]), dtype=torch.float32)
        at = 0
        for number in range(start, stop):
            grid = plan.grids[number]
            largest = found[at : at + grid.cells].view(grid.shape)
            at += grid.cells
            for copy in copies[number]:
                _take_largest(copy, memories[copy.source], grid, largest)
                between()
        largest_of_all(found)
        at = 0
        for number in range(start, stop):
            grid = plan.grids[number]
            mine = found[at : at + grid.cells]
            at += grid.cells
            mine.div_(torch.finfo(getattr(torch, grid.dtype)).max)
            mine[mine == 0] = 1.0
            for item in plan.scales:
                if item.grid == number:
                    _write(mine[item.first : item.first + item.cells], item.dtype, image, item.image_offset)
            cells = plan.cells.get(number)
            if cells is not None:
                scales.keep(number, cells, mine.view(grid.shape))
    return scales


def _groups(grids: Sequence[Grid]) -> list[int]:
    """Where groups of grids begin and end that have few enough cells together."""
    cuts, cells = [0], 0
    for number, grid in enumerate(grids):
        if number > cuts[-1] and cells + grid.cells > GROUP_CELLS:
            cuts.append(number)
            cells = 0
        cells += grid.cells
    return [*cuts, len(grids)] if grids else []


def _write(scales: torch.Tensor, dtype: str, image: torch.Tensor, at: int) -> None:
    data = compat.as_bytes(scales.to(getattr(torch, dtype)))
    image[at : at + data.numel()].copy_(data)


def _take_largest(copy: Copy, memory: torch.Tensor, grid: Grid, largest: torch.Tensor) -> None:
    """Raise the numbers of ``largest`` to those of the elements that ``copy`` takes."""
    for part in _parts(copy, memory, grid, 0):
        values = part.values.abs_()
        rows, columns = part.rows.tolist(), part.columns
        cuts = [0, *(n for n in range(1, len(rows)) if rows[n] != rows[n - 1]), len(rows)]
        for start, stop in pairwise(cuts):
            largest[rows[start]].scatter_reduce_(0, columns, values[start:stop].amax(0), "amax")


class _Part:
    """A few elements of a scaled copy: ``values`` as a matrix of float32, with the blocks of its rows and columns."""

    __slots__ = ("columns", "counts", "rows", "target_at", "target_steps", "values")

    def __init__(
        self,
        counts: tuple[int, ...],
        values: torch.Tensor,
        blocks: tuple[torch.Tensor, torch.Tensor],
        target: tuple[int, tuple[int, ...]],
    ) -> None:
        self.counts = counts
        self.values = values
        self.rows, self.columns = blocks
        self.target_at, self.target_steps = target


def _parts(copy: Copy, memory: torch.Tensor, grid: Grid, target_at: int) -> Iterator[_Part]:
    scaled = copy.scaled
    if scaled is None:
        raise AssertionError(f"{copy} is not scaled")
    source_dtype = getattr(torch, copy.source_dtype)
    source = typed(memory, source_dtype)
    source_at = copy.source_at // source_dtype.itemsize
    places = cut((copy.counts, source_at, copy.source_strides, target_at, copy.target_strides), SERIAL_ELEMENTS)
    elements = cut((copy.counts, source_at, copy.source_strides, scaled.offset, scaled.strides), SERIAL_ELEMENTS)
    for (counts, at, steps, to, to_steps), (_, _, _, offset, element_steps) in zip(places, elements, strict=True):
        rows, columns = _blocks(grid, counts, offset, element_steps)
        values = strided(source, counts, steps, at).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        yield _Part(counts, values.view(len(rows), len(columns)), (rows, columns), (to, to_steps))


def _blocks(
    grid: Grid, counts: tuple[int, ...], offset: int, steps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block rows and columns of a nest's elements: of the rows that its outer loops make, and of the columns."""
    row, column = divmod(offset, grid.columns)
    outer = row_loops(steps, grid.columns)
    down, across = grid.block
    rows = _values(row, counts[:outer], [step // grid.columns for step in steps[:outer]])
    columns = _values(column, counts[outer:], steps[outer:])
    return rows.div_(down, rounding_mode="floor"), columns.div_(across, rounding_mode="floor")


def _values(start: int, counts: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """All that a loop nest steps through, in order."""
    values = torch.tensor([start])
    for count, step in zip(counts, steps, strict=True):
        values = (values[:, None] + torch.arange(count) * step).view(-1)
    return values
