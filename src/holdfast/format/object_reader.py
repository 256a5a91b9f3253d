"""Plain objects from their records: the vocabulary of what a stored object may name, and its makers.

Reads what `object_writer` writes and what stock `torch.save` writes for the same types (numpy 1 and 2, Python's old
module names, storages of any device, which come back on the CPU).

Guarantees, beside those of `pickle_reader`: arrays and tensors are made only where their bytes are in the record, of
exactly the size that their shape needs; numpy's and torch's own ``__setstate__`` never see unchecked state.
Does not: load object arrays, structured dtypes, sparse, quantized or nested tensors, or anything that isn't on
`ALLOWED_OBJECTS`.
"""

from __future__ import annotations

import io
import re
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from holdfast.format.object_writer import ARRAY_KINDS, FACTORIES, NO_SLICE_PARTS
from holdfast.format.pickle_costs import check_keys
from holdfast.format.pickle_reader import Refused, Vocabulary, read_pickle
from holdfast.format.torch_record import LEGACY_STORAGES
from holdfast.format.zip_entries import MalformedRecord, read_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def read_object(record: memoryview) -> Any:
    """The object that a record holds. Raises `Refused` or `MalformedRecord`."""
    entries = read_entries(record)
    if "data.pkl" not in entries:
        raise MalformedRecord("it has no data.pkl")
    if bytes(entries.get("byteorder", memoryview(b"little"))) != b"little":
        raise MalformedRecord("it was written on a big-endian machine")
    names, makers = _names(), _makers()
    return read_pickle(
        entries["data.pkl"], Vocabulary(names, makers, build=_build, persistent=_Storages(entries).resolve)
    )


def known_names() -> Mapping[str, Any]:
    """Every ``module.qualname`` that a stored object may refer to."""
    return _names()


# containers ----------------------------------------------------------------------------------------------------


def _require(condition: bool, what: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise Refused(f"{what} is damaged or made in a way that isn't on the list")


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
    """How protocol 2 writes bytes: as a string of their code points."""
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
    """What numpy starts an array with; its real shape, dtype and bytes come as state."""
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
        raise Refused(f"it sets the state of a {type(target).__name__}")


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
    """What ``torch.FloatStorage`` and its like stand for."""

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
