"""Encode and decode what one rank stores of a delta version: a record for each stored shard that has changed.

    magic | bytes of the table | table, msgpack | records (`format.sparse`), each where its row of the table says

A shard is a box of a tensor as the anchor of the chain stores it; one without a record is what it was.

Guarantees: what was decoded lies inside of the bytes; each shard is there once.
Assumes: the bytes were verified, as those of any tensor of a checkpoint; each record has a checksum of its own.
Does not: apply records, or know which version they lead from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.boxes import Box
from holdfast.errors import CheckpointCorrupt
from holdfast.format.decoding import prepare_decoding

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAGIC: Final = b"HFdelta\x01"
_HEAD_BYTES: Final = len(_MAGIC) + 8
DELTA_PREFIX: Final = "delta-"
"""Names of the tensors that hold what the ranks have stored of a delta version begin with it."""


class _DeltaRow(msgspec.Struct, frozen=True, array_like=True):
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Counted from the end of the table."""
    nbytes: int


_TABLE: Final = msgspec.msgpack.Decoder(tuple[_DeltaRow, ...])

ShardKey = tuple[str, Box]
"""A tensor's name, and a box of it that is stored."""


def delta_name(rank: int) -> str:
    """Return the name of the tensor that holds a rank's part of a delta version."""
    return f"{DELTA_PREFIX}{rank:05d}"


def encode_delta(records: Iterable[tuple[ShardKey, bytes]]) -> bytes:
    """Return one rank's part of a delta version."""
    rows: list[_DeltaRow] = []
    parts: list[bytes] = []
    at = 0
    for (name, box), record in records:
        rows.append(_DeltaRow(name, box.offsets, box.sizes, at, len(record)))
        parts.append(record)
        at += len(record)
    table = msgspec.msgpack.encode(rows)
    return b"".join((_MAGIC, len(table).to_bytes(8, "little"), table, *parts))


def decode_delta(data: memoryview, *, path: str) -> dict[ShardKey, memoryview]:
    """Return the records of one rank's part, by shard. Raises `CheckpointCorrupt`."""
    nbytes = int.from_bytes(data[len(_MAGIC) : _HEAD_BYTES], "little")
    start = _HEAD_BYTES + nbytes
    if bytes(data[: len(_MAGIC)]) != _MAGIC or start > len(data):
        raise CheckpointCorrupt(f"{path} holds no delta of a version", path=path)
    try:
        rows = _TABLE.decode(data[_HEAD_BYTES:start])
    except msgspec.MsgspecError as error:
        raise CheckpointCorrupt(f"{path}: the table of a delta can't be read: {error}", path=path) from error
    found: dict[ShardKey, memoryview] = {}
    for row in rows:
        key = row.name, Box(row.offsets, row.sizes)
        if min(row.start, row.nbytes) < 0 or start + row.start + row.nbytes > len(data) or key in found:
            raise CheckpointCorrupt(
                f"{path}: the delta's row of {row.name!r} says what can't be", path=path, tensor=row.name
            )
        found[key] = data[start + row.start : start + row.start + row.nbytes]
    return found


prepare_decoding(tuple[_DeltaRow, ...])
