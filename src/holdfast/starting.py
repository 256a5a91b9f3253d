"""What comes first where something is to be written: what a crash has left there is settled. Torch-free.

    settle_root(storage)   a manager's root, whose lock the caller holds
    claim_path(target)     the one path of a single save or export, which is locked too

Guarantees: a root is clean once a manager is there, but for trash that takes long, which is for its engine. A path that
was claimed is its holder's alone, and either free or to be replaced.
"""

from __future__ import annotations

import os
import time
from typing import Final

from holdfast import events
from holdfast.engine.removal import remove_quickly
from holdfast.recovery import RecoveryReport, recover, recover_one
from holdfast.root import refuse_occupied
from holdfast.storage.local import LocalStorage, create_root
from holdfast.storage.lock import RootLock, refuse_managed, sweep_left

SWEEP_S: Final = 2.0
"""How long all ranks wait at a start for trash to be removed."""
LOCK_PATIENCE_S: Final = 10.0
"""How long a path may be locked by somebody else: an `async_save` of this very process may still be letting go of it,
which takes as long as its engine and its threads need to end."""


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


def claim_path(target: str, *, step: int | None, overwrite: bool, timeout_s: float) -> RootLock:
    """Make the parent of ``target``, lock it, settle what an earlier save or export to it has left; returns its lock.

    timeout_s: how long to wait for one that is still at work there. Raises `CheckpointExists` unless ``overwrite``,
    `ConfigError` for a manager's root, `RootLocked`, `StorageError`.
    """
    deadline = time.monotonic() + timeout_s
    parent, name = os.path.split(target)
    create_root(parent)
    lock = RootLock.acquire_beside(target, timeout_s=min(timeout_s, LOCK_PATIENCE_S))
    try:
        storage = LocalStorage(parent)
        recover_one(storage, name, timeout_s=max(0.001, deadline - time.monotonic()))
        if overwrite:
            refuse_managed(target)
        else:
            refuse_occupied(storage, name, step=step)
    except BaseException:
        lock.release()
        raise
    return lock
