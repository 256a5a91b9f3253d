"""Saves that go on after the call: on a thread, in a process, by stagers of all kinds.

In every combination of stock DCP and Holdfast (`dcp_ways`); Holdfast's own is `holdfast.async_save`. Left out are
``BlockingAsyncStager`` and staging in the background, which ask for an accelerator.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ways import FOUR, OWN, TIMEOUT_S, Behaviours, Way, blank, equal, numbers
from torch.distributed.checkpoint import CheckpointException, _async_process_executor, staging
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import mesh_of

import holdfast

behaviours = Behaviours()


def state(number: int = 0) -> dict[str, Any]:
    mesh = mesh_of(2)
    return {
        "rows": distribute_tensor(numbers(7, 3) + number, mesh, [Shard(0)], src_data_rank=None),
        "copies": distribute_tensor(numbers(4, seed=3) + number, mesh, [Replicate()], src_data_rank=None),
        "plain": numbers(5, seed=4) + number,
        "epoch": number,
    }


def change(value: dict[str, Any]) -> None:
    for item in value.values():
        if isinstance(item, torch.Tensor):
            (item.to_local() if hasattr(item, "to_local") else item).fill_(77)
    value["epoch"] = 77


def start(way: Way, value: dict[str, Any], path: Path, **options: Any) -> Callable[[], Any]:
    """Start a save; returns what waits for it. The state may be changed when this returns."""
    if way.writer == OWN:
        return holdfast.async_save(value, path, staging="eager", **options).result
    response = dcp.async_save(value, storage_writer=way.storage_writer(path), **options)
    if hasattr(response, "staging_completion"):
        response.staging_completion.result(TIMEOUT_S)
    future = getattr(response, "upload_completion", response)
    return lambda: future.result(TIMEOUT_S)


@behaviours(world=2)
def on_a_thread(way: Way) -> None:
    path = way.own_path("a")
    start(way, state(), path)()
    equal(way.load(blank(state()), path), state())


@behaviours(world=2)
def what_changes_afterwards_is_not_saved(way: Way) -> None:
    path, value = way.own_path("a"), state()
    wait = start(way, value, path)
    change(value)
    wait()
    equal(way.load(blank(state()), path), state())


@behaviours(world=2)
def one_after_the_other(way: Way) -> None:
    for number in range(3):
        start(way, state(number), way.own_path(f"{number}"))()
    for number in range(3):
        equal(way.load(blank(state()), way.own_path(f"{number}")), state(number))


@behaviours(world=4)
def by_some_of_the_ranks(way: Way) -> None:
    group = dist.new_group([1, 3])
    path, value = way.own_path("a"), {"x": numbers(5), "n": 3}
    if dist.get_rank() in (1, 3):
        start(way, value, path, process_group=group)()
    dist.barrier()
    equal(way.load(blank(value), path), value)


@behaviours(world=1)
def without_other_ranks(way: Way) -> None:
    path, value = way.own_path("a"), {"x": numbers(5), "n": 3}
    start(way, value, path)()
    equal(way.load(blank(value), path), value)


@behaviours(world=2, own=False)
def one_writer_and_a_stager_that_keeps_its_memory(way: Way) -> None:
    if not hasattr(staging, "DefaultStager"):
        return  # this torch stages in another way
    for shared in (False, True):
        stager = staging.DefaultStager(staging.StagingOptions(False, shared, False, False))
        writer = way.storage_writer(way.own_path("unused"))
        for number in range(3):
            value, path = state(number), way.own_path(f"{shared}-{number}")
            future = dcp.async_save(value, storage_writer=writer, checkpoint_id=path, async_stager=stager)
            getattr(future, "upload_completion", future).result(TIMEOUT_S)
            equal(way.load(blank(value), path), value)
        stager.close()


class Stager:
    """A stager of the user's own: copies, and notes that it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    should_synchronize_after_execute = True

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.calls.append("stage")
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        self.calls.append("synchronize")

    def close(self) -> None:
        self.calls.append("close")


@behaviours(world=2, own=False)
def stagers_of_the_users_own(way: Way) -> None:
    if "async_stager" not in inspect.signature(dcp.async_save).parameters:
        return
    stager, path = Stager(), way.own_path("a")
    start(way, state(), path, async_stager=stager)()
    assert stager.calls == ["stage", "synchronize"]
    equal(way.load(blank(state()), path), state())


class Fails(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("this item is not to be had")
        return super().resolve_data(write_item)


@behaviours(world=2, own=False)
def a_failure_is_told_by_the_future(way: Way) -> None:
    """To all ranks; the next save is as ever."""
    path = way.own_path("a")
    with pytest.raises(CheckpointException, match="not to be had") as raised:
        start(way, state(), path, planner=Fails())()
    assert set(raised.value.failures) == {1}
    start(way, state(), path)()
    equal(way.load(blank(state()), path), state())


@behaviours(world=2, own=False)
def in_a_process(way: Way) -> None:
    """Two saves in the same one, and a third after one that failed there."""
    kind = AsyncCheckpointerType.PROCESS
    try:
        for number in range(2):
            path = way.own_path(f"{number}")
            start(way, state(number), path, async_checkpointer_type=kind)()
            equal(way.load(blank(state()), path), state(number))
        with pytest.raises(CheckpointException, match="not to be had"):
            start(way, state(), way.own_path("failed"), planner=Fails(), async_checkpointer_type=kind)()
        start(way, state(5), way.own_path("5"), async_checkpointer_type=kind)()
        equal(way.load(blank(state()), way.own_path("5")), state(5))
    finally:
        if (way.writer, way.reader) == FOUR[-1]:
            _async_process_executor._CHECKPOINT_PROCESS = None  # which ends it
            gc.collect()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return behaviours.outcomes(request, tmp_path_factory.mktemp("async"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@behaviours.every_case()
def test_async(case: Any, outcomes: Any) -> None:
    behaviours.check(case, outcomes)
