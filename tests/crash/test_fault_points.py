"""Every call by which a save or a start changes files fails, with every error a file system has; a real full disk, too.

As in test_kill_points.py a first run gives the points, and a supervisor makes each fail: once, or from there to the end
of the save, as a full or read-only file system does; a write is also done by half. One job goes on through all faults:
whatever fails, it is told a named error that has the errno, within the deadlines and alike on all ranks, or the
checkpoint is there and whole; and the next save, with the fault gone, is published.

HOLDFAST_KILL_POINTS says how many faults a family tries, evenly spread (some), ``all``, or ``A:B``.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import export_job
import pytest
import syscalls
from export_job import manager_of, write_assets
from kill_job import COMMIT_S, PERSIST_S, STAGE_S, build, settings
from nursery import Nursery
from processes import free_port
from supervised import Act, Outcome, Point
from test_export_kills import LINK, visible_exports
from test_kill_points import CHOICE, Family, make_template, show, visible  # noqa: F401 - a fixture

import holdfast

pytestmark = pytest.mark.skipif(not syscalls.AVAILABLE, reason="numbers of system calls are known for x86-64 only")

ERRNOS = {name: getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS")}
LASTING = ("ENOSPC", "EROFS", "EIO")
"""What a file system goes on saying once it has begun."""
DEADLINE_S = STAGE_S + PERSIST_S + 2 * COMMIT_S + 5.0
PER_JOB = 40
NAMES = {number: name for name, number in ERRNOS.items()} | {errno.EMFILE: "EMFILE"}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("fault_job") as found:
        yield found


def launch(
    nursery: Nursery, program: str, home: Path, root: Path, acts: list[Act], windows: list[str], world: int
) -> Outcome:
    arguments = {
        "program": ["fault_job", program],
        "arguments": {"root": str(root), "windows": windows},
        "outcome": str(home / "outcome"),
        "root": str(root),
        "acts": [asdict(act) for act in acts],
        "world": world,
        "opens": True,
        "alike": True,
    }
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    child = nursery.start("supervised", "launch", arguments, log=home / "job", env=env)
    assert child.wait(20 + len(windows) * 2 * DEADLINE_S) == 0, child.stderr()
    outcome = Outcome.read(str(home / "outcome"))
    assert outcome.status == [0] * world, child.stderr()
    assert len(outcome.told("closed")) == world
    return outcome


def faults_at(points: list[Point]) -> list[tuple[Point, str, int]]:
    """Return the faults to try at each point."""
    found: list[tuple[Point, str, int]] = []
    for point in points:
        if point.target.startswith(("socket", "pipe", "memfd", "/", "?", "anon")) or point.call in syscalls.TALKING:
            continue
        if point.call.startswith("io_uring"):
            continue  # of the Store's server, which aborts its process if one fails: nothing of Holdfast's asks for it
        if point.call == "openat":
            found.append((point, "error", errno.EMFILE))
        if point.call == "openat" and not _creates(point):
            found.append((point, "error", errno.EIO))
            continue
        found += [(point, "error", number) for number in ERRNOS.values()]
        found += [(point, "errors", ERRNOS[name]) for name in LASTING]
        if point.call in ("write", "pwrite64"):
            found.append((point, "short", 0))
    return found


BESIDE = ("model-", "model.", "config.json", "tokenizer.json", "tool.jinja")
"""How the names of an export's files begin."""


def _creates(point: Point) -> bool:
    name = point.target.rpartition("/")[2]
    return name.startswith((".plan", ".metadata", "__", ".rank", ".lease", "holdfast.json", "lock", *BESIDE))


