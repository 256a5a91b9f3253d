"""`Receiver`, the receiver's public class: checks arguments and keeps the current version."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from holdfast.coordination.deadline import Deadline
from holdfast.coordination.store import board_lost_told
from holdfast.engine.at_exit import close_later, end_at_exit
from holdfast.errors import ConfigError
from holdfast.sync.publisher import checked_flag, checked_transport, checked_version
from holdfast.sync.weights.apply import TargetFactory
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.sync.protocol import Destination, Receiving, Transport

_CLOSE_S: Final = 10.0
"""How long `close` waits for a receive on another thread, which normally stops sooner unless in the user's function."""


class Receiver:
    """Receives published weights in this process, one complete version at a time.

    Make one per receiving process; a context manager. For one thread at a time; any thread may read `version` and
    `dirty`, or call `close`.

    Args:
        transport: how versions are transferred; the same kind as the publisher's, with the same rendezvous or
            directory.
    """

    def __init__(self, transport: Transport) -> None:
        self._half = checked_transport(transport).receiving()
        self._applier = TargetFactory()
        self._version: int | None = None
        self._dirty = False
        self._closed = False
        self._turn = threading.Lock()
        self._under_way: Destination | None = None
        self._thread: int | None = None
        self._owner = os.getpid()
        self._stay_at_exit = end_at_exit(self, lambda receiver, _: receiver.close())

    def __del__(self) -> None:
        """Close a forgotten receiver on another thread, since a finalizer may run at any point of the program."""
        if not getattr(self, "_closed", True) and os.getpid() == self._owner:
            close_later("a Receiver", functools.partial(_close, self._half))

    @property
    def version(self) -> int | None:
        """The version that was committed last; None before the first. While `dirty`, it is no longer complete."""
        return self._version

    @property
    def dirty(self) -> bool:
        """True while the weights may be a mix of versions: don't serve them. Ended only by a successful receive."""
        under_way = self._under_way
        return self._dirty or (under_way is not None and under_way.dirty)

    def receive(
        self,
        into: Any,
        version: int | None = None,
        timeout: float = 600.0,
        streaming: bool = False,  # noqa: FBT001, FBT002
    ) -> int:
        """Receive one version into ``into`` and commit it there; return its number when all of it is in place.

        Args:
            into: an ``nn.Module`` (its parameters must equal the published ones; buffers may be published), a
                dictionary of tensors (exactly the published ones), or a function ``apply(name, tensor)`` that is called
                with every complete tensor. DTensors receive their own part.
            version: exactly this version, which may be an older one that is kept; None: the newest that is newer than
                what this receiver has. Waits for one that is yet to come.
            timeout: seconds, for all of it.
            streaming: write straight into ``into`` instead of a shadow that is copied at the end. Needs no memory, but
                the weights are `dirty` from the first byte until the version is complete, also after a failure.

        Raises:
            StateMismatch: ``into`` doesn't match what is published. CheckpointNotFound: ``version`` isn't kept any
                more.
            CheckpointCorrupt: bytes did not arrive as they were sent. PeerLost: a publisher rank ended.
            DeadlineExceeded: no version in time. ConfigError: an invalid argument, or the published version is older
                than what this receiver has.
            Errors of ``apply``. In each case `version` is unchanged, and without ``streaming`` so are the weights,
                unless a
            function or the copying itself failed half way (then `dirty` is True).
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
            with board_lost_told("receiving a version", timeout):
                return self._receive(into, version, deadline, streaming=streaming)
        finally:
            self._thread = None
            self._turn.release()

    def _receive(self, into: Any, version: int | None, deadline: Deadline, *, streaming: bool) -> int:
        destination = self._applier.destination(into, streaming=streaming, committed=self._has_committed)
        newer_than = self._version
        if self._dirty and newer_than is not None:
            newer_than -= 1  # its version is no longer complete: the same one may be received again
        self._under_way = destination
        try:
            return self._half.receive(destination, version, newer_than, deadline)
        finally:
            # A receive that fails before it has changed anything leaves the weights as dirty as they were.
            self._dirty = self._dirty or destination.dirty
            self._under_way = None

    def _has_committed(self, version: int) -> None:
        self._version, self._dirty = version, False

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this receiver is closed; make a new one", field="receiver")

    def close(self) -> None:
        """Leave: the publisher stops waiting for this receiver. Idempotent.

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
            self._stay_at_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(half: Receiving) -> None:
    half.leave()
    half.close()
