"""Tell from a root's journal how its runs went, and what they lost. Torch-free, pure.

    goodput = share of wall time not lost to
      stall      training waited for a save, as rank 0 saw it; one wait for a checkpoint and an export counts once
      restart    from a killed run's last sign of life, or a run's own start, to its first step
      repeated   steps that were thrown away: from the last step heard of to the one gone on from, at their own pace

Lines are taken in the order they were written, and time is what passes from line to line: a clock that is set back, or
another host's that is behind, shows as no time, never as less. A journal is cut at its bound; time without lines counts
neither as wall time nor as loss.

Assumes: no clock is set forward; that shows as time. On an object store, runs are in the order of their clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

from holdfast.catalog.journal import CUT, NO_RUN
from holdfast.view.journal import number_of, step_of, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.catalog.journal import JournalLines

_WANTED: Final = ("closed", "exited")
"""How runs end that somebody wanted to end."""


@dataclass(slots=True)
class Leg:
    """A part of a run that went forward: from its start, from a step gone back to, or from a cut of the journal on.

    began, ended, beats: by a clock that never goes back.
    """

    began: float
    ended: float
    since: str
    """``"started"``, ``"resumed"`` or ``"cut"``."""
    gone_back_to: int | None = None
    how: str | None = None
    """How the run ended, in its last leg."""
    beats: list[tuple[float, int]] = field(default_factory=list)
    """When which step was heard of, by any line."""

    def pace_s(self) -> float | None:
        """Return the seconds a step took, from first to last; None if less than two were heard of."""
        steps = [step for _, step in self.beats]
        if not steps or max(steps) == min(steps):
            return None
        return (self.beats[-1][0] - self.beats[0][0]) / (max(steps) - min(steps))


@dataclass(slots=True)
class TrainingRun:
    """One life of a manager, as far as its lines tell; started, last_sign: by the clock of its host."""

    id: str
    started: float
    last_sign: float
    told: dict[str, Any] = field(default_factory=dict)
    """What ``run.started`` says, by the names it has there; ``resumed_from`` may come later, as ``run.resumed``."""
    ended: str | None = None
    beats: list[tuple[float, int]] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    stalls: dict[int | None, dict[str, float]] = field(default_factory=dict)
    """Seconds that training waited, by step and by kind of save."""

    def stall_s(self) -> float:
        """Return the seconds that training waited for saves of this run."""
        return sum(max(of_kinds.values()) for of_kinds in self.stalls.values())

    def document(self) -> dict[str, Any]:
        """Return what the page shows of the run."""
        of_run = {name: self.told.get(name) for name in ("world", "host", "pid", "resumed_from", "holdfast", "torch")}
        return {
            "id": self.id,
            "started": self.started,
            "last": self.last_sign,
            "ended": self.ended,
            "steps": [min(steps), max(steps)] if (steps := [step for _, step in self.beats]) else None,
            **of_run,
        }


def runs_of(journal: JournalLines) -> list[TrainingRun]:
    """Return the runs, in the order in which they were written."""
    found: dict[str, TrainingRun] = {}
    now, written = 0.0, None
    for line in journal.lines:
        at, name = float(line["t"]), text_of(line["run"], 64) or NO_RUN
        if name == NO_RUN:
            continue
        now += 0.0 if written is None else max(0.0, at - written)
        written = at
        if name not in found:
            run = found[name] = TrainingRun(name, at, at)
            run.legs.append(Leg(now, now, "started" if line["kind"] == "run.started" else "cut"))
        _take(found[name], line, at, now)
    return list(found.values())


def _take(run: TrainingRun, line: dict[str, Any], at: float, now: float) -> None:
    """Take in one line of ``run``, written at ``at`` by its own clock."""
    kind, step, leg = line["kind"], step_of(line.get("step")), run.legs[-1]
    run.last_sign = max(run.last_sign, at)
    if kind == CUT or (kind == "run.resumed" and leg.beats):
        leg = Leg(now, now, "cut" if kind == CUT else "resumed")
        run.legs.append(leg)
    leg.ended = now
    match kind:
        case "run.started":
            run.started, run.told = at, _checked_start(line)
            leg.gone_back_to = run.told["resumed_from"]
        case "run.resumed":
            leg.gone_back_to = step
            if len(run.legs) == 1:
                run.told["resumed_from"] = step
        case "run.ended":
            run.ended = leg.how = text_of(line.get("how"), 20) or "closed"
        case "step" | "save.started" | "save.published" if step is not None:
            run.beats.append((at, step))
            if kind != "save.published":  # by then training is further on
                leg.beats.append((now, step))
    if kind in ("save.published", "save.failed"):
        of_kinds = run.stalls.setdefault(step, {})
        kind_of = text_of(line.get("kind_of"), 20) or "checkpoint"
        of_kinds[kind_of] = of_kinds.get(kind_of, 0.0) + max(0.0, number_of(line.get("stall_s")) or 0.0)


def _checked_start(line: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: step_of(line.get(name)) for name in ("world", "pid", "resumed_from")}
    texts = {name: text_of(line.get(name), 100) for name in ("host", "holdfast", "torch")}
    config = line.get("config")
    return {**numbers, **texts, "config": config if isinstance(config, dict) else {}}


# Goodput -------------------------------------------------------------------------------------------------------


def goodput_of(runs: Sequence[TrainingRun]) -> dict[str, Any] | None:
    """Return wall time, what was lost of it to what, in seconds, and the share that wasn't; None where nothing ran."""
    legs = list(chain.from_iterable(run.legs for run in runs))
    if not legs:
        return None
    pairs = list(pairwise(legs))
    idle_s = sum(_gap_s(*pair) for pair in pairs if pair[0].how in _WANTED)
    untold_s = sum(_gap_s(*pair) for pair in pairs if pair[1].since == "cut" and pair[0].how not in _WANTED)
    wall_s = max(one.ended for one in legs) - legs[0].began - idle_s - untold_s
    if wall_s <= 0:
        return None
    lost = {
        "stall": sum(run.stall_s() for run in runs),
        "restart": sum(_restart_s(before, after) for before, after in pairs),
        "repeated": sum(_repeated_s(before, after) for before, after in pairs),
    }
    share = max(0.0, 1.0 - sum(lost.values()) / wall_s)
    return {"wall_s": wall_s, "idle_s": idle_s, "lost": lost, "share": share}


def _gap_s(before: Leg, after: Leg) -> float:
    return max(0.0, after.began - before.ended)


def _restart_s(before: Leg, after: Leg) -> float:
    if after.since == "cut":
        return 0.0
    since = after.began if before.how in _WANTED or after.since == "resumed" else before.ended
    first = after.beats[0][0] if after.beats else after.ended  # a run without a step was nothing but a restart
    return max(0.0, first - since)


def _repeated_s(before: Leg, after: Leg) -> float:
    pace_s = before.pace_s()
    if pace_s is None or after.since == "cut":
        return 0.0
    gone_on_from = after.gone_back_to
    if gone_on_from is None and before.how not in _WANTED and after.beats:  # from nothing, after a kill
        gone_on_from = after.beats[0][1] - 1
    if gone_on_from is None:
        return 0.0
    steps = max(step for _, step in before.beats) - gone_on_from
    return min(max(0, steps) * pace_s, before.ended - before.began)
