"""Versions on an object store: published by putting the manifest last, since objects can't be renamed; received.

    all ranks   stage the version in host memory; put their data and report, named by the attempt
    rank 0      has every rank's report -> puts ``holdfast.json``, if there is none -> ``.metadata``, retention

    version-7/__0_0.0123456789ab.distcp          data of rank 0, by attempt 0123456789ab
    version-7/rank-00000.0123456789ab.report     its checksums
    version-7/holdfast.json                      names the reports, which name the data

Such a version is an ordinary checkpoint, wherever it is copied: its files are those that its manifest names.

Guarantees: a version is visible only when complete; every rank gets the same outcome, or `DeadlineExceeded` and
`OutcomeUnknown` if it can't be determined. What was published is never changed: two attempts share only the manifest's
name, which is put only if absent. A lost response loses no version: a publisher that finds its attempt's manifest has
published it. Deletion starts with the manifest.
Assumes: one publisher at a time writes below a URL. A second one isn't prevented, but a version belongs to one attempt;
objects of the others are removed with it, or after `LEFT_S`. A copied checkpoint or export, whose objects come in any
order, counts once every object that manifest and reports name exists. Retention can't see readers: a version deleted
while it is read is not committed; the next newer one is received, or `CheckpointNotFound` raised.
Does not: know its readers: keep or pin enough versions that receivers can finish; read stock DCP directories.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.catalog.catalog import Catalog
from holdfast.catalog.retention import Keep
from holdfast.catalog.root import step_of
from holdfast.commit.publish import Publication, finish_manifest
from holdfast.coordination.board import BoardLost
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.round import Round
from holdfast.cores import take_turns
from holdfast.engine.checksums import Sums, WritePlan, compile_plan, hash_unit
from holdfast.engine.messages import AddPlan
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    OutcomeUnknown,
    SaveFailed,
    StorageError,
)
from holdfast.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    ManifestReport,
    Report,
    ReportFile,
    encode_report,
    report_name,
)
from holdfast.format.safetensors import INDEX_NAME, WEIGHTS_NAME
from holdfast.format.sealed import xxh3_128
from holdfast.loader.sources.huggingface import open_committed_hf
from holdfast.loader.sources.object_store import open_object
from holdfast.loader.sources.open import resolved
from holdfast.saver.agreement import METADATA_ROWS_MAX, Whole
from holdfast.saver.capture import AwaitedDelivery
from holdfast.saver.checkpointer import write_plan
from holdfast.saver.delivery import plan_attempt
from holdfast.storage.entries import attempt_of, published_attempt
from holdfast.storage.object_storage import ObjectStorage, with_attempt
from holdfast.storage.object_store import AGAIN, LAST_PAUSE_S
from holdfast.sync.transports.stored import START_S, SavingSession, VersionPublishing, at_least
from holdfast.sync.transports.stored_receiving import DirectoryReceiving

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.format.manifest import AttemptPlan, ChainMember
    from holdfast.loader.sources.holdfast import CheckpointSource, HoldfastSource
    from holdfast.loader.sources.object_store import ObjectSource
    from holdfast.saver.capture import Capture, DeliveryPlan
    from holdfast.storage.object_client import ObjectClient
    from holdfast.storage.object_store import ObjectStore
    from holdfast.sync.protocol import Destination, FetchedVersion, PublisherOptions


class ObjectReceiving(DirectoryReceiving):
    """The receiving half of an object store."""

    first_look_s = 0.1  # each look costs requests
    watch_every_s = 5.0

    def __init__(self, store: ObjectClient, name_template: str, prefix: str | None, key_map: Any) -> None:
        self._objects = ObjectStorage(store)
        super().__init__(self._objects, name_template, prefix, key_map)
        self._lacking: dict[str, str] = {}
        """For each incomplete version, an object that it lacks."""
        self._attempt = ""
        """Attempt of the version being read."""

    def fetch(
        self, destination: Destination, version: int | None, newer_than: int | None, deadline: Deadline
    ) -> FetchedVersion:
        """Fetch as `Receiving.fetch`; queries the store once even if no time is left."""
        self._objects.until(deadline.ends_s)
        try:
            return super().fetch(destination, version, newer_than, deadline)
        except StorageError as error:
            if error.errno in AGAIN and deadline.left_s() <= LAST_PAUSE_S:
                raise deadline.exceeded(f"receiving from {self._objects.root}", str(error)) from error
            raise

    def _apart(self) -> ObjectReceiving:
        # The deadline of requests belongs to the storage: another thread needs another one.
        return ObjectReceiving(self._objects.store, self._template, self._prefix, self._key_map)

    def begin_look(self) -> None:
        self._objects.until(time.monotonic() + LOOK_S)

    # Choosing a version. -----------------------------------------------------------------------------------------

    def _rows(self, above: int | None = None) -> list[tuple[int, str]]:
        rows = []
        for name in self._objects.list_dir(""):
            step = step_of(name, self._template)
            if step is not None and (above is None or step > above) and self._is_whole(name):
                rows.append((step, name))
        return sorted(rows)

    def _name_of(self, version: int) -> str | None:
        name = self._template.format(step=version)
        return name if self._is_whole(name) else None

    def _is_whole(self, name: str) -> bool:
        self._lacking.pop(name, None)
        try:
            source = open_object(self._objects, name)
            manifest = source.manifest
            if manifest.reports[0].name == report_name(0, manifest.attempt):
                return True  # its manifest was put last
            lacking = self._lacked(source)
        except CheckpointNotFound:
            return False
        except StorageError:
            raise
        except HoldfastError:
            return True  # an unreadable one must raise
        if lacking is not None:
            self._lacking[name] = lacking
        return lacking is None

    def _lacked(self, source: ObjectSource) -> str | None:
        """Return an object that a copied version lacks, None if it is complete."""
        manifest = source.manifest
        listed = {row.name for row in self._objects.list_tree(source.name)}
        small = [*(line.name for line in manifest.reports), *(file.name for file in manifest.files)]
        for name in small:
            if name not in listed and not source.has_file(name):
                return name
        return next((name for name in source.files if name not in listed and not source.has_file(name)), None)

    def _unfinished(self) -> str:
        return "".join(f"; {name} is not whole, it lacks {lacking}" for name, lacking in sorted(self._lacking.items()))

    # Reading it. -------------------------------------------------------------------------------------------------

    def _open(self, name: str) -> CheckpointSource:
        source = open_object(self._objects, name)
        self._attempt = source.manifest.attempt
        if source.manifest.kind == "checkpoint":
            return resolved(source)
        if source.has_file(WEIGHTS_NAME) or source.has_file(INDEX_NAME):
            return open_committed_hf(source)
        raise ConfigError(
            f"{source.directory} is an export without a model that could be loaded, such as an adapter", field="root"
        )

    def _take(self, destination: Destination, version: int, name: str) -> tuple[dict[str, Any], str]:
        self._attempt = ""
        try:
            return super()._take(destination, version, name)
        except (CheckpointCorrupt, StorageError) as error:
            if not self._attempt or published_attempt(self._objects, name) == self._attempt:
                raise
            path = self._objects.path(f"{name}/{MANIFEST_NAME}")
            raise CheckpointNotFound(
                f"version {version} was deleted while it was read, as {path} says, which is gone; take a newer one, "
                "or have the publisher pin it or keep more versions",
                path=path,
                step=version,
            ) from error


HASH_THREADS: Final = 2


class VersionDelivery(AwaitedDelivery):
    """One version for an object store: its capture, for the training thread, which puts it."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target


