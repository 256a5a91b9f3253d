"""NIXL as a transport of weight versions: without it a clear error, with it versions from memory to memory.

Versions in a row, placements and kills are those of all transports: tests/distributed/test_sync_versions.py and
tests/crash/test_sync_kills.py.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.coordination.deadline import Deadline
from holdfast.errors import ConfigError, PeerLost
from holdfast.sync import NixlTransport, Publisher, Receiver
from holdfast.sync.transports import nixl as nixl_agent
from holdfast.sync.transports.nixl import NixlChannels, _NixlOffer

TIMEOUT_S = 120.0
CPU = torch.device("cpu")
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: pip install 'holdfast[nixl]'")


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"w.{index}": torch.randn(64, 32, generator=generator) for index in range(8)}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("nixl", "nixl._api", "nixl._bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    nixl_agent.imported.cache_clear()
    yield
    nixl_agent.imported.cache_clear()


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
        ({"peer_timeout_s": 0}, "peer_timeout_s"),
        ({"rendezvous": None}, "rendezvous"),
        pytest.param(
            {"device": "cuda"},
            "device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
        ),
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


@needs_nixl
def test_versions_arrive_and_nothing_is_left_behind(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    files: list[int] = []
    for life in range(4):
        transport = NixlTransport(tmp_path)
        with Publisher(transport, 4096) as publisher, Receiver(transport) as first:
            for version in (3 * life + 1, 3 * life + 2):
                published = pool.submit(publisher.publish, weights(version), version, TIMEOUT_S)
                assert first.receive(into, timeout=TIMEOUT_S, streaming=bool(version % 2)) == version
                assert published.result().receivers == 1
                assert all(torch.equal(into[name], tensor) for name, tensor in weights(version).items())
            with Receiver(transport) as second:  # new members: new channels, from the same slots
                version = 3 * life + 3
                other = {name: torch.zeros_like(tensor) for name, tensor in into.items()}
                published = pool.submit(publisher.publish, weights(version), version, TIMEOUT_S)
                received = pool.submit(second.receive, other, None, TIMEOUT_S)
                assert first.receive(into, timeout=TIMEOUT_S) == received.result() == version
                assert published.result().receivers == 2
                assert all(torch.equal(other[name], tensor) for name, tensor in weights(version).items())
        del publisher, first, second
        gc.collect()
        files.append(open_files())
    assert files[-1] <= files[1], files  # UCX keeps some of its own, once
    ends_s = time.monotonic() + TIMEOUT_S
    while any(thread.name.startswith("holdfast-sync") for thread in threading.enumerate()):
        assert time.monotonic() < ends_s, threading.enumerate()
        time.sleep(0.01)


@needs_nixl
def test_what_is_no_offer_is_a_named_error_and_the_agent_stays_of_use() -> None:
    sides = NixlChannels(CPU), NixlChannels(CPU)
    sending = sides[0].send_channel([b""], 5000)
    sending.slot(1)[:] = torch.arange(5000).to(torch.uint8)
    told = sending.offer(0)
    with pytest.raises(ConfigError, match="same version of Holdfast on both sides"):
        sides[1].receive_channel(told, 50_000)
    nonsense = msgspec.structs.replace(msgspec.msgpack.decode(told, type=_NixlOffer), agent=b"nonsense")
    wrong = sides[1].receive_channel(msgspec.msgpack.encode(nonsense), 5000)
    with pytest.raises(PeerLost, match="channels cut off: NIXL could not"):
        wrong.open(Deadline.after(TIMEOUT_S))
    wrong.close()
    right = sides[1].receive_channel(told, 5000)
    right.open(Deadline.after(TIMEOUT_S))
    right.post(7, 4321, (0,))
    sending.start(7, 4321, (0,))
    assert torch.equal(right.take(7, Deadline.after(TIMEOUT_S)), sending.slot(1)[:4321])
    right.release(7)
    sending.wait_sent(7, Deadline.after(TIMEOUT_S))
    for side in (right, sending, *sides):
        side.close()
        side.close()


@needs_nixl
@pytest.mark.parametrize("ends", ["deadline", "close"])
def test_a_read_that_does_not_end_is_cut_off_and_its_memory_outlives_it(ends: str, pool: ThreadPoolExecutor) -> None:
    sides = NixlChannels(CPU), NixlChannels(CPU)
    sending = sides[0].send_channel([b""], 1 << 20)
    told = sending.offer(0)
    cut_off = sides[1].receive_channel(told, 1 << 20)
    cut_off.open(Deadline.after(TIMEOUT_S))
    cut_off.post(0, 1 << 20, (0,))
    # Nobody serves, so that not even a connection comes about.
    taken = pool.submit(cut_off.take, 0, Deadline.after(0.2 if ends == "deadline" else TIMEOUT_S))
    if ends == "close":
        time.sleep(0.2)
        cut_off.close()
    with pytest.raises((PeerLost, TimeoutError), match="bucket 0"):
        taken.result(TIMEOUT_S)
    cut_off.close()
    sending.slot(0)[:] = 7
    again = sides[1].receive_channel(told, 1 << 20)
    again.open(Deadline.after(TIMEOUT_S))
    again.post(0, 1 << 20, (0,))
    sending.start(0, 1 << 20, (0,))
    assert again.take(0, Deadline.after(TIMEOUT_S)).eq(7).all()
    again.release(0)
    for side in (again, sending, *sides):
        side.close()
    ends_s = time.monotonic() + TIMEOUT_S
    while any(thread.name.startswith("holdfast-sync-nixl") for thread in threading.enumerate()):
        assert time.monotonic() < ends_s, threading.enumerate()
        time.sleep(0.05)
