"""What `holdfast.integrations.lightning` does with one save: what it holds, refuses, and waits for; in this process."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.engine.shared import process_engine
from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError
from holdfast.integrations.lightning import (
    HoldfastCheckpointIO,
    HoldfastModelCheckpoint,
    HoldfastRandomState,
    HoldfastStrategyMixin,
    export_ckpt,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]


class Single(HoldfastStrategyMixin, SingleDeviceStrategy):
    pass


class Net(LightningModule):
    def __init__(self, **hparams: object) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.layer = torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.norm(self.layer(batch[0])).square().sum() + self.layer.weight.sum()

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val", -float(self.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def _loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(8, 4) * torch.arange(8)[:, None]), batch_size=2)

    train_dataloader = val_dataloader = _loader


def trainer_of(
    out: Path, *callbacks: Callback, plugin: HoldfastCheckpointIO | None = None, **options: object
) -> Trainer:
    return Trainer(
        accelerator="cpu",
        strategy=Single(device="cpu") if plugin is None else SingleDeviceStrategy(device="cpu"),
        plugins=None if plugin is None else [plugin],
        callbacks=list(callbacks),
        default_root_dir=out,
        **{"max_epochs": 1, "enable_checkpointing": bool(callbacks), **options},
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


def built(value: float = 1.0) -> dict[str, object]:
    """A dict such as Lightning builds."""
    weights = OrderedDict({"layer.weight": torch.full((2, 2), value)})
    weights._metadata = OrderedDict({"": {"version": 1}})
    return {
        "epoch": 0,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"Ema": {"shadow": [torch.arange(1 << 15), (torch.ones(1 << 14), None)], "n": torch.tensor(2)}},
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2, 2)}},
                "param_groups": [{"params": [0], "lr": 0.1}],
            },
            {"state": {}, "param_groups": [{"params": [0], "betas": (0.9, 0.99)}]},
        ],
        "lr_schedulers": [{"_last_lr": [0.1], 5: {"by number": True}}],
        "hyper_parameters": {"sizes": {1: "one"}, "empty": {}, "none": None},
    }


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold every save in flight, by stopping the process that writes."""
    pid = process_engine().pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def spoil(path: Path) -> None:
    """Make what is being saved below ``path`` fail."""
    ends_s = time.monotonic() + 20.0
    while not (attempts := list(path.glob(".*.incomplete"))) and time.monotonic() < ends_s:
        time.sleep(0.005)  # it begins in the background
    assert attempts
    for attempt in attempts:
        shutil.rmtree(attempt)


