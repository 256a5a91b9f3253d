"""Tensors saved in one layout and loaded in another: meshes, placements, groups of ranks, sharded tensors.

In every combination of stock DCP and Holdfast (`dcp_ways`). What is compared is what each rank holds, with what the
same code of torch's would have given it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_ways import Behaviours, Way, blank, equal, numbers
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from worlds import mesh_of

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
behaviours = Behaviours()


def placed(whole: dict[str, torch.Tensor], mesh: DeviceMesh, placements: list[Any]) -> dict[str, Any]:
    return {name: distribute_tensor(value, mesh, placements, src_data_rank=None) for name, value in whole.items()}


def moved(way: Way, whole: dict[str, torch.Tensor], layouts: list[tuple[DeviceMesh, list[Any]]]) -> None:
    """Save ``whole`` in every layout at once, and load all of that in every layout, one after the other."""
    state = {str(number): placed(whole, *layout) for number, layout in enumerate(layouts)}
    way.save(state)
    for layout in layouts:
        expected = placed(whole, *layout)
        found = way.load({name: blank(expected) for name in state})
        for name in state:
            equal(found[name], expected)


EVEN = {"matrix": numbers(8, 8), "cube": numbers(4, 4, 4, seed=2)}
UNEVEN = {
    "rows": numbers(7, 5),
    "columns": numbers(5, 7, seed=2),
    "few": numbers(2, 3, seed=3),
    "one": numbers(1, 1, seed=4),
    "thin": numbers(9, 1, seed=5),
    "none": numbers(0, 4),
    "cube": numbers(3, 5, 2, seed=6),
}


@behaviours(world=2)
def two_ranks_change_placements(way: Way) -> None:
    moved(way, EVEN, [(mesh_of(2), [placement]) for placement in (R, S0, S1)])


@behaviours(world=4)
def placements_of_one_dimension(way: Way) -> None:
    moved(way, EVEN, [(mesh_of(4), [placement]) for placement in (R, S0, S1)])


@behaviours(world=4)
def uneven_placements_of_one_dimension(way: Way) -> None:
    moved(way, UNEVEN, [(mesh_of(4), [placement]) for placement in (R, S0, S1)])


@behaviours(world=4)
def placements_of_two_dimensions(way: Way) -> None:
    mesh = mesh_of(2, 2)
    moved(way, EVEN, [(mesh, pair) for pair in ([R, R], [R, S0], [S0, R], [S0, S0], [S0, S1], [S1, S0], [R, S1])])


@behaviours(world=4)
def uneven_placements_of_two_dimensions(way: Way) -> None:
    moved(way, UNEVEN, [(mesh_of(2, 2), pair) for pair in ([R, S0], [S0, R], [S0, S0], [S0, S1], [S1, S0], [S1, S1])])


@behaviours(world=4)
def meshes_of_one_and_two_dimensions(way: Way) -> None:
    one, two = mesh_of(4), mesh_of(2, 2)
    moved(way, EVEN | UNEVEN, [(one, [S0]), (one, [R]), (two, [S0, S0]), (two, [R, S0]), (two, [S0, R]), (two, [R, R])])


@behaviours(world=4)
def meshes_of_other_shapes_and_orders(way: Way) -> None:
    reversed_mesh = DeviceMesh("cpu", [3, 1, 2, 0])
    moved(
        way, UNEVEN, [(mesh_of(4), [S0]), (reversed_mesh, [S0]), (mesh_of(4, 1), [S0, S1]), (mesh_of(1, 4), [S0, S1])]
    )


@behaviours(world=4)
def three_dimensions(way: Way) -> None:
    cubes = {"cube": numbers(6, 5, 7), "four": numbers(2, 3, 4, 5, seed=2)}
    moved(way, cubes, [(mesh_of(2, 2), [S2, S0]), (mesh_of(2, 2), [S1, S2]), (mesh_of(4), [S2]), (mesh_of(4), [S1])])


@behaviours(world=4)
def dtensors_and_plain_tensors(way: Way) -> None:
    """What was sharded is loaded whole by every rank, and what was whole, sharded."""
    state = {
        "sharded": placed(UNEVEN, mesh_of(4), [S0]),
        "plain": dict(UNEVEN),
        "copies": placed(UNEVEN, mesh_of(4), [R]),
    }
    way.save(state)
    equal(way.load({name: blank(UNEVEN) for name in state}), dict.fromkeys(state, UNEVEN))
    expected = placed(UNEVEN, mesh_of(2, 2), [S1, S0])
    equal(way.load({name: blank(expected) for name in state}), dict.fromkeys(state, expected))


@behaviours(world=4)
def kinds_of_numbers(way: Way) -> None:
    kinds = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
    whole = {str(kind): (numbers(7, 3) * 3).to(kind) for kind in kinds}
    whole |= {str(kind): numbers(8, 4).to(kind) for kind in (torch.float8_e4m3fn, torch.float8_e5m2)}
    moved(way, whole, [(mesh_of(4), [S0]), (mesh_of(4), [R])])


@behaviours(world=4)
def groups_of_other_sizes(way: Way) -> None:
    """Saved by some ranks alone and loaded by others: 2 to 4, 4 to 3, 3 to 1."""
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    groups[4] = dist.group.WORLD
    rank = dist.get_rank()
    meshes = {size: DeviceMesh.from_group(group, "cpu") for size, group in groups.items() if rank < size}
    for size, mesh in meshes.items():
        way.save(placed(UNEVEN, mesh, [S0]), f"{size}", process_group=groups[size])
    dist.barrier()
    for saved in groups:
        for size, mesh in meshes.items():
            expected = placed(UNEVEN, mesh, [S1 if saved == size else S0])
            equal(way.load(blank(expected), f"{saved}", process_group=groups[size]), expected)


@behaviours(world=4, own=False)
def one_rank_loads_without_the_others(way: Way) -> None:
    way.save(placed(UNEVEN, mesh_of(4), [S0]))
    equal(way.load(blank(UNEVEN), no_dist=True), UNEVEN)


@behaviours(world=4)
def groups_of_ranks_save_side_by_side(way: Way) -> None:
    """Even and odd ranks each have a checkpoint of their own, at the same time."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, name = groups[rank % 2], f"of-{rank % 2}"
    wholes = [{key: value + number for key, value in UNEVEN.items()} for number in range(2)]
    expected = placed(wholes[rank % 2], DeviceMesh.from_group(group, "cpu"), [S0])
    way.save(expected, name, process_group=group)
    equal(way.load(blank(expected), name, process_group=group), expected)
    dist.barrier()
    other = 1 - rank % 2
    equal(way.load(blank(UNEVEN), f"of-{other}", process_group=group), wholes[other])


