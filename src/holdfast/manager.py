"""`CheckpointManager`, the object in a training loop: when to save, what to keep, where to resume.

Guarantees: `step` never blocks longer than its configuration says; a failed save is never silent (`on_error`); the
newest checkpoint that a run could resume from is never deleted; two managers never write to one root.
Assumes every rank of the group makes one and calls it alike; wall-clock decisions and metrics are rank 0's.
Does not copy, write, load or decide: ``saver``, ``loader.resume``, ``catalog.retention``, ``saver.preemption`` and
``commit.recovery`` do.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from holdfast import events
from holdfast.catalog.catalog import Catalog, model_stays
from holdfast.catalog.journal import Journal
from holdfast.catalog.root import named_steps, published
from holdfast.catalog.tiers import MirrorTier
from holdfast.config import CheckpointConfig
from holdfast.coordination.votes import Votes
from holdfast.cores import usable_cores
from holdfast.engine.at_exit import close_later, end_at_exit
from holdfast.errors import CheckpointExists, ConfigError, DeadlineExceeded, HoldfastError
from holdfast.loader.notebook import root_html
from holdfast.loader.resume import Resumer
from holdfast.saver.checkpointer import SaveRequest, read_extra_files
from holdfast.saver.deliverer import Deliverer, Deliverers
from holdfast.saver.delivery import ORPHAN_GRACE_S
from holdfast.saver.mirror import Mirror
from holdfast.saver.preemption import Preemption
from holdfast.saver.preflight import (
    check_deletes,
    check_disk,
    check_memory,
    check_sign,
    known_bytes,
    put_sign,
    remove_signs,
)
from holdfast.saver.session import Session
from holdfast.saver.startup import Tenancy, settle_root, weakly
from holdfast.staging.optimizer_hook import UpdateGuard, guard_updates
from holdfast.state.tree import StateTree
from holdfast.storage.local import open_storage
from holdfast.storage.protocol import Storage
from holdfast.validation import checked_path, checked_step, checked_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.catalog.tiers import Tier
    from holdfast.saver.capture import Delivery, SharedCaptures
    from holdfast.saver.checkpointer import CheckpointDelivery
    from holdfast.saver.handle import SaveHandle
    from holdfast.saver.saver import Saver
    from holdfast.storage.protocol import StorageLock

_log = logging.getLogger("holdfast")
_Files: TypeAlias = "Mapping[str, bytes | os.PathLike[str]] | None"
_Claim: TypeAlias = Literal["new", "again", "stands"]
"""How to save a step: for the first time, in place of the previous save, or not at all, as that save stands."""


class CheckpointManager:
    """Saves ``state`` under ``root`` while training runs, and resumes from there.

    root: a directory that every rank sees, made if it doesn't exist; a URL such as ``s3://bucket/run``, ``gs://`` or
    ``az://`` (docs/object-stores.md); or a `holdfast.storage.protocol.Storage`.
    state: as for `holdfast.save`; the random number generators are added under ``"rng"`` unless it has that key.
    config: see `CheckpointConfig`. exports: `HFExport`, each with a root of its own; `step` makes what is due.
    mirror: a second place for copies of the checkpoints, to which they are uploaded in the background once published: a
    path or URL that every rank sees, or a `Storage`; ``root`` is then a directory. See `SaveHandle.wait_mirrored`.
    process_group: the ranks that save together; None for all, ``"alone"`` for this one by itself. deliveries:
    `Deliverer` objects, which make what else is due from the same captures; the same on every rank.

    On construction rank 0 locks the root, recovers what a crash left and checks that there is room for a checkpoint and
    the rights that ``config`` needs (unless ``load_only``), while all ranks wait.
    Raises `ConfigError`, `RootLocked`, `StorageError`, on every rank. Call its methods from the training thread.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        state: Mapping[str, Any],
        *,
        config: CheckpointConfig | None = None,
        exports: Sequence[Any] = (),
        process_group: Any | None = None,
        deliveries: Sequence[Any] = (),
        mirror: str | os.PathLike[str] | Storage | None = None,
    ) -> None:
        config, error = _checked_config(config)
        self._config = config
        patience_s = config.stage_timeout + config.persist_timeout
        # First: errors of arguments are also told to the other ranks.
        self._session = Session(process_group, purpose="manager", timeout=config.stage_timeout, patience_s=patience_s)
        self._group, self._votes = self._session.group, self._session.votes
        self._pin_votes = Votes(self._group.board, "pin")
        self._session.hold(self._pin_votes.leave)
        self._root = ""
        self._model_tree: StateTree | None = None
        self._lock: StorageLock | None = None
        self._saver: Saver | None = None
        self._deliverers = Deliverers()
        self._preemption: Preemption | None = None
        self._mirror: Mirror | None = None
        self._journal: Journal | None = None
        """On rank 0 of a manager that writes."""
        self._handles: list[SaveHandle] = []
        self._last: SaveHandle | None = None
        self._last_files: Mapping[str, Any] | None = None
        self._taken: set[int] = set()
        """Steps that may be published: named in the root at start, or begun since; the same on every rank."""
        self._models: set[int] = set()
        """Steps ahead of the run that hold the final model or export of an earlier run; the same on every rank."""
        self._last_is_final = self._seen_first = self._closed = False
        self._tenancy: Tenancy | None = None
        self._replaced_by = ""
        self._trash: list[str] = []  # trash of the recovery, until there is an engine to remove it
        self.recovered: Any = None
        """The report of this start's recovery (rank 0 only)."""
        try:
            with self._session.settling(timeout_s=patience_s):
                if error is not None:
                    raise error  # noqa: TRY301 - raised on all ranks
                self._open(root, state, exports, deliveries, mirror, patience_s)
            if not config.load_only:
                self._agree_on_root(patience_s)
            self._begin()
        except BaseException:
            self._give_up_start()  # an interrupted notebook cell must not keep the root locked
            raise

    def _open(
        self,
        root: str | os.PathLike[str] | Storage,
        state: Mapping[str, Any],
        exports: Sequence[Any],
        deliveries: Sequence[Any],
        mirror: str | os.PathLike[str] | Storage | None,
        patience_s: float,
    ) -> None:
        """Create what this rank needs; nothing starts before all ranks are ready."""
        config, group = self._config, self._group
        if not isinstance(exports, (list, tuple)):
            raise ConfigError(f"exports must be a list of HFExport, not one {type(exports).__name__}", field="exports")
        self._storage = root if isinstance(root, Storage) else open_storage(checked_path(root, field="root"))
        self._session.target = self._root = self._storage.root
        self._tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks, auto_rng=True)
        self._tree.require_keys(config.exclude_from_loading, field="exclude_from_loading")
        if config.load_model_only or config.initial_load_path is not None:
            self._tree.modules_only()
        held = config.load_step if (config.load_step or 0) >= 0 else None
        self._keeper = Catalog(self._storage, config.name_template, config.keep, held=held)
        second: Storage | None = None
        if mirror is not None:
            second = mirror if isinstance(mirror, Storage) else open_storage(checked_path(mirror, field="mirror"))
        tier: Tier | None = None if second is None else MirrorTier(second, config.name_template)
        if not config.load_only:
            for settings in (config, *exports):  # before anything is touched
                usable_cores(getattr(settings, "cores", "any"))
            self._tenancy = Tenancy.begin(self, self._root, timeout_s=patience_s)
            self._session.hold(self._tenancy.end)
            known = known_bytes(state)
            check_memory(known, config.in_flight)
            if group.rank == 0:
                if os.path.isabs(self._root):
                    check_disk(self._root, known)
                self._prepare_root()
                check_deletes(self._storage, config.keep)
            # Before the ranks agree: a rank without a saver can't take part.
            self._saver = self._session.start_saver(self._storage, config)
            if second is not None:
                tier = self._mirror = Mirror(second, self._storage, group, config)
                self._session.hold(self._mirror.close)
                self._keeper.heed(spare=self._mirror.spare, elsewhere=self._mirror.entries)
            if exports:
                from holdfast.export.exporter import exporters_of  # heavy; imported only for exports

                self._deliverers.add(exporters_of(exports, state, self._root, self._saver.session))
                if self._journal is not None:
                    self._journal.exports = tuple(os.fspath(export.root) for export in exports)
            self._deliverers.open(deliveries, self._saver.session)
            if config.save_on_signal:
                self._preemption = Preemption(group.board, config.save_on_signal, config.signal_timeout)
        resumed = weakly(self._resumed_from)
        self._resumer = Resumer(self._tree, self._storage, self._keeper, config, resumed, tier)
        # After the saver: before it, then.
        self._session.at_exit(end_at_exit(self, _close_at_exit, _finish_at_exit))

    def _begin(self) -> None:
        """Start what needs all ranks, once all are ready."""
        if self._saver is not None:
            failures = weakly(self._raise_failures) if self._config.on_error == "raise_now" else None
            self._guard = UpdateGuard(self._saver.before_update, failures, self._saver.note_step)
            self._session.guard(self._guard)
            for name in self._trash:
                self._saver.remove(name)
        self._deliverers.start()
        if self._mirror is not None:
            self._mirror.start(self._keeper)
        if self._preemption is not None:
            self._preemption.start()
        if self._journal is not None:
            self._journal.start()

    def __enter__(self) -> Self:
        if self._tenancy is not None:
            self._tenancy.is_scoped = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._close_failed(f"after {error!r}")

    def _close_failed(self, why: str) -> None:
        """Close as if this process had died, since other ranks may have failed too; raises nothing of Holdfast's."""
        if self._journal is not None:
            self._journal.how = "failed"
        try:
            self._close(ORPHAN_GRACE_S)
        except HoldfastError as failed:
            _log.warning("while closing %s: %s", why, failed)  # the error that ended training is the one to see

    def __del__(self) -> None:
        """Close a forgotten manager on another thread, since a finalizer may run at any point of the program."""
        if not getattr(self, "_closed", True):
            if self._tenancy is not None:
                self._tenancy.is_forgotten = True
            close_later(f"the CheckpointManager of {self._root}", self._close_forgotten)

    def _close_forgotten(self) -> None:
        if self._saver is not None and self._saver.is_ours:
            guard_updates(self._guard)  # its weak reference may be gone already
            with contextlib.suppress(DeadlineExceeded):  # the guard stays while anything is in flight
                self._saver.wait(None)
        self._close(None)

    def make_room(self, replaced_by: str) -> None:
        """Close for the manager made at ``replaced_by``: the code that made this one runs again."""
        self._replaced_by = replaced_by
        self._close(None)

    # Resuming. ---------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None) -> int | None:
        """Load the newest verified checkpoint in place, or exactly ``step``; return its step, None if there is none.

        Returns when every rank has loaded. First waits for saves and exports in flight, at most until their deadlines,
        so that the run continues from what they publish, or goes back from there. Step 0 and model-only checkpoints
        load only the modules. With an empty root and `initial_load_path`, that is loaded (modules only) and None
        returned.

        Raises `CheckpointNotFound` for a missing step, `CheckpointCorrupt` (if all candidates are damaged; with
        ``on_corrupt="raise"`` for the first, and also if there is no candidate but something that looks like a
        checkpoint), `StateMismatch`, `StorageError`, `DeadlineExceeded` for saves in flight, `ConfigError` if the
        mirror's newest is of another run.
        """
        self._check_open()
        with self._keeper.holding(step):  # keeps retention from it once nothing is in flight
            self._end_flights()
            return self._resumer.restore(step, self._group, self._votes)

    def start_over(self) -> None:
        """Begin a run from nothing in a root that may have steps; called on every rank, in place of `restore`.

        All of them are left behind, as by going back to before the first: they count as older than what this run
        publishes, and are replaced, each as a whole, when it reaches their numbers. Nothing is loaded. Waits and raises
        as `restore`.
        """
        self._check_open()
        self._end_flights()

        def models() -> bytes:
            found = self._keeper.outlook(None)
            return b" ".join(b"%d" % step for step in (*found.models, *found.exports))

        self._resumed_from(0, [int(step) for step in self._tell(models).split()])

    def _end_flights(self) -> None:
        """End every save and export begun before, and leave none for a later start to publish."""
        saver = self._saver
        if saver is None or not saver.is_ours:
            return
        saver.entries.require("restore", ())
        with self._session.settling(timeout_s=self._longest_s() + self._config.persist_timeout):
            saver.before_update()  # gives up what isn't staged in time
            for handle in self._handles:
                handle.exception()
            unsettled = self._last is not None and any(found.kind != "trash" for found in self._storage.unsettled())
            if self._group.rank == 0 and unsettled:
                _, trash = settle_root(self._storage, timeout_s=self._config.persist_timeout)
                for name in trash:
                    saver.remove(name)

    def _resumed_from(self, step: int | None, models: list[int], attempt: str = "") -> None:
        if self._journal is not None and step is not None:
            self._journal.note("run.resumed", step=step)
        self._keeper.resumed_from(step, attempt)
        if self._last is not None and self._last.step != step:
            self._last = None  # it belongs to the abandoned part of the run
        self._taken = set() if step is None else {step}
        self._models = {model for model in models if step is None or model > step}
        self._deliverers.resumed_from(step)
        if self._mirror is not None:
            self._mirror.resumed_from(step)

    # Saving. -----------------------------------------------------------------------------------------------------

    def step(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
    ) -> list[SaveHandle]:
        """Start whatever is due after training step ``step``; returns the handles of what was started.

        Returns once references and eager values are taken (``mode="async"``), or when published (``"sync"``).
        metrics, files: numbers and small files to store with the checkpoint, as for `holdfast.save`; rank 0's count.
        Files are only read if a checkpoint is due. Raises an earlier failure as `on_error` says, once what is due has
        been started: ranks learn of a failure at different moments, and must stay in step.
        At the step agreed on for a signal (`save_on_signal`) it saves, waits, and ends the program as the signal does.
        A step where the run comes by the model-only last save of an earlier one, or its export, is not saved, as the
        log says.
        """
        self._check_open()
        checked_step(step)
        due = self._config.every is not None and step % self._config.every == 0 and step > 0
        due = due or (self._config.first_step and not self._seen_first)
        self._seen_first = True
        if self._journal is not None:
            self._journal.step(step)
        if self._config.load_only or self._saver is None:
            return []
        if step in self._models:
            if due:
                _log.warning("%s", model_stays(step, self._path_of(step)))
            due = False
        elif self._preemption is not None and self._preemption.is_due():  # else at the next call: this can't be saved
            handles = [self._preemption.save(step, lambda: self._start_for_signal(step, metrics, files))]
            self._raise_failures()
            return handles
        others = self._deliverers.due(step)
        if due or others:
            return self._save_due(step, metrics, files, others, checkpoint=due)
        self._saver.warm_up(self._tree)
        self._raise_failures()
        return []

    def _save_due(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        files: _Files,
        others: list[Deliverer[Any]],
        *,
        checkpoint: bool,
    ) -> list[SaveHandle]:
        """Make one capture for everything that is due; the checkpoint's handle comes first."""
        assert self._saver is not None
        if checkpoint:
            self._claim(step, final=False)  # may raise, so before anything is started
        jobs, handles = self._deliverers.begin(others, step)
        if checkpoint:
            handle = self._start(step, metrics, files, final=False, others=jobs)
            self._handles += handles
            handles.insert(0, handle)
        else:
            self._saver.start(self._tree, jobs, step=step, eager=self._config.staging == "eager")
            self._handles += handles
        for handle in handles if self._config.mode == "sync" else ():
            handle.exception()
        self._raise_failures(() if self._config.mode == "sync" else handles)
        return handles

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
    ) -> SaveHandle:
        """Save now, whatever the cadence; metrics and files as for `step`.

        Returns as `step` does; with ``final`` the last-save options apply and it returns when published. Saving a
        step that is published already is `CheckpointExists`, raised here on every rank, but for ``final`` directly
        after it: that returns the save before where last-save options and files change nothing, else replaces it. A
        model-only save replaces it only if it isn't pinned and an older step is left to resume from; else it stays, as
        the log says. A model-only last save of an earlier run that this one comes by is `CheckpointExists` too, unless
        this is ``final``, and so is an export. Where this raises an earlier failure, this save goes on all the same.
        """
        self._check_open()
        checked_step(step)
        claim = self._claim(step, files, final=final)
        if claim == "stands" and self._last is not None:
            handle = self._last
        else:
            handle = self._start(step, metrics, files, final=final, again=claim == "again")
        if waits := final or self._config.mode == "sync":
            handle.exception()
        self._raise_failures(() if waits else (handle,))
        return handle

    def _claim(self, step: int, files: _Files = None, *, final: bool) -> _Claim:
        """Return how to save ``step``, the same on every rank; costs nothing unless it may be published already.

        "new", "again" (replace the last save) or "stands" (keep it). Raises `CheckpointExists`, on every rank.
        """
        if self._saver is None:
            raise ConfigError("this manager was made with load_only=True and never saves", field="load_only")
        try:
            return self._cleared(step, files, final=final)
        except CheckpointExists as error:  # hooks are told of it as of any other save
            rank, path = self._group.rank, self._path_of(step)
            events.emit("save.started", step=step, rank=rank, path=path)
            events.emit("save.failed", step=step, rank=rank, path=path, error=repr(error))
            raise

    def _cleared(self, step: int, files: _Files, *, final: bool) -> _Claim:
        last = self._last
        if final and last is not None and last.step == step:
            verdict = self._verdict_on(last, files)
            if verdict != "new":
                return verdict
        if step in self._models and not final:
            path = self._path_of(step)
            raise CheckpointExists(model_stays(step, path), path=path)
        if step in self._taken:
            self._wait_for_saves_of(step)
            self._tell(functools.partial(self._refuse_taken, step))
        return "new"

    def _refuse_taken(self, step: int) -> bytes:
        self._keeper.refuse_taken(step, self._name_of(step))
        return b""

    def _wait_for_saves_of(self, step: int) -> None:
        """Wait until this manager's saves of ``step`` have ended or are late; rank 0 then reads what is published."""
        if self._saver is not None:
            self._saver.before_update()
        for handle in self._handles:
            if handle.path == self._path_of(step):
                with contextlib.suppress(DeadlineExceeded):
                    handle.exception()

    def _start(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        files: _Files,
        *,
        final: bool,
        again: bool = False,
        others: Sequence[Delivery] = (),
    ) -> SaveHandle:
        """Save what `_claim` allowed. again: replace the last save. others: deliveries from the same capture."""
        saver = self._saver
        assert saver is not None
        model_only = final and self._config.last_model_only
        self._taken.add(step)
        self._models.discard(step)
        checkpoint = self._checkpoint(step, metrics, files, final=final, overwrite=again)
        saver.start(
            self._trees_for(model_only=model_only),
            [checkpoint, *others],
            step=step,
            eager=self._config.staging == "eager",
            dtype=str(self._config.last_dtype) if final and self._config.last_dtype is not None else None,
        )
        handle = checkpoint.handle
        self._handles.append(handle)
        self._last, self._last_is_final, self._last_files = handle, final, checkpoint.request.files
        return handle

    def _checkpoint(
        self, step: int, metrics: Mapping[str, float] | None, files: _Files, *, final: bool, overwrite: bool
    ) -> CheckpointDelivery:
        saver = self._saver
        assert saver is not None
        request = SaveRequest(
            step=step,
            name=self._name_of(step),
            metrics=metrics or {},
            resumable=not (final and self._config.last_model_only),
            overwrite=overwrite,
            files=files,
        )
        in_flight = {handle.step for handle in self._handles if handle.step is not None and not handle.done()}
        lock, keeper = self._lock, self._keeper  # not this manager, which may be forgotten meanwhile

        def complete(request: SaveRequest) -> SaveRequest:
            if lock is not None:
                lock.renew()
            extra, replaces = keeper.place(step, request.name, in_flight, spare_models=not final)
            return replace(request, extra=extra, overwrite=request.overwrite or replaces, late_extra=keeper.parent)

        delivery = saver.checkpoint(request, complete=complete)
        handle, group, mirror = delivery.handle, self._group, self._mirror
        if mirror is not None:
            handle.mirrored = mirror.wait

        def published(request: SaveRequest) -> None:
            if mirror is not None:
                mirror.note_published(handle.attempt)
            if group.rank == 0:  # retention before the handle ends, so that waiting callers find it applied
                keeper.note_published(
                    request.step, request.name, request.extra, resumable=request.resumable, attempt=handle.attempt or ""
                )
                keeper.apply_retention(request.step, saver.remove)

        delivery.published = published  # refers to no manager: this thread must not keep a forgotten one alive
        return delivery

    def _start_for_signal(self, step: int, metrics: Mapping[str, float] | None, files: _Files) -> SaveHandle:
        """Save the whole state to resume from, whatever the last-save options; never skipped."""
        if (last := self._last) and last.step == step and (last.exception() is None or last.stage != "skipped"):
            return last
        for handle in self._handles if self._config.when_busy == "skip" else ():
            handle.exception()
        self._claim(step, final=False)
        return self._start(step, metrics, files, final=False)

    def before_update(self) -> None:
        """Wait until captured state may be changed by hand.

        On the CPU the calling thread waits until copies are complete (at most `stage_timeout`), on CUDA the current
        stream does. The optimizer hook calls it for every optimizer step.
        """
        if self._saver is not None:
            self._guard.before_update()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until captured state may change. timeout: seconds, None for `stage_timeout`; `DeadlineExceeded`."""
        if self._saver is not None:
            self._saver.wait_staged(checked_wait(timeout))

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save started so far has ended; raise the first failure according to `on_error`.

        timeout: seconds, None for the sum of the configured deadlines; `DeadlineExceeded`.
        """
        limit_s = checked_wait(timeout)
        if self._saver is not None:
            self._saver.wait(limit_s)
        self._deliverers.wait(limit_s)
        self._raise_failures()

    @property
    def captures(self) -> SharedCaptures | None:
        """The capture of the last save, for a `Publisher` that shares it; None with ``load_only``."""
        return None if self._saver is None else self._saver.shares

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len([one for one in self._handles if not one.done()])} saves in flight"
        return f"<CheckpointManager root={self._root!r} rank={self._group.rank} of {self._group.world}, {state}>"

    def _repr_html_(self) -> str:
        """Show it in a notebook: what is in flight, and what its root holds."""
        flying = [f"step {one.step}: {one.stage}" for one in self._handles if not one.done()]
        return root_html(self._root, {"in flight": ", ".join(flying), "state": "closed" if self._closed else "open"})

    # Published steps. --------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Published steps in ascending order, as this rank's file system shows them."""
        return [step for step, _ in published(self._storage, self._config.name_template)]

    def latest(self) -> int | None:
        """Return the newest published step, None if there is none; after going back, the newest of the current run.

        Reads every manifest; steps that were left behind count as older than those published after going back.
        """
        return self._keeper.latest()

    def pin(self, step: int) -> None:
        """Keep ``step`` regardless of retention, until `unpin`; durable. Every rank calls it.

        Raises `CheckpointNotFound`, `StorageError`, on every rank.
        """
        self._set_pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Let retention delete ``step`` again. Every rank calls it, and raises the same."""
        self._set_pin(step, pinned=False)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> None:
        """Let what is in flight end, then release everything; idempotent, and if interrupted goes on when called again.

        timeout: seconds, None for the sum of the configured deadlines. Raises `DeadlineExceeded`, and the failures
        that nobody has been told yet, as `on_error` says; the manager is closed all the same. A signal to save on that
        found no further `step` does now what it would have done.
        failed: training failed on this rank, and other ranks may wait in vain: close as if this process had died. What
        is in flight has a few seconds to end, the rest is settled by the next start; nothing is raised.
        """
        limit_s = checked_wait(timeout)
        try:
            if failed:
                self._close_failed("after a failure")
            else:
                self._close(limit_s)
        finally:
            if self._preemption is not None:
                self._preemption.leave()

    def _close(self, timeout: float | None, *, exiting: bool = False) -> None:
        if self._saver is not None:
            self._saver.entries.require("close", ())
        self._closed = True
        if not self._session.is_ours:
            return  # a forked child: its parent owns all of this
        if self._mirror is not None and timeout is not None:
            self._mirror.end_by(time.monotonic() + timeout)
        try:
            self._session.close(timeout, exiting=exiting, first=functools.partial(self._close_deliveries, timeout))
        finally:
            if self._preemption is not None:
                self._preemption.close()
        self._raise_failures()

    def _close_deliveries(self, timeout: float | None) -> None:
        if self._preemption is not None:
            self._preemption.retire()
        if self._deliverers.all and self._saver is not None:
            self._saver.wait_staged(timeout)
            self._deliverers.close(timeout)

    # Internal. ---------------------------------------------------------------------------------------------------

    def _prepare_root(self) -> None:
        """Make the root, lock it, begin its journal and recover what a crash left; on rank 0."""
        self._storage.make_root()
        made_at = "" if self._tenancy is None else self._tenancy.made_at
        self._lock = self._storage.lock(made_at=made_at)
        self._session.hold(self._lock.release)
        self._journal = Journal(self._storage, self._config, world=self._group.world)
        self._session.hold(self._journal.close)
        self.recovered, self._trash = settle_root(self._storage, timeout_s=self._config.persist_timeout)

    def _agree_on_root(self, patience_s: float) -> None:
        """Learn from rank 0 which steps the root names, and check that every rank sees the root that rank 0 does."""
        shared, rank = self._group.world > 1 and os.path.isabs(self._root), self._group.rank

        def tell() -> bytes:
            if os.path.isabs(self._root):
                remove_signs(self._storage)  # of a start that was killed
            sign = put_sign(self._storage) if shared else "-"
            steps = named_steps(self._storage, self._config.name_template)
            return " ".join([sign, *(str(step) for step, _ in steps)]).encode()

        sign, *steps = self._tell(tell).decode().split()
        self._taken = set(map(int, steps))
        if shared:
            try:
                with self._session.settling(timeout_s=patience_s):
                    check_sign(self._storage, sign, rank)
            finally:
                if rank == 0:
                    remove_signs(self._storage)

    def _give_up_start(self) -> None:
        self._closed = True
        if self._preemption is not None:
            self._preemption.close()
        self._session.close(None, first=self._deliverers.give_up_start)

    def _trees_for(self, *, model_only: bool) -> StateTree:
        if model_only and self._model_tree is None:
            self._model_tree = self._tree.modules_only()
        return self._model_tree if model_only and self._model_tree is not None else self._tree

    def _verdict_on(self, last: SaveHandle, files: _Files) -> _Claim:
        """Decide whether a final save of its step, with ``files``, keeps ``last``; the same on every rank.

        Waits for ``last``. "again": it is replaced. "new": it failed, and the step is saved like any other.
        """
        config = self._config
        unchanged = self._last_is_final or (not config.last_model_only and config.last_dtype is None)

        def decide() -> bytes:
            if last.exception() is not None or last.step is None:
                return b"new"
            same_files = files is None or read_extra_files(files) == self._last_files
            return b"stands" if (unchanged and same_files) or self._must_stay(last.step) else b"again"

        with contextlib.suppress(DeadlineExceeded):  # rank 0 reports it
            last.exception()
        answer = self._tell(decide)
        return "stands" if answer == b"stands" else "again" if answer == b"again" else "new"

    def _must_stay(self, step: int) -> bool:
        return self._config.last_model_only and not self._keeper.may_shed(step)

    def _tell(self, decide: Callable[[], bytes], votes: Votes | None = None) -> bytes:
        """Return rank 0's decision, or raise its error, on every rank."""
        return (votes or self._votes).decide(decide, timeout_s=self._longest_s())

    def _longest_s(self) -> float:
        """Return the longest time that another rank may wait for its saves in flight."""
        config = self._config
        return (config.stage_timeout + config.persist_timeout + 2 * config.commit_timeout) * (2 + len(self._handles))

    def _name_of(self, step: int) -> str:
        return self._config.name_template.format(step=step)

    def _path_of(self, step: int) -> str:
        return self._storage.path(self._name_of(step))

    def _check_open(self) -> None:
        if self._replaced_by:
            raise ConfigError(
                f"this CheckpointManager of {self._root} was replaced by the one made at {self._replaced_by}; "
                "use that one, or close this one before you make another"
            )
        if self._closed:
            raise ConfigError("this CheckpointManager is closed; make a new one")

    def _raise_failures(self, started: Sequence[SaveHandle] = ()) -> None:
        """Raise the first unreported failure, or warn about all; those just ``started`` are left to the next call."""
        failures: list[BaseException] = []
        kept: list[SaveHandle] = []
        for handle in self._handles:
            if not handle.done() or handle in started:
                kept.append(handle)
                continue
            error = handle.exception(0)
            if error is None and self._preemption is not None:
                self._preemption.note_saved(handle.stats)
            if error is not None and handle.stage != "skipped" and not handle.told:
                failures.append(error)
        self._handles = kept
        if self._saver is not None:
            failures += self._saver.callbacks.take_failures()
        for error in failures[0 if self._config.on_error == "warn" else 1 :]:
            _log.error("%s", error, exc_info=error)
            warnings.warn(str(error), stacklevel=3)
        if failures and self._config.on_error != "warn":
            raise failures[0]

    def _set_pin(self, step: int, *, pinned: bool) -> None:
        if self._config.load_only:
            raise ConfigError("this manager was made with load_only=True and never writes", field="load_only")
        checked_step(step)

        def act() -> bytes:
            self._keeper.set_pin(step, pinned=pinned)
            if self._mirror is not None:
                self._mirror.note_pin(step, pinned=pinned)
            return b""

        self._tell(act, self._pin_votes)


def _checked_config(config: Any) -> tuple[CheckpointConfig, BaseException | None]:
    """Return the configuration to begin with, and the error of the given one."""
    if config is None or isinstance(config, CheckpointConfig):
        return config or CheckpointConfig(), None
    message = f"config must be a CheckpointConfig, not {type(config).__name__}"
    return CheckpointConfig(), ConfigError(message, field="config")


def _finish_at_exit(manager: CheckpointManager, timeout_s: float) -> None:
    if not manager._closed:  # noqa: SLF001 - of this module
        manager._deliverers.wait(timeout_s)  # noqa: SLF001


def _close_at_exit(manager: CheckpointManager, timeout_s: float) -> None:
    if manager._journal is not None:  # noqa: SLF001 - of this module
        manager._journal.how = "exited"  # noqa: SLF001
    manager._close(timeout_s, exiting=True)  # noqa: SLF001 - of this module
