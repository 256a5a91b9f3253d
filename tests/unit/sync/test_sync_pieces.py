"""Tensors into buckets and out of them, bit for bit; what a rank sends of its weights; checksums of buckets."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError, StateMismatch
from holdfast.sync.weights import checksums, pieces
from holdfast.sync.weights.buckets import BucketPlan, Piece, PieceBox, plan_buckets, select
from holdfast.sync.weights.checksums import ROW_BYTES, checksum, kind_for
from holdfast.sync.weights.pieces import (
    Local,
    Outgoing,
    WeightsSpec,
    destinations_of,
    named_tensors,
    pack,
    places_of,
    unpack,
)

DTYPES = [dtype for name in ITEMSIZE if isinstance(dtype := getattr(torch, name, None), torch.dtype)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Of what the tensor shows."""
    return bytes(compat.host_memory(compat.clone(tensor)))


def outgoing(tensors: dict[str, torch.Tensor]) -> Outgoing:
    look = WeightsSpec(tensors, rank=0, group_ranks=(0,))
    return Outgoing(look, {look.digest: look.structure}, [look.digest])


def transport(
    tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor], *, bucket_bytes: int = 1 << 16
) -> list[BucketPlan]:
    """Everything that ``into`` has places for, by way of buckets whose memory holds rubbish."""
    sent = outgoing(tensors)
    wanted, places = places_of(into)
    parts = select([sent.table], wanted)
    buckets = plan_buckets(sent.table, parts, bucket_bytes)
    for bucket in buckets:
        memory = random_bits((bucket_bytes,), torch.uint8, seed=1)
        pack(bucket, sent.locals(tensors), memory)
        unpack(bucket, memory, destinations_of(sent.table, places))
    return buckets


# bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=compat.dtype_name)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "matrix": (5, 7),
        "scalar": (),
        "one": (1,),
        "none": (0, 3),
        "cube": (3, 2, 4),
    }
    tensors = {name: random_bits(shape, dtype, seed=len(name)) for name, shape in shapes.items()}
    into = {name: random_bits(shape, dtype, seed=9) for name, shape in shapes.items()}
    transport(tensors, into, bucket_bytes=256)
    for name, tensor in tensors.items():
        assert bits_of(into[name]) == bits_of(tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64])
def test_views_with_any_strides_arrive_and_are_filled(dtype: torch.dtype) -> None:
    base = random_bits((6, 8, 4), dtype)
    views = {
        "transposed": base.permute(2, 0, 1),
        "columns": base[:, 2:5],
        "every second": base[::2, 1::3],
        "expanded": random_bits((1, 8), dtype).expand(6, 8),
    }
    around = random_bits((6, 9, 4), dtype)
    into = {
        "transposed": random_bits((8, 6, 4), dtype).permute(2, 1, 0),
        "columns": around[:, 1:4],
        "every second": random_bits((6, 9, 4), dtype)[::2, ::3],
        "expanded": random_bits((8, 6), dtype).t(),
    }
    before = bits_of(around[:, 4:])
    transport(views, into)
    for name, view in views.items():
        assert bits_of(into[name]) == bits_of(view), name
    assert bits_of(around[:, 4:]) == before


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_conjugate_and_negated_views_on_both_sides(dtype: torch.dtype) -> None:
    base = torch.arange(24).reshape(4, 6).to(torch.float32)
    value = torch.complex(base, base + 0.5).to(dtype)
    both = {"plain": value, "conj": value.conj(), "neg": torch._neg_view(value), "part": value.conj()[1:, ::2]}
    for shown in (lambda x: x, torch.conj, torch._neg_view):
        into = {name: shown(random_bits(tuple(view.shape), dtype)) for name, view in both.items()}
        transport(both, into)
        for name, view in both.items():
            assert bits_of(into[name]) == bits_of(view), name


def test_the_imaginary_part_of_a_conjugate_is_a_negated_view() -> None:
    value = torch.complex(torch.ones(3), torch.arange(3.0))
    tensors = {"w": value.conj().imag}
    assert tensors["w"].is_neg()
    into = {"w": torch.zeros(3)}
    transport(tensors, into)
    assert into["w"].tolist() == [0.0, -1.0, -2.0]


