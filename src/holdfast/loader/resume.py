"""Resuming: which steps of a root to try, in which order, and what each is loaded as.

    candidates, as rank 0 sees them -> the newest first -> loaded on every rank, or the next older one -> its step

Guarantees: every rank tries the same steps in the same order. An older step is taken only where the newer one is
damaged, aloud, and never where one step was asked for. A run that starts from nothing although something under the root
looks like a checkpoint is told of it, on every rank.
With a mirror, each step is taken from the nearest verified copy of it: the newest over both roots comes first.
Does not: read (``loader``), or say what counts as newest (``catalog``).
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import events
from holdfast.catalog.catalog import TOLD_MAX
from holdfast.catalog.root import misnamed
from holdfast.catalog.tiers import Choice, Choices, CopyAt
from holdfast.catalog.tiers import outlook as tiers_outlook
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HoldfastError, StorageError
from holdfast.loader.loader import LoadOptions, is_corrupt, load_state
from holdfast.storage.entries import read_manifest
from holdfast.validation import checked_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.catalog.catalog import Catalog
    from holdfast.catalog.tiers import Tier
    from holdfast.config import CheckpointConfig
    from holdfast.coordination.group import Group
    from holdfast.coordination.votes import Votes
    from holdfast.state.tree import StateTree
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")


class Resumer:
    """Restores ``tree`` from one root.

    ``on_resumed`` is told the step that was loaded, None for none, the steps that hold only a model, and the attempt
    that saved what was loaded, empty if unknown.
    """

    def __init__(
        self,
        tree: StateTree,
        storage: Storage,
        keeper: Catalog,
        config: CheckpointConfig,
        on_resumed: Callable[[int | None, list[int], str], None],
        mirror: Tier | None = None,
    ) -> None:
        self._tree = tree
        self._storage = storage
        self._keeper = keeper
        self._config = config
        self._on_resumed = on_resumed
        self._mirror = mirror

    def restore(self, step: int | None, group: Group, votes: Votes) -> int | None:
        """Implement `CheckpointManager.restore`; ``votes`` are those of ``group``, on this thread."""
        if step is None and self._config.load_step is not None and self._config.load_step >= 0:
            step = self._config.load_step
        if step is not None:
            checked_step(step)
        try:
            return self._restore_first(self._outlook(step, votes), step, group, votes)
        except CheckpointNotFound:
            if step is not None:
                raise
        # Read beside a writer, whose retention has taken it away since: its successor is there.
        return self._restore_first(self._outlook(step, votes), step, group, votes)

    def _restore_first(self, outlook: Choices, step: int | None, group: Group, votes: Votes) -> int | None:
        candidates = outlook.choices
        path = self._config.initial_load_path
        if not candidates:
            self._say_what_is_unused(outlook)
            self._on_resumed(None, [*outlook.models, *outlook.exports], "")
            if path is not None:
                options = self._options(model_only=True, key_map=self._config.initial_key_map)
                load_state(self._tree, lambda: os.fspath(path), group, votes, options)
            return None
        failures: list[tuple[int, CheckpointCorrupt | StorageError]] = []
        for number, choice in enumerate(candidates):
            found = choice.step
            try:
                self._load(choice, group, votes)
            except (CheckpointCorrupt, StorageError) as error:
                failures.append((found, error))
                last = number == len(candidates) - 1
                if not is_corrupt(error) or self._config.on_corrupt == "raise" or step is not None:
                    raise
                if last and len(failures) > 1:
                    raise _none_left(self._storage.root, failures) from error
                if last:
                    raise
                older = candidates[number + 1].step
                _log.error("step %d can't be loaded, falling back to step %d: %s", found, older, error)
                warnings.warn(f"step {found} can't be loaded, falling back to step {older}: {error}", stacklevel=4)
                place = self._storage_of(choice.places[0])
                events.emit("load.fallback", step=found, rank=group.rank, path=place, error=repr(error))
                continue
            self._on_resumed(found, [*outlook.models, *outlook.exports], choice.origin)
            return found
        raise AssertionError("the loop above returns or raises")

    def _load(self, choice: Choice, group: Group, votes: Votes) -> None:
        """Load ``choice`` from its nearest copy that can be read; raises the error of the last one."""
        step = choice.step
        options = self._options(model_only=self._config.load_model_only or step == 0 or not choice.resumable)
        for place in choice.places:
            path = functools.partial(self._path_of, step, place)
            try:
                load_state(self._tree, path, group, votes, options, storage=self._holder_of(place))
            except (CheckpointCorrupt, StorageError, CheckpointNotFound) as error:
                if place == choice.places[-1] or not (is_corrupt(error) or isinstance(error, CheckpointNotFound)):
                    raise
                path_there = self._storage_of(choice.places[-1])
                message = f"step {step} can't be loaded, taking its copy at {path_there}: {error}"
                _log.error("%s", message)
                warnings.warn(message, stacklevel=5)
                events.emit("load.from_mirror", step=step, rank=group.rank, path=path_there)
            else:
                return

    def _storage_of(self, place: CopyAt) -> str:
        """Return the path or URL of ``place``."""
        return self._holder_of(place).path(place.name)

    def _holder_of(self, place: CopyAt) -> Storage:
        return self._storage if self._mirror is None or not place.in_mirror else self._mirror.storage

    def _say_what_is_unused(self, outlook: Choices) -> None:
        """Report entries that look like checkpoints when nothing is resumed from, as `on_corrupt` says."""
        root = self._storage.root
        if outlook.models:
            _log.warning(
                "%s holds only models (newest: step %d), which a run can't resume from: it starts from scratch; "
                "restore(step=%d) loads the model",
                root,
                outlook.models[-1],
                outlook.models[-1],
            )
        elif outlook.exports and self._config.initial_load_path is None:
            _log.warning(
                "%s holds only exports (newest: step %d), which a run can't resume from: it starts from scratch; "
                "initial_load_path takes the model from one",
                root,
                outlook.exports[-1],
            )
        if outlook.unusable:
            message = (
                f"{root} holds no checkpoint that this run could resume from, and yet what looks like one: "
                f"{_listed(outlook.unusable)}; use the name_template it was saved with, load it by its path, or, if it "
                "is of no use, move it away"
            )
            if self._config.on_corrupt == "raise":
                raise CheckpointCorrupt(message, path=root)
            message += ". The run starts from scratch"
            _log.error("%s", message)
            warnings.warn(message, stacklevel=5)

    def _path_of(self, step: int, place: CopyAt) -> str:
        """Return the path of ``place``. Raises `CheckpointCorrupt` if it holds another step than its name says.

        A checkpoint at ``initial_load_path`` may have any step: the run starts at step 0, and only the model is loaded.
        """
        name, storage = place.name, self._holder_of(place)
        try:
            manifest = read_manifest(storage, name) if step else None
        except HoldfastError:
            manifest = None  # loading it will tell
        error = None if manifest is None else misnamed(storage.path(name), manifest, step)
        if error is not None:
            raise error
        return storage.path(name)

    def _outlook(self, step: int | None, votes: Votes) -> Choices:
        """Return the candidates to resume from, as rank 0 sees them; the same on every rank."""

        def look() -> bytes:
            initial = self._config.initial_load_path
            return msgspec.json.encode(self._look(step, None if initial is None else os.fspath(initial)))

        found = msgspec.json.decode(votes.decide(look, timeout_s=self._config.stage_timeout), type=Choices)
        if found.diverged:
            self._say_diverged(found)
        return found

    def _say_diverged(self, found: Choices) -> None:
        """Report what the mirror has of other runs. Raises `ConfigError` if that would be the newest."""
        assert self._mirror is not None
        root = self._mirror.storage.root
        for step in found.diverged:
            events.emit("mirror.diverged", step=step, path=root)
        message = (
            f"what {root} has of {_steps(found.diverged)} was saved by another run than what is under "
            f"{self._storage.root}: neither is taken for the other, and neither is replaced"
        )
        _log.error("%s", message)
        if found.rivalry and self._config.on_corrupt != "local":
            raise ConfigError(found.rivalry, field="mirror")
        warnings.warn(message, stacklevel=6)

    def _look(self, step: int | None, besides: str | None) -> Choices:
        """Return the choices over the local root and its mirror; on rank 0."""
        if self._mirror is not None:
            root = self._mirror.storage.root
            try:
                there = self._mirror.found()
            except StorageError as error:
                message = f"the mirror {root} can't be asked for checkpoints: {error}"
                if self._config.on_corrupt != "local":
                    message += "; what is newest can't be told: try again, or choose on_corrupt='local'"
                    raise StorageError(message, path=root, errno=error.errno) from error
                _log.error("%s; only %s is looked at", message, self._storage.root)
                warnings.warn(f"{message}; only {self._storage.root} is looked at", stacklevel=6)
                events.emit("mirror.unreachable", path=root, error=repr(error))
            else:
                return tiers_outlook(self._keeper, there, root, step, besides=besides)
        found = self._keeper.outlook(step, besides=besides)
        rows = [
            # Without a step asked for, only what is resumable is a candidate.
            Choice(number, step is None or self._keeper.is_resumable(name), (CopyAt(False, name),))  # noqa: FBT003
            for number, name in found.candidates
        ]
        return Choices(rows, found.models, found.exports, found.unusable)

    def _options(self, *, model_only: bool, key_map: Any = None) -> LoadOptions:
        return LoadOptions(
            model_only=model_only,
            key_map=key_map,
            exclude=self._config.exclude_from_loading,
            timeout_s=self._config.stage_timeout + self._config.persist_timeout,
        )


def _steps(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:TOLD_MAX]))
    return f"step {listed}" + (f" and {len(numbers) - TOLD_MAX} more" if len(numbers) > TOLD_MAX else "")


def _listed(rows: Sequence[str]) -> str:
    return "; ".join(rows[:TOLD_MAX]) + (f"; and {len(rows) - TOLD_MAX} more" if len(rows) > TOLD_MAX else "")


def _none_left(
    root: str, failures: Sequence[tuple[int, CheckpointCorrupt | StorageError]]
) -> CheckpointCorrupt | StorageError:
    """The error where every step is damaged: the last one's, which names what is wrong with each."""
    told = _listed([f"step {step}: {error}" for step, error in failures])
    message = f"none of the {len(failures)} steps under {root} can be loaded: {told}"
    last = failures[-1][1]
    if isinstance(last, CheckpointCorrupt):
        return CheckpointCorrupt(message, path=last.path, tensor=last.tensor, byte_range=last.byte_range)
    return StorageError(message, path=last.path, errno=last.errno)
