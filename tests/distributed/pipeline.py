"""A two-stage pipeline for round trips: each rank holds other modules, and groups of its own that differ in number."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from worlds import ROWS, fill

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STAGES = 2


def make_stage(number: int, tag: str) -> nn.Module:
    layers = nn.ModuleDict({str(number): nn.Linear(8, 8)})
    ends = {"embed": nn.Embedding(ROWS, 8)} if number == 0 else {"head": nn.Linear(8, ROWS)}
    stage = nn.ModuleDict({**ends, "layers": layers})
    fill(stage, tag)
    return stage


def make_optimizer(stages: list[nn.Module], tag: str, *, fresh: bool = False) -> torch.optim.Optimizer:
    """One for all ``stages``: the embedding has a group of its own, which only the rank of the first stage has."""
    named = [item for stage in stages for item in stage.named_parameters()]
    groups = [
        {"params": [param for name, param in named if ("embed" in name) == is_embedding], "lr": rate(tag, word)}
        for word, is_embedding in (("embed", True), ("rest", False))
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    if not fresh:
        for name, param in named:
            optimizer.state[param] = {
                "step": torch.tensor(float(crc32(f"{tag}.{name}".encode()) % 1000)),
                "exp_avg": param.detach() * -0.75,
                "exp_avg_sq": param.detach() * param.detach(),
            }
    return optimizer


def rate(tag: str, name: str) -> float:
    return (crc32(f"{tag}.{name}".encode()) % 97 + 1) / 100


def pipeline_state(numbers: list[int], tag: str, *, fresh: bool = False, together: bool = False) -> dict[str, Any]:
    """The state of a rank that holds stages ``numbers``; one optimizer for each, or one for all ``together``."""
    stages = [make_stage(number, tag) for number in numbers]
    shares = [stages] if together else [[stage] for stage in stages]
    return {"model": stages, "optimizer": [make_optimizer(share, tag, fresh=fresh) for share in shares]}


def stock_pipeline_form(state: dict[str, Any]) -> dict[str, Any]:
    """What a pipeline user of stock DCP saves: names merged over stages, options under each parameter."""
    found: dict[str, Any] = {"model": {}, "optimizer": {}}
    for stage, optimizer in zip(state["model"], state["optimizer"], strict=True):
        found["model"].update(get_model_state_dict(stage))
        found["optimizer"].update(get_optimizer_state_dict(stage, optimizer, options=FLAT))
    return found


def inside_pipeline(state: dict[str, Any]) -> dict[str, Any]:
    """All that the state holds, by parameter."""
    found: dict[str, Any] = {}
    for stage in state["model"]:
        for name, param in stage.named_parameters():
            found[f"parameter {name}"] = param
            for optimizer in state["optimizer"]:
                found.update((f"state {name} {key}", value) for key, value in optimizer.state.get(param, {}).items())
                for group in optimizer.param_groups:
                    if any(member is param for member in group["params"]):
                        found[f"rate {name}"] = group["lr"]
    return found
