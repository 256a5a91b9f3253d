"""Publisher ranks on threads of one process: what goes wrong on one of them, and that the next version goes through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from slots import SlotTransport

from holdfast.coordination.board import LocalBoard
from holdfast.coordination.group import Group
from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError, PeerLost, StateMismatch
from holdfast.sync import Publisher, Receiver
from holdfast.sync.session import publish as publishing

TIMEOUT_S = 120.0
Start = Callable[..., "Future[Any]"]
Weights = dict[str, torch.Tensor]


class Sides:
    """Two publisher ranks, each with a tensor of its own and one in common, and a receiver."""

    def __init__(
        self, place: Path, start: Start, *, bypass_cpu: bool, peer_timeout_s: float = 5.0, bucket_bytes: int = 4096
    ) -> None:
        groups = [Group(rank, 2, (0, 1), board) for rank, board in enumerate(LocalBoard.of_world(2))]
        transports = [SlotTransport(place, process_group=it, peer_timeout_s=peer_timeout_s) for it in groups]
        made = [start(Publisher, it, bucket_bytes=bucket_bytes, bypass_cpu=bypass_cpu) for it in transports]
        self.publishers: list[Publisher] = [it.result(TIMEOUT_S) for it in made]
        self.receiver = Receiver(SlotTransport(place, peer_timeout_s=peer_timeout_s))
        self.into = {name: torch.zeros(5000) for name in ("common", "of 0", "of 1")}
        self._start = start

    def publish(self, rank: int, version: int, timeout: float = TIMEOUT_S, weights: Any = None) -> Future[Any]:
        given = {name: torch.full((5000,), float(version)) for name in ("common", f"of {rank}")}
        return self._start(self.publishers[rank].publish, given if weights is None else weights, version, timeout)

    def go_on(self, version: int) -> None:
        """The next version, from both ranks, goes through."""
        received = self._start(self.receiver.receive, self.into, version, TIMEOUT_S)
        for published in [self.publish(rank, version) for rank in range(2)]:
            published.result(TIMEOUT_S)
        assert received.result(TIMEOUT_S) == version
        assert all(tensor.eq(version).all() for tensor in self.into.values())

    def close(self) -> None:
        self.receiver.close()
        for publisher in self.publishers:
            publisher.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(publishing, "open_group", lambda group, **_: group)
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def fails_half_way() -> Iterator[tuple[str, torch.Tensor]]:
    yield "common", torch.zeros(5000)
    raise OSError("the disk is gone")


@pytest.mark.parametrize("bypass_cpu", [True, False])
def test_whatever_goes_wrong_on_one_rank_both_are_told_and_go_on(
    tmp_path: Path, start: Start, bypass_cpu: bool
) -> None:
    sides = Sides(tmp_path, start, bypass_cpu=bypass_cpu)
    version = 1
    sides.go_on(version)
    for wrong, kind, words in (
        ({"common": None}, ConfigError, "common: weights has NoneType there"),
        (fails_half_way(), OSError, "the disk is gone"),
        ({"common": torch.zeros(2)}, StateMismatch, "'common' differs between ranks"),
    ):
        both = [sides.publish(0, version + 1), sides.publish(1, version + 1, weights=wrong)]
        with pytest.raises(kind if issubclass(kind, HoldfastError) else HoldfastError, match=words):
            both[0].result(TIMEOUT_S)
        with pytest.raises(kind, match=words):
            both[1].result(TIMEOUT_S)
        version += 2
        sides.go_on(version)
    both = [sides.publish(0, version + 1), sides.publish(1, version + 2)]
    for one in both:
        with pytest.raises(ConfigError, match=f"rank 0 publishes version {version + 1}, but rank 1 version"):
            one.result(TIMEOUT_S)
    with pytest.raises(ConfigError, match="timeout"):
        sides.publish(1, version + 1, timeout=0).result(TIMEOUT_S)
    with pytest.raises(DeadlineExceeded, match=r"rank\(s\) 1 of 2 had not published this version"):
        sides.publish(0, version + 1, timeout=0.1).result(TIMEOUT_S)
    sides.go_on(version + 1)
    sides.go_on(version + 2)
    sides.close()


def test_a_rank_that_has_done_its_part_of_a_session_is_not_silent(tmp_path: Path, start: Start) -> None:
    """The session goes on at rank 0 for as long as receivers need; one that takes too long is no fault of its."""

    def dawdle(name: str, tensor: torch.Tensor) -> None:
        time.sleep(0.5)

    sides = Sides(tmp_path, start, bypass_cpu=True, peer_timeout_s=0.6)
    received = start(sides.receiver.receive, dawdle, None, TIMEOUT_S)
    for published in [sides.publish(rank, 1) for rank in range(2)]:
        assert (published.result(TIMEOUT_S).receivers, published.result().lost) == (1, 0)
    assert received.result(TIMEOUT_S) == 1
    sides.go_on(2)
    sides.close()


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_a_receiver_that_falls_silent_costs_another_nothing(tmp_path: Path, start: Start, bucket_bytes: int) -> None:
    """Whichever rank notices first; and where the other one has committed, and says nothing more to the ranks."""
    going_on = threading.Event()
    sides = Sides(tmp_path, start, bypass_cpu=True, peer_timeout_s=1.0, bucket_bytes=bucket_bytes)
    with Receiver(SlotTransport(tmp_path)) as other:
        silent = start(other.receive, lambda name, tensor: going_on.wait(TIMEOUT_S), None, TIMEOUT_S, streaming=True)
        time.sleep(0.2)
        received = start(sides.receiver.receive, sides.into, None, TIMEOUT_S)
        for published in [sides.publish(rank, 1) for rank in range(2)]:
            assert (published.result(TIMEOUT_S).receivers, published.result().lost) == (1, 1)
        assert received.result(TIMEOUT_S) == 1
        sides.go_on(2)
        going_on.set()
        assert isinstance(silent.exception(TIMEOUT_S), (PeerLost, type(None)))  # it may have had all of it already
    sides.close()


def test_ranks_need_not_speak_between_versions(tmp_path: Path, start: Start) -> None:
    sides = Sides(tmp_path, start, bypass_cpu=False, peer_timeout_s=0.5)
    sides.go_on(1)
    time.sleep(0.7)
    assert sides.receiver.receive(sides.into, version=1, timeout=TIMEOUT_S) == 1
    sides.close()
