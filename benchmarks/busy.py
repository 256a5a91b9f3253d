"""What a training thread does while a save goes on: nothing, computes on all cores, or runs pure Python.

Each does its work in chunks of a few milliseconds and keeps account of them: how fast it got on (its *pace*), and how
much CPU was its own, so that the rest can be charged to the save.
"""

from __future__ import annotations

import threading
import time

import torch

from benchmarks.cpu import threads, threads_cpu_s

KINDS = ("idle", "compute", "python")


class Busy:
    """Work for the training thread. ``chunk`` does a little of it."""

    def __init__(self) -> None:
        self.tids = {threading.get_native_id()}
        self.chunks = 0
        self.spent_s = self.cpu_s = 0.0

    def work(self) -> None:
        raise NotImplementedError

    def chunk(self) -> None:
        cpu_before, began = threads_cpu_s(self.tids), time.perf_counter()
        self.work()
        self.spent_s += time.perf_counter() - began
        self.cpu_s += threads_cpu_s(self.tids) - cpu_before
        self.chunks += 1

    def for_s(self, duration_s: float) -> None:
        end = time.perf_counter() + duration_s
        while time.perf_counter() < end:
            self.chunk()

    def reset(self) -> None:
        self.chunks, self.spent_s, self.cpu_s = 0, 0.0, 0.0

    @property
    def pace(self) -> float:
        """Chunks a second, while at it."""
        return self.chunks / self.spent_s if self.spent_s > 0 else 0.0


class Idle(Busy):
    def work(self) -> None:
        time.sleep(0.001)


class Python(Busy):
    """Holds the interpreter lock and gives it away only when asked to."""

    def work(self) -> None:
        total = 0
        for number in range(60_000):
            total += number


class Compute(Busy):
    """Matrix products on all of torch's threads."""

    def __init__(self) -> None:
        before = threads()
        self._left, self._right = torch.randn(768, 768), torch.randn(768, 768)
        self._out = torch.empty(768, 768)
        super().__init__()
        self.work()
        self.tids |= threads() - before  # the team that computes with this thread

    def work(self) -> None:
        torch.mm(self._left, self._right, out=self._out)


def make_busy(kind: str) -> Busy:
    return {"idle": Idle, "compute": Compute, "python": Python}[kind]()
