"""Reads by hand-made cases; whole plans are executed on numpy arrays in tests/property/test_plan_properties.py."""

from __future__ import annotations

import time

import pytest

from holdfast.boxes import Box, whole
from holdfast.errors import CheckpointCorrupt, ConfigError, StateMismatch
from holdfast.plan.read import (
    ReadPlan,
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


def stored(shape: tuple[int, ...], boxes: list[Box], *, name: str = "w") -> dict[str, StoredTensor]:
    """A float32 tensor whose shards lie in a file each, at 1000."""
    shards = tuple(StoredShard(box, f"f{i}", 1000, box.volume * 4) for i, box in enumerate(boxes))
    return {name: StoredTensor(name, "float32", shape, shards)}


def plan(tensors: dict[str, StoredTensor], box: Box, dest_box: Box | None = None) -> ReadPlan:
    return plan_reads([Want("w", box, 7, dest_box or box)], tensors)


def transfer(stored_box: Box, region: Box, dest_box: Box) -> Transfer:
    return Transfer("w", "f", 1000, stored_box, region, 7, dest_box, 4)


def test_an_equal_shard_is_one_direct_transfer() -> None:
    box = Box((2, 0), (2, 4))
    found = plan(stored((6, 4), [Box((0, 0), (2, 4)), box, Box((4, 0), (2, 4))]), box)
    assert found.transfers == (Transfer("w", "f1", 1000, box, box, 7, box, 4),)
    assert is_direct(found.transfers[0])
    assert byte_span(found.transfers[0]) == (1000, 1032)
    assert dest_offset(found.transfers[0]) == 0
    assert found.nbytes == 32


def test_a_wanted_box_meets_only_what_it_needs() -> None:
    rows = [Box((2 * i, 0), (2, 4)) for i in range(100)]
    found = plan(stored((200, 4), rows), Box((3, 1), (4, 2)), whole((200, 4)))
    assert [(t.file, t.region) for t in found.transfers] == [
        ("f1", Box((3, 1), (1, 2))),
        ("f2", Box((4, 1), (2, 2))),
        ("f3", Box((6, 1), (1, 2))),
    ]
    assert byte_span(found.transfers[1]) == (1004, 1028)
    assert dest_offset(found.transfers[1]) == (4 * 4 + 1) * 4


def test_scalars_and_tensors_without_elements() -> None:
    found = plan(stored((), [Box((), ())]), Box((), ()))
    assert len(found.transfers) == 1
    assert is_direct(found.transfers[0])
    assert plan(stored((0, 4), [whole((0, 4))]), whole((0, 4))).transfers == ()
    assert plan(stored((4, 4), [whole((4, 4))]), Box((4, 0), (0, 4))).transfers == ()


def test_replicas_stored_twice_are_read_once() -> None:
    box = whole((4, 4))
    assert [t.file for t in plan(stored((4, 4), [box, box]), box).transfers] == ["f0"]
    overlapping = [Box((0, 0), (3, 4)), Box((1, 0), (3, 4)), Box((0, 1), (4, 2))]
    found = plan(stored((4, 4), overlapping), box)
    assert sum(t.region.volume for t in found.transfers) == 16


def test_transfers_come_in_the_order_of_the_files() -> None:
    shards = (StoredShard(Box((0,), (2,)), "b", 50, 8), StoredShard(Box((2,), (2,)), "a", 90, 8))
    other = (StoredShard(Box((0,), (2,)), "b", 10, 8),)
    tensors = {"w": StoredTensor("w", "float32", (4,), shards), "v": StoredTensor("v", "float32", (2,), other)}
    found = plan_reads([Want("w", whole((4,)), 0, whole((4,))), Want("v", whole((2,)), 1, whole((2,)))], tensors)
    assert [(t.file, byte_span(t)[0]) for t in found.transfers] == [("a", 90), ("b", 10), ("b", 50)]
    assert {file: len(items) for file, items in found.by_file().items()} == {"a": 1, "b": 2}


def test_all_missing_tensors_are_named_at_once() -> None:
    wants = [Want(name, whole((1,)), 0, whole((1,))) for name in ("x", "w", "a")]
    with pytest.raises(StateMismatch, match="a, x") as caught:
        plan_reads(wants, stored((1,), [whole((1,))]))
    assert caught.value.missing == ("a", "x")


@pytest.mark.parametrize("box", [whole((5, 4)), whole((4,)), Box((3, 0), (2, 4))])
def test_a_box_outside_the_stored_tensor_is_a_mismatch(box: Box) -> None:
    with pytest.raises(StateMismatch, match=r"'w'.*\[4, 4\]") as caught:
        plan(stored((4, 4), [whole((4, 4))]), box)
    assert caught.value.mismatched == ("w",)


def test_a_box_outside_its_destination_is_refused() -> None:
    with pytest.raises(ConfigError, match="destination"):
        plan(stored((4,), [whole((4,))]), whole((4,)), whole((3,)))


def test_a_part_that_is_not_stored_is_named() -> None:
    holed = stored((6, 4), [Box((0, 0), (2, 4)), Box((4, 0), (2, 4))])
    with pytest.raises(CheckpointCorrupt, match=r"'w'.*\[2:4, 0:4\]") as caught:
        plan(holed, whole((6, 4)))
    assert (caught.value.tensor, caught.value.path) == ("w", "f0")
    assert len(plan(holed, Box((4, 0), (2, 4))).transfers) == 1
    with pytest.raises(CheckpointCorrupt, match=r"\[3:4\]"):
        plan(stored((4,), [Box((0,), (2,)), Box((1,), (2,))]), whole((4,)))
    with pytest.raises(CheckpointCorrupt, match="has 0 shards"):
        plan(stored((4,), []), whole((4,)))


@pytest.mark.parametrize(
    "shard",
    [
        StoredShard(Box((0,), (4,)), "f", 0, 15),
        StoredShard(Box((1,), (4,)), "f", 0, 16),
        StoredShard(Box((), ()), "f", 0, 4),
    ],
)
def test_a_shard_that_contradicts_its_tensor_is_corrupt(shard: StoredShard) -> None:
    with pytest.raises(CheckpointCorrupt, match="f: tensor 'w'"):
        StoredTensor("w", "float32", (4,), (shard,))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="quaternion"):
        StoredTensor("w", "quaternion", (4,), ())


