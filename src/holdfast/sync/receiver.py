"""The receiver that users hold: what it was given is checked here, what it has is known here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.arguments import checked_seconds
from holdfast.errors import ConfigError
from holdfast.sync.applying import Applier
from holdfast.sync.deadline import Deadline
from holdfast.sync.publisher import checked_transport, checked_version

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.sync.seam import Transport


class Receiver:
    """Brings published weights into this process, a whole version at a time.

    Made once a process that receives; a context manager. For one thread at a time.

    Args:
        transport: how versions travel; the same kind as the publisher's, with the same rendezvous or directory.
    """

    def __init__(self, transport: Transport) -> None:
        self._half = checked_transport(transport).receiving()
        self._applier = Applier()
        self._version: int | None = None
        self._dirty = False
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version that was committed last; None before the first. While `dirty` it is no longer there whole."""
        return self._version

    @property
    def dirty(self) -> bool:
        """Whether the weights may be a mix of versions: don't serve them. Only a receive that succeeds ends it."""
        return self._dirty

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
        if self._closed:
            raise ConfigError("this receiver is closed; make a new one", field="receiver")
        deadline = Deadline.after(checked_seconds("timeout", timeout))
        if version is not None:
            version = checked_version(version)
        destination = self._applier.destination(into, streaming=bool(streaming))
        newer_than = self._version
        if self._dirty and newer_than is not None:
            newer_than -= 1  # what it has is no longer there whole: the same version will do
        try:
            received = self._half.receive(destination, version, newer_than, deadline)
        finally:
            # A receive that fails before it has touched anything ends no dirtiness of an earlier one.
            self._dirty = self._dirty or destination.dirty
        self._applier.committed(destination, received)
        self._version, self._dirty = received, False
        return received

    def close(self) -> None:
        """Leave: the publisher doesn't wait for this receiver any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._half.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
