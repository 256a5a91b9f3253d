"""Rules and accepted forms of key maps: what they give on real tensors, and what they refuse by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _export_models import executed, filled, sources_of

import holdfast.export as hx
from holdfast.errors import ConfigError
from holdfast.export import (
    AddPrefix,
    Cast,
    Drop,
    DropTied,
    Fp8,
    Fuse,
    Narrow,
    Rename,
    Split,
    SplitExperts,
    StackExperts,
    StripPrefix,
    Transpose,
)
from holdfast.keymap.compile import compile_key_map
from holdfast.keymap.moves import MappedTensor, first_defect, reversed_moves, scales_of

State = dict[str, torch.Tensor]


@pytest.fixture
def state() -> State:
    generator = torch.Generator().manual_seed(3)
    names: dict[str, tuple[int, ...]] = {
        "model.embed.weight": (12, 6),
        "model.layers.0.attention.wq.weight": (8, 6),
        "model.layers.0.attention.wk.weight": (4, 6),
        "model.layers.0.attention.wv.weight": (4, 6),
        "model.layers.0.norm.weight": (6,),
        "model.layers.0.experts.w1": (3, 5, 6),
        "model.layers.0.experts.w3": (3, 5, 6),
        "model.layers.0.steps": (2,),
        "head.weight": (12, 6),
    }
    made = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    made["model.layers.0.steps"] = torch.tensor([7, 8])
    return made


def compiled(key_map: Any, state: State, **kwargs: Any) -> State:
    """What the map makes of ``state``; every tensor of the export is covered exactly once."""
    mapping = compile_key_map(key_map, sources_of(state), **kwargs)
    for tensor in mapping.tensors:
        assert tensor.scale_of or first_defect(tensor.moves, torch.Size(tensor.shape).numel()) is None
    return executed(mapping, state)


def same(got: State, expected: State) -> bool:
    assert list(got) == list(expected)
    return all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in expected.items())


def refused(key_map: Any, state: State, says: str, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError, match=says) as caught:
        compile_key_map(key_map, sources_of(state), **kwargs)
    return caught.value


def test_without_a_map_names_stay(state: State) -> None:
    assert same(compiled(None, state), state)
    assert same(compiled([], state), state)


def renamed(state: State, function: Callable[[str], str]) -> State:
    return {function(name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("key_map", "function"),
    [
        (Rename(r"^model\.", "m."), lambda n: re.sub(r"^model\.", "m.", n)),
        (Rename(r"w(q|k|v)", r"\1_proj"), lambda n: re.sub(r"w(q|k|v)", r"\1_proj", n)),
        (Rename(r"layers\.(\d+)", lambda m: f"h{int(m[1]) + 1}"), lambda n: n.replace("layers.0", "h1")),
        (Rename(str.upper), str.upper),
        (AddPrefix("base."), lambda n: "base." + n),
        (AddPrefix("base.", "embed"), lambda n: "base." + n if "embed" in n else n),
        (StripPrefix("model."), lambda n: n.removeprefix("model.")),
        ([StripPrefix("model."), AddPrefix("x.")], lambda n: "x." + n.removeprefix("model.")),
    ],
    ids=str,
)
def test_names(key_map: Any, function: Callable[[str], str], state: State) -> None:
    assert same(compiled(key_map, state), renamed(state, function))


def test_split_experts(state: State) -> None:
    got = compiled(SplitExperts(r"experts\.w(\d)$", r"experts.{}.w\1.weight"), state)
    assert list(got)[5:8] == [f"model.layers.0.experts.{i}.w1.weight" for i in range(3)]
    for i in range(3):
        assert torch.equal(got[f"model.layers.0.experts.{i}.w3.weight"], state["model.layers.0.experts.w3"][i])
    back = compiled(
        [
            SplitExperts(r"experts\.w(\d)$", r"experts.{}.w\1.weight"),
            StackExperts(r"experts\.(?P<expert>\d+)\.w(\d)\.weight$", r"experts.w\2"),
        ],
        state,
    )
    assert same(back, state)


def test_split_experts_of_another_dimension_and_transposed(state: State) -> None:
    got = compiled([SplitExperts(r"w1$", "w1.{}", dim=-1), Transpose(r"w1\.\d")], state)
    assert torch.equal(got["model.layers.0.experts.w1.5"], state["model.layers.0.experts.w1"][:, :, 5].t())


def test_fuse_and_split(state: State) -> None:
    fuse = Fuse((r"wq\.", r"wk\.", r"wv\."), "qkv.")
    fused = compiled(fuse, state)
    parts = [state[f"model.layers.0.attention.w{p}.weight"] for p in "qkv"]
    assert torch.equal(fused["model.layers.0.attention.qkv.weight"], torch.cat(parts))
    assert list(fused)[1] == "model.layers.0.attention.qkv.weight"
    split = Split(r"qkv\.", ("wq.", "wk.", "wv."), sizes=(8, 4, 4))
    assert same(compiled([fuse, split], state), state)
    assert same(compiled(split, fused), state)


def test_fuse_and_split_group_by_group(state: State) -> None:
    fuse = Fuse((r"wq\.", r"wk\.", r"wv\."), "qkv.", groups=2)
    q, k, v = (state[f"model.layers.0.attention.w{p}.weight"] for p in "qkv")
    fused = compiled(fuse, state)
    assert torch.equal(
        fused["model.layers.0.attention.qkv.weight"], torch.cat([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]])
    )
    split = Split(r"qkv\.", ("wq.", "wk.", "wv."), sizes=(4, 2, 2), groups=2)
    assert same(compiled(split, fused), state)


def test_equal_parts_of_another_dimension(state: State) -> None:
    got = compiled(Split(r"embed\.weight", ("a", "b", "c"), dim=1), state)
    assert torch.equal(got["model.b"], state["model.embed.weight"][:, 2:4])


def test_transpose_and_narrow(state: State) -> None:
    got = compiled([Transpose(r"embed"), Narrow(r"head", 0, 10)], state)
    assert torch.equal(got["model.embed.weight"], state["model.embed.weight"].t())
    assert torch.equal(got["head.weight"], state["head.weight"][:10])


def test_drop(state: State) -> None:
    got = compiled(Drop(r"experts|steps"), state)
    assert list(got) == [name for name in state if "experts" not in name and "steps" not in name]


def test_drop_tied_duplicates(state: State) -> None:
    tied = [["model.embed.weight", "head.weight"]]
    state["head.weight"] = state["model.embed.weight"]
    mapping = compile_key_map(DropTied(), sources_of(state), tied=tied)
    assert mapping.aliases == {"head.weight": "model.embed.weight"}
    assert "head.weight" not in [tensor.name for tensor in mapping.tensors]
    mapping = compile_key_map([Rename("^model", "m"), DropTied(keep="^head")], sources_of(state), tied=tied)
    assert mapping.aliases == {"model.embed.weight": "head.weight"}
    assert "m.embed.weight" not in [tensor.name for tensor in mapping.tensors]
    assert same(compiled(DropTied(), state), state)  # not tied as far as it is told
    twice = compiled([lambda s: s | {"again": s["head.weight"]}, DropTied()], state)
    assert same(twice, state)


# dtypes --------------------------------------------------------------------------------------------------------


def test_dtype_is_of_floating_point_tensors_that_nobody_casts(state: State) -> None:
    got = compiled(
        [Cast(r"wq", torch.float16), Rename("wq", "q")], state, dtype=torch.bfloat16, fp32_keys=[r"norm", r"head"]
    )
    kinds = {name: str(tensor.dtype) for name, tensor in got.items()}
    assert kinds["model.layers.0.attention.q.weight"] == "torch.float16"
    assert kinds["model.layers.0.norm.weight"] == kinds["head.weight"] == "torch.float32"
    assert kinds["model.layers.0.steps"] == "torch.int64"
    assert kinds["model.embed.weight"] == "torch.bfloat16"
    assert torch.equal(got["model.embed.weight"], state["model.embed.weight"].bfloat16())


def test_a_cast_by_rule_to_the_dtype_it_has_stays(state: State) -> None:
    got = compiled(Cast("norm", torch.float32), state, dtype=torch.bfloat16)
    assert got["model.layers.0.norm.weight"].dtype == torch.float32


def test_fp32_keys_of_bfloat16_weights(state: State) -> None:
    low = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    got = compiled(None, low, fp32_keys=["norm"])
    assert got["model.layers.0.norm.weight"].dtype == torch.float32
    assert got["head.weight"].dtype == torch.bfloat16


def test_dtype_replaces_a_functions_own_where_nothing_is_lost(state: State) -> None:
    got = compiled(
        lambda s: {n: t.double() if t.is_floating_point() else t for n, t in s.items()}, state, dtype=torch.half
    )
    assert got["head.weight"].dtype == torch.half and torch.equal(got["head.weight"], state["head.weight"].half())
    refused(lambda s: {n: t.bfloat16() for n, t in s.items()}, state, "bfloat16 loses precision", dtype=torch.half)


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    tall, wide = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.empty(tall, wide)
    made = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(tall):
        for j in range(wide):
            where = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[where].abs().max() / 448
            made[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
    return made, scales


def test_fp8_with_block_scales(state: State) -> None:
    mapping = compile_key_map(
        [Transpose("embed"), Fp8(r"embed|w[qkv]\.", block=(4, 4)), StripPrefix("model.")],
        sources_of(state),
        dtype=torch.bfloat16,
    )
    names = [tensor.name for tensor in mapping.tensors]
    assert names[:4] == [
        "embed.weight",
        "embed.weight_scale_inv",
        "layers.0.attention.wq.weight",
        "layers.0.attention.wq.weight_scale_inv",
    ]
    by_name = {tensor.name: tensor for tensor in mapping.tensors}
    weight, scales = by_name["embed.weight"], by_name["embed.weight_scale_inv"]
    assert (weight.dtype, weight.shape, weight.scale_of, weight.block) == ("float8_e4m3fn", (6, 12), None, None)
    assert (scales.dtype, scales.shape, scales.scale_of, scales.block) == ("float32", (2, 3), "embed.weight", (4, 4))
    assert scales.moves == weight.moves
    assert torch.equal(filled(weight, state, torch.float32), state["model.embed.weight"].t())
    assert scales_of(mapping)["embed.weight"] is scales
    assert by_name["head.weight"].dtype == "bfloat16"
    made, scale = quantized(filled(weight, state, torch.float32), (4, 4))
    assert made.shape == weight.shape and scale.shape == scales.shape


def test_fp8_leaves_what_it_is_told_to(state: State) -> None:
    mapping = compile_key_map([Fp8(r"w[qkv]\.", leave=[r"wk\."])], sources_of(state), fp32_keys=[r"wk\."])
    dtypes = {tensor.name: tensor.dtype for tensor in mapping.tensors}
    assert dtypes["model.layers.0.attention.wq.weight"] == "float8_e4m3fn"
    assert dtypes["model.layers.0.attention.wk.weight"] == "float32"
    assert "model.layers.0.attention.wk.weight_scale_inv" not in dtypes


@pytest.mark.parametrize(
    ("key_map", "says"),
    [
        ([Fp8("embed"), Transpose("embed")], "only renames may follow"),
        ([Fp8("embed"), Split("embed", ("a", "b"))], "only renames may follow"),
        ([Fp8("embed"), lambda s: s | {"again": s["model.embed.weight"]}], "second name"),
        (Fp8("norm"), "`model.layers.0.norm.weight` is (6,) of torch.float32: only floating-point matrices"),
        (Fp8("experts"), "only floating-point matrices"),
        ([Cast("embed", torch.bfloat16), Fp8("embed")], "bfloat16 loses precision"),
        (
            [Fp8("embed"), AddPrefix("model.embed.weight_scale_inv", "^head"), Rename("inv.*", "inv")],
            "two tensors called",
        ),
    ],
    ids=str,
)
def test_fp8_refuses(key_map: Any, says: str, state: State) -> None:
    refused(key_map, state, re.escape(says))


def test_fp8_dropped_again_leaves_no_trace(state: State) -> None:
    assert "model.embed.weight" not in compiled([Fp8("embed"), Drop("embed")], state)


# accepted forms ------------------------------------------------------------------------------------------------


class Adapter:
    """As torchtitan's are: a table of names and code for the rest."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def to_hf(self, state_dict: State) -> State:
        made: State = {}
        for name, tensor in state_dict.items():
            if re.search(r"w[qk]\.", name):
                rows, columns = tensor.shape
                tensor = tensor.view(self.heads, rows // self.heads // 2, 2, columns).transpose(1, 2)
                tensor = tensor.reshape(rows, columns).clone()
            if "experts" in name:
                made |= {f"{name}.{i}.weight": part.squeeze() for i, part in enumerate(tensor.split(1, dim=0))}
                continue
            made["hf." + name] = tensor
        return made

    def from_hf(self, hf_state_dict: State) -> State:
        raise AssertionError("the way back is compiled from to_hf")


def test_an_adapter_of_torchtitans_kind(state: State) -> None:
    adapter = Adapter(2)
    expected = adapter.to_hf(state)
    assert same(compiled(adapter, state), expected)
    assert same(compiled(adapter.to_hf, state), expected)
    other = renamed(state, lambda n: n.replace("norm", "ln"))
    assert same(compiled([Rename("norm", "ln"), adapter], state), adapter.to_hf(other))


def test_the_way_back_of_an_adapter(state: State) -> None:
    mapping = compile_key_map(Adapter(2), sources_of(state), dtype=torch.float64)
    exported = executed(mapping, state)
    back = reversed_moves(mapping, {name: tensor.shape for name, tensor in state.items()})
    assert not back.missing
    for name, tensor in state.items():
        entry = MappedTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), back.moves[name])
        assert first_defect(entry.moves, tensor.numel()) is None
        assert torch.equal(filled(entry, exported), tensor)


