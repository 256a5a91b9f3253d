"""What is made of samples: medians with their spread, ratios, a confidence interval. Pure; standard library only."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some samples, and how far they lie apart."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if not values:
            raise ValueError("the spread of no values is not defined")
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], *, draws: int = 4000, seed: int = 0) -> Interval:
    """The mean of ``values`` with a 95 % interval: resampled with replacement, the same each time.

    With fewer than five values the interval is their range: so few say nothing about tails.
    """
    if not values:
        raise ValueError("no values to resample")
    mean = statistics.fmean(values)
    if len(values) < 5:
        return Interval(mean, min(values), max(values))
    chance = random.Random(seed)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(draws))
    return Interval(mean, means[int(0.025 * draws)], means[int(0.975 * draws) - 1])


def ratio(value: float, reference: float) -> float | None:
    """``value / reference``; None where there is nothing to divide by."""
    return value / reference if reference > 0 else None


def seconds(value: float) -> str:
    """A duration with three figures and the unit that fits."""
    if value < 0:
        return "-" + seconds(-value)
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 0.1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def rate(value: float) -> str:
    """Bytes a second, in units of the hardware's makers."""
    return f"{value / 1e9:.2f} GB/s"


def nbytes(value: float) -> str:
    """An amount of memory in the binary unit that fits."""
    size = float(value)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
