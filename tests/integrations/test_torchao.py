"""torchao's quantized optimizer states and weights: killed, resumed, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchao")

import torch
from jobs import losses, run_script
from torch import nn
from torchao import optim
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

import holdfast

JOB = Path(__file__).with_name("torchao_job.py")
STEPS = 10


@pytest.mark.parametrize("optimizer", ["AdamW8bit", "AdamW4bit", pytest.param("AdamWFp8", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, optimizer: str) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run_script(JOB, tmp_path / "whole", STEPS, "--optimizer", optimizer)
    run_script(JOB, tmp_path / "killed", STEPS, "--optimizer", optimizer, "--kill", 8, killed=True)
    run_script(JOB, tmp_path / "killed", STEPS, "--optimizer", optimizer)
    assert losses([tmp_path / "killed" / "losses.jsonl"]) == losses([tmp_path / "whole" / "losses.jsonl"])
    checkpoint = holdfast.open(tmp_path / "killed" / "run")
    assert checkpoint.tensors["optimizer.state.0.weight.exp_avg.codes"].dtype.itemsize == 1
    assert checkpoint.verify().ok


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig(), Float8WeightOnlyConfig()], ids=["int8", "float8"])
def test_a_quantized_model_round_trips(tmp_path: Path, config: object) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).to(torch.bfloat16)
        quantize_(model, copy.copy(config))
        return model

    saved, loaded = made(1), made(2)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert not torch.equal(saved(x), loaded(x))
    checkpoint = holdfast.save({"model": saved}, tmp_path / "a")
    assert any(name.startswith("model.0.weight.") for name in checkpoint.tensors)
    weight = loaded[0].weight
    holdfast.load({"model": loaded}, tmp_path / "a")
    assert loaded[0].weight is weight
    assert torch.equal(saved(x), loaded(x))
    with pytest.raises(holdfast.StateMismatch, match=r"model\.0\.weight"):
        holdfast.load({"model": nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))}, tmp_path / "a")


def stepped(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    model = nn.Linear(64, 128)
    optimizer = kind(model.parameters(), lr=1e-2)
    model(torch.ones(2, 64)).sum().backward()
    with torch.compiler.set_stance("force_eager"):  # compiling takes long, and changes nothing of the state
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            torch.optim.AdamW,
            optim.AdamW8bit,
            r"weight\.exp_avg .*a plain float32, and AdamW8bit makes a OptimState8bit",
        ),
        (
            torch.optim.AdamW,
            optim.AdamW4bit,
            r"weight\.exp_avg .*a plain float32, and AdamW4bit makes a OptimState4bit",
        ),
        (optim.AdamW8bit, torch.optim.AdamW, r"weight\.exp_avg .*of a quantized one, and AdamW makes a plain one"),
    ],
    ids=["plain-to-8bit", "plain-to-4bit", "8bit-to-plain"],
)
def test_state_of_another_kind_is_a_mismatch_before_the_first_step_too(
    tmp_path: Path, saved: Any, here: Any, message: str
) -> None:
    """By itself, torch loads it, and raises something else at the next step."""
    holdfast.save(stepped(saved), tmp_path / "a")
    model = nn.Linear(64, 128)
    before = model.weight.detach().clone()
    optimizer = here(model.parameters(), lr=1e-2)
    with pytest.raises(holdfast.StateMismatch, match=message):
        holdfast.load({"model": model, "optimizer": optimizer}, tmp_path / "a")
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    holdfast.load({"model": model, "optimizer": optimizer}, tmp_path / "a", exclude=["optimizer"])


def test_quantized_state_loads_before_the_first_step(tmp_path: Path) -> None:
    holdfast.save(stepped(optim.AdamW8bit), tmp_path / "a")
    model = nn.Linear(64, 128)
    optimizer = optim.AdamW8bit(model.parameters())
    holdfast.load({"model": model, "optimizer": optimizer}, tmp_path / "a")
    assert type(optimizer.state[model.weight]["exp_avg"]).__name__ == "OptimState8bit"
    assert type(optimizer.state[model.bias]["exp_avg"]) is torch.Tensor  # of too few elements


RANKS = JOB.with_name("torchao_ranks.py")
QUANTIZED = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def test_sharded_runs_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Under FSDP2: quantized optimizer states, and weights gathered as float8."""
    run_script(RANKS, tmp_path, *(f"resume:{kind}" for kind in (*QUANTIZED, "float8", "float8-precomputed")), nproc=2)


def test_quantized_states_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_script(RANKS, tmp_path, *(f"save:{kind}" for kind in QUANTIZED), nproc=2)
    run_script(RANKS, tmp_path, *(job for kind in QUANTIZED for job in (f"load:{kind}:2", f"save:{kind}")))
    run_script(RANKS, tmp_path, *(f"load:{kind}:1" for kind in QUANTIZED), "refuse:AdamW8bit", nproc=2)
