"""``holdfast convert --to dcp`` of what two ranks have saved: all of it stays, and is restored from as the original."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from test_groups_and_worlds import Loader
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))

from _object_server import Server
from _on_stores import downloaded, environment, set_environment
from test_conversions import manifest_of

import holdfast
from holdfast import CheckpointConfig, CheckpointManager
from holdfast.cli.app import app
from holdfast.errors import ConfigError, StateMismatch
from holdfast.format.manifest import COPY_OF

WORLD = 2


def draw() -> list[float]:
    found: list[float] = torch.rand(4).tolist()
    return found


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def state_of(position: int, *, loads: bool) -> dict[str, Any]:
    return {"w": torch.full((6,), float(position)), **({"dataloader": Loader(position)} if loads else {})}


def save(at: str, loads: str) -> None:
    torch.manual_seed(100 + rank())
    state = state_of(1000 * (rank() + 1), loads=loads == "True")
    with CheckpointManager(f"{at}/root", state) as manager:
        manager.save(7, metrics={"loss": 0.5}, files={"notes.txt": b"mine"}).result(60.0)
    Path(at, f"drawn-{rank()}").write_text(str(draw()))


def restore(root: str, at: str, loads: str, endpoint: str = "") -> None:
    if endpoint:
        set_environment(endpoint)
    torch.manual_seed(0)
    state = state_of(-1, loads=loads == "True")
    with CheckpointManager(root, state, config=CheckpointConfig(load_only=True)) as manager:
        assert manager.restore() == 7
    assert str(draw()) == Path(at, f"drawn-{rank()}").read_text(), "each rank's own random numbers"
    if loads == "True":
        assert state["dataloader"].position == 1000 * (rank() + 1)


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether there is a dataloader, a directory with the root that two ranks have saved."""
    found = {loads: tmp_path_factory.mktemp("saved") for loads in (False, True)}
    for loads, at in found.items():
        run_job(save, nproc=WORLD, args=[at, loads])
    return found


@pytest.fixture
def bucket(object_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(object_server.endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{object_server.bucket()}"


@pytest.mark.parametrize("loads", [True, False], ids=["per-rank values", "random states alone"])
def test_a_conversion_is_restored_from_in_place_of_the_original(
    roots: dict[bool, Path], loads: bool, tmp_path: Path
) -> None:
    original, copy = roots[loads] / "root" / "step-7", tmp_path / "again" / "step-7"
    ended = convert(roots[loads] / "root", copy, "--to", "dcp")
    assert ended.exit_code == 0, ended.output
    before, after = manifest_of(original), manifest_of(copy)
    assert (after.world, after.step, after.metrics, after.resumable) == (WORLD, 7, {"loss": 0.5}, True)
    assert after.extra == {**before.extra, COPY_OF: before.attempt}
    assert after.attempt != before.attempt
    assert {path.name for path in original.iterdir()} == {path.name for path in copy.iterdir()}
    for path in original.glob("*.distcp"):
        assert (copy / path.name).read_bytes() == path.read_bytes()
    assert holdfast.open(copy).verify().ok
    assert [path.name for path in copy.parent.iterdir() if path.name != ".holdfast"] == ["step-7"]
    run_job(restore, nproc=WORLD, args=[copy.parent, roots[loads], loads])


def test_a_conversion_refuses_one_rank_where_the_original_does(roots: dict[bool, Path], tmp_path: Path) -> None:
    copy = tmp_path / "again" / "step-7"
    assert convert(roots[True] / "root", copy, "--to", "dcp").exit_code == 0
    told = []
    for root in (roots[True] / "root", copy.parent):
        state = state_of(-1, loads=True)
        with (
            CheckpointManager(root, state, config=CheckpointConfig(load_only=True)) as manager,
            pytest.raises(StateMismatch) as caught,
        ):
            manager.restore()
        told.append(str(caught.value).replace(str(root), "ROOT"))
        assert state["dataloader"].position == -1
    assert told[0] == told[1]


def test_a_copy_in_a_bucket_is_restored_from(roots: dict[bool, Path], bucket: str, object_server: Server) -> None:
    ended = convert(roots[True] / "root", f"{bucket}/run/step-7", "--to", "dcp")
    assert ended.exit_code == 0, ended.output
    before, after = manifest_of(roots[True] / "root" / "step-7"), manifest_of(f"{bucket}/run/step-7")
    assert (after.world, after.extra) == (WORLD, {**before.extra, COPY_OF: before.attempt})
    assert holdfast.open(f"{bucket}/run/step-7").verify().ok
    run_job(restore, nproc=WORLD, args=[f"{bucket}/run", roots[True], True, object_server.endpoint])


def test_what_one_process_can_not_save_again_is_refused(roots: dict[bool, Path], bucket: str, tmp_path: Path) -> None:
    """From a bucket, whose files have other names."""
    url = f"{bucket}/run/step-7"
    assert convert(roots[True] / "root", url, "--to", "dcp").exit_code == 0
    for source in (url, downloaded(url, tmp_path / "down")):
        ended = convert(source, tmp_path / "again", "--to", "dcp")
        assert isinstance(ended.exception, ConfigError), ended.output
        assert f"{source} was saved by 2 ranks" in str(ended.exception)
        assert "copy" in str(ended.exception)
        assert not (tmp_path / "again").exists()
