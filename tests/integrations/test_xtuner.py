"""`holdfast.integrations.xtuner` in real jobs, killed and resumed, beside what XTuner does with stock DCP; its parts.

XTuner itself isn't needed: the jobs call stock DCP as its engine does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # which may warn of what else is installed with it

import torch
import torch.distributed.checkpoint as dcp
from jobs import losses, run_script
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import holdfast
from holdfast.integrations.xtuner import TrainEngine, TrainEngineMixin, TrainerCheckpoints, XTunerMeta

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
JOB = Path(__file__).with_name("xtuner_job.py")
STEPS = 14


def job(work_dir: Path, *args: object, nproc: int, **options: Any) -> None:
    work_dir.mkdir(exist_ok=True)
    run_script(JOB, work_dir, *args, nproc=nproc, **options)


def curve(work_dir: Path) -> dict[int, str]:
    return losses([work_dir / "losses.jsonl"])


def checkpoints(work_dir: Path) -> list[str]:
    meta = XTunerMeta.read(work_dir)
    return sorted(path.name for path in (Path(meta.latest_exp.exp_dir) / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on two ranks."""
    path = tmp_path_factory.mktemp("whole")
    job(path, STEPS, nproc=2)
    return path


@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, whole: Path, save: str) -> None:
    job(tmp_path, STEPS, "--save", save, "--snapshots", 3, "--kill", 11, nproc=2, killed=True)
    job(tmp_path, STEPS, "--save", save, "--snapshots", 3, "--resume", "auto", nproc=2)
    assert curve(tmp_path) == curve(whole)
    assert len(curve(tmp_path)) == STEPS
    exp = XTunerMeta.read(tmp_path).latest_exp
    found = set(checkpoints(tmp_path))
    if save == "async":  # it may have been killed between the record of a snapshot and the end of the one before
        found.discard("snapshot-step-6")
    assert found == {"ckpt-step-12", "ckpt-step-14", "snapshot-step-9"}
    assert [Path(path).name for path in exp.checkpoint_list] == ["ckpt-step-12", "ckpt-step-14"]
    assert exp.cur_step == exp.history[-1]["end"] == STEPS
    assert len(exp.history) == 2
    checkpoint = holdfast.open(Path(exp.checkpoint_list[-1]) / "weights")
    assert checkpoint.verify().ok
    assert checkpoint.state()["model"]["first.weight"].shape == (32, 8)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without dropout: XTuner's checkpoints have no random states."""
    path = tmp_path_factory.mktemp("plain")
    job(path, STEPS, "--dropout", 0, nproc=2)
    return path


@pytest.mark.parametrize("save", ["stock", "split"])
def test_a_run_goes_on_from_what_xtuner_wrote(tmp_path: Path, plain: Path, save: str) -> None:
    job(tmp_path, 8, "--save", save, "--dropout", 0, nproc=2)
    job(tmp_path, STEPS, "--dropout", 0, "--resume", "auto", nproc=2)
    assert curve(tmp_path) == curve(plain)
    assert checkpoints(tmp_path) == ["ckpt-step-12", "ckpt-step-14"]


def test_xtuner_goes_on_from_what_we_wrote(tmp_path: Path, plain: Path) -> None:
    path = XTunerMeta.read(plain).latest_exp.checkpoint_list[0]
    job(tmp_path, STEPS, "--dropout", 0, "--load", "stock", "--resume", path, nproc=2)
    assert curve(tmp_path) == {step: loss for step, loss in curve(plain).items() if step > 12}


def test_a_run_killed_between_a_checkpoint_and_its_record_goes_on_from_it(tmp_path: Path, whole: Path) -> None:
    """XTuner's own resumes from the one before, and dies with `FileExistsError` when it comes by that step again."""
    job(tmp_path, STEPS, "--kill-at-record", 8, nproc=2, killed=True)
    assert Path(XTunerMeta.read(tmp_path).latest_checkpoint or "").name == "ckpt-step-4"
    job(tmp_path, STEPS, "--resume", "auto", nproc=2)
    assert curve(tmp_path) == curve(whole)
    assert XTunerMeta.read(tmp_path).latest_exp.history[-1]["begin"] == 8
    assert checkpoints(tmp_path) == ["ckpt-step-12", "ckpt-step-14"]


