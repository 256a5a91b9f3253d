"""Hold copies back, so that races that depend on luck happen every time.

    with held_copies() as gate:
        manager.save(1)           # nothing of the live state is copied yet
        ...                       # forward, backward: anything may happen meanwhile
        optimizer.step()          # waits for the copies, which begin only now

Guarantees: copies begin when the thread that made the gate waits for them, or when `Gate.open` is called; nothing here
sleeps. A gate that is never opened opens itself after `PATIENCE_S`, so that a broken test fails instead of hanging.
Assumes one gate at a time in a process.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final
from unittest import mock

from holdfast.staging import copy_job as stager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.staging.copies import CopyBatch

PATIENCE_S: Final = 30.0


class Gate:
    """A gate in front of all copies."""

    def __init__(self, *, opens_for_updates: bool) -> None:
        self._open = threading.Event()
        self._arrived = threading.Event()
        self._trainer = threading.current_thread()
        self._opens_for_updates = opens_for_updates
        self.passed = 0
        """Batches copied, none of them while the gate was closed."""

    def open(self) -> None:
        """Start the copies."""
        self._open.set()

    def close(self) -> None:
        """Hold back the copies that begin from now on."""
        self._arrived.clear()
        self._open.clear()

    def wait_arrived(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until a batch has reached the gate since it was closed; return False if none has."""
        return self._arrived.wait(timeout_s)

    def pass_through(self) -> None:
        self._arrived.set()
        self._open.wait(PATIENCE_S)
        self.passed += 1

    def lets_help(self) -> bool:
        """Return True if the calling thread may take batches: the training thread must not block at a closed gate."""
        if threading.current_thread() is not self._trainer:
            return True
        if self._opens_for_updates:
            self._open.set()
        return self._open.is_set()


@contextlib.contextmanager
def held_copies(*, opens_for_updates: bool = True) -> Iterator[Gate]:
    """Yield a closed `Gate` in front of all copies of live tensors; removed when the block ends.

    opens_for_updates: it opens when the calling thread waits for copies: an optimizer step, `before_update`, a result.
    Otherwise that thread waits, as it would for a slow copy of another thread.
    """
    gate = Gate(opens_for_updates=opens_for_updates)
    copy, help_copy = stager.copy_batch, stager.Staging.help_copy

    def copy_at_gate(batch: CopyBatch, *, non_blocking: bool = False) -> None:
        gate.pass_through()
        copy(batch, non_blocking=non_blocking)

    def help_at_gate(staging: stager.Staging, timeout_s: float | None = None) -> None:
        if gate.lets_help():
            help_copy(staging, timeout_s)

    with (
        mock.patch.object(stager, "copy_batch", copy_at_gate),
        mock.patch.object(stager.Staging, "help_copy", help_at_gate),
    ):
        try:
            yield gate
        finally:
            gate.open()
