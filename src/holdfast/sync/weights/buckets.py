"""Plan of a weight version: the parts that publishers send to receivers, and their buckets. Torch-free, pure.

A publisher rank sends *pieces*, boxes of tensors; its list of them is its table. `select` decides which parts of whose
pieces fill a receiver's memory. `plan_buckets` packs the parts that all members want from one publisher rank into
buckets: a `BucketEntry` is one part's row-major bytes at an offset in a bucket.

Guarantees: deterministic. Every wanted element is in exactly one part of one publisher rank, or `select` raises. An
element that several members want is in one entry, in a bucket whose lane is exactly these members. Entries of a bucket
start on multiples of `BUCKET_ALIGN_BYTES` and don't overlap; no bucket exceeds its limit.
Cost: `select` is linear in the number of overlapping boxes, for tensors cut along one dimension with a logarithmic
factor; `plan_buckets` is linear in the number of entries.
Assumes: entries are packed and unpacked in row-major order, as in ``weights.pieces``. Bytes between entries are
meaningless.
Does not: read tensors or bytes, decide which publisher rank sends a replica (``weights.pieces`` does), know sessions.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.boxes import Box, contains, intersect, subtract, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError, StateMismatch, listed
from holdfast.format.decoding import prepare_decoding
from holdfast.plan.read import StoredShard, StoredTensor, disjoint, most_cut
from holdfast.plan.write import round_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BUCKET_ALIGN_BYTES: Final = 256
"""Alignment of entries in their bucket: suits any dtype, and whole lines of caches and of device memory."""
_FILL: Final = 8
"""A part is cut to fill a bucket if more than this fraction of it is left; a smaller rest stays empty."""

Lane = tuple[int, ...]
"""Ascending indices of the session's members that want a bucket's bytes."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor that a publisher rank sends; ``shape`` is that of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    same_as: str = ""
    """If this name shares its memory with another (tied weights): the first such name at that rank."""

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class Wanted(NamedTuple):
    """A box of a tensor that a receiver has memory for; ``shape`` is that of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


class PieceBox(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of piece number ``piece`` of a table, in coordinates of the whole tensor."""

    piece: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class BucketEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part's row-major bytes: ``nbytes`` of them from byte ``at`` of the bucket."""

    piece: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    nbytes: int

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class BucketPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A bucket's entries, and the members that want it.

    nbytes: the end of the last entry; 0 for a lane that wants only tensors without elements.
    """

    lane: Lane
    nbytes: int
    entries: tuple[BucketEntry, ...]


# What a receiver takes from each publisher rank ----------------------------------------------------------------


def select(tables: Sequence[Sequence[Piece]], wanted: Sequence[Wanted] | None) -> list[list[PieceBox]]:
    """Return for each publisher rank the parts of its pieces that together fill ``wanted``, each element once.

    Parts are in the order of the rank's table. Of equal pieces the first rank's is taken. A tensor without elements is
    one part of the first rank that has it; an empty box of another tensor needs none.
    wanted: may name boxes of one tensor several times; None means everything published, whole.

    Raises:
        StateMismatch: names wanted but not published, or published but not wanted; another dtype or shape; publisher
            ranks that disagree on a tensor, or whose pieces lack a wanted part.
        ConfigError: an unknown dtype, or a wanted box outside its tensor.
    """
    published = _published(tables)
    if wanted is None:
        wanted = [Wanted(name, tensor.dtype, tensor.shape, whole(tensor.shape)) for name, tensor in published.items()]
    _check_wanted(published, wanted)
    boxes: dict[str, list[Box]] = {}
    for want in wanted:
        boxes.setdefault(want.name, []).append(want.box)
    parts: list[list[PieceBox]] = [[] for _ in tables]
    for name, tensor in published.items():
        if not prod(tensor.shape):
            rank, number, piece = tensor.held[0]
            parts[rank].append(PieceBox(number, piece.offsets, piece.sizes))
            continue
        stored = tensor.stored()
        for box in _apart(boxes[name]):
            chosen, lacking = disjoint(box, stored.meeting(box))
            if lacking is not None:
                raise StateMismatch(
                    f"tensor {name!r} ({tensor.dtype} {list(tensor.shape)}): no publisher rank sends its part "
                    f"{lacking}; {len(tables)} ranks send {len(tensor.held)} pieces of it. Publish from every rank of "
                    "the tensor's mesh",
                    mismatched=(name,),
                )
            for shard, region in chosen:
                rank, number, _ = tensor.held[shard.payload_offset]
                parts[rank].append(PieceBox(number, region.offsets, region.sizes))
    for found in parts:
        found.sort(key=lambda part: (part.piece, part.offsets))
    return parts


class _Published:
    """One tensor over all tables: its description, and which box of it each rank sends."""

    __slots__ = ("dtype", "held", "name", "shape")

    def __init__(self, piece: Piece) -> None:
        self.name = piece.name
        self.dtype = piece.dtype
        self.shape = piece.shape
        self.held: list[tuple[int, int, Piece]] = []

    def stored(self) -> StoredTensor:
        """Its boxes, for searching; ``payload_offset`` is the index into `held`."""
        itemsize = ITEMSIZE[self.dtype]
        return StoredTensor(
            self.name,
            self.dtype,
            self.shape,
            tuple(
                StoredShard(piece.box, "", index, prod(piece.sizes) * itemsize)
                for index, (_, _, piece) in enumerate(self.held)
            ),
        )


def _published(tables: Sequence[Sequence[Piece]]) -> dict[str, _Published]:
    published: dict[str, _Published] = {}
    for rank, table in enumerate(tables):
        for number, piece in enumerate(table):
            tensor = published.get(piece.name)
            if tensor is None:
                itemsize_of(piece)
                tensor = published[piece.name] = _Published(piece)
            elif (piece.dtype, piece.shape) != (tensor.dtype, tensor.shape):
                raise StateMismatch(
                    f"tensor {piece.name!r} is {piece.dtype} {list(piece.shape)} on publisher rank {rank}, but "
                    f"{tensor.dtype} {list(tensor.shape)} on rank {tensor.held[0][0]}: equal names mean "
                    "pieces or replicas of one tensor; use different names for different tensors",
                    mismatched=(piece.name,),
                )
            if not contains(whole(piece.shape), piece.box):
                raise StateMismatch(
                    f"publisher rank {rank} sends {piece.box} of tensor {piece.name!r}, which has shape "
                    f"{list(piece.shape)}",
                    mismatched=(piece.name,),
                )
            tensor.held.append((rank, number, piece))
    return published


def mismatch(missing: Sequence[str], unexpected: Sequence[str], differing: Mapping[str, str]) -> StateMismatch:
    """Return the error for a receiver whose tensors don't match; ``differing`` describes the difference by name."""
    said = []
    if missing:
        said.append(f"{len(missing)} not published: {listed(missing)}")
    if unexpected:
        said.append(f"{len(unexpected)} published that the receiver has no place for: {listed(unexpected)}")
    if differing:
        said.append(f"{len(differing)} that differ: {', '.join(list(differing.values())[:5])}")
    return StateMismatch(
        f"the receiver's tensors don't match the published ones: {'; '.join(said)}. Use the "
        "same model on both sides, and exactly the published names in the receiver",
        missing=tuple(sorted(missing)),
        unexpected=tuple(unexpected),
        mismatched=tuple(sorted(differing)),
    )


