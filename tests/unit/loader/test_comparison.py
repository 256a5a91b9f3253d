"""`DifferenceSums` of numbers that float64, or their squares in it, have no room for."""

from __future__ import annotations

import math

import pytest
import torch

from holdfast.loader.comparison import DifferenceSums


def sums_of(*parts: tuple[torch.Tensor, torch.Tensor]) -> DifferenceSums:
    sums = DifferenceSums()
    for one, other in parts:
        sums.add(one, other)
    return sums


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e308, 1e-312])
def test_differences_of_very_large_and_small_numbers(scale: float) -> None:
    one, other = (torch.tensor(values, dtype=torch.float64) * scale for values in ([1.0, 1.0, 0.5], [1.0, 0.5, 0.5]))
    sums = sums_of((one, other), (one, one), (one, one))
    assert sums.relative == pytest.approx(0.5 / math.sqrt(3 * 2.25))
    assert sums.cosine == pytest.approx((1.75 + 2 * 2.25) / math.sqrt((1.5 + 2 * 2.25) * 3 * 2.25))
    assert sums.max_abs == pytest.approx(0.5 * scale)


def test_numbers_that_differ_by_more_than_float64_holds() -> None:
    most = torch.tensor([1.7e308], dtype=torch.float64)
    sums = sums_of((most, -most))
    assert (sums.relative, sums.cosine, sums.max_abs) == (pytest.approx(2.0), pytest.approx(-1.0), math.inf)


def test_a_small_part_beside_a_large_one() -> None:
    large, small = (torch.tensor([value], dtype=torch.float64) for value in (1e300, 1e-300))
    sums = sums_of((large, large), (small, 2 * small), (small, small))
    assert (sums.relative, sums.max_abs) == (0.0, 1e-300)  # 1e-600
    sums = sums_of((small, small), (small, small + 1e-305))
    assert sums.relative == pytest.approx(1e-5 / math.sqrt(2))


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.int64, 2**62, 2**62 + 1),
        (torch.int64, 2**62 + 1, 2**62),
        (torch.int64, -(2**63), 2**63 - 1),
        (torch.int64, 2**63 - 1, -(2**63)),
        (torch.uint64, 2**64 - 1, 2**64 - 2),
        (torch.uint64, 0, 2**64 - 1),
    ],
)
def test_whole_numbers_are_subtracted_as_such(dtype: torch.dtype, one: int, other: int) -> None:
    sums = sums_of((torch.tensor([one, 5], dtype=dtype), torch.tensor([other, 5], dtype=dtype)))
    assert sums.max_abs == float(abs(one - other))
    assert sums.relative == pytest.approx(abs(one - other) / math.hypot(one, 5))
