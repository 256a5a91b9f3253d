"""The save plan: which rank puts which shard at which byte of which file.

Every element of every tensor is written by exactly one of the ranks that hold it. Equal boxes on several ranks (data
parallel replicas, replicated mesh dimensions, plain tensors of equal name) form a *replica group*: the ranks that hold
the same boxes. Each group shares out what it holds among its members, the largest first, always to the one with the
fewest bytes so far. All that decides this (structures and digests) is known to each member, so a rank finds its own
part without planning anyone else's: `plan_rank` costs what the rank holds; `plan_save` is the coordinator's.

Files of rank 7: ``__7_0.distcp`` has its tensors as one `torch.save` record each, those of 1 MiB and more first with
payloads on 4,096 bytes, the small ones packed behind them; ``__7_1.distcp`` has its objects. A rank that writes
nothing of a kind has no such file.

Guarantees: pure and deterministic; all ranks that plan from the same arguments agree; nothing is planned unless the
shards of a tensor tile it exactly.
Assumes: a rank's local tensors are what ``plan.placement.local_shape`` says (``state.structure`` checks).
There may be a hundred thousand of some kinds of objects here: what is plain data is kept from the garbage collector.
Does not: look at values, render records (``format``), cache (its caller does, by digests).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.boxes import Box, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.format.torch_record import DIRECT_FROM_BYTES, measure, payload_bytes
from holdfast.plan.shares import Held, World
from holdfast.plan.structure import (
    ObjectSpec,
    PathItem,
    Structure,
    TensorSpec,
    is_per_rank,
    name_on_rank,
    path_on_rank,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.format.torch_record import RecordShape

PAGE_BYTES: Final = 4096
"""Files end on it, and large payloads start on it: what O_DIRECT and a memory map want."""
RECORD_ALIGN_BYTES: Final = 64
"""Every record and every object starts on it."""


class PlacedTensor(msgspec.Struct, frozen=True, gc=False):
    """One shard's record in a file of the rank that writes it; file offsets in bytes, tensor offsets in elements."""

    name: str
    """Stored name: the rank in place of the marker."""
    path: tuple[PathItem, ...]
    """Stored path."""
    source: str
    """Name in the structure, marker kept: finds the tensor in the rank's state."""
    dtype: str
    shape: tuple[int, ...]
    """Of the global tensor."""
    offsets: tuple[int, ...]
    """Of the box in the global tensor."""
    sizes: tuple[int, ...]
    """Of the box. A tensor without elements has its whole shape here, even where the rank's local tensor is smaller."""
    local_offsets: tuple[int, ...]
    """Of the box in the rank's local tensor."""
    file: int
    """Index into `RankPlan.files`."""
    record_offset: int
    """Where the torch record starts in the file."""
    payload_offset: int
    """Where the raw bytes start in the file."""
    nbytes: int
    """Of the payload."""
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
    """Where the record starts in the file."""
    capacity: int
    """Bytes set aside for the record: all of them belong to it."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file by its name in the checkpoint directory and its exact size in bytes, a multiple of 4,096."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """All that one rank writes; ``tensors`` and ``objects`` in the order in which they lie in their files."""

    rank: int
    files: tuple[PlannedFile, ...]
    tensors: tuple[PlacedTensor, ...]
    objects: tuple[PlacedObject, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)


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
        known: what `plan_rank` has given for these arguments, by rank: these are not planned again.

    Raises:
        StateMismatch: ranks disagree on a tensor, or their shards overlap or leave a gap; names it and who has what.
        ConfigError: a part of a tensor is held only by ranks outside the group; a mesh or a dtype makes no sense.
    """
    known = known or {}
    missing = [rank for rank in range(len(digests)) if rank not in known]
    planner = _Planner(structures, digests) if missing or not digests else None
    made = {rank: planner.rank_plan(rank) for rank in missing} if planner is not None else {}
    return SavePlan(len(digests), tuple({**known, **made}[rank] for rank in range(len(digests))))


