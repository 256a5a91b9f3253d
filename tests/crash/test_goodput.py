"""Goodput, timeline, report, page, `show` and metrics of a job of two ranks that was killed twice: by its own book."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.view.model import summary_of

JOB = Path(__file__).parent / "goodput_job.py"
KILLED_AT = (6, 11, 0)
"""A step of each life, after the save of step 4, of step 8; the last one ends at `STEPS`."""
STEPS = 13


def run(root: str, book: Path, killed_at: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    given = [root, str(book), str(STEPS), str(killed_at)]
    done = subprocess.run([*command, *given], env=environment, capture_output=True, timeout=110, check=False)
    assert (done.returncode != 0) == bool(killed_at), done.stderr[-3000:]


def lives_of(book: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of rank 0 of each life."""
    lives: list[list[dict[str, Any]]] = []
    for line in map(json.loads, Path(f"{book}.0").read_text().splitlines()):
        if line["what"] == "start":
            lives.append([])
        lives[-1].append(line)
    return lives


def of(life: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [line for line in life if line["what"] == what]


def metric(book: Path, rank: int, name: str) -> list[float]:
    lines = map(json.loads, Path(f"{book}.{rank}").read_text().splitlines())
    return [line["value"] for line in lines if line["what"] == "metric" and line["name"] == name]


def holdfast_says(*args: str) -> str:
    command = [sys.executable, "-m", "holdfast", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout


def check_goodput(goodput: dict[str, Any], lives: list[list[dict[str, Any]]]) -> None:
    """Compare with the book."""
    pairs = list(pairwise(lives))
    steps = [[(line["t"], line["step"]) for line in of(life, "step")] for life in lives]
    paces = [(life[-1][0] - life[0][0]) / (life[-1][1] - life[0][1]) for life in steps]
    thrown = [of(before, "step")[-1]["step"] - of(after, "resumed")[0]["step"] for before, after in pairs]
    assert thrown == [2, 3]
    repeated_s = sum(count * pace_s for count, pace_s in zip(thrown, paces, strict=False))
    restart_s = sum(of(after, "step")[0]["t"] - of(before, "step")[-1]["t"] for before, after in pairs)
    stall_s = sum(line["stall_s"] for life in lives for line in of(life, "saved"))
    assert goodput["wall_s"] == pytest.approx(lives[-1][-1]["t"] - lives[0][0]["t"], abs=0.5)
    assert goodput["idle_s"] == 0
    assert goodput["lost"]["stall"] == pytest.approx(stall_s, abs=1e-4)
    assert goodput["lost"]["restart"] == pytest.approx(restart_s, abs=0.2)
    assert goodput["lost"]["repeated"] == pytest.approx(repeated_s, abs=0.05, rel=0.05)
    lost = sum(goodput["lost"].values())
    assert goodput["share"] == pytest.approx(1 - lost / goodput["wall_s"])


def test_a_job_killed_twice_by_its_own_book(tmp_path: Path) -> None:
    root, book, page = tmp_path / "root", tmp_path / "book", tmp_path / "report.html"
    for killed_at in KILLED_AT:
        run(str(root), book, killed_at)
    lives = lives_of(book)
    summary = summary_of(str(root))
    check_goodput(summary["goodput"], lives)
    assert [run["resumed_from"] for run in summary["runs"]] == [None, 4, 8]
    assert [run["steps"] for run in summary["runs"]] == [[1, 6], [5, 11], [9, 13]]
    assert [run["ended"] for run in summary["runs"]] == [None, None, "closed"]

    saves, told = summary["saves"], [line for life in lives for line in of(life, "saved")]
    assert [save["step"] for save in saves] == [4, 8, 12] == [line["step"] for line in told]
    for save, line in zip(saves, told, strict=True):
        assert save["began"] == pytest.approx(line["began_s"], abs=1e-5)
        assert [row[0] for row in save["ranks"]] == [0, 1]
        checkpoint = holdfast.open(root / save["name"])
        shown = json.loads(holdfast_says("show", str(root / save["name"]), "--json"))
        row = next(row for row in summary["steps"] if row["step"] == save["step"])
        assert shown["metrics"] == row["metrics"] == {"loss": 1.0 / save["step"]}
        assert shown["attempt"] == row["attempt"] == checkpoint.manifest.attempt
        assert row["nbytes"] == pytest.approx(sum(file["nbytes"] for file in shown["files"]), rel=0.05), "reports, too"
        assert save["nbytes"] == pytest.approx(row["nbytes"], rel=0.05), "headers and padding"
    for name in ("stall", "staging", "persist", "commit"):
        measured = metric(book, 0, f"holdfast_save_{name}_seconds")
        assert measured == pytest.approx([save[f"{name}_s"] for save in saves], abs=1e-5)
    nbytes = [metric(book, rank, "holdfast_save_bytes_total") for rank in (0, 1)]
    assert [sum(both) for both in zip(*nbytes, strict=True)] == [save["nbytes"] for save in saves]

    holdfast_says("report", str(root), "-o", str(page))
    data = json.loads(re.findall(r"<script[^>]*>(.*?)</script>", page.read_text(), re.DOTALL)[0])
    for name in ("goodput", "saves", "runs", "steps", "events"):
        assert data[name] == summary[name], name


@pytest.mark.slow
def test_a_job_on_an_object_store_by_its_own_book(tmp_path: Path, object_server: Any) -> None:
    """Its journal is put often, so that a kill loses nothing that was told."""
    options = object_server.options
    names = {"endpoint": "ENDPOINT_URL", "access_key_id": "ACCESS_KEY_ID", "secret_access_key": "SECRET_ACCESS_KEY"}
    book, url = tmp_path / "book", f"s3://{object_server.bucket()}/run"
    with pytest.MonkeyPatch.context() as patched:
        for option, name in {**names, "region": "REGION"}.items():
            patched.setenv(f"AWS_{name}", options[option])
        for killed_at in KILLED_AT:
            run(url, book, killed_at)
        summary = summary_of(url)
    assert [run["resumed_from"] for run in summary["runs"]] == [None, 4, 8]
    assert [save["step"] for save in summary["saves"]] == [4, 8, 12]
    assert summary["journal"]["skipped"] == 0
    check_goodput(summary["goodput"], lives_of(book))
