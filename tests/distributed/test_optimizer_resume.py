"""Whatever an optimizer does about its state_dict, training goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_kinds import (
    KINDS,
    AddsKeys,
    Attribute,
    Copies,
    Duck,
    Forwarding,
    Lookahead,
    Make,
    Sharpness,
    Silent,
    adamw,
    hooked,
    momentum,
    over,
)
from torch import nn

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


WHOLE = ("halves", "parts")
"""Those that sort the parameters themselves."""


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_state(make: Make, seed: int = 0, *, groups: bool = True) -> dict[str, Any]:
    model = make_model(seed)
    params: Any = list(model.parameters())
    if groups:
        params = [{"params": params[:2], "lr": 0.02}, {"params": params[2:]}]
    return {"model": model, "optimizer": make(params)}


def train(state: dict[str, Any], steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        state["model"](torch.randn(3, 4)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        if "scheduler" in state:
            state["scheduler"].step()


def weights(state: dict[str, Any]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in state["model"].parameters()]


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_before(kind: str, steps: int, tmp_path: Path) -> None:
    make, groups = KINDS[kind], kind not in WHOLE
    state = make_state(make, groups=groups)
    train(state, range(steps))
    holdfast.save(state, tmp_path / "a")
    train(state, range(steps, steps + 4))
    fresh = make_state(make, 1, groups=groups)
    holdfast.load(fresh, tmp_path / "a")
    train(fresh, range(steps, steps + 4))
    assert_equal(weights(state), weights(fresh))
    holdfast.load(state, tmp_path / "a")  # back, in place
    train(state, range(steps, steps + 4))
    assert_equal(weights(state), weights(fresh))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("hooked", "strange", "forwarding-strange")])
def test_with_a_scheduler_at_the_outer_optimizer(kind: str, tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        state = make_state(KINDS[kind], seed, groups=kind not in WHOLE)
        for group in state["optimizer"].param_groups:
            group.setdefault("lr", 0.1)
        state["scheduler"] = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda step: 1 / (1 + step))
        return state

    state = make(0)
    train(state, range(3))
    holdfast.save(state, tmp_path / "a")
    train(state, range(3, 7))
    fresh = make(1)
    holdfast.load(fresh, tmp_path / "a")
    train(fresh, range(3, 7))
    assert_equal(weights(state), weights(fresh))


@pytest.mark.parametrize("kind", KINDS)
def test_staging_does_not_race_with_the_next_steps(kind: str, tmp_path: Path) -> None:
    make, groups = KINDS[kind], kind not in WHOLE
    state = make_state(make, groups=groups)
    config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=20), in_flight=2)
    seen = {}
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        for step in range(1, 6):
            train(state, range(step, step + 1))
            manager.step(step)
            seen[step] = weights(state)
    for step in (1, 3, 5):
        fresh = make_state(make, 1, groups=groups)
        holdfast.load(fresh, tmp_path / f"step-{step}")
        assert_equal(weights(fresh), seen[step])
        train(fresh, range(step + 1, 6))
        assert_equal(weights(fresh), seen[5])


@pytest.mark.parametrize("kind", ["forwarding", "forwarding-twice", "attribute", "silent", "silent-twice", "getattr"])
def test_a_wrapper_is_stored_under_the_names_of_what_it_wraps(kind: str, tmp_path: Path) -> None:
    state = make_state(KINDS[kind])
    train(state, range(2))
    checkpoint = holdfast.save(state, tmp_path / "a")
    name = "optimizer.state.0.weight."
    assert [each for each in checkpoint.tensors if each.startswith(name)]
    inner: Any = momentum if kind == "attribute" else adamw
    plain = make_state(inner, 1)
    holdfast.load(plain, tmp_path / "a")
    train(plain, range(2, 5))
    train(state, range(2, 5))
    assert_equal(weights(state), weights(plain))
    holdfast.save(plain, tmp_path / "b")
    back = make_state(KINDS[kind], 2)
    holdfast.load(back, tmp_path / "b")
    train(back, range(5, 8))
    train(plain, range(5, 8))
    assert_equal(weights(back), weights(plain))


def test_torch_optimizers_are_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kinds = [
        each
        for name in torch.optim.__all__
        if isinstance(each := getattr(torch.optim, name), type)
        and issubclass(each, torch.optim.Optimizer)
        and each is not torch.optim.Optimizer
    ]
    assert len(kinds) >= 14

    def asked(self: Any, *_: Any) -> Any:
        pytest.fail("asked")

    for kind in kinds:
        model = nn.Linear(3, 3, bias=False)
        optimizer = kind(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        if kind not in (torch.optim.SparseAdam, torch.optim.LBFGS):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        from holdfast.state.optimizer_views import needs_reading

        assert not needs_reading(optimizer), kind
        holdfast.save(state, tmp_path / kind.__name__)


def test_names_of_state_and_extras(tmp_path: Path) -> None:
    state = make_state(AddsKeys)
    train(state, range(2))
    found = holdfast.save(state, tmp_path / "a")
    assert {"optimizer.norm", "optimizer.state.2.bias.exp_avg"} <= set(found.tensors)
    assert found.objects["optimizer.count"] == 2
    assert found.objects["optimizer.state.0.weight.extra"] == 2
    stock = state["optimizer"].state_dict()
    assert found.objects["optimizer.param_groups.1.lr"] == stock["param_groups"][1]["lr"]


def test_a_pure_wrapper_is_still_staged_lazily() -> None:
    from holdfast.state.tree import StateTree

    for make, lazy in [
        (over(Forwarding, adamw), True),
        (AddsKeys, True),
        (Copies, False),
        (over(Lookahead, adamw), False),
        (over(Silent, adamw), False),
    ]:
        state = make_state(make)
        train(state, range(1))
        tree = StateTree(state, rank=0, world=1)
        tree.collect()
        again = tree.collect()
        assert again.unchanged
        named = {entry.name: entry.lazy for entry in again.tensors}
        assert named["optimizer.state.0.weight.exp_avg"] is lazy if not isinstance(state["optimizer"], Lookahead) else 1
        assert named["model.0.weight"] is (lazy or make is Copies)


def test_a_duck_that_steps_by_itself_races_with_nothing(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = make_model(seed)
        return {"model": model, "optimizer": Duck(model.parameters())}

    state = make(0)
    seen = {}
    config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=20))
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        for step in range(1, 6):
            train(state, range(step, step + 1))
            manager.step(step)
            seen[step] = weights(state)
    fresh = make(1)
    holdfast.load(fresh, tmp_path / "step-3")
    train(fresh, range(4, 6))
    assert_equal(weights(fresh), seen[5])


# what is refused, or does not fit --------------------------------------------------------------------------------


class Fails(torch.optim.SGD):
    def state_dict(self) -> Any:
        raise RuntimeError("not consolidated")


class GivesList(torch.optim.SGD):
    def state_dict(self) -> Any:
        return [1]


class HasObject(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "closure": print}


class Reserved(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "__delegates__": 1}


class Container(torch.optim.Optimizer):
    """Presents several optimizers as one."""

    def __init__(self, params: Any, *, more: Any = None) -> None:
        params = [param for group in params for param in group["params"]]
        self.optimizers = [adamw(params[:2]), momentum(params[2:])]
        self.more = more
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> Any:
        said: dict[Any, Any] = {"each": [optimizer.state_dict() for optimizer in self.optimizers]}
        return said if self.more is None else {**said, "more": self.more}

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("its optimizers are loaded themselves")


def test_a_container_is_stored_as_its_optimizers_or_refused(tmp_path: Path) -> None:
    state = make_state(Container)
    train(state, range(2))
    holdfast.save(state, tmp_path / "a")
    train(state, range(2, 4))
    fresh = make_state(Container, 1)
    holdfast.load(fresh, tmp_path / "a")
    train(fresh, range(2, 4))
    assert_equal(weights(state), weights(fresh))
    state["optimizer"].more = torch.ones(1)
    with pytest.raises(holdfast.ConfigError, match=r"optimizer: Container .*'more'"):
        holdfast.save(state, tmp_path / "b")


@pytest.mark.parametrize("kind", [Fails, GivesList, HasObject, Reserved])
def test_what_cannot_be_stored_is_refused_by_name(kind: Any, tmp_path: Path) -> None:
    state = make_state(kind)
    with pytest.raises(holdfast.ConfigError, match="optimizer"):
        holdfast.save(state, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    list(itertools.permutations(["plain", "adds-keys", "own-groups", "lookahead"], 2)),
)
def test_another_kind_of_optimizer_is_a_named_mismatch(saved: str, loaded: str, tmp_path: Path) -> None:
    makes: dict[str, Make] = {**KINDS, "plain": adamw}
    state = make_state(makes[saved])
    train(state, range(2))
    holdfast.save(state, tmp_path / "a")
    fresh = make_state(makes[loaded], 1)
    before = copy.deepcopy(weights(fresh))
    with pytest.raises(holdfast.StateMismatch, match="optimizer"):
        holdfast.load(fresh, tmp_path / "a")
    assert_equal(before, weights(fresh))


def test_an_optimizer_that_cannot_be_saved_can_be_left_out(tmp_path: Path) -> None:
    state = make_state(Fails)
    holdfast.save({"model": state["model"]}, tmp_path / "step-1", step=1)
    config = holdfast.CheckpointConfig(exclude_from_loading=["optimizer"])
    fresh = make_state(Fails, 1)
    with holdfast.CheckpointManager(tmp_path, fresh, config=config) as manager:
        assert manager.restore() == 1
    assert_equal(weights(state), weights(fresh))


def test_pipeline_stages_with_wrapped_optimizers(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = make_model(seed)
        stages = [nn.ModuleDict({"a": model[0]}), nn.ModuleDict({"b": model[2]})]
        makes = (over(Forwarding, adamw), lambda params: Sharpness(params, momentum))
        optimizers = [each(list(stage.parameters())) for each, stage in zip(makes, stages, strict=True)]
        return {"model": stages, "optimizer": optimizers, "whole": model}

    def run(state: dict[str, Any], steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            state["whole"](torch.randn(3, 4)).square().sum().backward()
            for optimizer in state["optimizer"]:
                optimizer.param_groups[0]["lr"] *= 0.9
                optimizer.step()
                optimizer.zero_grad()

    state, fresh = make(0), make(1)
    run(state, range(3))
    whole = state.pop("whole")
    found = holdfast.save(state, tmp_path / "a")
    assert "optimizer.param_groups.a.weight.lr" in found.objects
    run({**state, "whole": whole}, range(3, 6))
    other = fresh.pop("whole")
    holdfast.load(fresh, tmp_path / "a")
    run({**fresh, "whole": other}, range(3, 6))
    assert_equal(weights({"model": whole}), weights({"model": other}))


def test_a_partial_load_keeps_what_is_not_stored(tmp_path: Path) -> None:
    state = make_state(adamw)
    train(state, range(2))
    holdfast.save(state, tmp_path / "a")
    fresh = make_state(AddsKeys, 1)
    train(fresh, range(3))
    with pytest.raises(holdfast.StateMismatch, match=r"optimizer\.(count|seen|norm)"):
        holdfast.load(fresh, tmp_path / "a")
    holdfast.load(fresh, tmp_path / "a", strict=False)
    assert fresh["optimizer"].count == 3
    holdfast.save({"model": fresh["model"]}, tmp_path / "b")
    before = copy.deepcopy(fresh["optimizer"].state_dict())
    holdfast.load(fresh, tmp_path / "b", strict=False)
    now = fresh["optimizer"].state_dict()
    assert now["count"] == before["count"]
    assert torch.equal(now["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


def test_a_hook_added_between_saves_counts(tmp_path: Path) -> None:
    state = make_state(adamw)
    train(state, range(2))
    with holdfast.CheckpointManager(tmp_path, state) as manager:
        manager.save(1).result()
        handle = state["optimizer"].register_state_dict_post_hook(lambda _, said: {**said, "late": 7})
        manager.save(2).result()
        handle.remove()
        manager.save(3).result()
    found = [holdfast.open(tmp_path / f"step-{step}").objects.get("optimizer.late") for step in (1, 2, 3)]
    assert found == [None, 7, None]


def test_load_hooks_see_what_was_stored(tmp_path: Path) -> None:
    state = make_state(adamw)
    train(state, range(2))
    holdfast.save(state, tmp_path / "a")
    fresh = make_state(adamw, 1)
    seen: list[Any] = []
    fresh["optimizer"].register_load_state_dict_pre_hook(lambda _, said: seen.append(copy.deepcopy(said)))
    fresh["optimizer"].register_load_state_dict_post_hook(lambda _: seen.append("after"))
    holdfast.load(fresh, tmp_path / "a")
    said, after = seen
    assert after == "after"
    expected = state["optimizer"].state_dict()
    assert said["param_groups"] == expected["param_groups"]
    for index, stored in expected["state"].items():
        assert said["state"][index].keys() == stored.keys()
        assert all(torch.equal(said["state"][index][key], value) for key, value in stored.items())


def test_lists_of_optimizers_with_ways_of_their_own(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = make_model(seed)
        params = list(model.parameters())
        optimizers = [over(Forwarding, adamw)(params[:1]), Sharpness(params[1:2], momentum), hooked(params[2:])]
        return {"model": model, "optimizer": optimizers}

    def run(state: dict[str, Any], steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            state["model"](torch.randn(3, 4)).square().sum().backward()
            for optimizer in state["optimizer"]:
                optimizer.step()
                optimizer.zero_grad()

    state, fresh = make(0), make(1)
    run(state, range(3))
    holdfast.save(state, tmp_path / "a")
    run(state, range(3, 6))
    holdfast.load(fresh, tmp_path / "a")
    run(fresh, range(3, 6))
    assert_equal(weights(state), weights(fresh))


def test_optimizers_in_the_backward(tmp_path: Path) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def make(seed: int) -> dict[str, Any]:
        model = make_model(seed)
        _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.05})
        optimizers = [each for param in model.parameters() for each in param._in_backward_optimizers]  # type: ignore[attr-defined]
        return {"model": model, "optimizer": optimizers}

    def run(state: dict[str, Any], steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            state["model"](torch.randn(3, 4)).square().sum().backward()

    state, fresh = make(0), make(1)
    run(state, range(3))
    holdfast.save(state, tmp_path / "a")
    run(state, range(3, 6))
    holdfast.load(fresh, tmp_path / "a")
    run(fresh, range(3, 6))
    assert_equal(weights(state), weights(fresh))


def test_nested_options_keep_their_kinds(tmp_path: Path) -> None:
    state, fresh = make_state(adamw), make_state(adamw, 1)
    state["optimizer"].param_groups[0]["own"] = {1: {}, "x": [{2: 3}]}
    holdfast.save(state, tmp_path / "a")
    holdfast.load(fresh, tmp_path / "a")
    assert fresh["optimizer"].param_groups[0]["own"] == {1: {}, "x": [{2: 3}]}


def test_group_dictionaries_stay_the_objects_they_are(tmp_path: Path) -> None:
    state = make_state(over(Attribute, adamw))
    train(state, range(2))
    holdfast.save(state, tmp_path / "a")
    groups = list(state["optimizer"].param_groups)
    holdfast.load(state, tmp_path / "a")
    for group, outer, inner in zip(
        groups, state["optimizer"].param_groups, state["optimizer"].inner.param_groups, strict=True
    ):
        assert group is outer is inner


@pytest.fixture
def accelerated() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    yield accelerate.Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_accelerate(accelerated: Any, tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = make_model(seed)
        model, optimizer = accelerated.prepare(model, adamw(model.parameters()))
        return {"model": model, "optimizer": optimizer}

    state, fresh = make(0), make(1)
    train(state, range(3))
    checkpoint = holdfast.save(state, tmp_path / "a")
    assert "optimizer.state.0.weight.exp_avg" in checkpoint.tensors
    train(state, range(3, 6))
    holdfast.load(fresh, tmp_path / "a")
    train(fresh, range(3, 6))
    assert_equal(weights(state), weights(fresh))
