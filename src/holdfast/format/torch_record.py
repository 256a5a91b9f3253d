"""A `torch.save` record around a payload that lies at a planned position. Torch-free, no I/O.

The bytes that stand before and after a tensor's raw data so that stock ``torch.load(..., weights_only=True)`` reads
the whole as that tensor: contiguous, on the CPU, without gradient. They depend on nothing but dtype, sizes and where
the record starts, so they are rendered once a plan; staging then writes payloads and nothing else.

    a/data.pkl   the pickle that rebuilds the tensor            \\
    a/version    "3"                                             | header
    a/data/0     local header, lengthened to align the payload  /
    <payload>    little-endian, row-major, its CRC left zero: torch doesn't check it, and it isn't known ahead
    directory, end record                                          trailer

Guarantees: deterministic; `measure` and `render` agree; a payload of 1 MiB and more starts on 4,096 bytes of the file
(so that O_DIRECT and a reader's own alignment are served), a smaller one on 64 (as torch aligns).
Assumes: a little-endian machine on both ends, as ``torch.load`` does where no ``byteorder`` entry says otherwise.
Does not: look at payloads, resolve conjugate or negative views, or place records in files (``plan.write`` does).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.format.manifest import PAGE_BYTES

# A torch record (what `torch.save` writes) is a zip archive of *stored* entries. Rendering it by hand places a payload
# at a planned position; reading it by hand copies nothing and never trusts a size that a damaged record claims. Entries
# and archives past 4 GiB use zip64. CRCs are not checked: Holdfast's own checksums cover whole files.

LIMIT_32: Final = 0xFFFFFFFF
"""Sizes and offsets from here on don't fit the classic fields: they go into zip64 ones."""

EXTRA_LIMIT_BYTES: Final = 0xFFFF

# signature, version needed, flags, method, time, date, crc, stored size, size, name length, extra length
_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
# signature, version made by, version needed, flags, method, time, date, crc, stored size, size, name length,
# extra length, comment length, disk, internal attributes, external attributes, local header offset
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
# signature, disk, directory's disk, entries here, entries, directory size, directory offset, comment length
_END: Final = struct.Struct("<4sHHHHIIH")
# signature, size of the rest, version made by, version needed, disk, directory's disk, entries here, entries,
# directory size, directory offset
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
# signature, disk, offset of _END64, disks
_LOCATOR64: Final = struct.Struct("<4sIQI")
_ZIP64_SIZES: Final = struct.Struct("<HHQQ")
_ZIP64_SIZES_AND_OFFSET: Final = struct.Struct("<HHQQQ")
_EXTRA: Final = struct.Struct("<HH")

LOCAL_BYTES: Final = _LOCAL.size
CENTRAL_BYTES: Final = _CENTRAL.size
_ZIP64_ID: Final = 0x0001
_PADDING_ID: Final = 0x4246  # "FB": the id torch itself pads with
_DOS_DATE: Final = 0x0021  # 1980-01-01: a record's bytes must not depend on the clock


class MalformedRecord(ValueError):
    """A record isn't a zip of stored entries, or claims something that isn't in it; the message says what."""


def padding_bytes(end: int, alignment: int) -> int:
    """Bytes of padding that move ``end`` onto ``alignment``: none, or at least the 4 that an extra field takes."""
    pad = -end % alignment
    return pad if pad == 0 or pad >= _EXTRA.size else pad + alignment


def local_bytes(name: bytes, size: int) -> int:
    """Length of what `local_header` returns for these arguments and no padding."""
    return LOCAL_BYTES + len(name) + (_ZIP64_SIZES.size if size >= LIMIT_32 else 0)