# What a transfer takes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored_box", "region", "dest_box", "direct"),
    [
        (whole((8, 4)), Box((2, 0), (3, 4)), Box((2, 0), (3, 4)), True),
        (whole((8, 4)), Box((2, 0), (3, 2)), Box((2, 0), (3, 2)), False),
        (Box((2, 0), (3, 2)), Box((2, 0), (3, 2)), whole((8, 4)), False),
        (whole((8, 4)), Box((2, 1), (1, 2)), whole((9, 9)), True),
    ],
)
def test_direct_means_contiguous_on_both_sides(stored_box: Box, region: Box, dest_box: Box, direct: bool) -> None:
    assert is_direct(transfer(stored_box, region, dest_box)) is direct


def test_row_chunks_fit_the_buffer() -> None:
    columns = transfer(whole((100, 64)), Box((0, 0), (100, 8)), Box((0, 0), (100, 8)))
    chunks = list(row_chunks(columns, 1024))
    assert all(byte_span(chunk)[1] - byte_span(chunk)[0] <= 1024 for chunk in chunks)
    assert len(chunks) == 25
    assert sum(chunk.region.volume for chunk in chunks) == 800
    assert chunks[0].region.offsets == (0, 0)
    assert chunks[1].region.offsets == (4, 0)


def test_row_chunks_go_down_to_rows_that_need_no_buffer() -> None:
    columns = transfer(whole((3, 4, 64)), Box((0, 0, 0), (3, 4, 32)), Box((0, 0, 0), (3, 4, 32)))
    chunks = list(row_chunks(columns, 16))
    assert len(chunks) == 12
    assert all(is_direct(chunk) and chunk.region.sizes == (1, 1, 32) for chunk in chunks)


def test_row_chunks_leave_alone_what_is_direct_or_fits() -> None:
    direct = transfer(whole((100, 64)), Box((5, 0), (90, 64)), Box((5, 0), (90, 64)))
    assert list(row_chunks(direct, 4)) == [direct]
    small = transfer(whole((4, 4)), Box((0, 0), (2, 2)), Box((0, 0), (2, 2)))
    assert list(row_chunks(small, 24)) == [small]
    assert len(list(row_chunks(small, 23))) == 2
    with pytest.raises(ConfigError, match="max_bytes is 3"):
        list(row_chunks(small, 3))


# Scale ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_finding_one_of_many_shards_does_not_look_at_all(dim: int) -> None:
    shards = 50_000
    shape = (shards, 2) if dim == 0 else (2, shards)
    boxes = [Box((i, 0) if dim == 0 else (0, i), (1, 2) if dim == 0 else (2, 1)) for i in range(shards)]
    tensors = stored(shape, boxes)
    wants = [Want("w", box, 0, box) for box in boxes[::100]]
    started = time.perf_counter()
    found = plan_reads(wants, tensors)
    assert time.perf_counter() - started < 1.0  # 10 ms on an idle machine; looking at all takes 15 s
    assert len(found.transfers) == len(wants)
