"""The committed objects of one version, read by ranges. Torch-free.

A job is one request of up to 8 MiB: of what is hashed whole extents, of the rest from the first byte that is wanted to
the last, where no more than a gap lies between. More requests are under way than there are cores.

Guarantees: as `FileSet`: with checksums no byte reaches the caller unverified; an object that is missing or of another
size is `CheckpointCorrupt`. Memory beside the destinations: what the requests under way bring, and a scratch buffer a
thread.
Does not: map objects into memory.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast.errors import CheckpointCorrupt, StorageError
from holdfast.storage.cutting import JOB_BYTES, cut_for_jobs
from holdfast.storage.reading import FileSet
from holdfast.storage.turns import take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.storage.cutting import Piece
    from holdfast.storage.descriptors import StoredFile
    from holdfast.storage.object_storage import ObjectStorage
    from holdfast.storage.reading import Blame

REQUESTS_AT_A_TIME: Final = 8


class ObjectFiles(FileSet):
    """As `FileSet`, of the objects below ``directory`` in ``storage``."""

    def __init__(
        self,
        storage: ObjectStorage,
        directory: str,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        blame: Blame,
        gap_bytes_max: int,
    ) -> None:
        super().__init__(
            storage.path(directory),
            files,
            verify=verify,
            threads=REQUESTS_AT_A_TIME,
            blame=blame,
            gap_bytes_max=gap_bytes_max,
        )
        self._storage = storage
        self._below = directory
        self._required: set[str] = set()

    def require(self, name: str) -> None:
        """Raises unless the object is there with the size it was committed with; asks once."""
        if name in self._required:
            return
        file = self._file(name)
        found = self._storage.size(f"{self._below}/{name}")
        if found is None:
            self._raise_missing(file)
        self._check_size(file, found)
        self._required.add(name)

    def read(self, work: Iterable[Callable[[], None]]) -> None:
        take_turns(work, REQUESTS_AT_A_TIME)

    def jobs_for(self, name: str, pieces: Sequence[Piece]) -> list[Callable[[], None]]:
        file = self._file(name)
        groups = cut_for_jobs(pieces, hashed=self.is_hashed(name), gap_bytes_max=self.gap_bytes_max)
        return [self._job(file, group) for group in groups]

    def _job(self, file: StoredFile, pieces: Sequence[Piece]) -> Callable[[], None]:
        def job() -> None:
            base, stop = self._bounds(file, pieces[0].start, pieces[-1].end)
            found = self._fetch(file, base, stop)
            self._check(file, base, stop, [found])
            for start, memory in pieces:
                memory[:] = found[start - base : start - base + len(memory)]

        return job

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]]) -> memoryview:
        file = self._file(name)
        buffer = self._scratch_of(sum(end - start for start, end in runs))
        at = 0
        for start, end in runs:
            self._check_range(file, start, end)
            buffer[at : at + end - start] = self._fetch(file, start, end)
            at += end - start
        return buffer

    def _fill(self, file: StoredFile, offset: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            for at in range(0, len(part), JOB_BYTES):
                some = part[at : at + JOB_BYTES]
                some[:] = self._fetch(file, offset + at, offset + at + len(some))
            offset += len(part)

    def _fetch(self, file: StoredFile, start: int, end: int) -> memoryview:
        """Bytes of an object, as they are; of an object of another size it is an error."""
        if start == end:
            return memoryview(b"")
        try:
            found, size = self._storage.store.get(f"{self._below}/{file.name}", start, end, ends_s=self._storage.ends_s)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                self._raise_missing(file)
            if error.errno == errno.ERANGE:
                self._check_size(file, self._storage.size(f"{self._below}/{file.name}") or 0)
            raise
        self._check_size(file, size)
        if len(found) != end - start:
            path = self.path_of(file.name)
            raise CheckpointCorrupt(
                f"{path}: {end - start} bytes from {start} were asked for, {len(found)} came",
                path=path,
                byte_range=(start, end),
            )
        self.bytes_read += end - start
        return found

    def _check_size(self, file: StoredFile, found: int) -> None:
        if found != file.size:
            path = self.path_of(file.name)
            raise CheckpointCorrupt(
                f"{path} has {found} bytes; it was committed as an object of {file.size}",
                path=path,
                byte_range=(min(found, file.size), max(found, file.size)),
            )

    def _raise_missing(self, file: StoredFile) -> NoReturn:
        path = self.path_of(file.name)
        raise CheckpointCorrupt(f"{path} is missing; it was committed with {file.size} bytes", path=path)
