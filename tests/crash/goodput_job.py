"""A job that keeps its own book of what it does: what test_goodput.py starts under torchrun, kills and resumes.

    python goodput_job.py ROOT BOOK STEPS KILLED_AT

The book has a JSON line for each thing that happens on rank 0, by the job's own clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.catalog import journal
from holdfast.integrations.telemetry import measurements

journal.STEP_EVERY_S = 0.0
journal.PUT_EVERY_S = 0.05
STEP_S = 0.05


def main(root: str, book: str, steps: int, killed_at: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def note(what: str, **fields: Any) -> None:
        with open(f"{book}.{rank}", "a") as out:
            out.write(json.dumps({"t": time.time(), "what": what, **fields}) + "\n")

    def hear(event: holdfast.Event) -> None:
        for name, value, labels in measurements(event):
            note("metric", name=name, value=value, labels=labels)

    holdfast.add_hook(hear)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters())
    note("start")
    config = holdfast.CheckpointConfig(every=4, keep=None)
    with holdfast.CheckpointManager(root, {"model": model, "optimizer": optimizer}, config=config) as manager:
        begun = manager.restore() or 0
        note("resumed", step=begun)
        for step in range(begun + 1, steps + 1):
            time.sleep(STEP_S)
            optimizer.zero_grad()
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
            handles = manager.step(step, {"loss": 1.0 / step})
            note("step", step=step)
            for handle in handles:
                handle.result()
                note("saved", step=step, stall_s=handle.stats.stall_s, began_s=handle.began_s)
            dist.barrier()
            if step == killed_at:
                time.sleep(0.3)  # the journal's thread writes
                note("killed", step=step)
                os.kill(os.getpid(), signal.SIGKILL)
    note("end")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    dist.destroy_process_group()  # without the model: DDP that outlives its group may wait for gloo forever
