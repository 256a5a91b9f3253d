"""``holdfast ls | show | verify | prune | report | diff`` where there is no torch: its import is blocked in a process.

`tests/packaging` runs the same commands where none is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from format_fixtures import FIXTURES, MADE_BY

import holdfast

DRIVER = Path(__file__).with_name("torch_free_commands.py")


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A directory with a root, an export, weight versions, and a bucket, as `torch_free_commands` wants them."""
    where = Path(shutil.copytree(FIXTURES / [*MADE_BY][-1], tmp_path / "places"))
    for step in (10, 20):
        state = {"half": torch.full((4,), step, dtype=torch.bfloat16), "train": {"step": step}}
        holdfast.save(state, f"file://{where / 'bucket'}/step-{step}", step=step)
    return where


def run_commands(where: Path, python: Path, *options: str, **environment: str) -> list[tuple[str, int, str]]:
    """Run the commands by ``python``; assert that each has ended as it must."""
    ended = subprocess.run(
        [str(python), str(DRIVER), str(where), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **environment},
        cwd=where,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["loaded"] == []
    for command, status, output, expected in found["results"]:
        assert status == expected, f"holdfast {command}: {output}"
        assert "Traceback" not in output
    return [(command, status, output) for command, status, output, _ in found["results"]]


def test_commands_run_where_torch_cannot_be_imported(places: Path) -> None:
    source = str(Path(holdfast.__file__).parents[1])
    results = run_commands(places, Path(sys.executable), "--block", PYTHONPATH=source)
    for command, status, output in results:
        if status == 2:
            assert "needs torch" in output
            assert "pip install torch" in output
        elif command.startswith("verify"):
            assert '"ok":true' in output if "--json" in command else ": fine (" in output
    assert not (places / "root" / "step-10").exists(), "pruned"
    assert holdfast.open(places / "root" / "step-20").verify().ok
    assert [command for command, _, _ in results if command.startswith("diff file://")]
    page = (places / "report.html").read_text()
    assert "version-3" in page
