"""A job of two ranks that saves all the time is killed at random moments, and started again, and killed again.

After every kill, before anything is started: what is visible is whole, and nothing is visible whose save was announced
as failed; so are the exports of some steps, which hold what an uninterrupted job has at these. After every start:
nothing is left behind, the newest published step came back, and each rank's state is to the last bit that of a job
which was never interrupted.

HOLDFAST_KILLS says how many kills (5), HOLDFAST_KILL_SEED repeats a run's choices, as far as the machine repeats.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nursery import HERE, Child, Nursery, environment
from processes import Log, engines_of, free_port, is_gone
from saving_job import digest_of, exports_of

import holdfast
from holdfast.export.verify import verify_export

KILLS = int(os.environ.get("HOLDFAST_KILLS", "5"))
SEED = int(os.environ.get("HOLDFAST_KILL_SEED", str(random.SystemRandom().randrange(1 << 32))))
WORLD = 2
BATCH = 5
"""Kills in one root."""
STEPS = 1000
"""What the uninterrupted job goes to: more than killed ones get to see."""
START_S = 60.0
ORPHAN_S = 10.0
"""How long an engine may outlive its trainer here: what it has to finish is a fraction of a second's work."""
LATEST_KILL_S = 2.0
MIB = 1 << 20

# Ten kills: what is hit, in random order. With "rank" the others are sent SIGTERM soon, as launchers do.
DECK = ("job", "job", "job", "all", "all", "all", "rank 0", "rank 1", "engine", "torchrun")
_shuffler = random.Random(SEED)
KINDS = [kind for _ in range(0, KILLS, len(DECK)) for kind in _shuffler.sample(DECK, len(DECK))][:KILLS]


