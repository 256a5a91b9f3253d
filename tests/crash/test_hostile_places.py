"""Disks that are full, memory that runs out, other writers, clocks that jump: real ones, as far as a machine allows.

What needs root (a file system of its own, a memory cgroup) is skipped without it; test_fault_points.py makes the same
errors at every call, on any machine.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import itertools
import os
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_job import build, fill, is_of, settings
from nursery import Nursery
from processes import Log, is_gone

import holdfast
from holdfast.engine.client import EngineClient

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 30.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("hostile_jobs") as found:
        yield found


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


@contextlib.contextmanager
def mounted(kind: str, target: Path, *, size_kib: int) -> Iterator[Path]:
    """A file system of that size; needs root."""
    target.mkdir()
    image = target.with_suffix(".img")
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(target)]
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("there is no mkfs.ext4 here")
        with image.open("wb") as file:
            file.truncate(size_kib * KIB)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], capture_output=True, check=False)
        assert made.returncode == 0, made.stderr
        command = ["mount", "-o", "loop", str(image), str(target)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"can't mount a {kind} here: {done.stderr.decode().strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


def leave_free(ballast: Path, free_kib: int) -> None:
    """Fill the disk except for about ``free_kib``."""
    subprocess.run(["sync", "-f", str(ballast.parent)], check=True)  # what was freed is free once that is durable
    stats = os.statvfs(ballast.parent)
    blocks = max(0, stats.f_bavail - free_kib * KIB // stats.f_frsize)
    # Unbuffered: what a buffer could not write it would try, and fail, to write again when it is closed.
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(blocks):
            file.write(b"\0" * stats.f_frsize)
        os.fsync(file.fileno())


@pytest.mark.filterwarnings("ignore:the save of step")  # on_error="warn" says so
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up_at_various_points(kind: str, tmp_path: Path, show: list[str]) -> None:
    """Each save meets a disk that fills at another place; training goes on, and with space again the next is saved."""
    ended: Counter[str] = Counter()
    with mounted(kind, tmp_path / "disk", size_kib=8 * 1024) as disk:
        state, ballast = build(), disk / "ballast"
        with holdfast.CheckpointManager(disk / "root", state, config=settings()) as manager:
            manager.save(1).result(WAIT_S)
            step = 1
            for free_kib in (0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96):
                manager._saver._engine.wait_removals(WAIT_S)
                leave_free(ballast, free_kib)
                step += 1
                fill(state, step)
                error = manager.save(step).exception(WAIT_S)
                manager.wait_staged()
                if error is not None:
                    assert isinstance(error, holdfast.SaveFailed), error
                    assert error.errno == errno.ENOSPC, error
                    assert str(disk) in str(error)
                    assert step not in manager.steps()
                ended["published" if error is None else "SaveFailed"] += 1
                ballast.unlink()
                step += 1
                fill(state, step)
                assert manager.save(step).result(WAIT_S).verify().ok
        # A start on a full disk that has something to clean up.
        (disk / "root" / ".step-900.0123456789ab.incomplete").mkdir()
        leave_free(ballast, 0)
        again = build()
        with holdfast.CheckpointManager(disk / "root", again, config=settings()) as manager:
            assert manager.restore() == step
            assert is_of(again, step)
        assert [name for name in os.listdir(disk / "root") if name.startswith(".step")] == []
    show.append(f"a full {kind}: {sum(ended.values())} saves, {dict(ended)}")
    assert ended["SaveFailed"] >= 5
    assert ended["published"] >= 1


def test_a_disk_that_is_mounted_read_only_under_a_manager(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "disk", size_kib=8 * 1024) as disk:
        state = build()
        with holdfast.CheckpointManager(disk / "root", state, config=settings()) as manager:
            manager.save(1).result(WAIT_S)
            # Descriptors that stand open for writing, of the lock, keep it from being remounted.
            done = subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True, check=False)
            if done.returncode:
                pytest.skip("a file system in use can't be made read-only here")
            error = manager.save(2).exception(WAIT_S)
            with pytest.warns(UserWarning, match="Read-only"):
                manager.wait()
            assert isinstance(error, holdfast.SaveFailed)
            assert error.errno == errno.EROFS
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
            assert manager.save(3).result(WAIT_S).verify().ok


# memory ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A cgroup whose processes are killed when they use more; needs root."""
    old = Path("/sys/fs/cgroup/memory")
    root = old if (old / "memory.limit_in_bytes").exists() else Path("/sys/fs/cgroup")
    group = root / f"holdfast-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if root == old else "memory.max"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("can't make a memory cgroup here")
    try:
        try:
            (group / name).write_text(str(limit_bytes))
        except OSError:
            pytest.skip("can't limit a memory cgroup here")
        yield group
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def engine_pid(manager: holdfast.CheckpointManager) -> int:
    client: EngineClient = manager._saver._engine
    client.wait_ready(WAIT_S)
    assert client.pid is not None
    return client.pid


