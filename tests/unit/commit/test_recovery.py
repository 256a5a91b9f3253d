"""Whatever a crash leaves, and wherever: the next start finds every published byte and settles the rest."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random

import pytest
import xxhash
from _protocol import (
    METADATA,
    QUICK,
    Killed,
    Stoppable,
    Time,
    file_name,
    make_plan,
    payload,
    persist,
    run_ranks,
    save,
    start,
)

from holdfast.catalog.root import published
from holdfast.commit.attempt import Attempt, AttemptPublished
from holdfast.commit.recovery import RecoveryReport, find_bad_extent, recover
from holdfast.coordination.board import LocalBoard
from holdfast.errors import HoldfastError, OutcomeUnknown, StorageError
from holdfast.format.manifest import (
    PLAN_NAME,
    RankIndex,
    Report,
    decode_report,
    encode_attempt_plan,
    encode_index,
    encode_report,
    report_name,
)
from holdfast.storage.entries import hidden_name, parse_hidden, read_manifest
from holdfast.storage.leases import LeaseRecord, LeaseState, lease_name
from holdfast.storage.local import LocalStorage
from holdfast.testing.memory_storage import MemoryStorage


def check_whole(storage, name, step, world):
    """Everything that rank after rank saved at ``step`` is at ``name``, and nothing else."""
    manifest = read_manifest(storage, name)
    assert manifest.step == step
    assert manifest.world == world
    for rank, line in enumerate(manifest.reports):
        data = storage.read_file(f"{name}/{line.name}", max_bytes=1 << 20)
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (line.size, line.digest)
        report = decode_report(data, path=line.name)
        assert report.attempt == manifest.attempt
        for file in report.files:
            assert find_bad_extent(storage, name, file) is None
        content = payload(step, rank)
        assert storage.read_file(f"{name}/{file_name(rank)}", max_bytes=len(content)) == content
    assert storage.read_file(f"{name}/.metadata", max_bytes=100) == METADATA
    expected = [".metadata", "holdfast.json", *(n(rank) for rank in range(world) for n in (file_name, report_name))]
    kept = {path.split("/")[1] for path in FOREIGN if path.startswith(f"{name}/") and storage.exists(path)}
    assert storage.list_dir(name) == sorted({*expected, *kept})


def run_until_killed(memory, world, stop_at, *, after, plan, fail=None):
    """A save of step 2 that is killed as a whole at its operation ``stop_at``; what each rank had said before."""
    boards = LocalBoard.of_world(world)
    storage = Stoppable(memory, stop_at, after=after)

    def run(rank):
        try:
            said = save(storage, boards[rank], 2, plan=plan, fail=fail if rank == world - 1 else None, clean=rank == 0)
        except HoldfastError as error:
            said = error
        except Killed:
            for board in boards:
                board.close()
            return Killed()
        return Killed() if storage.dead else said

    return storage, run_ranks(run, world)


def check_promises(said, memory, name, *, old_step, world):
    """Invariants 1, 2 and 4 after the restart."""
    assert [entry for entry in memory.list_dir("") if entry.startswith(".")] == [], "leftovers"
    manifest = read_manifest(memory, name)
    is_new = manifest is not None and manifest.step == 2
    certain = [s for s in said if not isinstance(s, (Killed, OutcomeUnknown))]
    succeeded = [s for s in certain if isinstance(s, AttemptPublished)]
    assert len(succeeded) in {0, len(certain)}, "a failure here and a success there"
    if succeeded:
        assert is_new, "a success was lost"
    elif certain:
        assert not is_new, "what was announced as failed was rolled forward"
    if is_new:
        check_whole(memory, name, 2, world)
    elif old_step is not None:
        check_whole(memory, name, old_step, 1)


FOREIGN = {"step-1/train.log": b"mine", "step-1/below/x": b"mine too"}


def first_save(overwrite):
    """A storage with step 1, and what its user has put there; `overwrite`: how it can replace directories."""
    memory = MemoryStorage(exchanges=overwrite == "exchange")
    assert isinstance(save(memory, LocalBoard(), 1, plan=make_plan(1, 1)), AttemptPublished)
    memory.make_dir("step-1/below")
    for name, data in FOREIGN.items():
        memory.write_file(name, data)
    memory.sync_dir("step-1/below")
    memory.sync_dir("step-1")
    return memory


def check_foreign(memory):
    for name, data in FOREIGN.items():
        assert memory.read_file(name, max_bytes=99) == data, "what a user put there was lost"


@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("overwrite", [None, "renames", "exchange"], ids=["new", "two renames", "exchange"])
@pytest.mark.parametrize(
    ("world", "failing"), [(1, False), (3, False), (2, True)], ids=["1 rank", "3 ranks", "failing"]
)
def test_stopped_at_every_operation(world, failing, overwrite, after, power_cut):
    rng = random.Random(0)
    name = "step-1" if overwrite else "step-2"
    rolled_forward = 0

    def fail():
        raise StorageError("no space", path="/disk", errno=errno.ENOSPC)

    for k in itertools.count(1):
        memory = first_save(overwrite)
        plan = make_plan(2, world, overwrite=overwrite is not None, name=name)
        storage, said = run_until_killed(memory, world, k, after=after, plan=plan, fail=fail if failing else None)
        if power_cut:
            memory.lose_unsynced(lambda pending: rng.randint(0, pending))
        report = start(memory)
        assert report.left == ()
        rolled_forward += report.rolled_forward == (name,)
        check_promises(said, memory, name, old_step=1 if overwrite else None, world=world)
        check_foreign(memory)
        if not overwrite:
            check_whole(memory, "step-1", 1, 1)
        assert start(memory) == RecoveryReport(), "nothing is left to settle"
        if not storage.dead:
            assert failing or all(isinstance(item, AttemptPublished) for item in said)
            break
    assert k > 12
    assert failing or rolled_forward > 0, "some of these were whole"


@pytest.mark.parametrize("power_cut", [pytest.param(False, marks=pytest.mark.slow), True], ids=["killed", "power cut"])
@pytest.mark.parametrize(
    "overwrite",
    [None, pytest.param("renames", marks=pytest.mark.slow), "exchange"],
    ids=["new", "two renames", "exchange"],
)
def test_a_recovery_stopped_anywhere_is_finished_by_the_next(overwrite, power_cut):
    """A save killed once all is reported, then its recovery killed at every operation of its own."""
    rng = random.Random(1)
    name = "step-1" if overwrite else "step-2"
    outcomes = set()
    for kill_save, after in itertools.product((9, 12, 14, 16, 18, 20, *range(22, 60, 3)), (False, True)):
        for k in itertools.count(1):
            memory = first_save(overwrite)
            plan = make_plan(2, 1, overwrite=overwrite is not None, name=name)
            _, said = run_until_killed(memory, 1, kill_save, after=after, plan=plan)
            storage = Stoppable(memory, k, after=after)
            with contextlib.suppress(Killed):
                start(storage)
            if power_cut:
                memory.lose_unsynced(lambda pending: rng.randint(0, pending))
            start(memory)
            check_promises(said, memory, name, old_step=1 if overwrite else None, world=1)
            check_foreign(memory)
            outcomes.add(read_manifest(memory, name) is not None and read_manifest(memory, name).step)
            if not storage.dead:
                break
    assert 2 in outcomes


def left_behind(memory, step=2, world=2, *, plan=None, finish=True, ranks=None):
    """An attempt with all its reports, whose coordinator is gone."""
    plan = plan or make_plan(step, world)
    boards = LocalBoard.of_world(world)
    attempt = Attempt.begin(
        storage=memory,
        board=boards[0],
        clock=lambda: 0.0,
        key="a",
        deadlines=QUICK,
        plan=plan,
        prewritten={".metadata": METADATA},
    )
    for rank in ranks if ranks is not None else range(world):
        persist(memory, attempt.directory, attempt.id, step, rank, world)
    return plan, attempt.directory


def test_a_whole_attempt_is_rolled_forward():
    memory = MemoryStorage()
    left_behind(memory)
    assert start(memory) == RecoveryReport(rolled_forward=("step-2",))
    check_whole(memory, "step-2", 2, 2)


def test_on_a_real_file_system(tmp_path):
    storage = LocalStorage(tmp_path)
    left_behind(storage)
    left_behind(storage, 3, ranks=[0])
    report = start(storage, look=None)
    assert report.rolled_forward == ("step-2",)
    assert len(report.removed) == 1
    assert storage.list_dir("") == ["step-2"]
    check_whole(storage, "step-2", 2, 2)


@pytest.mark.parametrize("victim", [file_name(0), file_name(1), report_name(1), ".metadata"])
@pytest.mark.parametrize("damage", ["flip", "missing", "longer"])
def test_a_damaged_attempt_is_removed(victim, damage):
    memory = MemoryStorage()
    _, directory = left_behind(memory)
    path = f"{directory}/{victim}"
    data = memory.read_file(path, max_bytes=1 << 30)
    if damage == "flip":
        memory.overwrite_byte(path, len(data) - 1, data[-1] ^ 1)
    else:
        memory.unlink(path)
        if damage == "longer":
            memory.write_file(path, data + b"x")
    assert start(memory).rolled_forward == ()
    assert memory.list_dir("") == []


def test_without_a_plan_nothing_is_rolled_forward():
    memory = MemoryStorage()
    _, directory = left_behind(memory)
    memory.unlink(f"{directory}/{PLAN_NAME}")
    start(memory)
    assert memory.list_dir("") == []


def test_a_finished_manifest_vouches_for_its_own_reports_only():
    for tampered in (False, True):
        memory = MemoryStorage()
        save(memory, LocalBoard(), 2, plan=(plan := make_plan(2, 1)))
        directory = hidden_name("step-2", plan.attempt, "incomplete")
        memory.rename("step-2", directory)
        if tampered:
            memory.unlink(f"{directory}/{report_name(0)}")
            data = encode_report(Report(plan.attempt, 2, 0, 1, (), b"", encode_index(RankIndex((), ()))))
            memory.write_file(f"{directory}/{report_name(0)}", data)
        assert start(memory).rolled_forward == (() if tampered else ("step-2",))


def test_reports_of_another_attempt_do_not_count():
    memory = MemoryStorage()
    _, directory = left_behind(memory, ranks=[0])
    persist(memory, directory, "0123456789ab", 2, 1, 2)
    start(memory)
    assert memory.list_dir("") == []


def test_a_plan_of_another_attempt_does_not_count():
    memory = MemoryStorage()
    _, directory = left_behind(memory)
    memory.unlink(f"{directory}/{PLAN_NAME}")
    memory.write_file(f"{directory}/{PLAN_NAME}", encode_attempt_plan(make_plan(2, 2)))
    start(memory)
    assert memory.list_dir("") == []


def test_trash_is_never_rolled_forward():
    memory = MemoryStorage()
    plan, directory = left_behind(memory)
    trash = hidden_name("step-2", plan.attempt, "trash")
    memory.rename(directory, trash)
    assert start(memory) == RecoveryReport(removed=(trash,))
    assert memory.list_dir("") == []


def test_an_old_attempt_never_takes_the_place_of_a_newer_checkpoint():
    memory = MemoryStorage()
    save(memory, LocalBoard(), 1, plan=make_plan(1, 1))
    left_behind(memory, plan=make_plan(2, 2, overwrite=True, name="step-1"))  # in doubt, then the job went on:
    save(memory, LocalBoard(), 3, plan=make_plan(3, 1, overwrite=True, name="step-1"))
    assert start(memory).rolled_forward == ()
    check_whole(memory, "step-1", 3, 1)
    assert memory.list_dir("") == ["step-1"]


def test_of_two_whole_attempts_the_newer_gets_the_name():
    memory = MemoryStorage()
    for step in (2, 3):
        left_behind(memory, step, plan=make_plan(step, 2, name="latest"))
    assert start(memory).rolled_forward == ("latest",)
    check_whole(memory, "latest", 3, 2)
    assert memory.list_dir("") == ["latest"]


def test_only_matching_names_are_touched():
    memory = MemoryStorage()
    _, other = left_behind(memory, plan=make_plan(2, 2, name="other"))
    left_behind(memory)
    assert start(memory, matches=lambda name: name.startswith("step-")).rolled_forward == ("step-2",)
    assert memory.list_dir("") == [other, "step-2"]


def test_an_attempt_that_cannot_be_read_keeps_no_other_from_being_settled():
    memory = MemoryStorage()
    _, broken = left_behind(memory, 5)
    left_behind(memory, 6)

    def refuse(name, *args):
        if name == "read_pieces" and "step-5" in args[0]:
            raise StorageError("bad sector", path=args[0], errno=errno.EIO)

    report = start(Stoppable(memory, refuse=refuse))
    assert report.rolled_forward == ("step-6",)
    assert report.left == (broken,)
    assert start(memory).rolled_forward == ("step-5",)


@pytest.mark.parametrize("kind", ["file", "lease is a link", "unlisted"])
def test_an_attempt_that_cannot_be_looked_into_keeps_no_other_from_being_settled(tmp_path, kind):
    storage = LocalStorage(tmp_path)
    left_behind(storage, 6)
    broken = hidden_name("step-5", "0123456789ab", "incomplete")
    if kind == "file":
        (tmp_path / broken).write_text("?")
    else:
        (tmp_path / broken).mkdir()
    if kind == "lease is a link":
        (tmp_path / broken / lease_name(0)).symlink_to("nowhere")

    def refuse(name, *args):
        if kind == "unlisted" and name == "list_dir" and "step-5" in args[0]:
            raise StorageError("not allowed", path=args[0], errno=errno.EACCES)

    report = start(Stoppable(storage, refuse=refuse), look=None)
    assert report.rolled_forward == ("step-6",)
    assert report.left == (broken,)


@pytest.mark.parametrize("kind", ["incomplete", "recovering", "trash"])
def test_nothing_is_changed_behind_a_link(tmp_path, kind):
    """A whole attempt elsewhere, and a link to it under a hidden name: recovery follows no link out of its root."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    elsewhere = LocalStorage(tmp_path / "elsewhere")
    left_behind(elsewhere)
    (attempt,) = elsewhere.list_dir("")
    (tmp_path / "elsewhere" / attempt / lease_name(1)).write_text("left")
    before = {name: (tmp_path / "elsewhere" / attempt / name).read_bytes() for name in elsewhere.list_dir(attempt)}
    link = f"{attempt.rpartition('.')[0]}.{kind}"
    (tmp_path / "root" / link).symlink_to(tmp_path / "elsewhere" / attempt)
    report = start(LocalStorage(tmp_path / "root"), look=None)
    assert report == (RecoveryReport(removed=(link,)) if kind == "trash" else RecoveryReport(left=(link,)))
    after = {name: (tmp_path / "elsewhere" / attempt / name).read_bytes() for name in elsewhere.list_dir(attempt)}
    assert after == before


