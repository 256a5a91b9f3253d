"""`holdfast.dcp.Writer` and `Reader` behind stock ``dcp.save``, ``async_save`` and ``load``: promises and failures."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import multiprocessing
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import staging, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.dcp import Reader, Writer, share
from holdfast.storage import local

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launch import run_job

KILLED, LOCKED = 7, 8

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def make(fill: float | None = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) if fill is None else torch.full(shape, fill)

    plain = fill is None
    return {
        "model": {"w": tensor(300, 1001), "b": tensor(7), "s": tensor(), "none": tensor(0, 4)},
        "list": [1 if plain else 0, {"deep": tensor(3)}, tensor(2, 2)],
        "epoch": 3 if plain else 0,
        "note": "as it was" if plain else "",
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in expected["model"]:
        assert torch.equal(found["model"][name], expected["model"][name]), name
    assert torch.equal(found["list"][1]["deep"], expected["list"][1]["deep"])
    assert torch.equal(found["list"][2], expected["list"][2])
    assert (found["list"][0], found["epoch"], found["note"]) == (
        expected["list"][0],
        expected["epoch"],
        expected["note"],
    )


def save(state: dict[str, Any], writer: Writer, **options: Any) -> Any:
    return dcp.save(state, storage_writer=writer, no_dist=True, **options)


def fails(state: dict[str, Any], writer: Writer, kind: type[BaseException], match: str, **options: Any) -> Any:
    with pytest.raises(CheckpointException, match=match) as raised:
        save(state, writer, **options)
    error, _ = raised.value.failures[0]
    assert isinstance(error, kind)
    return error


def in_another_process(function: Callable[..., None], *args: Any) -> int | None:
    """Its exit status. Forked from a server that has imported torch once and runs no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp", "holdfast.dcp"])
    process = context.Process(target=function, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# what is written -----------------------------------------------------------------------------------------------


def test_everyone_reads_what_the_writer_wrote(tmp_path: Path) -> None:
    path, expected = tmp_path / "new" / "a", make()
    metadata = save(expected, Writer(path, step=7, metrics={"loss": 1.5}))
    assert set(metadata.state_dict_metadata) == {
        *("model.w", "model.b", "model.s", "model.none"),
        *("list.0", "list.1.deep", "list.2", "epoch", "note"),
    }
    assert entries(path.parent) == ["a"]

    checkpoint = holdfast.open(path)
    assert (checkpoint.step, checkpoint.metrics) == (7, {"loss": 1.5})
    assert checkpoint.verify().ok
    assert dict(checkpoint.objects) == {"epoch": 3, "note": "as it was", "list.0": 1}
    assert torch.equal(checkpoint.read("model.w", (slice(2, 5),)), expected["model"]["w"][2:5])

    for how in (
        lambda state: dcp.load(state, storage_reader=Reader(path), no_dist=True),
        lambda state: dcp.load(state, checkpoint_id=path, no_dist=True),
        lambda state: holdfast.load(state, path),
    ):
        found = make(0.0)
        how(found)
        assert_same(found, expected)


def test_the_metadata_is_what_stock_writes(tmp_path: Path) -> None:
    """But for places, ids, and what this writer has no part in."""
    save(make(), Writer(tmp_path / "ours"))
    dcp.save(make(), checkpoint_id=tmp_path / "stock", no_dist=True)
    ours, stock = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "stock"))
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert set(ours.storage_data) == set(stock.storage_data)
    if hasattr(stock, "version"):  # older torch writes none
        assert ours.version == stock.version
    assert ours.storage_meta.checkpoint_id == str(tmp_path / "ours")


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "FILE_BYTES_MIN", 1 << 20)
    state: dict[str, Any] = {f"t{n}": torch.randn(100_000 + 5_000 * n) for n in range(12)} | {
        "huge": torch.randn(10**6)
    }
    save(state, Writer(tmp_path / "a"))
    files = [name for name in entries(tmp_path / "a") if name.endswith(".distcp")]
    assert len(files) > 4
    assert holdfast.open(tmp_path / "a").verify().ok
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_nothing_to_write_is_a_checkpoint_too(tmp_path: Path) -> None:
    save({}, Writer(tmp_path / "a"))
    assert holdfast.open(tmp_path / "a").verify().ok