@dataclass
class Tally:
    """Outcomes of the kills, for the table."""

    kinds: Counter[str] = field(default_factory=Counter)
    in_work: int = 0
    """Kills that left an attempt unpublished."""
    rolled_forward: int = 0
    removed: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    """By how many steps of training a start had to go back."""
    resumed: int = 0
    exports: int = 0
    """Looked at."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Expected:
    """States of an undisturbed job."""

    digests: list[dict[int, str]]
    """By rank: of its whole state, by step."""
    weights: list[dict[int, str]]
    """By rank: of its share of what an export holds, by step."""


def wait_until(happened: Callable[[], bool], what: str, timeout_s: float, *, job: Job) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not after {timeout_s:g} s\n{job.stderr()}"
        time.sleep(0.01)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Job:
    """One start of the job: two ranks on their own, or under `torchrun`."""

    def __init__(
        self, life: Life, nursery: Nursery, *, number: int, steps: int, io_limit_bytes_per_s: int | None, torchrun: bool
    ) -> None:
        self.life = life
        self.launcher: subprocess.Popen[bytes] | None = None
        self._ranks: list[Child] = []
        self._before = [len(log.events("restored")) for log in life.logs]
        out = life.home / f"start-{number}"
        if torchrun:
            self._start_torchrun(out, steps, io_limit_bytes_per_s)
            return
        port = str(free_port())
        arguments = {
            "root": str(life.root),
            "log": str(life.log),
            "steps": steps,
            "io_limit_bytes_per_s": io_limit_bytes_per_s,
        }
        for rank in range(WORLD):
            env = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self._ranks.append(nursery.start("saving_job", "main", arguments, log=out / f"rank-{rank}", env=env))

    def _start_torchrun(self, out: Path, steps: int, io_limit_bytes_per_s: int | None) -> None:
        limit = [] if io_limit_bytes_per_s is None else [str(io_limit_bytes_per_s)]
        self._err = out.with_suffix(".err")
        with self._err.open("wb") as sink:
            self.launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"),
                    *(str(HERE / "saving_job.py"), str(self.life.root), str(self.life.log), str(steps), *limit),
                ],
                env=environment(),
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def stderr(self) -> str:
        if self.launcher is not None:
            return self._err.read_text(errors="replace")
        return "".join(f"--- rank {rank}\n{child.stderr()}" for rank, child in enumerate(self._ranks))

    def restored(self) -> list[dict[str, Any]]:
        """What each rank wrote when it had resumed in this start."""
        found = [log.events("restored")[before:] for log, before in zip(self.life.logs, self._before, strict=True)]
        return [events[0] for events in found if events]

    def ended(self) -> bool:
        if self.launcher is not None:
            return self.launcher.poll() is not None
        return all(child.returncode is not None for child in self._ranks)

    def pids(self) -> list[int]:
        return [event["pid"] for event in self.restored()]

    def engines(self) -> list[int]:
        return [engine for pid in self.pids() for engine in engines_of(pid)]

    def kill(self, kind: str, rng: random.Random) -> None:
        """Hit it; returns when no trainer is left, and the launcher isn't either."""
        ranks, engines = self.pids(), self.engines()
        self.life.engines += [(engine, time.monotonic()) for engine in engines]
        if kind == "torchrun":
            assert self.launcher is not None
            self.launcher.terminate()
        elif kind.startswith("rank"):
            first = ranks[int(kind.split()[1])]
            kill(first)
            time.sleep(rng.uniform(0, 0.3))
            for pid in ranks:
                if pid != first:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
        else:
            # No order: engines may see their trainers die, or the other way round.
            victims = ranks + (engines if kind == "all" else [])
            rng.shuffle(victims)
            for pid in victims:
                kill(pid)
        wait_until(lambda: all(map(is_gone, ranks)) and self.ended(), f"the end of the job by {kind!r}", 40, job=self)

    def kill_engine(self, rng: random.Random) -> None:
        """Kill the engine of one rank; returns when a later save has been published all the same."""
        before = max((event["step"] for event in self.life.logs[0].events("saving")), default=0)
        engine = rng.choice(self.engines())
        self.life.engines.append((engine, time.monotonic()))
        kill(engine)

        def published_another() -> bool:
            assert not self.ended(), f"the job did not outlive its engine\n{self.stderr()}"
            told = self.life.logs[0].events("told")
            return any(event["error"] is None and event["step"] > before for event in told)

        wait_until(published_another, "a save after an engine's death", 30, job=self)

    def close(self) -> None:
        for pid in self.pids() + [child.pid for child in self._ranks]:
            kill(pid)
        if self.launcher is not None:
            kill(self.launcher.pid)
            self.launcher.wait(10)


