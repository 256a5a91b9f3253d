"""A rank's save plan laid out in an image: every record rendered once, every payload a tensor view.

`CaptureBuffer` is the memory of one capture. Building it is the expensive, once-a-plan part: allocate, page-fault,
render all headers and trailers, make the views. Filling it is then nothing but copies.

Guarantees: after `build`, the only bytes that staging writes are tensor payloads and object records; everything
else of every file is final.
Does not decide offsets (``plan.write``) and does not copy (``staging.stager``).
"""

from __future__ import annotations

from functools import cache
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.format import torch_record
from holdfast.staging.copies import Copies, CopyBatch, CopyItem
from holdfast.staging.image import PAGE_BYTES, Image
from holdfast.staging.scatter import (
    CAN_SCATTER,
    SCATTER_BYTES_MAX,
    Scatter,
    is_scattered_as_it_is,
    refuse_gone,
    refuse_own,
    worth_scattering,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from holdfast.plan.write import PlacedObject, PlacedTensor, RankPlan
    from holdfast.staging.gathering import Gathered
    from holdfast.staging.scatter import Pieces

_shape, _sizes, _dtype = attrgetter("shape"), attrgetter("sizes"), attrgetter("dtype")


class CaptureBuffer:
    """Image and views for one capture of one rank; reused by every capture with the same plan.

    A rank that writes nothing still has an image, of one page, so that nothing downstream is a special case.
    """

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.file_offsets: list[int] = []
        total = 0
        for file in plan.files:
            self.file_offsets.append(total)
            total += file.size
        self.nbytes = total
        self.image = Image(max(total, PAGE_BYTES))
        self._number_of = {placed.source: number for number, placed in enumerate(plan.tensors)}
        """Of the plan's tensors by source, the last one's where several come from it: those are in `_several`."""
        self._several = _repeated(plan.tensors) if len(self._number_of) < len(plan.tensors) else {}
        self.engine_image: int | None = None
        """The number the engine knows the image by."""
        self._copies: tuple[Mapping[str, torch.Tensor], Copies] | None = None
        self._gathered: tuple[Sequence[str], Copies] | None = None
        self._eager: tuple[Mapping[str, torch.Tensor], Copies | None] | None = None
        self._standing: tuple[Mapping[str, torch.Tensor], Copies] | None = None
        self.is_used = False
        """Whether a capture has been made in it: it will be used again, so that what only later ones gain from pays."""

    def build(self, *, pin: bool) -> None:
        """Warm the memory and render everything that never changes. Off the training thread; takes seconds for GBs."""
        self.image.warm_up()
        if pin:
            self.image.pin()
        host = compat.host_memory(self.image.bytes_view)
        bases, render = self.file_offsets, torch_record.render
        for placed in self.plan.tensors:
            base, start, payload = bases[placed.file], placed.record_offset, placed.payload_offset
            header, trailer = render(placed.dtype, placed.sizes, record_offset=start)
            host[base + start : base + payload] = header
            host[base + payload + placed.nbytes : base + placed.record_end] = trailer
        events.count("headers_rendered", len(self.plan.tensors))

    def put_object(self, placed: PlacedObject, record: bytes) -> None:
        """Copy a rendered object record to its place; eager, a few hundred bytes."""
        if len(record) != placed.capacity:
            raise AssertionError(f"{placed.name}: record of {len(record)} bytes in a place of {placed.capacity}")
        start = self.file_offsets[placed.file] + placed.offset
        compat.host_memory(self.image.bytes_view)[start : start + placed.capacity] = record

    def copies_of(self, tensors: Mapping[str, torch.Tensor], *, by_address: bool = False) -> Copies:
        """The copies that fill this buffer from ``tensors`` (names of the structure to outer tensors).

        Names that have no place here are left out: another rank writes them. by_address: small tensors may be copied
        from where the `Copies` are told, before use, that each of ``tensors`` is.
        """
        items: list[CopyItem] = []
        rows, held = self.plan.tensors, list(tensors.values())
        number_of: dict[int, int] = {}  # of what is copied by address: all of such a tensor is one payload
        for index, (name, tensor) in enumerate(tensors.items()):
            for number in self._numbers_of(name):
                if by_address and CAN_SCATTER and _can_scatter(rows[number], tensor):
                    number_of[index] = number
                else:
                    items.append(self._item(tensor, rows[number]))
        kept, alone = worth_scattering(self._pieces(list(number_of), list(number_of.values())))
        items += [self._item(held[at], rows[number_of[at]]) for at in alone[:, 0].tolist()]
        if not len(kept):
            return Copies.of(items)

        def copy_otherwise(sources: Sequence[int]) -> None:
            for at in sources:
                refuse_gone(rows[number_of[at]].source, held[at])
            CopyBatch(self._item(held[at], rows[number_of[at]]) for at in sources).copy()

        places = (kept[:, 1] + self.image.bytes_view.data_ptr()).tolist()
        return Copies.of(
            items,
            Scatter(self.image, kept, copy_otherwise),
            {rows[number_of[at]].source: place for at, place in zip(kept[:, 0].tolist(), places, strict=True)},
        )

    def cached_copies_of(self, tensors: Mapping[str, torch.Tensor], *, by_address: bool = False) -> Copies:
        """`copies_of`, made once and given again as long as the same mapping object is passed."""
        if self._copies is None or self._copies[0] is not tensors:
            self._copies = (tensors, self.copies_of(tensors, by_address=by_address))
        return self._copies[1]

    def cached_copies_from(self, gathered: Gathered) -> Copies:
        """The copies that fill this buffer from gathered values; made once for all that are gathered alike."""
        if self._gathered is None or self._gathered[0] is not gathered.names:
            eager = self.prepare_eager(gathered.tensors)
            if eager is not None and eager.scatter is not None:  # for what is small enough to be gathered: all of it
                copies = Copies((*(batch.strictly() for batch in eager.scatter.batches),), {}, {}, eager.scatter)
            else:
                found = [(at, number) for at, name in enumerate(gathered.names) for number in self._numbers_of(name)]
                pieces = self._pieces([at for at, _ in found], [number for _, number in found])
                copies = Copies.of((), Scatter(self.image, pieces, refuse_own))
            self._gathered = (gathered.names, copies)
        copies = self._gathered[1]
        copies.locate(gathered.addresses)
        return copies

    def prepare_eager(self, tensors: Mapping[str, torch.Tensor]) -> Copies | None:
        """Make the copies that take all of ``tensors`` at once, into places of their own, ready for `eager_copies`.

        For plain, contiguous host memory. None if some have no place here that holds all of them, bit for bit: what
        is in the image couldn't be found again by name. Takes some ten microseconds a tensor the first time.
        """
        if self._eager is None or self._eager[0] is not tensors:
            self._eager = (tensors, self._copies_to_places(tensors))
        return self._eager[1]

    def _copies_to_places(self, tensors: Mapping[str, torch.Tensor]) -> Copies | None:
        if self._several and not self._several.keys().isdisjoint(tensors):
            return None
        rows, number_of = self.plan.tensors, self._number_of
        numbers = [number_of[name] for name in tensors if name in number_of]
        if len(numbers) < len(tensors):
            return None
        placed, held = [rows[number] for number in numbers], list(tensors.values())
        # In one step each for all of them, as there may be very many.
        if not all(map(eq, map(_shape, held), map(_sizes, placed))):
            return None
        if not all(map(eq, map(_name_of, map(_dtype, held)), map(_dtype, placed))):
            return None
        pieces = self._pieces(range(len(placed)), numbers)
        small = pieces[:, 2] <= (SCATTER_BYTES_MAX if CAN_SCATTER else -1)
        items = [self._item(held[at], placed[at]) for at in np.flatnonzero(~small).tolist()]
        if not small.any():
            return Copies.of(items)

        def copy_otherwise(sources: Sequence[int]) -> None:
            CopyBatch(self._item(held[at], placed[at]) for at in sources).copy()

        return Copies.of(items, Scatter(self.image, pieces[small], copy_otherwise))

    def eager_copies(self, tensors: Mapping[str, torch.Tensor]) -> Copies | None:
        """What `prepare_eager` has made of this very mapping, if it was asked to; to be located before use."""
        known = self._eager
        return known[1] if known is not None and known[0] is tensors else None

    def standing_copies(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """The copies that fill this buffer from ``tensors`` where they are, as far as they have places; locate it."""
        ready = self.prepare_eager(tensors)
        if ready is None:
            if self._standing is None or self._standing[0] is not tensors:
                self._standing = (tensors, self.copies_of(tensors, by_address=True))
            ready = self._standing[1]
        return ready

    def values_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copies of what the image holds of these, which `prepare_eager` has found to have one place each."""
        found = {}
        for name in names:
            (number,) = self._numbers_of(name)
            found[name] = self.view_of(self.plan.tensors[number]).clone()
        return found

    def _numbers_of(self, name: str) -> Sequence[int]:
        """Which of the plan's tensors come from this one."""
        number = self._number_of.get(name)
        return () if number is None else self._several.get(name) or (number,)

    def _offset_of(self, placed: PlacedTensor) -> int:
        """Of the payload in the image."""
        return self.file_offsets[placed.file] + placed.payload_offset

    def _pieces(self, sources: Sequence[int], numbers: Sequence[int]) -> Pieces:
        """These of the plan's tensors as what is copied by address from ``sources``, one by one."""
        placed = [self.plan.tensors[number] for number in numbers]
        files = _column(placed, "file")
        offsets = np.array(self.file_offsets, dtype=np.int64)[files] + _column(placed, "payload_offset")
        # Records are counted on from one file to the next, but for one: they are no neighbours.
        place = np.array(numbers, dtype=np.int64) + files
        return np.stack([np.array(sources, dtype=np.int64), offsets, _column(placed, "nbytes"), place], axis=1)

    def _item(self, tensor: torch.Tensor, placed: PlacedTensor) -> CopyItem:
        return CopyItem(placed.source, tensor, _box_within(placed, tensor), self.view_of(placed))

    def view_of(self, placed: PlacedTensor) -> torch.Tensor:
        """The payload of one of the plan's tensors."""
        start = self._offset_of(placed)
        memory = self.image.bytes_view[start : start + placed.nbytes]
        return memory.view(getattr(torch, placed.dtype)).view(placed.sizes)

    def close(self) -> None:
        """Let go of the views and the descriptor; the memory goes with the last view."""
        self._number_of, self._several = {}, {}
        self._copies = self._gathered = self._eager = self._standing = None
        self.image.close()


def _repeated(tensors: Sequence[PlacedTensor]) -> dict[str, list[int]]:
    """The numbers of those that come from one source, for each source that several come from."""
    numbers: dict[str, list[int]] = {}
    for number, placed in enumerate(tensors):
        numbers.setdefault(placed.source, []).append(number)
    return {source: several for source, several in numbers.items() if len(several) > 1}


def _box_within(placed: PlacedTensor, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if tuple(compat.local_tensor(tensor).shape) == placed.sizes:
        return None
    return placed.local_offsets, placed.sizes


def _can_scatter(placed: PlacedTensor, tensor: torch.Tensor) -> bool:
    if not 0 < placed.nbytes <= SCATTER_BYTES_MAX:
        return False
    local = compat.local_tensor(tensor)
    return (
        is_scattered_as_it_is(local)
        and tuple(local.shape) == placed.sizes
        and local.dtype is getattr(torch, placed.dtype)
    )


def _column(placed: Sequence[PlacedTensor], name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(attrgetter(name), placed), np.int64, len(placed))


@cache
def _name_of(dtype: torch.dtype) -> str:
    return compat.dtype_name(dtype)
