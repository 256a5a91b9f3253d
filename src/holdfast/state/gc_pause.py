"""Pause Python's cyclic garbage collector while very many long-lived objects are made."""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: while a hundred thousand entries are made, collections take as long as the
    work itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def gc_paused_on_main_thread() -> Iterator[None]:
    """`gc_paused` where it is called on the thread that trains, as far as can be told; on others nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with gc_paused():
        yield
