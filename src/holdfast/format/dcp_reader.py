"""Stock DCP's metadata from its pickle: the vocabulary, the makers, and the checks of what came out.

Old files name `TensorProperties` and its memory formats where torch 2.2 and before had them; files of a newer torch may
have attributes that this torch's classes lack: those of the whole (`Metadata`, `StorageMeta`) are dropped, since no
tensor hangs on them, others are refused.

Guarantees: those of `pickle_reader`; every name is a string, every chunk lies inside its tensor, every entry in a file
inside the directory.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast._torch_compat import memory_format_encoding_type, storage_info_type
from holdfast.format.index_checks import DIMENSIONS_MAX
from holdfast.format.pickle_reader import Refused, Vocabulary, read_pickle

if TYPE_CHECKING:
    from collections.abc import Callable

_StorageInfo: Final = storage_info_type()
_MemoryFormat: Final = memory_format_encoding_type()
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_OLD_PROPERTIES: Final = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

_FIELDS: Final[dict[type, frozenset[str]]] = {
    kind: frozenset(field.name for field in dataclasses.fields(kind))
    for kind in (
        Metadata,
        TensorStorageMetadata,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        StorageMeta,
        _StorageInfo,
    )
}


def parse_metadata(data: bytes) -> Metadata:
    """The metadata that a ``.metadata`` file holds, checked. Raises `Refused`."""
    try:
        return _checked(read_pickle(data, _vocabulary()))
    except Refused:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        # What can't even be shown, such as a number of a million digits.
        raise Refused(f"{type(error).__name__}: {error}") from error


def _checked(metadata: Any) -> Metadata:
    if type(metadata) is not Metadata:
        raise Refused(f"it holds a {type(metadata).__name__}")
    entries, storage = vars(metadata).get("state_dict_metadata"), vars(metadata).get("storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise Refused("it doesn't say what is stored where")
    for name, entry in entries.items():
        if type(name) is not str:
            raise Refused(f"{name!r:.80} isn't a name")
        _check_entry(name, entry)
    for index, info in storage.items():
        if type(index) is not MetadataIndex:
            raise Refused(f"{index!r:.80} doesn't say whose place it is")
        _check_place(index.fqn, info)
    if not _is_flat_mapping(metadata.planner_data):
        metadata.planner_data = None
    metadata.storage_meta = StorageMeta()
    return metadata


# checks --------------------------------------------------------------------------------------------------------


def _check_entry(name: str, entry: Any) -> None:
    if type(entry) is BytesStorageMetadata:
        return
    if type(entry) is not TensorStorageMetadata:
        raise Refused(f"{name!r} is neither a tensor nor an object")
    state = vars(entry)
    properties, size, chunks = state.get("properties"), state.get("size"), state.get("chunks")
    if type(properties) is not TensorProperties or "dtype" not in vars(properties) or type(chunks) is not list:
        raise Refused(f"tensor {name!r} is incomplete")
    if type(size) is not torch.Size or min(size, default=0) < 0 or not _is_countable(size):
        raise Refused(f"tensor {name!r} has the shape {size!r:.80}")
    for chunk in chunks:
        box = vars(chunk) if type(chunk) is ChunkStorageMetadata else {}
        offsets, sizes = box.get("offsets"), box.get("sizes")
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size or not _is_inside(offsets, sizes, size):
            raise Refused(f"tensor {name!r} of {tuple(size)} has a chunk of {sizes!r:.80} at {offsets!r:.80}")


def _is_countable(size: torch.Size) -> bool:
    return len(size) <= DIMENSIONS_MAX and not prod(max(1, length) for length in size) >> 59  # of 16 bytes, at most


def _is_inside(offsets: torch.Size, sizes: torch.Size, whole: torch.Size) -> bool:
    return len(offsets) == len(sizes) == len(whole) and all(
        offset >= 0 and size >= 0 and offset + size <= length
        for offset, size, length in zip(offsets, sizes, whole, strict=True)
    )


def _check_place(name: str, info: Any) -> None:
    state = vars(info) if type(info) is _StorageInfo else {}
    file, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0 or max(offset, length) >> 63:
        raise Refused(f"{name!r} lies at {offset!r:.80} with {length!r:.80} bytes")
    if type(file) is not str or not stays_inside(file):
        raise Refused(f"{name!r} lies in {file!r:.300}, which isn't a file inside the checkpoint")
    if state.get("transform_descriptors"):
        raise Refused(f"{name!r} went through {state['transform_descriptors']!r:.200}, which Holdfast can't undo")


@lru_cache(maxsize=1024)
def stays_inside(file: str) -> bool:
    """Whether a relative path leads nowhere but below the directory that it is relative to, on any system."""
    parts = file.replace("\\", "/").split("/")
    return file != "" and "\0" not in file and ".." not in parts and parts[0] != "" and ":" not in parts[0]


def _is_flat_mapping(mapping: Any) -> bool:
    """Whether this is what stock's planner leaves: flat names, each with the keys that lead to its value."""
    return type(mapping) is dict and all(
        type(name) is str and type(path) is tuple and path and all(type(item) in (str, int) for item in path)
        for name, path in mapping.items()
    )


