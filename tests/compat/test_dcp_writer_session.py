"""`holdfast.dcp.Writer` writes by the engine of the process, through a few slots, and keeps nothing of a state."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import holdfast
from holdfast.dcp import Writer
from holdfast.engine.shared import process_engine
from holdfast.saver import process_session as shared
from holdfast.staging.stream import SLOT_BYTES, SLOTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
WAIT_S = 60.0
RING_BYTES = SLOTS * SLOT_BYTES


def engines() -> list[int]:
    """Processes of this one that are engines."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path("/proc", name, "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if parent == os.getpid() and b"holdfast.engine" in command:
            found.append(int(name))
    return found


_others: set[str] = set()
"""Images that tests before have left to a collector of garbage, which may not have come."""


@pytest.fixture(autouse=True)
def know_images_of_others() -> None:
    holdfast.release()
    gc.collect()
    _others.clear()
    _others.update(image_bytes())


def image_bytes() -> dict[str, int]:
    """Bytes of each image that this process has mapped since the test began, by inode."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "holdfast-image" in line:
            addresses, _, _, _, inode, *_ = line.split()
            start, stop = (int(part, 16) for part in addresses.split("-"))
            if inode not in _others:
                found[inode] = found.get(inode, 0) + stop - start
    return found


def large(seed: int = 0) -> dict[str, Any]:
    """96 MiB: several rings full; a tensor takes several slots, and is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {f"t{n}": torch.randn(3 << 20, generator=generator) for n in range(7)}
    return {**state, "turned": torch.randn(1500, 2000, generator=generator).t(), "small": torch.ones(3), "epoch": seed}


def small(seed: int = 0) -> dict[str, Any]:
    return {"weight": torch.full((300, 300), float(seed)), "epoch": seed}


def save(state: dict[str, Any], path: Path, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, **options), planner=planner, no_dist=True)


def assert_saved(path: Path, state: dict[str, Any]) -> None:
    found = holdfast.open(path)
    assert found.verify().ok
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found.read(name), value), name


class Looking(DefaultSavePlanner):
    """Calls ``look`` for each tensor that is asked for."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self.look = look
        self.asked: list[str] = []

    def resolve_data(self, write_item: Any) -> Any:
        self.asked.append(write_item.index.fqn)
        self.look()
        return super().resolve_data(write_item)


class OneBuffer(Looking):
    """Hands out one buffer for all."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.memory = torch.zeros(16 << 20, dtype=torch.uint8)

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        if not isinstance(value, torch.Tensor):
            return value
        return self.memory[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)


def test_all_kinds_of_calls_share_one_engine(tmp_path: Path) -> None:
    save(small(), tmp_path / "first")
    pid = process_engine().pid
    holdfast.save(small(), tmp_path / "save")
    holdfast.export_hf(nn.Linear(4, 4), tmp_path / "export")
    save(small(), tmp_path / "second")
    assert engines() == [pid]
    holdfast.release()
    assert engines() == []
    save(small(3), tmp_path / "third")
    assert_saved(tmp_path / "third", small(3))


def test_a_save_takes_a_few_slots_of_memory(tmp_path: Path) -> None:
    seen: list[int] = []
    state = large()
    planner = Looking(lambda: seen.append(sum(image_bytes().values())))
    save(state, tmp_path / "a", planner)
    assert 0 < max(seen) <= RING_BYTES
    assert_saved(tmp_path / "a", state)


def test_a_tensor_of_several_slots_is_asked_for_once(tmp_path: Path) -> None:
    planner, state = OneBuffer(), large()
    save(state, tmp_path / "a", planner)
    assert sorted(planner.asked) == sorted(state)
    assert_saved(tmp_path / "a", state)


def test_slots_stay_warm_from_the_second_save_on(tmp_path: Path) -> None:
    """One image in all from then on, shared with `holdfast.save`; none after `release`."""
    seen: list[dict[str, int]] = []
    for number in range(3):
        save(large(number), tmp_path / f"{number}", Looking(lambda: seen.append(image_bytes())))
        assert len(image_bytes()) == (0 if number == 0 else 1)
    kept = image_bytes()
    assert seen[-1] == kept
    holdfast.save(large(4), tmp_path / "save")
    assert image_bytes() == kept
    assert_saved(tmp_path / "save", large(4))
    holdfast.release()
    assert image_bytes() == {}


def test_slots_are_kept_within_what_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "IMAGE_BYTES_MAX", RING_BYTES - 1)
    for number in range(3):
        save(large(number), tmp_path / f"{number}")
    assert image_bytes() == {}


def test_no_tensor_outlives_its_owner(tmp_path: Path) -> None:
    for number in range(3):
        state = large(number)
        alive = [weakref.ref(value) for value in state.values() if isinstance(value, torch.Tensor)]
        save(state, tmp_path / f"{number}")
        del state
        gc.collect()
        assert not [reference() for reference in alive if reference() is not None]


def test_three_at_once_are_independent(tmp_path: Path) -> None:
    def one(number: int) -> None:
        for turn in range(2):
            save(large(number), tmp_path / f"{number}-{turn}")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(engines()) == 1
    for number in range(3):
        assert_saved(tmp_path / f"{number}-1", large(number))
    assert len(image_bytes()) <= 1


def test_a_killed_engine_fails_the_save_and_is_replaced(tmp_path: Path) -> None:
    state = large()

    def kill() -> None:
        asked.append(1)
        if len(asked) == 6:
            (engine,) = engines()
            os.kill(engine, signal.SIGKILL)

    planner, asked = Looking(kill), list[int]()
    with pytest.raises(CheckpointException) as raised:
        save(state, tmp_path / "a", planner)
    error = raised.value.failures[0][0]
    assert isinstance(error, holdfast.SaveFailed)
    assert isinstance(error.__cause__, holdfast.EngineDied)
    del planner, raised, error
    assert os.listdir(tmp_path) == []
    assert shared.process_session()._ring is None  # an engine may still have read it
    save(state, tmp_path / "a")
    assert_saved(tmp_path / "a", state)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        asked.append(1)
        if len(asked) == 5:
            raise KeyboardInterrupt

    planner, asked = Looking(interrupt), list[int]()
    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        save(large(), tmp_path / "a", planner)
    gc.collect()
    assert not (tmp_path / "a").exists()
    save(large(), tmp_path / "a")
    assert_saved(tmp_path / "a", large())


def test_a_forked_child_has_an_engine_of_its_own(tmp_path: Path) -> None:
    for number in range(2):
        save(small(number), tmp_path / f"{number}")
    engine = process_engine().pid
    child = os.fork()
    if not child:
        code = 1
        try:
            assert shared.process_session()._ring is None
            save({"w": torch.arange(5)}, tmp_path / "child")
            assert engines() == [process_engine().pid] != [engine]
            holdfast.release()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engines() == [engine]
    assert_saved(tmp_path / "child", {"w": torch.arange(5)})
    save(small(3), tmp_path / "parent")
    assert_saved(tmp_path / "parent", small(3))
