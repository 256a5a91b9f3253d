"""List what a root holds (``holdfast ls``), and choose what a path on the command line means. Torch-free."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.catalog.listing import RootEntry, RootListing, existing_directory, list_root, size_text, stock_entry
from holdfast.catalog.root import STOCK_PLACES, is_checkpoint, is_stock
from holdfast.cli.output import AsJson, age_s_of, age_text, print_json, print_rows, shown
from holdfast.errors import CheckpointNotFound, ConfigError, StorageError
from holdfast.export.verify import is_export
from holdfast.format.manifest import METADATA_NAME
from holdfast.loader.sources.open import open_source
from holdfast.storage.local import open_storage
from holdfast.validation import is_store

if TYPE_CHECKING:
    from holdfast.loader.sources.holdfast import CheckpointSource

_LOOKED_AT = 100  # directories at most, when one has been given that holds no checkpoints


def is_one_checkpoint(directory: str) -> bool:
    """Return True if ``directory`` is itself a checkpoint, whole or damaged, and not a root."""
    if is_store(directory) and directory.count("/") < 3:
        return False  # a whole bucket
    storage = open_storage(os.path.dirname(directory))
    name = os.path.basename(directory)
    if bool(name) and is_checkpoint(storage, name):
        return True
    if is_store(directory):
        return is_stock(storage, name)
    return any(os.path.isfile(os.path.join(directory, below, METADATA_NAME)) for below in STOCK_PLACES)


def none_in(directory: str, what: str = "no checkpoints") -> str:
    """Say that ``directory`` holds none of ``what``, and which directories not far below it do: a run's, mostly."""
    if is_store(directory):
        return f"{directory} holds {what}"
    found, unseen = [], [directory]
    for seen in unseen:  # grows meanwhile: breadth first
        with contextlib.suppress(OSError, StorageError):
            rows = (row for row in os.scandir(seen) if row.is_dir(follow_symlinks=False) and row.name[0] != ".")
            inside = sorted(row.path for row in islice(rows, _LOOKED_AT))
            if seen != directory and any(is_one_checkpoint(path) for path in inside):
                found.append(os.path.relpath(seen, directory))
            else:
                unseen += inside[: max(0, _LOOKED_AT - len(unseen))]
    return f"{directory} holds {what}" + (f"; these below it do: {', '.join(found)}" if found else "")


def absent(directory: str, what: str = "no checkpoints") -> CheckpointNotFound:
    """Return the error of a command that needs one of ``what`` in ``directory``."""
    said = none_in(directory, what)
    advice = "" if "; these below it do: " in said else "; give a checkpoint, or a directory that holds some"
    return CheckpointNotFound(said + advice, path=directory)


def entries_of(path: str) -> tuple[str, list[RootEntry]]:
    """The directory that ``path`` is, and the checkpoints in it, oldest first: published, stock and corrupt ones."""
    root = existing_directory(path)
    known = ("published", "stock", "corrupt", "newer")
    return root, [row for row in list_root(root).entries if row.state in known]


def chosen_path(path: str, step: int | None) -> str:
    """The checkpoint that ``path`` is, or of the root that it is: that of ``step``, or the newest.

    Raises `ConfigError` for a path that is no directory, or a step of what is one checkpoint; `CheckpointNotFound`.
    """
    directory = existing_directory(path)
    if is_one_checkpoint(directory):
        if step is not None:
            raise ConfigError(f"{directory} is one checkpoint; give its root with --step", field="step")
        return directory
    _, rows = entries_of(directory)
    if step is not None:
        return of_step(directory, rows, step).path
    newest = newest_of(rows) or [row for row in rows if row.state != "stock"][-1:]
    if not newest:
        raise absent(directory)
    return newest[0].path


def newest_of(rows: list[RootEntry]) -> list[RootEntry]:
    """The newest checkpoint of ``rows`` that can be read, as `holdfast.open` takes it: only a model, or of any name."""
    return [row for row in rows if row.step is not None and row.kind == "checkpoint" and row.error is None][-1:]


