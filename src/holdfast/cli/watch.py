"""Implement ``holdfast watch``: follow what a running job does with a root, a line a change. Torch-free.

It compares listings of the root, which any writer changes, and reads the journal that a manager keeps there, which
tells of failures.

Guarantees: changes nothing, takes no lock.
Does not: tell what comes and goes between two looks, unless the journal has it.
"""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.catalog.journal import read_journal
from holdfast.catalog.listing import existing_directory, list_root, size_text
from holdfast.cli.output import AsJson, print_line, shown
from holdfast.errors import HoldfastError
from holdfast.storage.local import open_storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.catalog.listing import RootEntry


def watch(
    path: Annotated[str, typer.Argument(metavar="ROOT", help="A directory or URL of checkpoints.")],
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    seconds: Annotated[float | None, typer.Option("--for", min=0.0, help="End after so many seconds.")] = None,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Follow a running job: a line for each save that begins, is published, fails, or is deleted.

    Ends with Ctrl-C, or after --for seconds. With --json each line is a document of its own.
    """
    root = existing_directory(path)
    follower = _Follower(root)
    ends_s = None if seconds is None else time.monotonic() + seconds
    while True:
        for change in follower.changes():
            _print(change, as_json=as_json)
        left_s = interval if ends_s is None else min(interval, ends_s - time.monotonic())
        if left_s <= 0:
            return
        time.sleep(left_s)


class _Follower:
    """Compares the root with how it was at the last look."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, RootEntry] | None = None
        self._holder: str | None = None
        self._journal = _JournalTail(root)
        self._trouble = ""

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield what has changed, as documents: ``change``, and what it is about."""
        try:
            listing = list_root(self._root)
        except HoldfastError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                yield {"change": "unreadable", "message": self._trouble}
            return
        self._trouble = ""
        now = {row.name: row for row in listing.entries}
        if self._known is None:
            yield {"change": "watching", "path": listing.path, "entries": len(now), "held_by": listing.held_by}
            self._journal.skip()
        elif listing.held_by != self._holder:
            yield {"change": "held" if listing.held_by else "let go", "by": listing.held_by or self._holder}
        self._holder = listing.held_by
        before, self._known = self._known, now
        if before is not None:
            yield from _differences(before, now)
            yield from self._journal.failures()


def _differences(before: dict[str, RootEntry], now: dict[str, RootEntry]) -> Iterator[dict[str, Any]]:
    for name, row in now.items():
        was = before.get(name)
        if was is None or was.state != row.state:
            yield {
                "change": {"published": "published", "in work": "saving"}.get(row.state, row.state),
                "step": row.step,
                "name": name,
                "kind": row.kind,
                "nbytes": row.nbytes,
                "by": row.held_by,
            }
        elif was.pinned != row.pinned:
            yield {"change": "pinned" if row.pinned else "unpinned", "step": row.step, "name": name}
    for name, row in before.items():
        if name not in now and row.state in ("published", "stock", "corrupt", "newer"):
            yield {"change": "deleted", "step": row.step, "name": name, "kind": row.kind, "nbytes": row.nbytes}


class _JournalTail:
    """Reads what a manager adds to the root's journal; nothing where there is none."""

    def __init__(self, root: str) -> None:
        self._storage = open_storage(root)
        self._seen = 0.0
        """When the newest line that is known was written."""

    def skip(self) -> None:
        """Take what is there for known."""
        for _ in self.failures():
            pass

    def failures(self) -> Iterator[dict[str, Any]]:
        """Yield what failed, or was warned of, since the last look."""
        with contextlib.suppress(HoldfastError):
            lines = [line for line in read_journal(self._storage) if line["t"] > self._seen]
            for line in lines:
                self._seen = max(self._seen, line["t"])
                if line["kind"] in ("save.failed", "save.missed", "warning"):
                    about = line.get("message") or line.get("error") or line.get("reason") or line.get("what")
                    yield {"change": line["kind"].replace("save.", ""), "step": line.get("step"), "message": str(about)}


def _print(change: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_line("watch", time=datetime.now().astimezone().isoformat(timespec="milliseconds"), **change)
        return
    kind, step = change["change"], change.get("step")
    what = f"step {step}" if step is not None else str(change.get("name") or change.get("path") or "")
    if change.get("kind") == "export":
        what = f"export {change['name']}"
    details = [
        size_text(change["nbytes"]) if change.get("nbytes") and kind != "saving" else "",
        f"by {change['by']}" if change.get("by") else "",
        f"{change['entries']} entries" if "entries" in change else "",
        f"written to by {change['held_by']}" if change.get("held_by") else "",
        str(change.get("message") or ""),
    ]
    told = "  ".join(shown(text) for text in (what, kind, *details) if text)
    typer.echo(f"{datetime.now().astimezone():%H:%M:%S}  {told}")
