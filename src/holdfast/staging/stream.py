"""Stage a state through a small ring of slots: piece by piece, each copied when its slot is free.

For a save whose caller waits: the state doesn't change until it is written, so no image of all files is needed.

    `PieceRenderer`     what the bytes of each piece of a rank's files are: headers, payloads, objects, zeros
    `StreamedStaging`   copies the pieces of one capture, and looks whether the state held still
    `SlotRing`          the slots: one memfd, reused by later saves

Guarantees: a piece has the same bytes as an image would. The recorded words of a tensor are compared with each piece
as it is copied, versions and addresses after the last one. Once `wait_idle` has returned True, nobody reads the state.
Host memory beside the state: the ring (`SLOTS` slots), and the rendered parts of one piece.
Does not: talk to the engine (``saver.delivery``), or copy from devices.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.errors import SaveFailed
from holdfast.format import torch_record
from holdfast.format.objects import render_object
from holdfast.plan.write import PlacedTensor
from holdfast.staging import copy_job
from holdfast.staging.copies import CopyBatch, CopyItem, refuse_other_shape
from holdfast.staging.image import Image
from holdfast.staging.small_copies import SCATTER_BYTES_MAX, is_scattered_as_it_is, refuse_gone

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from holdfast.format.objects import ObjectPayload
    from holdfast.plan.write import PlacedObject, RankPlan
    from holdfast.staging.change_detection import TensorVersions, WatchedTensors

    Words = Mapping[str, Sequence[tuple[int, int]]]

SLOT_BYTES: Final = 4 << 20
SLOTS: Final = 8
"""Enough for the engine to write some and hash one without waiting while the trainer fills the next."""


class SlotRing:
    """Slots in shared memory; page-faulted on first use."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.image = Image(slots * SLOT_BYTES)

    def slot(self, piece: int) -> torch.Tensor:
        """Return the memory of the slot for ``piece``."""
        start = piece % self.slots * SLOT_BYTES
        return self.image.bytes_view[start : start + SLOT_BYTES]


class PieceSource(Protocol):
    """What pieces are filled from."""

    def tensor(self, placed: PlacedTensor) -> tuple[torch.Tensor, bool]:
        """Return the tensor that ``placed`` stores, or a part of; and True if it stays valid when others are asked for.

        Asked once a piece, in the order of the plan.
        """
        ...

    def record(self, placed: PlacedObject) -> bytes:
        """Return the record of a plain object: as many bytes as it has place for."""
        ...


