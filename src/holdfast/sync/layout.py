"""What travels from publishers to receivers, and in which buckets: the plan of a weight version. Torch-free, pure.

A publisher rank sends *pieces*, boxes of tensors; its list of them is its table. `select` says which parts of whose
pieces fill what a receiver has places for. `plan_buckets` packs the parts that all members want of one publisher rank
into buckets: an `Entry` is one part's row-major bytes at a place in a bucket.

Guarantees: deterministic. Every wanted element is in exactly one part of one publisher rank, or `select` raises. An
element that several members want is in one entry, and that entry in a bucket whose lane is all of them and nobody
else. Entries of a bucket start on multiples of `ALIGN_BYTES` and don't overlap; no bucket is longer than its limit.
`select` costs what its meetings of boxes are, where tensors are cut along one dimension also with the logarithm of
their number; `plan_buckets` what its entries are.
Assumes: whoever packs and unpacks fills and reads an entry in row-major order, as ``sync.pieces`` does. What lies
between entries means nothing.
Does not: look at tensors or bytes, decide which publisher rank sends a replica (``sync.pieces`` does), know sessions.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.boxes import Box, contains, intersect, subtract, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError, StateMismatch, listed
from holdfast.plan.read import StoredShard, StoredTensor, disjoint, most_cut
from holdfast.plan.write import round_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ALIGN_BYTES: Final = 256
"""Entries start on it in their bucket: any dtype, and whole lines of caches and of device memory."""
_FILL: Final = 8
"""A part is cut to fill a bucket that has more than this fraction left; a smaller rest stays empty."""

Lane = tuple[int, ...]
"""Indexes into a session's members, ascending: those who want a bucket's bytes."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a tensor that a publisher rank sends; ``shape`` is that of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class Wanted(NamedTuple):
    """A box of a tensor that a receiver has a place for; ``shape`` is that of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of piece number ``piece`` of a table, in coordinates of the whole tensor."""

    piece: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part's row-major bytes: ``nbytes`` of them from byte ``at`` of the bucket on."""

    piece: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    nbytes: int

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class BucketPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What lies in a bucket, and who wants it.

    ``nbytes`` is where the last entry ends; 0 for a lane that wants nothing but tensors without elements.
    """

    lane: Lane
    nbytes: int
    entries: tuple[Entry, ...]


# What a receiver takes of each publisher rank ------------------------------------------------------------------


def select(tables: Sequence[Sequence[Piece]], wanted: Sequence[Wanted] | None) -> list[list[Part]]:
    """For each publisher rank the parts of its pieces that together fill ``wanted``, each element once.

    Parts come in the order of the rank's table. Of equal pieces the first rank's is taken. A tensor without elements is
    one part of the first rank that has it; a wanted box without elements of another tensor needs none.
    wanted: may name boxes of one tensor several times; None means everything published, whole.

    Raises:
        StateMismatch: names that are wanted but not published, or published but not wanted; another dtype or shape;
            publisher ranks that disagree on a tensor, or whose pieces leave out a part of what is wanted.
        ConfigError: a dtype that is unknown here, or a wanted box outside its tensor.
    """
    published = _published(tables)
    if wanted is None:
        wanted = [Wanted(name, tensor.dtype, tensor.shape, whole(tensor.shape)) for name, tensor in published.items()]
    _check_wanted(published, wanted)
    boxes: dict[str, list[Box]] = {}
    for want in wanted:
        boxes.setdefault(want.name, []).append(want.box)
    parts: list[list[Part]] = [[] for _ in tables]
    for name, tensor in published.items():
        if not prod(tensor.shape):
            rank, number, piece = tensor.held[0]
            parts[rank].append(Part(number, piece.offsets, piece.sizes))
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
                parts[rank].append(Part(number, region.offsets, region.sizes))
    for found in parts:
        found.sort(key=lambda part: (part.piece, part.offsets))
    return parts


class _Published:
    """One tensor over all tables: what it is, and who sends which box of it."""

    __slots__ = ("dtype", "held", "name", "shape")

    def __init__(self, piece: Piece) -> None:
        self.name = piece.name
        self.dtype = piece.dtype
        self.shape = piece.shape
        self.held: list[tuple[int, int, Piece]] = []

    def stored(self) -> StoredTensor:
        """Its boxes, to be searched; ``payload_offset`` is the index into `held`."""
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
                    f"{tensor.dtype} {list(tensor.shape)} on rank {tensor.held[0][0]}: equal names mean pieces or "
                    "replicas of one tensor; give different ones different names",
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
    """The error for a receiver whose tensors aren't the published ones; ``differing`` says of each name how."""
    said = []
    if missing:
        said.append(f"{len(missing)} not published: {listed(missing)}")
    if unexpected:
        said.append(f"{len(unexpected)} published that the receiver has no place for: {listed(unexpected)}")
    if differing:
        said.append(f"{len(differing)} that differ: {', '.join(list(differing.values())[:5])}")
    return StateMismatch(
        f"the receiver's tensors aren't those that are published: {'; '.join(said)}. Give both sides the same model, "
        "and the receiver exactly the published names",
        missing=tuple(sorted(missing)),
        unexpected=tuple(unexpected),
        mismatched=tuple(sorted(differing)),
    )


