"""Exports in 8-bit floats with block scales: by several ranks, byte for byte what one rank with everything writes.

Sizes are odd and no multiple of a block, so that most scales are of blocks which lie on several ranks.
"""

from __future__ import annotations

import filecmp
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from launch import run_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

BLOCK = 128


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.norm = nn.LayerNorm(width)


class Net(nn.Module):
    def __init__(self, width: int, inner: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(37, width)
        self.layers = nn.ModuleList([Layer(width, inner) for _ in range(layers)])
        generator = torch.Generator().manual_seed(width)
        with torch.no_grad():
            for parameter in self.parameters():
                # Every block has a largest element of its own, and wherever it is another rank has smaller ones.
                spread = torch.logspace(-4, 4, parameter.numel()).view_as(parameter)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        self.to(dtype)


def net(size: str) -> Net:
    """By name, for arguments travel as strings."""
    if size == "small":
        return Net(150, 301, 1, torch.float32)
    return Net(771, 1533, 2, torch.bfloat16)


def by_rows(model: Net) -> None:
    """FSDP2."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_rows_and_columns(model: Net) -> None:
    """Tensor parallel, on top of FSDP2 where there are ranks for both."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"q_proj": ColwiseParallel(), "gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
        if world > 2:
            fully_shard(layer, mesh=mesh["data"])
    if world > 2:
        fully_shard(model, mesh=mesh["data"])


def export(model: nn.Module, root: Path, size: str) -> Path:
    """By a manager, which has all options."""
    exports = holdfast.HFExport(
        root / "hf",
        every=1,
        dtype=torch.float8_e4m3fn,
        fp32_keys=[r"gate_proj\.weight$"],
        assets=root.parent / "assets",
        max_shard_bytes=100_000 if size == "small" else 2 << 20,
    )
    config = holdfast.CheckpointConfig(every=None)
    with holdfast.CheckpointManager(root / "checkpoints", {"model": model}, config=config, exports=[exports]) as made:
        (handle,) = made.step(1)
        handle.result(60)
    return root / "hf" / "hf-1"


def files_of(directory: Path) -> list[str]:
    """All but what says who has written."""
    return sorted(name for name in os.listdir(directory) if name != "holdfast.json" and not name.endswith(".report"))


def exports_the_same(place: str, size: str) -> None:
    """As the export of one rank, which is there."""
    home = Path(place)
    for shard in (by_rows, by_rows_and_columns):
        model = net(size)
        shard(model)
        found = export(model, home / shard.__name__, size)
        if dist.get_rank() == 0:
            whole = home / "whole" / "hf" / "hf-1"
            assert files_of(found) == files_of(whole)
            different = [name for name in files_of(whole) if not filecmp.cmp(found / name, whole / name, shallow=False)]
            assert not different, f"{shard.__name__}: {different}"
            assert holdfast.open(found).verify().ok
        dist.barrier()


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found.update(safetensors.torch.load_file(path))
    return found


def check_meaning(directory: Path, model: Net) -> None:
    """What was quantized means what the model holds, as closely as 8 bits say it; the others are what it holds."""
    found: dict[str, Any] = tensors_in(directory)
    scales = {name for name in found if name.endswith("_scale_inv")}
    assert {name.removesuffix("_scale_inv") for name in scales} == {
        name for name in found if name.endswith(("q_proj.weight", "down_proj.weight"))
    }
    for name, tensor in model.state_dict().items():
        if f"{name}_scale_inv" not in scales:
            assert found[name].dtype == (torch.float32 if name.endswith("gate_proj.weight") else tensor.dtype)
            assert torch.equal(found[name], tensor.to(found[name].dtype)), name
            continue
        assert found[name].dtype == torch.float8_e4m3fn
        scale = found[f"{name}_scale_inv"]
        rows, columns = tensor.shape
        assert scale.shape == (-(-rows // BLOCK), -(-columns // BLOCK))
        each = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        error = (found[name].float() * each - tensor.float()).abs()
        # Half of the last of three bits, or of the smallest step that there is, 2**-9 times the scale.
        assert bool((error <= torch.maximum(tensor.float().abs() * 2.0**-4, each * 2.0**-10) * 1.001).all()), name
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [BLOCK, BLOCK]


@pytest.mark.parametrize(
    ("size", "ranks"),
    [("small", 2), pytest.param("large", 2, marks=pytest.mark.slow), pytest.param("large", 4, marks=pytest.mark.slow)],
)
def test_ranks_together_write_what_one_rank_writes(size: str, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text('{"model_type": "llama"}')
    model = net(size)
    check_meaning(export(model, tmp_path / "whole", size), model)
    run_job(exports_the_same, nproc=ranks, args=[tmp_path, size])
