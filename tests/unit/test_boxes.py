"""Boxes by hand-made cases; their arithmetic against numpy is in tests/property/test_plan_properties.py."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from holdfast.boxes import (
    Box,
    StridedIndex,
    contains,
    element_offset,
    element_span,
    first_defect,
    intersect,
    is_contiguous_in,
    row_blocks,
    run_length,
    runs,
    strides,
    subtract,
    whole,
)

SCALAR = Box((), ())


def test_a_box_says_its_volume_bounds_and_name() -> None:
    box = Box((2, 0), (3, 4))
    assert box.volume == 12
    assert box.stops == (5, 4)
    assert str(box) == "[2:5, 0:4]"
    assert SCALAR.volume == 1
    assert whole((3, 0)).volume == 0


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (Box((0,), (4,)), Box((2,), (4,)), Box((2,), (2,))),
        (Box((0,), (4,)), Box((4,), (4,)), None),
        (Box((0, 0), (4, 4)), Box((1, 3), (1, 9)), Box((1, 3), (1, 1))),
        (Box((0, 0), (4, 4)), Box((1, 4), (1, 9)), None),
        (Box((0,), (0,)), Box((0,), (3,)), None),
        (SCALAR, SCALAR, SCALAR),
    ],
)
def test_intersect(a: Box, b: Box, shared: Box | None) -> None:
    assert intersect(a, b) == shared
    assert intersect(b, a) == shared


def test_contains_counts_bounds_even_of_empty_boxes() -> None:
    assert contains(Box((2,), (3,)), Box((2,), (3,)))
    assert contains(whole((4,)), Box((4,), (0,)))
    assert not contains(whole((4,)), Box((5,), (0,)))
    assert not contains(whole((4,)), Box((3,), (2,)))
    assert not contains(whole((4,)), SCALAR)
    assert contains(SCALAR, SCALAR)


def test_subtract_leaves_what_is_not_shared() -> None:
    assert subtract(whole((4,)), Box((1,), (2,))) == [Box((0,), (1,)), Box((3,), (1,))]
    assert subtract(whole((4,)), Box((9,), (2,))) == [whole((4,))]
    assert subtract(whole((2, 2)), whole((2, 2))) == []
    assert subtract(SCALAR, SCALAR) == []
    assert subtract(whole((0,)), whole((3,))) == []


def test_strides_of_a_row_major_buffer() -> None:
    assert strides((2, 3, 4)) == (12, 4, 1)
    assert strides(()) == ()


def test_offsets_count_from_the_outer_boxs_own_corner() -> None:
    outer = Box((10, 20), (4, 5))
    assert element_offset(Box((11, 22), (2, 2)), outer) == 7
    assert element_span(Box((11, 22), (2, 2)), outer) == (7, 14)
    assert element_span(Box((11, 22), (2, 0)), outer) == (0, 0)
    assert element_span(SCALAR, SCALAR) == (0, 1)


@pytest.mark.parametrize(
    ("box", "outer", "expected"),
    [
        (Box((1, 0), (2, 5)), whole((4, 5)), True),
        (Box((1, 1), (1, 3)), whole((4, 5)), True),
        (Box((1, 1), (2, 3)), whole((4, 5)), False),
        (Box((1, 1, 0), (1, 2, 4)), whole((3, 3, 4)), True),
        (Box((1, 1, 0), (2, 2, 4)), whole((3, 3, 4)), False),
        (Box((0, 1), (2, 0)), whole((4, 5)), True),
        (Box((0, 0), (5, 1)), whole((7, 1)), True),
        (SCALAR, SCALAR, True),
    ],
)
def test_contiguity(box: Box, outer: Box, expected: bool) -> None:
    assert is_contiguous_in(box, outer) is expected


def test_runs_are_maximal_and_in_order() -> None:
    outer = whole((3, 4, 5))
    assert run_length(Box((0, 1, 0), (2, 2, 5)), outer) == 10
    assert list(runs(Box((0, 1, 0), (2, 2, 5)), outer)) == [(5, 10), (25, 10)]
    assert list(runs(Box((1, 1, 2), (1, 2, 2)), outer)) == [(27, 2), (32, 2)]
    assert list(runs(outer, outer)) == [(0, 60)]
    assert list(runs(SCALAR, SCALAR)) == [(0, 1)]
    assert list(runs(Box((0, 0, 0), (0, 4, 5)), outer)) == []


def test_a_tiling_has_no_defect() -> None:
    assert first_defect(whole((4, 4)), [Box((0, 0), (4, 1)), Box((0, 1), (3, 3)), Box((3, 1), (1, 3))]) is None
    assert first_defect(whole((4, 4)), [whole((4, 4)), Box((4, 4), (0, 0))]) is None
    assert first_defect(SCALAR, [SCALAR]) is None
    assert first_defect(whole((0, 4)), []) is None


@pytest.mark.parametrize(
    ("outer", "boxes", "defect"),
    [
        (whole((4,)), [Box((0,), (3,))], ("gap", Box((3,), (1,)))),
        (whole((4,)), [Box((0,), (3,)), Box((2,), (2,))], ("overlap", Box((2,), (1,)))),
        (whole((4,)), [Box((0,), (5,))], ("outside", Box((0,), (5,)))),
        (whole((2, 2)), [Box((0, 0), (2, 1))], ("gap", Box((0, 1), (2, 1)))),
        (whole((2,)), [], ("gap", whole((2,)))),
        (SCALAR, [], ("gap", SCALAR)),
        (SCALAR, [SCALAR, SCALAR], ("overlap", SCALAR)),
    ],
)
def test_defects_are_named_by_where_they_are(outer: Box, boxes: list[Box], defect: tuple[str, Box]) -> None:
    assert first_defect(outer, boxes) == defect


def test_one_box_object_given_twice_overlaps_itself() -> None:
    box = Box((0, 0), (2, 1))
    assert first_defect(whole((2, 2)), [box, box, Box((0, 1), (2, 1))]) == ("overlap", box)


def test_a_large_grid_is_checked_quickly() -> None:
    grid = [Box((r, c), (1, 1)) for r in range(64) for c in range(64)]
    assert first_defect(whole((64, 64)), grid) is None
    assert first_defect(whole((64, 64)), grid[:-1]) == ("gap", Box((63, 63), (1, 1)))


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ((), ()),
        ((3,), (1000,)),
        ((1, 2), (7, 90)),
        ((0, 5, 1), (1, 40, 33)),
        ((2, 0, 0, 1), (3, 1, 1, 500)),
        ((0,), (0,)),
    ],
)
@pytest.mark.parametrize("most", [1, 25, 300, 1 << 18])
def test_row_blocks_are_the_box_and_small_runs_of_it(
    offsets: tuple[int, ...], sizes: tuple[int, ...], most: int
) -> None:
    box = Box(offsets, sizes)
    pieces = list(row_blocks(box, most))
    assert first_defect(box, pieces) is None
    assert sum(piece.volume for piece in pieces) == box.volume
    assert all(piece.volume <= most for piece in pieces)
    assert all(is_contiguous_in(piece, box) for piece in pieces if piece.volume)


def test_row_blocks_lie_one_behind_the_other() -> None:
    assert list(row_blocks(Box((1, 0, 2), (2, 3, 4)), 8)) == [
        Box((1, 0, 2), (1, 2, 4)),
        Box((1, 2, 2), (1, 1, 4)),
        Box((2, 0, 2), (1, 2, 4)),
        Box((2, 2, 2), (1, 1, 4)),
    ]
    assert list(row_blocks(Box((0,), (5,)), 2)) == [Box((0,), (2,)), Box((2,), (2,)), Box((4,), (1,))]
    assert list(row_blocks(whole(()), 1)) == [whole(())]


# Loop nests over two memories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(), (0,), (3, 0, 2), (7,), (5, 4, 3), (1, 100, 1), (2, 3, 50), (101,)])
@pytest.mark.parametrize("most", [1, 2, 7, 60])
def test_parts_of_a_strided_index_are_small_and_together_the_index(counts: tuple[int, ...], most: int) -> None:
    source_steps = tuple(7 * step for step in reversed(strides(tuple(reversed(counts)))))

    def pairs(index: StridedIndex) -> list[tuple[int, int]]:
        sizes, source, by, target, to = index
        return [
            (
                source + sum(a * b for a, b in zip(index, by, strict=True)),
                target + sum(a * b for a, b in zip(index, to, strict=True)),
            )
            for index in product(*map(range, sizes))
        ]

    index = StridedIndex(counts, 11, source_steps, 5, strides(counts))
    parts = list(index.parts(most))
    assert all(prod(part.counts) <= most for part in parts)
    assert [pair for part in parts for pair in pairs(part)] == pairs(index)
    assert [pair for part in index.merged().parts(most) for pair in pairs(part)] == pairs(index)
    assert len(parts) <= 1 + 2 * prod(counts) // most * 2


def test_bits_go_in_words_as_wide_as_rows_and_offsets_allow() -> None:
    assert StridedIndex((4, 6), 0, (6, 1), 0, (6, 1)).in_words(4) == (8, StridedIndex((12,), 0, (1,), 0, (1,)))
    assert StridedIndex((4, 6), 2, (8, 1), 6, (6, 1)).in_words(2) == (2, StridedIndex((4, 6), 1, (8, 1), 3, (6, 1)))
    assert StridedIndex((4, 6), 16, (8, 1), 0, (6, 1)).in_words(2) == (4, StridedIndex((4, 3), 4, (4, 1), 0, (3, 1)))
    assert StridedIndex((3,), 8, (-1,), 0, (1,)).in_words(4) == (4, StridedIndex((3, 1), 2, (-1, 1), 0, (1, 1)))
    assert StridedIndex((1, 1), 3, (1, 1), 5, (1, 1)).in_words(16) == (1, StridedIndex((16,), 3, (1,), 5, (1,)))
