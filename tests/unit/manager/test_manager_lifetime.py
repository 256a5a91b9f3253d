"""How a `CheckpointManager` starts, closes, shares its root, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _manager_runs import Run, visible

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast.errors import (
    ConfigError,
    DeadlineExceeded,
    RootLocked,
    SaveFailed,
)
from holdfast.testing.staging import held_copies


def test_two_managers_never_write_to_one_root(tmp_path: Path) -> None:
    with Run().manager(tmp_path) as manager:
        with pytest.raises(
            RootLocked, match=rf"{tmp_path} is locked by another writer: process {os.getpid()} on"
        ) as caught:
            Run(1).manager(tmp_path)
        assert str(os.getpid()) in caught.value.by
        assert manager.save(1).result().step == 1
    with Run(1).manager(tmp_path) as second:
        assert second.steps() == [1]


def test_a_root_that_was_replaced_is_not_written_to_beside_its_new_manager(tmp_path: Path) -> None:
    """A run goes on whose root was removed, and another one has begun there since."""
    root, old, new = tmp_path / "root", Run(), Run(seed=1)
    with old.manager(root) as first:
        first.save(1).result()
        shutil.rmtree(root)
        with new.manager(root) as second:
            second.save(5).result()
            with pytest.raises(SaveFailed, match=f"locked by another writer: process {os.getpid()} ") as caught:
                first.save(2, final=True)
            assert isinstance(caught.value.__cause__, RootLocked)
            assert second.steps() == [5]
        first.save(3).result()
        with pytest.raises(RootLocked):
            new.manager(root)
    assert visible(root) == ["step-3", "step-5"]


def test_close_is_idempotent_and_final(tmp_path: Path) -> None:
    run = Run()
    manager = run.manager(tmp_path)
    handle = manager.save(1)
    manager.close()
    manager.close()
    assert handle.done()
    assert handle.result().step == 1
    calls = (lambda: manager.save(2), lambda: manager.step(2), manager.restore)
    for call in calls:
        with pytest.raises(ConfigError, match="closed"):
            call()
    assert manager.steps() == [1]
    run.train()  # no hook is left that would mind


def test_close_in_the_middle_of_a_save_waits_for_it(tmp_path: Path) -> None:
    run = Run()
    manager = run.manager(tmp_path)
    with held_copies():
        handle = manager.save(1)
        manager.close()
    assert handle.result().step == 1


def test_close_keeps_its_deadline(tmp_path: Path) -> None:
    run = Run()
    manager = run.manager(tmp_path)
    manager.save(1).result()
    with held_copies(opens_for_updates=False) as gate:
        handle = manager.save(2)
        assert gate.wait_arrived()
        opener = threading.Timer(1.0, gate.open)
        opener.start()
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            manager.close(0.1)
        assert time.monotonic() - began < 20
        opener.join()
    handle.exception(20)
    assert handle.done()
    with run.manager(tmp_path) as again:
        assert 1 in again.steps()


def test_exports_are_refused_until_they_are_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exports") as caught:
        CheckpointManager(tmp_path, Run().state, exports=[object()])
    assert caught.value.field == "exports"
    with pytest.raises(ConfigError, match="a list of HFExport, not one HFExport") as caught:
        CheckpointManager(tmp_path, Run().state, exports=holdfast.HFExport(tmp_path / "hf"))  # type: ignore[arg-type]
    assert caught.value.field == "exports"


@pytest.mark.parametrize("root", ["", 3, None, "ftp://host/x", "s3://", "s3://bucket/../x", b"bytes"])
def test_a_root_is_a_path(root: Any) -> None:
    with pytest.raises(ConfigError, match=r"root|object stores") as caught:
        CheckpointManager(root, Run().state)
    assert caught.value.field == "root"


def test_a_config_is_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config must be a CheckpointConfig, not dict"):
        CheckpointManager(tmp_path, Run().state, config={"every": 3})  # type: ignore[arg-type]


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and child processes of this process."""
    while True:
        threads = os.listdir("/proc/self/task")
        try:
            children = [Path(f"/proc/self/task/{thread}/children").read_text().split() for thread in threads]
        except FileNotFoundError:  # a thread has ended meanwhile, as the journal's does when it is idle
            continue
        return len(os.listdir("/proc/self/fd")), len(threads), sum(map(len, children))


