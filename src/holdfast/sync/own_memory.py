"""Where the bytes of a bucket's entries are in the tensors' own memory, for who moves them without torch.

Guarantees: `bytes_of` and `address_of` give memory only where its bytes, in order, are the tensor's: host memory,
contiguous, and seen as it is. Both ends find the same bytes in an entry, wherever they have it.
Does not: copy, or keep anybody from writing there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.autograd.graph import increment_version

from holdfast import _torch_compat as compat
from holdfast.boxes import intersect
from holdfast.state.structure import part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from holdfast.sync.layout import Entry
    from holdfast.sync.pieces import Local


def source_of(entry: Entry, pieces: Sequence[Local]) -> torch.Tensor:
    """The part of a publisher rank's tensors that an entry is."""
    box, tensor = pieces[entry.piece]
    return tensor if entry.sizes == box.sizes else part_of(tensor, entry.box, box)


def target_of(entry: Entry, destinations: Sequence[Sequence[Local]]) -> torch.Tensor | None:
    """Where all of an entry goes, if that is one place."""
    found: torch.Tensor | None = None
    for box, tensor in destinations[entry.piece]:
        shared = intersect(box, entry.box)
        if shared is None:
            continue
        if found is not None or shared != entry.box:
            return None
        found = tensor if shared == box else part_of(tensor, shared, box)
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a host tensor that lies there as it is, row by row."""
    return compat.as_bytes(tensor) if _is_plain(tensor) else None


def address_of(tensor: torch.Tensor) -> int | None:
    """Where `bytes_of` begins."""
    return tensor.data_ptr() if _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def note_write(tensor: torch.Tensor) -> None:
    """Tell whoever looks at versions that the memory of ``tensor`` is written to by other means than torch's."""
    if not tensor.is_inference():
        increment_version(tensor)
