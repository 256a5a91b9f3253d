"""Restoring, saving twice, pinning and extending a run on several ranks: the same on every rank, at the same call."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.tensor import Shard, distribute_tensor
from worlds import mesh_of

import holdfast
from holdfast import CheckpointConfig, CheckpointManager, Keep
from holdfast.errors import CheckpointCorrupt, CheckpointExists, CheckpointNotFound, StateChangedWhileStaging
from holdfast.testing.staging import held_copies

TIMEOUT_S = 40.0
SOON_S = 15.0


def state_of(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(8, 4, bias=False)
    full = torch.full((4, 8), value)
    model.weight = torch.nn.Parameter(distribute_tensor(full, mesh_of(2), [Shard(0)], src_data_rank=None))
    return {"model": model}


def fill(state: dict[str, Any], value: float) -> None:
    with torch.no_grad():
        state["model"].weight.fill_(value)


def value_of(state: dict[str, Any]) -> list[float]:
    return state["model"].weight.detach().to_local().unique().tolist()


def manager_of(root: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    limits = {"stage_timeout": TIMEOUT_S, "persist_timeout": TIMEOUT_S, "commit_timeout": TIMEOUT_S}
    exports = options.pop("exports", ())
    config = CheckpointConfig(**{"keep": None, "every": None, **limits, **options})
    return CheckpointManager(root, state, config=config, exports=exports)


def told_alike(act: Callable[[], Any]) -> Any:
    """What ``act`` returns or raises, by type and step: the same on every rank, soon."""
    dist.barrier()
    began = time.monotonic()
    try:
        outcome: Any = act()
        told = "returned"
    except holdfast.HoldfastError as error:
        outcome, told = error, f"{type(error).__name__}: {str(error).removeprefix('on rank 0: ')}"
    assert time.monotonic() - began < SOON_S
    seen: list[Any] = [None, None]
    dist.all_gather_object(seen, told)
    assert seen[0] == seen[1], seen
    return outcome


def late_on_rank_1(gate: Any) -> None:
    if dist.get_rank() == 1:
        time.sleep(0.5)
    gate.open()


# saving what is there ------------------------------------------------------------------------------------------------


def a_step_is_saved_twice(place: str) -> None:
    root, state = Path(place), state_of(1.0)
    with manager_of(root, state) as manager:
        manager.save(1).result()
        assert isinstance(told_alike(lambda: manager.save(1)), CheckpointExists)
        in_flight = manager.save(2)
        assert isinstance(told_alike(lambda: manager.save(2)), CheckpointExists)
        assert in_flight.done()
        assert manager.save(2, final=True) is in_flight
        if dist.get_rank() == 0:
            (root / "step-3").mkdir()
            (root / "step-3" / "notes.txt").write_text("mine")
        dist.barrier()
        handle = told_alike(lambda: manager.save(3))  # nobody could know: it fails on every rank
        assert isinstance(handle.exception(TIMEOUT_S), CheckpointExists)
        told_alike(manager.wait)
        # By now it is known: refused at the call, also as the last save.
        assert isinstance(told_alike(lambda: manager.save(3, final=True)), CheckpointExists)
        manager.save(4).result()
    with manager_of(root, state, every=1) as manager:
        for act in (lambda: manager.save(4), lambda: manager.step(1), lambda: manager.save(2, final=True)):
            assert isinstance(told_alike(act), CheckpointExists)
        assert manager.restore() == 4
        assert isinstance(told_alike(lambda: manager.save(4)), CheckpointExists)
        manager.restore(1)
        manager.save(2).result()
        assert isinstance(told_alike(lambda: manager.step(2)), CheckpointExists)
        assert manager.latest() == 2


def a_save_that_one_rank_spoils_is_tried_again(place: str) -> None:
    root, state = Path(place), state_of(1.0)
    with manager_of(root, state) as manager:
        with held_copies(opens_for_updates=False), torch.no_grad():
            handle = manager.save(1)
            if dist.get_rank() == 1:
                state["model"].weight.to_local().add_(1)
        assert isinstance(handle.exception(TIMEOUT_S), StateChangedWhileStaging)
        told_alike(manager.wait)
        told_alike(lambda: manager.save(1)).result()
        assert manager.steps() == [1]


def pins_are_refused_alike(place: str) -> None:
    root, state = Path(place), state_of(1.0)
    with manager_of(root, state, keep=Keep(last=1)) as manager:
        manager.save(1).result()
        told_alike(lambda: manager.pin(1))
        assert isinstance(told_alike(lambda: manager.pin(5)), CheckpointNotFound)
        if dist.get_rank() == 0:
            (root / ".holdfast" / "pins" / "2").mkdir()
        dist.barrier()
        assert isinstance(told_alike(lambda: manager.unpin(2)), holdfast.errors.StorageError)
        manager.save(2).result()
        manager.save(3).result()
        assert 1 in manager.steps()
        told_alike(lambda: manager.unpin(1))


def saving_twice(place: str) -> None:
    a_step_is_saved_twice(f"{place}/twice")
    a_save_that_one_rank_spoils_is_tried_again(f"{place}/spoilt")
    pins_are_refused_alike(f"{place}/pins")


def test_a_step_that_is_there_is_refused_on_every_rank_at_the_same_call(tmp_path: Path) -> None:
    run_job(saving_twice, nproc=2, args=[tmp_path])


# going back -----------------------------------------------------------------------------------------------------------


def saves_are_in_flight(place: str) -> None:
    root, state = Path(place), state_of(1.0)
    with manager_of(root, state, in_flight=2, keep=Keep(last=2)) as manager:
        manager.save(100).result()
        fill(state, 2.0)
        with held_copies(opens_for_updates=False) as gate:
            handles = [manager.save(200), manager.save(300)]
            late_on_rank_1(gate)
            assert told_alike(lambda: manager.restore(100)) == 100
        assert value_of(state) == [1.0]
        assert all(handle.done() and handle.exception() is None for handle in handles)
        fill(state, 3.0)
        manager.save(150).result()
        fill(state, 4.0)
        with held_copies(opens_for_updates=False) as gate:
            newest = manager.save(160)
            late_on_rank_1(gate)
            assert told_alike(manager.restore) == 160
        assert (newest.done(), value_of(state), manager.latest()) == (True, [4.0], 160)
    with manager_of(root, state) as manager:
        assert manager.restore() == 160
    if dist.get_rank() == 0:
        assert holdfast.open(root / "step-160").read("model.weight").unique().tolist() == [4.0]
    dist.barrier()


def a_load_comes_while_one_rank_is_still_copying(place: str) -> None:
    state = state_of(1.0)
    holdfast.save(state, Path(place, "ones"))
    fill(state, 2.0)
    with held_copies(opens_for_updates=False) as gate:
        handle = holdfast.async_save(state, Path(place, "twos"))
        late_on_rank_1(gate)
        holdfast.load(state, Path(place, "ones"))
    assert value_of(state) == [1.0]
    assert handle.result().read("model.weight").unique().tolist() == [2.0]


def a_run_is_extended(place: str) -> None:
    root, state = Path(place), state_of(1.0)
    with manager_of(root, state, last_model_only=True) as manager:
        for step in (1, 2):
            manager.save(step).result()
        fill(state, 3.0)
        manager.save(3, final=True)
    with manager_of(root, state, every=1, keep=Keep(last=1), last_model_only=True) as manager:
        assert told_alike(manager.restore) == 2
        assert told_alike(lambda: manager.step(3)) == []
        assert isinstance(told_alike(lambda: manager.save(3)), CheckpointExists)
        for step in (4, 5):
            (handle,) = told_alike(lambda step=step: manager.step(step))
            handle.result()
        dist.barrier()  # retention is rank 0's, and done when its handle has ended
        assert manager.steps() == [3, 5]
        assert holdfast.open(root / "step-3").read("model.weight").unique().tolist() == [3.0]
        dist.barrier()
        told_alike(lambda: manager.save(6, final=True))
        assert manager.steps() == [3, 5, 6]


def a_root_has_nothing_to_resume_from(place: str) -> None:
    root, state = Path(place), state_of(1.0)
    with manager_of(root, state, name_template="old-{step}") as manager:
        manager.save(1).result()
    with manager_of(root, state) as manager, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert told_alike(manager.restore) is None
    assert any("old-1 (of step 1" in str(warning.message) for warning in told), told
    with manager_of(root, state, on_corrupt="raise") as manager:
        assert isinstance(told_alike(manager.restore), CheckpointCorrupt)


def going_back(place: str) -> None:
    saves_are_in_flight(f"{place}/flights")
    a_load_comes_while_one_rank_is_still_copying(f"{place}/load")
    a_run_is_extended(f"{place}/extended")
    a_root_has_nothing_to_resume_from(f"{place}/nothing")


def test_ranks_go_back_together(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "load")
    run_job(going_back, nproc=2, args=[tmp_path])
