"""Optimizers as users write them: wrappers that forward or don't, ones with keys or hooks of their own.

Each maker takes parameters (or groups of them) and gives an optimizer with a `step`, as torch's classes do.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

Make = Callable[[Any], Any]


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.05, weight_decay=0.1)


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9)


class Forwarding(Optimizer):
    """The shape of torchft's `OptimizerWrapper`: never initialized as an Optimizer, everything is the inner one's."""

    def __init__(self, optim: Any) -> None:
        self.optim = optim

    def add_param_group(self, param_group: Any) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> Any:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optim.step()

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state


class Attribute(Optimizer):
    """Refers to the groups that the inner optimizer had when it was made, as PostLocalSGDOptimizer does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


class Silent(Optimizer):
    """Made from the inner optimizer's groups; its `state_dict` is torch's, which doesn't know of the inner one."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, getattr(inner, "defaults", {}))
        self._optimizer = inner

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step()


class OwnGroups(Optimizer):
    """Has group dictionaries of its own, which it hands to the inner optimizer at each step."""

    def __init__(self, params: Any, make: Make) -> None:
        super().__init__(_groups(params), {"lr": 0.05})
        self.base_optimizer = make([{"params": list(group["params"])} for group in self.param_groups])

    def step(self, closure: Any = None) -> Any:
        for mine, inner in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            inner["lr"] = mine["lr"]
        return self.base_optimizer.step()


class OwnGroupsForwarding(OwnGroups):
    def state_dict(self) -> Any:
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base_optimizer.load_state_dict(state_dict)


class Getattr(Optimizer):
    """Forwards what it doesn't have; torch's `state_dict` is what it does have."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


class Lookahead(Optimizer):
    """State of its own beside the inner optimizer's: slow weights, and how many steps were made."""

    def __init__(self, optimizer: Any, every: int = 2) -> None:
        self.optimizer = optimizer
        self.every = every
        self.steps = 0
        self.slow = {
            index: [param.detach().clone() for param in group["params"]]
            for index, group in enumerate(optimizer.param_groups)
        }

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.every == 0:
            for index, group in enumerate(self.param_groups):
                for slow, fast in zip(self.slow[index], group["params"], strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)

    def state_dict(self) -> Any:
        return {"fast": self.optimizer.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["fast"])
        self.slow, self.steps = state_dict["slow"], state_dict["steps"]


