"""One measured save or load, in a worker. Times are this rank's; the runner takes the slowest rank's, and adds CPU up.

held_s: how long the training thread could not train: the call, the wait in front of the update after an interval of
forward and backward, and polls, where a contender ends its saves in them. durable_s: from the call until all is
on the disk. cpu_s: of the process and its children, without what the training thread computed meanwhile.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from benchmarks.cpu import tree_cpu_s

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.busy import Busy
    from benchmarks.contender import Contender, Pending

SAVE_DEADLINE_S = 240.0


class Watch:
    """Asks whether a save is durable, now and then, and keeps account of what asking takes."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self._next = 0.0
        self.asking_s = 0.0
        self.ended = False

    def ask(self) -> bool:
        began = time.perf_counter()
        if not self.ended and began >= self._next:
            self.ended = self.pending.done()
            now = time.perf_counter()
            self.asking_s += now - began
            self._next = now + self.pending.ask_every_s
        return self.ended

    def wait(self, busy: Busy, deadline: float) -> None:
        """Work until it is."""
        while not self.ask():
            if time.perf_counter() > deadline:
                raise TimeoutError("a save is not durable after its deadline")
            busy.chunk()


def timed_save(contender: Contender, path: Path, busy: Busy, interval_s: float) -> tuple[Pending, dict[str, float]]:
    """Save beside a training thread that works; the update comes ``interval_s`` after the call."""
    busy.for_s(0.2)
    pace_alone = busy.pace
    busy.reset()
    cpu_before, began = tree_cpu_s(os.getpid()), time.perf_counter()
    pending = contender.save(path)
    held_s = call_s = time.perf_counter() - began
    watch = Watch(pending)
    end = began + call_s + interval_s
    while time.perf_counter() < end and not watch.ask():
        busy.chunk()
    before_update = time.perf_counter()
    contender.before_update()
    wait_s = time.perf_counter() - before_update
    watch.wait(busy, began + SAVE_DEADLINE_S)
    durable_s = time.perf_counter() - began
    cpu_s = tree_cpu_s(os.getpid()) - cpu_before - busy.cpu_s
    held_s += wait_s + (watch.asking_s if pending.ends_when_asked else 0.0)
    figures = {
        "held_s": held_s,
        "call_s": call_s,
        "update_wait_s": wait_s,
        "durable_s": durable_s,
        "cpu_s": max(0.0, cpu_s),
        "pace": busy.pace / pace_alone if pace_alone and busy.chunks > 3 else 1.0,
    }
    busy.reset()
    return pending, figures | pending.stats


def timed_load(contender: Contender, state: Any, path: Path) -> dict[str, float]:
    cpu_before, began = tree_cpu_s(os.getpid()), time.perf_counter()
    contender.load(state, path)
    load_s = time.perf_counter() - began
    return {"load_s": load_s, "cpu_s": tree_cpu_s(os.getpid()) - cpu_before}
