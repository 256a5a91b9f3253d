"""Documents of a real root: its summary, a checkpoint's columns, statistics, and the page that is made of them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.catalog.journal import JournalLines
from holdfast.catalog.listing import RootListing
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.loader.checkpoint import open_checkpoint, source_of
from holdfast.loader.comparison import compare
from holdfast.view.model import is_at_work, summary_of
from holdfast.view.page import policy, render_page
from holdfast.view.statistics import all_statistics, difference_of, statistics_of
from holdfast.view.tensors import tensors_of

EVIL = "</script><script>alert(1)</script><!--"
SOURCE = str(Path(holdfast.__file__).parents[1])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Steps 100 to 400 of one run, of which 200 is pinned; then back to 200, and 250."""
    path = tmp_path_factory.mktemp("root")
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"model": {"weight": weight, "odd": torch.tensor([1.0, math.nan, math.inf, 0.0])}, EVIL: {"n": 1}}
    config = holdfast.CheckpointConfig(keep=holdfast.Keep(last=None))
    with holdfast.CheckpointManager(path, state, config=config) as manager:
        for step in (100, 200, 300, 400):
            weight += 1
            manager.save(step, metrics={"loss": math.nan if step == 300 else 1 / step}).result()
        manager.pin(200)
        manager.restore(200)
        manager.save(250).result()
    return path


def rows_of(summary):
    return {row["step"]: row for row in summary["steps"]}


def test_the_summary_has_what_manifests_tell(root):
    summary = summary_of(str(root))
    json.dumps(summary, allow_nan=False)
    rows = rows_of(summary)
    assert list(rows) == [300, 400, 100, 200, 250], "oldest first; what was abandoned in front"
    assert rows[250]["latest"]
    assert rows[300]["metrics"] == {"loss": "nan"}
    assert rows[100]["world"] == 1
    assert rows[200]["pinned"]
    assert rows[250]["parent"] == rows[200]["attempt"]
    assert [rows[step]["standing"] for step in (300, 400, 100, 250)] == [False, False, True, True]
    assert summary["branches"] == [{"branch": 0, "from": None, "at": None}, {"branch": 1, "from": 0, "at": 200}]


def test_without_a_journal_only_what_always_holds_keeps_a_step(root, tmp_path):
    target = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(root), str(target)], check=True)
    (target / ".holdfast" / "journal.jsonl").unlink()
    summary = summary_of(str(target))
    rows = rows_of(summary)
    assert not summary["journal"]["present"]
    assert summary["keep"] is None
    assert summary["goodput"] is None
    assert rows[250]["kept"] == ["the newest", "the newest to resume from"]
    assert rows[200]["kept"] == ["pinned"]
    assert rows[400]["kept"] == []
    assert [save["step"] for save in summary["saves"]] == [100, 200, 300, 400, 250], "by time"
    assert {save["stall_s"] for save in summary["saves"]} == {None}


