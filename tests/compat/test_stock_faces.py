"""What stock's storage shows beside the bytes, `holdfast.dcp.Writer` and `Reader` show too: metadata, ids, errors."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app
from holdfast.dcp import Reader, Writer

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launch import run_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*:UserWarning")

WRITERS = {"ours": Writer, "stock": FileSystemWriter}


def make(fill: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((4, 3), fill), "p": torch.nn.Parameter(torch.full((2,), fill))},
        "list": [torch.full((5,), fill), int(fill)],
        "epoch": int(fill),
    }


def save(path: Path, state: dict[str, Any] | None = None, *, by: str = "ours", **options: Any) -> Any:
    return dcp.save(make() if state is None else state, storage_writer=WRITERS[by](path), no_dist=True, **options)


def loaded(path: Path, storage_reader: Any = None, **options: Any) -> dict[str, Any]:
    state = make(0.0)
    dcp.load(state, storage_reader=storage_reader or Reader(path), no_dist=True, **options)
    return state


def failure(call: Any, *arguments: Any, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as raised:
        call(*arguments, **options)
    (error,) = {type(row[0]): row[0] for row in raised.value.failures.values()}.values()
    return error


# plan caching --------------------------------------------------------------------------------------------------


def forget_plans() -> None:
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{cache}", {}).clear()  # older torch caches less


@pytest.fixture
def no_cached_plans() -> Iterator[None]:
    forget_plans()
    yield
    forget_plans()


@pytest.mark.usefixtures("no_cached_plans")
@pytest.mark.parametrize("order", ["ours stock ours ours stock stock ours", "stock ours stock ours"])
def test_cached_plans_serve_both_writers_in_turns(tmp_path: Path, order: str) -> None:
    for number, by in enumerate(order.split()):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(tmp_path / str(number), make(number + 1.0), by=by, planner=planner)
    for number, by in enumerate(order.split()):
        for storage_reader in (Reader, FileSystemReader):
            found = loaded(tmp_path / str(number), storage_reader(tmp_path / str(number)))
            assert torch.equal(found["model"]["w"], torch.full((4, 3), number + 1.0)), (number, by)
            assert found["epoch"] == number + 1
    assert holdfast.open(tmp_path / "0" if order.startswith("ours") else tmp_path / "1").verify().ok


def cache_plans_on_two(root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    forget_plans()
    for number, by in enumerate(("ours", "stock", "ours", "stock")):
        value = torch.full((5, 2), number + 1.0)
        state = {"w": distribute_tensor(value, mesh, [Shard(0)]), "n": number}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        path = Path(root) / str(number)
        dcp.save(state, storage_writer=WRITERS[by](path), planner=planner)
        dist.barrier()
        for storage_reader in (Reader(path), FileSystemReader(path)):
            found = {"w": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]), "n": -1}
            dcp.load(found, storage_reader=storage_reader)
            assert torch.equal(found["w"].full_tensor(), value), (number, by)
            assert found["n"] == number
        if by == "ours":
            assert holdfast.open(path).verify().ok
            assert Reader(path).read_metadata().planner_data == {"w": ("w",), "n": ("n",)}
        dist.barrier()
    forget_plans()


def test_cached_plans_serve_both_writers_on_two_ranks(tmp_path: Path) -> None:
    run_job(cache_plans_on_two, nproc=2, args=[tmp_path])


# errors --------------------------------------------------------------------------------------------------------


def test_what_is_wrong_at_open_is_told_by_dcp_load(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert isinstance(failure(loaded, missing), holdfast.CheckpointNotFound)
    with pytest.raises(holdfast.CheckpointNotFound):
        Reader(missing).read_metadata()
    error = failure(_load_state_dict_from_keys, storage_reader=Reader(missing))  # a planner that looks at the metadata
    assert isinstance(error, holdfast.CheckpointNotFound)

    for damaged in ("holdfast.json", "rank-00000.report"):
        path = tmp_path / f"damaged {damaged}"
        save(path)
        with open(path / damaged, "r+b") as file:
            file.seek(-3, io.SEEK_END)
            file.write(b"???")
        error = failure(loaded, path)
        assert isinstance(error, holdfast.CheckpointCorrupt)
        assert damaged in error.path
        with pytest.raises(holdfast.CheckpointCorrupt):
            Reader(path).read_metadata()
    path = tmp_path / "stock"
    save(path, by="stock")
    (path / ".metadata").write_bytes(b"not a pickle")
    assert isinstance(failure(loaded, path), holdfast.CheckpointCorrupt)


def test_a_reader_can_be_used_again_after_an_error(tmp_path: Path) -> None:
    storage_reader = Reader(tmp_path / "a")
    assert isinstance(failure(loaded, tmp_path, storage_reader), holdfast.CheckpointNotFound)
    save(tmp_path / "a")
    assert loaded(tmp_path, storage_reader)["epoch"] == 1


def fail_on_two(root: str) -> None:
    with pytest.raises(CheckpointException) as raised:
        dcp.load(make(0.0), storage_reader=Reader(Path(root) / "missing"))
    assert {rank: type(row[0]) for rank, row in raised.value.failures.items()} == dict.fromkeys(
        (0, 1), holdfast.CheckpointNotFound
    )
    # Seen by one rank only: all raise what that one met, and nobody is left waiting.
    path = Path(root) / ("a" if dist.get_rank() == 0 else "elsewhere")
    with pytest.raises(CheckpointException) as raised:
        dcp.load(make(0.0), storage_reader=Reader(path))
    assert {rank: type(row[0]) for rank, row in raised.value.failures.items()} == {1: holdfast.CheckpointNotFound}
    dcp.load(found := make(0.0), storage_reader=Reader(Path(root) / "a"))
    assert found["epoch"] == 1


def test_every_rank_is_told_what_is_wrong_at_open(tmp_path: Path) -> None:
    save(tmp_path / "a")
    run_job(fail_on_two, nproc=2, args=[tmp_path])


def test_an_existing_path_is_told_in_stocks_words(tmp_path: Path) -> None:
    save(tmp_path / "a")
    error = failure(save, tmp_path / "a")
    assert isinstance(error, holdfast.CheckpointExists)
    assert "Checkpoint already exists" in str(error)


# metadata ------------------------------------------------------------------------------------------------------


class Annotating(DefaultSavePlanner):
    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(**options)
        self.data = data

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = self.data
        return plans, metadata


class Looking(DefaultLoadPlanner):
    seen: Any = None

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.seen = metadata.planner_data
        super().set_up_planner(state_dict, metadata, is_coordinator)


DATA = [
    {"mappings": {"model.w": ("model", "w")}, "note": "mine", "at": [1, (2.5, None)], 7: {"x"}},
    {"model.w": ("elsewhere", "w")},
    {"model.w": ("model", "w")},  # fewer names than there are
    {},
    ["a", "list"],
    "a text",
    None,
    {"size": torch.Size([3]), "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("by", ["ours", "stock"])
@pytest.mark.parametrize("data", DATA, ids=range(len(DATA)))
def test_planner_data_comes_back(tmp_path: Path, data: Any, by: str) -> None:
    save(tmp_path / "a", by=by, planner=Annotating(data))
    assert FileSystemReader(tmp_path / "a").read_metadata().planner_data == data
    assert Reader(tmp_path / "a").read_metadata().planner_data == data
    planner = Looking()
    assert loaded(tmp_path / "a", planner=planner)["epoch"] == 1
    assert planner.seen == data
    assert holdfast.open(tmp_path / "a").verify().ok
    state = make(0.0)
    holdfast.load(state, tmp_path / "a")
    assert state["epoch"] == 1


@pytest.mark.usefixtures("no_cached_plans")
def test_planner_data_that_differs_comes_back_from_cached_plans(tmp_path: Path) -> None:
    for number in range(3):
        data = {"model.w": ("number", number)}
        save(tmp_path / str(number), planner=Annotating(data, enable_plan_caching=True))
        assert Reader(tmp_path / str(number)).read_metadata().planner_data == data


def test_planner_data_of_nested_values(tmp_path: Path) -> None:
    for by in ("ours", "stock"):
        save(tmp_path / by, {"w": torch.ones(3)}, by=by, planner=DefaultSavePlanner(flatten_state_dict=False))
        assert Reader(tmp_path / by).read_metadata().planner_data is None


class Odd:
    pass


def test_planner_data_that_could_not_be_read_is_refused_by_name(tmp_path: Path) -> None:
    error = failure(save, tmp_path / "a", planner=Annotating({"mine": {"deep": Odd()}}))
    assert isinstance(error, holdfast.ConfigError)
    assert all(word in str(error) for word in ("planner_data", "mine", "deep", "Odd"))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_record_of_a_planner_is_found(tmp_path: Path) -> None:
    save(tmp_path / "a", planner=Annotating(["mine"]))
    data = bytearray((tmp_path / "a" / ".planner").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a" / ".planner").write_bytes(data)
    assert isinstance(failure(loaded, tmp_path / "a"), holdfast.CheckpointCorrupt)
    assert [Path(problem.path).name for problem in holdfast.open(tmp_path / "a").verify().problems] == [".planner"]


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_metadata_is_what_stock_reads(tmp_path: Path, by: str) -> None:
    save(tmp_path / "a", by=by)
    stock, ours = FileSystemReader(tmp_path / "a").read_metadata(), Reader(tmp_path / "a").read_metadata()
    assert stock.state_dict_metadata["model.p"].properties.requires_grad
    for found in (ours, pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert found.state_dict_metadata == stock.state_dict_metadata
        assert found.planner_data == stock.planner_data
        assert found.storage_data == stock.storage_data
        assert getattr(found, "version", None) == getattr(stock, "version", None)
        assert found.storage_meta.save_id == stock.storage_meta.save_id
    assert type(pickle.loads(pickle.dumps(ours))) is dcp.Metadata


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_storage_data_says_where_records_are(tmp_path: Path, by: str) -> None:
    """As tools read single tensors of a directory."""
    save(tmp_path / "a", by=by)
    storage_reader = Reader(tmp_path / "a")
    assert storage_reader.storage_data == {}
    metadata = storage_reader.read_metadata()
    assert metadata.storage_data == storage_reader.storage_data
    for index, info in metadata.storage_data.items():
        record = (tmp_path / "a" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        value = torch.load(io.BytesIO(record), weights_only=True)
        assert value == 1 if index.offset is None else bool((value == 1).all())
    other = FileSystemReader(tmp_path / "a")
    found = make(0.0)
    other.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
    assert loaded(tmp_path / "a", other)["epoch"] == 1
    del found


def test_the_ids_that_stock_has(tmp_path: Path) -> None:
    writer, storage_reader = Writer(tmp_path / "a"), Reader(tmp_path / "a")
    assert writer.path == tmp_path / "a"
    assert storage_reader.path == tmp_path / "a"
    dcp.save(make(), storage_writer=writer, no_dist=True)
    first = storage_reader.read_metadata().storage_meta
    assert first is not None
    assert (first.save_id, first.load_id) == (writer.save_id, storage_reader.load_id)
    writer.reset(tmp_path / "b")
    storage_reader.reset(tmp_path / "b")
    assert writer.path == storage_reader.path == tmp_path / "b"
    assert (first.save_id, first.load_id) != (writer.save_id, storage_reader.load_id)
    dcp.save(make(), storage_writer=writer, no_dist=True)
    second = storage_reader.read_metadata().storage_meta
    assert second is not None
    assert (second.save_id, second.load_id) == (writer.save_id, storage_reader.load_id)
    stored = FileSystemReader(tmp_path / "b").read_metadata().storage_meta
    assert stored is not None
    assert stored.save_id == writer.save_id


def test_tools_that_rebuild_a_state(tmp_path: Path) -> None:
    save(tmp_path / "a", make(2.0))
    whole = _load_state_dict_from_keys(storage_reader=Reader(tmp_path / "a"))
    assert torch.equal(whole["model"]["w"], torch.full((4, 3), 2.0))
    part = _load_state_dict_from_keys({"model"}, storage_reader=Reader(tmp_path / "a"))
    assert set(part) == {"model"}
    dcp_to_torch_save(tmp_path / "a", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["epoch"] == 2


def test_metadata_of_what_holdfast_saved_by_itself(tmp_path: Path) -> None:
    holdfast.save(make(), tmp_path / "a", step=1)
    stock, ours = FileSystemReader(tmp_path / "a").read_metadata(), Reader(tmp_path / "a").read_metadata()
    assert ours.storage_data == stock.storage_data
    assert (ours.state_dict_metadata, ours.planner_data) == (stock.state_dict_metadata, stock.planner_data)


# two values of one name ----------------------------------------------------------------------------------------


class KeepsReplicas(DefaultSavePlanner):
    """Has every rank write its own value of everything."""

    def create_local_plan(self) -> Any:
        self.plan = create_default_local_save_plan(self.state_dict, True)
        return dataclasses.replace(self.plan, planner_data=self.mappings)

    def create_global_plan(self, all_plans: Any) -> Any:
        _, self.metadata = create_default_global_save_plan(all_plans[:1])
        self.metadata.planner_data = self.mappings
        return all_plans, self.metadata


def save_values_of_each_rank(root: str) -> None:
    for by in ("ours", "stock"):
        state = {"n": dist.get_rank() + 10}
        dcp.save(state, storage_writer=WRITERS[by](Path(root) / by), planner=KeepsReplicas())


def test_all_readers_get_the_same_of_several_values(tmp_path: Path) -> None:
    run_job(save_values_of_each_rank, nproc=2, args=[tmp_path])
    for by in ("ours", "stock"):
        for storage_reader in (Reader, FileSystemReader):
            found = {"n": 0}
            dcp.load(found, storage_reader=storage_reader(tmp_path / by), no_dist=True)
            assert found["n"] == 11
    assert holdfast.open(tmp_path / "ours").objects["n"] == 11


# verify --------------------------------------------------------------------------------------------------------


def test_a_file_that_somebody_added_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path)
    (path / "notes.txt").write_text("mine")
    (path / "tensorboard").mkdir()
    (path / "other.distcp").write_bytes(b"x")
    report = holdfast.open(path).verify()
    assert report.ok
    assert report.problems == ()
    assert {Path(row.path).name for row in report.warnings} == {"notes.txt", "tensorboard", "other.distcp"}
    assert all(row.path in row.message for row in report.warnings)

    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 0
    assert "warning" in result.output
    assert "notes.txt" in result.output
    document = json.loads(CliRunner().invoke(app, ["verify", str(path), "--json"]).output)
    assert document["ok"]
    assert {Path(row["path"]).name for row in document["checkpoints"][0]["warnings"]} == {
        *("notes.txt", "tensorboard", "other.distcp")
    }
    assert loaded(path)["epoch"] == 1


@pytest.mark.parametrize("name", [".metadata", "rank-00000.report", "__0_0.distcp", "holdfast.json"])
def test_what_was_removed_or_changed_is_damage_beside_an_added_file(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    checkpoint = holdfast.open(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / name).unlink()
    assert not checkpoint.verify().ok
    changed = holdfast.open(tmp_path / "b")
    data = bytearray((tmp_path / "b" / name).read_bytes())
    data[-5] ^= 1
    (tmp_path / "b" / name).write_bytes(data)
    assert not changed.verify().ok
