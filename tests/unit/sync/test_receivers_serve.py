"""Receivers that serve one another: the publisher sends a version once, and no hop can spoil or hold up another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.engine.wire import encode
from holdfast.errors import ConfigError, PeerLost
from holdfast.sync import NixlTransport, ProcessGroupTransport, Publisher, Receiver
from holdfast.sync.versions import messages, peers

MIB = 1 << 20
LEAVES = 24
KINDS = {"gloo": ProcessGroupTransport, "nixl": NixlTransport}
_kind = "gloo"


@pytest.fixture(
    params=["gloo", pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="no NIXL"))],
    autouse=True,
)
def kind(request: pytest.FixtureRequest) -> None:
    global _kind
    _kind = request.param


TIMEOUT_S = 30.0


def state(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(512, 512, generator=made) for n in range(LEAVES)}  # 1 MiB each


NBYTES = LEAVES * MIB


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def at_once(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the jobs on threads; return what each returned, or raised."""
    found: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            found[number] = jobs[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    return found


class Moved:
    """Versions that the publisher has sent, and that receivers have sent to others, since."""

    def __init__(self) -> None:
        self._before = events.statistics()

    def __call__(self) -> tuple[float, float]:
        before, self._before = self._before, events.statistics()
        names = ("sync_bytes_brought", "sync_bytes_from_receivers")
        sent, served = (self._before[name] - before[name] for name in names)
        return sent / NBYTES, served / NBYTES


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(KINDS[_kind](tmp_path / "meet")) as found:
        yield found


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[[int], list[Receiver]]]:
    made: list[Receiver] = []

    def make(count: int) -> list[Receiver]:
        made.extend(Receiver(KINDS[_kind](tmp_path / "meet", fan_out=True)) for _ in range(count))
        return made[-count:]

    yield make
    for receiver in made:
        receiver.close()


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_publisher_sends_a_version_once(
    publisher: Publisher, fleet: Callable[[int], list[Receiver]], count: int
) -> None:
    receivers, into = fleet(count), [zeros() for _ in range(count)]
    moved = Moved()
    for version in (1, 2, 3):
        weights = state(version)
        publisher.publish(weights, version)
        got = at_once([lambda one=one, to=to: one.receive(to) for one, to in zip(receivers, into, strict=True)])
        assert got == [version] * count
        assert all(same(one, weights) for one in into)
        sent, served = moved()
        assert sent <= 1.2
        assert abs(served - (count - 1)) <= 0.3


