"""A job that goes on saving, or exporting, while its supervisor has system calls fail; for test_fault_points.py.

A window is one save and what it has removed; after each window comes a save that nothing happens to.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import export_job
import torch.distributed as dist
from kill_job import begin, build, fill, settings, tell
from supervised import Reins

import holdfast

REMOVAL_S = 0.5
"""How long a window waits for what was to be removed."""


def faults(root: str, windows: list[str]) -> None:
    """Save in each window, and once more behind it."""
    reins, world = begin()
    state = build(world)
    with holdfast.CheckpointManager(root, state, config=settings()) as manager:

        def save(step: int) -> holdfast.SaveHandle:
            fill(state, step)
            return manager.save(step)

        _go_on(reins, world, windows, manager, root, save)


def export_faults(root: str, windows: list[str]) -> None:
    """Export in each window, and once more behind it."""
    reins, world = begin()
    state = export_job.build(world)
    with export_job.manager_of(root, state, every=None) as manager:

        def export(step: int) -> holdfast.SaveHandle:
            export_job.fill(state, step)
            return manager.step(step)[0]

        _go_on(reins, world, windows, manager, f"{root}/hf", export)


def _go_on(
    reins: Reins,
    world: int,
    windows: list[str],
    manager: holdfast.CheckpointManager,
    place: str,
    save: Callable[[int], holdfast.SaveHandle],
) -> None:
    """``save`` in each window and behind it; ``place`` is where that goes to."""
    for number, window in enumerate(windows):
        with reins.window(window):
            saved = _ended(manager, save, 2 * number + 1)
            _wait_removed(place)
        if world > 1:
            dist.barrier()  # the window is shut when the last rank says so
        _look(reins, *saved, window)  # whose own reads are not to fail
        _look(reins, *_ended(manager, save, 2 * number + 2), "")
        if world > 1:
            dist.barrier()  # nor is the next one to open before all have looked
    reins.note("closed")
    if world > 1:
        dist.destroy_process_group()


def _ended(
    manager: holdfast.CheckpointManager, save: Callable[[int], holdfast.SaveHandle], step: int
) -> tuple[holdfast.SaveHandle, BaseException | None, float]:
    began = time.monotonic()
    handle = save(step)
    error = handle.exception(60)
    seconds = time.monotonic() - began
    manager.wait_staged()
    return handle, error, seconds


def _look(reins: Reins, handle: holdfast.SaveHandle, error: BaseException | None, seconds: float, window: str) -> None:
    """Report the outcome of a save: by its handle, and by what is visible."""
    path = Path(handle.path)
    visible = path.exists()
    whole = visible and holdfast.open(path).verify().ok
    tell(reins, error, step=handle.step, window=window, seconds=seconds, visible=visible, whole=whole)


def _wait_removed(root: str) -> None:
    deadline = time.monotonic() + REMOVAL_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the fault may be this call's
            if not any(name.endswith(".trash") for name in os.listdir(root)):
                return
        time.sleep(0.005)


def starts(root: str, windows: list[str]) -> None:
    """In each window a start that settles what a crash left (a template beside the root), and its end."""
    reins, _ = begin()
    for number, window in enumerate(windows):
        target = f"{root}/{number}"
        os.rename(f"{root}/template-{number}", target)
        error = _start(reins, target, window, first=True)
        if error is not None or window:
            _start(reins, target, "", first=False)
    reins.note("closed")


def _start(reins: Reins, target: str, window: str, *, first: bool) -> BaseException | None:
    state = build()
    error: BaseException | None = None
    step = None
    began = time.monotonic()
    try:
        if first:
            with reins.window(window):
                manager = holdfast.CheckpointManager(target, state, config=settings())
        else:
            manager = holdfast.CheckpointManager(target, state, config=settings())
        with manager:
            step = manager.restore()
    except holdfast.HoldfastError as failed:
        error = failed
    seconds = time.monotonic() - began
    tell(reins, error, step=step, window=window, seconds=seconds, left=sorted(os.listdir(target)))
    return error
