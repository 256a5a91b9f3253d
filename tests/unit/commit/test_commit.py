"""One attempt on one rank or several: who learns what, whatever fails."""

from __future__ import annotations

import errno
import itertools
import threading
import time

import msgspec
import pytest
from _protocol import (
    BRIEF,
    METADATA,
    QUICK,
    Killed,
    Stoppable,
    error_of,
    file_name,
    make_plan,
    payload,
    persist,
    run_ranks,
    save,
    save_on_ranks,
)

from holdfast.commit.attempt import (
    TRANSITIONS,
    Actor,
    Attempt,
    AttemptAborted,
    AttemptPublished,
    Deadlines,
    IllegalTransition,
    RankFailure,
    State,
    advance,
)
from holdfast.commit.recovery import recover
from holdfast.coordination.board import BoardLost, LocalBoard
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    HoldfastError,
    OutcomeUnknown,
    SaveFailed,
    StateChangedWhileStaging,
    StateMismatch,
    StorageError,
)
from holdfast.format.manifest import report_name
from holdfast.storage.entries import read_manifest
from holdfast.storage.local import LocalStorage
from holdfast.testing.memory_storage import MemoryStorage


def refused(code=errno.ENOSPC, path="/disk/file"):
    return StorageError(f"can't write {path}: it is full (ENOSPC)", path=path, errno=code)


@pytest.mark.parametrize("world", [1, 3])
def test_a_save_is_published_whole(tmp_path, world):
    storage = LocalStorage(tmp_path)
    boards = LocalBoard.of_world(world)
    plan = make_plan(7, world)
    outcomes = save_on_ranks([storage] * world, 7, boards=boards, plan=plan)
    assert outcomes == [AttemptPublished("step-7", plan.attempt)] * world
    assert storage.list_dir("") == ["step-7"]
    expected = [
        ".metadata",
        "holdfast.json",
        *(name(rank) for rank in range(world) for name in (file_name, report_name)),
    ]
    assert storage.list_dir("step-7") == sorted(expected)
    manifest = read_manifest(storage, "step-7")
    assert [report.rank for report in manifest.reports] == list(range(world))
    assert (manifest.attempt, manifest.step) == (plan.attempt, 7)
    assert storage.read_file("step-7/.metadata", max_bytes=100) == METADATA
    for rank in range(world):
        data = payload(7, rank)
        assert storage.read_file(f"step-7/{file_name(rank)}", max_bytes=len(data)) == data
    assert boards[0].keys() == [], "the board is clean"


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_rank_fails_all_with_its_cause(failing):
    storage = MemoryStorage()
    boards = LocalBoard.of_world(3)
    plan = make_plan(7, 3)

    def fail():
        raise refused()

    outcomes = run_ranks(
        lambda rank: save(storage, boards[rank], 7, plan=plan, fail=fail if rank == failing else None), 3
    )
    assert storage.list_dir("") == []
    assert boards[0].keys() == []
    for error in [error_of(outcome, 7) for outcome in outcomes]:
        assert isinstance(error, SaveFailed)
        assert (error.step, error.rank, error.path, error.errno) == (7, failing, "/disk/file", errno.ENOSPC)
        assert str(refused()) in str(error)
        assert isinstance(error.__cause__, StorageError)
        assert (error.__cause__.errno, error.__cause__.path) == (errno.ENOSPC, "/disk/file")


def test_two_failing_ranks_agree_on_one_cause():
    storage = MemoryStorage()
    boards = LocalBoard.of_world(3)
    plan = make_plan(7, 3)

    def fail(rank):
        raise refused(path=f"/disk/{rank}")

    outcomes = run_ranks(lambda rank: save(storage, boards[rank], 7, plan=plan, fail=lambda: fail(rank)), 3)
    assert len({str(error_of(outcome, 7)) for outcome in outcomes}) == 1


def test_a_reason_that_is_no_text_travels_escaped():
    """Names of files needn't be: what says one must reach the other ranks all the same."""
    for error in (StateMismatch("no \udc80", missing=("a\udc80",)), StorageError("\udc80", path="/\udc80", errno=5)):
        reason = RankFailure.of(error, rank=1)
        cause = msgspec.msgpack.decode(msgspec.msgpack.encode(reason), type=RankFailure).cause()
        assert type(cause) is type(error)
        assert r"\udc80" in str(cause)
    assert (cause.path, cause.errno) == (r"/\udc80", 5)
    assert r"ValueError: \udc80" in RankFailure.of(ValueError("\udc80"), rank=0).message


