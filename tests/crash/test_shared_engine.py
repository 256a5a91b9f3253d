"""One engine for several sessions: an attempt that hangs or fails in it doesn't affect those of other sessions."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest

from holdfast.engine import supervisor
from holdfast.engine.client import EngineClient
from holdfast.engine.shared import EngineHost
from holdfast.errors import DeadlineExceeded, EngineDied
from holdfast.testing.engine import REPORT_NAME, Sample, persist

MB = 1 << 20
WAIT_S = 30
SLOW = {"io_limit_bytes_per_s": 4 * MB, "nice": 0}
"""The sample takes more than a second then."""
HANGING = """
import os, time
from holdfast.engine import syscalls
def hanging(name, call):
    def wait_and_call(self, fd, *rest):
        place = os.path.realpath(f"/proc/self/fd/{fd}")
        if place.endswith(".report.new") or str(rest[:1]).endswith(".report.new',)"):
            while os.path.exists(f"{os.path.dirname(os.path.dirname(place))}/hang-report-{name}") or os.path.exists(
                f"{os.path.dirname(place)}/hang-report-{name}"
            ):
                time.sleep(0.01)
        above = [place, os.path.dirname(place), os.path.dirname(os.path.dirname(place))]
        while any(os.path.exists(f"{folder}/hang-{name}") for folder in above):
            time.sleep(0.01)
        return call(self, fd, *rest)
    return wait_and_call
for name in ("fsync", "fsync_dir", "rename"):
    setattr(syscalls.SystemCalls, name, hanging(name, getattr(syscalls.SystemCalls, name)))
"""
"""Has an engine hang at a call below a directory for as long as there is a file ``hang-CALL`` in it."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")


@pytest.fixture(autouse=True)
def hanging_calls(monkeypatch):
    start = "from holdfast.engine.process import main\n"
    assert start in supervisor._BOOT
    monkeypatch.setattr(supervisor, "_BOOT", supervisor._BOOT.replace(start, HANGING + start))


@pytest.fixture(scope="module")
def sample():
    sample = Sample([3 * MB, 3 * MB])
    yield sample
    sample.close()


class Session:
    """A session with the sample's image and plan, that persists into directories of its own."""

    def __init__(self, host, rank, place, sample, **options):
        self.client, self.place, self.sample = EngineClient(rank, host=host, **options), place, sample
        self.numbers = sample.register(self.client)

    def persist(self, name, *, verified=True):
        directory = self.place / name
        directory.mkdir(parents=True, exist_ok=True)
        persist(self.client, directory, *self.numbers, name)
        if verified:
            self.client.staging_verified(name)
        return directory

    def wait_written(self, name):
        wait_until(lambda: self.client.progress(name)[0] > 0)


@pytest.fixture
def sessions(sample, tmp_path):
    """Make sessions of one host, ``first`` and ``second``; check that nothing is left of them."""
    before = frozenset(os.listdir("/proc/self/fd")), threading.active_count()
    host = EngineHost()
    made = []

    def make(**options):
        made.append(Session(host, len(made), tmp_path / f"session-{len(made)}", sample, **options))
        return made[-1]

    yield make
    for session in made:
        session.client.close(3.0)
    assert not host.retired
    wait_until(lambda: (frozenset(os.listdir("/proc/self/fd")), threading.active_count()) == before)


