"""Jobs that export and save at the same steps, to be killed at every system call; see test_export_kills.py.

In a root: ``checkpoints``, ``hf``, and ``assets``, what lies beside the weights. The larger file of an export has two
blocks of 1 MiB: with two ranks each of them writes a part of it, and one sends the other what belongs there.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - it is imported before a job is forked
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from kill_job import begin, settings, tell
from supervised import Reins
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
import holdfast.export.exporter
import holdfast.manager

ROWS, COLUMNS = 4608, 64
SHARD_BYTES = 4 * ROWS * COLUMNS
"""Of a file: one for the matrix, and another for what is beside it."""
ASSETS = {
    "config.json": '{"model_type": "tiny"}',
    "tokenizer.json": "{}",
    "additional_chat_templates/tool.jinja": "{{ tools }}",
}


class Net(nn.Module):
    """Its names are those of its export."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(COLUMNS, ROWS)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """Return the model's tensors at ``step``: nearby elements differ, and each differs between steps."""
    weight = torch.arange(ROWS * COLUMNS, dtype=torch.float32).remainder_(8191).mul_(512).add_(step)
    return {"up_proj.weight": weight.view(ROWS, COLUMNS), "up_proj.bias": torch.full((ROWS,), float(step))}


def build(world: int = 1) -> dict[str, Any]:
    model = Net()
    if world > 1:
        torch.distributed.fsdp.fully_shard(model)
    state = {"model": model, "progress": {"step": 0}}
    fill(state, 0)
    return state


def _local(tensor: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of ``tensor``, and the same part of ``full``; rows are divided evenly."""
    if not isinstance(tensor, DTensor):
        return tensor, full
    return tensor.to_local(), full.chunk(dist.get_world_size())[dist.get_rank()]


def fill(state: dict[str, Any], step: int) -> None:
    full = tensors_of(step)
    with torch.no_grad():
        for name, parameter in state["model"].named_parameters():
            mine, wanted = _local(parameter, full[name])
            mine.copy_(wanted)
    state["progress"]["step"] = step


def is_of(state: dict[str, Any], step: int) -> bool:
    full = tensors_of(step)
    pairs = (_local(parameter.detach(), full[name]) for name, parameter in state["model"].named_parameters())
    return state["progress"] == {"step": step} and all(torch.equal(*pair) for pair in pairs)


def manager_of(
    root: str | Path, state: dict[str, Any], *, every: int | None = 1, keep: int = 2
) -> holdfast.CheckpointManager:
    """every: interval of checkpoints; exports are due at every step."""
    home = Path(root)
    kept = holdfast.Keep(last=keep)
    export = holdfast.HFExport(
        home / "hf", every=1, keep=kept, assets=home / "assets", max_shard_bytes=SHARD_BYTES, nice=0
    )
    config = settings(every=every, keep=kept)
    return holdfast.CheckpointManager(home / "checkpoints", state, config=config, exports=[export])


def write_assets(root: Path) -> None:
    for name, text in ASSETS.items():
        path = root / "assets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def exports(root: str) -> None:
    """A start, two steps at which a checkpoint and an export are due, the end."""
    _run(root, every=1, steps=2)


def exports_alone(root: str) -> None:
    """One step at which nothing else is due."""
    _run(root, every=None, steps=1)


def _run(root: str, *, every: int | None, steps: int) -> None:
    reins, world = begin()
    state = build(world)
    with reins.window("life"):
        try:
            _live(reins, root, state, every=every, steps=steps)
        except holdfast.HoldfastError as error:
            reins.note("refused", error=type(error).__name__, message=str(error))
    reins.note("closed")
    if world > 1:
        dist.destroy_process_group()


def _live(reins: Reins, root: str, state: dict[str, Any], *, every: int | None, steps: int) -> None:
    kinds = ["export"] if every is None else ["checkpoint", "export"]
    with manager_of(root, state, every=every) as manager:
        step = manager.restore()
        assert step is not None
        assert is_of(state, step), f"step {step} came back as something else"
        reins.note("restored", step=step)
        for number in range(step + 1, step + 1 + steps):
            fill(state, number)
            handles = manager.step(number)
            for kind, handle in zip(kinds, handles, strict=True):
                handle.add_done_callback(lambda ended, kind=kind: _tell_end(reins, kind, ended))
            errors = [handle.exception() for handle in handles]
            manager.wait_staged()
            if any(error is not None and not isinstance(error.__cause__, holdfast.EngineDied) for error in errors):
                return  # a rank is gone: to try again would only take time


def _tell_end(reins: Reins, kind: str, handle: holdfast.SaveHandle) -> None:
    tell(reins, handle.exception(), kind=kind, step=handle.step, attempt=handle.attempt)
