"""Decide what a root keeps and what a run resumes from: apply retention and pins, choose candidates. Torch-free.

Guarantees: never deletes the newest checkpoint that a run could resume from (``retention`` is pure and property-tested)
or one that is being loaded; deletion starts with one rename that makes the checkpoint invisible; directories of other
writers can be resumed from, but are never deleted or replaced. A failing retention never fails a save, and an entry
that can't be deleted doesn't keep others from being deleted. Thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from holdfast import events
from holdfast.catalog.course import PARENT, Course, course_from, decode_course
from holdfast.catalog.retention import (
    CheckpointEntry,
    Keep,
    Lineage,
    decode_lineage,
    in_order,
    lineage_from,
    newest_of,
    select_deletions,
)
from holdfast.catalog.root import (
    ask_each,
    is_checkpoint,
    is_stock,
    may_be_published,
    misnamed,
    named_steps,
    published,
    refuse_occupied,
    step_of,
)
from holdfast.errors import CheckpointCorrupt, CheckpointExists, CheckpointNotFound, HoldfastError, StorageError
from holdfast.format.manifest import COPY_OF, OVERWROTE, decode_report, report_name
from holdfast.storage.entries import (
    MAX_REPORT_BYTES,
    attempt_id,
    is_occupied,
    published_attempt,
    read_manifest,
)
from holdfast.storage.locks import DIRECTORY
from holdfast.storage.protocol import AnswersRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from holdfast.catalog.course import OnCourse
    from holdfast.format.manifest import Kind, Manifest
    from holdfast.storage.protocol import Readable, Storage


# Pinned steps of a root: files ``.holdfast/pins/{step}``, durable, honoured by retention. Torch-free.

_PINS: Final = f"{DIRECTORY}/pins"


class Pins:
    """The pins of one root; written by rank 0 of the manager that holds the root's lock."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def all(self) -> frozenset[int]:
        """Return the pinned steps. Raises `StorageError`."""
        return frozenset(int(name) for name in self._storage.list_dir(_PINS) if name.isdecimal())

    def set(self, step: int, *, pinned: bool) -> None:
        """Pin or unpin ``step``, durably; no error if already done. Raises `StorageError`."""
        name = f"{_PINS}/{step}"
        if not pinned:
            self._storage.unlink(name)
        else:
            for directory in (DIRECTORY, _PINS):
                if not self._storage.exists(directory):
                    self._storage.make_dir(directory)
            try:
                self._storage.write_file(name, b"")
            except StorageError as error:
                if error.errno != errno.EEXIST:
                    raise
        if self._storage.exists(_PINS):
            self._storage.sync_dir(_PINS)


_log = logging.getLogger("holdfast")
TOLD_MAX: Final = 8
"""Maximum number of checkpoints that an error lists."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Candidates that a run may resume from in a root, as rank 0 sees it.

    candidates: (step, name), best first. models: steps that hold only a model. exports: steps whose place has something
    of another kind. unusable: if there is no candidate, entries that look like published checkpoints, each with the
    reason why it can't be used.
    """

    candidates: list[tuple[int, str]]
    models: list[int]
    exports: list[int]
    unusable: list[str]


@dataclass(frozen=True, slots=True)
class Found:
    """One checkpoint under a root, as a candidate for resuming; ``error`` if its manifest can't be read.

    A stock directory, and one with an unreadable manifest, count as resumable: loading reports what is wrong.
    """

    step: int
    name: str
    resumable: bool = True
    lineage: Lineage | None = None
    error: HoldfastError | None = None
    origin: str = ""
    """Attempt that saved it, which copies of it name too; empty if that can't be told."""
    course: Course = field(default_factory=Course)
    parent: str = ""
    """Attempt that it goes on from, as far as its manifest tells."""


