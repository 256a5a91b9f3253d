"""What the page shows of a root, as plain JSON: from manifests and the journal, without reports or data. Torch-free.

    steps      every entry of the root, with metrics, lineage, and why retention keeps it
    saves      each save with its phases on every rank; of manifests alone when it was published, and its size
    runs, events, goodput, branches   from journal and lineage

Guarantees: changes nothing, takes no lock; costs one listing, each manifest and the journal. Of text from a checkpoint
nothing is interpreted: who shows it must take it for text.
Does not: read reports or tensors (`tensors` does, one checkpoint at a time).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from holdfast._version import __version__
from holdfast.catalog.catalog import entry_of
from holdfast.catalog.course import PARENT
from holdfast.catalog.journal import PUT_EVERY_S, scan_journal
from holdfast.catalog.listing import list_root, suspicious_in
from holdfast.catalog.retention import Best, CheckpointEntry, Keep, newest_of, reasons_to_keep
from holdfast.errors import ConfigError
from holdfast.storage.local import open_storage
from holdfast.validation import is_store
from holdfast.view.journal import events_of, saves_of, verified_in
from holdfast.view.runs import TrainingRun, goodput_of, runs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.catalog.journal import JournalLines
    from holdfast.catalog.listing import RootEntry, RootListing
    from holdfast.format.manifest import Manifest

_YOUNG_S: Final = 2 * PUT_EVERY_S
"""A run on a store writes that often, if it goes on."""


def summary_of(path: str) -> dict[str, Any]:
    """Return the document of the root at ``path``, a directory or a URL. Raises `ConfigError`, `StorageError`."""
    listing = list_root(path)
    journal = scan_journal(open_storage(listing.path))
    runs = runs_of(journal)
    entries = _entries(listing)
    keep = keep_of(runs)
    # Where the run's own rules are unknown, `Keep(last=0)` keeps what always stays, and nothing else.
    kept = reasons_to_keep(list(entries.values()), keep or Keep(last=0))
    rows = _steps(listing, entries, kept, verified_in(journal))
    saves = saves_of(journal, rows, at_work=is_at_work(listing, journal))
    return {
        "schema": 1,
        "root": listing.path,
        "generated": time.time(),
        "holdfast": __version__,
        "held_by": listing.held_by,
        "keep": _keep_document(keep),
        "steps": rows,
        "branches": branches_of(entries.values()),
        "journal": {
            "present": bool(journal.lines),
            "lines": len(journal.lines),
            "skipped": journal.skipped + len(journal.errors),
        },
        "runs": [run.document() for run in runs],
        "beats": beats_of(runs),
        "saves": saves or _saves_of_manifests(rows),
        "events": events_of(journal),
        "goodput": goodput_of(runs),
    }


def is_at_work(listing: RootListing, journal: JournalLines) -> bool:
    """Return True if somebody holds the root, or an attempt there is in work.

    On a store, which no one holds, a save that is staged has no attempt yet: there also if the journal is young.
    """
    if listing.held_by or any(row.state == "in work" for row in listing.entries):
        return True
    written = max((line["t"] for line in journal.lines), default=0.0)
    return is_store(listing.path) and time.time() - written < _YOUNG_S


def _entries(listing: RootListing) -> dict[str, CheckpointEntry]:
    """Return the checkpoints that retention looks at, by name, each step once."""
    found: dict[int, tuple[str, CheckpointEntry]] = {}
    for row in listing.entries:
        manifest = listing.manifests.get(row.name)
        if manifest is None or row.state != "published" or row.kind != "checkpoint" or row.step is None:
            continue
        try:
            entry = entry_of(row.step, manifest, alike=False)
        except ValueError:  # a time that isn't one
            continue
        found[row.step] = (row.name, replace(entry, pinned=row.pinned))
    return dict(found.values())


def keep_of(runs: Sequence[TrainingRun]) -> Keep | None:
    """Return the retention of the last run that tells it; None if none does. A run without one keeps all."""
    for run in reversed(runs):
        config = run.told.get("config", {})
        told = config.get("keep")
        if told is None and "keep" in config:
            return Keep(last=None)
        if isinstance(told, dict):
            best = told.get("best")
            try:
                return Keep(
                    last=told.get("last"),
                    every=told.get("every"),
                    minutes=told.get("minutes"),
                    best=Best(**best) if isinstance(best, dict) else None,
                )
            except (ConfigError, TypeError):
                return None
    return None


def _keep_document(keep: Keep | None) -> dict[str, Any] | None:
    if keep is None:
        return None
    best = keep.best and {"metric": keep.best.metric, "mode": keep.best.mode, "n": keep.best.n}
    return {"last": keep.last, "every": keep.every, "minutes": keep.minutes, "best": best}


def _steps(
    listing: RootListing,
    entries: Mapping[str, CheckpointEntry],
    kept: Mapping[int, Sequence[str]],
    verified: Mapping[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    standing = newest_of(entry.lineage for entry in entries.values())
    rows = []
    for row in listing.entries:
        document = _row(row, listing.manifests.get(row.name), verified.get(row.name))
        entry = entries.get(row.name)
        if entry is not None:
            document["branch"] = entry.lineage.branch
            document["standing"] = standing.holds(entry.lineage.branch, entry.step)
            document["kept"] = list(kept.get(entry.step, ()))
        rows.append(document)
    return rows


def _row(row: RootEntry, manifest: Manifest | None, verified: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "step": row.step,
        "state": row.state,
        "kind": row.kind,
        "nbytes": row.nbytes,
        "created": _seconds(row.created),
        "world": row.world,
        "pinned": row.pinned,
        "resumable": row.resumable,
        "latest": row.latest,
    }
    if manifest is not None:
        found["attempt"] = manifest.attempt
        found["metrics"] = {name: plain_number(value) for name, value in manifest.metrics.items()}
        found["versions"] = manifest.versions
        parent = manifest.extra.get(PARENT)
        found["parent"] = parent if isinstance(parent, str) else None
        if suspicious := _suspicious(manifest):
            found["suspicious"] = suspicious
    optional = {"chain": list(row.chain), "held_by": row.held_by, "error": row.error, "verified": verified}
    return {**found, **{name: value for name, value in optional.items() if value}}


def _suspicious(manifest: Manifest) -> list[dict[str, str]]:
    """Return what was suspicious about a save: kinds and sentences."""
    rows = suspicious_in(manifest)
    return [{name: str(row[name] or "")[:1000] for name in ("what", "message")} for row in rows]


def _seconds(created: str | None) -> float | None:
    try:
        when = datetime.fromisoformat(created or "")
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


def plain_number(value: float) -> float | str:
    """Return ``value``, as a string if JSON has no such number."""
    return value if math.isfinite(value) else str(value)


def branches_of(entries: Iterable[CheckpointEntry]) -> list[dict[str, Any]]:
    """Return each branch with the branch and step it goes on from; None for what comes from no other."""
    found: dict[int, dict[str, Any]] = {}
    for entry in entries:
        lineage = entry.lineage
        came = lineage.left[-1] if lineage.left else (None, None)
        found[lineage.branch] = {"branch": lineage.branch, "from": came[0], "at": came[1]}
    return [found[branch] for branch in sorted(found)]


def beats_of(runs: Iterable[TrainingRun], most: int = 2_000) -> list[list[float]]:
    """Return when which step was done, [seconds, step], evenly thinned to ``most``."""
    beats = [beat for run in runs for beat in run.beats]
    stride = max(1, math.ceil(len(beats) / most))
    return [[at, step] for at, step in beats[::stride]]


def _saves_of_manifests(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a save for each published entry: when it was published is all that a manifest tells of its making."""
    unknown = dict.fromkeys(("stall_s", "staging_s", "persist_s", "commit_s", "run", "error", "message", "rank"))
    found: list[dict[str, Any]] = [
        {
            **unknown,
            "t": row["created"],
            "began": row["created"],
            "outcome": "published",
            **{name: row[name] for name in ("step", "name", "kind", "nbytes")},
            "ranks": [],
        }
        for row in rows
        if row["state"] == "published" and row["created"] is not None
    ]
    return sorted(found, key=lambda save: save["t"])
