"""Every option of torchtitan's checkpoint managers, on a small state; the older surface needs no torchtitan."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.catalog.root import published
from holdfast.errors import ConfigError, StateMismatch
from holdfast.integrations.torchtitan import LegacyCheckpointManager
from holdfast.storage.local import open_storage

HAS_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None


class Loader:
    """Gives its state as torchtitan's does: under the name of its data-parallel rank, as bytes."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": pickle.dumps({"at": self.at}), "world_size": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = pickle.loads(state["dp_rank_0"])["at"]


class Adapter:
    """Names of Hugging Face's have "hf." before them."""

    fqn_to_index_mapping = None
    hf_assets_path: str | None = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        return dcp.HuggingFaceStorageReader(path)


class Run:
    """A trainer with torchtitan's parts."""

    def __init__(self, fill: float = 0.0) -> None:
        self.parts: list[nn.Module] = [
            nn.ModuleDict({"first": nn.Linear(2, 3)}),
            nn.ModuleDict({"last": nn.Linear(3, 1)}),
        ]
        with torch.no_grad():
            for param in self.params:
                param.fill_(fill)
        self.optimizer = torch.optim.AdamW(self.params, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (step + 1))
        self.loader = Loader()
        self.step = 0

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for part in self.parts for param in part.parameters()]

    def train(self, manager: Any, steps: int, **last: bool) -> None:
        while self.step < steps:
            self.step += 1
            self.loader.at += 2
            for param in self.params:
                param.grad = torch.full_like(param, 0.1 * self.step)
            manager.maybe_wait_for_staging()
            self.optimizer.step()
            self.scheduler.step()
            manager.save(self.step, **(last if self.step == steps else {}))

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    @property
    def weights(self) -> list[list[float]]:
        return [param.detach().flatten().tolist() for param in self.params]


Make = Callable[..., Any]