def oldest_first(
    storage: Readable,
    rows: Iterable[tuple[int | None, str]],
    *,
    kind: Kind | None = "checkpoint",
    manifests: Mapping[str, Manifest | HoldfastError | None] | None = None,
    stock: bool = True,
) -> list[Found]:
    """``rows`` (step, name) of a root in the order of ``retention``, the newest last; each is looked at once.

    Leaves out what is no checkpoint, neither Holdfast's nor stock DCP's, and entries of another ``kind`` (None: keeps
    all): nobody resumes from an export. A step of None is read from the manifest; an entry without a step there is left
    out. manifests: those that were read before, by name, of all rows, or why one can't be read; nothing is asked of
    ``storage`` then. stock: False to leave out stock DCP's.
    """

    def look(row: tuple[int | None, str]) -> Found | None:
        known, name = row
        try:
            manifest = read_manifest(storage, name) if manifests is None else _given(manifests[name])
        except HoldfastError as error:
            origin = _attempt_told(storage, name) if manifests is None else ""
            return Found(known or 0, name, error=error, origin=origin)
        if manifest is not None and kind not in (None, manifest.kind):
            return None
        step = manifest.step if known is None and manifest is not None else known
        if step is None:
            return None
        if manifest is not None and (fault := misnamed(storage.path(name), manifest, step)) is not None:
            return Found(step, name, error=fault, origin=origin_of(manifest))
        if manifest is not None:
            lineage, origin = decode_lineage(manifest.extra), origin_of(manifest)
            course, parent = decode_course(manifest.extra, origin), str(manifest.extra.get(PARENT, ""))
            return Found(step, name, manifest.resumable, lineage, origin=origin, course=course, parent=parent)
        is_there = stock and (manifests is not None or is_stock(storage, name))
        return Found(step, name, lineage=Lineage()) if is_there else None

    found = [row for row in ask_each(storage, list(rows), look) if row is not None]
    # An unreadable checkpoint counts as the last run's: if the newest one is damaged, that must be reported.
    newest = newest_of(row.lineage for row in found if row.lineage)
    return in_order(found, lambda row: (row.step, row.lineage or newest))


def _given(manifest: Manifest | HoldfastError | None) -> Manifest | None:
    if isinstance(manifest, HoldfastError):
        raise manifest
    return manifest


