"""What one rank puts on an object store of one version: its data, straight from the image, and its report.

    Taken     waits for the capture that a saver makes        Upload     puts it; hashes it meanwhile

Guarantees: names carry the attempt, so two attempts never write to the same; the report is put last, and names what the
data objects are called.
Assumes: the image stands still until `Upload.put` returns.
Does not: make a version visible, or try another time.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.delivery import write_plan
from holdfast.engine.checksums import Sums, WritePlan, compile_plan, hash_unit
from holdfast.engine.messages import AddPlan
from holdfast.errors import DeadlineExceeded
from holdfast.format.manifest import ManifestReport, Report, ReportFile, encode_report, report_name
from holdfast.format.sealed import xxh3_128
from holdfast.sharing import Holding
from holdfast.storage.turns import take_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.capture import Capture, DeliveryPlan
    from holdfast.handle import SaveHandle
    from holdfast.storage.object_storage import ObjectStorage

HASH_THREADS: Final = 2
END_S: Final = 5.0
"""How long a saver gets to end a save whose capture nobody needs any more: to close it meanwhile takes longer."""


class Taken(Holding):
    """The capture that a saver makes, for who waits for it; `drop` it in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: SaveHandle | None = None
        """Of the save that makes the capture."""
        self._error: BaseException | None = None

    def refuse(self, error: BaseException) -> None:
        self._error = error
        super().refuse(error)

    def wait(self, timeout_s: float) -> Capture | None:
        """The capture, whole; None if it takes longer. Raises why there is none."""
        if not self._answered.wait(timeout_s):
            return None
        capture = self._capture
        if capture is not None and capture.error is not None:
            raise capture.error
        if self._error is not None:
            raise self._error
        return capture

    def drop(self) -> None:
        """Let go of it, or of one that is yet to come; the saver is done with it then, or as good as."""
        super().drop()
        if self.handle is not None and self._answered.is_set():
            with contextlib.suppress(DeadlineExceeded):
                self.handle.exception(END_S)


@dataclass(frozen=True, slots=True)
class _Walk:
    """How the image of a plan is hashed, and the index that its reports have."""

    plan: DeliveryPlan
    write: WritePlan
    index: bytes


class Upload:
    """Puts what one rank has of versions into ``objects``, one version after the other."""

    def __init__(self, objects: ObjectStorage) -> None:
        self._objects = objects
        self._walk: _Walk | None = None
        self._names: list[str] = []

    def names(self) -> list[str]:
        """What the last `put` may have put, below the version."""
        return self._names

    def put(self, capture: Capture, name: str, attempt: str, version: int, *, rank: int, world: int) -> ManifestReport:
        """Put the data and the report of ``rank`` as ``attempt`` at ``name``; its line of the manifest.

        Raises `StorageError`; what has been put by then stays, as `names` says.
        """
        self._names = []
        buffer, ends_s = capture.buffer, self._objects.ends_s
        if buffer is None or capture.plan is None:
            raise AssertionError("a capture without error has a plan")
        walk = self._walk
        if walk is None or walk.plan is not capture.plan:
            added = AddPlan(0, **write_plan(capture.plan, buffer))
            walk = self._walk = _Walk(capture.plan, compile_plan(added), added.index)
        image, write, sums = compat.host_memory(buffer.image.bytes_view), walk.write, Sums(walk.write)
        store, report_at = self._objects.store, report_name(rank, attempt)
        names = [_of_attempt(row.name, attempt) for row in write.files]
        self._names = [*names, report_at]
        jobs: list[Callable[[], None]] = []
        for row, at in zip(write.files, names, strict=True):
            data = image[row.image_offset : row.image_offset + row.size]
            jobs.append(partial(store.put, f"{name}/{at}", data, ends_s=ends_s))
        jobs += [partial(hash_unit, image, write, unit, sums) for unit in write.units]
        take_turns(jobs, len(write.files) + HASH_THREADS)
        files = [
            ReportFile(at, row.size, bytes(extents))
            for at, row, extents in zip(names, write.files, sums.extents, strict=True)
        ]
        report = encode_report(Report(attempt, version, rank, world, tuple(files), bytes(sums.tensors), walk.index))
        store.put(f"{name}/{report_at}", report, ends_s=ends_s)
        nbytes = sum(row.size for row in write.files)
        events.count("bytes_persisted", nbytes)
        return ManifestReport(rank, report_at, len(report), xxh3_128(report), nbytes)


def _of_attempt(name: str, attempt: str) -> str:
    """The name of a data object: ``__0_0.distcp`` as ``attempt`` puts it."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{attempt}{dot}{suffix}" if dot else f"{name}.{attempt}"


def is_of_another(name: str, attempt: str) -> bool:
    """Whether an object beside a manifest of ``attempt`` is what another attempt has put there."""
    parts = name.split(".")
    return len(parts) >= 3 and parts[-1] in {"distcp", "report"} and parts[-2] != attempt
