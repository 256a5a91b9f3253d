"""`holdfast.integrations.transformers`: killed and resumed in real jobs, and beside the stock Trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")

import torch
from jobs import ROOT, losses, run_script
from torch import nn
from torch.utils.data import TensorDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

import holdfast
from holdfast.errors import CheckpointCorrupt, ConfigError
from holdfast.integrations.transformers import HoldfastTrainer, HoldfastTrainerMixin

JOB = Path(__file__).with_name("trainer_job.py")
STEPS = 14


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nproc", "plan"), [(1, "ddp"), pytest.param(2, "ddp", marks=pytest.mark.slow), (2, "fsdp2")])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, nproc: int, plan: str) -> None:
    """Beside an uninterrupted run of the stock Trainer, from whose checkpoint another run of ours goes on."""
    stock, killed = tmp_path / "stock", tmp_path / "killed"
    for out in (stock, killed):
        out.mkdir()
    common = ("--plan", plan)
    run_script(JOB, stock, STEPS, *common, "--trainer", "stock", nproc=nproc)
    run_script(JOB, killed, STEPS, *common, "--kill", 11, nproc=nproc, killed=True)
    noted = losses([killed / "losses.jsonl"])
    assert set(noted) == set(range(1, 12))
    run_script(JOB, killed, STEPS, *common, "--resume", "auto", nproc=nproc)
    whole = losses([stock / "losses.jsonl"])
    assert set(whole) == set(range(1, STEPS + 1))
    assert losses([killed / "losses.jsonl"]) == whole
    last = holdfast.open(killed / f"checkpoint-{STEPS}")
    assert last.verify().ok
    state = json.loads(last.read_file("trainer_state.json"))
    assert state["stateful_callbacks"]["Watch"]["attributes"]["seen"] == STEPS
    assert sorted(path.name for path in killed.glob("checkpoint-*")) == [
        "checkpoint-12",
        "checkpoint-14",
        "checkpoint-9",
    ]
    if nproc == 1:
        return  # the same in this process: test_a_run_goes_on_from_what_the_stock_trainer_wrote
    (killed / "losses.jsonl").unlink()
    run_script(JOB, killed, STEPS, *common, "--resume", stock / "checkpoint-9", "--every", 50, nproc=nproc)
    assert losses([killed / "losses.jsonl"]) == {step: loss for step, loss in whole.items() if step > 9}
    if plan == "ddp":  # one rank goes on from what two have saved, with other batches
        run_script(JOB, tmp_path / "one", STEPS, "--resume", killed / "checkpoint-12", "--every", 50)
        assert losses([tmp_path / "one" / "losses.jsonl"]).keys() == {13, 14}


# In this process, beside the stock Trainer.


USUAL: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-2,
    "logging_steps": 1,
    "save_steps": 3,
    "seed": 7,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.last(self.drop(torch.relu(self.first(x))))
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": row.sum(0, keepdim=True)} for (row,) in TensorDataset(x)]


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise ZeroDivisionError("as training raises")


def trainer_in(out: Path, cls: type[Trainer] = HoldfastTrainer, *, callbacks: Any = (), **options: Any) -> Trainer:
    """A Trainer of a small model over 8 steps an epoch."""
    torch.manual_seed(0)
    ours = {name: options.pop(name) for name in ("checkpoint_config", "exports") if name in options}
    args = TrainingArguments(str(out), **{**USUAL, **options})
    return cls(Net(), args, callbacks=list(callbacks), train_dataset=rows(32, 1), eval_dataset=rows(8, 2), **ours)


def curve(trainer: Trainer) -> dict[int, str]:
    return {row["step"]: row["loss"].hex() for row in trainer.state.log_history if "loss" in row}


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """Directory and losses of an uninterrupted run of the stock Trainer."""
    out = tmp_path_factory.mktemp("stock")
    trainer = trainer_in(out, Trainer)
    trainer.train()
    return out, curve(trainer)


def test_training_that_raises_leaves_what_it_resumes_from(tmp_path: Path, whole: tuple[Path, dict[int, str]]) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer_in(tmp_path, callbacks=[Stop(10)]).train()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    trainer = trainer_in(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert curve(trainer) == whole[1]
    assert names(tmp_path) == names(whole[0])


def test_a_published_directory_has_the_trainers_state(tmp_path: Path, whole: tuple[Path, dict[int, str]]) -> None:
    trainer_in(tmp_path).train()
    for name in names(whole[0]):
        found = TrainerState.load_from_json(str(tmp_path / name / "trainer_state.json"))
        stock = TrainerState.load_from_json(str(whole[0] / name / "trainer_state.json"))
        for state in (found, stock):
            state.log_history = [{key: row[key] for key in ("step", "loss")} for row in state.log_history]
        assert found == stock
        checkpoint = holdfast.open(tmp_path / name)
        assert checkpoint.step == found.global_step
        assert checkpoint.metrics["loss"] == found.log_history[-1]["loss"]
        assert set(checkpoint.files) == {"trainer_state.json"}


def test_what_a_crash_left_is_settled_before_a_checkpoint_is_chosen(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    trainer_in(tmp_path, save_total_limit=2).train()
    newest = tmp_path / f"checkpoint-{STEPS}"
    manifest = holdfast.open(newest).manifest
    assert manifest is not None
    newest.rename(tmp_path / f".{newest.name}.{manifest.attempt}.incomplete")  # killed right before it was published
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-12")
    trainer = trainer_in(tmp_path, max_steps=STEPS + 1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == STEPS


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, whole: tuple[Path, dict[int, str]]) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer_in(tmp_path, callbacks=[Stop(10)]).train()
    for name, pattern in (("checkpoint-9", "*.distcp"), ("checkpoint-6", "trainer_state.json")):
        victim = max((tmp_path / name).glob(pattern), key=lambda file: file.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    with pytest.raises(CheckpointCorrupt):
        trainer_in(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    trainer = trainer_in(tmp_path)
    with (
        pytest.warns(UserWarning, match=r"checkpoint-9 can't be loaded, falling back to .*checkpoint-6"),
        pytest.warns(UserWarning, match=r"checkpoint-6 can't be loaded, falling back to .*checkpoint-3"),
    ):
        trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 3
    assert curve(trainer) == whole[1]
    assert holdfast.open(tmp_path / "checkpoint-9").verify().ok


BEST = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss", "greater_is_better": True}


@pytest.mark.parametrize(
    "options",
    [
        {"save_total_limit": 2},
        {"save_total_limit": 1, "load_best_model_at_end": True, **BEST},
        {"save_total_limit": 3, "load_best_model_at_end": True, **BEST},
        {"save_strategy": "epoch"},
        {"save_strategy": "best", **BEST},
        {"save_strategy": "no"},
        {"save_only_model": True, "load_best_model_at_end": True, **BEST},
        {"save_steps": 0.25},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_options_do_what_they_do_for_the_stock_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    found = []
    for cls in (Trainer, HoldfastTrainer):
        trainer = trainer_in(tmp_path / cls.__name__, cls, **options)
        trainer.train()
        best = trainer.state.best_model_checkpoint
        found.append((names(tmp_path / cls.__name__), best and Path(best).name, trainer.state.best_metric))
        found[-1] += (weights(trainer),)
    (*stock, stock_weights), (*ours, our_weights) = found
    assert ours == stock
    assert all(map(torch.equal, our_weights, stock_weights))


@pytest.mark.parametrize(
    "options",
    [
        {"accelerator_config": {"use_seedable_sampler": False}},  # the order is drawn from the global generator
        {"gradient_accumulation_steps": 2, "save_strategy": "epoch", "save_total_limit": 1},
        {"lr_scheduler_type": "reduce_lr_on_plateau", **BEST, "lr_scheduler_kwargs": {"patience": 0}},
        {"ignore_data_skip": True, "logging_steps": 4},
        {"auto_find_batch_size": True, "optim": "adafactor", "dataloader_num_workers": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_resumed_run_is_that_of_the_stock_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    found = []
    for cls in (Trainer, HoldfastTrainer):
        out = tmp_path / cls.__name__
        with pytest.raises(ZeroDivisionError):
            trainer_in(out, cls, callbacks=[Stop(11)], **options).train()
        trainer = trainer_in(out, cls, **options)
        trainer.train(resume_from_checkpoint=True)
        found.append((names(out), curve(trainer), trainer.state.best_metric, weights(trainer)))
    (*stock, stock_weights), (*ours, our_weights) = found
    assert ours == stock
    assert all(map(torch.equal, our_weights, stock_weights))


def test_a_model_alone_is_not_resumed_from(tmp_path: Path) -> None:
    trainer_in(tmp_path, save_only_model=True).train()
    newest = tmp_path / f"checkpoint-{STEPS}"
    assert not [name for name in holdfast.open(newest).tensors if not name.startswith(("model.", "rng."))]
    with pytest.raises(ConfigError, match="save_only_model"):
        trainer_in(tmp_path).train(resume_from_checkpoint=str(newest))
    with pytest.raises(ValueError, match=r"No valid checkpoint found.*save_only_model"):
        trainer_in(tmp_path).train(resume_from_checkpoint=True)


def test_a_whole_checkpoint_is_resumed_whole_by_a_run_that_saves_models(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer_in(tmp_path, callbacks=[Stop(10)]).train()
    trainer = trainer_in(tmp_path, save_only_model=True)
    trainer.train(resume_from_checkpoint=True)
    assert curve(trainer) == whole[1]


def test_the_state_of_callbacks_goes_on(tmp_path: Path) -> None:
    found = []
    for cls in (Trainer, HoldfastTrainer):
        out = tmp_path / cls.__name__
        options = {**BEST, "eval_steps": 1, "restore_callback_states_from_checkpoint": True}
        patience = EarlyStoppingCallback(early_stopping_patience=9)
        with pytest.raises(ZeroDivisionError):
            trainer_in(out, cls, callbacks=[patience, Stop(5)], **options).train()
        trainer = trainer_in(out, cls, callbacks=[EarlyStoppingCallback(early_stopping_patience=1)], **options)
        trainer.train(resume_from_checkpoint=True)
        [kept] = [kept for kept in trainer.callback_handler.callbacks if isinstance(kept, EarlyStoppingCallback)]
        found.append((trainer.state.global_step, kept.early_stopping_patience, kept.early_stopping_patience_counter))
    assert found[0] == found[1]
    assert found[1][1] == 9


def test_a_run_goes_on_from_what_the_stock_trainer_wrote(tmp_path: Path, whole: tuple[Path, dict[int, str]]) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    for name in ("checkpoint-12", "checkpoint-14"):
        shutil.rmtree(out / name)
    trainer = trainer_in(out, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 9
    assert curve(trainer) == whole[1]
    assert names(out) == ["checkpoint-12", "checkpoint-14"]  # save_total_limit counts theirs too
    again = trainer_in(out, max_steps=STEPS + 1)
    again.train(resume_from_checkpoint=True)
    assert again._initial_global_step == STEPS


def test_checkpoints_of_the_stock_trainer_are_never_overwritten(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    with pytest.raises(ConfigError, match=r"checkpoint-3.*of the stock Trainer"):
        trainer_in(out).train()
    with pytest.raises(ConfigError, match=r"checkpoint-12.*of the stock Trainer"):
        trainer_in(out).train(resume_from_checkpoint=str(out / "checkpoint-9"))
    trainer_in(out, save_strategy="no").train()


def test_a_run_from_nothing_takes_the_place_of_an_earlier_one(
    tmp_path: Path, whole: tuple[Path, dict[int, str]]
) -> None:
    trainer_in(tmp_path, learning_rate=0.5).train()
    before = {name: (tmp_path / name).stat().st_ino for name in names(tmp_path)}
    with pytest.raises(ZeroDivisionError):
        trainer_in(tmp_path, callbacks=[Stop(7)]).train()
    after = {name: (tmp_path / name).stat().st_ino for name in names(tmp_path)}
    assert [name for name in before if before[name] != after[name]] == ["checkpoint-3", "checkpoint-6"]
    trainer = trainer_in(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 6  # the newest of this run, not checkpoint-14 of the one before
    assert curve(trainer) == whole[1]


def test_one_trainer_trains_twice(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.train()
    trainer.train()
    assert names(tmp_path)[-1] == "checkpoint-9"


def test_exports_are_made_beside_checkpoints(tmp_path: Path) -> None:
    exports = [holdfast.HFExport(tmp_path / "hf", every=1)]
    trainer = trainer_in(tmp_path / "out", exports=exports, max_steps=3)
    trainer.train()
    found = holdfast.open(tmp_path / "hf" / "hf-3")
    for name, param in trainer.model.named_parameters():
        assert torch.equal(found.read(name), param)


def test_what_trained_adapters_hold_is_saved_without_their_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    class Adapted(HoldfastTrainerMixin, Trainer):
        pass

    def adapted() -> Any:
        torch.manual_seed(0)
        net = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["first", "last"], init_lora_weights=False))
        changed = {"max_steps": 6, "save_steps": 2, "remove_unused_columns": False, "label_names": ["labels"]}
        options = TrainingArguments(str(tmp_path), **{**USUAL, **changed})
        return Adapted(net, options, train_dataset=rows(32, 1))

    first = adapted()
    first.train()
    checkpoint = holdfast.open(tmp_path / "checkpoint-4")
    assert {name.rsplit(".", 2)[0] for name in checkpoint.tensors if name.startswith("model.")}
    assert all("lora_" in name for name in checkpoint.tensors if name.startswith("model."))
    shutil.rmtree(tmp_path / "checkpoint-6")
    second = adapted()
    second.train(resume_from_checkpoint=True)
    assert curve(second) == curve(first)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"checkpoint_config": holdfast.CheckpointConfig(every=7)}, "every"),
        ({"checkpoint_config": holdfast.CheckpointConfig(last_model_only=True)}, "last_model_only"),
        ({"save_on_each_node": True}, "save_on_each_node"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cant_be_done_is_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        trainer_in(tmp_path, **options)


def test_synchronous_saves_are_published_when_training_goes_on(tmp_path: Path) -> None:
    seen = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((tmp_path / f"checkpoint-{state.global_step}" / "holdfast.json").exists())

    config = holdfast.CheckpointConfig(mode="sync")
    trainer_in(tmp_path, callbacks=[Look()], checkpoint_config=config).train()
    assert seen == [True] * 5


def test_the_example_runs(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "transformers_trainer.py", "--out", tmp_path).stdout
    assert "lost at step 10" in output
    assert "checkpoints: checkpoint-12 checkpoint-8" in output
    assert "exported" in output
