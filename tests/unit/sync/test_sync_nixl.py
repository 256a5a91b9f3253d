"""NIXL as a transport of weight versions: without it a clear error, with it versions from memory to memory.

What all transports over blocks must do is tried with NIXL in test_version_blocks.py and test_receivers_serve.py.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast import events
from holdfast.errors import ConfigError, PeerLost
from holdfast.sync import NixlTransport, ProcessGroupTransport, Publisher, Receiver
from holdfast.sync.transports import nixl
from holdfast.sync.transports.nixl import NixlAgent, NixlOffer
from holdfast.sync.versions.reads import MemoryReadFailed

TIMEOUT_S = 30.0
MIB = 1 << 20
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: pip install 'holdfast[nixl]'")


def weights(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {name: torch.randn(rows, 1024, generator=made) for name, rows in (("w", 700), ("v", 1), ("u", 2000))}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def same(found: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("nixl", "nixl._api", "nixl._bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    nixl.imported.cache_clear()
    yield
    nixl.imported.cache_clear()


@pytest.mark.usefixtures("without_nixl")
def test_without_nixl_the_transport_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[nixl\]'.*SharedMemoryTransport") as caught:
        NixlTransport(tmp_path)
    assert caught.value.field == "transport"
    assert isinstance(caught.value.__cause__, ImportError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"device": "meta"}, "device"),
        ({"device": "cuda"}, "device"),
        ({"peer_timeout_s": 0}, "peer_timeout_s"),
        ({"rendezvous": None}, "rendezvous"),
    ],
)
def test_what_cannot_be_is_a_named_error_with_nixl_and_without(
    tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        NixlTransport(**{"rendezvous": tmp_path, **options})
    assert caught.value.field == field


# with NIXL --------------------------------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < ends_s, threading.enumerate()
        time.sleep(0.01)


@needs_nixl
def test_versions_arrive_and_nothing_is_left_behind(tmp_path: Path) -> None:
    files: list[int] = []
    for life in range(6):
        transport = NixlTransport(tmp_path)
        with Publisher(transport) as publisher, Receiver(transport) as first:
            into, other = zeros(), zeros()
            for version in (3 * life + 1, 3 * life + 2):
                publisher.publish(weights(version), version)
                assert first.receive(into, timeout=TIMEOUT_S, streaming=bool(version % 2)) == version
                assert same(into, version)
            with Receiver(transport) as second:
                version = 3 * life + 3
                publisher.publish(weights(version), version)
                assert first.receive(into, timeout=TIMEOUT_S) == second.receive(other, timeout=TIMEOUT_S) == version
                assert same(into, version)
                assert same(other, version)
        del publisher, first, second
        gc.collect()
        files.append(open_files())
    # UCX keeps some of its own, once; memory that was registered goes a moment after its agent.
    wait_until(lambda: gc.collect() >= 0 and open_files() <= min(files[2:]))
    wait_until(lambda: not any(thread.name.startswith("holdfast-sync") for thread in threading.enumerate()))


@needs_nixl
def test_the_bytes_do_not_pass_through_the_publishers_sockets(tmp_path: Path) -> None:
    with Publisher(NixlTransport(tmp_path)) as publisher, Receiver(NixlTransport(tmp_path)) as receiver:
        publisher.publish(weights(1), 1)
        before, into = events.statistics(), zeros()
        assert receiver.receive(into, timeout=TIMEOUT_S) == 1
        moved = {name: events.statistics()[name] - before[name] for name in ("sync_bytes_sent", "sync_bytes_brought")}
    assert same(into, 1)
    assert moved["sync_bytes_sent"] == 0
    assert moved["sync_bytes_brought"] >= sum(tensor.nbytes for tensor in weights(0).values())


@needs_nixl
@pytest.mark.parametrize("kinds", [(NixlTransport, ProcessGroupTransport), (ProcessGroupTransport, NixlTransport)])
def test_one_side_without_nixl_reads_over_tcp(tmp_path: Path, kinds: tuple[Any, Any]) -> None:
    with Publisher(kinds[0](tmp_path)) as publisher, Receiver(kinds[1](tmp_path)) as receiver:
        publisher.publish(weights(1), 1)
        into = zeros()
        assert receiver.receive(into, timeout=TIMEOUT_S) == 1
        assert same(into, 1)


PUBLISH = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from test_sync_nixl import weights
from holdfast.sync import NixlTransport, Publisher
publisher = Publisher(NixlTransport(sys.argv[1]))
publisher.publish(weights(1), 1)
print("published", flush=True)
sys.stdin.read()
"""


