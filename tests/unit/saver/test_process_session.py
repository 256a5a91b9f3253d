"""One-call saves of a process share its engine, plans and warm images, but nothing of the state."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.engine.shared import process_engine
from holdfast.saver import process_session as shared

WAIT_S = 60.0


def state_of(seed: int = 0, width: int = 64) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(width, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed, "table": torch.rand(600, 600)}


def weight_at(path: Path) -> torch.Tensor:
    found = holdfast.open(path).read("model.weight")
    assert isinstance(found, torch.Tensor)
    return found


def save(state: dict[str, Any], path: Path) -> None:
    holdfast.save(state, path)


def save_eagerly(state: dict[str, Any], path: Path) -> None:
    holdfast.async_save(state, path, staging="eager").result(WAIT_S)


def save_lazily(state: dict[str, Any], path: Path) -> None:
    handle = holdfast.async_save(state, path)
    handle.wait_staged(WAIT_S)
    handle.result(WAIT_S)


WAYS = [save, save_eagerly, save_lazily]


def work() -> tuple[int, int]:
    """Count the plans made, and the headers rendered into new images."""
    counts = holdfast.statistics()
    return counts["plans_made"], counts["headers_rendered"]


def images_kept() -> int:
    return sum(len(kept.buffers) for kept in shared.process_session()._kept.values())


def test_engine_stays_until_released(tmp_path: Path) -> None:
    holdfast.save(state_of(), tmp_path / "a")
    pid = process_engine().pid
    assert pid is not None
    holdfast.export_hf(nn.Linear(4, 4), tmp_path / "hf")
    with holdfast.CheckpointManager(tmp_path / "run", state_of()) as manager:
        manager.save(1)
    holdfast.save(state_of(), tmp_path / "b")
    assert process_engine().pid == pid
    holdfast.release()
    holdfast.release()
    assert process_engine().pid is None
    assert not os.path.exists(f"/proc/{pid}")
    holdfast.save(state_of(), tmp_path / "c")
    assert process_engine().pid not in (None, pid)


def test_manager_alone_keeps_no_engine(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, state_of()) as manager:
        manager.save(1)
    assert process_engine().pid is None


def test_killed_engine_is_replaced(tmp_path: Path) -> None:
    holdfast.save(state_of(), tmp_path / "a")
    host = process_engine()
    pid = host.pid
    assert pid is not None
    os.kill(pid, 9)
    with host.changed:
        assert host.changed.wait_for(lambda: host.pid is None, WAIT_S)
    holdfast.save(state_of(1), tmp_path / "b")
    assert host.pid not in (None, pid)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_plan_is_reused_from_the_second_and_image_from_the_third_save(
    way: Callable[[dict[str, Any], Path], None], tmp_path: Path
) -> None:
    before, told = work(), []
    for number in range(4):
        state = state_of(number)
        way(state, tmp_path / str(number))
        told.append(tuple(now - then for now, then in zip(work(), before, strict=True)))
        assert images_kept() == (0 if number == 0 or way is save else 1)  # a blocking save has none
        assert torch.equal(weight_at(tmp_path / str(number)), state["model"].weight)
    assert [plans for plans, _ in told] == [1, 1, 1, 1]
    rendered = told[0][1]
    assert [headers // rendered for _, headers in told] == ([1, 2, 3, 4] if way is save else [1, 2, 2, 2])
    for number in range(4):
        other = state_of(9)
        assert holdfast.load(other, tmp_path / str(number), verify=True)
        assert other["step"] == number
        assert torch.equal(other["table"], state_of(number)["table"])


def test_another_structure_gets_its_own_plan(tmp_path: Path) -> None:
    before = work()[0]
    for number, width in enumerate((64, 16, 64, 16, 64, 16)):
        state = state_of(number, width)
        save_eagerly(state, tmp_path / str(number))
        assert torch.equal(weight_at(tmp_path / str(number)), state["model"].weight)
    assert work()[0] - before == 2
    assert images_kept() == 2


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_tensor_outlives_its_owner(way: Callable[[dict[str, Any], Path], None], tmp_path: Path) -> None:
    for number in range(4):
        state = state_of(number)
        optimizer = state["optimizer"]
        alive = [weakref.ref(tensor) for tensor in state["model"].parameters()]
        alive += [weakref.ref(value) for kept in optimizer.state.values() for value in kept.values()]
        alive += [weakref.ref(state["table"]), weakref.ref(state["model"])]
        way(state, tmp_path / str(number))
        for thread in threading.enumerate():
            if thread.name == "holdfast-closer":
                thread.join(WAIT_S)
        del state, optimizer
        gc.collect()
        assert not [reference() for reference in alive if reference() is not None]


def test_saves_at_once_are_independent(tmp_path: Path) -> None:
    states = [state_of(number) for number in range(3)]
    for turn in range(3):
        handles = [
            holdfast.async_save(state, tmp_path / f"{turn}-{number}", staging="eager")
            for number, state in enumerate(states)
        ]
        (tmp_path / f"{turn}-taken").mkdir()
        (tmp_path / f"{turn}-taken" / "file").write_text("in the way")
        with pytest.raises(holdfast.CheckpointExists):
            holdfast.save(states[0], tmp_path / f"{turn}-taken")
        for number, handle in enumerate(handles):
            handle.result(WAIT_S)
            assert torch.equal(weight_at(tmp_path / f"{turn}-{number}"), states[number]["model"].weight)


def test_saves_from_callbacks_and_threads(tmp_path: Path) -> None:
    first, inner = state_of(1), state_of(2)
    for turn in range(3):
        done = threading.Event()

        def again(_handle: object, turn: int = turn, done: threading.Event = done) -> None:
            holdfast.save(inner, tmp_path / f"{turn}-inner")
            done.set()

        handle = holdfast.async_save(first, tmp_path / f"{turn}-outer")
        handle.add_done_callback(again)
        thread = threading.Thread(target=holdfast.save, args=(inner, tmp_path / f"{turn}-thread"))
        thread.start()
        handle.wait_staged(WAIT_S)
        handle.result(WAIT_S)
        thread.join(WAIT_S)
        assert done.wait(WAIT_S)
        assert torch.equal(weight_at(tmp_path / f"{turn}-outer"), first["model"].weight)
        for name in ("inner", "thread"):
            assert torch.equal(weight_at(tmp_path / f"{turn}-{name}"), inner["model"].weight)


def test_image_of_a_failed_save_is_not_kept(tmp_path: Path) -> None:
    state = state_of()
    for number in range(3):
        save_eagerly(state, tmp_path / str(number))
    assert images_kept() == 1
    handle = holdfast.async_save(state, tmp_path / "late")
    with torch.no_grad():
        state["model"].weight.add_(1.0)
    with pytest.raises(holdfast.StateChangedWhileStaging):
        handle.result(WAIT_S)
    assert images_kept() == 0
    holdfast.save(state, tmp_path / "after")
    assert torch.equal(weight_at(tmp_path / "after"), state["model"].weight)


def test_images_that_do_not_fit_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        save_eagerly(state_of(number), tmp_path / str(number))
    assert images_kept() == 1
    monkeypatch.setattr(shared, "_memory_left", lambda: 1 << 20)
    save_eagerly(state_of(2, width=16), tmp_path / "2")
    assert images_kept() == 0
    save_eagerly(state_of(3), tmp_path / "3")
    assert images_kept() == 0


def test_memory_left_is_the_minimum_of_machine_and_cgroups(tmp_path: Path) -> None:
    inner = tmp_path / "sys/fs/cgroup/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    assert shared._memory_left(str(tmp_path)) is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    assert shared._memory_left(str(tmp_path)) == 5000 * 1024
    for place, limit in ((inner, "max"), (inner.parent, "3000000")):
        (place / "memory.max").write_text(limit)
        (place / "memory.current").write_text("2000000")
        (place / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert shared._memory_left(str(tmp_path)) == 1_100_000


def test_release_in_flight_loses_nothing(tmp_path: Path) -> None:
    state = state_of()
    for number in range(2):
        holdfast.save(state, tmp_path / str(number))
    handle = holdfast.async_save(state, tmp_path / "in-flight", staging="eager")
    holdfast.release()
    handle.result(WAIT_S)
    assert images_kept() == 0
    for thread in threading.enumerate():
        if thread.name == "holdfast-closer":
            thread.join(WAIT_S)
    assert process_engine().pid is None
    assert torch.equal(weight_at(tmp_path / "in-flight"), state["model"].weight)


def test_forked_child_gets_its_own_session(tmp_path: Path) -> None:
    state = state_of()
    for number in range(2):
        save_eagerly(state, tmp_path / str(number))
    engine = process_engine().pid
    child = os.fork()
    if not child:
        code = 1
        try:
            assert images_kept() == 0
            assert process_engine().pid is None
            holdfast.save({"w": torch.arange(5)}, tmp_path / "child")
            assert process_engine().pid not in (None, engine)
            holdfast.release()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process_engine().pid == engine
    assert images_kept() == 1
    holdfast.save(state, tmp_path / "parent")
    assert torch.equal(weight_at(tmp_path / "parent"), state["model"].weight)
    assert holdfast.open(tmp_path / "child").tensors["w"].shape == (5,)
