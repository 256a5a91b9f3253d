"""SIGKILL at every system call that trainer and engine make from a start to a close, in one rank and in two.

A first run of a job, which nobody disturbs, gives its points: every call that changes a file, makes one durable or
carries the protocol (see `syscalls.CHANGING` and `TALKING`), of every process. Then the job is run anew for each point,
and killed there, before the call happens: the process that makes it, or all processes of the job at once. After each:

- what is visible is whole and is the state of its step; what was announced as failed is not there, what was announced
  as published is, or newer;
- whoever lives on has named errors within the deadlines, and its next save is published;
- no engine outlives its trainer for long; the next start resumes from the newest, leaves nothing, and can save.

Calls that neither change nor say anything (futex, mmap, read ...) are tried at three occurrences of each role and name.

HOLDFAST_KILL_POINTS says how many points a family tries, evenly spread (a few), ``all``, or ``A:B`` of them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import syscalls
import torch.distributed as dist
from kill_job import COMMIT_S, PERSIST_S, STAGE_S, build, fill, is_of, settings
from nursery import Child, Nursery
from processes import free_port
from supervised import Act, Outcome, Point

import holdfast

CHOICE = os.environ.get("HOLDFAST_KILL_POINTS", "")
TALKED_MAX = 10
"""Of equal calls on sockets, how many are tried: ranks that wait for news ask the Store again and again."""
END_S = 2 * (STAGE_S + PERSIST_S + 2 * COMMIT_S) + 20
ORPHAN_S = 10.0
CHANGING_OR_TALKING = syscalls.CHANGING | syscalls.TALKING

pytestmark = pytest.mark.skipif(not syscalls.AVAILABLE, reason="numbers of system calls are known for x86-64 only")


@dataclass(frozen=True)
class Family:
    """Jobs that differ in their point alone. ``few``: how many points without HOLDFAST_KILL_POINTS."""

    program: str
    world: int
    kind: str
    few: int
    at_once: int = 2
    module: str = "kill_job"
    """Where its program is."""

    def __str__(self) -> str:
        return f"{self.program}, {self.world} rank{'s' if self.world > 1 else ''}, {self.kind}"


FOREIGN = ("train.log", "below/notes.txt")
"""What a user keeps in a directory that is overwritten."""

FAMILIES = [
    Family("saves", 1, "kill", 10),
    Family("saves", 1, "kill all", 8),
    Family("overwrites", 1, "kill", 3),
    Family("overwrites", 1, "kill all", 3),
    Family("saves", 2, "kill all", 4),
    Family("saves", 2, "kill", 4, at_once=8),  # who is left mostly waits for deadlines
]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("kill_job") as found:
        yield found


class Job:
    """One run of a program on a root of its own."""

    def __init__(
        self, nursery: Nursery, family: Family, template: Path, home: Path, act: Act | None, **options: object
    ) -> None:
        self.family, self.act, self.home = family, act, home
        self.root, self.outcome_path = home / "root", home / "outcome"
        shutil.copytree(template, self.root, symlinks=True)
        self.store: dist.TCPStore | None = None
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if family.world > 1 and family.kind == "kill":  # as under torchrun: the store survives rank 0
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env.update(MASTER_PORT=str(self.store.port), TORCHELASTIC_USE_AGENT_STORE="True")
        arguments = {
            "program": [family.module, family.program],
            "arguments": {"root": str(self.root)},
            "outcome": str(self.outcome_path),
            "root": str(self.root),
            "acts": [] if act is None else [asdict(act)],
            "world": family.world,
            **options,
        }
        self.child: Child = nursery.start("supervised", "launch", arguments, log=home / "job", env=env)

    def finish(self) -> Outcome:
        assert self.child.wait(END_S) == 0, self.child.stderr()
        outcome = Outcome.read(str(self.outcome_path))
        assert outcome.orphaned_s < ORPHAN_S, f"engines were there {outcome.orphaned_s:.1f} s after their trainers"
        return outcome


def make_template(nursery: Nursery, family: Family, home: Path) -> Path:
    """Make a root with two checkpoints, a save that died before its rename, and trash; or with ``one`` checkpoint."""
    root = home / "template"
    state = build()
    if family.program == "overwrites":
        fill(state, 6)
        holdfast.save(state, root / "one", step=6)
        for name in FOREIGN:
            (root / "one" / name).parent.mkdir(exist_ok=True)
            (root / "one" / name).write_text("mine")
        return root
    with holdfast.CheckpointManager(root, state, config=settings()) as manager:
        for step in (1, 2):
            fill(state, step)
            manager.save(step)
            manager.wait()
    point = Point("trainer-0", "rename", ".step-3.ATTEMPT.incomplete -> step-3", 1)
    job = Job(nursery, family, root, home / "dies", Act(point, "kill all", window="life"))
    assert job.finish().hit == ["life"]
    whole = job.root
    assert any(path.name.endswith(".incomplete") for path in whole.iterdir())
    shutil.copytree(whole / "step-2", whole / f".step-0.{'0123456789ab'}.trash")
    return whole


def visible(root: Path) -> dict[str, holdfast.Checkpoint]:
    """Return all visible checkpoints; check that each is complete and has the state of its step."""
    found = {}
    for path in root.iterdir():
        if path.name.startswith("."):
            continue
        checkpoint = holdfast.open(path)
        report = checkpoint.verify()
        assert report.ok, report
        step = checkpoint.step
        assert bool((checkpoint.read("model.weight") == float(step)).all()), f"{path.name} is not the state of {step}"
        assert checkpoint.objects["progress.step"] == step
        found[path.name] = checkpoint
    return found


def check_told(outcome: Outcome, seen: dict[str, holdfast.Checkpoint], *, least: int) -> None:
    """Check that the reported outcomes are true, and equal on all ranks."""
    told = outcome.told("told")
    attempts = {checkpoint.manifest.attempt for checkpoint in seen.values()}
    for event in told:
        assert event["error"] is None or event["causes"][0]["ours"], event
        if event["error"] not in (None, "OutcomeUnknown"):
            assert event["attempt"] not in attempts, f"{event} was announced as failed and is there"
            assert not any(other["error"] is None and other["step"] == event["step"] for other in told), (
                f"published on one rank, failed on another: {told}"
            )
    newest = max((checkpoint.step for checkpoint in seen.values()), default=-1)
    published = max((event["step"] for event in told if event["error"] is None), default=least)
    assert newest >= max(published, least), f"{published} was announced, {newest} is the newest there is"


def check_next_start(root: Path, seen: dict[str, holdfast.Checkpoint]) -> int:
    """Check that the next start resumes, can save, and leaves nothing behind; return how many it rolled forward."""
    newest = max(checkpoint.step for checkpoint in seen.values())
    state = build()
    with holdfast.CheckpointManager(root, state, config=settings(keep=holdfast.Keep(last=9))) as manager:
        rolled = [int(name.removeprefix("step-")) for name in manager.recovered.rolled_forward]
        step = manager.restore()
        assert step == max([newest, *rolled])
        assert is_of(state, step)
        fill(state, 90)
        manager.save(90).result(30)
    again = visible(root)
    assert {*seen, *(f"step-{number}" for number in rolled), "step-90"} == set(again)
    assert sorted(os.listdir(root)) == sorted([".holdfast", *again])
    return len(rolled)


def check_next_overwrite(root: Path) -> int:
    """Check that an overwritten path is never empty, and that the user's files there survive."""
    before = {name: checkpoint.step for name, checkpoint in visible(root).items()}
    assert before in ({"one": 6}, {"one": 7}), before
    kept = [(root / "one" / name).read_text() for name in FOREIGN if "/" not in name]
    assert set(kept) == {"mine"}, "a file is never missing; a subdirectory is until the next start"
    with holdfast.CheckpointManager(root, build(), config=settings()) as manager:
        recovered = manager.recovered
    steps = {name: checkpoint.step for name, checkpoint in visible(root).items()}
    assert steps in ({"one": 6}, {"one": 7}), steps
    assert before == steps or "one" in recovered.rolled_forward
    assert {(root / "one" / name).read_text() for name in FOREIGN} == {"mine"}
    state = build()
    fill(state, 8)
    holdfast.save(state, root / "one", step=8, overwrite=True)
    assert {name: checkpoint.step for name, checkpoint in visible(root).items()} == {"one": 8}
    assert sorted(os.listdir(root)) == [".holdfast", "one"]
    assert {(root / "one" / name).read_text() for name in FOREIGN} == {"mine"}
    return len(recovered.rolled_forward)


