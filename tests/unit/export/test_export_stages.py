"""Exports of lists of modules, which pipeline users have: of a model's stages, and of a model in a list of its own."""

from __future__ import annotations

import filecmp
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from _export_models import stages_of, tiny_model
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.errors import ConfigError

pytest.importorskip("transformers")


def same_directory(left: Path, right: Path) -> None:
    names = sorted(set(os.listdir(left)) - {"holdfast.json"})
    names = [name for name in names if not name.endswith(".report")]
    assert names == [name for name in sorted(os.listdir(right)) if name in names]
    assert not [name for name in names if not filecmp.cmp(left / name, right / name, shallow=False)]


def assert_same_tensors(export: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(export / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_one_module_in_a_list_is_exported_as_itself(tmp_path: Path, kind: str) -> None:
    model = tiny_model(kind)
    same_directory(
        holdfast.export_hf({"model": model}, tmp_path / "a"), holdfast.export_hf({"model": [model]}, tmp_path / "b")
    )
    with holdfast.CheckpointManager(
        tmp_path / "run", {"model": [model]}, exports=[holdfast.HFExport(tmp_path / "hf", every=1)]
    ) as manager:
        manager.step(1)
    same_directory(tmp_path / "a", tmp_path / "hf" / "hf-1")


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_stages_have_what_the_whole_model_has(tmp_path: Path, kind: str) -> None:
    """Also where what is on disk is in another layout than in memory: experts."""
    from transformers import AutoModelForCausalLM

    model = tiny_model(kind)
    stages = stages_of(model)
    whole = holdfast.export_hf({"model": model}, tmp_path / "whole")
    cut = holdfast.export_hf({"model": stages}, tmp_path / "cut")
    assert_same_tensors(cut, load_file(whole / "model.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(cut)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with holdfast.CheckpointManager(
        tmp_path / "run", {"model": stages}, exports=[holdfast.HFExport(tmp_path / "hf", every=1)]
    ) as manager:
        manager.step(1)
    same_directory(cut, tmp_path / "hf" / "hf-1")
    again = stages_of(tiny_model(kind))
    holdfast.load({"model": again}, cut)
    for found, expected in zip(again, stages, strict=True):
        for name, value in expected.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name


class Stage(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_plain_stages_and_tied_weights(tmp_path: Path) -> None:
    first, last = Stage(embed=nn.Embedding(6, 4)), Stage(head=nn.Linear(4, 6, bias=False))
    export = holdfast.export_hf({"model": [first, last]}, tmp_path / "a")
    assert_same_tensors(export, {"embed.weight": first.embed.weight, "head.weight": last.head.weight})
    last.head.weight = first.embed.weight
    export = holdfast.export_hf({"model": [first, last]}, tmp_path / "b", key_map=holdfast.export.DropTied())
    assert_same_tensors(export, {"embed.weight": first.embed.weight})


def test_other_rules_see_all_stages(tmp_path: Path) -> None:
    state = {"model": [Stage(fc1=nn.Linear(128, 128)), Stage(fc2=nn.Linear(128, 128))]}
    export = holdfast.export_hf(state, tmp_path / "a", key_map=holdfast.export.AddPrefix("net."))
    assert set(load_file(export / "model.safetensors")) == {
        f"net.fc{n}.{w}" for n in (1, 2) for w in ("weight", "bias")
    }
    export = holdfast.export_hf(state, tmp_path / "b", dtype=torch.float8_e4m3fn)
    assert "fc2.weight_scale_inv" in load_file(export / "model.safetensors")


def test_names_in_common_are_refused(tmp_path: Path) -> None:
    state = {"model": [nn.Linear(2, 2), nn.Linear(2, 2)]}
    with pytest.raises(ConfigError, match="2 names in common"):
        holdfast.export_hf(state, tmp_path / "a")
    with (
        pytest.raises(ConfigError, match="2 names in common"),
        holdfast.CheckpointManager(
            tmp_path / "run", state, exports=[holdfast.HFExport(tmp_path / "hf", every=1)]
        ) as manager,
    ):
        manager.step(1)
    assert not (tmp_path / "a").exists()


def test_lists_beside_modules_are_exported_too(tmp_path: Path) -> None:
    state: dict[str, Any] = {"one": nn.Linear(2, 2), "other": (Stage(a=nn.Linear(1, 1)), Stage(b=nn.Linear(1, 1)))}
    export = holdfast.export_hf(state, tmp_path / "a")
    names = set(holdfast.open(export).tensors)
    assert {"one.weight", "other.a.weight", "other.b.bias"} <= names
    export = holdfast.export_hf(state, tmp_path / "b", modules=["other"])
    assert set(load_file(export / "model.safetensors")) == {f"{n}.{w}" for n in "ab" for w in ("weight", "bias")}


def test_a_state_without_modules_says_what_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no module at its top level, nor a list of modules"):
        holdfast.export_hf({"model": [], "x": 1}, tmp_path / "a")
