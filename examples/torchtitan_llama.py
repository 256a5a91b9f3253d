"""Train torchtitan's debug model with Holdfast as its checkpoint manager; run it again and it goes on.

    torchrun --nproc-per-node=2 examples/torchtitan_llama.py --out out/titan --steps 20

With an accelerator all it takes is one line of a configuration: ``config.checkpoint = CheckpointManager.Config(...)``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/titan"))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        from torchtitan_on_cpu import use_cpu

        use_cpu()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")

    from torchtitan.tools.logging import init_logger

    from holdfast.integrations.torchtitan import CheckpointManager
    from torchtitan_on_cpu import debug_config

    init_logger()
    config = debug_config(args.out)
    config.training.steps = args.steps
    config.lr_scheduler.total_steps = 1000
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=5,
        keep_latest_k=2,
        last_save_model_only=False,
    )
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
