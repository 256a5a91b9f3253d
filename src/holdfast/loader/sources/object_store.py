"""Read checkpoints and other directories of files on an object store.

Manifest and reports are ordinary objects, read by the same code as files, several at a time; data is read by ranges. A
job is one request of up to 8 MiB: whole extents where they are hashed, else the wanted bytes with gaps up to
``gap_bytes_max`` between them. More requests are in flight than there are cores.

Guarantees: those of `HoldfastSource` and `FileSet`: with checksums no byte reaches the caller unverified; a missing
object, or one of another size, is `CheckpointCorrupt`, unless the manifest shows that the checkpoint was replaced or
deleted meanwhile. Other objects below the same prefix, such as those of a failed attempt, are ignored. No request asks
for a size that the answer to a read tells. An extent that several jobs want is fetched once, if they lie next to each
other. Memory used beside the destinations: the responses in flight, `EDGES_MAX` extents and one scratch buffer per
thread.
Does not: map objects into memory.
"""

from __future__ import annotations

import errno
import threading
import time
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NoReturn

from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointReplaced, ConfigError, StorageError
from holdfast.format.manifest import EXTENT_BYTES, MANIFEST_HEAD_BYTES, MANIFEST_NAME, attempt_in, void_in
from holdfast.loader.sources.holdfast import HoldfastSource, committed_manifest
from holdfast.storage.entries import MAX_MANIFEST_BYTES, below
from holdfast.storage.object_store import PATIENCE_S
from holdfast.storage.ranged_reads import (
    GAP_BYTES_MAX,
    JOB_BYTES,
    FileSet,
    copy_bytes,
    cut_for_jobs,
)

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from holdfast.format.manifest import Manifest
    from holdfast.storage.files import StoredFile
    from holdfast.storage.object_storage import ObjectStorage
    from holdfast.storage.ranged_reads import Blame, RangedRead

REQUESTS_AT_A_TIME: Final = 16
EXPECT_BYTES: Final = 64 << 20
"""Memory for more than this is taken only after the object's size was asked for."""
EDGES_MAX: Final = 32
"""Extents that are kept for the jobs next to the one that fetched them."""
LOOK_AGAIN_S: Final = 10.0
"""How long a reader that met an error asks for the manifest, to learn whether the checkpoint was replaced."""


