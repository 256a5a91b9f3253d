"""Publishers and receivers on threads of one process: who gets which version, and what comes of what goes wrong.

What needs processes of their own is in tests/distributed/test_sync.py and tests/crash/test_sync_kills.py.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from slots import SendSlots, SlotTransport

from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    StateMismatch,
    WeightsDirty,
)
from holdfast.sync import Publisher, Receiver
from holdfast.sync.session import messages
from holdfast.sync.session.links import Link
from holdfast.sync.session.rendezvous import PLACES, DirectoryRendezvous, Places

TIMEOUT_S = 120.0
Start = Callable[..., "Future[Any]"]


@pytest.fixture
def start() -> Iterator[Start]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def transport(place: Path, peer_timeout_s: float = 5.0) -> SlotTransport:
    return SlotTransport(place, peer_timeout_s=peer_timeout_s)


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version)), "b": torch.full((7,), version)}


def places() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def holds(into: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(into[name], tensor) for name, tensor in weights(version).items())


def test_what_is_kept_serves_the_thread_that_published_it(tmp_path: Path) -> None:
    into = places()
    with Publisher(transport(tmp_path), bypass_cpu=False) as publisher, Receiver(transport(tmp_path)) as receiver:
        for version in (1, 2, 3):
            assert publisher.publish(weights(version), version).receivers == 0
            assert receiver.receive(into, timeout=TIMEOUT_S) == version
            assert holds(into, version)
        assert receiver.receive(into, version=2, timeout=TIMEOUT_S) == 2
        assert holds(into, 2)
        assert receiver.receive(into, timeout=TIMEOUT_S) == 3  # the newest that is newer than what it has


def test_a_receiver_that_joins_late_gets_the_version_that_is_being_published(tmp_path: Path, start: Start) -> None:
    one, other = places(), places()
    with Publisher(transport(tmp_path)) as publisher, Receiver(transport(tmp_path)) as first:
        with Receiver(transport(tmp_path)) as second:  # it has joined, so it is waited for
            published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
            received = start(first.receive, one, None, TIMEOUT_S)
            time.sleep(0.4)
            assert not published.done()
            assert second.receive(other, timeout=TIMEOUT_S) == received.result() == 1
            assert published.result().receivers == 2
            assert holds(one, 1)
            assert holds(other, 1)
        published = start(publisher.publish, weights(2), 2, TIMEOUT_S)
        began = time.monotonic()
        assert first.receive(one, timeout=TIMEOUT_S) == 2
        assert published.result().receivers == 1
        assert time.monotonic() - began < 4  # who has left is not waited for


def test_who_has_joined_and_does_not_ask_is_left_out_after_a_while(tmp_path: Path, start: Start) -> None:
    into = places()
    with Publisher(transport(tmp_path, 0.5)) as publisher, Receiver(transport(tmp_path)) as receiver:
        idle = Receiver(transport(tmp_path))
        published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
        assert receiver.receive(into, timeout=TIMEOUT_S) == 1
        assert (published.result().receivers, published.result().lost) == (1, 0)
        idle.close()


def test_receivers_go_on_with_a_publisher_that_was_started_again(tmp_path: Path, start: Start) -> None:
    into = places()
    with Receiver(transport(tmp_path)) as receiver:
        for version in (1, 2):
            with Publisher(transport(tmp_path)) as publisher:
                published = start(publisher.publish, weights(version), version, TIMEOUT_S)
                assert receiver.receive(into, timeout=TIMEOUT_S) == version
                assert published.result().receivers == 1
                waiting = start(receiver.receive, into, None, TIMEOUT_S)
                time.sleep(0.1)
            with pytest.raises(PeerLost, match=r"publisher rank 0 was lost.*closed"):
                waiting.result()
            assert holds(into, version)


def test_a_stranger_is_shown_the_door(tmp_path: Path) -> None:
    with Publisher(transport(tmp_path), bypass_cpu=False) as publisher:
        publisher.publish(weights(1), 1)
        found = DirectoryRendezvous(str(tmp_path)).get(PLACES)
        assert found is not None
        port = msgspec.msgpack.decode(found, type=Places).ranks[0].port
        for said in (messages.Hello("x", "not the token", b""), messages.Peer(1, "nor this"), messages.Beat()):
            link = Link(socket.create_connection(("127.0.0.1", port)), "publisher", messages.ToReceiver)
            link.send(said)
            link.sock.settimeout(5.0)
            assert link.sock.recv(1) == b""
            link.close()
        into = places()
        with Receiver(transport(tmp_path)) as receiver:
            assert receiver.receive(into, timeout=TIMEOUT_S) == 1


# words that get lost -----------------------------------------------------------------------------------------


def unheard(monkeypatch: pytest.MonkeyPatch, kind: type, *, cut: bool) -> None:
    """Words of this kind get lost; ``cut``: and their link with them."""
    plain = Link.send

    def send(link: Link, message: Any) -> None:
        if not isinstance(message, kind):
            plain(link, message)
        elif cut:
            link.sock.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(Link, "send", send)


# what did not arrive as it was sent ------------------------------------------------------------------------------


def damage(monkeypatch: pytest.MonkeyPatch, buckets: int) -> None:
    """A bit of each of the next ``buckets`` is flipped after it was packed and hashed."""
    plain, left = SendSlots.start, list(range(buckets))

    def start(slots: SendSlots, seq: int, nbytes: int, lane: Any) -> None:
        if left:
            left.pop()
            slots.slot(seq % 2)[nbytes // 2] ^= 4
        plain(slots, seq, nbytes, lane)

    monkeypatch.setattr(SendSlots, "start", start)


def test_who_asks_again_at_once_gets_the_version_from_the_same_publish(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = places()
    with Publisher(transport(tmp_path)) as publisher, Receiver(transport(tmp_path)) as receiver:
        damage(monkeypatch, 2)
        published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
        for _ in range(2):
            with pytest.raises(CheckpointCorrupt, match="bucket 0 of version 1"):
                receiver.receive(into, timeout=TIMEOUT_S)
            assert holds(into, 0)
        assert receiver.receive(into, timeout=TIMEOUT_S) == 1
        assert holds(into, 1)
        assert (published.result().receivers, published.result().lost) == (1, 0)
        with pytest.raises(DeadlineExceeded, match="newer than 1"):
            receiver.receive(into, timeout=0.1)
        with pytest.raises(ConfigError, match="isn't greater than 1"):
            publisher.publish(weights(1), 1)


def test_a_version_that_nobody_has_committed_can_be_published_again(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = places()
    with Publisher(transport(tmp_path)) as publisher, Receiver(transport(tmp_path)) as receiver:
        damage(monkeypatch, 1)
        published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
        with pytest.raises(CheckpointCorrupt):
            receiver.receive(into, timeout=TIMEOUT_S)
        with pytest.raises(CheckpointCorrupt):
            published.result()
        published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
        assert receiver.receive(into, timeout=TIMEOUT_S) == 1
        assert published.result().receivers == 1
        assert holds(into, 1)


def test_what_is_published_under_a_number_again_is_what_all_get(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver commits and is cut off before it says so: the publisher can't know that this number is out."""
    old = {"w": torch.arange(3 << 18).float()}  # three extents
    lost, new = old["w"].clone(), old["w"].clone()
    lost[0] = -1.0
    new[1 << 18] = -1.0
    newer = new.clone()
    newer[-1] = -1.0
    into, other = {"w": torch.zeros(3 << 18)}, {"w": torch.zeros(3 << 18)}
    with (
        Publisher(transport(tmp_path), receivers=2) as publisher,
        Receiver(transport(tmp_path)) as receiver,
        Receiver(transport(tmp_path)) as second,
    ):
        received = [start(it.receive, to, None, TIMEOUT_S) for it, to in ((receiver, into), (second, other))]
        publisher.publish(old, 1, TIMEOUT_S)
        assert [it.result() for it in received] == [1, 1]
        with monkeypatch.context() as patched:
            unheard(patched, messages.Committed, cut=True)
            cut_off = start(receiver.receive, into, None, TIMEOUT_S)
            failed = start(second.receive, {"misnamed": torch.zeros(1)}, None, TIMEOUT_S)
            with pytest.raises(StateMismatch):
                publisher.publish({"w": lost}, 2, TIMEOUT_S)
            assert cut_off.result() == 2
            assert isinstance(failed.exception(), StateMismatch)
        received = [start(second.receive, other, None, TIMEOUT_S)]
        assert publisher.publish({"w": new}, 2, TIMEOUT_S).receivers == 1
        published = start(publisher.publish, {"w": newer}, 3, TIMEOUT_S)
        received.append(start(receiver.receive, into, None, TIMEOUT_S))
        time.sleep(0.5)  # it is back, and asks; the other one is waited for
        received.append(start(second.receive, other, None, TIMEOUT_S))
        assert [it.result() for it in received] == [2, 3, 3]
        assert published.result().receivers == 2
        assert torch.equal(into["w"], newer)
        assert torch.equal(other["w"], newer)


