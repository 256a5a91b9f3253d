"""What was committed, as bytes: the manifest, the reports, the attempt's plan file. Torch-free, no I/O.

    holdfast.json        `Manifest`: step, world, metrics, versions, and each report with its size and digest
    rank-00007.report    `Report`: what one rank wrote: files, checksums, and its `RankIndex`
    .plan                `AttemptPlan`: pre-written when an attempt begins, removed before it is published

Guarantees: encoding is deterministic and decoding gives back equal values (metrics too, infinities and NaN included); a
bit flipped anywhere in any of these files is detected; what was decoded is in bounds and makes sense by itself: names
are plain file names, counts match, every offset lies inside its file, no size is trusted that the bytes don't bear out.
Does not: compare with other files (that is verifying) or decide what a missing one means (``commit`` does).
"""

from __future__ import annotations

import json
import math
import re
from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.sealed import (
    Check,
    check_json_seal,
    require_version,
    seal,
    seal_head,
    seal_json,
    seal_tail,
    unseal,
)
from holdfast.plan.structure import PathItem, rank_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FORMAT: Final = 1
"""Of all three files together: raised when a reader of the old one couldn't make sense of the new one."""
EXTENT_BYTES = 1 << 20
SUM_BYTES: Final = 8
MANIFEST_NAME = "holdfast.json"
MANIFEST_HEAD_BYTES: Final = 4096
"""Within these `attempt_in` finds the attempt, whatever the checkpoint is called."""
PLAN_NAME = ".plan"
DIMENSIONS_MAX: Final = 1024
"""Far more than anybody uses, few enough to multiply."""
METADATA_NAME = ".metadata"

_REPORT_MAGIC: Final = b"HFrport"
_PLAN_MAGIC: Final = b"HFplan\0"
_HEAD: Final = re.compile(rb'\{\n  "format": \d+,\n  "name": "(?:[^"\\]|\\.)*",\n  "attempt": "([^"\\]+)",\n')
_NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_T = TypeVar("_T")


class IndexTensor(msgspec.Struct, frozen=True, array_like=True):
    name: str
    path: tuple[PathItem, ...]
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    record_offset: int
    payload_offset: int
    nbytes: int
    record_end: int


class IndexObject(msgspec.Struct, frozen=True, array_like=True):
    name: str
    path: tuple[PathItem, ...]
    file: int
    offset: int
    capacity: int


class RankIndex(msgspec.Struct, frozen=True, array_like=True):
    """What lies where in a rank's files: static while the structure stands, so rendered once a plan."""

    tensors: tuple[IndexTensor, ...]
    objects: tuple[IndexObject, ...]


class ReportFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size: int
    extents: bytes
    """xxh3_64 of each 1 MiB extent of the file, in order, 8 bytes little-endian each."""


class Report(msgspec.Struct, frozen=True):
    attempt: str
    step: int | None
    rank: int
    world: int
    files: tuple[ReportFile, ...]
    tensor_sums: bytes
    """xxh3_64 of each tensor payload of the index, in order, 8 bytes little-endian each."""
    index: bytes
    """An encoded `RankIndex`, opaque to the engine."""


class ManifestReport(msgspec.Struct, frozen=True):
    """One rank's line in the manifest."""

    rank: int
    name: str
    size: int
    digest: str
    """xxh3_128 of the report file, hexadecimal."""
    nbytes: int
    """Bytes of data files that the report covers."""


class ManifestFile(msgspec.Struct, frozen=True):
    """A file of the checkpoint that no report covers, such as ``.metadata``."""

    name: str
    size: int
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    format: int
    name: str
    attempt: str
    step: int | None
    world: int
    created: str
    """UTC, ISO 8601, by the coordinator's clock; never used for decisions between hosts."""
    metrics: dict[str, float]
    resumable: bool
    """False for a model-only save: it is not what a run resumes from."""
    versions: dict[str, str]
    reports: tuple[ManifestReport, ...]
    files: tuple[ManifestFile, ...]
    extra: dict[str, Any] = {}


