"""Eager values that are very many and small, taken together: one block of memory a capture, filled by addresses.

What the user may change at any moment is copied before ``save`` returns. One by one that takes ten microseconds a
tensor; together, a quarter of one. The block is kept from save to save.

Guarantees: a block belongs to one capture until that gives it back, so what is in flight is never overwritten; one
that is never given back goes when its capture does. At most `KEPT_BYTES_MAX` are kept for later. Values are bit for
bit what the tensors hold.
Does not: take what isn't plain, contiguous host memory, nor what is large: those are cloned (``snapshot``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from holdfast.staging.image import PAGE_BYTES, Image
from holdfast.staging.scatter import CAN_SCATTER, SCATTER_BYTES_MAX, Scatter, is_scattered_as_it_is, refuse_own
from holdfast.tensor_kinds import Places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from holdfast.staging.scatter import Pieces
    from holdfast.tensor_kinds import Addresses

KEPT_BYTES_MAX: Final = 64 << 20
GATHER_MIN: Final = 32
"""Fewer tensors than that are cloned as quickly."""


def can_gather(tensor: torch.Tensor) -> bool:
    """Whether such a tensor is better taken together with others."""
    return CAN_SCATTER and 0 < tensor.nbytes <= SCATTER_BYTES_MAX and is_scattered_as_it_is(tensor)


class Gathered:
    """The values of one capture: ``addresses`` says where each of ``names`` lies, as long as this lives."""

    def __init__(self, source: GatherList, block: _Block) -> None:
        self.tensors = source.tensors
        """What they are the values of, in this order."""
        self.names: Sequence[str] = source.names
        self.addresses = block.addresses
        self._source = source
        self._block: _Block | None = block

    def give_back(self) -> None:
        """Nobody reads these values any more: their memory may be used again."""
        block, self._block = self._block, None
        if block is not None:
            self._source.keep(block)


class GatherList:
    """Tensors that `can_gather`, by name; made once a structure. Used by the training thread, but for `keep`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.names = tuple(tensors)
        self.places = Places(list(tensors.values()))
        sizes = np.array([tensor.nbytes for tensor in tensors.values()], dtype=np.int64)
        offsets = np.cumsum(sizes) - sizes
        self._offsets: Addresses = offsets.astype(np.uint64)
        self._nbytes = -(-int(sizes.sum()) // PAGE_BYTES) * PAGE_BYTES
        numbers = np.arange(len(sizes))
        self._pieces: Pieces = np.stack([numbers, offsets, sizes, numbers], axis=1)
        self._kept: list[_Block] = []

    def gather(self) -> Gathered | None:
        """The values as they are now; None if a tensor is another kind of thing than it was, or can't be read."""
        addresses = self.places.addresses()
        if addresses is None:
            return None
        try:
            block = self._kept.pop()
        except IndexError:
            block = _Block(self._nbytes, self._offsets, self._pieces)
        return Gathered(self, block) if block.fill(addresses) else None

    def keep(self, block: _Block) -> None:
        """Take back a block for the next capture, or let go of it."""
        if (len(self._kept) + 1) * self._nbytes <= KEPT_BYTES_MAX:
            self._kept.append(block)


class _Block:
    """Memory for the values of one capture."""

    def __init__(self, nbytes: int, offsets: Addresses, pieces: Pieces) -> None:
        self._image = Image(nbytes)
        self.addresses: Addresses = offsets + np.uint64(self._image.bytes_view.data_ptr())
        self._scatter = Scatter(self._image, pieces, refuse_own)

    def fill(self, addresses: Addresses) -> bool:
        """Copy what is at these addresses; False if some can't be read."""
        self._scatter.locate(addresses)
        return all(batch.write() for batch in self._scatter.batches)