def wait_until(condition, timeout_s=WAIT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@contextlib.contextmanager
def hanging_at(call, place):
    place.mkdir(parents=True, exist_ok=True)
    (place / f"hang-{call}").touch()
    yield
    (place / f"hang-{call}").unlink()


@contextlib.contextmanager
def stuck_in_rename(session):
    """Keep the worker of its attempt in the rename of its report during the block."""
    with hanging_at("rename", session.place):
        session.persist("t1")
        wait_until(lambda: (session.place / "t1" / f".{REPORT_NAME}.new").exists())
        time.sleep(0.2)
        yield


def test_sessions_share_one_engine_and_its_death(sessions, tmp_path):
    first, second = sessions(**SLOW), sessions(**SLOW)
    for session in (first, second):
        session.persist("t1")
        session.wait_written("t1")
    assert first.client.pid == second.client.pid
    os.kill(first.client.pid, signal.SIGKILL)
    for rank, session in enumerate((first, second)):
        with pytest.raises(EngineDied, match=f"^(rank|the engine of rank) {rank}.*killed by SIGKILL") as caught:
            session.client.wait_reported("t1", WAIT_S)
        assert (caught.value.rank, caught.value.exitcode) == (rank, -9)
        assert session.client.cancel("t1") is True
    for session in (first, second):
        directory = session.persist("t2")
        session.client.wait_reported("t2", WAIT_S)
        session.sample.check(directory)
    assert first.client.pid == second.client.pid


def test_a_worker_that_hangs_before_its_report_is_given_up_at_once(sessions):
    healthy, stuck = sessions(**SLOW), sessions(nice=0)
    directory = healthy.persist("t1")
    pid = healthy.client.pid
    with hanging_at("fsync", stuck.place):
        stuck.persist("t1")
        wait_until(lambda: stuck.client.progress("t1")[0] == stuck.sample.nbytes)
        assert stuck.client.cancel("t1", timeout_s=5.0) is False
        healthy.client.wait_reported("t1", WAIT_S)
        healthy.sample.check(directory)
    again = stuck.persist("t2")
    stuck.client.wait_reported("t2", WAIT_S)
    stuck.sample.check(again)
    assert stuck.client.pid == pid


def test_a_worker_that_hangs_in_its_report_does_not_end_the_attempt_of_another_session(sessions):
    healthy, stuck = sessions(**SLOW), sessions(nice=0)
    directory = healthy.persist("t1")
    healthy.wait_written("t1")
    pid = healthy.client.pid
    with stuck_in_rename(stuck):
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="may not have stopped"):
                stuck.client.cancel("t1", timeout_s=0.3)
        assert not is_gone(pid), "another attempt is in work there"
        healthy.client.wait_reported("t1", WAIT_S)
        healthy.sample.check(directory)
        wait_until(lambda: is_gone(pid), 5)
        assert stuck.client.cancel("t1") is True, "it is gone, and may have left its report"
    assert not (stuck.place / "t1" / REPORT_NAME).exists()
    for session in (healthy, stuck):
        after = session.persist("t2")
        session.client.wait_reported("t2", WAIT_S)
        session.sample.check(after)
    assert healthy.client.pid not in (pid, None)


def test_new_attempts_go_to_a_second_engine(sessions):
    healthy, stuck = sessions(**SLOW), sessions(nice=0)
    healthy.persist("t1")
    with stuck_in_rename(stuck):
        first = healthy.client.pid
        with pytest.raises(DeadlineExceeded):
            stuck.client.cancel("t1", timeout_s=0.2)
    third = sessions(nice=0)
    directory = third.persist("t1")
    third.client.wait_reported("t1", WAIT_S)
    third.sample.check(directory)
    assert third.client.pid != first
    assert not is_gone(first), "the first attempt is in work there still"
    healthy.client.wait_reported("t1", WAIT_S)
    wait_until(lambda: is_gone(first))
    third.client.close()


def test_a_stuck_engine_with_nothing_else_in_it_is_killed_at_once(sessions):
    idle, stuck = sessions(), sessions(nice=0)
    idle.client.wait_ready()
    with stuck_in_rename(stuck):
        pid = stuck.client.pid
        assert stuck.client.cancel("t1", timeout_s=0.3) is True
        assert is_gone(pid)
    directory = idle.persist("t1")
    idle.client.wait_reported("t1", WAIT_S)
    idle.sample.check(directory)


def test_silence_of_the_control_thread_still_ends_it_for_all(sessions, sample, tmp_path):
    host = EngineHost(silence_s_max=1.0)
    both = [Session(host, rank, tmp_path / f"silent-{rank}", sample, **SLOW) for rank in range(2)]
    for session in both:
        session.persist("t1")
        session.wait_written("t1")
    os.kill(both[0].client.pid, signal.SIGSTOP)
    for session in both:
        with pytest.raises(EngineDied, match="stopped answering for 1"):
            session.client.wait_reported("t1", WAIT_S)
        session.client.close()


def test_closing_a_session_leaves_the_attempts_of_others_alone(sessions):
    first, second, third = sessions(**SLOW), sessions(**SLOW), sessions(**SLOW)
    kept = first.persist("t1")
    dropped = second.persist("t1", verified=False)
    finished = third.persist("t1")
    first.wait_written("t1")
    pid = first.client.pid
    began = time.monotonic()
    assert second.client.close(WAIT_S)
    assert time.monotonic() - began < 1.0
    assert third.client.close(WAIT_S)
    third.sample.check(finished)
    assert not (dropped / REPORT_NAME).exists()
    with pytest.raises(EngineDied, match="cancelled"):
        second.client.wait_reported("t1", WAIT_S)
    first.client.wait_reported("t1", WAIT_S)
    first.sample.check(kept)
    assert first.client.pid == pid
    first.client.close()
    assert is_gone(pid)


def test_closing_a_session_that_hangs_is_bounded_and_fails_what_waits_for_it(sessions):
    healthy, stuck = sessions(**SLOW), sessions(nice=0)
    directory = healthy.persist("t1")
    with stuck_in_rename(stuck):
        began = time.monotonic()
        assert stuck.client.close(0.3)
        assert time.monotonic() - began < 2.0
        with pytest.raises(EngineDied, match="given up"):
            stuck.client.wait_reported("t1", WAIT_S)
        healthy.client.wait_reported("t1", WAIT_S)
    healthy.sample.check(directory)
