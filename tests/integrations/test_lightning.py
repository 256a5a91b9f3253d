"""`holdfast.integrations.lightning` in real jobs: killed and resumed, on one device, DDP and FSDP2."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import torch
from jobs import ROOT, losses, run_script

import holdfast
from holdfast.integrations.lightning import HoldfastCheckpointIO, export_ckpt

JOB = Path(__file__).with_name("lightning_job.py")
EPOCHS = 4
STEPS = {1: 12, 2: 6}
"""Steps of an epoch, by ranks."""


def train(out: Path, epochs: int = EPOCHS, *args: object, nproc: int = 1, killed: bool = False) -> dict[int, str]:
    out.mkdir(exist_ok=True)
    run_script(JOB, out, epochs, *args, nproc=nproc, killed=killed)
    return losses([out / "losses.jsonl"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, str]]:
    """Losses of runs that nothing happened to, whoever saved: trained once for all tests."""

    @functools.cache
    def losses_of(nproc: int, plan: str, *options: object) -> dict[int, str]:
        out = tmp_path_factory.mktemp("whole") / "run"
        return train(out, EPOCHS, "--plan", plan, *options, nproc=nproc)

    return losses_of


@pytest.mark.parametrize(
    ("nproc", "plan", "save"),
    [
        pytest.param(1, "single", "mixin", marks=pytest.mark.slow),
        (1, "single", "plugin"),
        (2, "ddp", "mixin"),
        pytest.param(2, "ddp", "plugin", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, uninterrupted: Callable[..., dict[int, str]], nproc: int, plan: str, save: str
) -> None:
    options = ["--plan", plan, "--save", save]
    steps = STEPS[nproc]
    whole = uninterrupted(nproc, plan)
    run = tmp_path / "killed"
    train(run, EPOCHS, *options, "--kill", 2 * steps + 3, nproc=nproc, killed=True)
    resumed = train(run, EPOCHS, *options, "--resume", "last", nproc=nproc)
    assert len(whole) == EPOCHS * steps
    assert resumed == whole
    checkpoints = run / "checkpoints"
    names = sorted(path.name for path in checkpoints.glob("[!.]*"))
    assert names == [f"epoch={at}-step={(at + 1) * steps}.ckpt" for at in (EPOCHS - 2, EPOCHS - 1)] + ["last.ckpt"]
    for name in names:
        checkpoint = holdfast.open(checkpoints / name)
        assert checkpoint.verify().ok
        assert len([entry for entry in checkpoint.tensors if "exp_avg" in entry]) == 8  # optimizer state is there
        assert checkpoint.manifest.world == (1 if save == "plugin" else nproc)


@pytest.mark.parametrize(("nproc", "plan"), [pytest.param(1, "single", marks=pytest.mark.slow), (2, "fsdp2")])
def test_a_run_killed_inside_an_epoch_goes_on_at_its_batch(
    tmp_path: Path, uninterrupted: Callable[..., dict[int, str]], nproc: int, plan: str
) -> None:
    """The link to the newest checkpoint is whole whenever the run is killed."""
    options = ["--plan", plan, "--stateful", "--every", 5, "--last", "link"]
    steps = STEPS[nproc]
    run = tmp_path / "killed"
    train(run, EPOCHS, *options, "--kill", steps + 5, nproc=nproc, killed=True)
    last = run / "checkpoints" / "last.ckpt"
    assert last.is_symlink()
    assert holdfast.open(last).verify().ok
    assert HoldfastCheckpointIO().load_checkpoint(last)["global_step"] % steps  # inside
    resumed = train(run, EPOCHS, *options, "--resume", "last", nproc=nproc)
    assert resumed == uninterrupted(nproc, plan, "--stateful")
    assert holdfast.open(last).verify().ok


@pytest.mark.parametrize(
    ("nproc", "plan", "save"),
    [pytest.param(1, "single", "mixin", marks=pytest.mark.slow), (1, "single", "plugin"), (2, "fsdp2", "mixin")],
)
def test_a_run_goes_on_from_what_lightning_wrote_and_back(
    tmp_path: Path, uninterrupted: Callable[..., dict[int, str]], nproc: int, plan: str, save: str
) -> None:
    plans = ["--plan", plan, "--random"]
    whole = uninterrupted(nproc, plan)
    run = tmp_path / "run"
    train(run, 2, *plans, "--save", "stock", nproc=nproc)
    last = run / "checkpoints" / "last.ckpt"
    assert not (last / "holdfast.json").exists()
    found = train(run, 3, *plans, "--save", save, "--resume", last, nproc=nproc)  # over the files that are there
    assert (last / "holdfast.json").exists()
    assert not list(last.parent.glob("*replaced*"))
    assert found == {step: whole[step] for step in range(1, 3 * STEPS[nproc] + 1)}
    if plan == "single":
        export_ckpt(last, run / "back.ckpt")
        back = train(run, EPOCHS, *plans, "--save", "stock", "--resume", run / "back.ckpt", nproc=nproc)
        assert back == whole


def test_every_strategy_resumes_what_another_wrote(tmp_path: Path) -> None:
    """From two ranks of FSDP2 to two of DDP, to one device, to FSDP2: weights and optimizer state are the same."""
    run = tmp_path / "run"
    last = run / "checkpoints" / "last.ckpt"
    train(run, 1, "--plan", "fsdp2", nproc=2)
    before = HoldfastCheckpointIO().load_checkpoint(last)
    train(run, 1, "--plan", "ddp", "--resume", last, "--resave", nproc=2)
    train(run, 1, "--plan", "single", "--resume", last, "--resave")
    train(run, 1, "--plan", "single", "--save", "plugin", "--resume", last, "--resave")
    train(run, 1, "--plan", "fsdp2", "--resume", last, "--resave", nproc=2)
    after = HoldfastCheckpointIO().load_checkpoint(last)
    assert holdfast.open(last).manifest.world == 2
    torch.testing.assert_close(after["state_dict"], before["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer_states"], before["optimizer_states"], rtol=0, atol=0)
    assert after["lr_schedulers"] == before["lr_schedulers"]
    assert sorted(after["optimizer_states"][0]["state"]) == [0, 1, 2, 3]


def test_positions_of_loaders_are_not_divided_among_other_ranks(tmp_path: Path) -> None:
    options = ["--save", "mixin", "--stateful", "--every", 4, "--last", "link"]
    run = tmp_path / "run"
    train(run, 1, *options, "--plan", "ddp", "--kill", 5, nproc=2, killed=True)
    with pytest.raises(AssertionError, match="they can't be divided anew"):
        train(run, 1, *options, "--plan", "single", "--resume", "last")


def test_the_example_runs(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "lightning_fit.py", "--out", tmp_path).stdout
    assert "16 losses as in an uninterrupted run" in output
    assert "last.ckpt" in output


@pytest.mark.parametrize("page", ["integrations/lightning.md", "migrate/lightning.md"])
def test_the_pages_run(tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / page).read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    run_script(script)
