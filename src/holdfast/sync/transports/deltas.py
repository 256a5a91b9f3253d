"""Deltas of versions in a directory or a bucket: what a publisher rank remembers, and how a receiver goes on from it.

    anchor published -> `begin`: the shards that this rank has stored of it, and a copy of their bytes
    next version     -> `encode`: what differs, by element -> `agree`: all ranks write deltas, or all an anchor
    delta published  -> `advance`: the copy is the new version

    receiver         -> `bring_forward`: what it holds of an earlier member of the chain becomes the newer version

Guarantees: all ranks decide alike: an anchor if one is due, if the tensors or how they lie have changed on any rank,
or if the deltas since the anchor would take more than ``delta_bytes`` together. What is based on what is never
guessed: after any failure the next version is an anchor.
Assumes: calls on one thread, the same on all ranks; weights don't change between `encode` and `advance`.
Does not: save. Keeps a copy of what this rank stores of a version, in host memory.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, contains, intersect
from holdfast.coordination.failure import RankFailure
from holdfast.coordination.round import Rounds
from holdfast.cores import take_turns
from holdfast.errors import CheckpointCorrupt
from holdfast.format import sparse
from holdfast.format.decoding import prepare_decoding
from holdfast.format.delta import delta_name, encode_delta
from holdfast.format.manifest import MANIFEST_NAME, ChainMember
from holdfast.format.sealed import xxh3_128
from holdfast.staging.copier import lies_as_it_is
from holdfast.state.entries import Described, joined, local_tensor, torch_dtype
from holdfast.state.structure import LayoutTable, part_of
from holdfast.storage.entries import MAX_MANIFEST_BYTES
from holdfast.sync.weights.pieces import entries_of, note_write
from holdfast.sync.weights.scatter import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from holdfast.coordination.group import Group
    from holdfast.format.delta import ShardKey
    from holdfast.loader.sources.chain import ChainSource
    from holdfast.loader.sources.holdfast import HoldfastSource
    from holdfast.state.entries import TensorEntry
    from holdfast.sync.protocol import Destination, PublisherOptions
    from holdfast.sync.weights.pieces import Weights

_log = logging.getLogger("holdfast")

THREADS_MAX: Final = 8
_WHOLE: Final = 0.5
"""Share of a version that its deltas may take together, unless ``delta_bytes`` says how much."""


class _DeltaShare(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part in the decision: bytes of its delta, None if it has none, and of what it stores."""

    delta: int | None
    whole: int


_DELTA_SHARE: Final = msgspec.msgpack.Decoder(_DeltaShare)


class Agreed(NamedTuple):
    """The decision of all ranks: write deltas, of so many bytes in all."""

    delta: bool
    nbytes: int


class _Stored:
    """A shard that this rank stores, as the last version had it."""

    __slots__ = ("bytes", "dtype", "hashes", "key")

    def __init__(self, key: ShardKey, dtype: str, memory: npt.NDArray[np.uint8]) -> None:
        self.key = key
        self.dtype = dtype
        self.bytes = memory
        self.hashes: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def take(self, memory: npt.NDArray[np.uint8]) -> None:
        """Copy its bytes from ``memory``."""
        np.copyto(self.bytes, memory)
        self.hashes = sparse.block_hashes(self.bytes, self.dtype)


