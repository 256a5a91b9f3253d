"""Plain objects of a state as records of a fixed length that stock `torch.load` reads.

An object's pickle changes size from save to save (a step counter passes 255, a list grows), while every byte of a
file has its place in the plan. So an object's record has a *capacity* with head room, and what isn't used is zeros
inside its ``data.pkl``, behind the pickle's STOP. An object that outgrows its capacity replans.

    a/version, a/data/0, a/data/1, ...    then    a/data.pkl (pickle, zeros)    then    directory

Guarantees: `dump_object` refuses what `load_object` couldn't load, by name, before anything is written; `load_object`
runs nothing that the record names and raises nothing but `CheckpointCorrupt`.
Does not: do I/O or check checksums: the bytes it is handed were verified, or are foreign.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format import torch_record as zip_entries
from holdfast.format.pickles import (
    TAKEN_APART_NESTED,
    WHOLE_MAX,
    PickleRefused,
    Vocabulary,
    check_keys,
    check_nesting,
    read_pickle,
)
from holdfast.format.torch_record import LEGACY_STORAGES, RECORD_ALIGN_BYTES, MalformedRecord, read_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


# Plain objects that a checkpoint may hold, and their pickles. The list is short on purpose: its types can be loaded on
# any machine without running code that a file names. Values are checked before anything is written, so that the error
# can name the position in the state. Not kept: storage shared by two tensors of an object, attributes of tensors.

ALLOWED_OBJECTS: Final = (
    "None, bool, int, float, complex, str, bytes, bytearray, io.BytesIO, range, slice",
    "list, tuple, dict, set, frozenset",
    "collections.OrderedDict, defaultdict (of a builtin type), deque, Counter",
    "numpy arrays, scalars and dtypes of booleans, numbers and strings in native byte order",
    "torch.Size, torch.dtype, torch.device, torch.layout",
    "torch.Tensor and torch.nn.Parameter inside a container (dense, of a dtype that can be stored)",
)
"""The published list: leaves and members of exactly these types can be kept and loaded back. Subclasses can't."""

ARRAY_KINDS: Final = "biufcSU"
"""``dtype.kind`` of the numpy arrays and scalars on the list."""

FACTORIES: Final[tuple[type, ...]] = (list, dict, set, tuple, int, float, str, bool)
"""Factories that a defaultdict may have."""

OBJECT_LIMIT_BYTES: Final = 1 << 31
"""Largest pickle, and largest sum of storages, of one object."""

NO_SLICE_PARTS: Final = (slice, *TAKEN_APART_NESTED)
"""What a slice may not consist of."""

_ATOMS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range})
_SEQUENCES: Final = frozenset({list, tuple, set, frozenset, deque})
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_KEYED: Final = frozenset({set, frozenset, *_MAPPINGS})
_PLAIN_KEYS: Final = frozenset({type(None), bool, int, float, str, bytes})
_REDUCED: Final = frozenset({complex, range, slice, deque, OrderedDict, defaultdict, Counter})
"""Types on the list that pickle has no opcode for."""


@dataclass(frozen=True, slots=True)
class ObjectPayload:
    """An object as bytes: its pickle, and the contents of the storages that the pickle refers to by number."""

    pickle: bytes
    storages: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return len(self.pickle) + sum(map(len, self.storages))


