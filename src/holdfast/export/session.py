"""Exports of one kind, one after the other: from captures of the manager's session to published directories.

    training thread   `Exporter.ticket`: what is due gets its place in the order of exports, and its handle
    saver's threads   `Ticket.offer`: the capture is staged
    export thread     plan once -> begin -> fill the image, exchange -> let go of the capture -> engine persists ->
                      report -> settle -> retention, ``hf-latest`` -> the handle ends

Guarantees: an export becomes visible by the same commit as a checkpoint, whole, as soon as the last rank's bytes are
durable; nothing of it waits for the training thread or for the next step. What fails ends in its own handle, alike on
all ranks, and disturbs neither the checkpoint from the same capture nor any export before it. A rank's own share of the
export is kept in memory, and no more than ``export.plan.BUFFER_BYTES_MAX`` beside it.
Assumes: every rank makes its exporters, takes its tickets and closes them in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.delivery import Carrier, deadlines_of, plan_attempt
from holdfast.engine.client import EngineClient
from holdfast.engine.messages import FileRow
from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.export.latest_link import LatestLink
from holdfast.export.making import make_image
from holdfast.export.material import CapturedState, LastStock
from holdfast.format.manifest import RankIndex, encode_index
from holdfast.format.parts import FilePart
from holdfast.handle import SaveHandle
from holdfast.keeping import Keeper
from holdfast.limits import limits_of
from holdfast.opening import PublishedExport
from holdfast.outcome import Aborted, AbortReason
from holdfast.saver import ENGINE_GRACE_S, ORPHAN_GRACE_S, REMOVAL_GRACE_S, THREAD_GRACE_S
from holdfast.staging.image import PAGE_BYTES, Image
from holdfast.starting import settle_root
from holdfast.storage.local import LocalStorage, create_root
from holdfast.storage.lock import RootLock
from holdfast.world_plan import Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from holdfast.callbacks import Callbacks
    from holdfast.capture import Capture
    from holdfast.commit import Attempt
    from holdfast.config import CheckpointConfig
    from holdfast.export.exchange import Exchange
    from holdfast.export.hf_export import HFExport
    from holdfast.export.material import Material, Stock
    from holdfast.export.rank_plan import RankPlan
    from holdfast.export.recipe import Made, Recipe
    from holdfast.format.manifest import ManifestReport
    from holdfast.group import Group

_log = logging.getLogger("holdfast")


class Ticket:
    """One export that is due: its place in the order, and a `Taker` of the capture that it is made from."""

    def __init__(
        self, number: int, step: int | None, name: str, handle: SaveHandle, stock: LastStock, *, overwrite: bool
    ) -> None:
        """number: of this export among those of its exporter, the same on every rank."""
        self.number, self.step, self.name, self.handle, self.overwrite = number, step, name, handle, overwrite
        self._stock = stock
        self.extra: Mapping[str, Any] = {}
        """Of its manifest."""
        self.material: Material | None = None
        self.error: BaseException | None = None
        self._let_go: Callable[[], None] | None = None
        self._answered = threading.Event()

    def offer(self, capture: Capture, let_go: Callable[[], None]) -> None:
        self.give(CapturedState(capture, self._stock), let_go)

    def give(self, material: Material, let_go: Callable[[], None] = lambda: None) -> None:
        """What the export is made from."""
        self.material, self._let_go = material, let_go
        self._answered.set()

    def refuse(self, error: BaseException) -> None:
        self.error = error
        self._answered.set()

    def wait(self, timeout_s: float) -> bool:
        return self._answered.wait(timeout_s)

    def let_go(self) -> None:
        """The capture isn't needed any more; idempotent."""
        let_go, self._let_go, self.material = self._let_go, None, None
        if let_go is not None:
            let_go()


