"""Directories that stock DCP wrote: ``dcp.save``, torchtitan, XTuner; read as a `Source`.

A stock directory is a pickled ``.metadata`` and files of ``torch.save`` records. The metadata goes through the
allow-list unpickler of ``format.dcp_metadata``, small records through that of ``format.objects``, large ones through
``torch.load(weights_only=True)``: nothing in them is executed.
XTuner's older layout, ``model/`` and ``optimizer/`` side by side, is opened as one checkpoint with names under those
keys; its newer one is a single directory ``weights/``.

There are no checksums in such a directory: what a disk has garbled is found only where it breaks the format.
"""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast import _torch_compat as compat
from holdfast.boxes import Box
from holdfast.catalog.root import MERGED_DIRECTORY, SPLIT_KEYS
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, HoldfastError
from holdfast.format.dcp_metadata_reader import StockExtras, read_stock
from holdfast.format.manifest import METADATA_NAME, Manifest
from holdfast.format.objects import read_object
from holdfast.format.pickles import PickleRefused
from holdfast.format.torch_record import MalformedRecord
from holdfast.loader.sources.holdfast import Place, StoredObject
from holdfast.loader.sources.places import DirectoryFiles, open_directory
from holdfast.plan.read import StoredShard, StoredTensor
from holdfast.storage.files import StoredFile, what_became

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.errors import CheckpointNotFound
    from holdfast.format.structure import PathItem
    from holdfast.loader.sources.places import FilePlace
    from holdfast.plan.read import Transfer
    from holdfast.storage.files import OpenedDirectory
    from holdfast.storage.ranged_reads import FileSet

METADATA_BYTES_MAX: Final = 8 << 30
SMALL_RECORD_BYTES: Final = 1 << 20
"""Up to here a record is read whole and decoded by the reader of plain objects, in a quarter of torch's time."""
UNBACKED_BYTES_MAX: Final = 64 << 20
"""A shard may be larger than its record: old writers stored expanded tensors as they are. Not by more than this."""


@dataclass(slots=True)
class ForeignSource:
    """A stock ``.metadata`` as a source of loads."""

    place: FilePlace
    step: int | None = None
    manifest: Manifest | None = None
    world: int | None = None
    checksummed: bool = False
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    paths: dict[str, tuple[PathItem, ...]] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    lengths: dict[tuple[str, int], int] = field(default_factory=dict)
    """Length of the record at each (file, offset)."""
    extras: StockExtras | None = None
    """What else its one ``.metadata`` says; None where there are several."""

    @property
    def directory(self) -> str:
        """Its path or URL."""
        return self.place.directory

    @property
    def opened(self) -> OpenedDirectory | None:
        """The open directory that it is read through, if it is one."""
        return self.place.opened

    def what_became(self) -> CheckpointNotFound | None:
        """The error for a directory that was replaced or deleted; objects of others don't tell."""
        return None if self.opened is None else what_became(self.opened)

    def check_listing(self) -> list[HoldfastError]:
        """Files that records need and that are not there, or too short."""
        needed = dict.fromkeys(self.files, 0)
        for (name, at), length in self.lengths.items():
            needed[name] = max(needed[name], at + length)
        return [
            CheckpointCorrupt(
                f"{os.path.join(self.directory, name)} is missing or shorter than its records need",
                path=os.path.join(self.directory, name),
            )
            for name, file in self.files.items()
            if file.size < needed[name]
        ]

    def strangers(self) -> list[str]:
        """None that could be told: nothing was committed."""
        return []

    def places(self) -> Iterator[Place]:
        for name, tensor in self.tensors.items():
            for shard in tensor.shards:
                at = shard.payload_offset
                yield Place(name, shard.box.offsets, shard.file, at, self.lengths[shard.file, at])
        for name, item in self.objects.items():
            yield Place(name, None, item.file, item.offset, item.nbytes)

    @property
    def readable_files(self) -> dict[str, StoredFile]:
        """All that its metadata names."""
        return self.files

    def fresh(self) -> ForeignSource:
        """Return itself: sizes are compared with the metadata as it was when opened."""
        return self

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        """Its files; there is nothing to verify them with."""
        del verify, direct
        return self.place.file_set(self.files, verify=False, blame=_nobody)

    @property
    def records(self) -> ForeignSource:
        """This object, which reads its own records."""
        return self

    def load(self, files: FileSet, shard: Transfer) -> torch.Tensor:
        """The tensor in the record of ``shard``."""
        name, offset, sizes = shard.name, shard.payload_offset, shard.stored.sizes
        path = files.path_of(shard.file)
        end = offset + self.lengths[shard.file, offset]
        try:
            value = _decode(files, shard.file, offset, end)
        except HoldfastError:
            raise
        except Exception as error:
            raise CheckpointCorrupt(
                f"{path}: the record of {name} at byte {offset} can't be read: {error}",
                path=path,
                tensor=name,
                byte_range=(offset, end),
            ) from error
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != sizes:
            found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointCorrupt(
                f"{path}: the record of {name} at byte {offset} should have shape {sizes}, it has {found}",
                path=path,
                tensor=name,
                byte_range=(offset, end),
            )
        return value


