"""The examples, run as a user would: what training repeats after a restart is what it did before, bit for bit.

And what it exports is the model that it has trained, for whoever has only `transformers`.

The demo does the same with kills, two ranks and more steps; this is the part of it that fits into every test run.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _object_server import Server

import holdfast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 6


def train(out: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), "--out", str(out), "--steps", str(STEPS)]
    command += ["--every", "2", "--size", "tiny", "--batch", "2", "--length", "64"]
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    environment["PYTHONPATH"] = str(Path(holdfast.__file__).parents[1])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def events(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, lost its newest checkpoints, and been started again."""
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("run")
    train(out)
    for step in (4, 6):
        shutil.rmtree(out / "checkpoints" / f"step-{step}")
    train(out)
    return out


@pytest.fixture
def one_thread_after_it() -> Iterator[None]:
    """The example decides how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_restarted_run_repeats_the_steps_it_has_lost(restarted: Path) -> None:
    starts = [event["first"] for event in events(restarted) if event["event"] == "start"]
    assert starts == [1, 3]
    losses = [(event["step"], event["loss"]) for event in events(restarted) if event["event"] == "step"]
    once, again = losses[:STEPS], losses[STEPS:]
    assert [step for step, _ in once] == list(range(1, STEPS + 1))
    assert again == once[2:]
    assert len({loss for _, loss in once}) == STEPS, "a model that does not learn proves nothing"
    for kind in ("saved", "exported"):
        assert [event["step"] for event in events(restarted) if event["event"] == kind] == [2, 4, 6, 4, 6]
    ends = [event["captures"] for event in events(restarted) if event["event"] == "end"]
    assert ends == [3, 2], "a checkpoint and an export of the same step share one copy of the state"


@pytest.mark.usefixtures("one_thread_after_it")
def test_what_it_exports_writes_by_transformers_alone(
    restarted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, kept = restarted / "hf" / "hf-latest", restarted / "kept.pt"
    assert newest.resolve().name == f"hf-{STEPS}"
    trained = torch.load(restarted / "logits.pt", weights_only=True)
    arguments = [str(newest), "--prompt", trained["prompt"], "--tokens", "8", "--logits", str(kept)]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    runpy.run_path(str(EXAMPLES / "generate.py"), run_name="__main__")

    loaded = torch.load(kept, weights_only=True)
    assert trained["step"] == STEPS
    assert loaded["tokens"].tolist() == trained["tokens"].tolist() == [list(trained["prompt"].encode())]
    assert loaded["logits"].dtype == trained["logits"].dtype == torch.float32
    assert torch.equal(loaded["logits"], trained["logits"])
    assert capsys.readouterr().out.startswith(trained["prompt"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "directory"])
def test_the_loop_of_reinforcement_learning_holds(transport: str) -> None:
    pytest.importorskip("transformers")
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    environment["PYTHONPATH"] = str(Path(holdfast.__file__).parents[1])
    command = [sys.executable, str(EXAMPLES / "rl_sync.py"), "--transport", transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "logits are the same bits on both sides" in ended.stdout


def run_bucket(root: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    command = [sys.executable, str(EXAMPLES / "bucket.py"), "--root", root, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


def assert_resumes_bit_for_bit(root: str) -> None:
    """A run that is killed in a save and started again trains as one that isn't, and its export loads."""
    whole = run_bucket(f"{root}/whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    killed = run_bucket(f"{root}/killed", "--kill-at", "4")
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    resumed = run_bucket(f"{root}/killed")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    losses = [line for line in whole.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 6
    again = [line for line in resumed.stdout.splitlines() if line.startswith("step ")]
    assert 1 <= len(again) <= 4
    assert losses[-len(again) :] == again
    for ended in (whole, resumed):
        assert "published: step 6, verified: True" in ended.stdout
        assert "exported, and the export loads: True" in ended.stdout


@pytest.mark.slow
def test_training_in_a_bucket_resumes_bit_for_bit(object_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"ACCESS_KEY_ID": "somebody", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    for name, value in {**keys, "ENDPOINT_URL": object_server.endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    assert_resumes_bit_for_bit(f"s3://{object_server.bucket()}/runs")