class Life:
    """One root with all the starts that it sees."""

    def __init__(self, home: Path, expected: Expected) -> None:
        self.home, self.root, self.log = home, home / "root", home / "events"
        self.exports = exports_of(self.root)
        self.home.mkdir()
        self.logs = [Log(self.log, rank) for rank in range(WORLD)]
        self.expected = expected
        self.engines: list[tuple[int, float]] = []
        """Engines whose trainers, or which themselves, were killed, and when."""

    def visible(self) -> list[int]:
        found = self.root.glob("step-*") if self.root.exists() else []
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def in_work(self) -> list[str]:
        return [path.name for path in self.root.glob(".step-*.incomplete")] if self.root.exists() else []

    def check_visible(self) -> None:
        """All that can be seen is whole; nothing that was announced as failed; all, or newer, that was announced."""
        told = [event for log in self.logs for event in log.events("told")]
        failed = {event["attempt"] for event in told if event["error"] not in (None, "OutcomeUnknown")}
        for step in self.visible():
            checkpoint = holdfast.open(self.root / f"step-{step}")
            report = checkpoint.verify()
            assert report.ok, report
            assert checkpoint.step == step
            assert checkpoint.manifest.attempt not in failed, f"step {step} had been announced as failed"
        announced = max((event["step"] for event in told if event["error"] is None), default=None)
        if announced is not None:
            assert max(self.visible(), default=-1) >= announced, f"step {announced} had been announced as published"

    def check_digests(self) -> None:
        """Every state that a rank had at a step, restored or trained, is that of the uninterrupted job."""
        for rank, log in enumerate(self.logs):
            for event in log.events("step", "restored"):
                if event["step"] is not None:
                    assert event["digest"] == self.expected.digests[rank][event["step"]], f"rank {rank}, {event}"

    def check_exports(self) -> int:
        """Those that can be seen are whole, of their step and not announced as failed; returns how many there are."""
        told = [event for log in self.logs for event in log.events("exported")]
        failed = {event["attempt"] for event in told if event["error"] not in (None, "OutcomeUnknown")}
        names = {path.name for path in self.exports.glob("hf-*") if not path.is_symlink()}
        for name in names:
            export = holdfast.open(self.exports / name)
            assert export.verify().ok, name
            assert verify_export(str(self.exports / name)) == ()
            assert export.manifest.attempt not in failed, f"{name} had been announced as failed"
            shares = {tensor: export.read(tensor).chunk(WORLD) for tensor in export.tensors}
            for rank, weights in enumerate(self.expected.weights):
                held = {tensor: share[rank] for tensor, share in shares.items()}
                assert digest_of(held) == weights[int(name.removeprefix("hf-"))], f"rank {rank} of {name}"
        link = self.exports / "hf-latest"
        assert not link.is_symlink() or os.readlink(link) in names, f"{os.readlink(link)} of {names}"
        return len(names)

    def check_orphans(self) -> None:
        now = time.monotonic()
        self.engines = [(pid, at_s) for pid, at_s in self.engines if not is_gone(pid)]
        for pid, at_s in self.engines:
            assert now - at_s < ORPHAN_S, f"engine {pid} is still there {now - at_s:.1f} s after its trainer's death"

    def wait_no_orphans(self) -> None:
        while self.engines:
            self.check_orphans()
            time.sleep(0.02)


def check_start(job: Job, tally: Tally, visible: list[int]) -> None:
    """Check what the ranks restored; ``visible``: the steps seen before they were started."""
    life = job.life
    ready = life.logs[0].events("ready")[-1]
    restored = {event["step"] for event in job.restored()}
    assert len(restored) == 1, f"ranks resumed from {restored}"
    assert ready["hidden"] == [], "left behind by the start"
    rolled = sorted(int(name.removeprefix("step-")) for name in ready["rolled_forward"])
    newest = max([*visible, *rolled], default=None)
    assert restored == {newest}, f"resumed from {restored}, seen were {visible}, rolled forward {rolled}"
    tally.resumed += newest is not None
    tally.rolled_forward += len(rolled)
    tally.removed += len(ready["removed"])
    made = [event["step"] for event in life.logs[0].events("step") if event["at_s"] < ready["at_s"]]
    if made:
        tally.lags[max(made) - (newest or 0)] += 1


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("saving_job") as found:
        yield found


