"""Engines of several ranks that write parts of the same files, through the whole protocol and its ends."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.commit.attempt import Deadlines
from holdfast.commit.recovery import recover
from holdfast.coordination.board import LocalBoard
from holdfast.coordination.failure import AttemptAborted, AttemptPublished, RankFailure
from holdfast.coordination.group import Group
from holdfast.engine.client import EngineClient
from holdfast.errors import ConfigError, EngineDied
from holdfast.format.manifest import FilePart, ManifestReport, report_name
from holdfast.loader.checkpoint import verify_source
from holdfast.loader.sources.open import open_source
from holdfast.saver.agreement import Whole
from holdfast.saver.delivery import AttemptRunner, plan_attempt
from holdfast.storage.local import LocalStorage
from holdfast.testing.parts import SharedSample

MB = 1 << 20
WAIT_S = 30.0
DEADLINES = Deadlines(begin_s=WAIT_S, persist_s=WAIT_S, commit_s=WAIT_S)
PREWRITTEN = {"config.json": b"{}", "additional_chat_templates/tool.jinja": b"{{ tools }}"}
SIZES = {
    "model-00001-of-00003.safetensors": 6 * MB + 1111,
    "model-00002-of-00003.safetensors": 4 * MB,
    "model-00003-of-00003.safetensors": 70_001,
    "tiny.safetensors": 8,
}


class Job:
    """Ranks on threads, each with a real engine, over one root."""

    def __init__(self, root, world, **engine):
        self.world = world
        self.storage = LocalStorage(root)
        boards = LocalBoard.of_world(world)
        self.engines = [EngineClient(rank, nice=0, **engine) for rank in range(world)]
        groups = [Group(rank, world, tuple(range(world)), boards[rank]) for rank in range(world)]
        self.carriers = [
            AttemptRunner(self.storage, groups[rank], self.engines[rank], DEADLINES) for rank in range(world)
        ]
        self.board = boards[0]
        self.exports = 0

    def close(self):
        for carrier in self.carriers:
            carrier.close(WAIT_S)
        for engine in self.engines:
            engine.close()

    def begin(self, rank, sample, told, step):
        """This rank's attempt, planned by what ranks have told; and what its engine knows image and plan by."""
        carrier = self.carriers[rank]
        image, plan = sample.register(rank, self.engines[rank])

        def planned(_timeout_s):
            for refused, why in enumerate(told):
                if isinstance(why, Exception):
                    return RankFailure.of(why, rank=refused)
            return plan_attempt(
                f"hf-{step}",
                Whole.in_parts(told),
                PREWRITTEN,
                step=step,
                metrics={},
                resumable=False,
                extra={},
                overwrite=False,
                kind="export",
            )

        return carrier.begin(f"attempt/{step}", planned, step=step), image, plan

    def persist(self, rank, attempt, image, plan, disturb=None):
        carrier = self.carriers[rank]
        carrier.persist(attempt, plan=plan, image=image)
        self.engines[rank].staging_verified(attempt.id)
        if disturb is not None:
            disturb(rank, self.engines[rank], attempt)
        return carrier.wait_reported(attempt)

    def export(self, sample, *, told=None, disturb=None, settle=True):
        """What became of an export on each rank: its outcome, or what was raised."""
        self.exports += 1
        step, results = self.exports, [None] * self.world

        def run(rank):
            try:
                attempt, image, plan = self.begin(rank, sample, told or sample.parts, step)
                if settle:
                    persist = lambda: self.persist(rank, attempt, image, plan, disturb)  # noqa: E731
                    results[rank], _ = self.carriers[rank].carry(attempt, persist)
                else:
                    results[rank] = self.persist(rank, attempt, image, plan, disturb)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive(), "a rank hangs"
        return results

    def settled_entries(self):
        """What is in the root once the engines have removed what is in the trash."""
        for engine in self.engines:
            engine.wait_removals(WAIT_S)
        return self.storage.list_dir("")


@pytest.fixture
def job(tmp_path):
    jobs = []

    def make(world, **engine):
        jobs.append(Job(tmp_path, world, **engine))
        return jobs[-1]

    yield make
    for made in jobs:
        made.close()


@pytest.fixture
def make():
    made = []

    def make(*args, **kwargs):
        made.append(SharedSample(*args, **kwargs))
        return made[-1]

    yield make
    for sample in made:
        sample.close()


