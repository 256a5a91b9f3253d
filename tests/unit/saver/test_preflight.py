"""What a manager finds out before step 0: room on the disk, room in memory, rights."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _manager_runs import Run
from torch import nn

import holdfast
from holdfast.errors import ConfigError
from holdfast.saver import preflight
from holdfast.storage.local import LocalStorage


def little(free: int) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)


def test_a_state_is_as_large_as_its_modules_and_the_optimizer_state_there_is() -> None:
    model = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert preflight.known_bytes({"model": model, "optimizer": optimizer, "n": 3}) == preflight.StateBytes(128, 128)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert preflight.known_bytes({"model": model, "optimizer": optimizer}).own == 3 * 128 + 4


def test_a_disk_that_no_checkpoint_fits_on_is_refused_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"model": nn.Linear(1024, 1024, bias=False)}
    monkeypatch.setattr(os, "statvfs", lambda _: little(1 << 20))
    with pytest.raises(ConfigError, match=r"run has 1 MiB free.*this rank alone writes at least 4 MiB") as caught:
        holdfast.CheckpointManager(tmp_path / "run", state)
    assert caught.value.field == "root"
    assert not (tmp_path / "run").exists(), "before anything is touched"
    monkeypatch.setattr(os, "statvfs", lambda _: little(6 << 20))
    with holdfast.CheckpointManager(tmp_path / "run", state):
        assert "two checkpoints take at least 8 MiB" in caplog.text


def test_what_retention_may_delete_is_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": nn.Linear(1024, 1024, bias=False)}
    with holdfast.CheckpointManager(tmp_path / "run", state) as manager:
        manager.save(1).result()
    monkeypatch.setattr(os, "statvfs", lambda _: little(1 << 20))
    with holdfast.CheckpointManager(tmp_path / "run", state) as manager:
        assert manager.restore() == 1


def test_images_that_no_memory_holds_are_refused_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       6144 kB\nMemAvailable:   6144 kB\n")
    monkeypatch.setattr(preflight, "_MEMINFO", str(meminfo))
    state = {"model": nn.Linear(1024, 1024, bias=False)}
    with pytest.raises(ConfigError, match=r"images of 2 captures.*at least 8 MiB.*has 6 MiB") as caught:
        holdfast.CheckpointManager(tmp_path / "run", state)
    assert caught.value.field == "in_flight"
    config = holdfast.CheckpointConfig(in_flight=1)
    with holdfast.CheckpointManager(tmp_path / "run", state, config=config) as manager:
        manager.save(1).result()


def test_the_sign_for_other_ranks_is_seen_and_goes_with_the_next_start(tmp_path: Path) -> None:
    with Run().manager(tmp_path):
        pass
    storage = LocalStorage(tmp_path)
    sign = preflight.put_sign(storage)
    preflight.check_sign(storage, sign, 1)
    with pytest.raises(ConfigError, match=r"rank 1 on .* doesn't see"):
        preflight.check_sign(storage, sign + "x", 1)
    with Run().manager(tmp_path):  # as after a start that was killed
        assert not storage.exists(sign)
