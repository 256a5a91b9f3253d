"""Collecting: what is an entry, what is refused, what is seen on the second look, and that nothing is changed."""

from __future__ import annotations

import copy
import gc
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from _stored import one_rank
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.state.entries import PerRank, TensorGuard, local_tensor
from holdfast.state.rng import RNG
from holdfast.state.structure import structure_of
from holdfast.state.tree import StateTree
from holdfast.sync.weights.apply import TargetFactory


def names(state: dict[str, Any], **options: Any) -> set[str]:
    collected = one_rank(state, **options).collect()
    return {entry.name for entry in (*collected.tensors, *collected.objects)}


def trained(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


class Loader:
    def __init__(self) -> None:
        self.pos = 3

    def state_dict(self) -> dict[str, Any]:
        return {"pos": self.pos}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pos = state["pos"]


# what is an entry ------------------------------------------------------------------------------------------------


def test_references_not_copies() -> None:
    model, optimizer = trained()
    collected = one_rank({"model": model, "optimizer": optimizer}).collect()
    by_name = {entry.name: entry.tensor for entry in collected.tensors}
    assert by_name["model.0.weight"] is model[0].weight
    assert by_name["optimizer.state.0.weight.exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]
    assert local_tensor(model[0].weight).data_ptr() == model[0].weight.data_ptr()
    assert not local_tensor(model[0].weight).requires_grad


def test_an_optimizer_without_state_is_left_so() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    collected = one_rank({"model": model, "optimizer": optimizer}).collect()
    assert not optimizer.state
    assert all(param.grad is None for param in model.parameters())
    assert not any(".state." in entry.name for entry in (*collected.tensors, *collected.objects))


def test_no_hook_runs_but_those_of_a_module_s_state_dict() -> None:
    model, optimizer = trained()
    ran: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("a hook ran")

    model.register_state_dict_pre_hook(lambda *_: ran.append("before"))
    model.register_state_dict_post_hook(lambda *_: ran.append("after"))
    model.register_forward_hook(fail)
    model.register_full_backward_hook(fail)
    optimizer.register_step_pre_hook(fail)
    one_rank({"model": model, "optimizer": optimizer}).collect()
    assert ran == ["before", "after"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_module_of_torch_jit_is_refused_by_name() -> None:
    """Their tables look like those of other modules and can't be walked: torch's own TypeError came out."""
    inner = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"^model: 1\. was made by torch\.jit") as caught:
        one_rank({"model": inner}).collect()
    assert caught.value.field == "model"
    with pytest.raises(ConfigError, match="into: the module was made by torch"):
        TargetFactory().destination(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), streaming=False)


def test_what_is_lazy() -> None:
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "small": torch.zeros(4), "large": torch.zeros(1 << 19)}
    lazy = {entry.name: entry.lazy for entry in one_rank(state).collect().tensors}
    assert lazy["model.0.weight"]
    assert lazy["optimizer.state.0.weight.step"]
    assert not any(lazy[name] for name in ("model.1.running_mean", "small", "large"))


def test_update_targets_are_parameters_and_state() -> None:
    model, optimizer = trained()
    tree = one_rank({"model": model, "optimizer": optimizer})
    collected = tree.collect()
    targets = tree.update_targets(collected)
    assert {id(param) for param in model.parameters()} <= targets
    assert id(model[1].running_mean) not in targets


def test_the_parameters_of_an_optimizer_are_update_targets_without_their_module() -> None:
    model, optimizer = trained()
    tree = one_rank({"optimizer": optimizer})
    assert {id(param) for param in model.parameters()} <= tree.update_targets(tree.collect())


def test_values_of_one_rank() -> None:
    loader = Loader()
    state = {
        "dataloader": loader,
        "mine": PerRank({"x": torch.zeros(1)}),
        "n": PerRank(5),
        "train_data_loader": Loader(),
    }
    assert names(state, auto_rng=True) >= {
        "dataloader.rank-*.pos", "mine.rank-*.x", "n.rank-*", "train_data_loader.rank-*.pos", "rng.rank-*.python",
        "rng.rank-*.numpy", "rng.rank-*.torch",
    }  # fmt: skip


def test_rng_is_added_unless_there_is_one() -> None:
    assert names({"a": 1}) == {"a"}
    assert "rng.rank-*.torch" in names({"a": 1}, auto_rng=True)
    assert "rng.rank-*.torch" in names({"rng": RNG()})
    assert names({"rng": 4}, auto_rng=True) == {"rng"}