def chosen_source(path: str, step: int | None) -> CheckpointSource:
    """Open what ``path`` is: a checkpoint, a Hugging Face model, or of a root that of ``step``, or the newest.

    Raises as `chosen_path`, and as `open_source`.
    """
    if step is not None:
        return open_source(chosen_path(path, step))
    directory = existing_directory(path)
    try:
        return open_source(directory)
    except CheckpointNotFound:
        if is_one_checkpoint(directory) or entries_of(directory)[1]:
            raise
        raise absent(directory) from None


def of_step(root: str, rows: list[RootEntry], step: int) -> RootEntry:
    """The checkpoint of ``step``. Raises `CheckpointNotFound` naming the steps there are."""
    for row in rows:
        if row.step == step:
            return row
    have = ", ".join(str(row.step) for row in rows if row.step is not None) or "none"
    raise CheckpointNotFound(f"step {step} is not under {root}; steps: {have}", path=root, step=step)


def ls(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory or URL of checkpoints, or of one of them.")],
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """List the checkpoints of a root with size, age and state, and what saves have in work or left behind.

    Reads manifests only, takes no lock and changes nothing. Exit status 1 where a manifest is corrupt, of a newer
    Holdfast, or of another step than its directory's name.
    """
    listing = _listing(path)
    if as_json:
        print_json(
            "ls",
            path=listing.path,
            held_by=listing.held_by,
            links=listing.links,
            entries=[_document(row) for row in listing.entries],
        )
    else:
        _print(listing)
    if any(row.error is not None for row in listing.entries):
        raise typer.Exit(1)


def _listing(path: str) -> RootListing:
    directory = existing_directory(path)
    if not is_one_checkpoint(directory):
        return list_root(os.path.realpath(directory) if os.path.islink(directory) else directory)
    root, name = os.path.split(directory)
    whole = list_root(root)
    if os.path.islink(directory) and all(row.name != name for row in whole.entries):
        return _listing(os.path.realpath(directory))  # such as that to the latest: a root lists what it points to
    rows = tuple(row for row in whole.entries if row.name == name) or (stock_entry(directory),)
    return RootListing(root, rows, whole.held_by, {})


def _document(row: RootEntry) -> dict[str, object]:
    return {**asdict(row), "state": row.state.replace(" ", "-"), "age_s": age_s_of(row.created)}


def _print(listing: RootListing) -> None:
    if not listing.entries:
        hint = "; it is a Hugging Face model: see `holdfast show`" if is_export(listing.path) else ""
        typer.echo(shown(none_in(listing.path)) + hint)
        return
    pointed: dict[str, list[str]] = {}
    for link, target in listing.links.items():
        pointed.setdefault(target, []).append(f"<- {link}")
    rows = [
        [
            "-" if row.step is None else str(row.step),
            ", ".join([*_words(row), *pointed.get(row.name, ())]),
            size_text(row.nbytes),
            age_text(row.created),
            row.name,
        ]
        for row in listing.entries
    ]
    print_rows(("step", "state", "size", "age", "name"), rows, right=(0, 2, 3))
    for row in listing.entries:
        if row.error is not None:
            typer.echo(f"{shown(row.name)}: {shown(row.error)}", err=True)
    if listing.held_by is not None:
        typer.echo(f"written to by {shown(listing.held_by)}")


def _words(row: RootEntry) -> list[str]:
    words = [row.state if row.held_by is None else f"{row.state} by {row.held_by}"]
    words += ["latest"] if row.latest else []
    words += ["pinned"] if row.pinned else []
    words += ["model only"] if not row.resumable and row.kind == "checkpoint" else []
    words += ["export"] if row.kind == "export" else []
    words += [f"delta to {row.chain[-1]}"] if row.chain else []
    return words
