"""`CheckpointManager` on one process: cadence, last saves, resuming, retention, pins, errors, lifetime."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
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
from torch import nn
from torch.distributed import checkpoint as dcp

import holdfast
from holdfast import Best, CheckpointConfig, CheckpointManager, Keep, keeping, loader, opening, source
from holdfast.errors import (
    CallbackFailed,
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    RootLocked,
    SaveFailed,
    StateChangedWhileStaging,
    StateMismatch,
    StorageError,
)
from holdfast.format.manifest import Manifest
from holdfast.keeping import Found
from holdfast.root import read_manifest
from holdfast.storage.local import LocalStorage
from holdfast.testing.staging import held_copies


class Run:
    """A training run small enough to be made again and again."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)
        self.progress = {"tokens": 0}
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "train": self.progress,
        }

    def train(self) -> None:
        self.model(torch.randn(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.progress["tokens"] += 1

    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()

    def manager(self, root: Path, **options: Any) -> CheckpointManager:
        return CheckpointManager(root, self.state, config=CheckpointConfig(**{"every": 1, "keep": None, **options}))


def saved_run(root: Path, steps: int, **options: Any) -> dict[int, torch.Tensor]:
    """Train and save ``steps`` steps; returns the weights at each."""
    run, weights = Run(), {}
    with run.manager(root, **options) as manager:
        for step in range(1, steps + 1):
            run.train()
            weights[step] = run.weight()
            manager.step(step, metrics={"loss": float(step % 4)})
    return weights


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every entry with mode, size and time of change, the root itself included."""
    entries = [root, *sorted(root.rglob("*"))]
    stats = {str(entry.relative_to(root)): entry.lstat() for entry in entries}
    return {name: (stat.st_mode, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def visible(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))


# when to save ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 3}, [3, 6]),
        ({"every": 3, "first_step": True}, [1, 3, 6]),
        ({"every": None}, []),
        ({"every": None, "first_step": True}, [1]),
        ({"every": 1}, [1, 2, 3, 4, 5, 6]),
        ({"every": 100}, []),
    ],
)
def test_cadence(options: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, **options) as manager:
        started = [handle.step for step in range(1, 7) for handle in manager.step(step)]
        manager.wait()
        assert started == manager.steps() == expected
        assert manager.latest() == max(expected, default=None)


def test_step_0_is_never_due_by_interval(tmp_path: Path) -> None:
    with Run().manager(tmp_path) as manager:
        assert manager.step(0) == []


def test_the_names_follow_the_template(tmp_path: Path) -> None:
    with Run().manager(tmp_path, name_template="ckpt_{step:06d}") as manager:
        assert manager.save(7).result().path == str(tmp_path / "ckpt_000007")
        assert manager.steps() == [7]


def test_metrics_may_be_anything_with_a_float(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        metrics = {"loss": torch.tensor(0.5), "best": np.float32(2), "n": 3, "nan": float("nan"), "inf": float("inf")}
        found = manager.save(1, metrics=metrics).result().metrics
        assert {name: repr(value) for name, value in found.items()} == {
            "loss": "0.5", "best": "2.0", "n": "3.0", "nan": "nan", "inf": "inf",
        }  # fmt: skip
        assert repr(holdfast.open(tmp_path).metrics["nan"]) == "nan"
        with pytest.raises(ConfigError, match="metric 'loss' must be a number"):
            manager.save(2, metrics={"loss": "low"})  # type: ignore[dict-item]
        assert manager.steps() == [1]


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, None])
def test_a_step_is_a_whole_number(step: Any, tmp_path: Path) -> None:
    with Run().manager(tmp_path) as manager:
        for call in (manager.step, manager.save):
            with pytest.raises(ConfigError, match="step must be an integer >= 0"):
                call(step)


def test_sync_saves_are_published_when_step_returns(tmp_path: Path) -> None:
    with Run().manager(tmp_path, mode="sync") as manager:
        (handle,) = manager.step(1)
        assert handle.done()
        assert manager.steps() == [1]


def test_one_step_is_saved_once(tmp_path: Path) -> None:
    with Run().manager(tmp_path) as manager:
        manager.save(1).result()
        with pytest.raises(CheckpointExists, match=r"step 1: .*step-1 exists already"):
            manager.save(1)
        manager.save(2).result()
        assert manager.steps() == [1, 2]


# the last save ---------------------------------------------------------------------------------------------------


def test_a_final_save_waits_and_keeps_the_model_only_in_another_dtype(tmp_path: Path) -> None:
    run = Run()
    run.train()
    options = {"every": 2, "keep": Keep(last=1), "last_model_only": True, "last_dtype": torch.bfloat16}
    with run.manager(tmp_path, **options) as manager:
        manager.step(2)
        run.train()
        handle = manager.save(3, final=True)
        assert handle.done()
        checkpoint = handle.result()
        assert set(checkpoint.tensors) == {"model.weight", "model.bias"}
        assert set(checkpoint.objects) == set()
        assert torch.equal(checkpoint.read("model.weight"), run.weight().bfloat16())
        assert checkpoint.manifest is not None
        assert not checkpoint.manifest.resumable
        # Retention keeps one, and the newest a run can resume from beside it.
        assert manager.steps() == [2, 3]
    other = Run(1)
    with other.manager(tmp_path) as manager:
        assert manager.restore() == 2


def test_a_final_save_without_options_is_whole(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, last_dtype="bfloat16") as manager:
        run.train()
        checkpoint = manager.save(1, final=True).result()
        assert checkpoint.tensors["model.weight"].dtype == torch.bfloat16
        assert {row.dtype for name, row in checkpoint.tensors.items() if "optimizer" in name} == {torch.float32}
        assert checkpoint.manifest is not None
        assert checkpoint.manifest.resumable
    other = Run(1)
    with other.manager(tmp_path) as manager:
        assert manager.restore() == 1
    assert torch.equal(other.weight(), run.weight().bfloat16().float())


def test_a_final_save_of_a_step_just_saved_is_that_save(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, last_model_only=True) as manager:
        (handle,) = manager.step(4)
        assert manager.save(4, final=True) is handle
        assert handle.done()
        assert "optimizer.param_groups.0.lr" in handle.result().objects


@pytest.mark.parametrize(
    ("options", "before", "replaced", "resumes_from"),
    [
        ({"last_dtype": "bfloat16"}, [4], True, 4),
        ({"last_model_only": True}, [2, 4], True, 2),
        ({"last_model_only": True, "last_dtype": "bfloat16"}, [4], False, 4),
        ({"last_model_only": True, "keep": Keep(last=1)}, [2, 4], False, 4),
        ({"last_model_only": True, "pinned": True}, [2, 4], False, 4),
    ],
    ids=str,
)
def test_a_final_save_of_a_step_just_saved_applies_its_options(
    options: dict[str, Any],
    before: list[int],
    replaced: bool,
    resumes_from: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.train()
    pinned = options.get("pinned", False)
    options = {name: value for name, value in options.items() if name != "pinned"}
    with run.manager(tmp_path, every=None, **options) as manager:
        for step in before:
            handle = manager.save(step)
        if pinned:
            handle.result()
            manager.pin(4)
        final = manager.save(4, final=True)
        assert (final is not handle) == replaced
        checkpoint = final.result()
        if replaced:
            assert checkpoint.tensors["model.weight"].dtype == (
                torch.bfloat16 if "last_dtype" in options else torch.float32
            )
            assert ("optimizer.param_groups.0.lr" in checkpoint.objects) != ("last_model_only" in options)
        else:
            assert "step 4" in caplog.text
        assert manager.save(4, final=True).result().step == 4
    with Run(1).manager(tmp_path) as manager:
        assert manager.restore() == resumes_from


def test_nothing_is_resumed_from_a_model_only_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with run.manager(tmp_path, every=None, last_model_only=True) as manager:
        manager.save(9, final=True)
    other = Run(1)
    before = other.weight()
    with other.manager(tmp_path) as manager:
        with caplog.at_level(logging.WARNING, "holdfast"):
            assert manager.restore() is None
        assert "step 9" in caplog.text
        assert torch.equal(other.weight(), before)
        assert manager.restore(9) == 9  # asked for, it gives what it has
        assert torch.equal(other.weight(), run.weight())


# resuming --------------------------------------------------------------------------------------------------------


def test_restore_brings_everything_back_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        assert manager.restore() is None
        for step in range(1, 4):
            run.train()
            manager.step(step)
        manager.wait()
        draws = torch.randn(3)
        run.train()
        expected = run.weight()
    other = Run(5)
    with other.manager(tmp_path) as manager:
        assert manager.restore() == 3
        assert torch.equal(torch.randn(3), draws)
        assert other.progress == {"tokens": 3}
        assert other.schedule.last_epoch == 3
        other.train()
        assert torch.equal(other.weight(), expected)


def test_restore_of_one_step(tmp_path: Path) -> None:
    weights = saved_run(tmp_path, 4)
    run = Run(1)
    with run.manager(tmp_path) as manager:
        assert manager.restore(2) == 2
        assert torch.equal(run.weight(), weights[2])
        with pytest.raises(CheckpointNotFound, match=r"step 7 is not published.*published steps: 1, 2, 3, 4") as caught:
            manager.restore(7)
        assert (caught.value.step, caught.value.path) == (7, str(tmp_path))


@pytest.mark.parametrize("load_step", [2, -1, None])
def test_load_step_chooses(load_step: int | None, tmp_path: Path) -> None:
    saved_run(tmp_path, 3)
    with Run(1).manager(tmp_path, load_step=load_step) as manager:
        assert manager.restore() == (2 if load_step == 2 else 3)


def test_a_load_step_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with Run().manager(tmp_path, load_step=5) as manager, pytest.raises(CheckpointNotFound, match="step 5"):
        manager.restore()


def test_step_0_and_load_model_only_load_the_model_only(tmp_path: Path) -> None:
    for step, options in ((0, {}), (1, {"load_model_only": True})):
        root, run = tmp_path / str(step), Run()
        run.train()
        with run.manager(root) as manager:
            manager.save(step).result()
        other = Run(1)
        with other.manager(root, **options) as manager:
            assert manager.restore() == step
        assert torch.equal(other.weight(), run.weight())
        assert other.progress == {"tokens": 0}
        assert not other.optimizer.state


def test_a_state_without_modules_is_never_loaded_in_part(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with CheckpointManager(tmp_path, state, config=CheckpointConfig()) as manager:
        manager.save(0).result()
    other = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path, other, config=CheckpointConfig()) as manager:
        assert manager.restore() == 0
    assert other["w"].tolist() == [1, 1, 1]
    for options in ({"load_model_only": True}, {"initial_load_path": str(tmp_path / "step-0")}):
        with pytest.raises(ConfigError, match="no module"):
            CheckpointManager(tmp_path / "new", other, config=CheckpointConfig(**options))


def test_excluded_keys_are_left_alone(tmp_path: Path) -> None:
    run = Run()
    run.train()
    with run.manager(tmp_path) as manager:
        manager.save(1).result()
    other = Run(1)
    with other.manager(tmp_path, exclude_from_loading=["train", "lr_scheduler", "rng"]) as manager:
        torch.manual_seed(99)
        expected = torch.randn(2)
        torch.manual_seed(99)
        assert manager.restore() == 1
        assert torch.equal(torch.randn(2), expected)
    assert other.progress == {"tokens": 0}
    assert other.schedule.last_epoch == 0
    assert torch.equal(other.weight(), run.weight())


def test_an_initial_path_counts_only_for_an_empty_root(tmp_path: Path) -> None:
    weights = saved_run(tmp_path / "pretrained", 2)
    run = Run(1)
    run.train()
    own = run.progress["tokens"]
    with run.manager(tmp_path / "new", initial_load_path=str(tmp_path / "pretrained" / "step-2")) as manager:
        assert manager.restore() is None
        assert torch.equal(run.weight(), weights[2])
        assert run.progress["tokens"] == own
        with torch.no_grad():
            run.model.weight.fill_(7)
        manager.save(1).result()
    other = Run(2)
    with other.manager(tmp_path / "new", initial_load_path="does/not/exist") as manager:
        assert manager.restore() == 1
        assert other.weight().unique().tolist() == [7]


def test_an_initial_path_that_has_nothing_is_an_error(tmp_path: Path) -> None:
    with (
        Run().manager(tmp_path / "a", initial_load_path=str(tmp_path / "b")) as manager,
        pytest.raises(CheckpointNotFound, match=str(tmp_path / "b")),
    ):
        manager.restore()


def test_a_damaged_newest_step_is_passed_over_aloud(tmp_path: Path) -> None:
    weights = saved_run(tmp_path, 3)
    for file in (tmp_path / "step-3").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    run = Run(1)
    with run.manager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="step 3 can't be loaded, falling back to step 2"):
            assert manager.restore() == 2
        assert torch.equal(run.weight(), weights[2])
        with pytest.raises(CheckpointCorrupt):
            manager.restore(3)
    with run.manager(tmp_path, on_corrupt="raise") as manager, pytest.raises(CheckpointCorrupt, match="step-3"):
        manager.restore()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT, None, errno.EIO])
def test_what_says_nothing_of_a_checkpoint_is_no_reason_to_go_back(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, 2)
    opened = loader.open_source

    def refusing(path: str) -> Any:
        if path.endswith("step-2"):
            raise StorageError(f"{path} could not be read", path=path, errno=code)
        return opened(path)

    monkeypatch.setattr(loader, "open_source", refusing)
    with Run(1).manager(tmp_path) as manager:
        if code == errno.EIO:
            with pytest.warns(UserWarning, match="falling back to step 1"):
                assert manager.restore() == 1
        else:
            with pytest.raises(StorageError, match="step-2 could not be read"):
                manager.restore()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_stock_metadata_that_is_no_file_any_more_is_not_passed_over_in_silence(put: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.full((3,), float(step))}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    metadata = tmp_path / "step-2" / ".metadata"
    metadata.unlink()
    put(metadata)
    state = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path, state, config=CheckpointConfig(load_only=True)) as manager:
        with pytest.warns(UserWarning, match=r"falling back to step 1: .*\.metadata is"):
            assert manager.restore() == 1
        with pytest.raises(CheckpointCorrupt, match=r"\.metadata"):
            manager.restore(2)
    assert state["w"].tolist() == [1, 1, 1]


def test_a_report_that_the_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the directory that it lies in, in which others are looked for as well."""
    saved_run(tmp_path, 1)
    victim = str(tmp_path / "step-1" / "rank-00000.report")
    opened = source.open_plain

    def refusing(directory: str, name: str, *args: Any, **options: Any) -> int:
        if os.path.join(directory, name) == victim:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(directory, name, *args, **options)

    monkeypatch.setattr(source, "open_plain", refusing)
    with Run(1).manager(tmp_path) as manager, pytest.raises(StorageError, match="Permission denied") as caught:
        manager.restore()
    assert (caught.value.path, caught.value.errno) == (victim, errno.EACCES)
    (problem,) = holdfast.open(tmp_path / "step-1").verify().problems
    assert problem.path == victim


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", ".nfs000000000001"])
def test_what_others_put_into_a_checkpoint_does_not_make_it_corrupt(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(tmp_path, 2)
    (tmp_path / "step-2" / name).write_text("mine")
    with Run(1).manager(tmp_path) as manager:
        assert manager.restore() == 2
    assert name in caplog.text
    report = holdfast.open(tmp_path / "step-2").verify()
    assert [problem.path for problem in report.problems] == [str(tmp_path / "step-2" / name)]


def test_a_step_that_a_writer_deletes_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, 3)
    candidates = keeping.Keeper.candidates

    def outdated(keeper: keeping.Keeper, step: int | None) -> list[tuple[int, str]]:
        found = candidates(keeper, step)
        if (tmp_path / "step-3").exists():
            (tmp_path / "step-3").rename(tmp_path / "aside")
        return found

    monkeypatch.setattr(keeping.Keeper, "candidates", outdated)
    with Run(1).manager(tmp_path, load_only=True) as manager:
        assert manager.restore() == 2


def test_where_all_is_damaged_the_last_error_is_raised(tmp_path: Path) -> None:
    saved_run(tmp_path, 2)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "holdfast.json").write_bytes(b"{")
    with (
        Run(1).manager(tmp_path) as manager,
        pytest.warns(UserWarning, match="falling back to step 1"),
        pytest.raises(CheckpointCorrupt, match="step-1") as caught,
    ):
        manager.restore()
    assert caught.value.path == str(tmp_path / "step-1" / "holdfast.json")
    for step in (1, 2):
        assert str(tmp_path / f"step-{step}" / "holdfast.json") in str(caught.value)


def test_steps_that_were_exchanged_are_not_taken_for_one_another(tmp_path: Path) -> None:
    """Each of them is whole: only its manifest says that it is not the step that it is called."""
    weights = saved_run(tmp_path, 3)
    (tmp_path / "step-2").rename(tmp_path / "aside")
    (tmp_path / "step-3").rename(tmp_path / "step-2")
    (tmp_path / "aside").rename(tmp_path / "step-3")
    run = Run(1)
    with run.manager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="falling back to step [12]: .* is of step [23], expected"):
            assert manager.restore() == 1
        assert torch.equal(run.weight(), weights[1])
        with pytest.raises(CheckpointCorrupt, match="is of step 3, expected step 2"):
            manager.restore(2)
    holdfast.load(run.state, tmp_path / "step-3")  # by its path it is what it says that it is
    assert torch.equal(run.weight(), weights[2])


