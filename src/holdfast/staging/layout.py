"""A rank's save plan laid out in an image: every record rendered once, every payload a tensor view.

`CaptureBuffer` is the memory of one capture. Building it is the expensive, once-a-plan part: allocate, page-fault,
render all headers and trailers, make the views. Filling it is then nothing but copies.

Guarantees: after `build`, the only bytes that staging writes are tensor payloads and object records; everything
else of every file is final. Views are made once and reused for ever.
Does not decide offsets (``plan.write``) and does not copy (``staging.stager``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from holdfast import _torch_compat as compat
from holdfast import events
from holdfast.format import torch_record
from holdfast.staging.copies import Copies, CopyItem
from holdfast.staging.image import PAGE_BYTES, Image

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.plan.write import PlacedObject, PlacedTensor, RankPlan


@dataclass(frozen=True, slots=True)
class PayloadView:
    """Where one shard goes: ``view`` is its payload in the image, shaped and typed as the box."""

    placed: PlacedTensor
    image_offset: int
    view: torch.Tensor


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
        self._payloads_of: dict[str, list[PayloadView]] = {}
        self.engine_image: int | None = None
        """The number the engine knows the image by."""
        self._copies: tuple[Mapping[str, torch.Tensor], Copies] | None = None

    def build(self, *, pin: bool) -> None:
        """Warm the memory and render everything that never changes. Off the training thread; takes seconds for GBs."""
        self.image.warm_up()
        if pin:
            self.image.pin()
        memory = self.image.bytes_view
        host = compat.host_memory(memory)
        for placed in self.plan.tensors:
            base = self.file_offsets[placed.file]
            header, trailer = torch_record.render(placed.dtype, placed.sizes, record_offset=placed.record_offset)
            start = base + placed.record_offset
            payload = base + placed.payload_offset
            end = payload + placed.nbytes
            host[start : start + len(header)] = header
            host[end : end + len(trailer)] = trailer
            view = memory[payload:end].view(getattr(torch, placed.dtype)).view(placed.sizes)
            self._payloads_of.setdefault(placed.source, []).append(PayloadView(placed, payload, view))
        events.count("headers_rendered", len(self.plan.tensors))

    def put_object(self, placed: PlacedObject, record: bytes) -> None:
        """Copy a rendered object record to its place; eager, a few hundred bytes."""
        if len(record) != placed.capacity:
            raise AssertionError(f"{placed.name}: record of {len(record)} bytes in a place of {placed.capacity}")
        start = self.file_offsets[placed.file] + placed.offset
        compat.host_memory(self.image.bytes_view)[start : start + placed.capacity] = record

    def copies_of(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """The copies that fill this buffer from ``tensors`` (names of the structure to outer tensors).

        Names that have no place here are left out: another rank writes them.
        """
        return Copies.of(
            [
                CopyItem(name, tensor, _box_within(payload.placed, tensor), payload.view)
                for name, tensor in tensors.items()
                for payload in self._payloads_of.get(name, ())
            ]
        )

    def cached_copies_of(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """`copies_of`, made once and given again as long as the same mapping object is passed."""
        if self._copies is None or self._copies[0] is not tensors:
            self._copies = (tensors, self.copies_of(tensors))
        return self._copies[1]

    def close(self) -> None:
        """Let go of the views and the descriptor; the memory goes with the last view."""
        self._payloads_of.clear()
        self._copies = None
        self.image.close()


def _box_within(placed: PlacedTensor, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if tuple(compat.local_tensor(tensor).shape) == placed.sizes:
        return None
    return placed.local_offsets, placed.sizes
