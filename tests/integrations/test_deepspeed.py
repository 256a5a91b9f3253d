"""`holdfast.integrations.deepspeed` in real jobs of two ranks on the CPU: killed and resumed, and what is refused.

`make test-integrations` doesn't install DeepSpeed, which compiles an operator when it first runs: these tests run where
somebody has (``DS_BUILD_OPS=0 pip install deepspeed``, and a C++ compiler).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("deepspeed") is None:
    reason = "deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed==0.19.8 to run these tests"
    pytest.skip(reason, allow_module_level=True)

import torch
from jobs import ROOT, losses, run_script

import holdfast
from holdfast.errors import StateMismatch

JOB = Path(__file__).with_name("deepspeed_job.py")
STEPS = 8


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float32"), (2, "float16")])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, stage: int, dtype: str) -> None:
    """Master weights, and a loss scale that has found its place, come back into an engine of another seed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    options = ("--stage", stage, "--dtype", dtype)
    run_script(JOB, whole, STEPS, *options, nproc=2)
    run_script(JOB, killed, STEPS, *options, "--kill", 5, nproc=2, killed=True)
    run_script(JOB, killed, STEPS, *options, "--seed", 7, nproc=2)
    assert losses([killed / "losses.jsonl"]) == losses([whole / "losses.jsonl"])
    checkpoint = holdfast.open(killed / "checkpoints" / "step-6")
    assert checkpoint.verify().ok
    assert checkpoint.tensors["model.0.weight"].dtype == getattr(torch, dtype)
    assert checkpoint.state()["engine"]["global_steps"] == 6
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    holdfast.load({"model": model}, checkpoint.path)  # without DeepSpeed
    assert torch.equal(model[0].weight, checkpoint.read("model.0.weight").float())
    if stage:
        parts = checkpoint.state()["optimizer"]
        assert sorted(parts) == ["rank-00000", "rank-00001"]
        assert list(parts["rank-00000"]["base_optimizer_state"]["state"]) == [0]
        check_one_rank_is_refused(killed / "checkpoints", options)


def check_one_rank_is_refused(saved: Path, options: tuple[object, ...]) -> None:
    with pytest.raises(AssertionError, match=r"optimizer\.rank-\*.*saved by 2 ranks") as caught:
        run_script(JOB, saved.parent, STEPS, *options)
    assert StateMismatch.__name__ in str(caught.value)


@pytest.mark.timeout(400)
def test_a_run_of_deepspeeds_own_goes_on_with_holdfast(tmp_path: Path) -> None:
    """Begun and saved by DeepSpeed, loaded by it, saved by Holdfast, killed, and resumed from that."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    whole.mkdir()
    moved.mkdir()
    run_script(JOB, whole, STEPS, "--theirs", -1, nproc=2)
    run_script(JOB, moved, STEPS, "--theirs", 2, nproc=2)
    run_script(JOB, moved, STEPS, "--theirs", -1, "--seed", 7, "--kill", 4, nproc=2, killed=True)
    assert (moved / "checkpoints" / "step-3").is_dir()
    run_script(JOB, moved, STEPS, "--theirs", -1, "--seed", 8, nproc=2)
    assert losses([moved / "losses.jsonl"]) == losses([whole / "losses.jsonl"])


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    run_script(JOB, tmp_path, STEPS, "--refused", nproc=2)


def test_the_example_runs(tmp_path: Path) -> None:
    example = ROOT / "examples" / "deepspeed_zero.py"
    assert "begins after step 0" in run_script(example, tmp_path, nproc=2).stdout
    assert "begins after step 6" in run_script(example, tmp_path, nproc=2).stdout


def test_the_page_names_what_there_is() -> None:
    text = (ROOT / "docs" / "integrations" / "deepspeed.md").read_text()
    for block in re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        compile(block, "deepspeed.md", "exec")
