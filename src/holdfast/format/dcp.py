"""Stock DCP's ``.metadata``, written for stock readers and read from stock writers. No I/O.

It is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: which tensors there are (`TensorStorageMetadata`
with a chunk per shard), where each entry lies (`MetadataIndex` and ``_StorageInfo``), and which nested keys a flat name
stands for (``planner_data``). All of it follows from the save plan, so it is rendered before the first byte is written,
opcode by opcode: building a hundred thousand of torch's objects only to pickle them takes several times as long, with
the GIL held.

Writing needs no torch; reading makes torch's own objects and does.

Guarantees: stock ``FileSystemReader``, ``dcp.load`` and ``dcp_to_torch_save`` of torch 2.7 and later read what
`render_metadata` returns; `read_metadata` runs nothing that the file names, and nothing in what it returns points
outside the checkpoint's directory.
Does not: check that files are as long as claimed (reading does), or keep what a planner of somebody else's put into
``planner_data``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from holdfast.errors import CheckpointCorrupt
from holdfast.format.pickle_reader import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    from holdfast.format.manifest import IndexObject, IndexTensor, ReportFile
    from holdfast.plan.write import PlacedObject, PlacedTensor, SavePlan

_Shard: TypeAlias = "tuple[str, PlacedTensor | IndexTensor]"
"""The file that it is in, and where there."""
STOCK_VERSION: Final = "1.0.0"
"""What stock DCP writes into ``Metadata.version``; readers of older torch ignore it."""

_TORCH_METADATA: Final = "torch.distributed.checkpoint.metadata"


# writing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredRank:
    """What one rank has written, by its report."""

    files: tuple[ReportFile, ...]
    tensors: tuple[IndexTensor, ...]
    objects: tuple[IndexObject, ...]


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """The reports of a published checkpoint, in rank order: they hold all that its save plan did."""

    ranks: tuple[StoredRank, ...]


def render_metadata(plan: SavePlan | StoredPlan) -> bytes:
    """The ``.metadata`` of a checkpoint with the files of ``plan``, as a pickle of protocol 2.

    The same bytes from the plan of a save as from its reports.

    A shard without elements is left out unless its tensor has none at all: no reader asks for it, and its offset may
    be that of a shard that has some. About 1 s for 100,000 tensors. Pure; thread-safe.
    """
    first: dict[str, _Shard] = {}
    several: dict[str, list[_Shard]] = {}
    objects: dict[str, tuple[str, PlacedObject | IndexObject]] = {}
    for rank in plan.ranks:
        for tensor in rank.tensors:
            shard = (rank.files[tensor.file].name, tensor)
            if first.setdefault(tensor.name, shard) is not shard:
                several.setdefault(tensor.name, [first[tensor.name]]).append(shard)
        for item in rank.objects:
            objects[item.name] = (rank.files[item.file].name, item)
    for name, shards in several.items():
        several[name] = [shard for shard in shards if shard[1].nbytes] or shards[:1]
    out = _Pickle()
    out.raw(_METADATA)
    for name, shard in first.items():
        out.text(name)
        held: Sequence[_Shard] = several.get(name) or (shard,)
        if len(held) == 1:
            _, tensor = held[0]
            key = (tensor.dtype, tensor.shape, tensor.offsets, tensor.sizes)
            out.repeated(key, partial(_tensor_metadata, out, held))
        else:
            _tensor_metadata(out, held)
    for name in objects:
        out.text(name)
        out.raw(_BYTES)
    out.raw(_THEN_PLANNER_DATA)
    for name, (_, tensor) in first.items():
        _flat_name(out, name, tensor.path)
    for name, (_, item) in objects.items():
        _flat_name(out, name, item.path)
    out.raw(_THEN_STORAGE_DATA)
    for name, shard in first.items():
        for index, (file, tensor) in enumerate(several.get(name) or (shard,)):
            out.raw(_INDEX)
            out.text(name)
            out.repeated((index, tensor.offsets, file), partial(_shard_index, out, index, tensor.offsets, file))
            _place(out, tensor.record_offset, tensor.record_end - tensor.record_offset)
    for name, (file, item) in objects.items():
        out.raw(_INDEX)
        out.text(name)
        _file(out, file)
        _place(out, item.offset, item.capacity)
    out.raw(_THEN_STORAGE_META)
    out.text(STOCK_VERSION)
    out.raw(b"ub.")
    return out.finish()


def _tensor_metadata(out: _Pickle, shards: Sequence[_Shard]) -> None:
    out.raw(_TENSOR)
    out.properties(shards[0][1].dtype)
    out.raw(_THEN_SIZE)
    out.size(shards[0][1].shape)
    out.raw(_THEN_CHUNKS)
    for _, shard in shards:
        out.raw(_CHUNK)
        out.size(shard.offsets)
        out.raw(_THEN_SIZES)
        out.size(shard.sizes)
        out.raw(b"ub")
    out.raw(b"eub")


def _flat_name(out: _Pickle, name: str, path: tuple[str | int, ...]) -> None:
    out.text(name)
    out.raw(b"(")
    for item in path:
        if isinstance(item, str):
            out.text(item)
        else:
            out.number(item)
    out.raw(b"t")


def _shard_index(out: _Pickle, index: int, offsets: tuple[int, ...], file: str) -> None:
    out.raw(_THEN_INDEX)
    out.number(index)
    out.raw(_THEN_OFFSET)
    out.size(offsets)
    _file(out, file)


def _file(out: _Pickle, file: str) -> None:
    out.raw(_THEN_PLACE)
    out.text(file)
    out.raw(_THEN_PLACE_OFFSET)


def _place(out: _Pickle, offset: int, length: int) -> None:
    out.number(offset)
    out.raw(_THEN_LENGTH)
    out.number(length)
    out.raw(b"ub")


# What a pickle of these classes repeats over and over: numbered, so that each use is two bytes of the memo.
_WORDS: Final = (
    *((f"{_TORCH_METADATA}\n{kind}\n", kind) for kind in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_TORCH_METADATA}\n{kind}\n", kind) for kind in ("TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta")),
    *((f"{_TORCH_METADATA}\n{kind}\n", kind) for kind in ("ChunkStorageMetadata", "MetadataIndex")),
    ("torch.distributed.checkpoint.filesystem\n_StorageInfo\n", "_StorageInfo"),
    ("torch\nSize\n", "Size"),
)
_FIELDS: Final = (
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "modules", "version"),
    *("properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"),
)


def _unicode(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _prelude() -> tuple[bytes, dict[str, bytes]]:
    """Opcodes that put words and fields into the memo and leave nothing, and the opcodes that fetch each."""
    pushes = [(b"c" + spelt.encode(), word) for spelt, word in _WORDS] + [(_unicode(field), field) for field in _FIELDS]
    opcodes, fetches = b"\x80\x02", {}
    for number, (push, word) in enumerate(pushes):
        opcodes += push + b"q" + bytes((number,)) + b"0"
        fetches[word] = b"h" + bytes((number,))
    return opcodes, fetches


_PRELUDE, _AT = _prelude()


def _object(kind: str, *fields: str) -> bytes:
    """An object without attributes yet; they follow as name, value, ..., closed by ``ub``."""
    return _AT[kind] + b")\x81}(" + b"".join(_AT[field] for field in fields)


_METADATA: Final = _object("Metadata", "state_dict_metadata") + b"}("
_TENSOR: Final = _object("TensorStorageMetadata", "properties")
_THEN_SIZE: Final = _AT["size"]
_THEN_CHUNKS: Final = _AT["chunks"] + b"]("
_CHUNK: Final = _object("ChunkStorageMetadata", "offsets")
_THEN_SIZES: Final = _AT["sizes"]
_BYTES: Final = _AT["BytesStorageMetadata"] + b")\x81"
_THEN_PLANNER_DATA: Final = b"u" + _AT["planner_data"] + b"}("
_THEN_STORAGE_DATA: Final = b"u" + _AT["storage_data"] + b"}("
_INDEX: Final = _object("MetadataIndex", "fqn")
_THEN_INDEX: Final = _AT["index"]
_THEN_OFFSET: Final = _AT["offset"]
_THEN_PLACE: Final = b"ub" + _object("_StorageInfo", "relative_path")
_THEN_PLACE_OFFSET: Final = _AT["offset"]
_THEN_LENGTH: Final = _AT["length"]
_STORAGE_META: Final = _AT["StorageMeta"] + b")\x81}" + _AT["modules"] + b"]sb"
_THEN_STORAGE_META: Final = b"u" + _AT["storage_meta"] + _STORAGE_META + _AT["version"]
# dtype before it; then layout, requires_grad, memory format, pin_memory: what TensorProperties.__setstate__ takes
_THEN_LAYOUT: Final = b"ctorch.serialization\n_get_layout\n" + _unicode("torch.strided") + b"\x85R"
_PROPERTIES_REST: Final = _THEN_LAYOUT + b"\x89" + _AT["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R\x89tb"
_SMALL_NUMBERS: Final = tuple(b"K" + bytes((number,)) for number in range(256))


class _Pickle:
    """A pickle being written: every method appends opcodes. Strings, sizes and properties are written once."""

    def __init__(self) -> None:
        self._out: list[bytes] = [_PRELUDE]
        self._memo: dict[Any, bytes] = {}
        self._repeated: dict[Any, bytes] = {}
        self.raw = self._out.append

    def finish(self) -> bytes:
        return b"".join(self._out)

    def repeated(self, key: Any, write: Callable[[], None]) -> None:
        """What ``write`` appends, which is the same for equal keys: once it refers to the memo only, it is kept."""
        kept = self._repeated.get(key)
        if kept is not None:
            self.raw(kept)
            return
        start, known = len(self._out), len(self._memo)
        write()
        if len(self._memo) == known:
            self._repeated[key] = b"".join(self._out[start:])

    def _remember(self, key: Any) -> None:
        """What was pushed last gets the next number of the memo."""
        number = struct.pack("<I", len(self._memo) + len(_AT))
        self._memo[key] = b"j" + number
        self.raw(b"r" + number)

    def text(self, value: str) -> None:
        known = self._memo.get(value)
        if known is not None:
            self.raw(known)
        else:
            self.raw(_unicode(value))
            self._remember(value)

    def number(self, value: int) -> None:
        if 0 <= value < 256:
            self.raw(_SMALL_NUMBERS[value])
        elif 0 <= value < 1 << 31:
            self.raw(b"J" + value.to_bytes(4, "little"))
        else:
            signed = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.raw(b"\x8a" + bytes((len(signed),)) + signed)

    def size(self, sizes: tuple[int, ...]) -> None:
        known = self._memo.get(sizes)
        if known is not None:
            self.raw(known)
            return
        self.raw(_AT["Size"] + b"(")
        for size in sizes:
            self.number(size)
        self.raw(b"t\x85R")
        self._remember(sizes)

    def properties(self, dtype: str) -> None:
        key = (dtype,)  # a tuple of one string: no size and no text
        known = self._memo.get(key)
        if known is not None:
            self.raw(known)
            return
        self.raw(_AT["TensorProperties"] + b")\x81(" + f"ctorch\n{dtype}\n".encode() + _PROPERTIES_REST)
        self._remember(key)


# reading -------------------------------------------------------------------------------------------------------


def read_metadata(data: bytes, *, path: str) -> Metadata:
    """Stock DCP's metadata from the content of a ``.metadata`` file of any torch; ``path`` is for messages.

    ``planner_data`` is None where it isn't a flat-name mapping, and ``storage_meta`` holds no path.

    Raises:
        CheckpointCorrupt: the file is damaged, names what isn't part of such metadata, leads out of the checkpoint's
            directory, or describes chunks that aren't inside their tensor.
    """
    from holdfast.format.dcp_reader import parse_metadata

    try:
        return parse_metadata(data)
    except Refused as error:
        raise CheckpointCorrupt(f"{path} isn't the metadata of a stock DCP checkpoint: {error}", path=path) from error
