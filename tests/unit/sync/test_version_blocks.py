"""Versions in blocks of memory, by the halves of a transport: what is fetched, revoked, damaged, kept and freed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.coordination.deadline import Deadline
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    FetchCancelled,
    PeerLost,
    StateMismatch,
    VersionRevoked,
)
from holdfast.sync import NixlTransport, ProcessGroupTransport, Receiver, SharedMemoryTransport
from holdfast.sync.protocol import PublisherOptions
from holdfast.sync.versions import messages
from holdfast.sync.versions.block import HEADER_BYTES
from holdfast.sync.versions.publishing import BlockPublishing
from holdfast.sync.versions.receiving import BlockReceiving, FetchedBlocks, RankConnections
from holdfast.sync.versions.serving import connect_to
from holdfast.sync.weights.apply import TargetFactory

TIMEOUT_S = 60.0


def weights(version: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(version)
    return {
        "large": torch.randn(700, 1024, generator=made),  # several extents
        "half": torch.randn(33, 65, generator=made).bfloat16(),
        "view": torch.randn(40, 30, generator=made).t(),
        "scalar": torch.tensor(version),
        "none": torch.empty(0, 3),
        "bools": torch.randn(77, generator=made) > 0,
    }


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}


def is_version(into: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(into[name], tensor) for name, tensor in weights(version).items())


class Sides:
    """A publisher's half, and receivers' halves, of one transport."""

    def __init__(self, place: Path, kind: Any = SharedMemoryTransport) -> None:
        self.transport = kind(place)
        self.is_mapped = kind is SharedMemoryTransport
        self.closing: list[Any] = []

    def publishing(self, **options: Any) -> BlockPublishing:
        made = self.transport.publishing(PublisherOptions(**options))
        assert isinstance(made, BlockPublishing)
        self.closing.append(made)
        return made

    def receiving(self) -> BlockReceiving:
        made = self.transport.receiving()
        assert isinstance(made, BlockReceiving)
        self.closing.append(made)
        return made


NIXL = pytest.param(NixlTransport, marks=pytest.mark.skipif(find_spec("nixl") is None, reason="no NIXL"))


@pytest.fixture(params=[SharedMemoryTransport, ProcessGroupTransport, NIXL])
def sides(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sides]:
    made = Sides(tmp_path, request.param)
    yield made
    for half in reversed(made.closing):
        half.close()


def publish(half: BlockPublishing, version: int, **meta: Any) -> None:
    half.publish(lambda: weights(version), version, Deadline.after(TIMEOUT_S), meta)


def fetch(
    half: BlockReceiving,
    into: Any,
    version: int | None = None,
    newer_than: int | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    streaming: bool = False,
) -> FetchedBlocks:
    destination = TargetFactory().destination(into, streaming=streaming)
    return half.fetch(destination, version, newer_than, Deadline.after(timeout_s))


def memory_of(half: BlockPublishing, version: int) -> torch.Tensor:
    """The block that has ``version``."""
    block = half._served.books._held[version]
    return half._served.memory[block.number].image.bytes_view


def test_a_version_is_fetched_aside_and_committed_later(sides: Sides) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    into = zeros()
    for version in (1, 2, 3, 4, 5):
        publish(publisher, version, step=10 * version)
        fetched = fetch(receiver, into, newer_than=version - 1)
        assert is_version(into, version - 1) or version == 1
        assert (fetched.version, fetched.meta) == (version, {"step": 10 * version})
        fetched.commit()
        assert is_version(into, version)
        fetched.release()
        fetched.release()
    assert publisher.versions == (4, 5)


def test_old_versions_serve_until_they_are_evicted(sides: Sides) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    for version in (1, 2, 3):
        publish(publisher, version)
        if version == 1:
            publisher.pin(1)
    into = zeros()
    for version in (1, 3, 2):
        fetched = fetch(receiver, into, version)
        fetched.commit()
        fetched.release()
        assert is_version(into, version)
    publisher.unpin(1)
    with pytest.raises(CheckpointNotFound, match="version 1 is not kept: the publisher has 2, 3"):
        fetch(receiver, into, 1)
    with pytest.raises(CheckpointNotFound, match="publisher rank 0 has 2, 3"):
        publisher.pin(1)
    with pytest.raises(DeadlineExceeded, match=r"version 4 did not happen.*has: 2, 3"):
        fetch(receiver, into, 4, timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="a version newer than 3"):
        fetch(receiver, into, newer_than=3, timeout_s=0.1)


def test_readers_that_hold_on_are_revoked_when_blocks_are_short(sides: Sides) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    into, other = zeros(), zeros()
    publish(publisher, 1)
    held = fetch(receiver, into)
    for version in range(2, 12):
        publish(publisher, version)
    assert len(publisher._served.memory) <= 4
    later = fetch(sides.receiving(), other)
    for version in range(12, 22):
        publish(publisher, version)
    assert len(publisher._served.memory) <= 4
    if sides.is_mapped:
        with pytest.raises(VersionRevoked, match="version 1 is gone"):
            held.commit()
        assert not any(tensor.any() for tensor in into.values()), "it was not touched"
    else:  # it has its own
        held.commit()
        assert is_version(into, 1)
    held.release()
    later.commit()
    assert is_version(other, 11)
    fetch(receiver, into).commit()
    assert is_version(into, 21)


@pytest.mark.parametrize("sides", [SharedMemoryTransport], indirect=True)
def test_a_version_that_is_revoked_while_it_is_copied_leaves_the_weights_dirty(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, receiver, others = sides.publishing(), sides.receiving(), [sides.receiving() for _ in range(3)]
    publish(publisher, 1)
    into = zeros()
    destination = TargetFactory().destination(into, streaming=False)
    fetched = receiver.fetch(destination, None, None, Deadline.after(TIMEOUT_S))
    plain = FetchedBlocks._write

    def write(self: FetchedBlocks, lives: Any, standing: Any) -> None:
        plain(self, {"large": lives["large"]}, standing)
        held = []
        for version in range(2, 5):
            publish(publisher, version)
            held.append(fetch(others.pop(), zeros()))
        for version in range(5, 9):
            publish(publisher, version)
        plain(self, lives, standing)

    monkeypatch.setattr(FetchedBlocks, "_write", write)
    with pytest.raises(VersionRevoked):
        fetched.commit()
    assert destination.dirty


@pytest.mark.parametrize("at", ["header", "data", "layout"])
def test_damage_is_found_before_anything_is_changed(sides: Sides, at: str) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    publish(publisher, 1)
    memory, layout = memory_of(publisher, 1), publisher._served.layouts[1]
    where = {"header": 0, "data": HEADER_BYTES + 1_500_000, "layout": HEADER_BYTES + layout.data_bytes + 3}[at]
    memory[where] ^= 4
    into = zeros()
    if at == "header" and not sides.is_mapped:
        pytest.skip("nobody reads it")
    with pytest.raises(VersionRevoked if at == "header" else CheckpointCorrupt):
        fetch(receiver, into, 1, timeout_s=2.0)
    assert all(not tensor.any() for tensor in into.values())
    memory[where] ^= 4
    fetch(receiver, into).commit()
    assert is_version(into, 1)


def test_what_was_fetched_stays_when_the_publisher_goes(sides: Sides) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    publish(publisher, 1)
    into = zeros()
    fetched = fetch(receiver, into)
    publisher.close()
    fetched.commit()
    assert is_version(into, 1)
    fetched.release()
    with pytest.raises((DeadlineExceeded, PeerLost)):
        fetch(receiver, into, newer_than=1, timeout_s=0.3)
    again = sides.publishing()
    with pytest.raises(ConfigError, match=r"version 1 isn't greater than 1.*go on from 2"):
        publish(again, 1)
    publish(again, 2)
    fetch(receiver, into, newer_than=1).commit()
    assert is_version(into, 2)


def test_another_shape_is_the_receivers_own_error(sides: Sides) -> None:
    publisher, wrong, right = sides.publishing(), sides.receiving(), sides.receiving()
    publish(publisher, 1)
    with pytest.raises(StateMismatch, match="large"):
        fetch(wrong, zeros() | {"large": torch.zeros(3)})
    into = zeros()
    fetch(right, into).commit()
    assert is_version(into, 1)
    publish(publisher, 2)


def test_news_come_within_a_moment_without_io(sides: Sides) -> None:
    receiver = sides.receiving()
    assert receiver.newest(None) is None
    publisher = sides.publishing()
    publish(publisher, 1)
    until = time.monotonic() + 5.0
    while receiver.newest(None) != 1 and time.monotonic() < until:
        time.sleep(0.001)
    publish(publisher, 2)
    began = time.monotonic()
    while receiver.newest(1) != 2 and time.monotonic() < began + 5.0:
        time.sleep(0.0005)
    assert receiver.newest(1) == 2
    assert time.monotonic() - began < 1.0  # 0.01 s on a machine that has nothing else to do
    assert receiver.newest(2) is None


@pytest.mark.parametrize(("end", "error"), [("cancel", FetchCancelled), ("leave", ConfigError)])
def test_a_fetch_that_waits_is_ended_at_once(sides: Sides, end: str, error: type[Exception]) -> None:
    for publisher in (None, sides.publishing()):
        receiver, caught = sides.receiving(), []

        def wait(receiver: BlockReceiving = receiver, caught: list[BaseException] = caught) -> None:
            with pytest.raises(error) as info:
                fetch(receiver, zeros())
            caught.append(info.value)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        getattr(receiver, end)()
        thread.join(10.0)
        assert caught
        assert time.monotonic() - began < 5.0, publisher


def test_functions_and_streaming(sides: Sides) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    publish(publisher, 1)
    for streaming in (False, True):
        got: dict[str, torch.Tensor] = {}
        fetched = fetch(receiver, got.__setitem__, streaming=streaming)
        assert bool(got) == streaming
        fetched.commit()
        assert is_version(got, 1)
        into = zeros()
        fetched = fetch(receiver, into, streaming=streaming)
        assert is_version(into, 1) == streaming
        fetched.commit()
        assert is_version(into, 1)


def test_tied_names_must_have_equal_values(sides: Sides) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    tied = torch.zeros(5, 6)
    into = {"a": tied, "b": tied}
    for version, other in ((1, 1.0), (2, 2.0)):
        values = {"a": torch.full((5, 6), 1.0), "b": torch.full((5, 6), other)}
        publisher.publish(lambda values=values: values, version, Deadline.after(TIMEOUT_S), {})  # type: ignore[misc]
        if version == 1:
            fetch(receiver, into).commit()
            assert torch.equal(tied, values["a"])
        else:
            with pytest.raises(StateMismatch, match="tied weights"):
                fetch(receiver, into)
            assert torch.equal(tied, torch.full((5, 6), 1.0))


def test_long_paths_and_strangers(tmp_path: Path) -> None:
    place = tmp_path.joinpath(*["directory-with-a-long-name"] * 6)
    made = Sides(place)
    publisher, receiver = made.publishing(), made.receiving()
    publish(publisher, 1)
    fetch(receiver, zeros()).commit()
    socket_path = publisher._path
    assert os.stat(socket_path).st_mode & 0o777 == 0o600
    stranger = connect_to(publisher._places.ranks[0], 1.0)
    stranger.sendall(b"\x03\x00\x00\x00abc")
    assert stranger.recv(1) == b""
    stranger.close()
    for half in reversed(made.closing):
        half.close()
    assert not os.path.exists(socket_path)


def test_one_that_does_not_read_its_news_costs_nothing(sides: Sides) -> None:
    publisher = sides.publishing()
    deaf: list[socket.socket] = []
    for _ in range(3):
        sock = connect_to(publisher._places.ranks[0], 1.0)
        from holdfast.engine.wire import encode

        sock.sendall(bytes(encode(messages.Introduce("deaf", publisher._places.token))))
        sock.sendall(bytes(encode(messages.AskNews())))
        deaf.append(sock)
    for version in range(1, 40):
        publish(publisher, version, note="x" * 40_000)
    into = zeros()
    receiver = sides.receiving()
    fetch(receiver, into).commit()
    assert is_version(into, 39)
    for sock in deaf:
        sock.close()


def test_a_failed_staging_leaves_what_there_was(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    publish(publisher, 1)
    fail: Callable[..., Any] = lambda *_, **__: (_ for _ in ()).throw(MemoryError("no memory"))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.sync.versions.block.BlockMemory.fill", fail)
        with pytest.raises(MemoryError):
            publish(publisher, 2)
    assert publisher.versions == (1,)
    into = zeros()
    fetch(receiver, into).commit()
    assert is_version(into, 1)
    publish(publisher, 2)
    fetch(receiver, into, newer_than=1).commit()
    assert is_version(into, 2)


def test_a_new_structure_gets_new_blocks_and_old_ones_are_freed(sides: Sides) -> None:
    publisher, receiver = sides.publishing(), sides.receiving()
    for version in range(1, 5):
        publish(publisher, version)
    fetch(receiver, zeros()).commit()
    grown = {f"w{number}": torch.full((300, 1024), float(number)) for number in range(8)}
    for version in range(5, 12):
        publisher.publish(lambda: grown, version, Deadline.after(TIMEOUT_S), {})
        into = {name: torch.zeros_like(tensor) for name, tensor in grown.items()}
        fetched = fetch(receiver, into)
        fetched.commit()
        fetched.release()
        assert all(torch.equal(into[name], tensor) for name, tensor in grown.items())
    assert len(publisher._served.memory) <= 4
    assert len(receiver._ranks._blocks[0]) <= 4  # type: ignore[union-attr]


class _Looked(dict[str, torch.Tensor]):
    """Weights that count how often they are looked through."""

    count = 0

    def items(self) -> Any:
        self.count += 1
        return super().items()


def test_polls_that_find_nothing_are_cheap_and_miss_nothing(
    sides: Sides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[float] = []
    asks = RankConnections.records

    def counted(self: RankConnections, *args: Any) -> Any:
        questions.append(time.monotonic())
        return asks(self, *args)

    monkeypatch.setattr(RankConnections, "records", counted)
    publisher, into = sides.publishing(), _Looked(zeros())
    publish(publisher, 1)
    with Receiver(type(sides.transport)(tmp_path), into) as receiver:
        with pytest.raises(ConfigError, match="into is a list"):
            receiver.receive([], timeout=TIMEOUT_S)
        assert receiver.receive(timeout=TIMEOUT_S) == 1
        looked, before, began_s = into.count, len(questions), time.monotonic()
        late = "newer than 1 did not happen|to a request for its versions did not happen"  # on a busy machine
        for _ in range(60):
            with pytest.raises(DeadlineExceeded, match=late):
                receiver.receive(timeout=0.01)
        assert len(questions) - before <= (time.monotonic() - began_s) / 0.1 + 1
        assert into.count == looked, "nothing is made for what doesn't come"
        for version in range(2, 20, 2):  # right after a poll, and two at once
            with pytest.raises(DeadlineExceeded):
                receiver.receive(timeout=0.01)
            publish(publisher, version)
            publish(publisher, version + 1)
            assert receiver.receive(timeout=TIMEOUT_S) == version + 1
            assert is_version(into, version + 1)
        assert receiver.stats is not None
        assert receiver.stats.fetch_s >= sum(receiver.stats.phases.values()) - 1e-3
        with pytest.raises(ConfigError, match="into is a list"):
            receiver.receive([], timeout=TIMEOUT_S)


def test_an_answer_to_a_question_that_was_cancelled_is_not_taken_for_the_next_ones(sides: Sides) -> None:
    """It says what there was then: who believes it waits for a version that has been published."""
    publisher, receiver = sides.publishing(), sides.receiving()
    publish(publisher, 1)
    fetch(receiver, zeros()).commit()
    ranks = receiver._ranks
    assert ranks is not None

    def cancelled() -> None:
        raise FetchCancelled("for the test")

    assert ranks.take(TIMEOUT_S)
    with pytest.raises(FetchCancelled):
        ranks.records(Deadline.after(TIMEOUT_S), cancelled)
    time.sleep(0.2)  # it has been answered
    publish(publisher, 2)
    found = ranks.records(Deadline.after(TIMEOUT_S), lambda: None)
    ranks.let_go()
    assert [record.version for record in found] == [1, 2]
