"""An attempt whose ranks talk through DCP's own collectives: begun, published or withdrawn by the coordinator alone.

DCP gathers what every rank has written before it lets the coordinator finish, and raises on all ranks if one has
failed. That is the vote; no board is needed. But DCP reports only success to the coordinator: after a failure, none of
our functions is called. So an attempt is also withdrawn when its `Writer` begins another save or is freed, when the
interpreter exits, and when another save to the same path begins in this process. The next save to the path cleans up
after a crash.

Guarantees: nothing is visible at the final name unless `publish` returned, or raised `OutcomeUnknown`. An attempt that
was not published can't be rolled forward later: the manifest, which recovery needs for that, is written only once all
ranks have reported. Until it ends, the path is locked, where that can be, and a lease keeps recoveries of other
processes away.
Assumes one live attempt per path and process: a second one takes over, and the first then fails.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from holdfast import events
from holdfast._version import __version__
from holdfast.commit.publish import Publication, finish_manifest, note_overwritten
from holdfast.errors import CheckpointExists, OutcomeUnknown, SaveFailed, StorageError
from holdfast.format.manifest import (
    FORMAT,
    AttemptPlan,
    Manifest,
    ManifestFile,
    ManifestReport,
    report_name,
)
from holdfast.format.sealed import xxh3_128
from holdfast.saver.startup import claim_path
from holdfast.storage.entries import attempt_id, is_occupied
from holdfast.storage.leases import COORDINATOR_LEASE, LEASE_WAIT_S
from holdfast.storage.local import open_storage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.storage.protocol import HeldLease, StorageLock

_log = logging.getLogger("holdfast.dcp")

_live: dict[str, DcpAttempt] = {}
_live_lock = threading.RLock()  # reentrant: a Writer may be freed, and its attempt withdrawn, in the middle of anything


def refuse_occupied(target: str) -> None:
    """Raise `CheckpointExists` if something is at ``target`` that publishing would replace."""
    parent, name = os.path.split(target)
    if is_occupied(open_storage(parent), name):
        raise CheckpointExists(
            f"{target} exists already. Checkpoint already exists and overwrite=False: choose another path, or pass "
            "overwrite=True to replace it as a whole",
            path=target,
        )


class DcpAttempt:
    """One attempt, on its coordinator; made by `begin`, ended by `publish` or `give_up`. Thread-safe.

    id: of the attempt. directory: where ranks write, below the parent of the target.
    """

    def __init__(self, target: str, manifest: Manifest, lock: StorageLock, *, overwrite: bool) -> None:
        parent, self.name = os.path.split(target)
        self.id = manifest.attempt
        self._target = target
        self._storage = open_storage(parent)
        self._publication = Publication(self._storage, self.name, self.id, step=manifest.step)
        self.directory = self._publication.directory
        self._manifest = manifest
        self._overwrite = overwrite
        self._lock = lock
        self._lease: HeldLease | None = None
        self._mutex = threading.RLock()
        self._over: str | None = None
        self._pid = os.getpid()

    @classmethod
    def begin(
        cls,
        target: str,
        *,
        world: int,
        step: int | None,
        metrics: Mapping[str, float],
        extra: Mapping[str, Any],
        overwrite: bool,
        timeout_s: float,
    ) -> DcpAttempt:
        """Lock ``target``, recover what a crash left there, and make the attempt's directory, durably.

        extra: for the manifest. timeout_s: how long to wait for a process that still works on an earlier attempt.
        Raises `CheckpointExists`, `ConfigError`, `RootLocked`, `StorageError`.
        """
        _take_over(target)
        lock = claim_path(target, step=step, overwrite=overwrite, timeout_s=timeout_s)
        try:
            name = os.path.basename(target)
            attempt = cls(target, _manifest(name, world, step, metrics, extra), lock, overwrite=overwrite)
        except BaseException:
            lock.release()
            raise
        try:
            attempt._make_directory()
        except BaseException:
            attempt.give_up("it could not begin")
            raise
        with _live_lock:
            _live[target] = attempt
        events.emit("save.started", step=step, rank=0, attempt=attempt.id, path=target)
        return attempt

    def publish(self, reports: Sequence[ManifestReport], files: Mapping[str, bytes]) -> None:
        """Write the manifest and ``files``, and give the directory its final name; returns when that is durable.

        Raises `SaveFailed`, `CheckpointExists` or `StorageError` if nothing is visible, `OutcomeUnknown` if that is
        uncertain. The attempt has ended in any case.
        """
        with self._mutex:
            if self._over is not None:
                raise SaveFailed(
                    f"the save to {self._target} was aborted: {self._over}. Nothing was published",
                    step=self._manifest.step,
                    rank=None,
                    path=self._target,
                )
            try:
                self._prepare(reports, files)
                self._publish()
            except OutcomeUnknown:
                self._end("whether it was published is unknown")
                raise
            except BaseException as error:
                self._withdraw_after(error)
                raise
            self._end("it was published")
        step = self._manifest.step
        events.emit("save.published", step=step, rank=0, attempt=self.id, path=self._target)
        self._remove(self._publication.trash)

    def _publish(self) -> None:
        refusal = self._publication.publish(overwrite=self._overwrite)
        if refusal is not None:
            raise refusal

    def give_up(self, why: str) -> None:
        """Move what was written to the trash and remove it, unless the attempt has ended; never raises."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of this, but its parent owns the attempt
        with self._mutex:
            if self._over is not None:
                return
            self._stop_lease()
            if not self._publication.withdraw():
                _log.warning("attempt %s at %s is left to the next save there", self.id, self._target)
            self._remove(self._publication.trash)
            self._end(why)
        events.emit("save.failed", step=self._manifest.step, rank=0, attempt=self.id, path=self._target, error=why)

    def _make_directory(self) -> None:
        storage = self._storage
        if not storage.has_locks:  # before anybody can find the attempt, and until it ends
            self._lease = storage.hold_lease(self.directory, COORDINATOR_LEASE, rank=0)
        storage.begin(self.name, self.id, recoverable=True)
        if self._lease is None:
            self._lease = storage.hold_lease(self.directory, COORDINATOR_LEASE, rank=0)

    def _prepare(self, reports: Sequence[ManifestReport], files: Mapping[str, bytes]) -> None:
        """Give the attempt directory the contents that will be published."""
        world = self._manifest.world
        lines = sorted(reports, key=lambda line: line.rank)
        names = [self._storage.stored_as(report_name(rank), self.id) for rank in range(world)]
        if [(line.rank, line.name) for line in lines] != list(enumerate(names)):
            raise SaveFailed(
                f"ranks {[line.rank for line in lines]} have reported to the save at {self._target}, expected each of "
                f"{world} once: does every rank save through its own holdfast.dcp.Writer?",
                step=self._manifest.step,
                rank=None,
                path=self._target,
            )
        if not self._overwrite and self._storage.has_locks:  # else sealing looks
            refuse_occupied(self._target)
        files = {self._storage.stored_as(name, self.id): content for name, content in files.items()}
        listed = tuple(ManifestFile(name, len(content), xxh3_128(content)) for name, content in files.items())
        manifest = msgspec.structs.replace(self._manifest, files=listed)
        plan = note_overwritten(
            self._storage,
            AttemptPlan(self.id, self.name, manifest.step, world, (), manifest, overwrite=self._overwrite),
        )
        for name, content in files.items():
            self._storage.write_file(f"{self.directory}/{name}", content)
        if self._storage.has_locks:
            self._stop_lease()  # or its file would be published
        self._publication.seal(finish_manifest(plan, lines), alone=not self._overwrite)

    def _withdraw_after(self, error: BaseException) -> None:
        self._stop_lease()
        certain = self._publication.withdraw()
        self._remove(self._publication.trash)
        self._end(str(error))
        events.emit(
            "save.failed", step=self._manifest.step, rank=0, attempt=self.id, path=self._target, error=repr(error)
        )
        if not certain:
            raise OutcomeUnknown(
                f"the save to {self._target} failed ({error}), but what it wrote could not be moved to the trash; the "
                "next save there settles it",
                attempt=self.id,
                step=self._manifest.step,
            ) from error

    def _end(self, why: str) -> None:
        self._over = why
        self._stop_lease()
        self._lock.release()
        with _live_lock:
            if _live.get(self._target) is self:
                del _live[self._target]

    def _stop_lease(self) -> None:
        if self._lease is not None:
            self._lease.stop(wait_s=LEASE_WAIT_S)
            self._lease = None

    def _remove(self, trash: Sequence[str]) -> None:
        for entry in trash:
            try:
                self._storage.remove_tree(entry)
            except StorageError as error:
                _log.warning("%s is left to the next save there: %s", entry, error)


def _take_over(target: str) -> None:
    with _live_lock:
        earlier = _live.get(target)
    if earlier is not None:
        earlier.give_up("another save to the same path has begun in this process")


def _manifest(
    name: str, world: int, step: int | None, metrics: Mapping[str, float], extra: Mapping[str, Any]
) -> Manifest:
    return Manifest(
        format=FORMAT,
        name=name,
        attempt=attempt_id(),
        step=step,
        world=world,
        created=datetime.now(timezone.utc).isoformat(),
        metrics=dict(metrics),
        resumable=True,
        versions={"holdfast": __version__, "torch": str(torch.__version__), "numpy": np.__version__},
        reports=(),
        files=(),
        extra=dict(extra),
    )
