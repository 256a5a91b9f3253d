"""Adapters that save to a bucket, by the frameworks' classes; and those that can't: they say so and make nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_script

import holdfast
from holdfast.catalog.root import is_checkpoint
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.storage.local import open_storage

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, in which nothing may be made that is called like a URL."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list(tmp_path.rglob("*:"))


def names(place: str) -> list[str]:
    """The checkpoints at ``place``; SeaweedFS still lists what has become empty."""
    storage = open_storage(place)
    return [name for name in storage.list_dir("") if is_checkpoint(storage, name)]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Lightning. ----------------------------------------------------------------------------------------------------------


def lightning_trainer(place: str | Path | None, how: str, *, epochs: int = 3, root: str = ".", **options: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from holdfast.integrations.lightning import (
        HoldfastCheckpointIO,
        HoldfastModelCheckpoint,
        HoldfastRandomState,
        HoldfastStrategyMixin,
    )

    class Single(HoldfastStrategyMixin, SingleDeviceStrategy):
        pass

    given = {"dirpath": place, "monitor": "step", "mode": "max", "save_top_k": 2, "save_last": True, **options}
    return Trainer(
        accelerator="cpu",
        strategy=(Single if how == "mixin" else SingleDeviceStrategy)(device="cpu"),
        plugins=[HoldfastCheckpointIO()] if how == "plugin" else None,
        callbacks=[HoldfastModelCheckpoint(**given), HoldfastRandomState()],
        max_epochs=epochs,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning_net() -> Any:
    from lightning.pytorch import LightningModule
    from torch.utils.data import DataLoader, TensorDataset

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.layer(torch.nn.functional.dropout(batch[0], 0.3)).square().sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(torch.ones(8, 4) * torch.arange(8)[:, None]), batch_size=2, shuffle=True)

    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("how", ["mixin", "plugin"])
def test_lightning_saves_keeps_and_resumes_in_a_bucket(place: str, how: str) -> None:
    pytest.importorskip("lightning")
    whole = lightning_net()
    lightning_trainer(f"{place}-whole", how).fit(whole)
    first = lightning_trainer(place, how, epochs=2)
    first.fit(lightning_net())
    assert names(place) == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    assert first.checkpoint_callback.best_model_path == f"{place}/epoch=1-step=8.ckpt"
    again, net = lightning_trainer(place, how), lightning_net()
    again.fit(net, ckpt_path="last")
    assert names(place) == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    for name in names(place):
        assert holdfast.open(f"{place}/{name}").verify().ok
    assert torch.equal(net.layer.weight, whole.layer.weight)


def test_lightning_is_killed_and_resumes_in_a_bucket(place: str, tmp_path: Path) -> None:
    """On two ranks, within an epoch; what it trains again has the same losses."""
    pytest.importorskip("lightning")
    job, options = Path(__file__).with_name("lightning_job.py"), ["--plan", "ddp", "--stateful", "--every", 4]
    run_script(job, tmp_path, 2, *options, "--place", place, "--kill", 9, nproc=2, killed=True)
    run_script(job, tmp_path, 2, *options, "--place", place, "--resume", "last", nproc=2)
    noted = [tuple(json.loads(line)) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert len(noted) > len(set(noted)) == 12
    assert holdfast.open(f"{place}/last.ckpt").verify().ok


def test_lightning_takes_urls_wherever_it_takes_paths(place: str) -> None:
    pytest.importorskip("lightning")
    trainer, net = lightning_trainer(None, "mixin", epochs=1, root=place), lightning_net()
    trainer.fit(net)
    assert names(f"{place}/checkpoints") == ["epoch=0-step=4.ckpt", "last.ckpt"]
    trainer.save_checkpoint(f"{place}/mine.ckpt")
    trainer.save_checkpoint(f"file://{Path.cwd()}/on-disk.ckpt")
    assert holdfast.open("on-disk.ckpt").verify().ok
    again = lightning_trainer(f"{place}/other", "plugin", epochs=2)
    again.fit(lightning_net(), ckpt_path=f"{place}/mine.ckpt")
    assert again.global_step == 8
    assert again.strategy.checkpoint_io.load_checkpoint(f"{place}/mine.ckpt")["global_step"] == 4
    again.strategy.remove_checkpoint(f"{place}/mine.ckpt")
    assert names(place) == []
    with pytest.raises(CheckpointNotFound):
        again.strategy.checkpoint_io.load_checkpoint(f"{place}/mine.ckpt")


def test_lightning_refuses_what_a_bucket_has_not(place: str) -> None:
    pytest.importorskip("lightning")
    with pytest.raises(ConfigError, match="which has no links"):
        lightning_trainer(place, "mixin", save_last="link")
    with pytest.raises(ConfigError, match="which has no links"):
        lightning_trainer(None, "mixin", root=place, save_last="link").fit(lightning_net())
    for odd in (Path(place), "hdfs://host/run"):
        with pytest.raises(ConfigError) as caught:
            lightning_trainer(odd, "mixin")
        assert caught.value.field == "dirpath"
        with pytest.raises(ConfigError):
            lightning_trainer("run", "mixin").strategy.save_checkpoint({"loops": {}}, odd)


# torchtitan. ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchtitan_is_killed_and_resumes_in_a_bucket(place: str, tmp_path: Path) -> None:
    """By its own trainer; the steps that it trains again have the same losses, and `keep_latest_k` deletes."""
    pytest.importorskip("torchtitan.components.checkpointer.base")
    job, options = Path(__file__).with_name("torchtitan_job.py"), ["--option", f'folder="{place}"']
    run_script(job, tmp_path, 9, *options, "--kill", 8, killed=True)
    run_script(job, tmp_path, 9, *options)
    noted = [tuple(json.loads(line)) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert len(noted) > len(set(noted)) == 9
    assert names(place) == ["step-6", "step-9"]
    assert holdfast.open(place).verify().ok


# accelerate. ---------------------------------------------------------------------------------------------------------


def accelerated(place: str | None, **naming: Any) -> tuple[Any, Any]:
    """An accelerator with a model that has trained a step, and its weight."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(place, **naming))
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(8, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model.weight


def test_accelerate_saves_keeps_and_resumes_in_a_bucket(place: str) -> None:
    pytest.importorskip("accelerate")
    from holdfast.integrations.accelerate import async_save_state, load_state, save_state

    named = {"automatic_checkpoint_naming": True, "total_limit": 2}
    accelerator, weight = accelerated(place, **named)
    with pytest.raises(CheckpointNotFound, match="has no checkpoint of this run"):
        load_state(accelerator)
    for _ in range(3):
        save_state(accelerator)
    assert names(f"{place}/checkpoints") == ["checkpoint_1", "checkpoint_2"]
    async_save_state(accelerator, metrics={"loss": 1.0}).result()
    until(lambda: names(f"{place}/checkpoints") == ["checkpoint_2", "checkpoint_3"])  # after its handle has ended
    again, other = accelerated(place, **named)
    load_state(again)
    assert torch.equal(other, weight)
    assert save_state(again).path == f"{place}/checkpoints/checkpoint_4"
    mine, last = accelerated(None)
    save_state(mine, f"{place}/mine")
    save_state(mine, f"{place}/mine")  # replaces it
    load_state(again, f"{place}/mine")
    assert torch.equal(other, last)
    for odd in (Path(place), "hdfs://host/run"):
        with pytest.raises(ConfigError):
            save_state(mine, odd)
        with pytest.raises(ConfigError):
            load_state(mine, odd)
        with pytest.raises(ConfigError):
            save_state(accelerated(odd, **named)[0])


# Others. -------------------------------------------------------------------------------------------------------------


def test_xtuners_engine_saves_and_loads_in_a_bucket(place: str) -> None:
    """Its trainer's directories have links, and a record beside them: on a disk only."""
    from holdfast.integrations.xtuner import TrainEngine, TrainerCheckpoints

    model = torch.nn.Linear(4, 2)
    engine = TrainEngine(model, torch.optim.AdamW(model.parameters()))
    engine.save_dcp(f"{place}/one/weights")
    saved = engine.async_save_dcp(f"{place}/two/weights").result(60.0)
    assert saved == f"{place}/two/weights"
    weight = model.weight.detach().clone()
    model.weight.data.zero_()
    engine.load_dcp(saved)
    assert torch.equal(model.weight, weight)
    for odd in (place, Path(place)):
        with pytest.raises(ConfigError) as caught:
            TrainerCheckpoints(odd, engine)
        assert caught.value.field == "work_dir"
    with TrainerCheckpoints("work", engine) as run, pytest.raises(ConfigError, match="object stores are not taken"):
        run.resume(f"{place}/one")


def huggingface_trainer(out: str | Path, **options: Any) -> Any:
    from torch.utils.data import TensorDataset
    from transformers import TrainingArguments

    from holdfast.integrations.transformers import HoldfastTrainer

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (super().forward(x) - labels).square().mean()}

    def collated(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([row[0] for row in rows]), "labels": torch.stack([row[1] for row in rows])}

    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    args = TrainingArguments(out, max_steps=6, save_steps=2, save_total_limit=2, **quiet)
    data = TensorDataset(torch.ones(48, 4), torch.ones(48, 1))
    return HoldfastTrainer(Net(4, 1), args, train_dataset=data, data_collator=collated, **options)


