"""Train a small model with Lightning, saving by Holdfast or by Lightning itself; kill it on request.

lightning_job.py OUT EPOCHS [--plan single|ddp|fsdp2] [--save mixin|plugin|stock] [--last link|true] [--every N]
                 [--stateful] [--random] [--kill N] [--resume PATH] [--resave] [--place URL]
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
import warnings
from pathlib import Path

import torch
from jobs import leave, note_loss
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import (
    HoldfastCheckpointIO,
    HoldfastModelCheckpoint,
    HoldfastRandomState,
    HoldfastStrategyMixin,
)
from holdfast.integrations.lightning.flights import is_there
from holdfast.integrations.lightning.trainer import _flights_of

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
BATCH, SAMPLES = 4, 48


class Single(HoldfastStrategyMixin, SingleDeviceStrategy):
    pass


class DDP(HoldfastStrategyMixin, DDPStrategy):
    pass


class FSDP2(HoldfastStrategyMixin, ModelParallelStrategy):
    pass


class Net(LightningModule):
    def __init__(self, width: int = 32, *, stateful: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.drop, self.last = nn.Linear(8, width), nn.Dropout(0.3), nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.first, mesh=mesh)
            fully_shard(self.last, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        self.seen += 1
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loader(self, *, shuffle: bool) -> DataLoader:
        x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        if self.hparams["stateful"]:
            from torchdata.stateful_dataloader import StatefulDataLoader
            from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

            if shuffle and self.trainer.world_size > 1:  # else Lightning wraps a sampler whose order nobody saves
                return StatefulDataLoader(data, batch_size=BATCH, sampler=StatefulDistributedSampler(data))
            return StatefulDataLoader(data, batch_size=BATCH, shuffle=shuffle)
        return DataLoader(data, batch_size=BATCH, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(shuffle=False)


class Watch(Callback):
    """Note the loss of every step, and end the process when it is told to."""

    def __init__(self, out: Path, place: str, kill: int | None, *, in_flight: bool) -> None:
        self.out, self.place, self.kill, self.in_flight = out, place, kill, in_flight

    def on_train_batch_end(self, trainer: Trainer, module: Net, outputs: object, *_: object) -> None:
        mean = trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")
        if trainer.is_global_zero:
            note_loss(self.out / "losses.jsonl", trainer.global_step, float(mean))
        if self.kill == trainer.global_step:
            while not is_there(f"{self.place}/last.ckpt"):
                time.sleep(0.01)  # a machine may be slower to save than to train
            if not self.in_flight and (flights := _flights_of(trainer)) is not None:
                flights.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--plan", default="single")
    parser.add_argument("--save", default="mixin")
    parser.add_argument("--last", default="true")
    parser.add_argument("--every", type=int)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--resume")
    parser.add_argument("--place", help="where checkpoints go; in OUT by default")
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--random", action="store_true", help="have the callback for random states, whoever saves")
    parser.add_argument("--resave", action="store_true", help="save what was resumed, though nothing is left to train")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Net(stateful=args.stateful)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    mine, stock, options = {
        "single": (Single, SingleDeviceStrategy, {"device": "cpu"}),
        "ddp": (DDP, DDPStrategy, {}),
        "fsdp2": (FSDP2, ModelParallelStrategy, {"data_parallel_size": world, "tensor_parallel_size": 1}),
    }[args.plan]
    strategy = (mine if args.save == "mixin" else stock)(**options)
    saver = ModelCheckpoint if args.save == "stock" else HoldfastModelCheckpoint
    place = args.place or str(args.out / "checkpoints")
    checkpoints = saver(
        dirpath=place,
        save_last="link" if args.last == "link" else True,
        save_top_k=2,
        monitor="step",
        mode="max",
        every_n_train_steps=args.every,
    )
    callbacks = [Watch(args.out, place, args.kill, in_flight=args.every is not None), checkpoints]
    if args.random or args.save != "mixin":
        callbacks.append(HoldfastRandomState())
    trainer = Trainer(
        accelerator="cpu",
        devices="auto" if args.plan == "single" else world,
        strategy=strategy,
        plugins=[HoldfastCheckpointIO()] if args.save == "plugin" else None,
        callbacks=callbacks,
        max_epochs=args.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.out,
    )
    torch.manual_seed(2 + int(os.environ.get("RANK", "0")))
    trainer.fit(model, ckpt_path=args.resume)
    if args.resave:
        trainer.save_checkpoint(args.out / "checkpoints" / "last.ckpt")
    leave()


if __name__ == "__main__":
    main()