def test_the_way_back_says_what_is_missing_and_goes_by_aliases(state: State) -> None:
    state["head.weight"] = state["model.embed.weight"]
    mapping = compile_key_map(
        [DropTied(), Drop("steps"), Narrow("norm", 2, 6), lambda s: s | {"again": s["model.embed.weight"][:3]}],
        sources_of(state),
        tied=[["model.embed.weight", "head.weight"]],
    )
    back = reversed_moves(mapping, {name: tensor.shape for name, tensor in state.items()})
    assert back.missing == {"model.layers.0.steps": 2, "model.layers.0.norm.weight": 2}
    assert back.moves["head.weight"] == back.moves["model.embed.weight"]
    assert first_defect(back.moves["model.embed.weight"], 72) is None


def test_a_mapping_of_names(state: State) -> None:
    names = {name: name.replace("model", "m") for name in state}
    names["head.weight"] = None  # type: ignore[assignment]
    got = compiled(names, state)
    assert same(got, {names[name]: state[name] for name in state if names[name]})


def test_a_sequence_of_forms(state: State) -> None:
    names = [name.replace("head", "lm_head") for name in state]
    got = compiled([Rename("^head", "lm_head"), {name: name for name in names}, [Drop("steps")]], state)
    assert "lm_head.weight" in got and "model.layers.0.steps" not in got