def test_all_ranks_write_dense_weights(tmp_path: Path) -> None:
    """XTuner's ranks leave what is the same on all of them to one."""
    job(tmp_path, 4, "--dense", 256, nproc=2)
    weights = Path(XTunerMeta.read(tmp_path).latest_checkpoint or "") / "weights"
    written = {rank: sum(file.stat().st_size for file in weights.glob(f"__{rank}_*.distcp")) for rank in (0, 1)}
    assert min(written.values()) > 0.8 * max(written.values()) > 256 * 1024, written


def test_another_number_of_ranks_and_a_run_that_fails(tmp_path: Path) -> None:
    """A training loop that raises with a save in flight ends at once, and what it saved is there."""
    (tmp_path / "run").mkdir()
    began = time.monotonic()
    with pytest.raises(AssertionError, match="training failed"):
        run_script(JOB, tmp_path / "run", STEPS, "--raise", 8, "--dropout", 0, nproc=2)
    assert time.monotonic() - began < 90
    job(tmp_path / "run", STEPS, "--dropout", 0, "--resume", "auto", nproc=1)
    assert max(curve(tmp_path / "run")) == STEPS
    assert XTunerMeta.read(tmp_path / "run").latest_exp.history[-1]["begin"] in (4, 8)


# One process. ----------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


def engine_of(seed: int = 0, steps: int = 2, **options: Any) -> TrainEngine:
    torch.manual_seed(seed)
    model = Small()
    engine = TrainEngine(model, torch.optim.AdamW(model.parameters(), lr=0.01), **options)
    for _ in range(steps):
        train(engine)
    return engine


