"""The few bytes of the zip format that a torch record is made of, written and read by hand. Torch-free, no I/O.

A torch record (what `torch.save` writes and `torch.load` reads) is a zip archive of *stored* entries. Rendering it by
hand is what lets a payload lie at a planned position of a file; reading it by hand is what keeps a damaged or hostile
record from being trusted.

Guarantees: `read_entries` copies nothing, allocates nothing by a size that the record claims, and hands out no byte
outside the record. Entries and archives past 4 GiB use zip64.
Assumes: little-endian payloads (`torch.load` takes that as the default).
Does not: compress, decompress, check CRCs (Holdfast's own checksums cover whole files) or know what an entry means.
"""

from __future__ import annotations

import struct
from typing import Final

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
    """What closes a record whose directory starts at ``directory_offset``; ``wide`` where that may reach `LIMIT_32`."""
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
