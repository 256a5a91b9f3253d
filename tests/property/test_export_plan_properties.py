"""Export plans against numpy: carried out on real bytes by all ranks, they give the files that numpy assembles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_files import File, file_of, memories_of, rows_of

from holdfast.boxes import Box, strides, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.export.plan import ExportPlan, Owned, Span, plan_export, share_blocks, share_files
from holdfast.export.rank_plan import (
    BUCKET,
    BUCKETS,
    BufferRegion,
    Copy,
    RankExportPlan,
    SourceTensor,
    sources_of,
)
from holdfast.format.structure import MeshLayout, Placement, Structure, TensorSpec
from holdfast.keymap.moves import KeyMapping, MappedTensor, Move
from holdfast.plan.placement import World, local_boxes, local_shape

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 64


def sorted_file(name: str, header: bytes, tensors: Sequence[MappedTensor]) -> File:
    """As files are: a header of whole words, and the largest elements first."""
    header += b" " * (-len(header) % 8)
    return file_of(sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.name)), name=name, header=header)


# carrying it out -------------------------------------------------------------------------------------------------


def nest(memory: Array, dtype: str, counts: Sequence[int], at: int, steps: Sequence[int]) -> Array:
    size = ITEMSIZE[dtype]
    return np.ndarray(counts, dtype=dtype, buffer=memory.data, offset=at, strides=[step * size for step in steps])


def make(copies: Sequence[Copy], memories: Sequence[Array], bucket: Array | None, target: Array) -> None:
    for copy in copies:
        memory = bucket if copy.source == BUCKET else memories[copy.source]
        assert memory is not None
        source = nest(memory, copy.source_dtype, copy.counts, copy.source_at, copy.source_strides)
        into = nest(target, copy.target_dtype, copy.counts, copy.target_at, copy.target_strides)
        into[...] = source.astype(copy.target_dtype)


def carry_out(plan: ExportPlan, plans: list[RankExportPlan], memories: list[list[Array]]) -> dict[str, Array]:
    """What all ranks write; checks what they may use for it."""
    images = [np.full(mine.image_bytes, 0xEE, dtype=np.uint8) for mine in plans]
    for mine, image, memory in zip(plans, images, memories, strict=True):
        for at, constant in mine.constants:
            image[at : at + len(constant)] = np.frombuffer(constant, dtype=np.uint8)
        make(mine.local, memory, None, image)
        assert len(mine.rounds) == plan.rounds
        assert mine.bucket_bytes <= plan.bucket_bytes
    for number in range(plan.rounds):
        buckets = [np.full(mine.bucket_bytes, 0xDD, dtype=np.uint8) for mine in plans]
        sent = {}
        for mine, bucket, memory in zip(plans, buckets, memories, strict=True):
            turn = mine.rounds[number]
            ranges = sorted((m.at, m.at + m.nbytes) for m in (*turn.sends, *turn.receives))
            assert all(a[1] <= b[0] for a, b in pairwise(ranges))
            assert sum(stop - start for start, stop in ranges) <= plan.bucket_bytes
            for message in turn.sends:
                make(message.copies, memory, None, bucket)
                sent[mine.rank, message.peer] = bucket[message.at : message.at + message.nbytes].copy()
        for mine, bucket in zip(plans, buckets, strict=True):
            for message in mine.rounds[number].receives:
                bucket[message.at : message.at + message.nbytes] = sent.pop((message.peer, mine.rank))
                make(message.copies, (), bucket, images[mine.rank])
        assert not sent
    files = {part.file: np.zeros(part.total, dtype=np.uint8) for mine in plans for part in mine.parts}
    written = {name: np.zeros(len(data), dtype=np.uint8) for name, data in files.items()}
    for mine, image in zip(plans, images, strict=True):
        for part in mine.parts:
            assert part.offset % BLOCK == 0
            assert part.size % BLOCK == 0 or part.offset + part.size == part.total
            files[part.file][part.offset : part.offset + part.size] = image[part.image_offset :][: part.size]
            written[part.file][part.offset : part.offset + part.size] += 1
        share = sum(part.size for part in mine.parts)
        assert mine.memory_bytes <= share + 4096 * len(mine.parts) + BUCKETS * plan.bucket_bytes
    assert all((count == 1).all() for count in written.values())
    return files


# states ----------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, ndim: int, world: int) -> MeshLayout | None:
    """How a tensor is held by some ranks of the world; None: whole, by all who have it."""
    meshes = [mesh for mesh in ((1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1)) if prod(mesh) <= world]
    mesh = draw(st.sampled_from(meshes) | st.none())
    if mesh is None:
        return None
    kinds = st.just(Placement("replicate"))
    if ndim:
        dims = st.integers(0, ndim - 1)
        kinds = dims.map(lambda dim: Placement("shard", dim)) | kinds
        kinds = kinds | st.tuples(dims, st.integers(2, 3)).map(lambda pair: Placement("strided", *pair))
    ranks = draw(st.permutations(range(world)))[: prod(mesh)]
    return MeshLayout(mesh, tuple(ranks), tuple(draw(kinds) for _ in mesh))


DTYPES = ("int8", "int16", "int32", "int64", "float64", "float32")


@dataclass(frozen=True)
class State:
    """Tensors on ranks: ``values`` whole, ``specs`` with the layouts, ``having`` which ranks have each."""

    world: int
    values: dict[str, Array]
    layouts: dict[str, MeshLayout | None]
    having: dict[str, tuple[int, ...]]

    def of_world(self) -> World:
        structures, digests = {}, []
        for rank in range(self.world):
            names = sorted(name for name in self.values if rank in self.having[name])
            kinds = [self.layouts[name] for name in names]
            placed = tuple(layout for layout in kinds if layout is not None)
            specs, number = [], 0
            for name, layout in zip(names, kinds, strict=True):
                value = self.values[name]
                specs.append(
                    TensorSpec(name, (name,), value.shape, str(value.dtype), None if layout is None else number)
                )
                number += layout is not None
            digests.append("+".join(names))
            structures[digests[-1]] = Structure(placed, tuple(specs), ())
        return World(structures, digests)

    def local(self, name: str, rank: int) -> Array:
        """A rank's local tensor, as torch would have it."""
        value, layout = self.values[name], self.layouts[name]
        if layout is None:
            return value.copy()
        local = np.zeros(local_shape(value.shape, layout, rank), dtype=value.dtype)
        for box, at in local_boxes(value.shape, layout, rank):
            local[cut(Box(at, box.sizes))] = value[cut(box)]
        return local


