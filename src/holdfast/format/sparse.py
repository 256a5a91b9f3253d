"""Encode what changed between two versions of an array's bits, by element; apply and fold such deltas.

    encoded = encode(before, after, "bfloat16")      # bytes of the same array, at two versions
    apply(encoded.record, copy_of_before)            # is `after` now, verified; or `CheckpointCorrupt`
    fold([first, second])                            # one record that does what both do, one after the other

Elements are compared and moved as unsigned integers of their size (*units*), never as numbers: -0 is a change, an equal
NaN is none, and every payload survives. An element of a complex dtype is two units, packed fp4 is taken by byte. Per
block of `BLOCK_UNITS` the cheapest of three says where values go: gaps (u8 or u16, with an escape), a bitmap, or every
unit of the block (dense). Values are new bits (``"values"``: applying twice does no harm) or steps between ordered
integers modulo 2**n (``"steps"``: smaller, for exactly one base). Their bytes are split into planes; zstd is used for
what it makes smaller, if the package ``zstandard`` is there (``holdfast[zstd]``).

    record   head: magic, format, kind, units, digests, xxh3 of the record | a row a block | payloads
    row      how positions and values are written, how many, xxh3 of the block's *result*

Guarantees: after `apply` the array is bit for bit what `encode` was given as ``after``, or `CheckpointCorrupt` was
raised: every block of the result is hashed, unchanged ones too. A record that is damaged, forged, cut short, for an
array of another size, or applied to another base is refused; nothing outside of the array is ever written, and memory
is bounded by some blocks a thread. Equal input gives equal records for any number of threads.
Assumes: contiguous memory of a little-endian machine, which nobody writes to meanwhile. After a failed `apply` the
array is neither version: apply to a copy aside.
Does not: sign anything, or know which version a record belongs to; who stores records names their base (`Head.base`).
"""

from __future__ import annotations

import struct
import threading
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import xxhash

from holdfast.cores import take_turns
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Units = npt.NDArray[np.unsignedinteger[Any]]
    Places = npt.NDArray[np.int64]
    Memory = bytes | bytearray | memoryview | npt.NDArray[Any]

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None  # type: ignore[assignment]

Kind = Literal["values", "steps"]
KINDS: Final[tuple[Kind, ...]] = ("values", "steps")

BLOCK_UNITS: Final = 1 << 18
"""Units encoded at a time: both versions of a block of bf16, and what is made of it, stay in a processor's cache."""
_BLOCK_UNITS_MAX: Final = 1 << 24
_FORMAT: Final = 1
_MAGIC: Final = b"HFsd"
_HEAD: Final = struct.Struct("<4sBBBBIQQQQ")
"""Magic, format, kind, bytes of a unit, ordered as floats, units of a block, units, changed, digests of base, result.

The xxh3 of the record without it follows."""
_HEAD_BYTES: Final = _HEAD.size + 8
_ROW: Final = np.dtype(
    [
        *(("where", "u1"), ("width", "u1"), ("zstd", "<u2")),
        *(("count", "<u4"), ("escapes", "<u4"), ("nbytes", "<u4"), ("result", "<u8")),
    ]
)
_NOTHING, _GAPS8, _GAPS16, _BITMAP, _DENSE = range(5)
_GAP_LIMITS: Final = {_GAPS8: 0xFF, _GAPS16: 0xFFFF}
"""What stands for a gap of this and more, which follows as an escape."""
_UNIT_BYTES: Final = (1, 2, 4, 8)
_NOT_FLOATS: Final = ("bool", "int", "uint", "bits", "float8_e8m0fnu", "float4")
_SAMPLE_BYTES: Final = 4096
_PAYS: Final = 15 / 16
"""zstd is kept where it leaves at most this share."""
_ZSTD_LEVEL: Final = 1
_TURN_BLOCKS: Final = 4
"""Blocks that a thread takes at a time."""


class UnitKind(NamedTuple):
    """How a dtype is compared: ``nbytes`` a unit, ``per_element`` units; ``ordered``: sign and magnitude, as floats."""

    nbytes: int
    per_element: int
    ordered: bool

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """The unsigned integers of this size."""
        return np.dtype(f"<u{self.nbytes}")


