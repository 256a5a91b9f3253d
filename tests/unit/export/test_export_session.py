"""`export_hf` called again and again: plan and image are kept between calls, and what is exported is what is there."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.engine.shared import process_engine
from holdfast.saver import process_session as shared

transformers = pytest.importorskip("transformers")


def net(seed: int = 0, width: int = 64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 2048), nn.LayerNorm(2048), nn.Linear(2048, 300))


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def plans() -> int:
    return holdfast.statistics()["export_plans_made"]


def images() -> list[Any]:
    """The images that are kept between calls."""
    return [buffer.image for kept in shared.process_session()._kept.values() for buffer in kept.buffers]


def exported(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_exported(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = exported(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert holdfast.open(path).verify().ok


@pytest.mark.parametrize("make", [net, llama])
def test_plan_is_kept_from_the_first_call_and_image_from_the_second(
    make: Callable[[int], nn.Module], tmp_path: Path
) -> None:
    before, used = plans(), []
    for number in range(4):
        model = make(number)
        holdfast.export_hf(model, tmp_path / f"{number}")
        assert_exported(tmp_path / f"{number}", dict(model.state_dict()))
        assert plans() - before == 1
        used.append(images())
    assert [len(kept) for kept in used] == [0, 1, 1, 1]
    assert used[1] == used[2] == used[3]
    holdfast.release()
    assert images() == []


def test_checkpoints_are_exported_by_one_plan(tmp_path: Path) -> None:
    before = plans()
    for number in range(3):
        model = net(number)
        holdfast.save({"model": model}, tmp_path / f"step-{number}")
        holdfast.export_hf(holdfast.open(tmp_path / f"step-{number}"), tmp_path / f"{number}")
        assert_exported(tmp_path / f"{number}", dict(model.state_dict()))
    assert plans() - before == 1
    wider = net(3, width=32)
    holdfast.save({"model": wider}, tmp_path / "wider")
    holdfast.export_hf(holdfast.open(tmp_path / "wider"), tmp_path / "w")
    assert_exported(tmp_path / "w", dict(wider.state_dict()))
    assert plans() - before == 2


def test_arguments_of_each_call_count(tmp_path: Path) -> None:
    model = net()
    state = dict(model.state_dict())
    factor = {"by": "a"}

    def renamed(given: dict[str, Any]) -> dict[str, Any]:
        return {f"{factor['by']}.{name}": tensor for name, tensor in given.items()}

    def export(name: str, **options: Any) -> Path:
        return holdfast.export_hf(model, tmp_path / name, **options)

    for turn in range(2):
        assert_exported(export(f"plain{turn}"), state)
        assert_exported(
            export(f"half{turn}", dtype="bfloat16"), {name: tensor.bfloat16() for name, tensor in state.items()}
        )
        mixed = {name: tensor if name.startswith("1.") else tensor.half() for name, tensor in state.items()}
        assert_exported(export(f"mixed{turn}", dtype="float16", fp32_keys=[r"^1\."]), mixed)
        assert_exported(export(f"dict{turn}", key_map={name: f"x.{name}" for name in state}), renamed_to("x", state))
        factor["by"] = f"by{turn}"  # the same function, which says something else
        assert_exported(export(f"function{turn}", key_map=renamed), renamed_to(f"by{turn}", state))
        cut = export(f"cut{turn}", max_shard_bytes=1 << 20)
        assert len(list(cut.glob("*.safetensors"))) > 1
        assert_exported(cut, state)


def renamed_to(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def test_what_becomes_of_a_model_between_calls_counts(tmp_path: Path) -> None:
    model = llama()
    state = dict(model.state_dict())
    for number in range(2):
        assert_exported(holdfast.export_hf(model, tmp_path / f"{number}"), state)
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    assert_exported(
        holdfast.export_hf(model, tmp_path / "ignored"),
        {name: tensor for name, tensor in state.items() if name != "model.norm.weight"},
    )
    model._keys_to_ignore_on_save = None
    model.config.rope_theta, model.config.bos_token_id = 5e5, 7
    holdfast.export_hf(model, tmp_path / "config")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "config").bos_token_id == 7
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    holdfast.export_hf(model, tmp_path / "tied")
    assert "lm_head.weight" not in exported(tmp_path / "tied")


def test_memory_that_is_laid_out_anew_between_calls(tmp_path: Path) -> None:
    model = nn.Linear(96, 96, bias=False)
    for number, turned in enumerate((False, True, True, False, True)):
        weight = torch.randn(96, 96)
        model.weight = nn.Parameter(weight.t() if turned else weight)
        holdfast.export_hf(model, tmp_path / f"{number}")
        assert_exported(tmp_path / f"{number}", {"weight": model.weight.detach().contiguous()})
    block = torch.randn(96 * 96 + 1)
    for number in range(5, 8):  # not aligned to what elements are read by
        model.weight = nn.Parameter(block[1:].view(96, 96))
        holdfast.export_hf(model, tmp_path / f"{number}")
        assert_exported(tmp_path / f"{number}", {"weight": model.weight.detach()})


def test_plain_module_after_one_of_transformers_of_the_same_names(tmp_path: Path) -> None:
    """What others had a part in is never taken for a module that they have none in."""
    model = net()
    for number in range(2):
        holdfast.export_hf(
            model, tmp_path / f"mapped{number}", key_map={name: f"x.{name}" for name in model.state_dict()}
        )
    holdfast.export_hf(model, tmp_path / "plain")
    assert_exported(tmp_path / "plain", dict(model.state_dict()))


def test_no_tensor_outlives_its_owner(tmp_path: Path) -> None:
    for number in range(3):
        model = llama(number)
        alive = [weakref.ref(model), *map(weakref.ref, model.parameters()), *map(weakref.ref, model.modules())]
        holdfast.export_hf(model, tmp_path / f"{number}")
        del model
        gc.collect()
        assert not [reference() for reference in alive if reference() is not None]


def test_image_of_a_failed_export_is_not_kept(tmp_path: Path) -> None:
    model, writes = net(), list[int]()

    def key_map(given: dict[str, Any]) -> dict[str, Any]:
        if writes:
            model.get_parameter("0.weight").data.add_(1)
        return given

    for number in range(2):
        holdfast.export_hf(model, tmp_path / f"{number}", key_map=key_map)
    assert len(images()) == 1
    writes.append(1)
    with pytest.raises(holdfast.StateChangedWhileStaging):
        holdfast.export_hf(model, tmp_path / "bad", key_map=key_map)
    assert images() == []
    writes.clear()
    holdfast.export_hf(model, tmp_path / "good", key_map=key_map)
    assert_exported(tmp_path / "good", dict(model.state_dict()))
    assert len(images()) == 1


def test_forked_child_has_nothing_of_it(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    for number in range(3):
        holdfast.export_hf(model, tmp_path / f"{number}")
    engine, kept = process_engine().pid, images()
    child = os.fork()
    if not child:
        code = 1
        try:
            assert images() == []
            holdfast.export_hf(nn.Linear(4, 4), tmp_path / "child")
            assert process_engine().pid not in (None, engine)
            holdfast.release()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert images() == kept
    assert_exported(tmp_path / "child", exported(tmp_path / "child"))
    holdfast.export_hf(model, tmp_path / "parent")
    assert_exported(tmp_path / "parent", dict(model.state_dict()))