@dataclass(frozen=True, slots=True)
class _Walk:
    """How the image of a plan is hashed, and the index for its reports."""

    plan: DeliveryPlan
    write: WritePlan
    index: bytes


class Upload:
    """Puts one rank's part of versions into ``objects``, one version after the other."""

    def __init__(self, objects: ObjectStorage) -> None:
        self._objects = objects
        self._walk: _Walk | None = None
        self._names: list[str] = []

    def names(self) -> list[str]:
        """Names of the objects that the last `put` may have stored, below the version."""
        return self._names

    def put(self, capture: Capture, name: str, attempt: str, version: int, *, rank: int, world: int) -> ManifestReport:
        """Put the data and the report of ``rank`` as ``attempt`` at ``name``; return its line of the manifest.

        Raises `StorageError`; what has been put by then remains, see `names`.
        """
        self._names = []
        buffer, ends_s = capture.buffer, self._objects.ends_s
        if buffer is None or capture.plan is None:
            raise AssertionError("a capture without error has a plan")
        walk = self._walk
        if walk is None or walk.plan is not capture.plan:
            added = AddPlan(0, **write_plan(capture.plan.rank_plan))
            walk = self._walk = _Walk(capture.plan, compile_plan(added), added.index)
        image, write, sums = compat.host_memory(buffer.image.bytes_view), walk.write, Sums(walk.write)
        store, report_at = self._objects.store, report_name(rank, attempt)
        names = [with_attempt(row.name, attempt) for row in write.files]
        self._names = [*names, report_at]
        jobs: list[Callable[[], None]] = []
        for row, at in zip(write.files, names, strict=True):
            data = image[row.image_offset : row.image_offset + row.size]
            jobs.append(partial(store.put, f"{name}/{at}", data, ends_s=ends_s))
        jobs += [partial(hash_unit, image, write, unit, sums) for unit in write.units]
        take_turns(jobs, len(write.files) + HASH_THREADS)
        files = [
            ReportFile(at, row.size, bytes(extents))
            for at, row, extents in zip(names, write.files, sums.extents, strict=True)
        ]
        report = encode_report(Report(attempt, version, rank, world, tuple(files), bytes(sums.tensors), walk.index))
        store.put(f"{name}/{report_at}", report, ends_s=ends_s)
        nbytes = sum(row.size for row in write.files)
        events.count("bytes_persisted", nbytes)
        return ManifestReport(rank, report_at, len(report), xxh3_128(report), nbytes)


