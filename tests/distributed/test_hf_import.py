"""Hugging Face directories into sharded models: what from_pretrained would have, and each rank reads only its part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytest.importorskip("transformers", minversion="5.0")

sys.path.insert(0, str(Path(__file__).parent))

from hf_models import KINDS, fused_and_interleaved, tiny
from launch import run_job

import holdfast
from holdfast.errors import CheckpointCorrupt, StateMismatch

SHARDED = "20KB"
PLAN: dict[str, Any] = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of model, as `save_pretrained` writes it: in one file, and in several."""
    root = tmp_path_factory.mktemp("hf")
    for kind in KINDS:
        model = tiny(kind, seed=1)
        model.save_pretrained(root / kind / "float32")
        model.to(torch.bfloat16).save_pretrained(root / kind / "bfloat16", max_shard_size=SHARDED)
    mapped = root / "mapped" / "float32"
    mapped.mkdir(parents=True)
    tensors = fused_and_interleaved(dict(tiny("qwen3", seed=1).state_dict()))
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, mapped / "model.safetensors")
    return root


# ways to shard ---------------------------------------------------------------------------------------------------


def fsdp(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())):  # what is inside comes first
        if type(module).__name__.endswith(("Layer", "Block")):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def every_dimension(model: Any) -> Any:
    """Each tensor cut along a dimension of its own, evenly or not: experts, rows and columns, of whatever kind."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                dim = len(made) % max(1, parameter.dim())
                made[id(parameter)] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)]))
                model.kept_alive = [*getattr(model, "kept_alive", []), parameter]
            module.register_parameter(name, made[id(parameter)])
    del model.kept_alive
    return model


def tensor_parallel(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(), "model.embed_tokens": RowwiseParallel()})


def both(model: Any) -> Any:
    """FSDP2 over tensor parallelism: shards of shards, in strides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


WAYS = {way.__name__: way for way in (fsdp, every_dimension, tensor_parallel, both)}


# on the ranks ----------------------------------------------------------------------------------------------------


def assert_loaded(model: Any, directory: Path, *, itemsize: int, like: Path | None = None, key_map: Any = None) -> None:
    """Every tensor is what `from_pretrained` has; every byte that was read is of this rank's part, and read once."""
    before = holdfast.statistics()["bytes_read"]
    holdfast.load({"model": model}, directory, key_map=key_map)
    read = holdfast.statistics()["bytes_read"] - before
    like = like or directory
    reference = type(tiny(like.parent.name, seed=2)).from_pretrained(like, dtype=torch.float32)
    expected = reference.state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    held: dict[int, int] = {}
    for name, value in found.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, expected[name]), name
    for value in (*model.parameters(), *model.buffers()):
        if isinstance(value, nn.Parameter):
            local = value.to_local() if isinstance(value, DTensor) else value
            held[id(value)] = local.numel() * itemsize
    assert read == sum(held.values()), f"{read} bytes were read, of {sum(held.values())} that are held"


def loads_as_from_pretrained(root: str, kind: str, *ways: str) -> None:
    for way in ways:
        assert_loaded(WAYS[way](tiny(kind, seed=3)), Path(root) / kind / "float32", itemsize=4)
        assert_loaded(WAYS[way](tiny(kind, seed=4)), Path(root) / kind / "bfloat16", itemsize=2)


# Of the tied Llama, tensor parallelism makes two parameters of one stored tensor. Both are read through a buffer where
# they are converted, and a thread that has just read the bytes for one doesn't read them again for the other: whether
# they are counted once or twice depends on who takes the jobs. What is loaded is right either way.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "llama" else kind for kind in KINDS]
)
def test_two_ranks_have_what_from_pretrained_has(exports: Path, kind: str) -> None:
    ways = ["fsdp", "every_dimension", *(["tensor_parallel"] if kind in ("llama", "qwen3") else [])]
    run_job(loads_as_from_pretrained, nproc=2, args=[exports, kind, *ways])


def test_four_ranks_with_two_kinds_of_parallelism(exports: Path) -> None:
    run_job(loads_as_from_pretrained, nproc=4, args=[exports, "qwen3", "both"])
    run_job(loads_as_from_pretrained, nproc=4, args=[exports, "mixtral", "every_dimension", "fsdp"])


