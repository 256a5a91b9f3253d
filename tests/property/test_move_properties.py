"""The algebra of moves against what plain Python loops do, on small random nests."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import hypothesis.strategies as st
from hypothesis import given

from holdfast.boxes import Box, element_offset, whole
from holdfast.keymap.moves import (
    Move,
    coalesced,
    first_defect,
    inverted,
    relocated,
    restrict_source,
    restrict_target,
    retargeted,
    run,
    through,
    without,
)

Pairs = list[tuple[int, int]]


def pairs(move: Move) -> Pairs:
    """(target, source) of every element, in the order of the loops."""
    return [
        (
            move.target_offset + sum(i * t for i, t in zip(index, move.target_strides, strict=True)),
            move.source_offset + sum(i * s for i, s in zip(index, move.source_strides, strict=True)),
        )
        for index in product(*map(range, move.counts))
    ]


def all_pairs(moves: list[Move] | tuple[Move, ...]) -> Pairs:
    return sorted(pair for move in moves for pair in pairs(move))


def is_valid(move: Move) -> bool:
    """As `Move` promises: targets rise through the loops, each once."""
    targets = [target for target, _ in pairs(move)]
    return all(a < b for a, b in pairwise(targets)) and all(t > 0 for t in move.target_strides)


@st.composite
def nests(draw: st.DrawFn, *, source_low: int = 0, source_high: int = 60) -> Move:
    """Any move of at most 3 loops whose source indices lie in [source_low, source_high)."""
    counts = draw(st.lists(st.integers(1, 4), max_size=3))
    strides: list[int] = []
    span = 0
    for count in reversed(counts):
        step = span + draw(st.integers(1, 4))
        strides.insert(0, step)
        span += (count - 1) * step
    source_strides = [draw(st.integers(-7, 13)) for _ in counts]
    low = sum(min(0, (n - 1) * s) for n, s in zip(counts, source_strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(counts, source_strides, strict=True))
    while high - low >= source_high - source_low:
        source_strides = [s // 2 if s > 0 else -(-s // 2) for s in source_strides]
        low = sum(min(0, (n - 1) * s) for n, s in zip(counts, source_strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(counts, source_strides, strict=True))
    offset = draw(st.integers(source_low - low, source_high - 1 - high))
    return Move("a", tuple(counts), draw(st.integers(0, 9)), tuple(strides), offset, tuple(source_strides))


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    keep = [draw(st.booleans()) for _ in shape]
    return shape, Box(
        tuple(0 if k else o for k, o in zip(keep, offsets, strict=True)),
        tuple(n if k else s for k, n, s in zip(keep, shape, sizes, strict=True)),
    )


def in_box(index: int, shape: tuple[int, ...], box: Box) -> bool:
    coordinates = []
    for size in reversed(shape):
        index, c = divmod(index, size)
        coordinates.insert(0, c)
    return all(o <= c < o + s for c, o, s in zip(coordinates, box.offsets, box.sizes, strict=True))


def local_index(index: int, shape: tuple[int, ...], box: Box) -> int:
    coordinates = []
    for size in reversed(shape):
        index, c = divmod(index, size)
        coordinates.insert(0, c)
    return element_offset(Box(tuple(coordinates), (1,) * len(shape)), box)


@given(nests(), st.integers(-3, 70), st.integers(0, 60))
def test_what_a_range_of_the_target_is_filled_by(move: Move, start: int, length: int) -> None:
    parts = restrict_target(move, start, start + length)
    assert all_pairs(parts) == [pair for pair in sorted(pairs(move)) if start <= pair[0] < start + length]
    assert all(map(is_valid, parts))
    assert len(parts) <= 2 * len(move.counts) + 1


@given(st.data(), shapes_and_boxes())
def test_what_a_shard_has_of_a_move_and_where_it_lies_in_the_shard(
    data: st.DataObject, shape_and_box: tuple[tuple[int, ...], Box]
) -> None:
    shape, box = shape_and_box
    move = data.draw(nests(source_high=prod(shape)))
    parts = restrict_source(move, shape, box)
    assert all_pairs(parts) == [pair for pair in sorted(pairs(move)) if in_box(pair[1], shape, box)]
    assert all(map(is_valid, parts))
    for part in parts:
        local = relocated(part, shape, box)
        assert pairs(local) == [(target, local_index(source, shape, box)) for target, source in pairs(part)]
        for piece in restrict_target(part, part.target_offset + 1, part.target_stop - 1):
            expected = [(target, local_index(source, shape, box)) for target, source in pairs(piece)]
            assert pairs(relocated(piece, shape, box)) == expected


@given(shapes_and_boxes(), shapes_and_boxes())
def test_shards_that_tile_a_source_give_each_element_once(
    shape_and_box: tuple[tuple[int, ...], Box], other: tuple[tuple[int, ...], Box]
) -> None:
    shape, box = shape_and_box
    del other
    identity = run("a", prod(shape))
    parts = restrict_source(identity, shape, box)
    assert len(parts) == (1 if box.volume else 0)  # what is a box in the source stays one nest
    assert sum(part.volume for part in parts) == box.volume


@given(st.data(), nests())
def test_through_a_buffer(data: st.DataObject, other: Move) -> None:
    move = data.draw(nests(source_low=0, source_high=max(other.target_stop + 5, 60)))
    filled = dict(pairs(other))
    parts = through(move, other)
    assert all_pairs(parts) == sorted((target, filled[s]) for target, s in pairs(move) if s in filled)
    assert all(map(is_valid, parts))
    assert all(part.source == other.source for part in parts)


@given(nests(), nests())
def test_what_stays_when_something_is_overwritten(move: Move, hole: Move) -> None:
    gone = {target for target, _ in pairs(hole)}
    parts = without(move, hole)
    assert all_pairs(parts) == [pair for pair in sorted(pairs(move)) if pair[0] not in gone]
    assert all(map(is_valid, parts))


@st.composite
def views(draw: st.DrawFn) -> Move:
    """A view of a buffer, as torch has it: row-major indices of the view, and where each lies; none twice."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    strides: list[int] = []
    span = 0
    for size in reversed(sizes):
        step = span + draw(st.integers(1, 3))
        strides.insert(0, step)
        span += (size - 1) * step
    order = draw(st.permutations(range(len(sizes))))
    shape = [sizes[d] for d in order]
    return Move(
        "view",
        tuple(shape),
        0,
        tuple(prod(shape[d + 1 :]) for d in range(len(shape))),
        draw(st.integers(0, 9)),
        tuple(strides[d] for d in order),
    )