def test_an_error_of_a_class_of_our_own_is_of_the_public_one_elsewhere():
    class TooNew(ConfigError):
        pass

    found = RankFailure.of(TooNew("a newer release wrote it", field="path"), rank=0).cause()
    assert type(found) is ConfigError
    assert (str(found), found.field) == ("a newer release wrote it", "path")


def test_what_keeps_the_coordinator_from_a_plan_is_what_every_rank_raises():
    storage = MemoryStorage()
    boards = LocalBoard.of_world(3)
    reason = RankFailure.of(StateMismatch("w is cut differently", mismatched=("w",)), rank=2)

    def begin(rank):
        Attempt.begin(
            storage=storage,
            board=boards[rank],
            clock=time.monotonic,
            key="attempt/7",
            deadlines=Deadlines(10, 10, 10),
            refusal=reason if rank == 0 else None,
            step=7,
        )

    errors = run_ranks(begin, 3)
    assert [type(error) for error in errors] == [SaveFailed] * 3
    assert len({str(error) for error in errors}) == 1
    assert errors[1].rank == 2
    assert "w is cut differently" in str(errors[1])
    assert storage.list_dir("") == []
    assert boards[0].keys() == []


def test_an_occupied_name_is_refused_before_anything_is_made():
    storage = MemoryStorage()
    assert save(storage, LocalBoard(), 7, plan=make_plan(7, 1))
    before = storage.read_file("step-7/holdfast.json", max_bytes=1 << 20)
    results = save_on_ranks([storage] * 2, 7)
    assert [type(result) for result in results] == [CheckpointExists] * 2
    assert results[0].path == results[1].path == "/memory/step-7"
    assert storage.list_dir("") == ["step-7"]
    assert storage.read_file("step-7/holdfast.json", max_bytes=1 << 20) == before


def test_an_empty_directory_is_no_obstacle(tmp_path):
    (tmp_path / "step-7").mkdir()
    storage = LocalStorage(tmp_path)
    assert isinstance(save(storage, LocalBoard(), 7, plan=make_plan(7, 1)), AttemptPublished)


def test_a_file_is_an_obstacle(tmp_path):
    (tmp_path / "step-7").write_text("precious")
    with pytest.raises(CheckpointExists):
        save(LocalStorage(tmp_path), LocalBoard(), 7, plan=make_plan(7, 1))
    assert (tmp_path / "step-7").read_text() == "precious"


def test_a_name_taken_meanwhile_fails_the_save():
    storage = MemoryStorage()

    def take():
        storage.make_dir("step-7")
        storage.write_file("step-7/precious", b"x")

    outcome = save(storage, LocalBoard(), 7, plan=make_plan(7, 1), before_publish=take)
    assert isinstance(outcome.reason.error(step=7), CheckpointExists)
    assert storage.list_dir("") == ["step-7"]
    assert storage.list_dir("step-7") == ["precious"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_name_taken_at_the_last_moment_fails_the_save_alike(world):
    """After COMMIT was decided, before the rename: somebody who asks for no lock."""
    memory = MemoryStorage()

    def refuse(name, *args):
        if name == "rename" and args[1] == "step-7":
            memory.make_dir("step-7")
            memory.write_file("step-7/precious", b"x")
            raise refused(errno.ENOTEMPTY)

    results = save_on_ranks([Stoppable(memory, refuse=refuse), *[memory] * (world - 1)], 7)
    assert [type(error_of(result, 7)) for result in results] == [CheckpointExists] * world
    assert memory.list_dir("") == ["step-7"]


class Failing:
    """A board whose ``method`` breaks for a reason that nobody thought of, where a key ends with ``key``."""

    def __init__(self, board, method, key):
        self.board, self.method, self.key = board, method, key
        self.rank, self.world = board.rank, board.world

    def __getattr__(self, name):
        act = getattr(self.board, name)

        def call(key, *args, **kwargs):
            if key.endswith(self.key):
                raise MemoryError("none left")
            return act(key, *args, **kwargs)

        return call if name == self.method else act


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("set", "/begin"),
        ("get", "/begin"),
        ("append", "/reports"),
        ("wait_entries", "/reports"),
        ("compare_set", "/outcome"),
        ("set", "/end"),
        ("get", "/end"),
        ("add", "/left"),
    ],
)
def test_a_rank_that_breaks_while_it_talks_misleads_nobody(rank, method, key):
    memory = MemoryStorage()
    boards = LocalBoard.of_world(2)
    boards[rank] = Failing(boards[rank], method, key)
    results = save_on_ranks([memory] * 2, 7, boards=boards, deadlines=BRIEF)
    errors = [error_of(result, 7) for result in results]
    assert all(isinstance(error, (HoldfastError, AttemptPublished)) for error in errors), errors
    definite = {type(error) for error in errors} - {OutcomeUnknown}
    assert len(definite) <= 1, errors
    recover(memory, clock=time.monotonic, sleep=time.sleep, look=lambda _directory, _name: None)
    if definite:
        assert (read_manifest(memory, "step-7") is not None) == (definite == {AttemptPublished}), errors


