"""What fails on one rank, at any step of a save or a load, is told to all; the next save and load are as ever.

In every combination of stock DCP and Holdfast (`dcp_ways`).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ways import OWN, STOCK, Behaviours, Way, blank, equal, numbers
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future
from worlds import mesh_of

import holdfast
from holdfast.dcp import Reader, Writer

behaviours = Behaviours()


def state() -> dict[str, Any]:
    rows = distribute_tensor(numbers(7, 3), mesh_of(2), [Shard(0)], src_data_rank=None)
    return {"rows": rows, "plain": numbers(5, seed=4), "epoch": 3}


def failing(base: Any, step: str, rank: int, *, late: bool = False) -> Any:
    """A kind of ``base`` whose ``step`` fails on ``rank``; ``late``: not before its future is looked at."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() != rank:
            return getattr(base, step)(self, *args, **kwargs)
        if not late:
            raise ValueError(f"{step} fails on rank {rank}")
        future: Future[Any] = Future()
        future.set_exception(ValueError(f"{step} fails on rank {rank}"))
        return future

    return type(f"Failing{base.__name__}", (base,), {step: fail})


def all_are_told(call: Any, rank: int, *words: str, kind: type[BaseException] | None = ValueError) -> None:
    with pytest.raises(CheckpointException) as raised:
        call()
    failures = raised.value.failures
    error = failures.pop(rank)[0]
    # A rank may still have been writing when the coordinator failed, and took away what it wrote to.
    assert all(rank == 0 and "coordinator" in str(other) for other, _ in failures.values()), failures
    assert kind is None or isinstance(error, kind), error
    assert all(word in str(error) for word in words), error
    dist.barrier()


def goes_well(way: Way, path: Path) -> None:
    dcp.save(state(), storage_writer=way.storage_writer(path))
    equal(way.load(blank(state()), path), state())
    dist.barrier()


# saving ----------------------------------------------------------------------------------------------------------

SAVE_STEPS = (
    *(("set_up_storage_writer", 0, False), ("set_up_storage_writer", 1, False), ("prepare_local_plan", 1, False)),
    *(("prepare_global_plan", 0, False), ("write_data", 1, False), ("write_data", 0, True), ("finish", 0, False)),
)


@behaviours(world=2, own=False)
def any_step_of_a_writer(way: Way) -> None:
    base: Any = FileSystemWriter if way.writer == STOCK else Writer
    for number, (step, rank, late) in enumerate(SAVE_STEPS):
        path = way.own_path(f"{number}")
        writer = failing(base, step, rank, late=late)(path)
        all_are_told(lambda writer=writer: dcp.save(state(), storage_writer=writer), rank, step)
        assert not (path / ".metadata").exists()
        goes_well(way, path)


@behaviours(world=2, own=False)
def any_step_of_a_save_planner(way: Way) -> None:
    steps = (("set_up_planner", 1), ("create_local_plan", 1), ("create_global_plan", 0), ("finish_plan", 1))
    for step, rank in (*steps, ("resolve_data", 0), ("resolve_data", 1)):
        path = way.own_path(f"{step}-{rank}")
        planner = failing(Named, step, rank)()
        all_are_told(
            lambda planner=planner, path=path: dcp.save(
                state(), storage_writer=way.storage_writer(path), planner=planner
            ),
            rank,
            kind=None,
        )
        assert not (path / ".metadata").exists()
        goes_well(way, path)


class Named(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


@behaviours(world=2, own=False)
def another_rank_coordinates(way: Way) -> None:
    """``save_state_dict`` and ``load_state_dict`` can be told so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        path, found = way.own_path("a"), blank(state())
        dcp.save_state_dict(state(), way.storage_writer(path), coordinator_rank=1)
        dcp.load_state_dict(found, way.storage_reader(path), coordinator_rank=1)
        equal(found, state())
        writer = failing(FileSystemWriter if way.writer == STOCK else Writer, "finish", 1)(way.own_path("b"))
        all_are_told(lambda: dcp.save_state_dict(state(), writer, coordinator_rank=1), 1, "finish")


# loading ---------------------------------------------------------------------------------------------------------

LOAD_STEPS = (
    *(("set_up_storage_reader", 0, False), ("set_up_storage_reader", 1, False), ("prepare_local_plan", 1, False)),
    *(("prepare_global_plan", 0, False), ("read_data", 1, False), ("read_data", 0, True)),
)


@behaviours(world=2, own=False)
def any_step_of_a_reader(way: Way) -> None:
    path = way.save(state())
    base: Any = FileSystemReader if way.reader == STOCK else Reader
    for step, rank, late in LOAD_STEPS:
        reader = failing(base, step, rank, late=late)(path)
        all_are_told(lambda reader=reader: dcp.load(blank(state()), storage_reader=reader), rank, step)
        equal(way.load(blank(state())), state())


@behaviours(world=2, own=False)
def any_step_of_a_load_planner(way: Way) -> None:
    path = way.save(state())
    steps = (("set_up_planner", 1), ("create_local_plan", 1), ("create_global_plan", 0), ("finish_plan", 1))
    for step, rank in (*steps, ("resolve_tensor", 1), ("commit_tensor", 0), ("load_bytes", 1)):
        planner = failing(DefaultLoadPlanner, step, rank)()
        all_are_told(
            lambda planner=planner: dcp.load(blank(state()), storage_reader=way.storage_reader(path), planner=planner),
            rank,
            step,
        )
        equal(way.load(blank(state())), state())


def everybody_refuses(way: Way, value: dict[str, Any], path: Path, *words: str) -> None:
    with pytest.raises((CheckpointException, holdfast.HoldfastError)) as raised:
        way.load(value, path)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    dist.barrier()


@behaviours(world=2)
def no_checkpoint_there(way: Way) -> None:
    everybody_refuses(way, blank(state()), way.own_path("missing"))
    way.save(state())
    equal(way.load(blank(state())), state())


@behaviours(world=2)
def names_that_only_one_rank_misses(way: Way) -> None:
    way.save(state())
    more = {"new": torch.zeros(2)} if dist.get_rank() == 1 else {}
    everybody_refuses(way, {**blank(state()), **more}, way.path(), "new")
    equal(way.load(blank(state())), state())


@behaviours(world=2)
def data_that_only_one_rank_needs(way: Way) -> None:
    """It is cut to nothing; whoever doesn't need it is told, too."""
    rank = dist.get_rank()
    path = way.save(state(), each=True)
    dist.barrier()
    if rank == 0:
        for file in path.glob("__1_*.distcp"):
            file.write_bytes(b"")
    dist.barrier()
    everybody_refuses(way, blank(state()), path)


@behaviours(world=2)
def values_that_cannot_be_kept(way: Way) -> None:
    """An object of a class that only the program knows, on one rank: stock can't pickle it, Holdfast doesn't either."""

    class Local:
        pass

    path, value = way.own_path("a"), {**state(), "bad": Local()}
    with pytest.raises((CheckpointException, holdfast.ConfigError), match=r"(?i)local"):
        way.save(value, each=True)
    dist.barrier()
    assert not (path / ".metadata").exists()
    if way.writer != OWN:
        goes_well(way, path)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return behaviours.outcomes(request, tmp_path_factory.mktemp("failures"))


@behaviours.every_case()
def test_failures(case: Any, outcomes: Any) -> None:
    behaviours.check(case, outcomes)
