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
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Values: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_BLOCK: Final = 1 << 15
"""Elements that are computed on at a time: 256 KiB, which stay in a core's cache from one sum to the next."""


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
    _squares: float = 0.0
    _deviations: float = 0.0
    """The sum of the squares of what each is away from the mean."""

    @property
    def std(self) -> float:
        """The standard deviation of the population; not finite where float64 has no room for the squares."""
        return math.sqrt(self._deviations / self.count) if self.count else 0.0

    @property
    def norm(self) -> float:
        """The 2-norm; not finite where float64 has no room for the squares."""
        return math.sqrt(self._squares)

    def add(self, values: Values) -> None:
        """Take in a part."""
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, values.size, _BLOCK):
                self._add(values[at : at + _BLOCK])

    def _add(self, values: Values) -> None:
        self.elements += values.size
        squares = _square(values)
        if not math.isfinite(squares):
            finite = np.isfinite(values)
            nans = int(np.isnan(values).sum())
            values = values[finite]
            self.nans += nans
            self.infinite += finite.size - values.size - nans
            squares = _square(values)
        here = values.size
        if not here:
            return
        mean = float(values.sum()) / here
        away = values - mean
        moved, count = mean - self.mean, self.count + here
        self._deviations += _square(away) + moved * moved * self.count * here / count
        self._squares += squares
        self.mean += moved * here / count
        self.count = count
        self.zeros += here - int(np.count_nonzero(values))
        self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))


def _square(values: Values) -> float:
    return float(np.einsum("i,i->", values, values))