def _check(value: Any, name: str, outside: Callable[[str, torch.Tensor], None] | None = None) -> bool:
    """Raise for what isn't on the list; True if there are tensors in ``value``.

    outside: called once for each tensor, of any class, with its position, in which keys are whole: it is not checked.
    """
    shown = 80 if outside is None else None
    tensors = False
    nested: list[Any] = []
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [(name, value)]
    while pending:
        where, item = pending.pop()
        kind = type(item)
        if kind in _ATOMS or id(item) in seen:
            continue
        seen.add(id(item))
        if kind in _KEYED:
            _check_keys(item, where, name)
        if kind in TAKEN_APART_NESTED:
            nested.append(item)
        if kind in _SEQUENCES:
            # One pass in C settles the usual case: a container of plain values.
            if not _ATOMS.issuperset(map(type, item)):
                pending.extend((f"{where}[{n}]", member) for n, member in enumerate(item))
        elif kind in _MAPPINGS:
            _check_mapping(item, where, name)
            if not _ATOMS.issuperset(map(type, item)):
                pending.extend((f"{where} (key {repr(key)[:shown]})", key) for key in item if type(key) not in _ATOMS)
            if not _ATOMS.issuperset(map(type, item.values())):
                pending.extend((f"{where}[{repr(key)[:shown]}]", member) for key, member in item.items())
        elif kind is slice:
            if any(type(part) in NO_SLICE_PARTS for part in (item.start, item.stop, item.step)):
                message = f"{where}: a slice of slices, deques or defaultdicts can't be kept in a checkpoint"
                raise ConfigError(message, field=name)
            pending.extend((f"{where}.{part}", getattr(item, part)) for part in ("start", "stop", "step"))
        elif outside is not None and isinstance(item, torch.Tensor):
            outside(where, item)
        elif _is_tensor(item):
            _check_tensor(item, where, name)
            tensors = True
        elif not _is_leaf(item):
            raise _refusal(item, where, name)
    try:
        check_nesting(nested)
    except PickleRefused as error:
        raise ConfigError(f"{name}: {error}; such an object can't be stored in a checkpoint", field=name) from error
    return tensors


def _check_keys(item: Any, where: str, name: str) -> None:
    """Raise for keys and elements that loading would refuse, for what they might cost."""
    kinds = set(map(type, item))
    if kinds <= _PLAIN_KEYS:
        whole = item if kinds == {int} else [key for key in item if type(key) is int] if int in kinds else ()
        if not whole or (min(whole) > -WHOLE_MAX and max(whole) < WHOLE_MAX):
            return
    try:
        check_keys(list(item), {})
    except PickleRefused as error:
        raise ConfigError(f"{where}: {error}; such a container can't be stored in a checkpoint", field=name) from error


def _check_mapping(item: Any, where: str, name: str) -> None:
    if type(item) is defaultdict and item.default_factory is not None and item.default_factory not in FACTORIES:
        raise ConfigError(
            f"{where}: a defaultdict made with {item.default_factory!r} can't be stored in a "
            f"checkpoint; its factory must be one of {', '.join(kind.__name__ for kind in FACTORIES)}",
            field=name,
        )
    if type(item) is OrderedDict and not vars(item).keys() <= {"_metadata"}:
        raise ConfigError(f"{where}: an OrderedDict with attributes can't be stored in a checkpoint", field=name)


def _is_leaf(item: Any) -> bool:
    """Return True if a value of a non-builtin type is allowed. Only libraries that are imported already are considered.
    A library that isn't imported made no value.
    """
    if type(item) is io.BytesIO:
        return not item.closed and not vars(item) and item.tell() <= len(item.getbuffer())
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        if isinstance(item, numpy.dtype):
            return _storable_dtype(item)
        if isinstance(item, numpy.generic) or type(item) is numpy.ndarray:
            return type(item).__module__ == "numpy" and _storable_dtype(item.dtype)
    return torch is not None and type(item) in (torch.Size, torch.dtype, torch.device, torch.layout)


def _storable_dtype(dtype: Any) -> bool:
    return dtype.kind in ARRAY_KINDS and dtype.isnative and dtype.metadata is None