def test_checkpoint_id_takes_the_place_of_the_path(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", step=1)
    save(make(), writer)
    save(make(), writer, checkpoint_id=tmp_path / "b")
    assert entries(tmp_path) == ["a", "b"]
    assert holdfast.open(tmp_path / "a").step == 1
    assert holdfast.open(tmp_path / "b").step is None  # the step was the other path's
    reader = Reader(tmp_path / "a")
    found = make(0.0)
    dcp.load(found, storage_reader=reader, checkpoint_id=tmp_path / "b", no_dist=True)
    assert reader.checkpoint_id == str(tmp_path / "b")
    assert_same(found, make())


# what is refused -----------------------------------------------------------------------------------------------


def test_an_existing_checkpoint_stays_unless_it_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save({"x": torch.zeros(3)}, Writer(path))
    before = {name: (path / name).read_bytes() for name in entries(path)}
    fails({"x": torch.ones(3)}, Writer(path), holdfast.CheckpointExists, "exists already")
    assert {name: (path / name).read_bytes() for name in entries(path)} == before
    assert entries(tmp_path) == ["a"]

    save({"y": torch.ones(3)}, Writer(path, overwrite=True))
    assert entries(tmp_path) == ["a"]
    assert list(holdfast.open(path).tensors) == ["y"]


def test_foreign_data_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a"
    dcp.save({"x": torch.zeros(3)}, checkpoint_id=path, no_dist=True)
    fails({"y": torch.ones(3)}, Writer(path), holdfast.CheckpointExists, "exists already")
    save({"y": torch.ones(3)}, Writer(path, overwrite=True))
    assert list(holdfast.open(path).tensors) == ["y"]


def foreign_files(path: Path) -> dict[str, bytes]:
    """What users keep beside a checkpoint; stock DCP leaves it alone."""
    (path / "step-1").mkdir(parents=True)
    (path / "step-1" / "__0_0.distcp").write_bytes(b"a checkpoint of their own")
    (path / ".hidden").mkdir()
    (path / ".hidden" / "x").write_bytes(b"hidden")
    files = {"train.log": b"lines", "trainer_state.json": b"{}", "notes.metadata": b"no index"}
    for name, data in files.items():
        (path / name).write_bytes(data)
    (path / "newest").symlink_to("step-1")
    return {"step-1/__0_0.distcp": b"a checkpoint of their own", ".hidden/x": b"hidden", **files}


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("before", ["nothing", "stock", "ours", "stock of more ranks", "damaged"])
def test_what_others_put_beside_a_checkpoint_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, exchanges: bool
) -> None:
    path = tmp_path / "a"
    if before == "ours":
        save(make(), Writer(path))
    elif before != "nothing":
        dcp.save({"x": torch.zeros(3)}, checkpoint_id=path, no_dist=True)
    if before == "stock of more ranks":
        (path / "__7_0.distcp").write_bytes(b"which no index names any more")
    if before == "damaged":
        (path / ".metadata").write_bytes(b"nothing that could be read")
    kept = foreign_files(path)
    if not exchanges:
        monkeypatch.setattr(local, "_renameat2", lambda: None)
    if before == "nothing":
        fails({"y": torch.ones(3)}, Writer(path), holdfast.CheckpointExists, "exists already")
    for value in (1.0, 2.0):
        save({"y": torch.full((3,), value)}, Writer(path, overwrite=True))
        own = {".metadata", "__0_0.distcp", "holdfast.json", "rank-00000.report"}
        assert set(entries(path)) == own | {"step-1", ".hidden", "newest", *(name for name in kept if "/" not in name)}
        assert {name: (path / name).read_bytes() for name in kept} == kept
        assert os.readlink(path / "newest") == "step-1"
        assert holdfast.open(path).verify().ok
        found = {"y": torch.zeros(3)}
        dcp.load(found, checkpoint_id=path, no_dist=True)
        assert torch.equal(found["y"], torch.full((3,), value))
    assert entries(tmp_path) == ["a"]


def test_what_is_no_directory_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "file").touch()
    fails(
        {"y": torch.ones(3)}, Writer(tmp_path / "link", overwrite=True), holdfast.CheckpointExists, "a file or a link"
    )
    with pytest.raises(holdfast.ConfigError, match="is a file"):
        Writer(tmp_path / "file", overwrite=True)
    assert entries(tmp_path) == ["elsewhere", "file", "link"]


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save(make(), Writer(tmp_path / "a"))
    assert holdfast.open(tmp_path / "a").verify().ok


@dataclasses.dataclass
class Odd:
    value: int = 1


