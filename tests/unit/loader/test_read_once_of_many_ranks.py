"""Agreeing at 16,384 ranks on who reads what: rank 0's plan as it goes over the board, and what ranks make of it."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec

from holdfast.coordination.round import pack
from holdfast.loader import read_once
from holdfast.loader.read_once import ReadOnce, SharingOffer
from holdfast.loader.shared_reads import UNIT_BYTES_MAX
from holdfast.plan.sharing import ExtentRun, deltas

MIB = 1 << 20
WORLD = 16_384
SHARDS = 128
"""HSDP: as many replicas of each shard."""
SHARD = 1024
"""Extents of a shard."""


class KeptBoard:
    """What ranks tell one another, in a dict."""

    def __init__(self) -> None:
        self.told: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.told[key] = value

    def get(self, key: str, **_: Any) -> bytes:
        return self.told[key]


def part_of(board: KeptBoard, rank: int, offer: SharingOffer) -> ReadOnce:
    group: Any = SimpleNamespace(rank=rank, world=WORLD, board=board, store=None, prefix="")
    return ReadOnce(group, offer, timeout_s=60.0)


def wanted(rank: int) -> tuple[ExtentRun, ...]:
    """A shard, and a run that all ranks want."""
    return ExtentRun(rank % SHARDS, 0, SHARD), ExtentRun(SHARDS, 0, 64)


def word(rank: int) -> bytes:
    flat = [number for column in zip(*wanted(rank), strict=True) for number in deltas(column)]
    return pack(msgspec.msgpack.encode(read_once._Wants(f"host-{rank // 8}", "the same", flat)))


def test_every_byte_is_planned_to_be_read_once(figures: list[str]) -> None:
    board, offer = KeptBoard(), SharingOffer("once/0", "store")
    sizes = [SHARD * MIB] * SHARDS + [64 * MIB]
    words = [word(rank) for rank in range(WORLD)]
    assert max(map(len, words)) < 1024
    began = time.monotonic()
    verdict = part_of(board, 0, offer)._decide(words, sizes)
    took_s = time.monotonic() - began
    assert not verdict.alone
    assert verdict.unique_bytes == sum(sizes)
    ratio = verdict.planned_bytes / verdict.unique_bytes
    figures.append(f"planned at {WORLD:,} ranks: bytes read / unique bytes = {ratio} ({took_s:.1f} s on rank 0)")
    assert ratio == 1.0
    assert took_s < 60.0  # some seconds on an idle machine
    assert len(board.told) == SHARDS  # a part for each class of ranks that want the same, not for each rank
    assert max(map(len, board.told.values())) < MIB
    for shard in (0, SHARDS - 1):  # as its ranks see it
        check_shard(board, offer, shard)


def check_shard(board: KeptBoard, offer: SharingOffer, shard: int) -> None:
    """Each extent of the shard has one owner among its ranks, which all agree; each other one gets it from there."""
    ranks = range(shard, WORLD, SHARDS)
    owned: Counter[tuple[int, int]] = Counter()
    seen = set()
    for rank in ranks:
        units = part_of(board, rank, offer)._units(read_once._digest(wanted(rank)))
        assert {(unit.run.file, at) for unit in units for at in range(unit.run.first, unit.run.stop)} == {
            (run.file, at) for run in wanted(rank) for at in range(run.first, run.stop)
        }
        assert all((unit.run.stop - unit.run.first) * MIB <= UNIT_BYTES_MAX for unit in units)
        seen.add(tuple((unit.number, unit.run, unit.owner) for unit in units))
        for unit in units:
            if unit.owner == rank:
                others = ranks if unit.run.file == shard else range(WORLD)
                assert unit.peers == tuple(peer for peer in others if peer != rank)
                owned.update((unit.run.file, at) for at in range(unit.run.first, unit.run.stop))
            else:
                assert unit.peers == ()
    assert len(seen) == 1
    assert [owned[shard, at] for at in range(SHARD)] == [1] * SHARD
    assert all(count == 1 for count in owned.values())
