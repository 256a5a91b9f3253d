"""Layouts of real, tiny models of transformers against what their ``save_pretrained`` writes, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast._torch_compat import dtype_name
from holdfast.export.assets import collect_assets
from holdfast.export.layout import HFLayout, SubModel, TargetTensor, layout, layout_parts, target_of
from holdfast.export.verify import verify_export

transformers = pytest.importorskip("transformers", minversion="5.0")

TEXT: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **more))


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, tie_word_embeddings=False
        )
    )


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False)
    )


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
    )


def mixed() -> Any:
    """Half precision, with norms in single precision: two element types in a file."""
    model = llama(tie_word_embeddings=False).to(torch.bfloat16)
    model.model.norm.to(torch.float32)
    for layer in model.model.layers:
        layer.input_layernorm.to(torch.float32)
    return model


MODELS = {
    "llama": lambda: llama(tie_word_embeddings=False),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "mixed": mixed,
    "qwen3 moe": qwen3_moe,
    "mixtral": mixtral,
    "gpt2": gpt2,
}


def saved_state(model: Any) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` saves: without tied duplicates, and in the layout that files have."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    found: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return found


def targets_of(state: dict[str, torch.Tensor], prefix: str = "") -> tuple[TargetTensor, ...]:
    """The targets of a state dict, or of what is under a prefix in it."""
    return tuple(
        target_of(
            name.removeprefix(prefix),
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            storage=str(tensor.untyped_storage().data_ptr()),
        )
        for name, tensor in state.items()
        if name.startswith(prefix)
    )


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def write(out: Path, found: HFLayout, state: dict[str, torch.Tensor], model: Any) -> None:
    """An export as it is meant to be: the files of the layout, and the model's assets."""
    out.mkdir()
    for file in found.files:
        payload = b"".join(raw_bytes(state[tensor.name]) for tensor in file.tensors)
        (out / file.name).write_bytes(file.header + payload)
    if found.index is not None:
        (out / found.index_name).write_bytes(found.index)
    assets = collect_assets(model=model)
    assets.require_apart_from([*(file.name for file in found.files), found.index_name])
    for path, data in assets.contents().items():
        (out / path).write_bytes(data)


def assert_loads_as(out: Path, model: Any) -> None:
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert loaded.dtype == model.dtype


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_files_and_index_are_those_of_save_pretrained(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    state = saved_state(model)
    targets = targets_of(state)
    numbers = set()
    for largest in (1, 500, 1100, 3000, 7000, 20_000, 10**9):
        out = tmp_path / str(largest)
        model.save_pretrained(out, max_shard_size=largest)
        assert verify_export(str(out)) == ()
        found = layout(targets, max_shard_bytes=largest, total_parameters=model.num_parameters())
        expected = {path.name: path for path in out.iterdir() if path.name.startswith("model")}
        names = [file.name for file in found.files] + ([] if found.index is None else [found.index_name])
        assert sorted(names) == sorted(expected)
        if found.index is not None:
            assert found.index == expected[found.index_name].read_bytes()
        for file in found.files:
            data = expected[file.name].read_bytes()
            assert len(data) == file.size
            assert data[: len(file.header)] == file.header
            for tensor in file.tensors:
                assert data[tensor.start : tensor.stop] == raw_bytes(state[tensor.name]), tensor.name
        numbers.add(len(found.files))
    assert len(numbers) >= 5, "the sizes make a difference"


@pytest.mark.parametrize("name", ["llama", "qwen3 moe", "gpt2"])
def test_from_pretrained_loads_what_is_laid_out(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.bfloat16)
    state = saved_state(model)
    found = layout(targets_of(state), max_shard_bytes=3000, total_parameters=model.num_parameters())
    write(tmp_path / "out", found, state, model)
    assert verify_export(str(tmp_path / "out")) == ()
    assert_loads_as(tmp_path / "out", model)


@pytest.mark.parametrize("largest", [2000, 10**9])
def test_from_pretrained_loads_several_models_by_one_index(largest: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=False)
    state = saved_state(model)
    parts = [
        SubModel(targets_of(state, "lm_head."), "lm_head.", "head.safetensors"),
        SubModel(targets_of(state, "model.layers."), "model.layers."),
        SubModel(targets_of(state, "model.norm."), "model.norm.", "norm.safetensors"),
        SubModel(targets_of(state, "model.embed"), "model.embed", "embedding.safetensors"),
    ]
    found = layout_parts(parts, max_shard_bytes=largest, total_parameters=model.num_parameters())
    assert (len(found.files) == len(parts)) == (largest > 2000)
    write(tmp_path / "out", found, state, model)
    assert verify_export(str(tmp_path / "out")) == ()
    assert_loads_as(tmp_path / "out", model)
