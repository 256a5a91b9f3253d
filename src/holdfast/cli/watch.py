"""Implement ``holdfast watch``: follow what a running job does with a root, a line a change. Torch-free.

It compares listings of the root, which any writer changes, and reads the journal that a manager keeps there, which
tells of failures, and of saves that come and go between two looks.

Guarantees: changes nothing, takes no lock. What both tell of is told once.
Does not: tell what comes and goes between two looks, unless the journal has it; of a save that begins and ends there
only the end.
"""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.catalog.journal import JournalTail
from holdfast.catalog.listing import existing_directory, list_root, size_text
from holdfast.cli.output import AsJson, print_line, shown
from holdfast.errors import HoldfastError
from holdfast.storage.local import open_storage
from holdfast.view.journal import step_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.catalog.listing import RootListing

_ONCE_MAX: Final = 10_000


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
    """Compares the root with how it was at the last look, and reads what was added to its journal since."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: RootListing | None = None
        self._journal = JournalTail(open_storage(root))
        self._told = _Once()
        self._trouble = ""

    def changes(self) -> Iterator[dict[str, Any]]:
        """Yield what has changed, as documents: ``change``, and what it is about."""
        noted: list[dict[str, Any]] = []
        with contextlib.suppress(HoldfastError):
            noted = self._journal.added()
        yield from self._noted(noted)  # first: what it tells of is older than what is listed
        try:
            now = list_root(self._root)
        except HoldfastError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                yield {"change": "unreadable", "message": self._trouble}
            return
        self._trouble = ""
        before, self._known = self._known, now
        if before is None:
            yield {"change": "watching", "path": now.path, "entries": len(now.entries), "held_by": now.held_by}
            for row in now.entries:
                self._told.publication("listing", row.name, _attempt(now, row.name))
            return
        if now.held_by != before.held_by:
            yield {"change": "held" if now.held_by else "let go", "by": now.held_by or before.held_by}
        yield from self._differences(before, now)

    def _noted(self, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield what was noted in the journal; what is published elsewhere, as exports may be, isn't of the root."""
        for line in lines:
            step, name = step_of(line.get("step")), text_of(line.get("name"))
            match line["kind"]:
                case "save.failed" | "save.missed" | "warning" as kind:
                    about = line.get("message") or line.get("error") or line.get("reason") or line.get("what")
                    change = kind.replace("save.", "")
                    yield {"change": change, "step": step, "name": name, "message": str(about)}
                case "save.published" if name and line.get("kind_of") != "export":
                    attempt, nbytes = text_of(line.get("attempt")), step_of(line.get("nbytes"))
                    if attempt and self._told.publication("journal", name, attempt):
                        of_save = {"step": step, "name": name, "kind": "checkpoint", "nbytes": nbytes, "by": None}
                        yield {"change": "published", **of_save}
                case "checkpoint.deleted" if name and self._told.deletion("journal", name):
                    rows = self._known.entries if self._known else ()
                    nbytes = next((row.nbytes for row in rows if row.name == name), None)
                    yield {"change": "deleted", "step": step, "name": name, "kind": "checkpoint", "nbytes": nbytes}

    def _differences(self, before: RootListing, now: RootListing) -> Iterator[dict[str, Any]]:
        rows_before, rows_now = ({row.name: row for row in listing.entries} for listing in (before, now))
        for name, row in rows_now.items():
            was, attempt = rows_before.get(name), _attempt(now, name)
            if was is None or was.state != row.state or attempt != _attempt(before, name):
                if row.state == "published" and not self._told.publication("listing", name, attempt):
                    continue
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
        for name, row in rows_before.items():
            was_there = name not in rows_now and row.state in ("published", "stock", "corrupt", "newer")
            if was_there and self._told.deletion("listing", name):
                yield {"change": "deleted", "step": row.step, "name": name, "kind": row.kind, "nbytes": row.nbytes}


def _attempt(listing: RootListing, name: str) -> str | None:
    manifest = listing.manifests.get(name)
    return None if manifest is None else manifest.attempt


class _Once:
    """What listings have told and the journal hasn't yet, or the other way round. Bounded: the oldest is forgotten."""

    def __init__(self) -> None:
        self._by: dict[tuple[str, ...], str] = {}

    def publication(self, source: str, name: str, attempt: str | None) -> bool:
        """Return True if only ``source`` has told so far that ``attempt`` was published as ``name``."""
        if attempt is None:  # the journal tells of none such
            return True
        is_new = self._is_new(source, "published", name, attempt)
        if is_new:
            self._by.pop(("deleted", name), None)
        return is_new

    def deletion(self, source: str, name: str) -> bool:
        """Return True if only ``source`` has told so far that ``name``, as it was last published, was deleted."""
        return self._is_new(source, "deleted", name)

    def _is_new(self, source: str, *what: str) -> bool:
        if self._by.get(what, source) != source:
            del self._by[what]
            return False
        self._by[what] = source
        if len(self._by) > _ONCE_MAX:
            del self._by[next(iter(self._by))]
        return True


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
