"""Define the interface that loads read from, and implement it for Holdfast's own directories.

`CheckpointSource` is what a load needs to know. `HoldfastSource` finds it in a manifest and its reports, each decoded
and checked against its digest on first use; `stock_dcp` finds it in a stock ``.metadata``; `open` chooses.

Guarantees: opening never writes; everything decoded matched its digest, and names found in it can't lead out of the
directory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import stat
import zipfile
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import xxhash

from holdfast.boxes import Box
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointReplaced, HoldfastError, StorageError
from holdfast.format.manifest import (
    MANIFEST_HEAD_BYTES,
    MANIFEST_NAME,
    METADATA_NAME,
    SUM_BYTES,
    IndexObject,
    IndexTensor,
    Manifest,
    ManifestReport,
    RankIndex,
    Report,
    attempt_in,
    decode_manifest,
    decode_report,
    join,
    parts_in,
    read_index,
    report_name,
    void_in,
)
from holdfast.format.sealed import xxh3_128
from holdfast.format.torch_record import render
from holdfast.loader.sources.places import DirectoryFiles, open_directory, read_small, size_of
from holdfast.plan.read import StoredShard, StoredTensor
from holdfast.storage.entries import MAX_MANIFEST_BYTES
from holdfast.storage.files import StoredFile, open_plain, read_at, refused, told_apart, what_became
from holdfast.storage.object_storage import with_attempt, without_attempt
from holdfast.storage.ranged_reads import GAP_BYTES_MAX, FileSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from holdfast.format.manifest import ManifestFile, ReportFile
    from holdfast.format.structure import PathItem
    from holdfast.loader.sources.places import FilePlace
    from holdfast.plan.read import Transfer
    from holdfast.storage.files import OpenedDirectory
    from holdfast.storage.ranged_reads import Blame


# Find the tensor whose bytes in a damaged extent are wrong. An extent of 1 MiB may hold hundreds of small tensors. The
# report has a checksum of each tensor's payload, headers around a payload can be rendered again, and records of objects
# have CRCs. Reads at most `LOOK_BYTES_MAX` per record, and raises nothing.

LOOK_BYTES_MAX: Final = 64 << 20
_PIECE_BYTES: Final = 256 << 10


class _RecordRow(NamedTuple):
    """One record of a file, with the checksum of its payload where there is one."""

    begin: int
    stop: int
    record: IndexTensor | IndexObject
    payload_sum: bytes


class TensorAtOffset:
    """Names the tensor or object that is wrong in a byte range of a file. For any thread."""

    def __init__(
        self, read: Callable[[str, int, int], bytes | None], reports: Iterable[tuple[Report, RankIndex]]
    ) -> None:
        """read: returns bytes of a file, by offset and number; None where the file as a whole is wrong."""
        self._read = read
        self._rows: dict[str, list[_RecordRow]] = {}
        self._whole: dict[tuple[str, int], bool] = {}
        """By file and start of the record, as far as looked at."""
        for report, index in reports:
            names = [file.name for file in report.files]
            for number, tensor in enumerate(index.tensors):
                known = report.tensor_sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
                row = _RecordRow(tensor.record_offset, tensor.record_end, tensor, known)
                self._rows.setdefault(names[tensor.file], []).append(row)
            for kept in index.objects:
                row = _RecordRow(kept.offset, kept.offset + kept.capacity, kept, b"")
                self._rows.setdefault(names[kept.file], []).append(row)
        for rows in self._rows.values():
            rows.sort(key=lambda row: row.begin)

    def __call__(self, file: str, start: int, end: int) -> str | None:
        """The first tensor or object with bytes in the range that are wrong; None where none is, or none lies there."""
        rows = self._rows.get(file, [])
        at = max(0, bisect_right(rows, start, key=lambda row: row.begin) - 1)
        large = None
        for row in rows[at:]:
            if row.begin >= end:
                break
            if row.stop <= start:
                continue
            if row.stop - row.begin > LOOK_BYTES_MAX:
                large = large or row.record.name
                continue
            whole = self._whole.get((file, row.begin))
            if whole is None:
                whole = self._whole[file, row.begin] = self._is_whole(file, row)
            if not whole:
                return row.record.name
        return large

    def _is_whole(self, file: str, row: _RecordRow) -> bool:
        try:
            data = self._read(file, row.begin, row.stop - row.begin)
        except (OSError, StorageError):
            return False
        if data is None:
            return True  # nobody's bytes in particular
        if len(data) != row.stop - row.begin:
            return False
        return (
            _is_tensor_whole(data, row.record, row.payload_sum)
            if isinstance(row.record, IndexTensor)
            else _is_object_whole(data)
        )


def _is_tensor_whole(data: bytes, tensor: IndexTensor, payload_sum: bytes) -> bool:
    at = tensor.payload_offset - tensor.record_offset
    header, trailer = render(tensor.dtype, tensor.sizes, record_offset=tensor.record_offset)
    if data[:at] != header or data[at + tensor.nbytes :] != trailer:
        return False
    digest = xxhash.xxh3_64()
    payload = memoryview(data)[at : at + tensor.nbytes]
    for start in range(0, len(payload), _PIECE_BYTES):
        digest.update(payload[start : start + _PIECE_BYTES])
    return digest.intdigest().to_bytes(SUM_BYTES, "little") == payload_sum


def _is_object_whole(data: bytes) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError, RuntimeError, EOFError):
        return False


# Combine the reports of all ranks into the list of data files; overlaps and gaps are `CheckpointCorrupt`.


def covered_files(
    directory: str, manifest: Manifest, reports: Iterable[Report], *, all_there: bool
) -> dict[str, StoredFile]:
    """The data files by name. ``all_there``: none of the reports is left out, so that there can't be a gap."""
    seen = {file.name for file in manifest.files}
    rows: list[ReportFile] = []
    for report in reports:
        path = os.path.join(directory, report_name(report.rank))
        if len(parts_in(report.files)) != (len(report.files) if manifest.kind == "export" else 0):
            raise CheckpointCorrupt(
                f"{path} is not a valid manifest of a {manifest.kind}: it lists other files", path=path
            )
        for file in report.files:
            if file.name in seen:
                raise CheckpointCorrupt(f"{path} covers {file.name}, which belongs to another rank", path=path)
            rows.append(file)
        if manifest.kind == "checkpoint":
            seen.update(file.name for file in report.files)
    try:
        found = join(rows)
    except ValueError as error:
        path = os.path.join(directory, MANIFEST_NAME)
        raise CheckpointCorrupt(f"{path}: its reports contradict each other: {error}", path=path) from error
    for joined in found:
        for start, end in joined.gaps if all_there else ():
            path = os.path.join(directory, joined.name)
            raise CheckpointCorrupt(
                f"{path}: no report covers bytes {start} to {end}", path=path, byte_range=(start, end)
            )
    return {row.name: StoredFile(row.name, row.size, row.extents, row.gaps) for row in found}


