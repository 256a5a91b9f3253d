"""A rank's save plan laid out in an image: every record rendered once, every payload a tensor view.

`CaptureBuffer` is the memory of one capture. Building it is the expensive, once-a-plan part: allocate, page-fault,
render all headers and trailers, make the views. Filling it is then nothing but copies.

Guarantees: after `build`, the only bytes that staging writes are tensor payloads and object records; everything
else of every file is final.
Does not decide offsets (``plan.write``) and does not copy (``staging.stager``).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import msgspec
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
    Piece,
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


class Payload(msgspec.Struct, frozen=True, gc=False):
    """Where one shard goes: ``place`` counts the records of this buffer, one more from one file to the next."""

    placed: PlacedTensor
    image_offset: int
    place: int

    def piece(self, source: int) -> Piece:
        """It as what is copied by address from ``source``."""
        return Piece(source, self.image_offset, self.placed.nbytes, self.place)


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
        self._payloads_of: dict[str, list[Payload]] = {}
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
        for number, placed in enumerate(self.plan.tensors):
            base = self.file_offsets[placed.file]
            header, trailer = torch_record.render(placed.dtype, placed.sizes, record_offset=placed.record_offset)
            start = base + placed.record_offset
            payload = base + placed.payload_offset
            end = payload + placed.nbytes
            host[start : start + len(header)] = header
            host[end : end + len(trailer)] = trailer
            self._payloads_of.setdefault(placed.source, []).append(Payload(placed, payload, number + placed.file))
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
        pieces: list[Piece] = []
        of_source: dict[int, tuple[torch.Tensor, Payload]] = {}
        for index, (name, tensor) in enumerate(tensors.items()):
            for payload in self._payloads_of.get(name, ()):
                if by_address and CAN_SCATTER and _can_scatter(payload.placed, tensor):
                    of_source[index] = (tensor, payload)  # all of it is one payload
                    pieces.append(payload.piece(index))
                else:
                    items.append(self._item(tensor, payload))
        kept, alone = worth_scattering(pieces)
        items += [self._item(*of_source.pop(piece.source)) for piece in alone]
        if not kept:
            return Copies.of(items)

        def copy_otherwise(sources: Sequence[int]) -> None:
            for source in sources:
                tensor, payload = of_source[source]
                refuse_gone(payload.placed.source, tensor)
            CopyBatch(self._item(*of_source[source]) for source in sources).copy()

        base = self.image.bytes_view.data_ptr()
        return Copies.of(
            items,
            Scatter(self.image, kept, copy_otherwise),
            {payload.placed.source: base + payload.image_offset for _, payload in of_source.values()},
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
                pieces = [
                    payload.piece(index)
                    for index, name in enumerate(gathered.names)
                    for payload in self._payloads_of.get(name, ())
                ]
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
        items: list[CopyItem] = []
        indexes, offsets, sizes, places = list[int](), list[int](), list[int](), list[int]()
        for index, (name, tensor) in enumerate(tensors.items()):
            payloads = self._payloads_of.get(name, ())
            if len(payloads) != 1:
                return None
            payload = payloads[0]
            placed = payload.placed
            if tensor.shape != placed.sizes or _name_of(tensor.dtype) != placed.dtype:
                return None
            if CAN_SCATTER and placed.nbytes <= SCATTER_BYTES_MAX:
                indexes.append(index)
                offsets.append(payload.image_offset)
                sizes.append(placed.nbytes)
                places.append(payload.place)
            else:
                items.append(self._item(tensor, payload))
        if not indexes:
            return Copies.of(items)

        def copy_otherwise(sources: Sequence[int]) -> None:
            named = list(tensors.items())
            CopyBatch(self._item(named[at][1], self._payloads_of[named[at][0]][0]) for at in sources).copy()

        pieces = np.array([indexes, offsets, sizes, places], dtype=np.int64).T
        return Copies.of(items, Scatter(self.image, pieces, copy_otherwise))

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
            (payload,) = self._payloads_of[name]
            found[name] = self.view_of(payload.placed).clone()
        return found

    def _item(self, tensor: torch.Tensor, payload: Payload) -> CopyItem:
        placed = payload.placed
        return CopyItem(placed.source, tensor, _box_within(placed, tensor), self.view_of(placed))

    def view_of(self, placed: PlacedTensor) -> torch.Tensor:
        """The payload of one of the plan's tensors."""
        start = self.file_offsets[placed.file] + placed.payload_offset
        memory = self.image.bytes_view[start : start + placed.nbytes]
        return memory.view(getattr(torch, placed.dtype)).view(placed.sizes)

    def close(self) -> None:
        """Let go of the views and the descriptor; the memory goes with the last view."""
        self._payloads_of.clear()
        self._copies = self._gathered = self._eager = self._standing = None
        self.image.close()


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


@cache
def _name_of(dtype: torch.dtype) -> str:
    return compat.dtype_name(dtype)
