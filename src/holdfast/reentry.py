"""Calls that a thread must not make inside another of them: what they would wait for can't go on meanwhile. Torch-free.

A signal handler of the program's own runs between any two instructions of the main thread, so also in the middle of a
save, or of the wait in front of an update. A save from there would wait for the one underneath it, for as long as the
deadlines allow; it is refused at once instead.

Guarantees: threads don't know of each other; an exception, an interrupt too, leaves no thread counted as inside.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Entries(threading.local):
    """The marked methods (`entry`) of one session that this thread is in the middle of; the outermost first."""

    inside: tuple[str, ...] = ()

    def require(self, call: str, *allowed: tuple[str, ...]) -> None:
        """Raise `ConfigError` for ``call`` unless this thread is inside one of ``allowed``."""
        if self.inside not in allowed:
            raise ConfigError(
                f"{call} was called in the middle of a save, or of the wait before an update, that it has interrupted "
                "on this thread, and which can't go on until it returns: in a signal handler only set a flag, and save "
                "in the training loop; or leave signals to `save_on_signal`"
            )


class Enterable(Protocol):
    @property
    def entries(self) -> Entries: ...


_Self = TypeVar("_Self", bound=Enterable)


def entry(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Mark ``method``: `Entries.require` knows who is in the middle of it."""

    @functools.wraps(method)
    def entered(self: _Self, /, *args: _Args.args, **options: _Args.kwargs) -> _Result:
        entries = self.entries
        before = entries.inside
        try:
            entries.inside = (*before, method.__name__)
            return method(self, *args, **options)
        finally:
            entries.inside = before

    return entered
