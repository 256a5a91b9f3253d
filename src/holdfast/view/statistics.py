"""Compute what a tensor's values are like, and how those of two steps differ, reading by parts. Imports torch.

Sums and differences are those that ``holdfast cat`` and ``holdfast diff`` print.

Guarantees: at most `PART_BYTES` of each tensor are in memory at a time; what is read was verified. Of a tensor larger
than `READ_BYTES_MAX` evenly spread parts are read, and the result says which share.
Assumes: as `holdfast.loader.values`.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from holdfast.boxes import row_blocks, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.loader.checkpoint import open_checkpoint, source_of
from holdfast.loader.comparison import DifferenceSums
from holdfast.loader.read import read_boxes
from holdfast.loader.values import ValueSums, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from holdfast.boxes import Box
    from holdfast.loader.checkpoint import Checkpoint
    from holdfast.loader.sources.holdfast import CheckpointSource
    from holdfast.loader.values import Values
    from holdfast.plan.read import StoredTensor

PART_BYTES: Final = 16 << 20
READ_BYTES_MAX: Final = 4 << 30
BINS: Final = 64


def statistics_of(path: str, name: str, *, bytes_max: int = READ_BYTES_MAX) -> dict[str, Any]:
    """Return moments, extremes, counts of what isn't finite, and a histogram of tensor ``name``, as JSON has them.

    Raises `CheckpointNotFound` for an unknown name, `ConfigError` where its elements are no numbers, and as
    `Checkpoint.read`.
    """
    checkpoint = open_checkpoint(path)
    parts, share = _parts(_stored(checkpoint, name), bytes_max)
    if len(parts) == 1:
        values = [_values(_read(checkpoint, name, part), name) for part in parts]
        return _described(lambda: values, share)
    return _described(lambda: (_values(_read(checkpoint, name, part), name) for part in parts), share)


def all_statistics(path: str, *, bytes_max: int) -> dict[str, Any]:
    """Return `statistics_of` by name for tensors of up to ``bytes_max`` in all, the small ones first.

    Those whose elements are no numbers are left out.
    """
    source = source_of(open_checkpoint(path))
    stored = source.tensors
    found: dict[str, Any] = {}
    group: list[str] = []
    read = held = 0
    for name in sorted(stored, key=lambda name: (_nbytes(stored[name]), name)):
        read += _nbytes(stored[name])
        if read > bytes_max:
            break
        if held + _nbytes(stored[name]) > PART_BYTES:
            found |= _of_group(source, group)
            group, held = [], 0
        if _nbytes(stored[name]) > PART_BYTES:
            with contextlib.suppress(ConfigError):
                found[name] = statistics_of(path, name)
        else:
            group.append(name)
            held += _nbytes(stored[name])
    return found | _of_group(source, group)


def _of_group(source: CheckpointSource, names: list[str]) -> dict[str, Any]:
    """Describe small tensors, read together: what a read costs is files and threads, not bytes."""
    read = read_boxes(source, [(name, whole(source.tensors[name].shape)) for name in names]) if names else ()
    values = {name: values_of(tensor) for name, tensor in zip(names, read, strict=True)}
    return {name: _described(partial(list, [array]), 1.0) for name, array in values.items() if array is not None}


def difference_of(path: str, other: str, name: str, *, bytes_max: int = READ_BYTES_MAX) -> dict[str, Any]:
    """Return how tensor ``name`` of ``other`` differs from that of ``path``: absolute, relative, direction, share.

    As ``holdfast diff`` does, it compares bits. Raises `ConfigError` where the shapes differ, and as `statistics_of`.
    """
    first, second = open_checkpoint(path), open_checkpoint(other)
    one, two = _stored(first, name), _stored(second, name)
    if one.shape != two.shape:
        raise ConfigError(f"{name} has shape {list(one.shape)} there, and {list(two.shape)}: nothing to compare")
    sums = DifferenceSums()
    parts, share = _parts(one, bytes_max)
    for part in parts:
        sums.add(*(_read(checkpoint, name, part) for checkpoint in (first, second)))
    return {
        "max_abs": sums.max_abs,
        "relative": sums.relative if math.isfinite(sums.relative) else None,
        "cosine": sums.cosine,
        "share_changed": sums.changed / sums.elements if sums.elements else 0.0,
        "share_read": share,
    }


def _stored(checkpoint: Checkpoint, name: str) -> StoredTensor:
    try:
        return source_of(checkpoint).tensors[name]
    except KeyError:
        message = f"{checkpoint.path} has no tensor {name!r}"
        raise CheckpointNotFound(message, path=checkpoint.path, step=checkpoint.step) from None


def _nbytes(tensor: StoredTensor) -> int:
    return whole(tensor.shape).volume * tensor.itemsize


def _parts(tensor: StoredTensor, bytes_max: int) -> tuple[list[Box], float]:
    """Return the parts to read, and which share of the tensor they are."""
    parts = list(row_blocks(whole(tensor.shape), max(1, PART_BYTES // ITEMSIZE[tensor.dtype])))
    most = max(1, bytes_max // PART_BYTES)
    stride = math.ceil(len(parts) / most)
    chosen = parts[::stride]
    volume = max(1, whole(tensor.shape).volume)
    return chosen, sum(part.volume for part in chosen) / volume if volume > 1 else 1.0


def _read(checkpoint: Checkpoint, name: str, part: Box) -> torch.Tensor:
    index = tuple(slice(start, stop) for start, stop in zip(part.offsets, part.stops, strict=True))
    return checkpoint.read(name, index)


def _values(tensor: torch.Tensor, name: str) -> Values:
    """Return the elements. Raises `ConfigError` where they are no numbers."""
    found = values_of(tensor)
    if found is None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(f"{name} has dtype {dtype}: no statistics; `holdfast cat` prints its bytes")
    return found


def _described(read: Callable[[], Iterable[Values]], share: float) -> dict[str, Any]:
    """Describe the values that ``read`` gives, part by part, each time it is called: once, and for the bins again."""
    moments = ValueSums()
    for values in read():
        moments.add(values)
    found = {**_document(moments), "share_read": share, "histogram": None}
    if moments.count:
        # One value, or two that float64 can't tell apart by 64 bins, has one bin of some width around it.
        half = max(abs(moments.least), 1.0) / 2 if moments.least == moments.most else 0.0
        low, high = moments.least - half, moments.most + half
        counts = np.zeros(BINS, dtype=np.int64)
        for values in read():
            counts += np.histogram(values[np.isfinite(values)], BINS, (low, high))[0]
        found["histogram"] = {"low": low, "high": high, "counts": counts.tolist()}
    return found


def _document(sums: ValueSums) -> dict[str, Any]:
    std, norm, none = sums.std, sums.norm, not sums.count
    return {
        "elements": sums.elements,
        "nan": sums.nans,
        "inf": sums.infinite,
        "zeros": sums.zeros,
        "mean": None if none or not math.isfinite(sums.mean) else sums.mean,
        "std": None if none or not math.isfinite(std) else std,
        "norm": norm if math.isfinite(norm) else None,
        "min": None if none else sums.least,
        "max": None if none else sums.most,
    }