class DeltaSeries:
    """One rank's part in an anchor and the deltas to it."""

    def __init__(self, options: PublisherOptions, prefix: str | None, group: Group) -> None:
        assert options.delta is not None
        self._kind: sparse.Kind = "steps" if options.delta == "steps" else "values"
        self._anchor_every = options.anchor_every
        self._delta_bytes = options.delta_bytes
        self._above = () if prefix is None else (prefix,)
        self._group = group
        self._rounds = Rounds(group.board, "delta")
        self._threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self._described: Described | None = None
        self._stored: list[_Stored] = []
        self._next: list[npt.NDArray[np.uint64]] = []
        self._used = 0
        self.chain: tuple[ChainMember, ...] = ()
        """What the next delta is to; on rank 0."""
        self._count = 0
        """Members of the chain."""

    def forget(self) -> None:
        """Write an anchor next."""
        self._described, self._stored, self._next = None, [], []
        self.chain, self._count, self._used = (), 0, 0

    def leave(self) -> None:
        """Take part in no further decision."""
        self._rounds.leave()

    def encode(self, weights: Weights) -> bytes | None:
        """Return this rank's part of a delta to the last version; None if it must be an anchor."""
        if not 0 < self._count < self._anchor_every or (self._group.rank == 0 and not self.chain):
            return None
        entries = entries_of(weights, self._above)
        if self._described != Described.of(entries):
            return None
        tensors = dict(self._memory(entries))
        encoded: list[sparse.Encoded] = []
        for stored in self._stored:
            memory = _bytes_of(tensors[stored.key[0]], stored)
            if memory is None:
                return None
            encoded.append(
                sparse.encode(
                    stored.bytes,
                    memory,
                    stored.dtype,
                    kind=self._kind,
                    base_hashes=stored.hashes,
                    threads=self._threads,
                )
            )
        self._next = [one.hashes for one in encoded]
        pairs = zip(self._stored, encoded, strict=True)
        return encode_delta(
            (stored.key, one.record) for stored, one in pairs if not np.array_equal(one.hashes, stored.hashes)
        )

    def agree(self, delta: bytes | None, *, timeout_s: float) -> Agreed:
        """Decide with all ranks what to write. delta: this rank's, None if it can't. Raises `HoldfastError`."""
        whole = sum(len(stored.bytes) for stored in self._stored)
        round_ = self._rounds.next()
        round_.say(msgspec.msgpack.encode(_DeltaShare(None if delta is None else len(delta), whole)))
        found = round_.wait(self._decide, timeout_s=timeout_s)
        if isinstance(found, RankFailure):
            raise found.cause()
        return Agreed(*msgspec.msgpack.decode(found, type=tuple[bool, int]))

    def _decide(self, words: list[bytes]) -> bytes:
        shares = list(map(_DELTA_SHARE.decode, words))
        limit = self._delta_bytes
        if limit is None:
            limit = int(_WHOLE * sum(share.whole for share in shares))
        nbytes = sum(share.delta or 0 for share in shares)
        is_delta = all(share.delta is not None for share in shares) and self._used + nbytes <= limit
        return msgspec.msgpack.encode((is_delta, nbytes))

    def begin(self, source: HoldfastSource, weights: Weights) -> None:
        """Note an anchor that was just published; ``source`` is that. Raises `HoldfastError`: then `forget`."""
        self.forget()
        entries = entries_of(weights, self._above)
        _, index = source.report_of(self._group.rank)
        tensors = dict(self._memory(entries))
        jobs: list[Callable[[], None]] = []
        for row in index.tensors:
            stored = _Stored((row.name, Box(row.offsets, row.sizes)), row.dtype, np.empty(row.nbytes, np.uint8))
            found = _bytes_of(tensors.get(row.name, []), stored)
            if found is None:
                raise CheckpointCorrupt(
                    f"{source.directory}: rank {self._group.rank} has stored {row.name!r} {stored.key[1]}, which it "
                    "doesn't have",
                    path=source.directory,
                    tensor=row.name,
                )
            self._stored.append(stored)
            jobs.append(partial(stored.take, found))
        take_turns(jobs, self._threads)
        self._described = Described.of(entries)
        self._extend(source)

    def advance(self, source: HoldfastSource, weights: Weights, nbytes: int) -> None:
        """Note a delta that was just published, of ``nbytes`` on all ranks. Raises `HoldfastError`: then `forget`."""
        tensors = dict(self._memory(entries_of(weights, self._above)))

        def copy(at: int) -> None:
            stored = self._stored[at]
            if not np.array_equal(stored.hashes, self._next[at]):
                memory = _bytes_of(tensors[stored.key[0]], stored)
                assert memory is not None, "it was encoded"
                np.copyto(stored.bytes, memory)
                stored.hashes = self._next[at]

        take_turns([lambda at=at: copy(at) for at in range(len(self._stored))], self._threads)  # type: ignore[misc]
        self._used += nbytes
        self._extend(source)

    def _extend(self, source: HoldfastSource) -> None:
        self._count += 1
        if self._group.rank == 0:
            manifest = source.manifest
            assert manifest.step is not None
            digest = xxh3_128(source.read_committed(MANIFEST_NAME, MAX_MANIFEST_BYTES))
            self.chain = (*self.chain, ChainMember(manifest.name, manifest.step, manifest.attempt, digest))

    def _memory(self, entries: tuple[TensorEntry, ...]) -> Iterator[tuple[str, list[tuple[Box, torch.Tensor]]]]:
        """Yield what this rank holds of each tensor, by its stored name."""
        layouts, rank = LayoutTable(self._group.ranks), self._group.rank
        found: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for entry in entries:
            views = layouts.views_of(entry.tensor, entry.name, rank, entry.place)
            found.setdefault(joined(entry.path), []).extend(views)
        yield from found.items()