def test_where_a_save_goes_is_not_looked_at_on_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that hangs must not hang training: `save` returns, and the next update waits for so long only."""
    hangs, lstat = threading.Event(), os.lstat

    def slow(path: str) -> os.stat_result:
        if str(path).endswith("step-2"):
            hangs.wait(20)
        return lstat(path)

    run = Run()
    with run.manager(tmp_path) as manager:
        manager.save(1).result()
        monkeypatch.setattr(os, "lstat", slow)
        began = time.monotonic()
        handle = manager.save(2)
        assert time.monotonic() - began < 5
        hangs.set()
        assert handle.result().step == 2


def test_a_run_that_went_back_writes_over_what_it_left_behind(tmp_path: Path) -> None:
    saved_run(tmp_path, 4)
    run = Run(1)
    with run.manager(tmp_path) as manager:
        assert manager.restore(2) == 2
        with pytest.raises(CheckpointExists):
            manager.save(2)
        with torch.no_grad():
            run.model.weight.fill_(3)
        assert manager.save(3).result().read("model.weight").unique().tolist() == [3]
        with pytest.raises(CheckpointExists):
            manager.save(3)


@pytest.mark.parametrize(
    ("there", "back_to", "saves", "keep", "expected", "newest"),
    [
        ([100, 300, 400, 500], 100, [150], Keep(last=3), [100, 150, 500], 150),
        ([200, 300, 400], 200, [250], Keep(last=3), [200, 250, 400], 250),
        ([200, 300, 400], 200, [250, 300], Keep(last=3), [200, 250, 300], 300),
        ([200, 300, 400], 200, [250], Keep(last=1), [250], 250),
        ([200, 300, 400], 200, [250], None, [200, 250, 300, 400], 250),
        ([100, 200], 200, [300], Keep(last=2), [200, 300], 300),
    ],
    ids=str,
)
def test_what_a_run_left_behind_is_older_than_its_own(
    there: list[int],
    back_to: int,
    saves: list[int],
    keep: Keep | None,
    expected: list[int],
    newest: int,
    tmp_path: Path,
) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        for step in there:
            manager.save(step).result()
    with run.manager(tmp_path, keep=keep) as manager:
        assert manager.restore(back_to) == back_to
        for step in saves:
            checkpoint = manager.save(step).result()
            assert os.path.isdir(checkpoint.path)
        assert manager.steps() == expected
        assert manager.latest() == newest
    assert holdfast.open(tmp_path).step == newest
    with Run(1).manager(tmp_path, load_only=True) as manager:
        assert (manager.latest(), manager.restore()) == (newest, newest)


def test_a_run_may_go_back_more_than_once_while_it_saves(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, keep=Keep(last=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step).result()
        manager.restore(2)
        with held_copies(opens_for_updates=False) as gate:
            late = manager.save(4)
            opened = threading.Timer(0.5, gate.open)  # by when the load waits for the copies
            opened.start()
            manager.restore(3)
        opened.join()
        late.result()
        manager.save(4).result()
        assert (manager.steps(), manager.latest()) == ([3, 4], 4)


def test_the_step_that_the_configuration_loads_stays(tmp_path: Path) -> None:
    saved_run(tmp_path, 2)
    for first in (3, 6):
        with Run(1).manager(tmp_path, load_step=2, keep=Keep(last=2)) as manager:
            assert manager.restore() == 2
            for step in range(first, first + 3):
                manager.save(step).result()
    assert visible(tmp_path) == ["step-2", "step-7", "step-8"]


def test_a_model_only_save_is_not_deleted_by_its_own_publication(tmp_path: Path) -> None:
    with Run().manager(tmp_path, keep=Keep(last=0), last_model_only=True) as manager:
        manager.save(1)
        assert os.path.isdir(manager.save(2, final=True).result().path)
        assert manager.steps() == [1, 2]


def test_a_save_gives_its_handle_however_soon_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is for the next call: else whether `save` returns or raises is a race with the thread that saves."""

    def start(manager: CheckpointManager, *args: Any, **options: Any) -> holdfast.SaveHandle:
        handle = real(manager, *args, **options)
        handle.exception()
        return handle

    real = CheckpointManager._start
    monkeypatch.setattr(CheckpointManager, "_start", start)
    with Run().manager(tmp_path) as manager:
        for step, act in enumerate((manager.save, lambda step: manager.step(step)[0]), start=1):
            (tmp_path / f"step-{step}").mkdir()
            (tmp_path / f"step-{step}" / "notes.txt").write_text("mine")
            error = act(step).exception()
            assert isinstance(error, CheckpointExists)
            with pytest.raises(CheckpointExists):
                manager.wait() if step == 1 else manager.save(step + 10)


