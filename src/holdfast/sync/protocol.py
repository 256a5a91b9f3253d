"""The interface between `Publisher` / `Receiver`, which users have, and transports. Types only.

    Publisher --publishing(options)--> Publishing     sends, or saves, versions; one for the life of a publisher
    Receiver  --receiving()----------> Receiving      looks for versions, fetches them; one for the life of a receiver
                                          |
                                          +--> Destination       the user's module, dict or function, for one fetch
                                          +--> FetchedVersion    what is to be committed there

Transports that send buckets over links share one implementation of both halves, above their channels
(``session/channel.py``). Others, such as a directory of versions, have halves of their own. Publisher and Receiver know
only this interface.

Checks: `Publisher` and `Receiver` check arguments (types, ranges, names, the version against the publisher's last one)
before they call a half; a half raises what only it can know. `Receiver` owns ``version``, taken from
`Destination.commit`, and ``dirty``, taken from `Destination.dirty`, both also during a receive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch

    from holdfast.coordination.deadline import Deadline
    from holdfast.saver.capture import SharedCaptures
    from holdfast.state.entries import WholePlace
    from holdfast.sync.weights.buckets import Wanted
    from holdfast.sync.weights.pieces import Weights
    from holdfast.sync.weights.scatter import Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """The options of a `Publisher`, documented there."""

    bucket_bytes: int = 256 * 2**20
    bypass_cpu: bool = True
    keep_versions: int = 2
    receivers: int = 1
    delta: str | None = None
    anchor_every: int = 10
    delta_bytes: int | None = None
    max_blocks: int | None = None
    rewind: bool = False
    captures: SharedCaptures | None = None
    column_tiles: Mapping[str, int] = field(default_factory=dict)
    """From ``weights.tiles.checked_tiles``."""


@dataclass(frozen=True, slots=True)
class Published:
    """The result of one `publish`.

    receivers: how many have committed the version. lost: how many were given up meanwhile. Both are 0 if versions are
    kept for later requests. bytes_sent: by this rank. seconds: duration of the call.
    """

    version: int
    receivers: int
    lost: int
    bytes_sent: int
    seconds: float


class TensorInfo(NamedTuple):
    """A published tensor: global shape, and dtype by name (``"bfloat16"``)."""

    shape: tuple[int, ...]
    dtype: str
    same_as: str = ""
    """Another name under which the same values are published; empty if unknown."""


class Publishing(Protocol):
    """A transport's half on one publisher rank. All ranks call every method alike, on one thread at a time."""

    def publish(
        self,
        weights: Callable[[], Weights],
        version: int,
        deadline: Deadline,
        meta: Mapping[str, Any],
    ) -> Published:
        """Send, stage or save ``weights`` as ``version``; the same outcome on every rank.

        meta: small plain values that travel with it; those of rank 0.

        weights: called once; an error on this rank is told to the others. version: greater than that of any earlier
        `publish`; a half that finds an equal or newer published one raises `ConfigError` before anything is sent.

        Raises `DeadlineExceeded`, and what a transport documents.
        """
        ...

    def pin(self, version: int) -> None:
        """Keep ``version`` until it is unpinned. Raises `CheckpointNotFound` if it isn't kept."""
        ...

    def unpin(self, version: int) -> None:
        """Make ``version`` evictable again, if it was pinned."""
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that a receiver can request, ascending."""
        ...

    def close(self) -> None:
        """Release everything; idempotent. Published versions that outlive the process remain."""
        ...


class Destination(Protocol):
    """The destination of one version: made for each fetch from the user's module, mapping or function.

    Call order: `select`, `memory`, `complete` for each name as it becomes complete, and `commit` or `fill`, again if it
    fails; or `abandon` at any point. The memory is the destination's own from `select` to the commit.

    By default bytes go to a shadow, and `commit` copies them to the live tensors; with ``streaming``, `memory` returns
    the live tensors themselves. For a function, both are whole tensors made for it; it is called by `commit`, or with
    ``streaming`` by `complete`.
    """

    @property
    def into(self) -> Any:
        """The user's ``nn.Module``, mapping of tensors, or function."""
        ...

    @property
    def streaming(self) -> bool:
        """True if bytes go straight into the live tensors."""
        ...

    @property
    def dirty(self) -> bool:
        """True while live tensors may hold part of a version: one in progress, or one that failed half way."""
        ...

    def select(self, published: Mapping[str, TensorInfo]) -> tuple[str, ...]:
        """Return the wanted names among the published ones; changes nothing.

        The bytes of each are written once: a tied parameter is wanted under one of its names, and under others only if
        these may have other values. Raises `StateMismatch` naming what is missing, unexpected, or of another shape or
        dtype.
        """
        ...

    @property
    def twins(self) -> Mapping[str, str]:
        """Selected names whose values have to equal those of another selected name: one live tensor has both."""
        ...

    def wanted(self) -> Sequence[Wanted]:
        """Return the boxes of the selected names that this process has memory for, an empty one if it has none."""
        ...

    def memory(self, name: str) -> torch.Tensor:
        """Return the tensor (a DTensor if the live one is) to write ``name`` into; undefined content except for `base`.

        With ``streaming`` the destination is dirty from here on. For a function it is made on request.
        """
        ...

    def place(self, name: str) -> WholePlace | None:
        """Return where `memory` of ``name`` lies in the published tensor; None: it is all of it, or a DTensor."""
        ...

    @property
    def base(self) -> int | None:
        """Return the version that `memory` of all names holds completely, from the last publisher; or None.

        For writers that send only what differs from it; call it after `memory`.
        """
        ...

    def forget(self) -> None:
        """Forget the base: the publisher is another one than before."""
        ...

    def complete(self, name: str) -> None:
        """Note that all bytes of ``name`` for this process are in `memory` and verified.

        Raises `StateMismatch` if they differ from those of another name of the same live tensor.
        """
        ...

    def commit(self, version: int) -> None:
        """Make the complete ``version`` in `memory` the live one; dirty meanwhile, and not afterwards.

        Raises `StateMismatch`, before anything is written, if live tensors were replaced since `select`.
        """
        ...

    def changed(self, changes: Mapping[str, Changes]) -> None:
        """Note all that differs now, in `memory` of these names, from `base`, which they were brought forward from."""
        ...

    @property
    def scatters(self) -> bool:
        """Return True if a commit may write only what changed: then it is worth noting what that is."""
        ...

    def standing(self) -> Mapping[str, Hashable]:
        """Return what the live tensors hold, by selected name: the ``content`` that `fill` has given them.

        Only of tensors on the host that nobody has written to since, as far as torch counts that.
        """
        ...

    def fill(self, version: int, write: Callable[[Mapping[str, torch.Tensor]], None], content: Hashable = None) -> None:
        """Make ``version`` the live one, from elsewhere than `memory`; dirty meanwhile, and not afterwards.

        write: fills the tensors that it is called with, by selected name, completely: the live ones, all at once; for a
        function new ones, one at a time. If it raises, the destination stays dirty. content: equal only for what is the
        same, bit for bit, under each name.
        """
        ...

    def abandon(self) -> None:
        """End the fetch without a commit, or give back memory after one. Never raises; leaves `dirty` as it is."""
        ...


