"""The default map of real models against what their own ``save_pretrained`` writes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from _export_models import MODELS, executed, sources_of, tiny_model
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast.errors import ConfigError
from holdfast.export import Cast, Drop, Fp8, HFDefault, Rename
from holdfast.keymap.compile import compile_key_map
from holdfast.keymap.hf_default import named_tensors, saves_adapter_only, tied_among
from holdfast.keymap.moves import reversed_moves

pytest.importorskip("transformers")

DTYPES = [torch.float32, torch.bfloat16]


def written(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes, by name in the order of the bytes."""
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.offset_keys()}


def order_of(model: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """The order of names that ``save_pretrained`` hands on to be cut into files."""
    from transformers import modeling_utils

    seen: list[str] = []
    split = modeling_utils.split_torch_state_dict_into_shards

    def spy(state: dict[str, torch.Tensor], **kwargs: Any) -> Any:
        seen.extend(state)
        return split(state, **kwargs)

    monkeypatch.setattr(modeling_utils, "split_torch_state_dict_into_shards", spy)
    model.save_pretrained(folder)
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_as_save_pretrained_writes_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(kind, dtype)
    state = model.state_dict()
    expected = written(model, tmp_path)
    mapping = compile_key_map(None, sources_of(state), model=model)
    got = executed(mapping, state)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("kind", MODELS)
def test_in_its_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    mapping = compile_key_map(None, sources_of(model.state_dict()), model=model)
    assert [tensor.name for tensor in mapping.tensors] == order_of(model, monkeypatch, tmp_path)


@pytest.mark.parametrize("kind", MODELS)
def test_cast_as_the_cast_model_writes_it(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mapping = compile_key_map(None, sources_of(state), dtype=torch.bfloat16, model=model)
    expected = written(model.to(torch.bfloat16), tmp_path)
    got = executed(mapping, state)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen2.5-vl", "llava"])
def test_of_a_loaded_model_it_is_what_was_loaded(kind: str, tmp_path: Path) -> None:
    """`from_pretrained` notes on the model which conversions it used: the way back goes by them."""
    written(tiny_model(kind), tmp_path)
    model = type(tiny_model(kind)).from_pretrained(tmp_path)
    state = model.state_dict()
    again = written(model, tmp_path / "again")
    got = executed(compile_key_map(None, sources_of(state), model=model), state)
    assert got.keys() == again.keys() and all(torch.equal(got[name], again[name]) for name in again)


@pytest.mark.parametrize("kind", MODELS)
def test_the_way_back_fills_the_state(kind: str) -> None:
    model = tiny_model(kind)
    state = model.state_dict()
    mapping = compile_key_map(None, sources_of(state), model=model)
    exported = executed(mapping, state)
    back = reversed_moves(mapping, {name: tensor.shape for name, tensor in state.items()})
    assert not back.missing
    from holdfast.keymap.moves import MappedTensor

    for name, tensor in state.items():
        entry = MappedTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), back.moves[name])
        from _export_models import filled

        assert torch.equal(filled(entry, exported), tensor), name


def test_tied_names_are_dropped_as_transformers_does() -> None:
    model = tiny_model("llama-tied")
    mapping = compile_key_map(None, sources_of(model.state_dict()), model=model)
    assert mapping.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in [tensor.name for tensor in mapping.tensors]
    assert tied_among(named_tensors(model)) == [["model.embed_tokens.weight", "lm_head.weight"]]


