"""The seam below buckets: how a publisher rank's slots reach the members of its sessions.

A transport that implements `Channels` gets sessions, versions, retries and deadlines from what is above: see
``sync.publishing`` and ``sync.receiving``. What is said on links is the sessions', not the transport's.

Each publisher rank has a `SendChannel` for its present set of members, and each of these a `ReceiveChannel` from that
rank: an *epoch*. A new set means new channels. Buckets of an epoch are numbered from 0, over all its sessions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from holdfast.sync.deadline import Deadline

SLOTS = 2
"""Of a publisher rank, each ``bucket_bytes`` long: one is filled while the other is sent and applied."""


@contextlib.contextmanager
def bucket_memory(bucket_bytes: int) -> Iterator[None]:
    """Whoever makes slots does it in this context: a `ConfigError` says so where there is no memory for them."""
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
    """Of one publisher rank, for one set of members. For one thread, but `open`, `wait_sent` and `close`."""

    @property
    def blocks(self) -> bool:
        """Whether `open` and `wait_sent` may block for long; they are then called on a thread of their own."""
        ...

    def offer(self, member: int) -> bytes:
        """What `Channels.receive_channel` of member number ``member`` needs to know. Called once a member, first."""
        ...

    def open(self, deadline: Deadline) -> None:
        """Meet the members, who open theirs meanwhile. Raises `PeerLost`, `DeadlineExceeded`."""
        ...

    def slot(self, slot: int) -> torch.Tensor:
        """One-dimensional uint8, ``bucket_bytes`` long, where buckets are packed."""
        ...

    def start(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        """Begin to send the first ``nbytes`` of slot ``seq % SLOTS`` to these members (their numbers, ascending)."""
        ...

    def wait_sent(self, seq: int, deadline: Deadline) -> None:
        """Returns when the slot may be filled again, as far as sending goes. Raises `PeerLost`, `DeadlineExceeded`."""
        ...

    def close(self) -> None:
        """Let go; ends waits of others on it, here and at the members. Idempotent; any thread."""
        ...


@runtime_checkable
class SendsApart(Protocol):
    """A `SendChannel` that can send a bucket from several memories, in which case its slot may be one of them."""

    def start_apart(self, seq: int, parts: Sequence[torch.Tensor], lane: Sequence[int]) -> None:
        """Begin to send ``parts``, bytes in host memory, to these members; they stay as they are until `wait_sent`."""
        ...


@runtime_checkable
class ReceivesApart(Protocol):
    """The other end: a `ReceiveChannel` that can receive into several memories."""

    def post_apart(
        self, seq: int, nbytes: int, lane: Sequence[int], place: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    ) -> None:
        """As `ReceiveChannel.post`. ``place``: given the slot, says where the parts go, each as long as it is sent."""
        ...


@runtime_checkable
class Fetches(Protocol):
    """A `ReceiveChannel` whose buckets don't come by themselves, but are brought."""

    def fetch(self, seq: int) -> None:
        """Begin to bring a bucket that was posted and is there by now, if that hasn't begun; `take` does so at last."""
        ...


class ReceiveChannel(Protocol):
    """Of one receiver, from one publisher rank. For one thread, but `open`, `take` and `close`."""

    @property
    def blocks(self) -> bool:
        """Whether `open` and `take` may block for long; they are then called on a thread of their own."""
        ...

    def open(self, deadline: Deadline) -> None:
        """Meet the publisher rank, and its other members. Raises `PeerLost`, `DeadlineExceeded`."""
        ...

    def post(self, seq: int, nbytes: int, lane: Sequence[int]) -> None:
        """Bucket ``seq`` may come; at most `SLOTS` are posted and not released."""
        ...

    def take(self, seq: int, deadline: Deadline) -> torch.Tensor:
        """The bytes of a bucket that was posted, to be read only, until `release`. Raises as `open` does."""
        ...

    def release(self, seq: int) -> None:
        """Its slot is free."""
        ...

    def close(self) -> None:
        """Let go; ends waits of others on it. Idempotent; any thread."""
        ...


class Channels(Protocol):
    """What a transport over links brings."""

    @property
    def host(self) -> str:
        """The address to listen on for links: a loopback one where both ends are on one host, "" for all."""
        ...

    def address(self) -> bytes:
        """Of this receiver: what publisher ranks need to know to hand something over to it."""
        ...

    def send_channel(self, addresses: Sequence[bytes], bucket_bytes: int) -> SendChannel:
        """A channel to the members at ``addresses``. Doesn't wait for them."""
        ...

    def receive_channel(self, offer: bytes, bucket_bytes: int) -> ReceiveChannel:
        """The other end of what a publisher rank offers. Doesn't wait for it."""
        ...

    def close(self) -> None:
        """Let go of what `address` is about; idempotent."""
        ...
