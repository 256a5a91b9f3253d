"""Directories of Hugging Face's form, read as a `Source`: ``model.safetensors``, or shards with their index.

Anything that ``save_pretrained`` or Holdfast's own export wrote, or that ``huggingface_hub`` downloaded (its cache
keeps links to the files; they are followed). Tensors have the names that the files give them; what these are in a state
is found by ``hf_fitting``.

Guarantees: opening reads headers only, and checks them against the files and the index. Of a directory that Holdfast
published, which has ``holdfast.json`` beside the files, everything is matched with its checksums, headers too; of any
other, exactly the bytes that were asked for are read, and no others.
Assumes: nobody writes to the files meanwhile. There are no checksums in the format: where Holdfast didn't write them,
bytes that a disk has garbled are found only where they break a header.
Does not: read ``pytorch_model.bin``, adapters, or any other file of the directory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from holdfast.boxes import whole
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, HoldfastError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.format.safetensors_header import (
    INDEX_BYTES_MAX,
    INDEX_NAME,
    LENGTH_BYTES,
    WEIGHTS_NAME,
    Header,
    header_length,
    parse_header,
    parse_index,
    torch_name,
)
from holdfast.plan.read import StoredShard, StoredTensor
from holdfast.source import READ_THREADS, HoldfastSource, StoredObject, open_holdfast
from holdfast.storage.descriptors import StoredFile, refused
from holdfast.storage.plain import open_plain, read_at
from holdfast.storage.reading import FileSet
from holdfast.storage.turns import take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.export.refill import MovedTensor
    from holdfast.format.manifest import Manifest
    from holdfast.format.safetensors_header import HeaderTensor
    from holdfast.plan.structure import PathItem

FIRST_READ_BYTES: Final = 64 << 10
"""Most headers fit: then one read is enough."""


@dataclass(slots=True)
class HFSource:
    """What the headers of a Hugging Face directory say, as a load needs it. Make it by `open_hf`."""

    directory: str
    committed: HoldfastSource | None = None
    """What Holdfast committed here, if it did."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    """None: a model is all there is."""
    paths: dict[str, tuple[PathItem, ...]] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    moved: Mapping[str, MovedTensor] = field(default_factory=dict)
    """Fitted to a state: tensors of ``tensors`` whose elements lie elsewhere, in another order."""
    optional: frozenset[str] = frozenset()
    """Fitted to a state: what keeps its value where nothing is stored for it."""
    hint: str = ""
    """Fitted to a state: why something may not fit."""

    @property
    def manifest(self) -> Manifest | None:
        """That of an export by Holdfast."""
        return None if self.committed is None else self.committed.manifest

    @property
    def step(self) -> int | None:
        """The step that was exported, where it was noted."""
        return None if self.committed is None else self.committed.step

    @property
    def world(self) -> int | None:
        """How many ranks exported it, where it was noted."""
        return None if self.committed is None else self.committed.world

    @property
    def checksummed(self) -> bool:
        """Whether what is read can be matched with checksums."""
        return self.committed is not None

    @property
    def records(self) -> None:
        """Payloads are read in place."""

    @property
    def readable_files(self) -> Mapping[str, StoredFile]:
        """All of them: one that can't be read can't be opened either."""
        return self.files if self.committed is None else self.committed.readable_files

    def check_listing(self) -> list[HoldfastError]:
        """What is wrong with the files that Holdfast committed beside those of weights.

        Headers, sizes and the index were checked when it was opened.
        """
        return [] if self.committed is None else self.committed.check_listing()

    def raise_for_listing(self, *, verify: bool) -> None:
        """As that of `HoldfastSource`."""
        if self.committed is not None:
            self.committed.raise_for_listing(verify=verify)

    def fresh(self) -> HFSource:
        """What is there now, read and checked again."""
        if self.committed is not None:
            return open_committed_hf(self.committed.fresh())
        return open_hf(self.directory)

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        """Its files; see `FileSet`."""
        if self.committed is not None:
            return self.committed.file_set(
                self.readable_files, verify=verify, blame=self._blame, direct=direct, gap_bytes_max=0
            )
        return FileSet(
            self.directory,
            self.readable_files,
            verify=False,
            threads=READ_THREADS,
            blame=self._blame,
            direct=direct,
            gap_bytes_max=0,
            links=True,  # what Holdfast publishes has none
        )

    def _blame(self, file: str, start: int, end: int) -> str | None:
        """The tensor that lies in a range of a file, if it is only one."""
        found = [
            name
            for name, tensor in self.tensors.items()
            for shard in tensor.shards
            if shard.file == file and shard.payload_offset < end and start < shard.payload_offset + shard.nbytes
        ]
        return found[0] if len(found) == 1 else None


def has_hf_model(directory: str) -> bool:
    """Whether there are safetensors files here by the names that ``from_pretrained`` looks for."""
    return any(os.path.isfile(os.path.join(directory, name)) for name in (WEIGHTS_NAME, INDEX_NAME))


def open_hf(directory: str) -> HFSource:
    """The model in ``directory``; of a single file and an index, the file, as ``from_pretrained`` has it.

    Raises `CheckpointCorrupt` for headers or an index that make no sense, `StorageError`; `CheckpointNotFound` where
    there is neither.
    """
    is_committed = os.path.lexists(os.path.join(directory, MANIFEST_NAME))
    if is_committed and (has_hf_model(directory) or os.path.lexists(os.path.join(directory, INDEX_NAME))):
        return open_committed_hf(open_holdfast(directory))
    if os.path.isfile(os.path.join(directory, WEIGHTS_NAME)):
        return _assembled(HFSource(directory), [WEIGHTS_NAME], None)
    if os.path.lexists(os.path.join(directory, INDEX_NAME)):
        path = os.path.join(directory, INDEX_NAME)
        index = parse_index(_read_whole(directory, INDEX_NAME, limit=INDEX_BYTES_MAX), path=path)
        return _assembled(HFSource(directory), sorted(set(index.values())), index)
    raise CheckpointNotFound(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}", path=directory)


def open_committed_hf(committed: HoldfastSource) -> HFSource:
    """The model of an export that Holdfast published, wherever it lies; raises as `open_hf`."""
    index = None
    names = [WEIGHTS_NAME]
    if not committed.has_file(WEIGHTS_NAME):
        path = os.path.join(committed.directory, INDEX_NAME)
        index = parse_index(committed.read_committed(INDEX_NAME, INDEX_BYTES_MAX), path=path)
        names = sorted(set(index.values()))
    source = HFSource(committed.directory, committed)
    source.files.update(_committed_files(committed, names))
    return _assembled(source, names, index)


def _assembled(source: HFSource, names: Sequence[str], index: Mapping[str, str] | None) -> HFSource:
    """``source`` with the tensors of files ``names``, by their headers and the index."""
    headers = _read_headers(source, names, listed=index is not None)
    for name in names:
        header, size = headers[name]
        source.files.setdefault(name, StoredFile(name, size, None))
        for tensor in header.tensors:
            if index is None or index.get(tensor.name, name) == name:  # else a leftover: it is elsewhere, by the index
                _add(source, name, tensor)
    if index is not None:
        _require_all(source, index, headers)
    return source


def _committed_files(committed: HoldfastSource, names: Iterable[str]) -> Iterator[tuple[str, StoredFile]]:
    for name in names:
        file = committed.files.get(name)
        if file is None:
            path = os.path.join(committed.directory, name)
            raise CheckpointCorrupt(f"{path} was not committed with the export that it lies in", path=path)
        yield name, file


def _add(source: HFSource, file: str, tensor: HeaderTensor) -> None:
    path = os.path.join(source.directory, file)
    if (known := source.tensors.get(tensor.name)) is not None:
        other = known.shards[0].file if known.shards else "another file"
        raise CheckpointCorrupt(
            f"{path}: tensor {tensor.name!r} is in {other} too, and {INDEX_NAME} doesn't say which of them counts",
            path=path,
            tensor=tensor.name,
        )
    dtype = torch_name(tensor.dtype, name=tensor.name, path=path)
    nbytes = tensor.end - tensor.start
    shards = (StoredShard(whole(tensor.shape), file, tensor.start, nbytes),) if nbytes else ()
    source.tensors[tensor.name] = StoredTensor(tensor.name, dtype, tensor.shape, shards)


def _require_all(source: HFSource, index: Mapping[str, str], headers: Mapping[str, tuple[Header, int]]) -> None:
    """Every tensor of the index is in the file that it names."""
    has = {file: {tensor.name for tensor in header.tensors} for file, (header, _) in headers.items()}
    absent = [name for name, file in index.items() if name not in has[file]]
    if absent:
        path = os.path.join(source.directory, index[absent[0]])
        raise CheckpointCorrupt(
            f"{path} has no tensor {absent[0]!r}, but {INDEX_NAME} says so"
            + (f" ({len(absent)} tensors are missing like this)" if len(absent) > 1 else "")
            + ": the files are not of one model, or one of them was replaced",
            path=path,
            tensor=absent[0],
        )


def _read_headers(source: HFSource, names: Iterable[str], *, listed: bool) -> dict[str, tuple[Header, int]]:
    """Of each file its header and its size; a few files at a time, for on a network each takes a while."""
    found: dict[str, tuple[Header, int]] = {}

    def read(name: str) -> None:
        if source.committed is not None:
            file = source.committed.files[name]
            found[name] = _parsed(lambda start, end: _span(files, name, start, end), file.size, files.path_of(name))
        else:
            found[name] = _read_header(source.directory, name, listed=listed)

    with source.open_files(verify=True) as files:
        take_turns([lambda name=name: read(name) for name in names], READ_THREADS)  # type: ignore[misc]
    return found


def _span(files: FileSet, name: str, start: int, end: int) -> bytes:
    return bytes(files.read_span(name, start, end))


def _read_header(directory: str, name: str, *, listed: bool) -> tuple[Header, int]:
    path = os.path.join(directory, name)
    fd = _open(directory, name, why=f"{INDEX_NAME} names it" if listed else "it was there a moment ago")
    try:
        size = os.fstat(fd).st_size
        return _parsed(lambda start, end: _pread(fd, end - start, start, path), size, path)
    finally:
        os.close(fd)


def _parsed(read: Callable[[int, int], bytes], size: int, path: str) -> tuple[Header, int]:
    """The header of a file, of which ``read`` gives a range."""
    first = read(0, min(FIRST_READ_BYTES, size))
    length = header_length(first[:LENGTH_BYTES], file_size=size, path=path)
    data = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(data) < length:
        data += read(LENGTH_BYTES + len(data), LENGTH_BYTES + length)
    if len(data) < length:
        raise CheckpointCorrupt(f"{path} became shorter while its header was read", path=path)
    return parse_header(data, file_size=size, path=path), size


def _read_whole(directory: str, name: str, *, limit: int) -> bytes:
    path = os.path.join(directory, name)
    fd = _open(directory, name, why="it was there a moment ago")
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CheckpointCorrupt(f"{path} has {size:,} bytes; an index has at most {limit:,}", path=path)
        return _pread(fd, size, 0, path)
    finally:
        os.close(fd)


def _open(directory: str, name: str, *, why: str) -> int:
    path = os.path.join(directory, name)
    try:
        return open_plain(directory, name, links=True)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} is missing; {why}", path=path) from error
    except OSError as error:
        raise refused(path, error) from error


def _pread(fd: int, nbytes: int, offset: int, path: str) -> bytes:
    try:
        return read_at(fd, offset, nbytes)
    except OSError as error:
        raise refused(path, error) from error
