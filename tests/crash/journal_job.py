"""A job that saves until it is killed, and then to its end: what test_journal_kills.py starts under torchrun."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import holdfast

STEPS, KILLED_AT = 6, 4


def main(root: str, killed: bool) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=2))
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        begun = manager.restore() or 0
        for step in range(begun + 1, STEPS + 1):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            handles = manager.step(step, {"loss": 1.0 / step})
            for handle in handles:
                handle.result()
            if killed and step == KILLED_AT:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "killed")
    dist.destroy_process_group()  # without the model: DDP that outlives its group may wait for gloo forever