def test_overwrite_replaces_the_whole_directory():
    storage = MemoryStorage()
    save(storage, LocalBoard(), 7, plan=make_plan(7, 1))
    plan = make_plan(8, 2, overwrite=True, name="step-7")
    outcomes = save_on_ranks([storage] * 2, 8, plan=plan)
    assert outcomes == [AttemptPublished("step-7", plan.attempt)] * 2
    assert storage.list_dir("") == ["step-7"]
    assert read_manifest(storage, "step-7").step == 8
    assert report_name(1) in storage.list_dir("step-7")


class Repeating(Stoppable):
    """A file server that loses its answer to each rename and, asked again, answers for the second time."""

    def __getattr__(self, name):
        act = super().__getattr__(name)

        def twice(*args):
            act(*args)
            act(*args)

        return twice if name == self.repeats else act

    repeats = "rename"


class ExchangingTwice(Repeating):
    """The second time changes everything back."""

    repeats = "exchange"


@pytest.mark.parametrize("kind", [Repeating, ExchangingTwice])
@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_repeated_answer_is_no_failure(overwrite, exchanges, kind):
    memory = MemoryStorage(exchanges=exchanges)
    save(memory, LocalBoard(), 1, plan=make_plan(1, 1))
    name = "step-1" if overwrite else "step-7"
    plan = make_plan(7, 1, overwrite=overwrite, name=name)
    assert save(kind(memory), LocalBoard(), 7, plan=plan) == AttemptPublished(name, plan.attempt)
    assert memory.list_dir("") == (["step-1"] if overwrite else ["step-1", "step-7"])


def test_a_repeated_answer_is_no_failure_of_an_abort():
    memory = MemoryStorage()

    def fail():
        raise refused()

    assert isinstance(save(Repeating(memory), LocalBoard(), 7, plan=make_plan(7, 1), fail=fail), AttemptAborted)
    assert memory.list_dir("") == []


def test_a_refused_overwrite_puts_the_old_one_back():
    memory = MemoryStorage(exchanges=False)
    save(memory, LocalBoard(), 7, plan=make_plan(7, 1))

    def refuse(name, *args):
        if name == "rename" and args[0].endswith(".incomplete") and args[1] == "step-7":
            raise refused(errno.EIO)

    plan = make_plan(8, 1, overwrite=True, name="step-7")
    outcome = save(Stoppable(memory, refuse=refuse), LocalBoard(), 8, plan=plan)
    assert isinstance(outcome, AttemptAborted)
    assert memory.list_dir("") == ["step-7"]
    assert read_manifest(memory, "step-7").step == 7


