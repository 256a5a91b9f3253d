"""`holdfast.integrations.accelerate` in real jobs: killed and resumed, on DDP and FSDP2, beside accelerate itself."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from accelerate_job import Net, Progress
from jobs import ROOT, losses, run_script

import holdfast
from holdfast.errors import CheckpointExists, CheckpointNotFound, ConfigError
from holdfast.integrations.accelerate import _Dataloader, async_save_state, load_state, save_state

JOB = Path(__file__).with_name("accelerate_job.py")
STEPS = 14


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("nproc", "plan", "save"),
    [pytest.param(1, "ddp", "async", marks=pytest.mark.slow), (2, "ddp", "holdfast"), (2, "fsdp2", "async")],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, nproc: int, plan: str, save: str) -> None:
    """Beside an uninterrupted run that accelerate saved, from whose checkpoint a run of ours goes on, too."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for out in (whole, killed):
        out.mkdir()
    options = ("--plan", plan, "--save", save)
    run_script(JOB, whole, STEPS, "--plan", plan, "--save", "stock", nproc=nproc)
    run_script(JOB, killed, STEPS, *options, "--kill", 11, nproc=nproc, killed=True)
    assert set(losses([killed / "losses.jsonl"])) == set(range(1, 12))
    run_script(JOB, killed, STEPS, *options, "--resume", "auto", nproc=nproc)
    expected = losses([whole / "losses.jsonl"])
    assert set(expected) == set(range(1, STEPS + 1))
    assert losses([killed / "losses.jsonl"]) == expected
    names = sorted(path.name for path in (killed / "checkpoints").iterdir() if not path.name.startswith("."))
    assert names == ["checkpoint_2", "checkpoint_3"]  # total_limit
    checkpoint = holdfast.open(killed / "checkpoints" / names[-1])
    assert checkpoint.verify().ok
    assert checkpoint.state()["custom"]["step"] == 12
    (whole / "losses.jsonl").unlink()
    run_script(JOB, whole, STEPS + 1, *options, "--resume", "auto", nproc=nproc)
    assert losses([whole / "losses.jsonl"]).keys() == {13, 14, 15}
    assert {step: expected[step] for step in (13, 14)}.items() <= losses([whole / "losses.jsonl"]).items()
    names = sorted(path.name for path in (whole / "checkpoints").iterdir() if not path.name.startswith("."))
    assert names == ["checkpoint_3", "checkpoint_4"]  # counts on, and limits theirs too
    if (nproc, plan) == (2, "ddp"):
        check_one_rank_loads(killed / "checkpoints" / "checkpoint_3")


def check_one_rank_loads(saved: Path) -> None:
    """What two ranks saved is loaded by one: all but the generators, which are seeded anew."""
    found = []
    for _ in range(2):
        accelerator, model, optimizer = prepared(saved.parent)
        progress = Progress()
        accelerator.register_for_checkpointing(progress)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        accelerator._schedulers.append(scheduler)
        loader = torch.utils.data.DataLoader(range(64), batch_size=4)
        accelerator.prepare_data_loader(loader)
        load_state(accelerator, saved)
        checkpoint = holdfast.open(saved)
        for name, param in model.named_parameters():
            assert torch.equal(param, checkpoint.read(f"model.{name}"))
            stored = checkpoint.read(f"optimizer.state.{name}.exp_avg")
            assert torch.equal(optimizer.state[param]["exp_avg"], stored)
        assert (progress.step, scheduler.last_epoch) == (12, checkpoint.objects["scheduler.last_epoch"])
        found.append(torch.rand(4))
    assert torch.equal(*found)


# In this process.


def prepared(root: Path, **options: Any) -> tuple[Accelerator, Any, Any]:
    naming = ProjectConfiguration(str(root), automatic_checkpoint_naming=bool(options), **options)
    accelerator = Accelerator(cpu=True, project_config=naming)
    torch.manual_seed(0)
    model = Net()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()


