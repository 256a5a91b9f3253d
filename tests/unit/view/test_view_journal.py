"""What the page takes from a journal: whole lines only, phases of saves, and what a job lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.storage.local import open_storage
from holdfast.view.journal import (
    RANK_ROWS_MAX,
    events_of,
    goodput_of,
    read_journal,
    runs_of,
    saves_of,
    verified_in,
)


def line(kind: str, t: float, run: str = "a", **fields: object) -> str:
    return json.dumps({"v": 1, "t": t, "run": run, "kind": kind, **fields}) + "\n"


def journal_of(root: Path, *lines: str, name: str = "journal.jsonl"):
    path = root / ".holdfast" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return read_journal(open_storage(root))


def test_no_journal_has_no_lines(tmp_path):
    journal = read_journal(open_storage(tmp_path))
    assert journal.lines == []
    assert journal.skipped == 0
    assert goodput_of(runs_of(journal), saves_of(journal)) is None


def test_what_is_no_line_is_skipped_and_counted(tmp_path):
    torn = line("step", 3.0, step=3)[:-9]
    odd = ["\n", "not JSON\n", "[1]\n", '{"kind": "step"}\n', "\x00\x01\n", "[" * 100_000 + "\n"]
    odd += [f'{{"kind": "step", "t": {t}}}\n' for t in ("NaN", "1e300", "-1")]
    journal = journal_of(tmp_path, line("step", 2.0, step=2), *odd, line("step", 1.0, step=1), torn)
    assert [found["step"] for found in journal.lines] == [1, 2], "in the order of time"
    assert journal.skipped == len(odd), "without the empty one, with the torn one"


def test_both_files_and_those_of_runs_are_read(tmp_path):
    journal_of(tmp_path, line("step", 1.0, step=1), name="journal.old.jsonl")
    journal_of(tmp_path, line("step", 2.0, step=2))
    journal = journal_of(tmp_path, line("step", 3.0, run="b", step=3), name="journal/b.jsonl")
    assert [found["step"] for found in journal.lines] == [1, 2, 3]
    assert [run.id for run in runs_of(journal)] == ["a", "b"]


@pytest.mark.parametrize("attempt", [None, "0123456789ab"])
def test_a_save_that_ended_isnt_in_work_too(tmp_path, attempt):
    journal = journal_of(
        tmp_path,
        line("save.started", 1.0, step=5, name="step-5", attempt=attempt),
        line("save.published", 3.0, step=5, name="step-5", attempt="0123456789ab", began=1.0, stall_s=0.1, nbytes=7),
        line("save.started", 4.0, step=6, name="step-6", attempt=attempt),
    )
    assert [(save["step"], save["outcome"]) for save in saves_of(journal)] == [(5, "published"), (6, "started")]


def test_fields_of_a_wrong_type_are_unknown(tmp_path):
    rows = [[0, None, 1, 2, 3, 4], [1], "x", ["r", 1, 2, 3, 4, 5], [2, 1, 2, 3, "4", None]]
    journal = journal_of(
        tmp_path,
        line("save.failed", 9.0, step="x", name=3, error=["no"], message=5, rank=True, stall_s="1", ranks="all"),
        line("save.published", 9.5, step=1, ranks=rows),
        line("warning", 9.7, what={"no": 1}, tensors=["a", {}, 3], message="m" * 5000),
        line("run.started", 9.8, run="c", config="none", world=-0.5),
    )
    failed, published = saves_of(journal)
    assert [failed[name] for name in ("step", "name", "error", "message", "rank", "stall_s", "ranks")] == [None] * 6 + [
        []
    ]
    assert published["ranks"] == [[0, None, 1, 2, 3, 4], [2, 1, 2, 3, None, None]]
    (warning,) = events_of(journal)
    assert warning["tensors"] == ["a", 3]
    assert len(warning["message"]) == 1000
    assert "what" not in warning


def test_ranks_are_kept_for_the_newest_saves(tmp_path):
    ranks = [[rank, 1.0, 0.1, 0.1, 0.1, 5] for rank in range(512)]
    lines = [line("save.published", float(step), step=step, name=f"step-{step}", ranks=ranks) for step in range(1, 101)]
    saves = saves_of(journal_of(tmp_path, *lines))
    kept = [save["step"] for save in saves if save["ranks"]]
    assert kept == list(range(101 - RANK_ROWS_MAX // 512, 101))
    assert all(save["ranks_left_out"] for save in saves[:10])


def test_goodput_counts_stalls_restarts_and_repeated_steps(tmp_path):
    """A run of 2 s a step is killed at step 20; the next one begins 30 s later, from step 15, and steps 10 s after."""
    beats = [line("step", 100.0 + 2 * step, step=step) for step in range(1, 21)]
    journal = journal_of(
        tmp_path,
        line("run.started", 100.0, resumed_from=None),
        *beats,
        line("save.published", 130.0, step=15, name="step-15", stall_s=1.5, began=129.0),
        line("run.started", 170.0, run="b", resumed_from=None),
        line("run.resumed", 171.0, run="b", step=15),
        line("step", 180.0, run="b", step=16),
        line("run.ended", 200.0, run="b", how="closed"),
    )
    goodput = goodput_of(runs_of(journal), saves_of(journal))
    assert goodput["wall_s"] == pytest.approx(100)
    assert goodput["lost"] == {"stall": pytest.approx(1.5), "restart": pytest.approx(40), "repeated": pytest.approx(10)}
    assert goodput["share"] == pytest.approx(1 - 51.5 / 100)


def test_a_night_between_two_runs_is_no_loss(tmp_path):
    journal = journal_of(
        tmp_path,
        line("run.started", 100.0),
        line("step", 150.0, step=5),
        line("run.ended", 200.0, how="closed"),
        line("run.started", 9000.0, run="b", resumed_from=5),
        line("step", 9010.0, run="b", step=6),
        line("run.ended", 9100.0, run="b", how="closed"),
    )
    goodput = goodput_of(runs_of(journal), saves_of(journal))
    assert goodput["wall_s"] == pytest.approx(200)
    assert goodput["idle_s"] == pytest.approx(8800)
    assert goodput["lost"]["restart"] == pytest.approx(10), "from its own start to its first step"


def test_the_last_verification_counts(tmp_path):
    journal = journal_of(
        tmp_path, line("verify", 1.0, name="step-1", problems=2), line("verify", 2.0, name="step-1", problems=0)
    )
    assert verified_in(journal) == {"step-1": {"t": 2.0, "problems": 0}}