def test_what_cannot_be_loaded_back_is_refused_by_name(tmp_path: Path) -> None:
    state = {**make(), "deep": {"odd": Odd()}}
    error = fails(state, Writer(tmp_path / "a"), holdfast.ConfigError, r"deep\.odd")
    assert error.field == "deep.odd"
    assert entries(tmp_path) == []


def test_dtypes_that_cannot_be_stored_are_refused_by_name(tmp_path: Path) -> None:
    """On every rank, with its local plan. Stock's own planner would trip over this one, too, but later."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"x": {"small": torch.empty(2, dtype=torch.uint3)}})
    with pytest.raises(holdfast.ConfigError, match=r"x\.small: dtype uint3"):
        Writer(tmp_path / "a").prepare_local_plan(planner.create_local_plan())
    assert entries(tmp_path) == []


@pytest.mark.parametrize("bad", ["ftp://host/a", "", 3])
def test_paths_that_are_none_are_refused_at_once(bad: Any) -> None:
    with pytest.raises(holdfast.ConfigError):
        Writer(bad)
    with pytest.raises(holdfast.ConfigError):
        Reader(bad)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    for options, field in (({"step": -1}, "step"), ({"writers": 0}, "writers"), ({"metrics": {"a": "b"}}, "metrics.a")):
        with pytest.raises(holdfast.ConfigError) as refused:
            Writer(tmp_path / "a", **options)  # type: ignore[arg-type]
        assert refused.value.field == field


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("this torch always uses them")
    with pytest.raises(holdfast.ConfigError, match="use_collectives"):
        dcp.save(make(), storage_writer=Writer(tmp_path / "a"), no_dist=True, use_collectives=False)
    assert entries(tmp_path) == []


# planners ------------------------------------------------------------------------------------------------------


class HalfPlanner(DefaultSavePlanner):
    """Stores floating-point tensors as bfloat16, and says so in its plan (or forgets to)."""

    def __init__(self, *, honest: bool = True) -> None:
        super().__init__()
        self.honest = honest

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None and self.honest:
                item.tensor_data.properties.dtype = torch.bfloat16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value if write_item.type == WriteItemType.BYTE_IO else value.to(torch.bfloat16)


def test_a_planner_that_converts(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 5), "n": 1}
    save(state, Writer(tmp_path / "a"), planner=HalfPlanner())
    assert torch.equal(holdfast.open(tmp_path / "a").read("w"), state["w"].to(torch.bfloat16))
    found = {"w": torch.zeros(30, 5), "n": 0}
    dcp.load(found, storage_reader=Reader(tmp_path / "a"), no_dist=True)
    assert torch.equal(found["w"], state["w"].to(torch.bfloat16).float())


def test_a_planner_that_converts_and_says_nothing(tmp_path: Path) -> None:
    error = fails(
        {"w": torch.randn(30)}, Writer(tmp_path / "a"), holdfast.ConfigError, "w", planner=HalfPlanner(honest=False)
    )
    assert "announced float32" in str(error)
    assert entries(tmp_path) == []


class RenamingPlanner(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class RenamingLoadPlanner(DefaultLoadPlanner):
    """Loads what was saved as ``foo_x`` as ``x``, into memory of its own, committed afterwards."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.own = state_dict
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.own[read_item.dest_index.fqn.removeprefix("foo_")] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.own[read_item.dest_index.fqn.removeprefix("foo_")] = tensor


def test_planners_that_rename_and_commit(tmp_path: Path) -> None:
    state = {"w": torch.randn(4, 4), "n": 5}
    save(state, Writer(tmp_path / "a"), planner=RenamingPlanner())
    found: dict[str, Any] = {"w": torch.zeros(4, 4), "n": 0}
    dcp.load(found, storage_reader=Reader(tmp_path / "a"), planner=RenamingLoadPlanner(), no_dist=True)
    assert torch.equal(found["w"], state["w"])
    assert found["n"] == 5


def forget_plans() -> None:
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        getattr(SavePlanner, f"_cached_{cache}", {}).clear()  # older torch caches less


@pytest.fixture
def no_cached_plans() -> Iterator[None]:
    yield
    forget_plans()


@pytest.mark.usefixtures("no_cached_plans")
def test_cached_plans(tmp_path: Path) -> None:
    """A caching planner gives `write_data` the plan of the first save; the attempt must be this save's all the same."""
    for number in range(3):
        state = {"w": torch.full((5,), float(number)), "n": number}
        save(state, Writer(tmp_path / str(number)), planner=DefaultSavePlanner(enable_plan_caching=True))
    for number in range(3):
        checkpoint = holdfast.open(tmp_path / str(number))
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint.read("w"), torch.full((5,), float(number)))
        assert checkpoint.objects["n"] == number
    assert entries(tmp_path) == ["0", "1", "2"]


