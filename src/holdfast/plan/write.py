"""The save plan: which rank puts which shard at which byte of which file.

Every element of every tensor is written by exactly one of the ranks that hold it. Equal boxes on several ranks (data
parallel replicas, replicated mesh dimensions, plain tensors of equal name) form a *replica group*: the ranks that hold
the same boxes. Each group divides its boxes among its members, the largest first, always to the one with the fewest
bytes so far. Each member knows all that decides this (structures and digests), so a rank finds its own part without
planning the others': the cost of `plan_rank` depends on what the rank holds; `plan_save` is the coordinator's.

Files of rank 7: ``__7_0.distcp`` has its tensors as one `torch.save` record each: first those of 1 MiB and more, with
payloads aligned to 4,096 bytes, then the small ones without gaps; ``__7_1.distcp`` has its objects. A rank that writes
no tensors or no objects has no such file.

Guarantees: pure and deterministic; all ranks that plan from the same arguments agree; raises unless the shards of a
tensor tile it exactly.
Assumes: a rank's local tensors are as computed by ``plan.placement.local_shape`` (``state.structure`` checks).
Plain-data objects, of which there may be a hundred thousand, are excluded from garbage collection.
Does not: look at values, render records (``format``), cache (its caller does, by digests).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, starmap
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.boxes import Box, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.manifest import PAGE_BYTES, IndexObject, IndexTensor, RankIndex
from holdfast.format.structure import (
    KeysSpec,
    ObjectSpec,
    PathItem,
    Structure,
    TensorSpec,
    is_per_rank,
    name_on_rank,
    path_on_rank,
    source_name,
)
from holdfast.format.torch_record import DIRECT_FROM_BYTES, RECORD_ALIGN_BYTES, measure, payload_bytes
from holdfast.plan.placement import Held, World

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.format.torch_record import RecordShape


# The index of a rank's report: entries in plan order, which is also the order of the tensor checksums.

# Fields of an index entry, which the plan has under the same names. Read together: there may be very many entries.
_tensor_row: Final = attrgetter(*IndexTensor.__struct_fields__)
_object_row: Final = attrgetter(*IndexObject.__struct_fields__)


def index_of(rank_plan: RankPlan) -> RankIndex:
    """Return the index of the files of ``rank_plan``; ``file`` is a position in the plan's list."""
    return RankIndex(
        tensors=tuple(starmap(IndexTensor, map(_tensor_row, rank_plan.tensors))),
        objects=tuple(starmap(IndexObject, map(_object_row, rank_plan.objects))),
        mappings=rank_plan.mappings,
    )


class PlacedTensor(msgspec.Struct, frozen=True, gc=False):
    """One shard's record in a file of the rank that writes it; file offsets in bytes, tensor offsets in elements."""

    name: str
    """Stored name, with the rank in place of the marker."""
    path: tuple[PathItem, ...]
    """Stored path."""
    source: str
    """Name in the structure, with the marker, or of one of several boxes: finds the tensor in the rank's state."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    offsets: tuple[int, ...]
    """Offsets of the box in the global tensor."""
    sizes: tuple[int, ...]
    """Sizes of the box; the whole shape for a tensor without elements, even if the local tensor is smaller."""
    local_offsets: tuple[int, ...]
    """Offsets of the box in the rank's local tensor."""
    file: int
    """Index into `RankPlan.files`."""
    record_offset: int
    """Offset of the torch record in the file."""
    payload_offset: int
    """Offset of the raw bytes in the file."""
    nbytes: int
    """Size of the payload."""
    record_end: int
    """One past the last byte of the record."""


@dataclass(frozen=True, slots=True)
class PlacedObject:
    """One object's record, of fixed capacity, in a file of the rank that writes it."""

    name: str
    path: tuple[PathItem, ...]
    source: str
    file: int
    offset: int
    """Offset of the record in the file."""
    capacity: int
    """Bytes reserved for the record; all of them belong to it."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file by its name in the checkpoint directory and its exact size in bytes, a multiple of 4,096."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Everything that one rank writes; ``tensors`` and ``objects`` in the order of their files."""

    rank: int
    files: tuple[PlannedFile, ...]
    tensors: tuple[PlacedTensor, ...]
    objects: tuple[PlacedObject, ...]
    mappings: tuple[KeysSpec, ...] = ()
    """Keys of the user's mappings, by their stored paths."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def file_offsets(self) -> list[int]:
        """Offset of each file in an image that holds all of them, one behind the other."""
        return list(accumulate((file.size for file in self.files), initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plans of all ranks; ``ranks[r]`` is rank ``r``'s."""

    world: int
    ranks: tuple[RankPlan, ...]


