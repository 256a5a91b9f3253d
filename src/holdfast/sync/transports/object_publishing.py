"""Publishing versions on an object store, where nothing can be renamed: the manifest, put last, is the commit.

    all ranks   stage the version in host memory; put their data and report, named by the attempt
    rank 0      has every rank's report -> puts ``holdfast.json``, if none is there -> ``.metadata``, retention

    version-7/__0_0.0123456789ab.distcp          data of rank 0, by attempt 0123456789ab
    version-7/rank-00000.0123456789ab.report     its checksums
    version-7/holdfast.json                      names the reports, which name the data

Such a version is an ordinary checkpoint, wherever it is copied to: names are those that its manifest says.

Guarantees: a version is visible when it is whole; on every rank the same outcome, or `DeadlineExceeded` and
`OutcomeUnknown` that say it can't be told. What was published is never changed: two attempts share no name but the
manifest's, which is put only where there is none. A lost answer is no lost version: who sees his attempt's manifest has
published it. Deleting takes the manifest first.
Assumes: one publisher at a time writes below a URL. Nothing holds a second one back, but a version is one attempt's;
what the others have put of theirs is removed with it, or after `LEFT_S`.
Does not: know who reads: keep so many versions, or pin them, that receivers can finish.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from holdfast import events
from holdfast.capture import SaveRequest
from holdfast.coordination import BoardLost
from holdfast.delivery import plan_attempt
from holdfast.errors import (
    CheckpointExists,
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
    attempt_in,
    encode_manifest,
    report_name,
)
from holdfast.keeping import Keeper
from holdfast.object_source import open_object
from holdfast.outcome import AbortReason
from holdfast.publish import finish_manifest
from holdfast.retention import Keep
from holdfast.root import published_attempt, step_of
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import AGAIN, LAST_PAUSE_S, InDoubt
from holdfast.sync.deadline import Deadline
from holdfast.sync.transports.object_upload import Taken, Upload, is_of_another
from holdfast.sync.transports.version_publishing import START_S, Session, VersionPublishing, at_least
from holdfast.world_plan import METADATA_ROWS_MAX, Whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.capture import Capture
    from holdfast.format.manifest import AttemptPlan
    from holdfast.storage.local import LocalStorage
    from holdfast.storage.object_store import ObjectStore
    from holdfast.sync.seam import PublisherOptions

_log = logging.getLogger("holdfast")

LEFT_S: Final = 86_400.0
"""What an attempt has left that never came to a manifest is removed by a start, once it is this old."""
LOOK_S: Final = 60.0
"""What is asked of the store outside `publish` has so long."""
AFTER_S: Final = 30.0
"""What follows a commit (``.metadata``, retention) has so long, of what is left; the next publish catches up."""
DOUBT_S: Final = 5.0
"""How much longer than its deadline a publish asks the store what became of it, or removes what it has put."""


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has put, or why it hasn't."""

    rank: int
    reason: AbortReason | None
    line: ManifestReport | None


_ROW: Final = msgspec.msgpack.Decoder(_Row)


class _Keeper(Keeper):
    """Deletes by taking the manifest away."""

    def __init__(self, objects: ObjectStorage, name_template: str, keep: Keep) -> None:
        super().__init__(objects, name_template, keep)
        self._objects = objects

    def _delete(self, name: str, step: int, remove: Callable[[str], None]) -> None:
        del remove
        self._objects.unlink(f"{name}/{MANIFEST_NAME}")
        events.emit("checkpoint.deleted", step=step, rank=0, path=self._objects.path(name))
        self._objects.remove_tree(name)


