"""Find what changed in a publisher rank's pieces since an earlier version, by checksums of extents.

A piece is cut into *extents*: boxes of at most 1 MiB, ranges of rows if rows are shorter than that. A version is
described by the checksums of all its extents (`extent_sums`). A receiver gets what differs from its version; it gets
everything if that version isn't known here, had another table, or a full version is due.

Guarantees: an extent with any changed bit is sent, unless its checksum stays the same by chance
(``weights.checksums``); the next full version ends that. Keeps 8 bytes per MiB and version, for `keep` versions.
Decisions are pure: the same for the same versions. Host tensors that aren't contiguous are copied extent by extent.
Assumes: one thread; a receiver's version is complete and was published under that number by this publisher. If it
published different values under one number, as the first were not known to have arrived, no delta is based on that.
Does not: decide which version a receiver has, or send.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, contains, intersect, row_blocks
from holdfast.errors import ConfigError
from holdfast.state.structure import part_of
from holdfast.sync.weights.buckets import Piece, PieceBox, itemsize_of
from holdfast.sync.weights.checksums import ROW_BYTES, checksum, finish, kind_for, row_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.sync.weights.pieces import Local

EXTENT_BYTES: Final = ROW_BYTES

Sums = tuple[tuple[int, ...], ...]
"""The checksums of each piece's extents."""


def extents_of(piece: Piece) -> tuple[Box, ...]:
    """Return the piece in boxes of at most `EXTENT_BYTES`, in row-major order; one for a piece without elements."""
    most = EXTENT_BYTES // itemsize_of(piece)
    return tuple(row_blocks(piece.box, most))


class History:
    """The checksums of a publisher rank's latest versions; finds what to send of a new one."""

    def __init__(self, *, keep: int = 16, full_every: int = 16) -> None:
        """keep: number of versions whose checksums are kept.

        full_every: one of this many versions is sent whole; 1 sends all whole.
        """
        if keep < 1:
            raise ConfigError(f"keep is {keep}; expected at least 1", field="keep")
        if full_every < 1:
            raise ConfigError(f"full_every is {full_every}; expected at least 1", field="full_every")
        self._keep = keep
        self._full_every = full_every
        self._count = 0
        self._known: OrderedDict[int, _KnownVersion] = OrderedDict()
        self._extents: tuple[tuple[Piece, ...], tuple[tuple[Box, ...], ...]] | None = None

    def extents(self, table: tuple[Piece, ...]) -> tuple[tuple[Box, ...], ...]:
        """Return the extents of each piece of ``table``; cached for it."""
        if self._extents is None or self._extents[0] != table:
            self._extents = (table, tuple(map(extents_of, table)))
        return self._extents[1]

    def record(self, version: int, table: tuple[Piece, ...], sums: Sums) -> None:
        """Record a version: the checksums of the extents of each piece of its table."""
        extents = self.extents(table)
        if list(map(len, sums)) != list(map(len, extents)):
            raise AssertionError(f"checksums of other extents than those of the {len(table)} pieces")
        is_full = self._count % self._full_every == 0
        self._count += 1
        before = self._known.get(version)
        is_one = before is None or (before.is_one and before.table == table and before.sums == sums)
        self._known[version] = _KnownVersion(table, sums, is_full=is_full, is_one=is_one)
        while len(self._known) > self._keep:
            self._known.popitem(last=False)

    def changed(self, version: int, base: int | None) -> list[list[Box]] | None:
        """Return for each piece what differs from version ``base``, as boxes; None if everything is to be sent.

        ``version`` must have been recorded.
        """
        new = self._known[version]
        old = None if base is None else self._known.get(base)
        if old is None or not old.is_one or new.is_full or old.table != new.table:
            return None
        return [
            _joined([box for box, one, other in zip(boxes, was, now, strict=True) if one != other])
            for boxes, was, now in zip(self.extents(new.table), old.sums, new.sums, strict=True)
        ]

    def forget(self) -> None:
        """Forget all versions: the next one is sent whole to everyone."""
        self._known.clear()
        self._count = 0


@dataclass(frozen=True, slots=True)
class _KnownVersion:
    table: tuple[Piece, ...]
    sums: Sums
    is_full: bool
    is_one: bool
    """Nothing else was published under this number."""


def narrowed(parts: Sequence[PieceBox], changed: Sequence[Sequence[Box]] | None) -> list[PieceBox]:
    """Return the parts of ``parts`` in the changed boxes of their pieces; all if ``changed`` is None."""
    if changed is None:
        return list(parts)
    found = []
    for part in parts:
        box = part.box
        for differs in changed[part.piece]:
            shared = box if contains(differs, box) else intersect(box, differs)
            if shared is not None and shared.volume:
                found.append(PieceBox(part.piece, shared.offsets, shared.sizes))
    return found


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """Join neighbours among boxes in row-major order."""
    found: list[Box] = []
    for box in boxes:
        while found:
            both = _together(found[-1], box)
            if both is None:
                break
            found.pop()
            box = both  # noqa: PLW2901 - it may also be the neighbour of the previous one
        found.append(box)
    return found


def _together(one: Box, other: Box) -> Box | None:
    """Return both as one box if ``other`` continues ``one`` in one dimension and equals it in all others."""
    differing = [
        dim
        for dim, (a, b, size, size_b) in enumerate(zip(one.offsets, other.offsets, one.sizes, other.sizes, strict=True))
        if a != b or size != size_b
    ]
    if len(differing) != 1:
        return None
    dim = differing[0]
    if one.offsets[dim] + one.sizes[dim] != other.offsets[dim]:
        return None
    return Box(one.offsets, (*one.sizes[:dim], one.sizes[dim] + other.sizes[dim], *one.sizes[dim + 1 :]))


# Checksums of extents ------------------------------------------------------------------------------------------


def extent_sums(extents: Sequence[Sequence[Box]], pieces: Sequence[Local]) -> Sums:
    """Return the checksums of the extents of each piece, read from its memory."""
    return tuple(_sums_of(boxes, local) for boxes, local in zip(extents, pieces, strict=True))


def _sums_of(boxes: Sequence[Box], local: Local) -> tuple[int, ...]:
    tensor = local.tensor
    if not tensor.numel():
        return (0,) * len(boxes)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return _contiguous_sums(compat.as_bytes(tensor), [box.volume * tensor.element_size() for box in boxes])
    found = []
    for box in boxes:
        memory = compat.as_bytes(compat.clone(part_of(tensor, box, local.box)))
        found.append(checksum(memory, kind_for(memory)))
    return tuple(found)


def _contiguous_sums(memory: torch.Tensor, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the checksums of adjacent extents with these lengths in bytes."""
    at = 0
    if kind_for(memory) == "xxh3":
        found = []
        for length in lengths:
            found.append(checksum(memory[at : at + length], "xxh3"))
            at += length
        return tuple(found)
    sums = torch.empty(len(lengths), dtype=torch.int64, device=memory.device)
    first = 0
    for length, group in groupby(lengths):
        count = sum(1 for _ in group)
        row_sums(memory[at : at + count * length], length, sums[first : first + count])
        at += count * length
        first += count
    return tuple(finish([one], length) for one, length in zip(sums.tolist(), lengths, strict=True))
