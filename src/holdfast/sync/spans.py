"""A bucket in spans: large entries travel from and to the tensors' own memory, only small ones by way of a slot.

For transports that can send several memories as one bucket. A bucket is cut by its plan alone, so both ends cut it
alike, and each sees for itself which of the spans lie contiguous where the tensors are: nobody copies those.

Guarantees: the checksum is that of the spans' bytes, one behind the other, wherever they lie; what is between them in
a slot doesn't travel. A span that is received straight into a tensor is there before it was verified: until `take` has
returned what was expected nothing may be made of it.
Assumes host memory, and that nobody else writes to it between `places` and `take`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from holdfast import _torch_compat as compat
from holdfast.sync.layout import BucketPlan
from holdfast.sync.own_memory import bytes_of, note_write, source_of, target_of
from holdfast.sync.pieces import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from holdfast.sync.layout import Entry
    from holdfast.sync.pieces import Local

OWN_BYTES: Final = 1 << 20
"""An entry of so many is a span of its own: one message more costs less than copying it on both sides."""


class _Span(NamedTuple):
    """Bytes ``start`` to ``end`` of a bucket, with what lies there; ``alone``: one entry that is large enough."""

    start: int
    end: int
    plan: BucketPlan
    alone: bool


class Placed(NamedTuple):
    """Where the bytes of a span lie; ``own``: in the tensor's memory, not in a slot."""

    memory: torch.Tensor
    own: bool


class Spans:
    """See the module; made once a plan."""

    __slots__ = ("_spans",)

    def __init__(self, plan: BucketPlan) -> None:
        self._spans = _spans(plan)

    def gather(self, pieces: Sequence[Local], slot: torch.Tensor) -> list[Placed]:
        """Where each span's bytes are, to be sent in this order; those that need it are packed into ``slot``."""
        placed = []
        for span in self._spans:
            own = None
            if span.alone:
                own = bytes_of(source_of(span.plan.entries[0], pieces))
            if own is None:
                pack(span.plan, pieces, slot)
            placed.append(_placed(own, span, slot))
        return placed

    def places(self, destinations: Sequence[Sequence[Local]], slot: torch.Tensor) -> list[Placed]:
        """Where each span's bytes are to be received, in this order."""
        placed = []
        for span in self._spans:
            target = target_of(span.plan.entries[0], destinations) if span.alone else None
            own = None if target is None else bytes_of(target)
            if target is not None and own is not None:
                note_write(target)
            placed.append(_placed(own, span, slot))
        return placed

    def take(self, placed: Sequence[Placed], destinations: Sequence[Sequence[Local]], slot: torch.Tensor) -> int:
        """The checksum of what was received; spans that lie in ``slot`` are unpacked."""
        found = checksum(placed)
        for span, place in zip(self._spans, placed, strict=True):
            if not place.own:
                unpack(span.plan, slot, destinations)
            elif (target := target_of(span.plan.entries[0], destinations)) is not None:
                note_write(target)
        return found


def checksum(placed: Iterable[Placed]) -> int:
    """xxh3 of the spans' bytes."""
    state = xxhash.xxh3_64()
    for place in placed:
        state.update(compat.host_memory(place.memory))
    return state.intdigest()


def _spans(plan: BucketPlan) -> list[_Span]:
    spans: list[_Span] = []
    group: list[Entry] = []

    def end_group() -> None:
        if group:
            spans.append(_span(plan, group, alone=False))
            group.clear()

    for entry in plan.entries:
        if entry.nbytes >= OWN_BYTES:
            end_group()
            spans.append(_span(plan, [entry], alone=True))
        elif entry.nbytes:
            group.append(entry)
    end_group()
    return spans


def _span(plan: BucketPlan, entries: Sequence[Entry], *, alone: bool) -> _Span:
    end = entries[-1].at + entries[-1].nbytes
    return _Span(entries[0].at, end, BucketPlan(plan.lane, end, tuple(entries)), alone)


def _placed(own: torch.Tensor | None, span: _Span, slot: torch.Tensor) -> Placed:
    return Placed(slot[span.start : span.end], own=False) if own is None else Placed(own, own=True)
