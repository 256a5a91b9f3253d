"""Settle what a crash left in a root: roll forward what is whole, remove the rest. Torch-free.

    .incomplete   wait until nobody works on it, take it in hand (rename to .recovering), then decide by what is durable
    .recovering   a recovery was interrupted: decide
    .replaced     with the final name there: remove; without it: give it the name back
    .trash        remove; a save announced as failed ends here and is never looked into

Guarantees: an attempt is published only if its plan (or finished manifest) and every rank's report are there, every
planned file has its size, every byte of it is in one report, and every extent has its checksum; interrupted anywhere,
the next call finishes the job; one attempt that can't be read keeps no other from being settled.
Assumes: the caller holds the root's lock. An engine that still writes into an attempt does so by descriptor, and what
it adds after the decision is in a directory that nobody publishes.
Does not: touch anything published, except to give an interrupted overwrite its name back.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import xxhash

from holdfast import events
from holdfast.errors import CheckpointCorrupt, CheckpointExists, HoldfastError, StorageError
from holdfast.format.manifest import (
    MANIFEST_NAME,
    PLAN_NAME,
    AttemptPlan,
    Manifest,
    ManifestReport,
    Report,
    ReportFile,
    decode_attempt_plan,
    decode_report,
    encode_manifest,
    report_name,
)
from holdfast.format.parts import FilePart, gap_in, join, parts_digest, parts_in
from holdfast.publish import (
    OVERWROTE,
    clear_scaffolding,
    find_gap,
    finish_manifest,
    publish,
    rename_once,
)
from holdfast.rereading import find_bad_extent
from holdfast.root import (
    HiddenEntry,
    attempt_at,
    hidden_name,
    is_occupied,
    parse_hidden,
    read_manifest,
)
from holdfast.storage import lease
from holdfast.transitions import Actor, State, advance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from holdfast.storage.protocol import Storage

    Look = Callable[[str, str], lease.LeaseState | None]
    Claim = Callable[[str], contextlib.AbstractContextManager[object]]

_log = logging.getLogger("holdfast.recovery")
VERIFY_THREADS: Final = 4
"""How many files of an attempt are read at once: every rank of the job waits for it."""
MAX_REPORT_BYTES: Final = 1 << 30
_LOOK_S: Final = 0.1
_FRESH_MANIFEST: Final = f".{MANIFEST_NAME}.new"


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery did, as names below the root."""

    rolled_forward: tuple[str, ...] = ()
    """Published now, although nobody who wrote them is there any more."""
    restored: tuple[str, ...] = ()
    """Given their name back after an overwrite that was interrupted."""
    removed: tuple[str, ...] = ()
    """Hidden entries that are gone, or in the hands of ``remove``."""
    left: tuple[str, ...] = ()
    """Hidden entries that could not be settled: the storage refused, or a save is at work. Tried again next time."""
    why: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Of each of ``left``, what kept it from being settled."""


class _Unfinished(Exception):
    """Says what an attempt lacks to be published."""


def recover(
    storage: Storage,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    matches: Callable[[str], bool] = lambda _name: True,
    lease_quiet_s: float = 2.0,
    timeout_s: float = 60.0,
    look: Look | None = None,
    remove: Callable[[str], None] | None = None,
    claim: Claim | None = None,
) -> RecoveryReport:
    """Settle every hidden entry of ``storage`` whose final name ``matches``; returns when all are settled.

    ``clock`` is monotonic, in seconds. Waits for leases to be quiet: at once where the kernel says that their holder is
    gone, else unmoved for ``lease_quiet_s`` seconds, at most ``timeout_s`` in all; then reads every file of whole
    attempts. ``look`` observes a lease (directory, name); ``remove`` is handed the trash, to be removed elsewhere.
    ``claim`` keeps others from saving to a name while it is settled, and raises `RootLocked` where one does: what is
    hidden under that name is then left. Call it under the root's lock, from one thread. Raises `StorageError` if the
    root itself can't be read or synced.
    """
    recovery = _Recovery(storage, clock, sleep, look or _look_at(storage), remove or storage.remove_tree)
    with contextlib.ExitStack() as claimed:
        hidden = recovery.find(matches)
        if claim is not None and hidden:
            recovery.claim({entry.name for entry in hidden}, claim, claimed)
            hidden = recovery.find(matches)  # who has let go of a name meanwhile has settled its entries
        return recovery.run(hidden, lease_quiet_s, timeout_s)


def recover_one(storage: Storage, name: str, *, timeout_s: float) -> RecoveryReport:
    """`recover` what saves to ``name`` have left, by this machine's clock; looks at nothing else in the directory."""
    return recover(
        storage, clock=time.monotonic, sleep=time.sleep, matches=lambda found: found == name, timeout_s=timeout_s
    )