@given(nests(), views())
def test_writing_through_a_view(move: Move, view: Move) -> None:
    where = dict(pairs(view))
    parts = retargeted(move, view)
    assert all_pairs(parts) == sorted((where[target], source) for target, source in pairs(move) if target in where)
    assert all(map(is_valid, parts))


@given(nests())
def test_the_way_back(move: Move) -> None:
    back = inverted(move, "b")
    assert all(map(is_valid, back))
    there = set(pairs(move))
    for source, target in all_pairs(back):
        assert (target, source) in there
    assert {source for source, _ in all_pairs(back)} == {source for _, source in there}


@given(nests(source_high=200), st.data())
def test_pieces_of_a_move_grow_together_again(move: Move, data: st.DataObject) -> None:
    pieces = [move]
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(move.target_offset, move.target_stop))
        pieces = [
            part
            for piece in pieces
            for part in (
                *restrict_target(piece, 0, at),
                *restrict_target(piece, at, move.target_stop),
            )
        ]
    joined = coalesced(data.draw(st.permutations(pieces)))
    assert all_pairs(joined) == sorted(pairs(move))
    assert all(map(is_valid, joined))
    if len(move.counts) <= 2:
        assert len(joined) == 1


@given(st.lists(nests(), max_size=4))
def test_coalescing_changes_nothing(moves: list[Move]) -> None:
    joined = coalesced(moves)
    assert all_pairs(joined) == all_pairs(moves)
    assert all(map(is_valid, joined))
    assert len(joined) <= len(moves)
    assert [move.target_offset for move in joined] == sorted(move.target_offset for move in joined)


