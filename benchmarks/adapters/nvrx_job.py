"""NVIDIA Resiliency Extension: its asynchronous queue and writer, and Holdfast's of the same names.

Its own copies no tensor of the CPU: what the worker writes may have changed meanwhile, so it is held for less work.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.adapters.turns import Turns, Way, a_model, train

OWN = "nvidia_resiliency_ext.checkpointing.async_ckpt"


def names_of(kind: str) -> dict[str, Any]:
    if kind == "holdfast":
        return vars(importlib.import_module("holdfast.integrations.nvrx"))
    found: dict[str, Any] = {}
    for module in ("core", "filesystem_async", "state_dict_saver"):
        found |= vars(importlib.import_module(f"{OWN}.{module}"))
    return found


def without_device(preload_fn: Callable[[], Any]) -> Any:
    """Runs in the worker, which waits for a device there otherwise."""
    torch.cuda.synchronize = lambda *_: None
    return preload_fn()


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def way(kind: str) -> Way:
        names = names_of(kind)
        queue = names["AsyncCallsQueue"]()

        def save(path: Path) -> None:
            path.mkdir(parents=True, exist_ok=True) if kind == "own" else None
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            writer = names["FileSystemWriterAsync"](path)
            planned = names["save_state_dict_async_plan"](state, writer, None)
            save_fn, preload_fn, save_args = writer.get_save_function_and_args()
            finalize = [lambda: names["save_state_dict_async_finalize"](*planned)]
            if kind == "own":
                preload_fn = functools.partial(without_device, preload_fn)
            queue.schedule_async_request(names["AsyncRequest"](save_fn, save_args, finalize, preload_fn=preload_fn))

        # no_dist: its own exchange between ranks needs a device
        return Way(save, lambda: queue.maybe_finalize_async_calls(blocking=True, no_dist=kind == "own"))

    turns = Turns({"own": way("own"), "holdfast": way("holdfast")})
    train(turns, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