def test_a_publisher_that_starts_again_with_the_version_that_is_out_is_refused(tmp_path: Path) -> None:
    into = places()
    with Receiver(transport(tmp_path)) as receiver:
        for error in (None, ConfigError):
            with Publisher(transport(tmp_path), bypass_cpu=False) as publisher:
                publisher.publish(weights(1), 1)
                if error is None:
                    assert receiver.receive(into, timeout=TIMEOUT_S) == 1
                else:
                    with pytest.raises(error, match="has version 1 of an earlier publisher"):
                        receiver.receive(into, timeout=TIMEOUT_S)
        assert holds(into, 1)


def test_a_module_that_was_streamed_to_in_part_is_not_served_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = [torch.nn.Linear(30, 20) for _ in range(3)]
    served, other = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    batch = torch.randn(2, 30)
    with (
        Publisher(transport(tmp_path), 1024, bypass_cpu=False) as publisher,
        Receiver(transport(tmp_path)) as receiver,
    ):
        for version, model in enumerate(trained[:2], 1):
            publisher.publish(model.state_dict(), version)
        assert receiver.receive(served, version=1, timeout=TIMEOUT_S) == 1
        damage(monkeypatch, 1)
        with pytest.raises(CheckpointCorrupt):
            receiver.receive(served, timeout=TIMEOUT_S, streaming=True)
        for attempt in (lambda: None, lambda: receiver.receive(served, version=7, timeout=0.1, streaming=True)):
            with contextlib.suppress(DeadlineExceeded):
                attempt()
            assert receiver.dirty
            assert receiver.version == 1
            with pytest.raises(WeightsDirty, match="parts of two versions"):
                served(batch)
        other(batch)
        assert receiver.receive(served, version=1, timeout=TIMEOUT_S) == 1  # what it had is no longer there whole
        assert torch.equal(served(batch), trained[0](batch))
        damage(monkeypatch, 1)
        with pytest.raises(CheckpointCorrupt):
            receiver.receive(served, timeout=TIMEOUT_S, streaming=True)
        assert receiver.receive(served, timeout=TIMEOUT_S, streaming=True) == 2
        assert not receiver.dirty
        assert torch.equal(served(batch), trained[1](batch))
        damage(monkeypatch, 1)
        with pytest.raises(CheckpointCorrupt):
            receiver.receive(served, version=2, timeout=TIMEOUT_S, streaming=True)
        assert receiver.receive(served, timeout=TIMEOUT_S) == 2  # though it isn't newer
        assert torch.equal(served(batch), trained[1](batch))


