"""What a receiver takes of whom, and which buckets it comes in, by hand-made cases."""

from __future__ import annotations

import time
from itertools import pairwise
from math import prod

import msgspec
import pytest

from holdfast.boxes import Box, whole
from holdfast.errors import ConfigError, StateMismatch
from holdfast.sync.weights.buckets import (
    BUCKET_ALIGN_BYTES,
    BucketPlan,
    Piece,
    PieceBox,
    Wanted,
    plan_buckets,
    select,
)


def piece(name: str, box: Box, shape: tuple[int, ...], dtype: str = "float32") -> Piece:
    return Piece(name, dtype, shape, *box)


def rows(name: str, shape: tuple[int, ...], cuts: list[int], dtype: str = "float32") -> list[Piece]:
    """The rows of a tensor between each two of ``cuts``."""
    return [
        piece(name, Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:])), shape, dtype)
        for start, stop in pairwise(cuts)
    ]


def everything(*pieces: Piece) -> list[PieceBox]:
    return [PieceBox(number, item.offsets, item.sizes) for number, item in enumerate(pieces)]


def want(name: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "float32") -> Wanted:
    return Wanted(name, dtype, shape, whole(shape) if box is None else box)


# select ----------------------------------------------------------------------------------------------------------


def test_a_receiver_takes_its_columns_of_every_publishers_rows() -> None:
    tables = [[item] for item in rows("w", (6, 4), [0, 3, 6])]
    parts = select(tables, [want("w", (6, 4), Box((0, 2), (6, 2)))])
    assert parts == [[PieceBox(0, (0, 2), (3, 2))], [PieceBox(0, (3, 2), (3, 2))]]


def test_without_wishes_everything_comes_whole() -> None:
    tables = [[*rows("w", (4,), [0, 2]), piece("s", whole(()), ())], rows("w", (4,), [2, 4])]
    assert select(tables, None) == [[PieceBox(0, (0,), (2,)), PieceBox(1, (), ())], [PieceBox(0, (2,), (2,))]]


def test_pieces_that_overlap_are_sent_once() -> None:
    tables = [[piece("w", Box((0,), (3,)), (4,))], [piece("w", Box((0,), (3,)), (4,)), piece("w", whole((4,)), (4,))]]
    parts = select(tables, None)
    sizes = [part.sizes[0] for found in parts for part in found]
    assert sum(sizes) == 4
    assert all(part.piece != 0 for part in parts[1])  # of the equal ones the first rank's


def test_boxes_of_one_tensor_that_overlap_are_wanted_once() -> None:
    boxes = [Box((0,), (3,)), Box((2,), (3,)), Box((0,), (3,))]
    parts = select([[piece("w", whole((6,)), (6,))]], [want("w", (6,), box) for box in boxes])
    assert parts == [[PieceBox(0, (0,), (3,)), PieceBox(0, (3,), (2,))]]


def test_a_tensor_without_elements_is_one_part_and_an_empty_box_is_none() -> None:
    tables = [[piece("none", whole((0, 4)), (0, 4)), piece("w", whole((4,)), (4,))] for _ in range(2)]
    parts = select(tables, [want("none", (0, 4)), want("w", (4,), Box((0,), (0,)))])
    assert parts == [[PieceBox(0, (0, 0), (0, 4))], []]


def test_names_that_differ_are_named_on_both_sides() -> None:
    with pytest.raises(StateMismatch, match=r"1 not published: `theirs`.*1 published.*`ours`") as caught:
        select([[piece("ours", whole((2,)), (2,))]], [want("theirs", (2,))])
    assert (caught.value.missing, caught.value.unexpected) == (("theirs",), ("ours",))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (want("w", (3,)), r"float32 \[2\] where it is published, float32 \[3\]"),
        (want("w", (2,), dtype="bfloat16"), r"bfloat16 \[2\] at the receiver"),
    ],
)
def test_shapes_and_dtypes_that_differ_are_named(wanted: Wanted, said: str) -> None:
    with pytest.raises(StateMismatch, match=said) as caught:
        select([[piece("w", whole((2,)), (2,))]], [wanted])
    assert caught.value.mismatched == ("w",)


def test_what_no_rank_sends_is_named() -> None:
    table = rows("w", (6,), [0, 2, 4])
    with pytest.raises(StateMismatch, match=r"no publisher rank sends its part \[4:6\]") as caught:
        select([table], None)
    assert caught.value.mismatched == ("w",)
    assert select([table], [want("w", (6,), Box((1,), (2,)))]) == [[PieceBox(0, (1,), (1,)), PieceBox(1, (2,), (1,))]]


