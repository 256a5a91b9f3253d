"""`export_hf` of what was saved before; that of live modules is compared with `save_pretrained` elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import holdfast
from holdfast.errors import CheckpointExists, ConfigError


def test_a_checkpoint_becomes_an_export_and_another_takes_its_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    checkpoint = holdfast.save({"model": model, "step": 3}, tmp_path / "checkpoint")
    out = holdfast.export_hf(checkpoint, tmp_path / "hf")
    expected = model.state_dict()
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(CheckpointExists, match="hf exists already"):
        holdfast.export_hf(checkpoint, out)
    holdfast.export_hf(checkpoint, out, dtype="bfloat16", overwrite=True)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "hf"]  # and no lock is left


@pytest.mark.parametrize("how", ["a flat state dict", "a Hugging Face directory"])
def test_a_checkpoint_without_top_level_keys_is_refused(tmp_path: Path, how: str) -> None:
    tensors = {"model.embed.weight": torch.ones(4, 4), "lm_head.weight": torch.ones(4, 4)}
    source = tmp_path / "source"
    if how == "a flat state dict":
        holdfast.save(tensors, source)
    else:
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConfigError, match=r"under no top-level key \(.*lm_head.weight") as caught:
        holdfast.export_hf(holdfast.open(source), tmp_path / "out")
    assert caught.value.field == "source"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["a flat state dict", "a Hugging Face directory", "beside an optimizer"])
def test_tensors_without_a_top_level_key_are_exported_on_request(tmp_path: Path, how: str) -> None:
    tensors = {"layers.0.weight": torch.randn(4, 4), "lm_head": torch.randn(4), "empty": torch.empty(0)}
    source = tmp_path / "source"
    if how == "a flat state dict":
        holdfast.save(tensors, source)
    elif how == "a Hugging Face directory":
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
    else:
        holdfast.save({**tensors, "optimizer": {"state": {"lm_head": torch.ones(4)}}}, source)
    checkpoint = holdfast.open(source)
    names = {"layers.0.weight": "layers.0.weight", "lm_head": "head", "empty": None}
    out = holdfast.export_hf(checkpoint, tmp_path / "hf", modules=[""], key_map=names)
    found = load_file(out / "model.safetensors")
    assert found.keys() == {"layers.0.weight", "head"}
    assert torch.equal(found["head"], tensors["lm_head"])
    assert torch.equal(found["layers.0.weight"], tensors["layers.0.weight"])
    with pytest.raises(ConfigError, match="no top-level key, which are a model of their own"):
        holdfast.export_hf(checkpoint, tmp_path / "both", modules=["", "optimizer"])
    holdfast.save({"model": nn.Linear(2, 2)}, tmp_path / "keyed")
    with pytest.raises(ConfigError, match="no tensors under no top-level key"):
        holdfast.export_hf(holdfast.open(tmp_path / "keyed"), tmp_path / "none", modules=[""])
    with pytest.raises(ConfigError, match="has no module"):
        holdfast.export_hf({"model": nn.Linear(2, 2)}, tmp_path / "state", modules=[""])