def test_large_tensors_in_small_buckets() -> None:
    tensors = {"w": random_bits((3, 40, 33), torch.bfloat16), "b": random_bits((33,), torch.float32)}
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    buckets = transport(tensors, into, bucket_bytes=1000)
    assert len(buckets) > 8
    assert all(bits_of(into[name]) == bits_of(tensor) for name, tensor in tensors.items())


def test_parameters_and_tensors_of_inference_mode_are_filled() -> None:
    tensors = {"w": random_bits((4, 4), torch.int32).float(), "v": torch.arange(4.0)}
    with torch.inference_mode():
        inferred = torch.zeros(4)
    into = {"w": nn.Parameter(torch.zeros(4, 4)), "v": inferred}
    transport(tensors, into)
    assert torch.equal(into["w"], tensors["w"])
    assert inferred.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_part_that_meets_several_places_fills_each() -> None:
    value = random_bits((6, 4), torch.int64)
    table = [Piece("w", "int64", (6, 4), (0, 0), (6, 4))]
    (bucket,) = plan_buckets(table, [[PieceBox(0, (1, 0), (4, 4))]], 4096)
    memory = torch.zeros(4096, dtype=torch.uint8)
    pack(bucket, [Local(whole((6, 4)), value)], memory)
    top, bottom = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64)
    unpack(bucket, memory, [[Local(Box((0, 2), (3, 2)), top), Local(Box((3, 0), (3, 4)), bottom)]])
    assert torch.equal(top[1:], value[1:3, 2:])
    assert torch.equal(bottom[:2], value[3:5])
    assert not top[0].any()
    assert not bottom[2].any()


def test_only_the_entries_of_a_bucket_are_written() -> None:
    table = [Piece("w", "uint8", (3,), (0,), (3,)), Piece("v", "uint8", (2,), (0,), (2,))]
    (bucket,) = plan_buckets(table, [[PieceBox(0, (0,), (3,)), PieceBox(1, (0,), (2,))]], 512)
    memory = torch.full((512,), 7, dtype=torch.uint8)
    pack(bucket, [Local(whole((3,)), torch.zeros(3).byte()), Local(whole((2,)), torch.ones(2).byte())], memory)
    assert memory.tolist() == [0] * 3 + [7] * 253 + [1] * 2 + [7] * 254


def test_a_memory_that_is_too_short_or_of_something_else_is_a_mistake() -> None:
    bucket = BucketPlan((0,), 300, ())
    for memory in (torch.zeros(299).byte(), torch.zeros(300), torch.zeros(600).byte()[::2]):
        with pytest.raises(AssertionError, match="memory"):
            pack(bucket, [], memory)


# what a rank sends -----------------------------------------------------------------------------------------------


def test_the_table_is_in_the_order_of_the_weights() -> None:
    tensors = {"z": torch.zeros(2), "a": torch.zeros(3, 3, dtype=torch.bfloat16), "none": torch.zeros(0, 2)}
    sent = outgoing(tensors)
    assert sent.table == (
        Piece("z", "float32", (2,), (0,), (2,)),
        Piece("a", "bfloat16", (3, 3), (0, 0), (3, 3)),
        Piece("none", "float32", (0, 2), (0, 0), (0, 2)),
    )
    assert [local.tensor.shape for local in sent.locals(tensors)] == [(2,), (3, 3), (0, 2)]


def test_replicas_are_shared_out_by_bytes_and_what_one_rank_has_it_sends() -> None:
    shared = {f"w{number}": torch.zeros(100) for number in range(10)}
    ranks = [{**shared, "first": torch.zeros(7)}, {**shared, "second": torch.zeros(9)}]
    looks = [WeightsSpec(tensors, rank=rank, group_ranks=(0, 1)) for rank, tensors in enumerate(ranks)]
    structures, digests = {look.digest: look.structure for look in looks}, [look.digest for look in looks]
    tables = [Outgoing(look, structures, digests).table for look in looks]
    names = [[item.name for item in table] for table in tables]
    assert sorted(names[0] + names[1]) == sorted([*shared, "first", "second"])
    assert ("first" in names[0], "second" in names[1]) == (True, True)
    assert [len(found) for found in names] == [6, 6]