def test_removal_can_be_handed_over():
    memory = MemoryStorage()
    left_behind(memory, ranks=[])
    handed = []
    report = start(memory, remove=handed.append)
    assert tuple(handed) == report.removed == tuple(memory.list_dir(""))
    assert parse_hidden(handed[0]).kind == "trash"


def leased(memory, directory):
    memory.write_file(f"{directory}/{lease_name(1)}", b"")


def state(counter, *, free):
    return LeaseState(LeaseRecord(1, "host", "boot", 1, counter), 0, free)


def test_a_lease_that_nobody_holds_is_not_waited_for():
    memory, time = MemoryStorage(), Time()
    _, directory = left_behind(memory)
    leased(memory, directory)
    report = recover(memory, clock=time.clock, sleep=time.sleep, look=lambda _d, _n: state(1, free=True))
    assert report.rolled_forward == ("step-2",)
    assert time.now == 0.0
    check_whole(memory, "step-2", 2, 2)  # without the lease


def test_a_live_engine_is_waited_for():
    """It finishes its part while the recovery waits: the attempt is whole then."""
    memory, time = MemoryStorage(), Time()
    plan, directory = left_behind(memory, ranks=[0])
    leased(memory, directory)

    def look(_directory, _name):
        if time.now < 5.0:
            return state(1, free=False)
        if not memory.exists(f"{directory}/{report_name(1)}"):
            persist(memory, directory, plan.attempt, 2, 1, 2)
        return state(1, free=True)

    assert recover(memory, clock=time.clock, sleep=time.sleep, look=look).rolled_forward == ("step-2",)
    assert 5.0 <= time.now < 5.5


