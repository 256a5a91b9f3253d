"""A manager with a mirror, in another directory: what is copied there, kept, and gone on from."""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _manager_runs import Run, saved_run, visible

import holdfast
from holdfast import CheckpointConfig, CheckpointManager, Keep, events
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    SaveFailed,
    StorageError,
)
from holdfast.format.manifest import COPY_OF
from holdfast.saver import mirror as mirroring
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import LocalStorage

WAIT_S = 60.0


class Roots:
    """A root and its mirror."""

    def __init__(self, at: Path) -> None:
        self.root, self.mirror = at / "root", at / "mirror"

    def manager(self, run: Run, **options: Any) -> CheckpointManager:
        config = CheckpointConfig(**{"every": 1, "keep": None, **options})
        return CheckpointManager(self.root, run.state, config=config, mirror=self.mirror)

    def train(self, steps: range, **options: Any) -> dict[int, torch.Tensor]:
        """Train, save and upload ``steps``; return the weights at each."""
        run, weights = Run(), {}
        with self.manager(run, **options) as manager:
            for step in steps:
                run.train()
                weights[step] = run.weight()
                (handle,) = manager.step(step, metrics={"loss": float(step)})
                handle.wait_mirrored(WAIT_S)
        return weights

    def resumed(self, **options: Any) -> tuple[int | None, torch.Tensor]:
        """Return the step that a new run goes on from, and its weights."""
        run = Run(7)
        with self.manager(run, **options) as manager:
            return manager.restore(), run.weight()


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(tmp_path)