def cut(box: Box) -> tuple[Any, ...]:
    return ..., *(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple) | st.just((2, 0)) | st.just((40, 3)) | st.just((5, 30))


@st.composite
def states(draw: st.DrawFn) -> State:
    world = draw(st.integers(1, 4))
    values, held, having = {}, {}, {}
    for number in range(draw(st.integers(1, 4))):
        name = f"s{number}"
        shape = draw(shapes)
        layout = draw(layouts(len(shape), world))
        dtype = draw(st.sampled_from(DTYPES))
        start = draw(st.integers(0, 20))
        values[name] = (np.arange(start, start + prod(shape)) % 120).astype(dtype).reshape(shape)
        held[name] = layout
        if layout is None:
            ranks = draw(st.sets(st.integers(0, world - 1), min_size=1))
            having[name] = tuple(sorted(ranks))
        else:
            having[name] = tuple(sorted(layout.ranks))
    return State(world, values, held, having)


# key maps --------------------------------------------------------------------------------------------------------


def move_of(source: str, loops: Sequence[tuple[int, int, int]], target: int, at: int) -> tuple[Move, ...]:
    if 0 in (count for count, _, _ in loops):
        return ()
    kept = [loop for loop in loops if loop[0] > 1]
    counts, to, by = zip(*kept, strict=True) if kept else ((), (), ())
    return (Move(source, counts, target, to, at, by),)


def permuted(
    name: str, value: Array, order: Sequence[int], flipped: Sequence[int] = ()
) -> tuple[Array, tuple[Move, ...]]:
    """The source with its dimensions in another order, some of them backwards."""
    steps = strides(value.shape)
    out = np.flip(value.transpose(order), axis=tuple(flipped))
    at = sum((value.shape[order[dim]] - 1) * steps[order[dim]] for dim in flipped)
    signs = [-1 if dim in flipped else 1 for dim in range(value.ndim)]
    loops = [
        (count, to, sign * steps[dim])
        for count, to, dim, sign in zip(out.shape, strides(out.shape), order, signs, strict=True)
    ]
    return out, move_of(name, loops, 0, at)


def identity(name: str, value: Array) -> tuple[Array, tuple[Move, ...]]:
    return value, move_of(name, [(value.size, 1, 1)], 0, 0)


