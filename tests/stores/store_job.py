"""A training job whose checkpoints go to a store: what `test_store_training` starts under torchrun, kills and resumes.

torchrun … store_job.py ROOT OUT STEPS KILL_AT
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "crash"))

from saving_job import Training, start

import holdfast


def main(root: str, out: str, steps: int, kill_at: int) -> None:
    rank, world = start(out)
    training = Training(rank, world)
    settings = holdfast.CheckpointConfig(every=2, keep=holdfast.Keep(last=2), persist_timeout=60.0, commit_timeout=60.0)
    with holdfast.CheckpointManager(root, training.state, config=settings) as manager:
        first = manager.restore() or 0
        for step in range(first + 1, steps + 1):
            training.step()
            manager.step(step)
            if step == kill_at:
                time.sleep(0.02 * rank)  # in the middle of this step's save, and not all at one moment
                os.kill(os.getpid(), signal.SIGKILL)
    Path(f"{out}-{rank}.json").write_text(json.dumps({"first": first, "digest": training.digest()}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
