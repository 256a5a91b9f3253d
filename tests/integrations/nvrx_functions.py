"""Functions that worker processes of tests run: they are imported there by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

stashed: list[torch.Tensor] = []


def note(path: str, text: str = "ran") -> None:
    Path(path).write_text(f"{text} {os.getpid()}")


def save_slowly(state: Any, path: str, delay_s: float = 0.0) -> None:
    time.sleep(delay_s)
    torch.save(state, path)


def fail(text: str) -> None:
    raise ValueError(text)


def preload_fails() -> Any:
    raise OSError("nothing to preload")


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def save_second(path: str, state: Any) -> None:
    torch.save(state, path)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds: float, noted: str | None = None) -> None:
    if noted is not None:
        Path(noted).write_text(str(os.getpid()))
    time.sleep(seconds)


def stash(tensor: torch.Tensor) -> None:
    stashed.append(tensor)


def save_stashed(path: str, other: torch.Tensor) -> None:
    torch.save(stashed[0], path)


def count_descriptors(tensors: list[torch.Tensor], path: str) -> None:
    assert all(float(tensor[0]) == number for number, tensor in enumerate(tensors))
    Path(path).write_text(str(len(os.listdir("/proc/self/fd"))))


def tell_nice(path: str) -> None:
    Path(path).write_text(str(os.nice(0)))


def tell_cores(path: str) -> None:
    """Of each thread."""
    found = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
    Path(path).write_text(repr(found))


def swallow(path: str, given: Any, also: Any = None) -> None:
    Path(path).write_text(f"{given} {also}")


def same(value: Any) -> Any:
    return value


def start_process(path: str) -> None:
    child = multiprocessing.get_context("spawn").Process(target=note, args=(path,))
    child.start()
    child.join()


def clean_up_when_ended(path: str) -> None:
    try:
        Path(path + ".begun").write_text("")
        time.sleep(60)
    finally:
        Path(path).write_text("cleaned")