_log = logging.getLogger("holdfast")

_HF_WEIGHTS: Final = re.compile(r"(adapter_model|model|pytorch_model)[^/]*\.(bin|json|safetensors)")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The record of one plain object: ``nbytes`` from ``offset`` of ``file``."""

    name: str
    file: str
    offset: int
    nbytes: int


class Place(NamedTuple):
    """The record of one shard, or of a plain object, which has no ``offsets``: ``length`` bytes of ``file``."""

    name: str
    offsets: tuple[int, ...] | None
    file: str
    offset: int
    length: int


class RecordReader(Protocol):
    """Reads stored shards one whole record at a time."""

    def load(self, files: FileSet, shard: Transfer) -> torch.Tensor:
        """The whole shard that ``shard.stored`` names, in host memory; `CheckpointCorrupt` if it isn't that."""
        ...


class CheckpointSource(Protocol):
    """Interface of a checkpoint that a load reads from."""

    @property
    def directory(self) -> str: ...
    @property
    def opened(self) -> OpenedDirectory | None:
        """The open directory that it reads through, if any."""
        ...

    def what_became(self) -> CheckpointNotFound | None:
        """Return the error for a checkpoint that was replaced or deleted while it was read; None if it wasn't."""
        ...

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
        """Reader of whole records, for stock directories whose payloads can't be read in place."""
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
        """Check the files that no extent checksum covers (manifest, reports, ``.metadata``); return the errors."""
        ...

    def strangers(self) -> list[str]:
        """Paths of files that were added to the directory after the commit: no damage, for no reader takes them."""
        ...

    def places(self) -> Iterator[Place]:
        """Yield the location of every ``torch.save`` record; nothing if there are none."""
        ...

    def fresh(self) -> CheckpointSource:
        """The same as it is on storage now, nothing of it read yet."""
        ...

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        """See `FileSet`; ``direct`` is a wish."""
        ...


