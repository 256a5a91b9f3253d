"""Tell from a root's journal what its saves did, and what else happened. Torch-free, reads only.

Guarantees: what is returned is plain JSON with the expected types, whatever the lines hold, and bounded: the newest
`SAVES_MAX` saves, `EVENTS_MAX` events and `RANK_ROWS_MAX` rows of ranks. `JournalLines` says what wasn't a line.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from holdfast.catalog.journal import NO_RUN, VERIFIED, is_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
_FOUND: Final = ("run.resumed", "load.finished", "checkpoint.deleted")
"""Kinds that tell of an entry that was published."""


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


def saves_of(
    journal: JournalLines, rows: Sequence[Mapping[str, Any]] = (), *, at_work: bool = True
) -> list[dict[str, Any]]:
    """Return every save, oldest first; of those before `RANK_ROWS_MAX` rows no ranks.

    Its outcome is ``"published"``, ``"failed"`` or ``"started"``, which is in work; of one that a kill hit, what the
    next start did with it, ``"rolled forward"`` or ``"removed"``, or ``"cut off"``. A kill may also have hit only the
    line that tells the outcome: a save is published, too, if the root has its entry, or a later line tells of it.

    rows: the root's entries, as the page's ``steps``. at_work: whether somebody may be saving there now.
    """
    ended, open_ = _saves_in(journal)
    _find_entries(open_, {save["attempt"] for save in ended} - {None}, rows)
    over = {line["run"] for line in journal.lines if line["kind"] == "run.ended"}
    last = next((line["run"] for line in reversed(journal.lines) if line["run"] != NO_RUN), None)
    for save in open_:
        if save["outcome"] == "started" and (not at_work or save["run"] in over or save["run"] != last):
            save["outcome"] = "cut off"
    saves = sorted((*ended, *open_), key=lambda save: (save["began"], save["t"]))[-SAVES_MAX:]
    left = RANK_ROWS_MAX
    for save in reversed(saves):  # from the newest on: of older ones they aren't even looked at
        ranks = save["ranks"] if isinstance(save["ranks"], list) else []
        left -= len(ranks)
        save["ranks"] = list(_rank_rows(ranks)) if left >= 0 else []
        if left < 0 and ranks:
            save["ranks_left_out"] = True
        del save["attempt"]
    return saves


def _saves_in(journal: JournalLines) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the saves whose outcome was written, and the others, with what later lines tell of them."""
    ended: list[dict[str, Any]] = []
    open_: dict[tuple[str | None, str | None, int | None], dict[str, Any]] = {}
    standing: set[str | None] = set()
    """Names whose publication was written: what is told of them later is of that save."""
    for line in journal.lines:
        kind = line["kind"]
        key = (text_of(line.get("run"), 64), text_of(line.get("name"), 300), step_of(line.get("step")))
        if kind == "save.started":
            open_[key] = {**_save(line, "started"), "began": line["t"]}
        elif kind in ("save.published", "save.failed"):
            open_.pop(key, None)
            ended.append(_save(line, kind.removeprefix("save.")))
            if kind == "save.published":
                standing.add(key[1])
        elif kind == "recovery" and (outcome := _SETTLED.get(text_of(line.get("what")) or "")):
            for save in open_.values():
                if save["name"] == key[1] and save["outcome"] == "started":
                    save["outcome"] = outcome
        elif kind in _FOUND:
            for save in open_.values():
                is_meant = key[2] == save["step"] is not None and key[1] in (None, save["name"])
                if is_meant and save["outcome"] == "started" and save["name"] not in standing:
                    save["outcome"] = "published"
            if kind == "checkpoint.deleted":
                standing.discard(key[1])
    return ended, list(open_.values())


def _find_entries(open_: list[dict[str, Any]], known: set[str | None], rows: Sequence[Mapping[str, Any]]) -> None:
    """Mark those of ``open_`` as published that have made an entry of the root; known: attempts of other saves."""
    made = {row["name"]: row for row in rows if row["state"] == "published" and row["created"] is not None}
    for save in reversed(open_):
        row = made.get(save["name"])
        if row is None or save["outcome"] != "started" or row["created"] < save["began"]:
            continue
        if row["step"] == save["step"] and row.get("attempt") not in known:
            save["outcome"], save["nbytes"] = "published", row["nbytes"]
            del made[save["name"]]


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
        "attempt": text_of(line.get("attempt"), 100),
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
