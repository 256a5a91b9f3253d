"""Which executions of one process pause for which others, and for how long."""

import os
import threading
import time

import pytest

from holdfast.engine import executor
from holdfast.engine.checksums import compile_plan
from holdfast.engine.executor import Precedence, Progress, Stopped, WriteOptions, write_files
from holdfast.engine.syscalls import SystemCalls
from holdfast.testing.engine import Sample

CALL_S = 0.02
FILES = 20


class Slow(SystemCalls):
    """Writes slowly and records when each write began; blocks in one while ``held``."""

    def __init__(self):
        self.begun = []
        self.go_on = threading.Event()
        self.go_on.set()

    def pwrite(self, fd, data, offset):
        self.begun.append(time.monotonic())
        time.sleep(CALL_S)
        assert self.go_on.wait(20)
        return super().pwrite(fd, data, offset)


class Execution:
    """A `write_files` on a thread of its own."""

    def __init__(self, place, precedence, sample, *, before=lambda: None, **options):
        place.mkdir()
        self.calls, self.progress, self.error = Slow(), Progress(), None
        self._fd = os.open(place, os.O_RDONLY)
        self._work = (sample.view, compile_plan(sample.plan), WriteOptions(writers=1, **options))
        self._precedence, self._before = precedence, before
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        self._before()
        try:
            write_files(self._fd, *self._work, progress=self.progress, precedence=self._precedence, calls=self.calls)
        except Stopped as error:
            self.error = error

    def wait_begun(self, count):
        deadline = time.monotonic() + 20
        while len(self.calls.begun) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def join(self):
        self._thread.join(20)
        assert not self._thread.is_alive()
        os.close(self._fd)


@pytest.fixture(scope="module")
def sample():
    sample = Sample([4096] * FILES, tensor_bytes=1000)
    yield sample
    sample.close()


@pytest.fixture
def start(sample, tmp_path):
    precedence = Precedence()
    return lambda name, **options: Execution(tmp_path / name, precedence, sample, **options)


def test_a_less_urgent_execution_pauses_while_a_more_urgent_one_writes(start, sample, tmp_path):
    low = start("low", nice=19)
    low.wait_begun(2)
    high = start("high", nice=10)
    high.wait_begun(1)
    began = time.monotonic() + 2 * CALL_S  # what was begun before may end
    high.join()
    ended = time.monotonic()
    assert len(high.calls.begun) >= FILES
    assert not [at for at in low.calls.begun if began < at < high.calls.begun[-1]]
    low.join()
    assert low.calls.begun[-1] > high.calls.begun[-1]
    assert low.calls.begun[-1] < ended + FILES * CALL_S * 10
    for name in ("low", "high"):
        sample.check_files(str(tmp_path / name))


@pytest.mark.parametrize("call", ["create", "fsync_dir"])
def test_a_less_urgent_execution_pauses_before_the_first_byte_and_after_the_last(start, monkeypatch, call):
    """Files are made and the directory is fsynced beside its writes, else: a disk is slow at both then."""
    during = []
    original = getattr(SystemCalls, call)

    def slowly(calls, *args, **options):
        if not during and threading.current_thread() is high_thread[0]:
            during.append(time.monotonic())
            time.sleep(10 * CALL_S)
            during.append(time.monotonic())
        return original(calls, *args, **options)

    low = start("low", nice=19)
    low.wait_begun(2)
    monkeypatch.setattr(SystemCalls, call, slowly)
    high_thread = [None]
    high = start("high", nice=10, before=lambda: high_thread.__setitem__(0, threading.current_thread()))
    high.join()
    began, ended = during
    assert not [at for at in low.calls.begun if began + 2 * CALL_S < at < ended]
    low.join()


@pytest.mark.parametrize("options", [{"nice": 19}, {"nice": 10, "io_limit_bytes_per_s": 400 << 10}])
def test_no_pause_for_equal_urgency_or_for_a_byte_budget(start, options):
    other = start("other", **options)
    low = start("low", nice=19)
    low.wait_begun(5)
    assert len(other.calls.begun) < FILES
    low.join()
    other.join()


def test_no_pause_for_one_whose_storage_hangs(start, monkeypatch):
    monkeypatch.setattr(executor, "_STALLED_S", 0.2)
    high = start("high", nice=10)
    high.wait_begun(3)
    high.calls.go_on.clear()
    low = start("low", nice=19)
    low.join()
    assert len(high.calls.begun) < FILES
    high.calls.go_on.set()
    high.join()


def test_a_pause_is_bounded(start, monkeypatch):
    monkeypatch.setattr(executor, "PAUSE_S_MAX", 0.05)
    high, low = start("high", nice=10), start("low", nice=19)
    low.wait_begun(3)
    assert len(high.calls.begun) < FILES
    high.join()
    low.join()


def test_a_paused_execution_can_be_stopped(start):
    high = start("high", nice=10)
    high.wait_begun(1)
    low = start("low", nice=19)
    low.progress.stop()
    low.join()
    assert isinstance(low.error, Stopped)
    assert len(high.calls.begun) < FILES
    high.join()
