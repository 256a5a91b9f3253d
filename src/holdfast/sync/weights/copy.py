"""Copies a bucket's bytes between tensors and memory, and hashes them in the same pass.

In host memory a bucket is copied in steps small enough to stay in a core's cache, and each step is hashed while it is
there: memory is read, and written, once. Entries stored contiguously in their tensors, most of a model, are moved as
bytes; torch copies the others. On a device a bucket is copied by one call, and hashed there.

Guarantees: the checksum is that of the bucket's bytes, whatever the steps. What `take` has copied is valid only if it
returns the expected checksum.
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
from holdfast.sync.weights.pieces import address_of, lying_source, note_write, pack, target_of, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from holdfast.sync.weights.pieces import Local

STEP_BYTES: Final = 1 << 20
"""Bytes that torch copies in one call."""
MOVE_BYTES: Final = 128 << 10
"""Bytes moved and hashed at a time: source and destination stay together in a core's own cache."""
_HOST: Final = "xxh3"


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