def _look_at(storage: Storage) -> Look:
    return lambda directory, name: lease.observe(f"{storage.root}/{directory}", name)


class _Recovery:
    def __init__(
        self,
        storage: Storage,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        look: Look,
        remove: Callable[[str], None],
    ) -> None:
        self.storage = storage
        self.clock = clock
        self.sleep = sleep
        self.look = look
        self.remove = remove
        self.rolled_forward: list[str] = []
        self.restored: list[str] = []
        self.removed: list[str] = []
        self.left: dict[str, str] = {}
        self.unclaimed: dict[str, str] = {}
        """Names that others are saving to, and who."""

    def find(self, matches: Callable[[str], bool]) -> list[HiddenEntry]:
        # What the directory shows may not be durable yet: decide nothing by entries that could still vanish.
        self.storage.sync_dir("")
        return [found for entry in self.storage.list_dir("") if (found := parse_hidden(entry)) and matches(found.name)]

    def claim(self, names: Collection[str], claim: Claim, claimed: contextlib.ExitStack) -> None:
        for name in sorted(names):
            try:
                claimed.enter_context(claim(name))
            except HoldfastError as error:
                self.unclaimed[name] = str(error)

    def run(self, hidden: Sequence[HiddenEntry], lease_quiet_s: float, timeout_s: float) -> RecoveryReport:
        for entry in hidden:
            if entry.name in self.unclaimed:
                self._leave(entry, self.unclaimed[entry.name])
        hidden = [entry for entry in hidden if entry.name not in self.unclaimed]
        attempts = [entry for entry in hidden if entry.kind in {"incomplete", "recovering"}]
        attempts = self._wait_quiet(attempts, lease_quiet_s, timeout_s)
        whole: list[tuple[Manifest, str, HiddenEntry]] = []
        for entry in attempts:
            self._guarded(entry, functools.partial(self._examine, entry, whole))
        # The newest first: of two whole attempts at one name only one can have it.
        for manifest, directory, entry in sorted(whole, key=lambda item: item[0].created, reverse=True):
            self._guarded(entry, functools.partial(self._roll_forward, manifest, directory, entry))
        for entry in hidden:
            if entry.kind == "replaced":
                self._guarded(entry, functools.partial(self._settle_replaced, entry))
            elif entry.kind == "trash":
                self._discard(entry.entry)
        self.storage.sync_dir("")
        return RecoveryReport(
            tuple(self.rolled_forward), tuple(self.restored), tuple(self.removed), tuple(self.left), self.left
        )

    def _guarded(self, entry: HiddenEntry, settle: Callable[[], None]) -> None:
        """One entry that can't be settled keeps no other from it."""
        try:
            settle()
        except HoldfastError as error:
            self._leave(entry, str(error))

    def _leave(self, entry: HiddenEntry, why: str) -> None:
        _log.warning("%s/%s can't be settled now: %s", self.storage.root, entry.entry, why)
        self.left[entry.entry] = why

    # waiting ---------------------------------------------------------------------------------------------------

    def _wait_quiet(self, attempts: Sequence[HiddenEntry], quiet_s: float, timeout_s: float) -> list[HiddenEntry]:
        """Wait until no lease in any of ``attempts`` moves; past ``timeout_s`` go on regardless. Returns the readable.

        To go on is safe: what isn't whole is given up, and a late engine writes where nobody looks. To wait only
        spares the work of an engine that is about to finish.
        """
        deadline = self.clock() + timeout_s
        since: dict[tuple[str, str], tuple[lease.LeaseState, float]] = {}
        readable = list(attempts)
        while True:
            moving: list[str] = []
            for entry in list(readable):
                try:
                    moving += self._moving(entry.entry, since, quiet_s)
                except HoldfastError as error:
                    readable.remove(entry)
                    self._leave(entry, str(error))
            if not moving:
                return readable
            if self.clock() >= deadline:
                _log.warning("still at work after %g s, not waited for any longer: %s", timeout_s, ", ".join(moving))
                return readable
            self.sleep(min(_LOOK_S, max(0.0, deadline - self.clock())))

    def _moving(
        self, directory: str, since: dict[tuple[str, str], tuple[lease.LeaseState, float]], quiet_s: float
    ) -> list[str]:
        """The leases in ``directory`` that are not quiet yet."""
        return [
            f"{directory}/{name}"
            for name in self.storage.list_dir(directory)
            if name.startswith(lease.LEASE_PREFIX) and not self._is_quiet(directory, name, since, quiet_s)
        ]

    def _is_quiet(
        self,
        directory: str,
        name: str,
        since: dict[tuple[str, str], tuple[lease.LeaseState, float]],
        quiet_s: float,
    ) -> bool:
        state = self.look(directory, name)
        if state is None or state.flock_free:
            return True
        now = self.clock()
        seen, first_s = since.setdefault((directory, name), (state, now))
        if seen != state:
            since[directory, name] = (state, now)
            return False
        # A held lock is a live process, however long it says nothing.
        return state.flock_free is None and now - first_s >= quiet_s

    # attempts --------------------------------------------------------------------------------------------------

    def _examine(self, entry: HiddenEntry, whole: list[tuple[Manifest, str, HiddenEntry]]) -> None:
        """Take an attempt in hand; it goes to ``whole`` with its manifest, or to the trash."""
        directory = hidden_name(entry.name, entry.attempt, "recovering")
        if entry.kind == "incomplete":
            rename_once(self.storage, entry.entry, directory)
            self.storage.sync_dir("")
        try:
            manifest = self._find_whole(directory, entry)
        except _Unfinished as finding:
            _log.info("attempt %s at %s is given up: %s", entry.attempt, entry.name, finding)
            advance(advance(State.PERSISTING, State.ABORT, Actor.RECOVERY), State.REMOVED, Actor.RECOVERY)
            self._to_trash(entry, directory)
        else:
            whole.append((manifest, directory, entry))

    def _find_whole(self, directory: str, entry: HiddenEntry) -> Manifest:
        storage = self.storage
        try:
            finished = read_manifest(storage, directory)
        except CheckpointCorrupt:
            finished = None  # the coordinator died writing it
        plan = self._read_plan(directory)
        if finished is None and plan is None:
            raise _Unfinished("neither its plan nor a manifest can be read")
        manifest = finished or plan.manifest if plan else finished
        assert manifest is not None
        if (manifest.attempt, manifest.name) != (entry.attempt, entry.name):
            raise _Unfinished(f"it says that it is attempt {manifest.attempt} at {manifest.name}")
        lines = self._check_reports(directory, manifest, plan)
        if plan is not None:
            gap = find_gap(plan, lines)
            if gap:
                raise _Unfinished(gap)
            manifest = finish_manifest(plan, lines)
        elif tuple(lines) != manifest.reports:
            raise _Unfinished("its reports are not those of its manifest")
        for file in manifest.files:
            data = self._read(f"{directory}/{file.name}", file.size)
            if len(data) != file.size or xxhash.xxh3_128_hexdigest(data) != file.digest:
                raise _Unfinished(f"{file.name} is not what was committed")
        return manifest

    def _read_plan(self, directory: str) -> AttemptPlan | None:
        path = f"{directory}/{PLAN_NAME}"
        if self.storage.size(path) is None:
            return None
        try:
            data = self.storage.read_file(path, max_bytes=MAX_REPORT_BYTES)
            return decode_attempt_plan(data, path=f"{self.storage.root}/{path}")
        except CheckpointCorrupt:
            return None

    def _read(self, path: str, max_bytes: int) -> bytes:
        if self.storage.size(path) is None:
            raise _Unfinished(f"{path.rpartition('/')[2]} is missing")
        try:
            return self.storage.read_file(path, max_bytes=max_bytes)
        except StorageError as error:
            if error.errno != errno.EFBIG:
                raise
            raise _Unfinished(str(error)) from error

    def _check_reports(self, directory: str, manifest: Manifest, plan: AttemptPlan | None) -> list[ManifestReport]:
        """Every rank's line for the manifest, with all its files read and right."""
        lines: list[ManifestReport] = []
        found: list[ReportFile] = []  # without their indices: gigabytes of them at thousands of ranks
        for rank in range(manifest.world):
            name = report_name(rank)
            data = self._read(f"{directory}/{name}", MAX_REPORT_BYTES)
            try:
                report = decode_report(data, path=f"{self.storage.root}/{directory}/{name}")
            except CheckpointCorrupt as error:
                raise _Unfinished(str(error)) from error
            if (report.attempt, report.rank, report.world) != (manifest.attempt, rank, manifest.world):
                raise _Unfinished(f"{name} belongs to rank {report.rank} of {report.world}, attempt {report.attempt}")
            parts = parts_in(report.files)
            if plan is not None and rank < len(plan.planned) and not _covers_planned(report, parts, plan):
                raise _Unfinished(f"{name} doesn't cover the files planned for rank {rank}")
            if len(parts) != (len(report.files) if manifest.kind == "export" else 0):
                raise _Unfinished(f"{name} isn't the report of {manifest.kind}s")
            found.extend(report.files)
            nbytes = sum(file.size for file in report.files)
            digest = xxhash.xxh3_128_hexdigest(data)
            lines.append(ManifestReport(rank, name, len(data), digest, nbytes, parts_digest(parts)))
        self._check_files(directory, found)
        return lines

    def _check_files(self, directory: str, reported: Sequence[ReportFile]) -> None:
        """Every file is there, as large as it must be, and every byte of it in one report and as that says."""
        try:
            files = join(reported)
        except ValueError as error:
            raise _Unfinished(str(error)) from error
        gap = gap_in(files)
        if gap:
            raise _Unfinished(gap)
        # Sizes of all before bytes of any: a missing file is found without reading the others.
        for file in files:
            size = self.storage.size(f"{directory}/{file.name}")
            if size != file.size:
                raise _Unfinished(f"{file.name} has {size} bytes, expected {file.size}")
        pool = ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="holdfast-recovery")
        try:
            findings = pool.map(functools.partial(find_bad_extent, self.storage, directory), files)
            for file, bad in zip(files, findings, strict=True):
                if bad is not None:
                    raise _Unfinished(f"{file.name} is damaged in bytes {bad[0]} to {bad[1]}")
        finally:
            pool.shutdown(cancel_futures=True)

    def _roll_forward(self, manifest: Manifest, directory: str, entry: HiddenEntry) -> None:
        storage = self.storage
        overwrites = OVERWROTE in manifest.extra
        occupied = is_occupied(storage, entry.name)
        if occupied and (not overwrites or (attempt_at(storage, entry.name) or "") != manifest.extra[OVERWROTE]):
            _log.info("attempt %s at %s is given up: something newer is there", entry.attempt, entry.name)
            self._to_trash(entry, directory)
            return
        state = advance(State.REPORTED, State.COMMIT, Actor.RECOVERY)
        self._write_manifest(directory, manifest)
        clear_scaffolding(storage, directory)
        try:
            trash = publish(storage, directory, entry.name, entry.attempt, overwrite=overwrites)
        except CheckpointExists as error:
            _log.warning("attempt %s is given up: %s", entry.attempt, error)
            self._to_trash(entry, directory)
            return
        advance(state, State.PUBLISHED, Actor.RECOVERY)
        self.rolled_forward.append(entry.name)
        path = f"{storage.root}/{entry.name}"
        _log.warning("rolled forward %s: every rank had written its part when the job died", path)
        events.emit("recovery.rolled_forward", step=manifest.step, attempt=entry.attempt, path=path)
        for name in trash:
            self._discard(name)

    def _write_manifest(self, directory: str, manifest: Manifest) -> None:
        """Written anew even if one is there: that one's bytes may never have reached the disk."""
        fresh = f"{directory}/{_FRESH_MANIFEST}"
        self.storage.unlink(fresh)
        self.storage.write_file(fresh, encode_manifest(manifest))
        self.storage.rename(fresh, f"{directory}/{MANIFEST_NAME}")
        self.storage.sync_dir(directory)

    # the rest --------------------------------------------------------------------------------------------------

    def _settle_replaced(self, entry: HiddenEntry) -> None:
        if not self.storage.exists(entry.entry):
            return  # settled with its attempt
        if is_occupied(self.storage, entry.name):
            self._to_trash(entry, entry.entry)
            return
        rename_once(self.storage, entry.entry, entry.name)
        self.storage.sync_dir("")
        self.restored.append(entry.name)
        path = f"{self.storage.root}/{entry.name}"
        _log.warning("restored %s: the save that was to replace it did not get that far", path)
        events.emit("recovery.restored", attempt=entry.attempt, path=path)

    def _to_trash(self, entry: HiddenEntry, source: str) -> None:
        trash = hidden_name(entry.name, entry.attempt, "trash")
        rename_once(self.storage, source, trash)
        self.storage.sync_dir("")
        events.emit("recovery.removed", attempt=entry.attempt, path=f"{self.storage.root}/{entry.name}")
        self._discard(trash)

    def _discard(self, name: str) -> None:
        try:
            self.remove(name)
        except StorageError as error:
            _log.warning("%s/%s could not be removed: %s", self.storage.root, name, error)
            self.left[name] = str(error)
        else:
            self.removed.append(name)


def _covers_planned(report: Report, parts: Sequence[FilePart], plan: AttemptPlan) -> bool:
    """Whether ``report``, of which ``parts`` are parts of files, covers what was planned for its rank, and no more."""
    whole = {file.name: file.size for file in report.files if file.total is None}
    planned = plan.parts[report.rank] if plan.parts else ()
    return whole == dict(plan.planned[report.rank]) and sorted(parts) == sorted(planned)
