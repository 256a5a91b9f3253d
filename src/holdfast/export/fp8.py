"""Compute the scales of quantized matrices and apply them while copying. See ``export.fp8_grids``.

The scale of a block is its largest absolute value / the largest number of the 8-bit type, in float32 (1 if that is 0);
an element becomes its float32 value / the scale, in the 8-bit type. A value that isn't finite spoils its block, as if
the whole matrix were quantized in one place: the result doesn't depend on the sharding.

Guarantees: elements are read in place, some 30,000 at a time, on the calling thread only. A rank keeps only the scales
that its elements need, and at most `GROUP_CELLS` at a time are in transit.
Does not: communicate: the caller of `find_scales` passes the means (``export.transfer``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.boxes import StridedIndex
from holdfast.errors import ConfigError
from holdfast.export.fp8_grids import GROUP_CELLS, row_loops
from holdfast.keymap.hf_default import bare
from holdfast.keymap.rules import Fp8
from holdfast.staging.copier import SERIAL_ELEMENTS, elements_of, strided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.export.fp8_grids import Cells, Grid
    from holdfast.export.rank_plan import Copy, RankExportPlan
    from holdfast.keymap.moves import MappedTensor
    from holdfast.staging.copier import ByteMemory


# Write ``quantization_config`` for ``config.json``. Readers (transformers, and inference engines that follow it) assume
# that every linear layer and every layer of experts is quantized in blocks of one size, unless it is listed in
# ``modules_to_not_convert``. So every matrix without scales is listed, and tied layers without a matrix of their own.

_QUANTIZED: Final = (
    r"^(?!.*(embed|lm_head|norm|\.gate\.|router|wte|wpe))"
    r".*(proj|linear|fc\d?|query|key|value|dense|experts\.\d+\.w\d)\.weight$"
)
"""Names quantized if the dtype says so: matrices of linear layers, except embeddings, heads and routers."""
_SCALE_SUFFIX: Final = "_scale_inv"
_EXPERT: Final = re.compile(r"(.+\.experts)\.\d+\..+", re.DOTALL)


def fp8_rule(fp32_keys: Sequence[str], models: Sequence[nn.Module], *, all_here: bool = True) -> Fp8:
    """The rule for an export whose dtype is float8: matrices of linear layers by their usual names.

    Left alone is what ``fp32_keys`` match, and the matrices of other layers of ``models``, a model or its stages
    (GPT-2's are transposed, say): readers expect no scales there. Where not all stages are here, other ranks don't know
    of such layers: `ConfigError` for one with a usual name.
    """
    others = _of_other_layers(models)
    if not all_here:
        odd = [name for name in others if re.match(_QUANTIZED, name) and not any(re.search(k, name) for k in fp32_keys)]
        if odd:
            raise ConfigError(
                f"HFExport.dtype: `{odd[0]}` is not in a linear layer, which only the ranks of its "
                "stage know; list such layers in fp32_keys",
                field="dtype",
            )
        others = []
    return Fp8(_QUANTIZED, leave=(*fp32_keys, *(f"^{re.escape(name)}$" for name in others)))


def _of_other_layers(models: Sequence[nn.Module]) -> list[str]:
    return [
        f"{name}.weight" if name else "weight"
        for model in models
        for name, module in bare(model).named_modules()
        if not isinstance(module, nn.Linear) and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]


def fp8_config(tensors: Sequence[MappedTensor], tied: Mapping[str, str]) -> dict[str, Any] | None:
    """``quantization_config`` of an export of ``tensors``; None where nothing is quantized, or not as readers expect.

    tied: names of layers' tensors that the export lacks -> the state's tensor that stands for them.
    """
    scales = {tensor.scale_of: tensor for tensor in tensors if tensor.scale_of is not None}
    blocks = {tensor.block for tensor in scales.values()}
    if len(blocks) != 1 or any(tensor.name != f"{of}{_SCALE_SUFFIX}" for of, tensor in scales.items()):
        return None
    (block,) = blocks
    assert block is not None, "scales have blocks"
    sources = {move.source for tensor in scales.values() for move in tensor.moves}
    names = [tensor.name for tensor in tensors if _may_have_scales(tensor) and tensor.name not in scales]
    names += [name for name, standing in tied.items() if standing not in sources]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": _modules(names, scales),
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }


def _may_have_scales(tensor: MappedTensor) -> bool:
    return tensor.scale_of is None and len(tensor.shape) >= 2 and tensor.dtype.startswith(("float", "bfloat"))


def _modules(names: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """The layers that ``names`` are of, in their order; experts together, unless some of these are quantized."""
    divided = {found[1] for name in quantized if (found := _EXPERT.fullmatch(name))}
    modules: dict[str, None] = {}
    for name in names:
        found = _EXPERT.fullmatch(name)
        module = found[1] if found and found[1] not in divided else name.rpartition(".")[0]
        if module:
            modules.setdefault(module)
    return list(modules)


class Scales:
    """The scales that a rank's elements need, by grid."""

    def __init__(self, grids: Sequence[Grid]) -> None:
        self._grids = grids
        self._kept: dict[int, tuple[Cells, torch.Tensor]] = {}

    def keep(self, number: int, cells: Cells, scales: torch.Tensor) -> None:
        part = scales[cells.top : cells.bottom, cells.left : cells.right]
        self._kept[number] = (cells, part.clone())

    def quantize(self, copy: Copy, memory: torch.Tensor, target: ByteMemory) -> None:
        """Make a copy of elements that are scaled."""
        if copy.scaled is None:
            raise AssertionError(f"{copy} is not scaled")
        grid = self._grids[copy.scaled.grid]
        cells, scales = self._kept[copy.scaled.grid]
        dtype = getattr(torch, copy.target_dtype)
        most = torch.finfo(dtype).max
        into = target.elements(dtype)
        at = copy.target_at // dtype.itemsize
        for part in _parts(copy, memory, grid, at):
            blocks = scales[part.rows.sub_(cells.top)[:, None], part.columns.sub_(cells.left)[None, :]]
            values = part.values.div_(blocks).clamp_(-most, most).to(dtype)
            place = into.as_strided(part.counts, part.target_steps, into.storage_offset() + part.target_at)
            place.view(torch.uint8).copy_(values.view(torch.uint8).view(part.counts))


def find_scales(
    plan: RankExportPlan,
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
    """Return the bounds of groups of grids, each small enough in total cells."""
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
    source = elements_of(memory, source_dtype)
    source_at = copy.source_at // source_dtype.itemsize
    places = StridedIndex(copy.counts, source_at, copy.source_strides, target_at, copy.target_strides)
    elements = StridedIndex(copy.counts, source_at, copy.source_strides, scaled.offset, scaled.strides)
    for (counts, at, steps, to, to_steps), (_, _, _, offset, element_steps) in zip(
        places.parts(SERIAL_ELEMENTS), elements.parts(SERIAL_ELEMENTS), strict=True
    ):
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
