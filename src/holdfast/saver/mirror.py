"""The mirror of a manager: every published checkpoint that is to be kept there, copied in the background.

    published locally -> rank 0 chooses what is missing -> all ranks' engines copy the files -> published there

Guarantees: a copy is published by the same protocol as a checkpoint, all of it or nothing, whatever dies in between;
engines check every byte of it on the way. A save never waits for an upload, nor fails because of one. A local
checkpoint that is to be kept in the mirror is not deleted before its copy is published there, within the limits of
`CheckpointConfig.mirror_backlog`. A step that another run saved there is never replaced.
Assumes: every rank makes one, for the same roots.
Does not: decide what comes first or what is missing (``catalog.tiers``), or load (``loader.resume``).

Rank 0 compares both roots whenever something was published or an upload has ended, and again after a failure, with
increasing pauses. What it chooses it tells the others on the board, one note after the other. Copies have an attempt of
their own, so that a copy that was given up never stands in the way of the next try; they name what they are a copy of.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from holdfast import events
from holdfast.catalog.catalog import Pins, origin_of
from holdfast.catalog.retention import CheckpointEntry, in_order
from holdfast.catalog.tiers import MirrorTier, Missing, missing
from holdfast.commit.attempt import Deadlines
from holdfast.config import limits_of
from holdfast.coordination.failure import AttemptAborted, RankFailure
from holdfast.engine.client import EngineClient
from holdfast.engine.shared import process_engine
from holdfast.errors import CheckpointCorrupt, ConfigError, DeadlineExceeded, HoldfastError, SaveFailed, StorageError
from holdfast.saver.copies import directory_of, plan_of_copy
from holdfast.saver.delivery import (
    ENGINE_GRACE_S,
    ORPHAN_GRACE_S,
    REMOVAL_GRACE_S,
    AttemptRunner,
    Trash,
)
from holdfast.saver.preflight import check_deletes
from holdfast.saver.startup import settle_root
from holdfast.storage.entries import read_manifest
from holdfast.storage.protocol import DirectoryTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.catalog.catalog import Catalog, Found
    from holdfast.commit.attempt import Attempt
    from holdfast.config import CheckpointConfig
    from holdfast.coordination.group import Group
    from holdfast.format.manifest import Manifest, ManifestReport
    from holdfast.saver.delivery import Planned
    from holdfast.storage.protocol import Storage, StorageLock

_log = logging.getLogger("holdfast")
_KEY: Final = "mirror"
NICE: Final = 15
"""Nice level of the engine's uploads at least: they pause for saves."""
FIRST_PAUSE_S: Final = 5.0
LAST_PAUSE_S: Final = 300.0
"""Pauses between tries while the mirror fails."""
LOOK_S: Final = 0.25
"""How often a rank looks for rank 0's next note; more seldom with more than `LOOKING_RANKS` ranks."""
LOOKING_RANKS: Final = 1000
LOOKS_TO_CATCH_UP: Final = 20
"""After so many looks for its next note a rank asks whether it is still there."""
KEPT_NOTES: Final = 8
"""Notes of rank 0 that stay on the board."""
KEPT_OUTCOMES: Final = 1000


class Note(msgspec.Struct, frozen=True):
    """What rank 0 tells all ranks to do next. passed: attempts that aren't to be uploaded, each with the reason."""

    kind: Literal["upload", "passed", "trouble", "end"]
    name: str = ""
    step: int | None = None
    origin: str = ""
    passed: dict[str, str] = {}
    failure: RankFailure | None = None


_NOTE: Final = msgspec.msgpack.Decoder(Note)