class CapturedSource:
    """A capture: its tensors and objects by their names in the structure."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, ObjectPayload]) -> None:
        self._tensors, self._objects = tensors, objects

    def tensor(self, placed: PlacedTensor) -> tuple[torch.Tensor, bool]:
        return self._tensors[placed.source], True

    def record(self, placed: PlacedObject) -> bytes:
        return render_object(self._objects[placed.source], placed.capacity)


class PieceRenderer:
    """The bytes of a rank's files, any piece of them at a time; in order, where the source's tensors don't stay valid.

    words: of a tensor, by name: offsets in its payload, and the eight bytes that were there when it was captured.
    """

    def __init__(self, plan: RankPlan, source: PieceSource, words: Words | None = None) -> None:
        self._source = source
        self._words: Words = words or {}
        self._bases = plan.file_offsets
        self._records: list[PlacedTensor | PlacedObject] = [*plan.tensors, *plan.objects]
        starts = [self._bases[placed.file] + placed.record_offset for placed in plan.tensors]
        starts += [self._bases[placed.file] + placed.offset for placed in plan.objects]
        ends = [self._bases[placed.file] + placed.record_end for placed in plan.tensors]
        ends += [self._bases[placed.file] + placed.offset + placed.capacity for placed in plan.objects]
        self._starts, self._ends = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)

    def fill(self, begin: int, stop: int, slot: torch.Tensor) -> str | None:
        """Write ``[begin, stop)`` of the image, bytes of one file, into ``slot``.

        Returns the first tensor that has changed since the capture, or None.
        """
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._starts, stop, side="left"))
        window = _Window(begin, stop, slot)
        items: list[CopyItem] = []
        words: list[tuple[str, int, int]] = []
        done = begin
        starts, ends = self._starts[first:last].tolist(), self._ends[first:last].tolist()
        for placed, start, end in zip(self._records[first:last], starts, ends, strict=True):
            if start > done:
                window.put(done, bytes(start - done))
            done = end
            if not isinstance(placed, PlacedTensor):
                window.put(start, self._source.record(placed))
            elif not (begin <= start and end <= stop and self._put_small(placed, start, window, words)):
                self._add_tensor(placed, window, items, words)
        window.put(done, bytes(max(0, stop - done)))
        copy_job.copy_batch(CopyBatch(items))
        differing = (name for name, place, word in words if ctypes.c_uint64.from_address(place).value != word)
        return next(differing, None)

    def _put_small(self, placed: PlacedTensor, record: int, window: _Window, words: list[tuple[str, int, int]]) -> bool:
        """Write the whole record of a small tensor, if its memory is what is stored of it: sooner than by a list."""
        if not 0 < placed.nbytes <= SCATTER_BYTES_MAX:
            return False
        tensor, _ = self._source.tensor(placed)
        fits = is_scattered_as_it_is(tensor) and tensor.shape == placed.sizes
        if not fits or tensor.dtype is not getattr(torch, placed.dtype):
            return False
        refuse_gone(placed.source, tensor)
        header, trailer = torch_record.render(placed.dtype, placed.sizes, record_offset=placed.record_offset)
        window.put(record, b"".join((header, compat.host_memory(tensor), trailer)))
        words += self._words_at(placed.source, record + len(header), window)
        return True

    def _add_tensor(
        self, placed: PlacedTensor, window: _Window, items: list[CopyItem], words: list[tuple[str, int, int]]
    ) -> None:
        """Write header and trailer; collect copies and recorded words of the part of the payload in the window."""
        base = self._bases[placed.file]
        record, payload = base + placed.record_offset, base + placed.payload_offset
        end = payload + placed.nbytes
        if payload > window.start or end < window.end:
            header, trailer = torch_record.render(placed.dtype, placed.sizes, record_offset=placed.record_offset)
            window.put(record, header)
            window.put(end, trailer)
        start, stop = max(payload, window.start), min(end, window.end)
        if start >= stop:
            return
        dtype: torch.dtype = getattr(torch, placed.dtype)
        tensor, stays = self._source.tensor(placed)
        refuse_gone(placed.source, tensor)
        view = window.view(start, stop).view(dtype)
        whole = CopyItem.of(placed, tensor, view)
        if stop - start == placed.nbytes:
            whole.target = view.view(placed.sizes)
            items.append(whole)
        else:
            source = whole.source()
            refuse_other_shape(placed.source, tuple(source.shape), placed.sizes)
            at = 0
            for part in parts_of(source, (start - payload) // dtype.itemsize, (stop - payload) // dtype.itemsize):
                place = view[at : at + part.numel()].view(part.shape)
                items.append(CopyItem(placed.source, part, None, place))
                at += part.numel()
        if not stays:
            copy_job.copy_batch(CopyBatch(items))
            items.clear()
        if whole.box is None and tensor.dtype == dtype:
            words += self._words_at(placed.source, payload, window)

    def _words_at(self, name: str, payload: int, window: _Window) -> Sequence[tuple[str, int, int]]:
        """Return the words noted of a tensor that are in the window, with the addresses of their copies."""
        if name not in self._words:
            return ()
        nbytes, address = ctypes.sizeof(ctypes.c_uint64), window.address - window.start
        return [
            (name, address + payload + offset, word)
            for offset, word in self._words[name]
            if window.start <= payload + offset and payload + offset + nbytes <= window.end
        ]


class _Window:
    """The memory of a piece, addressed by image coordinates."""

    def __init__(self, start: int, end: int, slot: torch.Tensor) -> None:
        self.start, self.end = start, end
        self._slot = slot
        self._host = compat.host_memory(slot)
        self.address = slot.data_ptr()

    def put(self, at: int, data: bytes | memoryview) -> None:
        """Write what of ``data``, which begins at ``at``, is in the window."""
        start, stop = at, at + len(data)
        if self.start <= start and stop <= self.end:
            self._host[start - self.start : stop - self.start] = data
            return
        start, stop = max(start, self.start), min(stop, self.end)
        if start < stop:
            self._host[start - self.start : stop - self.start] = data[start - at : stop - at]

    def view(self, start: int, stop: int) -> torch.Tensor:
        return self._slot[start - self.start : stop - self.start]


def parts_of(view: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Cut the elements ``[start, stop)`` of ``view``, counted in row-major order, into consecutive views."""
    if start >= stop:
        return
    if view.is_contiguous():
        yield view.view(-1)[start:stop]
        return
    inner = view.numel() // view.shape[0]
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        yield from parts_of(view[first], head, tail)
        return
    if head:
        yield from parts_of(view[first], head, inner)
        first += 1
    if first < last:
        yield view[first:last]
    if tail:
        yield from parts_of(view[last], 0, tail)


class StreamedStaging(copy_job.Staging):
    """The copies of a capture without an image; made on the training thread, filled by the delivering thread."""

    def __init__(self, watched: WatchedTensors, marks: TensorVersions) -> None:
        super().__init__(watched, marks=marks)
        self.is_loaded = True
        self._renderer: PieceRenderer | None = None

    def prepare(
        self, plan: RankPlan, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, ObjectPayload]
    ) -> None:
        """Say what is to be copied."""
        self._renderer = PieceRenderer(plan, CapturedSource(tensors, objects), self._marks.words_by_name())
        events.count("headers_rendered", len(plan.tensors))

    @property
    def has_changed(self) -> bool:
        """True if a recorded word differed: continuing is pointless."""
        return self._found is not None

    def fill(self, begin: int, stop: int, slot: torch.Tensor) -> None:
        """Copy ``[begin, stop)`` of the image into ``slot``. Raises `SaveFailed` once the copies were abandoned."""
        assert self._renderer is not None
        with self._condition:
            if self._abandoned:
                raise SaveFailed("the save was given up before all of the state was copied", step=None, rank=None)
            self._copying += 1
        started = time.perf_counter()
        error: BaseException | None = None
        try:
            found = self._renderer.fill(begin, stop, slot)
            self._found = self._found or found
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._end_batch(error, time.perf_counter() - started)

    def complete(self) -> None:
        """Check, after the last piece, that the tensors were not moved."""
        self._found = self._found or self._marks.moved()
        self.copied_at = time.monotonic()

    def run(self, *, timeout_s: float) -> None:
        """Do nothing: copies are made only once the attempt has begun."""

    def _host_complete(self) -> bool:
        return self.copied_at is not None and not self._copying

    def release(self) -> None:
        super().release()
        self._renderer = None