@behaviours(world=4)
def tensors_that_some_ranks_hold(way: Way) -> None:
    """On a mesh of two of four ranks; the other two hold nothing of it, or not even its name."""
    rank, half = dist.get_rank(), DeviceMesh("cpu", [1, 3])
    everywhere = placed(EVEN, mesh_of(4), [S0])
    mine = placed(EVEN, half, [S0]) if rank in (1, 3) else {}
    state = {"everywhere": everywhere, **({"half": mine} if mine else {})}
    way.save(state)
    equal(way.load(blank(state)), state)
    wide = {"half": placed(EVEN, mesh_of(2, 2), [S0, S1])}
    equal(way.load(blank(wide)), wide)


@behaviours(world=2)
def local_shards_that_are_no_views_of_memory(way: Way) -> None:
    """Local parts that are strided, offset, or part of a larger storage."""
    rank, mesh = dist.get_rank(), mesh_of(2)
    whole = numbers(6, 8)
    local = torch.zeros(8, 10)
    local[2:5, 1:9] = whole[3 * rank : 3 * rank + 3]
    columns = whole[:, 4 * rank : 4 * rank + 4]
    state = {
        "inside": DTensor.from_local(local[2:5, 1:9], mesh, [S0]),
        "columns": DTensor.from_local(columns, mesh, [S1]),
        "turned": DTensor.from_local(whole.t()[:, 3 * rank : 3 * rank + 3], mesh, [S1]),
    }
    way.save(state)
    expected = {"inside": whole, "columns": whole, "turned": whole.t().contiguous()}
    equal(way.load(blank(expected)), expected)
    target = torch.zeros(8, 10)
    way.load({"inside": DTensor.from_local(target[2:5, 1:9], mesh, [S0])})
    assert torch.equal(target, local)  # nothing beside the view was written


