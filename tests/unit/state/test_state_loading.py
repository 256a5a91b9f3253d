"""Loading: what comes back, what is missing, unexpected or mismatched, and what other writers' directories hold."""

from __future__ import annotations

import collections
import copy
import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from _stored import Stored, assert_fits, one_rank
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.errors import StateMismatch
from holdfast.state.entries import PerRank
from holdfast.state.flatten import flatten_exactly, rebuild
from holdfast.state.load_plan import mismatch_error
from holdfast.state.restore_plan import place_steps
from holdfast.state.rng import RNG


def make(seed: int = 0, make_optimizer: Any = torch.optim.AdamW, steps: int = 2) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = make_optimizer(model.parameters(), lr=0.1 + seed)
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


OPTIMIZERS = [
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.ASGD,
    torch.optim.Adafactor,
    lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    lambda params, lr: torch.optim.Adam(params, torch.tensor(lr), foreach=False),
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_optimizers_come_back_into_fresh_ones(make_optimizer: Any, steps: int) -> None:
    model, optimizer = make(0, make_optimizer)
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer}))
    other, fresh = make(1, make_optimizer, steps=steps)
    loading = stored.load(one_rank({"model": other, "optimizer": fresh}))
    assert_fits(loading)
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict(), fresh.state_dict())
    for _ in range(2):
        torch.manual_seed(7)
        train(model, optimizer)
        torch.manual_seed(7)
        train(other, fresh)
    assert_same(model.state_dict(), other.state_dict())


def test_loading_fills_in_place() -> None:
    model, optimizer = make(0)
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer}))
    other, fresh = make(1)
    weight, moment = other[0].weight, fresh.state[other[0].weight]["exp_avg"]
    stored.load(one_rank({"model": other, "optimizer": fresh}))
    assert other[0].weight is weight
    assert fresh.state[weight]["exp_avg"] is moment
    assert all(param.grad is None for param in other.parameters())


def test_state_saved_before_the_first_step_empties_the_optimizer() -> None:
    model, optimizer = make(0, steps=0)
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer}))
    other, used = make(1, steps=2)
    assert_fits(stored.load(one_rank({"model": other, "optimizer": used})))
    assert not used.state


def test_options_are_set_by_group() -> None:
    model, optimizer = make(0)
    optimizer.param_groups[0]["initial_lr"] = 0.5
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer}))
    other, fresh = make(1)
    fresh.param_groups[0]["novel"] = 1
    assert_fits(stored.load(one_rank({"model": other, "optimizer": fresh})))
    group = fresh.param_groups[0]
    assert group["lr"] == optimizer.param_groups[0]["lr"]
    assert group["initial_lr"] == 0.5
    assert group["betas"] == (0.9, 0.999)
    assert group["novel"] == 1
    assert group["params"] == list(other.parameters())


