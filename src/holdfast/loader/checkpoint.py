"""Read and verify a published checkpoint.

`Checkpoint` is what saves and `holdfast.open` return. Opening decodes the manifest only; reports are decoded on first
use. Directories of stock ``dcp.save`` (``sources.stock_dcp``) and of Hugging Face models (``sources.huggingface``) open
too: they have no checksums, so `verify` can only tell that nothing is missing. The handle of an export returns one as
well: it can be used as a path, for example by ``from_pretrained``.

Guarantees: never writes (except `Checkpoint.write_dcp_metadata`), locks or recovers; no process group needed; returned
data was verified, except as `Checkpoint.map` says. `verify_source` reports all damage and never raises for it; an
unreadable file does not keep others from being checked. Imports torch only when tensors or objects are read.
"""

from __future__ import annotations

import operator
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

from holdfast import events
from holdfast.boxes import Box, whole
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HoldfastError, StorageError
from holdfast.format.manifest import EXTENT_BYTES, METADATA_NAME
from holdfast.loader.notebook import checkpoint_html, facts_html
from holdfast.loader.sources.holdfast import HoldfastSource, members_of, telling_apart
from holdfast.loader.sources.huggingface import HFSource
from holdfast.loader.sources.object_store import ObjectSource
from holdfast.loader.sources.open import PublishedExport, open_source
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import without_attempt
from holdfast.validation import is_store

if TYPE_CHECKING:
    import torch

    from holdfast.format.manifest import Manifest, ManifestFile
    from holdfast.format.structure import PathItem
    from holdfast.loader.read import FileReads
    from holdfast.loader.sources.holdfast import CheckpointSource, StoredObject
    from holdfast.plan.read import StoredTensor
    from holdfast.storage.files import StoredFile
    from holdfast.storage.ranged_reads import FileSet

SPAN_BYTES: Final = 8 << 20
"""Read and hashed at a time."""
BATCHES: Final = 4
"""So many spans for each that is read at a time are read before progress is told."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: ``path`` of the file, the tensor where known, the byte range where known."""

    path: str
    tensor: str | None
    byte_range: tuple[int, int] | None
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `Checkpoint.verify`.

    ok: nothing is wrong. files, nbytes: how many files, and bytes of them, were read. checksummed: False for a
    checkpoint of stock DCP, which has no checksums. problems: what is wrong, each with its file, the tensor and the
    range of bytes if these are known, and a message. warnings: files that were added later, which is not damage.
    """

    ok: bool
    files: int
    nbytes: int
    checksummed: bool
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()


def verify_source(source: CheckpointSource, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
    """Read every byte of ``source`` and compare it with its checksum; returns what is wrong, and raises nothing for it.

    progress: called with (bytes done, bytes in all) now and then, on the calling thread.
    """
    problems = [problem_of(error) for error in source.check_listing()]
    known = source.readable_files
    total = sum(max(0, file.size) for file in known.values())
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    there = [file for file in known.values() if file.size >= 0]  # one that isn't is in the listing
    if there:
        with source.open_files(verify=True) as files:
            problems.extend(map(problem_of, _check_all(files, there, advance)))
    warnings = tuple(
        Problem(
            path, None, None, f"{path} was added since the directory was published: it isn't checked, and is no damage"
        )
        for path in source.strangers()
    )
    return VerifyReport(not problems, len(known), total, source.checksummed, tuple(problems), warnings)


def problem_of(error: HoldfastError) -> Problem:
    """Convert an error to a finding."""
    return Problem(
        getattr(error, "path", ""), getattr(error, "tensor", None), getattr(error, "byte_range", None), str(error)
    )


def _check_all(files: FileSet, known: Sequence[StoredFile], advance: Callable[[int], None]) -> Iterator[HoldfastError]:
    """Read whole files, as many spans at a time as ``files`` can: every extent that is wrong, in order.

    Of a file that can't be read there is the one reason why.
    """
    width = files.spans_at_a_time
    batch_spans = BATCHES * width if width > 1 else 1
    broken: dict[str, HoldfastError] = {}

    def require(name: str) -> None:
        try:
            files.require(name)
        except (CheckpointCorrupt, StorageError) as error:
            broken[name] = error

    def read(at: int, name: str, start: int, end: int) -> None:
        try:
            found[at] = list(_bad_extents(files, name, start, end))
        except StorageError as error:
            broken.setdefault(name, error)

    if width > 1:
        take_turns([partial(require, file.name) for file in known], width)
    for file in known:
        if width == 1:
            require(file.name)
        left = file.size
        spans = iter(_spans(file))
        while file.name not in broken and (batch := list(islice(spans, batch_spans))):
            found: list[list[CheckpointCorrupt]] = [[]] * len(batch)
            take_turns([partial(read, at, file.name, *span) for at, span in enumerate(batch)], width)
            for errors in found:
                yield from errors
            if file.name not in broken:
                nbytes = sum(end - start for start, end in batch)
                left -= nbytes
                advance(nbytes)
        if file.name in broken:
            yield broken[file.name]
        advance(left)


def _spans(file: StoredFile) -> Iterator[tuple[int, int]]:
    """Yield the known parts of a file, in spans to read at a time: all of it except parts covered by unreadable
    reports.
    """
    at = 0
    for gap, behind in (*file.gaps, (file.size, file.size)):
        for start in range(at, gap, SPAN_BYTES):
            yield start, min(gap, start + SPAN_BYTES)
        at = behind


def _bad_extents(files: FileSet, name: str, start: int, end: int) -> Iterator[CheckpointCorrupt]:
    """Every bad extent of a span, not just its first. Raises `StorageError`."""
    try:
        files.read_span(name, start, end)
        return
    except CheckpointCorrupt:
        pass
    for extent in range(start, end, EXTENT_BYTES):
        try:
            files.read_span(name, extent, min(end, extent + EXTENT_BYTES))
        except CheckpointCorrupt as error:
            yield error


Index = tuple[slice | int, ...] | slice | int

__all__ = [
    "Checkpoint",
    "FileInfo",
    "Index",
    "Problem",
    "TensorInfo",
    "VerifyReport",
    "open_checkpoint",
    "read_objects",
    "source_of",
]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    shape, dtype, nbytes: those of the whole. shards: the boxes of the whole that it is stored in.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    shards: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One extra file of a checkpoint. nbytes: its size."""

    nbytes: int


