"""On which cores engines run: real processes, as the kernel shows their threads."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import holdfast
from holdfast import cores
from holdfast.cores import allowed_cores
from holdfast.engine.client import EngineClient
from holdfast.engine.shared import EngineHost
from holdfast.staging import image
from holdfast.testing.engine import Sample, persist

KB = 1 << 10
WAIT_S = 30
SLOW = 256 * KB
HERE = sorted(allowed_cores())
LAST = HERE[-1:]

pytestmark = pytest.mark.skipif(sys.platform != "linux" or len(HERE) < 2, reason="there is nothing to choose from")


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    sample = Sample([160 * KB])
    yield sample
    sample.close()


@pytest.fixture
def engines(sample: Sample, tmp_path: Path) -> Iterator[Callable[..., EngineClient]]:
    """Makes sessions on an engine that write the sample at once, for half a second; all are closed."""
    clients: list[EngineClient] = []

    def start(**options: object) -> EngineClient:
        client = EngineClient(len(clients), io_limit_bytes_per_s=SLOW, **options)  # type: ignore[arg-type]
        clients.append(client)
        target = tmp_path / f"engine-{client.rank}"
        target.mkdir()
        persist(client, target, *sample.register(client), f"t{client.rank}")
        wait_for(lambda: client.progress(f"t{client.rank}")[0] > 0)
        return client

    yield start
    for client in clients:
        client.close()


def children() -> list[int]:
    """Processes that this one has started."""
    return [child.pid for child in psutil.Process().children()]


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def cores_of_threads(pid: int | None) -> dict[str, str]:
    """The kernel's list for each thread of a process, by its number."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status") as file:
            (found[thread],) = (line.split()[1] for line in file if line.startswith("Cpus_allowed_list:"))
    return found


def as_listed(some: list[int]) -> str:
    first, last = some[0], some[-1]
    return str(first) if first == last else f"{first}-{last}" if last - first == len(some) - 1 else ",".join(
        map(str, some)
    )  # fmt: skip


def test_every_thread_of_an_engine_is_where_it_was_told_to_be(
    engines: Callable[..., EngineClient], sample: Sample, tmp_path: Path
) -> None:
    client = engines(cores=LAST)
    found = cores_of_threads(client.pid)
    assert len(found) >= 4, "control, attempt, lease, writers"
    assert set(found.values()) == {str(LAST[0])}
    assert os.sched_getaffinity(0) == set(HERE), "and the trainer's are where they were"
    client.wait_persisted("t0", WAIT_S)
    client.restart()
    client.wait_ready()
    wait_for(lambda: set(cores_of_threads(client.pid).values()) == {str(LAST[0])})


def test_by_default_nothing_is_bound_where_no_device_is_in_use(engines: Callable[..., EngineClient]) -> None:
    assert set(cores_of_threads(engines().pid).values()) == {as_listed(HERE)}


def test_by_default_an_engine_and_its_images_are_near_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of two nodes, one of them that of the last core and of the device."""
    monkeypatch.setattr(cores, "device_address", lambda: "0000:41:00.0")
    monkeypatch.setattr(cores, "_local_to", lambda *_: frozenset(LAST))
    monkeypatch.setattr(cores, "_nodes", lambda _: {0: frozenset(HERE[:-1]), 1: frozenset(LAST)})
    touched_from: list[set[int]] = []
    take_turns = image.take_turns

    def watched(work: object, threads: int) -> None:
        touched_from.append(os.sched_getaffinity(0))
        take_turns(work, threads)  # type: ignore[arg-type]

    monkeypatch.setattr(image, "take_turns", watched)
    state = {"w": torch.ones(1 << 16)}
    with holdfast.CheckpointManager(tmp_path / "run", state) as manager:
        manager.save(1).result(WAIT_S)
        bound = [set(cores_of_threads(pid).values()) for pid in children()]
    assert {str(LAST[0])} in bound
    assert touched_from == [set(LAST)]
    assert os.sched_getaffinity(0) == set(HERE)


def test_sessions_of_one_engine_have_cores_of_their_own(engines: Callable[..., EngineClient]) -> None:
    host = EngineHost()
    pid = engines(cores=HERE[:1], host=host).pid
    earlier = cores_of_threads(pid)
    assert set(earlier.values()) == {str(HERE[0])}
    second = engines(cores=LAST, host=host)
    assert second.pid == pid
    now = cores_of_threads(pid)
    assert {now[thread] for thread in earlier.keys() & now.keys() - {str(pid)}} == {str(HERE[0])}
    assert {now[thread] for thread in now.keys() - earlier.keys()} == {str(LAST[0])}
    before = cores_of_threads(pid)
    engines(cores="any", host=host)
    after = cores_of_threads(pid)
    assert {after[thread] for thread in after.keys() - before.keys()} == {as_listed(HERE)}, "not the others'"


def test_a_manager_gives_each_delivery_cores_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    slow = {"io_limit_bytes_per_s": 1 << 20}
    config = holdfast.CheckpointConfig(every=1, cores=LAST, **slow)
    export = holdfast.HFExport(tmp_path / "hf", every=1, assets=tmp_path / "source", cores=HERE[:1], **slow)
    state = {"model": torch.nn.Linear(300, 400)}
    with holdfast.CheckpointManager(tmp_path / "run", state, config=config, exports=[export]) as manager:
        handles = manager.step(1)
        seen: set[str] = set()
        while not all(handle.done() for handle in handles):
            for pid in children():
                try:
                    seen |= set(cores_of_threads(pid).values())
                except (FileNotFoundError, ProcessLookupError, ValueError):
                    continue  # it, or a thread of it, has ended
            time.sleep(0.02)
        for handle in handles:
            handle.result(WAIT_S)
    assert {str(LAST[0]), str(HERE[0])} <= seen


def test_cores_that_cannot_be_used_are_an_error_before_anything_is_touched(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(holdfast.ConfigError, match=r"CheckpointConfig\.cores: expected"):
        holdfast.CheckpointConfig(cores=[-1])
    config = holdfast.CheckpointConfig(cores=[HERE[0], 8191])
    with pytest.raises(holdfast.ConfigError, match=r"cores: this process may not use 8191: it may use") as caught:
        holdfast.CheckpointManager(tmp_path / "run", {"w": torch.ones(8)}, config=config)
    assert caught.value.field == "cores"
    export = holdfast.HFExport(tmp_path / "hf", cores=[8191])
    with pytest.raises(holdfast.ConfigError, match="may not use 8191"):
        holdfast.CheckpointManager(tmp_path / "run", {"model": torch.nn.Linear(2, 2)}, exports=[export])
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "hf").exists()
    assert children() == before
    with holdfast.CheckpointManager(
        tmp_path / "run", {"w": torch.ones(8)}, config=holdfast.CheckpointConfig(cores=[8191], load_only=True)
    ) as reader:  # it starts no engine
        assert reader.steps() == []


def test_cores_that_have_gone_meanwhile_are_said_and_the_save_goes_on(
    engines: Callable[..., EngineClient],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("holdfast.engine.client.usable_cores", lambda _: (8191,))
    with caplog.at_level(logging.WARNING, "holdfast.engine"):
        client = engines(cores=[8191])
        client.wait_persisted("t0", WAIT_S)
        wait_for(lambda: "can't be bound to 8191" in caplog.text)
    assert caplog.text.count("can't be bound") == 1