def _check_wanted(published: dict[str, _Published], wanted: Sequence[Wanted]) -> None:
    """Raise unless both sides have the same names, with equal descriptions."""
    names = {want.name for want in wanted}
    missing = tuple(sorted(names - published.keys()))
    unexpected = tuple(sorted(published.keys() - names))
    differing: dict[str, str] = {}
    for want in wanted:
        tensor = published.get(want.name)
        if tensor is not None and (want.dtype, want.shape) != (tensor.dtype, tensor.shape):
            differing.setdefault(
                want.name,
                f"`{want.name}` is {tensor.dtype} {list(tensor.shape)} where it is published, {want.dtype} "
                f"{list(want.shape)} at the receiver",
            )
    if missing or unexpected or differing:
        raise mismatch(missing, unexpected, differing)
    for want in wanted:
        if not contains(whole(want.shape), want.box):
            raise ConfigError(
                f"tensor {want.name!r}: wanted {want.box}, but it has shape {list(want.shape)}", field=want.name
            )


def _apart(boxes: Sequence[Box]) -> list[Box]:
    """Return the same elements in boxes that don't overlap."""
    if len(boxes) == 1:
        return list(boxes)
    found: list[Box] = []
    for box in dict.fromkeys(boxes):
        rest = [box]
        for earlier in found:
            rest = [part for old in rest for part in subtract(old, earlier)]
        found += rest
    return found