# silence ---------------------------------------------------------------------------------------------------------


def test_a_member_that_falls_silent_is_given_up(tmp_path: Path, start: Start) -> None:
    into = places()
    over = threading.Event()

    def sleep(name: str, tensor: torch.Tensor) -> None:
        over.wait(TIMEOUT_S)
        into[name].copy_(tensor)

    with Publisher(transport(tmp_path, 0.6)) as publisher, Receiver(transport(tmp_path)) as receiver:
        published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
        received = start(receiver.receive, sleep, None, TIMEOUT_S, True)
        assert (published.result().receivers, published.result().lost) == (0, 1)
        over.set()
        assert received.result() == 1  # it had all of it
        assert holds(into, 1)


def test_a_publisher_that_falls_silent_is_named(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    into = places()
    with Publisher(transport(tmp_path)) as publisher, Receiver(transport(tmp_path, 0.6)) as receiver:
        unheard(monkeypatch, (messages.Bucket, messages.Beat), cut=False)  # type: ignore[arg-type]
        published = start(publisher.publish, weights(1), 1, TIMEOUT_S)
        with pytest.raises(PeerLost, match=r"rank 0 .*version 1 \(phase: bucket 0\).*silent") as caught:
            receiver.receive(into, timeout=TIMEOUT_S)
        assert (caught.value.peer, caught.value.version) == ("publisher rank 0", 1)
        assert published.result().lost == 1
        assert holds(into, 0)


def test_deadlines_say_what_was_waited_for(tmp_path: Path) -> None:
    into = places()
    with Receiver(transport(tmp_path)) as receiver:
        with pytest.raises(DeadlineExceeded, match=f"a publisher to be found at {tmp_path}"):
            receiver.receive(into, timeout=0.1)
        with Publisher(transport(tmp_path)) as publisher:
            with pytest.raises(DeadlineExceeded, match="a receiver to ask"):
                publisher.publish(weights(1), 1, timeout=0.1)
            with pytest.raises(DeadlineExceeded, match="a version of publisher rank 0"):
                receiver.receive(into, timeout=0.1)
            with pytest.raises(CheckpointNotFound, match="version 1 is not kept"):
                receiver.receive(into, version=1, timeout=TIMEOUT_S)


# arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_bytes": 0},
        {"bucket_bytes": 2**63},
        {"keep_versions": True},
        {"receivers": 0},
        {"bypass_cpu": 1},
        {"anchor_every": -1},
        {"delta_bytes": 0},
        {"delta": 2},
        {"delta": "extents"},
    ],
)
def test_options_that_cannot_be_are_refused_by_name(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Publisher(transport(tmp_path), **options)
    assert not list(tmp_path.iterdir())


def test_calls_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transport"):
        Receiver(SlotTransport)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rendezvous"):
        SlotTransport(None)
    with pytest.raises(ConfigError, match="peer_timeout_s"):
        SlotTransport(tmp_path, peer_timeout_s=0)
    publisher, receiver = Publisher(transport(tmp_path)), Receiver(transport(tmp_path))
    for version in (-1, True, "1", 2**63):
        with pytest.raises(ConfigError, match="version"):
            publisher.publish(weights(1), version)  # type: ignore[arg-type]
    for timeout in (0, float("nan"), float("inf"), sys.maxsize, 10**400, 1e308, True, None, "1"):
        with pytest.raises(ConfigError, match="timeout"):
            receiver.receive(places(), timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="timeout"):
            publisher.publish(weights(1), 1, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bypass_cpu"):
        publisher.pin(1)
    assert publisher.versions == ()
    for closed in (publisher, receiver):
        closed.close()
        closed.close()
    for call in (lambda: publisher.publish(weights(1), 1), lambda: publisher.pin(1), lambda: publisher.unpin(1)):
        with pytest.raises(ConfigError, match="closed"):
            call()
    with pytest.raises(ConfigError, match="closed"):
        receiver.receive(places())
