"""Directories as torchtitan and XTuner write them, made with stock DCP exactly as they do, and loaded by Holdfast.

torchtitan   one directory: the model's names bare, ``optimizer.…`` flattened by parameter, ``lr_scheduler.…``,
             ``dataloader.…`` and ``train_state.…`` beside them
XTuner       ``weights/``, one directory with ``model.…`` and ``optimizer.…``; in older runs ``model/`` and
             ``optimizer/``, two directories without a key; other files of its own around them
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from holdfast.dcp import Reader

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launch import run_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.scale


class Net(nn.Module):
    """``layers`` is a dictionary, as torchtitan has it: names stay the same however it is cut into stages."""

    def __init__(self, layers: tuple[int, ...] = (0, 1), *, head: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in layers})
        self.head = nn.Linear(WIDTH, 3) if head else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def factor(step: int, *, warmup: int) -> float:
    return min(1.0, (step + 1) / warmup)


class Run:
    """A training run of ``steps`` steps: model parts, an optimizer each, schedulers, data, progress."""

    def __init__(self, seed: int, steps: int, *, shard: bool = False, parts: int = 1) -> None:
        torch.manual_seed(seed)
        self.parts: list[nn.Module] = [Net()] if parts == 1 else [Net((0,), head=False), Net((1,))]
        if shard:
            for part in self.parts:
                fully_shard(part)
        self.optimizers: list[Optimizer] = [self._optimizer(part) for part in self.parts]
        schedule = functools.partial(factor, warmup=5)
        self.schedulers = [LambdaLR(optimizer, schedule) for optimizer in self.optimizers]
        self.loader = Loader(seed * 100)
        self.train_state = TrainState()
        for step in range(steps):
            self.step(float(step + seed))

    @staticmethod
    def _optimizer(part: nn.Module) -> Optimizer:
        decayed = [p for p in part.parameters() if p.dim() > 1]
        others = [p for p in part.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.95)}]
        return torch.optim.AdamW(groups, lr=0.03)

    def step(self, value: float) -> None:
        x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH) + value
        for part in self.parts:
            x = part(x)
        x.square().mean().backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        self.loader.position += 1
        self.train_state.step += 1
        self.train_state.losses.append(value)

    @property
    def state(self) -> dict[str, Any]:
        """As a user of Holdfast gives it."""
        several = len(self.parts) > 1
        return {
            "model": self.parts if several else self.parts[0],
            "optimizer": self.optimizers if several else self.optimizers[0],
            "lr_scheduler": LRSchedulersContainer(self) if several else self.schedulers[0],
            "dataloader": self.loader,
            "train_state": self.train_state,
        }

    def values(self, *, optimizer: bool = True) -> dict[str, Any]:
        """Everything by name, whole tensors."""
        found: dict[str, Any] = {}
        for part, of_part in zip(self.parts, self.optimizers, strict=True):
            found |= get_model_state_dict(part)
            if optimizer:
                options = StateDictOptions(flatten_optimizer_state_dict=True)
                found |= {
                    f"optimizer.{k}": v for k, v in get_optimizer_state_dict(part, of_part, options=options).items()
                }
        return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}


class Loader:
    """Keeps its position as torchtitan's dataloader does: pickled, under a key of its data-parallel rank."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": pickle.dumps({"position": self.position}), "world_size": self.world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = pickle.loads(state[f"dp_rank_{self.rank}"])["position"]


class TrainState:
    """As torchtitan keeps it now: numbers."""

    def __init__(self) -> None:
        self.step, self.losses = 0, [0.5]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.step * 24}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["ntokens_seen"] == state["step"] * 24
        self.step = state["step"]


class OldTrainState(TrainState):
    """As it kept it until 2025: a tensor, and lists in streams of their own."""

    def state_dict(self) -> dict[str, Any]:
        stream = io.BytesIO()
        torch.save(self.losses, stream)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "global_avg_losses": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"].item())
        state["global_avg_losses"].seek(0)
        self.losses = torch.load(state["global_avg_losses"], weights_only=True)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