class Hold(Callback):
    """Hold the saves of a whole fit."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()

    def on_train_start(self, *_: object) -> None:
        self.stack.enter_context(held())

    def on_train_end(self, *_: object) -> None:
        self.stack.close()


def started(io: HoldfastCheckpointIO, path: Path, value: float = 1.0) -> None:
    with io._flights.asynchronous():
        io.save_checkpoint(built(value), path)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    io = HoldfastCheckpointIO()
    io.save_checkpoint(built(), tmp_path / "a.ckpt")
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")
    expected = built()
    assert loaded.keys() == expected.keys()
    assert loaded["state_dict"]._metadata == expected["state_dict"]._metadata
    for found in (loaded, expected):
        found["state_dict"] = dict(found["state_dict"])
    torch.testing.assert_close(loaded["state_dict"], expected["state_dict"])
    assert {"callbacks", "optimizer_states"} <= {
        key for key in expected if pickled(loaded[key]) == pickled(expected[key])
    }
    rest = expected.keys() - {"callbacks", "optimizer_states", "state_dict"}
    assert {key: loaded[key] for key in rest} == {key: expected[key] for key in rest}
    assert {name for name in holdfast.open(tmp_path / "a.ckpt").tensors if name.startswith("tensors")} == {
        "tensors.callbacks/Ema/shadow/0",
        "tensors.callbacks/Ema/shadow/1/0",
    }


def pickled(value: object) -> bytes:
    """Compare nested values with tensors by this: same structure, types, keys and numbers."""
    if isinstance(value, torch.Tensor):
        return pickle.dumps((value.dtype, value.shape, value.numpy().tobytes()))
    if isinstance(value, dict):
        return pickle.dumps([type(value), *sorted((repr(key), pickled(item)) for key, item in value.items())])
    if isinstance(value, list | tuple):
        return pickle.dumps([type(value), *map(pickled, value)])
    return pickle.dumps(value)


@pytest.mark.parametrize("plugin", [True, False])
def test_what_pickle_alone_could_keep_is_refused_by_name(tmp_path: Path, plugin: bool) -> None:
    io = HoldfastCheckpointIO() if plugin else None
    saver = ModelCheckpoint(dirpath=tmp_path)
    with pytest.raises(ConfigError, match=r"hyper_parameters.*'data'.*PosixPath"):
        trainer_of(tmp_path, saver, plugin=io).fit(Net(data=Path("/data"), width=3))
    assert names(tmp_path) == []


@pytest.mark.parametrize("plugin", [True, False])
def test_top_k_are_kept_by_metric_and_resumed_with_their_optimizer(tmp_path: Path, plugin: bool) -> None:
    class Seen(Callback):
        def on_train_start(self, trainer: Trainer, module: Net) -> None:
            self.optimizer = pickled(trainer.optimizers[0].state_dict())
            self.step = trainer.global_step

    def go(epochs: int, resume: str | None = None) -> tuple[Trainer, Seen, HoldfastModelCheckpoint]:
        saver = HoldfastModelCheckpoint(dirpath=tmp_path, monitor="val", save_top_k=2, save_last=True)
        seen = Seen()
        io = HoldfastCheckpointIO() if plugin else None
        trainer = trainer_of(tmp_path, saver, seen, plugin=io, max_epochs=epochs)
        trainer.fit(Net(), ckpt_path=resume)
        return trainer, seen, saver

    _, _, saver = go(4)
    assert sorted(map(os.path.basename, saver.best_k_models)) == names(tmp_path)[:-1]
    assert names(tmp_path)[-1] == "last.ckpt"
    assert len(names(tmp_path)) == 3
    stored = HoldfastCheckpointIO().load_checkpoint(saver.last_model_path)
    assert sorted(stored["optimizer_states"][0]["state"]) == [0, 1, 2, 3]
    trainer, seen, again = go(5, "last")
    assert seen.step == 16
    assert seen.optimizer == pickled(stored["optimizer_states"][0])
    assert trainer.global_step == 20
    assert set(again.best_k_models) & set(saver.best_k_models)  # its own state came back, too


def test_state_of_callbacks_is_under_the_key_of_lightnings_own(tmp_path: Path) -> None:
    options = {"dirpath": tmp_path, "monitor": "val", "every_n_epochs": 2}
    assert HoldfastModelCheckpoint(**options).state_key == ModelCheckpoint(**options).state_key


@pytest.mark.parametrize("kind", [ModelCheckpoint, HoldfastModelCheckpoint])
def test_two_callbacks_never_give_one_name_twice(tmp_path: Path, kind: type[ModelCheckpoint]) -> None:
    """The first save is in flight when the second callback looks which names are free."""
    holdfast.save({"x": torch.ones(1)}, tmp_path / "first")  # starts the engine
    savers = [
        kind(dirpath=tmp_path / "run", every_n_train_steps=1),
        kind(dirpath=tmp_path / "run", monitor="step", every_n_train_steps=1),
    ]
    trainer_of(tmp_path, *savers, *([Hold()] if kind is HoldfastModelCheckpoint else []), max_steps=1).fit(Net())
    assert names(tmp_path / "run") == ["epoch=0-step=1-v1.ckpt", "epoch=0-step=1.ckpt"]
    assert all(holdfast.open(path).verify().ok for path in (tmp_path / "run").glob("[!.]*"))


def test_a_removal_waits_for_the_save_that_replaces(tmp_path: Path) -> None:
    io = HoldfastCheckpointIO()
    io.save_checkpoint(built(1), tmp_path / "a.ckpt")
    with held():
        started(io, tmp_path / "b.ckpt", 2)
        io.remove_checkpoint(tmp_path / "a.ckpt")
        assert names(tmp_path) == ["a.ckpt"]
        assert not io._flights.will_exist(str(tmp_path / "a.ckpt"))
        assert io._flights.will_exist(str(tmp_path / "b.ckpt"))
    io.teardown()
    assert names(tmp_path) == ["b.ckpt"]


def test_a_removal_of_what_is_in_flight(tmp_path: Path) -> None:
    io = HoldfastCheckpointIO()
    io.save_checkpoint(built(1), tmp_path / "a.ckpt")
    with held():
        started(io, tmp_path / "b.ckpt", 2)
        io.remove_checkpoint(tmp_path / "b.ckpt")
    io.teardown()
    assert names(tmp_path) == ["a.ckpt"]


def test_a_save_to_what_is_to_be_removed_is_not_removed(tmp_path: Path) -> None:
    io = HoldfastCheckpointIO()
    io.save_checkpoint(built(1), tmp_path / "a.ckpt")
    with held():
        started(io, tmp_path / "b.ckpt", 2)
        io.remove_checkpoint(tmp_path / "a.ckpt")
        started(io, tmp_path / "a.ckpt", 3)
    io.teardown()
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]
    assert io.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["layer.weight"][0, 0] == 3


def test_a_failed_save_keeps_what_it_was_to_replace_and_is_raised(tmp_path: Path) -> None:
    io = HoldfastCheckpointIO()
    io.save_checkpoint(built(1), tmp_path / "a.ckpt")
    with held():
        started(io, tmp_path / "b.ckpt", 2)
        io.remove_checkpoint(tmp_path / "a.ckpt")
        io._flights.link(str(tmp_path / "b.ckpt"), str(tmp_path / "last.ckpt"))
        spoil(tmp_path)
    with pytest.raises(HoldfastError):
        io.teardown()
    assert names(tmp_path) == ["a.ckpt"]
    io.save_checkpoint(built(4), tmp_path / "b.ckpt")  # and it was raised once
    io.teardown()
    assert names(tmp_path) == ["a.ckpt", "b.ckpt"]


def test_a_link_never_points_to_what_is_not_there(tmp_path: Path) -> None:
    io = HoldfastCheckpointIO()
    last = tmp_path / "last.ckpt"
    io.save_checkpoint(built(1), tmp_path / "a.ckpt")
    io._flights.link(str(tmp_path / "a.ckpt"), str(last))
    with held():
        started(io, tmp_path / "b.ckpt", 2)
        io._flights.link(str(tmp_path / "b.ckpt"), str(last))
        io.remove_checkpoint(tmp_path / "a.ckpt")
        assert os.readlink(last) == "a.ckpt"
        assert holdfast.open(last).verify().ok
    io.teardown()
    assert os.readlink(last) == "b.ckpt"
    assert names(tmp_path) == ["b.ckpt", "last.ckpt"]


def test_files_of_lightning_are_replaced_when_the_new_checkpoint_is_there(tmp_path: Path) -> None:
    io, path = HoldfastCheckpointIO(), tmp_path / "last.ckpt"
    torch.save(built(1), path)
    holdfast.save({"x": torch.ones(1)}, tmp_path / "first")
    assert io.load_checkpoint(path)["global_step"] == 3
    with held():
        started(io, path, 2)
        assert names(tmp_path) == ["first", "last-replaced.ckpt"]  # which ``ckpt_path="last"`` would find
    io.teardown()
    assert names(tmp_path) == ["first", "last.ckpt"]
    assert io.load_checkpoint(path)["state_dict"]["layer.weight"][0, 0] == 2


def test_a_file_stays_if_the_save_in_its_place_is_refused(tmp_path: Path) -> None:
    io, path = HoldfastCheckpointIO(), tmp_path / "last.ckpt"
    torch.save(built(1), path)
    with pytest.raises(ConfigError):
        io.save_checkpoint({**built(2), "mine": object()}, path)
    assert names(tmp_path) == ["last.ckpt"]
    assert torch.load(path)["global_step"] == 3


def test_fit_raises_what_a_save_in_flight_failed_of(tmp_path: Path) -> None:
    class Spoil(Hold):
        def on_train_end(self, *_: object) -> None:
            spoil(tmp_path / "run")
            super().on_train_end()

    holdfast.save({"x": torch.ones(1)}, tmp_path / "first")
    saver = HoldfastModelCheckpoint(dirpath=tmp_path / "run")
    with pytest.raises(HoldfastError):
        trainer_of(tmp_path, saver, Spoil()).fit(Net())
    assert names(tmp_path / "run") == []


def test_an_error_of_training_is_the_one_that_is_raised(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            if trainer.global_step == 3:
                raise ValueError("of the user's")

    saver = HoldfastModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_on_exception=True, save_top_k=-1)
    with pytest.raises(ValueError, match="of the user's"):
        trainer_of(tmp_path, saver, Fail()).fit(Net())
    assert names(tmp_path) == ["epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt"]
    assert all(holdfast.open(path).verify().ok for path in tmp_path.glob("[!.]*"))


@pytest.mark.parametrize("plugin", [True, False])
def test_weights_alone_are_tested_and_not_resumed(tmp_path: Path, plugin: bool) -> None:
    io = HoldfastCheckpointIO() if plugin else None
    net = Net()
    saver = HoldfastModelCheckpoint(dirpath=tmp_path, save_weights_only=True)
    trainer = trainer_of(tmp_path, saver, plugin=io)
    trainer.fit(net)
    stored = {key: value.clone() for key, value in net.state_dict().items()}
    fresh = Net()
    trainer_of(tmp_path, plugin=io).validate(fresh, ckpt_path=saver.best_model_path, verbose=False)
    torch.testing.assert_close(dict(fresh.state_dict()), stored, rtol=0, atol=0)
    with pytest.raises(KeyError, match="contains only the model"):
        trainer_of(tmp_path, plugin=io, max_epochs=2).fit(Net(), ckpt_path=saver.best_model_path)


def test_a_checkpoint_becomes_a_file_of_lightnings(tmp_path: Path) -> None:
    net = Net(width=3)
    trainer = trainer_of(tmp_path)
    trainer.fit(net)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    buffer = io.BytesIO()
    export_ckpt(tmp_path / "a.ckpt", buffer)
    assert buffer.tell() == 0
    again = Net.load_from_checkpoint(buffer)
    torch.testing.assert_close(dict(again.state_dict()), dict(net.state_dict()), rtol=0, atol=0)
    assert again.hparams == {"width": 3}
    export_ckpt(tmp_path / "a.ckpt", tmp_path / "file.ckpt")
    assert torch.load(tmp_path / "file.ckpt")["global_step"] == 4


def test_random_states_are_not_restored_by_a_test(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    found = []
    for resume in (None, tmp_path / "a.ckpt"):
        torch.manual_seed(5)
        net = Net()
        trainer_of(tmp_path).validate(net, ckpt_path=resume, verbose=False)
        found.append(torch.rand(1).item())
    assert found[0] == found[1]


def test_random_states_of_the_callback(tmp_path: Path) -> None:
    states = HoldfastRandomState()
    torch.manual_seed(7)
    saved = states.state_dict()
    assert torch.save(saved, tmp_path / "s") is None
    expected = torch.rand(1), __import__("random").random(), __import__("numpy").random.rand()
    states.load_state_dict(torch.load(tmp_path / "s"))  # weights_only: no numpy in it
    states.on_fit_start(None, None)
    assert (torch.rand(1), __import__("random").random(), __import__("numpy").random.rand()) == expected


def test_other_strategies_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FSDP2"):
        type("Mine", (HoldfastStrategyMixin, FSDPStrategy), {})
    both = Trainer(
        strategy=Single(device="cpu"),
        accelerator="cpu",
        plugins=[HoldfastCheckpointIO()],
        logger=False,
        fast_dev_run=True,
    )
    both.strategy.connect(Net())
    with pytest.raises(ConfigError, match="leave the plugin out"):
        both.strategy.save_checkpoint(built(), tmp_path / "a.ckpt")
    for saver in (HoldfastCheckpointIO(), Single(device="cpu")):
        with pytest.raises(TypeError, match="storage_options"):
            saver.save_checkpoint(built(), tmp_path / "a.ckpt", storage_options={})
    holdfast.save({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ConfigError, match="not saved by a Lightning trainer"):
        HoldfastCheckpointIO().load_checkpoint(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound):
        HoldfastCheckpointIO().load_checkpoint(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        HoldfastCheckpointIO().load_checkpoint(tmp_path / "nothing.ckpt")


def test_a_strategy_is_pickled_for_processes_it_spawns() -> None:
    again = pickle.loads(pickle.dumps(Single(device="cpu")))
    assert again._flights.will_exist(sys.executable)
