"""Both sides of a weight sync as ranks of one job, and states from which each can foretell what is published.

The first ranks publish, as a group of their own, the others receive.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from slots import SlotTransport

import holdfast
from holdfast.dtypes import ITEMSIZE

TIMEOUT_S = 20.0
NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: pip install 'holdfast[nixl]'")
KINDS = ["shared memory", "gloo", pytest.param("nixl", marks=NEEDS_NIXL)]
STAGED = ("shared memory", "gloo", "nixl")
"""Kinds whose publishers wait for no receiver."""
DTYPES = tuple(getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name))
"""All that Holdfast stores, as far as this torch has them."""


def transport_of(kind: str, place: Path, group: Any = None) -> Any:
    if kind == "shared memory":
        return holdfast.sync.SharedMemoryTransport(place, process_group=group, peer_timeout_s=10.0)
    if kind == "slots":
        return SlotTransport(place, process_group=group, peer_timeout_s=10.0)
    if kind == "nixl":
        return holdfast.sync.NixlTransport(place, process_group=group, peer_timeout_s=10.0)
    return holdfast.sync.ProcessGroupTransport(place, "gloo", process_group=group, peer_timeout_s=10.0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().contiguous()
    return local.reshape(-1).view(torch.uint8) if local.numel() else torch.empty(0, dtype=torch.uint8)


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(bits(found[name]), bits(tensor)), f"{what}: {name} differs"


def whole_of(version: int) -> dict[str, torch.Tensor]:
    """A small state with every dtype, and shapes that are easy to get wrong; the values follow from the version."""
    generator = torch.Generator().manual_seed(version)
    state: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 256, (13 * 6 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        raw = raw % 2 if dtype == torch.bool else raw
        state[f"of.{str(dtype).removeprefix('torch.')}"] = raw.view(dtype).view(13, 6)
    state["scalar"] = torch.tensor(float(version))
    state["none"] = torch.empty(0, 4)
    state["turned"] = torch.randn(5, 9, generator=generator).t()
    state["large"] = torch.randn(50, 40, generator=generator)
    return state


def sharded(whole: dict[str, torch.Tensor], mesh: DeviceMesh, dim: int) -> dict[str, torch.Tensor]:
    """Those of two dimensions cut along ``dim``; each rank has the same whole state to begin with."""
    return {
        name: distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None) if tensor.dim() == 2 else tensor
        for name, tensor in whole.items()
    }


def roles(publishers: int) -> tuple[bool, Any, DeviceMesh | None]:
    """Whether this rank publishes, the group and the mesh of its role; the mesh is None for one alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sides = [list(range(publishers)), list(range(publishers, world))]
    groups = [dist.new_group(side) for side in sides]
    mine = 0 if rank < publishers else 1
    mesh = DeviceMesh.from_group(groups[mine], "cpu") if len(sides[mine]) > 1 else None
    return not mine, groups[mine], mesh