# torchtitan ----------------------------------------------------------------------------------------------------


class OptimizersContainer:
    """Merges the flattened states of all parts."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        get = functools.partial(get_optimizer_state_dict, options=StateDictOptions(flatten_optimizer_state_dict=True))
        return {k: v for state in map(get, self._run.parts, self._run.optimizers) for k, v in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("only saved")


class LRSchedulersContainer:
    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        return self._run.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler in self._run.schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))


def save_as_torchtitan(run: Run, directory: Path, **options: Any) -> None:
    states = {
        **{k: v for state in map(get_model_state_dict, run.parts) for k, v in state.items()},
        "optimizer": OptimizersContainer(run),
        "lr_scheduler": LRSchedulersContainer(run),
        "dataloader": run.loader,
        "train_state": run.train_state,
    }
    dcp.save(states, checkpoint_id=directory, **options)


def load_and_compare(directory: Path, saved: Run, *, shard: bool = False, parts: int = 1) -> Run:
    """Into a run that is elsewhere: everything is as it was, and goes on as it would have."""
    run = Run(seed=2, steps=2, shard=shard, parts=parts)
    if isinstance(saved.train_state, OldTrainState):
        run.train_state = OldTrainState()
    holdfast.load(run.state, directory)
    assert_equal(run.values(), saved.values())
    assert run.schedulers[0].last_epoch == saved.schedulers[0].last_epoch
    assert run.schedulers[0].get_last_lr() == saved.schedulers[0].get_last_lr()
    assert run.loader.position == saved.loader.position
    assert run.train_state.step == saved.train_state.step
    return run


@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "pipeline"])
def test_torchtitan(tmp_path: Path, parts: int) -> None:
    saved = Run(seed=1, steps=3, parts=parts)
    save_as_torchtitan(saved, tmp_path / "step-3", no_dist=True)
    run = load_and_compare(tmp_path / "step-3", saved, parts=parts)
    run.step(7.0)
    saved.step(7.0)
    assert_equal(run.values(), saved.values())


def test_torchtitan_stages_into_a_whole_model(tmp_path: Path) -> None:
    saved = Run(seed=1, steps=3, parts=2)
    save_as_torchtitan(saved, tmp_path / "step-3", no_dist=True)
    load_and_compare(tmp_path / "step-3", saved, parts=1)


def test_torchtitan_before_2025(tmp_path: Path) -> None:
    saved = Run(seed=1, steps=3)
    saved.train_state = OldTrainState()
    saved.train_state.step, saved.train_state.losses = 3, [1.0, 0.5, 0.25]
    save_as_torchtitan(saved, tmp_path / "step-3", no_dist=True)
    run = load_and_compare(tmp_path / "step-3", saved)
    assert run.train_state.losses == [1.0, 0.5, 0.25]


def test_torchtitan_model_only(tmp_path: Path) -> None:
    """``last_save_model_only`` in an export dtype: bare names and nothing else."""
    saved = Run(seed=1, steps=3)
    dcp.save(
        {name: value.to(torch.bfloat16) for name, value in get_model_state_dict(saved.parts[0]).items()},
        checkpoint_id=tmp_path / "step-3",
        no_dist=True,
    )
    run = Run(seed=2, steps=2)
    holdfast.load({"model": run.parts[0]}, tmp_path / "step-3")
    expected = {name: value.to(torch.bfloat16).float() for name, value in saved.values(optimizer=False).items()}
    assert_equal(run.values(optimizer=False), expected)
    with pytest.raises(holdfast.StateMismatch) as raised:
        holdfast.load(run.state, tmp_path / "step-3")
    assert "dataloader" in " ".join(raised.value.missing)


# XTuner --------------------------------------------------------------------------------------------------------


def xtuner_states(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(cpu_offload=True)
    (part,), (optimizer,) = run.parts, run.optimizers
    return get_model_state_dict(part, options=options), get_optimizer_state_dict(part, optimizer, options=options)


def save_merged(run: Run, directory: Path, **options: Any) -> None:
    model, optimizer = xtuner_states(run)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "weights", **options)
    around(directory)


def save_split(run: Run, directory: Path, **options: Any) -> None:
    model, optimizer = xtuner_states(run)
    dcp.save(model, checkpoint_id=directory / "model", **options)
    dcp.save(optimizer, checkpoint_id=directory / "optimizer", **options)
    around(directory)


def around(directory: Path) -> None:
    """What XTuner's trainer keeps beside the weights, in files of its own."""
    (directory / "train_state.json").write_text('{"cur_step": 3}')
    torch.save({"last_epoch": 3}, directory / "lr_scheduler")


