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

import msgspec
import pytest
import torch

import holdfast
from holdfast import events
from holdfast.engine.wire import encode
from holdfast.errors import ConfigError, PeerLost, VersionRevoked
from holdfast.sync import NixlTransport, ProcessGroupTransport, Publisher, Receiver
from holdfast.sync.versions import fanout, messages, mirror, peers
from holdfast.sync.versions.books import VersionKey

MIB = 1 << 20
LEAVES = 24
KINDS = {"gloo": ProcessGroupTransport, "nixl": NixlTransport}
_kind = "gloo"


QUICK_WITH_NIXL = {
    "test_the_publisher_sends_a_version_once",
    "test_a_hop_that_is_killed_or_stopped_is_routed_around",
    "test_laggards_bring_their_own_delta_from_one_another",
}
"""What doesn't depend on how bytes travel is tried with NIXL in the full form only."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    nixl = [pytest.mark.skipif(find_spec("nixl") is None, reason="no NIXL")]
    if metafunc.function.__name__ not in QUICK_WITH_NIXL:
        nixl.append(pytest.mark.slow)
    metafunc.parametrize("kind", ["gloo", pytest.param("nixl", marks=nixl)], indirect=True)


@pytest.fixture(autouse=True)
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
    """Versions (of ``nbytes``) that the publisher has sent, and that receivers have sent to others, since."""

    def __init__(self, nbytes: int = NBYTES) -> None:
        self._nbytes = nbytes
        self._before = events.statistics()

    def __call__(self) -> tuple[float, float]:
        before, self._before = self._before, events.statistics()
        names = ("sync_bytes_brought", "sync_bytes_from_receivers")
        sent, served = (self._before[name] - before[name] for name in names)
        return sent / self._nbytes, served / self._nbytes


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take nobody for ill on a busy machine."""
    monkeypatch.setattr(fanout, "_PATIENCE_S", 10.0)
    monkeypatch.setattr(fanout, "_PATIENCE_MAX_S", 20.0)
    monkeypatch.setattr(peers, "_SILENT_S", 10.0)


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


@pytest.mark.usefixtures("patient")
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


@pytest.mark.usefixtures("patient")
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


