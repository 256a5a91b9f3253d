"""The read plan: which bytes of which files fill which parts of which destinations.

A wanted box is intersected with the stored boxes; each intersection is a `Transfer`. A transfer is either one
contiguous range of the file read straight into one contiguous range of the destination (`is_direct`), or a span that
passes through a buffer, cut into pieces that fit it (`row_chunks`).

Guarantees: pure; every element of every wanted box is filled by exactly one transfer, or planning raises. Finding the
stored boxes that overlap a wanted one costs the logarithm of their number if they are cut along one dimension.
Assumes: stored payloads and destinations are row-major and without gaps; destinations are identified by integers that
the caller understands.
Does not: read, verify, or know where the list of stored shards comes from.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from holdfast.boxes import (
    Box,
    contains,
    element_offset,
    element_span,
    first_defect,
    intersect,
    is_contiguous_in,
    strides,
    subtract,
    whole,
)
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class StoredShard(NamedTuple):
    """The raw bytes of one box of a tensor: ``nbytes`` from ``payload_offset`` in ``file``."""

    box: Box
    file: str
    payload_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint; ``shards`` may come in any order; kept sorted, each box once, none empty.

    Make one per checkpoint: construction builds the index that `plan_reads` searches, in O(n log n).

    Raises:
        CheckpointCorrupt: a shard is outside the tensor, or its byte count doesn't match its elements.
        ConfigError: the dtype is unknown here.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]
    itemsize: int = field(init=False, repr=False, compare=False)
    _axis: int = field(init=False, repr=False, compare=False)
    _starts: list[int] = field(init=False, repr=False, compare=False)
    _reach: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        itemsize = ITEMSIZE.get(self.dtype)
        if itemsize is None:
            raise ConfigError(f"tensor {self.name!r} is stored as {self.dtype}, which is unknown here", field=self.name)
        shape = self.shape
        set_field = object.__setattr__
        set_field(self, "itemsize", itemsize)
        if len(self.shards) == 1:
            box, _, _, nbytes = self.shards[0]
            if nbytes and box.sizes == shape and not any(box.offsets) and prod(shape) * itemsize == nbytes:
                # The usual case, handled at once: with 20,000 such tensors each microsecond counts.
                set_field(self, "_axis", 0)
                set_field(self, "_starts", [])
                set_field(self, "_reach", 0)
                return
        unique: dict[Box, StoredShard] = {}
        for shard in self.shards:
            box, _, _, nbytes = shard
            if not contains(whole(shape), box) or prod(box.sizes) * itemsize != nbytes:
                raise self._bad(shard, itemsize)
            if nbytes:
                unique.setdefault(box, shard)  # replicas stored twice: the first one is used
        axis = most_cut(unique, len(shape))
        ordered = tuple(sorted(unique.values(), key=lambda shard: (_start(shard, axis), shard)))
        set_field(self, "shards", ordered)
        set_field(self, "_axis", axis)
        set_field(self, "_starts", [_start(shard, axis) for shard in ordered])
        set_field(self, "_reach", max((shard.box.sizes[axis] for shard in ordered), default=0) if self.shape else 0)

    def _bad(self, shard: StoredShard, itemsize: int) -> CheckpointCorrupt:
        box, file, payload_offset, nbytes = shard
        return CheckpointCorrupt(
            f"{file}: tensor {self.name!r} ({self.dtype} {list(self.shape)}) has a shard of {nbytes} bytes at offsets "
            f"{list(box.offsets)} with sizes {list(box.sizes)}; expected {prod(box.sizes) * itemsize} bytes inside the "
            "tensor. The checkpoint's index is damaged: load another step",
            path=file,
            tensor=self.name,
            byte_range=(payload_offset, payload_offset + nbytes),
        )

    def meeting(self, box: Box) -> Iterator[tuple[StoredShard, Box]]:
        """Yield the shards that have elements of ``box``, each with the elements that it has."""
        shards: Sequence[StoredShard] = self.shards
        if len(shards) == 1:
            if shards[0].box == box:
                yield shards[0], shards[0].box
                return
        elif self.shape:
            start = box.offsets[self._axis]
            first = bisect_right(self._starts, start - self._reach)
            shards = shards[first : bisect_left(self._starts, start + box.sizes[self._axis])]
        for shard in shards:
            shared = intersect(shard.box, box)
            if shared is not None:
                yield shard, shared


class Want(NamedTuple):
    """``box`` of tensor ``name`` has to fill its part of destination ``dest``, a buffer that covers ``dest_box``.

    Both boxes are in the tensor's own coordinates; ``box`` is within ``dest_box``.
    """

    name: str
    box: Box
    dest: int
    dest_box: Box


class Transfer(NamedTuple):
    """``region`` of a tensor goes from a stored shard to a destination; boxes are in the tensor's coordinates."""

    name: str
    file: str
    payload_offset: int
    """Offset in the file of the payload that holds ``stored``."""
    stored: Box
    region: Box
    dest: int
    dest_box: Box
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes that arrive at the destination."""
        return self.region.volume * self.itemsize


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Transfers, ordered by file name and first byte."""

    transfers: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that arrive at the destinations."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def by_file(self) -> dict[str, list[Transfer]]:
        """Return the transfers of each file, ordered by their first byte."""
        files: dict[str, list[Transfer]] = {}
        for transfer in self.transfers:
            files.setdefault(transfer.file, []).append(transfer)
        return files


