"""Engines and trainers that die, hang and meet full disks: each a clear error within its deadline, nothing left."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from holdfast.engine.client import EngineClient
from holdfast.engine.supervisor import Process, launch
from holdfast.errors import DeadlineExceeded, EngineDied, StorageError
from holdfast.storage.leases import observe
from holdfast.testing.engine import LEASE_NAME, REPORT_NAME, Sample, persist

MB = 1 << 20
WAIT_S = 30
SLOW = {"io_limit_bytes_per_s": 4 * MB, "nice": 0}


@pytest.fixture(scope="module")
def sample():
    sample = Sample([4 * MB, 4 * MB])
    yield sample
    sample.close()


@pytest.fixture
def make_client():
    clients = []

    def make(**options):
        clients.append(EngineClient(5, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def wait_written(client, attempt="t1"):
    deadline = time.monotonic() + WAIT_S
    while client.progress(attempt)[0] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pid, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there after {timeout_s} s"
        time.sleep(0.02)


def assert_lease_is_free(directory):
    """Or gone, within a while: a thread of the dead engine may still be returning from the disk."""
    deadline = time.monotonic() + 2
    while (lease := observe(str(directory), LEASE_NAME)) is not None and not lease.flock_free:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_next_save(client, sample, directory, image, plan):
    directory.mkdir()
    persist(client, directory, image, plan, "next")
    client.staging_verified("next")
    client.wait_reported("next", WAIT_S)
    sample.check(directory)


def test_a_killed_engine_is_an_error_and_the_next_save_works(make_client, sample, tmp_path):
    client = make_client(**SLOW)
    image, plan = sample.register(client)
    persist(client, tmp_path, image, plan)
    wait_written(client)
    pid = client.pid
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDied, match=r"rank 5 .*killed by SIGKILL.*next save starts a new one") as caught:
        client.wait_persisted("t1", WAIT_S)
    assert time.monotonic() - started < 3
    assert (caught.value.rank, caught.value.exitcode) == (5, -9)
    with pytest.raises(EngineDied):
        client.staging_verified("t1")
    client.cancel("t1")
    assert_lease_is_free(tmp_path)
    assert not (tmp_path / REPORT_NAME).exists()
    check_next_save(client, sample, tmp_path / "next", image, plan)
    assert client.pid != pid


def test_an_idle_engine_that_was_killed_is_replaced(make_client, sample, tmp_path):
    client = make_client()
    image, plan = sample.register(client)
    client.wait_ready(WAIT_S)
    os.kill(client.pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while client.pid is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    check_next_save(client, sample, tmp_path / "next", image, plan)


def test_restart_keeps_images_and_plans(make_client, sample, tmp_path):
    client = make_client()
    image, plan = sample.register(client)
    client.wait_ready(WAIT_S)
    pid = client.pid
    client.restart()
    assert client.pid != pid
    assert is_gone(pid)
    check_next_save(client, sample, tmp_path / "next", image, plan)


def test_a_stopped_engine_is_killed_after_its_silence(make_client, sample, tmp_path):
    client = make_client(silence_s_max=1.0, **SLOW)
    image, plan = sample.register(client)
    persist(client, tmp_path, image, plan)
    wait_written(client)
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(EngineDied, match="stopped answering for 1"):
        client.wait_persisted("t1", WAIT_S)
    assert time.monotonic() - started < 5
    assert is_gone(pid)
    check_next_save(client, sample, tmp_path / "next", image, plan)


def test_a_trainer_that_was_paused_does_not_kill_its_engine(start_trainer, tmp_path):
    """Beats that arrived meanwhile are read before silence is checked."""
    then = "client.staging_verified('t1'); client.wait_reported('t1', 30); print('ok')"
    trainer, _ = start_trainer(then, "silence_s_max=0.6, io_limit_bytes_per_s=4 << 20")
    os.kill(trainer.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(trainer.pid, signal.SIGCONT)
    assert trainer.communicate(timeout=WAIT_S)[0].strip() == "ok"
    assert trainer.returncode == 0


def test_an_unanswered_cancel_ends_the_engine(make_client, sample, tmp_path):
    client = make_client(**SLOW)
    image, plan = sample.register(client)
    persist(client, tmp_path, image, plan)
    wait_written(client)
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    client.cancel("t1", timeout_s=0.3)
    assert is_gone(pid)
    assert not (tmp_path / REPORT_NAME).exists()


def test_an_engine_that_cannot_be_killed_is_not_reported_as_stopped(make_client, sample, tmp_path, monkeypatch):
    """It is stuck in a system call, as on a dead file server: perhaps in the rename of its report."""
    client = make_client(silence_s_max=0.5, **SLOW)
    image, plan = sample.register(client)
    persist(client, tmp_path, image, plan)
    wait_written(client)
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(Process, "kill", lambda _process: None)
    monkeypatch.setattr("holdfast.engine.supervisor.REAP_S", 0.1)
    with pytest.raises(EngineDied, match="still stuck in a system call"):
        client.wait_reported("t1", WAIT_S)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="may not have stopped"):
            client.cancel("t1", timeout_s=0.3)
    os.kill(pid, signal.SIGKILL)
    client._link._process._child.wait(WAIT_S)


def test_closing_a_stopped_engine_is_bounded(make_client):
    client = make_client()
    client.wait_ready(WAIT_S)
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    client.close(0.3)
    assert time.monotonic() - started < 5
    assert is_gone(pid)


@pytest.mark.parametrize("executable", ["/nonexistent/python", "/bin/false", ""])
def test_an_engine_that_can_not_start_is_an_error(make_client, monkeypatch, executable):
    client = make_client()
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(EngineDied, match="rank 5"):
        client.wait_ready(WAIT_S)


def test_the_engines_stderr_is_in_the_error(make_client, monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho the library is missing >&2\nexit 3\n")
    fake.chmod(0o755)
    client = make_client()
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(EngineDied, match=r"exit status 3; its last words: the library is missing") as caught:
        client.wait_ready(WAIT_S)
    assert caught.value.exitcode == 3


def test_a_file_size_limit_is_an_error_with_its_file(make_client, sample, tmp_path):
    client = make_client()
    image, plan = sample.register(client)
    client.wait_ready(WAIT_S)
    before = resource.prlimit(client.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (MB, before[1]))
    persist(client, tmp_path, image, plan)
    with pytest.raises(StorageError, match=r"rank 5, attempt t1: .*File too large") as caught:
        client.wait_reported("t1", WAIT_S)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.path == str(tmp_path / sample.rows[0].name)
    resource.prlimit(client.pid, resource.RLIMIT_FSIZE, before)
    check_next_save(client, sample, tmp_path / "next", image, plan)


def test_a_directory_that_was_removed_is_an_error(make_client, sample, tmp_path):
    client = make_client()
    image, plan = sample.register(client)
    (tmp_path / "gone").mkdir()
    dir_fd = os.open(tmp_path / "gone", os.O_RDONLY)
    (tmp_path / "gone").rmdir()
    names = {"report_name": REPORT_NAME, "lease_name": LEASE_NAME}
    client.persist(dir_fd, attempt="t1", plan=plan, image=image, step=None, world=6, **names)
    os.close(dir_fd)
    with pytest.raises(StorageError) as caught:
        client.wait_persisted("t1", WAIT_S)
    assert caught.value.errno == errno.ENOENT


@pytest.fixture
def mounted(tmp_path):
    """A small tmpfs; needs root."""
    target = tmp_path / "mount"
    target.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", target], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("can't mount a file system here")
    yield target
    subprocess.run(["umount", "-l", target], check=True)


def test_a_full_disk_is_an_error_with_its_file(make_client, sample, mounted, tmp_path):
    client = make_client()
    image, plan = sample.register(client)
    persist(client, mounted, image, plan)
    with pytest.raises(StorageError) as caught:
        client.wait_persisted("t1", WAIT_S)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.path == str(mounted / sample.rows[1].name)
    check_next_save(client, sample, tmp_path / "next", image, plan)


def test_a_read_only_disk_is_an_error(make_client, sample, mounted):
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    client = make_client()
    image, plan = sample.register(client)
    persist(client, mounted, image, plan)
    with pytest.raises(StorageError) as caught:
        client.wait_persisted("t1", WAIT_S)
    assert caught.value.errno == errno.EROFS


TRAINER = """
import os, subprocess, sys, time
from holdfast.engine.client import EngineClient
from holdfast.engine.supervisor import launch
from holdfast.testing.engine import LEASE_NAME, REPORT_NAME, Sample, persist
sample = Sample([4 << 20, 4 << 20])
client = EngineClient(0, {options})
image, plan = sample.register(client)
dir_fd = os.open(sys.argv[1], os.O_RDONLY)
client.persist(dir_fd, attempt="t1", plan=plan, image=image, step=1, world=1,
               report_name=REPORT_NAME, lease_name=LEASE_NAME)
