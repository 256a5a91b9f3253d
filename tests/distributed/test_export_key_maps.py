"""The default map of models that FSDP2 has sharded is that of the models themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from launch import run_job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_models import sources_of, tiny_model

from holdfast.keymap.compile import compile_key_map

pytest.importorskip("transformers")


def check_sharded_models() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("llama-tied", "qwen3-moe", "mixtral", "qwen2.5-vl", "llava"):
        model = tiny_model(kind)
        expected = compile_key_map(None, sources_of(model.state_dict()), dtype=torch.bfloat16, model=model)
        for module in list(model.modules()):
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    if not isinstance(layer, torch.nn.ModuleList):
                        fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        before = {name: type(module) for name, module in model.named_modules()}
        sharded = compile_key_map(None, sources_of(model.state_dict()), dtype=torch.bfloat16, model=model)
        assert sharded == expected, kind
        assert before == {name: type(module) for name, module in model.named_modules()}


def test_sharded_models_have_the_map_of_the_model() -> None:
    run_job(check_sharded_models, nproc=2)
