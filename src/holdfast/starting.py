"""What a writing manager does to its root before anything else: settles what a crash has left. Torch-free.

Guarantees: a root is clean once a manager is there, but for trash that takes long, which is for its engine.
Assumes: the caller holds the root's lock.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from holdfast import events
from holdfast.engine.removal import remove_quickly
from holdfast.recovery import RecoveryReport, recover
from holdfast.storage.lock import RootLock, sweep_left

if TYPE_CHECKING:
    from holdfast.storage.local import LocalStorage

SWEEP_S: Final = 2.0
"""How long all ranks wait at a start for trash to be removed."""


def settle_root(storage: LocalStorage, *, timeout_s: float) -> tuple[RecoveryReport, list[str]]:
    """Recover ``storage``, waiting ``timeout_s`` for saves still at work; what was done, and the trash that is left."""
    trash: list[str] = []
    report = recover(
        storage,
        clock=time.monotonic,
        sleep=time.sleep,
        timeout_s=timeout_s,
        remove=trash.append,
        claim=lambda name: RootLock.acquire_beside(storage.path(name)),
    )
    # Small ones now, so that a root is clean once a manager is there; the engine removes what takes longer.
    fd = storage.open_dir("")
    try:
        remove_quickly(fd, trash, timeout_s=SWEEP_S)
    finally:
        os.close(fd)
    events.emit(
        "root.recovered", rank=0, path=storage.root, rolled_forward=report.rolled_forward, removed=report.removed
    )
    sweep_left(storage.root)
    return report, [name for name in trash if storage.exists(name)]
