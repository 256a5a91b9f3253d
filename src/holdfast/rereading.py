"""Reads a stored file again, extent by extent, and compares it with its checksums. Torch-free; any storage."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import xxhash

from holdfast.format.manifest import EXTENT_BYTES
from holdfast.format.parts import SparseSums

if TYPE_CHECKING:
    from holdfast.format.manifest import ReportFile
    from holdfast.format.parts import JoinedFile
    from holdfast.storage.protocol import Storage

HASH_BYTES: Final = 256 << 10
"""Hashed at a time."""


def find_bad_extent(storage: Storage, directory: str, file: ReportFile | JoinedFile) -> tuple[int, int] | None:
    """The byte range of the first extent of ``file`` below ``directory`` that doesn't have its checksum, or None."""
    path = f"{directory}/{file.name}"
    if isinstance(file.extents, SparseSums) or len(file.extents) != 8 * -(-file.size // EXTENT_BYTES):
        return 0, file.size
    with contextlib.closing(storage.read_pieces(path, EXTENT_BYTES)) as pieces:
        for index, start in enumerate(range(0, file.size, EXTENT_BYTES)):
            end = min(start + EXTENT_BYTES, file.size)
            piece = memoryview(next(pieces, b""))
            hasher = xxhash.xxh3_64()
            for offset in range(0, end - start, HASH_BYTES):
                hasher.update(piece[offset : offset + HASH_BYTES])
            if (
                len(piece) < end - start
                or hasher.intdigest().to_bytes(8, "little") != file.extents[8 * index : 8 * index + 8]
            ):
                return start, end
    return None
