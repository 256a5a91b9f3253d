"""A publisher of versions, as fast as it can, or a receiver of them; see test_sync_blocks.py, test_sync_delta_kills.py.

What happens is told on standard output, a JSON object a line.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.sync.publisher import Publisher
from holdfast.sync.receiver import Receiver
from holdfast.sync.transports.directory import DirectoryTransport
from holdfast.sync.transports.process_group import ProcessGroupTransport
from holdfast.sync.transports.shared_memory import SharedMemoryTransport

ELEMENTS = 1 << 18
TENSORS = 8
NBYTES = 4 * ELEMENTS * TENSORS
STEP = 0x9E3779B1
"""Added to every element from version to version: a part of another version shows in each element."""
TIMEOUT_S = 20.0


def tell(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def base() -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.int32) * 40_503


def offset(version: int, tensor: int) -> int:
    return ((version * STEP + tensor * 7919 + (1 << 31)) % (1 << 32)) - (1 << 31)


def values(kind: str, version: int, tensor: int) -> torch.Tensor:
    """A tensor of a version: other everywhere than in any other version, or for deltas in every 64th element."""
    if kind != "deltas":
        return base() + offset(version, tensor)
    return base() + (torch.arange(ELEMENTS, dtype=torch.int32) + 7 * tensor + version) // 64


def transport_of(kind: str, place: str) -> Any:
    if kind == "deltas":
        return DirectoryTransport(place)
    if kind == "network":
        return ProcessGroupTransport(place, "gloo")
    return SharedMemoryTransport(place)


def wrong(kind: str, into: dict[str, torch.Tensor], version: int) -> list[str]:
    return [
        name
        for index, (name, tensor) in enumerate(into.items())
        if not torch.equal(tensor, values(kind, version, index))
    ]


def shared_bytes() -> int:
    """Shared memory of this process, all that it has mapped and touched."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem"))


def publish(place: str, kind: str, seconds: float, first: int = 1) -> None:
    options: dict[str, Any] = {"delta": "sparse", "anchor_every": 4} if kind == "deltas" else {}
    weights = {f"w{index}": base() for index in range(TENSORS)}
    version, until, slowest = first - 1, time.monotonic() + seconds, 0.0
    with Publisher(transport_of(kind, place), **options) as publisher:
        tell(started=True)
        version = max((version, *publisher.versions))
        said = time.monotonic()
        while time.monotonic() < until:
            version += 1
            for index, tensor in enumerate(weights.values()):
                tensor.copy_(values(kind, version, index))
            began = time.monotonic()
            publisher.publish(weights, version, timeout=TIMEOUT_S)
            if version > first + 4:
                slowest = max(slowest, time.monotonic() - began)
            if time.monotonic() - said > 0.5:
                said = time.monotonic()
                tell(published=version, shared=shared_bytes())
        tell(published=version, shared=shared_bytes(), slowest=slowest)
        tell(done=version)


def receive(place: str, kind: str, seed: int, hold: bool = False) -> None:
    """Receive until killed. hold: keep what was fetched for a while, sometimes."""
    choose = random.Random(seed)
    into = {f"w{index}": torch.zeros(ELEMENTS, dtype=torch.int32) for index in range(TENSORS)}
    with Receiver(transport_of(kind, place)) as receiver:
        while True:
            before = receiver.version
            try:
                version = receiver.fetch(into=into, timeout=TIMEOUT_S)
                if hold and choose.random() < 0.3:
                    time.sleep(choose.random())
                receiver.commit()
            except HoldfastError as error:
                dirty = receiver.dirty
                said = type(error).__name__
                tell(error=said, message=str(error)[:300], dirty=dirty, version=receiver.version, was=before)
                if not dirty and receiver.version is not None and wrong(kind, into, receiver.version):
                    tell(wrong=receiver.version, of="after an error")
                if said in ("DeadlineExceeded", "PeerLost"):
                    break
                continue
            mixed = wrong(kind, into, version)
            tell(received=version, wrong=mixed if mixed or receiver.version != version or receiver.dirty else [])
