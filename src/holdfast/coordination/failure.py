"""Outcomes of an attempt, and failures of ranks, as messages between ranks. Torch-free data.

    AttemptPublished   at its final name, durably
    AttemptAborted     aborted, for the same reason on every rank
    AttemptInDoubt     the coordinator itself could not learn the outcome

Guarantees: an error of `holdfast.errors` keeps class, message and attributes through a `RankFailure`.
Does not: decide anything (``commit.attempt`` does).
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from holdfast import errors
from holdfast.errors import (
    CheckpointExists,
    ConfigError,
    HoldfastError,
    SaveFailed,
    StateChangedWhileStaging,
)
from holdfast.format.decoding import prepare_decoding

Deed = Literal["save", "export", "upload"]
"""The kind of an attempt, for messages."""
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
"""Range of integers that messages between ranks can carry."""
_EARLIER: Final = {"save": "checkpoints", "export": "exports", "upload": "copies"}


class RankFailure(msgspec.Struct, frozen=True, tag="abort"):
    """The root cause of a failed attempt, as every rank learns it."""

    rank: int
    kind: str
    """Name of the class in `holdfast.errors` that it is of, empty for any other error."""
    message: str
    path: str | None = None
    errno: int | None = None
    unreported: bool = False
    """``rank`` has not reported, and its engine no longer can: the attempt can never be rolled forward."""
    fields: dict[str, Any] = {}
    """Attributes of the error: numbers, strings, None, or tuples of these."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, unreported: bool = False) -> RankFailure:
        """Convert ``error`` of ``rank`` to a message."""
        ours = next((base.__name__ for base in type(error).__mro__ if _class_of(base.__name__) is base), "")
        fields = {key: _sent(value) for key, value in vars(error).items() if _travels(value)} if ours else {}
        path, errno = getattr(error, "path", None), getattr(error, "errno", None)
        if ours and isinstance(error, OSError):
            fields["errno"] = errno  # OSError keeps it in a slot, not in `__dict__`
        return cls(
            rank=rank,
            kind=ours,
            message=_sent(str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"),
            path=_sent(path) if isinstance(path, str) else None,
            errno=errno if isinstance(errno, int) else None,
            unreported=unreported,
            fields=fields,
        )

    def cause(self) -> HoldfastError:
        """Rebuild the error of the rank that failed, with its class and attributes."""
        kind = _class_of(self.kind) or HoldfastError
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)
        for name, value in self.fields.items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error

    def error(self, *, step: int | None, what: Deed = "save") -> HoldfastError:
        """Return the error that the save (or export) of ``step`` raises, equal on every rank.

        Errors that the caller can correct are raised as they are (`CheckpointExists`, `ConfigError`,
        `StateChangedWhileStaging`); any other is the cause of a `SaveFailed`.
        """
        cause = self.cause()
        if isinstance(cause, (CheckpointExists, ConfigError, StateChangedWhileStaging)):
            return cause
        at = "" if step is None else f" of step {step}"
        where = "" if self.path is None or self.path in self.message else f" ({self.path})"
        message = (
            f"the {what}{at} failed on rank {self.rank}{where}: {self.message}. "
            f"Nothing was published; earlier {_EARLIER[what]} are as they were"
        )
        failed = SaveFailed(message, step=step, rank=self.rank, path=self.path, errno=self.errno)
        failed.__cause__ = cause
        return failed


class AttemptPublished(msgspec.Struct, frozen=True, tag="published"):
    """The attempt is at its final name, durably."""

    name: str
    attempt: str


class AttemptAborted(msgspec.Struct, frozen=True, tag="aborted"):
    """The attempt was aborted; nothing of it is visible, now or later."""

    reason: RankFailure


class AttemptInDoubt(msgspec.Struct, frozen=True, tag="doubt"):
    """The coordinator could not learn the outcome: `OutcomeUnknown` on every rank."""

    message: str


Outcome = AttemptPublished | AttemptAborted


def _class_of(name: str) -> type[HoldfastError] | None:
    found = getattr(errors, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, HoldfastError) else None


def _travels(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_travels(item) for item in value)
    if isinstance(value, int):
        return _INT_MIN <= value <= _INT_MAX
    return value is None or isinstance(value, (str, float))


def _sent(value: Any) -> Any:
    """Escape what UTF-8 can't encode in ``value``: file names in errors may be any bytes."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return tuple(map(_sent, value)) if isinstance(value, (tuple, list)) else value


prepare_decoding(RankFailure, AttemptPublished, AttemptAborted, AttemptInDoubt)