class Mirror:
    """One rank's part in copying what ``keeper`` has published below ``local`` to ``storage``."""

    def __init__(self, storage: Storage, local: Storage, group: Group, config: CheckpointConfig) -> None:
        """Lock and recover the mirror, on rank 0; a mirror that can't be reached now is recovered later.

        Raises `ConfigError` for roots that can't be mirrored or stores that can't be written to, and `RootLocked`.
        """
        if storage.root == local.root:
            raise ConfigError(f"mirror: {storage.root} is the root itself; name another place", field="mirror")
        target = local.target("") if group.rank == 0 else None
        if isinstance(target, DirectoryTarget):
            target.__exit__(None, None, None)
        elif target is not None:
            message = f"mirror: {local.root} is no directory, and only what is in one can be copied elsewhere"
            raise ConfigError(message, field="mirror")
        self._storage = storage
        self.tier = MirrorTier(storage, config.name_template, config.mirror_keep)
        self.lock: StorageLock | None = None
        self._local, self._group, self._config = local, group, config
        self._keeper: Catalog | None = None
        limits: Any = {**limits_of(config), "nice": max(NICE, config.nice)}
        self._engine = EngineClient(group.rank, **limits, orphan_grace_s=ORPHAN_GRACE_S, host=process_engine())
        deadlines = Deadlines(config.commit_timeout, config.mirror_timeout, config.commit_timeout)
        self._runner = AttemptRunner(storage, group, self._engine, deadlines, what="upload")
        self._local_trash = Trash(local, self._engine)
        self._board = group.board.clone()
        self._thread = threading.Thread(target=self._run, name="holdfast-mirror", daemon=True)
        self._changed = threading.Condition()
        """Guards what follows; notified of every change."""
        self._outcomes: dict[str, BaseException | None] = {}
        """Of attempts whose copy is published, or was not at the last try."""
        self._expected: dict[str, None] = {}
        """Attempts published in this session, without an outcome."""
        self._is_due = True
        self._closing = self._over = self._is_closed = False
        self._given_up: set[str] = set()
        """Attempts whose upload failed while closing: left to the next start."""
        self._unpinned: set[int] = set()
        self._end_by = math.inf
        # For rank 0 alone:
        self._is_stale = False
        self._opening = threading.Lock()
        self._is_open = False
        self._remote: dict[str, CheckpointEntry] | None = None
        self._trash: list[str] = []
        self._uploading = ""
        self._unfit: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()
        self._failures: Counter[str] = Counter()
        """By attempt, how often its upload has failed: what fails again and again must not keep others waiting."""
        self._pause_s, self._retry_at = FIRST_PAUSE_S, math.inf
        if group.rank == 0:
            try:
                self._open()
                check_deletes(storage, config.mirror_keep)
            except StorageError as error:
                _log.warning("the mirror %s can't be reached, and is tried again later: %s", storage.root, error)
            except BaseException:
                self._engine.close(0.0)
                raise

    @property
    def storage(self) -> Storage:
        return self._storage

    # The manager's side. -----------------------------------------------------------------------------------------

    def start(self, keeper: Catalog) -> None:
        """Begin to upload what ``keeper`` has, once every rank is ready."""
        self._keeper = keeper
        self._engine.start()
        for name in self._trash:
            self._runner.remove(name)
        self._thread.start()

    def note_published(self, origin: str | None) -> None:
        """Note that attempt ``origin`` was published locally; on every rank."""
        with self._changed:
            if origin is not None and origin not in self._outcomes:
                self._expected[origin] = None
            self._is_due = True
            self._changed.notify_all()

    def note_pin(self, step: int, *, pinned: bool) -> None:
        """Note that ``step`` was pinned or unpinned locally; on rank 0."""
        with self._changed:
            (self._unpinned.discard if pinned else self._unpinned.add)(step)
            self._is_due = True
            self._changed.notify_all()

    def wait(self, origin: str, timeout_s: float) -> None:
        """Wait until the copy of attempt ``origin`` is published; see `SaveHandle.wait_mirrored`."""
        if timeout_s == math.inf:
            one_s = self._config.mirror_timeout + 2 * self._config.commit_timeout
            timeout_s = min((2 + len(self._expected)) * one_s, threading.TIMEOUT_MAX)
        with self._changed:
            if not self._changed.wait_for(lambda: origin in self._outcomes or self._over, max(0.0, timeout_s)):
                raise DeadlineExceeded(
                    f"the copy of attempt {origin} was not published in {self.storage.root} after {timeout_s:g} s; the "
                    "upload continues in the background: wait longer, or look at the network",
                    waited_for="the mirror",
                    timeout_s=timeout_s,
                )
            error = self._outcomes.get(origin, _left_to_next(origin, self.storage.root))
        if error is not None:
            raise error

    def found(self) -> list[Found]:
        """Return the checkpoints there, once what a crash left is recovered; on rank 0. Raises `StorageError`."""
        self._open()
        return self.tier.found()

    def entries(self) -> list[CheckpointEntry]:
        """Return what the mirror has, as far as that is known; on rank 0."""
        with self._changed:
            return list((self._remote or {}).values())

    def resumed_from(self, step: int | None) -> None:
        """Keep ``step`` there until something newer was uploaded, whatever `mirror_keep` says."""
        self.tier.keeper.resumed_from(step)

    def spare(self, entries: Mapping[str, CheckpointEntry], doomed: set[int]) -> set[int]:
        """Return which ``doomed`` steps may be deleted locally: not those that wait for their upload.

        At most `mirror_backlog` are spared, the newest of them.
        """
        with self._changed:
            remote, uploading, unfit = self._remote, self._uploading, set(self._unfit)
        if remote is None:  # nothing is known of it yet
            waiting = set(entries)
        else:
            waiting = set(missing(entries, remote, self._config.mirror_keep, unfit).wanted)
        rows = [entry for name, entry in entries.items() if entry.step in doomed and name in waiting]
        rows = in_order(rows, lambda entry: (entry.step, entry.lineage))
        most = self._config.mirror_backlog
        spared = {entry.step for entry in (rows[-most:] if most else [])}
        for entry in rows:
            if entry.step in spared or entry.origin == uploading:
                spared.add(entry.step)
            elif self._say_once("dropped", entry.origin):
                _log.error(
                    "step %d is deleted under %s without a copy in the mirror %s: %d newer ones wait for their upload "
                    "(mirror_backlog)",
                    *(entry.step, self._local.root, self.storage.root, most),
                )
                events.emit("mirror.dropped", step=entry.step, rank=0, attempt=entry.origin, path=self.storage.root)
        return doomed - spared

    def end_by(self, deadline: float) -> None:
        """Set when `close` gives up uploads, on the monotonic clock."""
        self._end_by = deadline

    def close(self) -> None:
        """Upload what is due until the time set by `end_by`, then release everything; idempotent.

        Raises `DeadlineExceeded` afterwards if time was up: the next start uploads what is missing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with self._changed:
            self._closing = self._is_due = True
            self._changed.notify_all()
        if self._end_by == math.inf:
            self._end_by = time.monotonic() + self._config.mirror_timeout + 2 * self._config.commit_timeout
        started = self._thread.ident is not None
        if started:
            self._thread.join(max(0.0, self._end_by - time.monotonic()))
        late = self._thread.is_alive()
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if late:
            self._engine.close(ENGINE_GRACE_S)  # first, so that an upload fails while other ranks can be told
            self._thread.join(ENGINE_GRACE_S)
        self._runner.close(0.0 if late or not started else REMOVAL_GRACE_S)
        self._engine.close(ENGINE_GRACE_S)
        self._board.close()
        if self.lock is not None and not self._thread.is_alive():
            self.lock.release()
        if late:
            raise DeadlineExceeded(
                f"uploads to {self.storage.root} have not ended in time; the next start goes on with them",
                waited_for="uploads to the mirror",
                timeout_s=self._config.mirror_timeout,
            )

    # Notes. ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        try:
            while not self._over:
                number, note = self._lead(number) if self._group.rank == 0 else self._follow(number)
                if note is None or note.kind == "end":
                    return
                self._take(note, number)
                if self._group.rank == 0 and number >= KEPT_NOTES:
                    # Not this one: a rank that has no part in an upload may not have read it when it has ended.
                    self._board.set(f"{_KEY}/first", str(number - KEPT_NOTES + 1).encode())
                    self._board.delete(f"{_KEY}/{number - KEPT_NOTES}")
                number += 1
        except HoldfastError as error:
            if not self._over:
                _log.error("uploads to the mirror %s end: %s", self.storage.root, error)
        except Exception:  # noqa: BLE001 - training goes on without uploads, and those who wait are told
            _log.exception("uploads to the mirror %s end", self.storage.root)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            if self._group.rank == 0:
                with contextlib.suppress(HoldfastError):  # however it ended: the others wait for a note
                    self._board.compare_set(f"{_KEY}/{number}", msgspec.msgpack.encode(Note("end")))

    def _lead(self, number: int) -> tuple[int, Note]:
        note = self._next()
        self._board.set(f"{_KEY}/{number}", msgspec.msgpack.encode(note))
        return number, note

    def _follow(self, number: int) -> tuple[int, Note | None]:
        """Wait for the note ``number``, or the first that is left if this rank is far behind; return its number too."""
        look_s, looks = LOOK_S * max(1.0, self._group.world / LOOKING_RANKS), 0
        while not self._over:
            data = self._board.try_get(f"{_KEY}/{number}")
            if data is not None:
                return number, _NOTE.decode(data)
            looks += 1
            if looks % LOOKS_TO_CATCH_UP == 0 and (first := self._board.try_get(f"{_KEY}/first")) is not None:
                number = max(number, int(first))
            with self._changed:
                self._changed.wait_for(lambda: self._over, look_s)
        return number, None

    def _take(self, note: Note, number: int) -> None:
        """Do what ``note`` says, and settle the outcomes."""
        for origin, why in note.passed.items():
            self._settle(origin, SaveFailed(why, step=note.step, rank=None))
        if note.kind == "trouble" and note.failure is not None:
            error = note.failure.error(step=None, what="upload")
            for origin in list(self._expected):
                self._settle(origin, error)
        if note.kind == "upload":
            with self._changed:
                self._outcomes.pop(note.origin, None)
            try:
                self._upload(note, number)
            except Exception as error:  # noqa: BLE001 - the outcome of this upload; the next one is another
                self._failed(note, error)
            else:
                self._succeeded(note)
            finally:
                with self._changed:
                    self._uploading = ""

    def _settle(self, origin: str, error: BaseException | None) -> None:
        with self._changed:
            self._expected.pop(origin, None)
            self._outcomes.pop(origin, None)
            self._outcomes[origin] = error
            if len(self._outcomes) > KEPT_OUTCOMES:
                del self._outcomes[next(iter(self._outcomes))]
            self._changed.notify_all()

    def _succeeded(self, note: Note) -> None:
        path = self.storage.path(note.name)
        if self._group.rank == 0:
            self._pause_s, self._retry_at = FIRST_PAUSE_S, math.inf
            try:
                self._after_upload(note)
            except HoldfastError as error:
                _log.warning("after the upload of step %s to %s: %s", note.step, path, error)
        events.emit("checkpoint.mirrored", step=note.step, rank=self._group.rank, attempt=note.origin, path=path)
        events.count("checkpoints_mirrored")
        self._settle(note.origin, None)

    def _failed(self, note: Note, error: Exception) -> None:
        _log.warning("step %s is not in the mirror %s yet: %s", note.step, self.storage.root, error)
        path = self.storage.path(note.name)
        fields = {"attempt": note.origin, "path": path, "error": repr(error)}
        events.emit("mirror.failed", step=note.step, rank=self._group.rank, **fields)
        self._settle(note.origin, error)
        if self._group.rank == 0:
            if isinstance(error, SaveFailed) and error.errno == errno.EBADMSG:
                with self._changed:
                    self._unfit[note.origin] = str(error)
            self._failures[note.origin] += 1
            self._is_stale = True  # it may be that another run has published there
            self._pause(note.origin)

    # Rank 0: what is next. ---------------------------------------------------------------------------------------

    def _next(self) -> Note:
        """Wait until there is something to tell the ranks."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_due or self._over,
                    max(0.0, min(self._retry_at - time.monotonic(), threading.TIMEOUT_MAX)),
                )
                if self._over:
                    return Note("end")
                self._is_due, self._retry_at = False, math.inf
                closing = self._closing
            try:
                note = self._choose()
            except (HoldfastError, OSError) as error:
                _log.warning("the mirror %s can't be compared with %s: %s", self.storage.root, self._local.root, error)
                self._pause("")
                note = Note("trouble", failure=RankFailure.of(error, rank=0)) if not closing else Note("end")
            if note is not None:
                with self._changed:
                    self._is_due = True  # there may be more
                    if note.kind == "trouble":
                        self._is_due = False
                return note
            if closing:
                return Note("end")

    def _pause(self, origin: str) -> None:
        """Try again after a pause, which grows; while closing, what failed once is left to the next start."""
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        with self._changed:
            self._is_due = self._closing
            if self._closing and origin:
                self._given_up.add(origin)

    def _choose(self) -> Note | None:
        """Return what to upload next, None if nothing is missing."""
        assert self._keeper is not None
        self._open()
        if self._is_stale:
            found = self.tier.keeper.entries()
            with self._changed:
                self._remote, self._is_stale = found, False
        self._sync_pins()
        local = self._keeper.entries()
        with self._changed:
            remote, expected = self._remote or {}, list(self._expected)
            unfit, given_up = dict(self._unfit), set(self._given_up)
        plan = missing(local, remote, self._config.mirror_keep, unfit)
        self._say_diverged(plan, local)
        names = [name for name in plan.wanted if local[name].origin not in given_up]
        passed = self._passed(local, remote, plan, expected, unfit)
        if names:
            name = min(names, key=lambda found: self._failures[local[found].origin])  # the newest of them
            entry = local[name]
            with self._changed:
                self._uploading = entry.origin
            return Note("upload", name, entry.step, entry.origin, passed)
        return Note("passed", passed=passed) if passed else None

    def _passed(
        self,
        local: Mapping[str, CheckpointEntry],
        remote: Mapping[str, CheckpointEntry],
        plan: Missing,
        expected: list[str],
        unfit: Mapping[str, str],
    ) -> dict[str, str]:
        """Return the expected attempts that won't be uploaded, each with the reason."""
        wanted = {local[name].origin for name in plan.wanted}
        there = {entry.origin for entry in remote.values()}
        steps = {entry.origin: entry.step for entry in local.values()}
        found = {}
        for origin in expected:
            if origin in wanted or origin in there:
                continue
            if origin in unfit:
                why = unfit[origin]
            elif steps.get(origin) in plan.diverged:
                why = f"{self.storage.root} has checkpoints of another run: step {steps[origin]} is not uploaded there"
            elif origin in steps:
                why = f"step {steps[origin]} is not uploaded to {self.storage.root}: newer ones wait, and mirror_keep "
                why += "wouldn't keep it"
            else:
                why = f"attempt {origin} was deleted or replaced under {self._local.root} before it was uploaded"
            found[origin] = why
        return found

    def _say_diverged(self, plan: Missing, local: Mapping[str, CheckpointEntry]) -> None:
        origins = {entry.step: entry.origin for entry in local.values()}
        for step in plan.diverged:
            if self._say_once("diverged", origins[step]):
                _log.error(
                    "step %d under %s is not uploaded to %s, which has checkpoints of another run, at that step or "
                    "from where they parted: each run needs a mirror of its own",
                    *(step, self._local.root, self.storage.root),
                )
                events.emit("mirror.diverged", step=step, rank=0, attempt=origins[step], path=self.storage.root)

    def _say_once(self, what: str, origin: str) -> bool:
        with self._changed:
            if (what, origin) in self._told:
                return False
            self._told.add((what, origin))
            return True

    def _open(self) -> None:
        """Lock and recover the mirror, and look what it has; once. Raises `StorageError` to be tried again."""
        with self._opening:
            if self._is_open:
                return
            self.storage.make_root()
            if self.lock is None:
                self.lock = self.storage.lock()
            _, self._trash = settle_root(self.storage, timeout_s=self._config.persist_timeout)
            remote = self.tier.keeper.entries()
            with self._changed:
                self._remote = remote
            self._is_open = True

    def _sync_pins(self) -> None:
        """Pin there what is pinned here; unpin only what this manager has unpinned: the local root may be new."""
        with self._changed:
            unpinned, self._unpinned = self._unpinned, set()
        here, there = Pins(self._local).all(), Pins(self.storage)
        if not here and not unpinned:
            return
        known = there.all()
        for step in here - known:
            there.set(step, pinned=True)
        for step in (unpinned - here) & known:
            there.set(step, pinned=False)

    # One upload. -------------------------------------------------------------------------------------------------

    def _upload(self, note: Note, number: int) -> None:
        """Copy one checkpoint, with all ranks; raises the same error on each."""
        attempt = self._runner.begin(f"{_KEY}/{number}/copy", partial(self._planned, note), step=note.step)
        outcome, _ = self._runner.carry(attempt, partial(self._persist, note, attempt))
        if isinstance(outcome, AttemptAborted):
            raise outcome.reason.error(step=note.step, what="upload")

    def _manifest(self, note: Note) -> Manifest:
        """Read the manifest of what is copied. Raises `StorageError` if that isn't there any more, or damaged."""
        path = self._local.path(note.name)
        try:
            manifest = read_manifest(self._local, note.name)
        except CheckpointCorrupt as error:
            raise StorageError(str(error), path=path, errno=errno.EBADMSG) from error
        if manifest is None or origin_of(manifest) != note.origin:
            message = f"{path} is not what attempt {note.origin} saved any more: it was replaced or deleted meanwhile"
            raise StorageError(message, path=path, errno=errno.ENOENT)
        return manifest

    def _planned(self, note: Note, timeout_s: float) -> Planned:
        """Return the plan of the copy, made of what the local manifest and reports say."""
        del timeout_s
        manifest = self._manifest(note)
        with self._changed:
            overwrite = note.name in (self._remote or {})
        return plan_of_copy(self._local, note.name, manifest, name=note.name, overwrite=overwrite)

    def _persist(self, note: Note, attempt: Attempt) -> list[ManifestReport]:
        """Have this rank's share of the files copied: its own, or some of those of a world of another size."""
        manifest = self._manifest(note)
        rank, world = self._group.rank, self._group.world
        lines = [line for line in manifest.reports if line.rank % world == rank]
        with directory_of(self._local, note.name) as target:
            found = [self._runner.copy(attempt, target.fd, line, world=manifest.world) for line in lines]
        events.count("bytes_mirrored", sum(line.nbytes for line in found))
        return found

    def _after_upload(self, note: Note) -> None:
        """Note the copy, then apply retention in the mirror and, as the local one may go now, here."""
        assert self._keeper is not None
        assert note.step is not None
        entry = self._keeper.entries().get(note.name)
        with self._changed:
            if entry is not None and self._remote is not None:
                self._remote = {**self._remote, note.name: entry}
        self.tier.keeper.resumed_from(None)
        if self._config.mirror_keep is not None:
            self.tier.keeper.apply_retention(note.step, self._runner.remove)
        if entry is None or self._config.mirror_keep is not None:
            remote = self.tier.keeper.entries()
            with self._changed:
                self._remote = remote
        self._keeper.apply_retention(None, self._local_trash.remove)


def _left_to_next(origin: str, root: str) -> SaveFailed:
    message = f"attempt {origin} was not uploaded to {root} before the manager was closed; the next start goes on"
    return SaveFailed(message, step=None, rank=None)
