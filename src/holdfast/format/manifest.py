"""Encode and decode what was committed: the manifest, the reports, the attempt's plan file. Torch-free, no I/O.

    holdfast.json        `Manifest`: step, world, metrics, versions, and each report with its size and digest
    rank-00007.report    `Report`: what one rank wrote: files, checksums, and its `RankIndex`
    .plan                `AttemptPlan`: pre-written when an attempt begins, removed before it is published

Guarantees: encoding is deterministic and decoding gives back equal values (metrics too, infinities and NaN included); a
bit flipped anywhere in any of these files is detected; what was decoded is in bounds and makes sense by itself: names
are plain file names, counts match, every offset lies inside its file, no size is trusted that the bytes don't bear out.
Does not: compare with other files (that is verifying) or decide what a missing one means (``commit`` does).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, TypeVar

import msgspec

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.decoding import prepare_decoding
from holdfast.format.sealed import (
    Check,
    check_json_seal,
    require_version,
    seal,
    seal_head,
    seal_json,
    seal_tail,
    unseal,
    xxh3_128,
)
from holdfast.format.structure import KeysSpec, PathItem, key_of, rank_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# Whether what an index says of a tensor can be: its box in its shape, its record in its file. Torch-free, pure.

DIMENSIONS_MAX: Final = 1024
"""Maximum number of dimensions of a tensor."""


def tensor_fault(tensor: _TensorRow[Any], file_sizes: Sequence[int]) -> str | None:
    """Describe the error in ``tensor``, a row of an index; return None if there is none."""
    itemsize = ITEMSIZE.get(tensor.dtype)
    if itemsize is None:
        return f"dtype {tensor.dtype!r} is unknown"
    if _is_plainly_right(tensor, itemsize, file_sizes):
        return None
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


def _is_plainly_right(tensor: _TensorRow[Any], itemsize: int, file_sizes: Sequence[int]) -> bool:
    """Check a tensor that is stored whole with few operations, since this is the usual case."""
    shape, start, nbytes = tensor.shape, tensor.payload_offset, tensor.nbytes
    return (
        shape == tensor.sizes
        and len(shape) == len(tensor.offsets) < 8
        and not any(tensor.offsets)
        and (not shape or min(shape) > 0)
        and prod(shape) * itemsize == nbytes
        and 0 <= tensor.file < len(file_sizes)
        and 0 <= tensor.record_offset <= start <= start + nbytes <= tensor.record_end <= file_sizes[tensor.file]
        and nbytes < 1 << 63
    )


# Values to JSON and msgpack, and structs back, what goes wrong being an error of ours. Torch-free, no I/O.

_T = TypeVar("_T")


def metric_value(name: str, value: float) -> float | str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric {name!r} is {value!r}, which isn't a number", field="metrics") from error
    return number if math.isfinite(number) else str(number)


def json_text(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{value!r:.200} can't be stored in a manifest, which is JSON: {error}", field="extra"
        ) from error


def json_lines(structs: Iterable[msgspec.Struct]) -> str:
    encoder = msgspec.json.Encoder()
    lines = [
        line.decode() if (line := encoder.encode(struct)).isascii() else json.dumps(msgspec.structs.asdict(struct))
        for struct in structs
    ]
    return "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")


def pack(value: msgspec.Struct) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's index can't be written: {error}") from error


def unpack(data: bytes | memoryview, kind: type[_T], what: str, path: str) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{path}: its {what} can't be read: {error}", path=path) from error


# Parts of files that several ranks write together. An export's file is cut at multiples of 1 MiB, so a part consists of
# whole extents, its checksums are those of the file, and no page of the file is written by two ranks.

BLOCK_BYTES: Final = 1 << 20
"""Parts start, and but for the last of a file end, on a multiple of this; an extent, too."""
_SUM_BYTES: Final = 8


class FilePart(msgspec.Struct, frozen=True, array_like=True, order=True):
    """``size`` bytes from ``offset`` of the data file ``name``, which has ``total`` bytes in all."""

    name: str
    offset: int
    size: int
    total: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def is_whole(self) -> bool:
        return self.offset == 0 and self.size == self.total


@dataclass(frozen=True, slots=True)
class SparseSums:
    """Checksums of some of a file's extents, to be asked for like the bytes of all of them; of the others, none.

    What a report says of a file's size may be anything: no memory is taken by it.
    """

    starts: tuple[int, ...]
    """Where the sums of each part would begin among those of the whole file, ascending."""
    sums: tuple[bytes, ...]

    def __getitem__(self, wanted: slice) -> bytes:
        at = bisect_right(self.starts, wanted.start) - 1
        return self.sums[at][wanted.start - self.starts[at] : wanted.stop - self.starts[at]] if at >= 0 else b""


@dataclass(frozen=True, slots=True)
class JoinedFile:
    """A data file as its reports tell it together. ``gaps``: byte ranges that no report covers."""

    name: str
    size: int
    extents: bytes | SparseSums
    gaps: tuple[tuple[int, int], ...] = ()


def part_fault(part: FilePart) -> str | None:
    """Why there can be no such part, in words; None if there can."""
    if min(part.offset, part.size, part.total) < 0 or part.end > part.total:
        return f"bytes {part.offset} to {part.end} of {part.name} don't lie in a file of {part.total}"
    if part.size == 0 and part.total > 0:
        return f"the part at byte {part.offset} of {part.name} is empty"
    if part.offset % BLOCK_BYTES or (part.end % BLOCK_BYTES and part.end != part.total):
        return (
            f"bytes {part.offset} to {part.end} of {part.name} ({part.total} bytes) are no part: one starts and ends "
            f"on a multiple of {BLOCK_BYTES}, or ends with the file"
        )
    return None


def tiling_fault(parts: Iterable[FilePart]) -> str | None:
    """Describe bytes that are in none of ``parts`` or in two of them; None if each is in exactly one."""
    end, last = 0, None
    for part in sorted(parts):
        if last is None or part.name != last.name:
            if last is not None and end != last.total:
                return _missing(last.name, end, last.total)
            end = 0
        elif part.total != last.total:
            return f"{part.name} is said to have {last.total} bytes, and to have {part.total}"
        elif part.total == 0:
            return f"{part.name} is empty, and there twice"
        fault = part_fault(part) or _misplaced(part, end)
        if fault is not None:
            return fault
        end, last = part.end, part
    return _missing(last.name, end, last.total) if last is not None and end != last.total else None


def parts_digest(parts: Iterable[FilePart]) -> str:
    """32 hexadecimal digits that stand for these parts, in whatever order; empty where there are none."""
    ordered = sorted(parts)
    return xxh3_128(msgspec.msgpack.encode(ordered)) if ordered else ""


def parts_in(files: Iterable[ReportFile]) -> tuple[FilePart, ...]:
    """Return the files of a report that are parts of files, in its order."""
    return tuple(FilePart(file.name, file.offset, file.size, file.total) for file in files if file.total is not None)


def join(files: Iterable[ReportFile]) -> list[JoinedFile]:
    """Join the ``files`` of several reports, merging parts of one file, in order of first appearance.

    Raises `ValueError` saying which file where two cover the same bytes, or disagree about its size.
    """
    found: dict[str, list[ReportFile]] = {}
    for file in files:
        found.setdefault(file.name, []).append(file)
    return [_joined(name, rows) for name, rows in found.items()]


def _joined(name: str, rows: list[ReportFile]) -> JoinedFile:
    if rows[0].total is None:
        if len(rows) > 1:
            raise ValueError(f"{name} is covered twice, as a whole file")
        return JoinedFile(name, rows[0].size, rows[0].extents)
    total = rows[0].total
    gaps: list[tuple[int, int]] = []
    end = 0
    rows = sorted(rows, key=attrgetter("offset", "size"))
    for row in rows:
        if row.total != total:
            raise ValueError(f"{name} is said to have {total} bytes, and to have {row.total}")
        if row.offset < end:
            raise ValueError(f"bytes {row.offset} to {end} of {name} are covered twice")
        if row.offset > end:
            gaps.append((end, row.offset))
        end = row.offset + row.size
    if end < total:
        gaps.append((end, total))
    sums = tuple(row.extents for row in rows)
    if not gaps:
        return JoinedFile(name, total, b"".join(sums))
    starts = tuple(row.offset // BLOCK_BYTES * _SUM_BYTES for row in rows)
    return JoinedFile(name, total, SparseSums(starts, sums), tuple(gaps))


def gap_in(files: Iterable[JoinedFile]) -> str | None:
    """Describe bytes of a file that no report covers; None if there are none."""
    for file in files:
        for start, end in file.gaps:
            return _missing(file.name, start, end)
    return None


def _misplaced(part: FilePart, end: int) -> str | None:
    if part.offset > end:
        return _missing(part.name, end, part.offset)
    if part.offset < end:
        return f"bytes {part.offset} to {min(end, part.end)} of {part.name} are in two parts"
    return None


def _missing(name: str, start: int, end: int) -> str:
    return f"bytes {start} to {end} of {name} are in no part"


FORMAT: Final = 1
"""Format version of all three files, increased on incompatible changes."""
EXPORT_FORMAT: Final = 2
"""Format version of exports: readers that only know checkpoints must refuse them."""
DELTA_FORMAT: Final = 3
"""Format version of a manifest with a chain: who doesn't know chains would take its records for the state."""
EXTENT_BYTES = BLOCK_BYTES
PAGE_BYTES: Final = 4096
"""What O_DIRECT and memory maps want offsets, sizes and memory to be multiples of."""
SUM_BYTES: Final = 8
MANIFEST_NAME = "holdfast.json"
MANIFEST_HEAD_BYTES: Final = 4096
"""Within these `attempt_in` finds the attempt, whatever the checkpoint is called."""
PLAN_NAME = ".plan"
METADATA_NAME = ".metadata"
OVERWROTE: Final = "overwrote"
"""Key of `Manifest.extra`: id of the attempt whose checkpoint this one replaces, empty for a foreign one."""
COPY_OF: Final = "copy_of"
"""Key of `Manifest.extra`: id of the attempt that saved what this is a copy of."""

