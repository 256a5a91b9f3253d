"""Plan an export: which rank writes which bytes of which file, and what every rank copies, sends and receives.

    plan = plan_export(layout.files, mapping, sources, world=8)
    mine = plan.rank(3)

Every 1 MiB block of every file has one owner (`share_blocks`), whose export image holds it; where files are written
whole, as on object stores, every file has one (`share_files`). Elements that the owner
holds are copied there from its own memory; others are cast and sent by one of the ranks that hold them. The bytes that
one rank sends to another are a stream, cut into as many rounds as needed for no rank to send or receive more than a
bucket in a round (``export.rank_plan``).

Guarantees: pure and deterministic: ranks that plan from equal arguments agree. Every byte of every file is written by
one rank; every element comes from one. Executing the plan needs a rank's export image and at most `BUFFER_BYTES_MAX` of
memory. Inconsistent input (a tensor of a file that is not mapped, a part of a source that no rank holds, ...) is a
`ConfigError` that names it.
Assumes: the moves of a tensor fill it exactly once (``keymap.moves.first_defect``).
Does not: look at data or memory (``export.transfer``), communicate (``export.transfer``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.export.fp8_grids import Grid, by_rows, grids_of
from holdfast.export.rank_plan import (
    BUCKETS,
    BufferRegion,
    Holdings,
    OwnedRange,
    Pair,
    RankExportPlan,
    RankWork,
    SourceBox,
    SourceTensor,
    Stream,
    TransferItem,
    check_source,
    plan_rank,
    round_count,
    target_part,
)
from holdfast.format.manifest import PAGE_BYTES
from holdfast.plan.write import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from holdfast.boxes import Box
    from holdfast.keymap.moves import KeyMapping, MappedTensor, Move


# Assign each 1 MiB block of a file to the rank that holds most of its bytes, so that bytes on one rank only are never
# sent. If several ranks hold (nearly) as much, such as replicas, they share the blocks evenly in runs as long as
# possible; blocks that no rank holds are shared by all. Cost grows with the number of spans, not of blocks.

BLOCK_BYTES: Final = 1 << 20
_NEARLY: Final = (3, 4)
"""A rank that holds at least this fraction of the maximum may own the block as well: with 34, 34 and 32 of a
hundred columns, three ranks share it, not two.
"""
_GRAINS: Final = 32
"""Shared runs are not cut finer than this fraction of a rank's share, since each cut adds transfers."""


class Span(NamedTuple):
    """``nbytes`` bytes, spread evenly over ``start`` to ``stop`` of a file, that each of ``ranks`` holds."""

    start: int
    stop: int
    nbytes: int
    ranks: tuple[int, ...]


class Run(NamedTuple):
    """Consecutive blocks of one file that any of ``ranks`` may own."""

    file: int
    first: int
    blocks: int
    ranks: tuple[int, ...]


class Owned(NamedTuple):
    """Consecutive blocks of one file that ``owner`` alone writes; as long as they can be."""

    file: int
    first: int
    blocks: int
    owner: int