JOB = """
import os, sys, torch, holdfast
manager = holdfast.CheckpointManager(sys.argv[1], {"w": torch.ones(4)}, process_group="alone")
for step in (1, 2, 3):
    manager.save(step).result()
print(len(manager.steps()), flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_published_is_not_in_work(tmp_path):
    """The line that tells of it comes a moment after the save has ended: here it is taken out again."""
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"3\n"
        journal = tmp_path / ".holdfast" / "journal.jsonl"
        ends_at = time.monotonic() + 60
        while journal.read_text().count('"save.published"') < 3:
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        lines = journal.read_text().splitlines(keepends=True)
        lines = [line for line in lines if not ('"save.published"' in line and '"step":3' in line)]
        journal.write_text("".join(lines))
        assert outcomes_of(tmp_path) == ["published"] * 3, "also while it lives"
        hidden = tmp_path / "step-3"
        hidden.rename(tmp_path.parent / "step-3")
        assert outcomes_of(tmp_path) == ["published", "published", "started"]
        job.kill()
    assert outcomes_of(tmp_path) == ["published", "published", "cut off"]
    (tmp_path.parent / "step-3").rename(hidden)
    assert outcomes_of(tmp_path) == ["published"] * 3


@pytest.mark.parametrize(
    ("path", "age_s", "expected"), [("s3://b/r", 5, True), ("s3://b/r", 90, False), ("/r", 5, False)]
)
def test_on_a_store_somebody_is_at_work_while_the_journal_is_young(path, age_s, expected):
    """There a save that is staged has no attempt yet, and no one holds the root."""
    journal = JournalLines([{"t": time.time() - age_s, "run": "a", "kind": "step"}])
    assert is_at_work(RootListing(path, (), None, {}), journal) == expected
    assert not is_at_work(RootListing(path, (), None, {}), JournalLines([]))


def outcomes_of(root: Path) -> list[str]:
    return [save["outcome"] for save in summary_of(str(root))["saves"]]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (
            {"last": 2, "every": 200, "best": {"metric": "loss", "mode": "min", "n": 1}},
            {200: ["pinned", "last 2", "every 200"], 400: ["every 200", "best loss"]},
        ),
        ({"last": "all"}, {200: ["pinned"], 400: []}),
        ({"last": 1, "best": {"metrics": "loss"}}, {200: ["pinned"], 400: []}),
        ("none", {200: ["pinned"], 400: []}),
    ],
)
def test_the_runs_retention_is_the_journals(root, tmp_path, told, kept):
    target = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(root), str(target)], check=True)
    started = {"v": 1, "t": 1.0, "run": "a", "kind": "run.started", "config": {"keep": told}}
    (target / ".holdfast" / "journal.jsonl").write_text(json.dumps(started) + "\n")
    rows = rows_of(summary_of(str(target)))
    assert {step: rows[step]["kept"] for step in kept} == kept


def test_columns_tell_shards_and_what_changed(root):
    one, two = (tensors_of(str(root / f"step-{step}")) for step in (100, 200))
    names = one["tensors"]["name"]
    assert names == sorted(names)
    at = names.index("model.weight")
    assert one["shapes"][one["tensors"]["shape"][at]] == (3, 4)
    assert one["dtypes"][one["tensors"]["dtype"][at]] == ["float32", 4]
    assert sum(one["tensors"]["shards"]) == len(one["shards"]["box"])
    assert one["files"][one["shards"]["file"][at]][2] == 0, "written by rank 0"

    def sum_of(columns, name):
        first = sum(columns["tensors"]["shards"][: columns["tensors"]["name"].index(name)])
        return base64.b64decode(columns["shards"]["sums"])[8 * first : 8 * first + 8]

    assert sum_of(one, "model.odd") == sum_of(two, "model.odd")
    assert sum_of(one, "model.weight") != sum_of(two, "model.weight")
    assert any(name.startswith(EVIL) for name, *_ in one["objects"])


def test_statistics_are_those_of_the_values(root):
    path = str(root / "step-100")
    found = statistics_of(path, "model.weight")
    values = torch.arange(12.0, dtype=torch.float64) + 1
    assert (found["min"], found["max"], found["elements"], found["zeros"]) == (1, 12, 12, 0)
    assert found["mean"] == pytest.approx(float(values.mean()))
    assert found["std"] == pytest.approx(float(values.std(correction=0)))
    assert found["norm"] == pytest.approx(float(values.norm()))
    assert sum(found["histogram"]["counts"]) == 12
    odd = statistics_of(path, "model.odd")
    assert (odd["nan"], odd["inf"], odd["zeros"], odd["mean"]) == (1, 1, 1, 0.5)
    json.dumps(odd, allow_nan=False)
    together = all_statistics(path, bytes_max=1 << 20)
    assert together["model.weight"] == found
    assert together["model.odd"] == odd
    assert set(all_statistics(path, bytes_max=20)) == {"model.odd"}, "the small ones first"
    with pytest.raises(CheckpointNotFound, match=r"model\.none"):
        statistics_of(path, "model.none")


def test_a_deviation_that_is_small_against_the_mean_is_right(tmp_path, monkeypatch):
    """Such as that of identifiers, or of steps."""
    values = torch.arange(4096, dtype=torch.int64) % 2 + 10**9
    holdfast.save({"w": values}, tmp_path / "one")
    assert statistics_of(str(tmp_path / "one"), "w")["std"] == pytest.approx(0.5, rel=1e-12)
    monkeypatch.setattr("holdfast.view.statistics.PART_BYTES", 1 << 10)
    assert statistics_of(str(tmp_path / "one"), "w")["std"] == pytest.approx(0.5, rel=1e-12)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no fp4")
def test_packed_elements_have_no_statistics(tmp_path):
    packed = torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    holdfast.save({"packed": packed, "w": torch.ones(3)}, tmp_path / "one")
    assert set(all_statistics(str(tmp_path / "one"), bytes_max=1 << 20)) == {"w"}
    with pytest.raises(ConfigError, match="float4_e2m1fn_x2"):
        statistics_of(str(tmp_path / "one"), "packed")


def test_a_large_tensor_is_read_by_parts_and_a_larger_one_in_part(tmp_path, monkeypatch):
    values = torch.randn(64, 1024)
    holdfast.save({"w": values, "z": torch.tensor(3.0)}, tmp_path / "one")
    monkeypatch.setattr("holdfast.view.statistics.PART_BYTES", 32 << 10)
    found = statistics_of(str(tmp_path / "one"), "w")
    assert found["elements"] == values.numel()
    assert found["share_read"] == 1
    assert found["mean"] == pytest.approx(float(values.double().mean()))
    assert sum(found["histogram"]["counts"]) == values.numel()
    part = statistics_of(str(tmp_path / "one"), "w", bytes_max=64 << 10)
    assert part["share_read"] == pytest.approx(0.25)
    assert part["elements"] == values.numel() // 4
    assert statistics_of(str(tmp_path / "one"), "z")["mean"] == 3


def test_differences_are_those_of_the_values(root, tmp_path):
    one, two = (str(root / f"step-{step}") for step in (100, 200))
    found = difference_of(one, two, "model.weight")
    first = torch.arange(12.0, dtype=torch.float64) + 1
    assert found["max_abs"] == 1
    assert found["share_changed"] == 1
    assert found["relative"] == pytest.approx(float(torch.ones(12).norm() / first.norm()))
    assert found["cosine"] == pytest.approx(float(torch.cosine_similarity(first, first + 1, dim=0)))
    same = difference_of(one, two, "model.odd")
    assert (same["share_changed"], same["max_abs"], same["relative"]) == (0, 0, 0)
    holdfast.save({"model": {"weight": torch.zeros(2)}}, tmp_path / "other")
    with pytest.raises(ConfigError, match="shape"):
        difference_of(one, str(tmp_path / "other"), "model.weight")


def test_differences_are_those_that_diff_prints(tmp_path):
    """Bits count: -0 isn't 0, another NaN is another, the same NaN is the same; of two dtypes, the numbers count."""
    one = torch.tensor([0.0, math.nan, math.nan, 1.0, math.inf, 2.0])
    two = torch.tensor([-0.0, math.nan, -math.nan, 1.0, math.inf, 2.5])
    two.view(torch.int32)[2] = -4194303
    paths = [str(tmp_path / name) for name in ("one", "two", "half", "none")]
    packed = torch.zeros(3, dtype=torch.complex64)
    tensors = [(one, packed + 3j), (two, packed + 4j), (one.bfloat16(), packed), (one * 0, packed)]
    for path, (values, numbers) in zip(paths, tensors, strict=True):
        holdfast.save({"model": {"weight": values, "complex": numbers}}, path)
    for other in paths[1], paths[3]:
        changes = {
            change.name: change
            for change in compare(*(source_of(open_checkpoint(p)) for p in (paths[0], other))).changed
        }
        for name, change in changes.items():
            found = difference_of(paths[0], other, name)
            relative = change.relative if math.isfinite(change.relative) else None
            assert (found["max_abs"], found["relative"]) == (change.max_abs, relative)
            assert (found["share_changed"], found["cosine"]) == (change.share, change.cosine)
        assert changes.keys() == {"model.weight", "model.complex"}
    assert difference_of(paths[0], paths[1], "model.weight")["share_changed"] == 3 / 6
    assert difference_of(paths[0], paths[2], "model.weight")["share_changed"] == 0
    assert difference_of(paths[3], paths[0], "model.weight")["cosine"] is None


