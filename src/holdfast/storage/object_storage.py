"""An object store as a tree of files, as far as it is one: what is read of a root works on both. Torch-free.

Guarantees: as `holdfast.storage.protocol.Storage` says of each method; an object is durable once it was answered for.
Assumes: a deadline was set by `until` before anything else is called, by the thread that uses it, or holds still.
Does not: have directories (any name may have something below it, and making or syncing one does nothing), or rename.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.storage.object_store import Listed, ObjectStore

DELETED_AT_A_TIME: Final = 1000


class ObjectStorage:
    """`holdfast.storage.protocol.Storage` below the URL of ``store``; every call ends by the moment of `until`."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.ends_s = time.monotonic()

    @property
    def root(self) -> str:
        return self.store.url

    def __repr__(self) -> str:
        return f"ObjectStorage({self.root!r})"

    def until(self, ends_s: float) -> None:
        """Calls from now on end by ``ends_s`` of the monotonic clock, or shortly after."""
        self.ends_s = ends_s

    def path(self, name: str) -> str:
        """The URL of ``name``."""
        return self.store.url_of(name)

    def make_dir(self, name: str) -> None:
        """There is nothing to make."""

    def write_file(self, name: str, data: bytes) -> None:
        if not self.store.create(name, data, ours=data.__eq__, ends_s=self.ends_s):
            path = self.path(name)
            raise StorageError(f"can't create {path}: it exists", path=path, errno=errno.EEXIST)

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        data, size = self.store.get(name, 0, max_bytes + 1, ends_s=self.ends_s)
        if size > max_bytes:
            path = self.path(name)
            raise StorageError(
                f"can't read {path}: it has {size} bytes, expected at most {max_bytes}; this is not an object of ours",
                path=path,
                errno=errno.EFBIG,
            )
        return bytes(data)

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        if not nbytes:
            return b""
        try:
            return bytes(self.store.get(name, offset, offset + nbytes, ends_s=self.ends_s)[0])
        except StorageError as error:
            if error.errno == errno.ERANGE:
                return b""
            raise

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        offset = 0
        while piece := self.read_range(name, offset, nbytes):
            yield piece
            offset += len(piece)

    def size(self, name: str) -> int | None:
        return self.store.size(name, ends_s=self.ends_s)

    def exists(self, name: str) -> bool:
        """Whether there is such an object, or any below."""
        return self.size(name) is not None or bool(self.list_dir(name))

    def list_dir(self, name: str) -> list[str]:
        return self.store.names(name, ends_s=self.ends_s)

    def list_tree(self, name: str) -> list[Listed]:
        """All objects below ``name``, as far as they are listed."""
        return self.store.objects(name, ends_s=self.ends_s)

    def rename(self, source: str, target: str) -> NoReturn:
        path = self.path(source)
        message = f"{path}: nothing is renamed on an object store, not to {target!r} either"
        raise StorageError(message, path=path, errno=errno.EOPNOTSUPP)

    def sync_dir(self, name: str) -> None:
        """What was answered for is durable."""

    def unlink(self, name: str) -> None:
        self.store.delete([name], ends_s=self.ends_s)

    def remove_tree(self, name: str) -> None:
        self.remove(name, [row.name for row in self.list_tree(name)])

    def remove(self, below: str, names: list[str]) -> None:
        """Remove objects below ``below``; absent ones are fine."""
        for start in range(0, len(names), DELETED_AT_A_TIME):
            some = [f"{below}/{name}" for name in names[start : start + DELETED_AT_A_TIME]]
            self.store.delete(some, ends_s=self.ends_s)
