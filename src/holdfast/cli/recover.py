"""Implement ``holdfast recover``: settle interrupted saves, as the next start of a manager would. Torch-free.

Guarantees: refuses while a running save holds the root or a name below it, and names the holder; ``--dry-run`` decides
by the same code on the same bytes and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.catalog.listing import existing_directory, lease_holder
from holdfast.catalog.root import is_checkpoint
from holdfast.cli.output import AsJson, print_json, shown
from holdfast.commit.recovery import RecoveryReport
from holdfast.commit.recovery import recover as settle
from holdfast.engine.removal import remove_tree_at
from holdfast.errors import RootLocked, StorageError
from holdfast.storage.entries import HiddenEntry, hidden_name, parse_hidden
from holdfast.storage.leases import LEASE_PREFIX
from holdfast.storage.local import open_storage
from holdfast.storage.locks import DIRECTORY, path_held_by, root_held_by
from holdfast.storage.object_overlay import ObjectOverlay
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.overlay import Overlay
from holdfast.storage.protocol import WriterTarget
from holdfast.validation import is_store, located

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.storage.leases import LeaseState
    from holdfast.storage.protocol import Storage

_LOOK_S = 0.1
_STORE_GRACE_S = 5.0
"""How much longer a lease on a store is watched than one whose holder has ended stays unchanged."""


def recover(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory or URL of checkpoints, or of one save.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,  # noqa: FBT002
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for engines that are still at work.")] = 10.0,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Publish what is whole of the saves that a crash has interrupted, and remove the rest.

    Every manager does this when it starts. Exit status 1 where a live save holds the root, or something could not be
    settled.
    """
    root, only = _place(path, dry_run=dry_run)
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


def _place(path: str, *, dry_run: bool) -> tuple[str, str | None]:
    """The root, and the one name in it to settle, None for all: ``path`` may be what a single save goes to."""
    target = located(path)
    parent, name = os.path.split(target)
    if is_store(target):
        if target.count("/") < 3:
            return existing_directory(target), None
        storage = _storage(parent, dry_run=dry_run)
        only = is_checkpoint(storage, name) or any(found.name == name for found in storage.unsettled())
        return (parent, name) if only else (existing_directory(target), None)
    if name and os.path.isdir(parent):
        storage = open_storage(parent)
        hidden = [found for entry in storage.list_dir("") if (found := parse_hidden(entry)) and found.name == name]
        if is_checkpoint(storage, name) or (hidden and not os.path.isdir(target)):
            return parent, name
    return existing_directory(path), None


def _storage(root: str, *, dry_run: bool) -> Storage:
    """Open ``root``; for a dry run a store is only read, as looking for what is left would tidy up there."""
    storage = open_storage(root)
    return ObjectStorage(ObjectOverlay(storage.store)) if dry_run and isinstance(storage, ObjectStorage) else storage


