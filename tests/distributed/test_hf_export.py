"""Exports by several ranks are what `save_pretrained` of the gathered model writes, byte for byte, and load as such.

What `from_pretrained` makes of them computes what the gathered model does, to the last bit.
"""

from __future__ import annotations

import copy
import filecmp
import os
import sys
from pathlib import Path
from typing import Any

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


def logits_of(model: Any) -> torch.Tensor:
    """Of some tokens; for a model that sees, with an image among them."""
    tokens = torch.arange(10, 22).unsqueeze(0)
    seen: dict[str, torch.Tensor] = {}
    if hasattr(model.config, "vision_config"):
        patch = model.config.vision_config.patch_size**2 * model.config.vision_config.temporal_patch_size * 3
        tokens[0, 1:7] = torch.tensor([7, 5, 5, 5, 5, 8])  # an image of 4 x 4 patches, of which four make a token
        pixels = torch.linspace(-1, 1, 16 * patch).view(16, patch)
        seen = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens, **seen).logits
    assert found.isfinite().all()
    assert found.std() > 0
    return found


def same_logits(export: Path, model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Plain `from_pretrained` has a model that computes what ``model`` does once its weights have that ``dtype``."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    gathered = copy.deepcopy(model)
    for parameter in gathered.parameters():  # and nothing else: `to` would cast tables that no export has
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    auto = AutoModelForImageTextToText if hasattr(gathered.config, "vision_config") else AutoModelForCausalLM
    loaded = auto.from_pretrained(export, dtype="auto")
    assert type(loaded) is type(model)
    found, expected = logits_of(loaded), logits_of(gathered)
    assert found.dtype == expected.dtype == (dtype or torch.float32)
    assert torch.equal(found, expected), f"{export}: logits differ by up to {(found - expected).abs().max()}"


def shard_layers(model: torch.nn.Module, mesh: object) -> None:
    for module in list(model.modules()):
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                if not isinstance(layer, torch.nn.ModuleList):
                    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def export_fsdp(place: str) -> None:
    root, rank = Path(place), dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in ("llama-tied", "qwen3", "qwen3-moe", "mixtral", "gpt2", "qwen2.5-vl"):
        model = tiny_model(kind)
        for dtype in (None, torch.bfloat16):
            reference, target = root / f"{kind}-{dtype}-reference", root / f"{kind}-{dtype}"
            if rank == 0:
                reference_of(model, dtype, reference)
            sharded = copy.deepcopy(model)
            shard_layers(sharded, mesh)
            path = holdfast.export_hf({"model": sharded}, target, dtype=dtype, max_shard_bytes=SHARD_BYTES)
            assert path == target
            if rank == 0:
                same_files(reference, target)
                assert holdfast.open(target).verify().ok
                same_logits(target, model, dtype)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_models_that_fsdp_has_sharded(ranks: int, tmp_path: Path) -> None:
    run_job(export_fsdp, nproc=ranks, args=[tmp_path])


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


def export_from_a_manager(place: str) -> None:
    """Exports between checkpoints and with them; published while training goes on, without any further call."""
    root, rank = Path(place), dist.get_rank()
    torch.manual_seed(0)
    model = tiny_model("llama-tied")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_layers(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    published: list[tuple[str, int]] = []
    stop = holdfast.add_hook(
        lambda event: published.append((event.kind, event.step)) if event.kind == "export.published" else None
    )
    export = holdfast.HFExport(root / "hf", every=1, keep=holdfast.Keep(last=2), dtype="bfloat16")
    config = holdfast.CheckpointConfig(every=2)
    state = {"model": model, "optimizer": optimizer}
    last: dict[str, torch.Tensor] = {}
    with holdfast.CheckpointManager(root / "checkpoints", state, config=config, exports=[export]) as manager:
        for step in range(1, 5):
            tokens = torch.randint(0, model.config.vocab_size, (2, 8))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            before = holdfast.statistics()["captures"]
            handles = manager.step(step)
            assert len(handles) == (2 if step % 2 == 0 else 1)
            assert handles[-1].path == str(root / "hf" / f"hf-{step}")
            for handle in handles:
                assert handle.exception(60) is None
            assert published[-1] == ("export.published", step), "before the next one is due"
            assert holdfast.statistics()["captures"] - before == 1, "one copy of the state for all that is due"
            last = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    stop()
    if rank == 0:
        assert sorted(os.listdir(root / "hf")) == [".holdfast", "hf-3", "hf-4", "hf-latest"]
        assert os.readlink(root / "hf" / "hf-latest") == "hf-4"
        loaded = type(tiny_model("llama-tied")).from_pretrained(root / "hf" / "hf-latest", dtype="auto")
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, last[name].to(torch.bfloat16)), name
    dist.barrier()


def test_a_manager_exports_as_it_goes_on(tmp_path: Path) -> None:
    run_job(export_from_a_manager, nproc=2, args=[tmp_path])
