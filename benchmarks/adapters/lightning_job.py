"""Lightning: a checkpoint by its own strategy, and by one with Holdfast's mixin as its `ModelCheckpoint` saves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from benchmarks.adapters.turns import WIDTH, Turns, Way, a_model
from holdfast.integrations.lightning import HoldfastStrategyMixin


class Single(HoldfastStrategyMixin, SingleDeviceStrategy):
    """One device."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = a_model()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(10_000, WIDTH), 8)


class Saves(Callback):
    def __init__(self) -> None:
        self.trainer: Any = None
        self.turns: Turns | None = None
        self.files = TorchCheckpointIO()

    def _own(self, path: Path) -> None:
        strategy = self.trainer.strategy
        with _methods_of(Strategy, strategy):
            self.files.save_checkpoint(
                self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False), str(path)
            )

    def _holdfast(self, path: Path) -> None:
        with self.trainer.strategy._flights.asynchronous():
            self.trainer.save_checkpoint(path)

    def _wait_saved(self) -> None:
        self.trainer.strategy._flights.wait()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.trainer = trainer
        if self.turns is None:
            self.turns = Turns({"own": Way(self._own), "holdfast": Way(self._holdfast, self._wait_saved)})
        trainer.should_stop = self.turns.after_step()


class _methods_of:  # noqa: N801 - used like a function
    """Have ``strategy`` give its states as ``kind`` does."""

    def __init__(self, kind: type[Strategy], strategy: Any) -> None:
        self._kind, self._strategy = kind, strategy

    def __enter__(self) -> None:
        for name in ("lightning_module_state_dict", "optimizer_state"):
            vars(self._strategy)[name] = getattr(self._kind, name).__get__(self._strategy)

    def __exit__(self, *_: object) -> None:
        for name in ("lightning_module_state_dict", "optimizer_state"):
            del vars(self._strategy)[name]


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(
        strategy=Single(device=torch.device("cpu")),
        accelerator="cpu",
        max_epochs=100,
        callbacks=[Saves()],
        enable_checkpointing=False,
        **quiet,
    ).fit(Net())


if __name__ == "__main__":
    main()