_REPORT_MAGIC: Final = b"HFrport"
_PLAN_MAGIC: Final = b"HFplan\0"
_HEAD: Final = re.compile(rb'\{\n  "format": \d+,\n  "name": "(?:[^"\\]|\\.)*",\n  "attempt": "([^"\\]+)",\n')
_VOID: Final = re.compile(rb'\{\n  "void": "([0-9a-f]{12})",\n')
_NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FORMATS: Final = {"checkpoint": FORMAT, "export": EXPORT_FORMAT}
_KNOWN: Final = (FORMAT, EXPORT_FORMAT, DELTA_FORMAT)
Kind = Literal["checkpoint", "export"]
"""What was committed: something to resume from or load, or an export, whose files several ranks write parts of."""


_Path = TypeVar("_Path")


class _TensorRow(msgspec.Struct, Generic[_Path], frozen=True, array_like=True, gc=False):
    """Where one box of a tensor lies, in a file and in the whole."""

    name: str
    path: _Path
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    record_offset: int
    payload_offset: int
    nbytes: int
    record_end: int


class IndexTensor(_TensorRow[tuple[PathItem, ...]], frozen=True, array_like=True, gc=False):
    """A tensor in a `RankIndex`."""


class IndexObject(msgspec.Struct, frozen=True, array_like=True, gc=False):
    name: str
    path: tuple[PathItem, ...]
    file: int
    offset: int
    capacity: int


