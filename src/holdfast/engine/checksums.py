"""Checksums of an image: every extent of every file, and every tensor, in one pass. Torch-free, pure.

An image is cut into `Unit`s at tensor starts (at extents if there are no tensors). Several threads can hash units, and
each tensor belongs to one unit. Within a unit the bytes are hashed in pieces that fit into a core's cache: first for
the extent, then, while cached, for the tensors.

Guarantees: the sums are xxh3_64 of the whole extent (the last of a file may be short) and of the whole tensor,
independent of units and pieces. Assumes: the image doesn't change meanwhile. Does no I/O.
"""

from __future__ import annotations

import array
import itertools
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import xxhash

from holdfast.format.manifest import EXTENT_BYTES, PAGE_BYTES, SUM_BYTES, FilePart, part_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.engine.messages import AddPlan, FileRow

PIECE_BYTES: Final = 256 << 10
"""Bytes hashed at a time: fits into a core's cache; the GIL is released around it."""
UNIT_BYTES: Final = 32 << 20
"""Minimum size of a unit, unless its file is smaller: a few milliseconds of hashing."""
_SUM: Final = struct.Struct("<Q")
_EMPTY_SUM: Final = xxhash.xxh3_64_intdigest(b"")


class ImageBytes(Protocol):
    """Bytes by image offset: a `memoryview` of the image, or an object that acts like one."""

    def __getitem__(self, where: slice, /) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Unit:
    """Extents that start in ``[start, end)`` of the image, and the tensors ``order[first:last]``, which lie there."""

    file: int
    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class WritePlan:
    """A checked and compiled `AddPlan`. Immutable; used by every save of the plan."""

    files: tuple[FileRow, ...]
    offsets: Sequence[int]
    """Image offset of each tensor, in index order."""
    sizes: Sequence[int]
    order: Sequence[int]
    """Nonempty tensors, by image offset."""
    units: tuple[Unit, ...]