class Checkpoint:
    """One published checkpoint or export. Cheap to make; safe to share between threads; as a path it is its directory.

    Of an export, tensors have the names and dtypes that they were exported with.
    """

    def __init__(self, source: CheckpointSource | PublishedExport) -> None:
        self._given = source
        self._maps: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} path={self.path!r}>"

    def _repr_html_(self) -> str:
        """Show it in a notebook, from its manifest and reports."""
        try:
            return checkpoint_html(self._source)
        except HoldfastError as error:
            return facts_html("Checkpoint", {"path": self.path, "unreadable": str(error)})

    def __str__(self) -> str:
        return self.path  # as ``from_pretrained`` makes a string of whatever it is given

    def __fspath__(self) -> str:
        return self.path

    @cached_property
    def _source(self) -> CheckpointSource:
        return self._given.open() if isinstance(self._given, PublishedExport) else self._given

    @property
    def path(self) -> str:
        """Its directory."""
        return self._given.directory

    @property
    def step(self) -> int | None:
        """The step it was saved at; None where none was given."""
        return self._given.step

    @property
    def manifest(self) -> Manifest | None:
        """The committed manifest; None for a directory that Holdfast did not write."""
        return self._source.manifest

    @property
    def flat_names(self) -> list[str]:
        """Names of tensors that are stored as given, dots included: of a flat state dict or a Hugging Face model."""
        return [name for name in self.top_names if "." in name]

    @property
    def top_names(self) -> list[str]:
        """Names of tensors that are at the top level of the state, whatever the names."""
        paths = self._source.paths
        return [name for name in self.tensors if len(paths.get(name, (name,))) == 1]

    @cached_property
    def files(self) -> Mapping[str, FileInfo]:
        """Every extra file by name: those given with the save; of an export, all but the weights. Read one with
        `read_file`.
        """
        return {name: FileInfo(file.size) for name, file in self._listed.items() if name != METADATA_NAME}

    @property
    def _listed(self) -> dict[str, ManifestFile]:
        """Files of the manifest by the names they were given; where attempts share a place, they have longer ones."""
        manifest = self.manifest
        if manifest is None:
            return {}
        return {without_attempt(file.name, manifest.attempt): file for file in manifest.files}

    def read_file(self, name: str) -> bytes:
        """Return the content of the extra file ``name``, verified.

        Raises `CheckpointNotFound` for an unknown name, `CheckpointCorrupt`, `StorageError`, `CheckpointReplaced`.
        """
        source = self._source.committed if isinstance(self._source, HFSource) else members_of(self._source)[-1]
        if name not in self.files or not isinstance(source, HoldfastSource):
            known = ", ".join(sorted(self.files)) or "none"
            message = f"{self.path} has no extra file {name!r}; it has {known}"
            raise CheckpointNotFound(message, path=self.path, step=self.step)
        with telling_apart(source):
            return source.read_extra_file(self._listed[name].name)

    def state(self) -> dict[str, Any]:
        """Return the nested dict that was saved, read whole and verified: tensors in new host memory, plain objects.

        Mappings of any class (OrderedDict, Counter, defaultdict) are plain dicts with the keys they had, not in the
        order they had: strings, numbers, None, bytes, tuples of these. Keys of other kinds are their text, as in stock
        DCP, except in the state of an object. Lists are lists; a tuple without tensors is as it was, whatever is in it.
        A module is a dict of its names, an optimizer what `torch.distributed.checkpoint.state_dict` gives; values of
        each rank are under ``rank-00000``... Older checkpoints have strings for all keys of plain dicts, and no empty
        ones. Names of a stock checkpoint that doesn't say how they were nested stay flat. Needs memory for all of it.
        Raises as `read`.
        """
        from holdfast.loader.read import read_boxes  # imports torch
        from holdfast.state.flatten import ImplausibleList, Keys, rebuild

        source, names = self._source, list(self.tensors)
        with telling_apart(source):
            shapes = [self._stored(name).shape for name in names]
            read = read_boxes(source, [(name, whole(shape)) for name, shape in zip(names, shapes, strict=True)])
            values: dict[str, Any] = {
                name: tensor.reshape(shape) for name, tensor, shape in zip(names, read, shapes, strict=True)
            }
            values |= read_objects(source, list(source.objects))
        mappings = first.mappings if isinstance(first := members_of(source)[0], HoldfastSource) else {}
        leaves: dict[tuple[PathItem, ...], Any] = {path: Keys(keys) for path, keys in mappings.items()}
        leaves |= {tuple(source.paths.get(name) or (name,)): value for name, value in values.items()}
        try:
            found: dict[str, Any] = rebuild(None, leaves, refolds=False)
        except ImplausibleList as error:
            raise CheckpointCorrupt(f"{self.path}: its state can't be put together: {error}", path=self.path) from error
        return found

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics given with the save."""
        return {} if self.manifest is None else dict(self.manifest.metrics)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name."""
        from holdfast.state.entries import torch_dtype  # imports torch

        with telling_apart(self._source):
            stored = sorted(self._source.tensors.items())
        return {
            name: TensorInfo(
                tensor.shape,
                torch_dtype(tensor.dtype),
                whole(tensor.shape).volume * tensor.itemsize,
                tuple(shard.box for shard in tensor.shards),
            )
            for name, tensor in stored
        }

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """Every stored plain object by name; read, verified and decoded when it is asked for."""
        return _Objects(self._source)

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        """Tensor ``name``, whole or the part that ``index`` names, verified, in new host memory.

        index: slices (step 1) or integers, one for each leading dimension, with `...` for dimensions between; only the
        extents that hold the part are read.
        Raises `CheckpointNotFound` for an unknown name, `ConfigError`, `CheckpointCorrupt`, `StorageError`;
        `CheckpointReplaced` if another save has taken its place and what was opened is no longer there.
        """
        from holdfast.loader.read import read_boxes  # imports torch

        box, shape = _box_of(name, self._stored(name).shape, index)
        with telling_apart(self._source):
            return read_boxes(self._source, [(name, box)])[0].reshape(shape)

    def map(self, name: str, *, verify: bool = False) -> torch.Tensor:
        """Tensor ``name`` as a view of its file: nothing is read before it is used, processes share the memory.

        For looking, not for training: what is written to the view stays in this process. The view lives as long as
        somebody holds it, also when the checkpoint is deleted meanwhile (its disk space is then freed at the end); on a
        network file system a deletion from another host makes reading it crash: `CheckpointManager.pin` the step.
        verify: read all of it now and match it with its checksums; otherwise nothing is verified.

        Raises `ConfigError` for a tensor that isn't in one piece in the file (saved in shards, or not by Holdfast):
        `read` that. Else as `read`.
        """
        import torch

        from holdfast.staging.image import tensor_over
        from holdfast.state.entries import torch_dtype

        stored = self._stored(name)
        dtype = torch_dtype(stored.dtype)
        if 0 in stored.shape:
            return torch.empty(stored.shape, dtype=dtype)
        shard = stored.shards[0]
        if is_store(self.path):
            raise ConfigError(f"{self.path}: {name} can't be mapped: it is on an object store; read it", field="name")
        if self.manifest is not None and self.manifest.chain:
            raise ConfigError(f"{self.path}: {name} can't be mapped: it is stored as a delta; read it", field="name")
        if self._source.records is not None or shard.box != whole(stored.shape):
            why = f"it is in {len(stored.shards)} shards" if self._source.checksummed else "Holdfast didn't write it"
            raise ConfigError(f"{self.path}: {name} can't be mapped: {why}; read it", field="name")
        start, end = shard.payload_offset, shard.payload_offset + shard.nbytes
        if start % stored.itemsize:
            raise ConfigError(f"{self.path}: {name} can't be mapped: it begins at byte {start}; read it", field="name")
        with telling_apart(self._source), self._source.open_files(verify=verify) as files:
            if verify:
                for at in range(start, end, SPAN_BYTES):
                    files.read_span(shard.file, at, min(end, at + SPAN_BYTES))
            if shard.file not in self._maps:
                self._maps[shard.file] = tensor_over(files.map(shard.file))
        return self._maps[shard.file][start:end].view(dtype).reshape(stored.shape)

    def _stored(self, name: str) -> StoredTensor:
        with telling_apart(self._source):
            stored = self._source.tensors.get(name)
        if stored is None:
            raise CheckpointNotFound(
                f"{self.path} has no tensor {name!r}; it has {len(self._source.tensors)}, see Checkpoint.tensors",
                path=self.path,
                step=self.step,
            )
        return stored

    def write_dcp_metadata(self) -> str:
        """Make the directory one that stock ``dcp.load`` reads; returns the path of its ``.metadata``, when durable.

        A checkpoint has one from the start unless it is large: stock DCP lists every tensor of every rank in it, which
        takes gigabytes, and minutes to load, for thousands of ranks. This makes it from the reports: some 20 us and two
        kilobytes of memory for each such row. Nothing that was committed is changed; a ``.metadata`` that is there
        already stays, and `verify` says whether it is right. Raises `CheckpointCorrupt`, `StorageError`.
        """
        path = os.path.join(self.path, METADATA_NAME)
        if isinstance(self._source, HFSource) or (self.manifest is not None and self.manifest.kind == "export"):
            raise ConfigError(
                f"{self.path} is a Hugging Face directory; stock DCP reads it with its HuggingFaceStorageReader",
                field="path",
            )
        if self.manifest is not None and self.manifest.chain:
            raise ConfigError(
                f"{self.path} is a delta to {self.manifest.chain[0].name}, which stock DCP can't read: load this one "
                "with Holdfast and save it anew, or read an anchor",
                field="path",
            )
        if not isinstance(self._source, HoldfastSource):
            return path  # stock DCP wrote it
        source = self._source
        if not source.has_committed_metadata and not source.has_entry(METADATA_NAME):
            fresh = f"{METADATA_NAME}.{secrets.token_hex(6)}"
            with telling_apart(source):
                data = source.render_dcp_metadata()
            if isinstance(source, ObjectSource):
                source.place.storage.replace_file(source.place.key(METADATA_NAME), data, by=fresh)
            else:
                open_storage(self.path).replace_file(METADATA_NAME, data, by=fresh)
        return path

    def verify(self, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
        """Read every byte and compare it with its checksum; returns what is wrong, and raises nothing for it.

        If another save takes its place meanwhile, what was opened is what is verified.
        progress: called with (bytes done, bytes in all) now and then, on the calling thread.
        """
        try:
            source = self._given.fresh()
        except HoldfastError as error:
            return VerifyReport(
                ok=False, files=0, nbytes=0, checksummed=self._given.checksummed, problems=(problem_of(error),)
            )
        report = verify_source(source, progress)
        became = None if report.ok else source.what_became()
        return report if became is None else replace(report, problems=(problem_of(became),))


def source_of(checkpoint: Checkpoint) -> CheckpointSource:
    """Return the source that ``checkpoint`` reads from, for internal use."""
    return checkpoint._source  # noqa: SLF001 - of this module: users have no name for it


class _Objects(Mapping[str, Any]):
    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            with telling_apart(self._source):
                self._loaded[name] = read_objects(self._source, [self._source.objects[name].name])[name]
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._source.objects))

    def __len__(self) -> int:
        return len(self._source.objects)


