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
from holdfast.format import zip_entries

DIRECT_ALIGNMENT: Final = 4096
SMALL_ALIGNMENT: Final = 64
DIRECT_FROM_BYTES: Final = 1 << 20
"""Payloads of this size and more are aligned to `DIRECT_ALIGNMENT`."""

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
    """How long header and trailer of a record at ``record_offset`` (bytes into its file, any value >= 0) are."""
    template = _template(dtype, sizes)
    return RecordShape(template.fixed_bytes + template.padding_at(record_offset), template.trailer_bytes)


def render(dtype: str, sizes: tuple[int, ...], *, record_offset: int) -> tuple[bytes, bytes]:
    """Header and trailer of the record at ``record_offset``, of the lengths that `measure` gives.

    A few microseconds where dtype and sizes were seen before, and a fraction of one for small payloads. Thread-safe.
    """
    kept = _render_small(dtype, sizes, record_offset % SMALL_ALIGNMENT)
    return _render(_template(dtype, sizes), record_offset) if kept is None else kept


@lru_cache(maxsize=4096)
def _render_small(dtype: str, sizes: tuple[int, ...], record_offset: int) -> tuple[bytes, bytes] | None:
    """None for a large payload; of small ones headers are short and, as they depend on little of a place, few."""
    template = _template(dtype, sizes)
    return _render(template, record_offset) if template.alignment == SMALL_ALIGNMENT else None


def _render(template: _Template, record_offset: int) -> tuple[bytes, bytes]:
    padding = template.padding_at(record_offset)
    header = template.prefix + zip_entries.local_header(_PAYLOAD, template.nbytes, 0, padding=padding)
    directory_offset = len(header) + template.nbytes
    directory = template.directory
    return header, directory + zip_entries.end_record(3, len(directory), directory_offset, wide=template.wide)


@dataclass(frozen=True, slots=True)
class _Template:
    """What of a record doesn't depend on where it lies."""

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
        return zip_entries.padding_bytes(record_offset + self.fixed_bytes, self.alignment)


@lru_cache(maxsize=16_384)
def _template(dtype: str, sizes: tuple[int, ...]) -> _Template:
    nbytes = payload_bytes(dtype, sizes)
    pickled = render_pickle(dtype, sizes)
    prefix, directory = b"", b""
    for name, content in ((_PICKLE, pickled), (_VERSION, _VERSION_TEXT)):
        crc = zlib.crc32(content)
        directory += zip_entries.central_entry(name, len(content), crc, len(prefix))
        prefix += zip_entries.local_header(name, len(content), crc) + content
    directory += zip_entries.central_entry(_PAYLOAD, nbytes, 0, len(prefix))
    fixed_bytes = len(prefix) + zip_entries.local_bytes(_PAYLOAD, nbytes)
    alignment = DIRECT_ALIGNMENT if nbytes >= DIRECT_FROM_BYTES else SMALL_ALIGNMENT
    wide = fixed_bytes + 2 * alignment + nbytes >= zip_entries.LIMIT_32
    return _Template(
        nbytes=nbytes,
        alignment=alignment,
        prefix=prefix,
        fixed_bytes=fixed_bytes,
        directory=directory,
        wide=wide,
        trailer_bytes=len(directory) + zip_entries.end_bytes(wide=wide),
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
