"""Modules with state-dict hooks and overrides: what is saved, how it is staged, and how it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hooked_modules import (
    KINDS,
    Adds,
    All,
    DropsFrozen,
    Joins,
    Net,
    Overrides,
    Plain,
    Renames,
    SplitsIntoCopies,
    SplitsIntoViews,
    Transposes,
    assert_same_tensors,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_model_state_dict

import holdfast
from holdfast.errors import ConfigError, StateMismatch
from holdfast.state.tree import StateTree


def made(kind: type[Plain], seed: int, *, root: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    return kind() if root else Net(kind)


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("root", [True, False], ids=["root", "below"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_names_and_values_are_those_of_state_dict_and_come_back(kind: type[Plain], root: bool, tmp_path: Path) -> None:
    model = made(kind, 1, root=root)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    checkpoint = holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "a", step=1)
    expected = flat(model.state_dict())
    stored = {name.removeprefix("model."): name for name in checkpoint.tensors if name.startswith("model.")}
    assert stored.keys() == expected.keys()
    for name, full in stored.items():
        value = checkpoint.read(full)
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name

    other = made(kind, 2, root=root)
    others_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    holdfast.load({"model": other, "optimizer": others_optimizer}, tmp_path / "a")
    dropped = ("seen",) if kind is DropsFrozen else ()
    assert_same_tensors(model, other, but=dropped)
    train(model, optimizer, seed=4)
    train(other, others_optimizer, seed=4)
    assert_same_tensors(model, other, but=dropped)
    if kind is Adds:
        assert checkpoint.objects[next(name for name in checkpoint.objects if name.endswith("about.calls"))] == 0


@pytest.mark.parametrize("staging", ["lazy", "eager"])
def test_a_manager_resumes_bit_equal(staging: Any, tmp_path: Path) -> None:
    config = holdfast.CheckpointConfig(every=1, staging=staging)
    torch.manual_seed(1)
    model = All()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with holdfast.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, config=config) as manager:
        for step in range(1, 5):
            train(model, optimizer, steps=1, seed=step)
            manager.step(step)
    torch.manual_seed(2)
    other = All()
    others = torch.optim.Adam(other.parameters(), lr=0.1)
    with holdfast.CheckpointManager(tmp_path, {"model": other, "optimizer": others}, config=config) as manager:
        assert manager.restore(3) == 3
        train(other, others, steps=1, seed=4)
        manager.step(4 + 1)
    assert_same_tensors(model, other, but=("DropsFrozen.middle.0.seen",))


@pytest.mark.parametrize("kind", [SplitsIntoCopies, Renames, Overrides], ids=lambda kind: kind.__name__)
def test_wrappers_leave_no_trace_in_names(kind: type[Plain], tmp_path: Path) -> None:
    expected = {f"model.{name}" for name in flat(made(kind, 1).state_dict())}
    inner = made(kind, 1)
    inner.middle[0] = checkpoint_wrapper(inner.middle[0])
    compiled = made(kind, 1)
    compiled.middle = torch.compile(compiled.middle, backend="eager")
    hooked_root = nn.Sequential(nn.Linear(2, 2))
    hooked_root.register_state_dict_post_hook(lambda *_: None)
    hooked_root[0] = torch.compile(checkpoint_wrapper(hooked_root[0]), backend="eager")
    for model in (inner, compiled, torch.compile(made(kind, 1), backend="eager")):
        path = tmp_path / str(id(model))
        assert set(holdfast.save({"model": model}, path).tensors) == expected
        holdfast.load({"model": model}, path)
        holdfast.load({"model": made(kind, 5)}, path)
    assert set(holdfast.save({"model": hooked_root}, tmp_path / "r").tensors) == {"model.0.weight", "model.0.bias"}
    holdfast.load({"model": hooked_root}, tmp_path / "r")


def collected(model: nn.Module) -> dict[str, Any]:
    return {entry.name: entry for entry in StateTree({"m": model}, rank=0, world=1).collect().tensors}


def test_what_lies_in_a_parameter_is_staged_lazily_and_what_is_new_is_held_without_another_copy() -> None:
    views = collected(SplitsIntoViews())
    assert [views[f"m.{name}.weight"].lazy for name in "qkv"] == [True] * 3
    copies = collected(SplitsIntoCopies())
    assert [(copies[f"m.{name}.weight"].lazy, copies[f"m.{name}.weight"].fresh) for name in "qkv"] == [
        (False, True)
    ] * 3
    assert copies["m.bias"].lazy
    assert not copies["m.seen"].lazy
    assert not copies["m.seen"].fresh
    transposed = collected(Transposes())
    assert transposed["m.weight"].lazy


def test_memory_that_somebody_else_may_change_is_not_taken_for_fresh() -> None:
    class Keeps(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.table = [torch.zeros(4), torch.zeros(8)]
            self.register_state_dict_post_hook(self._add)

        @staticmethod
        def _add(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[prefix + "itself"] = module.table[0]
            state[prefix + "part"] = module.table[1][:2]
            state[prefix + "numpy"] = torch.from_numpy(module.weight.detach().numpy().copy())

    entries = collected(Keeps())
    assert not any(entries[f"m.{name}"].fresh or entries[f"m.{name}"].lazy for name in ("itself", "part", "numpy"))


def test_a_view_is_saved_as_it_was_when_an_update_follows(tmp_path: Path) -> None:
    """The optimizer is no part of the state: the hook has to know parameters that only views of are captured."""
    model = made(SplitsIntoViews, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    train(model, optimizer)
    config = holdfast.CheckpointConfig(every=1)
    with holdfast.CheckpointManager(tmp_path, {"model": model}, config=config) as manager:
        for step in range(1, 4):
            before = {name: value.clone() for name, value in flat(model.state_dict()).items()}
            handle = manager.save(step)
            train(model, optimizer, steps=1)
            checkpoint = handle.result()
            for name, value in before.items():
                assert torch.equal(checkpoint.read(f"model.{name}"), value), (step, name)


def test_a_structure_that_stands_is_not_planned_again() -> None:
    for kind in KINDS:
        tree = StateTree({"m": made(kind, 1)}, rank=0, world=1)
        tree.collect()
        assert tree.collect().unchanged, kind


def test_a_hook_that_is_registered_later_is_noticed(tmp_path: Path) -> None:
    model = made(Plain, 1)
    tree = StateTree({"m": model}, rank=0, world=1)
    assert "m.middle.0.weight" in {entry.name for entry in tree.collect().tensors}
    handle = model.middle[0].register_state_dict_post_hook(Renames._out)
    assert "m.middle.0.linear.weight" in {entry.name for entry in tree.collect().tensors}
    handle.remove()
    assert "m.middle.0.weight" in {entry.name for entry in tree.collect().tensors}


def test_hooks_run_once_a_save(tmp_path: Path) -> None:
    """Hooks may gather: ranks whose plans differ must not run them a different number of times."""
    model, ran = made(Plain, 1), []
    model.register_state_dict_post_hook(lambda *_: ran.append(1))
    with holdfast.CheckpointManager(tmp_path, {"model": model}, config=holdfast.CheckpointConfig(every=1)) as manager:
        ran.clear()
        for step in range(1, 4):
            if step == 3:
                model.extra = nn.Linear(2, 2)
            manager.save(step).result()
    assert len(ran) == 3


def test_a_state_dict_of_the_object_itself_is_asked_too(tmp_path: Path) -> None:
    model = made(Plain, 1)
    tree = StateTree({"model": model}, rank=0, world=1)
    tree.collect()
    original = model.state_dict
    model.state_dict = lambda *a, **k: {"only": original()["last.bias"]}  # type: ignore[method-assign, assignment, misc]
    assert set(holdfast.save({"model": model}, tmp_path / "a").tensors) == {"model.only"}
    assert {entry.name for entry in tree.collect().tensors} == {"model.only"}


def test_optimizer_state_keeps_the_names_that_stock_gives(tmp_path: Path) -> None:
    """Stock names it after parameters, whatever hooks make of those."""
    model = All()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    collected = StateTree({"model": model, "optimizer": optimizer}, rank=0, world=1).collect()
    ours = {entry.name for entry in (*collected.tensors, *collected.objects) if entry.name.startswith("optimizer.")}
    assert ours == set(flatten_state_dict({"optimizer": get_optimizer_state_dict(model, optimizer)})[0])


def test_a_final_model_only_save_in_another_dtype(tmp_path: Path) -> None:
    model = made(SplitsIntoCopies, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    config = holdfast.CheckpointConfig(last_model_only=True, last_dtype=torch.bfloat16)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        manager.save(2, final=True)
    checkpoint = holdfast.open(tmp_path / "step-2")
    assert torch.equal(checkpoint.read("model.middle.0.q.weight"), model.state_dict()["middle.0.q.weight"].bfloat16())
    assert checkpoint.tensors["model.middle.0.q.weight"].dtype == torch.bfloat16


def test_parameters_that_can_not_be_stored_may_be_left_out_by_a_hook(tmp_path: Path) -> None:
    class OnDemand(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(torch.zeros(3).to_sparse(), requires_grad=False)
            self.register_state_dict_post_hook(self._drop)

        @staticmethod
        def _drop(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            del state[prefix + "base"]

    assert "model.middle.0.base" not in holdfast.save({"model": made(OnDemand, 1)}, tmp_path / "a").tensors


def test_a_hook_that_raises_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    model = made(Plain, 1)

    def breaks_down(*_: Any) -> None:
        raise KeyError("wqkv")

    handle = model.middle[0].register_state_dict_post_hook(breaks_down)
    with pytest.raises(
        ConfigError, match=r"model\.middle\.0: state_dict\(\) of Plain raised KeyError in .*breaks_down"
    ):
        holdfast.save({"model": model}, tmp_path / "a")
    assert not list(tmp_path.iterdir())
    handle.remove()
    holdfast.save({"model": model}, tmp_path / "a")
    model.middle[0].register_load_state_dict_pre_hook(breaks_down)
    with pytest.raises(ConfigError, match=r"load_state_dict\(\) of Plain raised KeyError in .*breaks_down"):
        holdfast.load({"model": model}, tmp_path / "a")


def test_what_can_not_be_stored_is_named(tmp_path: Path) -> None:
    model = made(Plain, 1)
    model.middle[0].register_state_dict_post_hook(lambda m, s, p, _: s.update({p + "odd": object()}))
    with pytest.raises(ConfigError, match=r"model\.middle\.0\.odd"):
        holdfast.save({"model": model}, tmp_path / "a")


@pytest.mark.parametrize("kind", [SplitsIntoCopies, SplitsIntoViews, Joins, Renames, Transposes, DropsFrozen])
def test_a_checkpoint_of_the_module_s_own_names_still_loads(kind: type[Plain], tmp_path: Path) -> None:
    """As saves wrote them that didn't know hooks; never one half of each."""
    model = made(kind, 1)
    own = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    holdfast.save({"model": own}, tmp_path / "a")
    other = made(kind, 2)
    holdfast.load({"model": other}, tmp_path / "a")
    assert_same_tensors(model, other)
    own.pop("middle.0.weight")
    holdfast.save({"model": own}, tmp_path / "b")
    before = made(kind, 2)
    other = made(kind, 2)
    with pytest.raises(StateMismatch):
        holdfast.load({"model": other}, tmp_path / "b")
    assert_same_tensors(before, other)


