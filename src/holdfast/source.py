"""Where a load reads from: one checkpoint directory, with what lies where in it.

`Source` is what a load needs to know. `HoldfastSource` finds it in a manifest and its reports, each decoded against
its digest when it is first asked for; ``foreign`` finds it in a stock ``.metadata``; ``opening`` knows which is which.

Guarantees: opening never writes; everything decoded was matched with its digest, and names found in it can't lead
out of the directory.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.blaming import Blamer
from holdfast.boxes import Box
from holdfast.covered import covered_files
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, HoldfastError, StorageError
from holdfast.format.dcp import StoredPlan, StoredRank, render_metadata
from holdfast.format.manifest import (
    MANIFEST_HEAD_BYTES,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    ManifestReport,
    RankIndex,
    Report,
    attempt_in,
    decode_manifest,
    decode_report,
    read_index,
)
from holdfast.format.sealed import xxh3_128
from holdfast.plan.read import StoredShard, StoredTensor
from holdfast.root import MAX_MANIFEST_BYTES
from holdfast.storage.descriptors import StoredFile, refused
from holdfast.storage.plain import open_plain
from holdfast.storage.reading import GAP_BYTES_MAX, FileSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from holdfast.plan.read import Transfer
    from holdfast.plan.structure import PathItem
    from holdfast.storage.reading import Blame

_log = logging.getLogger("holdfast")

READ_THREADS: Final = 4
"""More than two cores need: while one thread waits for the interpreter's lock, another reads."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The record of one plain object: ``nbytes`` from ``offset`` of ``file``."""

    name: str
    file: str
    offset: int
    nbytes: int


class RecordReader(Protocol):
    """Reads stored shards one whole record at a time."""

    def load(self, files: FileSet, shard: Transfer) -> torch.Tensor:
        """The whole shard that ``shard.stored`` names, in host memory; `CheckpointCorrupt` if it isn't that."""
        ...