def test_publishers_that_disagree_are_named() -> None:
    tables = [[piece("w", whole((2,)), (2,))], [piece("w", whole((3,)), (3,))]]
    with pytest.raises(StateMismatch, match=r"float32 \[3\] on publisher rank 1, but float32 \[2\] on rank 0"):
        select(tables, None)


@pytest.mark.parametrize(
    ("table", "wanted", "error"),
    [
        ([piece("w", Box((1,), (2,)), (2,))], None, StateMismatch),
        ([piece("w", whole((2,)), (2,), "float7")], None, ConfigError),
        ([piece("w", whole((2,)), (2,))], [want("w", (2,), Box((1,), (2,)))], ConfigError),
        ([piece("w", whole((2,)), (2,))], [want("w", (2,), Box((0, 0), (1, 1)))], ConfigError),
    ],
)
def test_tables_and_wishes_that_make_no_sense(
    table: list[Piece], wanted: list[Wanted] | None, error: type[Exception]
) -> None:
    with pytest.raises(error, match="'w'"):
        select([table], wanted)


# plan_buckets ----------------------------------------------------------------------------------------------------


def test_entries_are_aligned_and_in_the_order_of_the_table() -> None:
    table = [piece("a", whole((3,)), (3,)), piece("b", whole(()), (), "bool"), piece("c", whole((2, 2)), (2, 2))]
    (bucket,) = plan_buckets(table, [everything(*table)], 4096)
    assert [(entry.piece, entry.at, entry.nbytes) for entry in bucket.entries] == [
        (0, 0, 12),
        (1, 256, 1),
        (2, 512, 16),
    ]
    assert (bucket.lane, bucket.nbytes) == ((0,), 528)


def test_what_all_want_travels_once_and_slices_go_to_who_wants_them() -> None:
    table = [piece("shared", whole((2,)), (2,)), piece("cut", whole((4, 4)), (4, 4))]
    members = [[PieceBox(0, (0,), (2,)), PieceBox(1, (0, 2 * number), (4, 2))] for number in range(2)]
    buckets = plan_buckets(table, members, 4096)
    assert [(bucket.lane, [entry.piece for entry in bucket.entries]) for bucket in buckets] == [
        ((0, 1), [0]),
        ((0,), [1]),
        ((1,), [1]),
    ]


def test_slices_that_overlap_are_split_by_who_wants_them() -> None:
    table = [piece("w", whole((9, 4)), (9, 4))]
    members = [[PieceBox(0, (0, 0), (6, 4))], [PieceBox(0, (3, 0), (6, 4))], [PieceBox(0, (0, 0), (9, 4))]]
    found = {bucket.lane: [entry.box for entry in bucket.entries] for bucket in plan_buckets(table, members, 4096)}
    assert found == {
        (0, 2): [Box((0, 0), (3, 4))],
        (0, 1, 2): [Box((3, 0), (3, 4))],
        (1, 2): [Box((6, 0), (3, 4))],
    }


def test_lanes_fill_buckets_of_their_own_in_turns() -> None:
    table = [piece(f"w{number}", whole((2, 64)), (2, 64)) for number in range(4)]
    members = [[PieceBox(number, (row, 0), (1, 64)) for number in range(4)] for row in range(2)]
    buckets = plan_buckets(table, members, 512)
    assert [(bucket.lane, [entry.piece for entry in bucket.entries]) for bucket in buckets] == [
        ((0,), [0, 1]),
        ((1,), [0, 1]),
        ((0,), [2, 3]),
        ((1,), [2, 3]),
    ]


def test_a_large_part_is_cut_along_its_outer_dimensions_and_fills_its_buckets() -> None:
    table = [piece("w", whole((2, 10, 64)), (2, 10, 64))]  # rows of 256 bytes
    buckets = plan_buckets(table, [everything(*table)], 4 * 256)
    assert [bucket.nbytes for bucket in buckets] == [1024] * 5
    assert [entry.box for entry in buckets[2].entries] == [Box((0, 8, 0), (1, 2, 64)), Box((1, 0, 0), (1, 2, 64))]


def test_a_small_part_that_does_not_fit_any_more_goes_to_the_next_bucket_in_one() -> None:
    table = [piece("big", whole((15, 64)), (15, 64)), piece("small", whole((2, 64)), (2, 64))]
    buckets = plan_buckets(table, [everything(*table)], 16 * 256)
    assert [[entry.sizes for entry in bucket.entries] for bucket in buckets] == [[(15, 64)], [(2, 64)]]


def test_a_row_longer_than_a_bucket_is_refused_by_name() -> None:
    table = [piece("small", whole((4,)), (4,)), piece("wide", whole((3, 300)), (3, 300))]
    with pytest.raises(ConfigError, match=r"a row of 'wide' .* has 1200 bytes, but buckets have 1024") as caught:
        plan_buckets(table, [everything(*table)], 1024)
    assert caught.value.field == "bucket_bytes"
    assert plan_buckets(table, [everything(*table)], 1200)[-1].entries[-1].sizes == (1, 300)


