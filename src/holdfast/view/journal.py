"""Read a root's journal, and tell from it how runs went and what they lost. Torch-free, reads only.

A journal has one JSON object a line: ``.holdfast/journal.jsonl`` with the ``journal.old.jsonl`` before it, or on object
stores ``.holdfast/journal/{run}.jsonl``, one of each run.

    goodput = share of wall time not lost to
      stall      training waited for a save
      restart    from a killed run's last sign of life, or a run's own start, to the next run's first step
      repeated   steps done again: from the last step heard of to the step resumed from, at that run's pace

Guarantees: what isn't a line of a journal (a torn tail, damage, kinds of later versions) is skipped and counted; what
is returned is plain JSON with the expected types, and bounded: the newest `SAVES_MAX` saves and `RANK_ROWS_MAX` rows of
ranks.
Assumes: the clocks of a root's coordinators agree within seconds; a gap of clocks shows as no time, not as less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.errors import StorageError
from holdfast.storage.locks import DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from holdfast.storage.protocol import Readable

FILE_BYTES_MAX: Final = 64 << 20
"""A journal is bounded far below this; a larger file isn't one."""
RANK_ROWS_MAX: Final = 40_000
SAVES_MAX: Final = 5_000
EVENTS_MAX: Final = 2_000
_TIME_END: Final = 1e11
_FILES: Final = ("journal.old.jsonl", "journal.jsonl")
_PHASES: Final = ("stall_s", "staging_s", "persist_s", "commit_s")
_TOLD: Final = frozenset(
    (
        *("save.missed", "checkpoint.deleted", "load.finished", "load.fallback", "recovery", "signal", "warning"),
        *("verify", "version.published", "version.received"),
    )
)
"""Kinds that are shown as they are, one line each."""
_WANTED: Final = ("closed", "exited")
"""How runs end that somebody wanted to end."""


@dataclass(slots=True)
class TrainingRun:
    """One life of a manager, as far as its lines tell."""

    id: str
    started: float
    last_sign: float
    told: dict[str, Any] = field(default_factory=dict)
    """What ``run.started`` says, by the names it has there; ``resumed_from`` may come later, as ``run.resumed``."""
    ended: str | None = None
    first_step_at: float | None = None
    beats: list[tuple[float, int]] = field(default_factory=list)
    """When which step was heard of, by any line."""

    def pace_s(self) -> float | None:
        """Seconds a step took, from first to last; None if less than two were heard of."""
        steps = [step for _, step in self.beats]
        if not steps or max(steps) == min(steps):
            return None
        return max(0.0, self.beats[-1][0] - self.beats[0][0]) / (max(steps) - min(steps))

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


@dataclass(frozen=True, slots=True)
class JournalLines:
    """What was read: lines in order of time, and how many weren't lines."""

    lines: list[dict[str, Any]]
    skipped: int = 0


def read_journal(storage: Readable) -> JournalLines:
    """Read all there is; an absent journal has no lines. Never raises for what the files hold or lack."""
    lines: list[dict[str, Any]] = []
    skipped = 0
    for name in _names(storage):
        try:
            data = b"" if storage.size(name) is None else storage.read_file(name, max_bytes=FILE_BYTES_MAX)
        except StorageError:
            skipped += 1
            continue
        for line in data.splitlines():
            decoded = _decoded(line)
            if decoded is not None:
                lines.append(decoded)
            elif line.strip():
                skipped += 1
    lines.sort(key=lambda line: line["t"])
    return JournalLines(lines, skipped)


def _names(storage: Readable) -> list[str]:
    below = f"{DIRECTORY}/journal"
    try:
        runs = sorted(name for name in storage.list_dir(below) if name.endswith(".jsonl"))
    except StorageError:
        runs = []
    return [*(f"{DIRECTORY}/{name}" for name in _FILES), *(f"{below}/{name}" for name in runs)]


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str) or _time(found.get("t")) is None:
        return None
    return found


def _time(value: object) -> float | None:
    """Return seconds since the epoch that a calendar knows."""
    found = _number(value)
    return found if found is not None and 0 <= found < _TIME_END else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _step(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object, most: int = 1000) -> str | None:
    return value[:most] if isinstance(value, str) else None


# Runs ----------------------------------------------------------------------------------------------------------


def runs_of(journal: JournalLines) -> list[TrainingRun]:
    """Return the runs, in the order in which they started."""
    found: dict[str, TrainingRun] = {}
    for line in journal.lines:
        at, name = float(line["t"]), _text(line.get("run"), 64) or ""
        run = found.setdefault(name, TrainingRun(name, at, at))
        run.last_sign = max(run.last_sign, at)
        step = _step(line.get("step"))
        match line["kind"]:
            case "run.started":
                run.started, run.told = at, _checked_start(line)
            case "run.resumed":
                run.told["resumed_from"] = step
            case "run.ended":
                run.ended = _text(line.get("how"), 20) or "closed"
            case "step" | "save.started" | "save.published" if step is not None:
                run.beats.append((at, step))
                if line["kind"] == "step" and run.first_step_at is None:
                    run.first_step_at = at
    return sorted(found.values(), key=lambda run: run.started)


def _checked_start(line: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: _step(line.get(name)) for name in ("world", "pid", "resumed_from", "steps_lost")}
    texts = {name: _text(line.get(name), 100) for name in ("host", "holdfast", "torch")}
    config = line.get("config")
    return {**numbers, **texts, "config": config if isinstance(config, dict) else {}}


