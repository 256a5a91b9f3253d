"""Train with Lightning, lose the trainer in the middle, and resume: the losses are what they would have been.

    python examples/lightning_fit.py --out out/lightning

The strategy saves all of a run, random states included; `HoldfastModelCheckpoint` lets training go on meanwhile. It
takes a few seconds on a CPU.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from holdfast.integrations.lightning import HoldfastModelCheckpoint, HoldfastStrategyMixin


class Single(HoldfastStrategyMixin, SingleDeviceStrategy):
    """One device; put `HoldfastStrategyMixin` before `DDPStrategy` or `ModelParallelStrategy` for more."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)


class Losses(Callback):
    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, _: Net, outputs: dict, *__: object) -> None:
        self.by_step[trainer.global_step] = outputs["loss"].item()


def fit(out: Path, epochs: int, resume: str | None = None) -> dict[int, float]:
    torch.manual_seed(1)
    losses = Losses()
    saver = HoldfastModelCheckpoint(dirpath=out, monitor="step", mode="max", save_top_k=2, save_last="link")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = Single(device="cpu")
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=epochs, callbacks=[losses, saver], **options)
    trainer.fit(Net(), ckpt_path=resume)
    return losses.by_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/lightning"))
    out = parser.parse_args().out
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    whole = fit(out / "whole", epochs=4)
    first = fit(out / "resumed", epochs=2)
    second = fit(out / "resumed", epochs=4, resume="last")
    assert first | second == whole, "a resumed run must repeat the losses of an uninterrupted one"
    print(f"resumed after step {max(first)}: {len(second)} losses as in an uninterrupted run")
    print(*sorted(path.name for path in (out / "resumed").iterdir()), sep="\n")


if __name__ == "__main__":
    main()