def test_a_long_vector_is_cut_anywhere() -> None:
    table = [piece("bias", whole((1000,)), (1000,))]
    buckets = plan_buckets(table, [everything(*table)], 1024)
    assert [(entry.offsets, entry.sizes) for bucket in buckets for entry in bucket.entries] == [
        ((0,), (256,)),
        ((256,), (256,)),
        ((512,), (256,)),
        ((768,), (232,)),
    ]


@pytest.mark.parametrize(("shape", "dtype"), [((), "complex128"), ((1, 9), "float16")])
def test_what_has_one_row_is_never_cut(shape: tuple[int, ...], dtype: str) -> None:
    table = [piece("w", whole(shape), shape, dtype)]
    nbytes = 16 if not shape else 18
    assert plan_buckets(table, [everything(*table)], nbytes)[0].nbytes == nbytes
    with pytest.raises(ConfigError, match=f"has {nbytes} bytes"):
        plan_buckets(table, [everything(*table)], nbytes - 1)


def test_tensors_without_elements_get_entries_without_bytes() -> None:
    table = [piece("none", whole((0, 4)), (0, 4)), piece("w", whole((4,)), (4,)), piece("nil", whole((3, 0)), (3, 0))]
    (bucket,) = plan_buckets(table, [everything(*table)], 16)
    assert [(entry.piece, entry.nbytes) for entry in bucket.entries] == [(0, 0), (1, 16), (2, 0)]
    (alone,) = plan_buckets(table[:1], [everything(table[0])], 16)
    assert (alone.nbytes, alone.lane, len(alone.entries)) == (0, (0,), 1)


def test_nobody_wants_anything() -> None:
    table = [piece("w", whole((4,)), (4,))]
    assert plan_buckets(table, [], 64) == []
    assert plan_buckets(table, [[], [PieceBox(0, (1,), (0,))]], 64) == []


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (PieceBox(1, (0,), (1,)), "member 1 wants piece 1; the table has 1"),
        (PieceBox(-1, (0,), (1,)), "member 1 wants piece -1"),
        (PieceBox(0, (0,), (3,)), r"member 1 wants \[0:3\] of tensor 'w', of which this rank sends \[1:3\]"),
        (PieceBox(0, (0, 0), (1, 1)), "member 1 wants"),
    ],
)
def test_a_member_that_wants_what_is_not_there(part: PieceBox, said: str) -> None:
    table = [piece("w", Box((1,), (2,)), (4,))]
    with pytest.raises(ConfigError, match=said):
        plan_buckets(table, [everything(*table), [part]], 64)


def test_no_bucket_without_bytes() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        plan_buckets([], [], 0)


def test_plans_survive_the_wire() -> None:
    table = rows("w", (6, 64), [0, 3, 6])
    plans = plan_buckets(table, [everything(*table), everything(*table)[1:]], 512)
    encoded = msgspec.msgpack.encode(plans)
    assert msgspec.msgpack.decode(encoded, type=list[BucketPlan]) == plans
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=list[Piece]) == table


def test_many_pieces_cost_what_they_are() -> None:
    """6,400 pieces of 64 ranks: minutes would mean that each was compared with each."""
    shape = (1024, 64)
    tables: list[list[Piece]] = [[] for _ in range(64)]
    for number in range(100):
        for rank, item in enumerate(rows(f"w{number}", shape, list(range(0, 1025, 16)))):
            tables[rank].append(item)
    start = time.perf_counter()
    chosen = select(tables, [want(f"w{number}", shape, Box((0, 8), (1024, 8))) for number in range(100)])
    plans = plan_buckets(tables[0], [chosen[0], everything(*tables[0])], 1 << 20)
    assert time.perf_counter() - start < 10
    assert sum(prod(entry.sizes) for plan in plans for entry in plan.entries) == 100 * 16 * 64
    assert sum(prod(entry.sizes) for plan in plans if plan.lane == (0, 1) for entry in plan.entries) == 100 * 16 * 8
    assert all(entry.at % BUCKET_ALIGN_BYTES == 0 for plan in plans for entry in plan.entries)


def test_many_slices_of_one_piece_cost_what_they_are() -> None:
    """A thousand members with a row each of one piece."""
    table = [piece("w", whole((1000, 4)), (1000, 4))]
    start = time.perf_counter()
    plans = plan_buckets(table, [[PieceBox(0, (row, 0), (1, 4))] for row in range(1000)], 4096)
    assert time.perf_counter() - start < 5
    assert [plan.lane for plan in plans] == [(row,) for row in range(1000)]
