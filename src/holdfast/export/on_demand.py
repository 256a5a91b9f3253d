"""Memories that are made when copies need them: of tensors that lie elsewhere, a piece at a time.

Guarantees: what had to be made is kept in `ROOMS` pieces of memory, taken once: the allocator never sees it, which
would not give back what small things have settled in. What stays where it is costs nothing.
Assumes: boxes are small (`pieces_of`), and copies go over them more or less in order. A memory that was asked for is of
use until another is made: `OnDemand.is_here` tells. One thread.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, overload

import torch

from holdfast.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.export.sources import Memory

PIECE_BYTES: Final = 4 << 20
ROOMS: Final = 3


class OnDemand(Sequence[torch.Tensor]):
    """The memories ``wanted``, each had when it is asked for, and again if it was dropped meanwhile.

    find: its bytes, where they lie ready; else None. make: puts them into the room it is given, of `PIECE_BYTES`, and
    returns that part of it.
    """

    def __init__(
        self,
        wanted: Sequence[Memory],
        *,
        find: Callable[[Memory], torch.Tensor | None] = lambda _: None,
        make: Callable[[Memory, torch.Tensor], torch.Tensor],
    ) -> None:
        self._wanted = wanted
        self._find, self._make = find, make
        self._found: dict[int, torch.Tensor] = {}
        self._made: OrderedDict[int, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        """Part and room, the one that was used last at the end."""

    def is_here(self, number: int) -> bool:
        """Whether it can be had without overwriting any other."""
        return number in self._made or number in self._found or self._lies_ready(number)

    def __len__(self) -> int:
        return len(self._wanted)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            raise TypeError("memories are made one by one")
        if index in self._made:
            self._made.move_to_end(index)
            return self._made[index][0]
        if index in self._found or self._lies_ready(index):
            return self._found[index]
        if len(self._made) < ROOMS:
            room = torch.frombuffer(mmap.mmap(-1, PIECE_BYTES), dtype=torch.uint8)
        else:
            _, (_, room) = self._made.popitem(last=False)
        part = self._make(self._wanted[index], room)
        self._made[index] = part, room
        return part

    def _lies_ready(self, number: int) -> bool:
        found = self._find(self._wanted[number])
        if found is not None:
            self._found[number] = found
        return found is not None


def pieces_of(box: Box, itemsize: int, most_bytes: int = PIECE_BYTES) -> list[Box]:
    """``box`` cut into pieces of at most ``most_bytes``, each of them one run of it."""
    if box.volume * itemsize <= most_bytes:
        return [box]
    dim = next(place for place, size in enumerate(box.sizes) if size > 1)
    row = box.volume // box.sizes[dim] * itemsize
    step = max(1, most_bytes // row)
    pieces = []
    for start in range(0, box.sizes[dim], step):
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        sizes = (*box.sizes[:dim], min(step, box.sizes[dim] - start), *box.sizes[dim + 1 :])
        pieces += pieces_of(Box(offsets, sizes), itemsize, most_bytes)
    return pieces
