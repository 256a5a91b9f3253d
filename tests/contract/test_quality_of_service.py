"""What writing leaves to others: priorities, pace, and turns between the engines of one host. Real processes, all."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

import holdfast
from holdfast.engine import process as io_priority
from holdfast.engine.client import EngineClient
from holdfast.errors import DeadlineExceeded, StorageError
from holdfast.storage.locks import HostSlots, slots_directory
from holdfast.testing.engine import Sample, persist

KB = 1 << 10
WAIT_S = 30
SLOW = 256 * KB
"""Bytes per second: a sample takes about half a second then."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes on Linux")


@pytest.fixture(scope="module")
def sample():
    sample = Sample([160 * KB])
    yield sample
    sample.close()


@pytest.fixture
def slots(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "slots"))
    return slots_directory()


@pytest.fixture
def engines(sample, tmp_path):
    """Makes engines that write the sample at once; all are closed."""
    clients = []

    def start(**options):
        client = EngineClient(len(clients), **options)
        clients.append(client)
        target = tmp_path / f"engine-{client.rank}"
        target.mkdir()
        persist(client, target, *sample.register(client), f"t{client.rank}")
        return client

    yield start
    for client in clients:
        client.close()


def io_priorities(pid):
    """Of each thread, as the kernel has them."""
    number = io_priority._SET[os.uname().machine] + 1  # ioprio_get comes next, everywhere
    system = ctypes.CDLL(None)
    return {
        name: system.syscall(ctypes.c_long(number), ctypes.c_int(1), ctypes.c_int(int(name)))
        for name in os.listdir(f"/proc/{pid}/task")
    }


def nice_levels(pid):
    """Of each thread."""
    levels = {}
    for name in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{name}/stat") as file:
            levels[name] = int(file.read().rpartition(")")[2].split()[16])
    return levels


def priorities(pid):
    """The nice level and the I/O priority of each thread that works on an attempt; the control thread's are its own."""
    levels, found = nice_levels(pid), io_priorities(pid)
    return {name: (levels[name], found[name]) for name in levels.keys() & found.keys() - {str(pid)}}


def children():
    """Processes that this one has started."""
    return [child.pid for child in psutil.Process().children()]


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("io_class", "io_level", "expected"),
    [("best_effort", 6, 2 << 13 | 6), ("best_effort", None, 2 << 13 | 4), ("idle", None, 3 << 13)],
)
def test_every_thread_that_writes_has_the_priorities_and_the_pace_asked_for(
    engines, sample, io_class, io_level, expected
):
    client = engines(nice=7, io_class=io_class, io_level=io_level, io_limit_bytes_per_s=SLOW)
    wait_for(lambda: client.progress("t0")[0] > 0)
    found = priorities(client.pid)
    control = nice_levels(client.pid)[str(client.pid)], io_priorities(client.pid)[str(client.pid)]
    assert client.progress("t0")[0] < sample.nbytes, "it writes still"
    assert len(found) >= 3, "attempt, lease, writers"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert set(found.values()) == {(max(7, own), expected)}
    assert control[0] == own, "the control thread answers whatever the attempts' priorities are"
    assert control[1] >> 13 in {0, 2}
    persisted = client.wait_persisted("t0", WAIT_S)
    assert persisted.seconds > 0.7 * sample.nbytes / SLOW


def test_by_default_the_kernel_decides(engines):
    client = engines(nice=0, io_limit_bytes_per_s=SLOW)
    wait_for(lambda: client.progress("t0")[0] > 0)
    assert {value >> 13 for value in io_priorities(client.pid).values()} <= {0, 2}, "none, or what follows from nice"
    assert client.waiting_for("t0") == ""


def test_a_machine_without_io_classes_is_written_on_without_and_says_so(monkeypatch):
    monkeypatch.setattr(io_priority, "_SET", {})
    assert "not known" in io_priority.set_io_class("idle", None)
    assert io_priority.set_io_class("none", None) is None


def test_a_third_engine_waits_for_one_of_two_and_has_its_turn_when_one_is_killed(engines, slots):
    first, second = (engines(nice=0, host_writers=2, io_limit_bytes_per_s=32 * KB) for _ in range(2))
    wait_for(lambda: first.progress("t0")[0] and second.progress("t1")[0])
    third = engines(nice=0, host_writers=2)
    wait_for(lambda: third.waiting_for("t2"))
    assert all(f"process {client.pid} on host" in third.waiting_for("t2") for client in (first, second))
    time.sleep(0.3)
    assert third.progress("t2")[0] == 0
    killed = time.monotonic()
    os.kill(second.pid, signal.SIGKILL)
    third.wait_persisted("t2", WAIT_S)
    assert time.monotonic() - killed < 1.0, "nobody looks again only after a while"
    assert first.progress("t0")[0] < first.progress("t0")[1], "it writes still"
    wait_for(lambda: third.waiting_for("t2") == "")


def test_a_wait_for_a_turn_ends_when_the_attempt_is_cancelled_and_takes_none(engines, slots, tmp_path, sample):
    holder = HostSlots(slots, 1).acquire(stopped=lambda: False)
    client = engines(nice=0, host_writers=1)
    wait_for(lambda: client.waiting_for("t0"))
    began = time.monotonic()
    client.cancel("t0")
    assert time.monotonic() - began < 1.0
    holder.release()
    again = tmp_path / "again"
    again.mkdir()
    persist(client, again, *sample.register(client), "t9")
    client.wait_persisted("t9", WAIT_S)
    sample.check_files(again)


