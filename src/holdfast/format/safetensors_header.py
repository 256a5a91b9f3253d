"""The header of a safetensors file, and the index of a sharded model, from bytes that anybody may have written.

A safetensors file is 8 bytes that hold the length of a JSON object (little-endian), that object, and the payloads of
all tensors end to end. The object says of each tensor its dtype, shape and place among the payloads. A sharded model
has an index beside its files, ``model.safetensors.index.json``, that says which file each tensor is in.

Guarantees: what comes back makes sense. Every tensor has the bytes that its shape needs, all of them inside the file;
together they are the payloads exactly, without a gap and without an overlap; no file of an index leads out of its
directory. Anything else is `CheckpointCorrupt`, which names the file and the tensor. Time and memory are bounded by
the size of what was read, which the caller bounds by the size of the file; no depth of nesting overflows the stack.
Does not: read files, or know what the tensors are for. Torch-free.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.index_checks import DIMENSIONS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000
"""What every reader of the format allows a header."""
INDEX_BYTES_MAX: Final = 1 << 30

DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""The dtype codes of the format that can be read here, each with torch's name for it."""
_SUB_BYTE_BITS: Final = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Codes of the format whose elements share bytes: they are told apart from damage, and can't be read."""


class HeaderTensor(NamedTuple):
    """One tensor: ``dtype`` is the format's code; its bytes are ``start`` up to ``end`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """What a file holds: tensors in the order of their bytes; ``metadata`` is the writer's own."""

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(_Entry)
_METADATA: Final = msgspec.json.Decoder(dict[str, str])
_INDEX: Final = msgspec.json.Decoder(_Index)
_MALFORMED: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def header_length(head: bytes, *, file_size: int, path: str) -> int:
    """How many bytes of JSON follow the first 8 of a file, ``head``. Raises `CheckpointCorrupt` where they can't."""
    if len(head) < LENGTH_BYTES:
        raise CheckpointCorrupt(
            f"{path} has {file_size} bytes: too few for a safetensors file, which begins with the 8 bytes of a length; "
            "it was cut short, or is something else",
            path=path,
            byte_range=(0, file_size),
        )
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > min(HEADER_BYTES_MAX, file_size - LENGTH_BYTES):
        raise CheckpointCorrupt(
            f"{path}: its first 8 bytes say that a header of {length:,} bytes follows, but the file has {file_size:,} "
            f"and a header at most {HEADER_BYTES_MAX:,}; it was cut short, or isn't a safetensors file (one that Git "
            "LFS or an unfinished download left in its place, for example)",
            path=path,
            byte_range=(0, LENGTH_BYTES),
        )
    return length


def parse_header(data: bytes | memoryview, *, file_size: int, path: str) -> Header:
    """What the JSON of a header says of a file of ``file_size`` bytes. Raises `CheckpointCorrupt`."""
    payloads_at = LENGTH_BYTES + len(data)
    try:
        entries = _HEADER.decode(data)
        own = entries.pop("__metadata__", None)
        metadata = {} if own is None else _METADATA.decode(own)
    except _MALFORMED as error:
        raise CheckpointCorrupt(
            f"{path}: its header is not the JSON of a safetensors file: {_shown(error)}",
            path=path,
            byte_range=(LENGTH_BYTES, payloads_at),
        ) from error
    tensors = [_checked(name, raw, payloads_at, path) for name, raw in entries.items()]
    # Of two at the same place one is empty: before the other, not in the middle of it.
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    at = payloads_at
    for tensor in tensors:
        if tensor.start != at:
            what = "overlaps the tensor before it" if tensor.start < at else f"leaves out {tensor.start - at:,} bytes"
            raise CheckpointCorrupt(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.start:,}, expected {at:,}: it {what}; the "
                "header is damaged",
                path=path,
                tensor=tensor.name,
                byte_range=(min(at, tensor.start), max(at, tensor.start)),
            )
        at = tensor.end
    if at != file_size:
        last = tensors[-1].name if tensors else None
        raise CheckpointCorrupt(
            f"{path} has {file_size:,} bytes, but by its header its tensors end at byte {at:,}: it was "
            + ("cut short" if file_size < at else "written to after that, or its header is damaged"),
            path=path,
            tensor=last,
            byte_range=(min(at, file_size), max(at, file_size)),
        )
    return Header(tuple(tensors), metadata)


def torch_name(code: str, *, name: str, path: str) -> str:
    """torch's name for dtype ``code`` of tensor ``name``. Raises `ConfigError` for one that can't be read here."""
    dtype = DTYPES.get(code)
    if dtype is None:
        raise ConfigError(f"{path}: tensor {name!r} is stored as {code}, which can't be read here", field=name)
    return dtype


def parse_index(data: bytes, *, path: str) -> dict[str, str]:
    """Which file each tensor is in, by the index ``data``. Raises `CheckpointCorrupt`."""
    try:
        weight_map = _INDEX.decode(data).weight_map
    except _MALFORMED as error:
        raise CheckpointCorrupt(
            f"{path} is not an index of safetensors files (a JSON object whose 'weight_map' has a file name for each "
            f"tensor): {_shown(error)}",
            path=path,
        ) from error
    for file in set(weight_map.values()):
        if not is_file_beside(file):
            name = next(name for name, of_name in weight_map.items() if of_name == file)
            raise CheckpointCorrupt(
                f"{path}: tensor {name!r} is said to be in {file!r:.300}, which isn't the name of a file beside it",
                path=path,
                tensor=name,
            )
    return weight_map


def is_file_beside(file: str) -> bool:
    """Whether a name is that of a file in the same directory, on any system."""
    return file not in ("", ".", "..") and not set(file) & set("/\\:\0")


def _checked(name: str, raw: msgspec.Raw, payloads_at: int, path: str) -> HeaderTensor:
    try:
        entry = _ENTRY.decode(raw)
    except _MALFORMED as error:
        raise _nonsense(name, f"its entry can't be read ({_shown(error)})", path, payloads_at) from error
    dtype, shape, (start, end) = entry.dtype, tuple(entry.shape), entry.data_offsets
    bits = _SUB_BYTE_BITS.get(dtype) or ITEMSIZE.get(DTYPES.get(dtype, ""), 0) * 8
    if not bits:
        raise _nonsense(name, f"it has the dtype {dtype!r:.80}, which the format doesn't have", path, payloads_at)
    if len(shape) > DIMENSIONS_MAX or min(shape, default=0) < 0:
        raise _nonsense(name, f"it has the shape {entry.shape!r:.200}", path, payloads_at)
    if not 0 <= start <= end:
        raise _nonsense(name, f"its bytes are said to be {start} to {end}", path, payloads_at)
    # Of a product of many large numbers the first few are enough to see that it is too large, or nothing.
    volume = 0 if 0 in shape else prod(shape) if max(shape, default=0) <= 8 * end else 8 * end + 1
    if volume * bits != (end - start) * 8:
        raise _nonsense(
            name, f"{dtype} of shape {list(shape)!r:.200} doesn't take {end - start:,} bytes", path, payloads_at
        )
    return HeaderTensor(name, dtype, shape, payloads_at + start, payloads_at + end)


def _nonsense(name: str, what: str, path: str, payloads_at: int) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path}: the header makes no sense for tensor {name!r:.200}: {what}; the file is damaged, or isn't a "
        "safetensors file",
        path=path,
        tensor=name,
        byte_range=(LENGTH_BYTES, payloads_at),
    )


def _shown(error: BaseException) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else f"{error!s:.200}"