def test_lists_of_modules_merge_and_other_lists_are_numbered() -> None:
    first, second = nn.Sequential(OrderedDict(a=nn.Linear(1, 1))), nn.Sequential(OrderedDict(b=nn.Linear(1, 1)))
    optimizers = [torch.optim.SGD(part.parameters(), momentum=0.9) for part in (first, second)]
    found = names({"model": [first, second], "optimizer": optimizers, "others": [Loader(), nn.Linear(1, 1)]})
    assert {"model.a.weight", "model.b.weight", "others.0.pos", "others.1.weight"} <= found
    assert {"optimizer.param_groups.a.weight.lr", "optimizer.param_groups.b.bias.lr"} <= found


def test_stages_that_collide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.weight") as caught:
        names({"model": [nn.Linear(1, 1), nn.Linear(1, 1)]})
    assert caught.value.field == "model"


def test_an_optimizer_over_two_models_prefixes_by_module() -> None:
    actor, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], momentum=0.9)
    collected = one_rank({"actor": actor, "critic": critic, "optimizer": optimizer}).collect()
    params = next(entry.value for entry in collected.objects if entry.name.endswith(".params"))
    assert params == ["actor.weight", "actor.bias", "critic.weight", "critic.bias"]


def test_an_optimizer_over_each_of_two_models_does_not() -> None:
    actor, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    state = {
        "actor": actor,
        "critic": critic,
        "a": torch.optim.SGD(actor.parameters()),
        "c": torch.optim.SGD(critic.parameters()),
    }
    collected = one_rank(state).collect()
    lists = {entry.name: entry.value for entry in collected.objects if entry.name.endswith(".params")}
    assert lists == {"a.param_groups.0.params": ["weight", "bias"], "c.param_groups.0.params": ["weight", "bias"]}


def test_parameters_in_no_module_are_numbered() -> None:
    loose = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(loose, momentum=0.9)
    sum(param.sum() for param in loose).backward()
    optimizer.step()
    assert {"o.state.0.momentum_buffer", "o.state.1.momentum_buffer"} <= names({"o": optimizer})


def test_a_container_of_optimizers_is_its_optimizers() -> None:
    model, inner = trained()

    class Container(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.optimizers = [inner]
            super().__init__(list(model.parameters()), {})

        def state_dict(self) -> Any:
            pytest.fail("called")

    assert names({"model": model, "o": Container()}) == names({"model": model, "o": inner})


def test_nested_optimizer_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"pre": {0: torch.zeros(1), 1: [torch.ones(1)]}, "n": 3}
    tree = one_rank({"model": model, "o": optimizer})
    collected = tree.collect()
    found = {entry.name: entry for entry in (*collected.tensors, *collected.objects)}
    assert {"o.state.weight.pre.0", "o.state.weight.pre.1.0", "o.state.weight.n"} <= set(found)
    optimizer.state[model.weight]["n"] = 4
    again = tree.collect()
    assert again.unchanged
    assert {entry.name: entry.value for entry in again.objects}["o.state.weight.n"] == 4


# what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "lazy": lambda: nn.LazyLinear(3).weight,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_tensors_that_cannot_be_stored(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.bad") as caught:
        names({"a": {"bad": REFUSED[kind]()}})
    assert caught.value.field == "a.bad"


@pytest.mark.parametrize("state", [[], {}, {1: 2}, {"": 1}, nn.Linear(1, 1)])
def test_states_that_are_none(state: Any) -> None:
    with pytest.raises(ConfigError):
        StateTree(state, rank=0, world=1)


def test_names_given_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.b"):
        names({"a": {"b": 1}, "a.b": torch.zeros(1)})


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": {}}
    state["a"]["again"] = state["a"]
    state["a"]["x"] = 1
    with pytest.raises(ConfigError, match="deeper"):
        names(state)


def test_the_marker_as_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="reserved"):
        names({"a": {"rank-*": 1}})


def test_a_plain_dataloader_is_refused() -> None:
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        names({"data": torch.utils.data.DataLoader([1, 2])})


# the second look -------------------------------------------------------------------------------------------------


