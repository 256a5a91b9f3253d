"""Directories of Hugging Face's form, read as a `Source`: ``model.safetensors``, or shards with their index.

Anything that ``save_pretrained`` or Holdfast's own export wrote, or that ``huggingface_hub`` downloaded (its cache
keeps links to the files; they are followed). Tensors have the names that the files give them; what these are in a state
is found by ``hf_match``.

Guarantees: opening reads headers only, and checks them against the files and the index. Of a directory that Holdfast
published, which has ``holdfast.json`` beside the files, everything is matched with its checksums, headers too; of any
other, exactly the bytes that were asked for are read, and no others.
Assumes: nobody writes to the files meanwhile. There are no checksums in the format: where Holdfast didn't write them,
bytes that a disk has garbled are found only where they break a header.
Does not: read ``pytorch_model.bin``, adapters, or any other file of the directory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from holdfast.boxes import whole
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, HoldfastError
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.format.safetensors import (
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
from holdfast.loader.sources.holdfast import HoldfastSource, Place, StoredObject, open_holdfast
from holdfast.loader.sources.places import DirectoryFiles
from holdfast.plan.read import StoredShard, StoredTensor
from holdfast.storage.files import StoredFile
from holdfast.validation import is_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.format.manifest import Manifest
    from holdfast.format.safetensors import HeaderTensor
    from holdfast.format.structure import PathItem
    from holdfast.keymap.moves import MovedTensor
    from holdfast.loader.sources.places import FilePlace
    from holdfast.storage.files import OpenedDirectory
    from holdfast.storage.ranged_reads import FileSet

CONFIG_NAME: Final = "config.json"
CONFIG_BYTES_MAX: Final = 16 << 20
FIRST_READ_BYTES: Final = 64 << 10
"""Most headers fit: then one read is enough."""


@dataclass(slots=True)
class HFSource:
    """Headers of a Hugging Face directory as a source of loads. Create it with `open_hf`."""

    place: FilePlace
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
    quantized: Mapping[str, str] = field(default_factory=dict)
    """Fitted to a state: of tensors that the state may have in a longer dtype, how the directory says to read them."""
    hint: str = ""
    """Fitted to a state: why something may not fit."""

    @property
    def directory(self) -> str:
        """Its path or URL."""
        return self.place.directory

    @property
    def opened(self) -> OpenedDirectory | None:
        """The open directory that it reads through, if Holdfast published it."""
        return None if self.committed is None else self.committed.opened

    def what_became(self) -> CheckpointNotFound | None:
        """The error for what was replaced or deleted, if Holdfast published it."""
        return None if self.committed is None else self.committed.what_became()

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of an export by Holdfast."""
        return None if self.committed is None else self.committed.manifest

    @property
    def step(self) -> int | None:
        """The step that was exported, where it was noted."""
        return None if self.committed is None else self.committed.step

    @property
    def world(self) -> int | None:
        """Number of ranks that exported it, if known."""
        return None if self.committed is None else self.committed.world

    @property
    def checksummed(self) -> bool:
        """Return True if reads can be verified by checksums."""
        return self.committed is not None

    @property
    def records(self) -> None:
        """Payloads are read in place."""

    @property
    def readable_files(self) -> Mapping[str, StoredFile]:
        """All of them: one that can't be read can't be opened either."""
        return self.files if self.committed is None else self.committed.readable_files

    def quantization(self) -> str | None:
        """The method by which tensors are quantized, as ``config.json`` says; None where it doesn't, or isn't there."""
        try:
            if self.committed is not None:
                name = self.committed.name_of(CONFIG_NAME) or CONFIG_NAME
                data = self.committed.read_committed(name, CONFIG_BYTES_MAX)
            else:
                data = _read_whole(self.place, CONFIG_NAME, limit=CONFIG_BYTES_MAX)
            config = json.loads(data)
        except (HoldfastError, ValueError):
            return None
        said = config.get("quantization_config") if isinstance(config, dict) else None
        return str(said.get("quant_method", "unnamed")) if isinstance(said, dict) else None

    def check_listing(self) -> list[HoldfastError]:
        """Check the files that Holdfast committed beside the weights; return the errors.

        Headers, sizes and the index were checked when it was opened.
        """
        return [] if self.committed is None else self.committed.check_listing()

    def strangers(self) -> list[str]:
        """None: its readers take what they find, so what was added to an export is in `check_listing`."""
        return []

    def places(self) -> Iterator[Place]:
        """None: what is here are no records."""
        return iter(())

    def raise_for_listing(self, *, verify: bool) -> None:
        """Raise the first error of `check_listing`, like `HoldfastSource`."""
        if self.committed is not None:
            self.committed.raise_for_listing(verify=verify)

    def fresh(self) -> HFSource:
        """Read and check the directory again."""
        if self.committed is not None:
            return open_committed_hf(self.committed.fresh())
        return open_hf(self.place)

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        """Its files; see `FileSet`."""
        if self.committed is not None:
            return self.committed.file_set(
                self.readable_files, verify=verify, blame=self._blame, direct=direct, gap_bytes_max=0
            )
        return self.place.file_set(self.readable_files, verify=False, blame=self._blame, direct=direct, gap_bytes_max=0)

    def _blame(self, file: str, start: int, end: int) -> str | None:
        """The tensor that lies in a range of a file, if it is only one."""
        found = [
            name
            for name, tensor in self.tensors.items()
            for shard in tensor.shards
            if shard.file == file and shard.payload_offset < end and start < shard.payload_offset + shard.nbytes
        ]
        return found[0] if len(found) == 1 else None


def has_hf_model(place: str | FilePlace) -> bool:
    """Return True if the directory has safetensors files with the names that ``from_pretrained`` looks for."""
    there = _place_of(place)
    return any(there.has(name) for name in (WEIGHTS_NAME, INDEX_NAME))


