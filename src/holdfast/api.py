"""Implement the one-call functions `save`, `async_save`, `load`, `open` and `delete`.

Calls of one process share its engine, plans and warm images (`process_session`); `holdfast.release` frees those. A
training loop that saves repeatedly should use a `CheckpointManager`, which keeps all images and prepares the next save
ahead.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.catalog.root import checked_target
from holdfast.config import config_within
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.group import ALONE
from holdfast.engine.removal import remove_quickly
from holdfast.errors import CheckpointNotFound, ConfigError, DeadlineExceeded
from holdfast.format.manifest import COPY_OF
from holdfast.loader.checkpoint import Checkpoint, open_checkpoint
from holdfast.loader.loader import LoadOptions, load_state
from holdfast.saver.checkpointer import SaveRequest, read_extra_files
from holdfast.saver.copies import extra_of_copy
from holdfast.saver.process_session import process_session
from holdfast.saver.session import OUTCOME_GRACE_S, OneCallSession, Session
from holdfast.saver.startup import claim_path
from holdfast.state.tree import StateTree
from holdfast.storage.files import let_go
from holdfast.storage.local import open_storage
from holdfast.storage.protocol import DirectoryTarget
from holdfast.validation import checked_metrics, checked_names, checked_path, checked_seconds, checked_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from holdfast.format.manifest import Manifest
    from holdfast.saver.handle import SaveHandle


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    process_group: Any | None = None,
    timeout: float = 600.0,
    overwrite: bool = False,
    files: Mapping[str, bytes | os.PathLike[str]] | None = None,
) -> Checkpoint:
    """Save ``state`` to the directory ``path``; returns when it is published, durable and visible to all.

    state: mapping of names to modules, optimizers, schedulers, anything with ``state_dict``/``load_state_dict``,
    tensors, and plain objects, nested to any depth. step, metrics: stored with it; metrics are rank 0's.
    process_group: the ranks that save; all of them call this. ``"alone"``: this rank by itself, with no group made for
    it, to a path of its own. timeout: seconds for the whole save, after which it
    fails. overwrite: replace the checkpoint at ``path`` as a whole, unless that is a manager's root; files of
    others are kept. files: small files to store with it, by plain names: content, or a path that is read now; rank 0's
    count. They are in the manifest, verified, and there before the checkpoint is visible: see `Checkpoint.files`.

    Raises `ConfigError`, `CheckpointExists`, `SaveFailed`, `StorageError`, `DeadlineExceeded`, `OutcomeUnknown`; the
    same on every rank. Nothing is visible at ``path`` unless this returned.
    """
    with _SaveSession(
        state, path, process_group, timeout, step, metrics, files, "eager", overwrite=overwrite, waits=True
    ) as session:
        return session.saved()


def save_like(
    manifest: Manifest,
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    files: Mapping[str, bytes],
    overwrite: bool,
    timeout: float,
) -> Checkpoint:
    """Save ``state`` by this process alone, and say of it what ``manifest`` says; for ``holdfast convert``.

    A delta has become whole: it is none of its chain any more. Arguments and errors otherwise as for `save`.
    """
    extra = extra_of_copy(manifest)
    if manifest.chain:
        del extra[COPY_OF]
    more = (manifest.step, manifest.metrics, files, "eager")
    with _SaveSession(state, path, ALONE, timeout, *more, overwrite=overwrite, waits=True) as session:
        session.request = replace(session.request, resumable=manifest.resumable, extra=extra)
        return session.saved()


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
    files: Mapping[str, bytes | os.PathLike[str]] | None = None,
) -> SaveHandle:
    """Start saving ``state`` to the directory ``path`` and return a handle; arguments as for `save`.

    With ``staging="lazy"`` parameters and optimizer state are copied after this has returned, and the next optimizer
    step waits until they are; call ``handle.wait_staged()`` before changing them in any other way. With ``"eager"``
    everything is copied when this returns.
    """
    session = _SaveSession(state, path, process_group, timeout, step, metrics, files, staging, overwrite=overwrite)
    try:
        handle = session.start()
    except BaseException:
        session.end()
        raise
    session.end_in_background(handle)
    return handle


def load(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    verify: bool = True,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    key_map: Any = None,
    process_group: Any | None = None,
    timeout: float = 600.0,
) -> Checkpoint:
    """Fill ``state`` in place from the checkpoint at ``path``; returns when every rank has.

    path: a checkpoint, a manager's root (its newest step), a directory that stock DCP wrote, or a Hugging Face model's
    (``model.safetensors``, or shards with their index): that fills modules, each rank reading its own shards.
    strict: names that are missing, unexpected or of another shape are a `StateMismatch` before anything is touched;
        otherwise values that fit are loaded. Top-level keys that ``state`` doesn't have are not loaded; in a flat state
    (``model.state_dict()``) the key is the part before the first dot. verify: compare every byte with its checksum.
    include, exclude: load only, or leave out, what is at or below these top-level keys or dotted prefixes of names
    (``"model.head"``); the rest keeps its values. One that is known to neither state nor checkpoint is a `ConfigError`.
    key_map: maps names and shapes of a Hugging Face directory to ``state``, as passed to the export that wrote it;
    None for the model's own layout. process_group: the ranks that load; all of them call this. timeout: seconds.

    Raises `CheckpointNotFound`, `CheckpointCorrupt`, `StateMismatch`, `StorageError`, `DeadlineExceeded`; the same on
    every rank. After a failure in the middle the destination is undefined until a load succeeds.
    """
    # First: errors of arguments are also told to the other ranks.
    with Session(process_group, purpose="load", timeout=timeout) as session:
        group = session.group
        with session.settling():
            session.deadline = Deadline.after(checked_seconds("timeout", timeout))
            session.target = target = checked_path(path, field="path")
            tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks)
            including = None if include is None else checked_names(include, field="include")
            excluding = () if exclude is None else checked_names(exclude, field="exclude", may_be_empty=True)
        options = LoadOptions(
            strict=strict,
            verify=verify,
            include=including,
            exclude=excluding,
            key_map=key_map,
            timeout_s=session.deadline.timeout_s,
        )
        return load_state(tree, lambda: target, group, session.votes, options)


def open(path: str | os.PathLike[str]) -> Checkpoint:  # noqa: A001 - the name users call
    """Open the checkpoint at ``path`` (a manager's root: its newest step), read-only; no process group needed."""
    return open_checkpoint(checked_path(path, field="path"))


def delete(path: str | os.PathLike[str], *, timeout: float = 60.0) -> bool:
    """Delete the checkpoint or export at ``path`` as a whole; for those who decide themselves what to keep.

    One rename makes it invisible, then its files are removed; what ``timeout`` seconds don't suffice for, or a crash
    leaves, is hidden and removed by the next manager or `holdfast recover` of that root. Returns False, with nothing
    changed, while somebody loads it. One process calls it, and nobody saves there at that moment.

    Raises `CheckpointNotFound`, `ConfigError`, `StorageError`.
    """
    target = checked_target(path, field="path")
    limit_s = checked_seconds("timeout", timeout)
    root, name = os.path.split(target)
    storage = open_storage(root)
    let_go(target)
    if storage.size(name) is not None or not storage.list_dir(name):
        raise CheckpointNotFound(f"{target} isn't there: nothing to delete", path=target)
    trash = storage.hide(name)
    if trash is None:
        return False
    place = storage.target("")
    if isinstance(place, DirectoryTarget):
        with place:
            remove_quickly(place.fd, trash, timeout_s=limit_s)
    else:
        for hidden in trash:
            storage.remove_tree(hidden)
    return True


def _checked_request(
    target: str,
    step: int | None,
    metrics: dict[str, float],
    files: dict[str, bytes],
    staging: str,
    *,
    overwrite: bool,
) -> SaveRequest:
    if step is not None:
        checked_step(step)
    if staging not in ("lazy", "eager"):
        raise ConfigError(f"staging must be 'lazy' or 'eager', not {staging!r}", field="staging")
    return SaveRequest(
        step=step,
        name=os.path.basename(target),
        metrics=metrics,
        resumable=True,
        overwrite=overwrite,
        files=files,
    )


class _SaveSession(OneCallSession):
    """A session of one save to one path. Every rank makes one, with the same arguments."""

    def __init__(
        self,
        state: Mapping[str, Any],
        path: str | os.PathLike[str],
        process_group: Any | None,
        timeout: float,
        step: int | None,
        metrics: Mapping[str, float] | None,
        files: Mapping[str, Any] | None,
        staging: str,
        *,
        overwrite: bool,
        waits: bool = False,
    ) -> None:
        """waits: the caller waits until the state is written, not only copied."""
        # First: errors of arguments are also told to the other ranks.
        super().__init__(process_group, purpose="save", timeout=timeout)
        self._waits = waits
        self._streams = False
        group = self.group
        try:
            with self.settling():
                self.deadline = Deadline.after(checked_seconds("timeout", timeout))
                self.target = target = checked_target(path, field="path")
                # Only rank 0's metrics count: other ranks need not wait for values that a device has yet to compute.
                numbers = checked_metrics(metrics) if group.rank == 0 else {}
                contents = read_extra_files(files) if group.rank == 0 else {}
                self.request = _checked_request(target, step, numbers, contents, staging, overwrite=overwrite)
                self._eager = staging == "eager"
                self._tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks)
                if overwrite:
                    let_go(target)
                if group.rank == 0:
                    self.hold(claim_path(target, step=step, overwrite=overwrite, timeout_s=self.left_s()).release)
                kept = process_session()
                kept.keep_engine(group.rank)
                config = config_within(self.left_s())
                if waits:  # no training runs meanwhile that the engine would have to yield to
                    config = replace(config, nice=0)
                storage, plans = open_storage(os.path.dirname(target)), kept.plans_of(group)
                self._streams = self._waits and storage.takes_pieces
                self.start_saver(storage, config, overlaps=False, shared=plans)
            self.guard(self.saver)
        except BaseException:
            self.end()
            raise

    def saved(self) -> Checkpoint:
        """Save, and wait for it."""
        handle = self.start()
        try:
            return handle.result(max(self.left_s(), OUTCOME_GRACE_S))
        except DeadlineExceeded:
            with contextlib.suppress(DeadlineExceeded):
                self.end()  # gives the save up
            if handle.done():
                return handle.result(0.0)
            path, limit_s = handle.path, self.deadline.timeout_s
            message = f"the save to {path} did not end within {limit_s:g} s; look at the storage, or allow more"
            raise DeadlineExceeded(message, waited_for=f"save to {path}", timeout_s=limit_s) from None

    def start(self) -> SaveHandle:
        saver = self.saver
        checkpoint = saver.checkpoint(self.request, published=lambda _: saver.leave_to_next())
        saver.start(self._tree, [checkpoint], step=self.request.step, eager=self._eager, streams=self._streams)
        return checkpoint.handle
