"""A checkpoint without stock DCP's ``.metadata``: whole for Holdfast, and for stock readers once that was derived."""

from __future__ import annotations

import os
import stat

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import StorageError
from holdfast.saver import agreement as world_plan


def a_state(value: float):
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "nothing": torch.empty(0, 4), "train": {"step": int(value)}}


def tensors_of(state):
    return {name: value.clone() for name, value in state["model"].state_dict().items()}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A checkpoint without ``.metadata``, and one of the same state with it."""
    state = a_state(3.0)
    holdfast.save(state, tmp_path / "with", step=3)
    holdfast.release()  # and with it the plan that was just made
    with monkeypatch.context() as patched:
        patched.setattr(world_plan, "METADATA_ROWS_MAX", 0)
        holdfast.save(state, tmp_path / "without", step=3)
    return state, tmp_path / "with", tmp_path / "without"


def test_it_opens_verifies_and_restores_like_any_other(saved):
    state, _, path = saved
    assert not (path / ".metadata").exists()
    checkpoint = holdfast.open(path)
    assert checkpoint.manifest.files == ()
    assert checkpoint.verify().ok
    expected = tensors_of(state)
    assert torch.equal(checkpoint.read("model.0.weight"), expected["0.weight"])
    assert checkpoint.objects["train.step"] == 3
    other = a_state(1.0)
    assert holdfast.load(other, path).step == 3
    for name, value in tensors_of(other).items():
        assert torch.equal(value, expected[name]), name
    assert other["train"]["step"] == 3


def test_a_manager_restores_it(tmp_path, monkeypatch):
    monkeypatch.setattr(world_plan, "METADATA_ROWS_MAX", 0)
    with holdfast.CheckpointManager(tmp_path, a_state(3.0)) as manager:
        for step in (1, 2):
            manager.save(step).result(60)
        assert manager.steps() == [1, 2]
    state = a_state(1.0)
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        assert manager.restore() == 2
    assert torch.equal(state["model"][0].weight, holdfast.open(tmp_path).read("model.0.weight"))


def test_what_is_derived_is_what_the_save_would_have_written(saved):
    _, complete, path = saved
    checkpoint = holdfast.open(path)
    assert checkpoint.write_dcp_metadata() == str(path / ".metadata")
    assert (path / ".metadata").read_bytes() == (complete / ".metadata").read_bytes()
    assert stat.S_ISREG(os.lstat(path / ".metadata").st_mode)
    assert holdfast.open(path).verify().ok
    before = os.stat(path / ".metadata").st_mtime_ns
    assert holdfast.open(path).write_dcp_metadata() == str(path / ".metadata")
    assert os.stat(path / ".metadata").st_mtime_ns == before
    assert holdfast.open(complete).write_dcp_metadata() == str(complete / ".metadata")
    assert not [name for name in os.listdir(path) if name.startswith(".metadata.")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_loads_it_then(saved):
    state, _, path = saved
    wanted = {"model.0.weight": torch.zeros(5, 9), "model.1.bias": torch.zeros(3), "nothing": torch.empty(0, 4)}
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(wanted, checkpoint_id=path, no_dist=True)
    holdfast.open(path).write_dcp_metadata()
    dcp.load(wanted, checkpoint_id=path, no_dist=True)
    expected = tensors_of(state)
    assert torch.equal(wanted["model.0.weight"], expected["0.weight"])
    assert torch.equal(wanted["model.1.bias"], expected["1.bias"])


def test_a_metadata_that_was_added_and_is_wrong_is_found(saved):
    _, _, path = saved
    checkpoint = holdfast.open(path)
    checkpoint.write_dcp_metadata()
    data = bytearray((path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (path / ".metadata").write_bytes(data)
    report = holdfast.open(path).verify()
    assert not report.ok
    assert report.problems[0].path == str(path / ".metadata")
    assert holdfast.load(a_state(1.0), path).step == 3  # nothing of ours reads it


def test_what_an_interrupted_derivation_leaves_harms_nothing(saved):
    _, _, path = saved
    (path / ".metadata.0123456789ab").write_bytes(b"half")
    assert holdfast.open(path).verify().ok
    assert holdfast.load(a_state(1.0), path).step == 3
    holdfast.open(path).write_dcp_metadata()
    (path / "stranger").write_bytes(b"")
    report = holdfast.open(path).verify()
    assert report.ok
    assert [row.path for row in report.warnings] == [str(path / "stranger")]


def test_it_says_where_it_can_not_write(saved, monkeypatch):
    _, _, path = saved
    real = os.rename

    def refuse(*args, **kwargs):
        if str(args[1]).endswith(".metadata"):
            raise PermissionError(13, "no")
        real(*args, **kwargs)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StorageError, match="no"):
        holdfast.open(path).write_dcp_metadata()
    monkeypatch.undo()
    assert not [name for name in os.listdir(path) if name.startswith(".metadata")]


def test_a_damaged_report_gives_no_metadata(saved):
    _, _, path = saved
    report = path / "rank-00000.report"
    data = bytearray(report.read_bytes())
    data[60] ^= 1
    report.write_bytes(data)
    with pytest.raises(holdfast.CheckpointCorrupt):
        holdfast.open(path).write_dcp_metadata()
    assert not (path / ".metadata").exists()
