"""The receiving half of transports whose two slots both sides have mapped: what is told of a bucket is there already.

Guarantees: a bucket is a view of the slot that its number says; nothing is copied.
Does not: map the memory, or wait for whoever writes to it (``shared_memory`` and ``cuda_ipc`` do).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from holdfast.sync.transports.base import SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sync.deadline import Deadline


class MappedSlots:
    """A publisher rank's slots, mapped: ``memory`` has `SLOTS` of ``slot_bytes`` each; implements `ReceiveChannel`."""

    blocks = False

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._nbytes: dict[int, int] = {}

    def open(self, deadline: Deadline) -> None:
        pass

    def post(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        assert lane
        self._nbytes[seq] = nbytes

    def take(self, seq: int, deadline: Deadline) -> torch.Tensor:  # noqa: ARG002 - it is there already
        start = seq % SLOTS * self._slot_bytes
        return self._memory[start : start + self._nbytes[seq]]

    def release(self, seq: int) -> None:
        del self._nbytes[seq]

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
