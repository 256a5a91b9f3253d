"""Define all errors that Holdfast raises, in one hierarchy.

What went wrong with ...            error                       a handler would
------------------------------------------------------------------------------------------------
the call itself                     ConfigError                 fix the argument it names
the state                           StateMismatch               fix the model or pass strict=False
                                    StateChangedWhileStaging    call before_update(), save again
a checkpoint on storage             CheckpointNotFound          choose another step
                                    CheckpointReplaced          open it again: another save has taken its place
                                    CheckpointExists            choose another path, or overwrite=True
                                    CheckpointCorrupt           fall back to an older step
                                    RootLocked                  stop the other writer
                                    StorageError                look at the path and errno
a save in flight                    SaveFailed                  save again; training may go on
                                    EngineDied                  (cause of SaveFailed) save again
                                    DeadlineExceeded            raise the deadline or find the hang
                                    OutcomeUnknown              restart: the next start settles it
                                    CallbackFailed              the checkpoint stands; fix the callback
a weight version in transit         PeerLost                    receive or publish again; see why the peer ended
                                    FetchCancelled              fetch again when it is wanted
                                    WeightsDirty                receive a whole version first
                                    VersionRevoked              fetch again: a newer version took its memory

Guarantees: all are picklable and keep their attributes; ``str()`` says what failed, where, what was expected and
found, and what to do next. This module imports nothing but the standard library: the engine raises these too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Return names for an error message: the first few, and how many more."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(f"`{name}`" for name in every[:limit]) + more


def _rebuild(
    cls: type[HoldfastError], message: str, fields: dict[str, Any], cause: BaseException | None
) -> HoldfastError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    for name, value in fields.items():
        setattr(error, name, value)
    error.__cause__ = cause
    return error


class HoldfastError(Exception):
    """Base class of all errors that Holdfast raises deliberately."""

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        fields = dict(self.__dict__)
        if isinstance(self, OSError):
            fields["errno"] = self.errno  # OSError keeps it in a slot, not in `__dict__`
        return _rebuild, (type(self), str(self), fields, cause)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(HoldfastError, ValueError):
    """An argument, a configuration field or a leaf of the state can't be used; ``field`` names it."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class StateMismatch(HoldfastError):
    """Checkpoint and state don't fit: names missing, unexpected, or of the wrong shape or dtype."""

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched


class StateChangedWhileStaging(HoldfastError):
    """A captured tensor was written to before its copy was complete; ``tensor`` names it. Nothing was published."""

    def __init__(self, message: str, *, tensor: str, step: int | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.step = step


class CheckpointNotFound(HoldfastError, LookupError):
    """No published checkpoint at ``path`` (and ``step``, if given)."""

    def __init__(self, message: str, *, path: str, step: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.step = step


class CheckpointReplaced(CheckpointNotFound):
    """The checkpoint opened at ``path`` was replaced by another save: open or load it again. Nothing is damaged."""


class CheckpointExists(HoldfastError):
    """A published checkpoint is already at ``path``; published data is never modified."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class CheckpointCorrupt(HoldfastError):
    """Stored bytes aren't what was committed: ``path``, and where known ``tensor`` and ``byte_range`` (start, end)."""

    def __init__(
        self,
        message: str,
        *,
        path: str,
        tensor: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.tensor = tensor
        self.byte_range = byte_range


class RootLocked(HoldfastError):
    """Another live writer holds the root's lock; ``by`` says who (host, pid, since when)."""

    def __init__(self, message: str, *, path: str, by: str) -> None:
        super().__init__(message)
        self.path = path
        self.by = by


class StorageError(HoldfastError, OSError):
    """The operating system refused an operation on ``path`` with ``errno``."""

    def __init__(self, message: str, *, path: str, errno: int | None) -> None:
        Exception.__init__(self, message)
        self.path = path
        self.errno = errno


class SaveFailed(HoldfastError):
    """A save ended without being published; the same root cause is reported on every rank."""

    def __init__(
        self, message: str, *, step: int | None, rank: int | None, path: str | None = None, errno: int | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.path = path
        self.errno = errno

    @property
    def cause(self) -> BaseException | None:
        """The error of the rank that failed, which caused this one."""
        return self.__cause__


class EngineDied(HoldfastError):
    """The engine process of ``rank`` ended or stopped answering; it is restarted for the next save."""

    def __init__(self, message: str, *, rank: int | None = None, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode


class DeadlineExceeded(HoldfastError, TimeoutError):
    """A wait passed its deadline; ``waited_for`` and ``timeout_s`` describe it."""

    def __init__(self, message: str, *, waited_for: str, timeout_s: float) -> None:
        Exception.__init__(self, message)
        self.waited_for = waited_for
        self.timeout_s = timeout_s


class OutcomeUnknown(HoldfastError):
    """The outcome of ``attempt`` can't be determined by this rank; the next start settles it."""

    def __init__(self, message: str, *, attempt: str, step: int | None = None) -> None:
        super().__init__(message)
        self.attempt = attempt
        self.step = step


class CallbackFailed(HoldfastError):
    """A user callback raised after publication; ``checkpoint`` (its path) stands."""

    def __init__(self, message: str, *, checkpoint: str) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class PeerLost(HoldfastError, ConnectionError):
    """The process at the other end of a weight sync ended or timed out: ``peer``, in a ``phase`` of ``version``."""

    def __init__(self, message: str, *, peer: str, phase: str, version: int | None = None) -> None:
        Exception.__init__(self, message)
        self.peer = peer
        self.phase = phase
        self.version = version


class FetchCancelled(HoldfastError):
    """`Receiver.cancel` ended a fetch of a weight version; nothing was committed."""


class WeightsDirty(HoldfastError):
    """A module was called while its weights may be a mix of versions: a streaming receive is in progress or failed."""


class VersionRevoked(HoldfastError):
    """The publisher has taken back the memory of a version that a receiver held for too long; ``version``."""

    def __init__(self, message: str, *, version: int) -> None:
        super().__init__(message)
        self.version = version
