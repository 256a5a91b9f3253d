"""What an export plan refuses, and how it divides the work; `test_export_plan_properties` carries plans out."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from _export_files import File, Place, columns_of, everywhere, file_of, rows_of

from holdfast.boxes import whole
from holdfast.errors import ConfigError
from holdfast.export.plan import BUFFER_BYTES_MAX, plan_export
from holdfast.export.rank_plan import BUCKETS, SourceBox, SourceTensor
from holdfast.keymap.moves import KeyMapping, MappedTensor, Move, run

MIB = 1 << 20
SHAPE = (1024, 3000)
HEADER = b"h" * 64


def rows(world: int, shape: tuple[int, ...] = SHAPE) -> SourceTensor:
    return SourceTensor("w", shape, "float32", rows_of(shape, world))


def columns(world: int) -> SourceTensor:
    return SourceTensor("w", SHAPE, "float32", columns_of(SHAPE, world))


def replicas(world: int) -> SourceTensor:
    return SourceTensor("w", SHAPE, "float32", everywhere(SHAPE, world))


def one_file(*tensors: MappedTensor) -> File:
    return file_of(tensors, header=HEADER)


TENSOR = MappedTensor("w", SHAPE, "bfloat16", (run("w", prod(SHAPE)),))
MAPPING = KeyMapping((TENSOR,), {})


def plan_of(source: SourceTensor, *, world: int = 4, **options: Any) -> Any:
    return plan_export([one_file(TENSOR)], MAPPING, {"w": source}, world=world, **options)


def uneven(plan: Any) -> int:
    """By how many blocks the largest and smallest shares differ."""
    blocks = [sum(-(-part.size // MIB) for part in parts) for parts in plan.parts]
    return max(blocks) - min(blocks)


# the division of work --------------------------------------------------------------------------------------------


def test_of_rows_only_the_blocks_at_their_ends_travel() -> None:
    plan = plan_of(rows(4))
    assert 0 < sum(stream.nbytes for stream in plan.streams.values()) <= 3 * MIB
    assert plan.rounds == 1
    assert [len(parts) for parts in plan.parts] == [1] * 4


def test_of_columns_everyone_writes_as_much() -> None:
    plan = plan_of(columns(4))
    assert uneven(plan) <= 1
    assert plan.rounds > 0


def test_columns_that_do_not_divide_evenly_are_shared_all_the_same() -> None:
    assert uneven(plan_of(columns(7), world=7)) <= 1


def test_replicas_write_evenly_and_send_nothing() -> None:
    plan = plan_of(replicas(4))
    assert plan.rounds == 0
    assert uneven(plan) <= 1


def test_what_one_rank_has_of_an_expert_it_writes() -> None:
    tensors, sources = [], {}
    for rank in range(4):
        name = f"expert.{rank}"
        tensors.append(MappedTensor(name, SHAPE, "bfloat16", (run(name, prod(SHAPE)),)))
        sources[name] = SourceTensor(name, SHAPE, "float32", (SourceBox(whole(SHAPE), (rank,)),))
    plan = plan_export([one_file(*tensors)], KeyMapping(tuple(tensors), {}), sources, world=4)
    assert [len(parts) for parts in plan.parts] == [1] * 4
    assert sum(stream.nbytes for stream in plan.streams.values()) <= 3 * MIB


@pytest.mark.parametrize("source", [rows(4), columns(4), replicas(4)])
def test_memory_is_the_share_and_two_buckets(source: SourceTensor) -> None:
    plan = plan_of(source)
    for rank in range(4):
        mine = plan.rank(rank)
        share = sum(part.size for part in mine.parts)
        assert mine.memory_bytes <= share + 4096 + BUCKETS * plan.bucket_bytes <= share + BUFFER_BYTES_MAX
        assert mine.parts == plan.parts[rank]


def test_whole_files_go_to_those_who_hold_them_and_nothing_is_sent() -> None:
    """Stages of a pipeline, of which each has files of its own."""
    tensors, files, sources = [], [], {}
    for stage in range(4):
        name = f"stage.{stage}"
        tensors.append(MappedTensor(name, SHAPE, "bfloat16", (run(name, prod(SHAPE)),)))
        files.append(file_of(tensors[-1:], name=name, header=HEADER))
        sources[name] = SourceTensor(name, SHAPE, "float32", (SourceBox(whole(SHAPE), (3 - stage,)),))
    plan = plan_export(files, KeyMapping(tuple(tensors), {}), sources, world=4, whole_files=True)
    assert [[part.file for part in parts] for parts in plan.parts] == [[f"stage.{3 - rank}"] for rank in range(4)]
    assert plan.rounds == 0


def test_whole_files_that_all_hold_alike_are_spread() -> None:
    tensors = [MappedTensor(f"w{n}", SHAPE, "bfloat16", (run(f"w{n}", prod(SHAPE)),)) for n in range(8)]
    files = [file_of([tensor], name=tensor.name, header=HEADER) for tensor in tensors]
    sources = {tensor.name: replace(rows(4), name=tensor.name) for tensor in tensors}
    plan = plan_export(files, KeyMapping(tuple(tensors), {}), sources, world=4, whole_files=True)
    assert [len(parts) for parts in plan.parts] == [2] * 4
    alone = {
        tensor.name: SourceTensor(tensor.name, SHAPE, "float32", (SourceBox(whole(SHAPE), (0,)),)) for tensor in tensors
    }
    plan = plan_export(files, KeyMapping(tuple(tensors), {}), alone, world=4, whole_files=True)
    assert [len(parts) for parts in plan.parts] == [2] * 4, (
        "also where one rank holds everything: its memory is bounded"
    )


def test_equal_arguments_give_equal_plans() -> None:
    one, other = plan_of(columns(4)), plan_of(columns(4))
    assert [one.rank(rank) for rank in range(4)] == [other.rank(rank) for rank in range(4)]


def test_a_header_of_several_blocks_is_written_by_those_who_own_them() -> None:
    header = bytes(range(256)) * (3 * MIB // 256)
    plan = plan_export([file_of([TENSOR], header=header)], MAPPING, {"w": rows(3)}, world=3)
    found = bytearray(len(header))
    for rank in range(3):
        mine = plan.rank(rank)
        for at, data in mine.constants:
            part = max((part for part in mine.parts if part.image_offset <= at), key=lambda part: part.image_offset)
            offset = part.offset + at - part.image_offset
            found[offset : offset + len(data)] = data
    assert found == header


# what it refuses -------------------------------------------------------------------------------------------------


def refused(
    text: str, *, files: Any = None, mapping: KeyMapping = MAPPING, sources: Any = None, **options: Any
) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_export(files or [one_file(TENSOR)], mapping, sources or {"w": rows(4)}, **{"world": 4, **options})


def test_files_and_maps_must_fit() -> None:
    file = one_file(TENSOR)
    other = MappedTensor("v", (2,), "bfloat16", (run("w", 2),))
    refused("'w' of f is not mapped", mapping=KeyMapping((other,), {}))
    refused("'v' is mapped, but is not in any file", mapping=KeyMapping((TENSOR, other), {}))
    refused("'w' of g has two places", files=[file, replace(file, name="g")])
    refused("takes 6144000 bytes from 64", files=[replace(file, tensors=(Place("w", 72, file.size),))])
    refused("its tensors end at", files=[replace(file, size=file.size + 8)])
    refused("not a multiple of its element size", files=[file_of([TENSOR], header=b"odd")])
    refused("dtype strange", mapping=KeyMapping((replace(TENSOR, dtype="strange"),), {}))
    half = replace(TENSOR, moves=(run("w", 100),))
    refused("has 3072000 elements, and its map fills 100", mapping=KeyMapping((half,), {}))


def test_sources_must_be_held_whole() -> None:
    source = rows(4)
    refused("comes from 'w', which no rank has", sources={"v": source})
    refused(r"no rank holds \[256:512", sources={"w": replace(source, pieces=source.pieces[:1] + source.pieces[2:])})
    refused("two pieces hold", sources={"w": replace(source, pieces=(*source.pieces, source.pieces[0]))})
    refused("held by ranks", sources={"w": source}, world=3)
    refused("dtype", sources={"w": replace(source, dtype="quint8")})


def test_buckets_have_bounds() -> None:
    refused("bucket_bytes", bucket_bytes=0)
    refused("bucket_bytes", bucket_bytes=BUFFER_BYTES_MAX)
    refused("too small: rank", bucket_bytes=16)
    refused("there are 0 ranks", world=0)


def test_tensors_without_elements_take_no_place() -> None:
    empty = MappedTensor("e", (0, 7), "bfloat16", ())
    plan = plan_export([one_file(TENSOR, empty)], KeyMapping((TENSOR, empty), {}), {"w": rows(2)}, world=2)
    assert sum(part.size for parts in plan.parts for part in parts) == one_file(TENSOR).size


def test_an_element_that_becomes_many_is_taken_from_one_rank_each_time() -> None:
    many = MappedTensor("w", (3, 8), "bfloat16", (Move("w", (3, 8), 0, (8, 1), 0, (0, 1)),))
    plan = plan_export([one_file(many)], KeyMapping((many,), {}), {"w": rows(2, (8,))}, world=2)
    assert (
        sum(prod(copy.counts) for copy in plan.rank(0).local) + sum(s.nbytes for s in plan.streams.values()) // 2 == 24
    )