def check_survivors(family: Family, act: Act, outcome: Outcome) -> None:
    """Check that every process that was not killed ended."""
    role, _, rank = act.point.role.partition("-")
    for number, status in enumerate(outcome.status):
        killed = family.kind == "kill all" or (role == "trainer" and str(number) == rank)
        assert status == (-9 if killed else 0), f"rank {number} ended with {status}"
    if family.kind == "kill" and role != "trainer" and family.program in ("saves", "exports"):
        failed = [event for event in outcome.told("told", rank=0) if event["error"] is not None]
        # A checkpoint and an export of one step go through one engine: both fail with it, and nothing after them.
        kinds = Counter(event.get("kind", "checkpoint") for event in failed)
        assert len({event["step"] for event in failed}) <= 1, (
            f"the save after an engine's death failed as well: {failed}"
        )
        assert set(kinds.values()) <= {1}, f"the save after an engine's death failed as well: {failed}"


def check(family: Family, act: Act, job: Job) -> tuple[bool, int]:
    """Return whether the point was reached, and how many attempts were rolled forward."""
    outcome = job.finish()
    if not outcome.hit:
        assert outcome.status == [0] * family.world, job.child.stderr()
    else:
        check_survivors(family, act, outcome)
    seen = visible(job.root)
    if family.program == "overwrites":
        assert all(event["error"] is None or event["causes"][0]["ours"] for event in outcome.told("told"))
        if any(event["error"] is None for event in outcome.told("told")):
            assert {checkpoint.step for checkpoint in seen.values()} == {7}
        return bool(outcome.hit), check_next_overwrite(job.root)
    check_told(outcome, seen, least=2)
    rolled = check_next_start(job.root, seen)
    return bool(outcome.hit), rolled


