"""Train with every checkpoint in a bucket, be killed in a save, resume bit for bit, and export there.

    python examples/bucket.py --root s3://bucket/runs/a --kill-at 4  # dies while step 4 is being saved
    python examples/bucket.py --root s3://bucket/runs/a              # goes on; or gs://…, az://…
    python examples/bucket.py --root memory://bucket-example         # no bucket at hand: shared memory of this host

Endpoint and credentials come from the environment: see docs/object-stores.md.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import nn

import holdfast

STEPS, EVERY = 6, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 256)
        self.outer = nn.Linear(256, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.outer(torch.relu(self.inner(inputs)))
        return found


def train(root: str, kill_at: int | None) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    config = holdfast.CheckpointConfig(every=EVERY, keep=holdfast.Keep(last=2))
    with holdfast.CheckpointManager(f"{root}/checkpoints", state, config=config) as manager:
        first = (manager.restore() or 0) + 1
        print(f"starting with step {first}")
        handles: list[holdfast.SaveHandle] = []
        for step in range(first, STEPS + 1):
            inputs = torch.randn(32, 64)  # the random number generator is part of the checkpoint, too
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step} loss {loss.item().hex()}")
            handles += manager.step(step)
            if step == kill_at:
                for earlier in handles[:-1]:
                    earlier.result()
                os.kill(os.getpid(), signal.SIGKILL)  # nothing is half-visible: the next start finishes or removes it
    newest = holdfast.open(f"{root}/checkpoints")
    print(f"published: step {newest.step}, verified: {newest.verify().ok}")
    where = holdfast.export_hf(newest, f"{root}/hf", overwrite=True)
    found = {"model": Model()}
    holdfast.load(found, where)
    same = all(
        torch.equal(one, other) for one, other in zip(found["model"].parameters(), model.parameters(), strict=True)
    )
    print(f"exported, and the export loads: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with checkpoints in a bucket.")
    parser.add_argument("--root", default="memory://bucket-example", help="URL below which checkpoints go")
    parser.add_argument("--kill-at", type=int, default=None, help="die while this step is being saved")
    args = parser.parse_args()
    train(args.root, args.kill_at)


if __name__ == "__main__":
    main()