def test_ranks_that_mean_different_things_by_one_name(tmp_path: Path) -> None:
    """Stock's planner may have a subclass that keeps replicas: the checkpoint would be unreadable."""
    plans = []
    for value in (torch.zeros(3), torch.zeros(4)):
        planner = DefaultSavePlanner()
        planner.set_up_planner({"x": value})
        plans.append(planner.create_local_plan())
    with pytest.raises(holdfast.StateMismatch, match=r"'x' is a float32 tensor of \[3\].* \[4\] on rank 1"):
        Writer(tmp_path / "a").prepare_global_plan(plans)
    assert entries(tmp_path) == []


def test_partial_loads(tmp_path: Path) -> None:
    save(make(), Writer(tmp_path / "a"))
    found = {"model": {"b": torch.zeros(7)}}
    dcp.load(found, storage_reader=Reader(tmp_path / "a"), no_dist=True)
    assert torch.equal(found["model"]["b"], make()["model"]["b"])

    more = {"model": {"b": torch.zeros(7), "new": torch.ones(2)}}
    with pytest.raises(CheckpointException, match=r"model\.new"):
        dcp.load(more, storage_reader=Reader(tmp_path / "a"), no_dist=True)
    dcp.load(
        more, storage_reader=Reader(tmp_path / "a"), planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True
    )
    assert torch.equal(more["model"]["b"], make()["model"]["b"])
    assert torch.equal(more["model"]["new"], torch.ones(2))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    save(make(), Writer(tmp_path / "a"))
    with pytest.raises(CheckpointException, match=r"model\.b"):
        dcp.load({"model": {"b": torch.zeros(8)}}, storage_reader=Reader(tmp_path / "a"), no_dist=True)


# failures ------------------------------------------------------------------------------------------------------


class FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "model.w":
            raise OSError(5, "the tensor could not be fetched")
        return super().resolve_data(write_item)


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    error = fails(make(), Writer(tmp_path / "a"), holdfast.SaveFailed, "could not be fetched", planner=FailingPlanner())
    assert (error.rank, error.errno) == (0, 5)
    assert entries(tmp_path) == []
    save(make(), Writer(tmp_path / "a"))
    assert entries(tmp_path) == ["a"]


class WithdrawnPlanner(DefaultSavePlanner):
    """Takes the attempt away in the middle of writing, as a coordinator does that has failed."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def resolve_data(self, write_item: Any) -> Any:
        for attempt in self.root.glob(".*.incomplete"):
            shutil.rmtree(attempt)
        return super().resolve_data(write_item)


def test_a_rank_that_writes_when_the_coordinator_gives_up_says_so(tmp_path: Path) -> None:
    planner = WithdrawnPlanner(tmp_path)
    error = fails(make(), Writer(tmp_path / "a"), holdfast.SaveFailed, "coordinator has aborted it", planner=planner)
    assert (error.rank, error.errno) == (0, None)
    assert isinstance(error.__cause__, OSError)


@pytest.mark.parametrize("how", ["new", "exchanged", "renamed aside"])
def test_a_failure_while_publishing_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "a"
    overwrite = how != "new"
    if overwrite:
        save({"old": torch.ones(2)}, Writer(path))
    before = entries(tmp_path)
    rename = os.rename

    def refuse(source: Any, target: Any, **options: Any) -> None:
        if str(target) == str(path) and "incomplete" in str(source):
            raise OSError(28, "No space left on device")
        rename(source, target, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        patched.setattr(local, "_renameat2", lambda: (lambda *_: 28) if how == "exchanged" else None)
        error = fails(make(), Writer(path, overwrite=overwrite), holdfast.SaveFailed, "No space left")
    assert error.errno == 28
    assert entries(tmp_path) == before
    if overwrite:
        assert list(holdfast.open(path).tensors) == ["old"]
    save(make(), Writer(path, overwrite=overwrite))
    assert holdfast.open(path).verify().ok


class StuckPlanner(DefaultSavePlanner):
    """Holds its save where the tensors are asked for, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.let_go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.reached.set()
        assert self.let_go.wait(30)
        return super().resolve_data(write_item)