# Contents of each bucket ---------------------------------------------------------------------------------------


def plan_buckets(
    table: Sequence[Piece], parts_by_member: Sequence[Sequence[PieceBox]], bucket_bytes: int
) -> list[BucketPlan]:
    """Return the buckets of one publisher rank, in sending order.

    Each lane fills its own buckets in the order of the table; buckets are sent in the order in which they were begun. A
    part that doesn't fit into a bucket is cut along its outer dimensions, at most into rows of the last dimension; a
    vector is cut anywhere. parts_by_member: what each member wants, from `select`; boxes may overlap.

    Raises:
        ConfigError: a part isn't within a piece of the table; an unknown dtype; a row is longer than a bucket.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}; expected at least 1", field="bucket_bytes")
    wants = _by_piece(table, parts_by_member)
    filling = _Filling(bucket_bytes)
    for number in sorted(wants):
        piece = table[number]
        for box, lane in _lanes(wants[number]):
            filling.add(number, piece, box, lane)
    return [BucketPlan(bucket.lane, bucket.end, tuple(bucket.entries)) for bucket in filling.buckets]


def _by_piece(
    table: Sequence[Piece], parts_by_member: Sequence[Sequence[PieceBox]]
) -> dict[int, dict[Box, frozenset[int]]]:
    """Group wanted boxes by piece, each with the members that want it."""
    members: dict[int, dict[Box, set[int]]] = {}
    for member, parts in enumerate(parts_by_member):
        for part in parts:
            if not 0 <= part.piece < len(table):
                raise ConfigError(f"member {member} wants piece {part.piece}; the table has {len(table)}")
            piece, box = table[part.piece], part.box
            if not contains(piece.box, box):
                raise ConfigError(
                    f"member {member} wants {box} of tensor {piece.name!r}, of which this rank sends {piece.box}",
                    field=piece.name,
                )
            if box.volume or not prod(piece.shape):
                members.setdefault(part.piece, {}).setdefault(box, set()).add(member)
    return {number: {box: frozenset(who) for box, who in boxes.items()} for number, boxes in members.items()}


def _lanes(wants: dict[Box, frozenset[int]]) -> list[tuple[Box, Lane]]:
    """Return disjoint boxes that cover ``wants``, each with all who want it, in the order of their offsets."""
    if len(wants) == 1:
        return [(box, tuple(sorted(who))) for box, who in wants.items()]
    axis = most_cut(wants, len(next(iter(wants)).offsets))
    done: list[tuple[Box, frozenset[int]]] = []
    near: list[tuple[Box, frozenset[int]]] = []  # boxes found so far that one not examined yet may overlap
    for box, who in sorted(wants.items(), key=lambda want: (want[0].offsets[axis : axis + 1], want[0])):
        met: list[tuple[Box, frozenset[int]]] = []
        rest = [box]
        for old, others in near:
            if axis < len(box.offsets) and old.offsets[axis] + old.sizes[axis] <= box.offsets[axis]:
                done.append((old, others))
                continue
            shared = intersect(old, box)
            if shared is None:
                met.append((old, others))
                continue
            met.append((shared, others | who))
            met += [(part, others) for part in subtract(old, shared)]
            rest = [part for some in rest for part in subtract(some, shared)]
        near = met + [(part, who) for part in rest]
    return [(box, tuple(sorted(who))) for box, who in sorted(done + near, key=lambda item: item[0])]


class _Bucket:
    """A bucket that is being filled."""

    __slots__ = ("end", "entries", "lane")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.entries: list[BucketEntry] = []
        self.end = 0


class _Filling:
    """Puts boxes into buckets: one bucket per lane is open at a time."""

    def __init__(self, bucket_bytes: int) -> None:
        self.buckets: list[_Bucket] = []
        self._limit = bucket_bytes
        self._open: dict[Lane, _Bucket] = {}

    def add(self, number: int, piece: Piece, box: Box, lane: Lane) -> None:
        """Append ``box`` of piece ``number`` to its lane's bucket."""
        itemsize = itemsize_of(piece)
        bucket = self._open.get(lane) or self._begin(lane)
        rest = [box]
        while rest:
            box = rest.pop()
            nbytes = box.volume * itemsize
            at = round_up(bucket.end, BUCKET_ALIGN_BYTES) if nbytes else 0
            room = self._limit - at
            if nbytes <= room:
                bucket.entries.append(BucketEntry(number, box.offsets, box.sizes, at, nbytes))
                bucket.end = max(bucket.end, at + nbytes)
                continue
            head = _head(box, room // itemsize) if room * _FILL > self._limit else None
            if head is not None:
                # Last in, first out: the head goes into this bucket, then the rest, from the inside out.
                rest += [*subtract(box, head), head]
            elif bucket.end:
                bucket = self._begin(lane)
                rest.append(box)
            else:
                raise unfit(piece.name, piece.dtype, piece.shape, row_bytes(box.sizes, itemsize), self._limit)

    def _begin(self, lane: Lane) -> _Bucket:
        bucket = self._open[lane] = _Bucket(lane)
        self.buckets.append(bucket)
        return bucket


def _head(box: Box, most: int) -> Box | None:
    """Return the largest beginning of ``box``, in row-major order, that is a box of at most ``most`` elements.

    None if that would cut a row of the last dimension; the rows of a vector are its elements.
    """
    inner = box.volume
    for dim, size in enumerate(box.sizes[:-1] if len(box.sizes) > 1 else box.sizes):
        inner //= size
        if inner <= most:
            return Box(box.offsets, (*(1,) * dim, min(size, most // inner), *box.sizes[dim + 1 :]))
    return None


def row_bytes(sizes: Sequence[int], itemsize: int) -> int:
    """Return the bytes of the smallest unit that is never cut: a row of the last dimension, or a vector's element."""
    return (sizes[-1] if len(sizes) > 1 else 1) * itemsize


def unfit(name: str, dtype: str, shape: Sequence[int], row: int, limit: int) -> ConfigError:
    """Return the error for a row that is longer than a bucket."""
    return ConfigError(
        f"a row of {name!r} ({dtype} {list(shape)}) has {row} bytes, but buckets have {limit}: a row of the last "
        "dimension, or an element of a vector, can't be split; use a larger bucket_bytes",
        field="bucket_bytes",
    )


def itemsize_of(piece: Piece) -> int:
    """Return the bytes of an element. Raises `ConfigError` for an unknown dtype."""
    itemsize = ITEMSIZE.get(piece.dtype)
    if itemsize is None:
        raise ConfigError(f"tensor {piece.name!r} has dtype {piece.dtype}, which is unknown here", field=piece.name)
    return itemsize


prepare_decoding(Piece, PieceBox, BucketEntry, BucketPlan)
