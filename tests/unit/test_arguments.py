"""What users pass is checked before anything is touched, and named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import ConfigError
from holdfast.validation import LONGEST_S, checked_metrics, checked_path, checked_step


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", 1 << 63, 10**30])
def test_a_step_that_cannot_be_one(step):
    with pytest.raises(ConfigError, match="step must be") as caught:
        checked_step(step)
    assert caught.value.field == "step"


@pytest.mark.parametrize("step", [0, (1 << 63) - 1])
def test_the_first_and_the_last_step_are_saved(tmp_path, step):
    checked_step(step)
    assert holdfast.save({"n": 1}, tmp_path / "one", step=step).step == step
    assert holdfast.open(tmp_path / "one").step == step


@pytest.mark.parametrize("made", [os.fsdecode, lambda name: Path(os.fsdecode(name))], ids=["str", "Path"])
def test_a_path_that_is_not_utf8_is_named(made):
    path = made(b"caf\xe9")
    for act in (lambda: checked_path(path, field="root"), lambda: holdfast.save({"n": 1}, path)):
        with pytest.raises(ConfigError, match="not UTF-8") as caught:
            act()
        str(caught.value).encode()  # can be logged


@pytest.mark.parametrize("value", ["high", None, 10**400], ids=["word", "none", "huge"])
def test_a_metric_that_is_no_number_is_named(value):
    with pytest.raises(ConfigError) as caught:
        checked_metrics({"loss": value})
    assert caught.value.field == "metrics.loss"


def test_a_relative_path_in_a_directory_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="'root' is relative, and the working directory was removed"):
        checked_path("root", field="root")
    assert checked_path(tmp_path, field="root") == str(tmp_path)


def test_a_path_with_a_nul_is_named(tmp_path):
    """The system takes none, and says so by a `ValueError` wherever it is asked first."""
    path = f"{tmp_path}/a\0b"
    for act in (
        lambda: holdfast.save({"n": 1}, path),
        lambda: holdfast.load({"n": 1}, path),
        lambda: holdfast.open(path),
        lambda: holdfast.CheckpointManager(path, {"n": 1}),
        lambda: holdfast.CheckpointConfig(initial_load_path=path),
    ):
        with pytest.raises(ConfigError):
            act()


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run",
        "gs://bucket/run",
        "az://bucket/run",
        "file:///run",
        "memory://run",
        "msc://a/run",
        "fsspec+s3://b/run",
    ],
)
def test_a_url_that_has_lost_a_slash_is_no_directory(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has lost a slash, as in a pathlib"):
        holdfast.save({"n": 1}, Path(url))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["my runs", "100%", "a%20b", "#1", "épreuve"])
def test_a_file_url_names_the_path_that_pathlib_made_it_of(name, tmp_path):
    place = tmp_path / name
    holdfast.save({"n": 1}, f"{place.as_uri()}/a", step=1)
    assert (place / "a" / "holdfast.json").exists()
    with holdfast.CheckpointManager(place.as_uri(), {"n": 1}) as manager:
        manager.save(2).result()
    assert sorted(os.listdir(tmp_path)) == [place.name]
    assert holdfast.open(place).step == 2


def test_a_directory_may_have_a_colon_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    holdfast.save({"n": 1}, "run:1/a")
    assert holdfast.open(tmp_path / "run:1" / "a").verify().ok


def test_an_integer_too_long_to_be_written_out_is_refused_all_the_same():
    for act in (
        lambda: checked_step(10**5000),
        lambda: checked_metrics({"loss": 10**5000}),
        lambda: holdfast.CheckpointConfig(in_flight=10**5000),
        lambda: holdfast.CheckpointConfig(stage_timeout=10**5000),
    ):
        with pytest.raises(ConfigError, match="an integer of 16610 bits"):
            act()


@pytest.mark.parametrize("metrics", [[1.0], "loss", 0.5, {("loss", 1.0)}], ids=repr)
def test_metrics_that_are_no_mapping_are_named(metrics, tmp_path):
    with pytest.raises(ConfigError, match="metrics must be a mapping") as caught:
        holdfast.save({"n": 1}, tmp_path / "one", metrics=metrics)
    assert caught.value.field == "metrics"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("timeout", [1e10, 1e300, sys.maxsize], ids=str)
def test_a_deadline_that_no_wait_of_the_system_takes_is_refused(timeout, tmp_path):
    """Else it is an `OverflowError` of whichever wait comes first, on a thread of the save's or on this one."""
    with pytest.raises(ConfigError, match=r"timeout: expected a finite number of seconds > 0, at most 1e\+08"):
        holdfast.save({"n": 1}, tmp_path / "one", timeout=timeout)


def test_the_longest_deadlines_can_be_waited_for(tmp_path):
    longest = {f"{name}_timeout": LONGEST_S for name in ("stage", "persist", "commit", "signal")}
    config = holdfast.CheckpointConfig(in_flight=4, **longest)
    with holdfast.CheckpointManager(tmp_path, {"n": 1}, config=config) as manager:
        handles = [manager.save(step) for step in range(1, 7)]
        assert [handle.result().step for handle in handles] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "timeout", [1e10, 1e300, float("inf"), 10**400, sys.maxsize], ids=lambda value: f"{value!s:.12}"
)
def test_a_wait_that_is_to_have_no_end_has_one(timeout, tmp_path):
    with holdfast.CheckpointManager(tmp_path, {"n": 1}) as manager:
        handle = manager.save(1)
        handle.wait_staged(timeout)
        manager.wait_staged(timeout)
        assert handle.exception(timeout) is None
        assert handle.result(timeout).step == 1
        manager.wait(timeout)
        manager.close(timeout)


@pytest.mark.parametrize("timeout", ["9", float("nan"), []], ids=repr)
def test_a_wait_for_what_is_no_number_is_refused(timeout, tmp_path):
    """Most of all NaN, with which a wait returned at once as if it had waited."""
    with holdfast.CheckpointManager(tmp_path, {"n": 1}) as manager:
        handle = manager.save(1)
        waits = (handle.wait_staged, handle.result, handle.exception, manager.wait_staged, manager.wait, manager.close)
        for wait in waits:
            with pytest.raises(ConfigError, match="timeout: expected a number of seconds"):
                wait(timeout)
        assert handle.result().step == 1