def check(directory, sample):
    sample.check_files(directory)
    for name, data in PREWRITTEN.items():
        assert (Path(directory) / name).read_bytes() == data
    report = verify_source(open_source(str(directory), exports=True))
    assert report.problems == ()
    assert report.files == len(sample.contents)


def settle_after_crash(storage):
    return recover(storage, clock=time.monotonic, sleep=time.sleep, timeout_s=WAIT_S)


def at_work(engine, attempt):
    """Wait until some bytes are written and some aren't."""
    deadline = time.monotonic() + WAIT_S
    while not 0 < engine.progress(attempt.id)[0] < engine.progress(attempt.id)[1]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("world", "direct"), [(1, True), (2, True), (2, False), (3, True), (4, True), (4, False)])
def test_engines_write_parts_of_one_file(job, make, tmp_path, world, direct):
    ranks, sample = job(world, direct=direct), make(SIZES, world, seed=world)
    for step in (1, 2):
        assert [type(outcome) for outcome in ranks.export(sample)] == [AttemptPublished] * world
        check(tmp_path / f"hf-{step}", sample)
    assert ranks.settled_entries() == ["hf-1", "hf-2"]
    assert ranks.board.keys() == []


@pytest.mark.parametrize("direct", [True, False])
def test_one_block_files_one_a_rank(job, make, tmp_path, direct):
    sizes = {f"{number}": size for number, size in enumerate((1, 4095, 4096, 4097))}
    parts = [[FilePart(name, 0, size, size)] for name, size in sizes.items()]
    ranks, sample = job(4, direct=direct), make(sizes, 4, parts=parts)
    assert all(isinstance(outcome, AttemptPublished) for outcome in ranks.export(sample))
    check(tmp_path / "hf-1", sample)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs")
def test_on_tmpfs(make):
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        ranks, sample = Job(path, 3), make(SIZES, 3, seed=5)
        try:
            assert all(isinstance(outcome, AttemptPublished) for outcome in ranks.export(sample))
            check(f"{path}/hf-1", sample)
        finally:
            ranks.close()


def test_what_ranks_told_does_not_make_up_files(job, make):
    ranks, sample = job(2), make(SIZES, 2, seed=1)
    told = [sample.parts[0], sample.parts[1][1:]]
    outcomes = ranks.export(sample, told=told)
    assert all(isinstance(outcome, ConfigError) and "in no part" in str(outcome) for outcome in outcomes)
    assert ranks.settled_entries() == []


def test_a_rank_that_cannot_plan_fails_all_with_its_error(job, make):
    ranks, sample = job(2), make(SIZES, 2, seed=1)
    outcomes = ranks.export(sample, told=[sample.parts[0], ConfigError("tensor x is nowhere", field="key_map")])
    assert [str(outcome) for outcome in outcomes] == ["tensor x is nowhere"] * 2
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)
    assert ranks.settled_entries() == []


def test_a_rank_that_writes_other_parts_than_it_told_is_noticed(job, make):
    ranks, sample = job(2), make({"a": 4 * MB}, 2, parts=[[FilePart("a", 0, MB, 4 * MB)], []])
    told = [[FilePart("a", 0, MB, 4 * MB)], [FilePart("a", MB, 3 * MB, 4 * MB)]]
    outcomes = ranks.export(sample, told=told)
    assert all(
        isinstance(outcome, AttemptAborted) and "rank 1 reported 0 bytes" in outcome.reason.message
        for outcome in outcomes
    )
    assert ranks.settled_entries() == []


def test_a_file_that_can_not_grow_fails_the_export_with_its_name(job, make, tmp_path):
    """The same as a full disk, and it needs no disk: the system refuses this engine whatever lies beyond 2 MiB."""
    ranks, sample = job(2), make({"a": 5 * MB + 9}, 2, seed=4)
    assert any(part.end > 2 * MB for part in sample.parts[1])
    ranks.engines[1].wait_ready()
    before = resource.prlimit(ranks.engines[1].pid, resource.RLIMIT_FSIZE)
    resource.prlimit(ranks.engines[1].pid, resource.RLIMIT_FSIZE, (2 * MB, before[1]))
    outcomes = ranks.export(sample)
    assert all(isinstance(outcome, AttemptAborted) for outcome in outcomes)
    reason = outcomes[0].reason
    assert (reason.rank, reason.errno) == (1, errno.EFBIG)
    assert reason.path.endswith("/a")
    assert ranks.settled_entries() == []
    resource.prlimit(ranks.engines[1].pid, resource.RLIMIT_FSIZE, before)
    assert all(isinstance(outcome, AttemptPublished) for outcome in ranks.export(sample))
    check(tmp_path / "hf-2", sample)


