"""The sharing plan: which rank reads what several ranks want, and to whom it goes from there.

Ranks want runs of extents (1 MiB) of files. What one rank wants alone it reads for itself, and the plan says nothing of
it. What several want is cut into units of one to eight extents; one of those who want a unit, its owner, reads it for
all of them. All ranks go through their units in the order of the plan, which is the order of the files: a rank that has
done all before a unit can take that unit, so bounded windows can't lead into a deadlock.

Guarantees: pure and deterministic; every wanted extent is read by exactly one rank, unless ranks differ so much that
saying who wants what would take more than `MEMBERS_MAX` entries: the rest is left to each rank. Owners are chosen so
that all ranks read about the same number of bytes, what they read for themselves included. Ranks that want the same are
one class, and cost no more than one rank; time grows with classes times runs.
Does not: know bytes or connections, or whether sharing pays (`SharingPlan.saved_bytes` says what is not read twice).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from holdfast.format.manifest import EXTENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

UNIT_EXTENTS_MAX: Final = 8
UNITS_PER_RANK: Final = 16
"""Smaller units where ranks would have fewer: they balance better, and more ranks read at a time."""
MEMBERS_MAX: Final = 4 << 20
"""Limit of what the sets of ranks have members in all: some 40 MiB."""


class ExtentRun(NamedTuple):
    """Extents ``first`` up to ``stop`` of file ``file`` (its number)."""

    file: int
    first: int
    stop: int


class SharedUnit(NamedTuple):
    """A run that ``owner`` reads for all of ``sets[wanted_by]``; ``number`` is its place in the order of the plan."""

    number: int
    run: ExtentRun
    owner: int
    wanted_by: int


@dataclass(frozen=True)
class SharingPlan:
    """Units in order; ``sets``: the classes that a set has; ``classes``: the ranks of a class, sorted.

    ``of_rank``: the class of each rank. ``read_bytes``: bytes that each rank reads, what it wants alone included.
    """

    units: tuple[SharedUnit, ...]
    sets: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[int, ...], ...]
    of_rank: tuple[int, ...]
    read_bytes: tuple[int, ...]
    unique_bytes: int
    wanted_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that need not be read because another rank has."""
        return self.wanted_bytes - sum(self.read_bytes)

    def ranks_of(self, wanted_by: int) -> tuple[int, ...]:
        """Return the ranks of a set, sorted."""
        return tuple(sorted(rank for number in self.sets[wanted_by] for rank in self.classes[number]))

    def units_of(self, number: int) -> list[SharedUnit]:
        """Return the units that the ranks of class ``number`` read or receive, in order."""
        return [self.units[at] for at in self._by_class.get(number, ())]

    @cached_property
    def _by_class(self) -> Mapping[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for at, unit in enumerate(self.units):
            for number in self.sets[unit.wanted_by]:
                found[number].append(at)
        return found


def merged_runs(spans: Iterable[tuple[int, int, int]]) -> tuple[ExtentRun, ...]:
    """Return the extents that byte ranges (file, start, end) touch, as sorted runs without overlap."""
    runs: list[ExtentRun] = []
    for file, first, stop in sorted(
        {(file, start // EXTENT_BYTES, -(-end // EXTENT_BYTES)) for file, start, end in spans if end > start}
    ):
        if runs and runs[-1].file == file and first <= runs[-1].stop:
            if stop > runs[-1].stop:
                runs[-1] = ExtentRun(file, runs[-1].first, stop)
        else:
            runs.append(ExtentRun(file, first, stop))
    return tuple(runs)


def plan_sharing(wants: Sequence[tuple[ExtentRun, ...]], sizes: Sequence[int]) -> SharingPlan:
    """Plan the reading of what each rank ``wants`` (as from `merged_runs`) of files of ``sizes`` bytes."""
    numbers: dict[tuple[ExtentRun, ...], int] = {}
    of_rank = tuple(numbers.setdefault(runs, len(numbers)) for runs in wants)
    members: list[list[int]] = [[] for _ in numbers]
    for rank, number in enumerate(of_rank):
        members[number].append(rank)
    segments = _segments(list(numbers), [len(ranks) for ranks in members], sizes)
    read_bytes = [segments.alone[number] for number in of_rank]
    units, wanted_by = _units(segments, sizes, sum(map(len, members)))
    owners = _Owners(members, segments.sets, read_bytes)
    owned = [0] * len(units)
    # Few may read what few want: what many want comes last, and levels the rest.
    sharers = [sum(len(members[number]) for number in chosen) for chosen in segments.sets]
    for at in sorted(range(len(units)), key=lambda at: sharers[wanted_by[at]]):
        owned[at] = owners.take(wanted_by[at], _nbytes(units[at], sizes))
    return SharingPlan(
        tuple(SharedUnit(at, units[at], owned[at], wanted_by[at]) for at in range(len(units))),
        tuple(segments.sets),
        tuple(map(tuple, members)),
        of_rank,
        tuple(owners.loads),
        segments.unique_bytes,
        sum(
            sum(_nbytes(run, sizes) for run in runs) * len(ranks) for runs, ranks in zip(numbers, members, strict=True)
        ),
    )


def _nbytes(run: ExtentRun, sizes: Sequence[int]) -> int:
    return min(run.stop * EXTENT_BYTES, sizes[run.file]) - run.first * EXTENT_BYTES


@dataclass(slots=True)
class _Segments:
    """Runs of which all extents are wanted by the same set of classes, and what is not shared."""

    shared: list[tuple[ExtentRun, int]]
    """With the number of the set."""
    sets: list[tuple[int, ...]]
    alone: list[int]
    """Bytes that each rank of a class reads for itself."""
    unique_bytes: int


def _segments(wants: Sequence[tuple[ExtentRun, ...]], counts: Sequence[int], sizes: Sequence[int]) -> _Segments:
    found = _Segments([], [], [0] * len(wants), 0)
    known: dict[int, int | None] = {}
    members_left = MEMBERS_MAX
    present: set[int] = set()
    # The sum of the numbers' hashes stands for the set: it need not be looked at as a whole to be known again.
    mark = 0
    for file, at, stop, arriving, leaving in _cuts(wants):
        for number in leaving:
            present.remove(number)
            mark -= _mark(number)
        for number in arriving:
            present.add(number)
            mark += _mark(number)
        if not present:
            continue
        run = ExtentRun(file, at, stop)
        nbytes = _nbytes(run, sizes)
        found.unique_bytes += nbytes
        chosen = known.get(mark, -1)
        if chosen == -1:
            chosen = None
            is_shared = len(present) > 1 or counts[next(iter(present))] > 1
            if is_shared and len(present) <= members_left:
                members_left -= len(present)
                chosen = len(found.sets)
                found.sets.append(tuple(sorted(present)))
            known[mark] = chosen
        if chosen is None:
            for number in present:
                found.alone[number] += nbytes
        else:
            found.shared.append((run, chosen))
    return found


def _mark(number: int) -> int:
    """Return a number of 128 bits that looks random, the same in every process."""
    value = (number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835
    value ^= (value >> 64) * 0xD1B54A32D192ED03
    return (value * 0xBF58476D1CE4E5B994D049BB133111EB) & ((1 << 128) - 1)


def _cuts(wants: Sequence[tuple[ExtentRun, ...]]) -> Iterator[tuple[int, int, int, list[int], list[int]]]:
    """Yield (file, first, stop, classes that begin to want, classes that cease to) for every place where any does."""
    events = [
        (run.file, at, number, arrives)
        for number, runs in enumerate(wants)
        for run in runs
        for at, arrives in ((run.first, True), (run.stop, False))
    ]
    events.sort(key=itemgetter(0, 1))
    start = 0
    while start < len(events):
        file, at = events[start][:2]
        arriving: list[int] = []
        leaving: list[int] = []
        end = start
        while end < len(events) and events[end][0] == file and events[end][1] == at:
            (arriving if events[end][3] else leaving).append(events[end][2])
            end += 1
        stop = events[end][1] if end < len(events) and events[end][0] == file else at
        yield file, at, stop, arriving, leaving
        start = end


def _units(segments: _Segments, sizes: Sequence[int], world: int) -> tuple[list[ExtentRun], list[int]]:
    """Cut segments into units; returns them in order, and the set of each."""
    shared = sum(_nbytes(run, sizes) for run, _ in segments.shared)
    extents = max(1, min(UNIT_EXTENTS_MAX, shared // EXTENT_BYTES // max(1, world * UNITS_PER_RANK)))
    step = 1 << (extents.bit_length() - 1)
    units: list[ExtentRun] = []
    wanted_by: list[int] = []
    for run, chosen in segments.shared:
        # At multiples of the step, as reads are cut elsewhere.
        inner = range((run.first // step + 1) * step, run.stop, step)
        for first, stop in zip((run.first, *inner), (*inner, run.stop), strict=True):
            units.append(ExtentRun(run.file, first, stop))
            wanted_by.append(chosen)
    return units, wanted_by


class _Owners:
    """Chooses owners: of those who want a unit, the rank that reads the least so far.

    Each class has a heap of its ranks, each set one of its classes, by what their least loaded rank had when they were
    put there: an entry that is out of date is renewed when it comes to the top, for loads only grow.
    """

    def __init__(self, members: Sequence[Sequence[int]], sets: Sequence[tuple[int, ...]], loads: Sequence[int]) -> None:
        self.loads = list(loads)
        self._classes = [[(self.loads[rank], rank) for rank in ranks] for ranks in members]
        self._sets = [[(self._classes[number][0], number) for number in chosen] for chosen in sets]
        for ranks in self._classes:
            heapq.heapify(ranks)
        for heap in self._sets:
            heapq.heapify(heap)

    def take(self, chosen: int, nbytes: int) -> int:
        """Return the owner of a unit of ``nbytes`` that the set ``chosen`` wants."""
        heap = self._sets[chosen]
        while heap[0][0] != self._classes[heap[0][1]][0]:
            number = heap[0][1]
            heapq.heapreplace(heap, (self._classes[number][0], number))
        ranks = self._classes[heap[0][1]]
        load, rank = ranks[0]
        self.loads[rank] = load + nbytes
        heapq.heapreplace(ranks, (load + nbytes, rank))
        return rank


def bounds(runs: Iterable[int]) -> list[int]:
    """Return the running sums of ``runs``: undoes `deltas`."""
    return list(accumulate(runs))


def deltas(values: Sequence[int]) -> list[int]:
    """Return the differences of neighbours, which are small numbers where ``values`` are in order."""
    return [value - before for value, before in zip(values, (0, *values), strict=False)]
