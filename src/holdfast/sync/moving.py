"""A bucket's bytes, copied and hashed in one walk.

In host memory a bucket goes in steps small enough to stay in a core's cache, and each is hashed while it is there: then
memory is read, and written, once. Where a step's entries lie in tensors as they are, which is most of a model, its
bytes are moved as such; torch copies the others. On a device a bucket is copied by one call, and hashed where it lies.

Guarantees: the checksum is that of the bucket's bytes, whatever the steps. What `take` has copied is right only if it
returns what was expected: until then nothing may be made of it.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from holdfast import _torch_compat as compat
from holdfast.sync.checksums import checksum, kind_for
from holdfast.sync.layout import BucketPlan, Entry, runs_of
from holdfast.sync.own_memory import address_of, note_write, source_of, target_of
from holdfast.sync.pieces import pack, unpack
from holdfast.sync.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from holdfast.sync.pieces import Local

STEP_BYTES: Final = 1 << 20
"""Of what torch copies in one call."""
MOVE_BYTES: Final = 128 << 10
"""Moved and hashed at a time: what is read and what is written stay together in a core's own cache."""
_HOST: Final = "xxh3"


class _Step(NamedTuple):
    """``plan``: the entries of a step, those that are cut in part; ``nbytes`` is where it ends. ``moves``: the same."""

    plan: BucketPlan
    moves: tuple[_Move, ...]


class _Move(NamedTuple):
    """``nbytes`` bytes of a bucket from ``at``, which are those of its entry number ``entry`` from ``start``."""

    entry: int
    start: int
    at: int
    nbytes: int


class Walk:
    """A bucket's plan in steps; made once a plan."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan

    @cached_property
    def _steps(self) -> list[_Step]:
        return _steps(self.plan)

    @cached_property
    def spans(self) -> Spans:
        """The same bucket for a transport that takes it in several memories."""
        return Spans(self.plan)

    def give(self, pieces: Sequence[Local], memory: torch.Tensor) -> tuple[str, int]:
        """Pack the bucket into ``memory``; returns kind and value of its checksum."""
        kind = kind_for(memory)
        if kind != _HOST:
            pack(self.plan, pieces, memory)
            return kind, checksum(memory, kind)
        sources = [address_of(source_of(entry, pieces)) if entry.nbytes else None for entry in self.plan.entries]
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
        """Unpack the bucket from ``memory``; returns its checksum. Raises `ConfigError` for an unknown kind."""
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
    """The checksum of a bucket's bytes, which are hashed up to ``done``."""

    __slots__ = ("_state", "_view", "done")

    def __init__(self, memory: torch.Tensor) -> None:
        self._state = xxhash.xxh3_64()
        self._view = compat.host_memory(memory)
        self.done = 0

    def up_to(self, end: int) -> int:
        """Hash what comes before ``end``; returns the checksum so far."""
        if end > self.done:
            self._state.update(self._view[self.done : end])
            self.done = end
        return self._state.intdigest()


def _steps(plan: BucketPlan) -> list[_Step]:
    """The plan's entries, cut into ranges of rows, in groups of about `STEP_BYTES`."""
    steps: list[_Step] = []
    group: list[Entry] = []
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


def _cut(entry: Entry) -> list[Entry]:
    volume = entry.box.volume
    if not entry.nbytes:
        return []
    if entry.nbytes <= 2 * STEP_BYTES:
        return [entry]
    itemsize, at, found = entry.nbytes // volume, entry.at, []
    for box in runs_of(entry.box, STEP_BYTES // itemsize):
        nbytes = box.volume * itemsize
        found.append(Entry(entry.piece, box.offsets, box.sizes, at, nbytes))
        at += nbytes
    return found
