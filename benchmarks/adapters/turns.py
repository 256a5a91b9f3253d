"""Takes turns between ways to save in one training loop, and says what each cost it.

A turn: a few steps without a save, a save, one more step. Held is what the save and the step after it took beyond a
usual step, so it counts what waits in the optimizer step, too. Then the turn waits until the save is durable.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

PLAIN_STEPS = 4
WIDTH, LAYERS = 1024, 16


@dataclass(frozen=True, slots=True)
class Way:
    """``save`` gets a path that doesn't exist; ``wait_saved`` returns once what it began is on the disk."""

    save: Callable[[Path], None]
    wait_saved: Callable[[], None] = lambda: None


class Turns:
    """Call `after_step` at the end of every step; it returns True when all turns are taken."""

    def __init__(self, ways: dict[str, Way]) -> None:
        self._folder, self._rounds = Path(sys.argv[1]), int(sys.argv[2])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ways = ways
        self._course = self._run()
        self._over = False

    def after_step(self) -> bool:
        if not self._over:
            self._over = next(self._course, "over") == "over"
        return self._over

    def _run(self) -> Iterator[None]:
        """Yield once for each step to make."""
        for number in range(self._rounds + 1):
            for name, way in self._ways.items():
                yield from self._turn(number, name, way)

    def _turn(self, number: int, name: str, way: Way) -> Iterator[None]:
        target = self._folder / f"{name}-{number}"
        os.sync()
        yield  # what the turn before left in the caches is not this one's
        usual = []
        for _ in range(PLAIN_STEPS):
            began = time.perf_counter()
            yield
            usual.append(time.perf_counter() - began)
        before = _nbytes_below(self._folder)
        began = time.perf_counter()
        way.save(target)
        called = time.perf_counter()
        yield
        held = time.perf_counter() - began - statistics.median(usual)
        way.wait_saved()
        _fsync_below(self._folder)
        figures = {"held_s": held, "call_s": called - began, "durable_s": time.perf_counter() - began}
        figures |= {"step_s": statistics.median(usual), "nbytes": _nbytes_below(self._folder) - before}
        print(json.dumps({"way": name, "round": number, **figures}), flush=True)
        for left in self._folder.iterdir():
            if not left.name.startswith("."):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()


def _fsync_below(path: Path) -> None:
    """Not every framework does; all end durable here."""
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a lock, released since
                fd = os.open(os.path.join(folder, name), os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)


def _nbytes_below(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())


def a_model() -> nn.Module:
    """17 million parameters; with AdamW's state 200 MB."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(turns: Turns, model: nn.Module, optimizer: Any) -> None:
    """Train `a_model` by hand until all turns are taken, for what leaves the loop to its users."""
    while not turns.after_step():
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
