"""Copies into images and buckets are torch's own copies, element by element, whatever the nest."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch

from holdfast.boxes import strides, whole
from holdfast.errors import ConfigError
from holdfast.export.rank_plan import BUCKET, BufferRegion, Copy, RankExportPlan
from holdfast.export.transfer import fill_local, run_copies
from holdfast.staging.copier import SERIAL_ELEMENTS


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).clone()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copy_of(
    tensor: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...], *, at: int = 0, flipped: tuple[int, ...] = ()
) -> Copy:
    """``tensor.permute(order).flip(flipped).to(dtype)``, contiguous, from byte ``at`` on."""
    steps = strides(tensor.shape)
    counts = tuple(tensor.shape[dim] for dim in order)
    start = sum((tensor.shape[dim] - 1) * steps[dim] for dim in flipped)
    return Copy(
        counts,
        0,
        name_of(tensor.dtype),
        start * tensor.element_size(),
        tuple(-steps[dim] if dim in flipped else steps[dim] for dim in order),
        name_of(dtype),
        at,
        strides(counts),
    )


SPECIAL = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 1e-45, 6e-8, 3.4e38, 65519.0, 447.9, 1 / 3]


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "target", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_casts_are_those_of_to_bit_for_bit(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.cat([torch.tensor(SPECIAL, dtype=torch.float64), torch.randn(987, dtype=torch.float64)])
    tensor = values.to(source).view(40, 25)
    image = torch.full((40 * 25 * target.itemsize + 64,), 0xEE, dtype=torch.uint8)
    run_copies([copy_of(tensor, target, (1, 0), at=32)], [as_bytes(tensor)], image)
    # Which NaN it is depends, in torch, on whether the kernel takes the element alone or with its neighbours.
    wanted = tensor.t().to(target).contiguous()
    found = image[32:-32].view(target).view(25, 40)
    assert torch.equal(found.float().isnan(), wanted.float().isnan())
    numbers = ~wanted.float().isnan()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[target.itemsize]
    assert torch.equal(found.view(bits)[numbers], wanted.view(bits)[numbers])
    assert (image[:32] == 0xEE).all()
    assert (image[-32:] == 0xEE).all()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.uint16,
        torch.bfloat16,
        torch.float8_e8m0fnu,
        torch.int64,
        torch.complex64,
        torch.complex128,
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)])
def test_bits_stay_bits(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    memory = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * 7 * 5 * dtype.itemsize,), dtype=torch.uint8)
    tensor = memory.view(dtype).view(6, 7, 5)
    image = torch.zeros(memory.numel(), dtype=torch.uint8)
    run_copies([copy_of(tensor, dtype, order)], [memory], image)
    indices = torch.arange(6 * 7 * 5).view(6, 7, 5).permute(order).reshape(-1)
    assert torch.equal(image.view(-1, dtype.itemsize), memory.view(-1, dtype.itemsize)[indices])


def test_an_order_may_turn_around_and_an_element_become_many() -> None:
    tensor = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
    image = torch.zeros(24 * 4 + 12 * 2, dtype=torch.uint8)
    many = Copy((3, 4), 0, "int32", 4 * 4, (0, 1), "int16", 24 * 4, (4, 1))
    run_copies([copy_of(tensor, torch.int32, (1, 0, 2), flipped=(0, 2)), many], [as_bytes(tensor)], image)
    assert torch.equal(image[: 24 * 4], as_bytes(tensor.permute(1, 0, 2).flip(1, 2)))
    assert image[24 * 4 :].view(torch.int16).tolist() == [4, 5, 6, 7] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_large_is_cut_and_whole_again(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 501, 257)
    image = torch.zeros(tensor.numel() * dtype.itemsize, dtype=torch.uint8)
    for order in product((0, 1), repeat=1):
        dims = (0, 1, 2) if order[0] else (2, 0, 1)
        run_copies([copy_of(tensor, dtype, dims)], [as_bytes(tensor)], image)
        assert torch.equal(image, as_bytes(tensor.permute(dims).to(dtype)))


def test_pieces_are_such_as_torch_copies_on_this_thread() -> None:
    # The team that training computes with must not be waited for.
    before = threading.active_count()
    tensor = torch.randn(700, 300)
    image = torch.zeros(tensor.numel() * 2, dtype=torch.uint8)
    run_copies([copy_of(tensor, torch.bfloat16, (0, 1))], [as_bytes(tensor)], image)
    assert threading.active_count() == before
    assert SERIAL_ELEMENTS < 32768


def plan_of(copies: tuple[Copy, ...], *, image_bytes: int, shape: tuple[int, ...]) -> RankExportPlan:
    memory = BufferRegion("w", whole(shape), (0,) * len(shape), shape)
    return RankExportPlan(0, 1, (), image_bytes, ((0, b"head"),), (memory,), copies, (), 0, (), {}, ())


def test_constants_and_local_copies_fill_an_image() -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    image = torch.zeros(4096, dtype=torch.uint8)
    looks = []
    plan = plan_of((copy_of(tensor, torch.float16, (1, 0), at=8),), image_bytes=4096, shape=(2, 3))
    fill_local(plan, [as_bytes(tensor)], image, between=lambda: looks.append(1))
    assert image[:4].numpy().tobytes() == b"head"
    assert torch.equal(image[8:20], as_bytes(tensor.t().half()))
    assert not image[20:].any()


def test_work_ends_between_batches() -> None:
    tensor = torch.zeros(9 << 20, dtype=torch.float32)
    image = torch.zeros(tensor.nbytes, dtype=torch.uint8)

    def stop() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        run_copies([copy_of(tensor, torch.float32, (0,))], [as_bytes(tensor)], image, between=stop)


def test_what_is_staged_must_be_what_was_planned() -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    image = torch.zeros(4096, dtype=torch.uint8)
    plan = plan_of((copy_of(tensor, torch.float16, (1, 0)),), image_bytes=4096, shape=(2, 3))
    with pytest.raises(ConfigError, match="'w'"):
        fill_local(plan, [as_bytes(tensor)[:-4]], image)
    with pytest.raises(ConfigError, match="memories"):
        fill_local(plan, [], image)
    with pytest.raises(ConfigError, match="image"):
        fill_local(plan, [as_bytes(tensor)], image[:100])


def test_a_bucket_is_a_source_as_well() -> None:
    bucket = torch.arange(64, dtype=torch.uint8)
    image = torch.zeros(64, dtype=torch.uint8)
    run_copies([Copy((4, 2), BUCKET, "int16", 16, (2, 1), "int16", 8, (4, 1))], [], image, bucket=bucket)
    assert torch.equal(image[8:40].view(4, 8)[:, :4], bucket[16:32].view(4, 4))