def plan_save(
    structures: Mapping[str, Structure], digests: Sequence[str], *, known: Mapping[int, RankPlan] | None = None
) -> SavePlan:
    """Plan the files of every rank, and check that together they hold the whole state.

    Args:
        structures: each distinct structure by its digest.
        digests: for each rank the digest of its structure; as many as there are ranks in the saving group.
        known: results of `plan_rank` for these arguments, by rank: these are not planned again.

    Raises:
        StateMismatch: ranks disagree on a tensor, or their shards overlap or leave a gap; names it and the ranks.
        ConfigError: a part of a tensor is held only by ranks outside the group; an invalid mesh or dtype.
    """
    known = known or {}
    missing = [rank for rank in range(len(digests)) if rank not in known]
    planner = _Planner(structures, digests) if missing or not digests else None
    made = {rank: planner.rank_plan(rank) for rank in missing} if planner is not None else {}
    return SavePlan(len(digests), tuple({**known, **made}[rank] for rank in range(len(digests))))


def plan_rank(structures: Mapping[str, Structure], digests: Sequence[str], rank: int) -> RankPlan:
    """Return ``plan_save(structures, digests).ranks[rank]``, at the cost of that rank alone.

    Raises as `plan_save`, for tensors that ``rank`` holds and for names that ranks disagree on.
    """
    if not 0 <= rank < len(digests):
        raise ConfigError(f"rank {rank} is outside the saving group of {len(digests)} ranks", field="rank")
    return _Planner(structures, digests).rank_plan(rank)


class _Item(msgspec.Struct, frozen=True, gc=False):
    """A shard that this rank may have to write."""

    spec: TensorSpec
    name: str
    path: tuple[PathItem, ...]
    held: Held
    nbytes: int


class _Planner:
    """Data shared by the plans of several ranks."""

    def __init__(self, structures: Mapping[str, Structure], digests: Sequence[str]) -> None:
        self._world = World(structures, digests)
        self._winners: dict[tuple[int, ...], dict[tuple[str, tuple[int, ...]], int]] = {}
        self._placer = _Placer()

    def rank_plan(self, rank: int) -> RankPlan:
        structure = self._world.structure_of(rank)
        tensors = self._own(rank, list(self._candidates(rank, structure)))
        files: list[PlannedFile] = []
        placed: list[PlacedTensor] = []
        if tensors:
            placed, end = self._placer.place(tensors, file=0)
            files.append(PlannedFile(f"__{rank}_0.distcp", round_up(end, PAGE_BYTES)))
        objects: list[PlacedObject] = []
        end = 0
        for spec in structure.objects:
            if is_per_rank(spec.path) or self._world.object_writer(spec.name) == rank:
                objects.append(_place_object(spec, rank, file=len(files), offset=end))
                end = round_up(end + spec.capacity, RECORD_ALIGN_BYTES)
        if objects:
            files.append(PlannedFile(f"__{rank}_1.distcp", round_up(end, PAGE_BYTES)))
        mappings = tuple(
            KeysSpec(path_on_rank(item.path, rank), item.keys)
            for item in structure.mappings
            if is_per_rank(item.path) or self._world.is_first(rank)
        )
        return RankPlan(rank, tuple(files), tuple(placed), tuple(objects), mappings)

    def _candidates(self, rank: int, structure: Structure) -> Iterator[_Item]:
        """Yield all candidates for writing that ``rank`` holds, in the structure's order."""
        held_by_rank = self._world.held_by(rank)
        for spec in structure.tensors:
            itemsize = ITEMSIZE.get(spec.dtype)
            if itemsize is None:
                raise ConfigError(
                    f"tensor {spec.name!r} has dtype {spec.dtype}, which can't be stored", field=spec.name
                )
            if is_per_rank(spec.path):
                if spec.layout is not None:
                    raise ConfigError(f"{spec.name!r} is a per-rank value, so it can't be a DTensor", field=spec.name)
                box = whole(spec.shape)
                held = Held(box, box.offsets, (rank,))
                name, path = name_on_rank(spec.path, rank), path_on_rank(spec.path, rank)
                yield _Item(spec, name, path, held, prod(spec.shape) * itemsize)
            else:
                for held in held_by_rank(spec):
                    yield _Item(spec, spec.name, spec.path, held, prod(held.box.sizes) * itemsize)

    def _own(self, rank: int, items: list[_Item]) -> list[_Item]:
        """Return the ``items`` that ``rank`` writes: those that it alone holds, and its share of each replica group."""
        shared: dict[int, tuple[tuple[int, ...], list[_Item]]] = {}
        for item in items:
            group = item.held.group
            if len(group) > 1:  # equal groups are one object within a world, and quicker to compare by identity
                shared.setdefault(id(group), (group, []))[1].append(item)
        if not shared:
            return items
        winners = {number: self._share_out(group, members) for number, (group, members) in shared.items()}
        return [
            item
            for item in items
            if len(item.held.group) == 1 or winners[id(item.held.group)][item.name, item.held.box.offsets] == rank
        ]

    def _share_out(self, group: tuple[int, ...], items: list[_Item]) -> dict[tuple[str, tuple[int, ...]], int]:
        """Assign the items that ``group`` holds in common to its members; the result is the same on every member."""
        known = self._winners.get(group)
        if known is not None:
            return known
        # Groups are independent. If each began with its lowest rank, ranks that are the lowest of many groups (a whole
        # replica under HSDP) would get the larger half of each: begin at a position derived from the group.
        turn = (group[0] * 0x9E3779B1 & 0xFFFFFFFF) * len(group) >> 32
        loads = [(0, order, rank) for order, rank in enumerate(group[turn:] + group[:turn])]
        heapify(loads)
        winners: dict[tuple[str, tuple[int, ...]], int] = {}
        for item in sorted(items, key=lambda item: (-item.nbytes, item.name, item.held.box.offsets)):
            load, order, rank = loads[0]
            winners[item.name, item.held.box.offsets] = rank
            heapreplace(loads, (load + item.nbytes, order, rank))
        self._winners[group] = winners
        return winners