# ShardedTensor ---------------------------------------------------------------------------------------------------


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])  # type: ignore[arg-type]


def boxes(*rows: tuple[int, int, int]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        [ShardMetadata([start, 0], [length, 20], f"rank:{rank}/cpu") for start, length, rank in rows]
    )


SPECS = {
    "chunks": chunks(0, 0, 1),
    "two-each": chunks(0, 0, 1, 1, 0),
    "columns": chunks(1, 1, 0),
    "uneven": boxes((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)),
    "lopsided": boxes((0, 8, 1), (8, 2, 0)),
    "one-rank": chunks(0, 1),
}
WHOLE = numbers(10, 20)


def sharded(spec: Any, whole: torch.Tensor | None) -> ShardedTensor:
    made = sharded_tensor.zeros(spec, 10, 20)
    for shard in made.local_shards():
        box = [slice(*pair) for pair in zip(shard.metadata.shard_offsets, ends(shard.metadata), strict=True)]
        shard.tensor.copy_(torch.zeros(1) if whole is None else whole[tuple(box)])
    return made


def ends(metadata: ShardMetadata) -> list[int]:
    return [start + length for start, length in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)]


def equal_shards(found: ShardedTensor, expected: ShardedTensor) -> None:
    pairs = zip(found.local_shards(), expected.local_shards(), strict=True)
    assert all(torch.equal(one.tensor, other.tensor) for one, other in pairs)


@behaviours(world=2, own=False)
def sharded_tensors_of_other_specs(way: Way) -> None:
    way.save({name: sharded(spec, WHOLE) for name, spec in SPECS.items()})
    for spec in SPECS.values():
        found: dict[str, Any] = way.load({name: sharded(spec, None) for name in SPECS})
        for value in found.values():
            equal_shards(value, sharded(spec, WHOLE))


@behaviours(world=2, own=False)
def sharded_tensors_and_plain_ones(way: Way) -> None:
    way.save({**{name: sharded(spec, WHOLE) for name, spec in SPECS.items()}, "plain": WHOLE})
    equal(way.load({name: torch.zeros(10, 20) for name in (*SPECS, "plain")}), dict.fromkeys((*SPECS, "plain"), WHOLE))
    for spec in SPECS.values():
        found: dict[str, Any] = way.load({"plain": sharded(spec, None)})
        equal_shards(found["plain"], sharded(spec, WHOLE))


@behaviours(world=2, own=False)
def sharded_tensors_and_dtensors(way: Way) -> None:
    dtensor = distribute_tensor(WHOLE, mesh_of(2), [S1], src_data_rank=None)
    way.save({**{name: sharded(spec, WHOLE) for name, spec in SPECS.items()}, "dtensor": dtensor})
    found: dict[str, Any] = way.load({name: torch.zeros_like(dtensor) for name in SPECS})
    equal(found, dict.fromkeys(SPECS, dtensor))
    back: dict[str, Any] = way.load({"dtensor": sharded(SPECS["uneven"], None)})
    equal_shards(back["dtensor"], sharded(SPECS["uneven"], WHOLE))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return behaviours.outcomes(request, tmp_path_factory.mktemp("resharding"))


@behaviours.every_case()
def test_resharding(case: Any, outcomes: Any) -> None:
    behaviours.check(case, outcomes)
