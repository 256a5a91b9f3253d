"""What a root keeps, and what a run resumes from: retention and pins applied, candidates chosen. Torch-free.

Guarantees: the newest checkpoint a run could resume from is never deleted (``retention`` is pure and property-tested),
nor is one that is being loaded; deleting makes a checkpoint invisible by one rename before a byte of it goes;
directories of other writers are resumed from and never deleted nor replaced. Retention that fails never fails a save,
and what can't be deleted keeps nothing else from it.
Threads: any may call anything.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast import events
from holdfast.errors import CheckpointCorrupt, CheckpointExists, CheckpointNotFound, HoldfastError
from holdfast.lineage import Lineage, decode_lineage, in_order, lineage_from
from holdfast.pins import Pins
from holdfast.retention import Entry, Keep, select_deletions
from holdfast.root import (
    attempt_id,
    foreign_steps,
    hidden_name,
    is_occupied,
    published,
    published_attempt,
    read_manifest,
)
from holdfast.storage.reader_lease import to_be_deleted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from holdfast.format.manifest import Kind, Manifest
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint under a root, as it is to be looked at for resuming; ``error`` where its manifest can't be read.

    A stock directory, and one whose manifest can't be read, count as resumable: loading it will tell.
    """

    step: int
    name: str
    resumable: bool = True
    lineage: Lineage | None = None
    error: HoldfastError | None = None


def oldest_first(
    storage: Storage, rows: Iterable[tuple[int | None, str]], *, kind: Kind | None = "checkpoint"
) -> list[Found]:
    """``rows`` (step, name) of a root in the order of ``lineage``, the newest last; what has vanished is left out.

    And so is what isn't of this ``kind`` (None: any will do): nobody resumes from an export. For a step of None its
    manifest says which it is; what has none then is none.
    """
    found = []
    for known, name in rows:
        try:
            manifest = read_manifest(storage, name)
        except HoldfastError as error:
            found.append(Found(known or 0, name, error=error))
            continue
        if manifest is not None and kind not in (None, manifest.kind):
            continue
        step = manifest.step if known is None and manifest is not None else known
        if step is None:
            continue
        if manifest is not None:
            found.append(Found(step, name, manifest.resumable, decode_lineage(manifest.extra)))
        elif storage.exists(name):
            found.append(Found(step, name, lineage=Lineage()))
    # What can't be read counts as the last run's own: the newest is to be missed aloud.
    newest = max((row.lineage for row in found if row.lineage), key=lambda line: line.branch, default=Lineage())
    return in_order(found, lambda row: (row.step, row.lineage or newest))


