"""Publishers and receivers as users write them, for type checkers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from typing_extensions import assert_type

import holdfast
from holdfast.sync import (
    DirectoryTransport,
    ProcessGroupTransport,
    Published,
    Publisher,
    Receiver,
    ReceiveStats,
    SharedMemoryTransport,
)


def publish(model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    with Publisher(SharedMemoryTransport("/tmp/run"), bucket_bytes=256 * 2**20, keep_versions=2) as publisher:
        assert_type(publisher, Publisher)
        assert_type(publisher.publish(model.state_dict(), 1), Published)
        assert_type(publisher.publish(dict(model.named_parameters()), 2, timeout=60.0), Published)
        publisher.publish(weights, 3, meta={"loss": 0.5})
        publisher.publish(model, 4)
        assert_type(publisher.versions, tuple[int, ...])
        publisher.pin(4)
        publisher.unpin(4)
    Publisher(DirectoryTransport("s3://bucket/versions"), delta="sparse", anchor_every=10).close()
    holdfast.sync.Publisher(ProcessGroupTransport("tcp://host:29400", fan_out=True)).close()


def receive(model: torch.nn.Module) -> None:
    def apply(name: str, tensor: torch.Tensor) -> None:
        print(name, tensor.shape)

    with Receiver(DirectoryTransport("versions")) as receiver:
        assert_type(receiver, Receiver)
        assert_type(receiver.receive(model), int)
        receiver.receive(dict(model.named_parameters()), version=3, timeout=5.0, streaming=True)
        receiver.receive(apply)
        assert_type(receiver.poll(), int | None)
        assert_type(receiver.fetch(3, into=model, timeout=1.0), int)
        assert_type(receiver.commit(), int)
        assert_type(receiver.version, int | None)
        assert_type(receiver.fetched, int | None)
        assert_type(receiver.dirty, bool)
        assert_type(receiver.meta, Mapping[str, Any])
        assert_type(receiver.stats, ReceiveStats | None)
        receiver.cancel()
