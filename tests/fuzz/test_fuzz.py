"""Made-up manifests, reports, plans, metadata and objects: nothing runs, escapes, hangs or takes what is only claimed.

``HOLDFAST_FUZZ`` says how many inputs (a few thousand), ``HOLDFAST_FUZZ_SEED`` repeats a run. See ``targets``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import holdfast

RUNS = int(os.environ.get("HOLDFAST_FUZZ", "2500"))
SEED = int(os.environ.get("HOLDFAST_FUZZ_SEED", "1"))
GUIDED = importlib.util.find_spec("atheris") is not None
RUN_S_MAX = 100 + RUNS / 20
MARK = Path("/tmp/holdfast-was-owned")


@pytest.mark.timeout(int(RUN_S_MAX) + 20)
def test_nothing_comes_of_hostile_bytes(tmp_path: Path, tried: Counter[str]) -> None:
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("targets.py")), str(RUNS), str(SEED), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(holdfast.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    said = ended.stderr[-4000:]
    crashes = sorted(path.name for path in tmp_path.glob("*-*") if path.name.split("-")[0] in CRASHES)
    assert (ended.returncode, crashes) == (0, []), f"inputs that broke it: {tmp_path}, {crashes}\n{said}"
    assert not MARK.exists()
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert sum(counts.values()) >= RUNS - 50  # the last few are not noted
    assert all(count > 20 for count in counts.values()), counts
    how = "guided by coverage" if GUIDED else "by chance"
    for name, count in counts.items():
        tried[f"fuzz inputs, {how} ({name})"] += count


CRASHES = ("crash", "timeout", "oom", "slow")