def told(heard: list[events.Event], kind: str) -> list[int | None]:
    return [event.step for event in heard if event.kind == kind]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def damage(directory: Path) -> None:
    """Change a byte in the middle of the largest data file."""
    file = max(directory.glob("*.distcp"), key=lambda found: found.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def test_what_is_saved_is_copied_and_the_copy_is_a_checkpoint_by_itself(
    roots: Roots, heard: list[events.Event]
) -> None:
    weights = roots.train(range(1, 3))
    assert visible(roots.mirror) == ["step-1", "step-2"]
    assert told(heard, "checkpoint.mirrored") == [1, 2]
    for step in (1, 2):
        here = read_manifest(LocalStorage(roots.root), f"step-{step}")
        there = read_manifest(LocalStorage(roots.mirror), f"step-{step}")
        assert here is not None
        assert there is not None
        assert there.extra[COPY_OF] == here.attempt != there.attempt
        assert (there.step, there.metrics, there.created) == (here.step, here.metrics, here.created)
        assert holdfast.open(roots.mirror / f"step-{step}").verify().ok
        run = Run(3)
        holdfast.load({"model": run.model}, roots.mirror / f"step-{step}")
        assert torch.equal(run.weight(), weights[step])
    left = [name for name in os.listdir(roots.mirror) if name.startswith(".") and name != ".holdfast"]
    assert left == []


def test_close_waits_for_uploads(roots: Roots) -> None:
    run = Run()
    with roots.manager(run) as manager:
        run.train()
        manager.step(1)
    assert visible(roots.mirror) == ["step-1"]


def test_wait_mirrored_without_a_mirror_is_refused(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        (handle,) = manager.step(1)
        with pytest.raises(ConfigError, match="no mirror"):
            handle.wait_mirrored()


def test_a_root_is_not_its_own_mirror(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the root itself"):
        CheckpointManager(tmp_path, Run().state, mirror=tmp_path)


def test_retention_is_of_each_place_by_itself(roots: Roots) -> None:
    roots.train(range(1, 9), keep=Keep(last=1), mirror_keep=Keep(last=2, every=4))
    assert visible(roots.root) == ["step-8"]
    assert visible(roots.mirror) == ["step-4", "step-7", "step-8"]


def test_a_pin_holds_in_the_mirror_too(roots: Roots) -> None:
    run = Run()
    with roots.manager(run, keep=Keep(last=1), mirror_keep=Keep(last=1)) as manager:
        for step in range(1, 5):
            run.train()
            (handle,) = manager.step(step)
            handle.wait_mirrored(WAIT_S)
            if step == 2:
                manager.pin(2)
        assert visible(roots.mirror) == ["step-2", "step-4"]
        manager.unpin(2)
        (handle,) = manager.step(5)
        handle.wait_mirrored(WAIT_S)
    assert visible(roots.mirror) == ["step-5"]


def test_what_was_lost_locally_comes_from_the_mirror(roots: Roots) -> None:
    weights = roots.train(range(1, 4))
    shutil.rmtree(roots.root)
    step, weight = roots.resumed()
    assert step == 3
    assert torch.equal(weight, weights[3])


def test_the_newest_over_both_places_comes_first(roots: Roots) -> None:
    weights = roots.train(range(1, 4))
    shutil.rmtree(roots.root / "step-3")
    step, weight = roots.resumed()
    assert step == 3
    assert torch.equal(weight, weights[3])
    run = Run(7)
    with roots.manager(run) as manager:
        assert manager.restore(2) == 2
        with pytest.raises(CheckpointNotFound, match="published: 1, 2, 3"):
            manager.restore(9)


@pytest.mark.parametrize("on_corrupt", ["fallback", "raise"])
@pytest.mark.parametrize("what", ["data", "manifest"])
def test_what_is_damaged_locally_comes_from_the_copy_of_that_attempt(
    roots: Roots, heard: list[events.Event], what: str, on_corrupt: str
) -> None:
    weights = roots.train(range(1, 4))
    if what == "data":
        damage(roots.root / "step-3")
    else:
        (roots.root / "step-3/holdfast.json").write_text("{}")
    with pytest.warns(UserWarning, match="taking its copy at"):
        step, weight = roots.resumed(on_corrupt=on_corrupt)
    assert step == 3
    assert torch.equal(weight, weights[3])
    assert told(heard, "load.from_mirror") == [3]


def test_damaged_in_both_places_falls_back_to_the_older_step(roots: Roots) -> None:
    weights = roots.train(range(1, 3))
    damage(roots.root / "step-2")
    damage(roots.mirror / "step-2")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step, weight = roots.resumed()
    said = " ".join(str(warning.message) for warning in warned)
    assert "step 2 can't be loaded, taking its copy at" in said
    assert "step 2 can't be loaded, falling back to step 1" in said
    assert step == 1
    assert torch.equal(weight, weights[1])
    with pytest.warns(UserWarning, match="taking its copy"), pytest.raises(CheckpointCorrupt):
        roots.resumed(on_corrupt="raise")


def test_a_diverged_step_is_no_substitute_and_is_not_replaced(roots: Roots, heard: list[events.Event]) -> None:
    """Two runs saved step 2: the copy of the other one doesn't stand for a damaged one of this run."""
    roots.train(range(1, 3))
    other = Roots(roots.root.parent / "other")
    shutil.copytree(roots.root, other.root)
    shutil.rmtree(other.root / "step-2")
    run = Run()
    with run.manager(other.root) as manager:
        assert manager.restore() == 1
        for _ in range(5):
            run.train()
        manager.save(2).result()
        weight = run.weight()
    before = (roots.mirror / "step-2/holdfast.json").read_bytes()
    shutil.rmtree(roots.root)
    other.root.rename(roots.root)
    with pytest.warns(UserWarning, match="was saved by another run"):
        step, found = roots.resumed()
    assert step == 2
    assert torch.equal(found, weight)
    assert (roots.mirror / "step-2/holdfast.json").read_bytes() == before
    assert 2 in told(heard, "mirror.diverged")
    damage(roots.root / "step-2")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step, _ = roots.resumed()
    assert step == 1
    assert any("falling back to step 1" in str(warning.message) for warning in warned)


def test_wait_mirrored_says_that_a_step_has_diverged(roots: Roots) -> None:
    roots.train(range(1, 3))
    shutil.rmtree(roots.root)
    run = Run()
    with roots.manager(run) as manager:
        (handle,) = manager.step(1)
        with pytest.raises(SaveFailed, match="of another run"):
            handle.wait_mirrored(WAIT_S)
        assert visible(roots.root) == ["step-1"]


def test_after_going_back_the_steps_left_behind_are_replaced_there_too(roots: Roots) -> None:
    roots.train(range(1, 4))
    run = Run(3)
    with roots.manager(run) as manager:
        manager.restore(1)
        for _ in range(3):
            run.train()
        (handle,) = manager.step(2)
        handle.wait_mirrored(WAIT_S)
        weight = run.weight()
    copy = Run(4)
    holdfast.load({"model": copy.model}, roots.mirror / "step-2")
    assert torch.equal(copy.weight(), weight)
    shutil.rmtree(roots.root)
    step, found = roots.resumed()
    assert step == 2, "step 3 was left behind"
    assert torch.equal(found, weight)


def test_after_going_back_with_only_the_mirror_left(roots: Roots) -> None:
    roots.train(range(1, 4))
    shutil.rmtree(roots.root)
    run = Run(3)
    with roots.manager(run) as manager:
        assert manager.restore(1) == 1
        for _ in range(3):
            run.train()
        (handle,) = manager.step(2)
        handle.wait_mirrored(WAIT_S)
        weight = run.weight()
    step, found = roots.resumed()
    assert step == 2
    assert torch.equal(found, weight)


def test_a_last_save_replaces_the_one_before_there_too(roots: Roots) -> None:
    run = Run()
    with roots.manager(run, last_dtype="bfloat16", last_model_only=True) as manager:
        for step in (1, 2):
            run.train()
            manager.step(step)[0].wait_mirrored(WAIT_S)
        manager.save(2, final=True).wait_mirrored(WAIT_S)
    there = read_manifest(LocalStorage(roots.mirror), "step-2")
    assert there is not None
    assert not there.resumable


def test_what_was_saved_without_the_mirror_is_uploaded_by_the_next_start(roots: Roots) -> None:
    saved_run(roots.root, 3)
    with roots.manager(Run()):
        pass
    assert visible(roots.mirror) == ["step-1", "step-2", "step-3"]
    shutil.rmtree(roots.mirror)
    with roots.manager(Run(), mirror_keep=Keep(last=1)):
        pass
    assert visible(roots.mirror) == ["step-3"], "what wouldn't be kept isn't uploaded"


class Failing:
    """A mirror's directory that can be made to fail."""

    def __init__(self, roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down = True
        monkeypatch.setattr(mirroring, "FIRST_PAUSE_S", 0.05)
        monkeypatch.setattr(mirroring, "LAST_PAUSE_S", 0.05)
        for name in ("begin", "list_dir", "make_root"):
            self._fail(name, getattr(LocalStorage, name), str(roots.mirror), monkeypatch)

    def _fail(self, name: str, real: Any, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def call(storage: LocalStorage, *args: Any, **options: Any) -> Any:
            if self.down and storage.root == root:
                raise StorageError(f"{root} is down", path=root, errno=errno.EHOSTUNREACH)
            return real(storage, *args, **options)

        monkeypatch.setattr(LocalStorage, name, call)


def test_training_goes_on_while_the_mirror_is_down_and_uploads_catch_up(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(roots, monkeypatch)
    failing.down = False
    run = Run()
    with roots.manager(run, keep=Keep(last=1)) as manager:
        failing.down = True
        for step in (1, 2, 3):
            run.train()
            (handle,) = manager.step(step)
            handle.result()
        with pytest.raises(SaveFailed, match="is down") as caught:
            handle.wait_mirrored(WAIT_S)
        assert isinstance(caught.value.cause, StorageError)
        assert visible(roots.root) == ["step-1", "step-2", "step-3"], "they wait for their upload"
        failing.down = False
        until(lambda: visible(roots.root) == ["step-3"])
        handle.wait_mirrored(WAIT_S)
    assert visible(roots.mirror) == ["step-1", "step-2", "step-3"]


def test_a_mirror_that_is_down_at_the_start_is_recovered_later(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(roots, monkeypatch)
    run = Run()
    with roots.manager(run) as manager:
        (handle,) = manager.step(1)
        with pytest.raises(SaveFailed, match="is down"):
            handle.wait_mirrored(WAIT_S)
        failing.down = False
        until(lambda: (roots.mirror / "step-1/holdfast.json").exists())


def test_the_oldest_go_while_the_mirror_is_down_for_long(
    roots: Roots, monkeypatch: pytest.MonkeyPatch, heard: list[events.Event]
) -> None:
    failing = Failing(roots, monkeypatch)
    run = Run()
    with roots.manager(run, keep=Keep(last=1), mirror_backlog=2) as manager:
        for step in range(1, 7):
            run.train()
            manager.step(step)[0].result()
        assert visible(roots.root) == ["step-4", "step-5", "step-6"]
        assert told(heard, "mirror.dropped") == [1, 2, 3]
        failing.down = False
    assert visible(roots.mirror) == ["step-4", "step-5", "step-6"]


def test_a_mirror_that_cannot_be_asked_is_an_error_or_a_loud_choice(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(roots.root, 2)
    Failing(roots, monkeypatch)
    with roots.manager(Run()) as manager, pytest.raises(StorageError, match="can't be asked"):
        manager.restore()
    with (
        roots.manager(Run(), on_corrupt="local") as manager,
        pytest.warns(UserWarning, match="can't be asked"),
    ):
        assert manager.restore() == 2


def test_what_can_never_be_uploaded_keeps_nothing_else_waiting(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "FIRST_PAUSE_S", 0.05)
    saved_run(roots.root, 3)
    (roots.mirror / "step-3").mkdir(parents=True)
    (roots.mirror / "step-3/notes.txt").write_text("somebody's own")
    with roots.manager(Run()):
        until(lambda: visible(roots.mirror) == ["step-1", "step-2", "step-3"])
    assert os.listdir(roots.mirror / "step-3") == ["notes.txt"]


def test_uploads_that_are_late_are_left_to_the_next_start(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "ENGINE_GRACE_S", 0.1)
    run = Run()
    manager = roots.manager(run, io_limit_bytes_per_s=1 << 20)
    run.state["train"]["ballast"] = torch.zeros(2 << 20)
    manager.save(1).result()
    with pytest.raises(DeadlineExceeded, match="the next start"):
        manager.close(timeout=0.5)
    assert not (roots.mirror / "step-1/holdfast.json").exists()
    with roots.manager(Run()):
        pass
    assert visible(roots.mirror) == ["step-1"]


def test_a_damaged_checkpoint_is_not_uploaded(roots: Roots) -> None:
    saved_run(roots.root, 2)
    damage(roots.root / "step-1")
    with roots.manager(Run()):
        pass
    assert visible(roots.mirror) == ["step-2"]


def test_a_manager_that_only_loads_reads_the_mirror_and_writes_nothing_there(roots: Roots) -> None:
    weights = roots.train(range(1, 3))
    shutil.rmtree(roots.root)
    roots.root.mkdir()
    before = sorted(roots.mirror.rglob("*"))
    step, weight = roots.resumed(load_only=True)
    assert step == 2
    assert torch.equal(weight, weights[2])
    assert sorted(roots.mirror.rglob("*")) == before