def members_of(source: CheckpointSource) -> tuple[CheckpointSource, ...]:
    """Return what ``source`` is read from: of a delta version the anchor and all deltas, else itself."""
    found: tuple[CheckpointSource, ...] = getattr(source, "members", (source,))
    return found


@contextlib.contextmanager
def telling_apart(source: CheckpointSource) -> Iterator[None]:
    """Raise `CheckpointReplaced` or `CheckpointNotFound` for damage in what has been taken away while it was read."""
    try:
        yield
    except (CheckpointCorrupt, StorageError) as error:
        told = told_apart(source.what_became, error)
        if told is error:
            raise
        raise told from error


_Read = tuple[Report, RankIndex]


class HoldfastSource:
    """A directory that Holdfast published."""

    records: Final = None
    checksummed: Final = True
    small_reads_at_a_time = 1
    """How many reports and other small files are read at a time."""
    _covered: dict[str, StoredFile]
    """Set with `_reports`."""

    def __init__(
        self,
        directory: str,
        *,
        step: int | None,
        world: int,
        manifest: Manifest | None = None,
        attempt: str = "",
        opened: OpenedDirectory | None = None,
    ) -> None:
        """``manifest``, ``opened``: None to have it read, and checked, or opened, when it is first asked for.

        ``attempt``: who published it, where that is known before the manifest is read.
        """
        self.directory = directory
        self.step = step
        self.world = world
        self._attempt = attempt if manifest is None else manifest.attempt
        if manifest is not None:
            self.__dict__["manifest"] = manifest
        if opened is not None:
            self.__dict__["_through"] = opened

    @cached_property
    def manifest(self) -> Manifest:
        """The committed manifest."""
        found = _read_manifest(self.__dict__.get("_through", self.directory))
        self.check_attempt(found.attempt)
        return found

    @property
    def opened(self) -> OpenedDirectory | None:
        """The directory, once something in it was asked for."""
        return self.__dict__.get("_through")

    @property
    def place(self) -> FilePlace:
        """Where its files are, whoever replaces them."""
        return DirectoryFiles(self.directory)

    def what_became(self) -> CheckpointNotFound | None:
        return None if self.opened is None else what_became(self.opened)

    @cached_property
    def _through(self) -> OpenedDirectory:
        """All but the manifest is read through this: all of it is of one attempt."""
        opened = open_directory(self.directory)
        self.check_attempt(attempt_in(read_small(opened, MANIFEST_NAME, limit=MANIFEST_HEAD_BYTES)))
        return opened

    def check_attempt(self, found: str | None) -> None:
        """Raise `CheckpointReplaced` unless ``found`` is the attempt that this is of."""
        if found != self._attempt:
            raise CheckpointReplaced(
                f"{self.directory} now holds attempt {found}, but attempt {self._attempt} was opened: "
                "it was replaced by another save; open it again",
                path=self.directory,
                step=self.step,
            )

    def give_reports(self, reports: dict[str, bytes]) -> None:
        """Take what another rank has read as the reports of these names; others are read, and any that is not right."""
        self.__dict__["_given_reports"] = reports

    @cached_property
    def _found_reports(self) -> list[_Read | HoldfastError]:
        """Read the report of each line of the manifest, or return why it can't be read."""
        lines = self.manifest.reports
        found: list[_Read | HoldfastError | None] = [None] * len(lines)

        def read(at: int) -> None:
            try:
                found[at] = self._read_report(lines[at])
            except HoldfastError as error:
                found[at] = error

        take_turns([partial(read, at) for at in range(len(lines))], self.small_reads_at_a_time)
        return [one for one in found if one is not None]

    def report_of(self, rank: int) -> tuple[Report, RankIndex]:
        """Return the report of one rank; the others aren't read. Raises `CheckpointCorrupt`, `StorageError`."""
        return self._read_report(self.manifest.reports[rank])

    def _read_report(self, line: ManifestReport) -> _Read:
        report = self.committed_report(line)
        return report, read_index(report, path=os.path.join(self.directory, line.name))

    def committed_report(self, line: ManifestReport) -> Report:
        """Return the report of a line of the manifest, its index still encoded. Raises as `report_of`."""
        path = os.path.join(self.directory, line.name)
        data = self.__dict__.get("_given_reports", {}).pop(line.name, None)
        if data is None or xxh3_128(data) != line.digest:
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
                f"{path} is the report of rank {report.rank} of {report.world} and attempt "
                f"{report.attempt}, not of this checkpoint",
                path=path,
            )
        return report

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
        """The same attempt, read again."""
        source = self._opened_anew()
        self.check_attempt(source.manifest.attempt)
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
    def sums(self) -> dict[str, frozenset[tuple[Box, bytes]]]:
        """The checksum of each box of a tensor's that is stored, by the tensor's name."""
        found: dict[str, set[tuple[Box, bytes]]] = {}
        for report, index in self._reports:
            for number, row in enumerate(index.tensors):
                known = report.tensor_sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
                found.setdefault(row.name, set()).add((Box(row.offsets, row.sizes), known))
        return {name: frozenset(sums) for name, sums in found.items()}

    @cached_property
    def paths(self) -> dict[str, tuple[PathItem, ...]]:
        found = {row.name: row.path for _, index in self._reports for row in index.tensors}
        found.update((row.name, row.path) for _, index in self._reports for row in index.objects)
        return found

    @cached_property
    def mappings(self) -> dict[tuple[PathItem, ...], tuple[Any, ...]]:
        """Keys of the user's mappings that were saved, by their paths, where names don't tell them."""
        found: dict[tuple[PathItem, ...], dict[Any, None]] = {}
        for _, index in self._reports:
            for item in index.mappings:
                found.setdefault(item.path, {}).update(dict.fromkeys(item.keys))
        return {path: tuple(keys) for path, keys in found.items()}

    def places(self) -> Iterator[Place]:
        for report, index in self._reports:
            names = [file.name for file in report.files]
            for row in index.tensors:
                start = row.record_offset
                yield Place(row.name, row.offsets, names[row.file], start, row.record_end - start)
            for item in index.objects:
                yield Place(item.name, None, names[item.file], item.offset, item.capacity)

    def render_dcp_metadata(self) -> bytes:
        """Render the stock ``.metadata`` from the reports; time and memory grow with tensors times ranks."""
        from holdfast.format.dcp_metadata import StoredPlan, StoredRank, render_metadata

        return render_metadata(
            StoredPlan(tuple(StoredRank(report.files, index.tensors, index.objects) for report, index in self._reports))
        )

    def name_of(self, plain: str) -> str | None:
        """Return the name that the committed file ``plain`` has here; None if none was committed."""
        known = self.files.keys() | {file.name for file in self.manifest.files}
        return next((name for name in (plain, with_attempt(plain, self._attempt)) if name in known), None)

    @property
    def has_committed_metadata(self) -> bool:
        """Return True if ``.metadata`` was committed with the checkpoint; otherwise it was added later or is absent."""
        return any(without_attempt(file.name, self._attempt) == METADATA_NAME for file in self.manifest.files)

    def check_listing(self) -> list[HoldfastError]:
        try:
            problems = self._check_committed(digests=True)
            problems.extend(read for read in self._found_reports if isinstance(read, HoldfastError))
        except HoldfastError as error:  # the manifest: without it nothing else means anything
            return [error]
        if not problems:
            problems.extend([*self._check_added_metadata(), *self._check_faces()])
        if not any(isinstance(read, HoldfastError) for read in self._found_reports):
            try:
                _ = self.files
                problems.extend(
                    CheckpointCorrupt(f"{path} is in the export but was not committed with it", path=path)
                    for path in self._unknown_paths()
                    if self._is_taken_by_readers(path)
                )
            except (CheckpointCorrupt, StorageError) as error:  # reports that are right only by themselves
                problems.append(error)
        return problems

    def strangers(self) -> list[str]:
        try:
            return [path for path in self._unknown_paths() if not self._is_taken_by_readers(path)]
        except HoldfastError:
            return []  # which files are its own can't be told: `check_listing` says why

    def _is_taken_by_readers(self, path: str) -> bool:
        """Return True if readers of Hugging Face directories may take the file ``path`` for weights of the export."""
        return self.manifest.kind == "export" and _HF_WEIGHTS.fullmatch(os.path.basename(path)) is not None

    def _unknown_paths(self) -> list[str]:
        return [os.path.join(self.directory, name) for name in self._unknown_entries()]

    def _check_added_metadata(self) -> list[HoldfastError]:
        path = os.path.join(self.directory, METADATA_NAME)
        if self.has_committed_metadata or self.manifest.kind == "export" or not self.has_entry(METADATA_NAME):
            return []
        try:
            expected = self.render_dcp_metadata()
            if self._read_added(METADATA_NAME, len(expected)) in (expected, None):
                return []
        except (CheckpointCorrupt, StorageError) as error:
            return [error]
        message = (
            f"{path} was added later and is not what Checkpoint.write_dcp_metadata makes: stock readers may read "
            "something else; remove it and write it anew"
        )
        return [CheckpointCorrupt(message, path=path)]

    def _check_faces(self) -> list[HoldfastError]:
        """Compare plain-named copies of committed files, by which others read a store; they may be absent."""
        faces = {without_attempt(file.name, self._attempt): file for file in self.manifest.files}
        problems: list[HoldfastError] = []
        for plain, file in faces.items():
            if plain == file.name or not self.has_entry(plain):
                continue
            try:
                data = self._read_added(plain, file.size)
            except (CheckpointCorrupt, StorageError) as error:
                problems.append(error)
                continue
            if data is not None and xxh3_128(data) != file.digest:
                path = os.path.join(self.directory, plain)
                message = f"{path} is not the same as {file.name}, which was committed: other readers take it for that"
                problems.append(CheckpointCorrupt(message, path=path))
        return problems

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
        # A copy from a store may have small files a second time, without the attempt's id in their names.
        known.update([without_attempt(file.name, self._attempt) for file in self.manifest.files])
        found = set(_entries_of(self._through.fd, self.directory))
        for below in {name.partition("/")[0] for name in known if "/" in name} & found:
            found.remove(below)
            found.update(f"{below}/{name}" for name in self._entries_below(below))
        if self.manifest.kind == "export":
            return sorted(found - known)
        # Derived from what was committed, and never read by us; the longer names are of one being written.
        return sorted(
            name for name in found - known if name != METADATA_NAME and not name.startswith(f"{METADATA_NAME}.")
        )

    def read_extra_file(self, name: str) -> bytes:
        """Return a small file that the manifest lists, verified. Raises `KeyError` for another name."""
        return self._read_listed({file.name: file for file in self.manifest.files}[name])

    def _check_committed(self, *, digests: bool) -> list[HoldfastError]:
        problems: list[HoldfastError] = []
        for file in self.manifest.files:
            try:
                if digests:
                    self._read_listed(file)
                elif (found := self._size_of(file.name)) != file.size:
                    raise self._mismatched(file, found)
            except (CheckpointCorrupt, StorageError) as error:
                problems.append(error)
        return problems

    def _read_listed(self, file: ManifestFile) -> bytes:
        data = self.read_committed(file.name, file.size)
        if len(data) != file.size or xxh3_128(data) != file.digest:
            raise self._mismatched(file, len(data))
        return data

    def _mismatched(self, file: ManifestFile, found: int) -> CheckpointCorrupt:
        path = os.path.join(self.directory, file.name)
        return CheckpointCorrupt(
            f"{path} doesn't match the digest it was committed with", path=path, byte_range=(0, found)
        )

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        return self.file_set(self.readable_files, verify=verify, blame=self._blame, direct=direct)

    # What knows that it is a directory of files.

    def _entries_below(self, name: str) -> list[str]:
        path = os.path.join(self.directory, name)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._through.fd)
        except OSError as error:
            raise refused(path, error) from error
        try:
            return _entries_of(fd, path)
        finally:
            os.close(fd)

    def read_committed(self, name: str, nbytes: int) -> bytes:
        """A small file that was committed with ``nbytes``: those, and one more if there are more; unverified."""
        return read_small(self._through, name, limit=nbytes, committed=True)

    def has_entry(self, name: str) -> bool:
        """Return True if anything is there under ``name``."""
        return os.path.lexists(os.path.join(self.directory, name))

    def _read_added(self, name: str, nbytes: int) -> bytes | None:
        """A file that was not committed, and one byte more if it has more than ``nbytes``; None if it is gone."""
        return read_small(self._through, name, limit=nbytes)

    def _read_at(self, file: str, offset: int, nbytes: int) -> bytes | None:
        """Bytes of a data file, unverified, fewer at its end; None where that can't be opened. Raises `OSError`."""
        try:
            fd = open_plain(self.directory, file)
        except (HoldfastError, OSError):
            return None
        try:
            return read_at(fd, offset, nbytes)
        finally:
            os.close(fd)

    def has_file(self, name: str) -> bool:
        """Return True if the file exists, committed or not."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._through.fd).st_mode)
        except OSError:
            return False

    def _size_of(self, name: str) -> int:
        return size_of(self._through, name)

    def _opened_anew(self) -> HoldfastSource:
        manifest = _read_manifest(self._through)
        return HoldfastSource(
            self.directory, step=manifest.step, world=manifest.world, manifest=manifest, opened=self._through
        )

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
        return DirectoryFiles(self._through).file_set(
            files, verify=verify, blame=blame, direct=direct, gap_bytes_max=gap_bytes_max
        )

    def _blame(self, file: str, start: int, end: int) -> str | None:
        return self._blamer(file, start, end)  # made when something is wrong, not for each load

    @cached_property
    def _blamer(self) -> TensorAtOffset:
        reads = [read for read in self._found_reports if not isinstance(read, HoldfastError)]
        return TensorAtOffset(self._read_at, reads)


def open_holdfast(directory: str) -> HoldfastSource:
    """The Holdfast checkpoint in ``directory``. Raises `CheckpointNotFound` where there is no manifest."""
    opened = open_directory(directory)
    try:
        manifest = _read_manifest(opened)
    except (CheckpointCorrupt, StorageError) as error:
        told = told_apart(partial(what_became, opened), error)
        if told is error:
            raise
        raise told from error
    return HoldfastSource(directory, step=manifest.step, world=manifest.world, manifest=manifest, opened=opened)


def open_published(directory: str, *, attempt: str, step: int | None, world: int) -> HoldfastSource:
    """Open the checkpoint that ``attempt`` has just published; the manifest is read on first use.

    A manifest has one line per rank, and every rank opens what it has saved: only the first few hundred bytes are read.
    Raises `CheckpointNotFound`, `StorageError`; `CheckpointReplaced` if the checkpoint isn't of ``attempt``.
    """
    source = HoldfastSource(directory, step=step, world=world, attempt=attempt)
    source.check_attempt(attempt_in(read_small(directory, MANIFEST_NAME, limit=MANIFEST_HEAD_BYTES)))
    return source


def _read_manifest(directory: str | OpenedDirectory) -> Manifest:
    path = os.path.join(directory, MANIFEST_NAME)
    return committed_manifest(read_small(directory, MANIFEST_NAME, limit=MAX_MANIFEST_BYTES), path=path)


def committed_manifest(data: bytes, *, path: str) -> Manifest:
    """Decode the manifest at ``path``. Raises `CheckpointNotFound` if it is a void, which says that there is none."""
    if void_in(data) is not None:
        message = f"{path} says that its save was given up, or its data removed: there is no checkpoint here"
        raise CheckpointNotFound(message, path=path)
    return decode_manifest(data, path=path)


def _entries_of(fd: int, path: str) -> list[str]:
    try:
        return os.listdir(fd)
    except OSError as error:
        raise refused(path, error) from error