def loads_by_a_key_map(root: str, *ways: str) -> None:
    plain, mapped = Path(root) / "qwen3" / "float32", Path(root) / "mapped" / "float32"
    for way in ways:
        model = WAYS[way](tiny("qwen3", seed=3))
        assert_loaded(model, mapped, itemsize=4, like=plain, key_map=fused_and_interleaved)


def test_a_key_map_backwards_into_every_kind_of_shard(exports: Path) -> None:
    run_job(loads_by_a_key_map, nproc=2, args=[exports, "fsdp", "every_dimension", "tensor_parallel"])
    run_job(loads_by_a_key_map, nproc=4, args=[exports, "both", "every_dimension"])


def failures_are_the_same_everywhere(root: str) -> None:
    model = fsdp(tiny("llama", seed=3))
    before = {name: value.to_local().clone() for name, value in model.named_parameters()}
    seen: list[Any] = [None, None]
    errors = []
    for directory, kind in (("qwen3/float32", StateMismatch), ("damaged", CheckpointCorrupt)):
        with pytest.raises(kind) as caught:
            holdfast.load({"model": model}, Path(root) / directory)
        errors.append(type(caught.value).__name__)
    dist.all_gather_object(seen, errors)
    assert seen[0] == seen[1] == ["StateMismatch", "CheckpointCorrupt"]
    for name, value in model.named_parameters():
        assert torch.equal(value.to_local(), before[name])


def test_what_does_not_fit_or_is_damaged_fails_on_every_rank(exports: Path) -> None:
    damaged = exports / "damaged"
    damaged.mkdir()
    data = (exports / "llama" / "float32" / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(data[:-4])
    run_job(failures_are_the_same_everywhere, nproc=2, args=[exports])


def stages_take_what_is_theirs(root: str) -> None:
    """Pipeline parallelism: each rank has some of the layers, nobody all."""
    model = tiny("qwen3", seed=3)
    expected = type(model).from_pretrained(Path(root) / "qwen3" / "bfloat16", dtype=torch.float32).state_dict()
    stage = nn.Module()
    stage.model = nn.Module()
    if dist.get_rank() == 0:
        stage.model.embed_tokens = model.model.embed_tokens
        stage.model.layers = nn.ModuleDict({"0": model.model.layers[0]})
    else:
        stage.model.layers = nn.ModuleDict({"1": model.model.layers[1]})
        stage.model.norm = model.model.norm
        stage.lm_head = model.lm_head
    before = holdfast.statistics()["bytes_read"]
    holdfast.load({"model": [stage]}, Path(root) / "qwen3" / "bfloat16")
    assert holdfast.statistics()["bytes_read"] - before == sum(p.numel() * 2 for p in stage.parameters())
    for name, value in stage.state_dict().items():
        assert torch.equal(value, expected[name])
    if dist.get_rank() == 1:
        del stage.lm_head
    with pytest.raises(StateMismatch) as caught:
        holdfast.load({"model": [stage]}, Path(root) / "qwen3" / "bfloat16")
    assert caught.value.unexpected == ("model.lm_head.weight",)


def test_pipeline_stages(exports: Path) -> None:
    run_job(stages_take_what_is_theirs, nproc=2, args=[exports])


def starts_from(root: str, runs: str) -> None:
    model = fsdp(tiny("mixtral", seed=3))
    optimizer = torch.optim.AdamW(model.parameters())
    config = holdfast.CheckpointConfig(initial_load_path=Path(root) / "mixtral" / "bfloat16")
    with holdfast.CheckpointManager(runs, {"model": model, "optimizer": optimizer}, config=config) as manager:
        assert manager.restore() is None
    expected = type(tiny("mixtral", seed=2)).from_pretrained(config.initial_load_path, dtype=torch.float32)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name].full_tensor(), value)


def test_a_manager_starts_from_one(exports: Path, tmp_path: Path) -> None:
    run_job(starts_from, nproc=2, args=[exports, tmp_path / "runs"])
