"""What a state looks like, apart from its values: the input of planning. Torch-free data.

A `Structure` is what one rank's state holds: tensor specs and object specs. It is written the SPMD way: a sharded
tensor is described by its global shape, mesh and placements, not by this rank's slice, and a per-rank value by a name
that holds the marker `PER_RANK` where the rank goes. Ranks that run the same program therefore have *equal*
structures, which is what lets a save of 16,384 ranks agree by comparing one digest a rank.

Guarantees: `digest` is equal exactly when the structures are; encoding is deterministic.
Does not: look at tensors (``state`` does), decide who writes what (``plan.write`` does).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import xxhash

from holdfast.errors import ConfigError

PER_RANK: Final = "rank-*"
"""Stands for ``rank-00007`` in names and paths of values that are each rank's own."""

PathItem = str | int


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """How one mesh dimension divides a tensor.

    ``"replicate"``; ``"shard"`` on ``dim`` by `torch.chunk`'s rule; ``"strided"``: DTensor's
    ``_StridedShard(dim, split_factor=split)``. What they make together is worked out in ``plan.placement``.
    """

    kind: Literal["replicate", "shard", "strided"]
    dim: int = 0
    split: int = 1


class MeshLayout(msgspec.Struct, frozen=True, array_like=True):
    """A device mesh with the placements of one tensor on it.

    ``ranks`` is the mesh flattened row-major, as ranks *of the saving group*; -1 for a rank outside it.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]


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


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """All that one rank holds; ``tensors`` and ``objects`` each sorted by name, names unique over both."""

    layouts: tuple[MeshLayout, ...]
    tensors: tuple[TensorSpec, ...]
    objects: tuple[ObjectSpec, ...]


def rank_label(rank: int) -> str:
    """``rank-00007``: how a rank is spelt in names and files."""
    return f"rank-{rank:05d}"


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
        raise ConfigError(f"state has the name {name}, which UTF-8 can't write: rename it", field=name) from error


def decode_structure(data: bytes) -> Structure:
    return msgspec.msgpack.decode(data, type=Structure)


def digest_of(encoded: bytes) -> str:
    """32 hexadecimal digits that identify an encoded structure."""
    return xxhash.xxh3_128_hexdigest(encoded)
