"""``holdfast convert``: what stays of a checkpoint in each format, and what it says of the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _manager_runs import Run, saved_run
from _object_server import Server
from _on_stores import environment
from typer.testing import CliRunner, Result

import holdfast
from holdfast.catalog.course import PARENT
from holdfast.cli.app import app
from holdfast.errors import CheckpointCorrupt, CheckpointExists
from holdfast.format.manifest import COPY_OF, OVERWROTE, Manifest


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def converted(*arguments: object) -> dict[str, Any]:
    """The document of a conversion that ended well."""
    ended = convert(*arguments, "--json")
    assert ended.exit_code == 0, (ended.output, ended.exception)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def manifest_of(path: Path | str) -> Manifest:
    found = holdfast.open(path).manifest
    assert found is not None
    return found


@pytest.fixture
def bucket(object_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(object_server.endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_server.bucket()}"


@pytest.fixture
def model_only(tmp_path: Path) -> Path:
    """A root whose last save holds the model alone, with a value that is no number."""
    run = Run()
    with run.manager(tmp_path / "root", last_model_only=True) as manager:
        run.train()
        manager.save(1).result(60.0)
        with torch.no_grad():
            run.model.weight[0, 0] = float("nan")
        manager.save(2, final=True, files={"notes.txt": b"mine"}).result(60.0)
    return tmp_path / "root"


# to dcp -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["directory", "bucket"])
def test_a_model_alone_stays_one_and_suspicious(model_only: Path, bucket: str, through: str, tmp_path: Path) -> None:
    before = manifest_of(model_only / "step-2")
    assert before.extra["suspicious"], "or this shows nothing"
    assert not before.resumable
    copy, source = tmp_path / "again" / "step-2", str(model_only / "step-2")
    if through == "bucket":
        assert convert(source, f"{bucket}/run/step-2", "--to", "dcp").exit_code == 0
        source = f"{bucket}/run/step-2"
    ended = convert(source, copy, "--to", "dcp")
    assert ended.exit_code == 0, (ended.output, ended.exception)
    after = manifest_of(copy)
    assert not after.resumable
    assert after.extra == {**before.extra, COPY_OF: before.attempt}
    assert after.extra[PARENT] == manifest_of(model_only / "step-1").attempt
    assert holdfast.open(copy).read_file("notes.txt") == b"mine"
    shown = CliRunner().invoke(app, ["show", str(copy)])
    assert "suspicious" in shown.output
    with Run(3).manager(tmp_path / "again") as manager:
        assert manager.restore() is None, "not a checkpoint to go on from"


@pytest.mark.parametrize("through", ["directory", "bucket"])
def test_a_copy_is_gone_on_from_as_the_original(bucket: str, through: str, tmp_path: Path) -> None:
    weights = saved_run(tmp_path / "root", 3)
    source: Path | str = tmp_path / "root"
    if through == "bucket":
        source = f"{bucket}/run"
        for step in (2, 3):
            arguments = (tmp_path / "root", f"{source}/step-{step}", "--to", "dcp", "--step", step)
            assert convert(*arguments).exit_code == 0
    for step in (2, 3):
        ended = convert(source, tmp_path / f"again/step-{step}", "--to", "dcp", "--step", step)
        assert ended.exit_code == 0, (ended.output, ended.exception)
    run = Run(5)
    with run.manager(tmp_path / "again") as manager:
        assert manager.restore() == 3
        assert torch.equal(run.weight(), weights[3])
        assert (run.progress["tokens"], run.schedule.last_epoch) == (3, 3)
        run.train()
        manager.save(4).result(60.0)
    assert manifest_of(tmp_path / "again/step-4").extra[PARENT] == manifest_of(tmp_path / "root/step-3").attempt
    twice = tmp_path / "twice"
    assert convert(tmp_path / "again/step-3", twice, "--to", "dcp").exit_code == 0
    assert manifest_of(twice).extra[COPY_OF] == manifest_of(tmp_path / "root/step-3").attempt, "the first of them"
    assert manifest_of(twice).name == "twice"


@pytest.mark.parametrize("what", ["data", "report", "file"])
def test_nothing_is_written_of_what_is_damaged(what: str, tmp_path: Path) -> None:
    state = {"w": torch.arange(64, dtype=torch.float32)}
    holdfast.save(state, tmp_path / "a", files={"notes.txt": b"of mine"})
    pattern = {"data": "*.distcp", "report": "*.report", "file": "notes.txt"}[what]
    (path,) = (tmp_path / "a").glob(pattern)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    (tmp_path / "out").mkdir()
    ended = convert(tmp_path / "a", tmp_path / "out" / "b", "--to", "dcp")
    assert isinstance(ended.exception, CheckpointCorrupt), repr(ended.exception)
    assert str(path) in str(ended.exception)
    assert [found.name for found in (tmp_path / "out").iterdir() if found.name != ".holdfast"] == []


def test_a_copy_replaces_only_when_told_to(tmp_path: Path) -> None:
    holdfast.save({"w": torch.zeros(3)}, tmp_path / "a", step=1)
    holdfast.save({"w": torch.ones(3)}, tmp_path / "b", step=2)
    (tmp_path / "b" / "mine.txt").write_bytes(b"mine")
    replaced = manifest_of(tmp_path / "b").attempt
    ended = convert(tmp_path / "a", tmp_path / "b", "--to", "dcp")
    assert isinstance(ended.exception, CheckpointExists)
    assert holdfast.open(tmp_path / "b").step == 2
    assert convert(tmp_path / "a", tmp_path / "b", "--to", "dcp", "--overwrite").exit_code == 0
    found = manifest_of(tmp_path / "b")
    assert (found.step, found.extra[OVERWROTE]) == (1, replaced)
    assert (tmp_path / "b" / "mine.txt").read_bytes() == b"mine"
    assert convert(tmp_path / "b", tmp_path / "b", "--to", "dcp", "--overwrite").exit_code == 0, "by itself"
    assert torch.equal(holdfast.open(tmp_path / "b").read("w"), torch.zeros(3))
    assert holdfast.open(tmp_path / "b").verify().ok
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".holdfast")) == ["a", "b"]


def test_a_delta_that_becomes_whole_stays_what_it_was(tmp_path: Path) -> None:
    from format_fixtures import FIXTURES

    versions = Path(shutil.copytree(FIXTURES / "0.1.0.dev7" / "versions", tmp_path / "versions"))
    before = manifest_of(versions / "version-3")
    assert before.chain
    assert convert(versions / "version-3", tmp_path / "whole", "--to", "dcp").exit_code == 0
    after = manifest_of(tmp_path / "whole")
    assert (after.chain, after.resumable, after.step) == ((), before.resumable, before.step)
    assert {key: value for key, value in after.extra.items() if key != COPY_OF} == before.extra
    whole, parts = holdfast.open(tmp_path / "whole"), holdfast.open(versions / "version-3")
    assert all(torch.equal(whole.read(name), parts.read(name)) for name in parts.tensors)


# what is left out ---------------------------------------------------------------------------------------------------

NOTHING: dict[str, Any] = {"tensors": {}, "objects": 0, "files": [], "step": None, "metrics": {}}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    run = Run()
    run.train()
    files = {"config.json": b"{}", "notes.txt": b"mine"}
    holdfast.save(run.state, tmp_path / "a", step=7, metrics={"loss": 0.5}, files=files)
    return tmp_path / "a"


def test_a_file_of_torch_tells_what_is_not_in_it(trained: Path, tmp_path: Path) -> None:
    ended = convert(trained, tmp_path / "a.pt", "--to", "torch")
    assert ended.stderr == "holdfast: left out: config.json, notes.txt, step, metrics\n"
    assert ended.stdout == f"{tmp_path / 'a.pt'} is written\n"
    found = converted(trained, tmp_path / "b.pt", "--to", "torch")
    assert found["left_out"] == {**NOTHING, "files": ["config.json", "notes.txt"], "step": 7, "metrics": {"loss": 0.5}}
    ended = convert(tmp_path / "a.pt", tmp_path / "again.pt", "--to", "torch")
    assert ended.stderr == "", "nothing of a file of torch"


def test_a_hugging_face_directory_tells_what_is_not_in_it(trained: Path, tmp_path: Path) -> None:
    checkpoint = holdfast.open(trained)
    optimizer = sum(name.startswith("optimizer.") for name in checkpoint.tensors)
    ended = convert(trained, tmp_path / "hf", "--to", "hf")
    told = f"optimizer ({optimizer} tensors), {len(checkpoint.objects)} objects, config.json, notes.txt, step, metrics"
    assert ended.stderr == f"holdfast: left out: {told}\n"
    found = converted(trained, tmp_path / "hf2", "--to", "hf")["left_out"]
    assert (found["tensors"], found["objects"]) == ({"optimizer": optimizer}, len(checkpoint.objects))
    assert found["files"] == ["config.json", "notes.txt"]
    assert converted(tmp_path / "hf", tmp_path / "hf3", "--to", "hf")["left_out"] == NOTHING
    two = {"model": {"a.b": torch.ones(2)}, "ema": {"a.b": torch.ones(2)}}
    holdfast.save(two, tmp_path / "two")
    both = ("--module", "model", "--module", "ema")
    assert converted(tmp_path / "two", tmp_path / "both", "--to", "hf", *both)["left_out"] == NOTHING
    assert convert(tmp_path / "two", tmp_path / "one", "--to", "hf").stderr == "holdfast: left out: ema (1 tensor)\n"
    torch.save(two, tmp_path / "two.pt")
    found = converted(tmp_path / "two.pt", tmp_path / "of file", "--to", "hf")["left_out"]
    assert found == {**NOTHING, "tensors": {"ema": 1}}


def test_a_checkpoint_leaves_nothing_out(trained: Path, tmp_path: Path) -> None:
    assert converted(trained, tmp_path / "b", "--to", "dcp")["left_out"] == NOTHING
    ended = convert(trained, tmp_path / "c", "--to", "dcp")
    assert ended.stderr == ""