def _is_tensor(item: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(item) in (torch.Tensor, torch.nn.Parameter)


def _check_tensor(item: torch.Tensor, where: str, name: str) -> None:
    dtype = str(item.dtype).removeprefix("torch.")
    if str(item.layout) != "torch.strided" or item.is_quantized or item.device.type == "meta" or dtype not in ITEMSIZE:
        raise ConfigError(
            f"{where}: a {dtype} tensor of layout {item.layout} on {item.device} can't be stored "
            f"in a checkpoint; it must be dense, have data, and be one of {', '.join(sorted(ITEMSIZE))}",
            field=name,
        )


def _refusal(item: Any, where: str, name: str) -> ConfigError:
    kind = type(item)
    extra = ""
    dtype = getattr(item, "dtype", item)
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(dtype, "kind"):
        extra = f" (dtype {dtype})"
    return ConfigError(
        f"{where}: a value of type {kind.__module__}.{kind.__qualname__}{extra} can't be "
        "stored in a checkpoint, because loading it would run code that the file names. "
        f"Convert it to one of the supported types: {'; '.join(ALLOWED_OBJECTS)}; or give the "
        "object that owns it state_dict() and load_state_dict()",
        field=name,
    )


class _Writer(pickle.Pickler):
    """The C pickler. Values were checked; this only makes sure that no name is written that can't be read back."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[bytes] = []

    def reducer_override(self, obj: Any) -> Any:

        if type(obj) not in _REDUCED and not _is_leaf(obj):
            name = f"{getattr(obj, '__module__', None)}.{getattr(obj, '__qualname__', None)}"
            if name not in _names():
                raise ConfigError(
                    f"{obj!r:.200} can't be stored in a checkpoint; it was added while the state was being pickled"
                )
        return NotImplemented


@dataclass(frozen=True, slots=True)
class _StorageReference:
    """Stands in the object graph for a storage; becomes a persistent id as `torch.save` writes it."""

    kind: Any
    key: str
    length: int


class _TensorWriter(_Writer):
    """Pickle objects that contain tensors. Separate, because a persistent_id method is called for every single
    value.
    """

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, obj.key, "cpu", obj.length) if type(obj) is _StorageReference else None

    def reducer_override(self, obj: Any) -> Any:
        if not _is_tensor(obj):
            return super().reducer_override(obj)
        import torch

        from holdfast._torch_compat import rebuild_parameter, rebuild_tensor_v2, rebuild_tensor_v3

        if type(obj) is torch.nn.Parameter:
            return rebuild_parameter, (obj.detach(), obj.requires_grad, OrderedDict())
        content = _tensor_bytes(obj)
        key = str(len(self.storages))
        self.storages.append(content)
        strides = torch.empty(obj.shape, device="meta").stride()
        legacy = LEGACY_STORAGES.get(str(obj.dtype).removeprefix("torch."))
        if legacy is not None:
            storage = _StorageReference(getattr(torch, legacy), key, obj.numel())
            tail: Iterable[Any] = ()
        else:
            storage, tail = _StorageReference(torch.UntypedStorage, key, len(content)), (obj.dtype,)
        arguments = (storage, 0, tuple(obj.shape), strides, obj.requires_grad, OrderedDict(), *tail)
        return (rebuild_tensor_v2 if legacy is not None else rebuild_tensor_v3), arguments


class _AroundWriter(_Writer):
    """Pickle objects without their tensors, which are numbers by id."""

    def __init__(self, file: io.BytesIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> Any:
        return self._numbers[id(obj)] if isinstance(obj, torch.Tensor) else None


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the values, row-major. Through a view of the storage: not every dtype has a view as bytes."""
    import torch

    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage())
    start = dense.storage_offset() * dense.itemsize
    return bytes(flat[start : start + dense.numel() * dense.itemsize].numpy())


# Read objects that Holdfast or stock `torch.save` wrote (numpy 1 and 2, Python's old module names, storages of any
# device, which are loaded to the CPU). Arrays and tensors are created only if the record has exactly the bytes that
# their shape needs; ``__setstate__`` of numpy and torch never sees unchecked state.


