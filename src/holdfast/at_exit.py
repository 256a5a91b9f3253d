"""Interpreters that exit without `close`: what is in flight is let end.

Guarantees: doesn't keep what is to be closed alive; called off, it leaves nothing behind.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("holdfast")


class Closeable(Protocol):
    """What may be closed while the interpreter exits."""

    def close(self, timeout_s: float | None, *, exiting: bool = False) -> None: ...


def close_at_exit(session: Closeable, timeout_s: float) -> Callable[[], None]:
    """Close ``session`` when the interpreter exits, waiting at most ``timeout_s``; returns what calls that off."""
    reference = weakref.ref(session)

    def finish() -> None:
        forgotten = reference()
        if forgotten is None:
            return
        try:
            forgotten.close(timeout_s, exiting=True)
        except HoldfastError as error:
            _log.warning("at interpreter exit: %s", error)

    atexit.register(finish)
    return lambda: atexit.unregister(finish)
