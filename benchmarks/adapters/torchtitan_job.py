"""torchtitan: its debug model in its own trainer, saved by its manager (waiting, asynchronous) and by Holdfast's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from torchtitan_on_cpu import debug_config, use_cpu


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29519")
    use_cpu()
    from torchtitan.components.checkpointer import CheckpointManager as Own

    from benchmarks.adapters.turns import Turns, Way
    from holdfast.integrations.torchtitan import CheckpointManager

    folder = Path(sys.argv[1]) / ".managers"
    config = debug_config(folder / "job")
    config.training.steps = 100_000
    config.lr_scheduler.total_steps = 1000
    config.checkpoint = Own.Config(enable=True, interval=1, keep_latest_k=0, folder=str(folder / "own-sync"))
    trainer = config.build()

    def manager(kind: Any, name: str, **options: Any) -> Any:
        given = kind.Config(enable=True, interval=1, keep_latest_k=0, folder=str(folder / name), **options)
        return given.build(
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer},
            sd_adapter=None,
            base_folder="",
        )

    managers = {
        "own-sync": trainer.checkpointer,
        "own": manager(Own, "own", async_mode="async"),
        "holdfast": manager(CheckpointManager, "holdfast", async_mode="async"),
    }

    def way(name: str) -> Way:
        def save(_: Path) -> None:
            trainer.checkpointer = managers[name]
            trainer.checkpointer.save(trainer.step)

        def wait_saved() -> None:
            if name != "own-sync":
                managers[name]._wait_for_saving()

        return Way(save, wait_saved)

    turns = Turns({name: way(name) for name in managers})
    batches = trainer.batch_generator(trainer.dataloader)
    while not turns.after_step():
        trainer.step += 1
        trainer.train_step(batches)
    for each in managers.values():
        each.close()
    import torch

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