@pytest.mark.parametrize(
    ("key_map", "says"),
    [
        ("model", "is a string"),
        (3, "int can't be used"),
        (Adapter, "Adapter is a class; pass an instance"),
        ([Drop("steps"), 3.5], "float can't be used"),
        ({"nope": "x"}, "it names `nope`, which the state does not have; it does not say what becomes of `model.embed"),
        ({"model.embed.weight": 4}, "names are strings"),
        (Rename("nothing like it", "x"), "no tensor's name matches 'nothing like it'; there are `model.embed.weight`"),
        (StripPrefix("module."), "no tensor's name begins so"),
        (Drop("nope"), "no tensor's name matches"),
        (
            Rename(r"w[qk]", "w"),
            "attention.wq.weight` and `model.layers.0.attention.wk.weight` both become",
        ),
        (Rename(r".*head.*", ""), "`head.weight` is left without a name"),
        (Rename(lambda name: None), "gave NoneType for `model.embed.weight`"),  # type: ignore[arg-type,return-value]
        (Rename("head", r"\2"), "can't replace"),
        (Rename("head.weight", "__metadata__"), "`__metadata__` can't be a tensor's name"),
        (SplitExperts("norm", "{}", dim=1), "`model.layers.0.norm.weight` of shape (6,) has no dimension 1"),
        (Split("embed", ("a", "b"), sizes=(5, 5)), "12 in dimension 0, which isn't 1 x 5 + 5: pieces would be missing"),
        (Split("embed", ("a", "b"), dim=1, groups=4), "pieces would be missing"),
        (Split("embed", ("a", "b"), sizes=(8, 8)), "pieces would overlap"),
        (Split("embed", ("a", "a")), "both become `model.a.weight`"),
        (Fuse(("wq", "wz"), "x"), "no tensor's name matches 'wz'"),
        (Fuse(("head", "embed"), "x"), "`model.x.weight` lacks ['head']: there are `model.embed.weight`"),
        (Fuse(("w[qk]", "wv"), "x"), "are both piece 0 of `model.layers.0.attention.x.weight`"),
        (Fuse(("wq", "wk"), "x", dim=1), "don't fit together"),
        (Fuse(("wq", "wk"), "x", groups=3), "not 3 groups"),
        (StackExperts(r"experts\.w(?P<expert>\d)", "experts"), "lacks experts [0, 2]"),
        (Narrow("embed", 0, 13), "`model.embed.weight` has 12 in dimension 0"),
        (Transpose("norm"), "has no dimension 1"),
        (Cast("steps", torch.float16), "`model.layers.0.steps` is of torch.int64"),
        (lambda s: {n: t for n, t in s.items() if "w" not in n}, "key_map: `model.embed.weight`, "),
        (
            lambda s: s | {"head.weight": s["head.weight"][:6]},
            "part of `head.weight` (36 of 72 elements) is not mapped",
        ),
        (lambda s: {"x": torch.cat([s["head.weight"] * 2])}, "aten.mul` on `head.weight`"),
    ],
    ids=str,
)
def test_what_is_refused(key_map: Any, says: str, state: State) -> None:
    error = refused(key_map, state, re.escape(says))
    assert error.field == "key_map"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename("(", "x"),
        lambda: Rename("x"),
        lambda: Rename(str.upper, "x"),
        lambda: Drop("*"),
        lambda: SplitExperts("w", "w"),
        lambda: StackExperts("w", "w"),
        lambda: Split("w", "ab"),  # type: ignore[arg-type]
        lambda: Split("w", ("a", "b"), sizes=(1,)),
        lambda: Split("w", ("a",), groups=0),
        lambda: Fuse("ab", "w"),  # type: ignore[arg-type]
        lambda: Fuse(("a",), "w", groups=0),
        lambda: Cast("w", torch.int8),
        lambda: Fp8("w", block=(0, 128)),
        lambda: Fp8("w", scale_suffix=""),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_when_it_is_written(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="key_map"):
        make()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "bfloat16"])
