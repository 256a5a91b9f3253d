"""Deltas between blocks over TCP: bits equal whatever is sent, few bytes, whole versions where one is of no use."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.errors import PeerLost
from holdfast.format import sparse
from holdfast.sync import ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.versions import deltas, mirror
from holdfast.sync.versions.block import BlockLayout
from holdfast.sync.weights.buckets import Piece

LARGE = 1 << 20
TIMEOUT_S = 20.0


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    found = {
        "large": torch.randn(LARGE + 77, generator=made).bfloat16(),
        "norm": torch.randn(300, generator=made),
        "rows": torch.randn(64, 50, generator=made).bfloat16(),
        "bytes": torch.arange(1000).to(torch.uint8),
        "steps": torch.arange(9),
        "flags": torch.arange(40) % 3 == 0,
        "complex": torch.randn(5, generator=made, dtype=torch.complex64),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "columns": torch.randn(30, 20, generator=made).bfloat16().t(),
    }
    return {**found, "tied": found["rows"]}


def step(weights: dict[str, torch.Tensor], seed: int, share: float = 0.03) -> dict[str, torch.Tensor]:
    """The weights after a step: some elements have other bits, -0 and NaNs among them."""
    choose = random.Random(seed)
    found = {name: tensor.clone() for name, tensor in weights.items()}
    bits = found["large"].view(torch.int16)
    where = torch.tensor(choose.sample(range(LARGE), int(share * LARGE)))
    bits[where] += 1
    bits[choose.randrange(LARGE)], bits[choose.randrange(LARGE)] = -32768, 0x7FC0 + choose.randrange(64)
    for name in ("norm", "steps", "bytes", "scalar"):
        if choose.random() < 0.5:
            found[name] = found[name] + 1
    found["tied"] = found["rows"]
    return found


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(bits_of(tensor) == bits_of(expected[name]) for name, tensor in found.items())


def zeros() -> dict[str, torch.Tensor]:
    made = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    return {**made, "tied": made["rows"]}


def settled(version: int, place: Publisher) -> None:
    """Wait until the delta to ``version`` was made, or isn't going to be."""
    made = place._half._served.deltas  # type: ignore[attr-defined]
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        with made._changed:
            if made._next is None and made._encoding is None:
                return
        time.sleep(0.002)
    raise AssertionError(f"the delta to {version} isn't made")


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with Publisher(ProcessGroupTransport(tmp_path / "meet"), delta="sparse") as found:
        yield found


def receiver(tmp_path: Path, **options: Any) -> Receiver:
    return Receiver(ProcessGroupTransport(tmp_path / "meet"), **options)


class Brought:
    """Bytes that receivers of this process have read since."""

    def __init__(self) -> None:
        self._before = events.statistics()

    def __call__(self) -> int:
        before, self._before = self._before, events.statistics()
        return self._before["sync_bytes_brought"] - before["sync_bytes_brought"]


@pytest.mark.parametrize("kind", ["sparse", "steps"])
def test_what_changed_is_what_travels(tmp_path: Path, kind: str) -> None:
    weights, into = state(), zeros()
    with Publisher(ProcessGroupTransport(tmp_path / "meet"), delta=kind) as publisher, receiver(tmp_path) as mine:
        brought, counts = Brought(), []
        for version in range(1, 8):
            publisher.publish(weights, version)
            assert mine.receive(into, timeout=TIMEOUT_S) == version
            assert same(into, weights), version
            counts.append(brought())
            weights = step(weights, version)
    assert counts[0] > 2 * LARGE
    assert max(counts[1:]) < counts[0] / 10, counts