def test_an_unchanged_state_is_known_again() -> None:
    model, optimizer = trained()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1, "ema": torch.zeros(3)}
    tree = one_rank(state, auto_rng=True)
    first = tree.collect()
    assert not first.unchanged
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state["step"] = 2
    state["ema"] = torch.ones(3)
    second = tree.collect()
    assert second.unchanged
    assert second.fingerprint == first.fingerprint
    assert [entry.name for entry in second.tensors] == [entry.name for entry in first.tensors]
    values = {entry.name: entry.value for entry in second.objects}
    assert values["step"] == 2
    assert next(entry.tensor for entry in second.tensors if entry.name == "ema") is state["ema"]


def add_layer(model: Any, _: Any) -> None:
    model.append(nn.Linear(2, 2))


def replace_parameter(model: Any, _: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(4, 4))


def assign(model: Any, _: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def change_shape(model: Any, _: Any) -> None:
    model[0].weight.data = torch.zeros(5, 4)


def change_dtype(model: Any, _: Any) -> None:
    model.to(torch.float64)


def drop_bias(model: Any, _: Any) -> None:
    model[0].bias = None


def grow_deep(model: Any, _: Any) -> None:
    model[2].register_buffer("mask", torch.ones(1))


def make_transient(model: Any, _: Any) -> None:
    model[1]._non_persistent_buffers_set.add("running_mean")


def add_group(model: Any, optimizer: Any) -> None:
    extra = nn.Linear(1, 1)
    model.append(extra)
    optimizer.add_param_group({"params": list(extra.parameters())})


def drop_state(_: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def reload_state(_: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def new_key(model: Any, optimizer: Any) -> None:
    optimizer.state[model[0].weight]["max_exp_avg_sq"] = torch.zeros(4, 4)


def new_option(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["initial_lr"] = 0.1


@pytest.mark.parametrize(
    "change",
    [add_layer, replace_parameter, assign, change_shape, change_dtype, drop_bias, grow_deep, make_transient, add_group,
     drop_state, reload_state, new_key, new_option],
)  # fmt: skip
def test_every_change_is_seen(change: Any) -> None:
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer}
    tree = one_rank(state)
    tree.collect()
    assert tree.collect().unchanged
    change(model, optimizer)
    seen = tree.collect()
    fresh = one_rank(state).collect()
    assert not seen.unchanged
    assert [entry.name for entry in seen.tensors] == [entry.name for entry in fresh.tensors]
    assert all(a.tensor is b.tensor for a, b in zip(seen.tensors, fresh.tensors, strict=True))
    assert [entry.name for entry in seen.objects] == [entry.name for entry in fresh.objects]
    assert tree.collect().unchanged


def test_a_lazy_tensor_replaced_by_one_like_it_is_a_change() -> None:
    model = nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model, "small": torch.zeros(1)}
    tree = one_rank(state)
    tree.collect()
    state["small"] = torch.ones(1)
    assert tree.collect().unchanged
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert not tree.collect().unchanged
    assert tree.collect().unchanged


def test_modules_only() -> None:
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "app": {"net": nn.Linear(1, 1), "n": 1}}
    collected = one_rank(state, auto_rng=True).modules_only().collect()
    expected = {f"model.{name}" for name in model.state_dict()} | {"app.net.weight", "app.net.bias"}
    assert {entry.name for entry in collected.tensors} == expected
    assert collected.objects == ()
    with pytest.raises(ConfigError, match="no module"):
        one_rank({"n": 1}).modules_only()


def test_state_that_appears_with_the_first_step_is_seen() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    tree = one_rank({"model": model, "optimizer": optimizer})
    tree.collect()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    collected = tree.collect()
    assert not collected.unchanged
    assert "optimizer.state.weight.momentum_buffer" in {entry.name for entry in collected.tensors}


def test_another_object_under_the_same_key_is_seen() -> None:
    state: dict[str, Any] = {"model": nn.Linear(2, 2)}
    tree = one_rank(state)
    tree.collect()
    state["model"] = nn.Linear(2, 2)
    collected = tree.collect()
    assert collected.tensors[0].tensor is state["model"].weight


def test_a_change_first_seen_by_a_load_is_a_change_for_the_next_collection() -> None:
    model = nn.Linear(2, 2)
    tree = one_rank({"model": model})
    first = tree.collect()
    model.weight = nn.Parameter(torch.ones(2, 2))
    tree.destinations({}, (), {})
    collected = tree.collect()
    assert not collected.unchanged
    assert collected.fingerprint != first.fingerprint
    assert model.weight in [entry.tensor for entry in collected.tensors if entry.name == "model.weight"]


def test_a_change_first_seen_by_a_collection_that_failed_is_a_change_for_the_next() -> None:
    class Moody(Loader):
        fails = False

        def state_dict(self) -> dict[str, Any]:
            if self.fails:
                raise RuntimeError("not now")
            return super().state_dict()

    model, moody = nn.Linear(2, 2), Moody()
    tree = one_rank({"model": model, "moody": moody})
    first = tree.collect()
    model.lora = nn.Parameter(torch.ones(2))
    moody.fails = True
    with pytest.raises(RuntimeError, match="not now"):
        tree.collect()
    moody.fails = False
    collected = tree.collect()
    assert not collected.unchanged
    assert collected.fingerprint != first.fingerprint
    assert "model.lora" in {entry.name for entry in collected.tensors}


def test_a_plain_tensor_of_another_shape_is_a_change() -> None:
    state: dict[str, Any] = {"x": torch.zeros(2)}
    tree = one_rank(state)
    tree.collect()
    state["x"] = torch.zeros(3)
    assert not tree.collect().unchanged


@pytest.mark.parametrize("count", [3, 5_000], ids=["few", "many"])
@pytest.mark.parametrize("change", ["shape", "dtype", "device"])
def test_memory_that_is_swapped_for_another_kind_is_seen(change: str, count: int) -> None:
    class Swappable:
        """As far as a guard looks; ``.data = ...`` to another device needs one."""

        def __init__(self) -> None:
            self.shape, self.dtype, self.device, self.nbytes = (4,), torch.float16, torch.device("cpu"), 8

    tensors: list[Any] = [Swappable() for _ in range(count)]
    guard = TensorGuard(tensors)
    assert guard.stands()
    if change == "shape":
        tensors[-1].shape, tensors[-1].nbytes = (5,), 10
    elif change == "dtype":
        tensors[-1].dtype = torch.bfloat16
    else:
        tensors[-1].device = torch.device("cuda", 0)
    assert not guard.stands()


def test_many_collections_leave_nothing_behind() -> None:
    model, optimizer = trained()
    tree = one_rank({"model": model, "optimizer": optimizer}, auto_rng=True)
    tree.collect()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        tree.collect()
    gc.collect()
    assert len(gc.get_objects()) - before < 200


# structures ------------------------------------------------------------------------------------------------------


def test_a_structure_is_sorted_and_typed() -> None:
    state = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.zeros((), dtype=torch.float8_e4m3fn), "n": 1}
    collected = one_rank(state).collect()
    structure = structure_of(collected, {"n": 512})
    assert [(spec.name, spec.shape, spec.dtype, spec.layout) for spec in structure.tensors] == [
        ("a", (), "float8_e4m3fn", None),
        ("b", (2, 3), "bfloat16", None),
    ]
    assert [(spec.name, spec.capacity) for spec in structure.objects] == [("n", 512)]


