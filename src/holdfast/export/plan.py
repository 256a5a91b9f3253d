"""The export plan: which rank writes which bytes of which file, and what every rank copies, sends and receives for it.

    plan = plan_export(layout.files, mapping, sources, world=8)
    mine = plan.rank(3)

Every block of 1 MiB of every file has one owner (``export.ownership``), whose export image holds it. An element that
the owner holds is copied there from its own memory; any other is sent by one of the ranks that hold it, cast before it
travels. What two ranks have for one another is a stream of bytes, cut into as many rounds as it takes for nobody to
send and receive more than a bucket in one of them (``export.rounds``).

Guarantees: pure and deterministic: ranks that plan from equal arguments agree. Every byte of every file is written by
one rank; every element comes from one. Carrying the plan out takes a rank's export image and at most
`BUFFER_BYTES_MAX` of memory. What does not fit together (a tensor of a file that nobody maps, a part of a source that
nobody holds, ...) is a `ConfigError` that names it.
Assumes: the moves of a tensor fill it exactly once (``export.moves.first_defect``).
Does not: look at data or memory (``export.fill``), talk to anyone (``export.exchange``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.export.grids import Grid, by_rows, grids_of
from holdfast.export.ownership import BLOCK_BYTES, Owned, Span, share_blocks
from holdfast.export.rank_plan import BUCKETS, Part, RankPlan, RankWork, plan_rank
from holdfast.export.rounds import Leg, Pair, Stream, round_count, target_part
from holdfast.export.sources import Holdings, Memory, Piece, Source, check_source
from holdfast.plan.write import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.boxes import Box
    from holdfast.export.moves import KeyMapping, MappedTensor, Move

BUCKET_BYTES: Final = 16 << 20
BUFFER_BYTES_MAX: Final = 64 << 20
PAGE_BYTES: Final = 4096


class TensorPlace(Protocol):
    """Bytes ``start`` to ``stop`` of a file are a tensor, row-major."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class FileLayout(Protocol):
    """A file: ``header`` is its first bytes, ``tensors`` follow without gaps, up to ``size``."""

    @property
    def name(self) -> str: ...
    @property
    def header(self) -> bytes: ...
    @property
    def tensors(self) -> Sequence[TensorPlace]: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Flow:
    """What one move takes of one piece, on its way into a tensor that begins at byte ``start`` of its file."""

    target: int
    itemsize: int
    start: int
    piece: Piece
    move: Move

    @property
    def first(self) -> int:
        return self.start + self.move.target_offset * self.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.move.target_stop * self.itemsize


