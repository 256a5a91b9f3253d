"""A trainer with its checkpoints in a bucket, to be killed; see test_store_kills.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import holdfast
import holdfast.manager  # what is imported before a job is forked stops at no point

VALUES = 3000


def build(step: int) -> dict[str, Any]:
    model = nn.Linear(VALUES, 1, bias=False)
    fill(model, step)
    return {"model": model}


def fill(model: nn.Linear, step: int) -> None:
    nn.init.constant_(model.weight, float(step))


def is_of(state: dict[str, Any], step: int) -> bool:
    return bool((state["model"].weight == float(step)).all())


def settings() -> holdfast.CheckpointConfig:
    return holdfast.CheckpointConfig(
        every=1, keep=holdfast.Keep(last=1), stage_timeout=20.0, persist_timeout=20.0, commit_timeout=20.0
    )


def saves(url: str, environment: Mapping[str, str], told: Connection) -> None:
    """A start, two saves with retention, the end; what is published is told."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    state = build(0)
    try:
        with holdfast.CheckpointManager(url, state, config=settings()) as manager:
            first = manager.restore() or 0
            for step in (first + 1, first + 2):
                fill(state["model"], step)
                (handle,) = manager.step(step)
                if handle.exception() is None:
                    told.send(step)
    except holdfast.HoldfastError as error:  # of an engine that was killed
        told.send(str(error))
    told.send("closed")