def test_of_two_saves_to_one_path_the_later_wins(tmp_path: Path) -> None:
    """As when the first was given up by its caller: in this process nobody else would end it."""
    planner, outcome = StuckPlanner(), []

    def first() -> None:
        try:
            save({"x": torch.zeros(2)}, Writer(tmp_path / "a"), planner=planner)
        except CheckpointException as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert planner.reached.wait(30)
    save({"y": torch.ones(2)}, Writer(tmp_path / "a"))
    planner.let_go.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(outcome) == 1
    assert list(holdfast.open(tmp_path / "a").tensors) == ["y"]
    assert entries(tmp_path) == ["a"]


def test_another_process_is_kept_away_while_a_save_is_in_work(tmp_path: Path) -> None:
    planner = StuckPlanner()
    thread = threading.Thread(target=lambda: save(make(), Writer(tmp_path / "a"), planner=planner))
    thread.start()
    assert planner.reached.wait(30)
    try:
        assert in_another_process(save_elsewhere, tmp_path / "a") == LOCKED
    finally:
        planner.let_go.set()
        thread.join(30)
    assert holdfast.open(tmp_path / "a").verify().ok


def save_elsewhere(path: Path) -> None:
    try:
        save(make(), Writer(path))
    except CheckpointException as error:
        os._exit(LOCKED if isinstance(error.failures[0][0], holdfast.RootLocked) else 1)