def test_a_turn_that_never_comes_is_an_error_at_the_deadline_that_names_who_has_it(slots, tmp_path):
    code = (
        "import sys\nfrom holdfast.storage.locks import HostSlots\n"
        "held = HostSlots(sys.argv[1], 1).acquire(stopped=lambda: False)\nprint('held', flush=True)\ninput()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", code, slots], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        config = holdfast.CheckpointConfig(every=None, host_writers=1, persist_timeout=1.2, on_error="warn")
        with holdfast.CheckpointManager(tmp_path / "run", {"w": torch.ones(8)}, config=config) as manager:
            began = time.monotonic()
            failed = manager.save(1).exception(WAIT_S)
            assert isinstance(failed, holdfast.SaveFailed)
            assert 1.0 < time.monotonic() - began < 10.0
            cause = failed.__cause__
            assert isinstance(cause, DeadlineExceeded)
            assert f"process {holder.pid} on host" in cause.waited_for
            assert "host_writers" in str(failed)
            assert manager.steps() == []
            holder.kill()
            with pytest.warns(UserWarning, match="host_writers"):
                second = manager.save(2)
            second.result(WAIT_S)
            assert manager.steps() == [2]


def test_a_manager_gives_each_delivery_limits_of_its_own(tmp_path, slots):
    export = holdfast.HFExport(
        tmp_path / "hf",
        every=1,
        assets=config_only(tmp_path / "source"),
        nice=12,
        io_class="idle",
        io_limit_bytes_per_s=1 << 20,
        host_writers=2,
    )
    config = holdfast.CheckpointConfig(
        every=1, nice=5, io_class="best_effort", io_level=7, io_limit_bytes_per_s=1 << 20, host_writers=2
    )
    state = {"model": torch.nn.Linear(300, 400)}
    with holdfast.CheckpointManager(tmp_path / "run", state, config=config, exports=[export]) as manager:
        began = time.monotonic()
        handles = manager.step(1)
        seen = set()
        while not all(handle.done() for handle in handles):
            for pid in children():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it, or a thread of it, has ended
                    seen |= set(priorities(pid).values())
            time.sleep(0.02)
        for handle in handles:
            handle.result(WAIT_S)
        assert time.monotonic() - began > 0.3, "half a megabyte each, at a megabyte a second"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {(max(5, own), 2 << 13 | 7), (max(12, own), 3 << 13)} <= seen


def config_only(path):
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


# The slots themselves. -------------------------------------------------------------------------------------------


def test_slots_go_from_hand_to_hand_and_leave_nothing_behind(slots):
    ours = HostSlots(slots, 2)
    first, second = (ours.acquire(stopped=lambda: False) for _ in range(2))
    assert first is not None
    assert second is not None
    got = []
    told = []
    waiting = threading.Thread(
        target=lambda: got.append(ours.acquire(stopped=lambda: False, tell=told.append)), daemon=True
    )
    waiting.start()
    wait_for(lambda: told)
    assert f"process {os.getpid()} on host" in told[0]
    assert not got
    first.release()
    first.release()
    waiting.join(WAIT_S)
    assert got[0] is not None
    assert told[-1] == ""
    second.release()
    got[0].release()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-slot")])
    again = [HostSlots(slots, 2).acquire(stopped=lambda: True) for _ in range(2)]
    assert all(slot is not None for slot in again), "both are free"
    for slot in again:
        slot.release()


def test_a_wait_that_is_stopped_gives_none_and_what_comes_late_goes_back(slots):
    ours = HostSlots(slots, 1)
    held = ours.acquire(stopped=lambda: False)
    stop = threading.Event()
    got = []
    waiting = threading.Thread(target=lambda: got.append(ours.acquire(stopped=stop.is_set)), daemon=True)
    waiting.start()
    wait_for(lambda: ours._sleeping)
    stop.set()
    ours.wake()
    waiting.join(WAIT_S)
    assert got == [None]
    held.release()
    wait_for(lambda: not ours._sleeping)
    other = HostSlots(slots, 1).acquire(stopped=lambda: False)
    assert other is not None
    other.release()


def test_a_slot_file_that_is_taken_away_is_made_anew(slots):
    held = HostSlots(slots, 1).acquire(stopped=lambda: False)
    os.unlink(os.path.join(slots, "writer-0"))
    other = HostSlots(slots, 1).acquire(stopped=lambda: False)
    assert os.path.exists(os.path.join(slots, "writer-0"))
    held.release()
    other.release()


def test_slots_that_cannot_be_are_an_error_that_says_where(tmp_path, monkeypatch, engines):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"host_writers.*HOLDFAST_RUNTIME_DIR"):
        EngineClient(0, host_writers=1)
    config = holdfast.CheckpointConfig(host_writers=1)
    with pytest.raises(StorageError, match="file"):
        holdfast.CheckpointManager(tmp_path / "run", {"w": torch.ones(8)}, config=config)
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "gone"))
    client = EngineClient(0, host_writers=1)
    (tmp_path / "gone").rmdir()
    sample = Sample([4 * KB])
    persist(client, tmp_path, *sample.register(client))
    with pytest.raises(StorageError, match=r"can't take one of the 1 writer slots .*gone"):
        client.wait_persisted("t1", WAIT_S)
    client.close()
    sample.close()
