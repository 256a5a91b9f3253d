"""The journal of jobs of two ranks under torchrun, one of them killed, and what a run on an object store leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from journal_job import KILLED_AT, STEPS

import holdfast
from holdfast.catalog.journal import FILE, read_journal
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from _object_server import Server

JOB = Path(__file__).parent / "journal_job.py"


def run(root: Path, how: str) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    done = subprocess.run([*command, str(root), how], env=environment, capture_output=True, timeout=110, check=False)
    return done.returncode


def of_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def test_a_killed_job_and_the_one_after_it_are_told_apart(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run(root, "killed") != 0
    with (root / FILE).open("ab") as file:
        file.write(b'{"v":1,"t":1')  # the kill may have torn a line, too
    first = read_journal(open_storage(root))
    assert first[0]["kind"] == "run.started"
    assert (first[0]["world"], first[0]["torch"]) == (2, str(torch.__version__))
    assert not of_kind(first, "run.ended")
    published = of_kind(first, "save.published")
    assert [row["step"] for row in published] == list(range(1, KILLED_AT + 1))
    for row in published:
        assert [rank for rank, *_ in row["ranks"]] == [0, 1]
        for _, began, *seconds, nbytes in row["ranks"]:
            assert abs(began - row["began"]) < 30.0
            assert all(value >= 0.0 for value in seconds)
            assert nbytes > 0
        assert row["ranks"][1][4] > 0.0, "the other rank's persisting took time"
        assert row["nbytes"] == sum(rank[-1] for rank in row["ranks"])
        assert row["commit_s"] > 0.0
        assert row["metrics"] == {"loss": 1.0 / row["step"]}
    assert [row["step"] for row in of_kind(first, "checkpoint.deleted")] == [1, 2]
    assert of_kind(first, "step")[0]["step"] == 1

    assert run(root, "whole") == 0
    rows = read_journal(open_storage(root))
    assert rows[: len(first)] == first
    second = rows[len(first) :]
    assert {row["run"] for row in second} != {first[0]["run"]}
    assert len({row["run"] for row in second}) == 1
    assert [row["step"] for row in of_kind(second, "run.resumed")] == [KILLED_AT]
    assert of_kind(second, "load.finished")[0]["seconds"] > 0.0
    assert [row["step"] for row in of_kind(second, "save.published")] == list(range(KILLED_AT + 1, STEPS + 1))
    assert (second[-1]["kind"], second[-1]["how"]) == ("run.ended", "closed")
    assert of_kind(second, "step")[-1]["step"] == STEPS


def test_a_failed_run_says_so_and_a_reader_writes_nothing(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(4, 4)}
    try:
        with holdfast.CheckpointManager(tmp_path / "root", state, process_group="alone") as manager:
            manager.save(1).result()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    rows = read_journal(open_storage(tmp_path / "root"))
    assert (rows[-1]["kind"], rows[-1]["how"]) == ("run.ended", "failed")
    before = (tmp_path / "root" / FILE).read_bytes()
    config = holdfast.CheckpointConfig(load_only=True)
    with holdfast.CheckpointManager(tmp_path / "root", state, config=config, process_group="alone") as manager:
        assert manager.restore() == 1
    holdfast.save(state, tmp_path / "root" / "one")
    assert (tmp_path / "root" / FILE).read_bytes() == before


def test_on_a_bucket_each_run_leaves_one_object(object_server: Server) -> None:
    url = f"s3://{object_server.bucket()}/run"
    storage = ObjectStorage(ObjectStore(url, object_server.options))
    state = {"model": torch.nn.Linear(4, 4)}
    for step in (1, 2):
        with holdfast.CheckpointManager(storage, state, process_group="alone") as manager:
            manager.restore()
            manager.save(step).result()
    rows = read_journal(storage)
    runs = list(dict.fromkeys(row["run"] for row in rows))
    assert storage.list_dir(".holdfast/journal") == [f"{run}.jsonl" for run in runs]
    told = [[row["kind"] for row in rows if row["run"] == run] for run in runs]
    saved = ["save.started", "save.published", "run.ended"]
    assert told == [["run.started", *saved], ["run.started", "load.finished", "run.resumed", *saved]]