@pytest.mark.parametrize("taken", [False, True], ids=["refused", "name taken"])
def test_an_old_one_that_cannot_be_put_back_is_no_certain_failure(taken):
    memory = MemoryStorage(exchanges=False)
    save(memory, LocalBoard(), 7, plan=make_plan(7, 1))

    def refuse(name, *args):
        if name == "rename" and args[1] == "step-7":
            if taken:
                memory.make_dir("step-7")
                memory.write_file("step-7/foreign", b"x")
            raise refused(errno.EIO)

    plan = make_plan(8, 1, overwrite=True, name="step-7")
    with pytest.raises(OutcomeUnknown, match="put back"):
        save(Stoppable(memory, refuse=refuse), LocalBoard(), 8, plan=plan)
    hidden = {entry.rsplit(".", 1)[-1] for entry in memory.list_dir("") if entry.startswith(".")}
    assert hidden == {"incomplete", "replaced"}
    if not taken:
        recover(memory, clock=time.monotonic, sleep=time.sleep, look=lambda _directory, _name: None)
        assert read_manifest(memory, "step-7").step == 8


def test_an_overwritten_name_is_never_missing():
    memory = MemoryStorage()
    save(memory, LocalBoard(), 7, plan=make_plan(7, 1))
    missing = []

    def look(name, *args):
        if not memory.exists("step-7/holdfast.json"):
            missing.append((name, *args))

    plan = make_plan(8, 1, overwrite=True, name="step-7")
    outcome = save(Stoppable(memory, refuse=look), LocalBoard(), 8, plan=plan)
    assert outcome == AttemptPublished("step-7", plan.attempt)
    assert missing == []
    assert memory.list_dir("") == ["step-7"]


@pytest.mark.parametrize("happened", [False, True])
def test_a_refused_exchange_is_told_by_what_is_there(happened):
    memory = MemoryStorage()
    save(memory, LocalBoard(), 7, plan=make_plan(7, 1))

    def refuse(name, *args):
        if name == "exchange":
            if happened:
                memory.exchange(*args)
            raise refused(errno.EIO)

    plan = make_plan(8, 1, overwrite=True, name="step-7")
    outcome = save(Stoppable(memory, refuse=refuse), LocalBoard(), 8, plan=plan)
    assert isinstance(outcome, AttemptPublished if happened else AttemptAborted)
    assert memory.list_dir("") == ["step-7"]
    assert read_manifest(memory, "step-7").step == (8 if happened else 7)


def test_an_exchange_of_which_nothing_can_be_seen_is_no_certain_failure():
    memory = MemoryStorage()
    save(memory, LocalBoard(), 7, plan=make_plan(7, 1))
    blind = []

    def refuse(name, *args):
        if name == "exchange":
            blind.append(name)
            memory.exchange(*args)
        if blind and name in {"exchange", "size"}:
            raise refused(errno.EIO)

    plan = make_plan(8, 1, overwrite=True, name="step-7")
    with pytest.raises(OutcomeUnknown, match="can't read whether"):
        save(Stoppable(memory, refuse=refuse), LocalBoard(), 8, plan=plan)
    recover(memory, clock=time.monotonic, sleep=time.sleep, look=lambda _directory, _name: None)
    assert memory.list_dir("") == ["step-7"]
    assert read_manifest(memory, "step-7").step == 8


@pytest.mark.parametrize("exchanges", [False, True])
def test_what_others_put_into_an_overwritten_directory_is_kept(exchanges):
    memory = MemoryStorage(exchanges=exchanges)
    plan = make_plan(7, 2)
    save_on_ranks([memory] * 2, 7, plan=plan)
    memory.write_file("step-7/train.log", b"mine")
    memory.write_file("step-7/__7_0.distcp", b"of a stock save of more ranks")
    memory.make_dir("step-7/step-1")
    memory.write_file("step-7/step-1/x", b"below")
    lost = []

    def look(name, *args):
        if exchanges and not memory.exists("step-7/train.log"):
            lost.append((name, *args))

    plan = make_plan(8, 1, overwrite=True, name="step-7")
    outcome = save(Stoppable(memory, refuse=look), LocalBoard(), 8, plan=plan)
    assert outcome == AttemptPublished("step-7", plan.attempt)
    assert lost == []
    assert memory.list_dir("") == ["step-7"]
    assert memory.read_file("step-7/train.log", max_bytes=9) == b"mine"
    assert memory.read_file("step-7/step-1/x", max_bytes=9) == b"below"
    names = {".metadata", "holdfast.json", "step-1", "train.log", file_name(0), report_name(0)}
    assert set(memory.list_dir("step-7")) == names


