"""The cluster recipes, in their tiny variants: the launchers as users call them, and what their checks rest on."""

# ruff: noqa: E402 - the recipes are imported from the root of the repository, in this process and on the ranks

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster.job import Job, loss_of
from benchmarks.cluster.models import RECIPES
from benchmarks.cluster.parallel import Layout, allocate, initialise, shard
from benchmarks.cluster.report import make_report
from benchmarks.cluster.shards import fill, fingerprints, tensors_in

CPU = torch.device("cpu")
RUN_TIMEOUT_S = 220.0
"""Of a recipe; it takes 55 s where nobody else computes."""

pytestmark = pytest.mark.timeout(240)

# launchers -------------------------------------------------------------------------------------------------------


def run_recipe(command: list[str], **variables: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    environment |= {"NPROC": "2", "EVERY": "4", "PERIODS": "7", "RAW_MIB": "4", **variables}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-8000:]}"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `torchrun.sh tiny-dense` leaves."""
    out = tmp_path_factory.mktemp("recipes") / "dense"
    run_recipe([str(ROOT / "benchmarks/cluster/torchrun.sh"), "tiny-dense", str(out)])
    return out


def assert_sound(out: Path, recipe: str) -> None:
    report = json.loads((out / "report.json").read_text())
    assert len(report["checks"]) == 8
    assert all(check["ok"] for check in report["checks"]), report["checks"]
    found = {check["name"]: check["found"] for check in report["checks"]}
    assert "bit for bit" in found["resumed run is the uninterrupted run"]
    assert found["round trip on another number of ranks"].startswith("2 → 1 ranks")
    assert "killed after step 13" in found["killed and resumed"]

    assert len(report["saves"]) == 7
    assert len(report["periods"]) == 6
    assert len(report["ratios"]) == 4
    # Blocks are left out where the machine was so busy that a save did not end in time; the disk never is.
    assert report["ratios"][-1]["count"] == 5
    assert report["ratios"][-1]["low"] > 0
    assert all(save["bytes"] > save["bytes_largest"] > 0 for save in report["saves"])
    assert set(report["commands"]) == {"reference", "crash", "interrupted", "reloaded", "read-back"}

    losses = [event for event in parts_of(out)["reference"]["events"] if event["event"] == "step"]
    assert [event["step"] for event in losses] == list(range(1, 29))
    assert float.fromhex(losses[-1]["loss"]) < float.fromhex(losses[0]["loss"]) - 0.1, "it does not learn"
    assert f"# {recipe} on 2 ranks" in (out / "report.md").read_text()
    assert [path.name for path in (out / "reference" / "checkpoints").glob("step-*")] == ["step-28"]
    assert not list(out.glob("*/raw-*"))


def parts_of(out: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (out / "parts").glob("*.json")}


@pytest.mark.slow
def test_torchrun_recipe_checks_a_dense_model(dense: Path) -> None:
    assert_sound(dense, "tiny-dense")


@pytest.mark.slow
def test_a_recipe_that_is_started_again_repeats_nothing(dense: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (dense / "parts").iterdir()}
    run_recipe([str(ROOT / "benchmarks/cluster/torchrun.sh"), "tiny-dense", str(dense)])
    assert {path: path.stat().st_mtime_ns for path in (dense / "parts").iterdir()} == before


SRUN = """#!/usr/bin/env bash
# Stands in for srun: starts the command once for each node, all of them on this machine.
nodes=1
while [[ "$1" == --* ]]; do
  case "$1" in --nodes=*) nodes="${1#--nodes=}" ;; esac
  shift
done
pids=()
for ((node = 0; node < nodes; node++)); do "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
"""


