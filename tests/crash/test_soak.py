"""Saving for days, in short: thousands of saves with failures mixed in, and nothing grows.

Descriptors, threads, processes, resident memory, files and directories are counted along the way. All of it, 2,000
saves of a small state and 200 of a large one, with ``HOLDFAST_SOAK=full``; else a part, as CI does.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import children_of, engines_of, is_gone
from torch import nn

import holdfast
from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.local import LocalStorage
from holdfast.testing.staging import held_copies

FULL = os.environ.get("HOLDFAST_SOAK") == "full"
MIB = 1 << 20


@dataclass(frozen=True)
class Soak:
    """``saves`` of a state of ``width`` squared floats and its optimizer's; every so often one is made to fail."""

    name: str
    width: int
    saves: int
    fail_every: int
    warm_up: int
    """Saves after which nothing may grow any more."""
    growth_mib: float

    @property
    def nbytes(self) -> int:
        return 3 * 4 * self.width**2


SMALL = Soak("small", 64, 2000 if FULL else 200, 20 if FULL else 25, 60 if FULL else 50, growth_mib=12)
LARGE = Soak("large", 2364, 200 if FULL else 8, 10 if FULL else 4, 20 if FULL else 4, growth_mib=24)


@dataclass(frozen=True)
class Count:
    """Resources of a process, and the contents of its root."""

    descriptors: int
    threads: int
    processes: int
    resident_mib: float
    hidden: int
    entries: int

    @classmethod
    def now(cls, root: Path) -> Count:
        gc.collect()
        trim()
        children = [child for child in children_of(os.getpid()) if not is_gone(child)]
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        names = os.listdir(root)
        return cls(
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(children),
            resident / MIB,
            sum(name.startswith(".") for name in names),
            sum(len(files) + len(directories) for _, directories, files in os.walk(root)),
        )


def trim() -> None:
    """Have the C library give back what was freed: how much of it it keeps goes up and down by hundreds of MiB."""
    trim_heap = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim_heap is not None:
        trim_heap(0)


def engine_mib() -> float:
    """Return the engine's own memory in MiB: file images are shared memory."""
    (engine,) = engines_of(os.getpid())
    status = Path(f"/proc/{engine}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


class Job:
    def __init__(self, soak: Soak, root: Path) -> None:
        torch.manual_seed(0)
        self.soak, self.root = soak, root
        self.model = nn.Linear(soak.width, soak.width, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.progress: dict[str, Any] = {"step": 0, "log": ""}
        self.failed: Counter[str] = Counter()
        state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}
        config = holdfast.CheckpointConfig(every=None, keep=holdfast.Keep(last=2), on_error="warn", nice=0)
        self.manager = holdfast.CheckpointManager(root, state, config=config)

    def save(self, step: int) -> None:
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()
        self.progress.update(step=step, log="x" * (step % 300))
        self.manager.save(step)

    def save_in_vain(self, step: int, number: int) -> None:
        """A save that is made to fail, each time in another way; a kill may come too late for that."""
        ways = (self.kill_engine, self.refuse_room, self.be_full, self.occupy, self.change, self.hold_what_cannot_be)
        way = ways[number % len(ways)]
        self.manager.wait()
        error = way(step)
        assert isinstance(error, HoldfastError) or (way == self.kill_engine and error is None), (way, error)
        self.failed[type(error).__name__ if error is not None else "killed too late"] += 1

    def kill_engine(self, step: int) -> BaseException | None:
        handle = self.manager.save(step)
        os.kill(engines_of(os.getpid())[0], signal.SIGKILL)
        return handle.exception(60)

    def refuse_room(self, step: int) -> BaseException | None:
        """Make the engine's writes fail by a limit on file sizes."""
        (engine,) = engines_of(os.getpid())
        before = resource.prlimit(engine, resource.RLIMIT_FSIZE)
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (1 << 12, before[1]))
        error = self.manager.save(step).exception(60)
        for living in engines_of(os.getpid()):
            resource.prlimit(living, resource.RLIMIT_FSIZE, before)
        return error

    def be_full(self, step: int) -> BaseException | None:
        """Simulate a full disk for what rank 0 writes itself."""

        def refuse(storage: LocalStorage, name: str, _data: bytes) -> None:
            raise StorageError("no space left on device", path=storage.path(name), errno=errno.ENOSPC)

        with mock.patch.object(LocalStorage, "write_file", refuse):
            return self.manager.save(step).exception(60)

    def occupy(self, step: int) -> BaseException | None:
        place = self.root / f"step-{step}"
        place.mkdir()
        (place / "mine").touch()
        error = self.manager.save(step).exception(60)
        (place / "mine").unlink()
        place.rmdir()
        return error

    def change(self, step: int) -> BaseException | None:
        with held_copies() as gate:
            handle = self.manager.save(step)
            self.model.weight.data = self.model.weight.data.clone()
            gate.open()
            return handle.exception(60)

    def hold_what_cannot_be(self, step: int) -> BaseException | None:
        """Make this rank unable to take part."""
        self.progress["log"] = threading.Lock()
        try:
            self.manager.save(step)
        except HoldfastError as error:
            return error
        finally:
            self.progress["log"] = ""
        return None


@pytest.mark.timeout(3600 if FULL else 110)
@pytest.mark.filterwarnings("ignore::UserWarning")  # what `on_error="warn"` says of saves that were to fail
@pytest.mark.parametrize("soak", [SMALL, LARGE], ids=lambda soak: soak.name)
def test_nothing_grows(soak: Soak, tmp_path: Path, tried: Counter[str]) -> None:
    root = tmp_path / "root"
    began = time.monotonic()
    job = Job(soak, root)
    counts: list[Count] = []
    with job.manager:
        for step in range(1, soak.saves + 1):
            if step % soak.fail_every == 0:
                job.save_in_vain(step, step // soak.fail_every)
                continue
            job.save(step)
            if step % soak.fail_every == soak.fail_every - 1 and step >= soak.warm_up:
                job.manager.wait()
                job.manager._saver._engine.wait_removals(30.0)  # type: ignore[union-attr]
                counts.append(Count.now(root))
        job.save(soak.saves + 1)
        job.manager.wait()
        newest = holdfast.open(root)
        assert newest.verify().ok
        assert torch.equal(newest.read("model.weight"), job.model.weight)
        assert engine_mib() < 60
    first, last = counts[0], counts[-1]
    took_s = time.monotonic() - began
    print(f"soak, {soak.name}: {soak.saves} saves of {soak.nbytes / MIB:.2f} MiB in {took_s:.0f} s, ", end="")
    print(f"{sum(job.failed.values())} made to fail ({dict(job.failed)})")
    for name in ("descriptors", "threads", "processes", "resident_mib", "hidden", "entries"):
        found = [getattr(count, name) for count in counts]
        print(f"    {name}: {found[0]:.0f} at first, {min(found):.0f} to {max(found):.0f}, {found[-1]:.0f} at last")
    assert (last.threads, last.processes) == (first.threads, first.processes)
    assert last.descriptors <= first.descriptors  # what tests before this one have left may go meanwhile
    assert (last.hidden, last.entries) == (first.hidden, first.entries)
    assert last.resident_mib - first.resident_mib < soak.growth_mib
    assert sorted(os.listdir(root)) == sorted([".holdfast", *(f"step-{step}" for step in job.manager.steps())])
    tried[f"saves in a soak ({soak.name})"] += soak.saves