def test_a_file_made_anew_while_links_are_refused_replaces_nothing():
    """Where files have no second names, one may be missing for a moment in which somebody makes it."""
    memory = MemoryStorage()
    save(memory, LocalBoard(), 7, plan=make_plan(7, 1))
    memory.write_file("step-7/train.log", b"old")

    def refuse(name, *_args):
        if name == "link":
            raise refused(errno.EPERM)

    class Racing(Stoppable):
        def exchange(self, *args):
            memory.exchange(*args)
            memory.write_file("step-7/train.log", b"new")
            return True

    plan = make_plan(8, 1, overwrite=True, name="step-7")
    assert save(Racing(memory, refuse=refuse), LocalBoard(), 8, plan=plan) == AttemptPublished("step-7", plan.attempt)
    assert memory.read_file("step-7/train.log", max_bytes=9) == b"new"
    assert memory.read_file(f"step-7/train.log.{plan.attempt}", max_bytes=9) == b"old"


@pytest.mark.parametrize("make", ["file", "link"])
def test_what_is_no_directory_is_never_overwritten(make, tmp_path):
    from holdfast.storage.local import LocalStorage

    storage = LocalStorage(tmp_path)
    (tmp_path / "mine").mkdir()
    if make == "file":
        (tmp_path / "step-7").write_text("mine")
    else:
        (tmp_path / "step-7").symlink_to("mine")
    plan = make_plan(8, 1, overwrite=True, name="step-7")
    with pytest.raises(CheckpointExists, match="no directory but a file or a link"):
        save(storage, LocalBoard(), 8, plan=plan)
    assert sorted(storage.list_dir("")) == ["mine", "step-7"]


def test_a_callback_before_publishing_votes():
    storage = MemoryStorage()

    def veto():
        raise ValueError("not good enough")

    outcome = save(storage, LocalBoard(), 7, plan=make_plan(7, 1), before_publish=veto)
    assert outcome.reason.message == "ValueError: not good enough"
    assert storage.list_dir("") == []


def test_a_root_that_is_not_shared_is_named():
    storages = [MemoryStorage("/disk"), MemoryStorage("/disk")]
    results = save_on_ranks(storages, 7)
    assert isinstance(results[1], ConfigError)
    assert "host1:/disk" in str(results[1])
    assert "host0:/disk" in str(results[1])
    assert str(error_of(results[0], 7)) == str(results[1])
    assert storages[0].list_dir("") == []


def test_a_directory_with_a_foreign_plan_is_not_ours():
    one, other = MemoryStorage("/disk"), MemoryStorage("/disk")
    plan = make_plan(7, 2)
    other.make_dir(f".step-7.{plan.attempt}.incomplete")
    other.write_file(f".step-7.{plan.attempt}.incomplete/.plan", b"something else")
    results = save_on_ranks([one, other], 7, plan=plan)
    assert isinstance(results[1], ConfigError)


def test_reports_that_do_not_cover_the_plan_are_not_committed():
    storage = MemoryStorage()
    plan = make_plan(7, 1)
    short = type(plan)(
        plan.attempt, plan.name, plan.step, 1, (((file_name(0), 5_000_000),),), plan.manifest, plan.overwrite
    )
    outcome = save(storage, LocalBoard(), 7, plan=short)
    assert "planned 5000000" in outcome.reason.message
    assert storage.list_dir("") == []


def begin(storage, boards, rank, plan, deadlines):
    return Attempt.begin(
        storage=storage,
        board=boards[rank],
        clock=time.monotonic,
        key="a",
        deadlines=deadlines,
        plan=plan if rank == 0 else None,
    )


def test_a_rank_that_never_reports_is_named_when_the_deadline_passes():
    storage = MemoryStorage()
    boards = LocalBoard.of_world(3)
    deadlines = Deadlines(begin_s=2.0, persist_s=0.1, commit_s=2.0)

    def run(rank):
        if rank == 2:
            begin(storage, boards, rank, None, deadlines)
            return None
        return save(storage, boards[rank], 7, plan=make_plan(7, 3), deadlines=deadlines)

    first, second, _ = run_ranks(run, 3)
    assert first == second, (first, second)
    assert isinstance(first.reason.cause(), DeadlineExceeded)
    assert "rank(s) 2 of 3" in first.reason.message
    assert storage.list_dir("") == []


