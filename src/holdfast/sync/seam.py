"""The seam between `Publisher` / `Receiver`, which users hold, and what carries versions for them. Types only.

    Publisher --publishing(options)--> Publishing     sends, or saves, versions; one for the life of a publisher
    Receiver  --receiving()----------> Receiving      brings a version to a destination; one for the life of a receiver
                                          |
                                          +--> Destination    the user's module, dict or function, for one receive

A transport that moves buckets over links has its halves from one shared implementation, above its channels
(``transports/base.py``). One that does not, such as a directory of versions, brings halves of its own. Publisher and
Receiver know nothing but this.

Who checks what: `Publisher` and `Receiver` check arguments (types, ranges, names, the version against the last one of
this publisher) before a half is called; a half raises for what only it can know. `Receiver` owns ``version`` and
``dirty``: it has the one from `Destination.commit`, the other from `Destination.dirty`, both while a receive goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from holdfast.sharing import Shares
    from holdfast.sync.deadline import Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """What a `Publisher` was made with; see there."""

    bucket_bytes: int = 256 * 2**20
    bypass_cpu: bool = True
    keep_versions: int = 2
    atomic_fleet: bool = False
    receivers: int = 1
    delta: bool = False
    full_every: int = 16
    captures: Shares | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What became of one `publish`.

    ``receivers``: how many have committed the version; ``lost``: how many were given up meanwhile; both 0 where a
    version is kept for whoever asks later. ``bytes_sent``: by this rank. ``seconds``: from the call to its return.
    """

    version: int
    receivers: int
    lost: int
    bytes_sent: int
    seconds: float


class TensorInfo(NamedTuple):
    """What is published under a name: global shape, and dtype by name (``"bfloat16"``)."""

    shape: tuple[int, ...]
    dtype: str


class Publishing(Protocol):
    """A transport's half on one publisher rank. Every method is called on all ranks alike, by one thread at a time."""

    def publish(self, weights: Callable[[], Mapping[str, torch.Tensor]], version: int, deadline: Deadline) -> Published:
        """Send, stage or save ``weights`` as ``version``; the same outcome on every rank.

        weights: called once; what it raises on this rank the other ranks are told. version: greater than that of any
        `publish` before; a half that finds a newer or equal one out there raises `ConfigError` before anything is sent.

        Raises `DeadlineExceeded`, and what a transport documents.
        """
        ...

    def pin(self, version: int) -> None:
        """Keep ``version`` until it is unpinned. Raises `CheckpointNotFound` if it isn't kept any more."""
        ...

    def unpin(self, version: int) -> None:
        """Let ``version`` go when its time comes; fine if it isn't pinned."""
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that a receiver could ask for, ascending."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent. What was published and outlives a process stays."""
        ...


class Destination(Protocol):
    """Where one version goes: made anew for each receive, from what the user gave; `Receiver` has it made.

    In order: `select`, `memory`, `complete` for each name as it becomes whole, and `commit`; or `abandon` at any
    point, after a failure. By default bytes go to a shadow, and `commit` copies them to the live tensors; with
    ``streaming`` `memory` gives the live tensors themselves. For a function, both hold whole tensors that are made for
    it; it is called by `commit`, or with ``streaming`` by `complete`.
    """

    @property
    def into(self) -> Any:
        """What the user gave: an ``nn.Module``, a mapping of tensors, or a function."""
        ...

    @property
    def streaming(self) -> bool:
        """Whether bytes go straight into the live tensors."""
        ...

    @property
    def dirty(self) -> bool:
        """Whether live tensors may hold a part of a version: of one under way, or that failed half way."""
        ...

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        """The names that are wanted, now that it is known what there is; touches nothing.

        Each has its bytes written once: a tied parameter is wanted under one of its names. Raises `StateMismatch`
        naming what is missing, unexpected, or of another shape or dtype.
        """
        ...

    def memory(self, name: str) -> torch.Tensor:
        """The tensor (a DTensor where the live one is) to write ``name`` into; its content is undefined but for `base`.

        With ``streaming`` the destination is dirty from here on. For a function it is made when asked for.
        """
        ...

    @property
    def base(self) -> int | None:
        """The version that `memory` of all names holds whole, of the publisher it was received from last; or None.

        For who then writes only what differs from it; to be asked after `memory`.
        """
        ...

    def forget(self) -> None:
        """What comes is of another publisher than what was received before: there is no `base`."""
        ...

    def complete(self, name: str) -> None:
        """All bytes of ``name`` that this process holds are in `memory` and right."""
        ...

    def commit(self, version: int) -> None:
        """Every name is complete: make it the live version, ``version``; dirty meanwhile, and not afterwards."""
        ...

    def abandon(self) -> None:
        """Nothing more comes. Never raises; leaves `dirty` as it is."""
        ...


class Receiving(Protocol):
    """A transport's half on one receiver. Called from one thread at a time."""

    def receive(self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline) -> int:
        """Bring one version to ``destination``, commit it there, and say which it was.

        version: exactly this one, also an older one; it is waited for if it is yet to come. None: the newest that is
        newer than ``newer_than`` (None: than nothing); it is waited for. Raises `CheckpointNotFound` for one that was
        evicted or is older than any that are kept, `StateMismatch`, `CheckpointCorrupt`, `DeadlineExceeded`; the
        destination is abandoned then, and without ``streaming`` holds what it did before.
        """
        ...

    def leave(self) -> None:
        """Have a `receive` that waits, on another thread, end with `ConfigError`. Doesn't wait for that; any thread."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...


class Transport(Protocol):
    """How versions travel; what `Publisher` and `Receiver` are given."""

    def publishing(self, options: PublisherOptions) -> Publishing:
        """The half of this publisher rank. Called once by `Publisher`, on every rank. Raises `ConfigError`."""
        ...

    def receiving(self) -> Receiving:
        """The half of this receiver. Called once by `Receiver`. Raises `ConfigError`."""
        ...
