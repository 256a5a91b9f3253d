"""What an export is made from, on one rank: a capture of the training state, or a published checkpoint.

Guarantees: the boxes of all ranks together are the whole of every tensor, each held by one rank; all ranks that ask for
them find the same.
Does not: decide what becomes of them (``export.recipe``) or copy (``export.fill``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdfast import _torch_compat as compat
from holdfast.boxes import Box
from holdfast.delivery import verify_staging
from holdfast.export.sources import Piece, Source
from holdfast.plan.write import plan_save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from holdfast.capture import Capture, DeliveryPlan
    from holdfast.checkpoint import Checkpoint
    from holdfast.export.sources import Memory
    from holdfast.plan.write import PlacedTensor


class Stock(Protocol):
    """Who holds what of the state, and where this rank has its part: the same as long as the structure stands."""

    @property
    def world(self) -> int: ...
    def sources(self, wants: Callable[[str], bool]) -> dict[str, Source]: ...


class Material(Protocol):
    """One moment of a state."""

    def stock(self) -> Stock:
        """Raises why there is nothing to export."""

    def memories(self, wanted: Sequence[Memory]) -> list[torch.Tensor]:
        """The bytes of boxes that this rank holds, each a one-dimensional uint8 tensor."""

    def verify(self) -> None:
        """Raise if what was given was not of one moment."""


class _Captured:
    """By the plan of a save, which has each box of the state on the rank that writes it."""

    def __init__(self, plan: DeliveryPlan, rank: int) -> None:
        self.plan = plan
        self._rank = rank
        self.placed: dict[tuple[str, Box], PlacedTensor] = {}

    @property
    def world(self) -> int:
        return len(self.plan.digests)

    def sources(self, wants: Callable[[str], bool]) -> dict[str, Source]:
        found: dict[str, tuple[PlacedTensor, list[Piece]]] = {}
        for rank_plan in plan_save(self.plan.structures, self.plan.digests).ranks:
            for placed in rank_plan.tensors:
                if wants(placed.name):
                    box = Box(placed.offsets, placed.sizes)
                    found.setdefault(placed.name, (placed, []))[1].append(Piece(box, (rank_plan.rank,)))
                    if rank_plan.rank == self._rank:
                        self.placed[placed.name, box] = placed
        return {
            name: Source(name, placed.shape, placed.dtype, tuple(pieces)) for name, (placed, pieces) in found.items()
        }


class LastStock:
    """What captures hold: one after the other they have the same plan, and are asked for it at each export."""

    def __init__(self) -> None:
        self._last: _Captured | None = None

    def of(self, plan: DeliveryPlan, rank: int) -> _Captured:
        if self._last is None or self._last.plan is not plan:
            self._last = _Captured(plan, rank)
        return self._last


class CapturedState:
    """A capture, which others use at the same time."""

    def __init__(self, capture: Capture, stock: LastStock) -> None:
        self._capture = capture
        self._stock = stock

    def stock(self) -> _Captured:
        if self._capture.error is not None:
            raise self._capture.error
        plan = self._capture.plan
        if plan is None:
            raise AssertionError("a capture without error has a plan")
        return self._stock.of(plan, self._capture.rank)

    def memories(self, wanted: Sequence[Memory]) -> list[torch.Tensor]:
        buffer = self._capture.buffer
        if buffer is None:
            raise self._capture.error or AssertionError("a capture without error has a buffer")
        held = self.stock().placed
        views = []
        for memory in wanted:
            placed = held[memory.source, memory.box]
            start = buffer.file_offsets[placed.file] + placed.payload_offset
            views.append(buffer.image.bytes_view[start : start + placed.nbytes])
        return views

    def verify(self) -> None:
        verify_staging(self._capture)


class StoredState:
    """A published checkpoint: its boxes are shared out among the ranks, and read when they are needed."""

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        self._checkpoint = checkpoint
        self._rank = rank
        self.world = world

    def stock(self) -> StoredState:
        return self

    def sources(self, wants: Callable[[str], bool]) -> dict[str, Source]:
        """The largest boxes first, each to the rank with the fewest bytes so far."""
        tensors = {name: info for name, info in self._checkpoint.tensors.items() if wants(name)}
        boxes = [(name, box) for name, info in tensors.items() for box in _apart(info.shards)]
        boxes.sort(key=lambda row: (-row[1].volume * tensors[row[0]].dtype.itemsize, row))
        held = [0] * self.world
        pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
        for name, box in boxes:
            rank = min(range(self.world), key=lambda number: (held[number], number))
            held[rank] += box.volume * tensors[name].dtype.itemsize
            pieces[name].append(Piece(box, (rank,)))
        return {
            name: Source(name, info.shape, compat.dtype_name(info.dtype), tuple(pieces[name]))
            for name, info in tensors.items()
        }

    def memories(self, wanted: Sequence[Memory]) -> list[torch.Tensor]:
        read = self._checkpoint.read_boxes([(memory.source, memory.box) for memory in wanted])
        return [compat.as_bytes(tensor) for tensor in read]

    def verify(self) -> None:
        """Every byte was matched with its checksum as it was read."""


def _apart(boxes: Iterable[Box]) -> list[Box]:
    """Each once: a box may be stored twice."""
    return list(dict.fromkeys(boxes))
