"""The acts on storage that make an attempt a checkpoint; shared by commit and recovery. Torch-free.

Guarantees: at every moment, and with any un-fsynced rename lost, either the old or the new checkpoint is at the final
name, or both lie complete under hidden names that a recovery finds. An error means that nothing visible has changed,
but for `OutcomeUnknown`, which says that it can't be told.
Assumes: the caller holds the root's lock and has had COMMIT decided.
Does not: decide, verify, or remove anything but scaffolding.
"""

from __future__ import annotations

import errno
import itertools
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import CheckpointExists, OutcomeUnknown, StorageError
from holdfast.format.manifest import PLAN_NAME, AttemptPlan, Manifest, ManifestReport, report_name
from holdfast.format.parts import parts_digest, tiling_fault
from holdfast.root import attempt_at, hidden_name, is_occupied
from holdfast.storage.lease import LEASE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast.commit")
OVERWROTE: Final = "overwrote"
"""Key of `Manifest.extra`: id of the attempt whose checkpoint this one takes the place of, empty for a foreign one."""


def note_overwritten(storage: Storage, plan: AttemptPlan) -> AttemptPlan:
    """``plan`` with what it is to overwrite noted: a recovery must never put it over anything newer."""
    if not plan.overwrite or not is_occupied(storage, plan.name):
        return plan
    extra = {**plan.manifest.extra, OVERWROTE: attempt_at(storage, plan.name) or ""}
    return msgspec.structs.replace(plan, manifest=msgspec.structs.replace(plan.manifest, extra=extra))


def find_gap(plan: AttemptPlan, reports: Sequence[ManifestReport]) -> str | None:
    """What of ``plan`` the ``reports`` don't cover, in words; None when they cover all of it. Pure."""
    if len(reports) != plan.world or len(plan.planned) != plan.world:
        return f"{len(reports)} reports for {len(plan.planned)} planned ranks, expected {plan.world}"
    fault = tiling_fault(itertools.chain.from_iterable(plan.parts))
    if fault is not None:
        return fault
    parts_of_ranks = plan.parts or ((),) * plan.world
    for rank, (report, files, parts) in enumerate(zip(reports, plan.planned, parts_of_ranks, strict=True)):
        if report.rank != rank or report.name != report_name(rank):
            return f"report {report.name!r} of rank {report.rank} where {report_name(rank)!r} was expected"
        planned = sum(size for _, size in files) + sum(part.size for part in parts)
        if report.nbytes != planned:
            return f"rank {rank} reported {report.nbytes} bytes, planned were {planned}"
        if report.parts != parts_digest(parts):
            return f"rank {rank} reported other parts of files than were planned for it"
    return None


def finish_manifest(plan: AttemptPlan, reports: Sequence[ManifestReport]) -> Manifest:
    """The manifest to publish."""
    return msgspec.structs.replace(plan.manifest, reports=tuple(reports))


def clear_scaffolding(storage: Storage, directory: str) -> None:
    """Remove what is of no use once published (the plan, leases that were left behind); durable on return."""
    for entry in storage.list_dir(directory):
        if entry == PLAN_NAME or entry.removeprefix(".").startswith(LEASE_PREFIX):
            storage.unlink(f"{directory}/{entry}")
    storage.sync_dir(directory)


def rename_once(storage: Storage, source: str, target: str) -> None:
    """Rename; an error for a rename that has happened all the same (NFS repeats an answer it lost) is none."""
    try:
        storage.rename(source, target)
    except StorageError as error:
        if error.errno != errno.ENOENT or storage.exists(source) or not storage.exists(target):
            raise


def publish(storage: Storage, directory: str, name: str, attempt: str, *, overwrite: bool) -> tuple[str, ...]:
    """Give the complete ``directory`` of ``attempt`` its final ``name``; durable on return.

    Returns the entries of the root that may now be removed: what was overwritten. Raises `CheckpointExists` or
    `StorageError` when nothing visible has changed, `OutcomeUnknown` when that can't be said.
    """
    replaced = hidden_name(name, attempt, "replaced")
    moved = overwrite and is_occupied(storage, name)
    try:
        if moved:
            rename_once(storage, name, replaced)
            storage.sync_dir("")
        _rename_in(storage, directory, name, attempt)
    except (StorageError, CheckpointExists) as error:
        if moved and not _put_back(storage, replaced, name):
            message = (
                f"attempt {attempt} could not be given the name {storage.root}/{name}, and what was there could not be "
                f"put back ({error}): both are whole, under hidden names"
            )
            raise OutcomeUnknown(message, attempt=attempt) from error
        raise
    try:
        storage.sync_dir("")
    except StorageError as error:
        message = f"{storage.root}/{name} has its final name, but that could not be made durable: {error}"
        raise OutcomeUnknown(message, attempt=attempt) from error
    return (_to_trash(storage, replaced, name, attempt),) if moved else ()


def withdraw(storage: Storage, directory: str, name: str, attempt: str) -> tuple[str, ...] | None:
    """Rename what ``attempt`` wrote to ``directory`` to the trash; durable on return.

    Returns the entries of the root that may now be removed. None if it can't be made certain that nothing of the
    attempt is visible, nor left where a recovery would roll it forward: one that is nowhere may be in its hands.
    """
    target = hidden_name(name, attempt, "trash")
    try:
        if storage.exists(directory):
            rename_once(storage, directory, target)
        storage.sync_dir("")
        in_trash = storage.exists(target)
        visible = attempt_at(storage, name) == attempt
    except StorageError as error:
        _log.warning("attempt %s could not be moved to the trash: %s", attempt, error)
        return None
    return (target,) if in_trash and not visible else None


def _rename_in(storage: Storage, directory: str, name: str, attempt: str) -> None:
    try:
        storage.rename(directory, name)
    except StorageError as error:
        if attempt_at(storage, name) == attempt:
            return  # it has happened: a repeated answer
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}:
            path = f"{storage.root}/{name}"
            message = f"{path} came to exist while it was being saved; published data is never replaced like this"
            raise CheckpointExists(message, path=path) from error
        raise


def _put_back(storage: Storage, replaced: str, name: str) -> bool:
    """True if what was at ``name`` is there again, or still."""
    try:
        if storage.exists(replaced):
            if storage.exists(name):
                _log.error("%s could not be put back: something else is at %s by now", replaced, name)
                return False
            rename_once(storage, replaced, name)
    except StorageError as error:
        _log.error("%s could not be put back as %s; the next start settles it: %s", replaced, name, error)
        return False
    try:
        storage.sync_dir("")
    except StorageError as error:
        # A power cut may take it back to the hidden name, from where a recovery puts it here again.
        _log.warning("%s is at its name again, but that may not be durable: %s", name, error)
    return True


def _to_trash(storage: Storage, replaced: str, name: str, attempt: str) -> str:
    trash = hidden_name(name, attempt, "trash")
    try:
        rename_once(storage, replaced, trash)
    except StorageError as error:
        _log.warning("%s could not be moved to the trash: %s", replaced, error)
        return replaced
    return trash
