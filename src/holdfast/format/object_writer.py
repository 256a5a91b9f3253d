"""Which plain objects a checkpoint may hold, and their pickles.

The list is short on purpose: what is on it comes back on any machine without running code that a file names. A value is
checked before anything is written, member by member, so that the error can say where in the state the odd one is.

Guarantees: what `pickle_object` returns, `object_reader` reads back to an equal value of the same types; builtin types
are pickled at C speed; tensors inside containers keep dtype, shape and `requires_grad`, and come back on the CPU.
Does not: keep storage that two tensors of one object share (each gets its own copy), attributes set on a tensor, or
subclasses of the listed types: they would come back as something else.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.format.pickle_costs import TAKEN_APART_NESTED, WHOLE_MAX, Refused, check_keys, check_nesting
from holdfast.format.torch_record import LEGACY_STORAGES

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

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
"""What a defaultdict may make its values with."""

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


def pickle_object(value: Any, *, name: str) -> ObjectPayload:
    """Check ``value`` against `ALLOWED_OBJECTS` and pickle it, protocol 2. ``name`` is its name in the state.

    Returns when the value, tensors included, has been copied: it may be changed from then on.

    Raises:
        ConfigError: something in it isn't on the list, or it is larger than `OBJECT_LIMIT_BYTES`.
    """
    buffer = io.BytesIO()
    writer = _TensorWriter(buffer) if _check(value, name) else _Writer(buffer)
    try:
        writer.dump(value)
    except RecursionError as error:
        raise ConfigError(f"{name}: the object is nested too deeply to be kept in a checkpoint", field=name) from error
    payload = ObjectPayload(buffer.getvalue(), tuple(writer.storages))
    if payload.nbytes > OBJECT_LIMIT_BYTES:
        raise ConfigError(
            f"{name}: the object takes {payload.nbytes:,} bytes, more than {OBJECT_LIMIT_BYTES:,}; "
            "keep large data as tensors of their own",
            field=name,
        )
    return payload


def _check(value: Any, name: str) -> bool:
    """Raise for what isn't on the list; True if there are tensors in ``value``."""
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
                pending.extend((f"{where} (key {key!r:.80})", key) for key in item if type(key) not in _ATOMS)
            if not _ATOMS.issuperset(map(type, item.values())):
                pending.extend((f"{where}[{key!r:.80}]", member) for key, member in item.items())
        elif kind is slice:
            if any(type(part) in NO_SLICE_PARTS for part in (item.start, item.stop, item.step)):
                message = f"{where}: a slice of slices, deques or defaultdicts can't be kept in a checkpoint"
                raise ConfigError(message, field=name)
            pending.extend((f"{where}.{part}", getattr(item, part)) for part in ("start", "stop", "step"))
        elif _is_tensor(item):
            _check_tensor(item, where, name)
            tensors = True
        elif not _is_leaf(item):
            raise _refusal(item, where, name)
    try:
        check_nesting(nested)
    except Refused as error:
        raise ConfigError(f"{name}: {error}; such an object can't be kept in a checkpoint", field=name) from error
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
    except Refused as error:
        raise ConfigError(f"{where}: {error}; such a container can't be kept in a checkpoint", field=name) from error


def _check_mapping(item: Any, where: str, name: str) -> None:
    if type(item) is defaultdict and item.default_factory is not None and item.default_factory not in FACTORIES:
        raise ConfigError(
            f"{where}: a defaultdict made with {item.default_factory!r} can't be kept in a checkpoint; "
            f"its factory may be one of {', '.join(kind.__name__ for kind in FACTORIES)}",
            field=name,
        )
    if type(item) is OrderedDict and not vars(item).keys() <= {"_metadata"}:
        raise ConfigError(f"{where}: an OrderedDict with attributes can't be kept in a checkpoint", field=name)


def _is_leaf(item: Any) -> bool:
    """Whether a value that isn't a builtin type is on the list. A library that isn't imported made no value."""
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
            f"{where}: a {dtype} tensor of layout {item.layout} on {item.device} can't be kept in a checkpoint; "
            f"it must be dense, have data, and be one of {', '.join(sorted(ITEMSIZE))}",
            field=name,
        )


def _refusal(item: Any, where: str, name: str) -> ConfigError:
    kind = type(item)
    extra = ""
    dtype = getattr(item, "dtype", item)
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(dtype, "kind"):
        extra = f" (dtype {dtype})"
    return ConfigError(
        f"{where}: a value of type {kind.__module__}.{kind.__qualname__}{extra} can't be kept in a checkpoint, because "
        "it couldn't be loaded back without running code that the file names. Convert it to what can be kept, exactly "
        f"one of: {'; '.join(ALLOWED_OBJECTS)}; or give its owner state_dict() and load_state_dict()",
        field=name,
    )


class _Writer(pickle.Pickler):
    """The C pickler. Values were checked; this only makes sure that no name is written that can't be read back."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[bytes] = []

    def reducer_override(self, obj: Any) -> Any:
        from holdfast.format.object_reader import known_names

        if type(obj) not in _REDUCED and not _is_leaf(obj):
            name = f"{getattr(obj, '__module__', None)}.{getattr(obj, '__qualname__', None)}"
            if name not in known_names():
                raise ConfigError(f"{obj!r:.200} can't be kept in a checkpoint; it came in while the state was pickled")
        return NotImplemented


@dataclass(frozen=True, slots=True)
class _StorageReference:
    """Stands in the object graph for a storage; becomes a persistent id as `torch.save` writes it."""

    kind: Any
    key: str
    length: int


class _TensorWriter(_Writer):
    """For objects with tensors in them. Apart, because a persistent_id method is called for every single value."""

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


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the values, row-major. Through a view of the storage: not every dtype has a view as bytes."""
    import torch

    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage())
    start = dense.storage_offset() * dense.itemsize
    return bytes(flat[start : start + dense.numel() * dense.itemsize].numpy())
