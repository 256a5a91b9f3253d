"""Files that are stored with a checkpoint: in the manifest, verified, there when it becomes visible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError

STATE = {"w": torch.arange(6.0), "epoch": 3}


def test_files_are_listed_read_and_verified(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_bytes(b"{}")
    files: dict[str, Any] = {
        "trainer_state.json": b'{"step": 3}',
        "tok.json": source,
        "empty": b"",
        "o": bytearray(b"x"),
    }
    for checkpoint in (
        holdfast.save(STATE, tmp_path / "a", files=files),
        holdfast.async_save(STATE, tmp_path / "b", files=files).result(60),
    ):
        source.write_bytes(b"changed afterwards") if checkpoint.path.endswith("b") else None
        found = holdfast.open(checkpoint.path)
        assert {name: info.nbytes for name, info in found.files.items()} == {
            "trainer_state.json": 11,
            "tok.json": 2,
            "empty": 0,
            "o": 1,
        }
        assert found.read_file("trainer_state.json") == b'{"step": 3}'
        assert found.read_file("tok.json") == b"{}"
        assert (Path(found.path) / "trainer_state.json").read_bytes() == b'{"step": 3}'
        report = found.verify()
        assert report.ok
        assert not report.warnings
        with pytest.raises(CheckpointNotFound, match=r"'other'.*trainer_state\.json"):
            found.read_file("other")
    holdfast.load({"w": torch.zeros(6), "epoch": 0}, tmp_path / "a")


def test_without_files_there_are_none(tmp_path: Path) -> None:
    checkpoint = holdfast.save(STATE, tmp_path / "a")
    assert not checkpoint.files
    with pytest.raises(CheckpointNotFound, match="none"):
        checkpoint.read_file(".metadata")


def test_damage_in_a_file_is_found(tmp_path: Path) -> None:
    checkpoint = holdfast.save(STATE, tmp_path / "a", files={"notes.txt": b"abc"})
    (tmp_path / "a" / "notes.txt").write_bytes(b"abd")
    with pytest.raises(CheckpointCorrupt, match=r"notes\.txt"):
        checkpoint.read_file("notes.txt")
    assert not checkpoint.verify().ok
    with pytest.raises(CheckpointCorrupt, match=r"notes\.txt"):
        holdfast.load({"w": torch.zeros(6), "epoch": 0}, tmp_path / "a")
    os.unlink(tmp_path / "a" / "notes.txt")
    assert not checkpoint.verify().ok


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../x": b""}, "slash"),
        ({"a/b": b""}, "slash"),
        ({"holdfast.json": b""}, "Holdfast's"),
        ({".metadata": b""}, "hidden"),
        ({"rank-00000.report": b""}, "Holdfast's"),
        ({"__0_0.distcp": b""}, "Holdfast's"),
        ({"": b""}, "names no entry"),
        ({3: b""}, "no text"),
        ({"x": "a path?"}, "pathlib"),
        ({"x": None}, "pathlib"),
        ({"x": Path("/not/there")}, "/not/there"),
        ([("x", b"")], "mapping"),
    ],
)
def test_bad_files_are_refused_before_anything_is_written(tmp_path: Path, files: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        holdfast.save(STATE, tmp_path / "a", files=files)
    assert not list(tmp_path.iterdir())
    with holdfast.CheckpointManager(tmp_path / "root", STATE) as manager:
        with pytest.raises(ConfigError, match=said):
            manager.save(1, files=files)
        manager.save(2, final=True)
        assert manager.steps() == [2]


def test_overwriting_takes_old_files_away(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "a", files={"old.txt": b"1", "both.txt": b"2"})
    checkpoint = holdfast.save(STATE, tmp_path / "a", overwrite=True, files={"both.txt": b"3"})
    assert list(checkpoint.files) == ["both.txt"]
    assert not (tmp_path / "a" / "old.txt").exists()
    assert checkpoint.read_file("both.txt") == b"3"
    assert checkpoint.verify().ok


def test_a_manager_stores_files_with_what_is_due(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    config = holdfast.CheckpointConfig(every=2)
    with holdfast.CheckpointManager(tmp_path, {"model": model}, config=config) as manager:
        for step in range(1, 5):
            manager.step(step, files={"trainer_state.json": str(step).encode()})
        manager.save(5, files={"trainer_state.json": b"5"})
        manager.wait()
        assert manager.save(5, final=True).result(60).read_file("trainer_state.json") == b"5"
        again = manager.save(5, final=True, files={"trainer_state.json": b"last"}).result(60)
        assert again.read_file("trainer_state.json") == b"last"
    for step, content in ((2, b"2"), (4, b"4"), (5, b"last")):
        assert holdfast.open(tmp_path / f"step-{step}").read_file("trainer_state.json") == content


def test_files_of_an_export_are_those_beside_the_weights(tmp_path: Path) -> None:
    path = holdfast.export_hf({"model": nn.Linear(3, 2)}, tmp_path / "hf")
    checkpoint = holdfast.open(path)
    for name, info in checkpoint.files.items():
        assert (Path(path) / name).stat().st_size == info.nbytes
        assert checkpoint.read_file(name) == (Path(path) / name).read_bytes()