def test_transformers_copies_to_a_bucket_and_saves_on_a_disk(place: str) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    trainer = huggingface_trainer("run", mirror=place)
    trainer.train()
    assert names("run") == ["checkpoint-4", "checkpoint-6"]
    assert names(place)[-1] == "checkpoint-6"
    state = {"model": torch.nn.Linear(4, 1)}
    holdfast.load(state, f"{place}/checkpoint-6", include="model")
    assert torch.equal(state["model"].weight, trainer.model.weight)
    assert holdfast.open(f"{place}/checkpoint-6").read_file("trainer_state.json")
    with pytest.raises(ConfigError, match="copy it to"):
        huggingface_trainer("other").train(resume_from_checkpoint=f"{place}/checkpoint-6")


@pytest.mark.parametrize("out", ["s3://bucket/run", Path("s3://bucket/run"), "file:///run", "hdfs://host/run"])
def test_transformers_refuses_urls(out: str | Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    with pytest.raises(ConfigError, match=r"mirror=|lost a slash") as caught:
        huggingface_trainer(out)
    assert caught.value.field == "output_dir"
    assert not list(Path.cwd().iterdir())


def test_nvrx_refuses_urls() -> None:
    from holdfast.integrations.nvrx import FileSystemWriterAsync, TorchAsyncCheckpoint

    checkpoint = TorchAsyncCheckpoint()
    for odd in ("s3://bucket/x.pt", Path("s3://bucket/x.pt"), "hdfs://host/x.pt"):
        with pytest.raises(ConfigError):
            checkpoint.async_save({"x": torch.ones(1)}, odd)
        with pytest.raises(ConfigError):
            FileSystemWriterAsync(odd)
    checkpoint.close()


@pytest.mark.parametrize("root", ["s3://bucket/run", Path("s3://bucket/run"), "hdfs://host/run"])
def test_torchft_refuses_urls(root: str | Path) -> None:
    """A folder is handed on from replica to replica by its lock."""
    pytest.importorskip("torchft")
    from holdfast.integrations.torchft import ReplicaCheckpoints

    with pytest.raises(ConfigError) as caught:
        ReplicaCheckpoints(root, object(), {"w": torch.ones(1)}, replica_id=0)
    assert caught.value.field == "root"
