"""`CheckpointManager`: when to save, what to keep, where to resume. What users hold in their training loop.

Guarantees: `step` never blocks longer than its configuration says; a failed save is never silent (`on_error`); the
newest checkpoint a run could resume from is never deleted; two managers never write to one root.
Assumes every rank of the group makes one and calls it alike; wall-clock decisions and metrics are rank 0's.
Does not copy, write, load or decide: ``saver``, ``resuming``, ``retention``, ``preemption`` and ``recovery`` do.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.agreement import Votes
from holdfast.arguments import checked_path, checked_step, checked_wait
from holdfast.capture import SaveRequest
from holdfast.config import CheckpointConfig
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError
from holdfast.group import open_group
from holdfast.keeping import Keeper
from holdfast.optimizer_hook import UpdateGuard, guard_updates, unguard_updates
from holdfast.preemption import Preemption
from holdfast.resuming import Resumer
from holdfast.root import published
from holdfast.saver import ORPHAN_GRACE_S, Saver
from holdfast.starting import settle_root
from holdfast.state.tree import StateTree
from holdfast.storage.local import LocalStorage, create_root
from holdfast.storage.lock import RootLock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.export.session import Exporter, Ticket
    from holdfast.exporting import Exports
    from holdfast.handle import SaveHandle
    from holdfast.sharing import Shares

_log = logging.getLogger("holdfast")


class CheckpointManager:
    """Saves ``state`` under ``root`` as training goes on, and resumes from there.

    root: a directory that every rank sees; made if it doesn't exist.
    state: as for `holdfast.save`; the random number generators are added under ``"rng"`` unless it has that key.
    config: see `CheckpointConfig`. exports: `HFExport`, each with a root of its own; `step` makes what is due.
    process_group: the ranks that save together; None for all.

    On construction rank 0 locks the root and settles what a crash has left (unless ``load_only``); all ranks wait for
    that. Raises `ConfigError`, `RootLocked`, `StorageError`, on every rank. Call its methods from the training thread.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        config: CheckpointConfig | None = None,
        exports: Sequence[Any] = (),
        process_group: Any | None = None,
    ) -> None:
        # First of all: ranks number their sessions, also one whose arguments are refused.
        self._group = open_group(process_group, purpose="manager", timeout=getattr(config, "stage_timeout", None))
        self._config = config = config if config is not None else CheckpointConfig()
        if not isinstance(config, CheckpointConfig):
            raise ConfigError(f"config must be a CheckpointConfig, not {type(config).__name__}", field="config")
        self._votes = Votes(self._group.board)
        self._root = ""
        self._model_tree: StateTree | None = None
        self._lock: RootLock | None = None
        self._saver: Saver | None = None
        self._exports: Exports | None = None
        self._preemption: Preemption | None = None
        self._handles: list[SaveHandle] = []
        self._last: SaveHandle | None = None
        self._last_is_final = self._seen_first = self._closed = False
        self._trash: list[str] = []  # what recovery wants removed, until there is an engine to do it
        self.recovered: Any = None
        """What recovery did at this start (rank 0 only)."""
        error: BaseException | None = None
        try:
            self._root = checked_path(root, field="root")
            group = self._group
            self._tree = StateTree(state, rank=group.rank, world=group.world, group_ranks=group.ranks, auto_rng=True)
            if config.load_model_only or config.initial_load_path is not None:
                self._tree.modules_only()
            self._storage = LocalStorage(self._root)
            held = config.load_step if (config.load_step or 0) >= 0 else None
            self._keeper = Keeper(self._storage, config.name_template, config.keep, held=held)
            self._resumer = Resumer(self._tree, self._storage, self._keeper, config, self._resumed_from)
            if self._group.rank == 0 and not config.load_only:
                self._prepare_root()
            if not config.load_only:  # before the ranks settle: one that can't have a saver is one that can't take part
                self._saver = Saver(self._storage, self._group, config, on_published=self._after_publish)
                if self._group.rank == 0:
                    self._saver.taken = {name for _, name in published(self._storage, config.name_template)}
                if exports:
                    from holdfast.exporting import Exports  # the heavier half, for those who export

                    self._exports = Exports(exports, state, self._root, self._group, config, self._saver)
                if config.save_on_signal:
                    self._preemption = Preemption(self._group.board, config.save_on_signal, config.signal_timeout)
        except Exception as failed:  # noqa: BLE001 - raised by `settle`, after the other ranks have been told
            error = failed
        except BaseException:
            self._give_up_start()  # an interrupted cell of a notebook must not keep the root locked
            raise
        try:
            self._votes.settle(error, target=self._root, timeout_s=config.stage_timeout + config.persist_timeout)
            if self._saver is not None:
                failures = self._raise_failures if config.on_error == "raise_now" else None
                self._guard = UpdateGuard(self._saver.before_update, failures)
                guard_updates(self._guard)
                for name in self._trash:
                    self._saver.remove(name)
            if self._exports is not None:
                self._exports.start()
            if self._preemption is not None:
                self._preemption.start()
        except BaseException:
            self._give_up_start()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(ORPHAN_GRACE_S)  # other ranks may have failed as well: as if this process had died
        except HoldfastError as failed:
            _log.warning("while closing after %r: %s", error, failed)  # the error that ended training is the one to see

    # Resuming. ---------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None) -> int | None:
        """Load the newest verified checkpoint in place, or exactly ``step``; returns its step, None if there is none.

        Returns when every rank has loaded. Step 0 and checkpoints that hold only a model load only the modules. With
        an empty root and `initial_load_path`, that is loaded (modules only) and None returned.

        Raises `CheckpointNotFound` for a step that is absent, `CheckpointCorrupt` (all candidates, or the first with
        ``on_corrupt="raise"``), `StateMismatch`, `StorageError`.
        """
        self._check_open()
        return self._resumer.restore(step, self._group, self._votes)

    def _resumed_from(self, step: int | None, name: str | None) -> None:
        self._keeper.resumed_from(step)
        if self._saver is not None:
            self._saver.taken = set() if name is None else {name}
        if self._exports is not None:
            self._exports.resumed_from(step)

    # Saving. -----------------------------------------------------------------------------------------------------

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> list[SaveHandle]:
        """Start whatever is due after training step ``step``; returns the handles of what was started.

        Returns once references and eager values are taken (``mode="async"``), or when published (``"sync"``).
        metrics: numbers to store with the checkpoint, rank 0's count. Raises an earlier failure as `on_error` says,
        once what is due has been started: ranks learn of a failure at different moments, and must stay in step.
        At the step agreed on for a signal (`save_on_signal`) it saves, waits, and ends the program as the signal does.
        """
        self._check_open()
        checked_step(step)
        due = self._config.every is not None and step % self._config.every == 0 and step > 0
        due = due or (self._config.first_step and not self._seen_first)
        self._seen_first = True
        if self._config.load_only or self._saver is None:
            return []
        if self._preemption is not None and self._preemption.is_due():
            handles = [self._preemption.save(step, lambda: self._start_for_signal(step, metrics))]
            self._raise_failures()
            return handles
        exporters = [] if self._exports is None else self._exports.due(step)
        if due or exporters:
            return self._save_due(step, metrics, exporters, checkpoint=due)
        self._saver.warm_up(self._tree)
        self._raise_failures()
        return []

    def _save_due(
        self, step: int, metrics: Mapping[str, float] | None, exporters: list[Exporter], *, checkpoint: bool
    ) -> list[SaveHandle]:
        """One capture for all of it; the checkpoint's handle comes first."""
        takers = tuple(exporter.ticket(step) for exporter in exporters)
        exported = [ticket.handle for ticket in takers]
        handles = [self._start(step, metrics, final=False, takers=takers)] if checkpoint else []
        if not checkpoint and self._exports is not None:
            self._exports.capture(self._tree, step, exporters, takers)
        self._handles += exported
        handles += exported
        for handle in handles if self._config.mode == "sync" else ():
            handle.exception()
        self._raise_failures(() if self._config.mode == "sync" else handles)
        return handles

    def save(self, step: int, *, metrics: Mapping[str, float] | None = None, final: bool = False) -> SaveHandle:
        """Save now, whatever the cadence.

        Returns as `step` does; with ``final`` the last-save options apply and it returns when published. Saving a
        step that this manager has saved already is `CheckpointExists`, but for ``final`` directly after it: that
        returns the save before where the last-save options change nothing, else replaces it. A model-only save
        replaces it only if it isn't pinned and an older step is left to resume from; else it stays, as the log says.
        Where this raises an earlier failure, this save goes on all the same.
        """
        self._check_open()
        checked_step(step)
        handle = self._start(step, metrics, final=final)
        if waits := final or self._config.mode == "sync":
            handle.exception()
        self._raise_failures(() if waits else (handle,))
        return handle

    def _start(
        self, step: int, metrics: Mapping[str, float] | None, *, final: bool, takers: tuple[Ticket, ...] = ()
    ) -> SaveHandle:
        saver = self._saver
        if saver is None:
            raise ConfigError("this manager was made with load_only=True and never saves", field="load_only")
        last = self._last
        model_only = final and self._config.last_model_only
        again = final and last is not None and last.step == step
        if again and last is not None and self._stands(last, model_only=model_only):
            return last
        request = SaveRequest(
            step=step,
            name=self._config.name_template.format(step=step),
            metrics=metrics or {},
            resumable=not model_only,
            overwrite=again,
            eager=self._config.staging == "eager",
        )
        in_flight = {handle.step for handle in self._handles if handle.step is not None and not handle.done()}

        def complete(request: SaveRequest) -> SaveRequest:
            if self._lock is not None:
                self._lock.renew()
            extra, replaces = self._keeper.place(step, request.name, in_flight)
            return replace(request, extra=extra, overwrite=request.overwrite or replaces)

        handle = saver.start(
            self._trees_for(model_only=model_only),
            request,
            dtype=str(self._config.last_dtype) if final and self._config.last_dtype is not None else None,
            complete=complete,
            takers=takers,
        )
        self._handles.append(handle)
        self._last, self._last_is_final = handle, final
        return handle

    def _start_for_signal(self, step: int, metrics: Mapping[str, float] | None) -> SaveHandle:
        """A save of the whole state, whatever the last-save options: to be resumed from. It is never skipped."""
        if (last := self._last) and last.step == step and (last.exception() is None or last.stage != "skipped"):
            return last
        for handle in self._handles if self._config.when_busy == "skip" else ():
            handle.exception()
        return self._start(step, metrics, final=False)

    def before_update(self) -> None:
        """Call before changing captured state by hand; then it may be changed.

        On the CPU the calling thread waits until copies are complete (at most `stage_timeout`), on CUDA the current
        stream does. The optimizer hook calls it for every optimizer step.
        """
        if self._saver is not None:
            self._guard.before_update()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when captured state may be changed. timeout: seconds, None for `stage_timeout`; `DeadlineExceeded`."""
        if self._saver is not None:
            self._saver.wait_staged(checked_wait(timeout))

    def wait(self, timeout: float | None = None) -> None:
        """Return when every save started so far has ended; raises the first failure as `on_error` says.

        timeout: seconds, None for the sum of the configured deadlines; `DeadlineExceeded`.
        """
        limit_s = checked_wait(timeout)
        if self._saver is not None:
            self._saver.wait(limit_s)
        if self._exports is not None:
            self._exports.wait(limit_s)
        self._raise_failures()

    @property
    def captures(self) -> Shares | None:
        """The capture of the last save, for a `Publisher` that shares it; None with ``load_only``."""
        return None if self._saver is None else self._saver.shares

    # What is there. ----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Published steps in ascending order, as this rank's file system shows them."""
        return [step for step, _ in published(self._storage, self._config.name_template)]

    def latest(self) -> int | None:
        """The newest published step, None if there is none: that of the last run, where one went back to an older step.

        Reads every manifest; what was left behind counts as older than what was published after going back.
        """
        return self._keeper.latest()

    def pin(self, step: int) -> None:
        """Keep ``step`` whatever retention says, until `unpin`; durable. Raises `CheckpointNotFound`."""
        self._set_pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Leave ``step`` to retention again."""
        self._set_pin(step, pinned=False)

    def close(self, timeout: float | None = None) -> None:
        """Let what is in flight end, then release everything; idempotent, and if interrupted goes on when called again.

        timeout: seconds, None for the sum of the configured deadlines. Raises `DeadlineExceeded`, and the failures
        that nobody has been told yet, as `on_error` says; the manager is closed all the same. A signal to save on that
        found no further `step` does now what it would have done.
        """
        limit_s = checked_wait(timeout)
        try:
            self._close(limit_s)
        finally:
            if self._preemption is not None:
                self._preemption.leave()

    def _close(self, timeout: float | None) -> None:
        if self._saver is not None:
            self._saver.entries.require("close", ())
        self._closed = True
        if self._saver is not None and not self._saver.is_ours:
            return  # a forked child: all of this is its parent's
        try:
            if self._preemption is not None:
                self._preemption.retire()
            if self._saver is not None:
                unguard_updates(self._guard)
                try:
                    if self._exports is not None:
                        self._saver.wait_staged(timeout)
                        self._exports.close(timeout)
                finally:
                    self._saver.close(timeout)
        finally:
            if self._preemption is not None:
                self._preemption.close()
            self._let_go()
        self._raise_failures()

    # Inside. -----------------------------------------------------------------------------------------------------

    def _prepare_root(self) -> None:
        """Rank 0: make the root, lock it and settle what a crash has left."""
        create_root(self._root)
        self._lock = RootLock.acquire(self._root)
        self.recovered, self._trash = settle_root(self._storage, timeout_s=self._config.persist_timeout)

    def _give_up_start(self) -> None:
        if self._preemption is not None:
            self._preemption.close()
        if self._exports is not None:
            self._exports.give_up_start()
        if self._saver is not None:
            self._saver.close(None)
        self._let_go()

    def _let_go(self) -> None:
        if self._saver is not None and not self._saver.has_ended:
            return  # some thread may still publish, so nobody else may write here
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
        self._votes.leave()
        self._group.board.close()

    def _trees_for(self, *, model_only: bool) -> StateTree:
        if model_only and self._model_tree is None:
            self._model_tree = self._tree.modules_only()
        return self._model_tree if model_only and self._model_tree is not None else self._tree

    def _stands(self, last: SaveHandle, *, model_only: bool) -> bool:
        """Whether ``last`` is to stay what is saved of its step, given the last-save options; the same on every rank.

        Where the options change nothing it has to be there; waits for it.
        """
        if self._last_is_final or (not model_only and self._config.last_dtype is None):
            return last.exception() is None
        answer, error = b"", None
        try:
            failed = last.exception() is not None
            if self._group.rank == 0 and last.step is not None:
                stands = not failed and model_only and not self._keeper.may_shed(last.step)
                answer = b"stands" if stands else b"again"
        except (HoldfastError, OSError) as late:
            error = late if self._group.rank == 0 else None
        config = self._config
        timeout_s = config.stage_timeout + config.persist_timeout + config.commit_timeout
        return self._votes.share(answer, error, timeout_s=timeout_s) == b"stands"

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this CheckpointManager is closed; make a new one")

    def _raise_failures(self, started: Sequence[SaveHandle] = ()) -> None:
        """Raise the first failure nobody was told of, or warn of all; those just ``started`` are for the next call."""
        failures: list[BaseException] = []
        kept: list[SaveHandle] = []
        for handle in self._handles:
            if not handle.done() or handle in started:
                kept.append(handle)
                continue
            error = handle.exception(0)
            if error is not None and handle.stage != "skipped":
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
        if self._group.rank == 0:
            self._keeper.set_pin(step, pinned=pinned)
        elif pinned and step not in self.steps():
            raise CheckpointNotFound(f"step {step} is not published under {self._root}", path=self._root, step=step)

    def _after_publish(self, request: SaveRequest) -> None:
        """On the finalizer thread, before the handle ends: who waits for it finds retention applied."""
        if self._group.rank == 0 and self._saver is not None:
            if self._keeper.note_published(request.step, request.name, request.extra, resumable=request.resumable):
                self._saver.taken.add(request.name)
            self._keeper.apply_retention(request.step, self._saver.remove)