def local_header(name: bytes, size: int, crc: int, *, padding: int = 0) -> bytes:
    """The header that stands before a stored entry of ``size`` bytes; ``padding`` (0, or at least 4) lengthens it."""
    if size >= LIMIT_32:
        extra, shown, needed = _ZIP64_SIZES.pack(_ZIP64_ID, 16, size, size), LIMIT_32, 45
    else:
        extra, shown, needed = b"", size, 20
    if padding:
        extra += _EXTRA.pack(_PADDING_ID, padding - _EXTRA.size) + bytes(padding - _EXTRA.size)
    assert len(extra) <= EXTRA_LIMIT_BYTES
    return _LOCAL.pack(b"PK\3\4", needed, 0, 0, 0, _DOS_DATE, crc, shown, shown, len(name), len(extra)) + name + extra


def central_entry(name: bytes, size: int, crc: int, offset: int) -> bytes:
    """The directory's line on an entry whose local header starts at ``offset`` of the record."""
    if max(size, offset) >= LIMIT_32:
        # All three at once: readers take them in this order, each only where its classic field is saturated.
        extra = _ZIP64_SIZES_AND_OFFSET.pack(_ZIP64_ID, 24, size, size, offset)
        size, offset, needed = LIMIT_32, LIMIT_32, 45
    else:
        extra, needed = b"", 20
    head = _CENTRAL.pack(
        b"PK\1\2", needed, needed, 0, 0, 0, _DOS_DATE, crc, size, size, len(name), len(extra), 0, 0, 0, 0, offset
    )
    return head + name + extra


def end_bytes(*, wide: bool) -> int:
    """Length of what `end_record` returns."""
    return _END.size + (_END64.size + _LOCATOR64.size if wide else 0)


def end_record(entries: int, directory_bytes: int, directory_offset: int, *, wide: bool) -> bytes:
    """Render the end of a record whose directory starts at ``directory_offset``; set ``wide`` if it may reach
    `LIMIT_32`.
    """
    assert wide or directory_offset < LIMIT_32
    if not wide:
        return _END.pack(b"PK\5\6", 0, 0, entries, entries, directory_bytes, directory_offset, 0)
    return (
        _END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, entries, entries, directory_bytes, directory_offset)
        + _LOCATOR64.pack(b"PK\6\7", 0, directory_offset + directory_bytes, 1)
        + _END.pack(b"PK\5\6", 0, 0, entries, entries, directory_bytes, LIMIT_32, 0)
    )


def read_entries(record: memoryview) -> dict[str, memoryview]:
    """Every entry of a record by its name without the root directory, as views into ``record``.

    Raises `MalformedRecord` for anything that isn't a zip archive of stored entries that lie inside the record.
    """
    entries, position, end = _find_directory(record)
    found: dict[str, memoryview] = {}
    for _ in range(entries):
        if end - position < _CENTRAL.size:
            raise MalformedRecord(f"its directory ends after {len(found)} of {entries} entries")
        fields = _CENTRAL.unpack_from(record, position)
        signature, flags, method = fields[0], fields[3], fields[4]
        stored, size, name_bytes, extra_bytes, comment_bytes, offset = *fields[8:13], fields[16]
        tail = position + _CENTRAL.size
        next_position = tail + name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or next_position > end:
            raise MalformedRecord(f"entry {len(found)} of its directory is damaged")
        name = bytes(record[tail : tail + name_bytes]).decode("utf-8", "replace")
        extra = record[tail + name_bytes : tail + name_bytes + extra_bytes]
        size, stored, offset = _widen(extra, size, stored, offset, name)
        if method != 0 or flags & 1 or size != stored:
            raise MalformedRecord(f"entry {name!r} is compressed or encrypted; torch records are stored as they are")
        short = name.partition("/")[2]
        if not short or short in found:
            raise MalformedRecord(f"entry {name!r} has no root directory before its name, or is there twice")
        found[short] = _payload(record, name, offset, size)
        position = next_position
    return found


