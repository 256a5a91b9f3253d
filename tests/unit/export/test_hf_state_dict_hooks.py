"""Hugging Face directories of models with state-dict hooks: written by, and loaded under, the names that hooks give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hooked_modules import Joins, Net, Renames, SplitsIntoCopies, SplitsIntoViews, assert_same_tensors, train
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.errors import StateMismatch

KINDS = [SplitsIntoCopies, SplitsIntoViews, Joins, Renames]


def made(kind: Any, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(kind)


def assert_exported(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(directory / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_exports_have_the_names_of_state_dict_and_load(kind: Any, tmp_path: Path) -> None:
    model = made(kind, 1)
    expected = dict(model.state_dict())
    holdfast.export_hf({"model": model}, tmp_path / "live")
    assert_exported(tmp_path / "live", expected)
    checkpoint = holdfast.save({"model": model}, tmp_path / "step")
    holdfast.export_hf(checkpoint, tmp_path / "stored")
    assert_exported(tmp_path / "stored", expected)
    other = made(kind, 2)
    holdfast.load({"model": other}, tmp_path / "live")
    assert_same_tensors(model, other)


def test_a_manager_exports_them_and_another_starts_from_it(tmp_path: Path) -> None:
    model = made(SplitsIntoCopies, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    config = holdfast.CheckpointConfig(every=2)
    exports = [holdfast.HFExport(tmp_path / "hf", every=1)]
    with holdfast.CheckpointManager(tmp_path / "run", state, config=config, exports=exports) as manager:
        for step in range(1, 4):
            train(model, optimizer, steps=1, seed=step)
            manager.step(step)
        expected = dict(model.state_dict())
    assert_exported(tmp_path / "hf" / "hf-3", expected)
    other = made(SplitsIntoCopies, 2)
    config = holdfast.CheckpointConfig(initial_load_path=tmp_path / "hf" / "hf-3")
    with holdfast.CheckpointManager(tmp_path / "run2", {"model": other}, config=config) as manager:
        manager.restore()
    assert_same_tensors(model, other)


def test_key_maps_have_the_names_of_state_dict_as_inputs(tmp_path: Path) -> None:
    """As torchtitan's adapter has them, both ways."""
    model, other = made(SplitsIntoCopies, 1), made(SplitsIntoCopies, 2)
    key_map: dict[str, Any] = {name: name for name in model.state_dict()}
    key_map |= {f"middle.0.{name}.weight": f"layers.0.{name}_proj.weight" for name in "qkv"}
    holdfast.export_hf({"model": model}, tmp_path / "hf", key_map=key_map)
    names = set(load_file(tmp_path / "hf" / "model.safetensors"))
    assert {f"layers.0.{name}_proj.weight" for name in "qkv"} <= names
    holdfast.load({"model": other}, tmp_path / "hf", key_map=key_map)
    assert_same_tensors(model, other)


def test_what_is_missing_is_named_before_anything_is_touched(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, other, before = made(SplitsIntoCopies, 1), made(SplitsIntoCopies, 2), made(SplitsIntoCopies, 2)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    del stored["middle.0.k.weight"]
    (tmp_path / "hf").mkdir()
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(StateMismatch) as caught:
        holdfast.load({"model": other}, tmp_path / "hf")
    assert caught.value.missing == ("model.middle.0.k.weight",)
    assert_same_tensors(before, other)


def test_a_model_of_transformers_with_hooks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )

    def fused(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
        for layer in model.model.layers:
            mlp = layer.mlp
            both = nn.Parameter(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]))
            del mlp.gate_proj, mlp.up_proj
            mlp.both = both
            mlp.register_state_dict_post_hook(split)
            mlp.register_load_state_dict_pre_hook(join)
        return model

    def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        parts = state.pop(prefix + "both").chunk(2)
        state[prefix + "gate_proj.weight"], state[prefix + "up_proj.weight"] = (part.clone() for part in parts)

    def join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up")]
        state[prefix + "both"] = torch.cat([state.pop(name) for name in names])

    model, other = fused(1), fused(2)
    holdfast.export_hf({"model": model}, tmp_path / "hf", assets=config)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    for name, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    holdfast.load({"model": other}, tmp_path / "hf")
    assert_same_tensors(model, other)
    plain.save_pretrained(tmp_path / "plain")
    third = fused(3)
    holdfast.load({"model": third}, tmp_path / "plain")
    assert_same_tensors(model, third)
