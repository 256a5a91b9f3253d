"""What ``config.json`` says of float8 exports, as transformers understands it: which layers it gives scales to.

Loading them as they are needs a GPU. Without one transformers makes bfloat16 of them, where `accelerate` is installed.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from _export_models import sources_of, tiny_model

import holdfast
from holdfast.errors import ConfigError
from holdfast.export import Fp8, Rename
from holdfast.export.fp8 import fp8_config, fp8_rule
from holdfast.keymap.compile import compile_key_map
from holdfast.keymap.moves import KeyMapping

transformers = pytest.importorskip("transformers", minversion="5.0")


def mapped(model: Any, key_map: Any) -> KeyMapping:
    return compile_key_map(key_map, sources_of(model.state_dict()), model=model)


def said_of(mapping: KeyMapping) -> dict[str, Any] | None:
    return fp8_config(mapping.tensors, mapping.aliases)


def read_with_scales(model: Any, said: dict[str, Any]) -> set[str]:
    """The modules that transformers would read scales for, by its own quantizer."""
    from transformers.quantizers.auto import AutoQuantizationConfig
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    settings = AutoQuantizationConfig.from_dict(json.loads(json.dumps(said)))
    assert type(settings).__name__ == "FineGrainedFP8Config"
    with torch.device("meta"):
        fresh = type(model)(model.config)
    FineGrainedFP8HfQuantizer(settings, pre_quantized=True)._process_model_before_weight_loading(fresh)
    return {name.rpartition(".")[0] for name, _ in fresh.named_parameters() if name.endswith("_scale_inv")}


def written_with_scales(mapping: KeyMapping) -> set[str]:
    """The modules, by their names in memory, that the export has scales for."""
    scales = [tensor for tensor in mapping.tensors if tensor.scale_of is not None]
    return {move.source.rpartition(".")[0] for tensor in scales for move in tensor.moves}


@pytest.mark.parametrize("kept", ["", r"layers\.1\..*q_proj", r"layers\.0\..*experts"])
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "qwen3-moe", "mixtral", "qwen2.5-vl", "llava"])
def test_readers_expect_scales_where_there_are_some(kind: str, kept: str) -> None:
    model = tiny_model(kind)
    if "experts" in kept and kind not in ("qwen3-moe", "mixtral"):
        kept = r"layers\.1\..*down_proj"
    mapping = mapped(model, [None, fp8_rule([kept] if kept else [], [model])])
    said = said_of(mapping)
    assert said is not None
    written = written_with_scales(mapping)
    assert written and read_with_scales(model, said) == written
    unsaid = {**said, "modules_to_not_convert": []}
    assert read_with_scales(model, unsaid) > written, "or nothing need be said"
    if kind in ("qwen3-moe", "mixtral"):
        assert any(name.endswith(".experts") for name in written)


def test_rules_of_ones_own_are_told_where_readers_understand_them() -> None:
    model = tiny_model("llama")
    own = said_of(mapped(model, [None, Fp8(r"mlp\.\w+_proj\.weight$", block=(16, 32)), Rename("^model", "model")]))
    assert own is not None and own["weight_block_size"] == [16, 32]
    assert "model.layers.1.self_attn.o_proj" in own["modules_to_not_convert"]
    assert said_of(mapped(model, None)) is None
    several = [Fp8(r"up_proj\.weight$", block=(16, 32)), Fp8(r"down_proj\.weight$", block=(32, 32))]
    assert said_of(mapped(model, several)) is None
    assert said_of(mapped(model, Fp8(r"up_proj\.weight$", scale_suffix="_scales"))) is None


def test_some_experts_are_named_one_by_one() -> None:
    model = tiny_model("qwen3-moe")
    said = said_of(mapped(model, [None, fp8_rule([r"layers\.0\.mlp\.experts\.2\."], [model])]))
    assert said is not None
    names = [name for name in said["modules_to_not_convert"] if "experts" in name]
    assert sorted(names) == [f"model.layers.0.mlp.experts.2.{part}_proj" for part in ("down", "gate", "up")]


def test_layers_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    with pytest.raises(ConfigError, match="has none to quantize") as caught:
        holdfast.export_hf(model, tmp_path / "hf", dtype="float8_e4m3fn")
    assert caught.value.field == "dtype" and not (tmp_path / "hf").exists()


def test_an_export_that_transformers_reads(tmp_path: Path) -> None:
    """Tied weights, one layer that is kept; the same of a checkpoint, whose architecture is known by its assets."""
    model = tiny_model("llama-tied", torch.bfloat16)
    kept = r"layers\.1\.mlp\.up_proj"
    path = holdfast.export_hf(model, tmp_path / "hf", dtype="float8_e4m3fn", fp32_keys=[kept])
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["model.embed_tokens", "model.layers.1.mlp.up_proj", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    checkpoint = holdfast.save({"model": model}, tmp_path / "checkpoint")
    model.save_pretrained(tmp_path / "assets")
    options = {"assets": tmp_path / "assets", "dtype": "float8_e4m3fn", "fp32_keys": [kept]}
    again = holdfast.export_hf(checkpoint, tmp_path / "again", **options)
    assert json.loads((again / "config.json").read_text())["quantization_config"] == config["quantization_config"]
    if torch.cuda.is_available() or find_spec("accelerate") is None:
        return
    read, info = transformers.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    expected, found = model.state_dict(), read.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name].float() - tensor.float()).abs()
        assert bool((error <= tensor.float().abs() * 2.0**-4 + 2.0**-7).all()), name
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], expected["model.layers.1.mlp.up_proj.weight"])
