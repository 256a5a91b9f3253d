"""``holdfast ls``: what a root holds, published and otherwise. Torch-free."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.choosing import is_one_checkpoint
from holdfast.cli.output import AsJson, age_s_of, age_text, print_json, print_rows, shown, size_text
from holdfast.listing import RootListing, existing_directory, list_root, stock_entry

if TYPE_CHECKING:
    from holdfast.listing import RootEntry


def ls(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory of checkpoints, or one of them.")],
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """List the checkpoints of a root with size, age and state, and what saves have in work or left behind.

    Reads manifests only, takes no lock and changes nothing. Exit status 1 where a manifest is corrupt.
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
    if any(row.state == "corrupt" for row in listing.entries):
        raise typer.Exit(1)


def _listing(path: str) -> RootListing:
    directory = existing_directory(path)
    if os.path.islink(directory):  # such as that to the latest: a root lists what it points to
        directory = os.path.realpath(directory)
    if not is_one_checkpoint(directory):
        return list_root(directory)
    root, name = os.path.split(directory)
    whole = list_root(root)
    rows = tuple(row for row in whole.entries if row.name == name) or (stock_entry(directory),)
    return RootListing(root, rows, whole.held_by, {})


def _document(row: RootEntry) -> dict[str, object]:
    return {**asdict(row), "state": row.state.replace(" ", "-"), "age_s": age_s_of(row.created)}


def _print(listing: RootListing) -> None:
    if not listing.entries:
        typer.echo(f"{shown(listing.path)} holds no checkpoints")
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
    return words
