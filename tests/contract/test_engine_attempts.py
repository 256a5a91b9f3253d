"""Several attempts in one engine process, by the messages themselves: what one asks for never applies to another."""

import contextlib
import os
import select
import signal
import sys
import time

import pytest

from holdfast.engine import messages
from holdfast.engine.supervisor import launch
from holdfast.engine.wire import Inbox, ToTrainer, send
from holdfast.testing.engine import LEASE_NAME, REPORT_NAME, Sample

KB = 1 << 10
WAIT_S = 30
SLOW = 256 * KB
"""Bytes per second: the sample takes more than a second then."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")


class RawEngine:
    """An engine process and what it has said."""

    def __init__(self, sample):
        self.process = launch(0)
        self.inbox = Inbox(self.process.sock, ToTrainer)
        self.heard = []
        self.tell(messages.AddImage(1, sample.nbytes), sample.fd)
        self.tell(sample.plan)

    def tell(self, message, *fds):
        send(self.process.sock, message, fds, timeout_s=WAIT_S)

    def persist(self, directory, session, attempt="t1", **limits):
        directory.mkdir()
        with opened(directory) as fd:
            wanted = messages.AttemptLimits(**limits)
            names = (REPORT_NAME, LEASE_NAME)
            self.tell(messages.Persist(attempt, 1, 1, 7, session, 6, *names, wanted, session), fd)

    def wait_for(self, *messages_or_kinds):
        """Hear on until each of these was said: a message, or a type of message and a session."""
        deadline = time.monotonic() + WAIT_S
        while not all(any(matches(item, wanted) for item in self.heard) for wanted in messages_or_kinds):
            assert time.monotonic() < deadline, f"not said: {messages_or_kinds}, but {self.heard[-5:]}"
            if select.select([self.process.sock], [], [], 0.1)[0]:
                received = self.inbox.receive()
                assert received is not None, "the engine has ended"
                self.heard += [item.message for item in received]

    def beats(self):
        return [beat for beat in self.heard if isinstance(beat, messages.EngineBeat)]


def matches(message, wanted):
    if isinstance(wanted, tuple):
        return isinstance(message, wanted[0]) and message.session == wanted[1]
    return message == wanted


@contextlib.contextmanager
def opened(directory):
    fd = os.open(directory, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def sample():
    sample = Sample([400 * KB])
    yield sample
    sample.close()


@pytest.fixture
def engine(sample):
    engine = RawEngine(sample)
    yield engine
    engine.process.reap(lambda: "ended", linger_s=0)


def levels_of_threads(pid):
    """The nice level of each thread but the control thread."""
    levels = []
    for task in os.listdir(f"/proc/{pid}/task"):
        if task != str(pid):
            with (
                contextlib.suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/{pid}/task/{task}/stat") as file,
            ):
                levels.append(int(file.read().rpartition(")")[2].split()[16]))
    return sorted(levels)


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def test_an_attempt_at_nice_10_after_one_at_19_runs_at_10(engine, tmp_path):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert own <= 10, "this test starts from a low nice level"
    engine.persist(tmp_path / "low", 1, nice=19, io_limit_bytes_per_s=SLOW)
    wait_until(lambda: levels_of_threads(engine.process.pid).count(19) >= 3)
    engine.persist(tmp_path / "high", 2, nice=10, io_limit_bytes_per_s=SLOW)
    wait_until(lambda: levels_of_threads(engine.process.pid).count(10) >= 3)
    assert os.getpriority(os.PRIO_PROCESS, engine.process.pid) == own


def test_attempts_of_two_sessions_are_written_side_by_side_and_beats_name_both(engine, sample, tmp_path):
    for session in (1, 2):  # ranks of one job have one attempt id
        engine.persist(tmp_path / str(session), session, io_limit_bytes_per_s=SLOW)
    engine.wait_for((messages.Persisted, 1), (messages.Persisted, 2))
    named = [{(beat.session, beat.attempt) for beat in beat.attempts} for beat in engine.beats()]
    assert {(1, "t1"), (2, "t1")} in named
    for session in (1, 2):
        engine.tell(messages.StagingVerified("t1", session))
    engine.wait_for((messages.Reported, 1), (messages.Reported, 2))
    assert [sample.check(tmp_path / str(session)).rank for session in (1, 2)] == [1, 2]


def test_a_cancel_ends_the_attempt_of_its_session_only(engine, sample, tmp_path):
    for session in (1, 2):
        engine.persist(tmp_path / str(session), session, io_limit_bytes_per_s=SLOW)
    engine.tell(messages.Cancel("t1", 1))
    engine.wait_for(messages.Cancelled("t1", session=1), (messages.Persisted, 2))
    engine.tell(messages.StagingVerified("t1", 2))
    engine.wait_for((messages.Reported, 2))
    sample.check(tmp_path / "2")
    assert not (tmp_path / "1" / REPORT_NAME).exists()


def test_a_session_has_one_attempt_at_a_time(engine, tmp_path):
    engine.persist(tmp_path / "a", 1, "t1", io_limit_bytes_per_s=SLOW)
    engine.persist(tmp_path / "b", 1, "t2")
    engine.wait_for((messages.AttemptFailed, 1))
    failed = next(message for message in engine.heard if isinstance(message, messages.AttemptFailed))
    assert (failed.attempt, failed.detail) == ("t2", "attempt t1 is still in progress")


def test_a_long_removal_holds_up_none_on_another_file_system(engine, tmp_path):
    """A tree that takes long stands for one whose file server is gone; devices are as the trainer names them."""
    many = tmp_path / "many"
    many.mkdir()
    for number in range(20_000):
        (many / str(number)).touch()
    (tmp_path / "few").mkdir()
    with opened(tmp_path) as fd:
        engine.tell(messages.Remove("many", 1, device=1), fd)
        engine.tell(messages.Remove("few", 2, device=2), fd)
    engine.wait_for((messages.Removed, 1), (messages.Removed, 2))
    said = [message.session for message in engine.heard if isinstance(message, messages.Removed)]
    assert said == [2, 1]


@pytest.mark.parametrize("how", ["killed", "its trainer ends"])
def test_however_it_ends_each_attempt_ends_by_its_own_rules(engine, sample, tmp_path, how):
    """What is verified is finished within the grace of that attempt; a kill ends all at once."""
    engine.persist(tmp_path / "dropped", 1, io_limit_bytes_per_s=SLOW)
    engine.persist(tmp_path / "kept", 2, io_limit_bytes_per_s=SLOW)
    engine.persist(tmp_path / "late", 3, io_limit_bytes_per_s=64 * KB, orphan_grace_s=0.2)
    for session in (2, 3):
        engine.tell(messages.StagingVerified("t1", session))
    wait_until(lambda: all((tmp_path / name / LEASE_NAME).exists() for name in ("dropped", "kept", "late")))
    began = time.monotonic()
    if how == "killed":
        os.kill(engine.process.pid, signal.SIGKILL)
    else:
        engine.process.sock.shutdown(2)
    wait_until(lambda: not engine.process.running())
    reported = {name for name in ("dropped", "kept", "late") if (tmp_path / name / REPORT_NAME).exists()}
    assert reported == (set() if how == "killed" else {"kept"})
    assert time.monotonic() - began < 5, "nobody waits for what has no grace left"
    if how != "killed":
        sample.check(tmp_path / "kept")