@pytest.mark.filterwarnings("ignore:the save of step")
def test_an_engine_that_the_system_kills_for_its_memory(tmp_path: Path) -> None:
    """As the kernel's out-of-memory killer does: without notice, in the middle of a save."""
    state = {"w": torch.ones(1 << 20)}
    config = settings(io_limit_bytes_per_s=2 * MIB)
    with memory_group(2 * MIB) as group, holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        manager.save(1).result(WAIT_S)
        pid = engine_pid(manager)
        (group / "cgroup.procs").write_text(str(pid))
        began = time.monotonic()
        error = manager.save(2).exception(WAIT_S)
        assert time.monotonic() - began < 15
        if error is None and not is_gone(pid):
            pytest.skip("a process was moved to the cgroup and is not limited by it")
        assert isinstance(error, holdfast.SaveFailed), error
        assert isinstance(error.__cause__, holdfast.EngineDied)
        assert "SIGKILL" in str(error)
        manager.wait_staged()
        assert manager.save(3).result(WAIT_S).verify().ok
        assert manager.steps() == [1, 3]


@pytest.mark.filterwarnings("ignore:the save of step")
def test_an_engine_without_memory_left(tmp_path: Path) -> None:
    """An address space that can't grow: no image can be mapped, no thread started."""
    state = {"w": torch.ones(1 << 20)}
    with holdfast.CheckpointManager(tmp_path, state, config=settings()) as manager:
        pid = engine_pid(manager)
        status = Path(f"/proc/{pid}/statm").read_text().split()
        size = int(status[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        error = manager.save(1).exception(WAIT_S)
        assert isinstance(error, holdfast.SaveFailed), error
        assert error.__cause__ is not None
        manager.wait_staged()
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert manager.save(2).result(WAIT_S).verify().ok


@pytest.mark.filterwarnings("ignore:the save of step")
def test_a_trainer_without_descriptors_left(tmp_path: Path) -> None:
    """Every number that it may still open, from none: each save fails by name or is there; then all is well."""
    state = build()
    ended: Counter[str] = Counter()
    with holdfast.CheckpointManager(tmp_path, state, config=settings()) as manager:
        manager.save(1).result(WAIT_S)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        step = 1
        for spare in range(6):
            step += 1
            fill(state, step)
            resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_that_leaves(spare), before[1]))
            try:
                error = manager.save(step).exception(WAIT_S)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            manager.wait_staged()
            if error is not None:
                assert isinstance(error, holdfast.HoldfastError), error
                assert "Too many open files" in str(error), error
            ended["published" if error is None else type(error).__name__] += 1
            step += 1
            fill(state, step)
            assert manager.save(step).result(WAIT_S).verify().ok
    print(dict(ended))
    assert set(ended) > {"published"}


def _limit_that_leaves(spare: int) -> int:
    """A limit of descriptors below which ``spare`` numbers are free."""
    free = (number for number in itertools.count() if not _is_open(number))
    return next(itertools.islice(free, spare, None))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


# other writers ---------------------------------------------------------------------------------------------------


