"""A storage whose changes stay in memory, to show what a recovery would do to a root. Torch-free.

Guarantees: nothing below the root changes; reads see the effects of the calls before.
Assumes: entries of the root are renamed and removed as wholes, and files are made and renamed within one directory,
as the commit protocol and recovery do. A file that is linked or renamed to another directory is shown without its
bytes, which nobody reads there. For one thread at a time, except reads.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, NoReturn

from holdfast.errors import StorageError
from holdfast.storage.local import RenamingStorage

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.storage.leases import LeaseState
    from holdfast.storage.protocol import Storage


class Overlay(RenamingStorage):
    """`holdfast.storage.protocol.Storage` over another one, which is only read."""

    def __init__(self, base: Storage) -> None:
        self._base = base
        self._moved: dict[str, str | None] = {}
        """Changed entries of the root, each with the entry that really holds its content; None: removed."""
        self._written: dict[str, bytes | None] = {}
        """Changed files by name; None: removed."""

    @property
    def root(self) -> str:
        return self._base.root

    def _real(self, name: str) -> str | None:
        entry, slash, below = name.partition("/")
        real = self._moved.get(entry, entry)
        return None if real is None else f"{real}{slash}{below}"

    def make_dir(self, name: str) -> None:
        if self.exists(name):
            self._refuse(errno.EEXIST, name)
        self._written[f"{name}/"] = b""

    def write_file(self, name: str, data: bytes) -> None:
        if self.exists(name):
            self._refuse(errno.EEXIST, name)
        self._written[name] = data

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        data = self._written.get(name)
        if data is not None:
            return data
        return self._base.read_file(self._there(name), max_bytes=max_bytes)

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        data = self._written.get(name)
        if data is not None:
            return data[offset : offset + nbytes]
        return self._base.read_range(self._there(name), offset, nbytes)

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        return self._base.read_pieces(self._there(name), nbytes)

    def size(self, name: str) -> int | None:
        if name in self._written:
            data = self._written[name]
            return None if data is None else len(data)
        real = self._real(name)
        return None if real is None else self._base.size(real)

    def exists(self, name: str) -> bool:
        if name in self._written:
            return self._written[name] is not None
        real = self._real(name)
        return f"{name}/" in self._written or (real is not None and self._base.exists(real))

    def list_dir(self, name: str) -> list[str]:
        real = self._real(name) if name else ""
        found = set() if real is None else set(self._base.list_dir(real))
        if not name:
            found = {entry for entry in found if entry not in self._moved}
            found |= {entry for entry, there in self._moved.items() if there is not None}
        below = f"{name}/" if name else ""
        for written, data in self._written.items():
            directory, _, last = written.rstrip("/").rpartition("/")
            if f"{directory}/" == below or (not directory and not below):
                (found.discard if data is None else found.add)(last)
        return sorted(found)

    def rename(self, source: str, target: str) -> None:
        if not self.exists(source):
            self._refuse(errno.ENOENT, source)
        if source.rpartition("/")[0] != target.rpartition("/")[0]:
            self.link(source, target)
            self._written[source] = None
            return
        if "/" in source:
            self._written[target] = self.read_file(source, max_bytes=1 << 62)
            self._written[source] = None
            return
        if self.exists(target) and self.list_dir(target):
            self._refuse(errno.ENOTEMPTY, target)
        self._moved[target], self._moved[source] = self._real(source), None
        for written in [name for name in self._written if name.startswith(f"{source}/")]:
            self._written[target + written[len(source) :]] = self._written.pop(written)

    def exchange(self, first: str, second: str) -> bool:  # noqa: ARG002 - the protocol's signature
        """Return False: two renames have the same effect."""
        return False

    def link(self, source: str, target: str) -> None:
        if not self.exists(source):
            self._refuse(errno.ENOENT, source)
        self._written[target] = b""

    def same_file(self, first: str, second: str) -> bool:
        return first == second and self.exists(first)

    def sync_dir(self, name: str) -> None:
        """Do nothing: nothing is durable here."""

    def unlink(self, name: str) -> None:
        self._written[name] = None

    def remove_tree(self, name: str) -> None:
        self._moved[name] = None

    def path(self, name: str) -> str:
        return self._base.path(name)

    def make_root(self) -> None:
        """Do nothing."""

    def observe_lease(self, directory: str, name: str) -> LeaseState | None:
        return self._base.observe_lease(self._there(directory), name)

    def target(self, directory: str) -> NoReturn:
        self._refuse(errno.EROFS, directory)

    def hold_lease(self, directory: str, name: str, *, rank: int) -> NoReturn:  # noqa: ARG002 - the protocol's
        self._refuse(errno.EROFS, directory)

    def lock(self, *, timeout_s: float = 0.0, made_at: str = "") -> NoReturn:  # noqa: ARG002 - the protocol's
        self._refuse(errno.EROFS, "")

    def lock_path(self, name: str, *, timeout_s: float = 0.0) -> NoReturn:  # noqa: ARG002 - the protocol's
        self._refuse(errno.EROFS, name)

    def sweep_locks(self) -> None:
        """Do nothing."""

    def _there(self, name: str) -> str:
        real = self._real(name)
        if real is None or (name in self._written and self._written[name] is None):
            self._refuse(errno.ENOENT, name)
        return real

    def _refuse(self, code: int, name: str) -> NoReturn:
        path = f"{self.root}/{name}"
        raise StorageError(f"{path} can't be used: {errno.errorcode[code]}", path=path, errno=code)
