"""Saving: one readable pipeline, from the training thread to the published checkpoint.

    training thread     `Saver.start`: take a snapshot (references, eager values), enqueue copies, return a handle
                        `Saver.before_update`: hold the next update until copies are complete; compare versions
    stager thread       `stage`: agree with the other ranks, plan anew if they don't, copy
    finalizer thread    `delivery`: engine persists -> report -> decide -> publish; end the handle

Guarantees: nothing on the training thread waits for another rank except `before_update` (bounded by
`stage_timeout`); saves of one session are agreed on, persisted and published in the order they were started; a save
that fails on one rank fails on all, with the same cause; a save whose structure is that of the one before plans
nothing and renders nothing.
Assumes every rank of the group calls `start` in the same order.
Does not know cadence or retention: ``manager`` does.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast import events
from holdfast.arguments import checked_metrics
from holdfast.at_exit import close_at_exit
from holdfast.callbacks import Callbacks
from holdfast.capture import Capture, SaveRequest, Taker
from holdfast.delivery import Delivery, verify_staging
from holdfast.engine.client import EngineClient
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.handle import SaveHandle, Stage
from holdfast.limits import limits_of
from holdfast.outcome import AbortReason
from holdfast.reentry import Entries, entry
from holdfast.sharing import Shares
from holdfast.snapshot import SnapshotTaker
from holdfast.stage import Absence, Claim, Stager, WarmUp, skipped
from holdfast.staging.stager import Staging

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.checkpoint import Checkpoint
    from holdfast.config import CheckpointConfig
    from holdfast.group import Group
    from holdfast.state.entries import Collector
    from holdfast.storage.local import LocalStorage

_log = logging.getLogger("holdfast")

ORPHAN_GRACE_S: Final = 120.0
"""How long an engine may go on with what is staged and verified when its trainer has died; an export's too."""
REMOVAL_GRACE_S: Final = 30.0
"""How long `close` waits for deleted checkpoints to be gone from the disk."""
ENGINE_GRACE_S: Final = 10.0
"""How long `close` lets an engine finish what is staged and verified."""
THREAD_GRACE_S: Final = 5.0
"""How long `close` waits for its threads, which by then have nothing left to wait for."""
EXIT_GRACE_S: Final = 60.0
"""How long an interpreter that exits without `close` waits for what is in flight."""


