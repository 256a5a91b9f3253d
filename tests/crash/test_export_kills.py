"""SIGKILL at every system call of jobs that export and save at the same steps, in one rank and in two.

As in test_kill_points.py, whose families these are. A job starts where an export died before its rename, which the
checkpoint of its step did not outlive: it is rolled forward, and replaced when the run comes by its step again. After
each kill:

- every export that can be seen passes ``holdfast verify``, and its tensors are those of its step; ``hf-latest`` names
  one; what was announced as failed is not there, what was announced as published is, or newer;
- what can be seen of checkpoints is whole, too, whatever became of the export of the same step, and conversely;
- the next start leaves nothing but checkpoints, exports and a link that names the newest, and can export.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import syscalls
import torch
from export_job import ASSETS, build, fill, is_of, manager_of, tensors_of, write_assets
from nursery import Nursery
from supervised import Act, Outcome, Point
from test_kill_points import (
    CHOICE,
    Family,
    Job,
    check_survivors,
    choose,
    run_all,
    show,  # noqa: F401 - a fixture
    sum_up,
)
from typer.testing import CliRunner

import holdfast
from holdfast.cli.app import app

pytestmark = pytest.mark.skipif(not syscalls.AVAILABLE, reason="numbers of system calls are known for x86-64 only")

FAMILIES = [
    Family("exports", 1, "kill", 2, module="export_job"),
    Family("exports", 1, "kill all", 2, module="export_job"),
    Family("exports", 2, "kill all", 2, module="export_job"),
    Family("exports", 2, "kill", 4, at_once=8, module="export_job"),
]
SLOW = FAMILIES[-1:]
"""Who is left waits for deadlines."""
TALKED_MAX = 10
"""Of equal calls on sockets, how many are tried: by these ranks wait for news, and exchange bytes."""
LINK = "hf-latest"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("export_job") as found:
        yield found


@pytest.fixture(scope="module")
def template(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints and exports, a third export that died before its rename, what is left of an older one."""
    home = tmp_path_factory.mktemp("template")
    root = home / "template"
    write_assets(root)
    state = build()
    with manager_of(root, state) as manager:
        for step in (1, 2):
            fill(state, step)
            manager.step(step)
            manager.wait()
    alone = Family("exports_alone", 1, "kill all", 0, module="export_job")
    point = Point("trainer-0", "rename", "hf/.hf-3.ATTEMPT.incomplete -> hf/hf-3", 1)
    job = Job(nursery, alone, root, home / "dies", Act(point, "kill all", window="life"))
    assert job.finish().hit == ["life"], job.child.stderr()
    exports = job.root / "hf"
    assert any(path.name.endswith(".incomplete") for path in exports.iterdir())
    shutil.copytree(exports / "hf-2", exports / f".hf-0.{'0123456789ab'}.trash")
    (exports / f".{LINK}.new").symlink_to("hf-0")
    return job.root


def verify_as_users_do(path: Path) -> None:
    ended = CliRunner().invoke(app, ["verify", str(path)])
    assert ended.exit_code == 0, ended.output


def visible_exports(root: Path) -> dict[str, str]:
    """Return the attempt of every visible export, by name; each must be complete, with the state of its step."""
    found = {}
    for path in (root / "hf").iterdir():
        if path.name.startswith(".") or path.name == LINK:
            continue
        verify_as_users_do(path)
        manifest = json.loads((path / "holdfast.json").read_text())
        assert (manifest["name"], manifest["kind"]) == (path.name, "export")
        files = set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].values())
        assert len(files) == 2
        held = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(path / file).items()}
        wanted = tensors_of(step_of(path.name))
        assert held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(held[name], tensor), f"{name} of {path.name} is not that of its step"
        for name, text in ASSETS.items():
            assert (path / name).read_text() == text
        found[path.name] = manifest["attempt"]
    link = root / "hf" / LINK
    if found or link.is_symlink():
        assert os.readlink(link) in found, f"{LINK} names {os.readlink(link)}, there are {sorted(found)}"
    return found


def visible_checkpoints(root: Path) -> dict[str, str]:
    found = {}
    for path in (root / "checkpoints").iterdir():
        if not path.name.startswith("."):
            checkpoint = holdfast.open(path)
            assert checkpoint.verify().ok, path
            state = build()
            holdfast.load(state, path)
            assert is_of(state, step_of(path.name)), f"{path.name} is not the state of its step"
            found[path.name] = checkpoint.manifest.attempt
    return found