def test_a_dtype_that_is_none(dtype: Any, state: State) -> None:
    assert refused(None, state, "dtype", dtype=dtype).field == "dtype"


def test_fp32_keys_that_match_nothing_are_refused(state: State) -> None:
    assert refused(None, state, "no tensor of the export matches 'router'", fp32_keys=["router"]).field == "fp32_keys"


def test_a_tied_name_that_a_function_leaves_out_stands_for_the_other(state: State) -> None:
    """As adapters of models with tied embeddings do."""
    mapping = compile_key_map(
        lambda s: {n: t for n, t in s.items() if n != "head.weight"},
        sources_of(state),
        tied=[["model.embed.weight", "head.weight"]],
    )
    assert mapping.aliases == {"head.weight": "model.embed.weight"}


def test_of_tied_names_one_is_enough_in_a_mapping_and_may_be_dropped(state: State) -> None:
    tied = [["model.embed.weight", "head.weight"]]
    names = {name: name for name in state if name != "head.weight"}
    for key_map in (names, Drop("^head"), names | {"head.weight": None}):
        mapping = compile_key_map(key_map, sources_of(state), tied=tied)
        assert [tensor.name for tensor in mapping.tensors] == list(names)
        assert mapping.aliases == {"head.weight": "model.embed.weight"}
    with pytest.raises(ConfigError, match=r"it does not say what becomes of `head\.weight`"):
        compile_key_map(names, sources_of(state))


def test_zero_dim_and_empty_tensors() -> None:
    state = {"s": torch.tensor(2.0), "e": torch.zeros(0, 3), "x": torch.ones(2)}
    assert same(compiled(Rename("s", "t"), state), {"t": state["s"], "e": state["e"], "x": state["x"]})


def test_rules_compare_and_show_themselves() -> None:
    assert Rename("a", "b") == Rename("a", "b")
    assert repr(Drop("x")) == "Drop(pattern='x')"


def test_every_public_rule_is_where_it_is_said_to_be() -> None:
    assert all(getattr(hx, name).__name__ == name for name in hx.__all__)
    with pytest.raises(AttributeError, match="nope"):
        _ = hx.nope
    assert set(dir(hx)) == set(hx.__all__)
