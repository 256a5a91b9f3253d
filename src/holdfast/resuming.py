"""Resuming: which steps of a root to try, in which order, and what each is loaded as.

    candidates, as rank 0 sees them -> the newest first -> loaded on every rank, or the next older one -> its step

Guarantees: every rank tries the same steps in the same order. An older step is taken only where the newer one is
damaged, aloud, and never where one step was asked for.
Does not: read (``loader``), or say what counts as newest (``keeping``).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any, Final

from holdfast import events
from holdfast.arguments import checked_step
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, HoldfastError, StorageError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.loader import LoadOptions, is_corrupt, load_state
from holdfast.root import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.agreement import Votes
    from holdfast.config import CheckpointConfig
    from holdfast.group import Group
    from holdfast.keeping import Keeper
    from holdfast.state.tree import StateTree
    from holdfast.storage.local import LocalStorage

_log = logging.getLogger("holdfast")
_TOLD_MAX: Final = 8


class Resumer:
    """Restores ``tree`` from one root. ``on_resumed`` is told the step and its name, or None for both."""

    def __init__(
        self,
        tree: StateTree,
        storage: LocalStorage,
        keeper: Keeper,
        config: CheckpointConfig,
        on_resumed: Callable[[int | None, str | None], None],
    ) -> None:
        self._tree = tree
        self._storage = storage
        self._keeper = keeper
        self._config = config
        self._on_resumed = on_resumed

    def restore(self, step: int | None, group: Group, votes: Votes) -> int | None:
        """As `CheckpointManager.restore`; ``votes`` are those of ``group``, on this thread."""
        if step is None and self._config.load_step is not None and self._config.load_step >= 0:
            step = self._config.load_step
        if step is not None:
            checked_step(step)
        try:
            return self._restore_first(self._candidates(step, group, votes), step, group, votes)
        except CheckpointNotFound:
            if step is not None:
                raise
        # Read beside a writer, whose retention has taken it away since: its successor is there.
        return self._restore_first(self._candidates(step, group, votes), step, group, votes)

    def _restore_first(
        self, candidates: list[tuple[int, str]], step: int | None, group: Group, votes: Votes
    ) -> int | None:
        path = self._config.initial_load_path
        if not candidates:
            self._on_resumed(None, None)
            if path is not None:
                options = self._options(model_only=True, key_map=self._config.initial_key_map)
                load_state(self._tree, lambda: os.fspath(path), group, votes, options)
            return None
        failures: list[tuple[int, CheckpointCorrupt | StorageError]] = []
        for number, (found, name) in enumerate(candidates):
            try:
                model_only = self._config.load_model_only or found == 0 or not self._keeper.is_resumable(name)
                options = self._options(model_only=model_only)
                load_state(self._tree, functools.partial(self._path_of, found, name), group, votes, options)
            except (CheckpointCorrupt, StorageError) as error:
                failures.append((found, error))
                last = number == len(candidates) - 1
                if not is_corrupt(error) or self._config.on_corrupt == "raise" or step is not None:
                    raise
                if last and len(failures) > 1:
                    raise _none_left(self._storage.root, failures) from error
                if last:
                    raise
                older = candidates[number + 1][0]
                _log.error("step %d can't be loaded, falling back to step %d: %s", found, older, error)
                warnings.warn(f"step {found} can't be loaded, falling back to step {older}: {error}", stacklevel=4)
                events.emit("load.fallback", step=found, rank=group.rank, path=self._storage.path(name))
                continue
            self._on_resumed(found, name)
            return found
        raise AssertionError("the loop above returns or raises")

    def _path_of(self, step: int, name: str) -> str:
        """Where ``name`` is. Raises `CheckpointCorrupt` if it is of another step: not what the run would go on from.

        A seed is any run's: of step 0 only the model is loaded.
        """
        try:
            manifest = read_manifest(self._storage, name) if step else None
        except HoldfastError:
            manifest = None  # loading it will tell
        if manifest is not None and manifest.step not in (None, step):
            path = self._storage.path(f"{name}/{MANIFEST_NAME}")
            raise CheckpointCorrupt(
                f"{path} is of step {manifest.step}, expected step {step}: the directory was renamed, or exchanged "
                "with another; give it the name of its own step, or load it by its path",
                path=path,
            )
        return self._storage.path(name)

    def _candidates(self, step: int | None, group: Group, votes: Votes) -> list[tuple[int, str]]:
        """Steps to try, newest first, as rank 0 sees them; the same on every rank."""
        error: BaseException | None = None
        listing = b""
        if group.rank == 0:
            try:
                found = self._keeper.candidates(step)
                listing = json.dumps(found).encode()
            except (HoldfastError, OSError) as failed:
                error = failed
        listing = votes.share(listing, error, timeout_s=self._config.stage_timeout)
        return [(number, name) for number, name in json.loads(listing)]

    def _options(self, *, model_only: bool, key_map: Any = None) -> LoadOptions:
        return LoadOptions(
            model_only=model_only,
            key_map=key_map,
            exclude=self._config.exclude_from_loading,
            timeout_s=self._config.stage_timeout + self._config.persist_timeout,
        )


def _none_left(
    root: str, failures: Sequence[tuple[int, CheckpointCorrupt | StorageError]]
) -> CheckpointCorrupt | StorageError:
    """The error where every step is damaged: the last one's, which names what is wrong with each."""
    told = "; ".join(f"step {step}: {error}" for step, error in failures[:_TOLD_MAX])
    more = f"; and {len(failures) - _TOLD_MAX} more" if len(failures) > _TOLD_MAX else ""
    message = f"none of the {len(failures)} steps under {root} can be loaded: {told}{more}"
    last = failures[-1][1]
    if isinstance(last, CheckpointCorrupt):
        return CheckpointCorrupt(message, path=last.path, tensor=last.tensor, byte_range=last.byte_range)
    return StorageError(message, path=last.path, errno=last.errno)
