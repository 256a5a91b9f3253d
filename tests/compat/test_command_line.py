"""The command line as a user calls it; the smallest benchmark there is goes through it from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast


def run(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    environment |= {"PYTHONPATH": str(Path(holdfast.__file__).parents[1]), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )


def test_version_and_help() -> None:
    version = run("--version")
    assert (version.returncode, version.stdout.strip()) == (0, holdfast.__version__)
    assert "bench" in run("--help").stdout


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("bench", "--only", "nonsense"), ("bench", "--peer", "nonsense"), ("bench", "--what")]
)
def test_misuse_is_exit_status_2_and_names_what_is_wrong(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert arguments[-1] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_command_line_imports_no_torch() -> None:
    code = "import sys, holdfast.cli.app; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


@pytest.mark.timeout(300)  # some seconds, but for many processes that all import torch on a machine that others use
def test_the_smallest_benchmark_runs_from_end_to_end(tmp_path: Path) -> None:
    peers = ("raw", "holdfast", "torch-save")
    arguments = ["bench", "--size", "tiny", "--out", str(tmp_path), "--json"]
    for peer in peers:
        arguments += ["--peer", peer]
    ended = run(*arguments, "--only", "save", "load", timeout_s=280.0)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problems"] == []
    counted = {(s["case"], s["contender"]) for s in found["samples"] if s["counted"]}
    for name in ("save", "load-warm", "load-cold"):
        assert {contender for case, contender in counted if case == name} == set(peers)
    rounds = [s["round"] for s in found["samples"] if (s["case"], s["contender"]) == ("save", "holdfast")]
    assert rounds == [0, 1, 2]
    for sample in found["samples"]:
        if sample["case"] == "save":
            assert 0 < sample["figures"]["held_s"] <= sample["figures"]["durable_s"]
    report = (tmp_path / "report.md").read_text()
    assert "### (a) One rank, idle trainer" in report
    assert "| held by a lazy save, idle trainer | <= 5 ms |" in report
    assert list((tmp_path / "work").glob("*")) == [], "nothing is left behind"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_smallest_benchmark_of_exports_has_all_who_make_them(tmp_path: Path) -> None:
    ended = run("bench", "--size", "tiny", "--out", str(tmp_path), "--json", "--only", "export", timeout_s=280.0)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problems"] == [], "and each has exported what there was"
    contenders = {s["contender"] for s in found["samples"] if s["counted"]}
    assert contenders == {"raw-export", "holdfast-export", "holdfast-export-hf", "dcp-hf", "save-pretrained"}
    for sample in found["samples"]:
        assert 0 < sample["figures"]["held_s"] <= sample["figures"]["durable_s"]
    assert "### (i) Hugging Face weights" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_smallest_benchmark_of_weight_versions_has_both_ways_and_deltas(tmp_path: Path) -> None:
    ended = run("bench", "--size", "tiny", "--out", str(tmp_path), "--json", "--only", "sync", timeout_s=280.0)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["problems"] == [], "and each has brought what there was"
    timed = [s for s in found["samples"] if s["counted"] and "sync_s" in s["figures"]]
    for table, contenders in {
        "sync-gloo": {"raw-broadcast", "holdfast-sync-gloo", "holdfast-sync-gloo-streaming"},
        "sync-memory": {"raw-copy", "holdfast-sync-memory", "holdfast-sync-memory-streaming"},
        "sync-delta": {"holdfast-sync-full", *(f"holdfast-sync-delta-{share}" for share in ("1", "10", "100"))},
    }.items():
        assert {s["contender"] for s in timed if s["case"] == table} == contenders
    sent = {s["contender"]: s["figures"]["bytes_sent"] for s in timed if s["case"] == "sync-delta"}
    assert sent["holdfast-sync-delta-1"] < sent["holdfast-sync-delta-100"] == sent["holdfast-sync-full"]
    for table in ("sync-gloo", "sync-memory", "sync-delta"):
        peaks = [s["figures"] for s in found["samples"] if s["case"] == table and "receiver_peak_bytes" in s["figures"]]
        assert peaks, "what each side takes beside the weights is a sample of its own"
        assert all(figures["publisher_peak_bytes"] > 0 for figures in peaks)
    assert "### (j) A weight version over gloo" in (tmp_path / "report.md").read_text()
