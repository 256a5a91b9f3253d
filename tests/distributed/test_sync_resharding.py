"""Weights of one parallelism through buckets into another: FSDP2, TP, FSDP over TP and HSDP, on two and four ranks.

Every rank is a publisher rank and a receiver; another receiver takes everything whole. Buckets travel as objects: what
is tested is who sends what, and where it goes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from launch import in_world, run_job
from torch.distributed.tensor import DTensor
from worlds import (
    Parallelize,
    fsdp,
    fsdp_tp,
    hsdp,
    local_bits,
    loose_tensors,
    make_model,
    number_of,
    single,
    tensor_parallel,
)

from holdfast import _torch_compat as compat
from holdfast.boxes import Box, first_defect, whole
from holdfast.dtypes import ITEMSIZE
from holdfast.state.entries import torch_dtype
from holdfast.sync.weights.buckets import Piece, PieceBox, Wanted, plan_buckets, select
from holdfast.sync.weights.pieces import (
    Local,
    Outgoing,
    WeightsSpec,
    destinations_of,
    pack,
    places_of,
    unpack,
)

BUCKET_BYTES = 1500
Places = dict[str, list[Local]]


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def weights(how: Parallelize, tag: str, *, received: bool = False) -> dict[str, torch.Tensor]:
    """A model, loose tensors of odd placements, and a tensor a rank that nobody else publishes."""
    loose = {f"loose.{name}": tensor for name, tensor in loose_tensors(tag).items()}
    tensors = {**make_model(how, tag).state_dict(), **loose}
    for rank in range(dist.get_world_size()):
        if received or rank == dist.get_rank():
            tensors[f"only{rank}"] = torch.full((3 + rank,), number_of(tag, str(rank)))
    return tensors


def outgoing(tensors: dict[str, torch.Tensor]) -> Outgoing:
    ranks = tuple(range(dist.get_world_size()))
    look = WeightsSpec(tensors, rank=dist.get_rank(), group_ranks=ranks)
    assert look.stands(dict(tensors))
    told = gathered((look.digest, look.structure))
    return Outgoing(look, dict(told), [digest for digest, _ in told])


def check_tables(tables: list[list[Piece]], tensors: dict[str, torch.Tensor]) -> None:
    """Each element is sent by one rank, and what all have is sent by all in about equal parts."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for table in tables:
        for piece in table:
            boxes[piece.name].append(piece.box)
    assert boxes.keys() == set().union(*gathered(set(tensors)))
    for name, tensor in tensors.items():
        assert first_defect(whole(tuple(tensor.shape)), boxes[name]) is None, name
    loads = [sum(piece.box.volume * ITEMSIZE[piece.dtype] for piece in table) for table in tables]
    assert max(loads) - min(loads) <= 7 * 8 * 4 + 100, loads  # the largest tensor that isn't cut, and odd ones


def carry(tensors: dict[str, torch.Tensor], receivers: list[tuple[list[Wanted] | None, Places]]) -> None:
    """From all ranks to the receivers of all ranks."""
    sent = outgoing(tensors)
    tables: list[list[Piece]] = gathered(sent.table)
    check_tables(tables, tensors)
    rank = dist.get_rank()
    wants: list[list[list[PieceBox]]] = []
    mine: list[tuple[int, Places]] = []
    for number, found in enumerate(gathered([select(tables, wanted) for wanted, _ in receivers])):
        mine += [(len(wants) + at, places) for at, (_, places) in enumerate(receivers) if number == rank]
        wants += found
    buckets = []
    for plan in plan_buckets(sent.table, [want[rank] for want in wants], BUCKET_BYTES):
        memory = torch.zeros(BUCKET_BYTES, dtype=torch.uint8)
        pack(plan, sent.locals(tensors), memory)
        buckets.append((plan, memory))
    for table, found in zip(tables, gathered(buckets), strict=True):
        for plan, memory in found:
            for member, places in mine:
                if member in plan.lane:
                    unpack(plan, memory, destinations_of(table, places))


def check_pair(how: Parallelize, other: Parallelize) -> None:
    sent = weights(how, "sent")
    into = weights(other, "other", received=True)
    receivers: list[tuple[list[Wanted] | None, Places]] = [places_of(into, rank=dist.get_rank())]
    names = {name: None for found in gathered(list(sent)) for name in found}
    if dist.get_rank() == 0:
        pieces = [
            Piece(name, compat.dtype_name(tensor.dtype), tuple(tensor.shape), *whole(tuple(tensor.shape)))
            for name, tensor in into.items()
        ]
        memory = {piece.name: torch.empty(piece.shape, dtype=torch_dtype(piece.dtype)) for piece in pieces}
        receivers.append((None, {name: [Local(whole(tuple(new.shape)), new)] for name, new in memory.items()}))
    carry(sent, receivers)
    assert set(names) == set(into)
    expected = weights(other, "sent", received=True)
    for name, tensor in expected.items():
        assert torch.equal(local_bits(into[name]), local_bits(tensor)), (how.__name__, other.__name__, name)
    for _, places in receivers[1:]:
        values = {name: tensor for name, tensor in expected.items() if not isinstance(tensor, DTensor)}
        values.update(make_model(single, "sent").state_dict())
        for name, value in values.items():
            assert torch.equal(local_bits(places[name][0].tensor), local_bits(value)), (how.__name__, name)


def check_two() -> None:
    check_pair(fsdp, tensor_parallel)


def check_four() -> None:
    check_pair(fsdp, tensor_parallel)
    check_pair(tensor_parallel, fsdp_tp)
    check_pair(fsdp_tp, hsdp)


def check_worlds() -> None:
    in_world(2, check_two)
    in_world(4, check_four)


def test_weights_arrive_whatever_the_parallelism_of_either_side() -> None:
    run_job(check_worlds, nproc=4)
