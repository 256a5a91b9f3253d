"""`export_hf` of what was saved before; that of live modules is compared with `save_pretrained` elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.errors import CheckpointExists


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