def test_equal_names_that_are_not_tied_in_memory_stay() -> None:
    """The configuration says tied, the memory doesn't: `save_pretrained` goes by memory."""
    model = tiny_model("llama-tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    mapping = compile_key_map(None, sources_of(model.state_dict()), model=model)
    assert "lm_head.weight" in [tensor.name for tensor in mapping.tensors] and not mapping.aliases


def test_what_transformers_would_not_save_is_refused() -> None:
    """Shared memory that no `_tied_weights_keys` speaks of."""
    model = tiny_model("llama")
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    with pytest.raises(ConfigError, match=r"transformers can't save LlamaForCausalLM.*gate_proj"):
        compile_key_map(None, sources_of(model.state_dict()), model=model)


@pytest.mark.parametrize("lacking", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_state_with_one_name_for_tied_weights_is_enough(lacking: str, tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    state = model.state_dict()
    del state[lacking]
    got = executed(compile_key_map(None, sources_of(state), model=model), state)
    expected = written(model, tmp_path)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_order_is_the_models_whatever_that_of_the_state() -> None:
    model = tiny_model("llama")
    sources = sources_of(model.state_dict())
    turned = dict(reversed(sources.items()))
    assert compile_key_map(None, turned, model=model) == compile_key_map(None, sources, model=model)


class Composite(nn.Module):
    """A vision tower and a language model of `transformers`, and a projector that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tiny_model("llava").model.vision_tower
        self.projector = nn.Linear(32, 32)
        self.language = tiny_model("qwen3-moe")
        self.small = tiny_model("llama-tied")


def test_parts_of_a_composite_are_as_each_is_saved(tmp_path: Path) -> None:
    composite = Composite()
    state = composite.state_dict()
    mapping = compile_key_map(None, sources_of(state), model=composite)
    got = executed(mapping, state)
    expected = {f"projector.{name}": tensor for name, tensor in composite.projector.state_dict().items()}
    for part in ("tower", "language", "small"):
        saved = written(getattr(composite, part), tmp_path / part)
        expected |= {f"{part}.{name}": tensor for name, tensor in saved.items()}
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    assert mapping.aliases == {"small.lm_head.weight": "small.model.embed_tokens.weight"}
    assert list(dict.fromkeys(name.split(".")[0] for name in got)) == ["tower", "projector", "language", "small"]


def test_ignored_names_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(model, "_keys_to_ignore_on_save", ["model.norm.weight", "not there"], raising=False)
    mapping = compile_key_map(None, sources_of(model.state_dict()), model=model)
    assert {tensor.name for tensor in mapping.tensors} == written(model, tmp_path).keys()


def test_names_of_another_model_are_refused_by_name() -> None:
    model = tiny_model("llama")
    sources = sources_of(model.state_dict())
    sources["extra.weight"] = ((2,), torch.float32)
    del sources["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"it has no `extra.weight`; the state lacks its `model.norm.weight`"):
        compile_key_map(None, sources, model=model)


def test_wrappers_are_looked_through() -> None:
    model = tiny_model("qwen3-moe")
    sources = sources_of(model.state_dict())
    plain = compile_key_map(None, sources, model=model)
    assert compile_key_map(None, sources, model=torch.compile(model, backend="eager")) == plain
    assert compile_key_map(None, sources, model=nn.DataParallel(model)) == plain
    for layer in range(2):
        model.model.layers[layer] = torch.compile(checkpoint_wrapper(model.model.layers[layer]), backend="eager")
    assert compile_key_map(None, sources, model=model) == plain


def test_modules_that_are_made_in_ways_of_their_own_are_left_as_they_are() -> None:
    model = nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    model[1].weight = model[0].get_parameter("0.weight")
    assert tied_among(named_tensors(model)) == [["0.0.weight", "1.weight"]]
    mapping = compile_key_map(None, sources_of(model.state_dict()), model=model)
    assert [tensor.name for tensor in mapping.tensors] == list(model.state_dict())


def test_other_modules_keep_their_names() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    mapping = compile_key_map(None, sources_of(module.state_dict()), dtype=torch.float16, model=module)
    assert {tensor.name: tensor.dtype for tensor in mapping.tensors} == {
        name: "int64" if "num_batches" in name else "float16" for name in module.state_dict()
    }


def test_rules_may_follow_the_default() -> None:
    model = tiny_model("qwen3-moe")
    state = model.state_dict()
    mapping = compile_key_map(
        [HFDefault(), Fp8(r"mlp\.experts\.\d+\.\w+_proj\.weight$", block=(16, 16)), Rename(r"^model\.", "m.")],
        sources_of(state),
        dtype=torch.bfloat16,
        fp32_keys=["norm"],
        model=model,
    )
    kinds = {tensor.name: (tensor.dtype, tensor.shape) for tensor in mapping.tensors}
    assert kinds["m.layers.0.mlp.experts.3.down_proj.weight"] == ("float8_e4m3fn", (32, 24))
    assert kinds["m.layers.0.mlp.experts.3.down_proj.weight_scale_inv"] == ("float32", (2, 2))
    assert kinds["m.norm.weight"][0] == "float32" and kinds["lm_head.weight"][0] == "bfloat16"


def test_adapters_of_peft_need_peft() -> None:
    assert not saves_adapter_only(tiny_model("llama"))
    assert not saves_adapter_only(nn.Linear(2, 2))
    model = tiny_model("llama")
    model._hf_peft_config_loaded = True
    assert saves_adapter_only(model)
    model.peft_config = {"default": object()}
    model.active_adapters = lambda: ["default", "other"]
    with pytest.raises(ConfigError, match="2 adapters are active"):
        compile_key_map(None, sources_of(model.state_dict()), model=model)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("inside", [False, True], ids=["PeftModel", "add_adapter"])
def test_an_adapter_alone_in_pefts_layout(inside: bool, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = tiny_model("llama")
    if inside:
        model.add_adapter(config)
    else:
        model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    state = model.state_dict()
    expected = written(model, tmp_path)
    mapping = compile_key_map(None, sources_of(state), model=model)
    got = executed(mapping, state)
    assert saves_adapter_only(model)
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_rule_before_the_default_changes_its_names_and_is_told_so() -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="are not those of LlamaForCausalLM"):
        compile_key_map([Drop("lm_head"), HFDefault()], sources_of(model.state_dict()), model=model)
    Cast("x", torch.float32)