class ObjectPlace:
    """`holdfast.loader.sources.places.FilePlace` of the objects below ``name`` in ``storage``."""

    reads_at_a_time = REQUESTS_AT_A_TIME
    opened: Final = None

    def __init__(self, storage: ObjectStorage, name: str = "") -> None:
        self.storage = storage
        self.name = name

    @property
    def directory(self) -> str:
        """Its URL."""
        return self.storage.path(self.name)

    def key(self, file: str) -> str:
        """Return the name of ``file`` in the storage."""
        return below(self.name, file)

    def path_of(self, file: str) -> str:
        """Return the URL of ``file``."""
        return self.storage.path(self.key(file))

    def listed(self) -> dict[str, int]:
        """List all objects with their sizes; the list may lag behind."""
        return {row.name: row.size for row in self.storage.list_tree(self.name)}

    def has(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None where there is none."""
        return self.storage.size(self.key(name))

    def sizes(self, names: Iterable[str]) -> dict[str, int | None]:
        listed = self.listed()
        return {name: listed[name] if name in listed else self.size(name) for name in names}

    def read(self, name: str, start: int, end: int, *, ends_s: float | None = None) -> tuple[bytes, int] | None:
        found = self.fetch(name, start, end, ends_s=ends_s)
        return None if found is None else (bytes(found[0]), found[1])

    def fetch(self, name: str, start: int, end: int, *, ends_s: float | None = None) -> tuple[memoryview, int] | None:
        """Read as `read`, without a copy."""
        try:
            return self.storage.store.get(
                self.key(name), start, end, ends_s=self.storage.ends_s if ends_s is None else ends_s
            )
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def read_whole(self, name: str, limit: int) -> bytes | None:
        """Read an object, and of one with more than ``limit`` bytes one byte more than that; None if absent."""
        found = self.fetch(name, 0, min(limit + 1, JOB_BYTES))
        if found is None:
            return None
        first, size = found
        wanted = min(size, limit + 1)
        if len(first) >= wanted:
            return bytes(first)
        whole = bytearray(wanted)
        memory = memoryview(whole)
        memory[: len(first)] = first

        def fill(start: int) -> None:
            part = memory[start : start + JOB_BYTES]
            found = self.fetch(name, start, start + len(part))
            if found is None or len(found[0]) != len(part):
                path = self.path_of(name)
                raise CheckpointCorrupt(f"{path} was replaced or removed while it was read", path=path)
            part[:] = found[0]

        take_turns([partial(fill, start) for start in range(len(first), wanted, JOB_BYTES)], REQUESTS_AT_A_TIME)
        return bytes(whole)

    def file_set(
        self,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        blame: Blame,
        direct: bool = False,
        gap_bytes_max: int = GAP_BYTES_MAX,
    ) -> FileSet:
        """Return its files; a gap up to `GAP_BYTES_MAX` is fetched along in any case: another request costs more."""
        del direct  # there is no page cache to go around
        return ObjectFiles(self, files, verify=verify, blame=blame, gap_bytes_max=max(gap_bytes_max, GAP_BYTES_MAX))


def open_object(storage: ObjectStorage, name: str) -> ObjectSource:
    """Open the checkpoint ``name`` (``""``: the one at the root).

    Raises `CheckpointNotFound` if there is no manifest, or a void; `CheckpointCorrupt`, `StorageError`.
    """
    found = find_object(storage, name)
    if found is None:
        where = storage.path(below(name, MANIFEST_NAME))
        raise CheckpointNotFound(f"{where} doesn't exist: there is no checkpoint here", path=where)
    return found


def find_object(storage: ObjectStorage, name: str) -> ObjectSource | None:
    """Open the checkpoint ``name``; None where there is no manifest. Raises as `open_object`. Sends one request."""
    place = ObjectPlace(storage, name)
    data = place.read_whole(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    if data is None:
        return None
    return ObjectSource(place, committed_manifest(data, path=place.path_of(MANIFEST_NAME)))


def published_object(storage: ObjectStorage, name: str, *, attempt: str, step: int | None, world: int) -> ObjectSource:
    """Return the checkpoint ``name`` that ``attempt`` has just published; nothing is read before it is used."""
    return ObjectSource(ObjectPlace(storage, name), attempt=attempt, step=step, world=world)


class ObjectSource(HoldfastSource):
    """A checkpoint published at ``place``; create it with `open_object` or `published_object`."""

    small_reads_at_a_time = REQUESTS_AT_A_TIME

    def __init__(
        self,
        place: ObjectPlace,
        manifest: Manifest | None = None,
        *,
        attempt: str = "",
        step: int | None = None,
        world: int = 0,
    ) -> None:
        """manifest: None to have it read, and compared with ``attempt``, when it is first asked for."""
        super().__init__(
            place.directory,
            step=step if manifest is None else manifest.step,
            world=world if manifest is None else manifest.world,
            manifest=manifest,
            attempt=attempt,
        )
        self._objects = place

    @property
    def place(self) -> ObjectPlace:
        """Where its objects are."""
        return self._objects

    @property
    def name(self) -> str:
        """Its name in the storage."""
        return self._objects.name

    @cached_property
    def manifest(self) -> Manifest:
        """The committed manifest."""
        found = self._opened_anew().manifest
        self.check_attempt(found.attempt)
        return found

    def what_became(self) -> CheckpointNotFound | None:
        try:
            found = self._objects.read(MANIFEST_NAME, 0, MANIFEST_HEAD_BYTES, ends_s=time.monotonic() + LOOK_AGAIN_S)
        except StorageError:
            return None
        head = b"" if found is None else found[0]
        if found is None or void_in(head) is not None:
            return CheckpointNotFound(
                f"{self.directory} was deleted while it was read (by its run's retention?); load a newer step, or pin "
                "this one first",
                path=self.directory,
                step=self.step,
            )
        now = attempt_in(head)
        if now in (None, self._attempt):
            return None
        return CheckpointReplaced(
            f"{self.directory} was replaced by another save while it was read: it holds attempt {now}, but attempt "
            f"{self._attempt} was opened; open or load it again",
            path=self.directory,
            step=self.step,
        )

    def read_committed(self, name: str, nbytes: int) -> bytes:
        data = self._objects.read_whole(name, nbytes)
        if data is None:
            raise self._missing(name)
        return data

    def has_file(self, name: str) -> bool:
        return self._objects.has(name)

    def _size_of(self, name: str) -> int:
        found = self._objects.size(name)
        if found is None:
            raise self._missing(name)
        return found

    def _missing(self, name: str) -> CheckpointCorrupt:
        path = self._objects.path_of(name)
        return CheckpointCorrupt(f"{path} is missing; it was committed with the checkpoint", path=path)

    def _opened_anew(self) -> HoldfastSource:
        return open_object(self._objects.storage, self.name)

    def _unknown_entries(self) -> list[str]:
        return []

    def has_entry(self, name: str) -> bool:
        return self._objects.has(name)

    def _read_added(self, name: str, nbytes: int) -> bytes | None:
        return self._objects.read_whole(name, nbytes)

    def _read_at(self, file: str, offset: int, nbytes: int) -> bytes | None:
        found = self._objects.read(file, offset, offset + nbytes)
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
        return self._objects.file_set(files, verify=verify, blame=blame, direct=direct, gap_bytes_max=gap_bytes_max)


class _Edge:
    """One extent that is being fetched, or was."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.data: bytes | None = None
        """Verified; None until it is there, or where fetching it failed."""


class _Edges:
    """Extents on the borders of jobs, so that neighbours on several threads fetch them once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Edge] = {}
        """By file and number of the extent, the least recently used first."""

    def claim(self, file: str, extents: Iterable[int]) -> tuple[dict[int, _Edge], dict[int, _Edge]]:
        """Return extents that the caller has to fetch and `settle`, and those that others fetch or have fetched."""
        mine: dict[int, _Edge] = {}
        others: dict[int, _Edge] = {}
        with self._lock:
            for extent in extents:
                edge = self._known.pop((file, extent), None)
                if edge is None:
                    edge = mine[extent] = _Edge()
                else:
                    others[extent] = edge
                self._known[file, extent] = edge
            while len(self._known) > EDGES_MAX:
                del self._known[next(iter(self._known))]
        return mine, others

    def settle(self, file: str, extent: int, edge: _Edge, data: bytes | None) -> None:
        """Pass ``data`` to those who wait for it; None if fetching it failed: they fetch it themselves."""
        edge.data = data
        edge.ready.set()
        if data is None:
            with self._lock:
                if self._known.get((file, extent)) is edge:
                    del self._known[file, extent]


class ObjectFiles(FileSet):
    """`FileSet` over the objects of ``place``."""

    spans_at_a_time = REQUESTS_AT_A_TIME

    def __init__(
        self,
        place: ObjectPlace,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        blame: Blame,
        gap_bytes_max: int,
    ) -> None:
        super().__init__(
            place.directory,
            files,
            verify=verify,
            threads=REQUESTS_AT_A_TIME,
            blame=blame,
            gap_bytes_max=gap_bytes_max,
        )
        self._place = place
        self._required: set[str] = set()
        self._edges = _Edges()
        self._counting = threading.Lock()

    def require(self, name: str) -> None:
        """Raise unless the object exists with its committed size; one request per object."""
        if name in self._required:
            return
        file = self._file(name)
        self._check_size(file, self._place.size(name))
        self._required.add(name)

    def expect(self, name: str, nbytes: int) -> None:
        """Call `require` if much memory depends on it; otherwise the first read tells as well."""
        if nbytes > EXPECT_BYTES:
            self.require(name)

    def read(self, work: Iterable[Callable[[], None]]) -> None:
        take_turns(work, REQUESTS_AT_A_TIME)

    def jobs_for(
        self, name: str, pieces: Sequence[RangedRead], others: Sequence[tuple[int, Callable[[], None]]] = ()
    ) -> list[Callable[[], None]]:
        """Return the jobs in the order of the file, so that what two of them want is wanted at about the same time."""
        file = self._file(name)
        groups = cut_for_jobs(pieces, hashed=self.is_hashed(name), gap_bytes_max=self.gap_bytes_max)
        jobs = [(group[0].start, self._job(file, group)) for group in groups]
        return [job for _, job in sorted([*jobs, *others], key=itemgetter(0))]

    def _job(self, file: StoredFile, pieces: Sequence[RangedRead]) -> Callable[[], None]:
        def job() -> None:
            start, end = pieces[0].start, pieces[-1].end
            base, stop = self._bounds(file, start, end)
            # What it wants whole, no neighbour wants a part of.
            segments = self._verified(file, base, stop, first=start > base, last=end < stop)
            for start, memory in pieces:
                _gather(memory, start, segments)

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

    def map(self, name: str) -> mmap.mmap:
        path = self.path_of(name)
        raise ConfigError(f"{path} can't be mapped: it is on an object store; read it", field="name")

    def _fill_checked(self, file: StoredFile, base: int, buffer: memoryview) -> None:
        def fill(at: int) -> None:
            part = buffer[at - base : at - base + JOB_BYTES]
            _gather(part, at, self._verified(file, at, at + len(part)))

        stop = base + len(buffer)
        # Every other part starts at an extent, as the first one does where there are any.
        starts = range(base, stop, JOB_BYTES)
        take_turns([partial(fill, at) for at in starts], REQUESTS_AT_A_TIME if len(starts) > 2 else 1)

    def _fill(self, file: StoredFile, offset: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            for at in range(0, len(part), JOB_BYTES):
                some = part[at : at + JOB_BYTES]
                copy_bytes(some, self._fetch(file, offset + at, offset + at + len(some)))
            offset += len(part)

    def _verified(
        self, file: StoredFile, base: int, stop: int, *, first: bool = True, last: bool = True
    ) -> list[tuple[int, memoryview]]:
        """Return bytes ``base`` to ``stop`` in segments, by offset; whole extents and verified where hashed.

        first, last: a neighbour may want that extent too, and may be fetching it at this moment.
        """
        if base == stop:
            return []
        if not self.is_hashed(file.name):
            return [(base, self._fetch(file, base, stop))]
        begins, ends = base // EXTENT_BYTES, (stop - 1) // EXTENT_BYTES
        shared = dict.fromkeys(([begins] if first else []) + ([ends] if last else []))
        mine, others = self._edges.claim(file.name, shared)
        start = min(stop, (begins + 1) * EXTENT_BYTES) if begins in others else base
        end = max(start, ends * EXTENT_BYTES) if ends in others else stop
        segments: list[tuple[int, memoryview]] = []
        try:
            if start < end:
                found = self._fetch(file, start, end)
                self._check(file, start, end, [found])
                segments.append((start, found))
        finally:
            for extent, edge in mine.items():
                at = extent * EXTENT_BYTES
                data = bytes(segments[0][1][at - start : at - start + EXTENT_BYTES]) if segments else None
                self._edges.settle(file.name, extent, edge, data)
        for extent, edge in others.items():
            edge.ready.wait(2 * PATIENCE_S)
            at = extent * EXTENT_BYTES
            view = None if edge.data is None else memoryview(edge.data)
            if view is None:
                view = self._fetch(file, at, min(file.size, at + EXTENT_BYTES))
                self._check(file, at, at + len(view), [view])
            segments.append((at, view))
        return sorted(segments, key=itemgetter(0))

    def _fetch(self, file: StoredFile, start: int, end: int) -> memoryview:
        """Read bytes of an object, unverified; raises if the object has another size than committed."""
        if start == end:
            return memoryview(b"")
        try:
            answer = self._place.fetch(file.name, start, end)
        except StorageError as error:
            if error.errno == errno.ERANGE:
                self._check_size(file, self._place.size(file.name))
            raise
        if answer is None:
            self._raise_missing(file)
        found, size = answer
        self._check_size(file, size)
        if len(found) != end - start:
            path = self.path_of(file.name)
            raise CheckpointCorrupt(
                f"{path}: {end - start} bytes from {start} were requested, {len(found)} received",
                path=path,
                byte_range=(start, end),
            )
        with self._counting:
            self.bytes_read += end - start
        return found

    def _check_size(self, file: StoredFile, found: int | None) -> None:
        if found is None:
            self._raise_missing(file)
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


def _gather(memory: memoryview, start: int, segments: Sequence[tuple[int, memoryview]]) -> None:
    """Copy bytes from ``start`` on out of ``segments``, which cover them, into ``memory``."""
    end = start + len(memory)
    for at, data in segments:
        begin, stop = max(start, at), min(end, at + len(data))
        if begin < stop:
            copy_bytes(memory[begin - start : stop - start], data[begin - at : stop - at])
