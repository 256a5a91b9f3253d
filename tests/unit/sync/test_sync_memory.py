"""What is closed leaves no memory of the size of a version behind, also where Python's cyclic collector is off."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.staging.image import unmap_unused
from holdfast.sync import ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport

TIMEOUT_S = 20.0
SHORT_S = 5.0


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def blocks() -> set[str]:
    """The blocks of versions that this process has mapped, or has a descriptor of, by inode."""
    unmap_unused()
    found = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "holdfast-image" in line}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "holdfast-image" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add(str(os.stat(int(fd)).st_ino))
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("delta", [None, "sparse"])
@pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessGroupTransport])
def test_a_publisher_and_a_receiver_that_were_closed_leave_no_block(
    tmp_path: Path, kind: Any, delta: str | None
) -> None:
    before = blocks()
    weights, into = {"weight": torch.randn(300_000)}, {"weight": torch.zeros(300_000)}
    publisher, receiver = Publisher(kind(tmp_path), delta=delta), Receiver(kind(tmp_path), into)
    for version in (1, 2, 3):
        weights["weight"][version] += 1
        publisher.publish(weights, version, timeout=TIMEOUT_S)
        assert receiver.receive(timeout=TIMEOUT_S) == version
    assert blocks() - before
    receiver.close()
    publisher.close()
    del receiver, publisher
    ends_s = time.monotonic() + SHORT_S  # their threads end by themselves
    while blocks() - before and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not blocks() - before
