"""From moves that bring a tensor of the state back to what is read for it: which bytes of which exported tensors.

Most of what maps do (rename, split, stack, concatenate, fuse) cuts a tensor of the state into boxes, each of them a run
of some exported tensor's bytes. That is what a checkpoint looks like, too, so such a tensor becomes a `StoredTensor`
and is read as one. What is left (transposed, permuted, interleaved) becomes a `MovedTensor`: loop nests.

Guarantees: pure; what is read is what the moves say, element by element.
Assumes: the moves fill no element twice (`holdfast.export.reversal` makes such), from tensors that are there. Elements
that they leave out are left alone.
Does not: read anything, or undo a quantization. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from holdfast.boxes import Box, strides
from holdfast.export.moves import Move, inverted, relocated, restrict_source
from holdfast.plan.read import StoredShard, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class MovedPart(NamedTuple):
    """Elements of a stored tensor, whose bytes begin at ``start`` of ``file``, that a tensor of the state has.

    ``move`` goes as the export went: its source is the state's tensor, its target the stored one.
    """

    move: Move
    file: str
    start: int
    dtype: str


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """A tensor of the state that is put together element by element."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[MovedPart, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all of its elements are stored; else the others are left alone."""
        return sum(part.move.volume for part in self.parts) == prod(self.shape)

    def within(self, box: Box) -> list[MovedPart]:
        """What fills ``box``; elements of the state's tensor are counted in a row-major buffer that holds only it."""
        return [
            part._replace(move=relocated(move, self.shape, box))
            for part in self.parts
            for move in restrict_source(part.move, self.shape, box)
        ]


def rebuilt(
    name: str, shape: Sequence[int], moves: Iterable[Move], stored: Mapping[str, StoredTensor]
) -> StoredTensor | MovedTensor:
    """Tensor ``name`` of the state, made of ``stored`` ones by ``moves``, which fill no element twice.

    Each of ``stored`` that a move names is in one piece, and not empty.
    """
    moves = list(moves)
    shape = tuple(shape)
    dtypes = {stored[move.source].dtype for move in moves}
    boxes = [_box_of_run(move, shape) for move in moves]
    whole = sum(move.volume for move in moves) == prod(shape)
    if len(dtypes) == 1 and whole and None not in boxes:
        shards = []
        for move, box in zip(moves, boxes, strict=True):
            tensor = stored[move.source]
            assert box is not None
            _, file, start, _ = tensor.shards[0]
            at = start + move.source_offset * tensor.itemsize
            shards.append(StoredShard(box, file, at, box.volume * tensor.itemsize))
        return StoredTensor(name, dtypes.pop(), shape, tuple(shards))
    parts = []
    for move in moves:
        tensor = stored[move.source]
        _, file, start, _ = tensor.shards[0]
        parts += [MovedPart(back, file, start, tensor.dtype) for back in inverted(move, name)]
    return MovedTensor(name, shape, tuple(parts))


def _box_of_run(move: Move, shape: tuple[int, ...]) -> Box | None:
    """The box of a tensor of ``shape`` that ``move`` fills in row-major order from neighbours; None if it doesn't."""
    steps = strides(shape)
    offsets = []
    rest = move.target_offset
    for step in steps:
        offsets.append(rest // step if step else 0)
        rest -= offsets[-1] * step
    sizes = [1] * len(shape)
    dim = len(shape) - 1
    run = 1
    for count, target, source in reversed(move.loops):
        if count == 1:
            continue
        if source != run:
            return None
        run *= count
        left, step = count, target
        while left > 1:
            while dim >= 0 and (shape[dim] == 1 or steps[dim] < step):
                dim -= 1
            if dim < 0 or steps[dim] != step:
                return None
            room = shape[dim] - offsets[dim]
            if left > room and (offsets[dim] or left % shape[dim]):
                return None
            sizes[dim] = min(left, room)
            # A loop that is longer than a dimension goes on in the one before it, in steps of what is full by now.
            left, step, dim = left // room if left > room else 1, step * shape[dim], dim - 1
    box = Box(tuple(offsets), tuple(sizes))
    return box if prod(sizes) == move.volume else None
