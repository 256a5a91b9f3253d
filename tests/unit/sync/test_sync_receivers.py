"""What others in its process see of a receiver, and what it costs a publisher that one doesn't answer. On threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from slots import SlotTransport

from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.sync import DirectoryTransport, ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.session import rendezvous

TIMEOUT_S = 120.0
Start = Callable[..., "Future[Any]"]


@pytest.fixture
def start() -> Iterator[Start]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version)), "b": torch.full((7,), version)}


def test_versions_come_over_a_network_within_one_process(tmp_path: Path, start: Start) -> None:
    transport = ProcessGroupTransport(tmp_path)
    with Publisher(transport) as publisher:
        receivers = [Receiver(transport), Receiver(transport)]
        for version in (1, 2):
            both = [weights(0), weights(0)]
            received = [start(it.receive, into, None, TIMEOUT_S) for it, into in zip(receivers, both, strict=True)]
            publisher.publish(weights(version), version, TIMEOUT_S)
            assert [it.result() for it in received] == [version, version]
            assert all(torch.equal(into[name], it) for into in both for name, it in weights(version).items())
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize("streaming", [True, False])
def test_others_see_that_it_is_dirty_and_which_version_it_has(tmp_path: Path, start: Start, streaming: bool) -> None:
    seen = []
    with (
        Publisher(SharedMemoryTransport(tmp_path)) as publisher,
        Receiver(SharedMemoryTransport(tmp_path)) as receiver,
    ):

        def look(name: str, tensor: torch.Tensor) -> None:
            seen.append((receiver.dirty, receiver.version))

        for version in (1, 2):
            received = start(receiver.receive, look, None, TIMEOUT_S, streaming)
            publisher.publish(weights(version), version, TIMEOUT_S)
            assert received.result() == version
            assert receiver.version == version
            assert not receiver.dirty
    assert seen == [(True, None)] * 2 + [(True, 1)] * 2


@pytest.mark.parametrize("kind", [SharedMemoryTransport, DirectoryTransport])
def test_closing_it_ends_a_receive_of_another_thread(tmp_path: Path, start: Start, kind: Any) -> None:
    for publisher in (None, Publisher(kind(tmp_path))):
        receiver = Receiver(kind(tmp_path))
        into = weights(0)
        received = start(receiver.receive, into, None, TIMEOUT_S)
        time.sleep(0.2)
        with pytest.raises(ConfigError, match="on another thread"):
            receiver.receive(into, timeout=TIMEOUT_S)
        receiver.close()
        with pytest.raises(ConfigError, match="this receiver was closed"):
            received.result(2.0)
        with pytest.raises(ConfigError, match="this receiver is closed"):
            receiver.receive(into)
        if publisher is not None:
            publisher.close()


def test_one_that_does_not_ask_costs_half_of_the_time_at_most(tmp_path: Path, start: Start) -> None:
    transport = SlotTransport(tmp_path)
    with Publisher(transport) as publisher, Receiver(transport) as receiver, Receiver(transport):
        received = start(receiver.receive, weights(0), None, TIMEOUT_S)
        published = publisher.publish(weights(1), 1, timeout=1.5)
        assert (published.receivers, received.result()) == (1, 1)


def test_one_that_does_not_come_back_costs_no_more_than_the_deadline(tmp_path: Path, start: Start) -> None:
    transport = SlotTransport(tmp_path)
    over = threading.Event()
    with Publisher(transport) as publisher, Receiver(transport) as stuck:
        received = start(stuck.receive, lambda name, tensor: over.wait(TIMEOUT_S), None, TIMEOUT_S, True)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"receivers \S+ to take version 1 \(commit\)"):
            publisher.publish(weights(1), 1, timeout=1.0)
        assert time.monotonic() - began < 4.5  # its silence alone would be borne with for 30 s
        with Receiver(transport) as other:
            following = start(other.receive, weights(0), None, TIMEOUT_S)
            assert publisher.publish(weights(2), 2, timeout=TIMEOUT_S).receivers == 1
            assert following.result() == 2
        over.set()
        assert received.result() == 1  # it had all of it


def test_weights_that_can_not_be_sent_are_named_whoever_comes(tmp_path: Path) -> None:
    transport = SlotTransport(tmp_path)
    with Publisher(transport, bucket_bytes=11) as publisher:
        with pytest.raises(ConfigError, match=r"a row of 'a' \(float32 \[3, 4\]\) has 16 bytes, but buckets have 11"):
            publisher.publish(weights(1), 1, timeout=0.2)
        pairs = iter(weights(1).items())
        assert len(list(pairs)) == 2
        with pytest.raises(ConfigError, match="weights is empty"):
            publisher.publish(pairs, 1, timeout=0.2)
    with Publisher(transport, bucket_bytes=11, bypass_cpu=False) as publisher:
        with pytest.raises(ConfigError, match="a row of 'a'"):
            publisher.publish(weights(1), 1)
        assert publisher.versions == ()
        publisher.publish({"b": weights(1)["b"]}, 1)
        with pytest.raises(ConfigError, match="isn't greater than 1"):
            publisher.publish({"b": weights(1)["b"]}, 1)
        with Receiver(transport) as receiver:
            assert receiver.receive({"b": weights(0)["b"]}, timeout=TIMEOUT_S) == 1


def test_buckets_that_there_is_no_memory_for_are_named(tmp_path: Path, start: Start) -> None:
    into = weights(0)
    with (
        Publisher(SlotTransport(tmp_path), bucket_bytes=2**62) as publisher,
        Receiver(SlotTransport(tmp_path)) as receiver,
    ):
        received = start(receiver.receive, into, None, TIMEOUT_S)
        with pytest.raises(ConfigError, match=r"no memory for 2 buckets of 4611686018427387904 bytes"):
            publisher.publish(weights(1), 1, TIMEOUT_S)
        with pytest.raises(ConfigError, match="no memory for 2 buckets"):
            received.result()
        assert not any(tensor.any() for tensor in into.values())


@pytest.mark.parametrize("kind", [SlotTransport, SharedMemoryTransport, ProcessGroupTransport, DirectoryTransport])
def test_a_fleet_that_commits_together_is_refused_with_what_to_do(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ConfigError, match="let each fetch the version") as raised:
        Publisher(kind(tmp_path / "place"), atomic_fleet=True)
    assert raised.value.field == "atomic_fleet"
    assert not (tmp_path / "place").exists()


def test_what_a_function_raises_reaches_the_publisher_though_it_is_no_text(tmp_path: Path, start: Start) -> None:
    def refuse(name: str, tensor: torch.Tensor) -> None:
        raise OSError("no file \udc80")  # as a name that isn't UTF-8 is read

    transport = SlotTransport(tmp_path)
    with Publisher(transport) as publisher, Receiver(transport) as receiver:
        published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
        with pytest.raises(OSError, match="no file"):
            receiver.receive(refuse, timeout=TIMEOUT_S, streaming=True)
        assert published.result(2.0).lost == 1


@pytest.mark.parametrize(
    ("one", "other", "timeout_s"),
    [(SlotTransport, ProcessGroupTransport, TIMEOUT_S), (SharedMemoryTransport, SlotTransport, 0.5)],
)
def test_a_receiver_with_another_transport_is_told(tmp_path: Path, one: Any, other: Any, timeout_s: float) -> None:
    with Publisher(one(tmp_path), bypass_cpu=False) as publisher, Receiver(other(tmp_path)) as receiver:
        publisher.publish(weights(1), 1, TIMEOUT_S)
        with pytest.raises((ConfigError, DeadlineExceeded), match=r"uses another transport|a publisher to be found"):
            receiver.receive(weights(0), None, timeout_s)


def test_transports_of_one_protocol_read_each_others_versions(tmp_path: Path) -> None:
    with Publisher(SharedMemoryTransport(tmp_path)) as publisher, Receiver(ProcessGroupTransport(tmp_path)) as receiver:
        publisher.publish(weights(1), 1, TIMEOUT_S)
        into = weights(0)
        assert receiver.receive(into, None, TIMEOUT_S) == 1
        assert all(torch.equal(into[name], it) for name, it in weights(1).items())


def test_a_rendezvous_that_does_not_answer_holds_nobody_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # as that of a process that was stopped
        where = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        receiver = start(Receiver, SharedMemoryTransport(where)).result(5.0)
        with pytest.raises(DeadlineExceeded, match=r"did not answer|doesn't answer"):
            start(receiver.receive, weights(0), None, 1.0).result(5.0)
        receiver.close()


@pytest.mark.parametrize("threads", [0, 1], ids=["none", "one"])
@pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessGroupTransport])
def test_a_receiver_that_was_refused_threads_goes_on_when_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, threads: int
) -> None:
    start_new, left = threading._start_new_thread, [threads]  # type: ignore[attr-defined]

    def refuse(*args: Any) -> Any:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return start_new(*args)

    into = {"weight": torch.zeros(3)}
    with Publisher(kind(tmp_path)) as publisher, Receiver(kind(tmp_path), into) as receiver:
        publisher.publish({"weight": torch.ones(3)}, 1)
        publisher.publish({"weight": torch.ones(3)}, 2)  # joins the thread that makes blocks
        with monkeypatch.context() as refusing:
            refusing.setattr(threading, "_start_new_thread", refuse)
            with pytest.raises(HoldfastError, match=r"can't start new thread.*ulimit"):
                receiver.receive(timeout=20)
        assert receiver.receive(timeout=20) == 2
        assert into["weight"].eq(1).all()
