"""One call each: `save`, `async_save`, `load`, `open`. Sessions of a single save or load.

A training loop that saves again and again is better served by a `CheckpointManager`: it keeps engine, plan and warm
file images from one save to the next.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from holdfast.agreement import Votes
from holdfast.capture import SaveRequest
from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.config import CheckpointConfig, checked_seconds
from holdfast.errors import ConfigError, HoldfastError
from holdfast.group import open_group
from holdfast.loader import LoadOptions, load_state
from holdfast.manager import checked_metrics, checked_path, checked_step
from holdfast.optimizer_hook import guard_updates, unguard_updates
from holdfast.recovery import recover
from holdfast.saver import Saver
from holdfast.state.tree import StateTree
from holdfast.storage.local import LocalStorage, create_root
from holdfast.storage.lock import RootLock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.group import Group
    from holdfast.handle import SaveHandle


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    process_group: Any | None = None,
    timeout: float = 600.0,
    overwrite: bool = False,
) -> Checkpoint:
    """Save ``state`` to the directory ``path``; returns when it is published, durable and visible to all.

    state: mapping of names to modules, optimizers, schedulers, anything with ``state_dict``/``load_state_dict``,
    tensors, and plain objects, nested as you like. step, metrics: stored with it. process_group: the ranks that save;
    all of them call this. timeout: seconds for the whole save. overwrite: replace what is at ``path`` as a whole.

    Raises `ConfigError`, `CheckpointExists`, `SaveFailed`, `StorageError`, `DeadlineExceeded`, `OutcomeUnknown`; the
    same on every rank. Nothing is visible at ``path`` unless this returned.
    """
    handle = async_save(
        state,
        path,
        step=step,
        metrics=metrics,
        staging="eager",
        process_group=process_group,
        timeout=timeout,
        overwrite=overwrite,
    )
    return handle.result()


def async_save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    staging: Literal["lazy", "eager"] = "lazy",
    process_group: Any | None = None,
    timeout: float = 600.0,
    overwrite: bool = False,
) -> SaveHandle:
    """Start saving ``state`` to the directory ``path`` and return a handle; arguments as for `save`.

    With ``staging="lazy"`` parameters and optimizer state are copied after this has returned, and the next optimizer
    step waits until they are; call ``handle.wait_staged()`` before changing them otherwise. With ``"eager"`` all is
    copied when this returns.
    """
    if step is not None:
        checked_step(step)
    checked_seconds("timeout", timeout)
    if staging not in ("lazy", "eager"):
        raise ConfigError(f"staging must be 'lazy' or 'eager', not {staging!r}", field="staging")
    numbers = checked_metrics(metrics)
    target = checked_path(path, field="path")
    group = open_group(process_group, purpose="save")
    tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks)
    session = _SaveSession(target, group, timeout)
    request = SaveRequest(
        step=step,
        name=os.path.basename(target),
        metrics=numbers,
        resumable=True,
        overwrite=overwrite,
        eager=staging == "eager",
    )
    return session.start(tree, request)


def load(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    process_group: Any | None = None,
    timeout: float = 600.0,
) -> Checkpoint:
    """Fill ``state`` in place from the checkpoint at ``path``; returns when every rank has.

    path: a checkpoint, a manager's root (its newest step), or a directory that stock DCP wrote. strict: names that
    are missing, unexpected or of another shape are a `StateMismatch` before anything is touched; otherwise what fits
    is loaded. Top-level keys that ``state`` doesn't have are simply not loaded. verify: match every byte read with
    its checksum. process_group: the ranks that load; all of them call this. timeout: seconds.

    Raises `CheckpointNotFound`, `CheckpointCorrupt`, `StateMismatch`, `StorageError`, `DeadlineExceeded`; the same on
    every rank. After a failure in the middle the destination is undefined until a load succeeds.
    """
    checked_seconds("timeout", timeout)
    target = checked_path(path, field="path")
    group = open_group(process_group, purpose="load")
    tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks)
    options = LoadOptions(strict=strict, verify=verify, timeout_s=timeout)
    try:
        return load_state(tree, lambda: target, group, Votes(group.board), options)
    finally:
        group.board.close()


def open(path: str | os.PathLike[str]) -> Checkpoint:  # noqa: A001 - the name users call
    """Open the checkpoint at ``path`` (a manager's root: its newest step), read-only; no process group needed."""
    return open_checkpoint(path)


class _SaveSession:
    """A saver for one save, which takes itself down when the save has ended."""

    def __init__(self, target: str, group: Group, timeout_s: float) -> None:
        self._group = group
        self._lock: RootLock | None = None
        parent, name = os.path.split(target)
        config = CheckpointConfig(
            keep=None, in_flight=1, stage_timeout=timeout_s, persist_timeout=timeout_s, commit_timeout=timeout_s
        )
        storage = LocalStorage(parent)
        error: BaseException | None = None
        if group.rank == 0:
            try:
                create_root(parent)
                self._lock = RootLock.acquire_beside(target)
                recover(
                    storage,
                    clock=time.monotonic,
                    sleep=time.sleep,
                    matches=lambda found: found == name,
                    timeout_s=timeout_s,
                )
            except (HoldfastError, OSError) as failed:
                error = failed
        try:
            Votes(group.board).settle(error, timeout_s=timeout_s)
            self._saver = Saver(storage, group, config)
        except BaseException:
            self._release()
            raise

    def start(self, tree: StateTree, request: SaveRequest) -> SaveHandle:
        guard_updates(self._saver)
        try:
            handle = self._saver.start(tree, request)
        except BaseException:
            self._take_down()
            raise
        # Not on the finalizer thread, which the saver waits for when it closes.
        closer = threading.Thread(target=self._take_down, name="holdfast-closer", daemon=True)
        handle.add_done_callback(lambda _: closer.start())
        return handle

    def _take_down(self) -> None:
        unguard_updates(self._saver)
        try:
            self._saver.close(None)
        finally:
            self._release()
            self._group.board.close()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
