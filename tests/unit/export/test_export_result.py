"""What the handle of an export gives: a `Checkpoint` of its directory, which is that path wherever one is taken."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.loader.checkpoint import Checkpoint
from holdfast.loader.sources import open as opening
from holdfast.loader.sources.open import PublishedExport


def net() -> torch.nn.Module:
    return torch.nn.Linear(6, 4)


def exported(root: Path, model: torch.nn.Module, **options: Any) -> Checkpoint:
    export = holdfast.HFExport(root / "hf", every=3, **options)
    config = holdfast.CheckpointConfig(every=None)
    with holdfast.CheckpointManager(root / "run", {"model": model}, config=config, exports=[export]) as manager:
        (handle,) = manager.step(3)
        return handle.result(60)


def test_it_is_a_checkpoint_and_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    looked: list[str] = []
    monkeypatch.setattr(opening, "open_hf", lambda path, real=opening.open_hf: looked.append(path) or real(path))
    found = exported(tmp_path, model, dtype=torch.bfloat16)
    place = tmp_path / "hf" / "hf-3"
    assert isinstance(found, Checkpoint)
    assert (found.path, found.step, os.fspath(found), str(found)) == (str(place), 3, str(place), str(place))
    assert Path(found) == place and "hf-3" in repr(found)
    assert not looked, "nothing is read before it is asked for: every rank gets one"
    assert set(found.tensors) == {"weight", "bias"}
    assert found.tensors["weight"].dtype == torch.bfloat16
    assert torch.equal(found.read("weight", (slice(1, 3),)), model.weight[1:3].bfloat16())
    assert (found.metrics, dict(found.objects)) == ({}, {})
    assert found.manifest is not None and found.manifest.kind == "export"
    assert found.verify().ok and looked == [str(place)]
    other = net()
    assert holdfast.load({"model": other}, found).path == found.path
    assert torch.equal(other.weight, model.weight.bfloat16().float())
    with pytest.raises(ConfigError, match="Hugging Face directory"):
        found.write_dcp_metadata()


def test_transformers_takes_it_for_the_path(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2))
    found = exported(tmp_path, model)
    again = hf.AutoModelForCausalLM.from_pretrained(found, dtype="auto")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    again = holdfast.export_hf({"model": model}, tmp_path / "now", assets=found)
    assert isinstance(again, Path) and (again / "config.json").read_bytes() == Path(found, "config.json").read_bytes()


def test_damage_is_found_and_absence_is_an_answer(tmp_path: Path) -> None:
    found = exported(tmp_path, net())
    copy = unread(found)
    weights = Path(found, "model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    report = found.verify()
    assert [problem.path for problem in report.problems] == [str(weights)] and report.files == 1
    shutil.rmtree(found)
    report = copy.verify()
    assert not report.ok and report.checksummed and report.problems


def unread(found: Checkpoint) -> Checkpoint:
    """As it was when it was given: nothing read."""
    assert found.manifest is not None
    return Checkpoint(PublishedExport(found.path, found.manifest.attempt, found.step))


def test_what_has_taken_its_place_is_not_taken_for_it(tmp_path: Path) -> None:
    found = exported(tmp_path, net())
    first = unread(found)
    holdfast.export_hf(net(), found, overwrite=True)
    with pytest.raises(CheckpointNotFound, match="open it again"):
        first.read("weight")
    assert not first.verify().ok and holdfast.open(first).verify().ok


def test_what_has_no_model_to_load_has_files_and_checksums(tmp_path: Path) -> None:
    """As an adapter has none: tensors are read by what it was made for."""
    path = holdfast.export_hf(net(), tmp_path / "adapter")
    attempt = holdfast.open(path).manifest.attempt
    os.rename(path / "model.safetensors", tmp_path / "away")
    found = Checkpoint(PublishedExport(str(path), attempt, None))
    report = found.verify()
    assert not report.ok and "model.safetensors" in report.problems[0].message, "which was committed"
    assert found.tensors == {}
    with pytest.raises(ConfigError, match="Hugging Face directory"):
        found.write_dcp_metadata()
    assert not (path / ".metadata").exists()