def step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def newest(found: dict[str, str]) -> int:
    return max(map(step_of, found))


def check_told(outcome: Outcome, kind: str, seen: dict[str, str]) -> None:
    """Check that the reported outcomes are true, and equal on all ranks."""
    told = [event for event in outcome.told("told") if event["kind"] == kind]
    for event in told:
        assert event["error"] is None or event["causes"][0]["ours"], event
        if event["error"] not in (None, "OutcomeUnknown"):
            assert event["attempt"] not in seen.values(), f"{event} was announced as failed and is there"
            assert not any(other["error"] is None and other["step"] == event["step"] for other in told), (
                f"published on one rank, failed on another: {told}"
            )
    published = max((event["step"] for event in told if event["error"] is None), default=2)
    assert newest(seen) >= max(2, published), f"{kind} {published} was announced, there are {sorted(seen)}"


def check_next_start(root: Path, checkpoints: dict[str, str], exports: dict[str, str]) -> int:
    """Check that the next start cleans up and continues from the newest; return how many exports it rolled forward."""
    state = build()
    with manager_of(root, state, keep=9) as manager:
        settled = visible_exports(root)
        assert not [name for name in os.listdir(root / "hf") if name.startswith(".") and name != ".holdfast"]
        assert exports.keys() <= settled.keys()
        assert os.readlink(root / "hf" / LINK) == f"hf-{newest(settled)}"
        step = manager.restore()
        assert step is not None
        assert step >= newest(checkpoints)
        assert is_of(state, step)
        for number in (step + 1, 90):  # the first may replace an export that was left behind
            fill(state, number)
            for handle in manager.step(number):
                handle.result(30)
    after = visible_exports(root)
    assert {*settled, f"hf-{step + 1}", "hf-90"} == set(after)
    assert sorted(os.listdir(root / "hf")) == sorted([".holdfast", LINK, *after])
    assert os.readlink(root / "hf" / LINK) == "hf-90"
    saved = visible_checkpoints(root)
    assert {*checkpoints, f"step-{step + 1}", "step-90"} <= set(saved)
    assert sorted(os.listdir(root / "checkpoints")) == sorted([".holdfast", *saved])
    return sum(exports.get(name) != attempt for name, attempt in settled.items())


def check(family: Family, act: Act, job: Job) -> tuple[bool, int]:
    """Return whether the point was reached, and how many exports were rolled forward."""
    outcome = job.finish()
    if not outcome.hit:
        assert outcome.status == [0] * family.world, job.child.stderr()
    else:
        check_survivors(family, act, outcome)
    exports, checkpoints = visible_exports(job.root), visible_checkpoints(job.root)
    check_told(outcome, "export", exports)
    check_told(outcome, "checkpoint", checkpoints)
    return bool(outcome.hit), check_next_start(job.root, checkpoints, exports)


def is_tried(point: Point) -> bool:
    talks = point.call in syscalls.TALKING or point.target.startswith("socket")
    return not talks or point.number <= TALKED_MAX


@pytest.mark.timeout(7200 if CHOICE else 120)
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.slow if family in SLOW else ()) for family in FAMILIES],
    ids=lambda family: str(family).replace(", ", "-").replace(" ", "_"),
)
def test_kill_at_every_call_of_an_export(
    family: Family,
    nursery: Nursery,
    template: Path,
    tmp_path: Path,
    show: list[str],  # noqa: F811
    tried: Counter[str],
) -> None:
    began = time.monotonic()
    undisturbed = Job(nursery, family, template, tmp_path / "undisturbed", None)
    outcome = undisturbed.finish()
    assert outcome.status == [0] * family.world, undisturbed.child.stderr()
    assert outcome.told("closed")
    told = [(event["kind"], event["step"], event["error"]) for event in outcome.told("told", rank=0)]
    assert sorted(told) == [(kind, step, None) for kind in ("checkpoint", "export") for step in (3, 4)]
    seen = outcome.seen["life"]
    points = [point for point in seen if is_tried(point)]
    acts = [Act(point, family.kind, window="life") for point in choose(points, family.few)]
    reached, rolled_forward = run_all(nursery, family, template, acts, tmp_path, check=check)
    sum_up(family, points, seen, reached, tried, f"{rolled_forward} exports rolled forward", began, show)
