"""What is being loaded is not deleted meanwhile; what nobody reads is, and nothing waits."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFound
from holdfast.loader import loader
from holdfast.storage.leases import being_read, to_be_deleted


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((64,), value)}


def test_a_load_beside_a_writer_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = holdfast.CheckpointConfig(every=None, keep=holdfast.Keep(last=1))
    state, fill = state_of(1.0), loader._fill
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        manager.save(1).result()

        def save_meanwhile(*args: Any) -> None:
            state["w"].fill_(2.0)
            manager.save(2).result()
            assert manager.steps() == [1, 2]
            fill(*args)

        monkeypatch.setattr(loader, "_fill", save_meanwhile)
        found = state_of(0.0)
        assert holdfast.load(found, tmp_path).step == 1
        assert torch.equal(found["w"], torch.full((64,), 1.0))
        manager.save(3).result()
        assert manager.steps() == [3]


def test_whoever_comes_too_late_is_told(tmp_path: Path) -> None:
    holdfast.save(state_of(1.0), tmp_path / "a")
    with (
        to_be_deleted(str(tmp_path / "a")) as free,
        pytest.raises(CheckpointNotFound, match="is being deleted"),
        being_read(str(tmp_path / "a")),
    ):
        raise AssertionError("it must not be read now")
    assert free
    with being_read(str(tmp_path / "a")), being_read(str(tmp_path / "a")):
        with to_be_deleted(str(tmp_path / "a")) as free:
            assert not free
        # Gone all the same, by somebody who doesn't ask.
        (tmp_path / "a").rename(tmp_path / "b")
    with to_be_deleted(str(tmp_path / "a")) as free:
        assert free


def test_where_there_are_no_locks_both_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    holdfast.save(state_of(1.0), tmp_path / "a")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with being_read(str(tmp_path / "a")), to_be_deleted(str(tmp_path / "a")) as free:
        assert free
    assert holdfast.load(state_of(0.0), tmp_path / "a").path == str(tmp_path / "a")


def test_a_reader_needs_no_right_to_write(tmp_path: Path) -> None:
    holdfast.save(state_of(1.0), tmp_path / "a")
    descriptors = os.listdir("/proc/self/fd")
    for path in (tmp_path / "a").iterdir():
        path.chmod(0o444)
    with being_read(str(tmp_path / "a")), to_be_deleted(str(tmp_path / "a")) as free:
        assert not free
    assert os.listdir("/proc/self/fd") == descriptors
