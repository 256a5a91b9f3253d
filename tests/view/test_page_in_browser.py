"""The page in a real browser: every view is opened, sorted, filtered and gone into; nothing is asked of anybody.

Needs Debian's chromium and chromedriver; checks of accessibility need axe-core as well, from npm: in `node_modules` of
``HOLDFAST_AXE``, or of the directory above the sources.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import MISSING, Browser, browser
from job import Job
from large_root import make_root

import holdfast
from holdfast.format.manifest import (
    FORMAT,
    IndexObject,
    IndexTensor,
    Manifest,
    ManifestReport,
    RankIndex,
    Report,
    ReportFile,
    encode_index,
    encode_manifest,
    encode_report,
    report_name,
)
from holdfast.format.sealed import xxh3_128

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

EVIL = "<img src=x onerror=__bad.push('evil')>"
AXE = next(
    (
        place / "axe-core" / "axe.min.js"
        for place in (Path(os.environ.get("HOLDFAST_AXE", "node_modules")), Path(".venvs/view/node_modules"))
        if (place / "axe-core" / "axe.min.js").is_file()
    ),
    None,
)
VIEWS = ("timeline", "steps", "checkpoint", "tensor", "diff", "lineage")
ROWS = (
    "return [...document.querySelectorAll('#panel-' + arguments[0] + ' tr.row')]"
    ".filter((row) => row.checkVisibility()).map((row) => row.innerText)"
)
SERIOUS = (
    "return axe.run().then((found) => found.violations.filter((one) => ['serious', 'critical'].includes(one.impact))"
    ".map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 200))]))"
)


@pytest.fixture(scope="module")
def window(tmp_path_factory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Five steps, a save that failed, versions and a verification."""
    path = tmp_path_factory.mktemp("page") / "root"
    job = Job(path, keep=holdfast.Keep(last=4, every=20))
    for step in (10, 20, 30, 40, 50):
        job.step(step)
    job.manager.pin(30)
    job.fail(60, "StorageError", f"No space left on device {EVIL}")
    job.note("verify", name="step-40", step=40, problems=0)
    job.note("version.published", version=1, step=50)
    job.note("version.received", receivers=[["rollout-0", 1, 0.2], ["rollout-1", 1, 0.3], ["rollout-1", None, None]])
    job.close()
    return path


