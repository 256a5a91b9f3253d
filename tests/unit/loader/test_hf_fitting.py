"""What of a Hugging Face directory goes where in a state, and what is said where they don't fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.errors import ConfigError, StateMismatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))


class Model(nn.Module):
    """Named as transformers names its models: a body under a prefix, a head beside it."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.model = Body()
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def export(directory: Path, module: nn.Module, *, without: tuple[str, ...] = (), **more: torch.Tensor) -> Path:
    """What `save_pretrained` would write of it."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in values(module).items() if name not in without}
    save_file({**kept, **more}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def new(kind: type[nn.Module] = Model, **options: Any) -> Any:
    torch.manual_seed(torch.initial_seed() + 1)
    module = kind(**options)
    with torch.no_grad():
        for value in module.state_dict().values():
            value.copy_(torch.rand(value.shape) if value.is_floating_point() else torch.full(value.shape, 3))
    return module


def assert_same(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("key", ["model", "head", "net", "a.b"])
def test_one_module_has_the_names_as_they_are_whatever_its_key(tmp_path: Path, key: str) -> None:
    saved, module = new(), new()
    checkpoint = holdfast.load({key: module}, export(tmp_path, saved))
    assert_same(module, values(saved))
    assert checkpoint.step is None
    assert "model.embed.weight" in checkpoint.tensors, "the files' own names"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # which torch.compile itself runs into
def test_a_nested_key_and_wrappers(tmp_path: Path) -> None:
    saved, module = new(), new()
    holdfast.load({"parts": {"net": torch.compile(module)}}, export(tmp_path, saved))
    assert_same(module, values(saved))


def test_several_modules_have_the_names_below_their_keys(tmp_path: Path) -> None:
    vision, language = new(Block), new()
    merged = {f"vision.{name}": value for name, value in values(vision).items()}
    merged |= {f"language.{name}": value for name, value in values(language).items()}
    save_file(merged, tmp_path / "model.safetensors")
    state = {"vision": new(Block), "language": new()}
    holdfast.load(state, tmp_path)
    assert_same(state["vision"], values(vision))
    assert_same(state["language"], values(language))


def test_several_modules_of_which_no_key_is_stored_are_the_same_model_each(tmp_path: Path) -> None:
    saved, actor, reference = new(), new(), new()
    holdfast.load({"actor": actor, "reference": reference}, export(tmp_path, saved))
    assert_same(actor, values(saved))
    assert_same(reference, values(saved))


def test_pipeline_stages_take_what_is_theirs(tmp_path: Path) -> None:
    saved, module = new(), new()
    stage = nn.Module()
    stage.model = module.model
    rest = nn.Module()
    rest.head = module.head
    holdfast.load({"model": [stage, rest]}, export(tmp_path, saved))
    assert_same(module, values(saved))


@pytest.mark.parametrize("key", [None, "model"])
def test_tensors_in_a_dict_take_the_same_names(tmp_path: Path, key: str | None) -> None:
    saved = new()
    into = {name: torch.zeros_like(value) for name, value in saved.state_dict().items()}
    holdfast.load(into if key is None else {key: into}, export(tmp_path, saved))
    for name, value in values(saved).items():
        assert torch.equal(into[name], value)


def test_tied_weights_are_stored_once_under_either_name(tmp_path: Path) -> None:
    for dropped in ("head.weight", "model.embed.weight"):
        saved, module = new(tied=True), new(tied=True)
        holdfast.load({"model": module}, export(tmp_path / dropped, saved, without=(dropped,)))
        assert_same(module, values(saved))
        assert module.head.weight is module.model.embed.weight


def test_tied_weights_that_are_both_stored_are_compared(tmp_path: Path) -> None:
    saved, module = new(tied=True), new(tied=True)
    directory = export(tmp_path / "equal", saved)
    before = holdfast.statistics()["bytes_read"]
    holdfast.load({"model": module}, directory)
    read = holdfast.statistics()["bytes_read"] - before
    assert read == sum(value.nbytes for value in values(saved).values()) + saved.head.weight.nbytes
    assert torch.equal(module.head.weight, saved.model.embed.weight)
    error = refused({"model": module}, export(tmp_path / "differing", new()))
    assert error.mismatched == ("model.head.weight", "model.model.embed.weight")


def test_weights_that_only_the_configuration_ties(tmp_path: Path) -> None:
    """As after tensor parallelism, which makes a DTensor of each: two tensors, of which one is stored."""
    saved, module = new(), new()
    module.all_tied_weights_keys = {"head.weight": "model.embed.weight"}
    holdfast.load({"model": module}, export(tmp_path / "a", saved, without=("head.weight",)))
    assert torch.equal(module.head.weight, saved.model.embed.weight)
    holdfast.load({"model": module}, export(tmp_path / "b", saved, without=("model.embed.weight",)))
    assert torch.equal(module.model.embed.weight, saved.head.weight)
    holdfast.load({"model": module}, export(tmp_path / "c", saved))
    assert_same(module, values(saved))
    with pytest.raises(StateMismatch) as caught:
        holdfast.load({"model": module}, export(tmp_path / "d", saved, without=("head.weight", "model.embed.weight")))
    assert caught.value.missing == ("model.head.weight", "model.model.embed.weight")


def test_buffers_that_are_not_stored_stay(tmp_path: Path) -> None:
    saved, module = new(), new()
    kept = module.model.layers[1].norm.running_mean.clone()
    name = "model.layers.1.norm.running_mean"
    holdfast.load({"model": module}, export(tmp_path, saved, without=(name,)))
    assert_same(module, values(saved) | {name: kept})


def test_what_the_model_says_to_ignore(tmp_path: Path) -> None:
    saved, module = new(), new()
    module._keys_to_ignore_on_load_missing = [r"head\.weight"]
    module._keys_to_ignore_on_load_unexpected = {r"^mtp\."}
    kept = module.head.weight.detach().clone()
    more = {"mtp.0.weight": torch.ones(2)}
    holdfast.load({"model": module}, export(tmp_path, saved, without=("head.weight",), **more))
    assert_same(module, values(saved) | {"head.weight": kept})


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_dtypes_are_converted_as_copy_does(tmp_path: Path, stored: torch.dtype, kept: torch.dtype) -> None:
    saved, module = new().to(stored), new().to(kept)
    holdfast.load({"model": module}, export(tmp_path, saved))
    for name, value in values(saved).items():
        found = module.state_dict()[name]
        assert found.dtype == (kept if value.is_floating_point() else value.dtype)
        assert torch.equal(found, value.to(found.dtype))


# what doesn't fit ------------------------------------------------------------------------------------------------


def refused(state: dict[str, Any], directory: Path, **options: Any) -> StateMismatch:
    before = {key: values(value) for key, value in state.items() if isinstance(value, nn.Module)}
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(state, directory, **options)
    for key, kept in before.items():
        assert_same(state[key], kept)  # nothing was touched
    return caught.value


def test_missing_unexpected_and_mismatched_are_named(tmp_path: Path) -> None:
    more = {"extra.weight": torch.ones(2), "head.weight": torch.ones(3, 4)}
    error = refused({"net": new()}, export(tmp_path, new(), without=("model.layers.0.up.bias",), **more))
    assert error.missing == ("net.model.layers.0.up.bias",)
    assert error.unexpected == ("net.extra.weight",)
    assert error.mismatched == ("net.head.weight",)
    assert "stored as [3, 4], the state has [10, 4]" in str(error)


def test_what_fits_is_loaded_where_that_was_asked_for(tmp_path: Path) -> None:
    saved, module = new(), new()
    more = {"extra.weight": torch.ones(2), "head.weight": torch.ones(3, 4)}
    kept = module.head.weight.detach().clone()
    holdfast.load({"net": module}, export(tmp_path, saved, **more), strict=False)
    assert_same(module, values(saved) | {"head.weight": kept})


@pytest.mark.parametrize("key", ["model", "net"])
def test_a_body_is_not_filled_from_a_model_with_a_head(tmp_path: Path, key: str) -> None:
    error = refused({key: new(Body)}, export(tmp_path, new()))
    assert f"{key}.embed.weight" in error.missing
    assert f"{key}.model.embed.weight" in error.unexpected
    assert "Names in the directory begin with 'model.', which those in the state don't" in str(error)


@pytest.mark.parametrize("key", ["model", "net"])
def test_a_model_with_a_head_is_not_filled_from_a_body(tmp_path: Path, key: str) -> None:
    error = refused({key: new()}, export(tmp_path, new(Body)))
    assert f"{key}.model.embed.weight" in error.missing
    assert "Names in the state begin with 'model.', which those in the directory don't" in str(error)


def test_an_optimizer_is_asked_for_in_vain(tmp_path: Path) -> None:
    module = new()
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": module, "optimizer": optimizer, "train": {"step": 3}}
    saved = new()
    error = refused(state, export(tmp_path, saved))
    assert "A Hugging Face directory holds a model and nothing else; the state has optimizer, train." in str(error)
    assert any(name.startswith("optimizer.") for name in error.missing)
    assert not any(name.startswith("model.") for name in error.missing)
    holdfast.load({"model": module}, tmp_path)
    assert_same(module, values(saved))


def test_a_manager_starts_from_it(tmp_path: Path) -> None:
    saved, module = new(), new()
    optimizer = torch.optim.AdamW(module.parameters())
    export(tmp_path / "hf", saved)
    config = holdfast.CheckpointConfig(initial_load_path=tmp_path / "hf", keep=None)
    state = {"model": module, "optimizer": optimizer, "train": {"step": 3}}
    with holdfast.CheckpointManager(tmp_path / "root", state, config=config) as manager:
        assert manager.restore() is None
        assert_same(module, values(saved))
        manager.save(1)
        manager.wait()
    other = new()
    with holdfast.CheckpointManager(tmp_path / "root", {"model": other}, config=config) as manager:
        assert manager.restore() == 1
    assert_same(other, values(saved))


def test_a_key_map_is_for_hugging_face_directories(tmp_path: Path) -> None:
    module = new()
    holdfast.save({"model": module}, tmp_path / "step-1")
    with pytest.raises(ConfigError, match="key_map says how a Hugging Face directory"):
        holdfast.load({"model": module}, tmp_path / "step-1", key_map=dict)
    with pytest.raises(ConfigError, match="initial_key_map"):
        holdfast.CheckpointConfig(initial_key_map=dict)


def test_hugging_face_sharding(tmp_path: Path) -> None:
    saved, module = new(), new()
    parts = list(values(saved).items())
    weight_map = {}
    for number in range(0, len(parts), 3):
        file = f"model-{number:05}.safetensors"
        save_file(dict(parts[number : number + 3]), tmp_path / file)
        weight_map |= {name: file for name, _ in parts[number : number + 3]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    holdfast.load({"model": module}, tmp_path)
    assert_same(module, values(saved))
