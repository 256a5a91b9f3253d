"""Writes to live tensors only what changed, where they still hold the version that a delta leads from.

    commit:  the tensor is filled -> `LiveStamp`
    fetch:   a delta is decoded and put into memory aside -> `Changes.note`: where, and the new bits
    commit:  the stamp stands -> `write_live`: the same places of the live tensor, in several threads; else all of it

Guarantees: a tensor is scattered to only if its caller says what changed since the bits that it has; then it holds what
lies aside, as if it had been copied. Where it would take longer than a copy, or more memory than a quarter of what lies
aside, a block is copied. torch's version counters count these writes. Counts ``sync_bytes_scattered`` and
``sync_bytes_copied``. A stamp sees every write that torch counts (in place, through views and ``detach()``, under
``no_grad`` or inference mode, by optimizers), and other memory (``.data =``, ``set_``, ``swap_tensors``), also at the
address of what was freed.
Assumes: what lies aside is verified, and neither it nor the live tensors are written to meanwhile. `Changes` are noted
by many threads, and read once all have ended.
Does not: see writes that torch doesn't count: through ``.data``, numpy or a pointer, to the storage, by collectives
(``dist.broadcast``). Tensors of inference mode have no counter, and those in shared memory are written to by other
processes: their stamps never stand.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.cores import take_turns
from holdfast.staging.copier import lies_as_it_is
from holdfast.state.entries import local_tensor, memory_of
from holdfast.sync.weights.pieces import copy_all, copy_threads, note_write

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    import numpy.typing as npt
    import torch

    from holdfast.state.entries import WholePlace

    Bytes = npt.NDArray[np.uint8]

_KEPT: Final = 0.25
"""Of the memory that changes are of, that they may take themselves."""
_PAYS: Final = 1 / 32
"""Changes a byte up to which scattering takes less time than copying: 6 % of 2-byte elements."""
_JOB_BYTES: Final = 8 << 20
"""Bytes of a tensor that a thread takes at a time."""


class LiveStamp(NamedTuple):
    """State of a live tensor when a version was committed to it, and what it was filled with.

    content: the version. name, place: under which name it was published, and where in that it lies.
    """

    tensor: torch.Tensor
    name: str
    place: WholePlace | None
    content: Hashable
    writes: tuple[int, int]
    memory: tuple[Hashable, object]

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str, place: WholePlace | None, content: Hashable) -> LiveStamp:
        """Return the stamp of a tensor that was just filled."""
        local = local_tensor(tensor)
        writes = compat.version_of(tensor), compat.version_of(local)
        return cls(tensor, name, place, content, writes, (memory_of(tensor), _storage_of(local)))

    @property
    def stands(self) -> bool:
        """Return True if it is as it was, as far as that can be told."""
        local = local_tensor(self.tensor)
        if local.is_inference() or (local.is_cpu and local.is_shared()):  # type: ignore[no-untyped-call]
            return False
        now = LiveStamp.of(self.tensor, self.name, self.place, self.content)
        return (now.writes, now.memory) == (self.writes, self.memory)

    def has(self, name: str, place: WholePlace | None) -> bool:
        """Return True if it still has what lies at ``place`` in the tensor published as ``name``."""
        return (self.name, self.place) == (name, place) and self.stands


def _storage_of(tensor: torch.Tensor) -> object:
    """Return what is equal for one storage only, even if its address is given to another one; keeps no memory."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):  # it has none
        return id(tensor)


class _ChangedBlock(NamedTuple):
    """What changed of the bytes ``start`` to ``end``: ``values`` at ``places``, or all of them."""

    start: int
    end: int
    unit_bytes: int
    places: npt.NDArray[np.int64] | None
    values: npt.NDArray[Any]


_ALL: Final = np.empty(0, np.uint8)