def choose(found: list[Any], few: int) -> list[Any]:
    if ":" in CHOICE:
        start, stop = CHOICE.split(":")
        return found[int(start or 0) : int(stop) if stop else None]
    count = len(found) if CHOICE == "all" else min(int(CHOICE or few), len(found))
    return [found[index * len(found) // count] for index in range(count)]


def check_fault(act: Act, told: list[dict[str, Any]]) -> str:
    """Check what all ranks were told about the save with the fault; return its outcome."""
    kinds = {event["error"] for event in told}
    what = f"{act.kind} {NAMES.get(act.errno, '')} at {act.point}: {told}"
    assert all(event["seconds"] < DEADLINE_S for event in told), what
    for event in told:
        if event["error"] is None:
            assert event["whole"], what
            continue
        assert event["causes"][0]["ours"], what
        assert event["error"] in ("SaveFailed", "OutcomeUnknown"), what
        assert event["error"] == "OutcomeUnknown" or not event["visible"], what
        text = " ".join(cause["message"] for cause in event["causes"])
        numbers = {cause["errno"] for cause in event["causes"]}
        if act.kind != "short" and event["error"] == "SaveFailed":
            assert act.errno in numbers or NAMES[act.errno] in text or os.strerror(act.errno) in text, what
            # What fails from one call on fails for all ranks: the same one is the cause for all, whoever came first.
            ranks = {event["causes"][0]["rank"] for event in told if event["error"] == "SaveFailed"}
            assert ranks == {int(act.point.role[-1])} or (act.kind == "errors" and len(ranks) == 1), what
    assert not {None, "SaveFailed"} <= kinds, f"published on one rank, failed on another: {what}"
    if act.kind == "short":
        assert kinds == {None}, f"a short write is no error: {what}"
    return "published" if None in kinds else "/".join(sorted(kind for kind in kinds if kind))


def check_leftovers(root: Path) -> None:
    """Check that a last start finds the newest, and leaves nothing behind."""
    with holdfast.CheckpointManager(root, build(), config=settings()) as manager:
        assert manager.restore() == max(manager.steps())
    assert sorted(os.listdir(root)) == sorted([".holdfast", *visible(root)])


def check_leftovers_of_exports(root: Path) -> None:
    with manager_of(root, export_job.build()):
        pass
    exports = visible_exports(root)
    assert sorted(os.listdir(root / "hf")) == sorted([".holdfast", LINK, *exports])


@dataclass(frozen=True)
class Work:
    """What is made to fail: a program of fault_job.py, on roots that are prepared for it, and looked at at the end."""

    program: str
    name: str
    prepare: Callable[[Path], None]
    check_leftovers: Callable[[Path], None]


SAVES = Work("faults", "a save", lambda _root: None, check_leftovers)
EXPORTS = Work("export_faults", "an export", write_assets, check_leftovers_of_exports)


@pytest.mark.timeout(3600 if CHOICE else 120)
@pytest.mark.parametrize(("world", "few"), [(1, 20), (2, 8)], ids=["1 rank", "2 ranks"])
def test_every_changing_call_of_a_save_fails(
    world: int,
    few: int,
    nursery: Nursery,
    tmp_path: Path,
    show: list[str],  # noqa: F811
    tried: Counter[str],
) -> None:
    show.append(fail_calls(SAVES, world, few, nursery, tmp_path, tried))


@pytest.mark.slow
@pytest.mark.timeout(7200 if CHOICE else 120)
@pytest.mark.parametrize(("world", "few"), [(1, 20), (2, 8)], ids=["1 rank", "2 ranks"])
def test_every_changing_call_of_an_export_fails(
    world: int,
    few: int,
    nursery: Nursery,
    tmp_path: Path,
    show: list[str],  # noqa: F811
    tried: Counter[str],
) -> None:
    """``hf-latest`` always names a complete one."""
    show.append(fail_calls(EXPORTS, world, few, nursery, tmp_path, tried))


def fail_calls(work: Work, world: int, few: int, nursery: Nursery, tmp_path: Path, tried: Counter[str]) -> str:
    """Make the changing calls of ``work`` fail, and check the outcome of each; return what to show."""
    began = time.monotonic()
    home = tmp_path / "points"
    work.prepare(home / "root")
    points = launch(nursery, work.program, home, home / "root", [], ["a", "b"], world).seen["b"]
    every = faults_at(points)
    chosen = choose(every, few)
    ended: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for start in range(0, len(chosen), PER_JOB):
        home, rows = tmp_path / str(start), chosen[start : start + PER_JOB]
        work.prepare(home / "root")
        acts = [Act(*row, window=str(number)) for number, row in enumerate(rows)]
        windows = ["first", *(act.window for act in acts)]  # the first save of a job has other calls
        outcome = launch(nursery, work.program, home, home / "root", acts, windows, world)
        for act in acts:
            told = [event for event in outcome.told("told") if event["window"] == act.window]
            assert len(told) == world
            came = check_fault(act, told)
            ended[came if act.window in outcome.hit else "not reached"] += 1
            kinds[f"{act.kind} {NAMES.get(act.errno, '')}".strip()] += act.window in outcome.hit
        for event in outcome.told("told"):
            assert event["window"] or (event["error"] is None and event["whole"]), f"the save after a fault: {event}"
        work.check_leftovers(home / "root")
        shutil.rmtree(home)
    missed = ended.pop("not reached", 0)
    assert missed <= 1 + len(chosen) // 20
    tried["faults (an error, or less than asked, of a system call)"] += sum(ended.values())
    return (
        f"faults ({work.name}, {world} rank{'s' if world > 1 else ''}): {sum(ended.values())} of {len(every)} tried at "
        f"{len({point for point, _, _ in chosen})} calls, {missed} not reached, {time.monotonic() - began:.0f} s; "
        f"ended {dict(ended)}\n  {dict(kinds)}"
    )


@pytest.mark.timeout(3600 if CHOICE else 120)
def test_every_changing_call_of_a_start_fails(
    nursery: Nursery,
    tmp_path: Path,
    show: list[str],  # noqa: F811
    tried: Counter[str],
) -> None:
    """A start that rolls forward and cleans up ends in a named error or does so; the next one always does."""
    began = time.monotonic()
    template = make_template(nursery, Family("saves", 1, "kill all", 0), tmp_path)

    def run(name: str, acts: list[Act], windows: list[str]) -> Outcome:
        home = tmp_path / name
        (home / "roots").mkdir(parents=True)
        for number in range(len(windows)):
            shutil.copytree(template, home / "roots" / f"template-{number}")
        return launch(nursery, "starts", home, home / "roots", acts, windows, 1)

    points = run("points", [], ["w"]).seen["w"]
    every = [row for row in faults_at([_anywhere(point) for point in points]) if row[1] != "short"]
    chosen = choose(every, 10)
    ended: Counter[str] = Counter()
    for start in range(0, len(chosen), PER_JOB):
        rows = chosen[start : start + PER_JOB]
        acts = [
            Act(_in_root(point, number), kind, code, window=f"w{number}")
            for number, (point, kind, code) in enumerate(rows)
        ]
        outcome = run(str(start), acts, [act.window for act in acts])
        first = {event["window"]: event for event in outcome.told("told") if event["window"]}
        again = [event for event in outcome.told("told") if not event["window"]]
        assert len(again) == len(acts)
        for act, after in zip(acts, again, strict=True):
            event = first[act.window]
            assert event["error"] is None or event["causes"][0]["ours"], (act, event)
            assert event["error"] is None or event["seconds"] < DEADLINE_S
            assert after["error"] is None, (act, event, after)
            assert after["step"] == 3, (act, event, after)
            assert after["left"] == [".holdfast", "step-1", "step-2", "step-3"], (act, event, after)
            ended[(event["error"] or "settled all the same") if act.window in outcome.hit else "not reached"] += 1
        shutil.rmtree(tmp_path / str(start))
    missed = ended.pop("not reached", 0)
    show.append(
        f"faults (a start): {sum(ended.values())} of {len(every)} tried, {missed} not reached, "
        f"{time.monotonic() - began:.0f} s; ended {dict(ended)}"
    )
    assert missed <= 1 + len(chosen) // 20
    tried["faults (an error, or less than asked, of a system call)"] += sum(ended.values())


def _anywhere(point: Point) -> Point:
    """Of the root that is called 0."""
    return Point(point.role, point.call, re.sub(r"(^|-> )0(?=/|$| )", r"\1ROOT", point.target), point.number)


def _in_root(point: Point, number: int) -> Point:
    return Point(point.role, point.call, point.target.replace("ROOT", str(number)), point.number)
