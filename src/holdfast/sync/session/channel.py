"""The interface below buckets: how a publisher rank's slots reach the members of its sessions.

A transport that implements `Channels` gets sessions, versions, retries and deadlines from ``session.publish`` and
``session.receive``. Messages on links belong to the sessions, not to the transport.

Each publisher rank has a `SendChannel` for its current set of members, and each of these a `ReceiveChannel` from that
rank: an *epoch*. A new set of members means new channels. Buckets of an epoch are numbered from 0, over all its
sessions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from holdfast.coordination.deadline import Deadline

SLOTS = 2
"""Slots of a publisher rank, each of ``bucket_bytes``: one is filled while the other is sent and applied."""


@contextlib.contextmanager
def bucket_memory(bucket_bytes: int) -> Iterator[None]:
    """Context for allocating slots: raises `ConfigError` if there is not enough memory."""
    try:
        yield
    except (OSError, RuntimeError, OverflowError, MemoryError) as error:
        if isinstance(error, HoldfastError):
            raise
        raise ConfigError(
            f"no memory for {SLOTS} buckets of {bucket_bytes} bytes ({str(error)[:200]}); give a smaller bucket_bytes",
            field="bucket_bytes",
        ) from error


class SendChannel(Protocol):
    """Channel of a publisher rank for one set of members. For one thread, except `open`, `wait_sent` and `close`."""

    @property
    def blocks(self) -> bool:
        """Return True if `open` and `wait_sent` may block for long; they are then called on a separate thread."""
        ...

    def offer(self, member: int) -> bytes:
        """Return what `Channels.receive_channel` of member ``member`` needs to know. Called first, once per member."""
        ...

    def open(self, deadline: Deadline) -> None:
        """Meet the members, which open theirs meanwhile. Raises `PeerLost`, `DeadlineExceeded`."""
        ...

    def slot(self, slot: int) -> torch.Tensor:
        """Return the memory of a slot, where buckets are packed: one-dimensional uint8 of ``bucket_bytes``."""
        ...

    def start(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        """Begin to send the first ``nbytes`` of slot ``seq % SLOTS`` to the members ``lane`` (numbers, ascending)."""
        ...

    def wait_sent(self, seq: int, deadline: Deadline) -> None:
        """Wait until the bucket is sent, so that its slot may be refilled. Raises `PeerLost`, `DeadlineExceeded`."""
        ...

    def close(self) -> None:
        """Release everything; ends waits on the channel, here and at the members. Idempotent; any thread."""
        ...


@runtime_checkable
class Fetches(Protocol):
    """A `ReceiveChannel` whose buckets have to be fetched."""

    def fetch(self, seq: int) -> None:
        """Begin to fetch a posted bucket that is ready, if that hasn't begun; otherwise `take` does so."""
        ...


class ReceiveChannel(Protocol):
    """Channel of one receiver from one publisher rank. For one thread, except `open`, `take` and `close`."""

    @property
    def blocks(self) -> bool:
        """Return True if `open` and `take` may block for long; they are then called on a separate thread."""
        ...

    def open(self, deadline: Deadline) -> None:
        """Meet the publisher rank, and its other members. Raises `PeerLost`, `DeadlineExceeded`."""
        ...

    def post(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        """Expect bucket ``seq``; at most `SLOTS` buckets are posted and not released."""
        ...

    def take(self, seq: int, deadline: Deadline) -> torch.Tensor:
        """Return the bytes of a posted bucket, read-only, valid until `release`. Raises as `open` does."""
        ...

    def release(self, seq: int) -> None:
        """Free the slot of a bucket."""
        ...

    def close(self) -> None:
        """Release everything; ends waits on the channel. Idempotent; any thread."""
        ...


class Channels(Protocol):
    """Factory for the channels of a transport over links."""

    @property
    def host(self) -> str:
        """Return the address to listen on for links: loopback if both ends are on one host, "" for all."""
        ...

    def address(self) -> bytes:
        """Return this receiver's address: what publisher ranks need in order to send to it."""
        ...

    def send_channel(self, addresses: Sequence[bytes], bucket_bytes: int) -> SendChannel:
        """Return a channel to the members at ``addresses``. Doesn't wait for them."""
        ...

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveChannel:
        """Return the other end of a publisher rank's ``offer``. Doesn't wait for it."""
        ...

    def close(self) -> None:
        """Release the resources behind `address`; idempotent."""
        ...
