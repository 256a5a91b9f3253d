"""`holdfast.integrations.torchtitan` under torchtitan's own trainer: killed, resumed, beside its own manager."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.components.checkpointer.base")

import torch
from jobs import ROOT, losses, run_script
from safetensors.torch import load_file

import holdfast

pytestmark = pytest.mark.timeout(400)  # the first test makes what the others share
JOB = Path(__file__).with_name("torchtitan_job.py")
STEPS = 9
KEEP_ALL = ("--option", "keep_latest_k=0")


def train(out: Path, *args: object, steps: int = STEPS, nproc: int = 2, killed: bool = False) -> str:
    return run_script(JOB, out, steps, *args, nproc=nproc, killed=killed).stdout


def losses_of(*folders: Path) -> dict[int, str]:
    return losses([folder / "losses.jsonl" for folder in folders])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, on two ranks, with torchtitan's own manager."""
    out = tmp_path_factory.mktemp("whole")
    train(out, "--save", "stock", *KEEP_ALL)
    return out


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed at step 8, on two ranks, its checkpoints by Holdfast."""
    out = tmp_path_factory.mktemp("ours")
    train(out, "--kill", 8, *KEEP_ALL, killed=True)
    return out


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_a_killed_run_goes_on_as_if_nothing_had_happened(whole: Path, ours: Path, tmp_path: Path) -> None:
    out = copied(ours, tmp_path / "out")
    train(out, *KEEP_ALL)
    assert losses_of(out) == losses_of(whole)
    assert len(losses_of(out)) == STEPS
    checkpoint = holdfast.open(out / "checkpoint" / f"step-{STEPS}")
    assert checkpoint.verify().ok
    assert {"layers.0.attention.qkv_linear.wq.weight", "optimizer.state.lm_head.weight.exp_avg"} <= set(
        checkpoint.tensors
    )
    assert {"dataloader.dp_rank_0", "dataloader.dp_rank_1", "train_state.step"} <= set(checkpoint.objects)


def test_torchtitan_goes_on_from_what_holdfast_wrote(whole: Path, ours: Path, tmp_path: Path) -> None:
    out = copied(ours, tmp_path / "out")
    with holdfast.CheckpointManager(out / "checkpoint", {"nothing": 0}) as manager:
        assert manager.latest() in (3, 6)  # and what the kill has left is settled
    output = train(out, "--save", "stock", *KEEP_ALL)
    assert "Loading the checkpoint from" in output
    assert losses_of(out) == losses_of(whole)


def test_torchtitan_finds_no_step_that_was_not_published_once_the_folder_is_settled(tmp_path: Path) -> None:
    """Its own manager takes hidden names for steps, and then doesn't find them: it never loads what isn't whole."""
    from torchtitan.components.checkpointer import CheckpointManager

    train(tmp_path, "--kill-saving", 6, *KEEP_ALL, nproc=1, killed=True)
    folder = tmp_path / "checkpoint"
    stock = CheckpointManager.__new__(CheckpointManager)
    assert [path.name for path in folder.glob("step-*")] == ["step-3"]
    assert stock._find_load_step(folder=str(folder)) in (3, 6)  # 6 is a FileNotFoundError of its load
    recovered = subprocess.run(
        [sys.executable, "-m", "holdfast", "recover", str(folder)], capture_output=True, text=True
    )
    assert ".incomplete: removed" in recovered.stdout, recovered.stderr
    assert stock._find_load_step(folder=str(folder)) == 3


@pytest.mark.parametrize("save", ["holdfast", "legacy"])
def test_a_run_goes_on_from_what_torchtitan_wrote(whole: Path, tmp_path: Path, save: str) -> None:
    out = tmp_path / "out"
    for step in (3, 6):
        shutil.copytree(whole / "checkpoint" / f"step-{step}", out / "checkpoint" / f"step-{step}")
    train(out, "--save", save)
    expected = losses_of(whole)
    assert losses_of(out) == {step: expected[step] for step in (7, 8, 9)}
    assert (out / "checkpoint" / "step-3").exists()  # nobody deletes what another wrote


def test_the_last_model_in_the_format_of_hugging_face_is_torchtitans(tmp_path: Path) -> None:
    options = ("interval=100", "last_save_model_only=true", "last_save_in_hf=true", 'export_dtype="bfloat16"')
    found: dict[str, dict[str, torch.Tensor]] = {}
    for save in ("stock", "holdfast"):
        train(tmp_path / save, "--save", save, *(part for one in options for part in ("--option", one)), steps=2)
        folder = tmp_path / save / "checkpoint" / "step-2"
        found[save] = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert found["holdfast"].keys() == found["stock"].keys()
    assert "model.layers.0.self_attn.q_proj.weight" in found["stock"]
    assert all(torch.equal(found["holdfast"][name], value) for name, value in found["stock"].items())


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    example = ROOT / "examples" / "torchtitan_llama.py"
    for steps in (6, 8):
        run_script(example, "--out", tmp_path / "out", "--steps", steps)
    folder = tmp_path / "out" / "checkpoint"
    assert [path.name for path in sorted(folder.glob("step-*"))] == ["step-6", "step-8"]
    assert holdfast.open(folder).objects["train_state.step"] == 8


EXPORT_SCRIPT = """
import sys

