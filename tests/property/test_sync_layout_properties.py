"""Random tables and wishes of N publishers and M receivers, carried through buckets and compared with the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_properties import Array, boxes_in, cut, tilings, within

from holdfast.boxes import Box, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.sync.weights.buckets import (
    BUCKET_ALIGN_BYTES,
    BucketPlan,
    Piece,
    PieceBox,
    Wanted,
    plan_buckets,
    select,
)

DTYPES = {"bool": np.uint8, "bfloat16": np.uint16, "float32": np.uint32, "complex64": np.uint64, "complex128": "V16"}
"""What numpy moves the bits of each as."""


@dataclass(frozen=True)
class Case:
    values: dict[str, Array]
    dtypes: dict[str, str]
    tables: list[list[Piece]]
    wishes: list[list[Wanted] | None]
    """Of each receiver."""
    bucket_bytes: int

    def boxes(self, receiver: int) -> list[tuple[str, Box]]:
        wishes = self.wishes[receiver]
        if wishes is None:
            return [(name, whole(value.shape)) for name, value in self.values.items()]
        return [(wish.name, wish.box) for wish in wishes]

    def wanted(self, receiver: int) -> dict[str, Array]:
        """Of every tensor, which elements the receiver wants."""
        masks: dict[str, Array] = {name: np.zeros(value.shape, bool) for name, value in self.values.items()}
        for name, box in self.boxes(receiver):
            masks[name][cut(box)] = True
        return masks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    publishers = draw(st.integers(1, 4))
    tables: list[list[Piece]] = [[] for _ in range(publishers)]
    values: dict[str, Array] = {}
    dtypes: dict[str, str] = {}
    for number in range(draw(st.integers(1, 4))):
        name = f"w{number}"
        shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
        dtype = dtypes[name] = draw(st.sampled_from(sorted(DTYPES)))
        nbytes = prod(shape) * ITEMSIZE[dtype]
        raw = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
        values[name] = raw.view(DTYPES[dtype]).reshape(shape)
        for tile in draw(tilings(whole(shape))) if prod(shape) else [whole(shape)]:
            # Usually one rank sends a tile; where several would, it must travel once all the same.
            senders = draw(st.sets(st.integers(0, publishers - 1), min_size=1, max_size=2))
            for rank in sorted(senders):
                tables[rank].append(Piece(name, dtype, shape, *tile))
    wishes = [draw(st.none() | wishes_of(values, dtypes)) for _ in range(draw(st.integers(1, 4)))]
    row_bytes = max(value.shape[-1] if value.ndim else 1 for value in values.values()) * 16
    limit = draw(st.sampled_from([max(1, row_bytes), 256 + row_bytes, 700 + row_bytes, 1 << 16]))
    return Case(values, dtypes, tables, wishes, limit)


@st.composite
def wishes_of(draw: st.DrawFn, values: dict[str, Array], dtypes: dict[str, str]) -> list[Wanted]:
    found = []
    for name, value in values.items():
        everything = whole(value.shape)
        tiles = draw(tilings(everything))
        boxes = draw(st.lists(st.sampled_from(tiles), min_size=1, max_size=len(tiles), unique=True))
        if draw(st.booleans()):
            boxes.append(draw(boxes_in(everything)))
        found += [Wanted(name, dtypes[name], value.shape, box) for box in boxes]
    return found


def check_plan(case: Case, table: list[Piece], plans: list[BucketPlan]) -> None:
    last: dict[tuple[int, ...], int] = {}
    for plan in plans:
        assert plan.entries
        assert list(plan.lane) == sorted(set(plan.lane)) != []
        assert plan.nbytes <= case.bucket_bytes
        assert plan.nbytes == max(entry.at + entry.nbytes for entry in plan.entries)
        end = 0
        for entry in plan.entries:
            piece = table[entry.piece]
            assert entry.nbytes == entry.box.volume * ITEMSIZE[piece.dtype]
            assert entry.at % BUCKET_ALIGN_BYTES == 0
            assert entry.at >= end or not entry.nbytes
            end = max(end, entry.at + entry.nbytes)
            assert entry.piece >= last.get(plan.lane, 0)
            last[plan.lane] = entry.piece


def carry(case: Case, parts: list[list[list[PieceBox]]]) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Send every receiver its parts; what each has then, with how often each element came, and what was sent."""
    counts = [{name: np.zeros(value.shape, int) for name, value in case.values.items()} for _ in case.wishes]
    sent = {name: np.zeros(value.shape, int) for name, value in case.values.items()}
    for rank, table in enumerate(case.tables):
        of_rank = [found[rank] for found in parts]
        plans = plan_buckets(table, of_rank, case.bucket_bytes)
        assert plans == plan_buckets(table, of_rank, case.bucket_bytes)
        check_plan(case, table, plans)
        for plan in plans:
            memory = np.full(case.bucket_bytes, 0xEE, np.uint8)
            for entry in plan.entries:
                piece = table[entry.piece]
                local = np.ascontiguousarray(case.values[piece.name][cut(piece.box)])  # all that the rank has
                packed = np.frombuffer(local[within(entry.box, piece.box)].tobytes(), np.uint8)
                memory[entry.at : entry.at + entry.nbytes] = packed
                sent[piece.name][cut(entry.box)] += 1
            for entry in plan.entries:
                piece = table[entry.piece]
                value = case.values[piece.name]
                arrived = memory[entry.at : entry.at + entry.nbytes].view(value.dtype).reshape(entry.sizes)
                assert arrived.tobytes() == value[cut(entry.box)].tobytes()
                for member in plan.lane:
                    counts[member][piece.name][cut(entry.box)] += 1
    return counts, sent


@settings(max_examples=100)
@given(cases())
def test_every_wanted_element_arrives_once_and_travels_once(case: Case) -> None:
    parts = [select(case.tables, wishes) for wishes in case.wishes]
    counts, sent = carry(case, parts)
    wanted = [case.wanted(receiver) for receiver in range(len(case.wishes))]
    for name in case.values:
        for receiver, found in enumerate(counts):
            # Nothing that isn't wanted: the lanes of buckets are those who want all that lies in them.
            assert (found[name] == wanted[receiver][name]).all()
        anyone: Any = np.logical_or.reduce([masks[name] for masks in wanted])
        assert (sent[name] == anyone).all()
