"""The read plan: which bytes of which files fill which parts of which destinations.

A wanted box meets the stored boxes it needs; each meeting is a `Transfer`. The functions below it say what a transfer
takes: one contiguous range of the file straight into one contiguous range of the destination (`is_direct`), or a span
that passes through a buffer, cut into pieces that fit it (`row_chunks`).

Guarantees: pure; every element of every wanted box is filled by exactly one transfer, or planning raises. Finding the
stored boxes that a wanted one meets costs the logarithm of their number where they are cut along one dimension.
Assumes: stored payloads and destinations are row-major and without gaps; destinations are told apart by an integer
that the caller understands.
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
    """The raw bytes of one box of a tensor: ``nbytes`` from ``payload_offset`` on in ``file``."""

    box: Box
    file: str
    payload_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint; ``shards`` may come in any order and are kept sorted, each box once, none empty.

    Make it once a checkpoint: construction builds the index that `plan_reads` searches, in O(n log n).

    Raises:
        CheckpointCorrupt: a shard lies outside the tensor, or its bytes are not as many as its elements need.
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
                # The usual case, and the whole of it: of 20,000 such tensors each microsecond here is seen.
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
                unique.setdefault(box, shard)  # of replicas stored twice, the first will do
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
        """The shards that have elements of ``box``, each with the elements that it has."""
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
    """``box`` of tensor ``name`` is to fill its part of destination ``dest``, a buffer that covers ``dest_box``.

    Both boxes are in the tensor's own coordinates; ``box`` lies in ``dest_box``.
    """

    name: str
    box: Box
    dest: int
    dest_box: Box


class Transfer(NamedTuple):
    """``region`` of a tensor goes from a stored shard to a destination; boxes are in the tensor's own coordinates."""

    name: str
    file: str
    payload_offset: int
    """Where the payload that holds ``stored`` starts in the file."""
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
    """Transfers in the order of file name and first byte."""

    transfers: tuple[Transfer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that arrive at the destinations."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def by_file(self) -> dict[str, list[Transfer]]:
        """The transfers of each file, in the order of their first byte."""
        files: dict[str, list[Transfer]] = {}
        for transfer in self.transfers:
            files.setdefault(transfer.file, []).append(transfer)
        return files


def plan_reads(wants: Iterable[Want], stored: Mapping[str, StoredTensor]) -> ReadPlan:
    """Plan the transfers that fill every wanted box.

    A wanted box without elements needs no transfer, but its tensor must be stored.

    Raises:
        StateMismatch: wanted tensors that are not stored (all are named), or a box outside the stored tensor.
        CheckpointCorrupt: the stored shards leave out a part of a wanted box; names the tensor and the part.
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
            # What is wanted whole, as nearly everything is, needs no arithmetic.
            keys.append((file, (start, start + nbytes) if region is stored_box else byte_span(transfer), want.dest))
    in_order = sorted(zip(keys, transfers, strict=True), key=itemgetter(0))
    return ReadPlan(tuple(transfer for _, transfer in in_order))


def _sources(want: Want, tensor: StoredTensor) -> list[tuple[StoredShard, Box]]:
    """Disjoint regions that make up the wanted box, each with a shard that has it."""
    if len(tensor.shards) == 1 and tensor.shards[0].box == want.box:
        return [(tensor.shards[0], tensor.shards[0].box)]
    found, lacking = disjoint(want.box, tensor.meeting(want.box))
    if lacking is not None:
        raise _absent(want, tensor, lacking)
    return found


def disjoint(box: Box, meeting: Iterable[tuple[StoredShard, Box]]) -> tuple[list[tuple[StoredShard, Box]], Box | None]:
    """Disjoint regions that make up ``box``, each with a shard that has it; and a part of it that no shard has.

    meeting: the shards that meet it, each with what it has of it, as `StoredTensor.meeting` gives them.
    """
    found = list(meeting)
    if len(found) == 1 and found[0][1] == box:
        return found, None
    defect = first_defect(box, [region for _, region in found])
    if defect is None:
        return found, None
    if defect[0] == "gap":
        return [], defect[1]
    # Shards overlap, as in checkpoints of savers that keep replicas: take from each what none before it had.
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
        f"tensor {want.name!r} ({tensor.dtype} {list(tensor.shape)}): nothing stored holds its part {part} "
        f"(it has {len(tensor.shards)} shards in {len(files)} files). The checkpoint is not whole: load another step",
        path=files[0] if files else "",
        tensor=want.name,
    )


def most_cut(boxes: Iterable[Box], ndim: int) -> int:
    """The dimension in which boxes start at the most places: the one to search by."""
    starts: list[set[int]] = [set() for _ in range(ndim)]
    for box in boxes:
        for dim, offset in enumerate(box.offsets):
            starts[dim].add(offset)
    return max(range(ndim), key=lambda dim: len(starts[dim]), default=0)


def _start(shard: StoredShard, axis: int) -> int:
    return shard.box.offsets[axis] if shard.box.offsets else 0


# What a transfer takes -----------------------------------------------------------------------------------------


def byte_span(transfer: Transfer) -> tuple[int, int]:
    """The region's first byte in the file, and one past its last; bytes of others may lie between."""
    base = transfer.payload_offset
    if transfer.region is transfer.stored:
        return base, base + prod(transfer.region.sizes) * transfer.itemsize
    first, end = element_span(transfer.region, transfer.stored)
    return base + first * transfer.itemsize, base + end * transfer.itemsize


def dest_offset(transfer: Transfer) -> int:
    """Bytes from the start of the destination to the region's first element."""
    if transfer.region == transfer.dest_box:
        return 0
    return element_offset(transfer.region, transfer.dest_box) * transfer.itemsize


def is_direct(transfer: Transfer) -> bool:
    """Whether the region is one run of bytes in the file and one in the destination: no buffer is needed."""
    if transfer.region == transfer.stored == transfer.dest_box:
        return True
    return is_contiguous_in(transfer.region, transfer.stored) and is_contiguous_in(transfer.region, transfer.dest_box)


def row_chunks(transfer: Transfer, max_bytes: int) -> Iterator[Transfer]:
    """Cut a transfer along its outer dimensions into ones that are direct, or whose span is at most ``max_bytes``.

    In the order of the file. A run that is contiguous on both sides is never cut, however long: it needs no buffer.
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
        piece = Box(
            (*region.offsets[:dim], region.offsets[dim] + row, *region.offsets[dim + 1 :]),
            (*region.sizes[:dim], min(rows, region.sizes[dim] - row), *region.sizes[dim + 1 :]),
        )
        yield from row_chunks(transfer._replace(region=piece), max_bytes)