def is_of_another(name: str, attempt: str) -> bool:
    """Return True if an object beside a manifest of ``attempt`` belongs to another attempt."""
    parts = name.split(".")
    return len(parts) >= 3 and parts[-1] in {"distcp", "report"} and parts[-2] != attempt


_log = logging.getLogger("holdfast")

LEFT_S: Final = 86_400.0
"""Age in seconds at which a start removes what an attempt left that never got a manifest."""
LOOK_S: Final = 60.0
"""Timeout in seconds for store requests made outside `publish`."""
AFTER_S: Final = 30.0
"""Timeout in seconds of the work after a commit (``.metadata``, retention); the next publish catches up."""
DOUBT_S: Final = 5.0
"""How much longer than its deadline a publish checks the store for its outcome, or removes what it has put."""


class _PutRow(msgspec.Struct, frozen=True, array_like=True):
    """The result of one rank's put, or its failure."""

    reason: RankFailure | None
    line: ManifestReport | None


_ROW: Final = msgspec.msgpack.Decoder(_PutRow)


def _putting(session: SavingSession, attempt: str) -> Round:
    return Round(session.group.board, f"put/{attempt}", had_not="put its objects")


class ObjectPublishing(VersionPublishing):
    """One publisher rank of versions on an object store; see `Publishing`.

    Construction raises on every rank `StorageError` if the bucket is missing or may not be listed, or
    `DeadlineExceeded`.
    """

    def __init__(
        self,
        store: ObjectStore,
        name_template: str,
        prefix: str | None,
        process_group: Any | None,
        options: PublisherOptions,
    ) -> None:
        self._objects = ObjectStorage(store)
        keeper = Catalog(self._objects, name_template, Keep(last=options.keep_versions), alike=True)
        super().__init__(self._objects, keeper, name_template, prefix, process_group, options)
        self._upload = Upload(self._objects)
        self._attempt = ""
        self._publication: Publication | None = None
        """Publication of ``_attempt``, on rank 0."""
        self._begin(Deadline.after(START_S))

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions published below the URL, ascending, as listed by the store."""
        self._objects.until(time.monotonic() + LOOK_S)
        return self._listed()

    def _listed(self) -> tuple[int, ...]:
        return tuple(sorted(step for step, name in self._candidates() if self._is_published(name)))

    def _candidates(self) -> list[tuple[int, str]]:
        rows = [(step_of(name, self._template), name) for name in self._objects.list_dir("")]
        return [(step, name) for step, name in rows if step is not None]

    def _is_published(self, name: str) -> bool:
        return self._objects.size(f"{name}/{MANIFEST_NAME}") is not None

    def _look_again(self) -> None:
        self._objects.until(time.monotonic() + LOOK_S)

    # Startup. ----------------------------------------------------------------------------------------------------

    def _take_hold(self, deadline: Deadline) -> list[str]:
        self._objects.until(min(deadline.ends_s, time.monotonic() + LOOK_S))
        self._objects.make_root()
        for _, name in self._candidates():
            if time.monotonic() > self._objects.ends_s:
                break  # another start continues
            try:
                self._tidy(name)
            except HoldfastError as error:
                _log.warning("%s stays as it is: %s", self._objects.path(name), error)
        return []

    def _let_go(self) -> None:
        """Do nothing: no resources are held."""

    def _tidy(self, name: str) -> None:
        """Remove old leftovers of an attempt; put the ``.metadata`` that one didn't get to put."""
        if self._is_published(name):
            if self._objects.size(f"{name}/{METADATA_NAME}") is None:
                self._put_metadata(name)
            return
        rows = self._objects.list_tree(name)
        if not rows or max(row.modified_s for row in rows) > self._objects.now_s() - LEFT_S:
            return
        attempts = {attempt for row in rows if (attempt := attempt_of(row.name)) is not None}
        if {row.name for row in rows} == {with_attempt(MANIFEST_NAME, attempt) for attempt in attempts}:
            self._objects.remove(name, [row.name for row in rows])  # voids of attempts that are gone for a day
            return
        if all(self._objects.withdraw(f"{name}//{attempt}", name, attempt).certain for attempt in sorted(attempts)):
            for attempt in sorted(attempts):
                self._objects.remove_tree(self._objects.directory_of(name, attempt))
            if not self._is_published(name):
                self._objects.remove(name, [row.name for row in rows if attempt_of(row.name) is None])

    def _put_metadata(self, name: str) -> None:
        """Put the ``.metadata`` for stock DCP after the commit, since it is made from the committed reports."""
        source = open_object(self._objects, name)
        manifest = source.manifest
        if manifest.kind != "checkpoint" or manifest.chain:
            return
        if manifest.reports[0].name != report_name(0, manifest.attempt):
            return  # a copy of something that has its own, or none
        if sum(len(tensor.shards) for tensor in source.tensors.values()) <= METADATA_ROWS_MAX:
            data = source.render_dcp_metadata()
            self._objects.store.put(f"{name}/{METADATA_NAME}", data, ends_s=self._objects.ends_s)

    # Publishing. -------------------------------------------------------------------------------------------------

    def _check_free(self, version: int, name: str, deadline: Deadline) -> None:
        self._objects.until(deadline.ends_s)
        with _within(deadline, self._objects.path(name)):
            self._refuse_old(version, self._listed())
            if self._is_published(name):  # a listing may lag behind
                self._refuse_old(version, (version,))

    def _save(
        self,
        session: SavingSession,
        version: int,
        name: str,
        deadline: Deadline,
        extra: dict[str, Any],
        chain: tuple[ChainMember, ...],
    ) -> int:
        self._objects.until(deadline.ends_s)
        self._attempt, self._publication = "", None
        group = session.group
        plan: AttemptPlan | None = None

        def begin() -> bytes:
            nonlocal plan
            whole = Whole(((),) * group.world, None)
            plan, _ = plan_attempt(
                name, whole, {}, step=version, metrics={}, resumable=False, extra=extra, overwrite=False, chain=chain
            )
            self._objects.begin(name, plan.attempt, recoverable=False)
            self._publication = Publication(self._objects, name, plan.attempt, step=version)
            return plan.attempt.encode()

        self._attempt = session.votes.decide(begin, timeout_s=at_least(deadline.left_s())).decode()
        delivery = VersionDelivery(self._objects.path(name))
        try:
            error: Exception | None = None
            line = None
            try:
                with _within(deadline, self._objects.path(name)):
                    capture = self._staged(session, delivery, version, deadline)
                    line = self._upload.put(capture, name, self._attempt, version, rank=group.rank, world=group.world)
            except Exception as failed:  # noqa: BLE001 - reported to rank 0, which waits for this rank
                error = failed
            reason = None if error is None else RankFailure.of(error, rank=group.rank)
            _putting(session, self._attempt).say(msgspec.msgpack.encode(_PutRow(reason, line)))
            if error is not None:
                raise error
            if line is None:
                raise AssertionError("a rank that has not failed has a report")
            if plan is not None:
                with _within(deadline, self._objects.path(name)):
                    self._publish(session, plan, capture, name, deadline)
            return line.nbytes
        finally:
            delivery.release()

    def _open_own(self, name: str) -> HoldfastSource:
        self._objects.until(time.monotonic() + LOOK_S)
        return open_object(self._objects, name)

    def _staged(self, session: SavingSession, delivery: VersionDelivery, version: int, deadline: Deadline) -> Capture:
        session.saver.start(session.weights, [delivery], step=version)
        session.saver.wait_staged(at_least(deadline.left_s()))
        if not delivery.wait(at_least(deadline.left_s())):
            raise deadline.exceeded(f"staging version {version}", "look at the other ranks, or allow more time")
        capture = delivery.capture
        if capture.error is not None:
            raise capture.error
        return capture

    def _publish(
        self, session: SavingSession, plan: AttemptPlan, capture: Capture, name: str, deadline: Deadline
    ) -> None:
        """On rank 0: put the manifest, unless a rank has failed, which reports that itself."""
        board, putting = session.group.board, _putting(session, plan.attempt)
        # Longer, so that a rank whose store requests timed out can report that itself.
        told = putting.gather(timeout_s=deadline.left_s() + DOUBT_S)
        if isinstance(told, RankFailure):
            raise told.cause()
        putting.forget()
        rows = list(map(_ROW.decode, told))
        lines = [row.line for row in rows if row.line is not None]
        if len(lines) < len(rows):
            return
        if deadline.passed():
            raise deadline.exceeded(f"publishing {self._objects.path(name)}", "allow more time; nothing was published")
        world = capture.plan.world if capture.plan is not None else None
        whole = None if world is None else world.complete(board, timeout_s=at_least(deadline.left_s()))
        if isinstance(whole, RankFailure):
            raise whole.cause()
        for line, planned in zip(lines, () if whole is None else whole.planned, strict=True):
            nbytes = sum(size for _, size in planned)
            if line.nbytes != nbytes:
                message = f"rank {line.rank} has put {line.nbytes} bytes, planned were {nbytes}"
                raise SaveFailed(message, step=plan.step, rank=line.rank)
        publication = self._publication
        assert publication is not None
        publication.seal(finish_manifest(plan, lines))
        refusal = publication.publish(overwrite=False)
        if refusal is not None:
            raise refusal
        self._follow_up(plan, name, deadline)

    def _follow_up(self, plan: AttemptPlan, name: str, deadline: Deadline) -> None:
        """Finish after the commit, before reporting it: nobody then finds a version that is about to be deleted."""
        self._objects.until(time.monotonic() + max(DOUBT_S, min(AFTER_S, deadline.left_s())))
        try:
            self._put_metadata(name)
            others = [row.name for row in self._objects.list_tree(name) if is_of_another(row.name, plan.attempt)]
            self._objects.remove(name, others)
        except HoldfastError as error:
            _log.warning("after publishing %s: %s", self._objects.path(name), error)
        self._keeper.apply_retention(plan.step, self._objects.remove_tree)

    def _conclude(self, session: SavingSession, error: BaseException | None, name: str, deadline: Deadline) -> None:
        try:
            super()._conclude(session, error, name, deadline)
        except HoldfastError as failed:
            # The other ranks' messages are lost, but the manifest is visible to all.
            if isinstance(failed, (DeadlineExceeded, BoardLost, OutcomeUnknown)) and self._is_ours(name):
                return
            publication = self._publication
            if session.group.rank == 0 and not (publication and publication.may_be_published):
                with contextlib.suppress(HoldfastError):
                    _putting(session, self._attempt).forget()
                if publication is not None:
                    self._objects.until(time.monotonic() + DOUBT_S)
                    publication.withdraw()
                    for place in publication.trash:  # nobody else could seal it: no void need stay
                        self._objects.remove_tree(place)
                        self._objects.unlink(f"{place}/{MANIFEST_NAME}")
            elif error is not None:  # without this rank's report there is no commit
                self._removed(name, self._upload.names)
            raise

    def _is_ours(self, name: str) -> bool:
        self._objects.until(time.monotonic() + DOUBT_S)
        try:
            return bool(self._attempt) and published_attempt(self._objects, name) == self._attempt
        except StorageError:
            return False

    def _removed(self, name: str, names: Callable[[], list[str]]) -> None:
        try:
            self._objects.until(time.monotonic() + DOUBT_S)
            self._objects.remove(name, names())
        except HoldfastError as error:
            _log.warning("%s: what attempt %s has put stays: %s", self._objects.path(name), self._attempt, error)


class _within:  # noqa: N801 - reads as a phrase
    """Raise `DeadlineExceeded` for a store call that the deadline ended."""

    def __init__(self, deadline: Deadline, url: str) -> None:
        self._deadline, self._url = deadline, url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        late = self._deadline.left_s() <= LAST_PAUSE_S
        if isinstance(error, StorageError) and error.errno in AGAIN and late:
            raise self._deadline.exceeded(f"publishing {self._url}", str(error)) from error
