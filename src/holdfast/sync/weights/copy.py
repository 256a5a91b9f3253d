"""Copies a bucket's bytes between tensors and memory, and hashes them in the same pass.

In host memory a bucket is copied in steps small enough to stay in a core's cache, and each step is hashed while it is
there: memory is read, and written, once. Entries stored contiguously in their tensors, most of a model, are moved as
bytes; torch copies the others. On a device a bucket is copied by one call, and hashed there.

`Spans` is for transports that send several memories as one bucket: large entries are sent from and received into the
tensors' own memory, only small ones through a slot. A bucket is cut by its plan alone, so both ends cut it alike, and
each end finds which of the spans are contiguous in its tensors: those aren't copied.

Guarantees: the checksum is that of the bucket's bytes, whatever the steps; that of spans covers their bytes one after
the other, without what lies between them in a slot, which isn't sent. What `take` has copied, or what was received
straight into a tensor, is valid only if `take` returns the expected checksum.
Assumes: spans are in host memory, and nobody else writes to it between `Spans.places` and `Spans.take`.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from holdfast import _torch_compat as compat
from holdfast.boxes import row_blocks
from holdfast.sync.weights.buckets import BucketEntry, BucketPlan
from holdfast.sync.weights.checksums import checksum, kind_for
from holdfast.sync.weights.pieces import address_of, bytes_of, lying_source, note_write, pack, target_of, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from holdfast.sync.weights.pieces import Local

OWN_BYTES: Final = 1 << 20
"""Entries of this size are spans of their own: one more message costs less than copying them on both sides."""
STEP_BYTES: Final = 1 << 20
"""Bytes that torch copies in one call."""
MOVE_BYTES: Final = 128 << 10
"""Bytes moved and hashed at a time: source and destination stay together in a core's own cache."""
_HOST: Final = "xxh3"


class _Span(NamedTuple):
    """Bytes ``start`` to ``end`` of a bucket, with their entries; ``alone``: one entry that is large enough."""

    start: int
    end: int
    plan: BucketPlan
    alone: bool


class Placed(NamedTuple):
    """The memory of a span; ``own``: the tensor's memory, not a slot."""

    memory: torch.Tensor
    own: bool


class Spans:
    """See the module; made once per plan."""

    __slots__ = ("_spans",)

    def __init__(self, plan: BucketPlan) -> None:
        self._spans = _spans(plan)

    def gather(self, pieces: Sequence[Local], slot: torch.Tensor) -> list[Placed]:
        """Return the memory of each span, in sending order; spans that need it are packed into ``slot``."""
        placed = []
        for span in self._spans:
            own = None
            if span.alone:
                lying = lying_source(span.plan.entries[0], pieces)
                own = None if lying is None else bytes_of(lying)
            if own is None:
                pack(span.plan, pieces, slot)
            placed.append(_placed(own, span, slot))
        return placed

    def places(self, destinations: Sequence[Sequence[Local]], slot: torch.Tensor) -> list[Placed]:
        """Return the memory to receive each span into, in this order."""
        placed = []
        for span in self._spans:
            target = target_of(span.plan.entries[0], destinations) if span.alone else None
            own = None if target is None else bytes_of(target)
            if target is not None and own is not None:
                note_write(target)
            placed.append(_placed(own, span, slot))
        return placed

    def take(self, placed: Sequence[Placed], destinations: Sequence[Sequence[Local]], slot: torch.Tensor) -> int:
        """Unpack the spans that lie in ``slot``; return the checksum of all received bytes."""
        found = span_checksum(placed)
        for span, place in zip(self._spans, placed, strict=True):
            if not place.own:
                unpack(span.plan, slot, destinations)
            elif (target := target_of(span.plan.entries[0], destinations)) is not None:
                note_write(target)
        return found


def span_checksum(placed: Iterable[Placed]) -> int:
    """Return xxh3 of the spans' bytes."""
    state = xxhash.xxh3_64()
    for place in placed:
        state.update(compat.host_memory(place.memory))
    return state.intdigest()


def _spans(plan: BucketPlan) -> list[_Span]:
    spans: list[_Span] = []
    group: list[BucketEntry] = []

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


def _span(plan: BucketPlan, entries: Sequence[BucketEntry], *, alone: bool) -> _Span:
    end = entries[-1].at + entries[-1].nbytes
    return _Span(entries[0].at, end, BucketPlan(plan.lane, end, tuple(entries)), alone)


def _placed(own: torch.Tensor | None, span: _Span, slot: torch.Tensor) -> Placed:
    return Placed(slot[span.start : span.end], own=False) if own is None else Placed(own, own=True)


class _Step(NamedTuple):
    """``plan``: the entries of a step, some of them partial; ``nbytes``: its end. ``moves``: the same as moves."""

    plan: BucketPlan
    moves: tuple[_Move, ...]