def test_what_a_crash_left_is_settled_before_the_newest_is_chosen(tmp_path: Path) -> None:
    run = prepared(tmp_path, total_limit=9)
    for _ in range(2):
        train(*run)
        save_state(run[0])
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    weights = [param.detach().clone() for param in run[1].parameters()]
    manifest = holdfast.open(newest).manifest
    assert manifest is not None
    newest.rename(newest.with_name(f".{newest.name}.{manifest.attempt}.incomplete"))
    again = prepared(tmp_path, total_limit=9)
    load_state(again[0])
    assert newest.is_dir()
    assert all(map(torch.equal, weights, again[1].parameters()))
    save_state(again[0])
    assert holdfast.open(tmp_path / "checkpoints" / "checkpoint_2").verify().ok


def test_asynchronous_saves_have_what_was_when_they_began(tmp_path: Path) -> None:
    run = prepared(tmp_path, total_limit=2)
    expected, handles = [], []
    for _ in range(4):
        train(*run)
        handles.append(async_save_state(run[0], metrics={"loss": 0.5}, files={"note.txt": b"here"}))
        expected.append(run[1].last.weight.detach().clone())
    train(*run)
    assert [handle.exception(60) for handle in handles] == [None] * 4  # they may end in another order
    handle = handles[-1]
    assert handle.result(60).metrics == {"loss": 0.5}
    assert handle.result(60).read_file("note.txt") == b"here"
    holdfast.release()  # waits for callbacks too
    for number in (2, 3):
        found = holdfast.open(tmp_path / "checkpoints" / f"checkpoint_{number}").read("model.last.weight")
        assert torch.equal(found, expected[number])


def test_a_given_directory_is_replaced_as_a_whole_and_a_name_is_not(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    for _ in range(2):
        train(*run)
        save_state(run[0], tmp_path / "out")
    assert torch.equal(holdfast.open(tmp_path / "out").read("model.last.weight"), run[1].last.weight)
    run = prepared(tmp_path, total_limit=3)
    save_state(run[0])
    run[0].project_configuration.iteration = 0
    with pytest.raises(CheckpointExists):
        save_state(run[0])


def test_what_cant_be_done_is_refused(tmp_path: Path) -> None:
    accelerator, *_ = prepared(tmp_path)
    with pytest.raises(ConfigError, match="output_dir is needed"):
        save_state(accelerator)
    with pytest.raises(ConfigError, match="input_dir is needed"):
        load_state(accelerator)
    with pytest.raises(CheckpointNotFound):
        load_state(accelerator, tmp_path / "none")
    with pytest.raises(ConfigError, match="no model yet"):
        save_state(Accelerator(cpu=True), tmp_path / "out")
    removable = accelerator.register_save_state_pre_hook(lambda *args: None)
    with pytest.raises(ConfigError, match="register_save_state_pre_hook"):
        save_state(accelerator, tmp_path / "out")
    removable.remove()
    save_state(accelerator, tmp_path / "out")
    with pytest.raises(ConfigError, match="known to accelerate's own"):
        load_state(accelerator, tmp_path / "out", strict=False)
    automatic, *_ = prepared(tmp_path, total_limit=1)
    with pytest.raises(ConfigError, match="leave one"):
        save_state(automatic, tmp_path / "other")
    with pytest.raises(CheckpointNotFound):
        load_state(automatic)


def test_gradients_that_are_being_accumulated_are_told_of(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in (1, 2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        told = pytest.warns(UserWarning, match="sync_gradients") if step == 1 else contextlib.nullcontext()
        with told:
            save_state(accelerator, tmp_path / f"step-{step}")


def test_the_position_of_a_dataloader_is_not_divided_anew() -> None:
    loader = _Dataloader(torch.utils.data.DataLoader(range(4)))
    epochs = [{"iteration": 3, "epoch": 3, "seed": 5}] * 2
    assert loader.reshard_state_dict(epochs, 0, 1) == epochs[0]
    with pytest.raises(ConfigError, match="saved by 2 ranks, and this is a run of 1"):
        loader.reshard_state_dict([{**state, "position": {"at": 3}} for state in epochs], 0, 1)


def test_the_example_runs(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "accelerate_loop.py", "--out", tmp_path).stdout
    assert "lost at step 15" in output
    assert "resumed at step 12" in output
    assert "step 24 loss" in output
