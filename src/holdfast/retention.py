"""Which published checkpoints to keep: a pure function of what there is. Torch-free, no I/O, no clock.

    keep a checkpoint if any of these says so
    -----------------------------------------------------------------------------------
    last      it is one of the newest ``last``; what a run that went back left behind counts as older than its own
    every     its step is a multiple of ``every``
    minutes   it is the first in its slot of ``minutes`` minutes since the epoch
    best      its metric is among the ``n`` best
    always    it is pinned, leased by a reader, just published, the newest, or the newest to resume from

Guarantees: the newest *resumable* checkpoint, by the order of ``lineage``, is never selected for deletion, nor is one
that is pinned, leased or was published just now; the answer doesn't depend on the order of the entries; deleting what
was selected and asking again selects nothing more.
Assumes: ``created_s`` of all entries is by one rank's wall clock. A slot is a fixed stretch of that clock, so what is
kept doesn't drift as older ones go.
Does not: delete (the caller does, by renaming to trash), or decide what is published.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import ConfigError
from holdfast.lineage import Lineage, in_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_TICK_S: Final = 1e-6
"""Of the clock in manifests: no shorter slots are told apart."""


def _check_count(owner: str, name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{owner}.{name} must be an integer of {at_least} or more, not {value!r}", field=name)


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``n`` checkpoints with the best value of a metric.

    Attributes:
        metric: name of the metric as given to ``manager.step(..., metrics=...)``; not empty.
        mode: ``"min"`` (default) if less is better, ``"max"`` if more is.
        n: how many, 1 or more; default 1. Among equals the newer one stays.

    A checkpoint without the metric, or with NaN for it, is never among the best. Raises `ConfigError` naming the field.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        metric: object = self.metric
        if not isinstance(metric, str) or not metric:
            raise ConfigError(f"Best.metric must be the name of a metric, not {metric!r}", field="metric")
        if self.mode not in ("min", "max"):
            raise ConfigError(f'Best.mode must be "min" or "max", not {self.mode!r}', field="mode")
        _check_count("Best", "n", self.n, at_least=1)


@dataclass(frozen=True, slots=True)
class Keep:
    """What retention leaves alone; a checkpoint stays if any of the rules keeps it.

    Attributes:
        last: how many of the newest, 0 or more; default 3. None keeps all. 0 keeps none by this rule: what stays is
            what the other rules keep, the newest checkpoint, and the newest resumable one. ``last=1`` is safe (a
            checkpoint goes only once its successor is durable) but leaves nothing to fall back to if that successor is
            damaged later. Steps that a run left behind when it went back count as older than all of its own.
        every: steps; keep those at a multiple of it, 1 or more; None (default): no such rule.
        minutes: minutes of wall time; keep the first of each such stretch, more than 0; None (default): no such rule.
        best: a `Best`, or None (default): no such rule.

    Raises `ConfigError` naming the field.
    """

    last: int | None = 3
    every: int | None = None
    minutes: float | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.last is not None:
            _check_count("Keep", "last", self.last, at_least=0)
        if self.every is not None:
            _check_count("Keep", "every", self.every, at_least=1)
        minutes: object = self.minutes
        if minutes is not None and (
            isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 < minutes <= sys.float_info.max
        ):
            raise ConfigError(f"Keep.minutes must be a number above 0, not {minutes!r}", field="minutes")
        best: object = self.best
        if best is not None and not isinstance(best, Best):
            raise ConfigError(f"Keep.best must be a holdfast.Best or None, not {best!r}", field="best")


@dataclass(frozen=True, slots=True)
class Entry:
    """One published checkpoint, as retention sees it."""

    step: int
    created_s: float
    """Seconds since the epoch by the wall clock of the coordinator."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    resumable: bool = True
    """False for a model-only save."""
    pinned: bool = False
    leased: bool = False
    """A reader is using it."""
    lineage: Lineage = field(default_factory=Lineage)


def select_deletions(entries: Sequence[Entry], keep: Keep, published: int | None = None) -> list[int]:
    """The steps to delete, in ascending order; steps of ``entries`` are distinct. Pure.

    published: the step whose publication this follows, if any.
    """
    ordered = sorted(entries, key=lambda entry: entry.step)
    assert len({entry.step for entry in ordered}) == len(ordered), "two entries of one step"
    if keep.last is None:
        return []
    kept = {entry.step for entry in ordered if entry.pinned or entry.leased or entry.step == published}
    by_age = in_order(ordered, lambda entry: (entry.step, entry.lineage))
    kept.update(entry.step for entry in by_age[-1:])  # which says how the others are ordered, resumable or not
    resumable = [entry.step for entry in by_age if entry.resumable]
    kept.update(resumable[-1:])
    kept.update(entry.step for entry in by_age[max(0, len(by_age) - keep.last) :])
    if keep.every is not None:
        kept.update(entry.step for entry in ordered if entry.step % keep.every == 0)
    if keep.minutes is not None:
        kept.update(_first_of_each_slot(ordered, keep.minutes))
    if keep.best is not None:
        kept.update(_best(ordered, keep.best))
    return [entry.step for entry in ordered if entry.step not in kept]


def _first_of_each_slot(ordered: Sequence[Entry], minutes: float) -> list[int]:
    first: dict[int, int] = {}
    for entry in ordered:
        first.setdefault(math.floor(entry.created_s / max(_TICK_S, minutes * 60)), entry.step)
    return list(first.values())


def _best(ordered: Sequence[Entry], best: Best) -> list[int]:
    sign = 1 if best.mode == "min" else -1
    ranked = sorted(
        (sign * value, -entry.step)
        for entry in ordered
        if (value := entry.metrics.get(best.metric)) is not None and not math.isnan(value)
    )
    return [-step for _, step in ranked[: best.n]]