def train(engine: TrainEngine) -> None:
    engine.model(torch.ones(2, 4)).square().sum().backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def moments(engine: TrainEngine) -> dict[str, torch.Tensor]:
    state = get_optimizer_state_dict(engine.model, engine.optimizer)["state"]
    return {f"{name}.{key}": value.clone() for name, row in state.items() for key, value in row.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_future_is_one_of_concurrent_futures(tmp_path: Path) -> None:
    engine = engine_of()
    called: list[Future[Path]] = []
    future = engine.async_save_dcp(tmp_path / "weights")
    future.add_done_callback(called.append)
    assert isinstance(future, Future)
    done, _ = wait([future], timeout=60)  # with no optimizer step in between, as at the end of training
    assert done == {future}
    assert future.result() == tmp_path / "weights"
    assert holdfast.open(future.result()).verify().ok
    deadline = time.monotonic() + 10
    while not called and time.monotonic() < deadline:
        time.sleep(0.01)
    assert called == [future]


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    engine = engine_of()
    expected = engine.model.head.weight.detach().clone()
    future = engine.async_save_dcp(tmp_path / "weights")
    train(engine)
    engine.put_model_to_device("cpu")
    assert not torch.equal(engine.model.head.weight, expected)
    assert torch.equal(holdfast.open(future.result(60)).read("model.head.weight"), expected)


def test_a_failure_ends_in_the_future(tmp_path: Path) -> None:
    engine = engine_of()
    (tmp_path / "file").write_text("")
    with pytest.raises(holdfast.HoldfastError):
        engine.async_save_dcp(tmp_path / "file" / "weights").result(60)
    train(engine)


def test_what_a_callback_raises_is_raised_by_the_next_save(tmp_path: Path) -> None:
    """XTuner's own futures, as all of `concurrent.futures`, log it and go on."""

    def fail(_: object) -> None:
        raise OSError("no metrics today")

    engine = engine_of()
    future = engine.async_save_dcp(tmp_path / "weights")
    future.add_done_callback(fail)
    wait([future], timeout=60)
    wait_for(lambda: bool(engine._callback_errors))
    with pytest.raises(holdfast.CallbackFailed, match="no metrics today") as caught:
        engine.save_dcp(tmp_path / "next")
    assert isinstance(caught.value.__cause__, OSError)
    assert holdfast.open(tmp_path / "weights").verify().ok
    engine.save_dcp(tmp_path / "next")
    run = run_of(tmp_path / "run", engine)
    run.save(2).add_done_callback(fail)
    wait_for(lambda: run._failure is not None)
    with pytest.raises(OSError, match="no metrics today"):
        run.save(3)
    run.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_thousands_of_tensors_take_no_descriptor_each(tmp_path: Path) -> None:
    """XTuner stages each tensor in a shared memory of its own, with a descriptor (about 3,000 for a model)."""
    more = {f"tensor-{number}": torch.full((64,), float(number)) for number in range(5_000)}
    engine = engine_of(extra_state=more)
    engine.save_dcp(tmp_path / "first")
    before = len(os.listdir("/proc/self/fd"))
    future = engine.async_save_dcp(tmp_path / "weights")
    engine.before_update()
    assert len(os.listdir("/proc/self/fd")) < before + 16
    assert holdfast.open(future.result(60)).read("tensor-4999")[0] == 4999


def test_a_step_that_comes_again_is_replaced(tmp_path: Path) -> None:
    """XTuner's own asynchronous save raises `FileExistsError` there."""
    engine = engine_of()
    for _ in range(2):
        train(engine)
        engine.async_save_dcp(tmp_path / "weights").result(60)
    assert torch.equal(holdfast.open(tmp_path / "weights").read("model.head.bias"), engine.model.head.bias)


@pytest.mark.parametrize("load_states", [True, False])
@pytest.mark.parametrize("load_args", [True, False])
def test_what_is_loaded_of_the_optimizer(tmp_path: Path, load_states: bool, load_args: bool) -> None:
    saved, engine = engine_of(1, 3), engine_of(2, 1)
    saved.optimizer.param_groups[0]["lr"] = 0.5
    saved.save_dcp(tmp_path / "weights")
    before = moments(engine)
    random = torch.random.get_rng_state()
    engine.load_dcp(tmp_path / "weights", load_states, load_args)
    assert same(get_model_state_dict(engine.model), get_model_state_dict(saved.model))
    assert engine.optimizer.param_groups[0]["lr"] == (0.5 if load_args else 0.01)
    if load_states:
        assert same(moments(engine), moments(saved))
    elif load_args:
        assert not engine.optimizer.state
    else:
        assert same(moments(engine), before)
    if not load_states:
        assert torch.equal(torch.random.get_rng_state(), random)


def test_random_states_and_more_come_back_with_the_optimizer(tmp_path: Path) -> None:
    saved, engine = engine_of(1, 3, extra_state={"ema": torch.full((2,), 3.0)}), engine_of(2, 1)
    engine.extra_state = {"ema": torch.zeros(2)}
    saved.save_dcp(tmp_path / "weights")
    expected = torch.rand(3)
    engine.load_dcp(tmp_path / "weights")
    assert torch.equal(torch.rand(3), expected)
    assert engine.extra_state["ema"].tolist() == [3.0, 3.0]
    with pytest.raises(holdfast.ConfigError, match="rng"):
        engine_of(extra_state={"rng": 1}).save_dcp(tmp_path / "refused")


def test_a_checkpoint_without_optimizer_loads_the_model(tmp_path: Path) -> None:
    saved, engine = engine_of(1, 3), engine_of(2, 1)
    saved.save_dcp(tmp_path / "weights", save_optimizer=False)
    before = moments(engine)
    engine.load_dcp(tmp_path / "weights")
    assert same(get_model_state_dict(engine.model), get_model_state_dict(saved.model))
    assert same(moments(engine), before)


def test_stock_dcp_reads_weights_and_both_older_directories(tmp_path: Path) -> None:
    saved = engine_of(1, 3)
    saved.save_dcp(tmp_path / "new" / "weights")
    saved.save_dcp(model_dir=tmp_path / "old" / "model", optimizer_dir=tmp_path / "old" / "optimizer")
    other = engine_of(2, 1)
    new: dict[str, Any] = {
        "model": get_model_state_dict(other.model),
        "optimizer": get_optimizer_state_dict(other.model, other.optimizer),
    }
    dcp.load(new, checkpoint_id=tmp_path / "new" / "weights", no_dist=True)
    other = engine_of(2, 1)
    model, optimizer = get_model_state_dict(other.model), get_optimizer_state_dict(other.model, other.optimizer)
    dcp.load(model, checkpoint_id=tmp_path / "old" / "model", no_dist=True)
    dcp.load(optimizer, checkpoint_id=tmp_path / "old" / "optimizer", no_dist=True)
    for found, state in ((new["model"], new["optimizer"]), (model, optimizer)):
        assert same(found, get_model_state_dict(saved.model))
        values = {f"{name}.{key}": value for name, row in state["state"].items() for key, value in row.items()}
        assert same(values, moments(saved))
    again = engine_of(3, 1)
    again.load_dcp(tmp_path / "old" / "weights")  # which isn't there: the older ones are
    assert same(moments(again), moments(saved))
    again = engine_of(3, 1)
    again.load_dcp(model_dir=tmp_path / "old" / "model", optimizer_dir=tmp_path / "old" / "optimizer")
    assert same(moments(again), moments(saved))


class Config:
    dcp_ignore_frozen_params = True


class Tuned(TrainEngineMixin):
    model_cfg = Config()


def tuned_of(seed: int) -> Tuned:
    made, tuned = engine_of(seed, 0), Tuned()
    made.model.base.requires_grad_(False)
    tuned.model, tuned.optimizer = made.model, torch.optim.AdamW(made.model.head.parameters())
    train(tuned)
    return tuned


@pytest.mark.parametrize("by_stock", [False, True])
def test_frozen_parameters_are_left_out(tmp_path: Path, by_stock: bool) -> None:
    saved, engine = tuned_of(1), tuned_of(2)
    if by_stock:  # with its frozen ones
        state = {
            "model": get_model_state_dict(saved.model),
            "optimizer": get_optimizer_state_dict(saved.model, saved.optimizer),
        }
        dcp.save(state, checkpoint_id=tmp_path / "weights", no_dist=True)
    else:
        saved.save_dcp(tmp_path / "weights")
        assert "model.base.weight" not in holdfast.open(tmp_path / "weights").tensors
    base = engine.model.base.weight.clone()
    engine.load_dcp(tmp_path / "weights")
    assert torch.equal(engine.model.base.weight, base)
    assert torch.equal(engine.model.head.weight, saved.model.head.weight)


# The trainer's side. ---------------------------------------------------------------------------------------------


def run_of(work_dir: Path, engine: TrainEngine, **options: Any) -> TrainerCheckpoints:
    options = {"checkpoint_interval": 2, "checkpoint_maxkeep": 1, "async_checkpoint": True, **options}
    return TrainerCheckpoints(work_dir, engine, **options)


def go(run: TrainerCheckpoints, steps: range) -> None:
    for step in steps:
        train(run.engine)
        run.maybe_save(step, train_state={"total_consumed_tokens": step * 10})


def test_the_record_names_what_is_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    with run_of(tmp_path, engine_of(), snapshot_interval=1, total_step=7) as run:
        go(run, range(1, 8))
    exp = XTunerMeta.read(tmp_path).latest_exp
    names = [Path(path).name for path in (*exp.checkpoint_list, *exp.snap_checkpoint_list)]
    assert names == ["ckpt-step-7", "snapshot-step-5"]
    assert sorted(os.listdir(run.checkpoint_dir)) == sorted(names)
    assert exp.latest_checkpoint is not None
    assert exp.latest_checkpoint.endswith("ckpt-step-7")
    assert exp.consumed_tokens == 70
    assert json.loads((run.checkpoint_dir / "ckpt-step-7" / "train_state.json").read_text())["cur_step"] == 7
    xtuners_own = {"history", "exp_dir", "hf_checkpoint_list", "checkpoint_list", "snap_checkpoint_list"}
    xtuners_own |= {"cur_step", "cur_epoch", "consumed_tokens", "consumed_samples"}
    assert set(json.loads((tmp_path / ".xtuner").read_text())["exps"][0]) == xtuners_own  # it forbids further ones


def test_nothing_is_deleted_before_the_next_record_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XTuner deletes first, and what its callback raises vanishes."""
    run = run_of(tmp_path, engine_of())
    go(run, range(1, 3))
    run.wait()

    def refuse(self: XTunerMeta, work_dir: Path) -> None:
        raise holdfast.StorageError("no space", path=str(work_dir), errno=28)

    with monkeypatch.context() as patch:
        patch.setattr(XTunerMeta, "write", refuse)
        go(run, range(3, 5))
        with pytest.raises(holdfast.StorageError, match="no space"):
            run.wait()
    assert (run.checkpoint_dir / "ckpt-step-2" / "weights").exists()
    again = run_of(tmp_path, engine_of(5), auto_resume=True)
    state = again.resume()
    assert state is not None
    assert state["cur_step"] == 4  # published, then not recorded: it is by now
    assert XTunerMeta.read(tmp_path).latest_exp.cur_step == 4


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    with run_of(tmp_path, engine_of()) as run:
        go(run, range(1, 3))
    left = run.checkpoint_dir / "ckpt-step-4"
    (left / ".weights.0123456789ab.incomplete").mkdir(parents=True)
    (left / "train_state.json").write_text("{}")
    (run.checkpoint_dir / ".ckpt-step-1.deleted").mkdir()
    again = run_of(tmp_path, engine_of(5), auto_resume=True)
    assert os.listdir(run.checkpoint_dir) == ["ckpt-step-2"]
    state = again.resume()
    assert state is not None
    assert state["cur_step"] == 2


def test_the_one_before_is_taken_where_the_newest_is_damaged(tmp_path: Path) -> None:
    engine = engine_of()
    with run_of(tmp_path, engine, checkpoint_maxkeep=-1) as run:
        go(run, range(1, 5))
    for file in (run.checkpoint_dir / "ckpt-step-4" / "weights").glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    state = run_of(tmp_path, engine_of(5), auto_resume=True).resume()
    assert state is not None
    assert state["cur_step"] == 2


def test_scheduler_and_dataloader_come_back(tmp_path: Path) -> None:
    class Loader:
        at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    engine, loader = engine_of(), Loader()
    loader.at = 7
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2)
    train(engine)
    scheduler.step()
    with run_of(tmp_path, engine) as run:
        path = run.save(2, dataloader=loader, lr_scheduler=scheduler, trainer_config={"lr": 1}).result(60)
    assert torch.load(path / "lr_scheduler") == scheduler.state_dict()
    assert torch.load(path / "dataloader") == {"at": 7}
    assert json.loads((path / "trainer_config.json").read_text()) == {"lr": 1}
    # What was published with the weights counts, whatever a later attempt at this step has left beside them.
    torch.save({"at": 99}, path / "dataloader")
    other, fresh = engine_of(5), Loader()
    again = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    run_of(tmp_path, other, auto_resume=True).resume(dataloader=fresh, lr_scheduler=again)
    assert fresh.at == 7
    assert again.state_dict() == scheduler.state_dict()


def test_exports_are_linked_and_old_ones_deleted(tmp_path: Path) -> None:
    engine = engine_of()
    engine.hf_options = lambda: {"assets": None}  # type: ignore[method-assign]
    with run_of(tmp_path, engine, checkpoint_interval=None, hf_interval=1, hf_max_keep=2, async_hf_export=True) as run:
        go(run, range(1, 5))
    names = sorted(name for name in os.listdir(run.exp_dir) if not name.startswith("."))  # not locks being released
    assert names == ["checkpoints", "hf-3", "hf-4", "hf-latest"]
    exported = holdfast.open(run.exp_dir / "hf-latest")
    assert exported.tensors["head.weight"].dtype == torch.bfloat16
    assert torch.equal(exported.read("head.weight"), engine.model.head.weight.bfloat16())
    assert XTunerMeta.read(tmp_path).latest_hf_checkpoint == str(run.exp_dir / "hf-4")


def test_a_new_run_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    first, second = run_of(tmp_path, engine_of()), run_of(tmp_path, engine_of())
    assert first.exp_dir != second.exp_dir
    assert len(XTunerMeta.read(tmp_path).exps) == 2
    assert second.resume() is None


@pytest.mark.parametrize("option", ["checkpoint_interval", "hf_max_keep", "snapshot_interval"])
def test_options_are_checked(tmp_path: Path, option: str) -> None:
    with pytest.raises(holdfast.ConfigError, match=option):
        run_of(tmp_path, engine_of(), **{option: 0})
    with pytest.raises(holdfast.ConfigError, match="TrainEngineMixin"):
        TrainerCheckpoints(tmp_path, object())  # type: ignore[arg-type]


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".xtuner").write_text("{")
    with pytest.raises(holdfast.CheckpointCorrupt, match="record"):
        run_of(tmp_path, engine_of())


# Exports of XTuner's own models. ---------------------------------------------------------------------------------


class Experts(nn.Module):
    """Names as an XTuner model has them: two experts fused in one tensor, a float32 buffer, its own prefix."""

    class Wanted:
        hf_config = None

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2, bias=False)
        self.fused = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("bias", torch.randn(2))
        self.config = self.Wanted()

    def to_hf_key_list(self, key: str) -> list[str]:
        if key == "fused":
            return [f"model.experts.{at}.weight" for at in range(2)]
        return [f"model.{key}"]


class Composite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = Experts()

    def to_hf_key_list(self, key: str) -> list[str]:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Experts, Composite])
def test_an_xtuner_model_is_exported_under_its_published_names(tmp_path: Path, kind: type[nn.Module]) -> None:
    model = kind()
    own = model if kind is Experts else model.language_model
    engine = TrainEngine(model, torch.optim.AdamW(model.parameters()))
    future = engine.async_save_hf(tmp_path / "hf-1")
    exported = holdfast.open(future.result(60))
    assert set(exported.tensors) == {
        "model.gate.weight",
        "model.experts.0.weight",
        "model.experts.1.weight",
        "model.bias",
    }
    assert torch.equal(exported.read("model.experts.1.weight"), own.fused[4:].bfloat16())
    assert torch.equal(exported.read("model.bias"), own.bias)  # a buffer keeps its dtype
    shutil.rmtree(tmp_path / "hf-1")
    engine.save_hf(tmp_path / "hf-1")
    assert set(holdfast.open(tmp_path / "hf-1").tensors) == set(exported.tensors)
    before = own.fused.detach().clone()
    with torch.no_grad():
        own.fused.zero_()
    engine.from_hf(tmp_path / "hf-1")
    assert torch.equal(own.fused, before.bfloat16().float())


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    example = JOB.parents[2] / "examples" / "xtuner_engine.py"
    ran = [run_script(example, tmp_path / out, steps).stdout for out, steps in (("whole", 8), ("two", 5), ("two", 8))]
    # Between them may be what libraries of the environment warn of.
    whole, first, second = ([line for line in out.splitlines() if re.match(r"\d+ -?0x", line)] for out in ran)
    assert first + second == whole
    assert (len(first), len(second)) == (5, 3)
    assert ran[2].splitlines()[-1] == "checkpoints: ckpt-step-8 snapshot-step-7 ckpt-step-5"
    assert (XTunerMeta.read(tmp_path / "two").latest_hf_checkpoint or "").endswith("hf-8")
