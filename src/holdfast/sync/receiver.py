"""The receiver that users hold: what it was given is checked here, what it has is known here."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from holdfast.arguments import checked_seconds
from holdfast.errors import ConfigError
from holdfast.sync.applying import Applier
from holdfast.sync.deadline import Deadline
from holdfast.sync.publisher import checked_flag, checked_transport, checked_version

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.sync.seam import Destination, Transport

_CLOSE_S: Final = 10.0
"""A receive that another thread is at hears of `Receiver.close` sooner, but for what the user's function takes."""


class Receiver:
    """Brings published weights into this process, a whole version at a time.

    Made once a process that receives; a context manager. For one thread at a time; any may look at `version` and
    `dirty`, or `close` it.

    Args:
        transport: how versions travel; the same kind as the publisher's, with the same rendezvous or directory.
    """

    def __init__(self, transport: Transport) -> None:
        self._half = checked_transport(transport).receiving()
        self._applier = Applier()
        self._version: int | None = None
        self._dirty = False
        self._closed = False
        self._turn = threading.Lock()
        self._under_way: Destination | None = None
        self._thread: int | None = None

    @property
    def version(self) -> int | None:
        """The version that was committed last; None before the first. While `dirty` it is no longer there whole."""
        return self._version

    @property
    def dirty(self) -> bool:
        """Whether the weights may be a mix of versions: don't serve them. Only a receive that succeeds ends it."""
        under_way = self._under_way
        return self._dirty or (under_way is not None and under_way.dirty)

    def receive(
        self,
        into: Any,
        version: int | None = None,
        timeout: float = 600.0,
        streaming: bool = False,  # noqa: FBT001, FBT002
    ) -> int:
        """Bring one version into ``into`` and commit it there; returns its number when all of it is in place.

        Args:
            into: an ``nn.Module`` (its parameters must be what is published; buffers may be), a dictionary of tensors
                (exactly what is published), or a function ``apply(name, tensor)`` that is called with every tensor,
                whole. DTensors take their own part.
            version: exactly this one, also an older one that is kept; None: the newest that is newer than what this
                receiver has. Either is waited for if it is yet to come.
            timeout: seconds, for all of it.
            streaming: write straight into ``into`` instead of a shadow that is copied at the end. Takes no memory, but
                what is there is `dirty` from the first byte on until the version is whole, also after a failure.

        Raises:
            StateMismatch: ``into`` isn't what is published. CheckpointNotFound: ``version`` isn't kept any more.
            CheckpointCorrupt: bytes did not arrive as they were sent. PeerLost: a publisher rank ended.
            DeadlineExceeded: no version in time. ConfigError: an argument can't be used, or what is published is
                older than what this receiver has.
            What ``apply`` raises. In each case `version` is what it was, and without ``streaming`` so are the weights,
            unless a function or the copying itself failed half way (then it is `dirty`).
        """
        self._check_open()
        deadline = Deadline.after(checked_seconds("timeout", timeout))
        if version is not None:
            version = checked_version(version)
        streaming = checked_flag("streaming", streaming)
        if not self._turn.acquire(blocking=False):
            raise ConfigError(
                "this receiver is receiving already, on another thread; make a receiver for each thread",
                field="receiver",
            )
        try:
            self._check_open()
            self._thread = threading.get_ident()
            return self._receive(into, version, deadline, streaming=streaming)
        finally:
            self._thread = None
            self._turn.release()

    def _receive(self, into: Any, version: int | None, deadline: Deadline, *, streaming: bool) -> int:
        destination = self._applier.destination(into, streaming=streaming, committed=self._has_committed)
        newer_than = self._version
        if self._dirty and newer_than is not None:
            newer_than -= 1  # what it has is no longer there whole: the same version will do
        self._under_way = destination
        try:
            return self._half.receive(destination, version, newer_than, deadline)
        finally:
            # A receive that fails before it has touched anything ends no dirtiness of an earlier one.
            self._dirty = self._dirty or destination.dirty
            self._under_way = None

    def _has_committed(self, version: int) -> None:
        self._version, self._dirty = version, False

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this receiver is closed; make a new one", field="receiver")

    def close(self) -> None:
        """Leave: the publisher doesn't wait for this receiver any more. Idempotent.

        A `receive` that waits, on another thread, ends with a `ConfigError`.
        """
        if self._closed:
            return
        self._closed = True
        self._half.leave()
        waits = self._thread != threading.get_ident() and self._turn.acquire(timeout=_CLOSE_S)
        try:
            self._half.close()
        finally:
            if waits:
                self._turn.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
