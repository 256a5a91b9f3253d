"""XTuner: `TrainEngine.async_save_dcp` by Holdfast, beside the `dcp.async_save` that XTuner's own makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from benchmarks.adapters.turns import Turns, Way, a_model, train
from holdfast.integrations.xtuner import TrainEngine


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = TrainEngine(model, optimizer)
    waiting: list[Any] = []

    def own(path: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
        waiting.append(dcp.async_save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path))

    def ours(path: Path) -> None:
        waiting.append(engine.async_save_dcp(path))

    def wait_saved() -> None:
        waiting.pop().result()

    turns = Turns({"own": Way(own, wait_saved), "holdfast": Way(ours, wait_saved)})
    train(turns, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
