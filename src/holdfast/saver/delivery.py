"""Publish deliveries of any kind as attempts.

    `AttemptRunner`   runs one attempt: begin -> engine writes -> staging verified -> report -> settle
    `DeliveryRoot`    a directory for deliveries: locked and recovered, with its own engine client and runner

Guarantees: a rank that fails anywhere votes to abort, with its cause, once its engine can no longer report; every rank
gets the same outcome. An engine that died or hangs is replaced, so that the next save has one.
Does not know which kinds of delivery exist (``deliverer``), or what they contain.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch

from holdfast._version import __version__
from holdfast.commit.attempt import Attempt, Deadlines
from holdfast.commit.messages import RankNote
from holdfast.coordination.failure import AttemptAborted, Outcome, RankFailure
from holdfast.engine.client import EngineClient
from holdfast.engine.messages import CopySource, FileRow
from holdfast.engine.shared import process_engine
from holdfast.errors import DeadlineExceeded, EngineDied, HoldfastError
from holdfast.format.dcp_metadata import rename_files
from holdfast.format.manifest import (
    METADATA_NAME,
    PAGE_BYTES,
    AttemptPlan,
    ChainMember,
    FilePart,
    Manifest,
    ManifestFile,
    ManifestReport,
    RankIndex,
    encode_index,
    format_of,
    report_name,
)
from holdfast.format.safetensors import INDEX_SUFFIX, rename_shards
from holdfast.format.sealed import xxh3_128
from holdfast.saver.agreement import Whole
from holdfast.saver.startup import settle_root
from holdfast.staging.copy_job import VERIFY_GRACE_S
from holdfast.staging.image import Image
from holdfast.staging.stream import SLOT_BYTES
from holdfast.storage.entries import attempt_id
from holdfast.storage.leases import lease_name
from holdfast.storage.local import open_storage
from holdfast.storage.protocol import WriterTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from holdfast.config import CheckpointConfig
    from holdfast.coordination.board import Board
    from holdfast.coordination.failure import Deed
    from holdfast.coordination.group import Group
    from holdfast.engine.ring import StreamedPiece
    from holdfast.format.manifest import Kind
    from holdfast.saver.capture import Capture, DeliveryPlan
    from holdfast.saver.deliverer import DeliveryJob
    from holdfast.saver.handle import SaveHandle
    from holdfast.staging.stream import SlotRing, StreamedStaging
    from holdfast.storage.protocol import DirectoryTarget, Storage, StorageLock

_log = logging.getLogger("holdfast")

Heard = TypeVar("Heard")
Planned: TypeAlias = "tuple[AttemptPlan, dict[str, bytes]] | RankFailure"
"""The attempt plan and its prewritten files; or why there is no attempt."""
_DIRECTORY_WRITER: Final = "holdfast.engine.directory_writer"
ABORT_LOOK_S: Final = 1.0
"""How often a rank that waits for its engine checks whether another rank has given up."""
ORPHAN_GRACE_S: Final = 120.0
"""How long an engine may continue with staged and verified attempts after its trainer has died."""
REMOVAL_GRACE_S: Final = 30.0
"""How long `close` waits until deleted directories are gone from the disk."""
ENGINE_GRACE_S: Final = 10.0
"""How long `close` lets an engine finish staged and verified attempts."""
THREAD_GRACE_S: Final = 5.0
"""How long `close` waits for threads, which should have nothing left to wait for."""


# Directories that a session has its engine remove; asked for again if the engine died meanwhile. Torch-free.
#
# Guarantees: never raises, never waits; what can't be removed for another reason is left to the next start.


class Trash:
    """Trashed directories of the root of ``storage`` that are being removed. Thread-safe."""

    def __init__(self, storage: Storage, engine: EngineClient) -> None:
        self._storage = storage
        self._engine = engine
        self._asked: list[str] = []
        self._unasked: list[str] = []
        """Directories for which there was no engine."""

    def remove(self, name: str) -> None:
        """Have the engine remove ``name``, a directory of the root."""
        try:
            with _opened(self._storage.target("")) as target:
                self._engine.remove(target, name)
            self._asked.append(name)
        except EngineDied as error:
            if not self._engine.is_closed:  # otherwise the next start removes it
                _log.warning("%s stays until the next save: %s", self._storage.path(name), error)
            self._unasked.append(name)
        except HoldfastError as error:
            _log.warning("%s stays until the next start: %s", self._storage.path(name), error)

    def remove_again(self) -> None:
        """Ask a new engine for removals that the previous one didn't finish: a full disk may need the space."""
        asked, self._asked = self._asked, []
        unasked, self._unasked = self._unasked, []
        for name in asked:
            try:
                self._engine.wait_removed(name, 0.0)
            except EngineDied:
                unasked.append(name)
            except DeadlineExceeded:
                self._asked.append(name)  # in progress
            except (HoldfastError, KeyError):
                pass  # already logged, or ended so long ago that it was forgotten
        while unasked and not self._unasked:  # without an engine, one try is enough
            self.remove(unasked.pop())
        self._unasked += unasked