def test_only_what_a_run_left_behind_is_written_over(tmp_path: Path) -> None:
    saved_run(tmp_path, 5)
    run = Run(1)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "notes.txt").write_text("mine")
    with run.manager(tmp_path) as manager:
        assert manager.restore(2) == 2
        manager.pin(3)
        shutil.rmtree(tmp_path / "step-4")
        (tmp_path / "step-4").mkdir()
        (tmp_path / "step-4" / "notes.txt").write_text("mine")
        shutil.rmtree(tmp_path / "step-5")
        shutil.copytree(tmp_path / "step-1", tmp_path / "step-5")
        for step, why in (
            (3, "it is pinned"),
            (4, "exists already"),
            (5, "not a checkpoint that"),
            (7, "exists"),
        ):
            error = manager.save(step).exception()
            assert isinstance(error, CheckpointExists)
            assert re.search(rf"step {step}: .*step-{step}.*{why}", str(error))
            with pytest.raises(CheckpointExists):
                manager.wait()
        manager.unpin(3)
        assert manager.save(3).result().step == 3
    assert (tmp_path / "step-4" / "notes.txt").read_text() == "mine"


def test_a_save_that_failed_may_be_tried_again_where_the_run_left_something(tmp_path: Path) -> None:
    saved_run(tmp_path, 3)
    run = Run(1)
    with run.manager(tmp_path) as manager:
        manager.restore(1)
        with held_copies(opens_for_updates=False), torch.no_grad():
            handle = manager.save(2)
            run.model.weight.add_(1)
        assert isinstance(handle.exception(), StateChangedWhileStaging)
        with pytest.raises(StateChangedWhileStaging):
            manager.wait()
        assert torch.equal(manager.save(2).result().read("model.weight"), run.weight())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("damage", ["manifest", "vanishing", "stock"])
