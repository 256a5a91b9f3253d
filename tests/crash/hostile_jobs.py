"""Programs that get in conflict with others; started by test_hostile_places.py."""

from __future__ import annotations

import time

from kill_job import build, fill, settings
from saving_job import note, start

import holdfast


def hold(root: str, log: str) -> None:
    """Open a manager and keep it open."""
    start(log)
    state = build()
    fill(state, 1)
    manager = holdfast.CheckpointManager(root, state, config=settings())
    manager.save(1).result(30)
    note("holds")
    time.sleep(120)