class ObjectRead:
    """Job: read the record of one stored object, through ``files``."""

    def __init__(self, files: FileReads, path: str, place: StoredObject) -> None:
        self._files = files
        self._path = path
        self._place = place
        self._record = b""
        self.name = place.name
        self.file = place.file

    def __call__(self) -> None:
        place = self._place
        self._record = bytes(self._files.read_span(place.file, place.offset, place.offset + place.nbytes))

    def needs(self) -> Iterator[tuple[str, int, int]]:
        place = self._place
        yield place.file, place.offset, place.offset + place.nbytes

    def decoded(self) -> Any:
        """Return the object, once it has been read. Raises `CheckpointCorrupt`."""
        from holdfast.format.objects import load_object  # imports numpy and torch

        return load_object(self._record, name=self._place.name, path=self._path)


def object_reads(source: CheckpointSource, names: Iterable[str], files: FileReads) -> dict[str, ObjectRead]:
    """Return the jobs that read the stored objects ``names``, by name."""
    # In the order of the files: records that share an extent are read with it, once.
    places = sorted((source.objects[name] for name in names), key=lambda place: (place.file, place.offset))
    return {place.name: ObjectRead(files, os.path.join(source.directory, place.file), place) for place in places}


def read_objects(source: CheckpointSource, names: Sequence[str], *, verify: bool = True) -> dict[str, Any]:
    """Read, verify and decode the stored objects ``names``."""
    found: dict[str, Any] = {}
    with source.open_files(verify=verify) as files:
        jobs = object_reads(source, names, files)

        def read(some: Iterable[ObjectRead]) -> None:
            for job in some:
                job()
                found[job.name] = job.decoded()

        of_file = groupby(jobs.values(), key=lambda job: job.file)
        take_turns([partial(read, list(some)) for _, some in of_file], files.spans_at_a_time)
    events.count("bytes_read", files.bytes_read)
    return {name: found[name] for name in jobs}


