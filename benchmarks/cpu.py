"""CPU seconds and memory of a process with all it has started, from /proc. Linux; standard library only.

Guarantees: a child that has ended is counted, once its parent has reaped it. Does not see what the kernel does in its
own threads on behalf of a process (write-back of the page cache), which flatters whoever writes through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self

_TICKS = os.sysconf("SC_CLK_TCK")
_MAPPED_IMAGE = "/memfd:"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the command, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def tree_of(root: int) -> list[int]:
    """``root`` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
    found, left = [], [root]
    while left:
        pid = left.pop()
        found.append(pid)
        left += children.get(pid, [])
    return found


@contextlib.contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """None of them runs for the time of the context."""
    told = list(pids)
    try:
        for pid in told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def tree_cpu_s(root: int) -> float:
    """CPU seconds of ``root``, its descendants, and those that were reaped."""
    total = 0
    for pid in tree_of(root):
        if (fields := _stat(pid)) is not None:
            total += sum(int(fields[index]) for index in (11, 12, 13, 14))
    return total / _TICKS


def threads() -> set[int]:
    """The threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def threads_cpu_s(tids: Iterable[int]) -> float:
    """CPU seconds of threads of this process, to the nanosecond; those that have ended count nothing."""
    total = 0
    for tid in tids:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/schedstat", encoding="ascii") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def available_bytes() -> int:
    """Memory that processes could still have, by the kernel's estimate."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def private_bytes(root: int) -> int:
    """What a process tree keeps from all others: anonymous memory and images, resident or swapped out."""
    kept = 0
    for pid in tree_of(root):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            rows = dict(line.split(":", 1) for line in file if line.startswith(("RssAnon", "RssShmem", "VmSwap")))
            kept += sum(int(value.split()[0]) << 10 for value in rows.values())
    return kept


@dataclass(frozen=True, slots=True)
class Memory:
    """Proportional set size of a process tree, bytes: images apart from all else."""

    images: int
    others: int


def tree_memory(root: int, without: str | None = None) -> Memory:
    """What the tree holds now; shared pages are divided among those who map them.

    without: leave out what is mapped of files whose paths begin so.
    """
    images = others = 0
    for pid in tree_of(root):
        inside_image = left_out = False
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Pss:") and not left_out:
                    amount = int(line.split()[1]) << 10
                    images, others = (images + amount, others) if inside_image else (images, others + amount)
                elif "-" in line.split(" ", 1)[0]:
                    inside_image = _MAPPED_IMAGE in line
                    left_out = without is not None and f" {without}" in line
    return Memory(images, others)


class MemoryWatch:
    """The most a process tree held at any look; looks every ``every_s`` seconds from a thread of its own."""

    def __init__(self, root: int, every_s: float = 0.1, without: str | None = None) -> None:
        self._root, self._every_s, self._without = root, every_s, without
        self._stop = threading.Event()
        self.most_others = self.most_images = 0
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._look()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        now = tree_memory(self._root, self._without)
        self.most_others = max(self.most_others, now.others)
        self.most_images = max(self.most_images, now.images)


class PeakMemory:
    """``nbytes``: the most that this process had beyond what it had before. None where the kernel can't tell.

    keeps: what does the work has images and processes from before: they count, too, for it would have to make them
    otherwise. They must be the only ones there are.
    """

    nbytes: int | None = None

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps

    def __enter__(self) -> Self:
        self._kept = tree_memory(os.getpid()).images if self._keeps else 0
        gc.collect()
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be had for nothing now
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # the most it had is counted anew
        except OSError:
            self._before: int | None = None
        else:
            self._before = _of_status(os.getpid(), "VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            most = _of_status(os.getpid(), "VmHWM") - self._before
            children = tree_of(os.getpid())[1:] if self._keeps else ()
            self.nbytes = max(0, most) + self._kept + sum(_of_status(pid, "RssAnon") for pid in children)


def _of_status(pid: int, field: str) -> int:
    """A figure of /proc/PID/status, in bytes; 0 where the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:")), 0)
    return 0


def resources(root: int) -> dict[str, int]:
    """Open descriptors and threads of the whole tree, and its processes."""
    tree = tree_of(root)
    fds = threads_count = 0
    for pid in tree:
        with contextlib.suppress(OSError):
            fds += len(os.listdir(f"/proc/{pid}/fd"))
            threads_count += len(os.listdir(f"/proc/{pid}/task"))
    return {"fds": fds, "threads": threads_count, "processes": len(tree)}
