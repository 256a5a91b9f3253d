"""Recover a root after a crash: publish complete attempts (roll forward), remove the rest. Torch-free.

    .incomplete   wait until its engines are gone, take it over (rename to .recovering), then decide by what is
                  durable; if that attempt is at the final name, this is what it was exchanged with: as .replaced
    .recovering   left by an interrupted recovery: decide in the same way
    .replaced     if the final name exists: carry over foreign entries and remove it, unless it is being read;
                  otherwise rename it back
    .trash        remove; a save reported as failed ends here and is never read again

Guarantees: an attempt is published only if its plan (or finished manifest) and every rank's report exist, every planned
file has its size, every byte of it is in one report, and every extent has its checksum; an interrupted recovery is
continued by the next call; an unreadable attempt doesn't keep others from being recovered.
Assumes: the caller holds the root's lock. An engine that still writes into an attempt does so by descriptor, so files
that it adds after the decision are in a directory that is never published.
Does not: change anything published, except to rename back what an interrupted overwrite moved aside.
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
from holdfast.commit.attempt import Actor, State, advance
from holdfast.commit.publish import find_gap, finish_manifest
from holdfast.errors import CheckpointCorrupt, CheckpointExists, HoldfastError, StorageError
from holdfast.format.manifest import (
    EXTENT_BYTES,
    OVERWROTE,
    PLAN_NAME,
    AttemptPlan,
    FilePart,
    Manifest,
    ManifestReport,
    Report,
    ReportFile,
    SparseSums,
    decode_attempt_plan,
    decode_report,
    encode_manifest,
    gap_in,
    join,
    parts_digest,
    parts_in,
    report_name,
)
from holdfast.storage import leases as lease
from holdfast.storage.entries import (
    MAX_REPORT_BYTES,
    HiddenEntry,
    attempt_at,
    hidden_name,
    is_occupied,
    published_attempt,
    read_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from holdfast.format.manifest import JoinedFile
    from holdfast.storage.protocol import Readable, Storage

    Look = Callable[[str, str], lease.LeaseState | None]
    Claim = Callable[[str], contextlib.AbstractContextManager[object]]


HASH_BYTES: Final = 256 << 10
"""Bytes hashed at a time."""


def find_bad_extent(storage: Readable, directory: str, file: ReportFile | JoinedFile) -> tuple[int, int] | None:
    """Read ``file`` below ``directory`` and return the byte range of its first corrupt extent, or None."""
    path = f"{directory}/{file.name}"
    if isinstance(file.extents, SparseSums) or len(file.extents) != 8 * -(-file.size // EXTENT_BYTES):
        return 0, file.size
    with contextlib.closing(storage.read_pieces(path, EXTENT_BYTES)) as pieces:
        for index, start in enumerate(range(0, file.size, EXTENT_BYTES)):
            end = min(start + EXTENT_BYTES, file.size)
            piece = memoryview(next(pieces, b""))
            hasher = xxhash.xxh3_64()
            for offset in range(0, end - start, HASH_BYTES):
                hasher.update(piece[offset : offset + HASH_BYTES])
            if (
                len(piece) < end - start
                or hasher.intdigest().to_bytes(8, "little") != file.extents[8 * index : 8 * index + 8]
            ):
                return start, end
    return None


_log = logging.getLogger("holdfast.recovery")
VERIFY_THREADS: Final = 4
"""Number of files of an attempt that are read concurrently: every rank of the job waits for this."""
_LOOK_S: Final = 0.1
_LOOKS: Final = 20
"""How often a lease is looked at, at most, until it counts as released: on a store each look costs."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The result of a recovery, as names below the root."""

    rolled_forward: tuple[str, ...] = ()
    """Published by this recovery."""
    restored: tuple[str, ...] = ()
    """Renamed back after an interrupted overwrite."""
    removed: tuple[str, ...] = ()
    """Hidden entries that were removed, or passed to ``remove``."""
    left: tuple[str, ...] = ()
    """Hidden entries not settled (storage error, or a save in progress); the next recovery tries again."""
    why: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The reason for each entry of ``left``."""


class _Unfinished(Exception):
    """The reason why an attempt can't be published."""


