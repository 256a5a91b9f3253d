"""What users pass is checked before anything is touched, and named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast
from holdfast.arguments import checked_metrics, checked_path, checked_step
from holdfast.errors import ConfigError


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
