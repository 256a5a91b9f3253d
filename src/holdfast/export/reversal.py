"""A compiled key map the other way round: where in an export the elements of the state are.

Guarantees: pure; each element of a tensor of the state is filled once, from one place; where an export has an element
several times, the first tensor that has it serves. What an export lacks, because a rule dropped it, is said.
Does not: undo quantization: a move out of a quantized tensor gives its elements before they are multiplied by the scale
of their block (`scales_of`).
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from holdfast.export.moves import coalesced, inverted, run, without

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.export.moves import KeyMapping, MappedTensor, Move


class Reversed(NamedTuple):
    """How to fill the tensors of the state from an export."""

    moves: dict[str, tuple[Move, ...]]
    """By name of the state, in its order: moves whose sources are tensors of the export."""
    missing: dict[str, int]
    """How many elements of a tensor of the state no tensor of the export has."""


def reversed_moves(mapping: KeyMapping, shapes: Mapping[str, Sequence[int]]) -> Reversed:
    """For each tensor of the state, of these shapes: moves from the tensors of the export, each element once.

    A tensor that was dropped as tied is filled as the one that stands for it.
    """
    ways_back: dict[str, list[Move]] = defaultdict(list)
    for tensor in mapping.tensors:
        if tensor.scale_of is None:
            for move in tensor.moves:
                ways_back[move.source] += inverted(move, tensor.name)
    moves: dict[str, tuple[Move, ...]] = {}
    missing: dict[str, int] = {}
    for name, shape in shapes.items():
        standing = name if name in ways_back else mapping.aliases.get(name, name)
        moves[name] = once_each(ways_back.get(standing, ()))
        lacking = prod(shape) - sum(move.volume for move in moves[name])
        if lacking:
            missing[name] = lacking
    return Reversed(moves, missing)


def once_each(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The same without what an earlier one has filled already."""
    taken: list[Move] = []
    reached = 0
    for move in sorted(moves, key=lambda move: move.target_offset):
        parts = [move]
        if move.target_offset < reached:
            for other in taken:
                parts = [rest for part in parts for rest in without(part, other)]
        taken += parts
        reached = max(reached, move.target_stop)
    return coalesced(taken)


def uncovered(moves: Iterable[Move], numel: int) -> list[Move]:
    """The elements of a tensor that none of ``moves`` fills, as moves from nowhere."""
    ordered = sorted(moves, key=lambda move: move.target_offset)
    reached = 0
    for move in ordered:
        if move.target_offset > reached or move.target_stop - move.target_offset != move.volume:
            break
        reached = max(reached, move.target_stop)
    else:
        return [run("", numel - reached, reached)] if reached < numel else []
    rest = [run("", numel)] if numel else []
    for move in ordered:
        rest = [part for whole in rest for part in without(whole, move)]
    return rest


def scales_of(mapping: KeyMapping) -> dict[str, MappedTensor]:
    """By name of a quantized tensor of the export: the tensor with the scales of its blocks."""
    return {tensor.scale_of: tensor for tensor in mapping.tensors if tensor.scale_of is not None}
