"""Plain objects of a state as records of a fixed length that stock `torch.load` reads.

An object's pickle changes size from save to save (a step counter passes 255, a list grows), while every byte of a
file has its place in the plan. So an object's record has a *capacity* with head room, and what isn't used is zeros
inside its ``data.pkl``, behind the pickle's STOP. An object that outgrows its capacity replans.

    a/version, a/data/0, a/data/1, ...    then    a/data.pkl (pickle, zeros)    then    directory

Guarantees: `dump_object` refuses what `load_object` couldn't load, by name, before anything is written; `load_object`
runs nothing that the record names and raises nothing but `CheckpointCorrupt`.
Does not: do I/O or check checksums: the bytes it is handed were verified, or are foreign.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format import zip_entries
from holdfast.format.object_writer import ALLOWED_OBJECTS, OBJECT_LIMIT_BYTES, ObjectPayload, pickle_object
from holdfast.format.pickle_reader import Refused

__all__ = [
    "ALLOWED_OBJECTS",
    "OBJECT_LIMIT_BYTES",
    "CapacityExceeded",
    "ObjectPayload",
    "dump_object",
    "load_object",
    "object_capacity",
    "render_object",
]

_ALIGNMENT: Final = 64
_LEAST_BYTES: Final = 1024
_PICKLE: Final = b"a/data.pkl"
_VERSION: Final = b"a/version"
_VERSION_TEXT: Final = b"3\n"


class CapacityExceeded(ConfigError):
    """An object has outgrown its record: ``needed`` bytes, ``capacity`` there are. Never seen by users: it replans."""

    def __init__(self, message: str, *, needed: int, capacity: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.capacity = capacity


def dump_object(value: Any, *, name: str) -> ObjectPayload:
    """Pickle ``value``, which must consist of `ALLOWED_OBJECTS`; ``name`` is its name in the state.

    Returns when everything in it, tensors included, has been copied: it may be changed from then on. On a device
    tensor this waits for the device.

    Raises:
        ConfigError: something in it isn't on the list (the message says where and what), or it is larger than
            `OBJECT_LIMIT_BYTES`. Nothing has been written.
    """
    return pickle_object(value, name=name)


def object_capacity(payload: ObjectPayload, previous: int = 0) -> int:
    """Length in bytes of the record to plan for ``payload``: a multiple of 64, at least 1,024.

    ``previous`` if it fits (a capacity never shrinks), else a quarter more than is needed, rounded up to a power of
    two; past 1 MiB to an eighth of one, since doubling a large object would double what is written.
    """
    needed = _needed_bytes(payload)
    if needed <= previous:
        return previous
    wanted = max(needed + needed // 4, _LEAST_BYTES)
    power = 1 << (wanted - 1).bit_length()
    step = power if power <= 1 << 20 else power // 8
    return -(-wanted // step) * step


def render_object(payload: ObjectPayload, capacity: int) -> bytes:
    """The record, exactly ``capacity`` bytes. Raises `CapacityExceeded` if the payload doesn't fit."""
    needed = _needed_bytes(payload)
    if needed > capacity:
        raise CapacityExceeded(
            f"an object takes {needed:,} bytes, more than its record's {capacity:,}", needed=needed, capacity=capacity
        )
    parts: list[bytes] = []
    directory: list[bytes] = []
    position = 0
    for name, content in _entries(payload):
        padding = _padding(name, content, position)
        crc = zlib.crc32(content)
        directory.append(zip_entries.central_entry(name, len(content), crc, position))
        parts += (zip_entries.local_header(name, len(content), crc, padding=padding), content)
        position += len(parts[-2]) + len(content)
    # The pickle comes last: whatever capacity is left becomes its padding, and nothing behind it can move.
    spare = bytes(capacity - needed)
    size = len(payload.pickle) + len(spare)
    crc = zlib.crc32(spare, zlib.crc32(payload.pickle))
    directory.append(zip_entries.central_entry(_PICKLE, size, crc, position))
    parts += (zip_entries.local_header(_PICKLE, size, crc), payload.pickle, spare)
    position += len(parts[-3]) + size
    listing = b"".join(directory)
    record = b"".join((*parts, listing, zip_entries.end_record(len(directory), len(listing), position, wide=False)))
    assert len(record) == capacity
    return record


def load_object(record: bytes | bytearray | memoryview, *, name: str, path: str) -> Any:
    """The object that ``record`` holds, one of ours or one that stock `torch.save` wrote. Tensors come on the CPU.

    Raises:
        CheckpointCorrupt: the record is damaged, or names something that isn't on `ALLOWED_OBJECTS`; the message
            says what. ``name`` and ``path`` are for it.
    """
    from holdfast.format.object_reader import read_object

    try:
        return read_object(memoryview(record).cast("B"))
    except (Refused, zip_entries.MalformedRecord) as error:
        raise CheckpointCorrupt(
            f"object {name!r} of {path} can't be loaded: {error}. Holdfast loads only what can't run code: "
            f"{'; '.join(ALLOWED_OBJECTS)}. If another program wrote it and you trust it, load it there and save it "
            "again as one of these",
            path=path,
            tensor=name,
        ) from error


def _entries(payload: ObjectPayload) -> list[tuple[bytes, bytes]]:
    """Every entry but the pickle, in the order of the record."""
    return [
        (_VERSION, _VERSION_TEXT),
        *((f"a/data/{n}".encode(), content) for n, content in enumerate(payload.storages)),
    ]


def _padding(name: bytes, content: bytes, position: int) -> int:
    if name == _VERSION:
        return 0
    return zip_entries.padding_bytes(position + zip_entries.local_bytes(name, len(content)), _ALIGNMENT)


def _needed_bytes(payload: ObjectPayload) -> int:
    position = directory = 0
    for name, content in _entries(payload):
        position += zip_entries.local_bytes(name, len(content)) + _padding(name, content, position) + len(content)
        directory += zip_entries.CENTRAL_BYTES + len(name)
    position += zip_entries.local_bytes(_PICKLE, 0) + len(payload.pickle)
    directory += zip_entries.CENTRAL_BYTES + len(_PICKLE)
    return position + directory + zip_entries.end_bytes(wide=False)