def _find_directory(record: memoryview) -> tuple[int, int, int]:
    """(entries, start, end) of the central directory; all inside the record."""
    at = len(record) - _END.size
    if at < 0 or bytes(record[at : at + 4]) != b"PK\5\6" or bytes(record[:4]) != b"PK\3\4":
        raise MalformedRecord(f"it isn't a zip archive of {len(record):,} bytes")
    _, _, _, _, entries, size, start, _ = _END.unpack_from(record, at)
    if LIMIT_32 in (size, start) or entries == 0xFFFF:
        locator = at - _LOCATOR64.size
        if locator < 0 or bytes(record[locator : locator + 4]) != b"PK\6\7":
            raise MalformedRecord("its zip64 locator is missing")
        at = _LOCATOR64.unpack_from(record, locator)[2]
        if at + _END64.size > locator or bytes(record[at : at + 4]) != b"PK\6\6":
            raise MalformedRecord("its zip64 end record is missing")
        *_, entries, size, start = _END64.unpack_from(record, at)
    if start + size > at:
        raise MalformedRecord("its directory lies outside the record")
    return entries, start, start + size


def _widen(extra: memoryview, size: int, stored: int, offset: int, name: str) -> tuple[int, int, int]:
    """Replace saturated fields by the zip64 ones of the extra field, which come in this order."""
    if LIMIT_32 not in (size, stored, offset):
        return size, stored, offset
    position = 0
    while position + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, position)
        body = extra[position + _EXTRA.size : position + _EXTRA.size + length]
        if kind == _ZIP64_ID:
            wide = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            fields = tuple(next(wide, -1) if value == LIMIT_32 else value for value in (size, stored, offset))
            if -1 not in fields:
                return fields[0], fields[1], fields[2]
        position += _EXTRA.size + length
    raise MalformedRecord(f"entry {name!r} lacks its zip64 sizes")


def _payload(record: memoryview, name: str, offset: int, size: int) -> memoryview:
    if offset + LOCAL_BYTES > len(record) or bytes(record[offset : offset + 4]) != b"PK\3\4":
        raise MalformedRecord(f"entry {name!r} isn't at byte {offset:,}")
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(record, offset)
    start = offset + LOCAL_BYTES + name_bytes + extra_bytes
    if start + size > len(record):
        raise MalformedRecord(f"entry {name!r} claims {size:,} bytes at {start:,}, past the record's {len(record):,}")
    return record[start : start + size]


RECORD_ALIGN_BYTES: Final = 64
"""Records, objects and payloads start on it, as torch aligns."""
DIRECT_FROM_BYTES: Final = 1 << 20
"""Payloads of this size and more are aligned to `PAGE_BYTES`."""

LEGACY_STORAGES: Final[dict[str, str]] = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Dtypes that `torch.save` pickles by a typed storage; the others go through ``_rebuild_tensor_v3`` with a dtype."""

_PICKLE: Final = b"a/data.pkl"
_VERSION: Final = b"a/version"
_PAYLOAD: Final = b"a/data/0"
_VERSION_TEXT: Final = b"3\n"


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Lengths in bytes of what stands around a payload: from the record's start to it, and behind it."""

    header_bytes: int
    trailer_bytes: int


def payload_bytes(dtype: str, sizes: tuple[int, ...]) -> int:
    """Length in bytes of a payload. Raises `ConfigError` for a dtype that records can't hold, or a negative size."""
    if any(size < 0 for size in sizes):
        raise ConfigError(f"a tensor can't have the sizes {sizes}", field="sizes")
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise ConfigError(f"dtype {dtype!r} can't be stored; these can: {', '.join(sorted(ITEMSIZE))}", field="dtype")
    return itemsize * prod(sizes)


def measure(dtype: str, sizes: tuple[int, ...], *, record_offset: int) -> RecordShape:
    """Return the lengths of header and trailer of a record at ``record_offset`` (bytes into its file, any
    value >= 0).
    """
    template = _template(dtype, sizes)
    return RecordShape(template.fixed_bytes + template.padding_at(record_offset), template.trailer_bytes)


def render(dtype: str, sizes: tuple[int, ...], *, record_offset: int) -> tuple[bytes, bytes]:
    """Header and trailer of the record at ``record_offset``, of the lengths that `measure` gives.

    A few microseconds where dtype and sizes were seen before, and a fraction of one for small payloads. Thread-safe.
    """
    kept = _render_small(dtype, sizes, record_offset % RECORD_ALIGN_BYTES)
    return _render(_template(dtype, sizes), record_offset) if kept is None else kept


