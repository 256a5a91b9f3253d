"""What travels from a trainer that is sharded: Hugging Face names in bfloat16 or fp8, to workers that take slices.

Two ranks of the job train with FSDP2 and publish. The others are workers of tensor parallelism: each holds half of
every matrix, as plain tensors, and has no process group with the trainer, nor DTensors. What they get has to be, bit
for bit, what an export of the whole model writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import fused_and_interleaved, tiny
from launch import run_job
from safetensors.torch import load_file
from sync_sides import roles, transport_of
from test_export_fp8 import net
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import ConfigError, HoldfastError
from holdfast.export import HFDefault
from holdfast.sync.weights import tiles

PUBLISHERS = 2
TIMEOUT_S = 40.0
KINDS = ("directory", "shared memory", "shared memory, kept", "gloo")


def sides(kind: str, place: str) -> tuple[bool, Any, Any, bool]:
    """Whether this rank publishes, the mesh of its role, the transport, and ``bypass_cpu``."""
    publishes, group, mesh = roles(PUBLISHERS)
    if kind == "directory":
        return publishes, mesh, holdfast.sync.DirectoryTransport(place, process_group=group), True
    transport = transport_of(kind.partition(",")[0], Path(place), group)
    return publishes, mesh, transport, not kind.endswith("kept")


def halves(expected: dict[str, torch.Tensor], half: int) -> dict[str, Any]:
    """Empty memory for this worker's half of each matrix, by rows or by columns, and for all of the rest."""
    found: dict[str, Any] = {}
    for number, (name, tensor) in enumerate(expected.items()):
        dim = number % 2
        if tensor.dim() < 2 or tensor.shape[dim] < 2:
            found[name] = torch.zeros_like(tensor)
            continue
        cut = tensor.shape[dim] // 2
        start, size = (0, cut) if half == 0 else (cut, tensor.shape[dim] - cut)
        part = torch.zeros_like(tensor.narrow(dim, start, size), memory_format=torch.contiguous_format)
        offset = [start if dim == axis else 0 for axis in range(tensor.dim())]
        found[name] = holdfast.Shard(part, tensor.shape, offset)
    return found


def assert_halves(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        mine = found[name]
        if isinstance(mine, holdfast.Shard):
            for dim, (start, size) in enumerate(zip(mine.global_offset, mine.tensor.shape, strict=True)):
                tensor = tensor.narrow(dim, start, size)
            mine = mine.tensor
        one, other = (bits.contiguous().reshape(-1).view(torch.uint8) for bits in (mine, tensor))
        assert torch.equal(one, other), name


def exported(model: Any, place: str, **options: Any) -> dict[str, torch.Tensor]:
    """What an export of the whole ``model`` has, made on the first worker, and told to the other ones."""
    out = Path(place).with_name(f"hf-of-{dist.get_rank()}")
    holdfast.export_hf(model, out, process_group="alone", overwrite=True, **options)
    return load_file(out / "model.safetensors")


def changed(model: nn.Module, version: int) -> None:
    """The update between versions: every rank, and every worker for itself, can make it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 if version == 1 else -1.5)


def a_model_in_slices(place: str, kind: str, model_kind: str, layout: str) -> None:
    publishes, mesh, transport, bypass = sides(kind, place)
    model = tiny(model_kind, seed=5)
    key_map = HFDefault() if layout == "default" else [HFDefault(), fused_and_interleaved]
    options = {"key_map": key_map, "dtype": torch.bfloat16, "fp32_keys": ["norm"]}
    if publishes:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tiles.TENSOR_BYTES_MIN = tiles.ROW_BYTES_MIN = 1  # type: ignore[misc]  # the model is small
        columns = 1 if kind == "shared memory" else 3
        with holdfast.sync.Publisher(
            transport, bypass_cpu=bypass, receivers=2, column_tiles=columns, **options
        ) as publisher:
            for version in (1, 2):
                changed(model, version)
                publisher.publish(model, version, timeout=TIMEOUT_S)
                dist.barrier()
        return
    with holdfast.sync.Receiver(transport) as receiver:
        mine: dict[str, Any] = {}
        for version in (1, 2):
            changed(model, version)
            expected = exported(model, place, **options)
            mine = mine or halves(expected, dist.get_rank() - PUBLISHERS)
            assert receiver.receive(mine, timeout=TIMEOUT_S, streaming=version == 2) == version
            assert_halves(mine, expected)
            dist.barrier()


def fp8_in_slices(place: str, kind: str) -> None:
    """Most blocks of scales lie on both ranks of the trainer."""
    publishes, mesh, transport, bypass = sides(kind, place)
    model = net("small")
    if publishes:
        fully_shard(model, mesh=mesh)
        with holdfast.sync.Publisher(transport, bypass_cpu=bypass, receivers=2, dtype="float8_e4m3fn") as publisher:
            for version in (1, 2):
                changed(model, version)
                publisher.publish(model, version, timeout=TIMEOUT_S)
                dist.barrier()
            # What fails on one rank fails on both, and the next version is published all the same.
            given: Any = model if dist.get_rank() == 0 else 3
            with pytest.raises(HoldfastError):
                publisher.publish(given, 3, timeout=TIMEOUT_S)
            publisher.publish(model, 4, timeout=TIMEOUT_S)
            dist.barrier()
        return
    with holdfast.sync.Receiver(transport) as receiver:
        mine: dict[str, Any] = {}
        for version in (1, 2, 4):
            if version != 4:
                changed(model, version)
            expected = exported(model, place, dtype="float8_e4m3fn")
            assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in expected.values()) == 3
            mine = mine or halves(expected, dist.get_rank() - PUBLISHERS)
            assert receiver.receive(mine, timeout=TIMEOUT_S) == version
            assert_halves(mine, expected)
            dist.barrier()


def other_matrices_on_each_rank(place: str) -> None:
    publishes, _, transport, _ = sides("directory", place)
    if publishes:
        weights = {f"layers.{dist.get_rank()}.up_proj.weight": torch.ones(4, 4)}
        with (
            holdfast.sync.Publisher(transport, dtype="float8_e4m3fn") as publisher,
            pytest.raises(ConfigError, match="other matrices"),
        ):
            publisher.publish(weights, 1, timeout=TIMEOUT_S)
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("model_kind", "layout"), [("qwen3", "default"), ("qwen3_moe", "default"), ("qwen3", "fused")])
def test_workers_take_slices_of_a_model(tmp_path: Path, kind: str, model_kind: str, layout: str) -> None:
    run_job(a_model_in_slices, nproc=4, args=[tmp_path / "versions", kind, model_kind, layout])


@pytest.mark.parametrize("kind", KINDS)
def test_workers_take_slices_of_fp8(tmp_path: Path, kind: str) -> None:
    run_job(fp8_in_slices, nproc=4, args=[tmp_path / "versions", kind])


def test_scales_need_all_ranks(tmp_path: Path) -> None:
    run_job(other_matrices_on_each_rank, nproc=4, args=[tmp_path / "versions"])
