"""The training example, run as a user would: what it repeats after a restart is what it did before, bit for bit.

The demo does the same with kills, two ranks and more steps; this is the part of it that fits into every test run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


def train(out: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), "--out", str(out), "--steps", str(STEPS)]
    command += ["--every", "2", "--size", "tiny", "--batch", "2", "--length", "64"]
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    environment["PYTHONPATH"] = str(Path(holdfast.__file__).parents[1])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def events(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_restarted_run_repeats_the_steps_it_has_lost(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train(tmp_path)
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step}")
    train(tmp_path)

    starts = [event["first"] for event in events(tmp_path) if event["event"] == "start"]
    assert starts == [1, 3]
    losses = [(event["step"], event["loss"]) for event in events(tmp_path) if event["event"] == "step"]
    once, again = losses[:STEPS], losses[STEPS:]
    assert [step for step, _ in once] == list(range(1, STEPS + 1))
    assert again == once[2:]
    assert len({loss for _, loss in once}) == STEPS, "a model that does not learn proves nothing"
    saved = [event["step"] for event in events(tmp_path) if event["event"] == "saved"]
    assert saved == [2, 4, 6, 4, 6]