class RankIndex(msgspec.Struct, frozen=True, array_like=True):
    """Byte ranges of tensors and objects in a rank's files: static while the structure stays the same, so rendered once
    per plan.
    """

    tensors: tuple[IndexTensor, ...]
    objects: tuple[IndexObject, ...]
    mappings: tuple[KeysSpec, ...] = ()
    """Keys that names don't tell. Readers that don't know this field take it for what follows, and skip it."""


class ListedTensor(_TensorRow[msgspec.Raw], frozen=True, array_like=True, gc=False):
    """An `IndexTensor` whose path stays encoded."""


class ListedIndex(msgspec.Struct, frozen=True, array_like=True):
    """A `RankIndex` as `list_index` reads it."""

    tensors: tuple[ListedTensor, ...]
    objects: tuple[IndexObject, ...]


class _NamesOnly(msgspec.Struct, frozen=True, array_like=True):
    """A `RankIndex` without ``mappings``, as it is encoded: it stays what it was."""

    tensors: tuple[IndexTensor, ...]
    objects: tuple[IndexObject, ...]


class ReportFile(msgspec.Struct, frozen=True, array_like=True):
    """A data file that a rank wrote; or ``size`` bytes of one from ``offset`` on, if ``total`` isn't None."""

    name: str
    size: int
    extents: bytes
    """xxh3_64 of each 1 MiB extent, in order, 8 bytes little-endian each."""
    offset: int = 0
    total: int | None = None
    """Bytes of the whole file, which other ranks write other parts of."""