def read_object(record: memoryview) -> Any:
    """The object that a record holds. Raises `PickleRefused` or `MalformedRecord`."""
    entries = read_entries(record)
    if "data.pkl" not in entries:
        raise MalformedRecord("it has no data.pkl")
    if bytes(entries.get("byteorder", memoryview(b"little"))) != b"little":
        raise MalformedRecord("it was written on a big-endian machine")
    names, makers = _names(), _makers()
    return read_pickle(
        entries["data.pkl"], Vocabulary(names, makers, build=_build, persistent=_Storages(entries).resolve)
    )


# containers ----------------------------------------------------------------------------------------------------


def _require(condition: bool, what: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise PickleRefused(f"{what} is damaged, or is built in a way that is not allowed")


def _keys(items: Any) -> Any:
    _require(type(items) in (list, tuple), "a set")
    check_keys(items, {})
    return items


def _make_set(items: Any = ()) -> set[Any]:
    return set(_keys(items))


def _make_frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_keys(items))


def _make_bytes() -> bytes:
    return b""  # protocol 2 calls bytes() only for these


def _make_bytearray(content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    # Never a number: bytearray(n) would allocate what the stream claims.
    return bytearray(content if type(content) is bytes else _encode(content, encoding))


def _encode(text: Any, encoding: Any) -> bytes:
    """Encode bytes as pickle protocol 2 does: as a string of their code points."""
    _require(type(text) is str and encoding in ("latin1", "latin-1"), "a bytes value")
    encoded: bytes = text.encode("latin-1")
    return encoded


def _make_stream() -> io.BytesIO:
    return io.BytesIO()  # its content and position come as state


def _make_complex(real: Any, imaginary: Any) -> complex:
    _require(type(real) is float and type(imaginary) is float, "a complex number")
    return complex(real, imaginary)


def _make_range(start: Any, stop: Any, step: Any) -> range:
    return range(start, stop, step)


def _make_slice(start: Any, stop: Any, step: Any) -> slice:
    # Not of slices: Python takes them apart one inside the other, and overflows its stack.
    _require(not any(type(part) in NO_SLICE_PARTS for part in (start, stop, step)), "a slice")
    return slice(start, stop, step)


def _make_mapping(kind: type[Counter[Any] | OrderedDict[Any, Any]]) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        made = kind()
        if arguments:
            (items,) = arguments
            _require(type(items) in (dict, list), f"a {kind.__name__}")
            pairs = list(items.items() if type(items) is dict else items)
            check_keys([key for key, _ in pairs], {})
            made.update(pairs if kind is OrderedDict else dict(pairs))
        return made

    return make


def _make_defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
    _require(factory is None or any(factory is allowed for allowed in FACTORIES), "a defaultdict")
    return defaultdict(factory)


def _make_deque(items: Any = (), length: Any = None) -> deque[Any]:
    _require(type(items) in (tuple, list) and (length is None or type(length) is int), "a deque")
    return deque(items, length)


# numpy ---------------------------------------------------------------------------------------------------------

_DTYPE: Final = re.compile(rf"[{ARRAY_KINDS}]\d{{1,9}}")


def _make_dtype(spec: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:  # noqa: ARG001, FBT002
    _require(type(spec) is str and _DTYPE.fullmatch(spec) is not None, "a numpy dtype")
    made: np.dtype[Any] = np.dtype(spec)
    return made


def _make_empty_array(kind: Any, shape: Any, typecode: Any) -> np.ndarray[Any, Any]:
    """Create the initial array of numpy's pickles; its real shape, dtype and bytes come as state."""
    _require(kind is np.ndarray and shape == (0,) and typecode in (b"b", "b"), "a numpy array")
    made: np.ndarray[Any, Any] = np.ndarray((0,), np.int8)
    return made


def _make_scalar(dtype: Any, content: Any) -> Any:
    _require(isinstance(dtype, np.dtype) and type(content) is bytes, "a numpy scalar")
    _require(dtype.kind in ARRAY_KINDS and len(content) == dtype.itemsize, "a numpy scalar")
    return np.frombuffer(content, dtype, 1)[0] if content else dtype.type()


def _build(target: Any, state: Any) -> None:
    if isinstance(target, np.dtype):
        _check_dtype_state(target, state)
    elif type(target) is np.ndarray:
        _require(type(state) is tuple and len(state) == 5 and state[0] == 1, "a numpy array")
        _, shape, dtype, fortran, content = state
        _require(isinstance(dtype, np.dtype) and dtype.kind in ARRAY_KINDS, "a numpy array")
        _require(_whole(shape) and type(fortran) is bool and type(content) is bytes, "a numpy array")
        _require(prod(shape) * dtype.itemsize == len(content), "a numpy array")
        target.__setstate__(state)
    elif type(target) is io.BytesIO:
        _require(type(state) is tuple and len(state) == 3, "a BytesIO")
        content, position, attributes = state
        _require(type(content) is bytes and type(position) is int and 0 <= position <= len(content), "a BytesIO")
        _require(attributes is None or attributes == {}, "a BytesIO")
        stream: Any = target  # typeshed doesn't list the method
        stream.__setstate__((content, position, None))
    elif type(target) is OrderedDict and type(state) is dict and state.keys() <= {"_metadata"}:
        vars(target).update(state)
    else:
        raise PickleRefused(f"it sets the state of a {type(target).__name__}")


def _check_dtype_state(dtype: np.dtype[Any], state: Any) -> None:
    """A dtype of a listed kind is whole when it is made: its state may only repeat that."""
    _require(type(state) is tuple and len(state) == 8, "a numpy dtype")
    _, order, subdtype, names, fields, itemsize, _, _ = state
    _require(subdtype is None and names is None and fields is None, "a numpy dtype")
    _require(order in ("<", "|", "="), "a numpy dtype in big-endian byte order")
    _require(itemsize in (-1, dtype.itemsize), "a numpy dtype")


def _whole(values: Any) -> bool:
    return type(values) in (tuple, torch.Size) and all(type(value) is int and value >= 0 for value in values)


# torch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StorageKind:
    """Stand-in for ``torch.FloatStorage`` and similar classes."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Storage:
    content: torch.Tensor
    dtype: torch.dtype


class _Storages:
    """The storages of one record, each copied out once however many tensors share it."""

    def __init__(self, entries: Mapping[str, memoryview]) -> None:
        self._entries = entries
        self._loaded: dict[str, torch.Tensor] = {}

    def resolve(self, identity: Any) -> _Storage:
        _require(type(identity) is tuple and len(identity) == 5 and identity[0] == "storage", "a storage")
        _, kind, key, _, length = identity
        _require(type(kind) is _StorageKind and type(key) is str and type(length) is int, "a storage")
        content = self._loaded.get(key)
        if content is None:
            view = self._entries.get(f"data/{key}")
            if view is None:
                raise MalformedRecord(f"it has no storage {key!r}")
            content = torch.empty(len(view), dtype=torch.uint8)
            content.numpy()[:] = view
            self._loaded[key] = content
        _require(length * kind.dtype.itemsize == len(content), "a storage")
        return _Storage(content, kind.dtype)


def _rebuild(
    storage: _Storage, dtype: torch.dtype, geometry: tuple[Any, Any, Any], metadata: Any = None
) -> torch.Tensor:
    offset, sizes, strides = geometry
    _require(type(offset) is int and offset >= 0 and _whole(sizes) and _whole(strides), "a tensor")
    _require(len(sizes) == len(strides), "a tensor")
    # set_ would grow the storage to what is claimed: it is asked only for what is there.
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    end = offset if 0 in sizes else last + 1
    _require(end * dtype.itemsize <= len(storage.content), "a tensor")
    tensor = torch.empty(0, dtype=dtype).set_(storage.content.untyped_storage(), offset, sizes, strides)
    if metadata:
        _require(type(metadata) is dict and metadata.keys() <= {"conj", "neg"}, "a tensor")
        if metadata.get("conj"):
            tensor = tensor.conj()
        if metadata.get("neg"):
            tensor = tensor.neg()
    return tensor


def _make_tensor(*arguments: Any) -> torch.Tensor:
    """``_rebuild_tensor_v2``: the dtype is the storage's."""
    storage, offset, sizes, strides, grad, _, *metadata = arguments
    _require(type(storage) is _Storage and type(grad) is bool and len(metadata) < 2, "a tensor")
    return _rebuild(storage, storage.dtype, (offset, sizes, strides), *metadata).requires_grad_(grad)


def _make_tensor_v3(*arguments: Any) -> torch.Tensor:
    """``_rebuild_tensor_v3``: the storage is untyped, the dtype comes beside it."""
    storage, offset, sizes, strides, grad, _, dtype, *metadata = arguments
    _require(type(storage) is _Storage and type(grad) is bool and len(metadata) < 2, "a tensor")
    _require(type(dtype) is torch.dtype, "a tensor")
    return _rebuild(storage, dtype, (offset, sizes, strides), *metadata).requires_grad_(grad)


def _make_parameter(content: Any, grad: Any, _: Any) -> torch.nn.Parameter:
    _require(type(content) is torch.Tensor and type(grad) is bool, "a parameter")
    return torch.nn.Parameter(content, grad)


def _make_size(sizes: Any) -> torch.Size:
    _require(type(sizes) is tuple and all(type(size) is int for size in sizes), "a torch.Size")
    return torch.Size(sizes)


def _make_device(kind: Any, index: Any = None) -> torch.device:
    _require(type(kind) is str and (index is None or type(index) is int), "a torch.device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _make_layout(name: Any) -> torch.layout:
    layouts = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
    _require(type(name) is str and name in layouts, "a torch.layout")
    return layouts[name]


# the vocabulary ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _makers() -> dict[Any, Callable[..., Any]]:
    return {
        set: _make_set,
        frozenset: _make_frozenset,
        bytes: _make_bytes,
        bytearray: _make_bytearray,
        io.BytesIO: _make_stream,
        complex: _make_complex,
        range: _make_range,
        slice: _make_slice,
        OrderedDict: _make_mapping(OrderedDict),
        Counter: _make_mapping(Counter),
        defaultdict: _make_defaultdict,
        deque: _make_deque,
        np.dtype: _make_dtype,
        torch.Size: _make_size,
        torch.device: _make_device,
        # These stand for themselves: no value is ever one of them.
        **{maker: maker for maker in (_encode, _make_empty_array, _make_scalar, _make_layout)},
        **{maker: maker for maker in (_make_tensor, _make_tensor_v3, _make_parameter)},
    }


@lru_cache(maxsize=1)
def _names() -> dict[str, Any]:
    builtin = {kind.__name__: kind for kind in (set, frozenset, bytes, bytearray, complex, range, slice, *FACTORIES)}
    names: dict[str, Any] = {
        f"{module}.{name}": kind for module in ("builtins", "__builtin__") for name, kind in builtin.items()
    }
    # What protocol 2 calls these, after Python 2.
    names |= {"__builtin__.xrange": range, "__builtin__.long": int, "__builtin__.unicode": str}
    names |= {f"collections.{kind.__name__}": kind for kind in (OrderedDict, Counter, defaultdict, deque)}
    names["_codecs.encode"] = _encode
    names["_io.BytesIO"] = io.BytesIO
    names |= {"numpy.dtype": np.dtype, "numpy.ndarray": np.ndarray}
    for package in ("core", "_core"):  # numpy 1 and 2
        names[f"numpy.{package}.multiarray._reconstruct"] = _make_empty_array
        names[f"numpy.{package}.multiarray.scalar"] = _make_scalar
    names |= {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    names |= {f"torch.{kind}": _StorageKind(getattr(torch, dtype)) for dtype, kind in LEGACY_STORAGES.items()}
    names["torch.storage.UntypedStorage"] = _StorageKind(torch.uint8)
    names["torch._utils._rebuild_tensor_v2"] = _make_tensor
    names["torch._utils._rebuild_tensor_v3"] = _make_tensor_v3
    names["torch._utils._rebuild_parameter"] = _make_parameter
    names["torch.serialization._get_layout"] = _make_layout
    names |= {"torch.Size": torch.Size, "torch.device": torch.device}
    return names


__all__ = [
    "ALLOWED_OBJECTS",
    "OBJECT_LIMIT_BYTES",
    "CapacityExceeded",
    "ObjectPayload",
    "dump_around",
    "dump_object",
    "load_around",
    "load_object",
    "object_capacity",
    "render_object",
]

_LEAST_BYTES: Final = 1024
_PICKLE: Final = b"a/data.pkl"
_VERSION: Final = b"a/version"
_VERSION_TEXT: Final = b"3\n"


class CapacityExceeded(ConfigError):
    """An object has outgrown its record: ``needed`` bytes, ``capacity`` there are. Never seen by users: it replans."""

    def __init__(self, message: str, *, needed: int, capacity: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.capacity = capacity


def dump_object(value: Any, *, name: str) -> ObjectPayload:
    """Pickle ``value``, which must consist of `ALLOWED_OBJECTS`; ``name`` is its name in the state.

    Returns when everything in it, tensors included, has been copied: it may be changed from then on. On a device
    tensor this waits for the device.

    Raises:
        ConfigError: something in it isn't on the list (the message says where and what), or it is larger than
            `OBJECT_LIMIT_BYTES`. Nothing has been written.
    """
    buffer = io.BytesIO()
    return _dumped(_TensorWriter(buffer) if _check(value, name) else _Writer(buffer), buffer, value, name)


def dump_around(value: Any, *, name: str, outside: Callable[[str, torch.Tensor], int]) -> bytes:
    """Pickle ``value`` without its tensors, wherever in it they are; `load_around` puts others in their places.

    outside: called once for each tensor object, with its position; returns the number by which it is asked for.

    Raises `ConfigError` as `dump_object` does, and what ``outside`` raises.
    """
    numbers: dict[int, int] = {}
    buffer = io.BytesIO()
    _check(value, name, lambda where, tensor: numbers.update({id(tensor): outside(where, tensor)}))
    return _dumped(_AroundWriter(buffer, numbers), buffer, value, name).pickle


def _dumped(writer: _Writer, buffer: io.BytesIO, value: Any, name: str) -> ObjectPayload:
    try:
        writer.dump(value)
    except RecursionError as error:
        raise ConfigError(
            f"{name}: the object is nested too deeply to be stored in a checkpoint", field=name
        ) from error
    payload = ObjectPayload(buffer.getvalue(), tuple(writer.storages))
    if payload.nbytes > OBJECT_LIMIT_BYTES:
        raise ConfigError(
            f"{name}: the object takes {payload.nbytes:,} bytes, more than {OBJECT_LIMIT_BYTES:,}; "
            "store large data as tensors",
            field=name,
        )
    return payload


def object_capacity(payload: ObjectPayload, previous: int = 0) -> int:
    """Length in bytes of the record to plan for ``payload``: a multiple of 64, at least 1,024.

    ``previous`` if it fits (a capacity never shrinks), else a quarter more than is needed, rounded up to a power of
    two; past 1 MiB to an eighth of one, since doubling a large object would double what is written.
    """
    needed = _needed_bytes(payload)
    if needed <= previous:
        return previous
    wanted = max(needed + needed // 4, _LEAST_BYTES)
    power = 1 << (wanted - 1).bit_length()
    step = power if power <= 1 << 20 else power // 8
    return -(-wanted // step) * step


def render_object(payload: ObjectPayload, capacity: int) -> bytes:
    """The record, exactly ``capacity`` bytes. Raises `CapacityExceeded` if the payload doesn't fit."""
    needed = _needed_bytes(payload)
    if needed > capacity:
        raise CapacityExceeded(
            f"an object takes {needed:,} bytes, more than its record's {capacity:,}", needed=needed, capacity=capacity
        )
    parts: list[bytes] = []
    directory: list[bytes] = []
    position = 0
    for name, content in _entries(payload):
        padding = _padding(name, content, position)
        crc = zlib.crc32(content)
        directory.append(zip_entries.central_entry(name, len(content), crc, position))
        parts += (zip_entries.local_header(name, len(content), crc, padding=padding), content)
        position += len(parts[-2]) + len(content)
    # The pickle comes last: whatever capacity is left becomes its padding, and nothing behind it can move.
    spare = bytes(capacity - needed)
    size = len(payload.pickle) + len(spare)
    crc = zlib.crc32(spare, zlib.crc32(payload.pickle))
    directory.append(zip_entries.central_entry(_PICKLE, size, crc, position))
    parts += (zip_entries.local_header(_PICKLE, size, crc), payload.pickle, spare)
    position += len(parts[-3]) + size
    listing = b"".join(directory)
    record = b"".join((*parts, listing, zip_entries.end_record(len(directory), len(listing), position, wide=False)))
    assert len(record) == capacity
    return record


def load_object(record: bytes | bytearray | memoryview, *, name: str, path: str) -> Any:
    """The object that ``record`` holds, one of ours or one that stock `torch.save` wrote. Tensors come on the CPU.

    Raises:
        CheckpointCorrupt: the record is damaged, or names something that isn't on `ALLOWED_OBJECTS`; the message
            says what. ``name`` and ``path`` are for it.
    """

    try:
        return read_object(memoryview(record).cast("B"))
    except (PickleRefused, zip_entries.MalformedRecord) as error:
        raise CheckpointCorrupt(
            f"object {name!r} of {path} can't be loaded: {error}. Holdfast loads only types that can't run code: "
            f"{'; '.join(ALLOWED_OBJECTS)}. If another program wrote it and you trust it, load it there and save it "
            "again as one of these",
            path=path,
            tensor=name,
        ) from error


def load_around(data: bytes, tensors: Sequence[Any], *, name: str, path: str) -> Any:
    """Return the value that `dump_around` pickled, with ``tensors`` by number in the places of its own.

    Raises:
        CheckpointCorrupt: as `load_object`; ``name`` and ``path`` are for the message.
    """

    def inside(number: Any) -> Any:
        _require(type(number) is int and 0 <= number < len(tensors), "the place of a tensor")
        return tensors[number]

    try:
        return read_pickle(data, Vocabulary(_names(), _makers(), build=_build, persistent=inside))
    except PickleRefused as error:
        raise CheckpointCorrupt(f"{name} from {path} can't be loaded: {error}", path=path, tensor=name) from error


def _entries(payload: ObjectPayload) -> list[tuple[bytes, bytes]]:
    """Every entry but the pickle, in the order of the record."""
    return [
        (_VERSION, _VERSION_TEXT),
        *((f"a/data/{n}".encode(), content) for n, content in enumerate(payload.storages)),
    ]


def _padding(name: bytes, content: bytes, position: int) -> int:
    if name == _VERSION:
        return 0
    return zip_entries.padding_bytes(position + zip_entries.local_bytes(name, len(content)), RECORD_ALIGN_BYTES)


def _needed_bytes(payload: ObjectPayload) -> int:
    position = directory = 0
    for name, content in _entries(payload):
        position += zip_entries.local_bytes(name, len(content)) + _padding(name, content, position) + len(content)
        directory += zip_entries.CENTRAL_BYTES + len(name)
    position += zip_entries.local_bytes(_PICKLE, 0) + len(payload.pickle)
    directory += zip_entries.CENTRAL_BYTES + len(_PICKLE)
    return position + directory + zip_entries.end_bytes(wide=False)
