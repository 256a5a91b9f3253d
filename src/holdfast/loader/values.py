"""Describe the values of a tensor: extremes, moments, norm, and counts of zeros and of what isn't finite.

numpy computes, and not by BLAS: on a host whose cores a job has, threads of torch and of BLAS wait for one another at
every small tensor and every block.

Guarantees: parts may be added in any number; the deviation is computed around the mean, so that it is right also where
it is small against the mean. Memory: a float64 copy of the part that is added, and a block of `_BLOCK` elements.
Assumes: values fit into float64 well enough; complex ones are described by their magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Values: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_BLOCK: Final = 1 << 15
"""Elements that are computed on at a time: 256 KiB, which stay in a core's cache from one sum to the next."""
_LEAST: Final = 1e-280
"""Sums of products above this lose nothing by products that were too small for float64."""


def values_of(tensor: torch.Tensor) -> Values | None:
    """Return the elements in one row; None of a dtype whose elements are no numbers, such as packed fp4."""
    import torch

    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = flat.abs()
    if flat.is_floating_point() and flat.dtype not in (torch.float64, torch.float32, torch.float16):
        try:
            flat = flat.to(torch.float64)  # numpy has no bfloat16, nor fp8
        except RuntimeError:
            return None
    try:
        return flat.numpy().astype(np.float64, copy=False)
    except TypeError:
        return None


@dataclass(slots=True)
class ValueSums:
    """Counts of all values seen, and what the finite ones are like."""

    elements: int = 0
    nans: int = 0
    infinite: int = 0
    zeros: int = 0
    count: int = 0
    """How many are finite; without any, what is below means nothing."""
    mean: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    _squares: Decimal = Decimal(0)
    _deviations: Decimal = Decimal(0)
    """The sum of the squares of what each is away from the mean."""

    @property
    def std(self) -> float:
        """The standard deviation of the population; not finite where float64 has no room for it."""
        return float((self._deviations / self.count).sqrt()) if self.count else 0.0

    @property
    def norm(self) -> float:
        """The 2-norm; not finite where float64 has no room for it."""
        return float(self._squares.sqrt())

    def add(self, values: Values) -> None:
        """Take in a part."""
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, values.size, _BLOCK):
                self._add(values[at : at + _BLOCK])

    def _add(self, values: Values) -> None:
        self.elements += values.size
        squares = sum_of_products(values, values)
        if not squares.is_finite():
            finite = np.isfinite(values)
            nans = int(np.isnan(values).sum())
            values = values[finite]
            self.nans += nans
            self.infinite += finite.size - values.size - nans
            squares = sum_of_products(values, values)
        here = values.size
        if not here:
            return
        least, most = float(values.min()), float(values.max())
        mean = float(values.sum()) / here
        if not math.isfinite(mean):
            mean = min(max(float((values / here).sum()), least), most)
        away = values - mean
        moved, count = Decimal(mean) - Decimal(self.mean), self.count + here
        self._deviations += sum_of_products(away, away) + moved * moved * self.count * here / count
        self._squares += squares
        self.mean = float(Decimal(self.mean) + moved * here / count)
        self.count = count
        self.zeros += here - int(np.count_nonzero(values))
        self.least, self.most = min(self.least, least), max(self.most, most)


def sum_of_products(one: Values, other: Values) -> Decimal:
    """Return the sum of the products of elements, also where float64 has no room for them, as above 1e154.

    Elements are finite; of an array with itself it isn't finite if one of them isn't.
    """
    total = float(np.einsum("i,i->", one, other))
    if _LEAST < abs(total) < math.inf:
        return Decimal(total)
    if not (one.any() and other.any()):
        return Decimal(0)
    scales = [_scale(values) for values in (one, other)]
    total = float(np.einsum("i,i->", one / scales[0], other / scales[1]))
    return Decimal(total) * Decimal(scales[0]) * Decimal(scales[1])


def _scale(values: Values) -> float:
    """Return the power of two below the largest magnitude; 1 where that isn't finite."""
    most = float(np.abs(values).max())
    return math.ldexp(1.0, math.frexp(most)[1] - 1) if math.isfinite(most) else 1.0
