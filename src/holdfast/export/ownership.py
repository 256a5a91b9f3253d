"""Which rank owns which 1 MiB block of a file that several ranks hold bytes of. Pure and torch-free.

A block goes to the rank that holds most of its bytes, so that what a rank alone holds never travels. Where several hold
(nearly) as much, as replicas do and the columns of a matrix that is cut lengthwise, they share the blocks evenly, in
runs that are as long as evenness allows. Blocks that nobody holds anything of are shared by all.

Guarantees: every block has exactly one owner; equal arguments give equal answers. Cost grows with the number of spans
and of blocks at which one begins or ends, not with the number of blocks.
Does not: know what the bytes are (``export.plan`` does).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BLOCK_BYTES: Final = 1 << 20
_NEARLY: Final = (3, 4)
"""Whoever holds at least this part of what the fullest rank holds may own the block as well: 34, 34 and 32 columns of
a hundred are shared by three ranks, not by two."""
_GRAINS: Final = 32
"""Runs that are to be shared aren't cut finer than into this part of a rank's share: each cut is more to send."""


class Span(NamedTuple):
    """``nbytes`` bytes, spread evenly over ``start`` to ``stop`` of a file, that each of ``ranks`` holds."""

    start: int
    stop: int
    nbytes: int
    ranks: tuple[int, ...]


class Run(NamedTuple):
    """Consecutive blocks of one file that any of ``ranks`` may own."""

    file: int
    first: int
    blocks: int
    ranks: tuple[int, ...]


class Owned(NamedTuple):
    """Consecutive blocks of one file that ``owner`` alone writes; as long as they can be."""

    file: int
    first: int
    blocks: int
    owner: int


def share_blocks(
    files: Sequence[tuple[int, Iterable[Span]]], world: int, block_bytes: int = BLOCK_BYTES
) -> list[Owned]:
    """Give every block of every file (size in bytes, who holds what of it) to one of ``world`` ranks, in order."""
    everyone = tuple(range(world))
    runs = [
        run for number, (size, spans) in enumerate(files) for run in _runs(number, size, spans, everyone, block_bytes)
    ]
    loads = [0] * world
    shared: list[Run] = []
    owned: list[Owned] = []
    for run in runs:
        if len(run.ranks) == 1:
            loads[run.ranks[0]] += run.blocks
            owned.append(Owned(run.file, run.first, run.blocks, run.ranks[0]))
        else:
            shared.append(run)
    grain = max(1, sum(run.blocks for run in runs) // (world * _GRAINS))
    for run in sorted(shared, key=lambda run: (-run.blocks, run.file, run.first)):
        first = run.first
        for rank, count in _fill_up(run.blocks, run.ranks, loads, grain):
            loads[rank] += count
            owned.append(Owned(run.file, first, count, rank))
            first += count
    owned.sort()
    return _joined(owned)


def _joined(owned: Iterable[Owned]) -> list[Owned]:
    joined: list[Owned] = []
    for item in owned:
        last = joined[-1] if joined else None
        if last is not None and last.owner == item.owner and (last.file, last.first + last.blocks) == item[:2]:
            joined[-1] = last._replace(blocks=last.blocks + item.blocks)
        else:
            joined.append(item)
    return joined


def _fill_up(count: int, ranks: Sequence[int], loads: Sequence[int], grain: int) -> list[tuple[int, int]]:
    """Share out ``count`` blocks so that loads come as near to one another as they can: (rank, blocks), ranks rising.

    Only as many ranks take part as get ``grain`` blocks each, the least loaded ones.
    """
    parts = max(1, min(len(ranks), count // grain))
    if parts == 1:
        return [(min(ranks, key=lambda rank: (loads[rank], rank)), count)]
    lowest = sorted(ranks, key=lambda rank: (loads[rank], rank))[:parts]
    used = 0
    room = 0  # blocks that lift the first `used` ranks to the level of the last of them
    while used < parts:
        more = (loads[lowest[used]] - loads[lowest[used - 1]]) * used if used else 0
        if room + more > count:
            break
        room += more
        used += 1
    each, rest = divmod(count - room, used)
    level = loads[lowest[used - 1]] + each
    shares = [(rank, level - loads[rank] + (place < rest)) for place, rank in enumerate(lowest[:used])]
    return sorted((rank, blocks) for rank, blocks in shares if blocks)


# Who may own a block -------------------------------------------------------------------------------------------


def _runs(file: int, size: int, spans: Iterable[Span], everyone: tuple[int, ...], block_bytes: int) -> list[Run]:
    """The blocks of one file in runs of equal candidates."""
    blocks = -(-size // block_bytes)
    begins: dict[int, list[Span]] = defaultdict(list)
    ends: dict[int, list[Span]] = defaultdict(list)
    edges: dict[int, dict[tuple[int, ...], int]] = {}
    """What spans hold of blocks that they don't fill."""
    for span in spans:
        first, last = -(-span.start // block_bytes), span.stop // block_bytes
        if first < last:
            begins[first].append(span)
            ends[last].append(span)
        for start, stop in _ragged(span, first, last, block_bytes):
            edge = edges.setdefault(start // block_bytes, {})
            held = span.nbytes * (stop - start) // (span.stop - span.start)
            edge[span.ranks] = edge.get(span.ranks, 0) + held
    cuts = sorted({0, blocks, *begins, *ends, *edges, *(block + 1 for block in edges)})
    found: list[Run] = []
    active: dict[tuple[int, ...], int] = {}
    """Bytes of every block, by who holds them."""
    for start, stop in pairwise(cuts):
        for span in ends.get(start, ()):
            left = active[span.ranks] - _per_block(span, block_bytes)
            if left:
                active[span.ranks] = left
            else:
                del active[span.ranks]
        for span in begins.get(start, ()):
            active[span.ranks] = active.get(span.ranks, 0) + _per_block(span, block_bytes)
        ranks = _candidates(active, edges.get(start, {})) or everyone
        if found and found[-1].ranks == ranks:
            found[-1] = found[-1]._replace(blocks=found[-1].blocks + stop - start)
        else:
            found.append(Run(file, start, stop - start, ranks))
    return found


def _per_block(span: Span, block_bytes: int) -> int:
    return max(1, span.nbytes * block_bytes // (span.stop - span.start))


def _ragged(span: Span, first: int, last: int, block_bytes: int) -> list[tuple[int, int]]:
    """The ends of ``span`` that lie in blocks which it doesn't fill; it fills those from ``first`` to ``last``."""
    if first > last:  # within one block
        return [(span.start, span.stop)]
    head = (span.start, min(first * block_bytes, span.stop))
    tail = (max(last * block_bytes, span.start), span.stop)
    return [end for end in (head, tail) if end[0] < end[1]]


def _candidates(whole: Mapping[tuple[int, ...], int], edge: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
    if not edge:
        if not whole:
            return ()
        if len(whole) == 1:
            return next(iter(whole))
    held: dict[int, int] = defaultdict(int)
    for weights in (whole, edge):
        for ranks, nbytes in weights.items():
            for rank in ranks:
                held[rank] += nbytes
    most = max(held.values())
    part, of = _NEARLY
    return tuple(sorted(rank for rank, nbytes in held.items() if nbytes * of >= most * part))