class FetchedVersion(Protocol):
    """One version for one destination: complete, verified, and not yet live. Held until `release`."""

    @property
    def version(self) -> int:
        """Its number."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the publisher gave with it."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long the phases of the fetch took, by name, such as ``wait`` and ``transfer``."""
        ...

    def commit(self) -> None:
        """Make it the live one at its destination. After a failure it may be called again, unless `VersionRevoked`."""
        ...

    def tell_committed(self, seconds: float) -> None:
        """Tell that it is live now, so that it is known who has which version (``sync.lineage``). Doesn't wait.

        seconds: of bringing and committing it. Called after `commit`, before `release`.
        """
        ...

    def release(self) -> None:
        """Give up what it holds; idempotent, never raises. `commit` can't be called afterwards."""
        ...


class Receiving(Protocol):
    """A transport's half on one receiver. `fetch` is called from one thread at a time; all else from any."""

    def newest(self, newer_than: int | None) -> int | None:
        """Return the newest version known that is newer than ``newer_than`` (None: any). No I/O: a thread looks for it.

        One of another incarnation of the publisher is newer, whatever its number. The first call starts that thread.
        Raises what it met, once.
        """
        ...

    def await_version(self, version: int | None, newer_than: int | None, deadline: Deadline) -> None:
        """Wait until there is something to `fetch`, if that shows before it; else return at once. Arguments as there.

        Makes waiting cheap: only then is a destination made. Raises what `fetch` raises while it waits.
        """
        ...

    def fetch(
        self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline
    ) -> FetchedVersion:
        """Bring one version aside for ``destination``, or with ``streaming`` into it, and verify all of it.

        version: exactly this one, which may be older. None: the newest that is newer than ``newer_than`` (None: any).
        Waits for a version that is yet to come. Raises `CheckpointNotFound` for one that was evicted or is older than
        all kept ones, `StateMismatch`, `CheckpointCorrupt`, `DeadlineExceeded`, `FetchCancelled`; the destination is
        then abandoned, and without ``streaming`` unchanged.
        """
        ...

    def cancel(self) -> None:
        """Make a `fetch` on another thread, or the next one, end with `FetchCancelled`. Doesn't wait for that."""
        ...

    def leave(self) -> None:
        """Make a `fetch` on another thread end with `ConfigError`, also one that is yet to come. Doesn't wait."""
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...


class Transport(Protocol):
    """How versions are transferred; passed to `Publisher` and `Receiver`."""

    process_group: Any | None
    """The publisher's ranks; None: the default group, or one rank."""

    def publishing(self, options: PublisherOptions) -> Publishing:
        """Return the half of this publisher rank. Called once by `Publisher`, on every rank. Raises `ConfigError`."""
        ...

    def receiving(self) -> Receiving:
        """Return the half of this receiver. Called once by `Receiver`. Raises `ConfigError`."""
        ...
