"""Exports of tensor parallel models are what `save_pretrained` of the gathered model writes, byte for byte."""

from __future__ import annotations

import copy
import filecmp
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_models import tiny_model

import holdfast

pytest.importorskip("transformers")

SHARD_BYTES = 100_000


def same_files(reference: Path, export: Path) -> None:
    """Every file that `save_pretrained` wrote is there, with the same bytes."""
    names = sorted(os.listdir(reference))
    assert set(names) <= set(os.listdir(export)), export
    different = [name for name in names if not filecmp.cmp(reference / name, export / name, shallow=False)]
    assert not different, f"{export}: {different}"


def reference_of(model: torch.nn.Module, dtype: torch.dtype | None, target: Path) -> None:
    whole = copy.deepcopy(model)
    if dtype is not None:
        whole = whole.to(dtype)
    whole.save_pretrained(target, max_shard_size=SHARD_BYTES)


def export_tensor_parallel(place: str) -> None:
    """Dim-0 and dim-1 shards of attention and MLP, alone and on top of FSDP2."""
    root, rank, world = Path(place), dist.get_rank(), dist.get_world_size()
    model = tiny_model("llama-tied")
    reference = root / "reference"
    if rank == 0:
        reference_of(model, torch.bfloat16, reference)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
        if world > 2:
            fully_shard(layer, mesh=mesh["data"])
    if world > 2:
        fully_shard(model, mesh=mesh["data"])
    target = holdfast.export_hf(model, root / "export", dtype="bfloat16", max_shard_bytes=SHARD_BYTES)
    if rank == 0:
        same_files(reference, target)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallel_models(ranks: int, tmp_path: Path) -> None:
    run_job(export_tensor_parallel, nproc=ranks, args=[tmp_path])