def test_ranks_that_mean_something_else_by_a_name_are_told() -> None:
    looks = [WeightsSpec({"w": torch.zeros(2 + rank)}, rank=rank, group_ranks=(0, 1)) for rank in range(2)]
    structures, digests = {look.digest: look.structure for look in looks}, [look.digest for look in looks]
    with pytest.raises(StateMismatch, match="'w' differs between ranks"):
        Outgoing(looks[0], structures, digests)


def test_a_look_stands_for_other_tensors_of_the_same_kinds() -> None:
    tensors = {"w": torch.zeros(2, 3), "v": torch.zeros(4)}
    look = WeightsSpec(tensors, rank=0, group_ranks=(0,))
    assert look.stands({"v": torch.ones(4), "w": torch.ones(2, 3)})
    for other in (
        {"w": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2), "v": torch.zeros(4)},
        {"w": torch.zeros(2, 3), "v": torch.zeros(4, dtype=torch.float64)},
        {"w": torch.zeros(2, 3), "x": torch.zeros(4)},
        {**tensors, "x": torch.zeros(1)},
    ):
        assert not look.stands(other)


def test_a_tensor_that_is_not_what_was_looked_at_is_refused() -> None:
    sent = outgoing({"w": torch.zeros(4, 3)})
    with pytest.raises(StateMismatch, match=r"w: this rank holds \[3, 3\]"):
        sent.locals({"w": torch.zeros(3, 3)})


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (nn.Linear(1, 1), "weights is a Linear; expected a mapping"),
        (torch.zeros(2), "weights is a Tensor"),
        (3, "weights is a int"),
        ("names", "weights is a str"),
        ([torch.zeros(2)], "weights has Tensor in it; expected pairs"),
        ([("w", torch.zeros(1)), ("w", torch.zeros(1))], "w: weights has this name twice"),
        ({"a\0b": torch.zeros(1)}, r"weights has the name 'a\\x00b'"),
        ({"w": 3}, "w: weights has int there; expected a tensor"),
        ({3: torch.zeros(1)}, "weights has the name 3"),
        ({"": torch.zeros(1)}, "weights has the name ''"),
        ({"rank-*": torch.zeros(1)}, r"weights has the name 'rank-\*'"),
    ],
)
def test_weights_that_are_no_named_tensors(weights: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        named_tensors(weights)


def test_weights_may_be_a_mapping_or_pairs() -> None:
    tensors = {"w": torch.zeros(2), "v": torch.ones(3)}
    for weights in (tensors, OrderedDict(tensors), tensors.items(), list(tensors.items()), iter(tensors.items())):
        assert named_tensors(weights) == tensors


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse(), nn.UninitializedParameter()]
)
def test_tensors_that_have_no_bytes_to_send_are_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"^w: "):
        WeightsSpec({"w": tensor}, rank=0, group_ranks=(0,))
    with pytest.raises(ConfigError, match=r"^w: "):
        places_of({"w": tensor})


def test_nothing_is_received_into_memory_that_elements_share() -> None:
    with pytest.raises(ConfigError, match="w: elements of this tensor share memory"):
        places_of({"w": torch.zeros(1, 3).expand(4, 3)})
    wanted, _ = places_of({"w": torch.zeros(1, 3).expand(1, 3)})
    assert wanted[0].box == whole((1, 3))


@pytest.mark.parametrize(
    ("shape", "strides", "shares"),
    [
        ((3, 3), (1, 1), True),
        ((2, 3), (2, 1), True),
        ((2, 2, 2), (4, 3, 1), True),
        ((3, 2), (2, 3), False),
        ((2, 2, 3), (1, 3, 2), True),
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((5, 0), (0, 1), False),
        ((), (), False),
    ],
)
def test_windows_that_slide_over_one_another_share_memory(
    shape: tuple[int, ...], strides: tuple[int, ...], shares: bool
) -> None:
    """What ``unfold`` and ``as_strided`` make: each element received last would win, and nobody would be told."""
    into = torch.zeros(32).as_strided(shape, strides)
    if shares:
        with pytest.raises(ConfigError, match="w: elements of this tensor share memory"):
            places_of({"w": into})
        return
    places_of({"w": into})
    into.copy_(torch.arange(into.numel()).reshape(shape))
    assert torch.equal(into, torch.arange(into.numel()).reshape(shape).float())


