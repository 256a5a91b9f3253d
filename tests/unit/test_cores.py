"""Which cores are near a device, and which may be chosen: from a machine that is only described, and this one."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from holdfast import cores
from holdfast.errors import ConfigError
from holdfast.staging.image import Image

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen on Linux")
EIGHT = frozenset(range(8))
GPU = "0000:41:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """Two nodes of four cores and one of memory only; a device near the second."""
    nodes = tmp_path / "devices" / "system" / "node"
    for name, cpulist in {"node0": "0-1,4-5\n", "node1": "2-3,6-7\n", "node2": "\n"}.items():
        (nodes / name).mkdir(parents=True)
        (nodes / name / "cpulist").write_text(cpulist)
    (nodes / "online").write_text("0-2\n")
    (nodes / "power").mkdir()
    device = tmp_path / "bus" / "pci" / "devices" / GPU
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("2-3,6-7\n")
    return str(tmp_path)


def test_the_kernels_lists_are_read() -> None:
    assert cores.parse_cores("0-2,7\n") == {0, 1, 2, 7}
    assert cores.parse_cores("\n") == frozenset()
    with pytest.raises(ValueError, match="x"):
        cores.parse_cores("0-x")


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (EIGHT, (2, 3, 6, 7)),
        ({1, 2, 3}, (2, 3)),
        ({2, 6}, ()),  # all of them are near already
        ({0, 1}, ()),  # the launcher has bound it elsewhere: its word counts
    ],
)
def test_the_cores_near_a_device_are_those_of_its_node_that_may_be_used(
    machine: str, allowed: set[int], expected: tuple[int, ...]
) -> None:
    assert cores.near_device(GPU, allowed, machine) == expected


def test_what_is_not_known_changes_nothing(machine: str, tmp_path: Path) -> None:
    assert cores.near_device("0000:99:00.0", EIGHT, machine) == ()
    assert cores.near_device(GPU, EIGHT, str(tmp_path / "nothing")) == ()
    odd = tmp_path / "bus" / "pci" / "devices" / "0000:42:00.0"
    odd.mkdir()
    (odd / "local_cpulist").write_text("what")
    assert cores.near_device("0000:42:00.0", EIGHT, machine) == ()
    (odd / "local_cpulist").write_text("0-7")  # a machine of one node, or one that doesn't say which
    assert cores.near_device("0000:42:00.0", EIGHT, machine) == ()


@pytest.mark.parametrize(
    ("chosen", "allowed", "expected"),
    [
        ({3}, EIGHT, (2, 3, 6, 7)),  # of its node, for there are more to touch memory
        ({3}, {1, 3, 7}, (3, 7)),
        ({0, 3}, EIGHT, ()),  # of both nodes: anywhere
        ({99}, EIGHT, ()),
    ],
)
def test_memory_is_touched_from_the_node_of_the_cores(
    machine: str, chosen: set[int], allowed: set[int], expected: tuple[int, ...]
) -> None:
    assert cores.beside(chosen, allowed, machine) == expected


def test_a_machine_of_one_node_needs_no_care(tmp_path: Path) -> None:
    (tmp_path / "devices" / "system" / "node" / "node0").mkdir(parents=True)
    (tmp_path / "devices" / "system" / "node" / "node0" / "cpulist").write_text("0-7")
    assert cores.beside({3}, EIGHT, str(tmp_path)) == ()
    assert cores.beside({3}, EIGHT, str(tmp_path / "nothing")) == ()


class _Properties:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x41, 0


def test_automatically_they_are_those_near_the_current_cuda_device(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cores.usable_cores("auto", system=machine) == (), "no device is in use"
    monkeypatch.setattr(cores, "allowed_cores", lambda: EIGHT)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {3: _Properties}[device])
    assert cores.usable_cores("auto", system=machine) == (2, 3, 6, 7)
    assert cores.usable_cores("any", system=machine) == ()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: object())  # an older torch
    assert cores.usable_cores("auto", system=machine) == ()


@pytest.mark.parametrize("wrong", ["near", [], [-1], [0.5], [True], 3, None, "0-3", [1 << 20]])
def test_what_are_no_cores_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="cores: expected 'auto', 'any' or numbers") as caught:
        cores.usable_cores(wrong)  # type: ignore[arg-type]
    assert caught.value.field == "cores"


def test_cores_that_this_process_may_not_use_are_refused_and_those_it_may_named() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert cores.usable_cores([mine[-1], mine[-1]]) == (mine[-1],)
    with pytest.raises(ConfigError, match=rf"may not use 8000-8001: it may use {mine[0]}"):
        cores.usable_cores([mine[0], 8001, 8000])
    if len(mine) > 1:
        code = (
            "import os, sys\nfrom holdfast.cores import usable_cores\n"
            f"os.sched_setaffinity(0, [{mine[0]}])\nusable_cores([{mine[1]}])"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"may not use {mine[1]}: it may use {mine[0]} " in ended.stderr, ended.stderr


def test_one_bound_thread_does_not_narrow_the_process() -> None:
    """OpenMP binds single threads, often the one that makes a manager."""
    mine = sorted(os.sched_getaffinity(0))
    found: list[frozenset[int]] = []

    def look() -> None:
        os.sched_setaffinity(0, mine[:1])
        found.append(cores.allowed_cores())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [frozenset(mine)]


def test_a_block_that_is_bound_leaves_the_thread_as_it_was() -> None:
    mine = os.sched_getaffinity(0)
    core = max(mine)
    inside: list[set[int]] = []

    def work() -> None:
        inside.append(os.sched_getaffinity(0))
        thread = threading.Thread(target=lambda: inside.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        raise KeyError("work")

    with cores.from_cores([core]), pytest.raises(KeyError):
        work()
    assert inside == [{core}, {core}]
    assert os.sched_getaffinity(0) == mine
    with cores.from_cores([8000]):  # gone meanwhile: it works elsewhere
        assert os.sched_getaffinity(0) == mine
    assert "can't be bound to 8000" in str(cores.bind([8000]))


def test_an_image_is_touched_from_near_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sorted(os.sched_getaffinity(0))
    touched_from: list[set[int]] = []
    import holdfast.staging.image as module

    take_turns = module.take_turns

    def watched(work: object, threads: int) -> None:
        touched_from.append(os.sched_getaffinity(0))
        take_turns(work, threads)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "take_turns", watched)
    monkeypatch.setattr(cores, "_nodes", lambda _: {0: frozenset(mine[:-1]), 1: frozenset(mine[-1:])})
    for chosen in ((), mine[-1:], mine):
        image = Image(1 << 20)
        image.warm_up(chosen)
        assert int(image.bytes_view.sum()) == 0
        image.close()
    expected = [set(mine), set(mine[-1:]), set(mine)] if len(mine) > 1 else [set(mine)] * 3
    assert touched_from == expected
    assert os.sched_getaffinity(0) == set(mine)


class _Memory:
    pass


@pytest.mark.parametrize("threads", [1, 3])
def test_what_failed_jobs_had_is_free_as_soon_as_the_error_is(threads: int) -> None:
    """Without the cyclic collector, which trainers switch off: a version of the weights would stay in memory."""
    alive: weakref.ReferenceType[_Memory]

    def fail() -> None:
        nonlocal alive
        memory = _Memory()
        alive = weakref.ref(memory)

        def job() -> None:
            raise ValueError(memory)

        cores.take_turns([job] * 4, threads)

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            fail()
        deadline = time.monotonic() + 10.0
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.01)  # threads that end
        assert alive() is None
    finally:
        gc.enable()
