"""Fills export images and buckets: the copies of a rank plan, made by torch.

Guarantees: an element arrives as ``tensor.to(dtype)`` would make it, bit for bit where the dtype stays. Everything is
done in batches of many copies, each of which gives the interpreter's lock up once. No team of threads is called, which
would wait for the one that training computes with: copies are cut into pieces that torch leaves to the calling thread.
Nothing but small views is allocated, except where a source is walked backwards. Python's work grows with the number of
copies and of pieces of some 20,000 elements.
Assumes: memories are contiguous host memory that doesn't change meanwhile, each as long as the plan says, aligned to
its elements; images and buckets are aligned to 16 bytes.
Does not: decide what to copy (``export.plan``), wait for anyone (``export.exchange``).
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Final

import torch

from holdfast import _torch_compat as compat
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError
from holdfast.export.nest import cut, joined, strided, typed
from holdfast.export.on_demand import OnDemand
from holdfast.export.rank_plan import BUCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from holdfast.export.nest import Nest
    from holdfast.export.rank_plan import Copy, RankPlan
    from holdfast.export.scales import Scales

BATCH_BYTES: Final = 32 << 20
BATCH_PIECES: Final = 1024


def check_memories(plan: RankPlan, memories: Sequence[torch.Tensor]) -> None:
    """Raise `ConfigError` unless ``memories`` are what ``plan.memories`` says, as one-dimensional bytes."""
    if len(memories) != len(plan.memories):
        raise ConfigError(f"{len(memories)} memories for a plan that copies from {len(plan.memories)}")
    if isinstance(memories, OnDemand):
        return  # made of what the plan says, when they are needed
    dtypes = {copy.source: copy.source_dtype for copy in plan.local}
    for turn in plan.rounds:
        dtypes.update({copy.source: copy.source_dtype for message in turn.sends for copy in message.copies})
    for number, (memory, wanted) in enumerate(zip(memories, plan.memories, strict=True)):
        nbytes = prod(wanted.sizes) * ITEMSIZE[dtypes[number]] if number in dtypes else memory.numel()
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.numel() != nbytes:
            raise ConfigError(
                f"rank {plan.rank}: what is staged of {wanted.source!r} is {memory.dtype} {tuple(memory.shape)}, "
                f"expected {nbytes} contiguous bytes: {list(wanted.sizes)} elements of {dtypes.get(number)}",
                field=wanted.source,
            )


def fill_local(
    plan: RankPlan,
    memories: Sequence[torch.Tensor],
    image: torch.Tensor,
    *,
    scales: Scales | None = None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Write all of the image that needs nobody else: headers, and what the rank has itself.

    memories: for each of ``plan.memories`` its bytes. image: ``plan.image_bytes`` of writable host memory (uint8).
    scales: of what is quantized, where anything is (``scales.find_scales``).
    between: called between batches, at least every 32 MiB; what it raises ends the work.
    """
    check_memories(plan, memories)
    if image.dtype != torch.uint8 or image.dim() != 1 or image.numel() < plan.image_bytes:
        raise ConfigError(
            f"rank {plan.rank}: an image of {tuple(image.shape)} {image.dtype}, expected {plan.image_bytes} bytes"
        )
    host = compat.host_memory(image)
    for at, constant in plan.constants:
        host[at : at + len(constant)] = constant
    run_copies(plan.local, memories, image, scales=scales, between=between)


def run_copies(
    copies: Iterable[Copy],
    memories: Sequence[torch.Tensor],
    target: torch.Tensor,
    *,
    bucket: torch.Tensor | None = None,
    scales: Scales | None = None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Make ``copies`` into ``target`` (uint8), from ``memories`` or from ``bucket``."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    nbytes = 0
    made = memories if isinstance(memories, OnDemand) else None
    with torch.no_grad():
        for copy in copies:
            if made is not None and targets and copy.source != BUCKET and not made.is_here(copy.source):
                # What waits to be copied keeps its memory, also of what is dropped for the next.
                compat.foreach_copy_(targets, sources)
                targets, sources, nbytes = [], [], 0
                between()
            memory = bucket if copy.source == BUCKET else memories[copy.source]
            if memory is None:
                raise AssertionError("a copy from a bucket where there is none")
            if copy.scaled is not None:
                if scales is None:
                    raise AssertionError("a copy of what is to be quantized, without scales")
                scales.quantize(copy, memory, target)
                between()
                continue
            for into, out_of in _pieces(copy, memory, target):
                targets.append(into)
                sources.append(out_of)
                nbytes += into.nbytes
                if nbytes >= BATCH_BYTES or len(targets) >= BATCH_PIECES:
                    compat.foreach_copy_(targets, sources)
                    targets, sources, nbytes = [], [], 0
                    between()
        if targets:
            compat.foreach_copy_(targets, sources)


def _pieces(copy: Copy, memory: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The copy as pairs of views, each so small that torch copies it on this thread."""
    if copy.source_dtype == copy.target_dtype:
        width, nest = _in_words(copy)
        source_type = target_type = compat.SAME_SIZE_INT[width]
    else:
        source_type, target_type = getattr(torch, copy.source_dtype), getattr(torch, copy.target_dtype)
        source_at, rest = divmod(copy.source_at, source_type.itemsize)
        target_at, over = divmod(copy.target_at, target_type.itemsize)
        if rest or over:
            raise AssertionError(f"{copy} begins within an element")
        nest = joined((copy.counts, source_at, copy.source_strides, target_at, copy.target_strides))
    source, into = typed(memory, source_type), typed(target, target_type)
    for counts, source_at, source_steps, target_at, target_steps in cut(nest):
        yield (
            into.as_strided(counts, target_steps, into.storage_offset() + target_at),
            strided(source, counts, source_steps, source_at),
        )


# Nests ---------------------------------------------------------------------------------------------------------


def _in_words(copy: Copy) -> tuple[int, Nest]:
    """A copy of bits as one of integers, as wide as rows allow, and how many bytes those have."""
    size = ITEMSIZE[copy.source_dtype]
    counts, _, source_steps, _, target_steps = joined((copy.counts, 0, copy.source_strides, 0, copy.target_strides))
    if not counts or (source_steps[-1], target_steps[-1]) != (1, 1):
        counts, source_steps, target_steps = (*counts, 1), (*source_steps, 1), (*target_steps, 1)
    # From elements to bytes, and from those to the widest words that everything is a multiple of.
    source_bytes = [step * size for step in source_steps[:-1]]
    target_bytes = [step * size for step in target_steps[:-1]]
    row = counts[-1] * size
    width = gcd(8, row, copy.source_at, copy.target_at, *source_bytes, *target_bytes)
    return width, (
        (*counts[:-1], row // width),
        copy.source_at // width,
        (*(step // width for step in source_bytes), 1),
        copy.target_at // width,
        (*(step // width for step in target_bytes), 1),
    )