class ObjectPublishing(VersionPublishing):
    """One publisher rank of versions on an object store; see `Publishing`.

    Raises on construction, on every rank, `StorageError` where the bucket isn't there or may not be listed,
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
        # A saver that makes captures, and no checkpoints, asks its storage for nothing but what paths are called.
        named = cast("LocalStorage", self._objects)
        keeper = _Keeper(self._objects, name_template, Keep(last=options.keep_versions))
        super().__init__(named, keeper, name_template, prefix, process_group)
        self._upload = Upload(self._objects)
        self._attempt = ""
        self._sent = False
        """Whether the manifest of ``_attempt`` may be there."""
        self._begin(Deadline.after(START_S))

    @property
    def versions(self) -> tuple[int, ...]:
        """Those published below the URL, ascending, as the store lists them."""
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

    # A start. ----------------------------------------------------------------------------------------------------

    def _take_hold(self, deadline: Deadline) -> list[str]:
        self._objects.until(min(deadline.ends_s, time.monotonic() + LOOK_S))
        for _, name in self._candidates():
            if time.monotonic() > self._objects.ends_s:
                break  # another start goes on
            try:
                self._tidy(name)
            except HoldfastError as error:
                _log.warning("%s stays as it is: %s", self._objects.path(name), error)
        return []

    def _let_go(self) -> None:
        """Nothing is held."""

    def _tidy(self, name: str) -> None:
        """Remove what an attempt has left long ago; put the ``.metadata`` that one has not come to put."""
        if self._is_published(name):
            if self._objects.size(f"{name}/{METADATA_NAME}") is None:
                self._put_metadata(name)
            return
        rows = self._objects.list_tree(name)
        if rows and max(row.modified_s for row in rows) < time.time() - LEFT_S and not self._is_published(name):
            self._objects.remove(name, [row.name for row in rows])

    def _put_metadata(self, name: str) -> None:
        """What stock DCP reads; after the commit, as it is made from what was committed."""
        source = open_object(self._objects, name)
        manifest = source.manifest
        if manifest.kind != "checkpoint" or manifest.reports[0].name != report_name(0, manifest.attempt):
            return  # a copy of something that has its own, or none
        if sum(len(tensor.shards) for tensor in source.tensors.values()) <= METADATA_ROWS_MAX:
            data = source.render_dcp_metadata()
            self._objects.store.put(f"{name}/{METADATA_NAME}", data, ends_s=self._objects.ends_s)

    # A version. --------------------------------------------------------------------------------------------------

    def _check_free(self, version: int, name: str, deadline: Deadline) -> None:
        self._objects.until(deadline.ends_s)
        with _within(deadline, self._objects.path(name)):
            self._refuse_old(version, self._listed())
            if self._is_published(name):  # a listing may lag behind
                self._refuse_old(version, (version,))

    def _save(self, session: Session, version: int, name: str, deadline: Deadline) -> int:
        self._objects.until(deadline.ends_s)
        self._attempt, self._sent = "", False
        group, plan = session.group, None
        if group.rank == 0:
            whole = Whole(((),) * group.world, None)
            plan, _ = plan_attempt(
                name, whole, {}, step=version, metrics={}, resumable=False, extra={}, overwrite=False
            )
        shared = None if plan is None else plan.attempt.encode()
        self._attempt = session.votes.share(shared, None, timeout_s=at_least(deadline.left_s())).decode()
        taken = Taken()
        try:
            error: Exception | None = None
            line = None
            try:
                with _within(deadline, self._objects.path(name)):
                    capture = self._staged(session, taken, version, name, deadline)
                    line = self._upload.put(capture, name, self._attempt, version, rank=group.rank, world=group.world)
            except Exception as failed:  # noqa: BLE001 - rank 0 is told, and waits for nobody in vain
                error = failed
            reason = None if error is None else AbortReason.of(error, rank=group.rank)
            group.board.append(f"put/{self._attempt}", msgspec.msgpack.encode(_Row(group.rank, reason, line)))
            if error is not None:
                raise error
            if line is None:
                raise AssertionError("a rank that has not failed has a report")
            if plan is not None:
                with _within(deadline, self._objects.path(name)):
                    self._publish(session, plan, capture, name, deadline)
            return line.nbytes
        finally:
            taken.drop()

    def _staged(self, session: Session, taken: Taken, version: int, name: str, deadline: Deadline) -> Capture:
        # Not resumable: these are weights, no run goes on from them. Nor a checkpoint: a saver's lies in a directory.
        request = SaveRequest(version, name, {}, resumable=False, overwrite=False, eager=False, checkpoint=False)
        handle = taken.handle = session.saver.start(session.weights, request, takers=(taken,))
        handle.wait_staged(at_least(deadline.left_s()))
        capture = taken.wait(at_least(deadline.left_s()))
        if capture is None:
            raise deadline.exceeded(f"staging version {version}", "look at the other ranks, or allow more time")
        return capture

    def _publish(self, session: Session, plan: AttemptPlan, capture: Capture, name: str, deadline: Deadline) -> None:
        """On rank 0: put the manifest, unless a rank has failed, which says so itself."""
        board, key = session.group.board, f"put/{plan.attempt}"
        waiting_for = "every rank's objects"
        timeout_s = deadline.left_s() + DOUBT_S  # a rank that the store didn't answer in time is to say so itself
        told = board.wait_entries(key, board.world, timeout_s=timeout_s, waiting_for=waiting_for) or ()
        board.delete_list(key)
        rows = sorted(map(_ROW.decode, told), key=lambda row: row.rank)
        lines = [row.line for row in rows if row.line is not None]
        if len(lines) < len(rows):
            return
        if deadline.passed():
            raise deadline.exceeded(f"publishing {self._objects.path(name)}", "allow more time; nothing was published")
        world = capture.plan.world if capture.plan is not None else None
        whole = None if world is None else world.complete(board, timeout_s=at_least(deadline.left_s()))
        if isinstance(whole, AbortReason):
            raise whole.cause()
        for line, planned in zip(lines, () if whole is None else whole.planned, strict=True):
            nbytes = sum(size for _, size in planned)
            if line.nbytes != nbytes:
                message = f"rank {line.rank} has put {line.nbytes} bytes, planned were {nbytes}"
                raise SaveFailed(message, step=plan.step, rank=line.rank)
        self._commit(plan, lines, name)
        self._follow_up(plan, name, deadline)

    def _commit(self, plan: AttemptPlan, lines: list[ManifestReport], name: str) -> None:
        objects, key = self._objects, f"{name}/{MANIFEST_NAME}"
        data = encode_manifest(finish_manifest(plan, lines))
        self._sent = True
        try:
            won = objects.store.create(
                key, data, ours=lambda found: attempt_in(found) == plan.attempt, ends_s=objects.ends_s
            )
        except InDoubt as doubt:
            raise OutcomeUnknown(
                f"version {plan.step} may have been published as attempt {plan.attempt}, or may be yet: {doubt}",
                attempt=plan.attempt,
                step=plan.step,
            ) from doubt
        except StorageError:
            self._sent = False
            raise
        if not won:
            self._sent = False
            path = objects.path(name)
            message = f"{path} came to exist while it was being published; published data is never replaced"
            raise CheckpointExists(message, path=path)

    def _follow_up(self, plan: AttemptPlan, name: str, deadline: Deadline) -> None:
        """After the commit, and before anybody is told of it: nobody finds a version that is about to go."""
        self._objects.until(time.monotonic() + max(DOUBT_S, min(AFTER_S, deadline.left_s())))
        try:
            self._put_metadata(name)
            others = [row.name for row in self._objects.list_tree(name) if is_of_another(row.name, plan.attempt)]
            self._objects.remove(name, others)
        except HoldfastError as error:
            _log.warning("after publishing %s: %s", self._objects.path(name), error)
        self._keeper.apply_retention(plan.step, lambda _: None)

    def _conclude(self, session: Session, error: BaseException | None, name: str, deadline: Deadline) -> None:
        try:
            super()._conclude(session, error, name, deadline)
        except HoldfastError as failed:
            # What the other ranks say can't be learnt, but the manifest is there for all to see.
            if isinstance(failed, (DeadlineExceeded, BoardLost, OutcomeUnknown)) and self._is_ours(name):
                return
            if session.group.rank == 0 and not self._sent:
                with contextlib.suppress(HoldfastError):
                    session.group.board.delete_list(f"put/{self._attempt}")
                self._removed(name, lambda: self._of_attempt(name))
            elif error is not None:  # without this rank's report there is no commit
                self._removed(name, self._upload.names)
            raise

    def _is_ours(self, name: str) -> bool:
        self._objects.until(time.monotonic() + DOUBT_S)
        try:
            return bool(self._attempt) and published_attempt(self._objects, name) == self._attempt
        except StorageError:
            return False

    def _of_attempt(self, name: str) -> list[str]:
        rows = self._objects.list_tree(name) if self._attempt else []
        return [row.name for row in rows if f".{self._attempt}." in row.name]

    def _removed(self, name: str, names: Callable[[], list[str]]) -> None:
        try:
            self._objects.until(time.monotonic() + DOUBT_S)
            self._objects.remove(name, names())
        except HoldfastError as error:
            _log.warning("%s: what attempt %s has put stays: %s", self._objects.path(name), self._attempt, error)


class _within:  # noqa: N801 - reads as a phrase
    """What the store has not answered when the deadline passed is `DeadlineExceeded`."""

    def __init__(self, deadline: Deadline, url: str) -> None:
        self._deadline, self._url = deadline, url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        late = self._deadline.left_s() <= LAST_PAUSE_S
        if isinstance(error, StorageError) and error.errno in AGAIN and late:
            raise self._deadline.exceeded(f"publishing {self._url}", str(error)) from error
