"""`async_export_hf`: an export of a capture, without a manager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("staging", ["lazy", "eager"])
def test_it_exports_the_weights_at_the_call(tmp_path: Path, staging: str) -> None:
    model, optimizer = trained()
    for number in range(3):
        expected = model.weight.detach().clone()
        handle = holdfast.async_export_hf({"model": model}, tmp_path / f"{number}", staging=staging)
        step(model, optimizer)
        exported = handle.result(60)
        assert torch.equal(exported.read("weight"), expected)
        assert exported.verify().ok


def test_what_is_there_is_replaced_on_request_only(tmp_path: Path) -> None:
    model, optimizer = trained()
    holdfast.async_export_hf(model, tmp_path / "hf").result(60)
    with pytest.raises(holdfast.CheckpointExists):
        holdfast.async_export_hf(model, tmp_path / "hf").result(60)
    step(model, optimizer)
    exported = holdfast.async_export_hf(model, tmp_path / "hf", dtype=torch.bfloat16, overwrite=True).result(60)
    assert torch.equal(exported.read("weight"), model.weight.bfloat16())


def test_what_cannot_be_exported_is_said_at_once(tmp_path: Path) -> None:
    model, _ = trained()
    with pytest.raises(holdfast.ConfigError, match="staging"):
        holdfast.async_export_hf(model, tmp_path / "hf", staging="soon")  # type: ignore[arg-type]
    with pytest.raises(holdfast.ConfigError, match="export_hf"):
        holdfast.async_export_hf(holdfast.save({"model": model}, tmp_path / "a"), tmp_path / "hf")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["a"]


def test_a_change_during_staging_fails_the_export(tmp_path: Path) -> None:
    model = nn.Linear(2048, 2048)
    handle = holdfast.async_export_hf(model, tmp_path / "hf")
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(holdfast.StateChangedWhileStaging, match="weight"):
        handle.result(60)
    assert not (tmp_path / "hf").exists()