def assert_nothing_is_added_to(before: tuple[int, int, int]) -> None:
    """The journal's thread may be at work still: it has a file open meanwhile, and ends when it is idle."""
    deadline = time.monotonic() + 10
    while (added := np.subtract(resources(), before)).max() > 0:
        assert time.monotonic() < deadline, f"descriptors, threads and children since then: {added}"
        time.sleep(0.01)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_saves_leave_nothing_behind(tmp_path: Path) -> None:
    run = Run()
    before_all = resources()
    with run.manager(tmp_path, keep=Keep(last=2), in_flight=2) as manager:
        for step in range(1, 31):
            run.train()
            manager.step(step)
        manager.wait()
        before = resources()
        memory = resident_bytes()
        for step in range(31, 331):
            run.train()
            run.progress["log"] = "x" * (step % 200)  # type: ignore[assignment]
            manager.step(step)
        manager.wait()
        assert_nothing_is_added_to(before)
        assert resident_bytes() - memory < 16 << 20
        assert manager.steps() == [329, 330]
        assert len(manager._handles) <= 1
    assert sorted(os.listdir(tmp_path)) == [".holdfast", "step-329", "step-330"]
    fds, threads, children = resources()
    assert (fds, children) == (before_all[0], before_all[2])
    assert threads <= before_all[1] + 1
    shutil.rmtree(tmp_path)


def test_the_start_of_a_manager_leaves_a_save_alone_that_is_at_work_in_its_root(tmp_path: Path) -> None:
    """`holdfast.save` to a path of its own below the root, between making its directory and publishing."""
    state = {"w": torch.arange(6.0)}
    holdfast.save(state, tmp_path / "root" / "other")
    with held_copies():
        handle = holdfast.async_save(state, tmp_path / "root" / "mine")
        hidden = ".mine.0123456789ab.incomplete"
        (tmp_path / "root" / hidden).mkdir()
        with holdfast.CheckpointManager(tmp_path / "root", state) as manager:
            assert manager.recovered.left == (hidden,)
            assert (tmp_path / "root" / hidden).exists()
    assert handle.result().path == str(tmp_path / "root" / "mine")
    deadline = time.monotonic() + 10
    while (tmp_path / "root" / ".mine.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with holdfast.CheckpointManager(tmp_path / "root", state):
        pass
    assert sorted(os.listdir(tmp_path / "root")) == [".holdfast", "mine", "other"]


def kill_engine(manager: CheckpointManager) -> None:
    """Returns when the manager knows."""
    engine = manager._saver._engine
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while engine.pid is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_no_engine_could_be_asked_to_remove_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trash = [tmp_path / f".step-{step}.0123456789ab.trash" for step in (7, 8, 9)]
    with Run().manager(tmp_path) as manager:
        manager.save(1).result()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            kill_engine(manager)
            for path in trash:
                path.mkdir()
                manager._saver.remove(path.name)
            assert isinstance(manager.save(2).exception(), SaveFailed)
        with pytest.raises(SaveFailed):
            manager.wait()
        assert all(path.exists() for path in trash)
    assert not any(path.exists() for path in trash)


@pytest.mark.parametrize("then", ["save", "close"])
def test_what_an_engine_has_died_over_is_removed_by_the_next(then: str, tmp_path: Path) -> None:
    trash = tmp_path / ".step-9.0123456789ab.trash"
    with Run().manager(tmp_path) as manager:
        manager.save(1).result()
        trash.mkdir()
        (trash / "large").write_bytes(b"0" * 4096)
        os.kill(manager._saver._engine.pid, signal.SIGSTOP)
        manager._saver.remove(trash.name)
        kill_engine(manager)
        assert trash.exists()
        if then == "save":
            manager.save(2).result()
            manager._saver._engine.wait_removals(20)
            assert not trash.exists()
    assert not trash.exists()