def test_a_root_opens_at_its_newest_readable_step(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved_run(tmp_path, 3)
    if damage == "manifest":
        (tmp_path / "step-1" / "holdfast.json").write_bytes(b"{")
    elif damage == "vanishing":
        found = opening.newest_step

        def newest_step(root: str) -> Found | None:
            newest = found(root)
            if newest is not None and newest.step == 3:
                (tmp_path / "step-3").rename(tmp_path / ".step-3.0123456789ab.trash")
            return newest

        monkeypatch.setattr(opening, "newest_step", newest_step)
    else:
        dcp.save({"model": Run().model.state_dict()}, checkpoint_id=tmp_path / "step-4", no_dist=True)
    expected = {"manifest": 3, "vanishing": 2, "stock": None}[damage]
    assert holdfast.open(tmp_path).step == expected
    model = Run(1).model
    checkpoint = holdfast.load({"model": model}, tmp_path)
    assert checkpoint.path == str(tmp_path / f"step-{expected or 4}")
    if damage == "manifest":
        assert "step-1 is passed over" in caplog.text


def test_a_state_that_does_not_fit_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    saved_run(tmp_path, 1)
    other = Run(1)
    other.state["model"] = nn.Linear(5, 3)
    before = other.state["model"].weight.detach().clone()
    manager = CheckpointManager(tmp_path, {"model": other.state["model"]})
    with pytest.raises(StateMismatch, match=r"model.weight") as caught:
        manager.restore()
    assert caught.value.mismatched == ("model.weight",)
    assert torch.equal(other.state["model"].weight, before)
    manager.close()


def test_a_load_only_manager_changes_nothing_on_disk(tmp_path: Path) -> None:
    weights = saved_run(tmp_path, 3)
    (tmp_path / ".step-9.0123456789ab.incomplete").mkdir()  # what a crash leaves, and only a writer may sweep
    before = tree(tmp_path)
    run = Run(1)
    with run.manager(tmp_path, load_only=True) as manager:
        assert manager.restore() == 3
        assert torch.equal(run.weight(), weights[3])
        assert manager.steps() == [1, 2, 3]
        assert manager.step(500) == []
        for call in (lambda: manager.save(9), lambda: manager.pin(3), lambda: manager.unpin(3)):
            with pytest.raises(ConfigError, match="load_only"):
                call()
        manager.before_update()
        manager.wait_staged()
        manager.wait()
        with run.manager(tmp_path, load_only=True) as second:
            assert second.latest() == 3
    assert tree(tmp_path) == before


def test_a_load_only_manager_makes_no_root(tmp_path: Path) -> None:
    with Run().manager(tmp_path / "absent", load_only=True) as manager:
        assert manager.restore() is None
        assert manager.steps() == []
    assert not (tmp_path / "absent").exists()


def test_a_load_only_manager_reads_beside_a_writer(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as writer:
        writer.save(1).result()
        with Run(1).manager(tmp_path, load_only=True) as reader:
            assert reader.restore() == 1


# what is kept ----------------------------------------------------------------------------------------------------


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


# failures --------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr("holdfast.starting.SWEEP_S", -1.0)
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


# several saves at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4])
def test_as_many_captures_as_allowed(in_flight: int, tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, in_flight=in_flight, when_busy="skip") as manager:
        manager.save(1).result()
        with held_copies(opens_for_updates=False) as gate:
            handles = [manager.save(step) for step in range(2, 7)]
            skipped = [handle for handle in handles if handle.step is not None and handle.step > in_flight + 1]
            gate.open()
            for handle in handles:
                handle.exception()
        assert [handle.stage for handle in handles].count("published") == in_flight
        for handle in skipped:
            assert handle.stage == "skipped"
            with pytest.raises(SaveFailed, match=f"step {handle.step} was skipped.*when_busy"):
                handle.result()
        manager.wait()  # being skipped is no failure
        assert manager.steps() == list(range(1, in_flight + 2))
        assert manager.save(9).result().step == 9


def test_a_busy_manager_waits_and_says_how_long(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, in_flight=1) as manager:
        expected = {}
        handles = []
        for step in range(1, 6):
            run.train()
            expected[step] = run.weight()
            handles.append(manager.save(step))
        for handle in handles:
            assert torch.equal(handle.result().read("model.weight"), expected[handle.step or 0])


def test_a_manager_that_stays_busy_fails_that_save_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run().manager(tmp_path, in_flight=1, stage_timeout=20.0) as manager:
        saver = manager._saver
        assert saver is not None
        with held_copies(opens_for_updates=False) as gate:
            first = manager.save(1)
            with monkeypatch.context() as patch:
                patch.setattr(saver, "_pass_or_give_up", lambda _: None)
                patch.setattr(saver, "_longest_s", lambda: 0.1)
                with pytest.raises(DeadlineExceeded, match="all 1 captures stayed in use"):
                    manager.save(2)
            gate.open()
            assert first.result().step == 1
        assert manager.save(3).result().step == 3
        assert not saver._in_flight


def test_stats_are_filled(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        handle = manager.save(1)
        checkpoint = handle.result()
        size = sum(file.stat().st_size for file in Path(checkpoint.path).glob("*.distcp"))
        stats = handle.stats
        assert stats.bytes == size
        assert min(stats.stall_s, stats.staging_s, stats.persist_s, stats.commit_s) > 0
        assert max(stats.stall_s, stats.staging_s, stats.persist_s, stats.commit_s) < 60
        assert (handle.step, handle.path, handle.stage) == (1, checkpoint.path, "published")
        assert checkpoint.manifest is not None
        assert handle.attempt == checkpoint.manifest.attempt


def test_hooks_are_told_how_a_save_ended(tmp_path: Path) -> None:
    ends: dict[int | None, list[str]] = {}
    remove = holdfast.add_hook(lambda event: ends.setdefault(event.step, []).append(event.kind))
    try:
        with Run().manager(tmp_path, in_flight=1, when_busy="skip") as manager:
            manager.save(1).result()
            with pytest.raises(CheckpointExists):
                manager.save(1)
            with held_copies(opens_for_updates=False) as gate:
                manager.save(2)
                manager.save(3)
                gate.open()
            manager.wait()
    finally:
        remove()
    assert ends[1].count("save.started") == 2
    assert (ends[1][-1], ends[3]) == ("save.failed", ["save.started", "save.skipped"])


def test_hooks_are_told(tmp_path: Path) -> None:
    kinds: list[tuple[str, int | None]] = []
    remove = holdfast.add_hook(lambda event: kinds.append((event.kind, event.step)))
    try:
        with Run().manager(tmp_path, keep=Keep(last=1)) as manager:
            manager.save(1).result()
            manager.save(2).result()
    finally:
        remove()
    for kind in ("save.started", "save.staged", "save.published"):
        assert kinds.count((kind, 1)) == kinds.count((kind, 2)) == 1
    assert kinds.count(("checkpoint.deleted", 1)) == 1


# lifetime --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("root", ["", 3, None, "s3://bucket/x", b"bytes"])
def test_a_root_is_a_path(root: Any) -> None:
    with pytest.raises(ConfigError, match=r"root|object stores") as caught:
        CheckpointManager(root, Run().state)
    assert caught.value.field == "root"


def test_a_config_is_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config must be a CheckpointConfig, not dict"):
        CheckpointManager(tmp_path, Run().state, config={"every": 3})  # type: ignore[arg-type]


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and child processes of this process."""
    threads = os.listdir("/proc/self/task")
    children = [Path(f"/proc/self/task/{thread}/children").read_text().split() for thread in threads]
    return len(os.listdir("/proc/self/fd")), len(threads), sum(map(len, children))


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
        assert resources() == before
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
