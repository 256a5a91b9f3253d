"""Exports that can't be made, or fail: an error that names what is wrong, nothing written, nothing else disturbed.

Nothing else is: the checkpoint of the same step, other exports, those before, and `hf-latest`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import HFExport
from holdfast.errors import CheckpointExists, ConfigError, EngineDied, HoldfastError, SaveFailed
from holdfast.export import Cast, Fuse, Narrow, Rename, Split, StackExperts

State = dict[str, torch.Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))


def tiny_llama(**more: Any) -> Any:
    hf = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, **more}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2))


def files_below(root: Path) -> dict[str, bytes | str]:
    """Every file and link, but for locks."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(root))] = os.readlink(path)
        elif path.is_file() and path.name != "lock":
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


# key maps --------------------------------------------------------------------------------------------------------

MAPS: dict[str, tuple[Any, str]] = {
    "a target that is not there": (Rename("no_such_thing", "x"), r"'no_such_thing'.*`0\.weight`"),
    "names that are not there": (
        {"0.weight": "a", "0.bias": "b", "1.weight": "c", "1.bias": "d", "7.weight": "e"},
        r"`7\.weight`, which the state does not have",
    ),
    "names that are not spoken of": ({"0.weight": "a", "1.weight": "c"}, r"`0\.bias`, `1\.bias`"),
    "two tensors of one name": (Rename(r"[01]\.bias", "bias"), r"`0\.bias` and `1\.bias` both become `bias`"),
    "pieces that overlap": (Split("0.weight", ("a", "b"), sizes=(4, 4)), r"`0\.weight`.*overlap"),
    "pieces that are missing": (Split("0.weight", ("a", "b"), sizes=(2, 3)), r"`0\.weight`.*missing"),
    "a part that is missing": (Fuse(("0.weight", "2.weight"), "both"), r"'2\.weight'"),
    "an expert that is missing": (StackExperts(r"(?P<expert>1)\.weight", "experts"), r"lacks experts? .*0"),
    "too little of a tensor": (Narrow("0.weight", 0, 9), r"`0\.weight` has 6 in dimension 0"),
    "a tensor that nobody maps": (
        lambda state: {name: tensor for name, tensor in state.items() if "bias" not in name},
        r"`0\.bias`, `1\.bias` are not mapped to anything",
    ),
    "half a tensor that nobody maps": (
        lambda state: {**state, "1.weight": state["1.weight"][:4]},
        r"part of `1\.weight` \(24 of 48 elements\)",
    ),
    "a map that computes": (lambda state: {**state, "0.bias": state["0.bias"] * 2}, r"`0\.bias`"),
    "a cast of what is no number": (Cast("steps", torch.float16), "'steps'"),
    "a map of nothing": (lambda state: None, "dict"),
}


def test_maps_that_cannot_be_used_fail_by_themselves(tmp_path: Path) -> None:
    """All of them are due with a checkpoint and with an export that is fine."""
    exports = [HFExport(tmp_path / name, every=1, key_map=key_map) for name, (key_map, _) in MAPS.items()]
    exports.insert(3, HFExport(tmp_path / "fine", every=1))
    config = holdfast.CheckpointConfig(every=1, on_error="warn")
    model = net()
    manager = holdfast.CheckpointManager(tmp_path / "run", {"model": model}, config=config, exports=exports)
    # What fails at once is told of by the same step, the others by the close.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpoint, *handles = manager.step(1)
        fine = handles.pop(3)
        assert checkpoint.result().verify().ok
        assert holdfast.open(fine.result()).verify().ok
        errors = [handle.exception() for handle in handles]
        manager.close()
    for error, (name, (_, says)) in zip(errors, MAPS.items(), strict=True):
        assert isinstance(error, ConfigError), (name, error)
        assert error.field == "key_map", name
        assert re.search(says, str(error)), f"{name}: {error}"
        assert files_below(tmp_path / name) == {}
        assert os.listdir(tmp_path / name) == [".holdfast"], "not even a directory that is hidden"
    assert len(told) == len(MAPS)
    assert all("key_map" in str(warning.message) for warning in told)


def test_a_map_that_cannot_be_used_leaves_nothing(tmp_path: Path) -> None:
    key_map, says = MAPS["pieces that overlap"]
    with pytest.raises(ConfigError, match=says):
        holdfast.export_hf({"model": net()}, tmp_path / "out", key_map=key_map)
    assert os.listdir(tmp_path) == []


# what is exported ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_than_the_assets_describe(tmp_path: Path) -> None:
    stored = holdfast.save({"model": tiny_llama()}, tmp_path / "llama", step=1)
    deeper = tiny_llama(num_hidden_layers=2)
    larger = tiny_llama(intermediate_size=24, vocab_size=40)
    for model, says in (
        (deeper, r"the state lacks its `model\.layers\.1\.self_attn\.q_proj\.weight`"),
        (larger, r"`model\.embed_tokens\.weight` is \[32, 16\] in the checkpoint, and \[40, 16\] "),
    ):
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(tmp_path / "assets")
        with pytest.raises(ConfigError, match=says):
            holdfast.export_hf(stored, tmp_path / "out", assets=tmp_path / "assets")
        assert sorted(os.listdir(tmp_path)) == ["assets", "llama"]


