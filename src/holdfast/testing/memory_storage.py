"""Store files in memory and lose unsynced ones on demand, like a power cut. Torch-free, for tests.

Guarantees: implements `holdfast.storage.protocol.Storage`; changes of a directory are volatile until it is synced, and
`lose_unsynced` reverts a suffix of them, directory by directory, as a journal would; a rename between directories is
durable at once. File contents are durable when `write_file` returns, as its contract says. Thread-safe.
Does not: model a file system that reorders changes of one directory.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast.errors import RootLocked, StorageError
from holdfast.storage.leases import LeaseState, decode_record, encode_record, new_record
from holdfast.storage.local import RenamingStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from typing_extensions import Self

_PAUSE_S: Final = 0.01


class _File(bytes):
    """A file: a separate object for each, even with equal contents."""


class _Dir:
    """A directory: its entries now, and after each change since it was last synced, oldest first."""

    def __init__(self) -> None:
        self.entries: dict[str, _Dir | bytes] = {}
        self.history: list[dict[str, _Dir | bytes]] = [{}]

    def changed(self) -> None:
        self.history.append(dict(self.entries))

    def sync(self) -> None:
        self.history = [dict(self.entries)]


class _Lock:
    """A lock that is held until released."""

    def __init__(self, held: set[str], name: str) -> None:
        self._held, self._name = held, name
        self._released = False

    def renew(self) -> None:
        """Do nothing: the root is never replaced."""

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._held.discard(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Lease:
    """A lease whose holder lives, but sends no beats."""

    def __init__(self, storage: MemoryStorage, name: str, rank: int) -> None:
        self._storage, self._name = storage, name
        storage.write_file(name, encode_record(new_record(rank)))

    def stop(self, *, wait_s: float) -> None:
        del wait_s
        self._storage.unlink(self._name)


class MemoryStorage(RenamingStorage):
    """`holdfast.storage.protocol.Storage` in memory."""

    def __init__(self, root: str = "/memory", *, exchanges: bool = True) -> None:
        """exchanges: two entries can be exchanged, as on a local file system."""
        self._root_name = root
        self.exchanges = exchanges
        self._root = _Dir()
        self._lock = threading.RLock()
        self._locked: set[str] = set()
        """Locked names; ``""`` for the root."""

    @property
    def root(self) -> str:
        return self._root_name

    def path(self, name: str) -> str:
        return f"{self._root_name}/{name}" if name else self._root_name

    def make_root(self) -> None:
        """Do nothing: the root exists."""

    def target(self, directory: str) -> NoReturn:
        """Raise: no other process sees this memory."""
        self._refuse(directory, errno.EOPNOTSUPP)

    def hold_lease(self, directory: str, name: str, *, rank: int) -> _Lease:
        return _Lease(self, f"{directory}/{name}", rank)

    def observe_lease(self, directory: str, name: str) -> LeaseState | None:
        with self._lock:
            found = self._find(f"{directory}/{name}")
        return LeaseState(decode_record(found), 0, flock_free=None) if isinstance(found, bytes) else None

    def lock(self, *, timeout_s: float = 0.0, made_at: str = "") -> _Lock:
        return self._locked_as("", timeout_s, made_at)

    def lock_path(self, name: str, *, timeout_s: float = 0.0) -> _Lock:
        return self._locked_as(name, timeout_s)

    def sweep_locks(self) -> None:
        """Do nothing: locks end with this process."""

    def _locked_as(self, name: str, timeout_s: float, made_at: str = "") -> _Lock:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if name not in self._locked:
                    self._locked.add(name)
                    return _Lock(self._locked, name)
            if time.monotonic() >= deadline:
                path = self.path(name)
                raise RootLocked(f"{path} is locked by another writer {made_at}", path=path, by="this process")
            time.sleep(_PAUSE_S)

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
            parent.entries[last] = _File(data)
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
            if new_parent is not old_parent:  # one journal entry: it is never missing in both
                new_parent.changed()
                old_parent.sync()
                new_parent.sync()

    def exchange(self, first: str, second: str) -> bool:
        if not self.exchanges:
            return False
        with self._lock:
            parent, one = self._parent(first)
            other_parent, other = self._parent(second)
            for name, entries, last in ((first, parent.entries, one), (second, other_parent.entries, other)):
                if last not in entries:
                    self._refuse(name, errno.ENOENT)
            parent.entries[one], other_parent.entries[other] = other_parent.entries[other], parent.entries[one]
            parent.changed()
            if other_parent is not parent:
                other_parent.changed()
            return True

    def link(self, source: str, target: str) -> None:
        with self._lock:
            found = self._find(source)
            if isinstance(found, _Dir):
                self._refuse(source, errno.EPERM)
            parent, last = self._parent(target)
            if last in parent.entries:
                self._refuse(target, errno.EEXIST)
            parent.entries[last] = self._file(source)
            parent.changed()

    def same_file(self, first: str, second: str) -> bool:
        with self._lock:
            found = self._find(first)
            return found is not None and found is self._find(second)

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
