"""What Holdfast published, read where it lies on an object store.

Manifest and reports are objects like any other, so all that reads them does; data is read by ranges.

Guarantees: as `HoldfastSource`. What else lies below the same prefix, such as what an attempt that failed has left, is
nobody's business: listings are not looked at.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from holdfast.format.manifest import MANIFEST_NAME, decode_manifest
from holdfast.root import MAX_MANIFEST_BYTES
from holdfast.source import HoldfastSource
from holdfast.storage.object_files import ObjectFiles
from holdfast.storage.reading import GAP_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.format.manifest import Manifest
    from holdfast.storage.descriptors import StoredFile
    from holdfast.storage.object_storage import ObjectStorage
    from holdfast.storage.reading import Blame, FileSet


class ObjectSource(HoldfastSource):
    """What was published as ``name`` in ``storage``; make it by `open_object`."""

    def __init__(self, storage: ObjectStorage, name: str, manifest: Manifest) -> None:
        super().__init__(storage.path(name), step=manifest.step, world=manifest.world, manifest=manifest)
        self._storage = storage
        self.name = name

    def read_committed(self, name: str, nbytes: int) -> bytes:
        try:
            return bytes(self._storage.read_range(f"{self.name}/{name}", 0, nbytes + 1))
        except StorageError as error:
            if error.errno == errno.ENOENT:
                raise self._missing(name) from error
            raise

    def has_file(self, name: str) -> bool:
        return self._storage.size(f"{self.name}/{name}") is not None

    def _size_of(self, name: str) -> int:
        found = self._storage.size(f"{self.name}/{name}")
        if found is None:
            raise self._missing(name)
        return found

    def _missing(self, name: str) -> CheckpointCorrupt:
        path = self._storage.path(f"{self.name}/{name}")
        return CheckpointCorrupt(f"{path} is missing; it was committed with the checkpoint", path=path)

    def _opened_anew(self) -> HoldfastSource:
        return open_object(self._storage, self.name)

    def _unknown_entries(self) -> list[str]:
        return []

    def file_set(
        self,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        blame: Blame,
        direct: bool = False,
        gap_bytes_max: int = GAP_BYTES_MAX,
    ) -> FileSet:
        del direct  # there is no page cache to go around
        return ObjectFiles(self._storage, self.name, files, verify=verify, blame=blame, gap_bytes_max=gap_bytes_max)


def open_object(storage: ObjectStorage, name: str) -> ObjectSource:
    """What was published as ``name``. Raises `CheckpointNotFound` where there is no manifest, `CheckpointCorrupt`."""
    path = f"{name}/{MANIFEST_NAME}"
    try:
        data = storage.read_file(path, max_bytes=MAX_MANIFEST_BYTES)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        where = storage.path(path)
        raise CheckpointNotFound(f"{where} doesn't exist: there is no checkpoint here", path=where) from error
    return ObjectSource(storage, name, decode_manifest(data, path=storage.path(path)))
