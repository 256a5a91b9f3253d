"""``hf-latest`` names a whole export: after any crash, while one is replaced, and when that fails."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import SaveFailed, StorageError
from holdfast.storage import local

LINK = "hf-latest"


def manager_of(root: Path, **options: Any) -> holdfast.CheckpointManager:
    config = holdfast.CheckpointConfig(every=None, keep=None, nice=0)
    export = holdfast.HFExport(root / "hf", every=1, nice=0, **options)
    torch.manual_seed(0)
    return holdfast.CheckpointManager(root / "run", {"model": nn.Linear(3, 2)}, config=config, exports=[export])


def export(manager: holdfast.CheckpointManager, step: int) -> None:
    (handle,) = manager.step(step)
    handle.result(30)


def target(root: Path) -> str:
    return os.readlink(root / "hf" / LINK)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Exports of steps 1 and 2, and a checkpoint of step 1."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            export(manager, step)
        manager.save(1).result(30)
    assert target(tmp_path) == "hf-2"
    return tmp_path


def relink(root: Path, name: str) -> None:
    (root / "hf" / LINK).unlink()
    (root / "hf" / LINK).symlink_to(name)


@pytest.mark.parametrize("left", ["hf-1", "hf-77", None])
def test_a_start_mends_what_a_crash_has_left(root: Path, left: str | None) -> None:
    if left is None:
        (root / "hf" / LINK).unlink()
    else:
        relink(root, left)
    (root / "hf" / f".{LINK}.new").symlink_to("hf-3")
    manager_of(root).close()
    assert sorted(os.listdir(root / "hf")) == [".holdfast", "hf-1", "hf-2", LINK]
    assert target(root) == "hf-2"


def test_a_start_without_the_option_leaves_the_link_alone(root: Path) -> None:
    relink(root, "hf-1")
    manager_of(root, latest_link=False).close()
    assert target(root) == "hf-1"


@pytest.mark.parametrize("fails", [False, True])
def test_it_names_another_export_while_one_is_replaced(root: Path, fails: bool) -> None:
    """By a run that went back to step 1."""
    seen = []
    rename = local.publish_by_rename

    def watch(*arguments: Any, **options: Any) -> tuple[str, ...]:
        seen.append(target(root))
        if fails:
            raise StorageError("read-only", path=str(root), errno=30)
        return rename(*arguments, **options)

    with manager_of(root) as manager:
        assert manager.restore() == 1
        (root / "hf" / "hf-2" / "mine").touch()
        before = holdfast.open(root / "hf" / "hf-2").manifest
        with mock.patch.object(local, "publish_by_rename", watch):
            (handle,) = manager.step(2)
            error = handle.exception(30)
        assert isinstance(error, SaveFailed) == fails
        assert seen == ["hf-1"]
        after = holdfast.open(root / "hf" / "hf-2").manifest
        assert before is not None
        assert after is not None
        assert (after.attempt == before.attempt) == fails
        assert (root / "hf" / "hf-2" / "mine").exists()
        assert target(root) == "hf-2"
        if fails:
            with pytest.raises(SaveFailed):
                manager.wait()


def test_with_one_export_it_is_replaced_all_the_same(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1).result(30)
        export(manager, 2)
    with manager_of(tmp_path) as manager:
        assert manager.restore() == 1
        export(manager, 2)
    assert target(tmp_path) == "hf-2"
    assert holdfast.open(tmp_path / "hf" / "hf-2").verify().ok


def test_what_is_no_link_is_left_and_the_export_stands(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "hf" / LINK).unlink()
    (root / "hf" / LINK).mkdir()
    with caplog.at_level(logging.WARNING, "holdfast"), manager_of(root) as manager:
        export(manager, 3)
    assert "is not a symbolic link: move it away" in caplog.text
    assert (root / "hf" / LINK).is_dir()
    assert (root / "hf" / "hf-3").is_dir()
