"""A rank's save plan laid out in an image: every record rendered once, every payload a tensor view.

`CaptureBuffer` is the memory of one capture. Building it is expensive, and done once per plan: allocate, page-fault,
render all headers and trailers, make the views. Afterwards, filling it takes nothing but copies.

Guarantees: after `build`, staging writes only tensor payloads and object records; all other bytes of the files are
final.
Does not decide offsets (``plan.write``) and does not copy (``staging.copy_job``).
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
from holdfast.format.manifest import PAGE_BYTES
from holdfast.staging.copies import Copies, CopyBatch, CopyItem
from holdfast.staging.image import Image
from holdfast.staging.small_copies import (
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
    from holdfast.staging.small_copies import Gathered, Pieces

_shape, _sizes, _dtype = attrgetter("shape"), attrgetter("sizes"), attrgetter("dtype")


class CaptureBuffer:
    """Image and views for one capture of one rank; reused by every capture with the same plan.

    A rank that writes nothing has an image of one page, so that later stages need no special case.
    """

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.file_offsets = plan.file_offsets
        self.nbytes = plan.nbytes
        self.image = Image(max(self.nbytes, PAGE_BYTES))
        self._number_of = {placed.source: number for number, placed in enumerate(plan.tensors)}
        """Index of the plan's tensor by source; the last one for a source with several, see `_several`."""
        self._several = _repeated(plan.tensors) if len(self._number_of) < len(plan.tensors) else {}
        self.engine_image: int | None = None
        """The engine's number of the image."""
        self._copies: tuple[Mapping[str, torch.Tensor], Copies] | None = None
        self._gathered: tuple[Sequence[str], Copies] | None = None
        self._eager: tuple[Mapping[str, torch.Tensor], Copies | None] | None = None
        self._standing: tuple[Mapping[str, torch.Tensor], Copies] | None = None
        self.is_used = False
        """True once a capture used it: it will probably be reused, which is worth preparing for."""

    def build(self, *, pin: bool, cores: Sequence[int] = ()) -> None:
        """Warm the memory, near ``cores`` if any, and render everything that never changes.

        Takes seconds for GBs; use a background thread.
        """
        self.image.warm_up(cores)
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
        """Copy a rendered object record to its place; a few hundred bytes."""
        if len(record) != placed.capacity:
            raise AssertionError(f"{placed.name}: record of {len(record)} bytes in a place of {placed.capacity}")
        start = self.file_offsets[placed.file] + placed.offset
        compat.host_memory(self.image.bytes_view)[start : start + placed.capacity] = record

    def copies_of(self, tensors: Mapping[str, torch.Tensor], *, by_address: bool = False) -> Copies:
        """Return the copies that fill this buffer from ``tensors`` (outer tensors by structure name).

        Skips names that have no place here: another rank writes them. by_address: small tensors may be copied from
        addresses that `Copies.locate` sets before use.
        """
        items: list[CopyItem] = []
        rows, held = self.plan.tensors, list(tensors.values())
        number_of: dict[int, int] = {}  # for copies by address: such a tensor is one whole payload
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
        """Return `copies_of`, cached as long as the same mapping object is passed."""
        if self._copies is None or self._copies[0] is not tensors:
            self._copies = (tensors, self.copies_of(tensors, by_address=by_address))
        return self._copies[1]

    def cached_copies_from(self, gathered: Gathered) -> Copies:
        """Return the copies that fill this buffer from gathered values; cached for equally gathered values."""
        if self._gathered is None or self._gathered[0] is not gathered.names:
            eager = self.prepare_eager(gathered.tensors)
            if eager is not None and eager.scatter is not None:  # everything small enough to be gathered
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
        """Make copies of all of ``tensors`` to one place each, for `eager_copies`.

        For plain, contiguous host memory. Returns None if a tensor has no place here that holds all of it unchanged:
        its value could then not be found again by name. Takes some ten microseconds per tensor the first time.
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
        # One C-level pass each, as there may be very many tensors.
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
        """Return the result of `prepare_eager` for this mapping object, or None; call `locate` before use."""
        known = self._eager
        return known[1] if known is not None and known[0] is tensors else None

    def standing_copies(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """Return the copies of those ``tensors`` that have places here; call `locate` before use."""
        ready = self.prepare_eager(tensors)
        if ready is None:
            if self._standing is None or self._standing[0] is not tensors:
                self._standing = (tensors, self.copies_of(tensors, by_address=True))
            ready = self._standing[1]
        return ready

    def values_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return copies of these values in the image; `prepare_eager` has found that each has one place."""
        found = {}
        for name in names:
            (number,) = self._numbers_of(name)
            found[name] = self.view_of(self.plan.tensors[number]).clone()
        return found

    def _numbers_of(self, name: str) -> Sequence[int]:
        """Return the indices of the plan's tensors that come from the source ``name``."""
        number = self._number_of.get(name)
        return () if number is None else self._several.get(name) or (number,)

    def _offset_of(self, placed: PlacedTensor) -> int:
        """Return the offset of the payload in the image."""
        return self.file_offsets[placed.file] + placed.payload_offset

    def _pieces(self, sources: Sequence[int], numbers: Sequence[int]) -> Pieces:
        """Return table rows that copy tensors number ``numbers`` by address, each from its entry of ``sources``."""
        placed = [self.plan.tensors[number] for number in numbers]
        files = _column(placed, "file")
        offsets = np.array(self.file_offsets, dtype=np.int64)[files] + _column(placed, "payload_offset")
        # Record numbers continue from file to file, skipping one: the last and the first are no neighbours.
        place = np.array(numbers, dtype=np.int64) + files
        return np.stack([np.array(sources, dtype=np.int64), offsets, _column(placed, "nbytes"), place], axis=1)

    def _item(self, tensor: torch.Tensor, placed: PlacedTensor) -> CopyItem:
        return CopyItem.of(placed, tensor, self.view_of(placed))

    def view_of(self, placed: PlacedTensor) -> torch.Tensor:
        """Return the payload of one of the plan's tensors."""
        start = self._offset_of(placed)
        memory = self.image.bytes_view[start : start + placed.nbytes]
        return memory.view(getattr(torch, placed.dtype)).view(placed.sizes)

    def forget_tensors(self) -> None:
        """Drop all references to tensors: the next capture may be of another state with the same structure."""
        self._copies = self._gathered = self._eager = self._standing = None
        self.is_used = False

    def close(self) -> None:
        """Release the views and the descriptor; the memory is freed with the last view."""
        self._number_of, self._several = {}, {}
        self.forget_tensors()
        self.image.close()


def _repeated(tensors: Sequence[PlacedTensor]) -> dict[str, list[int]]:
    """Return the numbers of tensors with a common source, for each source that has several."""
    numbers: dict[str, list[int]] = {}
    for number, placed in enumerate(tensors):
        numbers.setdefault(placed.source, []).append(number)
    return {source: several for source, several in numbers.items() if len(several) > 1}


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