@contextlib.contextmanager
def _opened(target: DirectoryTarget | WriterTarget) -> Iterator[int | WriterTarget]:
    """Yield what an engine is told of ``target``: the descriptor of a directory, closed afterwards, or the writer."""
    if isinstance(target, WriterTarget):
        yield target
    else:
        with target:
            yield target.fd


class AttemptRunner:
    """Runs the attempts of one rank's session, whatever they deliver: one after the other, on one thread.

    `run` does all the steps: begin, have the engine write (`write`), report, settle.
    """

    def __init__(
        self,
        storage: Storage,
        group: Group,
        engine: EngineClient,
        deadlines: Deadlines,
        *,
        what: Deed = "save",
    ) -> None:
        self._what = what
        self._storage = storage
        self._group = group
        self._board = group.board.clone()
        self._engine = engine
        self._trash = Trash(storage, engine)
        self._deadlines = deadlines

    @property
    def board(self) -> Board:
        """Board client of this thread."""
        return self._board

    def close(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for running removals, then close the board."""
        self._trash.remove_again()
        with contextlib.suppress(HoldfastError):  # what remains is trash, removed at the next start
            self._engine.wait_removals(timeout_s)
        self._board.close()

    def run(
        self,
        key: str,
        plan: Callable[[float], Planned],
        persist: Callable[[Attempt], ManifestReport | Sequence[ManifestReport]],
        *,
        step: int | None,
        handle: SaveHandle,
        before_publish: Callable[[Attempt], None] | None = None,
        settled: Callable[[Outcome], None] = lambda _: None,
        note: Callable[[Attempt], RankNote | None] = lambda _: None,
    ) -> Attempt:
        """Begin the attempt ``key``, have it written, and return it published; raises the same error on every rank.

        plan: as for `begin`. persist, before_publish, note: as for `carry`. settled: called once the outcome is known.
        """
        attempt = self.begin(key, plan, step=step)
        handle.attempt = attempt.id
        before = None if before_publish is None else partial(before_publish, attempt)
        outcome, commit_s = self.carry(
            attempt, partial(persist, attempt), before_publish=before, note=partial(note, attempt)
        )
        handle.add_stats(commit_s=commit_s)
        handle.ranks = attempt.notes
        settled(outcome)
        if isinstance(outcome, AttemptAborted):
            raise outcome.reason.error(step=step, what=self._what)
        return attempt

    def write(
        self,
        attempt: Attempt,
        *,
        plan: int,
        image: int,
        slot_bytes: int = 0,
        verify: Callable[[], None] = lambda: None,
    ) -> ManifestReport:
        """Have the engine write ``plan`` from ``image``; return this rank's report line once ``verify`` has returned.

        slot_bytes: if not 0, ``image`` is a ring of slots of that size, which ``verify`` fills first.
        """
        self.persist(attempt, plan=plan, image=image, slot_bytes=slot_bytes)
        verify()
        self._engine.staging_verified(attempt.id)
        return self.wait_reported(attempt)

    def write_streamed(
        self,
        attempt: Attempt,
        capture: Capture,
        stream: StreamedStaging,
        pieces: Sequence[StreamedPiece],
        ring: SlotRing,
        *,
        plan: int,
        image: int,
        staged: Callable[[], None],
    ) -> ManifestReport:
        """`write` from ``ring``, the ``image``, whose slots this thread fills meanwhile.

        staged: called once nothing of the state is read any more. The report waits for `verify_staging` after that.
        """

        def fill() -> None:
            for number, piece in enumerate(pieces):
                if (freed := number - ring.slots + 1) > 0:
                    self._wait_engine(attempt, partial(self._engine.wait_freed, pieces=freed))
                if capture.error is not None:
                    raise capture.error
                stream.fill(piece.start, piece.end, ring.slot(number))
                if stream.has_changed:
                    break  # `complete` or `verify_staging` raises it
                self._engine.slot_filled(attempt.id, number + 1)
            stream.complete()
            staged()
            verify_staging(capture)

        return self.write(attempt, plan=plan, image=image, slot_bytes=SLOT_BYTES, verify=fill)

    def begin(self, key: str, plan: Callable[[float], Planned], *, step: int | None) -> Attempt:
        """Begin the attempt ``key``, which every rank calls; see `Attempt.begin`, also for its errors.

        plan: called on rank 0 with the seconds that it may wait for other ranks; returns the attempt plan. If it
        raises, no rank begins, for that reason.
        """
        self._trash.remove_again()
        found, prewritten, refusal = None, None, None
        if self._group.rank == 0:
            try:
                # Shorter than the other ranks' wait for this rank, so that they receive its reason.
                answer = plan(0.8 * self._deadlines.begin_s)
                if isinstance(answer, RankFailure):
                    refusal = answer
                else:
                    found, prewritten = as_stored(self._storage, *answer)
            except Exception as error:  # noqa: BLE001 - told to the other ranks, which wait for this one
                refusal = RankFailure.of(error, rank=0, unreported=True)
        return Attempt.begin(
            storage=self._storage,
            board=self._board,
            clock=time.monotonic,
            key=key,
            deadlines=self._deadlines,
            plan=found,
            prewritten=prewritten,
            refusal=refusal,
            step=step,
            what=self._what,
            host=socket.gethostname(),
            remove=self.remove,
        )

    def persist(self, attempt: Attempt, *, plan: int, image: int, slot_bytes: int = 0) -> None:
        """Have the engine write ``plan`` from ``image`` (the engine's numbers) into the attempt; doesn't wait.

        The engine writes no report before `EngineClient.staging_verified`.
        """
        with _opened(self._storage.target(attempt.directory)) as target:
            self._engine.persist(
                target,
                attempt=attempt.id,
                plan=plan,
                image=image,
                step=attempt.step,
                world=self._group.world,
                report_name=report_name(self._group.rank),
                lease_name=lease_name(self._group.rank),
                slot_bytes=slot_bytes,
            )

    def copy(self, attempt: Attempt, source_fd: int, line: ManifestReport, *, world: int) -> ManifestReport:
        """Have the engine copy the files of one report from the directory ``source_fd`` into the attempt, and wait.

        line: of that report, in the manifest there; returns that of the copy. The engine goes on if this process ends.
        """
        target = self._storage.target(attempt.directory)
        if not isinstance(target, WriterTarget):
            target.__exit__(None, None, None)
            target = WriterTarget(_DIRECTORY_WRITER, (self._storage.path(attempt.directory),))
        self._engine.copy(
            source_fd,
            CopySource(line.name, line.digest),
            target,
            attempt=attempt.id,
            nbytes=line.nbytes,
            step=attempt.step,
            rank=line.rank,
            world=world,
            report_name=report_name(line.rank),
            lease_name=lease_name(self._group.rank),
        )
        return self.wait_reported(attempt, line.rank)

    def wait_reported(self, attempt: Attempt, rank: int | None = None) -> ManifestReport:
        """Wait for the report of ``rank``, this one by default; return its line of the manifest.

        Ends early where a rank has given up.
        """
        found = self._wait_engine(attempt, self._engine.wait_reported)
        attempt.same = found.same
        rank = self._group.rank if rank is None else rank
        name = self._storage.stored_as(report_name(rank), attempt.id)
        return ManifestReport(rank, name, found.size, found.digest, found.nbytes, found.parts)

    def _wait_engine(self, attempt: Attempt, wait: Callable[..., Heard]) -> Heard:
        """Return what ``wait`` returns, given the attempt's id and a timeout; ends early where a rank has given up.

        All waits of an attempt have one deadline, by which every rank must have reported.
        """
        while True:
            left_s = attempt.persist_by - time.monotonic()
            try:
                return wait(attempt.id, timeout_s=min(ABORT_LOOK_S, max(0.001, left_s)))
            except DeadlineExceeded as late:
                if (reason := attempt.aborted()) is not None:
                    raise reason.cause() from late
                if left_s <= ABORT_LOOK_S:
                    limit_s = self._deadlines.persist_s
                    if waiting := self._engine.waiting_for(attempt.id):
                        raise DeadlineExceeded(
                            f"rank {self._group.rank}: nothing was written within {limit_s:g} s, the "
                            f"`persist_timeout`: it waited for {waiting}; end those, or raise `host_writers`",
                            waited_for=waiting,
                            timeout_s=limit_s,
                        ) from late
                    raise DeadlineExceeded(
                        f"rank {self._group.rank}: its bytes were not durable after {limit_s:g} s; storage is "
                        "too slow for `persist_timeout`, or hangs",
                        waited_for="the engine's report",
                        timeout_s=limit_s,
                    ) from late

    def carry(
        self,
        attempt: Attempt,
        persist: Callable[[], ManifestReport | Sequence[ManifestReport]],
        *,
        before_publish: Callable[[], None] | None = None,
        note: Callable[[], RankNote | None] = lambda: None,
    ) -> tuple[Outcome, float]:
        """Run a begun attempt to its end; return its outcome and the seconds since this rank's ``persist`` ended.

        ``persist`` returns once the rank's report is durable; if it raises, this rank votes to abort once its engine
        can't report any more. ``before_publish``: see `Attempt.settle`. ``note``: returns what to tell rank 0 beside
        the report. Raises `OutcomeUnknown`.
        """
        unreported: RankFailure | None = None
        may_be_left = True
        try:
            report = persist()
        except BaseException as error:  # noqa: BLE001 - becomes this rank's vote, and is raised by settle's outcome
            stopped, may_be_left = self._stop_engine_work(attempt)
            unreported = RankFailure.of(error, rank=self._group.rank, unreported=stopped)
        else:
            attempt.report(*((report,) if isinstance(report, ManifestReport) else report), note=note())
        reported = time.perf_counter()
        try:
            outcome = attempt.settle(unreported=unreported, may_be_left=may_be_left, before_publish=before_publish)
        finally:  # in any case: what is in the trash is durably out of sight
            for name in attempt.trash:
                self.remove(name)
        commit_s = time.perf_counter() - reported
        if isinstance(outcome, AttemptAborted):
            self._stop_engine_work(attempt)
        return outcome, commit_s

    def remove(self, name: str) -> None:
        """Have the engine remove a trashed directory of the root; doesn't wait. The next start removes what remains."""
        self._trash.remove(name)

    def _stop_engine_work(self, attempt: Attempt) -> tuple[bool, bool]:
        """Stop the engine from reporting on this attempt: it confirms the cancel, or is killed and restarted later.

        Returns whether it has stopped (else it may hang in a system call and report later), and whether a report may
        exist.
        """
        try:
            return True, self._engine.cancel(attempt.id, timeout_s=10.0)
        except HoldfastError as error:
            _log.warning("attempt %s: %s", attempt.id, error)
            return False, True


def note_of(handle: SaveHandle, rank: int, look: bytes = b"") -> RankNote:
    """Return what ``rank`` tells of the save of ``handle`` when it has reported."""
    stats = handle.stats
    return RankNote(rank, handle.began_s, stats.stall_s, stats.staging_s, stats.persist_s, stats.bytes, look)


def deadlines_of(config: CheckpointConfig) -> Deadlines:
    """Return the deadlines of an attempt."""
    return Deadlines(begin_s=config.commit_timeout, persist_s=config.persist_timeout, commit_s=config.commit_timeout)


class DeliveryRoot:
    """A directory for one rank's deliveries: locked and recovered, with its own engine client and runner."""

    def __init__(
        self,
        root: str,
        group: Group,
        config: CheckpointConfig,
        *,
        limits: Mapping[str, Any] | None = None,
        what: Deed = "export",
        managed: bool = True,
    ) -> None:
        """Lock and recover ``root`` on rank 0, unless it isn't ``managed``; raises what those raise.

        limits: of the engine, see `EngineClient`. what: the word for a delivery in errors.
        """
        self.storage = open_storage(root)
        self.engine = EngineClient(
            group.rank, **dict(limits or {}), orphan_grace_s=ORPHAN_GRACE_S, host=process_engine()
        )
        self.lock: StorageLock | None = None
        self._trash: list[str] = []
        if group.rank == 0 and managed:
            self.storage.make_root()
            self.lock = self.storage.lock()
        try:
            if self.lock is not None:
                _, self._trash = settle_root(self.storage, timeout_s=config.persist_timeout)
            self.runner = AttemptRunner(self.storage, group, self.engine, deadlines_of(config), what=what)
        except BaseException:
            self.unlock()
            raise

    def start(self) -> None:
        """Start the engine, and have it remove what a crash left."""
        self.engine.start()
        for name in self._trash:
            self.runner.remove(name)

    def publish_files(
        self,
        job: DeliveryJob,
        name: str,
        capture: Capture,
        *,
        sizes: Callable[[DeliveryPlan], Sequence[Mapping[str, int]]],
        contents: Callable[[DeliveryPlan], Mapping[str, torch.Tensor]],
        overwrite: bool = False,
    ) -> str:
        """Publish files, each held by one rank, as the directory ``name``, without empty ones; return its path.

        sizes: called on rank 0; returns every rank's files with their sizes in bytes. contents: returns this rank's
        files as one-dimensional uint8; they are copied, then the capture is released. Raises the same error on every
        rank.
        """

        def plan() -> DeliveryPlan:
            if capture.error is not None or capture.plan is None:
                raise capture.error or AssertionError("a capture without error has a plan")
            return capture.plan

        def planned(_timeout_s: float) -> Planned:
            parts = tuple(
                tuple(FilePart(file, 0, size, size) for file, size in own.items() if size) for own in sizes(plan())
            )
            return plan_attempt(
                name,
                Whole.in_parts(parts),
                {},
                step=job.step,
                metrics={},
                resumable=False,
                extra={},
                overwrite=overwrite,
                kind="export",
            )

        def persist(attempt: Attempt) -> ManifestReport:
            files = contents(plan())
            job.handle.advance("persisting")
            with contextlib.closing(_image_of(files)) as image:
                verify_staging(capture)
                job.release()
                return self._write_files(attempt, {file: data.numel() for file, data in files.items()}, image)

        attempt = self.runner.run(job.key, planned, persist, step=job.step, handle=job.handle)
        return self.storage.path(attempt.name)

    def _write_files(self, attempt: Attempt, sizes: Mapping[str, int], image: Image) -> ManifestReport:
        """Have the engine write the files that `_image_of` put into ``image``."""
        rows, at = [], 0
        for file, size in sizes.items():
            if size:
                rows.append(FileRow(file, size, at, 0, size))
                at += _whole_pages(size)
        index = encode_index(RankIndex((), ()))
        plan = self.engine.add_plan(rows, tensor_offsets=b"", tensor_sizes=b"", index=index)
        number = self.engine.add_image(image.fd, image.nbytes)
        try:
            return self.runner.write(attempt, plan=plan, image=number)
        finally:
            with contextlib.suppress(EngineDied):
                self.engine.drop_plan(plan)
                self.engine.drop_image(number)

    def close(self, join: Callable[[], bool], *, late: bool) -> None:
        """Stop the engine, then release the root, unless a thread that ``join`` waits for may still publish there.

        late: give up deliveries in progress.
        """
        if late:
            self.engine.close(ENGINE_GRACE_S)  # first, so that attempts fail while other ranks can be told
        has_ended = join()
        self.runner.close(0.0 if late else REMOVAL_GRACE_S)
        self.engine.close(ENGINE_GRACE_S)
        if has_ended:
            self.unlock()

    def unlock(self) -> None:
        """Release the lock of the root."""
        lock, self.lock = self.lock, None
        if lock is not None:
            lock.release()


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _image_of(files: Mapping[str, torch.Tensor]) -> Image:
    """Return an image of ``files``, each page-aligned."""
    image = Image(max(sum(_whole_pages(data.numel()) for data in files.values()), PAGE_BYTES))
    at = 0
    for data in files.values():
        image.bytes_view[at : at + data.numel()] = data
        at += _whole_pages(data.numel())
    return image


def plan_attempt(
    name: str,
    whole: Whole,
    prewritten: Mapping[str, bytes],
    *,
    step: int | None,
    metrics: Mapping[str, float],
    resumable: bool,
    extra: Mapping[str, Any],
    overwrite: bool,
    kind: Kind = "checkpoint",
    versions: Mapping[str, str] | None = None,
    chain: tuple[ChainMember, ...] = (),
) -> tuple[AttemptPlan, dict[str, bytes]]:
    """Return the plan of a new attempt to publish ``name``, with its prewritten files; for the coordinator.

    whole: what each rank writes. prewritten: contents of small files by name, all listed in the manifest; those of an
    export may be one directory below. versions: of other software involved.
    """
    attempt, world = attempt_id(), len(whole.planned)
    manifest = Manifest(
        format=format_of(kind, chain),
        name=name,
        attempt=attempt,
        step=step,
        world=world,
        created=datetime.now(timezone.utc).isoformat(),
        metrics=dict(metrics),
        resumable=resumable,
        versions={
            "holdfast": __version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            **(versions or {}),
        },
        reports=(),
        files=tuple(ManifestFile(file, len(data), xxh3_128(data)) for file, data in prewritten.items()),
        extra=dict(extra),
        kind=kind,
        chain=chain,
    )
    plan = AttemptPlan(
        attempt=attempt,
        name=name,
        step=step,
        world=world,
        planned=whole.planned,
        manifest=manifest,
        overwrite=overwrite,
        parts=whole.parts,
    )
    return plan, dict(prewritten)


def as_stored(
    storage: Storage, plan: AttemptPlan, prewritten: dict[str, bytes]
) -> tuple[AttemptPlan, dict[str, bytes]]:
    """Return ``plan`` and its prewritten files by the names that ``storage`` gives them, also where they are quoted.

    A ``.metadata`` that can't be rendered under those names is left out.
    """
    names = [*prewritten, *(file for files in plan.planned for file, _ in files)]
    names += [part.name for parts in plan.parts for part in parts]
    renamed = {name: storage.stored_as(name, plan.attempt) for name in names}
    if all(name == stored for name, stored in renamed.items()):
        return plan, prewritten
    contents: dict[str, bytes] = {}
    for name, data in prewritten.items():
        quoting: bytes | None = data
        if name == METADATA_NAME:
            quoting = rename_files(data, renamed)
        elif name.endswith(INDEX_SUFFIX):
            quoting = rename_shards(data, renamed)
        if quoting is not None:
            contents[renamed[name]] = quoting
    files = tuple(ManifestFile(name, len(data), xxh3_128(data)) for name, data in contents.items())
    return (
        msgspec.structs.replace(
            plan,
            planned=tuple(tuple((renamed[name], size) for name, size in files) for files in plan.planned),
            parts=tuple(
                tuple(msgspec.structs.replace(part, name=renamed[part.name]) for part in parts) for parts in plan.parts
            ),
            manifest=msgspec.structs.replace(plan.manifest, files=files),
        ),
        contents,
    )


def verify_staging(capture: Capture) -> None:
    """Wait until the training thread has confirmed that the state is unchanged; after a grace, check here.

    Raises the error of a failed capture. See ``staging.copy_job``.
    """
    copied_at = capture.staging.copied_at
    grace_s = VERIFY_GRACE_S if copied_at is None else copied_at + VERIFY_GRACE_S - time.monotonic()
    if grace_s > 0:
        capture.confirmed.wait(grace_s)
    capture.verify()
    if capture.error is not None:
        raise capture.error