def plan_reads(wants: Iterable[Want], stored: Mapping[str, StoredTensor]) -> ReadPlan:
    """Plan the transfers that fill every wanted box.

    A wanted box without elements needs no transfer, but its tensor must be stored.

    Raises:
        StateMismatch: wanted tensors that are not stored (all are named), or a box outside the stored tensor.
        CheckpointCorrupt: the stored shards lack a part of a wanted box; names the tensor and the part.
        ConfigError: a wanted box is not within its destination's.
    """
    wants = list(wants)
    missing = sorted({want.name for want in wants if want.name not in stored})
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise StateMismatch(f"the checkpoint has no tensor {shown}", missing=tuple(missing))
    transfers: list[Transfer] = []
    keys: list[tuple[str, tuple[int, int], int]] = []
    for want in wants:
        tensor = stored[want.name]
        box = want.box
        if (box.sizes != tensor.shape or any(box.offsets)) and not contains(whole(tensor.shape), box):
            raise StateMismatch(
                f"tensor {want.name!r}: wanted {want.box}, but the checkpoint has shape {list(tensor.shape)}",
                mismatched=(want.name,),
            )
        if box is not want.dest_box and not contains(want.dest_box, box):
            raise ConfigError(f"tensor {want.name!r}: wanted {want.box} is not within its destination {want.dest_box}")
        for (stored_box, file, start, nbytes), region in _sources(want, tensor):
            transfer = Transfer(want.name, file, start, stored_box, region, want.dest, want.dest_box, tensor.itemsize)
            transfers.append(transfer)
            # Nearly all boxes are wanted whole, which needs no arithmetic.
            keys.append((file, (start, start + nbytes) if region is stored_box else byte_span(transfer), want.dest))
    in_order = sorted(zip(keys, transfers, strict=True), key=itemgetter(0))
    return ReadPlan(tuple(transfer for _, transfer in in_order))


def _sources(want: Want, tensor: StoredTensor) -> list[tuple[StoredShard, Box]]:
    """Return disjoint regions that make up the wanted box, each with a shard that has it."""
    if len(tensor.shards) == 1 and tensor.shards[0].box == want.box:
        return [(tensor.shards[0], tensor.shards[0].box)]
    found, lacking = disjoint(want.box, tensor.meeting(want.box))
    if lacking is not None:
        raise _absent(want, tensor, lacking)
    return found


