"""`holdfast.integrations.ray` in a real Ray Train run: a worker is killed, and the run goes on, on other workers too.

Ray is 300 MB and takes half a minute a run, so that `make test-integrations` doesn't install it: these tests run where
somebody has (``pip install "ray[train]"``).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[train]==2.60.0' to run these tests")

import pyarrow.fs
import ray.train
import torch
import torch.distributed.checkpoint as dcp
from jobs import ROOT, losses, run_script

import holdfast
from holdfast.catalog.root import published
from holdfast.errors import CheckpointExists, ConfigError, SaveFailed
from holdfast.integrations.ray import checkpoint_manager, report, run_directory
from holdfast.storage.local import open_storage

JOB = Path(__file__).with_name("ray_job.py")
STEPS, EVERY, KILL = 9, 3, 7


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_with_a_killed_worker_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """From a checkpoint that Ray may not have heard of; then on one worker, in a run of the same name."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run_script(JOB, whole, STEPS, "--plainly", nproc=2)
    run_script(JOB, killed, STEPS, "--every", EVERY, "--kill", KILL, timeout_s=250)
    assert losses([killed / "losses.jsonl"]) == losses([whole / "losses.jsonl"])
    assert sorted(path.name for path in killed.glob("resumed-*")) == [
        f"resumed-{rank}-{step}" for rank in (0, 1) for step in (0, 6)
    ]
    result = json.loads((killed / "result.json").read_text())
    assert result["checkpoint"] == str(killed / "run" / "checkpoint_9")
    assert result["metrics"]["step"] == 9
    checkpoint = holdfast.open(result["checkpoint"])
    assert checkpoint.verify().ok
    assert checkpoint.step == 9
    names = [path.name for path in (killed / "run").iterdir()]
    assert not [name for name in names if name.endswith(".incomplete")]
    into = {"model": {"0.weight": torch.zeros(32, 8)}}
    dcp.load(into, checkpoint_id=result["checkpoint"], no_dist=True)  # type: ignore[attr-defined]
    assert torch.equal(into["model"]["0.weight"], checkpoint.read("model.0.weight"))

    run_script(JOB, killed, STEPS + 4, "--every", 2, "--workers", 1, timeout_s=250)
    assert (killed / "resumed-0-9").exists()
    result = json.loads((killed / "result.json").read_text())
    assert result["checkpoint"] == str(killed / "run" / "checkpoint_12")
    assert [name for name, _ in result["kept"]] == ["checkpoint_10", "checkpoint_12"]  # num_to_keep, by Ray
    kept = {path.name for path in (killed / "run").glob("checkpoint_*") if path.is_dir()}
    assert kept == {"checkpoint_10", "checkpoint_12"}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_in_a_bucket_with_a_killed_worker_goes_on(tmp_path: Path, place: str) -> None:
    """What is trained again has the same losses; Ray keeps and deletes there."""
    options = ("--every", EVERY, "--kill", KILL, "--storage", place)
    run_script(JOB, tmp_path, STEPS, *options, timeout_s=250)
    noted = [tuple(json.loads(line)) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert len(noted) > len(set(noted)) == STEPS
    assert (tmp_path / "resumed-0-6").exists()
    result = json.loads((tmp_path / "result.json").read_text())
    assert f"s3://{result['checkpoint']}" == f"{place}/run/checkpoint_9"
    assert [name for name, _ in result["kept"]] == ["checkpoint_6", "checkpoint_9"]
    assert published(open_storage(f"{place}/run"), "checkpoint_{step}") == [(6, "checkpoint_6"), (9, "checkpoint_9")]
    assert holdfast.open(f"{place}/run").verify().ok
    assert not list(Path.cwd().glob("*:"))


def test_the_example_runs(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "ray_train.py", tmp_path, timeout_s=250).stdout
    assert "went on after step 6" in output


def test_the_page_runs(tmp_path: Path) -> None:
    """But for the run itself."""
    text = (ROOT / "docs" / "integrations" / "ray.md").read_text().replace("/shared/runs", str(tmp_path))
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))
    run_script(script)


