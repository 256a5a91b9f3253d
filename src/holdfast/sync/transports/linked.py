"""Implement what transports over links have in common: publisher and receiver, on top of their own channels.

`MappedSlots` receives where both sides have mapped the slots: an announced bucket is already there, and is a view of
the slot that its number says. Nothing is copied. Mapping the memory, and waiting for whoever writes to it, is for
``shared_memory`` and ``cuda_ipc``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import ConfigError
from holdfast.sync.session.channel import SLOTS
from holdfast.sync.session.publish import LinkedPublishing
from holdfast.sync.session.receive import LinkedReceiving
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.coordination.deadline import Deadline
    from holdfast.sync.protocol import PublisherOptions, Publishing, Receiving
    from holdfast.sync.session.channel import Channels


class LinkedTransport:
    """Base class of transports over links; implements `Transport` with the `Channels` that a subclass makes."""

    def __init__(
        self,
        rendezvous: Any,
        *,
        process_group: Any | None = None,
        peer_timeout_s: float = 30.0,
        host: str | None = None,
    ) -> None:
        if rendezvous is None:
            raise ConfigError(
                "rendezvous must be the path of a shared directory, 'tcp://host:port' or a Store", field="rendezvous"
            )
        self._rendezvous = rendezvous
        self.process_group = process_group
        self._host = host
        self._peer_timeout_s = checked_seconds("peer_timeout_s", peer_timeout_s)

    def make_channels(self) -> Channels:
        """Return channels for one publisher rank or one receiver."""
        raise NotImplementedError

    def publishing(self, options: PublisherOptions) -> Publishing:
        return LinkedPublishing(
            self.make_channels(),
            options,
            rendezvous=self._rendezvous,
            process_group=self.process_group,
            host=self._host,
            peer_timeout_s=self._peer_timeout_s,
        )

    def receiving(self) -> Receiving:
        return LinkedReceiving(self.make_channels(), rendezvous=self._rendezvous, peer_timeout_s=self._peer_timeout_s)


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