class _WholeFile(msgspec.Struct, frozen=True, array_like=True):
    """A `ReportFile` that is a whole file, as it is encoded: reports of checkpoints stay what they were."""

    name: str
    size: int
    extents: bytes


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


class ManifestReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's line in the manifest."""

    rank: int
    name: str
    size: int
    digest: str
    """xxh3_128 of the report file, hexadecimal."""
    nbytes: int
    """Bytes of data files that the report covers."""
    parts: str = ""
    """`parts_digest` of the parts of files that it covers; empty for whole files."""


class ManifestFile(msgspec.Struct, frozen=True):
    """A file of the checkpoint that no report covers, such as ``.metadata``."""

    name: str
    """In an export there may be one directory in it: ``additional_chat_templates/x.jinja``."""
    size: int
    digest: str


class ChainMember(msgspec.Struct, frozen=True):
    """A version that a delta needs, beside it in the same root."""

    name: str
    step: int
    attempt: str
    digest: str
    """xxh3_128 of its manifest, hexadecimal."""


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
    kind: Kind = "checkpoint"
    chain: tuple[ChainMember, ...] = ()
    """What this is a delta to: a whole checkpoint (the anchor), and the deltas on the way from it to this one."""


class AttemptPlan(msgspec.Struct, frozen=True):
    """Everything that recovery needs to finish an attempt whose processes are gone."""

    attempt: str
    name: str
    step: int | None
    world: int
    planned: tuple[tuple[tuple[str, int], ...], ...]
    """For each rank the (name, size) of each data file its report must cover."""
    manifest: Manifest
    """The manifest to publish, with ``reports`` still empty."""
    overwrite: bool = False
    parts: tuple[tuple[FilePart, ...], ...] = ()
    """Of an export, for each rank the parts that its report must cover; ``planned`` is empty for each rank then."""


def report_name(rank: int, attempt: str = "") -> str:
    """``rank-00007.report``: the file name of a rank's report; where attempts share a place, with the attempt's id."""
    return f"{rank_label(rank)}.{attempt}.report" if attempt else f"{rank_label(rank)}.report"


def is_report_of(name: str, rank: int, attempt: str) -> bool:
    """Return True if ``name`` is a valid name for the report of ``rank`` in the manifest of ``attempt``."""
    return name == report_name(rank) or name == report_name(rank, attempt)


def format_of(kind: Kind, chain: Sequence[ChainMember] = ()) -> int:
    """The ``format`` of a manifest of this kind, or with a chain."""
    return DELTA_FORMAT if chain else _FORMATS[kind]


