"""Jobs that are killed at every system call they make: programs for `supervised.launch`; see test_kill_points.py.

All that a window's calls do is on purpose small, and there is something of everything: a start that has a save to roll
forward and trash to remove, a first and a second save, retention, the end.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - and so does this
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from saving_job import config
from supervised import Reins
from torch import nn

import holdfast
import holdfast.api
import holdfast.manager  # what is imported before a job is forked stops at no point

ROWS, COLUMNS = 48, 64
STAGE_S, PERSIST_S, COMMIT_S = 6.0, 4.0, 2.0


def build(world: int = 1) -> dict[str, Any]:
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    if world > 1:
        torch.distributed.fsdp.fully_shard(model)
    state = {"model": model, "progress": {"step": 0}}
    fill(state, 0)
    return state


def fill(state: dict[str, Any], step: int) -> None:
    """Set the state to values determined by ``step``."""
    nn.init.constant_(state["model"].weight, float(step))
    state["progress"]["step"] = step


def is_of(state: dict[str, Any], step: int) -> bool:
    return bool((state["model"].weight == float(step)).all()) and state["progress"] == {"step": step}


def begin() -> tuple[Reins, int]:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        dist.init_process_group("gloo")
        dist.barrier()  # nobody is to be killed over which a rank is still connecting
    return Reins(rank), world


def settings(**fields: Any) -> holdfast.CheckpointConfig:
    deadlines = {"stage_timeout": STAGE_S, "persist_timeout": PERSIST_S, "commit_timeout": COMMIT_S}
    fixed = {"keep": holdfast.Keep(last=2), "on_error": "warn", **deadlines}
    return config(**{**fixed, **fields})


def tell_end(reins: Reins, handle: holdfast.SaveHandle) -> None:
    tell(reins, handle.exception(), step=handle.step, attempt=handle.attempt)


def tell(reins: Reins, error: BaseException | None, **fields: Any) -> None:
    """Report the outcome of a save, with all causes."""
    causes = []
    cause = error
    while cause is not None:
        causes.append(
            {
                "type": type(cause).__name__,
                "ours": isinstance(cause, holdfast.HoldfastError),
                "message": str(cause),
                "errno": getattr(cause, "errno", None),
                "rank": getattr(cause, "rank", None),
            }
        )
        cause = cause.__cause__
    reins.note("told", error=None if error is None else type(error).__name__, causes=causes, **fields)


def saves(root: str) -> None:
    """A start, two saves, the end. Errors are Holdfast's, or the job ends with a traceback."""
    reins, world = begin()
    state = build(world)
    with reins.window("life"):
        try:
            _live(reins, root, state)
        except holdfast.HoldfastError as error:
            reins.note("refused", error=type(error).__name__, message=str(error))
    reins.note("closed")
    if world > 1:
        dist.destroy_process_group()


def _live(reins: Reins, root: str, state: dict[str, Any]) -> None:
    with holdfast.CheckpointManager(root, state, config=settings()) as manager:
        step = manager.restore()
        assert step is not None
        assert is_of(state, step), f"step {step} came back as something else"
        reins.note("restored", step=step)
        for number in (step + 1, step + 2):
            fill(state, number)
            handle = manager.save(number)
            handle.add_done_callback(lambda ended: tell_end(reins, ended))
            error = handle.exception()
            manager.wait_staged()
            if error is not None and not isinstance(error.__cause__, holdfast.EngineDied):
                return  # a rank is gone: to try again would only take time


def overwrites(root: str) -> None:
    """Overwrite a checkpoint with a one-call save."""
    reins, world = begin()
    state = build(world)
    fill(state, 7)
    target = Path(root) / "one"
    error: BaseException | None = None
    with reins.window("life"):
        try:
            holdfast.save(state, target, step=7, overwrite=True)
        except holdfast.HoldfastError as failed:
            error = failed
        tell(reins, error, step=7, attempt=None)
    if error is not None:  # its engine was killed: there is another for the next
        holdfast.save(state, target, step=7, overwrite=True)
        tell(reins, None, step=7, attempt=None)
    reins.note("closed")
