"""Two runs from one checkpoint, one mirror: each is told of the other, and neither goes on from the other's steps."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from _manager_runs import Run, visible

from holdfast import CheckpointConfig, CheckpointManager, Keep, events
from holdfast.catalog.course import PARENT
from holdfast.errors import ConfigError, SaveFailed
from holdfast.format.manifest import COPY_OF, Manifest
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import LocalStorage

WAIT_S = 60.0


class Node:
    """A run on a machine of its own, with the mirror that others have too."""

    def __init__(self, at: Path, name: str) -> None:
        self.root, self.mirror = at / name, at / "mirror"
        self.weights: dict[int, torch.Tensor] = {}

    def manager(self, run: Run, *, mirrored: bool = True, **options: Any) -> CheckpointManager:
        config = CheckpointConfig(**{"every": 1, "keep": None, **options})
        mirror = self.mirror.as_uri() if mirrored else None
        return CheckpointManager(self.root, run.state, config=config, mirror=mirror)

    def go_on(self, *steps: int, at: int | None = None, mirrored: bool = True, **options: Any) -> int | None:
        """Restore, ``at`` a step if given, then train and save ``steps``; return the step that was gone on from."""
        run = Run()
        with self.manager(run, mirrored=mirrored, **options) as manager:
            found = manager.restore(at)
            for step in steps:
                for _ in self.root.name:  # so that no two runs train alike
                    run.train()
                self.weights[step] = run.weight()
                (handle,) = manager.step(step)
                handle.wait_mirrored(WAIT_S) if mirrored else handle.result()
        return found

    def manifest(self, step: int) -> Manifest:
        return manifest_of(self.root, step)


def manifest_of(root: Path, step: int) -> Manifest:
    manifest = read_manifest(LocalStorage(root), f"step-{step}")
    assert manifest is not None
    return manifest


@pytest.fixture
def one(tmp_path: Path) -> Node:
    return Node(tmp_path, "one")


@pytest.fixture
def two(tmp_path: Path) -> Node:
    return Node(tmp_path, "another")


def told(heard: list[events.Event], kind: str) -> set[int | None]:
    return {event.step for event in heard if event.kind == kind}


def fork(one: Node, two: Node, *, ahead: bool = True) -> None:
    """Both go on from step 200 and save 300; ``two`` has the mirror, and if ``ahead`` saves 400 too."""
    one.go_on(100, 200)
    one.go_on(300, mirrored=False)
    two.go_on(300, *([400] if ahead else []))


def test_manifests_name_their_parent(one: Node) -> None:
    one.go_on(100, 200)
    one.go_on(300)
    assert PARENT not in one.manifest(100).extra
    assert one.manifest(200).extra[PARENT] == one.manifest(100).attempt
    assert one.manifest(300).extra[PARENT] == one.manifest(200).attempt
    assert manifest_of(one.mirror, 300).extra[PARENT] == one.manifest(200).attempt
    one.go_on(250, at=200)
    assert one.manifest(250).extra[PARENT] == one.manifest(200).attempt
    shutil.rmtree(one.root)
    one.go_on(500)
    assert one.manifest(500).extra[PARENT] == manifest_of(one.mirror, 250).extra[COPY_OF], "not the copy's own attempt"


def test_a_failed_save_is_nobodys_parent(one: Node) -> None:
    run = Run()
    with one.manager(run, mirrored=False, on_error="warn", keep=None) as manager:
        manager.save(1).result()
        (one.root / "step-2").mkdir()
        (one.root / "step-2/something").write_text("of others")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert manager.save(2).exception() is not None
            manager.save(3).result()
            manager.wait()
    assert one.manifest(3).extra[PARENT] == one.manifest(1).attempt


def test_what_another_run_made_of_the_same_start_is_not_gone_on_from(
    one: Node, two: Node, heard: list[events.Event]
) -> None:
    fork(one, two)
    before = tuple(path.read_bytes() for path in sorted(one.mirror.glob("step-*/holdfast.json")))
    parent, attempt = two.manifest(300).attempt, two.manifest(400).attempt
    with pytest.raises(ConfigError, match=f"step 400 .*{attempt}.* follows .*{parent}") as caught:
        one.go_on()
    assert caught.value.field == "mirror"
    for words in ("restore(step=400)", "restore(step=300)", "on_corrupt='local'"):
        assert words in str(caught.value)
    assert tuple(path.read_bytes() for path in sorted(one.mirror.glob("step-*/holdfast.json"))) == before
    assert visible(one.root) == ["step-100", "step-200", "step-300"], "and no reason to delete the local one"
    assert told(heard, "mirror.diverged") >= {300, 400}


def test_the_run_of_the_local_root_by_choice(one: Node, two: Node) -> None:
    fork(one, two)
    run = Run(9)
    with (
        one.manager(run, on_corrupt="local") as manager,
        pytest.warns(UserWarning, match="step 300, 400 .*by another run"),
    ):
        assert manager.restore() == 300
    assert torch.equal(run.weight(), one.weights[300])
    run = Run(9)
    with one.manager(run) as manager, pytest.warns(UserWarning, match="step 300, 400 .*by another run"):
        assert manager.restore(300) == 300
    assert torch.equal(run.weight(), one.weights[300])


def test_the_run_of_the_mirror_by_choice(one: Node, two: Node, heard: list[events.Event]) -> None:
    fork(one, two)
    with pytest.warns(UserWarning, match="step 300, 400 .*by another run"):
        assert one.go_on(500, at=400) == 400
    assert one.manifest(500).extra[PARENT] == two.manifest(400).attempt
    heard.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.go_on(600) == 500, "it is one run again"
    assert not told(heard, "mirror.diverged")
    assert two.go_on() == 600, "and the other one's machine goes on from there too"


def test_a_run_that_has_diverged_uploads_nothing(one: Node, two: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Or the mirror would hold a mix, in which retention lets them displace one another."""
    fork(one, two)
    run = Run(9)
    with one.manager(run, on_corrupt="local", mirror_keep=Keep(last=2)) as manager, caplog.at_level(logging.ERROR):
        with pytest.warns(UserWarning, match="by another run"):
            manager.restore()
        for step in (350, 400, 450):
            (handle,) = manager.step(step)
            with pytest.raises(SaveFailed, match="of another run"):
                handle.wait_mirrored(WAIT_S)
    assert visible(one.mirror) == ["step-100", "step-200", "step-300", "step-400"]
    assert manifest_of(one.mirror, 400).extra[COPY_OF] == two.manifest(400).attempt
    assert "step 350" in caplog.text
    assert "each run needs a mirror of its own" in caplog.text
    assert visible(one.root) == ["step-100", "step-200", "step-300", "step-350", "step-400", "step-450"]


