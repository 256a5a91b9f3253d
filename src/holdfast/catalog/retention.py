"""Which published checkpoints come first, and which to keep: pure functions of their descriptions. Torch-free.

A run that goes back to an older step and saves again starts a *branch*: what lies above that step is abandoned. Each
checkpoint notes its branch in its manifest (`Lineage`), with those it comes from and the step at which each was left; a
root that no run ever went back in has one branch, 0, of which nothing is noted.

    branch 0:  100  200  300  400          300 and 400 are abandoned from the moment 250 is published
    branch 1:         +- 250  350          oldest to newest: 300 400 | 100 200 250 350

    keep a checkpoint if any of these says so
    -----------------------------------------------------------------------------------
    last      it is one of the newest ``last``; those abandoned by a run that went back count as older than its own
    every     its step is a multiple of ``every``
    minutes   it is the first in its slot of ``minutes`` minutes since the epoch
    best      its metric is among the ``n`` best
    model     it is model-only, and the newest such, or was abandoned by a run that continued from an older step
    always    it is pinned, leased by a reader, just published, the newest, or the newest to resume from
    chain     one that is kept is a delta to it

Guarantees: the order depends on what is published only, so every reader sees the same; the newest is what the last run
has published, whatever the numbers of the steps it left behind. The newest *resumable* checkpoint by that order is
never selected for deletion, nor is one that is pinned, leased or was published just now; nor is a model-only save,
which may be the only copy of what was shipped, before the run that it belongs to has saved a newer one. What is kept
doesn't depend on the order of the entries; deleting what was selected and asking again selects nothing more.
Assumes: ``created_s`` of all entries is by one rank's wall clock. A slot is a fixed stretch of that clock, so what is
kept doesn't drift as older ones go.
Does not: delete (the caller does, by renaming to trash), or decide what is published.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from holdfast.catalog.course import Course
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_KEY: Final = "lineage"
"""Of `Manifest.extra`: the branches gone through, each [branch, step at which it was left], and then the own one."""
_BRANCH_LIMIT: Final = 1 << 62
"""Upper bound of branch numbers; one more still fits into the messages between ranks."""
_T = TypeVar("_T")
_TICK_S: Final = 1e-6
"""Resolution in seconds of the clock in manifests; shorter slots can't be distinguished."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The branch of a checkpoint, and how it came to be."""

    branch: int = 0
    left: tuple[tuple[int, int], ...] = ()
    """(branch, step at which it was left), oldest first."""

    def holds(self, branch: int, step: int) -> bool:
        """Return True if the checkpoint that ``branch`` published at ``step`` belongs to this run's history."""
        return branch == self.branch or any(known == branch and step <= at for known, at in self.left)

    def encode(self) -> dict[str, Any]:
        """Encode as members of `Manifest.extra`; empty for a run that never went back."""
        return {_KEY: [*map(list, self.left), self.branch]} if self != Lineage() else {}


def decode_lineage(extra: Mapping[str, Any]) -> Lineage:
    """Decode the output of `Lineage.encode` in ``extra``; anything else is branch 0."""
    match extra.get(_KEY):
        case [*left, branch] if _is_branch(branch) and all(map(_is_left, left)):
            return Lineage(branch, tuple((known, at) for known, at in left))
        case _:
            return Lineage()


def _is_branch(value: object) -> bool:
    return type(value) is int and 0 <= value < _BRANCH_LIMIT


