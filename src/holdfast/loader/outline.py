"""Outline a checkpoint: names, kinds, places and checksums, for who lists or compares and loads nothing. Torch-free.

    index of each rank, paths still encoded  ->  `Outline`: tensors, objects, files, checksums by name

A `HoldfastSource` prepares to be read: nested paths, an index to search by. An outline doesn't, and takes a fifth of
the time: a hundred thousand tensors in under half a second.

Guarantees: what it tells matched its digest and fits together, as far as `HoldfastSource` checks that; reads no data.
Assumes: a short-lived process, or one that doesn't mind: the garbage collector is paused while it is made.
"""

from __future__ import annotations

import os
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.boxes import whole
from holdfast.cores import take_turns
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt
from holdfast.format.manifest import MANIFEST_NAME, ListedIndex, Report, list_index
from holdfast.loader.sources.holdfast import HoldfastSource, StoredObject, covered_files
from holdfast.state.gc_pause import gc_paused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.loader.sources.holdfast import CheckpointSource
    from holdfast.storage.files import StoredFile

Kind = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class OutlinedShard(msgspec.Struct, frozen=True, gc=False):
    """One box of a tensor, and where it is stored; ``nbytes`` from ``file_offset`` of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    file_offset: int
    nbytes: int


class OutlinedTensor(msgspec.Struct, gc=False):
    """One tensor; ``shards`` by their offsets, each box once, none empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shards: list[OutlinedShard]


class Outline:
    """What `outline_of` made of a source; every part is worked out when it is first asked for."""

    def __init__(
        self, source: CheckpointSource, reads: list[tuple[Report, ListedIndex]] | None, like: Outline | None = None
    ) -> None:
        self._source = source
        self.reads = reads
        """None for a source that only tells by its tensors: a delta, an export, stock DCP."""
        self._like = like
        """Another whose reports have the same indexes."""

    @cached_property
    def tensors(self) -> Mapping[str, OutlinedTensor]:
        """Every tensor by its name. Raises `CheckpointCorrupt` where reports disagree."""
        if self.reads is None:
            return _listed(self._source)
        found: dict[str, OutlinedTensor] = {}
        with gc_paused():
            for report, index in self.reads:
                names = [file.name for file in report.files]
                for row in index.tensors:
                    shard = OutlinedShard(row.offsets, row.sizes, names[row.file], row.payload_offset, row.nbytes)
                    known = found.get(row.name)
                    if known is None:
                        found[row.name] = OutlinedTensor(row.name, row.dtype, row.shape, row.nbytes, [shard])
                    elif known.shape != row.shape or known.dtype != row.dtype:
                        raise self._disagreeing(row.name)
                    else:
                        known.shards.append(shard)
            for tensor in found.values():
                if len(tensor.shards) > 1 or not tensor.nbytes or tensor.shards[0].sizes != tensor.shape:
                    _put_in_order(tensor)
        return found

    def _disagreeing(self, name: str) -> CheckpointCorrupt:
        path = os.path.join(self._source.directory, MANIFEST_NAME)
        return CheckpointCorrupt(f"{path}: reports disagree on {name}", path=path, tensor=name)

    @cached_property
    def kinds(self) -> Mapping[str, Kind]:
        """Dtype and shape of each tensor. Raises `CheckpointCorrupt` where reports disagree."""
        if self.reads is None:
            return {name: (tensor.dtype, tensor.shape) for name, tensor in self._source.tensors.items()}
        if self._like is not None:
            return self._like.kinds
        found: dict[str, Kind] = {}
        for _, index in self.reads:
            for row in index.tensors:
                kind = (row.dtype, row.shape)
                if found.setdefault(row.name, kind) != kind:
                    raise self._disagreeing(row.name)
        return found

    @cached_property
    def objects(self) -> Mapping[str, StoredObject]:
        if self.reads is None:
            return self._source.objects
        return {
            row.name: StoredObject(row.name, report.files[row.file].name, row.offset, row.capacity)
            for report, index in self.reads
            for row in index.objects
        }

    @cached_property
    def files(self) -> Mapping[str, StoredFile]:
        source = self._source
        if self.reads is None or not isinstance(source, HoldfastSource):
            return source.files
        return covered_files(source.directory, source.manifest, (read[0] for read in self.reads), all_there=True)

    def unlike(self, other: Outline) -> tuple[list[str], list[str]]:
        """Return names of tensors of one kind in both whose bytes may differ: with other checksums of the same boxes,
        and those whose checksums can't be compared.
        """
        with gc_paused():
            if self.reads is None or other.reads is None:
                both = [name for name, kind in self.kinds.items() if other.kinds.get(name) == kind]
                return [], [name for name in both if whole(self.kinds[name][1]).volume]
            if other._like is self or self._like is other:
                return _other_sums(self.reads, other.reads), []
            return _other_boxes(self, other)

    def sums(self) -> dict[str, Any]:
        """Return what is stored of each tensor: a (box, checksum), or the frozenset of several."""
        found: dict[str, Any] = {}
        more: dict[str, set[Any]] = {}
        for report, index in self.reads or ():
            sums = memoryview(report.tensor_sums).cast("Q")
            for row, known in zip(index.tensors, sums, strict=True):
                entry = (row.offsets, row.sizes, known)
                first = found.setdefault(row.name, entry)
                if first is not entry:
                    more.setdefault(row.name, {first}).add(entry)
        found.update({name: frozenset(rows) if len(rows) > 1 else found[name] for name, rows in more.items()})
        return found