class Catalog:
    """The checkpoints of one root, managed by rank 0 of its manager.

    ``held``: a step that retention spares, besides pinned ones. ``kind``: entries of another kind are ignored, whatever
    their names. The run starts from nothing until `resumed_from` is called; what it resumed from is kept until a
    successor is durable. ``alike``: nothing here is resumed from (exports, weight versions), so all entries are equal.
    """

    def __init__(
        self,
        storage: Storage,
        name_template: str,
        keep: Keep | None,
        *,
        held: int | None = None,
        kind: Kind = "checkpoint",
        alike: bool = False,
    ) -> None:
        self._storage = storage
        self._spare: Callable[[Mapping[str, CheckpointEntry], set[int]], set[int]] | None = None
        self._elsewhere: Callable[[], Collection[CheckpointEntry]] = tuple
        self._alike = alike
        self._kind = kind
        self._template = name_template
        self._keep = keep
        self._held = {held}
        self._lock = threading.Lock()
        """Held from reading pins to deleting, and while pins are changed; guards everything below."""
        self._entries_known: dict[str, tuple[str, CheckpointEntry]] = {}
        """Entries by name, each with its attempt: a published checkpoint never changes, but a name may be replaced."""
        self._complained: set[str] = set()
        self._origin: int | None = None
        self._parent = ""
        """Attempt that was restored from or published last; empty if unknown."""
        self._needed: int | None = None
        """Step that the run resumed from, until it has published a resumable step of its own."""
        self._lineage: Lineage | None = None
        self._course = Course()
        self._abandoned: set[int] = set()

    def heed(
        self,
        *,
        spare: Callable[[Mapping[str, CheckpointEntry], set[int]], set[int]],
        elsewhere: Callable[[], Collection[CheckpointEntry]],
    ) -> None:
        """Heed another root with copies. spare: of all entries by name and the steps to delete, returns which may go
        now. elsewhere: returns what is there.
        """
        self._spare, self._elsewhere = spare, elsewhere

    @property
    def root(self) -> str:
        return self._storage.root

    # Resuming. ---------------------------------------------------------------------------------------------------

    def candidates(self, step: int | None) -> list[tuple[int, str]]:
        """Return candidates (step, name) to resume from, best first; only ``step`` if it is given.

        A model-only save is a candidate only if ``step`` names it. Raises `CheckpointNotFound` for an absent step.
        """
        return self._candidates(self.found(), step)

    def _candidates(self, found: list[Found], step: int | None) -> list[tuple[int, str]]:
        if step is None:
            return [(row.step, row.name) for row in reversed(found) if row.resumable]
        exact = [(row.step, row.name) for row in found if row.step == step]
        if not exact:
            root = self._storage.root
            have = ", ".join(str(number) for number in sorted(row.step for row in found)) or "none"
            others = [] if found else self.unusable()
            also = f"; there is also {'; '.join(others[:TOLD_MAX])}" if others else ""
            message = f"step {step} is not published under {root}; published steps: {have}{also}"
            raise CheckpointNotFound(message, path=root, step=step)
        return exact

    def outlook(self, step: int | None, *, besides: str | None = None) -> Outlook:
        """Return `candidates`, with what else the ranks must know about the root.

        besides: a path that is not reported as unusable. Raises as `candidates`, and `StorageError`.
        """
        found, exports = self.found_beside_exports()
        candidates = self._candidates(found, step)
        models = [row.step for row in found if not row.resumable]
        return Outlook(candidates, models, exports, [] if candidates else self.unusable(besides=besides))

    def unusable(self, *, besides: str | None = None) -> list[str]:
        """List entries that look like published checkpoints but can't be resumed from, each with the reason.

        A run that finds nothing to resume from reports these: the root was used with another name template, or was
        damaged. Readable models and exports are not listed. Raises `StorageError` if the root can't be listed.
        """
        storage = self._storage
        found: list[str] = []
        if is_checkpoint(storage, "") or is_stock(storage, ""):
            found.append(f"{storage.root} (it is a checkpoint itself; load it by its path)")
        for hidden in storage.unsettled():
            if hidden.kind == "replaced" and not storage.exists(hidden.name):
                path = f"{storage.root}/{hidden.entry}"
                found.append(f"{path} (moved away by an interrupted overwrite; `holdfast recover` restores it)")
        for entry in storage.list_dir(""):
            path = f"{storage.root}/{entry}"
            if may_be_published(entry) and (besides is None or os.path.realpath(besides) != os.path.realpath(path)):
                why = self._why_unusable(entry)
                found += [] if why is None else [f"{path} ({why})"]
        return found

    def _why_unusable(self, entry: str) -> str | None:
        """Return why a run can't resume from ``entry``, or None if it does not look published."""
        storage, template = self._storage, self._template
        try:
            manifest = read_manifest(storage, entry)
            step = step_of(entry, template)
            if manifest is not None:
                other = manifest.kind == self._kind and step is None
                return f"of step {manifest.step}, but not named by {template!r}" if other else None
            if is_stock(storage, entry):
                return f"written by stock DCP, and not named by {template!r}" if step is None else None
            is_left = step is not None and is_occupied(storage, entry)
        except HoldfastError as error:
            return str(error)
        return "it has neither a manifest nor stock DCP's .metadata" if is_left else None

    def latest(self) -> int | None:
        """The newest published step, by the order of ``retention``."""
        found = self._found()
        return found[-1].step if found else None

    def newest_name(self, *, besides: str = "") -> str | None:
        """The name of the newest that can be read, by the order of ``retention``, ``besides`` left out."""
        found = self._found()
        return next((row.name for row in reversed(found) if row.error is None and row.name != besides), None)

    def found(self) -> list[Found]:
        """Return all checkpoints here, those of stock DCP too, the newest last. Raises `StorageError`."""
        return self._found(stock=True)

    def found_beside_exports(self) -> tuple[list[Found], list[int]]:
        """Return `found`, and the steps whose place has something of another kind that Holdfast made."""
        storage, rows = self._storage, named_steps(self._storage, self._template)
        found = oldest_first(storage, rows, kind=self._kind)
        known = {row.name for row in found}
        others = oldest_first(storage, [row for row in rows if row[1] not in known], kind=None, stock=False)
        return found, [row.step for row in others]

    def _found(self, *, stock: bool = False) -> list[Found]:
        rows = named_steps(self._storage, self._template)
        return oldest_first(self._storage, rows, kind=self._kind, stock=stock)

    def entries(self) -> dict[str, CheckpointEntry]:
        """Return what Holdfast has published here, by name; without what can't be read. Raises `StorageError`."""
        with self._lock:
            return self._entries()

    def is_resumable(self, name: str) -> bool:
        """Return True if ``name`` holds a complete state, or has an unreadable manifest, which the load will report."""
        try:
            manifest = read_manifest(self._storage, name)
        except HoldfastError:
            return True
        return manifest is None or manifest.resumable

    @contextlib.contextmanager
    def holding(self, step: int | None) -> Iterator[None]:
        """Keep retention from deleting ``step`` within this context, as it is about to be resumed from."""
        with self._lock:
            before, self._held = self._held, {*self._held, step}
        try:
            yield
        finally:
            with self._lock:
                self._held = before

    def resumed_from(self, step: int | None, attempt: str = "") -> None:
        """Note that the state is now that of ``step`` (None: of no step here), which ``attempt`` saved if given."""
        with self._lock:
            self._origin = step
            self._parent = attempt
            self._needed = step if self._kind == "checkpoint" else None
            self._lineage = None
            self._abandoned = set()

    # Publishing. -------------------------------------------------------------------------------------------------

    def place(
        self, step: int, name: str, in_flight: Collection[int], *, spare_models: bool = False
    ) -> tuple[dict[str, Any], bool]:
        """Return what to store of its past in the manifest of ``step``, and whether it may replace the entry ``name``.

        It may replace a checkpoint of the same step that was abandoned when the run went back. Raises
        `CheckpointExists` if that is pinned, not Holdfast's, or model-only and ``spare_models`` is set. in_flight:
        steps being saved. Raises `StorageError`.
        """
        with self._lock:
            lineage = self._lineage or self._begin_lineage(step, in_flight)
            left_behind = step in self._abandoned and step not in in_flight
            extra = lineage.encode()
            if self._kind == "checkpoint":
                extra |= self._course.encode()
            return extra, left_behind and self._may_replace(step, name, spare_models=spare_models)

    def parent(self) -> dict[str, str]:
        """Return what a manifest says of the parent of what is published next; call it after `place`."""
        with self._lock:
            return {PARENT: self._parent} if self._parent else {}

    def refuse_taken(self, step: int, name: str) -> None:
        """Raise `CheckpointExists` if the entry at ``name`` belongs to this run's history. Raises `StorageError`."""
        with self._lock:
            left_behind = step in self._abandoned
        if not left_behind and is_checkpoint(self._storage, name):
            advice = "save another step, or go back before it (restore(step=...), start_over()) to save it anew"
            refuse_occupied(self._storage, name, step=step, advice=advice)

    def note_published(
        self, step: int | None, name: str, extra: Mapping[str, Any], *, resumable: bool, attempt: str = ""
    ) -> bool:
        """Note that ``step`` was published with ``extra`` from `place`; return True if it belongs to the run's history.

        It doesn't if the run has gone back meanwhile.
        """
        with self._lock:
            self._entries_known.pop(name, None)
            if step is None or decode_lineage(extra) != self._lineage:
                return False
            self._abandoned.discard(step)
            self._parent = attempt or self._parent
            self._needed = None if resumable else self._needed
            return True

    def may_shed(self, step: int) -> bool:
        """Return True if ``step`` may be replaced by its model only: not pinned, and another resumable step exists."""
        with self._lock:
            found = self._found()
            others = [row for row in found if row.resumable and row.error is None and row.step != step]
            if others and step not in Pins(self._storage).all():
                return True
        why = "it is pinned" if others else "no other is left to resume from"
        _log.warning("step %d under %s stays whole, for %s", step, self._storage.root, why)
        return False

    def _begin_lineage(self, step: int, in_flight: Collection[int]) -> Lineage:
        # An unsettled attempt may be published by a later start: it belongs to what came before.
        in_flight = {*in_flight, *self._unsettled()}
        found = self._found()
        origin = step - 1 if self._origin is None else self._origin
        known = {row.step: row.lineage for row in found if row.lineage is not None}
        there = () if self._origin is None else self._elsewhere()  # else the run doesn't know of them either
        for entry in there:
            if entry.step not in known or (self._parent and entry.origin == self._parent):
                known[entry.step] = entry.lineage
        lineage = lineage_from(list(known.items()), origin, in_flight)
        self._begin_course(origin, found, there)
        if self._origin is not None:
            self._abandoned = {row.step for row in found if row.step > origin}
            self._abandoned.update(flying for flying in in_flight if flying > origin)
        self._lineage = lineage
        return lineage

    def _begin_course(self, origin: int, found: list[Found], there: Collection[CheckpointEntry]) -> None:
        """Begin a stretch: what is published from here on comes from step ``origin``, or if unknown the last before."""
        rows: list[OnCourse] = [*found, *there]
        here: list[OnCourse] = [
            row for row in found if row.step == origin or (self._origin is None and row.step < origin)
        ]
        start = next((row for row in rows if self._parent and row.origin == self._parent), None)
        start = start or (here[-1] if here else next((row for row in there if row.step == origin), None))
        self._course = course_from(attempt_id(), start, origin, found, there)
        if start is not None:
            self._parent = start.origin

    def _unsettled(self) -> list[int]:
        """Return the steps of attempts left by a crash or with an unknown outcome."""
        left = [found.name for found in self._storage.unsettled() if found.kind in ("incomplete", "recovering")]
        return [step for name in left if (step := step_of(name, self._template)) is not None]

    def _may_replace(self, step: int, name: str, *, spare_models: bool = False) -> bool:
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
                return True  # nobody can load it, and no other tool writes manifests
            if manifest is not None and (manifest.step, manifest.kind) == (step, self._kind):
                if manifest.resumable or not spare_models:
                    return True
                raise CheckpointExists(model_stays(step, path), path=path)
            why = f"it is not a {self._kind} that Holdfast made of this step; move it away"
        raise CheckpointExists(
            f"step {step}: {path} belongs to an abandoned part of the run, but is not replaced: {why}", path=path
        )

    # Deleting. ---------------------------------------------------------------------------------------------------

    def apply_retention(self, step: int | None, remove: Callable[[str], None]) -> None:
        """Delete what the policy no longer keeps, after ``step`` was published. Never raises: the next call retries.

        remove: called with the trash, to remove it elsewhere.
        """
        if self._keep is None or self._keep.last is None:
            return
        with self._lock:
            try:
                # By what is known, without pins: they only spare. What may go is decided by what is there now.
                known = self._entries(afresh=False) if isinstance(self._storage, AnswersRequests) else None
                if known is not None and not select_deletions([*known.values()], self._keep, step):
                    return
                entries = self._entries()
            except (HoldfastError, OSError) as error:
                _log.warning("retention under %s did not finish: %s", self._storage.root, error)
                return
            doomed = set(select_deletions(list(entries.values()), self._keep, step))
            if self._spare is not None and doomed:
                doomed = self._spare(entries, doomed)
            self._delete_all({name: entry for name, entry in entries.items() if entry.step in doomed}, remove)

    def _delete_all(self, doomed: Mapping[str, CheckpointEntry], remove: Callable[[str], None]) -> None:
        """Delete entries, each after the deltas to it: if this ends in between, none is there without its chain."""
        needed: set[str] = set()
        for name, entry in sorted(doomed.items(), key=lambda item: -len(item[1].needs)):
            try:
                gone = entry.origin not in needed and self._delete(name, entry.step, remove)
            except (HoldfastError, OSError) as error:
                self._complain(name, "can't delete", error)
                gone = False
            if not gone:
                needed.update(entry.needs)

    def set_pin(self, step: int, *, pinned: bool) -> None:
        """Pin or unpin ``step``, durably. Raises `CheckpointNotFound` if it is not published."""
        with self._lock:
            storage = self._storage
            if pinned and step not in {found for found, _ in published(storage, self._template)}:
                raise CheckpointNotFound(
                    f"step {step} is not published under {storage.root}", path=storage.root, step=step
                )
            Pins(storage).set(step, pinned=pinned)

    def _entries(self, *, afresh: bool = True) -> dict[str, CheckpointEntry]:
        """Return what is published, by name; afresh: False not to ask for pins, or again for what is known."""
        storage = self._storage
        pins = {*(Pins(storage).all() if afresh else ()), *self._held, self._needed}
        entries = {}

        def look(row: tuple[int, str]) -> tuple[str, CheckpointEntry] | Exception | None:
            step, name = row
            try:
                known = self._entries_known.get(name)
                if known is not None and (not afresh or known[0] == published_attempt(storage, name)):
                    return known
                manifest = read_manifest(storage, name)
                if manifest is None or manifest.kind != self._kind:
                    return None
                if (fault := misnamed(storage.path(name), manifest, step)) is not None:
                    return fault  # nobody resumes from it, so nothing may go for its sake
                return manifest.attempt, entry_of(step, manifest, alike=self._alike)
            except (HoldfastError, ValueError) as error:
                return error

        rows = named_steps(storage, self._template)
        for (step, name), found in zip(rows, ask_each(storage, rows, look), strict=True):
            if isinstance(found, Exception):
                self._complain(name, "leaves alone", found)
            elif found is not None:
                self._entries_known[name] = found
                entries[name] = replace(found[1], pinned=step in pins)
        for name in set(self._entries_known) - set(entries):
            del self._entries_known[name]
        return entries

    def _complain(self, name: str, what: str, error: Exception) -> None:
        if name not in self._complained:
            self._complained.add(name)
            _log.warning("retention %s %s/%s: %s", what, self._storage.root, name, error)

    def _delete(self, name: str, step: int, remove: Callable[[str], None]) -> bool:
        """Make a checkpoint invisible at once, and have it removed later; return False while it is being loaded."""
        trash = self._storage.hide(name)
        if trash is None:
            _log.info("step %d under %s stays for now, it is being loaded", step, self._storage.root)
            return False
        events.emit("checkpoint.deleted", step=step, rank=0, path=f"{self._storage.root}/{name}")
        for entry in trash:
            remove(entry)
        return True