def disjoint(box: Box, meeting: Iterable[tuple[StoredShard, Box]]) -> tuple[list[tuple[StoredShard, Box]], Box | None]:
    """Return disjoint regions that make up ``box``, each with a shard that has it; and a part that none has.

    meeting: the overlapping shards, each with its part of the box, as from `StoredTensor.meeting`.
    """
    found = list(meeting)
    if len(found) == 1 and found[0][1] == box:
        return found, None
    defect = first_defect(box, [region for _, region in found])
    if defect is None:
        return found, None
    if defect[0] == "gap":
        return [], defect[1]
    # Shards overlap, for example if a saver keeps replicas: take from each what no earlier one had.
    lacking = [box]
    chosen = []
    for shard, region in found:
        rest = []
        for part in lacking:
            shared = intersect(part, region)
            if shared is None:
                rest.append(part)
            else:
                chosen.append((shard, shared))
                rest.extend(subtract(part, shared))
        lacking = rest
    return chosen, lacking[0] if lacking else None


def _absent(want: Want, tensor: StoredTensor, part: Box) -> CheckpointCorrupt:
    files = sorted({shard.file for shard in tensor.shards})
    return CheckpointCorrupt(
        f"tensor {want.name!r} ({tensor.dtype} {list(tensor.shape)}): its part {part} is not stored "
        f"(it has {len(tensor.shards)} shards in {len(files)} files). The checkpoint is incomplete: load another step",
        path=files[0] if files else "",
        tensor=want.name,
    )


def most_cut(boxes: Iterable[Box], ndim: int) -> int:
    """Return the dimension in which boxes start at the most places: the best one to search by."""
    starts: list[set[int]] = [set() for _ in range(ndim)]
    for box in boxes:
        for dim, offset in enumerate(box.offsets):
            starts[dim].add(offset)
    return max(range(ndim), key=lambda dim: len(starts[dim]), default=0)


def _start(shard: StoredShard, axis: int) -> int:
    return shard.box.offsets[axis] if shard.box.offsets else 0


# Layout of a transfer ------------------------------------------------------------------------------------------


def byte_span(transfer: Transfer) -> tuple[int, int]:
    """Return the offsets in the file of the region's first byte and past its last; other bytes may lie between."""
    base = transfer.payload_offset
    if transfer.region is transfer.stored:
        return base, base + prod(transfer.region.sizes) * transfer.itemsize
    first, end = element_span(transfer.region, transfer.stored)
    return base + first * transfer.itemsize, base + end * transfer.itemsize


def dest_offset(transfer: Transfer) -> int:
    """Return the bytes from the start of the destination to the region's first element."""
    if transfer.region == transfer.dest_box:
        return 0
    return element_offset(transfer.region, transfer.dest_box) * transfer.itemsize


def is_direct(transfer: Transfer) -> bool:
    """Return True if the region is contiguous in the file and in the destination, so that no buffer is needed."""
    if transfer.region == transfer.stored == transfer.dest_box:
        return True
    return is_contiguous_in(transfer.region, transfer.stored) and is_contiguous_in(transfer.region, transfer.dest_box)


def row_chunks(transfer: Transfer, max_bytes: int) -> Iterator[Transfer]:
    """Cut a transfer along its outer dimensions into direct ones, or ones with a span of at most ``max_bytes``.

    In file order. A run that is contiguous on both sides is never cut, however long: it needs no buffer.
    """
    if max_bytes < transfer.itemsize:
        raise ConfigError(f"max_bytes is {max_bytes}; expected at least one element of {transfer.itemsize}")
    if is_direct(transfer):
        yield transfer
        return
    start, end = byte_span(transfer)
    if end - start <= max_bytes:
        yield transfer
        return
    region = transfer.region
    dim = next(dim for dim, size in enumerate(region.sizes) if size > 1)
    step = strides(transfer.stored.sizes)[dim] * transfer.itemsize
    one = (end - start) - (region.sizes[dim] - 1) * step
    rows = max(1, (max_bytes - one) // step + 1)
    for row in range(0, region.sizes[dim], rows):
        piece = region.narrow(dim, row, min(rows, region.sizes[dim] - row))
        yield from row_chunks(transfer._replace(region=piece), max_bytes)