@st.composite
def targets(draw: st.DrawFn, state: State) -> list[tuple[MappedTensor, Array]]:
    """Every source goes somewhere: as it is, permuted, backwards, repeated, split, or into one with another."""
    found: list[tuple[str, Array, tuple[Move, ...]]] = []
    names = sorted(state.values)
    while names:
        name = names.pop()
        value = state.values[name]
        kinds = ["as it is", "repeated"] + (["permuted", "flipped", "split"] if value.ndim else [])
        partner = next((other for other in names if state.values[other].shape == value.shape), None)
        if value.ndim and partner is not None:
            kinds += ["joined"] * 4
        kind = draw(st.sampled_from(kinds))
        if kind == "as it is":
            found.append((f"t.{name}", *identity(name, value)))
        elif kind == "repeated":
            loops = [(3, value.size, 0), (value.size, 1, 1)]
            found.append((f"t.{name}", np.stack([value] * 3), move_of(name, loops, 0, 0)))
        elif kind == "permuted":
            found.append((f"t.{name}", *permuted(name, value, draw(st.permutations(range(value.ndim))))))
        elif kind == "flipped":
            flipped = draw(st.sets(st.integers(0, value.ndim - 1), min_size=1))
            found.append((f"t.{name}", *permuted(name, value, range(value.ndim), sorted(flipped))))
        elif kind == "split":
            at = draw(st.integers(0, value.shape[0]))
            row = prod(value.shape[1:])
            for piece, start, stop in (("a", 0, at), ("b", at, value.shape[0])):
                moves = move_of(name, [((stop - start) * row, 1, 1)], 0, start * row)
                found.append((f"t.{name}.{piece}", value[start:stop], moves))
        elif partner is not None:
            names.remove(partner)
            dim = draw(st.integers(0, value.ndim - 1))
            other = state.values[partner].astype(value.dtype)
            out = np.concatenate([value, other], axis=dim)
            inner = prod(value.shape[dim:])
            loops = [(prod(value.shape[:dim]), 2 * inner, inner), (inner, 1, 1)]
            found.append((f"t.{name}", out, move_of(name, loops, 0, 0) + move_of(partner, loops, inner, 0)))
    mapped = []
    for name, out, moves in found:
        dtype = draw(st.sampled_from([str(out.dtype), *DTYPES]))
        ordered = tuple(sorted(moves, key=lambda move: move.target_offset))
        mapped.append((MappedTensor(name, out.shape, dtype, ordered), out.astype(dtype)))
    return mapped


@st.composite
def exports(draw: st.DrawFn) -> tuple[State, list[File], KeyMapping, dict[str, Array]]:
    state = draw(states())
    mapped = draw(targets(state))
    count = draw(st.integers(1, min(3, len(mapped))))
    files = [
        sorted_file(
            f"f{number}", b"#" * draw(st.integers(0, 3 * BLOCK)), [tensor for tensor, _ in mapped[number::count]]
        )
        for number in range(count)
    ]
    return state, files, KeyMapping(tuple(tensor for tensor, _ in mapped), {}), {t.name: out for t, out in mapped}


def expected(file: File, values: dict[str, Array]) -> bytes:
    return file.header + b"".join(values[place.name].tobytes() for place in file.tensors)


@settings(max_examples=400, deadline=None)
@given(exports(), st.sampled_from([48, 100, 1000]), st.booleans(), st.booleans())
def test_a_plan_carried_out_gives_the_files(
    case: tuple[State, list[File], KeyMapping, dict[str, Array]],
    bucket_bytes: int,
    as_local_tensors: bool,
    whole_files: bool,
) -> None:
    state, files, mapping, values = case
    world = state.of_world()
    sources = sources_of(world, state.world)
    streams = 2 * (state.world - 1)
    plan = plan_export(
        files,
        mapping,
        sources,
        world=state.world,
        bucket_bytes=bucket_bytes + 16 * streams,
        block_bytes=BLOCK,
        whole_files=whole_files,
    )
    assert not whole_files or all(part.size == part.total for parts in plan.parts for part in parts)
    plans, memories = [], []
    for rank in range(state.world):
        known = memories_of(world, rank) if as_local_tensors else {}
        plans.append(plan.rank(rank, known))
        memories.append([held(state, rank, memory, as_local_tensors) for memory in plans[-1].memories])
    found = carry_out(plan, plans, memories)
    for file in files:
        if file.size:
            assert found[file.name].tobytes() == expected(file, values)


def held(state: State, rank: int, memory: BufferRegion, as_local_tensors: bool) -> Array:
    local = state.local(memory.source, rank) if as_local_tensors else state.values[memory.source][cut(memory.box)]
    assert local.shape == memory.sizes
    return np.frombuffer(local.tobytes(), dtype=np.uint8).copy()


# ownership -------------------------------------------------------------------------------------------------------


