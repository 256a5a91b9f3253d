"""Loop nests over two memories: joined, cut into small parts, and as views of tensors. See `rank_plan.Copy`.

Guarantees: the parts of a nest are the nest, in its order. Nothing is copied but where a source is walked backwards.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

SERIAL_ELEMENTS: Final = (32 << 10) - 64
"""As many as torch works on without a team of threads, which it would call for 32,768."""

Nest = tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]]
"""Counts; first element and strides in the source; first element and strides in the target."""


def typed(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements of ``dtype``."""
    if dtype == torch.uint8:
        return memory
    # Whole elements of it: a bucket, or a memory of an odd number of bytes, may end within one.
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def strided(source: torch.Tensor, counts: tuple[int, ...], steps: tuple[int, ...], at: int) -> torch.Tensor:
    """What one side of a nest walks through, from element ``at`` on."""
    if any(step < 0 for step in steps):  # which torch doesn't know
        at += sum((count - 1) * step for count, step in zip(counts, steps, strict=True) if step < 0)
        forward = source.as_strided(counts, tuple(map(abs, steps)), source.storage_offset() + at)
        return forward.flip([dim for dim, step in enumerate(steps) if step < 0])
    return source.as_strided(counts, steps, source.storage_offset() + at)


def joined(nest: Nest) -> Nest:
    """The same nest in as few loops as may be."""
    counts, source_at, source_steps, target_at, target_steps = nest
    loops: list[tuple[int, int, int]] = []
    for count, source, target in zip(counts, source_steps, target_steps, strict=True):
        if count == 1:
            continue
        if loops and loops[-1][1:] == (count * source, count * target):
            loops[-1] = (loops[-1][0] * count, source, target)
        else:
            loops.append((count, source, target))
    if not loops:
        return (), source_at, (), target_at, ()
    counts, source_steps, target_steps = zip(*loops, strict=True)
    return counts, source_at, source_steps, target_at, target_steps


def cut(nest: Nest, most: int = SERIAL_ELEMENTS) -> Iterator[Nest]:
    """``nest`` in parts of at most ``most`` elements, which are as large as that allows."""
    counts, source_at, source_steps, target_at, target_steps = nest
    inner = 1
    level = len(counts)
    while level and inner * counts[level - 1] <= most:
        level -= 1
        inner *= counts[level]
    if level == 0:
        if prod(counts):
            yield nest
        return
    level -= 1  # the loop that is cut; those outside it are run one by one
    chunk = most // inner
    for turns in product(*map(range, counts[:level])):
        source = source_at + sum(a * b for a, b in zip(turns, source_steps[:level], strict=True))
        target = target_at + sum(a * b for a, b in zip(turns, target_steps[:level], strict=True))
        for start in range(0, counts[level], chunk):
            yield (
                (min(chunk, counts[level] - start), *counts[level + 1 :]),
                source + start * source_steps[level],
                source_steps[level:],
                target + start * target_steps[level],
                target_steps[level:],
            )