def test_a_step_of_another_run_is_not_replaced_by_one_that_went_back(one: Node, two: Node) -> None:
    """Going back allows a run to replace what it left behind itself, and nothing else of the same number."""
    fork(one, two, ahead=False)
    before = (one.mirror / "step-300/holdfast.json").read_bytes()
    run = Run(9)
    with one.manager(run) as manager:
        with pytest.warns(UserWarning, match="by another run"):
            assert manager.restore(200) == 200
        run.train()
        (handle,) = manager.step(300)
        with pytest.raises(SaveFailed, match="of another run"):
            handle.wait_mirrored(WAIT_S)
    assert (one.mirror / "step-300/holdfast.json").read_bytes() == before


def test_steps_left_behind_while_the_mirror_was_not_there_are_not_gone_on_from(one: Node) -> None:
    """The run goes back on a machine that doesn't know what the mirror has."""
    one.go_on(100, 200, 300, 400)
    for step in (300, 400):
        shutil.rmtree(one.root / f"step-{step}")
    one.go_on(250, at=200, mirrored=False)
    with pytest.raises(ConfigError, match="step 400"):
        one.go_on()


def test_a_machine_that_comes_back_follows_the_run_that_went_back_meanwhile(one: Node, two: Node) -> None:
    one.go_on(100, 200, 300)
    two.go_on(300, 350, at=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.go_on() == 350
        run = Run(9)
        with one.manager(run) as manager:
            assert manager.restore(300) == 300, "of the run that goes on"
    assert torch.equal(run.weight(), two.weights[300])


def test_a_machine_that_comes_back_goes_on_where_the_run_is_by_now(one: Node, two: Node) -> None:
    """However much of what lies between has been deleted."""
    one.go_on(100)
    two.go_on(*range(200, 600, 100), mirror_keep=Keep(last=1), keep=Keep(last=1))
    two.go_on(600, 700, mirror_keep=Keep(last=1), keep=Keep(last=1))
    assert visible(one.mirror) == ["step-700"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.go_on() == 700


def test_a_mix_in_the_mirror_alone_is_an_error_until_one_is_chosen(one: Node, two: Node) -> None:
    """As two runs that uploaded at the same time, each before it saw the other, have left it."""
    one.go_on(100)
    two.go_on(300, 400)
    shutil.rmtree(one.root)
    lone = Node(one.root.parent, "lone")
    lone.mirror = one.mirror.parent / "lone-mirror"
    shutil.copytree(one.mirror / "step-100", lone.mirror / "step-100")
    lone.go_on(350)
    shutil.copytree(lone.mirror / "step-350", one.mirror / "step-350")
    with pytest.raises(ConfigError, match=r"step 350.*step 400|step 400.*step 350"):
        one.go_on()
    with pytest.warns(UserWarning, match="by another run"):
        assert one.go_on(500, at=400) == 400
    shutil.rmtree(one.root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.go_on() == 500, "what was not chosen is left behind"


def test_checkpoints_without_a_parent_are_told_apart_by_their_attempts_as_before(
    one: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.catalog.course.Course.encode", lambda _: {})
    one.go_on(100, 200)
    monkeypatch.undo()
    shutil.rmtree(one.root / "step-200")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one.go_on(300) == 200
        assert one.go_on(400) == 300
        assert one.go_on(250, at=200) == 200
        assert one.go_on() == 250