class _Move(NamedTuple):
    """``nbytes`` bytes of a bucket from ``at``, which are those of entry number ``entry`` from its byte ``start``."""

    entry: int
    start: int
    at: int
    nbytes: int


class BucketCopy:
    """A bucket's plan in steps; made once per plan."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan

    @cached_property
    def _steps(self) -> list[_Step]:
        return _steps(self.plan)

    @cached_property
    def spans(self) -> Spans:
        """The same bucket for a transport that sends it from several memories."""
        return Spans(self.plan)

    def give(self, pieces: Sequence[Local], memory: torch.Tensor) -> tuple[str, int]:
        """Pack the bucket into ``memory``; return kind and value of its checksum."""
        kind = kind_for(memory)
        if kind != _HOST:
            pack(self.plan, pieces, memory)
            return kind, checksum(memory, kind)
        lying = [lying_source(entry, pieces) if entry.nbytes else None for entry in self.plan.entries]
        sources = [None if source is None else address_of(source) for source in lying]
        base, hashing = memory.data_ptr(), _Hashing(memory)
        for plan, moves in self._steps:
            if any(sources[move.entry] is None for move in moves):
                pack(plan, pieces, memory)
                hashing.up_to(plan.nbytes)
                continue
            for entry, start, at, nbytes in moves:
                ctypes.memmove(base + at, sources[entry] + start, nbytes)  # type: ignore[operator]
                if at + nbytes >= hashing.done + MOVE_BYTES:
                    hashing.up_to(at + nbytes)
        return kind, hashing.up_to(self.plan.nbytes)

    def take(self, memory: torch.Tensor, destinations: Sequence[Sequence[Local]], kind: str) -> int:
        """Unpack the bucket from ``memory``; return its checksum. Raises `ConfigError` for an unknown kind."""
        if kind != _HOST or kind_for(memory) != _HOST:
            found = checksum(memory, kind)  # type: ignore[arg-type]
            unpack(self.plan, memory, destinations)
            return found
        targets = [target_of(entry, destinations) if entry.nbytes else None for entry in self.plan.entries]
        addresses = [None if target is None else address_of(target) for target in targets]
        base, hashing = memory.data_ptr(), _Hashing(memory)
        for plan, moves in self._steps:
            if any(addresses[move.entry] is None for move in moves):
                hashing.up_to(plan.nbytes)
                unpack(plan, memory, destinations)
                continue
            for entry, start, at, nbytes in moves:
                if at + nbytes > hashing.done:
                    hashing.up_to(min(max(at + nbytes, hashing.done + MOVE_BYTES), plan.nbytes))
                ctypes.memmove(addresses[entry] + start, base + at, nbytes)  # type: ignore[operator]
        for target, address in zip(targets, addresses, strict=True):
            if target is not None and address is not None:
                note_write(target)
        return hashing.up_to(self.plan.nbytes)


class _Hashing:
    """The checksum of a bucket's bytes, of which the first ``done`` are hashed."""

    __slots__ = ("_state", "_view", "done")

    def __init__(self, memory: torch.Tensor) -> None:
        self._state = xxhash.xxh3_64()
        self._view = compat.host_memory(memory)
        self.done = 0

    def up_to(self, end: int) -> int:
        """Hash the bytes before ``end``; return the checksum so far."""
        if end > self.done:
            self._state.update(self._view[self.done : end])
            self.done = end
        return self._state.intdigest()


def _steps(plan: BucketPlan) -> list[_Step]:
    """Return the plan's entries, cut into ranges of rows, in groups of about `STEP_BYTES`."""
    steps: list[_Step] = []
    group: list[BucketEntry] = []
    moves: list[_Move] = []
    begun = 0

    def end_group(end: int) -> None:
        nonlocal begun
        steps.append(_Step(BucketPlan(plan.lane, end, tuple(group)), tuple(moves)))
        group.clear()
        moves.clear()
        begun = end

    for number, entry in enumerate(plan.entries):
        for part in _cut(entry):
            group.append(part)
            end = part.at + part.nbytes
            cuts = range(part.at, end, MOVE_BYTES)
            moves += [_Move(number, at - entry.at, at, min(MOVE_BYTES, end - at)) for at in cuts]
            if end - begun >= STEP_BYTES:
                end_group(end)
    if group:
        end_group(plan.nbytes)
    return steps


def _cut(entry: BucketEntry) -> list[BucketEntry]:
    volume = entry.box.volume
    if not entry.nbytes:
        return []
    if entry.nbytes <= 2 * STEP_BYTES:
        return [entry]
    itemsize, at, found = entry.nbytes // volume, entry.at, []
    for box in row_blocks(entry.box, STEP_BYTES // itemsize):
        nbytes = box.volume * itemsize
        found.append(BucketEntry(entry.piece, box.offsets, box.sizes, at, nbytes))
        at += nbytes
    return found