sys.path.insert(0, {examples!r})
from torchtitan_on_cpu import use_cpu

use_cpu()
import torch
from safetensors.torch import load_file
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from transformers import AutoModelForCausalLM, LlamaConfig

import holdfast

model = llama3_debugmodel().model_spec.model
adapter = Llama3StateDictAdapter(model, None)
heads = model.layers[0].attention.n_heads
for number, path in enumerate({paths!r}):
    checkpoint = holdfast.open(path)
    vocabulary, width = checkpoint.tensors["tok_embeddings.weight"].shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=checkpoint.tensors["layers.0.feed_forward.w1.weight"].shape[0],
        num_hidden_layers=len(model.layers),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    out = holdfast.export_hf(checkpoint, f"{out}-{{number}}", modules=[""], key_map=adapter, assets=config)
    expected = adapter.to_hf({{name: checkpoint.read(name) for name in checkpoint.flat_names}})
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded(torch.arange(8)[None]).logits.isfinite().all()
"""


def test_a_checkpoint_of_either_is_exported_by_the_adapter(whole: Path, ours: Path, tmp_path: Path) -> None:
    script = tmp_path / "export.py"
    paths = [str(run / "checkpoint" / "step-3") for run in (whole, ours)]
    script.write_text(EXPORT_SCRIPT.format(examples=str(ROOT / "examples"), paths=paths, out=str(tmp_path / "hf")))
    run_script(script)


PAGES_SCRIPT = """
import sys

sys.path.insert(0, {examples!r})
from torchtitan_on_cpu import use_cpu

use_cpu()
from torchtitan.components import checkpointer

from holdfast.integrations import torchtitan as ours

for kind, name, block in zip((checkpointer, ours, ours), {names!r}, {blocks!r}):
    made = {{}}
    exec(block, made)
    config = made[name]().checkpoint
    assert type(config) is kind.CheckpointManager.Config, config
    assert (config.enable, config.interval) == (True, 500)
"""


def test_the_pages_of_the_documentation_configure_what_they_say(tmp_path: Path) -> None:
    before, after = blocks(ROOT / "docs" / "migrate" / "torchtitan.md")
    first, _ = blocks(ROOT / "docs" / "integrations" / "torchtitan.md")
    names = ("my_llama", "my_llama", "llama3_with_holdfast")
    script = tmp_path / "pages.py"
    script.write_text(PAGES_SCRIPT.format(examples=str(ROOT / "examples"), names=names, blocks=(before, after, first)))
    run_script(script)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