LAYOUTS = [save_merged, save_split]


@pytest.mark.parametrize("save", LAYOUTS)
def test_xtuner(tmp_path: Path, save: Callable[..., None]) -> None:
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    save(saved, tmp_path / "checkpoint-3", no_dist=True)
    for directory in (tmp_path / "checkpoint-3", *sorted((tmp_path / "checkpoint-3").glob("weights"))):
        run = Run(seed=2, steps=2)
        holdfast.load({"model": run.parts[0], "optimizer": run.optimizers[0]}, directory)
        assert_equal(run.values(), saved.values())
    run.step(7.0)
    saved.step(7.0)
    assert_equal(run.values(optimizer=False), saved.values(optimizer=False))


@pytest.mark.parametrize("save", LAYOUTS)
def test_xtuner_model_only(tmp_path: Path, save: Callable[..., None]) -> None:
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    save(saved, tmp_path, no_dist=True)
    holdfast.load({"model": run.parts[0]}, tmp_path)
    assert_equal(run.values(optimizer=False), saved.values(optimizer=False))


def test_one_directory_of_a_split_pair(tmp_path: Path) -> None:
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    save_split(saved, tmp_path, no_dist=True)
    holdfast.load({"model": run.parts[0]}, tmp_path / "model")
    assert_equal(run.values(optimizer=False), saved.values(optimizer=False))
    holdfast.load({"optimizer": run.optimizers[0], "model": run.parts[0]}, tmp_path)
    assert_equal(run.values(), saved.values())


@pytest.mark.parametrize("save", LAYOUTS)
def test_the_reader_reads_them_for_stock(tmp_path: Path, save: Callable[..., None]) -> None:
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    save(saved, tmp_path, no_dist=True)
    model, optimizer = xtuner_states(run)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    expected_model, expected_optimizer = xtuner_states(saved)
    assert_equal(state["model"], expected_model)
    for name, slots in expected_optimizer["state"].items():
        assert_equal(state["optimizer"]["state"][name], slots)


def test_a_manager_starts_from_them(tmp_path: Path) -> None:
    """`initial_load_path`: the modules, where the root has no checkpoint yet."""
    saved = Run(seed=1, steps=3)
    save_merged(saved, tmp_path / "xtuner", no_dist=True)
    save_as_torchtitan(saved, tmp_path / "titan", no_dist=True)
    for source in ("xtuner", "titan"):
        run = Run(seed=2, steps=2)
        config = holdfast.CheckpointConfig(initial_load_path=str(tmp_path / source))
        state = {"model": run.parts[0], "optimizer": run.optimizers[0]}
        with holdfast.CheckpointManager(tmp_path / f"run-{source}", state, config=config) as manager:
            manager.restore()
        assert_equal(run.values(optimizer=False), saved.values(optimizer=False))


# other dictionaries --------------------------------------------------------------------------------------------