def plan_export(
    files: Sequence[FileLayout],
    mapping: KeyMapping,
    sources: Mapping[str, Source],
    *,
    world: int,
    bucket_bytes: int = BUCKET_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> ExportPlan:
    """Plan the export of ``sources``, as ``mapping`` says, into ``files``, by ``world`` ranks.

    bucket_bytes: what a rank sends and receives in one round, at most; there are two such buffers. Up to 32 MiB.
    block_bytes: what has one owner, a multiple of 16. What writes and checks files takes parts of whole MiB.

    Raises:
        ConfigError: the arguments don't fit together; names the file or tensor.
    """
    if not 0 < bucket_bytes <= BUFFER_BYTES_MAX // BUCKETS:
        raise ConfigError(
            f"bucket_bytes is {bucket_bytes}, expected 1 to {BUFFER_BYTES_MAX // BUCKETS}", field="bucket_bytes"
        )
    if world < 1:
        raise ConfigError(f"there are {world} ranks to export, expected at least 1", field="world")
    check_files(files, mapping)
    grids = grids_of(mapping.tensors)
    flows = list(_flows(files, mapping, sources, world, grids))
    held = [(file.size, _spans(found, block_bytes)) for file, found in zip(files, flows, strict=True)]
    placed = _place(files, share_blocks(held, world, block_bytes), world, block_bytes)
    local, streams = _route(flows, placed, world)
    parts: list[list[Part]] = [[] for _ in range(world)]
    for pairs in placed:
        for owner, part in pairs:
            parts[owner].append(part)
    return ExportPlan(
        world=world,
        rounds=round_count(streams, bucket_bytes),
        bucket_bytes=bucket_bytes,
        parts=tuple(map(tuple, parts)),
        files=tuple(files),
        tensors=mapping.tensors,
        sources=sources,
        local=tuple(map(tuple, local)),
        streams=streams,
        grids=grids,
    )


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The plan of all ranks; made by `plan_export`. ``rank`` gives the part of one."""

    world: int
    rounds: int
    """Of transfers; 0 where nothing travels."""
    bucket_bytes: int
    parts: tuple[tuple[Part, ...], ...]
    """Of each rank, in the order in which they lie in its image: by file, then by offset."""
    files: tuple[FileLayout, ...]
    tensors: tuple[MappedTensor, ...]
    sources: Mapping[str, Source]
    local: tuple[tuple[Leg, ...], ...]
    """What each rank has itself of what it writes."""
    streams: Mapping[Pair, Stream]
    grids: tuple[Grid, ...]
    """Of what is quantized."""

    def rank(self, rank: int, memories: Mapping[tuple[str, Box], Memory] | None = None) -> RankPlan:
        """What ``rank`` does. Costs what that rank copies, sends and receives.

        memories: where it has each box of a source that it holds (``sources.memories_of``); None: each in a buffer of
            its own.
        """
        work = RankWork(
            rank=rank,
            world=self.world,
            rounds=self.rounds,
            parts=self.parts[rank],
            headers={file.name: file.header for file in self.files},
            tensors=self.tensors,
            sources=self.sources,
            local=self.local[rank],
            streams=self.streams,
            grids=self.grids,
            scale_places=self._scale_places(),
        )
        plan = plan_rank(work, memories or {})
        if plan.bucket_bytes > self.bucket_bytes or plan.memory_bytes > plan.image_bytes + BUFFER_BYTES_MAX:
            raise AssertionError(f"rank {rank}: a round takes {plan.bucket_bytes} bytes, not {self.bucket_bytes}")
        return plan

    @property
    def exchanges(self) -> bool:
        """Whether ranks have anything to tell one another."""
        return self.world > 1 and bool(self.rounds or self.grids)

    def _scale_places(self) -> dict[str, list[tuple[int, int, int]]]:
        numbers = {self.tensors[grid.scales].name: number for number, grid in enumerate(self.grids)}
        return (
            {
                file.name: [
                    (place.start, place.stop, numbers[place.name]) for place in file.tensors if place.name in numbers
                ]
                for file in self.files
            }
            if numbers
            else {}
        )


# What goes where -----------------------------------------------------------------------------------------------


def check_files(files: Sequence[FileLayout], mapping: KeyMapping) -> None:
    """Raise `ConfigError` unless the files hold each mapped tensor once, without gaps, in its size."""
    mapped = {tensor.name: tensor for tensor in mapping.tensors}
    placed: set[str] = set()
    for file in files:
        end = len(file.header)
        for place in file.tensors:
            tensor = mapped.get(place.name)
            if tensor is None or place.name in placed:
                why = "is not mapped" if tensor is None else "has two places"
                raise ConfigError(f"tensor {place.name!r} of {file.name} {why}", field=place.name)
            placed.add(place.name)
            nbytes = prod(tensor.shape) * _itemsize(tensor)
            if place.start != end or place.stop - place.start != nbytes:
                raise ConfigError(
                    f"tensor {place.name!r} ({tensor.dtype} {list(tensor.shape)}) takes {nbytes} bytes from {end} of "
                    f"{file.name} on; its place there is {place.start} to {place.stop}",
                    field=place.name,
                )
            if nbytes and place.start % _itemsize(tensor):
                raise ConfigError(
                    f"tensor {place.name!r} ({tensor.dtype}) begins at byte {place.start} of {file.name}, which is no "
                    "multiple of its element size",
                    field=place.name,
                )
            end = place.stop
        if end != file.size:
            raise ConfigError(f"{file.name} has {file.size} bytes, but its tensors end at {end}", field=file.name)
    for name in mapped:
        if name not in placed:
            raise ConfigError(f"tensor {name!r} is mapped, but has no place in any file", field=name)


def _itemsize(tensor: MappedTensor) -> int:
    size = ITEMSIZE.get(tensor.dtype)
    if size is None:
        raise ConfigError(
            f"tensor {tensor.name!r} has dtype {tensor.dtype}, which can't be exported", field=tensor.name
        )
    return size


def _flows(
    files: Sequence[FileLayout],
    mapping: KeyMapping,
    sources: Mapping[str, Source],
    world: int,
    grids: Sequence[Grid],
) -> Iterator[list[_Flow]]:
    """For each file, what goes into it, in the order of its bytes. Scales come from nowhere: they are found."""
    grid_of = {grid.target: grid for grid in grids}
    numbers = {tensor.name: number for number, tensor in enumerate(mapping.tensors)}
    holdings: dict[str, Holdings] = {}
    for file in files:
        found: list[_Flow] = []
        for place in file.tensors:
            number = numbers[place.name]
            tensor = mapping.tensors[number]
            if tensor.scale_of is not None:
                continue
            grid = grid_of.get(number)
            itemsize = _itemsize(tensor)
            filled = 0
            for move in tensor.moves:
                known = holdings.get(move.source)
                if known is None:
                    source = sources.get(move.source)
                    if source is None:
                        raise ConfigError(
                            f"tensor {tensor.name!r} comes from {move.source!r}, which no rank has", field=tensor.name
                        )
                    check_source(source, world)
                    known = holdings[move.source] = Holdings(source)
                for share in known.shares(move):
                    filled += share.move.volume
                    parts = (share.move,) if grid is None else by_rows(share.move, grid)
                    found += [_Flow(number, itemsize, place.start, share.piece, part) for part in parts]
            if filled != prod(tensor.shape):
                raise ConfigError(
                    f"tensor {tensor.name!r} has {prod(tensor.shape)} elements, and its map fills {filled} of them",
                    field=tensor.name,
                )
        yield found


def _spans(flows: Iterable[_Flow], block_bytes: int) -> Iterator[Span]:
    for flow in flows:
        move, ranks = flow.move, flow.piece.ranks
        if move.target_strides == (1,):
            yield Span(flow.first, flow.stop, move.counts[0] * flow.itemsize, ranks)
            continue
        coarse = 0
        while coarse < len(move.counts) and move.target_strides[coarse] * flow.itemsize > block_bytes:
            coarse += 1
        # Steps over whole blocks are run one by one; what is within them is even as far as blocks are concerned.
        inner = list(zip(move.counts[coarse:], move.target_strides[coarse:], strict=True))
        reach = (1 + sum((count - 1) * step for count, step in inner)) * flow.itemsize
        nbytes = prod(count for count, _ in inner) * flow.itemsize
        for turns in product(*map(range, move.counts[:coarse])):
            at = sum(turn * step for turn, step in zip(turns, move.target_strides, strict=False))
            start = flow.first + at * flow.itemsize
            yield Span(start, start + reach, nbytes, ranks)


def _place(
    files: Sequence[FileLayout], owned: Iterable[Owned], world: int, block_bytes: int
) -> list[list[tuple[int, Part]]]:
    """For each file its parts with their owners, in order; each has its place in its owner's image."""
    ends = [0] * world
    placed: list[list[tuple[int, Part]]] = [[] for _ in files]
    for file, first, count, owner in owned:
        offset = first * block_bytes
        size = min(count * block_bytes, files[file].size - offset)
        placed[file].append((owner, Part(files[file].name, offset, size, files[file].size, ends[owner])))
        ends[owner] = round_up(ends[owner] + size, PAGE_BYTES)
    return placed


def _route(
    flows: Sequence[Sequence[_Flow]], placed: Sequence[Sequence[tuple[int, Part]]], world: int
) -> tuple[list[list[Leg]], dict[Pair, Stream]]:
    """Cut every flow where owners change, and decide who sends what its owner has not: whoever sends least so far."""
    local: list[list[Leg]] = [[] for _ in range(world)]
    streams: dict[Pair, Stream] = defaultdict(Stream)
    sent = [0] * world
    members: dict[tuple[int, ...], frozenset[int]] = {}
    for found, owned in zip(flows, placed, strict=True):
        offsets = [part.offset for _, part in owned]
        for flow in found:
            stop = flow.stop
            ranks = flow.piece.ranks
            holders = members.get(ranks)
            if holders is None:
                holders = members[ranks] = frozenset(ranks)
            at = bisect_right(offsets, flow.first) - 1
            while at < len(owned) and offsets[at] < stop:
                owner, part = owned[at]
                at += 1
                base = part.image_offset - part.offset + flow.start
                sender = owner if owner in holders else min(ranks, key=lambda rank: (sent[rank], rank))
                for move in _within(flow, part):
                    leg = Leg(flow.target, flow.itemsize, base, flow.piece.box, move)
                    if sender == owner:
                        local[owner].append(leg)
                    else:
                        streams[sender, owner].add(leg)
                        sent[sender] += leg.nbytes
    return local, dict(streams)


def _within(flow: _Flow, part: Part) -> list[Move]:
    """What of ``flow`` lies in ``part``. Both begin on an element or outside one another's tensor."""
    first = -(-(part.offset - flow.start) // flow.itemsize)
    stop = -(-(part.offset + part.size - flow.start) // flow.itemsize)
    return target_part(flow.move, first, stop)
