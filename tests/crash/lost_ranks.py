"""A job of two ranks that saves once, and one of them dies at a chosen point of that save; for test_lost_ranks.py.

The point is chosen by having a function of Holdfast's die in place of what it does, or right after it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from endings import build
from saving_job import config, note, start

import holdfast
from holdfast import commit
from holdfast.agreement import Agreement
from holdfast.engine.client import EngineClient
from holdfast.news import News

STAGE_S, PERSIST_S, COMMIT_S = 8.0, 6.0, 2.0


def die(*_args: Any, **_options: Any) -> None:
    note("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def then_die(function: Callable[..., Any]) -> Callable[..., Any]:
    def act(*args: Any, **options: Any) -> None:
        function(*args, **options)
        die()

    return act


POINTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "before its ballot": (Agreement, "cast", die),
    "when it has begun": (News, "tell_begin", die),
    "before its report": (EngineClient, "staging_verified", die),
    "before it tells of its report": (News, "tell_report", die),
    "before the rename": (commit, "publish", die),
    "after the rename": (commit, "publish", then_die(commit.publish)),
}


def main(root: str, log: str, victim: int, point: str) -> None:
    rank, world = start(log)
    if rank == victim:
        setattr(*POINTS[point])
    deadlines = {"stage_timeout": STAGE_S, "persist_timeout": PERSIST_S, "commit_timeout": COMMIT_S}
    manager = holdfast.CheckpointManager(root, build(world), config=config(on_error="warn", **deadlines))
    began = time.monotonic()
    error = manager.save(1).exception(120)
    cause = None if error is None or error.__cause__ is None else type(error.__cause__).__name__
    kind = None if error is None else type(error).__name__
    note("told", error=kind, cause=cause, message=str(error), rank=getattr(error, "rank", None))
    note("took", seconds=time.monotonic() - began)
    began = time.monotonic()
    manager.close()
    note("closed", seconds=time.monotonic() - began)
