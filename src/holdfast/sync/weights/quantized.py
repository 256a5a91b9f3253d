"""Quantize what is published as fp8: values and scales of one version, made together by all publisher ranks.

    grids of all matrices -> the same on every rank? -> largest of each block, over all ranks -> scales -> values

The scale of a block follows from its largest element, which may be on several ranks, so ranks tell one another theirs
(``export.transfer``). Then each quantizes what it has (``export.fp8``), into host memory that is kept for the next
version: a byte for each element that this rank has, and all scales. Every rank publishes all scales, as replicas.

Guarantees: values and scales are, bit for bit, those of an export of the same weights. Where one rank fails, so do the
others, with the same cause, before anything is published. Takes no memory beside that but for pieces of 4 MiB of what
isn't in host memory.
Assumes: all ranks publish the same versions, in the same order; one thread.
Does not: choose what is quantized (``keymap.rules.Fp8``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import element_offset, strides, whole
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.group import open_group
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.export.exporter import exchange_of
from holdfast.export.fp8 import find_scales
from holdfast.export.fp8_grids import Scaled, ScaleRange, around, cells_of, grids_of
from holdfast.export.inputs import OnDemand
from holdfast.export.rank_plan import ELEMENT_ALIGN_BYTES, BufferRegion, Copy, RankExportPlan
from holdfast.export.transfer import run_copies
from holdfast.format.structure import digest_of
from holdfast.plan.write import round_up
from holdfast.staging.copier import lies_as_it_is
from holdfast.state.entries import WholePlace, torch_dtype
from holdfast.sync.weights.agreed import RankSpec, SpecExchange
from holdfast.sync.weights.pieces import TensorParts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.coordination.deadline import Deadline
    from holdfast.export.fp8 import Scales
    from holdfast.export.fp8_grids import Cells, Grid
    from holdfast.sync.weights.pieces import Sendable, Weights
    from holdfast.sync.weights.transform import HeldPart, MadeWeights

_SCALES: Final = "float32"


class Quantizer:
    """One publisher rank; made on all of them, with the same process group."""

    def __init__(self, process_group: Any | None) -> None:
        self._group = group = open_group(process_group, purpose="sync-fp8")
        self._exchange = exchange_of(group, "fp8")
        self._looks = SpecExchange(group.board)
        self._count = 0
        self._planned: _Planned | None = None

    def quantized(self, made: MadeWeights, version: int, deadline: Deadline) -> Weights:
        """Return ``made`` with what is quantized, and its scales, in the key map's order."""
        planned = self._planned
        if planned is None or planned.made is not made:
            planned = self._planned = _Planned(made, self._group.rank, self._group.world)
        memories = planned.memories()
        if self._exchange is None:
            scales = find_scales(planned.plan, memories, planned.image)
        else:
            key = self._agreed(planned.digest, version, deadline)
            scales = self._exchange.find_scales(
                planned.plan, memories, planned.image, key=key, timeout_s=max(0.001, deadline.left_s())
            )
        return planned.filled(memories, scales)

    def fail(self, error: BaseException, version: int) -> None:
        """Tell the other ranks that this one has nothing to quantize; doesn't wait for them."""
        rank = self._group.rank
        self._looks.fail(RankSpec(rank, version, "", failure=RankFailure.of(error, rank=rank)))

    def _agreed(self, digest: str, version: int, deadline: Deadline) -> str:
        """Return a key for what the ranks do together, once they agree on what that is."""
        self._count += 1
        heard = self._looks.exchange(RankSpec(self._group.rank, version, digest, capture=self._count), deadline)
        other = next((said.rank for said in heard if said.digest != heard[0].digest), None)
        if other is not None:
            raise ConfigError(
                f"dtype: ranks {heard[0].rank} and {other} would quantize other matrices: each block's scale is found "
                "by all ranks together, so all of them need all names, as with FSDP or tensor parallelism. With "
                "pipeline stages, publish bfloat16",
                field="dtype",
            )
        return f"scales/{heard[0].capture}"

    def close(self) -> None:
        """Close the links, and drop all references to weights; idempotent."""
        self._planned = None
        if self._exchange is not None:
            self._exchange.close()
        self._group.board.close()