def test_a_coordinator_that_never_begins_is_a_certain_failure():
    boards = LocalBoard.of_world(2)
    began = time.monotonic()
    with pytest.raises(SaveFailed, match="rank 0 to begin") as caught:
        begin(MemoryStorage(), boards, 1, None, BRIEF)
    assert isinstance(caught.value.__cause__, DeadlineExceeded)
    assert time.monotonic() - began < BRIEF.begin_s + 2 * BRIEF.commit_s + 1


def test_a_silent_coordinator_after_reports_is_in_doubt():
    storage = MemoryStorage()
    boards = LocalBoard.of_world(2)
    plan = make_plan(7, 2)

    def run(rank):
        if rank == 0:
            return begin(storage, boards, 0, plan, BRIEF)
        return save(storage, boards[1], 7, deadlines=BRIEF)

    _, result = run_ranks(run, 2)
    assert isinstance(result, OutcomeUnknown)
    assert (result.attempt, result.step) == (plan.attempt, 7)


def test_a_silent_coordinator_is_no_doubt_for_a_rank_that_did_not_report():
    storage = MemoryStorage()
    boards = LocalBoard.of_world(2)

    def run(rank):
        if rank == 0:
            return begin(storage, boards, 0, make_plan(7, 2), BRIEF)

        def fail():
            raise EngineDied("the engine is gone", rank=1, exitcode=-9)

        return save(storage, boards[1], 7, deadlines=BRIEF, fail=fail)

    _, result = run_ranks(run, 2)
    assert isinstance(result, AttemptAborted)
    cause = result.reason.cause()
    assert isinstance(cause, EngineDied)
    assert (cause.rank, cause.exitcode) == (1, -9)


def test_a_report_written_by_a_dying_engine_leaves_the_failure_in_doubt():
    storage = MemoryStorage()
    boards = LocalBoard.of_world(2)

    def run(rank):
        attempt = begin(storage, boards, rank, make_plan(7, 2) if rank == 0 else None, BRIEF)
        if rank == 0:
            return attempt
        storage.write_file(f"{attempt.directory}/{report_name(1)}", b"whole")
        return attempt.settle(unreported=RankFailure.of(EngineDied("gone"), rank=1, unreported=True))

    _, result = run_ranks(run, 2)
    assert isinstance(result, OutcomeUnknown)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("may_be_left", [False, True])
def test_a_report_that_was_taken_back_is_gone_once_that_is_durable(rank, may_be_left):
    """Where no directory can be synced: the other rank's sync may have made the report durable before."""

    class Unsynced(MemoryStorage):
        broken = False

        def sync_dir(self, name):
            if self.broken:
                raise refused(errno.EIO, name)

        def rename(self, source, target):
            super().rename(source, target)
            self.sync_dir(target)

    storage = Unsynced()
    boards = LocalBoard.of_world(2)
    plan = make_plan(7, 2)
    attempts = run_ranks(lambda number: begin(storage, boards, number, None if number else plan, BRIEF), 2)
    lines = [persist(storage, attempts[0].directory, plan.attempt, 7, number, 2) for number in range(2)]
    storage.unlink(f"{attempts[0].directory}/{report_name(rank)}")
    storage.broken = True

    def run(number):
        if number == rank:
            reason = RankFailure.of(refused(errno.EIO), rank=rank, unreported=True)
            return attempts[number].settle(unreported=reason, may_be_left=may_be_left)
        attempts[number].report(lines[number])
        return attempts[number].settle()

    for outcome in run_ranks(run, 2):
        assert isinstance(outcome, OutcomeUnknown if may_be_left else AttemptAborted), outcome


@pytest.mark.parametrize("reported", [False, True])
def test_an_attempt_that_another_job_has_rolled_forward_is_published_also_for_a_rank_that_gave_it_up(reported):
    """Rank 1's engine died as it reported, rank 0 is dead, and the next start of the job has found all reports."""
    storage, plan = MemoryStorage(), make_plan(7, 2)
    boards = LocalBoard.of_world(2)
    attempts = run_ranks(lambda rank: begin(storage, boards, rank, plan if rank == 0 else None, BRIEF), 2)
    lines = [persist(storage, attempts[0].directory, plan.attempt, 7, rank, 2) for rank in range(2)]
    if reported:
        attempts[1].report(lines[1])
    storage.write_file(f"{attempts[0].directory}/.metadata", METADATA)
    recover(storage, clock=time.monotonic, sleep=time.sleep, look=lambda _directory, _name: None)
    reason = RankFailure.of(EngineDied("gone"), rank=1)
    assert attempts[1].settle(unreported=reason) == AttemptPublished("step-7", plan.attempt)


