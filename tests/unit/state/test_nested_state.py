"""`holdfast.state.nested`: a nested state taken apart, filled, and put together."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.state.nested import Description, Landing, take_apart


def handed(state: Any, own: Any = None) -> Any:
    apart = take_apart(state)
    landing = Landing(apart.description, None if own is None else take_apart(own))
    for targets, source in zip(landing.flat, apart.flat, strict=True):
        assert targets
        for target in targets:
            target.copy_(source)
    return landing.put_together(path="the test")


def test_containers_keys_and_plain_values_come_back() -> None:
    state = {
        "user": {0: {"exp_avg": torch.arange(3.0)}, (1, 2): (torch.ones(2), [torch.zeros(()), "x"])},
        "plain": (1, 2.5, None, True, b"b", 1 << 90, {1, 2}, range(3), torch.float16, torch.Size([2])),
        "array": np.arange(4),
        "ordered": OrderedDict(a=torch.ones(1)),
        "deque": deque([torch.ones(1)], maxlen=2),
        "default": defaultdict(list, {3: [torch.ones(1)]}),
        "empty": [{}, [], ()],
    }
    state["ordered"]._metadata = {"": {"version": 2}}
    found = handed(state)
    assert list(found) == list(state)
    assert list(found["user"]) == [0, (1, 2)]
    assert type(found["user"][(1, 2)]) is tuple
    assert torch.equal(found["user"][0]["exp_avg"], torch.arange(3.0))
    assert found["user"][(1, 2)][1][1] == "x"
    assert found["plain"] == state["plain"]
    assert np.array_equal(found["array"], state["array"])
    assert type(found["ordered"]) is OrderedDict
    assert found["ordered"]._metadata == {"": {"version": 2}}
    assert found["deque"].maxlen == 2
    assert found["default"].default_factory is list
    assert found["empty"] == [{}, [], ()]


def test_tensors_keep_class_dtype_strides_and_memory() -> None:
    weight = torch.arange(24.0).reshape(2, 3, 4)
    odd = {
        "channels": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "gaps": weight[:, ::2],
        "expanded": torch.ones(1).expand(3),
        "conj": torch.tensor([1 + 2j]).conj(),
        "transposed": weight[0].t(),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "trains": torch.ones(2, requires_grad=True),
    }
    found = handed(odd)
    for name, tensor in odd.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            found[name].float() if name == "float8" else found[name],
            tensor.to(found[name].dtype).float() if name == "float8" else tensor,
        ), name
        assert found[name].requires_grad == tensor.requires_grad, name
    assert type(found["parameter"]) is nn.Parameter
    assert found["channels"].stride() == odd["channels"].stride()
    assert found["transposed"].stride() == (1, 4)
    assert found["gaps"].is_contiguous()


def test_tied_tensors_are_one_memory_and_one_object_stays_one() -> None:
    weight = nn.Parameter(torch.arange(4.0))
    state = {"a": weight.detach(), "b": weight.detach(), "again": [weight, weight], "empty": [torch.empty(0)] * 2}
    assert len(take_apart(state).flat) == 2
    found = handed(state)
    assert found["a"].data_ptr() == found["b"].data_ptr() == found["again"][0].data_ptr()
    assert found["again"][0] is found["again"][1]
    assert take_apart({"x": torch.empty(0), "y": torch.empty(0, 2)}).description.leaves[0].sizes in ((0,), (0, 2))


def test_it_is_received_into_the_tensors_that_are_there() -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "other": torch.ones(3), "tied": torch.ones(2)}
    state["same"] = state["tied"].detach()
    own = {"w": torch.zeros(2, 3), "other": torch.zeros(4), "tied": torch.zeros(2), "same": torch.zeros(2)}
    memory = own["w"].data_ptr()
    found = handed(state, own)
    assert found["w"] is own["w"]
    assert own["w"].data_ptr() == memory
    assert torch.equal(own["w"], state["w"])
    assert found["other"] is not own["other"]
    assert torch.equal(own["tied"], torch.ones(2))
    assert torch.equal(own["same"], torch.ones(2))
    assert not Landing(take_apart(state).description).in_place


def test_what_runs_code_or_has_no_bytes_is_refused_by_its_place() -> None:
    class Own:
        pass

    with pytest.raises(ConfigError, match=r"\['user'\]\['x'\]\[1\].*Own"):
        take_apart({"user": {"x": [torch.ones(1), Own()]}})
    with pytest.raises(ConfigError, match=r"\['sparse'\]"):
        take_apart({"sparse": torch.eye(2).to_sparse()})
    with pytest.raises(ConfigError, match=r"\['f'\].*function"):
        take_apart({"f": lambda: 1})


def test_a_description_that_contradicts_itself_is_refused() -> None:
    good = take_apart({"a": torch.ones(4)}).description
    (leaf,), (memory,) = good.leaves, good.memories
    for bad in (
        {"sizes": (5,)},
        {"sizes": (-4, -1)},
        {"memory": 1},
        {"memory": -1, "inner": (("x", 3),)},
        {"dtype": "int8"},
    ):
        fields = {name: getattr(leaf, name) for name in leaf.__struct_fields__} | bad
        with pytest.raises(CheckpointCorrupt):
            Landing(Description(good.skeleton, good.notes, (type(leaf)(**fields),), (memory,)))
    landing = Landing(Description(good.skeleton[:-3], good.notes, good.leaves, good.memories))
    with pytest.raises(CheckpointCorrupt, match="the test"):
        landing.put_together(path="the test")


tensors = st.builds(
    lambda sizes, dtype, turned: (
        torch.arange(24).to(dtype)[: 2 * sizes].reshape(2, sizes).t() if turned else torch.arange(sizes).to(dtype)
    ),
    st.integers(0, 6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool]),
    st.booleans(),
)
keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.booleans()
plain = st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    tensors | plain,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        lie_alike = one.is_contiguous() == other.is_contiguous()
        return one.dtype == other.dtype and lie_alike and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(alike, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_state_comes_back(state: Any) -> None:
    found = handed(state)
    assert alike(found, state)
    assert alike(handed(state, own=found), state)
