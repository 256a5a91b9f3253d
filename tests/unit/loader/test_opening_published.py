"""What a rank opens that has just saved: little of it, at first, and surely its own."""

from __future__ import annotations

import os

import pytest
import torch

import holdfast
from holdfast.catalog.catalog import Catalog
from holdfast.catalog.retention import Keep
from holdfast.errors import CheckpointNotFound, CheckpointReplaced, StorageError
from holdfast.loader.sources import holdfast as source
from holdfast.loader.sources.holdfast import open_published
from holdfast.storage.local import LocalStorage


@pytest.fixture
def saved(tmp_path):
    return holdfast.save({"w": torch.arange(6.0)}, tmp_path / "step-3", step=3, metrics={"loss": 1.0})


def test_the_manifest_is_read_when_it_is_asked_for(saved, monkeypatch):
    attempt = saved.manifest.attempt
    asked = []
    real = source.decode_manifest
    monkeypatch.setattr(source, "decode_manifest", lambda *args, **kwargs: asked.append(1) or real(*args, **kwargs))
    found = open_published(saved.path, attempt=attempt, step=3, world=1)
    assert (found.step, found.world, found.directory) == (3, 1, saved.path)
    assert not asked
    assert found.manifest == saved.manifest
    assert found.manifest.metrics == {"loss": 1.0}
    assert asked == [1]


def test_another_attempt_is_not_taken_for_it(saved):
    with pytest.raises(CheckpointReplaced, match="attempt 000000000000 was opened"):
        open_published(saved.path, attempt="0" * 12, step=3, world=1)


def test_nothing_there_is_said_so(saved):
    os.remove(os.path.join(saved.path, "holdfast.json"))
    with pytest.raises((CheckpointNotFound, StorageError)):
        open_published(saved.path, attempt="0" * 12, step=3, world=1)


def test_retention_reads_a_whole_manifest_once(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)
    whole = []
    real = LocalStorage.read_file

    def read_file(self, name, *, max_bytes):
        if name.endswith("holdfast.json"):
            whole.append(name)
        return real(self, name, max_bytes=max_bytes)

    monkeypatch.setattr(LocalStorage, "read_file", read_file)
    keeper = Catalog(storage, "step-{step}", Keep(last=2))
    for step in (1, 2):
        holdfast.save({"w": torch.zeros(2)}, tmp_path / f"step-{step}", step=step)
    whole.clear()
    for _ in range(3):
        keeper.apply_retention(2, storage.remove_tree)
    assert sorted(whole) == ["step-1/holdfast.json", "step-2/holdfast.json"]
    # An overwritten checkpoint is another attempt: what was known of the old one is not taken for it.
    holdfast.save({"w": torch.zeros(2)}, tmp_path / "step-2", step=2, overwrite=True)
    whole.clear()
    keeper.apply_retention(2, storage.remove_tree)
    assert whole == ["step-2/holdfast.json"]
    holdfast.save({"w": torch.zeros(2)}, tmp_path / "step-3", step=3)
    keeper.apply_retention(3, storage.remove_tree)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step-")) == ["step-2", "step-3"]


@pytest.mark.parametrize("gap", [1, 2])
def test_what_is_published_while_it_is_opened_is_neither_corrupt_nor_a_stock_checkpoint(tmp_path, monkeypatch, gap):
    """Between the two renames of an overwrite there is no manifest, as the first looks find."""
    holdfast.save({"a": torch.ones(2)}, tmp_path / "a", step=3)
    lexists, size, looks = os.path.lexists, LocalStorage.size, []

    def is_in_the_gap(path):
        if not path.endswith("holdfast.json"):
            return False
        looks.append(path)
        return len(looks) <= gap

    monkeypatch.setattr(os.path, "lexists", lambda path: not is_in_the_gap(path) and lexists(path))
    monkeypatch.setattr(LocalStorage, "size", lambda tree, name: None if is_in_the_gap(name) else size(tree, name))
    found = holdfast.open(tmp_path / "a")
    assert len(looks) > gap
    assert (found.step, found.manifest is not None) == (3, True)