def test_a_rank_in_doubt_finds_the_final_name():
    storage = MemoryStorage()
    boards = LocalBoard.of_world(2)
    plan = make_plan(7, 2)

    class Mute:
        """The coordinator's board, which loses the announcement."""

        def __init__(self, board):
            self.board, self.rank, self.world = board, board.rank, board.world

        def __getattr__(self, name):
            return getattr(self.board, name)

        def set(self, key, value):
            if key.endswith("/end"):
                raise BoardLost("the Store is gone")
            self.board.set(key, value)

    def run(rank):
        return save(storage, Mute(boards[0]) if rank == 0 else boards[1], 7, plan=plan, deadlines=BRIEF)

    assert run_ranks(run, 2) == [AttemptPublished("step-7", plan.attempt)] * 2


def test_an_abort_that_cannot_be_made_durable_is_unknown_on_every_rank():
    memory = MemoryStorage()
    broken = threading.Event()

    def refuse(name, *args):
        if broken.is_set() and name == "rename":
            raise refused(errno.EIO)

    def veto():
        broken.set()
        raise ValueError("no")

    storages = [Stoppable(memory, refuse=refuse), memory]
    results = save_on_ranks(storages, 7, before_publish=veto)
    assert [type(result) for result in results] == [OutcomeUnknown] * 2


def test_a_disk_that_refuses_everything_is_a_certain_failure():
    memory = MemoryStorage()
    broken = threading.Event()

    def refuse(name, *args):
        if broken.is_set() and name in {"rename", "write_file", "sync_dir"}:
            raise refused(errno.EROFS)

    def fail():
        broken.set()
        raise refused(errno.EROFS)

    storages = [Stoppable(memory, refuse=refuse), memory]
    boards = LocalBoard.of_world(2)
    plan = make_plan(7, 2)
    results = run_ranks(
        lambda rank: save(storages[rank], boards[rank], 7, plan=plan, fail=fail if rank == 0 else None), 2
    )
    assert [error_of(result, 7).errno for result in results] == [errno.EROFS] * 2


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("error", [refused(), MemoryError("none left")], ids=["refused", "out of memory"])
def test_every_refusal_ends_alike_on_every_rank(world, error):
    """The storage refuses the coordinator's operation k: all ranks fail for it, or all succeed; nobody is misled."""
    for k in itertools.count(1):
        memory = MemoryStorage()
        calls = itertools.count(1)

        def refuse(name, *args, calls=calls, k=k):
            if next(calls) == k:
                raise error

        first = Stoppable(memory, refuse=refuse)
        results = save_on_ranks([first, *[memory] * (world - 1)], 7)
        assert all(isinstance(error_of(result, 7), (HoldfastError, AttemptPublished)) for result in results), results
        kinds = {type(result) for result in results}
        is_visible = read_manifest(memory, "step-7") is not None
        if OutcomeUnknown in kinds:
            assert kinds == {OutcomeUnknown}
        elif AttemptPublished in kinds:
            assert kinds == {AttemptPublished}
            assert is_visible
        else:
            assert not is_visible, results
            messages = {str(error_of(result, 7)) for result in results}
            assert len(messages) == 1, messages
        if first.done < k:
            break
    assert k > 15


@pytest.mark.parametrize("after", [False, True])
def test_a_killed_coordinator_misleads_nobody(after):
    """Rank 0 dies at its operation k; the others succeed only if the checkpoint is there."""
    for k in itertools.count(1):
        memory = MemoryStorage()
        first = Stoppable(memory, k, after=after)
        results = save_on_ranks([first, memory], 7, deadlines=BRIEF)
        if isinstance(results[1], AttemptPublished):
            assert read_manifest(memory, "step-7") is not None
        else:
            assert isinstance(results[1], (OutcomeUnknown, SaveFailed, AttemptAborted)), results
        if not first.dead:
            break
        assert isinstance(results[0], Killed)
    assert results[0] == results[1]