def choose(points: list[Point], few: int) -> list[Point]:
    if ":" in CHOICE:
        start, stop = CHOICE.split(":")
        return points[int(start or 0) : int(stop) if stop else None]
    count = len(points) if CHOICE == "all" else min(int(CHOICE or few), len(points))
    return [points[index * len(points) // count] for index in range(count)]


def run_all(
    nursery: Nursery,
    family: Family,
    template: Path,
    acts: list[Act],
    home: Path,
    *,
    check: Callable[[Family, Act, Job], tuple[bool, int]] = check,
    **options: object,
) -> tuple[Counter[str], int]:
    """Try every act; what was reached by role and call, and how many attempts were rolled forward.

    check: called for each job that has been started; whether it got that far, and how many it found rolled forward.
    """
    reached: Counter[str] = Counter()
    rolled_forward = 0
    waiting = list(enumerate(acts))
    running: list[tuple[Act, Job]] = []
    while waiting or running:
        while waiting and len(running) < family.at_once:
            number, act = waiting.pop(0)
            running.append((act, Job(nursery, family, template, home / str(number), act, **options)))
        act, job = running.pop(0)
        try:
            hit, rolled = check(family, act, job)
        except BaseException:
            print(f"{act.kind} at {act.point}\n{job.child.stderr()}")
            raise
        rolled_forward += rolled
        reached[f"{act.point.role} {act.point.call}" if hit else "not reached"] += 1
        shutil.rmtree(job.home)
    return reached, rolled_forward


def sum_up(
    family: Family,
    points: list[Point],
    seen: list[Point],
    reached: Counter[str],
    tried: Counter[str],
    rolled_forward: str,
    began: float,
    show: list[str],
) -> None:
    """Show and count what was tried, nearly all of which must have been reached."""
    acts = sum(reached.values())
    missed = reached.pop("not reached", 0)
    calls = ", ".join(f"{what} {count}" for what, count in sorted(reached.items()))
    show.append(
        f"kill points ({family}): {sum(reached.values())} of {len(points)} tried and survived "
        f"({len(seen)} calls seen, {missed} not reached again), {rolled_forward}, "
        f"{time.monotonic() - began:.0f} s\n  {calls}"
    )
    assert missed <= 1 + acts // 20
    tried["kill points (SIGKILL at a system call)"] += sum(reached.values())


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Show lines whether or not the test passes."""
    lines: list[str] = []
    yield lines
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


@pytest.mark.timeout(3600 if CHOICE else 120)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family).replace(", ", "-").replace(" ", "_"))
def test_kill_at_every_call(
    family: Family, nursery: Nursery, tmp_path: Path, show: list[str], tried: Counter[str]
) -> None:
    began = time.monotonic()
    template = make_template(nursery, family, tmp_path)
    undisturbed = Job(nursery, family, template, tmp_path / "undisturbed", None)
    outcome = undisturbed.finish()
    assert outcome.status == [0] * family.world, undisturbed.child.stderr()
    assert outcome.told("closed")
    seen = outcome.seen["life"]
    points = [point for point in seen if point.call not in syscalls.TALKING or point.number <= TALKED_MAX]
    acts = [Act(point, family.kind, window="life") for point in choose(points, family.few)]
    reached, rolled_forward = run_all(nursery, family, template, acts, tmp_path)
    sum_up(family, points, seen, reached, tried, f"{rolled_forward} rolled forward", began, show)


@pytest.mark.timeout(3600 if CHOICE else 120)
def test_kill_at_every_kind_of_other_call(
    nursery: Nursery, tmp_path: Path, show: list[str], tried: Counter[str]
) -> None:
    """Those that read, wait or take memory: the first, one in the middle and the last of each role and name."""
    began = time.monotonic()
    family = Family("saves", 1, "kill all", 6)
    template = make_template(nursery, family, tmp_path)
    undisturbed = Job(nursery, family, template, tmp_path / "undisturbed", None, everything=True)
    outcome = undisturbed.finish()
    assert outcome.status == [0], undisturbed.child.stderr()
    counts = Counter((point.role, point.call) for point in outcome.seen["life"])
    unknown = {call for _, call in counts if call not in syscalls.NUMBERS}
    assert not unknown, f"nobody has said what these calls are, nor tried to kill there: {unknown}"
    others_try = CHANGING_OR_TALKING - {"openat"}
    points = [
        Point(role, call, "", number)
        for (role, call), count in sorted(counts.items())
        if call not in others_try
        for number in sorted({1, (count + 1) // 2, count})
    ]
    reached: Counter[str] = Counter()
    for number, point in enumerate(choose(points, family.few)):
        act = Act(point, family.kind, window="life")
        found, _ = run_all(nursery, family, template, [act], tmp_path / str(number), only=point.call)
        reached += found
    missed = reached.pop("not reached", 0)
    others = sum(count for (_, call), count in counts.items() if call not in others_try)
    show.append(
        f"kill points (other calls): {sum(reached.values())} of {len(points)} tried and survived, a sample of {others} "
        f"calls of {len({call for _, call in counts} - others_try)} kinds; {missed} not reached again, "
        f"{time.monotonic() - began:.0f} s"
    )
    # How often threads wait or take memory is never the same: the last of them may not come again.
    assert missed <= 2 + len(points) // 3
    tried["kill points (SIGKILL at a system call)"] += sum(reached.values())