def test_a_second_manager_is_told_who_holds_the_root(nursery: Nursery, tmp_path: Path) -> None:
    """At once, by host, process and time; readers need no lock; a killed holder holds nothing."""
    root, log = tmp_path / "root", Log(tmp_path / "events", 0)
    child = nursery.start(
        "hostile_jobs", "hold", {"root": str(root), "log": str(tmp_path / "events")}, log=tmp_path / "job"
    )
    deadline = time.monotonic() + WAIT_S
    while not log.events("holds"):
        assert child.returncode is None, child.stderr()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(holdfast.RootLocked) as caught:
        holdfast.CheckpointManager(root, build(), config=settings())
    assert time.monotonic() - began < 2
    who = f"process {child.pid} on host {os.uname().nodename} since {dt.datetime.now().year}"
    assert who in caught.value.by
    assert who in str(caught.value)
    assert str(root) in str(caught.value)
    state = build()
    assert holdfast.load(state, root).step == 1
    assert is_of(state, 1)
    assert holdfast.open(root).verify().ok
    with holdfast.CheckpointManager(root, state, config=settings(load_only=True)) as reader:
        assert reader.restore() == 1
    fill(state, 5)
    assert holdfast.save(state, root / "aside", step=5).step == 5  # one path of its own, with a lock of its own
    child.signal(signal.SIGSTOP)  # a holder that hangs still holds
    with pytest.raises(holdfast.RootLocked, match=str(child.pid)):
        holdfast.CheckpointManager(root, build(), config=settings())
    child.signal(signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    with holdfast.CheckpointManager(root, state, config=settings()) as manager:
        assert manager.restore() == 1


# clocks ----------------------------------------------------------------------------------------------------------

YEAR_S = 365.25 * 86400


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Offset in seconds of this process's wall clock, as seen by Python: set its one item."""
    off = [0.0]
    real_time, real_ns = time.time, time.time_ns

    class Jumping(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return dt.datetime.fromtimestamp(real_time() + off[0], tz)

    monkeypatch.setattr(time, "time", lambda: real_time() + off[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(off[0] * 1e9))
    for module in ("saver.delivery", "dcp.attempt", "storage.locks", "catalog.catalog"):
        monkeypatch.setattr(f"holdfast.{module}.datetime", Jumping)
    return off


JUMPS = [0.0, 40 * YEAR_S, -40 * YEAR_S, 3600.0, -3600.0, 200 * YEAR_S, 0.0, -30 * YEAR_S]


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(holdfast.Keep(last=2), marks=pytest.mark.slow),
        holdfast.Keep(last=1, minutes=1),
        pytest.param(holdfast.Keep(last=0, minutes=0.001), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_wall_clock_that_jumps_decides_nothing_that_matters(
    keep: holdfast.Keep, tmp_path: Path, wall: list[float]
) -> None:
    """Saves succeed within their deadlines, the newest stays, and starts resume from it, whatever the clock says."""
    state = build()
    step = 0
    for start in range(3):
        with holdfast.CheckpointManager(tmp_path, state, config=settings(keep=keep)) as manager:
            assert manager.restore() == (step or None)
            for jump in JUMPS[start:] + JUMPS[:start]:
                wall[0] = jump
                step += 1
                fill(state, step)
                assert manager.save(step).result(WAIT_S).step == step
                manager.wait_staged()
                assert manager.latest() == step
                wall[0] = -jump
                assert holdfast.open(tmp_path).step == step
        # What a crash left while the clock was elsewhere: a lease of a boot long ago, or one from the future.
        left = tmp_path / f".step-900.00000000000{start}.incomplete"
        left.mkdir()
        (left / "lease-00000").write_text("{}")
        for path in (left / "lease-00000", left, tmp_path / f"step-{step}"):
            os.utime(path, (max(0.0, time.time()), max(0.0, time.time())))
        wall[0] = JUMPS[start + 1]
        began = time.monotonic()
        again = build()
        with holdfast.CheckpointManager(tmp_path, again, config=settings(keep=keep)) as manager:
            assert manager.restore() == step
            assert is_of(again, step)
        assert time.monotonic() - began < 15
        assert not left.exists()