class Changes:
    """What one delta changed in a memory; of blocks without an entry nothing."""

    def __init__(self, nbytes: int) -> None:
        """nbytes: of the memory."""
        self.nbytes = 0
        """Bytes that they take."""
        self.limit = int(_KEPT * nbytes)
        self._blocks: list[_ChangedBlock] = []
        self._lock = threading.Lock()

    def note(self, start: int, nbytes: int, places: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Note that units of the bytes from ``start`` on are ``values`` now, at ``places``, ascending. Any thread."""
        if not len(places):
            return
        taken = places.nbytes + values.nbytes
        pays = len(places) <= nbytes * _PAYS
        with self._lock:
            pays = pays and self.nbytes + taken <= self.limit
            if pays:
                self.nbytes += taken
        unit_bytes = values.itemsize
        if unit_bytes == 1 and pays:
            values = values.copy()  # else it keeps the record that it was decoded from
        row = _ChangedBlock(start, start + nbytes, unit_bytes, *((places, values) if pays else (None, _ALL)))
        with self._lock:
            self._blocks.append(row)

    def between(self, start: int, end: int) -> Iterator[_ChangedBlock]:
        """Yield the blocks that have bytes from ``start`` to ``end``."""
        blocks, ends = self._sorted
        for number in range(bisect_right(ends, start), len(blocks)):
            if blocks[number].start >= end:
                return
            yield blocks[number]

    @cached_property
    def _sorted(self) -> tuple[list[_ChangedBlock], list[int]]:
        blocks = sorted(self._blocks, key=lambda block: block.start)  # equal or apart: the ends ascend, too
        return blocks, [block.end for block in blocks]


class LiveWrite(NamedTuple):
    """A live tensor, and what lies aside for it: of equal shape and dtype.

    start: of ``source``, in the memory that ``steps`` are of. steps: what changed since the bits that ``target`` has,
    in order; None: that isn't known. others: ranges of that memory that may differ besides, ascending.
    """

    target: torch.Tensor
    source: torch.Tensor
    start: int = 0
    steps: Sequence[Changes] | None = None
    others: Sequence[tuple[int, int]] = ()


def write_live(writes: Sequence[LiveWrite], check: Callable[[], None] | None = None) -> None:
    """Make each target equal its source. check: called after each part; what it raises ends the writing."""
    scattered: list[_Scatter] = []
    whole: list[LiveWrite] = []
    for write in writes:
        if write.steps is not None and lies_as_it_is(write.target) and lies_as_it_is(write.source):
            scattered.append(_Scatter(write, write.steps))
        else:
            whole.append(write)
    jobs = [job for scatter in scattered for job in scatter.jobs()]

    def run(job: Callable[[], None]) -> None:
        job()
        if check is not None:
            check()

    take_turns([partial(run, job) for job in jobs], copy_threads())
    copy_all([write.target for write in whole], [write.source for write in whole], check)
    events.count("sync_bytes_scattered", sum(sum(scatter.scattered) for scatter in scattered))
    copied = sum(sum(scatter.copied) for scatter in scattered)
    events.count("sync_bytes_copied", copied + sum(write.target.nbytes for write in whole))


class _Scatter:
    """Brings one live tensor forward."""

    def __init__(self, write: LiveWrite, steps: Sequence[Changes]) -> None:
        self._write = write
        self._steps = steps
        self._target: Bytes = compat.as_bytes(write.target).numpy()
        self._source: Bytes = compat.as_bytes(write.source).numpy()
        self.scattered: list[int] = []
        self.copied: list[int] = []
        """Bytes of each part."""

    def jobs(self) -> list[Callable[[], None]]:
        """Return what is to be done, in any order; the tensor counts as written to from now on, if anything is."""
        first, end = self._write.start, self._write.start + len(self._target)
        cuts = [(low, min(low + _JOB_BYTES, end)) for low in range(first, end, _JOB_BYTES)]
        found = [partial(self._bring_forward, low, high) for low, high in cuts if self._differs(low, high)]
        if found:
            note_write(self._write.target)
        return found  # type: ignore[return-value]

    def _differs(self, low: int, high: int) -> bool:
        return any(True for step in self._steps for _ in step.between(low, high)) or any(
            start < high and low < end for start, end in self._write.others
        )

    def _bring_forward(self, low: int, high: int) -> None:
        for step in self._steps:  # a later one has the newer bits of what both have
            for block in step.between(low, high):
                self._put(block, max(low, block.start), min(high, block.end))
        for start, end in self._write.others:
            if start < high and low < end:
                self._copy(max(low, start), min(high, end))

    def _put(self, block: _ChangedBlock, first: int, last: int) -> None:
        places, values, unit = block.places, block.values, block.unit_bytes
        skipped, ended = first - block.start, last - block.start
        if places is None or skipped % unit or ended % unit:
            self._copy(first, last)
            return
        if (first, last) != (block.start, block.end):
            low, high = np.searchsorted(places, (skipped // unit, ended // unit))
            places, values = places[low:high], values[low:high]
            if skipped:
                places = places - skipped // unit
        start = self._write.start
        units = self._target[first - start : last - start].view(f"<u{unit}")
        units[places] = values
        self.scattered.append(values.nbytes)

    def _copy(self, first: int, last: int) -> None:
        start = self._write.start
        np.copyto(self._target[first - start : last - start], self._source[first - start : last - start])
        self.copied.append(last - first)