def has_committed_model(committed: HoldfastSource) -> bool:
    """Return True if Holdfast committed such files, under whatever names they have in this place."""
    return any(committed.name_of(name) is not None for name in (WEIGHTS_NAME, INDEX_NAME))


def open_hf(place: str | FilePlace) -> HFSource:
    """The model in a directory; of a single file and an index, the file, as ``from_pretrained`` has it.

    Raises `CheckpointCorrupt` for headers or an index that make no sense, `StorageError`; `CheckpointNotFound` where
    there is neither.
    """
    directory = place if isinstance(place, str) else place.directory
    # Of a store it was asked for its manifest before.
    is_committed = not is_store(directory) and os.path.lexists(os.path.join(directory, MANIFEST_NAME))
    if is_committed and (has_hf_model(directory) or os.path.lexists(os.path.join(directory, INDEX_NAME))):
        return open_committed_hf(open_holdfast(directory))
    there = _place_of(place)
    if there.has(WEIGHTS_NAME):
        return _assembled(HFSource(there), [WEIGHTS_NAME], None)
    if there.has(INDEX_NAME) if is_store(directory) else os.path.lexists(os.path.join(directory, INDEX_NAME)):
        index = parse_index(_read_whole(there, INDEX_NAME, limit=INDEX_BYTES_MAX), path=_path(there, INDEX_NAME))
        return _assembled(HFSource(there), sorted(set(index.values())), index)
    raise CheckpointNotFound(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}", path=directory)


def open_committed_hf(committed: HoldfastSource) -> HFSource:
    """The model of an export that Holdfast published, wherever it lies; raises as `open_hf`."""
    index = None
    names = [committed.name_of(WEIGHTS_NAME) or WEIGHTS_NAME]
    # A file that was put into a directory, and that others would read, is an error; attempts share a place on a store.
    if names[0] not in committed.files and (is_store(committed.directory) or not committed.has_file(WEIGHTS_NAME)):
        listed = committed.name_of(INDEX_NAME) or INDEX_NAME
        path = os.path.join(committed.directory, listed)
        index = parse_index(committed.read_committed(listed, INDEX_BYTES_MAX), path=path)
        names = sorted(set(index.values()))
    source = HFSource(committed.place, committed)
    source.files.update(_committed_files(committed, names))
    return _assembled(source, names, index)


def _place_of(place: str | FilePlace) -> FilePlace:
    return DirectoryFiles(place, links=True) if isinstance(place, str) else place  # what Holdfast publishes has none


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
            raise CheckpointCorrupt(f"{path} was not committed with its export", path=path)
        yield name, file


def _add(source: HFSource, file: str, tensor: HeaderTensor) -> None:
    path = os.path.join(source.directory, file)
    if (known := source.tensors.get(tensor.name)) is not None:
        other = known.shards[0].file if known.shards else "another file"
        raise CheckpointCorrupt(
            f"{path}: tensor {tensor.name!r} is in {other} too, and {INDEX_NAME} doesn't say which one to use",
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
            + ": the files do not belong to one model, or one of them was replaced",
            path=path,
            tensor=absent[0],
        )


def _read_headers(source: HFSource, names: Iterable[str], *, listed: bool) -> dict[str, tuple[Header, int]]:
    """Read the header and size of every file, a few in parallel to hide network latency."""
    found: dict[str, tuple[Header, int]] = {}

    def read(name: str) -> None:
        if source.committed is not None:
            file = source.committed.files[name]
            first = bytes(files.read_span(name, 0, min(FIRST_READ_BYTES, file.size)))
            found[name] = _parsed(
                first, lambda start, end: bytes(files.read_span(name, start, end)), file.size, files.path_of(name)
            )
        else:
            found[name] = _read_header(source.place, name, listed=listed)

    with source.open_files(verify=True) as files:
        take_turns([lambda name=name: read(name) for name in names], source.place.reads_at_a_time)  # type: ignore[misc]
    return found


def _read_header(place: FilePlace, name: str, *, listed: bool) -> tuple[Header, int]:
    why = f"{INDEX_NAME} names it" if listed else "it was there a moment ago"

    def read(start: int, end: int) -> tuple[bytes, int]:
        found = place.read(name, start, end)
        if found is None:
            path = _path(place, name)
            raise CheckpointCorrupt(f"{path} is missing; {why}", path=path)
        return found

    first, size = read(0, FIRST_READ_BYTES)
    return _parsed(first, lambda start, end: read(start, end)[0], size, _path(place, name))


def _parsed(first: bytes, read: Callable[[int, int], bytes], size: int, path: str) -> tuple[Header, int]:
    """The header of a file, of which ``read`` gives a range, and ``first`` is the start."""
    length = header_length(first[:LENGTH_BYTES], file_size=size, path=path)
    data = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(data) < length:
        data += read(LENGTH_BYTES + len(data), LENGTH_BYTES + length)
    if len(data) < length:
        raise CheckpointCorrupt(f"{path} became shorter while its header was read", path=path)
    return parse_header(data, file_size=size, path=path), size


def _path(place: FilePlace, name: str) -> str:
    return os.path.join(place.directory, name)


def _read_whole(place: FilePlace, name: str, *, limit: int) -> bytes:
    """Read a small file whole. Raises `CheckpointCorrupt` if it is larger than ``limit`` bytes, or missing."""
    found = place.read(name, 0, limit)
    path = _path(place, name)
    if found is None:
        raise CheckpointCorrupt(f"{path} is missing; it was there a moment ago", path=path)
    data, size = found
    if size > limit:
        raise CheckpointCorrupt(f"{path} has {size:,} bytes; an index has at most {limit:,}", path=path)
    return data