# In this process, with Ray's part played by a few lines.


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What Ray is told in a run whose directory is ``tmp_path``."""
    told: list[dict[str, Any]] = []
    storage = SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem(), experiment_fs_path=str(tmp_path))
    context = SimpleNamespace(get_storage=lambda: storage, storage=storage, latest=None)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: context.latest)
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda data: data)
    monkeypatch.setattr(ray.train, "report", lambda metrics, **rest: told.append({"metrics": metrics, **rest}))
    return told


def test_a_report_names_the_directory_and_waits_for_it_in_the_background(
    reports: list[dict[str, Any]], tmp_path: Path
) -> None:
    state = {"w": torch.ones(4)}
    with checkpoint_manager(state, config=holdfast.CheckpointConfig(every=2)) as manager:
        report({"loss": 1.0}, manager.step(1))
        report({"loss": 2.0}, manager.step(2))
        report({"loss": 3.0}, manager.save(3))
        report({"loss": 4.0})
    assert [told["metrics"] for told in reports] == [{"loss": float(number)} for number in range(1, 5)]
    paths = [told["checkpoint"] and told["checkpoint"].path for told in reports]
    assert paths == [None, str(tmp_path / "checkpoint_2"), str(tmp_path / "checkpoint_3"), None]
    for told in reports:
        assert told["checkpoint_upload_mode"] is ray.train.CheckpointUploadMode.ASYNC
        assert told["delete_local_checkpoint_after_upload"] is False  # Ray's default in this mode deletes it
        if told["checkpoint"] is not None:
            uploaded = told["checkpoint_upload_fn"](told["checkpoint"], told["checkpoint_dir_name"])
            assert holdfast.open(uploaded.path).verify().ok


def test_ray_is_told_of_what_was_published_and_not_reported(reports: list[dict[str, Any]], tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    with checkpoint_manager(state) as manager:
        for step in (5, 10, 15):
            manager.save(step, metrics={"loss": float(step)})
        manager.wait()
    ray.train.get_context().latest = ray.train.Checkpoint.from_directory(tmp_path / "checkpoint_5")
    with checkpoint_manager(state) as manager:
        assert manager.restore() == 15
    assert [told["metrics"] for told in reports] == [{"loss": 10.0, "step": 10}, {"loss": 15.0, "step": 15}]
    assert [told["checkpoint_dir_name"] for told in reports] == ["checkpoint_10", "checkpoint_15"]


def test_reports_name_what_ray_finds_in_a_bucket(reports: list[dict[str, Any]], place: str) -> None:
    """By pyarrow's file system; one that leads elsewhere is told of."""
    storage = ray.train.get_context().storage
    storage.storage_filesystem, root = pyarrow.fs.FileSystem.from_uri(place)
    storage.experiment_fs_path = f"{root}/run"
    assert run_directory() == f"{place}/run"
    with checkpoint_manager({"w": torch.ones(4)}, config=holdfast.CheckpointConfig(every=1)) as manager:
        report({"loss": 1.0}, manager.step(1))
        manager.save(2, metrics={"loss": 2.0})
        manager.wait()
    told = reports[0]
    assert told["checkpoint"].path == f"{root}/run/checkpoint_1"
    uploaded = told["checkpoint_upload_fn"](told["checkpoint"], told["checkpoint_dir_name"])
    assert holdfast.open(f"s3://{uploaded.path}").verify().ok
    ray.train.get_context().latest = uploaded
    with checkpoint_manager({"w": torch.ones(4)}) as manager:
        assert manager.restore() == 2
    assert [(told["metrics"], told["checkpoint_dir_name"]) for told in reports[1:]] == [
        ({"loss": 2.0, "step": 2}, "checkpoint_2")
    ]
    elsewhere = ray.train.Checkpoint(uploaded.path, filesystem=pyarrow.fs.LocalFileSystem())
    with pytest.raises(ConfigError, match="take it for two places"):
        told["checkpoint_upload_fn"](elsewhere, "checkpoint_1")


@pytest.mark.filterwarnings("ignore:.*checkpoint_1")
def test_a_failed_save_is_never_reported(reports: list[dict[str, Any]], tmp_path: Path) -> None:
    config = holdfast.CheckpointConfig(every=1, on_error="warn")
    with checkpoint_manager({"w": torch.ones(4)}, config=config) as manager:
        (tmp_path / "checkpoint_1").write_text("in the way")
        report({}, manager.step(1))
        with pytest.raises((SaveFailed, CheckpointExists)):
            reports[0]["checkpoint_upload_fn"](reports[0]["checkpoint"], "checkpoint_1")
        manager.wait()


def test_what_can_not_be_is_refused(reports: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = holdfast.CheckpointConfig(keep=holdfast.Keep(last=7))
    with pytest.raises(ConfigError, match="num_to_keep") as caught:
        checkpoint_manager({"w": torch.ones(1)}, config=keeping)
    assert caught.value.field == "keep"
    ray.train.get_context().storage.storage_filesystem = pyarrow.fs._MockFileSystem()
    with pytest.raises(ConfigError, match="storage_path in a directory that all workers see"):
        run_directory()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="no Ray Train run here"):
        run_directory()
