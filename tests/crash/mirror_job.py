"""A trainer with a mirror, to be killed: python mirror_job.py ROOT MIRROR STEPS IO_LIMIT."""

from __future__ import annotations

import sys

import torch
from torch import nn

from holdfast import CheckpointConfig, CheckpointManager, events

MB = 1 << 20


def main(root: str, mirror: str, steps: int, limit: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB: some seconds at 1 MiB/s
    config = CheckpointConfig(every=1, keep=None, io_limit_bytes_per_s=limit or None)
    events.add_hook(lambda event: print(event.kind, event.step, flush=True))
    with CheckpointManager(root, {"model": model}, config=config, mirror=mirror) as manager:
        found = manager.restore()
        print("restored", found, int(model.weight[0, 0]), flush=True)
        for step in range((found or 0) + 1, steps + 1):
            nn.init.constant_(model.weight, float(step))
            (handle,) = manager.step(step)
            handle.result()
            print("saved", step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