class _Real:
    """A recovery of ``root``, or of the one name ``only`` in it, that takes place."""

    dry_run = False

    def __init__(self, root: str, only: str | None, wait_s: float) -> None:
        self.root = root
        self.only = only
        self.wait_s = wait_s
        self.storage = _storage(root, dry_run=self.dry_run)
        self.seen: dict[str, tuple[LeaseState, float]] = {}
        """Leases on a store, and since when each is unchanged."""
        self.reasons: dict[str, str] = {}
        """Why an entry was left unchanged, by name."""
        self.found = [found for found in self.storage.unsettled() if self.matches(found.name)]
        """Entries to settle."""

    def matches(self, name: str) -> bool:
        return self.only is None or name == self.only

    def as_found(self, entry: str) -> str:
        """The name under which what is ``entry`` now was found: on its way it gets others."""
        known = _parsed(entry)
        same = [before for before in self.found if before.entry == entry]
        if known is not None and not same:
            same = [before for before in self.found if (before.name, before.attempt) == (known.name, known.attempt)]
        return _shown_entry(same[0]) if same else entry if known is None else _shown_entry(known)

    def why_left(self, entry: str, report: RecoveryReport) -> str:
        found = _parsed(entry)
        return self.reasons.get(found.name if found else "") or report.why[entry]

    def run(self) -> RecoveryReport:
        trash: list[str] = []
        # A directory that no manager has used stays as it is; where one has, it may come back.
        is_root = self.only is None or self.storage.exists(DIRECTORY)
        with self.storage.lock() if is_root else contextlib.nullcontext():
            report = self.settle(self.storage, trash.append)
            kept = {name: why for name in trash if (why := remove_hidden(self.storage, name)) is not None}
        removed = tuple(name for name in report.removed if name not in kept)
        return RecoveryReport(
            report.rolled_forward, report.restored, removed, (*report.left, *kept), {**report.why, **kept}
        )

    def settle(self, storage: Storage, remove: Callable[[str], None]) -> RecoveryReport:
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
            with self.storage.lock_path(name) as lock:
                self.wait_for_engines(name)
                yield lock
        except RootLocked as error:
            self.reasons[name] = str(error)
            raise

    def wait_for_engines(self, name: str) -> None:
        wait_s = self.wait_s
        if isinstance(self.storage, ObjectStorage):  # only time tells whether its holder is alive
            wait_s = max(wait_s, self.storage.lease_quiet_s + _STORE_GRACE_S)
        deadline = time.monotonic() + wait_s
        while (holder := self.engine_at_work(name)) is not None:
            if time.monotonic() >= deadline:
                path = self.storage.path(name)
                raise RootLocked(
                    f"{path} is still being written by {holder} after {wait_s:g} s; try again when that has ended",
                    path=path,
                    by=holder,
                )
            time.sleep(_LOOK_S)

    def engine_at_work(self, name: str) -> str | None:
        if isinstance(self.storage, ObjectStorage):
            return self._lease_at_work(self.storage, name)
        for entry in self.storage.list_dir(""):
            found = parse_hidden(entry)
            if found is not None and found.name == name and found.kind == "incomplete":
                holder = lease_holder(self.storage.path(hidden_name(name, found.attempt, found.kind)))
                if holder is not None:
                    return holder
        return None

    def _lease_at_work(self, storage: ObjectStorage, name: str) -> str | None:
        """Return the holder of a lease on a store that may be alive: it was renewed a short time ago."""
        for found in storage.unsettled():
            if found.name != name or found.kind != "incomplete":
                continue
            for file in storage.list_dir(found.entry):
                seen = storage.observe_lease(found.entry, file) if file.startswith(LEASE_PREFIX) else None
                if seen is None or seen.flock_free:
                    continue
                before, since_s = self.seen.get(f"{found.entry}/{file}", (None, 0.0))
                if before != seen:
                    since_s = time.monotonic()
                    self.seen[f"{found.entry}/{file}"] = seen, since_s
                if time.monotonic() < since_s + storage.lease_quiet_s:
                    record = seen.record
                    return file if record is None else f"process {record.pid} on host {record.host}"
        return None


class _Trial(_Real):
    """One that decides all the same, and changes nothing."""

    dry_run = True

    def run(self) -> RecoveryReport:
        if isinstance(self.storage, ObjectStorage):
            trial: Storage = self.storage
        else:
            _refuse(root_held_by(self.root), self.root)
            trial = Overlay(self.storage)
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # of what it would have done it says that it has
        try:
            return self.settle(trial, lambda _: None)
        finally:
            logging.disable(before)

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[object]:
        path = self.storage.path(name)
        try:
            if not is_store(path):
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


def remove_hidden(storage: Storage, name: str) -> str | None:
    """Remove a hidden entry; return None once it is gone, else why it could not be removed."""
    try:
        target = storage.target("")
        if isinstance(target, WriterTarget):
            storage.remove_tree(name)
        else:
            with target:
                remove_tree_at(target.fd, name)
    except OSError as error:
        return f"it could not be removed: {error.strerror or error}"
    except StorageError as error:
        return f"it could not be removed: {error}"
    return None


def _parsed(entry: str) -> HiddenEntry | None:
    """Parse a hidden name, or the place of an attempt on a store."""
    name, is_place, attempt = entry.partition("//")
    return HiddenEntry(entry, name, attempt, "incomplete") if is_place else parse_hidden(entry)


def _shown_entry(found: HiddenEntry) -> str:
    """Return the name under which `holdfast ls` has it."""
    return hidden_name(found.name, found.attempt, found.kind) if "//" in found.entry else found.entry


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