# Saves and other events ----------------------------------------------------------------------------------------


def saves_of(journal: JournalLines) -> list[dict[str, Any]]:
    """Return every save that ended, or is in work, oldest first; of those before `RANK_ROWS_MAX` rows no ranks."""
    ended: list[dict[str, Any]] = []
    open_: dict[tuple[str | None, str | None, int | None], dict[str, Any]] = {}
    for line in journal.lines:
        kind = line["kind"]
        key = (_text(line.get("run"), 64), _text(line.get("name"), 300), _step(line.get("step")))
        if kind == "save.started":
            open_[key] = {**_save(line, "started"), "began": line["t"]}
        elif kind in ("save.published", "save.failed"):
            open_.pop(key, None)
            ended.append(_save(line, kind.removeprefix("save.")))
    saves = sorted((*ended, *open_.values()), key=lambda save: (save["began"], save["t"]))[-SAVES_MAX:]
    left = RANK_ROWS_MAX
    for save in reversed(saves):  # from the newest on: of older ones they aren't even looked at
        rows = save["ranks"] if isinstance(save["ranks"], list) else []
        left -= len(rows)
        save["ranks"] = list(_rank_rows(rows)) if left >= 0 else []
        if left < 0 and rows:
            save["ranks_left_out"] = True
    return saves


def _save(line: dict[str, Any], outcome: str) -> dict[str, Any]:
    """Return a save with all fields checked but ``ranks``."""
    at = float(line["t"])
    began = _time(line.get("began"))
    phases = {name: _number(line.get(name)) for name in _PHASES}
    known = sum(value or 0 for name, value in phases.items() if name != "stall_s")
    return {
        "t": at,
        "began": at - known if began is None else min(began, at),
        "run": _text(line.get("run"), 64),
        "outcome": outcome,
        "step": _step(line.get("step")),
        "name": _text(line.get("name"), 300),
        "kind": _text(line.get("kind_of"), 20) or "checkpoint",
        "nbytes": _number(line.get("nbytes")),
        **phases,
        "error": _text(line.get("error"), 100),
        "message": _text(line.get("message")),
        "rank": _step(line.get("rank")),
        "ranks": line.get("ranks"),
    }


def _rank_rows(rows: list[object]) -> Iterator[list[float | None]]:
    """Yield [rank, began, stall_s, staging_s, persist_s, nbytes] of each row that has a rank."""
    for row in rows:
        if isinstance(row, list) and len(row) >= 6 and _step(row[0]) is not None:
            yield [row[0], _time(row[1]), *map(_number, row[2:6])]


def events_of(journal: JournalLines) -> list[dict[str, Any]]:
    """Return what else happened, the newest `EVENTS_MAX`, oldest first: fields that are numbers, texts or lists."""
    told = [line for line in journal.lines if line["kind"] in _TOLD][-EVENTS_MAX:]
    return [
        {str(name)[:40]: shown for name, value in line.items() if name != "v" and (shown := _shown(value)) is not None}
        for line in told
    ]


def _shown(value: object) -> object:
    if isinstance(value, list):
        return [_text(item) if isinstance(item, str) else item for item in value[:20] if isinstance(item, (str, int))]
    return _text(value) if isinstance(value, str) else _number(value)


def verified_in(journal: JournalLines) -> dict[str, dict[str, Any]]:
    """Return when each checkpoint was last verified and the problems found, by name."""
    return {
        line["name"]: {"t": line["t"], "problems": _step(line.get("problems"))}
        for line in journal.lines
        if line["kind"] == "verify" and isinstance(line.get("name"), str)
    }


# Goodput -------------------------------------------------------------------------------------------------------


def goodput_of(runs: Sequence[TrainingRun], saves: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return wall time, what was lost of it to what, in seconds, and the share that wasn't; None where nothing ran."""
    if not runs:
        return None
    wall_s = max(run.last_sign for run in runs) - runs[0].started
    lost = {
        "stall": sum(save["stall_s"] or 0.0 for save in saves),
        "restart": sum(_restart_s(before, after) for before, after in pairwise(runs)),
        "repeated": sum(_repeated_s(before, after) for before, after in pairwise(runs)),
    }
    idle_s = sum(_idle_s(before, after) for before, after in pairwise(runs))
    wall_s -= idle_s
    if wall_s <= 0:
        return None
    share = max(0.0, 1.0 - sum(lost.values()) / wall_s)
    return {"wall_s": wall_s, "idle_s": idle_s, "lost": lost, "share": share}


def _idle_s(before: TrainingRun, after: TrainingRun) -> float:
    """Time between a run that was closed and the next: nobody wanted to train."""
    return max(0.0, after.started - before.last_sign) if before.ended in _WANTED else 0.0


def _restart_s(before: TrainingRun, after: TrainingRun) -> float:
    since = after.started if before.ended in _WANTED else before.last_sign
    return max(0.0, (after.started if after.first_step_at is None else after.first_step_at) - since)


def _repeated_s(before: TrainingRun, after: TrainingRun) -> float:
    steps, pace_s = after.told.get("steps_lost"), before.pace_s()
    resumed = after.told.get("resumed_from")
    if steps is None and resumed is not None and before.beats:
        steps = max(step for _, step in before.beats) - resumed
    if not steps or steps < 0 or pace_s is None:
        return 0.0
    spent = before.last_sign - before.started
    return min(float(steps) * pace_s, max(0.0, spent))
