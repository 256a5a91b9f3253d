"""Describe a state without its values: the input of planning. Torch-free data.

A `Structure` is what one rank's state holds: tensor specs and object specs. It is written the SPMD way: a sharded
tensor is described by its global shape, mesh and placements, not by this rank's slice, and a per-rank value by a name
that holds the marker `PER_RANK` where the rank goes. Ranks that run the same program therefore have *equal* structures,
which is what lets a save of 16,384 ranks agree by comparing one digest a rank.

Where no mesh says who holds what (a `ShardedTensor`, `holdfast.Shard`), each rank describes its own boxes: structures
differ then, and every rank needs those of all.

Guarantees: `digest` is equal exactly when the structures are; encoding is deterministic.
Does not: look at tensors (``state`` does), decide who writes what (``plan.write`` does).
"""

from __future__ import annotations

import operator
from typing import Any, Final, Literal

import msgspec
import xxhash

from holdfast.errors import ConfigError
from holdfast.format.decoding import prepare_decoding

PER_RANK: Final = "rank-*"
"""Stands for ``rank-00007`` in names and paths of values that are each rank's own."""

SOURCE_MARK: Final = "\0"
"""Stands before the number of one of several boxes, in the name that its rank has for it."""

PathItem = str | int


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """How one mesh dimension divides a tensor.

    ``"replicate"``; ``"shard"`` on ``dim`` by `torch.chunk`'s rule; ``"strided"``: DTensor's
    ``_StridedShard(dim, split_factor=split)``. What they make together is worked out in ``plan.placement``.
    """

    kind: Literal["replicate", "shard", "strided"]
    dim: int = 0
    split: int = 1


class MeshLayout(msgspec.Struct, frozen=True, array_like=True, tag="mesh"):
    """A device mesh with the placements of one tensor on it.

    ``ranks`` is the mesh flattened row-major, as ranks *of the saving group*; -1 for a rank outside it.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]


class BoxLayout(msgspec.Struct, frozen=True, array_like=True, tag="boxes"):
    """The boxes of a tensor that one rank holds, each in memory of its own."""

    rank: int
    """Rank in the saving group."""
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Offsets and sizes of each."""


Layout = MeshLayout | BoxLayout


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor. ``layout`` indexes `Structure.layouts`; None means this rank holds all of it (a plain tensor)."""

    name: str
    path: tuple[PathItem, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: int | None = None


class ObjectSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One plain object. ``capacity`` is the length in bytes of the record it gets (see ``format.objects``)."""

    name: str
    path: tuple[PathItem, ...]
    capacity: int


class KeysSpec(msgspec.Struct, frozen=True, array_like=True):
    """The keys of a mapping of the user's whose names don't tell them: some aren't strings, or there are none."""

    path: tuple[PathItem, ...]
    keys: tuple[Any, ...]
    """All of them, as `noted_key` gives them."""


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """All that one rank holds; ``tensors`` and ``objects`` each sorted by name, names unique over both."""

    layouts: tuple[Layout, ...]
    tensors: tuple[TensorSpec, ...]
    objects: tuple[ObjectSpec, ...]
    mappings: tuple[KeysSpec, ...] = ()


KEY_DEPTH_MAX: Final = 8
"""Tuples nested deeper than that, as keys, are noted as text."""
_BIG_INTEGER: Final = 1
"""Code of msgpack's extension type that holds the digits of an integer of more than 64 bits."""


def noted_key(key: object) -> Any:
    """Return what msgpack can tell of a mapping's key: numbers, None, text, bytes, and tuples of them; of others the
    text that names have.
    """
    try:
        noted = _noted(key, KEY_DEPTH_MAX)
        return noted if str(key_of(noted)) == str(key) else str(key)
    except TypeError:
        return str(key)


def _noted(key: object, depth: int) -> Any:
    if key is None or isinstance(key, bool):
        return key
    if isinstance(key, (bytes, str)):
        return bytes(key) if isinstance(key, bytes) else str.__str__(key)
    if isinstance(key, tuple) and depth:
        return tuple(_noted(item, depth - 1) for item in key)
    if isinstance(key, float):
        return float(key)
    whole = operator.index(key)  # type: ignore[arg-type] # a TypeError for what is no integer
    return whole if -(1 << 63) <= whole < 1 << 64 else msgspec.msgpack.Ext(_BIG_INTEGER, b"%d" % whole)


def key_of(noted: object) -> Any:
    """The key that `noted_key` gave this for, after a round trip through msgpack. Raises `ValueError` for others."""
    if isinstance(noted, (list, tuple)):
        return tuple(map(key_of, noted))
    if isinstance(noted, msgspec.msgpack.Ext) and noted.code == _BIG_INTEGER:
        return int(bytes(noted.data))
    if noted is None or isinstance(noted, (bool, int, float, str, bytes)):
        return noted
    raise ValueError(f"{noted!r:.200} is no key")


def rank_label(rank: int) -> str:
    """``rank-00007``: how a rank is spelt in names and files."""
    return f"rank-{rank:05d}"


def source_name(name: str, number: int) -> str:
    """What a rank calls its box ``number`` of the tensor ``name``, where it keeps each in memory of its own."""
    return f"{name}{SOURCE_MARK}{number}" if number else name


def is_per_rank(path: tuple[PathItem, ...]) -> bool:
    return PER_RANK in path


def name_on_rank(path: tuple[PathItem, ...], rank: int) -> str:
    """The stored name of the value at ``path`` on ``rank``: items joined by dots, the marker replaced."""
    label = rank_label(rank)
    return ".".join(label if item == PER_RANK else str(item) for item in path)


def path_on_rank(path: tuple[PathItem, ...], rank: int) -> tuple[PathItem, ...]:
    label = rank_label(rank)
    return tuple(label if item == PER_RANK else item for item in path)


def encode_structure(structure: Structure) -> bytes:
    """Raises `ConfigError` for a name that is no text: half of a surrogate pair, as file names of bytes bring."""
    try:
        return msgspec.msgpack.encode(structure)
    except UnicodeEncodeError as error:
        name = ascii(error.object)
        raise ConfigError(f"state has the name {name}, which UTF-8 can't encode: rename it", field=name) from error


def decode_structure(data: bytes) -> Structure:
    return msgspec.msgpack.decode(data, type=Structure)


def digest_of(encoded: bytes) -> str:
    """32 hexadecimal digits that identify an encoded structure."""
    return xxhash.xxh3_128_hexdigest(encoded)


prepare_decoding(Structure)
