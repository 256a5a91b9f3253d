"""Training jobs that save to stores: killed in a save they resume bit for bit, and worlds of other sizes read them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from jobs import run_script
from launch import run_job
from servers import Server
from store_worlds import all_worlds

import holdfast

JOB = Path(__file__).with_name("store_job.py")
SLOW_ON = ("moto",)
KILLS = (4, 6) if os.environ.get("HOLDFAST_FAULTS") == "all" else (6,)
STEPS = 7


def outcomes(out: Path, world: int) -> list[dict[str, object]]:
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_job_killed_in_a_save_resumes_bit_for_bit(
    server: Server, place: str, world: int, tmp_path: Path, tried: Counter[str]
) -> None:
    """By SIGKILL of all its ranks, while the save of a step is under way; with FSDP2 on two."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_script(JOB, f"{place}/whole", whole, STEPS, 0, nproc=world)
    for kill_at in KILLS:
        run_script(JOB, f"{place}/killed", killed, STEPS, kill_at, nproc=world, killed=True)
    run_script(JOB, f"{place}/killed", killed, STEPS, 0, nproc=world)
    resumed, expected = outcomes(killed, world), outcomes(whole, world)
    assert [found["digest"] for found in resumed] == [wanted["digest"] for wanted in expected]
    (first,) = {found["first"] for found in resumed}
    assert first in (2, 4, 6), "resumed, not begun anew"
    steps = holdfast.CheckpointManager(
        f"{place}/killed", {"x": torch.zeros(1)}, config=holdfast.CheckpointConfig(load_only=True)
    ).steps()
    assert len(steps) == 2
    for step in steps:
        assert holdfast.open(f"{place}/killed/step-{step}").verify().ok
    bucket = place.split("/")[2]
    assert not [key for key in server.keys(bucket) if "/attempts/" in key or "lease-" in key], "nothing is left behind"
    assert server.uploads(bucket) in ([], None)
    tried[f"jobs of {world} rank(s) on {server.name}, killed in a save and resumed bit for bit"] += len(KILLS)


@pytest.mark.timeout(600)
def test_every_world_reads_what_the_others_wrote(server: Server, place: str, tried: Counter[str]) -> None:
    run_job(all_worlds, nproc=4, args=[place, json.dumps(server.environment())], timeout_s=300.0)
    tried[f"reads of other worlds' checkpoints on {server.name}, bit for bit"] += 10