# manifest ------------------------------------------------------------------------------------------------------


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of ``holdfast.json``: valid, indented JSON, one line a report, closed by a digest of itself.

    JSON has no infinities and no NaN: metrics that are one are strings, ``"inf"``, ``"-inf"`` or ``"nan"``.

    Raises:
        ConfigError: a metric isn't a number, or ``extra`` isn't JSON.
    """
    members = [
        ("format", json_text(manifest.format)),
        ("name", json_text(manifest.name)),
        ("attempt", json_text(manifest.attempt)),
        ("step", json_text(manifest.step)),
        ("world", json_text(manifest.world)),
        ("created", json_text(manifest.created)),
        ("metrics", json_text({name: metric_value(name, value) for name, value in manifest.metrics.items()})),
        ("resumable", json_text(manifest.resumable)),
        ("versions", json_text(manifest.versions)),
        ("reports", json_lines(manifest.reports)),
        ("files", json_lines(manifest.files)),
        ("extra", json_text(manifest.extra)),
    ]
    if manifest.kind != "checkpoint":
        members.append(("kind", json_text(manifest.kind)))
    if manifest.chain:
        members.append(("chain", json_lines(manifest.chain)))
    return seal_json(members)


def decode_manifest(data: bytes, *, path: str) -> Manifest:
    """The manifest in ``data``; ``path`` is for messages.

    Raises:
        CheckpointCorrupt: foreign, damaged, edited, or its contents don't fit together.
        ConfigError: whole, but written by a version of Holdfast whose format this one doesn't read.
    """
    check_json_seal(data, what="manifest", path=path)
    try:
        document = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} isn't a manifest: {error}", path=path) from error
    versions = document.get("versions")
    writer = versions.get("holdfast") if isinstance(versions, dict) else None
    require_version(document.get("format"), _KNOWN, what="manifest", path=path, writer=writer)
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


def encode_void(name: str, attempt: str, *, why: str) -> bytes:
    """What is put in a manifest's place at ``name`` so that ``attempt`` is never published there; no manifest."""
    return seal_json([("void", json_text(attempt)), ("name", json_text(name)), ("why", json_text(why))])


def void_in(head: bytes) -> str | None:
    """The attempt that the void is of that starts with ``head``; None if that isn't the start of a void."""
    found = _VOID.match(head)
    return None if found is None else found[1].decode()


def _check_manifest(manifest: Manifest, check: Check) -> None:
    check.plain_name(manifest.name)
    check.plain_name(manifest.attempt)
    check.equal("its format", manifest.format, format_of(manifest.kind, manifest.chain))
    check.that(not manifest.chain or manifest.kind == "checkpoint", "it is an export, and has a chain")
    for member in manifest.chain:
        check.plain_name(member.name)
        check.plain_name(member.attempt)
        check.digest(member.digest)
    check.unique([*(member.name for member in manifest.chain), manifest.name])
    check.that(manifest.world >= 1, f"its world has {manifest.world} ranks")
    for rank, report in enumerate(manifest.reports):
        named = is_report_of(report.name, rank, manifest.attempt)
        if report.rank != rank or not named or min(report.size, report.nbytes) < 0:
            _refuse_line(rank, report, named, check)
        check.digest(report.digest)
    for file in manifest.files:
        if manifest.kind == "export":
            check.plain_path(file.name)
            check.that(may_hold_data(file.name), f"{file.name!r} is hidden, or the name of something of Holdfast's")
        else:
            check.plain_name(file.name)
        check.that(file.name not in (MANIFEST_NAME, PLAN_NAME), f"{file.name!r} is no file that it could be of")
        check.that(file.size >= 0, f"file {file.name} has a negative size")
        check.digest(file.digest)
    check.unique([report.name for report in manifest.reports] + [file.name for file in manifest.files])


def _refuse_line(rank: int, report: ManifestReport, named: bool, check: Check) -> None:  # noqa: FBT001
    check.equal(f"the rank of report {rank}", report.rank, rank)
    if not named:
        check.equal(f"the name of report {rank}", report.name, report_name(rank))
    check.that(report.size >= 0 and report.nbytes >= 0, f"report {report.name} has a negative size")


# reports -------------------------------------------------------------------------------------------------------


def encode_report(report: Report) -> bytes:
    """The content of a report file: msgpack between a magic number and a digest."""
    return b"".join(report_parts(report))