def outline_of(source: CheckpointSource, *, like: Outline | None = None) -> Outline:
    """Outline ``source``; half of the work is saved where its tensors lie as in ``like``, as those of another step do.

    Raises `CheckpointCorrupt`, `StorageError`, as reading its reports.
    """
    if not isinstance(source, HoldfastSource) or source.manifest.chain:
        return Outline(source, None)
    lines = source.manifest.reports
    read: list[Report | None] = [None] * len(lines)

    def take(at: int) -> None:
        read[at] = source.committed_report(lines[at])

    take_turns([partial(take, at) for at in range(len(lines))], source.small_reads_at_a_time)
    reports = [report for report in read if report is not None]
    known = [] if like is None else like.reads or []
    with gc_paused():
        if known and [_layout(report) for report in reports] == [_layout(report) for report, _ in known]:
            reads = [(report, index) for report, (_, index) in zip(reports, known, strict=True)]
        else:
            like = None
            paths = [os.path.join(source.directory, line.name) for line in lines]
            reads = [(report, list_index(report, path=path)) for report, path in zip(reports, paths, strict=True)]
        found = Outline(source, reads, like)
        _ = found.files  # files that two reports cover, or none: what they tell isn't to be believed
    return found


def _layout(report: Report) -> tuple[object, ...]:
    """Return all that what `list_index` returns, or raises, depends on."""
    files = [(file.size, file.offset, file.total) for file in report.files]
    return report.index, files, len(report.tensor_sums)


def _put_in_order(tensor: OutlinedTensor) -> None:
    boxes: dict[Any, OutlinedShard] = {}
    for shard in tensor.shards:
        if shard.nbytes:
            boxes.setdefault((shard.offsets, shard.sizes), shard)  # replicas stored twice: the first one is read
    tensor.shards = [boxes[box] for box in sorted(boxes)]
    tensor.nbytes = whole(tensor.shape).volume * ITEMSIZE[tensor.dtype]


def _listed(source: CheckpointSource) -> dict[str, OutlinedTensor]:
    return {
        name: OutlinedTensor(
            name,
            tensor.dtype,
            tensor.shape,
            whole(tensor.shape).volume * tensor.itemsize,
            [
                OutlinedShard(shard.box.offsets, shard.box.sizes, shard.file, shard.payload_offset, shard.nbytes)
                for shard in tensor.shards
            ],
        )
        for name, tensor in source.tensors.items()
    }


_Reads = list[tuple[Report, ListedIndex]]


def _other_sums(first: _Reads, second: _Reads) -> list[str]:
    """Compare checksums one by one, where both have the same index."""
    found: dict[str, None] = {}
    for (one, index), (other, _) in zip(first, second, strict=True):
        if one.tensor_sums != other.tensor_sums:
            sums = zip(memoryview(one.tensor_sums).cast("Q"), memoryview(other.tensor_sums).cast("Q"), strict=True)
            found.update(dict.fromkeys(row.name for row, (a, b) in zip(index.tensors, sums, strict=True) if a != b))
    return list(found)


def _other_boxes(first: Outline, second: Outline) -> tuple[list[str], list[str]]:
    ones, others, kinds, other_kinds = first.sums(), second.sums(), first.kinds, second.kinds
    moved: list[str] = []
    unknown: list[str] = []
    for name, one in ones.items():
        other = others.get(name)
        if one == other or kinds[name] != other_kinds.get(name) or not whole(kinds[name][1]).volume:
            continue
        (moved if _boxes(one) == _boxes(other) else unknown).append(name)
    return moved, unknown


def _boxes(sums: Any) -> set[Any]:
    return {row[:2] for row in (sums if isinstance(sums, frozenset) else (sums,))}
