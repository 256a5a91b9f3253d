"""Who reads what for whom: every wanted extent once, evenly, and for many ranks quickly."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence

import pytest

from holdfast.plan import sharing
from holdfast.plan.sharing import ExtentRun, SharingPlan, bounds, deltas, merged_runs, plan_sharing

MIB = 1 << 20
Wants = list[tuple[ExtentRun, ...]]
MANY = 16_384


def extents_of(runs: Sequence[ExtentRun]) -> set[tuple[int, int]]:
    return {(run.file, at) for run in runs for at in range(run.first, run.stop)}


def bytes_of(extents: set[tuple[int, int]], sizes: Sequence[int]) -> int:
    return sum(min((at + 1) * MIB, sizes[file]) - at * MIB for file, at in extents)


def check_plan(plan: SharingPlan, wants: Wants, sizes: Sequence[int]) -> None:
    """By looking at each extent of each rank."""
    wanted = [extents_of(runs) for runs in wants]
    unique = set().union(*wanted)
    assert plan.unique_bytes == bytes_of(unique, sizes) == sum(plan.read_bytes)
    assert plan.wanted_bytes == sum(bytes_of(mine, sizes) for mine in wanted)
    assert plan.saved_bytes == plan.wanted_bytes - plan.unique_bytes
    assert [unit.number for unit in plan.units] == list(range(len(plan.units)))
    assert [unit.run for unit in plan.units] == sorted(unit.run for unit in plan.units)
    got: list[set[tuple[int, int]]] = [set() for _ in wants]
    read = [0] * len(wants)
    for unit in plan.units:
        extents = extents_of([unit.run])
        assert 0 < len(extents) <= sharing.UNIT_EXTENTS_MAX
        ranks = plan.ranks_of(unit.wanted_by)
        assert unit.owner in ranks
        assert len(ranks) > 1
        read[unit.owner] += bytes_of(extents, sizes)
        for rank in ranks:
            assert not extents & got[rank]
            got[rank] |= extents
    for rank, mine in enumerate(wanted):
        assert got[rank] <= mine
        alone = mine - got[rank]
        assert not any(alone & wanted[other] for other in range(len(wants)) if other != rank)
        assert plan.read_bytes[rank] == read[rank] + bytes_of(alone, sizes)
        number = plan.of_rank[rank]
        assert rank in plan.classes[number]
        assert [unit for unit in plan.units if rank in plan.ranks_of(unit.wanted_by)] == plan.units_of(number)


def test_extents_of_byte_ranges() -> None:
    assert merged_runs([]) == ()
    assert merged_runs([(0, 5, 5)]) == ()
    spans = [(1, 0, 1), (0, MIB - 1, MIB + 1), (0, 2 * MIB, 3 * MIB), (0, 9 * MIB, 9 * MIB + 1), (0, 0, 1)]
    assert merged_runs(spans) == (ExtentRun(0, 0, 3), ExtentRun(0, 9, 10), ExtentRun(1, 0, 1))


def test_deltas_are_undone() -> None:
    values = [4, 4, 7, 2, 1000]
    assert deltas(values) == [4, 0, 3, -5, 998]
    assert bounds(deltas(values)) == values
    assert bounds(deltas([])) == []


def test_replicas_read_equal_parts() -> None:
    sizes = [100 * MIB + 7]
    wants: Wants = [(ExtentRun(0, 0, 101),)] * 4
    plan = plan_sharing(wants, sizes)
    check_plan(plan, wants, sizes)
    assert plan.classes == ((0, 1, 2, 3),)
    assert max(plan.read_bytes) - min(plan.read_bytes) <= MIB
    # One after the other: all read at the same time.
    assert [unit.owner for unit in plan.units[:4]] == [0, 1, 2, 3]


def test_what_one_rank_wants_is_not_in_the_plan() -> None:
    sizes = [64 * MIB] * 2
    wants: Wants = [(ExtentRun(0, 0, 32),), (ExtentRun(0, 32, 64), ExtentRun(1, 0, 3)), ()]
    plan = plan_sharing(wants, sizes)
    check_plan(plan, wants, sizes)
    assert plan.units == ()
    assert plan.saved_bytes == 0


def test_who_reads_much_alone_reads_little_for_others() -> None:
    sizes = [64 * MIB, 64 * MIB]
    wants: Wants = [(ExtentRun(0, 0, 48), ExtentRun(1, 0, 64)), (ExtentRun(1, 0, 64),)]
    plan = plan_sharing(wants, sizes)
    check_plan(plan, wants, sizes)
    assert max(plan.read_bytes) - min(plan.read_bytes) <= 8 * MIB


@pytest.mark.parametrize("seed", range(30))
def test_any_wants(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randrange(1, 40 * MIB) for _ in range(chance.randrange(1, 5))]
    wants: Wants = []
    for _ in range(chance.randrange(1, 9)):
        spans = []
        for _ in range(chance.randrange(0, 6)):
            file = chance.randrange(len(sizes))
            start = chance.randrange(sizes[file])
            spans.append((file, start, chance.randrange(start, sizes[file]) + 1))
        wants.append(merged_runs(spans) if chance.random() < 0.7 or not wants else chance.choice(wants))
    plan = plan_sharing(wants, sizes)
    check_plan(plan, wants, sizes)
    assert plan_sharing(wants, sizes) == plan


def test_ranks_too_different_to_be_told_apart_read_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MEMBERS_MAX", 3)
    sizes = [16 * MIB]
    wants: Wants = [(ExtentRun(0, 0, 8 + at),) for at in range(4)]
    plan = plan_sharing(wants, sizes)
    assert sum(plan.read_bytes) > plan.unique_bytes
    assert all(len(plan.ranks_of(unit.wanted_by)) <= 3 for unit in plan.units)


def everything() -> tuple[Wants, list[int]]:
    """Replicas of 64 GiB."""
    return [tuple(ExtentRun(file, 0, 1024) for file in range(64))] * MANY, [1024 * MIB] * 64


def replicated_shards() -> tuple[Wants, list[int]]:
    """HSDP, 128 times 128: 1 TiB."""
    return [(ExtentRun(rank % 128, 0, 8192),) for rank in range(MANY)], [8192 * MIB - 5] * 128


def shards_and_norms() -> tuple[Wants, list[int]]:
    """FSDP: each rank has its own 16 MiB, shares an extent with its neighbour, and small tensors with all."""
    sizes = [MANY * 16 * MIB + 4096]
    wants = []
    for rank in range(MANY):
        start = rank * 16 * MIB
        norms = [(0, at * 4096 * MIB, at * 4096 * MIB + 4 * MIB) for at in range(16)]
        wants.append(merged_runs([*norms, (0, start + 4096, start + 16 * MIB + 4096)]))
    return wants, sizes


def resharded() -> tuple[Wants, list[int]]:
    """Tensors of 4 GiB cut so finely that four ranks need one extent."""
    step = 4096 * MIB // MANY
    spans = [[(0, at * 4096 * MIB + rank * step, at * 4096 * MIB + (rank + 1) * step) for at in range(32)]
             for rank in range(MANY)]  # fmt: skip
    return [merged_runs(of_rank) for of_rank in spans], [32 * 4096 * MIB]


@pytest.mark.parametrize("made", [everything, replicated_shards, shards_and_norms, resharded])
def test_many_ranks(made: object, figures: list[str]) -> None:
    assert callable(made)
    wants, sizes = made()
    assert len(wants) == MANY
    began = time.monotonic()
    plan = plan_sharing(wants, sizes)
    took = time.monotonic() - began
    mean = sum(plan.read_bytes) / MANY
    ratio = sum(plan.read_bytes) / plan.unique_bytes
    figures.append(
        f"{made.__name__}: planned at {MANY:,} ranks, bytes read / unique bytes = {ratio}, {len(plan.units)} units, "
        f"most read {max(plan.read_bytes) / mean:.3f} of the mean, {took:.1f} s"
    )
    assert ratio == 1.0
    assert 0.9 * mean <= min(plan.read_bytes)
    assert max(plan.read_bytes) <= 1.1 * mean
    assert took < 60.0  # some 2 s on an idle machine


@pytest.mark.slow
def test_memory_of_a_plan_for_many_ranks() -> None:
    wants, sizes = replicated_shards()
    tracemalloc.start()
    try:
        plan_sharing(wants, sizes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"{peak >> 20} MiB at most")
    assert peak < 512 << 20
