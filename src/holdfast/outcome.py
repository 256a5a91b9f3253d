"""How an attempt can end, as its ranks tell each other. Torch-free data.

    Published   at its final name, durably
    Aborted     given up for a reason that is the same on every rank
    InDoubt     the coordinator itself could not learn what became of it

Guarantees: an error of ours comes out of an `AbortReason` with the class, message and attributes it went in with.
Does not: decide anything (``commit`` does).
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from holdfast import errors
from holdfast.errors import CheckpointExists, ConfigError, HoldfastError, SaveFailed, StateChangedWhileStaging

Deed = Literal["save", "export"]
"""What an attempt is, for messages."""
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
"""What messages between ranks can carry."""
_EARLIER: Final = {"save": "checkpoints", "export": "exports"}


class AbortReason(msgspec.Struct, frozen=True, tag="abort"):
    """The root cause of a failed attempt, as every rank learns it."""

    rank: int
    kind: str
    """Name of the class in `holdfast.errors`, empty for an error that is none of ours."""
    message: str
    path: str | None = None
    errno: int | None = None
    unreported: bool = False
    """True: ``rank`` has not reported, and its engine no longer can. The attempt can then never be rolled forward."""
    fields: dict[str, Any] = {}
    """Its attributes: numbers, strings, None, or tuples of these."""

    @classmethod
    def of(cls, error: BaseException, *, rank: int, unreported: bool = False) -> AbortReason:
        """``error`` of ``rank``, as it travels."""
        ours = _class_of(type(error).__name__) is type(error)
        fields = {key: _sent(value) for key, value in vars(error).items() if _travels(value)} if ours else {}
        path, errno = getattr(error, "path", None), getattr(error, "errno", None)
        if ours and isinstance(error, OSError):
            fields["errno"] = errno  # a slot of OSError, so not among its variables
        return cls(
            rank=rank,
            kind=type(error).__name__ if ours else "",
            message=_sent(str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"),
            path=_sent(path) if isinstance(path, str) else None,
            errno=errno if isinstance(errno, int) else None,
            unreported=unreported,
            fields=fields,
        )

    def cause(self) -> HoldfastError:
        """The error of the rank that failed, of its own class and with its own attributes."""
        kind = _class_of(self.kind) or HoldfastError
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)
        for name, value in self.fields.items():
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
        return error

    def error(self, *, step: int | None, what: Deed = "save") -> HoldfastError:
        """What the save (or export) of ``step`` raises, equal on every rank.

        What the caller has to put right is raised as it is (`CheckpointExists`, `ConfigError`,
        `StateChangedWhileStaging`); anything else is the cause of a `SaveFailed`.
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


class Published(msgspec.Struct, frozen=True, tag="published"):
    """The attempt is at its final name, durably."""

    name: str
    attempt: str


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """The attempt was given up; nothing of it is visible, or ever will be."""

    reason: AbortReason


class InDoubt(msgspec.Struct, frozen=True, tag="doubt"):
    """The coordinator could not learn what became of it: `OutcomeUnknown` on every rank."""

    message: str


Outcome = Published | Aborted


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
    """``value`` with what UTF-8 can't write escaped: names of files, which errors tell, may be any bytes."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return tuple(map(_sent, value)) if isinstance(value, (tuple, list)) else value
