"""Exports of pipelines: each rank has a list of its own stages, nobody the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from _export_models import stages_of, tiny_model

import holdfast
from holdfast.errors import ConfigError

pytest.importorskip("transformers")


def loads_as_whole(export: Path, model: Any, what: str) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value.to(torch.bfloat16).float()), f"{what}: {name}"


def stages_come_back(state: Any, export: Path, what: str) -> None:
    expected = {name: value.clone() for stage in _listed(state) for name, value in stage.state_dict().items()}
    for stage in _listed(state):
        for parameter in stage.parameters():
            parameter.data.zero_()
    holdfast.load(state, export)
    for stage in _listed(state):
        for name, value in stage.state_dict().items():
            assert torch.equal(value, expected[name].to(torch.bfloat16).to(value.dtype)), f"{what}: {name}"
            value.copy_(expected[name])


def _listed(state: Any) -> list[Any]:
    return state["model"] if isinstance(state["model"], list) else [state["model"]]


def export_stages(place: str) -> None:
    rank, root = dist.get_rank(), Path(place)
    for kind in ("llama", "qwen3-moe"):
        model = tiny_model(kind)
        for parameter in model.parameters():  # another one on each rank until now
            dist.broadcast(parameter.data, 0)
        mine = [stages_of(model)[rank]]
        for key, state in {"list": {"model": mine}, "module": {"model": mine[0]}}.items():
            export = holdfast.export_hf(state, root / kind / key, dtype=torch.bfloat16)
            loads_as_whole(export, model, f"{kind}, {key}")
            stages_come_back(state, export, f"{kind}, {key}")
        hf = holdfast.HFExport(root / kind / "hf", every=1, dtype=torch.bfloat16)
        with holdfast.CheckpointManager(root / kind / "run", {"model": mine}, exports=[hf]) as manager:
            manager.step(1)
        loads_as_whole(root / kind / "hf" / "hf-latest", model, f"{kind}, manager")
        whole = holdfast.export_hf({"model": [model]}, root / kind / "whole", dtype=torch.bfloat16)
        loads_as_whole(whole, model, f"{kind}, all on each rank")


def export_uneven_stages(place: str) -> None:
    """What only one rank can know of its stages, a tie or the kind of a layer, doesn't make the ranks disagree."""
    rank, root = dist.get_rank(), Path(place)
    torch.manual_seed(0)
    embed, proj, head = nn.Embedding(256, 128), nn.Linear(128, 128), nn.Linear(128, 256, bias=False)
    head.weight = embed.weight
    stages = [nn.ModuleDict({"embed": embed}), nn.ModuleDict({"head": head})]
    mine = stages if rank == 0 else [nn.ModuleDict({"proj": proj})]
    export = holdfast.export_hf({"model": mine}, root / "tied")
    found = load_file(export / "model.safetensors")
    assert torch.equal(found["head.weight"], embed.weight)
    assert torch.equal(found["embed.weight"], embed.weight)
    assert torch.equal(found["proj.weight"], proj.weight)
    export = holdfast.export_hf({"model": mine}, root / "float8", dtype=torch.float8_e4m3fn)
    assert "proj.weight_scale_inv" in load_file(export / "model.safetensors")
    odd = mine if rank == 0 else [nn.ModuleDict({"proj": nn.Embedding(128, 128)})]
    try:
        holdfast.export_hf({"model": odd}, root / "odd", dtype=torch.float8_e4m3fn)
    except (ConfigError, holdfast.SaveFailed) as error:
        said = str(error)
    else:
        said = "exported"
    assert "proj.weight" in said, said
    assert not (root / "odd").exists()


def jobs(place: str) -> None:
    export_stages(place)
    export_uneven_stages(place)


def test_stages_of_two_ranks_are_one_model(tmp_path: Path) -> None:
    run_job(jobs, nproc=2, args=[tmp_path])
