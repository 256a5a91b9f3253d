"""Render stock DCP's ``.metadata`` for stock readers. No I/O, no torch; `dcp_metadata_reader` reads it.

It is a pickle of `torch.distributed.checkpoint.metadata.Metadata`: which tensors there are (`TensorStorageMetadata`
with a chunk per shard), where each entry lies (`MetadataIndex` and ``_StorageInfo``), and which nested keys a flat name
stands for (``planner_data``). All of it follows from the save plan, so it is rendered before the first byte is written,
opcode by opcode: building a hundred thousand of torch's objects only to pickle them takes several times as long, with
the GIL held.

Guarantees: stock ``FileSystemReader``, ``dcp.load`` and ``dcp_to_torch_save`` of torch 2.7 and later read what
`render_metadata` returns.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.format.manifest import IndexObject, IndexTensor, ReportFile
    from holdfast.plan.write import PlacedObject, PlacedTensor, SavePlan


_Shard: TypeAlias = "tuple[str, PlacedTensor | IndexTensor]"
"""File and position of a shard."""
_Entry: TypeAlias = "PlacedTensor | PlacedObject | IndexTensor | IndexObject"
STOCK_VERSION: Final = "1.0.0"
"""What stock DCP writes into ``Metadata.version``; readers of older torch ignore it."""

_TORCH_METADATA: Final = "torch.distributed.checkpoint.metadata"
_JOINED: Final = 4096
_opcode: Final = struct.Struct("<cI").pack
"""An opcode with a number behind it."""


@dataclass(frozen=True, slots=True)
class StoredRank:
    """Contents of one rank's files, from its report."""

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
    be that of a shard that has some. Pure; thread-safe.
    """
    tensors = _Tensors(plan)
    objects = {item.name: (rank.files[item.file].name, item) for rank in plan.ranks for item in rank.objects}
    memo = _Memo()
    out = [_PRELUDE, _METADATA]
    out += _all_metadata(memo, tensors)
    out += [memo.text(name) + _BYTES for name in objects]
    out.append(_THEN_PLANNER_DATA)
    out += _all_flat_names(memo, (tensor for _, tensor in tensors))
    out += _all_flat_names(memo, (item for _, item in objects.values()))
    out.append(_THEN_STORAGE_DATA)
    out += _all_places(memo, tensors)
    for name, (file, item) in objects.items():
        out.append(_INDEX + memo.text(name) + _file(memo, file) + _place(item.offset, item.capacity))
    out.append(_THEN_STORAGE_META + memo.text(STOCK_VERSION) + b"ub.")
    # Bit by bit, since joining takes 80 bytes for each piece.
    return b"".join([b"".join(out[at : at + _JOINED]) for at in range(0, len(out), _JOINED)])


def rename_files(metadata: bytes, names: Mapping[str, str]) -> bytes | None:
    """Return what `render_metadata` made with its files called by their new ``names``; None if it can't.

    It can't where a tensor or a key has the name of a file.
    """
    out: list[bytes] = []
    at = 0
    left = set(names)
    opening = _THEN_PLACE + b"X"
    while (found := metadata.find(opening, at)) >= 0:
        start = found + len(opening) + 4
        end = start + int.from_bytes(metadata[start - 4 : start], "little")
        name = metadata[start:end].decode("utf-8", "surrogatepass")
        if name not in left:
            return None
        left.remove(name)
        out += (metadata[at : found + len(_THEN_PLACE)], _unicode(names[name]))
        at = end
    if any(_unicode(name) in metadata for name in left):
        return None
    return b"".join((*out, metadata[at:]))


class _Tensors:
    """All shards by tensor, in the order of the first of each; iterating gives that first one."""

    def __init__(self, plan: SavePlan | StoredPlan) -> None:
        self._plan = plan
        self.several: dict[str, list[_Shard]] = {}
        names = Counter(tensor.name for rank in plan.ranks for tensor in rank.tensors)
        if names.total() == len(names):
            return
        for rank in plan.ranks:
            for tensor in rank.tensors:
                if names[tensor.name] > 1:
                    shard = (rank.files[tensor.file].name, tensor)
                    self.several.setdefault(tensor.name, []).append(shard)

    def __iter__(self) -> Iterator[_Shard]:
        # Not kept: a hundred thousand more of what is counted make the garbage collector look at everything there is.
        met: set[str] = set()
        for rank in self._plan.ranks:
            files = [file.name for file in rank.files]
            for tensor in rank.tensors:
                if self.several and tensor.name in self.several:
                    if tensor.name in met:
                        continue
                    met.add(tensor.name)
                yield files[tensor.file], tensor

    def shards(self, shard: _Shard) -> Sequence[_Shard]:
        """Return the shards of the tensor whose first one is this, without empty ones beside others."""
        held = self.several.get(shard[1].name)
        return (shard,) if held is None else [one for one in held if one[1].nbytes] or held[:1]


# There may be a hundred thousand tensors: in these three, a call for each of them would be felt.


def _all_metadata(memo: _Memo, tensors: _Tensors) -> list[bytes]:
    """Names, each with what it is."""
    out: list[bytes] = []
    add, text, kept = out.append, memo.text, memo.kept
    for shard in tensors:
        add(text(shard[1].name))
        held = tensors.shards(shard) if tensors.several else (shard,)
        tensor = held[0][1]
        key = (tensor.dtype, tensor.shape, tensor.offsets, tensor.sizes)
        if len(held) == 1:
            add(kept.get(key) or memo.keep(key, _tensor_metadata, *held))
        else:
            add(_tensor_metadata(memo, *held))
    return out


def _all_flat_names(memo: _Memo, entries: Iterable[_Entry]) -> list[bytes]:
    """Names, each with the keys that it stands for."""
    out: list[bytes] = []
    add, text, fetches = out.append, memo.text, memo.fetches
    for entry in entries:
        add(fetches[entry.name])
        add(b"(")
        for item in entry.path:
            add(fetches.get(item) or (text(item) if isinstance(item, str) else _number(item)))
        add(b"t")
    return out


def _all_places(memo: _Memo, tensors: _Tensors) -> list[bytes]:
    """Shards, each with where it lies."""
    out: list[bytes] = []
    add, fetches, kept = out.append, memo.fetches, memo.kept
    lengths: dict[int, bytes] = {}
    for shard in tensors:
        for index, (file, tensor) in enumerate(tensors.shards(shard) if tensors.several else (shard,)):
            add(_INDEX)
            add(fetches[tensor.name])
            key = (index, tensor.offsets, file)
            add(kept.get(key) or memo.keep(key, _shard_index, *key))
            start = tensor.record_offset
            length = tensor.record_end - start
            add(_number(start))
            add(lengths.get(length) or lengths.setdefault(length, _length(length)))
    return out


def _tensor_metadata(memo: _Memo, *shards: _Shard) -> bytes:
    whole = shards[0][1]
    out = [_TENSOR, memo.properties(whole.dtype), _THEN_SIZE, memo.size(whole.shape), _THEN_CHUNKS]
    for _, shard in shards:
        out += (_CHUNK, memo.size(shard.offsets), _THEN_SIZES, memo.size(shard.sizes), b"ub")
    return b"".join(out) + b"eub"


def _shard_index(memo: _Memo, index: int, offsets: tuple[int, ...], file: str) -> bytes:
    return _THEN_INDEX + _number(index) + _THEN_OFFSET + memo.size(offsets) + _file(memo, file)


def _file(memo: _Memo, file: str) -> bytes:
    return _THEN_PLACE + memo.text(file) + _THEN_PLACE_OFFSET


def _place(offset: int, length: int) -> bytes:
    return _number(offset) + _length(length)


def _length(length: int) -> bytes:
    return _THEN_LENGTH + _number(length) + b"ub"


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
    return _opcode(b"X", len(encoded)) + encoded


def _prelude() -> tuple[bytes, dict[str, bytes]]:
    """Opcodes that put words and fields into the memo and leave nothing, and the opcodes that fetch each."""
    pushes = [(b"c" + spelt.encode(), word) for spelt, word in _WORDS] + [(_unicode(field), field) for field in _FIELDS]
    opcodes, fetches = b"\x80\x02", {}
    for number, (push, word) in enumerate(pushes):
        opcodes += push + b"q" + bytes((number,)) + b"0"
        fetches[word] = b"h" + bytes((number,))
    return opcodes, fetches


_PRELUDE, _AT = _prelude()
_FIRST: Final = len(_AT)
"""First free memo index."""


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


class _Memo:
    """Pickle memo: write strings, sizes and properties once and fetch them afterwards.

    ``fetches`` are the opcodes that do so, ``kept`` longer ones that refer to the memo only, by what they depend on.
    """

    def __init__(self) -> None:
        self.fetches: dict[Any, bytes] = {}
        self.kept: dict[Any, bytes] = {}

    def keep(self, key: Any, write: Callable[..., bytes], *what: Any) -> bytes:
        """Return ``write()``, cached by the key if ``write`` pushed nothing new."""
        known = len(self.fetches)
        written = write(self, *what)
        if len(self.fetches) == known:
            self.kept[key] = written
        return written

    def text(self, value: str) -> bytes:
        known = self.fetches.get(value)
        if known is not None:
            return known
        encoded = value.encode("utf-8", "surrogatepass")
        number = len(self.fetches) + _FIRST
        self.fetches[value] = _opcode(b"j", number)
        return _opcode(b"X", len(encoded)) + encoded + _opcode(b"r", number)

    def size(self, sizes: tuple[int, ...]) -> bytes:
        known = self.fetches.get(sizes)
        if known is None:
            pushed = _AT["Size"] + b"(" + b"".join(map(_number, sizes)) + b"t\x85R"
            known = self._remember(sizes, pushed)
        return known

    def properties(self, dtype: str) -> bytes:
        key = (dtype,)  # a tuple of one string: no size and no text
        known = self.fetches.get(key)
        if known is None:
            pushed = _AT["TensorProperties"] + b")\x81(" + f"ctorch\n{dtype}\n".encode() + _PROPERTIES_REST
            known = self._remember(key, pushed)
        return known

    def _remember(self, key: Any, pushed: bytes) -> bytes:
        """``pushed``, which gets the next number of the memo."""
        number = len(self.fetches) + _FIRST
        self.fetches[key] = _opcode(b"j", number)
        return pushed + _opcode(b"r", number)


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return _SMALL_NUMBERS[value]
    if 0 <= value < 1 << 31:
        return _opcode(b"J", value)
    signed = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(signed),)) + signed
