"""Read a delta version: a checkpoint that is stored as an anchor, and what has changed since, by element.

    root/version-10/   the anchor: an ordinary checkpoint
    root/version-11/   a delta: for each rank a tensor of bytes with records (`format.delta`); its manifest has a chain
    root/version-12/   a delta whose chain is version-10, version-11

`ChainSource` is version-12 as it was published: the anchor's files, of which reads return the bytes of version-12.

Guarantees: what is read was verified three times: the anchor's bytes and the deltas' by their checksums, the result by
the hash that its own record has. Members are those of the manifest, by attempt and digest; one that is missing, or
another, is `CheckpointCorrupt` naming it, unless the version itself was deleted. Records of all deltas are held in
memory while the source lives; of the anchor a few MiB a thread.
Assumes: members lie beside it, under the names that the manifest has.
Does not: keep retention away: a lease on the version does, whose members are never deleted before it.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast import events
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, HoldfastError, StorageError
from holdfast.format.delta import DELTA_PREFIX, decode_delta
from holdfast.format.manifest import MANIFEST_NAME
from holdfast.format.sealed import xxh3_128
from holdfast.format.sparse import Record
from holdfast.loader.sources.holdfast import HoldfastSource, open_holdfast
from holdfast.loader.sources.object_store import ObjectSource, open_object
from holdfast.storage.entries import MAX_MANIFEST_BYTES
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.ranged_reads import FileSet, RangedRead

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from holdfast.boxes import Box
    from holdfast.format.delta import ShardKey
    from holdfast.format.manifest import ChainMember, Manifest
    from holdfast.format.structure import PathItem
    from holdfast.loader.sources.holdfast import Place, StoredObject
    from holdfast.plan.read import StoredTensor
    from holdfast.storage.files import OpenedDirectory, StoredFile

_GROUP_BYTES: Final = 8 << 20
"""Bytes of the anchor that are read at a time, whole blocks of a record."""
_READS_AT_A_TIME: Final = 4


class ChainSource:
    """A delta version, resolved; make it with `open_chain`. Implements `CheckpointSource`."""

    records: Final = None
    checksummed: Final = True

    def __init__(self, members: Sequence[HoldfastSource]) -> None:
        """members: the anchor, and the deltas to it in order; the last is the version itself."""
        self.members = tuple(members)
        self._own = members[-1]
        self._anchor = members[0]

    @property
    def directory(self) -> str:
        return self._own.directory

    @property
    def opened(self) -> OpenedDirectory | None:
        return self._own.opened

    @property
    def step(self) -> int | None:
        return self._own.step

    @property
    def manifest(self) -> Manifest:
        return self._own.manifest

    @property
    def world(self) -> int | None:
        return self._anchor.world

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._anchor.tensors

    @property
    def objects(self) -> Mapping[str, StoredObject]:
        return self._anchor.objects

    @property
    def paths(self) -> Mapping[str, tuple[PathItem, ...]]:
        return self._anchor.paths

    @property
    def files(self) -> Mapping[str, StoredFile]:
        return self._anchor.files

    @property
    def readable_files(self) -> Mapping[str, StoredFile]:
        """The anchor's; none if the deltas can't be read."""
        try:
            _ = self._patches
        except HoldfastError:
            return {}
        return self._anchor.readable_files

    @cached_property
    def sums(self) -> dict[str, frozenset[tuple[Box, bytes]]]:
        """Checksums of each box of a tensor that is stored, by the tensor's name."""
        found = dict(self._anchor.sums)
        for (name, box), records in self.records_from(0).items():
            others = {known for known in found[name] if known[0] != box}
            found[name] = frozenset({*others, (box, records[-1].head.result.to_bytes(8, "little"))})
        return found

    def what_became(self) -> CheckpointNotFound | None:
        became = (member.what_became() for member in reversed(self.members))
        return next((one for one in became if one is not None), None)

    def raise_for_listing(self, *, verify: bool) -> None:
        """Raise as `HoldfastSource.raise_for_listing`, for every member."""
        for member in self.members:
            member.raise_for_listing(verify=verify)

    def check_listing(self) -> list[HoldfastError]:
        found = [error for member in self.members for error in member.check_listing()]
        if not found:
            try:
                _ = self._patches
            except HoldfastError as error:
                found.append(error)
        return found

    def strangers(self) -> list[str]:
        return [path for member in self.members for path in member.strangers()]

    def places(self) -> Iterator[Place]:
        return iter(())  # no record of this version is in any file

    def fresh(self) -> ChainSource:
        """The same attempts, read again."""
        return ChainSource([member.fresh() for member in self.members])

    def open_files(self, *, verify: bool, direct: bool = False) -> FileSet:
        """See `FileSet`. Reads of the anchor's files return this version's bytes."""
        patches = self._patches
        return ChainFiles(self._anchor.open_files(verify=verify, direct=direct), patches, verify=verify)

    def number_of(self, attempt: str) -> int | None:
        """Return which member ``attempt`` has published, counted from the anchor; None if it is none of them."""
        return next((at for at, member in enumerate(self.members) if member.manifest.attempt == attempt), None)

    def records_from(self, number: int) -> dict[ShardKey, list[Record]]:
        """Return by shard what leads from member ``number`` to this version; shards that didn't change have none.

        Raises `CheckpointCorrupt`, `StorageError`.
        """
        self._require_deltas(number)
        found: dict[ShardKey, list[Record]] = {}
        for records in self._deltas[number:]:
            for key, record in records.items() if records is not None else ():
                known = found.setdefault(key, [])
                if known and (
                    record.head[:5] != known[-1].head[:5] or record.head.base != known[-1].head.result
                ):  # the kind, the units, and the array
                    raise CheckpointCorrupt(
                        f"{record.what} is not based on {known[-1].what}", path=record.what, tensor=key[0]
                    )
                known.append(record)
        return found

    @cached_property
    def _deltas(self) -> list[dict[ShardKey, Record] | None]:
        """The records of each delta, once they were read."""
        return [None] * (len(self.members) - 1)

    def _require_deltas(self, first: int) -> None:
        """Read the records of the deltas from ``first`` on, unless they were."""

        def read(at: int) -> None:
            self._deltas[at] = self._read_delta(self.members[at + 1])

        wanted = [at for at in range(first, len(self._deltas)) if self._deltas[at] is None]
        take_turns([partial(read, at) for at in wanted], _READS_AT_A_TIME)

    def _read_delta(self, member: HoldfastSource) -> dict[ShardKey, Record]:
        found: dict[ShardKey, Record] = {}
        with member.open_files(verify=True) as files:
            for name, tensor in member.tensors.items():
                if not name.startswith(DELTA_PREFIX) or tensor.dtype != "uint8" or len(tensor.shards) != 1:
                    path = os.path.join(member.directory, MANIFEST_NAME)
                    raise CheckpointCorrupt(f"{path}: {name!r} is no part of a delta", path=path, tensor=name)
                shard = tensor.shards[0]
                path = os.path.join(member.directory, shard.file)
                files.expect(shard.file, shard.nbytes)
                memory = memoryview(bytearray(shard.nbytes))
                files.read(files.jobs_for(shard.file, [RangedRead(shard.payload_offset, memory)]))
                for key, record in decode_delta(memory.toreadonly(), path=path).items():
                    if key in found:
                        raise CheckpointCorrupt(f"{path}: {key[0]!r} is in two ranks' deltas", path=path, tensor=key[0])
                    found[key] = Record(record, what=f"the delta of {key[0]!r} in {path}")
        events.count("bytes_read", files.bytes_read)
        return found

    @cached_property
    def _patches(self) -> dict[str, list[_Patch]]:
        """What is changed in each file of the anchor, ascending."""
        found: dict[str, list[_Patch]] = {}
        for (name, box), records in self.records_from(0).items():
            stored = self.tensors.get(name)
            shard = next((one for one in stored.shards if one.box == box), None) if stored is not None else None
            head = records[0].head
            if shard is None or shard.nbytes != head.units * head.unit_bytes:
                raise CheckpointCorrupt(
                    f"{records[0].what}: the anchor {self._anchor.directory} has no such shard",
                    path=records[0].what,
                    tensor=name,
                )
            found.setdefault(shard.file, []).append(_Patch(shard.payload_offset, shard.nbytes, name, records))
        for patches in found.values():
            patches.sort(key=lambda patch: patch.start)
        return found