class LookaheadInState(Lookahead):
    """Adds to what the inner optimizer's `state_dict` has."""

    def state_dict(self) -> Any:
        return {**self.optimizer.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.slow, self.steps = state_dict["slow"], state_dict["steps"]


class Sharpness(Optimizer):
    """SAM, as it is usually written: its `state_dict` lacks the base optimizer's state; its load links the groups."""

    def __init__(self, params: Any, make: Make) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = make(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                old = self.state[param].get("old")
                self.state[param]["old"] = param.detach().clone()
                if old is not None:
                    param.add_(param - old, alpha=0.1)
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Halves(Optimizer):
    """Two optimizers, each for some of the parameters."""

    def __init__(self, params: Any) -> None:
        params = [param for group in _groups(params) for param in group["params"]]
        super().__init__(params, {})
        self.large = momentum([param for param in params if param.ndim > 1])
        self.small = {"adam": adamw([param for param in params if param.ndim <= 1])}

    def step(self, closure: Any = None) -> None:
        self.large.step()
        self.small["adam"].step()


class Parts(Halves):
    """Gives a list of what its two optimizers give, and a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        for group in self.large.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        super().step()

    def state_dict(self) -> Any:
        return {"parts": [self.small["adam"].state_dict(), self.large.state_dict()], "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        small, large = state_dict["parts"]
        self.small["adam"].load_state_dict(small)
        self.large.load_state_dict(large)
        self.count = state_dict["count"]


class AddsKeys(AdamW):
    """A counter, a tensor and nested values at the top; a number for each parameter; an option of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.count = 0
        self.norm = torch.zeros(3)
        self.seen: Counter[int] | Any = Counter()
        self.extra: dict[torch.Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.norm = self.norm + self.count
        self.seen[self.count] = {"half": self.count / 2, "set": {self.count}}
        for group in self.param_groups:
            for param in group["params"]:
                self.extra[param] = self.extra.get(param, 0) + 1
                param.mul_(1 - 0.001 * self.count * self.extra[param] - 1e-4 * float(self.norm.sum()))
        super().step()

    def state_dict(self) -> Any:
        said = super().state_dict()
        order = [param for group in self.param_groups for param in group["params"]]
        state = {
            index: {**said["state"].get(index, {}), "extra": self.extra.get(param, 0)}
            for index, param in enumerate(order)
            if index in said["state"]
        }
        groups = [{**group, "own": {1: [len(group["params"])]}} for group in said["param_groups"]]
        return {"state": state, "param_groups": groups, "count": self.count, "norm": self.norm, "seen": self.seen}

    def load_state_dict(self, state_dict: Any) -> None:
        state_dict = copy.copy(state_dict)
        self.count, self.norm = state_dict.pop("count"), state_dict.pop("norm")
        self.seen = state_dict.pop("seen")
        assert all(type(key) is int for key in self.seen)
        assert isinstance(self.seen, Counter)
        order = [param for group in self.param_groups for param in group["params"]]
        self.extra = {order[index]: state["extra"] for index, state in state_dict["state"].items()}
        state = {
            index: {key: value for key, value in state.items() if key != "extra"}
            for index, state in state_dict["state"].items()
        }
        assert all(group["own"] == {1: [len(group["params"])]} for group in state_dict["param_groups"])
        groups = [{k: v for k, v in group.items() if k != "own"} for group in state_dict["param_groups"]]
        super().load_state_dict({"state": state, "param_groups": groups})


class Copies(AdamW):
    """Gives copies of its state in another form, and takes only these back."""

    def state_dict(self) -> Any:
        said = super().state_dict()
        return {
            **said,
            "state": {
                index: {key: value.double() if value.ndim else value.clone() for key, value in state.items()}
                for index, state in said["state"].items()
            },
        }

    def load_state_dict(self, state_dict: Any) -> None:
        for state in self.state.values():
            for value in state.values():
                value.zero_()
        super().load_state_dict(state_dict)


class WideMoments(SGD):
    """Moments of more bits than the parameters have: torch's `load_state_dict` would round them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    mean = state.setdefault("mean", torch.zeros_like(param, dtype=torch.float64))
                    mean.lerp_(param.grad.double(), 0.1)
                    param.sub_((group["lr"] * mean).to(param.dtype))


def hooked(params: Any) -> Optimizer:
    """Hooks that add a key and rename one, and undo that."""
    optimizer = adamw(params)
    optimizer.tag = 0  # type: ignore[attr-defined]

    def after(optimizer: Any, said: Any) -> Any:
        state = {
            index: {("m" if key == "exp_avg" else key): value for key, value in state.items()}
            for index, state in said["state"].items()
        }
        return {**said, "state": state, "tag": optimizer.tag}

    def before_load(optimizer: Any, said: Any) -> Any:
        optimizer.tag = said["tag"]
        state = {
            index: {("exp_avg" if key == "m" else key): value for key, value in state.items()}
            for index, state in said["state"].items()
        }
        return {"state": state, "param_groups": said["param_groups"]}

    def count(optimizer: Any, *_: Any) -> None:
        optimizer.tag += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + optimizer.tag)

    optimizer.register_state_dict_post_hook(after)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_step_pre_hook(count)
    return optimizer


class Strange(AdamW):
    """State under keys that are no parameters, made at the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared = self.state.setdefault("global", {"n": 0, "sum": torch.zeros(2), "seen": set()})  # type: ignore[call-overload]
        shared["n"] += 1
        shared["sum"] += 1
        shared["seen"].add(shared["n"])
        self.state.setdefault((1, "a.b"), {})["twice"] = shared["sum"]  # type: ignore[call-overload]
        for group in self.param_groups:
            group["lr"] = 0.05 / (float(shared["sum"][0]) + len(shared["seen"]))
        super().step()


class Duck:
    """Not one of torch's: looks like an optimizer, steps by itself."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.moments = [torch.zeros_like(param) for param in self.param_groups[0]["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, moment in zip(self.param_groups[0]["params"], self.moments, strict=True):
            if param.grad is not None:
                moment.lerp_(param.grad, 0.5)
                param.sub_(moment, alpha=self.param_groups[0]["lr"])

    def state_dict(self) -> Any:
        groups = [{"lr": self.param_groups[0]["lr"], "params": list(range(len(self.moments)))}]
        return {"state": dict(enumerate(self.moments)), "param_groups": groups}

    def load_state_dict(self, state_dict: Any) -> None:
        self.param_groups[0]["lr"] = state_dict["param_groups"][0]["lr"]
        for index, moment in enumerate(self.moments):
            moment.copy_(state_dict["state"][index])


def _groups(params: Any) -> Any:
    params = list(params)
    return [dict(group) for group in params] if isinstance(params[0], dict) else [{"params": params}]


def over(wrapper: Any, *makes: Make) -> Make:
    """The wrapper around what the makers make, the last one's innermost."""

    def make(params: Any) -> Any:
        *outer, inner = makes
        made = inner(params)
        for each in reversed(outer):
            made = each(made)
        return wrapper(made)

    return make


KINDS: dict[str, Make] = {
    "forwarding": over(Forwarding, adamw),
    "forwarding-twice": over(Forwarding, Forwarding, adamw),
    "attribute": over(Attribute, momentum),
    "attribute-twice": over(Attribute, Forwarding, adamw),
    "silent": over(Silent, adamw),
    "silent-twice": over(Silent, Silent, adamw),
    "silent-over-forwarding": over(Silent, Forwarding, momentum),
    "silent-over-keys": over(Silent, AddsKeys),
    "forwarding-silent": over(Forwarding, Silent, adamw),
    "own-groups": lambda params: OwnGroups(params, adamw),
    "own-groups-forwarding": lambda params: OwnGroupsForwarding(params, momentum),
    "getattr": over(Getattr, adamw),
    "lookahead": over(Lookahead, adamw),
    "lookahead-in-state": over(LookaheadInState, momentum),
    "forwarding-lookahead": over(Forwarding, Lookahead, adamw),
    "sharpness": lambda params: Sharpness(params, adamw),
    "halves": Halves,
    "parts": Parts,
    "adds-keys": AddsKeys,
    "forwarding-adds-keys": over(Forwarding, AddsKeys),
    "copies": Copies,
    "forwarding-wide": over(Forwarding, lambda params: WideMoments(params, lr=0.05)),
    "hooked": hooked,
    "strange": Strange,
    "forwarding-strange": over(Forwarding, Strange),
}


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