class Keeper:
    """The checkpoints of one root, as rank 0 of its manager looks after them.

    ``held``: a step that retention leaves alone, beside those that are pinned. ``kind``: exports are kept by another
    one, and nothing of the other kind is looked at, whatever its name. The run starts from nothing until
    `resumed_from` says otherwise; what it resumed from stays until a successor is durable.
    """

    def __init__(
        self,
        storage: Storage,
        name_template: str,
        keep: Keep | None,
        *,
        held: int | None = None,
        kind: Kind = "checkpoint",
    ) -> None:
        self._storage = storage
        self._kind = kind
        self._template = name_template
        self._keep = keep
        self._held = held
        self._lock = threading.Lock()
        """Held from looking at pins to deleting, and by whoever changes them; guards all below."""
        self._entries_known: dict[str, tuple[str, Entry]] = {}
        """By name, with the attempt: what is published never changes, a name may get another one."""
        self._complained: set[str] = set()
        self._origin: int | None = None
        self._needed: int | None = None
        """What the run resumed from, until it has published something to resume from instead."""
        self._lineage: Lineage | None = None
        self._abandoned: set[int] = set()

    # What a run goes on from. ------------------------------------------------------------------------------------

    def candidates(self, step: int | None) -> list[tuple[int, str]]:
        """(step, name) of what to resume from, best first; just ``step``, if one is asked for.

        A model-only save is not what a run resumes from: it has to be asked for. Raises `CheckpointNotFound` for a
        step that is absent.
        """
        storage, template = self._storage, self._template
        rows = sorted(published(storage, template) + foreign_steps(storage, template))
        if step is not None:
            exact = [row for row in rows if row[0] == step and self._is_ours(row[1])]
            if not exact:
                have = ", ".join(str(number) for number, _ in rows) or "none"
                raise CheckpointNotFound(
                    f"step {step} is not published under {storage.root}; published steps: {have}",
                    path=storage.root,
                    step=step,
                )
            return exact
        found = self._in_order(rows)
        resumable = [(row.step, row.name) for row in found if row.resumable]
        if found and not resumable:
            _log.warning(
                "%s holds only models (newest: step %d), which a run can't resume from: it starts from scratch; "
                "restore(step=%d) loads the model",
                storage.root,
                found[-1].step,
                found[-1].step,
            )
        return resumable[::-1]

    def latest(self) -> int | None:
        """The newest published step, by the order of ``lineage``."""
        found = self._in_order(published(self._storage, self._template))
        return found[-1].step if found else None

    def newest_name(self, *, besides: str = "") -> str | None:
        """The name of the newest that can be read, by the order of ``lineage``, ``besides`` left out."""
        found = self._in_order(published(self._storage, self._template))
        return next((row.name for row in reversed(found) if row.error is None and row.name != besides), None)

    def _in_order(self, rows: Iterable[tuple[int, str]]) -> list[Found]:
        return oldest_first(self._storage, rows, kind=self._kind)

    def _is_ours(self, name: str) -> bool:
        """False for what is of another kind; what can't be read is ours: loading it will tell."""
        try:
            manifest = read_manifest(self._storage, name)
        except HoldfastError:
            return True
        return manifest is None or manifest.kind == self._kind

    def is_resumable(self, name: str) -> bool:
        """Whether ``name`` holds a whole state; a manifest that can't be read counts: loading it will tell."""
        try:
            manifest = read_manifest(self._storage, name)
        except HoldfastError:
            return True
        return manifest is None or manifest.resumable

    def resumed_from(self, step: int | None) -> None:
        """The state is that of ``step`` from now on (None: of none here)."""
        with self._lock:
            self._origin = step
            self._needed = step if self._kind == "checkpoint" else None
            self._lineage = None

    # What a run publishes. ---------------------------------------------------------------------------------------

    def place(self, step: int, name: str, in_flight: Collection[int]) -> tuple[dict[str, Any], bool]:
        """What the manifest of ``step`` is to say of its lineage, and whether it may replace what is at ``name``.

        It may replace a checkpoint of the same step that was left behind when the run went back, unless it is pinned
        or not Holdfast's: `CheckpointExists`. in_flight: steps that are being saved. Raises `StorageError`.
        """
        with self._lock:
            lineage = self._lineage or self._begin_lineage(step, in_flight)
            left_behind = step in self._abandoned and step not in in_flight
            return lineage.encode(), left_behind and self._may_replace(step, name)

    def note_published(self, step: int | None, name: str, extra: Mapping[str, Any], *, resumable: bool) -> bool:
        """``step`` was published now, with what `place` gave for its manifest; whether it is part of the run's course.

        It isn't if the run has gone back meanwhile.
        """
        with self._lock:
            self._entries_known.pop(name, None)
            if step is None or decode_lineage(extra) != self._lineage:
                return False
            self._abandoned.discard(step)
            self._needed = None if resumable else self._needed
            return True

    def may_shed(self, step: int) -> bool:
        """Whether ``step`` may be replaced by its model alone: not pinned, and another is there to resume from."""
        with self._lock:
            found = self._in_order(published(self._storage, self._template))
            others = [row for row in found if row.resumable and row.error is None and row.step != step]
            if others and step not in Pins(self._storage).all():
                return True
        why = "it is pinned" if others else "no other is left to resume from"
        _log.warning("step %d under %s stays whole, for %s", step, self._storage.root, why)
        return False

    def _begin_lineage(self, step: int, in_flight: Collection[int]) -> Lineage:
        found = self._in_order(published(self._storage, self._template))
        origin = step - 1 if self._origin is None else self._origin
        known = [(row.step, row.lineage) for row in found if row.lineage is not None]
        lineage = lineage_from(known, origin, in_flight)
        if self._origin is not None:
            self._abandoned = {row.step for row in found if row.step > origin}
            self._abandoned.update(flying for flying in in_flight if flying > origin)
        self._lineage = lineage
        return lineage

    def _may_replace(self, step: int, name: str) -> bool:
        storage = self._storage
        if not is_occupied(storage, name):
            return False
        path = f"{storage.root}/{name}"
        if step in Pins(storage).all():
            why = f"it is pinned; unpin({step}) to let it be replaced"
        else:
            try:
                manifest = read_manifest(storage, name)
            except CheckpointCorrupt:
                return True  # nobody can load it, and nobody else writes manifests
            if manifest is not None and (manifest.step, manifest.kind) == (step, self._kind):
                return True
            why = f"it is not a {self._kind} that Holdfast made of this step; move it away"
        raise CheckpointExists(f"step {step}: {path} was left behind, but is never replaced: {why}", path=path)

    # What goes. --------------------------------------------------------------------------------------------------

    def apply_retention(self, step: int | None, remove: Callable[[str], None]) -> None:
        """Delete what the policy no longer keeps; after ``step`` was published. Raises nothing: it is tried again.

        ``remove`` is handed the trash, to be removed elsewhere.
        """
        if self._keep is None or self._keep.last is None:
            return
        with self._lock:
            try:
                entries = self._entries()
            except (HoldfastError, OSError) as error:
                _log.warning("retention under %s did not finish: %s", self._storage.root, error)
                return
            doomed = set(select_deletions(list(entries.values()), self._keep, step))
            for name, entry in entries.items():
                if entry.step in doomed:
                    try:
                        self._delete(name, entry.step, remove)
                    except (HoldfastError, OSError) as error:
                        self._complain(name, "can't delete", error)

    def set_pin(self, step: int, *, pinned: bool) -> None:
        """Pin or unpin ``step``; durable when this returns. Raises `CheckpointNotFound` where it is not published."""
        with self._lock:
            storage = self._storage
            if pinned and step not in {found for found, _ in published(storage, self._template)}:
                raise CheckpointNotFound(
                    f"step {step} is not published under {storage.root}", path=storage.root, step=step
                )
            Pins(storage).set(step, pinned=pinned)

    def _entries(self) -> dict[str, Entry]:
        storage = self._storage
        pins = {*Pins(storage).all(), self._held, self._needed}
        entries = {}
        for step, name in published(storage, self._template):
            try:
                attempt = published_attempt(storage, name)
                known = self._entries_known.get(name)
                if known is not None and known[0] == attempt:
                    entries[name] = replace(known[1], pinned=step in pins)
                    continue
                manifest = read_manifest(storage, name)
                if manifest is None or attempt is None or manifest.kind != self._kind:
                    continue
                self._entries_known[name] = (attempt, _entry_of(step, manifest))
            except (HoldfastError, ValueError) as error:
                self._complain(name, "leaves alone", error)
                continue
            entries[name] = replace(self._entries_known[name][1], pinned=step in pins)
        for name in set(self._entries_known) - set(entries):
            del self._entries_known[name]
        return entries

    def _complain(self, name: str, what: str, error: Exception) -> None:
        if name not in self._complained:
            self._complained.add(name)
            _log.warning("retention %s %s/%s: %s", what, self._storage.root, name, error)

    def _delete(self, name: str, step: int, remove: Callable[[str], None]) -> None:
        """Invisible at once, by a rename; then removed at leisure. Not while it is being loaded: another time then."""
        trash = hidden_name(name, attempt_id(), "trash")
        with to_be_deleted(f"{self._storage.root}/{name}") as free:
            if not free:
                _log.info("step %d under %s stays for now, it is being loaded", step, self._storage.root)
                return
            self._storage.rename(name, trash)
        self._storage.sync_dir("")
        events.emit("checkpoint.deleted", step=step, rank=0, path=f"{self._storage.root}/{name}")
        remove(trash)


def _entry_of(step: int, manifest: Manifest) -> Entry:
    return Entry(
        step=step,
        created_s=datetime.fromisoformat(manifest.created).timestamp(),
        metrics=manifest.metrics,
        resumable=manifest.resumable,
        lineage=decode_lineage(manifest.extra),
    )
