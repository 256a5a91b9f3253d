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

import json
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.format.manifest import DIMENSIONS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
INDEX_NAME: Final = f"model{INDEX_SUFFIX}"

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000
"""What every reader of the format allows a header."""
RESERVED_NAME: Final = "__metadata__"
"""What a header calls its metadata: no tensor can have this name."""
INDEX_BYTES_MAX: Final = 1 << 30

CODE_BITS: Final[dict[str, int]] = {
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F32": 32,
    "U32": 32,
    "I32": 32,
    "BF16": 16,
    "F16": 16,
    "U16": 16,
    "I16": 16,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I8": 8,
    "U8": 8,
    "F6_E3M2": 6,
    "F6_E2M3": 6,
    "F4": 4,
    "BOOL": 8,
}
"""Bits of one element by safetensors' code of its type, in the order in which a file has them."""

TORCH_CODES: Final[dict[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""Torch's name of an element type, without ``torch.``, to safetensors' code: what its torch binding can save."""

DTYPES: Final[Mapping[str, str]] = {code: name for name, code in TORCH_CODES.items() if CODE_BITS[code] % 8 == 0}
"""The codes that can be read here, each with torch's name for it; elements of the others share bytes."""


_OFFSET_MAX: Final = (1 << 63) - 1
_Offset = Annotated[int, msgspec.Meta(le=_OFFSET_MAX)]


class HeaderTensor(NamedTuple):
    """One tensor: ``dtype`` is the format's code; its bytes are ``start`` up to ``end`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """Contents of a file: tensors in the order of their bytes; ``metadata`` is the writer's own."""

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]


class Fault(NamedTuple):
    """Why a header makes no sense: the ``kind`` of fault, the bytes that show it, and the ``facts`` to tell it by.

    kind      facts                          what is wrong
    short     size                           the file has no room for the length of a header
    length    length, size, most             nor for a header of that length, or no reader takes one
    json      why                            the header is not the JSON object that it should be
    entry     name, why                      nor is what it says of a tensor
    dtype     name, dtype                    the format has no such type
    shape     name, shape                    no tensor has such a shape
    place     name, start, end               no payload has such a place
    volume    name, dtype, shape, nbytes     so many elements don't take so many bytes
    overlap   name, begin, expected, nbytes  a tensor begins before the end of the one before it
    gap       name, begin, expected, nbytes  or after it
    cut       size, end                      the file ends before its last tensor does
    more      size, end                      or after it
    """

    kind: str
    at: tuple[int, int]
    tensor: str | None
    facts: Mapping[str, Any]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[_Offset, _Offset]


class _OnlyEntry(_Entry, frozen=True, forbid_unknown_fields=True):
    """One that says nothing that nobody here knows of."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(_Entry)
_ONLY_ENTRY: Final = msgspec.json.Decoder(_OnlyEntry)
_METADATA: Final = msgspec.json.Decoder(dict[str, str] | None)
_INDEX: Final = msgspec.json.Decoder(_Index)
_MALFORMED: Final = (msgspec.MsgspecError, ValueError, RecursionError)

_NONSENSE: Final = "{path}: the header makes no sense for tensor {name!r:.200}: "
_DAMAGED: Final = "; the file is damaged, or isn't a safetensors file"
_MISPLACED: Final = "{path}: tensor {name!r:.200} begins at byte {begin:,}, expected {expected:,}: it "
_ENDS: Final = "{path} has {size:,} bytes, but by its header its tensors end at byte {end:,}: it was "
_WORDS: Final[Mapping[str, str]] = {
    "short": "{path} has {size} bytes: too few for a safetensors file, which begins with the 8 bytes of a length; it "
    "was cut short, or is something else",
    "length": "{path}: its first 8 bytes say that a header of {length:,} bytes follows, but the file has {size:,} and "
    "a header at most {most:,}; it was cut short, or isn't a safetensors file (one that Git LFS or an unfinished "
    "download left in its place, for example)",
    "json": "{path}: its header is not the JSON of a safetensors file: {why}",
    "entry": _NONSENSE + "its entry can't be read ({why})" + _DAMAGED,
    "dtype": _NONSENSE + "it has the dtype {dtype!r:.80}, which the format doesn't have" + _DAMAGED,
    "shape": _NONSENSE + "it has the shape {shape!r:.200}" + _DAMAGED,
    "place": _NONSENSE + "its bytes are said to be {start} to {end}" + _DAMAGED,
    "volume": _NONSENSE + "{dtype} of shape {shape!r:.200} doesn't take {nbytes:,} bytes" + _DAMAGED,
    "overlap": _MISPLACED + "overlaps the tensor before it; the header is damaged",
    "gap": _MISPLACED + "leaves out {nbytes:,} bytes; the header is damaged",
    "cut": _ENDS + "cut short",
    "more": _ENDS + "written to after that, or its header is damaged",
}


def header_length(head: bytes, *, file_size: int, path: str) -> int:
    """Return the length of the JSON header from the first 8 bytes of a file. Raises `CheckpointCorrupt` if it is
    invalid.
    """
    length = find_length(head, file_size=file_size)
    if isinstance(length, Fault):
        raise corrupt_header(length, _WORDS, path=path)
    return length


def parse_header(data: bytes | memoryview, *, file_size: int, path: str) -> Header:
    """Parse the JSON header of a file of ``file_size`` bytes, checking all of it. Raises `CheckpointCorrupt`."""
    header = find_tensors(data, file_size=file_size, only_known=True)
    if isinstance(header, Fault):
        raise corrupt_header(header, _WORDS, path=path)
    return header


def corrupt_header(fault: Fault, words: Mapping[str, str], *, path: str) -> CheckpointCorrupt:
    """The error for ``fault`` in ``words``, a template for each kind."""
    message = words[fault.kind].format(path=path, **fault.facts)
    return CheckpointCorrupt(message, path=path, tensor=fault.tensor, byte_range=fault.at)


def find_length(head: bytes, *, file_size: int) -> int | Fault:
    """Return the length of the JSON header from the first 8 bytes of a file, or why it is invalid."""
    if len(head) < LENGTH_BYTES:
        return Fault("short", (0, file_size), None, {"size": file_size})
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > min(HEADER_BYTES_MAX, file_size - LENGTH_BYTES):
        facts = {"length": length, "size": file_size, "most": HEADER_BYTES_MAX}
        return Fault("length", (0, LENGTH_BYTES), None, facts)
    return length


def find_tensors(data: bytes | memoryview, *, file_size: int, only_known: bool = False) -> Header | Fault:
    """Parse the JSON header of a file of ``file_size`` bytes, or return what is wrong with it.

    only_known: what an entry says beyond dtype, shape and place is a fault too; other readers pass over it.
    """
    payloads_at = LENGTH_BYTES + len(data)
    try:
        entries = _HEADER.decode(data)
        own = entries.pop(RESERVED_NAME, None)
        metadata = {} if own is None else _METADATA.decode(own) or {}
    except _MALFORMED as error:
        return Fault("json", (LENGTH_BYTES, payloads_at), None, {"why": _shown(error)})
    tensors = []
    for name, raw in entries.items():
        tensor = _find_tensor(name, raw, payloads_at, only_known=only_known)
        if isinstance(tensor, Fault):
            return tensor
        tensors.append(tensor)
    # Of two at the same place one is empty: before the other, not in the middle of it.
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    at = payloads_at
    for tensor in tensors:
        if tensor.start != at:
            facts = {"name": tensor.name, "begin": tensor.start, "expected": at, "nbytes": tensor.start - at}
            span = min(at, tensor.start), max(at, tensor.start)
            return Fault("overlap" if tensor.start < at else "gap", span, tensor.name, facts)
        at = tensor.end
    if at != file_size:
        last = tensors[-1].name if tensors else None
        span = min(at, file_size), max(at, file_size)
        return Fault("cut" if file_size < at else "more", span, last, {"size": file_size, "end": at})
    return Header(tuple(tensors), metadata)


def torch_name(code: str, *, name: str, path: str) -> str:
    """torch's name for dtype ``code`` of tensor ``name``. Raises `ConfigError` for one that can't be read here."""
    dtype = DTYPES.get(code)
    if dtype is None:
        raise ConfigError(f"{path}: tensor {name!r} is stored as {code}, which can't be read here", field=name)
    return dtype


def parse_index(data: bytes, *, path: str) -> dict[str, str]:
    """Return the file of each tensor from the index ``data``. Raises `CheckpointCorrupt`."""
    try:
        weight_map = _INDEX.decode(data).weight_map
    except _MALFORMED as error:
        raise CheckpointCorrupt(
            f"{path} is not an index of safetensors files (expected a JSON object whose "
            f"'weight_map' has a file name for each tensor): {_shown(error)}",
            path=path,
        ) from error
    for file in set(weight_map.values()):
        if not is_file_beside(file):
            name = next(name for name, of_name in weight_map.items() if of_name == file)
            raise CheckpointCorrupt(
                f"{path}: tensor {name!r} is listed in {file!r:.300}, which isn't the name of a file "
                "in the same directory",
                path=path,
                tensor=name,
            )
    return weight_map


def is_file_beside(file: str) -> bool:
    """Return True if a name is a file in the same directory, on any operating system."""
    return file not in ("", ".", "..") and not set(file) & set("/\\:\0")


def _find_tensor(name: str, raw: msgspec.Raw, payloads_at: int, *, only_known: bool) -> HeaderTensor | Fault:
    def fault(kind: str, **facts: Any) -> Fault:
        return Fault(kind, (LENGTH_BYTES, payloads_at), name, {"name": name, **facts})

    try:
        entry = (_ONLY_ENTRY if only_known else _ENTRY).decode(raw)
    except _MALFORMED as error:
        return fault("entry", why=_shown(error))
    dtype, shape, (start, end) = entry.dtype, tuple(entry.shape), entry.data_offsets
    bits = CODE_BITS.get(dtype)
    if bits is None:
        return fault("dtype", dtype=dtype)
    if len(shape) > DIMENSIONS_MAX or min(shape, default=0) < 0:
        return fault("shape", shape=entry.shape)
    if not 0 <= start <= end:
        return fault("place", start=start, end=end)
    # Of a product of many large numbers the first few are enough to see that it is too large, or nothing.
    longest = max(shape, default=0)
    volume = 0 if 0 in shape and longest <= _OFFSET_MAX else prod(shape) if longest <= 8 * end else 8 * end + 1
    if volume * bits != (end - start) * 8:
        return fault("volume", dtype=dtype, shape=entry.shape, nbytes=end - start)
    return HeaderTensor(name, dtype, shape, payloads_at + start, payloads_at + end)


def _shown(error: BaseException) -> str:
    return "it is nested too deep" if isinstance(error, RecursionError) else f"{error!s:.200}"


def rename_shards(index: bytes, names: Mapping[str, str]) -> bytes:
    """Return ``index``, one that Holdfast made, with its files called by their new ``names``."""
    document = json.loads(index)
    document["weight_map"] = {tensor: names.get(file, file) for tensor, file in document["weight_map"].items()}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