def test_a_freed_writer_withdraws_what_it_has_begun(tmp_path: Path) -> None:
    """DCP tells no writer that another rank has failed: it only stops calling."""
    writer = Writer(tmp_path / "a")
    planner = DefaultSavePlanner()
    planner.set_up_planner(make(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.write_data(planner.finish_plan(plan), planner)
    assert len(entries(tmp_path)) == 2  # the attempt and its lock
    del writer
    assert entries(tmp_path) == []


def test_the_next_save_settles_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert in_another_process(save_and_die, path, "model.w") == KILLED
    assert any("incomplete" in name for name in entries(tmp_path))
    with pytest.raises(holdfast.CheckpointNotFound):
        holdfast.open(path)
    save(make(), Writer(path))
    assert entries(tmp_path) == ["a"]
    assert_same_file(path)


def test_a_save_killed_after_all_have_reported_is_not_rolled_forward(tmp_path: Path) -> None:
    """What DCP was never told is done may have been announced as failed."""
    path = tmp_path / "a"
    assert in_another_process(save_and_die, path, "finish") == KILLED
    save({"x": torch.ones(1)}, Writer(path))
    assert list(holdfast.open(path).tensors) == ["x"]
    assert entries(tmp_path) == ["a"]


def assert_same_file(path: Path) -> None:
    found = make(0.0)
    holdfast.load(found, path)
    assert_same(found, make())


class DyingPlanner(DefaultSavePlanner):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == self.at:
            die()
        return super().resolve_data(write_item)


def die() -> None:
    os._exit(KILLED)


def save_and_die(path: Path, at: str) -> None:
    writer = Writer(path)
    if at == "finish":
        writer.finish = lambda *_, **__: die()  # type: ignore[method-assign]
    save(make(), writer, planner=DyingPlanner(at))


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    save(make(), Writer(tmp_path / "a"))
    (data,) = (path for path in (tmp_path / "a").glob("*.distcp") if path.stat().st_size > 1_000_000)
    damaged = bytearray(data.read_bytes())
    damaged[600_000] ^= 4
    data.write_bytes(damaged)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(make(0.0), storage_reader=Reader(tmp_path / "a"), no_dist=True)
    error, _ = raised.value.failures[0]
    assert isinstance(error, holdfast.CheckpointCorrupt)
    assert error.tensor == "model.w"
    dcp.load(make(0.0), storage_reader=Reader(tmp_path / "a", verify=False), no_dist=True)


def test_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no checkpoint at"):
        dcp.load(make(0.0), storage_reader=Reader(tmp_path / "a"), no_dist=True)


# asynchronous and distributed ----------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_async_save_on_a_thread(tmp_path: Path) -> None:
    """Repeated with one writer and one caching stager, as a training loop does."""
    if not hasattr(staging, "DefaultStager"):
        pytest.skip("this torch stages in another way")
    state, writer = make(), Writer(tmp_path / "s0")
    stager = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    for number in range(3):
        path = tmp_path / f"s{number}"
        response = dcp.async_save(state, storage_writer=writer, checkpoint_id=path, async_stager=stager)
        getattr(response, "upload_completion", response).result(timeout=60)
    stager.close()
    for number in range(3):
        assert_same_file(tmp_path / f"s{number}")


def save_over_there(writer: Writer) -> Any:
    return dcp.async_save(
        make(), storage_writer=writer, async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS
    )


def save_in_another_process(path: Path, store: Path) -> None:
    os.environ["MASTER_ADDR"] = "localhost"  # where stock's process looks for its own group
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    for number in range(2):
        save_over_there(Writer(f"{path}{number}", step=number)).result(timeout=60)
        checkpoint = holdfast.open(f"{path}{number}")
        assert checkpoint.step == number
        assert checkpoint.verify().ok
        assert_same_file(Path(f"{path}{number}"))
    error = save_over_there(Writer(f"{path}0")).exception(timeout=60)
    assert isinstance(error, CheckpointException)
    assert isinstance(error.failures[0][0], holdfast.CheckpointExists)
    dist.destroy_process_group()


def test_async_save_in_another_process(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert in_another_process(save_in_another_process, root / "a", tmp_path / "store") == 0
    assert entries(root) == ["a0", "a1"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(7, 5)
        self.b = nn.Linear(5, 1, bias=False)  # one row: a rank has none of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def train(*, shard: bool, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model: nn.Module = Net()
    if shard:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.full((2, 7), float(step + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": 2}


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in flatten_state_dict(state)[0].items()
        if isinstance(value, torch.Tensor)
    }


class FailsOnRankOne(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().resolve_data(write_item)


def save_on_two_ranks(root: str) -> None:
    model, optimizer = train(shard=True)
    state = state_of(model, optimizer)
    expected = full(state)
    path = Path(root) / "fsdp"
    dcp.save(state, storage_writer=Writer(path, step=2))
    assert holdfast.open(path).verify().ok

    again = state_of(*train(shard=True, steps=1))
    dcp.load(again, storage_reader=Reader(path))
    assert all(torch.equal(value, expected[name]) for name, value in full(again).items())
    stock = state_of(*train(shard=True, steps=1))
    dcp.load(stock, checkpoint_id=path)
    assert all(torch.equal(value, expected[name]) for name, value in full(stock).items())
    dist.barrier()

    # A rank that fails: all raise, nothing is visible, and the coordinator, whom nobody tells, still cleans up.
    writer = Writer(Path(root) / "failed")
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state, storage_writer=writer, planner=FailsOnRankOne())
    assert list(raised.value.failures) == [1]
    error, _ = raised.value.failures[1]
    assert isinstance(error, holdfast.SaveFailed)
    assert (error.rank, error.errno) == (1, 28)
    assert not (Path(root) / "failed").exists()
    dist.barrier()
    dcp.save(state, storage_writer=writer)
    assert holdfast.open(Path(root) / "failed").verify().ok

    # Refused by the coordinator alone, and told to all.
    with pytest.raises(CheckpointException) as raised:
        dcp.save({"model": get_model_state_dict(model)}, storage_writer=Writer(path))
    assert isinstance(raised.value.failures[0][0], holdfast.CheckpointExists)

    for number in range(2):  # cached plans travel no second time
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=Writer(Path(root) / f"cached{number}"), planner=planner)
    forget_plans()
    assert holdfast.open(Path(root) / "cached1").verify().ok
    if dist.get_rank() == 0:
        torch.save(expected, Path(root) / "expected.pt")


def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    run_job(save_on_two_ranks, nproc=2, args=[tmp_path])
    assert entries(tmp_path) == ["cached0", "cached1", "expected.pt", "failed", "fsdp"]
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)

    model, optimizer = train(shard=False, steps=1)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    holdfast.load(state, tmp_path / "fsdp")
    assert state["step"] == 2
    found = full(state_of(model, optimizer))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())

    model, optimizer = train(shard=False, steps=1)
    loaded = state_of(model, optimizer)
    dcp.load(loaded, storage_reader=Reader(tmp_path / "cached1"), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    found = full(state_of(model, optimizer))
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_manager_takes_up_what_the_writer_wrote(tmp_path: Path) -> None:
    model, optimizer = train(shard=False)
    dcp.save(state_of(model, optimizer), storage_writer=Writer(tmp_path / "step-2", step=2), no_dist=True)
    assert json.loads((tmp_path / "step-2" / "holdfast.json").read_text())["step"] == 2
    fresh, fresh_optimizer = train(shard=False, steps=1)
    with holdfast.CheckpointManager(tmp_path, {"model": fresh, "optimizer": fresh_optimizer}) as manager:
        assert manager.restore() == 2
        assert manager.steps() == [2]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