def wait_killed():
    print("killable", flush=True)
    time.sleep(60)
while client.progress("t1")[0] == 0:
    time.sleep(0.01)
print(client.pid, flush=True)
"""


@pytest.fixture
def start_trainer(tmp_path):
    """Start a trainer that has its engine persist into ``tmp_path``, then runs ``then``; return it and the pid."""
    trainers = []

    def start(then, options):
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER.replace("{options}", options) + then, tmp_path],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        trainers.append(trainer)
        return trainer, int(trainer.stdout.readline())

    yield start
    for trainer in trainers:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def kill_trainer(trainer):
    assert trainer.stdout.readline() == "killable\n"
    trainer.kill()
    trainer.wait()


def test_an_unverified_attempt_is_dropped_with_the_trainer(start_trainer, tmp_path):
    trainer, engine = start_trainer("wait_killed()", "io_limit_bytes_per_s=2 << 20")
    kill_trainer(trainer)
    wait_gone(engine, 2)
    assert not (tmp_path / REPORT_NAME).exists()
    assert_lease_is_free(tmp_path)


def test_a_verified_attempt_is_finished_without_the_trainer(start_trainer, sample, tmp_path):
    trainer, engine = start_trainer("client.staging_verified('t1'); wait_killed()", "io_limit_bytes_per_s=8 << 20")
    kill_trainer(trainer)
    assert not (tmp_path / REPORT_NAME).exists()  # it is still writing
    assert observe(str(tmp_path), LEASE_NAME).flock_free is False
    wait_gone(engine, 10)
    sample.check(tmp_path)
    assert observe(str(tmp_path), LEASE_NAME) is None


def test_finishing_without_the_trainer_is_bounded(start_trainer, tmp_path):
    then = "client.staging_verified('t1'); wait_killed()"
    trainer, engine = start_trainer(then, "io_limit_bytes_per_s=1 << 20, orphan_grace_s=0.7")
    kill_trainer(trainer)
    assert not is_gone(engine)
    wait_gone(engine, 3)
    assert not (tmp_path / REPORT_NAME).exists()


def test_a_trainer_that_died_before_its_engine_was_ready_leaves_none():
    process = launch(5)
    process.sock.close()
    wait_gone(process.pid, 10)
    process.reap(lambda: "left", linger_s=1)


def test_a_socket_held_open_elsewhere_does_not_hide_the_trainers_death(start_trainer):
    holder = "subprocess.Popen(['sleep', '6'], stdout=-3, pass_fds=[client._link._process.sock.fileno()])"
    trainer, engine = start_trainer(f"{holder}; wait_killed()", "io_limit_bytes_per_s=2 << 20")
    kill_trainer(trainer)
    wait_gone(engine, 3)
