"""What the commit protocol needs of a place that keeps files. Torch-free.

Names are relative to the root the storage was opened on, with ``/`` between components; no component may be ``..``
or absolute. Every method raises `StorageError` (path, errno) for what the operating system refuses, and
`FileNotFoundError`/`FileExistsError` never leak: absence is asked for with `exists`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator


class Storage(Protocol):
    """A directory tree with atomic rename, seen by every rank."""

    @property
    def root(self) -> str:
        """For messages."""
        ...

    def make_dir(self, name: str) -> None:
        """Create one directory (parent must exist, ``name`` must not) and fsync its parent."""
        ...

    def write_file(self, name: str, data: bytes) -> None:
        """Create a file that must not exist, write it whole, fsync it (not its directory)."""
        ...

    def read_file(self, name: str, *, max_bytes: int) -> bytes:
        """The whole file; `StorageError` (EFBIG) if it is larger than ``max_bytes``."""
        ...

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        """``nbytes`` of a file from ``offset``, fewer only where it ends."""
        ...

    def read_pieces(self, name: str, nbytes: int) -> Generator[bytes, None, None]:
        """The whole file, ``nbytes`` at a time, the last piece being what is left; opened once. Close what isn't read.

        Raises `StorageError` while it is iterated.
        """
        ...

    def size(self, name: str) -> int | None:
        """Size of a regular file, None where there is none (links are not followed)."""
        ...

    def exists(self, name: str) -> bool: ...

    def list_dir(self, name: str) -> list[str]:
        """Entries of a directory, sorted; ``""`` is the root itself. An absent one has none, a link is none."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically rename; `StorageError` with ENOENT, EEXIST or ENOTEMPTY as the system says. Syncs nothing."""
        ...

    def sync_dir(self, name: str) -> None:
        """Make the directory's entries durable; ``""`` is the root."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a file; absent is fine."""
        ...

    def remove_tree(self, name: str) -> None:
        """Remove a directory with everything below it, never following links; absent is fine."""
        ...
