"""Train torchtitan's debug model with its own trainer; checkpoints by Holdfast or by torchtitan; kill it on request.

torchtitan_job.py OUT STEPS [--save holdfast|legacy|stock] [--kill N] [--option NAME=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jobs import ROOT, leave, note_loss

sys.path.insert(0, str(ROOT / "examples"))
from torchtitan_on_cpu import debug_config, use_cpu

DEFAULTS: dict[str, Any] = {"interval": 3, "keep_latest_k": 2, "last_save_model_only": False}


def checkpoint_config(save: str, options: dict[str, Any]) -> Any:
    if save == "stock":
        from torchtitan.components.checkpointer import CheckpointManager
    else:
        from holdfast.integrations.torchtitan import CheckpointManager
    return CheckpointManager.Config(enable=True, **options)


def with_legacy(trainer: Any, options: dict[str, Any]) -> None:
    """Put the older manager in the place of the new one, with a configuration as it was then."""
    from holdfast.integrations.torchtitan import LegacyCheckpointManager

    config = SimpleNamespace(enable_checkpoint=True, folder="checkpoint", **options)
    manager = LegacyCheckpointManager(
        dataloader=trainer.dataloader,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        states={"train_state": trainer},
        job_config=SimpleNamespace(checkpoint=config, job=SimpleNamespace(dump_folder=trainer.config.dump_folder)),
    )
    trainer.checkpointer = manager


def lose_node_in_save(checkpoints: Path, step: int) -> None:
    """Kill this process and its engine, which would sweep, as soon as the save of ``step`` is on disk in part."""

    def watch() -> None:
        while not any(checkpoints.glob(f".step-{step}.*.incomplete/.metadata")):
            time.sleep(0.0005)
        for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--save", default="holdfast")
    parser.add_argument("--kill", type=int)
    parser.add_argument("--kill-saving", type=int, help="lose the node while the save of this step is on disk in part")
    parser.add_argument("--option", action="append", default=[])
    args = parser.parse_args()
    options = DEFAULTS | {name: json.loads(value) for name, _, value in (one.partition("=") for one in args.option)}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")
    use_cpu()
    from torchtitan.tools.logging import init_logger

    init_logger()
    config = debug_config(args.out)
    config.training.steps = args.steps
    config.lr_scheduler.total_steps = 40
    config.checkpoint = checkpoint_config(args.save, options)
    trainer = config.build()
    if args.save == "legacy":
        with_legacy(trainer, options)
    if args.kill_saving:
        lose_node_in_save(args.out / "checkpoint", args.kill_saving)
    log, save = trainer.metrics_processor.log, trainer.checkpointer.save
    is_first = os.environ["RANK"] == "0"

    def note(step: int, loss: float, *rest: Any, **more: Any) -> None:
        log(step, loss, *rest, **more)
        if is_first:
            note_loss(args.out / "losses.jsonl", step, float(loss))
        if args.kill == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def timed(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        result = save(*given, **named)
        if is_first and (result or args.save == "legacy"):
            print(f"HELD {time.perf_counter() - begin:.4f} s at {trainer.step}")
        return result

    trainer.metrics_processor.log, trainer.checkpointer.save = note, timed
    try:
        trainer.train()
    except Exception:
        trainer.close()
        raise
    trainer.close()
    import torch

    torch.distributed.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