def share_blocks(
    files: Sequence[tuple[int, Iterable[Span]]], world: int, block_bytes: int = BLOCK_BYTES
) -> list[Owned]:
    """Give every block of every file (size in bytes, who holds what of it) to one of ``world`` ranks, in order."""
    everyone = tuple(range(world))
    runs = [
        run for number, (size, spans) in enumerate(files) for run in _runs(number, size, spans, everyone, block_bytes)
    ]
    loads = [0] * world
    shared: list[Run] = []
    owned: list[Owned] = []
    for run in runs:
        if len(run.ranks) == 1:
            loads[run.ranks[0]] += run.blocks
            owned.append(Owned(run.file, run.first, run.blocks, run.ranks[0]))
        else:
            shared.append(run)
    grain = max(1, sum(run.blocks for run in runs) // (world * _GRAINS))
    for run in sorted(shared, key=lambda run: (-run.blocks, run.file, run.first)):
        first = run.first
        for rank, count in _fill_up(run.blocks, run.ranks, loads, grain):
            loads[rank] += count
            owned.append(Owned(run.file, first, count, rank))
            first += count
    owned.sort()
    return _joined(owned)


def _joined(owned: Iterable[Owned]) -> list[Owned]:
    joined: list[Owned] = []
    for item in owned:
        last = joined[-1] if joined else None
        if last is not None and last.owner == item.owner and (last.file, last.first + last.blocks) == item[:2]:
            joined[-1] = last._replace(blocks=last.blocks + item.blocks)
        else:
            joined.append(item)
    return joined


def _fill_up(count: int, ranks: Sequence[int], loads: Sequence[int], grain: int) -> list[tuple[int, int]]:
    """Share out ``count`` blocks so that loads come as near to one another as they can: (rank, blocks), ranks rising.

    Only as many ranks take part as get ``grain`` blocks each, the least loaded ones.
    """
    parts = max(1, min(len(ranks), count // grain))
    if parts == 1:
        return [(min(ranks, key=lambda rank: (loads[rank], rank)), count)]
    lowest = sorted(ranks, key=lambda rank: (loads[rank], rank))[:parts]
    used = 0
    room = 0  # blocks that lift the first `used` ranks to the level of the last of them
    while used < parts:
        more = (loads[lowest[used]] - loads[lowest[used - 1]]) * used if used else 0
        if room + more > count:
            break
        room += more
        used += 1
    each, rest = divmod(count - room, used)
    level = loads[lowest[used - 1]] + each
    shares = [(rank, level - loads[rank] + (place < rest)) for place, rank in enumerate(lowest[:used])]
    return sorted((rank, blocks) for rank, blocks in shares if blocks)


def share_files(
    files: Sequence[tuple[int, Mapping[tuple[int, ...], int]]], world: int, block_bytes: int = BLOCK_BYTES
) -> list[Owned]:
    """Give every file whole to one of ``world`` ranks, so that little is sent and none writes much more than others.

    files: of each its size in bytes, and how many of them which ranks hold. A file goes to the rank that
    holds most of it (of those that hold nearly as much, the least loaded), but not to one that already owns an even
    share of all bytes: so no rank owns more than that and one file.
    """
    total = sum(size for size, _ in files)
    loads = [0] * world
    owned: list[Owned] = []
    part, of = _NEARLY
    for number, (size, held) in sorted(enumerate(files), key=lambda file: (-file[1][0], file[0])):
        if not size:
            break
        has: dict[int, int] = defaultdict(int)
        for ranks, nbytes in held.items():
            for rank in ranks:
                has[rank] += nbytes
        most = max(has.values(), default=0)
        near = {rank: most if nbytes * of >= most * part else nbytes for rank, nbytes in has.items()}
        free = (rank for rank in range(world) if loads[rank] * world < total)
        owner = min(free, key=lambda rank: (-near.get(rank, 0), loads[rank], rank))
        loads[owner] += size
        owned.append(Owned(number, 0, -(-size // block_bytes), owner))
    return sorted(owned)


# Who may own a block -------------------------------------------------------------------------------------------


def _runs(file: int, size: int, spans: Iterable[Span], everyone: tuple[int, ...], block_bytes: int) -> list[Run]:
    """The blocks of one file in runs of equal candidates."""
    blocks = -(-size // block_bytes)
    begins: dict[int, list[Span]] = defaultdict(list)
    ends: dict[int, list[Span]] = defaultdict(list)
    edges: dict[int, dict[tuple[int, ...], int]] = {}
    """Bytes that spans hold of blocks they don't fill."""
    for span in spans:
        first, last = -(-span.start // block_bytes), span.stop // block_bytes
        if first < last:
            begins[first].append(span)
            ends[last].append(span)
        for start, stop in _ragged(span, first, last, block_bytes):
            edge = edges.setdefault(start // block_bytes, {})
            held = span.nbytes * (stop - start) // (span.stop - span.start)
            edge[span.ranks] = edge.get(span.ranks, 0) + held
    cuts = sorted({0, blocks, *begins, *ends, *edges, *(block + 1 for block in edges)})
    found: list[Run] = []
    active: dict[tuple[int, ...], int] = {}
    """Bytes of every block, by the ranks that hold them."""
    for start, stop in pairwise(cuts):
        for span in ends.get(start, ()):
            left = active[span.ranks] - _per_block(span, block_bytes)
            if left:
                active[span.ranks] = left
            else:
                del active[span.ranks]
        for span in begins.get(start, ()):
            active[span.ranks] = active.get(span.ranks, 0) + _per_block(span, block_bytes)
        ranks = _candidates(active, edges.get(start, {})) or everyone
        if found and found[-1].ranks == ranks:
            found[-1] = found[-1]._replace(blocks=found[-1].blocks + stop - start)
        else:
            found.append(Run(file, start, stop - start, ranks))
    return found


def _per_block(span: Span, block_bytes: int) -> int:
    return max(1, span.nbytes * block_bytes // (span.stop - span.start))


def _ragged(span: Span, first: int, last: int, block_bytes: int) -> list[tuple[int, int]]:
    """The ends of ``span`` that lie in blocks which it doesn't fill; it fills those from ``first`` to ``last``."""
    if first > last:  # within one block
        return [(span.start, span.stop)]
    head = (span.start, min(first * block_bytes, span.stop))
    tail = (max(last * block_bytes, span.start), span.stop)
    return [end for end in (head, tail) if end[0] < end[1]]


def _candidates(whole: Mapping[tuple[int, ...], int], edge: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
    if not edge:
        if not whole:
            return ()
        if len(whole) == 1:
            return next(iter(whole))
    held: dict[int, int] = defaultdict(int)
    for weights in (whole, edge):
        for ranks, nbytes in weights.items():
            for rank in ranks:
                held[rank] += nbytes
    most = max(held.values())
    part, of = _NEARLY
    return tuple(sorted(rank for rank, nbytes in held.items() if nbytes * of >= most * part))


BUCKET_BYTES: Final = 16 << 20
BUFFER_BYTES_MAX: Final = 64 << 20


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
    """Part of a move that reads one piece and writes a tensor that begins at byte ``start`` of its file."""

    target: int
    itemsize: int
    start: int
    piece: SourceBox
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
    sources: Mapping[str, SourceTensor],
    *,
    world: int,
    bucket_bytes: int = BUCKET_BYTES,
    block_bytes: int = BLOCK_BYTES,
    whole_files: bool = False,
) -> ExportPlan:
    """Plan the export of ``sources``, as ``mapping`` says, into ``files``, by ``world`` ranks.

    bucket_bytes: what a rank sends and receives in one round, at most; there are two such buffers. Up to 32 MiB.
    block_bytes: what has one owner, a multiple of 16. What writes and checks files takes parts of whole MiB.
    whole_files: each file has one owner.

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
    if whole_files:
        owned = share_files(
            [(file.size, _held(found)) for file, found in zip(files, flows, strict=True)], world, block_bytes
        )
    else:
        spans = [(file.size, _spans(found, block_bytes)) for file, found in zip(files, flows, strict=True)]
        owned = share_blocks(spans, world, block_bytes)
    placed = _place(files, owned, world, block_bytes)
    local, streams = _route(flows, placed, world)
    parts: list[list[OwnedRange]] = [[] for _ in range(world)]
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
    """Number of transfer rounds; 0 if there are no transfers."""
    bucket_bytes: int
    parts: tuple[tuple[OwnedRange, ...], ...]
    """Of each rank, in the order in which they lie in its image: by file, then by offset."""
    files: tuple[FileLayout, ...]
    tensors: tuple[MappedTensor, ...]
    sources: Mapping[str, SourceTensor]
    local: tuple[tuple[TransferItem, ...], ...]
    """For each rank, the items it holds and writes itself."""
    streams: Mapping[Pair, Stream]
    grids: tuple[Grid, ...]
    """Grids of quantized tensors."""

    def rank(self, rank: int, memories: Mapping[tuple[str, Box], BufferRegion] | None = None) -> RankExportPlan:
        """Plan the work of ``rank``. Costs time in proportion to what that rank copies, sends and receives.

        memories: location of each box of a source that it holds (``rank_plan.memories_of``); None: each in a separate
        buffer.
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
        """Return True if ranks have messages for one another."""
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
                    f"tensor {place.name!r} ({tensor.dtype}) begins at byte {place.start} of {file.name}, "
                    "which is not a multiple of its element size",
                    field=place.name,
                )
            end = place.stop
        if end != file.size:
            raise ConfigError(f"{file.name} has {file.size} bytes, but its tensors end at {end}", field=file.name)
    for name in mapped:
        if name not in placed:
            raise ConfigError(f"tensor {name!r} is mapped, but is not in any file", field=name)


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
    sources: Mapping[str, SourceTensor],
    world: int,
    grids: Sequence[Grid],
) -> Iterator[list[_Flow]]:
    """Return for each file the flows into it, in the order of its bytes. Scales have no source: they are computed."""
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


def _held(flows: Iterable[_Flow]) -> dict[tuple[int, ...], int]:
    """Return how many bytes of the file which ranks hold."""
    found: dict[tuple[int, ...], int] = defaultdict(int)
    for flow in flows:
        found[flow.piece.ranks] += flow.move.volume * flow.itemsize
    return found


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
) -> list[list[tuple[int, OwnedRange]]]:
    """Return for each file its parts with their owners, in order; each has a position in its owner's image."""
    ends = [0] * world
    placed: list[list[tuple[int, OwnedRange]]] = [[] for _ in files]
    for file, first, count, owner in owned:
        offset = first * block_bytes
        size = min(count * block_bytes, files[file].size - offset)
        placed[file].append((owner, OwnedRange(files[file].name, offset, size, files[file].size, ends[owner])))
        ends[owner] = round_up(ends[owner] + size, PAGE_BYTES)
    return placed


def _route(
    flows: Sequence[Sequence[_Flow]], placed: Sequence[Sequence[tuple[int, OwnedRange]]], world: int
) -> tuple[list[list[TransferItem]], dict[Pair, Stream]]:
    """Cut every flow where owners change, and decide who sends what its owner has not: whoever sends least so far."""
    local: list[list[TransferItem]] = [[] for _ in range(world)]
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
                    leg = TransferItem(flow.target, flow.itemsize, base, flow.piece.box, move)
                    if sender == owner:
                        local[owner].append(leg)
                    else:
                        streams[sender, owner].add(leg)
                        sent[sender] += leg.nbytes
    return local, dict(streams)


def _within(flow: _Flow, part: OwnedRange) -> list[Move]:
    """Return the part of ``flow`` in ``part``. Both begin on an element or outside one another's tensor."""
    first = -(-(part.offset - flow.start) // flow.itemsize)
    stop = -(-(part.offset + part.size - flow.start) // flow.itemsize)
    return target_part(flow.move, first, stop)
