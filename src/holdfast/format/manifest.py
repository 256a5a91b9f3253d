"""What was committed, as bytes: the manifest, the reports, the attempt's plan file. Torch-free, no I/O.

STRUCTS FIXED; encode/decode to be implemented.

    holdfast.json        `Manifest`: step, world, metrics, versions, and each report with its size and digest
    rank-00007.report    `Report`: what one rank wrote: files, checksums, and its `RankIndex`
    .plan                `AttemptPlan`: pre-written when an attempt begins, removed before it is published
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.plan.structure import PathItem

EXTENT_BYTES = 1 << 20
MANIFEST_NAME = "holdfast.json"
PLAN_NAME = ".plan"
METADATA_NAME = ".metadata"


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