@pytest.mark.slow
def test_slurm_recipe_checks_a_model_of_experts(tmp_path: Path) -> None:
    """Two nodes of one rank each. There is no SLURM here: what it gives a job is stood in for, all else is real."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nprintf 'localhost\\nlocalhost\\n'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    given = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "localhost,localhost"}
    given |= {"SLURM_JOB_ID": str(os.getpid()), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    out = tmp_path / "moe"
    spooled = shutil.copy(ROOT / "benchmarks/cluster/slurm.sbatch", tmp_path / "slurm_script")
    run_recipe(["bash", str(spooled), "tiny-moe", str(out)], **given, NPROC="1", EXPERTS="2", OMP_NUM_THREADS="1")
    assert_sound(out, "tiny-moe")
    assert parts_of(out)["reference"]["layout"] == {"replicas": 1, "shards": 1, "experts": 2}


# reports ---------------------------------------------------------------------------------------------------------


def change_loss(parts: dict[str, Any]) -> None:
    event = next(event for event in reversed(parts["interrupted"]["events"]) if event["event"] == "step")
    event["loss"] = (float.fromhex(event["loss"]) * (1 + 2**-50)).hex()


def change_restored(parts: dict[str, Any]) -> None:
    resumed = parts["interrupted"]["resumed"]
    states = [event for event in parts["interrupted"]["events"] if event["event"] == "state"]
    state = [event for event in states if event["step"] == resumed][-1]
    state["objects"]["train"]["tokens"] += 1


def change_reloaded(parts: dict[str, Any]) -> None:
    name = max(parts["reloaded"]["tensors"])
    parts["reloaded"]["tensors"][name] = "0" + parts["reloaded"]["tensors"][name][1:] + " "


def lose_a_tensor(parts: dict[str, Any]) -> None:
    parts["reloaded"]["tensors"].popitem()


def change_weights(parts: dict[str, Any]) -> None:
    parts["read-back"]["loaded"]["tensors"]["model.lm_head.weight"] = "0 float32[509,64]"


def change_logits(parts: dict[str, Any]) -> None:
    parts["read-back"]["loaded"]["logits"] = "0 float32[1,32,509]"


def change_probe(parts: dict[str, Any]) -> None:
    parts["read-back"]["loaded"]["probe_loss"] = float("nan")


def corrupt(parts: dict[str, Any]) -> None:
    parts["read-back"].update(verified=False, problems=["0.distcp: bad"])


def forget_the_kill(parts: dict[str, Any]) -> None:
    del parts["crash"]


def start_over(parts: dict[str, Any]) -> None:
    parts["interrupted"]["resumed"] = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "failing"),
    [
        (change_loss, "resumed run is the uninterrupted run"),
        (change_restored, "restored state is the saved state"),
        (change_reloaded, "round trip on another number of ranks"),
        (lose_a_tensor, "round trip on another number of ranks"),
        (change_weights, "from_pretrained gives the trained weights"),
        (change_logits, "from_pretrained gives the same logits"),
        (change_probe, "the probe's loss is that of training"),
        (corrupt, "every byte matches its checksum"),
        (forget_the_kill, "killed and resumed"),
        (start_over, "killed and resumed"),
    ],
)
def test_report_fails_where_something_is_wrong(
    dense: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], None], failing: str
) -> None:
    parts = parts_of(dense)
    damage(parts)
    (tmp_path / "parts").mkdir()
    for name, part in parts.items():
        (tmp_path / "parts" / f"{name}.json").write_text(json.dumps(part))
    failed = [check["name"] for check in make_report(tmp_path)["checks"] if not check["ok"]]
    assert failing in failed
    command = [sys.executable, "-m", "benchmarks.cluster.report", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert failing in ended.stderr


# what the checks rest on -----------------------------------------------------------------------------------------


def job_of(recipe: str) -> Job:
    return Job(dist.get_rank(), dist.get_world_size(), CPU, RECIPES[recipe], Path(), torch.float32, seed=3)


LAYOUTS = [{}, {"experts": 2}, {"experts": 4}, {"replicas": 2}, {"replicas": 2, "experts": 2}]


def gradients_are_those_of_one_process() -> None:
    """However ranks are used, a step has the loss and gradients of the undivided model on all tokens at once."""
    for recipe in ("tiny-dense", "tiny-moe"):
        job = job_of(recipe)
        whole = job.recipe.empty_model(torch.float32)
        allocate(whole, CPU)
        initialise(whole, job.seed)
        values = fingerprints(tensors_in(whole), CPU)
        batches = [replace(job, rank=rank).tokens(1, 2, 16) for rank in range(job.world)]
        expected = sum(loss_of(whole, tokens) for tokens in batches) / job.world
        expected.backward()
        size = sum(param.numel() for param in whole.parameters())
        for options in LAYOUTS if recipe == "tiny-moe" else [{}, {"replicas": 2}]:
            layout = Layout(job.world, **options)
            model = job.training_state(layout, seed=job.seed, lr=1e-3)["model"]
            assert fingerprints(tensors_in(model), CPU) == values, f"{options}: other values"
            held = sum(param.to_local().numel() for param in model.parameters())
            assert held <= 1.1 * size * layout.replicas / job.world, f"{options}: {held} of {size} elements on one rank"
            loss = loss_of(model, batches[job.rank])
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / job.world, expected.detach(), rtol=1e-5, atol=1e-6)
            for (name, param), plain in zip(model.named_parameters(), whole.parameters(), strict=True):
                assert isinstance(param.grad, DTensor)
                found = param.grad.full_tensor()
                torch.testing.assert_close(
                    found, plain.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )


def test_every_layout_has_the_gradients_of_one_process() -> None:
    run_job(gradients_are_those_of_one_process, nproc=4)


def computes_in_bfloat16() -> None:
    """As on GPUs, from parameters of either dtype."""
    job = job_of("tiny-moe")
    losses = {}
    for parameters, compute in ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2):
        model = job.recipe.empty_model(parameters)
        shard(model, Layout(2, experts=2), CPU, compute)
        allocate(model, CPU)
        initialise(model, job.seed)
        loss = loss_of(model, job.tokens(1, 2, 16))
        loss.backward()
        assert {param.grad.dtype for param in model.parameters()} == {parameters}
        losses[parameters, compute] = float(loss.detach())
    exact, *others = losses.values()
    assert others == pytest.approx([exact, exact], rel=1e-2)
    assert exact not in others


def test_recipes_compute_in_bfloat16() -> None:
    run_job(computes_in_bfloat16, nproc=2)


def means_stand_alone() -> None:
    job = job_of("tiny-dense")
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.rand(200, generator=generator) + 6
    together = job.means(values)
    assert [job.means(value[None])[0] for value in values] == together
    assert job.means(values[:37]) == together[:37]


def test_a_mean_does_not_depend_on_its_neighbours() -> None:
    """A killed run notes its losses in other blocks than one that goes on."""
    run_job(means_stand_alone, nproc=4)


def fingerprints_follow_places() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    expected = fingerprints({"w": whole}, CPU)
    for placement in (Shard(0), Shard(1), Replicate()):
        placed = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
        assert fingerprints({"w": placed}, CPU) == expected, placement
    if dist.get_rank() == 1:
        placed.to_local()[3, 3] += 1
    with pytest.raises(ValueError, match="copy 1 of w differs"):
        fingerprints({"w": placed}, CPU)


def test_fingerprints_follow_places_and_compare_copies() -> None:
    run_job(fingerprints_follow_places, nproc=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_fingerprints_see_every_change(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cluster.shards.PIECE_ELEMENTS", 16)
    tensor = (torch.arange(60) % 11).reshape(6, 10).to(dtype)
    before = fingerprints({"w": tensor}, CPU)
    assert fingerprints({"w": tensor.clone()}, CPU) == before
    assert fingerprints({"v": tensor}, CPU)["v"] != before["w"]
    for row in range(6):
        for column in range(10):
            changed = tensor.clone()
            changed[row, column] += 1
            assert fingerprints({"w": changed}, CPU) != before
    assert fingerprints({"w": tensor.flip(0)}, CPU) != before
    assert fingerprints({"w": tensor.reshape(10, 6)}, CPU) != before


def test_values_have_the_deviation_asked_for() -> None:
    tensor = torch.empty(300, 300)
    fill(tensor, "w", seed=1, std=0.02)
    assert abs(float(tensor.mean())) < 2e-4
    assert abs(float(tensor.std()) - 0.02) < 2e-4
    other = torch.empty(300, 300)
    fill(other, "w", seed=2, std=0.02)
    assert not torch.equal(tensor, other)


@pytest.mark.parametrize(("name", "billions"), [("llama-8b", 8.03), ("qwen3-moe-30b-a3b", 30.53)])
def test_large_recipes_are_the_models_they_are_named_for(name: str, billions: float) -> None:
    model = RECIPES[name].empty_model(torch.bfloat16)
    assert all(param.is_meta and param.dtype == torch.bfloat16 for param in model.parameters())
    assert sum(param.numel() for param in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