def test_a_run_that_keeps_all_says_so(tmp_path):
    config = holdfast.CheckpointConfig(keep=None)
    with holdfast.CheckpointManager(tmp_path, {"w": torch.zeros(2)}, config=config) as manager:
        for step in (1, 2):
            manager.save(step).result()
    summary = summary_of(str(tmp_path))
    assert summary["keep"] is not None
    assert all(row["kept"] for row in summary["steps"])


def test_what_was_suspicious_about_a_save_is_told(tmp_path):
    model = torch.nn.Linear(4, 4)
    with holdfast.CheckpointManager(tmp_path, {"model": model}) as manager:
        manager.save(1).result()
        with torch.no_grad():
            model.weight[0, 0] = math.nan
        manager.save(2).result()
    found = rows_of(summary_of(str(tmp_path)))
    assert "suspicious" not in found[1]
    (row,) = found[2]["suspicious"]
    assert row["what"] == "nonfinite"
    assert "model.weight" in row["message"]


def test_nothing_of_a_checkpoint_becomes_markup(root):
    name = "step-100"
    page = render_page(
        summary_of(str(root)), checkpoints={name: tensors_of(str(root / name))}, statistics={EVIL: {"mean": 1}}
    )
    assert EVIL not in page
    summary = {**summary_of(str(root)), "root": EVIL, "held_by": f"{EVIL}&amp;\u2028"}
    page = render_page(summary, checkpoints={EVIL + '"': tensors_of(str(root / name))})
    assert EVIL not in page
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 3
    assert json.loads(scripts[0])["held_by"] == f"{EVIL}&amp;\u2028"
    packed = json.loads(gzip.decompress(base64.b64decode(scripts[1])))
    assert "model.weight" in packed["tensors"]["name"]


