"""Races between a cancel, the trainer's verification and a slow file system; and other ends of an attempt."""

import errno
import os
import threading
import time

import pytest

from holdfast.engine import messages
from holdfast.engine.checksums import compile_plan
from holdfast.engine.executor import Precedence, Progress, WriteOptions
from holdfast.engine.syscalls import SystemCalls
from holdfast.engine.write_job import WriteJob, WriteJobInputs
from holdfast.storage.leases import observe
from holdfast.testing.engine import LEASE_NAME, REPORT_NAME, Sample


class Gated(SystemCalls):
    """Blocks one kind of call until it is released."""

    def __init__(self, call):
        self.call = call
        self.reached = threading.Event()
        self.open = threading.Event()

    def _gate(self, call):
        if call == self.call:
            self.reached.set()
            assert self.open.wait(10)

    def pwrite(self, fd, data, offset):
        self._gate("pwrite")
        return super().pwrite(fd, data, offset)

    def rename(self, dir_fd, source, target):
        self._gate("rename")
        super().rename(dir_fd, source, target)


class Bench:
    """One attempt, and the messages it posts."""

    def __init__(self, tmp_path, sample, calls):
        self.path = tmp_path
        self.said = []
        self.news = threading.Condition()
        self.precedence = Precedence()
        persist = messages.Persist("t1", 1, 1, 7, 0, 1, REPORT_NAME, LEASE_NAME)
        job = WriteJobInputs(
            persist,
            os.open(tmp_path, os.O_RDONLY),
            sample.view,
            lambda: compile_plan(sample.plan),
            b"an index",
            WriteOptions(),
            precedence=self.precedence,
        )
        self.attempt = WriteJob(job, self._post, calls)
        self.attempt.start()

    def _post(self, message):
        with self.news:
            self.said.append(message)
            self.news.notify_all()

    def wait(self, kind):
        with self.news:
            assert self.news.wait_for(lambda: any(isinstance(item, kind) for item in self.said), 10), self.said
            return next(item for item in self.said if isinstance(item, kind))

    def wait_gone(self):
        for _ in range(500):
            if not any(thread.name.startswith("holdfast") for thread in threading.enumerate()):
                return
            time.sleep(0.01)
        raise AssertionError(threading.enumerate())


@pytest.fixture(scope="module")
def sample():
    sample = Sample([1 << 20, 8192])
    yield sample
    sample.close()


@pytest.fixture
def start(tmp_path, sample, descriptors):
    fds = descriptors()
    benches = []

    def begin(calls=None):
        benches.append(Bench(tmp_path, sample, calls or SystemCalls()))
        return benches[-1]

    yield begin
    for bench in benches:
        bench.attempt.cancel()
        bench.wait_gone()
    assert not descriptors() - fds


def test_less_urgent_attempts_pause_for_its_report_and_not_while_it_waits_for_the_word(start):
    bench = start(Gated("rename"))
    others, ended = Progress(), threading.Event()
    pause = bench.precedence.pauser(others, WriteOptions(nice=19))
    bench.wait(messages.Persisted)
    pause()  # returns at once
    bench.attempt.verify()
    assert bench.attempt._calls.reached.wait(10)
    waiting = threading.Thread(target=lambda: (pause(), ended.set()), daemon=True)
    waiting.start()
    assert not ended.wait(0.2)
    bench.attempt._calls.open.set()
    assert ended.wait(10)
    bench.wait(messages.Reported)


def test_it_reports_after_the_word_and_not_before(start, sample, tmp_path):
    bench = start()
    persisted = bench.wait(messages.Persisted)
    assert persisted.nbytes == sample.nbytes
    sample.check_files(tmp_path)
    state = observe(str(tmp_path), LEASE_NAME)
    assert state.flock_free is False
    assert state.record.pid == os.getpid()
    assert not bench.attempt.ended
    assert not (tmp_path / REPORT_NAME).exists()
    bench.attempt.verify()
    reported = bench.wait(messages.Reported)
    report = sample.check(tmp_path)
    assert (report.attempt, report.step, report.rank, report.world) == ("t1", 7, 0, 1)
    assert reported.size == (tmp_path / REPORT_NAME).stat().st_size
    assert sorted(os.listdir(tmp_path)) == ["__0_0.distcp", "__0_1.distcp", REPORT_NAME]
    assert bench.attempt.ended


def test_after_a_cancel_it_makes_no_file(start, monkeypatch):
    """What it wrote is removed from then on."""
    bench = start()
    bench.wait(messages.Persisted)
    made = []
    monkeypatch.setattr(bench.attempt._calls, "create", lambda *args, **_named: made.append(args), raising=True)
    assert bench.attempt.cancel()
    bench.wait_gone()
    assert made == []


