"""A published checkpoint, read-only: what it holds, any part of it, and whether every byte is right.

`Checkpoint` is what saves return and `holdfast.open` gives. Opening decodes the manifest only; reports are decoded
when something of theirs is asked for. Directories written by stock ``dcp.save`` open too (see ``foreign``), and those
of Hugging Face models (see ``hf_source``): they have no checksums, so `verify` can say only that nothing is missing.
What an export's handle gives is one too: wherever a path is taken, such as by ``from_pretrained``, it is that path.

Guarantees: never writes, locks or recovers; no process group needed; whatever is returned was verified, but for what
`Checkpoint.map` says of itself.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from holdfast.boxes import Box, whole
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError, StorageError
from holdfast.format.manifest import METADATA_NAME
from holdfast.format.objects import load_object
from holdfast.hf_source import HFSource
from holdfast.opening import PublishedExport, open_source
from holdfast.reading import read_boxes
from holdfast.source import HoldfastSource
from holdfast.state.entries import torch_dtype
from holdfast.storage.local import LocalStorage
from holdfast.verifying import SPAN_BYTES, Problem, VerifyReport, problem_of, verify_source

if TYPE_CHECKING:
    import mmap

    from holdfast.format.manifest import Manifest
    from holdfast.plan.read import StoredTensor
    from holdfast.source import Source

Index = tuple[slice | int, ...] | slice | int

__all__ = [
    "Checkpoint",
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
    """One stored tensor: global ``shape``, ``dtype``, ``nbytes`` of the whole, and the boxes it is stored in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    shards: tuple[Box, ...]


class Checkpoint:
    """One published checkpoint or export. Cheap to make; safe to share between threads; as a path it is its directory.

    Of an export, tensors have the names and dtypes that they were exported with.
    """

    def __init__(self, source: Source | PublishedExport) -> None:
        self._given = source
        self._maps: dict[str, mmap.mmap] = {}

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} path={self.path!r}>"

    def __str__(self) -> str:
        return self.path  # as ``from_pretrained`` makes a string of whatever it is given

    def __fspath__(self) -> str:
        return self.path

    @cached_property
    def _source(self) -> Source:
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
        """What was committed; None for a directory that Holdfast did not write."""
        return self._source.manifest

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics given with the save."""
        return {} if self.manifest is None else dict(self.manifest.metrics)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name."""
        return {
            name: TensorInfo(
                tensor.shape,
                torch_dtype(tensor.dtype),
                whole(tensor.shape).volume * tensor.itemsize,
                tuple(shard.box for shard in tensor.shards),
            )
            for name, tensor in sorted(self._source.tensors.items())
        }

    @cached_property
    def objects(self) -> Mapping[str, Any]:
        """Every stored plain object by name; read, verified and decoded when it is asked for."""
        return _Objects(self._source)

    def read(self, name: str, index: Index | None = None) -> torch.Tensor:
        """Tensor ``name``, whole or the part that ``index`` names, verified, in new host memory.

        index: slices (step 1) or integers, one for each leading dimension, with `...` for dimensions between; only the
        extents that hold the part are read.
        Raises `CheckpointNotFound` for an unknown name, `ConfigError`, `CheckpointCorrupt`, `StorageError`.
        """
        box, shape = _box_of(name, self._stored(name).shape, index)
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
        stored = self._stored(name)
        dtype = torch_dtype(stored.dtype)
        if 0 in stored.shape:
            return torch.empty(stored.shape, dtype=dtype)
        shard = stored.shards[0]
        if self._source.records is not None or shard.box != whole(stored.shape):
            why = f"it is in {len(stored.shards)} shards" if self._source.checksummed else "Holdfast didn't write it"
            raise ConfigError(f"{self.path}: {name} can't be mapped: {why}; read it", field="name")
        start, end = shard.payload_offset, shard.payload_offset + shard.nbytes
        if start % stored.itemsize:
            raise ConfigError(f"{self.path}: {name} can't be mapped: it begins at byte {start}; read it", field="name")
        with self._source.open_files(verify=verify) as files:
            if verify:
                for at in range(start, end, SPAN_BYTES):
                    files.read_span(shard.file, at, min(end, at + SPAN_BYTES))
            if shard.file not in self._maps:
                self._maps[shard.file] = files.map(shard.file)
        flat = torch.frombuffer(self._maps[shard.file], dtype=torch.uint8, count=shard.nbytes, offset=start)
        return flat.view(dtype).reshape(stored.shape)

    def _stored(self, name: str) -> StoredTensor:
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
        if not isinstance(self._source, HoldfastSource):
            return path  # stock DCP wrote it
        if not self._source.has_committed_metadata and not os.path.lexists(path):
            fresh = f"{METADATA_NAME}.{secrets.token_hex(6)}"
            data = self._source.render_dcp_metadata()
            storage = LocalStorage(self.path)
            try:
                storage.write_file(fresh, data)
                storage.rename(fresh, METADATA_NAME)
            except StorageError:
                with contextlib.suppress(StorageError):
                    storage.unlink(fresh)
                raise
            storage.sync_dir("")
        return path

    def verify(self, progress: Callable[[int, int], object] | None = None) -> VerifyReport:
        """Read every byte and compare it with its checksum; returns what is wrong, and raises nothing for it.

        progress: called with (bytes done, bytes in all) now and then, on the calling thread.
        """
        try:
            source = self._given.fresh()
        except HoldfastError as error:
            return VerifyReport(
                ok=False, files=0, nbytes=0, checksummed=self._given.checksummed, problems=(problem_of(error),)
            )
        return verify_source(source, progress)


def source_of(checkpoint: Checkpoint) -> Source:
    """Where what ``checkpoint`` gives comes from: for what Holdfast makes of it."""
    return checkpoint._source  # noqa: SLF001 - of this module: users have no name for it


class _Objects(Mapping[str, Any]):
    def __init__(self, source: Source) -> None:
        self._source = source
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = read_objects(self._source, [self._source.objects[name].name])[name]
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._source.objects))

    def __len__(self) -> int:
        return len(self._source.objects)


def read_objects(source: Source, names: Sequence[str], *, verify: bool = True) -> dict[str, Any]:
    """The stored objects ``names``, verified and decoded."""
    found: dict[str, Any] = {}
    with source.open_files(verify=verify) as files:
        # In the order of the files: records that share an extent are read with it, once.
        for name in sorted(names, key=lambda name: (source.objects[name].file, source.objects[name].offset)):
            place = source.objects[name]
            record = files.read_span(place.file, place.offset, place.offset + place.nbytes)
            found[name] = load_object(bytes(record), name=name, path=files.path_of(place.file))
    return found


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