def recover(
    storage: Storage,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    matches: Callable[[str], bool] = lambda _name: True,
    lease_quiet_s: float | None = None,
    timeout_s: float = 60.0,
    look: Look | None = None,
    remove: Callable[[str], None] | None = None,
    claim: Claim | None = None,
) -> RecoveryReport:
    """Settle every hidden entry of ``storage`` whose final name ``matches``; return when all are settled.

    Waits until the holders of leases are gone, at most ``timeout_s`` in all: the kernel reports that at once; if it
    can't, a lease that is unchanged for ``lease_quiet_s`` seconds (None: the storage's) counts as released. Then reads
    every file of complete attempts. clock: monotonic, in seconds. look: observes a lease (directory, name). remove:
    called with the trash, to remove it elsewhere. claim: locks a name while it is settled; raises `RootLocked` while
    another process saves to it: its hidden entries are then left. Call it under the root's lock, from one thread.
    Raises `StorageError` if the root itself can't be read or synced.
    """
    recovery = _Recovery(storage, clock, sleep, look or storage.observe_lease, remove or storage.remove_tree)
    with contextlib.ExitStack() as claimed:
        hidden = recovery.find(matches)
        if claim is not None and hidden:
            recovery.claim({entry.name for entry in hidden}, claim, claimed)
            hidden = recovery.find(matches)  # a process that has released a name meanwhile has settled its entries
        quiet_s = storage.lease_quiet_s if lease_quiet_s is None else lease_quiet_s
        return recovery.run(hidden, quiet_s, timeout_s)