def test_a_lost_board_is_an_outcome():
    boards = LocalBoard.of_world(2)
    memory = MemoryStorage()
    begun = threading.Barrier(2, timeout=10)

    def run(rank):
        attempt = begin(memory, boards, rank, make_plan(7, 2) if rank == 0 else None, QUICK)
        begun.wait()
        if rank == 1:
            boards[1].close()
        return attempt.settle(unreported=RankFailure.of(refused(), rank=rank, unreported=True))

    first, second = run_ranks(run, 2)
    assert isinstance(first, AttemptAborted)
    assert isinstance(second, AttemptAborted)
    assert memory.list_dir("") != []  # the trash, for the engine to remove


def test_aborted_tells_early():
    boards = LocalBoard.of_world(2)
    memory = MemoryStorage()

    def run(rank):
        attempt = begin(memory, boards, rank, make_plan(7, 2) if rank == 0 else None, QUICK)
        if rank == 1:
            return attempt.settle(unreported=RankFailure.of(refused(), rank=1, unreported=True))
        while attempt.aborted() is None:
            time.sleep(0.001)
        return attempt.settle(unreported=RankFailure.of(SaveFailed("told", step=7, rank=0), rank=0, unreported=True))

    first, second = run_ranks(run, 2)
    assert first == second
    assert first.reason.rank == 1


def test_errors_travel_whole():
    error = StateChangedWhileStaging("model.w was written to", tensor="model.w", step=7)
    reason = RankFailure.of(error, rank=3)
    again = reason.error(step=7)
    assert isinstance(again, StateChangedWhileStaging)
    assert (again.tensor, again.step, str(again)) == ("model.w", 7, str(error))
    foreign = RankFailure.of(MemoryError("none left"), rank=3).error(step=7)
    assert isinstance(foreign, SaveFailed)
    assert "MemoryError: none left" in str(foreign)
    assert "step 7" in str(foreign)
    assert "rank 3" in str(foreign)


def test_what_utf8_or_64_bits_cannot_hold_does_not_keep_an_error_from_travelling():
    """Names of files may be any bytes: the rank that failed could not say so, and the others waited for it."""
    own = CheckpointCorrupt("/data/caf\udce9 is missing", path="/data/caf\udce9", byte_range=(0, 1 << 70))
    foreign = RuntimeError("can't parse /data/\udcff")
    for error in (own, foreign):
        reason = RankFailure.of(error, rank=1)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(reason), type=RankFailure)
        assert again == reason
        assert isinstance(again.error(step=7), SaveFailed)
    assert "caf\\udce9" in str(RankFailure.of(own, rank=1).cause())


def test_the_table_is_the_protocol():
    assert {(edge.source.name, edge.target.name) for edge in TRANSITIONS} == {
        ("BEGIN", "PERSISTING"),
        ("PERSISTING", "REPORTED"),
        ("REPORTED", "COMMIT"),
        ("COMMIT", "PUBLISHED"),
        ("BEGIN", "ABORT"),
        ("PERSISTING", "ABORT"),
        ("REPORTED", "ABORT"),
        ("COMMIT", "ABORT"),
        ("ABORT", "REMOVED"),
    }
    assert all(edge.deadline in Deadlines.__slots__ for edge in TRANSITIONS)
    for state, actor in itertools.product(State, Actor):
        for target in (State.BEGIN, state):
            with pytest.raises(IllegalTransition):
                advance(state, target, actor)
    for state in State:
        with pytest.raises(IllegalTransition):
            advance(State.PUBLISHED, state, Actor.COORDINATOR)
    with pytest.raises(IllegalTransition):
        advance(State.COMMIT, State.ABORT, Actor.FOLLOWER)


def test_reporting_twice_is_a_defect():
    memory, board = MemoryStorage(), LocalBoard()
    attempt = begin(memory, [board], 0, make_plan(7, 1), QUICK)
    line = persist(memory, attempt.directory, attempt.id, 7, 0, 1)
    attempt.report(line)
    with pytest.raises(IllegalTransition):
        attempt.report(line)