# the vocabulary ------------------------------------------------------------------------------------------------


def _build(target: Any, state: Any) -> None:
    """Set the attributes of one of the metadata's objects, and only those that its class has."""
    kind = type(target)
    if kind is TensorProperties:
        _build_properties(target, state)
        return
    fields = _FIELDS.get(kind)
    if fields is None or type(state) is not dict:
        raise Refused(f"it sets the state of a {kind.__name__}")
    if not state.keys() <= fields:
        if kind not in (Metadata, StorageMeta):
            raise Refused(
                f"a {kind.__name__} has attributes {sorted(map(str, state))}; this torch knows {sorted(fields)}"
            )
        state = {field: value for field, value in state.items() if field in fields}
    # An index is hashed as soon as it is read: it must be what hashes cheaply.
    if kind is MetadataIndex and not (
        type(state.get("fqn")) is str
        and type(state.get("offset")) in (torch.Size, type(None))
        and type(state.get("index")) in (int, type(None))
    ):
        raise Refused("an index has no name")
    vars(target).update(state)


def _build_properties(target: TensorProperties, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise Refused("a tensor's properties are damaged")
    dtype, layout, requires_grad, memory_format, pinned = state
    if (
        type(dtype) is not torch.dtype
        or type(layout) is not torch.layout
        or type(memory_format) is not _MemoryFormat
        or type(requires_grad) is not bool
        or type(pinned) is not bool
    ):
        raise Refused("a tensor's properties are damaged")
    target.__setstate__(state)  # type: ignore[no-untyped-call]


def _make_bare(kind: type) -> Callable[[], Any]:
    return lambda: object.__new__(kind)


def _make_size(sizes: Any = ()) -> torch.Size:
    if type(sizes) not in (tuple, list) or not all(type(size) is int for size in sizes):
        raise Refused("a size isn't whole numbers")
    return torch.Size(sizes)


def _make_layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _layouts():
        raise Refused(f"there is no layout {name!r:.80}")
    return _layouts()[name]


@lru_cache(maxsize=1)
def _layouts() -> dict[str, torch.layout]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _make_member(kind: Any, name: Any) -> Any:
    """``getattr(enum, name)``: how some Python versions pickle an enumeration's member."""
    if kind is not _MemoryFormat or type(name) is not str:
        raise Refused("it reads an attribute")
    return _MemoryFormat[name]


def _make_no_path(*_: Any) -> None:
    """Where the checkpoint was when it was written: not where it is now, so nobody asks."""


@lru_cache(maxsize=1)
def _vocabulary() -> Vocabulary:
    makers: dict[Any, Callable[..., Any]] = {kind: _make_bare(kind) for kind in (*_FIELDS, TensorProperties)}
    makers |= {torch.Size: _make_size, OrderedDict: OrderedDict, _MemoryFormat: _MemoryFormat}
    # These stand for themselves: no value is ever one of them.
    makers |= {maker: maker for maker in (_make_layout, _make_member, _make_no_path)}
    names: dict[str, Any] = {f"{_METADATA}.{kind.__name__}": kind for kind in _FIELDS if kind is not _StorageInfo}
    names["torch.distributed.checkpoint.filesystem._StorageInfo"] = _StorageInfo
    for module, encoding in ((_METADATA, "_MEM_FORMAT_ENCODING"), (_OLD_PROPERTIES, "MEM_FORMAT_ENCODING")):
        names[f"{module}.TensorProperties"] = TensorProperties
        names[f"{module}.{encoding}"] = _MemoryFormat
    names |= {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    names |= {"torch.Size": torch.Size, "torch.serialization._get_layout": _make_layout}
    names["collections.OrderedDict"] = OrderedDict
    names |= {f"{module}.getattr": _make_member for module in ("builtins", "__builtin__")}
    names |= {f"{module}.{kind}": _make_no_path for module in ("pathlib", "pathlib._local") for kind in _PATHS}
    return Vocabulary(names, makers, build=_build)
