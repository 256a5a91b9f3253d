"""accelerate: `Accelerator.save_state`, and Holdfast's in its place, both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import holdfast
from benchmarks.adapters.turns import WIDTH, Turns, Way, a_model
from holdfast.integrations.accelerate import async_save_state, save_state


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = a_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    handles: list[Any] = []

    def asynchronously(path: Path) -> None:
        handles.append(async_save_state(accelerator, path))

    def wait_saved() -> None:
        handles.pop().result(600)

    own: Callable[[Path], Any] = accelerator.save_state
    turns = Turns(
        {
            "own": Way(lambda path: own(str(path))),
            "holdfast-sync": Way(lambda path: save_state(accelerator, path)),
            "holdfast": Way(asynchronously, wait_saved),
        }
    )
    while not turns.after_step():
        accelerator.backward(model(torch.randn(8, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    holdfast.release()


if __name__ == "__main__":
    main()