class Sums:
    """The checksums of one pass, filled in by `hash_unit`. Units touch disjoint parts: no lock is needed."""

    def __init__(self, plan: WritePlan) -> None:
        self.extents = [bytearray(SUM_BYTES * -(-row.size // EXTENT_BYTES)) for row in plan.files]
        self.tensors = bytearray(_SUM.pack(_EMPTY_SUM) * len(plan.sizes))


def compile_plan(plan: AddPlan, *, unit_bytes: int = UNIT_BYTES) -> WritePlan:
    """Check an `AddPlan` and cut its files into units.

    Raises `ValueError` if rows or tensors overlap, a tensor does not lie in one row, or a row can't be a part.
    """
    _check_parts(plan.files)
    offsets, sizes = _numbers(plan.tensor_offsets), _numbers(plan.tensor_sizes)
    if len(offsets) != len(sizes):
        raise ValueError(f"{len(offsets)} tensor offsets but {len(sizes)} sizes")
    order: Sequence[int] = range(len(sizes))
    if min(sizes, default=1) == 0:
        order = [index for index in order if sizes[index]]
    if any(offsets[a] > offsets[b] for a, b in itertools.pairwise(order)):
        order = sorted(order, key=offsets.__getitem__)

    units: list[Unit] = []
    first, done = 0, 0
    by_place = sorted(
        range(len(plan.files)), key=lambda index: (plan.files[index].image_offset, plan.files[index].size)
    )
    for file in by_place:
        row = plan.files[file]
        if row.image_offset < done or row.size < 0:
            raise ValueError(f"file {row.name} overlaps another at byte {row.image_offset} of the image")
        done = row.image_offset + row.size
        first = _cut(file, row, offsets, sizes, order, first, unit_bytes, units)
    if first != len(order):
        raise ValueError(f"tensor {order[first]} at byte {offsets[order[first]]} of the image lies in no file")
    return WritePlan(plan.files, offsets, sizes, order, tuple(units))


def hash_unit(
    image: ImageBytes,
    plan: WritePlan,
    unit: Unit,
    sums: Sums,
    piece_bytes: int = PIECE_BYTES,
    *,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Hash one unit of ``image`` into ``sums``; call ``pause`` before each of the pieces, which divide an extent."""
    row = plan.files[unit.file]
    row_end = row.image_offset + row.size
    tensors = _TensorWalk(image, plan, unit, sums.tensors)
    extent = (unit.start - row.image_offset) // EXTENT_BYTES
    while (at := row.image_offset + extent * EXTENT_BYTES) < unit.end:
        pause()
        end = min(at + EXTENT_BYTES, row_end)
        # The unit before hashes the extent that this unit begins in; here only its tensors are hashed.
        state = xxhash.xxh3_64() if at >= unit.start else None
        for start in range(at, end, piece_bytes):
            stop = min(start + piece_bytes, end)
            if state is not None:
                state.update(image[start:stop])
            tensors.walk(start, stop)
        if state is not None:
            _SUM.pack_into(sums.extents[unit.file], extent * SUM_BYTES, state.intdigest())
        extent += 1
    assert tensors.at == unit.last


class _TensorWalk:
    """Hashes the tensors of a unit, piece by piece."""

    def __init__(self, image: ImageBytes, plan: WritePlan, unit: Unit, sums: bytearray) -> None:
        self._image, self._plan, self._unit, self._sums = image, plan, unit, sums
        self._state: xxhash.xxh3_64 | None = None
        self.at = unit.first

    def walk(self, start: int, stop: int) -> None:
        """Hash the bytes of the unit's tensors in ``[start, stop)`` of the image; pieces come in order."""
        plan, image, sums = self._plan, self._image, self._sums
        order, offsets, sizes, last = plan.order, plan.offsets, plan.sizes, self._unit.last
        while self.at < last:
            tensor = order[self.at]
            begin = offsets[tensor]
            if begin >= stop:
                return
            end = begin + sizes[tensor]
            if begin >= start and end <= stop:
                _SUM.pack_into(sums, tensor * SUM_BYTES, xxhash.xxh3_64_intdigest(image[begin:end]))
            else:
                if self._state is None:
                    self._state = xxhash.xxh3_64()
                self._state.update(image[max(begin, start) : min(end, stop)])
                if end > stop:
                    return
                _SUM.pack_into(sums, tensor * SUM_BYTES, self._state.intdigest())
                self._state = None
            self.at += 1


def _cut(
    file: int,
    row: FileRow,
    offsets: Sequence[int],
    sizes: Sequence[int],
    order: Sequence[int],
    first: int,
    unit_bytes: int,
    units: list[Unit],
) -> int:
    """Append the units of one file, whose tensors start at ``order[first]``; return the index after its last tensor."""
    end = row.image_offset + row.size
    start, done, at = row.image_offset, row.image_offset, first
    while at < len(order) and (offset := offsets[order[at]]) < end:
        if offset < done:
            raise ValueError(f"tensor {order[at]} at byte {offset} of the image overlaps another, or lies in no file")
        if offset - start >= unit_bytes:
            units.append(Unit(file, start, offset, first, at))
            start, first = offset, at
        done = offset + sizes[order[at]]
        if done > end:
            raise ValueError(f"tensor {order[at]} at byte {offset} of the image leaves file {row.name}")
        at += 1
    if first == at:  # no tensors to cut at, as in an export's parts
        step = -(-unit_bytes // EXTENT_BYTES) * EXTENT_BYTES
        cut = row.image_offset + -(-(start - row.image_offset) // EXTENT_BYTES) * EXTENT_BYTES + step
        while cut < end:
            units.append(Unit(file, start, cut, first, at))
            start, cut = cut, cut + step
    if start < end:
        units.append(Unit(file, start, end, first, at))
    return at


def _check_parts(rows: Sequence[FileRow]) -> None:
    parts = [FilePart(row.name, row.offset, row.size, row.total) for row in rows if row.total is not None]
    if not parts:
        return
    if len(parts) != len(rows):
        raise ValueError("parts of files and whole files are in one plan")
    if any(row.image_offset % PAGE_BYTES for row in rows):
        raise ValueError(f"a part starts in the image off a multiple of {PAGE_BYTES}")
    parts.sort()
    for part in parts:
        fault = part_fault(part)
        if fault is not None:
            raise ValueError(fault)
    for one, other in itertools.pairwise(parts):
        if one.name == other.name and (one.end > other.offset or one.total != other.total):
            raise ValueError(f"the parts of {one.name} at bytes {one.offset} and {other.offset} don't fit together")


def _numbers(data: bytes) -> Sequence[int]:
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no sequence of 8-byte numbers")
    numbers = array.array("Q")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
