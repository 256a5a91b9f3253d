"""The sums equal those of a direct hash, for any files, tensors, units and pieces."""

import random
import struct
import time

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.checksums import Sums, compile_plan, hash_unit
from holdfast.engine.messages import AddPlan, FileRow
from holdfast.format.manifest import EXTENT_BYTES

IMAGE = memoryview(random.Random(5).randbytes(5 << 20))


def add_plan(rows, tensors):
    return AddPlan(
        1,
        tuple(rows),
        struct.pack(f"<{len(tensors)}Q", *(offset for offset, _ in tensors)),
        struct.pack(f"<{len(tensors)}Q", *(size for _, size in tensors)),
        b"",
    )


def walk(image, rows, tensors, *, unit_bytes, piece_bytes):
    plan = compile_plan(add_plan(rows, tensors), unit_bytes=unit_bytes)
    sums = Sums(plan)
    for unit in plan.units:
        hash_unit(image, plan, unit, sums, piece_bytes)
    return plan, sums


def direct(data):
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


@st.composite
def layouts(draw):
    """Consecutive files in an image, some with gaps, and disjoint tensors in them, in any order."""
    rows, tensors, at = [], [], 0
    for number in range(draw(st.integers(0, 3))):
        at += draw(st.sampled_from([0, 4096]))
        size = 4096 * draw(st.integers(0, 400))
        rows.append(FileRow(f"f{number}", size, at))
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=12)))
        for begin, end in zip(cuts[::2], cuts[1::2], strict=False):
            tensors.append((at + begin, end - begin))
        at += size
    draw(st.randoms()).shuffle(tensors)
    draw(st.randoms()).shuffle(rows)
    return rows, tensors


@settings(max_examples=60, deadline=None)
@given(
    layouts(), st.sampled_from([4096, 300_000, 1 << 20, 64 << 20]), st.sampled_from([4096, 65536, 256 << 10, 1 << 20])
)
def test_sums_are_those_of_a_direct_hash(layout, unit_bytes, piece_bytes):
    rows, tensors = layout
    _, sums = walk(IMAGE, rows, tensors, unit_bytes=unit_bytes, piece_bytes=piece_bytes)
    for row, extents in zip(rows, sums.extents, strict=True):
        end = row.image_offset + row.size
        starts = range(row.image_offset, end, EXTENT_BYTES)
        assert extents == b"".join(direct(IMAGE[at : min(at + EXTENT_BYTES, end)]) for at in starts)
    assert sums.tensors == b"".join(direct(IMAGE[at : at + size]) for at, size in tensors)


def test_a_flipped_bit_changes_exactly_its_extent_and_tensor():
    rows, tensors = [FileRow("a", 4 << 20, 0)], [(100, 1 << 20), (2 << 20, 1 << 20)]
    image = bytearray(IMAGE[: 4 << 20])
    _, before = walk(memoryview(image), rows, tensors, unit_bytes=1 << 20, piece_bytes=256 << 10)
    image[(2 << 20) + 17] ^= 4
    _, after = walk(memoryview(image), rows, tensors, unit_bytes=1 << 20, piece_bytes=256 << 10)
    changed = [i for i in range(4) if before.extents[0][i * 8 :][:8] != after.extents[0][i * 8 :][:8]]
    assert changed == [2]
    assert before.tensors[:8] == after.tensors[:8]
    assert before.tensors[8:] != after.tensors[8:]


def test_units_are_cut_at_tensors_only():
    plan = compile_plan(add_plan([FileRow("a", 5 << 20, 0)], [(0, 3 << 20), (3 << 20, 1 << 20)]), unit_bytes=1 << 20)
    assert [(unit.start, unit.end) for unit in plan.units] == [(0, 3 << 20), (3 << 20, 5 << 20)]


@pytest.mark.parametrize(
    ("rows", "tensors", "says"),
    [
        ([FileRow("a", 8192, 0), FileRow("b", 4096, 4096)], [], "overlaps"),
        ([FileRow("a", 4096, 0)], [(4000, 200)], "leaves file a"),
        ([FileRow("a", 4096, 0)], [(8192, 10)], "lies in no file"),
        ([FileRow("a", 4096, 4096)], [(10, 10)], "lies in no file"),
        ([FileRow("a", 4096, 0)], [(0, 100), (50, 100)], "overlaps another"),
    ],
)
def test_an_inconsistent_plan_is_refused(rows, tensors, says):
    with pytest.raises(ValueError, match=says):
        compile_plan(add_plan(rows, tensors))


def test_a_plan_with_truncated_numbers_is_refused():
    with pytest.raises(ValueError, match="8-byte"):
        compile_plan(AddPlan(1, (), b"123", b"", b""))
    with pytest.raises(ValueError, match="sizes"):
        compile_plan(AddPlan(1, (), bytes(16), bytes(8), b""))


def test_a_hundred_thousand_small_tensors_are_quick():
    tensors = [(index * 40, 36) for index in range(100_000)]
    started = time.perf_counter()
    walk(IMAGE, [FileRow("a", 4 << 20, 0)], tensors, unit_bytes=32 << 20, piece_bytes=256 << 10)
    assert time.perf_counter() - started < 3  # 0.15 s on an idle machine