def recover_one(storage: Storage, name: str, *, timeout_s: float) -> RecoveryReport:
    """Call `recover` for ``name`` only, with this machine's clock."""
    return recover(
        storage, clock=time.monotonic, sleep=time.sleep, matches=lambda found: found == name, timeout_s=timeout_s
    )


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
        """Names that other processes are saving to, with their holders."""

    def find(self, matches: Callable[[str], bool]) -> list[HiddenEntry]:
        # Visible entries may not be durable yet: don't decide by entries that could still vanish.
        self.storage.sync_dir("")
        return [found for found in self.storage.unsettled() if matches(found.name)]

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
        # Newest first: of two complete attempts at one name only one can be published.
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
        """Settle one entry; an error is recorded and the others are still settled."""
        try:
            settle()
        except HoldfastError as error:
            self._leave(entry, str(error))

    def _leave(self, entry: HiddenEntry, why: str) -> None:
        _log.warning("%s/%s can't be settled now: %s", self.storage.root, entry.entry, why)
        self.left[entry.entry] = why

    # waiting ---------------------------------------------------------------------------------------------------

    def _wait_quiet(self, attempts: Sequence[HiddenEntry], quiet_s: float, timeout_s: float) -> list[HiddenEntry]:
        """Wait until no lease in any of ``attempts`` changes, at most ``timeout_s``; return the readable attempts.

        It is safe to continue then: an incomplete attempt is aborted, and a late engine writes to a directory that is
        never published. Waiting only saves the work of an engine that is about to finish.
        """
        deadline = self.clock() + timeout_s
        since: dict[tuple[str, str], tuple[lease.LeaseState, float]] = {}
        readable = list(attempts)
        while True:
            moving: list[str] = []
            for entry in list(readable):
                try:
                    moving += self._moving(entry, since, quiet_s)
                except HoldfastError as error:
                    readable.remove(entry)
                    self._leave(entry, str(error))
            if not moving:
                return readable
            if self.clock() >= deadline:
                _log.warning("still in progress after %g s, not waiting any longer: %s", timeout_s, ", ".join(moving))
                return readable
            pause_s = max(_LOOK_S, self.storage.lease_quiet_s / _LOOKS)
            self.sleep(min(pause_s, max(0.0, deadline - self.clock())))

    def _moving(
        self, entry: HiddenEntry, since: dict[tuple[str, str], tuple[lease.LeaseState, float]], quiet_s: float
    ) -> list[str]:
        """Return the leases of ``entry`` whose holders may still be alive, and may still add to it."""
        directory = entry.entry
        moving = [
            f"{directory}/{name}"
            for name in self.storage.list_dir(directory)
            if name.startswith(lease.LEASE_PREFIX) and not self._is_quiet(directory, name, since, quiet_s)
        ]
        return moving if moving and published_attempt(self.storage, entry.name) != entry.attempt else []

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
        # A held lock means a live process, even if its record doesn't change.
        return state.flock_free is None and now - first_s >= quiet_s

    # attempts --------------------------------------------------------------------------------------------------

    def _examine(self, entry: HiddenEntry, whole: list[tuple[Manifest, str, HiddenEntry]]) -> None:
        """Take over an attempt; add it to ``whole`` with its manifest, or move it to the trash."""
        if published_attempt(self.storage, entry.name) == entry.attempt:
            self._clear_replaced(entry)
            return
        directory = self.storage.take_over(entry)
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
        """Verify all files of every rank, and return the ranks' lines for the manifest."""
        storage = self.storage
        lines: list[ManifestReport] = []
        found: list[ReportFile] = []  # without their indices: those take gigabytes at thousands of ranks
        for rank in range(manifest.world):
            name = storage.stored_as(report_name(rank), manifest.attempt)
            data = self._read(f"{directory}/{name}", MAX_REPORT_BYTES)
            try:
                report = decode_report(data, path=storage.path(f"{directory}/{name}"))
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
        """Check that every file has its size, and that every byte is in one report and matches its checksum."""
        try:
            files = join(reported)
        except ValueError as error:
            raise _Unfinished(str(error)) from error
        gap = gap_in(files)
        if gap:
            raise _Unfinished(gap)
        # All sizes before any bytes: a missing file is found without reading the others.
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
        encoded = encode_manifest(manifest)
        storage.seal(directory, encoded, again=True)
        outcome = storage.publish(directory, entry.name, entry.attempt, encoded, overwrite=overwrites)
        if isinstance(outcome.error, CheckpointExists):
            _log.warning("attempt %s is given up: %s", entry.attempt, outcome.error)
            self._to_trash(entry, directory)
            return
        if outcome.error is not None:
            raise outcome.error
        advance(state, State.PUBLISHED, Actor.RECOVERY)
        self.rolled_forward.append(entry.name)
        path = f"{storage.root}/{entry.name}"
        _log.warning("rolled forward %s: every rank had written its part when the job died", path)
        events.emit("recovery.rolled_forward", step=manifest.step, attempt=entry.attempt, path=path)
        for name in outcome.trash:
            self._discard(name)

    # the rest --------------------------------------------------------------------------------------------------

    def _settle_replaced(self, entry: HiddenEntry) -> None:
        if not self.storage.exists(entry.entry):
            return  # settled with its attempt
        if is_occupied(self.storage, entry.name):
            self._clear_replaced(entry)
            return
        self.storage.restore(entry)
        self.restored.append(entry.name)
        path = f"{self.storage.root}/{entry.name}"
        _log.warning("restored %s: the save that was to replace it did not get that far", path)
        events.emit("recovery.restored", attempt=entry.attempt, path=path)

    def _clear_replaced(self, entry: HiddenEntry) -> None:
        """Remove ``entry``, whose name now belongs to the checkpoint that replaced it."""
        trash = self.storage.clear_replaced(entry)
        for name in trash or ():
            self._discard(name)
        if trash is None:
            self.left[hidden_name(entry.name, entry.attempt, "replaced")] = "it was replaced, and is being read"

    def _to_trash(self, entry: HiddenEntry, source: str) -> None:
        outcome = self.storage.withdraw(source, entry.name, entry.attempt)
        if not outcome.certain:
            path = f"{self.storage.root}/{entry.entry}"
            raise StorageError(f"{path} can't be given up: {outcome.why}", path=path, errno=None)
        events.emit("recovery.removed", attempt=entry.attempt, path=f"{self.storage.root}/{entry.name}")
        for trash in outcome.trash:
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
    """Return True if ``report`` (``parts``: its parts of files) covers exactly what was planned for its rank."""
    whole = {file.name: file.size for file in report.files if file.total is None}
    planned = plan.parts[report.rank] if plan.parts else ()
    return whole == dict(plan.planned[report.rank]) and sorted(parts) == sorted(planned)
