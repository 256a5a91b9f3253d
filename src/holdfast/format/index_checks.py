"""Whether what an index says of a tensor can be: its box in its shape, its record in its file. Torch-free, pure."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from holdfast.dtypes import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.format.manifest import IndexTensor

DIMENSIONS_MAX: Final = 1024
"""Far more than anybody uses, few enough to multiply."""


def tensor_fault(tensor: IndexTensor, file_sizes: Sequence[int]) -> str | None:
    """What is wrong with ``tensor``, a row of an index, in words; None if nothing is."""
    itemsize = ITEMSIZE.get(tensor.dtype)
    if itemsize is None:
        return f"dtype {tensor.dtype!r} is unknown"
    if _is_plainly_right(tensor, itemsize, file_sizes):
        return None
    if not len(tensor.shape) == len(tensor.offsets) == len(tensor.sizes):
        return "shape, offsets and sizes differ in length"
    if len(tensor.shape) > DIMENSIONS_MAX or prod(max(1, length) for length in tensor.shape) * itemsize >> 63:
        return f"no tensor has the shape {tensor.shape!r:.200}"
    for length, offset, size in zip(tensor.shape, tensor.offsets, tensor.sizes, strict=True):
        if offset < 0 or size < 0 or offset + size > length:
            return f"the box at {tensor.offsets} of {tensor.sizes} isn't inside {tensor.shape}"
    if prod(tensor.sizes) * itemsize != tensor.nbytes:
        return f"{tensor.sizes} of {tensor.dtype} isn't {tensor.nbytes:,} bytes"
    if not 0 <= tensor.file < len(file_sizes):
        return f"file {tensor.file} of {len(file_sizes)}"
    end = tensor.payload_offset + tensor.nbytes
    if not 0 <= tensor.record_offset <= tensor.payload_offset <= end <= tensor.record_end <= file_sizes[tensor.file]:
        return (
            f"record {tensor.record_offset:,} to {tensor.record_end:,} with its payload at {tensor.payload_offset:,} "
            f"isn't inside a file of {file_sizes[tensor.file]:,} bytes"
        )
    return None


def _is_plainly_right(tensor: IndexTensor, itemsize: int, file_sizes: Sequence[int]) -> bool:
    """Whether a tensor that is stored whole is all right: the usual case, in as few steps as can be."""
    shape, start, nbytes = tensor.shape, tensor.payload_offset, tensor.nbytes
    return (
        shape == tensor.sizes
        and len(shape) == len(tensor.offsets) < 8
        and not any(tensor.offsets)
        and (not shape or min(shape) > 0)
        and prod(shape) * itemsize == nbytes
        and 0 <= tensor.file < len(file_sizes)
        and 0 <= tensor.record_offset <= start <= start + nbytes <= tensor.record_end <= file_sizes[tensor.file]
        and nbytes < 1 << 63
    )
