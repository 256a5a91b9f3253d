"""From a path to a `CheckpointSource`: who wrote what is there.

`PublishedExport` is one that was just published, and is opened only if somebody wants to know more of it than where.

Guarantees: opening reads only; a path that can't be a checkpoint is a `ConfigError`, one that isn't is
`CheckpointNotFound`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.catalog.catalog import Found, oldest_first
from holdfast.catalog.root import (
    MERGED_DIRECTORY,
    SPLIT_KEYS,
    STOCK_PLACES,
    foreign_steps,
    may_be_published,
    step_of,
)
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HoldfastError, StorageError
from holdfast.format.manifest import MANIFEST_NAME, METADATA_NAME, report_name
from holdfast.format.safetensors import INDEX_NAME, WEIGHTS_NAME
from holdfast.loader.sources.holdfast import CheckpointSource, HoldfastSource, open_holdfast
from holdfast.loader.sources.huggingface import has_committed_model, has_hf_model, open_committed_hf, open_hf
from holdfast.loader.sources.object_store import REQUESTS_AT_A_TIME, ObjectPlace, find_object
from holdfast.storage.entries import attempt_of, lost_manifest, no_manifest
from holdfast.storage.files import inode_of, wait_inode_between_renames
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.validation import is_store, located

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from holdfast.format.manifest import Manifest
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")

DEFAULT_TEMPLATE: Final = "step-{step}"

_PICKLED_MODELS: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class PublishedExport:
    """An export that ``attempt`` has just published in ``directory``; nothing of it has been read yet."""

    directory: str
    attempt: str
    step: int | None
    storage: Storage | None = None
    """Where ``directory`` is, unless its path or URL and the environment say that."""

    def open(self) -> CheckpointSource:
        """Its model; of what has none that Holdfast could load, such as an adapter, its files and checksums.

        Raises as `open_source`, and `CheckpointNotFound` if something else is there by now.
        """
        if not is_store(self.directory):
            return self._opened(exports=not has_hf_model(self.directory))
        whole = self._opened(exports=True)
        has_model = isinstance(whole, HoldfastSource) and has_committed_model(whole)
        return open_committed_hf(whole) if has_model and isinstance(whole, HoldfastSource) else whole

    def fresh(self) -> CheckpointSource:
        """Its files and checksums, to be verified; raises as `open`."""
        return self._opened(exports=True)

    @property
    def checksummed(self) -> bool:
        """Always True, as for any `CheckpointSource` that Holdfast published."""
        return True

    def _opened(self, *, exports: bool) -> CheckpointSource:
        source = open_source(self.directory, exports=exports, storage=self.storage)
        if source.manifest is None or source.manifest.attempt != self.attempt:
            raise CheckpointNotFound(
                f"{self.directory} was replaced since attempt {self.attempt} published it: open it again",
                path=self.directory,
                step=self.step,
            )
        return source


def open_source(path: str, *, exports: bool = False, storage: Storage | None = None) -> CheckpointSource:
    """The checkpoint at ``path``, or the model of a Hugging Face directory; of a manager's root, its newest step.

    path: of a directory, or a URL. exports: open an export as what its reports say of it: files and checksums, and no
    tensors. storage: one that ``path`` may be in, with its own options; else the environment has those of a store.
    What is being overwritten by two renames, and missing between them, is waited for. Raises `CheckpointNotFound`,
    `CheckpointCorrupt`, `StorageError`, `ConfigError` for a path that can't be one.
    """
    path = located(path)
    if is_store(path):
        return _open_on_store(_store_place(path, storage), exports=exports)
    before = inode_of(path)
    try:
        return _open_now(path, exports=exports)
    except CheckpointNotFound:
        if wait_inode_between_renames(path) in (None, before):
            raise
    return _open_now(path, exports=exports)


def _open_now(directory: str, *, exports: bool) -> CheckpointSource:
    if os.path.isfile(directory):
        raise ConfigError(f"{directory} is a file; a checkpoint is a directory", field="path")
    if os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
        source = open_holdfast(directory)
        if source.manifest.kind == "checkpoint" or exports:
            return resolved(source)
        return open_hf(directory) if has_hf_model(directory) else _as_asked(source, exports=False)
    if lost_manifest(open_storage(directory), ""):
        raise no_manifest(os.path.join(directory, MANIFEST_NAME))
    if any(os.path.isfile(os.path.join(directory, below, METADATA_NAME)) for below in STOCK_PLACES):
        # Here, since it brings in much of torch.distributed: half the time that importing Holdfast would take.
        from holdfast.loader.sources.stock_dcp import find_foreign

        foreign = find_foreign(directory)
        if os.path.lexists(os.path.join(directory, MANIFEST_NAME)):
            return _open_now(directory, exports=exports)  # published since the first look: it has `.metadata`, too
        if foreign:
            return foreign
    if has_hf_model(directory):
        return open_hf(directory)
    for retry in (True, False):
        found = newest_step(directory)
        if found is None:
            break
        try:
            return _open_now(os.path.join(directory, found.name), exports=False)
        except CheckpointNotFound:
            if not retry:  # a writer's retention has taken it away since: its successor is there
                raise
    metadata = os.path.join(directory, METADATA_NAME)
    if os.path.lexists(metadata) and not os.path.isfile(metadata):  # a file has come with an overwrite just now
        message = f"{metadata} is no plain file: what stock DCP wrote here was replaced; load another step"
        raise CheckpointCorrupt(message, path=metadata)
    raise _nothing_at(directory, _seen_instead(directory))


def resolved(source: HoldfastSource) -> CheckpointSource:
    """Return ``source``, or if it is a delta version, what that leads to. Raises as `open_chain`."""
    if not source.manifest.chain:
        return source
    from holdfast.loader.sources.chain import open_chain  # imports numpy

    return open_chain(source)


def _no_model(source: CheckpointSource) -> ConfigError:
    return ConfigError(
        f"{source.directory} is an export without a model that could be loaded, such as an adapter: "
        "load it with the program it was made for, or pass the checkpoint of step "
        f"{source.step}",
        field="path",
    )


def _nothing_at(directory: str, seen: str) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"no checkpoint at {directory}: it has neither {MANIFEST_NAME} nor {METADATA_NAME}, nor published steps below, "
        f"nor is it a Hugging Face model's ({WEIGHTS_NAME} or {INDEX_NAME}){seen}",
        path=directory,
    )


def _seen_instead(directory: str) -> str:
    if not os.path.isdir(directory):
        return " (it doesn't exist)"
    if any(os.path.lexists(os.path.join(directory, name)) for name in _PICKLED_MODELS):
        return "; it has a pickled one: convert that, by save_pretrained of a present transformers"
    return ""


def newest_step(root: str) -> Found | None:
    """The newest checkpoint below ``root``: Holdfast's under any name, stock DCP's under the default name template.

    One that can't be read is passed over, and said so in the log. Raises what is wrong with the newest if none can,
    but for what the system refuses: that may be anything.
    """
    storage = open_storage(root)
    ours = [(None, name) for name in storage.list_dir("") if may_be_published(name)]
    return _newest_readable(storage, oldest_first(storage, [*ours, *foreign_steps(storage, DEFAULT_TEMPLATE)]))


def _newest_readable(storage: Storage, rows: Iterable[Found]) -> Found | None:
    readable: list[Found] = []
    error: HoldfastError | None = None
    for row in rows:
        if row.error is None:
            readable.append(row)
        else:
            _log.warning("%s is passed over: %s", storage.path(row.name), row.error)
            error = error if isinstance(row.error, StorageError) else row.error
    if error is not None and not readable:
        raise error
    return readable[-1] if readable else None


# Object stores: a request for the manifest tells most; else one list, and one request for each name in it.


def _store_place(url: str, storage: Storage | None) -> ObjectPlace:
    """Return the objects at ``url``, by ``storage`` if they are below it."""
    if isinstance(storage, ObjectStorage) and (url == storage.root or url.startswith(f"{storage.root}/")):
        return ObjectPlace(storage, url[len(storage.root) + 1 :])
    found = open_storage(url)
    assert isinstance(found, ObjectStorage), "the URL of a store"
    return ObjectPlace(found)


def _open_on_store(place: ObjectPlace, *, exports: bool) -> CheckpointSource:
    source = find_object(place.storage, place.name)
    if source is not None:
        return _as_asked(source, exports=exports)
    entries = place.storage.list_dir(place.name)
    if report_name(0) in entries:
        raise no_manifest(place.path_of(MANIFEST_NAME))
    seen = "" if entries else " (there are no objects)"
    if any(entry.endswith(".report") and attempt_of(entry) for entry in entries):
        # Whatever else is here, `.metadata` or an index, is not what others wrote.
        seen = "; what is there is of saves that were not published, or of one that is being deleted"
        raise _nothing_at(place.directory, seen)
    foreign = _stock_on_store(place, entries)
    if foreign is not None:
        return foreign
    if WEIGHTS_NAME in entries or INDEX_NAME in entries:
        return open_hf(place)
    newest = _newest_on_store(place, entries)
    if newest is not None:
        return newest
    if any(name in entries for name in _PICKLED_MODELS):
        seen = "; it has a pickled one: convert that, by save_pretrained of a present transformers"
    raise _nothing_at(place.directory, seen)


def _as_asked(source: HoldfastSource, *, exports: bool) -> CheckpointSource:
    if exports or source.manifest.kind == "checkpoint":
        return resolved(source)
    if not has_committed_model(source):
        raise _no_model(source)
    return open_committed_hf(source)


def _stock_on_store(place: ObjectPlace, entries: Collection[str]) -> CheckpointSource | None:
    """Open what stock DCP wrote; asks only where ``entries`` are those of such a directory."""
    layouts = {("",): METADATA_NAME in entries, SPLIT_KEYS: {*SPLIT_KEYS} <= {*entries}}
    if not any(layouts.values()) and MERGED_DIRECTORY not in entries:
        return None
    from holdfast.loader.sources.stock_dcp import find_foreign

    found = find_foreign(place) if any(layouts.values()) else None
    if found is None and MERGED_DIRECTORY in entries:
        found = find_foreign(ObjectPlace(place.storage, place.key(MERGED_DIRECTORY)))
    return found


def _newest_on_store(place: ObjectPlace, entries: Iterable[str]) -> CheckpointSource | None:
    """Open the newest checkpoint below a root: as `newest_step`, by one request a name, several at a time.

    Every manifest is read, since which of two runs went on is written there, not in the numbers of the steps.
    """
    names = [name for name in entries if may_be_published(name)]
    read = {name: ObjectPlace(place.storage, place.key(name)) for name in names}
    sources: dict[str, HoldfastSource | None] = {}
    manifests: dict[str, Manifest | HoldfastError | None] = {}
    void: set[str] = set()

    def look(name: str) -> None:
        try:
            source = sources[name] = find_object(place.storage, read[name].name)
            manifests[name] = None if source is None else source.manifest
        except CheckpointNotFound:
            manifests[name] = sources[name] = None
            void.add(name)  # whatever else is left of it
        except (CheckpointCorrupt, ConfigError) as error:
            manifests[name] = error

    take_turns([partial(look, name) for name in sorted(names, reverse=True)], REQUESTS_AT_A_TIME)
    stock = [
        (step, name)
        for name in names
        if (step := step_of(name, DEFAULT_TEMPLATE)) is not None
        and name not in void
        and manifests[name] is None
        and read[name].has(METADATA_NAME)
    ]
    ours: list[tuple[int | None, str]] = [(None, name) for name in names if manifests[name] is not None]
    rows = oldest_first(place.storage, [*ours, *stock], manifests=manifests)
    while (newest := _newest_readable(place.storage, rows)) is not None:
        found = sources[newest.name]
        if found is not None:
            return resolved(found)
        try:
            return _open_on_store(read[newest.name], exports=False)
        except CheckpointNotFound:  # what has `.metadata` is being deleted
            rows.remove(newest)
    return None
