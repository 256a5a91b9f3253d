"""One call each: `save`, `async_save`, `load`, `open`. Sessions of a single save or load.

A training loop that saves again and again is better served by a `CheckpointManager`: it keeps engine, plan and warm
file images from one save to the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from holdfast.agreement import Votes
from holdfast.arguments import checked_metrics, checked_path, checked_seconds, checked_step
from holdfast.capture import SaveRequest
from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.config import config_within
from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.group import open_group
from holdfast.loader import LoadOptions, load_state
from holdfast.optimizer_hook import guard_updates, unguard_updates
from holdfast.saver import Saver
from holdfast.starting import claim_path
from holdfast.state.tree import StateTree
from holdfast.storage.local import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.handle import SaveHandle
    from holdfast.storage.lock import RootLock

_log = logging.getLogger("holdfast")

OUTCOME_GRACE_S: Final = 1.0
"""How long a save whose time is up may take to say what became of it."""


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
    tensors, and plain objects, nested as you like. step, metrics: stored with it; metrics are rank 0's.
    process_group: the ranks that save; all of them call this. timeout: seconds for the whole save, after which it is
    given up. overwrite: replace what is at ``path`` as a whole, unless that is a manager's root.

    Raises `ConfigError`, `CheckpointExists`, `SaveFailed`, `StorageError`, `DeadlineExceeded`, `OutcomeUnknown`; the
    same on every rank. Nothing is visible at ``path`` unless this returned.
    """
    session = _SaveSession(state, path, process_group, timeout, step, metrics, "eager", overwrite=overwrite)
    try:
        handle = session.start()
        try:
            return handle.result(max(session.left_s(), OUTCOME_GRACE_S))
        except DeadlineExceeded:
            with contextlib.suppress(DeadlineExceeded):
                session.close()  # gives it up
            if handle.done():
                return handle.result(0.0)
            message = f"the save to {handle.path} did not end within {timeout:g} s; look at the storage, or allow more"
            raise DeadlineExceeded(message, waited_for=f"save to {handle.path}", timeout_s=timeout) from None
    finally:
        session.close()


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
    session = _SaveSession(state, path, process_group, timeout, step, metrics, staging, overwrite=overwrite)
    try:
        handle = session.start()
    except BaseException:
        session.close()
        raise
    # On a thread of its own: the saver waits for those that run callbacks when it closes.
    closer = threading.Thread(target=session.close_after, args=(handle,), name="holdfast-closer", daemon=True)
    try:
        closer.start()
    except RuntimeError:
        session.close()
        raise
    return handle


def load(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    key_map: Any = None,
    process_group: Any | None = None,
    timeout: float = 600.0,
) -> Checkpoint:
    """Fill ``state`` in place from the checkpoint at ``path``; returns when every rank has.

    path: a checkpoint, a manager's root (its newest step), a directory that stock DCP wrote, or a Hugging Face model's
    (``model.safetensors``, or shards with their index): that fills modules, each rank reading what it holds of them.
    strict: names that are missing, unexpected or of another shape are a `StateMismatch` before anything is touched;
    otherwise what fits is loaded. Top-level keys that ``state`` doesn't have are simply not loaded. verify: match every
    byte read with its checksum. key_map: how a Hugging Face directory names and shapes what ``state`` has, as for the
    export that it is read back from; None for the model's own way. process_group: the ranks that load; all of them call
    this. timeout: seconds.

    Raises `CheckpointNotFound`, `CheckpointCorrupt`, `StateMismatch`, `StorageError`, `DeadlineExceeded`; the same on
    every rank. After a failure in the middle the destination is undefined until a load succeeds.
    """
    group = open_group(process_group, purpose="load", timeout=timeout)
    error: BaseException | None = None
    target = ""
    votes = Votes(group.board)
    try:
        timeout_s = checked_seconds("timeout", timeout)
        try:
            target = checked_path(path, field="path")
            tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        votes.settle(error, target=target, timeout_s=timeout_s)
        options = LoadOptions(strict=strict, verify=verify, key_map=key_map, timeout_s=timeout_s)
        return load_state(tree, lambda: target, group, votes, options)
    finally:
        votes.leave()
        group.board.close()


