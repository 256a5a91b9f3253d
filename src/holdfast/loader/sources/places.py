"""Where sources read files from: `FilePlace`, and its form for directories. Torch-free.

A place is one directory, or what lies below one prefix of an object store (``object_store.ObjectPlace``). Names are
relative to it, with slashes.

Guarantees: nothing is written. What the system refuses is `StorageError`, a file that isn't one `CheckpointCorrupt`; an
absent file is None. A directory follows links only where it was told to.
Does not: verify. What is committed is compared with its checksums by those who read it.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound
from holdfast.storage.files import OpenedDirectory, open_plain, read_at, refused
from holdfast.storage.ranged_reads import GAP_BYTES_MAX, FileSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.storage.files import StoredFile
    from holdfast.storage.ranged_reads import Blame

READ_THREADS: Final = 4
"""More than two cores need: while one thread waits for the interpreter's lock, another reads."""


class FilePlace(Protocol):
    """The files below one directory or prefix, for reading. Thread-safe."""

    reads_at_a_time: int
    """How many small reads at a time are faster than one after the other."""

    @property
    def directory(self) -> str:
        """Its absolute path or URL."""
        ...

    @property
    def opened(self) -> OpenedDirectory | None:
        """The open directory that is read through, if any."""
        ...

    def has(self, name: str) -> bool:
        """Return True if ``name`` is a file."""
        ...

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the size in bytes of each file, None where there is none."""
        ...

    def read(self, name: str, start: int, end: int) -> tuple[bytes, int] | None:
        """Read bytes ``start`` to ``end``, fewer only at the end; also return the size. None where there is no file."""
        ...

    def read_whole(self, name: str, limit: int) -> bytes | None:
        """Read a file, and of one with more than ``limit`` bytes one byte more than that; None where there is none."""
        ...

    def file_set(
        self,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        blame: Blame,
        direct: bool = False,
        gap_bytes_max: int = GAP_BYTES_MAX,
    ) -> FileSet:
        """See `FileSet`; ``direct`` and ``gap_bytes_max`` are wishes."""
        ...


class DirectoryFiles:
    """`FilePlace` of a directory; ``links``: as in `open_plain`."""

    reads_at_a_time = READ_THREADS

    def __init__(self, directory: str | OpenedDirectory, *, links: bool = False) -> None:
        self._through = directory
        self._links = links

    @property
    def directory(self) -> str:
        return os.fspath(self._through)

    @property
    def opened(self) -> OpenedDirectory | None:
        return self._through if isinstance(self._through, OpenedDirectory) else None

    def has(self, name: str) -> bool:
        return os.path.isfile(os.path.join(self._through, name))

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        return {name: self._size(name) for name in names}

    def _size(self, name: str) -> int | None:
        opened = self.opened
        try:
            if opened is not None:
                return os.stat(name, dir_fd=opened.fd, follow_symlinks=self._links).st_size
            return os.stat(os.path.join(self._through, name), follow_symlinks=self._links).st_size
        except OSError:
            return None

    def read(self, name: str, start: int, end: int) -> tuple[bytes, int] | None:
        path = os.path.join(self._through, name)
        try:
            fd = open_plain(self._through, name, links=self._links)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise refused(path, error) from error
        try:
            size = os.fstat(fd).st_size
            return read_at(fd, start, max(0, min(end, size) - start)), size
        except OSError as error:
            raise refused(path, error) from error
        finally:
            os.close(fd)

    def read_whole(self, name: str, limit: int) -> bytes | None:
        found = self.read(name, 0, limit + 1)
        return None if found is None else found[0]

    def file_set(
        self,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        blame: Blame,
        direct: bool = False,
        gap_bytes_max: int = GAP_BYTES_MAX,
    ) -> FileSet:
        return FileSet(
            self._through,
            files,
            verify=verify,
            threads=READ_THREADS,
            blame=blame,
            direct=direct,
            gap_bytes_max=gap_bytes_max,
            links=self._links,
        )


def open_directory(path: str) -> OpenedDirectory:
    """The directory that is at ``path`` now. Raises `CheckpointNotFound`, `StorageError`."""
    try:
        return OpenedDirectory(path)
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{path} doesn't exist: there is no checkpoint here", path=path) from error
    except OSError as error:
        raise refused(path, error) from error


def read_small(directory: str | OpenedDirectory, name: str, *, limit: int, committed: bool = False) -> bytes:
    """A file of at most ``limit`` bytes, whole (one byte more, if there is more). Links are not followed."""
    found = DirectoryFiles(directory).read_whole(name, limit)
    if found is not None:
        return found
    path = os.path.join(directory, name)
    if committed:
        raise CheckpointCorrupt(f"{path} is missing; it was committed with the checkpoint", path=path)
    raise CheckpointNotFound(f"{path} doesn't exist: there is no checkpoint here", path=path)


def size_of(directory: OpenedDirectory, name: str) -> int:
    """The size of a committed file. Links are not followed."""
    path = os.path.join(directory, name)
    try:
        status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} is missing; it was committed with the checkpoint", path=path) from error
    except OSError as error:
        raise refused(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointCorrupt(f"{path} is not a plain file; checkpoints hold plain files", path=path)
    return status.st_size