class Exporter:
    """Makes the exports that one `HFExport` asks for, on one rank."""

    def __init__(
        self,
        export: HFExport,
        recipe: Recipe,
        group: Group,
        config: CheckpointConfig,
        *,
        number: int,
        exchange: Exchange | None,
        callbacks: Callbacks,
        wait_staged: Callable[[float | None], None],
        managed: bool = True,
    ) -> None:
        """On rank 0 ``export.root`` is locked and settled, unless it isn't ``managed``. Raises what those raise.

        number: of this exporter among those of its session; wait_staged: called, on the training thread, by who waits
        for the handle there.
        """
        self.export = export
        self.recipe = recipe
        self._group = group
        self._config = config
        self._exchange = exchange
        self._callbacks = callbacks
        self._wait_staged = wait_staged
        self._session = number
        self._root = os.fspath(export.root)
        self._storage = LocalStorage(self._root)
        self._keeper = Keeper(self._storage, export.name_template, export.keep, kind="export")
        self._managed = managed
        self._engine = EngineClient(group.rank, **limits_of(export), orphan_grace_s=ORPHAN_GRACE_S)
        self._link: LatestLink | None = None
        if managed and export.latest_link and group.rank == 0:
            self._link = LatestLink(self._storage, self._keeper)
        self._lock: RootLock | None = None
        self._trash: list[str] = []
        if group.rank == 0 and managed:
            create_root(self._root)
            self._lock = RootLock.acquire(self._root)
            try:
                _, self._trash = settle_root(self._storage, timeout_s=config.persist_timeout)
                if self._link is not None:
                    self._link.settle()
            except BaseException:
                self._lock.release()
                raise
        self._carrier = Carrier(self._storage, group, self._engine, deadlines_of(config), what="export")
        self._number = 0
        self._made: tuple[Stock, Made, RankPlan] | None = None
        self._stock = LastStock()
        self._image: Image | None = None
        self._engine_image: int | None = None
        self._engine_plan: int | None = None
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._pending: list[SaveHandle] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="holdfast-export", daemon=True)

    def start(self) -> None:
        """Begin to work; once all ranks have got this far."""
        try:
            self._engine.start()
            self._thread.start()
            for name in self._trash:
                self._carrier.remove(name)
        except BaseException:
            self.give_up_start()
            raise

    def give_up_start(self) -> None:
        """Let go of everything, when the session doesn't begin."""
        self._closed = True
        self._tickets.put(None)
        self._engine.close(ENGINE_GRACE_S)
        self._carrier.close(0.0)
        if self._lock is not None:
            self._lock.release()

    # Training thread. --------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        return self.export.every is not None and step > 0 and step % self.export.every == 0

    def resumed_from(self, step: int | None) -> None:
        """What was exported after ``step`` was left behind: it is replaced as the run comes by it."""
        self._keeper.resumed_from(step)

    def ticket(self, step: int | None, *, name: str | None = None, overwrite: bool = False) -> Ticket:
        """A place in the order of exports for ``step``; the ticket has to be handed to a capture."""
        name = self.export.name_template.format(step=step) if name is None else name
        config = self._config
        self._pending = [handle for handle in self._pending if not handle.done()]
        one_s = config.stage_timeout + config.persist_timeout + 2 * config.commit_timeout
        self._number += 1
        ticket = Ticket(
            self._number,
            step,
            name,
            SaveHandle(
                step=step,
                path=self._storage.path(name),
                default_timeout_s=one_s * (2 + len(self._pending)) + 30.0,
                wait_staged=lambda _handle, timeout: self._wait_staged(timeout),
                callbacks=self._callbacks,
                what="export",
            ),
            self._stock,
            overwrite=overwrite,
        )
        self._pending.append(ticket.handle)
        self._tickets.put(ticket)
        return ticket

    def wait(self, deadline: float | None) -> None:
        """Return when no export is in work; outcomes are in the handles. Raises `DeadlineExceeded` at ``deadline``."""
        for handle in self._pending:
            handle.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def close(self, deadline: float | None) -> None:
        """Let what is due end, then release everything; idempotent. Raises `DeadlineExceeded` after it."""
        if self._closed:
            return
        self._closed = True
        self._tickets.put(None)
        late: DeadlineExceeded | None = None
        try:
            self.wait(deadline)
        except DeadlineExceeded as error:
            late = error
            self._engine.close(ENGINE_GRACE_S)  # first of all, so that attempts fail while others can be told
        self._thread.join(THREAD_GRACE_S)
        self._carrier.close(0.0 if late is not None else REMOVAL_GRACE_S)
        self._engine.close(ENGINE_GRACE_S)
        if self._exchange is not None:
            self._exchange.close()
        if self._image is not None:
            self._image.close()
        if self._lock is not None and not self._thread.is_alive():
            self._lock.release()
        if late is not None:
            raise late

    # Export thread. ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            outcome: Any
            try:
                outcome = self._take(ticket)
            except BaseException as error:  # noqa: BLE001 - every failure ends in the handle
                outcome = error
            try:
                ticket.let_go()
            except Exception:  # noqa: BLE001 - the outcome is settled, whatever tidying up runs into
                _log.exception("after the export of step %s", ticket.step)
            self._finish(ticket, outcome)

    def _finish(self, ticket: Ticket, outcome: Checkpoint | BaseException) -> None:
        failed = isinstance(outcome, BaseException)
        more = {"error": repr(outcome)} if failed else {}
        what = "export.failed" if failed else "export.published"
        events.emit(what, step=ticket.step, rank=self._group.rank, path=ticket.handle.path, **more)
        ticket.handle.finish(outcome, stage="failed" if failed else "published")

    def _take(self, ticket: Ticket) -> Checkpoint:
        key = f"export/{self._session}/{ticket.number}"
        try:
            self._wait_answered(ticket)
            if ticket.error is None:
                return self._deliver(ticket, key)
        except BaseException:
            # However little of it this rank has seen: others may have begun, and make new links for the next.
            if self._exchange is not None:
                self._exchange.give_up(key)
            raise
        raise ticket.error  # on every rank: nobody has begun

    def _wait_answered(self, ticket: Ticket) -> None:
        config = self._config
        limit_s = 2 * config.stage_timeout + config.persist_timeout + config.commit_timeout
        if not ticket.wait(limit_s):
            raise DeadlineExceeded(
                f"the capture that the export of step {ticket.step} is made from did not come within {limit_s:g} s",
                waited_for="a capture",
                timeout_s=limit_s,
            )

    def _deliver(self, ticket: Ticket, key: str) -> Checkpoint:
        """Publish the export and return what stands; else raise what every rank raises."""
        step, handle = ticket.step, ticket.handle
        made: Made | None = None
        failure: BaseException | None = None
        try:
            made = self._made_for(ticket)
        except BaseException as error:  # noqa: BLE001 - told to the other ranks by the attempt, or by its refusal
            failure = error

        def planned(_timeout_s: float) -> Any:
            if failure is not None:
                return AbortReason.of(failure, rank=0, unreported=True)
            assert made is not None
            return self._planned(ticket, made)

        attempt = self._carrier.begin(key, planned, step=step)
        handle.attempt = attempt.id
        handle.advance("persisting")

        def persist() -> ManifestReport:
            if failure is not None:
                raise failure
            return self._persist(ticket, attempt, key)

        def reported() -> None:
            if self._link is not None:
                self._link.move_from(attempt.name)

        outcome, commit_s = self._carrier.carry(attempt, persist, before_publish=reported)
        handle.add_stats(commit_s=commit_s)
        if self._exchange is not None and self._group.rank == 0:
            with contextlib.suppress(HoldfastError):
                self._exchange.forget(key)
        if isinstance(outcome, Aborted):
            if self._link is not None:
                self._link.settle()
            raise outcome.reason.error(step=step, what="export")
        if self._group.rank == 0 and self._managed:
            self._after_publish(ticket, attempt)
        return Checkpoint(PublishedExport(self._storage.path(attempt.name), attempt.id, step))

    def _planned(self, ticket: Ticket, made: Made) -> Any:
        replaces = False
        if self._lock is not None:
            self._lock.renew()
        if ticket.step is not None and self._managed:
            ticket.extra, replaces = self._keeper.place(ticket.step, ticket.name, ())
        parts = tuple(
            tuple(FilePart(part.file, part.offset, part.size, part.total) for part in own) for own in made.plan.parts
        )
        return plan_attempt(
            ticket.name,
            Whole(((),) * self._group.world, None, parts),
            made.prewritten,
            step=ticket.step,
            metrics={},
            resumable=False,
            extra=ticket.extra,
            overwrite=ticket.overwrite or replaces,
            kind="export",
        )

    def _persist(self, ticket: Ticket, attempt: Attempt, key: str) -> ManifestReport:
        began = time.perf_counter()
        material = ticket.material
        assert material is not None
        assert self._made is not None
        assert self._image is not None
        _, _, plan = self._made
        memories = material.memories(plan.memories)
        image = self._image.bytes_view[: max(plan.image_bytes, PAGE_BYTES)]
        deadline = time.monotonic() + self._config.persist_timeout
        make_image(plan, memories, image, self._exchange, key=key, deadline=deadline, given_up=attempt.aborted)
        material.verify()
        del memories, material
        ticket.handle.add_stats(staging_s=time.perf_counter() - began)
        ticket.let_go()
        assert self._engine_plan is not None
        assert self._engine_image is not None
        self._carrier.persist(attempt, plan=self._engine_plan, image=self._engine_image)
        self._engine.staging_verified(attempt.id)
        report = self._carrier.wait_reported(attempt)
        ticket.handle.add_stats(persist_s=time.perf_counter() - began, bytes=report.nbytes)
        events.count("bytes_exported", report.nbytes)
        return report

    def _made_for(self, ticket: Ticket) -> Made:
        """The plan for the capture's structure, with its image and the engine's numbers; kept while that stands."""
        assert ticket.material is not None
        stock = ticket.material.stock()
        if self._made is not None and self._made[0] is stock:
            return self._made[1]
        self._forget()
        made = self.recipe.plan(stock)
        plan = made.plan.rank(self._group.rank, stock.places())
        nbytes = max(plan.image_bytes, PAGE_BYTES)
        if self._image is None or self._image.nbytes < nbytes:
            if self._image is not None:  # gone before the next is there
                self._image.close()
                self._image = None
            self._image = Image(nbytes)
            self._image.warm_up()
        self._engine_image = self._engine.add_image(self._image.fd, self._image.nbytes)
        rows = [
            FileRow(part.file, part.size, part.image_offset, part.offset, part.total)
            for part in plan.parts
            if part.size
        ]
        self._engine_plan = self._engine.add_plan(
            rows, tensor_offsets=b"", tensor_sizes=b"", index=encode_index(RankIndex((), ()))
        )
        self._made = (stock, made, plan)
        return made

    def _forget(self) -> None:
        """The plan in use is none any more; before anything of the next can fail."""
        self._made = None
        image, plan = self._engine_image, self._engine_plan
        self._engine_image = self._engine_plan = None
        if plan is not None:
            self._engine.drop_plan(plan)
        if image is not None:
            self._engine.drop_image(image)

    def _after_publish(self, ticket: Ticket, attempt: Attempt) -> None:
        """On rank 0: retention, and the link. What goes wrong is logged: the export stands."""
        try:
            self._keeper.note_published(ticket.step, attempt.name, ticket.extra, resumable=False)
            if self._link is not None:
                self._link.point_to(attempt.name)
            self._keeper.apply_retention(ticket.step, self._carrier.remove)
        except Exception:  # noqa: BLE001 - see above
            _log.exception("after the export of step %s to %s", ticket.step, attempt.name)
