"""What becomes of a save that fails, of a callback that raises, and when the caller hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from _manager_runs import Run

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import (
    CallbackFailed,
    CheckpointExists,
    ConfigError,
    DeadlineExceeded,
    SaveFailed,
    StorageError,
)
from holdfast.storage.local import LocalStorage
from holdfast.testing.staging import held_copies


def occupy(root: Path, step: int) -> None:
    """Make the publishing of ``step`` fail: something comes to be there while it is being saved."""
    (root / f"step-{step}").mkdir()
    (root / f"step-{step}" / "in the way").write_text("x")


def fail_one_save(manager: CheckpointManager, root: Path, step: int) -> holdfast.SaveHandle:
    with held_copies(opens_for_updates=False):
        handle = manager.save(step)
        occupy(root, step)
    return handle


def test_a_failed_save_is_raised_at_the_next_call_and_only_there(tmp_path: Path) -> None:
    with Run().manager(tmp_path) as manager:
        manager.save(1).result()
        handle = fail_one_save(manager, tmp_path, 2)
        assert isinstance(handle.exception(), CheckpointExists)
        with pytest.raises(CheckpointExists, match="step-2"):
            manager.wait()
        manager.wait()
        assert manager.save(3).result().step == 3
        assert manager.steps() == [1, 3]


def test_a_failure_that_was_raised_already_is_not_raised_again(tmp_path: Path) -> None:
    async def wait_for(handle: holdfast.SaveHandle) -> None:
        await handle

    with Run().manager(tmp_path) as manager:
        manager.save(1).result()
        handle = fail_one_save(manager, tmp_path, 2)
        with pytest.raises(CheckpointExists, match="step-2"):
            handle.result()
        assert manager.save(3).result().step == 3
        handle = fail_one_save(manager, tmp_path, 4)
        with pytest.raises(CheckpointExists, match="step-4"):
            asyncio.run(wait_for(handle))
        manager.step(5)
        manager.wait()
        seen = threading.Event()

        def look(handle: holdfast.SaveHandle) -> None:  # which the training loop doesn't see
            with contextlib.suppress(CheckpointExists):
                handle.result()
            seen.set()

        with held_copies(opens_for_updates=False):  # one that has ended calls back here at once
            manager.save(6).add_done_callback(look)
            occupy(tmp_path, 6)
        assert seen.wait(60)
        with pytest.raises(CheckpointExists, match="step-6"):
            manager.wait()
        assert manager.steps() == [1, 3, 5]


def test_a_failed_save_is_raised_by_close_at_the_latest(tmp_path: Path) -> None:
    manager = Run().manager(tmp_path)
    fail_one_save(manager, tmp_path, 2)
    with pytest.raises(CheckpointExists, match="step-2"):
        manager.close()
    manager.close()
    with Run().manager(tmp_path) as again:  # the lock is free
        assert again.steps() == []


def test_a_failed_save_may_only_warn(tmp_path: Path) -> None:
    with Run().manager(tmp_path, on_error="warn") as manager:
        handle = fail_one_save(manager, tmp_path, 2)
        assert handle.exception() is not None
        with pytest.warns(UserWarning, match="step-2"):
            assert manager.step(3)[0].result().step == 3


def test_a_failed_save_may_stop_training_before_its_next_update(tmp_path: Path) -> None:
    run = Run()
    run.train()
    manager = run.manager(tmp_path, on_error="raise_now")
    handle = fail_one_save(manager, tmp_path, 2)
    assert handle.exception() is not None
    before = run.weight()
    with pytest.raises(CheckpointExists, match="step-2"):
        run.train()
    assert torch.equal(run.weight(), before)
    run.train()
    manager.close()


def test_a_failure_that_may_stop_training_does_not_stop_a_load(tmp_path: Path) -> None:
    """It would on the rank that knows of it, and the others would wait for that one."""
    run = Run()
    run.train()
    manager = run.manager(tmp_path, on_error="raise_now")
    manager.save(1).result()
    fail_one_save(manager, tmp_path, 2).exception()
    shutil.rmtree(tmp_path / "step-2")
    assert holdfast.load({"model": run.model}, tmp_path / "step-1").step == 1
    assert manager.restore() == 1
    with pytest.raises(CheckpointExists, match="step-2"):
        run.train()
    manager.close()


def test_a_save_that_cannot_begin_leaves_no_trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file = LocalStorage.write_file

    def refuse(storage: LocalStorage, name: str, data: bytes) -> None:
        if name.endswith(".metadata"):
            raise StorageError("no space left", path=name, errno=28)
        write_file(storage, name, data)

    with Run().manager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "write_file", refuse)
            assert isinstance(manager.save(1).exception(), SaveFailed)
            with contextlib.suppress(SaveFailed):
                manager.wait()
        deadline = time.monotonic() + 10
        while [entry for entry in os.listdir(tmp_path) if "step-1" in entry] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.listdir(tmp_path) == [".holdfast"]


def test_trash_that_takes_long_is_removed_after_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trash = tmp_path / ".step-1.0123456789ab.trash"
    trash.mkdir()
    for number in range(50):
        (trash / str(number)).write_bytes(b"")
    monkeypatch.setattr("holdfast.saver.startup.SWEEP_S", -1.0)
    with Run().manager(tmp_path) as manager:
        assert manager.recovered.removed == (trash.name,)
    assert os.listdir(tmp_path) == [".holdfast"]


def test_an_error_in_the_with_block_is_the_one_to_see(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Run().manager(tmp_path) as manager:  # noqa: PT012
        fail_one_save(manager, tmp_path, 2)
        raise ZeroDivisionError
    with pytest.raises(ConfigError, match="closed"):
        manager.save(3)


def test_a_callback_that_raises_fails_nothing_but_the_next_call(tmp_path: Path) -> None:
    with Run().manager(tmp_path) as manager:
        release = threading.Event()
        handle = manager.save(1)
        handle.add_done_callback(lambda _: (release.wait(20), 1 / 0))
        checkpoint = handle.result()
        with pytest.raises(DeadlineExceeded, match="callbacks of saves have not returned"):
            manager.wait(0.05)
        release.set()
        with pytest.raises(CallbackFailed, match=r"ZeroDivisionError.*step-1 stands") as caught:
            manager.wait()
        assert caught.value.checkpoint == checkpoint.path
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        manager.wait()
        assert checkpoint.verify().ok
        handle.add_done_callback(lambda _: {}["late"])
        with pytest.raises(CallbackFailed, match="KeyError"):
            manager.step(2)
        assert manager.steps() == [1, 2] or manager.save(3).result()


def test_a_callback_may_wait_for_later_saves_and_close_the_manager(tmp_path: Path) -> None:
    run = Run()
    manager = run.manager(tmp_path)
    seen: list[int | None] = []
    started, closed = threading.Event(), threading.Event()
    handles: list[holdfast.SaveHandle] = []

    def wait_for_the_next(_: holdfast.SaveHandle) -> None:
        started.wait(20)
        seen.append(handles[1].result(20).step)
        manager.close()
        closed.set()

    handles.append(manager.save(1))
    handles[0].add_done_callback(wait_for_the_next)
    handles.append(manager.save(2))
    started.set()
    assert closed.wait(30)
    assert seen == [2]
    with pytest.raises(ConfigError, match="closed"):
        manager.step(3)


def test_a_callback_that_wants_to_end_the_program_ends_nothing(tmp_path: Path) -> None:
    def leave(_: holdfast.SaveHandle) -> None:
        raise SystemExit(3)

    with Run().manager(tmp_path) as manager:
        handle = manager.save(1)
        handle.add_done_callback(leave)
        handle.result()
        with pytest.raises(CallbackFailed, match="SystemExit"):
            manager.wait()
        assert manager.save(2).result().step == 2
