"""Train through the seam of XTuner's engine, with its options and its directories; interrupt it and run it again.

    python examples/xtuner_engine.py OUT [STEPS]

With XTuner itself, mix `TrainEngineMixin` into its `TrainEngine` and leave the rest to its trainer:

    class Engine(TrainEngineMixin, xtuner.v1.engine.TrainEngine): ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from holdfast.integrations.xtuner import TrainEngine, TrainerCheckpoints


class Batches:
    """Numbered batches; the state is the next number."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> torch.Tensor:
        self.number += 1
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(self.number))

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def main(out: Path, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
    engine = TrainEngine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 5, gamma=0.5)
    batches = Batches()
    with TrainerCheckpoints(
        out,
        engine,
        total_step=steps,
        checkpoint_interval=4,
        checkpoint_maxkeep=2,
        snapshot_interval=1,
        async_checkpoint=True,
        hf_interval=steps,
        async_hf_export=True,
        auto_resume=True,
    ) as run:
        state = run.resume(dataloader=batches, lr_scheduler=scheduler)
        first = 1 if state is None else state["cur_step"] + 1
        for step in range(first, steps + 1):
            x = batches.next()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            scheduler.step()
            print(step, loss.item().hex(), flush=True)
            run.maybe_save(step, dataloader=batches, lr_scheduler=scheduler)
    print("checkpoints:", *(Path(path).name for path in run.meta.latest_exp.checkpoints))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10)
