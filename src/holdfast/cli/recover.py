"""``holdfast recover``: settle what saves have left behind, as the next start of a manager would. Torch-free.

Guarantees: refuses while a live save holds the root, or a name below it, and says who; a trial run (``--dry-run``)
decides by the same code on the same bytes and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import AsJson, print_json, shown
from holdfast.engine.removal import remove_tree_at
from holdfast.errors import RootLocked
from holdfast.listing import existing_directory, lease_holder
from holdfast.recovery import RecoveryReport
from holdfast.recovery import recover as settle
from holdfast.root import hidden_name, is_checkpoint, parse_hidden
from holdfast.storage.local import LocalStorage
from holdfast.storage.lock import DIRECTORY, RootLock, path_held_by, root_held_by
from holdfast.storage.overlay import Overlay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOOK_S = 0.1


def recover(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory of checkpoints, or the path of one save.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,  # noqa: FBT002
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for engines that are still at work.")] = 10.0,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Publish what is whole of the saves that a crash has interrupted, and remove the rest.

    Every manager does this when it starts. Exit status 1 where a live save holds the root, or something could not be
    settled.
    """
    root, only = _place(path)
    trial = _Trial(root, only, wait) if dry_run else _Real(root, only, wait)
    report = trial.run() if trial.found else RecoveryReport()
    removed = [trial.as_found(name) for name in report.removed]
    left = {trial.as_found(name): trial.why_left(name, report) for name in report.left}
    if as_json:
        print_json(
            "recover",
            path=root,
            dry_run=dry_run,
            rolled_forward=report.rolled_forward,
            restored=report.restored,
            removed=removed,
            left=[{"name": name, "why": why} for name, why in left.items()],
        )
    else:
        _print(root, report, removed, left, dry_run=dry_run)
    if report.left:
        raise typer.Exit(1)


def _place(path: str) -> tuple[str, str | None]:
    """The root, and the one name in it to settle, None for all: ``path`` may be what a single save goes to."""
    target = os.path.abspath(path)
    parent, name = os.path.split(target)
    if name and os.path.isdir(parent):
        storage = LocalStorage(parent)
        hidden = [found for entry in storage.list_dir("") if (found := parse_hidden(entry)) and found.name == name]
        if is_checkpoint(storage, name) or (hidden and not os.path.isdir(target)):
            return parent, name
    return existing_directory(path), None


class _Real:
    """A recovery of ``root``, or of the one name ``only`` in it, that takes place."""

    def __init__(self, root: str, only: str | None, wait_s: float) -> None:
        self.root = root
        self.only = only
        self.wait_s = wait_s
        self.storage = LocalStorage(root)
        self.reasons: dict[str, str] = {}
        """Why a name was left alone."""
        self.found = [entry for entry in self.storage.list_dir("") if self._is_ours(entry)]
        """What there is to settle."""

    def matches(self, name: str) -> bool:
        return self.only is None or name == self.only

    def _is_ours(self, entry: str) -> bool:
        found = parse_hidden(entry)
        return found is not None and self.matches(found.name)

    def as_found(self, entry: str) -> str:
        """The name under which what is ``entry`` now was found: on its way it gets others."""
        known = parse_hidden(entry)
        for found in self.found if known and entry not in self.found else ():
            before = parse_hidden(found)
            if before and known and (before.name, before.attempt) == (known.name, known.attempt):
                return found
        return entry

    def why_left(self, entry: str, report: RecoveryReport) -> str:
        found = parse_hidden(entry)
        return self.reasons.get(found.name if found else "") or report.why[entry]

    def run(self) -> RecoveryReport:
        trash: list[str] = []
        # A directory that no manager has used stays as it is; where one has, it may come back.
        is_root = self.only is None or self.storage.exists(DIRECTORY)
        with RootLock.acquire(self.root) if is_root else contextlib.nullcontext():
            report = self.settle(self.storage, trash.append)
            fd = self.storage.open_dir("")
            try:
                kept = {name: why for name in trash if (why := _remove(fd, name)) is not None}
            finally:
                os.close(fd)
        removed = tuple(name for name in report.removed if name not in kept)
        return RecoveryReport(
            report.rolled_forward, report.restored, removed, (*report.left, *kept), {**report.why, **kept}
        )

    def settle(self, storage: LocalStorage | Overlay, remove: Callable[[str], None]) -> RecoveryReport:
        return settle(
            storage,
            clock=time.monotonic,
            sleep=time.sleep,
            matches=self.matches,
            timeout_s=self.wait_s,
            remove=remove,
            claim=self.claim,
        )

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[object]:
        """Keep others from saving to ``name``. Raises `RootLocked` if one does, or an engine still writes for it."""
        try:
            with RootLock.acquire_beside(self.storage.path(name)) as lock:
                self.wait_for_engines(name)
                yield lock
        except RootLocked as error:
            self.reasons[name] = str(error)
            raise

    def wait_for_engines(self, name: str) -> None:
        deadline = time.monotonic() + self.wait_s
        while (holder := self.engine_at_work(name)) is not None:
            if time.monotonic() >= deadline:
                path = self.storage.path(name)
                raise RootLocked(
                    f"{path} is being written by {holder}, still after {self.wait_s:g} s: try again when it has ended",
                    path=path,
                    by=holder,
                )
            time.sleep(_LOOK_S)

    def engine_at_work(self, name: str) -> str | None:
        for entry in self.storage.list_dir(""):
            found = parse_hidden(entry)
            if found is not None and found.name == name and found.kind == "incomplete":
                holder = lease_holder(self.storage.path(hidden_name(name, found.attempt, found.kind)))
                if holder is not None:
                    return holder
        return None


class _Trial(_Real):
    """One that decides all the same, and changes nothing."""

    def run(self) -> RecoveryReport:
        _refuse(root_held_by(self.root), self.root)
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # of what it would have done it says that it has
        try:
            return self.settle(Overlay(self.storage), lambda _: None)
        finally:
            logging.disable(before)

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[object]:
        path = self.storage.path(name)
        try:
            _refuse(path_held_by(path), path)
            self.wait_for_engines(name)
        except RootLocked as error:
            self.reasons[name] = str(error)
            raise
        yield None


def _refuse(holder: str | None, path: str) -> None:
    if holder is not None:
        message = f"{path} is locked by another writer: {holder}; what it has in work is its own to settle"
        raise RootLocked(message, path=path, by=holder)


def _remove(dir_fd: int, name: str) -> str | None:
    """None once it is gone, else why it could not be removed."""
    try:
        remove_tree_at(dir_fd, name)
    except OSError as error:
        return f"it could not be removed: {error.strerror}"
    return None


def _print(root: str, report: RecoveryReport, removed: list[str], left: dict[str, str], *, dry_run: bool) -> None:
    would = "would be " if dry_run else ""
    told = [
        *((name, f"{would}rolled forward: every rank had written its part") for name in report.rolled_forward),
        *((name, f"{would}given back its name after an interrupted overwrite") for name in report.restored),
        *((name, f"{would}removed") for name in removed),
    ]
    for name, what in told:
        typer.echo(f"{shown(name)}: {what}")
    for name, why in left.items():
        typer.echo(f"{shown(name)}: left as it is: {shown(why)}", err=True)
    if not told and not left:
        typer.echo(f"{shown(root)}: nothing was left behind")