def delta_tensors(delta: bytes, rank: int) -> dict[str, torch.Tensor]:
    """Return what is saved as a rank's part of a delta version."""
    return {delta_name(rank): torch.frombuffer(bytearray(delta), dtype=torch.uint8)}


def _bytes_of(views: list[tuple[Box, torch.Tensor]], stored: _Stored) -> npt.NDArray[np.uint8] | None:
    """Return the present bytes of a stored shard; where they are if they lie in one piece, else a copy."""
    box = stored.key[1]
    for there, view in views:
        if contains(there, box):
            part = part_of(view, box, there)
            dtype = torch_dtype(stored.dtype)
            if part.dtype != dtype or not lies_as_it_is(part):
                copied = torch.empty(part.shape, dtype=dtype)
                compat.copy_(copied, part)
                part = copied
            return compat.as_bytes(part).numpy()
    return np.empty(0, np.uint8) if not len(stored.bytes) else None


# Receiving --------------------------------------------------------------------------------------------------------


def bring_forward(
    destination: Destination, source: ChainSource, stored: Mapping[str, str], names: Sequence[str], base: int
) -> list[str]:
    """Make ``source`` of what the destination's memory holds of member ``base`` of its chain, reading deltas only.

    stored: the stored name of each of ``names``. Returns the names that have to be read otherwise: those of which this
    process holds parts of stored shards, or on a device. Each block that changed is verified; where one is not as it
    was published, all names are returned, and the destination's memory holds no version any more.
    """
    records = source.records_from(base)
    of_tensor: dict[str, list[tuple[Box, list[sparse.Record]]]] = {}
    for (name, box), some in records.items():
        of_tensor.setdefault(name, []).append((box, some))
    layouts, rank = LayoutTable(), dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    jobs: list[Callable[[], None]] = []
    left: list[str] = []
    changes: dict[str, Changes] = {}
    for name in names:
        changed, memory = of_tensor.get(stored[name], []), destination.memory(name)
        local = local_tensor(memory)
        noted = changes[name] = Changes(local.nbytes if destination.scatters else 0)
        if not changed:
            continue
        views = list(layouts.views_of(memory, name, rank, destination.place(name)))
        found = [(_lying(views, box), some) for box, some in changed if _meets(views, box)]
        if any(part is None for part, _ in found):
            left.append(name)
            del changes[name]
        else:
            jobs += [partial(_apply, part, some, noted, local) for part, some in found if part is not None]
            note_write(local)
    try:
        take_turns(jobs, min(THREADS_MAX, len(os.sched_getaffinity(0))))
    except CheckpointCorrupt as error:
        _log.warning("%s is read whole: %s", source.directory, error)
        destination.forget()
        return list(names)
    destination.changed(changes)
    return left


def _meets(views: Sequence[tuple[Box, torch.Tensor]], box: Box) -> bool:
    return any(intersect(there, box) is not None for there, _ in views)


def _lying(views: Sequence[tuple[Box, torch.Tensor]], box: Box) -> torch.Tensor | None:
    """Return the memory of ``box`` if it is all here, in one piece of host memory."""
    for there, view in views:
        if contains(there, box):
            part = part_of(view, box, there)
            return part if lies_as_it_is(part) else None
    return None


def _apply(part: torch.Tensor, records: Sequence[sparse.Record], noted: Changes, whole: torch.Tensor) -> None:
    """Bring ``part`` of ``whole`` forward by one record after the other; note what changes."""
    memory, at = compat.host_memory(part), part.data_ptr() - whole.data_ptr()
    head = records[-1].head
    size = head.block_units * head.unit_bytes
    if len(memory) != head.units * head.unit_bytes:
        raise CheckpointCorrupt(f"{records[-1].what} is for another array", path=records[-1].what)
    for number in range(head.blocks):
        block = memory[number * size : (number + 1) * size]
        changes = [record.change(number, block) for record in records]
        records[-1].check(number, block)
        for places, values in changes:
            bits = values if places is changes[-1][0] else np.frombuffer(block, values.dtype)[places]
            noted.note(at + number * size, len(block), places, bits)


prepare_decoding(_DeltaShare, tuple[bool, int])
