"""Copy a published checkpoint to another place, as it is: what the ranks have written, and all that its manifest says.

    `plan_of_copy`      the plan of an attempt that copies; of a mirror's uploads, too
    `copy_checkpoint`   a copy made by one call of one process, however many ranks have saved what is copied

Guarantees: a copy is published by the same protocol as a checkpoint, all of it or nothing; engines check every byte of
it against its checksums on the way. It has an attempt of its own, so that one that was given up never stands in the way
of the next, and names what it is a copy of: whoever goes on from it goes on from the original.
Assumes: what is copied is in a directory, by the names that it was given there (`can_be_copied`).
Does not: copy exports, whose files several ranks have written parts of, or the rest of a delta's chain.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.catalog.catalog import origin_of
from holdfast.catalog.root import checked_target
from holdfast.config import config_within, limits_of
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.failure import AttemptAborted
from holdfast.coordination.group import ALONE
from holdfast.errors import CheckpointCorrupt, ConfigError, HoldfastError, SaveFailed, StorageError
from holdfast.format.manifest import COPY_OF, OVERWROTE, AttemptPlan, decode_report, report_name
from holdfast.format.sealed import xxh3_128
from holdfast.saver.delivery import THREAD_GRACE_S, DeliveryRoot
from holdfast.saver.session import Session
from holdfast.saver.startup import claim_path
from holdfast.storage.entries import MAX_REPORT_BYTES, attempt_id
from holdfast.storage.local import open_storage
from holdfast.storage.protocol import DirectoryTarget
from holdfast.validation import is_store

if TYPE_CHECKING:
    from holdfast.commit.attempt import Attempt
    from holdfast.format.manifest import Manifest, ManifestReport
    from holdfast.storage.protocol import Readable, Storage

TIMEOUT_S: Final = 86400.0
"""For all files of a copy by one call."""
ANSWER_S: Final = 600.0
"""For what takes no longer with more bytes: to claim the target, to begin, to publish."""
GIVE_UP_S: Final = 60.0
"""How long an interrupted copy may take to be given up."""
_KEY: Final = "copy"


def extra_of_copy(manifest: Manifest) -> dict[str, Any]:
    """Return the further members that the manifest of a copy has: those there, and what it is a copy of."""
    found = {key: value for key, value in manifest.extra.items() if key != OVERWROTE}
    return {**found, COPY_OF: origin_of(manifest)}


def plan_of_copy(
    source: Readable, at: str, manifest: Manifest, *, name: str, overwrite: bool
) -> tuple[AttemptPlan, dict[str, bytes]]:
    """Return the plan of an attempt to publish as ``name`` what ``manifest``, of ``at``, says; and its small files.

    Raises `StorageError`, with EBADMSG for what is damaged there.
    """
    planned = tuple(_files_of(source, at, line) for line in manifest.reports)
    contents: dict[str, bytes] = {}
    for file in manifest.files:
        path = f"{at}/{file.name}"
        contents[file.name] = data = source.read_file(path, max_bytes=max(file.size, 1))
        if len(data) != file.size or xxh3_128(data) != file.digest:
            raise _damaged(source, path)
    own = attempt_id()
    extra = extra_of_copy(manifest)
    plan = AttemptPlan(
        attempt=own,
        name=name,
        step=manifest.step,
        world=manifest.world,
        planned=planned,
        manifest=msgspec.structs.replace(manifest, name=name, attempt=own, reports=(), extra=extra),
        overwrite=overwrite,
    )
    return plan, contents


def _files_of(source: Readable, at: str, line: ManifestReport) -> tuple[tuple[str, int], ...]:
    path = f"{at}/{line.name}"
    data = source.read_file(path, max_bytes=MAX_REPORT_BYTES)
    if xxh3_128(data) != line.digest:
        raise _damaged(source, path)
    return tuple((file.name, file.size) for file in decode_report(data, path=path).files)


def _damaged(source: Readable, path: str) -> StorageError:
    where = source.path(path)
    return StorageError(f"{where} is damaged", path=where, errno=errno.EBADMSG)


def can_be_copied(directory: str, manifest: Manifest) -> bool:
    """Return True if `copy_checkpoint` can copy the published ``directory``.

    Not what is in a bucket, or was downloaded from one: the names of its files tell of the attempt.
    """
    plain = all(line.name == report_name(line.rank) for line in manifest.reports)
    return plain and manifest.kind == "checkpoint" and not manifest.chain and not is_store(directory)


def copy_checkpoint(directory: str, manifest: Manifest, target: str, *, overwrite: bool) -> None:
    """Publish a copy of ``directory``, whose ``manifest`` was read, as ``target``; returns when it is durable.

    overwrite: as for `holdfast.save`. An interrupt gives it up. Raises `ConfigError`, `CheckpointExists`,
    `CheckpointCorrupt` for what is damaged in ``directory``, `StorageError`, `SaveFailed`, `OutcomeUnknown`: nothing is
    visible at ``target`` unless this returned.
    """
    with Session(ALONE, purpose=_KEY) as session:
        session.deadline = Deadline.after(ANSWER_S)
        session.target = checked_target(target, field="target")
        claimed = claim_path(session.target, step=manifest.step, overwrite=overwrite, timeout_s=ANSWER_S)
        session.hold(claimed.release)
        copy = _Copy(session, directory, manifest, overwrite=overwrite)
        try:
            copy.run()
        except StorageError as error:
            if error.errno == errno.EBADMSG:
                raise CheckpointCorrupt(str(error), path=error.path or directory) from error
            raise


class _Copy:
    """One copy, made on a thread: an interrupt of the main one leaves no attempt half begun, or half published."""

    def __init__(self, session: Session, directory: str, manifest: Manifest, *, overwrite: bool) -> None:
        root, self._at = os.path.split(os.path.realpath(directory))
        self._source: Storage = open_storage(root)
        self._manifest, self._overwrite = manifest, overwrite
        parent, self._name = os.path.split(session.target)
        config = replace(config_within(ANSWER_S), persist_timeout=TIMEOUT_S, nice=0)  # no training runs meanwhile
        limits = dict(limits_of(config))
        self._place = DeliveryRoot(parent, session.group, config, limits=limits, managed=False, what="save")
        self._thread = threading.Thread(target=self._make, name="holdfast-copy", daemon=True)
        session.hold(self._close)
        self._over = threading.Event()
        self._begun: Attempt | None = None
        self._given_up = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Copy; raises why it was not published."""
        self._place.start()
        self._thread.start()
        try:
            self._over.wait()
        except BaseException:
            self._give_up()
            raise
        if self._error is not None:
            raise self._error

    def _give_up(self) -> None:
        self._given_up = True
        if self._begun is not None:
            with contextlib.suppress(HoldfastError):  # its engine is ended then
                self._place.engine.cancel(self._begun.id)
        self._over.wait(GIVE_UP_S)

    def _make(self) -> None:
        try:
            runner, manifest = self._place.runner, self._manifest
            plan = plan_of_copy(self._source, self._at, manifest, name=self._name, overwrite=self._overwrite)
            self._begun = attempt = runner.begin(_KEY, lambda _timeout_s: plan, step=manifest.step)
            outcome, _ = runner.carry(attempt, lambda: self._persist(attempt))
            self._error = outcome.reason.cause() if isinstance(outcome, AttemptAborted) else None
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._error = error
        finally:
            self._over.set()

    def _persist(self, attempt: Attempt) -> list[ManifestReport]:
        with directory_of(self._source, self._at) as target:
            found = []
            for line in self._manifest.reports:
                if self._given_up:
                    raise SaveFailed("it was interrupted", step=attempt.step, rank=0)
                found.append(self._place.runner.copy(attempt, target.fd, line, world=self._manifest.world))
        return found

    def _close(self) -> None:
        self._place.close(lambda: self._over.wait(THREAD_GRACE_S), late=not self._over.is_set())


def directory_of(source: Storage, at: str) -> DirectoryTarget:
    """Return the open directory ``at``, which the caller closes. Raises `ConfigError` where it isn't one."""
    target = source.target(at)
    if isinstance(target, DirectoryTarget):
        return target
    raise ConfigError(f"{source.path(at)} is in no directory, and only what is in one can be copied", field="source")
