"""Publish an attempt on a storage: the coordinator's part, for attempts of any kind. Torch-free.

    make_attempt(storage, plan, prewritten)    make its directory and the files known before any rank writes
    find_gap(plan, reports)                    check that the reports cover the plan
    Publication                                seal -> publish, or withdraw

Guarantees: the files of `make_attempt` are durable when it returns; an invalid export is refused before that. A failure
is certain, or it is `OutcomeUnknown`: a refused attempt is withdrawn before it is reported as failed, and one that may
have been published, or may be published later, is neither reported as failed nor changed again.
Assumes: the caller holds the lock of the root or the name, and COMMIT was decided before it calls `publish`.
Does not: know how a storage makes something visible, or read what it publishes.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

import msgspec

from holdfast.catalog.root import ask_each
from holdfast.errors import ConfigError, OutcomeUnknown
from holdfast.format.manifest import (
    OVERWROTE,
    PLAN_NAME,
    AttemptPlan,
    Manifest,
    ManifestReport,
    encode_attempt_plan,
    encode_manifest,
    is_report_of,
    may_hold_data,
    parts_digest,
    report_name,
    tiling_fault,
)
from holdfast.storage.entries import attempt_at, is_occupied
from holdfast.storage.leases import LEASE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from holdfast.errors import CheckpointExists, StorageError
    from holdfast.storage.protocol import Storage

_log = logging.getLogger("holdfast.commit")


class Publication:
    """One attempt at publishing ``name``, on its coordinator; for one thread at a time.

    Attributes:
        directory: of its files, below the root of ``storage``.
        trash: entries of the root that may be removed.
    """

    def __init__(self, storage: Storage, name: str, attempt: str, *, step: int | None) -> None:
        self._storage = storage
        self.name = name
        self.attempt = attempt
        self.step = step
        self.directory = storage.directory_of(name, attempt)
        self.trash: tuple[str, ...] = ()
        self.may_be_published = False
        """True if it was published, or that is unknown: it must not be withdrawn any more."""
        self._manifest = b""

    def seal(self, manifest: Manifest, *, alone: bool = False) -> None:
        """Write the manifest into the directory to publish, of which all is there.

        alone: as for `Storage.require_all`. Raises `StorageError`, `CheckpointExists`.
        """
        self._manifest = encode_manifest(manifest)
        self._storage.seal(self.directory, self._manifest)
        self._storage.require_all(self.directory, manifest, alone=alone)

    def publish(self, *, overwrite: bool) -> StorageError | CheckpointExists | None:
        """Publish; return None when that is durable, an error if it was refused and nothing is visible.

        Raises `OutcomeUnknown` if neither is certain.
        """
        self.may_be_published = True
        try:
            outcome = self._storage.publish(
                self.directory, self.name, self.attempt, self._manifest, overwrite=overwrite
            )
        except Exception as error:
            raise outcome_unknown(
                self._storage,
                self.name,
                self.attempt,
                f"publishing broke off: {type(error).__name__}: {error}",
                step=self.step,
            ) from error
        self.trash, refusal = outcome.trash, outcome.error
        if outcome.kind == "unknown" or isinstance(refusal, OutcomeUnknown):
            raise OutcomeUnknown(str(refusal), attempt=self.attempt, step=self.step) from refusal
        self.may_be_published = outcome.kind == "published"
        return refusal

    def withdraw(self) -> bool:
        """Withdraw the attempt; return True if it certainly is never published."""
        if self.may_be_published:  # a request in flight may still publish it
            return False
        try:
            outcome = self._storage.withdraw(self.directory, self.name, self.attempt)
        except Exception as error:  # noqa: BLE001 - as if the storage had refused: not certain
            _log.warning("attempt %s could not be withdrawn: %r", self.attempt, error)
            return False
        self.trash = outcome.trash or self.trash
        if not outcome.certain:
            _log.warning("attempt %s could not be withdrawn: %s", self.attempt, outcome.why)
        return outcome.certain


def outcome_unknown(storage: Storage, name: str, attempt: str, why: str, *, step: int | None) -> OutcomeUnknown:
    """Return the error for an attempt whose outcome is unknown."""
    message = (
        f"whether attempt {attempt} at {storage.root}/{name} was published is unknown: {why}; "
        "training may go on, and the next start of a writing manager settles it"
    )
    return OutcomeUnknown(message, attempt=attempt, step=step)


def check_export(plan: AttemptPlan, prewritten: Mapping[str, bytes]) -> None:
    """Raise `ConfigError` unless an export's file names are valid and its ranks' parts add up to whole files. Pure."""
    fault = tiling_fault(itertools.chain.from_iterable(plan.parts))
    listed = {file.name: file.size for file in plan.manifest.files}
    data = {part.name for parts in plan.parts for part in parts}
    directories = {name.partition("/")[0] for name in prewritten if "/" in name}
    if fault is None and listed != {name: len(content) for name, content in prewritten.items()}:
        fault = "its manifest lists other small files than those given"
    for name in (*prewritten, *data):
        if not _may_be_exported(name) or ("/" in name and name in data):
            fault = f"{name!r} can't be a file of an export: it is hidden, too deep, or reserved by Holdfast"
        elif name in directories or (name in data and name in prewritten):
            fault = f"{name!r} is there twice"
    if fault is not None:
        raise ConfigError(f"the export {plan.name} can't be written: {fault}", field="assets")


def _may_be_exported(name: str) -> bool:
    components = name.split("/")
    plain = all(component and not component.startswith(".") and "\0" not in component for component in components)
    return plain and len(components) <= 2 and may_hold_data(name) and not name.startswith(LEASE_PREFIX)


def make_attempt(storage: Storage, plan: AttemptPlan, prewritten: Mapping[str, bytes]) -> bytes:
    """Begin the attempt of ``plan``: make its directory with the plan and ``prewritten`` files; durable on return.

    ``prewritten``: contents by name, an export's with at most one directory in front. Returns the plan's file. Raises
    as `check_export` before anything is made, and `StorageError`.
    """
    if plan.manifest.kind == "export":
        check_export(plan, prewritten)
    encoded = encode_attempt_plan(plan)
    directory = storage.directory_of(plan.name, plan.attempt)
    storage.begin(plan.name, plan.attempt, recoverable=True)
    below = sorted({f"{directory}/{name.partition('/')[0]}" for name in prewritten if "/" in name})
    for made in below:
        storage.make_dir(made)
    files = [(PLAN_NAME, encoded), *prewritten.items()]
    ask_each(storage, files, lambda file: storage.write_file(f"{directory}/{file[0]}", file[1]))
    for made in below:
        storage.sync_dir(made)
    storage.sync_dir(directory)
    return encoded


def note_overwritten(storage: Storage, plan: AttemptPlan) -> AttemptPlan:
    """Record in ``plan`` what it overwrites, so that a recovery never replaces anything newer with it."""
    before = attempt_at(storage, plan.name) if plan.overwrite else None
    if before is None and not (plan.overwrite and is_occupied(storage, plan.name)):
        return plan
    extra = {**plan.manifest.extra, OVERWROTE: before or ""}
    return msgspec.structs.replace(plan, manifest=msgspec.structs.replace(plan.manifest, extra=extra))


def find_gap(plan: AttemptPlan, reports: Sequence[ManifestReport]) -> str | None:
    """Describe the part of ``plan`` that the ``reports`` don't cover; None if they cover all of it. Pure."""
    if len(reports) != plan.world or len(plan.planned) != plan.world:
        return f"{len(reports)} reports for {len(plan.planned)} planned ranks, expected {plan.world}"
    fault = tiling_fault(itertools.chain.from_iterable(plan.parts))
    if fault is not None:
        return fault
    parts_of_ranks = plan.parts or ((),) * plan.world
    for rank, (report, files, parts) in enumerate(zip(reports, plan.planned, parts_of_ranks, strict=True)):
        if report.rank != rank or not is_report_of(report.name, rank, plan.attempt):
            return f"report {report.name!r} of rank {report.rank} where {report_name(rank)!r} was expected"
        planned = sum(size for _, size in files) + sum(part.size for part in parts)
        if report.nbytes != planned:
            return f"rank {rank} reported {report.nbytes} bytes, planned {planned}"
        if report.parts != parts_digest(parts):
            return f"rank {rank} reported other parts of files than were planned for it"
    return None


def finish_manifest(plan: AttemptPlan, reports: Sequence[ManifestReport]) -> Manifest:
    """Build the manifest to publish."""
    return msgspec.structs.replace(plan.manifest, reports=tuple(reports))
