"""Case (l): what a save costs a training loop of a framework, by its own way and by Holdfast's adapter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.files import remove

if TYPE_CHECKING:
    from benchmarks.bench import Bench

JOBS = ("accelerate", "transformers", "lightning", "torchtitan", "nvrx", "xtuner", "torchft")
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "frameworks" / "bin" / "python"
"""Where `make test-integrations` puts the frameworks."""
DEADLINE_S = 420.0


def run(bench: Bench) -> None:
    if not PYTHON.exists():
        bench.problem(
            "adapters", "frameworks", f"not measured: make {PYTHON.parents[1].relative_to(ROOT)}/.ready first"
        )
        return
    for job in JOBS:
        case = f"adapter-{job}"
        bench.say(f"{case}: {bench.size.rounds} rounds")
        folder = bench.work / job
        command = [str(PYTHON), "-m", f"benchmarks.adapters.{job}_job", str(folder), str(bench.size.rounds)]
        try:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), bench.source])},
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            bench.problem(case, job, f"had not ended after {DEADLINE_S:g} s")
            continue
        finally:
            remove(folder)
        if ended.returncode:
            bench.problem(case, job, (ended.stderr or ended.stdout).strip()[-300:])
        _record(bench, case, [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"way"')])


def _record(bench: Bench, case: str, turns: list[dict[str, Any]]) -> None:
    if turns:
        bench.results.cases[case] = {"world": 1, "nbytes": turns[-1]["nbytes"]}
    for turn in turns:
        name = f"{case}-{turn.pop('way')}"
        number = turn.pop("round")
        bench.record(case, name, number, turn, counted=number > 0)
