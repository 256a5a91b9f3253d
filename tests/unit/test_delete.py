"""`holdfast.delete`: gone at once, as a whole; not while somebody loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFound, ConfigError, StorageError
from holdfast.storage.leases import being_read


def test_a_checkpoint_is_deleted_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        holdfast.save({"w": torch.ones(4)}, tmp_path / name, files={"note": b"x"})
    (tmp_path / "a" / "of-others").mkdir()
    (tmp_path / "a" / "of-others" / "log").write_text("lines")
    assert holdfast.delete(tmp_path / "a") is True
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert holdfast.open(tmp_path / "b").verify().ok


def test_a_checkpoint_that_is_being_loaded_stays(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(4)}, tmp_path / "a")
    with being_read(str(tmp_path / "a")):
        assert holdfast.delete(tmp_path / "a") is False
        assert holdfast.open(tmp_path / "a").verify().ok
    assert holdfast.delete(tmp_path / "a") is True
    assert not list(tmp_path.iterdir())


def test_what_time_does_not_suffice_for_is_hidden_and_removed_by_the_next_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save({"w": torch.ones(4)}, tmp_path / "a")
    monkeypatch.setattr("holdfast.api.remove_quickly", lambda *args, **options: None)
    assert holdfast.delete(tmp_path / "a", timeout=1.0) is True
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".a.")
    assert left.name.endswith(".trash")
    holdfast.CheckpointManager(tmp_path, {"w": torch.ones(4)}).close()
    assert not left.exists()


def test_what_is_not_there_or_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nothing to delete"):
        holdfast.delete(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, StorageError)):
        holdfast.delete(tmp_path / "file")
    with pytest.raises(ConfigError):
        holdfast.delete(tmp_path / "a", timeout=-1.0)
