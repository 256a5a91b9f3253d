"""Megatron-LM's sharded state dicts, saved by NVRx's names and loaded by Megatron-LM: two ranks, killed and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from jobs import losses, run_script

import holdfast

pytest.importorskip("megatron.core")
JOB = Path(__file__).with_name("megatron_job.py")
STEPS = 14


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run_script(JOB, out, STEPS, "--own", 9, nproc=2)
    return out


def test_a_killed_run_goes_on_as_if_nothing_had_happened(whole: Path, tmp_path: Path) -> None:
    run_script(JOB, tmp_path, STEPS, "--kill", 9, nproc=2, killed=True)
    assert (tmp_path / "latest.txt").read_text() == "iter_0000006"
    run_script(JOB, tmp_path, STEPS, "--resume", nproc=2)
    assert losses([tmp_path / "losses.jsonl"]) == losses([whole / "losses.jsonl"])


def test_a_run_goes_on_from_what_megatron_itself_wrote(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "own" / "iter_0000009", tmp_path / "iter_0000009")
    (tmp_path / "latest.txt").write_text("iter_0000009")
    weights = [torch.zeros(8, 16) for _ in range(2)]
    for weight, path in zip(weights, (tmp_path, whole), strict=True):
        holdfast.load({"weight": weight}, path / "iter_0000009")
    assert torch.equal(*weights)
    assert bool(weights[0].any())
    run_script(JOB, tmp_path, STEPS, "--resume", nproc=2)
    expected = losses([whole / "losses.jsonl"])
    assert losses([tmp_path / "losses.jsonl"]) == {step: loss for step, loss in expected.items() if step > 9}


def test_its_files_are_beside_what_holdfast_has_written(whole: Path) -> None:
    for path in sorted(whole.glob("iter_*")):
        assert {"common.pt", "metadata.json", ".metadata", "holdfast.json"} <= {file.name for file in path.iterdir()}
        checkpoint = holdfast.open(path)
        assert checkpoint.verify().ok
        assert tuple(checkpoint.tensors["weight"].shape) == (8, 16)
        assert ("later" in checkpoint.tensors) == (path.name > "iter_0000006")
