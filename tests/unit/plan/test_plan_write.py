"""Who writes what where: replica groups, balance, per-rank values, file layout, and ranks that disagree."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

import pytest

from holdfast.boxes import Box, first_defect, whole
from holdfast.errors import ConfigError, StateMismatch
from holdfast.format.structure import PER_RANK, MeshLayout, ObjectSpec, PathItem, Placement, Structure, TensorSpec
from holdfast.format.torch_record import measure
from holdfast.plan.write import PlacedTensor, RankPlan, SavePlan, plan_rank, plan_save

REPLICATE = Placement("replicate")
SHARD0 = Placement("shard", 0)
MIB = 1 << 20


def tensor(
    name: str,
    shape: tuple[int, ...] = (4, 4),
    dtype: str = "float32",
    layout: int | None = None,
    path: tuple[PathItem, ...] | None = None,
) -> TensorSpec:
    return TensorSpec(name, path or tuple(name.split(".")), shape, dtype, layout)


def structure(
    tensors: list[TensorSpec] = [],  # noqa: B006
    layouts: list[MeshLayout] = [],  # noqa: B006
    objects: list[ObjectSpec] = [],  # noqa: B006
) -> Structure:
    return Structure(tuple(layouts), tuple(sorted(tensors, key=lambda t: t.name)), tuple(objects))


def same_everywhere(world: int, *args: object) -> SavePlan:
    return plan_save({"a": structure(*args)}, ["a"] * world)  # type: ignore[arg-type]


def different(*structures: Structure) -> SavePlan:
    return plan_save({str(i): s for i, s in enumerate(structures)}, [str(i) for i in range(len(structures))])


def writers(plan: SavePlan) -> dict[tuple[str, Box], int]:
    """Who writes each box; fails if two do."""
    found: dict[tuple[str, Box], int] = {}
    for rank in plan.ranks:
        for placed in rank.tensors:
            key = (placed.name, Box(placed.offsets, placed.sizes))
            assert key not in found, f"{key} is written by ranks {found[key]} and {rank.rank}"
            found[key] = rank.rank
    return found


def assert_whole(plan: SavePlan) -> None:
    """Every tensor is tiled by what is written, and every file is laid out soundly."""
    boxes: dict[tuple[str, tuple[int, ...]], list[Box]] = defaultdict(list)
    for rank in plan.ranks:
        assert_sound_files(rank)
        for placed in rank.tensors:
            boxes[placed.name, placed.shape].append(Box(placed.offsets, placed.sizes))
    for (name, shape), tiles in boxes.items():
        assert first_defect(whole(shape), tiles) is None, name
    writers(plan)


def assert_sound_files(rank: RankPlan) -> None:
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for placed in rank.tensors:
        assert placed.record_offset % 64 == 0
        shape = measure(placed.dtype, placed.sizes, record_offset=placed.record_offset)
        assert placed.payload_offset == placed.record_offset + shape.header_bytes
        assert placed.record_end == placed.payload_offset + placed.nbytes + shape.trailer_bytes
        assert placed.payload_offset % (4096 if placed.nbytes >= MIB else 64) == 0
        ranges[placed.file].append((placed.record_offset, placed.record_end))
    for item in rank.objects:
        assert item.offset % 64 == 0
        ranges[item.file].append((item.offset, item.offset + item.capacity))
    assert set(ranges) == set(range(len(rank.files)))
    for number, file in enumerate(rank.files):
        assert file.size % 4096 == 0
        ends = [0, *(end for _, end in ranges[number])]
        assert all(start >= end for (start, _), end in zip(ranges[number], ends, strict=False))
        assert 0 <= file.size - max(ends) < 4096


def written(plan: SavePlan) -> Counter[int]:
    """Payload bytes by rank."""
    return Counter({rank.rank: sum(placed.nbytes for placed in rank.tensors) for rank in plan.ranks})


# Replicas ------------------------------------------------------------------------------------------------------


def test_one_rank_writes_everything() -> None:
    plan = same_everywhere(1, [tensor("b"), tensor("a", (3,), "int64")])
    assert_whole(plan)
    assert [placed.name for placed in plan.ranks[0].tensors] == ["a", "b"]
    assert plan.ranks[0].files[0].name == "__0_0.distcp"
    assert plan.world == 1


def test_plain_replicas_are_shared_out_by_bytes() -> None:
    sizes = [100, 90, 80, 70, 60, 50, 40, 30]
    plan = same_everywhere(4, [tensor(f"t{i}", (size,), "uint8") for i, size in enumerate(sizes)])
    assert_whole(plan)
    assert set(written(plan).values()) == {130}


def test_a_rank_with_nothing_to_write_has_no_file() -> None:
    plan = same_everywhere(3, [tensor("only")])
    assert [len(rank.files) for rank in plan.ranks] == [1, 0, 0]


def test_fsdp_shards_stay_where_they_are_even_uneven_and_empty() -> None:
    plan = same_everywhere(4, [tensor("w", (5, 2), layout=0)], [MeshLayout((4,), (0, 1, 2, 3), (SHARD0,))])
    assert_whole(plan)
    assert [[(p.offsets, p.sizes) for p in rank.tensors] for rank in plan.ranks] == [
        [((0, 0), (2, 2))],
        [((2, 0), (2, 2))],
        [((4, 0), (1, 2))],
        [],
    ]


def test_hsdp_replicas_halve_the_work() -> None:
    layout = MeshLayout((2, 2), (0, 1, 2, 3), (REPLICATE, SHARD0))
    plan = same_everywhere(4, [tensor(f"w{i}", (8, 8), layout=0) for i in range(10)], [layout])
    assert_whole(plan)
    assert set(written(plan).values()) == {10 * 256 // 4}


def test_groups_do_not_all_begin_with_the_first_replica() -> None:
    world = 64
    layout = MeshLayout((2, 32), tuple(range(world)), (REPLICATE, SHARD0))
    plan = same_everywhere(world, [tensor("w", (32, 4), layout=0)], [layout])
    assert_whole(plan)
    first_half = sum(nbytes for rank, nbytes in written(plan).items() if rank < 32)
    assert 0.25 < first_half / sum(written(plan).values()) < 0.75


def test_local_offsets_point_into_a_strided_local_tensor() -> None:
    layout = MeshLayout((2,), (0, 1), (Placement("strided", 0, 2),))
    plan = same_everywhere(2, [tensor("w", (8, 3), layout=0)], [layout])
    assert_whole(plan)
    assert [(p.offsets, p.local_offsets) for p in plan.ranks[1].tensors] == [((2, 0), (0, 0)), ((6, 0), (2, 0))]


def test_pipeline_stages_share_nothing_but_the_plan() -> None:
    first = structure([tensor("layers.0.w", layout=0)], [MeshLayout((2,), (0, 1), (SHARD0,))])
    last = structure([tensor("layers.1.w", layout=0), tensor("norm")], [MeshLayout((2,), (2, 3), (SHARD0,))])
    plan = plan_save({"first": first, "last": last}, ["first", "first", "last", "last"])
    assert_whole(plan)
    assert {name for name, _ in writers(plan)} == {"layers.0.w", "layers.1.w", "norm"}
    assert writers(plan)["norm", whole((4, 4))] in (2, 3)


def test_equal_submeshes_are_replicas_of_one_another() -> None:
    one = structure([tensor(f"w{i}", layout=0) for i in range(6)], [MeshLayout((2,), (0, 1), (SHARD0,))])
    two = structure([tensor(f"w{i}", layout=0) for i in range(6)], [MeshLayout((2,), (2, 3), (SHARD0,))])
    plan = plan_save({"1": one, "2": two}, ["1", "1", "2", "2"])
    assert_whole(plan)
    assert set(written(plan).values()) == {6 * 64 // 4}


def test_a_rank_that_has_more_than_the_others_writes_it() -> None:
    common = [tensor("a"), tensor("b")]
    plan = different(structure(common), structure([*common, tensor("extra", (9,))]), structure(common))
    assert_whole(plan)
    assert writers(plan)["extra", whole((9,))] == 1


@pytest.mark.parametrize("layout", [None, 0])
def test_a_tensor_without_elements_is_one_record(layout: int | None) -> None:
    plan = same_everywhere(2, [tensor("none", (4, 0), layout=layout)], [MeshLayout((2,), (0, 1), (SHARD0,))])
    assert writers(plan) == {("none", whole((4, 0))): 0}
    assert plan.ranks[0].tensors[0].nbytes == 0
    assert_sound_files(plan.ranks[0])


def test_a_scalar_is_one_record() -> None:
    plan = same_everywhere(
        2, [tensor("step", ()), tensor("s2", (), layout=0)], [MeshLayout((2,), (0, 1), (REPLICATE,))]
    )
    assert_whole(plan)
    assert set(writers(plan)) == {("step", Box((), ())), ("s2", Box((), ()))}


# Per-rank values and objects -----------------------------------------------------------------------------------


def test_per_rank_values_are_each_ranks_own() -> None:
    mine = tensor("rng.rank-*.cpu", (8,), "uint8", path=("rng", PER_RANK, "cpu"))
    plan = plan_save({"a": structure([mine], objects=[ObjectSpec("data.rank-*", ("data", PER_RANK), 100)])}, ["a"] * 3)
    for rank in plan.ranks:
        assert [(p.name, p.path, p.source) for p in rank.tensors] == [
            (f"rng.rank-{rank.rank:05d}.cpu", ("rng", f"rank-{rank.rank:05d}", "cpu"), "rng.rank-*.cpu")
        ]
        assert [(o.name, o.source) for o in rank.objects] == [(f"data.rank-{rank.rank:05d}", "data.rank-*")]
        assert [file.name for file in rank.files] == [f"__{rank.rank}_0.distcp", f"__{rank.rank}_1.distcp"]
        assert_sound_files(rank)


def test_per_rank_values_may_differ_in_shape() -> None:
    path = ("rng", PER_RANK)
    plan = different(*(structure([tensor("rng.rank-*", (size,), "uint8", path=path)]) for size in (3, 5)))
    assert [rank.tensors[0].shape for rank in plan.ranks] == [(3,), (5,)]


def test_objects_are_written_once_by_the_lowest_rank_that_has_them() -> None:
    step, extra = ObjectSpec("step", ("step",), 70), ObjectSpec("x", ("x",), 10)
    plan = different(structure(objects=[step]), structure(objects=[step, extra]), structure(objects=[step, extra]))
    assert [[o.name for o in rank.objects] for rank in plan.ranks] == [["step"], ["x"], []]
    assert plan.ranks[0].files[0].name == "__0_1.distcp"
    assert plan.ranks[0].objects[0].file == 0


def test_objects_lie_on_64_bytes_in_the_order_of_names() -> None:
    plan = same_everywhere(1, [], [], [ObjectSpec(n, (n,), 100) for n in "abc"])
    assert [o.offset for o in plan.ranks[0].objects] == [0, 128, 256]
    assert plan.ranks[0].files[0].size == 4096
    assert plan.ranks[0].nbytes == 4096


# File layout ---------------------------------------------------------------------------------------------------


def test_large_tensors_come_first_and_start_on_a_page() -> None:
    plan = same_everywhere(
        1, [tensor("a.small", (3,)), tensor("b.large", (512, 1024)), tensor("c.small"), tensor("d.large", (300_000,))]
    )
    assert_whole(plan)
    assert [placed.name for placed in plan.ranks[0].tensors] == ["b.large", "d.large", "a.small", "c.small"]


def test_small_tensors_waste_little() -> None:
    plan = same_everywhere(1, [tensor(f"t{i:03d}", (16,)) for i in range(200)])
    assert plan.ranks[0].files[0].size < 200 * (64 + 1024)


# Agreement among ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_rank_finds_its_own_plan_alone(world: int) -> None:
    ranks = tuple(range(world))
    structures = {
        "a": structure(
            [tensor("f", (9, 2), layout=0), *(tensor(f"p{i}", (i + 1, 5)) for i in range(9))],
            [MeshLayout((world,), ranks, (SHARD0,))],
            [ObjectSpec("o", ("o",), 64)],
        ),
    }
    structures["b"] = structure(
        [*structures["a"].tensors, tensor("q")], [MeshLayout((world,), ranks, (SHARD0,))], [ObjectSpec("z", ("z",), 64)]
    )
    digests = ["ab"[rank % 2] for rank in ranks]
    everyone = plan_save(structures, digests)
    assert_whole(everyone)
    for rank in ranks:
        assert plan_rank(structures, digests, rank) == everyone.ranks[rank]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tensor("w", (4, 4)), tensor("w", (5, 4))),
        (tensor("w", dtype="float32"), tensor("w", dtype="bfloat16")),
        (tensor("a.w"), tensor("a.w", path=("a.w",))),
        (tensor("w"), tensor("w", layout=0)),
    ],
)
def test_ranks_that_mean_different_tensors_by_a_name_are_told(one: TensorSpec, other: TensorSpec) -> None:
    layouts = [MeshLayout((2,), (0, 1), (SHARD0,))]
    with pytest.raises(StateMismatch, match=r"it is .* on rank 0, .* on rank 1\.") as caught:
        different(structure([one], layouts), structure([other], layouts))
    assert caught.value.mismatched == (one.name,)
    assert one.name in str(caught.value)


def test_different_placements_on_one_mesh_are_refused() -> None:
    with pytest.raises(StateMismatch, match=r"shard dim 0.*shard dim 1"):
        different(
            structure([tensor("w", layout=0)], [MeshLayout((2,), (0, 1), (SHARD0,))]),
            structure([tensor("w", layout=0)], [MeshLayout((2,), (0, 1), (Placement("shard", 1),))]),
        )


def test_meshes_that_cut_a_tensor_differently_are_refused() -> None:
    one = structure([tensor("w", (6, 4), layout=0)], [MeshLayout((2,), (0, 1), (SHARD0,))])
    two = structure([tensor("w", (6, 4), layout=0)], [MeshLayout((3,), (2, 3, 4), (SHARD0,))])
    with pytest.raises(StateMismatch, match=r"'w'.*sharded differently"):
        plan_save({"1": one, "2": two}, ["1", "1", "2", "2", "2"])


def test_a_name_that_is_an_object_here_and_a_tensor_there_is_refused() -> None:
    with pytest.raises(StateMismatch, match="is an object on rank 1 and a tensor on rank 0"):
        different(structure([tensor("x")]), structure(objects=[ObjectSpec("x", ("x",), 64)]))


def test_a_per_rank_name_must_not_meet_anothers() -> None:
    mine = tensor("rng.rank-*", path=("rng", PER_RANK))
    with pytest.raises(StateMismatch, match=r"rng\.rank-00001"):
        same_everywhere(2, [mine, tensor("rng.rank-00001")])
    same_everywhere(1, [mine, tensor("rng.rank-00001")])


def test_a_part_that_no_rank_of_the_group_holds_is_named() -> None:
    layout = MeshLayout((4,), (0, 1, -1, -1), (SHARD0,))
    with pytest.raises(ConfigError, match=r"'w'.*\[4:6, 0:4\].*process_group"):
        same_everywhere(2, [tensor("w", (8, 4), layout=0)], [layout])
    # the ranks outside hold nothing of this one, or what others hold too
    assert_whole(same_everywhere(2, [tensor("w", (2, 4), layout=0)], [layout]))
    hsdp = MeshLayout((2, 2), (0, 1, -1, -1), (REPLICATE, SHARD0))
    assert_whole(same_everywhere(2, [tensor("w", (8, 4), layout=0)], [hsdp]))


def test_a_shard_whose_rank_lacks_the_name_is_named() -> None:
    layouts = [MeshLayout((2,), (0, 1), (SHARD0,))]
    with pytest.raises(ConfigError, match=r"'w'.*\[2:4, 0:4\]"):
        different(structure([tensor("w", layout=0)], layouts), structure([], layouts))


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="dtype quaternion"):
        same_everywhere(1, [tensor("w", dtype="quaternion")])
    with pytest.raises(ConfigError, match=r"'w'.*can't be sharded"):
        same_everywhere(1, [tensor("w", (4,), layout=0)], [MeshLayout((1,), (0,), (Placement("shard", 1),))])
    with pytest.raises(ConfigError, match="can't be a DTensor"):
        same_everywhere(1, [tensor("w", layout=0, path=(PER_RANK,))], [MeshLayout((1,), (0,), (SHARD0,))])
    with pytest.raises(ConfigError, match="rank 2"):
        plan_rank({"a": structure()}, ["a", "a"], 2)
    with pytest.raises(ConfigError, match="at least one rank"):
        plan_save({}, [])
    with pytest.raises(ConfigError, match="no rank has sent"):
        plan_save({"a": structure()}, ["a", "b"])


# Scale ---------------------------------------------------------------------------------------------------------


def test_a_rank_of_a_large_job_plans_only_its_own() -> None:
    world = 16_384
    layouts = [
        MeshLayout((world,), tuple(range(world)), (SHARD0,)),
        MeshLayout((128, 128), tuple(range(world)), (REPLICATE, SHARD0)),
    ]
    tensors = [tensor(f"t{i:04d}", (world * (1 + i % 3), 8), layout=i % 2) for i in range(2000)]
    structures = {"a": structure(tensors + [tensor(f"norm{i}", (64,)) for i in range(100)], layouts)}
    started = time.perf_counter()
    plan = plan_rank(structures, ["a"] * world, 9_001)
    assert time.perf_counter() - started < 2.0  # 0.1 s on an idle machine; planning everyone would take minutes
    sharded: list[PlacedTensor] = [placed for placed in plan.tensors if placed.name.startswith("t")]
    assert 1000 <= len(sharded) < 1100