def test_a_plain_optimizer_state_dict(tmp_path: Path) -> None:
    """Numbered parameters, as ``optimizer.state_dict()`` has them: what many scripts give to ``dcp.save``."""
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    state = {"model": saved.parts[0].state_dict(), "optimizer": saved.optimizers[0].state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    holdfast.load({"model": run.parts[0], "optimizer": run.optimizers[0]}, tmp_path / "a")
    assert_equal(run.values(), saved.values())


def test_a_converted_torch_save_file(tmp_path: Path) -> None:
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    torch.save({"model": saved.parts[0].state_dict(), "step": 3}, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "a")
    state = {"model": run.parts[0], "step": 0}
    holdfast.load(state, tmp_path / "a")
    assert state["step"] == 3
    assert_equal(run.values(optimizer=False), saved.values(optimizer=False))


@pytest.mark.parametrize("flatten", [True, False])
def test_unflattened_planners(tmp_path: Path, flatten: bool) -> None:
    """A planner that doesn't flatten keeps nested values as single pickles, and notes no paths."""
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    state = {**saved.parts[0].state_dict(), "n": 5, "options": {"a": [1, 2]}}
    dcp.save(state, checkpoint_id=tmp_path / "a", planner=DefaultSavePlanner(flatten_state_dict=flatten), no_dist=True)
    found = {"model": run.parts[0], "n": 0}
    holdfast.load(found, tmp_path / "a")
    assert_equal(run.values(optimizer=False), saved.values(optimizer=False))
    assert found["n"] == 5
    stored = holdfast.open(tmp_path / "a").objects
    assert stored["options.a" if flatten else "options"] == ([1, 2] if flatten else {"a": [1, 2]})


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    save_merged(saved, tmp_path, no_dist=True)
    before = run.values()
    with pytest.raises(holdfast.StateMismatch, match="extra"):
        holdfast.load({"model": run.parts[0], "extra": torch.zeros(2)}, tmp_path)
    assert_equal(run.values(), before)


def test_a_file_that_is_gone_or_short_is_named(tmp_path: Path) -> None:
    saved, run = Run(seed=1, steps=3), Run(seed=2, steps=2)
    save_merged(saved, tmp_path, no_dist=True)
    (data,) = (tmp_path / "weights").glob("*.distcp")
    whole = data.read_bytes()
    for damage in (lambda: data.write_bytes(whole[: len(whole) // 2]), data.unlink):
        damage()
        with pytest.raises((holdfast.CheckpointCorrupt, holdfast.StorageError), match=data.name):
            holdfast.load({"model": run.parts[0], "optimizer": run.optimizers[0]}, tmp_path)


# two ranks -----------------------------------------------------------------------------------------------------


def write_on_two_ranks(root: str) -> None:
    saved = Run(seed=1, steps=3, shard=True)
    directories = {name: Path(root) / name for name in ("titan", "merged", "split")}
    for directory in directories.values():
        directory.mkdir(exist_ok=True)
    save_as_torchtitan(saved, directories["titan"])
    save_merged(saved, directories["merged"])
    save_split(saved, directories["split"])
    expected = saved.values()
    if dist.get_rank() == 0:
        torch.save(expected, Path(root) / "expected.pt")
    dist.barrier()
    load_and_compare(directories["titan"], saved, shard=True)
    for name in ("merged", "split"):
        run = Run(seed=2, steps=2, shard=True)
        holdfast.load({"model": run.parts[0], "optimizer": run.optimizers[0]}, directories[name])
        assert_equal(run.values(), expected)


def test_two_ranks_write_and_one_loads(tmp_path: Path) -> None:
    run_job(write_on_two_ranks, nproc=2, args=[tmp_path])
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for name in ("titan", "merged", "split"):
        run = Run(seed=2, steps=2)
        state = {"model": run.parts[0], "optimizer": run.optimizers[0]}
        if name == "titan":
            state |= {"lr_scheduler": run.schedulers[0], "train_state": run.train_state}
        holdfast.load(state, tmp_path / name)
        assert_equal(run.values(), expected)
        if name == "titan":
            assert (run.schedulers[0].last_epoch, run.train_state.step) == (3, 3)
