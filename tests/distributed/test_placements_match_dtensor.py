"""`plan.placement` against real DTensors: for every rank of a mesh the boxes must be what its local tensor holds.

One process plays every rank in turn on a fake process group: FSDP2 and DTensor cut parameters locally, so values are
real as long as nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast.boxes import Box, first_defect, whole
from holdfast.format.structure import MeshLayout, Placement, Structure, TensorSpec
from holdfast.plan.placement import local_boxes, local_shape
from holdfast.plan.write import plan_save


@contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def layout_of(tensor: DTensor) -> MeshLayout:
    def spell(placement: TorchPlacement) -> Placement:
        if isinstance(placement, _StridedShard):
            return Placement("strided", placement.dim, placement.split_factor)
        if isinstance(placement, Shard):
            return Placement("shard", placement.dim)
        assert isinstance(placement, Replicate)
        return Placement("replicate")

    mesh = tensor.device_mesh
    return MeshLayout(
        tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), tuple(spell(p) for p in tensor.placements)
    )


def values_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def assert_holds(tensor: DTensor, rank: int) -> MeshLayout:
    """The local tensor of ``tensor``, whose values are `values_of` its shape, holds what its boxes say."""
    layout = layout_of(tensor)
    shape = tuple(tensor.shape)
    local = tensor.to_local()
    if local.numel():  # FSDP2 leaves some empty local tensors with other zero sizes
        assert tuple(local.shape) == local_shape(shape, layout, rank)
    boxes = local_boxes(shape, layout, rank)
    assert sum(box.volume for box, _ in boxes) == local.numel()
    for box, offsets in boxes:
        assert torch.equal(cut(local, Box(offsets, box.sizes)), cut(values_of(shape), box)), (rank, box)
    return layout


def assert_every_rank_holds(world: int, shape: tuple[int, ...], make: Callable[[], DTensor]) -> None:
    for rank in range(world):
        with playing(rank, world):
            layout = assert_holds(make(), rank)
    spec = TensorSpec("w", ("w",), shape, "float32", 0)
    plan = plan_save({"a": Structure((layout,), (spec,), ())}, ["a"] * world)
    written = [Box(placed.offsets, placed.sizes) for each in plan.ranks for placed in each.tensors]
    assert first_defect(whole(shape), written) is None


class Holder(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def sharded_by_fsdp(weight: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    module = Holder(weight)
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    assert isinstance(module.weight.data, DTensor)
    return module.weight.data


SHAPES = [(8, 4), (7, 3), (2, 5), (1,), (5, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_fsdp2(shape: tuple[int, ...]) -> None:
    assert_every_rank_holds(4, shape, lambda: sharded_by_fsdp(values_of(shape), init_device_mesh("cpu", (4,))))


@pytest.mark.parametrize("shape", SHAPES)
def test_hsdp(shape: tuple[int, ...]) -> None:
    def make() -> DTensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))
        return sharded_by_fsdp(values_of(shape), mesh)

    assert_every_rank_holds(4, shape, make)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 2)])
def test_tensor_parallel(shape: tuple[int, ...], dim: int) -> None:
    def make() -> DTensor:
        mesh = init_device_mesh("cpu", (4,))
        return distribute_tensor(values_of(shape), mesh, [Shard(dim)], src_data_rank=None)

    assert_every_rank_holds(4, shape, make)


@pytest.mark.parametrize("tp_dim", [0, 1])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("shape", [(16, 8), (9, 6), (3, 5), (1, 8)])
def test_fsdp2_over_tensor_parallel(shape: tuple[int, ...], mesh_shape: tuple[int, int], tp_dim: int) -> None:
    """Cuts dimension 0 by both for ``tp_dim`` 0, which is `_StridedShard`; sizes that don't divide are included."""

    def make() -> DTensor:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
        split = distribute_tensor(values_of(shape), mesh["tp"], [Shard(tp_dim)], src_data_rank=None)
        made = sharded_by_fsdp(split, mesh["dp"])
        assert isinstance(made.placements[0], _StridedShard) == (tp_dim == 0)
        return made

    assert_every_rank_holds(prod(mesh_shape), shape, make)


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_hsdp_over_tensor_parallel(tp_dim: int) -> None:
    def make() -> DTensor:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("rep", "dp", "tp"))
        split = distribute_tensor(values_of((9, 6)), mesh["tp"], [Shard(tp_dim)], src_data_rank=None)
        return sharded_by_fsdp(split, mesh["rep", "dp"])

    assert_every_rank_holds(8, (9, 6), make)


@pytest.mark.parametrize("fsdp_dim", [0, 1])
def test_fsdp2_over_expert_parallel(fsdp_dim: int) -> None:
    """Stacked experts, divided by expert and then, where FSDP has more ranks than experts, along another dimension."""
    shape = (6, 4, 5)

    def make() -> DTensor:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("efsdp", "ep"))
        split = distribute_tensor(values_of(shape), mesh["ep"], [Shard(0)], src_data_rank=None)
        return sharded_by_fsdp(split, mesh["efsdp"], fsdp_dim)

    assert_every_rank_holds(6, shape, make)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Replicate(), Shard(1)),
        (Replicate(), Replicate()),
    ],
)
@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 1)])
def test_two_dimensional_meshes(shape: tuple[int, ...], placements: tuple[TorchPlacement, ...]) -> None:
    def make() -> DTensor:
        return distribute_tensor(values_of(shape), init_device_mesh("cpu", (2, 3)), placements, src_data_rank=None)

    assert_every_rank_holds(6, shape, make)


@pytest.mark.parametrize("size", [8, 12])
def test_a_strided_shard_on_its_own(size: int) -> None:
    def make() -> DTensor:
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(values_of((size, 2)), mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)

    assert_every_rank_holds(2, (size, 2), make)


def test_a_scalar() -> None:
    assert_every_rank_holds(
        2,
        (),
        lambda: distribute_tensor(values_of(()), init_device_mesh("cpu", (2,)), [Replicate()], src_data_rank=None),
    )


def test_a_tensor_without_elements() -> None:
    def make() -> DTensor:
        return distribute_tensor(values_of((0, 3)), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)

    for rank in range(2):
        with playing(rank, 2):
            layout = assert_holds(make(), rank)
            assert local_boxes((0, 3), layout, rank) == []