def plan_rank(structures: Mapping[str, Structure], digests: Sequence[str], rank: int) -> RankPlan:
    """``plan_save(structures, digests).ranks[rank]``, at the cost of that rank alone.

    Raises as `plan_save`, for what concerns tensors that ``rank`` holds and for names that ranks disagree on.
    """
    if not 0 <= rank < len(digests):
        raise ConfigError(f"rank {rank} is outside the saving group of {len(digests)} ranks", field="rank")
    return _Planner(structures, digests).rank_plan(rank)


class _Item(msgspec.Struct, frozen=True, gc=False):
    """A shard that may be this rank's to write."""

    spec: TensorSpec
    name: str
    path: tuple[PathItem, ...]
    held: Held
    nbytes: int


class _Planner:
    """What the plans of several ranks have in common."""

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
        return RankPlan(rank, tuple(files), tuple(placed), tuple(objects))

    def _candidates(self, rank: int, structure: Structure) -> Iterator[_Item]:
        """Everything that ``rank`` holds of what is to be written, in the structure's order."""
        held_by_rank = self._world.held_by(rank)
        for spec in structure.tensors:
            itemsize = ITEMSIZE.get(spec.dtype)
            if itemsize is None:
                raise ConfigError(
                    f"tensor {spec.name!r} has dtype {spec.dtype}, which can't be stored", field=spec.name
                )
            if is_per_rank(spec.path):
                if spec.layout is not None:
                    raise ConfigError(f"{spec.name!r} is each rank's own, so it can't be a DTensor", field=spec.name)
                box = whole(spec.shape)
                held = Held(box, box.offsets, (rank,))
                name, path = name_on_rank(spec.path, rank), path_on_rank(spec.path, rank)
                yield _Item(spec, name, path, held, prod(spec.shape) * itemsize)
            else:
                for held in held_by_rank(spec):
                    yield _Item(spec, spec.name, spec.path, held, prod(held.box.sizes) * itemsize)

    def _own(self, rank: int, items: list[_Item]) -> list[_Item]:
        """Those of ``items`` that ``rank`` writes: what it alone holds, and its share of each replica group."""
        shared: dict[int, tuple[tuple[int, ...], list[_Item]]] = {}
        for item in items:
            group = item.held.group
            if len(group) > 1:  # equal groups are one object within a world, and far quicker told apart by identity
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
        """Who of ``group`` writes which of the items that it holds in common: the same, whichever member asks."""
        known = self._winners.get(group)
        if known is not None:
            return known
        # Groups know nothing of one another. If each began with its lowest rank, the ranks that are the lowest of
        # many groups (a whole replica under HSDP) would get the larger half of each: begin at a rank's own place.
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
    """Gives tensors their places in a file; remembers how long headers are."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, tuple[int, ...], int], RecordShape] = {}

    def place(self, items: Sequence[_Item], *, file: int) -> tuple[list[PlacedTensor], int]:
        """Give each item its place in the file with that index. Returns also the end of the last record.

        Large ones first: headers lengthen themselves until a large payload starts on a page, which costs a page each.
        """
        placed: list[PlacedTensor] = []
        end = 0
        for item in _large_first(items):
            spec, held, nbytes = item.spec, item.held, item.nbytes
            box = held.box
            start = -(-end // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES
            # What is before and behind a payload depends on the record's place only up to a page.
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
                    spec.name,
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
    """The plan of a rank that has been told what it writes: these boxes of these tensors, and these objects.

    For savers that have a planner of their own. Files are cut so that payloads beyond ``file_bytes_max`` start a new
    one, objects last in one of theirs. Names and paths are taken as they are: no per-rank markers.

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
    """The items in runs of at most ``bytes_max`` bytes, or of one that is larger."""
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
    """The next multiple of ``step``, or ``value`` if it is one."""
    return -(-value // step) * step
