"""An attempt whose ranks talk through DCP's own collectives: begun, published or withdrawn by the coordinator alone.

DCP gathers what every rank has written before it lets the coordinator finish, and raises on all ranks if one has
failed. That is the vote; no board is needed. But DCP tells the coordinator of success only: after a failure nothing of
ours is called any more. So an attempt is also withdrawn when its `Writer` begins another save or is freed, when the
interpreter exits, and when another save to the same path begins in this process; what a crash leaves, the next save
to that path finds.

Guarantees: nothing is visible at the final name unless `publish` returned, or raised `OutcomeUnknown`. An attempt that
was not published can't be rolled forward later: what recovery needs for that, the manifest, is written only once all
ranks have reported. Until it ends the path is locked, and a lease keeps recoveries of other processes away.
Assumes one live attempt a path and process: a second one takes over, and the first then fails.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import torch

from holdfast import events
from holdfast._version import __version__
from holdfast.errors import CheckpointExists, OutcomeUnknown, SaveFailed, StorageError
from holdfast.format.manifest import (
    FORMAT,
    MANIFEST_NAME,
    METADATA_NAME,
    AttemptPlan,
    Manifest,
    ManifestFile,
    ManifestReport,
    encode_manifest,
    report_name,
)
from holdfast.format.sealed import xxh3_128
from holdfast.publish import clear_scaffolding, finish_manifest, note_overwritten, publish, withdraw
from holdfast.recovery import recover_one
from holdfast.root import attempt_id, hidden_name, is_occupied
from holdfast.storage.lease import LEASE_PREFIX, Heartbeat, hold, new_record
from holdfast.storage.local import LocalStorage, create_root
from holdfast.storage.lock import RootLock, refuse_managed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger("holdfast.dcp")
_LEASE_NAME: Final = f"{LEASE_PREFIX}coordinator"
_LEASE_WAIT_S: Final = 2.0

_live: dict[str, DcpAttempt] = {}
_live_lock = threading.RLock()  # reentrant: a Writer may be freed, and its attempt withdrawn, in the middle of anything


def refuse_occupied(target: str) -> None:
    """Raise `CheckpointExists` if something is at ``target`` that publishing would have to take the place of."""
    parent, name = os.path.split(target)
    if is_occupied(LocalStorage(parent), name):
        raise CheckpointExists(
            f"{target} exists already; choose another path, or pass overwrite=True to replace it as a whole",
            path=target,
        )


class DcpAttempt:
    """One attempt, as its coordinator holds it; made by `begin`, over after `publish` or `give_up`. Thread-safe.

    ``id`` is its own, ``directory`` is where ranks write, below the parent of its target.
    """

    def __init__(self, target: str, manifest: Manifest, lock: RootLock, *, overwrite: bool) -> None:
        parent, self.name = os.path.split(target)
        self.id = manifest.attempt
        self.directory = hidden_name(self.name, self.id, "incomplete")
        self._target = target
        self._storage = LocalStorage(parent)
        self._manifest = manifest
        self._overwrite = overwrite
        self._lock = lock
        self._lease: Heartbeat | None = None
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
        overwrite: bool,
        timeout_s: float,
    ) -> DcpAttempt:
        """Lock ``target``, settle what a crash left of it, and make the attempt's directory, durably.

        timeout_s: how long to wait for a process that still works on an earlier attempt. Raises `CheckpointExists`,
        `ConfigError`, `RootLocked`, `StorageError`.
        """
        parent, name = os.path.split(target)
        create_root(parent)
        _take_over(target)
        lock = RootLock.acquire_beside(target)
        try:
            recover_one(LocalStorage(parent), name, timeout_s=timeout_s)
            if overwrite:
                refuse_managed(target)
            else:
                refuse_occupied(target)
            attempt = cls(target, _manifest(name, world, step, metrics), lock, overwrite=overwrite)
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

    def publish(self, reports: Sequence[ManifestReport], metadata: bytes) -> None:
        """Write the manifest and ``.metadata``, and give the directory its final name; returns when that is durable.

        Raises `SaveFailed`, `CheckpointExists` or `StorageError` when nothing is visible, `OutcomeUnknown` when that
        can't be said. The attempt is over in any case.
        """
        with self._mutex:
            if self._over is not None:
                raise SaveFailed(
                    f"the save to {self._target} was given up: {self._over}. Nothing was published",
                    step=self._manifest.step,
                    rank=None,
                    path=self._target,
                )
            try:
                self._prepare(reports, metadata)
                trash = publish(self._storage, self.directory, self.name, self.id, overwrite=self._overwrite)
            except OutcomeUnknown:
                self._end("whether it was published is unknown")
                raise
            except BaseException as error:
                self._withdraw_after(error)
                raise
            self._end("it was published")
        step = self._manifest.step
        events.emit("save.published", step=step, rank=0, attempt=self.id, path=self._target)
        self._remove(trash)

    def give_up(self, why: str) -> None:
        """Move what was written to the trash and remove it, unless the attempt is over; never raises."""
        if os.getpid() != self._pid:
            return  # a forked child has a copy of this, but the attempt is its parent's
        with self._mutex:
            if self._over is not None:
                return
            self._stop_lease()
            trash = withdraw(self._storage, self.directory, self.name, self.id)
            if trash is None:
                _log.warning("attempt %s at %s is left to the next save there", self.id, self._target)
            self._remove(trash or ())
            self._end(why)
        events.emit("save.failed", step=self._manifest.step, rank=0, attempt=self.id, path=self._target, error=why)

    def _make_directory(self) -> None:
        self._storage.make_dir(self.directory)
        fd = self._storage.open_dir(self.directory)
        try:
            self._lease = Heartbeat(hold(fd, _LEASE_NAME, new_record(0)))
        finally:
            os.close(fd)

    def _prepare(self, reports: Sequence[ManifestReport], metadata: bytes) -> None:
        """Make the attempt directory what will be published, but for its name."""
        world = self._manifest.world
        lines = sorted(reports, key=lambda line: line.rank)
        if [(line.rank, line.name) for line in lines] != [(rank, report_name(rank)) for rank in range(world)]:
            raise SaveFailed(
                f"ranks {[line.rank for line in lines]} have reported to the save at {self._target}, expected each of "
                f"{world} once: does every rank save through a holdfast.dcp.Writer of its own?",
                step=self._manifest.step,
                rank=None,
                path=self._target,
            )
        if not self._overwrite:
            refuse_occupied(self._target)
        listed = ManifestFile(METADATA_NAME, len(metadata), xxh3_128(metadata))
        manifest = msgspec.structs.replace(self._manifest, files=(listed,))
        plan = note_overwritten(
            self._storage,
            AttemptPlan(self.id, self.name, manifest.step, world, (), manifest, overwrite=self._overwrite),
        )
        self._storage.write_file(f"{self.directory}/{METADATA_NAME}", metadata)
        self._storage.write_file(f"{self.directory}/{MANIFEST_NAME}", encode_manifest(finish_manifest(plan, lines)))
        self._stop_lease()
        clear_scaffolding(self._storage, self.directory)

    def _withdraw_after(self, error: BaseException) -> None:
        self._stop_lease()
        trash = withdraw(self._storage, self.directory, self.name, self.id)
        self._remove(trash or ())
        self._end(str(error))
        events.emit(
            "save.failed", step=self._manifest.step, rank=0, attempt=self.id, path=self._target, error=repr(error)
        )
        if trash is None:
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
            self._lease.stop(wait_s=_LEASE_WAIT_S)
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


def _manifest(name: str, world: int, step: int | None, metrics: Mapping[str, float]) -> Manifest:
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
    )
