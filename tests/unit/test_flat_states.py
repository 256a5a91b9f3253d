"""Flat dictionaries of tensors (``module.state_dict()``) as states: names that only the checkpoint has are an error.

So are values that are stored quantized: no load fills them in without their scales.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.errors import StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BLOCK = 16


def model(layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    whole = nn.Module()
    whole.layers = nn.ModuleList(nn.Linear(BLOCK, BLOCK, dtype=dtype) for _ in range(layers))
    whole.head = nn.Linear(BLOCK, 2, bias=False, dtype=dtype)
    return whole


def quantized(module: nn.Module, scale: str, kind: torch.dtype = torch.float8_e4m3fn) -> dict[str, torch.Tensor]:
    """The state dict with the matrices of layers in 8 bits, and a scale beside each: ``scale`` has its name."""
    found = dict(module.state_dict())
    for name in [name for name in found if name.endswith("weight") and name.startswith("layers")]:
        found[name] = (found[name].float() * 64).to(kind)
        found[scale.format(name=name, layer=name.rpartition(".")[0])] = torch.ones(1, 1) / 64
    return found


def refused(state: dict[str, Any], directory: Path, **options: Any) -> StateMismatch:
    before = {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(state, directory, **options)
    for name, value in before.items():
        assert torch.equal(state[name].float(), value.float()), "touched"
    return caught.value


SCALES = ["{name}_scale_inv", "{name}_scale", "{name}.absmax", "{layer}.SCB", "{layer}.scales", "{layer}.weight_scales"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_a_flat_state_dict_is_not_filled_with_quantized_values(tmp_path: Path, scale: str, kind: torch.dtype) -> None:
    save_file(quantized(model(), scale, kind), tmp_path / "model.safetensors")
    error = refused(model().state_dict(), tmp_path)
    name = scale.format(name="layers.0.weight", layer="layers.0")
    assert name in error.unexpected
    assert "layers.0.weight" in error.mismatched
    assert name in str(error)


@pytest.mark.parametrize("key", [None, "model"])
def test_what_fits_leaves_quantized_values_out(tmp_path: Path, key: str | None) -> None:
    """``strict=False`` is no leave to fill in raw 8-bit values: what keeps its value is what doesn't fit."""
    saved, into = model(), model()
    save_file(quantized(saved, "{name}_scale_inv"), tmp_path / "model.safetensors")
    kept = {name: value.clone() for name, value in into.state_dict().items()}
    holdfast.load(into.state_dict() if key is None else {key: into}, tmp_path, strict=False)
    found = into.state_dict()
    for name, value in saved.state_dict().items():
        assert torch.equal(found[name], kept[name] if name.endswith("weight") and "layers" in name else value), name


def test_quantized_values_are_loaded_as_they_are_where_the_state_has_them_so(tmp_path: Path) -> None:
    stored = quantized(model(), "{name}_scale_inv")
    save_file(stored, tmp_path / "model.safetensors")
    into = {name: torch.zeros_like(value) for name, value in stored.items()}
    holdfast.load(into, tmp_path)
    for name, value in stored.items():
        assert torch.equal(into[name].float(), value.float())


def test_eight_bits_without_scales_are_values(tmp_path: Path) -> None:
    stored = {name: value.to(torch.float8_e5m2) for name, value in model().state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    into = model().state_dict()
    holdfast.load(into, tmp_path)
    assert torch.equal(into["head.weight"], stored["head.weight"].to(torch.bfloat16))


def test_the_configuration_tells_of_scales_by_other_names(tmp_path: Path) -> None:
    stored = {name: value.to(torch.float8_e4m3fn) for name, value in model().state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "novel"}}))
    error = refused(model().state_dict(), tmp_path)
    assert "head.weight" in error.mismatched
    assert "novel" in str(error)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_packed_formats_are_named(tmp_path: Path, method: str) -> None:
    stored = dict(model().state_dict())
    for layer in ("layers.0", "layers.1"):
        del stored[f"{layer}.weight"]
        stored |= {f"{layer}.qweight": torch.ones(2, BLOCK, dtype=torch.int32), f"{layer}.scales": torch.ones(1, BLOCK)}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    error = refused(model().state_dict(), tmp_path)
    assert error.missing == ("layers.0.weight", "layers.1.weight")
    assert "layers.0.qweight" in error.unexpected
    assert method in str(error)


