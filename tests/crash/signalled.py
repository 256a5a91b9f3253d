"""Jobs that save when they are signalled: what test_signals.py starts, signals and starts again.

Each notes every step it has trained, with a digest of all that the next step depends on, before it goes on.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from endings import MIB
from saving_job import Training, config, note, start

import holdfast

STEP_S = 0.02


def settings(**options: Any) -> holdfast.CheckpointConfig:
    return config(**{"every": None, "save_on_signal": ("SIGTERM", "SIGUSR1"), "signal_timeout": 60.0, **options})


def train(root: str, log: str, steps: int = 2000, mode: str = "", options: dict[str, Any] | None = None) -> None:
    """Resume, then train; ``mode`` says what is special about it."""
    rank, world = start(log)
    training = Training(rank, world)
    if mode == "own handler":
        signal.signal(signal.SIGTERM, lambda number, _frame: note("handler", number=number))
    before = signal.getsignal(signal.SIGTERM)
    with holdfast.CheckpointManager(root, training.state, config=settings(**(options or {}))) as manager:
        report = manager.recovered
        note("ready", rolled_forward=list(report.rolled_forward) if report else [])
        first = manager.restore()
        note("restored", step=first, digest=training.digest())
        if mode == "before the first step":
            time.sleep(1.0)
        for step in range((first or 0) + 1, steps + 1):
            if mode == "one is late" and rank == 1 and step == 4:
                note("late")
                ctypes.CDLL(None).sleep(2)  # a rank that computes: the others wait for it in a collective
            if mode == "stuck" and step == 4:
                note("stuck")
                lock = ctypes.create_string_buffer(64)
                for _ in range(2):  # never again in the interpreter, and no signal gets it out
                    ctypes.CDLL(None).pthread_mutex_lock(lock)
            training.step()
            note("step", step=step, digest=training.digest())
            handles = manager.step(step)
            for handle in handles:
                note("saved" if handle.done() else "saving", step=step)
            time.sleep(STEP_S)
        note("closing")
    note("closed", given_back=signal.getsignal(signal.SIGTERM) == before)
    if world > 1:
        dist.destroy_process_group()


def close_slowly(root: str, log: str) -> None:
    """A save of step 1 that takes a second is in flight when the manager is closed."""
    start(log)
    state = {"model": torch.nn.Linear(1024, 768, bias=False)}
    manager = holdfast.CheckpointManager(root, state, config=settings(io_limit_bytes_per_s=3 * MIB))
    manager.save(1)
    manager.wait_staged()
    note("closing")
    manager.close()
    note("closed")


def save_slowly(root: str, log: str, signal_timeout: float = 60.0) -> None:
    """Each save takes a few seconds."""
    start(log)
    state = {"model": torch.nn.Linear(1024, 768, bias=False)}
    options = {"io_limit_bytes_per_s": 2 * MIB, "signal_timeout": signal_timeout}
    with holdfast.CheckpointManager(root, state, config=settings(**options)) as manager:
        manager.restore()
        for step in range(1, 2000):
            note("step", step=step)
            manager.step(step)
            time.sleep(STEP_S)


def end_a_child(root: str, log: str) -> None:
    """Children of a job that takes signals end by them as any others."""
    start(log)
    state = {"model": torch.nn.Linear(8, 8)}
    with holdfast.CheckpointManager(root, state, config=settings()) as manager:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.1)
        child.terminate()
        child.join(20)
        note("child", status=child.exitcode)
        for step in range(1, 4):
            manager.step(step)
    note("closed")


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]), *sys.argv[4:5])