def test_verification_may_come_early(start):
    bench = start()
    bench.attempt.verify()
    bench.wait(messages.Reported)
    assert [type(item) for item in bench.said] == [messages.Persisted, messages.Reported]


def test_the_lease_beats(start, tmp_path):
    bench = start()
    bench.wait(messages.Persisted)
    first = observe(str(tmp_path), LEASE_NAME)
    time.sleep(3 * messages.BEAT_S)
    assert observe(str(tmp_path), LEASE_NAME).record.counter > first.record.counter


def test_a_cancel_while_a_write_hangs_is_settled_at_once(start, tmp_path):
    calls = Gated("pwrite")
    bench = start(calls)
    assert calls.reached.wait(10)
    started = time.monotonic()
    assert bench.attempt.cancel() is True
    assert time.monotonic() - started < 1
    bench.attempt.verify()
    calls.open.set()
    bench.wait_gone()
    assert not (tmp_path / REPORT_NAME).exists()
    assert bench.said == []  # the control thread answers


def test_a_cancel_before_verification_leaves_no_report(start, tmp_path):
    bench = start()
    bench.wait(messages.Persisted)
    assert bench.attempt.cancel() is True
    bench.wait_gone()
    assert REPORT_NAME not in os.listdir(tmp_path)
    assert LEASE_NAME not in os.listdir(tmp_path)


def test_a_cancel_while_the_report_is_put_in_place_removes_it(start, tmp_path):
    calls = Gated("rename")
    bench = start(calls)
    bench.attempt.verify()
    assert calls.reached.wait(10)
    assert bench.attempt.cancel() is False
    assert messages.Cancelled("t1") not in bench.said
    calls.open.set()
    bench.wait(messages.Cancelled)
    assert not (tmp_path / REPORT_NAME).exists()
    assert not any(isinstance(item, messages.Reported) for item in bench.said)


def test_a_report_that_cannot_be_removed_is_reported_as_durable(start, tmp_path):
    class Sticky(Gated):
        def unlink(self, dir_fd, name):
            raise OSError(errno.EIO, "no")

    calls = Sticky("rename")
    bench = start(calls)
    bench.attempt.verify()
    assert calls.reached.wait(10)
    assert bench.attempt.cancel() is False
    calls.open.set()
    bench.wait(messages.Cancelled)
    assert [type(item) for item in bench.said] == [messages.Persisted, messages.Reported, messages.Cancelled]
    assert (tmp_path / REPORT_NAME).exists()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_report_that_is_not_durable_is_removed_or_reported_as_left(start, tmp_path, failures):
    """Another rank's sync may have made it durable: only a sync of its removal makes that certain."""

    class Unsure(SystemCalls):
        to_fail = 0

        def rename(self, dir_fd, source, target):
            super().rename(dir_fd, source, target)
            self.to_fail = failures

        def fsync_dir(self, fd):
            if self.to_fail:
                self.to_fail -= 1
                raise OSError(errno.EIO, "gone")
            super().fsync_dir(fd)

    bench = start(Unsure())
    bench.attempt.verify()
    failed = bench.wait(messages.AttemptFailed)
    assert (failed.errno, failed.report_left) == (errno.EIO, failures == 2)
    assert not (tmp_path / REPORT_NAME).exists()


def test_a_failure_before_the_report_has_its_name_leaves_none(start):
    class Full(SystemCalls):
        def create(self, dir_fd, name, *, direct):
            if name.startswith(f".{REPORT_NAME}"):
                raise OSError(errno.ENOSPC, "full")
            return super().create(dir_fd, name, direct=direct)

    bench = start(Full())
    bench.attempt.verify()
    assert bench.wait(messages.AttemptFailed).report_left is False


def test_a_directory_that_can_not_be_written_is_a_failure(start, tmp_path):
    (tmp_path / f".{LEASE_NAME}.new").write_bytes(b"")
    bench = start()
    failed = bench.wait(messages.AttemptFailed)
    assert failed.errno == errno.EEXIST
    assert str(tmp_path) in failed.path


def test_an_internal_error_is_a_failure_too(start):
    class Broken(SystemCalls):
        def pwrite(self, fd, data, offset):
            raise ZeroDivisionError("a bug")

    bench = start(Broken())
    failed = bench.wait(messages.AttemptFailed)
    assert failed.errno is None
    assert "ZeroDivisionError: a bug" in failed.detail
