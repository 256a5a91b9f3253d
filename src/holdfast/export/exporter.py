"""Run the exports of one `HFExport`, one after the other: from captures of the manager's session to published
directories; keep ``hf-latest``, a symbolic link beside them, on the newest.

    training thread   `Exporter.new_job`: what is due gets its handle, and its place in the order of exports
    stager thread     `ExportJob.offer`: the capture is staged
    export thread     plan once -> begin -> fill the image, exchange -> let go of the capture -> engine persists ->
                      report -> settle -> retention, ``hf-latest`` -> the handle ends

Guarantees: an export becomes visible by the same commit as a checkpoint, whole, as soon as the last rank's bytes are
durable; nothing of it waits for the training thread or for the next step. What fails ends in its own handle, alike on
all ranks, and disturbs neither the checkpoint from the same capture nor any export before it. A rank's own share of the
export is kept in memory, and no more than ``export.plan.BUFFER_BYTES_MAX`` beside it. The link is replaced by one
durable rename, and points to an existing export. If the file system exchanges directories, an export that is replaced
is never missing; otherwise the link points to another one meanwhile, if there is one. An entry of that name that is not
a link is never touched; what fails of the link is logged, and fails no export.
Assumes: every rank makes its exporters, asks for jobs and closes them in the same order. One process at a time, which
holds the root's lock, moves the link.
Does not: know which export is the newest (``catalog`` does).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast import events
from holdfast.catalog.catalog import Catalog
from holdfast.config import HFExport, limits_of
from holdfast.coordination.failure import AttemptAborted, RankFailure
from holdfast.engine.messages import FileRow
from holdfast.errors import ConfigError, HoldfastError
from holdfast.export.build import ExportBuilder, models_of
from holdfast.export.inputs import CapturedState, LastStock
from holdfast.export.transfer import Exchange, make_image
from holdfast.format.manifest import PAGE_BYTES, FilePart, RankIndex, encode_index
from holdfast.format.structure import digest_of
from holdfast.loader.checkpoint import Checkpoint
from holdfast.loader.sources.open import PublishedExport
from holdfast.saver.agreement import Whole
from holdfast.saver.deliverer import DeliveryJob, RootDeliverer
from holdfast.saver.delivery import note_of, plan_attempt
from holdfast.staging.image import Image, unmap_unused
from holdfast.storage.faces import COPY_BYTES_MAX, FACES
from holdfast.validation import is_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.commit.attempt import Attempt
    from holdfast.coordination.failure import Outcome
    from holdfast.coordination.group import Group
    from holdfast.export.build import BuiltExport
    from holdfast.export.inputs import ExportInput, Inventory
    from holdfast.export.rank_plan import RankExportPlan
    from holdfast.format.manifest import ManifestReport
    from holdfast.saver.capture import Needs, WorkingLease
    from holdfast.saver.deliverer import DeliverySession
    from holdfast.saver.handle import SaveHandle, Stage
    from holdfast.saver.process_session import SharedPlans
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast")
LATEST_LINK: Final = "hf-latest"
_FRESH: Final = f".{LATEST_LINK}.new"


class ExportJob(DeliveryJob):
    """One export that is due, made from a capture or from what `give` says."""

    what = "export"

    def __init__(
        self,
        name: str,
        handle: SaveHandle,
        stock: LastStock,
        needs: Needs,
        *,
        rank: int,
        overwrite: bool,
    ) -> None:
        super().__init__(handle, target=name)
        self.name, self.rank, self.overwrite = name, rank, overwrite
        self._stock = stock
        self._needs = needs
        self.extra: Mapping[str, Any] = {}
        """Further members of its manifest."""
        self.material: ExportInput | None = None

    def needs(self) -> Needs:
        return self._needs

    def offer(self, lease: WorkingLease) -> None:
        self.material = CapturedState(lease.capture, self._stock)
        super().offer(lease)

    def give(self, material: ExportInput) -> None:
        """Make the export from ``material``, and not from a capture."""
        self.material = material
        self._answered.set()

    def release(self) -> None:
        self.material = None
        super().release()

    def finish(self, outcome: Any, *, stage: Stage) -> None:
        handle, what = self.handle, "export.failed" if isinstance(outcome, BaseException) else "export.published"
        more = handle.figures(outcome)
        events.emit(what, step=self.step, rank=self.rank, attempt=handle.attempt, path=handle.path, **more)
        super().finish(outcome, stage=stage)


@dataclass(frozen=True, slots=True)
class PlannedExport:
    """All that one rank knows of an export before it sees a tensor."""

    built: BuiltExport
    rank_plan: RankExportPlan
    kept: PlannedExport | None = None
    """What an earlier call has left of it."""

    def to_keep(self) -> PlannedExport:
        """Return what later calls may use, without what was only for finding the plans of the ranks."""
        plan = replace(self.built.plan, local=(), streams={})
        return self.kept or replace(self, built=replace(self.built, plan=plan, prewritten={}))


@dataclass(frozen=True, slots=True)
class WarmImage:
    """The image of an export, while it is kept for the next call."""

    image: Image

    def close(self) -> None:
        self.image.close()


class Exporter(RootDeliverer[ExportJob]):
    """Makes the exports that one `HFExport` asks for, on one rank."""

    def __init__(
        self,
        export: HFExport,
        recipe: ExportBuilder,
        session: DeliverySession,
        *,
        exchange: Exchange | None,
        managed: bool = True,
        shared: SharedPlans | None = None,
    ) -> None:
        """On rank 0 ``export.root`` is locked and settled, unless it isn't ``managed``. Raises what those raise.

        shared: for an exporter of one call, where plan and image come from and go to.
        """
        super().__init__(export.root, "holdfast-export")
        self.open(session, limits=limits_of(export), managed=managed)
        self.export = export
        self.recipe = recipe
        self._group = group = session.group
        self._exchange = exchange
        self._managed = managed
        self._storage, self._engine = self.place.storage, self.place.engine
        self._keeper = Catalog(self._storage, export.name_template, export.keep, kind="export", alike=True)
        self._link: LatestLink | None = None
        if managed and export.latest_link and group.rank == 0:
            self._link = LatestLink(self._storage, self._keeper)
            try:
                self._link.settle()
            except BaseException:
                self.place.unlock()
                raise
        self._made: tuple[Inventory, PlannedExport] | None = None
        self._shared, self._signature = shared, ""
        self._published: PlannedExport | None = None
        self._stock = LastStock()
        self._image: Image | None = None
        self._engine_image: int | None = None
        self._engine_plan: int | None = None

    def release(self, *, late: bool) -> None:
        super().release(late=late)
        if self._exchange is not None:
            self._exchange.close()
        image, kept = self._image, self._published
        if image is None:
            return
        if self._shared and kept and self._shared.keep(self._signature, kept, WarmImage(image)):
            self._image = None
            return
        image.close()
        if not self.thread.is_alive():
            self._image = image = None
            unmap_unused()

    # Training thread. --------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        return self.export.every is not None and step > 0 and step % self.export.every == 0

    def resumed_from(self, step: int | None) -> None:
        """Mark exports after ``step`` as left behind: they are replaced when the run reaches their steps."""
        self._keeper.resumed_from(step)

    def new_job(self, step: int | None, *, name: str | None = None, overwrite: bool = False) -> ExportJob:
        name = self.export.name_template.format(step=step) if name is None else name
        handle = self.new_handle(step, self._storage.path(name), what="export")
        needs, rank = self.recipe.wants, self._group.rank
        return ExportJob(name, handle, self._stock, needs, rank=rank, overwrite=overwrite)

    # Export thread. ----------------------------------------------------------------------------------------------

    def deliver(self, job: ExportJob) -> Checkpoint:
        """Publish the export and return what stands; else raise what every rank raises."""
        try:
            if job.material is None:
                self.wait_capture(job)
            return self._publish(job)
        except BaseException:
            # However little of it this rank has seen: others may have begun, and make new links for the next.
            if self._exchange is not None and job.error is None:  # else nobody has begun
                self._exchange.give_up(job.key)
            raise

    def _publish(self, job: ExportJob) -> Checkpoint:
        made: BuiltExport | None = None
        failure: BaseException | None = None
        try:
            made = self._made_for(job)
        except BaseException as error:  # noqa: BLE001 - told to the other ranks by the attempt, or by its refusal
            failure = error

        def planned(_timeout_s: float) -> Any:
            if failure is not None:
                return RankFailure.of(failure, rank=0, unreported=True)
            assert made is not None
            return self._planned(job, made)

        def persist(attempt: Attempt) -> ManifestReport:
            job.handle.advance("persisting")
            if failure is not None:
                raise failure
            return self._persist(job, attempt)

        def before_publish(attempt: Attempt) -> None:
            if self._link is not None:
                self._link.move_from(attempt.name)

        def settled(outcome: Outcome) -> None:
            if self._exchange is not None and self._group.rank == 0:
                with contextlib.suppress(HoldfastError):
                    self._exchange.forget(job.key)
            if self._link is not None and isinstance(outcome, AttemptAborted):
                self._link.settle()

        attempt = self.place.runner.run(
            job.key,
            planned,
            persist,
            step=job.step,
            handle=job.handle,
            before_publish=before_publish,
            settled=settled,
            note=lambda _: note_of(job.handle, self._group.rank),
        )
        if self._shared is not None and self._made is not None and self._signature:
            self._published = self._made[1].to_keep()
            self._shared.note_published(self._signature, self._published)
        if self._group.rank == 0 and self._managed:
            self._after_publish(job, attempt)
        return Checkpoint(PublishedExport(self._storage.path(attempt.name), attempt.id, job.step))

    def _planned(self, job: ExportJob, made: BuiltExport) -> Any:
        replaces = False
        if self.place.lock is not None:
            self.place.lock.renew()
        if job.step is not None and self._managed:
            job.extra, replaces = self._keeper.place(job.step, job.name, ())
        parts = tuple(
            tuple(FilePart(part.file, part.offset, part.size, part.total) for part in own) for own in made.plan.parts
        )
        return plan_attempt(
            job.name,
            Whole.in_parts(parts),
            made.prewritten,
            step=job.step,
            metrics={},
            resumable=False,
            extra={**job.extra, **self._plain_names(made)},
            overwrite=job.overwrite or replaces,
            kind="export",
        )

    def _plain_names(self, made: BuiltExport) -> dict[str, Any]:
        """Return what the manifest says of weights that readers know by name only: see `storage.faces`."""
        if self._storage.takes_pieces or made.layout.index is not None:
            return {}
        for file in made.layout.files:
            if file.size > COPY_BYTES_MAX:
                raise ConfigError(
                    f"{self._storage.root}: {file.name} would have {file.size:,} bytes. Readers find it under this "
                    f"name only, which it gets by a copy; a store copies at most {COPY_BYTES_MAX:,} at once. Export "
                    "it to a directory",
                    field="root",
                )
        return {FACES: [file.name for file in made.layout.files]}

    def _persist(self, job: ExportJob, attempt: Attempt) -> ManifestReport:
        began = time.perf_counter()
        material = job.material
        assert material is not None
        assert self._made is not None
        assert self._image is not None
        plan = self._made[1].rank_plan
        memories = material.memories(plan.memories)
        image = self._image.bytes_view[: max(plan.image_bytes, PAGE_BYTES)]
        by = attempt.persist_by
        make_image(plan, memories, image, self._exchange, key=job.key, deadline=by, given_up=attempt.aborted)
        material.verify()
        del memories, material
        job.handle.add_stats(staging_s=time.perf_counter() - began)
        job.release()
        assert self._engine_plan is not None
        assert self._engine_image is not None
        report = self.place.runner.write(attempt, plan=self._engine_plan, image=self._engine_image)
        job.handle.add_stats(persist_s=time.perf_counter() - began, bytes=report.nbytes)
        events.count("bytes_exported", report.nbytes)
        return report

    def _made_for(self, job: ExportJob) -> BuiltExport:
        """The plan for the capture's structure, with its image and the engine's numbers; kept while that stands."""
        assert job.material is not None
        stock = job.material.stock()
        if self._made is not None and self._made[0] is stock:
            return self._made[1].built
        self._forget()
        planned = self._plan(stock)
        plan = planned.rank_plan
        nbytes = max(plan.image_bytes, PAGE_BYTES)
        if self._image is None or self._image.nbytes < nbytes:
            if self._image is not None:  # gone before the next is there
                self._image.close()
                self._image = None
            self._image = Image(nbytes)
            self._image.warm_up(self._engine.cores)
        self._engine_image = self._engine.add_image(self._image.fd, self._image.nbytes)
        rows = [
            FileRow(part.file, part.size, part.image_offset, part.offset, part.total)
            for part in plan.parts
            if part.size
        ]
        self._engine_plan = self._engine.add_plan(
            rows, tensor_offsets=b"", tensor_sizes=b"", index=encode_index(RankIndex((), ()))
        )
        self._made = (stock, planned)
        return planned.built

    def _plan(self, stock: Inventory) -> PlannedExport:
        """Plan for ``stock``, with what an earlier call of this process has left where that still holds."""
        known: PlannedExport | None = None
        if self._shared is not None and (signature := stock.signature()):
            self._signature = f"export/{digest_of(self.recipe.signature() + signature.encode())}"
            found = self._shared.take(self._signature)
            if found is not None:
                known, image = found
                self._image = None if image is None else image.image
        built = self.recipe.plan(stock, None if known is None else known.built)
        if known is not None and built.plan is known.built.plan:
            return replace(known, built=built, kept=known)
        events.count("export_plans_made")
        return PlannedExport(built, built.plan.rank(self._group.rank, stock.places()))

    def _forget(self) -> None:
        """The plan in use is none any more; before anything of the next can fail."""
        self._made = None
        image, plan = self._engine_image, self._engine_plan
        self._engine_image = self._engine_plan = None
        if plan is not None:
            self._engine.drop_plan(plan)
        if image is not None:
            self._engine.drop_image(image)

    def _after_publish(self, job: ExportJob, attempt: Attempt) -> None:
        """On rank 0: retention, and the link. What goes wrong is logged: the export stands."""
        try:
            self._keeper.note_published(job.step, attempt.name, job.extra, resumable=False)
            if self._link is not None:
                self._link.point_to(attempt.name)
            self._keeper.apply_retention(job.step, self.place.runner.remove)
        except Exception:  # noqa: BLE001 - see above
            _log.exception("after the export of step %s to %s", job.step, attempt.name)


def exporters_of(
    exports: Sequence[HFExport] | HFExport,
    state: Mapping[str, Any],
    root: str,
    session: Callable[[int], DeliverySession],
) -> list[Exporter]:
    """The exporters of one manager, on one rank. Raises what is wrong with any of them, with none begun."""
    exports = [exports] if isinstance(exports, HFExport) else list(exports)
    checked(exports, root)
    group = session(0).group
    recipes = [ExportBuilder(export, models_of(export, state), rank=group.rank) for export in exports]
    found: list[Exporter] = []
    try:
        for number, (export, recipe) in enumerate(zip(exports, recipes, strict=True)):
            exchange = exchange_of(group, f"export/{number}")
            found.append(Exporter(export, recipe, session(number), exchange=exchange))
    except BaseException:
        for exporter in found:
            exporter.give_up_start()
        raise
    return found


def exchange_of(group: Group, name: str) -> Exchange | None:
    """Links between the ranks of ``group``, made when first needed; None where there is one rank."""
    if group.world == 1 or group.store is None:
        return None
    return Exchange.over_gloo(group.board.clone(), group.store, f"{group.prefix}/{name}")


def checked(exports: Sequence[HFExport], root: str) -> None:
    """Raise `ConfigError` unless ``exports`` are exports to roots of their own."""
    seen: dict[str, str] = {_real(root): "the manager's own root"}
    for export in exports:
        if not isinstance(export, HFExport):
            raise ConfigError(f"exports: expected holdfast.HFExport, found {export!r:.200}", field="exports")
        place = _real(os.fspath(export.root))
        if place in seen:
            raise ConfigError(
                f"exports: {os.fspath(export.root)} is {seen[place]}; give each export its own root",
                field="exports",
            )
        seen[place] = "the root of another export"


def _real(root: str) -> str:
    """Return the one name of a root, without links; of a place on an object store its URL."""
    return root if is_store(root) else os.path.realpath(root)


class LatestLink:
    """The link in the root of ``storage``, whose exports ``keeper`` knows."""

    def __init__(self, storage: Storage, keeper: Catalog) -> None:
        self._storage = storage
        self._keeper = keeper
        self._path = storage.path(LATEST_LINK)
        self._fresh = os.path.join(storage.root, _FRESH)

    def point_to(self, name: str) -> None:
        """Name the export ``name`` from now on; durable on return. Raises `ConfigError`, `StorageError`, `OSError`."""
        if os.path.lexists(self._path) and not os.path.islink(self._path):
            raise ConfigError(
                f"{self._path} is not a symbolic link: move it away, or export with latest_link=False",
                field="latest_link",
            )
        self._clean()
        os.symlink(name, self._fresh)
        os.replace(self._fresh, self._path)
        self._storage.sync_dir("")

    def settle(self) -> None:
        """Name the newest export there is, and leave nothing else; raises nothing."""
        try:
            self._clean()
            newest = self._keeper.newest_name()
            if newest is not None and newest != self._target():
                self.point_to(newest)
        except (HoldfastError, OSError) as error:
            _log.warning("%s does not name the newest export: %s", self._path, error)

    def move_from(self, name: str) -> None:
        """Name another export than ``name``, which is about to be replaced, if there is another; raises nothing."""
        try:
            other = self._keeper.newest_name(besides=name) if self._target() == name else None
            if other is not None:
                self.point_to(other)
        except (HoldfastError, OSError) as error:
            _log.warning("%s names %s while that is replaced: %s", self._path, name, error)

    def _target(self) -> str | None:
        try:
            return os.readlink(self._path)
        except OSError:  # there is none, or it is none
            return None

    def _clean(self) -> None:
        """Remove what a process that died has left of a new link."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._fresh)
