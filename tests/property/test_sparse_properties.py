"""Sparse deltas of bits: what is applied is what was encoded, for every dtype and pattern; damage is refused."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast import _torch_compat as compat
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format import sparse
from holdfast.format.sparse import BLOCK_UNITS, KINDS, apply, encode, fold, read_head, unit_of

SPECIAL = np.array(  # 0, -0, the least, infinities and NaNs with payloads of each float, all ones, its neighbours
    [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x7C00, 0xFC01, 0x7FFF, 0x8001, 0x3F80, 0x00FF],
    np.uint16,
)


@st.composite
def histories(draw: st.DrawFn, versions: int = 2) -> tuple[str, list[bytes]]:
    """A dtype, and the bytes of one array at some versions."""
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    elements = draw(st.sampled_from([0, 1, 2, 7, 100, 255, 256, 1000, 70_000, BLOCK_UNITS, BLOCK_UNITS + 3]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unit = unit_of(dtype)
    size = elements * unit.per_element
    if draw(st.booleans()):
        now = rng.integers(0, 256, size * unit.nbytes, np.uint8).view(unit.array_dtype)
    else:
        words = rng.choice(SPECIAL, -(-size * unit.nbytes // 2))
        now = words.view(np.uint8)[: size * unit.nbytes].view(unit.array_dtype)
    found = [now.tobytes()]
    for _ in range(versions - 1):
        share = draw(st.sampled_from([0.0, 0.00001, 0.001, 0.03, 0.3, 0.8, 1.0]))
        now = now.copy()
        where = np.flatnonzero(rng.random(size) < share)
        small = draw(st.booleans())
        steps = rng.choice([1, 2, 3, -1, -2], len(where)) if small else rng.integers(-(2**62), 2**62, len(where))
        now[where] += steps.astype(np.int64).view(np.uint64).astype(unit.array_dtype)
        found.append(now.tobytes())
    return dtype, found


@pytest.mark.timeout(120)
@settings(max_examples=150, deadline=None)
@given(histories(), st.sampled_from(KINDS), st.booleans(), st.sampled_from([1, 3]))
def test_what_is_applied_is_what_was_encoded(history, kind, compress, threads):
    dtype, (before, after) = history
    encoded = encode(before, after, dtype, kind=kind, compress=compress, threads=threads)
    memory = bytearray(before)
    apply(encoded.record, memory, threads=threads)
    assert bytes(memory) == after
    assert (encoded.hashes == sparse.block_hashes(after, dtype)).all()
    head = read_head(encoded.record)
    unit = np.dtype(f"u{head.unit_bytes}")
    assert head.changed == np.count_nonzero(np.frombuffer(before, unit) != np.frombuffer(after, unit))
    assert encoded.record == encode(before, after, dtype, kind=kind, compress=compress, threads=4 - threads).record
    most = len(after) + 64 + 28 * head.blocks
    assert len(encoded.record) <= most, "never larger than dense, but for the table"


@pytest.mark.timeout(120)
@settings(max_examples=80, deadline=None)
@given(histories(versions=5), st.sampled_from(KINDS), st.booleans())
def test_a_fold_does_what_the_sequence_does(history, kind, compress):
    dtype, versions = history
    records = [encode(old, new, dtype, kind=kind).record for old, new in pairwise(versions)]
    folded = fold(records, compress=compress)
    memory = bytearray(versions[0])
    apply(folded, memory)
    assert bytes(memory) == versions[-1]
    head = read_head(folded)
    assert head.base == read_head(records[0]).base
    assert head.result == read_head(records[-1]).result
    half = fold([fold(records[:2]), fold(records[2:])])
    memory = bytearray(versions[0])
    apply(half, memory)
    assert bytes(memory) == versions[-1]


@pytest.mark.timeout(120)
@settings(max_examples=60, deadline=None)
@given(histories())
def test_values_may_be_applied_twice(history):
    dtype, (before, after) = history
    record = encode(before, after, dtype).record
    memory = bytearray(before)
    for _ in range(2):
        apply(record, memory)
        assert bytes(memory) == after


@pytest.mark.timeout(120)
@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from(KINDS), st.data())
def test_another_base_is_refused(history, kind, data):
    dtype, (before, after) = history
    record = encode(before, after, dtype, kind=kind).record
    if not before:
        return
    other = bytearray(before)
    at = data.draw(st.integers(0, len(other) - 1))
    other[at] ^= data.draw(st.integers(1, 255))
    try:
        apply(record, other)
    except CheckpointCorrupt:
        return
    assert kind == "values", "a step from other bits is refused"
    assert bytes(other) == after, "the bits that differed are replaced"


@pytest.mark.timeout(120)
@settings(max_examples=150, deadline=None)
@given(histories(), st.sampled_from(KINDS), st.booleans(), st.data())
def test_damage_is_refused(history, kind, compress, data):
    dtype, (before, after) = history
    record = bytearray(encode(before, after, dtype, kind=kind, compress=compress).record)
    match data.draw(st.sampled_from(["flip", "cut", "append"])):
        case "flip":
            record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del record[data.draw(st.integers(0, len(record) - 1)) :]
        case "append":
            record += b"\0"
    with pytest.raises(CheckpointCorrupt, match="the delta of w"):
        apply(record, bytearray(before), what="the delta of w")


@pytest.mark.timeout(120)
@settings(max_examples=300, deadline=None)
@given(histories(), st.sampled_from(KINDS), st.booleans(), st.data())
def test_forged_records_write_nothing_outside(history, kind, compress, data):
    """With a checksum that fits: each is refused, or makes what its own hashes say; never an error of another kind."""
    dtype, (before, after) = history
    record = bytearray(encode(before, after, dtype, kind=kind, compress=compress).record)
    for _ in range(data.draw(st.integers(1, 3))):
        near = data.draw(st.integers(0, min(len(record), 150) - 1))
        anywhere = data.draw(st.integers(0, len(record) - 1))
        at = data.draw(st.sampled_from([near, anywhere]))
        record[at] = data.draw(st.integers(0, 255))
    reseal(record)
    guarded = np.full(len(before) + 8192, 0xA5, np.uint8)
    inside = guarded[4096 : 4096 + len(before)]
    inside[:] = np.frombuffer(before, np.uint8)
    with contextlib.suppress(CheckpointCorrupt, ConfigError):
        apply(bytes(record), inside)
    assert (guarded[:4096] == 0xA5).all()
    assert (guarded[4096 + len(before) :] == 0xA5).all()


def reseal(record: bytearray) -> None:
    import xxhash

    size = sparse._HEAD.size
    state = xxhash.xxh3_64(bytes(record[:size]))
    state.update(bytes(record[size + 8 :]))
    record[size : size + 8] = state.intdigest().to_bytes(8, "little")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("floats", [False, True])
def test_ordering_is_a_bijection(size, floats):
    kind = np.dtype(f"u{size}")
    bits = np.arange(1 << 16, dtype=np.uint16).astype(kind) if size < 4 else SPECIAL.astype(kind) << (size * 8 - 16)
    numbers = sparse._ordered(bits, floats)
    assert (sparse._from_ordered(numbers, floats) == bits).all()
    assert (sparse._unzigzag(sparse._zigzag(bits)) == bits).all()
    if floats:
        top = kind.type(1) << kind.type(size * 8 - 1)
        zeros = sparse._ordered(np.array([top, 0], kind), floats)
        assert zeros[1] - zeros[0] == 1, "-0 is next to 0"


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=50))
@example([-0.0, 0.0])
def test_ordered_as_the_numbers(numbers):
    bits = np.sort(np.array(numbers, np.float32)).view(np.uint32)
    ordered = sparse._ordered(bits, floats=True)
    plain = bits.view(np.float32)
    for one, other in zip(range(len(bits)), range(1, len(bits)), strict=False):
        assert ordered[one] <= ordered[other] or plain[one] == plain[other]


def test_minus_zero_is_a_change_and_an_equal_nan_is_none():
    before = torch.tensor([0.0, float("nan"), float("nan")], dtype=torch.bfloat16)
    after = before.clone()
    after[0] = -0.0
    after.view(torch.int16)[2] = 0x7FC5
    old, new = (compat.as_bytes(tensor).numpy() for tensor in (before, after))
    for kind in KINDS:
        encoded = encode(old, new, "bfloat16", kind=kind)
        assert read_head(encoded.record).changed == 2
        memory = old.copy()
        apply(encoded.record, memory)
        assert memory.tobytes() == new.tobytes()


def test_huge_gaps():
    """Of a u8 gap, a u16 gap and more, from the first and to the last unit of blocks."""
    before = np.zeros(3 * BLOCK_UNITS + 5, np.uint16)
    after = before.copy()
    after[[0, 255, 511, 512, 66_048, 131_584, BLOCK_UNITS - 1, 2 * BLOCK_UNITS, len(after) - 1]] = 7
    for kind in KINDS:
        encoded = encode(before, after, "float16", kind=kind)
        assert len(encoded.record) < 400
        memory = before.copy()
        apply(encoded.record, memory)
        assert (memory == after).all()


def test_a_record_of_another_array_is_refused():
    record = encode(bytes(8), bytes(7) + b"1", "uint8").record
    with pytest.raises(CheckpointCorrupt, match="for 8 bytes, but is applied to 16"):
        apply(record, bytearray(16))
    with pytest.raises(ConfigError, match="can't be written to"):
        apply(record, bytes(8))
    with pytest.raises(ConfigError, match="8 bytes before, 16 bytes after"):
        encode(bytes(8), bytes(16), "uint8")
    with pytest.raises(ConfigError, match="expected one of values, steps"):
        encode(bytes(8), bytes(8), "uint8", kind="xor")


def test_a_fold_of_others_is_refused():
    one, two, three = bytes(64), bytes(60) + b"1234", b"5678" + bytes(60)
    first, second = encode(one, two, "float32").record, encode(three, one, "float32").record
    with pytest.raises(CheckpointCorrupt, match=r"2 of 2.*not based on"):
        fold([first, second])
    with pytest.raises(ConfigError, match="another kind"):
        fold([first, encode(two, three, "float32", kind="steps").record])
    with pytest.raises(ConfigError, match="no deltas"):
        fold([])


def test_without_zstandard(monkeypatch):
    rng = np.random.default_rng(0)
    before = rng.integers(0, 1 << 16, 100_000).astype(np.uint16)
    after = before.copy()
    after[::7] += 1
    compressed = encode(before, after, "bfloat16", kind="steps", compress=True).record
    plain = encode(before, after, "bfloat16", kind="steps", compress=False).record
    assert len(compressed) < len(plain) / 2
    monkeypatch.setattr(sparse, "zstandard", None)
    assert encode(before, after, "bfloat16", kind="steps").record == plain
    memory = before.copy()
    apply(plain, memory)
    assert (memory == after).all()
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[zstd\]'"):
        apply(compressed, before.copy())
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[zstd\]'"):
        encode(before, after, "bfloat16", compress=True)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[zstd\]'"):
        fold([plain], compress=True)