def test_any_mapping_is_a_dict() -> None:
    assert names({"a": types.MappingProxyType({"b": 1, "c": torch.zeros(1)})}) == {"a.b", "a.c"}


def _guarded() -> list[torch.Tensor]:
    return [torch.zeros(3, 3), nn.Parameter(torch.ones(4)), torch.zeros(2, dtype=torch.int64)]


@pytest.mark.parametrize("fast", [True, False])
def test_a_guard_sees_shape_and_dtype_change_and_nothing_else(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(compat, "same_kind_check", lambda _: None)
    tensors = _guarded()
    guard = TensorGuard(tensors)
    assert guard.stands()
    tensors[1].requires_grad_(False)
    assert guard.stands()
    assert guard.stands()
    with torch.no_grad():
        tensors[1].add_(1)
        assert guard.stands()
    with torch.inference_mode():
        assert guard.stands()
    assert guard.stands()
    tensors[0].data = torch.zeros(9)
    assert not guard.stands()
    tensors[0].data = torch.zeros(3, 3)
    assert guard.stands()
    tensors[2].data = torch.zeros(2, dtype=torch.int32)
    assert not guard.stands()


def test_many_tensors_are_compared_at_once_where_torch_can() -> None:
    tensors = _guarded()
    check = compat.same_kind_check(tensors)
    assert check is not None
    tensors[0].data = torch.zeros(3, 4)
    assert not check(*tensors)
    assert compat.same_kind_check([]) is None