def test_who_comes_late_is_served_by_those_who_have_it(
    publisher: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    publisher.publish(state(1), 1)
    first, *late = fleet(3)
    into = zeros()
    first.receive(into)
    moved = Moved()
    for one in late:
        assert one.receive(into) == 1
        assert same(into, state(1))
    sent, served = moved()
    assert sent < 0.1
    assert abs(served - 2) < 0.1


def test_parts_travel_once_too(tmp_path: Path, publisher: Publisher) -> None:
    publisher.publish(state(1), 1)
    names = sorted(zeros())
    moved = Moved()
    parts = [names[:16], names[8:], names[:16], names[8:]]
    into = [{name: torch.zeros(512, 512) for name in some} for some in parts]
    receivers = [Receiver(KINDS[_kind](tmp_path / "meet", fan_out=True), include=some) for some in parts]
    got = at_once([lambda one=one, to=to: one.receive(to) for one, to in zip(receivers, into, strict=True)])
    assert got == [1] * 4
    assert all(same(one, state(1)) for one in into)
    sent, served = moved()
    assert sent <= 1.2
    assert sent + served <= 4 * 16 / LEAVES + 0.3
    for receiver in receivers:
        receiver.close()


def test_a_hop_with_damaged_memory_costs_bytes_only(
    publisher: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    publisher.publish(state(1), 1)
    liar, *others = fleet(4)
    into = zeros()
    liar.receive(into)
    [held] = liar._half._ranks._held._held.values()  # type: ignore[attr-defined]
    held.image.bytes_view[4096::4096] += 1  # in each page of what it serves
    for one in others:
        to = zeros()
        assert one.receive(to) == 1
        assert same(to, state(1))


def test_a_mirror_that_is_used_for_something_else_is_not_served(
    publisher: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    publisher.publish(state(1), 1)
    ahead, behind = fleet(2)
    for version in (1, 2, 3):
        if version > 1:
            publisher.publish(state(version), version)
        assert ahead.receive(zeros()) == version
    held = ahead._half._ranks._held  # type: ignore[attr-defined]
    assert 1 <= len(held._held) <= 2
    to = zeros()
    assert behind.receive(to) == 3
    assert same(to, state(3))


def test_a_version_that_is_no_longer_kept_while_it_is_brought(
    tmp_path: Path, fleet: Callable[[int], list[Receiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease keeps its memory for a while: who has begun is sent there, and doesn't ask for ever."""
    tell = peers.SharedFetch.tell
    with Publisher(KINDS[_kind](tmp_path / "meet"), keep_versions=1) as publisher:
        publisher.publish(state(1), 1)

        def publish_then_tell(self: peers.SharedFetch, check: Callable[[], None]) -> None:
            if publisher.versions == (1,):
                publisher.publish(state(2), 2)
            tell(self, check)

        monkeypatch.setattr(peers.SharedFetch, "tell", publish_then_tell)
        [receiver], into = fleet(1), zeros()
        assert at_once([lambda: receiver.receive(into)]) == [1]
        assert same(into, state(1))
        assert receiver.receive(into) == 2


class Hop:
    """A receiver in a process of its own, which has version 1 and serves it."""

    def __init__(self, tmp_path: Path) -> None:
        code = (
            "import sys, torch\n"
            f"from holdfast.sync import {KINDS[_kind].__name__} as Transport, Receiver\n"
            "receiver = Receiver(Transport(sys.argv[1], fan_out=True))\n"
            f"into = {{f'w{{n}}': torch.zeros(512, 512) for n in range({LEAVES})}}\n"
            "print(receiver.receive(into, timeout=30), flush=True)\n"
            "sys.stdin.read()\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "meet")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "1\n"

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_hop_that_is_killed_or_stopped_is_routed_around(
    tmp_path: Path, publisher: Publisher, fleet: Callable[[int], list[Receiver]], how: signal.Signals
) -> None:
    publisher.publish(state(1), 1)
    hops = [Hop(tmp_path) for _ in range(2)]
    try:
        receivers, into = fleet(3), [zeros() for _ in range(3)]
        for hop in hops:
            hop.process.send_signal(how)
        began = time.monotonic()
        got = at_once([lambda one=one, to=to: one.receive(to) for one, to in zip(receivers, into, strict=True)])
        assert got == [1] * 3
        assert all(same(one, state(1)) for one in into)
        assert time.monotonic() - began < 15
    finally:
        for hop in hops:
            hop.close()


def test_a_hop_killed_while_others_read_from_it(
    tmp_path: Path, publisher: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    publisher.publish(state(1), 1)
    hop = Hop(tmp_path)
    try:
        receivers, into = fleet(4), [zeros() for _ in range(4)]
        threading.Timer(0.01, lambda: hop.process.send_signal(signal.SIGKILL)).start()
        got = at_once([lambda one=one, to=to: one.receive(to) for one, to in zip(receivers, into, strict=True)])
        assert got == [1] * 4
        assert all(same(one, state(1)) for one in into)
    finally:
        hop.close()


def test_a_receiver_that_is_closed_serves_no_more(publisher: Publisher, fleet: Callable[[int], list[Receiver]]) -> None:
    publisher.publish(state(1), 1)
    first, second = fleet(2)
    first.receive(zeros())
    place = first._half._ranks._held.place  # type: ignore[attr-defined]
    first.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", place.port), 5).close()
    to = zeros()
    assert second.receive(to) == 1
    assert same(to, state(1))


def test_who_does_not_know_the_token_is_sent_nothing(
    publisher: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    publisher.publish(state(1), 1)
    [first] = fleet(1)
    first.receive(zeros())
    held = first._half._ranks._held  # type: ignore[attr-defined]
    [digest] = held._held
    for token, expected in (("guessed", b""), (held._token, b"\x01")):
        with socket.create_connection(("127.0.0.1", held.place.port), 5) as sock:
            sock.sendall(bytes(encode(messages.ReadHeld(token, digest, 4096, 8192))))
            assert sock.recv(1) == expected
    with socket.create_connection(("127.0.0.1", held.place.port), 5) as sock:
        sock.sendall(bytes(encode(messages.ReadHeld(held._token, digest, 0, 1 << 40))))
        assert sock.recv(1) == b"\x00"


def test_deltas_and_receivers_that_serve(tmp_path: Path, fleet: Callable[[int], list[Receiver]]) -> None:
    weights = state(1)
    with Publisher(KINDS[_kind](tmp_path / "meet"), delta="sparse") as publisher:
        receivers, into = fleet(3), [zeros() for _ in range(3)]
        for version in range(1, 6):
            publisher.publish(weights, version)
            got = at_once([lambda one=one, to=to: one.receive(to) for one, to in zip(receivers, into, strict=True)])
            assert got == [version] * 3
            assert all(same(one, weights) for one in into)
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            weights["w3"][::7] += 1.0


def test_one_without_fan_out_beside(
    tmp_path: Path, publisher: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    with Receiver(KINDS[_kind](tmp_path / "meet")) as plain:
        receivers = [plain, *fleet(2)]
        publisher.publish(state(1), 1)
        into = [zeros() for _ in range(3)]
        got = at_once([lambda one=one, to=to: one.receive(to) for one, to in zip(receivers, into, strict=True)])
        assert got == [1] * 3
        assert all(same(one, state(1)) for one in into)


def test_a_cancelled_fetch_ends_soon(publisher: Publisher, fleet: Callable[[int], list[Receiver]]) -> None:
    publisher.publish(state(1), 1)
    first, second = fleet(2)
    first.receive(zeros())
    threading.Timer(0.01, second.cancel).start()
    began = time.monotonic()
    got = at_once([lambda: second.receive(zeros())])[0]
    assert got == 1 or isinstance(got, holdfast.errors.FetchCancelled)
    assert time.monotonic() - began < 5


def test_a_publisher_that_dies_is_lost_to_all(tmp_path: Path, fleet: Callable[[int], list[Receiver]]) -> None:
    publisher = Publisher(KINDS[_kind](tmp_path / "meet"))
    publisher.publish(state(1), 1)
    first, second = fleet(2)
    first.receive(zeros())
    publisher.close()
    found = at_once([lambda: second.receive(zeros(), timeout=1.0)])[0]
    assert isinstance(found, (PeerLost, holdfast.errors.DeadlineExceeded))


def test_only_gloo_fans_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="serve one another") as caught:
        ProcessGroupTransport(tmp_path, backend="nccl", device="cuda", fan_out=True)
    assert caught.value.field == "fan_out"


def test_connections_to_others_are_few() -> None:
    held = peers.HeldMirrors("token", None, peer_timeout_s=1.0)
    try:
        for number in range(30):
            held._connections(f"r{number}", messages.RankPlace("", "boot", ("127.0.0.1",), number + 1))
        assert len(held._others) <= peers._OTHERS_KEPT
    finally:
        held.close()
