"""Weights that are tied at a receiver and published under two names, over every transport."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from slots import SlotTransport
from torch import nn

import holdfast
from holdfast.errors import ConfigError, StateMismatch
from holdfast.sync import DirectoryTransport, ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport

TIMEOUT_S = 60.0
KINDS = [SharedMemoryTransport, ProcessGroupTransport, DirectoryTransport]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def untied(model: Tied, *, equal: bool) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if not equal:
        found["head.weight"][7, 7] += 1
    return found


@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_arrive_and_others_are_refused(
    tmp_path: Path, pool: ThreadPoolExecutor, kind: Any, bypass: bool
) -> None:
    source, into = Tied(), Tied()
    with Publisher(kind(tmp_path), bypass_cpu=bypass) as publisher, Receiver(kind(tmp_path)) as receiver:

        def send(weights: dict[str, torch.Tensor], version: int) -> Future[int]:
            received = pool.submit(receiver.receive, into, None, TIMEOUT_S)
            publisher.publish(weights, version, TIMEOUT_S)
            return received

        assert send(source.state_dict(), 1).result() == 1
        assert torch.equal(into.embed.weight, source.embed.weight)
        with torch.no_grad():
            source.embed.weight.add_(1)
        assert send(untied(source, equal=True), 2).result() == 2
        assert torch.equal(into.embed.weight, source.embed.weight)
        received = pool.submit(receiver.receive, into, None, TIMEOUT_S)
        with contextlib.suppress(StateMismatch):  # where it waits for receivers, it is told
            publisher.publish(untied(source, equal=False), 3, TIMEOUT_S)
        with pytest.raises(StateMismatch, match=r"`embed.weight` and `head.weight`"):
            received.result()
        assert receiver.version == 2
        assert not receiver.dirty
        assert torch.equal(into.embed.weight, source.embed.weight), "the live weights are those of version 2"


@pytest.mark.parametrize("kind", [SlotTransport, SharedMemoryTransport])
def test_what_is_tied_at_the_publisher_is_sent_once(tmp_path: Path, pool: ThreadPoolExecutor, kind: Any) -> None:
    source, into = Tied(), Tied()
    with Publisher(kind(tmp_path)) as publisher, Receiver(kind(tmp_path)) as receiver:
        for version, weights, copies in (
            (1, source.state_dict(), 1),
            (2, untied(source, equal=True), 2),
            (3, source.state_dict(), 1),
        ):
            received = pool.submit(receiver.receive, into, None, TIMEOUT_S)
            before = holdfast.statistics()["sync_bytes_staged"]
            published = publisher.publish(weights, version, TIMEOUT_S)
            staged = holdfast.statistics()["sync_bytes_staged"] - before
            assert published.bytes_sent + staged == copies * source.embed.weight.nbytes
            received.result()


def test_a_flat_dictionary_of_tied_tensors(tmp_path: Path) -> None:
    source, into = Tied(), Tied()
    receiver = Receiver(DirectoryTransport(tmp_path))
    with Publisher(DirectoryTransport(tmp_path)) as publisher:
        publisher.publish(source.state_dict(), 1)
        assert receiver.receive(into.state_dict()) == 1
        assert torch.equal(into.embed.weight, source.embed.weight)
        publisher.publish(untied(source, equal=False), 2)
        with pytest.raises(StateMismatch):
            receiver.receive(into.state_dict())
        assert torch.equal(into.embed.weight, source.embed.weight)


def test_exports_as_versions(tmp_path: Path) -> None:
    """A Hugging Face directory has no checksums of tensors: both are read."""
    into = Tied()
    apart = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    holdfast.export_hf(apart, tmp_path / "version-1")
    with pytest.raises(StateMismatch):
        Receiver(DirectoryTransport(tmp_path)).receive(into)
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    holdfast.export_hf(apart, tmp_path / "version-2")
    assert Receiver(DirectoryTransport(tmp_path)).receive(into) == 2
    assert torch.equal(into.head.weight, apart.embed.weight)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_share_a_part_of_their_memory_are_refused(tmp_path: Path, kind: Any, streaming: bool) -> None:
    """Whatever is written to one is lost in the other: such a receiver had a version's number, but not its values."""
    sent = {"a": torch.ones(8), "b": torch.zeros(8)}
    memory = torch.full((16,), 5.0)
    parts = {"a": memory[:8], "b": memory[4:12]}
    recast = {"a": memory[:8], "b": memory[:8].view(2, 4)}
    with Publisher(kind(tmp_path), bypass_cpu=False) as publisher, Receiver(kind(tmp_path)) as receiver:
        publisher.publish(sent, 1, TIMEOUT_S)
        with pytest.raises(ConfigError, match="shares memory with `a`"):
            receiver.receive(parts, None, TIMEOUT_S, streaming)
        publisher.publish({**sent, "b": torch.zeros(2, 4)}, 2, TIMEOUT_S)
        with pytest.raises(ConfigError, match="shares memory with `a`"):
            receiver.receive(recast, None, TIMEOUT_S, streaming)
        assert receiver.version is None
        assert not receiver.dirty
        assert memory.eq(5).all()

        publisher.publish(sent, 3, TIMEOUT_S)
        apart = {"a": memory[::2], "b": memory[1::2]}  # they alternate
        assert receiver.receive(apart, None, TIMEOUT_S, streaming) == 3
        assert all(torch.equal(apart[name], sent[name]) for name in sent)
