"""Refuse a call made inside another call on the same thread if it would wait for that forever. Torch-free.

The program's own signal handlers run between any two instructions of the main thread, also in the middle of a save or
of the wait before an update. A save from such a handler would wait for the interrupted one until its deadline; it is
refused at once instead.

Guarantees: threads are independent; after an exception or interrupt the thread no longer counts as inside.
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
    """The marked methods (`entry`) of one session that this thread is executing, outermost first."""

    inside: tuple[str, ...] = ()

    def require(self, call: str, *allowed: tuple[str, ...]) -> None:
        """Raise `ConfigError` for ``call`` unless this thread is inside one of ``allowed``."""
        if self.inside not in allowed:
            raise ConfigError(
                f"{call} was called in a signal handler that has interrupted a save, or the wait "
                "before an update, on this thread: neither can continue. In a signal handler only set "
                "a flag, and save "
                "in the training loop; or leave signals to `save_on_signal`"
            )


class Enterable(Protocol):
    @property
    def entries(self) -> Entries: ...


_Self = TypeVar("_Self", bound=Enterable)


def entry(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Mark ``method``, so that `Entries` knows which threads are executing it."""

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