def _box_of(name: str, shape: tuple[int, ...], index: Index | None) -> tuple[Box, tuple[int, ...]]:
    """The box an index names, and the shape of the result (integers drop their dimension)."""
    given: tuple[Any, ...] = () if index is None else index if isinstance(index, tuple) else (index,)
    dots = [at for at, part in enumerate(given) if part is ...]
    parts = [part for part in given if part is not ...]
    if len(parts) > len(shape) or len(dots) > 1:
        raise ConfigError(f"{name} has {len(shape)} dimensions; the index has {len(given)}", field="index")
    after = len(parts) - dots[0] if dots else 0
    parts[len(parts) - after : len(parts) - after] = [slice(None)] * (len(shape) - len(parts))
    offsets, sizes, result = [], [], []
    for dim, (part, size) in enumerate(zip(parts, shape, strict=True)):
        try:
            at, stop, step = part.indices(size) if isinstance(part, slice) else (operator.index(part), None, 1)
        except (TypeError, ValueError) as error:
            what = f"{name}: a slice of step 1 or an integer is needed for dimension {dim}, not {part!r}"
            raise ConfigError(what, field="index") from error
        if step != 1 or isinstance(part, bool):
            raise ConfigError(
                f"{name}: only slices of step 1 can be read, not {part}, in dimension {dim}", field="index"
            )
        if stop is None:
            if not -size <= at < size:
                raise ConfigError(f"{name}: index {part} is outside dimension {dim} of size {size}", field="index")
            offsets.append(at % size)
            sizes.append(1)
        else:
            offsets.append(at)
            sizes.append(max(0, stop - at))
            result.append(sizes[-1])
    return Box(tuple(offsets), tuple(sizes)), tuple(result)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at ``path``, or the newest one of a manager's root; read-only, no process group needed.

    Raises `CheckpointNotFound`, `CheckpointCorrupt`, `StorageError`.
    """
    return Checkpoint(open_source(os.fspath(path)))
