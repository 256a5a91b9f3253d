"""One writer per root, whoever dies."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading

import pytest

from holdfast.errors import RootLocked, StorageError
from holdfast.storage.locks import RootLock, sweep_left

_HOLD = """
import sys, time
from holdfast.storage.locks import RootLock
lock = getattr(RootLock, sys.argv[1])(sys.argv[2])
print("held", flush=True)
time.sleep(60)
"""


def hold_elsewhere(how, path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", _HOLD, how, str(path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_lock_file_that_is_taken_away_again_and_again_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.storage.locks._still_there", lambda _fd, _path: False)
    monkeypatch.setattr("holdfast.storage.locks._CHANGING_HANDS_S", 0.1)
    with pytest.raises(RootLocked, match="removed repeatedly"):
        RootLock.acquire_beside(str(tmp_path / "ckpt"))


@pytest.mark.parametrize("how", ["acquire", "acquire_beside"])
def test_a_second_writer_learns_who_holds_it(tmp_path, how):
    path = tmp_path if how == "acquire" else tmp_path / "ckpt"
    with getattr(RootLock, how)(str(path)), pytest.raises(RootLocked) as caught:
        getattr(RootLock, how)(str(path))
    assert caught.value.path == str(path)
    assert f"process {os.getpid()} on host {os.uname().nodename} since" in caught.value.by
    assert caught.value.by in str(caught.value)
    getattr(RootLock, how)(str(path)).release()


@pytest.mark.parametrize("how", ["acquire", "acquire_beside"])
def test_a_killed_holder_is_no_obstacle(tmp_path, how):
    path = tmp_path if how == "acquire" else tmp_path / "ckpt"
    process = hold_elsewhere(how, path)
    with pytest.raises(RootLocked, match=f"process {process.pid} "):
        getattr(RootLock, how)(str(path))
    process.kill()
    process.wait()
    process.stdout.close()
    getattr(RootLock, how)(str(path)).release()


def test_what_is_left_on_disk(tmp_path):
    lock = RootLock.acquire(str(tmp_path))
    assert os.listdir(tmp_path) == [".holdfast"]
    lock.release()
    lock.release()
    assert os.listdir(tmp_path / ".holdfast") == ["lock"]
    lock = RootLock.acquire_beside(str(tmp_path / "ckpt"))
    assert ".ckpt.lock" in os.listdir(tmp_path)
    lock.release()
    assert ".ckpt.lock" not in os.listdir(tmp_path)


def test_waiting_for_a_lock_is_bounded_and_worth_it(tmp_path):
    first = RootLock.acquire(str(tmp_path))
    with pytest.raises(RootLocked):
        RootLock.acquire(str(tmp_path), timeout_s=0.1)
    timer = threading.Timer(0.1, first.release)
    timer.start()
    RootLock.acquire(str(tmp_path), timeout_s=10).release()
    timer.join()


def test_a_forked_child_does_not_keep_it(tmp_path):
    lock = RootLock.acquire(str(tmp_path))
    fd = lock._fd
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(fd)
            os.write(write, b"open")
        except OSError:
            os.write(write, b"closed")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 16) == b"closed"
    os.close(read)
    os.close(write)
    with pytest.raises(RootLocked):
        RootLock.acquire(str(tmp_path))  # and the parent still has it
    lock.release()


def test_descriptors_are_closed_on_exec_and_on_failure(tmp_path, descriptors):
    before = descriptors()
    lock = RootLock.acquire(str(tmp_path))
    assert fcntl.fcntl(lock._fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(RootLocked):
        RootLock.acquire(str(tmp_path))
    lock.release()
    assert not descriptors() - before


def test_a_lock_file_that_was_replaced_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    """The last holder unlinks the file after our open and before our lock."""
    path = str(tmp_path / "ckpt")
    real, raced = fcntl.flock, []

    def flock(fd, operation):
        if not raced:
            raced.append(fd)
            os.unlink(tmp_path / ".ckpt.lock")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RootLock.acquire_beside(path)
    monkeypatch.undo()
    assert raced
    with pytest.raises(RootLocked):
        RootLock.acquire_beside(path)
    lock.release()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_root_that_was_replaced_is_locked_anew(tmp_path, descriptors, replaced):
    """By another directory, or only emptied: whoever comes there next finds no lock, and takes it."""
    root = tmp_path / "root"
    root.mkdir()
    before = descriptors()
    with RootLock.acquire(str(root)) as lock:
        lock.renew()
        shutil.rmtree(root if replaced else root / ".holdfast")
        root.mkdir(exist_ok=True)
        with RootLock.acquire(str(root)), pytest.raises(RootLocked, match=f"process {os.getpid()} "):
            lock.renew()
        lock.renew()
        with pytest.raises(RootLocked):
            RootLock.acquire(str(root))
        shutil.rmtree(root)
        with pytest.raises(StorageError):
            lock.renew()
        root.write_text("a file")
        with pytest.raises(StorageError):
            lock.renew()
    assert not descriptors() - before


def test_what_killed_saves_have_left_is_swept(tmp_path):
    process = hold_elsewhere("acquire_beside", tmp_path / "dead")
    process.kill()
    process.wait()
    process.stdout.close()
    (tmp_path / ".foreign.lock").write_text("")
    (tmp_path / ".other.lock").write_text('{"pid": 1}')
    (tmp_path / ".deep.lock").write_text("[" * 4096)
    (tmp_path / ".dir.lock").mkdir()
    (tmp_path / ".link.lock").symlink_to(tmp_path / ".dead.lock")
    with RootLock.acquire_beside(str(tmp_path / "alive")):
        sweep_left(str(tmp_path))
        assert sorted(os.listdir(tmp_path)) == [
            ".alive.lock",
            ".deep.lock",
            ".dir.lock",
            ".foreign.lock",
            ".link.lock",
            ".other.lock",
        ]
        with pytest.raises(RootLocked):
            RootLock.acquire_beside(str(tmp_path / "alive"))
    sweep_left(str(tmp_path / "nowhere"))


def test_a_root_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StorageError):
        RootLock.acquire(str(tmp_path / "nowhere"))
    with pytest.raises(StorageError):
        RootLock.acquire_beside(str(tmp_path / "nowhere" / "ckpt"))
