"""`CheckpointManager.restore`: which checkpoint a run goes on from, what it passes over, and what it left behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _manager_runs import Run, saved_run, tree, visible
from torch import nn
from torch.distributed import checkpoint as dcp

import holdfast
from holdfast import CheckpointConfig, CheckpointManager, Keep
from holdfast.catalog import catalog as keeping
from holdfast.catalog.catalog import Found
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    StateChangedWhileStaging,
    StateMismatch,
    StorageError,
)
from holdfast.loader import loader
from holdfast.loader.sources import open as opening
from holdfast.loader.sources import places
from holdfast.testing.staging import held_copies


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

    def refusing(path: str, **options: Any) -> Any:
        if path.endswith("step-2"):
            raise StorageError(f"{path} could not be read", path=path, errno=code)
        return opened(path, **options)

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
    opened = places.open_plain

    def refusing(directory: str, name: str, *args: Any, **options: Any) -> int:
        if os.path.join(directory, name) == victim:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(directory, name, *args, **options)

    monkeypatch.setattr(places, "open_plain", refusing)
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
    assert report.ok
    assert [warning.path for warning in report.warnings] == [str(tmp_path / "step-2" / name)]


def test_a_step_that_a_writer_deletes_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, 3)
    look = keeping.Catalog.found_beside_exports

    def outdated(keeper: keeping.Catalog) -> tuple[list[keeping.Found], list[int]]:
        found = look(keeper)
        if (tmp_path / "step-3").exists():
            (tmp_path / "step-3").rename(tmp_path / "aside")
        return found

    monkeypatch.setattr(keeping.Catalog, "found_beside_exports", outdated)
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
        with pytest.warns(UserWarning, match="falling back to step [12]: .* holds step [23], expected"):
            assert manager.restore() == 1
        assert torch.equal(run.weight(), weights[1])
        with pytest.raises(CheckpointCorrupt, match="holds step 3, expected step 2"):
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