@pytest.fixture(scope="module")
def page(root, tmp_path_factory) -> str:
    """The URL of its report."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    command = [sys.executable, "-m", "holdfast", "report", str(root), "-o", str(out), "--stats"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return out.as_uri()


@pytest.fixture
def opened(window, page) -> Iterator[Browser]:
    window.resize(1280, 900)
    window.prefer("light")
    window.open(page)
    yield window
    assert window.bad() == []
    assert window.requests() == []


def rows(window: Browser, view: str) -> list[str]:
    return window.run(ROWS, view)


def test_the_timeline_tells_saves_failures_and_goodput(opened):
    text = opened.text("#panel-timeline")
    assert "goodput" in text
    assert re.search(r"saves\s+5 1 failed", text)
    assert "StorageError" in text
    assert EVIL in text, "as text"
    opened.run("document.querySelector('#panel-timeline [role=application]').focus()")
    opened.press("Left")
    assert opened.text("#panel-timeline .stack h2") == "step-50"
    opened.press("Enter")
    assert "step-50, published" in opened.run("return document.getElementById('live').textContent")


def test_steps_are_sorted_filtered_and_opened(opened):
    opened.go("steps")
    assert [row.split()[0] for row in rows(opened, "steps")] == ["50", "40", "30", "20"], "the newest first"
    assert "newest" in rows(opened, "steps")[0]
    assert "pinned" in rows(opened, "steps")[2]
    assert "every 20" in rows(opened, "steps")[3]
    opened.run(
        "[...document.querySelectorAll('#panel-steps th button')].find((b) => b.innerText.startsWith('loss')).click()"
    )
    assert [row.split()[0] for row in rows(opened, "steps")] == ["20", "30", "40", "50"], "by loss, the largest first"
    assert opened.run(
        "return document.querySelector('#panel-steps th[aria-sort=descending]').innerText.startsWith('loss')"
    )
    opened.press("/")
    opened.press("pinned")
    opened.wait("return document.querySelectorAll('#panel-steps tr.row').length === 1")
    opened.press("Tab")
    opened.run("document.querySelector('#panel-steps [role=grid]').focus()")
    opened.press("Down")
    opened.press("Enter")
    opened.wait("return location.hash === '#checkpoint/step-30'")


def test_a_checkpoint_is_gone_into(opened):
    opened.go("checkpoint", "step-50")
    opened.wait("return document.querySelector('#panel-checkpoint tr.row')")
    assert any("optimizer.state" in row for row in rows(opened, "checkpoint"))
    opened.run("document.querySelector('#panel-checkpoint [role=treegrid]').focus()")
    before = len(rows(opened, "checkpoint"))
    opened.press("Down")
    assert (
        opened.run("return document.querySelector('#panel-checkpoint tr.active').getAttribute('aria-expanded')")
        == "true"
    )
    opened.press("Left")
    assert len(rows(opened, "checkpoint")) < before
    opened.press("/")
    opened.press("attn.weight exp")
    opened.wait(
        "return [...document.querySelectorAll('#panel-checkpoint tr.row code')].some((name) => name.checkVisibility())"
    )
    opened.click("#panel-checkpoint tr.row code")
    opened.wait("return location.hash.includes('exp_avg')")
    picture = "#panel-checkpoint svg[aria-label^='Shards of']"
    opened.wait(f'return document.querySelector("{picture}")')
    assert "Whole in one place" in opened.text("#panel-checkpoint .two > div")


def test_statistics_that_the_report_has(opened):
    opened.go("tensor", "step-50", "model.frozen.weight")
    opened.wait("return document.querySelector('#panel-tensor svg[aria-label^=Histogram]')")
    assert re.search(r"elements\s+256", opened.text("#panel-tensor"))
    opened.go("tensor", "step-40", "model.frozen.weight")
    opened.wait("return document.querySelector('#panel-tensor').innerText.includes('has no statistics')")


def test_a_tensor_without_a_finite_value_has_no_norm(window, tmp_path):
    job = Job(tmp_path / "root")
    with torch.no_grad():
        job.model["frozen"].weight.fill_(math.nan)
    job.step(1)
    job.close()
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "holdfast", "report", str(tmp_path / "root"), "-o", str(out), "--stats"]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    window.open(out.as_uri())
    window.go("tensor", "step-1", "model.frozen.weight")
    window.wait("return document.querySelector('#panel-tensor').innerText.includes('256 NaN')")
    assert re.search(r"least, most\s+–\s+norm\s+–\s", window.text("#panel-tensor"))
    window.go("tensor", "step-1", "model.layers.0.attn.weight")
    window.wait("return document.querySelector('#panel-tensor svg[aria-label^=Histogram]')")
    assert re.search(r"norm\s+\d", window.text("#panel-tensor"))


def test_a_diff_tells_what_changed(opened):
    opened.go("diff", "step-40", "step-50")
    opened.wait("return document.querySelector('#panel-diff tr.row')")
    found = {row.split()[0]: row for row in rows(opened, "diff")}
    assert "relative" not in opened.text("#panel-diff thead"), "a report compares no values"
    assert "unchanged" in found["model.frozen.weight"]
    assert "100 %" in found["model.layers.0.attn.weight"]
    opened.run("document.querySelector('#panel-diff [role=application]').focus()")
    opened.press("Down")
    opened.press("Enter")
    assert len(rows(opened, "diff")) < len(found)
    opened.go("diff", "step-20", "step-50")
    opened.wait("return document.querySelector('#panel-diff').innerText.includes('are not in this report')")


def test_lineage_has_branches_and_versions(opened):
    opened.go("lineage")
    assert "the run never went back" in opened.text("#panel-lineage")
    text = opened.text("#panel-lineage")
    assert "rollout-0" in text
    assert "rollout-1" not in text, "it has left"
    assert opened.run(
        "return [...document.querySelectorAll('#panel-lineage button.link')].map((b) => b.innerText)"
    ) == ["50"]
    assert len(opened.run("return [...document.querySelectorAll('#panel-lineage circle')].map(String)")) == 4


def test_tabs_follow_the_keyboard_and_the_address(opened):
    opened.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    for name in (*VIEWS[1:], VIEWS[0]):
        opened.press("Right")
        opened.wait("return document.activeElement.id === arguments[0]", f"tab-{name}")
        assert opened.run("return document.querySelectorAll('[role=tabpanel]:not([hidden])').length") == 1
    opened.press("End")
    opened.wait("return location.hash === '#lineage'")
    opened.run("document.activeElement.blur()")
    opened.press("2")
    opened.wait("return location.hash === '#steps'")
    opened.press("Down")
    opened.wait("return document.activeElement.getAttribute('role') === 'grid'")
    opened.press("Down")
    opened.press("Enter")
    opened.wait("return location.hash.startsWith('#checkpoint/step-')")
    opened.run("document.activeElement.blur()")
    opened.press("2")
    opened.press("?")
    opened.wait("return document.getElementById('keys').open")
    opened.press("Escape")


def test_what_has_the_focus_is_seen_to_have_it(opened):
    opened.go("steps")
    opened.wait("return document.querySelector('#panel-steps tr.row')")
    ring = "const found = getComputedStyle(document.activeElement); return [found.outlineStyle, found.outlineWidth]"
    reached = set()
    for _ in range(12):
        opened.press("Tab")
        role = opened.run("return document.activeElement.getAttribute('role') ?? document.activeElement.tagName")
        reached.add(role)
        if role == "grid":
            border = "return getComputedStyle(document.activeElement.parentNode).borderTopColor === arguments[0]"
            accent = opened.run("return getComputedStyle(document.querySelector('[aria-selected=true]')).color")
            assert opened.run(border, accent), "its frame has the accent's colour"
        elif role != "BODY":
            assert opened.run(ring) == ["solid", "2px"], role
    assert {"tab", "BUTTON", "INPUT", "SELECT", "grid"} <= reached


def test_the_switch_and_the_preference_choose_colours(opened):
    theme = "return document.documentElement.dataset.theme"
    assert opened.run(theme) == "light"
    opened.prefer("dark")
    opened.wait("return document.documentElement.dataset.theme === 'dark'")
    opened.click("#theme")
    assert opened.run(theme) == "light"
    opened.click("#theme")
    assert opened.run(theme) == "dark"
    opened.click("#theme")


@pytest.mark.parametrize("width", [400, 700])
def test_narrow_screens_dont_scroll_sideways(opened, width):
    opened.resize(width, 800)
    for route in (
        *((view,) for view in VIEWS),
        ("checkpoint", "step-50", "model.frozen.weight"),
        ("diff", "step-40", "step-50"),
    ):
        opened.go(*route)
        opened.wait("return !document.querySelector('[role=tabpanel]:not([hidden])').innerText.includes('…\\n')")
        assert opened.run("return document.documentElement.scrollWidth") <= width, route


def test_what_is_suspicious_is_seen_first_and_fits(window, tmp_path):
    job = Job(tmp_path / "root")
    job.step(1)
    with torch.no_grad():
        job.optimizer.state[job.model["layers"][0]["attn"].weight]["exp_avg_sq"][0] = math.nan
    job.step(2)
    job.close()
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "holdfast", "report", str(tmp_path / "root"), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    window.open(out.as_uri())
    window.resize(400, 900)
    window.go("steps")
    window.wait("return document.querySelector('#panel-steps tr.row')")
    first = "return document.querySelector('#panel-steps .chip.bad')"
    assert window.run(f"{first}.parentNode.firstChild === document.querySelector('#panel-steps .chip.bad')")
    assert window.run(f"{first}.innerText") == "suspicious"
    for route in (("timeline",), ("checkpoint", "step-2")):
        window.go(*route)
        window.wait(
            "return document.querySelector('[role=tabpanel]:not([hidden])').innerText.includes('NaN or Inf has')"
        )
        assert window.run("return document.documentElement.scrollWidth") <= 400, route
    assert window.bad() == []


@pytest.mark.skipif(AXE is None, reason="no axe-core here: npm install axe-core, and HOLDFAST_AXE=.../node_modules")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 400)])
def test_axe_finds_nothing_serious(opened, scheme, width):
    assert AXE is not None
    opened.prefer(scheme)
    opened.resize(width, 900)
    opened.run(AXE.read_text())
    for route in (
        *((view,) for view in VIEWS),
        ("checkpoint", "step-50", "model.frozen.weight"),
        ("tensor", "step-50", "model.frozen.weight"),
    ):
        opened.go(*route)
        opened.wait("return document.querySelector('[role=tabpanel]:not([hidden]) :is(tr, p, svg)')")
        found = opened.run(SERIOUS)
        assert found == [], (route, json.dumps(found, indent=1))
    opened.prefer("light")


def hostile_root(root: Path) -> None:
    """A checkpoint whose manifest, report and journal say what no run would, all of it well-formed."""
    attempt, name = "0" * 12, EVIL
    names = [
        EVIL,
        "__proto__.x",
        "constructor",
        "",
        ".",
        "a.b." * 2000,
        "n" * 20_000,
        "\u202e\n\t",
        "layers.0.w",
        "layers.00.w",
    ]
    shapes = [(0,), (), (2, 2), (1 << 40, 0), (1,) * 40]
    rows = [
        IndexTensor(tensor, (tensor,), "float32", shape, (0,) * len(shape), shape, 0, 0, 0, math.prod(shape) * 4, 64)
        for tensor, shape in ((tensor, shapes[at % 5]) for at, tensor in enumerate(names))
    ]
    index = encode_index(RankIndex(tuple(rows), (IndexObject(EVIL, (EVIL,), 0, 0, 64),)))
    files = (ReportFile("data", 64, bytes(8)),)
    data = encode_report(Report(attempt, 1, 0, 1, files, bytes(8 * len(rows)), index))
    line = ManifestReport(0, report_name(0), len(data), xxh3_128(data), 64)
    metrics = {EVIL: math.inf, "__proto__": 1.0, "constructor": math.nan, "\ud800": 2.0}
    extra = {"parent": EVIL, "lineage": [[0, 5], 3], "course": EVIL, "suspicious": EVIL}
    manifest = Manifest(
        FORMAT, name, attempt, 10**30, 1, "9999-12-31T23:59:59", metrics, True, {EVIL: EVIL}, (line,), (), extra
    )
    for place in (name, "step-1"):
        (root / place).mkdir(parents=True)
        (root / place / report_name(0)).write_bytes(data)
        (root / place / "holdfast.json").write_bytes(encode_manifest(manifest))
    (root / ".holdfast").mkdir()
    fields = {
        "name": EVIL,
        "step": -5,
        "error": EVIL,
        "message": EVIL,
        "rank": 10**20,
        "ranks": [[10**9, 0, 1e300, -5, None, -1]],
    }
    kinds = (
        "run.started",
        "save.started",
        "save.failed",
        "save.published",
        "warning",
        "version.received",
        "verify",
        EVIL,
    )
    lines = [
        json.dumps({"v": 1, "t": at, "run": EVIL, "kind": kind, **fields}) for at in (0, 99999999999) for kind in kinds
    ]
    (root / ".holdfast" / "journal.jsonl").write_text("\n".join(lines))


def test_a_checkpoint_of_anybody_is_text(window, tmp_path):
    hostile_root(tmp_path / "root")
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "holdfast", "report", str(tmp_path / "root"), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    window.open(out.as_uri())
    for route in (
        *((view,) for view in VIEWS),
        ("checkpoint", EVIL, "constructor"),
        ("tensor", EVIL, "constructor"),
        ("a", "%"),
    ):
        window.go(*route)
        window.wait("return document.querySelector('[role=tabpanel]:not([hidden]) :is(tr, p, svg)')")
    window.go("checkpoint", EVIL)
    window.wait("return document.querySelector('#panel-checkpoint tr.row')")
    assert window.run("return document.querySelector('#panel-checkpoint').innerText.includes(arguments[0])", EVIL)
    for _ in range(6):
        window.press("End")
    assert window.run("return document.querySelectorAll('img').length") == 0
    assert window.bad() == []
    assert window.requests() == []


def test_a_root_of_a_terabyte_opens_in_a_second(window, tmp_path, figures):
    """Of the thousand steps only the newest has reports, as a manifest is all that the others are asked for."""
    make_root(tmp_path / "root", steps=1000, whole=1)
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "holdfast", "report", str(tmp_path / "root"), "-o", str(out), "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=110).stdout)
    window.open(out.as_uri())
    opened_ms = window.run("return performance.getEntriesByType('navigation')[0].domComplete")
    window.go("checkpoint", "step-500000")
    window.wait("return document.querySelector('#panel-checkpoint tr.row')", seconds=60)
    assert "100\u202f000 tensors" in window.text("#panel-checkpoint")
    window.press("/")
    window.press("layers.200 experts.63")
    window.wait("return document.querySelector('#panel-checkpoint .push').innerText.startsWith('6 tensors')")
    assert window.run("return document.querySelectorAll('#panel-checkpoint tr.row').length") < 60, "rows in sight only"
    assert window.bad() == []
    figures.append(f"the page of 1,000 steps: {told['nbytes'] / 1e6:.1f} MB, drawn after {opened_ms:.0f} ms")


@contextlib.contextmanager
def live(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "holdfast", "view", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield re.search(r"http://\S+", server.stdout.readline())[0]
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()


def test_a_live_page_follows_a_job_and_reads_values(window, tmp_path):
    pytest.importorskip("uvicorn", reason="the extra `view` isn't installed")
    pytest.importorskip("starlette", reason="the extra `view` isn't installed")
    root = tmp_path / "root"
    root.mkdir()
    job = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("job.py")), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:

        def save() -> None:
            job.stdin.write("go\n")
            job.stdin.flush()
            assert job.stdout.readline()

        save()
        save()
        with live(root) as url:
            window.open(url)
            window.go("steps")
            window.wait("return document.querySelectorAll('#panel-steps tr.row').length === 2")
            save()
            window.wait("return document.querySelectorAll('#panel-steps tr.row').length === 3")
            assert "live" in window.text("#asof")
            window.go("tensor", "step-30", "model.layers.0.attn.weight")
            window.wait("return document.querySelector('#panel-tensor svg[aria-label^=Histogram]')", seconds=60)
            window.go("diff", "step-20", "step-30")
            window.wait("return document.querySelector('#panel-diff tr.row')")
            window.run("document.querySelector('#panel-diff .bar .bar button').click()")
            window.wait(
                "return /0\\.0\\d+/.test(document.querySelector('#panel-diff tr.row')?.innerText ?? '')", seconds=90
            )
            assert all(asked.startswith(url) for asked in window.requests())
            assert window.bad() == []
        window.wait("return document.getElementById('asof').innerText.includes('does not answer')")
    finally:
        job.stdin.close()
        job.wait(60)
        job.stdout.close()