def test_what_a_hook_loses_for_loading_is_a_mismatch_before_anything_is_touched(tmp_path: Path) -> None:
    class Loses(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_state_dict_post_hook(self._lose)

        @staticmethod
        def _lose(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[prefix + "half"] = state.pop(prefix + "weight").clone()

    model, other, before = made(Loses, 1), made(Loses, 2), made(Loses, 2)
    holdfast.save({"model": model}, tmp_path / "a")
    with pytest.raises(StateMismatch, match=r"half.*doesn't take it") as caught:
        holdfast.load({"model": other}, tmp_path / "a")
    assert {"model.middle.0.half", "model.middle.0.weight"} == set(caught.value.mismatched)
    assert_same_tensors(before, other)
    holdfast.load({"model": other}, tmp_path / "a", strict=False)
    assert torch.equal(other.last.weight, model.last.weight)
    # The same where a hook of loading runs that doesn't help: it is known when it has run.
    other.middle[0].register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(StateMismatch, match="half"):
        holdfast.load({"model": other}, tmp_path / "a")


def test_shapes_that_differ_are_found_before_anything_is_touched(tmp_path: Path) -> None:
    model, other, before = (made(SplitsIntoCopies, seed) for seed in (1, 2, 2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["middle.0.k.weight"] = torch.zeros(3, 4)
    holdfast.save({"model": state}, tmp_path / "a")
    with pytest.raises(StateMismatch) as caught:
        holdfast.load({"model": other}, tmp_path / "a")
    assert caught.value.mismatched == ("model.middle.0.k.weight",)
    assert_same_tensors(before, other)
    # What fits is loaded; the others keep their values.
    holdfast.load({"model": other}, tmp_path / "a", strict=False)
    assert torch.equal(other.middle[0].weight[:2], model.middle[0].weight[:2])
    assert torch.equal(other.middle[0].weight[2:4], before.middle[0].weight[2:4])
    assert torch.equal(other.middle[0].weight[4:], model.middle[0].weight[4:])


def test_an_override_of_load_state_dict_decides_what_may_be_missing(tmp_path: Path) -> None:
    class Draft(nn.Module):
        """Keeps a trained part; the other is rebuilt."""

        def __init__(self) -> None:
            super().__init__()
            self.draft, self.target = nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_state_dict_post_hook(self._keep)

        @staticmethod
        def _keep(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            for key in [key for key in state if not key.startswith(f"{prefix}draft.")]:
                del state[key]

        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            found = super().load_state_dict(state_dict, strict=False, assign=assign)
            if strict and any(key.startswith("draft.") for key in found.missing_keys):
                raise RuntimeError("no draft")
            return found

    model, other = Draft(), Draft()
    checkpoint = holdfast.save({"model": model}, tmp_path / "a")
    assert set(checkpoint.tensors) == {"model.draft.weight", "model.draft.bias"}
    holdfast.load({"model": other}, tmp_path / "a")
    assert torch.equal(other.draft.weight, model.draft.weight)
    assert not torch.equal(other.target.weight, model.target.weight)


def test_hooks_of_loading_alone_run_too(tmp_path: Path) -> None:
    class Caches(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.cached = self.weight.detach().sum()
            self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "cached", module.weight.sum()))

    model, other = made(Caches, 1), made(Caches, 2)
    holdfast.save({"model": model}, tmp_path / "a")
    holdfast.load({"model": other}, tmp_path / "a")
    assert other.middle[0].cached == model.middle[0].weight.sum()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_with_stock_dcp_in_both_directions(kind: type[Plain], tmp_path: Path) -> None:
    model, other = made(kind, 1), made(kind, 2)
    dropped = ("seen", "base") if kind is DropsFrozen else ()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    holdfast.load({"model": other}, tmp_path / "stock")
    assert_same_tensors(model, other, but=dropped)
    holdfast.save({"model": model}, tmp_path / "ours")
    third = made(kind, 3)
    state = {"model": third.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    set_model_state_dict(third, state["model"], options=StateDictOptions(strict=not dropped))
    assert_same_tensors(model, third, but=dropped)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_without_a_key_is_recognized_by_the_names_that_hooks_give(tmp_path: Path) -> None:
    """As torchtitan writes them."""
    model, other = made(SplitsIntoCopies, 1), made(SplitsIntoCopies, 2)
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "stock", no_dist=True)
    holdfast.load({"model": other}, tmp_path / "stock")
    assert_same_tensors(model, other)


def test_options_of_loading(tmp_path: Path) -> None:
    model = made(SplitsIntoCopies, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    holdfast.save({"model": model, "optimizer": optimizer, "n": 3}, tmp_path / "a", step=1)
    other, before = made(SplitsIntoCopies, 2), made(SplitsIntoCopies, 2)
    state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "n": 0}
    excluding = holdfast.CheckpointConfig(exclude_from_loading=("model",), initial_load_path=tmp_path / "a")
    with holdfast.CheckpointManager(tmp_path / "run", state, config=excluding) as manager:
        manager.restore()
    assert_same_tensors(before, other)
    only = holdfast.CheckpointConfig(load_model_only=True, initial_load_path=tmp_path / "a")
    with holdfast.CheckpointManager(tmp_path / "run2", state, config=only) as manager:
        manager.restore()
    assert_same_tensors(model, other)


def test_torchs_own_hooks_stay_on_the_direct_path() -> None:
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        checkpoint_wrapper(nn.BatchNorm1d(3)),
        nn.MultiheadAttention(4, 2),
    )
    tree = StateTree({"m": torch.compile(model, backend="eager")}, rank=0, world=1)
    live = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    assert {id(entry.tensor) for entry in tree.collect().tensors} <= live
    assert not tree.collect().asked[("m",)].parts


def test_what_modules_of_torch_add_to_their_state_dict_is_saved() -> None:
    """Functional modules for quantization keep scale and zero point in no buffer."""
    module = torch.ao.nn.quantized.QFunctional()
    assert {entry.name for entry in StateTree({"m": module}, rank=0, world=1).collect().tensors} == {
        "m.scale",
        "m.zero_point",
    }


def test_stages_of_a_list_merge_their_names(tmp_path: Path) -> None:
    stages = [nn.ModuleDict({"a": SplitsIntoCopies()}), nn.ModuleDict({"b": Renames()})]
    checkpoint = holdfast.save({"model": stages}, tmp_path / "a")
    assert {"model.a.q.weight", "model.b.linear.weight"} <= set(checkpoint.tensors)
    others = [nn.ModuleDict({"a": SplitsIntoCopies()}), nn.ModuleDict({"b": Renames()})]
    holdfast.load({"model": others}, tmp_path / "a")
    for stage, other in zip(stages, others, strict=True):
        assert_same_tensors(stage, other)
    with pytest.raises(ConfigError, match="in common"):
        holdfast.save({"model": [Renames(), Renames()]}, tmp_path / "b")


def test_tied_parameters_of_hooked_modules(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(Renames(), SplitsIntoCopies())
        model[1].bias = model[0].bias
        return model

    model, other = tied(), tied()
    checkpoint = holdfast.save({"model": model}, tmp_path / "a")
    assert {"model.0.linear.bias", "model.1.bias"} <= set(checkpoint.tensors)
    holdfast.load({"model": other}, tmp_path / "a")
    assert_same_tensors(model, other)
    assert other[0].bias is other[1].bias