def unit_of(dtype: str) -> UnitKind:
    """Return how elements of ``dtype``, a name of `holdfast.dtypes`, are compared."""
    nbytes, count = ITEMSIZE[dtype], 1
    if dtype.startswith("complex"):
        nbytes, count = nbytes // 2, 2
    return UnitKind(nbytes, count, not dtype.startswith(_NOT_FLOATS))


class Head(NamedTuple):
    """What a record says of itself. ``base``, ``result``: the digests of the array before and after."""

    kind: Kind
    unit_bytes: int
    ordered: bool
    block_units: int
    units: int
    changed: int
    base: int
    result: int

    @property
    def blocks(self) -> int:
        """Blocks of the array; the last may be short."""
        return -(-self.units // self.block_units)


class _BlockRow(NamedTuple):
    """What a record says of a block; ``end``: of its payload."""

    where: int
    width: int
    zstd: int
    changes: int
    escapes: int
    nbytes: int
    result: int
    end: int


class Encoded(NamedTuple):
    """A record, and the hashes of the blocks of its result, from which the next one starts."""

    record: bytes
    hashes: npt.NDArray[np.uint64]


def block_hashes(memory: Memory, dtype: str, *, threads: int = 1) -> npt.NDArray[np.uint64]:
    """Return the xxh3 of each block of an array's bytes."""
    units = _units(memory, unit_of(dtype).nbytes)
    found = np.zeros(-(-len(units) // BLOCK_UNITS), np.uint64)

    def hash_block(number: int) -> None:
        found[number] = _hash(units[number * BLOCK_UNITS : (number + 1) * BLOCK_UNITS])

    _over_blocks(len(found), hash_block, threads)
    return found


def digest_of_hashes(hashes: npt.NDArray[np.uint64]) -> int:
    """Return the digest of an array whose blocks have these hashes."""
    return xxhash.xxh3_64_intdigest(hashes.astype("<u8").tobytes())


# Encode --------------------------------------------------------------------------------------------------------


def encode(
    before: Memory,
    after: Memory,
    dtype: str,
    *,
    kind: Kind = "values",
    base_hashes: npt.NDArray[np.uint64] | None = None,
    compress: bool | None = None,
    threads: int = 1,
) -> Encoded:
    """Return the record that makes ``after`` of ``before``, the bytes of one array at two versions.

    base_hashes: the `Encoded.hashes` of ``before``, if known: saves a pass over it. compress: use zstd; None: if it is
    installed.

    Raises `ConfigError`: an unknown kind, ``compress=True`` without the package, or arrays of different sizes.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind of delta: expected one of {', '.join(KINDS)}, found {kind!r}", field="delta")
    unit = unit_of(dtype)
    old, new = _units(before, unit.nbytes), _units(after, unit.nbytes)
    if old.size != new.size:
        raise ConfigError(
            f"a delta is of one array: {old.nbytes} bytes before, {new.nbytes} bytes after; publish it whole",
            field="delta",
        )
    if base_hashes is None:
        base_hashes = block_hashes(before, dtype, threads=threads)
    rows = np.zeros(len(base_hashes), _ROW)
    payloads: list[bytes] = [b""] * len(rows)
    scratch = _Scratch(compress)

    changed = np.zeros(len(rows), np.int64)

    def encode_block(number: int) -> None:
        cut = slice(number * BLOCK_UNITS, (number + 1) * BLOCK_UNITS)
        mine = new[cut]
        places = _places_in(np.not_equal(old[cut], mine, out=scratch.mask(mine.size)))
        values: Units = mine[places]
        if kind == "steps":
            values = _zigzag(_ordered(values, unit.ordered) - _ordered(old[cut][places], unit.ordered))
        everywhere = partial(_filled, places, values, mine.size) if kind == "steps" else lambda: mine
        payloads[number] = _write(places, values, everywhere, mine.size, rows[number], scratch)
        rows["result"][number] = _hash(mine)
        changed[number] = len(places)

    _over_blocks(len(rows), encode_block, threads)
    hashes = rows["result"].astype(np.uint64)
    base, result = digest_of_hashes(base_hashes), digest_of_hashes(hashes)
    head = Head(kind, unit.nbytes, unit.ordered, BLOCK_UNITS, new.size, int(changed.sum()), base, result)
    return Encoded(_sealed(head, rows, payloads), hashes)


def _places_in(mask: npt.NDArray[np.bool_]) -> Places:
    """Return where a mask is true, as `numpy.flatnonzero`; faster where few are, by eight at a time."""
    head = len(mask) // 8 * 8
    words = mask[:head].view(np.uint64)
    rows = np.flatnonzero(words != 0)
    if len(mask) != head or 2 * len(rows) > len(words):
        return np.flatnonzero(mask)
    found = np.flatnonzero(words[rows].view(np.bool_))
    places: Places = rows[found >> 3]
    places <<= 3
    found &= 7
    places += found
    return places


def _write(
    places: Places, values: Units, everywhere: Callable[[], Units] | None, size: int, row: Any, scratch: _Scratch
) -> bytes:
    """Fill ``row``, but for the result, and return the block's payload.

    everywhere: a value for every unit; None if that isn't known.
    """
    count = len(places)
    if not count:
        return b""
    gaps = np.empty(count, np.uint32)
    gaps[0] = places[0]
    np.subtract(places[1:], places[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    width = _width_of(values)
    far, farther = (int(np.count_nonzero(gaps >= limit)) for limit in (0xFF, 0xFFFF))
    costs = {
        _GAPS8: count * (1 + width) + 4 * far,
        _GAPS16: count * (2 + width) + 4 * farther,
        _BITMAP: -(-size // 8) + count * width,
    }
    if everywhere is not None:
        costs[_DENSE] = size * width
    where = min(costs, key=costs.__getitem__)
    escapes = np.empty(0, np.uint32)
    streams: list[npt.NDArray[Any]] = []
    if where in _GAP_LIMITS:
        limit = _GAP_LIMITS[where]
        escapes = gaps[gaps >= limit]
        streams.append(np.minimum(gaps, limit).astype("<u1" if where == _GAPS8 else "<u2").view(np.uint8))
    elif where == _BITMAP:
        mask = np.zeros(size, np.bool_)
        mask[places] = True
        streams.append(np.packbits(mask, bitorder="little"))
    elif everywhere is not None:
        values, count = everywhere(), size
        width = _width_of(values)
    streams += _planes_of(values, width)
    lengths, parts, flags = [], [], 0
    for number, stream in enumerate(streams):
        packed = scratch.packed(stream)
        if packed is not None:
            flags |= 1 << number
            lengths.append(len(packed))
        parts.append(stream.tobytes() if packed is None else packed)
    payload = b"".join((np.array(lengths, "<u4").tobytes(), escapes.astype("<u4").tobytes(), *parts))
    row["where"], row["width"], row["zstd"], row["count"] = where, width, flags, count
    row["escapes"], row["nbytes"] = len(escapes), len(payload)
    return payload


def _filled(places: Places, values: Units, size: int) -> Units:
    """Return a value for every unit: 0, which is no step, where nothing is."""
    whole = np.zeros(size, values.dtype)
    whole[places] = values
    return whole


def _sealed(head: Head, rows: npt.NDArray[Any], payloads: Sequence[bytes]) -> bytes:
    first = _HEAD.pack(
        _MAGIC,
        _FORMAT,
        KINDS.index(head.kind),
        head.unit_bytes,
        head.ordered,
        head.block_units,
        head.units,
        head.changed,
        head.base,
        head.result,
    )
    table = rows.tobytes()
    state = xxhash.xxh3_64(first)
    for part in (table, *payloads):
        state.update(part)
    return b"".join((first, struct.pack("<Q", state.intdigest()), table, *payloads))


# Read, apply, fold ---------------------------------------------------------------------------------------------


class Record:
    """A record whose checksum was verified; its blocks are checked as they are decoded."""

    def __init__(self, record: Memory, *, what: str = "a delta") -> None:
        """what: says in errors which record this is: a path, or a tensor.

        Raises `CheckpointCorrupt`; `ConfigError` for a newer format.
        """
        self.what = what
        self._bytes = np.frombuffer(record, np.uint8)
        self.head = self._read_head()
        start = _HEAD_BYTES
        if len(self._bytes) < start + self.head.blocks * _ROW.itemsize:
            raise self._damaged(f"it ends within the table of its {self.head.blocks} blocks")
        self.rows = self._bytes[start : start + self.head.blocks * _ROW.itemsize].view(_ROW)
        start += self.rows.nbytes
        ends = start + np.cumsum(self.rows["nbytes"], dtype=np.int64)
        end = int(ends[-1]) if len(ends) else start
        if end != len(self._bytes):
            raise self._damaged(f"its payloads end at byte {end}, it has {len(self._bytes)}")
        self._told = [_BlockRow._make((*row, end)) for row, end in zip(self.rows.tolist(), ends.tolist(), strict=True)]
        if digest_of_hashes(self.hashes) != self.head.result:
            raise self._damaged("its hashes aren't those of its result")

    def _read_head(self) -> Head:
        if len(self._bytes) < _HEAD_BYTES:
            raise self._damaged(f"it has {len(self._bytes)} bytes, a head alone has {_HEAD_BYTES}")
        first = self._bytes[: _HEAD.size].tobytes()
        magic, version, kind, nbytes, ordered, block, units, changed, base, result = _HEAD.unpack(first)
        if magic != _MAGIC:
            raise self._damaged("it doesn't begin as a delta")
        state = xxhash.xxh3_64(first)
        state.update(self._bytes[_HEAD_BYTES:].data)
        (expected,) = struct.unpack("<Q", self._bytes[_HEAD.size : _HEAD_BYTES].tobytes())
        if state.intdigest() != expected:
            raise self._damaged(f"its xxh3 is {state.intdigest():016x}, it was written with {expected:016x}")
        if version != _FORMAT:
            raise ConfigError(
                f"{self.what} is of delta format {version}; this version of Holdfast reads {_FORMAT}: update it",
                field="delta",
            )
        fits = kind < len(KINDS) and nbytes in _UNIT_BYTES and ordered <= 1 and 1 <= block <= _BLOCK_UNITS_MAX
        if not fits or changed > units or units > 1 << 62:
            raise self._damaged("its head says what no delta says")
        return Head(KINDS[kind], nbytes, bool(ordered), block, units, changed, base, result)

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """The hashes of the blocks of the result."""
        found: npt.NDArray[np.uint64] = self.rows["result"].astype(np.uint64)
        return found

    def size_of(self, number: int) -> int:
        """Return the units of a block."""
        return min(self.head.block_units, self.head.units - number * self.head.block_units)

    def block(self, number: int) -> tuple[Places, Units]:
        """Return where a block changes, ascending from 0 within it, and its values, or steps.

        Raises `CheckpointCorrupt`; `ConfigError` if zstd is missing.
        """
        row, size = self._told[number], self.size_of(number)
        where, width, _, count, escapes, nbytes, _, _ = row
        if where == _NOTHING:
            if count or escapes or nbytes:
                raise self._damaged(f"block {number} has a payload, but no changes")
            return np.empty(0, np.int64), np.empty(0, f"<u{self.head.unit_bytes}")
        fits = where in (*_GAP_LIMITS, _BITMAP, _DENSE) and width in _UNIT_BYTES and width <= self.head.unit_bytes
        if not fits or not 0 < count <= size or escapes > (count if where in _GAP_LIMITS else 0):
            raise self._damaged(f"the row of block {number} says what no row says")
        lengths = {_GAPS8: [count], _GAPS16: [2 * count], _BITMAP: [-(-size // 8)], _DENSE: []}[where]
        streams = self._streams(number, lengths + [count] * width, escapes)
        places = self._places(number, where, count, size, streams)
        planes = streams[-width:]
        values: Units = planes[0] if width == 1 else _joined(planes)
        values = values.astype(f"<u{self.head.unit_bytes}", copy=False)
        return places, _unzigzag(values) if self.head.kind == "steps" else values

    def _streams(self, number: int, lengths: Sequence[int], escapes: int) -> list[npt.NDArray[np.uint8]]:
        """Return the escapes' bytes and then the streams of a block, each of its length."""
        row = self._told[number]
        end, flags = row.end, row.zstd
        at = end - row.nbytes
        packed = [number for number in range(len(lengths)) if flags >> number & 1]
        told = self._bytes[at : at + 4 * len(packed)]
        at += 4 * len(packed)
        if at > end or flags >> len(lengths):
            raise self._damaged(f"block {number} ends before its streams")
        stored = list(lengths)
        for stream, nbytes in zip(packed, told.view("<u4").tolist(), strict=True):
            stored[stream] = nbytes
        if at + 4 * escapes + sum(stored) != end:
            raise self._damaged(f"the streams of block {number} don't fill it")
        found = [self._bytes[at : at + 4 * escapes]]
        at += 4 * escapes
        for stream, (nbytes, length) in enumerate(zip(stored, lengths, strict=True)):
            data = self._bytes[at : at + nbytes]
            at += nbytes
            found.append(data if not flags >> stream & 1 else self._unpacked(data, length, number))
        return found

    def _unpacked(self, data: npt.NDArray[np.uint8], length: int, number: int) -> npt.NDArray[np.uint8]:
        if zstandard is None:
            raise _no_zstd(f"{self.what} is compressed")
        try:
            if zstandard.frame_content_size(data.data) != length:
                raise self._damaged(f"a stream of block {number} unpacks to another length")
            found = np.frombuffer(_unpacker().decompress(data.data, max_output_size=length), np.uint8)
        except zstandard.ZstdError as error:
            raise self._damaged(f"a stream of block {number} doesn't unpack: {error}") from error
        if len(found) != length:
            raise self._damaged(f"a stream of block {number} unpacks to {len(found)} bytes, expected {length}")
        return found

    def _places(
        self, number: int, where: int, count: int, size: int, streams: Sequence[npt.NDArray[np.uint8]]
    ) -> Places:
        if where == _DENSE:
            if count != size:
                raise self._damaged(f"block {number} is dense with {count} of {size} values")
            return np.arange(size, dtype=np.int64)
        if where == _BITMAP:
            found = np.flatnonzero(np.unpackbits(streams[1], count=size, bitorder="little").view(np.bool_))
            if len(found) != count:
                raise self._damaged(f"block {number} has {count} values for {len(found)} places")
            return found
        gaps: npt.NDArray[Any] = streams[1] if where == _GAPS8 else np.frombuffer(streams[1], "<u2")
        places: Places = np.add(gaps, 1, dtype=np.int64)
        if len(streams[0]):
            far = np.flatnonzero(gaps == _GAP_LIMITS[where])
            if len(far) * 4 != len(streams[0]):
                raise self._damaged(f"block {number} has {len(streams[0]) // 4} escapes for {len(far)} far gaps")
            places[far] = np.frombuffer(streams[0], "<u4")
            places[far] += 1
        places[0] -= 1
        places = np.cumsum(places, out=places)
        if places[-1] >= size:  # ascending, since 2**24 gaps below 2**32 don't overflow
            raise self._damaged(f"block {number} has a place {places[-1]}, but {size} units")
        return places

    def change(self, number: int, memory: memoryview) -> tuple[Places, Units]:
        """Make the version after of the version before in ``memory``, a block's bytes; see `check`.

        Returns where it has other bits than before, ascending, and these. Raises as `block`.
        """
        places, values = self.block(number)
        if len(places):
            values = put(np.frombuffer(memory, f"<u{self.head.unit_bytes}"), places, values, self.head)
        return places, values

    def check(self, number: int, memory: memoryview) -> None:
        """Raise `CheckpointCorrupt` unless ``memory`` is the block of the version after."""
        if xxhash.xxh3_64_intdigest(memory) != self._told[number].result:
            raise self.damaged_result(number)

    def damaged_result(self, number: int) -> CheckpointCorrupt:
        """Return the error of a block that isn't what it should be after it was applied."""
        return self._damaged(
            f"block {number} of the result has another hash than was published: it was applied to another base, or its "
            "memory was written to"
        )

    def _damaged(self, why: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.what} can't be applied: {why}. Take a full version", path=self.what)


def read_head(record: Memory, *, what: str = "a delta") -> Head:
    """Return what a record says of itself, verified. Raises as `Record`."""
    return Record(record, what=what).head


def apply(record: Memory | Record, into: Memory, *, what: str = "a delta", threads: int = 1) -> None:
    """Make the version after of the version before in ``into``: the array's bytes, writable, on the host.

    Raises:
        CheckpointCorrupt: the record is damaged or for another array, or the result isn't what was encoded: then
            ``into`` is neither version.
        ConfigError: a newer format, or zstd is missing.
    """
    found = record if isinstance(record, Record) else Record(record, what=what)
    head = found.head
    memory = np.frombuffer(into, np.uint8)
    if not memory.flags.writeable:
        raise ConfigError(f"{found.what}: the memory to apply it to can't be written to; pass a copy", field="into")
    if memory.size != head.units * head.unit_bytes:
        raise CheckpointCorrupt(
            f"{found.what} is for {head.units * head.unit_bytes} bytes, but is applied to {memory.size}",
            path=found.what,
        )
    units = memory.view(f"<u{head.unit_bytes}")

    def apply_block(number: int) -> None:
        start = number * head.block_units
        mine = units[start : start + head.block_units]
        places, values = found.block(number)
        put(mine, places, values, head)
        if _hash(mine) != int(found.rows["result"][number]):
            raise found.damaged_result(number)

    _over_blocks(head.blocks, apply_block, threads)


def put(units: Units, places: Places, values: Units, head: Head) -> Units:
    """Put values, or steps from what is there, to ``places`` of ``units``; return what is there now."""
    if head.kind == "steps":
        values = _from_ordered(_ordered(units[places], head.ordered) + values, head.ordered)
    units[places] = values
    return values


def fold(records: Sequence[Memory], *, what: str = "a delta", compress: bool | None = None, threads: int = 1) -> bytes:
    """Return one record that does what ``records``, each based on the one before it, do one after the other.

    Raises:
        CheckpointCorrupt: one of them is damaged, or is not based on the one before it.
        ConfigError: there are none, they are of different kinds or arrays, or zstd is missing.
    """
    found = [Record(record, what=f"{what} ({number} of {len(records)})") for number, record in enumerate(records, 1)]
    if not found:
        raise ConfigError("there are no deltas to fold", field="records")
    first, last = found[0].head, found[-1].head
    for earlier, later in pairwise(found):
        if later.head[:5] != first[:5]:
            raise ConfigError(f"{later.what} is of another kind or array than the first", field="records")
        if later.head.base != earlier.head.result:
            raise CheckpointCorrupt(f"{later.what} is not based on the one before it", path=later.what)
    rows = np.zeros(first.blocks, _ROW)
    payloads = [b""] * len(rows)
    changed = np.zeros(len(rows), np.int64)
    scratch = _Scratch(compress)

    def fold_block(number: int) -> None:
        size = found[0].size_of(number)
        sums = np.zeros(size, f"<u{first.unit_bytes}")
        mask = np.zeros(size, np.bool_)
        for record in found:
            places, values = record.block(number)
            sums[places] = values if first.kind == "values" else sums[places] + values
            mask[places] = True
        places = np.flatnonzero(mask if first.kind == "values" else sums)
        values = sums[places]
        if first.kind == "steps":
            values = _zigzag(values)
        everywhere = partial(_filled, places, values, size)
        # A value of a unit that didn't change isn't known here: such a block of new bits can't be dense.
        known = first.kind == "steps" or len(places) == size
        payloads[number] = _write(places, values, everywhere if known else None, size, rows[number], scratch)
        rows["result"][number] = found[-1].rows["result"][number]
        changed[number] = len(places)

    _over_blocks(first.blocks, fold_block, threads)
    return _sealed(last._replace(base=first.base, changed=int(changed.sum())), rows, payloads)


# Units ---------------------------------------------------------------------------------------------------------


def _units(memory: Memory, nbytes: int) -> Units:
    array = np.frombuffer(memory, np.uint8)
    if array.size % nbytes:
        raise ConfigError(f"{array.size} bytes aren't whole elements of {nbytes}", field="dtype")
    found: Units = array.view(f"<u{nbytes}")
    return found


def _hash(units: Units) -> int:
    return xxhash.xxh3_64_intdigest(units.data)


def _ordered(bits: Units, floats: bool) -> Units:  # noqa: FBT001
    """Return integers in the order of the numbers: a bijection of all patterns, -0 next to 0."""
    if not floats:
        return bits
    top = bits.dtype.type(bits.itemsize * 8 - 1)
    one = bits.dtype.type(1)
    found: Units = bits ^ ((~(bits >> top) + one) | (one << top))
    return found


def _from_ordered(numbers: Units, floats: bool) -> Units:  # noqa: FBT001
    """Return the bits of which `_ordered` made ``numbers``."""
    if not floats:
        return numbers
    top = numbers.dtype.type(numbers.itemsize * 8 - 1)
    one = numbers.dtype.type(1)
    found: Units = numbers ^ (((numbers >> top) - one) | (one << top))
    return found


def _zigzag(steps: Units) -> Units:
    """Return 0, 1, 2, 3, ... for the steps 0, -1, 1, -2, ..."""
    top = steps.dtype.type(steps.itemsize * 8 - 1)
    one = steps.dtype.type(1)
    found: Units = (steps << one) ^ (~(steps >> top) + one)
    return found


def _unzigzag(numbers: Units) -> Units:
    one = numbers.dtype.type(1)
    found: Units = (numbers >> one) ^ (~(numbers & one) + one)
    return found


def _width_of(values: Units) -> int:
    """Return the bytes that the largest value takes."""
    most = int(values.max(initial=0))
    return next(width for width in _UNIT_BYTES if most >> 8 * width == 0)


def _planes_of(values: Units, width: int) -> list[npt.NDArray[np.uint8]]:
    """Return the bytes of the values: all lowest, then the next, ..."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.itemsize)
    return [np.ascontiguousarray(rows[:, plane]) for plane in range(width)]


def _joined(planes: Sequence[npt.NDArray[np.uint8]]) -> Units:
    rows = np.empty((len(planes[0]), len(planes)), np.uint8)
    for number, plane in enumerate(planes):
        rows[:, number] = plane
    found: Units = rows.view(f"<u{len(planes)}").reshape(-1)
    return found


# Threads and memory --------------------------------------------------------------------------------------------


def _over_blocks(count: int, job: Callable[[int], None], threads: int) -> None:
    """Do ``job`` for each block, on some threads."""

    def turn(first: int) -> None:
        for number in range(first, min(first + _TURN_BLOCKS, count)):
            job(number)

    take_turns((partial(turn, first) for first in range(0, count, _TURN_BLOCKS)), threads)


class _Scratch(threading.local):
    """What a thread keeps between blocks."""

    def __init__(self, compress: bool | None) -> None:  # noqa: FBT001
        if compress and zstandard is None:
            raise _no_zstd("this delta is to be compressed")
        packs = zstandard is not None if compress is None else compress
        self._mask = np.empty(BLOCK_UNITS, np.bool_)
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL) if packs else None

    def mask(self, size: int) -> npt.NDArray[np.bool_]:
        return self._mask[:size]

    def packed(self, stream: npt.NDArray[np.uint8]) -> bytes | None:
        """Return the stream compressed; None if that doesn't pay, by a look at its beginning first."""
        if self._compressor is None or not len(stream):
            return None
        if len(stream) > 2 * _SAMPLE_BYTES:
            sample = stream[:_SAMPLE_BYTES]
            if len(self._compressor.compress(sample.data)) > _PAYS * len(sample):
                return None
        found = self._compressor.compress(stream.data)
        return found if len(found) <= _PAYS * len(stream) else None


_own: Final = threading.local()


def _unpacker() -> Any:
    """Return this thread's decompressor: making one takes longer than most streams."""
    found = getattr(_own, "unpacker", None)
    if found is None:
        found = _own.unpacker = zstandard.ZstdDecompressor()
    return found


def _no_zstd(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, and the package zstandard isn't installed: pip install 'holdfast[zstd]' on both sides",
        field="delta",
    )
