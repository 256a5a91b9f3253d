"""A publisher rank, or a receiver, that dies or stops at a word it is about to say: see test_sync_kills.py.

Every word of a weight sync goes through `Link.send`, so a word stands for a phase. What happens is told on standard
output, a JSON object a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError
from holdfast.sync.publisher import Publisher
from holdfast.sync.receiver import Receiver
from holdfast.sync.session.links import Link

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from slots import SlotTransport

PEER_TIMEOUT_S = 3.0
RECEIVE_S = 20.0
PUBLISH_S = 25.0


def tell(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def state_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"w.{index}": torch.randn(40, 30, generator=generator) for index in range(4)}


def is_right(into: dict[str, torch.Tensor], version: int | None) -> bool:
    expected = state_of(version) if version is not None else {name: torch.zeros(40, 30) for name in into}
    return all(torch.equal(into[name], tensor) for name, tensor in expected.items())


def end_at(word: str | None, number: int, sign: str) -> None:
    """Send this process a signal when it is about to say ``word`` for the ``number``-th time."""
    if word is None:
        return
    said, plain = 0, Link.send

    def send(link: Link, message: Any) -> None:
        nonlocal said
        if type(message).__name__ == word:
            said += 1
            if said == number:
                os.kill(os.getpid(), getattr(signal, sign))
                time.sleep(0.2)
        plain(link, message)

    Link.send = send  # type: ignore[method-assign]


def transport_of(kind: str, place: str) -> Any:
    assert kind == "slots"
    return SlotTransport(place, peer_timeout_s=PEER_TIMEOUT_S)


def publish(
    place: str,
    kind: str,
    first: int,
    last: int,
    receivers: int,
    rank: int = 0,
    world: int = 1,
    port: int = 0,
    word: str | None = None,
    number: int = 1,
    sign: str = "SIGKILL",
) -> None:
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=30))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    options = {"bucket_bytes": 4096, "receivers": receivers}
    end_at(word, number, sign)
    publisher = Publisher(transport_of(kind, place), **options)
    for version in range(first, last + 1):
        began = time.monotonic()
        try:
            done = publisher.publish(state_of(version), version, timeout=PUBLISH_S)
            tell(published=version, receivers=done.receivers, lost=done.lost, seconds=time.monotonic() - began)
        except HoldfastError as error:
            tell(failed=version, error=type(error).__name__, message=str(error), seconds=time.monotonic() - began)
    publisher.close()
    os._exit(0)  # a group whose ranks are gone is not worth waiting for


def receive(
    place: str,
    kind: str,
    last: int,
    word: str | None = None,
    number: int = 1,
    sign: str = "SIGKILL",
    until_error: bool = False,
) -> None:
    end_at(word, number, sign)
    receiver = Receiver(transport_of(kind, place))
    into = {f"w.{index}": torch.zeros(40, 30) for index in range(4)}
    while (receiver.version or 0) < last:
        began = time.monotonic()
        try:
            receiver.receive(into, timeout=RECEIVE_S)
            said: dict[str, Any] = {"received": receiver.version}
        except HoldfastError as error:
            said = {"error": type(error).__name__, "message": str(error), "version": receiver.version}
        tell(**said, right=is_right(into, receiver.version), dirty=receiver.dirty, seconds=time.monotonic() - began)
        if "error" in said and (until_error or said["error"] == "DeadlineExceeded"):
            break
    receiver.close()
