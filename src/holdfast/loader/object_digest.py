"""Digest plain objects, to tell whether two are alike: by type and by bits, whatever is shared inside them.

    leaf       -> digest of (type, detail, bytes)
    container  -> digest of (type, detail, digests of what it holds)

Guarantees: -0 differs from 0, 1 from True, a NaN only from one with other bits. Order counts, but not in a set and in
a mapping, an `OrderedDict` excepted; keys count by type too. Takes time for what is stored, however often it is
referred to, and no stack, however it is nested.
Does not: compare what holds itself, or isn't on the list of `ALLOWED_OBJECTS`: `are_equal` takes it for changed.
"""

from __future__ import annotations

import io
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch

from holdfast._torch_compat import host_memory

_SMALL: Final = frozenset({type(None), bool, int, float, complex, str})
"""Types of leaves that are digested as often as they are met: to remember them would take more."""
_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_SETS: Final = frozenset({set, frozenset})
_CONTAINERS: Final = frozenset({list, tuple, deque, slice, *_SETS, *_MAPPINGS})
_NAMED: Final = (torch.Size, torch.dtype, torch.device, torch.layout, np.dtype)
"""Types whose text says all about a value."""


class _IncomparableError(TypeError):
    """A value that has no digest."""


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two plain objects are alike, as the module says; False too for what can't be compared."""
    if type(one) is not type(other):
        return False
    try:
        return _digest(one) == _digest(other)
    except _IncomparableError:
        return False


def _digest(value: Any) -> bytes:
    """Return the digest of a value. Raises `_IncomparableError`."""
    known: dict[int, bytes] = {}
    opened: set[int] = set()
    pending = [value]
    while pending:
        item = pending[-1]
        here = id(item)
        if here not in known:
            held = _held(item)
            unknown = [each for each in held if type(each) not in _SMALL and id(each) not in known]
            if unknown:
                if here in opened:
                    raise _IncomparableError("a container holds itself")
                opened.add(here)
                pending += unknown
                continue
            digests = [_of_leaf(each) if type(each) in _SMALL else known[id(each)] for each in held]
            known[here] = _of_container(item, digests) if type(item) in _CONTAINERS else _of_leaf(item)
        pending.pop()
    return known[id(value)]


def _held(value: Any) -> list[Any]:
    """Return what a container holds: of a mapping all keys, all values and its attributes. Nothing for a leaf."""
    kind = type(value)
    if kind is slice:
        return [value.start, value.stop, value.step]
    if kind in _MAPPINGS:
        return [*value, *value.values(), *([vars(value)] if kind is OrderedDict else ())]
    return list(value) if kind in _CONTAINERS else []


def _of_container(value: Any, digests: list[bytes]) -> bytes:
    kind, detail = type(value), ""
    if kind in _MAPPINGS:
        size = len(value)
        pairs = [key + item for key, item in zip(digests[:size], digests[size : 2 * size], strict=True)]
        digests = [*pairs, *digests[2 * size :]] if kind is OrderedDict else sorted(pairs)
    if kind in _SETS:
        digests.sort()
    if kind is deque:
        detail = str(value.maxlen)
    if kind is defaultdict:
        detail = str(value.default_factory)
    return _digested(kind, detail, b"".join(digests))


def _of_leaf(value: Any) -> bytes:
    """Return the digest of a value that isn't one of `_CONTAINERS`. Raises `_IncomparableError`."""
    kind, detail = type(value), ""
    content: bytes | bytearray | memoryview = b""
    if kind is str:
        content = value.encode("utf-8", "surrogatepass")
    elif kind is bool or kind is int:
        detail = f"{value:x}"  # as decimal digits, Python limits how many
    elif kind is float or kind is complex:
        content = struct.pack("<2d", value.real, value.imag)
    elif kind is bytes or kind is bytearray:
        content = value
    elif kind is io.BytesIO:
        detail, content = str(value.tell()), value.getvalue()
    elif kind is range:
        ends = (value[0], value[-1], value.step if value[0] != value[-1] else 1) if value else ()
        detail = " ".join(f"{number:x}" for number in ends)
    elif isinstance(value, (np.ndarray, np.generic)):
        detail, content = f"{value.dtype.str} {value.shape}", value.tobytes()
    elif isinstance(value, torch.Tensor):
        detail = f"{value.dtype} {tuple(value.shape)} {value.requires_grad}"
        content = host_memory(value.detach().resolve_conj().resolve_neg().contiguous())
    elif isinstance(value, _NAMED):
        detail = str(value)
    elif value is not None:
        raise _IncomparableError(f"a {kind.__qualname__}")
    return _digested(kind, detail, content)


def _digested(kind: type, detail: str, content: bytes | bytearray | memoryview) -> bytes:
    made = blake2b(f"{kind.__module__}.{kind.__qualname__} {detail}\0".encode(), digest_size=16)
    made.update(content)
    return made.digest()