def report_parts(report: Report) -> tuple[bytes, bytes, bytes]:
    """`encode_report` in three parts to write one after the other; the large one is ``report.index`` itself, uncopied.

    What makes a report is a small process, and an index of 100,000 tensors is 15 MB.
    """
    nbytes = len(report.index)
    version = EXPORT_FORMAT if parts_in(report.files) else FORMAT
    files = [_WholeFile(row.name, row.size, row.extents) if row.total is None else row for row in report.files]
    head = pack(msgspec.structs.replace(report, index=b"", files=files))
    assert head.endswith(b"\xc4\x00"), "the index is the last field"
    # msgpack's three ways to say "n bytes follow"; like msgspec, the shortest that fits
    code, width = (0xC4, 1) if nbytes < 1 << 8 else (0xC5, 2) if nbytes < 1 << 16 else (0xC6, 4)
    opening = seal_head(_REPORT_MAGIC, version) + head[:-2] + bytes((code,)) + nbytes.to_bytes(width, "big")
    return opening, report.index, seal_tail(opening, report.index)


def decode_report(data: bytes, *, path: str) -> Report:
    """The report in ``data``, its index still encoded (see `read_index`); ``path`` is for messages.

    Raises:
        CheckpointCorrupt: foreign, damaged, or its contents don't fit together.
        ConfigError: whole, but written by a version of Holdfast whose format this one doesn't read.
    """
    version, content = unseal(_REPORT_MAGIC, _KNOWN, data, what="report", path=path)
    report = unpack(content, Report, "report", path)
    check = Check("report", path)
    check.plain_name(report.attempt)
    check.that(0 <= report.rank < report.world, f"it is rank {report.rank}'s of {report.world}")
    parts = parts_in(report.files)
    check.equal("its number of parts", len(parts), len(report.files) if version == EXPORT_FORMAT else 0)
    check.unique(file.name for file in (report.files if not parts else ()))
    for part in parts:
        fault = part_fault(part)
        check.that(fault is None, str(fault))
    for file in report.files:
        check.plain_name(file.name)
        check.that(may_hold_data(file.name), f"{file.name!r} is the name of something else than data")
        check.that(file.size >= 0, f"file {file.name} has a negative size")
        check.equal(
            f"the checksums of {file.name}, in bytes", len(file.extents), -(-file.size // EXTENT_BYTES) * SUM_BYTES
        )
    check.that(len(report.tensor_sums) % SUM_BYTES == 0, "its tensor checksums are cut short")
    return report


def may_hold_data(name: str) -> bool:
    """Return True if a report may cover a file of this name: not a metadata file and not a hidden one."""
    return not name.startswith(".") and name != MANIFEST_NAME and not name.endswith(".report")


def encode_index(index: RankIndex) -> bytes:
    """Encode the ``index`` member of a report; done once per plan."""
    return pack(index if index.mappings else _NamesOnly(index.tensors, index.objects))


def decode_index(data: bytes, *, file_sizes: Sequence[int], path: str) -> RankIndex:
    """The index in ``data``, every box and offset in it checked against ``file_sizes`` (bytes, in the report's order).

    Raises:
        CheckpointCorrupt: damaged, or something in it lies outside its file or its tensor.
    """
    index = unpack(data, RankIndex, "index", path)
    _check_index(index, file_sizes, path)
    try:
        return msgspec.structs.replace(index, mappings=tuple(map(_with_keys, index.mappings)))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path}: the index is invalid for a mapping's keys: {error}", path=path) from error


def _check_index(index: RankIndex | ListedIndex, file_sizes: Sequence[int], path: str) -> None:
    plain: set[tuple[object, ...]] = set()
    """What `tensor_fault` found right by itself: most tensors are of few shapes, cut alike."""
    for tensor in index.tensors:
        kind = (tensor.dtype, tensor.shape, tensor.offsets, tensor.sizes, tensor.nbytes)
        if kind in plain and 0 <= tensor.file < len(file_sizes):
            start, end = tensor.payload_offset, tensor.payload_offset + tensor.nbytes
            if 0 <= tensor.record_offset <= start and end <= tensor.record_end <= file_sizes[tensor.file]:
                continue
        fault = tensor_fault(tensor, file_sizes)
        if fault is not None:
            raise CheckpointCorrupt(
                f"{path}: the index is invalid for tensor {tensor.name!r}: {fault}", path=path, tensor=tensor.name
            )
        plain.add(kind)
    for item in index.objects:
        known = 0 <= item.file < len(file_sizes) and min(item.offset, item.capacity) >= 0
        if not known or item.offset + item.capacity > file_sizes[item.file]:
            raise CheckpointCorrupt(
                f"{path}: the index is invalid for object {item.name!r}: its record is outside its file",
                path=path,
                tensor=item.name,
            )