def _check_wanted(published: dict[str, _Published], wanted: Sequence[Wanted]) -> None:
    """Raise unless the names are the same on both sides, and stand for the same."""
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
    """The same elements in boxes that don't overlap."""
    if len(boxes) == 1:
        return list(boxes)
    found: list[Box] = []
    for box in dict.fromkeys(boxes):
        rest = [box]
        for earlier in found:
            rest = [part for old in rest for part in subtract(old, earlier)]
        found += rest
    return found


# What lies in which bucket -------------------------------------------------------------------------------------


def plan_buckets(
    table: Sequence[Piece], parts_by_member: Sequence[Sequence[Part]], bucket_bytes: int
) -> list[BucketPlan]:
    """The buckets of one publisher rank, in the order in which they are sent.

    Each lane fills buckets of its own in the order of the table, and they are sent in the order in which they were
    begun. A part that a bucket has no room for is cut along its outer dimensions, at the finest into rows of the last;
    a vector is cut anywhere.
    parts_by_member: for each member what it wants, as `select` gives it; boxes may overlap.

    Raises:
        ConfigError: a part isn't within a piece of the table; a dtype is unknown; a row is longer than a bucket.
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
    table: Sequence[Piece], parts_by_member: Sequence[Sequence[Part]]
) -> dict[int, dict[Box, frozenset[int]]]:
    """By piece: each box that somebody wants of it, and who does."""
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
    """Disjoint boxes that hold what ``wants`` holds, each with all who want it, in the order of their offsets."""
    if len(wants) == 1:
        return [(box, tuple(sorted(who))) for box, who in wants.items()]
    axis = most_cut(wants, len(next(iter(wants)).offsets))
    done: list[tuple[Box, frozenset[int]]] = []
    near: list[tuple[Box, frozenset[int]]] = []  # of those found, all that a box not looked at yet may meet
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
        self.entries: list[Entry] = []
        self.end = 0


class _Filling:
    """Puts boxes into buckets: one bucket of each lane is open at a time."""

    def __init__(self, bucket_bytes: int) -> None:
        self.buckets: list[_Bucket] = []
        self._limit = bucket_bytes
        self._open: dict[Lane, _Bucket] = {}

    def add(self, number: int, piece: Piece, box: Box, lane: Lane) -> None:
        """Put ``box`` of piece ``number`` behind what its lane has."""
        itemsize = itemsize_of(piece)
        bucket = self._open.get(lane) or self._begin(lane)
        rest = [box]
        while rest:
            box = rest.pop()
            nbytes = box.volume * itemsize
            at = round_up(bucket.end, ALIGN_BYTES) if nbytes else 0
            room = self._limit - at
            if nbytes <= room:
                bucket.entries.append(Entry(number, box.offsets, box.sizes, at, nbytes))
                bucket.end = max(bucket.end, at + nbytes)
                continue
            whole_rows = len(box.sizes) > 1  # of a vector each element is one
            head = _head(box, room // itemsize, whole_rows=whole_rows) if room * _FILL > self._limit else None
            if head is not None:
                # Last in, first out: the head goes into this bucket, then what lies behind it, from the inside out.
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


def _head(box: Box, most: int, *, whole_rows: bool) -> Box | None:
    """The largest beginning of ``box``, in row-major order, that is a box of at most ``most`` elements.

    None if it would have to cut a row of the last dimension and ``whole_rows`` forbids that.
    """
    inner = box.volume
    for dim, size in enumerate(box.sizes[:-1] if whole_rows else box.sizes):
        inner //= size
        if inner <= most:
            return Box(box.offsets, (*(1,) * dim, min(size, most // inner), *box.sizes[dim + 1 :]))
    return None


def row_bytes(sizes: Sequence[int], itemsize: int) -> int:
    """Bytes of what is never cut: a row of the last dimension, of a vector an element."""
    return (sizes[-1] if len(sizes) > 1 else 1) * itemsize


def unfit(name: str, dtype: str, shape: Sequence[int], row: int, limit: int) -> ConfigError:
    """The error for a row that is longer than a bucket."""
    return ConfigError(
        f"a row of {name!r} ({dtype} {list(shape)}) has {row} bytes, but buckets have {limit}: a row of the last "
        "dimension, or an element of a vector, can't be cut; give a larger bucket_bytes",
        field="bucket_bytes",
    )


def runs_of(box: Box, most: int) -> Iterator[Box]:
    """``box`` in row-major order, in boxes of at most ``most`` elements: each one run of a buffer that holds it."""
    rest = [box]
    while rest:
        box = rest.pop()
        head = _head(box, most, whole_rows=False) if box.volume > most else None
        if head is None:
            yield box
        else:
            rest += [*subtract(box, head), head]


def itemsize_of(piece: Piece) -> int:
    """Bytes of an element. Raises `ConfigError` for a dtype that is unknown here."""
    itemsize = ITEMSIZE.get(piece.dtype)
    if itemsize is None:
        raise ConfigError(f"tensor {piece.name!r} has dtype {piece.dtype}, which is unknown here", field=piece.name)
    return itemsize