def test_the_policy_allows_this_style_and_this_script_and_no_request(root):
    page = render_page(summary_of(str(root)))
    assert policy(live=False) in page
    for tag in ("style", "script"):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in body]
        assert len(digests) == 1
        assert f"{tag}-src 'sha256-{digests[0]}'" in page
    assert "connect-src 'none'" in page
    assert "unsafe" not in policy(live=True)
    assert set(re.findall(r"https?://[^\s\"'`)]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", page)


def report(*args: str, without: str = "") -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.path.insert(0, {SOURCE!r}); sys.modules.update(dict.fromkeys({without.split()!r}))\n"
    run = f"{blocked}sys.argv = {['holdfast', *args]!r}\nfrom holdfast.cli.app import main\nmain()"
    return subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=100, check=False)


def test_a_report_is_written_without_torch(root, tmp_path):
    out = tmp_path / "page.html"
    done = report("report", str(root), "-o", str(out), "--json", without="torch numpy starlette uvicorn")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["included"] == ["step-250", "step-200"]
    assert told["nbytes"] == out.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_report_includes_the_steps_that_it_is_asked_for(root, tmp_path):
    out = tmp_path / "page.html"
    done = report("report", str(root), "-o", str(out), "--step", "100", "--step", "400", "--json")
    assert json.loads(done.stdout)["included"] == ["step-100", "step-400"]
    missing = report("report", str(root), "-o", str(out), "--step", "7")
    assert missing.returncode == 2
    assert "step 7 is not under" in missing.stderr
    one = report("report", str(root / "step-100"), "-o", str(out))
    assert one.returncode == 2
    assert f"give the root that holds it: {root}" in one.stderr
    nowhere = report("report", str(root), "-o", str(tmp_path / "none" / "page.html"))
    assert nowhere.returncode == 1
    assert "can't be written" in nowhere.stderr


def test_a_damaged_checkpoint_is_left_out_and_said_so(root, tmp_path):
    target = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(root), str(target)], check=True)
    (target / "step-250" / "rank-00000.report").write_bytes(b"not a report")
    done = report("report", str(target), "-o", str(tmp_path / "page.html"), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["included"] == ["step-200"]
    assert "step-250" in told["left_out"]


def test_view_says_which_extra_is_missing(root):
    done = report("view", str(root), "--port", "0", without="starlette")
    assert done.returncode == 2
    assert "pip install 'holdfast[view]'" in done.stderr