def model_stays(step: int, path: str) -> str:
    """Return why ``step`` isn't saved at ``path``, which holds a model-only save or an export."""
    return (
        f"step {step} is not saved: {path} holds only a model, which an earlier run left and which may be the only "
        "copy of it: move it away to save this step (if it isn't an export, another last save, final=True, replaces it)"
    )


def entry_of(step: int, manifest: Manifest, *, alike: bool) -> CheckpointEntry:
    return CheckpointEntry(
        step=step,
        created_s=datetime.fromisoformat(manifest.created).timestamp(),
        metrics=manifest.metrics,
        resumable=alike or manifest.resumable,
        lineage=decode_lineage(manifest.extra),
        origin=origin_of(manifest),
        course=decode_course(manifest.extra, origin_of(manifest)),
        replaced=str(manifest.extra.get(OVERWROTE, "")),
        needs=tuple(member.attempt for member in manifest.chain),
    )


def origin_of(manifest: Manifest) -> str:
    """Return the attempt that saved what ``manifest`` is of: its own, or of a copy, that of what was copied."""
    found = manifest.extra.get(COPY_OF)
    return found if isinstance(found, str) and found else manifest.attempt


def _attempt_told(storage: Readable, name: str) -> str:
    """Return the attempt of a checkpoint whose manifest can't be read, as its head or its first report tells it."""
    try:
        if found := published_attempt(storage, name):
            return found
        path = f"{name}/{report_name(0)}"
        return decode_report(storage.read_file(path, max_bytes=MAX_REPORT_BYTES), path=storage.path(path)).attempt
    except HoldfastError:
        return ""
