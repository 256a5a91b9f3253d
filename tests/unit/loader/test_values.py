"""`ValueSums` of numbers whose squares float64 has no room for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from holdfast.loader.values import ValueSums, values_of


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e307])
def test_moments_of_very_large_and_small_numbers(scale: float) -> None:
    plain = torch.randn(70_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    sums = ValueSums()
    for part in (plain[:40_000], plain[40_000:]):
        values = values_of(part * scale)
        assert values is not None
        sums.add(values)
    assert sums.mean / scale == pytest.approx(float(plain.mean()))
    assert sums.std / scale == pytest.approx(float(plain.std(correction=0)))
    if scale < 1e300:
        assert sums.norm / scale == pytest.approx(float(plain.norm()))
    assert sums.elements == sums.count == 70_000


def test_moments_at_the_ends_of_float64() -> None:
    sums = ValueSums()
    most = np.finfo(np.float64).max
    sums.add(np.array([most, most, -most, 1.0]))
    sums.add(np.array([-most, -most, math.inf]))
    assert (sums.count, sums.infinite, sums.norm) == (6, 1, math.inf)
    assert abs(sums.mean) < most
