"""Read stock DCP's ``.metadata``, of any torch, without running what it names. No I/O.

It is a pickle (see `dcp_metadata`, which writes it), read with a vocabulary of its own: torch's metadata classes and
nothing else. Importing this brings in most of ``torch.distributed``, so it is imported where such a file is met.

Guarantees: nothing that the file names runs, and nothing in the result points outside the checkpoint's directory.
Does not: check that files are as long as claimed (reading them does).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
from holdfast.errors import CheckpointCorrupt
from holdfast.format.manifest import DIMENSIONS_MAX
from holdfast.format.pickles import PickleRefused, Vocabulary, read_pickle

if TYPE_CHECKING:
    from collections.abc import Callable


class StockExtras(NamedTuple):
    """Fields of stock's metadata other than tensors and storage locations; ``planner_data`` is set by the planner."""

    planner_data: Any
    requires_grad: frozenset[str] = frozenset()
    """Names of tensors with ``requires_grad``."""
    pin_memory: frozenset[str] = frozenset()
    save_id: str | None = None
    version: str | None = None


def read_metadata(data: bytes, *, path: str) -> Metadata:
    """`read_stock` without the extras: ``planner_data`` is None where it isn't a flat-name mapping."""
    return read_stock(data, path=path)[0]


def read_stock(data: bytes, *, path: str) -> tuple[Metadata, StockExtras]:
    """Stock DCP's metadata from the content of a ``.metadata`` file of any torch; ``path`` is for messages.

    ``storage_meta`` holds no path; ``planner_data`` of foreign planners is among the extras only.

    Raises:
        CheckpointCorrupt: the file is damaged, names what isn't part of such metadata, leads out of the checkpoint's
            directory, or describes chunks that aren't inside their tensor.
    """

    try:
        return parse_metadata(data)
    except PickleRefused as error:
        raise CheckpointCorrupt(f"{path} isn't the metadata of a stock DCP checkpoint: {error}", path=path) from error


# Read stock metadata: the unpickler's vocabulary, its makers, and checks of the result. Files of torch 2.2 and older
# name `TensorProperties` and memory formats differently. Files of a newer torch may have attributes that this torch
# lacks: those of `Metadata` and `StorageMeta` are dropped, others are refused. NVRx and Megatron-LM keep plans of all
# ranks in an attribute: they are read over.

_StorageInfo: Final = storage_info_type()
_MemoryFormat: Final = memory_format_encoding_type()
_METADATA_CLASS: Final = "torch.distributed.checkpoint.metadata"
_OLD_PROPERTIES: Final = "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER: Final = "torch.distributed.checkpoint.planner"
_PLAN_CLASSES: Final = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch"
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

