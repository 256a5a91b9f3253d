"""A bucket's bytes, copied and hashed in one walk.

In host memory a bucket goes in steps small enough to stay in a core's cache, and each is hashed while it is there: then
memory is read, and written, once. On a device it is copied by one call, and hashed where it lies.

Guarantees: the checksum is that of the bucket's bytes, whatever the steps. What `take` has copied is right only if it
returns what was expected: until then nothing may be made of it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

import xxhash

from holdfast import _torch_compat as compat
from holdfast.sync.checksums import checksum, kind_for
from holdfast.sync.layout import BucketPlan, Entry, runs_of
from holdfast.sync.pieces import pack, unpack
from holdfast.sync.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from holdfast.sync.pieces import Local

STEP_BYTES: Final = 1 << 20
_HOST: Final = "xxh3"


class Walk:
    """A bucket's plan in steps; made once a plan."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan

    @cached_property
    def _steps(self) -> list[BucketPlan]:
        return _steps(self.plan)

    @cached_property
    def spans(self) -> Spans:
        """The same bucket for a transport that takes it in several memories."""
        return Spans(self.plan)

    def give(self, pieces: Sequence[Local], memory: torch.Tensor) -> tuple[str, int]:
        """Pack the bucket into ``memory``; returns kind and value of its checksum."""
        kind = kind_for(memory)
        if kind == _HOST:
            return kind, self._walk(memory, lambda step: pack(step, pieces, memory), copies_first=True)
        pack(self.plan, pieces, memory)
        return kind, checksum(memory, kind)

    def take(self, memory: torch.Tensor, destinations: Sequence[Sequence[Local]], kind: str) -> int:
        """Unpack the bucket from ``memory``; returns its checksum. Raises `ConfigError` for an unknown kind."""
        if kind == _HOST and kind_for(memory) == _HOST:
            return self._walk(memory, lambda step: unpack(step, memory, destinations), copies_first=False)
        found = checksum(memory, kind)  # type: ignore[arg-type]
        unpack(self.plan, memory, destinations)
        return found

    def _walk(self, memory: torch.Tensor, copy: Callable[[BucketPlan], None], *, copies_first: bool) -> int:
        state, done = xxhash.xxh3_64(), 0
        view = compat.host_memory(memory)
        for step in self._steps:
            if copies_first:
                copy(step)
            state.update(view[done : step.nbytes])
            if not copies_first:
                copy(step)
            done = step.nbytes
        return state.intdigest()


def _steps(plan: BucketPlan) -> list[BucketPlan]:
    """The plan's entries, cut into ranges of rows, in groups of about `STEP_BYTES`; ``nbytes`` is where one ends."""
    steps: list[BucketPlan] = []
    group: list[Entry] = []
    start = 0
    for entry in plan.entries:
        for part in _cut(entry):
            group.append(part)
            end = part.at + part.nbytes
            if end - start >= STEP_BYTES:
                steps.append(BucketPlan(plan.lane, end, tuple(group)))
                group, start = [], end
    if group:
        steps.append(BucketPlan(plan.lane, plan.nbytes, tuple(group)))
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
