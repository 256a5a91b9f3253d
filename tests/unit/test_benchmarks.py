"""The pure parts of the benchmarks: what is made of samples."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks import delta, publish, stats, tables, targets
from benchmarks.bench import OURS, Bench
from benchmarks.cases import CASES
from benchmarks.cases.train import compared
from benchmarks.cpu import tree_cpu_s, tree_memory, tree_of
from benchmarks.files import cached_fraction, evict, warm
from benchmarks.obstacles import OBSTACLES, obstacles
from benchmarks.peers import DELTA_SHARES, PEERS
from benchmarks.peers.exports_ import hf_name
from benchmarks.peers.sync_ import rows_of_share
from benchmarks.protocol import WorkerFailed, merged
from benchmarks.report import render, summary
from benchmarks.runner import is_run
from benchmarks.samples import Problem, Results, Sample
from benchmarks.samples import merged as put_together
from benchmarks.sizes import COPIES, SIZES
from benchmarks.state import layout
from benchmarks.targets import Reached, reached


def results_with(*rows: tuple[str, str, dict[str, float]]) -> Results:
    """One counted sample a row; an uncounted one ahead of each that would spoil every median."""
    results = Results(meta={"size": "full", "rounds": 1, "machine": {"cores": "2"}, "versions": {"torch": "2"}})
    for case, contender, figures in rows:
        spoilt = dict.fromkeys(figures, 1000000.0)
        results.samples.append(Sample(case, contender, 0, counted=False, figures=spoilt))
        results.samples.append(Sample(case, contender, 1, counted=True, figures=figures))
        results.cases.setdefault(case, {"nbytes": 1 << 20, "tensors": 3, "world": 1})
    return results


def verdict_of(results: Results, what: str) -> str:
    found = [row for row in targets.reached(results) if row.what.startswith(what)]
    assert found, what
    return found[0].verdict


def test_the_state_is_two_gibibytes_and_smaller_where_memory_is_short() -> None:
    size = SIZES["full"]
    assert size.language_model_nbytes(size.layers) / (1 << 30) == pytest.approx(2.0, rel=0.02)
    assert size.layers_that_fit(64 << 30) == size.layers
    fit = size.layers_that_fit(12 << 30)
    assert 1 < fit < size.layers
    assert COPIES * size.language_model_nbytes(fit) < 12 << 30


def test_spread_is_the_median_and_the_range() -> None:
    assert stats.Spread.of([3.0, 1.0, 2.0, 10.0]) == stats.Spread(2.5, 1.0, 10.0, 4)
    with pytest.raises(ValueError, match="no values"):
        stats.Spread.of([])


def test_bootstrap_covers_the_mean_and_narrows_with_more_values() -> None:
    few, many = stats.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0]), stats.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0] * 20)
    assert few.low < few.mean == 3.0 < few.high
    assert many.high - many.low < few.high - few.low
    assert stats.bootstrap([1.0, 2.0, 3.0, 4.0, 5.0]) == few, "the same samples give the same interval"
    assert stats.bootstrap([1.0, 3.0]) == stats.Interval(2.0, 1.0, 3.0), "of two values the range is all one can say"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0000123, "12 µs"), (0.0123, "12.3 ms"), (0.5, "0.50 s"), (123.4, "123 s"), (-0.5, "-0.50 s")],
)
def test_seconds_have_the_unit_that_fits(value: float, shown: str) -> None:
    assert stats.seconds(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(12, "12 B"), (3 << 20, "3.0 MiB"), (5 << 30, "5.00 GiB")])
def test_bytes_have_the_unit_that_fits(value: float, shown: str) -> None:
    assert stats.nbytes(value) == shown


def test_only_counted_samples_count() -> None:
    results = results_with(("save", "holdfast", {"held_s": 0.002}))
    assert results.values("save", "holdfast", "held_s") == [0.002]
    assert results.median("save", "holdfast", "durable_s") is None


def test_samples_survive_being_written(tmp_path: Path) -> None:
    results = results_with(("save", "holdfast", {"held_s": 0.002}))
    results.problems.append(Problem("save", "nvrx", "no wheel", ours=False))
    results.write(tmp_path / "results.json")
    back = Results.read(tmp_path / "results.json")
    assert (back.samples, back.problems, back.cases, back.meta) == (
        results.samples,
        results.problems,
        results.cases,
        results.meta,
    )


def test_runs_of_several_cases_are_put_together_the_last_one_counts() -> None:
    first = results_with(("save", "holdfast", {"held_s": 1.0}), ("load-warm", "holdfast", {"load_s": 1.0}))
    second = results_with(("save", "holdfast", {"held_s": 2.0}))
    second.problems.append(Problem("save", "nvrx", "no wheel", ours=False))
    whole = put_together([first, second])
    assert whole.values("save", "holdfast", "held_s") == [2.0]
    assert whole.values("load-warm", "holdfast", "load_s") == [1.0]
    assert whole.problems == second.problems
    second.meta["size"] = "quick"
    with pytest.raises(ValueError, match="different sizes"):
        put_together([first, second])


def test_a_target_is_reached_missed_by_a_factor_or_not_measured() -> None:
    good = results_with(("save", "holdfast", {"held_s": 0.004}))
    bad = results_with(("save", "holdfast", {"held_s": 0.010}))
    row = "held by a lazy save, idle trainer"
    assert verdict_of(good, row) == "ok"
    assert verdict_of(bad, row) == "not reached: 2.00x off"
    assert verdict_of(Results(), row) == "not measured"


def test_what_stands_in_the_way_is_said_of_missed_targets_only() -> None:
    missed = Reached("eager staging / warm memcpy, one rank", "<= 1.15", "2.00 x", 2.0, 1.15)
    met = Reached("persist + commit / raw, one rank", "<= 1.15", "0.90 x", 0.9, 1.15)
    unknown = Reached("something new", "<= 1", "3 x", 3.0, 1.0)
    said = obstacles([missed, met, unknown])
    assert said.startswith("- eager staging / warm memcpy, one rank: The copies run")
    assert "persist" not in said
    assert "something new: not yet explained" in said
    assert obstacles([met]) == "Every target that was measured was reached."


def test_every_known_obstacle_is_one_of_a_target() -> None:
    names = [row.what for row in reached(Results())]
    assert all(any(name.startswith(begin) for name in names) for begin in OBSTACLES)


def test_the_best_peer_is_neither_the_limit_nor_holdfast() -> None:
    results = results_with(
        ("save-compute", "raw", {"durable_s": 0.1, "cpu_s": 0.1}),
        ("save-compute", "holdfast-eager", {"durable_s": 0.1, "cpu_s": 0.1}),
        ("save-compute", "holdfast", {"durable_s": 0.5, "cpu_s": 0.2}),
        ("save-compute", "dcp-thread", {"durable_s": 2.0, "cpu_s": 4.0}),
        ("save-compute", "torch-checkpointing", {"durable_s": 3.0, "cpu_s": 1.0}),
    )
    assert targets.best_peer(results, "save-compute", "durable_s") == ("dcp-thread", 2.0)
    assert verdict_of(results, "until durable / best peer, computing") == "ok"
    assert verdict_of(results, "CPU seconds / that peer's, computing") == "ok", "0.2 s of that very peer's 4 s"


def test_faster_than_is_a_target_from_below() -> None:
    rows = (("load-warm", "holdfast", {"load_s": 0.2}), ("load-warm", "dcp-save", {"load_s": 0.5}))
    assert verdict_of(results_with(*rows), "load, warm: times faster") == "not reached: 1.20x off"
    rows = (*rows[:1], ("load-warm", "dcp-save", {"load_s": 0.7}))
    assert verdict_of(results_with(*rows), "load, warm: times faster") == "ok"


def test_a_slow_down_too_small_to_be_seen_is_no_gain() -> None:
    results = results_with(
        ("train", "holdfast", {"slowdown": -0.01, "lost_s": -0.001}),
        ("train", "dcp-thread", {"slowdown": 0.2, "lost_s": 0.3}),
    )
    assert verdict_of(results, "slow-down of the training loop") == "ok"
    row = next(row for row in targets.reached(results) if row.what.startswith("slow-down"))
    assert row.value == 0.0


def test_blocks_give_what_each_save_cost_against_training_that_never_saved() -> None:
    # This process takes 4/5 of the reference's time; the machine has slowed both down since, by a quarter.
    before = {"block_s": 8.0, "cpu_s": 20.0, "over_reference": 0.8}
    reference = {"block_s": 12.5, "cpu_s": 25.0, "iterations_s": [1.25] * 10}
    with_saves = {"block_s": 11.0, "cpu_s": 21.0, "iterations_s": [1.1] * 10, "saves": 4, "held_s": 0.1, "drain_s": 0.0}
    after = {"block_s": 20.0, "cpu_s": 40.0, "iterations_s": [2.0] * 10}
    figures = compared(before, reference, with_saves, after)
    assert figures["slowdown"] == pytest.approx(0.1)
    assert figures["lost_s"] == pytest.approx(0.25)
    assert figures["cpu_s"] == pytest.approx(0.25)
    assert figures["iteration_s"] == pytest.approx(1.0)
    assert figures["iteration_after_s"] == pytest.approx(2.0)


def test_ranks_are_merged_to_the_slowest() -> None:
    answers = [{"durable_s": 1.0, "cpu_s": 0.5, "pace": 0.9}, {"durable_s": 2.0, "cpu_s": 0.25, "pace": 0.5}]
    assert merged(answers) == {"durable_s": 2.0, "cpu_s": 0.75, "pace": 0.5}


def test_cells_show_the_ratio_first() -> None:
    spread = stats.Spread(0.5, 0.4, 0.6, 5)
    assert tables.cell(spread, 0.25, stats.seconds) == "**2.00** · 0.50 s [0.40 s, 0.60 s]"
    assert tables.cell(spread, None, stats.seconds) == "0.50 s [0.40 s, 0.60 s]"
    assert tables.cell(None, 0.25, stats.seconds) == "-"


def test_the_report_says_what_did_not_run_and_why() -> None:
    results = results_with(
        ("save", "raw", {"durable_s": 0.5, "memcpy_s": 0.1, "held_s": 0.5}),
        ("save", "holdfast", {"durable_s": 1.0, "held_s": 0.002}),
    )
    results.problems.append(Problem("save", "nvrx", "no wheel | here", ours=False))
    text = render(results)
    assert "| `nvidia-resiliency-ext` | save | no wheel / here |" in text
    assert "**2.00** · 1.00 s" in text
    assert "did not run: nvrx (save): no wheel" in summary(results)


def test_documentation_is_replaced_between_markers_only() -> None:
    text = "before\n<!-- measured: x -->\nold\n<!-- end of measured: x -->\nafter\n"
    once = publish.replaced(text, "x", "new")
    assert once == "before\n<!-- measured: x -->\n\nnew\n\n<!-- end of measured: x -->\nafter\n"
    assert publish.replaced(once, "x", "new") == once
    with pytest.raises(ValueError, match="there must be one"):
        publish.replaced(text, "y", "new")


def test_the_documentation_has_every_marker_that_is_published(tmp_path: Path) -> None:
    results = results_with(
        ("save", "raw", {"durable_s": 0.5, "memcpy_s": 0.1, "held_s": 0.5}),
        ("save", "holdfast", {"durable_s": 1.0, "held_s": 0.002}),
        ("train", "holdfast", {"slowdown": 0.01, "lost_s": 0.001}),
    )
    results.meta |= {"date": "today", "machine": {"cores": "2", "file system": "ext4"}}
    (tmp_path / "out").mkdir()
    results.write(tmp_path / "out" / "results.json")
    for name in ("README.md", "docs/performance.md"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((publish.ROOT / name).read_text())
    written = publish.publish([tmp_path / "out"], tmp_path, note="The machine was idle.")
    assert tmp_path / "docs" / "performance.md" in written
    assert "2 cores, ext4" in (tmp_path / "README.md").read_text()
    assert "The machine was idle." in (tmp_path / "docs" / "performance.md").read_text()
    assert (tmp_path / "benchmarks" / "reports" / "full" / "report.md").exists()


def test_exports_are_measured_against_a_raw_write_of_their_own_bytes() -> None:
    results = results_with(
        ("export", "raw-export", {"durable_s": 0.1, "held_s": 0.1}),
        ("export", "holdfast-export", {"durable_s": 0.2, "held_s": 0.01, "peak_bytes": 3 << 20}),
    )
    text = render(results)
    assert "### (i) Hugging Face weights" in text
    assert "**2.00** · 0.20 s | 10.0 ms | 3.0 MiB" in text


def test_weight_versions_are_measured_against_the_raw_limit_of_their_way() -> None:
    gloo, memory = "holdfast-sync-gloo", "holdfast-sync-memory"
    results = results_with(
        ("sync-gloo", "raw-broadcast", {"sync_s": 0.5, "bytes_per_s": 2e9}),
        ("sync-gloo", gloo, {"sync_s": 0.55, "bytes_per_s": 1.9e9, "receiver_peak_bytes": 3 << 20}),
        ("sync-gloo", f"{gloo}-streaming", {"sync_s": 0.5, "bytes_per_s": 1.5e9}),
        ("sync-memory", "raw-copy", {"sync_s": 0.1, "bytes_per_s": 10e9}),
        ("sync-memory", memory, {"sync_s": 0.2, "bytes_per_s": 5e9}),
    )
    assert verdict_of(results, "weight version over gloo /") == "ok", "a rate is the better the higher it is"
    assert verdict_of(results, "weight version over gloo, streaming") == "not reached: 1.20x off"
    assert verdict_of(results, "weight version through shared memory /") == "not reached: 1.80x off"
    assert verdict_of(results, "weight version through shared memory, streaming") == "not measured"
    text = render(results)
    assert "### (j) A weight version over gloo" in text
    assert "**0.95** · 1.90 GB/s | 0.55 s | 3.0 MiB" in text


def test_who_brings_weights_saves_and_loads_nothing_and_is_ours() -> None:
    named = {name for name, peer in PEERS.items() if peer.syncs}
    assert named <= set(OURS)
    assert {f"holdfast-sync-delta-{share}" for share in DELTA_SHARES} <= set(OURS)
    assert not any(PEERS[name].saves or PEERS[name].loads or PEERS[name].exports for name in named)


@pytest.mark.parametrize("share", [0.0, *DELTA_SHARES.values()])
def test_a_share_of_the_weights_is_changed(share: float) -> None:
    entries = layout({"kind": "weights", "layers": 4, "hidden": 64, "vocab": 256})
    by_name = {entry.name: entry for entry in entries}
    found = rows_of_share(entries, share)
    assert len(dict(found)) == len(found), "each tensor once"
    changed = sum(by_name[name].nbytes // by_name[name].shape[0] * rows for name, rows in found)
    assert changed == pytest.approx(share * sum(entry.nbytes for entry in entries), abs=512)
    assert all(rows == by_name[name].shape[0] for name, rows in found[:-1]), "whole tensors, but for the last"


def test_a_model_has_the_names_of_transformers_for_those_who_want_them() -> None:
    assert hf_name("layers.7.q.weight") == "model.layers.7.self_attn.q_proj.weight"
    assert hf_name("layers.0.norm2.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert (hf_name("embed.weight"), hf_name("norm.weight")) == ("model.embed_tokens.weight", "model.norm.weight")


def test_the_page_cache_is_warmed_and_evicted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(bytes(8 << 20))
        file.flush()
        os.fsync(file.fileno())
    warm(path)
    if cached_fraction(path) < 1.0:
        pytest.skip("this file system does not say what is in the page cache")
    evict(path)
    assert cached_fraction(path) < 0.1
    assert cached_fraction(path) < 0.1, "looking at it has not read it"


def test_cpu_seconds_of_children_are_counted() -> None:
    before = tree_cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", "for _ in range(6_000_000): pass"], check=True, timeout=600)
    assert tree_cpu_s(os.getpid()) - before > 0.02
    assert os.getpid() in tree_of(os.getpid())


class Turns:
    """A worker as far as taking turns needs one."""

    pids: tuple[int, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name


def test_all_take_turns_and_only_the_slow_stop_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench.os.sync", lambda: None)
    monkeypatch.setattr("benchmarks.bench.Bench._wait_quiet", lambda _: None)
    clock = [0.0]
    its_time = SimpleNamespace(monotonic=lambda: clock[0], strftime=time.strftime)
    monkeypatch.setattr("benchmarks.bench.time", its_time)  # real durations would be those of a shared machine
    size = dataclasses.replace(SIZES["tiny"], rounds_budget_s=0.5, rounds_least=3)
    bench = Bench(size, tmp_path)
    order = []

    def turn(worker: Turns) -> dict[str, float]:
        order.append(worker.name)
        clock[0] += 0.15 if worker.name == "slow" else 0.001
        if worker.name == "broken":
            raise WorkerFailed("it can't")
        return {"held_s": 1.0}

    workers: list = [Turns(name) for name in ("quick", "broken", "slow")]
    bench.rounds("case", workers, turn, counted=5)
    assert order[:3] == ["quick", "broken", "slow"], "round by round"
    assert order.count("quick") == 6
    assert order.count("slow") == 4, "one not counted, and the least that a case has"
    assert order.count("broken") == 1
    assert bench.results.values("case", "quick", "held_s") == [1.0] * 5
    assert [problem.contender for problem in bench.results.problems] == ["broken"]


def test_who_keeps_nothing_between_turns_begins_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench.Bench._wait_quiet", lambda _: None)
    bench = Bench(SIZES["tiny"], tmp_path)
    turns: list = []
    workers: list = [Turns(name) for name in ("holdfast", "dcp-save", "dcp-thread")]
    bench.rounds("case", workers, lambda worker: turns.append(worker.name) or {"held_s": 1.0}, counted=2)
    assert turns == ["holdfast", "dcp-thread", *["holdfast", "dcp-save", "dcp-thread"] * 2]
    assert all(len(bench.results.values("case", worker.name, "held_s")) == 2 for worker in workers)


def test_ours_and_the_fastest_peer_have_all_rounds_and_the_very_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.bench.os.sync", lambda: None)
    monkeypatch.setattr("benchmarks.bench.Bench._wait_quiet", lambda _: None)
    clock = [0.0]
    monkeypatch.setattr("benchmarks.bench.time", SimpleNamespace(monotonic=lambda: clock[0], strftime=time.strftime))
    turns_s = {"raw": 3.0, "holdfast": 9.0, "near": 5.0, "far": 8.0, "farthest": 30.0}
    size = dataclasses.replace(SIZES["tiny"], rounds_budget_s=20.0, rounds_least=2, slow_turn_s=12.0)
    bench = Bench(size, tmp_path)

    def turn(worker: Turns) -> dict[str, float]:
        clock[0] += turns_s[worker.name]
        return {"held_s": 1.0}

    workers: list = [Turns(name) for name in turns_s]
    bench.rounds("case", workers, turn, counted=5)
    counted = {name: len(bench.results.values("case", name, "held_s")) for name in turns_s}
    assert counted == {"raw": 5, "holdfast": 5, "near": 5, "far": 2, "farthest": 1}


def test_the_others_stand_still_at_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench.os.sync", lambda: None)
    monkeypatch.setattr("benchmarks.bench.Bench._wait_quiet", lambda _: None)
    bench = Bench(SIZES["quick"], tmp_path)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        mine, other = (SimpleNamespace(name=str(one.pid), pids=[one.pid], alive=True) for one in others)
        bench._kept = {("mine", 1): mine, ("other", 1): other}

        def state(worker: SimpleNamespace) -> str:
            return Path(f"/proc/{worker.pids[0]}/stat").read_text().rpartition(")")[2].split()[0]

        def turn(_: object) -> dict[str, float]:
            deadline = time.monotonic() + 10.0
            while state(other) != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state(other) == "T"
            assert state(mine) != "T"
            return {"held_s": 1.0}

        bench.rounds("save", [mine], turn, counted=1, first=1)
        assert state(other) != "T"
        assert len(bench.results.samples) == 1
    finally:
        for one in others:
            one.kill()
            one.wait()


def test_saves_to_stores_are_measured_against_obstore_and_s3torchconnector() -> None:
    case = "stores-seaweedfs"
    results = results_with(
        (case, "raw-store", {"save_s": 2.0, "load_s": 1.0, "save_cpu_s": 0.3}),
        (case, "holdfast-store", {"save_s": 2.2, "load_s": 1.5, "save_cpu_s": 0.9, "save_peak_bytes": 300 << 20}),
        (case, "s3torchconnector", {"save_s": 4.0, "load_s": 2.0, "save_cpu_s": 1.0}),
    )
    assert verdict_of(results, "save to a store / raw obstore, SeaweedFS") == "ok"
    assert verdict_of(results, "load from a store / raw obstore, SeaweedFS") == "not reached: 1.30x off"
    assert verdict_of(results, "CPU of a save to a store / s3torchconnector's, SeaweedFS") == "ok"
    assert verdict_of(results, "memory beside images, save to a store, SeaweedFS") == "not reached: 1.17x off"
    assert verdict_of(results, "save to a store / raw obstore, Ceph") == "not measured"
    assert "### (m) SeaweedFS on loopback" in render(results)


def test_stores_are_measured_only_where_they_are_asked_for() -> None:
    assert not any(is_run(CASES["stores"], size) for size in SIZES.values())
    assert all(is_run(CASES["save"], size) for size in SIZES.values())


def test_what_is_mapped_of_a_file_is_left_out_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "state.target"
    path.write_bytes(bytes(32 << 20))
    before = tree_memory(os.getpid(), str(tmp_path / "state")).others
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert mapped[:].count(0) == 32 << 20  # touches it
        assert tree_memory(os.getpid()).others - before > 24 << 20
        assert tree_memory(os.getpid(), str(tmp_path / "state")).others - before < 24 << 20


def test_deltas_of_a_trained_model_are_measured(tmp_path: Path) -> None:
    delta.main(["--quick", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["rates"]) == ["1e-06", "3e-06", "0.0001"]
    for found in results["rates"].values():
        one = found["one step"]
        assert 0 < one["changed"] < 1
        assert one["steps, zstd"] <= one["steps"] <= 1.1
    assert (tmp_path / "delta.png").stat().st_size > 1000
    assert "| 1e-06 | one step |" in (tmp_path / "report.md").read_text()
