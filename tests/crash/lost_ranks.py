"""A job of two ranks that saves once, and something happens to one of them at a chosen point of that save.

It dies, hangs as a whole, or raises what nobody expects; or the host of the store that the ranks talk over does. For
test_lost_ranks.py. The point is chosen by having a function of Holdfast's do that in place of what it does, or after.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from endings import build
from saving_job import config, note, start

import holdfast
from holdfast.commit.messages import AttemptChannel
from holdfast.engine.client import EngineClient
from holdfast.saver.agreement import Agreement
from holdfast.storage import local

STAGE_S, PERSIST_S, COMMIT_S = 8.0, 6.0, 2.0


def die() -> None:
    note("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Stop forever, with all threads, as if the machine were gone: a store hosted here is silent too."""
    note("dying")
    os.kill(os.getpid(), signal.SIGSTOP)


def break_off() -> None:
    note("dying")
    raise ZeroDivisionError("a defect that nobody thought of")


def _to_store(number: signal.Signals) -> Callable[[], None]:
    def act() -> None:
        note("dying")
        os.kill(int(os.environ["STORE_PID"]), number)

    return act


ACTS: dict[str, Callable[[], None]] = {
    "dies": die,
    "hangs": hang,
    "raises": break_off,
    "loses the store": _to_store(signal.SIGKILL),
    "has a silent store": _to_store(signal.SIGSTOP),
}
# Owner, function, and whether it is called before or after it happens.
POINTS: dict[str, tuple[Any, str, bool]] = {
    "before its ballot": (Agreement, "cast", False),
    "when it has begun": (AttemptChannel, "tell_begin", False),
    "before its report": (EngineClient, "staging_verified", False),
    "before it tells of its report": (AttemptChannel, "tell_report", False),
    "before the rename": (local, "publish_by_rename", False),
    "after the rename": (local, "publish_by_rename", True),
}


def meet(point: str, act: Callable[[], None]) -> None:
    """Make ``act`` happen the first time ``point`` is reached."""
    owner, name, after = POINTS[point]
    function = getattr(owner, name)
    unmet = [True]

    def happen() -> None:
        if unmet.pop() if unmet else False:
            act()

    def replacement(*args: Any, **options: Any) -> Any:
        if not after:
            happen()
        result = function(*args, **options)
        if after:
            happen()
        return result

    setattr(owner, name, replacement)


def host_store(port_file: str) -> None:
    """Host a store for others; its port is written to ``port_file``."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Path(port_file).with_suffix(".new").write_text(str(store.port))
    Path(port_file).with_suffix(".new").rename(port_file)
    time.sleep(300)


def main(root: str, log: str, victim: int, point: str, act: str) -> None:
    rank, world = start(log)
    if rank == victim:
        meet(point, ACTS[act])
    deadlines = {"stage_timeout": STAGE_S, "persist_timeout": PERSIST_S, "commit_timeout": COMMIT_S}
    manager = holdfast.CheckpointManager(root, build(world), config=config(on_error="warn", **deadlines))
    began = time.monotonic()
    error = manager.save(1).exception(120)
    cause = None if error is None or error.__cause__ is None else type(error.__cause__).__name__
    kind = None if error is None else type(error).__name__
    ours = error is None or isinstance(error, holdfast.HoldfastError)
    note("told", error=kind, ours=ours, cause=cause, message=str(error), rank=getattr(error, "rank", None))
    note("took", seconds=time.monotonic() - began)
    if act == "raises" and error is not None:  # nobody is gone: training goes on, and the next save is published
        manager.wait_staged()
        again = manager.save(2).exception(120)
        note("again", error=None if again is None else type(again).__name__, message=str(again))
    began = time.monotonic()
    manager.close()
    note("closed", seconds=time.monotonic() - began)
