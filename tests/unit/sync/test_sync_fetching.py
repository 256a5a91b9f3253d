"""What the receiving half does for channels that bring buckets themselves, and may read them too late."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from slots import ReceiveSlots, SlotTransport

from holdfast.coordination.deadline import Deadline
from holdfast.errors import PeerLost
from holdfast.sync import Publisher, Receiver

TIMEOUT_S = 120.0


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"w.{index}": torch.randn(16, 32, generator=generator) for index in range(8)}


class Fetching(ReceiveSlots):
    """Shared memory that notes what is fetched, and while what else is read."""

    fetched: ClassVar[list[tuple[int, bool]]] = []
    unread: ClassVar[set[int]] = set()

    def post(self, seq: int, nbytes: int, lane: Any) -> None:
        super().post(seq, nbytes, lane)
        self.unread.add(seq)

    def fetch(self, seq: int) -> None:
        self.fetched.append((seq, seq - 1 in self.unread))

    def release(self, seq: int) -> None:
        super().release(seq)
        self.unread.remove(seq)


class Wrong(ReceiveSlots):
    """What is read is wrong: the publisher has given this receiver up, and filled the slot anew."""

    links: ClassVar[list[Any]] = []

    def take(self, seq: int, deadline: Deadline) -> torch.Tensor:
        self.links[0].sock.shutdown(0)
        return super().take(seq, deadline) + 1


def test_the_next_bucket_is_fetched_while_one_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slots.ReceiveSlots", Fetching)
    Fetching.fetched.clear()
    into = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    with Publisher(SlotTransport(tmp_path), 128, bypass_cpu=False) as publisher:
        publisher.publish(weights(1), 1)
        with Receiver(SlotTransport(tmp_path)) as receiver:
            assert receiver.receive(into, timeout=TIMEOUT_S) == 1
    assert all(torch.equal(into[name], tensor) for name, tensor in weights(1).items())
    assert Fetching.fetched  # of 128 buckets
    assert all(is_ahead for _, is_ahead in Fetching.fetched)


def test_who_was_given_up_is_told_so_and_not_that_bytes_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slots.ReceiveSlots", Wrong)
    into = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    with Publisher(SlotTransport(tmp_path), bypass_cpu=False) as publisher:
        publisher.publish(weights(1), 1)
        with Receiver(SlotTransport(tmp_path)) as receiver:
            Wrong.links = receiver._half._connection.links
            with pytest.raises(PeerLost, match="publisher rank 0 was lost while it sent version 1"):
                receiver.receive(into, timeout=TIMEOUT_S)
            assert receiver.version is None
    assert not any(tensor.any() for tensor in into.values())