def _decode(files: FileSet, name: str, start: int, end: int) -> Any:
    """Decode the record at these bytes of a file."""
    if end - start <= SMALL_RECORD_BYTES:
        try:
            return read_object(files.read_span(name, start, end))
        except (PickleRefused, MalformedRecord):
            pass  # a tensor of a kind that only torch knows, or nothing that anybody reads: torch says which
    record = cast("IO[bytes]", _Record(files, name, start, end))
    with zipfile.ZipFile(record) as archive:
        listed = archive.infolist()
    # A few bytes must not become many: nothing is compressed, and no two entries are the same bytes.
    if any(entry.compress_type for entry in listed) or sum(entry.file_size for entry in listed) > end - start:
        raise MalformedRecord("it is compressed, or claims more than it has")
    record.seek(0)
    return torch.load(record, map_location="cpu", weights_only=True)


class _Record(io.RawIOBase):
    """One record of a file, as a file of its own: ``torch.load`` reads storages from it straight into tensors."""

    def __init__(self, files: FileSet, name: str, start: int, end: int) -> None:
        super().__init__()
        self._files, self._name, self._start, self._end = files, name, start, end
        self._at = start

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: self._start, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        self._at = min(max(base + offset, self._start), self._end)
        return self.tell()

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer).cast("B")
        memory = memory[: min(len(memory), self._end - self._at)]
        self._files.read_unverified(self._name, self._at, memory)
        self._at += len(memory)
        return len(memory)


def find_foreign(place: str | FilePlace) -> ForeignSource | None:
    """The stock checkpoint in a directory, in any of the layouts known here; None if there is none."""
    if isinstance(place, str):
        if _has_metadata(place, "") or all(_has_metadata(place, key) for key in SPLIT_KEYS):
            return find_foreign(DirectoryFiles(open_directory(place)))
        if _has_metadata(place, MERGED_DIRECTORY):
            return find_foreign(os.path.join(place, MERGED_DIRECTORY))
        return None
    source = ForeignSource(place)
    data = _metadata_at(place, "")
    if data is not None:
        source.extras = _add(source, "", (), data)
        return source
    parts = {key: _metadata_at(place, key) for key in SPLIT_KEYS}
    for key, part in parts.items():
        if part is None:
            return None
        _add(source, key, (key,), part)
    return source


def _has_metadata(directory: str, below: str) -> bool:
    return os.path.isfile(os.path.join(directory, below, METADATA_NAME))


def _metadata_at(place: FilePlace, below: str) -> bytes | None:
    return place.read_whole(os.path.join(below, METADATA_NAME), METADATA_BYTES_MAX)


def _add(source: ForeignSource, below: str, key: tuple[str, ...], data: bytes) -> StockExtras:
    """Add what the ``.metadata`` of subdirectory ``below`` lists; names get ``key`` in front unless they carry it.

    Returns what else it says.
    """
    name = os.path.join(below, METADATA_NAME)
    path = os.path.join(source.directory, name)
    metadata, extras = read_stock(data, path=path)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    names = list(metadata.state_dict_metadata)
    prefix = key if key and not all(name.startswith(f"{key[0]}.") for name in names) else ()
    places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    rows = metadata.storage_data or {}
    named = {os.path.join(below, info.relative_path) for info in rows.values()}
    source.files.update(
        (file, StoredFile(file, -1 if size is None else size, None)) for file, size in source.place.sizes(named).items()
    )
    for index, info in rows.items():
        if getattr(info, "transform_descriptors", None):
            raise CheckpointCorrupt(
                f"{path}: {index.fqn} was written through a transform ({info.transform_descriptors}); "
                "read it with the writer's own reader",
                path=path,
                tensor=index.fqn,
            )
        file = os.path.join(below, info.relative_path)
        offset = None if index.offset is None else tuple(index.offset)
        places[index.fqn, offset] = (file, info.offset, info.length)
        source.lengths[file, info.offset] = info.length
    for name in names:
        entry = metadata.state_dict_metadata[name]
        stored = ".".join((*prefix, name))
        stored_path = tuple(paths.get(name, (name,)))
        source.paths[stored] = (*prefix, *stored_path)
        if not isinstance(entry, TensorStorageMetadata):
            file, at, length = _place(places, path, name, None)
            source.objects[stored] = StoredObject(stored, file, at, length)
            continue
        dtype = compat.dtype_name(entry.properties.dtype)
        shards = []
        itemsize = ITEMSIZE.get(dtype, 0)  # of a dtype that is unknown here `StoredTensor` says so
        for chunk in entry.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            file, at, length = _place(places, path, name, box.offsets)
            if box.volume * itemsize > max(length, UNBACKED_BYTES_MAX):
                raise CheckpointCorrupt(
                    f"{path}: {name} at {box.offsets} should have {box.volume * itemsize:,} bytes, but its "
                    f"record has {length:,}",
                    path=path,
                    tensor=name,
                )
            shards.append(StoredShard(box, file, at, box.volume * itemsize))
        source.tensors[stored] = StoredTensor(stored, dtype, tuple(entry.size), tuple(shards))
    return extras


def _place(
    places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]],
    path: str,
    name: str,
    offsets: tuple[int, ...] | None,
) -> tuple[str, int, int]:
    # Plain tensors may be listed without an offset by old writers.
    place = places.get((name, offsets)) or places.get((name, None))
    if place is None:
        raise CheckpointCorrupt(f"{path} lists {name} at {offsets}, but has no record for it", path=path, tensor=name)
    return place


def _nobody(_file: str, _start: int, _end: int) -> None:
    """Name no tensor: without checksums no range is ever found damaged."""
