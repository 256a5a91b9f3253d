"""Implement ``holdfast prune``: apply retention to a root by hand, and say why each step stays or goes. Torch-free.

Guarantees: decides by the code that managers use (``catalog.retention``); refuses while a running save holds the root,
and names the holder. ``--dry-run`` locks and changes nothing. What is deleted vanishes by one rename, before its files
go: what is left of them when this is interrupted, the next one removes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from holdfast.catalog.catalog import Catalog
from holdfast.catalog.listing import DEFAULT_TEMPLATE, committed_bytes, existing_directory, size_text
from holdfast.catalog.retention import Best, Keep, reasons_to_keep
from holdfast.cli.ls import none_in
from holdfast.cli.output import AsJson, print_json, print_rows, shown
from holdfast.cli.recover import remove_hidden
from holdfast.errors import ConfigError
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import open_storage
from holdfast.storage.object_overlay import ObjectOverlay
from holdfast.storage.object_storage import ObjectStorage

if TYPE_CHECKING:
    from holdfast.catalog.retention import CheckpointEntry
    from holdfast.storage.protocol import Storage


@dataclass(frozen=True, slots=True)
class _PrunedStep:
    """One step: ``reasons`` to keep it, none if it goes; ``outcome``: what became of it."""

    step: int
    name: str
    nbytes: int
    reasons: tuple[str, ...]
    outcome: Literal["kept", "goes", "gone", "left"]


def prune(
    path: Annotated[str, typer.Argument(metavar="ROOT", help="A directory or URL of checkpoints.")],
    last: Annotated[int | None, typer.Option(min=0, help="Keep so many of the newest.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Keep steps at a multiple of this.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Keep the first of each slot of so many minutes.")] = None,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC[:min|max[:N]]", help="Keep the N best by a metric: 'loss:min:2'.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go and why, and change nothing.")] = False,  # noqa: FBT002
    template: Annotated[str, typer.Option("--name-template", help="How the steps are called.")] = DEFAULT_TEMPLATE,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Delete the steps of a root that no rule keeps; each is shown with what keeps it.

    The rules are those of `holdfast.Keep`: a step stays if any of them says so. Pinned steps, those that are being
    loaded, the newest and the newest to resume from always stay. Exit status 1 if one could not be deleted.
    """
    if last is None:
        raise ConfigError("--last: say how many of the newest stay; 0 if only the other rules count", field="last")
    keep = Keep(last=last, every=every, minutes=minutes, best=_best_of(best))
    root = existing_directory(path)
    storage = open_storage(root)
    if dry_run and isinstance(storage, ObjectStorage):
        storage = ObjectStorage(ObjectOverlay(storage.store))
    rows = _tried(storage, template, keep) if dry_run else _pruned(storage, template, keep)
    if as_json:
        print_json("prune", path=root, dry_run=dry_run, steps=[_document(row) for row in rows])
    else:
        _print(root, rows, dry_run=dry_run)
    if any(row.outcome == "left" for row in rows):
        raise typer.Exit(1)


def _best_of(text: str | None) -> Best | None:
    if text is None:
        return None
    metric, *rest = text.split(":")
    mode = rest[0] if rest else "min"
    try:
        return Best(metric, mode=cast("Literal['min', 'max']", mode), n=int(rest[1]) if rest[1:] else 1)
    except ValueError as error:
        raise ConfigError(
            f"--best: {text!r}; write it as 'loss', 'loss:min' or 'accuracy:max:2'", field="best"
        ) from error


def _tried(storage: Storage, template: str, keep: Keep) -> list[_PrunedStep]:
    entries = Catalog(storage, template, keep).entries()
    metrics = {metric for entry in entries.values() for metric in entry.metrics}
    if keep.best is not None and entries and keep.best.metric not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        message = f"--best: no step under {storage.root} has a metric {keep.best.metric!r}; there are: {known}"
        raise ConfigError(message, field="best")  # or else the best would go
    reasons = reasons_to_keep([*entries.values()], keep)
    return [
        _PrunedStep(
            entry.step, name, _nbytes(storage, name), reasons[entry.step], "kept" if reasons[entry.step] else "goes"
        )
        for name, entry in _by_step(entries)
    ]


def _by_step(entries: dict[str, CheckpointEntry]) -> list[tuple[str, CheckpointEntry]]:
    return sorted(entries.items(), key=lambda item: item[1].step)


def _pruned(storage: Storage, template: str, keep: Keep) -> list[_PrunedStep]:
    with storage.lock():
        catalog = Catalog(storage, template, keep)
        before = _tried(storage, template, keep)
        catalog.apply_retention(None, lambda _: None)  # hides it
        there = set(catalog.entries())
        for found in storage.unsettled():
            if found.kind == "trash":  # also of a prune that was interrupted
                remove_hidden(storage, found.entry)  # or else `recover`, or the next manager: it is invisible
    return [
        row
        if row.outcome == "kept"
        else _PrunedStep(row.step, row.name, row.nbytes, (), "left" if row.name in there else "gone")
        for row in before
    ]


def _nbytes(storage: Storage, name: str) -> int:
    manifest = read_manifest(storage, name)
    return 0 if manifest is None else committed_bytes(manifest)


def _document(row: _PrunedStep) -> dict[str, Any]:
    return {
        "step": row.step,
        "name": row.name,
        "nbytes": row.nbytes,
        "outcome": row.outcome,
        "reasons": list(row.reasons),
    }


def _print(root: str, rows: list[_PrunedStep], *, dry_run: bool) -> None:
    if not rows:
        typer.echo(shown(none_in(root, "no checkpoints that Holdfast wrote")))
        return
    words = {"goes": "would go", "gone": "deleted", "left": "LEFT: it could not be deleted, or is being loaded"}
    print_rows(
        ("step", "size", "stays, or goes", "name"),
        [
            [str(row.step), size_text(row.nbytes), ", ".join(row.reasons) or words[row.outcome], row.name]
            for row in rows
        ],
        right=(0, 1),
    )
    gone = [row for row in rows if row.outcome in ("goes", "gone")]
    would = "would free" if dry_run else "freed"
    typer.echo(f"{len(gone)} of {len(rows)} steps: {would} {size_text(sum(row.nbytes for row in gone))}")