# checksums -------------------------------------------------------------------------------------------------------


def test_in_host_memory_the_checksum_is_xxh3() -> None:
    memory = random_bits((1000,), torch.uint8)
    assert kind_for(memory) == "xxh3"
    assert checksum(memory[3:], "xxh3") == xxhash.xxh3_64_intdigest(memory[3:].numpy().tobytes())
    assert checksum(memory[:0], "xxh3") == xxhash.xxh3_64_intdigest(b"")


def sums_in_python(memory: torch.Tensor) -> int:
    """The other kind by its definition, a word at a time."""
    data = memory.numpy().tobytes()
    weights = [int(weight) for weight in checksums._make_weights()]
    rows = []
    for start in range(0, len(data), ROW_BYTES):
        row = data[start : start + ROW_BYTES]
        words = [
            int.from_bytes(row[at : at + 4], "little", signed=len(row[at : at + 4]) == 4)
            for at in range(0, len(row), 4)
        ]
        rows.append(sum(word * weight for word, weight in zip(words, weights, strict=False)) & (1 << 64) - 1)
    return xxhash.xxh3_64_intdigest(b"".join(value.to_bytes(8, "little") for value in [*rows, len(data)]))


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 1001, ROW_BYTES, ROW_BYTES + 6])
def test_weighted_sums_are_what_they_are_said_to_be(nbytes: int) -> None:
    memory = random_bits((nbytes,), torch.uint8)
    assert checksum(memory, "sums") == sums_in_python(memory)


def test_weighted_sums_do_not_depend_on_how_many_rows_are_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = random_bits((5 * ROW_BYTES + 17,), torch.uint8)
    expected = checksum(memory, "sums")
    monkeypatch.setattr(checksums, "SCRATCH_BYTES", 4 * ROW_BYTES)
    assert checksum(memory, "sums") == expected
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), memory])[1:]  # off the words of its storage
    assert checksum(shifted, "sums") == expected


@pytest.mark.parametrize("kind", ["xxh3", "sums"])
def test_every_change_is_seen(kind: checksums.Kind) -> None:
    """Also two sign bits, which a plain weighted sum of 64-bit words never sees, and what only changes places."""
    memory = random_bits((4096,), torch.uint8)
    seen = {checksum(memory, kind)}
    for at in (0, 7, 2047, 4095):
        for bit in (1, 128):
            changed = memory.clone()
            changed[at] ^= bit
            seen.add(checksum(changed, kind))
    for one, other in ((3, 7), (7, 4095), (11, 15)):
        changed = memory.clone()
        changed[one] ^= 128
        changed[other] ^= 128
        seen.add(checksum(changed, kind))
    swapped = memory.view(-1, 4).clone()
    swapped[[5, 900]] = swapped[[900, 5]]
    seen |= {checksum(swapped.view(-1), kind), checksum(memory.roll(4), kind), checksum(memory[:-1], kind)}
    seen.add(checksum(torch.cat([memory, memory[:0], torch.zeros(4, dtype=torch.uint8)]), kind))
    assert len(seen) == 1 + 8 + 3 + 3 + 1


def test_an_unknown_kind_of_checksum_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind 'crc'"):
        checksum(torch.zeros(4).byte(), "crc")  # type: ignore[arg-type]


# Copies by several threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_all_is_copied_by_however_many_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_JOB_BYTES", 4096)
    monkeypatch.setattr(pieces.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(pieces.os, "sched_getaffinity", lambda _: {0, 1})
    sources = [
        random_bits((700, 33), torch.float32, seed=1),
        random_bits((1, 5000), torch.uint8, seed=2),
        random_bits((), torch.bfloat16, seed=3),
        random_bits((0, 3), torch.float32),
        random_bits((90, 70), torch.float8_e4m3fn, seed=4).t(),
        random_bits((40, 50), torch.complex64, seed=5).conj(),
    ]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    pieces.copy_all(targets, sources)
    assert list(map(bits_of, targets)) == list(map(bits_of, sources))
