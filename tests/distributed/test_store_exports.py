"""Exports by several ranks to an object store: each file is written whole by one of them, and nothing is gathered."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))

from _export_models import tiny_model
from _object_server import Server
from _on_stores import as_vllm_reads, downloaded, set_environment

import holdfast
from holdfast.export.verify import verify_export

pytest.importorskip("transformers")

SHARD_BYTES = 16_000


def same(url: str, directory: Path, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """A download of ``url`` is what transformers makes ``model`` of."""
    from transformers import AutoModelForCausalLM

    there = downloaded(url, directory)
    loaded = AutoModelForCausalLM.from_pretrained(there, dtype="auto").state_dict()
    expected = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    assert as_vllm_reads(there), "each once"
    assert verify_export(url) == ()
    assert holdfast.open(url).verify().ok
    assert holdfast.open(there).verify().ok


def export_to_a_store(endpoint: str, bucket: str, place: str) -> None:
    set_environment(endpoint)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for kind in ("llama-tied", "qwen3-moe"):
        model = tiny_model(kind)
        sharded = copy.deepcopy(model)
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        url = f"s3://{bucket}/{kind}"
        assert holdfast.export_hf({"model": sharded}, url, dtype="bfloat16", max_shard_bytes=SHARD_BYTES) == url
        manifest = holdfast.open(url).manifest
        assert manifest is not None
        written = [report.nbytes for report in manifest.reports]
        assert len(written) == world
        assert max(written) <= sum(written) / world + 2 * SHARD_BYTES, "an even share, and one file"
        assert sum(nbytes > 0 for nbytes in written) >= min(world, 3), "of three files or more"
        if rank == 0:
            same(url, Path(place) / kind, model, torch.bfloat16)
        # Back into a sharded model, straight from the store.
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.zero_()
        holdfast.load({"model": sharded}, url)
        for name, tensor in sharded.state_dict().items():
            whole = tensor.full_tensor()
            assert torch.equal(whole, model.state_dict()[name].to(torch.bfloat16).to(whole.dtype)), name
        dist.barrier()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_models_that_fsdp_has_sharded(ranks: int, object_server: Server, tmp_path: Path) -> None:
    run_job(export_to_a_store, nproc=ranks, args=[object_server.endpoint, object_server.bucket(), tmp_path])


def export_a_checkpoint(endpoint: str, bucket: str, place: str) -> None:
    """What lies on a bucket goes to a directory and to a bucket."""
    set_environment(endpoint)
    rank = dist.get_rank()
    model = tiny_model("llama")
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    holdfast.save({"model": sharded}, f"s3://{bucket}/step-1")
    checkpoint = holdfast.open(f"s3://{bucket}/step-1")
    for out in (f"{place}/hf", f"s3://{bucket}/hf"):
        found = holdfast.export_hf(checkpoint, out, assets=model.config, max_shard_bytes=SHARD_BYTES)
        assert str(found) == out
    if rank == 0:
        same(f"s3://{bucket}/hf", Path(place) / "copy", model, torch.float32)
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(f"{place}/hf").state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    dist.barrier()


def test_checkpoints_on_a_store(object_server: Server, tmp_path: Path) -> None:
    run_job(export_a_checkpoint, nproc=2, args=[object_server.endpoint, object_server.bucket(), tmp_path])


def export_from_a_manager(endpoint: str, bucket: str, place: str) -> None:
    set_environment(endpoint)
    model = tiny_model("llama")
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    export = holdfast.HFExport(
        f"s3://{bucket}/hf", every=1, keep=holdfast.Keep(last=1), max_shard_bytes=SHARD_BYTES, dtype="bfloat16"
    )
    with holdfast.CheckpointManager(f"s3://{bucket}/run", {"model": sharded}, exports=[export]) as manager:
        for step in (1, 2):
            for handle in manager.step(step):
                assert handle.exception(60) is None
    if dist.get_rank() == 0:
        same(f"s3://{bucket}/hf/hf-2", Path(place) / "hf", model, torch.bfloat16)
        index = json.loads((Path(place) / "hf" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        from obstore.store import from_url

        listed = from_url(f"s3://{bucket}/hf", client_options={"allow_http": True}).list_with_delimiter()
        assert [name for name in listed["common_prefixes"] if "hf-" in name] == ["hf-2"]
    dist.barrier()


def test_a_manager_exports_as_it_goes_on(object_server: Server, tmp_path: Path) -> None:
    run_job(export_from_a_manager, nproc=2, args=[object_server.endpoint, object_server.bucket(), tmp_path])