def kill_at_work(victim):
    def disturb(rank, engine, attempt):
        if rank == victim:
            at_work(engine, attempt)
            os.kill(engine.pid, signal.SIGKILL)

    return disturb


def test_an_engine_killed_between_parts_fails_the_export_and_not_the_next(job, make, tmp_path):
    ranks, sample = job(3, io_limit_bytes_per_s=2 * MB), make(SIZES, 3, seed=2)
    outcomes = ranks.export(sample, disturb=kill_at_work(1))
    assert [outcome.reason.kind for outcome in outcomes] == ["EngineDied"] * 3, outcomes[0].reason
    assert ranks.settled_entries() == []
    assert all(isinstance(outcome, AttemptPublished) for outcome in ranks.export(sample))
    check(tmp_path / "hf-2", sample)


def test_after_a_crash_a_part_that_is_not_durable_is_missed(job, make):
    ranks, sample = job(3, io_limit_bytes_per_s=2 * MB), make(SIZES, 3, seed=2)
    reported = ranks.export(sample, disturb=kill_at_work(2), settle=False)
    assert [type(outcome) for outcome in reported] == [ManifestReport, ManifestReport, EngineDied], reported
    ranks.close()
    (left,) = ranks.storage.list_dir("")
    assert sorted(name for name in ranks.storage.list_dir(left) if name.endswith(".report")) == [
        report_name(0),
        report_name(1),
    ]
    found = settle_after_crash(ranks.storage)
    assert (found.rolled_forward, len(found.removed)) == ((), 1)
    assert ranks.storage.list_dir("") == []


def test_after_a_crash_what_every_rank_has_reported_is_published(job, make, tmp_path):
    ranks, sample = job(3), make(SIZES, 3, seed=2)
    reported = ranks.export(sample, settle=False)
    assert not any(isinstance(outcome, Exception) for outcome in reported)
    ranks.close()
    assert ranks.storage.list_dir("")[0].endswith(".incomplete")
    assert settle_after_crash(ranks.storage).rolled_forward == ("hf-1",)
    check(tmp_path / "hf-1", sample)


def test_the_command_line_knows_an_export(job, make, tmp_path):
    sizes = {name.replace(".safetensors", ".part"): size for name, size in SIZES.items()}  # no weights: no headers
    ranks, sample = job(2), make(sizes, 2, seed=3)
    assert all(isinstance(outcome, AttemptPublished) for outcome in ranks.export(sample))
    ended, found = run("verify", tmp_path / "hf-1")
    assert (ended, found["ok"]) == (0, True)
    assert found["checkpoints"][0]["files"] == len(sizes)
    (entry,) = run("ls", tmp_path)[1]["entries"]
    assert (entry["kind"], entry["state"], entry["step"], entry["latest"]) == ("export", "published", 1, False)
    shown = run("show", tmp_path / "hf-1")[1]
    assert (shown["kind"], shown["tensors"]) == ("export", [])
    assert {row["name"]: row["nbytes"] for row in shown["files"]} == sizes
    name = "model-00001-of-00003.part"
    with open(tmp_path / "hf-1" / name, "r+b") as file:
        file.seek(3 * MB + 5)
        byte = file.read(1)
        file.seek(3 * MB + 5)
        file.write(bytes([byte[0] ^ 1]))
    ended, found = run("verify", tmp_path)
    (problem,) = found["checkpoints"][0]["problems"]
    assert ended == 1
    assert (problem["path"], problem["byte_range"]) == (str(tmp_path / "hf-1" / name), [3 * MB, 4 * MB])


def run(*arguments):
    """Exit status and document of a command."""
    source = str(Path(holdfast.__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": source},
    )
    return ended.returncode, json.loads(ended.stdout)


def test_a_plan_without_parts_is_a_checkpoint_as_before():
    assert Whole(((("a", 4096),),), None).parts == ()
    assert Whole.in_parts([[FilePart("a", 0, 5, 5)], []]) == Whole(((), ()), None, ((FilePart("a", 0, 5, 5),), ()))