@pytest.fixture(scope="module")
def expected(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return the states of an undisturbed job."""
    home = tmp_path_factory.mktemp("reference")
    port = str(free_port())
    children = [
        nursery.start(
            "saving_job",
            "reference",
            {"log": str(home / "events"), "steps": STEPS},
            log=home / f"rank-{rank}",
            env={"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(WORLD)
    ]
    for child in children:
        assert child.wait(120) == 0, child.stderr()
    events = [Log(home / "events", rank).events("step") for rank in range(WORLD)]
    digests = [{event["step"]: event["digest"] for event in of_rank} for of_rank in events]
    assert all(len(set(of_rank.values())) == STEPS for of_rank in digests), "a digest must tell every step from others"
    assert all(digests[0][step] != digests[1][step] for step in digests[0]), "and every rank"
    weights = [{event["step"]: event["weights"] for event in of_rank if event["weights"]} for of_rank in events]
    return Expected(digests, weights)


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Of all batches; shown when they are over."""
    found = Tally()
    yield found
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(table(found))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch", range(-(-KILLS // BATCH)))
def test_kills_at_random_moments(
    batch: int, nursery: Nursery, expected: Expected, tally: Tally, tmp_path: Path, tried: Counter[str]
) -> None:
    began = time.monotonic()
    rng = random.Random(SEED + batch)
    life = Life(tmp_path / "life", expected)
    kinds = KINDS[batch * BATCH : (batch + 1) * BATCH]
    job: Job | None = None
    print(f"HOLDFAST_KILL_SEED={SEED}, batch {batch}")
    try:
        for number, kind in enumerate(kinds):
            visible = life.visible()
            limit = rng.choice([MIB, MIB, 4 * MIB, None])
            print(f"kill {number}: {kind}, io_limit_bytes_per_s={limit}, seen {visible}")
            job = Job(
                life, nursery, number=number, steps=STEPS, io_limit_bytes_per_s=limit, torchrun=kind == "torchrun"
            )
            await_resumed(job)
            check_start(job, tally, visible)
            time.sleep(rng.uniform(0, LATEST_KILL_S))
            if kind == "engine":
                job.kill_engine(rng)
            assert not job.ended(), f"it ended by itself\n{job.stderr()}"
            job.kill("job" if kind == "engine" else kind, rng)
            tally.kinds[kind] += 1
            tally.in_work += bool(life.in_work())
            life.check_visible()
            tally.exports += life.check_exports()
            life.check_orphans()
            if rng.random() < 0.5:  # else the next start meets engines that are still at work
                life.wait_no_orphans()
        finish(life, nursery, tally)
    finally:
        if job is not None:
            job.close()
    tally.seconds += time.monotonic() - began
    tried["kills at random moments"] += len(kinds)


def await_resumed(job: Job) -> None:
    def resumed() -> bool:
        assert not job.ended(), f"it ended before it had resumed\n{job.stderr()}"
        return len(job.restored()) == WORLD

    wait_until(resumed, "all ranks to resume", START_S, job=job)


def finish(life: Life, nursery: Nursery, tally: Tally) -> None:
    """Run a last start without a kill: it trains a few steps, closes, and leaves nothing but checkpoints."""
    visible = life.visible()
    job = Job(
        life,
        nursery,
        number=BATCH,
        steps=max(visible, default=0) + 6,
        io_limit_bytes_per_s=None,
        torchrun=False,
    )
    try:
        await_resumed(job)
        wait_until(job.ended, "the end of an undisturbed job", 60, job=job)
        check_start(job, tally, visible)
        assert [child.returncode for child in job._ranks] == [0, 0], job.stderr()
    finally:
        job.close()
    life.check_visible()
    life.check_digests()
    assert life.check_exports()
    life.wait_no_orphans()
    assert sorted(os.listdir(life.root)) == sorted([".holdfast", *(f"step-{step}" for step in life.visible())])
    assert not [name for name in os.listdir(life.exports) if name.startswith(".") and name != ".holdfast"]


def table(tally: Tally) -> str:
    hit = ", ".join(f"{kind} {count}" for kind, count in sorted(tally.kinds.items()))
    lags = ", ".join(f"{lag}: {count}" for lag, count in sorted(tally.lags.items()))
    rows = [
        ("kills", f"{sum(tally.kinds.values())} ({hit})"),
        ("with an attempt in work", str(tally.in_work)),
        ("rolled forward", str(tally.rolled_forward)),
        ("removed", f"{tally.removed} hidden entries"),
        ("starts that resumed", str(tally.resumed)),
        ("exports looked at", str(tally.exports)),
        ("steps gone back: starts", lags),
        ("took", f"{tally.seconds:.0f} s, HOLDFAST_KILL_SEED={SEED}"),
    ]
    return "\n" + "\n".join(f"  {what:<26}{value}" for what, value in rows)
