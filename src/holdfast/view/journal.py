"""Tell from a root's journal what its saves did, and what else happened. Torch-free, reads only.

Guarantees: what is returned is plain JSON with the expected types, whatever the lines hold, and bounded: the newest
`SAVES_MAX` saves, `EVENTS_MAX` events and `RANK_ROWS_MAX` rows of ranks. `JournalLines` says what wasn't a line.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from holdfast.catalog.journal import NO_RUN, VERIFIED, is_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.catalog.journal import JournalLines

RANK_ROWS_MAX: Final = 40_000
SAVES_MAX: Final = 5_000
EVENTS_MAX: Final = 2_000
_PHASES: Final = ("stall_s", "staging_s", "persist_s", "commit_s")
_TOLD: Final = frozenset(
    ("save.missed", "checkpoint.deleted", "load.finished", "load.fallback", "recovery", "signal", "warning", "verify")
)
"""Kinds that are shown as they are, one line each."""
VERSION_EVENTS_MAX: Final = 2_000
_SETTLED: Final = {"rolled_forward": "rolled forward", "removed": "removed"}
"""Outcomes of saves that a kill has hit, by what a recovery tells."""


def _time(value: object) -> float | None:
    found = number_of(value)
    return found if is_time(found) else None


def number_of(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def step_of(value: object) -> int | None:
    """Return an integer; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_of(value: object, most: int = 1000) -> str | None:
    """Return the beginning of a text; None for anything else."""
    return value[:most] if isinstance(value, str) else None


# Saves and other events ----------------------------------------------------------------------------------------


def saves_of(journal: JournalLines) -> list[dict[str, Any]]:
    """Return every save, oldest first; of those before `RANK_ROWS_MAX` rows no ranks.

    Its outcome is ``"published"``, ``"failed"`` or ``"started"``, which is in work; of one that a kill hit, what the
    next start did with it, ``"rolled forward"`` or ``"removed"``, or ``"cut off"`` where that isn't known.
    """
    ended: list[dict[str, Any]] = []
    open_: dict[tuple[str | None, str | None, int | None], dict[str, Any]] = {}
    for line in journal.lines:
        kind = line["kind"]
        key = (text_of(line.get("run"), 64), text_of(line.get("name"), 300), step_of(line.get("step")))
        if kind == "save.started":
            open_[key] = {**_save(line, "started"), "began": line["t"]}
        elif kind in ("save.published", "save.failed"):
            open_.pop(key, None)
            ended.append(_save(line, kind.removeprefix("save.")))
        elif kind == "recovery" and (outcome := _SETTLED.get(text_of(line.get("what")) or "")):
            for save in open_.values():
                if save["name"] == key[1] and save["outcome"] == "started":
                    save["outcome"] = outcome
    over = {line["run"] for line in journal.lines if line["kind"] == "run.ended"}
    last = next((line["run"] for line in reversed(journal.lines) if line["run"] != NO_RUN), None)
    for (run, _, _), save in open_.items():
        if save["outcome"] == "started" and (run in over or run != last):
            save["outcome"] = "cut off"
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
    phases = {name: number_of(line.get(name)) for name in _PHASES}
    known = sum(value or 0 for name, value in phases.items() if name != "stall_s")
    return {
        "t": at,
        "began": at - known if began is None else min(began, at),
        "run": text_of(line.get("run"), 64),
        "outcome": outcome,
        "step": step_of(line.get("step")),
        "name": text_of(line.get("name"), 300),
        "kind": text_of(line.get("kind_of"), 20) or "checkpoint",
        "nbytes": number_of(line.get("nbytes")),
        **phases,
        "error": text_of(line.get("error"), 100),
        "message": text_of(line.get("message")),
        "rank": step_of(line.get("rank")),
        "ranks": line.get("ranks"),
    }


def _rank_rows(rows: list[object]) -> Iterator[list[float | None]]:
    """Yield [rank, began, stall_s, staging_s, persist_s, nbytes] of each row that has a rank."""
    for row in rows:
        if isinstance(row, list) and len(row) >= 6 and step_of(row[0]) is not None:
            yield [row[0], _time(row[1]), *map(number_of, row[2:6])]


def events_of(journal: JournalLines) -> list[dict[str, Any]]:
    """Return what else happened, the newest `EVENTS_MAX`, oldest first: fields that are numbers, texts or lists.

    Behind them what became of versions, the newest `VERSION_EVENTS_MAX`.
    """
    told = [line for line in journal.lines if line["kind"] in _TOLD][-EVENTS_MAX:]
    return [
        {str(name)[:40]: shown for name, value in line.items() if name != "v" and (shown := _shown(value)) is not None}
        for line in told + list(_version_events(journal))[-VERSION_EVENTS_MAX:]
    ]


def _version_events(journal: JournalLines) -> Iterator[dict[str, Any]]:
    """Yield when versions were published, and when receivers had them, or left."""
    for line in journal.lines:
        if line["kind"] == "version.published" and step_of(line.get("version")) is not None:
            yield line
        rows = line.get("receivers") if line["kind"] == "version.received" else None
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, list) and len(row) == 3 and isinstance(row[0], str):
                version = step_of(row[1])
                kind = "receiver.left" if version is None else "version.received"
                yield {"t": line["t"], "kind": kind, "receiver": row[0], "version": version, "seconds": row[2]}


def _shown(value: object) -> object:
    if isinstance(value, list):
        return [text_of(item) if isinstance(item, str) else item for item in value[:20] if isinstance(item, (str, int))]
    return text_of(value) if isinstance(value, str) else number_of(value)


def verified_in(journal: JournalLines) -> dict[str, dict[str, Any]]:
    """Return when each checkpoint was last verified and the problems found, by name."""
    return {
        line["name"]: {"t": line["t"], "problems": step_of(line.get("problems"))}
        for line in journal.lines
        if line["kind"] == VERIFIED and isinstance(line.get("name"), str)
    }