def _is_left(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and _is_branch(row[0]) and type(row[1]) is int and row[1] < 1 << 63


def newest_of(lineages: Iterable[Lineage]) -> Lineage:
    """The lineage of the last run that published anything; branch 0 where none has."""
    return max(lineages, key=lambda lineage: lineage.branch, default=Lineage())


def in_order(rows: Iterable[_T], place: Callable[[_T], tuple[int, Lineage]]) -> list[_T]:
    """``rows`` from oldest to newest: first what was abandoned. place: the step of a row and its lineage."""
    found = [(*place(row), row) for row in rows]
    standing = newest_of(lineage for _, lineage, _ in found)
    found.sort(key=lambda item: (standing.holds(item[1].branch, item[0]), item[1].branch, item[0]))
    return [row for _, _, row in found]


def lineage_from(published: Collection[tuple[int, Lineage]], origin: int, in_flight: Collection[int] = ()) -> Lineage:
    """The lineage of what a run publishes that goes on from step ``origin``, given what is published or about to be.

    A branch of its own where anything newer than ``origin`` is there, else that of ``origin``.
    """
    newest = newest_of(lineage for _, lineage in published)
    at_origin = [lineage for step, lineage in published if step == origin]
    own = at_origin[0] if at_origin else newest
    newer = any(newest.holds(lineage.branch, step) and step > origin for step, lineage in published)
    if own.branch == newest.branch and not newer and all(step <= origin for step in in_flight):
        return own
    left = tuple((branch, min(at, origin)) for branch, at in own.left)
    return Lineage(newest.branch + 1, (*left, (own.branch, origin)))


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
    """Retention rules; a checkpoint is kept if any of the rules keeps it.

    Attributes:
        last: how many of the newest to keep, 0 or more; default 3. None keeps all. With 0 only the other rules count,
            plus the newest checkpoint, the newest resumable one, and the newest model-only one. ``last=1`` is safe (a
            checkpoint is deleted only once its successor is durable) but leaves no fallback if that is damaged
            later. Steps that a run abandoned when it went back count as older than all of its own; model-only ones
            among them stay.
        every: steps; keep those at a multiple of it, 1 or more; None (default): no such rule.
        minutes: minutes of wall time; keep the first checkpoint of each such slot, more than 0; None (default): no such
            rule.
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
class CheckpointEntry:
    """One published checkpoint, described for retention."""

    step: int
    created_s: float
    """Seconds since the epoch by the coordinator's wall clock."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    resumable: bool = True
    """False for a model-only save, which a run can't resume from."""
    pinned: bool = False
    leased: bool = False
    """A reader is using it."""
    lineage: Lineage = field(default_factory=Lineage)
    origin: str = ""
    """Attempt that saved it; a copy has that of what it is a copy of."""
    course: Course = field(default_factory=Course)
    replaced: str = ""
    """Attempt that it has replaced, if any."""
    needs: tuple[str, ...] = ()
    """Attempts without which it can't be read: the chain of a delta version."""


def select_deletions(entries: Sequence[CheckpointEntry], keep: Keep, published: int | None = None) -> list[int]:
    """Return the steps to delete, in ascending order; steps of ``entries`` are distinct. Pure.

    published: the step whose publication this follows, if any.
    """
    return [step for step, reasons in reasons_to_keep(entries, keep, published).items() if not reasons]


def reasons_to_keep(
    entries: Sequence[CheckpointEntry], keep: Keep, published: int | None = None
) -> dict[int, tuple[str, ...]]:
    """Return why each step stays, in words, by ascending step; none for one that is to be deleted. Pure.

    Arguments as for `select_deletions`.
    """
    ordered = sorted(entries, key=lambda entry: entry.step)
    assert len({entry.step for entry in ordered}) == len(ordered), "two entries of one step"
    found: dict[int, list[str]] = {entry.step: [] for entry in ordered}

    def stays(why: str, steps: Iterable[int]) -> None:
        for step in steps:
            found[step].append(why)

    by_age = in_order(ordered, lambda entry: (entry.step, entry.lineage))
    models = [entry for entry in by_age if not entry.resumable]
    course = newest_of(entry.lineage for entry in ordered)
    stays("pinned", (entry.step for entry in ordered if entry.pinned))
    stays("being loaded", (entry.step for entry in ordered if entry.leased))
    stays("just published", (entry.step for entry in ordered if entry.step == published))
    # Resumable or not, the newest defines the order of the others.
    stays("the newest", (entry.step for entry in by_age[-1:]))
    stays("the newest to resume from", [entry.step for entry in by_age if entry.resumable][-1:])
    stays("the newest model", (entry.step for entry in models[-1:]))
    abandoned = (entry.step for entry in models if not course.holds(entry.lineage.branch, entry.step))
    stays("the model of an abandoned run", abandoned)
    if keep.last is None:
        stays("all are kept", (entry.step for entry in ordered))
    else:
        stays(f"last {keep.last}", (entry.step for entry in by_age[max(0, len(by_age) - keep.last) :]))
    if keep.every is not None:
        stays(f"every {keep.every}", (entry.step for entry in ordered if entry.step % keep.every == 0))
    if keep.minutes is not None:
        stays(f"first of {keep.minutes:g} minutes", _first_of_each_slot(ordered, keep.minutes))
    if keep.best is not None:
        stays(f"best {keep.best.metric}", _best(ordered, keep.best))
    needed = {attempt for entry in ordered if found[entry.step] for attempt in entry.needs}
    stays("a delta needs it", (entry.step for entry in ordered if entry.origin in needed))
    return {step: tuple(reasons) for step, reasons in found.items()}


def _first_of_each_slot(ordered: Sequence[CheckpointEntry], minutes: float) -> list[int]:
    first: dict[int, int] = {}
    for entry in ordered:
        first.setdefault(math.floor(entry.created_s / max(_TICK_S, minutes * 60)), entry.step)
    return list(first.values())


def _best(ordered: Sequence[CheckpointEntry], best: Best) -> list[int]:
    sign = 1 if best.mode == "min" else -1
    ranked = sorted(
        (sign * value, -entry.step)
        for entry in ordered
        if (value := entry.metrics.get(best.metric)) is not None and not math.isnan(value)
    )
    return [-step for _, step in ranked[: best.n]]
