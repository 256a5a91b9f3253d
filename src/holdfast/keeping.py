"""What a root keeps, and what a run resumes from: retention and pins applied, candidates chosen. Torch-free.

Guarantees: the newest checkpoint a run could resume from is never deleted (``retention`` is pure and property-tested);
deleting makes a checkpoint invisible by one rename before a byte of it goes; directories of other writers are resumed
from and never deleted. Retention that fails never fails a save.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING

from holdfast import events
from holdfast.errors import CheckpointNotFound, HoldfastError
from holdfast.pins import Pins
from holdfast.retention import Entry, Keep, select_deletions
from holdfast.root import attempt_id, foreign_steps, hidden_name, published, read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")


class Keeper:
    """The checkpoints of one root, as rank 0 of its manager looks after them.

    ``remove`` is handed the trash, to be removed elsewhere.
    """

    def __init__(self, storage: Storage, name_template: str, keep: Keep | None) -> None:
        self._storage = storage
        self._template = name_template
        self._keep = keep

    def apply_retention(self, remove: Callable[[str], None]) -> None:
        """Delete what the policy no longer keeps; after every publish. Raises nothing: what fails is tried again."""
        if self._keep is None or self._keep.last is None:
            return
        try:
            entries = self._entries()
            doomed = set(select_deletions(list(entries.values()), self._keep))
            for name, entry in entries.items():
                if entry.step in doomed:
                    self._delete(name, entry.step, remove)
        except (HoldfastError, OSError) as error:
            _log.warning("retention under %s did not finish: %s", self._storage.root, error)

    def candidates(self, step: int | None) -> list[tuple[int, str]]:
        """(step, name) of what to resume from, best first; just ``step``, if one is asked for.

        A model-only save is not what a run resumes from: it has to be asked for. Raises `CheckpointNotFound` for a
        step that is absent.
        """
        storage, template = self._storage, self._template
        found = sorted(published(storage, template) + foreign_steps(storage, template))
        if step is not None:
            exact = [row for row in found if row[0] == step]
            if not exact:
                have = ", ".join(str(number) for number, _ in found) or "none"
                raise CheckpointNotFound(
                    f"step {step} is not published under {storage.root}; published steps: {have}",
                    path=storage.root,
                    step=step,
                )
            return exact
        resumable = [row for row in found if self.is_resumable(row[1])]
        if found and not resumable:
            _log.warning(
                "%s holds only models (newest: step %d), which a run can't resume from: it starts from scratch; "
                "restore(step=%d) loads the model",
                storage.root,
                found[-1][0],
                found[-1][0],
            )
        return resumable[::-1]

    def is_resumable(self, name: str) -> bool:
        """Whether ``name`` holds a whole state; a manifest that can't be read counts: loading it will tell."""
        try:
            manifest = read_manifest(self._storage, name)
        except HoldfastError:
            return True
        return manifest is None or manifest.resumable

    def _entries(self) -> dict[str, Entry]:
        pins = Pins(self._storage).all()
        entries = {}
        for step, name in published(self._storage, self._template):
            try:
                manifest = read_manifest(self._storage, name)
            except HoldfastError as error:
                _log.warning("retention leaves %s/%s alone: %s", self._storage.root, name, error)
                continue
            if manifest is None:
                continue
            entries[name] = Entry(
                step=step,
                created_s=datetime.fromisoformat(manifest.created).timestamp(),
                metrics=manifest.metrics,
                resumable=manifest.resumable,
                pinned=step in pins,
            )
        return entries

    def _delete(self, name: str, step: int, remove: Callable[[str], None]) -> None:
        """Invisible at once, by a rename; then removed at leisure."""
        trash = hidden_name(name, attempt_id(), "trash")
        self._storage.rename(name, trash)
        self._storage.sync_dir("")
        events.emit("checkpoint.deleted", step=step, rank=0, path=f"{self._storage.root}/{name}")
        remove(trash)
