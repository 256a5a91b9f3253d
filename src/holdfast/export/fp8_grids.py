"""Define block scales of quantized matrices: the scale of each element, and the ranks that need it. Torch-free.

A matrix is cut into a `Grid` of blocks (those at its edges may be smaller), each with one scale. A scale follows from
the largest element of its block, which may be on several ranks: each rank finds its own maximum, then all combine them
(``export.fp8``). After that a rank can quantize its elements before they are sent, like any other cast.

Guarantees: pure. Moves are cut so that no loop crosses the end of a row: a loop steps either through rows or through
columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.errors import ConfigError
from holdfast.format.decoding import prepare_decoding
from holdfast.keymap.moves import Move, retargeted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from holdfast.keymap.moves import MappedTensor

QUANTIZED: Final = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
GROUP_CELLS: Final = 1 << 20
"""Number of scales computed at a time, unless a single grid has more."""


class Grid(NamedTuple):
    """The blocks of one matrix."""

    target: int
    """Index of the matrix among the export's tensors."""
    scales: int
    """Index of its scales among the export's tensors."""
    dtype: str
    """Dtype of the quantized matrix."""
    rows: int
    columns: int
    """Number of columns of the matrix."""
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of blocks by dimension."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])

    @property
    def cells(self) -> int:
        rows, columns = self.shape
        return rows * columns


class Scaled(msgspec.Struct, frozen=True, gc=False):
    """Elements that are divided by the scales of ``grid``: their indices in the whole, row-major matrix."""

    grid: int
    offset: int
    strides: tuple[int, ...]


class Cells(NamedTuple):
    """A rectangle of a grid: rows from ``top`` to before ``bottom``, columns from ``left`` to before ``right``."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def number(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


class ScaleRange(NamedTuple):
    """Scales that a rank writes: ``cells`` from the ``first`` on, row-major, from ``image_offset`` on as ``dtype``."""

    grid: int
    first: int
    cells: int
    image_offset: int
    dtype: str


def grids_of(tensors: Sequence[MappedTensor]) -> tuple[Grid, ...]:
    """The grids of an export, in its order. Raises `ConfigError` for scales that fit no matrix."""
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    grids: list[Grid] = []
    taken: set[int] = set()
    for number, tensor in enumerate(tensors):
        if tensor.scale_of is None:
            continue
        target = numbers.get(tensor.scale_of)
        matrix = None if target is None else tensors[target]
        if target is None or matrix is None or tensor.block is None or target in taken:
            why = "is not there" if matrix is None else "has two" if target in taken else "has blocks of no size"
            raise ConfigError(f"{tensor.name!r} has the scales of {tensor.scale_of!r}, which {why}", field=tensor.name)
        if len(matrix.shape) != 2 or matrix.dtype not in QUANTIZED or min(tensor.block) < 1:
            raise ConfigError(
                f"{tensor.name!r} has block scales of {matrix.name!r}, which is {matrix.dtype} {list(matrix.shape)}; "
                "only matrices of an 8-bit float type have them",
                field=tensor.name,
            )
        grid = Grid(target, number, matrix.dtype, *matrix.shape, tensor.block)
        if tuple(tensor.shape) != grid.shape:
            raise ConfigError(
                f"{tensor.name!r} is {list(tensor.shape)}; {matrix.name!r} has {list(grid.shape)} blocks",
                field=tensor.name,
            )
        taken.add(target)
        grids.append(grid)
    return tuple(grids)


def by_rows(move: Move, grid: Grid) -> list[Move]:
    """``move`` into the grid's matrix in parts, none of whose loops crosses the end of a row."""
    rows = Move("", (grid.rows, grid.columns), 0, (grid.columns, 1), 0, (grid.columns, 1))
    return retargeted(move, rows)


def row_loops(strides: Iterable[int], columns: int) -> int:
    """Count the outermost loops that step through rows; the others step through columns."""
    return sum(step >= columns for step in strides)


def cells_of(grid: Grid, counts: Sequence[int], scaled: Scaled) -> Cells:
    """The blocks in which these elements lie, or might."""
    row, column = divmod(scaled.offset, grid.columns)
    bottom, right = row, column
    for count, step in zip(counts, scaled.strides, strict=True):
        if step >= grid.columns:
            bottom += (count - 1) * step // grid.columns
        else:
            right += (count - 1) * step
    down, across = grid.block
    return Cells(row // down, bottom // down + 1, column // across, right // across + 1)


def around(one: Cells | None, other: Cells) -> Cells:
    """The least rectangle that has both."""
    if one is None:
        return other
    return Cells(
        min(one.top, other.top), max(one.bottom, other.bottom), min(one.left, other.left), max(one.right, other.right)
    )


prepare_decoding(Scaled)
