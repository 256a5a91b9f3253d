"""`CheckpointManager` on one process: when it saves, last saves, several at once, what hooks are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _manager_runs import Run

import holdfast
from holdfast import Keep
from holdfast.errors import (
    CheckpointExists,
    ConfigError,
    DeadlineExceeded,
    SaveFailed,
)
from holdfast.testing.staging import held_copies

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
                patch.setattr(saver, "_confirm_or_give_up", lambda _: None)
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
