"""Receiving versions from an object store: as from a directory, but for how one finds them, and keeps them.

A version of a `Publisher` is there with its manifest, the last of its objects. Of a checkpoint or an export that was
copied there, whose objects come in any order, the manifest may be the first: it counts once every object that manifest
and reports name is there. The newest is found by listing; one that is asked for is looked for by its name.

Guarantees: as ``directory_receiving``; every call of the store is bounded by the deadline, which is passed by a second
at most.
Assumes: retention keeps a version for as long as receivers take to read it: nobody can be told to wait. Of one that is
deleted while it is read nothing is committed; the next newer one is taken, or it is `CheckpointNotFound`.
Does not: see directories of stock DCP, whose moment of being whole is lost in a copy.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HoldfastError, StorageError
from holdfast.format.manifest import MANIFEST_NAME, report_name
from holdfast.format.safetensors_header import INDEX_NAME, WEIGHTS_NAME
from holdfast.hf_source import open_committed_hf
from holdfast.object_source import open_object
from holdfast.root import published_attempt, step_of
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import AGAIN, LAST_PAUSE_S
from holdfast.sync.transports.directory_receiving import DirectoryReceiving

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from holdfast.object_source import ObjectSource
    from holdfast.source import Source
    from holdfast.storage.object_store import ObjectStore
    from holdfast.sync.deadline import Deadline
    from holdfast.sync.seam import Destination


class ObjectReceiving(DirectoryReceiving):
    """The receiving half of an object store."""

    first_look_s = 0.1  # a look costs requests

    def __init__(self, store: ObjectStore, name_template: str, prefix: str | None, key_map: Any) -> None:
        self._objects = ObjectStorage(store)
        super().__init__(self._objects, name_template, prefix, key_map)
        self._lacking: dict[str, str] = {}
        """Of what is not whole, an object that it lacks."""
        self._attempt = ""
        """Of what is being read."""

    def receive(self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline) -> int:
        """As `Receiving.receive`; the store is asked at once even if no time is left."""
        self._objects.until(deadline.ends_s)
        try:
            return super().receive(destination, version, newer_than, deadline)
        except StorageError as error:
            if error.errno in AGAIN and deadline.left_s() <= LAST_PAUSE_S:
                raise deadline.exceeded(f"receiving from {self._objects.root}", str(error)) from error
            raise

    # Which. ------------------------------------------------------------------------------------------------------

    def _rows(self, above: int | None = None) -> list[tuple[int, str]]:
        rows = []
        for name in self._objects.list_dir(""):
            step = step_of(name, self._template)
            if step is not None and (above is None or step > above) and self._is_whole(name):
                rows.append((step, name))
        return sorted(rows)

    def _name_of(self, version: int) -> str | None:
        name = self._template.format(step=version)
        return name if self._is_whole(name) else None

    def _is_whole(self, name: str) -> bool:
        self._lacking.pop(name, None)
        try:
            source = open_object(self._objects, name)
            manifest = source.manifest
            if manifest.reports[0].name == report_name(0, manifest.attempt):
                return True  # its manifest was put last
            lacking = self._lacked(source)
        except CheckpointNotFound:
            return False
        except StorageError:
            raise
        except HoldfastError:
            return True  # what can't be read is to be missed aloud
        if lacking is not None:
            self._lacking[name] = lacking
        return lacking is None

    def _lacked(self, source: ObjectSource) -> str | None:
        """An object that a copy lacks, None if it is whole."""
        manifest = source.manifest
        listed = {row.name for row in self._objects.list_tree(source.name)}
        small = [*(line.name for line in manifest.reports), *(file.name for file in manifest.files)]
        for name in small:
            if name not in listed and not source.has_file(name):
                return name
        return next((name for name in source.files if name not in listed and not source.has_file(name)), None)

    def _unfinished(self) -> str:
        return "".join(f"; {name} is not whole, it lacks {lacking}" for name, lacking in sorted(self._lacking.items()))

    # How. --------------------------------------------------------------------------------------------------------

    def _held(self, name: str) -> AbstractContextManager[None]:
        del name
        return contextlib.nullcontext()

    def _open(self, name: str) -> Source:
        source = open_object(self._objects, name)
        self._attempt = source.manifest.attempt
        if source.manifest.kind == "checkpoint":
            return source
        if source.has_file(WEIGHTS_NAME) or source.has_file(INDEX_NAME):
            return open_committed_hf(source)
        raise ConfigError(
            f"{source.directory} is an export without a model that could be loaded, such as an adapter", field="root"
        )

    def _take(self, destination: Destination, version: int, name: str) -> None:
        self._attempt = ""
        try:
            super()._take(destination, version, name)
        except (CheckpointCorrupt, StorageError) as error:
            if not self._attempt or published_attempt(self._objects, name) == self._attempt:
                raise
            path = self._objects.path(f"{name}/{MANIFEST_NAME}")
            raise CheckpointNotFound(
                f"version {version} was deleted while it was read, as {path} says, which is gone; take a newer one, "
                "or have the publisher pin it or keep more versions",
                path=path,
                step=version,
            ) from error