def open(path: str | os.PathLike[str]) -> Checkpoint:  # noqa: A001 - the name users call
    """Open the checkpoint at ``path`` (a manager's root: its newest step), read-only; no process group needed."""
    return open_checkpoint(checked_path(path, field="path"))


def _checked_request(
    target: str, step: int | None, metrics: dict[str, float], staging: str, *, overwrite: bool
) -> SaveRequest:
    if step is not None:
        checked_step(step)
    name = os.path.basename(target)
    if not name:
        raise ConfigError(f"path: {target} can't be a checkpoint; name a directory below it", field="path")
    if staging not in ("lazy", "eager"):
        raise ConfigError(f"staging must be 'lazy' or 'eager', not {staging!r}", field="staging")
    return SaveRequest(
        step=step,
        name=name,
        metrics=metrics,
        resumable=True,
        overwrite=overwrite,
        eager=staging == "eager",
    )


class _SaveSession:
    """A saver for one save to one path. Every rank makes one, with the same arguments; `close` is idempotent."""

    def __init__(
        self,
        state: Mapping[str, Any],
        path: str | os.PathLike[str],
        process_group: Any | None,
        timeout: float,
        step: int | None,
        metrics: Mapping[str, float] | None,
        staging: str,
        *,
        overwrite: bool,
    ) -> None:
        # First of all: ranks number their sessions, also one whose arguments are refused.
        self._group = group = open_group(process_group, purpose="save", timeout=timeout)
        self._deadline = time.monotonic() + checked_seconds("timeout", timeout)
        self._votes = Votes(group.board)
        self._target = ""
        self._lock: RootLock | None = None
        self._saver: Saver | None = None
        error: BaseException | None = None
        try:
            self._target = checked_path(path, field="path")
            # Metrics are rank 0's: elsewhere nothing need wait for what a device has yet to compute.
            numbers = checked_metrics(metrics) if group.rank == 0 else {}
            self._request = _checked_request(self._target, step, numbers, staging, overwrite=overwrite)
            self._tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks)
            if group.rank == 0:
                self._lock = claim_path(self._target, step=step, overwrite=overwrite, timeout_s=self.left_s())
            storage = LocalStorage(os.path.dirname(self._target))
            # Before the ranks settle: one that can't have a saver is one that can't take part.
            self._saver = Saver(storage, group, config_within(self.left_s()))
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        except BaseException:
            self.close()
            raise
        try:
            self._votes.settle(error, target=self._target, timeout_s=self.left_s())
            assert self._saver is not None
            guard_updates(self._saver)
        except BaseException:
            self.close()
            raise

    def left_s(self) -> float:
        """Seconds left of the whole; never quite zero: a wait of 0 s would not even look."""
        return max(0.001, self._deadline - time.monotonic())

    def start(self) -> SaveHandle:
        if self._saver is None:
            raise AssertionError("a session is started once it is open")
        return self._saver.start(self._tree, self._request)

    def close_after(self, handle: SaveHandle) -> None:
        """Wait for the save to end, on a thread of its own, then release everything; what is late is given up."""
        with contextlib.suppress(DeadlineExceeded):
            handle.exception(max(self.left_s(), OUTCOME_GRACE_S))
        try:
            self.close()
        except HoldfastError as error:
            _log.warning("the save to %s was given up: %s", handle.path, error)

    def close(self) -> None:
        """Let the save end in the time it has left, then release everything."""
        saver = self._saver
        if saver is not None and not saver.is_ours:
            return  # a forked child: all of this is its parent's
        try:
            if saver is not None:
                unguard_updates(saver)
                saver.close(max(self.left_s(), OUTCOME_GRACE_S))
        finally:
            if saver is None or saver.has_ended:  # else some thread may still publish: nobody else may write there
                lock, self._lock = self._lock, None
                if lock is not None:
                    lock.release()
                self._votes.leave()
                self._group.board.close()