@st.composite
def held_files(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[Span]]]]:
    world = draw(st.integers(1, 5))
    groups = st.sets(st.integers(0, world - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    files = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 40 * BLOCK))
        spans = []
        for _ in range(draw(st.integers(0, 8)) if size else 0):
            start = draw(st.integers(0, size - 1))
            stop = draw(st.integers(start + 1, size))
            spans.append(Span(start, stop, draw(st.integers(1, stop - start)), draw(groups)))
        files.append((size, spans))
    return world, files


@given(held_files())
def test_every_block_has_one_owner_who_holds_about_as_much_of_it_as_anyone(
    case: tuple[int, list[tuple[int, list[Span]]]],
) -> None:
    world, files = case
    owned = share_blocks(files, world, BLOCK)
    owner = {}
    for item in owned:
        for block in range(item.first, item.first + item.blocks):
            assert owner.setdefault((item.file, block), item.owner) == item.owner
    assert sorted(owner) == [(n, block) for n, (size, _) in enumerate(files) for block in range(-(-size // BLOCK))]
    assert sum(item.blocks for item in owned) == len(owner)
    for (number, block), rank in owner.items():
        held = [0.0] * world
        for span in files[number][1]:
            met = min(span.stop, (block + 1) * BLOCK) - max(span.start, block * BLOCK)
            for holder in span.ranks if met > 0 else ():
                held[holder] += span.nbytes * met / (span.stop - span.start)
        slack = 2 * len(files[number][1])  # whole bytes of every span
        assert held[rank] + slack >= max(held) * 3 / 4


@given(st.integers(1, 8), st.integers(1, 4000))
def test_replicas_share_a_file_evenly_in_long_runs(world: int, blocks: int) -> None:
    size = blocks * BLOCK
    owned = share_blocks([(size, [Span(0, size, size, tuple(range(world)))])], world, BLOCK)
    counts = [sum(item.blocks for item in owned if item.owner == rank) for rank in range(world)]
    assert max(counts) - min(counts) <= 1
    assert len(owned) <= world


@given(st.integers(1, 6), st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_what_one_rank_alone_holds_of_blocks_is_its_own(world: int, lengths: list[int]) -> None:
    spans, at = [], 0
    for number, length in enumerate(lengths):
        spans.append(Span(at, at + length * BLOCK // 2, length * BLOCK // 2, (number % world,)))
        at = spans[-1].stop
    for item in share_blocks([(at, spans)], world, BLOCK):
        for span in spans:
            first, last = -(-span.start // BLOCK), span.stop // BLOCK
            if max(first, item.first) < min(last, item.first + item.blocks):
                assert span.ranks == (item.owner,)


@given(held_files())
def test_every_file_is_whole_on_one_rank_and_no_rank_has_much_more_than_its_share(
    case: tuple[int, list[tuple[int, list[Span]]]],
) -> None:
    world, files = case
    held: list[tuple[int, dict[tuple[int, ...], int]]] = []
    for size, spans in files:
        by_ranks: dict[tuple[int, ...], int] = {}
        for span in spans:
            by_ranks[span.ranks] = by_ranks.get(span.ranks, 0) + span.nbytes
        held.append((size, by_ranks))
    owned = share_files(held, world, BLOCK)
    assert [(item.file, item.first, item.blocks) for item in owned] == [
        (number, 0, -(-size // BLOCK)) for number, (size, _) in enumerate(files) if size
    ]
    total, largest = sum(size for size, _ in files), max((size for size, _ in files), default=0)
    loads = [sum(files[item.file][0] for item in owned if item.owner == rank) for rank in range(world)]
    assert all(load * world < total + largest * world or not load for load in loads)
    for item in owned:
        has = [sum(n for ranks, n in held[item.file][1].items() if rank in ranks) for rank in range(world)]
        better = [rank for rank in range(world) if has[item.owner] * 4 < has[rank] * 3]
        assert all(loads[rank] * world >= total for rank in better), "only who has its share already was passed over"


def test_one_rank_owns_everything_in_one_part() -> None:
    assert share_blocks([(10 * BLOCK, [])], 1, BLOCK) == [Owned(0, 0, 10, 0)]


def test_pieces_of_dim_zero_shards_stay_where_they_are() -> None:
    shape, world = (64, 32), 4
    source = SourceTensor("w", shape, "int16", rows_of(shape, world))
    tensor = MappedTensor("w", shape, "int16", move_of("w", [(64 * 32, 1, 1)], 0, 0))
    file = file_of([tensor])
    plan = plan_export([file], KeyMapping((tensor,), {}), {"w": source}, world=world, block_bytes=BLOCK)
    assert plan.rounds == 0
    assert [[(part.offset, part.size) for part in parts] for parts in plan.parts] == [
        [(1024 * rank, 1024)] for rank in range(world)
    ]
    assert whole(shape).volume * 2 == file.size
