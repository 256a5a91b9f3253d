"""Saving: one pipeline from the training thread to the published checkpoint.

    training thread     `Saver.start`: take a snapshot (references, eager values) for deliveries, enqueue copies
                        `Saver.before_update`: hold the next update until copies are complete; compare versions
    stager thread       `Stager.stage`: agree with the other ranks, plan anew if they don't, copy; offer the capture
    a thread a kind     `Deliverer.deliver`: persist -> report -> decide -> publish; end the handle. Checkpoints of a
                        session whose saves don't overlap have none: they are published by the stager thread

A checkpoint is one delivery, made by `Saver.checkpoint`; others come from exports, publishers and users.

Guarantees: on the training thread only `before_update` waits for other ranks (at most `stage_timeout`); captures of one
session are agreed on and offered in the order they were started; a save that fails on one rank fails on all, with the
same cause; a save with the same structure as the previous one plans and renders nothing.
Assumes every rank of the group calls `start` in the same order.
Does not know cadence or retention: ``manager`` does.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.config import limits_of
from holdfast.coordination.failure import RankFailure
from holdfast.engine.at_exit import end_at_exit, finish_all
from holdfast.engine.client import EngineClient
from holdfast.engine.shared import process_engine
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.saver.capture import Capture, Delivery, SharedCaptures, needed_by
from holdfast.saver.checkpointer import CheckpointDelivery, Checkpointer, SaveRequest
from holdfast.saver.deliverer import DeliverySession
from holdfast.saver.delivery import (
    ENGINE_GRACE_S,
    ORPHAN_GRACE_S,
    THREAD_GRACE_S,
)
from holdfast.saver.handle import Callbacks, SaveHandle
from holdfast.saver.reentry import Entries, entry
from holdfast.saver.snapshot import SnapshotTaker
from holdfast.saver.stager import IDLE_GRACE_S, BufferReservation, MissedSave, Stager, WarmUp
from holdfast.saver.suspicion import StateWatch
from holdfast.staging.copy_job import Staging
from holdfast.staging.stream import StreamedStaging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.config import CheckpointConfig
    from holdfast.coordination.group import Group
    from holdfast.saver.capture import Needs
    from holdfast.saver.process_session import SharedPlans
    from holdfast.state.entries import Collector
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")


class Saver:
    """One session of saves into one directory. All ranks of ``group`` make one, and use it alike.

    Starts the engine and its threads at once, all idle until the first save. Close it; an interpreter that exits
    without doing so lets what is in flight end, for at most a minute. In a forked child, which has none of the threads,
    it is closed from the start.
    """

    def __init__(
        self,
        storage: Storage,
        group: Group,
        config: CheckpointConfig,
        *,
        overlaps: bool = True,
        shared: SharedPlans | None = None,
    ) -> None:
        """overlaps: a save may begin before the one before has ended; otherwise the stager thread publishes, too.

        shared: for a session of one call, where plans and images come from and go to.
        """
        self._storage = storage
        self._group = group
        self._config = config
        self._owner = os.getpid()
        self._engine = EngineClient(
            group.rank, **limits_of(config), orphan_grace_s=ORPHAN_GRACE_S, host=process_engine()
        )
        self._checkpointer = Checkpointer(storage, group, self._engine, config)
        self.callbacks = Callbacks()
        self._stager = Stager(
            group,
            self._checkpointer.forget,
            in_flight=config.in_flight,
            stage_timeout_s=config.stage_timeout,
            cores=self._engine.cores,
            shared=shared,
        )
        self.shares = SharedCaptures(group.ranks)
        self._snapshots = SnapshotTaker()
        forgets = config.on_suspicious == "raise"
        self._watch = None if config.on_suspicious == "ignore" else StateWatch(group.rank, group.world, forgets=forgets)
        self._in_flight: dict[threading.Event, Capture | None] = {}
        """Captures started and not ended, by `Capture.answered`; None until the capture exists."""
        self._unconfirmed: list[Capture] = []
        """Captures that wait for the training thread to confirm that the state is unchanged; guarded by `_lock`."""
        self._lock = threading.RLock()  # reentrant: a signal handler may save at any point
        self.entries = Entries()
        self._closed = self._warmed_up = False
        self._closing = 0
        """Number of threads in `close`."""
        self._to_stage: queue.SimpleQueue[Capture | MissedSave | WarmUp | None] = queue.SimpleQueue()
        self._overlaps = overlaps
        self._threads = [threading.Thread(target=self._run_stager, name="holdfast-stager", daemon=True)]
        if overlaps:
            self._threads.append(self._checkpointer.thread)
        try:
            self._engine.start()
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._give_up_start()
            raise
        self._stay_at_exit = end_at_exit(self, partial(Saver.close, exiting=True), Saver.finish)

    def _give_up_start(self) -> None:
        """Stop what was started, after a part of the start failed."""
        self._closed = True
        self._to_stage.put(None)  # for the first thread, if it started, which ends the second
        self._join()
        self._engine.close(ENGINE_GRACE_S)
        self._stager.close()
        self._checkpointer.release(late=True)

    # Training thread. --------------------------------------------------------------------------------------------

    def checkpoint(
        self,
        request: SaveRequest,
        *,
        complete: Callable[[SaveRequest], SaveRequest] | None = None,
        published: Callable[[SaveRequest], None] | None = None,
    ) -> CheckpointDelivery:
        """Return a checkpoint delivery, with its handle, to be passed to `start`.

        complete: called on rank 0's stager thread to fill in what only that thread knows; an exception refuses the save
        on every rank. published: called in the background, before the handle ends.
        """
        self._require_open()
        handle = SaveHandle(
            step=request.step,
            path=self._storage.path(request.name),
            default_timeout_s=self._longest_s(),
            wait_staged=self._wait_staged_of,
            callbacks=self.callbacks,
        )
        delivery = CheckpointDelivery(self._checkpointer, request, handle, complete=complete, published=published)
        return self._checkpointer.add(delivery)

    def leave_to_next(self) -> None:
        """Leave plan and image to the next call if a save was published; for sessions of one call."""
        self._stager.leave_to_next()

    def session(self, number: int = 0) -> DeliverySession:
        """Return the session for the deliverer with that ``number``."""
        return DeliverySession(self._group, self._config, self.callbacks, self.wait_staged, number)

    @entry
    def start(
        self,
        tree: Collector,
        deliveries: Sequence[Delivery],
        *,
        step: int | None,
        eager: bool = False,
        streams: bool = False,
        dtype: str | None = None,
    ) -> None:
        """Capture the state for ``deliveries``; copying continues in the background, see the module's docstring.

        eager: return only when everything is copied. streams: as well, the caller waits until everything is written, so
        no image is needed (`_can_stream`). dtype: convert modules' floating-point tensors to it. Raises if this rank
        can't take part (`ConfigError` for a leaf that can't be stored); other ranks' deliveries are then refused with
        the same error.
        """
        began = time.perf_counter()
        self._require_open()
        self._warmed_up = True
        capture: Capture | None = None
        answered, asked = threading.Event(), tuple(deliveries)
        self.shares.drop()
        try:
            self.entries.require("save", ("start",))
            self._in_flight[answered] = None
            needs = needed_by(asked)
            if needs is None:
                asked += self.shares.take()
            if not self._take_slot(asked):
                self._to_stage.put(MissedSave(step, asked, None, answered))
                return
            try:
                for delivery in asked:
                    delivery.begin()
                streams = streams and eager and dtype is None and self._can_stream(asked)
                capture = self._capture(tree, step, asked, needs, answered, dtype, eager=eager, streams=streams)
                self._in_flight[answered] = capture
                with self._lock:
                    self._unconfirmed.append(capture)
            except BaseException:
                self._forget(capture)
                self._stager.disown(capture)
                raise
        except BaseException as error:  # interrupts too: closing the session waits for every delivery
            self._to_stage.put(MissedSave(step, asked, RankFailure.of(error, rank=self._group.rank), answered))
            raise
        try:
            self._to_stage.put(capture)
            capture.stalled(time.perf_counter() - began)
            if eager:
                self._confirm_or_give_up(capture)
        except BaseException as error:
            if capture.stream is not None:
                capture.give_up(error)  # no effect if already verified; then nothing is read any more
            raise
        finally:
            if capture.stream is not None:
                capture.stream.wait_idle(IDLE_GRACE_S)

    def _can_stream(self, deliveries: Sequence[Delivery]) -> bool:
        """Return True if ``deliveries`` need no image: there is only a checkpoint, which the engine writes.

        A state with tensors on a device isn't streamed either; `_capture` checks that.
        """
        return len(deliveries) == 1 and isinstance(deliveries[0], CheckpointDelivery)

    def warm_up(self, tree: Collector) -> None:
        """Plan and prepare the first save in the background, once; every rank calls it at the same point.

        Useful once the optimizer has state. Returns at once. Raises `ConfigError` for what can't be saved.
        """
        if not self._warmed_up:
            self._warmed_up = True
            try:
                warm_up = WarmUp(self._snapshots.take(tree, None, standing=True))
            except BaseException as error:
                self._to_stage.put(WarmUp(None, RankFailure.of(error, rank=self._group.rank)))
                raise
            self._to_stage.put(warm_up)

    def before_update(self, parameters: Callable[[frozenset[int]], bool] | None = None) -> None:
        """Return when the captured state may change; call it on the training thread before an update.

        parameters: returns whether the update touches any of these ids; None for "it may touch anything". A capture
        that is not complete within `stage_timeout` fails, and the update may proceed.
        """
        self.shares.before_update(parameters)
        if not self._unconfirmed or not self.is_ours:
            return
        for capture in list(self._unconfirmed):
            if parameters is None or parameters(capture.snapshot.update_ids):
                self._confirm_or_give_up(capture)

    def note_step(self, optimizer: Any) -> None:
        """Note, on the training thread, that ``optimizer`` is about to step."""
        if self._watch is not None:
            self._watch.note_step(optimizer)

    def before_load(self) -> None:
        """`before_update` for a load; raises nothing that other ranks don't raise."""
        self.before_update()

    def wait_staged(self, timeout_s: float | None) -> None:
        """`before_update` for all captures in flight; raises `DeadlineExceeded` after ``timeout_s``."""
        if not self.is_ours:
            return
        limit_s = self._config.stage_timeout if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        for capture in list(self._unconfirmed):
            self._confirm_unchanged(capture, max(0.0, deadline - time.monotonic()))

    def wait(self, timeout_s: float | None) -> None:
        """Wait until nothing is in flight, callbacks included; raises `DeadlineExceeded`.

        Outcomes are in the handles, exceptions of callbacks in `callbacks`.
        """
        if not self.is_ours:
            return
        self.entries.require("wait", ())
        limit_s = self._longest_s() if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        self._checkpointer.wait(deadline)
        for answered in list(self._in_flight):
            if not answered.wait(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceeded(
                    f"a capture was not staged after {limit_s:g} s; another rank may not have called this save",
                    waited_for="a capture",
                    timeout_s=limit_s,
                )
        if not self.callbacks.wait_idle(max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded(
                f"callbacks of saves have not returned after {limit_s:g} s; the saves themselves have ended",
                waited_for="callbacks of saves",
                timeout_s=limit_s,
            )

    def finish(self, timeout_s: float) -> None:
        """`wait`, called at interpreter exit; skipped if `close` was interrupted before."""
        if not self._closed or self._closing:
            self.wait(timeout_s)

    def close(self, timeout_s: float | None, *, exiting: bool = False) -> None:
        """Finish saves in flight, then stop threads and engine; idempotent. Raises `DeadlineExceeded` afterwards.

        Saves that have not ended after ``timeout_s`` are given up. exiting: this process is about to end: a late engine
        may finish, as if the process had died. Can be called again after an interrupt.
        """
        if self.has_ended or not self.is_ours:
            return
        self.entries.require("close", ())
        interrupted = self._closed and not self._closing and exiting
        self._closed = True
        self._closing += 1
        try:
            late = self._close(0.0 if interrupted else timeout_s, exiting=exiting)
        finally:
            self._closing -= 1
        self._stay_at_exit()  # not earlier: an exit has to wait for a close on another thread
        if late is not None and not interrupted:
            raise late

    def _close(self, timeout_s: float | None, *, exiting: bool) -> DeadlineExceeded | None:
        self.shares.drop()
        self._to_stage.put(None)  # no more saves: other ranks needn't wait until those in flight end
        late: DeadlineExceeded | None = None
        try:
            self.wait(timeout_s)
        except DeadlineExceeded as error:
            late = error
        gone = True
        if late is not None:  # first, so that attempts fail while other ranks can be told
            gone = self._engine.leave() if exiting else self._engine.close(ENGINE_GRACE_S)
        if gone:  # otherwise threads wait for the engine as long as it takes
            self._join()
        self._stager.close()
        self._checkpointer.release(late=late is not None)
        if gone:
            self._engine.close(ENGINE_GRACE_S)
            self._join()
        return late

    def _join(self) -> None:
        deadline = time.monotonic() + THREAD_GRACE_S
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def has_ended(self) -> bool:
        """Closed, and no thread is left that could still publish: the root may be unlocked."""
        return self._closed and not any(thread.is_alive() for thread in self._threads)

    @property
    def is_ours(self) -> bool:
        """False in a forked child, whose parent owns the session and every lock that its threads may hold."""
        return os.getpid() == self._owner

    def remove(self, trash: str) -> None:
        """Have the engine remove a trashed directory of the root; doesn't wait."""
        self._checkpointer.remove(trash)

    def _longest_s(self) -> float:
        one_s = self._config.stage_timeout + self._config.persist_timeout + self._config.commit_timeout
        return one_s * (1 + len(self._in_flight)) + 30.0

    def _require_open(self) -> None:
        if self._closed or not self.is_ours:
            raise ConfigError("this session is closed; make a new CheckpointManager to save again")

    def _take_slot(self, deliveries: Sequence[Delivery]) -> bool:
        wait = self._config.when_busy == "wait"
        if self._stager.pool.take_slot(wait=False, timeout_s=0.0):
            return True
        if wait:
            began = time.perf_counter()
            for capture in list(self._unconfirmed):  # captures in flight may be waiting for this thread's confirmation
                self._confirm_or_give_up(capture)
            self._stager.pool.take_slot(wait=True, timeout_s=self._longest_s())
            for delivery in deliveries:
                delivery.stalled(time.perf_counter() - began)
            return True
        return False

    def _capture(
        self,
        tree: Collector,
        step: int | None,
        deliveries: tuple[Delivery, ...],
        needs: Needs,
        answered: threading.Event,
        dtype: str | None,
        *,
        eager: bool,
        streams: bool,
    ) -> Capture:
        with BufferReservation(self._stager) as claim:
            if streams:
                snapshot = self._snapshots.take_live(tree)
            else:
                snapshot = self._snapshots.take(tree, dtype, claim=claim, standing=eager)
            stream: StreamedStaging | None = None
            if streams and not snapshot.from_device:
                stream = StreamedStaging(snapshot.watched, snapshot.marks)
            events.count("captures")
            capture = Capture(
                step,
                self._group.rank,
                snapshot,
                stream or Staging(snapshot.watched, snapshot.devices, marks=snapshot.marks),
                deliveries,
                needs,
                eager=eager,
                on_end=self._end,
                take_back=self._stager.pool.take_back,
                answered=answered,
                stream=stream,
                buffer=claim.buffer,
                look=None if self._watch is None or needs is not None else self._watch.look(snapshot, step),
            )
        self._stager.begin_copies(capture)
        return capture

    @entry
    def _confirm_unchanged(self, capture: Capture, timeout_s: float) -> None:
        """Wait for the copies and check that nothing changed; then the calling thread may change the state."""
        self.entries.require("waiting for copies", ("_confirm_unchanged",), ("start", "_confirm_unchanged"))
        began, deadline = time.perf_counter(), time.monotonic() + timeout_s
        try:
            capture.staging.help_copy(timeout_s)
            # For copies from a device, the current streams can wait instead of this thread.
            by_streams = capture.snapshot.from_device and not capture.eager
            reached = (capture.agreed if by_streams else capture.staged).wait(deadline - time.monotonic())
            if not reached and not capture.staged.is_set():
                slow = "copying is slow: see `stage_timeout`"
                if capture.stream is not None:
                    slow = "the storage is slow or hangs, which a blocking save waits for; allow more time"
                raise DeadlineExceeded(
                    f"step {capture.step}: the capture was not staged after {timeout_s:g} s; another rank may "
                    f"not have called this save, or {slow}",
                    waited_for=f"staging of step {capture.step}",
                    timeout_s=timeout_s,
                )
            if by_streams:
                capture.staging.run_on_host(timeout_s=max(0.0, deadline - time.monotonic()))
                capture.staging.order_device_updates()
            capture.verify()
        finally:
            capture.stalled(time.perf_counter() - began)
        self._forget(capture)

    def _confirm_or_give_up(self, capture: Capture) -> None:
        try:
            self._confirm_unchanged(capture, self._config.stage_timeout)
        except DeadlineExceeded as error:
            capture.give_up(error)
            self._forget(capture)
        except BaseException as error:
            if capture.eager and not capture.staged.is_set():
                capture.give_up(error)  # the caller may change what is not copied yet
            raise

    def _forget(self, capture: Capture | None) -> None:
        with self._lock:
            if capture in self._unconfirmed:
                self._unconfirmed.remove(capture)

    def _wait_staged_of(self, handle: SaveHandle, timeout: float | None) -> None:
        for capture in list(self._in_flight.values()):
            if capture is None or capture.confirmed.is_set():
                continue
            if any(isinstance(made, CheckpointDelivery) and made.handle is handle for made in capture.deliveries):
                self._confirm_unchanged(capture, self._config.stage_timeout if timeout is None else timeout)

    # Stager thread. ----------------------------------------------------------------------------------------------

    def _run_stager(self) -> None:
        while (item := self._to_stage.get()) is not None:
            if isinstance(item, WarmUp):
                self._stager.prepare(item)
            elif isinstance(item, MissedSave):
                self._stager.miss(item)
                self._in_flight.pop(item.answered, None)
            else:
                self._stage(item)
                if not self._overlaps:
                    self._checkpointer.work_off()
        self._stager.leave()
        self._checkpointer.end()

    def _stage(self, capture: Capture) -> None:
        try:
            go_on = self._stager.stage(capture)
        except BaseException as error:  # noqa: BLE001 - the attempts that follow tell the other ranks
            capture.give_up(error)
            go_on = True
        if go_on:
            capture.offer()
        else:
            capture.refuse()

    def _end(self, capture: Capture) -> None:
        """Release everything; called on the thread of the last delivery."""
        self._forget(capture)
        capture.staged.set()  # wakes waiters of a streamed capture that failed before it was staged
        try:
            self._stager.end(capture)
        except Exception:  # noqa: BLE001 - deliveries stand, even if cleaning up fails
            _log.exception("after the capture of step %s", capture.step)
        self._in_flight.pop(capture.answered, None)


compat.before_threads_end(finish_all)