def test_a_lease_on_another_host_is_quiet_when_it_stands_still():
    memory, time = MemoryStorage(), Time()
    _, directory = left_behind(memory)
    leased(memory, directory)

    def look(_directory, _name):
        return state(int(min(time.now, 3.0) * 4), free=None)

    recover(memory, clock=time.clock, sleep=time.sleep, look=look, lease_quiet_s=2.0)
    assert 4.8 <= time.now <= 5.5


def test_waiting_for_a_lease_is_bounded(caplog):
    memory, time = MemoryStorage(), Time()
    _, directory = left_behind(memory, ranks=[0])
    leased(memory, directory)
    recover(
        memory,
        clock=time.clock,
        sleep=time.sleep,
        look=lambda _d, _n: state(int(time.now * 9), free=None),
        timeout_s=7.0,
    )
    assert 7.0 <= time.now < 7.5
    assert memory.list_dir("") == []
    assert "still in progress" in caplog.text


@pytest.mark.parametrize("name", ["step-5", "a.b", ".x", "weights.0123456789ab.trash"])
def test_hidden_names_come_apart_as_they_were_put_together(name):
    for kind in ("incomplete", "recovering", "replaced", "trash"):
        found = parse_hidden(hidden_name(name, "0123456789ab", kind))
        assert (found.name, found.attempt, found.kind) == (name, "0123456789ab", kind)


@pytest.mark.parametrize("entry", ["step-5", ".step-5.lock", ".holdfast", ".a.0123456789AB.trash", ".a.0123.trash"])
def test_other_names_are_not_hidden_entries(entry):
    assert parse_hidden(entry) is None


def test_published_lists_what_has_a_manifest():
    memory = MemoryStorage()
    for step in (10, 2):
        save(memory, LocalBoard(), step, plan=make_plan(step, 1))
    for name in ("step-3", "step-007", "step-", "step-x", "other-4", "step-٣"):
        memory.make_dir(name)
        if name != "step-3":
            memory.write_file(f"{name}/holdfast.json", b"")
    assert published(memory, "step-{step}") == [(2, "step-2"), (10, "step-10")]
    assert published(memory, "step-{step:03d}") == [(7, "step-007")]
    assert published(memory, "hf-{step}") == []
