"""`are_equal` on everything that a checkpoint may hold."""

from __future__ import annotations

import io
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.format.objects import dump_object, load_object, object_capacity, render_object
from holdfast.loader.object_digest import are_equal


def kept(value: Any) -> Any:
    """Return the value as a checkpoint gives it back."""
    payload = dump_object(value, name="value")
    return load_object(render_object(payload, object_capacity(payload)), name="value", path="here")


def nan(payload: int = 0) -> float:
    found: float = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0000 + payload))[0]
    return found


def with_metadata(number: int) -> OrderedDict[str, Any]:
    found: OrderedDict[str, Any] = OrderedDict(a=1)
    vars(found)["_metadata"] = {"version": number}
    return found


def chain(length: int) -> Any:
    found: Any = 1
    for _ in range(length):
        found = [found]
    return found


def doubled(times: int) -> Any:
    """A list whose levels share their members: without that, 2**times of them."""
    found: Any = [0.0]
    for _ in range(times):
        found = [found, found]
    return found


def at(position: int) -> io.BytesIO:
    stream = io.BytesIO(b"abc")
    stream.seek(position)
    return stream


ALIKE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "\ud800 text",
    "whole": lambda: 10**5000,
    "bytes": lambda: (b"a", bytearray(b"a")),
    "stream": lambda: io.BytesIO(b"a"),
    "nan": lambda: [nan(), complex(nan(), -0.0), np.float32("nan"), np.complex64(complex(0, nan()))],
    "nan in a deque": lambda: deque([nan()]),
    "nan in a set": lambda: {nan(), nan(), 1.0},
    "nan as a key": lambda: ({nan(): 1, nan(): 2},),
    "arrays in a deque": lambda: deque([np.ones(2), torch.ones(2), torch.nn.Parameter(torch.ones(2))]),
    "arrays": lambda: (np.array(["a", "bc"]), np.array([b"a"]), np.array(True), np.zeros((0, 3)), np.longlong(1)),
    "numpy": lambda: (np.dtype("f4"), np.str_("a"), np.bytes_(b""), np.bool_(True), np.uint8(3)),
    "range": lambda: (range(3), range(0), range(10**40)),
    "slice": lambda: slice(None, torch.ones(1), (1, 2)),
    "mappings": lambda: (defaultdict(list, {1: [2]}), Counter("aab"), with_metadata(1), {(1, None): {}}),
    "sets": lambda: ({1, "a", (2, 3)}, frozenset({frozenset({1}), None})),
    "torch": lambda: (torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda", 1), torch.strided),
    "tensors": lambda: (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, 3).T, torch.ones(())),
    "packed": lambda: (torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),),
    "nested": lambda: (chain(300),),
    "shared": lambda: (doubled(60),),
}
UNLIKE: dict[str, tuple[Any, Any]] = {
    "bool and int": (True, 1),
    "int and float": (1, 1.0),
    "sign of zero": (0.0, -0.0),
    "another nan": (nan(), nan(1)),
    "sign of complex zero": (complex(0.0, 0.0), complex(-0.0, 0.0)),
    "sign of numpy's zero": (np.float32(0.0), np.float32(-0.0)),
    "numpy and python": (np.float64(1.0), 1.0),
    "numpy's types": (np.float32(1.0), np.float64(1.0)),
    "dtypes of arrays": (np.array(["a"]), np.array(["a"], dtype="<U5")),
    "shapes of arrays": (np.zeros((2, 3)), np.zeros((3, 2))),
    "dtypes": (np.dtype("f4"), np.dtype("f8")),
    "bytes and bytearray": (b"a", bytearray(b"a")),
    "streams": (io.BytesIO(b"a"), io.BytesIO(b"b")),
    "positions of streams": (at(0), at(1)),
    "list and tuple": ([1], (1,)),
    "lengths": ([1], [1, 1]),
    "parts of texts": (["ab", "c"], ["a", "bc"]),
    "levels": ([[1], 2], [[1, 2]]),
    "deque of bool": (deque([1]), deque([True])),
    "length of a deque": (deque([1], maxlen=2), deque([1], maxlen=3)),
    "tensors in a deque": (deque([torch.ones(2)]), deque([torch.zeros(2)])),
    "arrays in a deque": (deque([np.ones(2)]), deque([np.zeros(2)])),
    "set of bool": ({True}, {1}),
    "set and frozenset": ({1}, frozenset({1})),
    "one nan and two": ({nan()}, {nan(), nan()}),
    "slice of bool": (slice(0, 1), slice(False, True)),
    "ranges": (range(0, 4, 2), range(0, 4, 3)),
    "empty range": (range(0), range(1)),
    "factories": (defaultdict(list), defaultdict(int)),
    "factory and none": (defaultdict(None), defaultdict(int)),
    "key of bool": (({1: 0},), ({True: 0},)),
    "value of a key": ({1: 0, 2: 1}, {1: 1, 2: 0}),
    "mapping types": ({"a": 1}, Counter("a")),
    "order of an OrderedDict": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    "metadata": (with_metadata(1), with_metadata(2)),
    "sizes": (torch.Size([1]), (1,)),
    "devices": (torch.device("cuda", 0), torch.device("cuda", 1)),
    "tensor and parameter": ((torch.ones(1),), (torch.nn.Parameter(torch.ones(1)),)),
    "sign of a tensor's zero": ((torch.zeros(1),), (-torch.zeros(1),)),
    "dtypes of tensors": ((torch.zeros(2, dtype=torch.int32),), (torch.zeros(2, dtype=torch.float32),)),
    "shapes of tensors": ((torch.zeros(2),), (torch.zeros(2, 1),)),
}
REORDERED: dict[str, tuple[Any, Any]] = {
    "dict": (({"a": 1, "b": 2},), ({"b": 2, "a": 1},)),
    "Counter": ((Counter("ab"),), (Counter("ba"),)),
    "defaultdict": (defaultdict(int, {1: 1, 2: 2}), defaultdict(int, {2: 2, 1: 1})),
    "set": ({8, 0}, {0, 8}),
    "range": (range(0, 3, 2), range(0, 4, 2)),
    "layout": (np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6).reshape(2, 3)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_kept_twice_is_equal(name: str) -> None:
    assert are_equal(kept(ALIKE[name]()), kept(ALIKE[name]()))


@pytest.mark.parametrize("name", UNLIKE)
def test_types_and_bits_tell_values_apart(name: str) -> None:
    one, other = map(kept, UNLIKE[name])
    assert not are_equal(one, other)
    assert not are_equal([(one,)], [(other,)])
    assert are_equal(one, kept(one))
    assert are_equal(other, kept(other))


@pytest.mark.parametrize("name", REORDERED)
def test_order_counts_only_where_it_means_something(name: str) -> None:
    assert are_equal(*map(kept, REORDERED[name]))


def test_what_cannot_be_compared_counts_as_changed() -> None:
    endless: list[Any] = []
    endless.append((endless,))
    again = kept((endless,))
    assert not are_equal(again, again)
    assert not are_equal([object], [object])