@pytest.fixture(params=["new", "legacy"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Make a manager of ``run`` in ``tmp_path / "checkpoint"``, by options; the last step is told by `last`."""
    if request.param == "new" and not HAS_TORCHTITAN:
        pytest.skip("torchtitan is not installed")
    made: list[Any] = []

    def manager(run: Run, *, sd_adapter: Any = None, ft_manager: Any = None, **options: Any) -> Any:
        options = {"interval": 2, "last_save_model_only": False, "async_mode": "async", **options}
        parts = {
            "dataloader": run.loader,
            "model_parts": run.parts,
            "optimizers": run.optimizer,
            "lr_schedulers": run.scheduler,
            "states": {"train_state": run},
            "sd_adapter": sd_adapter,
            "base_folder": str(tmp_path),
            "ft_manager": ft_manager,
        }
        if request.param == "new":
            from holdfast.integrations.torchtitan import CheckpointManager

            made.append(CheckpointManager(CheckpointManager.Config(enable=True, **options), **parts))
        else:
            made.append(LegacyCheckpointManager(checkpoint_config=SimpleNamespace(enable=True, **options), **parts))
        return made[-1]

    manager.last = {"last_step": True} if request.param == "new" else {"force": True}
    yield manager
    for one in made:
        one.close()


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_run_is_saved_at_its_interval_and_resumed(make: Make, tmp_path: Path) -> None:
    run = Run()
    manager = make(run, keep_latest_k=2)
    assert manager.load(step=-1) is False
    run.train(manager, 7, **make.last)
    manager.close()
    assert steps_in(tmp_path / "checkpoint") == ["step-6", "step-7"]
    again = Run(fill=5.0)
    manager = make(again)
    assert manager.load(step=-1) is True
    manager.close()
    assert (again.step, again.loader.at, again.weights) == (7, 14, run.weights)
    assert again.scheduler.last_epoch == run.scheduler.last_epoch
    assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    exactly = Run(fill=5.0)
    assert make(exactly).load(step=6) is True
    assert exactly.step == 6


def test_nothing_is_deleted_where_all_is_kept(make: Make, tmp_path: Path) -> None:
    run = Run()
    manager = make(run, keep_latest_k=0, interval=1)
    run.train(manager, 4)
    manager.close()
    assert steps_in(tmp_path / "checkpoint") == [f"step-{step}" for step in (1, 2, 3, 4)]


def test_the_first_step_is_saved_on_request(make: Make, tmp_path: Path) -> None:
    run = Run()
    manager = make(run, enable_first_step_checkpoint=True, interval=100)
    run.train(manager, 3)
    manager.close()
    assert steps_in(tmp_path / "checkpoint") == ["step-1"]


def test_a_missing_step_is_no_file(make: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"load_step=5 not found.*does not exist"):
        make(Run()).load(step=5)
    assert not (tmp_path / "checkpoint").exists()
    run = Run()
    manager = make(run)
    run.train(manager, 2)
    manager.close()
    with pytest.raises(FileNotFoundError, match="load_step=5 not found"):
        make(Run()).load(step=5)


def test_what_is_excluded_keeps_its_value(make: Make) -> None:
    run = Run()
    manager = make(run)
    run.train(manager, 2)
    manager.close()
    again = Run()
    assert make(again, exclude_from_loading=["dataloader", "lr_scheduler"]).load(step=-1)
    assert (again.step, again.loader.at, again.scheduler.last_epoch) == (2, 0, 0)
    with pytest.raises(ValueError, match=r"no_such_key not found in state_dict\."):
        make(Run(), exclude_from_loading=["no_such_key"]).load(step=-1)


def test_nothing_is_written_where_only_loads_are_wanted(make: Make, tmp_path: Path) -> None:
    run = Run()
    manager = make(run, load_only=True)
    assert manager.load(step=-1) is False
    run.train(manager, 4, **make.last)
    manager.close()
    assert not (tmp_path / "checkpoint").exists()


def test_a_last_save_of_the_model_is_converted_and_never_resumed_from(make: Make, tmp_path: Path) -> None:
    run = Run()
    options = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    manager = make(run, **options)
    run.train(manager, 5, **make.last)
    manager.close()
    last = holdfast.open(tmp_path / "checkpoint" / "step-5")
    assert {name: info.dtype for name, info in last.tensors.items()} == {
        name: torch.bfloat16 for part in run.parts for name in part.state_dict()
    }
    longer = Run()
    manager = make(longer, **options, keep_latest_k=2)
    assert manager.load(step=-1)
    assert longer.step == 4
    longer.train(manager, 5)
    again = holdfast.open(tmp_path / "checkpoint" / "step-5")
    assert again.manifest == last.manifest
    longer.train(manager, 9, **make.last)
    manager.close()
    assert holdfast.open(tmp_path / "checkpoint" / "step-9").tensors.keys() == last.tensors.keys()


def test_a_longer_run_passes_a_last_model_at_its_interval(make: Make, tmp_path: Path) -> None:
    run = Run()
    manager = make(run, last_save_model_only=True)
    run.train(manager, 4, **make.last)
    manager.close()
    longer = Run()
    manager = make(longer, last_save_model_only=True)
    assert manager.load(step=-1)
    assert longer.step == 2
    longer.train(manager, 6)
    manager.close()
    assert not holdfast.open(tmp_path / "checkpoint" / "step-4").manifest.resumable
    assert holdfast.open(tmp_path / "checkpoint" / "step-6").manifest.resumable


def test_a_seed_checkpoint_gives_the_model_alone(make: Make, tmp_path: Path) -> None:
    seed = Run(fill=3.0)
    manager = make(seed, last_save_model_only=True)
    manager.save(0, **make.last)
    manager.close()
    run = Run()
    run.step = 0
    assert make(run).load(step=-1) is True
    assert (run.weights, run.step) == (seed.weights, 0)


def test_a_run_begins_with_an_initial_checkpoint(make: Make, tmp_path: Path) -> None:
    source = Run(fill=3.0)
    manager = make(source)
    source.train(manager, 2)
    manager.close()
    path = tmp_path / "initial"
    shutil.move(tmp_path / "checkpoint" / "step-2", path)
    shutil.rmtree(tmp_path / "checkpoint")
    run = Run()
    manager = make(run, initial_load_path=str(path))
    assert manager.load(step=-1) is True
    assert (run.weights, run.step, run.loader.at) == (source.weights, 0, 0)
    manager.close()
    whole = Run()
    manager = make(whole, initial_load_path=str(path), initial_load_model_only=False)
    assert manager.load(step=-1) is True
    assert (whole.weights, whole.step, whole.loader.at) == (source.weights, 2, 4)
    manager.close()
    with pytest.raises(ValueError, match="initial_load_path is invalid"):
        make(Run(), initial_load_path=str(tmp_path / "nowhere")).load(step=-1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_models_come_from_and_go_to_hugging_face_by_the_adapter(make: Make, tmp_path: Path) -> None:
    run = Run(fill=2.0)
    options = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "float16"}
    manager = make(run, sd_adapter=Adapter(), **options)
    run.train(manager, 3, **make.last)
    manager.close()
    out = tmp_path / "checkpoint" / "step-3"
    files = load_file(out / "model.safetensors")
    expected = {f"hf.{name}": value.half() for part in run.parts for name, value in part.state_dict().items()}
    assert files.keys() == expected.keys()
    assert all(torch.equal(files[name], value) for name, value in expected.items())
    shutil.move(out, tmp_path / "hf")
    shutil.rmtree(tmp_path / "checkpoint")
    other = Run()
    manager = make(other, sd_adapter=Adapter(), initial_load_in_hf=True, initial_load_path=str(tmp_path / "hf"))
    assert manager.load(step=-1) is True
    assert torch.allclose(other.params[0], run.params[0], atol=1e-2)
    with pytest.raises(ValueError, match="sd_adapter is not provided"):
        make(Run(), **options)


def test_a_longer_run_leaves_an_export_at_its_interval(make: Make, tmp_path: Path) -> None:
    options = {"last_save_model_only": True, "last_save_in_hf": True}
    run = Run()
    manager = make(run, sd_adapter=Adapter(), **options)
    run.train(manager, 4, **make.last)
    manager.close()
    longer = Run()
    manager = make(longer, sd_adapter=Adapter(), **options)
    assert manager.load(step=-1)
    assert longer.step == 2
    longer.train(manager, 6)
    manager.close()
    assert (tmp_path / "checkpoint" / "step-4" / "model.safetensors").exists()
    assert holdfast.open(tmp_path / "checkpoint" / "step-6").manifest.resumable


def test_a_disabled_save_waits_and_the_others_do_not_change_what_is_saved(make: Make, tmp_path: Path) -> None:
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        run = Run()
        manager = make(run, async_mode=mode, folder=mode)
        run.train(manager, 2)
        if mode == "disabled":
            assert steps_in(tmp_path / mode) == ["step-2"]
        saved = run.weights
        manager.maybe_wait_for_staging()
        with torch.no_grad():
            run.params[0].fill_(7.0)
        manager.close()
        again = Run()
        assert make(again, folder=mode).load(step=-1)
        assert again.weights == saved
    with pytest.raises(ValueError, match="async_mode"):
        make(Run(), async_mode="sometimes")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_resumes_from_a_flat_directory_of_stock_dcp(make: Make, tmp_path: Path) -> None:
    source = Run(fill=4.0)
    manager = make(source, async_mode="disabled")
    source.train(manager, 2)
    manager.close()
    path = tmp_path / "checkpoint" / "step-2"
    flat = holdfast.open(path).state()
    shutil.rmtree(tmp_path / "checkpoint")
    flat.pop("rng")
    dcp.save(flat, checkpoint_id=path)
    run = Run()
    assert make(run).load(step=-1) is True
    assert (run.step, run.loader.at, run.weights) == (2, 4, source.weights)


def test_closing_after_an_exception_waits_for_no_other_rank(make: Make) -> None:
    run = Run()
    manager = make(run)
    try:
        run.train(manager, 2)
        raise RuntimeError("the training failed")
    except RuntimeError:
        manager.close()
    manager.close()


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    config = SimpleNamespace(enable=False, folder="checkpoint")
    run = Run()
    manager = LegacyCheckpointManager(
        run.loader, run.parts, run.optimizer, run.scheduler, {}, config, base_folder=str(tmp_path)
    )
    assert manager.load() is False
    run.train(manager, 2)
    manager.close()
    assert not any(tmp_path.iterdir())


def test_the_older_options_are_read_by_their_names(tmp_path: Path) -> None:
    job = SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(tmp_path)),
        checkpoint=SimpleNamespace(
            enable_checkpoint=True, folder="old", interval=2, last_save_model_weights_only=True, load_step=2
        ),
    )
    run = Run()
    manager = LegacyCheckpointManager(run.loader, run.parts, run.optimizer, run.scheduler, {"train_state": run}, job)
    run.train(manager, 3, force=True)
    manager.close()
    assert steps_in(tmp_path / "old") == ["step-2", "step-3"]
    again = Run()
    manager = LegacyCheckpointManager(
        again.loader, again.parts, again.optimizer, again.scheduler, {"train_state": again}, job_config=job
    )
    assert manager.load() is True
    assert again.step == 2
    manager.close()
    with pytest.raises(ConfigError, match="ft_manager"):
        LegacyCheckpointManager(None, run.parts, run.optimizer, run.scheduler, {}, job, ft_manager=object())


def test_a_trainer_without_a_dataloader_may_exclude_it(make: Make, tmp_path: Path) -> None:
    source = Run(fill=3.0)
    source.loader = None
    manager = make(source)
    source.step = 2
    manager.save(2)
    manager.close()
    shutil.move(tmp_path / "checkpoint" / "step-2", tmp_path / "initial")
    run = Run()
    run.loader = None
    options = {"initial_load_path": str(tmp_path / "initial"), "initial_load_model_only": False}
    manager = make(run, exclude_from_loading=["dataloader", "lr_scheduler"], **options)
    assert manager.load(step=-1)
    assert (run.step, run.weights) == (2, source.weights)


@pytest.mark.parametrize("enabled", [True, False])
def test_replicas_of_torchft_are_refused(make: Make, enabled: bool) -> None:
    refused = pytest.raises(ConfigError, match="ft_manager") if enabled else contextlib.nullcontext()
    with refused:
        make(Run(), ft_manager=SimpleNamespace(enabled=enabled))


def test_another_model_is_a_mismatch(make: Make) -> None:
    run = Run()
    manager = make(run)
    run.train(manager, 2)
    manager.close()
    other = Run()
    other.parts[1]["last"] = nn.Linear(3, 5)
    with pytest.raises(StateMismatch, match=r"last\.weight"):
        make(other).load(step=-1)


# The behaviours that torchtitan's own checkpoint tests name and nothing above shows. -----------------------------


def test_what_is_due_is_told_and_saved_and_nothing_else(make: Make, tmp_path: Path) -> None:
    run = Run()
    manager = make(run, interval=3, keep_latest_k=0)
    asked = [(1, {}), (2, {}), (2, make.last), (3, {}), (4, {}), (4, make.last)]
    saved = [manager.save(step, **options) for step, options in asked]
    manager.close()
    assert steps_in(tmp_path / "checkpoint") == ["step-2", "step-3", "step-4"]
    if "last_step" in make.last:  # the older surface returns None
        assert saved == [False, False, True, True, False, True]


def test_names_have_no_prefix_and_what_is_not_persistent_no_name(make: Make, tmp_path: Path) -> None:
    run = Run()
    run.parts[0].register_buffer("freqs_cis", torch.ones(4), persistent=False)
    run.parts[1].register_buffer("scale", torch.ones(1))
    manager = make(run, last_save_model_only=True)
    run.train(manager, 3, **make.last)
    manager.close()
    model = {"first.weight", "first.bias", "last.weight", "last.bias", "scale"}
    whole = holdfast.open(tmp_path / "checkpoint" / "step-2").tensors.keys()
    assert {name for name in whole if not name.startswith(("optimizer.", "rng."))} == model
    assert any(name.startswith("optimizer.") for name in whole)
    assert holdfast.open(tmp_path / "checkpoint" / "step-3").tensors.keys() == model


def test_the_initial_checkpoint_counts_until_there_is_one_of_its_own(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Run(fill=3.0)
    manager = make(source, folder="source", last_save_model_only=True)
    source.train(manager, 1, **make.last)
    manager.close()
    options = {"initial_load_path": str(tmp_path / "source" / "step-1")}
    (tmp_path / "checkpoint" / "step-30").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-30" / "__0_0.distcp").write_bytes(b"what an aborted save has left")
    run = Run()
    manager = make(run, **options)
    with pytest.warns(UserWarning, match="step-30 .it has neither"):
        assert manager.load(step=-1) is True
    assert (run.weights, run.step) == (source.weights, 0)
    run.train(manager, 2)
    manager.close()
    again = Run()
    manager = make(again, **options)
    caplog.clear()
    assert manager.load(step=-1) is True
    assert (again.weights, again.step) == (run.weights, 2)
    assert not [record for record in caplog.records if "initial" in record.message]


def test_what_a_models_hooks_make_is_that_of_each_step(make: Make, tmp_path: Path) -> None:
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        fused = state.pop(f"{prefix}first.weight")
        state[f"{prefix}wq"], state[f"{prefix}wk"] = fused[:1].clone(), fused[1:].clone()

    run = Run()
    run.parts[0].register_state_dict_post_hook(split)
    manager = make(run, interval=1, keep_latest_k=0)
    expected = {}
    for step in (1, 2, 3):
        run.train(manager, step)
        expected[step] = run.parts[0]["first"].weight.detach().clone()
    manager.close()
    for step, fused in expected.items():
        saved = holdfast.open(tmp_path / "checkpoint" / f"step-{step}")
        assert torch.equal(torch.cat([saved.read("wq"), saved.read("wk")]), fused)
        assert "first.weight" not in saved.tensors
    assert not torch.equal(expected[1], expected[3])


def test_random_generators_go_on(make: Make) -> None:
    """torchtitan saves none."""
    run = Run()
    manager = make(run, async_mode="disabled")
    torch.manual_seed(3)
    run.train(manager, 2)
    expected = torch.rand(4)
    manager.close()
    assert make(Run()).load(step=-1)
    assert torch.equal(torch.rand(4), expected)


def test_what_has_no_metadata_does_not_count_among_the_latest(make: Make, tmp_path: Path) -> None:
    """torchtitan deletes a whole one for each broken one that it takes for newer."""
    run = Run()
    manager = make(run, interval=1, keep_latest_k=2)
    run.train(manager, 1)
    for step in (90, 91):
        (tmp_path / "checkpoint" / f"step-{step}").mkdir()
    run.train(manager, 4)
    manager.close()
    assert steps_in(tmp_path / "checkpoint") == ["step-3", "step-4", "step-90", "step-91"]
    again = Run()
    assert make(again).load(step=-1)
    assert again.step == 4


def test_closing_waits_for_the_save_in_flight(make: Make, tmp_path: Path) -> None:
    """A process that ends after torchtitan's ``close`` takes an asynchronous save in flight with it."""
    run = Run()
    run.parts[0].register_buffer("large", torch.ones(16 << 20))
    manager = make(run)
    manager.save(2)
    manager.close()
    assert holdfast.open(tmp_path / "checkpoint" / "step-2").verify().ok


def test_a_run_is_saved_and_resumed_in_a_bucket(make: Make, place: str, tmp_path: Path) -> None:
    run = Run()
    manager = make(run, folder=place, keep_latest_k=2)
    assert manager.load(step=-1) is False
    run.train(manager, 7, **make.last)
    manager.close()
    again = Run(fill=5.0)
    manager = make(again, folder=place)
    assert manager.load(step=-1) is True
    assert (again.step, again.loader.at, again.weights) == (7, 14, run.weights)
    assert published(open_storage(place), "step-{step}") == [(6, "step-6"), (7, "step-7")]
    with pytest.raises(FileNotFoundError, match="load_step=3 not found"):
        manager.load(step=3)
    assert manager.load(step=6) is True
    assert again.step == 6
    begun = Run()
    assert make(begun, initial_load_path=f"{place}/step-7", initial_load_model_only=True).load(step=-1) is True
    assert (begun.step, begun.weights) == (0, run.weights)
    shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
    with pytest.raises(ValueError, match="initial_load_path is invalid"):
        make(Run(), folder="other", initial_load_path=f"{place}/step-1").load(step=-1)
    with pytest.raises(ConfigError, match=r"hdfs://host/run' can't be used"):
        make(Run(), folder="hdfs://host/run").load(step=-1)
    assert not list(tmp_path.rglob("*:"))


def test_a_last_export_goes_to_a_bucket(place: str, tmp_path: Path) -> None:
    """By the older surface: torchtitan's own configuration refuses it."""
    run, options = Run(), SimpleNamespace(interval=2, last_save_in_hf=True, folder=place)
    parts = {"model_parts": run.parts, "optimizers": run.optimizer, "lr_schedulers": run.scheduler}
    manager = LegacyCheckpointManager(
        run.loader, **parts, states={"train_state": run}, checkpoint_config=options, sd_adapter=Adapter()
    )
    run.train(manager, 3, force=True)
    manager.close()
    into = {f"hf.{name}": torch.zeros_like(value) for part in run.parts for name, value in part.state_dict().items()}
    holdfast.load(into, f"{place}/step-3")
    assert torch.equal(into["hf.first.weight"], run.params[0])


def test_the_configuration_is_checked_as_torchtitans() -> None:
    pytest.importorskip("torchtitan.components.checkpointer.base")
    from torchtitan.components.checkpointer import BaseCheckpointManager

    from holdfast.integrations.torchtitan import CheckpointManager

    config = CheckpointManager.Config
    assert set(config.__annotations__) == {"async_mode"}
    assert issubclass(CheckpointManager, BaseCheckpointManager)
    assert config(async_mode="ASYNC").async_mode == "async"
    assert config(initial_load_path="  /absolute/step-100 ").initial_load_path == "/absolute/step-100"
    assert json.dumps(config(enable=True).to_dict())
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("folder.*cannot be empty", {"folder": "  "}),
        ("interval.*at least 1", {"interval": 0}),
        ("cannot be negative", {"keep_latest_k": -1}),
        ("at least 2", {"keep_latest_k": 1}),
        ("model key shouldn't be", {"exclude_from_loading": ["model"]}),
        ("absolute path or a remote", {"initial_load_path": "relative/step-100"}),
        ("requires initial_load_model_only", {"initial_load_in_hf": True, "initial_load_model_only": False}),
        ("requires initial_load_in_hf", {"initial_load_in_hf_quantized": True, "initial_load_path": "/a/step-1"}),
        ("requires last_save_model_only", {"last_save_in_hf": True, "last_save_model_only": False}),
        ("not supported with a remote", {"last_save_in_hf": True, "folder": "gs://bucket/run"}),
        ("Invalid async_mode", {"async_mode": "sometimes"}),
    ]
    for message, options in wrong:
        with pytest.raises(ValueError, match=message):
            config(**options)


def test_a_disabled_manager_of_torchtitans_does_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.components.checkpointer.base")
    from holdfast.integrations.torchtitan import CheckpointManager

    run = Run()
    manager = CheckpointManager(
        CheckpointManager.Config(enable=False),
        dataloader=run.loader,
        model_parts=run.parts,
        optimizers=run.optimizer,
        lr_schedulers=run.scheduler,
        states={"train_state": run},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    assert manager.load(step=5) is False
    run.train(manager, 2, last_step=True)
    manager.maybe_wait_for_saving()
    manager.close()
    assert not any(tmp_path.iterdir())