class Source(Protocol):
    """What a load needs to know of a checkpoint."""

    @property
    def directory(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def world(self) -> int | None:
        """Ranks that saved it, where known."""
        ...

    @property
    def records(self) -> RecordReader | None:
        """How to read tensors where payloads can't be read in place: a foreign directory's whole records."""
        ...

    @property
    def checksummed(self) -> bool: ...
    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    @property
    def objects(self) -> Mapping[str, StoredObject]: ...
    @property
    def paths(self) -> Mapping[str, tuple[PathItem, ...]]: ...
    @property
    def files(self) -> Mapping[str, StoredFile]: ...
    @property
    def readable_files(self) -> Mapping[str, StoredFile]:
        """`files`, without those of reports that can't be read."""
        ...

    def check_listing(self) -> list[HoldfastError]:
        """What is wrong with the files that no extent checksum covers (manifest, reports, ``.metadata``)."""
        ...

    def fresh(self) -> Source:
        """The same as it is on storage now, nothing of it read yet."""
        ...

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        """See `FileSet`; ``direct`` is a wish."""
        ...


_Read = tuple[Report, RankIndex]


class HoldfastSource:
    """A directory that Holdfast published."""

    records: Final = None
    checksummed: Final = True
    _covered: dict[str, StoredFile]
    """Set with `_reports`."""

    def __init__(self, directory: str, *, step: int | None, world: int, manifest: Manifest | None = None) -> None:
        """``manifest``: None to have it read, and checked, when it is first asked for."""
        self.directory = directory
        self.step = step
        self.world = world
        if manifest is not None:
            self.__dict__["manifest"] = manifest

    @cached_property
    def manifest(self) -> Manifest:
        """What was committed."""
        return _read_manifest(self.directory)

    @cached_property
    def _found_reports(self) -> list[_Read | HoldfastError]:
        """For each line of the manifest what its report holds, or why that can't be read."""
        found: list[_Read | HoldfastError] = []
        for line in self.manifest.reports:
            try:
                found.append(self._read_report(line))
            except HoldfastError as error:
                found.append(error)
        return found

    def _read_report(self, line: ManifestReport) -> _Read:
        path = os.path.join(self.directory, line.name)
        data = self.read_committed(line.name, line.size)
        if len(data) != line.size or xxh3_128(data) != line.digest:
            raise CheckpointCorrupt(
                f"{path} is not the report that was committed (expected {line.size} bytes with digest "
                f"{line.digest}, found {len(data)} bytes with {xxh3_128(data)})",
                path=path,
                byte_range=(0, len(data)),
            )
        report = decode_report(data, path=path)
        if (report.rank, report.world, report.attempt) != (line.rank, self.manifest.world, self.manifest.attempt):
            raise CheckpointCorrupt(
                f"{path} is of rank {report.rank} of {report.world} and attempt {report.attempt}, not of this one",
                path=path,
            )
        return report, read_index(report, path=path)

    @cached_property
    def _reports(self) -> list[_Read]:
        found = []
        for read in self._found_reports:
            if isinstance(read, HoldfastError):
                raise read
            found.append(read)
        # What lies in a file would be judged by another report than the one it is of, were it covered by two.
        self._covered = covered_files(self.directory, self.manifest, (report for report, _ in found), all_there=True)
        return found

    @cached_property
    def files(self) -> dict[str, StoredFile]:
        _ = self._reports
        return self._covered

    @property
    def readable_files(self) -> dict[str, StoredFile]:
        try:
            reports = [read[0] for read in self._found_reports if not isinstance(read, HoldfastError)]
            if len(reports) == len(self._found_reports):
                return self.files
            return covered_files(self.directory, self.manifest, reports, all_there=False)
        except HoldfastError:
            return {}

    def fresh(self) -> HoldfastSource:
        source = self._opened_anew()
        if source.manifest.attempt != self.manifest.attempt:
            path = os.path.join(self.directory, MANIFEST_NAME)
            raise CheckpointCorrupt(
                f"{path} is of attempt {source.manifest.attempt}, but what was opened is attempt "
                f"{self.manifest.attempt}: it was replaced meanwhile; open it anew",
                path=path,
            )
        return source

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        found: dict[str, list[StoredShard]] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        for report, index in self._reports:
            names = [file.name for file in report.files]
            for row in index.tensors:
                name, kind = row.name, (row.dtype, row.shape)
                shard = StoredShard(Box(row.offsets, row.sizes), names[row.file], row.payload_offset, row.nbytes)
                known = kinds.setdefault(name, kind)
                if known is kind:
                    found[name] = [shard]
                elif known == kind:
                    found[name].append(shard)
                else:
                    path = os.path.join(self.directory, MANIFEST_NAME)
                    raise CheckpointCorrupt(f"{path}: reports disagree on {name}", path=path, tensor=name)
        return {name: StoredTensor(name, *kinds[name], tuple(shards)) for name, shards in found.items()}

    @cached_property
    def objects(self) -> dict[str, StoredObject]:
        return {
            row.name: StoredObject(row.name, report.files[row.file].name, row.offset, row.capacity)
            for report, index in self._reports
            for row in index.objects
        }

    @cached_property
    def paths(self) -> dict[str, tuple[PathItem, ...]]:
        found = {row.name: row.path for _, index in self._reports for row in index.tensors}
        found.update((row.name, row.path) for _, index in self._reports for row in index.objects)
        return found

    def render_dcp_metadata(self) -> bytes:
        """The stock ``.metadata`` of this checkpoint, from its reports: time and memory by tensors times ranks."""
        return render_metadata(
            StoredPlan(tuple(StoredRank(report.files, index.tensors, index.objects) for report, index in self._reports))
        )

    @property
    def has_committed_metadata(self) -> bool:
        """Whether ``.metadata`` was committed with the checkpoint; else it may have been added later, or not be."""
        return any(file.name == METADATA_NAME for file in self.manifest.files)

    def check_listing(self) -> list[HoldfastError]:
        try:
            problems = self._check_committed(digests=True)
            problems.extend(read for read in self._found_reports if isinstance(read, HoldfastError))
        except HoldfastError as error:  # the manifest: without it nothing else means anything
            return [error]
        if not problems:
            problems.extend(self._check_added_metadata())
        if not any(isinstance(read, HoldfastError) for read in self._found_reports):
            try:
                problems.extend(self._check_unknown())
            except (CheckpointCorrupt, StorageError) as error:  # reports that are right only by themselves
                problems.append(error)
        return problems

    def _check_added_metadata(self) -> list[HoldfastError]:
        path = os.path.join(self.directory, METADATA_NAME)
        if self.has_committed_metadata or not os.path.lexists(path) or self.manifest.kind == "export":
            return []
        try:
            expected = self.render_dcp_metadata()
            if read_small(self.directory, METADATA_NAME, limit=len(expected)) == expected:
                return []
        except (CheckpointCorrupt, StorageError) as error:
            return [error]
        message = (
            f"{path} was added later and is not what Checkpoint.write_dcp_metadata makes: stock readers may read "
            "something else; remove it and write it anew"
        )
        return [CheckpointCorrupt(message, path=path)]

    def _check_unknown(self) -> list[HoldfastError]:
        paths = [os.path.join(self.directory, name) for name in self._unknown_entries()]
        return [
            CheckpointCorrupt(f"{path} is in the checkpoint but was not committed with it", path=path) for path in paths
        ]

    def raise_for_listing(self, *, verify: bool) -> None:
        """Raise the first thing that is wrong with what no extent checksum covers; by sizes only, without ``verify``.

        What others have put into the directory is none of a load's business, and only said in the log.
        """
        for problem in self._check_committed(digests=verify):
            raise problem
        if unknown := self._unknown_entries():
            _log.warning("%s holds what was not committed with it: %s", self.directory, ", ".join(unknown[:8]))

    def _unknown_entries(self) -> list[str]:
        known = {MANIFEST_NAME, *self.files, *(line.name for line in self.manifest.reports)}
        known.update(file.name for file in self.manifest.files)
        found = set(_entries_of(self.directory))
        for below in {name.partition("/")[0] for name in known if "/" in name} & found:
            found.remove(below)
            found.update(f"{below}/{name}" for name in _entries_of(os.path.join(self.directory, below)))
        if self.manifest.kind == "export":
            return sorted(found - known)
        # Derived from what was committed, and never read by us; the longer names are of one being written.
        return sorted(
            name for name in found - known if name != METADATA_NAME and not name.startswith(f"{METADATA_NAME}.")
        )

    def _check_committed(self, *, digests: bool) -> list[HoldfastError]:
        problems: list[HoldfastError] = []
        for file in self.manifest.files:
            path = os.path.join(self.directory, file.name)
            try:
                if digests:
                    data = self.read_committed(file.name, file.size)
                    found, right = len(data), len(data) == file.size and xxh3_128(data) == file.digest
                else:
                    found = self._size_of(file.name)
                    right = found == file.size
                if not right:
                    problems.append(
                        CheckpointCorrupt(
                            f"{path} doesn't match the digest it was committed with",
                            path=path,
                            byte_range=(0, found),
                        )
                    )
            except (CheckpointCorrupt, StorageError) as error:
                problems.append(error)
        return problems

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        return self.file_set(self.readable_files, verify=verify, blame=self._blame, direct=direct)

    # What knows that it is a directory of files.

    def read_committed(self, name: str, nbytes: int) -> bytes:
        """A small file that was committed with ``nbytes``: those, and one more if there are more; unverified."""
        return read_small(self.directory, name, limit=nbytes, committed=True)

    def has_file(self, name: str) -> bool:
        """Whether there is such a file, committed or not."""
        return os.path.isfile(os.path.join(self.directory, name))

    def _size_of(self, name: str) -> int:
        return size_of(os.path.join(self.directory, name))

    def _opened_anew(self) -> HoldfastSource:
        return open_holdfast(self.directory)

    def file_set(
        self,
        files: Mapping[str, StoredFile],
        *,
        verify: bool,
        blame: Blame,
        direct: bool = False,
        gap_bytes_max: int = GAP_BYTES_MAX,
    ) -> FileSet:
        """``files`` of it; see `FileSet`."""
        return FileSet(
            self.directory,
            files,
            verify=verify,
            threads=READ_THREADS,
            blame=blame,
            direct=direct,
            gap_bytes_max=gap_bytes_max,
        )

    def _blame(self, file: str, start: int, end: int) -> str | None:
        return self._blamer(file, start, end)  # made when something is wrong, not for each load

    @cached_property
    def _blamer(self) -> Blamer:
        reads = [read for read in self._found_reports if not isinstance(read, HoldfastError)]
        return Blamer(self.directory, reads)


def open_holdfast(directory: str) -> HoldfastSource:
    """The Holdfast checkpoint in ``directory``. Raises `CheckpointNotFound` where there is no manifest."""
    manifest = _read_manifest(directory)
    return HoldfastSource(directory, step=manifest.step, world=manifest.world, manifest=manifest)


def open_published(directory: str, *, attempt: str, step: int | None, world: int) -> HoldfastSource:
    """What ``attempt`` has just published in ``directory``; the manifest is read when it is first asked for.

    A manifest has a line a rank, and every rank opens what it has saved: this reads the first few hundred bytes only.
    Raises `CheckpointNotFound`, `StorageError`; `CheckpointCorrupt` if what is there isn't of ``attempt``.
    """
    path = os.path.join(directory, MANIFEST_NAME)
    found = attempt_in(read_small(directory, MANIFEST_NAME, limit=MANIFEST_HEAD_BYTES))
    if found != attempt:
        raise CheckpointCorrupt(f"{path} is of attempt {found}, expected {attempt}", path=path)
    return HoldfastSource(directory, step=step, world=world)


def _read_manifest(directory: str) -> Manifest:
    path = os.path.join(directory, MANIFEST_NAME)
    return decode_manifest(read_small(directory, MANIFEST_NAME, limit=MAX_MANIFEST_BYTES), path=path)


def read_small(directory: str, name: str, *, limit: int, committed: bool = False) -> bytes:
    """A file of at most ``limit`` bytes, whole (one byte more, if there is more). Links are not followed."""
    path = os.path.join(directory, name)
    try:
        fd = open_plain(directory, name)
    except FileNotFoundError as error:
        if committed:
            raise CheckpointCorrupt(f"{path} is missing; it was committed with the checkpoint", path=path) from error
        raise CheckpointNotFound(f"{path} doesn't exist: there is no checkpoint here", path=path) from error
    except OSError as error:
        raise refused(path, error) from error
    try:
        with os.fdopen(fd, "rb") as file:
            return file.read(min(limit, os.fstat(fd).st_size) + 1)  # a limit may be far more than there is
    except OSError as error:
        raise refused(path, error) from error


def _entries_of(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError as error:
        raise refused(path, error) from error


def size_of(path: str) -> int:
    """The size of a committed file. Links are not followed."""
    try:
        status = os.lstat(path)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} is missing; it was committed with the checkpoint", path=path) from error
    except OSError as error:
        raise refused(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointCorrupt(f"{path} is not a plain file; checkpoints hold plain files", path=path)
    return status.st_size
