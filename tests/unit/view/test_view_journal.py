"""What the page takes from a journal: whole lines only, phases of saves, and what a job lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.catalog.journal import note_verified, scan_journal
from holdfast.storage.local import open_storage
from holdfast.view.journal import RANK_ROWS_MAX, events_of, saves_of, verified_in
from holdfast.view.runs import goodput_of, runs_of


def line(kind: str, t: float, run: str = "a", **fields: object) -> str:
    return json.dumps({"v": 1, "t": t, "run": run, "kind": kind, **fields}) + "\n"


def journal_of(root: Path, *lines: str, name: str = "journal.jsonl"):
    path = root / ".holdfast" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return scan_journal(open_storage(root))


def test_no_journal_has_no_lines(tmp_path):
    journal = scan_journal(open_storage(tmp_path))
    assert journal.lines == []
    assert journal.skipped == 0
    assert goodput_of(runs_of(journal)) is None


def test_what_is_no_line_is_skipped_and_counted(tmp_path):
    torn = line("step", 3.0, step=3)[:-9]
    odd = ["\n", "not JSON\n", "[1]\n", '{"kind": "step"}\n', "\x00\x01\n", "[" * 100_000 + "\n"]
    odd += [f'{{"kind": "step", "run": "a", "t": {t}}}\n' for t in ("NaN", "1e300", "-1")]
    journal = journal_of(tmp_path, line("step", 2.0, step=2), *odd, line("step", 1.0, step=1), torn)
    assert [found["step"] for found in journal.lines] == [2, 1], "in the order written, whatever the clock did"
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


def test_saves_that_a_kill_has_hit_are_not_in_work(tmp_path):
    """One that the next start published, one that it removed, one of which nothing is told, and one in work."""
    killed = [line("save.started", float(step), step=step, name=f"step-{step}") for step in (1, 2, 3)]
    settled = [line("recovery", 11.0, run="b", name="step-1", what="rolled_forward")]
    settled += [line("recovery", 11.5, run="b", name="step-2", what="removed")]
    again = [line("save.started", 12.0, run="b", step=2, name="step-2")]
    told = journal_of(tmp_path, *killed, line("run.started", 10.0, run="b"), *settled, *again)
    assert [(save["step"], save["outcome"]) for save in saves_of(told)] == [
        (1, "rolled forward"),
        (2, "removed"),
        (3, "cut off"),
        (2, "started"),
    ]
    ended = journal_of(tmp_path, *killed[:1], line("run.ended", 2.0, how="closed"))
    assert [save["outcome"] for save in saves_of(ended)] == ["cut off"]


OPEN_3 = ("save.started", 30.0)
OF_3 = {"step": 3, "name": "step-3"}


def outcomes(root: Path, *lines: str, **told: object) -> list[tuple[int, str]]:
    return [(save["step"], save["outcome"]) for save in saves_of(journal_of(root, *lines), **told)]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("run.resumed", {"step": 3}), ("load.finished", OF_3), ("checkpoint.deleted", OF_3)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_save_whose_outcome_is_lost_is_published_if_a_later_run_found_it(tmp_path, kind, fields):
    """The process was killed between the publication and its line."""
    killed = [line("save.started", 20.0, step=2, name="step-2"), line(*OPEN_3, **OF_3)]
    later = [line("run.started", 40.0, run="b"), line(kind, 41.0, run="b", **fields)]
    assert outcomes(tmp_path, *killed, *later) == [(2, "cut off"), (3, "published")]
    assert outcomes(tmp_path, *later, *killed, line("run.ended", 42.0)) == [(2, "cut off"), (3, "cut off")], (
        "not before"
    )


def test_a_later_line_about_the_entry_that_was_to_be_replaced_says_nothing(tmp_path):
    lines = [
        line("save.published", 10.0, attempt="a1", **OF_3),
        line(*OPEN_3, **OF_3),
        line("run.started", 40.0, run="b"),
        line("run.resumed", 41.0, run="b", step=3),
    ]
    assert outcomes(tmp_path, *lines) == [(3, "published"), (3, "cut off")]
    removed = [*lines[1:3], line("recovery", 40.5, run="b", name="step-3", what="removed"), lines[3]]
    assert outcomes(tmp_path, *removed) == [(3, "removed")], "what the next start did with it is known"


def entry(created: float | None, **fields: object) -> dict:
    return {"name": "step-3", "step": 3, "state": "published", "created": created, "nbytes": 7, **fields}


def test_a_save_whose_outcome_is_lost_is_published_if_the_root_has_its_entry(tmp_path):
    lines = [line("save.published", 10.0, attempt="a1", **OF_3), line(*OPEN_3, **OF_3)]
    (_, found) = saves_of(journal_of(tmp_path, *lines), [entry(30.5, attempt="a2")], at_work=False)
    assert (found["outcome"], found["nbytes"]) == ("published", 7)
    others = [
        entry(30.5, attempt="a1"),
        entry(29.5, attempt="a2"),
        entry(None, attempt="a2"),
        entry(30.5, attempt="a2", state="corrupt"),
        entry(30.5, attempt="a2", name="step-4"),
    ]
    for other in others:
        assert outcomes(tmp_path, *lines, rows=[other], at_work=False)[1] == (3, "cut off"), other


def test_one_entry_is_of_one_save(tmp_path):
    """Killed at step 3, removed by hand, and saved by the next run, which was killed, too."""
    lines = [line(*OPEN_3, **OF_3), line("run.started", 40.0, run="b"), line("save.started", 50.0, run="b", **OF_3)]
    assert outcomes(tmp_path, *lines, rows=[entry(51.0)], at_work=False) == [(3, "cut off"), (3, "published")]
    assert outcomes(tmp_path, *lines, rows=[entry(31.0)], at_work=True) == [(3, "published"), (3, "started")]


def test_without_anybody_at_work_in_the_root_no_save_is(tmp_path):
    lines = [line("run.started", 1.0), line(*OPEN_3, **OF_3)]
    assert outcomes(tmp_path, *lines, at_work=True) == [(3, "started")]
    assert outcomes(tmp_path, *lines, at_work=False) == [(3, "cut off")]


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
        *beats[:15],
        line("save.published", 130.0, step=15, name="step-15", stall_s=1.5, began=129.0),
        *beats[15:],
        line("run.started", 170.0, run="b", resumed_from=None),
        line("run.resumed", 171.0, run="b", step=15),
        line("step", 180.0, run="b", step=16),
        line("run.ended", 200.0, run="b", how="closed"),
    )
    goodput = goodput_of(runs_of(journal))
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
    goodput = goodput_of(runs_of(journal))
    assert goodput["wall_s"] == pytest.approx(200)
    assert goodput["idle_s"] == pytest.approx(8800)
    assert goodput["lost"]["restart"] == pytest.approx(10), "from its own start to its first step"


def goodput(root: Path, *lines: str):
    return goodput_of(runs_of(journal_of(root, *lines)))


def test_a_clock_that_is_set_back_shows_as_no_time(tmp_path):
    """In a run, by an hour, and between two, as on another host; the second is still the second."""
    found = goodput(
        tmp_path,
        line("run.started", 10_000.0),
        *(line("step", 10_000.0 + 2 * step, step=step) for step in range(1, 6)),
        *(line("step", 6_400.0 + 2 * step, step=step) for step in range(6, 21)),  # nothing passes from 5 to 6
        line("run.started", 5_000.0, run="b"),
        line("run.resumed", 5_001.0, run="b", step=10),
        line("step", 5_005.0, run="b", step=11),
        line("run.ended", 5_025.0, run="b", how="closed"),
    )
    assert found["wall_s"] == pytest.approx(10 + 28 + 25)
    assert found["lost"]["restart"] == pytest.approx(5)
    assert found["lost"]["repeated"] == pytest.approx(10 * 36 / 19, rel=1e-6)


def test_steps_are_lost_by_each_kill_once(tmp_path):
    """Killed at 20, resumed from 15; killed at 17; a life without a step; killed at 18 again; then to the end."""
    found = goodput(
        tmp_path,
        line("run.started", 0.0),
        *(line("step", float(step), step=step) for step in range(1, 21)),
        line("run.started", 30.0, run="b"),
        line("run.resumed", 31.0, run="b", step=15),
        line("step", 33.0, run="b", step=16),
        line("step", 34.0, run="b", step=17),
        line("run.started", 40.0, run="c"),
        line("run.resumed", 41.0, run="c", step=15),
        line("run.started", 50.0, run="d"),
        line("run.resumed", 51.0, run="d", step=15),
        *(line("step", 36.0 + step, run="d", step=step) for step in (16, 17, 18)),
        line("run.ended", 60.0, run="d", how="closed"),
    )
    assert found["wall_s"] == pytest.approx(60)
    assert found["lost"] == {
        "stall": 0,
        "restart": pytest.approx((33 - 20) + (41 - 34) + (52 - 41)),
        "repeated": pytest.approx(5 * 1 + 2 * 1),
    }


def test_a_run_killed_before_its_first_save_has_lost_all(tmp_path):
    lines = [line("run.started", 0.0), *(line("step", float(step), step=step) for step in range(1, 11))]
    lines += [line("run.started", 20.0, run="b"), *(line("step", 20.0 + step, run="b", step=step) for step in (1, 2))]
    assert goodput(tmp_path, *lines)["lost"] == {
        "stall": 0,
        "restart": pytest.approx(11),
        "repeated": pytest.approx(10),
    }


def test_going_back_within_a_run_is_no_restart_from_there(tmp_path):
    """Killed at 20, resumed from 15; at 30 the run goes back to 25 by itself."""
    found = goodput(
        tmp_path,
        line("run.started", 0.0),
        *(line("step", float(step), step=step) for step in range(1, 21)),
        line("run.started", 20.0, run="b"),
        line("run.resumed", 20.0, run="b", step=15),
        *(line("step", 5.0 + step, run="b", step=step) for step in range(16, 31)),
        line("run.resumed", 35.0, run="b", step=25),
        *(line("step", 10.0 + step, run="b", step=step) for step in range(26, 31)),
    )
    assert found["lost"] == {"stall": 0, "restart": pytest.approx(1 + 1), "repeated": pytest.approx(5 + 5)}


def test_one_wait_for_a_checkpoint_and_an_export_counts_once(tmp_path):
    both = {"step": 2, "stall_s": 3.0}
    found = goodput(
        tmp_path,
        line("run.started", 0.0),
        line("save.published", 9.0, **both, name="step-2", kind_of="checkpoint"),
        line("save.published", 9.5, **both, name="step-2", kind_of="export"),
        line("save.failed", 9.7, step=3, stall_s=0.5),
        line("step", 10.0, step=4),
    )
    assert found["lost"]["stall"] == pytest.approx(3.5)


def test_stalls_count_of_all_saves_not_only_of_those_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.view.journal.SAVES_MAX", 3)
    lines = [line("save.published", float(step), step=step, stall_s=0.25) for step in range(1, 11)]
    assert len(saves_of(journal_of(tmp_path, *lines))) == 3
    assert goodput(tmp_path, line("run.started", 0.0), *lines)["lost"]["stall"] == pytest.approx(2.5)


def test_time_that_the_journal_was_cut_of_is_neither_wall_time_nor_lost(tmp_path):
    """As on an object store: an hour of a run is gone, and a run whose beginning went with the old file."""
    of_store = [
        line("run.started", 0.0),
        line("run.resumed", 1.0, step=100),
        line("step", 10.0, step=101),
        line("journal.cut", 3600.0, lines=500),
        *(line("step", 3600.0 + 2 * step, step=200 + step) for step in range(1, 11)),
    ]
    found = goodput(tmp_path, *of_store)
    assert found["wall_s"] == pytest.approx(10 + 20)
    assert found["lost"] == {"stall": 0, "restart": 0, "repeated": 0}
    after = [line("run.started", 3625.0, run="b"), line("run.resumed", 3626.0, run="b", step=205)]
    found = goodput(tmp_path, *of_store, *after, line("step", 3630.0, run="b", step=206))
    assert found["lost"] == {"stall": 0, "restart": pytest.approx(10), "repeated": pytest.approx(10)}
    found = goodput(tmp_path, *(line("step", 500.0 + step, step=step) for step in range(1, 11)))
    assert found["wall_s"] == pytest.approx(9)
    assert found["share"] == 1


def test_the_last_verification_counts(tmp_path):
    journal = journal_of(
        tmp_path, line("verify", 1.0, name="step-1", problems=2), line("verify", 2.0, name="step-1", problems=0)
    )
    assert verified_in(journal) == {"step-1": {"t": 2.0, "problems": 0}}


def test_a_verification_is_noted_and_says_nothing_of_a_run(tmp_path):
    assert not note_verified(str(tmp_path / "step-1"), 1, 0), "there is no journal"
    of_run = [line("run.started", 1.0), line("step", 10.0, step=1), line("save.started", 11.0, name="step-1", step=1)]
    before = journal_of(tmp_path, *of_run)
    assert note_verified(str(tmp_path / "step-1"), 1, 3)
    after = scan_journal(open_storage(tmp_path))
    assert (len(after.lines), after.skipped) == (4, 0)
    assert verified_in(after)["step-1"]["problems"] == 3
    assert saves_of(after) == saves_of(before), "the save is in work still"
    assert [run.document() for run in runs_of(after)] == [run.document() for run in runs_of(before)]


def test_a_verification_that_can_not_be_written_is_not_noted(tmp_path):
    """As where the journal is a link, which no journal is: it might lead anywhere."""
    journal_of(tmp_path, line("run.started", 1.0), name="other")
    (tmp_path / ".holdfast" / "journal.jsonl").symlink_to("other")
    assert not note_verified(str(tmp_path / "step-1"), 1, 0)
    assert (tmp_path / ".holdfast" / "other").read_text().count("\n") == 1