class AttemptPlan(msgspec.Struct, frozen=True):
    """Everything recovery needs to finish an attempt nobody is left to finish."""

    attempt: str
    name: str
    step: int | None
    world: int
    planned: tuple[tuple[tuple[str, int], ...], ...]
    """For each rank the (name, size) of each data file its report must cover."""
    manifest: Manifest
    """The manifest to publish, with ``reports`` still empty."""
    overwrite: bool = False


def report_name(rank: int) -> str:
    """``rank-00007.report``: the file name of a rank's report."""
    return f"{rank_label(rank)}.report"


# manifest ------------------------------------------------------------------------------------------------------


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of ``holdfast.json``: valid, indented JSON, one line a report, closed by a digest of itself.

    JSON has no infinities and no NaN: metrics that are one are strings, ``"inf"``, ``"-inf"`` or ``"nan"``.

    Raises:
        ConfigError: a metric isn't a number, or ``extra`` isn't JSON.
    """
    members = [
        ("format", _json(manifest.format)),
        ("name", _json(manifest.name)),
        ("attempt", _json(manifest.attempt)),
        ("step", _json(manifest.step)),
        ("world", _json(manifest.world)),
        ("created", _json(manifest.created)),
        ("metrics", _json({name: _metric(name, value) for name, value in manifest.metrics.items()})),
        ("resumable", _json(manifest.resumable)),
        ("versions", _json(manifest.versions)),
        ("reports", _json_lines(manifest.reports)),
        ("files", _json_lines(manifest.files)),
        ("extra", _json(manifest.extra)),
    ]
    return seal_json(members)


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    """The manifest in ``data``; ``path`` is for messages.

    Raises:
        CheckpointCorrupt: foreign, damaged, edited, or its contents don't fit together.
        ConfigError: whole, but written by a version of Holdfast whose format this one doesn't read.
    """
    check_json_seal(data, what="manifest", path=path)
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} isn't a manifest: {error}", path=path) from error
    require_version(document.get("format"), FORMAT, what="manifest", path=path)
    metrics = document.get("metrics")
    if isinstance(metrics, dict):
        document["metrics"] = {
            name: _NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in metrics.items()
        }
    try:
        manifest = msgspec.convert(document, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} isn't a manifest: {error}", path=path) from error
    check = Check("manifest", path)
    _check_manifest(manifest, check)
    check.equal("its number of reports", len(manifest.reports), manifest.world)
    return manifest


def attempt_in(head: bytes) -> str | None:
    """The attempt that the manifest is of that starts with ``head``; None if that isn't the start of a manifest.

    Nothing is checked: a whole manifest shows by `decode_manifest` whether it is right.
    """
    found = _HEAD.match(head)
    return None if found is None else found[1].decode()


def _check_manifest(manifest: Manifest, check: Check) -> None:
    check.plain_name(manifest.name)
    check.plain_name(manifest.attempt)
    check.that(manifest.world >= 1, f"its world has {manifest.world} ranks")
    for rank, report in enumerate(manifest.reports):
        if report.rank != rank or report.name != report_name(rank) or min(report.size, report.nbytes) < 0:
            _refuse_line(rank, report, check)
        check.digest(report.digest)
    for file in manifest.files:
        check.plain_name(file.name)
        check.that(file.name not in (MANIFEST_NAME, PLAN_NAME), f"{file.name!r} is no file that it could be of")
        check.that(file.size >= 0, f"file {file.name} has a negative size")
        check.digest(file.digest)
    check.unique([report.name for report in manifest.reports] + [file.name for file in manifest.files])


def _refuse_line(rank: int, report: ManifestReport, check: Check) -> None:
    check.equal(f"the rank of report {rank}", report.rank, rank)
    check.equal(f"the name of report {rank}", report.name, report_name(rank))
    check.that(report.size >= 0 and report.nbytes >= 0, f"report {report.name} has a negative size")


def _metric(name: str, value: float) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric {name!r} is {value!r}, which isn't a number", field="metrics") from error
    return number if math.isfinite(number) else str(number)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{value!r:.200} can't go into a manifest, which is JSON: {error}", field="extra") from error


def _json_lines(structs: Iterable[msgspec.Struct]) -> str:
    encoder = msgspec.json.Encoder()
    lines = [
        line.decode() if (line := encoder.encode(struct)).isascii() else json.dumps(msgspec.structs.asdict(struct))
        for struct in structs
    ]
    return "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")


# reports -------------------------------------------------------------------------------------------------------


def encode_report(report: Report) -> bytes:
    """The content of a report file: msgpack between a magic number and a digest."""
    return b"".join(report_parts(report))


def report_parts(report: Report) -> tuple[bytes, bytes, bytes]:
    """`encode_report` in three parts to write one after the other; the large one is ``report.index`` itself, uncopied.

    What makes a report is a small process, and an index of 100,000 tensors is 15 MB.
    """
    nbytes = len(report.index)
    head = _pack(msgspec.structs.replace(report, index=b""))
    assert head.endswith(b"\xc4\x00"), "the index is the last field"
    # msgpack's three ways to say "n bytes follow"; like msgspec, the shortest that fits
    code, width = (0xC4, 1) if nbytes < 1 << 8 else (0xC5, 2) if nbytes < 1 << 16 else (0xC6, 4)
    opening = seal_head(_REPORT_MAGIC, FORMAT) + head[:-2] + bytes((code,)) + nbytes.to_bytes(width, "big")
    return opening, report.index, seal_tail(opening, report.index)


def decode_report(data: bytes, *, path: str) -> Report:
    """The report in ``data``, its index still encoded (see `read_index`); ``path`` is for messages.

    Raises:
        CheckpointCorrupt: foreign, damaged, or its contents don't fit together.
        ConfigError: whole, but written by a version of Holdfast whose format this one doesn't read.
    """
    report = _unpack(unseal(_REPORT_MAGIC, FORMAT, data, what="report", path=path), Report, "report", path)
    check = Check("report", path)
    check.plain_name(report.attempt)
    check.that(0 <= report.rank < report.world, f"it is rank {report.rank}'s of {report.world}")
    check.unique(file.name for file in report.files)
    for file in report.files:
        check.plain_name(file.name)
        check.that(_may_hold_data(file.name), f"{file.name!r} is the name of something else than data")
        check.that(file.size >= 0, f"file {file.name} has a negative size")
        check.equal(
            f"the checksums of {file.name}, in bytes", len(file.extents), -(-file.size // EXTENT_BYTES) * SUM_BYTES
        )
    check.that(len(report.tensor_sums) % SUM_BYTES == 0, "its tensor checksums are cut short")
    return report


def _may_hold_data(name: str) -> bool:
    """Whether a report may cover a file of this name: not what is read for what it says, nor what is hidden."""
    return not name.startswith(".") and name != MANIFEST_NAME and not name.endswith(".report")


def encode_index(index: RankIndex) -> bytes:
    """What goes into a report as ``index``; rendered once a plan."""
    return _pack(index)


def decode_index(data: bytes, *, file_sizes: Sequence[int], path: str) -> RankIndex:
    """The index in ``data``, every box and offset in it checked against ``file_sizes`` (bytes, in the report's order).

    Raises:
        CheckpointCorrupt: damaged, or something in it lies outside its file or its tensor.
    """
    index = _unpack(data, RankIndex, "index", path)
    for tensor in index.tensors:
        fault = _tensor_fault(tensor, file_sizes)
        if fault is not None:
            raise CheckpointCorrupt(
                f"{path}: the index is wrong about tensor {tensor.name!r}: {fault}", path=path, tensor=tensor.name
            )
    for item in index.objects:
        known = 0 <= item.file < len(file_sizes) and min(item.offset, item.capacity) >= 0
        if not known or item.offset + item.capacity > file_sizes[item.file]:
            raise CheckpointCorrupt(
                f"{path}: the index is wrong about object {item.name!r}: its record lies outside its file",
                path=path,
                tensor=item.name,
            )
    return index


def read_index(report: Report, *, path: str) -> RankIndex:
    """The index of a decoded report, checked against the report's own files and checksums. Raises as `decode_index`."""
    index = decode_index(report.index, file_sizes=[file.size for file in report.files], path=path)
    check = Check("report", path)
    check.equal("its tensor checksums, in bytes", len(report.tensor_sums), len(index.tensors) * SUM_BYTES)
    return index


def _tensor_fault(tensor: IndexTensor, file_sizes: Sequence[int]) -> str | None:
    itemsize = ITEMSIZE.get(tensor.dtype)
    if itemsize is None:
        return f"dtype {tensor.dtype!r} is unknown"
    if not len(tensor.shape) == len(tensor.offsets) == len(tensor.sizes):
        return "shape, offsets and sizes differ in length"
    if len(tensor.shape) > DIMENSIONS_MAX or prod(max(1, length) for length in tensor.shape) * itemsize >> 63:
        return f"no tensor has the shape {tensor.shape!r:.200}"
    for length, offset, size in zip(tensor.shape, tensor.offsets, tensor.sizes, strict=True):
        if offset < 0 or size < 0 or offset + size > length:
            return f"the box at {tensor.offsets} of {tensor.sizes} isn't inside {tensor.shape}"
    if prod(tensor.sizes) * itemsize != tensor.nbytes:
        return f"{tensor.sizes} of {tensor.dtype} isn't {tensor.nbytes:,} bytes"
    if not 0 <= tensor.file < len(file_sizes):
        return f"file {tensor.file} of {len(file_sizes)}"
    end = tensor.payload_offset + tensor.nbytes
    if not 0 <= tensor.record_offset <= tensor.payload_offset <= end <= tensor.record_end <= file_sizes[tensor.file]:
        return (
            f"record {tensor.record_offset:,} to {tensor.record_end:,} with its payload at {tensor.payload_offset:,} "
            f"isn't inside a file of {file_sizes[tensor.file]:,} bytes"
        )
    return None


# the plan of an attempt ----------------------------------------------------------------------------------------


def encode_attempt_plan(plan: AttemptPlan) -> bytes:
    """The content of ``.plan``: msgpack between a magic number and a digest."""
    return seal(_PLAN_MAGIC, FORMAT, _pack(plan))


def decode_attempt_plan(data: bytes, *, path: str) -> AttemptPlan:
    """The attempt's plan in ``data``; ``path`` is for messages.

    Raises:
        CheckpointCorrupt: foreign, damaged, or its contents don't fit together.
        ConfigError: whole, but written by a version of Holdfast whose format this one doesn't read.
    """
    what = "plan of an attempt"
    plan = _unpack(unseal(_PLAN_MAGIC, FORMAT, data, what=what, path=path), AttemptPlan, what, path)
    check = Check(what, path)
    check.plain_name(plan.name)
    check.plain_name(plan.attempt)
    check.equal("its number of ranks", len(plan.planned), plan.world)
    check.unique(name for files in plan.planned for name, _ in files)
    for files in plan.planned:
        for name, size in files:
            check.plain_name(name)
            check.that(size >= 0, f"file {name} has a negative size")
    require_version(plan.manifest.format, FORMAT, what="manifest", path=path)
    _check_manifest(plan.manifest, check)
    for field in ("name", "attempt", "step", "world"):
        check.equal(f"its manifest's {field}", getattr(plan.manifest, field), getattr(plan, field))
    check.that(not plan.manifest.reports, "its manifest has reports already")
    return plan


# what they share -----------------------------------------------------------------------------------------------


def _pack(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's index can't be written: {error}") from error


def _unpack(data: bytes | memoryview, kind: type[_T], what: str, path: str) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path}: its {what} can't be read: {error}", path=path) from error
