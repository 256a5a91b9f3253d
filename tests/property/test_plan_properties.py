"""Boxes, placements and plans against numpy: plans are carried out on real bytes and compared with the arrays."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.boxes import (
    Box,
    contains,
    element_offset,
    element_span,
    first_defect,
    intersect,
    is_contiguous_in,
    runs,
    subtract,
    whole,
)
from holdfast.format.dcp_metadata import StoredPlan, StoredRank, render_metadata
from holdfast.format.manifest import ReportFile
from holdfast.format.structure import MeshLayout, Placement, Structure, TensorSpec
from holdfast.format.torch_record import measure
from holdfast.plan.placement import local_boxes, local_shape
from holdfast.plan.read import (
    StoredShard,
    StoredTensor,
    Transfer,
    Want,
    byte_span,
    dest_offset,
    is_direct,
    plan_reads,
    row_chunks,
)
from holdfast.plan.write import index_of, plan_rank, plan_save

Array = np.ndarray[Any, np.dtype[Any]]

# Indices begin with an ellipsis: without it numpy gives out scalars, not views, of 0-dim arrays.


def cut(box: Box) -> tuple[Any, ...]:
    return ..., *(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


def within(box: Box, outer: Box) -> tuple[Any, ...]:
    starts = (a - b for a, b in zip(box.offsets, outer.offsets, strict=True))
    return ..., *(slice(start, start + size) for start, size in zip(starts, box.sizes, strict=True))


@st.composite
def boxes_in(draw: st.DrawFn, outer: Box) -> Box:
    starts = []
    sizes = []
    for start, size in zip(outer.offsets, outer.sizes, strict=True):
        first = draw(st.integers(0, size))
        starts.append(start + first)
        sizes.append(draw(st.integers(0, size - first)))
    return Box(tuple(starts), tuple(sizes))


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
outers = shapes.flatmap(
    lambda sizes: st.tuples(*(st.integers(0, 3) for _ in sizes)).map(lambda offsets: Box(tuple(offsets), sizes))
)
pairs = outers.flatmap(lambda outer: st.tuples(st.just(outer), boxes_in(outer), boxes_in(outer)))


@st.composite
def tilings(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Box]:
    """Disjoint boxes that make up ``box``, by random guillotine cuts; some may be empty."""
    if depth == 0 or not box.sizes or draw(st.booleans()):
        return [box]
    dim = draw(st.integers(0, len(box.sizes) - 1))
    at = draw(st.integers(0, box.sizes[dim]))
    low = Box(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
    high = Box(
        (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :]),
        (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :]),
    )
    return draw(tilings(low, depth - 1)) + draw(tilings(high, depth - 1))


# Boxes ---------------------------------------------------------------------------------------------------------


@given(pairs)
def test_row_major_arithmetic_is_numpys(case: tuple[Box, Box, Box]) -> None:
    outer, box, _ = case
    flat = np.arange(outer.volume).reshape(outer.sizes)[within(box, outer)].reshape(-1)
    assert box.volume == flat.size
    assert [i for start, length in runs(box, outer) for i in range(start, start + length)] == flat.tolist()
    assert is_contiguous_in(box, outer) == (flat.size == 0 or flat[-1] - flat[0] + 1 == flat.size)
    if flat.size:
        assert element_offset(box, outer) == flat[0]
        assert element_span(box, outer) == (flat[0], flat[-1] + 1)


@given(pairs)
def test_intersection_and_difference_are_those_of_sets(case: tuple[Box, Box, Box]) -> None:
    _, a, b = case

    def points(box: Box) -> set[tuple[int, ...]]:
        return set(product(*(range(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))))

    shared = intersect(a, b)
    assert (points(shared) if shared else set()) == points(a) & points(b)
    assert shared is None or (contains(a, shared) and contains(b, shared))
    rest = subtract(a, b)
    assert set().union(*map(points, rest)) == points(a) - points(b)
    assert sum(box.volume for box in rest) == len(points(a) - points(b))


@given(outers.flatmap(lambda outer: st.tuples(st.just(outer), tilings(outer), boxes_in(outer))), st.data())
def test_tilings_are_told_from_all_else(case: tuple[Box, list[Box], Box], data: st.DataObject) -> None:
    outer, tiles, extra = case
    tiles = data.draw(st.permutations(tiles))
    assert first_defect(outer, tiles) is None
    if extra.volume:
        defect = first_defect(outer, [*tiles, extra])
        assert defect is not None
        assert defect[0] == "overlap"
        assert contains(extra, defect[1])
    solid = [tile for tile in tiles if tile.volume]
    if solid:
        assert first_defect(outer, [tile for tile in tiles if tile is not solid[0]]) is not None


# Placements ----------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> MeshLayout:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    kinds = st.just(Placement("replicate"))
    if ndim:
        dims = st.integers(0, ndim - 1)
        kinds = kinds | dims.map(lambda dim: Placement("shard", dim))
        kinds = kinds | st.tuples(dims, st.integers(1, 4)).map(lambda pair: Placement("strided", *pair))
    placements = tuple(draw(kinds) for _ in mesh)
    return MeshLayout(mesh, tuple(draw(st.permutations(range(prod(mesh))))), placements)


placed = (
    st.lists(st.integers(0, 9), max_size=3)
    .map(tuple)
    .flatmap(lambda shape: st.tuples(st.just(shape), layouts(len(shape))))
)


def local_array(values: Array, layout: MeshLayout, rank: int) -> Array:
    """The local tensor as its boxes say; fails unless they fill it exactly."""
    local = np.full(local_shape(values.shape, layout, rank), -1, dtype=values.dtype)
    for box, offsets in local_boxes(values.shape, layout, rank):
        into = local[cut(Box(offsets, box.sizes))]
        assert into.shape == box.sizes
        assert (into == -1).all()
        into[...] = values[cut(box)]
    assert (local != -1).all()
    return local


@given(placed)
def test_the_shards_of_all_ranks_hold_every_element_equally_often(case: tuple[tuple[int, ...], MeshLayout]) -> None:
    shape, layout = case
    values = np.arange(prod(shape)).reshape(shape)
    seen = np.concatenate([local_array(values, layout, rank).reshape(-1) for rank in range(len(layout.ranks))])
    replicas = prod(size for size, p in zip(layout.shape, layout.placements, strict=True) if p.kind == "replicate")
    assert np.bincount(seen, minlength=values.size).tolist() == [replicas] * values.size


@given(placed)
def test_without_strides_placements_are_numpys_own_chunks(case: tuple[tuple[int, ...], MeshLayout]) -> None:
    shape, layout = case
    layout = MeshLayout(
        layout.shape,
        tuple(range(len(layout.ranks))),
        tuple(Placement("shard", p.dim) if p.kind == "strided" else p for p in layout.placements),
    )
    values = np.arange(prod(shape)).reshape(shape)
    for rank, coordinates in enumerate(np.ndindex(layout.shape)):
        expected = values
        for size, at, placement in zip(layout.shape, coordinates, layout.placements, strict=True):
            if placement.kind == "shard":
                step = -(-expected.shape[placement.dim] // size)
                index = range(expected.shape[placement.dim])[step * at : step * (at + 1)]
                expected = expected.take(list(index), axis=placement.dim)
        assert np.array_equal(local_array(values, layout, rank), expected)


# Save plans ----------------------------------------------------------------------------------------------------


@given(st.lists(placed, min_size=1, max_size=6), st.integers(0, 3))
def test_what_is_written_is_the_whole_state_once(cases: list[tuple[tuple[int, ...], MeshLayout]], plain: int) -> None:
    world = max(len(layout.ranks) for _, layout in cases)
    tensors = [TensorSpec(f"d{i}", (f"d{i}",), shape, "int32", i) for i, (shape, _) in enumerate(cases)]
    tensors += [TensorSpec(f"p{i}", (f"p{i}",), (i, 3), "int32") for i in range(plain)]
    structures = {"a": Structure(tuple(layout for _, layout in cases), tuple(tensors), ())}
    digests = ["a"] * world
    plan = plan_save(structures, digests)
    values = {spec.name: np.arange(prod(spec.shape), dtype=np.int32).reshape(spec.shape) for spec in tensors}
    rebuilt = {name: np.full_like(array, -1) for name, array in values.items()}
    seen = set()
    for rank in plan.ranks:
        assert plan_rank(structures, digests, rank.rank) == rank
        end = 0
        for item in rank.tensors:
            shape = measure(item.dtype, item.sizes, record_offset=item.record_offset)
            assert end <= item.record_offset == item.payload_offset - shape.header_bytes
            end = item.record_end
            assert end == item.payload_offset + prod(item.sizes) * 4 + shape.trailer_bytes
            assert end <= rank.files[item.file].size
            box = Box(item.offsets, item.sizes)
            source = values[item.name]
            if item.name.startswith("d"):
                source = local_array(source, cases[int(item.name[1:])][1], rank.rank)
            if box.volume:
                assert (rebuilt[item.name][cut(box)] == -1).all()
                rebuilt[item.name][cut(box)] = source[cut(Box(item.local_offsets, item.sizes))]
            seen.add(item.name)
    assert seen == set(values)
    reports = StoredPlan(
        tuple(
            StoredRank(
                tuple(ReportFile(file.name, file.size, b"") for file in rank.files),
                index_of(rank).tensors,
                index_of(rank).objects,
            )
            for rank in plan.ranks
        )
    )
    assert render_metadata(reports) == render_metadata(plan)
    assert all(np.array_equal(rebuilt[name], array) for name, array in values.items())


# Read plans ----------------------------------------------------------------------------------------------------


def carry_out(piece: Transfer, files: dict[str, bytes], dest: Array) -> None:
    """Do what a reader would do, and nothing that it couldn't know."""
    start, end = byte_span(piece)
    data = files[piece.file][start:end]
    assert len(data) == end - start
    if is_direct(piece):
        flat = memoryview(dest).cast("B")
        offset = dest_offset(piece)
        flat[offset : offset + piece.nbytes] = data
        return
    payload = np.full(prod(piece.stored.sizes), -7, dtype=np.int32)
    first = (start - piece.payload_offset) // piece.itemsize
    payload[first : first + len(data) // piece.itemsize] = np.frombuffer(data, dtype=np.int32)
    dest[within(piece.region, piece.dest_box)] = payload.reshape(piece.stored.sizes)[within(piece.region, piece.stored)]


resharded = shapes.flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        tilings(whole(shape)),
        st.lists(boxes_in(whole(shape)), max_size=2),
        st.lists(boxes_in(whole(shape)).flatmap(lambda d: st.tuples(st.just(d), boxes_in(d))), min_size=1, max_size=3),
    )
)