class _Patch(NamedTuple):
    """``nbytes`` of a file from ``start`` on that ``records`` change, one after the other."""

    start: int
    nbytes: int
    name: str
    records: list[Record]

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def block_bytes(self) -> int:
        head = self.records[0].head
        return head.block_units * head.unit_bytes

    def groups(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of the file, whole blocks each, that together hold bytes ``start`` to ``end`` of it."""
        step = max(1, _GROUP_BYTES // self.block_bytes) * self.block_bytes
        at = self.start + (start - self.start) // self.block_bytes * self.block_bytes
        while at < end:
            stop = min(self.end, at + step)
            if stop > end:
                blocks = -(-(end - at) // self.block_bytes)
                stop = min(self.end, at + blocks * self.block_bytes)
            yield at, stop
            at = stop

    def apply(self, at: int, memory: memoryview, *, verify: bool) -> None:
        """Make this version of ``memory``, whole blocks of the file from ``at`` on."""
        first, size = (at - self.start) // self.block_bytes, self.block_bytes
        for number in range(-(-len(memory) // size)):
            block = memory[number * size : (number + 1) * size]
            for record in self.records:
                record.change(first + number, block)
            if verify:
                self.records[-1].check(first + number, block)


class ChainFiles(FileSet):
    """The anchor's files as they would be had the version been stored whole. Thread-safe, as `FileSet`."""

    def __init__(self, under: FileSet, patches: Mapping[str, list[_Patch]], *, verify: bool) -> None:
        self._under = under
        self._patches = patches
        self._verifies = verify
        self._own = threading.local()
        self.gap_bytes_max = under.gap_bytes_max
        self.threads = under.threads
        self.spans_at_a_time = under.spans_at_a_time

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self._under.bytes_read

    def close(self) -> None:
        self._under.close()

    def path_of(self, name: str) -> str:
        return self._under.path_of(name)

    def is_hashed(self, name: str) -> bool:
        """Return True: reads are whole blocks."""
        return name in self._patches or self._under.is_hashed(name)

    def require(self, name: str) -> None:
        self._under.require(name)

    def expect(self, name: str, nbytes: int) -> None:
        self._under.expect(name, nbytes)

    def read(self, work: Iterable[Callable[[], None]]) -> None:
        self._under.read(work)

    def jobs_for(
        self, name: str, pieces: Sequence[RangedRead], others: Sequence[tuple[int, Callable[[], None]]] = ()
    ) -> list[Callable[[], None]]:
        plain: list[RangedRead] = []
        jobs: list[Callable[[], None]] = []
        for piece in pieces:
            for start, end, patch in self._ranges(name, piece.start, piece.end):
                part = piece.memory[start - piece.start : end - piece.start]
                if patch is None:
                    plain.append(RangedRead(start, part))
                else:
                    jobs += [
                        partial(self._fill_group, name, patch, group, start, part) for group in patch.groups(start, end)
                    ]
        return [*self._under.jobs_for(name, plain, others), *jobs]

    def read_span(self, name: str, start: int, end: int) -> memoryview:
        ranges = list(self._ranges(name, start, end))
        if all(patch is None for _, _, patch in ranges):
            return self._under.read_span(name, start, end)
        memory = self._memory_for("span", end - start)
        for low, high, patch in ranges:
            part = memory[low - start : high - start]
            if patch is None:
                part[:] = self._under.read_span(name, low, high)
            else:
                for group in patch.groups(low, high):
                    self._fill_group(name, patch, group, low, part)
        return memory

    def read_runs(self, name: str, runs: Sequence[tuple[int, int]]) -> memoryview:
        if name not in self._patches:
            return self._under.read_runs(name, runs)
        memory = self._memory_for("runs", sum(end - start for start, end in runs))
        at = 0
        for start, end in runs:
            memory[at : at + end - start] = self.read_span(name, start, end)
            at += end - start
        return memory

    def read_unverified(self, name: str, start: int, memory: memoryview) -> None:
        for at in range(0, len(memory), _GROUP_BYTES):
            part = memory[at : at + _GROUP_BYTES]
            part[:] = self.read_span(name, start + at, start + at + len(part))

    def check(self, name: str, start: int, memory: memoryview) -> None:
        """Do nothing: what reads return was verified, and is not what the anchor has checksums of."""

    def map(self, name: str) -> mmap.mmap:
        raise StorageError(
            f"{self.path_of(name)} can't be mapped: it is the anchor of a delta version", path=name, errno=None
        )

    def _ranges(self, name: str, start: int, end: int) -> Iterator[tuple[int, int, _Patch | None]]:
        """Yield the range in parts, each of one patch or of none."""
        patches = self._patches.get(name, ())
        at = max(0, bisect_right(patches, start, key=lambda patch: patch.start) - 1)
        for patch in patches[at:]:
            if patch.start >= end:
                break
            low, high = max(start, patch.start), min(end, patch.end)
            if low >= high:
                continue
            if start < low:
                yield start, low, None
            yield low, high, patch
            start = high
        if start < end:
            yield start, end, None

    def _fill_group(self, name: str, patch: _Patch, group: tuple[int, int], start: int, memory: memoryview) -> None:
        """Fill of ``memory``, the file's bytes from ``start`` on, what ``group``, whole blocks, has of them."""
        low, high = group
        first, last = max(low, start), min(high, start + len(memory))
        wanted = memory[first - start : last - start]
        whole = wanted if (first, last) == group else self._memory_for("group", high - low)
        for job in self._under.jobs_for(name, [RangedRead(low, whole)]):
            job()
        patch.apply(low, whole, verify=self._verifies)
        if whole is not wanted:
            wanted[:] = whole[first - low : last - low]

    def _memory_for(self, use: str, nbytes: int) -> memoryview:
        """Return memory of the calling thread, valid until it asks for this use again."""
        held = getattr(self._own, use, b"")
        if len(held) < nbytes:
            held = bytearray(nbytes)
            setattr(self._own, use, held)
        return memoryview(held)[:nbytes]


def open_chain(own: HoldfastSource) -> ChainSource:
    """Resolve the chain of a delta version.

    Raises `CheckpointCorrupt` naming a member that is missing or isn't the one that the manifest names;
    `CheckpointNotFound` if the version was deleted meanwhile; `StorageError`.
    """
    chain = own.manifest.chain
    found: dict[int, HoldfastSource] = {}

    def look(at: int) -> None:
        found[at] = _member(own, chain[at])

    try:
        take_turns([partial(look, at) for at in range(len(chain))], max(_READS_AT_A_TIME, own.small_reads_at_a_time))
    except CheckpointCorrupt as error:
        became = own.what_became()
        if became is not None:
            raise became from error
        raise
    return ChainSource([*(found[at] for at in range(len(chain))), own])


def _member(own: HoldfastSource, member: ChainMember) -> HoldfastSource:
    try:
        found = _beside(own, member.name)
    except CheckpointNotFound as error:
        raise _unfit(own, member, f"isn't there ({error})") from error
    if found.manifest.attempt != member.attempt:
        raise _unfit(own, member, f"is of attempt {found.manifest.attempt}, expected {member.attempt}")
    if xxh3_128(found.read_committed(MANIFEST_NAME, MAX_MANIFEST_BYTES)) != member.digest:
        raise _unfit(own, member, "has another manifest than when this version was published")
    return found


def _unfit(own: HoldfastSource, member: ChainMember, why: str) -> CheckpointCorrupt:
    path = os.path.join(os.path.dirname(own.directory), member.name)
    return CheckpointCorrupt(
        f"{own.directory} is a delta that needs {path}, which {why}. Keep the versions of a root together, or take "
        "another version",
        path=path,
    )


def _beside(own: HoldfastSource, name: str) -> HoldfastSource:
    """Open the checkpoint ``name`` in the root of ``own``."""
    if not isinstance(own, ObjectSource):
        return open_holdfast(os.path.join(os.path.dirname(own.directory), name))
    root, _, _ = own.name.rpartition("/")
    if own.name:
        return open_object(own.place.storage, f"{root}/{name}" if root else name)
    storage = open_storage(own.directory.rpartition("/")[0])
    assert isinstance(storage, ObjectStorage), "the URL of a store"
    return open_object(storage, name)