@pytest.mark.usefixtures("patient")
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
    """A receiver in a process of its own, which serves version 1, and what follows it once it is told to."""

    def __init__(self, tmp_path: Path) -> None:
        code = (
            "import sys, torch\n"
            f"from holdfast.sync import {KINDS[_kind].__name__} as Transport, Receiver\n"
            "receiver = Receiver(Transport(sys.argv[1], fan_out=True))\n"
            f"into = {{f'w{{n}}': torch.zeros(512, 512) for n in range({LEAVES})}}\n"
            "print(receiver.receive(into, timeout=30), flush=True)\n"
            "for _ in sys.stdin:\n"
            "    print(receiver.receive(into, timeout=30), flush=True)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "meet")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.expect(1)

    def receive(self, version: int) -> None:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        self.expect(version)

    def expect(self, version: int) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{version}\n"

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_hop_with_a_delta_that_is_killed_or_stopped_is_routed_around(
    tmp_path: Path, encoding: Publisher, fleet: Callable[[int], list[Receiver]], how: signal.Signals
) -> None:
    encoding.publish(state(1), 1)
    hop = Hop(tmp_path)
    try:
        receivers, into = fleet(3), [zeros() for _ in range(3)]
        assert receive_all(receivers, into) == [1] * 3
        weights = step(state(1), 2)
        moved = Moved(publish_delta(encoding, weights, 2, 1))
        hop.receive(2)
        hop.process.send_signal(how)
        began = time.monotonic()
        assert receive_all(receivers, into) == [2] * 3
        assert all(same(one, weights) for one in into)
        assert time.monotonic() - began < 15
        assert sum(moved()) <= 3.3  # the delta, not the version
    finally:
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


# Deltas --------------------------------------------------------------------------------------------------------------


def step(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The weights after a step: 4 % of the elements are others, in every extent."""
    where = torch.randint(512 * 512, (512 * 512 // 25,), generator=torch.Generator().manual_seed(seed))
    return {name: tensor.flatten().index_fill(0, where, seed).view(512, 512) for name, tensor in weights.items()}


@pytest.fixture
def encoding(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(KINDS[_kind](tmp_path / "meet"), delta="sparse") as found:
        yield found


def publish_delta(publisher: Publisher, weights: dict[str, torch.Tensor], version: int, base: int) -> int:
    """Publish, and wait for the delta that leads there from ``base``; return its size."""
    publisher.publish(weights, version)
    return size_of_delta(publisher, version, base)


def size_of_delta(publisher: Publisher, version: int, base: int) -> int:
    half: Any = publisher._half
    deltas, wanted = half._served.deltas, VersionKey(version, half._records[version].digests[0])
    deltas.find(wanted, wanted, 1 << 40, lambda: False)
    bases = {kept.base.version: kept.base for kept in deltas._kept.values()}
    return len(deltas.find(bases[base], wanted, 1 << 40, lambda: False))


def receive_all(receivers: Sequence[Receiver], into: Sequence[dict[str, torch.Tensor]]) -> list[Any]:
    return at_once([lambda one=one, to=to: one.receive(to) for one, to in zip(receivers, into, strict=True)])


def held_by(receiver: Receiver) -> peers.HeldMirrors:
    return receiver._half._ranks._held  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.usefixtures("patient")
def test_the_publisher_sends_a_delta_once(
    encoding: Publisher, fleet: Callable[[int], list[Receiver]], count: int
) -> None:
    receivers, into = fleet(count), [zeros() for _ in range(count)]
    weights = state(1)
    encoding.publish(weights, 1)
    assert receive_all(receivers, into) == [1] * count
    for version in (2, 3, 4):
        weights = step(weights, version)
        moved = Moved(publish_delta(encoding, weights, version, version - 1))
        assert receive_all(receivers, into) == [version] * count
        assert all(same(one, weights) for one in into)
        sent, served = moved()
        assert 0.9 <= sent <= 1.3
        assert abs(served - (count - 1)) <= 0.3
    for receiver in receivers:
        held = held_by(receiver)
        assert [len(kept) for kept in held._deltas.values()] == [peers._DELTAS_KEPT]
        assert len(held._held) <= 2 + peers._DELTAS_KEPT


@pytest.mark.usefixtures("patient")
def test_laggards_bring_their_own_delta_from_one_another(
    encoding: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    receivers, into = fleet(6), [zeros() for _ in range(6)]
    weights = state(1)
    encoding.publish(weights, 1)
    assert receive_all(receivers, into) == [1] * 6
    for version in (2, 3):
        weights = step(weights, version)
        publish_delta(encoding, weights, version, version - 1)
        assert receive_all(receivers[:3], into[:3]) == [version] * 3
    weights = step(weights, 4)
    near, far = publish_delta(encoding, weights, 4, 3), size_of_delta(encoding, 4, 1)
    assert near < far < NBYTES / 2
    moved = Moved(near + far)
    assert receive_all(receivers, into) == [4] * 6
    assert all(same(one, weights) for one in into)
    sent, served = moved()
    assert 0.9 <= sent <= 1.3
    assert abs(served - 2) <= 0.3


@pytest.mark.usefixtures("patient")
def test_who_comes_late_brings_the_delta_from_those_who_have_it(
    encoding: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    receivers, into = fleet(3), [zeros() for _ in range(3)]
    encoding.publish(state(1), 1)
    assert receive_all(receivers, into) == [1] * 3
    weights = step(state(1), 2)
    moved = Moved(publish_delta(encoding, weights, 2, 1))
    for one, to in zip(receivers, into, strict=True):
        assert one.receive(to) == 2
        assert same(to, weights)
    sent, served = moved()
    assert 0.9 <= sent <= 1.1
    assert abs(served - 2) <= 0.1


@pytest.mark.usefixtures("patient")
def test_a_hop_with_a_damaged_delta_costs_bytes_only(
    encoding: Publisher, fleet: Callable[[int], list[Receiver]], caplog: pytest.LogCaptureFixture
) -> None:
    receivers, into = fleet(4), [zeros() for _ in range(4)]
    encoding.publish(state(1), 1)
    assert receive_all(receivers, into) == [1] * 4
    weights = step(state(1), 2)
    moved = Moved(publish_delta(encoding, weights, 2, 1))
    assert receivers[0].receive(into[0]) == 2
    [[image]] = held_by(receivers[0])._deltas.values()
    image.bytes_view[4096::4096] += 1
    for one, to in zip(receivers[1:], into[1:], strict=True):
        assert one.receive(to) == 2
        assert same(to, weights)
    sent, served = moved()
    assert sent + served <= 4 + 2 + 0.3  # two find out
    assert "sent other bytes of a delta to version 2" in caplog.text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"\xc1",
        lambda offer: offer[:-1] + bytes([offer[-1] ^ 1]),
        lambda _: msgspec.msgpack.encode(messages.DeltaOffer(1 << 40, b"")),
        lambda _: msgspec.msgpack.encode(messages.DeltaOffer(1 << 20, bytes(16))),
    ],
)
def test_an_offer_that_is_damaged_is_followed_by_the_bytes(
    encoding: Publisher, fleet: Callable[[int], list[Receiver]], monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    receivers, into = fleet(2), [zeros() for _ in range(2)]
    encoding.publish(state(1), 1)
    assert receive_all(receivers, into) == [1] * 2
    weights = step(state(1), 2)
    publish_delta(encoding, weights, 2, 1)
    real = mirror.RankReader.read_delta
    monkeypatch.setattr(mirror.RankReader, "read_delta", lambda *arguments: spoil(real(*arguments)))
    assert receive_all(receivers, into) == [2] * 2
    assert all(same(one, weights) for one in into)


def test_a_delta_that_the_publisher_drops_meanwhile_is_followed_by_the_bytes(
    encoding: Publisher, fleet: Callable[[int], list[Receiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    [receiver], into = fleet(1), zeros()
    encoding.publish(state(1), 1)
    assert receiver.receive(into) == 1
    weights = step(state(1), 2)
    publish_delta(encoding, weights, 2, 1)
    real = peers.SharedFetch.tell

    def tell(self: Any, check: Callable[[], None]) -> None:
        real(self, check)
        encoding._half._served.deltas._shared.clear()  # type: ignore[attr-defined]

    monkeypatch.setattr(peers.SharedFetch, "tell", tell)
    assert receiver.receive(into) == 2
    assert same(into, weights)
    assert not held_by(receiver)._deltas


def test_a_receiver_closed_while_others_bring_its_delta(
    encoding: Publisher, fleet: Callable[[int], list[Receiver]]
) -> None:
    receivers, into = fleet(4), [zeros() for _ in range(4)]
    weights = state(1)
    encoding.publish(weights, 1)
    assert receive_all(receivers, into) == [1] * 4
    weights = step(weights, 2)
    publish_delta(encoding, weights, 2, 1)
    assert receivers[0].receive(into[0]) == 2
    kept = next(iter(held_by(receivers[0])._deltas.values()))
    threading.Timer(0.01, receivers[0].close).start()
    assert receive_all(receivers[1:], into[1:]) == [2] * 3
    assert all(same(one, weights) for one in into)
    receivers[0].close()
    assert [image._close_fd.alive for image in kept] == [False]


def test_large_deltas_are_not_kept_by_receivers(
    tmp_path: Path, fleet: Callable[[int], list[Receiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers, into = fleet(2), [zeros() for _ in range(2)]
    with Publisher(KINDS[_kind](tmp_path / "meet"), delta="sparse", delta_bytes=2 * NBYTES) as publisher:
        for version in (1, 2):
            weights = {name: tensor * version for name, tensor in state(1).items()}  # the exponents
            publisher.publish(weights, version)
            assert receive_all(receivers, into) == [version] * 2
            assert all(same(one, weights) for one in into)
        for receiver in receivers:
            assert sum(image.nbytes for kept in held_by(receiver)._deltas.values() for image in kept) <= NBYTES / 2


@pytest.mark.parametrize("serves", [True, False])
def test_one_without_fan_out_brings_deltas_from_the_publisher(
    tmp_path: Path, encoding: Publisher, fleet: Callable[[int], list[Receiver]], serves: bool
) -> None:
    weights = state(1)
    with Receiver(KINDS[_kind](tmp_path / "meet")) as plain:
        receivers = [plain, *(fleet(1) if serves else [])]
        into = [zeros() for _ in receivers]
        encoding.publish(weights, 1)
        assert receive_all(receivers, into) == [1] * len(receivers)
        weights = step(weights, 2)
        moved = Moved(publish_delta(encoding, weights, 2, 1))
        assert receive_all(receivers, into) == [2] * len(receivers)
        assert all(same(one, weights) for one in into)
        sent, served = moved()
        assert abs(sent - len(receivers)) < 0.2
        assert served == 0


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("newer", [1, 2])
def test_a_version_that_is_not_kept_any_more_is_still_brought_or_is_gone(
    tmp_path: Path, fleet: Callable[[int], list[Receiver]], monkeypatch: pytest.MonkeyPatch, newer: int, forgotten: bool
) -> None:
    with Publisher(KINDS[_kind](tmp_path / "meet"), keep_versions=1, max_blocks=2) as publisher:
        publisher.publish(state(1), 1)
        [receiver], into = fleet(1), zeros()
        real = peers.SharedFetch.tell

        def tell(self: Any, check: Callable[[], None]) -> None:
            real(self, check)
            for version in range(2, 2 + newer):
                publisher.publish(state(version), version)
            if forgotten:
                publisher._half._served.fan_outs.clear()  # type: ignore[attr-defined]

        with monkeypatch.context() as patched:
            patched.setattr(peers.SharedFetch, "tell", tell)
            got = at_once([lambda: receiver.receive(into, 1, timeout=5.0)])[0]
        if newer == 1:  # its lease keeps it
            assert got == 1
            assert same(into, state(1))
        else:
            assert isinstance(got, VersionRevoked)
            assert receiver.receive(into) == 1 + newer


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
