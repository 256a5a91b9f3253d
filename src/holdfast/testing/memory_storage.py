"""A storage in memory that can lose what was not fsynced, as a power cut does. Torch-free, for tests.

Guarantees: keeps `holdfast.storage.protocol.Storage`; changes of a directory are volatile until it is synced, and
`lose_unsynced` takes back a suffix of them, directory by directory, as a journal would. File contents are durable when
`write_file` returns, as its contract says.
Does not: model a file system that reorders changes of one directory. Any thread may call anything.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, NoReturn

from holdfast.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


class _Dir:
    """A directory: its entries now, and what it held after each change since it was last synced, oldest first."""

    def __init__(self) -> None:
        self.entries: dict[str, _Dir | bytes] = {}
        self.history: list[dict[str, _Dir | bytes]] = [{}]

    def changed(self) -> None:
        self.history.append(dict(self.entries))

    def sync(self) -> None:
        self.history = [dict(self.entries)]


class MemoryStorage:
    """`holdfast.storage.protocol.Storage` in memory."""

    def __init__(self, root: str = "/memory") -> None:
        self._root_name = root
        self._root = _Dir()
        self._lock = threading.RLock()

    @property
    def root(self) -> str:
        return self._root_name

    def lose_unsynced(self, keep: Callable[[int], int]) -> None:
        """Cut the power: each directory keeps the first ``keep(n)`` (0 to n) of its ``n`` changes since its sync."""
        with self._lock:
            pending = [self._root]
            while pending:
                directory = pending.pop()
                kept = keep(len(directory.history) - 1)
                directory.entries = dict(directory.history[kept])
                directory.sync()
                pending.extend(entry for entry in directory.entries.values() if isinstance(entry, _Dir))

    def overwrite_byte(self, name: str, offset: int, value: int) -> None:
        """Damage a file."""
        with self._lock:
            parent, last = self._parent(name)
            data = bytearray(self._file(name))
            data[offset] = value
            parent.entries[last] = bytes(data)
            parent.changed()
            parent.sync()

    def make_dir(self, name: str) -> None:
        with self._lock:
            parent, last = self._parent(name)
            if last in parent.entries:
                self._refuse(name, errno.EEXIST)
            parent.entries[last] = _Dir()
            parent.changed()
            parent.sync()

    def write_file(self, name: str, data: bytes) -> None:
        with self._lock:
            parent, last = self._parent(name)
            if last in parent.entries:
                self._refuse(name, errno.EEXIST)
            parent.entries[last] = bytes(data)
            parent.changed()

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        with self._lock:
            data = self._file(name)
            if len(data) > max_bytes:
                self._refuse(name, errno.EFBIG)
            return data

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        with self._lock:
            return self._file(name)[offset : offset + nbytes]

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        with self._lock:
            data = self._file(name)
        for start in range(0, len(data), nbytes):
            yield data[start : start + nbytes]

    def size(self, name: str) -> int | None:
        with self._lock:
            found = self._find(name)
            return len(found) if isinstance(found, bytes) else None

    def exists(self, name: str) -> bool:
        with self._lock:
            return self._find(name) is not None

    def list_dir(self, name: str) -> list[str]:
        with self._lock:
            found = self._find(name)
            if isinstance(found, bytes):
                self._refuse(name, errno.ENOTDIR)
            return sorted(found.entries) if found is not None else []

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            old_parent, old = self._parent(source)
            new_parent, new = self._parent(target)
            if old not in old_parent.entries:
                self._refuse(source, errno.ENOENT)
            moved, there = old_parent.entries[old], new_parent.entries.get(new)
            if isinstance(moved, _Dir) and isinstance(there, bytes):
                self._refuse(target, errno.ENOTDIR)
            if isinstance(there, _Dir) and (there.entries or not isinstance(moved, _Dir)):
                self._refuse(target, errno.ENOTEMPTY if isinstance(moved, _Dir) else errno.EISDIR)
            del old_parent.entries[old]
            new_parent.entries[new] = moved
            old_parent.changed()
            if new_parent is not old_parent:
                new_parent.changed()

    def sync_dir(self, name: str) -> None:
        with self._lock:
            found = self._find(name)
            if not isinstance(found, _Dir):
                self._refuse(name, errno.ENOENT if found is None else errno.ENOTDIR)
            found.sync()

    def unlink(self, name: str) -> None:
        with self._lock:
            if self._find(name) is None:
                return
            parent, last = self._parent(name)
            if isinstance(parent.entries[last], _Dir):
                self._refuse(name, errno.EISDIR)
            del parent.entries[last]
            parent.changed()

    def remove_tree(self, name: str) -> None:
        with self._lock:
            if self._find(name) is None:
                return
            parent, last = self._parent(name)
            del parent.entries[last]
            parent.changed()

    def _find(self, name: str) -> _Dir | bytes | None:
        found: _Dir | bytes | None = self._root
        for part in name.split("/") if name else ():
            assert part not in {"", ".", ".."}, f"not a name below the root: {name!r}"
            if not isinstance(found, _Dir):
                return None
            found = found.entries.get(part)
        return found

    def _parent(self, name: str) -> tuple[_Dir, str]:
        head, _, last = name.rpartition("/")
        parent = self._find(head)
        if not isinstance(parent, _Dir):
            self._refuse(name, errno.ENOENT if parent is None else errno.ENOTDIR)
        return parent, last

    def _file(self, name: str) -> bytes:
        found = self._find(name)
        if not isinstance(found, bytes):
            self._refuse(name, errno.ENOENT if found is None else errno.EISDIR)
        return found

    def _refuse(self, name: str, code: int) -> NoReturn:
        path = f"{self._root_name}/{name}"
        raise StorageError(f"{path}: {os.strerror(code)}", path=path, errno=code)