@settings(max_examples=200)
@given(resharded, st.integers(4, 200), st.data())
def test_a_read_plan_brings_every_wanted_element(
    case: tuple[tuple[int, ...], list[Box], list[Box], list[tuple[Box, Box]]], max_bytes: int, data: st.DataObject
) -> None:
    shape, tiles, replicas, destinations = case
    values = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    files: dict[str, bytes] = {"f0": b"#" * 3, "f1": b"#" * 5}
    shards = []
    for box in data.draw(st.permutations([*tiles, *replicas])):
        file = data.draw(st.sampled_from(sorted(files)))
        payload = values[cut(box)].tobytes()
        shards.append(StoredShard(box, file, len(files[file]), len(payload)))
        files[file] += payload + b"#"
    tensor = StoredTensor("w", "int32", shape, tuple(shards))
    wants = [Want("w", box, number, dest_box) for number, (dest_box, box) in enumerate(destinations)]
    buffers = [np.full(dest_box.sizes, -1, dtype=np.int32) for dest_box, _ in destinations]
    plan = plan_reads(wants, {"w": tensor})
    assert plan.nbytes == sum(box.volume for _, box in destinations) * 4  # nothing is read twice
    for transfer in plan.transfers:
        for piece in row_chunks(transfer, max_bytes):
            start, end = byte_span(piece)
            assert is_direct(piece) or end - start <= max_bytes
            carry_out(piece, files, buffers[piece.dest])
    for (dest_box, box), buffer in zip(destinations, buffers, strict=True):
        expected = np.full(dest_box.sizes, -1, dtype=np.int32)
        expected[within(box, dest_box)] = values[cut(box)]
        assert np.array_equal(buffer, expected)