class Saver:
    """One session of saving under one directory. All ranks of ``group`` make one, and use it alike.

    Starts the engine and two threads at once, all idle until the first save. Close it; an interpreter that exits
    without doing so lets what is in flight end, for at most a minute. In a forked child, which has none of the threads,
    it is closed from the start.
    """

    def __init__(
        self,
        storage: LocalStorage,
        group: Group,
        config: CheckpointConfig,
        *,
        on_published: Callable[[SaveRequest], None] | None = None,
    ) -> None:
        """``on_published`` is called in the background, before the handle tells that the save has ended."""
        self._storage = storage
        self._group = group
        self._config = config
        self._owner = os.getpid()
        self._engine = EngineClient(group.rank, **limits_of(config), orphan_grace_s=ORPHAN_GRACE_S)
        self._delivery = Delivery(storage, group, self._engine, config)
        self._on_published = on_published
        self.callbacks = Callbacks()
        self._stager = Stager(group, self._delivery, in_flight=config.in_flight, stage_timeout_s=config.stage_timeout)
        self.shares = Shares(group.ranks, self._stager.keep)
        self._snapshots = SnapshotTaker()
        self._in_flight: dict[SaveHandle, Capture | None] = {}
        self._unpassed: list[Capture] = []
        """Captures that wait for the training thread to say that the state held still; guarded by `_lock`."""
        self._lock = threading.RLock()  # a signal handler may come, and save, in the middle
        self.entries = Entries()
        self.taken: set[str] = set()
        """Names that are known to be taken: to save to one again is refused at once."""
        self._closed = self._warmed_up = False
        self._to_stage: queue.SimpleQueue[Capture | Absence | WarmUp | None] = queue.SimpleQueue()
        self._to_finalize: queue.SimpleQueue[Capture | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_stager, name="holdfast-stager", daemon=True),
            threading.Thread(target=self._run_finalizer, name="holdfast-finalizer", daemon=True),
        ]
        try:
            self._engine.start()
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._give_up_start()
            raise
        self._at_exit = close_at_exit(self, EXIT_GRACE_S)

    def _give_up_start(self) -> None:
        """What had been started when the system had no more to give ends again."""
        self._closed = True
        self._to_stage.put(None)  # for the first thread, if there is one, and through it for the second
        self._join()
        self._engine.close(ENGINE_GRACE_S)
        self._stager.close()
        self._delivery.close(0.0)

    # Training thread. --------------------------------------------------------------------------------------------

    @entry
    def start(
        self,
        tree: Collector,
        request: SaveRequest,
        *,
        dtype: str | None = None,
        complete: Callable[[SaveRequest], SaveRequest] | None = None,
        takers: tuple[Taker, ...] = (),
        only: Callable[[str], bool] | None = None,
    ) -> SaveHandle:
        """Capture the state and return a handle; copies run on, see the module's docstring.

        dtype: convert modules' floating-point tensors to it. complete: called on rank 0's stager thread, fills in what
        only that has to know; what it raises refuses the save on every rank. takers: other deliveries from the same
        capture; only: which tensors they need, by name, where ``request.checkpoint`` is False. Raises what makes this
        rank unable to take part (`ConfigError` for a leaf that can't be stored, `CheckpointExists` where this session
        has published): the other ranks get the same error from their handles.
        """
        began = time.perf_counter()
        self._warmed_up = True
        if self._closed or not self.is_ours:
            raise ConfigError("this session is closed; make a new CheckpointManager to save again")
        handle = SaveHandle(
            step=request.step,
            path=self._storage.path(request.name),
            default_timeout_s=self._longest_s(),
            wait_staged=self._wait_staged_of,
            callbacks=self.callbacks,
        )
        capture: Capture | None = None
        takers += self.shares.ticket(wanted=request.checkpoint)
        try:
            self.entries.require("save", ("start",))
            self._in_flight[handle] = None
            if request.checkpoint:
                events.emit("save.started", step=request.step, rank=self._group.rank, path=handle.path)
            if not self._take_slot(handle):
                self._to_stage.put(Absence(request, handle, None, takers))
                return handle
            try:
                request = replace(request, metrics=checked_metrics(request.metrics) if self._group.rank == 0 else {})
                if request.checkpoint and request.name in self.taken:  # else the stager thread: storage may hang
                    self._delivery.check_target(request)
                capture = self._capture(tree, request, handle, dtype, only)
                capture.complete = complete if self._group.rank == 0 and request.checkpoint else None
                capture.takers = takers
                self._in_flight[handle] = capture
                with self._lock:
                    self._unpassed.append(capture)
            except BaseException:
                self._forget(capture)
                self._stager.disown(capture)
                raise
        except BaseException as error:  # interrupts too: whoever closes the session waits for every handle
            self._to_stage.put(Absence(request, handle, AbortReason.of(error, rank=self._group.rank), takers))
            raise
        self._to_stage.put(capture)
        handle.add_stats(stall_s=time.perf_counter() - began)
        if request.eager:
            self._pass_or_give_up(capture)
        return handle

    def warm_up(self, tree: Collector) -> None:
        """Plan and prepare the first save in the background, once; every rank calls it at the same point.

        Worth it once the optimizer has state. Returns at once. Raises `ConfigError` for what can't be saved.
        """
        if not self._warmed_up:
            self._warmed_up = True
            try:
                warm_up = WarmUp(self._snapshots.take(tree, None, standing=True))
            except BaseException as error:
                self._to_stage.put(WarmUp(None, AbortReason.of(error, rank=self._group.rank)))
                raise
            self._to_stage.put(warm_up)

    def before_update(self, parameters: Callable[[frozenset[int]], bool] | None = None) -> None:
        """Return when the captured state may be changed; on the training thread, which then may change it.

        parameters: says whether an update touches any of these ids; None for "it may touch anything". A capture that
        is not complete within `stage_timeout` is failed, and the update goes on.
        """
        self.shares.before_update(parameters)
        if not self._unpassed or not self.is_ours:
            return
        for capture in list(self._unpassed):
            if parameters is None or parameters(capture.snapshot.update_ids):
                self._pass_or_give_up(capture)

    def before_load(self) -> None:
        """`before_update` for a load, which raises nothing that other ranks don't."""
        self.before_update()

    def wait_staged(self, timeout_s: float | None) -> None:
        """`before_update` for everything in flight, with a deadline of its own that is raised."""
        if not self.is_ours:
            return
        limit_s = self._config.stage_timeout if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        for capture in list(self._unpassed):
            self._pass(capture, max(0.0, deadline - time.monotonic()))

    def wait(self, timeout_s: float | None) -> None:
        """Return when nothing is in flight, callbacks included; `DeadlineExceeded` otherwise.

        Outcomes are in the handles, what callbacks raised in `callbacks`.
        """
        if not self.is_ours:
            return
        self.entries.require("wait", ())
        limit_s = self._longest_s() if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        for handle in list(self._in_flight):
            handle.exception(max(0.0, deadline - time.monotonic()))
        if not self.callbacks.wait_idle(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded(
                f"callbacks of saves have not returned after {limit_s:g} s; the saves themselves have ended",
                waited_for="callbacks of saves",
                timeout_s=limit_s,
            )

    def close(self, timeout_s: float | None, *, exiting: bool = False) -> None:
        """Let what is in flight end, then stop threads and engine; idempotent. Raises `DeadlineExceeded` after it.

        What has not ended after ``timeout_s`` is given up. exiting: this process is about to end, so an engine that is
        late is left to finish as if the process had died. Interrupted, it can be called again.
        """
        if self.has_ended or not self.is_ours:
            return
        self.entries.require("close", ())
        self._closed = True
        self._at_exit()  # once somebody has begun to wait, interpreter exit does not begin again
        self.shares.drop()
        self._to_stage.put(None)  # nothing follows: other ranks needn't wait until what is in flight has ended
        late: DeadlineExceeded | None = None
        try:
            self.wait(timeout_s)
        except DeadlineExceeded as error:
            late = error
        if late is not None and not exiting:
            self._engine.close(ENGINE_GRACE_S)  # first of all, so that attempts fail while other ranks can be told
        self._join()
        self._stager.close()
        self._delivery.close(0.0 if late is not None else REMOVAL_GRACE_S)
        if late is None or not exiting:
            self._engine.close(ENGINE_GRACE_S)
            self._join()
        if late is not None:
            raise late

    def _join(self) -> None:
        deadline = time.monotonic() + THREAD_GRACE_S
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def has_ended(self) -> bool:
        """Closed, and no thread is left that could still publish: the root may be somebody else's."""
        return self._closed and not any(thread.is_alive() for thread in self._threads)

    @property
    def is_ours(self) -> bool:
        """False in a forked child: the session is its parent's, and so is every lock that a thread of it may hold."""
        return os.getpid() == self._owner

    def remove(self, trash: str) -> None:
        """Have the engine remove a trashed directory of the root; doesn't wait."""
        self._delivery.remove(trash)

    def _longest_s(self) -> float:
        one_s = self._config.stage_timeout + self._config.persist_timeout + self._config.commit_timeout
        return one_s * (1 + len(self._in_flight)) + 30.0

    def _take_slot(self, handle: SaveHandle) -> bool:
        wait = self._config.when_busy == "wait"
        if self._stager.pool.take_slot(wait=False, timeout_s=0.0):
            return True
        if wait:
            began = time.perf_counter()
            for capture in list(self._unpassed):  # what is in flight may be waiting for this thread to pass it
                self._pass_or_give_up(capture)
            self._stager.pool.take_slot(wait=True, timeout_s=self._longest_s())
            handle.add_stats(stall_s=time.perf_counter() - began)
            return True
        return False

    def _capture(
        self,
        tree: Collector,
        request: SaveRequest,
        handle: SaveHandle,
        dtype: str | None,
        only: Callable[[str], bool] | None,
    ) -> Capture:
        with Claim(self._stager) as claim:
            snapshot = self._snapshots.take(tree, dtype, claim=claim, standing=request.eager)
            events.count("captures")
            staging = Staging(snapshot.watched, snapshot.devices, marks=snapshot.marks)
            capture = Capture(request, handle, self._group.rank, snapshot, staging, buffer=claim.buffer, only=only)
        self._stager.begin_copies(capture)
        return capture

    @entry
    def _pass(self, capture: Capture, timeout_s: float) -> None:
        """Let the calling thread change the state: wait for the copies, then look whether anything moved."""
        self.entries.require("waiting for copies", ("_pass",), ("start", "_pass"))
        began, deadline = time.perf_counter(), time.monotonic() + timeout_s
        try:
            capture.staging.help_copy(timeout_s)
            # Of copies from a device the current streams can wait in place of this thread.
            by_streams = capture.snapshot.from_device and not capture.request.eager
            reached = (capture.agreed if by_streams else capture.staged).wait(deadline - time.monotonic())
            if not reached and not capture.staged.is_set():
                raise DeadlineExceeded(
                    f"step {capture.request.step}: the capture was not staged after {timeout_s:g} s; another rank may "
                    "not have called this save, or copying is slow: see `stage_timeout`",
                    waited_for=f"staging of step {capture.request.step}",
                    timeout_s=timeout_s,
                )
            if by_streams:
                capture.staging.run_on_host(timeout_s=max(0.0, deadline - time.monotonic()))
                capture.staging.order_device_updates()
            capture.verify()
        finally:
            capture.handle.add_stats(stall_s=time.perf_counter() - began)
        self._forget(capture)

    def _pass_or_give_up(self, capture: Capture) -> None:
        try:
            self._pass(capture, self._config.stage_timeout)
        except DeadlineExceeded as error:
            capture.give_up(error)
            self._forget(capture)
        except BaseException as error:
            if capture.request.eager and not capture.staged.is_set():
                capture.give_up(error)  # the caller may change what is yet to be copied
            raise

    def _forget(self, capture: Capture | None) -> None:
        with self._lock:
            if capture in self._unpassed:
                self._unpassed.remove(capture)

    def _wait_staged_of(self, handle: SaveHandle, timeout: float | None) -> None:
        capture = self._in_flight.get(handle)
        if capture is not None and not capture.passed.is_set():
            self._pass(capture, self._config.stage_timeout if timeout is None else timeout)

    # Stager thread. ----------------------------------------------------------------------------------------------

    def _run_stager(self) -> None:
        while (item := self._to_stage.get()) is not None:
            if isinstance(item, Absence):
                error, stage = self._stager.vote_absent(item)
                self._finish(item.request, item.handle, error, stage)
                for taker in item.takers:
                    taker.refuse(error)
                self._in_flight.pop(item.handle, None)
                continue
            if isinstance(item, WarmUp):
                self._stager.prepare(item)
                continue
            try:
                go_on = self._stager.stage(item)
            except BaseException as error:  # noqa: BLE001 - told to the other ranks by the attempt it goes on to
                item.give_up(error)
                go_on = True
            if go_on:
                item.offer(partial(self._stager.let_go, item))
                self._to_finalize.put(item)
            else:
                item.refuse(item.error or skipped(item.request))
                self._end(item, None)
        self._stager.leave()
        self._to_finalize.put(None)

    # Finalizer thread. -------------------------------------------------------------------------------------------

    def _run_finalizer(self) -> None:
        while (capture := self._to_finalize.get()) is not None:
            try:
                outcome: Checkpoint | BaseException | None = None
                if capture.request.checkpoint:
                    outcome = self._delivery.deliver(capture)
                else:
                    verify_staging(capture)
            except BaseException as error:  # noqa: BLE001 - every failure ends in the handle
                outcome = error
            self._end(capture, outcome)

    def _end(self, capture: Capture, outcome: Checkpoint | BaseException | None) -> None:
        """Give everything back, then tell: whoever wakes up finds the session ready for the next save."""
        handle, request = capture.handle, capture.request
        capture.agreed.set()
        capture.staged.set()
        self._forget(capture)
        try:
            self._stager.let_go(capture)
            if self._on_published is not None and outcome is not None and not isinstance(outcome, BaseException):
                self._on_published(request)
        except Exception:  # noqa: BLE001 - the outcome is settled, whatever tidying up runs into
            _log.exception("after the save of step %s", request.step)
        if capture.skipped:
            self._finish(request, handle, skipped(request), "skipped")
        elif outcome is None or isinstance(outcome, BaseException):
            error = outcome or capture.error or AssertionError("a save without an outcome")
            self._finish(request, handle, error, "failed")
        else:
            self._finish(request, handle, outcome, "published")
        self._in_flight.pop(handle, None)

    def _finish(
        self, request: SaveRequest, handle: SaveHandle, outcome: Checkpoint | BaseException, stage: Stage
    ) -> None:
        """Every handle ends here, with the event that tells how; nobody has one of what was captured for others."""
        if request.checkpoint:
            more = {} if stage == "published" else {"error": repr(outcome)}
            events.emit(f"save.{stage}", step=handle.step, rank=self._group.rank, path=handle.path, **more)
        handle.finish(outcome, stage=stage)
