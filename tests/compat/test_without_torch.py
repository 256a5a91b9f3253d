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
import torch.distributed.checkpoint as dcp
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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_stock_dcp_wrote_keeps_nothing_else_from_being_verified(tmp_path: Path) -> None:
    """Its ``.metadata`` consists of torch's own classes: that it wasn't verified is a problem of that entry alone."""
    root = tmp_path / "root"
    for step in (1, 3):
        holdfast.save({"w": torch.ones(4)}, root / f"step-{step}", step=step)
    dcp.save({"w": torch.ones(4)}, checkpoint_id=root / "step-2", no_dist=True)
    blocked = "import sys; sys.modules['torch'] = None; from holdfast.cli.app import main; main()"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
        command = [sys.executable, "-c", blocked, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)

    ended = run("verify", str(root), "--all", "--json")
    assert ended.returncode == 1, ended.stderr
    found = {row["step"]: row for row in json.loads(ended.stdout)["checkpoints"]}
    assert {step: (row["state"], row["ok"]) for step, row in found.items()} == {
        1: ("verified", True),
        2: ("unverified", False),
        3: ("verified", True),
    }
    assert "needs torch" in found[2]["problems"][0]["message"]
    ended = run("verify", str(root), "--all")
    assert [line.split(": ")[1].split(" (")[0] for line in ended.stdout.splitlines() if line.startswith("/")] == [
        "fine",
        "not verified",
        "fine",
    ]
    ended = run("verify", str(root))
    assert (ended.returncode, ended.stdout.count(": fine (")) == (0, 2)
    ended = run("show", str(root), "--step", "2")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "what stock DCP wrote, which needs torch" in ended.stderr