@lru_cache(maxsize=4096)
def _render_small(dtype: str, sizes: tuple[int, ...], record_offset: int) -> tuple[bytes, bytes] | None:
    """None for a large payload; of small ones headers are short and, as they depend on little of a place, few."""
    template = _template(dtype, sizes)
    return _render(template, record_offset) if template.alignment == RECORD_ALIGN_BYTES else None


def _render(template: _Template, record_offset: int) -> tuple[bytes, bytes]:
    padding = template.padding_at(record_offset)
    header = template.prefix + local_header(_PAYLOAD, template.nbytes, 0, padding=padding)
    directory_offset = len(header) + template.nbytes
    directory = template.directory
    return header, directory + end_record(3, len(directory), directory_offset, wide=template.wide)


@dataclass(frozen=True, slots=True)
class _Template:
    """Parts of a record that do not depend on its position."""

    nbytes: int
    alignment: int
    prefix: bytes
    """Entries ``data.pkl`` and ``version``, whole."""
    fixed_bytes: int
    """Header without padding."""
    directory: bytes
    wide: bool
    """Whether the end record is a zip64 one. Settled for the longest padding, so that lengths add up at any offset."""
    trailer_bytes: int

    def padding_at(self, record_offset: int) -> int:
        return padding_bytes(record_offset + self.fixed_bytes, self.alignment)


@lru_cache(maxsize=16_384)
def _template(dtype: str, sizes: tuple[int, ...]) -> _Template:
    nbytes = payload_bytes(dtype, sizes)
    pickled = render_pickle(dtype, sizes)
    prefix, directory = b"", b""
    for name, content in ((_PICKLE, pickled), (_VERSION, _VERSION_TEXT)):
        crc = zlib.crc32(content)
        directory += central_entry(name, len(content), crc, len(prefix))
        prefix += local_header(name, len(content), crc) + content
    directory += central_entry(_PAYLOAD, nbytes, 0, len(prefix))
    fixed_bytes = len(prefix) + local_bytes(_PAYLOAD, nbytes)
    alignment = PAGE_BYTES if nbytes >= DIRECT_FROM_BYTES else RECORD_ALIGN_BYTES
    wide = fixed_bytes + 2 * alignment + nbytes >= LIMIT_32
    return _Template(
        nbytes=nbytes,
        alignment=alignment,
        prefix=prefix,
        fixed_bytes=fixed_bytes,
        directory=directory,
        wide=wide,
        trailer_bytes=len(directory) + end_bytes(wide=wide),
    )


def render_pickle(dtype: str, sizes: tuple[int, ...]) -> bytes:
    """The protocol 2 pickle of a contiguous CPU tensor whose bytes are storage ``0``, opcode by opcode.

    What `torch.save` writes, without the memo that nothing refers to.
    """
    numel = prod(sizes)
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    legacy = LEGACY_STORAGES.get(dtype)
    if legacy is not None:
        rebuild, storage, length, tail = b"_rebuild_tensor_v2", f"torch\n{legacy}\n".encode(), numel, b""
    else:
        rebuild, storage, length = b"_rebuild_tensor_v3", b"torch.storage\nUntypedStorage\n", numel * ITEMSIZE[dtype]
        tail = f"ctorch\n{dtype}\n".encode()
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n" + rebuild + b"\n(",
            b"(" + _text("storage") + b"c" + storage + _text("0") + _text("cpu") + _number(length) + b"tQ",
            _number(0),
            b"(" + b"".join(map(_number, sizes)) + b"t",
            b"(" + b"".join(map(_number, reversed(strides))) + b"t",
            b"\x89ccollections\nOrderedDict\n)R",
            tail + b"tR.",
        )
    )


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(value: int) -> bytes:
    """A non-negative integer in the shortest opcode that torch's restricted unpickler knows."""
    if value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    signed = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + len(signed).to_bytes(1, "little") + signed
