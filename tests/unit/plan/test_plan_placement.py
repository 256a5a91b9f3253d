"""Placements by hand-made cases; against real DTensors in tests/distributed/test_placements_match_dtensor.py."""

from __future__ import annotations

import pytest

from holdfast.boxes import Box
from holdfast.errors import ConfigError
from holdfast.format.structure import MeshLayout, Placement
from holdfast.plan.placement import Mesh, local_boxes, local_shape

REPLICATE = Placement("replicate")


def shard(dim: int) -> Placement:
    return Placement("shard", dim)


def strided(dim: int, split: int) -> Placement:
    return Placement("strided", dim, split)


def rows(layout: MeshLayout, size: int, rank: int) -> list[int]:
    """Indices of a 1-D tensor in the order in which they lie in the rank's local tensor."""
    found = []
    for box, (local,) in local_boxes((size,), layout, rank):
        assert local == len(found)
        found.extend(range(box.offsets[0], box.stops[0]))
    assert local_shape((size,), layout, rank) == (len(found),)
    return found


def test_chunks_are_even_but_for_the_last() -> None:
    layout = MeshLayout((4,), (0, 1, 2, 3), (shard(0),))
    assert [rows(layout, 5, rank) for rank in range(4)] == [[0, 1], [2, 3], [4], []]
    assert [rows(layout, 2, rank) for rank in range(4)] == [[0], [1], [], []]
    assert [rows(layout, 0, rank) for rank in range(4)] == [[], [], [], []]


def test_replicas_hold_the_same_and_outsiders_nothing() -> None:
    layout = MeshLayout((2, 2), (0, 1, 5, -1), (REPLICATE, shard(0)))
    assert rows(layout, 4, 0) == rows(layout, 4, 5) == [0, 1]
    assert rows(layout, 4, 1) == [2, 3]
    assert local_boxes((4,), layout, 3) == []
    assert local_shape((4,), layout, 3) == (0,)
    mesh = Mesh(layout, world=6)
    assert mesh.replicas(mesh.coordinates(5)) == [0, 5]
    assert mesh.replicas((0, 1)) == [1]
    assert mesh.shard_points() == [(0, 0), (0, 1)]


def test_two_mesh_dimensions_on_one_tensor_dimension_cut_left_to_right() -> None:
    layout = MeshLayout((2, 2), (0, 1, 2, 3), (shard(0), shard(0)))
    assert [rows(layout, 8, rank) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_fsdp_over_tensor_parallel_cuts_right_to_left() -> None:
    layout = MeshLayout((2, 2), (0, 1, 2, 3), (strided(0, 2), shard(0)))
    assert [rows(layout, 8, rank) for rank in range(4)] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    # sizes that don't divide: tensor parallel cuts 0-4 | 5-8, and FSDP cuts each of them into four
    uneven = MeshLayout((4, 2), tuple(range(8)), (strided(0, 2), shard(0)))
    assert [rows(uneven, 9, rank) for rank in range(8)] == [[0, 1], [5], [2, 3], [6], [4], [7], [], [8]]


def test_three_levels_on_one_dimension() -> None:
    layout = MeshLayout((2, 2, 2), tuple(range(8)), (strided(0, 4), strided(0, 2), shard(0)))
    held = [rows(layout, 16, rank) for rank in range(8)]
    assert held[0] == [0, 1]
    assert held[1] == [8, 9]  # the rightmost cuts first
    assert held[2] == [4, 5]
    assert held[4] == [2, 3]


def test_a_strided_shard_that_nothing_explains_is_in_several_pieces() -> None:
    layout = MeshLayout((2,), (0, 1), (strided(0, 2),))
    assert local_boxes((8, 3), layout, 1) == [(Box((2, 0), (2, 3)), (0, 0)), (Box((6, 0), (2, 3)), (2, 0))]
    assert rows(layout, 5, 0) == [0, 1, 3]
    assert rows(layout, 5, 1) == [2, 4]


def test_pieces_of_two_dimensions_multiply() -> None:
    layout = MeshLayout((2, 2), (0, 1, 2, 3), (strided(0, 2), strided(1, 2)))
    boxes = local_boxes((4, 4), layout, 3)
    assert [box.offsets for box, _ in boxes] == [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert [local for _, local in boxes] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_scalar_can_only_be_replicated() -> None:
    layout = MeshLayout((2,), (0, 1), (REPLICATE,))
    assert local_boxes((), layout, 1) == [(Box((), ()), ())]
    with pytest.raises(ConfigError, match="dimension 0"):
        local_boxes((), MeshLayout((2,), (0, 1), (shard(0),)), 0)


@pytest.mark.parametrize(
    "layout",
    [
        MeshLayout((2,), (0, 1, 2), (REPLICATE,)),
        MeshLayout((2,), (0, 1), (REPLICATE, REPLICATE)),
        MeshLayout((2,), (0, 0), (REPLICATE,)),
        MeshLayout((2,), (0, 9), (REPLICATE,)),
    ],
)
def test_a_mesh_that_contradicts_itself_is_refused(layout: MeshLayout) -> None:
    with pytest.raises(ConfigError, match="mesh of shape"):
        Mesh(layout, world=4)