@given(st.lists(nests(), max_size=4), st.integers(0, 40))
def test_a_defect_is_found_exactly_where_there_is_one(moves: list[Move], numel: int) -> None:
    targets = sorted(target for move in moves for target, _ in pairs(move))
    defect = first_defect(moves, numel)
    assert (defect is None) == (targets == list(range(numel)))
    if defect is None:
        return
    if defect.kind == "gap":
        assert any(index not in targets for index in range(defect.start, defect.stop))
    elif defect.kind == "outside":
        assert defect.start < 0 or defect.stop > numel
    else:
        assert any(targets.count(index) > 1 for index in range(defect.start, defect.stop))


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_moves_cover(data: st.DataObject, a: int, b: int, c: int) -> None:
    """As ``torch.stack(parts, dim=1)`` of ``c`` tensors of ``a`` x ``b`` makes them."""
    moves = [Move(f"t{n}", (a, b), n * b, (c * b, 1), 0, (b, 1)) for n in range(c)]
    assert first_defect(moves, a * b * c) is None
    gone = data.draw(st.integers(0, c - 1))
    defect = first_defect(moves[:gone] + moves[gone + 1 :], a * b * c)
    assert defect is not None and defect.kind == "gap"
    twice = first_defect([*moves, moves[gone]], a * b * c)
    assert twice is not None and twice.kind == "overlap"


def test_shards_of_rows_and_columns_stay_one_move() -> None:
    identity = run("w", 4096 * 1024)
    shape = (4096, 1024)
    rows = restrict_source(identity, shape, Box((1000, 0), (24, 1024)))
    assert rows == [Move("w", (24 * 1024,), 1000 * 1024, (1,), 1000 * 1024, (1,))]
    assert relocated(rows[0], shape, Box((1000, 0), (24, 1024))).source_offset == 0
    columns = restrict_source(identity, shape, Box((0, 256), (4096, 128)))
    assert columns == [Move("w", (4096, 128), 256, (1024, 1), 256, (1024, 1))]
    assert relocated(columns[0], shape, Box((0, 256), (4096, 128))).source_strides == (128, 1)


def test_a_whole_source_is_left_as_it_is() -> None:
    move = Move("w", (8, 4), 0, (4, 1), 0, (1, 8))
    assert restrict_source(move, (4, 8), whole((4, 8))) == [move]
    assert relocated(move, (4, 8), whole((4, 8))) is move
    assert restrict_target(move, 0, 32) == [move]


def test_a_transpose_cut_by_rows_of_the_source_stays_one_move() -> None:
    move = Move("w", (8, 4), 0, (4, 1), 0, (1, 8))  # target (8, 4) = source (4, 8) transposed
    parts = restrict_source(move, (4, 8), Box((1, 0), (2, 8)))
    assert parts == [Move("w", (8, 2), 1, (4, 1), 8, (1, 8))]
    assert relocated(parts[0], (4, 8), Box((1, 0), (2, 8))) == Move("w", (8, 2), 1, (4, 1), 0, (1, 8))


def test_a_zero_dim_tensor_is_one_move_without_loops() -> None:
    one = Move("s", (), 0, (), 0, ())
    assert first_defect([one], 1) is None
    assert coalesced([run("s", 1)]) == (one,)
    assert restrict_source(one, (), Box((), ())) == [one]
    assert first_defect([], 0) is None


def test_cost_is_of_parts_and_not_of_elements() -> None:
    """Moves over 10**15 elements: enumerating any of them would never end."""
    side = 10**5
    shape = (side, side, side)
    move = Move("w", (side, side, side), 0, (side * side, side, 1), 0, (1, side * side, side))
    assert first_defect([move], side**3) is None
    for box in (Box((7, 0, 0), (5, side, side)), Box((0, 7, 0), (side, 5, side)), Box((0, 0, 7), (side, side, 5))):
        parts = restrict_source(move, shape, box)
        assert len(parts) == 1 and parts[0].volume == box.volume
        relocated(parts[0], shape, box)
    assert len(restrict_target(move, 12345, 10**14 + 777)) <= 7
    assert len(inverted(move, "t")) == 1
