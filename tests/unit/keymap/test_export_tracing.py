"""Traced functions give what the same functions give on real tensors; what computes is refused by name."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _export_models import filled, sources_of
from torch import nn

from holdfast.errors import ConfigError
from holdfast.keymap.moves import first_defect, restrict_source
from holdfast.keymap.tracing import TracedTensor, trace

if TYPE_CHECKING:
    from collections.abc import Callable

State = dict[str, torch.Tensor]


@pytest.fixture
def state() -> State:
    return {
        "a": torch.arange(24.0).view(4, 6),
        "b": torch.arange(100.0, 124.0).view(4, 6),
        "experts": torch.arange(60.0).view(3, 4, 5),
        "bias": torch.arange(12.0),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "count": torch.arange(5),
    }


def assigned(shape: tuple[int, ...], *parts: tuple[Any, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    out = torch.empty(shape, **kwargs)
    for index, part in parts:
        out[index] = part
    return out


def overwritten(tensor: torch.Tensor, index: Any, part: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out[index] = part
    return out


def rope_permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As torchtitan's Llama adapter turns interleaved rotary halves into consecutive ones."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).clone()


FUNCTIONS: dict[str, Callable[[State], torch.Tensor]] = {
    "identity": lambda s: s["a"],
    "view": lambda s: s["a"].view(2, 12),
    "reshape of a transpose": lambda s: s["a"].t().reshape(3, 8),
    "flatten": lambda s: s["experts"].flatten(1),
    "unflatten": lambda s: s["bias"].unflatten(0, (3, 4)),
    "t": lambda s: s["a"].t(),
    "T": lambda s: s["a"].T,
    "mT": lambda s: s["experts"].mT,
    "transpose": lambda s: s["experts"].transpose(0, 2),
    "permute": lambda s: s["experts"].permute(2, 0, 1).contiguous(),
    "movedim": lambda s: s["experts"].movedim(0, -1),
    "swapaxes": lambda s: s["experts"].swapaxes(0, 1),
    "select": lambda s: s["experts"][1],
    "slice": lambda s: s["a"][1:3, 2:],
    "slice with a step": lambda s: s["a"][::2, 1::2],
    "negative index": lambda s: s["a"][-1],
    "ellipsis and None": lambda s: s["experts"][..., None, 2],
    "narrow": lambda s: s["a"].narrow(1, 2, 3),
    "split": lambda s: s["a"].split(2)[1],
    "split by sizes": lambda s: torch.split(s["a"], [1, 5], dim=1)[1],
    "chunk": lambda s: s["a"].chunk(3, dim=1)[2],
    "tensor_split": lambda s: s["a"].tensor_split(3)[2],
    "unbind": lambda s: s["experts"].unbind(0)[2],
    "unsqueeze": lambda s: s["a"].unsqueeze(1),
    "squeeze": lambda s: s["a"][:1].squeeze(0),
    "squeeze of all": lambda s: s["a"][:1, :1].squeeze(),
    "expand": lambda s: s["bias"].expand(3, 12),
    "expanded and reshaped": lambda s: s["bias"].view(3, 1, 4).expand(3, 2, 4).reshape(6, 4),
    "repeat": lambda s: s["a"].repeat(2, 1),
    "repeat with a new dimension": lambda s: s["a"].repeat(2, 1, 3),
    "repeat_interleave": lambda s: s["a"].repeat_interleave(2, dim=0),
    "tile": lambda s: s["bias"].tile(2),
    "diagonal": lambda s: s["a"].diagonal(),
    "unfold": lambda s: s["bias"].unfold(0, 4, 2),
    "as_strided": lambda s: s["a"].as_strided((3, 2), (1, 6), 2),
    "cat": lambda s: torch.cat([s["a"], s["b"]]),
    "cat of columns": lambda s: torch.cat([s["a"], s["b"][:, :2]], dim=-1),
    "cat with an empty": lambda s: torch.cat([torch.zeros(0), s["bias"], s["none"].flatten()]),
    "concat": lambda s: torch.concat([s["a"], s["b"]], 1),
    "stack": lambda s: torch.stack([s["a"], s["b"]]),
    "stack last": lambda s: torch.stack([s["a"], s["b"]], dim=-1),
    "interleaved": lambda s: torch.stack([s["a"], s["b"]], dim=1).flatten(0, 1),
    "hstack": lambda s: torch.hstack([s["a"], s["b"]]),
    "vstack": lambda s: torch.vstack([s["a"], s["b"]]),
    "cat of split": lambda s: torch.cat(s["a"].split(2)),
    "stack of unbind": lambda s: torch.stack(s["experts"].unbind(0)),
    "clone": lambda s: s["a"].t().clone(),
    "contiguous": lambda s: s["a"].t().contiguous().view(-1),
    "detach": lambda s: s["a"].detach(),
    "parameter": lambda s: nn.Parameter(s["a"]).data,
    "deepcopy": lambda s: copy.deepcopy(s["a"]),
    "to cpu": lambda s: s["a"].to("cpu"),
    "to copy": lambda s: s["a"][1:].to(torch.float32, copy=True),
    "bfloat16": lambda s: s["a"].bfloat16(),
    "half of a transpose": lambda s: s["a"].t().half(),
    "exact there and back": lambda s: s["a"].to(torch.float64).t().to(torch.float32),
    "type": lambda s: s["a"].type(torch.float64),
    "integers": lambda s: s["count"].to(torch.int32),
    "flip": lambda s: s["a"].flip(0),
    "flip both": lambda s: s["experts"].flip([0, 2]),
    "flip of a slice": lambda s: s["a"][1:, ::2].flip(-1),
    "fliplr": lambda s: s["a"].fliplr(),
    "roll": lambda s: s["a"].roll(2, 1),
    "roll of all": lambda s: s["a"].roll(5),
    "roll of two": lambda s: s["a"].roll((1, -2), (0, 1)),
    "index_select": lambda s: s["a"].index_select(1, torch.tensor([5, 0, 0, 2])),
    "index": lambda s: s["a"][[3, 1, 2]],
    "index of a later dimension": lambda s: s["experts"][:, torch.tensor([[0, 2], [3, 1]])],
    "negative indices": lambda s: s["a"][torch.tensor([-1, 0])],
    "mask": lambda s: s["a"][torch.tensor([True, False, True, True])],
    "every other by index": lambda s: s["bias"][torch.arange(0, 12, 2)],
    "empty and assigned": lambda s: assigned((8, 6), (slice(0, 4), s["a"]), (slice(4, 8), s["b"])),
    "empty_like": lambda s: torch.empty_like(s["a"]).copy_(s["b"]),
    "new_empty": lambda s: s["a"].new_empty(2, 6).copy_(s["a"][2:]),
    "zeros and assigned": lambda s: torch.zeros(6, 4).copy_(s["a"].t()),
    "assigned columns": lambda s: assigned(
        (4, 12), ((slice(None), slice(0, None, 2)), s["a"]), ((..., slice(1, None, 2)), s["b"])
    ),
    "assigned and cast": lambda s: assigned((4, 6), (..., s["a"]), dtype=torch.bfloat16),
    "assigned with broadcast": lambda s: assigned((3, 12), (..., s["bias"])),
    "assigned experts": lambda s: assigned((2, 4, 6), (0, s["a"]), (1, s["b"])),
    "assigned to a transposed view": lambda s: assigned((6, 4), (..., s["a"].t()[:, [0, 1, 2, 3]])),
    "overwritten": lambda s: overwritten(s["a"], (slice(1, 3), slice(0, 2)), s["b"][:2, 3:5]),
    "overwritten by itself": lambda s: overwritten(s["a"], 0, s["a"][1]),
    "assigned by indices": lambda s: assigned((4, 6), ([2, 0], s["a"][:2]), (torch.tensor([1, -1]), s["b"][2:])),
    "assigned columns by indices": lambda s: assigned((4, 6), ((slice(None), [5, 1, 0, 2, 4, 3]), s["a"])),
    "assigned by a mask": lambda s: overwritten(s["a"], torch.tensor([True, False, False, True]), s["b"][1:3]),
    "index_copy_": lambda s: s["a"].clone().index_copy_(1, torch.tensor([4, 0]), s["b"][:, :2]),
    "rope": lambda s: rope_permuted(s["a"], 2),
    "rope of stacked": lambda s: rope_permuted(torch.cat([s["a"], s["b"]]), 2),
    "gate and up of each expert": lambda s: torch.cat(s["experts"].transpose(1, 2).chunk(5, dim=1), dim=2),
    "column of a reshape of a transpose": lambda s: s["a"].t().reshape(4, 6)[:, 1:5].t().reshape(8, 2),
    "views of a copy of a permutation": lambda s: s["experts"].permute(1, 2, 0).contiguous().view(5, 12)[1:, 3:9].t(),
    "odd reshapes": lambda s: s["experts"].permute(2, 1, 0).reshape(6, 10).t().reshape(4, 15),
    "scalar": lambda s: s["scalar"],
    "scalar in a vector": lambda s: torch.stack([s["scalar"], s["scalar"]]),
    "zero elements": lambda s: s["none"].t(),
    "zero of something": lambda s: s["a"][2:2],
}


def one(function: Callable[[State], torch.Tensor], state: State) -> TracedTensor:
    (found,) = trace(lambda given: {"out": function(given)}, sources_of(state))
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_moves_give_what_the_function_gives(name: str, state: State) -> None:
    expected = FUNCTIONS[name](state)
    found = one(FUNCTIONS[name], state)
    assert found.shape == tuple(expected.shape)
    assert found.dtype == str(expected.dtype).removeprefix("torch.")
    assert first_defect(found.moves, expected.numel()) is None
    assert [move.target_offset for move in found.moves] == sorted(move.target_offset for move in found.moves)
    assert torch.equal(filled(found, state), expected)


@pytest.mark.parametrize("name", ["reshape of a transpose", "cat of columns", "rope", "flatten", "mask"])
def test_the_same_in_inference_mode(name: str, state: State) -> None:
    expected = FUNCTIONS[name](state)
    with torch.inference_mode():
        found = one(FUNCTIONS[name], state)
    assert torch.equal(filled(found, state), expected)


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("identity", 1),
        ("view", 1),
        ("t", 1),
        ("flatten", 1),
        ("stack", 2),
        ("cat of columns", 2),
        ("rope", 1),
        ("cat of split", 1),
        ("stack of unbind", 1),
        ("expand", 1),
        ("flip both", 1),
        ("assigned columns", 2),
        ("exact there and back", 1),
        ("every other by index", 1),
        ("scalar", 1),
    ],
)
def test_as_few_moves_as_there_can_be(name: str, moves: int, state: State) -> None:
    assert len(one(FUNCTIONS[name], state).moves) == moves


def test_size_costs_nothing() -> None:
    """Tensors that no machine has: nothing of their size is made or walked through."""
    side = 2**20
    sources = {"w": ((side, side), torch.float32), "experts": ((256, side, side), torch.bfloat16)}

    def adapter(state: State) -> State:
        out = {"q": rope_permuted(state["w"], 128), "wT": state["w"].t().contiguous()}
        fused = torch.empty(2 * side, side)
        fused[:side] = state["w"]
        fused[side:] = state["w"].flip(0)
        out["fused"] = fused
        out |= {f"experts.{i}.w": expert.t() for i, expert in enumerate(state["experts"].unbind())}
        return out

    found = {one.name: one for one in trace(adapter, sources)}
    assert len(found) == 259
    assert all(len(one.moves) == (2 if one.name == "fused" else 1) for one in found.values())
    from holdfast.boxes import Box

    (part,) = restrict_source(found["experts.7.w"].moves[0], (256, side, side), Box((7, 5, 0), (1, 3, side)))
    assert part.volume == 3 * side


def test_names_and_order_are_the_functions_own(state: State) -> None:
    found = trace(lambda given: {f"x.{name}": given[name] for name in reversed(given)}, sources_of(state))
    assert [one.name for one in found] == [f"x.{name}" for name in reversed(state)]


def test_the_state_dict_it_is_given_is_its_own(state: State) -> None:
    def greedy(given: State) -> State:
        return {name: given.pop(name) for name in list(given)}

    sources = sources_of(state)
    assert len(trace(greedy, sources)) == len(sources) == len(state)


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda s: s["a"] * 2, "aten.mul"),
        (lambda s: s["a"] + s["b"], "aten.add"),
        (lambda s: -s["a"], "aten.neg"),
        (lambda s: s["a"].sum(0), "aten.sum"),
        (lambda s: s["a"] @ s["b"].t(), "aten.mm"),
        (lambda s: s["a"].add_(1), "aten.add_"),
        (lambda s: s["a"].view(torch.int32), "aten.view"),
        (lambda s: s["a"][0, 0].item(), "_local_scalar_dense"),
        (lambda s: s["a"].tolist(), "`tolist` on `a`"),
        (lambda s: s["a"] if s["a"].any() else s["b"], "aten.any"),
        (lambda s: s["a"] if s["a"][0, 0] else s["b"], "aten"),
        (lambda s: s["a"] if torch.equal(s["a"], s["b"]) else s["b"], "aten.equal"),
        (lambda s: s["a"][s["count"]], "aten.index"),
        (lambda s: torch.cat([s["a"], torch.ones(1, 6, dtype=torch.int64)]), "aten.cat"),
        (lambda s: torch.tril(s["a"]), "aten.tril"),
        (lambda s: s["a"].to(torch.complex64), "aten._to_copy"),
        (lambda s: s["a"].index_put_((torch.tensor([0]),), s["b"][:1], accumulate=True), "adds up"),
        (lambda s: s["a"].index_copy_(0, torch.tensor([0]), torch.tensor([[1.0] * 6])), "none of the state"),
        (lambda s: s["a"].index_select(0, torch.tensor([4])), "out of range"),
        (lambda s: s["a"].numpy(), "`numpy` on `a`"),
    ],
)
def test_computing_and_reading_are_refused(function: Callable[[State], Any], operation: str, state: State) -> None:
    with pytest.raises(ConfigError, match=operation) as caught:
        trace(lambda given: {"out": function(given)}, sources_of(state))
    assert caught.value.field == "key_map"
    if "aten" in operation:
        assert "`a`" in str(caught.value)


def test_elements_from_nowhere_are_refused(state: State) -> None:
    for make in (
        lambda s: assigned((8, 6), (slice(0, 4), s["a"])),
        lambda s: torch.cat([s["a"], torch.zeros(1, 6)]),
        lambda s: s["bias"].new_zeros(3),
        lambda s: overwritten(s["a"], 0, torch.tensor(1.0)),
    ):
        with pytest.raises(ConfigError, match=r"of the \d+ elements of `out` do not come from a tensor|constants"):
            one(make, state)
    with pytest.raises(ConfigError, match=r"Tensor for 'out', not a tensor made of tensors of the state"):
        one(lambda s: torch.tensor([1.0]), state)


def test_copying_into_what_was_there_before_is_refused(state: State) -> None:
    real = torch.empty(4, 6)
    with pytest.raises(ConfigError, match=r"aten.copy_.*ordinary tensor"):
        one(lambda s: real.copy_(s["a"]), state)


def test_casts_that_lose_bits_on_the_way_are_refused(state: State) -> None:
    with pytest.raises(ConfigError, match=r"`a` is cast from float32 to bfloat16 to float32 on its way to `out`"):
        one(lambda s: s["a"].bfloat16().float(), state)
    with pytest.raises(ConfigError, match="float16 to bfloat16"):
        one(lambda s: s["a"].half().bfloat16(), state)
    assert one(lambda s: s["a"].float().bfloat16().bfloat16(), state).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "returned NoneType"),
        ({"x": 3}, "int for 'x'"),
        ({3: "x"}, "str for 3"),
        ({"x": {}}, "dict for 'x'"),
    ],
)
def test_what_is_no_state_dict_is_refused(result: Any, says: str, state: State) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        trace(lambda given: result, sources_of(state))


def test_an_exception_of_the_functions_own_keeps_its_name(state: State) -> None:
    def unlucky(given: State) -> State:
        return {"x": given["no such tensor"]}

    with pytest.raises(ConfigError, match=r"unlucky` failed with KeyError: 'no such tensor'") as caught:
        trace(unlucky, sources_of(state))
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_unknown_dtype_of_the_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="`w` is of dtype quint8"):
        trace(lambda given: given, {"w": ((2,), "quint8")})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.complex64])
def test_every_dtype_can_be_moved(dtype: torch.dtype) -> None:
    (found,) = trace(lambda given: {"x": torch.cat([given["w"].t()[1:], given["w"].t()[:1]])}, {"w": ((2, 3), dtype)})
    assert found.dtype == str(dtype).removeprefix("torch.") and found.shape == (3, 2)
