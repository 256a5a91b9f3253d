"""Compute what a tensor's values are like, and how those of two steps differ, reading by parts. Imports torch.

numpy describes: on a host whose cores a job has, torch's threads wait for one another at every small tensor.
Differences are those of `DifferenceSums`, which ``holdfast diff`` prints.

Guarantees: at most `PART_BYTES` of each tensor are in memory at a time; what is read was verified. Of a tensor larger
than `READ_BYTES_MAX` evenly spread parts are read, and the result says which share.
Assumes: values fit into float64 well enough; complex ones are described by their magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

from holdfast.boxes import row_blocks, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.loader.checkpoint import open_checkpoint, source_of
from holdfast.loader.comparison import DifferenceSums
from holdfast.loader.read import read_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.boxes import Box
    from holdfast.loader.checkpoint import Checkpoint
    from holdfast.loader.sources.holdfast import CheckpointSource
    from holdfast.plan.read import StoredTensor

_Values: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
PART_BYTES: Final = 16 << 20
READ_BYTES_MAX: Final = 4 << 30
BINS: Final = 64


def statistics_of(path: str, name: str, *, bytes_max: int = READ_BYTES_MAX) -> dict[str, Any]:
    """Return moments, extremes, counts of what isn't finite, and a histogram of tensor ``name``, as JSON has them.

    Raises `CheckpointNotFound` for an unknown name, and as `Checkpoint.read`.
    """
    checkpoint = open_checkpoint(path)
    parts, share = _parts(_stored(checkpoint, name), bytes_max)
    if len(parts) == 1:
        values = [_plain(_read(checkpoint, name, part)) for part in parts]
        return _described(lambda: values, share)
    return _described(lambda: (_plain(_read(checkpoint, name, part)) for part in parts), share)


def all_statistics(path: str, *, bytes_max: int) -> dict[str, Any]:
    """Return `statistics_of` by name for tensors of up to ``bytes_max`` in all, the small ones first."""
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
            found[name] = statistics_of(path, name)
        else:
            group.append(name)
            held += _nbytes(stored[name])
    return found | _of_group(source, group)


def _of_group(source: CheckpointSource, names: list[str]) -> dict[str, Any]:
    """Describe small tensors, read together: what a read costs is files and threads, not bytes."""
    read = read_boxes(source, [(name, whole(source.tensors[name].shape)) for name in names]) if names else ()
    values = {name: _plain(tensor) for name, tensor in zip(names, read, strict=True)}
    return {name: _described(partial(list, [array]), 1.0) for name, array in values.items()}


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


def _plain(values: torch.Tensor) -> _Values:
    flat = values.reshape(-1)
    found: _Values = (flat.abs() if flat.is_complex() else flat).to(torch.float64).numpy()
    return found


def _described(read: Callable[[], Iterable[_Values]], share: float) -> dict[str, Any]:
    """Describe the values that ``read`` gives, part by part, each time it is called: once, and for the bins again."""
    moments = _ValueSums()
    for values in read():
        moments.add(values)
    found = {**moments.document(), "share_read": share, "histogram": None}
    if moments.count:
        # One value, or two that float64 can't tell apart by 64 bins, has one bin of some width around it.
        half = max(abs(moments.least), 1.0) / 2 if moments.least == moments.most else 0.0
        low, high = moments.least - half, moments.most + half
        counts = np.zeros(BINS, dtype=np.int64)
        for values in read():
            counts += np.histogram(values[np.isfinite(values)], BINS, (low, high))[0]
        found["histogram"] = {"low": low, "high": high, "counts": counts.tolist()}
    return found


@dataclass(slots=True)
class _ValueSums:
    """Counts of all values seen, and sums over the finite ones."""

    elements: int = 0
    nans: int = 0
    infinite: int = 0
    zeros: int = 0
    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, values: _Values) -> None:
        finite = np.isfinite(values)
        nans = int(np.isnan(values).sum())
        self.elements += values.size
        self.nans += nans
        self.infinite += values.size - int(finite.sum()) - nans
        values = values[finite]
        if not values.size:
            return
        self.count += values.size
        self.zeros += int((values == 0).sum())
        self.total += float(values.sum())
        self.squares += float(np.dot(values, values))
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    def document(self) -> dict[str, Any]:
        mean = self.total / self.count if self.count else None
        variance = max(0.0, self.squares / self.count - mean * mean) if mean is not None else None
        return {
            "elements": self.elements,
            "nan": self.nans,
            "inf": self.infinite,
            "zeros": self.zeros,
            "mean": mean,
            "std": None if variance is None or not math.isfinite(variance) else math.sqrt(variance),
            "norm": math.sqrt(self.squares) if math.isfinite(self.squares) else None,
            "min": self.least if self.count else None,
            "max": self.most if self.count else None,
        }