class _Planned:
    """All that quantizing takes for as long as the weights lie where they are."""

    def __init__(self, made: MadeWeights, rank: int, world: int) -> None:
        self.made = made
        grids = grids_of(made.mapping.tensors)
        self.digest = digest_of(msgspec.msgpack.encode([(made.mapping.tensors[g.target].name, g) for g in grids]))
        self._grids = grids
        self._held: list[HeldPart] = []
        self._regions: list[BufferRegion] = []
        numbers: dict[int, int] = {}
        copies: list[Copy] = []
        cells: dict[int, Cells] = {}
        self._values: dict[str, list[tuple[WholePlace, int]]] = {}
        self._scales: dict[str, tuple[Grid, int]] = {}
        at = 0
        for number, grid in enumerate(grids):
            target = made.mapping.tensors[grid.target]
            whole_box = whole(target.shape)
            for one in made.quantized[target.name]:
                held = one.held
                if id(held) not in numbers:
                    numbers[id(held)] = len(self._held)
                    self._held.append(held)
                    self._regions.append(BufferRegion(target.name, held.box, held.offsets, tuple(held.local.shape)))
                scaled = Scaled(number, element_offset(one.box, whole_box), (grid.columns, 1))
                cells[number] = around(cells.get(number), cells_of(grid, one.box.sizes, scaled))
                dtype = compat.dtype_name(held.local.dtype)
                copies.append(
                    Copy(
                        one.box.sizes,
                        numbers[id(held)],
                        dtype,
                        one.offset * ITEMSIZE[dtype],
                        one.steps,
                        target.dtype,
                        at,
                        strides(one.box.sizes),
                        scaled,
                    )
                )
                self._values.setdefault(target.name, []).append((WholePlace(target.shape, one.box), at))
                at = round_up(at + one.box.volume * ITEMSIZE[target.dtype], ELEMENT_ALIGN_BYTES)
        ranges = []
        for number, grid in enumerate(grids):
            self._scales[made.mapping.tensors[grid.scales].name] = grid, at
            ranges.append(ScaleRange(number, 0, grid.cells, at, _SCALES))
            at = round_up(at + grid.cells * ITEMSIZE[_SCALES], ELEMENT_ALIGN_BYTES)
        self.image = torch.empty(at, dtype=torch.uint8)
        self.plan = RankExportPlan(
            rank=rank,
            world=world,
            parts=(),
            image_bytes=at,
            constants=(),
            memories=tuple(self._regions),
            local=tuple(copies),
            rounds=(),
            bucket_bytes=0,
            grids=grids,
            cells=cells,
            scales=tuple(ranges),
        )
        self._made: dict[str, Sendable] | None = None

    def memories(self) -> OnDemand:
        """Return the memories that the plan copies from: as they lie, or brought to the host piece by piece."""
        held = {(region.source, region.box): part for region, part in zip(self._regions, self._held, strict=True)}

        def find(region: BufferRegion) -> torch.Tensor | None:
            local = held[region.source, region.box].local
            return compat.as_bytes(local) if lies_as_it_is(local) else None

        def bring(region: BufferRegion, room: torch.Tensor) -> torch.Tensor:
            local = held[region.source, region.box].local
            there = room[: local.nbytes]
            compat.copy_(there.view(local.dtype).view(local.shape), local)
            return there

        return OnDemand(self._regions, find=find, make=bring)

    def filled(self, memories: Sequence[torch.Tensor], scales: Scales) -> Weights:
        """Quantize, and return all that is published: the same objects each time."""
        run_copies(self.plan.local, memories, self.image, scales=scales)
        if self._made is None:
            self._made = {}
            for target in self.made.mapping.tensors:
                found = self._found(target.name, torch_dtype(target.dtype))
                if found is not None:
                    self._made[target.name] = found
        return self._made

    def _found(self, name: str, dtype: torch.dtype) -> Sendable | None:
        if name in self._scales:
            grid, at = self._scales[name]
            return self._view(at, grid.shape, dtype)
        if name in self.made.quantized:
            parts = []
            for place, at in self._values.get(name, ()):
                assert place.box is not None
                parts.append((self._view(at, place.box.sizes, dtype), place))
            return TensorParts(parts, dtype) if parts else None
        return self.made.plain.get(name)

    def _view(self, at: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = whole(sizes).volume * dtype.itemsize
        return self.image[at : at + nbytes].view(dtype).view(sizes)
