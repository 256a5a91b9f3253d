"""What a `CheckpointManager` keeps: retention, pins, and what it leaves alone."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from _manager_runs import Run, saved_run, visible

import holdfast
from holdfast import Best, Keep
from holdfast.catalog import catalog as keeping
from holdfast.errors import (
    CheckpointNotFound,
    ConfigError,
    StorageError,
)
from holdfast.format.manifest import Manifest
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import LocalStorage


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, [1, 2, 3, 4, 5, 6, 7, 8]),
        (Keep(last=None), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Keep(last=3), [6, 7, 8]),
        (Keep(last=1), [8]),
        (Keep(last=0), [8]),
        (Keep(last=1, every=3), [3, 6, 8]),
        (Keep(last=1, best=Best("loss", mode="min", n=2)), [4, 8]),
        (Keep(last=1, best=Best("loss", mode="max", n=2)), [3, 7, 8]),
        (Keep(last=1, minutes=10_000_000.0), [1, 8]),
    ],
    ids=str,
)
def test_retention(keep: Keep | None, expected: list[int], tmp_path: Path) -> None:
    saved_run(tmp_path, 8, keep=keep)
    assert visible(tmp_path) == sorted(f"step-{step}" for step in expected)
    assert [entry for entry in os.listdir(tmp_path) if entry.endswith(".trash")] == []


def test_a_link_that_leads_nowhere_does_not_keep_a_run_from_its_root(tmp_path: Path) -> None:
    """Neither a dangling one nor one that leads to itself, whatever step it is named after."""
    saved_run(tmp_path, 2, every=1)
    (tmp_path / "step-7").symlink_to("nowhere")
    (tmp_path / "step-8").symlink_to("step-8")
    with Run().manager(tmp_path, every=1) as manager:
        assert manager.steps() == [1, 2]
        assert manager.restore() == 2
        assert holdfast.open(tmp_path).step == 2
        assert manager.save(3).result().step == 3


@pytest.mark.parametrize("step", [-1, "1", "../../lock", 1.0, True, 10**30], ids=repr)
def test_what_is_no_step_is_neither_pinned_nor_restored(step: Any, tmp_path: Path) -> None:
    """A number too large for messages between ranks, or a name that leads out of the pins, as any other."""
    with Run().manager(tmp_path) as manager:
        manager.save(1).result()
        for act in (manager.pin, manager.unpin, manager.restore):
            with pytest.raises(ConfigError, match="step must be"):
                act(step)


@pytest.mark.parametrize("template", ["a\n{step}", "{step}\u2028b", "{step} \r\v\x1c"], ids=repr)
def test_names_of_more_than_one_line_are_resumed_from(template: str, tmp_path: Path) -> None:
    with Run().manager(tmp_path, name_template=template) as manager:
        for step in (1, 2):
            manager.save(step).result()
    with Run(seed=1).manager(tmp_path, name_template=template) as manager:
        assert manager.steps() == [1, 2]
        assert manager.restore() == 2
        assert manager.restore(1) == 1


def test_pins_outlive_retention_and_the_manager(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, keep=Keep(last=1)) as manager:
        manager.save(1).result()
        manager.pin(1)
        manager.pin(1)
        with pytest.raises(CheckpointNotFound, match="step 5"):
            manager.pin(5)
        manager.save(2).result()
        manager.save(3).result()
        assert manager.steps() == [1, 3]
    with run.manager(tmp_path, keep=Keep(last=1)) as manager:
        manager.save(4).result()
        assert manager.steps() == [1, 4]
        manager.unpin(1)
        manager.unpin(1)
        manager.save(5).result()
        assert manager.steps() == [5]


def test_retention_leaves_alone_what_it_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "step-02").mkdir()
    (tmp_path / "elsewhere").write_text("mine too")
    run = Run()
    with run.manager(tmp_path, keep=Keep(last=1)) as manager:
        for step in (5, 6, 7):
            manager.save(step)
    assert visible(tmp_path) == ["elsewhere", "step-02", "step-1", "step-7"]


def test_what_cannot_be_deleted_keeps_nothing_else_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = LocalStorage.rename

    def refusing(storage: LocalStorage, source: str, target: str) -> None:
        if source == "step-1":
            raise StorageError("can't rename step-1: operation not permitted", path="step-1", errno=errno.EPERM)
        rename(storage, source, target)

    monkeypatch.setattr(LocalStorage, "rename", refusing)
    with Run().manager(tmp_path, keep=Keep(last=1)) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step).result()
        assert manager.steps() == [1, 4]
    assert caplog.text.count("retention can't delete") == 1


def test_a_manifest_is_read_once_for_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(storage: LocalStorage, name: str) -> Manifest | None:
        read.append(name)
        return read_manifest(storage, name)

    monkeypatch.setattr(keeping, "read_manifest", counted)
    with Run().manager(tmp_path, keep=Keep(last=9)) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step).result()
    assert sorted(read) == [f"step-{step}" for step in (1, 2, 3, 4)]


def test_retention_that_fails_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with run.manager(tmp_path, keep=Keep(last=1)) as manager:
        manager.save(1).result()
        (tmp_path / "step-1" / "holdfast.json").write_bytes(b"not a manifest")
        manager.save(2).result()
        with caplog.at_level(logging.WARNING, "holdfast"):
            manager.save(3).result()
        assert "step-1" in caplog.text
        assert manager.steps() == [1, 3]
