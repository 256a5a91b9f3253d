"""`Publisher`, the publisher's public class: checks arguments and keeps the last version."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.store import board_lost_told
from holdfast.engine.at_exit import close_later, end_at_exit
from holdfast.errors import ConfigError
from holdfast.sync.protocol import Published, PublisherOptions
from holdfast.sync.weights.pieces import named_tensors
from holdfast.validation import STEP_MAX, checked_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from holdfast.manager import CheckpointManager
    from holdfast.saver.capture import SharedCaptures
    from holdfast.sync.protocol import Transport

__all__ = ["Published", "Publisher"]

_BYTES_MAX: Final = (1 << 63) - 1
"""Messages between the sides store it in 64 bits."""
_START_S: Final = 120.0
"""Approximate timeout for all ranks to make a publisher."""


class Publisher:
    """Sends weights from the trainer to receivers, one complete version at a time.

    Made on every rank that has a part of the weights, with the same arguments; a context manager. For one thread at a
    time.

    Args:
        transport: how versions are transferred.
        bucket_bytes: tensors are sent in buckets of at most this many bytes (1 and more), two of which are in flight at
            a time. In host memory buckets are smaller if larger ones gain nothing.
        bypass_cpu: True: `publish` sends from the tensors themselves, stages nothing in host memory, and returns when
            receivers have the version. False: it copies them into host memory and returns; receivers fetch them at any
            time.
        keep_versions: number of versions kept in host memory (1 and more; ``bypass_cpu=False`` only), besides pinned
            ones.
        atomic_fleet: receivers of a version commit it together or not at all.
        receivers: how many must have joined before the first version is sent directly, or to a fleet (1 and more).
        delta: send only what has changed to a receiver that has an older version.
        full_every: with ``delta``, one of this many versions is sent to a receiver completely, and verified as a whole.
        manager: the `CheckpointManager` that saves these weights, on the same ranks (``bypass_cpu=False`` only). A
            version published between a save and the next update is not copied off the device again: it keeps the whole
            memory of the save's capture until it is evicted. Publish on the training thread.
    """

    def __init__(
        self,
        transport: Transport,
        bucket_bytes: int = 256 * 2**20,
        bypass_cpu: bool = True,  # noqa: FBT001, FBT002
        keep_versions: int = 2,
        atomic_fleet: bool = False,  # noqa: FBT001, FBT002
        receivers: int = 1,
        delta: bool = False,  # noqa: FBT001, FBT002
        full_every: int = 16,
        manager: CheckpointManager | None = None,
    ) -> None:
        options = PublisherOptions(
            bucket_bytes=_positive("bucket_bytes", bucket_bytes, most=_BYTES_MAX),
            bypass_cpu=checked_flag("bypass_cpu", bypass_cpu),
            keep_versions=_positive("keep_versions", keep_versions),
            atomic_fleet=checked_flag("atomic_fleet", atomic_fleet),
            receivers=_positive("receivers", receivers),
            delta=checked_flag("delta", delta),
            full_every=_positive("full_every", full_every),
            captures=None if manager is None else _captures_of(manager, bypass_cpu=bypass_cpu),
        )
        with board_lost_told("making a publisher", _START_S):
            self._half = checked_transport(transport).publishing(options)
        self._newest: int | None = None
        self._closed = False
        self._owner = os.getpid()
        self._stay_at_exit = end_at_exit(self, lambda publisher, _: publisher.close())

    def __del__(self) -> None:
        """Close a forgotten publisher on another thread, since a finalizer may run at any point of the program."""
        if not getattr(self, "_closed", True) and os.getpid() == self._owner:
            close_later("a Publisher", self._half.close)

    def publish(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: int,
        timeout: float = 600.0,
    ) -> Published:
        """Publish ``weights`` as ``version``. All ranks call it alike.

        With ``bypass_cpu`` returns when every receiver that takes part has committed the version or was given up; until
        then the tensors must not change. Otherwise returns when they are copied.

        Args:
            weights: tensors and DTensors by name. Equal plain names on several ranks are replicas of one value; names
                that only some ranks have are sent by those.
            version: an integer >= 0, greater than that of any earlier publish.
            timeout: seconds, for all of it.

        Raises:
            ConfigError: an invalid argument; a version not greater than the last one, or than what a receiver has from
                an earlier publisher; a row longer than a bucket.
            StateMismatch: a receiver has other tensors, or ranks disagree on one.
            CheckpointCorrupt: a receiver got other bytes than were sent. PeerLost: a publisher rank ended; with
                ``atomic_fleet`` also a receiver.
            DeadlineExceeded: no receiver, or not all ranks, in time.
        """
        self._check_open()
        deadline = Deadline.after(checked_seconds("timeout", timeout))
        version = checked_version(version)
        with board_lost_told(f"publishing version {version}", timeout):
            published = self._half.publish(lambda: self._checked(weights, version), version, deadline)
        self._newest = version
        return published

    def _checked(
        self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, torch.Tensor]:
        if self._newest is not None and version <= self._newest:
            raise ConfigError(
                f"version {version} isn't greater than {self._newest}, which was published before; versions only go up",
                field="version",
            )
        return named_tensors(weights)

    def pin(self, version: int) -> None:
        """Keep ``version`` until it is unpinned. Raises `CheckpointNotFound` if it isn't kept."""
        self._check_open()
        self._half.pin(checked_version(version))

    def unpin(self, version: int) -> None:
        """Make ``version`` evictable again, if it was pinned."""
        self._check_open()
        self._half.unpin(checked_version(version))

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that receivers can request, ascending."""
        return tuple(self._half.versions)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this publisher is closed; make a new one", field="publisher")

    def close(self) -> None:
        """End all connections; waiting receivers are told. Idempotent."""
        if not self._closed:
            self._closed = True
            self._half.close()
            self._stay_at_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def checked_version(version: object) -> int:
    """Return ``version``; raise `ConfigError` unless it is an integer from 0 to 2**63 - 1."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= STEP_MAX:
        raise ConfigError(f"version must be an integer from 0 to 2**63 - 1, not {version!r}", field="version")
    return version


def checked_transport(transport: Any) -> Transport:
    """Return ``transport``; raise `ConfigError` unless it is one."""
    if isinstance(transport, type) or not hasattr(transport, "publishing") or not hasattr(transport, "receiving"):
        raise ConfigError(
            f"transport is {transport!r}; expected one of holdfast.sync, such as SharedMemoryTransport(rendezvous)",
            field="transport",
        )
    found: Transport = transport
    return found


def _captures_of(manager: Any, *, bypass_cpu: bool) -> SharedCaptures:
    if bypass_cpu:
        raise ConfigError(
            "manager: nothing is staged in host memory with bypass_cpu=True, so there is no capture to share; make the "
            "publisher with bypass_cpu=False, or without the manager",
            field="manager",
        )
    found = getattr(manager, "captures", None)
    if found is None:
        raise ConfigError(
            f"manager must be a CheckpointManager that saves (load_only=False), not {manager!r:.200}", field="manager"
        )
    captures: SharedCaptures = found
    return captures


def _positive(name: str, value: object, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
        bounds = ">= 1" if most is None else f"from 1 to {most}"
        raise ConfigError(f"{name} must be an integer {bounds}, not {value!r}", field=name)
    return value


def checked_flag(name: str, value: object) -> bool:
    """Return ``value``; raise `ConfigError` unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}", field=name)
    return value