@pytest.mark.parametrize("stock", [False, True])
def test_quantized_values_in_checkpoints(tmp_path: Path, *, stock: bool) -> None:
    stored = quantized(model(), "{name}_scale_inv")
    if stock:
        dcp.save(dict(stored), checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        holdfast.save(stored, tmp_path / "c")
    for strict in (True, False):
        into = model().state_dict()
        before = into["layers.0.weight"].clone()
        if strict:
            assert "layers.0.weight_scale_inv" in str(refused(into, tmp_path / "c"))
        else:
            holdfast.load(into, tmp_path / "c", strict=False)
            assert torch.equal(into["layers.0.weight"], before)


# names ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["hf", "holdfast", "stock", "nested"])
def larger(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with three layers, saved from a flat dictionary; or from a nested one whose names are the same."""
    state = model(3).state_dict()
    if request.param == "hf":
        (tmp_path / "c").mkdir()
        save_file(state, tmp_path / "c" / "model.safetensors")
    elif request.param == "holdfast":
        holdfast.save(dict(state), tmp_path / "c")
    elif request.param == "stock":
        dcp.save(dict(state), checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        whole = model(3)
        holdfast.save({"layers": whole.layers, "head": whole.head}, tmp_path / "c")
    return tmp_path / "c"


def test_a_larger_model_does_not_pass_for_a_smaller_one(larger: Path) -> None:
    error = refused(model(2).state_dict(), larger)
    assert error.unexpected == ("layers.2.bias", "layers.2.weight")
    holdfast.load(model(2).state_dict(), larger, strict=False)
    holdfast.load(model(3).state_dict(), larger)


@pytest.mark.parametrize("stock", [False, True])
def test_a_bare_model_in_the_directory_is_compared_with_the_module(tmp_path: Path, *, stock: bool) -> None:
    """Torchtitan's directories have the model without a key, beside keys of other parts."""
    flat = {**model(3).state_dict(), "train_state": {"step": torch.tensor(3)}}
    if stock:
        dcp.save(flat, checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        holdfast.save(flat, tmp_path / "c")
    with pytest.raises(StateMismatch) as caught:
        holdfast.load({"model": model(2)}, tmp_path / "c")
    assert caught.value.unexpected == ("layers.2.bias", "layers.2.weight")
    holdfast.load({"model": model(3)}, tmp_path / "c")


def test_other_keys_are_simply_not_loaded(tmp_path: Path) -> None:
    whole = model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    holdfast.save({**whole.state_dict(), "optimizer": optimizer, "n": 1, "a.x": nn.Linear(1, 1)}, tmp_path / "c")
    holdfast.load(model().state_dict(), tmp_path / "c")
    holdfast.load({"head.weight": whole.head.weight.detach()}, tmp_path / "c")
    holdfast.load({"a.y": torch.ones(1), "n": 0}, tmp_path / "c", strict=False)
    holdfast.save({"a.b": nn.Linear(1, 1), "a.c": nn.Linear(1, 1), "d": torch.ones(1)}, tmp_path / "d")
    holdfast.load({"a.b": nn.Linear(1, 1)}, tmp_path / "d")


# one tensor under two names -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, dtype=dtype)
        self.head = nn.Linear(4, 6, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight


def stored_untied(kind: str, directory: Path, *, equal: bool) -> Tied:
    """A directory with a value under each of two names, which the module that it is loaded into has tied."""
    saved = Tied(tied=False)
    with torch.no_grad():
        saved.head.weight.copy_(saved.embed.weight)
        if not equal:
            saved.head.weight[5, 3] += 1
    if kind == "hf":
        directory.mkdir()
        save_file(saved.state_dict(), directory / "model.safetensors")
    elif kind == "stock":
        dcp.save({"model": saved.state_dict()}, checkpoint_id=directory, no_dist=True)
    elif kind == "export":
        holdfast.export_hf(saved, directory)
    else:
        holdfast.save({"model": saved}, directory)
    return saved


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", ["module", "dict"])
@pytest.mark.parametrize("kind", ["hf", "export", "stock", "holdfast"])
def test_two_values_for_one_tensor_are_refused(tmp_path: Path, kind: str, form: str, *, strict: bool) -> None:
    stored_untied(kind, tmp_path / "c", equal=False)
    into = Tied()
    before = into.embed.weight.detach().clone()
    state = {"model": into if form == "module" else into.state_dict()}
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(state, tmp_path / "c", strict=strict)
    assert caught.value.mismatched == ("model.embed.weight", "model.head.weight")
    assert "one tensor" in str(caught.value)
    assert torch.equal(into.embed.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["hf", "export", "stock", "holdfast"])
def test_one_value_under_two_names_is_fine(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    saved = stored_untied(kind, tmp_path / "c", equal=True)
    into = Tied(dtype=dtype)
    holdfast.load({"model": into}, tmp_path / "c")
    assert torch.equal(into.embed.weight, saved.embed.weight.to(dtype))
    assert into.head.weight is into.embed.weight


def test_tied_tensors_of_a_checkpoint_are_read_once(tmp_path: Path) -> None:
    """Checksums tell that they are equal."""
    into = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(2)])
    into[1].weight = into[0].weight
    holdfast.save({"model": into}, tmp_path / "c")
    before = holdfast.statistics()["bytes_read"]
    holdfast.load({"model": into}, tmp_path / "c")
    assert holdfast.statistics()["bytes_read"] - before < 1.5 * into[0].weight.nbytes


def test_optimizer_state_that_is_shared(tmp_path: Path) -> None:
    step = torch.zeros(())
    model = Tied(tied=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": step}
    step += 3
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(state, tmp_path / "c")
    step += 1
    holdfast.load(state, tmp_path / "c")
    assert step == 3