def test_laggards_get_one_record_for_several_steps(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, into, other = state(), zeros(), zeros()
    real, folds = sparse.fold, []

    def fold(records: Any, **options: Any) -> bytes:
        folds.append(len(records))
        return real(records, **options)

    monkeypatch.setattr(sparse, "fold", fold)
    with receiver(tmp_path) as mine, receiver(tmp_path) as late:
        publisher.publish(weights, 1)
        mine.receive(into, timeout=TIMEOUT_S)
        late.receive(other, timeout=TIMEOUT_S)
        for version in range(2, 6):
            publisher.publish(weights := step(weights, version), version)
            settled(version, publisher)
        brought = Brought()
        for each, memory in ((mine, into), (late, other)):
            assert each.receive(memory, timeout=TIMEOUT_S) == 5
            assert same(memory, weights)
        assert brought() < LARGE
    assert set(folds) == {4}
    assert len(folds) <= len(deltas.runs_of(layout_of(weights))), "made once, for both"


def layout_of(weights: dict[str, torch.Tensor]) -> BlockLayout:
    table = tuple(
        Piece(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            (0,) * tensor.dim(),
            tuple(tensor.shape),
            "",
        )
        for name, tensor in sorted(weights.items())
        if name != "tied"
    )
    return BlockLayout(table)


def test_runs_hold_every_piece_once() -> None:
    layout = layout_of(state())
    runs = deltas.runs_of(layout)
    for number, start in enumerate(layout.starts):
        nbytes = layout.nbytes(number)
        holding = [run for run in runs if run.start <= start and start + nbytes <= run.end]
        assert len(holding) == (1 if nbytes else 0) or not nbytes
        for run in holding if nbytes else ():
            assert sparse.unit_of(run.dtype).nbytes == sparse.unit_of(layout.table[number].dtype).nbytes
            assert (run.end - run.start) % sparse.unit_of(run.dtype).nbytes == 0


def test_slices_and_subsets_go_on_from_what_they_have(tmp_path: Path, publisher: Publisher) -> None:
    weights = {**state(), "matrix": torch.randn(2048, 1024).bfloat16()}
    half = {"matrix": holdfast.Shard(torch.zeros(1024, 1024).bfloat16(), (2048, 1024), (1024, 0))}
    one = {"large": torch.zeros(LARGE + 77).bfloat16()}
    with receiver(tmp_path, include="matrix") as cut, receiver(tmp_path, include="large") as some:
        for version in range(1, 5):
            publisher.publish(weights, version)
            settled(version, publisher)
            brought = Brought()
            assert cut.receive(half, timeout=TIMEOUT_S) == version
            assert some.receive(one, timeout=TIMEOUT_S) == version
            assert bits_of(half["matrix"].tensor) == bits_of(weights["matrix"][1024:])
            assert same(one, weights)
            assert (brought() < LARGE // 2) == (version > 1)
            weights = {**step(weights, version), "matrix": weights["matrix"].clone()}
            weights["matrix"].view(torch.int16)[torch.rand(2048, 1024) < 0.02] += 1


def test_nothing_travels_of_what_is_equal(tmp_path: Path, publisher: Publisher) -> None:
    weights, into = state(), zeros()
    with receiver(tmp_path) as mine:
        publisher.publish(weights, 1)
        mine.receive(into, timeout=TIMEOUT_S)
        publisher.publish(weights, 2)
        brought = Brought()
        assert mine.receive(into, timeout=TIMEOUT_S) == 2
        assert brought() < 4096
        assert same(into, weights)


def test_a_fetch_that_fails_leaves_what_was_fetched(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mirror.MirrorBlock.bring_forward

    def fail(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        raise PeerLost("for the test", peer="rank 0", phase="transfer", version=3)

    first, into = state(), zeros()
    second, third = step(first, 1), step(step(first, 1), 2)
    with receiver(tmp_path) as mine:
        publisher.publish(first, 1)
        assert mine.receive(into, timeout=TIMEOUT_S) == 1
        publisher.publish(second, 2)
        assert mine.fetch(into=into, timeout=TIMEOUT_S) == 2
        publisher.publish(third, 3)
        with monkeypatch.context() as patched:
            patched.setattr(mirror.MirrorBlock, "bring_forward", fail)
            with pytest.raises(PeerLost):
                mine.fetch(into=into, timeout=TIMEOUT_S)
        mine.commit()
        assert same(into, second)
        assert mine.fetch(into=into, timeout=TIMEOUT_S) == 3
        mine.commit()
        assert same(into, third)


# Of no use -----------------------------------------------------------------------------------------------------------


def damaged(encoded: bytes) -> bytes:
    return encoded[:-9] + bytes([encoded[-9] ^ 1]) + encoded[-8:]


@pytest.mark.parametrize(
    "harm", [damaged, lambda encoded: encoded[: len(encoded) // 2], lambda _: b"\x91\xc4\x01x", lambda _: b"\x01"]
)
def test_a_damaged_delta_is_followed_by_the_bytes(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, harm: Any
) -> None:
    real = deltas.BlockDeltas.find
    monkeypatch.setattr(deltas.BlockDeltas, "find", lambda *arguments: harm(real(*arguments)))
    weights, into = state(), zeros()
    with receiver(tmp_path) as mine:
        for version in (1, 2, 3):
            publisher.publish(weights, version)
            assert mine.receive(into, timeout=TIMEOUT_S) == version
            assert same(into, weights)
            weights = step(weights, version)


def test_a_delta_larger_than_the_version_is_refused(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas.BlockDeltas, "find", lambda *_: bytes(8 * LARGE))
    weights, into = state(), zeros()
    with receiver(tmp_path) as mine:
        publisher.publish(weights, 1)
        mine.receive(into, timeout=TIMEOUT_S)
        publisher.publish(weights, 2)
        with pytest.raises(PeerLost, match="announced 8388608 bytes where there can be"):
            mine.receive(into, timeout=TIMEOUT_S)
        assert same(into, weights)
        assert not mine.dirty


def test_torn_memory_of_a_receiver_is_brought_anew(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, torn = mirror.RankReader.take, []

    def take(self: Any, nbytes: int) -> Any:
        image, holds = real(self, nbytes)
        if holds is not None:
            image.bytes_view[4096 + LARGE : 4096 + LARGE + 9] ^= 3
            torn.append(image)
        return image, holds

    monkeypatch.setattr(mirror.RankReader, "take", take)
    weights, into = state(), zeros()
    with receiver(tmp_path) as mine:
        for version in (1, 2, 3):
            publisher.publish(weights, version)
            brought = Brought()
            assert mine.receive(into, timeout=TIMEOUT_S) == version
            assert same(into, weights)
            assert (brought() < 2 * LARGE) == (version > 1), "the torn extent only"
            weights = step(weights, version)
    assert torn


def test_other_tensors_have_no_delta(tmp_path: Path, publisher: Publisher) -> None:
    with receiver(tmp_path) as mine:
        for version in range(1, 4):
            weights = {f"w{version}": torch.randn(LARGE)}
            publisher.publish(weights, version)
            into = {f"w{version}": torch.zeros(LARGE)}
            assert mine.receive(into, timeout=TIMEOUT_S) == version
            assert same(into, weights)


def test_another_publisher_has_other_versions(tmp_path: Path) -> None:
    into = zeros()
    with receiver(tmp_path) as mine:
        for seed, first in ((1, 1), (2, 3)):
            weights = state(seed)
            with Publisher(ProcessGroupTransport(tmp_path / "meet"), delta="sparse") as publisher:
                for version in (first, first + 1):
                    publisher.publish(weights, version)
                    assert mine.receive(into, timeout=TIMEOUT_S) == version
                    assert same(into, weights)
                    weights = step(weights, version)


@pytest.mark.parametrize("delta_bytes", [1, LARGE // 8])
def test_deltas_are_kept_within_bounds(tmp_path: Path, delta_bytes: int) -> None:
    weights, into = state(), zeros()
    with (
        Publisher(ProcessGroupTransport(tmp_path / "meet"), delta="sparse", delta_bytes=delta_bytes) as publisher,
        receiver(tmp_path) as mine,
    ):
        for version in range(1, 6):
            publisher.publish(weights, version)
            settled(version, publisher)
            kept = publisher._half._served.deltas._kept.values()  # type: ignore[attr-defined]
            assert sum(one.nbytes for one in kept) <= delta_bytes
            assert mine.receive(into, timeout=TIMEOUT_S) == version
            assert same(into, weights)
            weights = step(weights, version)


def test_a_block_taken_back_while_it_is_encoded_gives_no_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, slow = sparse.encode, threading.Event()

    def encode(*arguments: Any, **options: Any) -> Any:
        slow.wait(5.0)
        return real(*arguments, **options)

    monkeypatch.setattr(sparse, "encode", encode)
    weights, into = state(), zeros()
    transport = ProcessGroupTransport(tmp_path / "meet")
    with Publisher(transport, delta="sparse", keep_versions=1, max_blocks=2) as publisher, receiver(tmp_path) as mine:
        for version in range(1, 8):  # as fast as it goes: none waits for the encoding
            publisher.publish(weights, version, timeout=TIMEOUT_S)
            weights = step(weights, version)
        slow.set()
        publisher.publish(weights, 8)
        assert mine.receive(into, timeout=TIMEOUT_S) == 8
        assert same(into, weights)
        publisher.publish(weights := step(weights, 8), 9)
        settled(9, publisher)
        assert mine.receive(into, timeout=TIMEOUT_S) == 9
        assert same(into, weights)


def test_publisher_and_receivers_at_full_speed(tmp_path: Path, publisher: Publisher) -> None:
    versions = {1: state()}
    for version in range(1, 12):
        versions[version + 1] = step(versions[version], version)
    wrong: list[str] = []
    done = threading.Event()

    def receive(pause_s: float) -> None:
        into = zeros()
        with receiver(tmp_path) as mine:
            while mine.version != 12:
                found = mine.receive(into, timeout=TIMEOUT_S)
                if not same(into, versions[found]):
                    wrong.append(f"version {found}")
                done.wait(pause_s)

    threads = [threading.Thread(target=receive, args=(pause_s,)) for pause_s in (0.0, 0.01, 0.07)]
    for thread in threads:
        thread.start()
    for version, weights in versions.items():
        publisher.publish(weights, version)
        time.sleep(0.02)
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert not wrong


def test_tensors_smaller_than_a_record_travel_whole(tmp_path: Path) -> None:
    into = {"w": torch.zeros(3), "s": torch.tensor(0, dtype=torch.int64)}
    with (
        Publisher(ProcessGroupTransport(tmp_path / "meet"), delta="sparse", delta_bytes=1 << 30) as publisher,
        receiver(tmp_path) as mine,
    ):
        for version in range(1, 5):
            weights = {"w": torch.randn(3), "s": torch.tensor(version)}
            publisher.publish(weights, version)
            assert mine.receive(into, timeout=TIMEOUT_S) == version
            assert same(into, weights)


def test_within_a_host_nothing_is_encoded(tmp_path: Path) -> None:
    before = events.statistics()["sync_deltas_encoded"]
    into = zeros()
    with (
        Publisher(SharedMemoryTransport(tmp_path / "meet"), delta="sparse") as publisher,
        Receiver(SharedMemoryTransport(tmp_path / "meet")) as mine,
    ):
        for version in (1, 2):
            publisher.publish(state(version), version)
            mine.receive(into, timeout=TIMEOUT_S)
    assert events.statistics()["sync_deltas_encoded"] == before
