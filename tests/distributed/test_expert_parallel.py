"""Experts on ranks of their own: exported as `save_pretrained` of the gathered model writes them, and read back so.

The stacked parameters of the experts (`mlp.experts.gate_up_proj`, `down_proj`) are divided by expert; on disk each
expert has tensors of its own, which one rank has whole, or several have parts of where FSDP divides them once more.
"""

from __future__ import annotations

import copy
import filecmp
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytest.importorskip("transformers", minversion="5.0")

sys.path.insert(0, str(Path(__file__).parent))

from hf_models import tiny
from launch import run_job

import holdfast

SHARDED_BYTES = 8_000


def experts_of(model: nn.Module) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert found
    assert all(parameter.dim() == 3 for module in found for parameter in module.parameters())
    return found


def divide_by_expert(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in experts_of(model):
        for name, parameter in list(module.named_parameters()):
            placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(placed))


# ways to divide ------------------------------------------------------------------------------------------------------


def experts_only(model: nn.Module) -> nn.Module:
    """Each rank has some of the experts, and all else."""
    divide_by_expert(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    return model


def beside_fsdp(model: nn.Module, replicas: int, dim: int) -> nn.Module:
    """As torchtitan does: experts over (efsdp, ep), FSDP2 dividing them along ``dim``; all else by FSDP2 over all."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("efsdp", "ep"))
    everyone = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    divide_by_expert(model, mesh["ep"])
    for module in experts_of(model):
        fully_shard(module, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(dim))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def by_transformers(model: nn.Module) -> nn.Module:
    """Its own expert parallelism, which replaces the experts' ``forward`` and their number, too."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    plan = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            plan.update({f"{name}.{parameter}": "grouped_gemm" for parameter, _ in module.named_parameters()})
            plan[name] = "ep_dispatch_experts"
    return apply_expert_parallelism(model, world, world, plan)


WAYS: dict[str, Callable[[Any], Any]] = {
    "experts only": experts_only,
    "experts, all of them everywhere": lambda model: beside_fsdp(model, dist.get_world_size(), 0),
    "experts beside FSDP": lambda model: beside_fsdp(model, 1, 0),
    "experts under FSDP": lambda model: beside_fsdp(model, 2, 0),
    "experts under FSDP by rows": lambda model: beside_fsdp(model, 2, 1),
    "by transformers": by_transformers,
}


# on the ranks --------------------------------------------------------------------------------------------------------


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_exported(reference: Path, export: Path) -> None:
    names = sorted(os.listdir(reference))
    assert "model.safetensors.index.json" in names
    assert set(names) <= set(os.listdir(export))
    assert filecmp.cmpfiles(reference, export, names, shallow=False) == (names, [], [])
    assert holdfast.open(export).verify().ok


def assert_read_back(
    directory: Path, fresh: nn.Module, expected: nn.Module, dtype: torch.dtype, *, counted: bool
) -> None:
    """``fresh`` gets what ``expected`` has; of the directory each rank reads what it holds, and nothing twice."""
    for parameter in fresh.parameters():
        local_of(parameter).fill_(77)
    before = holdfast.statistics()["bytes_read"]
    holdfast.load({"model": fresh}, directory)
    read = holdfast.statistics()["bytes_read"] - before
    held = 0
    for (name, found), (_, original) in zip(fresh.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(local_of(found), local_of(original).to(dtype).float()), name
        held += local_of(found).numel() * dtype.itemsize
    assert read == held or not counted, f"{read} bytes were read, of {held} that are held"


def exports_and_reads_back(place: str, kind: str, *ways: str) -> None:
    root = Path(place)
    model = tiny(kind, seed=1)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dist.get_rank() == 0:
        for name, dtype in dtypes.items():
            copy.deepcopy(model).to(dtype).save_pretrained(root / name, max_shard_size=SHARDED_BYTES)
    whole = sum(parameter.numel() for module in experts_of(model) for parameter in module.parameters())
    for way in ways:
        divided, fresh = WAYS[way](copy.deepcopy(model)), WAYS[way](tiny(kind, seed=2))
        held = sum(local_of(parameter).numel() for module in experts_of(divided) for parameter in module.parameters())
        assert held < 0.7 * whole, f"{way}: the experts are not divided"
        for name, dtype in dtypes.items():
            out = root / f"{way} in {name}"
            export = holdfast.export_hf({"model": divided}, out, dtype=dtype, max_shard_bytes=SHARDED_BYTES)
            if dist.get_rank() == 0:
                assert_exported(root / name, export)
            assert_read_back(root / name, fresh, divided, dtype, counted=True)
            assert_read_back(export, fresh, divided, dtype, counted=False)  # whole extents, to verify them


SLOW = pytest.mark.slow
EVEN = tuple(WAYS)
UNEVEN = tuple(way for way in WAYS if way != "by transformers")
"""Five experts are for us to divide: transformers divides evenly only."""


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("qwen3_moe", ("experts only", "experts beside FSDP")),
        ("mixtral", ("by transformers", "experts beside FSDP")),
        pytest.param("qwen3_moe_even", EVEN, marks=SLOW),
        pytest.param("qwen3_moe", UNEVEN, marks=SLOW),
        pytest.param("mixtral", EVEN, marks=SLOW),
    ],
)
def test_two_ranks(kind: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    run_job(exports_and_reads_back, nproc=2, args=[tmp_path, kind, *ways])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ways"), [("qwen3_moe", UNEVEN), ("qwen3_moe_even", EVEN), ("mixtral", EVEN)])
def test_four_ranks(kind: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    run_job(exports_and_reads_back, nproc=4, args=[tmp_path, kind, *ways])