_READ_FIELDS: Final[dict[type, frozenset[str]]] = {
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


def parse_metadata(data: bytes) -> tuple[Metadata, StockExtras]:
    """The metadata that a ``.metadata`` file holds, checked, and what else it says. Raises `PickleRefused`."""
    try:
        return _checked(read_pickle(data, _vocabulary()))
    except PickleRefused:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        # What can't even be shown, such as a number of a million digits.
        raise PickleRefused(f"{type(error).__name__}: {error}") from error


def _checked(metadata: Any) -> tuple[Metadata, StockExtras]:
    if type(metadata) is not Metadata:
        raise PickleRefused(f"it holds a {type(metadata).__name__}")
    entries, storage = vars(metadata).get("state_dict_metadata"), vars(metadata).get("storage_data")
    if type(entries) is not dict or type(storage) is not dict:
        raise PickleRefused("it has no storage locations")
    for name, entry in entries.items():
        if type(name) is not str:
            raise PickleRefused(f"{name!r:.80} isn't a name")
        _check_entry(name, entry)
    for index, info in storage.items():
        if type(index) is not MetadataIndex:
            raise PickleRefused(f"{index!r:.80} is not a valid index of a storage location")
        _check_place(index.fqn, info)
    extras = _extras_of(metadata)
    if not _is_flat_mapping(metadata.planner_data):
        metadata.planner_data = None
    metadata.storage_meta = StorageMeta()
    return metadata, extras


def _extras_of(metadata: Metadata) -> StockExtras:
    entries = metadata.state_dict_metadata.items()
    tensors = [(name, entry.properties) for name, entry in entries if isinstance(entry, TensorStorageMetadata)]
    save_id, version = getattr(metadata.storage_meta, "save_id", None), getattr(metadata, "version", None)
    return StockExtras(
        metadata.planner_data,
        requires_grad=frozenset(name for name, properties in tensors if properties.requires_grad),
        pin_memory=frozenset(name for name, properties in tensors if properties.pin_memory),
        save_id=save_id if type(save_id) is str else None,
        version=version if type(version) is str else None,
    )


# checks --------------------------------------------------------------------------------------------------------


def _check_entry(name: str, entry: Any) -> None:
    if type(entry) is BytesStorageMetadata:
        return
    if type(entry) is not TensorStorageMetadata:
        raise PickleRefused(f"{name!r} is neither a tensor nor an object")
    state = vars(entry)
    properties, size, chunks = state.get("properties"), state.get("size"), state.get("chunks")
    if type(properties) is not TensorProperties or "dtype" not in vars(properties) or type(chunks) is not list:
        raise PickleRefused(f"tensor {name!r} is incomplete")
    if type(size) is not torch.Size or min(size, default=0) < 0 or not _is_countable(size):
        raise PickleRefused(f"tensor {name!r} has the shape {size!r:.80}")
    for chunk in chunks:
        box = vars(chunk) if type(chunk) is ChunkStorageMetadata else {}
        offsets, sizes = box.get("offsets"), box.get("sizes")
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size or not _is_inside(offsets, sizes, size):
            raise PickleRefused(f"tensor {name!r} of {tuple(size)} has a chunk of {sizes!r:.80} at {offsets!r:.80}")


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
        raise PickleRefused(f"{name!r} has the invalid location {offset!r:.80} and length {length!r:.80}")
    if type(file) is not str or not stays_inside(file):
        raise PickleRefused(f"{name!r} is in {file!r:.300}, which isn't a file inside the checkpoint")
    if state.get("transform_descriptors"):
        raise PickleRefused(f"{name!r} went through {state['transform_descriptors']!r:.200}, which Holdfast can't undo")


@lru_cache(maxsize=1024)
def stays_inside(file: str) -> bool:
    """Return True if a relative path can't lead out of its base directory, on any operating system."""
    parts = file.replace("\\", "/").split("/")
    return file != "" and "\0" not in file and ".." not in parts and parts[0] != "" and ":" not in parts[0]


def _is_flat_mapping(mapping: Any) -> bool:
    """Return True for the mapping that stock's planner writes: flat names to the keys that lead to each value."""
    return type(mapping) is dict and all(
        type(name) is str and type(path) is tuple and path and all(type(item) in (str, int) for item in path)
        for name, path in mapping.items()
    )


# the vocabulary ------------------------------------------------------------------------------------------------


class _OfPlan:
    """Stands for any part of a plan."""


def _build(target: Any, state: Any) -> None:
    """Set the attributes of one of the metadata's objects, and only those that its class has."""
    kind = type(target)
    if kind is _OfPlan:
        return
    if kind is TensorProperties:
        _build_properties(target, state)
        return
    fields = _READ_FIELDS.get(kind)
    if fields is None or type(state) is not dict:
        raise PickleRefused(f"it sets the state of a {kind.__name__}")
    if not state.keys() <= fields:
        if kind not in (Metadata, StorageMeta):
            raise PickleRefused(
                f"a {kind.__name__} has attributes {sorted(map(str, state))}; this torch knows {sorted(fields)}"
            )
        state = {field: value for field, value in state.items() if field in fields}
    # An index is hashed as soon as it is read: it must be what hashes cheaply.
    if kind is MetadataIndex and not (
        type(state.get("fqn")) is str
        and type(state.get("offset")) in (torch.Size, type(None))
        and type(state.get("index")) in (int, type(None))
    ):
        raise PickleRefused("an index has no name")
    vars(target).update(state)


def _build_properties(target: TensorProperties, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise PickleRefused("a tensor's properties are damaged")
    dtype, layout, requires_grad, memory_format, pinned = state
    if (
        type(dtype) is not torch.dtype
        or type(layout) is not torch.layout
        or type(memory_format) is not _MemoryFormat
        or type(requires_grad) is not bool
        or type(pinned) is not bool
    ):
        raise PickleRefused("a tensor's properties are damaged")
    target.__setstate__(state)  # type: ignore[no-untyped-call]


def _make_bare(kind: type) -> Callable[[], Any]:
    return lambda: object.__new__(kind)


def _make_size(sizes: Any = ()) -> torch.Size:
    if type(sizes) not in (tuple, list) or not all(type(size) is int for size in sizes):
        raise PickleRefused("a size is not a list of integers")
    return torch.Size(sizes)


def _make_layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _layouts():
        raise PickleRefused(f"there is no layout {name!r:.80}")
    return _layouts()[name]


@lru_cache(maxsize=1)
def _layouts() -> dict[str, torch.layout]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _make_member(kind: Any, name: Any) -> Any:
    """``getattr(enum, name)``: how some Python versions pickle an enumeration's member."""
    if kind is not _MemoryFormat or type(name) is not str:
        raise PickleRefused("it reads an attribute")
    return _MemoryFormat[name]


def _make_no_path(*_: Any) -> None:
    """Ignore a stored path: where the checkpoint was when it was written doesn't matter now."""


@lru_cache(maxsize=1)
def _vocabulary() -> Vocabulary:
    makers: dict[Any, Callable[..., Any]] = {kind: _make_bare(kind) for kind in (*_READ_FIELDS, TensorProperties)}
    makers |= {torch.Size: _make_size, OrderedDict: OrderedDict, _MemoryFormat: _MemoryFormat}
    # These stand for themselves: no value is ever one of them.
    makers |= {maker: maker for maker in (_make_layout, _make_member, _make_no_path)}
    names: dict[str, Any] = {
        f"{_METADATA_CLASS}.{kind.__name__}": kind for kind in _READ_FIELDS if kind is not _StorageInfo
    }
    names["torch.distributed.checkpoint.filesystem._StorageInfo"] = _StorageInfo
    for module, encoding in ((_METADATA_CLASS, "_MEM_FORMAT_ENCODING"), (_OLD_PROPERTIES, "MEM_FORMAT_ENCODING")):
        names[f"{module}.TensorProperties"] = TensorProperties
        names[f"{module}.{encoding}"] = _MemoryFormat
    names |= {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    names |= {"torch.Size": torch.Size, "torch.serialization._get_layout": _make_layout}
    names["collections.OrderedDict"] = OrderedDict
    makers[_OfPlan] = lambda *_: _OfPlan()
    of_plans = [*(f"{_PLANNER}.{kind}" for kind in _PLAN_CLASSES), f"{_MEGATRON}.MCoreSavePlan"]
    names |= dict.fromkeys([*of_plans, "torch.distributed.checkpoint.filesystem._StoragePrefix"], _OfPlan)
    names[f"{_MEGATRON}.MCoreMetadata"] = Metadata
    names |= {f"{module}.getattr": _make_member for module in ("builtins", "__builtin__")}
    names |= {f"{module}.{kind}": _make_no_path for module in ("pathlib", "pathlib._local") for kind in _PATHS}
    return Vocabulary(names, makers, build=_build)