def _with_keys(item: KeysSpec) -> KeysSpec:
    return KeysSpec(item.path, tuple(map(key_of, item.keys)))


def read_index(report: Report, *, path: str) -> RankIndex:
    """The index of a decoded report, checked against the report's own files and checksums. Raises as `decode_index`."""
    index = decode_index(report.index, file_sizes=[file.size for file in report.files], path=path)
    _check_belongs(report, index, path)
    return index


def list_index(report: Report, *, path: str) -> ListedIndex:
    """`read_index` without paths and mappings: a third of the time, for who lists a checkpoint. Raises as it."""
    index = unpack(report.index, ListedIndex, "index", path)
    _check_index(index, [file.size for file in report.files], path)
    _check_belongs(report, index, path)
    return index


def _check_belongs(report: Report, index: RankIndex | ListedIndex, path: str) -> None:
    check = Check("report", path)
    check.equal("its tensor checksums, in bytes", len(report.tensor_sums), len(index.tensors) * SUM_BYTES)
    # What an index says is about offsets in whole files; an export's tensors are in the headers of its files.
    check.that(not parts_in(report.files) or not (index.tensors or index.objects), "its index is about parts of files")


# the plan of an attempt ----------------------------------------------------------------------------------------


def encode_attempt_plan(plan: AttemptPlan) -> bytes:
    """The content of ``.plan``: msgpack between a magic number and a digest."""
    return seal(_PLAN_MAGIC, plan.manifest.format, pack(plan))


def decode_attempt_plan(data: bytes, *, path: str) -> AttemptPlan:
    """The attempt's plan in ``data``; ``path`` is for messages.

    Raises:
        CheckpointCorrupt: foreign, damaged, or its contents don't fit together.
        ConfigError: whole, but written by a version of Holdfast whose format this one doesn't read.
    """
    what = "plan of an attempt"
    version, content = unseal(_PLAN_MAGIC, _KNOWN, data, what=what, path=path)
    plan = unpack(content, AttemptPlan, what, path)
    check = Check(what, path)
    check.plain_name(plan.name)
    check.plain_name(plan.attempt)
    check.equal("its number of ranks", len(plan.planned), plan.world)
    check.unique(name for files in plan.planned for name, _ in files)
    for files in plan.planned:
        for name, size in files:
            check.plain_name(name)
            check.that(size >= 0, f"file {name} has a negative size")
    require_version(plan.manifest.format, (version,), what="manifest", path=path)
    _check_manifest(plan.manifest, check)
    _check_parts(plan, check)
    for field in ("name", "attempt", "step", "world"):
        check.equal(f"its manifest's {field}", getattr(plan.manifest, field), getattr(plan, field))
    check.that(not plan.manifest.reports, "its manifest has reports already")
    return plan


def _check_parts(plan: AttemptPlan, check: Check) -> None:
    """Check that an export, and nothing else, is planned in parts."""
    export = plan.manifest.kind == "export"
    check.equal("its number of ranks with parts", len(plan.parts), plan.world if export else 0)
    check.that(not export or not any(plan.planned), "it is an export, with files that belong to one rank")
    listed = {file.name for file in plan.manifest.files}
    for part in itertools.chain.from_iterable(plan.parts):
        fault = part_fault(part)
        check.that(fault is None, str(fault))
        check.plain_name(part.name)
        check.that(may_hold_data(part.name) and part.name not in listed, f"{part.name!r} can't be a data file")


prepare_decoding(RankIndex, ListedIndex, _NamesOnly, _WholeFile, Report, Manifest, AttemptPlan)