@pytest.mark.parametrize(
    ("state", "options", "says"),
    [
        ({"train": {"step": 1}}, {}, "no module at its top level"),
        ({"parts": {"model": nn.Linear(2, 2)}}, {}, "no module at its top level"),
        ({"model": nn.Linear(2, 2)}, {"modules": ["mode1"]}, "'mode1'; there are 'model'"),
        ({"model": nn.Linear(2, 2)}, {"fp32_keys": ["router"]}, "no tensor of the export matches 'router'"),
        ({"model": nn.Linear(2, 2)}, {"dtype": "int8"}, "found 'int8'"),
        (
            {"model": nn.ParameterDict({"weight": torch.zeros(2, dtype=torch.complex128)})},
            {},
            "'weight' is of type 'complex128'",
        ),
        ({"model": nn.Identity()}, {}, "no tensor to write"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_states_that_make_no_export(state: Any, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        holdfast.export_hf(state, tmp_path / "out", **options)
    assert os.listdir(tmp_path) == []


# assets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [net, tiny_llama], ids=["a module", "a model of transformers"])
def test_a_source_without_a_configuration(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError, match=rf"{source} has no config\.json"):
        holdfast.export_hf({"model": make()}, tmp_path / "out", assets=source)
    assert sorted(os.listdir(tmp_path)) == before

    export = HFExport(tmp_path / "hf", every=1, assets=source)
    with pytest.raises(ConfigError, match=rf"{source} has no config\.json"):
        holdfast.CheckpointManager(tmp_path / "run", {"model": make()}, exports=[export])
    assert files_below(tmp_path) == {"source/tokenizer.json": b"{}"}
    (source / "config.json").write_text("{}")
    with holdfast.CheckpointManager(tmp_path / "run", {"model": make()}, exports=[export]) as manager:
        assert Path(manager.step(1)[0].result(), "tokenizer.json").read_text() == "{}"


# what is there ---------------------------------------------------------------------------------------------------


def make_export(path: Path) -> None:
    holdfast.export_hf(net(), path)


def make_checkpoint(path: Path) -> None:
    holdfast.save({"model": net()}, path, step=1)


def make_files(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize("make", [make_export, make_checkpoint, make_files])
def test_what_is_there_is_not_replaced(make: Callable[[Path], None], tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    before = files_below(tmp_path)
    with pytest.raises(CheckpointExists, match=rf"{out} exists already") as caught:
        holdfast.export_hf(net(), out)
    assert caught.value.path == str(out)
    assert "None" not in str(caught.value)
    assert files_below(tmp_path) == before


def test_what_is_no_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("mine")
    before = files_below(tmp_path)
    for name in ("link", "file"):
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=rf"{name} is a file; expected a directory"):
                holdfast.export_hf(net(), tmp_path / name, overwrite=overwrite)
    assert files_below(tmp_path) == before


def test_what_is_there_is_replaced_if_asked_for_and_what_others_made_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_files(out)
    (out / "model-00001-of-00002.safetensors").write_text("of a larger model, which no reader must find")
    (out / "model.safetensors.index.json").write_text("{}")
    (out / "vision.safetensors").write_text("of another")
    model = net()
    assert holdfast.export_hf(model, out, overwrite=True) == out
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in out.glob("*.safetensors*")) == ["model.safetensors", "vision.safetensors"]
    assert holdfast.open(out).verify().ok
    assert torch.equal(holdfast.open(out).read("0.weight"), model[0].weight)
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}) as manager:
        manager.save(1)
    with pytest.raises(ConfigError, match="a manager's root"):
        holdfast.export_hf(model, tmp_path / "run", overwrite=True)
    assert holdfast.open(tmp_path / "run").verify().ok
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


# exports of a manager --------------------------------------------------------------------------------------------


class Run:
    """A model whose weights are its step; a checkpoint and an export after each."""

    def __init__(self, root: Path) -> None:
        self.root, self.model = root, net()
        self.manager = holdfast.CheckpointManager(
            root / "run",
            {"model": self.model},
            config=holdfast.CheckpointConfig(every=1, keep=None, on_error="warn", persist_timeout=60.0),
            exports=[HFExport(root / "hf", every=1)],
        )

    def step(self, step: int) -> list[holdfast.SaveHandle]:
        self.manager.before_update()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        return self.manager.step(step)

    def survives(self, failed: int, error: BaseException | None, *, checkpoint: BaseException | None = None) -> None:
        """The export of step ``failed``, the second, did; everything else is there, and the next one, too.

        checkpoint: what the checkpoint of that step has failed with, if it did.
        """
        assert isinstance(error, HoldfastError)
        if isinstance(error, SaveFailed):
            assert str(error).startswith("the export of step 2 failed on rank 0"), error
            assert "earlier exports are as they were" in str(error)
        lost = [str(one) for one in (error, checkpoint) if one is not None]
        with pytest.warns(UserWarning, match="|".join(map(re.escape, lost))) as warned:
            self.manager.wait()
        assert all(any(text in str(warning.message) for warning in warned) for text in lost)
        for handle in self.step(failed + 1):
            handle.result()
        self.manager.close()
        assert self.manager.steps() == [failed - 1, *([failed] if checkpoint is None else []), failed + 1]
        for step in self.manager.steps():
            checkpoint = holdfast.open(self.root / "run" / f"step-{step}")
            assert checkpoint.verify().ok
            assert checkpoint.read("model.0.weight").unique().tolist() == [step]
        exports = [f"hf-{failed - 1}", f"hf-{failed + 1}"]
        assert sorted(os.listdir(self.root / "hf")) == [".holdfast", *exports, "hf-latest"]
        for step in (failed - 1, failed + 1):
            export = holdfast.open(self.root / "hf" / f"hf-{step}")
            assert export.verify().ok
            assert export.read("0.weight").unique().tolist() == [step]
        assert os.readlink(self.root / "hf" / "hf-latest") == exports[-1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    for handle in run.step(1):
        handle.result()
    return run


def test_something_is_where_an_export_is_to_be(run: Run) -> None:
    make_files(run.root / "hf" / "hf-2")
    checkpoint, export = run.step(2)
    error = export.exception()
    assert isinstance(error, CheckpointExists)
    assert error.path == str(run.root / "hf" / "hf-2")
    assert checkpoint.result().verify().ok
    assert files_below(run.root / "hf" / "hf-2") == {"notes.txt": b"mine"}
    assert os.readlink(run.root / "hf" / "hf-latest") == "hf-1"
    shutil.rmtree(run.root / "hf" / "hf-2")
    run.survives(2, error)


def test_the_process_that_writes_an_export_is_killed(run: Run) -> None:
    engine = run.manager._deliverers.all[0].place.engine
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it must not get to the end of its work before it is killed
    checkpoint, export = run.step(2)
    run.manager.wait_staged()
    deadline = time.monotonic() + 60.0
    while export.attempt not in engine._attempts:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    lost, error = (handle.exception() for handle in (checkpoint, export))
    # It writes for both; a checkpoint that comes to it only now is written by the next one.
    for failed in (error, *([] if lost is None else [lost])):
        assert isinstance(failed, SaveFailed)
        assert (failed.step, failed.rank) == (2, 0)
        assert isinstance(failed.__cause__, EngineDied)
    assert os.readlink(run.root / "hf" / "hf-latest") == "hf-1"
    run.survives(2, error, checkpoint=lost)


def test_the_directory_of_exports_vanishes(run: Run) -> None:
    away = run.root / "away"
    shutil.move(run.root / "hf", away)
    checkpoint, export = run.step(2)
    error = export.exception()
    assert isinstance(error, SaveFailed)
    assert str(run.root / "hf") in str(error)
    assert checkpoint.result().verify().ok
    shutil.move(away, run.root / "hf")
    run.survives(2, error)


# how it is asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("root", ""),
        ("root", 3),
        ("root", "s3://bucket//hf"),
        ("every", 0),
        ("every", True),
        ("every", 1.5),
        ("name_template", "hf"),
        ("name_template", "{step}/hf"),
        ("name_template", ".{step}"),
        ("name_template", "{step}-{step}"),
        ("name_template", "{rank}-{step}"),
        ("name_template", None),
        ("keep", 3),
        ("latest_link", "yes"),
        ("modules", "model"),
        ("dtype", "float13"),
        ("dtype", torch.int64),
        ("fp32_keys", "router"),
        ("fp32_keys", [1]),
        ("max_shard_bytes", 0),
        ("max_shard_bytes", "5GB"),
        ("nice", -1),
        ("nice", 20),
        ("writers", 0),
        ("writers", 17),
        ("io_limit_bytes_per_s", 1),
    ],
)
def test_a_field_that_cannot_be_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"HFExport\.{field}: expected .*, found ") as caught:
        HFExport(**{"root": "hf", field: value})
    assert caught.value.field == field


def test_exports_that_get_in_each_others_way(tmp_path: Path) -> None:
    state = {"model": net()}
    root = tmp_path / "run"
    for exports, says in (
        ([HFExport(root)], "is the manager's own root"),
        ([HFExport(tmp_path / "hf"), HFExport(tmp_path / "x" / ".." / "hf")], "is the root of another export"),
        ([tmp_path / "hf"], r"expected holdfast\.HFExport"),
    ):
        with pytest.raises(ConfigError, match=says):
            holdfast.CheckpointManager(root, state, exports=exports)
    assert files_below(tmp_path) == {}
    with holdfast.CheckpointManager(root, state, exports=[HFExport(tmp_path / "hf", every=1)]) as manager:
        assert holdfast.open(manager.step(1)[0].result()).verify().ok