def in_groups(seed: int, *groups: list[str], steps: int = 1) -> dict[str, Any]:
    """A model, and an optimizer with a group for each list of names; the groups' options tell them apart."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    named = dict(model.named_parameters())
    options = [
        {
            "params": [named[name] for name in names],
            "weight_decay": seed + 0.1 * len(names),
            "lr": torch.tensor(seed + len(names) / 8),
        }
        for names in groups
    ]
    optimizer = torch.optim.AdamW(options, foreach=False)
    for _ in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


WEIGHT, REST = ["0.weight"], ["0.bias", "1.weight", "1.bias"]


def by_stock(state: dict[str, Any]) -> Stored:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model, optimizer = state["model"], state["optimizer"]
    given = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return Stored.of_stock(given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", [lambda state: Stored().save(one_rank(state)), by_stock], ids=["holdfast", "stock"])
@pytest.mark.parametrize("steps", [0, 1])
def test_groups_are_known_by_their_parameters(store: Any, steps: int) -> None:
    saved = in_groups(0, WEIGHT, REST, steps=steps)
    stored = store(saved)
    other = in_groups(1, REST, WEIGHT)
    rates = [group["lr"] for group in other["optimizer"].param_groups]
    assert_fits(stored.load(one_rank(other)))
    first, second = saved["optimizer"].param_groups
    for group, expected in zip(other["optimizer"].param_groups, (second, first), strict=True):
        assert group["weight_decay"] == expected["weight_decay"]
        assert group["lr"] == expected["lr"]
    assert [group["lr"] for group in other["optimizer"].param_groups] == rates
    assert all(group["lr"] is rate for group, rate in zip(other["optimizer"].param_groups, rates, strict=True))
    if steps:
        train_both = [saved, other]
        for state in train_both:
            torch.manual_seed(3)
            state["optimizer"].zero_grad()
            state["model"](torch.randn(3, 4)).square().sum().backward()
            state["optimizer"].step()
        assert_same(saved["model"].state_dict(), other["model"].state_dict())


def test_a_group_of_parameters_of_two_groups_has_no_options() -> None:
    stored = Stored().save(one_rank(in_groups(0, WEIGHT, REST)))
    with pytest.raises(StateMismatch, match=r"optimizer\.param_groups\.0 .*0\.bias.* groups \[0, 1\]") as caught:
        stored.load(one_rank(in_groups(1, ["0.weight", "0.bias"], ["1.weight", "1.bias"])))
    assert caught.value.mismatched == ("optimizer.param_groups.0",)


def test_a_group_that_was_split_keeps_its_options() -> None:
    saved = in_groups(0, WEIGHT, REST)
    stored = Stored().save(one_rank(saved))
    other = in_groups(1, REST[:1], WEIGHT)
    stored.load(one_rank(other))
    decay = [group["weight_decay"] for group in other["optimizer"].param_groups]
    assert decay == [saved["optimizer"].param_groups[at]["weight_decay"] for at in (1, 0)]


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_steps_go_where_the_stored_options_want_them(flag: str) -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}
    place_steps(optimizer)
    assert optimizer.state[parameter]["step"].device.type == "cpu"
    optimizer.param_groups[0][flag] = True
    place_steps(optimizer)
    assert optimizer.state[parameter]["step"].device.type == "meta"


@pytest.mark.parametrize(
    "inner",
    [
        {"pre": {0: torch.ones(1), 1: [torch.ones(2), 5]}, "empty": {}, "deep": [{"none": {}, 2.5: 1}]},
        {0: torch.ones(1), "n": 3},
        {(0, 1): {"x": torch.ones(2)}, None: {}},
    ],
)
def test_optimizer_state_keeps_its_keys_and_empty_parts(inner: dict[Any, Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = copy.deepcopy(inner)
    optimizer.state[model.bias] = {}
    tree = one_rank({"model": model, "o": optimizer})
    stored = Stored().save(tree)
    assert not any(name.startswith("o.state.bias") for name in stored.names)
    other = torch.optim.SGD(model.parameters())
    assert_fits(stored.load(one_rank({"model": model, "o": other})))
    assert_same(dict(other.state[model.weight]), inner)
    optimizer.state[model.weight]["added"] = {3: 4}
    again = Stored().save(tree)
    other = torch.optim.SGD(model.parameters())
    assert_fits(again.load(one_rank({"model": model, "o": other})))
    assert_same(dict(other.state[model.weight]), {**inner, "added": {3: 4}})


def test_nested_and_global_optimizer_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"pre": {0: torch.ones(1), 1: [torch.ones(2), 5]}, "n": 3}
    stored = Stored().save(one_rank({"model": model, "o": optimizer}))
    before = copy.deepcopy(dict(optimizer.state[model.weight]))
    optimizer.state[model.weight] = {"pre": {0: torch.zeros(1), 1: [torch.zeros(2), 0]}, "n": 0}
    assert_fits(stored.load(one_rank({"model": model, "o": optimizer})))
    assert_same(dict(optimizer.state[model.weight]), before)


def test_a_step_count_may_be_stored_as_a_number() -> None:
    model, optimizer = make(0)
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer}))
    for name in [name for name in stored.tensors if name.endswith(".step")]:
        stored.objects[name] = int(stored.tensors.pop(name))
    other, fresh = make(1, steps=1)
    assert_fits(stored.load(one_rank({"model": other, "optimizer": fresh})))
    assert fresh.state[other[0].weight]["step"] == torch.tensor(2.0)


def test_schedulers_come_back_with_their_own_kinds_of_keys() -> None:
    def build(milestones: list[int]) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)

    optimizer, scheduler = build([2, 4, 4])
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    stored = Stored().save(one_rank({"optimizer": optimizer, "lr": scheduler}))
    other, fresh = build([7])
    assert_fits(stored.load(one_rank({"optimizer": other, "lr": fresh})))
    assert fresh.milestones == collections.Counter({4: 2, 2: 1})
    assert fresh.last_epoch == 3
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class Keeps:
    def __init__(self, state: Any = None) -> None:
        self.state = state if state is not None else {}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_stateful_object_gets_back_exactly_what_it_gave() -> None:
    given_state = {"a": {}, "b": {1: 2, "x": [{}, {3: torch.ones(2)}]}, "t": (1, 2), "e": [], "n": None, "z": {"q": {}}}
    stored = Stored().save(one_rank({"thing": Keeps(given_state), "other": 1}))
    fresh = Keeps({"b": {"stale": 4}})
    assert_fits(stored.load(one_rank({"thing": fresh, "other": 0})))
    assert_same(fresh.state, {**given_state})


def test_plain_values_and_tensors_are_put_where_they_were() -> None:
    tensor = torch.arange(3.0)
    state: dict[str, Any] = {
        "train": {"step": 7, "losses": [1.0, 2.0], "t": (1, [2])},
        "n": 3,
        "x": tensor,
        "l": [{"a": 1}],
    }
    stored = Stored().save(one_rank(state))
    losses: list[float] = []
    inner = {"step": 0, "losses": losses, "t": None}
    fresh: dict[str, Any] = {"train": inner, "n": 0, "x": torch.zeros(3), "l": [{"a": 0}]}
    place = fresh["x"]
    assert_fits(stored.load(one_rank(fresh)))
    assert fresh["train"] is inner
    assert inner == {"step": 7, "losses": [1.0, 2.0], "t": (1, [2])}
    assert losses == [1.0, 2.0]
    assert fresh["n"] == 3
    assert fresh["x"] is place
    assert torch.equal(place, tensor)
    assert fresh["l"] == [{"a": 1}]


def test_an_empty_dict_is_filled() -> None:
    stored = Stored().save(one_rank({"train": {"step": 7, "deep": {"x": torch.ones(1)}}}))
    progress: dict[str, Any] = {}
    assert_fits(stored.load(one_rank({"train": progress})))
    assert_same(progress, {"step": 7, "deep": {"x": torch.ones(1)}})


def test_a_number_and_a_tensor_stand_in_for_each_other() -> None:
    stored = Stored().save(one_rank({"a": torch.tensor(5), "b": 6}))
    fresh: dict[str, Any] = {"a": 0, "b": torch.tensor(0)}
    assert_fits(stored.load(one_rank(fresh)))
    assert fresh["a"] == 5
    assert not isinstance(fresh["a"], torch.Tensor)
    assert torch.equal(fresh["b"], torch.tensor(6))


def test_a_read_only_mapping_is_a_mismatch() -> None:
    stored = Stored().save(one_rank({"a": {"b": 1}}))
    loading = stored.plan(one_rank({"a": types.MappingProxyType({"b": 0})}))
    assert loading.mismatched == ("a.b",)


def test_extra_state() -> None:
    class Counts(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    first, second = Counts(1, 1), Counts(1, 1)
    first.seen = {"n": 3, "t": torch.ones(2)}
    stored = Stored().save(one_rank({"m": nn.Sequential(first)}))
    assert "m.0._extra_state.n" in stored.names
    assert_fits(stored.load(one_rank({"m": nn.Sequential(second)})))
    assert_same(second.seen, first.seen)


def test_what_does_not_fit_is_named_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stored = Stored().save(one_rank({"model": model, "n": 1, "extra": 2}))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(1, 1))
    before = copy.deepcopy(other.state_dict())
    loading = stored.plan(one_rank({"model": other, "n": 0, "m": 0}))
    assert loading.missing == ("m", "model.2.bias", "model.2.weight")
    assert loading.mismatched == ("model.1.bias", "model.1.weight")
    assert loading.unexpected == ()
    assert "[4, 4]" in loading.details["model.1.weight"]
    assert "[3, 4]" in loading.details["model.1.weight"]
    assert_same(other.state_dict(), before)
    smaller = stored.plan(one_rank({"model": nn.Sequential(nn.Linear(4, 4)), "n": 0}))
    assert smaller.unexpected == ("model.1.bias", "model.1.weight")
    error = mismatch_error("ckpt", missing=loading.missing, mismatched=loading.mismatched, details=loading.details)
    assert isinstance(error, StateMismatch)
    assert "model.1.weight (stored as [4, 4], the state has [3, 4])" in str(error)


def test_what_fits_is_loaded_when_the_rest_is_let_go() -> None:
    model, optimizer = make(0)
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer}))
    other, fresh = make(1)
    other.append(nn.Linear(1, 1))
    fresh.add_param_group({"params": list(other[3].parameters())})
    loading = stored.load(one_rank({"model": other, "optimizer": fresh}))
    assert loading.missing == ("model.3.bias", "model.3.weight", "optimizer.param_groups.1")
    assert torch.equal(other[0].weight, model[0].weight)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_excluded_keys_are_neither_wanted_nor_unexpected() -> None:
    model, optimizer = make(0)
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer, "n": 1}))
    state = {"model": make(1)[0], "optimizer": make(1, torch.optim.Adafactor)[1], "n": 0}
    loading = stored.plan(one_rank(state), exclude={"optimizer"})
    assert_fits(loading)
    assert not any(name.startswith("optimizer") for name in loading.objects)


def test_model_only() -> None:
    model, optimizer = make(0)
    stored = Stored().save(one_rank({"model": model, "optimizer": optimizer, "n": 1}))
    loading = stored.plan(one_rank({"model": model, "optimizer": optimizer, "n": 0}), model_only=True)
    assert_fits(loading)
    assert loading.objects == ()
    assert {item.name for item in loading.tensors} == {name for name in stored.tensors if name.startswith("model.")}


def test_dtypes_may_differ() -> None:
    stored = Stored().save(one_rank({"m": nn.Linear(2, 2)}))
    other = nn.Linear(2, 2, dtype=torch.bfloat16)
    assert_fits(stored.load(one_rank({"m": other})))
    assert other.weight.dtype == torch.bfloat16


# what is each rank's own -----------------------------------------------------------------------------------------


class Loader(Keeps): ...


def test_generators_continue_exactly() -> None:
    tree = one_rank({"n": 1}, auto_rng=True)
    stored = Stored().save(tree)
    assert "rng.rank-00000.torch" in stored.tensors
    expected = random.random(), np.random.rand(), torch.rand(1)
    stored.load(tree)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_each_rank_gets_its_own_back() -> None:
    stored = Stored()
    for rank in range(2):
        stored.save(one_rank({"own": PerRank({"x": rank}), "dataloader": Loader({"pos": rank})}, rank=rank, world=2))
    assert stored.objects["dataloader.rank-00001.pos"] == 1
    for rank in range(2):
        state = {"own": PerRank({"x": None}), "dataloader": Loader({"pos": None})}
        assert_fits(stored.load(one_rank(state, rank=rank, world=2), stored_world=2))
        assert (state["own"].value["x"], state["dataloader"].state["pos"]) == (rank, rank)


def test_a_per_rank_plain_value_is_replaced() -> None:
    stored = Stored().save(one_rank({"own": PerRank(4)}))
    own = PerRank(0)
    assert_fits(stored.load(one_rank({"own": own})))
    assert own.value == 4


def test_another_world_size_derives_generators() -> None:
    stored = Stored().save(one_rank({"n": 1}, rank=0, world=2, auto_rng=True))
    stored.save(one_rank({"n": 1}, rank=1, world=2, auto_rng=True))
    drawn = []
    for rank in (0, 1, 2, 0):
        assert_fits(stored.load(one_rank({"n": 1}, rank=rank, world=3, auto_rng=True), stored_world=2))
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


def test_another_world_size_needs_a_hook() -> None:
    stored = Stored()
    for rank in range(2):
        stored.save(one_rank({"dataloader": Loader({"pos": rank, "t": torch.full((1,), rank)})}, rank=rank, world=2))
    loading = stored.plan(one_rank({"dataloader": Loader()}), stored_world=2)
    assert loading.mismatched == ("dataloader.rank-*",)
    assert "saved by 2 ranks" in loading.details["dataloader.rank-*"]
    assert_fits(stored.plan(one_rank({"dataloader": Loader()}), exclude={"dataloader"}))

    class Reshards(Loader):
        def reshard_state_dict(self, states: list[Any], rank: int, world: int) -> Any:
            return {
                "pos": sum(state["pos"] for state in states),
                "t": [state["t"] for state in states],
                "of": (rank, world),
            }

    loader = Reshards({"pos": 9, "t": torch.zeros(1)})
    assert_fits(stored.load(one_rank({"dataloader": loader}), stored_world=2))
    assert_same(loader.state, {"pos": 1, "t": [torch.tensor([0]), torch.tensor([1])], "of": (0, 1)})


def test_generators_are_not_asked_of_a_foreign_checkpoint() -> None:
    stored = Stored().save(one_rank({"n": 1}))
    assert_fits(stored.load(one_rank({"n": 0}, auto_rng=True)))
    kept = Stored().save(one_rank({"n": 1}, auto_rng=True))
    loading = kept.load(one_rank({"n": 0}))
    assert_fits(loading)


def test_explicit_rng_that_is_not_stored_is_missing() -> None:
    stored = Stored().save(one_rank({"n": 1}))
    assert stored.plan(one_rank({"n": 0, "rng": RNG()})).missing == ("rng.rank-*",)


# what others have written ----------------------------------------------------------------------------------------


def stock(model: nn.Module, optimizer: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(model, optimizer, options=StateDictOptions(**options))


LAYOUTS = {
    "stock": lambda m, o: dict(zip(("model", "optimizer"), stock(m, o), strict=True)),
    "torchtitan": lambda m, o: {
        **stock(m, o)[0],
        "optimizer": stock(m, o, flatten_optimizer_state_dict=True)[1],
    },
    "flattened": lambda m, o: dict(
        zip(("model", "optimizer"), stock(m, o, flatten_optimizer_state_dict=True), strict=True)
    ),
    "plain": lambda m, o: {"model": m.state_dict(), "optimizer": o.state_dict()},
    "bare": lambda m, o: {**stock(m, o)[0], **stock(m, o)[1]},
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("with_paths", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_foreign_layouts(layout: str, *, with_paths: bool, steps: int) -> None:
    model, optimizer = make(0)
    stored = Stored.of_stock(LAYOUTS[layout](model, optimizer))
    if not with_paths:
        stored.paths = {}
    other, fresh = make(1, steps=steps)
    loading = stored.load(one_rank({"model": other, "optimizer": fresh}, auto_rng=True))
    assert_fits(loading)
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict(), fresh.state_dict())


def test_what_we_name_stock_can_be_asked_for() -> None:
    model, optimizer = make(0)
    wanted = Stored.of_stock(LAYOUTS["stock"](model, optimizer)).names
    assert Stored().save(one_rank({"model": model, "optimizer": optimizer})).names == wanted


def test_a_tied_weight_stored_once_is_enough() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    stored = Stored().save(one_rank({"model": model}))
    del stored.tensors["model.1.weight"]
    assert_fits(stored.plan(one_rank({"model": model})))


# nested values, in general ---------------------------------------------------------------------------------------

keys = st.one_of(
    st.text(st.characters(codec="ascii", exclude_characters="."), min_size=1).filter(
        lambda key: key not in {"rank-*", "__keys__"}
    ),
    st.integers(-3, 300),
)
values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.tuples(st.integers())),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).filter(lambda made: len({str(key) for key in made}) == len(made)),
    ),
    max_leaves=12,
)  # fmt: skip


@example(value=[{}], now=[{"0": {}}])
@given(values, values)
def test_rebuild_undoes_flatten_whatever_is_there_now(value: Any, now: Any) -> None:
    leaves: dict[Any, Any] = {}
    flatten_exactly((), value, leaves.__setitem__)
    rebuilt = rebuild(now, copy.deepcopy(leaves))
    if not isinstance(now, dict):
        assert rebuilt == value
    assert rebuild(None, leaves) == value


def test_elements_that_share_memory_are_refused_before_anything_is_read(tmp_path: Any) -> None:
    """torch can't write to them; of values that stand for themselves new ones are made."""

    def state(fill: float, *, expanded: bool = True) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, fill)
        row = torch.full((1, 4), fill)
        model.register_buffer("row", row.expand(5, 4) if expanded else row.repeat(5, 1))
        model.register_buffer("one", row.expand(1, 4))
        return {"model": model, "plain": torch.full((1,), fill).expand(7)}

    holdfast.save(state(1.0), tmp_path / "one")
    loaded = state(2.0)
    with pytest.raises(StateMismatch, match=r"model\.row \(its elements share memory here.*clone\(\)") as caught:
        holdfast.load(loaded, tmp_path / "one")
    assert "model.row" in caught.value.mismatched
    assert bool((loaded["model"].weight == 2.0).all())
    loaded = state(2.0, expanded=False)
    del loaded["plain"]
    holdfast.load(loaded, tmp_path / "one")
    assert_same(dict(loaded["model"].named_buffers()), dict(state(1.0)["model"].named_buffers()))