@needs_nixl
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_publisher_that_is_killed_or_stopped_is_lost_within_its_timeout(tmp_path: Path, how: signal.Signals) -> None:
    """And what was fetched before that can be committed."""
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISH, str(tmp_path / "meet"), os.path.dirname(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "published\n"
        into, transport = zeros(), NixlTransport(tmp_path / "meet", peer_timeout_s=2.0)
        with Receiver(transport, into) as first, Receiver(transport, zeros()) as second:
            wait_until(lambda: first.poll() == 1)
            wait_until(lambda: second.poll() == 1)
            first.fetch(1, timeout=TIMEOUT_S)
            process.send_signal(how)
            began = time.monotonic()
            with pytest.raises((PeerLost, TimeoutError)):
                second.fetch(1, timeout=5.0)
            assert time.monotonic() - began < 10
            first.commit()
            assert same(into, 1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def agents() -> Iterator[tuple[NixlAgent, NixlAgent]]:
    made = NixlAgent(), NixlAgent()
    yield made
    for agent in made:
        agent.close()
        agent.close()


def pattern(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).mul_(7).to(torch.uint8)


@needs_nixl
def test_what_is_no_offer_is_a_named_error_and_the_agent_stays_of_use(agents: tuple[NixlAgent, NixlAgent]) -> None:
    there, here = agents
    source, into = pattern(MIB), torch.zeros(MIB, dtype=torch.uint8)
    there.register(source)
    here.register(into)
    told = there.offer(source)
    wrong = msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(told, type=NixlOffer), agent="none", metadata=b"nonsense")
    )
    for offered in (b"", b"nonsense", wrong):
        with pytest.raises(MemoryReadFailed):
            here.read(offered, 0, into, lambda: None)
    for start in (-1, 1):
        with pytest.raises(MemoryReadFailed, match="offers 1048576 bytes"):
            here.read(told, start, into, lambda: None)
    here.read(told, 5, into[10:5000], lambda: None)
    assert torch.equal(into[10:5000], source[5:4995])
    assert not into[:10].any()
    assert not into[5000:].any()


@needs_nixl
def test_memory_that_is_registered_later_is_read_beside_reads_of_earlier_memory(
    agents: tuple[NixlAgent, NixlAgent],
) -> None:
    there, here = agents
    into = torch.zeros(8, 4 * MIB, dtype=torch.uint8)
    here.register(into)
    sources = []

    def read(number: int) -> None:
        source = pattern(4 * MIB) + number
        sources.append(source)
        there.register(source)
        told = there.offer(source)
        for _ in range(10):
            here.read(told, 0, into[number], lambda: None)
        assert torch.equal(into[number], source)
        if number % 2:
            there.deregister(source)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(read, number) for number in range(8)]:
            done.result(TIMEOUT_S)


class CutOffError(Exception):
    pass


@needs_nixl
def test_a_read_that_does_not_end_is_cut_off_and_its_memory_outlives_it(
    agents: tuple[NixlAgent, NixlAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = agents
    source, into, other = pattern(MIB), torch.zeros(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    there.register(source)
    here.register(into)
    here.register(other)
    monkeypatch.setattr(there, "drive", lambda: None)  # not even a connection comes about
    told = there.offer(source)
    ends_s = time.monotonic() + 0.2

    def check() -> None:
        if time.monotonic() > ends_s:
            raise CutOffError

    with pytest.raises(CutOffError):
        here.read(told, 0, into, check)
    assert not here.is_quiet(into)
    assert here.is_quiet(other)
    here.deregister(into)  # only once nothing is read into it any more
    assert into.data_ptr() in here._memory
    with pytest.raises(MemoryReadFailed, match="cut off"):
        here.read(told, 0, other, lambda: None)
    here.close()
    with pytest.raises(MemoryReadFailed, match="closed"):
        here.read(told, 0, other, lambda: None)
    there.close()
    wait_until(lambda: not any(thread.name.startswith("holdfast-sync-nixl") for thread in threading.enumerate()))


@needs_nixl
def test_a_mirror_that_may_still_be_written_to_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = NixlTransport(tmp_path)
    with Publisher(transport) as publisher, Receiver(transport) as receiver:
        publisher.publish(weights(1), 1)
        monkeypatch.setattr(NixlAgent, "is_quiet", lambda agent, memory: False)
        receiver.receive(zeros(), timeout=TIMEOUT_S)
        [reader] = receiver._half._ranks._readers  # type: ignore[attr-defined]
        assert reader._mirrors == []
        monkeypatch.undo()
        publisher.publish(weights(2), 2)
        into = zeros()
        assert receiver.receive(into, timeout=TIMEOUT_S) == 2
        assert same(into, 2)
        assert len(reader._mirrors) == 1
