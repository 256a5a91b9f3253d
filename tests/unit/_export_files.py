"""What plans of exports are made for, in their tests: how a file is laid out, and which rank holds what of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from holdfast.boxes import Box, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.export.rank_plan import BufferRegion, SourceBox
from holdfast.format.structure import is_per_rank
from holdfast.keymap.moves import MappedTensor
from holdfast.plan.placement import World


@dataclass(frozen=True)
class Place:
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class File:
    name: str
    header: bytes
    tensors: tuple[Place, ...]
    size: int


def file_of(tensors: Iterable[MappedTensor], *, name: str = "f", header: bytes = b"") -> File:
    """``header``, and ``tensors`` behind it in this order."""
    places, end = [], len(header)
    for tensor in tensors:
        start, end = end, end + prod(tensor.shape) * ITEMSIZE[tensor.dtype]
        places.append(Place(tensor.name, start, end))
    return File(name, header, tuple(places), end)


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """The parts as torch cuts them: equal ones, the last shorter or empty."""
    step = -(-size // parts)
    return [(min(size, step * n), min(size, step * (n + 1))) for n in range(parts)]


def rows_of(shape: tuple[int, ...], world: int) -> tuple[SourceBox, ...]:
    rest = shape[1:]
    return tuple(
        SourceBox(Box((a, *(0 for _ in rest)), (b - a, *rest)), (rank,))
        for rank, (a, b) in enumerate(cuts(shape[0], world))
    )


def columns_of(shape: tuple[int, int], world: int) -> tuple[SourceBox, ...]:
    return tuple(
        SourceBox(Box((0, a), (shape[0], b - a)), (rank,)) for rank, (a, b) in enumerate(cuts(shape[1], world))
    )


def everywhere(shape: tuple[int, ...], world: int) -> tuple[SourceBox, ...]:
    return (SourceBox(whole(shape), tuple(range(world))),)


def memories_of(world: World, rank: int) -> dict[tuple[str, Box], BufferRegion]:
    """Return the location of every box of ``rank``; its memory is its local tensors, each contiguous and row-major."""
    found: dict[tuple[str, Box], BufferRegion] = {}
    held_by_rank = world.held_by(rank)
    for spec in world.structure_of(rank).tensors:
        if is_per_rank(spec.path):
            continue
        held = held_by_rank(spec)
        ends = [[at + size for at, size in zip(item.local_offsets, item.box.sizes, strict=True)] for item in held]
        sizes = tuple(map(max, zip(*ends, strict=True)))
        for item in held:
            found[spec.name, item.box] = BufferRegion(spec.name, item.box, item.local_offsets, sizes)
    return found