class _Placer:
    """Assigns positions in a file; remembers the lengths of headers."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, tuple[int, ...], int], RecordShape] = {}

    def place(self, items: Sequence[_Item], *, file: int) -> tuple[list[PlacedTensor], int]:
        """Give each item its place in the file with that index; also return the end of the last record.

        Large ones first: their headers are padded until the payload starts on a page, which costs up to a page each.
        """
        placed: list[PlacedTensor] = []
        end = 0
        for item in _large_first(items):
            spec, held, nbytes = item.spec, item.held, item.nbytes
            box = held.box
            start = -(-end // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES
            # The bytes around a payload depend on the record's place only modulo a page.
            key = (spec.dtype, box.sizes, start % PAGE_BYTES)
            lengths = self._lengths.get(key)
            if lengths is None:
                lengths = self._lengths[key] = measure(spec.dtype, box.sizes, record_offset=start)
            payload = start + lengths.header_bytes
            end = payload + nbytes + lengths.trailer_bytes
            placed.append(
                PlacedTensor(
                    item.name,
                    item.path,
                    source_name(spec.name, held.number),
                    spec.dtype,
                    spec.shape,
                    box.offsets,
                    box.sizes,
                    held.local_offsets,
                    file,
                    start,
                    payload,
                    nbytes,
                    end,
                )
            )
        return placed, end


def _large_first(items: Sequence[_Item]) -> list[_Item]:
    large = [item for item in items if item.nbytes >= DIRECT_FROM_BYTES]
    return large + [item for item in items if item.nbytes < DIRECT_FROM_BYTES]


def lay_out(
    rank: int, shards: Sequence[tuple[TensorSpec, Box]], objects: Sequence[ObjectSpec], *, file_bytes_max: int
) -> RankPlan:
    """Return the plan of a rank whose assignment is given: these boxes of these tensors, and these objects.

    For savers with their own planner. Payloads beyond ``file_bytes_max`` start a new file; objects come last, in one of
    their own. Names and paths are used as they are: no per-rank markers.

    Raises:
        ConfigError: a dtype can't be stored.
    """
    items = [
        _Item(spec, spec.name, spec.path, Held(box, box.offsets, (rank,)), payload_bytes(spec.dtype, box.sizes))
        for spec, box in shards
    ]
    files: list[PlannedFile] = []
    placed: list[PlacedTensor] = []
    placer = _Placer()
    for part in _cut(_large_first(items), file_bytes_max):
        tensors, end = placer.place(part, file=len(files))
        placed += tensors
        files.append(PlannedFile(f"__{rank}_{len(files)}.distcp", round_up(end, PAGE_BYTES)))
    kept: list[PlacedObject] = []
    end = 0
    for spec in objects:
        kept.append(PlacedObject(spec.name, spec.path, spec.name, len(files), end, spec.capacity))
        end = round_up(end + spec.capacity, RECORD_ALIGN_BYTES)
    if kept:
        files.append(PlannedFile(f"__{rank}_{len(files)}.distcp", round_up(end, PAGE_BYTES)))
    return RankPlan(rank, tuple(files), tuple(placed), tuple(kept))


def _cut(items: Sequence[_Item], bytes_max: int) -> Iterator[list[_Item]]:
    """Yield the items in runs of at most ``bytes_max`` bytes, or of a single larger one."""
    part: list[_Item] = []
    nbytes = 0
    for item in items:
        if part and nbytes + item.nbytes > bytes_max:
            yield part
            part, nbytes = [], 0
        part.append(item)
        nbytes += item.nbytes
    if part:
        yield part


def _place_object(spec: ObjectSpec, rank: int, *, file: int, offset: int) -> PlacedObject:
    if is_per_rank(spec.path):
        name, path = name_on_rank(spec.path, rank), path_on_rank(spec.path, rank)
    else:
        name, path = spec.name, spec.path
    return PlacedObject(name, path, spec.name, file, offset, spec.capacity)


def round_up(value: int, step: int) -> int:
    """Return the next multiple of ``step``, or ``value`` if it is one."""
    return -(-value // step) * step


prepare_decoding(PlacedTensor, _Item)
